// Package openai is a thin client of an OpenAI-compatible API: the models that are
// served, and a chat whose answer comes as a stream. It bounds whatever it reads and
// says in which way a server failed. It must not know Kubernetes, the box or how
// anything is shown, and no key leaves it in an error.
package openai

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode"
)

const (
	maxAnswerBytes  = 8 << 20
	maxRefusalBytes = 64 << 10
	// listTimeout bounds the question what is served.
	listTimeout = 30 * time.Second
)

// The ways in which a server fails, besides StatusError, StreamError and SilenceError.
var (
	// ErrUnreachable means that no HTTP answer came.
	ErrUnreachable = errors.New("no answer")
	// ErrCut means that the stream ended before the answer did.
	ErrCut = errors.New("the answer was cut off")
	// ErrNotOpenAI means that something else than such an API answers.
	ErrNotOpenAI = errors.New("not an answer of an OpenAI-compatible API")
)

// StatusError is an HTTP answer that is not a success.
type StatusError struct {
	// Code is the HTTP status.
	Code int
	// Message is what the server says, in one line without control characters.
	Message string
	// FromModel says that the body is an API error: the request passed the gateway.
	FromModel bool
}

func (e *StatusError) Error() string {
	text := fmt.Sprintf("HTTP %d", e.Code)
	if e.Message != "" {
		text += ": " + e.Message
	}
	return text
}

// StreamError is an error that the server sends in the middle of its answer.
type StreamError struct{ Message string }

func (e *StreamError) Error() string { return "the model server broke off: " + e.Message }

// SilenceError means that no token came for too long.
type SilenceError struct {
	// After is how long was waited.
	After time.Duration
	// Begun says that there were tokens before.
	Begun bool
}

func (e *SilenceError) Error() string {
	if e.Begun {
		return fmt.Sprintf("no further token came for %s", e.After)
	}
	return fmt.Sprintf("no token came for %s", e.After)
}

// Client talks to one API with one key.
type Client struct {
	http    *http.Client
	base    string
	key     string
	silence time.Duration
	now     func() time.Time
}

// New prepares a client for the API under base (without /v1). silence bounds the time
// without a token in a stream, the first one included. Redirects are not followed, so
// that neither key nor prompt goes elsewhere.
func New(httpClient *http.Client, base, key string, silence time.Duration) *Client {
	own := *httpClient
	own.Timeout = 0 // it would end an answer in the middle
	own.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &Client{http: &own, base: strings.TrimSuffix(base, "/") + "/v1/", key: key, silence: silence, now: time.Now}
}

// Models names what is served.
func (c *Client) Models(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	resp, err := c.send(ctx, http.MethodGet, "models", nil)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil {
		return nil, fmt.Errorf("%w: reading the list of models: %w", ErrCut, err)
	}
	var answer struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.Unmarshal(raw, &answer); err != nil || answer.Data == nil {
		return nil, fmt.Errorf("%w: the list of models", ErrNotOpenAI)
	}
	names := make([]string, len(answer.Data))
	for i, m := range answer.Data {
		names[i] = m.ID
	}
	return names, nil
}

// Message is one turn of a conversation.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Request is a question to a model.
type Request struct {
	Model    string
	Messages []Message
	// MaxTokens bounds the answer; 0 leaves that to the server.
	MaxTokens int
	// Temperature is the server's own if nil.
	Temperature *float64
	// IgnoreEOS goes on to MaxTokens though the answer is at its end. It is vLLM's own.
	IgnoreEOS bool
}

// Usage counts tokens, as the server does.
type Usage struct {
	PromptTokens     int64 `json:"prompt_tokens"`
	CompletionTokens int64 `json:"completion_tokens"`
	TotalTokens      int64 `json:"total_tokens"`
}

// Delta is what one event adds to the answer.
type Delta struct {
	Content string
	// Reasoning is what a thinking model says before its answer.
	Reasoning string
}

// Answer is the whole of an answer.
type Answer struct {
	Content   string
	Reasoning string
	// Model is what the server says it is.
	Model        string
	FinishReason string
	// Usage is nil if the server does not count.
	Usage *Usage
	// FirstToken is the time from the question to the first token.
	FirstToken time.Duration
	// TokensPerSecond is the rate after the first token; 0 if there was no second.
	TokensPerSecond float64
}

// Chat asks and hands each piece of the answer to each as it comes. An error of each
// ends the answer. What had come until an error is returned with it.
func (c *Client) Chat(ctx context.Context, in Request, each func(Delta) error) (Answer, error) {
	question := map[string]any{
		"model": in.Model, "messages": in.Messages, "stream": true,
		"stream_options": map[string]any{"include_usage": true},
	}
	if in.MaxTokens > 0 {
		question["max_tokens"] = in.MaxTokens
	}
	if in.Temperature != nil {
		question["temperature"] = *in.Temperature
	}
	if in.IgnoreEOS {
		question["ignore_eos"] = true
	}
	body, err := json.Marshal(question)
	if err != nil {
		return Answer{}, fmt.Errorf("encoding the question: %w", err)
	}
	asking, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := &SilenceError{After: c.silence}
	timer := time.AfterFunc(c.silence, func() { cancel(silent) })
	defer timer.Stop()

	a := answering{each: each, began: c.now(), now: c.now}
	resp, err := c.send(asking, http.MethodPost, "chat/completions", body)
	if err == nil {
		defer func() { _ = resp.Body.Close() }()
		if kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); kind == "application/json" {
			err = a.whole(resp.Body)
		} else {
			// A reader that is slow to take what came is not the server's silence.
			err = a.stream(NewStream(resp.Body), func(wait bool) {
				if timer.Stop(); wait {
					timer.Reset(c.silence)
				}
			})
		}
	}
	answer := a.end()
	if err != nil && ctx.Err() != nil {
		return answer, ctx.Err()
	}
	if err != nil && errors.Is(context.Cause(asking), silent) {
		return answer, &SilenceError{After: c.silence, Begun: a.pieces > 0}
	}
	return answer, err
}

// send asks and returns a successful answer.
func (c *Client) send(ctx context.Context, method, path string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("building the question: %w", err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "text/event-stream, application/json")
	}
	req.Header.Set("User-Agent", "llmbox")
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		var urlErr *url.Error
		if errors.As(err, &urlErr) {
			err = urlErr.Err
		}
		return nil, fmt.Errorf("%w from %s: %w", ErrUnreachable, strings.TrimSuffix(c.base, "/v1/"), err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }()
	// What can't be read of a refusal doesn't change that it is one.
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, maxRefusalBytes))
	message, fromModel := refusal(raw)
	if c.key != "" {
		message = strings.ReplaceAll(message, c.key, "(hidden)")
	}
	return nil, &StatusError{Code: resp.StatusCode, Message: message, FromModel: fromModel}
}

// refusal takes the sentence out of an error body: OpenAI's shape, the flat one of
// older vLLM, or text.
func refusal(raw []byte) (message string, fromModel bool) {
	var body struct {
		Error   *apiError `json:"error"`
		Object  string    `json:"object"`
		Message string    `json:"message"`
	}
	if json.Unmarshal(raw, &body) == nil {
		switch {
		case body.Error != nil:
			return oneLine(body.Error.Message), true
		case body.Object == "error":
			return oneLine(body.Message), true
		}
	}
	return oneLine(string(raw)), false
}

type apiError struct {
	Message string `json:"message"`
}

// chunk is an event of the stream or, with message for delta, a whole answer.
type chunk struct {
	Model   string `json:"model"`
	Choices []struct {
		Index        int     `json:"index"`
		Delta        piece   `json:"delta"`
		Message      piece   `json:"message"`
		FinishReason *string `json:"finish_reason"`
	} `json:"choices"`
	Usage  *Usage    `json:"usage"`
	Error  *apiError `json:"error"`
	Object string    `json:"object"`
	// The flat error of older vLLM.
	ErrorMessage string `json:"message"`
}

type piece struct {
	Content string `json:"content"`
	// The field's name differs between vLLM's releases.
	Reasoning        string `json:"reasoning"`
	ReasoningContent string `json:"reasoning_content"`
}

// answering puts an answer together.
type answering struct {
	each        func(Delta) error
	now         func() time.Time
	began       time.Time
	first, last time.Time
	pieces      int64
	content     strings.Builder
	reasoning   strings.Builder
	answer      Answer
	finished    bool
}

// stream reads events until the last one. waiting tells when the server's turn
// begins (true) and ends (false).
func (a *answering) stream(in *Stream, waiting func(bool)) error {
	for {
		waiting(true)
		event, err := in.Next()
		waiting(false)
		switch {
		case errors.Is(err, io.EOF) && a.finished:
			return nil // a finish reason is as good an end as [DONE]
		case errors.Is(err, io.EOF):
			return ErrCut
		case errors.Is(err, ErrTooLong):
			return err
		case err != nil:
			return fmt.Errorf("%w: %w", ErrCut, err)
		case strings.TrimSpace(event.Data) == "[DONE]":
			return nil
		}
		var c chunk
		if err := json.Unmarshal([]byte(event.Data), &c); err != nil {
			if event.Name == "error" {
				return &StreamError{Message: oneLine(event.Data)}
			}
			return fmt.Errorf("%w: an event that is no JSON: %s", ErrNotOpenAI, oneLine(event.Data))
		}
		switch {
		case c.Error != nil:
			return &StreamError{Message: oneLine(c.Error.Message)}
		case c.Object == "error":
			return &StreamError{Message: oneLine(c.ErrorMessage)}
		}
		if err := a.take(c, false); err != nil {
			return err
		}
	}
}

// whole reads an answer of a server that does not stream.
func (a *answering) whole(in io.Reader) error {
	raw, err := io.ReadAll(io.LimitReader(in, maxAnswerBytes+1))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrCut, err)
	}
	if len(raw) > maxAnswerBytes {
		return ErrTooLong
	}
	var c chunk
	if err := json.Unmarshal(raw, &c); err != nil || len(c.Choices) == 0 {
		return fmt.Errorf("%w: %s", ErrNotOpenAI, oneLine(string(raw)))
	}
	return a.take(c, true)
}

func (a *answering) take(c chunk, whole bool) error {
	if c.Model != "" {
		a.answer.Model = c.Model
	}
	if c.Usage != nil {
		a.answer.Usage = c.Usage
	}
	for _, choice := range c.Choices {
		if choice.Index != 0 {
			continue
		}
		p := choice.Delta
		if whole {
			p = choice.Message
		}
		if choice.FinishReason != nil && *choice.FinishReason != "" {
			a.answer.FinishReason, a.finished = *choice.FinishReason, true
		}
		d := Delta{Content: p.Content, Reasoning: p.Reasoning + p.ReasoningContent}
		if p.Reasoning != "" {
			d.Reasoning = p.Reasoning // some releases send both
		}
		if d == (Delta{}) {
			continue
		}
		if a.content.Len()+a.reasoning.Len()+len(d.Content)+len(d.Reasoning) > maxAnswerBytes {
			return ErrTooLong
		}
		a.last = a.now()
		if a.pieces++; a.pieces == 1 {
			a.first = a.last
		}
		a.content.WriteString(d.Content)
		a.reasoning.WriteString(d.Reasoning)
		if err := a.each(d); err != nil {
			return err
		}
	}
	return nil
}

func (a *answering) end() Answer {
	out := a.answer
	out.Content, out.Reasoning = a.content.String(), a.reasoning.String()
	if a.pieces == 0 {
		return out
	}
	out.FirstToken = a.first.Sub(a.began)
	tokens := a.pieces // without a count of the server's, an event is a token
	if out.Usage != nil {
		tokens = out.Usage.CompletionTokens
	}
	if took := a.last.Sub(a.first).Seconds(); took > 0 && tokens > 1 {
		out.TokensPerSecond = float64(tokens-1) / took
	}
	return out
}

// oneLine makes foreign text fit for an error message.
func oneLine(text string) string {
	const limit = 400
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > limit {
		text = strings.ToValidUTF8(text[:limit], "") + "…"
	}
	return text
}
