package preflight

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

func bad(f finding.Finding) bool {
	return f.Severity == finding.Fail || f.Severity == finding.Warn
}

// TestCases judges whole machines: the failures that people reported, each with its
// root, what follows from it and what must stay silent.
func TestCases(t *testing.T) {
	dirs, err := os.ReadDir(casesDir)
	if err != nil {
		t.Fatal(err)
	}
	if len(dirs) < 30 {
		t.Fatalf("only %d cases", len(dirs))
	}
	for _, dir := range dirs {
		t.Run(dir.Name(), func(t *testing.T) {
			t.Parallel()
			facts, want := loadCase(t, dir.Name())
			found := Judge(t.Context(), Checks(), facts)
			byID := map[string]finding.Finding{}
			roots, followers := map[string]string{}, []string{}
			for _, f := range found {
				if _, twice := byID[f.ID]; twice {
					t.Errorf("%s is there twice", f.ID)
				}
				byID[f.ID] = f
				complete(t, f)
				switch {
				case bad(f) && len(f.Causes) == 0:
					roots[f.ID] = string(f.Severity)
				case bad(f):
					followers = append(followers, f.ID)
				}
			}
			for id, severity := range want.Roots {
				if roots[id] != severity {
					t.Errorf("root %s is %q, want %q: %+v", id, roots[id], severity, byID[id])
				}
			}
			for id := range roots {
				if _, expected := want.Roots[id]; !expected {
					t.Errorf("root %s is not wanted: %+v", id, byID[id])
				}
			}
			for _, id := range want.Followers {
				if !slices.Contains(followers, id) {
					t.Errorf("%s does not follow: %+v", id, byID[id])
				}
			}
			for _, id := range followers {
				if !slices.Contains(want.Followers, id) {
					t.Errorf("follower %s is not wanted: %+v", id, byID[id])
				}
			}
			for _, id := range want.Silent {
				if f, ok := byID[id]; !ok && !slices.Contains(checkIDs(), id) || bad(f) {
					t.Errorf("%s must be silent: %+v", id, f)
				}
			}
			for id, words := range want.Measured {
				for _, word := range words {
					if !strings.Contains(byID[id].Measured, word) {
						t.Errorf("%s measured %q, want %q in it", id, byID[id].Measured, word)
					}
				}
			}
			for id, words := range want.Fix {
				for _, word := range words {
					if !strings.Contains(byID[id].Fix, word) {
						t.Errorf("%s is mended by %q, want %q in it", id, byID[id].Fix, word)
					}
				}
			}
			for id, state := range want.State {
				if string(byID[id].State) != state {
					t.Errorf("%s is in state %q, want %q", id, byID[id].State, state)
				}
			}
			for _, id := range want.Unreadable {
				if byID[id].State != finding.Unreadable {
					t.Errorf("%s is in state %q, want unreadable: %+v", id, byID[id].State, byID[id])
				}
			}
			for _, id := range want.Strict {
				if !byID[id].Strict {
					t.Errorf("%s is not strict", id)
				}
			}
		})
	}
}

// complete asserts that a finding says what a person needs.
func complete(t *testing.T, f finding.Finding) {
	t.Helper()
	if f.Title == "" || f.Measured == "" || f.Required == "" || f.Source == "" {
		t.Errorf("%s lacks title, measured, required or source: %+v", f.ID, f)
	}
	if bad(f) && (f.Fix == "" || len(f.Evidence) == 0) {
		t.Errorf("%s lacks the fix or its evidence: %+v", f.ID, f)
	}
	typeable(t, f)
}

func checkIDs() []string {
	var ids []string
	for _, c := range Checks() {
		ids = append(ids, c.ID)
		ids = append(ids, c.Also...)
	}
	return ids
}
