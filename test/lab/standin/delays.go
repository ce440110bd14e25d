package standin

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// Delays says how long a simulated node takes to pull images and to start and
// run pods.
type Delays struct {
	// BandwidthBitsPerSecond of the link over which images come; 0 pulls at once.
	BandwidthBitsPerSecond float64 `json:"bandwidth_bits_per_second"`
	// Images gives compressed sizes by the beginning of the reference; the longest
	// beginning that fits wins.
	Images map[string]int64 `json:"images"`
	// DefaultImageBytes is the size of an image that Images does not know.
	DefaultImageBytes int64 `json:"default_image_bytes"`
	// StartSeconds pass between the last image and Ready.
	StartSeconds float64 `json:"start_seconds"`
	// JobSeconds pass between Ready and the end of a Job's pod.
	JobSeconds float64 `json:"job_seconds"`
}

// DefaultDelays are short: a rehearsal shows the order of things, not their length.
func DefaultDelays() Delays {
	return Delays{StartSeconds: 0.5, JobSeconds: 0.5}
}

// LoadDelays reads a delays file. Keys it leaves out keep their defaults.
func LoadDelays(path string) (Delays, error) {
	raw, err := os.ReadFile(path) // #nosec G304 -- the file the user named
	if err != nil {
		return Delays{}, fmt.Errorf("reading the delays: %w", err)
	}
	d := DefaultDelays()
	if err := yaml.UnmarshalStrict(raw, &d); err != nil {
		return Delays{}, fmt.Errorf("reading the delays in %s: %w", path, err)
	}
	if d.BandwidthBitsPerSecond < 0 || d.DefaultImageBytes < 0 || d.StartSeconds < 0 || d.JobSeconds < 0 {
		return Delays{}, fmt.Errorf("reading the delays in %s: a value is negative", path)
	}
	for prefix, size := range d.Images {
		if size < 0 {
			return Delays{}, fmt.Errorf("reading the delays in %s: the size of %s is negative", path, prefix)
		}
	}
	return d, nil
}

func (d Delays) size(reference string) int64 {
	size, longest := d.DefaultImageBytes, -1
	for prefix, s := range d.Images {
		if strings.HasPrefix(reference, prefix) && len(prefix) > longest {
			size, longest = s, len(prefix)
		}
	}
	return size
}

// puller models one node's link: images come one after the other at full
// bandwidth, and each only once.
type puller struct {
	delays Delays

	mu    sync.Mutex
	free  time.Time            // when the link has nothing left to pull
	there map[string]time.Time // when an image is complete
}

func newPuller(d Delays) *puller {
	return &puller{delays: d, there: map[string]time.Time{}}
}

// ready says when a pod that is bound now becomes ready.
func (p *puller) ready(spec *corev1.PodSpec, now time.Time) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	last := now
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			if t := p.pull(containers[i].Image, now); t.After(last) {
				last = t
			}
		}
	}
	return last.Add(seconds(p.delays.StartSeconds))
}

func (p *puller) pull(image string, now time.Time) time.Time {
	if t, ok := p.there[image]; ok {
		return t
	}
	if p.free.Before(now) {
		p.free = now
	}
	if p.delays.BandwidthBitsPerSecond > 0 {
		p.free = p.free.Add(seconds(float64(p.delays.size(image)) * 8 / p.delays.BandwidthBitsPerSecond))
	}
	p.there[image] = p.free
	return p.free
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
