package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode"
)

const (
	// Kind and Schema are what a result states of itself; a change of a figure's meaning
	// is another schema.
	Kind   = "llmbox-bench"
	Schema = 1
	// maxResultBytes is far more than the largest result.
	maxResultBytes = 256 << 10
	maxTextBytes   = 512
)

// ErrResult says that a file is no result that this release reads.
var ErrResult = errors.New("not a result of llmbox bench")

// Result is one measurement, as it is kept.
type Result struct {
	Kind   string `json:"kind"`
	Schema int    `json:"schema"`
	// Measured is when the first level began.
	Measured time.Time `json:"measured"`
	// LLMBox is the version that measured.
	LLMBox     string     `json:"llmbox"`
	Box        Box        `json:"box"`
	Parameters Parameters `json:"parameters"`
	// CutOff: the run was stopped before its end.
	CutOff bool    `json:"cut_off"`
	Levels []Level `json:"levels"`
}

// Box is what was measured, as far as it is known.
type Box struct {
	Model string `json:"model,omitempty"`
	// ServedName is the name that was asked for.
	ServedName string `json:"served_name"`
	Revision   string `json:"revision,omitempty"`
	// Image is the model server's.
	Image string `json:"image,omitempty"`
	GPU   string `json:"gpu,omitempty"`
	GPUs  int    `json:"gpus,omitempty"`
}

// NewResult puts a result together.
func NewResult(measured time.Time, version string, box Box, p Parameters, levels []Level, cutOff bool) Result {
	return Result{
		Kind: Kind, Schema: Schema, Measured: measured.UTC().Truncate(time.Second), LLMBox: version, Box: box, Parameters: p,
		Levels: slices.Concat([]Level{}, levels), CutOff: cutOff,
	}
}

// Failures is how many requests failed, Succeeded how many did not.
func (r Result) Failures() int {
	sum := 0
	for _, l := range r.Levels {
		sum += l.failures()
	}
	return sum
}

// Succeeded is how many requests succeeded.
func (r Result) Succeeded() int {
	sum := 0
	for _, l := range r.Levels {
		sum += l.Succeeded
	}
	return sum
}

// Save writes a result to a file, which appears whole or not at all. Whoever may read the
// folder may read it: it holds no secret, and is made to be handed on.
func Save(path string, r Result) (err error) {
	raw, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the result: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("saving the result: %w", err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
			err = fmt.Errorf("saving the result: %w", err)
		}
	}()
	if _, err = f.Write(append(raw, '\n')); err != nil {
		return err
	}
	if err = f.Chmod(0o644); err != nil {
		return err
	}
	if err = f.Sync(); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// Load reads a result from a file.
func Load(path string) (Result, error) {
	f, err := os.Open(path) // #nosec G304 -- the file that the person names
	if err != nil {
		return Result{}, fmt.Errorf("reading a result: %w", err)
	}
	defer func() { _ = f.Close() }()
	r, err := Read(f)
	if err != nil {
		return Result{}, fmt.Errorf("reading %s: %w", path, err)
	}
	return r, nil
}

// Read reads a result without trust: it may come from anywhere.
func Read(in io.Reader) (Result, error) {
	raw, err := io.ReadAll(io.LimitReader(in, maxResultBytes+1))
	if err != nil {
		return Result{}, fmt.Errorf("reading a result: %w", err)
	}
	if len(raw) > maxResultBytes {
		return Result{}, fmt.Errorf("%w: it has more than %d bytes", ErrResult, maxResultBytes)
	}
	// What it is comes first: a later schema has fields that this release doesn't know.
	var head struct {
		Kind   string `json:"kind"`
		Schema int    `json:"schema"`
	}
	if err := json.Unmarshal(raw, &head); err != nil || head.Kind != Kind {
		return Result{}, fmt.Errorf("%w: no JSON document of the kind %q", ErrResult, Kind)
	}
	if head.Schema != Schema {
		return Result{}, fmt.Errorf("%w: schema %d, this release reads %d", ErrResult, head.Schema, Schema)
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	var r Result
	if err := dec.Decode(&r); err != nil {
		return Result{}, fmt.Errorf("%w: %w", ErrResult, err)
	}
	if err := r.check(); err != nil {
		return Result{}, fmt.Errorf("%w: %w", ErrResult, err)
	}
	return r, nil
}

// check refuses what no measurement gives.
func (r Result) check() error {
	for _, text := range []string{r.LLMBox, r.Box.Model, r.Box.ServedName, r.Box.Revision, r.Box.Image, r.Box.GPU} {
		if len(text) > maxTextBytes || strings.ContainsFunc(text, unicode.IsControl) {
			return errors.New("a name that is none")
		}
	}
	switch {
	case r.Measured.IsZero() || r.Measured.Year() < 2000 || r.Measured.Year() > 9999:
		return errors.New("measured at no time")
	case r.Box.GPUs < 0 || r.Box.GPUs > 1<<16:
		return fmt.Errorf("%d GPUs", r.Box.GPUs)
	case len(r.Levels) > len(r.Parameters.Concurrency):
		return fmt.Errorf("%d levels where %d were asked for", len(r.Levels), len(r.Parameters.Concurrency))
	}
	if err := r.Parameters.Check(); err != nil {
		return err
	}
	for i, l := range r.Levels {
		if l.Concurrency != r.Parameters.Concurrency[i] {
			return fmt.Errorf("level %d has %d requests at once, %d were asked for", i+1, l.Concurrency, r.Parameters.Concurrency[i])
		}
		if err := l.check(r.Parameters); err != nil {
			return fmt.Errorf("level %d: %w", i+1, err)
		}
	}
	return nil
}

func (l Level) check(p Parameters) error {
	sum := l.Succeeded + l.Abandoned
	for kind, n := range l.Failed {
		if !slices.Contains(Failures(), kind) || n < 1 || n > MaxRequests {
			return errors.New("a kind of failure that there is not")
		}
		sum += n
	}
	figures := []float64{l.Seconds, l.PromptTokens, l.TokensPerSecond, l.PerRequest, float64(l.OutputTokens), float64(l.Chunks)}
	for _, s := range []Spread{l.FirstToken, l.BetweenChunks} {
		if s.P50 > s.P90 || s.P90 > s.P99 || s.P99 > s.Max {
			return errors.New("percentiles that don't grow")
		}
		figures = append(figures, s.P50, s.P90, s.P99, s.Max)
	}
	for _, x := range figures {
		if math.IsNaN(x) || x < 0 || x > 1e12 {
			return fmt.Errorf("a figure of %v", x)
		}
	}
	switch {
	case l.Succeeded < 0 || l.Abandoned < 0 || l.Requests < 1 || l.Requests > p.requests(l.Concurrency) || sum != l.Requests:
		return fmt.Errorf("%d of %d requests are accounted for", sum, l.Requests)
	case !slices.Contains([]string{EndedRequests, EndedTime, EndedInterrupted}, l.Ended):
		return errors.New("it has no end")
	case l.Succeeded > 0 != slices.Contains([]string{CountedByUsage, CountedByChunks, CountedMixed}, l.CountedBy), l.Succeeded == 0 && l.CountedBy != "":
		return errors.New("tokens are counted in no way that there is")
	case l.Succeeded == 0 && (l.OutputTokens != 0 || l.Chunks != 0 || l.FirstToken != (Spread{}) || l.BetweenChunks != (Spread{})):
		return errors.New("figures of no request")
	}
	return nil
}
