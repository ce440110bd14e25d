package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/finding"
)

const (
	// linesEvery is the least time between two progress lines of one step.
	linesEvery = 3 * time.Second
	// linesStill is how long an unchanged reason stays silent; CI systems stop
	// jobs that say nothing for several minutes.
	linesStill = time.Minute
)

// LinesOptions shapes plain lines.
type LinesOptions struct {
	// Title names the command in the first line and in the account.
	Title string
	// Every is the least time between two progress lines of one step; zero
	// means three seconds.
	Every time.Duration
	// Account has Close write the final account.
	Account bool
}

// Lines writes one line for each event that means something, without a single
// control character. It is what runs off a terminal get.
type Lines struct {
	mu      sync.Mutex
	out     io.Writer
	err     error
	o       LinesOptions
	l       look
	t       *Timeline
	said    map[string]*saidLine
	nameCol int
	closed  bool
}

// saidLine is what a step said last, and what it has to say since.
type saidLine struct {
	message string
	at      time.Time
	held    event.Event
	holding bool
}

// NewLines makes a plain renderer that writes to w.
func NewLines(w io.Writer, o LinesOptions) *Lines {
	if o.Every == 0 {
		o.Every = linesEvery
	}
	l := plainLook()
	// A log file is UTF-8 whatever the locale; the text of errors stays whole.
	l.ascii = false
	return &Lines{out: w, o: o, l: l, t: NewTimeline(), said: map[string]*saidLine{}, nameCol: 12}
}

// Emit implements event.Sink.
func (p *Lines) Emit(e event.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.t.Apply(e)
	if p.closed {
		return
	}
	top, phase := splitPath(e.Step)
	switch e.Type {
	case event.StepProgress:
		p.progress(e)
	case event.StepDone, event.StepFailed, event.StepSkipped:
		if phase == "" {
			delete(p.said, top)
		} else if s := p.said[top]; s != nil {
			s.holding = false
		}
	case event.RunStarted, event.StepStarted, event.FindingMade, event.Log, event.RunDone:
	}
	p.speak(e.Time)
	switch e.Type {
	case event.RunStarted:
		p.runStarted(e)
	case event.StepStarted:
		if phase == "" {
			p.said[top] = &saidLine{at: e.Time}
			p.step(e, "started")
		}
	case event.StepProgress:
	case event.StepDone:
		p.stepDone(e)
	case event.StepFailed:
		p.stepFailed(e)
	case event.StepSkipped:
		if phase == "" {
			p.step(e, joinNonEmpty(": ", "skipped", e.Message))
		}
	case event.FindingMade:
		p.finding(e)
	case event.Log:
		if e.Step != "" {
			p.step(e, e.Message)
		} else {
			p.line(e, e.Message)
		}
	case event.RunDone:
		p.runDone(e)
	}
}

// Close writes the final account, if asked for, and returns the first error of
// writing.
func (p *Lines) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return p.err
	}
	p.closed = true
	if p.o.Account && len(p.t.Steps) > 0 {
		l := p.l
		p.write("\n")
		for _, line := range p.t.account(l, Meta{Title: p.o.Title}, textWidth, false) {
			p.write(strings.TrimRight(line, " ") + "\n")
		}
	}
	return p.err
}

func (p *Lines) runStarted(e event.Event) {
	for _, s := range p.t.Steps {
		p.nameCol = max(p.nameCol, len(s.Name))
	}
	title := p.o.Title
	if title == "" {
		title = "llmbox"
	}
	p.line(e, joinNonEmpty(": ", title, e.Message, plural(len(e.Plan), "step")))
}

// progress holds a reason back until the step has been silent for long enough,
// and only the newest one: steps that are over at once say nothing between
// started and done.
func (p *Lines) progress(e event.Event) {
	top, _ := splitPath(e.Step)
	last := p.said[top]
	if last == nil {
		// The run was joined in the middle: say it at once.
		last = &saidLine{at: e.Time.Add(-p.o.Every)}
		p.said[top] = last
	}
	last.held, last.holding = e, true
}

// speak writes the held reasons whose time has come.
func (p *Lines) speak(now time.Time) {
	for _, s := range p.t.Steps {
		last := p.said[s.Path]
		if last == nil || !last.holding || now.Sub(last.at) < p.o.Every {
			continue
		}
		_, phase := splitPath(last.held.Step)
		span := Span{Message: last.held.Message, Done: last.held.Done, Total: last.held.Total, Unit: last.held.Unit}
		message := joinNonEmpty(": ", phase, span.reason())
		if message == "" || message == last.message && now.Sub(last.at) < linesStill {
			continue
		}
		e := last.held
		e.Time = now
		*last = saidLine{message: message, at: now}
		p.step(e, message)
	}
}

func (p *Lines) stepDone(e event.Event) {
	top, phase := splitPath(e.Step)
	s := p.t.step(top)
	if phase != "" {
		// Only gates that an actor answered deserve a line of their own: whoever
		// reads the log must not take them for the real thing.
		if e.Simulated {
			p.step(e, phase+": simulated by "+orUnknown(strings.Join(e.SimulatedBy, ", ")))
		}
		return
	}
	said := "done in " + short(s.Elapsed(e.Time))
	// An actor that answered for a phase was named there.
	if by, _ := s.Actors(); s.Simulated && !slices.ContainsFunc(s.Phases, func(p *Phase) bool { return p.Simulated }) {
		said += " (simulated by " + orUnknown(strings.Join(by, ", ")) + ")"
	}
	p.step(e, joinNonEmpty(": ", said, e.Message))
}

func orUnknown(s string) string {
	if s == "" {
		return "a rehearsal actor"
	}
	return s
}

func (p *Lines) stepFailed(e event.Event) {
	top, phase := splitPath(e.Step)
	s := p.t.step(top)
	if phase != "" {
		p.step(e, joinNonEmpty(": ", phase, "failed"))
		return
	}
	p.step(e, "FAILED after "+short(s.Elapsed(e.Time)))
	msg, fix := s.Trouble()
	p.block(e, "error", msg)
	p.block(e, "fix  ", fix)
}

// block writes a labelled text on lines of its own, under the name of its step.
func (p *Lines) block(e event.Event, label, s string) {
	if s == "" {
		return
	}
	lead := len(p.stamp(e)) + 2 + p.nameCol + 2
	for i, line := range p.l.wrap(s, textWidth-lead-len(label)-1) {
		if i > 0 {
			label = strings.Repeat(" ", len(label))
		}
		p.step(e, label+" "+line)
	}
}

func (p *Lines) finding(e event.Event) {
	f := e.Finding
	if f == nil || f.Severity == finding.OK {
		return
	}
	name := map[finding.Severity]string{
		finding.Info: "note", finding.Warn: "WARNING", finding.Fail: "FAILED",
	}[f.Severity]
	p.step(e, name+" "+f.ID+": "+f.Title)
	p.block(e, "  measured", f.Measured)
	p.block(e, "  required", f.Required)
	p.block(e, "  fix     ", f.Fix)
}

func (p *Lines) runDone(e event.Event) {
	elapsed := short(p.t.Elapsed(e.Time))
	switch p.t.Outcome() {
	case OutcomeDone:
		p.line(e, "done in "+elapsed)
	case OutcomeInterrupted:
		p.line(e, "interrupted after "+elapsed)
	default:
		p.line(e, "FAILED after "+elapsed)
	}
	// Without the account these would be said nowhere.
	if p.o.Account {
		return
	}
	if p.t.Summary.Endpoint != "" {
		p.line(e, "endpoint "+p.t.Summary.Endpoint)
	}
	if gates := p.t.GatesLine(); gates != "" {
		p.line(e, gates)
	}
}

func (p *Lines) stamp(e event.Event) string {
	return fmt.Sprintf("%5s", clock(e.Time.Sub(p.t.Start)))
}

func (p *Lines) step(e event.Event, s string) {
	top, _ := splitPath(e.Step)
	name := top
	if known := p.t.byPath[top]; known != nil {
		name = known.Name
	} else if name == "" {
		name = "run"
	}
	p.line(e, p.l.fit(p.l.text(name), p.nameCol)+"  "+p.l.text(s))
}

func (p *Lines) line(e event.Event, s string) {
	p.write(p.stamp(e) + "  " + p.l.text(s) + "\n")
}

// write keeps the first error and stays silent after it: a reader that went
// away must not stop a run.
func (p *Lines) write(s string) {
	if p.err != nil {
		return
	}
	if _, err := io.WriteString(p.out, s); err != nil {
		p.err = fmt.Errorf("writing lines: %w", err)
	}
}

func joinNonEmpty(sep string, parts ...string) string {
	var out []string
	for _, s := range parts {
		if s != "" {
			out = append(out, s)
		}
	}
	return strings.Join(out, sep)
}
