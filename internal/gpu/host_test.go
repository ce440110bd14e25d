package gpu

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// lay writes files and links (content "-> TARGET") under a new root.
func lay(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if len(content) > 3 && content[:3] == "-> " {
			err = os.Symlink(content[3:], path)
		} else {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestReadDriverVersion(t *testing.T) {
	tests := []struct {
		name, version, module string
		want                  string
		loaded                bool
	}{
		{"proprietary", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version:  gcc 12.2.0\n", "", "535.183.01", true},
		{"open", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  555.58.02  Release Build  (dvs-builder@U16-I3-B03-4-3)  Tue Jun 25 01:26:03 UTC 2024\n", "", "555.58.02", true},
		{"open on arm", "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  590.48.01  Release Build\n", "", "590.48.01", true},
		{"two numbers", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  430.50  Thu Sep  5 22:36:31 CDT 2019\n", "", "430.50", true},
		{"nothing after it", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.09", "", "580.126.09", true},
		{"unreadable line, module says", "something else", "570.1.2\n", "570.1.2", true},
		{"module only", "", "570.1.2\n", "570.1.2", true},
		{"neither", "", "", "", false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			files := map[string]string{}
			if test.version != "" {
				files["proc/driver/nvidia/version"] = test.version
			}
			if test.module != "" {
				files["sys/module/nvidia/version"] = test.module
			}
			facts := readDriver(lay(t, files))
			if facts.report.Driver != test.want || facts.loaded != test.loaded {
				t.Errorf("got %q, loaded %t", facts.report.Driver, facts.loaded)
			}
		})
	}
}

func TestReadDriverDevices(t *testing.T) {
	root := lay(t, map[string]string{
		"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1.2  x\n",
		// As a GPU that was used, one that was never opened, and one without a file.
		"proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t\t NVIDIA A10\nIRQ:   \t\t 139\nGPU UUID: \t GPU-1\nVideo BIOS: \t 94.02\nBus Type: \t PCIe\nDMA Size: \t 47 bits\nBus Location: \t 0000:17:00.0\nDevice Minor: \t 0\nGPU Firmware: \t 570.1.2\nGPU Excluded:\t No\n",
		"proc/driver/nvidia/gpus/0000:65:00.0/information": "Model: \t\t NVIDIA A10\nGPU UUID: \t GPU-????????-????-????-????-????????????\nVideo BIOS: \t ??.??.??.??.??\nGPU Firmware: \t N/A\n",
		"proc/driver/nvidia/gpus/0000:B1:00.0/registry":    "",
	})
	got := readDriver(root).report.Devices
	want := []Device{
		{Index: 0, Name: "NVIDIA A10", UUID: "GPU-1", VBIOS: "94.02", GSP: "570.1.2", PCIBus: "0000:17:00.0"},
		{Index: 1, Name: "NVIDIA A10", PCIBus: "0000:65:00.0"},
		{Index: 2, PCIBus: "0000:b1:00.0"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestLibraryFile(t *testing.T) {
	const dir = "usr/lib/x86_64-linux-gnu/"
	tests := []struct {
		name  string
		files map[string]string
		want  string
	}{
		{"none", map[string]string{dir + "libc.so.6": ""}, ""},
		{"where the link leads", map[string]string{
			dir + "libnvidia-ml.so.1": "-> libnvidia-ml.so.570.133.20", dir + "libnvidia-ml.so.570.133.20": "", dir + "libnvidia-ml.so.550.90.07": "",
		}, "570.133.20"},
		{"no link, one file", map[string]string{"usr/lib64/libnvidia-ml.so.535.54.03": ""}, "535.54.03"},
		{"no link, two files", map[string]string{dir + "libnvidia-ml.so.570.133.20": "", dir + "libnvidia-ml.so.550.90.07": ""}, ""},
		{"a link elsewhere", map[string]string{dir + "libnvidia-ml.so.1": "-> /opt/strange.so"}, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := libraryFile(lay(t, test.files)); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// pciFiles is one device of sysfs.
func pciFiles(files map[string]string, bus, vendor, device, class, driver string) {
	dir := "sys/bus/pci/devices/" + bus + "/"
	files[dir+"vendor"], files[dir+"device"], files[dir+"class"] = vendor+"\n", device+"\n", class+"\n"
	files[dir+"numa_node"] = "-1\n"
	if driver != "" {
		files[dir+"driver"] = "-> ../../../../bus/pci/drivers/" + driver
	}
}

func TestReadPCI(t *testing.T) {
	files := map[string]string{}
	pciFiles(files, "0000:65:00.0", "0x10de", "0x2236", "0x030200", "nvidia")
	pciFiles(files, "0000:17:00.0", "0x10de", "0x2b85", "0x030000", "nouveau")
	pciFiles(files, "0000:17:00.1", "0x10de", "0x22e8", "0x040300", "snd_hda_intel")
	pciFiles(files, "0000:05:00.0", "0x10de", "0x22a3", "0x068000", "nvidia")
	pciFiles(files, "0000:00:02.0", "0x8086", "0x4680", "0x030000", "i915")
	got := readPCI(lay(t, files))
	want := []pciDevice{
		{bus: "0000:17:00.0", device: "2B85", driver: "nouveau", numa: -1},
		{bus: "0000:65:00.0", device: "2236", driver: "nvidia", numa: -1},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got := readPCI(t.TempDir()); got != nil {
		t.Errorf("without sysfs: %+v", got)
	}
}

func TestAddFromPCI(t *testing.T) {
	pci := func(driver string, buses ...string) []pciDevice {
		var all []pciDevice
		for _, bus := range buses {
			all = append(all, pciDevice{bus: bus, device: "27B8", driver: driver, numa: 1})
		}
		return all
	}
	const a, b, c = "0000:17:00.0", "0000:65:00.0", "0000:b1:00.0"
	tests := []struct {
		name   string
		source Source
		listed []Device
		pci    []pciDevice
		// want is each device's address, error and whether it is lost.
		want []Device
	}{
		{"all listed", SourceNVML, []Device{{PCIBus: a}, {Index: 1, PCIBus: b}}, pci("nvidia", a, b), []Device{{PCIBus: a}, {PCIBus: b}}},
		{
			"one missing", SourceNVML, []Device{{PCIBus: b}}, pci("nvidia", a, b),
			[]Device{{PCIBus: b}, {PCIBus: a, Lost: true, Error: "on the PCI bus, but not listed by nvml"}},
		},
		{
			"one given away", SourceNVML, []Device{{PCIBus: a}}, append(pci("nvidia", a), pci("vfio-pci", b)...),
			[]Device{{PCIBus: a}, {PCIBus: b, Error: "on the PCI bus, but taken by the kernel driver vfio-pci"}},
		},
		{
			"one free", SourceSMI, []Device{{PCIBus: a}}, append(pci("nvidia", a), pci("", b)...),
			[]Device{{PCIBus: a}, {PCIBus: b, Error: "on the PCI bus, but no kernel driver has taken it"}},
		},
		{
			"two that can't be opened get the two addresses left", SourceNVML,
			[]Device{{Error: "x"}, {Index: 1, PCIBus: b}, {Index: 2, Error: "y"}}, pci("nvidia", a, b, c),
			[]Device{{PCIBus: a, Error: "x"}, {PCIBus: b}, {PCIBus: c, Error: "y"}},
		},
		{
			"one that can't be opened, two addresses left: nobody knows whose", SourceNVML,
			[]Device{{Error: "x"}}, pci("nvidia", a, b),
			[]Device{
				{Error: "x"},
				{PCIBus: a, Lost: true, Error: "on the PCI bus, but not listed by nvml"},
				{PCIBus: b, Lost: true, Error: "on the PCI bus, but not listed by nvml"},
			},
		},
		{"nobody spoke", SourceNone, nil, pci("nouveau", a), []Device{{PCIBus: a}}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			report := Report{Source: test.source, Devices: test.listed}
			addFromPCI(&report, test.pci)
			if len(report.Devices) != len(test.want) {
				t.Fatalf("%d devices, want %d: %+v", len(report.Devices), len(test.want), report.Devices)
			}
			for i, d := range report.Devices {
				want := test.want[i]
				if d.Index != i || d.PCIBus != want.PCIBus || d.Error != want.Error || d.Lost != want.Lost {
					t.Errorf("device %d: %+v, want %+v", i, d, want)
				}
				if d.PCIBus != "" && (d.Name != "NVIDIA L4" || *d.ComputeMajor != 8 || *d.NUMANode != 1) {
					t.Errorf("device %d was not filled in: %+v", i, d)
				}
			}
		})
	}
}

func TestNormalBus(t *testing.T) {
	for in, want := range map[string]string{
		"00000000:17:00.0": "0000:17:00.0", "0000:17:00.0": "0000:17:00.0", "0001:0A:1F.0": "0001:0a:1f.0",
		"10000:01:00.0": "10000:01:00.0", "": "", "17:00.0": "17:00.0",
	} {
		if got := NormalBus(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}
