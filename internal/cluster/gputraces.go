package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Names of Node Feature Discovery and of the GPU operator on a node
// (kubernetes-sigs/node-feature-discovery api/nfd v0.17.3; NVIDIA/gpu-operator
// v25.3.4 controllers/state_manager.go).
const (
	nfdAnnotations      = "nfd.node.kubernetes.io/"
	nfdLabelList        = nfdAnnotations + "feature-labels"
	nfdAnnotationList   = nfdAnnotations + "feature-annotations"
	nfdDefaultNamespace = "feature.node.kubernetes.io/"
	gpuPresentLabel     = "nvidia.com/gpu.present"
	gpuDeployLabels     = "nvidia.com/gpu.deploy."
)

// CleanGPUNodes takes off every node what a GPU operator that is gone wrote there,
// and, if Node Feature Discovery went with it, what that one lists as its own. Nobody
// else does: neither of them cleans up when it is removed.
func (c *Client) CleanGPUNodes(ctx context.Context, nfdIsGone bool) error {
	nodes, err := c.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("listing nodes: %w", Classify(err))
	}
	var problems []error
	for i := range nodes.Items {
		n := &nodes.Items[i]
		labels, annotations := gpuTraces(n.Labels, n.Annotations, nfdIsGone)
		if len(labels)+len(annotations) == 0 {
			continue
		}
		raw, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": nulls(labels), "annotations": nulls(annotations)}})
		if err != nil {
			return fmt.Errorf("encoding the labels of node %s: %w", n.Name, err)
		}
		_, err = c.Kube.CoreV1().Nodes().Patch(ctx, n.Name, types.MergePatchType, raw, metav1.PatchOptions{FieldManager: FieldManager})
		if err != nil && !apierrors.IsNotFound(err) {
			problems = append(problems, fmt.Errorf("taking labels off node %s: %w", n.Name, Classify(err)))
		}
	}
	return errors.Join(problems...)
}

func nulls(names []string) map[string]any {
	out := make(map[string]any, len(names))
	for _, name := range names {
		out[name] = nil
	}
	return out
}

// gpuTraces names what is to go. A label that switches an operand off is a person's:
// the operator itself only writes "true".
func gpuTraces(labels, annotations map[string]string, nfdIsGone bool) (goneLabels, goneAnnotations []string) {
	for name, value := range labels {
		if name == gpuPresentLabel || strings.HasPrefix(name, gpuDeployLabels) && value == "true" {
			goneLabels = append(goneLabels, name)
		}
	}
	if !nfdIsGone {
		return goneLabels, nil
	}
	listed := func(list string, have map[string]string) []string {
		var out []string
		for name := range strings.SplitSeq(annotations[list], ",") {
			if !strings.Contains(name, "/") {
				name = nfdDefaultNamespace + name
			}
			if _, ok := have[name]; ok {
				out = append(out, name)
			}
		}
		return out
	}
	goneLabels = append(goneLabels, listed(nfdLabelList, labels)...)
	goneAnnotations = listed(nfdAnnotationList, annotations)
	for name := range annotations {
		if strings.HasPrefix(name, nfdAnnotations) {
			goneAnnotations = append(goneAnnotations, name)
		}
	}
	return goneLabels, goneAnnotations
}
