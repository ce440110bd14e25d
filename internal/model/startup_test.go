package model

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// startup is one public start of vLLM: what was asked, and what its log said.
type startup struct {
	ID             string   `yaml:"id"`
	Ref            string   `yaml:"ref"`
	VLLM           string   `yaml:"vllm"`
	GPU            string   `yaml:"gpu"`
	GPUs           int      `yaml:"gpus"`
	TP             int      `yaml:"tp"`
	Model          string   `yaml:"model"`
	DType          string   `yaml:"dtype"`
	Quant          string   `yaml:"quant"`
	Util           float64  `yaml:"util"`
	MaxModelLen    int      `yaml:"max_model_len"`
	KVDType        string   `yaml:"kv_dtype"`
	Flags          string   `yaml:"flags"`
	WeightsGiB     float64  `yaml:"weights_gib"`
	KVGiB          *float64 `yaml:"kv_gib"`
	KVTokens       int64    `yaml:"kv_tokens"`
	MaxConcurrency float64  `yaml:"max_concurrency"`
	GraphGiB       *float64 `yaml:"cudagraph_gib"`
	Outcome        string   `yaml:"outcome"`
	FailReason     string   `yaml:"fail_reason"`
	EstMaxLen      int      `yaml:"est_max_len"`
	Arch           *struct {
		Layers        int    `yaml:"layers"`
		KVHeads       int    `yaml:"kv_heads"`
		HeadDim       int    `yaml:"head_dim"`
		Uniform       bool   `yaml:"uniform"`
		FullLayers    int    `yaml:"full_layers"`
		SlidingLayers int    `yaml:"sliding_layers"`
		LinearLayers  int    `yaml:"linear_layers"`
		Window        int    `yaml:"window"`
		MLALora       int    `yaml:"mla_kv_lora"`
		MLARope       int    `yaml:"mla_rope"`
		IndexHeadDim  int    `yaml:"index_head_dim"`
		MoE           bool   `yaml:"moe"`
		Note          string `yaml:"note"`
		Src           string `yaml:"src"`
	} `yaml:"arch"`
	Note  string         `yaml:"note"`
	Check map[string]any `yaml:"check"`
}

func startups(t testing.TB, file string) []startup {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	var cases []startup
	decoder := yaml.NewDecoder(strings.NewReader(string(data)))
	decoder.KnownFields(true)
	if err := decoder.Decode(&cases); err != nil {
		t.Fatal(err)
	}
	return cases
}

var (
	visiblePattern  = regexp.MustCompile(`([\d.]+) GiB(?: visible|\))`)
	mibPattern      = regexp.MustCompile(`([\d,]+) MiB`)
	usedPattern     = regexp.MustCompile(`([\d,.]+) (MiB|GiB) used`)
	desktopPattern  = regexp.MustCompile(`desktop \(([\d.]+) GB\)`)
	sizePattern     = regexp.MustCompile(`([\d.]+) ?GB\b`)
	sharedPattern   = regexp.MustCompile(`(?i)shared with|next to an? |beside an? LLM|display attached|desktop`)
	seqsPattern     = regexp.MustCompile(`max_num_seqs (\d+)`)
	batchedPattern  = regexp.MustCompile(`max_num_batched_tokens (\d+)`)
	dataPattern     = regexp.MustCompile(`DP(\d+)`)
	capturePattern  = regexp.MustCompile(`capture sizes <= (\d+)`)
	versionPattern  = regexp.MustCompile(`(\d+\.\d+\.\d+) line numbers`)
	familyDigits    = regexp.MustCompile(`[^a-z0-9.]+`)
	specPattern     = regexp.MustCompile(`(?i)speculative`)
	quantWords      = regexp.MustCompile(`(?i)awq|gptq|nvfp4|fp8|w4a16|int4`)
	bitsandbytes    = regexp.MustCompile(`(?i)bitsandbytes|bnb`)
	wordSize        = regexp.MustCompile(`\b(\d+(?:\.\d+)?B)\b`)
	strangePattern  = regexp.MustCompile(`V2 model runner|LoRA`)
	unstatedPattern = regexp.MustCompile(`(?i)share[^;]* not (?:stated|in the part read)|neither[^;]*share`)
	portPattern     = regexp.MustCompile(`PCIe\)`)
	instructPattern = regexp.MustCompile(`-instruct|-it$|-it-`)
)

func number(text string) float64 {
	n, _ := strconv.ParseFloat(strings.ReplaceAll(text, ",", ""), 64)
	return n
}

// device reads the GPU of a case. It is nil where the case doesn't say.
func (c startup) device() *GPUFact {
	text := c.GPU
	if text == "" {
		return nil
	}
	f := GPUFact{NVLink: gpu.NVLinkSwitch, ComputeMajor: 8}
	best := 0
	for _, p := range gpu.Products() {
		words := strings.Fields(strings.TrimPrefix(strings.TrimPrefix(p.Name, "NVIDIA "), "GeForce "))
		score, whole := 0, true
		for i, w := range words {
			if strings.Contains(text, w) {
				score += len(w)
			} else if i == 0 || len(words) <= 2 && !strings.Contains(text, strings.Split(w, "GB")[0]) {
				whole = false
			}
		}
		// Sizes that both name must agree.
		if a, b := sizePattern.FindStringSubmatch(p.Name), sizePattern.FindStringSubmatch(text); a != nil && b != nil && a[1] != b[1] {
			whole = false
		}
		if whole && score > best {
			best, f.Name, f.MemoryTotalMiB, f.ComputeMajor, f.ComputeMinor, f.NVLink = score, p.Name, p.MemoryMiB, p.ComputeMajor, p.ComputeMinor, p.NVLink
		}
	}
	if strings.Contains(text, "A800") {
		f = GPUFact{Name: "NVIDIA A800-SXM4-80GB", MemoryTotalMiB: 81920, ComputeMajor: 8, NVLink: gpu.NVLinkSwitch}
	}
	if strings.Contains(text, "H20 ") {
		f = GPUFact{Name: "NVIDIA H20", ComputeMajor: 9, NVLink: gpu.NVLinkSwitch}
	}
	if m := mibPattern.FindStringSubmatch(text); m != nil && !strings.HasPrefix(usedPattern.FindString(text), m[0]) {
		f.MemoryTotalMiB = int64(number(m[1]))
	}
	if m := visiblePattern.FindStringSubmatch(text); m != nil {
		f.VisibleBytes = int64(number(m[1]) * gib)
		if f.MemoryTotalMiB == 0 {
			f.MemoryTotalMiB = int64(number(m[1]) * 1024)
		}
	}
	if f.MemoryTotalMiB == 0 {
		m := sizePattern.FindStringSubmatch(text)
		if m == nil {
			return nil
		}
		f.MemoryTotalMiB = int64(number(m[1]) * 1000)
		if f.MemoryTotalMiB >= 12000 {
			f.MemoryTotalMiB = int64(number(m[1]) * 1024)
		}
	}
	if portPattern.MatchString(text) {
		f.NVLink = gpu.NVLinkNone
	}
	switch m, d := usedPattern.FindStringSubmatch(text), desktopPattern.FindStringSubmatch(text); {
	case m != nil && m[2] == "MiB":
		f.MemoryUsedMiB = int64(number(m[1]))
	case m != nil:
		f.MemoryUsedMiB = int64(number(m[1]) * 1024)
	case d != nil:
		f.MemoryUsedMiB = int64(number(d[1]) * 1000)
	case sharedPattern.MatchString(text) || sharedPattern.MatchString(c.Note):
		f.Shared = true
	}
	return &f
}

func family(name string) string {
	name = strings.ToLower(name)
	if _, after, ok := strings.Cut(name, "/"); ok {
		name = after
	}
	return strings.Trim(familyDigits.ReplaceAllString(name, "-"), "-")
}

// find gives the model of a case: the catalogue's, by its name or that of one of its
// forms. exact says that the weights are those of the catalogue.
func (c startup) find(catalogue Catalogue) (m Model, variant string, exact, ok bool) {
	if c.Model == "" {
		return Model{}, "", false, false
	}
	for _, m := range catalogue.Models {
		if strings.EqualFold(m.Name, c.Model) {
			return c.quantised(m, true)
		}
		for _, v := range m.Variants {
			if strings.EqualFold(v.Repository, c.Model) {
				return m, v.Name, true, true
			}
		}
	}
	// Another's build, or a name without its owner: the base model's shape.
	wanted := family(c.Model)
	wanted = strings.ReplaceAll(wanted, "meta-llama", "llama")
	best, bestLen := Model{}, 0
	for _, m := range catalogue.Models {
		base := strings.ReplaceAll(family(m.Name), "meta-llama", "llama")
		stem := instructPattern.ReplaceAllString(base, "")
		for _, s := range []string{base, stem} {
			if len(s) > bestLen && (strings.HasPrefix(wanted, s) || strings.Contains(wanted, "-"+s)) {
				best, bestLen = m, len(s)
			}
		}
	}
	if bestLen > 0 {
		return c.quantised(best, !quantWords.MatchString(c.Model))
	}
	// A family and a size in words: the newest such model.
	size, lower := wordSize.FindStringSubmatch(c.Model), strings.ToLower(c.Model)
	if size == nil {
		return Model{}, "", false, false
	}
	for i := len(catalogue.Models) - 1; i >= 0; i-- {
		m := catalogue.Models[i]
		base := family(m.Name)
		if !strings.Contains(base, "-"+strings.ToLower(size[1])) || m.Architecture.Pooling {
			continue
		}
		for _, word := range strings.FieldsFunc(lower, func(r rune) bool { return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789.", r) }) {
			if len(word) >= 4 && word != strings.ToLower(size[1]) && strings.Contains(base, word) {
				return c.quantised(m, false)
			}
		}
	}
	return Model{}, "", false, false
}

// formNames are the forms that a word for a quantisation may mean.
func formNames(word string) []string {
	return map[string][]string{"awq": {"awq"}, "gptq": {"gptq-int4", "gptq"}, "fp8": {"fp8"}, "nvfp4": {"nvfp4"}, "w4a16": {"w4a16", "awq"}, "int4": {"awq", "gptq-int4"}}[word]
}

// quantised picks the form that the case's quantisation names.
func (c startup) quantised(m Model, exact bool) (Model, string, bool, bool) {
	text := strings.ToLower(c.Quant + " " + c.Model)
	if bitsandbytes.MatchString(text) {
		// Four bits a weight, the embedding in 16.
		m.Variants = append([]Form{{Name: "bnb", Repository: m.Name, Precision: "bitsandbytes", MinCompute: "7.5",
			Bytes: int64((m.ParametersBillion*1e9-float64(m.Architecture.Vocab*m.Architecture.Hidden))*0.5625) + int64(m.Architecture.Vocab*m.Architecture.Hidden)*2}}, m.Variants...)
		return m, "bnb", false, true
	}
	words := quantWords.FindAllString(text, -1)
	for _, word := range words {
		if strings.EqualFold(m.Precision, word) {
			return m, "", exact, true
		}
		for _, name := range formNames(word) {
			for _, v := range m.Variants {
				if v.Name == name {
					return m, name, exact, true
				}
			}
		}
	}
	for _, word := range words {
		if _, ok := m.estimated(word); ok {
			return m, word, false, true
		}
	}
	return m, "", exact, true
}

// shape is a model from the dims that a case states itself.
func (c startup) shape() (Model, bool) {
	a := c.Arch
	if a == nil || a.Layers == 0 {
		return Model{}, false
	}
	if a.KVHeads == 0 && a.MLALora == 0 {
		return Model{}, false
	}
	m := Model{Name: c.Model, Precision: "bf16", WeightsBytes: 1, ContextTokens: c.MaxModelLen, MinCompute: "7.5"}
	m.Architecture = Architecture{Layers: a.Layers, Hidden: 4096, Vocab: 128256, Intermediate: 14336, AttentionHeads: 64, KVHeads: a.KVHeads, HeadDim: a.HeadDim,
		FullLayers: a.FullLayers, SlidingLayers: a.SlidingLayers, Window: a.Window, KVLoraRank: a.MLALora, RopeDim: a.MLARope, IndexHeadDim: a.IndexHeadDim}
	if a.Uniform || a.MLALora > 0 {
		m.Architecture.FullLayers = a.Layers
	}
	if a.LinearLayers > 0 || m.Architecture.check() != nil {
		return Model{}, false
	}
	return m, true
}

// ask turns the flags of a case into settings.
func (c startup) ask(variant string) Ask {
	ask := Ask{AsGiven: true, ContextTokens: c.MaxModelLen, KVCacheDType: c.KVDType, Utilization: c.Util, TensorParallel: c.TP, VLLM: c.VLLM, Variant: variant}
	if ask.VLLM == "" {
		if m := versionPattern.FindStringSubmatch(c.Note); m != nil {
			ask.VLLM = m[1]
		} else if strings.Contains(c.Note, "V0") {
			ask.VLLM = "0.6.4"
		}
	}
	take := func(p *regexp.Regexp, into *int) {
		if m := p.FindStringSubmatch(c.Flags); m != nil {
			*into, _ = strconv.Atoi(m[1])
		}
	}
	take(seqsPattern, &ask.MaxNumSeqs)
	take(batchedPattern, &ask.MaxBatchedTokens)
	take(dataPattern, &ask.DataParallel)
	take(capturePattern, &ask.LargestGraph)
	ask.ExpertParallel = strings.Contains(c.Flags, "expert parallel")
	ask.Eager = strings.Contains(c.Flags, "enforce-eager")
	ask.NoPrefixCaching = strings.Contains(c.Flags, "prefix caching off")
	if specPattern.MatchString(c.Model + c.Flags) {
		ask.DraftTokens = 3
	}
	if c.WeightsGiB > 0 {
		ask.WeightsPerRankBytes = int64(c.WeightsGiB * gib)
	}
	return ask
}

// expected is the kind of a failure, read from the log's words.
func (c startup) expected() []Reason {
	text := strings.ToLower(c.FailReason)
	switch {
	case strings.Contains(text, "mamba cache blocks"), strings.Contains(text, "state blocks"):
		return []Reason{ReasonStates}
	case strings.Contains(text, "graph"), strings.Contains(text, "warm"), strings.Contains(text, "sampler"):
		return []Reason{ReasonGraphs}
	case strings.Contains(text, "releasing memory"):
		return []Reason{ReasonKV, ReasonBusy}
	case strings.Contains(text, "refused when less than"), strings.Contains(text, "free memory on device"):
		return []Reason{ReasonBusy}
	case strings.Contains(text, "no room for one"):
		return []Reason{ReasonKV, ReasonBusy}
	case strings.Contains(text, "kv"), strings.Contains(text, "max length"), strings.Contains(text, "max seq len"):
		return []Reason{ReasonKV}
	case strings.Contains(text, "no available memory"), strings.Contains(text, "out of memory"), strings.Contains(text, "oom"):
		return []Reason{ReasonWeights, ReasonKV, ReasonGraphs}
	case strings.Contains(text, "bfloat16"), strings.Contains(text, "capability"):
		return []Reason{ReasonCapability}
	}
	return nil
}

func off(got, want float64) string {
	if want == 0 {
		return "-"
	}
	return fmt.Sprintf("%+.1f%%", (got/want-1)*100)
}
