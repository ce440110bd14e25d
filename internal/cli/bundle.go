package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/doctor"
	"github.com/llmbox-dev/llmbox/internal/doctor/page"
	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// bundleDoc is the document of support-bundle --output json.
type bundleDoc struct {
	File     string            `json:"file"`
	Bytes    int64             `json:"bytes"`
	Findings []finding.Finding `json:"findings"`
}

func (a *app) supportBundleCommand() *cobra.Command {
	var flags doctorFlags
	var file string
	var anonymize bool
	cmd := &cobra.Command{
		Use:   "support-bundle",
		Short: "Write what doctor reads into one file, to be looked at elsewhere",
		Long: `support-bundle reads a box as doctor does and writes a .tar.gz with everything that was
read and a page, index.html, that shows it: findings, versions, events, GPUs. Tokens,
keys, passwords, the contents of Secrets and what the model was asked are left out;
with --anonymize also names of machines and people, and addresses, each replaced by
the same word everywhere. Look into it before you hand it on: it is yours.

llmbox doctor --snapshot FILE gives the same findings from it.`,
		Example: `  sudo llmbox support-bundle
  sudo llmbox support-bundle --file /tmp/box.tar.gz --anonymize
  llmbox support-bundle --snapshot old.tar.gz --anonymize --file new.tar.gz`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runSupportBundle(cmd, flags, file, anonymize) },
	}
	flags.register(cmd)
	cmd.Flags().StringVar(&file, "file", "", "where to write it (default llmbox-support-TIME.tar.gz here)")
	cmd.Flags().StringVar(&flags.snapshot, "snapshot", "", "take this snapshot instead of the box")
	cmd.Flags().BoolVar(&anonymize, "anonymize", false, "replace names of machines and people, and addresses")
	return cmd
}

func (a *app) runSupportBundle(cmd *cobra.Command, flags doctorFlags, file string, anonymize bool) error {
	ctx := cmd.Context()
	facts, err := a.boxFacts(ctx, cmd, flags)
	if err != nil {
		return err
	}
	if anonymize {
		if facts, err = facts.Anonymous(); err != nil {
			return fmt.Errorf("replacing names: %w", err)
		}
	}
	found := doctor.JudgeWith(ctx, facts, doctor.Options{Accepted: flags.ignore})
	if file == "" {
		file = "llmbox-support-" + facts.Manifest.Time.UTC().Format("20060102-150405") + ".tar.gz"
	}
	if !strings.HasSuffix(file, ".tar.gz") && !strings.HasSuffix(file, ".tgz") {
		return usageError{fmt.Errorf("--file is %q: it must end in .tar.gz", file), "--file " + file + ".tar.gz"}
	}
	if err := writeBundle(file, facts, found); err != nil {
		return usageError{err, "name a place that can be written with --file"}
	}
	info, err := os.Stat(file)
	if err != nil {
		return fmt.Errorf("looking at the bundle: %w", err)
	}
	if a.output == "json" {
		return a.printJSON(bundleDoc{File: file, Bytes: info.Size(), Findings: found})
	}
	_, err = fmt.Fprintf(a.env.Stdout, "%s (%.1f MiB), readable only by you.\nLook at it: tar -xzf %s index.html, then open that in a browser. Its findings again: llmbox doctor --snapshot %s\n",
		file, float64(info.Size())/(1<<20), file, file)
	return err
}

func writeBundle(file string, facts *snapshot.Snapshot, found []finding.Finding) error {
	index, err := page.Render(facts, found)
	if err != nil {
		return err
	}
	list, err := json.MarshalIndent(findingsDoc{Findings: found}, "", "  ")
	if err != nil {
		return errors.Join(errors.New("writing the findings"), err)
	}
	return facts.SaveBundle(file, []snapshot.Extra{{Name: "index.html", Data: index}, {Name: "findings.json", Data: append(list, '\n')}})
}
