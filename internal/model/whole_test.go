package model

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// A directory with a model's own files gives what its row of the catalogue gives.
func TestFilesGiveWhatTheCatalogueGives(t *testing.T) {
	c := catalogue(t)
	tests := []struct {
		file, row, gpu string
		count          int
	}{
		{"llama.json", "meta-llama/Llama-3.1-8B-Instruct", "l4", 1},
		{"llama.json", "meta-llama/Llama-3.1-8B-Instruct", "h100", 1},
		{"qwen3-30b-a3b.json", "Qwen/Qwen3-30B-A3B", "h100", 1},
		{"qwen3-30b-a3b.json", "Qwen/Qwen3-30B-A3B", "l40s", 2},
		{"gemma-3-27b.json", "google/gemma-3-27b-it", "h100", 1},
		{"gemma-3-27b.json", "google/gemma-3-27b-it", "l40s", 2},
		{"deepseek-r1.json", "deepseek-ai/DeepSeek-R1-0528", "h200", 8},
		{"qwen3-next-80b-a3b.json", "Qwen/Qwen3-Next-80B-A3B-Instruct", "h200", 2},
		{"qwen3.5-9b.json", "Qwen/Qwen3.5-9B", "l40s", 1},
		{"qwen3.5-9b.json", "Qwen/Qwen3.5-9B", "l4", 1},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("%s on %d %s", tt.file, tt.count, tt.gpu), func(t *testing.T) {
			row, ok := c.Find(tt.row)
			if !ok {
				t.Fatalf("no %s", tt.row)
			}
			dir := t.TempDir()
			data, err := os.ReadFile(filepath.Join("testdata/configs", tt.file))
			if err != nil {
				t.Fatal(err)
			}
			index := `{"metadata":{"total_size":` + strconv.FormatInt(row.WeightsBytes, 10) + `},"weight_map":{"a":"model-00001-of-00001.safetensors"}}`
			for name, content := range map[string]string{ConfigFile: string(data), IndexFile: index} {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			read, err := ReadPath(dir)
			if err != nil {
				t.Fatal(err)
			}
			if read.Precision != row.Precision || read.ContextTokens != row.ContextTokens || !read.Verified || read.WeightsFrom != FromIndex {
				t.Errorf("read %s, %d tokens, verified %v from %s", read.Precision, read.ContextTokens, read.Verified, read.WeightsFrom)
			}
			gpus := FactsOf(product(t, tt.gpu), tt.count)
			for name, ask := range map[string]Ask{
				"free":     {},
				"asked":    {ContextTokens: 16384, KVCacheDType: "fp8", Eager: true, MaxNumSeqs: 32},
				"as given": {ContextTokens: 8192, VLLM: "0.19.0", Utilization: 0.9, TensorParallel: tt.count, AsGiven: true},
			} {
				want, got := row.Assess(gpus, ask), read.Assess(gpus, ask)
				if got.Verdict != want.Verdict || got.Reason != want.Reason || got.Budget != want.Budget || got.KVTokens != want.KVTokens || got.NeedBytes != want.NeedBytes ||
					got.ContextTokens != want.ContextTokens || got.TensorParallel != want.TensorParallel || got.Utilization != want.Utilization || got.DiskBytes != want.DiskBytes {
					t.Errorf("%s: files give %s %s %d tokens %d GPUs %+v\nrow gives %s %s %d tokens %d GPUs %+v", name,
						got.Verdict, got.Reason, got.KVTokens, got.TensorParallel, got.Budget, want.Verdict, want.Reason, want.KVTokens, want.TensorParallel, want.Budget)
				}
			}
		})
	}
}

// What isn't known has a default: nothing panics, and what can be said is said.
func TestAssessTakesWhatIsKnown(t *testing.T) {
	c := catalogue(t)
	llama, _ := c.Find("meta-llama/Llama-3.1-8B-Instruct")
	unnamed := []GPUFact{{MemoryTotalMiB: 81559}}
	tests := []struct {
		name    string
		gpus    []GPUFact
		ask     Ask
		verdict Verdict
		reason  Reason
	}{
		{"a GPU without a name", unnamed, Ask{}, Fits, ReasonNone},
		{"no release", unnamed, Ask{AsGiven: true, ContextTokens: 8192}, Fits, ReasonNone},
		{"a build of the source tree", unnamed, Ask{AsGiven: true, VLLM: "0.1.dev15312+g690e127b1", ContextTokens: 8192}, Fits, ReasonNone},
		{"a candidate", unnamed, Ask{AsGiven: true, VLLM: "v0.19.2rc1.dev8+g4b7f5ea1a", ContextTokens: 8192}, Fits, ReasonNone},
		{"a later build", unnamed, Ask{AsGiven: true, VLLM: "0.6.4.post1", ContextTokens: 8192}, Fits, ReasonNone},
		{"no release at all", unnamed, Ask{AsGiven: true, VLLM: "yesterday's", ContextTokens: 8192}, No, ReasonVersion},
		{"a form that is listed", unnamed, Ask{AsGiven: true, Variant: "awq", ContextTokens: 8192}, Fits, ReasonNone},
		{"another word for it", unnamed, Ask{AsGiven: true, Variant: "gptq_marlin", ContextTokens: 8192}, Fits, ReasonNone},
		{"a form that nobody lists", unnamed, Ask{AsGiven: true, Variant: "bitsandbytes", ContextTokens: 8192}, Fits, ReasonNone},
		{"a word without a meaning", unnamed, Ask{AsGiven: true, Variant: "magic"}, No, ReasonWeights},
		{"only one's own forms where one is chosen", unnamed, Ask{Variant: "bitsandbytes"}, No, ReasonWeights},
		{"no memory", []GPUFact{{Name: "nothing"}}, Ask{}, No, ReasonCapability},
		{"a product's name alone", []GPUFact{{Name: "NVIDIA L40S"}}, Ask{}, Fits, ReasonNone},
		{"no GPU", nil, Ask{}, No, ReasonCapability},
		{"others hold something", []GPUFact{{MemoryTotalMiB: 24564, Shared: true}}, Ask{AsGiven: true, ContextTokens: 8192}, Tight, ReasonBusy},
		{"only CUDA's figure", []GPUFact{{VisibleBytes: 79 << 30}}, Ask{AsGiven: true, ContextTokens: 8192}, Fits, ReasonNone},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := llama.Assess(tt.gpus, tt.ask)
			if got.Verdict != tt.verdict || got.Reason != tt.reason {
				t.Errorf("%s %s: %s, want %s %s", got.Verdict, got.Reason, got.Detail, tt.verdict, tt.reason)
			}
			if got.Verdict != No && (got.KVTokens <= 0 || got.ContextTokens <= 0) {
				t.Errorf("%d tokens, %d of context", got.KVTokens, got.ContextTokens)
			}
			if got.Verdict != Fits && got.Detail == "" {
				t.Error("no word why")
			}
		})
	}
	if got := (Model{}).Assess(unnamed, Ask{}); got.Verdict != No {
		t.Errorf("an empty model: %s", got.Verdict)
	}
}

// What was asked of a fit is what vLLM is told.
func TestAskReachesArguments(t *testing.T) {
	c := catalogue(t)
	fit, err := c.Assess("Qwen/Qwen3-14B", FactsOf(product(t, "l40s"), 1), Ask{ContextTokens: 20480, KVCacheDType: "fp8", Eager: true, MaxNumSeqs: 24, MaxBatchedTokens: 4096, Utilization: 0.85, Variant: "fp8"})
	if err != nil || fit.Verdict == No {
		t.Fatalf("%v, %s: %s", err, fit.Verdict, fit.Detail)
	}
	want := []string{"Qwen/Qwen3-14B-FP8", "--max-model-len=20480", "--gpu-memory-utilization=0.85", "--max-num-seqs=24", "--max-num-batched-tokens=4096", "--kv-cache-dtype=fp8", "--reasoning-parser=qwen3", "--enable-auto-tool-choice", "--tool-call-parser=hermes", "--enforce-eager"}
	for name, got := range map[string][]string{"fit": fit.Arguments.Args(), "choice": choiceOf(fit, "asked for").Arguments().Args()} {
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	two := c.Models[slices.IndexFunc(c.Models, func(m Model) bool { return m.Name == "Qwen/Qwen3-32B" })].Assess(
		[]GPUFact{{Name: "a", MemoryTotalMiB: 46068, ComputeMajor: 8, ComputeMinor: 9, NVLink: gpu.NVLinkNone}, {Name: "a", MemoryTotalMiB: 46068, ComputeMajor: 8, ComputeMinor: 9, NVLink: gpu.NVLinkNone}}, Ask{})
	if !slices.Contains(two.Arguments.Args(), "--tensor-parallel-size=2") {
		t.Errorf("%q", two.Arguments.Args())
	}
}
