package rehearsal

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/client-go/rest"

	"github.com/llmbox-dev/llmbox/test/lab/controlplane"
)

// parts are what runs inside the supervisor. The first that fails ends them all.
type parts struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

func newParts(ctx context.Context) (*parts, func()) {
	p := &parts{}
	p.ctx, p.cancel = context.WithCancelCause(ctx)
	return p, func() {
		p.cancel(nil)
		ended := make(chan struct{})
		go func() {
			p.wg.Wait()
			close(ended)
		}()
		// A part that does not listen must not keep the programs from being stopped.
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
		}
	}
}

func (p *parts) run(name string, plane *controlplane.Plane, f func(context.Context, *rest.Config) error) error {
	config, err := plane.Config(name)
	if err != nil {
		return err
	}
	p.wg.Go(func() {
		err := f(p.ctx, config)
		if p.ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("it ended without an error")
		}
		p.cancel(fmt.Errorf("running %s: %w", name, err))
	})
	return nil
}

// reason prefers the failure of a part to the cancellation it caused.
func (p *parts) reason(err error) error {
	if cause := context.Cause(p.ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}
