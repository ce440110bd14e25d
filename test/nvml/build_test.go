// Package nvml runs the real NVML child with the real dynamic loader against a
// stand-in for the driver's library, one scenario after another.
package nvml

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// built is what the tests need compiled, made once.
type built struct {
	child []byte
	// childPath is the same as a file.
	childPath string
	// libraries maps a variant of the stand-in ("", "OLD_LIBRARY", "NO_INIT") to its path.
	libraries map[string]string
}

var (
	made  *built
	skip  string
	never error
)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "llmbox-nvml-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		skip = "there is no gcc here: neither the child nor the stand-in library can be built"
	} else {
		made, never = build(dir)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

func build(dir string) (*built, error) {
	b := &built{childPath: filepath.Join(dir, "llmbox-nvml"), libraries: map[string]string{}}
	// The flags are those of the product's build, so that both share a build cache.
	if _, err := command([]string{"CGO_ENABLED=1", "CGO_CFLAGS=-O2 -g -Wno-deprecated-declarations"},
		"go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", b.childPath,
		"github.com/llmbox-dev/llmbox/cmd/llmbox-nvml"); err != nil {
		return nil, err
	}
	var err error
	if b.child, err = os.ReadFile(b.childPath); err != nil {
		return nil, err
	}
	module, err := command(nil, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml")
	if err != nil {
		return nil, err
	}
	for _, variant := range []string{"", "OLD_LIBRARY", "NO_INIT"} {
		path := filepath.Join(dir, variant+"fake", "libnvidia-ml.so.1")
		if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		arguments := []string{
			"-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations",
			"-DNVML_NO_UNVERSIONED_FUNC_DEFS=1", "-I", filepath.Join(module, "gen", "nvml"), "-o", path,
		}
		if variant != "" {
			arguments = append(arguments, "-D"+variant)
		}
		if _, err := command(nil, "gcc", append(arguments, "fake/fake_nvml.c")...); err != nil {
			return nil, err
		}
		b.libraries[variant] = path
	}
	return b, nil
}

func command(environment []string, name string, arguments ...string) (string, error) {
	c := exec.Command(name, arguments...)
	c.Env = append(os.Environ(), environment...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("running %s: %w\n%s", name, err, stderr.String())
	}
	return string(bytes.TrimSpace(out)), nil
}

// need returns what was built, or ends the test.
func need(t *testing.T) *built {
	t.Helper()
	if skip != "" {
		t.Skip(skip)
	}
	if never != nil {
		t.Fatal(never)
	}
	return made
}
