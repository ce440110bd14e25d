package openai

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"
)

const testKey = "sk-test-0123456789"

// serve answers with fn and checks what every request must have.
func serve(t *testing.T, fn http.HandlerFunc) *Client {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if got := r.Header.Get("Authorization"); got != "Bearer "+testKey {
			t.Errorf("Authorization is %q", got)
		}
		fn(w, r)
	}))
	t.Cleanup(server.Close)
	return New(server.Client(), server.URL+"/", testKey, 5*time.Second)
}

func sse(raw []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		_, _ = w.Write(raw)
	}
}

func TestChatStreams(t *testing.T) {
	raw, err := os.ReadFile("testdata/streams.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		File, Content, Reasoning, Finish, Error string
		Pieces                                  int
		Tokens                                  int64
	}
	if err := json.Unmarshal(raw, &cases); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("testdata/streams/*.sse")
	if err != nil || len(files) != len(cases) {
		t.Fatalf("%d cases for %d streams, %v", len(cases), len(files), err)
	}
	for _, c := range cases {
		t.Run(c.File, func(t *testing.T) {
			raw, err := os.ReadFile(filepath.Join("testdata", "streams", c.File))
			if err != nil {
				t.Fatal(err)
			}
			pieces, content := 0, ""
			answer, err := serve(t, sse(raw)).Chat(t.Context(), Request{Model: "m"}, func(d Delta) error {
				pieces++
				content += d.Content
				return nil
			})
			if (err != nil) != (c.Error != "") || err != nil && !strings.Contains(err.Error(), c.Error) {
				t.Errorf("error is %v, want %q in it", err, c.Error)
			}
			if answer.Content != c.Content || content != c.Content || answer.Reasoning != c.Reasoning || answer.FinishReason != c.Finish || pieces != c.Pieces {
				t.Errorf("got %+v in %d pieces (%q)", answer, pieces, content)
			}
			if tokens := int64(0); answer.Usage != nil || c.Tokens != 0 {
				if answer.Usage != nil {
					tokens = answer.Usage.CompletionTokens
				}
				if tokens != c.Tokens {
					t.Errorf("%d tokens, want %d", tokens, c.Tokens)
				}
			}
		})
	}
}

func TestChatAsks(t *testing.T) {
	half := 0.5
	for _, c := range []struct {
		name string
		in   Request
		want string
	}{
		{"plain", Request{Model: "m", Messages: []Message{{"user", "Hi"}}},
			`{"messages":[{"role":"user","content":"Hi"}],"model":"m","stream":true,"stream_options":{"include_usage":true}}`},
		{"to the end of its limit", Request{Model: "m", MaxTokens: 7, IgnoreEOS: true},
			`{"ignore_eos":true,"max_tokens":7,"messages":null,"model":"m","stream":true,"stream_options":{"include_usage":true}}`},
		{"with limits", Request{Model: "m", MaxTokens: 7, Temperature: &half},
			`{"max_tokens":7,"messages":null,"model":"m","stream":true,"stream_options":{"include_usage":true},"temperature":0.5}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := serve(t, func(w http.ResponseWriter, r *http.Request) {
				raw, _ := io.ReadAll(r.Body)
				if r.Method != http.MethodPost || r.URL.Path != "/v1/chat/completions" || string(raw) != c.want {
					t.Errorf("%s %s %s", r.Method, r.URL.Path, raw)
				}
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, `{"model":"m","choices":[{"message":{"content":"whole"},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}`)
			})
			answer, err := client.Chat(t.Context(), c.in, func(Delta) error { return nil })
			if err != nil || answer.Content != "whole" || answer.FinishReason != "stop" || answer.Usage.CompletionTokens != 1 {
				t.Errorf("got %+v, %v", answer, err)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		name, body string
		code       int
		want       StatusError
	}{
		{"gateway", "Client authentication failed.\r\n", 401, StatusError{401, "Client authentication failed.", false}},
		{"nothing said", "", 404, StatusError{404, "", false}},
		{"model", `{"error":{"message":"The model ` + "`x`" + ` does not exist.","code":404}}`, 404, StatusError{404, "The model `x` does not exist.", true}},
		{"flat", `{"object":"error","message":"too long","code":400}`, 400, StatusError{400, "too long", true}},
		{"escapes and the key itself", "\x1b[31m key " + testKey + " is wrong", 403, StatusError{403, "[31m key (hidden) is wrong", false}},
		{"a redirect", "", 302, StatusError{302, "", false}},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Location", "http://127.0.0.1:1/elsewhere")
				w.WriteHeader(c.code)
				_, _ = io.WriteString(w, c.body)
			})
			_, err := client.Models(t.Context())
			_, err2 := client.Chat(t.Context(), Request{}, nil)
			for _, err := range []error{err, err2} {
				var got *StatusError
				if !errors.As(err, &got) || *got != c.want {
					t.Errorf("got %v, want %v", err, &c.want)
				}
			}
		})
	}
}

func TestModels(t *testing.T) {
	for body, want := range map[string][]string{
		`{"object":"list","data":[{"id":"a"},{"id":"b"}]}`: {"a", "b"},
		`{"data":[]}`: {},
		`{}`:          nil,
		`<html>`:      nil,
	} {
		got, err := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) }).Models(t.Context())
		if !slices.Equal(got, want) || (want == nil) != errors.Is(err, ErrNotOpenAI) {
			t.Errorf("%s: %v, %v", body, got, err)
		}
	}
}

func TestNobodyAnswers(t *testing.T) {
	server := httptest.NewServer(nil)
	server.Close()
	client := New(http.DefaultClient, server.URL, testKey, time.Second)
	_, err := client.Chat(t.Context(), Request{}, nil)
	if !errors.Is(err, ErrUnreachable) || !errors.Is(err, syscall.ECONNREFUSED) || strings.Contains(err.Error(), testKey) {
		t.Errorf("got %v", err)
	}
}

// hang sends what is given and then nothing until the client is gone.
func hang(raw string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		// Only a read body lets the server see that the client went.
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, raw)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
}

func TestSilence(t *testing.T) {
	for _, c := range []struct {
		name, raw, content string
		begun              bool
	}{
		{"from the start", "", "", false},
		{"after a token", "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n", "a", true},
		{"comments are no tokens", ": ping\n\n", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := serve(t, hang(c.raw))
			client.silence = 200 * time.Millisecond
			answer, err := client.Chat(t.Context(), Request{}, func(Delta) error { return nil })
			var silent *SilenceError
			if !errors.As(err, &silent) || silent.Begun != c.begun || answer.Content != c.content {
				t.Errorf("got %+v, %v", answer, err)
			}
		})
	}
}

// A reader that takes its time is not the server's silence.
func TestSlowReader(t *testing.T) {
	raw, err := os.ReadFile("testdata/streams/plain.sse")
	if err != nil {
		t.Fatal(err)
	}
	client := serve(t, sse(raw))
	client.silence = 150 * time.Millisecond
	if _, err := client.Chat(t.Context(), Request{}, func(Delta) error { time.Sleep(300 * time.Millisecond); return nil }); err != nil {
		t.Error(err)
	}
}

func TestStop(t *testing.T) {
	client := serve(t, hang("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n"))
	ctx, cancel := context.WithCancel(t.Context())
	answer, err := client.Chat(ctx, Request{}, func(Delta) error { cancel(); return nil })
	if !errors.Is(err, context.Canceled) || answer.Content != "a" {
		t.Errorf("got %+v, %v", answer, err)
	}
	full := errors.New("the pipe is closed")
	if _, err := client.Chat(t.Context(), Request{}, func(Delta) error { return full }); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
}

func TestRate(t *testing.T) {
	clock := time.Unix(0, 0)
	client := serve(t, sse([]byte(strings.Repeat("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n", 5)+"data: [DONE]\n\n")))
	client.now = func() time.Time { clock = clock.Add(250 * time.Millisecond); return clock }
	answer, err := client.Chat(t.Context(), Request{}, func(Delta) error { return nil })
	if err != nil || answer.FirstToken != 250*time.Millisecond || answer.TokensPerSecond != 4 {
		t.Errorf("first token after %s, %v tokens/s, %v", answer.FirstToken, answer.TokensPerSecond, err)
	}
}

func TestBounds(t *testing.T) {
	long := strings.Repeat("x", maxEventBytes/2)
	for name, in := range map[string]io.Reader{
		"a line without end":    io.MultiReader(strings.NewReader("data: "), endless{}),
		"an event without end":  strings.NewReader(strings.Repeat("data: "+long+"\n", 3) + "\n"),
		"comments without end":  &repeat{text: ": " + long[:1000] + "\n"},
		"blank lines for ever":  &repeat{text: "\n"},
		"an answer without end": nil,
	} {
		t.Run(name, func(t *testing.T) {
			if in != nil {
				s := NewStream(in)
				s.read = maxStreamBytes - 4*maxEventBytes // the rest of the way
				if _, err := s.Next(); !errors.Is(err, ErrTooLong) {
					t.Errorf("got %v", err)
				}
				return
			}
			client := serve(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				for r.Context().Err() == nil {
					if _, err := io.WriteString(w, `data: {"choices":[{"delta":{"content":"`+long+"\"}}]}\n\n"); err != nil {
						return
					}
				}
			})
			answer, err := client.Chat(t.Context(), Request{}, func(Delta) error { return nil })
			if !errors.Is(err, ErrTooLong) || len(answer.Content) > maxAnswerBytes {
				t.Errorf("%d bytes, %v", len(answer.Content), err)
			}
		})
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

type repeat struct {
	text string
	at   int
}

func (r *repeat) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = r.text[r.at%len(r.text)]
		r.at++
	}
	return len(p), nil
}

// events reads a stream to its end.
func events(in io.Reader) (out []Event, err error) {
	s := NewStream(in)
	for {
		e, err := s.Next()
		if err != nil {
			return out, err
		}
		out = append(out, e)
	}
}

// FuzzStream holds that no bytes break the reader, that it stays within its bounds and
// that how the bytes come in portions doesn't change what they say.
func FuzzStream(f *testing.F) {
	files, err := filepath.Glob("testdata/streams/*.sse")
	if err != nil || len(files) == 0 {
		f.Fatal(files, err)
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		at, err := events(strings.NewReader(string(raw)))
		if !errors.Is(err, io.EOF) && !errors.Is(err, ErrTooLong) {
			t.Fatalf("ended with %v", err)
		}
		bytewise, err2 := events(iotest.OneByteReader(strings.NewReader(string(raw))))
		if !slices.Equal(at, bytewise) || !errors.Is(err2, err) && !errors.Is(err, ErrTooLong) {
			t.Fatalf("%v, %v\nbyte by byte %v, %v", at, err, bytewise, err2)
		}
		total := 0
		for _, e := range at {
			if strings.ContainsAny(e.Name, "\r\n") || strings.Contains(e.Data, "\r") {
				t.Fatalf("a line end in %+v", e)
			}
			total += len(e.Data)
		}
		if total > len(raw) {
			t.Fatalf("%d bytes of data from %d", total, len(raw))
		}
		// And an answer made of it stays an answer or an error.
		a := answering{each: func(Delta) error { return nil }, now: time.Now}
		err = a.stream(NewStream(strings.NewReader(string(raw))), func(bool) {})
		if answer := a.end(); err == nil && len(answer.Content)+len(answer.Reasoning) > 3*len(raw) {
			t.Fatalf("%d bytes said from %d", len(answer.Content), len(raw))
		}
	})
}
