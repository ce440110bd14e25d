package main

import (
	"fmt"
	"os"
	"time"

	"sigs.k8s.io/yaml"
)

// parameters are the committed assumptions; parameters.yaml has the reasons.
type parameters struct {
	RealImageBytes   int64     `json:"real_image_bytes"`
	RealWeightsBytes int64     `json:"real_weights_bytes"`
	ImageLayerBytes  []int64   `json:"image_layer_bytes"`
	WeightsFileBytes []int64   `json:"weights_file_bytes"`
	Caps             []float64 `json:"caps_gbits_per_second"`
	LoadSeconds      float64   `json:"load_seconds"`
	WarmUpSeconds    float64   `json:"warm_up_seconds"`
	LimitSeconds     float64   `json:"limit_seconds"`
	PathRuns         int       `json:"path_runs"`
}

// leastImageBytes and leastWeightsBytes are what the comparison is worth anything from.
const (
	leastImageBytes   = 1_000_000_000
	leastWeightsBytes = 2_000_000_000
)

func loadParameters(path string) (parameters, error) {
	var p parameters
	raw, err := os.ReadFile(path) // #nosec G304 -- the committed file or the one the user named
	if err != nil {
		return p, fmt.Errorf("reading the parameters: %w", err)
	}
	if err := yaml.UnmarshalStrict(raw, &p); err != nil {
		return p, fmt.Errorf("reading the parameters in %s: %w", path, err)
	}
	switch {
	case p.RealImageBytes <= 0 || p.RealWeightsBytes <= 0:
		err = fmt.Errorf("a scale needs real sizes")
	case sum(p.ImageLayerBytes) < leastImageBytes:
		err = fmt.Errorf("the image has %d bytes, and at least %d are wanted", sum(p.ImageLayerBytes), int64(leastImageBytes))
	case sum(p.WeightsFileBytes) < leastWeightsBytes:
		err = fmt.Errorf("the weights have %d bytes, and at least %d are wanted", sum(p.WeightsFileBytes), int64(leastWeightsBytes))
	case len(p.Caps) == 0 || p.LoadSeconds <= 0 || p.LimitSeconds <= 0 || p.PathRuns < 1:
		err = fmt.Errorf("caps, load_seconds, limit_seconds and path_runs are needed")
	}
	for _, c := range p.Caps {
		if c <= 0 {
			err = fmt.Errorf("a cap of %v Gb/s", c)
		}
	}
	if err != nil {
		return p, fmt.Errorf("reading the parameters in %s: %w", path, err)
	}
	return p, nil
}

func sum(all []int64) int64 {
	total := int64(0)
	for _, n := range all {
		total += n
	}
	return total
}

// scale is how much smaller the payload is than the real one.
func (p parameters) scale() float64 {
	return float64(sum(p.ImageLayerBytes)+sum(p.WeightsFileBytes)) / float64(p.RealImageBytes+p.RealWeightsBytes)
}

// bitsPerSecond is a cap as it is put on the link here.
func (p parameters) bitsPerSecond(gbits float64) float64 { return gbits * 1e9 * p.scale() }

// limit bounds one side: every byte one after the other and half as long again, load
// twice, and the rest.
func (p parameters) limit(gbits float64, bytes int64) time.Duration {
	seconds := 2*p.LoadSeconds + p.LimitSeconds
	if gbits > 0 {
		seconds += 1.5 * float64(bytes) * 8 / p.bitsPerSecond(gbits)
	}
	return time.Duration(seconds * float64(time.Second))
}

// bound is the least time to the first token that any order of the parts could take.
type bound struct {
	// LinkSeconds is what the payload takes on the link, without a byte of headers.
	LinkSeconds float64 `json:"link_seconds"`
	// PathSeconds is the way to a model server that could be started, with payloads that
	// take no time.
	PathSeconds   float64 `json:"path_seconds"`
	LoadSeconds   float64 `json:"load_seconds"`
	WarmUpSeconds float64 `json:"warm_up_seconds"`
	// Seconds is the larger of the first two, and the other two.
	Seconds float64 `json:"seconds"`
}

func (p parameters) bound(gbits float64, payloadBytes int64, pathSeconds float64) bound {
	b := bound{
		LinkSeconds: float64(payloadBytes) * 8 / p.bitsPerSecond(gbits), PathSeconds: pathSeconds,
		LoadSeconds: p.LoadSeconds, WarmUpSeconds: p.WarmUpSeconds,
	}
	b.Seconds = max(b.LinkSeconds, b.PathSeconds) + b.LoadSeconds + b.WarmUpSeconds
	return b
}

// goal is what both ratios are held against.
const goal = 1.15

// ratios are what the goals are about.
type ratios struct {
	LlmboxToBound      float64 `json:"llmbox_to_bound"`
	LlmboxToSequential float64 `json:"llmbox_to_sequential"`
	BoundToSequential  float64 `json:"bound_to_sequential"`
	// Off is by how much of the third the second is larger than it. It is the first less one:
	// both are printed because both are asked for.
	Off float64 `json:"off"`
	Met bool    `json:"met"`
}

func ratiosOf(bound, llmbox, sequential float64) ratios {
	r := ratios{LlmboxToBound: llmbox / bound, LlmboxToSequential: llmbox / sequential, BoundToSequential: bound / sequential}
	r.Off = r.LlmboxToSequential/r.BoundToSequential - 1
	r.Met = r.LlmboxToBound <= goal && r.Off <= goal-1+1e-9 && r.Off >= 1-goal
	return r
}
