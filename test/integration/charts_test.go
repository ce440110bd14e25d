package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/lint/support"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/test/internal/rendering"
)

// fewestCombinations is how many value combinations each component must offer.
const fewestCombinations = 6

func splitGroupVersion(s string) schema.GroupVersion {
	gv, err := schema.ParseGroupVersion(s)
	if err != nil {
		return schema.GroupVersion{}
	}
	return gv
}

// combinations lists every value combination that the charts come with.
func combinations(t *testing.T) []rendering.Combination {
	t.Helper()
	all, err := rendering.Combinations()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func render(t *testing.T, c rendering.Combination) []*unstructured.Unstructured {
	t.Helper()
	objects, err := c.Objects()
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

func TestEnoughCombinations(t *testing.T) {
	count := map[string]int{}
	for _, c := range combinations(t) {
		count[c.Component.Name]++
	}
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range table.Components {
		if c.Chart != "" && count[c.Name] < fewestCombinations {
			t.Errorf("%s has %d value combinations, want at least %d", c.Name, count[c.Name], fewestCombinations)
		}
	}
}

// TestChartRules checks what every object of every combination must be like.
func TestChartRules(t *testing.T) {
	for _, c := range combinations(t) {
		t.Run(c.String(), func(t *testing.T) {
			for _, o := range render(t, c) {
				for _, complaint := range judge(o) {
					t.Errorf("%s %s: %s", o.GetKind(), o.GetName(), complaint)
				}
			}
		})
	}
}

func judge(o *unstructured.Unstructured) []string {
	var found []string
	if o.GetLabels()[cluster.PartOfLabel] != cluster.ManagedByValue {
		found = append(found, "has no label "+cluster.PartOfLabel+"="+cluster.ManagedByValue)
	}
	if o.GetKind() == "CustomResourceDefinition" {
		found = append(found, "a chart holds no CRD")
	}
	if o.GetKind() == "Secret" {
		for _, field := range []string{"data", "stringData"} {
			if data, _, _ := unstructured.NestedMap(o.Object, field); len(data) > 0 {
				found = append(found, "a Secret with "+field+" in a chart ends up readable in the release")
			}
		}
	}
	template, ok, err := rendering.PodTemplate(o)
	if err != nil {
		return append(found, err.Error())
	}
	if !ok {
		return found
	}
	spec := template.Spec
	if template.Labels[cluster.PartOfLabel] != cluster.ManagedByValue {
		found = append(found, "its pods have no label "+cluster.PartOfLabel)
	}
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		if !tagged(c.Image) {
			found = append(found, fmt.Sprintf("container %s: image %q needs a tag other than latest", c.Name, c.Image))
		}
		r := c.Resources
		if r.Requests.Cpu().IsZero() || r.Requests.Memory().IsZero() || r.Limits.Memory().IsZero() {
			found = append(found, fmt.Sprintf("container %s: cpu and memory requests and a memory limit are needed, has %v", c.Name, r))
		}
	}
	return found
}

func tagged(image string) bool {
	name, _, _ := strings.Cut(image, "@")
	_, tag, ok := strings.Cut(name[strings.LastIndexByte(name, '/')+1:], ":")
	return ok && tag != "" && tag != "latest" && tag != "VERSION"
}

// TestJudge shows that the rules catch what they are for.
func TestJudge(t *testing.T) {
	raw, err := os.ReadFile("testdata/bad-objects.yaml")
	if err != nil {
		t.Fatal(err)
	}
	objects, err := chart.Decode(strings.NewReader(string(raw)))
	if err != nil {
		t.Fatal(err)
	}
	if len(objects) == 0 {
		t.Fatal("the fixture is empty")
	}
	for _, o := range objects {
		want := o.GetAnnotations()["want"]
		got := strings.Join(judge(o), "\n")
		if want == "" && got != "" || want != "" && !strings.Contains(got, want) {
			t.Errorf("%s %s: judged %q, want %q", o.GetKind(), o.GetName(), got, want)
		}
	}
}

// TestHelmLint runs what `helm lint --strict` runs.
func TestHelmLint(t *testing.T) {
	version, err := chartutil.ParseKubeVersion(rendering.KubeVersion)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range combinations(t) {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			lint := action.NewLint()
			lint.Strict = true
			lint.Namespace = c.Component.Namespace
			lint.KubeVersion = version
			dir := filepath.Join("..", "..", "embed", "charts", c.Component.Chart)
			result := lint.Run([]string{dir}, c.Values)
			if result.TotalChartsLinted != 1 {
				t.Fatalf("%d charts linted: %v", result.TotalChartsLinted, result.Errors)
			}
			for _, err := range result.Errors {
				t.Error(err)
			}
			for _, m := range result.Messages {
				if m.Severity >= support.WarningSev {
					t.Error(m)
				}
			}
		})
	}
}

// warningKey finds, in the context of a request, where its warnings go.
type warningKey struct{}

// warnings collects what the API server says beside its answer.
type warnings struct {
	mu   sync.Mutex
	said []string
}

type warningHandler struct{}

func (warningHandler) HandleWarningHeaderWithContext(ctx context.Context, code int, _, text string) {
	into, ok := ctx.Value(warningKey{}).(*warnings)
	if !ok || code != 299 || text == "" {
		return
	}
	into.mu.Lock()
	defer into.mu.Unlock()
	into.said = append(into.said, text)
}

// TestAPIServerAcceptsCharts sends every object of every combination to the real
// API server, as a strict dry run, after CRDs and namespaces were brought in the
// way the product does.
func TestAPIServerAcceptsCharts(t *testing.T) {
	l := useLab(t)
	l.clean(t)
	client := l.connect(t, warningHandler{})
	said := &warnings{}
	ctx := context.WithValue(t.Context(), warningKey{}, said)

	plan := buildPlan(t, client.Version, "a10", unchanged)
	for _, o := range slices.Concat(plan.Manifests, plan.IfAbsent) {
		if _, err := client.Apply(ctx, o); err != nil {
			t.Fatalf("applying %s %s: %v", o.GetKind(), o.GetName(), err)
		}
	}
	result, err := client.ApplyCRDs(ctx, plan.CRDs, func(int, int) {})
	if err != nil {
		t.Fatal(err)
	}
	if len(result.Applied) != len(plan.CRDs) {
		t.Errorf("%d of %d CRDs applied, %v are somebody else's", len(result.Applied), len(plan.CRDs), result.Foreign)
	}
	if len(said.said) > 0 {
		t.Errorf("warnings for manifests and CRDs: %s", strings.Join(said.said, "\n"))
	}

	// Most objects are the same in every combination: each is sent once, and a
	// complaint names all the combinations it is in.
	unique := map[string]*unstructured.Unstructured{}
	from := map[string][]string{}
	for _, c := range combinations(t) {
		for _, o := range render(t, c) {
			if o.GetNamespace() == "" {
				mapping, err := client.Mapper.RESTMapping(o.GroupVersionKind().GroupKind(), o.GroupVersionKind().Version)
				if err != nil {
					t.Fatalf("%s: %s %s: %v", c, o.GetKind(), o.GetName(), err)
				}
				if mapping.Scope.Name() == "namespace" {
					o.SetNamespace(c.Component.Namespace)
				}
			}
			raw, err := json.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			unique[string(raw)] = o
			from[string(raw)] = append(from[string(raw)], c.String())
		}
	}
	t.Logf("%d different objects", len(unique))
	l.makeNamespaces(t, unique)
	keys := slices.Sorted(maps.Keys(unique))
	work := make(chan string)
	var group sync.WaitGroup
	for range 6 {
		group.Go(func() {
			for key := range work {
				if complaint := send(t.Context(), client, unique[key], key); complaint != "" {
					t.Errorf("%s %s: %s\n\tin %s", unique[key].GetKind(), unique[key].GetName(), complaint, strings.Join(from[key], ", "))
				}
			}
		})
	}
	for _, key := range keys {
		work <- key
	}
	close(work)
	group.Wait()
}

// makeNamespaces creates those namespaces that a combination names and that are
// not the box's own: they are the user's to have.
func (l *lab) makeNamespaces(t *testing.T, objects map[string]*unstructured.Unstructured) {
	t.Helper()
	namespaces := l.client.Kube.CoreV1().Namespaces()
	for _, o := range objects {
		name := o.GetNamespace()
		if name == "" {
			continue
		}
		_, err := namespaces.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := namespaces.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
				t.Errorf("removing namespace %s: %v", name, err)
			}
		})
	}
}

// send creates and applies the object in a strict dry run and returns what the
// API server has against it.
func send(ctx context.Context, client *cluster.Client, o *unstructured.Unstructured, raw string) string {
	said := &warnings{}
	ctx = context.WithValue(ctx, warningKey{}, said)
	gvk := o.GroupVersionKind()
	mapping, err := client.Mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		return err.Error()
	}
	resource := client.Dynamic.Resource(mapping.Resource).Namespace(o.GetNamespace()) // "" for cluster-wide objects
	dry := []string{metav1.DryRunAll}
	if _, err := resource.Create(ctx, o.DeepCopy(), metav1.CreateOptions{DryRun: dry, FieldValidation: "Strict"}); err != nil {
		return "create: " + err.Error()
	}
	if _, err := resource.Patch(ctx, o.GetName(), types.ApplyPatchType, []byte(raw),
		metav1.PatchOptions{DryRun: dry, FieldValidation: "Strict", FieldManager: "integration-test"}); err != nil {
		return "apply: " + err.Error()
	}
	if len(said.said) > 0 {
		return "warnings: " + strings.Join(said.said, "; ")
	}
	return ""
}

// TestStrictDryRunRefuses shows that the API server would have complained.
func TestStrictDryRunRefuses(t *testing.T) {
	client := useLab(t).connect(t, warningHandler{})
	for _, file := range []string{"unknown-field.yaml", "deprecated-field.yaml"} {
		raw, err := os.ReadFile(filepath.Join("testdata", "refused", file))
		if err != nil {
			t.Fatal(err)
		}
		objects, err := chart.Decode(strings.NewReader(string(raw)))
		if err != nil || len(objects) != 1 {
			t.Fatalf("%s: %d objects, %v", file, len(objects), err)
		}
		body, err := json.Marshal(objects[0])
		if err != nil {
			t.Fatal(err)
		}
		want := objects[0].GetAnnotations()["want"]
		if got := send(t.Context(), client, objects[0], string(body)); !strings.Contains(got, want) {
			t.Errorf("%s: the API server says %q, want %q in it", file, got, want)
		}
	}
}
