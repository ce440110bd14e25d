package model

import "fmt"

// Architecture is what a model's config.json says about its shape: everything that
// memory depends on. Zero means absent.
type Architecture struct {
	Layers int `yaml:"layers"`
	Hidden int `yaml:"hidden"`
	// Intermediate is the width of a dense feed-forward layer.
	Intermediate   int `yaml:"intermediate,omitempty"`
	Vocab          int `yaml:"vocab"`
	AttentionHeads int `yaml:"attention_heads,omitempty"`
	KVHeads        int `yaml:"kv_heads,omitempty"`
	HeadDim        int `yaml:"head_dim,omitempty"`

	// FullLayers keep every token. Layers that share another layer's cache are not
	// counted here nor below.
	FullLayers int `yaml:"full_layers,omitempty"`
	// SlidingLayers keep the last Window tokens of a sequence.
	SlidingLayers int `yaml:"sliding_layers,omitempty"`
	Window        int `yaml:"window,omitempty"`
	// GlobalKVHeads and GlobalHeadDim are the full layers' own where they differ.
	GlobalKVHeads int `yaml:"global_kv_heads,omitempty"`
	GlobalHeadDim int `yaml:"global_head_dim,omitempty"`

	// StateLayers (linear attention, Mamba) keep a state of one size per sequence.
	StateLayers int `yaml:"state_layers,omitempty"`
	// StateElements are those of one layer's recurrent state, of StateBytes bytes
	// each; ConvElements those of its convolution, two bytes each.
	StateElements int64 `yaml:"state_elements,omitempty"`
	ConvElements  int64 `yaml:"conv_elements,omitempty"`
	StateBytes    int   `yaml:"state_bytes,omitempty"`

	// KVLoraRank and RopeDim describe latent attention (MLA); IndexHeadDim its
	// sparse indexer.
	KVLoraRank   int `yaml:"kv_lora_rank,omitempty"`
	RopeDim      int `yaml:"rope_dim,omitempty"`
	IndexHeadDim int `yaml:"index_head_dim,omitempty"`

	Experts            int `yaml:"experts,omitempty"`
	ExpertsPerToken    int `yaml:"experts_per_token,omitempty"`
	ExpertIntermediate int `yaml:"expert_intermediate,omitempty"`

	// DraftLayers belong to a draft head in the same checkpoint (MTP).
	DraftLayers int `yaml:"draft_layers,omitempty"`
	// Encoder models (embeddings) keep no cache at all.
	Encoder bool `yaml:"encoder,omitempty"`
	// Pooling models answer with vectors or scores and sample nothing.
	Pooling    bool `yaml:"pooling,omitempty"`
	Multimodal bool `yaml:"multimodal,omitempty"`
	// VisionPatches are those of the largest picture, VisionHidden and
	// VisionIntermediate the widths of the vision encoder.
	VisionPatches      int `yaml:"vision_patches,omitempty"`
	VisionHidden       int `yaml:"vision_hidden,omitempty"`
	VisionIntermediate int `yaml:"vision_intermediate,omitempty"`
}

// check says what is missing for the arithmetic.
func (a Architecture) check() error {
	switch {
	case a.Layers <= 0 || a.Hidden <= 0 || a.Vocab <= 0:
		return fmt.Errorf("lacks layers, hidden or vocab")
	case a.Encoder:
		return nil
	case a.KVLoraRank > 0:
		if a.RopeDim <= 0 || a.FullLayers <= 0 {
			return fmt.Errorf("latent attention lacks rope_dim or full_layers")
		}
	case a.AttentionHeads <= 0 || a.KVHeads <= 0 || a.HeadDim <= 0:
		return fmt.Errorf("lacks heads or head_dim")
	}
	switch {
	case a.FullLayers+a.SlidingLayers+a.StateLayers <= 0:
		return fmt.Errorf("no layer keeps anything")
	case a.FullLayers+a.SlidingLayers+a.StateLayers > a.Layers:
		return fmt.Errorf("more layers with a cache than layers")
	case a.SlidingLayers > 0 && a.Window <= 0:
		return fmt.Errorf("sliding layers without a window")
	case a.StateLayers > 0 && (a.StateElements <= 0 || a.StateBytes <= 0):
		return fmt.Errorf("state layers without the size of a state")
	case a.ExpertsPerToken > 0 && a.ExpertIntermediate <= 0:
		return fmt.Errorf("experts without their width")
	}
	return nil
}

// KVBytesPerToken is what one token takes in all layers that keep every token,
// over all GPUs of one copy.
func (a Architecture) KVBytesPerToken(bytesPerElement int) int64 {
	if a.Encoder {
		return 0
	}
	return int64(a.FullLayers) * a.fullTokenBytes(1, float64(bytesPerElement), false)
}

// headsPerRank is how many KV heads one of tp ranks holds: they are copied, not
// split, once there are more ranks than heads (vllm/config/model.py
// get_num_kv_heads).
func headsPerRank(heads, tp int) int { return max(1, heads/max(1, tp)) }

// fullTokenBytes is what one token takes in one full layer of one rank. Latent
// attention is one head that every rank copies; DeepSeek's own 8-bit layout takes
// 656 bytes (512 of 8 bits, four scales, 64 of 16 bits), and a sparse indexer
// 8 bits an element and a scale of four bytes per 128.
func (a Architecture) fullTokenBytes(tp int, bytesPerElement float64, dsLayout bool) int64 {
	if a.KVLoraRank > 0 {
		n := int64(float64(a.KVLoraRank+a.RopeDim) * bytesPerElement)
		if dsLayout {
			n = int64(a.KVLoraRank) + 16 + int64(a.RopeDim)*2
		}
		if a.IndexHeadDim > 0 {
			n += int64(a.IndexHeadDim) + int64((a.IndexHeadDim+127)/128)*4
		}
		return n
	}
	heads, dim := a.KVHeads, a.HeadDim
	if a.GlobalKVHeads > 0 {
		heads = a.GlobalKVHeads
	}
	if a.GlobalHeadDim > 0 {
		dim = a.GlobalHeadDim
	}
	return int64(2 * float64(headsPerRank(heads, tp)) * float64(dim) * bytesPerElement)
}

func (a Architecture) slidingTokenBytes(tp int, bytesPerElement float64) int64 {
	return int64(2 * float64(headsPerRank(a.KVHeads, tp)) * float64(a.HeadDim) * bytesPerElement)
}

// statePage is one sequence's state in one layer of one rank.
func (a Architecture) statePage(tp, draftTokens int) int64 {
	t := int64(max(1, tp))
	conv := a.ConvElements
	// The convolution keeps its kernel less one; each draft token adds a row.
	conv += conv / 3 * int64(draftTokens)
	return a.StateElements*int64(a.StateBytes)/t + conv*2/t
}

// expertBytesShare is the part of the parameters that belongs to experts.
func (a Architecture) expertShare(parameters float64) float64 {
	if a.Experts == 0 || parameters <= 0 {
		return 0
	}
	experts := float64(a.Layers) * float64(a.Experts) * 3 * float64(a.Hidden) * float64(a.ExpertIntermediate)
	return min(0.98, experts/parameters)
}
