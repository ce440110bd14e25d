package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/openai"
	"github.com/llmbox-dev/llmbox/internal/secrets"
)

var updateKeys = flag.Bool("update-keys", false, "write the golden files of keys and chat")

// golden compares with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *updateKeys {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("differs from %s (-update-keys writes it):\n%s", path, got)
	}
}

func TestKeysListGolden(t *testing.T) {
	all := []secrets.ClientKey{
		{Client: "ci", Made: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), Ending: "x7Qd", State: secrets.KeyActive},
		{Client: "default", Ending: "k2Zz", State: secrets.KeyActive},
		{Client: "handmade", State: secrets.KeyLeaving},
		{Client: "team-a", Ending: "0aB9", State: secrets.KeyPending},
	}
	for _, c := range []struct {
		name, output string
		keys         []secrets.ClientKey
	}{
		{"keys-list.txt", "text", all},
		{"keys-list-plain.txt", "text", all[:2]},
		{"keys-list-none.txt", "text", nil},
		{"keys-list.json", "json", all},
		{"keys-list-none.json", "json", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var stdout bytes.Buffer
			a := &app{env: Env{Stdout: &stdout}, output: c.output}
			if err := a.printKeys(c.keys, secrets.InVault); err != nil {
				t.Fatal(err)
			}
			golden(t, c.name, stdout.String())
		})
	}
}

// A new key is alone on stdout, so that a shell can take it.
func TestNewKeyGolden(t *testing.T) {
	for _, output := range []string{"text", "json"} {
		var stdout, stderr bytes.Buffer
		a := &app{env: Env{Stdout: &stdout, Stderr: &stderr}, output: output}
		if err := a.printNewKey(secrets.KeyChange{Client: "ci", Key: "sk-llmbox-0123"}); err != nil {
			t.Fatal(err)
		}
		golden(t, "keys-create-"+output+".txt", "--- stdout\n"+stdout.String()+"--- stderr\n"+stderr.String())
	}
}

// What is wrong with what was typed is told before any cluster is asked.
func TestKeysUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"keys", "create"}, "0 names"},
		{[]string{"keys", "create", "a", "b"}, "2 names"},
		{[]string{"keys", "create", "Team_A"}, "not a client's name"},
		{[]string{"keys", "create", "a", "--timeout", "0s"}, "--timeout"},
		{[]string{"keys", "revoke"}, "0 names"},
		{[]string{"keys", "revoke", "default", "--yes"}, "--force"},
		{[]string{"keys", "revoke", "a", "--timeout=-1s"}, "--timeout"},
		{[]string{"keys", "list", "x"}, "unknown command"},
		{[]string{"keys", "lst"}, "unknown command"},
		{[]string{"chat", ""}, "the prompt is empty"},
		{[]string{"chat"}, "there is no prompt"},
		{[]string{"chat", "hi", "--max-tokens=-1"}, "--max-tokens"},
		{[]string{"chat", "hi", "--temperature", "3"}, "--temperature"},
		{[]string{"chat", "hi", "--temperature", "NaN"}, "--temperature"},
		{[]string{"chat", "hi", "--timeout", "0"}, "--timeout"},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			got := run(t, nil, "", append(c.args, "--kubeconfig", "/nonexistent")...)
			if got.code != exitUsage || !strings.Contains(got.stderr, c.says) || strings.Contains(got.stderr, "kubeconfig") || got.stdout != "" {
				t.Errorf("exit %d\n%s%s", got.code, got.stdout, got.stderr)
			}
		})
	}
}

func TestKeysErrors(t *testing.T) {
	for _, c := range []struct {
		err  error
		code int
		fix  string
	}{
		{nil, exitDone, ""},
		{context.Canceled, exitInterrupted, "llmbox keys list"},
		{secrets.ErrKeyName, exitUsage, "team-a"},
		{secrets.ErrKeyExists, exitUsage, "llmbox keys revoke ci"},
		{secrets.ErrNoKey, exitUsage, "llmbox keys list"},
		{secrets.ErrKeysElsewhere, exitFailed, "externalsecret"},
		{secrets.ErrNoNamespace, exitNotReady, "llmbox install"},
		{secrets.ErrNotAnswering, exitNotReady, "llmbox status"},
		{secrets.ErrContended, exitFailed, "again"},
		{cluster.ErrForbidden, exitCheckFailed, "cluster-admin"},
	} {
		err := keysError(c.err, "ci")
		if exitCode(err) != c.code || err != nil && !strings.Contains(fixFor(err), c.fix) || c.code != exitInterrupted && !errors.Is(err, c.err) {
			t.Errorf("%v: exit %d, %q", err, exitCode(err), fixFor(err))
		}
	}
}

func TestHonoured(t *testing.T) {
	status := func(code int, fromModel bool) error {
		return fmt.Errorf("asking: %w", &openai.StatusError{Code: code, FromModel: fromModel})
	}
	for _, c := range []struct {
		err            error
		taken, refused bool
	}{
		{nil, true, false},
		{status(401, false), false, true},
		{status(404, false), false, false},
		{status(500, false), false, false},
		{status(429, false), true, false},
		{status(503, false), true, false},
		{status(500, true), true, false},
		{openai.ErrUnreachable, false, false},
	} {
		if taken, _ := honoured(c.err, false); taken != c.taken {
			t.Errorf("%v: taken is %v", c.err, taken)
		}
		if refused, _ := honoured(c.err, true); refused != c.refused {
			t.Errorf("%v: refused is %v", c.err, refused)
		}
	}
}

func TestAwaitGateway(t *testing.T) {
	var asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) < 3 {
			http.Error(w, "Client authentication failed.", http.StatusUnauthorized)
			return
		}
		_, _ = w.Write([]byte(`{"data":[]}`))
	}))
	defer server.Close()
	looked := 0
	find := func(context.Context) (installer.Door, error) {
		if looked++; looked < 2 {
			return installer.Door{}, errors.New("no address yet")
		}
		return installer.Door{URL: server.URL, HTTP: server.Client()}, nil
	}
	var said []string
	say := func(s string) { said = append(said, s) }
	if note, err := awaitGateway(t.Context(), find, "k", false, say); err != nil || note != "" || looked != 2 {
		t.Errorf("%q, %v after %d looks", note, err, looked)
	}
	want := "the gateway to take the key: no address yet\nthe gateway to take the key: HTTP 401: Client authentication failed."
	if got := strings.Join(said, "\n"); got != want {
		t.Errorf("said\n%s", got)
	}
	// It takes the key for ever: the end of the wait names what was waited for.
	ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
	defer cancel()
	_, err := awaitGateway(ctx, find, "k", true, say)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "the gateway to refuse the key") {
		t.Errorf("got %v", err)
	}
	// Missing rights don't pass by waiting.
	forbidden := func(context.Context) (installer.Door, error) { return installer.Door{}, cluster.ErrForbidden }
	if _, err := awaitGateway(t.Context(), forbidden, "k", false, say); !errors.Is(err, cluster.ErrForbidden) {
		t.Errorf("got %v", err)
	}
}
