package e2e

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/component"
)

// chartsDir names a directory with charts as upstream publishes them: NAME.tgz or NAME/
// for the component NAME, and beside it NAME.yaml with values, if it needs any (the lab
// has the images of the versions that llmbox ships).
const chartsDir = "LLMBOX_E2E_CHARTS"

// quickly is for what asks the cluster and changes nothing.
const quickly = 2 * time.Minute

// TestUpstreamCharts puts upstream's own charts in the place of embedded ones: the whole
// box comes up with them, serves and scales, goes over to the embedded charts and back
// without losing a CRD, and goes.
func TestUpstreamCharts(t *testing.T) {
	onlyWhereAsked(t, true)
	dir := os.Getenv(chartsDir)
	if dir == "" {
		t.Skipf("set %s to a directory of upstream's charts", chartsDir)
	}
	charts := findCharts(t, dir)
	bin := binDir(t)
	needs(t, bin, operators())
	b := newWholeBox(t, bin, startOrTake(t, bin, "--gpus", "3"))
	theirs, ours := slices.Clone(b.flags), slices.Clone(b.flags)
	theirs[3] = b.boxWith(t, func(name string, c map[string]any) {
		if from, ok := charts[name]; ok {
			c["chart"], c["values"] = from.chart, from.values
		}
	})
	ours[3] = b.boxWith(t, func(name string, c map[string]any) {
		if _, ok := charts[name]; ok {
			// What was chosen once stays chosen until something else is said.
			c["chart"], c["values"] = "", map[string]any{}
		}
	})
	b.flags = theirs

	plan := b.llmbox(t, quickly, "plan")
	for name, from := range charts {
		if !strings.Contains(plan, from.chart) {
			t.Errorf("the plan doesn't say where the chart of %s comes from:\n%s", name, plan)
		}
	}
	t.Log(b.install(t))
	first := b.crds(t)
	t.Run("the charts' CRDs are the charts', all others llmbox's", func(t *testing.T) { b.ownCRDs(t, first, charts) })
	t.Run("status says whose charts they are", func(t *testing.T) {
		status := b.llmbox(t, quickly, "status")
		for name, from := range charts {
			if !strings.Contains(status, from.chart) {
				t.Errorf("nothing of the chart of %s:\n%s", name, status)
			}
		}
	})
	t.Run("it serves", func(t *testing.T) { must(t, b.serves(t.Context())) })
	if _, ok := charts["keda"]; ok {
		t.Run("the scaler takes the model server from one to three and back", b.scaling)
	}
	if _, ok := charts["kyverno"]; ok {
		t.Run("Kyverno", b.kyverno)
	}
	t.Run("a second install changes nothing", func(t *testing.T) {
		before := b.revisions(t)
		b.install(t)
		if after := b.revisions(t); !slices.Equal(before, after) {
			t.Errorf("releases before: %v\nafter: %v", before, after)
		}
	})
	t.Run("over to the embedded charts", func(t *testing.T) {
		b := b.with(ours)
		t.Log(b.install(t))
		b.ownCRDs(t, b.crds(t), nil)
		b.sameCRDs(t, first)
		must(t, b.serves(t.Context()))
	})
	t.Run("and back", func(t *testing.T) {
		t.Log(b.install(t))
		b.ownCRDs(t, b.crds(t), charts)
		b.sameCRDs(t, first)
		must(t, b.serves(t.Context()))
	})
	t.Run("uninstall leaves nothing of llmbox's", func(t *testing.T) {
		b.uninstall(t)
		for name := range b.crds(t) {
			t.Errorf("CRD %s is still there", name)
		}
	})
	b.stop(t)
}

// upstream is a chart for a component.
type upstream struct {
	chart  string
	values map[string]any
}

func findCharts(t *testing.T, dir string) map[string]upstream {
	t.Helper()
	dir, err := filepath.Abs(dir)
	must(t, err)
	entries, err := os.ReadDir(dir)
	must(t, err)
	found := map[string]upstream{}
	for _, e := range entries {
		name, packed := strings.CutSuffix(e.Name(), ".tgz")
		if !packed && !e.IsDir() {
			continue
		}
		from := upstream{chart: filepath.Join(dir, e.Name()), values: map[string]any{}}
		if raw, err := os.ReadFile(filepath.Join(dir, name+".yaml")); err == nil {
			must(t, yaml.Unmarshal(raw, &from.values))
		}
		found[name] = from
	}
	if len(found) == 0 {
		t.Fatalf("there is no chart in %s", dir)
	}
	return found
}

// boxWith writes the box's configuration with other components.
func (b *wholeBox) boxWith(t *testing.T, change func(name string, c map[string]any)) string {
	t.Helper()
	raw, err := os.ReadFile(b.flags[3])
	must(t, err)
	var box map[string]any
	must(t, yaml.Unmarshal(raw, &box))
	components, ok := box["components"].(map[string]any)
	if !ok {
		t.Fatalf("the configuration has no components: %s", raw)
	}
	// Its GPUs are the lab's.
	components["gpu-operator"] = map[string]any{"mode": "external"}
	table, err := component.LoadTable(assets.FS())
	must(t, err)
	for _, c := range table.Components {
		of, ok := components[c.Name].(map[string]any)
		if !ok {
			of = map[string]any{}
		}
		change(c.Name, of)
		if len(of) > 0 {
			components[c.Name] = of
		}
	}
	raw, err = yaml.Marshal(box)
	must(t, err)
	path := filepath.Join(t.TempDir(), "box.yaml")
	must(t, os.WriteFile(path, raw, 0o600))
	return path
}

func (b *wholeBox) with(flags []string) *wholeBox {
	other := *b
	other.flags = flags
	return &other
}

// crds are those of the component table that the cluster has, by name.
func (b *wholeBox) crds(t *testing.T) map[string]unstructured.Unstructured {
	t.Helper()
	list, err := b.dynamic.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}).
		List(t.Context(), metav1.ListOptions{})
	must(t, err)
	known := map[string]bool{}
	for _, names := range crdsByComponent(t) {
		for _, name := range names {
			known[name] = true
		}
	}
	found := map[string]unstructured.Unstructured{}
	for _, item := range list.Items {
		if known[item.GetName()] {
			found[item.GetName()] = item
		}
	}
	return found
}

func crdsByComponent(t *testing.T) map[string][]string {
	t.Helper()
	table, err := component.LoadTable(assets.FS())
	must(t, err)
	names := map[string][]string{}
	for _, c := range table.Components {
		for _, group := range c.CRDs {
			files, err := fs.Glob(assets.FS(), "crds/"+group+"/*.yaml")
			must(t, err)
			for _, file := range files {
				raw, err := fs.ReadFile(assets.FS(), file)
				must(t, err)
				var crd metav1.PartialObjectMetadata
				must(t, yaml.Unmarshal(raw, &crd))
				names[c.Name] = append(names[c.Name], crd.Name)
			}
		}
	}
	return names
}

// ownCRDs looks whose the CRDs are: a replaced chart's, or llmbox's.
func (b *wholeBox) ownCRDs(t *testing.T, found map[string]unstructured.Unstructured, charts map[string]upstream) {
	t.Helper()
	for name, crds := range crdsByComponent(t) {
		if name == "gpu-operator" {
			continue // not installed here
		}
		want := "llmbox "
		if _, replaced := charts[name]; replaced {
			want = "Helm " + name
		}
		for _, crd := range crds {
			o, ok := found[crd]
			if !ok {
				if want == "llmbox " {
					t.Errorf("%s: CRD %s is not there", name, crd)
				} else {
					t.Logf("%s: upstream's chart has no CRD %s", name, crd)
				}
				continue
			}
			if got := o.GetLabels()["app.kubernetes.io/managed-by"] + " " + o.GetAnnotations()["meta.helm.sh/release-name"]; got != want {
				t.Errorf("%s: CRD %s belongs to %q, want %q", name, crd, got, want)
			}
		}
	}
}

// sameCRDs looks for CRDs that were made anew: every object of theirs would be gone.
func (b *wholeBox) sameCRDs(t *testing.T, before map[string]unstructured.Unstructured) {
	t.Helper()
	now := b.crds(t)
	for name, old := range before {
		if o, ok := now[name]; !ok || o.GetUID() != old.GetUID() {
			t.Errorf("CRD %s was deleted", name)
		}
	}
}
