package cli

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/report"
)

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: "  llmbox version --output json",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			if a.output == "json" {
				return a.printJSON(map[string]string{
					"version": a.env.Version, "commit": setting("vcs.revision"), "date": setting("vcs.time"),
					"go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH,
				})
			}
			_, err := fmt.Fprintf(a.env.Stdout, "llmbox %s %s/%s %s\n", a.env.Version, runtime.GOOS, runtime.GOARCH, runtime.Version())
			return err
		},
	}
}

func setting(key string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}

func (a *app) eventsSchemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "events-schema",
		Short:   "Print the JSON Schema of the events that --output json streams",
		Example: "  llmbox events-schema > llmbox-events.schema.json",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := a.env.Stdout.Write(report.Schema())
			return err
		},
	}
}

// printJSON writes one document, indented, to stdout.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.env.Stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}
