package installer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/machine"
	"github.com/llmbox-dev/llmbox/internal/weights"
)

// The steps of a machine that becomes the cluster.
const (
	machineStep = "preflight/machine"
	k3sName     = "k3s"
	k3sStep     = "component/" + k3sName
)

// Machine says how this machine becomes the cluster. Whoever calls holds its lock.
type Machine struct {
	Host *machine.Host
	Want machine.Want
	// Found is what preflight found on it.
	Found []finding.Finding
	// Images are pulled from the moment that containerd answers, in this order.
	Images []string
	// Bundle is unpacked first; nil without one.
	Bundle *Bundle
	// Weights are brought to the machine itself, from the first moment on; nil leaves them
	// to a Job in the cluster.
	Weights *weights.Weights
	// Connect reaches the cluster once it is there, and plans anew with what it shows;
	// nil for a machine that joins another's, and leaves the cluster to that.
	Connect func(ctx context.Context) (Target, error)
}

// Refuse shows why a machine can't become a box, as a run that ends there. Nothing is
// written.
func Refuse(o Options) (*event.Summary, error) {
	began := time.Now()
	r := NewRun(&Plan{}, nil, nil, nil, nil, o.Sink, o.Log)
	r.emit(event.Event{Type: event.RunStarted, Message: "Looking at this machine", Plan: []event.PlannedStep{
		{Step: machineStep, Title: "Preflight of this machine"},
	}})
	return r.ended(began, r.admit(o), withoutGates)
}

// Join makes the machine a further node of a box. It emits run.started and run.done as
// Install does.
func Join(ctx context.Context, o Options) (*event.Summary, error) {
	began := time.Now()
	r := NewRun(&Plan{}, nil, nil, nil, nil, o.Sink, o.Log)
	steps := []event.PlannedStep{
		{Step: machineStep, Title: "Preflight of this machine"},
		{Step: k3sStep, Title: "k3s", Needs: []string{machineStep}},
	}
	if o.Machine.Bundle != nil {
		steps = append(steps, bundleRow())
	}
	r.emit(event.Event{Type: event.RunStarted, Message: "Joining " + o.Machine.Want.Join.URL, Plan: steps})
	err := r.admit(o)
	if err == nil {
		err = r.unpack(ctx, o)
	}
	if err == nil {
		_, err = r.onMachine(ctx, o)
	}
	return r.ended(began, err, withoutGates)
}

// withoutGates is the account of a run that passes none.
func withoutGates(outcome string) *event.Summary { return &event.Summary{Outcome: outcome} }

// admit refuses a machine that does not fit.
func (r *Run) admit(o Options) error {
	began := r.begin(machineStep, "Checking this machine")
	return r.judged(machineStep, began, o.Machine.Found, o.Ignore)
}

// ended emits run.done and settles how a run ended.
func (r *Run) ended(began time.Time, err error, account func(outcome string) *event.Summary) (*event.Summary, error) {
	outcome := "done"
	switch {
	case errors.Is(err, ErrInterrupted), errors.Is(err, context.Canceled):
		outcome, err = "interrupted", ErrInterrupted
	case err != nil:
		outcome = "failed"
	}
	summary := account(outcome)
	done := event.Event{Type: event.RunDone, Summary: summary, ElapsedMS: time.Since(began).Milliseconds()}
	if err != nil {
		done.Error = oneLine(err)
	}
	r.emit(done)
	return summary, err
}

// onMachine makes the machine the cluster. Everything it does can be cut off and done
// again, so an interrupt ends it at once.
func (r *Run) onMachine(ctx context.Context, o Options) (Target, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	finished := make(chan struct{})
	defer close(finished)
	go func() {
		select {
		case <-o.Interrupt:
			cancel(ErrInterrupted)
		case <-finished:
		}
	}()
	target, err := r.becomeCluster(ctx, o)
	if err != nil && errors.Is(context.Cause(ctx), ErrInterrupted) {
		err = ErrInterrupted
	}
	return target, err
}

func (r *Run) becomeCluster(ctx context.Context, o Options) (Target, error) {
	began := r.begin(k3sStep, "k3s")
	fail := func(err error) (Target, error) {
		err = fmt.Errorf("%s: %w", k3sName, err)
		r.fail(k3sStep, began, err)
		return Target{}, err
	}
	if err := o.Machine.Host.Choose(ctx, o.Recorded); err != nil {
		return fail(err)
	}
	phases := &machinePhases{run: r}
	out, err := o.Machine.Host.Up(ctx, o.Machine.Want, phases.report)
	phases.end(err)
	if err != nil {
		var late *k3s.NotReadyError
		if errors.As(err, &late) {
			err = fmt.Errorf("%w: %w", ErrNotReady, err)
		}
		return fail(err)
	}
	if out.Supervised {
		r.log.Warn("nothing starts k3s after a reboot here: have the machine run this at boot", "command", out.Program+" host supervise")
	}
	var target Target
	if o.Machine.Connect != nil {
		if target, err = o.Machine.Connect(ctx); err != nil {
			return fail(err)
		}
		r.plan, r.client, r.engine, r.secrets, r.state = target.Plan, target.Client, target.Engine, target.Secrets, target.State
	}
	done := event.Event{Type: event.StepDone, Step: k3sStep, ElapsedMS: r.end(k3sStep, began), Message: out.Version + " on node " + out.NodeName}
	switch {
	case len(out.Restarted) > 0:
		done.Message += ", restarted: " + strings.Join(out.Restarted, ", ")
	case !out.Changed:
		done.Message = "unchanged"
	}
	r.emit(done)
	return target, nil
}

// machinePhases turns the progress of k3s into phases of its step: each begins with the
// first word of it and ends with the first of the next.
type machinePhases struct {
	run     *Run
	current k3s.Phase
	began   time.Time
}

func (p *machinePhases) report(progress k3s.Progress) {
	path := k3sStep + "/" + string(progress.Phase)
	if progress.Phase != p.current {
		p.end(nil)
		p.current, p.began = progress.Phase, p.run.begin(path, phaseTitle(progress.Phase))
	}
	p.run.emit(event.Event{Type: event.StepProgress, Step: path, Message: progress.Message,
		Done: progress.Done, Total: progress.Total, Unit: progress.Unit})
}

func (p *machinePhases) end(err error) {
	if p.current == "" {
		return
	}
	path := k3sStep + "/" + string(p.current)
	p.current = ""
	if err != nil {
		p.run.fail(path, p.began, err)
		return
	}
	p.run.emit(event.Event{Type: event.StepDone, Step: path, ElapsedMS: p.run.end(path, p.began)})
}

func phaseTitle(p k3s.Phase) string {
	switch p {
	case k3s.PhaseBinary:
		return "Getting k3s"
	case k3s.PhaseConfig:
		return "Configuring k3s"
	case k3s.PhaseService:
		return "Starting k3s"
	case k3s.PhaseReady:
		return "Waiting until ready"
	case k3s.PhaseRuntime:
		return "Looking for the GPU runtime"
	case k3s.PhaseRemove:
		return "Removing k3s"
	case machine.PhaseImage:
		return "Bringing llmbox's image in"
	}
	return string(p)
}

// The steps of an uninstall on the machine.
const (
	k3sGoneStep   = "uninstall/k3s"
	stateGoneStep = "uninstall/machine"
)

// MachineRemoval is what an uninstall of the machine works with.
type MachineRemoval struct {
	Host    *machine.Host
	Options machine.RemoveOptions
	Sink    event.Sink
	Log     *slog.Logger
	// Interrupt is closed when somebody asks the run to stop.
	Interrupt <-chan struct{}
}

// UninstallMachine takes the box off the machine: k3s with everything that ran on it,
// then what llmbox keeps there. It can be run again from any state; the error joins what
// is left.
func UninstallMachine(ctx context.Context, o MachineRemoval) (*event.Summary, error) {
	began := time.Now()
	r := NewRun(&Plan{}, nil, nil, nil, nil, o.Sink, o.Log)
	r.emit(event.Event{Type: event.RunStarted, Message: "Uninstalling", Plan: []event.PlannedStep{
		{Step: k3sGoneStep, Title: "k3s and what ran on it"},
		{Step: stateGoneStep, Title: "llmbox's own files", Needs: []string{k3sGoneStep}},
	}})

	return r.ended(began, r.uninstallMachine(ctx, o), withoutGates)
}

func (r *Run) uninstallMachine(ctx context.Context, o MachineRemoval) error {
	err := r.phase(k3sGoneStep, "Removing k3s", func() (string, error) {
		gone, err := o.Host.RemoveK3s(ctx, o.Options, o.Interrupt, func(p k3s.Progress) {
			r.emit(event.Event{Type: event.StepProgress, Step: k3sGoneStep, Message: p.Message, Done: p.Done, Total: p.Total, Unit: p.Unit})
		})
		r.staying(k3sGoneStep, gone)
		return strings.Join(gone.Counts, ", "), err
	})
	if err != nil {
		// What is left of k3s is found by what llmbox keeps.
		r.emit(event.Event{Type: event.StepSkipped, Step: stateGoneStep, Message: "needs " + k3sGoneStep})
		return err
	}
	return r.phase(stateGoneStep, "Removing llmbox's own files", func() (string, error) {
		gone, err := o.Host.RemoveState(ctx, o.Options)
		r.staying(stateGoneStep, gone)
		return strings.Join(gone.Counts, ", "), err
	})
}

// staying shows what an uninstall leaves, and why.
func (r *Run) staying(step string, gone machine.Removed) {
	for _, what := range gone.Stays {
		r.emit(event.Event{Type: event.Log, Step: step, Message: "stays: " + what})
	}
}
