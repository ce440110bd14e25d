package model

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// Verdict says whether a model can be served.
type Verdict string

// The verdicts. A tight fit starts if nothing else goes wrong; its Reason names what
// is short.
const (
	Fits  Verdict = "fits"
	Tight Verdict = "tight"
	No    Verdict = "no"
)

// Reason is the kind of what is short.
type Reason string

// The reasons, in the order in which a start of vLLM meets them.
const (
	ReasonNone Reason = ""
	// ReasonCapability: the GPU is too old, or the numbers are not its own.
	ReasonCapability Reason = "capability"
	// ReasonVersion: this release of vLLM does not know the model.
	ReasonVersion Reason = "version"
	// ReasonHeads: the attention heads can't be shared out.
	ReasonHeads Reason = "heads"
	// ReasonBusy: others hold memory that is needed.
	ReasonBusy Reason = "busy"
	// ReasonWeights: the weights alone are too large.
	ReasonWeights Reason = "weights"
	// ReasonGraphs: CUDA graphs, their trial or the sampler run out of memory.
	ReasonGraphs Reason = "graphs"
	// ReasonKV: one sequence of the longest context does not fit.
	ReasonKV Reason = "kv"
	// ReasonStates: fewer state blocks than sequences.
	ReasonStates Reason = "states"
)

// Ask is what is wanted of a fit. A zero leaves a choice to llmbox, or to vLLM's own
// default where AsGiven is set.
type Ask struct {
	ContextTokens    int
	KVCacheDType     string
	Utilization      float64
	TensorParallel   int
	DataParallel     int
	ExpertParallel   bool
	MaxNumSeqs       int
	MaxBatchedTokens int
	// LargestGraph is the largest batch that is captured.
	LargestGraph    int
	Eager           bool
	NoPrefixCaching bool
	// DraftTokens is the depth of speculation with the checkpoint's own head.
	DraftTokens int
	// VLLM is the release, such as "0.32.0".
	VLLM string
	// Variant is the name of a stored form of the model, such as "fp8".
	Variant string
	// Driver is the kernel driver's version, for the image.
	Driver string
	// CacheBytes is --kv-cache-memory-bytes; WeightsPerRankBytes a measured figure.
	CacheBytes, WeightsPerRankBytes int64
	// AsGiven judges a start with exactly these settings instead of finding good ones.
	AsGiven bool
}

// Fit is the answer: whether, how, and with what.
type Fit struct {
	Model   Model   `json:"-"`
	Name    string  `json:"name"`
	Variant string  `json:"variant,omitempty"`
	Verdict Verdict `json:"fit"`
	Reason  Reason  `json:"reason_kind,omitempty"`
	// Detail is the reason as a sentence with its figures.
	Detail string `json:"reason,omitempty"`
	// ContextTokens is the longest context, NeedBytes what one sequence of the asked
	// one takes of each GPU's cache.
	ContextTokens int   `json:"context"`
	NeedBytes     int64 `json:"kv_need_bytes"`
	// KVBytes is the cache of each GPU, KVTokens the log's figure for it.
	KVBytes  int64 `json:"kv_bytes"`
	KVTokens int64 `json:"kv_tokens"`
	// Sequences is how many of ContextTokens fit at once.
	Sequences      float64   `json:"sequences"`
	TensorParallel int       `json:"tensor_parallel"`
	Utilization    float64   `json:"gpu_memory_utilization"`
	Budget         Budget    `json:"budget_bytes"`
	Arguments      Arguments `json:"-"`
	Image          Image     `json:"image"`
	// DiskBytes is what weights and image take where they are stored.
	DiskBytes int64    `json:"disk_bytes"`
	Warnings  []string `json:"warnings,omitempty"`
	Instead   []string `json:"instead,omitempty"`
}

const (
	// promised is the part of the computed cache that llmbox builds on: the logs' error
	// stays below a tenth where everything was stated.
	promised = 0.9
	// roomy is the share of the cache above which one sequence makes a fit tight.
	roomy = 0.85
	// unusualShare above the release's own default a share leaves too little beside it for
	// some: gpt-oss-20b does not start with 0.95 on an H100, Llama 3.1 8B does.
	unusualShare = 0.02
	// tightCache is the cache at or below which a fit that was chosen is tight.
	tightCache = 2 * gib
	// overheadImage is what vLLM's image takes unpacked, in bytes.
	overheadImage = 20 * gib
	// downloadSlack is what a download takes beside the weights: tokenizer, partial files.
	downloadSlack = 1.05
)

// Assess says how a model fits GPUs. The zero Ask finds the best settings.
func (m Model) Assess(gpus []GPUFact, ask Ask) Fit {
	f := Fit{Model: m, Name: m.Name, Variant: ask.Variant}
	if len(gpus) == 0 {
		f.Verdict, f.Reason, f.Detail = No, ReasonCapability, ErrNoGPU.Error()
		return f
	}
	gpus = completed(gpus)
	w := weakest(gpus)
	if w.MemoryTotalMiB <= 0 && w.VisibleBytes <= 0 {
		f.Verdict, f.Reason, f.Detail = No, ReasonCapability, fmt.Sprintf("the memory of %s isn't known", cmp.Or(w.Name, "the GPU"))
		return f
	}
	if ask.VLLM == "" && !ask.AsGiven {
		ask.VLLM = ServedVLLM
	}
	form, ok := m.form(ask.Variant)
	if !ok && ask.AsGiven {
		form, ok = m.estimated(ask.Variant)
	}
	if !ok {
		f.Verdict, f.Reason, f.Detail = No, ReasonWeights, fmt.Sprintf("%s has no form %q", m.Name, ask.Variant)
		return f
	}
	if form.Bytes <= 0 {
		f.Verdict, f.Reason, f.Detail = No, ReasonWeights, "the size of the weights isn't known"
		return f
	}
	f.DiskBytes = int64(float64(form.Bytes)*downloadSlack) + overheadImage
	f.Image = ImageFor(w, cmp.Or(ask.Driver, w.Driver), ask.VLLM)
	if reason, detail := m.admissible(form, w, ask); reason != ReasonNone {
		f.Verdict, f.Reason, f.Detail = No, reason, detail
		return f
	}
	if ask.TensorParallel > 0 {
		return m.withTP(f, form, w, ask, ask.TensorParallel)
	}
	last := f
	for tp := 1; tp <= len(gpus); tp *= 2 {
		got := m.withTP(f, form, w, ask, tp)
		if got.Verdict == Fits {
			return got
		}
		if last.Verdict == "" || better(got, last) {
			last = got
		}
	}
	return last
}

// better prefers a fit to none, and among refusals the one nearer to a fit.
func better(a, b Fit) bool {
	rank := map[Verdict]int{Fits: 2, Tight: 1, No: 0}
	if rank[a.Verdict] != rank[b.Verdict] {
		return rank[a.Verdict] > rank[b.Verdict]
	}
	return a.Reason != ReasonHeads && a.Budget.Cache > b.Budget.Cache
}

// admissible checks what no amount of memory mends.
func (m Model) admissible(form Form, w GPUFact, ask Ask) (Reason, string) {
	have := compute{w.ComputeMajor, w.ComputeMinor}
	least := form.MinCompute
	if least == "" {
		least = m.MinCompute
	}
	need, err := parseCompute(least)
	if err == nil && have.major > 0 && have.less(need) {
		return ReasonCapability, fmt.Sprintf("%s has compute capability %s, %s weights need %s", w.Name, have, form.Precision, least)
	}
	if ask.VLLM != "" && !unreleased(ask.VLLM) && m.MinVLLM != "" && !versionAtLeast(ask.VLLM, m.MinVLLM) {
		return ReasonVersion, fmt.Sprintf("needs vLLM %s or newer, this is %s", m.MinVLLM, ask.VLLM)
	}
	return ReasonNone, ""
}

// withTP judges one number of GPUs. Where the choice is llmbox's, it goes from
// vLLM's defaults to fewer sequences at once until one fits.
func (m Model) withTP(f Fit, form Form, w GPUFact, ask Ask, tp int) Fit {
	if a := m.Architecture; a.AttentionHeads > 0 && a.AttentionHeads%tp != 0 {
		f.TensorParallel = tp
		f.Verdict, f.Reason, f.Detail = No, ReasonHeads, fmt.Sprintf("%d attention heads can't be shared by %d GPUs", a.AttentionHeads, tp)
		return f
	}
	first := m.once(f, form, w, ask, tp)
	if ask.AsGiven || ask.MaxNumSeqs > 0 || first.Verdict == Fits {
		return first
	}
	best := first
	for _, sequences := range []int{256, 64, 16} {
		tried := ask
		tried.MaxNumSeqs = sequences
		got := m.once(f, form, w, tried, tp)
		got.Arguments.MaxNumSeqs = sequences
		if got.Verdict == Fits {
			return got
		}
		if better(got, best) {
			best = got
		}
	}
	return best
}

// once judges one set of settings. Where the release isn't known, a fit that an older
// one would refuse is tight.
func (m Model) once(f Fit, form Form, w GPUFact, ask Ask, tp int) Fit {
	f.TensorParallel = tp
	r, err := releaseOf(ask.VLLM)
	if err != nil {
		f.Verdict, f.Reason, f.Detail = No, ReasonVersion, err.Error()
		return f
	}
	got := m.with(r, f, form, w, ask, tp)
	if r.known {
		return got
	}
	older := m.with(r.pessimistic(), f, form, w, ask, tp)
	switch {
	case got.Verdict == No && older.Verdict == No:
		// What an older one stops at comes first in every start.
		got.Reason, got.Detail = older.Reason, older.Detail
	case got.Verdict == Fits && older.Verdict != Fits:
		got.Verdict, got.Reason, got.Detail = Tight, older.Reason, "with an old release of vLLM: "+older.Detail
	}
	return got
}

// with judges one set of settings for one release.
func (m Model) with(r release, f Fit, form Form, w GPUFact, ask Ask, tp int) Fit {
	a := m.Architecture
	s := settings{
		tp: tp, dp: max(1, ask.DataParallel), expertParallel: ask.ExpertParallel, release: r, eager: ask.Eager,
		prefixCaching: !ask.NoPrefixCaching, draftTokens: ask.DraftTokens, weightsPerRankBytes: ask.WeightsPerRankBytes, cacheBytes: ask.CacheBytes,
		context: ask.ContextTokens, sequences: ask.MaxNumSeqs, batched: ask.MaxBatchedTokens, utilization: ask.Utilization,
	}
	s.kvBytes, s.dsLayout = kvElement(ask.KVCacheDType, form)
	s.repacked = form.Precision == "mxfp4"
	asked := s.context > 0
	if !asked {
		s.context = m.ContextTokens
	}
	sequences, batched := batchDefaults(w, r, s.context)
	if s.sequences == 0 {
		s.sequences = sequences
	}
	if s.batched == 0 {
		s.batched = batched
	}
	s.largestGraph = ask.LargestGraph
	if s.largestGraph == 0 {
		s.largestGraph = min(2*s.sequences, 512)
	}
	l := layout(a, s)
	weights := float64(form.Bytes) * form.loadFactor()
	if s.utilization == 0 {
		s.utilization = r.utilization
		if !ask.AsGiven {
			s.utilization = utilizationFor(a, weights, m.ParametersBillion*1e9, w, s, l)
		}
	}
	b := budget(a, weights, m.ParametersBillion*1e9, w, s, l)
	f.Budget, f.Utilization = b, s.utilization
	f.KVBytes = max(0, b.Cache)
	f.Arguments = Arguments{
		Model: form.Repository, MemoryUtilization: s.utilization, TensorParallel: tp, MaxNumSeqs: ask.MaxNumSeqs,
		MaxBatchedTokens: ask.MaxBatchedTokens, KVCacheDType: ask.KVCacheDType, LargestGraph: ask.LargestGraph, Eager: ask.Eager,
		ToolParser: m.ToolParser, ReasoningParser: m.ReasoningParser,
	}
	trust := 1.0
	if !ask.AsGiven {
		trust = promised
	}
	blocks := 0
	if l.blockBytes > 0 {
		blocks = int(max(0, float64(b.Cache)*trust) / float64(l.blockBytes))
	}
	longest := m.ContextTokens
	if !a.Encoder {
		longest = l.longest(blocks, s.batched, max(m.ContextTokens, s.context))
	}
	f.ContextTokens = longest
	if !asked && !ask.AsGiven && longest < m.ContextTokens {
		f.ContextTokens = longest - longest%contextStep
	}
	if asked {
		f.ContextTokens = min(longest, s.context)
	}
	counted := s.context
	if !asked && !ask.AsGiven {
		counted = max(1, f.ContextTokens)
	}
	f.NeedBytes = int64(l.blocksFor(counted, s.batched)) * l.blockBytes
	f.KVTokens = l.tokens(blocks, counted, s.batched, r.tokensByRequest)
	if per := l.blocksFor(counted, s.batched); per > 0 {
		f.Sequences = math.Round(float64(blocks)/float64(per)*100) / 100
	}
	f.Arguments.ContextTokens = f.ContextTokens
	if asked {
		f.Arguments.ContextTokens = s.context
	}
	m.judge(&f, w, s, l, blocks, asked || ask.AsGiven)
	if tp > 1 && w.NVLink != gpu.NVLinkSwitch {
		f.Warnings = append(f.Warnings, fmt.Sprintf("%d GPUs share the model over PCIe or a bridge: each token waits for that link", tp))
	}
	if w.unified() {
		f.Warnings = append(f.Warnings, "the machine's programs and page cache take from the GPU's memory")
	}
	if asked && s.context > m.ContextTokens && m.ContextTokens > 0 {
		f.Warnings = append(f.Warnings, fmt.Sprintf("%d tokens are more than the %d that the model was made for: vLLM refuses that unless told otherwise", s.context, m.ContextTokens))
	}
	if w.MemoryUsedMiB > busyMiB {
		f.Warnings = append(f.Warnings, fmt.Sprintf("%d MiB of the GPU's memory are already in use by others", w.MemoryUsedMiB))
	}
	return f
}

// judge follows a start in its own order and stops where it would.
func (m Model) judge(f *Fit, w GPUFact, s settings, l cacheLayout, blocks int, exact bool) {
	a, b := m.Architecture, f.Budget
	refuse := func(reason Reason, format string, args ...any) {
		f.Verdict, f.Reason, f.Detail = No, reason, fmt.Sprintf(format, args...)
	}
	tighten := func(reason Reason, format string, args ...any) {
		if f.Verdict == Fits {
			f.Verdict, f.Reason, f.Detail = Tight, reason, fmt.Sprintf(format, args...)
		}
	}
	f.Verdict = Fits
	fixed := b.Weights + b.Context
	measured := s.cacheBytes > 0
	if !measured {
		switch {
		case b.Granted > b.Total-b.Busy:
			refuse(ReasonBusy, "%s free of %s, vLLM is told to take %s: others hold %s", size(b.Total-b.Busy), size(b.Total), size(b.Granted), size(b.Busy))
		case !s.release.countsNeighbours && b.Granted > b.Total-ownBytes(float64(b.Total)):
			refuse(ReasonBusy, "%s free of %s once CUDA has started, vLLM is told to take %s: a smaller share", size(b.Total-ownBytes(float64(b.Total))), size(b.Total), size(b.Granted))
		case fixed > b.Granted && w.MemoryUsedMiB > busyMiB && fixed <= int64(float64(b.Total)*s.release.utilization):
			refuse(ReasonBusy, "weights take %s, others leave %s of %s", size(fixed), size(b.Granted), size(b.Total))
		case fixed > b.Granted:
			refuse(ReasonWeights, "weights take %s of each GPU, %s can be had", size(fixed), size(b.Granted))
		case b.Trial > 0 && fixed+b.Trial+lateBytes > b.Total-b.Busy:
			refuse(ReasonGraphs, "trial capture of CUDA graphs needs %s beside %s of weights, %s are there: fewer sequences at once or eager mode", size(b.Trial), size(fixed), size(b.Total-b.Busy))
		}
		if f.Verdict == No {
			return
		}
	}
	if !a.Encoder {
		least := f.NeedBytes
		if !exact {
			shortest := min(minContextTokens, m.ContextTokens)
			least = int64(l.blocksFor(shortest, s.batched)) * l.blockBytes
		}
		room := int64(blocks) * l.blockBytes
		switch {
		case least > room || l.blockBytes > 0 && blocks == 0:
			what := "one sequence"
			if exact {
				what = fmt.Sprintf("one sequence of %d tokens", s.context)
			}
			refuse(ReasonKV, "%s needs %s of cache, %s can be had", what, size(least), size(max(0, b.Cache)))
			if b.Busy > busyMiB && b.Cache+b.Busy > least {
				f.Detail += fmt.Sprintf(" beside the %s that others hold", size(b.Busy))
			}
			return
		case s.release.checksStates && !s.eager && a.StateLayers > 0 && s.sequences > blocks:
			refuse(ReasonStates, "%d sequences at once, but only %d state blocks: fewer sequences, not more memory", s.sequences, blocks)
			return
		case !measured && float64(least) > roomy*float64(room):
			tighten(ReasonKV, "one sequence takes %s of %s of cache", size(least), size(room))
		case !exact && b.Cache <= tightCache:
			tighten(ReasonKV, "only %s are left for context", size(b.Cache))
		}
	} else if b.Activation+fixed > b.Granted && !measured {
		refuse(ReasonWeights, "weights and work space take %s, %s can be had", size(b.Activation+fixed), size(b.Granted))
		return
	}
	if measured {
		return
	}
	switch short := b.OutsideNeed - b.Outside; {
	case s.eager:
	case short > lateBytes:
		refuse(ReasonGraphs, "graphs and sampler take about %s beside vLLM's share, %s are left: a smaller share of memory", size(b.OutsideNeed), size(max(0, b.Outside)))
		return
	case short > 0 || s.utilization > s.release.utilization+unusualShare:
		tighten(ReasonGraphs, "only %s are left beside vLLM's share for graphs, sampler and what is loaded late", size(b.Outside))
	}
	if w.Shared || exact && w.unified() {
		tighten(ReasonBusy, "others use this GPU's memory, and how much of it isn't known")
	}
}

// kvElement is the bytes of one element of the cache, and whether DeepSeek's own
// layout is meant. "auto" takes what the checkpoint says.
func kvElement(dtype string, form Form) (float64, bool) {
	switch {
	case dtype == "nvfp4":
		// Four bits, and eight for each sixteen of them.
		return 0.5625, false
	case strings.HasPrefix(dtype, "int4"):
		return 0.5, false
	case dtype == "fp8_ds_mla":
		return 1, true
	case strings.HasPrefix(dtype, "fp8"), strings.HasPrefix(dtype, "int8"):
		return 1, false
	case dtype == "" || strings.HasPrefix(dtype, "auto"):
		if form.KVCache == "fp8" {
			return 1, false
		}
	case dtype == "float32":
		return 4, false
	}
	return 2, false
}

// utilizationFor is vLLM's default share, or less where what others hold and what is
// taken beside the share would not fit: rounded down to a hundredth.
func utilizationFor(a Architecture, weights, parameters float64, w GPUFact, s settings, l cacheLayout) float64 {
	s.utilization = s.release.utilization
	b := budget(a, weights, parameters, w, s, l)
	if b.Total <= 0 {
		return 0
	}
	free := float64(b.Total-b.Busy-b.OutsideNeed) / float64(b.Total)
	return math.Max(0, math.Min(s.release.utilization, math.Floor(free*100)/100))
}

// size writes bytes for people.
func size(n int64) string {
	if n < 0 {
		return "-" + size(-n)
	}
	return fmt.Sprintf("%.1f GiB", float64(n)/gib)
}

// Assess judges a model of the catalogue in the form that was asked for, or in the
// first form that fits, and says what would fit instead where none does.
func (c Catalogue) Assess(name string, gpus []GPUFact, ask Ask) (Fit, error) {
	m, known := c.Find(name)
	if !known {
		return Fit{}, fmt.Errorf("%w: %s", ErrUnknownModel, name)
	}
	f := m.Assess(gpus, ask)
	if f.Verdict == No {
		f.Instead = c.Instead(m, gpus, ask)
	}
	return f, nil
}

// Instead lists what would fit where a model does not, best first: the model in a
// smaller form, with a shorter context, on more GPUs, or another model.
func (c Catalogue) Instead(m Model, gpus []GPUFact, ask Ask) []string {
	var found []string
	if len(gpus) == 0 {
		return nil
	}
	for _, form := range m.Variants {
		if form.Name == ask.Variant {
			continue
		}
		tried := ask
		tried.Variant = form.Name
		if got := m.Assess(gpus, tried); got.Verdict != No {
			found = append(found, fmt.Sprintf("%s (%s): %d tokens of context", form.Repository, form.Precision, got.ContextTokens))
			break
		}
	}
	if ask.ContextTokens > 0 {
		tried := ask
		tried.ContextTokens = 0
		if got := m.Assess(gpus, tried); got.Verdict != No {
			found = append(found, fmt.Sprintf("the same with at most %d tokens of context", got.ContextTokens))
		}
	}
	for n := 2 * len(gpus); n <= 8; n *= 2 {
		more := slices.Repeat([]GPUFact{weakest(gpus)}, n)
		if got := m.Assess(more, ask); got.Verdict == Fits {
			found = append(found, fmt.Sprintf("%d such GPUs together", got.TensorParallel))
			break
		}
	}
	if choice, err := c.Choose(gpus); err == nil && choice.Model.Name != m.Name {
		found = append(found, fmt.Sprintf("%s: %d tokens of context", choice.Model.Name, choice.ContextTokens))
	}
	return found
}
