package repair

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/preflight"
	"github.com/llmbox-dev/llmbox/internal/repair/record"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func TestMain(m *testing.M) {
	if script := os.Getenv(scriptVariable); script != "" {
		os.Exit(actOut(script))
	}
	if name := os.Getenv(lockVariable); name != "" {
		os.Exit(holdLock(name))
	}
	flag.Bool("update", false, "write the golden files")
	flag.Parse()
	os.Exit(m.Run())
}

// golden compares with a file, or writes it.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	if flag.Lookup("update").Value.String() == "true" {
		if err := os.WriteFile(name, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is otherwise; look at it and write it with: go test ./internal/repair -update\n%s", name, got)
	}
}

const preflightCases = "../preflight/testdata/cases"

// machineCase is a machine as a change of one of the preflight's cases.
type machineCase struct {
	Name     string            `json:"name"`
	Base     string            `json:"base"`
	Remove   []string          `json:"remove"`
	Files    map[string]string `json:"files"`
	Commands map[string]string `json:"commands"`
	Entries  []snapshot.Entry  `json:"entries"`
	Replace  [][3]string       `json:"replace"`
	// Mended is what the repairs change of the machine, for a second look.
	Mended *machineCase `json:"mended"`
}

// tree is a snapshot as files, by their names within it.
type tree map[string][]byte

const filesJSON = "probes/files.json"

func (tr tree) entries(t *testing.T) []snapshot.Entry {
	t.Helper()
	var out []snapshot.Entry
	if raw, ok := tr[filesJSON]; ok {
		if err := json.Unmarshal(raw, &out); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// over lays files over the tree after dropping places.
func (tr tree) over(t *testing.T, remove []string, top tree) {
	t.Helper()
	gone := func(name string) bool {
		return slices.ContainsFunc(remove, func(p string) bool { return name == p || strings.HasPrefix(name, p+"/") })
	}
	entries := slices.DeleteFunc(tr.entries(t), func(e snapshot.Entry) bool { return gone("host" + e.Path) })
	for _, e := range top.entries(t) {
		entries = slices.DeleteFunc(entries, func(old snapshot.Entry) bool { return old.Path == e.Path })
		entries = append(entries, e)
	}
	maps.DeleteFunc(tr, func(name string, _ []byte) bool { return gone(name) })
	maps.Copy(tr, top)
	raw, err := json.MarshalIndent(entries, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	tr[filesJSON] = raw
}

func readTree(t *testing.T, name string) (tree, preflight.Need) {
	t.Helper()
	dir := filepath.Join(preflightCases, name)
	out := tree{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		raw, err := os.ReadFile(p)
		out[filepath.ToSlash(rel)] = raw
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var want struct {
		Base   string         `json:"base"`
		Remove []string       `json:"remove"`
		Need   preflight.Need `json:"need"`
	}
	if err := yaml.Unmarshal(out["want.yaml"], &want); err != nil {
		t.Fatal(err)
	}
	delete(out, "want.yaml")
	if want.Base != "" {
		base, _ := readTree(t, want.Base)
		base.over(t, want.Remove, out)
		out = base
	}
	return out, want.Need
}

// facts returns the case as a preflight sees it.
func (c machineCase) facts(t *testing.T) preflight.Facts {
	t.Helper()
	if m := c.Mended; m != nil {
		for _, r := range m.Replace {
			c.Replace = append(c.Replace, r)
		}
		merged := map[string]string{}
		maps.Copy(merged, c.Files)
		maps.Copy(merged, m.Files)
		c.Files = merged
		merged = map[string]string{}
		maps.Copy(merged, c.Commands)
		maps.Copy(merged, m.Commands)
		c.Commands = merged
		c.Entries = slices.Concat(c.Entries, m.Entries)
	}
	base := c.Base
	if base == "" {
		base = "ok-a10-ubuntu-2404"
	}
	tr, need := readTree(t, base)
	top := tree{}
	for name, content := range c.Files {
		top["host"+name] = []byte(content)
	}
	for name, out := range c.Commands {
		top["commands/"+name+".txt"] = []byte("exit=0\n" + out)
	}
	raw, err := json.Marshal(c.Entries)
	if err != nil {
		t.Fatal(err)
	}
	top[filesJSON] = raw
	tr.over(t, c.Remove, top)
	for _, r := range c.Replace {
		if !bytes.Contains(tr[r[0]], []byte(r[1])) && r[0] != filesJSON {
			t.Fatalf("%s holds no %q", r[0], r[1])
		}
		tr[r[0]] = bytes.ReplaceAll(tr[r[0]], []byte(r[1]), []byte(r[2]))
	}
	dir := t.TempDir()
	for name, data := range tr {
		at := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, err := snapshot.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	return preflight.Facts{Snapshot: s, Need: need}
}

func judged(t *testing.T, facts preflight.Facts) ([]finding.Finding, Networks) {
	t.Helper()
	found := preflight.Judge(t.Context(), preflight.Checks(), facts)
	return found, Networks{Pods: facts.Need.PodCIDR, Services: facts.Need.ServiceCIDR}
}

func readCases(t *testing.T) []machineCase {
	t.Helper()
	raw, err := os.ReadFile("testdata/plans.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var cases []machineCase
	if err := yaml.UnmarshalStrict(raw, &cases); err != nil {
		t.Fatal(err)
	}
	return cases
}

func caseNamed(t *testing.T, name string) machineCase {
	t.Helper()
	cases := readCases(t)
	i := slices.IndexFunc(cases, func(c machineCase) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("no case %s", name)
	}
	return cases[i]
}

// TestPlan judges each machine, plans for it, and compares what would be shown.
func TestPlan(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range readCases(t) {
		t.Run(c.Name, func(t *testing.T) {
			mended := c
			c.Mended = nil
			facts := c.facts(t)
			found, networks := judged(t, facts)
			actions := Plan(found, facts.Snapshot, networks)
			if mended.Mended != nil {
				again := mended.facts(t)
				found, networks := judged(t, again)
				if left := Plan(found, again.Snapshot, networks); len(left) > 0 || len(actions) == 0 {
					t.Errorf("once mended, %+v is still planned", left)
				}
			}
			var out bytes.Buffer
			if err := Describe(&out, actions, 100); err != nil {
				t.Fatal(err)
			}
			for _, d := range PlanDeclined(found, facts.Snapshot, networks) {
				fmt.Fprintf(&out, "declined %s (%s): %s\n", d.Repair, d.Finding, d.Why)
			}
			golden(t, filepath.Join("testdata/plans", c.Name+".txt"), out.Bytes())
			for _, a := range actions {
				seen[a.Name] = true
				sound(t, a)
			}
			for i, line := range strings.Split(out.String(), "\n") {
				if len(line) > 100 && !strings.HasPrefix(line, "declined") {
					t.Errorf("line %d has %d columns: %s", i+1, len(line), line)
				}
			}
		})
	}
	for _, r := range repairs() {
		// Those of a box that is there are planned for in TestPlanBox.
		if !seen[r.name] && !boxRepair(r.name) {
			t.Errorf("no case plans %s", r.name)
		}
	}
}

// sound asserts what holds for each action that may ever be offered.
func sound(t *testing.T, a Action) {
	t.Helper()
	if a.Title == "" || a.Safe == "" || len(a.Undo) == 0 || len(a.Verify) == 0 || len(a.Steps) == 0 || !a.NeedsRoot {
		t.Errorf("%s is incomplete: %+v", a.Name, a)
	}
	for _, s := range a.Steps {
		shown := s.Shown()
		for _, word := range []string{"reboot", "shutdown", "nvidia-driver-", "cuda-drivers ", "rmmod", "dist-upgrade", "full-upgrade", "autoremove"} {
			if strings.Contains(shown, word) && a.Name != HoldDriver {
				t.Errorf("%s says %q: %s", a.Name, word, shown)
			}
		}
		if w := s.Write; w != nil && (!strings.HasPrefix(w.Content, marker) || !filepath.IsAbs(w.Path) || w.Mode != 0o644) {
			t.Errorf("%s writes %+v", a.Name, w)
		}
		if r := s.Run; r != nil && (r.DeadlineSeconds <= 0 || filepath.Base(r.Argv[0]) != r.Argv[0]) {
			t.Errorf("%s runs %+v", a.Name, r)
		}
	}
	for _, c := range a.Verify {
		if c.What == "" {
			t.Errorf("%s has a check that says nothing: %+v", a.Name, c)
		}
	}
}

// TestPreflightCases names the actions for each whole machine of the preflight's.
func TestPreflightCases(t *testing.T) {
	dirs, err := os.ReadDir(preflightCases)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for _, dir := range dirs {
		facts := machineCase{Base: dir.Name()}.facts(t)
		found, networks := judged(t, facts)
		var names []string
		for _, a := range Plan(found, facts.Snapshot, networks) {
			sound(t, a)
			names = append(names, a.Name)
		}
		for _, d := range PlanDeclined(found, facts.Snapshot, networks) {
			names = append(names, "declined "+d.Repair)
		}
		fmt.Fprintf(&out, "%s: %s\n", dir.Name(), strings.Join(names, ", "))
	}
	golden(t, "testdata/preflight-cases.txt", out.Bytes())
}

// Followers, notes and what passes by itself are not planned for; an unknown repair
// is said.
func TestPlanLeavesOut(t *testing.T) {
	t.Parallel()
	follower := finding.Finding{ID: "a", Severity: finding.Fail, State: finding.Judged, Repair: Needrestart, Causes: []string{"b"}}
	note := finding.Finding{ID: "b", Severity: finding.Info, State: finding.Judged, Repair: Needrestart}
	wait := finding.Finding{ID: "c", Severity: finding.Warn, State: finding.Wait, Repair: Needrestart}
	strange := finding.Finding{ID: "d", Severity: finding.Fail, State: finding.Judged, Repair: "gpu.overclock"}
	found := []finding.Finding{follower, note, wait, strange}
	if actions := Plan(found, snapshot.New(), Networks{}); len(actions) != 0 {
		t.Errorf("planned %+v", actions)
	}
	declined := PlanDeclined(found, snapshot.New(), Networks{})
	if len(declined) != 1 || declined[0].Finding != "d" {
		t.Errorf("declined %+v", declined)
	}
}

// Whatever repairs findings name, and whatever little is known of the machine, each
// is planned for or declined, and nothing breaks.
func TestPlanKnowsNothing(t *testing.T) {
	t.Parallel()
	for _, r := range repairs() {
		f := finding.Finding{ID: "x", Severity: finding.Fail, State: finding.Judged, Repair: r.name}
		actions := Plan([]finding.Finding{f}, snapshot.New(), Networks{})
		declined := PlanDeclined([]finding.Finding{f}, snapshot.New(), Networks{})
		if len(actions)+len(declined) != 1 {
			t.Errorf("%s: %d actions, %d declined", r.name, len(actions), len(declined))
		}
	}
}

// The preflight's own figure and names are the ones that repairs bring about.
func TestAgreesWithPreflight(t *testing.T) {
	t.Parallel()
	known := map[string]bool{}
	for _, r := range repairs() {
		known[r.name] = true
	}
	for _, c := range preflight.Checks() {
		if c.ID == "toolkit.version" && !strings.HasPrefix(c.Required, toolkitAtLeast+" ") {
			t.Errorf("toolkit.version requires %q, the repair brings %s", c.Required, toolkitAtLeast)
		}
	}
	facts := machineCase{Files: map[string]string{
		"/proc/sys/fs/inotify/max_user_instances": "8192\n", "/proc/sys/fs/inotify/max_user_watches": "1048576\n",
	}}.facts(t)
	found, _ := judged(t, facts)
	for _, f := range found {
		if f.ID == "host.sysctl.inotify" && f.Severity != finding.OK {
			t.Errorf("what the repair sets is %s: %s", f.Severity, f.Measured)
		}
		if f.Repair != "" && !known[f.Repair] {
			t.Errorf("%s names the repair %s, which does not exist", f.ID, f.Repair)
		}
	}
}

const docs = "../../docs/repairs.md"

// TestDocs keeps the page what the registry says.
func TestDocs(t *testing.T) {
	var out bytes.Buffer
	out.WriteString(`# Repairs

What llmbox can mend on a machine by itself: ` + "`llmbox preflight --fix`" + ` lists the steps,
each command and file as a person would type it with the way to undo it, and takes
them once that is confirmed. The table is written by ` + "`go test ./internal/repair -update`" + `.

- A repair never reboots, never installs, removes or replaces the NVIDIA driver or a
  kernel, and never edits a file that llmbox did not write.
- Only what failed or warned is mended, at its root. Where a repair is not safe on the
  machine at hand it is declined, and why is said.
- Each action is checked afterwards. One that fails stops there; those that don't need
  it go on. Run again, only what is still missing is done.
- Package managers are waited for, never interrupted by a deleted lock; proxies are
  honoured, and their passwords neither shown nor recorded.
- ` + "`" + record.DefaultFile + "`" + ` (root alone may read it) keeps what was written,
  installed and set, with what was there before. ` + "`llmbox uninstall`" + ` names it.

| repair | what it does | undo | source |
|---|---|---|---|
`)
	for _, r := range repairs() {
		fmt.Fprintf(&out, "| `%s` | %s | %s | %s |\n", r.name, r.does, r.undo, r.source)
	}
	golden(t, docs, out.Bytes())
}
