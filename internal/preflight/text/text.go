// Package text shows the findings of a preflight to a person at a terminal: what is
// wrong first, with what was found, what is needed and what to type, then what
// follows from it, then in one line what is well. It must not judge, and it must not
// know where findings come from.
package text

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

// Narrowest is the least width that is used, in columns.
const Narrowest = 40

const (
	indent   = "      "
	labelled = 10
)

// writer keeps the first error, so that the lines below read as lines.
type writer struct {
	*bufio.Writer
	width int
	color bool
	// command is the one that can mend; doctor has no failures to go on in spite of.
	command string
}

func (w *writer) line(s string) {
	// bufio keeps the error for Flush.
	_, _ = w.WriteString(strings.TrimRight(s, " ") + "\n")
}

// Text writes the findings, which come arranged: roots first. No line is wider than
// width columns, save a single word that is. With all, each check that is well gets a
// line of its own.
func Text(w io.Writer, findings []finding.Finding, width int, color, all bool) error {
	return TextFor(preflightCommand, w, findings, width, color, all)
}

const preflightCommand = "llmbox preflight"

// TextFor is Text for the findings of another command.
func TextFor(command string, w io.Writer, findings []finding.Finding, width int, color, all bool) error {
	out := &writer{Writer: bufio.NewWriter(w), width: max(width, Narrowest), color: color, command: command}
	byRoot := followers(findings)
	var counted counts
	for _, f := range findings {
		counted.add(f)
		if bad(f) && len(f.Causes) == 0 {
			out.root(f, byRoot[f.ID])
		}
	}
	out.notes(findings, all)
	out.closing(findings, counted)
	if err := out.Flush(); err != nil {
		return fmt.Errorf("writing findings: %w", err)
	}
	return nil
}

func bad(f finding.Finding) bool {
	return f.Severity == finding.Fail || f.Severity == finding.Warn
}

// followers maps each root to the findings that it explains, through others too.
func followers(findings []finding.Finding) map[string][]finding.Finding {
	byID := map[string]finding.Finding{}
	for _, f := range findings {
		byID[f.ID] = f
	}
	out := map[string][]finding.Finding{}
	for _, f := range findings {
		if !bad(f) || len(f.Causes) == 0 {
			continue
		}
		root := rootOf(byID, f.ID, nil)
		out[root] = append(out[root], f)
	}
	return out
}

// rootOf follows the first cause upwards; a circle ends where it began.
func rootOf(byID map[string]finding.Finding, id string, passed []string) string {
	f, ok := byID[id]
	if !ok || !bad(f) || len(f.Causes) == 0 || slices.Contains(passed, id) {
		return id
	}
	return rootOf(byID, f.Causes[0], append(passed, id))
}

// counts are for the last line.
type counts struct {
	fail, warn, wait, follow, well, skipped, unread int
}

func (c *counts) add(f finding.Finding) {
	switch {
	case bad(f) && len(f.Causes) > 0:
		c.follow++
	case f.State == finding.Wait && bad(f):
		c.wait++
	case f.Severity == finding.Fail:
		c.fail++
	case f.Severity == finding.Warn:
		c.warn++
	case f.State == finding.Unreadable:
		c.unread++
	case f.State == finding.NotApplicable:
		c.skipped++
	default:
		c.well++
	}
}

func (w *writer) root(f finding.Finding, follow []finding.Finding) {
	id := f.ID
	if f.Strict {
		id += " (can't be ignored)"
	}
	plain := 6 + utf8.RuneCountInString(f.Title)
	if room := w.width - plain - utf8.RuneCountInString(id); room >= 2 {
		w.line(w.mark(f) + "  " + f.Title + strings.Repeat(" ", room) + w.dim(id))
	} else {
		for i, line := range wrap(f.Title, w.width-len(indent)) {
			lead := indent
			if i == 0 {
				lead = w.mark(f) + "  "
			}
			w.line(lead + line)
		}
		w.line(indent + w.dim(id))
	}
	w.field("found", f.Measured)
	w.field("needed", f.Required)
	w.fix(f.Fix)
	if len(follow) > 0 {
		var titles []string
		for _, other := range follow {
			titles = append(titles, other.Title)
		}
		w.field("follows", strings.Join(titles, ", "))
	}
	w.line("")
}

// mark is the word in front, four columns wide.
func (w *writer) mark(f finding.Finding) string {
	word, code := "warn", "33"
	switch {
	case f.State == finding.Wait:
		word, code = "wait", "36"
	case f.Severity == finding.Fail:
		word, code = "FAIL", "31;1"
	case f.Severity == finding.Info:
		word, code = "note", "34"
	case f.Severity == finding.OK:
		word, code = "ok  ", "32"
	}
	if !w.color {
		return word
	}
	return "\x1b[" + code + "m" + word + "\x1b[0m"
}

func (w *writer) dim(s string) string {
	if !w.color {
		return s
	}
	return "\x1b[2m" + s + "\x1b[0m"
}

// field writes a labelled text, its further lines under its first.
func (w *writer) field(label, text string) {
	if text == "" {
		return
	}
	w.hanging(fmt.Sprintf("%s%-*s", indent, labelled, label), text)
}

// fix writes what to do: words as they come, each command on lines of its own, so that
// it can be marked and copied.
func (w *writer) fix(text string) {
	lead := fmt.Sprintf("%s%-*s", indent, labelled, "to mend")
	below := strings.Repeat(" ", utf8.RuneCountInString(lead))
	steps := split(text)
	for i, step := range steps {
		if i > 0 {
			lead = below
			if step.command {
				lead += "  "
			}
		}
		w.hanging(lead, step.text)
	}
}

// step is a part of a fix: words, or a command to be typed.
type step struct {
	text    string
	command bool
}

// split takes a fix apart. A command begins with a word that no sentence begins with, at
// the start of a sentence or behind a colon, and ends with the sentence, before a remark
// in brackets or at a comma.
func split(text string) []step {
	var out []step
	var part []string
	command := false
	flush := func() {
		if len(part) > 0 {
			joined := strings.Join(part, " ")
			if command {
				joined = strings.TrimRight(joined, ".,;")
			}
			out = append(out, step{joined, command})
		}
		part = nil
	}
	words := strings.Fields(text)
	begins := true
	for i, word := range words {
		if begins && program(word) {
			flush()
			command = true
		} else if command && strings.HasPrefix(word, "(") {
			flush()
			command = false
		}
		part = append(part, word)
		last := i+1 == len(words)
		sentence := strings.HasSuffix(word, ".") && !last && capital(words[i+1])
		begins = sentence || strings.HasSuffix(word, ":")
		if command && (sentence || strings.HasSuffix(word, ",")) {
			flush()
			command = false
		}
	}
	flush()
	return out
}

// program says whether a word begins a command.
func program(word string) bool {
	return slices.Contains([]string{"sudo", "printf", "llmbox", "kubectl", "curl", "echo", "export"}, word)
}

func capital(word string) bool {
	r, _ := utf8.DecodeRuneInString(word)
	return unicode.IsUpper(r)
}

func (w *writer) hanging(lead, text string) {
	room := w.width - utf8.RuneCountInString(lead)
	for i, line := range wrap(text, room) {
		if i > 0 {
			lead = strings.Repeat(" ", utf8.RuneCountInString(lead))
		}
		w.line(lead + line)
	}
}

// wrap breaks a text into lines. It prefers to break behind what also ends or joins
// shell commands, and marks a break within one by a backslash, so that a command
// copied from several lines still means the same.
func wrap(text string, width int) []string {
	const mark = " \\"
	var lines []string
	words := strings.Fields(text)
	within := withinCommand(words)
	for at := 0; at < len(words); {
		length, end, preferred := 0, at, 0
		for end < len(words) {
			next := length + utf8.RuneCountInString(words[end])
			if end > at {
				next++
			}
			room := width
			if within[end] {
				room -= len(mark)
			}
			if next > room && end > at {
				break
			}
			length = next
			end++
			if joins(words[end-1]) && length > width/3 {
				preferred = end
			}
		}
		if end < len(words) && preferred > 0 {
			end = preferred
		}
		line := strings.Join(words[at:end], " ")
		if end < len(words) && within[end-1] {
			line += mark
		}
		lines = append(lines, line)
		at = end
	}
	return lines
}

// withinCommand says for each word whether a shell command goes on behind it without
// anything that joins or ends it. Commands begin with a word that prose has not.
func withinCommand(words []string) []bool {
	out := make([]bool, len(words))
	in := false
	for i, w := range words {
		bare := strings.TrimLeft(w, "(")
		switch {
		case program(bare):
			in = true
		case joins(w) || strings.HasPrefix(w, "(") || strings.HasSuffix(w, ")") && !strings.Contains(w, "(") && !strings.HasSuffix(w, "-r)") && !strings.HasSuffix(w, "'*nvidia*')"):
			in = false
		}
		// The last word of a text, and one before a remark in brackets, end it.
		out[i] = in && !joins(w) && i+1 < len(words) && !strings.HasPrefix(words[i+1], "(")
	}
	return out
}

func joins(word string) bool {
	return word == "&&" || word == "|" || word == "||" || strings.HasSuffix(word, ";") || strings.HasSuffix(word, ",") || strings.HasSuffix(word, ":") || strings.HasSuffix(word, ".")
}

// notes writes what is worth knowing, what could not be read and, if asked, each
// check that is well.
func (w *writer) notes(findings []finding.Finding, all bool) {
	var notes, unread []finding.Finding
	for _, f := range findings {
		switch {
		case bad(f):
		case f.State == finding.Unreadable:
			unread = append(unread, f)
		case f.Severity == finding.Info:
			notes = append(notes, f)
		}
	}
	for _, f := range notes {
		w.hanging(w.lead(f), f.Title+": "+f.Measured)
	}
	if all {
		for _, f := range unread {
			w.hanging(w.lead(f), f.Title+": "+f.Measured)
		}
		for _, f := range findings {
			if !bad(f) && f.State != finding.Unreadable && f.Severity == finding.OK {
				w.hanging(w.lead(f), f.Title+": "+f.Measured)
			}
		}
	} else if len(unread) > 0 {
		w.unread(unread)
	}
	if len(notes) > 0 || len(unread) > 0 || all {
		w.line("")
	}
}

// unread names what could not be looked at. Checks that lack the same fact for the
// same reason are one thing.
func (w *writer) unread(unread []finding.Finding) {
	titles := map[string][]string{}
	var order []string
	for _, f := range unread {
		if titles[f.Measured] == nil {
			order = append(order, f.Measured)
		}
		titles[f.Measured] = append(titles[f.Measured], f.Title)
	}
	var single []string
	for _, reason := range order {
		if n := len(titles[reason]); n > 1 {
			w.hanging("?     ", fmt.Sprintf("%d checks: %s", n, reason))
		} else {
			single = append(single, titles[reason][0])
		}
	}
	if len(single) > 0 {
		w.hanging("?     ", "Could not be looked at: "+some(6, single))
	}
}

// lead is the mark of a short line. Its width is counted without colour.
func (w *writer) lead(f finding.Finding) string {
	switch f.State {
	case finding.Unreadable:
		return "?     "
	case finding.NotApplicable:
		return "-     "
	}
	return (&writer{}).mark(f) + "  "
}

func some(n int, words []string) string {
	if len(words) <= n {
		return strings.Join(words, ", ")
	}
	return strings.Join(words[:n], ", ") + fmt.Sprintf(" and %d more (--all shows them)", len(words)-n)
}

// closing writes the repairs on offer, the way past a failed check, and the count.
func (w *writer) closing(findings []finding.Finding, c counts) {
	var mendable, ignorable []string
	for _, f := range findings {
		if !bad(f) || len(f.Causes) > 0 {
			continue
		}
		if f.Repair != "" {
			mendable = append(mendable, f.Title)
		}
		if f.Severity == finding.Fail && !f.Strict {
			ignorable = append(ignorable, f.ID)
		}
	}
	if len(mendable) > 0 {
		w.hanging("", "llmbox can mend by itself: "+strings.Join(mendable, ", ")+". It lists what it would do first: sudo "+w.command+" --fix")
	}
	if len(ignorable) > 0 && w.command == preflightCommand {
		w.hanging("", "To go on in spite of a failed check: --ignore "+strings.Join(ignorable, " --ignore "))
	}
	var parts []string
	for _, p := range []struct {
		n    int
		what string
	}{{c.fail, "failed"}, {c.warn, "warned"}, {c.wait, "will pass by itself"}, {c.follow, "follow from these"}, {c.unread, "not looked at"}, {c.skipped, "do not apply here"}} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.what))
		}
	}
	last := fmt.Sprintf("%d checks are well", c.well)
	if c.well == 1 {
		last = "1 check is well"
	}
	if len(parts) > 0 {
		last += "; " + strings.Join(parts, ", ")
	}
	w.hanging("", last+".")
}
