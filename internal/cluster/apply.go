package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

// digestAnnotation tells whether an object applied by llmbox is already what it
// would apply.
const digestAnnotation = "llmbox.dev/applied-digest"

func crdResource() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
}

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

// LoadCRDs reads crds/NAME/*.yaml of each named folder.
func LoadCRDs(fsys fs.FS, names []string) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	for _, name := range names {
		dir := path.Join("crds", name)
		entries, err := fs.ReadDir(fsys, dir)
		if err != nil {
			return nil, fmt.Errorf("reading the CRDs of %s: %w", name, err)
		}
		for _, e := range entries {
			if !strings.HasSuffix(e.Name(), ".yaml") {
				continue
			}
			raw, err := fs.ReadFile(fsys, path.Join(dir, e.Name()))
			if err != nil {
				return nil, fmt.Errorf("reading CRD %s: %w", e.Name(), err)
			}
			obj := &unstructured.Unstructured{}
			if err := yaml.Unmarshal(raw, &obj.Object); err != nil {
				return nil, fmt.Errorf("decoding CRD %s: %w", e.Name(), err)
			}
			out = append(out, obj)
		}
	}
	return out, nil
}

// CRDResult says what became of each CRD.
type CRDResult struct {
	// Applied are new or changed, Unchanged were as wanted, Foreign belong to
	// somebody else and were left alone.
	Applied, Unchanged, Foreign []string
}

// ApplyCRDs brings the CRDs into the cluster and waits until each is
// established. One that somebody else made is neither overwritten nor owned.
// progress is called after each with the number done.
func (c *Client) ApplyCRDs(ctx context.Context, crds []*unstructured.Unstructured, progress func(done, total int)) (CRDResult, error) {
	var result CRDResult
	have, err := c.Dynamic.Resource(crdResource()).List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return result, fmt.Errorf("listing CRDs: %w", Classify(err))
	}
	present := make(map[string]*unstructured.Unstructured, len(have.Items))
	for i := range have.Items {
		present[have.Items[i].GetName()] = &have.Items[i]
	}

	var send []*unstructured.Unstructured
	for _, crd := range crds {
		want, digest, err := prepare(crd)
		if err != nil {
			return result, err
		}
		there := present[crd.GetName()]
		switch {
		case there == nil || there.GetDeletionTimestamp() != nil:
			send = append(send, want)
		case there.GetLabels()[ManagedByLabel] != ManagedByValue:
			result.Foreign = append(result.Foreign, crd.GetName())
		case there.GetAnnotations()[digestAnnotation] != digest || !established(there):
			send = append(send, want)
		default:
			result.Unchanged = append(result.Unchanged, crd.GetName())
		}
	}
	total := len(crds)
	finished := make(chan struct{}, len(send))
	group, sending := errgroup.WithContext(ctx)
	group.SetLimit(8)
	go func() {
		done := total - len(send)
		for range finished {
			done++
			progress(done, total)
		}
	}()
	for _, crd := range send {
		result.Applied = append(result.Applied, crd.GetName())
		group.Go(func() error {
			if err := c.applyCRD(sending, crd); err != nil {
				return err
			}
			finished <- struct{}{}
			return nil
		})
	}
	err = group.Wait()
	close(finished)
	if err != nil {
		return result, err
	}
	if err := c.waitEstablished(ctx, send); err != nil {
		return result, err
	}
	if len(send) > 0 {
		c.Mapper.Reset()
	}
	return result, nil
}

// applyCRD waits out a CRD of the same name that is still being deleted: what
// was applied to it would go with it.
func (c *Client) applyCRD(ctx context.Context, crd *unstructured.Unstructured) error {
	res := c.Dynamic.Resource(crdResource())
	for {
		there, err := res.Get(ctx, crd.GetName(), metav1.GetOptions{ResourceVersion: "0"})
		if apierrors.IsNotFound(err) || (err == nil && there.GetDeletionTimestamp() == nil) {
			return patch(ctx, res, crd)
		}
		if err != nil {
			return fmt.Errorf("reading %s: %w", describe(crd), Classify(err))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for the old %s to be deleted: %w", describe(crd), ctx.Err())
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// errCRDRefused is what a CRD's own condition says when it can never serve.
var errCRDRefused = errors.New("the API server refuses the CRD")

// waitEstablished watches until each CRD is established. It lists once: these
// objects are the largest a cluster holds.
func (c *Client) waitEstablished(ctx context.Context, crds []*unstructured.Unstructured) error {
	if len(crds) == 0 {
		return nil
	}
	waiting := make(map[string]bool, len(crds))
	for _, crd := range crds {
		waiting[crd.GetName()] = true
	}
	see := func(crd *unstructured.Unstructured) error {
		if msg, refused := condition(crd, "NamesAccepted", "False"); refused {
			return fmt.Errorf("%w: %s: %s", errCRDRefused, crd.GetName(), msg)
		}
		if established(crd) {
			delete(waiting, crd.GetName())
		}
		return nil
	}
	res := c.Dynamic.Resource(crdResource())
	ours := metav1.ListOptions{LabelSelector: ManagedByLabel + "=" + ManagedByValue}
	for len(waiting) > 0 {
		list, err := res.List(ctx, ours)
		if err != nil {
			return fmt.Errorf("listing CRDs: %w", Classify(err))
		}
		for i := range list.Items {
			if err := see(&list.Items[i]); err != nil {
				return err
			}
		}
		if len(waiting) == 0 {
			return nil
		}
		following := ours
		following.ResourceVersion = list.GetResourceVersion()
		changes, err := res.Watch(ctx, following)
		if err != nil {
			return fmt.Errorf("watching CRDs: %w", Classify(err))
		}
		err = follow(ctx, changes, func(crd *unstructured.Unstructured) (bool, error) {
			err := see(crd)
			return len(waiting) == 0, err
		})
		changes.Stop()
		if err != nil {
			return fmt.Errorf("waiting for %d CRDs to be established: %w", len(waiting), err)
		}
	}
	return nil
}

// follow hands each changed object to see until that is satisfied, the watch
// ends (nil: list again) or ctx does.
func follow(ctx context.Context, changes watch.Interface, see func(*unstructured.Unstructured) (bool, error)) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, open := <-changes.ResultChan():
			if !open || e.Type == watch.Error {
				return nil
			}
			obj, ok := e.Object.(*unstructured.Unstructured)
			if !ok || e.Type == watch.Deleted {
				continue
			}
			if done, err := see(obj); done || err != nil {
				return err
			}
		}
	}
}

// AwaitServed waits until the API server answers for each kind of the objects
// that one of the CRDs defines: between a CRD being established and its handler
// being in place, a busy server still says "not found".
func (c *Client) AwaitServed(ctx context.Context, crds, objects []*unstructured.Unstructured) error {
	resources := map[schema.GroupKind]schema.GroupVersionResource{}
	for _, crd := range crds {
		if gvr, _, ok := storedResource(crd); ok {
			kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
			resources[schema.GroupKind{Group: gvr.Group, Kind: kind}] = gvr
		}
	}
	wanted := map[schema.GroupVersionResource]bool{}
	for _, obj := range objects {
		gvk := obj.GroupVersionKind()
		if gvr, ok := resources[gvk.GroupKind()]; ok {
			gvr.Version = gvk.Version
			wanted[gvr] = true
		}
	}
	group, asking := errgroup.WithContext(ctx)
	group.SetLimit(4)
	for gvr := range wanted {
		group.Go(func() error {
			for {
				_, err := c.Dynamic.Resource(gvr).List(asking, metav1.ListOptions{Limit: 1})
				if err == nil {
					return nil
				}
				if !apierrors.IsNotFound(err) {
					return fmt.Errorf("asking for %s: %w", gvr.GroupResource(), Classify(err))
				}
				select {
				case <-asking.Done():
					return fmt.Errorf("waiting for %s to be served: %w", gvr.GroupResource(), asking.Err())
				case <-time.After(50 * time.Millisecond):
				}
			}
		})
	}
	return group.Wait()
}

func established(crd *unstructured.Unstructured) bool {
	_, ok := condition(crd, "Established", "True")
	return ok
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
