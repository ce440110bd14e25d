package chart

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func load(t *testing.T, name string) *Chart {
	t.Helper()
	c, err := Load(os.DirFS("testdata"), name)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestLoad(t *testing.T) {
	c := load(t, "good")
	if c.Name() != "good" || c.Version() != "0.1.0" || c.AppVersion() != "1.2.3" || c.Origin() != "embedded" {
		t.Errorf("loaded %s %s for %s from %s", c.Name(), c.Version(), c.AppVersion(), c.Origin())
	}
	for name, fsys := range map[string]fs.FS{"absent": os.DirFS("testdata"), "no-metadata": os.DirFS("testdata"), "empty": fstest.MapFS{}} {
		if _, err := Load(fsys, name); !errors.Is(err, ErrLoad) {
			t.Errorf("%s: error is %v, want %v", name, err, ErrLoad)
		}
	}
}

func TestLoadOverride(t *testing.T) {
	dir := filepath.Join("testdata", "charts", "good")
	c, err := LoadOverride(Override{Chart: dir})
	if err != nil {
		t.Fatal(err)
	}
	if c.Origin() != dir {
		t.Errorf("origin is %q", c.Origin())
	}
	for _, absent := range []string{"testdata/absent", "testdata/charts/no-metadata"} {
		if _, err := LoadOverride(Override{Chart: absent}); !errors.Is(err, ErrLoad) || !strings.Contains(err.Error(), absent) {
			t.Errorf("error is %v, want %v with the path", err, ErrLoad)
		}
	}
}

func TestRender(t *testing.T) {
	r := Release{Name: "box", Namespace: "here", Chart: load(t, "good"), Values: map[string]any{
		"images": map[string]any{"main": "example.com/main:1"}, "replicas": 2, "extra": map[string]any{"key": "value"},
	}}
	objects, err := r.Render("v1.36.4+k3s1")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, o := range objects {
		names = append(names, o.GetKind()+"/"+o.GetName())
	}
	// The order in which Helm installs, without notes and empty documents.
	if want := []string{"ServiceAccount/main", "ConfigMap/extra", "Deployment/main"}; !slices.Equal(names, want) {
		t.Errorf("rendered %v, want %v", names, want)
	}
	d := objects[len(objects)-1]
	if got := d.GetAnnotations(); got["kubernetes"] != "v1.36.4" || got["release"] != "box" || d.GetNamespace() != "here" {
		t.Errorf("rendered for %v in %q", got, d.GetNamespace())
	}
	if n, _, err := unstructured.NestedInt64(d.Object, "spec", "replicas"); err != nil || n != 2 {
		t.Errorf("replicas are %d (%v): a whole number must stay one", n, err)
	}
	d.DeepCopy() // panics on numbers that an API machinery map can't hold
	if r.Values["replicas"] != 2 || len(r.Values) != 3 {
		t.Errorf("rendering changed the values to %v", r.Values)
	}
}

func TestRenderRefuses(t *testing.T) {
	image := map[string]any{"main": "example.com/main:1"}
	for _, tc := range []struct {
		name, chart, kube string
		values            map[string]any
		err               error
		says              []string
	}{
		{"unknown key", "good", "", map[string]any{"images": image, "nonsense": 1}, ErrValues, []string{"component box", "nonsense"}},
		{"unknown key below", "good", "", map[string]any{"images": map[string]any{"main": "a:1", "other": "b:1"}}, ErrValues, []string{"other"}},
		{"wrong type", "good", "", map[string]any{"images": image, "replicas": "two"}, ErrValues, []string{"replicas"}},
		{"image missing", "good", "", nil, ErrValues, []string{"images"}},
		{"template fails", "fails", "", nil, ErrRender, []string{"component box", "templates/object.yaml", "a name is needed"}},
		{"not YAML", "not-yaml", "", nil, ErrRender, []string{"component box", "templates/object.yaml"}},
		{"no Kubernetes version", "good", "new", map[string]any{"images": image}, nil, []string{`"new"`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Release{Name: "box", Namespace: "here", Chart: load(t, tc.chart), Values: tc.values}.Render(tc.kube)
			if err == nil {
				t.Fatal("no error")
			}
			if tc.err != nil && !errors.Is(err, tc.err) {
				t.Errorf("error is %v, want %v", err, tc.err)
			}
			for _, want := range tc.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q holds no %q", err, want)
				}
			}
		})
	}
}

func TestDigest(t *testing.T) {
	good := load(t, "good")
	base := Release{Name: "box", Namespace: "here", Chart: good, Values: map[string]any{"a": 1, "b": map[string]any{"c": true}}}
	digest := func(r Release) string {
		t.Helper()
		d, err := r.Digest()
		if err != nil {
			t.Fatal(err)
		}
		// It is kept as a label's value.
		if len(d) == 0 || len(d) > 63 {
			t.Errorf("digest %q does not fit a label", d)
		}
		return d
	}
	same := base
	same.Chart, same.Values = load(t, "good"), map[string]any{"b": map[string]any{"c": true}, "a": 1}
	if digest(base) != digest(same) {
		t.Error("equal releases have different digests")
	}
	seen := map[string]string{digest(base): "base"}
	for what, change := range map[string]func(*Release){
		"name":      func(r *Release) { r.Name = "other" },
		"namespace": func(r *Release) { r.Namespace = "there" },
		"value":     func(r *Release) { r.Values = map[string]any{"a": 2, "b": map[string]any{"c": true}} },
		"chart":     func(r *Release) { r.Chart = load(t, "fails") },
		"template": func(r *Release) {
			changed := copyDir(t, "testdata/charts/good")
			file := filepath.Join(changed, "templates", "objects.yaml")
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, append(raw, "# changed\n"...), 0o600); err != nil {
				t.Fatal(err)
			}
			if r.Chart, err = LoadPath(changed); err != nil {
				t.Fatal(err)
			}
		},
	} {
		other := base
		change(&other)
		d := digest(other)
		if twin, taken := seen[d]; taken {
			t.Errorf("another %s has the digest of %s", what, twin)
		}
		seen[d] = what
	}
}

func copyDir(t *testing.T, from string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), filepath.Base(from))
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	return to
}

// TestArchive checks that an archive is the chart again, byte for byte the same
// wherever and whenever it is made, and without the value combinations of tests.
func TestArchive(t *testing.T) {
	first, err := load(t, "good").Archive()
	if err != nil {
		t.Fatal(err)
	}
	second, err := load(t, "good").Archive()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, second) {
		t.Error("two archives of one chart differ")
	}
	zipped, err := gzip.NewReader(bytes.NewReader(first))
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for packed := tar.NewReader(zipped); ; {
		h, err := packed.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names[h.Name] = true
	}
	want := []string{"good/Chart.yaml", "good/templates/NOTES.txt", "good/templates/objects.yaml", "good/values.schema.json", "good/values.yaml"}
	if got := slices.Sorted(maps.Keys(names)); !slices.Equal(got, want) {
		t.Errorf("the archive holds %v, want %v", got, want)
	}
	file := filepath.Join(t.TempDir(), "good.tgz")
	if err := os.WriteFile(file, first, 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := LoadPath(file)
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]any{"images": map[string]any{"main": "example.com/main:1"}}
	one, err := Release{Name: "box", Namespace: "here", Chart: load(t, "good"), Values: values}.Render("")
	if err != nil {
		t.Fatal(err)
	}
	two, err := Release{Name: "box", Namespace: "here", Chart: again, Values: values}.Render("")
	if err != nil {
		t.Fatal(err)
	}
	if asJSON(t, one) != asJSON(t, two) {
		t.Error("the archive renders other objects than the chart")
	}
}

func asJSON(t *testing.T, objects []*unstructured.Unstructured) string {
	t.Helper()
	raw, err := json.Marshal(objects)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestMergeValues(t *testing.T) {
	base := map[string]any{"a": 1, "b": map[string]any{"c": 1, "d": 1}, "list": []any{1, 2}, "gone": 1}
	over := map[string]any{"a": 2, "b": map[string]any{"d": 2, "e": 2}, "list": []any{3}, "gone": nil, "new": map[string]any{"f": 1}}
	got := MergeValues(base, over)
	want := map[string]any{"a": 2, "b": map[string]any{"c": 1, "d": 2, "e": 2}, "list": []any{3}, "new": map[string]any{"f": 1}}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("merged %v, want %v", got, want)
	}
	if deep, ok := got["new"].(map[string]any); !ok {
		t.Error("a new map got lost")
	} else {
		deep["f"] = 2
	}
	if fmt.Sprint(base) != "map[a:1 b:map[c:1 d:1] gone:1 list:[1 2]]" || fmt.Sprint(over["new"]) != "map[f:1]" {
		t.Errorf("the arguments were changed: %v, %v", base, over)
	}
	if got := MergeValues(map[string]any{"a": 1}, map[string]any{"a": map[string]any{"b": 1}}); fmt.Sprint(got) != "map[a:map[b:1]]" {
		t.Errorf("a map over a number gives %v", got)
	}
}

func TestDecode(t *testing.T) {
	for _, tc := range []struct {
		name, in string
		objects  int
		fails    bool
	}{
		{"nothing", "", 0, false},
		{"only comments and separators", "# a\n---\n---\n# b\n", 0, false},
		{"two", "kind: A\n---\nkind: B\n", 2, false},
		{"JSON", `{"kind": "A"}`, 1, false},
		{"not YAML", "a: [", 0, true},
		{"a list", "- a\n", 0, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Decode(strings.NewReader(tc.in))
			if (err != nil) != tc.fails || len(got) != tc.objects {
				t.Errorf("%d objects and error %v, want %d, error: %t", len(got), err, tc.objects, tc.fails)
			}
		})
	}
}

func workloads(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	f, err := os.Open("testdata/pods/workloads.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	objects, err := Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

func TestPodRequests(t *testing.T) {
	var cpu, mem int64
	for _, o := range workloads(t) {
		c, m := PodRequests([]*unstructured.Unstructured{o})
		if got, want := fmt.Sprintf("%d %d", c, m>>20), o.GetAnnotations()["want"]; got != want {
			t.Errorf("%s %s asks for %s, want %s", o.GetKind(), o.GetName(), got, want)
		}
		cpu, mem = cpu+c, mem+m
	}
	if c, m := PodRequests(workloads(t)); c != cpu || m != mem {
		t.Errorf("together they ask for %d and %d, one by one for %d and %d", c, m, cpu, mem)
	}
}

func TestWorkloadImages(t *testing.T) {
	want := []string{"example.com/a:1", "example.com/b:1", "example.com/cron:1", "example.com/init:1", "example.com/proxy:1"}
	if got := WorkloadImages(workloads(t)); !slices.Equal(got, want) {
		t.Errorf("images are %v, want %v", got, want)
	}
}
