// Package snapshot holds the facts about one box at one moment: files of the host,
// the output of a few commands, probes, what the GPUs report, and the objects and logs
// of its cluster. It collects them
// from the live machine within deadlines, and loads and saves them as a directory
// or an archive, so that whoever judges never touches a machine.
//
// It must not judge: what a fact means is for the packages preflight and doctor.
package snapshot

import (
	"encoding/json"
	"path"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// The identity of the manifest.
const (
	APIVersion = "llmbox.dev/v1alpha1"
	Kind       = "Snapshot"
)

// Manifest is manifest.yaml.
type Manifest struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Time       time.Time `json:"time"`
	// Version is llmbox's own.
	Version string `json:"version"`
	// Root says whether the collector ran as uid 0.
	Root bool `json:"root"`
	// Unreadable maps a place in the snapshot ("host/etc/fstab", "commands/dmesg",
	// "probes/dns", "gpu.json") to why it could not be read.
	Unreadable map[string]string `json:"unreadable,omitempty"`
}

// State tells absent, empty and unreadable apart.
type State string

// The states of a place that a judge asks for.
const (
	Present    State = "present"
	Absent     State = "absent"
	Unreadable State = "unreadable"
)

// EntryKind is what stands at a path.
type EntryKind string

// The kinds of entries.
const (
	RegularFile EntryKind = "file"
	Directory   EntryKind = "dir"
	Symlink     EntryKind = "symlink"
	Device      EntryKind = "device"
	Other       EntryKind = "other"
)

// Entry is what is known about one path of the host beside its content.
type Entry struct {
	Path  string    `json:"path"`
	Kind  EntryKind `json:"kind"`
	Mode  uint32    `json:"mode,omitempty"`
	UID   int       `json:"uid,omitempty"`
	GID   int       `json:"gid,omitempty"`
	Size  int64     `json:"size_bytes,omitempty"`
	Major uint32    `json:"major,omitempty"`
	Minor uint32    `json:"minor,omitempty"`
	// Target is where a symbolic link finally leads, as an absolute path.
	Target string    `json:"target,omitempty"`
	Time   time.Time `json:"time,omitzero"`
}

// Text is the content of a file or the output of a command.
type Text struct {
	// Place is the path within the snapshot, for evidence.
	Place string
	State State
	// Why says why it is unreadable.
	Why  string
	Data string
	// Exit is a command's exit status; -1 where it was not found or did not end.
	Exit int
}

// Trimmed is the text without surrounding white space.
func (t Text) Trimmed() string { return strings.TrimSpace(t.Data) }

// Lines are the lines without their ends; none for an empty text.
func (t Text) Lines() []string {
	data := strings.TrimRight(t.Data, "\n")
	if data == "" {
		return nil
	}
	return strings.Split(data, "\n")
}

// Snapshot is the facts in memory. It is safe for concurrent readers.
type Snapshot struct {
	Manifest Manifest
	// GPU is nil when gpu.json is absent or unreadable.
	GPU *gpu.Report

	files    map[string]string
	entries  map[string]Entry
	commands map[string]Text
	probes   map[string]json.RawMessage
	cluster  map[string]json.RawMessage
	logs     map[LogName]string
}

// New returns an empty snapshot.
func New() *Snapshot {
	return &Snapshot{
		Manifest: Manifest{APIVersion: APIVersion, Kind: Kind, Unreadable: map[string]string{}},
		files:    map[string]string{}, entries: map[string]Entry{},
		commands: map[string]Text{}, probes: map[string]json.RawMessage{},
		cluster: map[string]json.RawMessage{}, logs: map[LogName]string{},
	}
}

// AddFile puts the content of a host file in.
func (s *Snapshot) AddFile(name, content string) {
	name = path.Clean("/" + name)
	s.files[name] = content
	if _, known := s.entries[name]; !known {
		s.entries[name] = Entry{Path: name, Kind: RegularFile, Mode: 0o644, Size: int64(len(content))}
	}
}

// AddEntry puts in what stands at a path of the host.
func (s *Snapshot) AddEntry(e Entry) {
	e.Path = path.Clean("/" + e.Path)
	s.entries[e.Path] = e
}

// AddCommand puts the output of a command in.
func (s *Snapshot) AddCommand(name, output string, exit int) {
	s.commands[name] = Text{Place: "commands/" + name + ".txt", State: Present, Data: output, Exit: exit}
}

// AddProbe puts the answer of a probe in.
func (s *Snapshot) AddProbe(name string, answer json.RawMessage) { s.probes[name] = answer }

// MarkUnreadable records that a place could not be read.
func (s *Snapshot) MarkUnreadable(place, why string) { s.Manifest.Unreadable[place] = why }

// File returns the content of a host file by its absolute path.
func (s *Snapshot) File(name string) Text {
	name = path.Clean("/" + name)
	t := Text{Place: "host" + name, State: Present}
	if why, ok := s.Manifest.Unreadable[t.Place]; ok {
		t.State, t.Why = Unreadable, why
		return t
	}
	data, ok := s.files[name]
	if !ok {
		t.State = Absent
	}
	t.Data = data
	return t
}

// Stat says what stands at a path of the host. A directory that was never listed
// itself is present when something under it is.
func (s *Snapshot) Stat(name string) (Entry, State) {
	name = path.Clean("/" + name)
	// A file whose content may not be read can still be seen to be there.
	if e, ok := s.entries[name]; ok {
		return e, Present
	}
	if _, ok := s.Manifest.Unreadable["host"+name]; ok {
		return Entry{Path: name}, Unreadable
	}
	for p := range s.entries {
		if strings.HasPrefix(p, strings.TrimSuffix(name, "/")+"/") {
			return Entry{Path: name, Kind: Directory}, Present
		}
	}
	return Entry{Path: name}, Absent
}

// List returns the names directly under a directory of the host, sorted.
func (s *Snapshot) List(dir string) []string {
	prefix := strings.TrimSuffix(path.Clean("/"+dir), "/") + "/"
	var names []string
	for p := range s.entries {
		rest, ok := strings.CutPrefix(p, prefix)
		if !ok || rest == "" {
			continue
		}
		name, _, _ := strings.Cut(rest, "/")
		names = append(names, name)
	}
	sort.Strings(names)
	return slices.Compact(names)
}

// Glob returns the paths of the host that match the pattern of path.Match, sorted.
// A malformed pattern matches nothing.
func (s *Snapshot) Glob(pattern string) []string {
	var found []string
	for p := range s.entries {
		if ok, err := path.Match(pattern, p); err == nil && ok {
			found = append(found, p)
		}
	}
	sort.Strings(found)
	return found
}

// Command returns the output of a command by its name in the snapshot. An absent
// command was not run or its program does not exist.
func (s *Snapshot) Command(name string) Text {
	place := "commands/" + name
	if why, ok := s.Manifest.Unreadable[place]; ok {
		return Text{Place: place + ".txt", State: Unreadable, Why: why, Exit: -1}
	}
	t, ok := s.commands[name]
	if !ok {
		return Text{Place: place + ".txt", State: Absent, Exit: -1}
	}
	return t
}

// Probe decodes the answer of a probe into out and says whether there is one.
func (s *Snapshot) Probe(name string, out any) (State, string) {
	place := "probes/" + name
	if why, ok := s.Manifest.Unreadable[place]; ok {
		return Unreadable, why
	}
	raw, ok := s.probes[name]
	if !ok {
		return Absent, ""
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return Unreadable, err.Error()
	}
	return Present, ""
}
