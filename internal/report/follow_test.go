package report

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/event"
)

func TestFollow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run.ndjson")
	log, err := OpenLog(path)
	if err != nil {
		t.Fatal(err)
	}
	log.Emit(event.Event{Type: event.RunStarted})
	var seen []event.Type
	started := make(chan struct{})
	type end struct {
		last event.Event
		err  error
	}
	ended := make(chan end, 1)
	go func() {
		last, err := Follow(t.Context(), path, func() bool { return true }, func(e event.Event) {
			if seen = append(seen, e.Type); len(seen) == 1 {
				close(started)
			}
		})
		ended <- end{last, err}
	}()
	<-started
	// A line that comes in two writes, and one that a crash has cut.
	for _, part := range []string{`{"type":"step.st`, `arted","step":"component/keda"}` + "\n", `{"type":"step.` + "\n"} {
		if _, err := log.out.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * followPause)
	}
	log.Emit(event.Event{Type: event.RunDone, Summary: &event.Summary{Outcome: "done"}})
	got := <-ended
	if got.err != nil || got.last.Summary == nil || got.last.Summary.Outcome != "done" {
		t.Errorf("it ends with %+v, %v", got.last, got.err)
	}
	if len(seen) != 3 || seen[1] != event.StepStarted || seen[2] != event.RunDone {
		t.Errorf("seen are %q", seen)
	}
}

func TestFollowARunThatDied(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run.ndjson")
	log, err := OpenLog(path)
	if err != nil {
		t.Fatal(err)
	}
	log.Emit(event.Event{Type: event.RunStarted})
	var seen atomic.Int64
	if _, err := Follow(t.Context(), path, func() bool { return false }, func(event.Event) { seen.Add(1) }); !errors.Is(err, ErrGone) || seen.Load() != 1 {
		t.Errorf("%d events, %v", seen.Load(), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), followPause)
	defer cancel()
	if _, err := Follow(ctx, path, func() bool { return true }, func(event.Event) {}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("whoever looks on leaves with %v", err)
	}
	if _, err := Follow(t.Context(), filepath.Join(t.TempDir(), "none"), nil, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a log that is not there: %v", err)
	}
}
