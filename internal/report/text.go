package report

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

// textWidth is the width of plain text: wide enough for a table, narrow enough
// for the log viewer of a CI system.
const textWidth = 100

// Meta is what the account of a run says about itself.
type Meta struct {
	// Title names the command, such as "llmbox install".
	Title string
	// Version is the version of llmbox.
	Version string
}

// WriteText writes the final account as plain text: the steps with the times of
// their phases, what ran in parallel, the critical path, and what went wrong.
func (t *Timeline) WriteText(w io.Writer, m Meta) error {
	return writeLines(w, t.account(plainLook(), m, textWidth, false))
}

func writeLines(w io.Writer, lines []string) error {
	out := bufio.NewWriter(w)
	for _, line := range lines {
		// What bufio can't write it reports at Flush.
		_, _ = out.WriteString(strings.TrimRight(line, " "))
		_ = out.WriteByte('\n')
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("writing report: %w", err)
	}
	return nil
}

// account lays the final account out in lines of at most width cells. With hard
// set, words too long for a line are broken.
func (t *Timeline) account(l look, m Meta, width int, hard bool) []string {
	lines := []string{l.cut(t.headline(l, m), width), ""}
	if len(t.Steps) > 0 {
		lines = append(lines, t.table(l, width)...)
		lines = append(lines, "")
	}
	var facts []string
	add := func(label, s string) {
		facts = append(facts, l.labelled("", l.fit(label, 13), s, width, hard)...)
	}
	work, most, which := t.Overlap()
	if total := t.Elapsed(t.Stop()); most > 1 && total > 0 {
		add("in parallel", fmt.Sprintf("up to %d at once (%s); %s of work in %s",
			most, strings.Join(stepNames(which), ", "), short(work), short(total)))
	}
	if steps := t.CriticalSteps(); len(steps) > 1 {
		var sum time.Duration
		var parts []string
		for _, s := range steps {
			d := s.Elapsed(t.Stop())
			sum += d
			parts = append(parts, s.Name+" "+short(d))
		}
		add("critical path", fmt.Sprintf("%s = %s of %s",
			strings.Join(parts, " "+l.arrow+" "), short(sum), short(t.Elapsed(t.Stop()))))
	}
	if len(t.Findings) > 0 {
		add("preflight", checksLine(t.Findings))
	}
	if t.Summary != nil && t.Summary.Endpoint != "" {
		add("endpoint", t.Summary.Endpoint)
	}
	if len(facts) > 0 {
		lines = append(lines, facts...)
		lines = append(lines, "")
	}
	for _, f := range troubles(t.Findings) {
		lines = append(lines, l.findingLines(f, width, hard)...)
		lines = append(lines, "")
	}
	lines = append(lines, t.failures(l, width, hard)...)
	if t.Outcome() == OutcomeInterrupted {
		lines = append(lines, l.wrap("Stopped. The same command goes on from here.", width)...)
		lines = append(lines, "")
	}
	if gates := t.GatesLine(); gates != "" {
		lines = append(lines, l.wrap(gates, width)...)
	}
	for len(lines) > 0 && lines[len(lines)-1] == "" {
		lines = lines[:len(lines)-1]
	}
	return lines
}

// headline says what ran, how it ended and how long it took.
func (t *Timeline) headline(l look, m Meta) string {
	title := l.text(m.Title)
	if title == "" {
		title = l.text(t.Name)
	}
	if title == "" {
		title = "llmbox"
	}
	if v := l.text(m.Version); v != "" {
		title += " " + v
	}
	elapsed := short(t.Elapsed(t.Stop()))
	switch t.Outcome() {
	case OutcomeDone:
		return l.title.Render(title) + ": " + l.good.Render("done in "+elapsed)
	case OutcomeFailed:
		return l.title.Render(title) + ": " + l.bad.Render("failed after "+elapsed)
	case OutcomeInterrupted:
		return l.title.Render(title) + ": " + l.warn.Render("interrupted after "+elapsed)
	default:
		return l.title.Render(title) + ": " + l.warn.Render("not finished, last heard of after "+elapsed)
	}
}

// table shows one row a step: state, time, when, and the phases' times.
func (t *Timeline) table(l look, width int) []string {
	nameWidth := len("step")
	for _, s := range t.Steps {
		nameWidth = max(nameWidth, ansi.StringWidth(l.text(s.Name)))
	}
	nameWidth = min(nameWidth, max(width/3, 6))
	chart := 0
	if width >= 64 {
		chart = min(max(width/4, 16), 40)
	}
	lead := 2 + nameWidth + 2 + 7 + 2
	if chart > 0 {
		lead += chart + 2
	}
	head := "  " + l.fit("step", nameWidth) + "  " + fmt.Sprintf("%7s", "time") + "  "
	if chart > 0 {
		head += l.fit("when", chart) + "  "
	}
	lines := []string{l.dim.Render(l.cut(head+"phases", width))}
	simulated := false
	for _, s := range t.Steps {
		row := l.stateStyle(s.State).Render(l.glyphs[s.State]) + " " + l.fit(l.text(s.Name), nameWidth) + "  "
		row += fmt.Sprintf("%7s", stepTime(s, t.Stop())) + "  "
		if chart > 0 {
			row += l.gantt(t, s, chart) + "  "
		}
		about, sim := s.about(l, t.Stop())
		simulated = simulated || sim
		if width-lead < 12 {
			lines = append(lines, l.cut(row, width))
			continue
		}
		for i, line := range l.wrap(about, width-lead) {
			if i > 0 {
				row = strings.Repeat(" ", lead)
			}
			lines = append(lines, l.cut(row+l.dim.Render(line), width))
			row = ""
		}
		if row != "" {
			lines = append(lines, l.cut(row, width))
		}
	}
	if simulated {
		lines = append(lines, l.dim.Render(l.cut(strings.Repeat(" ", lead)+l.simulated+" answered by a rehearsal actor", width)))
	}
	return lines
}

func stepTime(s *Step, stop time.Time) string {
	if s.Start.IsZero() || s.State == Skipped {
		return "-"
	}
	return short(s.Elapsed(stop))
}

// about says how a step spent its time, or why it spent none.
func (s *Step) about(l look, stop time.Time) (string, bool) {
	switch s.State {
	case Skipped:
		if s.Message != "" {
			return "skipped: " + s.Message, false
		}
		return "skipped", false
	case Pending:
		return "not started", false
	case Running, Done, Failed, Stopped:
	}
	_, simulated := s.Actors()
	var parts []string
	for _, p := range s.Phases {
		part := p.Name + " " + short(p.Elapsed(stop))
		if p.State == Skipped {
			part = p.Name + " skipped"
		}
		if p.Simulated {
			part += l.simulated
		}
		if p.State == Failed || p.State == Stopped {
			part += " " + string(p.State)
		}
		parts = append(parts, part)
	}
	if len(parts) == 0 {
		if s.State == Done && s.Message != "" {
			parts = append(parts, s.Message)
		} else {
			parts = append(parts, string(s.State))
		}
		if s.Simulated {
			parts[0] += " " + l.simulated
		}
	}
	return strings.Join(parts, ", "), simulated
}

// gantt draws when a step ran within the run, in exactly w cells.
func (l look) gantt(t *Timeline, s *Step, w int) string {
	total := t.Elapsed(t.Stop())
	if s.Start.IsZero() || s.State == Skipped || total <= 0 || w <= 0 {
		return l.dim.Render(strings.Repeat(l.rail, max(w, 0)))
	}
	from, to := bar(s.Start.Sub(t.Start), s.Elapsed(t.Stop()), total, w)
	return l.dim.Render(strings.Repeat(l.rail, from)) +
		l.stateStyle(s.State).Render(strings.Repeat(l.bar, to-from)) +
		l.dim.Render(strings.Repeat(l.rail, w-to))
}

// bar maps a span of the run to cells; whatever ran gets at least one.
func bar(start, length, total time.Duration, w int) (from, to int) {
	cell := func(d time.Duration) int {
		return int(math.Round(float64(d) / float64(total) * float64(w)))
	}
	from = min(max(cell(start), 0), w-1)
	to = min(max(cell(start+length), from+1), w)
	return from, to
}

// findingLines shows a finding with all four: what, measured, required, fix.
func (l look) findingLines(f finding.Finding, width int, hard bool) []string {
	glyph := l.severities[f.Severity]
	lines := []string{}
	for i, line := range l.wrap(f.Title+" ("+f.ID+")", width-2) {
		if i == 0 {
			line = l.severityStyle(f.Severity).Render(glyph) + " " + line
		} else {
			line = "  " + line
		}
		lines = append(lines, line)
	}
	for _, row := range [][2]string{{"measured", f.Measured}, {"required", f.Required}, {"fix     ", f.Fix}} {
		if row[1] != "" {
			lines = append(lines, l.labelled("  ", row[0], row[1], width, hard)...)
		}
	}
	return lines
}

// failures shows what failed, why, and the way out.
func (t *Timeline) failures(l look, width int, hard bool) []string {
	var lines []string
	for _, s := range t.Steps {
		if s.State != Failed {
			continue
		}
		what := s.Title + " failed after " + short(s.Elapsed(t.Stop()))
		if p := s.FailedPhase(); p != nil {
			what = s.Title + " failed in phase " + p.Name + " after " + short(s.Elapsed(t.Stop()))
		}
		lines = append(lines, l.failureLines(what, s, width, hard)...)
		lines = append(lines, "")
	}
	if len(lines) == 0 && t.Error != "" {
		lines = append(lines, l.labelled("", l.bad.Render("error"), t.Error, width, hard)...)
		if t.Fix != "" {
			lines = append(lines, l.labelled("", "fix  ", t.Fix, width, hard)...)
		}
		lines = append(lines, "")
	}
	return lines
}

func (l look) failureLines(what string, s *Step, width int, hard bool) []string {
	var lines []string
	for i, line := range l.wrap(what, width-2) {
		lead := "  "
		if i == 0 {
			lead = l.bad.Render(l.glyphs[Failed]) + " "
		}
		lines = append(lines, lead+l.strong.Render(line))
	}
	msg, fix := s.Trouble()
	if msg != "" {
		lines = append(lines, l.labelled("  ", "error", msg, width, hard)...)
	}
	if wait, d := s.LongestWait(); wait != "" && d >= time.Second && !strings.Contains(msg, wait) {
		lines = append(lines, l.labelled("  ", "wait ", wait+" (for "+short(d)+")", width, hard)...)
	}
	if fix != "" {
		lines = append(lines, l.labelled("  ", "fix  ", fix, width, hard)...)
	}
	return lines
}
