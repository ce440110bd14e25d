package snapshot

import (
	"fmt"
	"testing"
)

// BenchmarkCollectOffline is what `llmbox preflight --offline` waits for beside the
// GPUs.
func BenchmarkCollectOffline(b *testing.B) {
	for b.Loop() {
		Collect(b.Context(), Options{Offline: true})
	}
}

// BenchmarkCollectLargeMachine is the same of a machine with eight GPUs, four
// switches, 400 other PCI devices and a Kubernetes of 250 pods, read through a root.
func BenchmarkCollectLargeMachine(b *testing.B) {
	root := machine(b)
	for i := range 412 {
		at := fmt.Sprintf("/sys/bus/pci/devices/0000:%02x:%02x.0", i/32, i%32)
		vendor := "0x8086\n"
		if i < 12 {
			vendor = "0x10de\n"
		}
		put(b, root, at+"/vendor", vendor)
		for _, file := range []string{"device", "class", "numa_node", "current_link_width", "max_link_width", "config"} {
			put(b, root, at+"/"+file, "0\n")
		}
	}
	for i := range 250 {
		for _, file := range []string{"mtu", "operstate", "type"} {
			put(b, root, fmt.Sprintf("/sys/class/net/veth%d/%s", i, file), "1\n")
		}
		put(b, root, fmt.Sprintf("/sys/kernel/iommu_groups/%d/type", i), "DMA-FQ\n")
	}
	for b.Loop() {
		s := Collect(b.Context(), Options{Root: root, Offline: true})
		if len(s.Manifest.Unreadable) > 0 {
			b.Fatal(s.Manifest.Unreadable)
		}
	}
}
