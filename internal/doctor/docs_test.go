package doctor

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

func TestMain(m *testing.M) {
	flag.Bool("update", false, "write docs/doctor.md")
	flag.Parse()
	os.Exit(m.Run())
}

const doctorDoc = "../../docs/doctor.md"

// TestDocs keeps docs/doctor.md the registry's own words.
func TestDocs(t *testing.T) {
	t.Parallel()
	want := doctorPage(t)
	if flag.Lookup("update").Value.String() == "true" {
		if err := os.WriteFile(doctorDoc, want, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(doctorDoc)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what the registry says; write it with: go test ./internal/doctor -update", doctorDoc)
	}
}

func cell(s string) string {
	if s == "" {
		return "–"
	}
	return strings.ReplaceAll(strings.ReplaceAll(s, "|", `\|`), "\n", " ")
}

func doctorPage(t *testing.T) []byte {
	t.Helper()
	fixtures := map[string]int{}
	total, given := 0, 0
	for _, scenes := range readScenes(t) {
		for _, s := range scenes {
			total++
			if s.Given {
				given++
			}
			fixtures[s.Want.First]++
		}
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, `# Doctor

`+"`llmbox doctor`"+` reads a box once and says why it does not serve: the root cause first, what
follows from it folded under it (`+"`--all`"+` unfolds), and what to type. Everything is read at
the same time, each with a deadline, so that a dead API server, a hung driver or a name
server that swallows questions costs its own deadline and nothing else. The judgement is a
pure function of what was read: `+"`llmbox support-bundle`"+` writes that down, and
`+"`llmbox doctor --snapshot FILE`"+` gives the same findings from it.

- Exit codes: 0 all is well, 3 something failed, 4 warnings only.
- `+"`--fix`"+` offers the repairs named below, each shown before and checked after
  ([repairs.md](repairs.md)). `+"`--ignore ID`"+` makes a note of a check that you accept.
- A cause is never in a higher layer than what it explains. A pod for whose failure nobody
  gives a reason is a root of its own, with its last words.
- The machine's own checks are preflight's ([checks.md](checks.md)); what preflight only
  advises is a note here.

Tested by %d cases under internal/doctor/testdata, %d of them reported by others; the last
column counts those in which the row comes first. This page is written by
`+"`go test ./internal/doctor -update`"+`.

| id | layer | reads | rule | to mend | repair | source | cases |
|---|---|---|---|---|---|---|---|
`, total, given)
	checks := slices.Clone(Checks())
	slices.SortStableFunc(checks, func(a, b Check) int { return int(a.Layer - b.Layer) })
	written := map[string]bool{}
	for _, c := range checks {
		ids := []string{c.ID}
		for _, id := range c.Also {
			if _, own := rowByID(id); !own && !written[id] {
				ids = append(ids, id)
			}
		}
		names := make([]string, 0, len(ids))
		n := 0
		for _, id := range ids {
			written[id] = true
			names = append(names, "`"+id+"`")
			n += fixtures[id]
		}
		fmt.Fprintf(&out, "| %s | %s | %s | %s: %s | %s | %s | %s | %d |\n", strings.Join(names, ", "), c.Layer, cell(c.Reads), cell(c.Title), cell(c.Rule), cell(c.Fix), cell(c.Repair), cell(c.Source), n)
	}
	return out.Bytes()
}
