package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/report"
)

func (a *app) installCommand() *cobra.Command {
	var flags boxFlags
	var here machineFlags
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Bring the box in; run it again to go on, to repair or to change",
		Long: `install makes this machine a box: it looks at it first and refuses before anything
is written, brings k3s and every component in, in the order of what needs what, and
is done when a real token came back through the gateway. It finds out by looking
what is done already: run again, it changes nothing that is as wanted and goes on
where it was cut off.

With --kubeconfig (or KUBECONFIG) it installs into a cluster that is there already,
without being root.

Ctrl-C lets the step at work finish and saves; a second one stops at once.`,
		Example: `  sudo llmbox install
  sudo llmbox install --model Qwen/Qwen3-8B --port 8081
  sudo llmbox install --fix --yes --config box.yaml --report run.html
  sudo llmbox install --k3s-binary /opt/k3s       no download of k3s
  sudo llmbox install --bundle box.tar.zst        without any network
  llmbox install --kubeconfig ~/.kube/config      into an existing cluster
  sudo llmbox install --output json | jq -r 'select(.type=="step.done") | .step'`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dryRun {
				return a.runPlan(cmd, &flags)
			}
			if a.onThisMachine() {
				return a.installHere(cmd, &flags, &here)
			}
			return a.runInstall(cmd, &flags, &here)
		},
	}
	flags.register(cmd)
	here.register(cmd, &flags)
	here.bundle.register(cmd)
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "show the plan and change nothing")
	cmd.Flags().StringVar(&a.reportFile, "report", "", "write the timeline of the run to this HTML file")
	return cmd
}

func noArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return usageError{err, helpOf(cmd)}
	}
	return nil
}

// runInstall installs into a cluster that is there already.
func (a *app) runInstall(cmd *cobra.Command, flags *boxFlags, here *machineFlags) (err error) {
	for _, name := range []string{"k3s-binary", "init", "adopt", "fix", "bundle"} {
		if cmd.Flags().Changed(name) {
			return usageError{fmt.Errorf("--%s is about this machine, and a cluster was named", name), "leave out --" + name + ", or --kubeconfig, --context and KUBECONFIG"}
		}
	}
	ctx := cmd.Context()
	s, err := a.settle(ctx, cmd, flags, true, a.newLogger())
	if err != nil {
		return err
	}
	secrets, err := installer.NewSecrets(s.client, s.box)
	if err != nil {
		return err
	}
	ctx, session, err := a.start(ctx, "llmbox install")
	if err != nil {
		return err
	}
	defer report.Rescue(session.renderer)
	defer func() { err = errors.Join(err, session.end()) }()
	engine, err := s.engine(ctx, session.log)
	if err != nil {
		return err
	}
	_, err = installer.Install(ctx, installer.Options{
		Target: installer.Target{
			Plan: s.plan, Client: s.client, Engine: engine, Secrets: secrets, State: s.state, Recorded: s.recorded,
		},
		Version: a.env.Version, Ignore: here.ignore, Sink: session.sink, Log: session.log, Interrupt: session.interrupt,
	})
	return err
}
