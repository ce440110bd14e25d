package preflight

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// nvmlWanted is what must be said about one report of the NVML child.
type nvmlWanted struct {
	Roots     map[string]string `json:"roots"`
	Followers []string          `json:"followers"`
}

const reports = "../../test/nvml/testdata"

// TestNVMLReports judges what the real NVML child wrote against the scripted library
// of test/nvml, each report on a machine whose bus and driver agree with it.
func TestNVMLReports(t *testing.T) {
	raw, err := os.ReadFile("testdata/nvml.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var want map[string]nvmlWanted
	if err := yaml.UnmarshalStrict(raw, &want); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(reports + "/*.golden.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no reports: %v", err)
	}
	names := map[string]bool{}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".golden.json")
		names[name] = true
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, ok := want[name]
			if !ok {
				t.Fatalf("testdata/nvml.yaml does not say what %s means", name)
			}
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			roots, followers := map[string]string{}, []string{}
			for _, f := range Judge(t.Context(), Checks(), aroundReport(t, raw)) {
				complete(t, f)
				switch {
				case !bad(f):
				case len(f.Causes) == 0:
					roots[f.ID] = string(f.Severity)
				default:
					followers = append(followers, f.ID)
				}
			}
			slices.Sort(followers)
			slices.Sort(w.Followers)
			if !maps.Equal(roots, w.Roots) || !slices.Equal(followers, w.Followers) {
				t.Errorf("roots %v, followers %v, want %v, %v", roots, followers, w.Roots, w.Followers)
			}
		})
	}
	for name := range want {
		if !names[name] {
			t.Errorf("testdata/nvml.yaml names %s, which is no report", name)
		}
	}
}

// aroundReport is the healthy machine with the bus and the driver of a report.
func aroundReport(t *testing.T, raw []byte) Facts {
	t.Helper()
	var report gpu.Report
	if err := json.Unmarshal(raw, &report); err != nil {
		t.Fatal(err)
	}
	tr := readTree(t, filepath.Join(casesDir, "ok-a10-ubuntu-2404"))
	tr.without(t, []string{"host/sys/bus/pci/devices/0000:00:1e.0", "host/dev/nvidia0", "host/dev/char"})
	top := tree{"gpu.json": raw}
	var entries []snapshot.Entry
	for i, d := range report.Devices {
		dir := "/sys/bus/pci/devices/" + strings.ToLower(d.PCIBus)
		top["host"+dir+"/vendor"], top["host"+dir+"/class"] = []byte("0x10de\n"), []byte("0x030200\n")
		top["host"+dir+"/device"] = []byte("0x" + strings.ToLower(d.PCIDevice) + "\n")
		if d.KernelDriver != "" {
			entries = append(entries, snapshot.Entry{Path: dir + "/driver", Kind: snapshot.Symlink, Target: "/sys/bus/pci/drivers/" + d.KernelDriver})
		}
		entries = append(entries,
			snapshot.Entry{Path: fmt.Sprintf("/dev/nvidia%d", i), Kind: snapshot.Device, Major: 195, Minor: uint32(i)},
			snapshot.Entry{Path: fmt.Sprintf("/dev/char/195:%d", i), Kind: snapshot.Symlink, Target: fmt.Sprintf("/dev/nvidia%d", i)})
	}
	for _, link := range []string{"195:255", "511:0"} {
		entries = append(entries, snapshot.Entry{Path: "/dev/char/" + link, Kind: snapshot.Symlink, Target: "/dev/nvidia"})
	}
	if report.Driver == "" {
		tr.without(t, []string{"host/sys/module/nvidia", "host/proc/driver/nvidia"})
		top["host/proc/modules"] = []byte("overlay 212992 1 - Live 0x0000000000000000\n")
	} else {
		top["host/sys/module/nvidia/version"] = []byte(report.Driver + "\n")
		top["host/proc/driver/nvidia/version"] = []byte("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " + report.Driver + "  Release Build\n")
		library := report.Driver
		if report.NVML.Ending == gpu.EndingVersionMismatch {
			library = "550.107.02"
		}
		entries = append(entries, snapshot.Entry{
			Path: "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", Kind: snapshot.Symlink, Target: "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so." + library,
		})
	}
	// The persistence daemon's own state would answer in the GPU's place.
	tr.without(t, []string{"commands/systemctl-show.txt"})
	top.setEntries(t, entries)
	tr.over(t, top)
	// A day on which no branch of the reports had ended.
	tr.manifest(t, func(m map[string]any) { m["time"] = "2025-12-01T00:00:00Z" })
	return Facts{Snapshot: tr.load(t)}
}
