package preflight

import (
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func webhook(name string, policy admissionv1.FailurePolicyType, service, resource string) *admissionv1.ValidatingWebhookConfiguration {
	return &admissionv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Webhooks: []admissionv1.ValidatingWebhook{{
			FailurePolicy: &policy,
			ClientConfig:  admissionv1.WebhookClientConfig{Service: &admissionv1.ServiceReference{Namespace: "kyverno", Name: service}},
			Rules:         []admissionv1.RuleWithOperations{{Rule: admissionv1.Rule{Resources: []string{resource}}}},
		}},
	}
}

func endpoints(service string, ready bool) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: service + "-x", Namespace: "kyverno", Labels: map[string]string{"kubernetes.io/service-name": service}},
		Endpoints:  []discoveryv1.Endpoint{{Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
	}
}

func TestDeadWebhooks(t *testing.T) {
	t.Parallel()
	kube := fake.NewClientset(
		webhook("fails-closed", admissionv1.Fail, "gone", "pods"),
		webhook("fails-open", admissionv1.Ignore, "gone", "pods"),
		webhook("alive", admissionv1.Fail, "alive", "*"),
		webhook("not-ready", admissionv1.Fail, "starting", "*/*"),
		webhook("elsewhere", admissionv1.Fail, "gone", "ingresses"),
		endpoints("alive", true), endpoints("starting", false),
	)
	dead, err := deadWebhooks(t.Context(), kube, map[string]bool{"kyverno": true})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, w := range dead {
		names = append(names, w.Configuration)
		if !w.Ours {
			t.Errorf("%+v is ours", w)
		}
	}
	if len(names) != 2 || names[0] != "fails-closed" || names[1] != "not-ready" {
		t.Errorf("got %v, want fails-closed and not-ready", names)
	}
}

func TestBalancer(t *testing.T) {
	t.Parallel()
	node := func(provider, kubelet string) []corev1.Node {
		return []corev1.Node{{Spec: corev1.NodeSpec{ProviderID: provider}, Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KubeletVersion: kubelet}}}}
	}
	served := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "a"}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.7"}}}},
	}
	for _, c := range []struct {
		nodes   []corev1.Node
		service *corev1.Service
		known   bool
	}{
		{node("kind://docker/kind/kind-control-plane", "v1.36.4"), nil, false},
		{node("aws:///eu-west-1a/i-1", "v1.36.4"), nil, true},
		{node("", "v1.36.4+k3s1"), nil, true},
		{node("", "v1.36.4"), served, true},
	} {
		kube := fake.NewClientset()
		if c.service != nil {
			kube = fake.NewClientset(c.service)
		}
		name, err := balancer(t.Context(), kube, c.nodes)
		if err != nil || (name != "") != c.known {
			t.Errorf("balancer of %+v is %q, %v, want known %t", c.nodes[0].Spec, name, err, c.known)
		}
	}
}
