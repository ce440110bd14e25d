package installer

import (
	"cmp"
	"io/fs"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
)

// planCRDs gives each step the CRDs it has to wait for and the plan the order in
// which they are applied.
func planCRDs(fsys fs.FS, plan *Plan) error {
	byKind := map[schema.GroupKind]*unstructured.Unstructured{}
	byName := map[string]*unstructured.Unstructured{}
	for i := range plan.Steps {
		step := &plan.Steps[i]
		// A replaced chart brings its own CRDs, and so does somebody else's install.
		if step.Mode != component.Install || step.ChartOrigin != EmbeddedChart {
			continue
		}
		crds, err := cluster.LoadCRDs(fsys, step.Node.CRDs)
		if err != nil {
			return err
		}
		for _, crd := range crds {
			byName[crd.GetName()] = crd
			byKind[definedKind(crd)] = crd
			step.CRDs = append(step.CRDs, crd.GetName())
		}
	}
	for i := range plan.Steps {
		step := &plan.Steps[i]
		for _, obj := range step.Objects {
			if crd, ours := byKind[obj.GroupVersionKind().GroupKind()]; ours {
				step.CRDs = append(step.CRDs, crd.GetName())
			}
		}
		slices.Sort(step.CRDs)
		step.CRDs = slices.Compact(step.CRDs)
	}
	for _, name := range orderCRDs(plan.Steps) {
		plan.CRDs = append(plan.CRDs, byName[name])
	}
	return nil
}

// crdNames lists the CRDs that llmbox itself brings.
func (p *Plan) crdNames() []string {
	return namesOf(p.CRDs)
}

// crdsAmong lists the CRDs that a chart brings as templates.
func crdsAmong(objects []*unstructured.Unstructured) []string {
	return namesOf(slices.DeleteFunc(slices.Clone(objects), func(o *unstructured.Unstructured) bool {
		return o.GroupVersionKind().GroupKind() != schema.GroupKind{Group: "apiextensions.k8s.io", Kind: "CustomResourceDefinition"}
	}))
}

func namesOf(objects []*unstructured.Unstructured) []string {
	names := make([]string, len(objects))
	for i, o := range objects {
		names[i] = o.GetName()
	}
	return names
}

// releases lists those that llmbox makes in this plan.
func (p *Plan) releases() []cluster.ReleaseName {
	var names []cluster.ReleaseName
	for _, s := range p.Steps {
		if s.Release != nil {
			names = append(names, s.releaseName())
		}
	}
	return names
}

func (s Step) releaseName() cluster.ReleaseName {
	return cluster.ReleaseName{Namespace: s.Release.Namespace, Name: s.Release.Name}
}

func definedKind(crd *unstructured.Unstructured) schema.GroupKind {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
	return schema.GroupKind{Group: group, Kind: kind}
}

// orderCRDs lists the CRDs of all steps once, in the order in which their steps
// want them. An API server needs about a third of a CPU second for each, so that
// the order decides whose pods start first: what the token waits for goes before
// the rest, and among equals those with few, because they are soon done.
func orderCRDs(steps []Step) []string {
	depth := map[string]int{}
	index := map[string]int{}
	for i, s := range steps {
		index[s.Name] = i
		for _, need := range s.Needs {
			depth[s.Name] = max(depth[s.Name], depth[need]+1)
		}
	}
	onTokenPath := map[string]bool{}
	var mark func(name string)
	mark = func(name string) {
		if onTokenPath[name] {
			return
		}
		onTokenPath[name] = true
		for _, need := range steps[index[name]].Needs {
			mark(need)
		}
	}
	for _, s := range steps {
		for _, gate := range s.Gates {
			if gate.Kind == component.GateToken {
				mark(s.Name)
			}
		}
	}
	order := slices.Clone(steps)
	slices.SortStableFunc(order, func(a, b Step) int {
		if onTokenPath[a.Name] != onTokenPath[b.Name] {
			if onTokenPath[a.Name] {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(depth[a.Name], depth[b.Name]), cmp.Compare(len(a.CRDs), len(b.CRDs)))
	})
	var names []string
	seen := map[string]bool{}
	for _, s := range order {
		for _, name := range s.CRDs {
			if !seen[name] {
				seen[name] = true
				names = append(names, name)
			}
		}
	}
	return names
}
