// Package cutoff runs llmbox, follows its events and kills it at a chosen point, for the
// proofs that a run which was cut off is simply run again. It knows how a run is cut off
// and how two ends are compared, and nothing of what is installed where.
package cutoff

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/llmbox-dev/llmbox/internal/event"
)

// RunLimit bounds one run; a loaded machine takes minutes for the CRDs.
const RunLimit = 15 * time.Minute

// Place says where, seen from a step, a run is killed.
type Place string

const (
	// Before is the moment at which the step is announced and nothing is done.
	Before Place = "before"
	// Inside is a part of its usual duration later.
	Inside Place = "inside"
	// After is the moment at which it is done and the next thing has not begun.
	After Place = "after"
)

// Aim is the point of a run at which it is killed.
type Aim struct {
	// Step is the path in the events, Place where in it.
	Step string
	// Says narrows it to a part of the step: what the events of its progress say up to a
	// colon. Such a part ends with the next word of its step.
	Says  string
	Place Place
	// Fraction of the usual duration after which to kill, for Inside.
	Fraction float64
}

// Name is how the account calls what is aimed at.
func (a Aim) Name() string { return strings.TrimSpace(a.Step + " " + a.Says) }

// Command is one way of calling llmbox.
type Command struct {
	// Start makes the process; its standard output is the events.
	Start func(ctx context.Context) *exec.Cmd
	// Kill ends it at once; by SIGKILL to the process that was started where nil.
	Kill func(*os.Process) error
}

// Account is what was seen of one run.
type Account struct {
	Exit int
	// Killed says that our signal ended it.
	Killed bool
	// At is the step and type of the event after which it was killed.
	At string
	// KilledAfter is the time from the start of the process to the signal.
	KilledAfter time.Duration
	Took        time.Duration
	// Steps holds how long each step took, and each part that progress spoke of.
	Steps map[string]time.Duration
	// Unchanged are the steps that said so.
	Unchanged []string
	Error     string
}

// Follow runs a command to its end, or kills it at the point that is aimed at. The
// events go to a file, for whoever wants to know what happened.
func Follow(ctx context.Context, c Command, file string, aim *Aim, usual map[string]time.Duration) (Account, error) {
	ctx, cancel := context.WithTimeout(ctx, RunLimit)
	defer cancel()
	w := &watch{aim: aim, usual: usual, parts: map[string]part{}, account: Account{Steps: map[string]time.Duration{}}}
	kept, err := os.Create(file) // #nosec G304 -- in the directory made for this series
	if err != nil {
		return w.account, fmt.Errorf("keeping the events: %w", err)
	}
	defer func() { _ = kept.Close() }()
	said, err := os.Create(file + ".stderr") // #nosec G304 -- as above
	if err != nil {
		return w.account, fmt.Errorf("keeping the messages: %w", err)
	}
	defer func() { _ = said.Close() }()
	cmd := c.Start(ctx)
	cmd.Stderr = said
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return w.account, fmt.Errorf("running llmbox: %w", err)
	}
	w.began = time.Now()
	if err := cmd.Start(); err != nil {
		return w.account, fmt.Errorf("running llmbox: %w", err)
	}
	events := make(chan event.Event)
	go read(stdout, kept, events)
	if c.Kill == nil {
		c.Kill = (*os.Process).Kill
	}
	killing := w.follow(events, func() error { return c.Kill(cmd.Process) })
	err = cmd.Wait()
	w.account.Took = time.Since(w.began)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		status, ok := exit.Sys().(syscall.WaitStatus)
		w.account.Killed = ok && status.Signaled() && status.Signal() == syscall.SIGKILL && w.account.At != ""
		w.account.Exit = exit.ExitCode()
		return w.account, errors.Join(ctx.Err(), killing)
	}
	return w.account, errors.Join(err, killing)
}

// part is what the progress of a step speaks of at present.
type part struct {
	name  string
	began time.Time
}

// watch is the state of following one run.
type watch struct {
	aim     *Aim
	usual   map[string]time.Duration
	began   time.Time
	last    string
	parts   map[string]part
	kill    <-chan time.Time
	account Account
}

func (w *watch) follow(events <-chan event.Event, kill func() error) error {
	var killing error
	strike := func() {
		if w.account.At == "" {
			w.account.At, w.account.KilledAfter = w.last, time.Since(w.began)
			// A process that has just ended is found out from how it ended.
			if err := kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
				killing = err
			}
		}
	}
	for {
		select {
		case e, more := <-events:
			if !more {
				return killing
			}
			if w.see(e) {
				strike()
			}
		case <-w.kill:
			strike()
		}
	}
}

// see takes an event in and says whether to strike at once.
func (w *watch) see(e event.Event) bool {
	now := time.Now()
	w.last = e.Step + " " + string(e.Type)
	starts, ends := e.Step, ""
	switch e.Type {
	case event.StepStarted:
	case event.StepDone:
		w.account.Steps[e.Step] = time.Duration(e.ElapsedMS) * time.Millisecond
		if e.Message == "unchanged" {
			w.account.Unchanged = append(w.account.Unchanged, e.Step)
		}
		starts, ends = "", e.Step
	case event.StepProgress:
		title, _, _ := strings.Cut(e.Message, ":")
		starts = e.Step + " " + title
		if w.parts[e.Step].name == starts {
			return false
		}
		w.last += " " + title
	case event.StepFailed:
		w.account.Error = e.Step + ": " + e.Error
		starts = ""
	case event.RunDone:
		if e.Error != "" {
			w.account.Error = e.Step + ": " + e.Error
		}
		starts = ""
	default:
		return false
	}
	struck := false
	if before, open := w.parts[e.Step]; open {
		w.account.Steps[before.name] = now.Sub(before.began)
		delete(w.parts, e.Step)
		struck = w.struck(before.name, After)
	}
	if e.Type == event.StepProgress {
		w.parts[e.Step] = part{name: starts, began: now}
	}
	return struck || w.struck(ends, After) || w.struck(starts, Before)
}

// struck says whether the beginning (Before) or the end (After) of something is the
// moment, and winds the clock where the moment comes later.
func (w *watch) struck(name string, moment Place) bool {
	if w.aim == nil || name == "" || name != w.aim.Name() {
		return false
	}
	if moment == After {
		// Too late for an aim inside; who sees that aims anew.
		return true
	}
	if w.aim.Place == Inside {
		w.kill = time.After(time.Duration(w.aim.Fraction * float64(w.usual[name])))
	}
	return w.aim.Place == Before
}

func read(stdout io.Reader, kept io.Writer, events chan<- event.Event) {
	defer close(events)
	lines := bufio.NewScanner(stdout)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		// A line that is cut off by the kill is no event.
		var e event.Event
		if json.Unmarshal(lines.Bytes(), &e) == nil {
			events <- e
		}
		_, _ = fmt.Fprintf(kept, "%s\n", lines.Bytes())
	}
}

// EventsFile is where the events of a run are kept.
func EventsFile(dir, name string) string { return filepath.Join(dir, name+".ndjson") }
