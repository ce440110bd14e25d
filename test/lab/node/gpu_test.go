package node

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

func TestScriptNamesEachGPU(t *testing.T) {
	product, ok := gpu.ProductByKey("a100-80")
	if !ok {
		t.Fatal("there is no product a100-80")
	}
	lines := strings.Split(script(product, devices(2)), "\n")
	for _, want := range []string{"sys gpus 2", "all name NVIDIA A100-SXM4-80GB", "all cc 8 0", "all mig 0 0",
		"0 bus 0000:81:00.0", "1 bus 0000:82:00.0", "1 uuid GPU-5eed0001-0000-4000-8000-000000000001"} {
		if !slices.Contains(lines, want) {
			t.Errorf("there is no line %q in %q", want, lines)
		}
	}
	if product, ok = gpu.ProductByKey("l4"); !ok || strings.Contains(script(product, devices(1)), " mig ") {
		t.Error("an L4 has partitions")
	}
}

// The runtime finds a GPU by its number, by its UUID, and all of them.
func TestSpecificationOfTheGPUs(t *testing.T) {
	c := config{Options: Options{GPUBy: ByOperator, GPUs: 2}}
	files, err := c.gpuConfigs()
	if err != nil {
		t.Fatal(err)
	}
	var spec struct {
		Kind    string
		Devices []struct {
			Name           string
			ContainerEdits struct{ DeviceNodes []struct{ Path string } }
		}
		ContainerEdits struct {
			Mounts []struct{ HostPath, ContainerPath string }
		}
	}
	if err := json.Unmarshal([]byte(files["/etc/cdi/nvidia.json"]), &spec); err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for _, d := range spec.Devices {
		got[d.Name] = len(d.ContainerEdits.DeviceNodes)
	}
	if spec.Kind != "nvidia.com/gpu" || len(got) != 5 || got["all"] != 2 || got["1"] != 1 || got["GPU-5eed0000-0000-4000-8000-000000000000"] != 1 {
		t.Errorf("kind %q, devices %v", spec.Kind, got)
	}
	for _, m := range spec.ContainerEdits.Mounts {
		if m.HostPath != m.ContainerPath {
			t.Errorf("%s is handed in as %s", m.HostPath, m.ContainerPath)
		}
	}
	if len(spec.ContainerEdits.Mounts) != 3 {
		t.Errorf("mounts: %+v", spec.ContainerEdits.Mounts)
	}
	for _, o := range []Options{{GPUBy: ByLab, GPUs: 2}, {GPUBy: ByOperator}} {
		if files, err := (config{Options: o}).gpuConfigs(); err != nil || len(files) > 0 || o.nvidiaHandler() != "" {
			t.Errorf("%+v: %v, %v, handler %q", o, files, err, o.nvidiaHandler())
		}
	}
}

func TestLayOverRefusesPathsThatMountTakesApart(t *testing.T) {
	for _, path := range []string{"/tmp/a:b", "/tmp/a,b", `/tmp/a\b`} {
		if err := layOver(path, filepath.Join(t.TempDir(), "x")); err == nil {
			t.Errorf("%s was taken", path)
		}
	}
}
