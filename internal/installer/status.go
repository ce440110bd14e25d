package installer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
)

// ComponentStatus is one component as the cluster shows it now.
type ComponentStatus struct {
	Name      string         `json:"name"`
	Title     string         `json:"title"`
	Namespace string         `json:"namespace,omitempty"`
	Mode      component.Mode `json:"mode"`
	Version   string         `json:"version,omitempty"`
	Chart     string         `json:"chart,omitempty"`
	Revision  int            `json:"revision,omitempty"`
	// Release is the record's status ("deployed") or "absent".
	Release string `json:"release,omitempty"`
	Ready   bool   `json:"ready"`
	// Reason says what is missing when the component is not ready.
	Reason      string   `json:"reason,omitempty"`
	SimulatedBy []string `json:"simulated_by,omitempty"`
}

// Status asks each component's gates once and reports what they say.
func (r *Run) Status(ctx context.Context) []ComponentStatus {
	out := make([]ComponentStatus, len(r.plan.Steps))
	done := make(chan struct{})
	for i, s := range r.plan.Steps {
		go func() {
			out[i] = r.statusOf(ctx, s)
			done <- struct{}{}
		}()
	}
	for range r.plan.Steps {
		<-done
	}
	return out
}

func (r *Run) statusOf(ctx context.Context, s Step) ComponentStatus {
	st := ComponentStatus{Name: s.Name, Title: s.Title, Namespace: s.Namespace, Mode: s.Mode, Version: s.Version}
	if s.Release != nil {
		st.Chart = s.ChartOrigin
		rec, err := r.engine.Current(ctx, s.Namespace, s.Name)
		switch {
		case errors.Is(err, chart.ErrNoRelease):
			st.Release, st.Reason = "absent", "not installed"
			return st
		case err != nil:
			st.Reason = oneLine(err)
			return st
		}
		st.Release, st.Revision, st.Version = rec.Status, rec.Revision, rec.Version
	}
	bounded, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	gates, err := openGates(bounded, r, s)
	if err != nil {
		st.Reason = oneLine(err)
		return st
	}
	defer gates.close()
	waiting, err := gates.ask(bounded)
	switch {
	case err != nil:
		st.Reason = oneLine(err)
	case waiting != "":
		st.Reason = waiting
	default:
		st.Ready = true
	}
	st.SimulatedBy = actors(gates.results)
	if s.Name == baseStep {
		st.Ready, st.Reason = r.baseStatus(bounded)
	}
	return st
}

// baseStatus looks for the objects that the base step applies.
func (r *Run) baseStatus(ctx context.Context) (bool, string) {
	for _, obj := range r.plan.Manifests {
		there, err := r.client.Exists(ctx, obj)
		if err != nil {
			return false, oneLine(err)
		}
		if !there {
			return false, fmt.Sprintf("%s %s is missing", obj.GetKind(), obj.GetName())
		}
	}
	return true, ""
}

// NodeGPUs is what one node offers.
type NodeGPUs struct {
	Node        string `json:"node"`
	Product     string `json:"product,omitempty"`
	MemoryMiB   int64  `json:"memory_mib,omitempty"`
	Allocatable int64  `json:"allocatable"`
}

// GPUs lists the nodes that have or promise GPUs.
func GPUs(ctx context.Context, c *cluster.Client) ([]NodeGPUs, error) {
	nodes, err := c.GPUNodes(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]NodeGPUs, 0, len(nodes))
	for _, n := range nodes {
		out = append(out, NodeGPUs{Node: n.Name, Product: n.Product, MemoryMiB: n.MemoryMiB, Allocatable: n.Allocatable})
	}
	return out, nil
}
