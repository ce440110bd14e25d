package installer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/event"
)

// bundleStep is the row of what came in a file.
const bundleStep = "machine/bundle"

// bundleRow announces it.
func bundleRow() event.PlannedStep {
	return event.PlannedStep{Step: bundleStep, Title: "Bundle", Needs: []string{machineStep}}
}

// Bundle brings what came in a file to where it belongs, before anything else begins.
type Bundle struct {
	// Unpack does it and says in a line what was in it.
	Unpack func(ctx context.Context, progress func(done, total int64, what string)) (account string, err error)
}

// BundleImages are the images of the plan, llmbox's own left out, by when they are needed.
type BundleImages struct {
	// First are those that the first token waits for, Model is the model server's.
	First, Model, Rest []component.Image
}

// BundleImages lists every image that a machine without a network has to have.
func (p *Plan) BundleImages() BundleImages {
	var out BundleImages
	seen := map[string]bool{}
	for _, stage := range []struct {
		to   *[]component.Image
		here func(Step) bool
	}{
		{&out.First, func(s Step) bool { return s.Name == gpuStep || s.Name == gatewayStep }},
		{&out.Model, func(s Step) bool { return s.Name == modelStep }},
		{&out.Rest, func(Step) bool { return true }},
	} {
		for _, s := range p.Steps {
			if s.Mode != component.Install || !stage.here(s) {
				continue
			}
			for _, key := range slices.Sorted(maps.Keys(s.Images)) {
				if image := s.Images[key]; key != ownImageKey && !seen[image.Reference] {
					seen[image.Reference] = true
					*stage.to = append(*stage.to, image)
				}
			}
		}
	}
	return out
}

// All are the images of every stage.
func (b BundleImages) All() []component.Image { return slices.Concat(b.First, b.Model, b.Rest) }

// unpack is the step of a bundle; nothing to do where there is none. What was unpacked
// stays for the next run.
func (r *Run) unpack(ctx context.Context, o Options) error {
	if o.Machine.Bundle == nil {
		return nil
	}
	// What is unpacked can be found again by an uninstall.
	if err := o.Machine.Host.Choose(ctx, o.Recorded); err != nil {
		return err
	}
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
	err := r.phase(bundleStep, "Unpacking the bundle", func() (string, error) {
		text, err := o.Machine.Bundle.Unpack(ctx, func(done, total int64, what string) {
			r.emit(event.Event{Type: event.StepProgress, Step: bundleStep, Message: what, Done: done, Total: total, Unit: "bytes"})
		})
		if err != nil {
			err = fmt.Errorf("unpacking the bundle: %w", err)
		}
		return text, err
	})
	if err != nil && errors.Is(context.Cause(ctx), ErrInterrupted) {
		return ErrInterrupted
	}
	return err
}
