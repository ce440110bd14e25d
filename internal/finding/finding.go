// Package finding holds the shape of one judged check: what was looked at,
// what was measured, what is required and how to mend it. It only describes;
// it must not know how facts are collected or how a finding is shown.
package finding

// Severity says how bad a finding is.
type Severity string

// The severities, from harmless to blocking.
const (
	OK   Severity = "ok"
	Info Severity = "info"
	Warn Severity = "warn"
	Fail Severity = "fail"
)

// State says whether the check could be judged at all.
type State string

// Absent, unreadable and not applicable are three different things; wait means
// that the answer is expected to change by itself.
const (
	Judged        State = "judged"
	Unreadable    State = "unreadable"
	NotApplicable State = "not_applicable"
	Wait          State = "wait"
)

// Evidence names the place a judgement rests on.
type Evidence struct {
	File  string `json:"file,omitempty"`
	Field string `json:"field,omitempty"`
	Line  string `json:"line,omitempty"`
}

// Finding is the outcome of one check. The list of findings holds every check
// that ran, ok ones included, roots first.
type Finding struct {
	// ID is dotted and stable, such as "gpu.driver.mismatch".
	ID       string   `json:"id"`
	Severity Severity `json:"severity"`
	State    State    `json:"state"`
	// Strict findings can't be ignored by --ignore.
	Strict   bool   `json:"strict,omitempty"`
	Title    string `json:"title"`
	Measured string `json:"measured,omitempty"`
	Required string `json:"required,omitempty"`
	// Fix is what a person types, with absolute paths.
	Fix string `json:"fix,omitempty"`
	// Repair names a safe repair that llmbox can do itself, if there is one.
	Repair   string     `json:"repair,omitempty"`
	Evidence []Evidence `json:"evidence,omitempty"`
	// Causes lists the ids of findings that make this one a follower.
	Causes []string `json:"causes,omitempty"`
	// Source is the public failure report or document the rule comes from.
	Source string `json:"source,omitempty"`
}
