package model

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

func catalogue(t *testing.T) Catalogue {
	t.Helper()
	c, err := Load(os.DirFS("../../embed"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func product(t *testing.T, key string) gpu.Product {
	t.Helper()
	p, ok := gpu.ProductByKey(key)
	if !ok {
		t.Fatalf("no product %q", key)
	}
	return p
}

func TestChoose(t *testing.T) {
	c := catalogue(t)
	tests := []struct {
		key     string
		count   int
		model   string
		gpus    int
		context int
	}{
		{"a10", 1, "Qwen/Qwen3-8B", 1, 23552},
		{"a10g", 1, "Qwen/Qwen3-8B", 1, 23552},
		{"l4", 1, "Qwen/Qwen3-8B", 1, 23552},
		{"a30", 1, "Qwen/Qwen3-8B", 1, 32768},
		{"rtx-4090", 1, "Qwen/Qwen3-8B", 1, 32768},
		{"rtx-5090", 1, "Qwen/Qwen3-8B", 1, 40960},
		{"a10", 2, "Qwen/Qwen3-14B", 2, 40960},
		{"a10", 4, "Qwen/Qwen3-32B", 4, 40960},
		{"a100-40", 1, "Qwen/Qwen3-14B", 1, 40960},
		{"a40", 1, "Qwen/Qwen3-14B", 1, 40960},
		{"l40s", 2, "Qwen/Qwen3-32B", 2, 40960},
		{"a100-80", 1, "Qwen/Qwen3-32B", 1, 37888},
		{"a100-80", 8, "Qwen/Qwen3-32B", 1, 37888},
		{"h100", 1, "Qwen/Qwen3-32B", 1, 32768},
		{"h100", 8, "openai/gpt-oss-120b", 2, 131072},
		{"rtx-pro-6000", 1, "Qwen/Qwen3-32B", 1, 40960},
		{"gh200", 1, "openai/gpt-oss-120b", 1, 131072},
		{"h200", 1, "openai/gpt-oss-120b", 1, 131072},
		{"h200", 8, "openai/gpt-oss-120b", 1, 131072},
		{"b200", 1, "openai/gpt-oss-120b", 1, 131072},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("%dx%s", tt.count, tt.key), func(t *testing.T) {
			got, err := c.Choose(FactsOf(product(t, tt.key), tt.count))
			if err != nil {
				t.Fatal(err)
			}
			if got.Model.Name != tt.model || got.GPUs != tt.gpus || got.ContextTokens != tt.context {
				t.Errorf("chose %s on %d GPU(s) with %d tokens, want %s, %d, %d", got.Model.Name, got.GPUs, got.ContextTokens, tt.model, tt.gpus, tt.context)
			}
			if got.Reason == "" || got.Source == "" || got.KVTokens < int64(got.ContextTokens) || got.Model.Gated {
				t.Errorf("not whole: %+v", got)
			}
			if warned := len(got.Warnings) > 0; warned != (got.GPUs > 1 && product(t, tt.key).NVLink != gpu.NVLinkSwitch) {
				t.Errorf("warnings %q", got.Warnings)
			}
		})
	}
}

// Every product on its own gets a model or an error that says what is needed.
func TestChooseKnowsEveryProduct(t *testing.T) {
	c := catalogue(t)
	for _, p := range gpu.Products() {
		_, err := c.Choose(FactsOf(p, 1))
		if (err != nil) != (p.ComputeMajor < 8) {
			t.Errorf("%s: %v", p.Key, err)
		}
	}
}

func TestChooseRefuses(t *testing.T) {
	c := catalogue(t)
	if _, err := c.Choose(nil); !errors.Is(err, ErrNoGPU) {
		t.Errorf("no GPU: %v", err)
	}
	_, err := c.Choose(FactsOf(product(t, "t4"), 1))
	var old *CapabilityError
	if !errors.As(err, &old) || old.Have != "7.5" || !strings.Contains(err.Error(), "Tesla T4 has compute capability 7.5, needed is 8.0 or newer: Ampere") {
		t.Errorf("T4: %v", err)
	}
	// One old card among new ones: Kubernetes might hand it out.
	mixed := append(FactsOf(product(t, "a10"), 1), FactsOf(product(t, "t4"), 1)...)
	if _, err := c.Choose(mixed); !errors.As(err, &old) || old.GPU != "Tesla T4" {
		t.Errorf("mixed: %v", err)
	}
	small := []GPUFact{{Name: "slice", MemoryTotalMiB: 2500, ComputeMajor: 8}}
	var memory *MemoryError
	if _, err := c.Choose(small); !errors.As(err, &memory) || memory.NeedMiB <= memory.HaveMiB || memory.Model != "" {
		t.Errorf("small: %v", err)
	}
	full := FactsOf(product(t, "a10"), 1)
	full[0].MemoryUsedMiB = 21000
	if _, err := c.Choose(full); !errors.As(err, &memory) {
		t.Errorf("full: %v", err)
	}
}

func TestChooseLeavesNeighboursTheirMemory(t *testing.T) {
	c := catalogue(t)
	busy := FactsOf(product(t, "a10"), 1)
	busy[0].MemoryUsedMiB = 8000
	got, err := c.Choose(busy)
	if err != nil {
		t.Fatal(err)
	}
	if got.Model.Name != "Qwen/Qwen3-4B" || got.MemoryUtilization != 0.59 || len(got.Warnings) != 1 {
		t.Errorf("chose %s at %.2f, warnings %q", got.Model.Name, got.MemoryUtilization, got.Warnings)
	}
	if taken := got.MemoryUtilization * float64(busy[0].MemoryTotalMiB); taken+8000 > float64(busy[0].MemoryTotalMiB) {
		t.Errorf("%.0f MiB beside 8000 do not fit", taken)
	}
}

func TestFit(t *testing.T) {
	c := catalogue(t)
	got, err := c.Fit("Qwen/Qwen3-32B", 0, FactsOf(product(t, "a10"), 4))
	if err != nil || got.GPUs != 4 {
		t.Errorf("32B on four A10: %d GPUs, %v", got.GPUs, err)
	}
	var memory *MemoryError
	if _, err := c.Fit("Qwen/Qwen3-32B", 0, FactsOf(product(t, "a10"), 1)); !errors.As(err, &memory) || memory.NeedMiB <= memory.HaveMiB {
		t.Errorf("32B on one A10: %v", err)
	}
	if _, err := c.Fit("nobody/nothing", 0, FactsOf(product(t, "a10"), 1)); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("unknown: %v", err)
	}
	var capability *CapabilityError
	if _, err := c.Fit("deepseek-ai/DeepSeek-V3.2", 0, FactsOf(product(t, "a100-80"), 8)); !errors.As(err, &capability) {
		t.Errorf("too old for its kernels: %v", err)
	}
}

func TestArgs(t *testing.T) {
	c := catalogue(t)
	choice, err := c.Choose(FactsOf(product(t, "a10"), 2))
	if err != nil {
		t.Fatal(err)
	}
	a := choice.Arguments()
	a.ServedName, a.Revision = "assistant", "abc"
	tests := []struct {
		name  string
		extra []string
		want  []string
	}{
		{"computed", nil, []string{"Qwen/Qwen3-14B", "--revision=abc", "--served-model-name=assistant", "--max-model-len=40960", "--gpu-memory-utilization=0.92", "--tensor-parallel-size=2", "--reasoning-parser=qwen3", "--enable-auto-tool-choice", "--tool-call-parser=hermes"}},
		{"user's parsers win", []string{"--tool_call_parser=qwen3_coder", "--reasoning-parser", "none"},
			[]string{"Qwen/Qwen3-14B", "--revision=abc", "--served-model-name=assistant", "--max-model-len=40960", "--gpu-memory-utilization=0.92", "--tensor-parallel-size=2", "--tool_call_parser=qwen3_coder", "--reasoning-parser", "none"}},
		{"user wins", []string{"--gpu_memory_utilization", "0.8", "-tp=1", "--max-num-seqs=64"},
			[]string{"Qwen/Qwen3-14B", "--revision=abc", "--served-model-name=assistant", "--max-model-len=40960", "--reasoning-parser=qwen3", "--enable-auto-tool-choice", "--tool-call-parser=hermes", "--gpu_memory_utilization", "0.8", "-tp=1", "--max-num-seqs=64"}},
	}
	for _, tt := range tests {
		a.Extra = tt.extra
		if got := a.Args(); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	if got := (Arguments{Model: "/data/own"}).Args(); !slices.Equal(got, []string{"/data/own"}) {
		t.Errorf("a model without figures: %q", got)
	}
}

func TestLoadRefuses(t *testing.T) {
	good, err := os.ReadFile("../../embed/models.yaml")
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct{ name, old, new, want string }{
		{"unknown key", "licence: Apache-2.0", "license: Apache-2.0", "field license not found"},
		{"no source", `source: "huggingface.co/Qwen/Qwen3-0.6B`, `source: "" # `, "has no source"},
		{"no figure", "weights_bytes: 1503264768", "weights_bytes: 0", "lacks a figure"},
		{"no basis", "weights_from: index", "weights_from: guess", "how the size is known"},
		{"no dims", "kv_heads: 8, head_dim: 128", "kv_heads: 0, head_dim: 128", "lacks heads"},
		{"no window", "window: 128", "window: 0", "without a window"},
		{"gated default", "gated: false", "gated: true", "is gated"},
		{"default without model", "defaults:\n- {name: openai/gpt-oss-120b", "defaults:\n- {name: nobody/nothing", "not in the list of models"},
		{"heads", "gpus: 4", "gpus: 3", "3 GPUs can't share"},
		{"no context", "min_context_tokens: 131072", "min_context_tokens: 0", "lacks its context"},
		{"capability", `min_compute: "8.0"`, `min_compute: "ampere"`, "is not a compute capability"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			changed := strings.Replace(string(good), tt.old, tt.new, 1)
			if changed == string(good) {
				t.Fatalf("%q is not in models.yaml any more", tt.old)
			}
			_, err := Load(fstest.MapFS{CatalogueFile: {Data: []byte(changed)}})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Load = %v, want %q", err, tt.want)
			}
		})
	}
	if _, err := Load(fstest.MapFS{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent: %v", err)
	}
}

// Every row of the defaults is what some box gets: none stands behind a better one
// that always fits first.
func TestDefaultsAreReached(t *testing.T) {
	c := catalogue(t)
	reached := map[string]bool{}
	boxes := [][]GPUFact{{{Name: "slice", MemoryTotalMiB: 4864, ComputeMajor: 8}}, {{Name: "slice", MemoryTotalMiB: 9728, ComputeMajor: 8}}}
	for _, p := range gpu.Products() {
		for _, n := range []int{1, 2, 4} {
			boxes = append(boxes, FactsOf(p, n))
		}
	}
	for _, box := range boxes {
		if choice, err := c.Choose(box); err == nil {
			reached[fmt.Sprintf("%s on %d", choice.Model.Name, choice.GPUs)] = true
		}
	}
	for _, d := range c.Defaults {
		if row := fmt.Sprintf("%s on %d", d.Name, d.GPUs); !reached[row] {
			t.Errorf("no box gets %s", row)
		}
	}
}

// A second run knows the name and the context of the first, and has to come to the
// same arguments: otherwise the model server would be restarted for nothing.
func TestChoiceComesBack(t *testing.T) {
	c := catalogue(t)
	for _, p := range gpu.Products() {
		for _, count := range []int{1, 2, 4, 8} {
			gpus := FactsOf(p, count)
			first, err := c.Choose(gpus)
			if err != nil {
				continue
			}
			again, err := c.Fit(first.Model.Name, first.ContextTokens, gpus)
			if err != nil {
				t.Errorf("%dx%s: %s comes back as %v", count, p.Key, first.Model.Name, err)
				continue
			}
			if a, b := first.Arguments().Args(), again.Arguments().Args(); !slices.Equal(a, b) {
				t.Errorf("%dx%s: first %q, then %q", count, p.Key, a, b)
			}
		}
	}
	for _, m := range c.Models {
		gpus := FactsOf(product(t, "h100"), 8)
		first, err := c.Fit(m.Name, 0, gpus)
		if err != nil {
			continue
		}
		again, err := c.Fit(m.Name, first.ContextTokens, gpus)
		if err != nil || !slices.Equal(first.Arguments().Args(), again.Arguments().Args()) {
			t.Errorf("%s: first %q, then %q, %v", m.Name, first.Arguments().Args(), again.Arguments().Args(), err)
		}
	}
}
