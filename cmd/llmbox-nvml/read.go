//go:build cgo && linux

package main

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// reader asks one library. Its functions are go-nvml's, which binds each of the
// library's by name when it is first called and ends the process where there is
// none: nothing is called that has not been looked up.
type reader struct {
	lib nvml.Interface
	// enter is told each call before it is made, with the GPU where there is one.
	enter func(call string)
	// has says whether the library has a function.
	has func(symbol string) bool
	// lost holds the devices that fell off the bus: each further question about one
	// would only wait for another timeout of the driver.
	lost map[int]bool
}

// call makes one call if the library has it under any of its names, and says
// whether it succeeded. Not supported is an answer, anything else is kept in errs.
// The first name is the one that errors and the parent show.
func (r *reader) call(errs errorMap, device int, names []string, f func() nvml.Return) bool {
	if r.lost[device] {
		return false
	}
	ret := r.try(device, names, f)
	switch ret {
	case nvml.SUCCESS:
		return true
	case nvml.ERROR_NOT_SUPPORTED:
	case nvml.ERROR_FUNCTION_NOT_FOUND:
		errs[names[0]] = "the library has no such function"
	default:
		errs[names[0]] = r.words(ret)
	}
	return false
}

// try is call without the keeping.
func (r *reader) try(device int, names []string, f func() nvml.Return) nvml.Return {
	found := false
	for _, name := range names {
		found = found || r.has(name)
	}
	if !found {
		return nvml.ERROR_FUNCTION_NOT_FOUND
	}
	if r.lost[device] {
		return nvml.ERROR_GPU_IS_LOST
	}
	line := names[0]
	if device != system {
		line += " " + strconv.Itoa(device)
	}
	r.enter(line)
	ret := f()
	if ret == nvml.ERROR_GPU_IS_LOST && device != system {
		r.lost[device] = true
	}
	return ret
}

// system is the device number of calls that concern no device.
const system = -1

// read fills the whole report.
func (r *reader) read(report *gpu.Report) {
	errs := errorMap{}
	defer func() { report.Errors = errs.orNil() }()

	// The library knows its own version before it has met the driver.
	var text string
	var ret nvml.Return
	if r.call(errs, system, []string{"nvmlSystemGetNVMLVersion"}, func() nvml.Return {
		text, ret = r.lib.SystemGetNVMLVersion()
		return ret
	}) {
		report.Library = libraryVersion(gpu.OneLine(text))
	}
	initNames := []string{"nvmlInit_v2", "nvmlInit"}
	if ret := r.try(system, initNames, r.lib.Init); ret != nvml.SUCCESS {
		report.NVML = r.ending(initNames[0], ret)
		return
	}
	report.Source = gpu.SourceNVML
	report.NVML.Ending = gpu.EndingOK
	// nvmlShutdown is left out: the process ends anyway, and it is one more call
	// that can hang.

	if r.call(errs, system, []string{"nvmlSystemGetDriverVersion"}, func() nvml.Return {
		text, ret = r.lib.SystemGetDriverVersion()
		return ret
	}) {
		report.Driver = gpu.OneLine(text)
	}
	var number int
	// The second form asks the driver's own CUDA library, the first knows what the
	// driver was made for.
	version, name := r.lib.SystemGetCudaDriverVersion_v2, "nvmlSystemGetCudaDriverVersion_v2"
	if !r.has(name) {
		version, name = r.lib.SystemGetCudaDriverVersion, "nvmlSystemGetCudaDriverVersion"
	}
	if r.call(errs, system, []string{name}, func() nvml.Return {
		number, ret = version()
		return ret
	}) {
		report.CUDA = fmt.Sprintf("%d.%d", number/1000, number%1000/10)
	}
	countNames := []string{"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"}
	if ret := r.try(system, countNames, func() nvml.Return {
		number, ret = r.lib.DeviceGetCount()
		return ret
	}); ret != nvml.SUCCESS {
		report.NVML = r.ending(countNames[0], ret)
		return
	}
	handles := make([]nvml.Device, number)
	lost := 0
	for i := range number {
		device := gpu.Device{Index: i}
		ret := r.try(i, []string{"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"}, func() nvml.Return {
			handles[i], ret = r.lib.DeviceGetHandleByIndex(i)
			return ret
		})
		switch ret {
		case nvml.SUCCESS:
			r.device(handles[i], &device)
		case nvml.ERROR_FUNCTION_NOT_FOUND:
			report.NVML = r.ending("nvmlDeviceGetHandleByIndex_v2", ret)
			return
		default:
			handles[i] = nil
			device.Error = r.words(ret)
			device.Lost = ret == nvml.ERROR_GPU_IS_LOST
		}
		if device.Lost {
			lost++
		}
		report.Devices = append(report.Devices, device)
	}
	if lost > 0 && lost == number {
		report.NVML = r.ending("", nvml.ERROR_GPU_IS_LOST)
	}
	report.Links = r.links(errs, handles, report.Devices)
}

// ending is the end of a report that could not go on.
func (r *reader) ending(call string, ret nvml.Return) gpu.NVMLEnding {
	e := gpu.NVMLEnding{Ending: endingOf(ret), Code: int(ret), LastCall: call}
	if ret == nvml.ERROR_FUNCTION_NOT_FOUND {
		e.Detail = "the library has no " + call
		return e
	}
	e.Detail = r.words(ret)
	return e
}

// libraryVersion takes the CUDA major version off what NVML says of itself
// ("12.550.90.07" is the library of driver 550.90.07).
func libraryVersion(text string) string {
	head, rest, ok := strings.Cut(text, ".")
	if major, err := strconv.Atoi(head); ok && err == nil && major < 100 {
		return rest
	}
	return text
}

// device reads one GPU. Each group of facts stays nil where its call failed.
func (r *reader) device(h nvml.Device, d *gpu.Device) {
	errs := errorMap{}
	call := func(f func() nvml.Return, names ...string) bool {
		return r.call(errs, d.Index, names, f)
	}
	var ret nvml.Return
	texts := []struct {
		into *string
		name string
		get  func() (string, nvml.Return)
	}{
		{&d.Name, "nvmlDeviceGetName", h.GetName},
		{&d.UUID, "nvmlDeviceGetUUID", h.GetUUID},
		{&d.Serial, "nvmlDeviceGetSerial", h.GetSerial},
		{&d.VBIOS, "nvmlDeviceGetVbiosVersion", h.GetVbiosVersion},
		{&d.GSP, "nvmlDeviceGetGspFirmwareVersion", h.GetGspFirmwareVersion},
	}
	for _, t := range texts {
		var text string
		if call(func() nvml.Return { text, ret = t.get(); return ret }, t.name) {
			*t.into = gpu.OneLine(text)
		}
	}
	var brand nvml.BrandType
	if call(func() nvml.Return { brand, ret = h.GetBrand(); return ret }, "nvmlDeviceGetBrand") {
		d.Brand = brandName(brand)
	}
	var pci nvml.PciInfo
	if call(func() nvml.Return { pci, ret = h.GetPciInfo(); return ret },
		"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo") {
		d.PCIBus = gpu.NormalBus(gpu.OneLine(cText(pci.BusId[:])))
		if d.PCIBus == "" {
			d.PCIBus = gpu.NormalBus(gpu.OneLine(cText(pci.BusIdLegacy[:])))
		}
		// The upper half is the device, the lower half the vendor.
		d.PCIDevice = fmt.Sprintf("%04X", pci.PciDeviceId>>16)
	}
	var major, minor int
	if call(func() nvml.Return { major, minor, ret = h.GetCudaComputeCapability(); return ret },
		"nvmlDeviceGetCudaComputeCapability") {
		d.ComputeMajor, d.ComputeMinor = &major, &minor
	}
	var virtual nvml.GpuVirtualizationMode
	if call(func() nvml.Return { virtual, ret = h.GetVirtualizationMode(); return ret },
		"nvmlDeviceGetVirtualizationMode") {
		d.Virtualization = virtualizationName(virtual)
	}
	if virtual == nvml.GPU_VIRTUALIZATION_MODE_VGPU {
		r.license(call, h, d)
	}
	r.memory(call, h, d)
	r.mig(errs, h, d)
	r.health(call, h, d)
	r.state(call, h, d)
	r.nvlinks(errs, h, d)
	r.fabric(errs, h, d)
	r.processes(errs, h, d)
	d.Errors = errs.orNil()
	if r.lost[d.Index] {
		d.Lost, d.Error = true, r.words(nvml.ERROR_GPU_IS_LOST)
	}
}

// caller is reader.call bound to one device.
type caller func(f func() nvml.Return, names ...string) bool

func (r *reader) license(call caller, h nvml.Device, d *gpu.Device) {
	var features nvml.GridLicensableFeatures
	var ret nvml.Return
	if !call(func() nvml.Return { features, ret = h.GetGridLicensableFeatures(); return ret },
		"nvmlDeviceGetGridLicensableFeatures_v4", "nvmlDeviceGetGridLicensableFeatures_v3",
		"nvmlDeviceGetGridLicensableFeatures_v2", "nvmlDeviceGetGridLicensableFeatures") {
		return
	}
	if features.IsGridLicenseSupported == 0 {
		return
	}
	d.License = "unlicensed"
	count := min(int(features.LicensableFeaturesCount), len(features.GridLicensableFeatures))
	for _, feature := range features.GridLicensableFeatures[:count] {
		if feature.FeatureState != 0 {
			d.License = "licensed"
		}
	}
}

func (r *reader) memory(call caller, h nvml.Device, d *gpu.Device) {
	var ret nvml.Return
	var memory nvml.Memory_v2
	// Only the second version tells what the driver keeps for itself; the first
	// counts it as used.
	if r.has("nvmlDeviceGetMemoryInfo_v2") {
		if call(func() nvml.Return { memory, ret = h.GetMemoryInfo_v2(); return ret }, "nvmlDeviceGetMemoryInfo_v2") {
			d.Memory = &gpu.Memory{
				TotalBytes: memory.Total, UsedBytes: memory.Used, FreeBytes: memory.Free, ReservedBytes: memory.Reserved,
			}
		}
	}
	if d.Memory == nil {
		var plain nvml.Memory
		if !call(func() nvml.Return { plain, ret = h.GetMemoryInfo(); return ret }, "nvmlDeviceGetMemoryInfo") {
			return
		}
		d.Memory = &gpu.Memory{TotalBytes: plain.Total, UsedBytes: plain.Used, FreeBytes: plain.Free}
	}
	var bar nvml.BAR1Memory
	if call(func() nvml.Return { bar, ret = h.GetBAR1MemoryInfo(); return ret }, "nvmlDeviceGetBAR1MemoryInfo") {
		d.Memory.BAR1Bytes = bar.Bar1Total
	}
}

func (r *reader) mig(errs errorMap, h nvml.Device, d *gpu.Device) {
	var ret nvml.Return
	var current, pending int
	if !r.call(errs, d.Index, []string{"nvmlDeviceGetMigMode"}, func() nvml.Return {
		current, pending, ret = h.GetMigMode()
		return ret
	}) {
		return
	}
	d.MIG = &gpu.MIG{Enabled: current != 0, Pending: pending != 0}
	if !d.MIG.Enabled {
		return
	}
	var count int
	if !r.call(errs, d.Index, []string{"nvmlDeviceGetMaxMigDeviceCount"}, func() nvml.Return {
		count, ret = h.GetMaxMigDeviceCount()
		return ret
	}) {
		return
	}
	for i := range count {
		names := []string{"nvmlDeviceGetMigDeviceHandleByIndex"}
		var part nvml.Device
		switch ret := r.try(d.Index, names, func() nvml.Return {
			part, ret = h.GetMigDeviceHandleByIndex(i)
			return ret
		}); ret {
		case nvml.SUCCESS:
		case nvml.ERROR_NOT_FOUND:
			// Places for partitions that were not made.
			continue
		default:
			errs[names[0]] = r.words(ret)
			return
		}
		instance := gpu.MIGInstance{}
		var text string
		if r.call(errs, d.Index, []string{"nvmlDeviceGetUUID"}, func() nvml.Return { text, ret = part.GetUUID(); return ret }) {
			instance.UUID = gpu.OneLine(text)
		}
		if r.call(errs, d.Index, []string{"nvmlDeviceGetName"}, func() nvml.Return { text, ret = part.GetName(); return ret }) {
			instance.Name = gpu.OneLine(text)
		}
		var memory nvml.Memory
		if r.call(errs, d.Index, []string{"nvmlDeviceGetMemoryInfo"}, func() nvml.Return {
			memory, ret = part.GetMemoryInfo()
			return ret
		}) {
			instance.MemoryBytes = memory.Total
		}
		d.MIG.Instances = append(d.MIG.Instances, instance)
	}
}

// health reads what wears out: ECC, remapped rows, retired pages.
func (r *reader) health(call caller, h nvml.Device, d *gpu.Device) {
	var ret nvml.Return
	var current, pending nvml.EnableState
	if call(func() nvml.Return { current, pending, ret = h.GetEccMode(); return ret }, "nvmlDeviceGetEccMode") {
		d.ECC = &gpu.ECC{Enabled: current == nvml.FEATURE_ENABLED, Pending: pending == nvml.FEATURE_ENABLED}
	}
	if d.ECC != nil && d.ECC.Enabled {
		for _, counter := range []struct {
			kind nvml.EccCounterType
			into **uint64
		}{{nvml.VOLATILE_ECC, &d.ECC.UncorrectedVolatile}, {nvml.AGGREGATE_ECC, &d.ECC.UncorrectedAggregate}} {
			var count uint64
			if call(func() nvml.Return {
				count, ret = h.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, counter.kind)
				return ret
			}, "nvmlDeviceGetTotalEccErrors") {
				*counter.into = &count
			}
		}
	}
	var remap gpu.Remap
	if call(func() nvml.Return {
		remap.Correctable, remap.Uncorrectable, remap.Pending, remap.Failure, ret = h.GetRemappedRows()
		return ret
	}, "nvmlDeviceGetRemappedRows") {
		d.Remap = &remap
	}
	var single, double []uint64
	if call(func() nvml.Return {
		single, ret = h.GetRetiredPages(nvml.PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS)
		return ret
	}, "nvmlDeviceGetRetiredPages") && call(func() nvml.Return {
		double, ret = h.GetRetiredPages(nvml.PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
		return ret
	}, "nvmlDeviceGetRetiredPages") {
		d.Retired = &gpu.Retired{SingleBit: len(single), DoubleBit: len(double)}
		var waiting nvml.EnableState
		if call(func() nvml.Return { waiting, ret = h.GetRetiredPagesPendingStatus(); return ret },
			"nvmlDeviceGetRetiredPagesPendingStatus") {
			d.Retired.Pending = waiting == nvml.FEATURE_ENABLED
		}
	}
}

// state reads what changes from minute to minute, and how the GPU is set.
func (r *reader) state(call caller, h nvml.Device, d *gpu.Device) {
	var ret nvml.Return
	var mask uint64
	// The same answer under its new and its old name.
	reasons, name := h.GetCurrentClocksEventReasons, "nvmlDeviceGetCurrentClocksEventReasons"
	if !r.has(name) {
		reasons, name = h.GetCurrentClocksThrottleReasons, "nvmlDeviceGetCurrentClocksThrottleReasons"
	}
	if call(func() nvml.Return { mask, ret = reasons(); return ret }, name) {
		d.Throttle = throttleNames(mask)
	}

	var now uint32
	if call(func() nvml.Return { now, ret = h.GetTemperature(nvml.TEMPERATURE_GPU); return ret }, "nvmlDeviceGetTemperature") {
		d.Temperature = &gpu.Temperature{Now: int(now)}
		for _, threshold := range []struct {
			kind nvml.TemperatureThresholds
			into **int
		}{
			{nvml.TEMPERATURE_THRESHOLD_SLOWDOWN, &d.Temperature.Slowdown},
			{nvml.TEMPERATURE_THRESHOLD_SHUTDOWN, &d.Temperature.Shutdown},
		} {
			var value uint32
			if call(func() nvml.Return { value, ret = h.GetTemperatureThreshold(threshold.kind); return ret },
				"nvmlDeviceGetTemperatureThreshold") {
				celsius := int(value)
				*threshold.into = &celsius
			}
		}
	}

	var power gpu.Power
	for _, p := range []struct {
		name string
		get  func() (uint32, nvml.Return)
		into **float64
	}{
		{"nvmlDeviceGetPowerUsage", h.GetPowerUsage, &power.Now},
		{"nvmlDeviceGetEnforcedPowerLimit", h.GetEnforcedPowerLimit, &power.Limit},
	} {
		var milliwatts uint32
		if call(func() nvml.Return { milliwatts, ret = p.get(); return ret }, p.name) {
			watts := float64(milliwatts) / 1000
			*p.into = &watts
		}
	}
	if power.Now != nil || power.Limit != nil {
		d.PowerWatts = &power
	}

	var pcie gpu.PCIe
	read := false
	for _, p := range []struct {
		name string
		get  func() (int, nvml.Return)
		into *int
	}{
		{"nvmlDeviceGetCurrPcieLinkGeneration", h.GetCurrPcieLinkGeneration, &pcie.Generation},
		{"nvmlDeviceGetMaxPcieLinkGeneration", h.GetMaxPcieLinkGeneration, &pcie.MaxGeneration},
		{"nvmlDeviceGetCurrPcieLinkWidth", h.GetCurrPcieLinkWidth, &pcie.Width},
		{"nvmlDeviceGetMaxPcieLinkWidth", h.GetMaxPcieLinkWidth, &pcie.MaxWidth},
		{"nvmlDeviceGetPcieReplayCounter", h.GetPcieReplayCounter, &pcie.Replays},
	} {
		var value int
		if call(func() nvml.Return { value, ret = p.get(); return ret }, p.name) {
			*p.into, read = value, true
		}
	}
	if read {
		d.PCIe = &pcie
	}

	var persistence nvml.EnableState
	if call(func() nvml.Return { persistence, ret = h.GetPersistenceMode(); return ret }, "nvmlDeviceGetPersistenceMode") {
		on := persistence == nvml.FEATURE_ENABLED
		d.Persistence = &on
	}
	var mode nvml.ComputeMode
	if call(func() nvml.Return { mode, ret = h.GetComputeMode(); return ret }, "nvmlDeviceGetComputeMode") {
		d.ComputeMode = computeModeName(mode)
	}
	var nodes []uint
	// Room for as many nodes as NVML itself provides for. nvmlDeviceGetNumaNodeId is
	// another thing: the node that the GPU's own memory forms on a coherent system.
	if call(func() nvml.Return { nodes, ret = h.GetMemoryAffinity(64, nvml.AFFINITY_SCOPE_NODE); return ret },
		"nvmlDeviceGetMemoryAffinity") {
		for word, set := range nodes {
			if set != 0 {
				node := word*bits.UintSize + bits.TrailingZeros(set)
				d.NUMANode = &node
				break
			}
		}
	}
}

func (r *reader) nvlinks(errs errorMap, h nvml.Device, d *gpu.Device) {
	var ret nvml.Return
	for link := range nvml.NVLINK_MAX_LINKS {
		if r.lost[d.Index] {
			return
		}
		names := []string{"nvmlDeviceGetNvLinkState"}
		var state nvml.EnableState
		switch ret := r.try(d.Index, names, func() nvml.Return { state, ret = h.GetNvLinkState(link); return ret }); ret {
		case nvml.SUCCESS:
		case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_FUNCTION_NOT_FOUND:
			// Past the last link, or a GPU without any.
			return
		default:
			errs[names[0]] = r.words(ret)
			return
		}
		port := gpu.NVLinkPort{Link: link, Active: state == nvml.FEATURE_ENABLED}
		if port.Active {
			var version uint32
			if r.call(errs, d.Index, []string{"nvmlDeviceGetNvLinkVersion"}, func() nvml.Return {
				version, ret = h.GetNvLinkVersion(link)
				return ret
			}) {
				port.Version = int(version)
			}
		}
		d.NVLinks = append(d.NVLinks, port)
	}
}

func (r *reader) fabric(errs errorMap, h nvml.Device, d *gpu.Device) {
	var ret nvml.Return
	fill := func(state uint8, status, clique uint32) {
		d.Fabric = &gpu.Fabric{State: fabricName(state), Clique: int(clique)}
		// The status means something only once probing has ended.
		if state == nvml.GPU_FABRIC_STATE_COMPLETED {
			d.Fabric.Status = r.words(nvml.Return(status))
		}
	}
	if names := []string{"nvmlDeviceGetGpuFabricInfoV"}; r.has(names[0]) {
		var info nvml.GpuFabricInfo_v2
		if ret := r.try(d.Index, names, func() nvml.Return { info, ret = h.GetGpuFabricInfoV().V2(); return ret }); ret == nvml.SUCCESS {
			fill(info.State, info.Status, info.CliqueId)
			return
		}
	}
	var info nvml.GpuFabricInfo
	// The plain form came with Hopper; a library without it serves no such GPU.
	if !r.has("nvmlDeviceGetGpuFabricInfo") {
		return
	}
	if r.call(errs, d.Index, []string{"nvmlDeviceGetGpuFabricInfo"}, func() nvml.Return { info, ret = h.GetGpuFabricInfo(); return ret }) {
		fill(info.State, info.Status, info.CliqueId)
	}
}

func (r *reader) processes(errs errorMap, h nvml.Device, d *gpu.Device) {
	seen := map[uint32]bool{}
	for _, list := range []struct {
		kind string
		stem string
		get  func() ([]nvml.ProcessInfo, nvml.Return)
	}{
		{"compute", "nvmlDeviceGetComputeRunningProcesses", h.GetComputeRunningProcesses},
		// Clients of the multi-process service compute too, but are listed apart.
		{"compute", "nvmlDeviceGetMPSComputeRunningProcesses", h.GetMPSComputeRunningProcesses},
		{"graphics", "nvmlDeviceGetGraphicsRunningProcesses", h.GetGraphicsRunningProcesses},
	} {
		var found []nvml.ProcessInfo
		var ret nvml.Return
		if !r.call(errs, d.Index, []string{list.stem + "_v3", list.stem + "_v2", list.stem}, func() nvml.Return {
			found, ret = list.get()
			return ret
		}) {
			continue
		}
		for _, p := range found {
			if seen[p.Pid] {
				continue
			}
			seen[p.Pid] = true
			process := gpu.Process{PID: int(p.Pid), Kind: list.kind}
			// All ones is NVML's "not available".
			if p.UsedGpuMemory != ^uint64(0) {
				process.UsedBytes = &p.UsedGpuMemory
			}
			var name string
			// A process that is gone by now, or of another PID namespace, has no name.
			if r.try(d.Index, []string{"nvmlSystemGetProcessName"}, func() nvml.Return {
				name, ret = r.lib.SystemGetProcessName(process.PID)
				return ret
			}) == nvml.SUCCESS {
				process.Name = gpu.ProcessName(name)
			}
			d.Processes = append(d.Processes, process)
		}
	}
}

// links looks at each pair of devices.
func (r *reader) links(errs errorMap, handles []nvml.Device, devices []gpu.Device) []gpu.Link {
	var links []gpu.Link
	remotes := make([]map[string]int, len(handles))
	for i, h := range handles {
		if h != nil && len(handles) > 1 && !r.lost[i] {
			remotes[i] = r.remotes(errs, h, devices[i])
		}
	}
	for a := range handles {
		for b := a + 1; b < len(handles); b++ {
			if handles[a] == nil || handles[b] == nil || r.lost[a] || r.lost[b] {
				continue
			}
			links = append(links, r.link(errs, handles, devices, remotes, a, b))
		}
	}
	return links
}

// viaSwitch is the place that links through an NVSwitch are counted under.
const viaSwitch = "switch"

// remotes counts the active links of a device by the bus of who is at the other end.
func (r *reader) remotes(errs errorMap, h nvml.Device, d gpu.Device) map[string]int {
	counts := map[string]int{}
	for _, port := range d.NVLinks {
		if !port.Active {
			continue
		}
		var kind nvml.IntNvLinkDeviceType
		var ret nvml.Return
		if r.try(d.Index, []string{"nvmlDeviceGetNvLinkRemoteDeviceType"}, func() nvml.Return {
			kind, ret = h.GetNvLinkRemoteDeviceType(port.Link)
			return ret
		}) == nvml.SUCCESS && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH {
			counts[viaSwitch]++
			continue
		}
		var pci nvml.PciInfo
		if r.call(errs, d.Index, []string{"nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemotePciInfo"}, func() nvml.Return {
			pci, ret = h.GetNvLinkRemotePciInfo(port.Link)
			return ret
		}) {
			counts[gpu.NormalBus(gpu.OneLine(cText(pci.BusId[:])))]++
		}
	}
	return counts
}

func (r *reader) link(errs errorMap, handles []nvml.Device, devices []gpu.Device, remotes []map[string]int, a, b int) gpu.Link {
	link := gpu.Link{A: a, B: b}
	var ret nvml.Return
	var level nvml.GpuTopologyLevel
	if r.call(errs, a, []string{"nvmlDeviceGetTopologyCommonAncestor"}, func() nvml.Return {
		level, ret = handles[a].GetTopologyCommonAncestor(handles[b])
		return ret
	}) {
		link.Path = pathName(level)
	}
	var status nvml.GpuP2PStatus
	p2p := []string{"nvmlDeviceGetP2PStatus"}
	if r.call(errs, a, p2p, func() nvml.Return {
		status, ret = handles[a].GetP2PStatus(handles[b], nvml.P2P_CAPS_INDEX_READ)
		return ret
	}) {
		link.P2P = p2pName(status)
	}
	count := remotes[a][devices[b].PCIBus]
	if count == 0 {
		count = min(remotes[a][viaSwitch], remotes[b][viaSwitch])
	}
	if count == 0 {
		return link
	}
	// Links that are up do not yet carry anything: on a switched board the fabric
	// has to be set up first, and the driver knows whether it is.
	if r.call(errs, a, p2p, func() nvml.Return {
		status, ret = handles[a].GetP2PStatus(handles[b], nvml.P2P_CAPS_INDEX_NVLINK)
		return ret
	}) && status != nvml.P2P_STATUS_OK {
		return link
	}
	link.Path, link.NVLinks = "nvlink", count
	return link
}
