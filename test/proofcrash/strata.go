package main

import (
	"math/rand/v2"
	"slices"

	"github.com/llmbox-dev/llmbox/test/internal/cutoff"
)

// The places seen from a step.
const (
	before = cutoff.Before
	inside = cutoff.Inside
	after  = cutoff.After
)

// reset says what a trial needs gone before it.
type reset struct {
	// cluster asks for a fresh lab: the step has to do with what only a bare
	// cluster lacks.
	cluster bool
	// components are removed from the kept cluster, and what needs them too.
	components []string
	// manifests removes the plain objects that the base step applies, except
	// its namespaces.
	manifests bool
}

// point is one place at which a run can be cut off.
type point struct {
	Stratum string
	// Step is the path in the events, Place where in it.
	Step  string
	Place cutoff.Place
	Reset reset
}

// The paths of steps that several points name.
const (
	preflight  = "preflight/cluster"
	manifests  = "component/base/manifests"
	boxSecrets = "component/base/secrets"
	configure  = "component/vault/configure"
)

// points lists every kind of step with the places in it. Their order within a
// stratum is that of importance: a short series takes the first of each.
func points() []point {
	bare := reset{cluster: true}
	without := func(names ...string) reset { return reset{components: names} }
	return []point{
		{"release", "component/keda/release", inside, without("keda")},
		{"release", "component/prometheus/release", inside, without("prometheus")},
		{"release", "component/envoy-gateway/release", inside, without("envoy-gateway")},
		{"release", "component/kyverno/release", before, without("kyverno")},
		{"release", "component/gpu-operator/release", inside, without("gpu-operator")},
		{"release", "component/external-secrets/release", after, without("external-secrets")},

		{"vault", configure, inside, without("vault")},
		{"vault", configure, inside, without("vault")},
		{"vault", configure, before, without("vault")},
		{"vault", configure, after, without("vault")},

		{"ready", "component/prometheus/ready", inside, without("prometheus")},
		{"ready", "component/envoy-gateway/ready", before, without("envoy-gateway")},
		{"ready", "component/model/ready", after, without("model")},

		// The journal is written between a component's last gate and its end, and
		// once more after the last component.
		{"journal", "component/keda/ready", after, without("keda")},
		{"journal", "component/policies", after, without("policies")},

		// The lock is taken between preflight and the first component.
		{"lock", preflight, after, without("policies")},
		{"lock", "component/base", before, without("policies")},

		{"manifests", manifests, inside, reset{manifests: true, components: []string{"kyverno"}}},
		{"manifests", manifests, before, reset{manifests: true, components: []string{"kyverno"}}},
		{"manifests", manifests, after, reset{manifests: true, components: []string{"kyverno"}}},

		{"crds", "component/kyverno/crds", inside, bare},
		{"crds", "component/gpu-operator/crds", before, bare},
		{"crds", "component/envoy-gateway/crds", after, bare},

		{"secrets", boxSecrets, before, bare},
		{"secrets", boxSecrets, after, bare},
	}
}

// trial is one kill to make.
type trial struct {
	point
	Number int
	// Fraction of the step's usual duration after which to kill, for inside.
	Fraction float64
}

// series lays out n trials: each stratum in turn, and again from the first
// point when all were had. Trials on a kept cluster come before those that
// need a fresh one.
func series(n int, only string, seed uint64) []trial {
	random := rand.New(rand.NewPCG(seed, 0)) // #nosec G404 -- a repeatable choice, not a secret
	var names []string
	byName := map[string][]point{}
	for _, p := range points() {
		if only != "" && p.Stratum != only {
			continue
		}
		if byName[p.Stratum] == nil {
			names = append(names, p.Stratum)
		}
		byName[p.Stratum] = append(byName[p.Stratum], p)
	}
	total := 0
	for _, ps := range byName {
		total += len(ps)
	}
	var out []trial
	for round := 0; total > 0 && len(out) < n; round++ {
		for _, name := range names {
			ps := byName[name]
			// A stratum that is used up waits until every other is.
			within := round % longest(byName)
			if within >= len(ps) || len(out) == n {
				continue
			}
			out = append(out, trial{point: ps[within], Fraction: 0.05 + 0.8*random.Float64()})
		}
	}
	slices.SortStableFunc(out, func(a, b trial) int {
		switch {
		case a.Reset.cluster == b.Reset.cluster:
			return 0
		case b.Reset.cluster:
			return -1
		}
		return 1
	})
	for i := range out {
		out[i].Number = i + 1
	}
	return out
}

func longest(byName map[string][]point) int {
	n := 0
	for _, ps := range byName {
		n = max(n, len(ps))
	}
	return n
}
