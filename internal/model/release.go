package model

import (
	"fmt"
	"regexp"
	"strings"

	version "github.com/hashicorp/go-version"
)

// ServedVLLM is the release of vLLM that llmbox deploys.
const ServedVLLM = "0.32.0"

// release is how one release of vLLM goes about memory. Each field names the change
// upstream that it follows.
type release struct {
	known bool
	// legacyEngine: V0, before 0.8; one batch was as long as the longest context.
	legacyEngine bool
	// countsNeighbours: what other processes hold was taken out of the budget, until
	// the profile was measured against a first snapshot (vllm/v1/worker/gpu_worker.py).
	countsNeighbours bool
	// logitBytes is the sampler's peak per sequence and word of the vocabulary. Top-k
	// and top-p sorted all logits (38: 16-bit and 32-bit logits, sorted values, 64-bit
	// indices, probabilities and sums) until a kernel that works in place came (0.17:
	// 14, one word each of 16 and three of 32 bits) and FlashInfer's became the default
	// (0.20, vllm#40376: 10).
	logitBytes float64
	// contextBytes is what kernels take in one process beyond the first snapshot: 0.02
	// to 0.13 GiB, 0.25 since 0.18.
	contextBytes float64
	// keepsExpertSpace: the work space of the experts stays once it was used, so that
	// the sampler's peak comes on top of it (vllm/v1/worker/workspace.py).
	keepsExpertSpace bool
	// fusesAllReduce: all-reduce and norm are one kernel of FlashInfer's on Hopper and
	// data centre Blackwell, with a work space on each rank (vllm/config/vllm.py
	// enable_allreduce_rms_fusion).
	fusesAllReduce bool
	// linksFirst: the ranks are connected before the first snapshot, so what NCCL takes
	// lies beside the share (vllm/v1/worker/gpu_worker.py init_device).
	linksFirst bool
	// profilesGraphs: a trial capture runs before the cache is sized (vllm#30515).
	profilesGraphs bool
	// graphsInside: its estimate is taken from the budget, default since 0.21.0.
	graphsInside bool
	// checksStates: refuses to start with fewer state blocks than max_num_seqs
	// (vllm#38270).
	checksStates bool
	// tokensByRequest: the log's "GPU KV cache size" is concurrency times the longest
	// context, before that blocks over groups (vllm#40694 and followers).
	tokensByRequest bool
	// utilization is the default of --gpu-memory-utilization (vllm/config/cache.py).
	utilization float64
}

// The sampler's bytes; release.logitBytes says what they are.
const (
	sortedLogits  = 38
	inPlaceLogits = 14
	fusedLogits   = 10
)

// releaseOf reads a version. An unknown one gets the ways of those that most logs are
// of; what older ones do differently is weighed by pessimistic.
func releaseOf(text string) (release, error) {
	if text == "" || unreleased(text) {
		return release{logitBytes: inPlaceLogits, contextBytes: contextBytes, keepsExpertSpace: true, linksFirst: true, checksStates: true, tokensByRequest: true, utilization: 0.9}, nil
	}
	// "v0.19.0-cu129" and "0.19.2rc1.dev8+g4b7f5ea1a" go by their numbers.
	v, err := version.NewVersion(versionNumbers.FindString(text))
	if err != nil {
		return release{}, fmt.Errorf("reading the vLLM version %q: %w", text, err)
	}
	core := v.Core()
	since := func(at string) bool { return core.GreaterThanOrEqual(version.Must(version.NewVersion(at))) }
	r := release{
		known:            true,
		legacyEngine:     !since("0.8"),
		countsNeighbours: !since("0.9.2"),
		logitBytes:       sortedLogits,
		contextBytes:     contextBytes,
		keepsExpertSpace: since("0.13"),
		fusesAllReduce:   since("0.13") && !since("0.24"),
		linksFirst:       since("0.11"),
		profilesGraphs:   since("0.18"),
		graphsInside:     since("0.21"),
		checksStates:     since("0.18"),
		tokensByRequest:  since("0.20"),
		utilization:      0.9,
	}
	switch {
	case since("0.20"):
		r.logitBytes, r.utilization = fusedLogits, 0.92
	case since("0.17"):
		r.logitBytes = inPlaceLogits
	case r.legacyEngine:
		r.logitBytes = 0
	}
	if !r.legacyEngine && !since("0.18") {
		r.contextBytes = earlyContextBytes
	}
	return r, nil
}

var versionNumbers = regexp.MustCompile(`\d+(?:\.\d+)+`)

// unreleased says whether a version names a build of a source tree and no release.
func unreleased(text string) bool {
	return text == "nightly" || text == "latest" || text == "main" || strings.HasPrefix(text, "0.1.dev")
}

// pessimistic is an unknown release that leaves as little for the cache as any did.
func (r release) pessimistic() release {
	r.countsNeighbours, r.logitBytes = true, sortedLogits
	return r
}

// versionAtLeast compares two versions by their numbers; an unreadable one is not.
func versionAtLeast(have, least string) bool {
	a, errA := version.NewVersion(versionNumbers.FindString(have))
	b, errB := version.NewVersion(least)
	return errA == nil && errB == nil && a.Core().GreaterThanOrEqual(b.Core())
}
