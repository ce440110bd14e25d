package main

import (
	"encoding/json"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/test/internal/trace"
)

// The words that differ between two installs of the same box.
var (
	identity = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	digest   = regexp.MustCompile(`[0-9a-f]{64}`)
	runLog   = regexp.MustCompile(`run-[0-9T.]+\.ndjson`)
	pair     = regexp.MustCompile(`veth[0-9a-f]{8}(@\S+)?`)
)

// churns tells directories whose content is the running containers' and the datastore's:
// it is compared as objects and processes.
func churns(name string) bool {
	// The first run asks for the weights of a branch; the next ones ask for the commit that
	// it has written down, as the model server does, and keep no name of a branch.
	if strings.Contains(name+"/", "/hub/models--") && strings.Contains(name+"/", "/refs/") {
		return true
	}
	// How the box came back after a boot; the undisturbed machine was not booted again.
	if strings.TrimSpace(name) == "/var/lib/llmbox/boot.json" {
		return true
	}
	return slices.ContainsFunc([]string{
		"/var/lib/rancher/k3s/agent/containerd/", "/var/lib/rancher/k3s/server/db/", "/var/lib/kubelet/pods/", "/var/lib/kubelet/image_manager/", "/var/log/pods/", "/var/log/containers/",
		"/run/k3s/", "/run/containerd/", "/run/netns/", "/var/lib/cni/", "/tmp/",
	}, func(dir string) bool { return strings.HasPrefix(name+"/", dir) })
}

// written tells files whose content two installs have in common: what llmbox writes, the
// programs, and the weights.
func written(name string) bool {
	// The lab gives each of its machines an identity of its own.
	if slices.Contains([]string{"/etc/machine-id", "/etc/rancher/k3s/k3s.yaml", "/etc/rancher/node/password", "/var/lib/llmbox/k3s.json", "/var/lib/llmbox/lock"}, name) {
		return false
	}
	return slices.ContainsFunc([]string{
		"/etc/", "/usr/local/", "/root/", "/var/lib/llmbox/", "/var/lib/rancher/k3s/storage/", "/var/lib/rancher/k3s/agent/images/", "/var/lib/rancher/k3s/server/manifests/",
	}, func(dir string) bool { return strings.HasPrefix(name, dir) })
}

// normalise keeps of a machine with a box what an install is responsible for: paths with
// modes and owners, the content of what is written, the record of k3s, and what runs.
func normalise(state trace.State, record string) (trace.State, error) {
	out := trace.State{}
	for _, line := range state["file"] {
		// Kind, mode, owner, size, path; links lead somewhere.
		const columns = 5
		fields := strings.SplitN(line, " ", columns)
		if len(fields) == columns && !churns(fields[columns-1]) {
			out["file"] = append(out["file"], strings.Join([]string{fields[0], fields[1], fields[2], plain(fields[columns-1])}, " "))
		}
	}
	for _, line := range state["hash"] {
		if _, name, _ := strings.Cut(line, "  "); written(name) && !churns(name) {
			sum, _, _ := strings.Cut(line, " ")
			out["hash"] = append(out["hash"], sum+" "+plain(name))
		}
	}
	for _, line := range state["process"] {
		words := strings.Fields(line)
		name := path.Base(words[0])
		if len(words) > 1 && !strings.HasPrefix(words[1], "-") {
			name += " " + words[1]
		}
		out["process"] = append(out["process"], plain(name))
	}
	for _, line := range state["link"] {
		out["link"] = append(out["link"], pair.ReplaceAllString(strings.SplitN(line, " ", 2)[0], "veth"))
	}
	for _, name := range []string{"file", "hash"} {
		slices.Sort(out[name])
		out[name] = slices.Compact(out[name])
	}
	var content map[string]any
	if err := json.Unmarshal([]byte(record), &content); err != nil {
		return nil, fmt.Errorf("reading the record of k3s: %w", err)
	}
	delete(content, "first")
	delete(content, "last")
	if started, ok := content["started"].(map[string]any); ok {
		for _, key := range []string{"bootID", "pid", "start"} {
			delete(started, key)
		}
	}
	raw, err := json.Marshal(content)
	if err != nil {
		return nil, fmt.Errorf("reading the record of k3s: %w", err)
	}
	out["record"] = []string{string(raw)}
	return out, nil
}

func plain(text string) string {
	return runLog.ReplaceAllString(digest.ReplaceAllString(identity.ReplaceAllString(text, "ID"), "DIGEST"), "run-TIME.ndjson")
}
