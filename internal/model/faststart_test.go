package model

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

func TestFitStart(t *testing.T) {
	c := catalogue(t)
	for _, tt := range []struct {
		name, gpu string
		count     int
		model     string
		asked     FastStart
		extra     []string
		mode      FastStart
		reason    string
		arg       string
	}{
		{"nothing asked", "l4", 1, "Qwen/Qwen3-8B", FastStartOff, nil, FastStartOff, "", ""},
		{"no word at all", "l4", 1, "Qwen/Qwen3-8B", "", nil, FastStartOff, "", ""},
		{"slow memory hides the kernels' start", "l4", 1, "Qwen/Qwen3-8B", FastStartAuto, nil, FastStartEager, "reads the weights in", "--enforce-eager"},
		{"so does a large model on a middling card", "l40s", 1, "Qwen/Qwen3-14B", FastStartAuto, nil, FastStartEager, "little is lost", "--enforce-eager"},
		{"fast memory does not", "h100", 1, "Qwen/Qwen3-8B", FastStartAuto, nil, FastStartGraphs, "the GPU would wait", "--max-cudagraph-capture-size=32"},
		{"not even with a large model", "h100", 1, "Qwen/Qwen3-32B", FastStartAuto, nil, FastStartGraphs, "the GPU would wait", "--max-cudagraph-capture-size=32"},
		{"several ranks", "l4", 2, "Qwen/Qwen3-14B", FastStartAuto, nil, FastStartGraphs, "2 GPUs wait for each other", "--max-cudagraph-capture-size=32"},
		{"experts", "l40s", 1, "openai/gpt-oss-20b", FastStartAuto, nil, FastStartGraphs, "experts", "--max-cudagraph-capture-size=32"},
		{"states", "l4", 1, "Qwen/Qwen3.5-4B", FastStartAuto, nil, FastStartGraphs, "layers with a state", "--max-cudagraph-capture-size=32"},
		{"what is asked for by name is done", "h100", 1, "Qwen/Qwen3-8B", FastStartEager, nil, FastStartEager, "asked for", "--enforce-eager"},
		{"on several ranks too", "l4", 2, "Qwen/Qwen3-14B", FastStartEager, nil, FastStartEager, "asked for", "--enforce-eager"},
		{"graphs by name", "l4", 1, "Qwen/Qwen3-8B", FastStartGraphs, nil, FastStartGraphs, "asked for", "--max-cudagraph-capture-size=32"},
		{"one's own words win", "l4", 1, "Qwen/Qwen3-8B", FastStartEager, []string{"--max_cudagraph_capture_size=64"}, FastStartOff, "--max-cudagraph-capture-size in model.extraArgs", ""},
		{"short ones too", "l4", 1, "Qwen/Qwen3-8B", FastStartAuto, []string{"-O1"}, FastStartOff, "-O1 in model.extraArgs", ""},
		{"and parts of them", "l4", 1, "Qwen/Qwen3-8B", FastStartAuto, []string{"-cc.cudagraph_mode=PIECEWISE"}, FastStartOff, "-cc.cudagraph_mode in", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			gpus := FactsOf(product(t, tt.gpu), tt.count)
			got, err := c.FitStart(tt.model, 0, gpus, tt.asked, tt.extra)
			if err != nil {
				t.Fatal(err)
			}
			if got.Start.Mode != tt.mode || !strings.Contains(got.Start.Reason, tt.reason) || (got.Start.Reason == "") != (tt.reason == "") {
				t.Errorf("%+v, want %s and %q", got.Start, tt.mode, tt.reason)
			}
			args := got.Arguments().Args()
			about := slices.DeleteFunc(slices.Clone(args), func(word string) bool { return graphWord([]string{word}) == "" })
			if strings.Join(about, " ") != tt.arg {
				t.Errorf("vLLM is told %q, want %q", about, tt.arg)
			}
			plain, err := c.Fit(tt.model, 0, gpus)
			if err != nil {
				t.Fatal(err)
			}
			if got.GPUs != plain.GPUs || got.Fit.Variant != plain.Fit.Variant || got.ContextTokens != plain.ContextTokens {
				t.Errorf("%d GPUs, form %q, %d tokens; plainly %d, %q, %d", got.GPUs, got.Fit.Variant, got.ContextTokens, plain.GPUs, plain.Fit.Variant, plain.ContextTokens)
			}
			if more := got.Fit.Budget.Cache - plain.Fit.Budget.Cache; (tt.mode == FastStartOff) != (more == 0) || more < 0 {
				t.Errorf("%d more bytes of cache", more)
			}
			// What was found comes back on the next run, which asks by name and context.
			again, err := c.FitStart(tt.model, got.ContextTokens, gpus, tt.asked, tt.extra)
			if err != nil || again.Start != got.Start || !slices.Equal(again.Arguments().Args(), args) {
				t.Errorf("then %+v, %q, %v", again.Start, again.Arguments().Args(), err)
			}
		})
	}
}

// Without graphs a longer context fits, and so does what would not fit at all.
func TestFitStartMakesRoom(t *testing.T) {
	c := catalogue(t)
	l4 := FactsOf(product(t, "l4"), 1)
	plain, err := c.Fit("Qwen/Qwen3-8B", 0, l4)
	if err != nil {
		t.Fatal(err)
	}
	eager, err := c.FitStart("Qwen/Qwen3-8B", 0, l4, FastStartEager, nil)
	if err != nil || eager.ContextTokens != plain.ContextTokens || eager.KVTokens <= plain.KVTokens {
		t.Fatalf("%d tokens without graphs, %d with, %v", eager.KVTokens, plain.KVTokens, err)
	}
	asked := plain.ContextTokens + 4096
	if _, err := c.Fit("Qwen/Qwen3-8B", asked, l4); err == nil {
		t.Errorf("%d tokens fit beside all graphs", asked)
	}
	if got, err := c.FitStart("Qwen/Qwen3-8B", asked, l4, FastStartAuto, nil); err != nil || got.Start.Mode != FastStartEager || got.ContextTokens != asked {
		t.Errorf("%+v, %v", got.Start, err)
	}
	var memory *MemoryError
	if _, err := c.FitStart("Qwen/Qwen3-8B", 40960, l4, FastStartEager, nil); !errors.As(err, &memory) {
		t.Errorf("a context that never fits: %v", err)
	}

	// Looks for a card that is just too small for the graphs.
	for mib := int64(9000); mib < 12000; mib += 20 {
		small := []GPUFact{{Name: "NVIDIA L4", MemoryTotalMiB: mib, ComputeMajor: 8, ComputeMinor: 9}}
		if _, err := c.Fit("Qwen/Qwen3-4B", 0, small); err == nil {
			break
		}
		got, err := c.FitStart("Qwen/Qwen3-4B", 0, small, FastStartAuto, nil)
		if err != nil {
			continue
		}
		again, err := c.FitStart("Qwen/Qwen3-4B", got.ContextTokens, small, FastStartAuto, nil)
		if err != nil || !slices.Equal(again.Arguments().Args(), got.Arguments().Args()) || !strings.Contains(got.Start.Reason, "would not fit") {
			t.Errorf("%d MiB: %+v %q, then %q, %v", mib, got.Start, got.Arguments().Args(), again.Arguments().Args(), err)
		}
		return
	}
	t.Error("no card on which only a fast start fits")
}

// A model of one's own directory is started as asked, though nothing is known of it.
func TestFitStartOfUnknownModels(t *testing.T) {
	c := catalogue(t)
	for asked, want := range map[FastStart]string{FastStartAuto: "--max-cudagraph-capture-size=32", FastStartEager: "--enforce-eager"} {
		got, err := c.FitStart("/srv/models/own", 0, FactsOf(product(t, "l4"), 1), asked, nil)
		if !errors.Is(err, ErrUnknownModel) || !slices.Contains(got.Arguments().Args(), want) || got.Start.Reason == "" {
			t.Errorf("%s: %q, %+v, %v", asked, got.Arguments().Args(), got.Start, err)
		}
	}
	if _, err := c.FitStart("Qwen/Qwen3-8B", 0, nil, FastStartAuto, nil); !errors.Is(err, ErrNoGPU) {
		t.Errorf("without a GPU: %v", err)
	}
}

func TestMemoryRates(t *testing.T) {
	for _, p := range gpu.Products() {
		if rate := memoryRate(p.Name); rate < 200e9 || rate > 8000e9 {
			t.Errorf("%s reads %v bytes a second", p.Key, rate)
		}
	}
	if memoryRate("somebody's") != 0 {
		t.Error("a product that nobody knows has a rate")
	}
}
