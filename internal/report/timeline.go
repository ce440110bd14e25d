package report

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/finding"
)

// State says how far a step or phase is.
type State string

// The states of a step. Stopped means that the run ended while the step was
// at work; a step still Pending when the run is over never started.
const (
	Pending State = "pending"
	Running State = "running"
	Done    State = "done"
	Failed  State = "failed"
	Skipped State = "skipped"
	Stopped State = "stopped"
)

// The outcomes of a run, as event.Summary names them. OutcomeUnfinished stands
// for a stream that ends without run.done.
const (
	OutcomeDone        = "done"
	OutcomeFailed      = "failed"
	OutcomeInterrupted = "interrupted"
	OutcomeUnfinished  = "unfinished"
)

// maxWaits bounds the reasons kept per step, so that a gate that flaps for an
// hour doesn't grow the account without end.
const maxWaits = 200

// Wait is one reason a step gave for not being finished, from the moment it was
// first heard.
type Wait struct {
	Since   time.Time
	Message string
}

// Span is what steps and phases have in common.
type Span struct {
	// Path is the step's path in the events; Name the part of it a person
	// needs to tell it from its siblings.
	Path  string
	Name  string
	State State
	Start time.Time
	// End is zero while the span is open.
	End time.Time
	// Message is the newest thing said about it.
	Message     string
	Done, Total int64
	Unit        string
	Error, Fix  string
	Simulated   bool
	SimulatedBy []string
	waits       []Wait
	lostWaits   bool
}

// Phase is a part of a step, such as its CRDs, its release or its gate.
type Phase struct{ Span }

// Step is one top-level step of the plan.
type Step struct {
	Span
	Title  string
	Needs  []string
	Phases []*Phase
	// Critical is set by Finish for the steps that bounded the run.
	Critical bool
}

// Timeline is the account of a run that the stream adds up to. It isn't safe
// for concurrent use; Recorder is.
type Timeline struct {
	// Name is what run.started called the run.
	Name       string
	Start, End time.Time
	Steps      []*Step
	Findings   []finding.Finding
	// Simulated tells whether any answer came from a rehearsal actor.
	Simulated bool
	// Summary is nil until run.done.
	Summary *event.Summary
	// Error and Fix are what run.done itself said about a failure.
	Error, Fix string
	// last is the time of the newest event; it bounds open spans of a stream
	// that ends in the middle.
	last   time.Time
	begun  bool
	byPath map[string]*Step
}

// NewTimeline makes an empty account.
func NewTimeline() *Timeline {
	return &Timeline{byPath: map[string]*Step{}}
}

// Apply adds one event to the account.
func (t *Timeline) Apply(e event.Event) {
	if e.Time.After(t.last) {
		t.last = e.Time
	}
	if t.Start.IsZero() {
		t.Start = e.Time
	}
	t.Simulated = t.Simulated || e.Simulated
	switch e.Type {
	case event.RunStarted:
		t.begin(e)
	case event.RunDone:
		t.finish(e)
	case event.FindingMade:
		if e.Finding != nil {
			t.Findings = append(t.Findings, *e.Finding)
		}
	case event.StepStarted, event.StepProgress, event.StepDone, event.StepFailed, event.StepSkipped:
		t.applyStep(e)
	case event.Log:
	}
}

// begin takes the plan. Steps that came before it (a rehearsal starts a cluster
// first) belong to the run; a second plan in one stream is a new run, as in a
// log that a resumed run was appended to.
func (t *Timeline) begin(e event.Event) {
	if t.begun {
		*t = *NewTimeline()
		t.Start, t.last = e.Time, e.Time
	}
	t.begun, t.Name = true, e.Message
	for _, p := range e.Plan {
		s := t.step(p.Step)
		s.Title, s.Needs = p.Title, p.Needs
		if s.Title == "" {
			s.Title = s.Name
		}
	}
	t.nameSteps()
}

// nameSteps gives each step the shortest name that is its own: "keda" for
// component/keda, the whole path where two groups share a name.
func (t *Timeline) nameSteps() {
	count := map[string]int{}
	for _, s := range t.Steps {
		count[lastSegment(s.Path)]++
	}
	for _, s := range t.Steps {
		s.Name = lastSegment(s.Path)
		if count[s.Name] > 1 {
			s.Name = s.Path
		}
		if s.Title == "" {
			s.Title = s.Name
		}
	}
}

func (t *Timeline) finish(e event.Event) {
	t.End, t.Summary, t.Error, t.Fix = e.Time, e.Summary, e.Error, e.Fix
	if t.Summary == nil {
		t.Summary = &event.Summary{Outcome: OutcomeDone}
		if e.Error != "" {
			t.Summary.Outcome = OutcomeFailed
		}
	}
	for _, s := range t.Steps {
		s.stop(e.Time)
		for _, p := range s.Phases {
			p.stop(e.Time)
		}
	}
	critical := t.Summary.CriticalPath
	if len(critical) == 0 {
		critical = t.criticalPath()
	}
	for _, c := range critical {
		if s := t.find(c); s != nil {
			s.Critical = true
		}
	}
}

func (t *Timeline) applyStep(e event.Event) {
	top, rest := splitPath(e.Step)
	if top == "" {
		return
	}
	known := t.byPath[top] != nil
	s := t.step(top)
	if !known {
		// Nobody announced it: what it says of itself has to do for a title.
		if rest == "" && e.Type == event.StepStarted {
			s.Title, e.Message = e.Message, ""
		}
		t.nameSteps()
	}
	if rest == "" {
		s.apply(e)
		if s.State == Running || s.State == Pending {
			return
		}
		// A step that ended takes its open phases with it.
		for _, p := range s.Phases {
			if p.State == Running {
				p.State, p.End = s.State, e.Time
			}
		}
		return
	}
	p := s.phase(rest, e.Step)
	p.apply(e)
	// A phase speaks for its step: work on it means that the step runs, and its
	// newest reason is the step's.
	if s.State == Pending && e.Type != event.StepSkipped {
		s.State, s.Start = Running, p.Start
	}
	if s.State == Running {
		switch e.Type {
		case event.StepProgress:
			s.say(e)
		case event.StepStarted, event.StepDone:
			s.Message, s.Done, s.Total, s.Unit = "", 0, 0, ""
		}
	}
}

func (s *Span) apply(e event.Event) {
	s.Simulated = s.Simulated || e.Simulated
	for _, by := range e.SimulatedBy {
		if !slices.Contains(s.SimulatedBy, by) {
			s.SimulatedBy = append(s.SimulatedBy, by)
		}
	}
	begin := func() {
		if s.Start.IsZero() {
			s.Start = e.Time.Add(-time.Duration(e.ElapsedMS) * time.Millisecond)
		}
	}
	switch e.Type {
	case event.StepStarted:
		// Started again after an end means another attempt: the clock goes on,
		// the verdict is open again.
		if s.Start.IsZero() {
			s.Start = e.Time
		}
		s.State, s.End, s.Error, s.Fix = Running, time.Time{}, "", ""
		s.Message = e.Message
	case event.StepProgress:
		begin()
		s.State, s.End = Running, time.Time{}
		s.say(e)
	case event.StepDone:
		begin()
		s.State, s.End, s.Message = Done, e.Time, e.Message
		if e.Done > 0 || e.Total > 0 {
			s.Done, s.Total, s.Unit = e.Done, e.Total, e.Unit
		}
	case event.StepFailed:
		begin()
		s.State, s.End, s.Message = Failed, e.Time, e.Message
		s.Error, s.Fix = e.Error, e.Fix
	case event.StepSkipped:
		begin()
		s.State, s.End, s.Message = Skipped, e.Time, e.Message
	}
}

// say takes the newest reason and keeps the ones before it.
func (s *Span) say(e event.Event) {
	s.Done, s.Total, s.Unit = e.Done, e.Total, e.Unit
	if e.Message == "" {
		return
	}
	s.Message = e.Message
	if n := len(s.waits); n > 0 && s.waits[n-1].Message == e.Message {
		return
	}
	if len(s.waits) >= maxWaits {
		s.lostWaits = true
		return
	}
	s.waits = append(s.waits, Wait{Since: e.Time, Message: e.Message})
}

func (s *Span) stop(at time.Time) {
	if s.State == Running {
		s.State, s.End = Stopped, at
	}
}

// Waits returns the reasons the span gave, oldest first.
func (s *Span) Waits() []Wait { return s.waits }

// LongestWait returns the reason that held the longest, and for how long.
func (s *Span) LongestWait() (string, time.Duration) {
	var message string
	var longest time.Duration
	sum := map[string]time.Duration{}
	for i, w := range s.waits {
		end := s.End
		if i+1 < len(s.waits) {
			end = s.waits[i+1].Since
		}
		if end.IsZero() || s.lostWaits && i+1 == len(s.waits) {
			continue
		}
		sum[w.Message] += end.Sub(w.Since)
		if sum[w.Message] > longest {
			message, longest = w.Message, sum[w.Message]
		}
	}
	return message, longest
}

// Elapsed is how long the span took, or has taken by now.
func (s *Span) Elapsed(now time.Time) time.Duration {
	if s.Start.IsZero() || s.State == Skipped {
		return 0
	}
	if !s.End.IsZero() {
		now = s.End
	}
	return max(now.Sub(s.Start), 0)
}

// Current returns the phase at work, the newest of several, or nil.
func (s *Step) Current() *Phase {
	for i := len(s.Phases) - 1; i >= 0; i-- {
		if s.Phases[i].State == Running {
			return s.Phases[i]
		}
	}
	return nil
}

// FailedPhase returns the phase that failed, or nil.
func (s *Step) FailedPhase() *Phase {
	for _, p := range s.Phases {
		if p.State == Failed {
			return p
		}
	}
	return nil
}

// Trouble returns error and fix of a failed step; a step that has none of its
// own speaks with its failed phase's words.
func (s *Step) Trouble() (msg, fix string) {
	msg, fix = s.Error, s.Fix
	if p := s.FailedPhase(); p != nil {
		if msg == "" {
			msg = p.Error
		}
		if fix == "" {
			fix = p.Fix
		}
	}
	if msg == "" {
		msg = s.Message
	}
	return msg, fix
}

// Actors returns the rehearsal actors that answered for the step, and whether
// any answer was simulated at all.
func (s *Step) Actors() ([]string, bool) {
	simulated := s.Simulated
	by := slices.Clone(s.SimulatedBy)
	for _, p := range s.Phases {
		simulated = simulated || p.Simulated
		for _, a := range p.SimulatedBy {
			if !slices.Contains(by, a) {
				by = append(by, a)
			}
		}
	}
	slices.Sort(by)
	return by, simulated
}

func (s *Step) phase(name, path string) *Phase {
	for _, p := range s.Phases {
		if p.Name == name {
			return p
		}
	}
	p := &Phase{Span{Path: path, Name: name, State: Pending}}
	s.Phases = append(s.Phases, p)
	return p
}

func (t *Timeline) step(path string) *Step {
	if s := t.byPath[path]; s != nil {
		return s
	}
	s := &Step{Span: Span{Path: path, Name: lastSegment(path), State: Pending}}
	t.byPath[path] = s
	t.Steps = append(t.Steps, s)
	return s
}

// find looks a step up by its path or by its last segment, the two ways in
// which a plan's needs may name it.
func (t *Timeline) find(name string) *Step {
	if s := t.byPath[name]; s != nil {
		return s
	}
	for _, s := range t.Steps {
		if s.Name == name {
			return s
		}
	}
	return nil
}

// blocked says whether a step was skipped because something it needs failed, as
// opposed to because there was nothing to do.
func (t *Timeline) blocked(s *Step) bool { return t.blockedBelow(s, map[*Step]bool{}) }

func (t *Timeline) blockedBelow(s *Step, seen map[*Step]bool) bool {
	if s.State != Skipped || seen[s] {
		return false
	}
	seen[s] = true
	for _, n := range s.Needs {
		need := t.find(n)
		if need != nil && (need.State == Failed || t.blockedBelow(need, seen)) {
			return true
		}
	}
	return false
}

// over says whether a step needs no more attention.
func (t *Timeline) over(s *Step) bool {
	return s.State == Done || s.State == Skipped && !t.blocked(s)
}

// Counts returns how many steps are over (done, or skipped because there was
// nothing to do), at work, and failed.
func (t *Timeline) Counts() (over, running, failed int) {
	for _, s := range t.Steps {
		switch s.State {
		case Done, Skipped:
			if t.over(s) {
				over++
			}
		case Running:
			running++
		case Failed:
			failed++
		case Pending, Stopped:
		}
	}
	return over, running, failed
}

// Fraction is the part of the run that is behind us, 0 to 1: whole steps, plus
// what the steps at work report about themselves.
func (t *Timeline) Fraction() float64 {
	if len(t.Steps) == 0 {
		return 0
	}
	var sum float64
	for _, s := range t.Steps {
		switch s.State {
		case Done, Skipped:
			if t.over(s) {
				sum++
			}
		case Running:
			sum += s.fraction()
		case Pending, Failed, Stopped:
		}
	}
	return sum / float64(len(t.Steps))
}

func (s *Step) fraction() float64 {
	if s.Total > 0 {
		return min(float64(s.Done)/float64(s.Total), 1) * 0.9
	}
	// How many phases are still to come isn't announced, and the last one, the
	// waiting, is the longest.
	over := 0
	for _, p := range s.Phases {
		if p.State == Done || p.State == Skipped {
			over++
		}
	}
	return min(0.2*float64(over), 0.6)
}

// Next returns the steps that can start as soon as those at work are done, in
// the order of the plan.
func (t *Timeline) Next() []*Step {
	var next []*Step
	for _, s := range t.Steps {
		if s.State != Pending {
			continue
		}
		ready := true
		for _, n := range s.Needs {
			if need := t.find(n); need != nil && need.State != Done && need.State != Skipped && need.State != Running {
				ready = false
				break
			}
		}
		if ready {
			next = append(next, s)
		}
	}
	return next
}

// WaitsFor returns the needs of a step that aren't met yet.
func (t *Timeline) WaitsFor(s *Step) []*Step {
	var open []*Step
	for _, n := range s.Needs {
		if need := t.find(n); need != nil && need.State != Done && need.State != Skipped {
			open = append(open, need)
		}
	}
	return open
}

// Outcome is the run's outcome, OutcomeUnfinished before run.done.
func (t *Timeline) Outcome() string {
	if t.Summary == nil {
		return OutcomeUnfinished
	}
	return t.Summary.Outcome
}

// Stop is when the account ends: at run.done, else at the newest event.
func (t *Timeline) Stop() time.Time {
	if !t.End.IsZero() {
		return t.End
	}
	return t.last
}

// Elapsed is the time from the start of the run to its end or to now.
func (t *Timeline) Elapsed(now time.Time) time.Duration {
	if t.Start.IsZero() {
		return 0
	}
	if !t.End.IsZero() {
		now = t.End
	}
	return max(now.Sub(t.Start), 0)
}

// criticalPath walks back from the step that ended last along the need that
// ended last: the chain that bounded the run.
func (t *Timeline) criticalPath() []string {
	var last *Step
	for _, s := range t.Steps {
		if s.worked() && (last == nil || s.End.After(last.End)) {
			last = s
		}
	}
	var path []string
	seen := map[*Step]bool{}
	for s := last; s != nil && !seen[s]; {
		seen[s] = true
		path = append(path, s.Path)
		var prev *Step
		for _, n := range s.Needs {
			if need := t.find(n); need != nil && need.worked() && (prev == nil || need.End.After(prev.End)) {
				prev = need
			}
		}
		s = prev
	}
	slices.Reverse(path)
	return path
}

func (s *Step) worked() bool {
	return !s.Start.IsZero() && !s.End.IsZero() && s.State != Skipped
}

// CriticalSteps returns the steps that bounded the run, first to last.
func (t *Timeline) CriticalSteps() []*Step {
	path := []string(nil)
	if t.Summary != nil {
		path = t.Summary.CriticalPath
	}
	if len(path) == 0 {
		path = t.criticalPath()
	}
	var steps []*Step
	for _, p := range path {
		if s := t.find(p); s != nil {
			steps = append(steps, s)
		}
	}
	return steps
}

// Overlap says how much ran at once: the sum of all steps' times, the largest
// number of steps at work at one moment, and which ones those were.
func (t *Timeline) Overlap() (work time.Duration, most int, which []*Step) {
	stop := t.Stop()
	for _, s := range t.Steps {
		work += s.Elapsed(stop)
	}
	for _, at := range t.Steps {
		if at.Start.IsZero() || at.State == Skipped {
			continue
		}
		var now []*Step
		for _, s := range t.Steps {
			if s.Start.IsZero() || s.State == Skipped || s.Start.After(at.Start) {
				continue
			}
			if s.End.IsZero() || s.End.After(at.Start) {
				now = append(now, s)
			}
		}
		if len(now) > most {
			most, which = len(now), now
		}
	}
	return work, most, which
}

// GatesLine is the last line of a rehearsal's account; empty when no gate was
// simulated.
func (t *Timeline) GatesLine() string {
	if t.Summary == nil || t.Summary.GatesSimulated == 0 {
		return ""
	}
	total, simulated := t.Summary.GatesTotal, t.Summary.GatesSimulated
	return fmt.Sprintf("%d of %d gates were answered by rehearsal actors (simulated), %d by real parts.",
		simulated, total, total-simulated)
}

func (t *Timeline) clone() *Timeline {
	c := *t
	c.byPath = make(map[string]*Step, len(t.Steps))
	c.Steps = make([]*Step, len(t.Steps))
	c.Findings = slices.Clone(t.Findings)
	for i, s := range t.Steps {
		n := *s
		n.Span = s.clone()
		n.Phases = make([]*Phase, len(s.Phases))
		for j, p := range s.Phases {
			n.Phases[j] = &Phase{p.clone()}
		}
		c.Steps[i], c.byPath[s.Path] = &n, &n
	}
	return &c
}

func (s *Span) clone() Span {
	c := *s
	c.waits, c.SimulatedBy = slices.Clone(s.waits), slices.Clone(s.SimulatedBy)
	return c
}

// Recorder is a sink that keeps the account of a run.
type Recorder struct {
	mu sync.Mutex
	t  *Timeline
}

// NewRecorder makes a Recorder.
func NewRecorder() *Recorder { return &Recorder{t: NewTimeline()} }

// Emit implements event.Sink.
func (r *Recorder) Emit(e event.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.t.Apply(e)
}

// Timeline returns the account so far, as a copy of the caller's own.
func (r *Recorder) Timeline() *Timeline {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.t.clone()
}

// ReadTimeline adds up a recorded stream of NDJSON. A last line cut short by a
// crash is left out.
func ReadTimeline(r io.Reader) (*Timeline, error) {
	t := NewTimeline()
	err := ReadEvents(r, func(e event.Event) { t.Apply(e) })
	return t, err
}

// ReadEvents hands each event of a recorded stream of NDJSON to yield. A last
// line cut short by a crash is left out.
func ReadEvents(r io.Reader, yield func(event.Event)) error {
	in := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		whole := err == nil
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("reading events: %w", err)
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			var e event.Event
			switch jsonErr := json.Unmarshal(line, &e); {
			case jsonErr == nil:
				yield(e)
			case whole:
				return fmt.Errorf("reading events: line %d: %w", n, jsonErr)
			}
		}
		if !whole {
			return nil
		}
	}
}

// splitPath cuts a step's path into that of its top-level step (two segments)
// and the phase below it.
func splitPath(path string) (top, phase string) {
	path = strings.Trim(path, "/")
	parts := strings.SplitN(path, "/", 3)
	if len(parts) < 3 {
		return path, ""
	}
	return parts[0] + "/" + parts[1], parts[2]
}

func lastSegment(path string) string {
	return path[strings.LastIndexByte(path, '/')+1:]
}
