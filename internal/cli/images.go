package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// imageRow is one image of the box.
type imageRow struct {
	Reference  string   `json:"reference"`
	Digest     string   `json:"digest,omitempty"`
	SizeBytes  int64    `json:"size_bytes,omitempty"`
	Components []string `json:"components"`
	Source     string   `json:"source"`
}

func (a *app) imagesCommand() *cobra.Command {
	var flags boxFlags
	cmd := &cobra.Command{
		Use:   "images",
		Short: "List every container image of the box",
		Long: `images lists every container image that the box runs, operands of the operators
included, with digest and size where they are known.`,
		Example: `  llmbox images
  llmbox images --output json | jq -r '.images[].reference'`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := a.settle(cmd.Context(), cmd, &flags, false, a.newLogger())
			if err != nil {
				return err
			}
			return a.printImages(imageRows(s))
		},
	}
	flags.register(cmd)
	return cmd
}

func imageRows(s *settled) []imageRow {
	byRef := map[string]*imageRow{}
	for _, step := range s.plan.Steps {
		for _, img := range step.Images {
			row, ok := byRef[img.Reference]
			if !ok {
				row = &imageRow{Reference: img.Reference, Digest: img.Digest, SizeBytes: img.SizeBytes, Source: img.Source}
				byRef[img.Reference] = row
			}
			if !slices.Contains(row.Components, step.Name) {
				row.Components = append(row.Components, step.Name)
			}
		}
	}
	rows := make([]imageRow, 0, len(byRef))
	for _, row := range byRef {
		rows = append(rows, *row)
	}
	slices.SortFunc(rows, func(a, b imageRow) int { return cmp.Compare(a.Reference, b.Reference) })
	return rows
}

func (a *app) printImages(rows []imageRow) error {
	if a.output == "json" {
		return a.printJSON(map[string]any{"images": rows})
	}
	w := tabwriter.NewWriter(a.env.Stdout, 0, 4, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "IMAGE\tSIZE\tDIGEST\tUSED BY")
	for _, r := range rows {
		digest := r.Digest
		if len(digest) > 19 {
			digest = digest[:19] + "…"
		}
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", r.Reference, mebi(r.SizeBytes), dash(digest), strings.Join(r.Components, ", "))
	}
	return w.Flush()
}
