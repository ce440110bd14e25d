package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/llmbox-dev/llmbox/internal/bench"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/openai"
)

// benchResult is a result with figures; each rate is times as large.
func benchResult(times float64, levels ...int) bench.Result {
	p := bench.Parameters{Concurrency: levels, Seconds: 120, PromptTokens: 256, MaxTokens: 128, TimeoutSeconds: 120}
	var all []bench.Level
	for _, n := range levels {
		requests := max(16, 4*n)
		busy := 1 + float64(n)/40
		all = append(all, bench.Level{
			Concurrency: n, Requests: requests, Succeeded: requests, Failed: map[bench.Failure]int{}, Ended: bench.EndedRequests,
			Seconds: float64(requests) * 8.2 * busy / times / float64(n), CountedBy: bench.CountedByUsage,
			OutputTokens: int64(requests) * 128, Chunks: int64(requests) * 128, PromptTokens: 271,
			FirstToken:      bench.Spread{P50: 140 * busy / times, P90: 151 * busy / times, P99: 208 * busy / times, Max: 208 * busy / times},
			BetweenChunks:   bench.Spread{P50: 62 * busy / times, P90: 63.5 * busy / times, P99: 71.2 * busy / times, Max: 140.25 * busy / times},
			TokensPerSecond: 15.6 * float64(n) * times / busy, PerRequest: 16.1 * times / busy,
		})
	}
	return bench.NewResult(time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), "1.2.3",
		bench.Box{Model: "Qwen/Qwen3-8B", ServedName: "Qwen/Qwen3-8B", Image: "docker.io/vllm/vllm-openai:v0.32.0", GPU: "NVIDIA L4", GPUs: 1}, p, all, false)
}

func narrow(t *testing.T, text string) {
	t.Helper()
	for i, line := range strings.Split(text, "\n") {
		if n := utf8.RuneCountInString(line); n > tableWidth {
			t.Errorf("line %d has %d columns: %q", i+1, n, line)
		}
	}
}

func TestBenchGolden(t *testing.T) {
	good := benchResult(1, 1, 4, 8)
	failing := benchResult(1, 1, 64, 256)
	failing.Box = bench.Box{ServedName: "a-model-with-a-name-of-its-own"}
	l := &failing.Levels[1]
	l.Succeeded, l.Failed, l.Ended, l.CountedBy = 200, map[bench.Failure]int{bench.FailedLimit: 40, bench.FailedTimeout: 10, bench.FailedCut: 4, bench.FailedServer: 2}, bench.EndedTime, bench.CountedByChunks
	failing.Levels[2] = bench.Level{Concurrency: 256, Requests: 1024, Failed: map[bench.Failure]int{bench.FailedLimit: 1024}, Ended: bench.EndedRequests}
	cut := benchResult(2.5, 1, 4)
	cut.Box.Model, cut.Box.GPU, cut.Box.GPUs = "Qwen/Qwen3-32B", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 2
	cut.Parameters.Concurrency, cut.CutOff = []int{1, 4, 8}, true
	cut.Levels[1].Requests, cut.Levels[1].Succeeded, cut.Levels[1].Abandoned, cut.Levels[1].Ended = 9, 5, 4, bench.EndedInterrupted
	none := bench.NewResult(good.Measured, "", bench.Box{ServedName: "m"}, good.Parameters,
		[]bench.Level{{Concurrency: 1, Requests: 16, Failed: map[bench.Failure]int{bench.FailedServer: 16}, Ended: bench.EndedRequests}}, false)
	for name, r := range map[string]bench.Result{"good": good, "failing": failing, "cut-off": cut, "none": none} {
		text := benchText(r)
		narrow(t, text)
		golden(t, "bench-"+name+".txt", text)
	}
	other := benchResult(2.3, 4, 8, 16)
	other.Box.GPU = "NVIDIA L40S"
	for name, c := range map[string]bench.Comparison{
		"two-boxes": bench.Compare(good, other), "failing": bench.Compare(good, failing), "more-than-the-box": bench.Compare(good, cut),
	} {
		text := benchCompareText(c)
		narrow(t, text)
		golden(t, "bench-compare-"+name+".txt", text)
	}
}

// benchServer answers a list of models and streams; fail says which request fails, and how.
func benchServer(t *testing.T, fail func(number int64, w http.ResponseWriter, r *http.Request) bool) *openai.Client {
	t.Helper()
	var count atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			_, _ = io.WriteString(w, `{"data":[{"id":"Qwen/Qwen3-8B"}]}`)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		if fail != nil && fail(count.Add(1)-1, w, r) {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for range 4 {
			_, _ = io.WriteString(w, `data: {"choices":[{"delta":{"content":"a"}}]}`+"\n\n")
		}
		_, _ = io.WriteString(w, `data: {"choices":[],"usage":{"prompt_tokens":21,"completion_tokens":4}}`+"\n\ndata: [DONE]\n\n")
	}))
	t.Cleanup(server.Close)
	return openai.New(manyConnections(server.Client(), 8), server.URL, "sk-secret", 10*time.Second)
}

func TestBenchMeasures(t *testing.T) {
	p := bench.Parameters{Concurrency: []int{1, 2}, Requests: 4, Seconds: 60, PromptTokens: 12, MaxTokens: 4, TimeoutSeconds: 20}
	for _, c := range []struct {
		name   string
		fail   func(int64, http.ResponseWriter, *http.Request) bool
		code   int
		stdout string
		stderr string
	}{
		{"all well", nil, exitDone, "Tokens are as the server counts them: 21 a prompt, 1.00 a chunk.", "2 at once: 4 of 4 done\n"},
		{"some fail", func(n int64, w http.ResponseWriter, _ *http.Request) bool {
			if n == 2 {
				http.Error(w, "slow down", http.StatusTooManyRequests)
			}
			return n == 2
		}, exitWarnings, "1 of 4 requests failed and are in no figure: 1 × rate limit (429)", "1 at once: 4 of 4 done, 1 failed\n"},
		{"all fail after the first", func(n int64, w http.ResponseWriter, _ *http.Request) bool {
			if n > 0 {
				http.Error(w, "gone", http.StatusServiceUnavailable)
			}
			return n > 0
		}, exitNotReady, "Nothing succeeded on the last level", "4 failed"},
		{"the first fails", func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
			http.Error(w, "Client authentication failed.", http.StatusUnauthorized)
			return true
		}, exitFailed, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			a := &app{env: Env{Stdout: &stdout, Stderr: &stderr, Version: "1.2.3"}, output: "text"}
			file := filepath.Join(t.TempDir(), "box.json")
			err := a.measure(t.Context(), benchServer(t, c.fail), bench.Box{Model: "Qwen/Qwen3-8B"}, p, &benchFlags{save: file})
			if got := exitCode(err); got != c.code {
				t.Errorf("exit %d, want %d: %v", got, c.code, err)
			}
			if !strings.Contains(stdout.String(), c.stdout) || !strings.Contains(stderr.String(), c.stderr) {
				t.Errorf("%s\n%s", stdout.String(), stderr.String())
			}
			if strings.Contains(stdout.String()+stderr.String()+fmt.Sprint(err), "sk-secret") {
				t.Error("the key is shown")
			}
			narrow(t, stdout.String())
			saved, loadErr := bench.Load(file)
			if (stdout.Len() > 0) != (loadErr == nil) || loadErr == nil && benchText(saved) != stdout.String() {
				t.Errorf("%+v, %v", saved, loadErr)
			}
		})
	}
}

// Ctrl-C leaves what was measured.
func TestBenchInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	client := benchServer(t, func(n int64, _ http.ResponseWriter, r *http.Request) bool {
		if n == 3 {
			cancel()
			<-r.Context().Done()
		}
		return n >= 3
	})
	p := bench.Parameters{Concurrency: []int{1, 2}, Requests: 4, Seconds: 60, PromptTokens: 12, MaxTokens: 4, TimeoutSeconds: 20}
	var stdout, stderr bytes.Buffer
	a := &app{env: Env{Stdout: &stdout, Stderr: &stderr}, output: "json"}
	err := a.measure(ctx, client, bench.Box{}, p, &benchFlags{model: "m"})
	if exitCode(err) != exitInterrupted {
		t.Errorf("%v", err)
	}
	r, err := bench.Read(&stdout)
	if err != nil || !r.CutOff || r.Succeeded() != 2 || r.Levels[0].Abandoned != 1 || r.Failures() != 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestBenchCommand(t *testing.T) {
	dir := t.TempDir()
	one, two, bad := filepath.Join(dir, "one.json"), filepath.Join(dir, "two.json"), filepath.Join(dir, "bad.json")
	for path, r := range map[string]bench.Result{one: benchResult(1, 1, 4), two: benchResult(2, 1, 4)} {
		if err := bench.Save(path, r); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(bad, []byte(`{"kind":"llmbox-bench","schema":2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--compare", one}, exitDone, "TOKENS A SECOND"},
		{[]string{"--compare", one, two}, exitDone, "2.00  B"},
		{[]string{"--compare", one, two, bad}, exitUsage, "3 results"},
		{[]string{"--compare", bad, two}, exitUsage, "schema 2, this release reads 1"},
		{[]string{"--compare", one, filepath.Join(dir, "none.json")}, exitUsage, "no such file"},
		{[]string{"--compare", one, two, "--save", bad}, exitUsage, "--compare measures nothing"},
		{[]string{"hello"}, exitUsage, "unknown command"},
		{[]string{"--concurrency", "0"}, exitUsage, "0 requests at once"},
		{[]string{"--concurrency", "1,1000"}, exitUsage, "1000 requests at once, 1 to 256"},
		{[]string{"--requests", "100000"}, exitUsage, "at most 10000"},
		{[]string{"--duration", "0s"}, exitUsage, "0 seconds a level"},
		{[]string{"--timeout", "-1s"}, exitUsage, "a timeout of -1 seconds"},
		{[]string{"--max-tokens", "0"}, exitUsage, "answers of 0 tokens"},
		{[]string{"--prompt-tokens", "-4"}, exitUsage, "prompts of -4 tokens"},
		{[]string{"--save", filepath.Join(dir, "none", "x.json")}, exitUsage, "no such folder"},
	} {
		got := run(t, nil, "", append([]string{"bench"}, c.args...)...)
		if got.code != c.code || !strings.Contains(got.stdout+got.stderr, c.want) {
			t.Errorf("%q: exit %d, want %d and %q:\n%s%s", c.args, got.code, c.code, c.want, got.stdout, got.stderr)
		}
	}
	got := run(t, nil, "", "bench", "--compare", one, two, "--output", "json")
	var c bench.Comparison
	if err := json.Unmarshal([]byte(got.stdout), &c); err != nil || got.code != exitDone || len(c.Levels) != 2 || c.Levels[0].Figures[0].Ratio != 2 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestBenchProgress(t *testing.T) {
	var out bytes.Buffer
	clock := time.Unix(0, 0)
	tell := benchProgress(&out, func() time.Time { return clock })
	tell(bench.Progress{Concurrency: 4, Requests: 16, Begun: true})
	for i := range 16 {
		clock = clock.Add(time.Second)
		tell(bench.Progress{Concurrency: 4, Requests: 16, Done: i + 1, Failed: i / 8})
	}
	tell(bench.Progress{Concurrency: 4, Requests: 16, Done: 16, Failed: 1, Ended: true})
	want := "4 at once: 16 requests\n4 at once: 5 of 16 done\n4 at once: 10 of 16 done, 1 failed\n4 at once: 15 of 16 done, 1 failed\n4 at once: 16 of 16 done, 1 failed\n"
	if out.String() != want {
		t.Errorf("%q", out.String())
	}
}

// What is measured is said as far as the cluster shows it, and measured without.
func TestBenchAbout(t *testing.T) {
	pod := func(name string, phase corev1.PodPhase) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: name, Labels: map[string]string{"app.kubernetes.io/name": "model-server"}},
			Spec: corev1.PodSpec{NodeName: "box", Containers: []corev1.Container{{
				Name: "vllm", Image: "docker.io/vllm/vllm-openai:v0.32.0",
				Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("2"), "memory": resource.MustParse("16Gi")}},
			}}},
			Status: corev1.PodStatus{Phase: phase},
		}
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "box", Labels: map[string]string{"nvidia.com/gpu.product": "NVIDIA-L40S"}}}
	chosen := config.Box{Model: config.Model{Name: "Qwen/Qwen3-8B", Revision: "abc"}}
	about := func(kube *fake.Clientset) bench.Box {
		return (&installedBox{client: &cluster.Client{Kube: kube}, box: chosen}).about(t.Context())
	}
	want := bench.Box{Model: "Qwen/Qwen3-8B", Revision: "abc", Image: "docker.io/vllm/vllm-openai:v0.32.0", GPU: "NVIDIA L40S", GPUs: 4}
	if got := about(fake.NewClientset(node, pod("one", corev1.PodRunning), pod("two", corev1.PodRunning), pod("waits", corev1.PodPending))); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := about(fake.NewClientset()); got != (bench.Box{Model: "Qwen/Qwen3-8B", Revision: "abc"}) {
		t.Errorf("of an empty cluster: %+v", got)
	}
}
