package cli

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/machine"
)

const (
	// bootDeadline is how long a box may take to be back: a model of 140 GB from a slow
	// disk alone takes a quarter of an hour.
	bootDeadline = 40 * time.Minute
	bootPause    = 15 * time.Second
)

// afterBoot waits until the box is back, takes away the pods that the boot left behind,
// and notes how it went. What it can't do is no reason for anything to stop.
func (a *app) afterBoot(ctx context.Context, host *machine.Host) error {
	ctx, cancel := context.WithTimeout(ctx, bootDeadline)
	defer cancel()
	a.kubeconfig = k3s.Kubeconfig
	note := machine.Boot{Time: time.Now().UTC().Truncate(time.Second)}
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(a.env.Stdout, "llmbox: "+format+"\n", args...) }
	for {
		cleared, missing := a.lookAfterBoot(ctx)
		for _, pod := range cleared {
			say("removed pod %s, which was turned away before its GPU was there", pod)
		}
		note.Cleared = append(note.Cleared, cleared...)
		if len(missing) == 0 {
			note.Missing, note.Seconds = nil, time.Since(note.Time).Seconds()
			say("the box is back after %d s", int(note.Seconds))
			return host.NoteBoot(ctx, note)
		}
		if !slices.Equal(missing, note.Missing) {
			note.Missing = missing
			for _, what := range missing {
				say("waiting for %s", what)
			}
			if err := host.NoteBoot(ctx, note); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the box did not come back after the boot: %w: %s", installer.ErrNotReady, note.Missing[0])
		case <-time.After(bootPause):
		}
	}
}

// lookAfterBoot clears what can be cleared now and lists what is not back yet.
func (a *app) lookAfterBoot(ctx context.Context) (cleared, missing []string) {
	log := a.newLogger()
	client, err := cluster.Connect(ctx, a.kubeconfig, "", connectTimeout)
	if err != nil {
		return nil, []string{"the API server: " + foldLines(err.Error())}
	}
	if cleared, err = client.DeleteRejectedPods(ctx); err != nil {
		return cleared, []string{foldLines(err.Error())}
	}
	s, err := a.settle(ctx, &cobra.Command{}, &boxFlags{}, true, log)
	if err != nil {
		return cleared, []string{foldLines(err.Error())}
	}
	run, err := s.lookingRun(ctx, log)
	if err != nil {
		return cleared, []string{foldLines(err.Error())}
	}
	for _, c := range run.Status(ctx) {
		if !c.Ready {
			missing = append(missing, c.Name+": "+c.Reason)
		}
	}
	return cleared, missing
}
