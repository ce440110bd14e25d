package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// result is one as it would be saved; each rate is times as large.
func result(times float64) Result {
	level := func(n int) Level {
		return Level{
			Concurrency: n, Requests: 16, Succeeded: 14, Failed: map[Failure]int{FailedLimit: 1, FailedTimeout: 1}, Ended: EndedRequests,
			Seconds: 100 / times, CountedBy: CountedByUsage, OutputTokens: 14 * 128, Chunks: 14 * 120, PromptTokens: 265,
			FirstToken: Spread{50 / times, 60 / times, 80 / times, 80 / times}, BetweenChunks: Spread{20 / times, 21 / times, 25 / times, 60 / times},
			TokensPerSecond: 17.92 * times, PerRequest: 48 * times,
		}
	}
	return NewResult(time.Date(2026, 3, 4, 5, 6, 7, 8, time.UTC), "1.2.3",
		Box{Model: "Qwen/Qwen3-8B", ServedName: "Qwen/Qwen3-8B", Revision: "abc", Image: "docker.io/vllm/vllm-openai:v0.32.0", GPU: "NVIDIA-L4", GPUs: 1},
		Parameters{Concurrency: []int{1, 4}, Seconds: 120, PromptTokens: 256, MaxTokens: 128, TimeoutSeconds: 120}, []Level{level(1), level(4)}, false)
}

func TestSaveAndLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "box.json")
	want := result(1)
	if err := os.WriteFile(path, []byte("older"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Save(path, want); err != nil {
		t.Fatal(err)
	}
	got, err := Load(path)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("%v, %v", left, err)
	}
	if got.Failures() != 4 || got.Succeeded() != 28 {
		t.Errorf("%d failed, %d succeeded", got.Failures(), got.Succeeded())
	}
	if err := Save(filepath.Join(path, "below"), want); err == nil {
		t.Error("saved below a file")
	}
	if _, err := Load(path + ".none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}

func TestReadRefuses(t *testing.T) {
	for name, spoil := range map[string]func(*Result){
		"another kind":        func(r *Result) { r.Kind = "llmbox-snapshot" },
		"a later schema":      func(r *Result) { r.Schema = 2 },
		"no time":             func(r *Result) { r.Measured = time.Time{} },
		"a name that steers":  func(r *Result) { r.Box.GPU = "L4\x1b[2J" },
		"a name without end":  func(r *Result) { r.Box.Model = strings.Repeat("x", 600) },
		"GPUs":                func(r *Result) { r.Box.GPUs = -1 },
		"parameters":          func(r *Result) { r.Parameters.MaxTokens = -5 },
		"more levels":         func(r *Result) { r.Levels = append(r.Levels, r.Levels[0]) },
		"levels mixed up":     func(r *Result) { r.Levels[0], r.Levels[1] = r.Levels[1], r.Levels[0] },
		"requests missing":    func(r *Result) { r.Levels[0].Succeeded = 3 },
		"requests too many":   func(r *Result) { r.Levels[0].Requests, r.Levels[0].Succeeded = 100, 98 },
		"a strange failure":   func(r *Result) { r.Levels[0].Failed = map[Failure]int{"bad luck": 2} },
		"a negative failure":  func(r *Result) { r.Levels[0].Failed = map[Failure]int{FailedLimit: -2, FailedCut: 4} },
		"a negative time":     func(r *Result) { r.Levels[0].FirstToken.P50 = -1 },
		"a shrinking spread":  func(r *Result) { r.Levels[0].BetweenChunks.P90 = 1e6 },
		"an endless figure":   func(r *Result) { r.Levels[0].TokensPerSecond = 1e300 },
		"no end":              func(r *Result) { r.Levels[0].Ended = "" },
		"counted by no means": func(r *Result) { r.Levels[0].CountedBy = "guess" },
		"figures of nothing": func(r *Result) {
			r.Levels[1].Succeeded, r.Levels[1].Abandoned, r.Levels[1].CountedBy = 0, 14, ""
		},
	} {
		r := result(1)
		spoil(&r)
		raw, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Read(bytes.NewReader(raw)); !errors.Is(err, ErrResult) {
			t.Errorf("%s: %v", name, err)
		}
	}
	good, err := json.Marshal(result(1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Read(bytes.NewReader(good)); err != nil {
		t.Errorf("refuses a good one: %v", err)
	}
	for name, raw := range map[string]string{
		"nothing":         "",
		"text":            "what is this",
		"a list":          "[]",
		"another":         "{}",
		"two":             string(good) + string(good),
		"an unknown key":  strings.Replace(string(good), `"box":{`, `"box":{"colour":"red",`, 1),
		"a wrong type":    strings.Replace(string(good), `"gpus":1`, `"gpus":"one"`, 1),
		"a file too long": string(good) + strings.Repeat(" ", maxResultBytes),
		"later, and with more keys": strings.Replace(strings.Replace(string(good), `"schema":1`, `"schema":9`, 1),
			`"box":{`, `"box":{"colour":"red",`, 1),
	} {
		_, err := Read(strings.NewReader(raw))
		if !errors.Is(err, ErrResult) {
			t.Errorf("%s: %v", name, err)
		}
		if strings.HasPrefix(name, "later") && !strings.Contains(err.Error(), "schema 9, this release reads 1") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzRead holds that no bytes break the reader, and that what it takes is what it would
// write.
func FuzzRead(f *testing.F) {
	for _, r := range []Result{result(1), result(2.5), NewResult(time.Unix(1e9, 0), "", Box{}, result(1).Parameters, nil, true)} {
		raw, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Add([]byte(`{"kind":"llmbox-bench","schema":1}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, err := Read(bytes.NewReader(raw))
		if err != nil {
			if errors.Is(err, ErrResult) {
				return
			}
			t.Fatal(err)
		}
		again, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		back, err := Read(bytes.NewReader(again))
		if err != nil {
			t.Fatalf("%v: %s", err, again)
		}
		if third, err := json.Marshal(back); err != nil || !bytes.Equal(third, again) {
			t.Fatalf("%s\n%s, %v", again, third, err)
		}
		_ = Compare(r, back)
	})
}

func TestCompare(t *testing.T) {
	a, b := result(1), result(2)
	b.Box.GPU = "NVIDIA-A10"
	c := Compare(a, b)
	if len(c.Differs) != 0 || len(c.Levels) != 2 || len(c.OnlyA)+len(c.OnlyB) != 0 {
		t.Fatalf("%+v", c)
	}
	for _, l := range c.Levels {
		if l.FailedA != 2 || l.FailedB != 2 || len(l.Figures) != 6 {
			t.Errorf("%+v", l)
		}
		for _, f := range l.Figures {
			want := map[bool]float64{true: 2, false: 0.5}[f.MoreIsBetter]
			if f.Ratio != want || f.Better() != "B" {
				t.Errorf("%+v is better for %q", f, f.Better())
			}
		}
	}
	if c := Compare(b, a); c.Levels[0].Figures[0].Better() != "A" {
		t.Errorf("%+v", c.Levels[0])
	}
	if c := Compare(a, a); c.Levels[0].Figures[0].Better() != "" {
		t.Errorf("%+v", c.Levels[0])
	}

	b.Parameters.PromptTokens, b.Parameters.Concurrency, b.CutOff = 1024, []int{4, 8}, true
	b.Levels[0].Concurrency, b.Levels[1].Concurrency = 4, 8
	b.Levels[0].CountedBy = CountedByChunks
	b.Box.Model = "Qwen/Qwen3-14B"
	c = Compare(a, b)
	want := []string{
		"B was stopped before its end", "model: Qwen/Qwen3-8B in A, Qwen/Qwen3-14B in B",
		"words of a prompt: 256 in A, 1024 in B", "tokens with 4 at once counted by: usage in A, chunks in B",
	}
	if !reflect.DeepEqual(c.Differs, want) || !reflect.DeepEqual(c.OnlyA, []int{1}) || !reflect.DeepEqual(c.OnlyB, []int{8}) || len(c.Levels) != 1 {
		t.Errorf("%+v", c)
	}
	b.Levels[0].PerRequest = 0
	if f := Compare(a, b).Levels[0].Figures[1]; f.Ratio != 0 || f.Better() != "" {
		t.Errorf("%+v", f)
	}
}
