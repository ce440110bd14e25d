package cli

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/installer"
)

// statusDoc is the document of status --output json.
type statusDoc struct {
	Components []installer.ComponentStatus `json:"components"`
	Endpoint   *string                     `json:"endpoint"`
	Model      string                      `json:"model,omitempty"`
	GPUs       []installer.NodeGPUs        `json:"gpus"`
	LastRun    string                      `json:"last_run,omitempty"`
}

func (a *app) statusCommand() *cobra.Command {
	var flags boxFlags
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show every component as the cluster has it now",
		Long: `status asks every component's readiness gate once and shows what is missing. It
exits 0 when everything is ready and 5 when something is not.`,
		Example: `  llmbox status
  llmbox status --output json | jq '.components[] | select(.ready|not)'`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runStatus(cmd, &flags) },
	}
	flags.register(cmd)
	return cmd
}

func (a *app) runStatus(cmd *cobra.Command, flags *boxFlags) error {
	ctx := cmd.Context()
	log := a.newLogger()
	s, err := a.settle(ctx, cmd, flags, true, log)
	if err != nil {
		return err
	}
	run, err := s.lookingRun(ctx, log)
	if err != nil {
		return err
	}
	doc := statusDoc{Components: run.Status(ctx), Model: s.plan.Model.Name, LastRun: s.last.Outcome}
	if doc.GPUs, err = installer.GPUs(ctx, s.client); err != nil {
		return err
	}
	if url := run.Summary("").Endpoint; url != "" {
		doc.Endpoint = &url
	}
	missing := 0
	for _, c := range doc.Components {
		if !c.Ready {
			missing++
		}
	}
	if a.output == "json" {
		err = a.printJSON(doc)
	} else {
		err = a.printStatus(doc)
	}
	if err == nil && missing > 0 {
		a.printShortDiagnosis(ctx, cmd)
		err = fmt.Errorf("%d of %d components: %w", missing, len(doc.Components), installer.ErrNotReady)
	}
	return err
}

// lookingRun is a run that only looks, and says nothing.
func (s *settled) lookingRun(ctx context.Context, log *slog.Logger) (*installer.Run, error) {
	engine, err := s.engine(ctx, log)
	if err != nil {
		return nil, err
	}
	secrets, err := installer.NewSecrets(s.client, s.box)
	if err != nil {
		return nil, err
	}
	return installer.NewRun(s.plan, s.client, engine, secrets, s.state, event.SinkFunc(func(event.Event) {}), log), nil
}

func (a *app) printStatus(doc statusDoc) error {
	w := tabwriter.NewWriter(a.env.Stdout, 0, 4, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "COMPONENT\tVERSION\tREVISION\tREADY\tREASON")
	for _, c := range doc.Components {
		ready := "no"
		if c.Ready {
			ready = "yes"
		}
		reason := c.Reason
		if c.Chart != "" && c.Chart != installer.EmbeddedChart {
			reason = strings.TrimSpace("chart " + c.Chart + " " + reason)
		}
		if len(c.SimulatedBy) > 0 {
			reason = strings.TrimSpace(reason + " simulated by " + strings.Join(c.SimulatedBy, ", "))
		}
		revision := "–"
		if c.Revision > 0 {
			revision = fmt.Sprint(c.Revision)
		}
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", c.Name, dash(c.Version), revision, ready, reason)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, g := range doc.GPUs {
		_, _ = fmt.Fprintf(a.env.Stdout, "\nGPU       %s: %d × %s\n", g.Node, g.Allocatable, dash(g.Product))
	}
	if doc.Endpoint != nil {
		_, _ = fmt.Fprintf(a.env.Stdout, "Model     %s\nEndpoint  %s\n", doc.Model, *doc.Endpoint)
		_, _ = fmt.Fprintln(a.env.Stdout, "Key       kubectl -n llm get secret gateway-keys -o jsonpath='{.data.default}' | base64 -d")
	}
	return nil
}
