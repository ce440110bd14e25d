// Package gpu holds what llmbox knows about NVIDIA GPUs as devices: the table of
// products with their memory, compute capability and links.
//
// It must not know what runs on a GPU (package model does), must not judge
// (package preflight does) and must not import go-nvml: that needs cgo and
// dlopen, and the main binary is static. What asks NVML is a child program.
package gpu

import (
	"strconv"
	"strings"
)

// NVLink says how GPUs of one product reach each other within a machine.
const (
	// NVLinkNone: PCIe only.
	NVLinkNone = "none"
	// NVLinkBridge: pairs joined by a bridge that may or may not be fitted.
	NVLinkBridge = "bridge"
	// NVLinkSwitch: all GPUs of the baseboard joined by NVLink.
	NVLinkSwitch = "switch"
)

// Product is one GPU model as sold. Facts read from a device win over this
// table; it serves where no driver answers: rehearsals, a user's statement, a
// PCI id on a machine without a driver.
type Product struct {
	// Key is the short name a person types, such as "a100-80".
	Key string
	// Name is the product name as NVML and nvidia-smi report it.
	Name string
	// MemoryMiB is the total that nvidia-smi reports, with ECC as shipped.
	MemoryMiB int64
	// ComputeMajor and ComputeMinor are the CUDA compute capability.
	ComputeMajor, ComputeMinor int
	// NVLink is one of NVLinkNone, NVLinkBridge, NVLinkSwitch.
	NVLink string
	// PCIDeviceID is the device id under vendor 10DE, four upper-case hex digits.
	PCIDeviceID string
	// Source names where the row's figures come from.
	Source string
}

// LabelValue is the product as GPU feature discovery writes it into the node
// label nvidia.com/gpu.product: the name with dashes for spaces.
func (p Product) LabelValue() string {
	return strings.Join(strings.Fields(p.Name), "-")
}

// ComputeCapability is the capability as people write it, such as "8.6".
func (p Product) ComputeCapability() string {
	return strconv.Itoa(p.ComputeMajor) + "." + strconv.Itoa(p.ComputeMinor)
}

// Family is the architecture as GPU feature discovery writes it into the node
// label nvidia.com/gpu.family; "undefined" where the capability is not known.
func (p Product) Family() string {
	switch {
	case p.ComputeMajor == 7 && p.ComputeMinor >= 5:
		return "turing"
	case p.ComputeMajor == 8 && p.ComputeMinor < 9:
		return "ampere"
	case p.ComputeMajor == 8:
		return "ada-lovelace"
	case p.ComputeMajor == 9:
		return "hopper"
	case p.ComputeMajor == 10 || p.ComputeMajor == 12:
		return "blackwell"
	}
	return "undefined"
}

// Sources used by more than one row. Names and PCI ids stand in the table of
// supported GPUs of the open kernel modules, memory is what nvidia-smi prints as
// the total, compute capabilities are NVIDIA's own list.
const (
	pciSource     = "name, PCI id: github.com/NVIDIA/open-gpu-kernel-modules README.md (595.45.04)"
	memorySource  = "memory: total in public nvidia-smi output of this product"
	computeSource = "compute capability: developer.nvidia.com/cuda-gpus"
	rowSource     = pciSource + "; " + memorySource + "; " + computeSource
	// Not seen in any output: the size as sold less two in a hundred, so that it errs low.
	nominalSource = pciSource + "; memory: 98 % of the size as sold; " + computeSource
	// Public start-up logs of vLLM show 121.69 GiB to CUDA; nvidia-smi prints none.
	unifiedSource = pciSource + "; memory: CUDA's total in public logs, shared with the CPU; " + computeSource
)

// Products returns the table, in the order in which it is shown.
func Products() []Product {
	return []Product{
		{Key: "a10", Name: "NVIDIA A10", MemoryMiB: 23028, ComputeMajor: 8, ComputeMinor: 6, NVLink: NVLinkNone, PCIDeviceID: "2236", Source: rowSource},
		{Key: "a10g", Name: "NVIDIA A10G", MemoryMiB: 23028, ComputeMajor: 8, ComputeMinor: 6, NVLink: NVLinkNone, PCIDeviceID: "2237", Source: rowSource},
		{Key: "l4", Name: "NVIDIA L4", MemoryMiB: 23034, ComputeMajor: 8, ComputeMinor: 9, NVLink: NVLinkNone, PCIDeviceID: "27B8", Source: rowSource},
		{Key: "a30", Name: "NVIDIA A30", MemoryMiB: 24576, ComputeMajor: 8, ComputeMinor: 0, NVLink: NVLinkBridge, PCIDeviceID: "20B7", Source: rowSource},
		{Key: "rtx-4090", Name: "NVIDIA GeForce RTX 4090", MemoryMiB: 24564, ComputeMajor: 8, ComputeMinor: 9, NVLink: NVLinkNone, PCIDeviceID: "2684", Source: rowSource},
		{Key: "rtx-5090", Name: "NVIDIA GeForce RTX 5090", MemoryMiB: 32607, ComputeMajor: 12, ComputeMinor: 0, NVLink: NVLinkNone, PCIDeviceID: "2B85", Source: rowSource},
		{Key: "a100-40", Name: "NVIDIA A100-SXM4-40GB", MemoryMiB: 40960, ComputeMajor: 8, ComputeMinor: 0, NVLink: NVLinkSwitch, PCIDeviceID: "20B0", Source: rowSource},
		{Key: "a40", Name: "NVIDIA A40", MemoryMiB: 46068, ComputeMajor: 8, ComputeMinor: 6, NVLink: NVLinkBridge, PCIDeviceID: "2235", Source: rowSource},
		{Key: "l40s", Name: "NVIDIA L40S", MemoryMiB: 46068, ComputeMajor: 8, ComputeMinor: 9, NVLink: NVLinkNone, PCIDeviceID: "26B9", Source: rowSource},
		{Key: "a100-80", Name: "NVIDIA A100-SXM4-80GB", MemoryMiB: 81920, ComputeMajor: 8, ComputeMinor: 0, NVLink: NVLinkSwitch, PCIDeviceID: "20B2", Source: rowSource},
		{Key: "h100", Name: "NVIDIA H100 80GB HBM3", MemoryMiB: 81559, ComputeMajor: 9, ComputeMinor: 0, NVLink: NVLinkSwitch, PCIDeviceID: "2330", Source: rowSource},
		{Key: "h100-pcie", Name: "NVIDIA H100 PCIe", MemoryMiB: 81559, ComputeMajor: 9, ComputeMinor: 0, NVLink: NVLinkBridge, PCIDeviceID: "2331", Source: rowSource},
		{Key: "rtx-pro-6000", Name: "NVIDIA RTX PRO 6000 Blackwell Server Edition", MemoryMiB: 97887, ComputeMajor: 12, ComputeMinor: 0, NVLink: NVLinkNone, PCIDeviceID: "2BB5", Source: rowSource},
		{Key: "gh200", Name: "NVIDIA GH200 480GB", MemoryMiB: 97871, ComputeMajor: 9, ComputeMinor: 0, NVLink: NVLinkNone, PCIDeviceID: "2342", Source: rowSource},
		{Key: "h200", Name: "NVIDIA H200", MemoryMiB: 143771, ComputeMajor: 9, ComputeMinor: 0, NVLink: NVLinkSwitch, PCIDeviceID: "2335", Source: rowSource},
		{Key: "b200", Name: "NVIDIA B200", MemoryMiB: 183359, ComputeMajor: 10, ComputeMinor: 0, NVLink: NVLinkSwitch, PCIDeviceID: "2901", Source: rowSource},
		{Key: "a2", Name: "NVIDIA A2", MemoryMiB: 15356, ComputeMajor: 8, ComputeMinor: 6, NVLink: NVLinkNone, PCIDeviceID: "25B6", Source: rowSource},
		{Key: "rtx-3090", Name: "NVIDIA GeForce RTX 3090", MemoryMiB: 24576, ComputeMajor: 8, ComputeMinor: 6, NVLink: NVLinkBridge, PCIDeviceID: "2204", Source: rowSource},
		{Key: "rtx-a6000", Name: "NVIDIA RTX A6000", MemoryMiB: 49140, ComputeMajor: 8, ComputeMinor: 6, NVLink: NVLinkBridge, PCIDeviceID: "2230", Source: rowSource},
		{Key: "a100-40-pcie", Name: "NVIDIA A100-PCIE-40GB", MemoryMiB: 40960, ComputeMajor: 8, ComputeMinor: 0, NVLink: NVLinkBridge, PCIDeviceID: "20F1", Source: rowSource},
		{Key: "a100-80-pcie", Name: "NVIDIA A100 80GB PCIe", MemoryMiB: 81920, ComputeMajor: 8, ComputeMinor: 0, NVLink: NVLinkBridge, PCIDeviceID: "20B5", Source: rowSource},
		{Key: "l40", Name: "NVIDIA L40", MemoryMiB: 46068, ComputeMajor: 8, ComputeMinor: 9, NVLink: NVLinkNone, PCIDeviceID: "26B5", Source: rowSource},
		{Key: "rtx-6000-ada", Name: "NVIDIA RTX 6000 Ada Generation", MemoryMiB: 49140, ComputeMajor: 8, ComputeMinor: 9, NVLink: NVLinkNone, PCIDeviceID: "26B1", Source: rowSource},
		{Key: "h100-nvl", Name: "NVIDIA H100 NVL", MemoryMiB: 95830, ComputeMajor: 9, ComputeMinor: 0, NVLink: NVLinkBridge, PCIDeviceID: "2321", Source: rowSource},
		{Key: "h200-nvl", Name: "NVIDIA H200 NVL", MemoryMiB: 143771, ComputeMajor: 9, ComputeMinor: 0, NVLink: NVLinkBridge, PCIDeviceID: "233B", Source: rowSource},
		{Key: "gh200-144", Name: "NVIDIA GH200 144G HBM3e", MemoryMiB: 134582, ComputeMajor: 9, ComputeMinor: 0, NVLink: NVLinkNone, PCIDeviceID: "2348", Source: nominalSource},
		{Key: "gb200", Name: "NVIDIA GB200", MemoryMiB: 189471, ComputeMajor: 10, ComputeMinor: 0, NVLink: NVLinkSwitch, PCIDeviceID: "2941", Source: rowSource},
		{Key: "b300", Name: "NVIDIA B300 SXM6 AC", MemoryMiB: 275040, ComputeMajor: 10, ComputeMinor: 3, NVLink: NVLinkSwitch, PCIDeviceID: "3182", Source: rowSource},
		{Key: "gb300", Name: "NVIDIA GB300", MemoryMiB: 284208, ComputeMajor: 10, ComputeMinor: 3, NVLink: NVLinkSwitch, PCIDeviceID: "31C2", Source: rowSource},
		{Key: "rtx-pro-6000-ws", Name: "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", MemoryMiB: 97887, ComputeMajor: 12, ComputeMinor: 0, NVLink: NVLinkNone, PCIDeviceID: "2BB1", Source: rowSource},
		{Key: "rtx-pro-5000", Name: "NVIDIA RTX PRO 5000 Blackwell", MemoryMiB: 48168, ComputeMajor: 12, ComputeMinor: 0, NVLink: NVLinkNone, PCIDeviceID: "2BB3", Source: nominalSource},
		{Key: "rtx-pro-4500", Name: "NVIDIA RTX PRO 4500 Blackwell", MemoryMiB: 32112, ComputeMajor: 12, ComputeMinor: 0, NVLink: NVLinkNone, PCIDeviceID: "2C31", Source: nominalSource},
		{Key: "rtx-pro-4000", Name: "NVIDIA RTX PRO 4000 Blackwell", MemoryMiB: 24084, ComputeMajor: 12, ComputeMinor: 0, NVLink: NVLinkNone, PCIDeviceID: "2C34", Source: nominalSource},
		{Key: "gb10", Name: "NVIDIA GB10", MemoryMiB: 124610, ComputeMajor: 12, ComputeMinor: 1, NVLink: NVLinkNone, PCIDeviceID: "2E12", Source: unifiedSource},
		{Key: "t4", Name: "Tesla T4", MemoryMiB: 15360, ComputeMajor: 7, ComputeMinor: 5, NVLink: NVLinkNone, PCIDeviceID: "1EB8", Source: rowSource},
	}
}

// ProductByKey finds a product by its short name.
func ProductByKey(key string) (Product, bool) {
	for _, p := range Products() {
		if p.Key == key {
			return p, true
		}
	}
	return Product{}, false
}

// ProductByLabel finds a product by the node label nvidia.com/gpu.product. The
// suffix that GPU feature discovery adds for time slicing and MPS is ignored.
func ProductByLabel(value string) (Product, bool) {
	value = strings.TrimSuffix(value, "-SHARED")
	for _, p := range Products() {
		if strings.EqualFold(p.LabelValue(), value) {
			return p, true
		}
	}
	return Product{}, false
}

// ProductByName finds a product by the name NVML reports.
func ProductByName(name string) (Product, bool) {
	return ProductByLabel(strings.Join(strings.Fields(name), "-"))
}

// ProductByPCI finds a product by its PCI device id, four hex digits.
func ProductByPCI(id string) (Product, bool) {
	for _, p := range Products() {
		if p.PCIDeviceID != "" && strings.EqualFold(p.PCIDeviceID, id) {
			return p, true
		}
	}
	return Product{}, false
}

// Keys lists the short names in the table's order.
func Keys() []string {
	products := Products()
	keys := make([]string, 0, len(products))
	for _, p := range products {
		keys = append(keys, p.Key)
	}
	return keys
}
