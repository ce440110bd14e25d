// Package trace writes down all of a machine that an installer can have changed, and
// says in what two such records differ. It runs a script on the machine; it must not
// know what was installed there.
package trace

import (
	"context"
	_ "embed"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

//go:embed look.sh
var script string

// Execute runs a command on the machine and returns what it wrote to standard output.
type Execute func(ctx context.Context, command ...string) (string, error)

// State is a machine: lines by heading ("file", "mount", "filter iptables-nft", …).
type State map[string][]string

// Take looks at a machine.
func Take(ctx context.Context, execute Execute) (State, error) {
	out, err := execute(ctx, "sh", "-c", script)
	if err != nil {
		return nil, fmt.Errorf("looking at the machine: %w", err)
	}
	return parse(out), nil
}

func parse(out string) State {
	state, heading, self := State{}, "", ""
	for line := range strings.Lines(out) {
		line = strings.TrimRight(line, "\n")
		if name, is := strings.CutPrefix(line, "## "); is {
			if pid, is := strings.CutPrefix(name, "self "); is {
				self = pid
			}
			heading = name
			continue
		}
		state[heading] = append(state[heading], line)
	}
	for name := range state {
		if strings.HasPrefix(name, "self ") {
			delete(state, name)
		}
	}
	for name, lines := range state {
		switch {
		case strings.HasPrefix(name, "filter "):
			lines = rules(lines)
		case name == "process":
			lines = processes(lines, self)
		case name == "sysctl":
			lines = slices.DeleteFunc(lines, moving)
		}
		slices.Sort(lines)
		state[name] = lines
	}
	return state
}

// policy is the head of a chain in the output of iptables-save.
var policy = regexp.MustCompile(`^:(\S+) (\S+) \[\d+:\d+\]$`)

// rules puts its table before each rule and leaves the counters out. A chain of the
// kernel's own that accepts is no trace: iptables makes it when it is asked about the
// table, and has no command to take it away again.
func rules(lines []string) []string {
	var out []string
	table := ""
	for _, line := range lines {
		switch {
		case line == "" || line[0] == '#' || line == "COMMIT":
		case line[0] == '*':
			table = line[1:]
		case line[0] == ':':
			if head := policy.FindStringSubmatch(line); head == nil || head[2] != "ACCEPT" {
				out = append(out, table+" "+policy.ReplaceAllString(line, ":$1 $2"))
			}
		default:
			out = append(out, table+" "+line)
		}
	}
	return out
}

// processes keeps the command lines of all that runs but the looking itself.
func processes(lines []string, self string) []string {
	const columns = 4
	parent, args := map[string]string{}, map[string]string{}
	for _, line := range lines {
		fields := strings.Fields(line)
		if len(fields) < columns || strings.HasPrefix(fields[2], "Z") {
			continue
		}
		parent[fields[0]], args[fields[0]] = fields[1], strings.Join(fields[3:], " ")
	}
	var out []string
	for pid, text := range args {
		own := false
		for at := pid; at != "" && !own; at = parent[at] {
			own = at == self
		}
		if !own {
			out = append(out, text)
		}
	}
	return out
}

// moving says whether a setting of the kernel changes by itself.
func moving(line string) bool {
	for _, name := range []string{"/kernel/ns_last_pid:", "/kernel/random/", "/kernel/pty/", "/kernel/sched_domain/", "/kernel/perf_event_max_sample_rate:", "/vm/lowmem_reserve_ratio:", "/fs/inotify/"} {
		if strings.Contains(line, name) {
			return true
		}
	}
	return false
}

// Diff names what differs, by heading: "+ HEADING: LINE" is only in b, "- HEADING: LINE"
// only in a.
func Diff(a, b State) []string {
	var out []string
	names := slices.Collect(maps.Keys(a))
	for name := range b {
		if _, ok := a[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		count := map[string]int{}
		for _, line := range a[name] {
			count[line]--
		}
		for _, line := range b[name] {
			count[line]++
		}
		for _, line := range slices.Sorted(maps.Keys(count)) {
			switch n := count[line]; {
			case n > 0:
				out = append(out, "+ "+name+": "+line+times(n))
			case n < 0:
				out = append(out, "- "+name+": "+line+times(-n))
			}
		}
	}
	return out
}

func times(n int) string {
	if n == 1 {
		return ""
	}
	return " (" + strconv.Itoa(n) + " times)"
}
