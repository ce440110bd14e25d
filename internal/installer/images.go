package installer

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/machine"
)

// imagesStep is the row of the images that are pulled ahead of the kubelet.
const imagesStep = "machine/images"

// PullOrder lists the images of the plan in the order in which they are worth having:
// those that the first token waits for, the small ones before the model server's, then
// the rest as the components come. llmbox's own is brought by itself.
func (p *Plan) PullOrder() []string {
	var order []string
	add := func(s Step) {
		for _, key := range slices.Sorted(maps.Keys(s.Images)) {
			image := s.Images[key]
			ref := image.Reference
			if image.Digest != "" {
				ref += "@" + image.Digest
			}
			if key != ownImageKey && s.Mode == component.Install && !slices.Contains(order, ref) {
				order = append(order, ref)
			}
		}
	}
	first := []string{gpuStep, gatewayStep, modelStep}
	for _, name := range first {
		for _, s := range p.Steps {
			if s.Name == name {
				add(s)
			}
		}
	}
	for _, s := range p.Steps {
		add(s)
	}
	return order
}

// startImages pulls images beside everything else. The returned function ends that: once
// every component is ready, what is left has no use.
func (r *Run) startImages(ctx context.Context, m *Machine) (stop func()) {
	if len(m.Images) == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	finished := make(chan struct{})
	began := r.begin(imagesStep, "Container images")
	go func() {
		defer close(finished)
		state, err := m.Host.Pull(ctx, m.Want.Box, m.Images, func(p machine.Pulled) {
			r.emit(event.Event{Type: event.StepProgress, Step: imagesStep, Message: p.Image,
				Done: int64(p.Present + p.Done), Total: int64(p.Total), Unit: "images"})
		})
		for _, failure := range state.Failed {
			r.log.Warn("an image could not be pulled ahead; the kubelet tries again", "image", failure)
		}
		text := "unchanged"
		if state.Done > 0 || err != nil || len(state.Failed) > 0 {
			text = fmt.Sprintf("%d of %d pulled ahead, %d were there", state.Done, state.Total, state.Present)
		}
		// That it did not come to its end is no failure: the kubelet pulls what it needs.
		r.emit(event.Event{Type: event.StepDone, Step: imagesStep, ElapsedMS: r.end(imagesStep, began), Message: text})
	}()
	return func() {
		cancel()
		<-finished
	}
}
