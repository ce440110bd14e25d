package nvml

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

var update = flag.Bool("update", false, "write the golden files anew")

// scenario is one script of the stand-in. Its "sys" lines also say what the host's
// files show: pciN ADDRESS DEVICE NUMA-NODE DRIVER, module VERSION FLAVOUR, libfile
// VERSION and smi FILE.
type scenario struct {
	name, path string
	sys        map[string]string
	devices    map[string]map[string]string
}

func load(t *testing.T, path string) scenario {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	s := scenario{
		name: strings.TrimSuffix(filepath.Base(path), ".nvml"), path: path,
		sys: map[string]string{}, devices: map[string]map[string]string{},
	}
	for line := range strings.Lines(string(data)) {
		scope, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		key, value, _ := strings.Cut(rest, " ")
		switch scope {
		case "#", "":
		case "sys":
			s.sys[key] = value
		default:
			if s.devices[scope] == nil {
				s.devices[scope] = map[string]string{}
			}
			s.devices[scope][key] = value
		}
	}
	return s
}

// fields splits a value into as many fields as the caller names.
func fields(t *testing.T, value string, count int) []string {
	t.Helper()
	f := strings.Fields(value)
	if len(f) != count {
		t.Fatalf("%q: want %d fields", value, count)
	}
	return f
}

// root lays the files of the host down that the scenario has.
func (s scenario) root(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	write := func(path, content string) {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	link := func(target, path string) {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, path); err != nil {
			t.Fatal(err)
		}
	}
	module, loaded := s.sys["module"]
	for i := 0; ; i++ {
		value, ok := s.sys[fmt.Sprintf("pci%d", i)]
		if !ok {
			break
		}
		f := fields(t, value, 4)
		dir := "sys/bus/pci/devices/" + f[0]
		write(dir+"/vendor", "0x10de")
		write(dir+"/device", "0x"+strings.ToLower(f[1]))
		write(dir+"/class", "0x030200")
		write(dir+"/numa_node", f[2])
		if f[3] != "-" {
			link("../../../bus/pci/drivers/"+f[3], dir+"/driver")
		}
		if loaded && f[3] == "nvidia" {
			write("proc/driver/nvidia/gpus/"+f[0]+"/information", fmt.Sprintf(
				"Model: \t\t %s\nIRQ:   \t\t 139\nGPU UUID: \t %s\nVideo BIOS: \t %s\nBus Type: \t PCIe\nBus Location: \t %s\nGPU Excluded:\t No",
				s.devices["all"]["name"], s.devices[fmt.Sprint(i)]["uuid"], s.devices["all"]["vbios"], f[0]))
		}
	}
	// A function of the same vendor that is no GPU.
	write("sys/bus/pci/devices/0000:05:00.0/vendor", "0x10de")
	write("sys/bus/pci/devices/0000:05:00.0/device", "0x22a3")
	write("sys/bus/pci/devices/0000:05:00.0/class", "0x068000")
	if loaded {
		f := fields(t, module, 2)
		line := "NVRM version: NVIDIA UNIX x86_64 Kernel Module  " + f[0] + "  Thu Mar 20 17:06:48 UTC 2025"
		if f[1] == "open" {
			line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " + f[0] + "  Release Build  (dvs-builder@U16-I1-N07-12-3)"
		}
		write("proc/driver/nvidia/version", line+"\nGCC version:  gcc version 12.3.0")
		write("sys/module/nvidia/version", f[0])
	}
	if version, ok := s.sys["libfile"]; ok {
		const dir = "usr/lib/x86_64-linux-gnu"
		write(dir+"/libnvidia-ml.so."+version, "")
		link("libnvidia-ml.so."+version, dir+"/libnvidia-ml.so.1")
	}
	return root
}

// options are those of a scenario: which library, how long to wait.
func (s scenario) options(t *testing.T, b *built) gpu.Options {
	t.Helper()
	path, err := filepath.Abs(s.path)
	if err != nil {
		t.Fatal(err)
	}
	o := gpu.Options{
		Helper: b.child, Library: b.libraries[""], Root: s.root(t),
		// Far away, so that a busy machine changes no report.
		SlowAfter: time.Minute, HangAfter: time.Minute,
		Environment: []string{"FAKE_NVML_SCRIPT=" + path},
	}
	switch {
	case strings.HasPrefix(s.name, "hang-"):
		o.SlowAfter, o.HangAfter = 500*time.Millisecond, 4*time.Second
	case strings.HasPrefix(s.name, "slow-"):
		// The script takes 600 ms.
		o.SlowAfter = 200 * time.Millisecond
	}
	switch s.name {
	case "old-library":
		o.Library = b.libraries["OLD_LIBRARY"]
	case "no-init":
		o.Library = b.libraries["NO_INIT"]
	case "library-not-found":
		o.Library = "/nonexistent/libnvidia-ml.so.1"
	case "helper-absent":
		o.Helper = nil
	}
	if file, ok := s.sys["smi"]; ok {
		xml, err := filepath.Abs(filepath.Join("testdata", "smi", file))
		if err != nil {
			t.Fatal(err)
		}
		o.SMI = filepath.Join(t.TempDir(), "nvidia-smi")
		if err := os.WriteFile(o.SMI, []byte("#!/bin/sh\nexec cat '"+xml+"'\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return o
}

// TestScenarios compares the whole report of each scenario with its golden file. Only
// the elapsed time is left out.
func TestScenarios(t *testing.T) {
	b := need(t)
	paths, err := filepath.Glob("scenarios/*.nvml")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for _, path := range paths {
		s := load(t, path)
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			o := s.options(t, b)
			slow := 0
			o.OnSlow = func(time.Duration) { slow++ }
			began := time.Now()
			report := gpu.Ask(context.Background(), o)
			took := time.Since(began)
			if (slow == 1) != report.NVML.Slow || slow > 1 {
				t.Errorf("told %d times that it is slow, the report says %t", slow, report.NVML.Slow)
			}
			// Much more than it takes, much less than for ever: a busy machine stops for
			// half a minute at times.
			if limit := o.HangAfter + time.Minute; took > limit {
				t.Errorf("took %s, at most %s are promised", took, limit)
			}
			if report.NVML.Ending != gpu.EndingHelperAbsent && report.NVML.ElapsedMS == 0 {
				t.Error("no elapsed time")
			}
			report.NVML.ElapsedMS = 0
			// The directory of the stand-in is another one each time.
			report.NVML.Detail = strings.ReplaceAll(report.NVML.Detail, filepath.Dir(o.Library), "DIR")
			got, err := json.MarshalIndent(report, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			if _, err := gpu.Decode(got); err != nil {
				t.Errorf("the report can't be read back: %v", err)
			}
			compare(t, filepath.Join("testdata", s.name+".golden.json"), string(got)+"\n")
		})
	}
}

func compare(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("no golden file; run with -update and read what it wrote. Got:\n%s", got)
	}
	if err != nil {
		t.Fatal(err)
	}
	if got == string(want) {
		return
	}
	gotLines, wantLines := strings.Split(got, "\n"), strings.Split(string(want), "\n")
	for i := range max(len(gotLines), len(wantLines)) {
		var g, w string
		if i < len(gotLines) {
			g = gotLines[i]
		}
		if i < len(wantLines) {
			w = wantLines[i]
		}
		if g != w {
			t.Errorf("%s:%d:\n got %s\nwant %s", path, i+1, g, w)
			return
		}
	}
}
