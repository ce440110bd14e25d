package model

import (
	"math"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// What takes memory beside weights and cache. Every figure was read off vLLM's own
// start-up lines ("Actual usage is … for weight, … for peak activation, … for
// non-torch memory, and … for CUDAGraph memory") in public threads; docs/models.md
// names them.
const (
	// driverReserved and driverShare: CUDA sees less than nvidia-smi prints. 22.04 of
	// 22.49 GiB on an L4, 39.49 of 40 on an A100, 79.19 of 79.65 on an H100, 139.81 of
	// 140.40 on an H200, 178.35 of 179.06 on a B200, 267.69 of 268.59 on a B300.
	driverReserved = 0.45 * gib
	driverShare    = 0.002
	// contextBytes is what kernels take in one process beyond the first snapshot;
	// release.contextBytes says when.
	contextBytes      = 256 * mib
	earlyContextBytes = 100 * mib
	// linkBytes is NCCL's and custom all-reduce's part per rank as long as the ranks were
	// connected after the first snapshot (0.63 to 1.38 GiB of non-torch memory in the
	// logs, the context included). Since then switchBytes is left of it on NVLink (0.60
	// on four H100s), portBytes on PCIe and bridges (0.09 on four), and fusedLinkBytes
	// with the work space of the fused kernel (2.07 to 2.17 on two and four H100s).
	linkBytes      = 665 * mib
	switchBytes    = 358 * mib
	portBytes      = 50 * mib
	fusedLinkBytes = 1864 * mib
	// deviceBytes and deviceShare: the CUDA context itself, taken before the first
	// snapshot and so beside the share. 0.19 GiB of 22.0, 0.38 of 47.4, 0.51 of 79.2,
	// 0.60 of 139.8. ringBytes is what NCCL takes there (1.0 on four H100s).
	deviceBytes = 0.1 * gib
	deviceShare = 0.004
	ringBytes   = 614 * mib
	// encoderBytes is a vision or audio encoder's run while profiling, where its shape
	// isn't known.
	encoderBytes = 409 * mib
	// graphBase and graphPerLayer: what capturing all sizes takes. 0.23 to 0.67 GiB
	// with 28 to 36 layers, 0.71 with 64, 1.22 with 80 on two ranks, 4.1 with experts
	// on four.
	graphBase     = 0.2 * gib
	graphPerLayer = 0.011 * gib
	// lateBytes is taken after the cache was sized: modules loaded on first use,
	// workspaces, fragments.
	lateBytes = 358 * mib
	// mxfp4Factor is how much more than in the file such weights take once repacked:
	// 65.97 GiB for 65,248,815,744 bytes (vllm#23278).
	mxfp4Factor = 1.086
)

// visibleBytes is a GPU's memory as CUDA reports it.
func visibleBytes(smiMiB int64) float64 {
	total := float64(smiMiB) * mib
	return max(0, total-driverReserved-driverShare*total)
}

// totalBytes is a GPU's memory as CUDA reports it, where that isn't known from
// nvidia-smi's figure.
func (g GPUFact) totalBytes() float64 {
	if g.VisibleBytes > 0 {
		return float64(g.VisibleBytes)
	}
	return visibleBytes(g.MemoryTotalMiB)
}

// settings are what a start of vLLM runs with, defaults filled in.
type settings struct {
	tp, dp             int
	expertParallel     bool
	kvBytes            float64
	dsLayout           bool
	context            int
	sequences, batched int
	utilization        float64
	eager              bool
	prefixCaching      bool
	draftTokens        int
	largestGraph       int
	release            release
	// repacked weights (MXFP4) have kernels that keep no work space.
	repacked            bool
	weightsPerRankBytes int64
	cacheBytes          int64
}

// batchDefaults are the server's own: large ones from 70 GiB on, but never on an
// A100 (vllm/engine/arg_utils.py get_batch_defaults).
func batchDefaults(g GPUFact, r release, context int) (sequences, batched int) {
	if r.legacyEngine {
		// One prompt had to fit one batch, until it was cut up from 32K tokens on.
		if context > 32768 {
			return 256, 512
		}
		return 256, max(2048, context)
	}
	if g.totalBytes() >= 70*gib && !strings.Contains(strings.ToLower(g.Name), "a100") {
		return 1024, 8192
	}
	return 256, 2048
}

// Budget is where one GPU's memory goes, in bytes.
type Budget struct {
	// Total as CUDA sees it, Busy what others hold of it.
	Total int64 `json:"total"`
	Busy  int64 `json:"busy"`
	// Granted is Total times the utilisation.
	Granted int64 `json:"granted"`
	Weights int64 `json:"weights"`
	// Context is CUDA's and NCCL's part, Activation the peak of the profiling run.
	Context    int64 `json:"context"`
	Activation int64 `json:"activation"`
	// GraphsInside is taken from the grant, GraphsOutside from what the grant leaves.
	GraphsInside  int64 `json:"graphs_inside"`
	GraphsOutside int64 `json:"graphs_outside"`
	// Cache is what is left for the KV cache; below zero nothing is.
	Cache int64 `json:"cache"`
	// Outside is what is left beside the grant, OutsideNeed what will be taken of it.
	Outside     int64 `json:"outside"`
	OutsideNeed int64 `json:"outside_need"`
	// Trial is the small cache that a trial capture needs before sizing.
	Trial int64 `json:"trial"`
}

// budget does the sum for one rank.
func budget(a Architecture, weights float64, parameters float64, g GPUFact, s settings, l cacheLayout) Budget {
	total := g.totalBytes()
	b := Budget{Total: int64(total), Busy: g.MemoryUsedMiB * mib}
	b.Granted = int64(total * s.utilization)

	perRank := weights / float64(s.tp)
	if s.expertParallel && s.dp > 1 {
		share := a.expertShare(parameters)
		perRank = weights*(1-share)/float64(s.tp) + weights*share/float64(s.tp*s.dp)
	}
	if s.weightsPerRankBytes > 0 {
		perRank = float64(s.weightsPerRankBytes)
	}
	b.Weights = int64(perRank)

	b.Context = int64(s.release.contextBytes)
	if s.tp*s.dp > 1 {
		b.Context += allReduceBytes(g, s)
	}
	b.Activation = activationBytes(a, s)
	if graphs := graphBytes(a, s); s.release.graphsInside {
		// The estimate is inside; what it misses is not.
		b.GraphsInside, b.GraphsOutside = int64(graphs), int64(graphs/2)
	} else {
		b.GraphsOutside = int64(graphs)
	}
	b.Cache = b.Granted - b.Weights - b.Context - b.Activation - b.GraphsInside
	if s.release.countsNeighbours {
		b.Cache -= b.Busy
	}
	if s.cacheBytes > 0 {
		b.Cache = s.cacheBytes
	}
	b.Outside = b.Total - b.Granted - b.Busy
	if s.release.countsNeighbours {
		b.Outside = b.Total - b.Granted
	}
	b.OutsideNeed = b.GraphsOutside + lateBytes
	if !s.release.countsNeighbours {
		b.OutsideNeed += ownBytes(total)
	}
	if !a.Pooling {
		// What the sampler's first run finds taken of the space that profiling left it.
		b.OutsideNeed += int64(fusedLogits * float64(min(s.sequences, s.batched)) * float64(a.Vocab) / 2)
	}
	if s.release.linksFirst && s.tp*s.dp > 1 && g.NVLink != gpu.NVLinkNone {
		b.OutsideNeed += ringBytes
	}
	if s.release.profilesGraphs && !s.eager {
		// One block for each sequence that a graph serves
		// (_init_minimal_kv_cache_for_profiling).
		b.Trial = int64(min(s.sequences, s.largestGraph)) * l.blockBytes
	}
	return b
}

// forwardBytes is the peak of one batch through one layer: the feed-forward layer's
// gate, up and product, and the stream beside it three times, 16 bits each. 16,384
// tokens through 18,944 wide layers took 1.97 GiB.
func forwardBytes(a Architecture, s settings) float64 {
	tokens := float64(s.batched)
	tp := float64(s.tp)
	dense := tokens * (3*float64(a.Intermediate)/tp + 3*float64(a.Hidden)) * 2
	if a.ExpertsPerToken == 0 {
		return dense
	}
	return max(dense, expertSpread(a, s)+tokens*3*float64(a.Hidden)*2)
}

// expertSpread is the part of forwardBytes that tokens take once they are spread over
// their experts.
func expertSpread(a Architecture, s settings) float64 {
	if a.ExpertsPerToken == 0 {
		return 0
	}
	return float64(s.batched) * float64(a.ExpertsPerToken) * (3*float64(a.ExpertIntermediate)/float64(s.tp) + float64(a.Hidden)) * 2
}

// samplerBytes is the peak of sampling for as many sequences as may run.
func samplerBytes(a Architecture, s settings) float64 {
	if a.Pooling || a.Encoder {
		return 0
	}
	return s.release.logitBytes * float64(min(s.sequences, s.batched)) * float64(a.Vocab)
}

// activationBytes is the peak of the profiling run: an encoder's, then a batch's or the
// sampler's, whichever is larger. While the sampler runs, the last layer's stream and
// residual are still there, the work space of the experts, and what the encoder made.
// 1.89 GiB for a vocabulary of 128,256, 2.21 for 151,936, 3.63 for 256,000, each with
// 1024 sequences and 8192 tokens on 0.19; with experts 0.4 to 0.7 more.
func activationBytes(a Architecture, s settings) int64 {
	sampler := samplerBytes(a, s)
	if sampler > 0 {
		sampler += float64(s.batched) * float64(a.Hidden) * 4
		if s.release.keepsExpertSpace && !s.repacked {
			sampler += expertSpread(a, s)
		}
	}
	peak := max(forwardBytes(a, s), sampler)
	if a.Multimodal {
		run, made := encoderRun(a, s)
		peak = max(run, peak+made)
	}
	return int64(peak)
}

// encoderRun is what an encoder takes while it runs on the largest input it is made
// for, and what it leaves: two widths of the feed-forward layer and six of the stream
// for each patch. 65,536 patches of 1152 and 4304 took 1.8 to 2.1 GiB, and so did the
// smaller encoder of a 4B model.
func encoderRun(a Architecture, s settings) (run, made float64) {
	if a.VisionPatches == 0 {
		return encoderBytes, 0
	}
	patches := float64(a.VisionPatches)
	return patches * (2*float64(a.VisionIntermediate)/float64(s.tp) + 6*float64(a.VisionHidden)) * 2, patches / 4 * float64(a.Hidden) * 2
}

// allReduceBytes is what the ranks take to add up what each has.
func allReduceBytes(g GPUFact, s settings) int64 {
	switch {
	case g.NVLink == gpu.NVLinkNone && !s.release.legacyEngine && !s.release.countsNeighbours:
		return portBytes
	case s.release.linksFirst && g.NVLink != gpu.NVLinkSwitch:
		return portBytes
	case s.release.fusesAllReduce && s.tp > 1 && g.NVLink == gpu.NVLinkSwitch && (g.ComputeMajor == 9 || g.ComputeMajor == 10):
		return fusedLinkBytes
	case s.release.linksFirst:
		return switchBytes
	}
	return linkBytes
}

// ownBytes is the CUDA context of one process.
func ownBytes(total float64) int64 { return int64(deviceBytes + deviceShare*total) }

// graphBytes is what capture takes with the sizes that will be captured: 1, 2, 4,
// every eighth to 256, every sixteenth beyond.
func graphBytes(a Architecture, s settings) float64 {
	if s.eager {
		return 0
	}
	const sizes = 51
	n := 3.0
	if s.largestGraph >= 8 {
		n += float64(min(s.largestGraph, 256)) / 8
	}
	if s.largestGraph > 256 {
		n += float64(s.largestGraph-256) / 16
	}
	bytes := graphBase + graphPerLayer*float64(a.Layers)*(0.3+0.7*min(1, n/sizes))
	if s.tp > 1 {
		bytes *= 1.3
	}
	return math.Round(bytes)
}
