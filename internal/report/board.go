package report

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/finding"
)

// maxLogLines bounds the log pane; the whole log is what --log-file is for.
const maxLogLines = 2000

// board is what the screen draws from: the account, and the newest log lines.
// The run writes it, the screen reads it.
type board struct {
	mu  sync.Mutex
	t   *Timeline
	log []logLine
	// dropped counts the lines that fell off the front, so that the pane can
	// tell new lines from old ones.
	dropped int
}

type logLine struct {
	at    time.Duration
	name  string
	text  string
	state State
}

func newBoard() *board { return &board{t: NewTimeline()} }

func (b *board) apply(e event.Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var before string
	top, phase := splitPath(e.Step)
	if s := b.t.byPath[top]; s != nil {
		before = s.Message
	}
	b.t.Apply(e)
	line := logLine{at: e.Time.Sub(b.t.Start), name: top}
	if s := b.t.byPath[top]; s != nil {
		line.name = s.Name
	}
	switch e.Type {
	case event.RunStarted, event.RunDone:
		return
	case event.StepStarted:
		if phase != "" {
			return
		}
		line.text = "started"
	case event.StepProgress:
		if e.Message == "" || e.Message == before {
			return
		}
		line.text = joinNonEmpty(": ", phase, e.Message)
	case event.StepDone:
		if phase != "" && !e.Simulated {
			return
		}
		line.text, line.state = joinNonEmpty(": ", phase, "done", e.Message), Done
		if s := b.t.byPath[top]; s != nil && phase == "" {
			line.text = joinNonEmpty(": ", "done in "+short(s.Elapsed(e.Time)), e.Message)
		}
		if e.Simulated && (phase != "" || len(b.t.byPath[top].Phases) == 0) {
			line.text += " (simulated by " + orUnknown(strings.Join(e.SimulatedBy, ", ")) + ")"
		}
	case event.StepFailed:
		line.text, line.state = joinNonEmpty(": ", phase, "failed", e.Error), Failed
	case event.StepSkipped:
		line.text, line.state = joinNonEmpty(": ", phase, "skipped", e.Message), Skipped
	case event.FindingMade:
		if e.Finding == nil {
			return
		}
		line.text = joinNonEmpty(": ", string(e.Finding.Severity), e.Finding.ID, e.Finding.Title)
		if e.Finding.Severity == finding.Fail {
			line.state = Failed
		}
	case event.Log:
		line.text = e.Message
	}
	b.log = append(b.log, line)
	if n := len(b.log) - maxLogLines; n > maxLogLines/4 {
		b.log = append(b.log[:0:0], b.log[n:]...)
		b.dropped += n
	}
}

// logLines renders the log for a pane, its lines wrapped behind their stamps.
func (b *board) logLines(l look, width int) []string {
	const stamp = 6
	lines := make([]string, 0, len(b.log))
	for _, e := range b.log {
		name, text := l.text(e.name), l.text(e.text)
		if name != "" {
			text = name + " " + text
		}
		for i, line := range strings.Split(ansi.Wrap(text, max(width-stamp-2, 8), ""), "\n") {
			if e.state == Failed {
				line = l.bad.Render(line)
			} else if i == 0 && name != "" && strings.HasPrefix(line, name) {
				line = l.work.Render(name) + line[len(name):]
			}
			at := strings.Repeat(" ", stamp)
			if i == 0 {
				at = fmt.Sprintf("%*s", stamp, clock(e.at))
			}
			lines = append(lines, l.dim.Render(at)+"  "+line)
		}
	}
	return lines
}

// findingsLines renders all findings for a pane: those that need a person in
// full, the others in one line each.
func (b *board) findingsLines(l look, width int) []string {
	if len(b.t.Findings) == 0 {
		return []string{l.dim.Render("No check has reported yet.")}
	}
	lines := []string{checksLine(b.t.Findings), ""}
	for _, f := range troubles(b.t.Findings) {
		lines = append(lines, l.findingLines(f, width, true)...)
		lines = append(lines, "")
	}
	for _, f := range b.t.Findings {
		if f.Severity == finding.Fail || f.Severity == finding.Warn {
			continue
		}
		text := l.text(joinNonEmpty(": ", f.Title, f.Measured))
		lines = append(lines, l.cut(l.severityStyle(f.Severity).Render(l.severities[f.Severity])+" "+text, width))
	}
	return lines
}
