package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
)

const (
	connectLimit = time.Minute
	resetLimit   = 4 * time.Minute
	// appliedBy is on what the base step applies.
	appliedBy = "llmbox.dev/applied-digest"
)

func connect(ctx context.Context, kubeconfig string) (*cluster.Client, error) {
	return cluster.Connect(ctx, kubeconfig, "", connectLimit)
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// resetter brings a kept cluster back to where a trial begins.
type resetter struct {
	client *cluster.Client
	engine *chart.Helm
	order  []component.Node
}

func newResetter(client *cluster.Client, table *component.Table) (*resetter, error) {
	engine, err := chart.NewHelm(chart.Cluster{REST: client.REST, Discovery: client.Discovery, Mapper: client.Mapper, Kube: client.Kube},
		client.Version, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	order, err := component.Order(table.Components, nil)
	if err != nil {
		return nil, err
	}
	return &resetter{client: client, engine: engine, order: order}, nil
}

// apply removes what the trial is about to bring in again: components with all
// that need them, last first, with their claims and generated Secrets.
func (r *resetter) apply(ctx context.Context, want reset) error {
	ctx, cancel := context.WithTimeout(ctx, resetLimit)
	defer cancel()
	gone := map[string]bool{}
	for _, n := range r.order {
		needs := slices.ContainsFunc(n.Needs, func(need string) bool { return gone[need] })
		if slices.Contains(want.components, n.Name) || needs {
			gone[n.Name] = true
		}
	}
	for _, n := range slices.Backward(r.order) {
		if !gone[n.Name] || n.Chart == "" {
			continue
		}
		if err := r.removeRelease(ctx, n); err != nil {
			return fmt.Errorf("removing %s: %w", n.Name, err)
		}
	}
	if want.manifests {
		return r.removeManifests(ctx)
	}
	return nil
}

// removeRelease takes the custom resources away while their operator is there,
// then the release, then what only one owner's namespace holds besides.
func (r *resetter) removeRelease(ctx context.Context, n component.Node) error {
	crds := r.client.Dynamic.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	list, err := crds.List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("listing CRDs: %w", err)
	}
	var custom []*unstructured.Unstructured
	for _, crd := range list.Items {
		group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
		plural, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
		versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
		for _, v := range versions {
			m, ok := v.(map[string]any)
			if !ok || m["served"] != true {
				continue
			}
			version, _ := m["name"].(string)
			objects, err := r.client.Dynamic.Resource(schema.GroupVersionResource{Group: group, Version: version, Resource: plural}).List(ctx, metav1.ListOptions{})
			if err != nil {
				return fmt.Errorf("listing %s: %w", plural, err)
			}
			for i := range objects.Items {
				if o := &objects.Items[i]; o.GetAnnotations()["meta.helm.sh/release-name"] == n.Name && o.GetAnnotations()["meta.helm.sh/release-namespace"] == n.Namespace {
					custom = append(custom, o)
				}
			}
			break
		}
	}
	if err := r.client.DeleteAndWait(ctx, custom, n.Namespace, 20*time.Second); err != nil {
		return err
	}
	if err := r.engine.Uninstall(ctx, n.Namespace, n.Name); err != nil {
		return err
	}
	if n.Name != "vault" {
		return nil
	}
	// Its volume and its key outlive the release; a new Vault has neither.
	return r.removeNamespace(ctx, n.Namespace)
}

func (r *resetter) removeNamespace(ctx context.Context, name string) error {
	namespaces := r.client.Kube.CoreV1().Namespaces()
	if err := namespaces.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting namespace %s: %w", name, err)
	}
	for {
		if _, err := namespaces.Get(ctx, name, metav1.GetOptions{}); apierrors.IsNotFound(err) {
			return nil
		}
		if err := sleep(ctx, 300*time.Millisecond); err != nil {
			return fmt.Errorf("waiting for namespace %s to go: %w", name, err)
		}
	}
}

// removeManifests leaves the RuntimeClass: a GPU Operator that is there makes
// one of its own within moments.
func (r *resetter) removeManifests(ctx context.Context) error {
	for _, gvr := range []schema.GroupVersionResource{
		{Group: "networking.k8s.io", Version: "v1", Resource: "networkpolicies"},
		{Group: "scheduling.k8s.io", Version: "v1", Resource: "priorityclasses"},
	} {
		list, err := r.client.Dynamic.Resource(gvr).List(ctx, metav1.ListOptions{})
		if err != nil {
			return fmt.Errorf("listing %s: %w", gvr.Resource, err)
		}
		for i := range list.Items {
			o := &list.Items[i]
			if o.GetAnnotations()[appliedBy] == "" {
				continue
			}
			if err := r.client.DeleteOwned(ctx, o); err != nil {
				return err
			}
		}
	}
	return nil
}
