package text_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/preflight"
	"github.com/llmbox-dev/llmbox/internal/preflight/text"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func update(t *testing.T) bool {
	t.Helper()
	f := flag.Lookup("update")
	return f != nil && f.Value.String() == "true"
}

func TestMain(m *testing.M) {
	flag.Bool("update", false, "write the golden files")
	flag.Parse()
	os.Exit(m.Run())
}

// machines are whole snapshots whose text is kept beside this test.
func machines() []string {
	return []string{"ok-a10-ubuntu-2404", "bare-vm-no-driver", "container", "wsl", "g04-secure-boot-standalone"}
}

var escapes = regexp.MustCompile(`\x1b\[[0-9;]*m`)

func judged(t *testing.T, name string) []finding.Finding {
	t.Helper()
	s, err := snapshot.Load(filepath.Join("..", "testdata", "cases", name))
	if err != nil {
		t.Fatal(err)
	}
	return preflight.Judge(t.Context(), preflight.Checks(), preflight.Facts{Snapshot: s, Need: preflight.Need{CUDA: "12.9", K3sVersion: "v1.36.4+k3s1"}})
}

func TestGolden(t *testing.T) {
	for _, name := range machines() {
		t.Run(name, func(t *testing.T) {
			found := judged(t, name)
			var out bytes.Buffer
			if err := text.Text(&out, found, 100, false, false); err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", name+".golden.txt")
			if update(t) {
				if err := os.WriteFile(golden, out.Bytes(), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(want, out.Bytes()) {
				t.Errorf("%s differs (go test -update writes it):\n%s", golden, out.String())
			}
			var colored bytes.Buffer
			if err := text.Text(&colored, found, 100, true, false); err != nil {
				t.Fatal(err)
			}
			if plain := escapes.ReplaceAllString(colored.String(), ""); plain != out.String() {
				t.Errorf("with colour the text itself is another:\n%s", plain)
			}
		})
	}
}

// Every failing case of the checks fits its terminal and says what to do.
func TestFits(t *testing.T) {
	found := []finding.Finding{}
	for _, name := range machines() {
		found = append(found, judged(t, name)...)
	}
	long := finding.Finding{
		ID: "a.long.one", Severity: finding.Fail, State: finding.Judged, Strict: true, Title: strings.Repeat("word ", 30),
		Measured: strings.Repeat("x", 300), Required: "r", Fix: strings.Repeat("sudo thing --with-option && ", 20) + "true",
	}
	for _, width := range []int{40, 80, 100, 200} {
		for _, all := range []bool{false, true} {
			var out bytes.Buffer
			if err := text.Text(&out, append(found, long), width, false, all); err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(out.String()) {
				line = strings.TrimSuffix(line, "\n")
				if n := utf8.RuneCountInString(line); n > width && strings.ContainsRune(strings.TrimSpace(line), ' ') && !longWord(line, width) {
					t.Errorf("width %d, line of %d: %q", width, n, line)
				}
				if line != strings.TrimRight(line, " ") {
					t.Errorf("blanks at the end of %q", line)
				}
			}
		}
	}
}

// longWord says whether one word alone is what makes the line too wide.
func longWord(line string, width int) bool {
	for _, w := range strings.Fields(line) {
		if utf8.RuneCountInString(w) > width-19 {
			return true
		}
	}
	return false
}

func TestFollowersAreFolded(t *testing.T) {
	found := preflight.Arrange([]finding.Finding{
		{ID: "root", Severity: finding.Fail, State: finding.Judged, Title: "Root", Measured: "m", Required: "r", Fix: "f"},
		{ID: "middle", Severity: finding.Fail, State: finding.Judged, Title: "Middle", Measured: "m", Required: "r", Fix: "never shown", Causes: []string{"root"}},
		{ID: "leaf", Severity: finding.Warn, State: finding.Judged, Title: "Leaf", Measured: "m", Required: "r", Fix: "never shown", Causes: []string{"middle"}},
	})
	var out bytes.Buffer
	if err := text.Text(&out, found, 100, false, false); err != nil {
		t.Fatal(err)
	}
	if s := out.String(); !strings.Contains(s, "follows   Middle, Leaf\n") || strings.Contains(s, "never shown") {
		t.Errorf("followers are not folded under their root:\n%s", s)
	}
}

type broken struct{}

var errBroken = errors.New("pipe")

func (broken) Write([]byte) (int, error) { return 0, errBroken }

func TestWriteErrorComesBack(t *testing.T) {
	if err := text.Text(broken{}, judged(t, "container"), 100, false, true); !errors.Is(err, errBroken) {
		t.Errorf("got %v", err)
	}
}

// A circle among causes, which a hand-made document may hold, does not hang.
func TestCircle(t *testing.T) {
	var found []finding.Finding
	if err := json.Unmarshal([]byte(`[{"id":"a","severity":"fail","causes":["b"]},{"id":"b","severity":"fail","causes":["a"]}]`), &found); err != nil {
		t.Fatal(err)
	}
	if err := text.Text(&bytes.Buffer{}, found, 100, false, false); err != nil {
		t.Fatal(err)
	}
}
