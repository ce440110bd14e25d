package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/llmbox-dev/llmbox/internal/repair"
	"github.com/llmbox-dev/llmbox/internal/repair/record"
)

// errNotMended ends a command that tried to mend and did not succeed.
var errNotMended = errors.New("not everything could be mended")

// fix lists what llmbox can mend of what was found, asks, and does it. It says
// whether anything was changed, so that the machine is looked at again.
func (a *app) fix(ctx context.Context, look hostLook) (changed bool, err error) {
	networks := repair.Networks{Pods: look.facts.Need.PodCIDR, Services: look.facts.Need.ServiceCIDR}
	actions := repair.Plan(look.found, look.facts.Snapshot, networks)
	out := a.talk()
	if look.facts.Need.Offline {
		actions = slices.DeleteFunc(actions, func(action repair.Action) bool {
			if action.NeedsNetwork() {
				_, _ = fmt.Fprintf(out, "Left out, it needs the network: %s\n", action.Title)
				return true
			}
			return false
		})
	}
	for _, d := range repair.PlanDeclined(look.found, look.facts.Snapshot, networks) {
		_, _ = fmt.Fprintf(out, "Not mended by llmbox: %s: %s\n", d.Finding, d.Why)
	}
	if len(actions) == 0 {
		_, _ = fmt.Fprintln(out, "There is nothing that llmbox mends by itself.")
		return false, nil
	}
	if err := repair.Describe(out, actions, a.width()); err != nil {
		return false, fmt.Errorf("showing the repairs: %w", err)
	}
	if os.Geteuid() != 0 && slices.ContainsFunc(actions, func(action repair.Action) bool { return action.NeedsRoot }) {
		return false, usageError{errors.New("these repairs change the system"), "run it as root: sudo llmbox preflight --fix"}
	}
	if err := a.confirm("Do this?"); err != nil {
		return false, err
	}
	rec, err := record.Open(record.DefaultFile, a.env.Version)
	if err != nil {
		return false, fmt.Errorf("opening the record of repairs: %w", err)
	}
	stop, done := interrupts()
	defer done()
	machine := repair.NewMachine(repair.Options{Proxies: repair.ProxyEnvironment(a.env.Getenv)})
	outcomes, err := repair.Apply(ctx, machine, actions, rec, stop, func(e repair.Event) {
		_, _ = fmt.Fprintf(out, "[%d/%d] %s: %s\n", e.Index, e.Count, e.Action, e.Text)
	})
	for _, o := range outcomes {
		changed = changed || o.Result == repair.Mended || len(o.Did) > 0
		if o.Result == repair.Broke {
			err = errors.Join(err, fmt.Errorf("%w: %s: %s", errNotMended, o.Name, o.Why))
		}
	}
	return changed, err
}

// talk is where a person is spoken to: stderr where stdout carries a document.
func (a *app) talk() io.Writer {
	if a.output == "json" {
		return a.env.Stderr
	}
	return a.env.Stdout
}

// interrupts returns a channel that the first Ctrl-C closes; what is at work finishes.
func interrupts() (<-chan struct{}, func()) {
	stop := make(chan struct{})
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	ended := make(chan struct{})
	go func() {
		select {
		case <-signals:
			close(stop)
		case <-ended:
		}
	}()
	return stop, func() {
		signal.Stop(signals)
		close(ended)
	}
}
