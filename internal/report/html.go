package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

//go:embed report.html.tmpl
var htmlTemplate string

// WriteHTML writes the final account as one HTML page that stands alone: no
// script, no font, no picture, nothing asked from anywhere. Everything that
// came with an event is escaped by html/template.
func (t *Timeline) WriteHTML(w io.Writer, m Meta) error {
	page, err := template.New("report").Parse(htmlTemplate)
	if err != nil {
		return fmt.Errorf("reading report template: %w", err)
	}
	if err := page.Execute(w, t.htmlPage(m)); err != nil {
		return fmt.Errorf("writing report: %w", err)
	}
	return nil
}

// WriteReport writes the HTML account to path. The file appears whole or not at
// all, so that a crash never leaves half of one behind.
func WriteReport(path string, t *Timeline, m Meta) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("writing report: %w", err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
		}
	}()
	if err = t.WriteHTML(f, m); err != nil {
		return err
	}
	// It is made to be handed around.
	if err = f.Chmod(0o644); err != nil {
		return fmt.Errorf("writing report: %w", err)
	}
	if err = f.Close(); err != nil {
		return fmt.Errorf("writing report: %w", err)
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("writing report: %w", err)
	}
	return nil
}

// htmlPage is what the template shows: everything already put into words, so
// that the template only places it.
type htmlPage struct {
	Title, Name, Version    string
	Outcome, OutcomeText    string
	Started, StartedMachine string
	Facts                   []htmlFact
	Ticks                   []htmlTick
	Legend                  []htmlKey
	Rows                    []htmlRow
	Failures                []htmlFailure
	RunError, RunFix        string
	Findings                []htmlFinding
	ChecksLine              string
	Quiet                   []htmlFinding
	GatesLine               string
	Simulated, Interrupted  bool
	Critical                bool
}

type htmlFact struct{ Label, Value string }

type htmlTick struct {
	Left string
	Text string
}

type htmlKey struct{ Kind, Name string }

type htmlBar struct {
	Left, Width string
	State       State
	Kind        string
	Title       string
	Simulated   bool
}

type htmlRow struct {
	Anchor, Name, Title, Path string
	State                     State
	StateText                 string
	Start, Time               string
	Critical, Simulated       bool
	SimulatedBy               string
	Bar                       *htmlBar
	PhaseBars                 []htmlBar
	Phases                    []htmlPhase
	Message, Needs            string
}

type htmlPhase struct {
	Name, Start, Time, Count string
	State                    State
	Simulated                bool
	SimulatedBy              string
	Waits                    []htmlWait
	More                     int
}

type htmlWait struct{ At, For, Message string }

type htmlFailure struct {
	Anchor, What, Error, Fix, Wait string
}

type htmlFinding struct {
	Severity              finding.Severity
	ID, Title             string
	Measured, Required    string
	Fix, Evidence, Source string
}

func (t *Timeline) htmlPage(m Meta) htmlPage {
	stop := t.Stop()
	total := t.Elapsed(stop)
	p := htmlPage{
		Title: firstNonEmpty(m.Title, "llmbox"), Name: t.Name, Version: m.Version,
		Outcome: t.Outcome(), GatesLine: t.GatesLine(), Simulated: t.Simulated,
		Interrupted: t.Outcome() == OutcomeInterrupted,
	}
	switch p.Outcome {
	case OutcomeDone:
		p.OutcomeText = "done in " + short(total)
	case OutcomeFailed:
		p.OutcomeText = "failed after " + short(total)
	case OutcomeInterrupted:
		p.OutcomeText = "interrupted after " + short(total)
	default:
		p.OutcomeText = "not finished; last heard of after " + short(total)
	}
	if !t.Start.IsZero() {
		p.Started = t.Start.UTC().Format("2 January 2006, 15:04:05 UTC")
		p.StartedMachine = t.Start.UTC().Format(time.RFC3339)
	}
	p.Facts = t.htmlFacts()
	p.Ticks = ticks(total)
	var kinds map[string]string
	p.Legend, kinds = t.phaseKinds()
	for i, s := range t.Steps {
		row := t.htmlRow(s, fmt.Sprintf("step-%d", i+1), kinds)
		p.Critical = p.Critical || s.Critical
		p.Rows = append(p.Rows, row)
		if s.State == Failed {
			p.Failures = append(p.Failures, s.htmlFailure(row.Anchor, stop))
		}
	}
	if len(p.Failures) == 0 {
		p.RunError, p.RunFix = t.Error, t.Fix
	}
	if len(t.Findings) > 0 {
		p.ChecksLine = checksLine(t.Findings)
	}
	for _, f := range troubles(t.Findings) {
		p.Findings = append(p.Findings, newHTMLFinding(f))
	}
	for _, f := range t.Findings {
		if f.Severity != finding.Fail && f.Severity != finding.Warn {
			p.Quiet = append(p.Quiet, newHTMLFinding(f))
		}
	}
	return p
}

func (t *Timeline) htmlFacts() []htmlFact {
	over, _, failed := t.Counts()
	total := t.Elapsed(t.Stop())
	steps := fmt.Sprintf("%d of %d done", over, len(t.Steps))
	if failed > 0 {
		steps += fmt.Sprintf(", %d failed", failed)
	}
	facts := []htmlFact{{"Steps", steps}}
	if work, most, which := t.Overlap(); most > 1 && total > 0 {
		facts = append(facts, htmlFact{"In parallel", fmt.Sprintf("up to %d at once (%s); %s of work in %s",
			most, strings.Join(stepNames(which), ", "), short(work), short(total))})
	}
	if critical := t.CriticalSteps(); len(critical) > 1 {
		var parts []string
		var sum time.Duration
		for _, s := range critical {
			sum += s.Elapsed(t.Stop())
			parts = append(parts, s.Name+" "+short(s.Elapsed(t.Stop())))
		}
		facts = append(facts, htmlFact{"Critical path", strings.Join(parts, " → ") + " = " + short(sum)})
	}
	if t.Summary != nil {
		if t.Summary.Endpoint != "" {
			facts = append(facts, htmlFact{"Endpoint", t.Summary.Endpoint})
		}
		if n := t.Summary.GatesTotal; n > 0 {
			facts = append(facts, htmlFact{"Gates passed", fmt.Sprintf("%d, %d of them simulated", n, t.Summary.GatesSimulated)})
		}
	}
	return facts
}

// phaseKinds gives each kind of phase one colour in all rows, in the order in
// which a step that has them all goes through them.
func (t *Timeline) phaseKinds() (legend []htmlKey, kinds map[string]string) {
	const colors = 3
	last := map[string]int{}
	var names []string
	for _, s := range t.Steps {
		for i, p := range s.Phases {
			if _, known := last[p.Name]; !known {
				names = append(names, p.Name)
			}
			last[p.Name] = max(last[p.Name], i)
		}
	}
	slices.SortStableFunc(names, func(a, b string) int { return last[a] - last[b] })
	kinds = map[string]string{}
	for i, name := range names {
		kinds[name] = fmt.Sprintf("p%d", i%colors)
		if len(names) <= 2*colors {
			legend = append(legend, htmlKey{kinds[name], name})
		}
	}
	return legend, kinds
}

func (t *Timeline) htmlRow(s *Step, anchor string, kinds map[string]string) htmlRow {
	stop := t.Stop()
	by, simulated := s.Actors()
	row := htmlRow{
		Anchor: anchor, Name: s.Name, Title: s.Title, Path: s.Path, State: s.State, StateText: string(s.State),
		Start: "–", Time: "–", Critical: s.Critical, Simulated: simulated, SimulatedBy: strings.Join(by, ", "),
		Message: s.Message,
	}
	if s.State == Pending {
		row.StateText = "not started"
	}
	if s.State == Failed {
		// Said in full above.
		row.Message = ""
	}
	var needs []string
	for _, n := range s.Needs {
		if need := t.find(n); need != nil {
			needs = append(needs, need.Title)
		}
	}
	row.Needs = strings.Join(needs, ", ")
	if s.Start.IsZero() || s.State == Skipped {
		return row
	}
	row.Start, row.Time = clock(s.Start.Sub(t.Start)), short(s.Elapsed(stop))
	row.Bar = t.htmlBar(&s.Span, "step", s.Title)
	for _, p := range s.Phases {
		b := t.htmlBar(&p.Span, kinds[p.Name], p.Name)
		row.PhaseBars = append(row.PhaseBars, *b)
		hp := htmlPhase{
			Name: p.Name, Start: clock(p.Start.Sub(t.Start)), Time: short(p.Elapsed(stop)), State: p.State,
			Count: quantity(p.Done, p.Total, p.Unit), Simulated: p.Simulated, SimulatedBy: strings.Join(p.SimulatedBy, ", "),
		}
		if p.State == Done && p.Total > 0 {
			hp.Count = quantity(p.Done, 0, p.Unit)
		}
		// One reason that ended well is what the phase's name says already.
		if p.State != Done || len(p.waits) > 1 {
			hp.Waits, hp.More = p.htmlWaits(t)
		}
		row.Phases = append(row.Phases, hp)
	}
	if len(s.Phases) == 0 && len(s.waits) > 1 {
		hp := htmlPhase{Name: "work", Start: row.Start, Time: row.Time, State: s.State,
			Simulated: s.Simulated, SimulatedBy: row.SimulatedBy}
		hp.Waits, hp.More = s.htmlWaits(t)
		row.Phases = append(row.Phases, hp)
	}
	return row
}

// htmlWaits lists what a span waited for; more counts the reasons left out.
func (s *Span) htmlWaits(t *Timeline) (waits []htmlWait, more int) {
	const most = 30
	for i, w := range s.waits {
		if i == most {
			return waits, len(s.waits) - most
		}
		end := s.End
		if i+1 < len(s.waits) {
			end = s.waits[i+1].Since
		}
		if end.IsZero() {
			end = t.Stop()
		}
		waits = append(waits, htmlWait{clock(w.Since.Sub(t.Start)), short(end.Sub(w.Since)), w.Message})
	}
	return waits, 0
}

func (t *Timeline) htmlBar(s *Span, kind, name string) *htmlBar {
	total := t.Elapsed(t.Stop())
	if total <= 0 {
		total = time.Second
	}
	left := 100 * float64(s.Start.Sub(t.Start)) / float64(total)
	width := 100 * float64(s.Elapsed(t.Stop())) / float64(total)
	b := &htmlBar{
		Left: fmt.Sprintf("%.3f%%", min(max(left, 0), 100)), Width: fmt.Sprintf("%.3f%%", min(max(width, 0.1), 100)),
		State: s.State, Kind: kind, Simulated: s.Simulated,
		Title: fmt.Sprintf("%s: %s at %s", name, short(s.Elapsed(t.Stop())), clock(s.Start.Sub(t.Start))),
	}
	return b
}

func (s *Step) htmlFailure(anchor string, stop time.Time) htmlFailure {
	msg, fix := s.Trouble()
	f := htmlFailure{Anchor: anchor, What: s.Title + " failed after " + short(s.Elapsed(stop)), Error: msg, Fix: fix}
	if p := s.FailedPhase(); p != nil {
		f.What = s.Title + " failed in phase " + p.Name + " after " + short(s.Elapsed(stop))
	}
	if wait, d := s.LongestWait(); wait != "" && d >= time.Second && !strings.Contains(msg, wait) {
		f.Wait = wait + " (for " + short(d) + ")"
	}
	return f
}

func newHTMLFinding(f finding.Finding) htmlFinding {
	var places []string
	for _, e := range f.Evidence {
		places = append(places, joinNonEmpty(" ", e.File, e.Field, e.Line))
	}
	return htmlFinding{
		Severity: f.Severity, ID: f.ID, Title: f.Title, Measured: f.Measured, Required: f.Required,
		Fix: f.Fix, Evidence: strings.Join(places, "; "), Source: f.Source,
	}
}

// ticks divides the time axis into between three and seven round steps.
func ticks(total time.Duration) []htmlTick {
	if total <= 0 {
		return nil
	}
	steps := []time.Duration{
		100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond,
		time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 15 * time.Second, 30 * time.Second,
		time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute, 15 * time.Minute, 30 * time.Minute,
		time.Hour, 2 * time.Hour, 6 * time.Hour, 24 * time.Hour,
	}
	step := steps[len(steps)-1]
	for _, s := range steps {
		if total/s <= 6 {
			step = s
			break
		}
	}
	var out []htmlTick
	for at := time.Duration(0); at <= total; at += step {
		text := clock(at)
		if step < time.Second {
			text = short(at)
		}
		// A label at the very edge would stick out.
		if left := 100 * float64(at) / float64(total); left < 97 {
			out = append(out, htmlTick{fmt.Sprintf("%.3f%%", left), text})
		}
	}
	return out
}

func firstNonEmpty(all ...string) string {
	for _, s := range all {
		if s != "" {
			return s
		}
	}
	return ""
}
