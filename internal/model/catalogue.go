// Package model knows models: which there are, how much memory they take on given
// GPUs, which one a box gets when none is named, and how vLLM is told.
//
// It works on figures alone. It must not read a machine, a cluster or the hub, and
// must not know how weights are fetched or how the server is deployed.
package model

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
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
	// LoadFactor is how much more than WeightsBytes loading takes on the GPUs.
	LoadFactor float64 `yaml:"load_factor"`
	// KVBytesPerToken is what one token of context takes, over all GPUs.
	KVBytesPerToken int64 `yaml:"kv_bytes_per_token"`
	KVHeads         int   `yaml:"kv_heads"`
	AttentionHeads  int   `yaml:"attention_heads"`
	// ContextTokens is the longest context the model was made for.
	ContextTokens int    `yaml:"context_tokens"`
	MinVLLM       string `yaml:"min_vllm"`
	// MinCompute and MaxCompute bound the compute capability, such as "8.0"; an
	// empty MaxCompute sets no bound.
	MinCompute string `yaml:"min_compute"`
	MaxCompute string `yaml:"max_compute"`
	Licence    string `yaml:"licence"`
	// Gated models need an account that accepted terms.
	Gated bool `yaml:"gated"`
	// Verified says that the figures were read from the model's own files.
	Verified bool   `yaml:"verified"`
	Source   string `yaml:"source"`
}

// Default is one row of the list a box without a named model is matched against.
type Default struct {
	Name string `yaml:"name"`
	// GPUs work on the model together.
	GPUs int `yaml:"gpus"`
	// MinTotalMiB is the memory each of them has in all, as nvidia-smi prints it.
	MinTotalMiB int64  `yaml:"min_total_mib"`
	Reason      string `yaml:"reason"`
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
		if m.ParametersBillion <= 0 || m.WeightsBytes <= 0 || m.KVBytesPerToken <= 0 || m.ContextTokens <= 0 || m.KVHeads <= 0 || m.AttentionHeads <= 0 || m.LoadFactor < 1 {
			fail("lacks a figure")
		}
		if _, err := parseCompute(m.MinCompute); err != nil {
			fail("min_compute: " + err.Error())
		}
		if m.MaxCompute != "" {
			if _, err := parseCompute(m.MaxCompute); err != nil {
				fail("max_compute: " + err.Error())
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
		case d.GPUs < 1 || m.AttentionHeads%d.GPUs != 0:
			found = append(found, fmt.Errorf("default %d: %d GPUs can't share %q", i+1, d.GPUs, d.Name))
		case d.MinTotalMiB <= 0 || d.Reason == "":
			found = append(found, fmt.Errorf("default %d: lacks its memory or its reason", i+1))
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
