package cli

import (
	"bufio"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/report"
)

func (a *app) uninstallCommand() *cobra.Command {
	var flags boxFlags
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove everything llmbox made in the cluster, and nothing else",
		Long: `uninstall removes the components in reverse order, then the cluster-wide objects
and CRDs that llmbox made and nobody else uses, then its namespaces. It can be
run again from any state.`,
		Example: `  llmbox uninstall --yes
  llmbox uninstall --kubeconfig ~/.kube/config --yes --output json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runUninstall(cmd, &flags) },
	}
	flags.register(cmd)
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
