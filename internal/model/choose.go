package model

import (
	"errors"
	"fmt"
	"math"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// What vLLM takes beside weights and context, and what must stay free.
const (
	// MemoryUtilization is vLLM's own default share of a GPU's memory (0.92 since
	// vLLM 0.22, vllm/config/cache.py).
	MemoryUtilization = 0.92
	// overheadMiB is what loading leaves behind beside weights: the CUDA context,
	// activations of the profiling run, buffers.
	overheadMiB = 1536
	// linkMiB is NCCL's share per GPU when several work together.
	linkMiB = 400
	// outsideMiB must stay free: CUDA graphs are captured outside of vLLM's budget.
	outsideMiB = 1024
	// tightMiB of room for context or less is called tight.
	tightMiB = 2048
	// minContextTokens is the shortest context worth serving.
	minContextTokens = 4096
	// contextStep keeps the length a round number.
	contextStep = 1024
	// kvTrust is the part of the computed room that is promised; the rest covers
	// what the arithmetic does not know.
	kvTrust = 0.9
)

// MinCompute is the oldest compute capability served: Ampere. Before it GPUs have
// no bfloat16, which most models are stored in.
const MinCompute = "8.0"

// GPUFact is what must be known of one GPU.
type GPUFact struct {
	Name string
	// MemoryTotalMiB as nvidia-smi prints it, MemoryUsedMiB what others hold of it.
	MemoryTotalMiB, MemoryUsedMiB int64
	ComputeMajor, ComputeMinor    int
	// NVLink is one of package gpu's values.
	NVLink string
}

// FactsOf gives the facts of count idle GPUs of one product.
func FactsOf(p gpu.Product, count int) []GPUFact {
	facts := make([]GPUFact, 0, max(0, count))
	for range count {
		facts = append(facts, GPUFact{Name: p.Name, MemoryTotalMiB: p.MemoryMiB, ComputeMajor: p.ComputeMajor, ComputeMinor: p.ComputeMinor, NVLink: p.NVLink})
	}
	return facts
}

// ErrNoGPU says that there is nothing to serve on.
var ErrNoGPU = errors.New("no GPU")

// ErrUnknownModel says that the catalogue has no figures for a model.
var ErrUnknownModel = errors.New("model is not in the catalogue")

// CapabilityError says that a GPU is too old, or is not one a model runs on.
type CapabilityError struct {
	GPU, Have, Need, Why string
}

// Error implements error.
func (e *CapabilityError) Error() string {
	return fmt.Sprintf("%s has compute capability %s, needed is %s: %s", e.GPU, e.Have, e.Need, e.Why)
}

// MemoryError says that GPUs are too small or too full.
type MemoryError struct {
	// Model is empty when no model of the catalogue fits.
	Model string
	GPUs  int
	// HaveMiB is what each GPU offers the model, NeedMiB the least it would need.
	HaveMiB, NeedMiB int64
}

// Error implements error.
func (e *MemoryError) Error() string {
	what := e.Model
	if what == "" {
		what = "even the smallest known model"
	}
	return fmt.Sprintf("%s needs %d MiB on each of %d GPU(s), %d MiB can be had", what, e.NeedMiB, e.GPUs, e.HaveMiB)
}

// Choice is a model that fits, and how.
type Choice struct {
	Model Model
	// GPUs work on it together (tensor parallel size).
	GPUs int
	// ContextTokens is the longest context there is room for.
	ContextTokens int
	// KVTokens is the room for context of all requests together.
	KVTokens int64
	// MemoryUtilization is the share of each GPU's memory vLLM may take.
	MemoryUtilization float64
	// Tight fits have little room for context.
	Tight bool
	// Warnings are what a person should know before waiting for a download.
	Warnings []string
	// Reason says why this one, Source where its figures come from.
	Reason, Source string
	// Verified says that the figures were read from the model's own files.
	Verified bool
}

// weakest is what each GPU of a box can be relied on for: Kubernetes may hand out
// any of them.
func weakest(gpus []GPUFact) GPUFact {
	w := gpus[0]
	for _, g := range gpus[1:] {
		w.MemoryTotalMiB = min(w.MemoryTotalMiB, g.MemoryTotalMiB)
		w.MemoryUsedMiB = max(w.MemoryUsedMiB, g.MemoryUsedMiB)
		if (compute{g.ComputeMajor, g.ComputeMinor}).less(compute{w.ComputeMajor, w.ComputeMinor}) {
			w.Name, w.ComputeMajor, w.ComputeMinor = g.Name, g.ComputeMajor, g.ComputeMinor
		}
		if g.NVLink != w.NVLink {
			w.NVLink = gpu.NVLinkNone
		}
	}
	return w
}

func usable(gpus []GPUFact) (GPUFact, error) {
	if len(gpus) == 0 {
		return GPUFact{}, ErrNoGPU
	}
	w := weakest(gpus)
	least, err := parseCompute(MinCompute)
	if err != nil {
		return GPUFact{}, err
	}
	have := compute{w.ComputeMajor, w.ComputeMinor}
	if have.less(least) {
		return GPUFact{}, &CapabilityError{GPU: w.Name, Have: have.String(), Need: MinCompute + " or newer",
			Why: "Ampere and newer GPUs (A10, A100, L4, RTX 30 and later) have bfloat16, which models are stored in"}
	}
	return w, nil
}

// Choose takes the best default for these GPUs: the first row that they meet.
func (c Catalogue) Choose(gpus []GPUFact) (Choice, error) {
	w, err := usable(gpus)
	if err != nil {
		return Choice{}, err
	}
	var last error = &MemoryError{GPUs: len(gpus), HaveMiB: w.MemoryTotalMiB}
	for _, d := range c.Defaults {
		m, known := c.Find(d.Name)
		if !known || d.GPUs > len(gpus) {
			continue
		}
		if w.MemoryTotalMiB < d.MinTotalMiB {
			if d.GPUs == 1 {
				last = &MemoryError{GPUs: 1, HaveMiB: w.MemoryTotalMiB, NeedMiB: d.MinTotalMiB}
			}
			continue
		}
		choice, err := fit(m, w, d.GPUs)
		if err != nil {
			last = err
			continue
		}
		choice.Reason = d.Reason
		return choice, nil
	}
	return Choice{}, last
}

// Fit says how a named model of the catalogue fits these GPUs, on as few of them
// as it can.
func (c Catalogue) Fit(name string, gpus []GPUFact) (Choice, error) {
	m, known := c.Find(name)
	if !known {
		return Choice{}, fmt.Errorf("%w: %s", ErrUnknownModel, name)
	}
	w, err := usable(gpus)
	if err != nil {
		return Choice{}, err
	}
	var last error
	for together := 1; together <= len(gpus); together *= 2 {
		if m.AttentionHeads%together != 0 {
			break
		}
		choice, err := fit(m, w, together)
		if err == nil {
			choice.Reason = fmt.Sprintf("asked for; fits %d of %d GPU(s)", together, len(gpus))
			return choice, nil
		}
		last = err
	}
	return Choice{}, last
}

// fit does the arithmetic for one model on together GPUs like w.
func fit(m Model, w GPUFact, together int) (Choice, error) {
	if err := capability(m, w); err != nil {
		return Choice{}, err
	}
	share := utilization(w)
	budget := float64(w.MemoryTotalMiB) * share
	fixed := float64(m.WeightsBytes)*m.LoadFactor/float64(together)/(1<<20) + overheadMiB
	if together > 1 {
		fixed += linkMiB
	}
	// KV heads are copied, not split, once there are more GPUs than heads.
	perToken := float64(m.KVBytesPerToken) / float64(min(together, m.KVHeads)) / (1 << 20)
	room := budget - fixed
	tokens := int64(math.Max(0, room/perToken*kvTrust))
	least := min(minContextTokens, m.ContextTokens)
	if tokens < int64(least) {
		return Choice{}, &MemoryError{Model: m.Name, GPUs: together, HaveMiB: int64(budget),
			NeedMiB: int64(math.Ceil(fixed + float64(least)*perToken/kvTrust))}
	}
	context := min(int64(m.ContextTokens), tokens)
	if context < int64(m.ContextTokens) {
		context -= context % contextStep
	}
	choice := Choice{
		Model: m, GPUs: together, ContextTokens: int(context), KVTokens: tokens, MemoryUtilization: share,
		Tight: room < tightMiB, Source: m.Source, Verified: m.Verified,
	}
	if together > 1 && w.NVLink != gpu.NVLinkSwitch {
		choice.Warnings = append(choice.Warnings, fmt.Sprintf("%d GPUs share the model over PCIe or a bridge: each token waits for that link", together))
	}
	if w.MemoryUsedMiB > outsideMiB {
		choice.Warnings = append(choice.Warnings, fmt.Sprintf("%d MiB of the GPU's memory are already in use by others", w.MemoryUsedMiB))
	}
	return choice, nil
}

func capability(m Model, w GPUFact) error {
	have := compute{w.ComputeMajor, w.ComputeMinor}
	least, err := parseCompute(m.MinCompute)
	if err != nil {
		return err
	}
	if have.less(least) {
		return &CapabilityError{GPU: w.Name, Have: have.String(), Need: m.MinCompute + " or newer", Why: m.Name + " is not known to run on it"}
	}
	if m.MaxCompute == "" {
		return nil
	}
	most, err := parseCompute(m.MaxCompute)
	if err != nil {
		return err
	}
	if most.less(have) {
		return &CapabilityError{GPU: w.Name, Have: have.String(), Need: "at most " + m.MaxCompute, Why: m.Name + " is not known to run on it"}
	}
	return nil
}

// utilization is vLLM's default, or less where what others hold and what graphs
// take would not fit beside it. It is a share of the total, rounded down.
func utilization(w GPUFact) float64 {
	if w.MemoryTotalMiB <= 0 {
		return 0
	}
	free := float64(w.MemoryTotalMiB-w.MemoryUsedMiB-outsideMiB) / float64(w.MemoryTotalMiB)
	return math.Max(0, math.Min(MemoryUtilization, math.Floor(free*100)/100))
}
