// Package browser looks at the HTML account of a run the way a person does: in
// a real browser, wide and narrow, dark and light, and on paper.
package browser

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/llmbox-dev/llmbox/test/browser/chromium"
)

func TestReportInABrowser(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	browser, err := chromium.Start(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer browser.Close()
	for _, run := range []string{"run", "failed", "hostile"} {
		page := report(ctx, t, run)
		for name, size := range map[string]chromium.Size{
			"1280":      {Width: 1280, Height: 900},
			"1280-dark": {Width: 1280, Height: 900, Dark: true},
			"390":       {Width: 390, Height: 844, Mobile: true},
			"390-dark":  {Width: 390, Height: 844, Mobile: true, Dark: true},
			"print":     {Width: 794, Height: 1123, Print: true},
		} {
			t.Run(run+"/"+name, func(t *testing.T) {
				var scripts, small, outside, rows int64
				var pwned bool
				visit, err := browser.Open(page, size,
					value(`document.scripts.length + document.images.length`, &scripts),
					value(`"pwned" in window`, &pwned),
					value(`document.querySelectorAll(".chart .row").length`, &rows),
					// Text that is there but too small to read.
					value(`[...document.querySelectorAll("main *")].filter(e => e.innerText && parseFloat(getComputedStyle(e).fontSize) < `+smallest(size)+`).length`, &small),
					// Whatever sticks out to the right, clipped or not.
					value(`[...document.querySelectorAll("main *")].filter(e => !e.closest(".name") && e.getBoundingClientRect().right > innerWidth + 0.5).length`, &outside),
				)
				if err != nil {
					t.Fatal(err)
				}
				keep(t, run+"-"+name, visit.PNG)
				for _, line := range visit.Console {
					t.Errorf("on the console: %s", line)
				}
				for _, url := range visit.Requests {
					t.Errorf("request: %s", url)
				}
				if visit.ScrollWidth > visit.ClientWidth {
					t.Errorf("scrolls sideways: %d wide in a window of %d", visit.ScrollWidth, visit.ClientWidth)
				}
				if scripts != 0 || pwned {
					t.Errorf("%d scripts or images, foreign code ran: %v", scripts, pwned)
				}
				if rows == 0 {
					t.Error("no timeline")
				}
				if small > 0 {
					t.Errorf("%d elements are too small to read", small)
				}
				if outside > 0 {
					t.Errorf("%d elements stick out", outside)
				}
			})
		}
	}
}

// smallest is the least font size in CSS pixels; paper is held closer.
func smallest(size chromium.Size) string {
	if size.Print {
		return "8"
	}
	return "11.5"
}

// The checks above prove nothing unless they can fail.
func TestVisitSeesWhatIsWrong(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	browser, err := chromium.Start(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer browser.Close()
	page := filepath.Join(t.TempDir(), "bad.html")
	const bad = `<!doctype html><link rel=icon href="data:,"><img src="http://127.0.0.1:9/x.png"><p style="width:3000px">wide</p><script>console.error("bad"); throw new Error("worse")</script>`
	if err := os.WriteFile(page, []byte(bad), 0o600); err != nil {
		t.Fatal(err)
	}
	visit, err := browser.Open(page, chromium.Size{Width: 390, Height: 844})
	if err != nil {
		t.Fatal(err)
	}
	if len(visit.Console) < 2 || len(visit.Requests) != 1 || visit.ScrollWidth <= visit.ClientWidth {
		t.Errorf("not seen: console %q, requests %q, %d wide in %d", visit.Console, visit.Requests, visit.ScrollWidth, visit.ClientWidth)
	}
}

func value[T any](script string, to *T) func(context.Context) error {
	return func(ctx context.Context) error { return chromedp.Evaluate(script, to).Do(ctx) }
}

// report has the product write its page from a recorded run.
func report(ctx context.Context, t *testing.T, run string) string {
	t.Helper()
	page := filepath.Join(t.TempDir(), run+".html")
	cmd := exec.CommandContext(ctx, "go", "run", "./test/replay", "-speed", "0", "-title", "llmbox install",
		"-report", page, filepath.Join("internal", "report", "testdata", run+".ndjson"))
	cmd.Dir = filepath.Join("..", "..")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("writing the report: %v\n%s", err, out)
	}
	return page
}

// keep puts the pictures where somebody who wants to look finds them.
func keep(t *testing.T, name string, png []byte) {
	t.Helper()
	dir := os.Getenv("PICTURES")
	if dir == "" {
		return
	}
	if err := os.WriteFile(filepath.Join(dir, name+".png"), png, 0o600); err != nil {
		t.Fatal(err)
	}
}
