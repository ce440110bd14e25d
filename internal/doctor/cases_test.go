package doctor

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

const (
	casesDir = "testdata/cases"
	boxFile  = "testdata/box.yaml"
	hostBase = "../preflight/testdata/cases/ok-a10-ubuntu-2404"
)

// world is a snapshot written down: what was read, place by place.
type world struct {
	Time     string                      `json:"time"`
	Files    map[string]string           `json:"files"`
	Entries  []snapshot.Entry            `json:"entries"`
	Commands map[string]string           `json:"commands"`
	Exit     map[string]int              `json:"exit"`
	Probes   map[string]json.RawMessage  `json:"probes"`
	GPU      json.RawMessage             `json:"gpu"`
	Cluster  map[string][]map[string]any `json:"cluster"`
	Logs     map[string]string           `json:"logs"`
	// Unreadable are places that could not be read.
	Unreadable map[string]string `json:"unreadable"`
}

// scene is one case: a world, laid over the healthy box where Box says so, and what
// must be said of it.
type scene struct {
	world
	Name string `json:"name"`
	// Given marks a case as reported, word for word.
	Given bool   `json:"given"`
	About string `json:"about"`
	Box   bool   `json:"box"`
	// Remove drops objects of the box: "pods/NAMESPACE/NAME", "pods/NAMESPACE/*".
	Remove []string `json:"remove"`
	// Device is merged into the box's GPU.
	Device map[string]any `json:"device"`
	Want   struct {
		// First is the first finding's id, with its severity and state.
		First    string              `json:"first"`
		Severity string              `json:"severity"`
		State    string              `json:"state"`
		Also     []string            `json:"also"`
		Follows  []string            `json:"follows"`
		Silent   []string            `json:"silent"`
		Measured map[string][]string `json:"measured"`
		Fix      map[string][]string `json:"fix"`
	} `json:"want"`
}

func readScenes(t *testing.T) map[string][]scene {
	t.Helper()
	names, err := filepath.Glob(casesDir + "/*.yaml")
	if err != nil || len(names) == 0 {
		t.Fatal("no cases", err)
	}
	out := map[string][]scene{}
	for _, name := range names {
		raw, err := os.ReadFile(name) // #nosec G304 -- a fixture
		if err != nil {
			t.Fatal(err)
		}
		var file struct {
			Cases []scene `json:"cases"`
		}
		if err := yaml.UnmarshalStrict(raw, &file); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		out[strings.TrimSuffix(filepath.Base(name), ".yaml")] = file.Cases
	}
	return out
}

func readBox(t testing.TB) world {
	t.Helper()
	raw, err := os.ReadFile(boxFile)
	if err != nil {
		t.Fatal(err)
	}
	var w world
	if err := yaml.UnmarshalStrict(raw, &w); err != nil {
		t.Fatal(err)
	}
	return w
}

func key(object map[string]any) string {
	meta, _ := object["metadata"].(map[string]any)
	name, _ := meta["name"].(string)
	namespace, _ := meta["namespace"].(string)
	return namespace + "/" + name
}

// snapshot makes the facts of a scene, and reads them back from an archive: what a
// person would send.
func (s scene) snapshot(t testing.TB) *snapshot.Snapshot {
	t.Helper()
	out := snapshot.New()
	all := s.world
	if s.Box {
		base, err := snapshot.Load(hostBase)
		if err != nil {
			t.Fatal(err)
		}
		out = base
		box := readBox(t)
		all = box
		if s.Time != "" {
			all.Time = s.Time
		}
		for kind, objects := range s.Cluster {
			merged := slices.Clone(all.Cluster[kind])
			for _, o := range objects {
				merged = slices.DeleteFunc(merged, func(old map[string]any) bool { return key(old) == key(o) })
				merged = append(merged, o)
			}
			all.Cluster[kind] = merged
		}
		for _, gone := range s.Remove {
			kind, name, _ := strings.Cut(gone, "/")
			if kind == "logs" {
				maps.DeleteFunc(all.Logs, func(place, _ string) bool { return strings.HasPrefix(place, name) })
				continue
			}
			if kind == "probes" {
				delete(all.Probes, name)
				continue
			}
			all.Cluster[kind] = slices.DeleteFunc(all.Cluster[kind], func(o map[string]any) bool {
				stem, whole := strings.CutSuffix(name, "*")
				return key(o) == name || whole && strings.HasPrefix(key(o), stem)
			})
		}
		for place, text := range s.Logs {
			all.Logs[place] = text
		}
		for name, answer := range s.Probes {
			all.Probes[name] = answer
		}
		for name, text := range s.Files {
			all.Files[name] = text
		}
		all.Commands, all.Exit, all.Entries, all.GPU, all.Unreadable = s.Commands, s.Exit, s.Entries, s.GPU, s.Unreadable
		if s.Device != nil && out.GPU != nil && len(out.GPU.Devices) > 0 {
			raw, err := json.Marshal(s.Device)
			if err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(raw, &out.GPU.Devices[0]); err != nil {
				t.Fatal(err)
			}
		}
	}
	if all.Time != "" {
		at, err := time.Parse(time.RFC3339, all.Time)
		if err != nil {
			t.Fatal(err)
		}
		out.Manifest.Time = at
	}
	for name, text := range all.Files {
		out.AddFile(name, text)
	}
	for _, e := range all.Entries {
		out.AddEntry(e)
	}
	for name, text := range all.Commands {
		out.AddCommand(name, text, all.Exit[name])
	}
	for name, answer := range all.Probes {
		out.AddProbe(name, answer)
	}
	if all.GPU != nil {
		var report gpu.Report
		if err := json.Unmarshal(all.GPU, &report); err != nil {
			t.Fatal(err)
		}
		out.GPU = &report
	}
	for kind, objects := range all.Cluster {
		raw, err := json.Marshal(map[string]any{"items": objects})
		if err != nil {
			t.Fatal(err)
		}
		out.AddCluster(kind, raw)
	}
	for place, text := range all.Logs {
		parts := strings.Split(place, "/")
		if len(parts) != 3 {
			t.Fatalf("log %q is not NAMESPACE/POD/CONTAINER", place)
		}
		container, previous := strings.CutSuffix(parts[2], ".previous")
		out.AddLog(snapshot.LogName{Namespace: parts[0], Pod: parts[1], Container: container, Previous: previous}, text)
	}
	for place, why := range all.Unreadable {
		out.MarkUnreadable(place, why)
	}
	name := filepath.Join(t.TempDir(), "box.tar.gz")
	if err := out.Save(name); err != nil {
		t.Fatal(err)
	}
	read, err := snapshot.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	return read
}

// TestCases judges every case: the root first, all else folded, nothing else said.
func TestCases(t *testing.T) {
	t.Parallel()
	all := readScenes(t)
	given := 0
	for _, kind := range slices.Sorted(maps.Keys(all)) {
		for _, s := range all[kind] {
			if s.Given {
				given++
			}
			t.Run(kind+"/"+s.Name, func(t *testing.T) {
				t.Parallel()
				found := Judge(s.snapshot(t))
				s.check(t, found)
			})
		}
	}
	if given < 47 {
		t.Errorf("%d of 47 reported cases", given)
	}
}

func (s scene) check(t *testing.T, found []finding.Finding) {
	t.Helper()
	if len(found) == 0 {
		t.Fatal("nothing was found at all")
	}
	byID := map[string]finding.Finding{}
	var rootIDs, followers []string
	for _, f := range found {
		if _, twice := byID[f.ID]; twice {
			t.Errorf("%s is there twice", f.ID)
		}
		byID[f.ID] = f
		if f.Title == "" || f.Required == "" || f.Source == "" || f.Measured == "" {
			t.Errorf("%s is incomplete: %+v", f.ID, f)
		}
		if bad(f) && (f.Fix == "" || len(f.Evidence) == 0) {
			t.Errorf("%s lacks its fix or evidence: %+v", f.ID, f)
		}
		switch {
		case bad(f) && len(f.Causes) == 0:
			rootIDs = append(rootIDs, f.ID)
		case bad(f):
			followers = append(followers, f.ID)
		}
	}
	first := found[0]
	severity := s.Want.Severity
	if severity == "" {
		severity = "fail"
	}
	if first.ID != s.Want.First || string(first.Severity) != severity {
		t.Errorf("first is %s (%s), want %s (%s)", first.ID, first.Severity, s.Want.First, severity)
	}
	if s.Want.State != "" && string(first.State) != s.Want.State {
		t.Errorf("%s is in state %s, want %s", first.ID, first.State, s.Want.State)
	}
	for _, id := range rootIDs {
		if id != s.Want.First && !slices.Contains(s.Want.Also, id) {
			t.Errorf("root %s is not wanted: %s", id, byID[id].Measured)
		}
	}
	for _, id := range s.Want.Also {
		if !slices.Contains(rootIDs, id) {
			t.Errorf("%s is no root: %+v", id, byID[id])
		}
	}
	for _, id := range s.Want.Follows {
		if !slices.Contains(followers, id) {
			t.Errorf("%s does not follow: %+v", id, byID[id])
		}
	}
	for _, id := range s.Want.Silent {
		if bad(byID[id]) {
			t.Errorf("%s must be silent: %+v", id, byID[id])
		}
	}
	for id, words := range s.Want.Measured {
		for _, w := range words {
			if !strings.Contains(byID[id].Measured, w) {
				t.Errorf("%s measured %q, want %q in it", id, byID[id].Measured, w)
			}
		}
	}
	for id, words := range s.Want.Fix {
		for _, w := range words {
			if !strings.Contains(byID[id].Fix, w) {
				t.Errorf("%s is mended by %q, want %q in it", id, byID[id].Fix, w)
			}
		}
	}
	if t.Failed() {
		for i, f := range found {
			if i > 12 || !bad(f) && i > 3 {
				break
			}
			t.Log(i, f.Severity, f.State, f.ID, f.Measured, f.Causes)
		}
	}
}

// TestHealthy judges a box that is well: not one word against it.
func TestHealthy(t *testing.T) {
	t.Parallel()
	for _, f := range Judge(scene{Box: true}.snapshot(t)) {
		if bad(f) {
			t.Errorf("%s is %s: %s", f.ID, f.Severity, f.Measured)
		}
	}
}

// TestEmpty judges a snapshot in which nothing could be read: nothing is wrong then.
func TestEmpty(t *testing.T) {
	t.Parallel()
	for _, f := range Judge(snapshot.New()) {
		if bad(f) {
			t.Errorf("%s is %s: %s", f.ID, f.Severity, f.Measured)
		}
	}
}

// TestRegistry is what the registry promises: each row complete, each cause known.
func TestRegistry(t *testing.T) {
	t.Parallel()
	ids := map[string]bool{}
	for _, c := range hostChecks() {
		for _, id := range append([]string{c.ID}, c.Also...) {
			ids[id] = true
		}
	}
	own := map[string]bool{}
	for _, c := range Checks() {
		if own[c.ID] {
			t.Errorf("%s has two rows", c.ID)
		}
		own[c.ID] = true
		for _, id := range append([]string{c.ID}, c.Also...) {
			ids[id] = true
		}
	}
	for _, c := range Checks() {
		if c.Title == "" || c.Reads == "" || c.Rule == "" || c.Source == "" || c.Judge == nil {
			t.Errorf("%s is incomplete", c.ID)
		}
		for _, cause := range c.Causes {
			if !strings.HasSuffix(cause, "*") && !ids[cause] {
				t.Errorf("%s names %s as a cause, which no check returns", c.ID, cause)
			}
		}
	}
}

// TestNoCircles goes along the declared causes from a finding down to its layer: what
// explains lies no higher than what it explains.
func TestLayers(t *testing.T) {
	t.Parallel()
	layers := layersByID()
	for _, c := range Checks() {
		up := 0
		for _, cause := range c.Causes {
			l, own := layers[cause]
			if !own {
				l = hostLayer(cause)
			}
			if strings.HasSuffix(cause, "*") {
				continue
			}
			if l > c.Layer {
				up++
				t.Errorf("%s (%s) names %s (%s) as a cause, which lies above it", c.ID, c.Layer, cause, l)
			}
		}
	}
}

func ExampleLayer_String() {
	fmt.Println(LayerPCI, LayerClient)
	// Output: PCI bus client
}
