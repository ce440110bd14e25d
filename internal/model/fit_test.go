package model

import (
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

func TestCatalogueIsLarge(t *testing.T) {
	c := catalogue(t)
	if len(c.Models) < 35 {
		t.Errorf("%d models, want 35 or more", len(c.Models))
	}
	open := 0
	for _, m := range c.Models {
		if !m.Gated {
			open++
		}
	}
	if open < 25 {
		t.Errorf("only %d without a gate", open)
	}
}

// Bytes a token, as upstream's own log lines and config files have them.
func TestKVBytesPerToken(t *testing.T) {
	c := catalogue(t)
	for name, want := range map[string]int64{
		"meta-llama/Llama-3.1-8B-Instruct":  131072,
		"meta-llama/Llama-3.3-70B-Instruct": 327680,
		"Qwen/Qwen3-0.6B":                   114688,
		"Qwen/Qwen3-8B":                     147456,
		"Qwen/Qwen3-32B":                    262144,
		"Qwen/Qwen3-30B-A3B":                98304,
		"Qwen/Qwen3.8-27B":                  65536,
		"Qwen/Qwen3.6-35B-A3B":              20480,
		"openai/gpt-oss-120b":               36864,
		"openai/gpt-oss-20b":                24576,
		"google/gemma-4-26B-A4B-it":         20480,
		"google/gemma-4-31B-it":             81920,
		"microsoft/phi-4":                   204800,
		"zai-org/GLM-5.1":                   100152,
		"BAAI/bge-m3":                       0,
	} {
		m, ok := c.Find(name)
		if got := m.Architecture.KVBytesPerToken(2); !ok || got != want {
			t.Errorf("%s: %d bytes a token, want %d", name, got, want)
		}
	}
}

// Sizes that the architecture adds up to meet the bytes of the row.
func TestWeightsMeetArchitecture(t *testing.T) {
	for _, m := range catalogue(t).Models {
		if m.WeightsFrom != FromArchitecture || m.Precision != "bf16" || m.Architecture.Experts > 0 {
			continue
		}
		if diff := m.ParametersBillion*2e9/float64(m.WeightsBytes) - 1; math.Abs(diff) > 0.001 {
			t.Errorf("%s: %.3f billion parameters, %d bytes", m.Name, m.ParametersBillion, m.WeightsBytes)
		}
		least, most := m.Architecture.parameters(true), m.Architecture.parameters(false)
		if p := m.ParametersBillion * 1e9; p < least*0.99 || p > most*1.01 {
			t.Errorf("%s: %.3f billion parameters, dims make %.3f to %.3f", m.Name, p/1e9, least/1e9, most/1e9)
		}
	}
}

// Exact figures of public start-ups: state blocks, the two meanings of the token
// count and the longest context (github.com/vllm-project/vllm/pull/30515,
// github.com/vllm-project/recipes/pull/810).
func TestLayoutOfHybrids(t *testing.T) {
	qwen, _ := catalogue(t).Find("Qwen/Qwen3.8-27B")
	large, _ := catalogue(t).Find("Qwen/Qwen3.5-122B-A10B")
	moe, _ := catalogue(t).Find("Qwen/Qwen3.6-35B-A3B")
	tests := []struct {
		name      string
		a         Architecture
		s         settings
		gib       float64
		context   int
		byRequest bool
		blocks    int
		tokens    int64
		longest   int
	}{
		{"one rank, 16 bits", large.Architecture, settings{tp: 1, kvBytes: 2, prefixCaching: true}, 17.36, 131072, false, 361, 188640, 0},
		{"two ranks, 8 bits", qwen.Architecture, settings{tp: 2, kvBytes: 1, prefixCaching: true}, 4.99, 131072, true, 208, 302921, 0},
		{"one rank, 8 bits", qwen.Architecture, settings{tp: 1, kvBytes: 1, prefixCaching: true}, 5.42, 204800, true, 113, 0, 167776},
		{"blocks over groups", moe.Architecture, settings{tp: 1, kvBytes: 1, prefixCaching: true}, 2.95, 8192, false, 147, 75456, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := layout(tt.a, tt.s)
			blocks := int(tt.gib * gib / float64(l.blockBytes))
			if blocks != tt.blocks {
				t.Errorf("%d blocks, want %d", blocks, tt.blocks)
			}
			if got := l.tokens(blocks, tt.context, 2048, tt.byRequest); tt.tokens > 0 && got != tt.tokens {
				t.Errorf("%d tokens, want %d", got, tt.tokens)
			}
			if got := l.longest(blocks, 2048, tt.context); tt.longest > 0 && got != tt.longest {
				t.Errorf("longest %d, want %d", got, tt.longest)
			}
		})
	}
}

// Latent attention and a single KV head are copied to every rank, other heads split.
func TestRanksShareTheCache(t *testing.T) {
	c := catalogue(t)
	for _, tt := range []struct {
		model string
		tp    int
		part  int64
	}{{"Qwen/Qwen3-32B", 4, 4}, {"Qwen/Qwen3-32B", 16, 8}, {"Qwen/Qwen2.5-3B-Instruct", 8, 2}, {"deepseek-ai/DeepSeek-R1-0528", 8, 1}} {
		m, _ := c.Find(tt.model)
		one, many := m.Architecture.fullTokenBytes(1, 2, false), m.Architecture.fullTokenBytes(tt.tp, 2, false)
		if one != many*tt.part {
			t.Errorf("%s on %d: %d of %d bytes", tt.model, tt.tp, many, one)
		}
	}
}

func TestAssess(t *testing.T) {
	c := catalogue(t)
	busy := FactsOf(product(t, "h200"), 1)
	busy[0].MemoryUsedMiB = 135402
	tests := []struct {
		name    string
		model   string
		gpus    []GPUFact
		ask     Ask
		verdict Verdict
		reason  Reason
		detail  string
	}{
		{"roomy", "Qwen/Qwen3-8B", FactsOf(product(t, "l40s"), 1), Ask{}, Fits, ReasonNone, ""},
		{"weights", "meta-llama/Llama-3.3-70B-Instruct", FactsOf(product(t, "h200"), 1), Ask{}, No, ReasonWeights, "131.7 GiB"},
		{"context", "Qwen/Qwen3-8B", FactsOf(product(t, "l4"), 1), Ask{ContextTokens: 40960}, No, ReasonKV, "40960 tokens"},
		{"too old", "Qwen/Qwen3-8B", FactsOf(product(t, "t4"), 1), Ask{}, No, ReasonCapability, "7.5"},
		{"old release", "Qwen/Qwen3.8-27B", FactsOf(product(t, "h100"), 1), Ask{VLLM: "0.11.0"}, No, ReasonVersion, "0.17.0"},
		{"no release", "Qwen/Qwen3-8B", FactsOf(product(t, "h100"), 1), Ask{VLLM: "new"}, No, ReasonVersion, "new"},
		{"heads", "Qwen/Qwen3-14B", FactsOf(product(t, "l4"), 3), Ask{TensorParallel: 3}, No, ReasonHeads, "40 attention heads"},
		{"held by others", "Qwen/Qwen3-8B", busy, Ask{AsGiven: true, VLLM: ServedVLLM}, No, ReasonBusy, "others hold 132.2 GiB"},
		{"others leave too little", "Qwen/Qwen3-8B", busy, Ask{}, No, ReasonBusy, "others leave"},
		{"trial capture", "Qwen/Qwen3.8-27B", FactsOf(product(t, "rtx-5090"), 1), Ask{AsGiven: true, Variant: "nvfp4", VLLM: "0.27.1", Utilization: 0.9, ContextTokens: 65536}, No, ReasonGraphs, "eager"},
		{"the same, found", "Qwen/Qwen3.8-27B", FactsOf(product(t, "rtx-5090"), 1), Ask{Variant: "nvfp4", ContextTokens: 16384}, Fits, ReasonNone, ""},
		{"states", "Qwen/Qwen3.8-27B", FactsOf(product(t, "h100"), 1), Ask{AsGiven: true, Variant: "fp8", VLLM: "0.27.1", ContextTokens: 8192}, No, ReasonStates, "state blocks"},
		{"beside the share", "google/gemma-4-E4B-it", FactsOf(product(t, "l4"), 1), Ask{AsGiven: true, Variant: "w4a16", VLLM: "0.28.0", Utilization: 0.98, ContextTokens: 8192}, No, ReasonGraphs, "smaller share"},
		{"shared", "Qwen/Qwen3-8B", []GPUFact{{Name: "card", MemoryTotalMiB: 40960, ComputeMajor: 8, Shared: true}}, Ask{}, Tight, ReasonBusy, "isn't known"},
		{"no such form", "Qwen/Qwen3-8B", FactsOf(product(t, "l4"), 1), Ask{Variant: "int1"}, No, ReasonWeights, "no form"},
		{"nothing to serve on", "Qwen/Qwen3-8B", nil, Ask{}, No, ReasonCapability, "no GPU"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f, err := c.Assess(tt.model, tt.gpus, tt.ask)
			if err != nil {
				t.Fatal(err)
			}
			if f.Verdict != tt.verdict || f.Reason != tt.reason || !strings.Contains(f.Detail, tt.detail) {
				t.Errorf("%s, %q: %s", f.Verdict, f.Reason, f.Detail)
			}
		})
	}
	if _, err := c.Assess("nobody/nothing", FactsOf(product(t, "l4"), 1), Ask{}); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("unknown: %v", err)
	}
}

func TestInstead(t *testing.T) {
	f, err := catalogue(t).Assess("Qwen/Qwen3-32B", FactsOf(product(t, "rtx-5090"), 1), Ask{})
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(f.Instead, "\n")
	for _, want := range []string{"Qwen/Qwen3-32B-AWQ (awq)", "such GPUs together", "Qwen/Qwen3-8B"} {
		if !strings.Contains(all, want) {
			t.Errorf("want %q in %q", want, f.Instead)
		}
	}
	long, err := catalogue(t).Assess("Qwen/Qwen3-8B", FactsOf(product(t, "l4"), 1), Ask{ContextTokens: 40960})
	if err != nil || !slices.ContainsFunc(long.Instead, func(s string) bool { return strings.Contains(s, "at most") }) {
		t.Errorf("a shorter context: %q, %v", long.Instead, err)
	}
}

// What is asked of vLLM is what was judged.
func TestAssessSaysHow(t *testing.T) {
	c := catalogue(t)
	f, err := c.Assess("Qwen/Qwen3.8-27B", FactsOf(product(t, "rtx-5090"), 1), Ask{Variant: "nvfp4"})
	if err != nil || f.Verdict == No {
		t.Fatalf("%s: %s, %v", f.Verdict, f.Detail, err)
	}
	args := strings.Join(f.Arguments.Args(), " ")
	for _, want := range []string{"Inferact/Qwen3.8-27B-NVFP4", "--max-num-seqs=", fmt.Sprintf("--max-model-len=%d", f.ContextTokens), "--gpu-memory-utilization="} {
		if !strings.Contains(args, want) {
			t.Errorf("want %q in %q", want, args)
		}
	}
	again, err := c.Assess("Qwen/Qwen3.8-27B", FactsOf(product(t, "rtx-5090"), 1), Ask{AsGiven: true, VLLM: ServedVLLM, Variant: "nvfp4",
		ContextTokens: f.ContextTokens, MaxNumSeqs: f.Arguments.MaxNumSeqs, Utilization: f.Utilization, TensorParallel: 1})
	if err != nil || again.Verdict == No {
		t.Errorf("as given: %s %s, %v", again.Verdict, again.Detail, err)
	}
}

func TestImageFor(t *testing.T) {
	datacenter, consumer := GPUFact{Name: "NVIDIA A10"}, GPUFact{Name: "NVIDIA GeForce RTX 4090"}
	tests := []struct {
		gpu          GPUFact
		driver, vllm string
		tag          string
		compat       bool
		problem      string
	}{
		{datacenter, "580.65.06", "0.32.0", "v0.32.0", false, ""},
		{datacenter, "595.58.03", "0.32.0", "v0.32.0", false, ""},
		{datacenter, "570.86.15", "0.32.0", "v0.32.0", true, ""},
		{datacenter, "535.183.06", "0.32.0", "v0.32.0", true, ""},
		{consumer, "570.86.15", "0.32.0", "v0.32.0-cu129", false, "check that"},
		{datacenter, "550.90.07", "0.32.0", "v0.32.0-cu129", false, "check that"},
		{datacenter, "470.82.01", "0.32.0", "", false, "no image"},
		{datacenter, "550.90.07", "0.19.0", "v0.19.0", false, ""},
		{datacenter, "", "", "v" + ServedVLLM, false, ""},
	}
	for _, tt := range tests {
		got := ImageFor(tt.gpu, tt.driver, tt.vllm)
		if got.Tag != tt.tag || (len(got.Env) > 0) != tt.compat || !strings.Contains(got.Problem, tt.problem) || tt.problem == "" && got.Problem != "" {
			t.Errorf("%s, driver %s, vLLM %s: %+v", tt.gpu.Name, tt.driver, tt.vllm, got)
		}
	}
}

// What CUDA reports of what nvidia-smi prints, from public start-up lines.
func TestVisibleBytes(t *testing.T) {
	for key, want := range map[string]float64{"l4": 22.04, "a10g": 22.06, "rtx-3090": 23.56, "rtx-5090": 31.36, "a100-40": 39.49, "l40s": 44.52, "h100": 79.19, "rtx-pro-6000": 94.97, "h200": 139.81, "b200": 178.35, "b300": 267.69} {
		if got := visibleBytes(product(t, key).MemoryMiB) / gib; math.Abs(got/want-1) > 0.005 {
			t.Errorf("%s: %.2f GiB, CUDA says %.2f", key, got, want)
		}
	}
}

// The release judged for is the one that is deployed.
func TestServedRelease(t *testing.T) {
	data, err := os.ReadFile("../../embed/components.yaml")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`vllm/vllm-openai:v([0-9.]+)`).FindSubmatch(data)
	if m == nil || string(m[1]) != ServedVLLM {
		t.Errorf("components.yaml deploys %q, the arithmetic is for %s", m, ServedVLLM)
	}
}

func TestFactsOfReport(t *testing.T) {
	major, minor := 8, 9
	report := gpu.Report{Devices: []gpu.Device{
		{Name: "NVIDIA L4", ComputeMajor: &major, ComputeMinor: &minor, Memory: &gpu.Memory{TotalBytes: 23034 << 20, UsedBytes: 5600 << 20}},
		{Name: "NVIDIA L4", PCIDevice: "27B8"},
		{PCIDevice: "2330"},
		{Name: "NVIDIA H100 80GB HBM3", Lost: true},
		{Name: "NVIDIA A100-SXM4-80GB", MIG: &gpu.MIG{Enabled: true, Instances: []gpu.MIGInstance{{MemoryBytes: 10 << 30}, {MemoryBytes: 20 << 30}}}},
		{Name: "NVIDIA A100-SXM4-80GB", MIG: &gpu.MIG{Enabled: true}},
		{Name: "unknown, and nothing read"},
	}}
	got := FactsOfReport(report)
	if len(got) != 5 {
		t.Fatalf("%d GPUs: %+v", len(got), got)
	}
	if got[0].MemoryUsedMiB < 4900 || got[0].MemoryUsedMiB > 5200 || got[0].ComputeMinor != 9 {
		t.Errorf("in use: %+v", got[0])
	}
	if got[1].MemoryTotalMiB != 23034 || got[2].Name != "NVIDIA H100 80GB HBM3" || got[2].NVLink != gpu.NVLinkSwitch {
		t.Errorf("from the table: %+v", got[1:3])
	}
	if got[3].MemoryTotalMiB != 10240 || got[4].NVLink != gpu.NVLinkNone {
		t.Errorf("slices: %+v", got[3:])
	}
}
