package model

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
)

func config(t *testing.T, file string) Model {
	t.Helper()
	m, err := ReadFS(os.DirFS("testdata/configs"), file, strings.TrimSuffix(file, ".json"))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestReadConfig(t *testing.T) {
	tests := []struct {
		file      string
		precision string
		kv        string
		want      Architecture
	}{
		{"llama.json", "bf16", "", Architecture{Layers: 32, FullLayers: 32, KVHeads: 8, HeadDim: 128}},
		{"gpt-oss-20b.json", "mxfp4", "", Architecture{Layers: 4, FullLayers: 2, SlidingLayers: 2, Window: 128, KVHeads: 8, HeadDim: 64, Experts: 32, ExpertsPerToken: 4, ExpertIntermediate: 2880}},
		{"qwen3.6-27b-nvfp4.json", "nvfp4", "fp8", Architecture{Layers: 64, FullLayers: 16, StateLayers: 48, KVHeads: 4, HeadDim: 256, StateElements: 786432, ConvElements: 30720, StateBytes: 4, DraftLayers: 1, Multimodal: true}},
		{"glm-5.1-fp8.json", "fp8", "", Architecture{Layers: 78, FullLayers: 78, KVHeads: 64, HeadDim: 64, KVLoraRank: 512, RopeDim: 64, IndexHeadDim: 128, Experts: 256, ExpertsPerToken: 8, ExpertIntermediate: 2048, DraftLayers: 1}},
		{"nemotron-3-nano.json", "bf16", "", Architecture{Layers: 52, FullLayers: 6, StateLayers: 23, KVHeads: 2, HeadDim: 128, StateElements: 524288, ConvElements: 18432, StateBytes: 4, Experts: 128, ExpertsPerToken: 6, ExpertIntermediate: 1856}},
		{"gemma-4-e4b.json", "compressed-tensors", "", Architecture{Layers: 12, FullLayers: 1, SlidingLayers: 5, Window: 512, KVHeads: 2, HeadDim: 256, GlobalHeadDim: 512, Multimodal: true}},
		{"bge-m3.json", "bf16", "", Architecture{Layers: 24, KVHeads: 16, HeadDim: 64, Encoder: true, Pooling: true}},
	}
	for _, tt := range tests {
		t.Run(tt.file, func(t *testing.T) {
			m := config(t, tt.file)
			got := m.Architecture
			tt.want.Hidden, tt.want.Intermediate, tt.want.Vocab, tt.want.AttentionHeads = got.Hidden, got.Intermediate, got.Vocab, got.AttentionHeads
			if got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
			if m.Precision != tt.precision || m.KVCache != tt.kv || m.WeightsBytes <= 0 || m.WeightsFrom != FromParameters || m.Verified {
				t.Errorf("form: %+v", m)
			}
		})
	}
}

// The sum over the architecture is the catalogue's figure to within a hundredth.
func TestReadConfigAddsUpWeights(t *testing.T) {
	m := config(t, "llama.json")
	known, _ := catalogue(t).Find("meta-llama/Llama-3.1-8B-Instruct")
	if diff := float64(m.WeightsBytes)/float64(known.WeightsBytes) - 1; diff < -0.01 || diff > 0.01 {
		t.Errorf("%d bytes, the catalogue has %d", m.WeightsBytes, known.WeightsBytes)
	}
	if got, want := m.Architecture.KVBytesPerToken(2), int64(131072); got != want {
		t.Errorf("%d bytes a token, want %d", got, want)
	}
}

func TestReadConfigRefuses(t *testing.T) {
	good, err := os.ReadFile("testdata/configs/llama.json")
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct{ name, old, new, want string }{
		{"not JSON", "{", "[", "json"},
		{"two documents", `false}`, `false} {}`, "more than one document"},
		{"negative", `"num_hidden_layers": 32`, `"num_hidden_layers": -1`, "not within"},
		{"huge", `"vocab_size": 128256`, `"vocab_size": 9000000000000`, "not within"},
		{"a list", `"num_key_value_heads": 8`, `"num_key_value_heads": [8]`, "num_key_value_heads"},
		{"no layers", `"num_hidden_layers": 32`, `"depth": 32`, "lacks layers"},
		{"unknown layers", `"vocab_size"`, `"layer_types": ["warp"], "num_hidden_layers": 1, "vocab_size"`, "isn't known"},
		{"compressed attention", `"vocab_size"`, `"compress_ratios": [4], "vocab_size"`, "isn't known"},
		{"unknown quantisation", `"vocab_size"`, `"quantization_config": {"quant_method": "magic"}, "vocab_size"`, "isn't known"},
		{"zero window", `"vocab_size"`, `"layer_types": ["sliding_attention"], "num_hidden_layers": 1, "vocab_size"`, "without a window"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := ReadConfig(strings.NewReader(strings.Replace(string(good), tt.old, tt.new, 1)), "x")
			if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("err = %v, want %q", err, tt.want)
			}
		})
	}
	if _, err := ReadConfig(bytes.NewReader(bytes.Repeat([]byte(" "), maxConfigBytes+1)), "x"); !errors.Is(err, ErrConfig) {
		t.Errorf("too large: %v", err)
	}
}

func TestReadIndex(t *testing.T) {
	got, err := ReadIndex(strings.NewReader(`{"metadata":{"total_size":16060522496},"weight_map":{"a":"model-00002-of-00002.safetensors","b":"model-00001-of-00002.safetensors","c":"model-00001-of-00002.safetensors"}}`))
	if err != nil || got.TotalBytes != 16060522496 || len(got.Files) != 2 || got.Files[0] != "model-00001-of-00002.safetensors" {
		t.Errorf("%+v, %v", got, err)
	}
	for name, text := range map[string]string{
		"no size":      `{"metadata":{},"weight_map":{}}`,
		"below zero":   `{"metadata":{"total_size":-5},"weight_map":{}}`,
		"too large":    `{"metadata":{"total_size":1e300},"weight_map":{}}`,
		"path":         `{"metadata":{"total_size":5},"weight_map":{"a":"../x.safetensors"}}`,
		"other format": `{"metadata":{"total_size":5},"weight_map":{"a":"model.bin"}}`,
		"empty":        ``,
	} {
		if _, err := ReadIndex(strings.NewReader(text)); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestReadPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "my-model")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadPath(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("empty directory: %v", err)
	}
	good, err := os.ReadFile("testdata/configs/llama.json")
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{ConfigFile: good, IndexFile: []byte(`{"metadata":{"total_size":16060522496},"weight_map":{"a":"m.safetensors"}}`)} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{dir, filepath.Join(dir, ConfigFile)} {
		m, err := ReadPath(path)
		if err != nil || m.Name != "my-model" || m.WeightsBytes != 16060522496 || m.WeightsFrom != FromIndex || !m.Verified {
			t.Errorf("%s: %+v, %v", path, m, err)
		}
	}
	one := fstest.MapFS{ConfigFile: {Data: good}, "model.safetensors": {Data: make([]byte, 4096)}}
	if m, err := ReadFS(one, ConfigFile, "one"); err != nil || m.WeightsBytes != 4096 {
		t.Errorf("one file: %d, %v", m.WeightsBytes, err)
	}
}

// hubServer is a stand-in for the hub with one gated and one open model.
func hubServer(t *testing.T) (*httptest.Server, *[]http.Header) {
	t.Helper()
	good, err := os.ReadFile("testdata/configs/llama.json")
	if err != nil {
		t.Fatal(err)
	}
	var elsewhere []http.Header
	cdn := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		elsewhere = append(elsewhere, r.Header.Clone())
		_, _ = w.Write([]byte(`{"metadata":{"total_size":16060522496},"weight_map":{}}`))
	}))
	t.Cleanup(cdn.Close)
	mux := http.NewServeMux()
	mux.HandleFunc("/acme/open/resolve/main/config.json", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(good) })
	mux.HandleFunc("/acme/open/resolve/main/model.safetensors.index.json", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, cdn.URL+"/index", http.StatusFound)
	})
	mux.HandleFunc("/api/models/acme/open", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"gated":"auto","cardData":{"license":"mit"}}`))
	})
	mux.HandleFunc("/acme/gated/", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		w.WriteHeader(http.StatusForbidden)
	})
	mux.HandleFunc("/acme/busy/", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTooManyRequests) })
	mux.HandleFunc("/acme/loop/", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.Path, http.StatusFound) })
	mux.HandleFunc("/acme/hangs/", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server, &elsewhere
}

func TestHub(t *testing.T) {
	server, elsewhere := hubServer(t)
	hub := Hub{Base: server.URL, Token: "secret-token"}
	m, err := hub.Read(t.Context(), "acme/open", "")
	if err != nil || m.WeightsBytes != 16060522496 || !m.Gated || m.Licence != "mit" || m.Architecture.Layers != 32 {
		t.Errorf("%+v, %v", m, err)
	}
	if len(*elsewhere) != 1 || (*elsewhere)[0].Get("Authorization") != "" {
		t.Errorf("the token went along with a redirect: %v", *elsewhere)
	}
	tests := []struct {
		name, model string
		hub         Hub
		want        error
	}{
		{"no token", "acme/gated", Hub{Base: server.URL}, ErrHubToken},
		{"not let in", "acme/gated", hub, ErrHubGate},
		{"absent", "acme/nothing", hub, ErrHubAbsent},
		{"busy", "acme/busy", hub, ErrHubBusy},
		{"loop", "acme/loop", hub, ErrHub},
		{"a path", "../etc/passwd", hub, ErrHubAbsent},
		{"no owner", "open", hub, ErrHubAbsent},
	}
	for _, tt := range tests {
		_, err := tt.hub.Read(t.Context(), tt.model, "")
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
		if err != nil && strings.Contains(err.Error(), "secret-token") {
			t.Errorf("%s: the error shows the token", tt.name)
		}
	}
	if _, err := hub.Read(t.Context(), "acme/open", "../../x"); !errors.Is(err, ErrHubAbsent) {
		t.Errorf("revision: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var failed *url.Error
	if _, err := hub.Read(ctx, "acme/hangs", ""); !errors.Is(err, context.Canceled) || !errors.As(err, &failed) {
		t.Errorf("cancelled: %v", err)
	}
}

func FuzzConfigJSON(f *testing.F) {
	files, err := filepath.Glob("testdata/configs/*.json")
	if err != nil || len(files) == 0 {
		f.Fatal("no seeds", err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	card := GPUFact{Name: "card", MemoryTotalMiB: 81920, ComputeMajor: 9}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := ReadConfig(bytes.NewReader(data), "fuzzed")
		if err != nil {
			return
		}
		if m.WeightsBytes <= 0 || m.ContextTokens <= 0 || m.Architecture.check() != nil {
			t.Fatalf("taken, and not whole: %+v", m)
		}
		// What was taken can be judged.
		got := m.Assess([]GPUFact{card}, Ask{})
		if got.Verdict == "" || got.ContextTokens < 0 || got.KVTokens < 0 || got.Verdict == Fits && !m.Architecture.Encoder && got.ContextTokens == 0 {
			t.Fatalf("%+v", got)
		}
	})
}

func FuzzSafetensorsIndex(f *testing.F) {
	f.Add([]byte(`{"metadata":{"total_size":16060522496},"weight_map":{"a":"model-00001-of-00002.safetensors"}}`))
	f.Add([]byte(`{"metadata":{"total_size":1.5e10},"weight_map":{}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		index, err := ReadIndex(bytes.NewReader(data))
		if err != nil {
			return
		}
		if index.TotalBytes < 1 || index.TotalBytes > maxWeights {
			t.Fatalf("size %d", index.TotalBytes)
		}
		for _, file := range index.Files {
			if strings.ContainsAny(file, `/\`) || !strings.HasSuffix(file, ".safetensors") {
				t.Fatalf("file %q", file)
			}
		}
	})
}
