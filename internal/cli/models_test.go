package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/llmbox-dev/llmbox/internal/model"
)

var updateModels = flag.Bool("update-models", false, "write the golden files of the models command")

func TestModelsGolden(t *testing.T) {
	for _, tc := range []struct {
		file string
		args []string
	}{
		{"models-l4.txt", []string{"models", "--gpu", "l4"}},
		{"models-a10x4-all.txt", []string{"models", "list", "--gpu", "a10x4", "--all"}},
		{"models-show-no.txt", []string{"models", "show", "Qwen/Qwen3-32B", "--gpu", "rtx-5090"}},
		{"models-show-old-driver.txt", []string{"models", "show", "Qwen/Qwen3-8B", "--gpu", "a10", "--driver", "550.90.07"}},
	} {
		t.Run(tc.file, func(t *testing.T) {
			got := run(t, nil, "", tc.args...)
			if got.code != 0 || got.stderr != "" {
				t.Fatalf("exit %d, stderr %q", got.code, got.stderr)
			}
			for i, line := range strings.Split(got.stdout, "\n") {
				if n := utf8.RuneCountInString(line); n > 100 {
					t.Errorf("line %d has %d columns: %q", i+1, n, line)
				}
			}
			path := filepath.Join("testdata", tc.file)
			if *updateModels {
				if err := os.WriteFile(path, []byte(got.stdout), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if got.stdout != string(want) {
				t.Errorf("differs from %s (go test ./internal/cli -run TestModelsGolden -update-models writes it):\n%s", path, got.stdout)
			}
		})
	}
}

func TestModelsJSON(t *testing.T) {
	got := run(t, nil, "", "models", "--gpu", "h100x2", "--all", "--output", "json")
	var doc struct {
		Models []struct {
			Name           string  `json:"name"`
			Fit            string  `json:"fit"`
			Context        int     `json:"context"`
			KVTokens       int64   `json:"kv_tokens"`
			Sequences      float64 `json:"sequences"`
			TensorParallel int     `json:"tensor_parallel"`
			Disk           int64   `json:"disk_bytes"`
			Licence        string  `json:"licence"`
			Gated          bool    `json:"gated"`
			Reason         string  `json:"reason"`
			Args           []string
		} `json:"models"`
	}
	if err := json.Unmarshal([]byte(got.stdout), &doc); err != nil || got.code != 0 {
		t.Fatalf("exit %d, %v: %s", got.code, err, got.stderr)
	}
	if len(doc.Models) < 35 {
		t.Errorf("%d models, want 35 or more", len(doc.Models))
	}
	for _, m := range doc.Models {
		if m.Name == "" || m.Disk == 0 || m.Licence == "" {
			t.Errorf("not whole: %+v", m)
		}
		switch m.Fit {
		case "fits":
			if m.Context == 0 || m.TensorParallel == 0 || len(m.Args) == 0 {
				t.Errorf("fits, and not whole: %+v", m)
			}
		case "tight", "no":
			if m.Reason == "" {
				t.Errorf("no reason: %+v", m)
			}
		default:
			t.Errorf("fit %q", m.Fit)
		}
	}
}

func TestModelsRefused(t *testing.T) {
	dir := t.TempDir()
	for _, tc := range []struct {
		name string
		args []string
		want string
	}{
		{"no GPU to read", []string{"models"}, "--gpu l4"},
		{"unknown product", []string{"models", "--gpu", "l5"}, "no such product"},
		{"none of them", []string{"models", "--gpu", "l4x0"}, "no such product"},
		{"too many", []string{"models", "--gpu", "l4x16,l4"}, "at most 16"},
		{"a model too many", []string{"models", "show", "a", "b", "--gpu", "l4"}, "one model must be named"},
		{"a list with arguments", []string{"models", "list", "x", "--gpu", "l4"}, "--help"},
		{"an empty directory", []string{"models", "show", dir, "--gpu", "l4"}, "neither in the list"},
	} {
		got := run(t, nil, "", tc.args...)
		if got.code != exitUsage || !strings.Contains(got.stderr, tc.want) {
			t.Errorf("%s: exit %d, stderr %q, want %q", tc.name, got.code, got.stderr, tc.want)
		}
	}
}

func TestModelsShowDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "mine")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	config := `{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}`
	for name, text := range map[string]string{"config.json": config, "model.safetensors.index.json": `{"metadata": {"total_size": 16060522496}, "weight_map": {}}`} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got := run(t, nil, "", "models", "show", dir, "--gpu", "l4")
	for _, want := range []string{"Model    mine", "15.0 GiB (index)", "Fit      fits", "Context  8192 tokens"} {
		if got.code != 0 || !strings.Contains(got.stdout, want) {
			t.Errorf("exit %d, want %q in\n%s%s", got.code, want, got.stdout, got.stderr)
		}
	}
}

// What reads this machine's GPUs is the caller's; its answer is judged like a named one.
func TestModelsReadsGPUs(t *testing.T) {
	var stdout, stderr bytes.Buffer
	a := &app{output: "text", env: Env{Stdout: &stdout, Stderr: &stderr, Getenv: func(string) string { return "" }}}
	cmd := a.modelsCommand(func(context.Context) ([]model.GPUFact, error) {
		return []model.GPUFact{{Name: "NVIDIA Test", MemoryTotalMiB: 23034, MemoryUsedMiB: 9000, ComputeMajor: 8, ComputeMinor: 9}}, nil
	})
	cmd.SetArgs([]string{})
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(stdout.String(), "1 × NVIDIA Test, 23034 MiB (9000 in use)") || strings.Contains(stdout.String(), "Qwen/Qwen3-8B  ") {
		t.Errorf("%s", stdout.String())
	}
	failing := a.modelsCommand(func(context.Context) ([]model.GPUFact, error) { return nil, nil })
	failing.SetArgs([]string{})
	failing.SilenceErrors, failing.SilenceUsage = true, true
	if err := failing.ExecuteContext(t.Context()); !errors.Is(err, model.ErrNoGPU) {
		t.Errorf("no GPU: %v", err)
	}
}
