package model

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// The files that describe a model, and how large they may be.
const (
	ConfigFile = "config.json"
	IndexFile  = "model.safetensors.index.json"

	maxConfigBytes = 4 << 20
	maxIndexBytes  = 64 << 20
	// maxWeights is more than any model: 100 TB.
	maxWeights = 1e14
)

// ErrConfig says that a model's own files can't be made sense of.
var ErrConfig = errors.New("model files not understood")

// hubConfig is the part of a config.json that memory depends on. A multimodal model
// keeps it in a nested object.
type hubConfig struct {
	ModelType     string          `json:"model_type"`
	Architectures []string        `json:"architectures"`
	TextConfig    json.RawMessage `json:"text_config"`
	LLMConfig     json.RawMessage `json:"llm_config"`
	LanguageModel json.RawMessage `json:"language_config"`
	VisionConfig  json.RawMessage `json:"vision_config"`
	AudioConfig   json.RawMessage `json:"audio_config"`
	TorchDType    string          `json:"torch_dtype"`
	DType         string          `json:"dtype"`
	Tied          *bool           `json:"tie_word_embeddings"`

	Layers       *int64 `json:"num_hidden_layers"`
	LayersOld    *int64 `json:"n_layer"`
	Hidden       *int64 `json:"hidden_size"`
	HiddenOld    *int64 `json:"n_embd"`
	Intermediate *int64 `json:"intermediate_size"`
	InnerOld     *int64 `json:"n_inner"`
	Vocab        *int64 `json:"vocab_size"`
	Heads        *int64 `json:"num_attention_heads"`
	HeadsOld     *int64 `json:"n_head"`
	KVHeads      *int64 `json:"num_key_value_heads"`
	HeadDim      *int64 `json:"head_dim"`
	Positions    *int64 `json:"max_position_embeddings"`
	PositionsOld *int64 `json:"n_positions"`

	LayerTypes       []string `json:"layer_types"`
	HybridPattern    string   `json:"hybrid_override_pattern"`
	FullInterval     *int64   `json:"full_attention_interval"`
	SlidingWindow    *int64   `json:"sliding_window"`
	SlidingPattern   *int64   `json:"sliding_window_pattern"`
	UseSliding       *bool    `json:"use_sliding_window"`
	GlobalKVHeads    *int64   `json:"num_global_key_value_heads"`
	GlobalHeadDim    *int64   `json:"global_head_dim"`
	SharedKV         *int64   `json:"num_kv_shared_layers"`
	ChunkSize        *int64   `json:"attention_chunk_size"`
	NoRopeLayers     []int64  `json:"no_rope_layers"`
	CompressRatios   []int64  `json:"compress_ratios"`
	LinearAttnConfig any      `json:"linear_attn_config"`

	KVLoraRank   *int64 `json:"kv_lora_rank"`
	RopeDim      *int64 `json:"qk_rope_head_dim"`
	IndexHeadDim *int64 `json:"index_head_dim"`

	LinearValueHeads *int64 `json:"linear_num_value_heads"`
	LinearKeyHeads   *int64 `json:"linear_num_key_heads"`
	LinearKeyDim     *int64 `json:"linear_key_head_dim"`
	LinearValueDim   *int64 `json:"linear_value_head_dim"`
	LinearConv       *int64 `json:"linear_conv_kernel_dim"`
	StateDType       string `json:"mamba_ssm_dtype"`
	StateCacheDType  string `json:"mamba_ssm_cache_dtype"`
	MambaHeads       *int64 `json:"mamba_num_heads"`
	MambaHeadDim     *int64 `json:"mamba_head_dim"`
	MambaState       *int64 `json:"ssm_state_size"`
	MambaGroups      *int64 `json:"n_groups"`
	MambaConv        *int64 `json:"conv_kernel"`
	GraniteHeads     *int64 `json:"mamba_n_heads"`
	GraniteHeadDim   *int64 `json:"mamba_d_head"`
	GraniteState     *int64 `json:"mamba_d_state"`
	GraniteGroups    *int64 `json:"mamba_n_groups"`
	GraniteConv      *int64 `json:"mamba_d_conv"`

	Experts         *int64 `json:"num_experts"`
	LocalExperts    *int64 `json:"num_local_experts"`
	RoutedExperts   *int64 `json:"n_routed_experts"`
	PerToken        *int64 `json:"num_experts_per_tok"`
	TopKExperts     *int64 `json:"top_k_experts"`
	ExpertInner     *int64 `json:"moe_intermediate_size"`
	DraftLayers     *int64 `json:"num_nextn_predict_layers"`
	DraftLayersQwen *int64 `json:"mtp_num_hidden_layers"`

	Quantization json.RawMessage `json:"quantization_config"`
}

type quantConfig struct {
	Method    string          `json:"quant_method"`
	Algorithm string          `json:"quant_algo"`
	KVAlgo    string          `json:"kv_cache_quant_algo"`
	KVScheme  json.RawMessage `json:"kv_cache_scheme"`
	Format    string          `json:"format"`
}

// read decodes one JSON document of at most limit bytes into v.
func read(r io.Reader, limit int64, what string, v any) error {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return fmt.Errorf("reading %s: %w", what, err)
	}
	if int64(len(data)) > limit {
		return fmt.Errorf("reading %s: %w: larger than %d bytes", what, ErrConfig, limit)
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	if err := decoder.Decode(v); err != nil {
		return fmt.Errorf("reading %s: %w: %w", what, ErrConfig, err)
	}
	if decoder.More() {
		return fmt.Errorf("reading %s: %w: more than one document", what, ErrConfig)
	}
	return nil
}

// bounds collects what is out of range instead of stopping at the first.
type bounds struct{ problems []error }

// pick gives the first of several spellings that is there, within 0 and most.
func (b *bounds) pick(name string, most int64, candidates ...*int64) int {
	for _, c := range candidates {
		if c == nil {
			continue
		}
		if *c < 0 || *c > most {
			b.problems = append(b.problems, fmt.Errorf("%s is %d, not within 0 and %d", name, *c, most))
			return 0
		}
		return int(*c)
	}
	return 0
}

// What no model exceeds; sums of these stay far within 64 bits.
const (
	mostLayers  = 2048
	mostWidth   = 1 << 20
	mostHeads   = 4096
	mostDim     = 1 << 14
	mostVocab   = 1 << 23
	mostContext = 1 << 27
	mostExperts = 1 << 14
)

// ReadConfig reads a config.json. The size of the weights is what the architecture
// adds up to; ReadIndex knows it better.
func ReadConfig(r io.Reader, name string) (Model, error) {
	var outer hubConfig
	if err := read(r, maxConfigBytes, ConfigFile, &outer); err != nil {
		return Model{}, err
	}
	inner := outer
	for _, nested := range []json.RawMessage{outer.TextConfig, outer.LLMConfig, outer.LanguageModel} {
		if len(nested) > 0 && nested[0] == '{' {
			inner = hubConfig{}
			if err := json.Unmarshal(nested, &inner); err != nil {
				return Model{}, fmt.Errorf("reading %s: %w: %w", ConfigFile, ErrConfig, err)
			}
			break
		}
	}
	var b bounds
	a, tied := architectureOf(outer, inner, &b)
	m := Model{Name: name, Architecture: a, MinCompute: "8.0", Licence: "see the model's page", Source: "the model's own " + ConfigFile}
	m.ContextTokens = b.pick("max_position_embeddings", mostContext, inner.Positions, inner.PositionsOld, outer.Positions)
	if m.ContextTokens == 0 {
		m.ContextTokens = 2048
	}
	if len(b.problems) > 0 {
		return Model{}, fmt.Errorf("reading %s: %w: %w", ConfigFile, ErrConfig, errors.Join(b.problems...))
	}
	if err := a.check(); err != nil {
		return Model{}, fmt.Errorf("reading %s: %w: %w", ConfigFile, ErrConfig, err)
	}
	quantization := outer.Quantization
	if len(quantization) == 0 {
		quantization = inner.Quantization
	}
	if err := m.quantisation(quantization); err != nil {
		return Model{}, err
	}
	parameters := a.parameters(tied)
	m.ParametersBillion = parameters / 1e9
	m.WeightsBytes = int64(a.storedBytes(parameters, tied, m.Precision))
	m.WeightsFrom = FromParameters
	return m, nil
}

func architectureOf(outer, c hubConfig, b *bounds) (Architecture, bool) {
	a := Architecture{
		Layers:         b.pick("num_hidden_layers", mostLayers, c.Layers, c.LayersOld),
		Hidden:         b.pick("hidden_size", mostWidth, c.Hidden, c.HiddenOld),
		Intermediate:   b.pick("intermediate_size", mostWidth, c.Intermediate, c.InnerOld),
		Vocab:          b.pick("vocab_size", mostVocab, c.Vocab, outer.Vocab),
		AttentionHeads: b.pick("num_attention_heads", mostHeads, c.Heads, c.HeadsOld),
		KVHeads:        b.pick("num_key_value_heads", mostHeads, c.KVHeads, c.Heads, c.HeadsOld),
		HeadDim:        b.pick("head_dim", mostDim, c.HeadDim),
		KVLoraRank:     b.pick("kv_lora_rank", mostDim, c.KVLoraRank),
		RopeDim:        b.pick("qk_rope_head_dim", mostDim, c.RopeDim),
		IndexHeadDim:   b.pick("index_head_dim", mostDim, c.IndexHeadDim),
		GlobalKVHeads:  b.pick("num_global_key_value_heads", mostHeads, c.GlobalKVHeads),
		GlobalHeadDim:  b.pick("global_head_dim", mostDim, c.GlobalHeadDim),
		Experts:        b.pick("num_experts", mostExperts, c.Experts, c.LocalExperts, c.RoutedExperts),
		DraftLayers:    b.pick("num_nextn_predict_layers", 64, c.DraftLayers, c.DraftLayersQwen),
		Multimodal:     len(outer.VisionConfig) > 0 && outer.VisionConfig[0] == '{' || len(outer.AudioConfig) > 0 && outer.AudioConfig[0] == '{',
	}
	if a.HeadDim == 0 && a.AttentionHeads > 0 {
		a.HeadDim = a.Hidden / a.AttentionHeads
	}
	if a.Experts > 0 {
		a.ExpertsPerToken = b.pick("num_experts_per_tok", int64(a.Experts), c.PerToken, c.TopKExperts)
		a.ExpertIntermediate = b.pick("moe_intermediate_size", mostWidth, c.ExpertInner, c.Intermediate)
		if a.ExpertsPerToken == 0 {
			a.ExpertsPerToken = 1
		}
	}
	encoders := []string{"bert", "roberta", "xlm-roberta", "nomic_bert", "modernbert", "new", "gte", "mpnet", "gemma3_text_encoder"}
	a.Encoder = slices.Contains(encoders, c.ModelType)
	a.Pooling = a.Encoder
	for _, name := range outer.Architectures {
		a.Pooling = a.Pooling || strings.HasSuffix(name, "ForSequenceClassification") || strings.HasSuffix(name, "EmbeddingModel")
	}
	if a.Multimodal {
		visionOf(&a, outer, b)
	}
	tied := false
	for _, t := range []*bool{outer.Tied, c.Tied} {
		tied = tied || t != nil && *t
	}
	if a.Encoder {
		return a, true
	}
	switch {
	case len(c.CompressRatios) > 0:
		b.problems = append(b.problems, fmt.Errorf("compressed attention (compress_ratios): its cache isn't known"))
	case c.LinearAttnConfig != nil:
		b.problems = append(b.problems, fmt.Errorf("linear_attn_config: its cache isn't known"))
	default:
		layersOf(&a, c, b)
	}
	stateOf(&a, c, b)
	return a, tied
}

// picturePatches is the largest picture that Qwen's processors make: 16,384 tokens of
// two by two patches ("Encoder cache will be initialized with a budget of 16384 tokens").
const picturePatches = 16384 * 4

// visionOf reads the encoder's shape where the size of its largest picture is known.
func visionOf(a *Architecture, outer hubConfig, b *bounds) {
	var v struct {
		Hidden       *int64 `json:"hidden_size"`
		Embedding    *int64 `json:"embed_dim"`
		Intermediate *int64 `json:"intermediate_size"`
		Merge        *int64 `json:"spatial_merge_size"`
	}
	if !strings.HasPrefix(outer.ModelType, "qwen") || len(outer.VisionConfig) == 0 {
		return
	}
	if err := json.Unmarshal(outer.VisionConfig, &v); err != nil {
		b.problems = append(b.problems, fmt.Errorf("vision_config: %w", err))
		return
	}
	hidden := b.pick("vision hidden_size", mostWidth, v.Hidden, v.Embedding)
	inner := b.pick("vision intermediate_size", mostWidth, v.Intermediate)
	if hidden > 0 && inner > 0 && b.pick("spatial_merge_size", 64, v.Merge) == 2 {
		a.VisionPatches, a.VisionHidden, a.VisionIntermediate = picturePatches, hidden, inner
	}
}

// layersOf counts the kinds of layers.
func layersOf(a *Architecture, c hubConfig, b *bounds) {
	window := b.pick("sliding_window", mostContext, c.SlidingWindow)
	shared := b.pick("num_kv_shared_layers", mostLayers, c.SharedKV)
	if shared > a.Layers {
		b.problems = append(b.problems, fmt.Errorf("num_kv_shared_layers is %d of %d layers", shared, a.Layers))
		return
	}
	switch {
	case len(c.LayerTypes) > 0:
		if len(c.LayerTypes) > mostLayers || len(c.LayerTypes) < a.Layers {
			b.problems = append(b.problems, fmt.Errorf("layer_types has %d entries for %d layers", len(c.LayerTypes), a.Layers))
			return
		}
		for _, kind := range c.LayerTypes[:a.Layers-shared] {
			switch kind {
			case "full_attention", "attention", "global":
				a.FullLayers++
			case "sliding_attention", "local":
				a.SlidingLayers++
			case "chunked_attention":
				a.SlidingLayers++
				window = b.pick("attention_chunk_size", mostContext, c.ChunkSize)
			case "linear_attention", "mamba", "mamba2":
				a.StateLayers++
			case "mlp", "moe":
			default:
				b.problems = append(b.problems, fmt.Errorf("layer type %q: its cache isn't known", kind))
				return
			}
		}
	case c.HybridPattern != "":
		a.FullLayers, a.StateLayers = strings.Count(c.HybridPattern, "*"), strings.Count(c.HybridPattern, "M")
	case c.FullInterval != nil && c.LinearValueHeads != nil:
		interval := max(1, b.pick("full_attention_interval", mostLayers, c.FullInterval))
		a.FullLayers = a.Layers / interval
		a.StateLayers = a.Layers - a.FullLayers
	case c.ChunkSize != nil && *c.ChunkSize > 0:
		window = b.pick("attention_chunk_size", mostContext, c.ChunkSize)
		a.FullLayers = a.Layers / 4
		if len(c.NoRopeLayers) > 0 && len(c.NoRopeLayers) <= mostLayers {
			a.FullLayers = 0
			for _, rope := range c.NoRopeLayers {
				if rope == 0 {
					a.FullLayers++
				}
			}
		}
		a.SlidingLayers = max(0, a.Layers-a.FullLayers)
	case window > 0 && c.SlidingPattern != nil && *c.SlidingPattern > 1:
		a.FullLayers = a.Layers / b.pick("sliding_window_pattern", mostLayers, c.SlidingPattern)
		a.SlidingLayers = a.Layers - a.FullLayers
	case window > 0 && strings.HasPrefix(c.ModelType, "gemma3"):
		// Its older files leave the pattern to the code: five of six slide.
		a.FullLayers = a.Layers / 6
		a.SlidingLayers = a.Layers - a.FullLayers
	case window > 0 && c.ModelType == "gemma2":
		a.FullLayers = a.Layers / 2
		a.SlidingLayers = a.Layers - a.FullLayers
	case window > 0 && strings.HasPrefix(c.ModelType, "mistral") && (c.UseSliding == nil || *c.UseSliding):
		a.SlidingLayers = a.Layers
	default:
		a.FullLayers = a.Layers - shared
	}
	if a.SlidingLayers > 0 {
		a.Window = window
	}
}

// stateOf sizes the state of one layer.
func stateOf(a *Architecture, c hubConfig, b *bounds) {
	if a.StateLayers == 0 {
		return
	}
	a.StateBytes = 2
	if slices.Contains([]string{c.StateDType, c.StateCacheDType}, "float32") {
		a.StateBytes = 4
	}
	if c.LinearValueHeads != nil {
		vHeads, kHeads := b.pick("linear_num_value_heads", mostHeads, c.LinearValueHeads), b.pick("linear_num_key_heads", mostHeads, c.LinearKeyHeads)
		kDim, vDim := b.pick("linear_key_head_dim", mostDim, c.LinearKeyDim), b.pick("linear_value_head_dim", mostDim, c.LinearValueDim)
		kernel := b.pick("linear_conv_kernel_dim", 64, c.LinearConv)
		a.StateElements = int64(vHeads) * int64(kDim) * int64(vDim)
		a.ConvElements = int64(2*kHeads*kDim+vHeads*vDim) * int64(max(0, kernel-1))
		return
	}
	heads := b.pick("mamba_num_heads", mostHeads, c.MambaHeads, c.GraniteHeads)
	dim := b.pick("mamba_head_dim", mostDim, c.MambaHeadDim, c.GraniteHeadDim)
	state := b.pick("ssm_state_size", mostDim, c.MambaState, c.GraniteState)
	groups := b.pick("n_groups", mostHeads, c.MambaGroups, c.GraniteGroups)
	kernel := b.pick("conv_kernel", 64, c.MambaConv, c.GraniteConv)
	a.StateElements = int64(heads) * int64(dim) * int64(state)
	a.ConvElements = (int64(heads)*int64(dim) + 2*int64(groups)*int64(state)) * int64(max(0, kernel-1))
}

// quantisation reads how the weights are stored, and since when GPUs can compute
// with them. The 8-bit and 4-bit float forms run on Ampere with weights alone in few
// bits (docs.vllm.ai, supported hardware for quantization).
func (m *Model) quantisation(raw json.RawMessage) error {
	m.Precision = "bf16"
	if len(raw) == 0 || raw[0] != '{' {
		return nil
	}
	var q quantConfig
	if err := json.Unmarshal(raw, &q); err != nil {
		return fmt.Errorf("reading quantization_config: %w: %w", ErrConfig, err)
	}
	scheme := strings.ToLower(strings.Trim(string(q.KVScheme), `"`))
	if strings.EqualFold(q.KVAlgo, "FP8") || scheme == "fp8" || strings.HasPrefix(scheme, "{") && strings.Contains(scheme, `"num_bits"`) && strings.Contains(scheme, "8") {
		m.KVCache = "fp8"
	}
	method, algorithm, format := strings.ToLower(q.Method), strings.ToLower(q.Algorithm), strings.ToLower(q.Format)
	switch {
	case method == "mxfp4" || strings.Contains(algorithm, "mxfp4"):
		m.Precision = "mxfp4"
	case strings.Contains(algorithm, "nvfp4") || algorithm == "mixed_precision" || strings.Contains(format, "nvfp4"):
		m.Precision = "nvfp4"
	case method == "fp8" || method == "fbgemm_fp8" || strings.HasPrefix(algorithm, "fp8") || strings.HasPrefix(format, "float-quantized"):
		m.Precision = "fp8"
	case method == "awq" || method == "gptq" || method == "compressed-tensors":
		m.Precision, m.MinCompute = method, "7.5"
	case method == "bitsandbytes":
		m.Precision, m.MinCompute = method, "7.5"
	default:
		return fmt.Errorf("reading quantization_config: %w: method %q isn't known", ErrConfig, method+algorithm)
	}
	return nil
}

// parameters adds up the tensors of the architecture; norms and biases are left out.
func (a Architecture) parameters(tied bool) float64 {
	h := float64(a.Hidden)
	n := float64(a.Vocab) * h
	if !tied {
		n *= 2
	}
	attention := h * float64(a.AttentionHeads+a.KVHeads) * float64(a.HeadDim) * 2
	if a.KVLoraRank > 0 {
		attention = h*float64(a.KVLoraRank+a.RopeDim) + float64(a.KVLoraRank)*float64(a.AttentionHeads)*256 + h*float64(a.AttentionHeads)*128*2
	}
	if a.StateLayers > 0 {
		// Projections of a state layer are about as wide as those of attention.
		attention = max(attention, h*h*4)
	}
	forward := 3 * h * float64(a.Intermediate)
	if a.Experts > 0 {
		forward = float64(a.Experts)*3*h*float64(a.ExpertIntermediate) + h*float64(a.Experts)
	}
	if a.Encoder {
		forward = 2 * h * float64(a.Intermediate)
		attention = 4 * h * h
	}
	return n + float64(a.Layers)*(attention+forward)
}

// storedBytes is what so many parameters take in a precision: the embedding stays in
// 16 bits, scales are counted in.
func (a Architecture) storedBytes(parameters float64, tied bool, precision string) float64 {
	embedding := float64(a.Vocab) * float64(a.Hidden)
	if !tied {
		embedding *= 2
	}
	per := 2.0
	switch precision {
	case "fp8":
		per = 1
	case "awq", "gptq", "compressed-tensors", "bitsandbytes":
		per = 0.52
	case "mxfp4":
		per = 0.53
	case "nvfp4":
		per = 0.5625
	}
	return min(maxWeights, max(1, embedding*2+max(0, parameters-embedding)*per))
}

// Index is what a safetensors index says.
type Index struct {
	TotalBytes int64
	// Files are the names of the files with the weights, sorted.
	Files []string
}

// ReadIndex reads a model.safetensors.index.json.
func ReadIndex(r io.Reader) (Index, error) {
	var raw struct {
		Metadata struct {
			TotalSize json.Number `json:"total_size"`
		} `json:"metadata"`
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := read(r, maxIndexBytes, IndexFile, &raw); err != nil {
		return Index{}, err
	}
	total, err := raw.Metadata.TotalSize.Float64()
	if err != nil || math.IsNaN(total) || total < 1 || total > maxWeights {
		return Index{}, fmt.Errorf("reading %s: %w: total_size is %q", IndexFile, ErrConfig, raw.Metadata.TotalSize)
	}
	index := Index{TotalBytes: int64(total)}
	seen := map[string]bool{}
	for _, file := range raw.WeightMap {
		if seen[file] {
			continue
		}
		seen[file] = true
		if file != filepath.Base(file) || !strings.HasSuffix(file, ".safetensors") || strings.ContainsAny(file, `/\`) {
			return Index{}, fmt.Errorf("reading %s: %w: %q is not a file beside it", IndexFile, ErrConfig, file)
		}
		index.Files = append(index.Files, file)
	}
	slices.Sort(index.Files)
	return index, nil
}

// withIndex takes the size of the weights from an index.
func (m *Model) withIndex(total int64) {
	// The file's bytes say how many parameters there are better than the dims do.
	if m.WeightsBytes > 0 {
		m.ParametersBillion *= float64(total) / float64(m.WeightsBytes)
	}
	m.WeightsBytes, m.WeightsFrom, m.Verified = total, FromIndex, true
	m.Source = "the model's own " + ConfigFile + " and safetensors index"
}

// ReadPath reads a model from a directory with its files, or from its config.json
// with the index beside it.
func ReadPath(path string) (Model, error) {
	info, err := os.Stat(path)
	if err != nil {
		return Model{}, fmt.Errorf("reading a model's files: %w", err)
	}
	dir, config := path, ConfigFile
	if !info.IsDir() {
		dir, config = filepath.Dir(path), filepath.Base(path)
	}
	return ReadFS(os.DirFS(dir), config, filepath.Base(filepath.Clean(dir)))
}

// ReadFS reads a model's files from a file system.
func ReadFS(fsys fs.FS, config, name string) (Model, error) {
	file, err := fsys.Open(config)
	if err != nil {
		return Model{}, fmt.Errorf("reading a model's files: %w", err)
	}
	m, err := ReadConfig(file, name)
	if err := errors.Join(err, file.Close()); err != nil {
		return Model{}, err
	}
	index, err := fsys.Open(IndexFile)
	switch {
	case err == nil:
		got, err := ReadIndex(index)
		if err := errors.Join(err, index.Close()); err != nil {
			return Model{}, err
		}
		m.withIndex(got.TotalBytes)
		return m, nil
	case !errors.Is(err, fs.ErrNotExist):
		return Model{}, fmt.Errorf("reading a model's files: %w", err)
	}
	// A small model is one file, without an index.
	var total int64
	files, err := fs.Glob(fsys, "*.safetensors")
	if err != nil {
		return Model{}, fmt.Errorf("reading a model's files: %w", err)
	}
	for _, name := range files {
		info, err := fs.Stat(fsys, name)
		if err != nil {
			return Model{}, fmt.Errorf("reading a model's files: %w", err)
		}
		total += info.Size()
	}
	if total > 0 {
		m.withIndex(total)
		m.Source = "the model's own files"
	}
	return m, nil
}
