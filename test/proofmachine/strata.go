package main

import (
	"math/rand/v2"

	"github.com/llmbox-dev/llmbox/test/internal/cutoff"
)

// kill says what is cut off.
type kill string

const (
	install      kill = "install"
	uninstall    kill = "uninstall"
	wholeMachine kill = "machine"
)

// end says what the run after the kill has to come to.
type end bool

const (
	installed end = true
	bare      end = false
)

// trial is one kill to make.
type trial struct {
	cutoff.Aim
	Kills  kill
	Ends   end
	Number int
}

const (
	before = cutoff.Before
	inside = cutoff.Inside
	after  = cutoff.After
)

// point is a step with the places in it, one trial each.
type point struct {
	step, says string
	places     []cutoff.Place
}

// installPoints lists every kind of step of an install, in about
// their order, from preflight to the token.
func installPoints() []point {
	const k3s = "component/k3s"
	all := []cutoff.Place{before, inside, after}
	return []point{
		{step: "preflight/machine", places: []cutoff.Place{after}},
		{step: k3s, places: []cutoff.Place{before}},
		{step: "component/weights/download", places: all},
		{step: k3s + "/binary", places: []cutoff.Place{before, inside, inside, after}},
		{step: k3s + "/config", places: []cutoff.Place{before, inside, inside, after}},
		{step: k3s + "/service", places: []cutoff.Place{before, inside, inside, after}},
		{step: "machine/images", places: []cutoff.Place{inside, after}},
		// k3s unpacks itself in its first seconds, and starts then.
		{step: k3s + "/ready", places: []cutoff.Place{before, inside, inside, inside, after}},
		{step: k3s + "/image", places: all},
		{step: k3s, places: []cutoff.Place{after}},
		{step: "preflight/cluster", places: []cutoff.Place{after}},
		{step: "component/base/manifests", places: []cutoff.Place{before, inside, after}},
		{step: "component/base/secrets", places: []cutoff.Place{before, after}},
		{step: "component/model/release", places: all},
		{step: "component/envoy-gateway/crds", places: []cutoff.Place{inside, after}},
		{step: "component/envoy-gateway/release", places: all},
		{step: "component/model/ready", places: []cutoff.Place{inside, after}},
		{step: "component/envoy-gateway/ready", places: []cutoff.Place{inside}},
		{step: "component/route/release", places: all},
		{step: "component/route/ready", places: []cutoff.Place{before, after}},
	}
}

// powerPoints are where the whole machine goes.
func powerPoints() []point {
	one := []cutoff.Place{inside}
	return []point{
		{step: "component/k3s/binary", places: one},
		{step: "component/k3s/config", places: one},
		{step: "component/k3s/service", places: one},
		{step: "component/k3s/ready", places: one},
		{step: "component/k3s/image", places: one},
		{step: "component/base/manifests", places: one},
		{step: "component/envoy-gateway/crds", places: one},
		{step: "machine/images", places: one},
		{step: "component/model/ready", places: one},
		{step: "component/route/release", places: one},
	}
}

// uninstallPoints are the actions of an uninstall that change the most.
func uninstallPoints() []point {
	const k3s, machine = "uninstall/k3s", "uninstall/machine"
	return []point{
		{step: k3s, places: []cutoff.Place{before}},
		{step: k3s, says: "stop k3s", places: []cutoff.Place{inside}},
		{step: k3s, says: "end the pods' processes", places: []cutoff.Place{inside}},
		{step: k3s, says: "unmount the pods' volumes", places: []cutoff.Place{inside}},
		{step: k3s, says: "remove packet filter rules", places: []cutoff.Place{inside}},
		{step: k3s, says: "remove k3s's data", places: []cutoff.Place{inside}},
		{step: k3s, says: "remove the k3s binary", places: []cutoff.Place{before}},
		{step: k3s, says: "forget k3s", places: []cutoff.Place{before}},
		{step: k3s, places: []cutoff.Place{after}},
		{step: machine, places: []cutoff.Place{before}},
	}
}

// installsCutOff are the points of an install after which a machine has to be made bare.
func installsCutOff() []point {
	one := []cutoff.Place{inside}
	return []point{
		{step: "preflight/machine", places: []cutoff.Place{after}},
		{step: "component/k3s/binary", places: one},
		{step: "component/k3s/config", places: one},
		{step: "component/k3s/service", places: one},
		{step: "component/k3s/ready", places: one},
		{step: "component/k3s/image", places: one},
		{step: "component/base/secrets", places: []cutoff.Place{before}},
		{step: "component/envoy-gateway/crds", places: one},
		{step: "component/model/ready", places: one},
		{step: "component/route/release", places: []cutoff.Place{before}},
	}
}

// kills lays the trials of proof-kill out, traces those of proof-trace.
func kills(seed uint64) []trial {
	return number(seed, lay(installPoints(), install, installed), lay(powerPoints(), wholeMachine, installed))
}

func traces(seed uint64) []trial {
	return number(seed, lay(installsCutOff(), install, bare), lay(uninstallPoints(), uninstall, bare))
}

func lay(points []point, kills kill, ends end) []trial {
	var out []trial
	for _, p := range points {
		for _, place := range p.places {
			out = append(out, trial{Aim: cutoff.Aim{Step: p.step, Says: p.says, Place: place}, Kills: kills, Ends: ends})
		}
	}
	return out
}

// number gives each trial its number and its moment. Several moments inside one step are
// spread over it.
func number(seed uint64, groups ...[]trial) []trial {
	random := rand.New(rand.NewPCG(seed, 0)) // #nosec G404 -- a repeatable choice, not a secret
	var out []trial
	for _, group := range groups {
		insides, nth := map[string]int{}, map[string]int{}
		for _, t := range group {
			if t.Place == inside {
				insides[t.Name()]++
			}
		}
		for _, t := range group {
			if t.Place == inside {
				const first, spread = 0.05, 0.8
				width := spread / float64(insides[t.Name()])
				t.Fraction = first + width*(float64(nth[t.Name()])+random.Float64())
				nth[t.Name()]++
			}
			t.Number = len(out) + 1
			out = append(out, t)
		}
	}
	return out
}

// chains puts the kills of llmbox's install whose end is a box into groups, each with
// points from the whole of an install, in their order. All others stand alone.
func chains(trials []trial, size int) [][]trial {
	var alone, out [][]trial
	var installs []trial
	for _, t := range trials {
		if t.Kills == install && t.Ends == installed {
			installs = append(installs, t)
		} else {
			alone = append(alone, []trial{t})
		}
	}
	groups := (len(installs) + size - 1) / size
	for g := range groups {
		var group []trial
		for i := g; i < len(installs); i += groups {
			group = append(group, installs[i])
		}
		out = append(out, group)
	}
	return append(out, alone...)
}
