package report

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// How the page looks and behaves is tried in a real browser (test/browser);
// here is what needs none.
func TestHTMLStandsAlone(t *testing.T) {
	for _, name := range []string{"run", "failed", "hostile"} {
		var out bytes.Buffer
		if err := account(t, name).WriteHTML(&out, Meta{Title: "llmbox install", Version: "v0.1.0"}); err != nil {
			t.Fatal(err)
		}
		page := out.String()
		for _, bad := range []*regexp.Regexp{
			regexp.MustCompile(`(?i)<script`),
			regexp.MustCompile(`(?i)<img`),
			regexp.MustCompile(`(?i)<link[^>]*href="(?:[^d]|d[^a])`),
			regexp.MustCompile(`(?i)href="[^#d]`),
			regexp.MustCompile(`(?i)@import|url\(`),
			regexp.MustCompile(`ZgotmplZ`),
		} {
			if name == "hostile" && strings.Contains(bad.String(), "url") {
				continue // as text it may be there
			}
			if at := bad.FindStringIndex(page); at != nil {
				t.Errorf("%s: %s: …%s…", name, bad, page[max(at[0]-40, 0):min(at[1]+60, len(page))])
			}
		}
	}
}

func TestHTMLSaysEverything(t *testing.T) {
	var out bytes.Buffer
	if err := account(t, "failed").WriteHTML(&out, Meta{Title: "llmbox install", Version: "v0.1.0"}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"llmbox install: <span class=\"outcome failed\">failed after 42.0s</span>",
		"429 Too Many Requests: context deadline exceeded",
		"llmbox install --registry-mirror docker.io=https://mirror.example.com",
		"APIService v1beta1.external.metrics.k8s.io: MissingEndpoints",
		"Memory left beside the model", "1.6 GiB", "2.0 GiB",
		"simulated by gateway-actor",
		"7 of 9 gates were answered by rehearsal actors (simulated), 2 by real parts.",
		"machine 1.1s → base 0.8s → vault 40.0s",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q isn't on the page", want)
		}
	}
}

func TestReportAppearsWholeOrNotAtAll(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "report.html")
	if err := WriteReport(path, account(t, "run"), Meta{}); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(path)
	if err != nil || !bytes.HasSuffix(bytes.TrimSpace(page), []byte("</html>")) {
		t.Errorf("the page has no end: %v", err)
	}
	if err := WriteReport(filepath.Join(dir, "absent", "report.html"), account(t, "run"), Meta{}); err == nil {
		t.Error("a directory that isn't there was no error")
	}
	if err := os.Mkdir(filepath.Join(dir, "taken"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := WriteReport(filepath.Join(dir, "taken"), account(t, "run"), Meta{}); err == nil {
		t.Error("writing over a directory was no error")
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 2 {
		t.Errorf("something was left behind: %v", entries)
	}
}

func TestHTMLOfNothing(t *testing.T) {
	var out bytes.Buffer
	if err := NewTimeline().WriteHTML(&out, Meta{}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "not finished") {
		t.Error("the page of an empty stream doesn't say so")
	}
}

func TestTicksAreRoundAndFew(t *testing.T) {
	for _, total := range []time.Duration{
		300 * time.Millisecond, time.Second, 42 * time.Second, time.Minute, 7 * time.Minute, time.Hour, 30 * time.Hour, 300 * time.Hour,
	} {
		got := ticks(total)
		if len(got) < 2 || len(got) > 14 {
			t.Errorf("%s has %d ticks", total, len(got))
		}
	}
	if ticks(0) != nil {
		t.Error("a run that took no time has ticks")
	}
}
