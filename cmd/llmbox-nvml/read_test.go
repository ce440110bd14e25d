//go:build cgo && linux

package main

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxh100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// readMock reads a mock as if its library had only the functions that are named.
func readMock(lib nvml.Interface, functions ...string) (gpu.Report, []string) {
	var report gpu.Report
	var entered []string
	r := &reader{
		lib:   lib,
		enter: func(call string) { entered = append(entered, call) },
		has:   func(symbol string) bool { return slices.Contains(functions, symbol) },
		lost:  map[int]bool{},
	}
	r.read(&report)
	return report, entered
}

// basics are the functions that go-nvml's servers answer.
func basics() []string {
	return []string{
		"nvmlInit_v2", "nvmlSystemGetNVMLVersion", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion",
		"nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetName", "nvmlDeviceGetUUID",
		"nvmlDeviceGetBrand", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetCudaComputeCapability",
		"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode",
	}
}

func TestReadServers(t *testing.T) {
	tests := []struct {
		name         string
		server       nvml.Interface
		product      string
		major, minor int
	}{
		{"dgx a100", dgxa100.New(), "a100-40", 8, 0},
		{"dgx h100", dgxh100.New(), "h100", 9, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			report, entered := readMock(test.server, basics()...)
			if report.NVML.Ending != gpu.EndingOK || report.Source != gpu.SourceNVML {
				t.Fatalf("got %+v", report.NVML)
			}
			if report.Driver == "" || report.Library == "" || report.CUDA == "" {
				t.Errorf("versions are missing: %+v", report)
			}
			if len(report.Devices) != 8 {
				t.Fatalf("%d devices", len(report.Devices))
			}
			product, ok := gpu.ProductByKey(test.product)
			if !ok {
				t.Fatal(test.product)
			}
			for i, d := range report.Devices {
				if d.Index != i || d.UUID == "" || d.PCIDevice != product.PCIDeviceID || *d.ComputeMajor != test.major || *d.ComputeMinor != test.minor {
					t.Errorf("device %d: %s %s %d.%d", i, d.UUID, d.PCIDevice, *d.ComputeMajor, *d.ComputeMinor)
				}
				// One of the servers says "Mock" in front.
				if !strings.HasSuffix(d.Name, product.Name) {
					t.Errorf("device %d: %q", i, d.Name)
				}
				if d.Memory == nil || d.Memory.TotalBytes == 0 || d.MIG == nil || d.MIG.Enabled {
					t.Errorf("device %d: memory %+v, MIG %+v", i, d.Memory, d.MIG)
				}
				// What the library has no function for is said, and costs nothing else.
				if d.Errors["nvmlDeviceGetEccMode"] != "the library has no such function" {
					t.Errorf("device %d: errors %v", i, d.Errors)
				}
			}
			if !slices.Contains(entered, "nvmlDeviceGetName 7") || entered[1] != "nvmlInit_v2" {
				t.Errorf("entered %v", entered)
			}
		})
	}
}

// one is a server with one GPU whose functions a test sets.
func one() (*server.Server, *mock.Device) {
	s := dgxa100.New()
	s.Devices = s.Devices[:1]
	s.ErrorStringFunc = func(ret nvml.Return) string { return ret.Error() }
	s.DeviceGetCountFunc = func() (int, nvml.Return) { return 1, nvml.SUCCESS }
	d := &mock.Device{}
	s.DeviceGetHandleByIndexFunc = func(int) (nvml.Device, nvml.Return) { return d, nvml.SUCCESS }
	return s, d
}

var frame = []string{"nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlErrorString"}

// One call that fails is kept under its name and takes nothing else with it;
// not supported is no error.
func TestReadFieldErrors(t *testing.T) {
	s, d := one()
	d.GetNameFunc = func() (string, nvml.Return) { return "NVIDIA\x1b[2J A10", nvml.SUCCESS }
	d.GetUUIDFunc = func() (string, nvml.Return) { return "", nvml.ERROR_UNKNOWN }
	d.GetSerialFunc = func() (string, nvml.Return) { return "", nvml.ERROR_NOT_SUPPORTED }
	report, _ := readMock(s, append(frame, "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetSerial")...)
	got := report.Devices[0]
	if got.Name != "NVIDIA [2J A10" {
		t.Errorf("name %q", got.Name)
	}
	if got.Errors["nvmlDeviceGetUUID"] != "ERROR_UNKNOWN" {
		t.Errorf("errors %v", got.Errors)
	}
	if _, ok := got.Errors["nvmlDeviceGetSerial"]; ok {
		t.Error("not supported is kept as an error")
	}
	written, err := json.Marshal(report)
	if err != nil {
		t.Fatal(err)
	}
	var whole gpu.Report
	if err := json.Unmarshal(written, &whole); err != nil {
		t.Fatal(err)
	}
}

func TestReadLost(t *testing.T) {
	s, d := one()
	asked := 0
	d.GetNameFunc = func() (string, nvml.Return) { return "NVIDIA A10", nvml.SUCCESS }
	d.GetUUIDFunc = func() (string, nvml.Return) { asked++; return "", nvml.ERROR_GPU_IS_LOST }
	d.GetSerialFunc = func() (string, nvml.Return) { asked++; return "", nvml.ERROR_GPU_IS_LOST }
	report, _ := readMock(s, append(frame, "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetSerial")...)
	got := report.Devices[0]
	if !got.Lost || got.Error != "ERROR_GPU_IS_LOST" || got.Name != "NVIDIA A10" || asked != 1 {
		t.Errorf("asked %d times, got %+v", asked, got)
	}
	if report.NVML.Ending != gpu.EndingGPULost {
		t.Errorf("the only GPU is lost, the ending is %s", report.NVML.Ending)
	}
}

func TestReadInit(t *testing.T) {
	for code, want := range map[nvml.Return]gpu.Ending{
		nvml.ERROR_LIB_RM_VERSION_MISMATCH: gpu.EndingVersionMismatch,
		nvml.ERROR_DRIVER_NOT_LOADED:       gpu.EndingDriverNotLoaded,
		nvml.ERROR_NO_PERMISSION:           gpu.EndingNoPermission,
		nvml.ERROR_GPU_IS_LOST:             gpu.EndingGPULost,
		nvml.ERROR_LIBRARY_NOT_FOUND:       gpu.EndingLibraryNotFound,
		nvml.ERROR_FUNCTION_NOT_FOUND:      gpu.EndingMissingSymbol,
		nvml.ERROR_UNKNOWN:                 gpu.EndingError,
		nvml.ERROR_TIMEOUT:                 gpu.EndingError,
	} {
		s, _ := one()
		s.InitFunc = func() nvml.Return { return code }
		report, _ := readMock(s, frame...)
		if report.NVML.Ending != want || report.NVML.Code != int(code) || report.NVML.Detail == "" || len(report.Devices) != 0 {
			t.Errorf("code %d: got %+v, want %s", code, report.NVML, want)
		}
	}
}

func TestReadProcesses(t *testing.T) {
	s, d := one()
	s.SystemGetProcessNameFunc = func(pid int) (string, nvml.Return) {
		if pid == 3 {
			return "", nvml.ERROR_NOT_FOUND
		}
		return "python3 --api-key secret", nvml.SUCCESS
	}
	unknown := ^uint64(0)
	d.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{{Pid: 1, UsedGpuMemory: 5}, {Pid: 2, UsedGpuMemory: unknown}}, nvml.SUCCESS
	}
	d.GetGraphicsRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{{Pid: 1, UsedGpuMemory: 5}, {Pid: 3, UsedGpuMemory: 7}}, nvml.SUCCESS
	}
	report, _ := readMock(s, append(frame, "nvmlSystemGetProcessName",
		"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")...)
	five, seven := uint64(5), uint64(7)
	want := []gpu.Process{
		{PID: 1, Name: "python3", UsedBytes: &five, Kind: "compute"},
		{PID: 2, Name: "python3", Kind: "compute"},
		{PID: 3, UsedBytes: &seven, Kind: "graphics"},
	}
	if got := report.Devices[0].Processes; !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestNames(t *testing.T) {
	if got, want := throttleNames(0x1|0x8|0x40|1<<40), []string{"gpu_idle", "hw_slowdown", "hw_thermal_slowdown", "0x10000000000"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	for in, want := range map[string]string{"12.550.90.07": "550.90.07", "13.580.65": "580.65", "550.90": "550.90", "": ""} {
		if got := libraryVersion(in); got != want {
			t.Errorf("library %q: got %q, want %q", in, got, want)
		}
	}
	for level, want := range map[nvml.GpuTopologyLevel]string{0: "pix", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"} {
		if got := pathName(level); got != want {
			t.Errorf("level %d: got %q, want %q", level, got, want)
		}
	}
	if got := cText([]int8{'a', 'b', 0, 'c'}); got != "ab" {
		t.Errorf("got %q", got)
	}
}
