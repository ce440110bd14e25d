// Package incluster holds the small commands that run inside the box's pods,
// from llmbox's own image: bringing the binary into another container, asking a
// model server for a token, unsealing Vault and filling a volume with weights.
// It must not know a cluster's API, the installer or the configuration.
package incluster

import (
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/weights"
)

// Command returns the hidden command `internal`. Its words are part of the
// charts.
func Command() *cobra.Command {
	c := &cobra.Command{
		Use:    "internal",
		Short:  "Commands that llmbox's own pods run",
		Hidden: true,
		Args:   cobra.NoArgs,
	}
	c.AddCommand(copySelfCommand(), tokenProbeCommand(), unsealCommand(), downloadCommand())
	for _, sub := range c.Commands() {
		sub.SilenceUsage = true
	}
	return c
}

func copySelfCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "copy-self DESTINATION",
		Short: "Copy this binary to another place",
		Args:  cobra.ExactArgs(1),
		RunE:  func(_ *cobra.Command, args []string) error { return CopySelf(args[0]) },
	}
}

func tokenProbeCommand() *cobra.Command {
	var url, model string
	var timeout, every time.Duration
	c := &cobra.Command{
		Use:   "token-probe",
		Short: "Succeed when a model server generates a token",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if every > 0 {
				return AwaitToken(c.Context(), url, model, timeout, every)
			}
			return TokenProbe(c.Context(), url, model, timeout)
		},
	}
	c.Flags().StringVar(&url, "url", "http://127.0.0.1:8000", "base URL of the model server")
	c.Flags().StringVar(&model, "model", "", "name the model is served under")
	// Below the 30 s after which the kubelet gives up without a reason.
	c.Flags().DurationVar(&timeout, "timeout", 25*time.Second, "how long the answer may take, with --every all of them together")
	c.Flags().DurationVar(&every, "every", 0, "ask again after this long until a token comes or the time is over (0: ask once)")
	require(c, "model")
	return c
}

func unsealCommand() *cobra.Command {
	var address, keyFile string
	var interval time.Duration
	c := &cobra.Command{
		Use:   "unseal",
		Short: "Unseal Vault whenever it is sealed",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			// The first process of a container gets no default handling of signals.
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return Unseal(ctx, c.OutOrStdout(), address, keyFile, interval)
		},
	}
	c.Flags().StringVar(&address, "address", "", "base URL of Vault")
	c.Flags().StringVar(&keyFile, "key-file", "", "file with the unseal key; may be absent at first")
	c.Flags().DurationVar(&interval, "interval", 3*time.Second, "how often to look")
	require(c, "address", "key-file")
	return c
}

func downloadCommand() *cobra.Command {
	opts := weights.Options{}
	c := &cobra.Command{
		Use:   "download",
		Short: "Download a model's files into a Hugging Face cache",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			opts.Source, opts.Token = os.Getenv("HF_ENDPOINT"), strings.TrimSpace(os.Getenv("HF_TOKEN"))
			return Download(ctx, c.OutOrStdout(), opts)
		},
	}
	c.Flags().StringVar(&opts.Model, "model", "", "name on the hub, such as Qwen/Qwen3-0.6B")
	c.Flags().StringVar(&opts.Revision, "revision", "", "branch, tag or commit (default main)")
	c.Flags().StringVar(&opts.Dir, "dir", "", "directory that the model server has as HF_HOME")
	require(c, "model", "dir")
	return c
}

func require(c *cobra.Command, flags ...string) {
	for _, name := range flags {
		if err := c.MarkFlagRequired(name); err != nil {
			panic(err) // only for a flag that does not exist
		}
	}
}
