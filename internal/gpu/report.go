package gpu

// ReportSchema is the version of the document that the NVML child writes and a
// snapshot keeps as gpu.json. It grows by one when a field changes its meaning.
const ReportSchema = 1

// Source says who spoke.
type Source string

// The sources, from the one that knows most to the one that knows least.
const (
	SourceNVML Source = "nvml"
	SourceSMI  Source = "nvidia-smi"
	// SourceProc is /proc/driver/nvidia together with /sys/bus/pci.
	SourceProc Source = "proc"
	SourcePCI  Source = "pci"
	SourceNone Source = "none"
)

// Ending says how the question to NVML ended.
type Ending string

// The endings. Every one but EndingOK is a different thing to mend.
const (
	EndingOK              Ending = "ok"
	EndingLibraryNotFound Ending = "library_not_found"
	EndingVersionMismatch Ending = "version_mismatch"
	EndingDriverNotLoaded Ending = "driver_not_loaded"
	EndingNoPermission    Ending = "no_permission"
	EndingGPULost         Ending = "gpu_lost"
	// EndingTimeout means that NVML gave no answer within the whole deadline: a hang.
	EndingTimeout Ending = "timeout"
	// EndingKilled means that the child died from a signal, named in Signal.
	EndingKilled Ending = "killed"
	// EndingNotStarted means that the child could not be run here, such as for want
	// of a C library.
	EndingNotStarted Ending = "not_started"
	// EndingHelperAbsent means that this build carries no child.
	EndingHelperAbsent Ending = "helper_absent"
	// EndingMissingSymbol means that the library lacks a function that even the
	// oldest supported one has.
	EndingMissingSymbol Ending = "missing_symbol"
	// EndingBadAnswer means that what the child wrote could not be read.
	EndingBadAnswer Ending = "bad_answer"
	// EndingError is any other NVML error, named in Detail.
	EndingError Ending = "error"
)

// Report is all that is known about the GPUs of a machine, and how it is known.
type Report struct {
	Schema int    `json:"schema"`
	Source Source `json:"source"`
	// NVML says how the question to NVML ended, whoever spoke in the end.
	NVML NVMLEnding `json:"nvml"`
	// Driver is the version of the kernel driver, such as "550.90.07".
	Driver string `json:"driver,omitempty"`
	// Library is the version of the user space library that answered.
	Library string `json:"library,omitempty"`
	// CUDA is the newest CUDA version that the driver serves, such as "12.4".
	CUDA    string   `json:"cuda,omitempty"`
	Devices []Device `json:"devices"`
	// Links lists each pair of devices once.
	Links []Link `json:"links,omitempty"`
	// Errors maps a call that failed to NVML's words for it; not-supported is left out.
	// Where others were asked instead, it also says why they could not tell.
	Errors map[string]string `json:"errors,omitempty"`
}

// NVMLEnding is how the child ended.
type NVMLEnding struct {
	Ending Ending `json:"ending"`
	// Code is NVML's return code, 0 for success.
	Code int `json:"code,omitempty"`
	// Detail is one line: NVML's own words, the loader's or the kernel's.
	Detail string `json:"detail,omitempty"`
	// Signal is the name of the signal that killed the child, such as "SIGSEGV".
	Signal    string `json:"signal,omitempty"`
	ElapsedMS int64  `json:"elapsed_ms"`
	// Slow is set when there was no answer within the first five seconds.
	Slow bool `json:"slow,omitempty"`
	// LastCall is the NVML call that failed, or in which the child hung or died.
	LastCall string `json:"last_call,omitempty"`
}

// Device is one GPU. A pointer is nil where nobody could say; a zero is a zero.
type Device struct {
	// Index is NVML's, and the place in the list. Devices that are on the PCI bus
	// but that NVML does not list come last.
	Index int `json:"index"`
	// Error is set when the device itself could not be read; the other fields then
	// hold what was known before.
	Error  string `json:"error,omitempty"`
	Lost   bool   `json:"lost,omitempty"`
	Name   string `json:"name,omitempty"`
	UUID   string `json:"uuid,omitempty"`
	Brand  string `json:"brand,omitempty"`
	Serial string `json:"serial,omitempty"`
	VBIOS  string `json:"vbios,omitempty"`
	// GSP is the version of the firmware on the GPU's system processor; empty where
	// it is not used.
	GSP string `json:"gsp_firmware,omitempty"`
	// PCIBus is the address as sysfs writes it, such as "0000:17:00.0".
	PCIBus string `json:"pci_bus,omitempty"`
	// PCIDevice is the device id, four upper-case hex digits.
	PCIDevice string `json:"pci_device,omitempty"`
	// KernelDriver is the kernel driver bound to the device, such as "nvidia",
	// "nouveau" or "vfio-pci"; empty for none or where sysfs could not be read.
	KernelDriver string `json:"kernel_driver,omitempty"`
	ComputeMajor *int   `json:"compute_major,omitempty"`
	ComputeMinor *int   `json:"compute_minor,omitempty"`
	// Virtualization is "none", "passthrough", "vgpu" or "host_vgpu".
	Virtualization string `json:"virtualization,omitempty"`
	// License is the state of a vGPU's licence, "licensed" or "unlicensed".
	License string `json:"license,omitempty"`

	Memory  *Memory  `json:"memory,omitempty"`
	MIG     *MIG     `json:"mig,omitempty"`
	ECC     *ECC     `json:"ecc,omitempty"`
	Remap   *Remap   `json:"remapped_rows,omitempty"`
	Retired *Retired `json:"retired_pages,omitempty"`
	// Throttle names the bits of NVML's clocks event reasons, such as "gpu_idle",
	// "sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown",
	// "hw_power_brake_slowdown"; not every one of them is a fault.
	Throttle    []string     `json:"throttle_reasons,omitempty"`
	Temperature *Temperature `json:"temperature_celsius,omitempty"`
	PowerWatts  *Power       `json:"power_watts,omitempty"`
	PCIe        *PCIe        `json:"pcie,omitempty"`
	NVLinks     []NVLinkPort `json:"nvlinks,omitempty"`
	Fabric      *Fabric      `json:"fabric,omitempty"`
	Persistence *bool        `json:"persistence,omitempty"`
	// ComputeMode is "default", "exclusive_thread", "prohibited" or "exclusive_process".
	ComputeMode string `json:"compute_mode,omitempty"`
	// NUMANode is the node of the host's memory nearest to the GPU.
	NUMANode  *int      `json:"numa_node,omitempty"`
	Processes []Process `json:"processes,omitempty"`
	// Errors maps a call that failed to NVML's words; not-supported is left out.
	Errors map[string]string `json:"errors,omitempty"`
}

// Memory is in bytes.
type Memory struct {
	TotalBytes    uint64 `json:"total_bytes"`
	UsedBytes     uint64 `json:"used_bytes"`
	FreeBytes     uint64 `json:"free_bytes"`
	ReservedBytes uint64 `json:"reserved_bytes"`
	BAR1Bytes     uint64 `json:"bar1_bytes,omitempty"`
}

// MIG is the partitioning of one GPU.
type MIG struct {
	Enabled bool `json:"enabled"`
	// Pending is the mode after the next reset.
	Pending   bool          `json:"pending"`
	Instances []MIGInstance `json:"instances,omitempty"`
}

// MIGInstance is one slice that a pod can get.
type MIGInstance struct {
	UUID        string `json:"uuid,omitempty"`
	Name        string `json:"name,omitempty"`
	MemoryBytes uint64 `json:"memory_bytes,omitempty"`
}

// ECC holds the mode and the uncorrected errors.
type ECC struct {
	Enabled              bool    `json:"enabled"`
	Pending              bool    `json:"pending"`
	UncorrectedVolatile  *uint64 `json:"uncorrected_volatile,omitempty"`
	UncorrectedAggregate *uint64 `json:"uncorrected_aggregate,omitempty"`
}

// Remap is the state of row remapping, Ampere and newer.
type Remap struct {
	Correctable   int  `json:"correctable"`
	Uncorrectable int  `json:"uncorrectable"`
	Pending       bool `json:"pending"`
	Failure       bool `json:"failure"`
}

// Retired is the state of page retirement, before Ampere.
type Retired struct {
	SingleBit int  `json:"single_bit"`
	DoubleBit int  `json:"double_bit"`
	Pending   bool `json:"pending"`
}

// Temperature is in degrees Celsius.
type Temperature struct {
	Now      int  `json:"now"`
	Slowdown *int `json:"slowdown,omitempty"`
	Shutdown *int `json:"shutdown,omitempty"`
}

// Power is in watts.
type Power struct {
	Now   *float64 `json:"now,omitempty"`
	Limit *float64 `json:"limit,omitempty"`
}

// PCIe is the link as it is now and as device and slot allow.
type PCIe struct {
	Generation    int `json:"generation"`
	MaxGeneration int `json:"max_generation"`
	Width         int `json:"width"`
	MaxWidth      int `json:"max_width"`
	Replays       int `json:"replays,omitempty"`
}

// NVLinkPort is one NVLink of a GPU.
type NVLinkPort struct {
	Link    int  `json:"link"`
	Active  bool `json:"active"`
	Version int  `json:"version,omitempty"`
}

// Fabric is the state of the NVSwitch fabric: "not_supported", "not_started",
// "in_progress" or "completed". Status is set once it is completed, and is NVML's word
// for how: "Success" or an error.
type Fabric struct {
	State  string `json:"state"`
	Status string `json:"status,omitempty"`
	Clique int    `json:"clique,omitempty"`
}

// Process is one process that holds memory of a GPU.
type Process struct {
	PID  int    `json:"pid"`
	Name string `json:"name,omitempty"`
	// UsedBytes is nil where the driver does not say (containers, MIG).
	UsedBytes *uint64 `json:"used_bytes,omitempty"`
	// Kind is "compute" or "graphics".
	Kind string `json:"kind"`
}

// Link is how two GPUs reach each other: A and B are indices, Path is "nvlink",
// "pix", "pxb", "phb", "node" or "sys".
type Link struct {
	A    int    `json:"a"`
	B    int    `json:"b"`
	Path string `json:"path"`
	// NVLinks is the number of active links between the two.
	NVLinks int `json:"nvlinks,omitempty"`
	// P2P is "ok" or NVML's reason against it.
	P2P string `json:"p2p,omitempty"`
}
