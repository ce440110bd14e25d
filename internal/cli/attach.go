package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/machine"
	"github.com/llmbox-dev/llmbox/internal/report"
)

// keptRuns is how many logs of runs stay.
const keptRuns = 10

// takeMachine takes the lock of the machine for a run and has the run write its events
// into a log of its own, so that whoever lost the connection can look on again. Without
// the right to do so, nothing is taken: preflight says that root is wanted.
func (a *app) takeMachine(ctx context.Context, cmd *cobra.Command, flags *boxFlags, host *machine.Host, command string) (release func(), err error) {
	if !host.IsRoot() {
		return func() {}, nil
	}
	box, err := a.boxOnMachine(ctx, cmd, flags, host)
	if err != nil {
		return nil, err
	}
	log := a.logFile
	if log == "" {
		log = filepath.Join(box.Paths.Log, "run-"+time.Now().UTC().Format("20060102T150405.000")+".ndjson")
	} else if log, err = filepath.Abs(log); err != nil {
		return nil, fmt.Errorf("finding the log file: %w", err)
	}
	if release, err = host.Lock(command, log); err != nil {
		return nil, err
	}
	a.logFile = log
	old, err := filepath.Glob(filepath.Join(box.Paths.Log, "run-*.ndjson"))
	if err == nil && len(old) >= keptRuns {
		slices.Sort(old)
		for _, name := range old[:len(old)-keptRuns+1] {
			_ = os.Remove(name) // one log more or less is no reason to stop
		}
	}
	return release, nil
}

// attach looks on at the run that holds the machine, and ends as it ends. Leaving does
// not stop it.
func (a *app) attach(ctx context.Context, host *machine.Host, holder machine.Holder) (err error) {
	_, _ = fmt.Fprintf(a.env.Stderr, "llmbox %s is at work here since %s (process %d): looking on. Ctrl-C leaves it at work.\n",
		holder.Command, holder.Since.Local().Format(time.TimeOnly), holder.PID)
	a.logFile = ""
	ctx, session, err := a.start(ctx, "llmbox "+holder.Command)
	if err != nil {
		return err
	}
	defer report.Rescue(session.renderer)
	defer func() { err = errors.Join(err, session.end()) }()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-session.interrupt:
			cancel(installer.ErrInterrupted)
		case <-ctx.Done():
		}
	}()
	last, err := report.Follow(ctx, holder.Log, host.Locked, session.sink.Emit)
	switch {
	case errors.Is(err, report.ErrGone):
		return fixedError{err, "run the command again: it goes on where that run stopped"}
	case err != nil:
		return err
	case last.Summary != nil && last.Summary.Outcome == "interrupted":
		return installer.ErrInterrupted
	case last.Error != "":
		return errors.New(last.Error)
	}
	return nil
}
