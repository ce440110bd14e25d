package installer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes/fake"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/event"
)

// engineStandIn takes the place of a cluster: these tests are about the order of
// work, which no cluster decides. It notes what it is asked and fails where told.
type engineStandIn struct {
	mu      sync.Mutex
	begun   []string
	ended   []string
	most    int
	fails   map[string]error
	waits   map[string]chan struct{}
	started func(name string)
}

func (e *engineStandIn) Name() string { return "stand-in" }

func (e *engineStandIn) Current(context.Context, string, string) (chart.Record, error) {
	return chart.Record{}, chart.ErrNoRelease
}

func (e *engineStandIn) Uninstall(context.Context, string, string) error { return nil }

func (e *engineStandIn) Apply(_ context.Context, r chart.Release) (chart.Outcome, error) {
	e.mu.Lock()
	e.begun = append(e.begun, r.Name)
	e.most = max(e.most, len(e.begun)-len(e.ended))
	e.mu.Unlock()
	if e.started != nil {
		e.started(r.Name)
	}
	if wait := e.waits[r.Name]; wait != nil {
		<-wait
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = append(e.ended, r.Name)
	return chart.Outcome{Change: chart.Installed, Revision: 1}, e.fails[r.Name]
}

// planOf makes a plan of "a b<a c<a,b": each a release without gates.
func planOf(t *testing.T, spec string) *Plan {
	t.Helper()
	ch, err := chart.LoadPath("testdata/other-keda")
	if err != nil {
		t.Fatal(err)
	}
	var rows []component.Component
	for _, row := range strings.Fields(spec) {
		name, needs, _ := strings.Cut(row, "<")
		c := component.Component{Name: name, Title: name}
		if needs != "" {
			c.Needs = strings.Split(needs, ",")
		}
		rows = append(rows, c)
	}
	nodes, err := component.Order(rows, nil)
	if err != nil {
		t.Fatal(err)
	}
	plan := &Plan{}
	for _, n := range nodes {
		plan.Steps = append(plan.Steps, Step{Node: n, Release: &chart.Release{Name: n.Name, Chart: ch}})
	}
	return plan
}

type recorder struct {
	mu     sync.Mutex
	events []event.Event
}

func (r *recorder) Emit(e event.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

// outcomes lists what became of each component, sorted.
func (r *recorder) outcomes() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for _, e := range r.events {
		name, ok := strings.CutPrefix(e.Step, "component/")
		if !ok || strings.Contains(name, "/") {
			continue
		}
		switch e.Type {
		case event.StepDone, event.StepFailed, event.StepSkipped:
			text := name + " " + strings.TrimPrefix(string(e.Type), "step.")
			if e.Type == event.StepSkipped {
				text += ": " + e.Message
			}
			out = append(out, text)
		}
	}
	slices.Sort(out)
	return out
}

func runOf(t *testing.T, plan *Plan, engine Engine) (*Run, *recorder) {
	t.Helper()
	state, _, _, err := LoadState(t.Context(), fake.NewClientset(), quiet())
	if err != nil {
		t.Fatal(err)
	}
	rec := &recorder{}
	return NewRun(plan, nil, engine, nil, state, rec, quiet()), rec
}

func TestRunOrder(t *testing.T) {
	plan := planOf(t, "base a<base b<base c<a,b d<c")
	engine := &engineStandIn{}
	run, rec := runOf(t, plan, engine)
	// The base step of a real plan applies manifests; here it is one like the others.
	for i := range plan.Steps {
		plan.Steps[i].Name = strings.Replace(plan.Steps[i].Name, "base", "first", 1)
		for j := range plan.Steps[i].Needs {
			plan.Steps[i].Needs[j] = strings.Replace(plan.Steps[i].Needs[j], "base", "first", 1)
		}
	}
	if err := run.Components(t.Context(), make(chan struct{})); err != nil {
		t.Fatal(err)
	}
	for _, s := range plan.Steps {
		for _, need := range s.Needs {
			need = strings.Replace(need, "first", "base", 1)
			if slices.Index(engine.begun, s.Release.Name) < slices.Index(engine.ended, need) {
				t.Errorf("%s began before %s ended: %v", s.Name, need, engine.begun)
			}
		}
	}
	if want := []string{"a done", "b done", "c done", "d done", "first done"}; !slices.Equal(rec.outcomes(), want) {
		t.Errorf("outcomes are %v, want %v", rec.outcomes(), want)
	}
}

// TestRunFailure lets one component fail: what hangs on it is skipped once and
// named, everything else goes on to its end.
func TestRunFailure(t *testing.T) {
	cause := errors.New("the disk is full")
	engine := &engineStandIn{fails: map[string]error{"b": cause}}
	run, rec := runOf(t, planOf(t, "a b<a c<b d<b,c e<a"), engine)
	err := run.Components(t.Context(), make(chan struct{}))
	if !errors.Is(err, cause) || !strings.Contains(err.Error(), "component b") {
		t.Errorf("error is %v, want the cause and the component", err)
	}
	want := []string{"a done", "b failed", "c skipped: needs component/b", "d skipped: needs component/b", "e done"}
	if !slices.Equal(rec.outcomes(), want) {
		t.Errorf("outcomes are %v, want %v", rec.outcomes(), want)
	}
}

func TestRunIsBounded(t *testing.T) {
	spec := ""
	for i := range 20 {
		spec += fmt.Sprintf("c%d ", i)
	}
	engine := &engineStandIn{waits: map[string]chan struct{}{}, started: func(string) { time.Sleep(time.Millisecond) }}
	run, _ := runOf(t, planOf(t, spec), engine)
	if err := run.Components(t.Context(), make(chan struct{})); err != nil {
		t.Fatal(err)
	}
	if engine.most > cap(run.applying) || engine.most < 2 {
		t.Errorf("%d releases were sent at a time, want 2 to %d", engine.most, cap(run.applying))
	}
}

// TestRunInterrupt asks the run to stop while a release is being applied: that
// one is finished, nothing new is begun.
func TestRunInterrupt(t *testing.T) {
	interrupt, hold := make(chan struct{}), make(chan struct{})
	engine := &engineStandIn{waits: map[string]chan struct{}{"a": hold}}
	engine.started = func(string) {
		close(interrupt)
		time.AfterFunc(50*time.Millisecond, func() { close(hold) })
	}
	run, _ := runOf(t, planOf(t, "a b<a c<b"), engine)
	if err := run.Components(t.Context(), interrupt); !errors.Is(err, ErrInterrupted) {
		t.Errorf("error is %v, want %v", err, ErrInterrupted)
	}
	if !slices.Equal(engine.ended, []string{"a"}) {
		t.Errorf("%v were applied, want a alone and to its end", engine.ended)
	}
}

func TestOneLine(t *testing.T) {
	if got := oneLine(errors.New("1 error occurred:\n\t* no\x1b[31m")); strings.ContainsAny(got, "\n\t\x1b") {
		t.Errorf("folded to %q", got)
	}
	if got := oneLine(errors.New(strings.Repeat("ä", 5000))); len([]rune(got)) > 1201 || !strings.HasSuffix(got, "…") {
		t.Errorf("%d characters are left", len([]rune(got)))
	}
}
