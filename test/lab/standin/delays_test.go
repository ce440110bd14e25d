package standin

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

func TestPullerDelays(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	type pod struct {
		bound  time.Duration
		init   []string
		images []string
		want   time.Duration
	}
	for _, tt := range []struct {
		name, file string
		pods       []pod
	}{
		{"one image of the default size", "slow.yaml", []pod{
			{images: []string{"example.invalid/other:1"}, want: 3 * time.Second},
		}},
		{"longest beginning wins", "slow.yaml", []pod{
			{images: []string{"example.invalid/big/but-small:1"}, want: 4 * time.Second},
		}},
		{"init containers pull too", "slow.yaml", []pod{
			{init: []string{"example.invalid/other:1"}, images: []string{"example.invalid/big:1"}, want: 13 * time.Second},
		}},
		{"an image is pulled once", "slow.yaml", []pod{
			{images: []string{"example.invalid/big:1"}, want: 12 * time.Second},
			{bound: time.Minute, images: []string{"example.invalid/big:1"}, want: time.Minute + 2*time.Second},
		}},
		{"pods share the link", "slow.yaml", []pod{
			{images: []string{"example.invalid/big:1"}, want: 12 * time.Second},
			{bound: time.Second, images: []string{"example.invalid/other:1"}, want: 13 * time.Second},
			{bound: 2 * time.Second, images: []string{"example.invalid/big:1"}, want: 12 * time.Second},
		}},
		{"an idle link starts afresh", "slow.yaml", []pod{
			{images: []string{"example.invalid/other:1"}, want: 3 * time.Second},
			{bound: time.Minute, images: []string{"example.invalid/other:2"}, want: time.Minute + 3*time.Second},
		}},
		{"no bandwidth given pulls at once", "partial.yaml", []pod{
			{images: []string{"example.invalid/big:1"}, want: 0},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d, err := LoadDelays(filepath.Join("testdata", tt.file))
			if err != nil {
				t.Fatal(err)
			}
			p := newPuller(d)
			for i, pod := range tt.pods {
				spec := &corev1.PodSpec{}
				for _, image := range pod.init {
					spec.InitContainers = append(spec.InitContainers, corev1.Container{Image: image})
				}
				for _, image := range pod.images {
					spec.Containers = append(spec.Containers, corev1.Container{Image: image})
				}
				if got := p.ready(spec, now.Add(pod.bound)).Sub(now); got != pod.want {
					t.Errorf("pod %d: ready after %s, want %s", i, got, pod.want)
				}
			}
		})
	}
}

func TestLoadDelays(t *testing.T) {
	d, err := LoadDelays(filepath.Join("testdata", "partial.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if d.StartSeconds != 0 || d.JobSeconds != DefaultDelays().JobSeconds {
		t.Errorf("got %+v: what a file leaves out must keep its default", d)
	}
	for file, want := range map[string]string{
		"unknown-key.yaml": "bandwidth",
		"negative.yaml":    "negative",
		"absent.yaml":      "no such file",
	} {
		if _, err := LoadDelays(filepath.Join("testdata", file)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want an error naming %q", file, err, want)
		}
	}
}
