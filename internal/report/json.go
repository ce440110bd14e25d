package report

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/llmbox-dev/llmbox/internal/event"
)

//go:embed event.schema.json
var schema []byte

// Schema returns the JSON Schema of one event, the contract of --output json.
func Schema() []byte { return bytes.Clone(schema) }

// JSON writes events as NDJSON: one event a line, each in one write, so that a
// reader sees it at once and a crash cuts at most the last line.
type JSON struct {
	mu  sync.Mutex
	out io.Writer
	end io.Closer
	err error
}

// NewJSON makes an NDJSON renderer that writes to w.
func NewJSON(w io.Writer) *JSON { return &JSON{out: w} }

// OpenLog opens the log file at path for NDJSON. A file that exists is added
// to: a resumed run belongs behind the one it goes on from. Events may name
// hosts and paths, so only the owner can read it.
func OpenLog(path string) (*JSON, error) {
	path = filepath.Clean(path)
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, fmt.Errorf("opening log file: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening log file: %w", err)
	}
	return &JSON{out: f, end: f}, nil
}

// Emit implements event.Sink.
func (j *JSON) Emit(e event.Event) {
	var line bytes.Buffer
	enc := json.NewEncoder(&line)
	// URLs and shell commands stay readable; nobody pastes NDJSON into HTML.
	enc.SetEscapeHTML(false)
	err := enc.Encode(e)
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err != nil {
		return
	}
	if err == nil {
		_, err = j.out.Write(line.Bytes())
	}
	if err != nil {
		j.err = fmt.Errorf("writing event: %w", err)
	}
}

// Close closes a log file and returns the first error of writing.
func (j *JSON) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.end == nil {
		return j.err
	}
	err := j.end.Close()
	j.end = nil
	if err != nil {
		err = fmt.Errorf("closing log file: %w", err)
	}
	j.err = errors.Join(j.err, err)
	return j.err
}
