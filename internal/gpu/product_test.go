package gpu

import (
	"regexp"
	"testing"
)

func TestProductsAreWhole(t *testing.T) {
	pci := regexp.MustCompile(`^[0-9A-F]{4}$`)
	label := regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	keys, labels, ids := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, p := range Products() {
		t.Run(p.Key, func(t *testing.T) {
			if p.Name == "" || p.Source == "" || p.MemoryMiB < 8192 || p.ComputeMajor < 7 {
				t.Errorf("row is not whole: %+v", p)
			}
			if !pci.MatchString(p.PCIDeviceID) {
				t.Errorf("PCI device id %q is not four upper-case hex digits", p.PCIDeviceID)
			}
			if !label.MatchString(p.LabelValue()) {
				t.Errorf("%q is not a valid node label value", p.LabelValue())
			}
			if keys[p.Key] || labels[p.LabelValue()] || ids[p.PCIDeviceID] {
				t.Errorf("key %q, label %q or PCI id %q stands twice in the table", p.Key, p.LabelValue(), p.PCIDeviceID)
			}
			keys[p.Key], labels[p.LabelValue()], ids[p.PCIDeviceID] = true, true, true
			switch p.NVLink {
			case NVLinkNone, NVLinkBridge, NVLinkSwitch:
			default:
				t.Errorf("NVLink %q is none of the three values", p.NVLink)
			}
			if p.Family() == "undefined" {
				t.Errorf("capability %s has no family", p.ComputeCapability())
			}
			if got, ok := ProductByKey(p.Key); !ok || got != p {
				t.Errorf("ProductByKey(%q) = %+v, %v", p.Key, got, ok)
			}
			if got, ok := ProductByLabel(p.LabelValue()); !ok || got != p {
				t.Errorf("ProductByLabel(%q) = %+v, %v", p.LabelValue(), got, ok)
			}
			if got, ok := ProductByPCI(p.PCIDeviceID); !ok || got != p {
				t.Errorf("ProductByPCI(%q) = %+v, %v", p.PCIDeviceID, got, ok)
			}
			if got, ok := ProductByName(p.Name); !ok || got != p {
				t.Errorf("ProductByName(%q) = %+v, %v", p.Name, got, ok)
			}
		})
	}
	if len(Keys()) != len(Products()) {
		t.Errorf("Keys() has %d entries for %d products", len(Keys()), len(Products()))
	}
}

func TestProductByLabel(t *testing.T) {
	tests := []struct{ label, key string }{
		{"NVIDIA-A10", "a10"},
		{"Tesla-T4-SHARED", "t4"},
		{"NVIDIA-H100-80GB-HBM3", "h100"},
		{"NVIDIA-A100-SXM4-80GB", "a100-80"},
		{"NVIDIA-GeForce-RTX-5090", "rtx-5090"},
		// A slice of a card is not the card.
		{"NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", ""},
		{"NVIDIA-A100-PCIE-40GB", "a100-40-pcie"},
		{"NVIDIA-RTX-PRO-6000-Blackwell-Workstation-Edition", "rtx-pro-6000-ws"},
		{"NVIDIA-GB10", "gb10"},
		{"NVIDIA-A1", ""},
		{"", ""},
	}
	for _, tt := range tests {
		got, ok := ProductByLabel(tt.label)
		if ok != (tt.key != "") || got.Key != tt.key {
			t.Errorf("ProductByLabel(%q) = %q, %v; want %q", tt.label, got.Key, ok, tt.key)
		}
	}
}

func TestFamily(t *testing.T) {
	tests := []struct {
		major, minor int
		want         string
	}{
		{7, 0, "undefined"}, {7, 5, "turing"}, {8, 0, "ampere"}, {8, 6, "ampere"}, {8, 9, "ada-lovelace"},
		{9, 0, "hopper"}, {10, 0, "blackwell"}, {10, 3, "blackwell"}, {12, 0, "blackwell"}, {99, 0, "undefined"},
	}
	for _, tt := range tests {
		if got := (Product{ComputeMajor: tt.major, ComputeMinor: tt.minor}).Family(); got != tt.want {
			t.Errorf("family of %d.%d = %q, want %q", tt.major, tt.minor, got, tt.want)
		}
	}
}
