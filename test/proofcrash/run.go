package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/llmbox-dev/llmbox/internal/event"
)

// runLimit bounds one install; a loaded machine takes minutes for the CRDs.
const runLimit = 15 * time.Minute

// command is how llmbox is called in every run of a series.
type command struct {
	program    string
	kubeconfig string
	port       int
}

func (c command) install(ctx context.Context) *exec.Cmd {
	// #nosec G204 -- the project's own program
	return exec.CommandContext(ctx, c.program, "install", "--output", "json",
		"--kubeconfig", c.kubeconfig, "--port", strconv.Itoa(c.port), "--log-file", os.DevNull)
}

// account is what was seen of one run.
type account struct {
	Exit int
	// Killed says that our signal ended it.
	Killed bool
	// At is the step and type of the event after which it was killed.
	At string
	// KilledAfter is the time from the start of the process to the signal.
	KilledAfter time.Duration
	Took        time.Duration
	// Steps holds how long each step took.
	Steps map[string]time.Duration
	Error string
}

// follow runs an install to its end, or kills it at the point of a trial. The
// events go to a file, for whoever wants to know what happened.
func (c command) follow(ctx context.Context, file string, t *trial, usual map[string]time.Duration) (account, error) {
	ctx, cancel := context.WithTimeout(ctx, runLimit)
	defer cancel()
	a := account{Steps: map[string]time.Duration{}}
	kept, err := os.Create(file) // #nosec G304 -- in the directory made for this series
	if err != nil {
		return a, fmt.Errorf("keeping the events: %w", err)
	}
	defer func() { _ = kept.Close() }()
	said, err := os.Create(file + ".stderr") // #nosec G304 -- as above
	if err != nil {
		return a, fmt.Errorf("keeping the messages: %w", err)
	}
	defer func() { _ = said.Close() }()
	cmd := c.install(ctx)
	cmd.Stderr = said
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return a, fmt.Errorf("running llmbox: %w", err)
	}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return a, fmt.Errorf("running llmbox: %w", err)
	}
	events := make(chan event.Event)
	go read(stdout, kept, events)

	kill := make(<-chan time.Time)
	last := ""
	strike := func() {
		if a.At == "" {
			a.At, a.KilledAfter = last, time.Since(began)
			// A process that has just ended is found out from how it ended.
			_ = cmd.Process.Kill()
		}
	}
	for open := true; open; {
		select {
		case e, more := <-events:
			if open = more; !more {
				break
			}
			last = e.Step + " " + string(e.Type)
			if e.Type == event.StepDone {
				a.Steps[e.Step] = time.Duration(e.ElapsedMS) * time.Millisecond
			}
			if e.Type == event.StepFailed || e.Type == event.RunDone && e.Error != "" {
				a.Error = e.Step + ": " + e.Error
			}
			if t == nil || e.Step != t.Step {
				break
			}
			switch {
			case t.Place == before && e.Type == event.StepStarted, e.Type == event.StepDone:
				strike()
			case t.Place == inside && e.Type == event.StepStarted:
				kill = time.After(time.Duration(t.Fraction * float64(usual[t.Step])))
			}
		case <-kill:
			strike()
		}
	}
	err = cmd.Wait()
	a.Took = time.Since(began)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		status, ok := exit.Sys().(syscall.WaitStatus)
		a.Killed = ok && status.Signaled() && status.Signal() == syscall.SIGKILL && a.At != ""
		a.Exit = exit.ExitCode()
		return a, ctx.Err()
	}
	return a, err
}

func read(stdout interface{ Read([]byte) (int, error) }, kept *os.File, events chan<- event.Event) {
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

func eventsFile(dir, name string) string { return filepath.Join(dir, name+".ndjson") }
