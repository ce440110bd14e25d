package cli

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/report"
)

func (a *app) installCommand() *cobra.Command {
	var flags boxFlags
	var dryRun, fix bool
	var ignore []string
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Bring the box in; run it again to go on, to repair or to change",
		Long: `install brings every component into the cluster, in the order of what needs
what, and is done when a real token came back through the gateway. It finds out
by looking what is done already: run again, it changes nothing that is as wanted
and goes on where it was cut off.

Ctrl-C lets the step at work finish and saves; a second one stops at once.`,
		Example: `  llmbox install --kubeconfig ~/.kube/config
  llmbox install --model Qwen/Qwen3-8B --port 8081
  llmbox install --config box.yaml --report run.html
  llmbox install --output json | jq -r 'select(.type=="step.done") | .step'`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dryRun {
				return a.runPlan(cmd, &flags)
			}
			return a.runInstall(cmd, &flags, ignore, fix)
		},
	}
	flags.register(cmd)
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "show the plan and change nothing")
	cmd.Flags().BoolVar(&fix, "fix", false, "mend of this machine what can be mended safely, as preflight --fix does")
	cmd.Flags().StringSliceVar(&ignore, "ignore", nil, "ids of checks that may fail")
	cmd.Flags().StringVar(&a.reportFile, "report", "", "write the timeline of the run to this HTML file")
	return cmd
}

func noArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return usageError{err, helpOf(cmd)}
	}
	return nil
}

func (a *app) runInstall(cmd *cobra.Command, flags *boxFlags, ignore []string, fix bool) (err error) {
	ctx := cmd.Context()
	s, err := a.settle(ctx, cmd, flags, true, a.newLogger())
	if errors.Is(err, cluster.ErrNoKubeconfig) && a.kubeconfig == "" {
		return a.machineFirst(cmd, flags, ignore, fix, err)
	}
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
		Plan: s.plan, Client: s.client, Engine: engine, Secrets: secrets, State: s.state, Recorded: s.recorded,
		Version: a.env.Version, Ignore: ignore, Sink: session.sink, Log: session.log, Interrupt: session.interrupt,
	})
	return err
}

// machineFirst is the end of an install where no cluster was named or found: beside
// what to name it says whether this machine would serve.
func (a *app) machineFirst(cmd *cobra.Command, flags *boxFlags, ignore []string, fix bool, noCluster error) error {
	look, err := a.lookAtHost(cmd.Context(), cmd, flags, preflightFlags{gpuTimeout: gpu.HangAfter, fix: fix})
	if err != nil {
		return err
	}
	// This version needs a cluster; what it says of the machine is a help, not the answer.
	if a.output != "json" {
		if err := a.printFindings(look.found, false); err != nil {
			return err
		}
	}
	return errors.Join(noCluster, verdict(look.found, ignore, false))
}
