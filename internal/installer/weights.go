package installer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/weights"
)

const (
	weightsPath     = "component/" + weightsStep
	weightsDownload = weightsPath + "/download"
)

// HostModels is the directory of the machine that holds model weights, where llmbox
// fills it itself.
type HostModels struct {
	// Dir is what the model server gets as HF_HOME.
	Dir string
	// NodeName is the node that has it.
	NodeName string
	// Bytes are those of the weights.
	Bytes int64
}

// volumeGiB is what the volume says it holds: weights and what the model server compiles
// and caches beside them. Nothing enforces it.
func (h HostModels) volumeGiB() int64 {
	const gib, besides = 1 << 30, 30
	return h.Bytes/gib + besides
}

// hostWeights are weights that stream in beside everything else.
type hostWeights struct {
	finished chan struct{}
	err      error
	cancel   context.CancelFunc
}

// startWeights has the weights stream in from now on. The returned function ends that,
// where it has not ended, and waits until nothing is written any more.
func (r *Run) startWeights(ctx context.Context, w *weights.Weights, interrupt <-chan struct{}) (stop func()) {
	if w == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	h := &hostWeights{finished: make(chan struct{}), cancel: func() { cancel(nil) }}
	r.weights = h
	detach := make(chan struct{})
	go func() {
		select {
		case <-interrupt:
			cancel(ErrInterrupted) // what has arrived is kept for the next run
		case <-detach:
		}
	}()
	began := r.begin(weightsPath, "Model weights")
	go func() {
		defer close(h.finished)
		h.err = r.fetchWeights(ctx, w)
		switch {
		case h.err == nil:
			done := event.Event{Type: event.StepDone, Step: weightsPath, ElapsedMS: r.end(weightsPath, began)}
			r.emit(done)
		case errors.Is(context.Cause(ctx), ErrInterrupted), ctx.Err() != nil:
			h.err = ErrInterrupted
		default:
			h.err = fmt.Errorf("component %s: %w", weightsStep, h.err)
			r.fail(weightsPath, began, h.err)
		}
	}()
	return func() {
		close(detach)
		cancel(nil)
		<-h.finished
		w.Close()
	}
}

func (r *Run) fetchWeights(ctx context.Context, w *weights.Weights) error {
	if w.Complete {
		return nil
	}
	return r.phase(weightsDownload, "Downloading", func() (string, error) {
		began := time.Now()
		err := w.Fetch(ctx, func(p weights.Progress) {
			r.emit(event.Event{Type: event.StepProgress, Step: weightsDownload, Message: rateText(p), Done: p.Done, Total: p.Total, Unit: "bytes"})
		})
		return fmt.Sprintf("%d files, %.1f GB in %s", w.Files, float64(w.Bytes)/1e9, time.Since(began).Round(time.Second)), err
	})
}

// rateText says how fast it goes and how long it will take.
func rateText(p weights.Progress) string {
	if p.Rate <= 0 {
		return p.File
	}
	left := time.Duration(float64(p.Total-p.Done) / p.Rate * float64(time.Second)).Round(time.Second)
	return fmt.Sprintf("%.0f MB/s, %s left: %s", p.Rate/1e6, left, p.File)
}

// awaitWeights is the step's part of what began with the run.
func (r *Run) awaitWeights(ctx, waiting context.Context, s Step) error {
	select {
	case <-r.weights.finished:
	case <-waiting.Done():
		return context.Cause(waiting)
	}
	state := ComponentState{Name: s.Name, Status: componentReady, Version: s.Version}
	if err := r.weights.err; err != nil {
		if !errors.Is(err, ErrInterrupted) {
			state.Status, state.Error = componentFailed, oneLine(err)
			r.state.Component(ctx, state)
		}
		return err
	}
	r.state.Component(ctx, state)
	return nil
}
