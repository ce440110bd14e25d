package model

// cacheLayout is how vLLM lays out the cache of one rank
// (vllm/v1/core/kv_cache_utils.py get_kv_cache_groups): layers of one kind are put
// into groups of equal size, a block is one page in each slot of a group, and all
// groups draw from the same blocks.
type cacheLayout struct {
	// blockBytes is one block over all slots.
	blockBytes int64
	groups     int
	// smallestBlock is the fewest tokens that a block of any group holds.
	smallestBlock int
	kinds         []cacheKind
}

// cacheKind is the groups of one kind of layer.
type cacheKind struct {
	groups int
	// block is how many tokens one block holds; 0 for states.
	block int
	// window bounds what a sequence keeps; 0 keeps everything.
	window int
	// blocks is what every sequence takes, whatever its length (states).
	blocks int
}

const (
	// blockTokens is vLLM's block on NVIDIA GPUs, latentBlockTokens that of the
	// kernels for latent attention.
	blockTokens       = 16
	latentBlockTokens = 64
)

// layout builds the layout for tp ranks and an element of elementBytes.
func layout(a Architecture, s settings) cacheLayout {
	if a.Encoder {
		return cacheLayout{}
	}
	full := a.fullTokenBytes(s.tp, s.kvBytes, s.dsLayout)
	fullLayers := a.FullLayers
	if s.draftTokens > 0 {
		fullLayers += a.DraftLayers
	}
	switch {
	case a.StateLayers > 0 && fullLayers > 0:
		// The attention block grows until its page is as large as a state
		// (vllm/platforms/interface.py "Setting attention block size").
		state := a.statePage(s.tp, s.draftTokens)
		block := int((state + full*blockTokens - 1) / (full * blockTokens) * blockTokens)
		page := int64(block) * full
		size := groupSize(fullLayers, a.StateLayers)
		perState := 1 + s.draftTokens
		if s.prefixCaching {
			perState++
		}
		return cacheLayout{
			blockBytes: page * int64(size), groups: ceil(fullLayers, size) + ceil(a.StateLayers, size), smallestBlock: block,
			kinds: []cacheKind{{groups: ceil(fullLayers, size), block: block}, {groups: ceil(a.StateLayers, size), blocks: perState}},
		}
	case a.StateLayers > 0:
		return cacheLayout{
			blockBytes: a.statePage(s.tp, s.draftTokens) * int64(a.StateLayers), groups: 1, smallestBlock: blockTokens,
			kinds: []cacheKind{{groups: 1, blocks: 1}},
		}
	case a.SlidingLayers > 0 && fullLayers > 0:
		sliding := a.slidingTokenBytes(s.tp, s.kvBytes)
		page := max(full, sliding) * blockTokens
		fullBlock, slidingBlock := int(page/full), int(page/sliding)
		size := groupSize(fullLayers, a.SlidingLayers)
		return cacheLayout{
			blockBytes: page * int64(size), groups: ceil(fullLayers, size) + ceil(a.SlidingLayers, size), smallestBlock: min(fullBlock, slidingBlock),
			kinds: []cacheKind{{groups: ceil(fullLayers, size), block: fullBlock}, {groups: ceil(a.SlidingLayers, size), block: slidingBlock, window: a.Window}},
		}
	case a.SlidingLayers > 0:
		return cacheLayout{
			blockBytes: a.slidingTokenBytes(s.tp, s.kvBytes) * blockTokens * int64(a.SlidingLayers), groups: 1, smallestBlock: blockTokens,
			kinds: []cacheKind{{groups: 1, block: blockTokens, window: a.Window}},
		}
	}
	block := blockTokens
	if a.KVLoraRank > 0 {
		block = latentBlockTokens
	}
	return cacheLayout{
		blockBytes: full * int64(block) * int64(fullLayers), groups: 1, smallestBlock: block,
		kinds: []cacheKind{{groups: 1, block: block}},
	}
}

// groupSize is the smaller count of layers, unless the larger is less than half as
// many again: then padding the smaller costs less.
func groupSize(a, b int) int {
	small, large := min(a, b), max(a, b)
	if float64(large) < float64(small)*1.5 {
		return large
	}
	return small
}

func ceil(a, b int) int { return (a + b - 1) / b }

// blocksFor is what one sequence of so many tokens takes. A sliding layer keeps its
// window and what one step may add, and one block more for where the window starts.
func (l cacheLayout) blocksFor(tokens, batched int) int {
	n := 0
	for _, k := range l.kinds {
		switch {
		case k.block == 0:
			n += k.groups * k.blocks
		case k.window > 0:
			n += k.groups * (ceil(min(k.window-1+batched, tokens), k.block) + 1)
		default:
			n += k.groups * ceil(tokens, k.block)
		}
	}
	return n
}

// longest is the longest sequence that blocks hold, up to most.
func (l cacheLayout) longest(blocks, batched, most int) int {
	low, high := 0, most
	for low < high {
		mid := low + (high-low+1)/2
		if l.blocksFor(mid, batched) <= blocks {
			low = mid
		} else {
			high = mid - 1
		}
	}
	return low
}

// tokens is the figure vLLM prints as "GPU KV cache size".
func (l cacheLayout) tokens(blocks, context, batched int, byRequest bool) int64 {
	if l.groups == 0 || blocks <= 0 {
		return 0
	}
	if !byRequest {
		return int64(blocks/l.groups) * int64(l.smallestBlock)
	}
	per := l.blocksFor(context, batched)
	if per == 0 {
		return 0
	}
	return int64(blocks) * int64(context) / int64(per)
}
