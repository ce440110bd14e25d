// Package component holds the component table: what a box is made of, what each
// part needs, which images and CRDs it brings and when it counts as ready. It is
// pure data and judgement over it; it must not know Helm, a cluster or the runner.
package component

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// Table is embed/components.yaml.
type Table struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// K3s is the Kubernetes distribution under it all.
	K3s        Version     `json:"k3s"`
	Components []Component `json:"components"`
}

// Component is one row of the table.
type Component struct {
	// Name is the release's name and the last segment of the step's path.
	Name string `json:"name"`
	// Title is what a person reads.
	Title   string `json:"title"`
	Profile string `json:"profile"`
	// Namespace is where the release lives.
	Namespace string   `json:"namespace,omitempty"`
	Needs     []string `json:"needs,omitempty"`
	// Chart names a folder under embed/charts; empty means that the component
	// is not made of a chart (base).
	Chart string `json:"chart,omitempty"`
	// Part is handed to the chart as .Values.part where one chart serves
	// several components.
	Part string `json:"part,omitempty"`
	// CRDs names folders under embed/crds.
	CRDs    []string `json:"crds,omitempty"`
	Version Version  `json:"version"`
	// Images maps the key in .Values.images to the image.
	Images map[string]Image `json:"images,omitempty"`
	// Gates are asked in order; all must hold.
	Gates []Gate `json:"gates,omitempty"`
	// Timeout bounds the waiting for the gates.
	Timeout metav1.Duration `json:"timeout"`
	// Requests is the sum of the requests of all pods, operands included.
	Requests Requests `json:"requests"`
	// Operands are pods that an operator makes from this chart's resources.
	Operands  []Operand `json:"operands,omitempty"`
	HostPorts []int32   `json:"host_ports,omitempty"`
}

// Version says which version is shipped, which one the lab can run, and which
// upstream release the chart was checked against.
type Version struct {
	Shipped        string `json:"shipped"`
	RunInLab       string `json:"run_in_lab"`
	CheckedAgainst string `json:"checked_against"`
	Source         string `json:"source"`
}

// Image is one container image. Digest and SizeBytes stay empty until a release
// is made on a connected machine; they are never invented.
type Image struct {
	Reference string `json:"reference"`
	// Digest is "sha256:…" of the image index.
	Digest string `json:"digest"`
	// SizeBytes is the compressed size for linux/amd64.
	SizeBytes int64 `json:"size_bytes"`
	// Source is where the reference (and digest and size) were read.
	Source string `json:"source"`
}

// Requests are resource requests of pods.
type Requests struct {
	CPUMillis   int64 `json:"cpu_millis"`
	MemoryBytes int64 `json:"memory_bytes"`
}

// Add returns the sum of both.
func (r Requests) Add(o Requests) Requests {
	return Requests{CPUMillis: r.CPUMillis + o.CPUMillis, MemoryBytes: r.MemoryBytes + o.MemoryBytes}
}

// Operand is a pod set that an operator creates; Path says where in the chart's
// resources its requests are handed over.
type Operand struct {
	Name        string `json:"name"`
	Kind        string `json:"kind"`
	CPUMillis   int64  `json:"cpu_millis"`
	MemoryBytes int64  `json:"memory_bytes"`
	Path        string `json:"path"`
}

// GateKind names a readiness gate; the cluster package implements each.
type GateKind string

// The readiness gates.
const (
	GateWorkloads        GateKind = "workloads"
	GateNodeAllocatable  GateKind = "node-allocatable"
	GateCondition        GateKind = "condition"
	GateGateway          GateKind = "gateway"
	GateAPIService       GateKind = "apiservice"
	GateToken            GateKind = "token"
	GatePrometheusTarget GateKind = "prometheus-target"
	GateVault            GateKind = "vault"
	GateAdmission        GateKind = "admission"
)

// Gate is one condition of readiness with its parameters; which are used
// depends on the kind.
type Gate struct {
	Kind      GateKind `json:"kind"`
	Namespace string   `json:"namespace,omitempty"`
	Name      string   `json:"name,omitempty"`
	// Group, Version and Resource (plural) name the object of a condition gate.
	Group     string `json:"group,omitempty"`
	Version   string `json:"version,omitempty"`
	Resource  string `json:"resource,omitempty"`
	Condition string `json:"condition,omitempty"`
	AtLeast   int64  `json:"at_least,omitempty"`
	// Service, Port and Job address an endpoint behind the API server's proxy.
	Service string `json:"service,omitempty"`
	Port    string `json:"port,omitempty"`
	Job     string `json:"job,omitempty"`
	Gateway string `json:"gateway,omitempty"`
}

// ErrInvalidTable is wrapped by every complaint about the table itself.
var ErrInvalidTable = errors.New("invalid component table")

// LoadTable reads components.yaml, strictly.
func LoadTable(fsys fs.FS) (*Table, error) {
	raw, err := fs.ReadFile(fsys, "components.yaml")
	if err != nil {
		return nil, fmt.Errorf("reading the component table: %w", err)
	}
	return ParseTable(raw)
}

// ParseTable decodes and checks a component table.
func ParseTable(raw []byte) (*Table, error) {
	t := &Table{}
	if err := yaml.UnmarshalStrict(raw, t); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidTable, err)
	}
	if t.Kind != "ComponentTable" {
		return nil, fmt.Errorf("%w: kind is %q, want ComponentTable", ErrInvalidTable, t.Kind)
	}
	var problems []error
	for i := range t.Components {
		c := &t.Components[i]
		if c.Timeout.Duration == 0 {
			c.Timeout.Duration = 10 * time.Minute
		}
		for key, img := range c.Images {
			if img.Reference == "" {
				problems = append(problems, fmt.Errorf("%w: component %s: image %s has no reference", ErrInvalidTable, c.Name, key))
			}
		}
		for _, g := range c.Gates {
			if !slices.Contains(gateKinds(), g.Kind) {
				problems = append(problems, fmt.Errorf("%w: component %s: unknown gate %q", ErrInvalidTable, c.Name, g.Kind))
			}
		}
	}
	return t, errors.Join(problems...)
}

func gateKinds() []GateKind {
	return []GateKind{
		GateWorkloads, GateNodeAllocatable, GateCondition, GateGateway, GateAPIService,
		GateToken, GatePrometheusTarget, GateVault, GateAdmission,
	}
}

// Names lists the components in the table's order.
func (t *Table) Names() []string {
	names := make([]string, len(t.Components))
	for i, c := range t.Components {
		names[i] = c.Name
	}
	return names
}

// Get returns the component of that name.
func (t *Table) Get(name string) (Component, bool) {
	for _, c := range t.Components {
		if c.Name == name {
			return c, true
		}
	}
	return Component{}, false
}
