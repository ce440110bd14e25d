package repair

import (
	"maps"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// Networks are the cluster's, in CIDR form. They are not among the facts of a
// machine, because k3s need not be there yet.
type Networks struct {
	Pods, Services string
}

// Plan returns the actions that mend the findings, in the order in which they must
// be taken. Followers are left out: they go with their causes. It looks at nothing
// but its arguments.
func Plan(found []finding.Finding, facts *snapshot.Snapshot, networks Networks) []Action {
	p := plan(found, facts, networks)
	return p.actions
}

// PlanDeclined returns the findings whose repair Plan left out, with why.
func PlanDeclined(found []finding.Finding, facts *snapshot.Snapshot, networks Networks) []Declined {
	p := plan(found, facts, networks)
	return p.declined
}

// planner gathers actions in their final order.
type planner struct {
	facts    *snapshot.Snapshot
	networks Networks
	// wanted are the findings by the repair that they name.
	wanted map[string][]finding.Finding

	actions  []Action
	declined []Declined
}

func plan(found []finding.Finding, facts *snapshot.Snapshot, networks Networks) *planner {
	p := &planner{facts: facts, networks: networks, wanted: map[string][]finding.Finding{}}
	for _, f := range found {
		bad := f.Severity == finding.Fail || f.Severity == finding.Warn
		if bad && f.State == finding.Judged && len(f.Causes) == 0 && f.Repair != "" {
			p.wanted[f.Repair] = append(p.wanted[f.Repair], f)
		}
	}
	known := map[string]bool{}
	for _, r := range repairs() {
		known[r.name] = true
		if r.plan != nil && (len(p.wanted[r.name]) > 0 || r.always) {
			r.plan(p, p.wanted[r.name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.wanted)) {
		if !known[name] {
			p.decline(p.wanted[name], "this llmbox knows no repair "+name)
		}
	}
	return p
}

func (p *planner) add(a Action, mends []finding.Finding) {
	a.NeedsRoot = true
	for _, f := range mends {
		if !slices.Contains(a.Findings, f.ID) {
			a.Findings = append(a.Findings, f.ID)
		}
	}
	p.actions = append(p.actions, a)
}

func (p *planner) decline(findings []finding.Finding, why string) {
	for _, f := range findings {
		p.declined = append(p.declined, Declined{Finding: f.ID, Repair: f.Repair, Why: why})
	}
}

func (p *planner) planned(name string) bool {
	return slices.ContainsFunc(p.actions, func(a Action) bool { return a.Name == name })
}

// after keeps of the names those that are planned.
func (p *planner) after(names ...string) []string {
	return slices.DeleteFunc(names, func(n string) bool { return !p.planned(n) })
}

func (p *planner) exists(name string) bool {
	_, state := p.facts.Stat(name)
	return state == snapshot.Present
}

func (p *planner) firstExisting(names ...string) string {
	for _, n := range names {
		if p.exists(n) {
			return n
		}
	}
	return ""
}

// k3sUnit is the unit by which k3s runs here now.
func (p *planner) k3sUnit() string {
	for _, unit := range []string{"k3s", "k3s-agent"} {
		if u, state := p.facts.Unit(unit + ".service"); state == snapshot.Present && u.Active == "active" {
			return unit
		}
	}
	return ""
}

// kernel is the running kernel's release.
func (p *planner) kernel() string {
	var s snapshot.System
	if state, _ := p.facts.Probe(snapshot.ProbeSystem, &s); state == snapshot.Present && s.Kernel != "" {
		return s.Kernel
	}
	return p.facts.File("/proc/sys/kernel/osrelease").Trimmed()
}

// driver is the version of the loaded NVIDIA driver.
func (p *planner) driver() string {
	if v := p.facts.File("/sys/module/nvidia/version").Trimmed(); v != "" {
		return v
	}
	if p.facts.GPU != nil {
		return p.facts.GPU.Driver
	}
	return ""
}

// Manager is a family of package managers.
type Manager string

// The package managers that repairs use.
const (
	Apt    Manager = "apt"
	DNF    Manager = "dnf"
	Yum    Manager = "yum"
	Zypper Manager = "zypper"
)

// manager is the machine's package manager, empty where it has none of them.
func (p *planner) manager() Manager {
	for _, m := range []struct {
		program string
		manager Manager
	}{
		{"/usr/bin/apt-get", Apt}, {"/usr/bin/dnf", DNF}, {"/usr/bin/zypper", Zypper}, {"/usr/bin/yum", Yum},
	} {
		if p.exists(m.program) {
			return m.manager
		}
	}
	words := strings.Fields(p.osRelease("ID") + " " + p.osRelease("ID_LIKE"))
	switch {
	case slices.Contains(words, "debian"), slices.Contains(words, "ubuntu"):
		return Apt
	case slices.Contains(words, "suse"), slices.Contains(words, "sles"):
		return Zypper
	case slices.ContainsFunc(words, func(w string) bool { return slices.Contains([]string{"rhel", "fedora", "centos", "amzn"}, w) }):
		return DNF
	}
	return ""
}

// osRelease is a field of /etc/os-release, see os-release(5).
func (p *planner) osRelease(key string) string {
	t := p.facts.File("/etc/os-release")
	if t.State != snapshot.Present {
		t = p.facts.File("/usr/lib/os-release")
	}
	for _, line := range t.Lines() {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), "="); ok && k == key {
			return strings.Trim(v, `"'`)
		}
	}
	return ""
}

// ours returns the lines of a file that llmbox wrote before, without comments.
func (p *planner) ours(name string) []string {
	t := p.facts.File(name)
	if t.State != snapshot.Present || !strings.HasPrefix(t.Data, marker) {
		return nil
	}
	var lines []string
	for _, l := range t.Lines() {
		if l = strings.TrimSpace(l); l != "" && !strings.HasPrefix(l, "#") {
			lines = append(lines, l)
		}
	}
	return lines
}

// drop is a step that writes a drop-in of ours.
func drop(name string, lines ...string) Step {
	return Step{Write: &Write{Path: name, Mode: 0o644, Content: marker + "\n" + strings.Join(lines, "\n") + "\n"}}
}

func run(seconds int, argv ...string) Step {
	return Step{Run: &Run{Argv: argv, DeadlineSeconds: seconds}}
}

func ids(found []finding.Finding) []string {
	var out []string
	for _, f := range found {
		out = append(out, f.ID)
	}
	return out
}
