package rendered

import (
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/test/internal/rendering"
)

const footprintPage = "../../docs/footprint.md"

// What a box may ask for beside the model.
const (
	mostMemoryBytes = 2 << 30
	mostCPUMillis   = 1200
)

// sum counts containers that stay and what they ask for. The fields are explained in
// testdata/upstream-charts.yaml.
type sum struct {
	Containers  int   `json:"containers"`
	Unrequested int   `json:"unrequested"`
	Unlimited   int   `json:"unlimited"`
	CPUMillis   int64 `json:"cpu_millis"`
	MemoryBytes int64 `json:"memory_bytes"`
}

func (s sum) plus(o sum) sum {
	return sum{s.Containers + o.Containers, s.Unrequested + o.Unrequested, s.Unlimited + o.Unlimited, s.CPUMillis + o.CPUMillis, s.MemoryBytes + o.MemoryBytes}
}

// footprint is what one chart brings into a cluster.
type footprint struct {
	Objects  int   `json:"objects"`
	CRDs     int   `json:"crds"`
	CRDBytes int64 `json:"crd_bytes"`
	sum
}

func (f footprint) plus(o footprint) footprint {
	return footprint{f.Objects + o.Objects, f.CRDs + o.CRDs, f.CRDBytes + o.CRDBytes, f.sum.plus(o.sum)}
}

// upstream is one row of testdata/upstream-charts.yaml.
type upstream struct {
	Component string `json:"component"`
	Chart     string `json:"chart"`
	Version   string `json:"version"`
	Source    string `json:"source"`
	footprint
	Operands *struct {
		Source string `json:"source"`
		sum
	} `json:"operands,omitempty"`
}

func (u upstream) whole() footprint {
	f := u.footprint
	if u.Operands != nil {
		f.sum = f.sum.plus(u.Operands.sum)
	}
	return f
}

func loadUpstream(t *testing.T) []upstream {
	t.Helper()
	raw, err := os.ReadFile("testdata/upstream-charts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Charts []upstream `json:"charts"`
	}
	if err := yaml.UnmarshalStrict(raw, &doc); err != nil {
		t.Fatal(err)
	}
	for _, u := range doc.Charts {
		if u.Chart == "" || u.Version == "" || u.Source == "" || u.Operands != nil && u.Operands.Source == "" {
			t.Errorf("the figures of %s don't say of which chart, version or source they are", u.Component)
		}
	}
	return doc.Charts
}

// ours counts what a step of the plan brings. Its requests are those of the plan, which also
// has the Jobs that run while it is installed.
func ours(t *testing.T, step installer.Step, crdGroups []string, operands []operand) footprint {
	t.Helper()
	f := footprint{Objects: len(step.Objects)}
	for _, group := range crdGroups {
		files, err := fs.ReadDir(assets.FS(), "crds/"+group)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			info, err := file.Info()
			if err != nil {
				t.Fatal(err)
			}
			f.CRDs, f.CRDBytes = f.CRDs+1, f.CRDBytes+info.Size()
		}
	}
	for _, o := range step.Objects {
		template, ok, err := rendering.PodTemplate(o)
		if err != nil {
			t.Fatal(err)
		}
		replicas, found, err := unstructured.NestedInt64(o.Object, "spec", "replicas")
		if err != nil {
			t.Fatal(err)
		}
		if !found {
			replicas = 1
		}
		if ok && slices.Contains([]string{"Deployment", "StatefulSet", "DaemonSet"}, o.GetKind()) {
			f.count(template.Spec.Containers, int(replicas))
		}
	}
	for _, op := range operands {
		if op.Component != step.Name {
			continue
		}
		template, ok, err := op.build(step.Objects)
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			f.count(template.Spec.Containers, 1)
		}
	}
	f.CPUMillis, f.MemoryBytes = step.Requests.CPUMillis, step.Requests.MemoryBytes
	return f
}

func (f *footprint) count(containers []corev1.Container, pods int) {
	for _, c := range containers {
		f.Containers += pods
		if c.Resources.Requests.Memory().IsZero() {
			f.Unrequested += pods
		}
		if c.Resources.Limits.Memory().IsZero() {
			f.Unlimited += pods
		}
	}
}

// TestFootprintPage keeps docs/footprint.md equal to the plan of a box, and the plan within
// what a box may ask for.
func TestFootprintPage(t *testing.T) {
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		t.Fatal(err)
	}
	plan, err := rendering.Plan("a10", func(*config.Layer) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	beside, _ := plan.Totals()
	if beside.MemoryBytes > mostMemoryBytes || beside.CPUMillis > mostCPUMillis {
		t.Errorf("beside the model %+v are asked for, more than %d MiB and %dm", beside, mostMemoryBytes>>20, mostCPUMillis)
	}
	operands := loadOperands(t)
	have := map[string]footprint{}
	var names []string
	for _, step := range plan.Steps {
		c, known := table.Get(step.Name)
		if !known {
			t.Fatalf("the table has no %s", step.Name)
		}
		names = append(names, step.Name)
		have[step.Name] = ours(t, step, c.CRDs, operands)
	}
	base := have["base"]
	base.Objects += len(plan.Manifests) + len(plan.IfAbsent)
	have["base"] = base
	checkPage(t, footprintPage, writeFootprintPage(names, have, loadUpstream(t)))
}

func writeFootprintPage(names []string, have map[string]footprint, theirs []upstream) string {
	var b strings.Builder
	b.WriteString(`# Footprint

What a box asks of its node, beside what upstream's own charts would with their default values.
The figures of llmbox are those of ` + "`llmbox plan`" + ` for one GPU; ` + "`make docs`" + ` writes this page and a
test keeps it true. Upstream's were counted on rendered charts
(` + "`test/rendered/testdata/upstream-charts.yaml`" + `).

A request of nothing is no small request: such a pod is placed anywhere, takes what it finds and
is the first to be killed when memory runs out. So the containers without a memory request, and
without a limit, are counted too; pods that operators make are included on both sides.

| | objects | CRDs | containers | without memory request / limit | CPU requests | memory requests |
|---|---|---|---|---|---|---|
`)
	row := func(name string, f footprint) {
		fmt.Fprintf(&b, "| %s | %d | %s | %d | %d / %d | %s | %s |\n", name, f.Objects, crds(f), f.Containers, f.Unrequested, f.Unlimited,
			orNothing(f.CPUMillis, "m"), orNothing(f.MemoryBytes>>20, " MiB"))
	}
	var sumOurs, sumTheirs footprint
	compared := map[string]bool{}
	for _, u := range theirs {
		row("**"+u.Component+"**: llmbox", have[u.Component])
		row("upstream, "+u.Chart+" "+u.Version, u.whole())
		sumOurs, sumTheirs = sumOurs.plus(have[u.Component]), sumTheirs.plus(u.whole())
		compared[u.Component] = true
	}
	row("**all of these**: llmbox", sumOurs)
	row("upstream", sumTheirs)
	fmt.Fprintf(&b, `
llmbox' requests count Jobs too, which run only while something is installed (the gateway's
certificates, a download on a cluster without a host). Its dashboards and alerts of the model
are objects of other components, below. Upstream's gpu-operator is counted without the driver
and toolkit containers that its chart has on by default: on a box both belong to the host.

## What has no chart upstream

| | objects | CPU requests | memory requests |
|---|---|---|---|
`)
	for _, name := range names {
		if f := have[name]; !compared[name] {
			fmt.Fprintf(&b, "| `%s` | %d | %s | %s |\n", name, f.Objects, orNothing(f.CPUMillis, "m"), orNothing(f.MemoryBytes>>20, " MiB"))
		}
	}
	var beside footprint
	for _, name := range names {
		if name != "model" {
			beside = beside.plus(have[name])
		}
	}
	fmt.Fprintf(&b, `
Beside the model all of it asks for **%dm CPU and %d MiB**; a test holds it below %dm and
%d MiB. The model's row has its chart's defaults, an install works out its own.

## Sources

| chart | read in |
|---|---|
`, beside.CPUMillis, beside.MemoryBytes>>20, mostCPUMillis, mostMemoryBytes>>20)
	for _, u := range theirs {
		fmt.Fprintf(&b, "| %s %s | %s |\n", u.Chart, u.Version, u.Source)
		if u.Operands != nil {
			fmt.Fprintf(&b, "| pods it makes | %s |\n", u.Operands.Source)
		}
	}
	return b.String()
}

func crds(f footprint) string {
	if f.CRDs == 0 {
		return "–"
	}
	return fmt.Sprintf("%d (%d KiB)", f.CRDs, f.CRDBytes>>10)
}

func orNothing(n int64, unit string) string {
	if n == 0 {
		return "–"
	}
	return fmt.Sprintf("%d%s", n, unit)
}
