package rendered

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	psa "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/test/internal/rendering"
)

//go:generate go test -run "TestPodSecurityPage|TestFootprintPage" -update .

var update = flag.Bool("update", false, "write docs/pod-security.md and docs/footprint.md anew")

const podSecurityPage = "../../docs/pod-security.md"

// pod is one pod template and where it comes from.
type pod struct {
	component, namespace, workload string
	// in names the value combination.
	in       string
	template corev1.PodTemplateSpec
}

func (p pod) String() string { return p.component + " " + p.workload }

// exceptions is testdata/pod-security.yaml.
type exceptions struct {
	// Standard lists the pods that break the restricted standard.
	Standard []exception `json:"standard"`
	// Resources lists the containers without a request or a memory limit.
	Resources []exception `json:"resources"`
}

type exception struct {
	Component string `json:"component"`
	Workload  string `json:"workload"`
	// Breaks lists what is broken, in the words of the check: what Kubernetes itself says
	// when it refuses such a pod, or "CONTAINER: what is missing".
	Breaks []string `json:"breaks"`
	Reason string   `json:"reason"`
}

func loadExceptions(t *testing.T) exceptions {
	t.Helper()
	raw, err := os.ReadFile("testdata/pod-security.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var e exceptions
	if err := yaml.UnmarshalStrict(raw, &e); err != nil {
		t.Fatal(err)
	}
	return e
}

// pods lists every pod template of every value combination, and of the operands that
// operators make of it.
func pods(t *testing.T) []pod {
	t.Helper()
	combinations, err := rendering.Combinations()
	if err != nil {
		t.Fatal(err)
	}
	operands := loadOperands(t)
	var all []pod
	for _, c := range combinations {
		objects, err := c.Objects()
		if err != nil {
			t.Fatal(err)
		}
		found, err := podsOf(c.Component.Name, c.Component.Namespace, c.String(), objects, operands)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, found...)
	}
	return all
}

func podsOf(component, namespace, in string, objects []*unstructured.Unstructured, operands []operand) ([]pod, error) {
	var all []pod
	for _, o := range objects {
		where := namespace
		if o.GetNamespace() != "" {
			where = o.GetNamespace()
		}
		template, ok, err := rendering.PodTemplate(o)
		if err != nil {
			return nil, err
		}
		if ok {
			all = append(all, pod{component: component, namespace: where, in: in, template: template, workload: o.GetKind() + "/" + plain(o.GetName())})
		}
	}
	for _, op := range operands {
		if op.Component != component {
			continue
		}
		template, ok, err := op.build(objects)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", in, err)
		}
		if ok {
			all = append(all, pod{component: component, namespace: namespace, in: in, template: template, workload: op.Workload})
		}
	}
	for _, o := range objects {
		if o.GetKind() != "LimitRange" {
			continue
		}
		var limits corev1.LimitRange
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &limits); err != nil {
			return nil, fmt.Errorf("%s: reading LimitRange %s: %w", in, o.GetName(), err)
		}
		for i := range all {
			if o.GetNamespace() == "" || o.GetNamespace() == all[i].namespace {
				fill(&all[i].template.Spec, limits.Spec.Limits)
			}
		}
	}
	return all, nil
}

// fill does what the API server does for containers of a namespace with a LimitRange: a
// request that is not said is the container's limit, or else the default.
func fill(spec *corev1.PodSpec, limits []corev1.LimitRangeItem) {
	for _, list := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			r := &list[i].Resources
			for _, item := range limits {
				if item.Type != corev1.LimitTypeContainer {
					continue
				}
				r.Requests = laidUnder(r.Requests, r.Limits)
				r.Requests = laidUnder(r.Requests, item.DefaultRequest)
				r.Limits = laidUnder(r.Limits, item.Default)
			}
		}
	}
}

// laidUnder is the list with what it lacks taken from another.
func laidUnder(list, under corev1.ResourceList) corev1.ResourceList {
	out := maps.Clone(under)
	if out == nil {
		out = corev1.ResourceList{}
	}
	maps.Copy(out, list)
	return out
}

// plain takes the checksum off the name of a Job that is made anew with its spec.
func plain(name string) string {
	if i := strings.LastIndexByte(name, '-'); i > 0 && len(name)-i == 9 && strings.Trim(name[i+1:], "0123456789abcdef") == "" {
		return name[:i]
	}
	return name
}

// evaluator asks the checks that the box's own API server asks.
func evaluator(t *testing.T) policy.Evaluator {
	t.Helper()
	e, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// broken lists what the pod breaks of a level, by the reason Kubernetes gives.
func broken(e policy.Evaluator, level psa.Level, p pod) []string {
	var reasons []string
	for _, result := range e.EvaluatePod(psa.LevelVersion{Level: level, Version: psa.LatestVersion()}, &p.template.ObjectMeta, &p.template.Spec) {
		if !result.Allowed {
			reasons = append(reasons, result.ForbiddenReason)
		}
	}
	return reasons
}

// unbounded lists what the containers of the pod don't say about resources.
func unbounded(p pod) []string {
	var missing []string
	for _, c := range slices.Concat(p.template.Spec.InitContainers, p.template.Spec.Containers) {
		var lacks []string
		for _, want := range []struct {
			what string
			has  bool
		}{
			{"CPU request", !c.Resources.Requests.Cpu().IsZero()},
			{"memory request", !c.Resources.Requests.Memory().IsZero()},
			{"memory limit", !c.Resources.Limits.Memory().IsZero()},
		} {
			if !want.has {
				lacks = append(lacks, want.what)
			}
		}
		if len(lacks) > 0 {
			missing = append(missing, c.Name+": "+strings.Join(lacks, ", "))
		}
	}
	return missing
}

// compare holds what pods break against the exceptions, in both directions: what is broken
// needs an exception, and an exception needs something that is broken.
func compare(all []pod, listed []exception, breaks func(pod) []string) []string {
	type key struct{ component, workload, what string }
	unused := map[key]bool{}
	var complaints []string
	for _, e := range listed {
		if strings.TrimSpace(e.Reason) == "" || len(e.Breaks) == 0 {
			complaints = append(complaints, fmt.Sprintf("the exception for %s %s has no reason, or nothing that it excuses", e.Component, e.Workload))
		}
		for _, what := range e.Breaks {
			k := key{e.Component, e.Workload, what}
			if unused[k] {
				complaints = append(complaints, fmt.Sprintf("%s %s: %q is excused twice", e.Component, e.Workload, what))
			}
			unused[k] = true
		}
	}
	excused := maps.Clone(unused)
	where := map[key][]string{}
	for _, p := range all {
		for _, what := range breaks(p) {
			k := key{p.component, p.workload, what}
			delete(unused, k)
			if !excused[k] {
				where[k] = append(where[k], p.in)
			}
		}
	}
	for k, in := range where {
		complaints = append(complaints, fmt.Sprintf("%s %s: %s (in %s)", k.component, k.workload, k.what, strings.Join(in, ", ")))
	}
	for k := range unused {
		complaints = append(complaints, fmt.Sprintf("%s %s: the exception for %q is no longer needed", k.component, k.workload, k.what))
	}
	slices.Sort(complaints)
	return complaints
}

// TestPodSecurity: every pod of every combination meets Kubernetes' restricted standard, or
// is on the list with its reason.
func TestPodSecurity(t *testing.T) {
	all, e := pods(t), evaluator(t)
	for _, complaint := range compare(all, loadExceptions(t).Standard, func(p pod) []string { return broken(e, psa.LevelRestricted, p) }) {
		t.Error(complaint)
	}
	t.Logf("%d pod templates", len(all))
}

// TestContainerResources: every container says what it needs and how much memory it may
// take, or is on the list with its reason.
func TestContainerResources(t *testing.T) {
	for _, complaint := range compare(pods(t), loadExceptions(t).Resources, unbounded) {
		t.Error(complaint)
	}
}

// namespaces gives the level that the API server enforces in each namespace of a box.
func namespaces(t *testing.T) map[string]psa.Level {
	t.Helper()
	f, err := assets.FS().Open("manifests/namespaces.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	objects, err := chart.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	levels := map[string]psa.Level{}
	for _, o := range objects {
		level, err := psa.ParseLevel(o.GetLabels()[psa.EnforceLevelLabel])
		if err != nil {
			t.Fatalf("namespace %s: %v", o.GetName(), err)
		}
		levels[o.GetName()] = level
	}
	return levels
}

// TestNamespaceLevels: the level that a namespace enforces admits each of its pods, and is
// no lower than the pods on the list need.
func TestNamespaceLevels(t *testing.T) {
	e, levels, needed := evaluator(t), namespaces(t), map[string]psa.Level{}
	for _, p := range pods(t) {
		level, ours := levels[p.namespace]
		if !ours {
			continue // a namespace of the user's, named in a value
		}
		if what := broken(e, level, p); len(what) > 0 {
			t.Errorf("%s: namespace %s enforces %q, which refuses it: %s (in %s)", p, p.namespace, level, strings.Join(what, ", "), p.in)
		}
		for _, stricter := range []psa.Level{psa.LevelRestricted, psa.LevelBaseline, psa.LevelPrivileged} {
			if len(broken(e, stricter, p)) > 0 {
				continue
			}
			if lowest, seen := needed[p.namespace]; !seen || psa.CompareLevels(stricter, lowest) < 0 {
				needed[p.namespace] = stricter
			}
			break
		}
	}
	for name, level := range levels {
		if need, seen := needed[name]; seen && psa.CompareLevels(level, need) < 0 {
			t.Errorf("namespace %s enforces %q, its pods would pass %q", name, level, need)
		}
	}
}

// TestPodSecurityCanFail shows that each of the two lists is held against the pods in both
// directions.
func TestPodSecurityCanFail(t *testing.T) {
	raw, err := os.ReadFile("testdata/bad-pods.yaml")
	if err != nil {
		t.Fatal(err)
	}
	objects, err := chart.Decode(strings.NewReader(string(raw)))
	if err != nil {
		t.Fatal(err)
	}
	e := evaluator(t)
	for _, o := range objects {
		found, err := podsOf("bad", "llm", "bad-pods.yaml", []*unstructured.Unstructured{o}, nil)
		if err != nil || len(found) != 1 {
			t.Fatalf("%s: %d pods, %v", o.GetName(), len(found), err)
		}
		want := o.GetAnnotations()["want"]
		got := strings.Join(slices.Concat(broken(e, psa.LevelRestricted, found[0]), unbounded(found[0])), "; ")
		if got != want {
			t.Errorf("%s: judged %q, want %q", o.GetName(), got, want)
		}
	}

	// A LimitRange fills in what is not said, and nothing else.
	limits := corev1.LimitRangeItem{
		Type: corev1.LimitTypeContainer, DefaultRequest: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("5m"), corev1.ResourceMemory: resource.MustParse("8Mi")},
	}
	filled := pod{template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "web"}}}}}
	fill(&filled.template.Spec, []corev1.LimitRangeItem{limits})
	if got := strings.Join(unbounded(filled), "; "); got != "web: memory limit" {
		t.Errorf("with a LimitRange without limits: %q", got)
	}

	bad := []pod{{component: "bad", workload: "Deployment/web", in: "here"}}
	breaks := func(pod) []string { return []string{"host namespaces"} }
	for _, tc := range []struct {
		name   string
		listed []exception
		want   string
	}{
		{"not listed", nil, "bad Deployment/web: host namespaces (in here)"},
		{"listed", []exception{{Component: "bad", Workload: "Deployment/web", Breaks: []string{"host namespaces"}, Reason: "so"}}, ""},
		{"of another workload", []exception{{Component: "bad", Workload: "Deployment/other", Breaks: []string{"host namespaces"}, Reason: "so"}}, `bad Deployment/other: the exception for "host namespaces" is no longer needed`},
		{"stale", []exception{{Component: "bad", Workload: "Deployment/web", Breaks: []string{"host namespaces", "privileged"}, Reason: "so"}}, `bad Deployment/web: the exception for "privileged" is no longer needed`},
		{"twice", []exception{{Component: "bad", Workload: "Deployment/web", Breaks: []string{"host namespaces", "host namespaces"}, Reason: "so"}}, "excused twice"},
		{"without a reason", []exception{{Component: "bad", Workload: "Deployment/web", Breaks: []string{"host namespaces"}}}, "has no reason"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := strings.Join(compare(bad, tc.listed, breaks), "\n")
			if tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
				t.Errorf("says %q, want %q", got, tc.want)
			}
		})
	}
}

// TestPodSecurityPage keeps the page equal to the list.
func TestPodSecurityPage(t *testing.T) {
	page := writePodSecurityPage(loadExceptions(t), loadOperands(t), namespaces(t))
	checkPage(t, podSecurityPage, page)
}

func checkPage(t *testing.T, file, page string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(page), 0o644); err != nil { // #nosec G306 -- a page of the documentation
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != page {
		t.Errorf("%s does not say what the charts render: run make docs", file)
	}
}

func writePodSecurityPage(e exceptions, operands []operand, levels map[string]psa.Level) string {
	var b strings.Builder
	b.WriteString(`# Pod security

This page is written from ` + "`test/rendered/testdata/pod-security.yaml`" + ` by ` + "`make docs`" + `. A test
renders every chart in every value combination and asks Kubernetes' own checks
(` + "`k8s.io/pod-security-admission`" + `, of the minor version that a box runs) about every pod: one
that breaks the ` + "`restricted`" + ` standard and is not listed here fails, and so does a line that no
pod needs any longer. What is broken is said in the words with which Kubernetes refuses such a
pod.

## Pods outside the restricted standard

| component | pod | breaks | reason |
|---|---|---|---|
`)
	for _, x := range e.Standard {
		fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s |\n", x.Component, x.Workload, strings.Join(x.Breaks, ", "), oneLine(x.Reason))
	}
	b.WriteString(`
## Requests and limits

Every container requests CPU and memory and has a memory limit, by itself or by a LimitRange of
its namespace. CPU is not limited: a container that is throttled is slow for a reason nobody
sees.
`)
	if len(e.Resources) > 0 {
		b.WriteString("\nExcept:\n\n| component | pod | container and what it lacks | reason |\n|---|---|---|---|\n")
	}
	for _, x := range e.Resources {
		fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s |\n", x.Component, x.Workload, strings.Join(x.Breaks, "; "), oneLine(x.Reason))
	}
	b.WriteString(`
## What the API server enforces

Each namespace carries a level (` + "`pod-security.kubernetes.io/enforce`" + `) that holds while no policy
engine runs. A test keeps it as strict as the pods above allow.

| namespace | level |
|---|---|
`)
	for _, name := range slices.Sorted(maps.Keys(levels)) {
		fmt.Fprintf(&b, "| `%s` | %s |\n", name, levels[name])
	}
	b.WriteString(`
## Pods that operators make

They are judged as their operator writes them, with the fields laid in that our objects set.
What the operator adds by itself was read in its source and stands in
` + "`test/rendered/testdata/operands.yaml`" + `; only a running operator shows it for certain.

| component | pod | made from | read in |
|---|---|---|---|
`)
	for _, op := range operands {
		fmt.Fprintf(&b, "| `%s` | `%s` | `%s` | %s |\n", op.Component, op.Workload, op.Object, oneLine(op.Source))
	}
	return b.String()
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
