package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// The simulated GPUs of a node on which an operator has to find them: a driver in
// /usr, device files in /dev, PCI devices in /sys, and a specification by which
// NVIDIA's own container runtime hands them in. Nothing of it is seen outside.

const (
	// ByLab and ByOperator are who offers the GPUs to kubelet.
	ByLab      = "lab"
	ByOperator = "operator"

	runtimeInside = programsInside + "/nvidia-container-runtime"
	nvmlInside    = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
	smiInside     = "/usr/bin/nvidia-smi"
	scriptInside  = "/usr/share/nvml-standin/gpus.nvml"
	driverVersion = "570.133.20"
)

// simulatesGPUs says whether the node has to look like one with GPUs.
func (o Options) simulatesGPUs() bool { return o.GPUBy == ByOperator && o.GPUs > 0 }

// gpuPrograms are what such a node runs or hands in outside of images.
func gpuPrograms() []string {
	return []string{"nvidia-container-runtime", "nvml-standin.so", "nvidia-smi-standin"}
}

// nvidiaHandler is the program behind the handler nvidia; "" is runc.
func (o Options) nvidiaHandler() string {
	if o.simulatesGPUs() {
		return runtimeInside
	}
	return ""
}

// device is one simulated GPU.
type device struct{ uuid, bus string }

func devices(count int) []device {
	var all []device
	for i := range count {
		// Made up, and the same each time.
		all = append(all, device{
			uuid: fmt.Sprintf("GPU-5eed%04x-0000-4000-8000-%012x", i, i),
			bus:  fmt.Sprintf("0000:%02x:00.0", 0x81+i),
		})
	}
	return all
}

// script is what the stand-in for NVML answers from.
func script(p gpu.Product, all []device) string {
	var s strings.Builder
	line := func(format string, a ...any) { fmt.Fprintf(&s, format+"\n", a...) }
	line("sys driver %s", driverVersion)
	line("sys nvml 12.%s", driverVersion)
	line("sys cuda 12080")
	line("sys gpus %d", len(all))
	line("all name %s", p.Name)
	line("all brand 14")
	line("all pciid %s", p.PCIDeviceID)
	line("all cc %d %d", p.ComputeMajor, p.ComputeMinor)
	line("all virt 0")
	line("all memory %d %d 0", p.MemoryMiB<<20, p.MemoryMiB<<20/128)
	line("all ecc 1 1")
	line("all throttle 1")
	line("all temperature 31 89 92")
	line("all power 61700 400000")
	line("all persistence 1")
	line("all compute_mode 0")
	line("all topology 30")
	switch [2]int{p.ComputeMajor, p.ComputeMinor} {
	case [2]int{8, 0}, [2]int{9, 0}, [2]int{10, 0}:
		line("all mig 0 0")
	}
	for i, d := range all {
		line("%d uuid %s", i, d.uuid)
		line("%d bus %s", i, d.bus)
		line("%d serial 165022300%04d", i, i)
		line("%d numa 0", i)
	}
	return s.String()
}

// addGPUs puts driver, device files and PCI devices into the root that is being made.
func addGPUs(c config, root string) error {
	layers := filepath.Join(c.Dir, "gpu")
	all := devices(c.GPUs)
	for from, to := range map[string]string{"nvml-standin.so": nvmlInside, "nvidia-smi-standin": smiInside} {
		if err := copyProgram(filepath.Join(c.Programs, from), filepath.Join(layers, to)); err != nil {
			return fmt.Errorf("making a driver: %w", err)
		}
	}
	if err := write(filepath.Join(layers, scriptInside), script(c.Product, all)); err != nil {
		return fmt.Errorf("making a driver: %w", err)
	}
	// The validator mounts /dev/char, which a machine without udev has not.
	if err := os.MkdirAll(filepath.Join(layers, "dev/char"), 0o755); err != nil { // #nosec G301 -- as /dev
		return fmt.Errorf("making device files: %w", err)
	}
	for _, name := range deviceFiles(len(all)) {
		// Opening one is opening /dev/null.
		path := filepath.Join(layers, "dev", name)
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil && !errors.Is(err, fs.ErrExist) { // #nosec G115 -- two small numbers
			return fmt.Errorf("making the device file %s: %w", name, err)
		}
		if err := os.Chmod(path, 0o666); err != nil { // #nosec G302 -- as NVIDIA's
			return fmt.Errorf("making the device file %s: %w", name, err)
		}
	}
	for _, dir := range []string{"usr", "dev"} {
		if err := layOver(filepath.Join(layers, dir), filepath.Join(root, dir)); err != nil {
			return err
		}
	}
	// An overlay shows nothing of what is mounted below.
	for _, dir := range []string{"pts", "shm", "mqueue"} {
		if _, err := os.Stat(filepath.Join("/dev", dir)); err != nil {
			continue
		}
		if err := unix.Mount(filepath.Join("/dev", dir), filepath.Join(root, "dev", dir), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("mounting /dev/%s: %w", dir, err)
		}
	}
	return addPCI(c.Product, all, filepath.Join(root, "sys/bus/pci/devices"))
}

func deviceFiles(gpus int) []string {
	names := []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
	for i := range gpus {
		names = append(names, fmt.Sprintf("nvidia%d", i))
	}
	return names
}

// layOver shows the files of a directory in another one, which is not written to.
func layOver(from, on string) error {
	for _, path := range []string{from, on} {
		if strings.ContainsAny(path, `:,\`) {
			return fmt.Errorf("laying files over %s: its path may have no colon, comma or backslash", path)
		}
	}
	if err := unix.Mount("overlay", on, "overlay", unix.MS_RDONLY, "lowerdir="+from+":"+on); err != nil {
		return fmt.Errorf("laying files over %s: %w", on, err)
	}
	return nil
}

// addPCI shows the machine's PCI devices and the GPUs beside them.
func addPCI(p gpu.Product, all []device, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("reading the PCI devices: %w", err)
	}
	links := map[string]string{}
	for _, e := range entries {
		if links[e.Name()], err = os.Readlink(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("reading the PCI devices: %w", err)
		}
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755,size=1m"); err != nil {
		return fmt.Errorf("making PCI devices: %w", err)
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("making PCI devices: %w", err)
		}
	}
	for _, d := range all {
		for name, content := range map[string]string{
			"vendor": "0x10de", "device": "0x" + strings.ToLower(p.PCIDeviceID), "class": "0x030200",
			"subsystem_vendor": "0x10de", "subsystem_device": "0x0000", "revision": "0xa1",
			"numa_node": "-1", "resource": strings.Repeat("0x0000000000000000 0x0000000000000000 0x0000000000000000\n", 7),
			// No list of capabilities: not a virtual GPU.
			"config": string(make([]byte, 4095)),
		} {
			if err := write(filepath.Join(dir, d.bus, name), content+"\n"); err != nil {
				return fmt.Errorf("making PCI devices: %w", err)
			}
		}
	}
	return nil
}

// gpuConfigs are the files of NVIDIA's container runtime, as its toolkit writes them.
func (c config) gpuConfigs() (map[string]string, error) {
	if !c.simulatesGPUs() {
		return nil, nil
	}
	type node struct {
		Path string `json:"path"`
	}
	type bindMount struct {
		HostPath      string   `json:"hostPath"`
		ContainerPath string   `json:"containerPath"`
		Options       []string `json:"options"`
	}
	type edits struct {
		DeviceNodes []node      `json:"deviceNodes,omitempty"`
		Mounts      []bindMount `json:"mounts,omitempty"`
	}
	type entry struct {
		Name  string `json:"name"`
		Edits edits  `json:"containerEdits"`
	}
	var entries []entry
	every := entry{Name: "all"}
	for i, d := range devices(c.GPUs) {
		own := edits{DeviceNodes: []node{{fmt.Sprintf("/dev/nvidia%d", i)}}}
		entries = append(entries, entry{fmt.Sprint(i), own}, entry{d.uuid, own})
		every.Edits.DeviceNodes = append(every.Edits.DeviceNodes, own.DeviceNodes...)
	}
	common := edits{DeviceNodes: []node{{"/dev/nvidiactl"}, {"/dev/nvidia-uvm"}, {"/dev/nvidia-uvm-tools"}}}
	for _, path := range []string{nvmlInside, smiInside, scriptInside} {
		common.Mounts = append(common.Mounts, bindMount{path, path, []string{"ro", "nosuid", "nodev", "bind"}})
	}
	spec, err := json.MarshalIndent(map[string]any{
		"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": append(entries, every), "containerEdits": common,
	}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("describing the GPUs: %w", err)
	}
	return map[string]string{
		"/etc/cdi/nvidia.json": string(spec) + "\n",
		"/etc/nvidia-container-runtime/config.toml": `[nvidia-container-runtime]
log-level = "info"
mode = "cdi"
runtimes = ["runc"]
[nvidia-container-runtime.modes.cdi]
default-kind = "nvidia.com/gpu"
annotation-prefixes = ["cdi.k8s.io/"]
spec-dirs = ["/etc/cdi", "/var/run/cdi"]
`,
	}, nil
}

func write(path, content string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { // #nosec G301 -- the node's own root
		return err
	}
	return os.WriteFile(path, []byte(content), 0o644) // #nosec G306 -- no secrets
}

func copyProgram(from, to string) (err error) {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil { // #nosec G301 -- the node's own root
		return err
	}
	in, err := os.Open(from) // #nosec G304 -- a fixed list
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o755) // #nosec G302 G304 -- a program
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
