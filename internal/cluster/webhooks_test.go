package cluster

import (
	"slices"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
)

// webhooks is a configuration whose hooks are answered by services, each as "namespace/name".
func webhooks(kind, name string, services ...[2]string) *unstructured.Unstructured {
	var hooks []any
	for _, s := range services {
		hooks = append(hooks, map[string]any{"clientConfig": map[string]any{"service": map[string]any{"namespace": s[0], "name": s[1]}}})
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
		"metadata": map[string]any{"name": name}, "webhooks": hooks,
	}}
}

func TestDeleteUnansweredWebhooks(t *testing.T) {
	yes, no := true, false
	slice := func(name, service string, ready *bool) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kyverno", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
			Endpoints:  []discoveryv1.Endpoint{{Conditions: discoveryv1.EndpointConditions{Ready: ready}}},
		}
	}
	group := schema.GroupVersion{Group: "admissionregistration.k8s.io", Version: "v1"}
	validating, mutating := "ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"
	objects := []runtime.Object{
		webhooks(validating, "answered", [2]string{"kyverno", "up"}),
		webhooks(validating, "answered-in-part", [2]string{"kyverno", "down"}, [2]string{"kyverno", "unknown"}),
		webhooks(validating, "not-ready", [2]string{"kyverno", "down"}),
		webhooks(mutating, "no-endpoints", [2]string{"kyverno", "gone"}),
		webhooks(mutating, "also-of-others", [2]string{"kyverno", "gone"}, [2]string{"elsewhere", "gone"}),
		webhooks(mutating, "of-others", [2]string{"elsewhere", "gone"}),
		webhooks(mutating, "empty"),
	}
	c := &Client{
		Kube: fake.NewClientset(slice("a", "up", &no), slice("b", "up", &yes), slice("c", "down", &no), slice("d", "unknown", nil)),
		Dynamic: dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{
			group.WithResource("validatingwebhookconfigurations"): validating + "List",
			group.WithResource("mutatingwebhookconfigurations"):   mutating + "List",
		}, objects...),
	}
	if err := c.DeleteUnansweredWebhooks(t.Context(), "kyverno"); err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, resource := range []string{"validatingwebhookconfigurations", "mutatingwebhookconfigurations"} {
		list, err := c.Dynamic.Resource(group.WithResource(resource)).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for i := range list.Items {
			left = append(left, list.Items[i].GetName())
		}
	}
	slices.Sort(left)
	if want := []string{"also-of-others", "answered", "answered-in-part", "empty", "of-others"}; !slices.Equal(left, want) {
		t.Errorf("left are %q, want %q", left, want)
	}
}
