package secrets

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/llmbox-dev/llmbox/internal/cluster"
)

const (
	simulatedByHeader = "X-Llmbox-Simulated-By"
	maxAnswerBytes    = 1 << 20
	callTimeout       = 30 * time.Second
)

// vaultClient speaks Vault's HTTP API. Vault's own Go client is not used: it
// takes its address, token and namespace from VAULT_… variables of whoever runs
// llmbox, repeats requests by itself, and puts the whole URL into its errors.
type vaultClient struct {
	http *http.Client
	base string // up to and including /v1/

	mu        sync.Mutex
	simulated map[string]struct{}
}

// vaultError is Vault's own refusal.
type vaultError struct {
	method, path string
	status       int
	messages     []string
	version      int64 // of the deleted entry of KV that a 404 is about
}

func (e *vaultError) Error() string {
	text := fmt.Sprintf("vault answers %s %s with %d", e.method, e.path, e.status)
	if len(e.messages) > 0 {
		text += ": " + strings.Join(e.messages, "; ")
	}
	return text
}

// statusOf is the HTTP status of Vault's refusal, 0 for any other error.
func statusOf(err error) int {
	var refusal *vaultError
	if errors.As(err, &refusal) {
		return refusal.status
	}
	return 0
}

// call sends one request. in is the body, out receives the answer; either may
// be nil. Secrets travel in the body and in the token header only.
func (c *vaultClient) call(ctx context.Context, method, path, token string, in map[string]any, out any) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return fmt.Errorf("encoding the request %s: %w", path, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("building the request %s: %w", path, err)
	}
	req.Header.Set("X-Vault-Request", "true")
	req.Header.Set("Content-Type", "application/json")
	if token != "" {
		req.Header.Set("X-Vault-Token", token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotAnswering, err)
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil {
		return fmt.Errorf("%w: reading the answer to %s: %w", ErrNotAnswering, path, err)
	}
	c.note(resp.Header)
	if resp.StatusCode >= http.StatusMultipleChoices {
		return refusal(method, path, resp.StatusCode, raw, append(values(in), token))
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return fmt.Errorf("%w: decoding the answer to %s", ErrNotAnswering, path)
	}
	return nil
}

// refusal tells Vault's answer from one of the API server on the way, which
// speaks for Vault while Vault can't.
func refusal(method, path string, status int, raw []byte, hidden []string) error {
	var body struct {
		Kind   string   `json:"kind"`
		Errors []string `json:"errors"`
		Data   *struct {
			Metadata struct {
				Version int64 `json:"version"`
			} `json:"metadata"`
		} `json:"data"`
	}
	isJSON := json.Unmarshal(raw, &body) == nil
	switch {
	case isJSON && body.Kind == "Status":
		var answer metav1.Status
		if err := json.Unmarshal(raw, &answer); err != nil {
			return fmt.Errorf("%w: decoding the API server's answer to %s", ErrNotAnswering, path)
		}
		err := &apierrors.StatusError{ErrStatus: answer}
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			return fmt.Errorf("reaching vault through the API server: %w", cluster.Classify(err))
		}
		return fmt.Errorf("%w: %w", ErrNotAnswering, err)
	case !isJSON || body.Errors == nil && body.Data == nil:
		return fmt.Errorf("%w: HTTP %d on the way", ErrNotAnswering, status)
	}
	messages := make([]string, 0, len(body.Errors))
	for _, m := range body.Errors {
		m = strings.Join(strings.Fields(m), " ")
		for _, secret := range hidden {
			// Shorter ones are no secrets, but words that a message needs.
			if len(secret) >= 16 {
				m = strings.ReplaceAll(m, secret, "(hidden)")
			}
		}
		messages = append(messages, m)
	}
	answer := &vaultError{method: method, path: path, status: status, messages: messages}
	if body.Data != nil {
		answer.version = body.Data.Metadata.Version
	}
	return answer
}

// values lists the texts in a request's body: what an answer must not repeat.
func values(in map[string]any) []string {
	var out []string
	for _, value := range in {
		switch value := value.(type) {
		case string:
			out = append(out, value)
		case map[string]string:
			out = slices.AppendSeq(out, maps.Values(value))
		case map[string]any:
			out = append(out, values(value)...)
		}
	}
	return out
}

// note remembers who answered in Vault's place.
func (c *vaultClient) note(header http.Header) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name := range strings.SplitSeq(header.Get(simulatedByHeader), ",") {
		if name = strings.TrimSpace(name); name != "" {
			if c.simulated == nil {
				c.simulated = map[string]struct{}{}
			}
			c.simulated[name] = struct{}{}
		}
	}
}

func (c *vaultClient) simulatedBy() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.simulated))
}

// pause waits unless ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
