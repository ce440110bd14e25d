// Package bench measures how a model is served: the time to the first token, the gaps
// between tokens, and how many come in a second, at several numbers of requests at once.
// It keeps the load within bounds, counts what fails by its kind and apart from what
// succeeds, and writes and reads results that two boxes can be compared by.
//
// It must not know Kubernetes, the box, how a key or an address is found or how anything
// is shown. Keys never reach it, and prompts never leave it but to the model.
package bench

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/llmbox-dev/llmbox/internal/openai"
)

// Bounds of what may be asked for. They keep a slip of the finger from becoming a load
// test of somebody else's box.
const (
	MaxConcurrency  = 256
	MaxLevels       = 8
	MaxRequests     = 10000
	MaxDuration     = time.Hour
	MaxPromptTokens = 65536
	MaxAnswerTokens = 8192
	MaxTimeout      = time.Hour
	// maxTimes bounds what is kept of one level: a time for each token.
	maxTimes = 4 << 20
)

// ErrParameters says that what is asked for is out of bounds.
var ErrParameters = errors.New("this can't be measured")

// Asker asks a model and hands over each piece of its answer as it comes;
// *openai.Client is one.
type Asker interface {
	Chat(ctx context.Context, in openai.Request, each func(openai.Delta) error) (openai.Answer, error)
}

// Parameters is what is measured.
type Parameters struct {
	// Concurrency lists how many requests are under way at once, one level each.
	Concurrency []int `json:"concurrency"`
	// Requests is how many requests a level has; 0 takes 4 for each at once, 16 at least.
	Requests int `json:"requests"`
	// Seconds is after how long a level begins no further request.
	Seconds float64 `json:"seconds"`
	// PromptTokens is about how long a prompt is: that many words.
	PromptTokens int `json:"prompt_tokens"`
	// MaxTokens is how long each answer is.
	MaxTokens int `json:"max_tokens"`
	// TimeoutSeconds is the longest a request may take.
	TimeoutSeconds float64 `json:"timeout_seconds"`
}

// Check holds parameters against the bounds.
func (p Parameters) Check() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{ErrParameters}, args...)...)
	}
	switch {
	case len(p.Concurrency) < 1 || len(p.Concurrency) > MaxLevels:
		return bad("%d numbers of requests at once, 1 to %d can be given", len(p.Concurrency), MaxLevels)
	case p.Requests < 0 || p.Requests > MaxRequests:
		return bad("%d requests a level, at most %d can be", p.Requests, MaxRequests)
	case !(p.Seconds > 0) || p.Seconds > MaxDuration.Seconds():
		return bad("%v seconds a level, more than 0 and at most %v can be", p.Seconds, MaxDuration.Seconds())
	case p.PromptTokens < 1 || p.PromptTokens > MaxPromptTokens:
		return bad("prompts of %d tokens, 1 to %d can be", p.PromptTokens, MaxPromptTokens)
	case p.MaxTokens < 1 || p.MaxTokens > MaxAnswerTokens:
		return bad("answers of %d tokens, 1 to %d can be", p.MaxTokens, MaxAnswerTokens)
	case !(p.TimeoutSeconds > 0) || p.TimeoutSeconds > MaxTimeout.Seconds():
		return bad("a timeout of %v seconds, more than 0 and at most %v can be", p.TimeoutSeconds, MaxTimeout.Seconds())
	}
	for i, n := range p.Concurrency {
		switch {
		case n < 1 || n > MaxConcurrency:
			return bad("%d requests at once, 1 to %d can be", n, MaxConcurrency)
		case slices.Contains(p.Concurrency[:i], n):
			return bad("%d requests at once are named twice", n)
		case p.Requests > 0 && p.Requests < n:
			return bad("%d requests can't be %d at once", p.Requests, n)
		case p.requests(n)*p.MaxTokens > maxTimes:
			return bad("%d requests of %d tokens are more than the %d tokens that a level may have", p.requests(n), p.MaxTokens, maxTimes)
		}
	}
	return nil
}

// requests is how many a level with n at once has.
func (p Parameters) requests(n int) int {
	if p.Requests > 0 {
		return p.Requests
	}
	return max(16, 4*n)
}

// Progress is how far a level is.
type Progress struct {
	Concurrency            int
	Done, Failed, Requests int
	// Begun is true once, before the first request; Ended once, after the last.
	Begun, Ended bool
}

// Run is one measurement.
type Run struct {
	Asker Asker
	// Model is the name to ask for.
	Model      string
	Parameters Parameters
	// Salt makes this run's prompts begin in other words than those of any run before,
	// whose beginnings the model server may have kept.
	Salt uint64
	// Progress is told how far it is, by one goroutine at a time.
	Progress func(Progress)
	// Now is the clock; time.Now if nil.
	Now func() time.Time
}

// WarmUpError means that the request which comes before the measurement failed.
type WarmUpError struct{ Err error }

func (e *WarmUpError) Error() string { return "asking once before measuring: " + e.Err.Error() }

// Unwrap is why it failed.
func (e *WarmUpError) Unwrap() error { return e.Err }

// Measure asks once without counting it, and then runs each level. An end of ctx ends
// what is under way; what was measured until then is returned with its error. After a
// level in which nothing succeeded no further one is begun.
func (r *Run) Measure(ctx context.Context) ([]Level, error) {
	if err := r.Parameters.Check(); err != nil {
		return nil, err
	}
	if r.Now == nil {
		r.Now = time.Now
	}
	warm := r.one(ctx, 0, 0)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case warm.err != nil:
		return nil, &WarmUpError{warm.err}
	}
	var levels []Level
	for i, n := range r.Parameters.Concurrency {
		level := r.level(ctx, i+1, n)
		if level.Requests > 0 {
			levels = append(levels, level)
		}
		if ctx.Err() != nil {
			return levels, ctx.Err()
		}
		if level.Succeeded == 0 {
			return levels, nil
		}
	}
	return levels, nil
}

// request is what one question came to.
type request struct {
	err error
	// kind is how it failed; empty if it did not.
	kind Failure
	// cut: the run ended under it.
	cut           bool
	first         time.Duration
	gaps          []time.Duration
	answered      time.Duration
	prompt        int64
	tokens        int64
	fromUsage     bool
	chunks        int
	began, finish time.Time
}

// level runs as many requests as a level has, n at once.
func (r *Run) level(ctx context.Context, number, n int) Level {
	total := r.Parameters.requests(n)
	deadline := r.Now().Add(time.Duration(r.Parameters.Seconds * float64(time.Second)))
	var (
		mu     sync.Mutex
		next   int
		failed int
		all    []request
		timeUp bool
	)
	tell := func(p Progress) {
		if r.Progress != nil {
			p.Concurrency, p.Requests, p.Done, p.Failed = n, total, len(all), failed
			r.Progress(p)
		}
	}
	tell(Progress{Begun: true})
	take := func() (int, bool) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case next >= total || ctx.Err() != nil:
			return 0, false
		case !r.Now().Before(deadline):
			timeUp = true
			return 0, false
		}
		next++
		return next, true
	}
	var workers sync.WaitGroup
	for range min(n, total) {
		workers.Go(func() {
			for {
				index, ok := take()
				if !ok {
					return
				}
				got := r.one(ctx, number, index)
				mu.Lock()
				all = append(all, got)
				if got.kind != "" {
					failed++
				}
				tell(Progress{})
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	tell(Progress{Ended: true})
	out := summarise(n, all)
	switch {
	case ctx.Err() != nil:
		out.Ended = EndedInterrupted
	case timeUp:
		out.Ended = EndedTime
	default:
		out.Ended = EndedRequests
	}
	return out
}

// one asks one question and keeps its times.
func (r *Run) one(ctx context.Context, level, index int) request {
	asking, cancel := context.WithTimeout(ctx, time.Duration(r.Parameters.TimeoutSeconds*float64(time.Second)))
	defer cancel()
	zero := 0.0
	in := openai.Request{
		Model: r.Model, Messages: []openai.Message{{Role: "user", Content: prompt(r.Salt, level, index, r.Parameters.PromptTokens)}},
		MaxTokens: r.Parameters.MaxTokens, Temperature: &zero, IgnoreEOS: true,
	}
	out := request{began: r.Now()}
	last := out.began
	answer, err := r.Asker.Chat(asking, in, func(openai.Delta) error {
		now := r.Now()
		if out.chunks++; out.chunks == 1 {
			out.first = now.Sub(out.began)
		} else {
			out.gaps = append(out.gaps, now.Sub(last))
		}
		last = now
		return nil
	})
	out.finish = r.Now()
	switch {
	case err != nil && ctx.Err() != nil:
		out.cut = true
		return out
	case err != nil:
		out.err, out.kind = err, kindOf(err)
		return out
	case out.chunks == 0:
		out.err, out.kind = errEmpty, FailedEmpty
		return out
	}
	out.answered = last.Sub(out.began) - out.first
	out.tokens = int64(out.chunks)
	if u := answer.Usage; u != nil && u.CompletionTokens > 0 {
		out.tokens, out.prompt, out.fromUsage = u.CompletionTokens, max(0, u.PromptTokens), true
	}
	return out
}

var errEmpty = errors.New("the answer holds nothing")

// Failure is a kind of failed request.
type Failure string

// The kinds.
const (
	// FailedKey: 401 or 403.
	FailedKey Failure = "key_refused"
	// FailedLimit: 429.
	FailedLimit Failure = "rate_limited"
	// FailedRefused: any other 4xx.
	FailedRefused Failure = "refused"
	// FailedServer: 5xx.
	FailedServer Failure = "server_error"
	// FailedTimeout: no end, or no further token, within the timeout.
	FailedTimeout Failure = "timeout"
	// FailedCut: the stream ended before the answer did.
	FailedCut Failure = "cut_stream"
	// FailedUnreachable: no HTTP answer.
	FailedUnreachable Failure = "unreachable"
	// FailedEmpty: an answer without a token.
	FailedEmpty Failure = "empty"
	// FailedOther: something else than an answer of such an API.
	FailedOther Failure = "other"
)

// Failures lists the kinds in the order in which they are shown.
func Failures() []Failure {
	return []Failure{FailedKey, FailedLimit, FailedRefused, FailedServer, FailedTimeout, FailedCut, FailedUnreachable, FailedEmpty, FailedOther}
}

// Words says a kind for people.
func (f Failure) Words() string {
	switch f {
	case FailedKey:
		return "key refused (401, 403)"
	case FailedLimit:
		return "rate limit (429)"
	case FailedRefused:
		return "refused (4xx)"
	case FailedServer:
		return "server error (5xx)"
	case FailedTimeout:
		return "timeout"
	case FailedCut:
		return "stream cut off"
	case FailedUnreachable:
		return "no answer"
	case FailedEmpty:
		return "empty answer"
	}
	return "not such an API"
}

func kindOf(err error) Failure {
	var status *openai.StatusError
	var silent *openai.SilenceError
	var broke *openai.StreamError
	switch {
	case errors.As(err, &status):
		switch {
		case status.Code == http.StatusUnauthorized || status.Code == http.StatusForbidden:
			return FailedKey
		case status.Code == http.StatusTooManyRequests:
			return FailedLimit
		case status.Code >= http.StatusInternalServerError:
			return FailedServer
		case status.Code >= http.StatusBadRequest:
			return FailedRefused
		}
		return FailedOther
	case errors.As(err, &silent), errors.Is(err, context.DeadlineExceeded):
		return FailedTimeout
	case errors.As(err, &broke), errors.Is(err, openai.ErrCut):
		return FailedCut
	case errors.Is(err, openai.ErrUnreachable):
		return FailedUnreachable
	}
	return FailedOther
}
