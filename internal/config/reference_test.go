package config

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"
)

//go:generate go test -run TestReference -update .

const referenceFile = "../../docs/config.md"

// fieldComments reads the comment of each field of each type out of box.go: the
// reference and the code then can't say different things.
func fieldComments(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "box.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	comments := map[string]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if fields, ok := spec.Type.(*ast.StructType); ok {
			for _, f := range fields.Fields.List {
				for _, name := range f.Names {
					comments[spec.Name.Name+"."+name.Name] = strings.Join(strings.Fields(f.Doc.Text()), " ")
				}
			}
		}
		return true
	})
	return comments
}

func TestReference(t *testing.T) {
	comments := fieldComments(t)
	var b strings.Builder
	b.WriteString(`# Configuration

This page is written from the types in ` + "`internal/config/box.go`" + ` by
` + "`go generate ./internal/config`" + `; a test keeps the two equal.

llmbox needs no configuration: every key has a default or is worked out from the
machine. A value is taken from the first of these that has it:

1. a flag,
2. an environment variable ` + "`LLMBOX_…`" + `,
3. the file: ` + "`" + DefaultPath + "`, or `--config FILE`, or `--config -`" + ` for standard input,
4. what the last run recorded (so that a plain second run changes nothing),
5. what llmbox works out, and the defaults below.

` + "`llmbox plan`" + ` shows each value with its source. Lists and chart values are taken
whole from one source, never merged.

The file is read strictly. An unknown or doubled key, a wrong type, a tab, a second
document is an error that names the line and the way out; an empty file is one too.
It starts with two lines:

` + "```yaml\napiVersion: " + APIVersion + "\nkind: " + Kind + "\nmodel:\n  name: Qwen/Qwen3-8B\ngateway:\n  port: 8080\n```" + `

**Secrets** never stand in it: what looks like a token is refused. Name the file
that holds it (` + "`secrets.hfTokenFile`" + `), or put the token into ` + "`LLMBOX_HF_TOKEN`" + `.

**Fixed** keys are settled by the first install; a later run that asks for another
value stops with exit code 2 before it touches anything. **Kept** keys are recorded
with their default too, so that a later llmbox with another default leaves a running
box as it is; every other key is recorded once somebody set it, except those marked
**one run**.

In variables a list is written ` + "`a,b`" + ` or ` + "`[\"a\", \"b\"]`" + `, and an empty variable counts
as not set. For a component's name, dashes become underscores:
` + "`LLMBOX_COMPONENTS_EXTERNAL_SECRETS_MODE=off`" + `.

| key | type | default | variable | meaning |
|---|---|---|---|---|
`)
	for _, f := range Fields() {
		comment := comments[f.owner+"."+f.goName]
		if comment == "" {
			t.Errorf("%s.%s (%s) has no comment in box.go", f.owner, f.goName, f.Path)
		}
		var words []string
		if f.Immutable {
			words = append(words, "**Fixed.**")
		} else if f.Recorded {
			words = append(words, "**Kept.**")
		}
		if f.OneRun && f.Path != "apiVersion" && f.Path != "kind" {
			words = append(words, "**One run.**")
		}
		var names []string
		for _, name := range append(f.Aliases, f.Env) {
			if name != "" {
				names = append(names, "`"+name+"`")
			}
		}
		fallback := ""
		if f.Default != "" {
			fallback = "`" + f.Default + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", f.Path, f.Type, fallback, strings.Join(names, ", "),
			strings.ReplaceAll(strings.Join(append([]string{comment}, words...), " "), "|", "\\|"))
	}
	b.WriteString("\nVariables with the prefix that are no configuration, and so are left alone here:\n")
	for i, name := range ForeignEnv() {
		if i > 0 {
			b.WriteString(",\n")
		}
		b.WriteString("`" + name + "`")
	}
	b.WriteString(". Any other `LLMBOX_…` is an error that names the nearest known one.\n")
	golden(t, referenceFile, b.String())
}
