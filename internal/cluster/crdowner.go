package cluster

import (
	"context"
	"encoding/json"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Marks by which Helm knows the objects of a release (helm.sh/helm/v3
// pkg/action/validate.go) and those that outlive it (pkg/kube/resource_policy.go).
const (
	releaseNameAnnotation      = "meta.helm.sh/release-name"
	releaseNamespaceAnnotation = "meta.helm.sh/release-namespace"
	resourcePolicyAnnotation   = "helm.sh/resource-policy"
	helmManaged                = "Helm"
)

// ReleaseName names a Helm release.
type ReleaseName struct{ Namespace, Name string }

// GiveCRDs hands those of the named CRDs that llmbox brought to a release whose chart
// brings them itself from now on: Helm refuses to touch what it doesn't own. CRDs of
// others stay as they are.
func (c *Client) GiveCRDs(ctx context.Context, names []string, to ReleaseName) error {
	for _, name := range names {
		crd, err := c.Metadata.Resource(crdResource()).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("looking at CRD %s: %w", name, err)
		}
		if crd.GetLabels()[ManagedByLabel] != ManagedByValue {
			continue
		}
		if err := c.markCRD(ctx, name, map[string]any{ManagedByLabel: helmManaged, PartOfLabel: nil}, map[string]any{
			releaseNameAnnotation: to.Name, releaseNamespaceAnnotation: to.Namespace, resourcePolicyAnnotation: nil,
		}); err != nil {
			return err
		}
	}
	return nil
}

// TakeCRDs is the way back: of the named CRDs it takes those that one of llmbox's own
// releases owns, because an earlier chart of that release brought them. Marked to be
// kept, they survive the upgrade to a chart that doesn't have them, and with them every
// object of their kinds.
func (c *Client) TakeCRDs(ctx context.Context, names []string, from []ReleaseName) error {
	if len(names) == 0 || len(from) == 0 {
		return nil
	}
	wanted, ours := map[string]bool{}, map[ReleaseName]bool{}
	for _, name := range names {
		wanted[name] = true
	}
	for _, release := range from {
		ours[release] = true
	}
	all, err := c.Metadata.Resource(crdResource()).List(ctx, metav1.ListOptions{LabelSelector: ManagedByLabel + "=" + helmManaged})
	if err != nil {
		return fmt.Errorf("listing the CRDs of Helm releases: %w", err)
	}
	for i := range all.Items {
		crd := &all.Items[i]
		marks := crd.GetAnnotations()
		if !wanted[crd.GetName()] || !ours[ReleaseName{marks[releaseNamespaceAnnotation], marks[releaseNameAnnotation]}] {
			continue
		}
		if err := c.markCRD(ctx, crd.GetName(), map[string]any{ManagedByLabel: ManagedByValue, PartOfLabel: ManagedByValue}, map[string]any{
			releaseNameAnnotation: nil, releaseNamespaceAnnotation: nil, resourcePolicyAnnotation: "keep",
		}); err != nil {
			return err
		}
	}
	return nil
}

func (c *Client) markCRD(ctx context.Context, name string, labels, annotations map[string]any) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels, "annotations": annotations}})
	if err != nil {
		return fmt.Errorf("encoding the new owner of CRD %s: %w", name, err)
	}
	if _, err := c.Metadata.Resource(crdResource()).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("changing the owner of CRD %s: %w", name, err)
	}
	return nil
}
