package cutoff

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/test/proofcrash/snapshot"
)

const (
	// settleLimit is how long the controllers may take, once llmbox is done, to
	// bring what they own to where it was in the undisturbed run.
	settleLimit = 40 * time.Second
	// restFor is how long nothing may change before the undisturbed state is
	// taken: longer than the slowest controller's period, the 15 s of scaling.
	restFor = 17 * time.Second
)

// Settled takes the state of the cluster until it is as wanted or time is up.
func Settled(ctx context.Context, c *cluster.Client, want snapshot.State) ([]string, error) {
	deadline := time.Now().Add(settleLimit)
	for {
		c.Discovery.Invalidate()
		state, err := snapshot.Take(ctx, c.Discovery, c.Dynamic)
		if err != nil {
			return nil, err
		}
		diff := snapshot.Diff(want, state)
		if len(diff) == 0 || time.Now().After(deadline) {
			return diff, nil
		}
		if err := sleep(ctx, 2*time.Second); err != nil {
			return nil, err
		}
	}
}

// Quiet takes the state of the cluster once nothing has changed for a while.
func Quiet(ctx context.Context, c *cluster.Client) (snapshot.State, error) {
	last := snapshot.State{}
	deadline := time.Now().Add(5 * restFor)
	for {
		c.Discovery.Invalidate()
		state, err := snapshot.Take(ctx, c.Discovery, c.Dynamic)
		if err != nil {
			return nil, err
		}
		diff := snapshot.Diff(last, state)
		if len(diff) == 0 {
			return state, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("the cluster does not come to rest: %s", strings.Join(diff, "; "))
		}
		last = state
		if err := sleep(ctx, restFor); err != nil {
			return nil, err
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
