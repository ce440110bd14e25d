package incluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"time"
)

// Unseal looks at Vault every interval until ctx ends and unseals it when it is
// initialised and sealed and the key file is there. It writes a line to out
// when something changes; the key is in none of them.
func Unseal(ctx context.Context, out io.Writer, address, keyFile string, interval time.Duration) error {
	if interval <= 0 {
		return fmt.Errorf("the interval %s is not positive", interval)
	}
	u := &unsealer{client: direct(), address: strings.TrimSuffix(address, "/"), keyFile: keyFile}
	last := ""
	for {
		state := u.look(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if state != last {
			last = state
			if _, err := fmt.Fprintln(out, time.Now().UTC().Format(time.RFC3339), state); err != nil {
				return fmt.Errorf("writing the log: %w", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(interval):
		}
	}
}

type unsealer struct {
	client           *http.Client
	address, keyFile string
}

// look does what is to be done now and says how things stand.
func (u *unsealer) look(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	status, err := u.call(ctx, http.MethodGet, "/v1/sys/seal-status", nil)
	switch {
	case err != nil:
		return "vault does not answer: " + err.Error()
	case !status.Initialized:
		return "vault is not initialised yet"
	case !status.Sealed:
		return "vault is unsealed"
	}
	raw, err := os.ReadFile(u.keyFile) // #nosec G304 -- named by the chart
	key := strings.TrimSpace(string(raw))
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && key == "":
		return "vault is sealed and there is no key yet"
	case err != nil:
		return "reading the key: " + err.Error()
	}
	body, err := json.Marshal(map[string]string{"key": key})
	if err != nil {
		return "encoding the key"
	}
	if status, err = u.call(ctx, http.MethodPut, "/v1/sys/unseal", body); err != nil {
		return "unsealing vault: " + strings.ReplaceAll(err.Error(), key, "(key)")
	}
	if status.Sealed {
		return "vault wants more keys than this one"
	}
	return "unsealed vault"
}

type sealStatus struct {
	Initialized bool     `json:"initialized"`
	Sealed      bool     `json:"sealed"`
	Errors      []string `json:"errors"`
}

func (u *unsealer) call(ctx context.Context, method, path string, body []byte) (sealStatus, error) {
	var status sealStatus
	req, err := http.NewRequestWithContext(ctx, method, u.address+path, bytes.NewReader(body))
	if err != nil {
		return status, fmt.Errorf("building the request: %w", err)
	}
	resp, err := u.client.Do(req)
	if err != nil {
		return status, brief(err)
	}
	defer func() { _ = resp.Body.Close() }()
	err = json.NewDecoder(io.LimitReader(resp.Body, maxAnswerBytes)).Decode(&status)
	if resp.StatusCode != http.StatusOK {
		return status, fmt.Errorf("HTTP %d %s", resp.StatusCode, oneLine([]byte(strings.Join(status.Errors, "; "))))
	}
	if err != nil {
		return status, fmt.Errorf("decoding the answer: %w", err)
	}
	return status, nil
}
