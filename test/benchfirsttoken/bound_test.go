package main

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func committed(t *testing.T) parameters {
	t.Helper()
	p, err := loadParameters("parameters.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestCommittedParameters(t *testing.T) {
	p := committed(t)
	if len(p.Caps) != 3 {
		t.Errorf("caps are %v", p.Caps)
	}
	here := float64(sum(p.ImageLayerBytes)) / float64(sum(p.WeightsFileBytes))
	real := float64(p.RealImageBytes) / float64(p.RealWeightsBytes)
	if math.Abs(here/real-1) > 0.02 {
		t.Errorf("image to weights is %.3f here and %.3f in truth", here, real)
	}
	// Downloads take as long as the real ones at the cap that is named.
	for _, c := range p.Caps {
		want := float64(p.RealImageBytes+p.RealWeightsBytes) * 8 / (c * 1e9)
		got := float64(sum(p.ImageLayerBytes)+sum(p.WeightsFileBytes)) * 8 / p.bitsPerSecond(c)
		if math.Abs(got/want-1) > 1e-9 {
			t.Errorf("at %v Gb/s it takes %.1f s, in truth %.1f s", c, got, want)
		}
	}
}

func TestBound(t *testing.T) {
	p := parameters{RealImageBytes: 500, RealWeightsBytes: 500, ImageLayerBytes: []int64{50}, WeightsFileBytes: []int64{50}, LoadSeconds: 4, WarmUpSeconds: 1}
	for _, tt := range []struct {
		name          string
		gbits         float64
		payload       int64
		path          float64
		link, seconds float64
	}{
		// A tenth of the real payload: 1e-6 Gb/s are 100 bit/s here.
		{"the link is longest", 1e-6, 100, 3, 8, 13},
		{"the path is longest", 1e-6, 100, 30, 8, 35},
		{"other bytes count too", 1e-6, 200, 3, 16, 21},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := p.bound(tt.gbits, tt.payload, tt.path)
			if math.Abs(b.LinkSeconds-tt.link) > 1e-9 || math.Abs(b.Seconds-tt.seconds) > 1e-9 {
				t.Errorf("got %+v, want link %v and %v", b, tt.link, tt.seconds)
			}
		})
	}
}

func TestRatios(t *testing.T) {
	for _, tt := range []struct {
		name                      string
		bound, llmbox, sequential float64
		off                       float64
		met                       bool
	}{
		{"on the bound", 100, 100, 200, 0, true},
		{"just within", 100, 115, 200, 0.15, true},
		{"above", 100, 116, 200, 0.16, false},
		{"below the bound by more than a bound can be wrong", 100, 80, 200, -0.2, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := ratiosOf(tt.bound, tt.llmbox, tt.sequential)
			if math.Abs(r.Off-tt.off) > 1e-9 || r.Met != tt.met {
				t.Errorf("got %+v, want off by %v, met %v", r, tt.off, tt.met)
			}
			if math.Abs(r.LlmboxToSequential-tt.llmbox/tt.sequential) > 1e-9 || math.Abs(r.BoundToSequential-tt.bound/tt.sequential) > 1e-9 {
				t.Errorf("got %+v", r)
			}
		})
	}
}

func TestParametersAreRefused(t *testing.T) {
	raw, err := os.ReadFile("parameters.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string][2]string{
		"a small image":    {"image_layer_bytes: [402653184, 402653184, 402653184]", "image_layer_bytes: [1024]"},
		"small weights":    {"weights_file_bytes: [536936448, 536936448, 536936448, 536936448]", "weights_file_bytes: [1024]"},
		"no cap":           {"caps_gbits_per_second: [0.2, 1, 10]", "caps_gbits_per_second: []"},
		"a cap of nothing": {"caps_gbits_per_second: [0.2, 1, 10]", "caps_gbits_per_second: [0]"},
		"an unknown key":   {"load_seconds: 45", "load_secs: 45"},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(string(raw), change[0], change[1], 1)
			if text == string(raw) {
				t.Fatalf("%q is not in the file", change[0])
			}
			path := filepath.Join(t.TempDir(), "p.yaml")
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := loadParameters(path); err == nil {
				t.Error("it was taken")
			}
		})
	}
}
