package report

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/llmbox-dev/llmbox/internal/event"
)

// ErrGone means that a run ended without saying how.
var ErrGone = errors.New("the run ended without a word")

// followPause is how often a log is looked at for more.
const followPause = 200 * time.Millisecond

// Follow hands on the events of a log that another process writes, from its beginning
// until run.done, which it returns. alive says whether that process is still there: one
// that died says nothing more.
func Follow(ctx context.Context, path string, alive func() bool, emit func(event.Event)) (event.Event, error) {
	file, err := os.Open(path) // #nosec G304 -- the log that the run itself named
	if err != nil {
		return event.Event{}, fmt.Errorf("following the run: %w", err)
	}
	defer func() { _ = file.Close() }()
	in := bufio.NewReader(file)
	var line bytes.Buffer
	for last := false; ; {
		part, err := in.ReadBytes('\n')
		line.Write(part)
		switch {
		case err == nil:
			var e event.Event
			// A line that is none was cut off by a crash of before.
			if json.Unmarshal(line.Bytes(), &e) == nil && e.Type != "" {
				emit(e)
				if e.Type == event.RunDone {
					return e, nil
				}
			}
			line.Reset()
			continue
		case !errors.Is(err, io.EOF):
			return event.Event{}, fmt.Errorf("following the run: %w", err)
		case last:
			return event.Event{}, ErrGone
		}
		// What it wrote before it ended is read once more.
		last = !alive()
		select {
		case <-ctx.Done():
			return event.Event{}, context.Cause(ctx)
		case <-time.After(followPause):
		}
	}
}
