package cluster

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func TestDeleteRejectedPods(t *testing.T) {
	pod := func(name string, phase corev1.PodPhase, reason string, gpus, owned bool) *corev1.Pod {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: name},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}},
			Status:     corev1.PodStatus{Phase: phase, Reason: reason},
		}
		if gpus {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
		}
		if owned {
			yes := true
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "model-server", Controller: &yes}}
		}
		return p
	}
	const rejected = "UnexpectedAdmissionError"
	kube := fake.NewClientset(
		pod("rejected", corev1.PodFailed, rejected, true, true),
		pod("nobody-makes-another", corev1.PodFailed, rejected, true, false),
		pod("without-a-gpu", corev1.PodFailed, rejected, false, true),
		pod("failed-otherwise", corev1.PodFailed, "Evicted", true, true),
		pod("runs", corev1.PodRunning, "", true, true),
	)
	c := &Client{Kube: kube}
	gone, err := c.DeleteRejectedPods(t.Context())
	if err != nil || !slices.Equal(gone, []string{"llm/rejected"}) {
		t.Errorf("gone are %q, %v", gone, err)
	}
	left, err := kube.CoreV1().Pods("llm").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(left.Items) != 4 {
		t.Errorf("%d pods are left, %v", len(left.Items), err)
	}
}
