package docs

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/llmbox-dev/llmbox/internal/cli"
)

const root = "../.."

// pages are what people read: README and its like, docs, and the lab's own page.
func pages(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/decisions/*.md", "docs/proofs/*.md", "test/lab/README.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, found...)
	}
	if len(out) < 20 {
		t.Fatalf("pages: %v", out)
	}
	return out
}

// line is something to type, and where it stands.
type line struct {
	page string
	at   int
	text string
}

// blocks are the lines of a page's fenced blocks, those that end in a backslash joined
// with what follows.
func blocks(t *testing.T, page string) []line {
	t.Helper()
	data, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var out []line
	inside, before := false, ""
	for i, text := range strings.Split(string(data), "\n") {
		if strings.HasPrefix(strings.TrimSpace(text), "```") {
			inside = !inside
			continue
		}
		if !inside {
			continue
		}
		text = before + strings.TrimSpace(text)
		if before = ""; strings.HasSuffix(text, `\`) {
			before = strings.TrimSuffix(text, `\`)
			continue
		}
		out = append(out, line{page, i + 1, text})
	}
	if inside {
		t.Errorf("%s: a block has no end", page)
	}
	return out
}

var (
	// What comes after the command: an explanation set off by blanks, a pipe, a comment.
	tail    = regexp.MustCompile(`\s{2,}.*$|\s+#.*$|\s+[|;&<>].*$`)
	typed   = regexp.MustCompile(`^(?:sudo )?(?:bin/)?llmbox(?: |$)`)
	makes   = regexp.MustCompile(`^(?:[A-Z_]+=\S+ )*make ((?:[a-z0-9-]+ ?)+)`)
	quoted  = regexp.MustCompile(`"([^"]*)"|'([^']*)'`)
	targets = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):`)
	span    = regexp.MustCompile("`([^`]+)`")
	link    = regexp.MustCompile(`\]\(([^)\s#]*)(#[^)]*)?\)`)
)

// words splits a command as a shell would, for the quotes that the pages use.
func words(text string) []string {
	text = quoted.ReplaceAllStringFunc(text, func(word string) string {
		return strings.ReplaceAll(strings.Trim(word, `"'`), " ", "\x00")
	})
	fields := strings.Fields(text)
	for i, field := range fields {
		fields[i] = strings.ReplaceAll(field, "\x00", " ")
	}
	return fields
}

// arguments are those of llmbox in a line, nil where the line is none of it. What stands in
// square brackets may be there and is; of A|B, as of a pipe, the first is.
func arguments(text string) []string {
	if !typed.MatchString(text) {
		return nil
	}
	text = strings.NewReplacer("[", "", "]", "", `\|`, "|").Replace(text)
	text = tail.ReplaceAllString(text, "")
	text, _, _ = strings.Cut(text, "|")
	_, text, _ = strings.Cut(text, "llmbox")
	return append([]string{}, words(text)...)
}

// spans are the commands within the text of a page.
func spans(t *testing.T, page string) []line {
	t.Helper()
	data, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var out []line
	for i, text := range strings.Split(string(data), "\n") {
		for _, found := range span.FindAllStringSubmatch(text, -1) {
			out = append(out, line{page, i + 1, found[1]})
		}
	}
	return out
}

// Every command line, in a block or within the text, is one that llmbox takes: the command
// is there, and so is each flag with its kind of value.
func TestCommandsAreTaken(t *testing.T) {
	seen := 0
	for _, page := range pages(t) {
		for _, one := range slices.Concat(blocks(t, page), spans(t, page)) {
			args := arguments(one.text)
			// "llmbox …" and COMMAND stand for any of them.
			if args == nil || strings.Contains(one.text, "…") || slices.Contains(args, "COMMAND") {
				continue
			}
			seen++
			if err := taken(args); err != nil {
				t.Errorf("%s:%d: %q: %v", one.page, one.at, one.text, err)
			}
		}
	}
	if seen < 100 {
		t.Errorf("%d command lines only: are they still found?", seen)
	}
}

// taken says what llmbox would refuse of a command line without looking at any machine.
func taken(args []string) error {
	command := cli.Command("0.0.0-docs")
	command.SetOut(io.Discard)
	command.InitDefaultCompletionCmd()
	found, rest, err := command.Find(args)
	if err != nil {
		return err
	}
	found.InitDefaultHelpFlag()
	if err := found.ParseFlags(placeholders(found.Flags(), found.InheritedFlags(), rest)); err != nil {
		return err
	}
	return found.ValidateArgs(found.Flags().Args())
}

// placeholders puts a number where a page says N and a flag wants one.
func placeholders(own, inherited *pflag.FlagSet, args []string) []string {
	out := slices.Clone(args)
	for i := range out[:max(0, len(out)-1)] {
		name := strings.TrimLeft(out[i], "-")
		flag := own.Lookup(name)
		if flag == nil {
			flag = inherited.Lookup(name)
		}
		if flag != nil && strings.HasPrefix(out[i], "--") && strings.Contains(flag.Value.Type(), "int") && out[i+1] == "N" {
			out[i+1] = "1"
		}
	}
	return out
}

func TestTakenCanRefuse(t *testing.T) {
	for _, args := range [][]string{{"instal"}, {"plan", "--gpuz", "l4"}, {"plan", "--gpus", "many"}, {"version", "extra"}} {
		if taken(args) == nil {
			t.Errorf("%v was taken", args)
		}
	}
}

// run is a command line that asks no machine and changes nothing.
func harmless(args []string) bool {
	if len(args) == 0 || slices.Contains(args, "--report") || slices.Contains(args, "--save") {
		return false
	}
	switch args[0] {
	case "plan", "models", "images":
		// Of a GPU that is named: this machine has another, or none.
		return slices.Contains(args, "--gpu") && !slices.ContainsFunc(args, isPlaceholder)
	case "version", "events-schema", "completion":
		return !slices.ContainsFunc(args, isPlaceholder)
	}
	return false
}

var shouted = regexp.MustCompile(`^[A-Z][A-Z0-9x]+$`)

func isPlaceholder(arg string) bool { return shouted.MatchString(arg) }

// What can be run anywhere is run, as it stands there.
func TestHarmlessCommandsRun(t *testing.T) {
	ran := map[string]bool{}
	for _, page := range pages(t) {
		for _, one := range blocks(t, page) {
			args := arguments(one.text)
			key := strings.Join(args, " ")
			if args == nil || !harmless(args) || ran[key] {
				continue
			}
			ran[key] = true
			t.Run(key, func(t *testing.T) {
				var stdout, stderr bytes.Buffer
				code := cli.Main(args, cli.Env{
					Version: "0.0.0-docs", Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr,
					Getenv: func(string) string { return "" }, Environ: func() []string { return nil },
					Executable: os.Executable,
				})
				if code != 0 || stdout.Len() == 0 {
					t.Errorf("%s:%d: exit %d\n%s%s", one.page, one.at, code, stdout.String(), stderr.String())
				}
			})
		}
	}
	for _, want := range []string{"plan", "models"} {
		found := false
		for key := range ran {
			found = found || strings.HasPrefix(key, want)
		}
		if !found {
			t.Errorf("no page has a %s that can be run", want)
		}
	}
}

// Every `make TARGET` is a target.
func TestMakeTargetsAreThere(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, found := range targets.FindAllStringSubmatch(string(data), -1) {
		known[found[1]] = true
	}
	for _, page := range pages(t) {
		for _, one := range slices.Concat(blocks(t, page), spans(t, page)) {
			found := makes.FindStringSubmatch(tail.ReplaceAllString(one.text, ""))
			if found == nil {
				continue
			}
			for _, target := range strings.Fields(found[1]) {
				if !known[target] {
					t.Errorf("%s:%d: make has no target %s", one.page, one.at, target)
				}
			}
		}
	}
}

// Every page that is linked is there.
func TestLinksLeadSomewhere(t *testing.T) {
	seen := 0
	for _, page := range pages(t) {
		data, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range link.FindAllStringSubmatch(string(data), -1) {
			if found[1] == "" || strings.Contains(found[1], "://") || strings.HasPrefix(found[1], "mailto:") {
				continue
			}
			seen++
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), found[1])); err != nil {
				t.Errorf("%s: %v", page, err)
			}
		}
	}
	if seen < 50 {
		t.Errorf("%d links only: are they still found?", seen)
	}
}
