package model

import (
	"fmt"

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
	// sortsLogits: top-k and top-p sorted all logits, until a kernel that works in
	// place came (0.17) and FlashInfer's became the default (vllm#40376).
	sortsLogits bool
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

// releaseOf reads a version. An unknown one gets the ways that leave the least for
// the cache, so that nothing is promised; a trial capture is not held against it.
func releaseOf(text string) (release, error) {
	if text == "" {
		return release{countsNeighbours: true, sortsLogits: true, checksStates: true, tokensByRequest: true, utilization: 0.9}, nil
	}
	v, err := version.NewVersion(text)
	if err != nil {
		return release{}, fmt.Errorf("reading the vLLM version: %w", err)
	}
	core := v.Core()
	since := func(at string) bool { return core.GreaterThanOrEqual(version.Must(version.NewVersion(at))) }
	r := release{
		known:            true,
		legacyEngine:     !since("0.8"),
		countsNeighbours: !since("0.9.2"),
		sortsLogits:      !since("0.17") && since("0.8"),
		profilesGraphs:   since("0.18"),
		graphsInside:     since("0.21"),
		checksStates:     since("0.18"),
		tokensByRequest:  since("0.20"),
		utilization:      0.9,
	}
	if since("0.20") {
		r.utilization = 0.92
	}
	return r, nil
}

// versionAtLeast compares two versions by their numbers; an unreadable one is not.
func versionAtLeast(have, least string) bool {
	a, errA := version.NewVersion(have)
	b, errB := version.NewVersion(least)
	return errA == nil && errB == nil && a.Core().GreaterThanOrEqual(b.Core())
}
