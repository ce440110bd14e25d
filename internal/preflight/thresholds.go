package preflight

import "time"

// The figures that the checks compare with. Each says where it comes from.
const (
	// oldestCompute is the compute capability from which bfloat16 works: Ampere
	// (vllm-project/vllm#1157, developer.nvidia.com/cuda-gpus).
	oldestComputeMajor, oldestComputeMinor = 8, 0

	// blackwellMajor is the compute capability from which the driver needs its open
	// kernel modules (NVIDIA/open-gpu-kernel-modules README, "Blackwell and later").
	blackwellMajor = 10

	// oldestToolkit is the first NVIDIA Container Toolkit in which a container can't
	// take over the host by a hook (CVE-2025-23266, NVIDIA security bulletin 5659,
	// NVIDIA/nvidia-container-toolkit v1.17.8).
	oldestToolkit = "1.17.8"

	// gspFixed is the first driver in which the A100's GSP firmware stopped timing out
	// (NVIDIA/open-gpu-kernel-modules#446).
	gspFixed = "525.105.17"

	// slowInit is how long NVML may take on a driver that stays initialised
	// (NVIDIA/nvidia-docker#1279: 30 s without persistence, 2 s with).
	slowInit = 5 * time.Second

	// utilisation is the share of a GPU's whole memory that vLLM takes
	// (vllm-project/vllm vllm/config/cache.py, gpu_memory_utilization).
	utilisation = 0.92
	// foreignBytes is the memory that a display or a driver's own context may hold
	// before it counts as somebody else's work (vllm-project/vllm#20305).
	foreignBytes = 1 << 30

	// Kubernetes from this minor on refuses cgroup v1 (kubernetes/kubernetes#134298).
	cgroupV1RefusedMinor = 35

	// oldestKernel is the kernel from which cgroup v2 works as Kubernetes needs it
	// (kubernetes.io/docs/concepts/architecture/cgroups).
	oldestKernel = "5.8"

	// inotify limits below these run out on one node with several dozen pods
	// (k3s-io/k3s#10020, containerd/containerd#10309).
	inotifyInstances = 512
	inotifyWatches   = 524288
	// inotifyWatchesLow is the limit at which, with few instances as well, nodes of the
	// same reports did run out; kernels since 5.11 set more by themselves.
	inotifyWatchesLow = 65536

	// entropyBits is what a kernel older than 5.6 needs before getrandom answers
	// (random(4)); newer ones always show 256.
	entropyBits = 128

	// clockOffset is how far the clock may be off before certificates just made are
	// "not yet valid" (k3s-io/k3s#5163).
	clockOffset = 60 * time.Second

	// fsyncSlowMilli is the 99th percentile at which the datastore of k3s begins to
	// lose its leases (k3s-io/k3s#2615, #8042).
	fsyncSlowMilli = 50.0

	// Below evictPercent free k3s evicts pods (k3s-io/k3s
	// pkg/daemons/agent/agent_linux.go, eviction-hard); below pressurePercent the
	// kubelet's own default does (kubernetes.io, nodefs.available); below gcPercent
	// images are deleted (kubernetes.io, imageGCHighThresholdPercent).
	evictPercent    = 5
	pressurePercent = 10
	gcPercent       = 15
	// inodesPercent is the kubelet's default eviction threshold for nodefs.inodesFree.
	inodesPercent = 5

	// smallestMTU leaves IPv6's minimum of 1280 (RFC 8200) to pods after the 50 bytes
	// of VXLAN (flannel-io/flannel Documentation/backends.md).
	smallestMTU = 1330

	// gatewayAPI is the bundle that the shipped Envoy Gateway was built with
	// (embed/crds/gateway-api, annotation bundle-version).
	gatewayAPI = "v1.6.1"

	// bigDiskBytes is the size from which an unmounted disk is worth a word.
	bigDiskBytes = 100 << 30

	// memorySlackPercent is given to rounding of memory totals: kernels keep some
	// back for themselves (kubernetes.io, node allocatable).
	memorySlackPercent = 5
)

// cudaDriver is the oldest driver that serves a CUDA release by itself
// (docs.nvidia.com/cuda/cuda-toolkit-release-notes, table "CUDA Toolkit and
// Corresponding Driver Versions").
func cudaDriver() []struct{ CUDA, Driver string } {
	return []struct{ CUDA, Driver string }{
		{"13.1", "590.44.01"},
		{"13.0", "580.65.06"},
		{"12.9", "575.51.03"},
		{"12.8", "570.26"},
		{"12.6", "560.28.03"},
		{"12.4", "550.54.14"},
	}
}

// oldestDriver is the driver below which no CUDA 12 container runs (same table,
// minor version compatibility).
const oldestDriver = "525.60.13"

// oldestDriver13 is the driver below which no CUDA 13 container runs natively.
const oldestDriver13 = "580.65.06"

// branchEnd is the month after which a driver branch gets no more security fixes
// (docs.nvidia.com/datacenter/tesla/drivers, "Supported Drivers and CUDA Toolkit
// Versions"). Branches that are not listed are not judged.
func branchEnd() map[int]time.Time {
	month := func(y int, m time.Month) time.Time { return time.Date(y, m+1, 1, 0, 0, 0, 0, time.UTC) }
	return map[int]time.Time{
		535: month(2026, time.June),
		570: month(2026, time.February),
		580: month(2028, time.August),
	}
}

// distributions maps os-release's ID to the oldest VERSION_ID that is tried, from
// the systems on which k3s (docs.k3s.io/installation/requirements) and the NVIDIA
// driver (docs.nvidia.com/datacenter/tesla/driver-installation-guide) are both
// supported.
func distributions() map[string]string {
	return map[string]string{
		"ubuntu": "22.04", "debian": "12", "rhel": "8", "rocky": "8", "almalinux": "8",
		"centos": "9", "ol": "8", "amzn": "2023", "sles": "15", "fedora": "40",
	}
}
