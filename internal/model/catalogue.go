// Package model knows models: which there are, how much memory they take on given
// GPUs, which one a box gets when none is named, and how vLLM is told.
//
// The arithmetic works on figures alone, from the catalogue or from a model's own
// config.json and safetensors index; of the hub only these two small files are read.
// The package must not read a machine or a cluster, and must not know how weights
// are fetched or how the server is deployed.
package model

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// CatalogueFile is the catalogue's name in the embedded files.
const CatalogueFile = "models.yaml"

// Model is one entry of the catalogue.
type Model struct {
	// Name is the model's name on the Hugging Face hub.
	Name              string  `yaml:"name"`
	ParametersBillion float64 `yaml:"parameters_billion"`
	// Precision of the weights as they are stored, such as "bf16".
	Precision    string `yaml:"precision"`
	WeightsBytes int64  `yaml:"weights_bytes"`
	// WeightsFrom says how WeightsBytes is known: one of the From constants.
	WeightsFrom string `yaml:"weights_from"`
	// KVCache is "fp8" where the checkpoint asks for such a cache.
	KVCache      string       `yaml:"kv_cache,omitempty"`
	Architecture Architecture `yaml:"architecture"`
	// Variants are other stored forms, the best first.
	Variants []Form `yaml:"variants,omitempty"`
	// ContextTokens is the longest context the model was made for.
	ContextTokens int    `yaml:"context_tokens"`
	MinVLLM       string `yaml:"min_vllm"`
	// MinCompute is the least compute capability, such as "8.0".
	MinCompute string `yaml:"min_compute"`
	Licence    string `yaml:"licence"`
	// Gated models need an account that accepted terms.
	Gated           bool   `yaml:"gated"`
	ToolParser      string `yaml:"tool_parser,omitempty"`
	ReasoningParser string `yaml:"reasoning_parser,omitempty"`
	// Verified says that the figures were read from the model's own files.
	Verified bool   `yaml:"verified"`
	Source   string `yaml:"source"`
}

// How the size of weights is known, best first.
const (
	// FromIndex: total_size of the safetensors index.
	FromIndex = "index"
	// FromArchitecture: summed over all tensors that the architecture has.
	FromArchitecture = "architecture"
	// FromPublished: a size that the source states, rounded as it is there.
	FromPublished = "published"
	// FromParameters: parameters times bytes; scales and unquantised layers estimated.
	FromParameters = "parameters"
)

// Form is one stored form of a model's weights.
type Form struct {
	// Name is what a person asks for, such as "fp8".
	Name       string `yaml:"name"`
	Repository string `yaml:"repository"`
	// Precision is the method, such as "fp8", "awq", "mxfp4" or "nvfp4".
	Precision  string `yaml:"precision"`
	Bytes      int64  `yaml:"bytes"`
	From       string `yaml:"from"`
	KVCache    string `yaml:"kv_cache,omitempty"`
	MinCompute string `yaml:"min_compute"`
}

// loadFactor is how much more than in the file the weights take on the GPUs.
func (f Form) loadFactor() float64 {
	if f.Precision == "mxfp4" {
		return mxfp4Factor
	}
	return 1
}

// form finds a stored form by its name; the empty name is the model's own.
func (m Model) form(name string) (Form, bool) {
	if name == "" {
		return Form{Repository: m.Name, Precision: m.Precision, Bytes: m.WeightsBytes, From: m.WeightsFrom, KVCache: m.KVCache, MinCompute: m.MinCompute}, true
	}
	for _, f := range m.Variants {
		if f.Name == name {
			return f, true
		}
	}
	return Form{}, false
}

// precisions are the words that name a stored form, and the methods that store alike.
func precisions(word string) string {
	switch strings.ToLower(strings.TrimPrefix(word, "compressed-tensors-")) {
	case "awq", "awq_marlin", "gptq", "gptq_marlin", "gptq-int4", "int4", "w4a16", "auto-round", "autoround":
		return "awq"
	case "fp8", "w8a8", "int8", "fp8-dynamic", "w8a16", "fbgemm_fp8":
		return "fp8"
	case "nvfp4", "modelopt_fp4":
		return "nvfp4"
	case "mxfp4":
		return "mxfp4"
	case "bnb", "bitsandbytes":
		return "bitsandbytes"
	case "bf16", "fp16", "bfloat16", "float16", "half":
		return "bf16"
	}
	return ""
}

// estimated is a form that somebody has made of the model and the catalogue doesn't
// list: another's of the same bits, or its size from the parameters. What has no known
// bits is not estimated.
func (m Model) estimated(name string) (Form, bool) {
	want := precisions(name)
	if want == "" {
		return Form{}, false
	}
	own, _ := m.form("")
	for _, f := range append([]Form{own}, m.Variants...) {
		if precisions(f.Precision) == want {
			return f, true
		}
	}
	a := m.Architecture
	return Form{Name: name, Repository: m.Name, Precision: want, Bytes: int64(a.storedBytes(m.ParametersBillion*1e9, false, want)), From: FromParameters, MinCompute: m.MinCompute}, true
}

// Default is one row of the list a box without a named model is matched against.
type Default struct {
	Name    string `yaml:"name"`
	Variant string `yaml:"variant,omitempty"`
	// GPUs work on the model together.
	GPUs int `yaml:"gpus"`
	// MinContextTokens is the context without which a smaller model serves better.
	MinContextTokens int `yaml:"min_context_tokens"`
	// MinCompute and MaxCompute bound the GPUs that the model has been run on.
	MinCompute string `yaml:"min_compute,omitempty"`
	MaxCompute string `yaml:"max_compute,omitempty"`
	Reason     string `yaml:"reason"`
}

// covers says whether a GPU lies within the row's bounds.
func (d Default) covers(have compute) bool {
	if least, err := parseCompute(d.MinCompute); err == nil && have.less(least) {
		return false
	}
	most, err := parseCompute(d.MaxCompute)
	return err != nil || !most.less(have)
}

// Catalogue is everything known about models, best default first.
type Catalogue struct {
	Models   []Model   `yaml:"models"`
	Defaults []Default `yaml:"defaults"`
}

// Load reads the catalogue at the root of fsys and refuses one that is not whole.
func Load(fsys fs.FS) (Catalogue, error) {
	data, err := fs.ReadFile(fsys, CatalogueFile)
	if err != nil {
		return Catalogue{}, fmt.Errorf("reading the model catalogue: %w", err)
	}
	var c Catalogue
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	decoder.KnownFields(true)
	if err := decoder.Decode(&c); err != nil {
		return Catalogue{}, fmt.Errorf("reading %s: %w", CatalogueFile, err)
	}
	if err := c.check(); err != nil {
		return Catalogue{}, fmt.Errorf("reading %s: %w", CatalogueFile, err)
	}
	return c, nil
}

func (c Catalogue) check() error {
	var found []error
	seen := map[string]bool{}
	for _, m := range c.Models {
		fail := func(problem string) { found = append(found, fmt.Errorf("model %q: %s", m.Name, problem)) }
		if m.Name == "" || seen[m.Name] {
			fail("has no name or stands there twice")
		}
		seen[m.Name] = true
		if m.Source == "" || m.Licence == "" {
			fail("has no source or no licence")
		}
		if m.ParametersBillion <= 0 || m.WeightsBytes <= 0 || m.ContextTokens <= 0 || m.Precision == "" {
			fail("lacks a figure")
		}
		if err := m.Architecture.check(); err != nil {
			fail("architecture: " + err.Error())
		}
		own, _ := m.form("")
		for _, f := range append([]Form{own}, m.Variants...) {
			if f.Bytes <= 0 || f.Precision == "" || f.Repository == "" || !slices.Contains([]string{FromIndex, FromArchitecture, FromPublished, FromParameters}, f.From) {
				fail(fmt.Sprintf("form %q lacks its size, method, repository or how the size is known", f.Name))
			}
			if f.KVCache != "" && f.KVCache != "fp8" {
				fail(fmt.Sprintf("form %q: kv_cache %q is unknown", f.Name, f.KVCache))
			}
			if _, err := parseCompute(f.MinCompute); err != nil {
				fail("min_compute: " + err.Error())
			}
		}
		if m.MinVLLM != "" {
			if _, err := releaseOf(m.MinVLLM); err != nil {
				fail("min_vllm: " + err.Error())
			}
		}
	}
	for i, d := range c.Defaults {
		m, ok := c.Find(d.Name)
		switch {
		case !ok:
			found = append(found, fmt.Errorf("default %d: %q is not in the list of models", i+1, d.Name))
		case m.Gated:
			found = append(found, fmt.Errorf("default %d: %q is gated", i+1, d.Name))
		case d.GPUs < 1 || m.Architecture.AttentionHeads%d.GPUs != 0:
			found = append(found, fmt.Errorf("default %d: %d GPUs can't share %q", i+1, d.GPUs, d.Name))
		case d.MinContextTokens <= 0 || d.Reason == "":
			found = append(found, fmt.Errorf("default %d: lacks its context or its reason", i+1))
		}
	}
	return errors.Join(found...)
}

// Find gives a model by its name on the hub.
func (c Catalogue) Find(name string) (Model, bool) {
	for _, m := range c.Models {
		if m.Name == name {
			return m, true
		}
	}
	return Model{}, false
}

// compute is a compute capability that compares: 8.6 is {8, 6}.
type compute struct{ major, minor int }

func parseCompute(text string) (compute, error) {
	major, minor, ok := strings.Cut(text, ".")
	a, errA := strconv.Atoi(major)
	b, errB := strconv.Atoi(minor)
	if !ok || errA != nil || errB != nil {
		return compute{}, fmt.Errorf("%q is not a compute capability such as 8.0", text)
	}
	return compute{a, b}, nil
}

func (c compute) less(than compute) bool {
	return c.major < than.major || c.major == than.major && c.minor < than.minor
}

func (c compute) String() string { return fmt.Sprintf("%d.%d", c.major, c.minor) }
