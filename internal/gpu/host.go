package gpu

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// maxHostFile bounds what is read of one file of the host, in bytes.
const maxHostFile = 64 << 10

// readHost reads a file under the root; an absent or unreadable one is empty.
func readHost(root string, parts ...string) string {
	file, err := os.Open(filepath.Join(append([]string{root}, parts...)...)) // #nosec G304 -- fixed places under a root of the caller's
	if err != nil {
		return ""
	}
	defer func() { _ = file.Close() }()
	data, err := io.ReadAll(io.LimitReader(file, maxHostFile))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// pciDevice is one NVIDIA display or 3D controller of sysfs.
type pciDevice struct {
	bus, device, driver string
	numa                int
}

// readPCI lists NVIDIA's GPUs on the PCI bus, with or without a driver, in the order
// of their addresses. Their classes are VGA (0x0300) and 3D controller (0x0302);
// the same vendor's audio, USB and NVSwitch functions have others.
func readPCI(root string) []pciDevice {
	const devices = "sys/bus/pci/devices"
	entries, err := os.ReadDir(filepath.Join(root, devices))
	if err != nil {
		return nil
	}
	var found []pciDevice
	for _, entry := range entries {
		name := entry.Name()
		if len(found) == maxDevices || readHost(root, devices, name, "vendor") != "0x10de" {
			continue
		}
		class := readHost(root, devices, name, "class")
		if !strings.HasPrefix(class, "0x0300") && !strings.HasPrefix(class, "0x0302") {
			continue
		}
		d := pciDevice{bus: NormalBus(OneLine(name)), numa: -1}
		d.device = strings.ToUpper(strings.TrimPrefix(OneLine(readHost(root, devices, name, "device")), "0x"))
		if target, err := os.Readlink(filepath.Join(root, devices, name, "driver")); err == nil {
			d.driver = OneLine(filepath.Base(target))
		}
		if node, err := strconv.Atoi(readHost(root, devices, name, "numa_node")); err == nil {
			d.numa = node
		}
		found = append(found, d)
	}
	slices.SortFunc(found, func(a, b pciDevice) int { return strings.Compare(a.bus, b.bus) })
	return found
}

// addFromPCI fills in what only the bus tells, and adds the devices that are on the
// bus but that whoever spoke did not list.
func addFromPCI(r *Report, pci []pciDevice) {
	if r.Devices == nil {
		r.Devices = []Device{}
	}
	known := map[string]int{}
	var nameless []int
	for i, d := range r.Devices {
		if d.PCIBus != "" {
			known[d.PCIBus] = i
		} else {
			nameless = append(nameless, i)
		}
	}
	var unlisted []pciDevice
	for _, p := range pci {
		i, ok := known[p.bus]
		if !ok {
			unlisted = append(unlisted, p)
			continue
		}
		fillFromPCI(&r.Devices[i], p)
	}
	// NVML counts in the order of the bus. A device that it counts but can't open has
	// no address; where as many addresses are left over, they are theirs.
	if len(nameless) > 0 && len(nameless) == len(unlisted) {
		for n, i := range nameless {
			r.Devices[i].PCIBus = unlisted[n].bus
			fillFromPCI(&r.Devices[i], unlisted[n])
		}
		return
	}
	for _, p := range unlisted {
		if len(r.Devices) == maxDevices {
			return
		}
		d := Device{Index: len(r.Devices), PCIBus: p.bus}
		fillFromPCI(&d, p)
		if r.Source == SourceNVML || r.Source == SourceSMI {
			// Given to nobody, or to another driver on purpose, it is not lost.
			switch p.driver {
			case "nvidia":
				d.Error, d.Lost = "on the PCI bus, but not listed by "+string(r.Source), true
			case "":
				d.Error = "on the PCI bus, but no kernel driver has taken it"
			default:
				d.Error = "on the PCI bus, but taken by the kernel driver " + p.driver
			}
		}
		r.Devices = append(r.Devices, d)
	}
}

func fillFromPCI(d *Device, p pciDevice) {
	d.KernelDriver = p.driver
	if d.PCIDevice == "" {
		d.PCIDevice = p.device
	}
	if d.NUMANode == nil && p.numa >= 0 {
		d.NUMANode = &p.numa
	}
	fillFromTable(d)
}

// fillFromTable looks the device id up in the table of products. Memory is left to
// those who can measure it: the table's is for planning.
func fillFromTable(d *Device) {
	for _, p := range Products() {
		if p.PCIDeviceID != d.PCIDevice {
			continue
		}
		if d.Name == "" {
			d.Name = p.Name
		}
		if d.ComputeMajor == nil {
			d.ComputeMajor, d.ComputeMinor = &p.ComputeMajor, &p.ComputeMinor
		}
		return
	}
}

// driverFacts is what the driver's files say.
type driverFacts struct {
	report Report
	loaded bool
}

// versionLine finds the version in /proc/driver/nvidia/version, which is written
// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  DATE" by the
// proprietary module and "... Open Kernel Module for x86_64  550.90.07 ..." by the
// open one.
var versionLine = regexp.MustCompile(`(?m)^NVRM version:.*?\sKernel Module\s(?:.*?\s)?(\d+\.\d+(?:\.\d+)?)\s`)

// readDriver reads /proc/driver/nvidia and /sys/module/nvidia.
func readDriver(root string) driverFacts {
	// The name of the file is more exact than NVML's own word for its version, which
	// can stop after the second number.
	facts := driverFacts{report: Report{Devices: []Device{}, Library: libraryFile(root)}}
	version := readHost(root, "proc/driver/nvidia/version")
	facts.loaded = version != ""
	if m := versionLine.FindStringSubmatch(version + "\n"); m != nil {
		facts.report.Driver = m[1]
	} else if v := readHost(root, "sys/module/nvidia/version"); v != "" {
		facts.report.Driver, facts.loaded = OneLine(v), true
	}
	entries, err := os.ReadDir(filepath.Join(root, "proc/driver/nvidia/gpus"))
	if err != nil {
		return facts
	}
	for _, entry := range entries {
		if len(facts.report.Devices) == maxDevices {
			break
		}
		d := Device{Index: len(facts.report.Devices), PCIBus: NormalBus(OneLine(entry.Name()))}
		information := readHost(root, "proc/driver/nvidia/gpus", entry.Name(), "information")
		for line := range strings.Lines(information) {
			key, value, _ := strings.Cut(line, ":")
			value = OneLine(value)
			// A GPU that was never opened since boot shows question marks.
			if strings.Contains(value, "??") {
				continue
			}
			switch strings.TrimSpace(key) {
			case "Model":
				d.Name = value
			case "GPU UUID":
				d.UUID = value
			case "Video BIOS":
				d.VBIOS = value
			case "GPU Firmware":
				if value != "N/A" {
					d.GSP = value
				}
			case "Bus Location":
				if value != "" {
					d.PCIBus = NormalBus(value)
				}
			}
		}
		facts.report.Devices = append(facts.report.Devices, d)
	}
	return facts
}

// libraryFileName is how the driver's installers name the library itself.
var libraryFileName = regexp.MustCompile(`^libnvidia-ml\.so\.(\d+\.\d+(?:\.\d+)?)$`)

// libraryFile is the version in the name of the library that the loader would open:
// where libnvidia-ml.so.1 leads, else the only one there is.
func libraryFile(root string) string {
	for _, dir := range []string{
		"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib",
		"lib/x86_64-linux-gnu", "lib64", "run/opengl-driver/lib",
		"usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/aarch64-linux-gnu/nvidia/current",
	} {
		dir = filepath.Join(root, dir)
		if target, err := os.Readlink(filepath.Join(dir, "libnvidia-ml.so.1")); err == nil {
			if m := libraryFileName.FindStringSubmatch(filepath.Base(target)); m != nil {
				return m[1]
			}
		} else if errors.Is(err, fs.ErrNotExist) {
			// No link: an interrupted installation can leave several behind.
			entries, err := os.ReadDir(dir)
			if err != nil {
				continue
			}
			var versions []string
			for _, entry := range entries {
				if m := libraryFileName.FindStringSubmatch(entry.Name()); m != nil {
					versions = append(versions, m[1])
				}
			}
			if len(versions) == 1 {
				return versions[0]
			}
		}
	}
	return ""
}
