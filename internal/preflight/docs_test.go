package preflight

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

func TestMain(m *testing.M) {
	flag.Bool("update", false, "write docs/checks.md")
	flag.Parse()
	os.Exit(m.Run())
}

const checksDoc = "../../docs/checks.md"

// TestDocs keeps docs/checks.md the registry's own words.
func TestDocs(t *testing.T) {
	want := checksPage(t)
	if flag.Lookup("update").Value.String() == "true" {
		if err := os.WriteFile(checksDoc, want, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(checksDoc)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what the registry says; write it with: go test ./internal/preflight -update", checksDoc)
	}
}

func checksPage(t *testing.T) []byte {
	t.Helper()
	worst := map[string]string{}
	for _, r := range readMatrix(t) {
		for _, m := range r.Fail {
			id, severity := m.ID, m.Severity
			if id == "" {
				id = r.Check
			}
			if severity == "" {
				severity = "fail"
			}
			if m.State == "wait" {
				severity = "wait"
			}
			if !strings.Contains(worst[id], severity) {
				worst[id] = strings.TrimPrefix(worst[id]+", "+severity, ", ")
			}
		}
	}
	var out bytes.Buffer
	out.WriteString(`# Checks

What ` + "`llmbox preflight`" + ` looks at on a machine, in this order. Each check is a pure
function over a snapshot of facts; a fact that can't be read is said so and is never
called a failure. The table is written by ` + "`go test ./internal/preflight -update`" + `.

- **fail** stops an install; ` + "`--ignore ID`" + ` goes on all the same, except where it says *strict*.
- **warn** is said and stops nothing. **wait** passes by itself. **info** is worth knowing.
- A finding that another one explains is folded under it: the fifth column names what can.
  A failure is explained by failures only, never by a warning.
- Who can't run llmbox on the machine may send what it prints instead: a directory with
  files of the machine under host/ at their own paths, and commands/NAME.txt, the first
  line exit=N, for dmesg, ss (ss -lntup), nvidia-smi and the others.

The figures behind *needed* stand with their sources in
[internal/preflight/thresholds.go](../internal/preflight/thresholds.go).

| id | looks at | needed | can be | explained by | source |
|---|---|---|---|---|---|
`)
	for _, c := range Checks() {
		ids := c.Also
		if len(ids) == 0 {
			ids = []string{c.ID}
		}
		for _, id := range ids {
			severity := worst[id]
			if c.Strict {
				severity += ", strict"
			}
			causes := c.Causes
			if n := 0; strings.HasPrefix(id, "gpu.xid.") {
				if _, err := fmt.Sscanf(id, "gpu.xid.%d", &n); err != nil {
					t.Fatal(err)
				}
				causes = xidCauses(n)
			}
			fmt.Fprintf(&out, "| `%s` | %s | %s | %s | %s | %s |\n", id, cell(c.Title), cell(c.Required), severity, codes(causes), cell(c.Source))
		}
	}
	out.WriteString("\nOn an existing cluster (`--kubeconfig`) the cluster's own checks take their place:\n\n| id | looks at | needed | can be | source |\n|---|---|---|---|---|\n")
	for _, c := range clusterRows() {
		severity := string(c.worst)
		if c.strict {
			severity += ", strict"
		}
		fmt.Fprintf(&out, "| `%s` | %s | %s | %s | %s |\n", c.id, cell(c.title), cell(c.required), severity, cell(c.source))
	}
	return out.Bytes()
}

func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

func codes(ids []string) string {
	ids = slices.Compact(slices.Sorted(slices.Values(ids)))
	if len(ids) > 4 {
		return fmt.Sprintf("`%s` and %d more", strings.Join(ids[:3], "`, `"), len(ids)-3)
	}
	if len(ids) == 0 {
		return ""
	}
	return "`" + strings.Join(ids, "`, `") + "`"
}

// The docs name a severity only where a case of the matrix has it.
func TestSeveritiesAreKnown(t *testing.T) {
	for _, r := range readMatrix(t) {
		for _, m := range r.Fail {
			if m.Severity != "" && !slices.Contains([]finding.Severity{finding.Info, finding.Warn, finding.Fail}, finding.Severity(m.Severity)) {
				t.Errorf("%s: %q is no severity", r.Check, m.Severity)
			}
		}
	}
}
