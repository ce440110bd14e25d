package standin

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	storagev1client "k8s.io/client-go/kubernetes/typed/storage/v1"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// SimulatedBy is the annotation that names what answers in the place of the real thing.
const SimulatedBy = "llmbox.dev/simulated-by"

// Nodes describes the machines to simulate.
type Nodes struct {
	Count   int
	GPUs    int
	Product gpu.Product
}

// Names lists the nodes' names.
func (n Nodes) Names() []string {
	names := make([]string, n.Count)
	for i := range names {
		names[i] = "gpu-" + strconv.Itoa(i)
	}
	return names
}

// Create makes the Node objects. They offer no GPU yet: that is for the device
// plugin, or whoever stands in for it, to add.
func (n Nodes) Create(ctx context.Context, client corev1client.NodeInterface) error {
	for i, name := range n.Names() {
		node, err := n.node(i, name)
		if err != nil {
			return err
		}
		if _, err := client.Create(ctx, node, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("creating node %s: %w", name, err)
		}
	}
	return nil
}

func (n Nodes) node(i int, name string) (*corev1.Node, error) {
	if i > 200 {
		return nil, fmt.Errorf("creating node %s: a lab has at most 200 nodes", name)
	}
	third := byte(i) // #nosec G115 -- bounded above
	address := netip.AddrFrom4([4]byte{10, 99, 0, third + 1}).String()
	podCIDR := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 42, third, 0}), 24).String()
	size := corev1.ResourceList{
		corev1.ResourceCPU:              resource.MustParse("30"),
		corev1.ResourceMemory:           resource.MustParse("200Gi"),
		corev1.ResourceEphemeralStorage: resource.MustParse("1000Gi"),
		corev1.ResourcePods:             resource.MustParse("110"),
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name,
			Labels: map[string]string{
				corev1.LabelHostname:                    name,
				corev1.LabelOSStable:                    "linux",
				corev1.LabelArchStable:                  "amd64",
				corev1.LabelInstanceTypeStable:          "simulated-gpu-vm",
				"node-role.kubernetes.io/control-plane": "true",
				"nvidia.com/gpu.product":                n.Product.LabelValue(),
				"nvidia.com/gpu.memory":                 strconv.FormatInt(n.Product.MemoryMiB, 10),
				"nvidia.com/gpu.count":                  strconv.Itoa(n.GPUs),
				"nvidia.com/gpu.family":                 n.Product.Family(),
				"nvidia.com/gpu.compute.major":          strconv.Itoa(n.Product.ComputeMajor),
				"nvidia.com/gpu.compute.minor":          strconv.Itoa(n.Product.ComputeMinor),
			},
			Annotations: map[string]string{SimulatedBy: "kwok"},
		},
		Spec: corev1.NodeSpec{PodCIDR: podCIDR, PodCIDRs: []string{podCIDR}},
		Status: corev1.NodeStatus{
			Capacity:    size,
			Allocatable: size.DeepCopy(),
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: address},
				{Type: corev1.NodeHostName, Address: name},
			},
			NodeInfo: corev1.NodeSystemInfo{
				Architecture:            "amd64",
				OperatingSystem:         "linux",
				OSImage:                 "simulated by KWOK",
				KernelVersion:           "simulated",
				ContainerRuntimeVersion: "kwok://0.8.0",
				KubeletVersion:          "v1.36.3",
			},
		},
	}, nil
}

// CreateStorageClass makes the default StorageClass, under the name k3s gives its own.
func CreateStorageClass(ctx context.Context, client storagev1client.StorageClassInterface) error {
	reclaim, binding := corev1.PersistentVolumeReclaimDelete, storagev1.VolumeBindingWaitForFirstConsumer
	class := &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{
			Name: "local-path",
			Annotations: map[string]string{
				"storageclass.kubernetes.io/is-default-class": "true",
				SimulatedBy: provisioner,
			},
		},
		Provisioner:       provisioner,
		ReclaimPolicy:     &reclaim,
		VolumeBindingMode: &binding,
	}
	if _, err := client.Create(ctx, class, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("creating the default StorageClass: %w", err)
	}
	return nil
}
