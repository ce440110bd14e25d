package installer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/preflight"
)

// ErrCheckFailed means that preflight found something that stops the install.
var ErrCheckFailed = errors.New("a check failed")

// ErrLockLost means that another run took over while this one was at work.
var ErrLockLost = errors.New("the lock was lost to another run")

// preflightStep is the path of the step before the components.
const preflightStep = "preflight/cluster"

// Target is a cluster to install into and what is to be done there.
type Target struct {
	Plan    *Plan
	Client  *cluster.Client
	Engine  Engine
	Secrets Secrets
	State   *State
	// Recorded are the choices to keep for the next run, as YAML.
	Recorded []byte
}

// Options is what an install works with.
type Options struct {
	// Target is where to; with a Machine its Plan and Recorded alone are known at first.
	Target
	// Machine becomes the cluster; nil where there is one already.
	Machine *Machine
	// Version is llmbox's own.
	Version string
	// Ignore lists ids of findings that may fail.
	Ignore []string
	Sink   event.Sink
	Log    *slog.Logger
	// Interrupt is closed when somebody asks the run to stop.
	Interrupt <-chan struct{}
}

// Install carries out a plan: on a machine that becomes the cluster first, or on a
// cluster that is there already; preflight, lock, components, journal. It emits
// run.started and, whatever happens, run.done. The event of the summary is returned with
// the error.
func Install(ctx context.Context, o Options) (*event.Summary, error) {
	began := time.Now()
	run := NewRun(o.Plan, o.Client, o.Engine, o.Secrets, o.State, o.Sink, o.Log)
	run.emit(event.Event{Type: event.RunStarted, Message: "Installing " + o.Plan.Model.Name, Plan: o.announce()})

	return run.ended(began, run.install(ctx, o), run.Summary)
}

// announce lists the steps of the run for run.started.
func (o Options) announce() []event.PlannedStep {
	components := o.Plan.Announce()
	if o.Machine == nil {
		return append([]event.PlannedStep{{Step: preflightStep, Title: "Preflight"}}, components...)
	}
	for i := range components {
		if o.Machine.Weights != nil && components[i].Step == weightsPath {
			components[i].Needs = []string{machineStep}
		} else if len(components[i].Needs) == 0 {
			components[i].Needs = []string{k3sStep}
		}
	}
	images := event.PlannedStep{Step: imagesStep, Title: "Container images", Needs: []string{machineStep}}
	if o.Machine.Bundle != nil {
		images = bundleRow()
	}
	return append([]event.PlannedStep{
		{Step: machineStep, Title: "Preflight of this machine"},
		{Step: k3sStep, Title: "k3s", Needs: []string{machineStep}},
		images,
		{Step: preflightStep, Title: "Preflight of the cluster", Needs: []string{k3sStep}},
	}, components...)
}

// install is the machine's part, where there is one, and the cluster's.
func (r *Run) install(ctx context.Context, o Options) error {
	if o.Machine == nil {
		return r.guarded(ctx, o)
	}
	if err := r.admit(o); err != nil {
		return err
	}
	if err := r.unpack(ctx, o); err != nil {
		return err
	}
	defer r.startWeights(ctx, o.Machine.Weights, o.Interrupt)()
	defer r.startImages(ctx, o.Machine)()
	var err error
	if o.Target, err = r.onMachine(ctx, o); err != nil {
		return err
	}
	return r.guarded(ctx, o)
}

// guarded holds the lock around everything that changes the cluster.
func (r *Run) guarded(ctx context.Context, o Options) error {
	if err := r.preflight(ctx, o.Ignore); err != nil {
		return err
	}
	release, lost, err := Lock(ctx, o.Client.Kube, o.Log)
	if err != nil {
		return err
	}
	defer release()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-lost:
			cancel(ErrLockLost)
		case <-ctx.Done():
		}
	}()
	err = o.State.Start(ctx, Journal{
		Version: o.Version, Engine: r.engine.Name(), Started: time.Now().UTC(), Outcome: "running",
		Model: r.plan.Model.Name,
	}, o.Recorded)
	if err != nil {
		return err
	}
	err = r.Components(ctx, o.Interrupt)
	if cause := context.Cause(ctx); errors.Is(cause, ErrLockLost) {
		return cause
	}
	outcome := "done"
	switch {
	case errors.Is(err, ErrInterrupted):
		outcome = "interrupted"
	case err != nil:
		outcome = "failed"
	}
	r.mu.Lock()
	endpoint := r.endpoint
	r.mu.Unlock()
	r.state.End(ctx, outcome, endpoint)
	return err
}

func (r *Run) preflight(ctx context.Context, ignore []string) error {
	began := r.begin(preflightStep, "Checking the cluster")
	found := preflight.JudgeCluster(preflight.CollectCluster(ctx, r.client, preflight.ClusterTimeout))
	return r.judged(preflightStep, began, found, ignore)
}

// judged shows what a preflight found and says whether it stops the run.
func (r *Run) judged(step string, began time.Time, found []finding.Finding, ignore []string) error {
	for _, f := range found {
		r.emit(event.Event{Type: event.FindingMade, Step: step, Message: f.Title, Finding: &f})
	}
	if stopping := preflight.Stopping(found, ignore); len(stopping) > 0 {
		err := fmt.Errorf("%w: %s", ErrCheckFailed, strings.Join(stopping, ", "))
		r.fail(step, began, err)
		return err
	}
	r.emit(event.Event{Type: event.StepDone, Step: step, ElapsedMS: r.end(step, began),
		Message: fmt.Sprintf("%d checks", len(found))})
	return nil
}
