package main

import (
	"bufio"
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
	"sync"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	none := func(string) string { return "" }
	tests := []struct {
		name string
		args []string
		env  map[string]string
		ok   bool
		want options
	}{
		{"as the chart calls it", []string{"serve", "Qwen/Q", "--served-model-name=q", "--port=8000", "--shutdown-timeout=45", "--max-model-len", "4096", "--enable-prefix-caching"}, nil, true,
			options{model: "Qwen/Q", served: []string{"q"}, port: 8000, maxLen: 4096, shutdown: 45 * time.Second, maxRunning: 16}},
		{"two names and a flag", []string{"serve", "--model", "m", "--served-model-name", "a", "b", "--max-num-seqs=2"}, nil, true,
			options{model: "m", served: []string{"a", "b"}, port: 8000, maxLen: 8192, maxRunning: 2}},
		{"no model", []string{"serve"}, nil, false, options{}},
		{"another command", []string{"bench"}, nil, false, options{}},
		{"a port that is none", []string{"serve", "m", "--port=x"}, nil, false, options{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parse(tt.args, none)
			if (err == nil) != tt.ok {
				t.Fatalf("error is %v", err)
			}
			if !tt.ok {
				return
			}
			if got.model != tt.want.model || !slices.Equal(got.served, tt.want.served) || got.port != tt.want.port ||
				got.maxLen != tt.want.maxLen || got.shutdown != tt.want.shutdown || got.maxRunning != tt.want.maxRunning {
				if tt.want.served == nil && slices.Equal(got.served, []string{tt.want.model}) {
					return
				}
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}

func sim(t *testing.T, change func(*options)) (*engine, string) {
	t.Helper()
	o := options{model: "org/m", served: []string{"m"}, maxLen: 1000, prefill: time.Millisecond, perToken: time.Millisecond, maxRunning: 2}
	if change != nil {
		change(&o)
	}
	e := newEngine(o)
	s := httptest.NewServer(e.routes())
	t.Cleanup(s.Close)
	return e, s.URL
}

func post(t *testing.T, url, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(raw)
}

func TestAnswers(t *testing.T) {
	_, url := sim(t, nil)
	tests := []struct {
		name, path, body string
		code             int
		has              string
	}{
		{"text", "/v1/completions", `{"model":"m","prompt":"Hello","max_tokens":1}`, 200, `"completion_tokens":1`},
		{"chat", "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":2}`, 200, `"finish_reason":"length"`},
		{"longer than the sentence", "/v1/completions", `{"prompt":"x","max_tokens":40}`, 200, `"completion_tokens":40`},
		{"another model", "/v1/completions", `{"model":"n","prompt":"x"}`, 404, "does not exist"},
		{"no prompt", "/v1/chat/completions", `{"model":"m"}`, 400, "no prompt"},
		{"too long", "/v1/completions", `{"model":"m","prompt":"` + strings.Repeat("x", 8000) + `"}`, 400, "maximum context length"},
		{"no JSON", "/v1/completions", `{`, 400, "BadRequestError"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			code, body := post(t, url+tt.path, tt.body)
			if code != tt.code || !strings.Contains(body, tt.has) {
				t.Errorf("got %d %s, want %d with %s", code, body, tt.code, tt.has)
			}
		})
	}
}

func TestStreams(t *testing.T) {
	_, url := sim(t, nil)
	_, body := post(t, url+"/v1/chat/completions", `{"messages":[{}],"max_tokens":3,"stream":true,"stream_options":{"include_usage":true}}`)
	var chunks []map[string]any
	done := false
	lines := bufio.NewScanner(strings.NewReader(body))
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			done = true
			continue
		}
		var c map[string]any
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			t.Fatal(err)
		}
		if c["object"] != "chat.completion.chunk" {
			t.Errorf("object is %v", c["object"])
		}
		chunks = append(chunks, c)
	}
	if len(chunks) != 4 || !done || chunks[3]["usage"] == nil {
		t.Errorf("got %d chunks, done %v, the last is %v", len(chunks), done, chunks[len(chunks)-1])
	}
}

// What scaling reads: two at work, the others wait, and are counted so.
func TestQueues(t *testing.T) {
	e, url := sim(t, func(o *options) { o.perToken = 200 * time.Millisecond })
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"x","max_tokens":100}`))
			if err != nil {
				return
			}
			if resp, err := http.DefaultClient.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
		})
	}
	until(t, func() bool { r, w := e.load(); return r == 2 && w == 3 })
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	raw, _ := io.ReadAll(resp.Body)
	for _, want := range []string{
		`vllm:num_requests_running{engine="0",model_name="m"} 2.0`, `vllm:num_requests_waiting{engine="0",model_name="m"} 3.0`,
		`vllm:kv_cache_usage_perc{engine="0",model_name="m"} 1.0`, "# TYPE vllm:time_to_first_token_seconds histogram",
	} {
		if !strings.Contains(string(raw), want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	cancel()
	wg.Wait()
	until(t, func() bool { r, w := e.load(); return r == 0 && w == 0 })
}

func until(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it did not come to that")
		}
	}
}

// The dashboards and alerts of the charts read these; a name that is missing here
// would make a panel empty for a reason that vLLM has nothing to do with.
func TestMetricsOfTheCharts(t *testing.T) {
	var text, plain strings.Builder
	newMetrics(true).write(&text, "m", 0, 0, 1, "org/m")
	newMetrics(false).write(&plain, "m", 0, 0, 1, "org/m")
	if strings.Contains(plain.String(), "spec_decode") {
		t.Error("without speculative decoding there are counters of it")
	}
	files, err := filepath.Glob("../../../embed/charts/vllm/dashboards/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no dashboards found: %v", err)
	}
	rules, err := filepath.Glob("../../../embed/charts/vllm/templates/autoscale-*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(files, rules...) {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names(string(raw)) {
			if !strings.Contains(text.String(), name+"{") {
				t.Errorf("%s reads %s, which vllm-sim does not count", filepath.Base(file), name)
			}
		}
	}
}

// names finds whole vllm:… names; one that ends in an underscore is the start of a pattern.
func names(text string) []string {
	var found []string
	for {
		i := strings.Index(text, "vllm:")
		if i < 0 {
			return found
		}
		text = text[i:]
		end := len("vllm:")
		for end < len(text) && (text[end] == '_' || text[end] >= 'a' && text[end] <= 'z' || text[end] >= '0' && text[end] <= '9') {
			end++
		}
		name := text[:end]
		pattern := end < len(text) && (text[end] == '{' && end+1 < len(text) && text[end+1] == '{' || text[end] == '(' || text[end] == '.')
		if name != "vllm:" && name != "vllm:e" && !strings.HasSuffix(name, "_") && !pattern {
			found = append(found, name)
		}
		text = text[end:]
	}
}

func TestWeights(t *testing.T) {
	home := t.TempDir()
	o := options{model: "org/m", weights: home}
	if err := findWeights(o); err == nil {
		t.Error("weights were found in an empty directory")
	}
	repo := filepath.Join(home, "hub", "models--org--m")
	for _, dir := range []string{"refs", "snapshots/abc"} {
		if err := os.MkdirAll(filepath.Join(repo, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	err := errors.Join(os.WriteFile(filepath.Join(repo, "refs", "main"), []byte("abc"), 0o600),
		os.WriteFile(filepath.Join(repo, "snapshots", "abc", "model.safetensors"), nil, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	if err := findWeights(o); err != nil {
		t.Error(err)
	}
}
