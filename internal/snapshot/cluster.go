package snapshot

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// What a cluster adds to the facts of a machine: lists of objects, kept as
// cluster/KIND.json, and the ends of the logs of its pods, kept as
// logs/NAMESPACE/POD/CONTAINER.log and CONTAINER.previous.log.
const (
	clusterDir = "cluster/"
	logDir     = "logs/"

	logSuffix      = ".log"
	previousSuffix = ".previous.log"
)

// LogName names the log of one container of a pod.
type LogName struct {
	Namespace, Pod, Container string
	// Previous is the log of the container's run before the present one.
	Previous bool
}

// Place is where the log stands in a snapshot.
func (n LogName) Place() string {
	suffix := logSuffix
	if n.Previous {
		suffix = previousSuffix
	}
	return logDir + n.Namespace + "/" + n.Pod + "/" + n.Container + suffix
}

// parseLogName reads the place of a log.
func parseLogName(place string) (LogName, bool) {
	rest, ok := strings.CutPrefix(place, logDir)
	parts := strings.Split(rest, "/")
	if !ok || len(parts) != 3 {
		return LogName{}, false
	}
	n := LogName{Namespace: parts[0], Pod: parts[1]}
	if container, found := strings.CutSuffix(parts[2], previousSuffix); found {
		n.Container, n.Previous = container, true
	} else if n.Container, found = strings.CutSuffix(parts[2], logSuffix); !found {
		return LogName{}, false
	}
	return n, n.Container != ""
}

// resourceName is a kind of objects as the API server's paths name it: "pods" for
// "Pod", "pod" and "pods".
func resourceName(kind string) string {
	name := strings.ToLower(kind)
	base, group, grouped := strings.Cut(name, ".")
	switch {
	case strings.HasSuffix(base, "ss"):
		base += "es"
	case strings.HasSuffix(base, "s"):
	case strings.HasSuffix(base, "cy"):
		base = strings.TrimSuffix(base, "y") + "ies"
	default:
		base += "s"
	}
	if grouped {
		return base + "." + group
	}
	return base
}

// AddCluster puts a list of objects in, as the API server returns it: an object with
// the field "items", or the items alone.
func (s *Snapshot) AddCluster(kind string, list json.RawMessage) {
	s.cluster[resourceName(kind)] = list
}

// Cluster decodes the items of one kind into a pointer to a slice and says whether
// they were had.
func (s *Snapshot) Cluster(kind string, items any) (State, string) {
	name := resourceName(kind)
	raw, ok := s.cluster[name]
	if !ok {
		for _, place := range []string{clusterDir + name, strings.TrimSuffix(clusterDir, "/")} {
			if why, bad := s.Manifest.Unreadable[place]; bad {
				return Unreadable, why
			}
		}
		return Absent, ""
	}
	if err := decodeItems(raw, items); err != nil {
		return Unreadable, err.Error()
	}
	// Part of a list can have been had before its deadline.
	if why, bad := s.Manifest.Unreadable[clusterDir+name]; bad {
		return Present, why
	}
	return Present, ""
}

func decodeItems(raw json.RawMessage, items any) error {
	if raw = bytes.TrimSpace(raw); len(raw) > 0 && raw[0] == '[' {
		if err := json.Unmarshal(raw, items); err != nil {
			return fmt.Errorf("reading a list: %w", err)
		}
		return nil
	}
	var list struct {
		Items json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return fmt.Errorf("reading a list: %w", err)
	}
	if len(list.Items) == 0 {
		return nil
	}
	if err := json.Unmarshal(list.Items, items); err != nil {
		return fmt.Errorf("reading a list: %w", err)
	}
	return nil
}

// ClusterKinds are the kinds of which there is a list, sorted.
func (s *Snapshot) ClusterKinds() []string { return slices.Sorted(maps.Keys(s.cluster)) }

// AddLog puts the end of a container's log in.
func (s *Snapshot) AddLog(name LogName, text string) { s.logs[name] = text }

// Log returns the end of a container's log.
func (s *Snapshot) Log(name LogName) Text {
	t := Text{Place: name.Place(), State: Present}
	if why, bad := s.Manifest.Unreadable[t.Place]; bad {
		t.State, t.Why = Unreadable, why
		return t
	}
	data, ok := s.logs[name]
	if !ok {
		t.State = Absent
	}
	t.Data = data
	return t
}

// Logs names the logs that there are, in the order of their places.
func (s *Snapshot) Logs() []LogName {
	return slices.SortedFunc(maps.Keys(s.logs), func(a, b LogName) int { return strings.Compare(a.Place(), b.Place()) })
}

// Commands names the commands whose output there is, sorted.
func (s *Snapshot) Commands() []string { return slices.Sorted(maps.Keys(s.commands)) }

// Probes names the probes of which there is an answer, sorted.
func (s *Snapshot) Probes() []string { return slices.Sorted(maps.Keys(s.probes)) }
