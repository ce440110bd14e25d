package report

import (
	"fmt"
	"image/color"
	"slices"
	"strings"
	"time"
	"unicode"

	"charm.land/bubbles/v2/spinner"
	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

// look is how things are drawn: the glyphs a terminal can show, and styles. The
// zero styles draw nothing but the text, which is what plain output uses.
type look struct {
	ascii bool

	glyphs      map[State]string
	severities  map[finding.Severity]string
	spinner     []string
	spinnerFPS  time.Duration
	full, empty string
	bar, rail   string
	ellipsis    string
	dot         string
	arrow       string
	simulated   string
	rule        string

	title, strong, dim, good, bad, warn, work, accent lipgloss.Style
	// blend colours the progress bar, start to end; empty draws it plain.
	blend []color.Color
}

// plainLook draws with ASCII and no styles.
func plainLook() look {
	return look{
		ascii: true,
		glyphs: map[State]string{
			Pending: ".", Running: ">", Done: "+", Failed: "x", Skipped: "-", Stopped: "!",
		},
		severities: map[finding.Severity]string{
			finding.OK: "+", finding.Info: "i", finding.Warn: "!", finding.Fail: "x",
		},
		spinner: spinner.Line.Frames, spinnerFPS: spinner.Line.FPS,
		full: "#", empty: "-", bar: "=", rail: " ",
		ellipsis: "..", dot: "-", arrow: ">", simulated: "~", rule: "-",
	}
}

// screenLook draws for a terminal. The colours are the terminal's own palette,
// so that they fit light and dark backgrounds alike; whether they reach the
// terminal is decided where the output is written.
func screenLook(ascii bool) look {
	l := plainLook()
	if !ascii {
		l = look{
			glyphs: map[State]string{
				Pending: "·", Running: "●", Done: "✓", Failed: "✗", Skipped: "–", Stopped: "■",
			},
			severities: map[finding.Severity]string{
				finding.OK: "✓", finding.Info: "i", finding.Warn: "▲", finding.Fail: "✗",
			},
			spinner: spinner.MiniDot.Frames, spinnerFPS: spinner.MiniDot.FPS,
			full: "━", empty: "─", bar: "━", rail: " ",
			ellipsis: "…", dot: "·", arrow: "→", simulated: "~", rule: "─",
		}
	}
	base := lipgloss.NewStyle().Inline(true)
	l.title = base.Bold(true)
	l.strong = base.Bold(true)
	l.dim = base.Faint(true)
	l.good = base.Foreground(lipgloss.Green)
	l.bad = base.Foreground(lipgloss.Red).Bold(true)
	l.warn = base.Foreground(lipgloss.Yellow)
	l.work = base.Foreground(lipgloss.Cyan)
	l.accent = base.Foreground(lipgloss.Green).Bold(true)
	l.blend = []color.Color{lipgloss.Color("#3E8E1E"), lipgloss.Color("#9BE22D")}
	return l
}

func (l look) stateStyle(s State) lipgloss.Style {
	switch s {
	case Running:
		return l.work
	case Done:
		return l.good
	case Failed:
		return l.bad
	case Stopped:
		return l.warn
	case Pending, Skipped:
	}
	return l.dim
}

func (l look) severityStyle(s finding.Severity) lipgloss.Style {
	switch s {
	case finding.OK:
		return l.good
	case finding.Warn:
		return l.warn
	case finding.Fail:
		return l.bad
	case finding.Info:
	}
	return l.dim
}

// text makes a foreign string fit for one line of this look: no control
// character gets through, and no character the locale can't show.
func (l look) text(s string) string {
	s = oneLine(s)
	if l.ascii {
		s = toASCII(s)
	}
	return s
}

// fit cuts or pads s to exactly w cells.
func (l look) fit(s string, w int) string {
	if w <= 0 {
		return ""
	}
	if ansi.StringWidth(s) > w {
		s = l.cut(s, w)
	}
	return s + strings.Repeat(" ", max(w-ansi.StringWidth(s), 0))
}

// cut shortens s to at most w cells.
func (l look) cut(s string, w int) string {
	if w <= 0 {
		return ""
	}
	if w <= ansi.StringWidth(l.ellipsis) {
		return ansi.Truncate(s, w, "")
	}
	return ansi.Truncate(s, w, l.ellipsis)
}

// oneLine removes escape sequences and control characters, invisible ones that
// reorder text included, and makes one space of a line break or tab. Spaces are
// kept: they may belong to a command that somebody will copy.
func oneLine(s string) string {
	s = strings.ToValidUTF8(ansi.Strip(s), "\uFFFD")
	var b strings.Builder
	broken := false
	for _, r := range s {
		switch {
		case r != ' ' && unicode.IsSpace(r):
			broken = true
			continue
		case unicode.IsControl(r), unicode.Is(unicode.Cf, r):
			continue
		}
		if broken && b.Len() > 0 && r != ' ' {
			b.WriteByte(' ')
		}
		broken = false
		b.WriteRune(r)
	}
	return strings.TrimRight(b.String(), " ")
}

// toASCII replaces what a terminal without UTF-8 can't show.
func toASCII(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case r < unicode.MaxASCII:
			b.WriteRune(r)
		case r == '…':
			b.WriteString("...")
		case r == '–' || r == '—' || r == '·':
			b.WriteByte('-')
		case r == '‘' || r == '’':
			b.WriteByte('\'')
		case r == '“' || r == '”':
			b.WriteByte('"')
		case r == '≥':
			b.WriteString(">=")
		case r == '≤':
			b.WriteString("<=")
		case r == '→':
			b.WriteString("->")
		default:
			b.WriteByte('?')
		}
	}
	return b.String()
}

// wrap breaks a foreign text at words into lines of at most width cells; line
// breaks of its own are kept, words longer than a line aren't broken.
func (l look) wrap(s string, width int) []string {
	var lines []string
	for _, para := range strings.Split(s, "\n") {
		para = l.text(para)
		if ansi.StringWidth(para) <= width {
			if para != "" {
				lines = append(lines, para)
			}
			continue
		}
		line := ""
		for _, word := range strings.Fields(para) {
			switch {
			case line == "":
				line = word
			case ansi.StringWidth(line)+1+ansi.StringWidth(word) <= width:
				line += " " + word
			default:
				lines = append(lines, line)
				line = word
			}
		}
		lines = append(lines, line)
	}
	return lines
}

// labelled wraps a text behind a label, its further lines aligned to the first.
// Words longer than a line are broken only where hard is set (a screen would
// cut them off; in a log they stay whole to be copied).
func (l look) labelled(indent, label, s string, width int, hard bool) []string {
	lead := len(indent) + len(label) + 1
	room := max(width-lead, 8)
	var out []string
	for _, line := range l.wrap(s, room) {
		parts := []string{line}
		if hard {
			parts = strings.Split(ansi.Hardwrap(line, room, false), "\n")
		}
		for _, part := range parts {
			if len(out) == 0 {
				out = append(out, indent+l.dim.Render(label)+" "+part)
				continue
			}
			out = append(out, strings.Repeat(" ", lead)+part)
		}
	}
	return out
}

// short writes a duration for a person: 0.4s, 12.3s, 4m05s, 1h02m.
func short(d time.Duration) string {
	switch {
	case d < time.Minute-50*time.Millisecond:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Hour:
		d = d.Round(time.Second)
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	default:
		d = d.Round(time.Minute)
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
}

// clock writes a duration that ticks: 0:07, 12:45, 1:02:03.
func clock(d time.Duration) string {
	s := int(d.Seconds())
	if s >= 3600 {
		return fmt.Sprintf("%d:%02d:%02d", s/3600, s/60%60, s%60)
	}
	return fmt.Sprintf("%d:%02d", s/60, s%60)
}

// quantity writes a counter: "12 of 31 objects", "4.2 of 15.3 GiB".
func quantity(done, total int64, unit string) string {
	if done == 0 && total == 0 {
		return ""
	}
	if unit == "bytes" {
		if total > 0 {
			div, name := scale(total)
			return fmt.Sprintf("%.1f of %.1f %s", float64(done)/div, float64(total)/div, name)
		}
		div, name := scale(done)
		return fmt.Sprintf("%.1f %s", float64(done)/div, name)
	}
	if total > 0 {
		return strings.TrimSpace(fmt.Sprintf("%d of %d %s", done, total, unit))
	}
	return strings.TrimSpace(fmt.Sprintf("%d %s", done, unit))
}

func scale(n int64) (float64, string) {
	names := []string{"KiB", "MiB", "GiB", "TiB"}
	div := 1024.0
	for _, name := range names[:len(names)-1] {
		if float64(n) < div*1024 {
			return div, name
		}
		div *= 1024
	}
	return div, names[len(names)-1]
}

// reason is what a span says about itself right now: its counter, then its
// newest message, without saying the same twice.
func (s *Span) reason() string {
	q := quantity(s.Done, s.Total, s.Unit)
	switch {
	case q == "":
		return s.Message
	case s.Message == "":
		return q
	}
	return q + ": " + s.Message
}

// plural writes "1 step", "2 steps".
func plural(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

// troubles returns the findings a person must know of, worst first.
func troubles(all []finding.Finding) []finding.Finding {
	var out []finding.Finding
	for _, severity := range []finding.Severity{finding.Fail, finding.Warn} {
		for _, f := range all {
			if f.Severity == severity {
				out = append(out, f)
			}
		}
	}
	return out
}

// checksLine counts findings: "23 checks: 21 ok, 1 warning, 1 failed".
func checksLine(all []finding.Finding) string {
	count := map[finding.Severity]int{}
	for _, f := range all {
		count[f.Severity]++
	}
	parts := []string{}
	if n := count[finding.OK] + count[finding.Info]; n > 0 {
		parts = append(parts, fmt.Sprintf("%d ok", n))
	}
	if n := count[finding.Warn]; n > 0 {
		parts = append(parts, plural(n, "warning"))
	}
	if n := count[finding.Fail]; n > 0 {
		parts = append(parts, fmt.Sprintf("%d failed", n))
	}
	return plural(len(all), "check") + ": " + strings.Join(parts, ", ")
}

func stepNames(steps []*Step) []string {
	names := make([]string, 0, len(steps))
	for _, s := range steps {
		names = append(names, s.Name)
	}
	return slices.Clip(names)
}
