package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/openai"
)

// newChat talks to a server that answers each question in turn with a stream of
// internal/openai's testdata; asked gets the conversation as it was sent.
func newChat(t *testing.T, terminal bool, streams ...string) (c *chat, stdout, stderr *bytes.Buffer, asked *[][]openai.Message) {
	t.Helper()
	asked = &[][]openai.Message{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var in struct{ Messages []openai.Message }
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
			t.Error(err)
		}
		*asked = append(*asked, in.Messages)
		name := streams[min(len(*asked), len(streams))-1]
		if name == "401" {
			http.Error(w, "Client authentication failed.", http.StatusUnauthorized)
			return
		}
		raw, err := os.ReadFile(filepath.Join("..", "openai", "testdata", "streams", name+".sse"))
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = w.Write(raw)
	}))
	t.Cleanup(server.Close)
	stdout, stderr = &bytes.Buffer{}, &bytes.Buffer{}
	return &chat{
		client: openai.New(server.Client(), server.URL, "k", 10*time.Second), ask: openai.Request{Model: "Qwen/Qwen3-8B"},
		stdout: stdout, stderr: stderr, terminal: terminal,
		complain: func(err error) { (&app{env: Env{Stderr: stderr}}).printError(chatError(err, "")) },
	}, stdout, stderr, asked
}

func TestChatGolden(t *testing.T) {
	for _, c := range []struct {
		stream   string
		terminal bool
	}{
		{"plain", false}, {"plain", true}, {"reasoning", true}, {"reasoning", false}, {"crlf-comments", false}, {"error-in-the-stream", true},
	} {
		name := "chat-" + c.stream + map[bool]string{true: "-terminal", false: ""}[c.terminal] + ".txt"
		t.Run(name, func(t *testing.T) {
			chat, stdout, stderr, _ := newChat(t, c.terminal, c.stream)
			_, err := chat.say(t.Context(), "Hi")
			if err != nil {
				chat.complain(err)
			}
			golden(t, name, "--- stdout\n"+stdout.String()+"--- stderr\n"+stderr.String())
		})
	}
}

func TestChatJSONGolden(t *testing.T) {
	for _, stream := range []string{"plain", "reasoning", "lines-of-one-event"} {
		chat, stdout, _, _ := newChat(t, false, stream)
		chat.silent = true
		answer, err := chat.say(t.Context(), "Hi")
		if err != nil || stdout.Len() > 0 {
			t.Fatalf("%q, %v", stdout, err)
		}
		// The clock's part is the machine's.
		answer.FirstToken = 123456 * time.Microsecond
		if answer.Usage != nil {
			answer.TokensPerSecond = 41.23456
		} else {
			answer.TokensPerSecond = 0
		}
		var out bytes.Buffer
		if err := (&app{env: Env{Stdout: &out}}).printJSON(answerDoc(answer)); err != nil {
			t.Fatal(err)
		}
		golden(t, "chat-"+stream+".json", out.String())
	}
}

func TestTalk(t *testing.T) {
	chat, stdout, stderr, asked := newChat(t, true, "plain", "401", "reasoning")
	chat.ask.Messages = []openai.Message{{Role: "system", Content: "Be brief."}}
	if err := chat.talk(t.Context(), strings.NewReader("Hi\n\nAnd now?\n  And again? \n/bye\nnever asked\n")); err != nil {
		t.Fatal(err)
	}
	golden(t, "chat-talk.txt", "--- stdout\n"+stdout.String()+"--- stderr\n"+stderr.String())
	// What failed is not part of the conversation, what was thought neither.
	want := `[{system Be brief.} {user Hi} {assistant Hello, wörld.} {user And again?}]`
	if len(*asked) != 3 || fmt.Sprint((*asked)[2]) != want {
		t.Errorf("asked %v", *asked)
	}
	if err := chat.talk(t.Context(), strings.NewReader("last words without a line end")); err != nil || len(*asked) != 4 {
		t.Errorf("%d questions, %v", len(*asked), err)
	}
}

func TestTalkStops(t *testing.T) {
	chat, _, _, _ := newChat(t, true, "plain")
	ctx, cancel := context.WithCancel(t.Context())
	in, typed := io.Pipe()
	defer func() { _ = typed.Close() }()
	go cancel()
	if err := chatError(chat.talk(ctx, in), ""); exitCode(err) != exitInterrupted {
		t.Errorf("got %v", err)
	}
	if err := chat.talk(t.Context(), strings.NewReader(strings.Repeat("x", maxPromptBytes+1))); err == nil {
		t.Error("took a line without end")
	}
}

// A model that was talked into escape sequences doesn't steer the terminal; a file gets
// what it said.
func TestChatPlain(t *testing.T) {
	if got := plain("a\x1b]0;title\x07\u009b2Jb\r\n\tc\x7f"); got != "a]0;title2Jb\n\tc" {
		t.Errorf("got %q", got)
	}
}

func TestPromptFromStdin(t *testing.T) {
	for _, c := range []struct {
		stdin  string
		args   []string
		prompt string
		code   int
	}{
		{"from the pipe\r\n", nil, "from the pipe", exitDone},
		{"two\nlines\n\n", nil, "two\nlines", exitDone},
		{"not this", []string{"but", "this"}, "but this", exitDone},
		{" \n", nil, "", exitUsage},
		{strings.Repeat("x", maxPromptBytes+1), nil, "", exitUsage},
	} {
		a := &app{env: Env{Stdin: strings.NewReader(c.stdin), Terminal: true}}
		prompt, talk, err := a.prompt(t.Context(), c.args)
		if prompt != c.prompt || talk || exitCode(err) != c.code {
			t.Errorf("%.20q: %.20q, %v, %v", c.stdin, prompt, talk, err)
		}
	}
	in, hold := io.Pipe()
	defer func() { _ = hold.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	go cancel()
	if _, _, err := (&app{env: Env{Stdin: in}}).prompt(ctx, nil); !errors.Is(err, installer.ErrInterrupted) {
		t.Errorf("got %v", err)
	}
}

func TestChatErrors(t *testing.T) {
	status := func(code int, fromModel bool) error {
		return fmt.Errorf("asking: %w", &openai.StatusError{Code: code, FromModel: fromModel, Message: "as the server says"})
	}
	var out strings.Builder
	for _, c := range []struct {
		name    string
		err     error
		keyFile string
		code    int
	}{
		{"wrong key in a file", status(401, false), "ci.key", exitUsage},
		{"own key refused", status(401, false), "", exitFailed},
		{"no route", status(404, false), "", exitNotReady},
		{"no such model", status(404, true), "", exitUsage},
		{"too long", status(400, true), "", exitUsage},
		{"rate limit", status(429, false), "", exitNotReady},
		{"no endpoint", status(503, false), "", exitNotReady},
		{"no keys' Secret", status(500, false), "", exitNotReady},
		{"model server breaks", status(500, true), "", exitFailed},
		{"nobody listens", fmt.Errorf("%w from http://10.0.0.1:8080: %w", openai.ErrUnreachable, errors.New("connection refused")), "", exitNotReady},
		{"silence", &openai.SilenceError{After: time.Minute, Begun: true}, "", exitNotReady},
		{"cut", openai.ErrCut, "", exitFailed},
		{"broken off", &openai.StreamError{Message: "EngineCore"}, "", exitFailed},
		{"a web page", openai.ErrNotOpenAI, "", exitFailed},
		{"interrupted", context.Canceled, "", exitInterrupted},
		{"no rights", cluster.ErrForbidden, "", exitCheckFailed},
	} {
		err := chatError(c.err, c.keyFile)
		if exitCode(err) != c.code {
			t.Errorf("%s: exit %d, want %d", c.name, exitCode(err), c.code)
		}
		fmt.Fprintf(&out, "# %s: exit %d\n", c.name, c.code)
		(&app{env: Env{Stderr: &out}}).printError(err)
	}
	golden(t, "chat-errors.txt", out.String())
	if err := doorError(errors.New("gateway has no address yet")); exitCode(err) != exitNotReady || !strings.Contains(fixFor(err), "llmbox status") {
		t.Errorf("got %v", err)
	}
}
