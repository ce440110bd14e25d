package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/machine"
	"github.com/llmbox-dev/llmbox/internal/report"
)

func (a *app) uninstallCommand() *cobra.Command {
	var flags boxFlags
	var here removalFlags
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove everything llmbox made, and nothing else",
		Long: `uninstall takes the box off this machine: pods, k3s with its data, mounts, network
interfaces, packet filter rules, control groups, services, files, and llmbox itself
last. It never touches the NVIDIA driver, the container toolkit, Docker or another
Kubernetes. A k3s that was adopted stays; the components go out of it.

With --kubeconfig (or KUBECONFIG) it removes the components from that cluster in
reverse order, then the cluster-wide objects and CRDs that llmbox made and nobody
else uses, then its namespaces.

It can be run again from any state.`,
		Example: `  sudo llmbox uninstall --yes
  sudo llmbox uninstall --keep-data               keep model weights and volumes
  llmbox uninstall --kubeconfig ~/.kube/config --yes --output json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.onThisMachine() {
				return a.uninstallHere(cmd, &flags, here)
			}
			return a.runUninstall(cmd, &flags)
		},
	}
	flags.register(cmd)
	cmd.Flags().BoolVar(&here.keepData, "keep-data", false, "keep model weights, volumes of pods and downloads")
	cmd.Flags().BoolVar(&here.keepProgram, "keep-binary", false, "keep llmbox itself")
	cmd.Flags().StringVar(&a.reportFile, "report", "", "write the timeline of the run to this HTML file")
	return cmd
}

func (a *app) runUninstall(cmd *cobra.Command, flags *boxFlags) (err error) {
	ctx := cmd.Context()
	s, err := a.settle(ctx, cmd, flags, true, a.newLogger())
	if err != nil {
		return err
	}
	if err := a.confirm(fmt.Sprintf("Remove the box and its data from %s?", s.client.REST.Host)); err != nil {
		return err
	}
	ctx, session, err := a.start(ctx, "llmbox uninstall")
	if err != nil {
		return err
	}
	defer report.Rescue(session.renderer)
	defer func() { err = errors.Join(err, session.end()) }()
	engine, err := s.engine(ctx, session.log)
	if err != nil {
		return err
	}
	_, err = installer.Uninstall(ctx, installer.UninstallOptions{
		Plan: s.plan, Client: s.client, Engine: engine, Sink: session.sink, Log: session.log, Interrupt: session.interrupt,
	})
	return err
}

// removalFlags are the flags of an uninstall on this machine.
type removalFlags struct{ keepData, keepProgram bool }

// uninstallHere takes the box off this machine.
func (a *app) uninstallHere(cmd *cobra.Command, flags *boxFlags, here removalFlags) (err error) {
	ctx := cmd.Context()
	host, err := a.thisMachine()
	if err != nil {
		return err
	}
	box, err := a.boxOnMachine(ctx, cmd, flags, host)
	if err != nil {
		return err
	}
	traces, err := host.Traces(ctx, box)
	if err != nil {
		return err
	}
	if !traces {
		_, _ = fmt.Fprintln(a.talk(), "There is no box on this machine. For one in a cluster: llmbox uninstall --kubeconfig FILE")
		return nil
	}
	if !host.IsRoot() {
		return usageError{errors.New("removing the box changes the system"), "run it as root: sudo llmbox uninstall"}
	}
	existing, err := host.K3s(box).Existing(ctx)
	if err != nil {
		return err
	}
	question := "Remove k3s, the box and all of its data from this machine?"
	switch {
	case existing.Whose == k3s.Adopted:
		question = "Remove the box and its data from the k3s on this machine, which stays?"
	case here.keepData:
		question = "Remove k3s and the box from this machine, and keep weights and volumes?"
	}
	if err := a.confirm(question); err != nil {
		return err
	}
	release, err := host.Lock("uninstall", "")
	if err != nil {
		return err
	}
	defer release()
	if existing.Whose == k3s.Adopted && existing.Running {
		a.kubeconfig, a.yes = k3s.Kubeconfig, true
		if err := a.runUninstall(cmd, flags); err != nil {
			return err
		}
	}
	// Another Kubernetes is found by what preflight looks at.
	look, err := a.hostFindings(ctx, cmd, flags, preflightFlags{offline: true, gpuTimeout: gpu.HangAfter})
	if err != nil {
		return err
	}
	ctx, session, err := a.start(ctx, "llmbox uninstall")
	if err != nil {
		return err
	}
	defer report.Rescue(session.renderer)
	defer func() { err = errors.Join(err, session.end()) }()
	_, err = installer.UninstallMachine(ctx, installer.MachineRemoval{
		Host: host, Options: machine.RemoveOptions{
			Box: box, KeepData: here.keepData, KeepProgram: here.keepProgram, Others: k3s.OtherKubernetes(look.found),
		},
		Sink: session.sink, Log: session.log, Interrupt: session.interrupt,
	})
	return err
}

// boxOnMachine is the box that the last run here was made with. One whose choices can't
// be read any more has the usual places.
func (a *app) boxOnMachine(ctx context.Context, cmd *cobra.Command, flags *boxFlags, host *machine.Host) (config.Box, error) {
	flagLayer, err := flags.layer(cmd)
	if err != nil {
		return config.Box{}, err
	}
	fileLayer, err := a.fileLayer()
	if err != nil {
		return config.Box{}, err
	}
	var recorded config.Layer
	if choices, err := host.Choices(ctx); err == nil && len(choices) > 0 {
		if recorded, err = config.ParseRecorded("recorded choices", choices); err != nil {
			a.newLogger().Warn("the choices of the last run can't be read; going by the usual places", "error", err)
			recorded = config.Layer{}
		}
	}
	box, _, err := config.Resolve(flagLayer, fileLayer, recorded, config.Defaults())
	return box, err
}

// errNotConfirmed is what a no comes to.
var errNotConfirmed = errors.New("not confirmed, nothing was changed")

// confirm asks on a terminal; without one it names the flag and never waits.
func (a *app) confirm(question string) error {
	if a.yes {
		return nil
	}
	if !a.env.Terminal {
		return usageError{fmt.Errorf("%s There is no terminal to ask on", question), "say --yes"}
	}
	_, _ = fmt.Fprintf(a.env.Stderr, "%s [y/N] ", question)
	line, err := bufio.NewReader(a.env.Stdin).ReadString('\n')
	if answer := strings.ToLower(strings.TrimSpace(line)); err == nil && (answer == "y" || answer == "yes") {
		return nil
	}
	return usageError{errNotConfirmed, "answer y, or say --yes"}
}
