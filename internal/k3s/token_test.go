package k3s

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/host"
)

func TestCheckToken(t *testing.T) {
	hash := strings.Repeat("0a", 32)
	for _, tt := range []struct {
		token string
		fine  bool
	}{
		{"K10" + hash + "::abcdef.0123456789abcdef", true},
		{"K10" + hash + "::server:0123abc", true},
		{"K10" + hash + "::", false},
		{"K10" + hash[1:] + "::server:x", false},
		{"abcdef.0123456789abcdef", false},
		{"secret", false},
		{"", false},
		{"K10" + hash + "::server:x\nmore: config", false},
	} {
		err := CheckToken(tt.token)
		if (err == nil) != tt.fine {
			t.Errorf("%q: %v", tt.token, err)
		}
		if err != nil && (!errors.Is(err, ErrToken) || tt.token != "" && strings.Contains(err.Error(), tt.token)) {
			t.Errorf("the error is %q", err)
		}
	}
}

// answering answers with what it is told to.
type answering struct {
	result host.Result
	asked  host.Command
}

func (s *answering) Run(_ context.Context, c host.Command) (host.Result, error) {
	s.asked = c
	return s.result, nil
}

func TestCreateToken(t *testing.T) {
	token := "K10" + strings.Repeat("0a", 32) + "::abcdef.0123456789abcdef"
	for _, tt := range []struct {
		name   string
		role   Role
		output string
		exit   int
		err    error
	}{
		{"a server", Server, "time=… level=info msg=hello\n" + token + "\n", 0, nil},
		{"an agent", Agent, token, 0, ErrNoSource},
		{"it fails and shows a token", Server, token, 1, errors.ErrUnsupported},
		{"it says something else", Server, "no server runs", 0, ErrToken},
	} {
		t.Run(tt.name, func(t *testing.T) {
			runner := &answering{result: host.Result{Output: []byte(tt.output), Exit: tt.exit}}
			m := NewMachine(Options{Root: t.TempDir(), Runner: runner})
			r := &Record{APIVersion: recordAPIVersion, Kind: recordKind, Role: tt.role, DataDir: "/data", Binary: Binary{Path: "/usr/local/bin/k3s"}}
			if err := m.save(t.Context(), r); err != nil {
				t.Fatal(err)
			}
			got, err := m.CreateToken(t.Context(), time.Hour, "llmbox join")
			switch {
			case tt.err == nil && (err != nil || got != token):
				t.Errorf("it gives %q, %v", got, err)
			case tt.err != nil && err == nil:
				t.Error("it is no error")
			case tt.err != nil && strings.Contains(err.Error(), token):
				t.Errorf("the token is in the error %q", err)
			case tt.err != nil && tt.exit == 0 && !errors.Is(err, tt.err):
				t.Errorf("the error is %v", err)
			}
			if tt.err == nil && strings.Join(runner.asked.Args, " ") != "token create --ttl 1h0m0s --description llmbox join --data-dir /data" {
				t.Errorf("it is asked %q", runner.asked.Args)
			}
		})
	}
}
