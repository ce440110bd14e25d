package cli

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/report"
)

func (a *app) versionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Long: `version prints the version of llmbox. As JSON it also says from which commit it was
built, and which version of k3s and of each component it carries.`,
		Example: "  llmbox version --json",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			if asJSON || a.output == "json" {
				doc, err := a.versions()
				if err != nil {
					return err
				}
				return a.printJSON(doc)
			}
			_, err := fmt.Fprintf(a.env.Stdout, "llmbox %s %s/%s %s\n", a.env.Version, runtime.GOOS, runtime.GOARCH, runtime.Version())
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "the same as --output json")
	return cmd
}

// versionDoc is what `version --json` prints.
type versionDoc struct {
	Version    string            `json:"version"`
	Commit     string            `json:"commit"`
	Date       string            `json:"date"`
	Go         string            `json:"go"`
	Platform   string            `json:"platform"`
	K3s        string            `json:"k3s"`
	Components map[string]string `json:"components"`
}

func (a *app) versions() (versionDoc, error) {
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		return versionDoc{}, err
	}
	doc := versionDoc{
		Version: a.env.Version, Commit: setting("vcs.revision"), Date: setting("vcs.time"),
		Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
		K3s: table.K3s.Shipped, Components: map[string]string{},
	}
	for _, c := range table.Components {
		if c.Version.Shipped != "" {
			doc.Components[c.Name] = c.Version.Shipped
		}
	}
	return doc, nil
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
