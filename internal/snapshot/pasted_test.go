package snapshot

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

func TestPasted(t *testing.T) {
	load := func(t *testing.T, name, output string) *Snapshot {
		t.Helper()
		s, err := loadArchive(bytes.NewReader(archive(t, entry{name: "manifest.yaml", content: goodManifest}, entry{name: "commands/" + name + ".txt", content: output})), testLimits())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := load(t, "ss", "exit=0\nNetid State  Recv-Q Send-Q Local Address:Port Peer Address:PortProcess\n"+
		"udp   UNCONN 0      0            0.0.0.0:8472      0.0.0.0:*\n"+
		"tcp   LISTEN 0      4096   127.0.0.53%lo:53        0.0.0.0:*    users:((\"systemd-resolve\",pid=612,fd=15))\n"+
		"tcp   LISTEN 0      4096            [::]:22           [::]:*    users:((\"sshd\",pid=901,fd=4),(\"sshd\",pid=902,fd=4))\n"+
		"LISTEN 0 4096      *:10250  *:*  users:((\"kubelite\",pid=2210,fd=61))\n")
	var got []Listener
	if state, why := s.Probe(ProbeListeners, &got); state != Present {
		t.Fatalf("%s %s", state, why)
	}
	want := []Listener{
		{Protocol: "udp", Address: "0.0.0.0", Port: 8472},
		{Protocol: "tcp", Address: "127.0.0.53", Port: 53, PID: 612, Process: "systemd-resolve"},
		{Protocol: "tcp", Address: "::", Port: 22, PID: 901, Process: "sshd"},
		{Protocol: "tcp", Address: "::", Port: 10250, PID: 2210, Process: "kubelite"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v", got)
	}
	for name, test := range map[string]struct {
		output  string
		ending  gpu.Ending
		library string
		devices int
	}{
		"mismatch":   {"exit=18\nFailed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.107\n", gpu.EndingVersionMismatch, "550.107", 0},
		"not loaded": {"exit=9\nNVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", gpu.EndingDriverNotLoaded, "", 0},
		"lost":       {"exit=255\nUnable to determine the device handle for GPU0000:A1:00.0: Unknown Error\n", gpu.EndingGPULost, "", 1},
		"hang":       {"exit=124\n", gpu.EndingTimeout, "", 0},
		"list":       {"exit=0\nGPU 0: NVIDIA A10 (UUID: GPU-1)\nGPU 1: NVIDIA A10 (UUID: GPU-2)\n", gpu.EndingOK, "", 2},
	} {
		t.Run(name, func(t *testing.T) {
			r := load(t, "nvidia-smi", test.output).GPU
			if r == nil || r.NVML.Ending != test.ending || r.Library != test.library || len(r.Devices) != test.devices {
				t.Errorf("%+v", r)
			}
		})
	}
	if r := load(t, "nvidia-smi", "exit=0\n8\n").GPU; r != nil {
		t.Errorf("out of nothing: %+v", r)
	}
}
