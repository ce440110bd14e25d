// Package event holds the one stream that everything a person sees is made of:
// the terminal screen, plain lines, NDJSON and the final report are renderers
// over it. It must not know who emits an event or how it is drawn.
package event

import (
	"time"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

// Type names what happened.
type Type string

// The event types, in the order a run produces them.
const (
	RunStarted   Type = "run.started"
	StepStarted  Type = "step.started"
	StepProgress Type = "step.progress"
	StepDone     Type = "step.done"
	StepFailed   Type = "step.failed"
	StepSkipped  Type = "step.skipped"
	FindingMade  Type = "finding"
	Log          Type = "log"
	RunDone      Type = "run.done"
)

// PlannedStep is one row of the plan that run.started announces, so that a
// renderer can show what is still to come.
type PlannedStep struct {
	// Step is the path of a top-level step, such as "component/keda".
	Step  string   `json:"step"`
	Title string   `json:"title"`
	Needs []string `json:"needs,omitempty"`
}

// Event is one line of NDJSON.
//
// Step is a slash-separated path. Top-level steps have two segments
// ("component/keda"); phases inside have three ("component/keda/crds",
// "component/keda/release", "component/keda/ready"). For step.progress the
// Message holds what is being waited for and the newest reason.
type Event struct {
	Time    time.Time `json:"time"`
	Type    Type      `json:"type"`
	Step    string    `json:"step,omitempty"`
	Message string    `json:"message,omitempty"`
	// Done and Total count Unit ("objects", "bytes"); Total 0 means unknown.
	Done  int64  `json:"done,omitempty"`
	Total int64  `json:"total,omitempty"`
	Unit  string `json:"unit,omitempty"`
	// Error is the whole chain of a failure, one line, without secrets.
	Error string `json:"error,omitempty"`
	// Fix is the way out of a failure, as a person would type it.
	Fix string `json:"fix,omitempty"`
	// ElapsedMS is the time since the step (or the run) started, in milliseconds.
	ElapsedMS int64 `json:"elapsed_ms,omitempty"`
	// Simulated says that a rehearsal actor gave the answer this event reports.
	Simulated bool `json:"simulated,omitempty"`
	// SimulatedBy names the actors, as the cluster's annotations do.
	SimulatedBy []string `json:"simulated_by,omitempty"`
	// Finding is set on events of type "finding".
	Finding *finding.Finding `json:"finding,omitempty"`
	// Plan is set on run.started.
	Plan []PlannedStep `json:"plan,omitempty"`
	// Summary is set on run.done.
	Summary *Summary `json:"summary,omitempty"`
}

// Summary is the account of a whole run.
type Summary struct {
	// Outcome is "done", "failed" or "interrupted".
	Outcome string `json:"outcome"`
	// Endpoint is the base URL of the OpenAI-compatible API, when it serves.
	Endpoint string `json:"endpoint,omitempty"`
	// GatesTotal counts the readiness gates that were passed, GatesSimulated
	// those of them that a rehearsal actor answered.
	GatesTotal     int `json:"gates_total"`
	GatesSimulated int `json:"gates_simulated"`
	// CriticalPath lists the steps that bounded the run, first to last.
	CriticalPath []string `json:"critical_path,omitempty"`
}

// Sink takes events. Emit must be safe for concurrent use and must not block
// for longer than writing the event takes.
type Sink interface {
	Emit(Event)
}

// SinkFunc makes a function a Sink.
type SinkFunc func(Event)

// Emit calls f.
func (f SinkFunc) Emit(e Event) { f(e) }

// Fanout hands each event to every sink, in order.
type Fanout []Sink

// Emit implements Sink.
func (f Fanout) Emit(e Event) {
	for _, s := range f {
		s.Emit(e)
	}
}
