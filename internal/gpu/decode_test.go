package gpu

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// goldens are reports of the real child.
func goldens(t testing.TB) map[string][]byte {
	t.Helper()
	paths, err := filepath.Glob("../../test/nvml/testdata/*.golden.json")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no reports: %v", err)
	}
	all := map[string][]byte{}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all[filepath.Base(path)] = data
	}
	return all
}

func TestDecodeGoldens(t *testing.T) {
	for name, data := range goldens(t) {
		report, err := Decode(data)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		again, err := json.MarshalIndent(report, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		if string(again)+"\n" != string(data) {
			t.Errorf("%s: something was lost on the way", name)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	with := func(more string) string {
		return `{"schema":1,"source":"nvml","nvml":{"ending":"ok","elapsed_ms":0},` + more + `}`
	}
	many := func(n int) string {
		devices := make([]string, n)
		for i := range devices {
			devices[i] = fmt.Sprintf(`{"index":%d}`, i)
		}
		return `"devices":[` + strings.Join(devices, ",") + `]`
	}
	tests := []struct{ name, text, want string }{
		{"nothing", "", "EOF"},
		{"another type", `[]`, "cannot unmarshal"},
		{"no schema", `{"source":"nvml","nvml":{"ending":"ok"}}`, "schema 0"},
		{"unknown source", `{"schema":1,"source":"rumour","nvml":{"ending":"ok","elapsed_ms":0}}`, "unknown source"},
		{"unknown ending", `{"schema":1,"source":"nvml","nvml":{"ending":"happy","elapsed_ms":0}}`, "unknown ending"},
		{"another after it", with(`"devices":[]`) + "{}", "something follows"},
		{"out of range", with(`"devices":[{"index":0,"memory":{"total_bytes":-1}}]`), "cannot unmarshal"},
		{"too large", with(`"devices":[{"index":0,"memory":{"total_bytes":99999999999999999999}}]`), "cannot unmarshal"},
		{"index out of order", with(`"devices":[{"index":1}]`), "says that it is 1"},
		{"too many devices", with(many(maxDevices + 1)), "65 devices"},
		{"a link to itself", with(many(2) + `,"links":[{"a":1,"b":1,"path":"pix"}]`), "not a new pair"},
		{"a link to nowhere", with(many(2) + `,"links":[{"a":0,"b":2,"path":"pix"}]`), "not a new pair"},
		{"a link twice", with(many(3) + `,"links":[{"a":0,"b":1,"path":"pix"},{"a":0,"b":1,"path":"sys"}]`), "not a new pair"},
		{"too long a text", with(`"devices":[],"driver":"` + strings.Repeat("5", maxText+1) + `"`), "a text of 1025 bytes"},
		{"an escape", with(`"devices":[{"index":0,"name":"\u001b[2J"}]`), "control characters"},
		{"a line break", with(`"devices":[{"index":0,"errors":{"nvmlX":"a\nb"}}]`), "control characters"},
		{"too long a list", with(`"devices":[{"index":0,"throttle_reasons":["` + strings.Repeat(`a","`, maxList) + `b"]}]`), "too long"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			report, err := Decode([]byte(test.text))
			if err == nil {
				t.Fatalf("read as %+v", report)
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %q, want %q in it", err, test.want)
			}
		})
	}
	t.Run("too many bytes", func(t *testing.T) {
		if _, err := Decode(make([]byte, MaxAnswer+1)); err == nil {
			t.Error("was read")
		}
	})
	if report, err := Decode([]byte(with(`"devices":null`))); err != nil || report.Devices == nil {
		t.Errorf("no devices: %+v, %v", report, err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, data := range goldens(f) {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		report, err := Decode(data)
		if err != nil {
			return
		}
		if len(report.Devices) > maxDevices || report.Devices == nil {
			t.Fatalf("%d devices", len(report.Devices))
		}
		// What was accepted can be written and read again, and says the same.
		again, err := json.Marshal(report)
		if err != nil {
			t.Fatal(err)
		}
		second, err := Decode(again)
		if err != nil {
			t.Fatalf("accepted once, then not: %v\n%s", err, again)
		}
		once, err := json.Marshal(second)
		if err != nil {
			t.Fatal(err)
		}
		if string(once) != string(again) {
			t.Fatalf("%s\nbecame\n%s", again, once)
		}
	})
}

func readSMI(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("../../test/nvml/testdata/smi", name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func FuzzDecodeSMI(f *testing.F) {
	f.Add(readSMI(f, "a10.xml"))
	f.Add(readSMI(f, "mig-old.xml"))
	f.Fuzz(func(t *testing.T, data []byte) {
		report, err := DecodeSMI(data)
		if err != nil {
			return
		}
		report.NVML.Ending = EndingHelperAbsent
		written, err := json.Marshal(report)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Decode(written); err != nil {
			t.Fatalf("nvidia-smi's answer makes a report that can't be read: %v", err)
		}
	})
}

func TestDecodeSMI(t *testing.T) {
	report, err := DecodeSMI(readSMI(t, "mig-old.xml"))
	if err != nil {
		t.Fatal(err)
	}
	one, eight, zero, on, watts, limit := 1, 8, 0, false, 61.7, 400.0
	volatile, aggregate := uint64(0), uint64(3)
	want := Report{
		Schema: ReportSchema, Source: SourceSMI, Driver: "470.129.06", CUDA: "11.4",
		Devices: []Device{{
			Name: "NVIDIA A100-SXM4-80GB", UUID: "GPU-1", Brand: "NVIDIA", VBIOS: "92.00.45.00.05",
			PCIBus: "0000:07:00.0", PCIDevice: "20B2", ComputeMajor: &eight, ComputeMinor: &zero,
			Virtualization: "none", ComputeMode: "exclusive_process", Persistence: &on,
			Memory: &Memory{TotalBytes: 81251 << 20, UsedBytes: 24 << 20, FreeBytes: 81227 << 20, BAR1Bytes: 131072 << 20},
			MIG: &MIG{Enabled: true, Pending: true, Instances: []MIGInstance{
				{MemoryBytes: 40192 << 20}, {MemoryBytes: 9728 << 20},
			}},
			ECC:         &ECC{Enabled: true, Pending: true, UncorrectedVolatile: &volatile, UncorrectedAggregate: &aggregate},
			Remap:       &Remap{Correctable: 0, Uncorrectable: one, Pending: true},
			Throttle:    []string{"gpu_idle", "hw_thermal_slowdown"},
			Temperature: &Temperature{Now: 34},
			PowerWatts:  &Power{Now: &watts, Limit: &limit},
			PCIe:        &PCIe{Generation: 4, MaxGeneration: 4, Width: 8, MaxWidth: 16, Replays: 12},
			Processes:   []Process{{PID: 4711, Name: "python3", Kind: "compute"}},
		}},
	}
	if !reflect.DeepEqual(report, want) {
		got, _ := json.MarshalIndent(report, "", " ")
		expected, _ := json.MarshalIndent(want, "", " ")
		t.Errorf("got %s\nwant %s", got, expected)
	}
}

func TestDecodeSMIRefuses(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"plain text", "NVIDIA-SMI has failed", "EOF"},
		{"cut off", "<nvidia_smi_log><gpu>", "unexpected EOF"},
		{"another document", "<html></html>", "expected element type"},
		{"something after it", "<nvidia_smi_log></nvidia_smi_log>x", "something follows"},
		{"an entity of its own", `<!DOCTYPE a [<!ENTITY e "x">]><nvidia_smi_log><driver_version>&e;</driver_version></nvidia_smi_log>`, "invalid character entity"},
		{"too many", "<nvidia_smi_log>" + strings.Repeat("<gpu></gpu>", maxDevices+1) + "</nvidia_smi_log>", "65 GPUs"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if report, err := DecodeSMI([]byte(test.text)); err == nil {
				t.Errorf("read as %+v", report)
			} else if !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %q, want %q in it", err, test.want)
			}
		})
	}
}
