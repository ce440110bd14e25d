package k3s

import (
	"fmt"
	"strconv"

	"go.yaml.in/yaml/v3"
)

const (
	gib = 1 << 30
	mib = 1 << 20
	// mostEvict bounds what is kept free on a disk: k3s's own 5 % are 100 GB of two
	// terabytes (k3s-io/k3s pkg/daemons/agent, defaultKubeletConfig).
	mostEvict    = 10 * gib
	evictPercent = 5
	// mostCollect bounds what images are deleted for; the kubelet's own 15 % are as
	// much too high for a large disk. An engine image unpacks to 10 to 20 GiB, and an
	// upgrade holds two.
	mostCollect       = 40 * gib
	collectPercent    = 15
	highestCollect    = 95
	collectHysteresis = 5
	// parallelPulls lets small images pass the one of the engine.
	parallelPulls = 4
	percent       = 100
)

// kubeletFields is the part of kubelet.config.k8s.io/v1beta1 that llmbox sets.
type kubeletFields struct {
	APIVersion           string            `yaml:"apiVersion"`
	Kind                 string            `yaml:"kind"`
	SerializeImagePulls  bool              `yaml:"serializeImagePulls"`
	MaxParallelPulls     int               `yaml:"maxParallelImagePulls"`
	ImageGCHigh          int               `yaml:"imageGCHighThresholdPercent"`
	ImageGCLow           int               `yaml:"imageGCLowThresholdPercent"`
	EvictionHard         map[string]string `yaml:"evictionHard"`
	EvictionReclaim      map[string]string `yaml:"evictionMinimumReclaim"`
	KubeReserved         map[string]string `yaml:"kubeReserved"`
	SystemReserved       map[string]string `yaml:"systemReserved"`
	TopologyPolicy       string            `yaml:"topologyManagerPolicy,omitempty"`
	FailCgroupV1         *bool             `yaml:"failCgroupV1,omitempty"`
	ContainerLogMaxSize  string            `yaml:"containerLogMaxSize"`
	ContainerLogMaxFiles int               `yaml:"containerLogMaxFiles"`
}

// kubeletConfig is the content of KubeletFile. k3s copies it to 10-cli-config.conf
// beside its own defaults, and the kubelet merges key by key in the order of the
// names (docs.k3s.io, "Kubelet Configuration Files"; k3s 1.32 and later).
func kubeletConfig(s Settings) ([]byte, error) {
	f := s.Facts
	if f.DataBytes <= 0 || f.KubeletBytes <= 0 || f.MemoryBytes <= 0 {
		return nil, fmt.Errorf("sizing the kubelet: disk %d and %d bytes, memory %d bytes: %w", f.DataBytes, f.KubeletBytes, f.MemoryBytes, ErrSetting)
	}
	kube, system := reserved(f.MemoryBytes)
	high := collectAbove(f.DataBytes)
	fields := kubeletFields{
		APIVersion: "kubelet.config.k8s.io/v1beta1", Kind: "KubeletConfiguration",
		MaxParallelPulls: parallelPulls,
		ImageGCHigh:      high, ImageGCLow: high - collectHysteresis,
		EvictionHard: map[string]string{
			"memory.available": "100Mi", "nodefs.available": quantity(evictBelow(f.KubeletBytes)), "nodefs.inodesFree": "5%",
			"imagefs.available": quantity(evictBelow(f.DataBytes)), "imagefs.inodesFree": "5%",
		},
		// k3s asks for a tenth of the disk once it evicts; on a large one no pod would be
		// left before that is free.
		EvictionReclaim: map[string]string{
			"nodefs.available": quantity(evictBelow(f.KubeletBytes)), "imagefs.available": quantity(evictBelow(f.DataBytes)),
		},
		KubeReserved: map[string]string{"memory": quantity(kube)}, SystemReserved: map[string]string{"memory": quantity(system)},
		ContainerLogMaxSize: "20Mi", ContainerLogMaxFiles: 3,
	}
	if f.GPUs > 1 {
		// Several GPUs can hang on several NUMA nodes; with one there is nothing to choose.
		fields.TopologyPolicy = "best-effort"
	}
	if f.CgroupV1 {
		// Since 1.35 the kubelet refuses cgroup v1 unless told otherwise. Preflight has
		// said so; who went on regardless wants it to start.
		no := false
		fields.FailCgroupV1 = &no
	}
	text, err := yaml.Marshal(fields)
	if err != nil {
		return nil, fmt.Errorf("writing the kubelet's configuration: %w", err)
	}
	return append([]byte(marker+" for this machine's disk, memory and GPUs. It is written anew by each\n# install: what you want different belongs into agent/etc/kubelet.conf.d of k3s's\n# data directory, in a file that sorts after 10-cli-config.conf.\n"), text...), nil
}

// evictBelow is how much stays free before pods are evicted, in steps that a file
// system whose size wavers a little does not cross.
func evictBelow(disk int64) int64 {
	const step = 256 * mib
	return max(min(disk/percent*evictPercent, mostEvict)/step*step, step)
}

// collectAbove is the use of the disk, in percent, above which unused images are
// deleted.
func collectAbove(disk int64) int {
	free := min(disk/percent*collectPercent, mostCollect)
	used := int((disk - free) * percent / disk)
	return min(max(used, percent-collectPercent), highestCollect)
}

// reserved is the memory that pods don't get: for k3s with its containerd, and for
// the rest of the host. The steps lie between the sizes that machines have, so that
// the few megabytes by which a kernel reports another total change nothing.
func reserved(memory int64) (kube, system int64) {
	switch {
	case memory < 12*gib:
		return 512 * mib, 256 * mib
	case memory < 24*gib:
		return 1 * gib, 512 * mib
	case memory < 96*gib:
		return 1536 * mib, 1 * gib
	}
	return 2 * gib, 2 * gib
}

func quantity(bytes int64) string {
	if bytes%gib == 0 {
		return strconv.FormatInt(bytes/gib, 10) + "Gi"
	}
	return strconv.FormatInt(bytes/mib, 10) + "Mi"
}
