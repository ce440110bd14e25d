package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
)

// digestAnnotation tells whether an object applied by llmbox is already what it
// would apply.
const digestAnnotation = "llmbox.dev/applied-digest"

func decodeJSON(raw []byte, into any) error { return json.Unmarshal(raw, into) }

// Apply brings obj into the cluster by server-side apply, labelled as llmbox's.
// Nothing is sent when the object there was applied from the same bytes.
func (c *Client) Apply(ctx context.Context, obj *unstructured.Unstructured) (changed bool, err error) {
	res, err := c.resourceFor(obj)
	if err != nil {
		return false, err
	}
	want, digest, err := prepare(obj)
	if err != nil {
		return false, err
	}
	have, err := res.Get(ctx, obj.GetName(), metav1.GetOptions{})
	switch {
	case err == nil && have.GetAnnotations()[digestAnnotation] == digest && have.GetDeletionTimestamp() == nil:
		return false, nil
	case err != nil && !apierrors.IsNotFound(err):
		return false, fmt.Errorf("reading %s: %w", describe(obj), Classify(err))
	}
	return true, patch(ctx, res, want)
}

// ApplyIfAbsent creates obj unless one of that name exists, whoever made it.
func (c *Client) ApplyIfAbsent(ctx context.Context, obj *unstructured.Unstructured) (created bool, err error) {
	res, err := c.resourceFor(obj)
	if err != nil {
		return false, err
	}
	if _, err := res.Get(ctx, obj.GetName(), metav1.GetOptions{}); err == nil {
		return false, nil
	} else if !apierrors.IsNotFound(err) {
		return false, fmt.Errorf("reading %s: %w", describe(obj), Classify(err))
	}
	want, _, err := prepare(obj)
	if err != nil {
		return false, err
	}
	return true, patch(ctx, res, want)
}

func patch(ctx context.Context, res dynamic.ResourceInterface, obj *unstructured.Unstructured) error {
	raw, err := json.Marshal(obj)
	if err != nil {
		return fmt.Errorf("encoding %s: %w", describe(obj), err)
	}
	force := true
	_, err = res.Patch(ctx, obj.GetName(), types.ApplyPatchType, raw,
		metav1.PatchOptions{FieldManager: FieldManager, Force: &force})
	if err != nil {
		return fmt.Errorf("applying %s: %w", describe(obj), Classify(err))
	}
	return nil
}

// prepare copies obj with llmbox's label and the digest of its bytes.
func prepare(obj *unstructured.Unstructured) (*unstructured.Unstructured, string, error) {
	raw, err := json.Marshal(obj)
	if err != nil {
		return nil, "", fmt.Errorf("encoding %s: %w", describe(obj), err)
	}
	sum := sha256.Sum256(raw)
	digest := hex.EncodeToString(sum[:16])
	out := obj.DeepCopy()
	labels := out.GetLabels()
	if labels == nil {
		labels = map[string]string{}
	}
	labels[ManagedByLabel] = ManagedByValue
	labels[PartOfLabel] = ManagedByValue
	out.SetLabels(labels)
	annotations := out.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[digestAnnotation] = digest
	out.SetAnnotations(annotations)
	return out, digest, nil
}

func (c *Client) resourceFor(obj *unstructured.Unstructured) (dynamic.ResourceInterface, error) {
	gvk := obj.GroupVersionKind()
	mapping, err := c.Mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		return nil, fmt.Errorf("finding the API of %s: %w", describe(obj), Classify(err))
	}
	if mapping.Scope.Name() == "namespace" {
		return c.Dynamic.Resource(mapping.Resource).Namespace(obj.GetNamespace()), nil
	}
	return c.Dynamic.Resource(mapping.Resource), nil
}

func describe(obj *unstructured.Unstructured) string {
	name := obj.GetName()
	if ns := obj.GetNamespace(); ns != "" {
		name = ns + "/" + name
	}
	return obj.GetKind() + " " + name
}

// condition reports whether the object has the condition with that status, and
// its reason and message.
func condition(obj *unstructured.Unstructured, kind, status string) (string, bool) {
	list, _, err := unstructured.NestedSlice(obj.Object, "status", "conditions")
	if err != nil {
		return "", false
	}
	for _, e := range list {
		m, ok := e.(map[string]any)
		if !ok || m["type"] != kind {
			continue
		}
		reason, _ := m["reason"].(string)
		message, _ := m["message"].(string)
		text := strings.TrimPrefix(strings.TrimSpace(reason+": "+message), ": ")
		return strings.TrimSuffix(text, ":"), m["status"] == status
	}
	return "", false
}
