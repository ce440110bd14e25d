package repair

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/repair/record"
)

// words are a step as typed, each word quoted where a shell would split or change
// it.
func (s Step) words() []string {
	switch {
	case s.Write != nil:
		words := []string{"printf", quoted(`%s\n`)}
		for line := range strings.Lines(s.Write.Content) {
			words = append(words, quoted(strings.TrimSuffix(line, "\n")))
		}
		return append(words, "|", "sudo", "tee", quoted(s.Write.Path), ">", "/dev/null")
	case s.Link != nil:
		return []string{"sudo", "ln", "-s", quoted(s.Link.Target), quoted(s.Link.Path)}
	case s.Download != nil:
		return []string{"curl", "-fsSL", quoted(s.Download.URL), "|", "sudo", "tee", quoted(s.Download.Path), ">", "/dev/null"}
	case s.Kube != nil:
		return s.Kube.words()
	case s.Run != nil:
		words := []string{"sudo"}
		for _, w := range slices.Concat(s.Run.Environment, s.Run.Argv) {
			words = append(words, quoted(w))
		}
		return words
	}
	return nil
}

func quoted(word string) string {
	if word != "" && !strings.ContainsAny(word, " \t\n'\"\\$*?[]{}()<>|&;`~#!%") {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// Shown is the one line that a person would type for a step.
func (s Step) Shown() string { return strings.Join(s.words(), " ") }

// short is a step in a few words, for progress.
func (s Step) short() string {
	switch {
	case s.Write != nil:
		return "write " + s.Write.Path
	case s.Link != nil:
		return "link " + s.Link.Path
	case s.Download != nil:
		return "fetch " + s.Download.URL
	case s.Run != nil:
		return strings.Join(s.Run.Argv, " ")
	case s.Kube != nil:
		return strings.Join(s.Kube.words(), " ")
	}
	return ""
}

// remarks is what has to be said about a step beside what is typed.
func (s Step) remarks() (before, behind string) {
	if s.Unless != nil {
		before = "unless " + s.Unless.What + ":"
	}
	switch {
	case s.Download != nil:
		behind = "(only the key " + s.Download.Fingerprint + " is accepted)"
	case s.Run != nil && s.Run.Guard != nil:
		behind = "(asked first with -s, and left undone if it would remove or upgrade anything else)"
	}
	return before, behind
}

// Describe writes the list that is shown before anything is done: each action with
// what is typed and how to undo it. Width is in columns.
func Describe(w io.Writer, actions []Action, width int) error {
	p := &page{width: max(width, 40)}
	if len(actions) == 0 {
		p.wrap("", "There is nothing that llmbox can mend by itself.")
		return p.write(w)
	}
	p.wrap("", "llmbox would do this, in this order. It changes nothing else, does not reboot, and leaves the NVIDIA driver alone.")
	for i, a := range actions {
		p.line("")
		p.wrap(fmt.Sprintf("%d. ", i+1), a.Title)
		switch {
		case len(a.Findings) > 0:
			p.wrap("   ", "mends "+strings.Join(a.Findings, ", ")+" ("+a.Name+")")
		case len(a.After) > 0:
			p.wrap("   ", "follows "+strings.Join(a.After, ", ")+" ("+a.Name+")")
		}
		p.wrap("   ", "Safe: "+a.Safe+".")
		condition := ""
		for _, s := range a.Steps {
			before, behind := s.remarks()
			indent := "     "
			if before != condition && before != "" {
				p.wrap(indent, before)
			}
			condition = before
			if before != "" {
				indent += "  "
			}
			p.typed(indent, s.words())
			if behind != "" {
				p.wrap(indent+"  ", behind)
			}
		}
		p.wrap("   ", "Undo:")
		for _, u := range a.Undo {
			p.typed("     ", strings.Fields(u))
		}
	}
	return p.write(w)
}

// page gathers lines of a bounded width.
type page struct {
	width int
	lines []string
}

func (p *page) line(s string) { p.lines = append(p.lines, strings.TrimRight(s, " ")) }

// wrap writes a sentence behind a lead; further lines are indented by as much.
func (p *page) wrap(lead, text string) {
	indent := strings.Repeat(" ", len(lead))
	at := lead
	for _, word := range strings.Fields(text) {
		if len(at)+len(word) > p.width && strings.TrimSpace(at) != "" && at != lead {
			p.line(at)
			at = indent
		}
		at += word + " "
	}
	p.line(at)
}

// typed writes a command; where it is too long it goes on behind a backslash.
func (p *page) typed(indent string, words []string) {
	at := indent
	for i, word := range words {
		room := p.width
		if i < len(words)-1 {
			room -= 2
		}
		if len(at)+len(word) > room && strings.TrimSpace(at) != "" {
			p.lines = append(p.lines, at+`\`)
			at = indent + "  "
		}
		at += word + " "
	}
	p.line(at)
}

func (p *page) write(w io.Writer) error {
	if _, err := io.WriteString(w, strings.Join(p.lines, "\n")+"\n"); err != nil {
		return fmt.Errorf("writing the list of repairs: %w", err)
	}
	return nil
}

// DescribeRecord writes what repairs left on the machine and how to undo it, for
// whoever uninstalls. It writes nothing where there is nothing.
func DescribeRecord(w io.Writer, r *record.Record, width int) error {
	if len(r.Repairs) == 0 {
		return nil
	}
	p := &page{width: max(width, 40)}
	p.wrap("", "These repairs stay on the machine:")
	for _, d := range r.Repairs {
		p.line("")
		title := d.Title + " (" + d.Name + ", " + d.Last.Format(time.DateOnly) + ")"
		if d.State != record.Done {
			title += ", not finished"
		}
		p.wrap("- ", title)
		for _, f := range d.Files {
			p.wrap("  ", "wrote "+f.Path)
		}
		for _, q := range d.Packages {
			text := "installed " + q.Name + " " + q.Version
			if q.Before != "" {
				text = "upgraded " + q.Name + " from " + q.Before + " to " + q.Version
			}
			p.wrap("  ", text)
		}
		p.wrap("  ", "Undo:")
		for _, u := range d.Undo {
			p.typed("    ", strings.Fields(u))
		}
	}
	return p.write(w)
}
