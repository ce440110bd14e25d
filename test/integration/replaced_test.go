package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/component"
)

// ownChart makes a chart of somebody's own out of an embedded one: another name and
// version, images in its values, and its CRDs as templates, as upstream's charts have
// them.
func ownChart(t *testing.T, name string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	if err := os.CopyFS(dir, os.DirFS(mustAbs(filepath.Join("..", "..", "embed", "charts", name)))); err != nil {
		t.Fatal(err)
	}
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		t.Fatal(err)
	}
	node, ok := table.Get(name)
	if !ok {
		t.Fatalf("there is no component %s", name)
	}
	edit(t, filepath.Join(dir, "Chart.yaml"), func(text string) string {
		return replaceLine(t, replaceLine(t, text, "name:", "name: somebodys-"+name), "version:", "version: 99.0.0")
	})
	edit(t, filepath.Join(dir, "values.yaml"), func(text string) string {
		for key, image := range node.Images {
			text = strings.Replace(text, fmt.Sprintf("  %s: \"\"", key), fmt.Sprintf("  %s: %q", key, image.Reference), 1)
		}
		return text
	})
	for _, group := range node.CRDs {
		files, err := filepath.Glob(mustAbs(filepath.Join("..", "..", "embed", "crds", group, "*.yaml")))
		if err != nil || len(files) == 0 {
			t.Fatalf("the CRDs of %s: %v, %d files", group, err, len(files))
		}
		for _, file := range files {
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "templates", "crd-"+filepath.Base(file)), raw, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

func edit(t *testing.T, path string, change func(string) string) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(change(string(raw))), 0o600); err != nil {
		t.Fatal(err)
	}
}

func replaceLine(t *testing.T, text, prefix, line string) string {
	t.Helper()
	lines := strings.Split(text, "\n")
	i := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, prefix) })
	if i < 0 {
		t.Fatalf("no line begins with %q in\n%s", prefix, text)
	}
	lines[i] = line
	return strings.Join(lines, "\n")
}

// TestReplacedChart: a chart that brings its CRDs as templates takes the embedded one's
// place, from the start and on a box that is already there; and the embedded one comes
// back. What uses those CRDs stays the whole time.
func TestReplacedChart(t *testing.T) {
	l := useLab(t)
	l.clean(t)
	const scaled = "scaledobjects.keda.sh"
	chartDir := ownChart(t, "keda")
	box := filepath.Join(t.TempDir(), "box.yaml")
	if err := os.WriteFile(box, fmt.Appendf(nil, "apiVersion: llmbox.dev/v1alpha1\nkind: Box\ncomponents:\n  keda: {chart: %q}\n", chartDir), 0o600); err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(t.TempDir(), "own.yaml")
	// What was chosen once stays chosen until something else is said.
	if err := os.WriteFile(own, []byte("apiVersion: llmbox.dev/v1alpha1\nkind: Box\ncomponents:\n  keda: {chart: \"\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	without := []string{"--without", "policies,kyverno,vault,external-secrets"}
	uid := func() string {
		t.Helper()
		o, err := l.client.Dynamic.Resource(crds()).Get(t.Context(), scaled, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return string(o.GetUID())
	}
	owner := func() string {
		t.Helper()
		o, err := l.client.Dynamic.Resource(crds()).Get(t.Context(), scaled, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return o.GetLabels()["app.kubernetes.io/managed-by"] + " " + o.GetAnnotations()["meta.helm.sh/release-name"]
	}

	t.Run("from the start", func(t *testing.T) {
		plan := l.run(t, quickBound, append([]string{"plan", "--kubeconfig", l.Kubeconfig, "--config", box}, without...)...)
		if plan.code != 0 || !strings.Contains(plan.stdout, chartDir) {
			t.Errorf("the plan doesn't tell whose chart it is: %s", plan)
		}
		l.install(t, append(without, "--config", box)...)
		if got := owner(); got != "Helm keda" {
			t.Errorf("the CRD belongs to %q", got)
		}
		status := l.run(t, quickBound, "status", "--kubeconfig", l.Kubeconfig, "--config", box)
		if status.code != 0 || !strings.Contains(status.stdout, chartDir) {
			t.Errorf("the status doesn't tell that the chart is somebody's own: %s", status)
		}
	})
	first := uid()
	t.Run("back to the embedded chart", func(t *testing.T) {
		l.install(t, append(without, "--config", own)...)
		if got := owner(); got != "llmbox " {
			t.Errorf("the CRD belongs to %q", got)
		}
		if uid() != first {
			t.Error("the CRD was deleted and made anew: every ScaledObject of the cluster went with it")
		}
	})
	t.Run("on a box that is already there", func(t *testing.T) {
		l.install(t, append(without, "--config", box)...)
		if got := owner(); got != "Helm keda" {
			t.Errorf("the CRD belongs to %q", got)
		}
		if uid() != first {
			t.Error("the CRD was deleted and made anew")
		}
	})
	t.Run("removed", func(t *testing.T) {
		if res := l.run(t, uninstallBound, "uninstall", "--yes", "--kubeconfig", l.Kubeconfig, "--config", box); res.code != 0 {
			t.Fatal(res)
		}
		l.untouched(t)
		if _, err := l.client.Dynamic.Resource(crds()).Get(t.Context(), scaled, metav1.GetOptions{}); err == nil {
			t.Error("the chart's CRD is still there")
		}
	})
}
