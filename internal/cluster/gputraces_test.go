package cluster

import (
	"slices"
	"testing"
)

func TestGPUTraces(t *testing.T) {
	labels := map[string]string{
		"kubernetes.io/hostname":                         "box",
		"nvidia.com/gpu.present":                         "true",
		"nvidia.com/gpu.deploy.device-plugin":            "true",
		"nvidia.com/gpu.deploy.dcgm-exporter":            "false",
		"nvidia.com/gpu.product":                         "NVIDIA-A10",
		"nvidia.com/mig.config":                          "all-disabled",
		"feature.node.kubernetes.io/pci-10de.present":    "true",
		"feature.node.kubernetes.io/of-somebody":         "true",
		"cloud.example.com/accelerator":                  "a10",
		"vendor.feature.node.kubernetes.io/of-a-feature": "1",
	}
	annotations := map[string]string{
		"nfd.node.kubernetes.io/feature-labels":      "pci-10de.present,gone,nvidia.com/gpu.product,vendor.feature.node.kubernetes.io/of-a-feature",
		"nfd.node.kubernetes.io/feature-annotations": "note",
		"feature.node.kubernetes.io/note":            "x",
		"node.alpha.kubernetes.io/ttl":               "0",
	}
	for _, tt := range []struct {
		name                string
		nfdIsGone           bool
		labels, annotations []string
	}{
		{"Node Feature Discovery is somebody else's", false,
			[]string{"nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.present"}, nil},
		{"both are gone", true,
			[]string{"feature.node.kubernetes.io/pci-10de.present", "nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.present",
				"nvidia.com/gpu.product", "vendor.feature.node.kubernetes.io/of-a-feature"},
			[]string{"feature.node.kubernetes.io/note", "nfd.node.kubernetes.io/feature-annotations", "nfd.node.kubernetes.io/feature-labels"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			gotLabels, gotAnnotations := gpuTraces(labels, annotations, tt.nfdIsGone)
			slices.Sort(gotLabels)
			slices.Sort(gotAnnotations)
			if !slices.Equal(gotLabels, tt.labels) || !slices.Equal(gotAnnotations, tt.annotations) {
				t.Errorf("labels %q, annotations %q", gotLabels, gotAnnotations)
			}
		})
	}
	if l, a := gpuTraces(map[string]string{"a": "b"}, nil, true); len(l)+len(a) > 0 {
		t.Errorf("a node without traces loses %q %q", l, a)
	}
}
