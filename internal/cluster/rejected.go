package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// rejectedReason is the kubelet's word for a pod that it could not give its devices:
// after a boot, pods are bound to the node before the device plugin has come back, and
// each such pod stays as Failed for ever beside its replacement (kubernetes,
// pkg/kubelet/lifecycle; NVIDIA/k8s-device-plugin#1058).
const rejectedReason = "UnexpectedAdmissionError"

// gpuResourcePrefix begins what a pod asks GPUs by, slices of one included.
const gpuResourcePrefix = "nvidia.com/"

// DeleteRejectedPods removes GPU pods that the kubelet turned away, where a controller
// has made, or will make, others. It returns their names.
func (c *Client) DeleteRejectedPods(ctx context.Context) ([]string, error) {
	pods, err := c.Kube.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "status.phase=" + string(corev1.PodFailed)})
	if err != nil {
		return nil, fmt.Errorf("listing failed pods: %w", Classify(err))
	}
	var gone []string
	var problems []error
	for i := range pods.Items {
		p := &pods.Items[i]
		if p.Status.Reason != rejectedReason || metav1.GetControllerOf(p) == nil || !wantsGPU(p) {
			continue
		}
		err := c.Kube.CoreV1().Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(p.UID))})
		switch {
		case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		case err != nil:
			problems = append(problems, fmt.Errorf("deleting pod %s/%s: %w", p.Namespace, p.Name, Classify(err)))
		default:
			gone = append(gone, p.Namespace+"/"+p.Name)
		}
	}
	return gone, errors.Join(problems...)
}

func wantsGPU(p *corev1.Pod) bool {
	for _, c := range p.Spec.Containers {
		for name := range c.Resources.Limits {
			if strings.HasPrefix(string(name), gpuResourcePrefix) {
				return true
			}
		}
	}
	return false
}
