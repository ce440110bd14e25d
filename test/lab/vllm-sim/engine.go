package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const maxBodyBytes = 16 << 20

// engine answers requests at a given pace, so many at a time.
type engine struct {
	options
	slots   chan struct{}
	stopped chan struct{}
	stop    sync.Once
	ids     atomic.Int64
	metrics *metrics

	running, waiting atomic.Int64
}

func newEngine(o options) *engine {
	return &engine{options: o, slots: make(chan struct{}, o.maxRunning), stopped: make(chan struct{}), metrics: newMetrics(o.drafts)}
}

func (e *engine) load() (running, waiting int64) { return e.running.Load(), e.waiting.Load() }

// abort ends what runs.
func (e *engine) abort() { e.stop.Do(func() { close(e.stopped) }) }

func (e *engine) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /ping", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		write(w, http.StatusOK, map[string]any{"version": "vllm-sim"})
	})
	mux.HandleFunc("GET /load", func(w http.ResponseWriter, _ *http.Request) {
		write(w, http.StatusOK, map[string]any{"server_load": e.running.Load() + e.waiting.Load()})
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		running, waiting := e.load()
		e.metrics.write(w, e.served[0], running, waiting, e.maxRunning, e.model)
	})
	mux.HandleFunc("GET /v1/models", e.models)
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) { e.complete(w, r, false) })
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) { e.complete(w, r, true) })
	return e.metrics.count(mux)
}

func (e *engine) models(w http.ResponseWriter, _ *http.Request) {
	data := []any{}
	for _, name := range e.served {
		data = append(data, map[string]any{"id": name, "object": "model", "created": time.Now().Unix(), "owned_by": "vllm", "root": e.model, "max_model_len": e.maxLen})
	}
	write(w, http.StatusOK, map[string]any{"object": "list", "data": data})
}

// question is what of an OpenAI request changes the answer.
type question struct {
	Model         string            `json:"model"`
	Prompt        json.RawMessage   `json:"prompt"`
	Messages      []json.RawMessage `json:"messages"`
	MaxTokens     *int              `json:"max_tokens"`
	MaxCompletion *int              `json:"max_completion_tokens"`
	Stream        bool              `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
}

func (e *engine) complete(w http.ResponseWriter, r *http.Request, chat bool) {
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBodyBytes))
	var q question
	if err == nil {
		err = json.Unmarshal(raw, &q)
	}
	switch {
	case err != nil:
		refuse(w, http.StatusBadRequest, "BadRequestError", "reading the request: "+err.Error())
		return
	case q.Model != "" && !slices.Contains(e.served, q.Model):
		refuse(w, http.StatusNotFound, "NotFoundError", fmt.Sprintf("The model `%s` does not exist.", q.Model))
		return
	case chat && len(q.Messages) == 0, !chat && len(q.Prompt) == 0:
		refuse(w, http.StatusBadRequest, "BadRequestError", "there is no prompt")
		return
	}
	if q.Model == "" {
		q.Model = e.served[0]
	}
	prompt := max(1, len(raw)/4) // about four bytes a token
	if prompt > e.maxLen {
		refuse(w, http.StatusBadRequest, "BadRequestError", fmt.Sprintf("This model's maximum context length is %d tokens.", e.maxLen))
		return
	}
	e.answer(w, r, &q, chat, prompt)
}

// tokens are the answer, at most as many as asked for.
func (q *question) tokens() (words []string, finish string) {
	words, finish = strings.SplitAfter("This answer comes from a stand-in for vLLM and means nothing at all .", " "), "stop"
	limit := len(words)
	for _, l := range []*int{q.MaxTokens, q.MaxCompletion} {
		if l != nil && *l > 0 {
			limit, finish = *l, "length"
		}
	}
	for len(words) < limit && finish == "length" { // a long answer was asked for
		words = append(words, " more")
	}
	if limit < len(words) {
		return words[:limit], "length"
	}
	return words, finish
}

func (e *engine) answer(w http.ResponseWriter, r *http.Request, q *question, chat bool, prompt int) {
	asked := time.Now()
	e.waiting.Add(1)
	select {
	case e.slots <- struct{}{}:
		e.waiting.Add(-1)
	case <-r.Context().Done():
		e.waiting.Add(-1)
		e.metrics.ended("abort")
		return
	case <-e.stopped:
		e.waiting.Add(-1)
		refuse(w, http.StatusServiceUnavailable, "ServiceUnavailable", "the server is ending")
		return
	}
	e.running.Add(1)
	defer func() { e.running.Add(-1); <-e.slots }()
	admitted := time.Now()

	words, finish := q.tokens()
	usage := map[string]any{"prompt_tokens": prompt, "completion_tokens": len(words), "total_tokens": prompt + len(words)}
	base := map[string]any{"id": "sim-" + strconv.FormatInt(e.ids.Add(1), 10), "created": asked.Unix(), "model": q.Model}
	shape := map[bool][2]string{true: {"chat.completion", "chat.completion.chunk"}, false: {"text_completion", "text_completion"}}[chat]
	stream := http.NewResponseController(w)
	send := func(chunk map[string]any) error {
		raw, err := json.Marshal(with(base, chunk, map[string]any{"object": shape[1]}))
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(w, "data: %s\n\n", raw); err != nil {
			return err
		}
		return stream.Flush()
	}
	if q.Stream {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.Header().Set("Cache-Control", "no-cache")
	}
	var first, last time.Time
	for i, word := range words {
		pause := e.perToken
		if i == 0 {
			pause = e.prefill
		}
		if !e.wait(r.Context(), pause) {
			e.metrics.ended("abort")
			return
		}
		now := time.Now()
		if i == 0 {
			first = now
			e.metrics.firstToken(now.Sub(asked), admitted.Sub(asked), now.Sub(admitted), prompt)
		} else {
			e.metrics.nextToken(now.Sub(last))
		}
		last = now
		e.metrics.generated()
		if q.Stream {
			if err := send(map[string]any{"choices": []any{choice(chat, true, word, finishAt(finish, i, len(words)), i == 0)}}); err != nil {
				e.metrics.ended("abort")
				return
			}
		}
	}
	e.metrics.finished(finish, time.Since(asked), last.Sub(first), prompt, len(words))
	if !q.Stream {
		text := strings.Join(words, "")
		write(w, http.StatusOK, with(base, map[string]any{"object": shape[0], "usage": usage, "choices": []any{choice(chat, false, text, finish, true)}}))
		return
	}
	if q.StreamOptions.IncludeUsage {
		if err := send(map[string]any{"choices": []any{}, "usage": usage}); err != nil {
			return
		}
	}
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
	_ = stream.Flush()
}

func finishAt(finish string, i, n int) any {
	if i == n-1 {
		return finish
	}
	return nil
}

func choice(chat, delta bool, text string, finish any, withRole bool) map[string]any {
	c := map[string]any{"index": 0, "finish_reason": finish, "logprobs": nil}
	if !chat {
		c["text"] = text
		return c
	}
	message := map[string]any{"content": text}
	if withRole {
		message["role"] = "assistant"
	}
	if delta {
		c["delta"] = message
	} else {
		c["message"] = message
	}
	return c
}

// wait pauses for one step; false: nobody waits for the answer any more.
func (e *engine) wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-e.stopped:
		return false
	case <-time.After(d):
		return true
	}
}

func with(maps ...map[string]any) map[string]any {
	all := map[string]any{}
	for _, m := range maps {
		for k, v := range m {
			all[k] = v
		}
	}
	return all
}

func write(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body)
}

func refuse(w http.ResponseWriter, code int, kind, message string) {
	write(w, code, map[string]any{"error": map[string]any{"message": message, "type": kind, "param": nil, "code": code}})
}
