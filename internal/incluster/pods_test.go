package incluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestTokenProbe(t *testing.T) {
	raw, err := os.ReadFile("testdata/token-probe.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name, Body, Want string
		Status           int
	}
	if err := json.Unmarshal(raw, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			var asked map[string]any
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method != http.MethodPost || r.URL.Path != "/v1/completions" {
					t.Errorf("asked %s %s", r.Method, r.URL.Path)
				}
				if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
					t.Error(err)
				}
				w.WriteHeader(c.Status)
				_, _ = io.WriteString(w, c.Body)
			}))
			defer server.Close()
			err := TokenProbe(t.Context(), server.URL, "m", 10*time.Second)
			got := ""
			if err != nil {
				got = err.Error()
			}
			if got != c.Want {
				t.Errorf("got %q, want %q", got, c.Want)
			}
			if asked["model"] != "m" || asked["max_tokens"] != float64(1) {
				t.Errorf("asked for %v", asked)
			}
		})
	}
}

func TestTokenProbeGivesUp(t *testing.T) {
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	defer server.Close()
	defer close(release)
	err := TokenProbe(t.Context(), server.URL, "m", 50*time.Millisecond)
	if err == nil || strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v, want an error of one line", err)
	}
}

// A server that comes up while it is waited for is seen then; one that does not is told
// by what it said last.
func TestAwaitToken(t *testing.T) {
	var asked atomic.Int64
	var after atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) <= after.Load() {
			http.Error(w, "still loading", http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, `{"choices":[{"text":"a"}]}`)
	}))
	defer server.Close()
	after.Store(3)
	if err := AwaitToken(t.Context(), server.URL, "m", 10*time.Second, time.Millisecond); err != nil || asked.Load() != 4 {
		t.Errorf("after %d questions: %v", asked.Load(), err)
	}
	after.Store(1 << 40)
	err := AwaitToken(t.Context(), server.URL, "m", 100*time.Millisecond, time.Millisecond)
	if !errors.Is(err, ErrNoToken) || !strings.Contains(err.Error(), "still loading") {
		t.Errorf("got %v", err)
	}
}

// The command lines are the charts'.
func TestCommandLines(t *testing.T) {
	dst := filepath.Join(t.TempDir(), "llmbox")
	for _, c := range []struct {
		args []string
		want string // part of the error; empty: success
	}{
		{[]string{"copy-self", dst}, ""},
		{[]string{"copy-self"}, "accepts 1 arg"},
		{[]string{"token-probe", "--url", "http://127.0.0.1:1", "--model", "m"}, "asking for a token"},
		{[]string{"token-probe", "--url", "http://127.0.0.1:1", "--model", "m", "--timeout", "50ms", "--every", "10ms"}, "asking for a token"},
		{[]string{"token-probe"}, `"model" not set`},
		{[]string{"unseal", "--address", "http://127.0.0.1:1", "--key-file", "/absent"}, ""},
		{[]string{"unseal", "--key-file", "/absent"}, `"address" not set`},
		{[]string{"download", "--model=../x", "--revision=main", "--dir=" + t.TempDir()}, "not a model's name"},
		{[]string{"download", "--model=x"}, `"dir" not set`},
	} {
		command := Command()
		command.SetArgs(c.args)
		command.SetOut(io.Discard)
		command.SetErr(io.Discard)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		err := command.ExecuteContext(ctx)
		cancel()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: got %v, want %q", c.args, err, c.want)
		}
	}
	if info, err := os.Stat(dst); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("the copy: %v, %v", info, err)
	}
}

func TestCopyExecutable(t *testing.T) {
	dir := t.TempDir()
	src, dst := filepath.Join(dir, "src"), filepath.Join(dir, "dst")
	if err := os.WriteFile(src, []byte("#!/bin/sh\necho copied\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dst, []byte("what an earlier start left"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := copyExecutable(src, dst); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), dst).Output()
	if err != nil || string(out) != "copied\n" {
		t.Errorf("running the copy: %q, %v", out, err)
	}
	if err := copyExecutable(src, filepath.Join(dir, "absent", "dst")); err == nil {
		t.Error("copied into a directory that does not exist")
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) > 0 {
		t.Errorf("left behind %v", left)
	}
}

// fakeVault is the little of Vault that an unsealer sees.
type fakeVault struct {
	mu                  sync.Mutex
	initialised, sealed bool
	key                 string
}

func (v *fakeVault) set(f func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	f()
}

func (v *fakeVault) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if r.URL.Path == "/v1/sys/unseal" {
		var body struct{ Key string }
		_ = json.NewDecoder(r.Body).Decode(&body)
		if body.Key != v.key {
			w.WriteHeader(http.StatusBadRequest)
			_ = json.NewEncoder(w).Encode(map[string]any{"errors": []string{"unseal failed with key " + body.Key}})
			return
		}
		v.sealed = false
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"initialized": v.initialised, "sealed": v.sealed})
}

// lockedBuffer is read while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func TestUnseal(t *testing.T) {
	const right, wrong = "cmlnaHQgdW5zZWFsIGtleQ==", "d3JvbmcgdW5zZWFsIGtleQ=="
	vault := &fakeVault{sealed: true, key: right}
	server := httptest.NewServer(vault)
	defer server.Close()
	keyFile := filepath.Join(t.TempDir(), "unseal-key")
	out := &lockedBuffer{}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Unseal(ctx, out, server.URL, keyFile, time.Millisecond) }()

	step := 0
	until := func(text string) {
		t.Helper()
		step++
		for deadline := time.Now().Add(20 * time.Second); !strings.Contains(out.String(), text); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("step %d: %q not said:\n%s", step, text, out.String())
			}
		}
	}
	write := func(key string) {
		if err := os.WriteFile(keyFile, []byte(key), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	until("vault is not initialised yet")
	vault.set(func() { vault.initialised = true })
	until("vault is sealed and there is no key yet")
	write(wrong)
	until("unsealing vault: HTTP 400")
	write(right + "\n")
	until("unsealed vault")
	until("vault is unsealed")
	vault.set(func() { vault.sealed = true }) // a new pod
	for deadline := time.Now().Add(20 * time.Second); strings.Count(out.String(), "unsealed vault") < 2; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not unsealed again:\n%s", out.String())
		}
	}
	server.CloseClientConnections()
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("ended with %v", err)
	}
	if said := out.String(); strings.Contains(said, right) || strings.Contains(said, wrong) {
		t.Errorf("a key was logged:\n%s", said)
	}
}
