package preflight

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// mutation is a small change of a healthy machine.
type mutation struct {
	// Base is the machine; the A10 with Ubuntu 24.04 unless said otherwise.
	Base string `json:"base"`
	// Remove drops places with all under them.
	Remove []string `json:"remove"`
	// Files are contents of host files, Commands of commands/NAME.txt without the
	// first line, which is exit=0 unless Exit has the name.
	Files    map[string]string `json:"files"`
	Commands map[string]string `json:"commands"`
	Exit     map[string]int    `json:"exit"`
	Probes   map[string]any    `json:"probes"`
	Entries  []snapshot.Entry  `json:"entries"`
	// GPU is merged into gpu.json (RFC 7386); Device into its first device.
	GPU    map[string]any `json:"gpu"`
	Device map[string]any `json:"device"`
	// Replace are words of existing files to be replaced: place, old, new.
	Replace [][3]string `json:"replace"`
	// Unreadable are places that could not be read.
	Unreadable []string       `json:"unreadable"`
	Need       map[string]any `json:"need"`
	Time       string         `json:"time"`

	// ID is the finding that must come; the row's own unless said otherwise.
	ID       string `json:"id"`
	Severity string `json:"severity"`
	State    string `json:"state"`
}

// row is the three kinds of answers of one check.
type row struct {
	Check string `json:"check"`
	// Pass is the healthy machine itself unless it says something else.
	Pass *mutation `json:"pass"`
	// Well are changes that look like failures and are none.
	Well     []mutation `json:"well"`
	Fail     []mutation `json:"fail"`
	CantRead mutation   `json:"cant_read"`
}

// mergePatch is RFC 7386.
func mergePatch(target, patch any) any {
	p, ok := patch.(map[string]any)
	if !ok {
		return patch
	}
	t, ok := target.(map[string]any)
	if !ok {
		t = map[string]any{}
	}
	for k, v := range p {
		if v == nil {
			delete(t, k)
		} else {
			t[k] = mergePatch(t[k], v)
		}
	}
	return t
}

// machines are the whole snapshots that are mutated, read once.
type machines map[string]machine

type machine struct {
	tree tree
	need Need
}

// base is the name of the machine that is mutated.
func (m mutation) base() string {
	if m.Base == "" {
		return "ok-a10-ubuntu-2404"
	}
	return m.Base
}

func (ms machines) read(t *testing.T, mutations ...mutation) {
	t.Helper()
	for _, m := range mutations {
		if _, ok := ms[m.base()]; !ok {
			dir := filepath.Join(casesDir, m.base())
			ms[m.base()] = machine{tree: readTree(t, dir), need: readWanted(t, dir).Need}
		}
	}
}

func (m mutation) facts(t *testing.T, from machines) Facts {
	t.Helper()
	base := from[m.base()]
	need := base.need
	raw, err := json.Marshal(m.Need)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &need); err != nil {
		t.Fatal(err)
	}
	tr := maps.Clone(base.tree)
	tr.without(t, m.Remove)
	top := tree{}
	for name, content := range m.Files {
		top["host"+name] = []byte(content)
	}
	for name, output := range m.Commands {
		exit := "exit=0\n"
		if n, ok := m.Exit[name]; ok {
			exit = "exit=" + string(rune('0'+n)) + "\n"
		}
		top["commands/"+name+".txt"] = []byte(exit + output)
	}
	for name, answer := range m.Probes {
		if top["probes/"+name+".json"], err = json.Marshal(answer); err != nil {
			t.Fatal(err)
		}
	}
	top.setEntries(t, m.Entries)
	tr.over(t, top)
	for _, r := range m.Replace {
		if !strings.Contains(string(tr[r[0]]), r[1]) {
			t.Fatalf("%s holds no %q", r[0], r[1])
		}
		tr[r[0]] = []byte(strings.ReplaceAll(string(tr[r[0]]), r[1], r[2]))
	}
	if m.GPU != nil || m.Device != nil {
		var report map[string]any
		if err := json.Unmarshal(tr["gpu.json"], &report); err != nil {
			t.Fatal(err)
		}
		mergePatch(report, m.GPU)
		if devices, ok := report["devices"].([]any); ok && len(devices) > 0 && m.Device != nil {
			devices[0] = mergePatch(devices[0], m.Device)
		}
		if tr["gpu.json"], err = json.Marshal(report); err != nil {
			t.Fatal(err)
		}
	}
	if len(m.Unreadable) > 0 {
		places := map[string]string{}
		for _, p := range m.Unreadable {
			places[p] = "permission denied"
		}
		tr.unreadable(t, places)
	}
	if m.Time != "" {
		tr.manifest(t, func(manifest map[string]any) { manifest["time"] = m.Time })
	}
	return Facts{Snapshot: tr.load(t), Need: need}
}

func checkByID(id string) (Check, bool) {
	all := Checks()
	i := slices.IndexFunc(all, func(c Check) bool { return c.ID == id })
	if i < 0 {
		return Check{}, false
	}
	return all[i], true
}

func readMatrix(t *testing.T) []row {
	t.Helper()
	raw, err := os.ReadFile("testdata/matrix.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var rows []row
	if err := yaml.UnmarshalStrict(raw, &rows); err != nil {
		t.Fatal(err)
	}
	return rows
}

// TestMatrix asserts that each check has a passing, a failing and a can't-read case,
// and each id that a check can return a case that returns it.
func TestMatrix(t *testing.T) {
	rows := readMatrix(t)
	from := machines{}
	for _, r := range rows {
		from.read(t, mutation{})
		from.read(t, r.CantRead)
		from.read(t, r.Fail...)
		from.read(t, r.Well...)
		if r.Pass != nil {
			from.read(t, *r.Pass)
		}
	}
	failed, seen := map[string]bool{}, map[string]bool{}
	for _, r := range rows {
		check, ok := checkByID(r.Check)
		if !ok {
			t.Errorf("%s is no check", r.Check)
			continue
		}
		if seen[r.Check] {
			t.Errorf("%s has two rows", r.Check)
		}
		seen[r.Check] = true
		for _, m := range r.Fail {
			if m.ID == "" {
				failed[r.Check] = true
			}
			failed[m.ID] = true
		}
		t.Run(r.Check, func(t *testing.T) {
			t.Parallel()
			pass := mutation{}
			if r.Pass != nil {
				pass = *r.Pass
			}
			for _, f := range run(t, check, pass.facts(t, from)) {
				if bad(f) || f.State == finding.Unreadable || f.State == finding.NotApplicable && pass.State != "not_applicable" {
					t.Errorf("the passing case is %s, %s: %s", f.Severity, f.State, f.Measured)
				}
			}
			for i, m := range r.Well {
				for _, f := range run(t, check, m.facts(t, from)) {
					if bad(f) || f.State == finding.Unreadable {
						t.Errorf("harmless case %d is %s, %s: %s", i+1, f.Severity, f.State, f.Measured)
					}
				}
			}
			if len(r.Fail) == 0 {
				t.Error("no failing case")
			}
			for _, m := range r.Fail {
				id := m.ID
				if id == "" {
					id = r.Check
				}
				found := run(t, check, m.facts(t, from))
				i := slices.IndexFunc(found, func(f finding.Finding) bool { return f.ID == id })
				if i < 0 {
					t.Errorf("no finding %s among %+v", id, found)
					continue
				}
				severity, state := m.Severity, m.State
				if severity == "" {
					severity = string(finding.Fail)
				}
				if state == "" {
					state = string(finding.Judged)
				}
				f := found[i]
				if string(f.Severity) != severity || string(f.State) != state {
					t.Errorf("the failing case of %s is %s, %s, want %s, %s: %s", id, f.Severity, f.State, severity, state, f.Measured)
				}
			}
			for _, f := range run(t, check, r.CantRead.facts(t, from)) {
				if f.State != finding.Unreadable || bad(f) {
					t.Errorf("the can't-read case is %s, %s: %s", f.Severity, f.State, f.Measured)
				}
			}
		})
	}
	for _, c := range Checks() {
		if !seen[c.ID] {
			t.Errorf("%s has no row in testdata/matrix.yaml", c.ID)
		}
		ids := c.Also
		if len(ids) == 0 {
			ids = []string{c.ID}
		}
		for _, id := range ids {
			if !failed[id] {
				t.Errorf("%s has no failing case in testdata/matrix.yaml", id)
			}
		}
	}
}

func run(t *testing.T, check Check, facts Facts) []finding.Finding {
	t.Helper()
	found := check.run(t.Context(), facts, Deadline)
	if len(found) == 0 {
		t.Errorf("%s says nothing", check.ID)
	}
	for _, f := range found {
		complete(t, f)
		if f.ID != check.ID && !slices.Contains(check.Also, f.ID) {
			t.Errorf("%s returns %s, which its row does not name", check.ID, f.ID)
		}
	}
	return found
}
