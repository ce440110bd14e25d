package preflight

import (
	"testing"

	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// What plans an install must know the driver and the GPUs, whoever tells of them.
func TestGPUReport(t *testing.T) {
	s := snapshot.New()
	if r := (Facts{Snapshot: s}).GPUReport(); r != nil {
		t.Errorf("out of nothing: %+v", r)
	}
	s.AddFile("/sys/module/nvidia/version", "550.144.03\n")
	for name, content := range map[string]string{"vendor": "0x10de\n", "device": "0x2236\n", "class": "0x030200\n"} {
		s.AddFile("/sys/bus/pci/devices/0000:00:1e.0/"+name, content)
	}
	r := Facts{Snapshot: s}.GPUReport()
	if r == nil || r.Driver != "550.144.03" || len(r.Devices) != 1 || r.Devices[0].PCIDevice != "2236" {
		t.Errorf("from the bus: %+v", r)
	}
	s.GPU = &gpu.Report{Schema: gpu.ReportSchema, Source: gpu.SourceNVML, Devices: []gpu.Device{{Name: "NVIDIA A10"}, {Name: "NVIDIA A10"}}}
	if r := (Facts{Snapshot: s}).GPUReport(); r.Driver != "550.144.03" || len(r.Devices) != 2 {
		t.Errorf("completed: %+v", r)
	}
	if s.GPU.Driver != "" {
		t.Error("the snapshot itself was changed")
	}
}
