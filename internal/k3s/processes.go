package k3s

import (
	"path"
	"slices"
	"strings"
)

// belongs says what belongs to one k3s on a machine.
type belongs struct {
	// dataDir is its data directory; binary its program.
	dataDir, binary string
	// alone says that no other Kubernetes is here, so that what carries Kubernetes' own
	// names is this one's.
	alone bool
}

// within says whether a path is a directory or below it.
func within(name, dir string) bool {
	return dir != "" && (name == dir || strings.HasPrefix(name, strings.TrimSuffix(dir, "/")+"/"))
}

// mentions says whether an argument names a path of this k3s.
func (b belongs) mentions(argument string) bool {
	if _, value, ok := strings.Cut(argument, "="); ok && strings.HasPrefix(argument, "-") {
		argument = value
	}
	argument = strings.TrimPrefix(argument, "unix://")
	return within(argument, b.dataDir) || within(argument, runDir)
}

// k3sItself says whether a process is k3s, its containerd, or a shim of that.
func (b belongs) k3sItself(p Process) bool {
	if len(p.Argv) == 0 {
		return false
	}
	// k3s writes its title over its arguments: "/usr/local/bin/k3s server" is one word.
	title := strings.Fields(p.Argv[0])
	if len(title) == 0 {
		return false
	}
	name, words := path.Base(title[0]), slices.Concat(title[1:], p.Argv[1:])
	serves := len(words) > 0 && (words[0] == string(Server) || words[0] == string(Agent))
	shipped := path.Join(b.dataDir, "data")
	switch {
	case name == binaryName && (p.Exe == b.binary && b.binary != "" || title[0] == b.binary || within(p.Exe, shipped)):
		// Somebody's `k3s kubectl logs -f` ends by itself when the server does.
		return serves
	case within(p.Exe, shipped) || within(title[0], shipped):
		// What k3s unpacked serves it, but for the tools that people call.
		return !slices.Contains([]string{binaryName, "kubectl", "crictl", "ctr"}, name)
	case slices.Contains([]string{binaryName, "k3s-server", "k3s-agent", "containerd", "runc"}, name) || strings.HasPrefix(name, "containerd-shim"):
		return slices.ContainsFunc(p.Argv[1:], b.mentions)
	}
	return false
}

// inPods says whether a process is in the control group of a pod.
func inPods(p Process) bool {
	for _, group := range p.Cgroups {
		for _, part := range strings.Split(group, "/") {
			if part == "kubepods" || part == "kubepods.slice" {
				return true
			}
		}
	}
	return false
}

// ownProcesses picks what has to end with this k3s: itself, its containerd, the
// shims, and everything that these started. Where self is among them, inside is set
// and nothing may be ended from here.
func ownProcesses(all []Process, b belongs, self int) (own []Process, inside bool) {
	children := map[int][]Process{}
	byPID := map[int]Process{}
	for _, p := range all {
		children[p.PPID] = append(children[p.PPID], p)
		byPID[p.PID] = p
	}
	taken := map[int]bool{}
	var take func(p Process)
	take = func(p Process) {
		if taken[p.PID] || p.PID <= 1 {
			return
		}
		taken[p.PID] = true
		if p.State != 'Z' && p.State != 'X' {
			own = append(own, p)
		}
		for _, child := range children[p.PID] {
			take(child)
		}
	}
	for _, p := range all {
		if b.k3sItself(p) || b.alone && inPods(p) {
			take(p)
		}
	}
	for at := self; at > 1; at = byPID[at].PPID {
		if taken[at] {
			return nil, true
		}
	}
	slices.SortFunc(own, func(p, q Process) int { return p.PID - q.PID })
	return own, false
}
