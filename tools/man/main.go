// Command man writes what a package brings along with the binary: a manual page for each
// command, and the completions of three shells. It runs no command.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/llmbox-dev/llmbox/internal/cli"
)

func main() {
	version := flag.String("version", "", "version in the pages' footer")
	epoch := flag.Int64("time", 0, "date of the pages, in seconds since 1970")
	out := flag.String("out", "", "folder for man/ and completions/")
	flag.Parse()
	if err := write(cli.Command(*version), *version, time.Unix(*epoch, 0).UTC(), *out); err != nil {
		fmt.Fprintf(os.Stderr, "man: %v\n", err)
		os.Exit(1)
	}
}

func write(root *cobra.Command, version string, at time.Time, out string) error {
	pages, completions := filepath.Join(out, "man"), filepath.Join(out, "completions")
	if err := errors.Join(os.MkdirAll(pages, 0o755), os.MkdirAll(completions, 0o755)); err != nil { // #nosec G301 -- read by everybody
		return err
	}
	root.DisableAutoGenTag = true
	root.InitDefaultCompletionCmd()
	header := &doc.GenManHeader{Section: "1", Date: &at, Source: "llmbox " + version, Manual: "llmbox"}
	if err := doc.GenManTree(root, header, pages); err != nil {
		return fmt.Errorf("writing the manual: %w", err)
	}
	for name, generate := range map[string]func(*bytes.Buffer) error{
		"llmbox.bash": func(b *bytes.Buffer) error { return root.GenBashCompletionV2(b, true) },
		"_llmbox":     func(b *bytes.Buffer) error { return root.GenZshCompletion(b) },
		"llmbox.fish": func(b *bytes.Buffer) error { return root.GenFishCompletion(b, true) },
	} {
		var script bytes.Buffer
		if err := generate(&script); err != nil {
			return fmt.Errorf("writing the completion %s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(completions, name), script.Bytes(), 0o644); err != nil { // #nosec G306 -- read by everybody
			return err
		}
	}
	return nil
}
