package model

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
)

// prediction is one case judged.
type prediction struct {
	c startup
	// fit is the forecast from what was asked, measured the one with the log's cache.
	fit, measured *Fit
	// enough says that the log states what the cache depends on; tokens the same of
	// its count, which for several kinds of layers depends on release and flags.
	enough, tokens bool
	// suffices says that the verdict depends on nothing the case leaves open, known that
	// its weights are those of the build that was started.
	suffices, known bool
}

// predict judges a case: once from GPU, model and settings alone, and, where the log
// states the cache, once from there.
func predict(catalogue Catalogue, c startup) prediction {
	p := prediction{c: c, suffices: !strangePattern.MatchString(c.Flags)}
	m, variant, exact, known := c.find(catalogue)
	if !known {
		if m, known = c.shape(); !known {
			return cacheOnly(p)
		}
	} else if c.Arch != nil && c.Arch.Layers > 0 && m.Architecture.Layers != c.Arch.Layers {
		// The case knows better which model it was.
		if m, known = c.shape(); !known {
			return p
		}
		exact = false
	}
	m.MinCompute, m.MinVLLM = "7.5", ""
	for i := range m.Variants {
		m.Variants[i].MinCompute = "7.5"
	}
	ask := c.ask(variant)
	gpus := max(1, c.GPUs)
	if device := c.device(); device != nil && (m.WeightsBytes > 1 || c.WeightsGiB > 0) {
		facts := slices.Repeat([]GPUFact{*device}, gpus)
		if ask.TensorParallel == 0 && ask.DataParallel == 0 {
			ask.TensorParallel = gpus
		}
		f := m.Assess(facts, ask)
		// A packaged server brings the largest form that its GPUs hold.
		for _, form := range m.Variants {
			if f.Reason != ReasonWeights || c.Quant != "" || variant != "" || c.WeightsGiB > 0 {
				break
			}
			ask.Variant = form.Name
			f = m.Assess(facts, ask)
		}
		p.fit = &f
		if form, ok := m.form(variant); ok && form.From == FromParameters {
			exact = false // An estimate of the weights is no ground for a bound.
		}
		p.known = exact || c.WeightsGiB > 0
		p.enough = c.KVGiB != nil && !unstatedPattern.MatchString(c.Note) && p.suffices && (exact || c.WeightsGiB > 0) && !device.Shared && (c.Util > 0 || c.VLLM != "" || ask.VLLM != "")
	} else if sharedPattern.MatchString(c.Note) && c.Outcome == "fails" {
		f := m.Assess([]GPUFact{{Name: "a GPU shared with others", MemoryTotalMiB: 24576, ComputeMajor: 8, Shared: true}}, ask)
		p.fit = &f
	}
	if c.KVGiB != nil && !m.Architecture.Encoder {
		ask.CacheBytes = int64(*c.KVGiB * gib)
		if ask.TensorParallel == 0 {
			ask.TensorParallel = gpus
		}
		f := m.Assess(slices.Repeat([]GPUFact{{Name: "the log's GPU", MemoryTotalMiB: 24576, ComputeMajor: 9}}, gpus), ask)
		p.measured = &f
		uniform := m.Architecture.StateLayers+m.Architecture.SlidingLayers == 0
		p.tokens = c.KVTokens > 0 && c.MaxModelLen > 0 && (uniform || ask.VLLM != "" || c.Flags != "" && c.KVDType != "")
	}
	return p
}

// cacheOnly forecasts the cache of an unknown model whose loaded weights are stated: a
// vocabulary of the usual size stands in, the verdict is left out.
func cacheOnly(p prediction) prediction {
	c, device := p.c, p.c.device()
	if device == nil || c.WeightsGiB == 0 || c.KVGiB == nil {
		return p
	}
	layers := 32
	if c.Arch != nil && c.Arch.Layers > 0 {
		layers = c.Arch.Layers
	}
	m := Model{Name: c.Model, Precision: "bf16", WeightsBytes: 1, ContextTokens: 1, MinCompute: "7.5", Architecture: Architecture{
		Layers: layers, Hidden: 4096, Intermediate: 12288, Vocab: 151936, AttentionHeads: 32, KVHeads: 8, HeadDim: 128, FullLayers: layers}}
	ask := c.ask("")
	if ask.TensorParallel == 0 {
		ask.TensorParallel = max(1, c.GPUs)
	}
	f := m.Assess(slices.Repeat([]GPUFact{*device}, max(1, c.GPUs)), ask)
	f.Verdict, f.Reason = "", ""
	p.fit, p.enough = &f, !device.Shared && !unstatedPattern.MatchString(c.Note) && (c.Util > 0 || ask.VLLM != "")
	return p
}

// within says whether a figure is within 15 % of the log's, or within slack.
func within(got, want, slack float64) bool {
	return math.Abs(got-want) <= max(0.15*want, slack)
}

// Public start-ups of vLLM against the forecast. The figures that the mechanism uses
// come from elsewhere (docs/models.md); nothing here knows a case by its name.
func TestStartUpLogs(t *testing.T) {
	judgeStartups(t, "start-up-logs.yaml", 2)
}

// Start-ups that were gathered once the arithmetic had been settled on those above.
func TestFurtherStartUpLogs(t *testing.T) {
	judgeStartups(t, "further-start-up-logs.yaml", 2)
}

// judgeStartups forecasts the cases of a file, prints them as a table and holds them to
// the bounds; at most mayRefuse of those that started may be called no.
func judgeStartups(t *testing.T, file string, mayRefuse int) {
	catalogue := catalogue(t)
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 4, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "CASE\tMODEL\tLOG\tFORECAST\tREASON\tKV LOG\tKV\tERROR\tTOKENS LOG\tTOKENS\tERROR")
	refused, fitting := 0, 0
	for _, c := range startups(t, file) {
		p := predict(catalogue, c)
		verdict, reason, kv, kvOff, tokens, tokensOff, kvLog := "-", Reason("-"), "-", "-", "-", "-", "-"
		if c.KVGiB != nil {
			kvLog = fmt.Sprintf("%.2f", *c.KVGiB)
		}
		if p.fit != nil {
			verdict, reason = string(p.fit.Verdict), p.fit.Reason
			kv = fmt.Sprintf("%.2f", float64(p.fit.Budget.Cache)/gib)
			if c.KVGiB != nil {
				kvOff = off(float64(p.fit.Budget.Cache)/gib, *c.KVGiB)
				if !p.enough {
					kvOff += " *"
				}
			}
		}
		if p.measured != nil {
			tokens = fmt.Sprint(p.measured.KVTokens)
			tokensOff = off(float64(p.measured.KVTokens), float64(c.KVTokens))
			if !p.tokens && c.KVTokens > 0 {
				tokensOff += " *"
			}
		}
		_, _ = fmt.Fprintf(w, "%s\t%.44s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n", c.ID, c.Model, c.Outcome, verdict, reason, kvLog, kv, kvOff, c.KVTokens, tokens, tokensOff)
		t.Run(c.ID, func(t *testing.T) { judgeStartup(t, p) })
		if c.Outcome == "fits" {
			fitting++
			if p.fit != nil && p.fit.Verdict == No {
				refused++
			}
		}
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s* not held to a bound: the log leaves open which build, which share of memory or what others held\n%d of %d fitting ones refused", table.String(), refused, fitting)
	if refused > mayRefuse {
		t.Errorf("%d of %d start-ups that worked are refused", refused, fitting)
	}
}

func judgeStartup(t *testing.T, p prediction) {
	c := p.c
	if p.fit == nil && p.measured == nil {
		t.Skip("states too little: no GPU and no cache, or no model")
	}
	if p.enough && !within(float64(p.fit.Budget.Cache)/gib, *c.KVGiB, 1) {
		t.Errorf("KV cache %.2f GiB, log %.2f", float64(p.fit.Budget.Cache)/gib, *c.KVGiB)
	}
	if p.tokens {
		if !within(float64(p.measured.KVTokens), float64(c.KVTokens), 0) {
			t.Errorf("KV tokens %d, log %d", p.measured.KVTokens, c.KVTokens)
		}
	}
	if c.Outcome != "fails" {
		return
	}
	want := c.expected()
	if len(want) == 0 {
		t.Fatalf("unknown kind of failure: %s", c.FailReason)
	}
	for _, f := range []*Fit{p.fit, p.measured} {
		if f == nil {
			continue
		}
		if f.Verdict == "" {
			continue
		}
		if f.Verdict == Fits && f == p.fit && p.suffices {
			t.Errorf("called %s (%s), the log: %s", f.Verdict, f.Detail, c.FailReason)
		}
		if f.Verdict != Fits && (p.known || f == p.measured) && !slices.Contains(want, f.Reason) {
			t.Errorf("reason %q (%s), the log: %s", f.Reason, f.Detail, c.FailReason)
		}
	}
	if p.measured != nil && c.EstMaxLen > 0 && !within(float64(p.measured.ContextTokens), float64(c.EstMaxLen), 64) {
		t.Errorf("longest context %d, log %d", p.measured.ContextTokens, c.EstMaxLen)
	}
}
