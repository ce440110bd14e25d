package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/openai"
)

const testKey = "sk-test-0123456789"

// served is one request as the server got it.
type served struct {
	Model       string
	Messages    []openai.Message
	MaxTokens   int   `json:"max_tokens"`
	IgnoreEOS   bool  `json:"ignore_eos"`
	Temperature *int  `json:"temperature"`
	Number      int64 `json:"-"`
}

func (s served) prompt() string { return s.Messages[0].Content }

// server streams tokens, or does what fn does instead where that returns true. The first
// request is the one that doesn't count.
func server(t *testing.T, usage bool, fn func(w http.ResponseWriter, r *http.Request, in served) bool) (*openai.Client, *[]served) {
	t.Helper()
	var mu sync.Mutex
	var seen []served
	var count atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var in served
		raw, err := io.ReadAll(r.Body)
		if err == nil {
			err = json.Unmarshal(raw, &in)
		}
		if err != nil {
			t.Error(err)
			return
		}
		in.Number = count.Add(1) - 1
		mu.Lock()
		seen = append(seen, in)
		mu.Unlock()
		if fn != nil && fn(w, r, in) {
			return
		}
		stream(w, in.MaxTokens)
		if usage {
			_, _ = fmt.Fprintf(w, `data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}`+"\n\n", len(strings.Fields(in.prompt()))+9, 2*in.MaxTokens)
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	}))
	t.Cleanup(s.Close)
	return openai.New(s.Client(), s.URL, testKey, 10*time.Second), &seen
}

// stream writes n pieces.
func stream(w http.ResponseWriter, n int) {
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, `data: {"choices":[{"delta":{"role":"assistant","content":""}}]}`+"\n\n")
	for range n {
		_, _ = io.WriteString(w, `data: {"choices":[{"delta":{"content":"a"}}]}`+"\n\n")
		_ = http.NewResponseController(w).Flush()
	}
}

func parameters(concurrency ...int) Parameters {
	return Parameters{Concurrency: concurrency, Requests: 6, Seconds: 60, PromptTokens: 12, MaxTokens: 4, TimeoutSeconds: 20}
}

func TestMeasure(t *testing.T) {
	client, seen := server(t, true, nil)
	var told []Progress
	run := &Run{Asker: client, Model: "m", Parameters: parameters(1, 3), Salt: 7, Progress: func(p Progress) { told = append(told, p) }}
	levels, err := run.Measure(t.Context())
	if err != nil || len(levels) != 2 {
		t.Fatalf("%+v, %v", levels, err)
	}
	for i, l := range levels {
		if l.Concurrency != []int{1, 3}[i] || l.Requests != 6 || l.Succeeded != 6 || l.Ended != EndedRequests || l.failures() != 0 ||
			l.CountedBy != CountedByUsage || l.OutputTokens != 48 || l.Chunks != 24 || l.PromptTokens != 21 || l.TokensPerSecond <= 0 || l.FirstToken.P50 <= 0 {
			t.Errorf("%+v", l)
		}
		if err := l.check(run.Parameters); err != nil {
			t.Error(err)
		}
	}
	if len(*seen) != 13 {
		t.Fatalf("%d requests, want one that doesn't count and twelve that do", len(*seen))
	}
	beginnings := map[string]bool{}
	for _, in := range *seen {
		words := strings.Fields(in.prompt())
		if len(words) != 12 || in.Model != "m" || in.MaxTokens != 4 || !in.IgnoreEOS || in.Temperature == nil || *in.Temperature != 0 {
			t.Errorf("asked %+v", in)
		}
		beginnings[strings.Join(words[:4], " ")] = true
	}
	if len(beginnings) != 13 {
		t.Errorf("%d different beginnings of 13 prompts", len(beginnings))
	}
	if first, last := told[0], told[len(told)-1]; !first.Begun || first.Requests != 6 || !last.Ended || last.Done != 6 || last.Concurrency != 3 || len(told) != 16 {
		t.Errorf("told %+v", told)
	}
}

// Whatever fails is counted by its kind and in no average.
func TestFailures(t *testing.T) {
	status := func(code int) func(http.ResponseWriter, *http.Request, served) {
		return func(w http.ResponseWriter, _ *http.Request, in served) {
			http.Error(w, "no: "+in.prompt()+testKey, code)
		}
	}
	for _, c := range []struct {
		name string
		fail func(w http.ResponseWriter, r *http.Request, in served)
		want Failure
	}{
		{"a key that is refused", status(http.StatusUnauthorized), FailedKey},
		{"a key that may not", status(http.StatusForbidden), FailedKey},
		{"a limit", status(http.StatusTooManyRequests), FailedLimit},
		{"too long", status(http.StatusBadRequest), FailedRefused},
		{"no endpoint", status(http.StatusServiceUnavailable), FailedServer},
		{"a redirect", status(http.StatusFound), FailedOther},
		{"an error in the stream", func(w http.ResponseWriter, _ *http.Request, _ served) {
			stream(w, 2)
			_, _ = io.WriteString(w, `data: {"error":{"message":"out of memory"}}`+"\n\n")
		}, FailedCut},
		{"a cut stream", func(w http.ResponseWriter, _ *http.Request, _ served) { stream(w, 2) }, FailedCut},
		{"a broken line", func(http.ResponseWriter, *http.Request, served) { panic(http.ErrAbortHandler) }, FailedUnreachable},
		{"a broken line in the middle", func(w http.ResponseWriter, _ *http.Request, _ served) {
			stream(w, 2)
			panic(http.ErrAbortHandler)
		}, FailedCut},
		{"no end", func(w http.ResponseWriter, r *http.Request, _ served) {
			stream(w, 2)
			<-r.Context().Done()
		}, FailedTimeout},
		{"nothing said", func(w http.ResponseWriter, _ *http.Request, _ served) {
			stream(w, 0)
			_, _ = io.WriteString(w, "data: [DONE]\n\n")
		}, FailedEmpty},
		{"a page", func(w http.ResponseWriter, _ *http.Request, _ served) {
			_, _ = io.WriteString(w, "data: <html>\n\n")
		}, FailedOther},
	} {
		t.Run(c.name, func(t *testing.T) {
			client, _ := server(t, true, func(w http.ResponseWriter, r *http.Request, in served) bool {
				if in.Number%3 != 1 {
					return false
				}
				c.fail(w, r, in)
				return true
			})
			run := &Run{Asker: client, Model: "m", Parameters: parameters(2)}
			run.Parameters.TimeoutSeconds = 0.4
			levels, err := run.Measure(t.Context())
			if err != nil || len(levels) != 1 {
				t.Fatalf("%+v, %v", levels, err)
			}
			l := levels[0]
			if l.Failed[c.want] != 2 || l.failures() != 2 || l.Succeeded != 4 || l.Requests != 6 || l.OutputTokens != 32 {
				t.Errorf("%+v", l)
			}
			// A failed request takes up to its timeout; no average may show it.
			if l.FirstToken.Max >= 400 {
				t.Errorf("a failed request is in the figures: %+v", l.FirstToken)
			}
			if err := l.check(run.Parameters); err != nil {
				t.Error(err)
			}
			if raw, err := json.Marshal(l); err != nil || strings.Contains(string(raw), testKey) || strings.Contains(string(raw), "river") {
				t.Errorf("a key or a prompt in %s, %v", raw, err)
			}
			if c.want.Words() == "" {
				t.Error("no words")
			}
		})
	}
}

// A box where nothing works is not asked on and on.
func TestNothingSucceeds(t *testing.T) {
	client, seen := server(t, true, func(w http.ResponseWriter, _ *http.Request, in served) bool {
		if in.Number > 0 {
			http.Error(w, "", http.StatusTooManyRequests)
		}
		return in.Number > 0
	})
	levels, err := (&Run{Asker: client, Parameters: parameters(2, 4, 6)}).Measure(t.Context())
	if err != nil || len(levels) != 1 || levels[0].Failed[FailedLimit] != 6 || len(*seen) != 7 {
		t.Errorf("%+v after %d requests, %v", levels, len(*seen), err)
	}
	client, seen = server(t, true, func(w http.ResponseWriter, _ *http.Request, _ served) bool {
		http.Error(w, "", http.StatusUnauthorized)
		return true
	})
	var warm *WarmUpError
	var refused *openai.StatusError
	levels, err = (&Run{Asker: client, Parameters: parameters(2)}).Measure(t.Context())
	if !errors.As(err, &warm) || !errors.As(err, &refused) || refused.Code != http.StatusUnauthorized || levels != nil || len(*seen) != 1 {
		t.Errorf("%+v after %d requests, %v", levels, len(*seen), err)
	}
}

func TestMissingUsage(t *testing.T) {
	client, _ := server(t, false, nil)
	levels, err := (&Run{Asker: client, Parameters: parameters(2)}).Measure(t.Context())
	if err != nil || levels[0].CountedBy != CountedByChunks || levels[0].OutputTokens != 24 || levels[0].PromptTokens != 0 {
		t.Errorf("%+v, %v", levels, err)
	}
}

// The stop of a run leaves what was measured, and says what it cut off.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	client, _ := server(t, true, func(w http.ResponseWriter, r *http.Request, in served) bool {
		if in.Number <= 4 {
			return false
		}
		stream(w, 1)
		cancel()
		<-r.Context().Done()
		return true
	})
	levels, err := (&Run{Asker: client, Parameters: parameters(1, 2)}).Measure(ctx)
	if !errors.Is(err, context.Canceled) || len(levels) != 1 {
		t.Fatalf("%+v, %v", levels, err)
	}
	if l := levels[0]; l.Succeeded != 4 || l.Abandoned != 1 || l.Requests != 5 || l.failures() != 0 || l.Ended != EndedInterrupted {
		t.Errorf("%+v", l)
	}
	if _, err := (&Run{Asker: client, Parameters: parameters(1)}).Measure(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a run that was stopped before: %v", err)
	}
}

// clocked answers at once and lets its clock go on as a model would.
type clocked struct {
	mu             sync.Mutex
	now            time.Time
	first, between time.Duration
	asked          int
}

func (c *clocked) clock() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clocked) Chat(_ context.Context, in openai.Request, each func(openai.Delta) error) (openai.Answer, error) {
	c.mu.Lock()
	c.asked++
	wait := c.first * time.Duration(c.asked)
	c.mu.Unlock()
	for range in.MaxTokens {
		c.mu.Lock()
		c.now = c.now.Add(wait)
		c.mu.Unlock()
		wait = c.between
		if err := each(openai.Delta{Content: "a"}); err != nil {
			return openai.Answer{}, err
		}
	}
	return openai.Answer{Usage: &openai.Usage{PromptTokens: 20, CompletionTokens: int64(in.MaxTokens)}}, nil
}

// TestFigures holds the sums against ones that can be done by hand: the second request
// begins its answer after 20 ms, the third after 30, and so on, each of 5 tokens with 5 ms
// between them.
func TestFigures(t *testing.T) {
	model := &clocked{now: time.Unix(1e9, 0), first: 10 * time.Millisecond, between: 5 * time.Millisecond}
	run := &Run{Asker: model, Parameters: Parameters{Concurrency: []int{1}, Requests: 10, Seconds: 60, PromptTokens: 1, MaxTokens: 5, TimeoutSeconds: 60}, Now: model.clock}
	levels, err := run.Measure(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := Level{
		Concurrency: 1, Requests: 10, Succeeded: 10, Failed: map[Failure]int{}, Ended: EndedRequests, CountedBy: CountedByUsage,
		OutputTokens: 50, Chunks: 50, PromptTokens: 20,
		Seconds:    0.85, // 20 + … + 110 ms, and 10 × 4 × 5 ms
		FirstToken: Spread{P50: 60, P90: 100, P99: 110, Max: 110}, BetweenChunks: Spread{P50: 5, P90: 5, P99: 5, Max: 5},
		TokensPerSecond: 58.82, PerRequest: 200,
	}
	if got := fmt.Sprintf("%+v", levels[0]); got != fmt.Sprintf("%+v", want) {
		t.Errorf("got  %s\nwant %+v", got, want)
	}
	// And when its time is up it begins no further one.
	run.Parameters.Seconds = 0.1
	levels, err = run.Measure(t.Context())
	if err != nil || levels[0].Ended != EndedTime || levels[0].Requests >= 10 || levels[0].Succeeded != levels[0].Requests {
		t.Errorf("%+v, %v", levels, err)
	}
}

func TestSpread(t *testing.T) {
	for _, c := range []struct {
		n    int
		want Spread
	}{
		{0, Spread{}},
		{1, Spread{1, 1, 1, 1}},
		{2, Spread{1, 2, 2, 2}},
		{10, Spread{5, 9, 10, 10}},
		{100, Spread{50, 90, 99, 100}},
		{1000, Spread{500, 900, 990, 1000}},
	} {
		var times []time.Duration
		for i := range c.n {
			times = append(times, time.Duration(c.n-i)*time.Millisecond)
		}
		if got := spread(times); got != c.want {
			t.Errorf("of %d: %+v, want %+v", c.n, got, c.want)
		}
	}
}

func TestPrompts(t *testing.T) {
	one, again, other := prompt(1, 2, 3, 40), prompt(1, 2, 3, 40), prompt(9, 2, 3, 40)
	head := func(text string) string { return strings.Join(strings.Fields(text)[:saltedWords], " ") }
	if one != again || head(one) == head(other) || strings.TrimPrefix(one, head(one)) != strings.TrimPrefix(other, head(other)) {
		t.Errorf("%q\n%q\n%q", one, again, other)
	}
	if prompt(1, 1, 1, 40) == prompt(1, 1, 2, 40) || prompt(1, 1, 1, 40) == prompt(1, 2, 1, 40) {
		t.Error("two requests ask the same")
	}
}

func TestParameters(t *testing.T) {
	for name, spoil := range map[string]func(*Parameters){
		"no level":           func(p *Parameters) { p.Concurrency = nil },
		"too many levels":    func(p *Parameters) { p.Concurrency = []int{1, 2, 3, 4, 5, 6, 7, 8, 9} },
		"none at once":       func(p *Parameters) { p.Concurrency = []int{0} },
		"too many at once":   func(p *Parameters) { p.Concurrency = []int{257} },
		"twice":              func(p *Parameters) { p.Concurrency = []int{4, 4} },
		"requests":           func(p *Parameters) { p.Requests = 10001 },
		"fewer than at once": func(p *Parameters) { p.Requests = 3 },
		"less than none":     func(p *Parameters) { p.Requests = -1 },
		"no time":            func(p *Parameters) { p.Seconds = 0 },
		"all day":            func(p *Parameters) { p.Seconds = 86400 },
		"no prompt":          func(p *Parameters) { p.PromptTokens = 0 },
		"a book":             func(p *Parameters) { p.PromptTokens = 1 << 20 },
		"no answer":          func(p *Parameters) { p.MaxTokens = 0 },
		"a long answer":      func(p *Parameters) { p.MaxTokens = 8193 },
		"no timeout":         func(p *Parameters) { p.TimeoutSeconds = 0 },
		"too much to keep":   func(p *Parameters) { p.Requests, p.MaxTokens = 10000, 8192 },
	} {
		p := parameters(1, 4)
		spoil(&p)
		if err := p.Check(); !errors.Is(err, ErrParameters) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := (&Run{Parameters: p}).Measure(t.Context()); !errors.Is(err, ErrParameters) {
			t.Errorf("%s is measured: %v", name, err)
		}
	}
	if n := (Parameters{}).requests(1); n != 16 {
		t.Errorf("%d requests", n)
	}
	if n := (Parameters{}).requests(64); n != 256 {
		t.Errorf("%d requests", n)
	}
}
