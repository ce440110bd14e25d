package cluster

import (
	"context"
	"fmt"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// GPUNode is what a node's labels and status say of its GPUs. The labels are
// those of GPU Feature Discovery, which GPU clouds set on their nodes as well.
type GPUNode struct {
	Name string
	// Product is the label's form of the name, such as "NVIDIA-A10".
	Product   string
	MemoryMiB int64
	// Count is the number of GPUs the labels promise, Allocatable what the
	// device plugin offers right now.
	Count       int64
	Allocatable int64
}

// GPUNodes lists the nodes with GPUs, labelled or allocatable.
func (c *Client) GPUNodes(ctx context.Context) ([]GPUNode, error) {
	nodes, err := c.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("listing nodes: %w", Classify(err))
	}
	var out []GPUNode
	for i := range nodes.Items {
		n := &nodes.Items[i]
		q := n.Status.Allocatable[corev1.ResourceName("nvidia.com/gpu")]
		g := GPUNode{
			Name: n.Name, Product: n.Labels["nvidia.com/gpu.product"], Allocatable: q.Value(),
			MemoryMiB: labelNumber(n.Labels["nvidia.com/gpu.memory"]), Count: labelNumber(n.Labels["nvidia.com/gpu.count"]),
		}
		if g.Product != "" || g.Allocatable > 0 {
			out = append(out, g)
		}
	}
	return out, nil
}

// labelNumber reads a number out of a label; anything else counts as unknown.
func labelNumber(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// Exists tells whether an object of that kind and name is there and not going.
func (c *Client) Exists(ctx context.Context, obj *unstructured.Unstructured) (bool, error) {
	res, err := c.resourceFor(obj)
	if err != nil {
		return false, err
	}
	got, err := res.Get(ctx, obj.GetName(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading %s: %w", describe(obj), Classify(err))
	}
	return got.GetDeletionTimestamp() == nil, nil
}
