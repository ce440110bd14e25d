package installer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/event"
)

// The ways in which a run ends short. The command line turns them into exit codes.
var (
	// ErrNotReady means that a component did not become ready in time.
	ErrNotReady = errors.New("not ready in time")
	// ErrInterrupted means that somebody asked the run to stop.
	ErrInterrupted = errors.New("interrupted")
	// ErrNeeds means that a component was not tried because another failed.
	ErrNeeds = errors.New("needs a component that failed")
)

// manifestsAtATime bounds how many small objects are applied together.
const manifestsAtATime = 8

// crdsTimeout bounds bringing all CRDs in, on the slowest API server.
const crdsTimeout = 10 * time.Minute

// Secrets is what a run needs done about secrets; the values never pass
// through here.
type Secrets interface {
	// Ensure creates the Secrets that charts refer to.
	Ensure(ctx context.Context) error
	// GatewayKey returns the key of the box's own client.
	GatewayKey(ctx context.Context) (string, error)
	// SetUpVault initialises, unseals and configures Vault; it can be repeated.
	SetUpVault(ctx context.Context) error
	// VaultReady judges whether the key-value store can be read.
	VaultReady(ctx context.Context) (cluster.Verdict, error)
}

// Run carries one plan out.
type Run struct {
	plan    *Plan
	client  *cluster.Client
	engine  Engine
	secrets Secrets
	state   *State
	sink    event.Sink
	log     *slog.Logger
	now     func() time.Time

	// crds brings the CRDs in while components are applied; stopCRDs ends that.
	feeding  sync.Once
	crds     *cluster.CRDFeed
	stopCRDs func()

	// weights stream in beside everything else; nil where a Job in the cluster brings them.
	weights *hostWeights

	// applying bounds how many releases are sent to the API server at a time.
	applying chan struct{}

	mu       sync.Mutex
	endpoint string
	started  map[string]time.Time
	took     map[string]time.Duration
	gates    int
	answered int
}

// NewRun prepares a run.
func NewRun(plan *Plan, client *cluster.Client, engine Engine, secrets Secrets, state *State, sink event.Sink, log *slog.Logger) *Run {
	return &Run{
		plan: plan, client: client, engine: engine, secrets: secrets, state: state, sink: sink, log: log,
		now: time.Now, applying: make(chan struct{}, 4),
		started: map[string]time.Time{}, took: map[string]time.Duration{},
	}
}

// Announce lists the steps of the plan for run.started.
func (p *Plan) Announce() []event.PlannedStep {
	planned := make([]event.PlannedStep, 0, len(p.Steps))
	for _, s := range p.Steps {
		title := s.Title
		if s.Mode == component.External {
			title += " (external)"
		}
		row := event.PlannedStep{Step: s.Path(), Title: title}
		for _, need := range s.Needs {
			row.Needs = append(row.Needs, "component/"+need)
		}
		planned = append(planned, row)
	}
	return planned
}

// Components carries out the steps of the plan: each starts as soon as what it
// needs is ready. Closing interrupt lets what is being applied finish and ends
// the rest; cancelling ctx stops at once. The returned error joins what failed.
func (r *Run) Components(ctx context.Context, interrupt <-chan struct{}) error {
	waiting, stopWaiting := context.WithCancelCause(ctx)
	defer stopWaiting(nil)
	finished := make(chan struct{})
	defer close(finished)
	go func() {
		select {
		case <-interrupt:
			stopWaiting(ErrInterrupted)
		case <-finished:
		}
	}()

	// An interrupt lets the CRDs under way finish; nothing is sent after the run.
	defer func() {
		r.feeding.Do(func() {})
		if r.stopCRDs != nil {
			r.stopCRDs()
		}
	}()

	type outcome struct {
		name string
		err  error
	}
	done := make(chan outcome)
	index := make(map[string]int, len(r.plan.Steps))
	needs := make([]int, len(r.plan.Steps))
	failed := map[string]bool{}
	for i, s := range r.plan.Steps {
		index[s.Name] = i
		needs[i] = len(s.Needs)
	}
	running := 0
	start := func(i int) {
		running++
		step := r.plan.Steps[i]
		go func() { done <- outcome{step.Name, r.step(ctx, waiting, step)} }()
	}
	for i := range r.plan.Steps {
		if needs[i] == 0 {
			start(i)
		}
	}
	var problems []error
	// skip marks everything that hangs on a failed step, each once.
	var skip func(name, cause string)
	skip = func(name, cause string) {
		for _, n := range r.plan.Steps[index[name]].NeededBy {
			if failed[n] {
				continue
			}
			failed[n] = true
			r.emit(event.Event{Type: event.StepSkipped, Step: "component/" + n, Message: "needs component/" + cause})
			skip(n, cause)
		}
	}
	for running > 0 {
		out := <-done
		running--
		if out.err != nil {
			problems = append(problems, out.err)
			failed[out.name] = true
			if !errors.Is(out.err, ErrInterrupted) {
				skip(out.name, out.name)
			}
			continue
		}
		for _, n := range r.plan.Steps[index[out.name]].NeededBy {
			i := index[n]
			if needs[i]--; needs[i] == 0 && !failed[n] && waiting.Err() == nil {
				start(i)
			}
		}
	}
	if cause := context.Cause(waiting); errors.Is(cause, ErrInterrupted) || ctx.Err() != nil {
		return ErrInterrupted
	}
	return errors.Join(problems...)
}

// step carries out one component. Applying goes on under ctx so that an
// interrupt never cuts it in half; waiting ends with waiting.
func (r *Run) step(ctx, waiting context.Context, s Step) (err error) {
	if s.Name == weightsStep && r.weights != nil {
		return r.awaitWeights(ctx, waiting, s)
	}
	path := s.Path()
	began := r.begin(path, s.Title)
	changed := false
	var former *chart.Release
	defer func() {
		if err == nil {
			return
		}
		if former != nil && ctx.Err() == nil && !errors.Is(err, ErrInterrupted) {
			err = r.restore(ctx, s, former, err)
		}
		err = fmt.Errorf("component %s: %w", s.Name, err)
		r.fail(path, began, err)
		failed := ComponentState{Name: s.Name, Status: componentFailed, Error: oneLine(err)}
		var restored *RestoredError
		if errors.As(err, &restored) {
			failed.Status, failed.Revision = componentRestored, restored.Revision
		}
		r.state.Component(ctx, failed)
	}()
	if s.Name == baseStep {
		if changed, err = r.base(ctx, waiting, path); err != nil {
			return err
		}
	}
	var applied chart.Outcome
	if s.Release != nil {
		if changed, err = r.awaitCRDs(ctx, waiting, s); err != nil {
			return err
		}
		if former, err = r.former(ctx, s); err != nil {
			return err
		}
		if applied, err = r.apply(ctx, waiting, s); err != nil {
			return err
		}
		changed = changed || applied.Change != chart.Unchanged
	}
	if s.Name == vaultStep && s.Mode == component.Install {
		if err = r.configureVault(waiting, path); err != nil {
			return err
		}
	}
	verdicts, err := r.ready(waiting, s)
	if err != nil {
		return err
	}
	r.state.Component(ctx, ComponentState{Name: s.Name, Status: componentReady, Version: s.Version, Revision: applied.Revision})
	simulated := actors(verdicts)
	done := event.Event{
		Type: event.StepDone, Step: path, ElapsedMS: r.end(path, began),
		Simulated: len(simulated) > 0, SimulatedBy: simulated,
	}
	if !changed && s.Mode == component.Install {
		done.Message = "unchanged"
	}
	r.emit(done)
	return nil
}

func actors(verdicts []cluster.Verdict) []string {
	var names []string
	for _, v := range verdicts {
		names = append(names, v.SimulatedBy...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// base applies what everything else stands on: namespaces, priority classes,
// network policies and the Secrets that charts refer to.
func (r *Run) base(ctx, waiting context.Context, path string) (changed bool, err error) {
	err = r.phase(path+"/manifests", "Applying namespaces and policies", func() (string, error) {
		n, err := r.manifests(ctx, path+"/manifests")
		changed = n > 0
		return fmt.Sprintf("%d of %d objects changed", n, len(r.plan.Manifests)+len(r.plan.IfAbsent)), err
	})
	if err != nil || waiting.Err() != nil {
		return changed, errors.Join(err, context.Cause(waiting))
	}
	r.startCRDs(ctx, waiting)
	return changed, r.phase(path+"/secrets", "Creating the Secrets that charts refer to", func() (string, error) {
		return "", r.secrets.Ensure(ctx)
	})
}

// manifests applies the plain objects: namespaces first, what lives in them
// together, and returns how many it changed.
func (r *Run) manifests(ctx context.Context, path string) (int64, error) {
	var inside []*unstructured.Unstructured
	var changed, done atomic.Int64
	apply := func(ctx context.Context, obj *unstructured.Unstructured, how func(context.Context, *unstructured.Unstructured) (bool, error)) error {
		did, err := how(ctx, obj)
		if err != nil {
			return err
		}
		if did {
			changed.Add(1)
		}
		r.emit(event.Event{Type: event.StepProgress, Step: path, Done: done.Add(1),
			Total: int64(len(r.plan.Manifests) + len(r.plan.IfAbsent)), Unit: "objects"})
		return nil
	}
	group, applying := errgroup.WithContext(ctx)
	group.SetLimit(manifestsAtATime)
	for _, obj := range r.plan.Manifests {
		if obj.GetKind() != "Namespace" {
			inside = append(inside, obj)
			continue
		}
		group.Go(func() error { return apply(applying, obj, r.client.Apply) })
	}
	if err := group.Wait(); err != nil {
		return changed.Load(), err
	}
	group, applying = errgroup.WithContext(ctx)
	group.SetLimit(manifestsAtATime)
	for _, obj := range inside {
		group.Go(func() error { return apply(applying, obj, r.client.Apply) })
	}
	for _, obj := range r.plan.IfAbsent {
		group.Go(func() error { return apply(applying, obj, r.client.ApplyIfAbsent) })
	}
	return changed.Load(), group.Wait()
}

// startCRDs begins to bring the CRDs in, once a run: after the small objects of the
// base, which would otherwise stand in the same queue.
func (r *Run) startCRDs(ctx, waiting context.Context) {
	r.feeding.Do(func() {
		bounded, cancel := context.WithTimeout(ctx, crdsTimeout)
		// Before the feed looks whose they are.
		if err := r.client.TakeCRDs(bounded, r.plan.crdNames(), r.plan.releases()); err != nil {
			r.log.Warn("taking CRDs back from earlier charts", "error", err)
		}
		feed := r.client.FeedCRDs(bounded, r.plan.CRDs)
		detach := context.AfterFunc(waiting, feed.Stop)
		r.crds, r.stopCRDs = feed, func() {
			detach()
			feed.Stop()
			cancel()
		}
	})
}

// awaitCRDs waits until the CRDs that the step's release needs are served.
func (r *Run) awaitCRDs(ctx, waiting context.Context, s Step) (changed bool, err error) {
	if len(s.CRDs) == 0 {
		return false, nil
	}
	r.startCRDs(ctx, waiting)
	path := s.Path() + "/crds"
	err = r.phase(path, "Applying CRDs", func() (string, error) {
		result, err := r.crds.Await(waiting, s.CRDs, s.Objects, func(done, total int) {
			r.emit(event.Event{Type: event.StepProgress, Step: path, Done: int64(done), Total: int64(total), Unit: "CRDs"})
		})
		if err != nil {
			return "", err
		}
		changed = len(result.Applied) > 0
		text := fmt.Sprintf("%d applied, %d unchanged", len(result.Applied), len(result.Unchanged))
		if n := len(result.Foreign); n > 0 {
			text += fmt.Sprintf(", %d left to their owner", n)
		}
		return text, nil
	})
	return changed, err
}

func (r *Run) apply(ctx, waiting context.Context, s Step) (chart.Outcome, error) {
	var out chart.Outcome
	select {
	case r.applying <- struct{}{}:
		defer func() { <-r.applying }()
	case <-waiting.Done():
		return out, context.Cause(waiting)
	}
	if err := context.Cause(waiting); err != nil {
		return out, err
	}
	r.startCRDs(ctx, waiting)
	defer r.crds.Hold()()
	err := r.phase(s.Path()+"/release", "Applying "+s.Release.Chart.Name()+" "+s.Version, func() (string, error) {
		var err error
		if s.ChartOrigin != EmbeddedChart {
			if err := r.client.GiveCRDs(ctx, crdsAmong(s.Objects), s.releaseName()); err != nil {
				return "", err
			}
		}
		anew, err := r.client.ClearWay(ctx, s.Objects, s.releaseName())
		if err != nil {
			return "", err
		}
		explain := r.watchHooks(ctx, s)
		if out, err = r.engine.Apply(ctx, *s.Release); err != nil {
			return "", explain(err)
		}
		text := fmt.Sprintf("%s, revision %d, %d objects", out.Change, out.Revision, len(s.Objects))
		if len(anew) > 0 {
			text += ", made anew: " + strings.Join(anew, ", ")
		}
		if out.Repaired != "" {
			text += " (" + out.Repaired + ")"
		}
		return text, nil
	})
	return out, err
}

// configureVault can only start once the server answers, which is long before
// its pod is ready: a sealed Vault is not.
func (r *Run) configureVault(waiting context.Context, path string) error {
	return r.phase(path+"/configure", "Initialising and unsealing Vault", func() (string, error) {
		bounded, cancel := context.WithTimeoutCause(waiting, 10*time.Minute, ErrNotReady)
		defer cancel()
		last := ""
		for {
			err := r.secrets.SetUpVault(bounded)
			if err == nil {
				return "", nil
			}
			if text := oneLine(err); text != last && bounded.Err() == nil {
				last = text
				r.emit(event.Event{Type: event.StepProgress, Step: path + "/configure", Message: text})
			}
			var fatal interface{ Fix() string }
			if errors.As(err, &fatal) {
				return "", err
			}
			select {
			case <-bounded.Done():
				return "", fmt.Errorf("setting up Vault: %w: %w", context.Cause(bounded), err)
			case <-time.After(pollInterval):
			}
		}
	})
}

func (r *Run) ready(waiting context.Context, s Step) ([]cluster.Verdict, error) {
	if len(s.Gates) == 0 {
		return nil, nil
	}
	var verdicts []cluster.Verdict
	path := s.Path() + "/ready"
	began := r.begin(path, "Waiting until ready")
	bounded, cancel := context.WithTimeoutCause(waiting, s.Timeout.Duration, ErrNotReady)
	defer cancel()
	gates, err := openGates(bounded, r, s)
	if err == nil {
		defer gates.close()
		verdicts, err = gates.wait(bounded, func(reason string) {
			r.emit(event.Event{Type: event.StepProgress, Step: path, Message: reason,
				Done: int64(gates.passed), Total: int64(len(s.Gates)), Unit: "gates"})
		})
	}
	if err != nil {
		r.fail(path, began, err)
		return nil, err
	}
	simulated := actors(verdicts)
	r.mu.Lock()
	r.gates += len(verdicts)
	for _, v := range verdicts {
		if len(v.SimulatedBy) > 0 {
			r.answered++
		}
	}
	r.mu.Unlock()
	r.emit(event.Event{
		Type: event.StepDone, Step: path, ElapsedMS: r.end(path, began),
		Simulated: len(simulated) > 0, SimulatedBy: simulated,
		Done: int64(len(verdicts)), Total: int64(len(s.Gates)), Unit: "gates",
	})
	return verdicts, nil
}

// phase runs fn between step.started and step.done or step.failed.
func (r *Run) phase(path, title string, fn func() (string, error)) error {
	began := r.begin(path, title)
	text, err := fn()
	if err != nil {
		r.fail(path, began, err)
		return err
	}
	r.emit(event.Event{Type: event.StepDone, Step: path, Message: text, ElapsedMS: r.end(path, began)})
	return nil
}

func (r *Run) begin(path, title string) time.Time {
	r.emit(event.Event{Type: event.StepStarted, Step: path, Message: title})
	return r.now()
}

func (r *Run) end(path string, began time.Time) int64 {
	took := r.now().Sub(began)
	r.mu.Lock()
	r.took[path] = took
	r.mu.Unlock()
	return max(took.Milliseconds(), 1)
}

func (r *Run) fail(path string, began time.Time, err error) {
	e := event.Event{Type: event.StepFailed, Step: path, Error: oneLine(err), ElapsedMS: r.end(path, began)}
	var fixer interface{ Fix() string }
	if errors.As(err, &fixer) {
		e.Fix = fixer.Fix()
	}
	r.emit(e)
}

func (r *Run) emit(e event.Event) {
	e.Time = r.now()
	r.sink.Emit(e)
}

// Summary is the account of the run so far.
func (r *Run) Summary(outcome string) *event.Summary {
	r.mu.Lock()
	defer r.mu.Unlock()
	nodes := make([]component.Node, len(r.plan.Steps))
	for i, s := range r.plan.Steps {
		nodes[i] = s.Node
	}
	if _, onMachine := r.took[k3sStep]; onMachine {
		for i := range nodes {
			if r.weights != nil && nodes[i].Name == weightsStep {
				nodes[i].Needs = nil
			} else if len(nodes[i].Needs) == 0 {
				nodes[i].Needs = []string{k3sName}
			}
		}
		nodes = append([]component.Node{{Component: component.Component{Name: k3sName}}}, nodes...)
	}
	path, _ := component.CriticalPath(nodes, func(name string) int64 { return int64(r.took["component/"+name]) })
	for i := range path {
		path[i] = "component/" + path[i]
	}
	return &event.Summary{
		Outcome: outcome, Endpoint: r.endpoint, GatesTotal: r.gates, GatesSimulated: r.answered, CriticalPath: path,
	}
}

func (r *Run) setEndpoint(url string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.endpoint = url
}

func (r *Run) modelNamespace() string {
	for _, s := range r.plan.Steps {
		if s.Name == modelStep {
			return s.Namespace
		}
	}
	return "default"
}

func (r *Run) gatewayKey(ctx context.Context) (string, error) { return r.secrets.GatewayKey(ctx) }

func (r *Run) vaultReady(ctx context.Context) (cluster.Verdict, error) {
	return r.secrets.VaultReady(ctx)
}

// oneLine folds an error chain into a line, as events want it.
func oneLine(err error) string {
	text := []rune(err.Error())
	out := make([]rune, 0, len(text))
	for _, c := range text {
		if c == '\n' || c == '\r' {
			out = append(out, ';', ' ')
			continue
		}
		if c < 0x20 {
			c = ' '
		}
		out = append(out, c)
	}
	const longest = 1200
	if len(out) > longest {
		out = append(out[:longest], '…')
	}
	return string(out)
}
