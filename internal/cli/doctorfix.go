package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"k8s.io/client-go/dynamic"

	"github.com/llmbox-dev/llmbox/internal/doctor"
	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/repair"
	"github.com/llmbox-dev/llmbox/internal/repair/record"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// mend lists what llmbox can mend of what doctor found, asks, does it and checks each.
func (a *app) mend(ctx context.Context, facts *snapshot.Snapshot, found []finding.Finding) (changed bool, err error) {
	out := a.talk()
	var networks repair.Networks
	networks.Pods, networks.Services = doctor.Networks(facts)
	actions := repair.Plan(found, facts, networks)
	for _, d := range repair.PlanDeclined(found, facts, networks) {
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
		return false, usageError{errors.New("these repairs change the system"), "run it as root: sudo llmbox doctor --fix"}
	}
	if err := a.confirm("Do this?"); err != nil {
		return false, err
	}
	rec, err := record.Open(record.DefaultFile, a.env.Version)
	if err != nil {
		return false, fmt.Errorf("opening the record of repairs: %w", err)
	}
	o := repair.Options{Proxies: repair.ProxyEnvironment(a.env.Getenv)}
	if kube, err := a.kubeconfigREST(); err == nil {
		if o.Cluster, err = dynamic.NewForConfig(kube); err != nil {
			return false, fmt.Errorf("building the API client: %w", err)
		}
	}
	stop, done := interrupts()
	defer done()
	outcomes, err := repair.Apply(ctx, repair.NewMachine(o), actions, rec, stop, func(e repair.Event) {
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
