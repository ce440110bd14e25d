package incluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

const maxAnswerBytes = 1 << 20

// ErrNoToken says that the model server answered without having generated one.
var ErrNoToken = errors.New("no token came back")

// TokenProbe asks the model server at base for one token and returns nil when
// it generated one, else an error of one line.
func TokenProbe(ctx context.Context, base, model string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	question, err := json.Marshal(map[string]any{"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0})
	if err != nil {
		return fmt.Errorf("encoding the question: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(base, "/")+"/v1/completions", bytes.NewReader(question))
	if err != nil {
		return fmt.Errorf("building the question: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := direct().Do(req)
	if err != nil {
		return fmt.Errorf("asking for a token: %w", brief(err))
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil {
		return fmt.Errorf("reading the answer: %w", brief(err))
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%w: HTTP %d %s", ErrNoToken, resp.StatusCode, oneLine(raw))
	}
	var answer struct {
		Choices []struct {
			Text string `json:"text"`
		} `json:"choices"`
		Usage struct {
			CompletionTokens int64 `json:"completion_tokens"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(raw, &answer); err != nil {
		return fmt.Errorf("%w: not an OpenAI answer: %s", ErrNoToken, oneLine(raw))
	}
	// The only token may be one that ends the text: the count is what was generated.
	if len(answer.Choices) == 0 || answer.Choices[0].Text == "" && answer.Usage.CompletionTokens < 1 {
		return fmt.Errorf("%w: the answer is empty", ErrNoToken)
	}
	return nil
}

// AwaitToken asks until the model server generated a token or the time is over, so that
// the start is seen when it happens and not at the next probe: a probe is a process, and
// one every second for as long as weights take to load costs more than one that waits.
// The error is the last one that says more than that the time was over.
func AwaitToken(ctx context.Context, base, model string, within, every time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var last error
	for {
		err := TokenProbe(ctx, base, model, within)
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return last
		case <-time.After(every):
		}
	}
}

// direct is a client for what is inside the cluster: no proxy, and no redirect
// that could carry a body elsewhere.
func direct() *http.Client {
	return &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// brief drops the URL from an HTTP error: it can hold a signature, and the
// reader knows it.
func brief(err error) error {
	var urlErr *url.Error
	if errors.As(err, &urlErr) {
		return urlErr.Err
	}
	return err
}

func oneLine(raw []byte) string {
	const limit = 300
	text := strings.Join(strings.Fields(strings.ToValidUTF8(string(raw), "?")), " ")
	if len(text) > limit {
		text = strings.ToValidUTF8(text[:limit], "") + "…"
	}
	return text
}
