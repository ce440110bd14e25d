package model

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

const (
	// minContextTokens is the shortest context worth serving.
	minContextTokens = 4096
	// contextStep keeps the length a round number.
	contextStep = 1024
	// busyMiB is what a GPU's others may hold without a word about it.
	busyMiB = 1024
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
	// VisibleBytes is the total as CUDA reports it, where that is known.
	VisibleBytes int64
	// Shared says that others hold memory, and not how much.
	Shared bool
	// Driver is the version of the kernel driver, where it is known.
	Driver string
}

// DataCenter says whether the GPU may run a newer CUDA than its driver's, with the
// libraries in the image: GeForce can't.
func (g GPUFact) DataCenter() bool {
	return !strings.Contains(g.Name, "GeForce") && !strings.Contains(g.Name, "TITAN")
}

// unified says whether the GPU has no memory of its own: programs and the page cache of
// the machine take from it.
func (g GPUFact) unified() bool {
	for _, name := range []string{"GB10", "Spark", "Jetson", "Thor", "Orin"} {
		if strings.Contains(g.Name, name) {
			return true
		}
	}
	return false
}

// FactsOfReport gives what a report says of each GPU that can be read. A GPU in
// slices counts as its slices.
func FactsOfReport(r gpu.Report) []GPUFact {
	var facts []GPUFact
	for _, d := range r.Devices {
		if d.Error != "" || d.Lost {
			continue
		}
		f := GPUFact{Name: d.Name, NVLink: gpu.NVLinkNone, Driver: r.Driver}
		known, ok := gpu.ProductByName(d.Name)
		if !ok {
			known, ok = gpu.ProductByPCI(d.PCIDevice)
		}
		if ok {
			f.ComputeMajor, f.ComputeMinor, f.MemoryTotalMiB, f.NVLink = known.ComputeMajor, known.ComputeMinor, known.MemoryMiB, known.NVLink
			if f.Name == "" {
				f.Name = known.Name
			}
		}
		if d.ComputeMajor != nil && d.ComputeMinor != nil {
			f.ComputeMajor, f.ComputeMinor = *d.ComputeMajor, *d.ComputeMinor
		}
		for _, link := range d.NVLinks {
			if link.Active && f.NVLink == gpu.NVLinkNone {
				f.NVLink = gpu.NVLinkBridge
			}
		}
		if d.Memory != nil && d.Memory.TotalBytes > 0 {
			f.MemoryTotalMiB = int64(d.Memory.TotalBytes >> 20)
			f.MemoryUsedMiB = int64(d.Memory.UsedBytes >> 20)
			// NVML counts the driver's own part as used; CUDA leaves it out of the total.
			reserved := f.MemoryTotalMiB - int64(visibleBytes(f.MemoryTotalMiB)/mib)
			f.MemoryUsedMiB = max(0, f.MemoryUsedMiB-max(reserved, int64(d.Memory.ReservedBytes>>20)))
		}
		if f.MemoryTotalMiB == 0 {
			continue
		}
		if d.MIG != nil && d.MIG.Enabled {
			for _, slice := range d.MIG.Instances {
				if slice.MemoryBytes > 0 {
					one := f
					one.NVLink, one.MemoryUsedMiB = gpu.NVLinkNone, 0
					one.MemoryTotalMiB = int64(slice.MemoryBytes >> 20)
					facts = append(facts, one)
				}
			}
			continue
		}
		facts = append(facts, f)
	}
	return facts
}

// FactsOf gives the facts of count idle GPUs of one product.
func FactsOf(p gpu.Product, count int) []GPUFact {
	facts := make([]GPUFact, 0, max(0, count))
	for range count {
		facts = append(facts, GPUFact{Name: p.Name, MemoryTotalMiB: p.MemoryMiB, ComputeMajor: p.ComputeMajor, ComputeMinor: p.ComputeMinor, NVLink: p.NVLink})
	}
	return facts
}

// completed adds what a product's name says of it where that is missing.
func completed(gpus []GPUFact) []GPUFact {
	full := slices.Clone(gpus)
	for i, g := range full {
		known, ok := gpu.ProductByName(g.Name)
		if !ok {
			continue
		}
		if g.MemoryTotalMiB == 0 && g.VisibleBytes == 0 {
			full[i].MemoryTotalMiB = known.MemoryMiB
		}
		if g.ComputeMajor == 0 {
			full[i].ComputeMajor, full[i].ComputeMinor = known.ComputeMajor, known.ComputeMinor
		}
		if g.NVLink == "" {
			full[i].NVLink = known.NVLink
		}
	}
	return full
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
	if e.Need == "" {
		return e.GPU + ": " + e.Why
	}
	return fmt.Sprintf("%s has compute capability %s, needed is %s: %s", e.GPU, e.Have, e.Need, e.Why)
}

// MemoryError says that GPUs are too small or too full.
type MemoryError struct {
	// Model is empty when no model of the catalogue fits.
	Model string
	GPUs  int
	// HaveMiB is what each GPU offers the model, NeedMiB the least it would need.
	HaveMiB, NeedMiB int64
	// Why is the part that is short, in a sentence.
	Why string
}

// Error implements error.
func (e *MemoryError) Error() string {
	what := e.Model
	if what == "" {
		what = "even the smallest known model"
	}
	text := fmt.Sprintf("%s needs %d MiB on each of %d GPU(s), %d MiB can be had", what, e.NeedMiB, e.GPUs, e.HaveMiB)
	if e.Why != "" {
		text += ": " + e.Why
	}
	return text
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
	// Fit is the whole answer behind the choice.
	Fit Fit
	// Start is how vLLM is started.
	Start Start
}

// weakest is what each GPU of a box can be relied on for: Kubernetes may hand out
// any of them.
func weakest(gpus []GPUFact) GPUFact {
	w := gpus[0]
	for _, g := range gpus[1:] {
		w.MemoryTotalMiB = min(w.MemoryTotalMiB, g.MemoryTotalMiB)
		w.MemoryUsedMiB = max(w.MemoryUsedMiB, g.MemoryUsedMiB)
		w.Shared = w.Shared || g.Shared
		if g.VisibleBytes > 0 && (w.VisibleBytes == 0 || g.VisibleBytes < w.VisibleBytes) {
			w.VisibleBytes = g.VisibleBytes
		}
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

// Choose takes the best default for these GPUs: the first row that fits them and
// leaves the context it asks for.
func (c Catalogue) Choose(gpus []GPUFact) (Choice, error) {
	w, err := usable(gpus)
	if err != nil {
		return Choice{}, err
	}
	have := compute{w.ComputeMajor, w.ComputeMinor}
	var smallest Fit
	for _, d := range c.Defaults {
		m, known := c.Find(d.Name)
		if !known || d.GPUs > len(gpus) || !d.covers(have) {
			continue
		}
		f := m.Assess(gpus, Ask{TensorParallel: d.GPUs, Variant: d.Variant})
		smallest = f
		// Little room for context is no reason against a row whose context is there.
		serves := f.Verdict == Fits || f.Verdict == Tight && f.Reason == ReasonKV
		if !serves || f.ContextTokens < min(d.MinContextTokens, m.ContextTokens) {
			continue
		}
		return choiceOf(f, d.Reason), nil
	}
	if smallest.Model.Name == "" {
		return Choice{}, &MemoryError{GPUs: len(gpus), HaveMiB: w.MemoryTotalMiB}
	}
	refused := smallest.asError()
	var memory *MemoryError
	if errors.As(refused, &memory) {
		memory.Model = ""
	}
	return Choice{}, refused
}

// Fit says how a named model of the catalogue fits these GPUs, on as few of them
// as it can, with the context that was asked for: 0 takes what fits. A refusal comes
// with a Choice that holds the Fit alone.
//
// What was chosen once comes back by its name and context on the next run and has to
// give the very same settings: so the row of the defaults is taken where it is the same
// model, and the asked context only counts where it is longer than what fits by itself.
func (c Catalogue) Fit(name string, contextTokens int, gpus []GPUFact) (Choice, error) {
	if _, known := c.Find(name); !known {
		return Choice{}, fmt.Errorf("%w: %s", ErrUnknownModel, name)
	}
	if _, err := usable(gpus); err != nil {
		return Choice{}, err
	}
	if chosen, err := c.Choose(gpus); err == nil && chosen.Model.Name == name && contextTokens <= chosen.ContextTokens {
		return chosen, nil
	}
	f, err := c.Assess(name, gpus, Ask{})
	if err == nil && contextTokens > f.ContextTokens {
		f, err = c.Assess(name, gpus, Ask{ContextTokens: contextTokens})
	}
	if err != nil {
		return Choice{}, err
	}
	if f.Verdict == No {
		return Choice{Fit: f}, f.asError()
	}
	return choiceOf(f, fmt.Sprintf("asked for; fits %d of %d GPU(s)", f.TensorParallel, len(gpus))), nil
}

func choiceOf(f Fit, reason string) Choice {
	c := Choice{
		Model: f.Model, GPUs: f.TensorParallel, ContextTokens: f.ContextTokens, KVTokens: f.KVTokens,
		MemoryUtilization: f.Utilization, Tight: f.Verdict == Tight, Warnings: f.Warnings,
		Reason: reason, Source: f.Model.Source, Verified: f.Model.Verified, Fit: f,
	}
	if c.Tight {
		c.Warnings = append(c.Warnings, "tight: "+f.Detail)
	}
	return c
}

// asError turns a refusal into the error of its kind.
func (f Fit) asError() error {
	if f.Reason == ReasonCapability || f.Reason == ReasonVersion || f.Reason == ReasonHeads {
		return &CapabilityError{GPU: f.Name, Why: f.Detail}
	}
	b := f.Budget
	need := b.Weights + b.Context + b.Activation + b.GraphsInside + f.NeedBytes
	return &MemoryError{Model: f.Name, GPUs: f.TensorParallel, HaveMiB: b.Granted / mib, NeedMiB: need / mib, Why: f.Detail}
}
