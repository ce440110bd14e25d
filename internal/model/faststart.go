package model

import (
	"errors"
	"fmt"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// FastStart is what may be given up for a sooner start of vLLM.
type FastStart string

// The ways to start. Auto is only asked for: it becomes one of the others.
const (
	// FastStartOff compiles and captures everything, as vLLM does by itself.
	FastStartOff FastStart = "off"
	// FastStartAuto takes eager where that costs little, and graphs elsewhere.
	FastStartAuto FastStart = "auto"
	// FastStartGraphs captures CUDA graphs for small batches only.
	FastStartGraphs FastStart = "graphs"
	// FastStartEager neither compiles nor captures.
	FastStartEager FastStart = "eager"
)

// Start is how vLLM is started, and why so.
type Start struct {
	Asked FastStart
	// Mode is off, graphs or eager.
	Mode FastStart
	// Reason is a sentence with its figures; empty where nothing was asked.
	Reason string
}

const (
	// fewGraphs is the largest batch that is captured with FastStartGraphs: 7 sizes where
	// vLLM's own 512 make 51 (vllm/config/compilation.py, max_cudagraph_capture_size).
	// Larger batches run the compiled code without a graph.
	fewGraphs = 32
	// launchPerLayer is how long a CPU takes to start the kernels of one layer, in
	// seconds: 0.41 s for the 128 tokens and 12 layers of OPT-125M, 1.26 s for the 32
	// layers of Llama 3.1 8B, both without graphs (vllm#10058).
	launchPerLayer = 0.00027
	// launchMargin is how many times longer than that the GPU must read weights, so that
	// starting kernels hides behind it: CPUs of rented machines are slower than those.
	launchMargin = 2
)

// ask puts a way to start into the terms of a fit.
func (m FastStart) ask(in Ask) Ask {
	switch m {
	case FastStartEager:
		in.Eager = true
	case FastStartGraphs:
		in.LargestGraph = fewGraphs
	}
	return in
}

// FitStart is Fit for a way to start: the memory that graphs would take goes to the
// cache, and a model that only fits without them fits. extra are the user's own words
// to vLLM, which win. What FitStart gave comes back for its own name and context.
func (c Catalogue) FitStart(name string, contextTokens int, gpus []GPUFact, asked FastStart, extra []string) (Choice, error) {
	if asked == "" || asked == FastStartOff {
		choice, err := c.Fit(name, contextTokens, gpus)
		choice.Start = Start{Asked: FastStartOff, Mode: FastStartOff}
		return choice, err
	}
	if word := graphWord(extra); word != "" {
		choice, err := c.Fit(name, contextTokens, gpus)
		choice.Start = Start{Asked: asked, Mode: FastStartOff, Reason: word + " in model.extraArgs decides that itself"}
		return choice, err
	}
	base, err := c.Fit(name, 0, gpus)
	switch {
	case errors.Is(err, ErrUnknownModel):
		// vLLM is told all the same; only the sum can't be done.
		start := Start{Asked: asked, Mode: asked, Reason: "asked for"}
		if asked == FastStartAuto {
			start.Mode, start.Reason = FastStartGraphs, "the model's figures aren't known, and fewer graphs cost least"
		}
		told := start.Mode.ask(Ask{})
		base.Fit.Arguments.Eager, base.Fit.Arguments.LargestGraph = told.Eager, told.LargestGraph
		base.Start = start
		return base, err
	case err != nil:
		return c.fitOnlySo(name, contextTokens, gpus, asked, base, err)
	}
	start := startFor(base.Fit, weakest(completed(gpus)), asked)
	f, err := c.Assess(name, gpus, start.Mode.ask(Ask{TensorParallel: base.GPUs, Variant: base.Fit.Variant}))
	if err != nil {
		return Choice{}, err
	}
	if contextTokens > f.ContextTokens {
		if f, err = c.Assess(name, gpus, start.Mode.ask(Ask{ContextTokens: contextTokens})); err != nil {
			return Choice{}, err
		}
		// A longer context may take more GPUs, and then another way to start.
		if again := startFor(f, weakest(completed(gpus)), asked); again.Mode != start.Mode {
			start = again
			if f, err = c.Assess(name, gpus, start.Mode.ask(Ask{ContextTokens: contextTokens})); err != nil {
				return Choice{}, err
			}
		}
	}
	if f.Verdict == No {
		return Choice{Fit: f}, f.asError()
	}
	choice := choiceOf(f, base.Reason)
	choice.Start = start
	// A longer context is there for who asks. By itself it stays what also fits beside all
	// graphs: it is recorded, and going back must not fail for it.
	choice.ContextTokens = min(choice.ContextTokens, max(base.ContextTokens, contextTokens))
	return choice, nil
}

// fitOnlySo is for what does not fit as vLLM starts by itself: the way that was asked
// for, and of auto the first that fits.
func (c Catalogue) fitOnlySo(name string, contextTokens int, gpus []GPUFact, asked FastStart, base Choice, refused error) (Choice, error) {
	modes := []FastStart{asked}
	if asked == FastStartAuto {
		modes = []FastStart{FastStartGraphs, FastStartEager}
	}
	for _, mode := range modes {
		f, err := c.Assess(name, gpus, mode.ask(Ask{}))
		if err == nil && contextTokens > f.ContextTokens {
			f, err = c.Assess(name, gpus, mode.ask(Ask{ContextTokens: contextTokens}))
		}
		if err != nil {
			return base, refused
		}
		if f.Verdict != No {
			choice := choiceOf(f, fmt.Sprintf("asked for; fits %d of %d GPU(s)", f.TensorParallel, len(gpus)))
			choice.Start = Start{Asked: asked, Mode: mode, Reason: "with all CUDA graphs it would not fit"}
			return choice, nil
		}
	}
	return base, refused
}

// startFor decides how a model that fits starts. Reading the weights once is what a
// token costs the GPU at least; where starting its kernels takes the CPU as long, it is
// graphs that keep the GPU busy.
func startFor(f Fit, g GPUFact, asked FastStart) Start {
	s := Start{Asked: asked, Mode: asked, Reason: "asked for"}
	if asked != FastStartAuto {
		return s
	}
	a := f.Model.Architecture
	launch := float64(a.Layers) * launchPerLayer
	rate := memoryRate(g.Name)
	s.Mode = FastStartGraphs
	switch {
	case f.TensorParallel > 1:
		s.Reason = fmt.Sprintf("%d GPUs wait for each other in every layer, and without graphs for each other's CPU threads too", f.TensorParallel)
	case a.ExpertsPerToken > 0:
		s.Reason = "experts are many small kernels a token: graphs are what keeps the GPU busy"
	case a.StateLayers > 0:
		s.Reason = "layers with a state start more kernels than others, and how long that takes isn't known"
	case rate == 0:
		s.Reason = "how fast this GPU reads its memory isn't known"
	default:
		read := float64(f.Budget.Weights) / rate
		s.Reason = fmt.Sprintf("the GPU reads the weights in %.0f ms a token, starting %d layers takes the CPU about %.0f ms", read*1e3, a.Layers, launch*1e3)
		if read >= launchMargin*launch {
			s.Mode = FastStartEager
			s.Reason += ": little is lost without graphs"
		} else {
			s.Reason += ": without graphs the GPU would wait"
		}
	}
	return s
}

// graphWord is the first of the user's words that is about compilation or graphs.
func graphWord(extra []string) string {
	for _, flag := range []string{"--enforce-eager", "--no-enforce-eager", "--compilation-config", "--optimization-level", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size"} {
		if given(extra, flag) {
			return flag
		}
	}
	for _, word := range extra {
		name, _, _ := strings.Cut(word, "=")
		// -O1, -O 1, -cc.mode=…, --compilation-config.mode=…, and the old -O.level=….
		if strings.HasPrefix(name, "-O") || name == "-cc" || strings.HasPrefix(name, "-cc.") || strings.HasPrefix(strings.ReplaceAll(name, "_", "-"), "--compilation-config.") {
			return name
		}
	}
	return ""
}

// memoryRate is how many bytes a second a product reads from its memory, as sold
// (NVIDIA's data sheets); 0 where that isn't known.
func memoryRate(name string) float64 {
	p, _ := gpu.ProductByName(name)
	const gb = 1e9
	switch p.Key {
	case "a2":
		return 200 * gb
	case "gb10":
		return 273 * gb
	case "l4":
		return 300 * gb
	case "t4":
		return 320 * gb
	case "a10", "a10g":
		return 600 * gb
	case "rtx-pro-4000":
		return 672 * gb
	case "a40":
		return 696 * gb
	case "rtx-a6000":
		return 768 * gb
	case "l40", "l40s":
		return 864 * gb
	case "rtx-pro-4500":
		return 896 * gb
	case "a30":
		return 933 * gb
	case "rtx-3090":
		return 936 * gb
	case "rtx-6000-ada":
		return 960 * gb
	case "rtx-4090":
		return 1008 * gb
	case "rtx-pro-5000":
		return 1344 * gb
	case "a100-40", "a100-40-pcie":
		return 1555 * gb
	case "rtx-pro-6000":
		return 1597 * gb
	case "rtx-5090", "rtx-pro-6000-ws":
		return 1792 * gb
	case "a100-80-pcie":
		return 1935 * gb
	case "h100-pcie":
		return 2000 * gb
	case "a100-80":
		return 2039 * gb
	case "h100":
		return 3350 * gb
	case "h100-nvl":
		return 3900 * gb
	case "gh200":
		return 4000 * gb
	case "h200", "h200-nvl":
		return 4800 * gb
	case "gh200-144":
		return 4900 * gb
	case "b200", "gb200", "b300", "gb300":
		return 8000 * gb
	}
	return 0
}
