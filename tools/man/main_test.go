package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/cli"
)

func pagesOf(root *cobra.Command) []*cobra.Command {
	out := []*cobra.Command{root}
	for _, one := range root.Commands() {
		if one.IsAvailableCommand() && !one.IsAdditionalHelpTopicCommand() {
			out = append(out, pagesOf(one)...)
		}
	}
	return out
}

func TestEveryCommandHasAPage(t *testing.T) {
	dir := t.TempDir()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	root := cli.Command("1.2.3")
	if err := write(root, "1.2.3", at, dir); err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{}
	for _, command := range pagesOf(root) {
		name := strings.ReplaceAll(command.CommandPath(), " ", "-") + ".1"
		want[name] = true
		page, err := os.ReadFile(filepath.Join(dir, "man", name))
		if err != nil {
			t.Error(err)
			continue
		}
		for _, part := range []string{".SH NAME", ".SH SYNOPSIS", `"Jan 2026" "llmbox 1.2.3"`} {
			if !strings.Contains(string(page), part) {
				t.Errorf("%s has no %s", name, part)
			}
		}
		// Text that says what is there only on the machine that wrote it.
		if home, err := os.UserHomeDir(); err == nil && home != "/" && strings.Contains(string(page), home) {
			t.Errorf("%s names %s", name, home)
		}
	}
	entries, err := os.ReadDir(filepath.Join(dir, "man"))
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if !want[entry.Name()] {
			t.Errorf("%s is of no command that a person is told of", entry.Name())
		}
	}
	if len(want) < 20 || !want["llmbox-install.1"] || !want["llmbox-keys-create.1"] {
		t.Errorf("pages: %v", want)
	}
	for _, name := range []string{"llmbox.bash", "_llmbox", "llmbox.fish"} {
		if info, err := os.Stat(filepath.Join(dir, "completions", name)); err != nil || info.Size() < 1000 {
			t.Errorf("completion %s: %v", name, err)
		}
	}
}

// Written again at another hour, from another folder, the pages are the same.
func TestSameBytes(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	first, second := t.TempDir(), t.TempDir()
	for _, dir := range []string{first, second} {
		if err := write(cli.Command("1.2.3"), "1.2.3", at, dir); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(filepath.Join(first, "*", "*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		other := filepath.Join(second, strings.TrimPrefix(file, first))
		a, errA := os.ReadFile(file)
		b, errB := os.ReadFile(other)
		if errA != nil || errB != nil || string(a) != string(b) {
			t.Errorf("%s differs from itself, written again", file)
		}
	}
}
