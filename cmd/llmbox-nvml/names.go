//go:build cgo && linux

package main

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// cText is the text of a C character array.
func cText[T int8 | uint8](array []T) string {
	text := make([]byte, 0, len(array))
	for _, c := range array {
		if c == 0 {
			break
		}
		text = append(text, byte(c))
	}
	return string(text)
}

// brandName is the brand as nvidia-smi writes it.
func brandName(brand nvml.BrandType) string {
	names := map[nvml.BrandType]string{
		nvml.BRAND_QUADRO: "Quadro", nvml.BRAND_TESLA: "Tesla", nvml.BRAND_NVS: "NVS", nvml.BRAND_GRID: "GRID",
		nvml.BRAND_GEFORCE: "GeForce", nvml.BRAND_TITAN: "Titan", nvml.BRAND_NVIDIA_VAPPS: "NVIDIA Virtual Applications",
		nvml.BRAND_NVIDIA_VPC: "NVIDIA Virtual PC", nvml.BRAND_NVIDIA_VCS: "NVIDIA Virtual Compute Server",
		nvml.BRAND_NVIDIA_VWS: "NVIDIA RTX Virtual Workstation", nvml.BRAND_NVIDIA_CLOUD_GAMING: "NVIDIA Cloud Gaming",
		nvml.BRAND_QUADRO_RTX: "Quadro RTX", nvml.BRAND_NVIDIA_RTX: "NVIDIA RTX", nvml.BRAND_NVIDIA: "NVIDIA",
		nvml.BRAND_GEFORCE_RTX: "GeForce RTX", nvml.BRAND_TITAN_RTX: "Titan RTX",
	}
	return names[brand]
}

func virtualizationName(mode nvml.GpuVirtualizationMode) string {
	switch mode {
	case nvml.GPU_VIRTUALIZATION_MODE_NONE:
		return "none"
	case nvml.GPU_VIRTUALIZATION_MODE_PASSTHROUGH:
		return "passthrough"
	case nvml.GPU_VIRTUALIZATION_MODE_VGPU:
		return "vgpu"
	case nvml.GPU_VIRTUALIZATION_MODE_HOST_VGPU, nvml.GPU_VIRTUALIZATION_MODE_HOST_VSGA:
		return "host_vgpu"
	}
	return ""
}

func computeModeName(mode nvml.ComputeMode) string {
	switch mode {
	case nvml.COMPUTEMODE_DEFAULT:
		return "default"
	case nvml.COMPUTEMODE_EXCLUSIVE_THREAD:
		return "exclusive_thread"
	case nvml.COMPUTEMODE_PROHIBITED:
		return "prohibited"
	case nvml.COMPUTEMODE_EXCLUSIVE_PROCESS:
		return "exclusive_process"
	}
	return fmt.Sprintf("mode_%d", mode)
}

func fabricName(state uint8) string {
	switch state {
	case nvml.GPU_FABRIC_STATE_NOT_SUPPORTED:
		return "not_supported"
	case nvml.GPU_FABRIC_STATE_NOT_STARTED:
		return "not_started"
	case nvml.GPU_FABRIC_STATE_IN_PROGRESS:
		return "in_progress"
	case nvml.GPU_FABRIC_STATE_COMPLETED:
		return "completed"
	}
	return fmt.Sprintf("state_%d", state)
}

// throttleNames lists the bits that are set, lowest first. Bits that this program
// does not know are kept as numbers.
func throttleNames(mask uint64) []string {
	known := []struct {
		bit  uint64
		name string
	}{
		{nvml.ClocksEventReasonGpuIdle, "gpu_idle"},
		{nvml.ClocksEventReasonApplicationsClocksSetting, "applications_clocks_setting"},
		{nvml.ClocksEventReasonSwPowerCap, "sw_power_cap"},
		{nvml.ClocksThrottleReasonHwSlowdown, "hw_slowdown"},
		{nvml.ClocksEventReasonSyncBoost, "sync_boost"},
		{nvml.ClocksEventReasonSwThermalSlowdown, "sw_thermal_slowdown"},
		{nvml.ClocksThrottleReasonHwThermalSlowdown, "hw_thermal_slowdown"},
		{nvml.ClocksThrottleReasonHwPowerBrakeSlowdown, "hw_power_brake_slowdown"},
		{nvml.ClocksEventReasonDisplayClockSetting, "display_clock_setting"},
		{nvml.ClocksEventReasonBoardLimit, "board_limit"},
		{nvml.ClocksEventReasonReliability, "reliability"},
	}
	var names []string
	for _, k := range known {
		if mask&k.bit != 0 {
			names = append(names, k.name)
			mask &^= k.bit
		}
	}
	if mask != 0 {
		names = append(names, fmt.Sprintf("0x%x", mask))
	}
	return names
}

func pathName(level nvml.GpuTopologyLevel) string {
	switch level {
	case nvml.TOPOLOGY_INTERNAL, nvml.TOPOLOGY_SINGLE:
		return "pix"
	case nvml.TOPOLOGY_MULTIPLE:
		return "pxb"
	case nvml.TOPOLOGY_HOSTBRIDGE:
		return "phb"
	case nvml.TOPOLOGY_NODE:
		return "node"
	}
	return "sys"
}

func p2pName(status nvml.GpuP2PStatus) string {
	switch status {
	case nvml.P2P_STATUS_OK:
		return "ok"
	case nvml.P2P_STATUS_CHIPSET_NOT_SUPPORTED:
		return "chipset_not_supported"
	case nvml.P2P_STATUS_GPU_NOT_SUPPORTED:
		return "gpu_not_supported"
	case nvml.P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED:
		return "topology_not_supported"
	case nvml.P2P_STATUS_DISABLED_BY_REGKEY:
		return "disabled_by_regkey"
	case nvml.P2P_STATUS_NOT_SUPPORTED:
		return "not_supported"
	}
	return "unknown"
}
