package nvml

import (
	"debug/elf"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// number makes "GLIBC_2.17" or "2.2.5" comparable.
func number(t *testing.T, version string) int {
	t.Helper()
	n := 0
	parts := append(strings.Split(strings.TrimPrefix(version, "GLIBC_"), "."), "0", "0")
	for _, part := range parts[:3] {
		p, err := strconv.Atoi(part)
		if err != nil {
			t.Fatalf("version %q: %v", version, err)
		}
		n = n*1000 + p
	}
	return n
}

// The child starts on every glibc from the floor on, whatever it was built on.
func TestChildGlibcFloor(t *testing.T) {
	b := need(t)
	file, err := elf.Open(b.childPath)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	symbols, err := file.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	floor := number(t, gpu.GlibcFloor)
	versions, nvml := 0, 0
	for _, s := range symbols {
		if strings.HasPrefix(s.Name, "nvml") {
			nvml++
		}
		if !strings.HasPrefix(s.Version, "GLIBC_") {
			continue
		}
		versions++
		if number(t, s.Version) > floor {
			t.Errorf("%s@%s is newer than %s", s.Name, s.Version, gpu.GlibcFloor)
		}
	}
	if versions < 20 || nvml < 100 {
		t.Errorf("%d symbols of glibc, %d of NVML: not the child?", versions, nvml)
	}
	// On a glibc before 2.34 two further libraries hold some of them.
	libraries, err := file.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(libraries, " ")
	for _, library := range []string{"libc.so.6", "libpthread.so.0", "libdl.so.2"} {
		if !strings.Contains(all, library) {
			t.Errorf("%s is not named among %s", library, all)
		}
	}
	if len(libraries) != 3 {
		t.Errorf("it needs more than the C library: %s", all)
	}
}

// Functions of NVML are looked up when they are called. With all of them looked up at
// the start the child would run on no driver but the newest.
func TestChildBindsLate(t *testing.T) {
	b := need(t)
	file, err := elf.Open(b.childPath)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	for _, tag := range []elf.DynTag{elf.DT_FLAGS, elf.DT_FLAGS_1, elf.DT_BIND_NOW} {
		values, err := file.DynValue(tag)
		if err != nil {
			t.Fatal(err)
		}
		for _, value := range values {
			if tag == elf.DT_BIND_NOW || tag == elf.DT_FLAGS && value&uint64(elf.DF_BIND_NOW) != 0 ||
				tag == elf.DT_FLAGS_1 && value&uint64(elf.DF_1_NOW) != 0 {
				t.Errorf("%s %#x: everything is bound at the start", tag, value)
			}
		}
	}
}

// The main binary stays static: neither go-nvml nor cgo is in it, however it is built.
func TestMainBinaryWithoutNVML(t *testing.T) {
	for _, cgo := range []string{"0", "1"} {
		deps, err := command([]string{"CGO_ENABLED=" + cgo}, "go", "list", "-deps", "github.com/llmbox-dev/llmbox/cmd/llmbox")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(deps, "llmbox/cmd/llmbox") {
			t.Fatal("that is no list of packages")
		}
		for dep := range strings.Lines(deps) {
			if strings.Contains(dep, "go-nvml") || strings.Contains(dep, "cmd/llmbox-nvml") {
				t.Errorf("CGO_ENABLED=%s: the main binary imports %s", cgo, strings.TrimSpace(dep))
			}
		}
	}
}

// The child can also be run by hand, without a parent that listens.
func TestChildAlone(t *testing.T) {
	b := need(t)
	script, err := filepath.Abs("scenarios/a10.nvml")
	if err != nil {
		t.Fatal(err)
	}
	child := exec.Command(b.childPath)
	child.Env = append(os.Environ(), gpu.EnvLibrary+"="+b.libraries[""], "FAKE_NVML_SCRIPT="+script)
	out, err := child.Output()
	if err != nil {
		t.Fatal(err)
	}
	report, err := gpu.Decode(out)
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Devices) != 1 || report.Devices[0].Name != "NVIDIA A10" {
		t.Errorf("got %+v", report)
	}
	// One document, on one line.
	if strings.Count(string(out), "\n") != 1 || !json.Valid(out) {
		t.Errorf("not one line of JSON: %s", out)
	}
}
