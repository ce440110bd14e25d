package installer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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

// Options is what an install works with.
type Options struct {
	Plan    *Plan
	Client  *cluster.Client
	Engine  Engine
	Secrets Secrets
	State   *State
	// Recorded are the choices to keep for the next run, as YAML.
	Recorded []byte
	// Version is llmbox's own.
	Version string
	// Ignore lists ids of findings that may fail.
	Ignore []string
	Sink   event.Sink
	Log    *slog.Logger
	// Interrupt is closed when somebody asks the run to stop.
	Interrupt <-chan struct{}
}

// Install carries out a plan on a cluster that is there already: preflight,
// lock, components, journal. It emits run.started and, whatever happens,
// run.done. The event of the summary is returned with the error.
func Install(ctx context.Context, o Options) (*event.Summary, error) {
	began := time.Now()
	run := NewRun(o.Plan, o.Client, o.Engine, o.Secrets, o.State, o.Sink, o.Log)
	planned := append([]event.PlannedStep{{Step: preflightStep, Title: "Preflight"}}, o.Plan.Announce()...)
	run.emit(event.Event{Type: event.RunStarted, Message: "Installing " + o.Plan.Model.Name, Plan: planned})

	err := run.guarded(ctx, o)

	outcome := "done"
	switch {
	case errors.Is(err, ErrInterrupted), errors.Is(err, context.Canceled):
		outcome, err = "interrupted", ErrInterrupted
	case err != nil:
		outcome = "failed"
	}
	summary := run.Summary(outcome)
	done := event.Event{Type: event.RunDone, Summary: summary, ElapsedMS: time.Since(began).Milliseconds()}
	if err != nil {
		done.Error = oneLine(err)
	}
	run.emit(done)
	return summary, err
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
	findings := preflight.JudgeCluster(preflight.CollectCluster(ctx, r.client, preflight.ClusterTimeout))
	var stopping []string
	for _, f := range findings {
		r.emit(event.Event{Type: event.FindingMade, Step: preflightStep, Message: f.Title, Finding: &f})
		if f.Severity == finding.Fail && (f.Strict || !slices.Contains(ignore, f.ID)) {
			stopping = append(stopping, f.ID)
		}
	}
	if len(stopping) > 0 {
		err := fmt.Errorf("%w: %s", ErrCheckFailed, strings.Join(stopping, ", "))
		r.fail(preflightStep, began, err)
		return err
	}
	r.emit(event.Event{Type: event.StepDone, Step: preflightStep, ElapsedMS: r.end(preflightStep, began),
		Message: fmt.Sprintf("%d checks", len(findings))})
	return nil
}
