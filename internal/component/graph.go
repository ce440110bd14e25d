package component

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Mode says what llmbox does with a component.
type Mode string

// The modes: install it, only wait for somebody else's, or leave it out.
const (
	Install  Mode = "install"
	External Mode = "external"
	Off      Mode = "off"
)

// Node is one component in the order of work.
type Node struct {
	Component
	Mode Mode
	// NeededBy lists the names of the nodes that wait for this one.
	NeededBy []string
}

// The ways in which a table can't be ordered. Each is wrapped with the names.
var (
	ErrCycle       = errors.New("components need each other in a circle")
	ErrUnknownNeed = errors.New("unknown component")
	ErrNeedOff     = errors.New("needed component is off")
	ErrDuplicate   = errors.New("component listed twice")
)

// Order sorts the components that are not off so that each comes after what it
// needs, keeping the given order where it is free to. Its cost is linear in
// components and needs. mode may be nil: everything is installed.
func Order(components []Component, mode func(name string) Mode) ([]Node, error) {
	if mode == nil {
		mode = func(string) Mode { return Install }
	}
	index := make(map[string]int, len(components))
	nodes := make([]Node, 0, len(components))
	off := map[string]bool{}
	var problems []error
	for _, c := range components {
		if _, twice := index[c.Name]; twice || off[c.Name] {
			problems = append(problems, fmt.Errorf("%w: %s", ErrDuplicate, c.Name))
			continue
		}
		m := mode(c.Name)
		if m == Off {
			off[c.Name] = true
			continue
		}
		index[c.Name] = len(nodes)
		nodes = append(nodes, Node{Component: c, Mode: m})
	}

	waiting := make([]int, len(nodes))
	for i := range nodes {
		for _, need := range nodes[i].Needs {
			j, ok := index[need]
			switch {
			case ok:
				waiting[i]++
				nodes[j].NeededBy = append(nodes[j].NeededBy, nodes[i].Name)
			case off[need]:
				problems = append(problems, fmt.Errorf("%w: %s needs %s", ErrNeedOff, nodes[i].Name, need))
			default:
				problems = append(problems, fmt.Errorf("%w: %s needs %q", ErrUnknownNeed, nodes[i].Name, need))
			}
		}
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}

	ordered := make([]Node, 0, len(nodes))
	queue := make([]int, 0, len(nodes))
	for i := range nodes {
		if waiting[i] == 0 {
			queue = append(queue, i)
		}
	}
	for head := 0; head < len(queue); head++ {
		n := nodes[queue[head]]
		ordered = append(ordered, n)
		for _, name := range n.NeededBy {
			j := index[name]
			if waiting[j]--; waiting[j] == 0 {
				queue = append(queue, j)
			}
		}
	}
	if len(ordered) < len(nodes) {
		return nil, fmt.Errorf("%w: %s", ErrCycle, strings.Join(circle(nodes, index, waiting), " → "))
	}
	return ordered, nil
}

// circle walks needs among the nodes that could not be ordered until one
// repeats, which names one cycle exactly.
func circle(nodes []Node, index map[string]int, waiting []int) []string {
	at := slices.IndexFunc(waiting, func(n int) bool { return n > 0 })
	seen := map[int]int{}
	var path []string
	for {
		if first, again := seen[at]; again {
			return append(path[first:], nodes[at].Name)
		}
		seen[at] = len(path)
		path = append(path, nodes[at].Name)
		for _, need := range nodes[at].Needs {
			if j := index[need]; waiting[j] > 0 {
				at = j
				break
			}
		}
	}
}

// CriticalPath returns the longest chain through the nodes by the given cost
// and its length. nodes must be ordered.
func CriticalPath[C int64 | float64](nodes []Node, cost func(name string) C) ([]string, C) {
	finish := make(map[string]C, len(nodes))
	before := make(map[string]string, len(nodes))
	var last string
	for _, n := range nodes {
		var start C
		for _, need := range n.Needs {
			if f := finish[need]; f > start || before[n.Name] == "" {
				start = max(start, f)
				before[n.Name] = need
			}
		}
		finish[n.Name] = start + cost(n.Name)
		if last == "" || finish[n.Name] > finish[last] {
			last = n.Name
		}
	}
	if last == "" {
		return nil, 0
	}
	var path []string
	for at := last; at != ""; at = before[at] {
		path = append(path, at)
	}
	slices.Reverse(path)
	return path, finish[last]
}
