// Package doctor judges an installed box: from everything that was read of the machine
// and its cluster it tells the root cause from what merely follows, and says what mends
// it. It looks at mechanisms, layer by layer, from the PCI bus up to the client; what
// only a log knows it reads there.
//
// It must not look at a machine: all facts come in a snapshot, and the same snapshot
// gives the same findings. Nor may it know how findings are shown.
package doctor

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/preflight"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// Layer is how far up a mechanism lies. What is above needs what is below, so that a
// cause is never above what it explains.
type Layer int

// The layers, from the machine to the client.
const (
	LayerHost Layer = iota
	LayerPCI
	LayerModule
	LayerDevice
	LayerNVML
	LayerCUDA
	LayerStorage
	LayerNetwork
	LayerK3s
	LayerRuntime
	LayerNode
	LayerAdmission
	LayerClusterNetwork
	LayerPlugin
	LayerHelm
	LayerVolume
	LayerSecret
	LayerImage
	LayerSchedule
	LayerModel
	LayerPod
	LayerOperator
	LayerGateway
	LayerClient
	// LayerNote holds what is worth knowing and explains nothing.
	LayerNote
)

func (l Layer) String() string {
	return [...]string{
		"machine", "PCI bus", "kernel module", "device files", "NVML", "CUDA", "disk", "network", "k3s", "container runtime", "node",
		"admission", "cluster network", "device plugin", "Helm", "volumes", "secrets", "images", "scheduler", "model", "pods", "operators",
		"gateway", "client", "notes",
	}[l]
}

// Check is one row of the registry: a mechanism that is looked at.
type Check struct {
	// ID is the finding's where nothing is wrong; Also lists further ids that Judge can
	// return.
	ID    string
	Also  []string
	Layer Layer
	Title string
	// Reads says which facts it looks at, Rule when it finds fault.
	Reads, Rule string
	// Fix is what a person types; Judge may name a more exact one.
	Fix string
	// Repair names the safe repair, if there is one.
	Repair string
	// Source is the report or document the rule comes from.
	Source string
	// Causes are ids of other findings that explain this one. One that ends in ".*"
	// stands for all failures with that beginning.
	Causes []string
	// Judge fills in Severity, Measured, Evidence and what differs from the row. It must
	// not block, and returns nothing where the question does not arise.
	Judge func(*facts) []finding.Finding
}

// Judge returns the findings on a box, roots first, in the order in which to act on
// them; what follows from a root comes after the roots.
func Judge(s *snapshot.Snapshot) []finding.Finding {
	return JudgeWith(context.Background(), s, Options{})
}

// Options adjust a judgement.
type Options struct {
	// Accepted are ids of checks that a person chose to live with when installing; they
	// are still shown, as notes.
	Accepted []string
}

// JudgeWith is Judge with options. The context bounds the checks of the machine.
func JudgeWith(ctx context.Context, s *snapshot.Snapshot, o Options) []finding.Finding {
	f := newFacts(s)
	found := hostFindings(ctx, f)
	f.note(found)
	for _, check := range Checks() {
		more := check.run(f)
		f.note(more)
		found = append(found, more...)
	}
	found = merge(found)
	for i := range found {
		if bad(found[i]) && slices.Contains(o.Accepted, found[i].ID) {
			found[i].Severity = finding.Info
			found[i].Measured += " (accepted by --ignore)"
		}
	}
	return arrange(found)
}

// run judges one row; a row that breaks costs only itself.
func (c Check) run(f *facts) (found []finding.Finding) {
	defer func() {
		if p := recover(); p != nil {
			found = []finding.Finding{c.finish(finding.Finding{
				Severity: finding.Info, State: finding.Unreadable, Measured: fmt.Sprintf("the check itself broke: %v", p),
				Evidence: []finding.Evidence{{Line: firstOwnFrame(string(debug.Stack()))}},
			})}
		}
	}()
	for _, one := range c.Judge(f) {
		found = append(found, c.finish(one))
	}
	return found
}

func firstOwnFrame(stack string) string {
	for line := range strings.Lines(stack) {
		if strings.Contains(line, "/internal/doctor/") && !strings.Contains(line, "doctor.go") {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// finish fills in what the row knows.
func (c Check) finish(f finding.Finding) finding.Finding {
	fill := func(at *string, with string) {
		if *at == "" {
			*at = with
		}
	}
	fill(&f.ID, c.ID)
	fill(&f.Title, c.Title)
	fill(&f.Required, c.Rule)
	fill(&f.Source, c.Source)
	if f.State == "" {
		f.State = finding.Judged
	}
	if f.Severity == "" {
		f.Severity = finding.OK
	}
	if bad(f) {
		fill(&f.Fix, c.Fix)
		fill(&f.Repair, c.Repair)
	}
	f.Causes = slices.Concat(f.Causes, c.Causes)
	return f
}

func bad(f finding.Finding) bool {
	return f.Severity == finding.Fail || f.Severity == finding.Warn
}

func weight(s finding.Severity) int {
	switch s {
	case finding.Fail:
		return 3
	case finding.Warn:
		return 2
	case finding.Info:
		return 1
	}
	return 0
}

// merge makes one finding of those with the same id: two looks at one thing, such as
// the machine's own facts and what a log says of them. The graver one speaks.
func merge(found []finding.Finding) []finding.Finding {
	var out []finding.Finding
	at := map[string]int{}
	for _, f := range found {
		i, known := at[f.ID]
		if !known {
			at[f.ID] = len(out)
			out = append(out, f)
			continue
		}
		old := out[i]
		strong, weak := old, f
		if weight(f.Severity) > weight(old.Severity) || weight(f.Severity) == weight(old.Severity) && !known1(old) && known1(f) {
			strong, weak = f, old
		}
		if bad(strong) && bad(weak) && weak.Measured != "" && !strings.Contains(strong.Measured, weak.Measured) {
			strong.Measured += "; " + weak.Measured
		}
		if strong.Fix == "" {
			strong.Fix = weak.Fix
		}
		if strong.Repair == "" {
			strong.Repair = weak.Repair
		}
		if bad(weak) || !bad(strong) {
			strong.Evidence = slices.Concat(strong.Evidence, weak.Evidence)
		}
		strong.Causes = slices.Concat(strong.Causes, weak.Causes)
		out[i] = strong
	}
	return out
}

// known1 says whether the question could be answered.
func known1(f finding.Finding) bool { return f.State == finding.Judged }

// arrange keeps of each finding's causes those that are themselves bad and lie no
// higher, and puts roots first: the gravest, counting what follows from them, and of
// those the lowest layer. A failure is explained by a failure, or by a warning that the
// rule names itself.
func arrange(found []finding.Finding) []finding.Finding {
	byID := map[string]*finding.Finding{}
	for i := range found {
		byID[found[i].ID] = &found[i]
	}
	layers := layersByID()
	layer := func(id string) Layer {
		if l, ok := layers[id]; ok {
			return l
		}
		return hostLayer(id)
	}
	for i := range found {
		f := &found[i]
		var causes []string
		if bad(*f) {
			for _, id := range expand(f.Causes, found) {
				other := byID[id]
				if other == nil || id == f.ID || !bad(*other) || slices.Contains(causes, id) || layer(id) > layer(f.ID) {
					continue
				}
				named := slices.Contains(f.Causes, id)
				if f.Severity == finding.Fail && other.Severity == finding.Warn && !named {
					continue
				}
				causes = append(causes, id)
			}
		}
		slices.SortStableFunc(causes, func(a, b string) int { return int(layer(a) - layer(b)) })
		f.Causes = causes
	}
	breakCircles(found, byID)
	// A root weighs as much as the gravest that follows from it.
	effective := map[string]int{}
	for _, f := range found {
		if !bad(f) {
			continue
		}
		for _, root := range roots(byID, f.ID, nil) {
			effective[root] = max(effective[root], weight(f.Severity))
		}
	}
	rank := func(f finding.Finding) int {
		switch {
		case bad(f) && len(f.Causes) == 0:
			return 3 - effective[f.ID]
		case bad(f):
			return 4
		case f.State == finding.Judged && f.Severity == finding.Info:
			return 5
		case f.State == finding.Wait:
			return 5
		case f.State == finding.Judged && headline(f.ID) >= 0:
			return 6
		case f.State == finding.Judged:
			return 7
		case f.State == finding.NotApplicable:
			return 9
		}
		return 8
	}
	slices.SortStableFunc(found, func(a, b finding.Finding) int {
		if d := rank(a) - rank(b); d != 0 {
			return d
		}
		if !bad(a) {
			return headline(a.ID) - headline(b.ID)
		}
		return int(layer(a.ID) - layer(b.ID))
	})
	return found
}

// headline is the place of what is told first of a box that is well; -1 for the rest.
func headline(id string) int {
	return slices.Index([]string{"model.ready", "model.memory", "storage.pvc_waiting", "runtime.handler", "gpu.driver"}, id)
}

// expand replaces each cause that ends in ".*" by the failures that begin so.
func expand(causes []string, found []finding.Finding) []string {
	var out []string
	for _, c := range causes {
		stem, pattern := strings.CutSuffix(c, "*")
		if !pattern {
			out = append(out, c)
			continue
		}
		for _, f := range found {
			if strings.HasPrefix(f.ID, stem) && f.Severity == finding.Fail {
				out = append(out, f.ID)
			}
		}
	}
	return out
}

// roots follows causes to those that have none.
func roots(byID map[string]*finding.Finding, id string, passed []string) []string {
	f := byID[id]
	if f == nil || len(f.Causes) == 0 || slices.Contains(passed, id) {
		return []string{id}
	}
	var out []string
	for _, c := range f.Causes {
		out = append(out, roots(byID, c, append(passed[:len(passed):len(passed)], id))...)
	}
	return out
}

// breakCircles drops a cause that leads back to the finding itself: a circle has no
// root, and a finding without a root would be hidden.
func breakCircles(found []finding.Finding, byID map[string]*finding.Finding) {
	var reaches func(from, to string, passed map[string]bool) bool
	reaches = func(from, to string, passed map[string]bool) bool {
		if from == to {
			return true
		}
		if passed[from] || byID[from] == nil {
			return false
		}
		passed[from] = true
		return slices.ContainsFunc(byID[from].Causes, func(c string) bool { return reaches(c, to, passed) })
	}
	for i := range found {
		f := &found[i]
		f.Causes = slices.DeleteFunc(f.Causes, func(c string) bool { return reaches(c, f.ID, map[string]bool{}) })
		if len(f.Causes) == 0 {
			f.Causes = nil
		}
	}
}

// layersByID is the layer of each id of the registry.
func layersByID() map[string]Layer {
	out := map[string]Layer{}
	for _, c := range Checks() {
		for _, id := range append([]string{c.ID}, c.Also...) {
			if old, twice := out[id]; !twice || c.Layer < old {
				out[id] = c.Layer
			}
		}
	}
	return out
}

// Checks returns the registry of doctor's own checks, from the machine to the client.
// Those of the machine itself are preflight's.
func Checks() []Check {
	return slices.Concat(k3sChecks(), runtimeChecks(), nodeChecks(), networkChecks(), admissionChecks(), pluginChecks(), helmChecks(),
		volumeChecks(), secretChecks(), imageChecks(), scheduleChecks(), modelChecks(), podChecks(), operatorChecks(), gatewayChecks(),
		clientChecks())
}

// hostChecks are preflight's checks that also mean something on a box that is there.
func hostChecks() []preflight.Check {
	return slices.DeleteFunc(preflight.Checks(), func(c preflight.Check) bool {
		return slices.Contains([]string{"host.root", "host.disk.space", "net.port_conflict", "leftovers.cni"}, c.ID)
	})
}

// Networks are the pods' and the services' networks of the box, as its configuration of
// k3s names them.
func Networks(s *snapshot.Snapshot) (pods, services string) {
	return (&facts{Snapshot: s}).networks()
}

// Known says whether a check can return a finding of that id, or could when the box was
// installed: what was accepted then may be named to doctor too.
func Known(id string) bool {
	if _, ok := layersByID()[id]; ok {
		return true
	}
	return slices.ContainsFunc(preflight.Checks(), func(c preflight.Check) bool { return c.ID == id || slices.Contains(c.Also, id) })
}
