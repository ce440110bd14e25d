package cluster

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	dynamicfake "k8s.io/client-go/dynamic/fake"
)

// onlyThese is a mapper that learns nothing.
type onlyThese struct{ *meta.DefaultRESTMapper }

func (onlyThese) Reset() {}

func TestDeleteRemade(t *testing.T) {
	roles := schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterroles"}
	role := func(name, uid string) *unstructured.Unstructured {
		o := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": map[string]any{"name": name},
		}}
		o.SetUID(types.UID(uid))
		return o
	}
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(schema.GroupVersionKind{Group: roles.Group, Version: "v1", Kind: "ClusterRole"}, meta.RESTScopeRoot)
	c := &Client{
		Mapper: onlyThese{mapper},
		Dynamic: dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{roles: "ClusterRoleList"},
			role("stays", "1"), role("remade", "2"), role("goes", "3")),
	}
	former, err := c.Identities(t.Context(), []*unstructured.Unstructured{role("stays", ""), role("remade", ""), role("goes", ""), role("never-there", "")}, "llm")
	if err != nil || len(former) != 3 {
		t.Fatalf("%d are there: %v", len(former), err)
	}
	res := c.Dynamic.Resource(roles)
	for _, name := range []string{"remade", "goes"} {
		if err := res.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, o := range []*unstructured.Unstructured{role("remade", "4"), role("never-there", "5")} {
		if _, err := res.Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.DeleteRemade(t.Context(), former); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"stays": true, "remade": false, "goes": false, "never-there": true} {
		if _, err := res.Get(t.Context(), name, metav1.GetOptions{}); (err == nil) != want {
			t.Errorf("%s: %v", name, err)
		}
	}
}
