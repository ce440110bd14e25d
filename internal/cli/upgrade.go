package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/k3s"
)

func (a *app) upgradeCommand() *cobra.Command {
	var flags boxFlags
	var here machineFlags
	cmd := &cobra.Command{
		Use:   "upgrade",
		Short: "Bring k3s and the components to what this llmbox carries",
		Long: `upgrade shows what it would change, asks, and does it: k3s first, then the
components in their order, each CRD before what uses it. What is there already stays
untouched. A component whose upgrade fails gets its former release back. Pods, the
model among them, go on while k3s is restarted.

It goes by one minor of Kubernetes at a time and never back.`,
		Example: `  sudo llmbox upgrade
  sudo llmbox upgrade --yes --report run.html
  sudo llmbox upgrade --set k3s.version=v1.36.5+k3s1
  sudo llmbox upgrade --bundle box.tar.zst        without any network, by the llmbox that made the bundle
  llmbox upgrade --kubeconfig ~/.kube/config`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runUpgrade(cmd, &flags, &here) },
	}
	flags.register(cmd)
	here.register(cmd, &flags)
	here.bundle.register(cmd)
	cmd.Flags().StringVar(&a.reportFile, "report", "", "write the timeline of the run to this HTML file")
	return cmd
}

func (a *app) runUpgrade(cmd *cobra.Command, flags *boxFlags, here *machineFlags) error {
	ctx := cmd.Context()
	onMachine := a.onThisMachine()
	if here.bundle.file == "-" && !a.yes {
		return usageError{errors.New("--bundle - leaves no standard input for an answer"), "say it at once: --yes"}
	}
	if onMachine {
		if err := here.bundle.opened(ctx, cmd, a, flags); err != nil {
			return err
		}
		defer here.bundle.close()
	}
	s, err := a.settle(ctx, cmd, flags, true, a.newLogger())
	if err != nil {
		return err
	}
	if s.last.Version == "" {
		return usageError{errors.New("there is no box to upgrade"), "make one: sudo llmbox install"}
	}
	changes := installer.VersionChanges(s.last, s.plan, a.env.Version)
	if err := installer.CheckVersions(changes); err != nil {
		return fixedError{err, "use the llmbox that made this box, or a newer one: llmbox version"}
	}
	if onMachine {
		from, to, err := a.k3sVersions(ctx, s, here)
		if err != nil {
			return err
		}
		change, err := k3s.UpgradeVerdict(from, to)
		if err != nil {
			return err
		}
		if change != k3s.Same {
			changes = append([]installer.VersionChange{{Name: "k3s", From: from, To: to}}, changes...)
		}
	}
	if len(changes) == 0 {
		_, _ = fmt.Fprintln(a.talk(), "Everything is as this llmbox carries it.")
		return nil
	}
	if err := a.printChanges(changes); err != nil {
		return err
	}
	if err := a.confirm("Upgrade?"); err != nil {
		return err
	}
	here.upgrade = true
	if onMachine {
		return a.installHere(cmd, flags, here)
	}
	return a.runInstall(cmd, flags, here)
}

// k3sVersions are the installed one and the one that is wanted.
func (a *app) k3sVersions(ctx context.Context, s *settled, here *machineFlags) (from, to string, err error) {
	host, err := a.thisMachine()
	if err != nil {
		return "", "", err
	}
	m := host.K3s(s.box)
	record, err := m.Record(ctx)
	if err != nil {
		return "", "", err
	}
	if record.Adopted {
		// Whoever installed it upgrades it.
		return record.Binary.Version, record.Binary.Version, nil
	}
	if file := s.box.K3s.BinaryPath; file != "" {
		v, err := m.VersionOf(ctx, file)
		if err != nil {
			return "", "", err
		}
		return record.Binary.Version, v.String(), nil
	}
	return record.Binary.Version, cmp.Or(here.bundle.k3sVersion(s), s.box.K3s.Version, s.table.K3s.Shipped), nil
}

func (a *app) printChanges(changes []installer.VersionChange) error {
	if a.output == "json" {
		// What follows is a stream of events; the plan goes where a person looks.
		for _, c := range changes {
			_, _ = fmt.Fprintf(a.env.Stderr, "%s: %s to %s\n", c.Name, dash(c.From), c.To)
		}
		return nil
	}
	w := tabwriter.NewWriter(a.env.Stdout, 0, 4, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "COMPONENT\tNOW\tTHEN")
	for _, c := range changes {
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\n", c.Name, dash(c.From), c.To)
	}
	return w.Flush()
}
