package installer

import (
	"slices"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/component"
)

// What the token waits for goes first, whatever the table's order; among the rest
// those that few wait for.
func TestOrderCRDs(t *testing.T) {
	step := func(name string, needs []string, crds ...string) Step {
		return Step{Node: component.Node{Component: component.Component{Name: name, Needs: needs}}, CRDs: crds}
	}
	steps := []Step{
		step("base", nil),
		step("policy-engine", []string{"base"}, "p1", "p2", "p3"),
		step("metrics", []string{"base"}, "monitors"),
		step("gateway", []string{"base"}, "g1", "monitors"),
		step("late", []string{"metrics"}, "l1"),
		step("route", []string{"gateway"}, "r1", "g1"),
	}
	steps[5].Gates = []component.Gate{{Kind: component.GateToken}}
	want := []string{"g1", "monitors", "r1", "p1", "p2", "p3", "l1"}
	if got := orderCRDs(steps); !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
}

// Each step waits for its own CRDs and for those that its objects are of, and each
// CRD of the plan is somebody's.
func TestStepsKnowTheirCRDs(t *testing.T) {
	plan := build(t, boxInput(t, "a10", "v1.36.3"))
	wanted := map[string]bool{}
	for _, s := range plan.Steps {
		for _, name := range s.CRDs {
			wanted[name] = true
		}
	}
	for _, crd := range plan.CRDs {
		if !wanted[crd.GetName()] {
			t.Errorf("nobody waits for %s", crd.GetName())
		}
	}
	if len(wanted) != len(plan.CRDs) {
		t.Errorf("%d CRDs are waited for, %d are applied", len(wanted), len(plan.CRDs))
	}
	at := map[string]Step{}
	for _, s := range plan.Steps {
		at[s.Name] = s
	}
	for step, crd := range map[string]string{
		"gpu-operator": "clusterpolicies.nvidia.com", "vault": "servicemonitors.monitoring.coreos.com",
		"autoscale": "scaledobjects.keda.sh", "policies": "validatingpolicies.policies.kyverno.io",
		"route": "httproutes.gateway.networking.k8s.io",
	} {
		if !slices.Contains(at[step].CRDs, crd) {
			t.Errorf("%s does not wait for %s: %s", step, crd, strings.Join(at[step].CRDs, " "))
		}
	}
	if n := len(at["base"].CRDs); n != 0 {
		t.Errorf("everything waits for base, and base for %d CRDs", n)
	}
}
