package preflight

import (
	"cmp"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func deviceChecks() []Check {
	lost := []string{"gpu.pci.fallen_off", "gpu.xid.79"}
	return []Check{
		{
			ID: "preflight.gpu_generation", Title: "GPU generation", Required: fmt.Sprintf("compute capability %d.%d or newer (Ampere)", oldestComputeMajor, oldestComputeMinor), Strict: true,
			Source: "vllm-project/vllm#1153, #1157; developer.nvidia.com/cuda-gpus", Judge: judgeGeneration,
		},
		{
			ID: "gpu.pci.fallen_off", Title: "GPU on the PCI bus", Required: "every GPU answers on the bus",
			Source: "akash-network/support#209; NVIDIA/open-gpu-kernel-modules#507", Judge: judgeFallenOff,
			Causes: []string{"gpu.xid.79"},
		},
		{
			ID: "gpu.xid", Also: xidIDs(), Title: "GPU errors in the kernel's log", Required: "no Xid of broken hardware or a hanging driver",
			Source: "docs.nvidia.com/deploy/xid-errors; akash-network/support#209; awslabs/awsome-distributed-ai#1190; NVIDIA/open-gpu-kernel-modules#446", Judge: judgeXid,
		},
		{
			ID: "gpu.count", Title: "Number of GPUs", Required: "as many GPUs in the driver as on the bus",
			Source: "NVIDIA/k8s-device-plugin#231; leptonai/gpud#1209", Judge: judgeCount,
			Causes: append(append(lost, "gpu.driver.vfio", "gpu.driver.nouveau", "host.container", "gpu.nvml.gpu_lost", "gpu.nvml.timeout", "gpu.nvml.no_permission"), driverDown()...),
		},
		{
			ID: "gpu.mig.enabled_without_instances", Title: "Partitioned GPU without partitions", Required: "MIG off, or instances to give out",
			Source: "rapidsai/dask-cuda#583; Project-HAMi/HAMi#1044", Judge: judgeMIGEmpty,
		},
		{
			ID: "gpu.mig.partitioned", Title: "Partitioned GPU", Required: "the whole GPU for one model",
			Source: "NVIDIA/mig-parted#97; pytorch/pytorch#130181", Judge: judgeMIGPartitioned,
		},
		{
			ID: "gpu.ecc.remap_failed", Title: "Row remapping of GPU memory", Required: "no failed row remapping",
			Source: "leptonai/gpud#80, #108; docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt", Judge: judgeRemapFailed,
		},
		{
			ID: "gpu.ecc.remap_pending", Title: "Faulty GPU memory waiting for a reset", Required: "no row remapping or page retirement pending",
			Source: "awslabs/awsome-distributed-ai#1190; Azure/azurehpc#617", Judge: judgeRemapPending,
			Causes: []string{"gpu.ecc.remap_failed"},
		},
		{
			ID: "gpu.ecc.uncorrected", Title: "Uncorrected errors of GPU memory", Required: "none since the driver was loaded",
			Source: "leptonai/gpud#987; docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt", Judge: judgeECC,
			Causes: []string{"gpu.ecc.remap_failed", "gpu.ecc.remap_pending"},
		},
		{
			ID: "gpu.fabric", Title: "NVSwitch fabric", Required: "nvidia-fabricmanager at work and the fabric completed",
			Source: "pytorch/pytorch#35710; NVIDIA/gpu-operator#1043; huggingface/huggingface_hub#4128", Judge: judgeFabric,
			Causes: append([]string{"gpu.fabric.version"}, driverDown()...),
		},
		{
			ID: "gpu.fabric.version", Title: "Version of nvidia-fabricmanager", Required: "exactly the driver's version",
			Source: "microsoft/lisa#2823; docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide", Judge: judgeFabricVersion,
			Causes: []string{"gpu.driver.lib_mismatch"},
		},
		{
			ID: "gpu.device_nodes", Title: "Device files of the GPU", Required: "/dev/nvidiactl, /dev/nvidia-uvm and one /dev/nvidiaN for each GPU, with the driver's major numbers",
			Source: "pytorch/pytorch#49081; NVIDIA/nvidia-docker#288; NVIDIA/gpu-operator#671", Judge: judgeDeviceNodes,
			Causes: append(append(lost, "host.container", "host.wsl"), driverDown()...),
		},
		{
			ID: "gpu.persistence", Title: "Persistence mode", Required: "on, or nvidia-persistenced at work",
			Source: "NVIDIA/nvidia-docker#723; Azure/aks-gpu#105", Judge: judgePersistence,
		},
		{
			ID: "gpu.compute_mode", Title: "Compute mode", Required: "default",
			Source: "docs.nvidia.com/deploy/nvml-api, nvmlComputeMode_t; NVIDIA/k8s-device-plugin README", Judge: judgeComputeMode,
		},
		{
			ID: "model.gpu_memory_busy", Title: "GPU memory in use", Required: "no other program on the GPU",
			Source: "vllm-project/vllm#20305, #23192; vllm-project/vllm-omni#2317", Judge: judgeBusy,
		},
		{
			ID: "gpu.throttle", Title: "GPU slowed down by its hardware", Required: "no hardware slowdown, thermal or power brake",
			Source: "leptonai/gpud#330, #331; canonical/hardware-observer-operator#307", Judge: judgeThrottle,
		},
		{
			ID: "gpu.pcie.width", Title: "PCIe link of the GPU", Required: "as many lanes as device and slot allow",
			Source: "docs.nvidia.com/deploy/nvml-api, nvmlDeviceGetCurrPcieLinkWidth; linux Documentation/ABI/testing/sysfs-bus-pci", Judge: judgePCIe,
		},
		{
			ID: "gpu.vgpu.license", Title: "vGPU licence", Required: "a licence, where the GPU is a virtual one",
			Source: "docs.nvidia.com/vgpu, Client Licensing User Guide; learn.microsoft.com/azure/virtual-machines/linux/n-series-driver-setup", Judge: judgeLicense,
		},
		{
			ID: "gpu.p2p.iommu", Title: "GPUs talking to each other over PCIe", Required: "IOMMU off or in passthrough where several GPUs have no NVLink",
			Source: "NVIDIA/nccl#2079; vllm-project/vllm#9920, #51513", Judge: judgeIOMMU,
		},
	}
}

func judgeGeneration(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	var low, good []string
	var evidence []finding.Evidence
	if f.GPU != nil {
		for _, d := range f.GPU.Devices {
			if d.ComputeMajor == nil || d.ComputeMinor == nil {
				continue
			}
			capability := fmt.Sprintf("%d.%d", *d.ComputeMajor, *d.ComputeMinor)
			if *d.ComputeMajor < oldestComputeMajor {
				low = append(low, label(d)+" has compute capability "+capability)
				evidence = append(evidence, atGPU(d, "compute_major"))
			} else {
				good = append(good, capability)
			}
		}
	}
	if len(low) == 0 && len(good) == 0 && f.GPU != nil {
		for _, d := range f.GPU.Devices {
			p, ok := gpu.ProductByName(d.Name)
			if !ok {
				continue
			}
			if p.ComputeMajor < oldestComputeMajor {
				low = append(low, label(d)+" has compute capability "+p.ComputeCapability())
				evidence = append(evidence, atGPU(d, "name"))
			} else {
				good = append(good, p.ComputeCapability())
			}
		}
	}
	if len(low) == 0 && len(good) == 0 {
		// Without a driver the PCI id still tells.
		gpus, _ := f.pciGPUs()
		for _, g := range gpus {
			for _, p := range gpu.Products() {
				if p.PCIDeviceID != g.device {
					continue
				}
				if p.ComputeMajor < oldestComputeMajor {
					low = append(low, p.Name+" at "+g.address+" has compute capability "+p.ComputeCapability())
					evidence = append(evidence, atPath("/sys/bus/pci/devices/"+g.address+"/device", g.device))
				} else {
					good = append(good, p.ComputeCapability())
				}
			}
		}
	}
	switch {
	case len(low) > 0 && len(good) == 0:
		return fail(strings.Join(low, "; "), "Take a machine with an Ampere GPU or newer: A10, L4, A100, L40S, H100 and what came after", evidence...)
	case len(low) > 0:
		out := warn(strings.Join(low, "; ")+"; the others are new enough", "Take the old GPU out of the machine, or away from the driver until the next boot: echo ADDRESS | sudo tee /sys/bus/pci/drivers/nvidia/unbind (sudo lspci -d 10de: lists the addresses)", evidence...)
		return out
	case len(good) > 0:
		return well(strings.Join(slices.Compact(slices.Sorted(slices.Values(good))), ", "))
	}
	return unknown("the GPU's compute capability", "neither NVML nor the PCI id says")
}

const powerCycle = "Stop the machine and start it again (a full power cycle; nvidia-smi --gpu-reset is not enough). If it happens again, ask the provider for another machine"

var (
	// The driver splits this sentence over three lines and gives it no Xid.
	fallenSentence = regexp.MustCompile(`The NVIDIA GPU ([0-9a-fA-F:.]+)\s+\(PCI ID: [0-9a-fA-F:]+\)\s+installed in this system has\s+fallen off the bus`)
	fallenShort    = regexp.MustCompile(`GPU (?:at )?(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?): GPU has fallen off the bus`)
	// A GPU divided by MIG names the instance behind its address.
	xidLine = regexp.MustCompile(`NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)(?: GPU-I:\d+)?[^)]*\): (\d+)(?:,\s*(.*))?$`)
)

func judgeFallenOff(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	var measured []string
	var evidence []finding.Evidence
	note := func(address, how string, e finding.Evidence) {
		for _, m := range measured {
			if strings.HasPrefix(m, address) {
				return
			}
		}
		measured = append(measured, address+" "+how)
		evidence = append(evidence, e)
	}
	lines, log := f.kernelLog()
	for _, line := range lines {
		if m := fallenSentence.FindStringSubmatch(line); m != nil {
			note(m[1], "has fallen off the bus", at(log, line))
		} else if m := fallenShort.FindStringSubmatch(line); m != nil {
			note(m[1], "has fallen off the bus", at(log, line))
		}
	}
	gpus, known := f.pciGPUs()
	var readable bool
	for _, g := range gpus {
		if config := f.File("/sys/bus/pci/devices/" + g.address + "/config"); config.State == snapshot.Present {
			readable = true
		}
		if g.dead {
			note(g.address, "reads as ff ff ff ff on the bus", atPath("/sys/bus/pci/devices/"+g.address+"/config", "ff ff ff ff"))
		}
	}
	if f.GPU != nil {
		for _, d := range f.GPU.Devices {
			if d.Lost && !unlisted(f.GPU, d) {
				note(cmp.Or(d.PCIBus, label(d)), "is lost to the driver", atGPU(d, "lost"))
			}
		}
	}
	switch {
	case len(measured) > 0:
		return fail(strings.Join(measured, "; "), powerCycle, evidence...)
	case log.State != snapshot.Present && !readable:
		if !known {
			return unknown("/sys/bus/pci/devices", "")
		}
		return unknownText(log)
	}
	return well("every GPU answers")
}

// unlisted says that NVML was well and only did not name a device that is on the bus:
// that may have other causes, and the number of GPUs tells it. The words are package
// gpu's own.
func unlisted(report *gpu.Report, d gpu.Device) bool {
	return report.NVML.Ending == gpu.EndingOK && strings.HasPrefix(d.Error, "on the PCI bus, but not listed by ")
}

// xidMeaning is what an Xid says about the machine, by the action that NVIDIA's
// catalogue asks for (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the
// Xid Catalog"): what asks for a reset of the GPU or more is here, what asks to restart
// or check a program (13, 31, 43, 45, 94) is left out on purpose.
type xidMeaning struct {
	severity finding.Severity
	what     string
	fix      string
}

func xids() map[int]xidMeaning {
	reboot := "sudo reboot. If it comes back, update the driver to R580 and reboot again"
	drain := "Stop what uses the GPU, then: sudo reboot"
	replace := "Ask the provider for another machine, or have the GPU replaced"
	out := map[int]xidMeaning{
		46:  {finding.Warn, "the GPU stopped working on what it was given", drain},
		48:  {finding.Warn, "an uncorrectable memory error", drain},
		54:  {finding.Fail, "the GPU's extra power cable is not connected", "Switch the machine off and plug the power cable into the GPU; on a rented machine, ask the provider for another"},
		62:  {finding.Fail, "the GPU's micro-controller halted", reboot},
		63:  {finding.Warn, "a faulty row of memory waits to be remapped", drain},
		64:  {finding.Fail, "a faulty row of memory could not be remapped", replace},
		74:  {finding.Warn, "an NVLink error", drain},
		79:  {finding.Fail, "the GPU has fallen off the bus", powerCycle},
		92:  {finding.Warn, "a high rate of corrected memory errors", drain},
		95:  {finding.Fail, "an uncontained memory error", drain},
		109: {finding.Warn, "the GPU did not change from one program to the next in time", drain},
		110: {finding.Fail, "the GPU reported a security fault", powerCycle},
		119: {finding.Fail, "the GPU's GSP firmware stopped answering", reboot},
		120: {finding.Fail, "the GPU's GSP firmware reported an error", reboot},
		136: {finding.Fail, "an NVLink could not be brought up", reboot},
		140: {finding.Fail, "an unrecovered memory error", drain},
		143: {finding.Fail, "the GPU could not be initialised", reboot},
		154: {finding.Warn, "the driver asks for a recovery of the GPU", drain},
		156: {finding.Warn, "a faulty part of the GPU waits to be taken out of use", drain},
		158: {finding.Fail, "the GPU did not answer in time", reboot},
		167: {finding.Fail, "the GPU did not answer over PCIe in time", powerCycle},
		169: {finding.Fail, "the GPU's security controller halted", reboot},
	}
	// The links of Blackwell report by the part that failed.
	for n := 144; n <= 150; n++ {
		out[n] = xidMeaning{finding.Warn, "a fatal NVLink error", drain}
	}
	return out
}

// harmless says of some lines that they ask for nothing: an NVLink error that says of
// itself that it is not fatal, and a recovery action that was taken back.
func harmless(n int, text string) bool {
	switch {
	case n >= 144 && n <= 150:
		return strings.Contains(text, "Nonfatal") || strings.Contains(text, "Non-fatal")
	case n == 154:
		return strings.HasSuffix(strings.TrimRight(text, " ."), "(None)")
	}
	return false
}

func xidIDs() []string {
	var ids []string
	for _, n := range xidNumbers() {
		ids = append(ids, "gpu.xid."+strconv.Itoa(n))
	}
	return ids
}

func xidNumbers() []int {
	var numbers []int
	for n := range xids() {
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	return numbers
}

func judgeXid(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	lines, log := f.kernelLog()
	if log.State != snapshot.Present {
		return unknownText(log)
	}
	found := seenXids(lines)
	others := len(found) > 0
	// What NVML says of the rows now outweighs what was said when they failed.
	if s := found[63]; s != nil {
		s.where = slices.DeleteFunc(s.where, func(address string) bool {
			remapped, known := f.remapAt(address)
			return known && !remapped.Pending
		})
		if len(s.where) == 0 {
			delete(found, 63)
		}
	}
	var out []finding.Finding
	for _, n := range xidNumbers() {
		s := found[n]
		if s == nil {
			continue
		}
		meaning := xids()[n]
		var evidence []finding.Evidence
		for i, line := range s.lines {
			if i < 3 {
				evidence = append(evidence, at(log, line))
			}
		}
		out = append(out, finding.Finding{
			ID: "gpu.xid." + strconv.Itoa(n), Severity: meaning.severity, State: finding.Judged,
			Measured: fmt.Sprintf("Xid %d on %s: %s", n, strings.Join(s.where, ", "), meaning.what),
			Fix:      meaning.fix, Evidence: evidence,
			Causes: xidCauses(n),
		})
	}
	if len(out) > 0 {
		return out
	}
	if others {
		return well("none that asks for anything now")
	}
	return well("none")
}

// xidSeen is what the log says of one Xid.
type xidSeen struct {
	where, lines []string
}

// seenXids gathers the Xids by number, without those that ask for nothing.
func seenXids(lines []string) map[int]*xidSeen {
	found := map[int]*xidSeen{}
	for _, line := range lines {
		m := xidLine.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		n, err := strconv.Atoi(m[2])
		if err != nil {
			continue
		}
		address := shortBus(m[1])
		if harmless(n, m[3]) {
			// Taken back for that GPU, whatever was asked for before.
			if s := found[n]; n == 154 && s != nil {
				if s.where = slices.DeleteFunc(s.where, func(a string) bool { return a == address }); len(s.where) == 0 {
					delete(found, n)
				}
			}
			continue
		}
		if found[n] == nil {
			found[n] = &xidSeen{}
		}
		if !slices.Contains(found[n].where, address) {
			found[n].where = append(found[n].where, address)
		}
		found[n].lines = append(found[n].lines, line)
	}
	return found
}

// shortBus is an address without the function, as an Xid has it.
func shortBus(address string) string {
	address, _, _ = strings.Cut(address, ".")
	return address
}

// remapAt is what NVML says of the remapped rows of the GPU at an address.
func (f Facts) remapAt(address string) (gpu.Remap, bool) {
	if f.GPU == nil {
		return gpu.Remap{}, false
	}
	for _, d := range f.GPU.Devices {
		if d.Remap != nil && sameBus(shortBus(d.PCIBus), shortBus(address)) {
			return *d.Remap, true
		}
	}
	return gpu.Remap{}, false
}

// xidCauses are the findings that say the same thing better: NVML knows a pending or
// failed remapping, and what became of the bus. An Xid 79 is itself a root.
func xidCauses(n int) []string {
	switch n {
	case 48, 63, 64, 92, 95, 140, 156:
		return []string{"gpu.ecc.remap_failed", "gpu.ecc.remap_pending"}
	case 154:
		// It sums up what another one said.
		causes := []string{"gpu.ecc.remap_failed", "gpu.ecc.remap_pending"}
		for _, other := range xidNumbers() {
			if other != n {
				causes = append(causes, "gpu.xid."+strconv.Itoa(other))
			}
		}
		return causes
	case 79:
		return []string{}
	}
	return []string{"gpu.xid.79"}
}

func judgeCount(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	gpus, known := f.pciGPUs()
	if !known || len(gpus) == 0 {
		return unknown("/sys/bus/pci/devices", "")
	}
	devices, why := f.devices()
	if why != nil {
		return why
	}
	// What was handed to virtual machines on purpose is not missed here.
	gpus = slices.DeleteFunc(gpus, func(g pciDevice) bool { return g.driver == "vfio-pci" || g.driver == "pci-stub" })
	if len(devices) >= len(gpus) {
		return well(fmt.Sprintf("%d on the bus, %d in the driver", len(gpus), len(devices)))
	}
	var missing []string
	for _, g := range gpus {
		if !slices.ContainsFunc(devices, func(d gpu.Device) bool { return sameBus(d.PCIBus, g.address) }) {
			missing = append(missing, g.address)
		}
	}
	return fail(fmt.Sprintf("%d on the bus, %d in the driver: %s missing", len(gpus), len(devices), some(8, missing)),
		powerCycle+". To see why: sudo dmesg | grep -E 'NVRM|nvidia'",
		finding.Evidence{File: "gpu.json", Field: "devices", Line: count(len(devices), "device")}, atPath("/sys/bus/pci/devices", count(len(gpus), "GPU")))
}

// sameBus compares PCI addresses; NVML writes the domain with eight digits.
func sameBus(a, b string) bool {
	tail := func(s string) string {
		s = strings.ToLower(s)
		if i := strings.Index(s, ":"); i > 4 {
			s = s[i-4:]
		}
		return s
	}
	return tail(a) == tail(b)
}

func judgeMIGEmpty(f Facts) []finding.Finding {
	return f.perDevice("MIG mode", func(d gpu.Device) bool { return d.MIG != nil }, func(d gpu.Device) (finding.Severity, string, string, string) {
		switch {
		case d.MIG.Enabled && len(d.MIG.Instances) == 0:
			return finding.Fail, "MIG is on without any instance, so programs see no GPU",
				"Stop what uses the GPU, then: sudo nvidia-smi -i " + gpuIndex + " -mig 0 (sudo reboot if it says pending)", "mig"
		case !d.MIG.Enabled && d.MIG.Pending:
			return finding.Warn, "MIG will be on after the next reset", "sudo nvidia-smi -i " + gpuIndex + " -mig 0", "mig.pending"
		}
		return finding.OK, "", "", ""
	})
}

func judgeMIGPartitioned(f Facts) []finding.Finding {
	return f.perDevice("MIG mode", func(d gpu.Device) bool { return d.MIG != nil }, func(d gpu.Device) (finding.Severity, string, string, string) {
		if d.MIG.Enabled && len(d.MIG.Instances) > 0 {
			return finding.Warn, "divided into " + count(len(d.MIG.Instances), "MIG instance") + "; a model gets one of them and can't span several",
				"To use the whole GPU, stop what uses it, then: sudo nvidia-smi mig -i " + gpuIndex + " -dci; sudo nvidia-smi mig -i " + gpuIndex + " -dgi; sudo nvidia-smi -i " + gpuIndex + " -mig 0", "mig.instances"
		}
		return finding.OK, "", "", ""
	})
}

func judgeRemapFailed(f Facts) []finding.Finding {
	return f.perDevice("remapped rows", func(d gpu.Device) bool { return d.Remap != nil }, func(d gpu.Device) (finding.Severity, string, string, string) {
		if d.Remap.Failure {
			return finding.Fail, "a faulty row of memory could not be remapped", "Ask the provider for another machine, or have the GPU replaced", "remapped_rows.failure"
		}
		return finding.OK, "", "", ""
	})
}

func judgeRemapPending(f Facts) []finding.Finding {
	found := f.remapPending()
	if bad := found[0].Severity; bad == finding.Warn || bad == finding.Fail {
		return found
	}
	// Where NVML can't say, the kernel's log tells that a row was marked.
	lines, log := f.kernelLog()
	if s := seenXids(lines)[63]; s != nil {
		var waiting []string
		for _, address := range s.where {
			if _, known := f.remapAt(address); !known {
				waiting = append(waiting, address)
			}
		}
		if len(waiting) > 0 {
			return warn("GPU at "+strings.Join(waiting, ", ")+": a row waits to be remapped, says the kernel's log",
				"Stop what uses the GPU, then: sudo reboot", at(log, s.lines[0]))
		}
	}
	return found
}

// remapPending judges by NVML's word.
func (f Facts) remapPending() []finding.Finding {
	has := func(d gpu.Device) bool { return d.Remap != nil || d.Retired != nil }
	return f.perDevice("remapped rows", has, func(d gpu.Device) (finding.Severity, string, string, string) {
		fix := "Stop what uses the GPU, then: sudo reboot (on a machine of your own, sudo nvidia-smi -i " + gpuIndex + " --gpu-reset does it too)"
		switch {
		case d.Remap != nil && d.Remap.Pending:
			return finding.Warn, fmt.Sprintf("%d uncorrectable; a row waits to be remapped", d.Remap.Uncorrectable), fix, "remapped_rows.pending"
		case d.Retired != nil && d.Retired.Pending:
			return finding.Warn, "a page of memory waits to be retired", fix, "retired_pages.pending"
		}
		return finding.OK, "", "", ""
	})
}

func judgeECC(f Facts) []finding.Finding {
	has := func(d gpu.Device) bool { return d.ECC != nil && d.ECC.UncorrectedVolatile != nil }
	return f.perDevice("ECC errors", has, func(d gpu.Device) (finding.Severity, string, string, string) {
		if n := *d.ECC.UncorrectedVolatile; n > 0 {
			return finding.Warn, fmt.Sprintf("%d uncorrected since the driver was loaded", n), "Stop what uses the GPU, then: sudo reboot. If they come back, ask for another machine", "ecc.uncorrected_volatile"
		}
		return finding.OK, "", "", ""
	})
}

// needsFabric says whether this machine's GPUs are joined by NVSwitches: seen on the
// bus, or by the GPUs' own word.
func (f Facts) needsFabric() bool {
	devices, _ := f.pci()
	if slices.ContainsFunc(devices, pciDevice.nvSwitch) {
		return true
	}
	if f.GPU == nil {
		return false
	}
	return slices.ContainsFunc(f.GPU.Devices, func(d gpu.Device) bool {
		return d.Fabric != nil && d.Fabric.State != "" && d.Fabric.State != "not_supported"
	})
}

func judgeFabric(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	if _, known := f.pci(); !known && f.GPU == nil {
		return unknown("/sys/bus/pci/devices", "")
	}
	if !f.needsFabric() {
		return notApplicable("no NVSwitch")
	}
	driver := f.loadedDriver()
	fix := "Install nvidia-fabricmanager of exactly " + cmp.Or(driver, "the driver's version") + ": " + f.fabricInstall(driver) + " && sudo systemctl enable --now nvidia-fabricmanager"
	var states []string
	var evidence []finding.Evidence
	complete, spoken := true, false
	if f.GPU != nil {
		for _, d := range f.GPU.Devices {
			if d.Fabric == nil || d.Fabric.State == "not_supported" || d.Fabric.State == "" {
				continue
			}
			spoken = true
			// NVML's status is a return code's words; only a bad one spoils a completed state.
			if d.Fabric.State != "completed" || d.Fabric.Status != "" && !strings.EqualFold(d.Fabric.Status, "success") {
				complete = false
				states = append(states, strings.TrimSpace(d.Fabric.State+" "+d.Fabric.Status))
				if len(evidence) < 2 {
					evidence = append(evidence, atGPU(d, "fabric.state"))
				}
			}
		}
	}
	unit, state := f.Unit("nvidia-fabricmanager.service")
	units := f.Command("systemctl-show")
	running := state == snapshot.Present && unit.Active == "active"
	slices.Sort(states)
	fabric := strings.Join(slices.Compact(states), ", ")
	switch {
	case spoken && complete:
		return well("completed on " + count(len(f.GPU.Devices), "GPU"))
	case spoken:
		what := "nvidia-fabricmanager is at work"
		if !running {
			what = "nvidia-fabricmanager is not running"
			if state == snapshot.Absent && units.State == snapshot.Present {
				what = "nvidia-fabricmanager is not installed"
			}
		} else {
			fix = "sudo systemctl restart nvidia-fabricmanager. To see what it waits for: sudo journalctl -u nvidia-fabricmanager -n 50"
		}
		return fail(fmt.Sprintf("%s, fabric state %s; %s, so CUDA answers with error 802", count(len(f.GPU.Devices), "GPU"), fabric, what), fix,
			append(evidence, at(units, "nvidia-fabricmanager.service "+unit.Active))...)
	case state == snapshot.Unreadable || units.State != snapshot.Present:
		return unknown("the state of nvidia-fabricmanager", units.Why)
	case !running:
		return fail("there are NVSwitches and nvidia-fabricmanager is not running", fix, at(units, "nvidia-fabricmanager.service "+unit.Active))
	}
	return well("nvidia-fabricmanager is at work", at(units, "nvidia-fabricmanager.service active"))
}

// fabricInstall installs the fabric manager of a driver.
func (f Facts) fabricInstall(driver string) string {
	switch o := f.osRelease(); {
	case o.suse():
		return "sudo zypper install -y nvidia-fabricmanager=" + driver
	case o.rpm():
		return "sudo dnf install -y nvidia-fabricmanager-" + driver
	}
	return "sudo apt-get update && sudo apt-get install -y 'nvidia-fabricmanager-" + strings.Split(driver, ".")[0] + "=" + driver + "*'"
}

func judgeFabricVersion(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	if !f.needsFabric() {
		return notApplicable("no NVSwitch")
	}
	packages, state := f.Packages()
	if state != snapshot.Present {
		return unknown("the list of installed packages", "")
	}
	driver := f.loadedDriver()
	if driver == "" {
		return notApplicable("no driver is loaded")
	}
	for _, p := range packages {
		if !p.Installed || !strings.HasPrefix(p.Name, "nvidia-fabricmanager") || strings.Contains(p.Name, "dev") {
			continue
		}
		v := upstreamVersion(p.Version)
		if v == driver {
			return well(v)
		}
		return fail(p.Name+" is "+v+", the driver "+driver,
			f.fabricInstall(driver)+" && sudo systemctl restart nvidia-fabricmanager", packageEvidence(f, p))
	}
	return notApplicable("nvidia-fabricmanager is not installed")
}

// packageEvidence names the list that a package stands in.
func packageEvidence(f Facts, p snapshot.Package) finding.Evidence {
	name := snapshot.CommandDpkg
	if f.Command(snapshot.CommandDpkg).State != snapshot.Present {
		name = snapshot.CommandRPM
	}
	return finding.Evidence{File: "commands/" + name + ".txt", Line: p.Name + " " + p.Version}
}

// upstreamVersion is a package's version without epoch and revision.
func upstreamVersion(v string) string {
	if _, rest, ok := strings.Cut(v, ":"); ok {
		v = rest
	}
	v, _, _ = strings.Cut(v, "-")
	return v
}

// deviceMajors are the character device numbers that the driver registered.
func (f Facts) deviceMajors() (map[string]uint32, snapshot.Text) {
	t := f.File("/proc/devices")
	majors := map[string]uint32{}
	for _, line := range t.Lines() {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			if strings.HasPrefix(line, "Block devices") {
				break
			}
			continue
		}
		if n, err := strconv.ParseUint(fields[0], 10, 32); err == nil {
			majors[fields[1]] = uint32(n)
		}
	}
	return majors, t
}

func judgeDeviceNodes(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	if _, state := f.Stat("/dev"); state != snapshot.Present {
		return unknown("/dev", f.Manifest.Unreadable["host/dev"])
	}
	majors, t := f.deviceMajors()
	want := []string{"/dev/nvidiactl", "/dev/nvidia-uvm"}
	gpus, _ := f.pciGPUs()
	n := len(gpus)
	if f.GPU != nil && len(f.GPU.Devices) > 0 {
		n = len(f.GPU.Devices)
	}
	for i := range n {
		want = append(want, "/dev/nvidia"+strconv.Itoa(i))
	}
	var missing, stale []string
	var evidence []finding.Evidence
	for _, node := range want {
		e, state := f.Stat(node)
		switch {
		case state == snapshot.Unreadable:
			return unknown(node, f.Manifest.Unreadable["host"+node])
		case state == snapshot.Absent:
			missing = append(missing, node)
			evidence = append(evidence, atPath(node, "absent"))
		case e.Kind == snapshot.Device && t.State == snapshot.Present:
			major, known := majors["nvidia-uvm"]
			if node != "/dev/nvidia-uvm" {
				if major, known = majors["nvidia"]; !known {
					major, known = majors["nvidia-frontend"]
				}
			}
			if known && e.Major != major {
				stale = append(stale, fmt.Sprintf("%s has major %d, the driver %d", node, e.Major, major))
				evidence = append(evidence, at(t, fmt.Sprintf("%d", major)))
			}
		}
	}
	fix := "sudo modprobe nvidia-uvm && sudo nvidia-modprobe -c 0 -u (nvidia-modprobe comes with the driver's utilities)"
	switch {
	case len(missing) == 1 && missing[0] == "/dev/nvidia-uvm" && len(stale) == 0:
		// The first program that uses CUDA has it made, where nvidia-modprobe is there.
		return repairable("gpu.device_nodes", warn("/dev/nvidia-uvm is absent until a program that uses CUDA has run", fix, evidence...))
	case len(missing) > 0:
		return repairable("gpu.device_nodes", fail("absent: "+some(6, missing), fix, evidence...))
	case len(stale) > 0:
		return repairable("gpu.device_nodes", fail(some(3, stale), "sudo rm "+strings.Join(firstWords(stale), " ")+" && "+fix, evidence...))
	}
	return well(count(len(want), "device file") + " in place")
}

func firstWords(sentences []string) []string {
	var words []string
	for _, s := range sentences {
		word, _, _ := strings.Cut(s, " ")
		words = append(words, word)
	}
	return words
}

func judgePersistence(f Facts) []finding.Finding {
	unit, state := f.Unit("nvidia-persistenced.service")
	daemon := state == snapshot.Present && unit.Active == "active"
	return f.perDevice("persistence mode", func(d gpu.Device) bool { return d.Persistence != nil || daemon }, func(d gpu.Device) (finding.Severity, string, string, string) {
		if daemon || *d.Persistence {
			return finding.OK, "", "", ""
		}
		return finding.Warn, "off, so the driver starts anew for each program",
			"sudo systemctl enable --now nvidia-persistenced (or until the next boot: sudo nvidia-smi -pm 1)", "persistence"
	})
}

func judgeComputeMode(f Facts) []finding.Finding {
	return f.perDevice("compute mode", func(d gpu.Device) bool { return d.ComputeMode != "" }, func(d gpu.Device) (finding.Severity, string, string, string) {
		fix := "sudo nvidia-smi -i " + gpuIndex + " -c DEFAULT"
		switch d.ComputeMode {
		case "default":
			return finding.OK, "", "", ""
		case "prohibited":
			return finding.Fail, "prohibited: no program may use it", fix, "compute_mode"
		}
		return finding.Warn, d.ComputeMode + ": one program at a time", fix, "compute_mode"
	})
}

func judgeBusy(f Facts) []finding.Finding {
	return f.perDevice("memory in use", func(d gpu.Device) bool { return memoryOf(d).TotalBytes > 0 || memoryOf(d).UsedBytes > 0 }, func(d gpu.Device) (finding.Severity, string, string, string) {
		m := memoryOf(d)
		used := m.UsedBytes
		var ours bool
		var holders []string
		for _, p := range d.Processes {
			where := f.owner(p)
			ours = ours || f.Need.Installed && f.inPod(p)
			text := fmt.Sprintf("pid %d", p.PID)
			if p.Name != "" {
				text += " " + path.Base(p.Name)
			}
			if p.UsedBytes != nil {
				text += " " + gib(*p.UsedBytes)
			}
			if where != "" {
				text += " (" + where + ")"
			}
			holders = append(holders, text)
		}
		// Our own model holds the memory on purpose.
		if ours || used < foreignBytes && len(holders) == 0 {
			return finding.OK, "", "", ""
		}
		measured := fmt.Sprintf("%s of %s free", gib(m.FreeBytes), gib(m.TotalBytes))
		if m.TotalBytes == 0 {
			measured = gib(used) + " in use"
		}
		if len(holders) > 0 {
			measured += "; held by " + some(4, holders)
		} else {
			measured += "; NVML names no process (another PID namespace, or left over)"
		}
		if float64(m.FreeBytes) < utilisation*float64(m.TotalBytes) || m.TotalBytes == 0 && tooMuchAnywhere(used) {
			return finding.Fail, measured, "End what holds it: " + endCommand(f, d), "memory.free_bytes"
		}
		if used < foreignBytes {
			return finding.Info, measured, "", "processes"
		}
		return finding.Warn, measured, "End what holds it: " + endCommand(f, d), "memory.used_bytes"
	})
}

// tooMuchAnywhere says whether what others hold leaves too little on the largest GPU
// there is.
func tooMuchAnywhere(used uint64) bool {
	var largest int64
	for _, p := range gpu.Products() {
		largest = max(largest, p.MemoryMiB)
	}
	return float64(used) > (1-utilisation)*float64(largest)*(1<<20)
}

// memoryOf is a GPU's memory. Where only the processes are known, the rest follows from
// the product.
func memoryOf(d gpu.Device) gpu.Memory {
	if d.Memory != nil {
		return *d.Memory
	}
	var m gpu.Memory
	for _, p := range d.Processes {
		if p.UsedBytes != nil {
			m.UsedBytes += *p.UsedBytes
		}
	}
	product, ok := gpu.ProductByName(d.Name)
	if !ok {
		product, ok = gpu.ProductByPCI(d.PCIDevice)
	}
	if !ok || m.UsedBytes == 0 {
		return m
	}
	m.TotalBytes = uint64(max(product.MemoryMiB, 0)) << 20
	m.FreeBytes = m.TotalBytes - min(m.TotalBytes, m.UsedBytes)
	return m
}

// endCommand is how to end those who hold a GPU: by whoever would start them again.
func endCommand(f Facts, d gpu.Device) string {
	var commands []string
	add := func(command string) {
		if !slices.Contains(commands, command) {
			commands = append(commands, command)
		}
	}
	for _, p := range d.Processes {
		t := f.File("/proc/" + strconv.Itoa(p.PID) + "/cgroup")
		switch m := holder(t.Data); m.kind {
		case "docker", "podman":
			add("sudo " + m.kind + " stop " + m.name)
		case "service":
			add("sudo systemctl stop " + m.name)
		case "pod":
			add("delete its pod, which is among these: sudo kubectl get pods -A")
		default:
			add("sudo kill " + strconv.Itoa(p.PID))
		}
	}
	if len(commands) > 0 {
		return strings.Join(commands[:min(len(commands), 4)], "; ")
	}
	return "sudo fuser -v /dev/nvidia" + strconv.Itoa(d.Index) + " (lists them). When nobody is listed: sudo reboot"
}

var (
	containerScope = regexp.MustCompile(`(docker|libpod)[-/]([0-9a-f]{4,64})(?:\.scope)?`)
	serviceScope   = regexp.MustCompile(`system\.slice/(?:[^/\n]*/)*([\w@.:-]+\.service)`)
)

// roof is what a process runs under.
type roof struct{ kind, name string }

// holder reads a control group.
func holder(cgroup string) roof {
	if strings.Contains(cgroup, "kubepods") {
		return roof{kind: "pod"}
	}
	if m := containerScope.FindStringSubmatch(cgroup); m != nil {
		return roof{kind: map[string]string{"docker": "docker", "libpod": "podman"}[m[1]], name: m[2][:min(12, len(m[2]))]}
	}
	if m := serviceScope.FindStringSubmatch(cgroup); m != nil {
		return roof{kind: "service", name: m[1]}
	}
	if strings.Contains(cgroup, "user.slice") {
		return roof{kind: "session"}
	}
	return roof{}
}

// owner says in words under whose roof a process runs.
func (f Facts) owner(p gpu.Process) string {
	t := f.File("/proc/" + strconv.Itoa(p.PID) + "/cgroup")
	if t.State != snapshot.Present {
		return ""
	}
	switch m := holder(t.Data); m.kind {
	case "docker":
		return "Docker container " + m.name
	case "podman":
		return "Podman container " + m.name
	case "pod":
		return "a pod of Kubernetes"
	case "service":
		return "the service " + m.name
	case "session":
		return "somebody's session"
	}
	return ""
}

// inPod says whether a process that holds a GPU belongs to a pod.
func (f Facts) inPod(p gpu.Process) bool {
	t := f.File("/proc/" + strconv.Itoa(p.PID) + "/cgroup")
	return t.State == snapshot.Present && holder(t.Data).kind == "pod"
}

func judgeThrottle(f Facts) []finding.Finding {
	hardware := map[string]string{
		"hw_slowdown": "hardware slowdown", "hw_thermal_slowdown": "too hot", "hw_power_brake_slowdown": "power brake", "hw_power_brake": "power brake", "hw_thermal": "too hot",
	}
	has := func(d gpu.Device) bool { return d.Throttle != nil || d.Temperature != nil }
	return f.perDevice("the reasons for lowered clocks", has, func(d gpu.Device) (finding.Severity, string, string, string) {
		var reasons []string
		for _, r := range d.Throttle {
			if text, ok := hardware[r]; ok && !slices.Contains(reasons, text) {
				reasons = append(reasons, text)
			}
		}
		if len(reasons) == 0 {
			return finding.OK, "", "", ""
		}
		text := strings.Join(reasons, ", ")
		if d.Temperature != nil {
			text += fmt.Sprintf(" at %d °C", d.Temperature.Now)
		}
		return finding.Warn, text, "Check cooling, power supply and power cabling; on a rented machine, ask the provider for another", "throttle_reasons"
	})
}

func judgePCIe(f Facts) []finding.Finding {
	has := func(d gpu.Device) bool { return d.PCIe != nil && d.PCIe.MaxWidth > 0 && d.PCIe.Width > 0 }
	return f.perDevice("the PCIe link", has, func(d gpu.Device) (finding.Severity, string, string, string) {
		// A GPU at rest lowers the generation of its link, never the width.
		if d.PCIe.Width*2 > d.PCIe.MaxWidth {
			return finding.OK, "", "", ""
		}
		if d.Virtualization == "passthrough" || d.Virtualization == "vgpu" {
			return finding.Info, fmt.Sprintf("x%d of x%d lanes, as this virtual machine sees it", d.PCIe.Width, d.PCIe.MaxWidth), "", "pcie.width"
		}
		return finding.Warn, fmt.Sprintf("x%d of x%d lanes: weights load slowly", d.PCIe.Width, d.PCIe.MaxWidth),
			"Reseat the card or use another slot; on a rented machine, ask the provider for another", "pcie.width"
	})
}

func judgeLicense(f Facts) []finding.Finding {
	return f.perDevice("the vGPU licence", func(d gpu.Device) bool { return d.Virtualization == "vgpu" }, func(d gpu.Device) (finding.Severity, string, string, string) {
		text := strings.ToLower(d.License)
		switch {
		case text == "":
			return finding.Info, "a virtual GPU whose licence NVML does not name", "", "license"
		case strings.HasPrefix(text, "licensed"):
			return finding.OK, "", "", ""
		}
		return finding.Fail, "a virtual GPU, " + d.License + ": it slows down to a crawl after some minutes",
			"Put the provider's client token into /etc/nvidia/ClientConfigToken/, then: sudo systemctl restart nvidia-gridd. After a minute this must say Licensed: sudo nvidia-smi -q | grep -i license", "license"
	})
}

func judgeIOMMU(f Facts) []finding.Finding {
	devices, why := f.devices()
	if why != nil {
		return why
	}
	if len(devices) < 2 {
		return notApplicable("one GPU")
	}
	if slices.ContainsFunc(devices, func(d gpu.Device) bool {
		return slices.ContainsFunc(d.NVLinks, func(p gpu.NVLinkPort) bool { return p.Active })
	}) {
		return notApplicable("the GPUs have NVLink")
	}
	fix := "On a machine of your own: " + f.bootWith("iommu=pt")
	for _, name := range f.Glob("/sys/kernel/iommu_groups/*/type") {
		if t := f.File(name); strings.HasPrefix(t.Trimmed(), "DMA") {
			return warn("the IOMMU translates between GPUs without NVLink: several GPUs for one model can hang", fix, at(t, t.Trimmed()))
		}
	}
	cmdline := f.File("/proc/cmdline")
	if cmdline.State != snapshot.Present {
		return unknownText(cmdline)
	}
	words := strings.Fields(cmdline.Data)
	has := func(options ...string) bool {
		return slices.ContainsFunc(options, func(o string) bool { return slices.Contains(words, o) })
	}
	switch {
	case has("iommu=pt", "amd_iommu=off", "intel_iommu=off", "iommu=off"):
		return well("the IOMMU is off or in passthrough", at(cmdline, cmdline.Trimmed()))
	case has("intel_iommu=on", "amd_iommu=on") && len(f.List("/sys/class/iommu")) > 0:
		return warn("the IOMMU is on without passthrough: several GPUs for one model can hang", fix, at(cmdline, cmdline.Trimmed()))
	}
	return well("no IOMMU in translating mode is known")
}
