package snapshot

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Each pair of testdata/redact is a text and what must become of it.
func TestRedactFiles(t *testing.T) {
	inputs, err := filepath.Glob("testdata/redact/*.in")
	if err != nil || len(inputs) == 0 {
		t.Fatalf("no fixtures: %v", err)
	}
	for _, input := range inputs {
		t.Run(filepath.Base(input), func(t *testing.T) {
			before, err := os.ReadFile(input) // #nosec G304 -- a fixture
			if err != nil {
				t.Fatal(err)
			}
			want, err := os.ReadFile(strings.TrimSuffix(input, ".in") + ".out") // #nosec G304 -- a fixture
			if err != nil {
				t.Fatal(err)
			}
			clean := func(text string) (string, error) { return redact(text), nil }
			if strings.HasSuffix(input, ".yaml.in") {
				clean = redactYAML
			}
			got, err := clean(string(before))
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			if strings.Contains(got, "hunter2") {
				t.Error("a secret is left")
			}
			if again, err := clean(got); err != nil || again != got {
				t.Errorf("a second time it becomes\n%s, %v", again, err)
			}
		})
	}
}

func TestRedactYAMLRefuses(t *testing.T) {
	if got, err := redactYAML("token: [hunter2\nx"); err == nil || got != "" || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("%q, %v", got, err)
	}
}
