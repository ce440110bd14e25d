package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/component"
)

// delays is what the bound needs of the lab's delays file. Strictness is the
// lab's own business: it reads the same file.
type delays struct {
	BandwidthBitsPerSecond float64          `json:"bandwidth_bits_per_second"`
	Images                 map[string]int64 `json:"images"`
	DefaultImageBytes      int64            `json:"default_image_bytes"`
	StartSeconds           float64          `json:"start_seconds"`
	JobSeconds             float64          `json:"job_seconds"`
}

func loadDelays(path string) (delays, error) {
	var d delays
	raw, err := os.ReadFile(path) // #nosec G304 -- the committed table or the one the user named
	if err != nil {
		return d, fmt.Errorf("reading the delays: %w", err)
	}
	if err := yaml.UnmarshalStrict(raw, &d); err != nil {
		return d, fmt.Errorf("reading the delays: %w", err)
	}
	if d.BandwidthBitsPerSecond <= 0 {
		return d, fmt.Errorf("reading the delays in %s: a bound needs a bandwidth", path)
	}
	return d, nil
}

// pull is how long the link is busy with an image: the longest beginning of its
// reference decides, as in the lab.
func (d delays) pull(reference string) float64 {
	size, longest := d.DefaultImageBytes, -1
	for prefix, s := range d.Images {
		if strings.HasPrefix(reference, prefix) && len(prefix) > longest {
			size, longest = s, len(prefix)
		}
	}
	return float64(size) * 8 / d.BandwidthBitsPerSecond
}

// workload is what one component runs, in waves: the pods of its chart, then
// what an operator among them makes once it runs.
type workload struct {
	waves [][]string
	job   bool
}

// operands names, by key in the component table, the images of the pods that an
// operator makes from a chart's resources.
func operands() map[string][]string {
	return map[string][]string{
		"gpu-operator":  {"devicePlugin", "dcgmExporter", "validator"},
		"prometheus":    {"prometheus", "configReloader", "alertmanager"},
		"envoy-gateway": {"envoy", "gateway"},
	}
}

func workloadOf(c component.Component, manifest string) (workload, error) {
	var w workload
	objects, err := chart.Decode(strings.NewReader(manifest))
	if err != nil {
		return w, fmt.Errorf("reading the manifest of %s: %w", c.Name, err)
	}
	var pods []*unstructured.Unstructured
	for _, o := range objects {
		switch o.GetKind() {
		case "Deployment", "StatefulSet", "DaemonSet":
			pods = append(pods, o)
		case "Job":
			w.job = true
			pods = append(pods, o)
		}
	}
	w.waves = append(w.waves, chart.WorkloadImages(pods))
	var later []string
	for _, key := range operands()[c.Name] {
		img, ok := c.Images[key]
		if !ok {
			return w, fmt.Errorf("component %s has no image %s", c.Name, key)
		}
		later = append(later, img.Reference)
	}
	if len(later) > 0 {
		w.waves = append(w.waves, later)
	}
	return w, nil
}

// alone is how long a component's pods take to be ready when nothing else uses
// the link: each wave pulls what is not there yet, one image after the other,
// then starts. A Job's pod ends within the first wave, beside what waits for it.
func (d delays) alone(w workload) float64 {
	total := 0.0
	var have []string
	for i, wave := range w.waves {
		for _, image := range wave {
			if !slices.Contains(have, image) {
				have = append(have, image)
				total += d.pull(image)
			}
		}
		total += d.StartSeconds
		if i == 0 && w.job {
			total += d.JobSeconds
		}
	}
	return total
}

// bound is the least time that any order of installing could take on this node.
type bound struct {
	// CriticalPath is the longest chain of needs, each with the link to itself.
	CriticalPath        []string `json:"critical_path"`
	CriticalPathSeconds float64  `json:"critical_path_seconds"`
	// LinkSeconds is the time to pull every image once, plus one start: the node
	// has one link, which no order makes wider.
	LinkSeconds float64 `json:"link_seconds"`
	// BoundSeconds is the larger of the two.
	BoundSeconds float64 `json:"bound_seconds"`
	// SumSeconds adds up what each component takes alone.
	SumSeconds float64 `json:"sum_seconds"`
	// WaitSeconds is what the table predicts of one release after another with
	// helm --wait, which waits for the first wave of each only.
	WaitSeconds float64            `json:"wait_seconds"`
	Alone       map[string]float64 `json:"alone_seconds"`
}

func computeBound(d delays, order []component.Node, work map[string]workload) bound {
	b := bound{Alone: map[string]float64{}}
	var pulled []string
	for _, n := range order {
		w, ok := work[n.Name]
		if !ok {
			continue
		}
		b.Alone[n.Name] = d.alone(w)
		b.SumSeconds += b.Alone[n.Name]
		for _, image := range slices.Concat(w.waves...) {
			if !slices.Contains(pulled, image) {
				pulled = append(pulled, image)
				b.LinkSeconds += d.pull(image)
			}
		}
	}
	b.LinkSeconds += d.StartSeconds
	b.WaitSeconds = d.oneByOne(order, work)
	b.CriticalPath, b.CriticalPathSeconds = component.CriticalPath(order, func(name string) float64 { return b.Alone[name] })
	b.BoundSeconds = max(b.CriticalPathSeconds, b.LinkSeconds)
	return b
}

// oneByOne follows releases that are installed one after another, each waited
// for until its own pods are ready. What an operator makes later pulls over the
// same link meanwhile, before the images of the next release.
func (d delays) oneByOne(order []component.Node, work map[string]workload) float64 {
	now, free := 0.0, 0.0
	there := map[string]float64{}
	pull := func(images []string) float64 {
		last := now
		for _, image := range images {
			if _, ok := there[image]; !ok {
				free = max(free, now) + d.pull(image)
				there[image] = free
			}
			last = max(last, there[image])
		}
		return last
	}
	for _, n := range order {
		w, ok := work[n.Name]
		if !ok {
			continue
		}
		for i, wave := range w.waves {
			complete := pull(wave)
			if i > 0 {
				continue
			}
			now = complete + d.StartSeconds
			if w.job {
				now += d.JobSeconds
			}
		}
	}
	return now
}
