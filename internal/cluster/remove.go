package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
)

// DeleteOwned removes an object if it is there and llmbox's own.
func (c *Client) DeleteOwned(ctx context.Context, obj *unstructured.Unstructured) error {
	res, err := c.resourceFor(obj)
	if err != nil {
		return err
	}
	there, err := res.Get(ctx, obj.GetName(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading %s: %w", describe(obj), Classify(err))
	}
	if !made(there) {
		return nil
	}
	if err := res.Delete(ctx, obj.GetName(), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting %s: %w", describe(obj), Classify(err))
	}
	return nil
}

// DeleteAndWait deletes objects and waits until they are gone. After bound, the
// finalizers of what is left are removed: whoever should do it does not.
// Objects without a namespace of their own are looked for in the given one.
func (c *Client) DeleteAndWait(ctx context.Context, objects []*unstructured.Unstructured, namespace string, bound time.Duration) error {
	type target struct {
		res  dynamic.ResourceInterface
		obj  *unstructured.Unstructured
		gone bool
	}
	var targets []*target
	for _, obj := range objects {
		obj, res, err := c.placed(obj, namespace)
		if err != nil {
			return err
		}
		if res == nil {
			continue
		}
		if err := res.Delete(ctx, obj.GetName(), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("deleting %s: %w", describe(obj), Classify(err))
		}
		targets = append(targets, &target{res: res, obj: obj})
	}
	began := time.Now()
	for {
		var left []*target
		for _, t := range targets {
			if t.gone {
				continue
			}
			if _, err := t.res.Get(ctx, t.obj.GetName(), metav1.GetOptions{}); apierrors.IsNotFound(err) {
				t.gone = true
			} else {
				left = append(left, t)
			}
		}
		if len(left) == 0 {
			return nil
		}
		if time.Since(began) > bound {
			for _, t := range left {
				_, err := t.res.Patch(ctx, t.obj.GetName(), types.MergePatchType,
					[]byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{FieldManager: FieldManager})
				if err != nil && !apierrors.IsNotFound(err) {
					return fmt.Errorf("removing the finalizers of %s: %w", describe(t.obj), Classify(err))
				}
			}
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s to go: %w", describe(left[0].obj), ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// placed is an object with the namespace that it is looked for in, and where it is asked
// for; nil where the API server knows nothing of its kind.
func (c *Client) placed(obj *unstructured.Unstructured, namespace string) (*unstructured.Unstructured, dynamic.ResourceInterface, error) {
	obj = obj.DeepCopy()
	if obj.GetNamespace() == "" {
		obj.SetNamespace(namespace)
	}
	res, err := c.resourceFor(obj)
	if meta.IsNoMatchError(err) {
		return obj, nil, nil
	}
	return obj, res, err
}

// made tells whether llmbox made an object. An operator that takes one over may write
// labels of its own in the place of ours; who applied the fields it kept still stands
// in the object.
func made(obj *unstructured.Unstructured) bool {
	if obj.GetLabels()[ManagedByLabel] == ManagedByValue {
		return true
	}
	return slices.ContainsFunc(obj.GetManagedFields(), func(f metav1.ManagedFieldsEntry) bool {
		return f.Manager == FieldManager && f.Operation == metav1.ManagedFieldsOperationApply
	})
}

// Foreign returns the object as it is in the cluster if it is there and not
// llmbox's own; nil otherwise.
func (c *Client) Foreign(ctx context.Context, obj *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	res, err := c.resourceFor(obj)
	if err != nil {
		return nil, err
	}
	there, err := res.Get(ctx, obj.GetName(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && made(there) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", describe(obj), Classify(err))
	}
	return there, nil
}

// Restore keeps somebody else's object from going with an operator that made
// itself its owner: the owner is taken off, and an object that is gone already
// comes back.
func (c *Client) Restore(ctx context.Context, saved *unstructured.Unstructured) error {
	res, err := c.resourceFor(saved)
	if err != nil {
		return err
	}
	_, err = res.Patch(ctx, saved.GetName(), types.MergePatchType,
		[]byte(`{"metadata":{"ownerReferences":null}}`), metav1.PatchOptions{FieldManager: FieldManager})
	if err == nil {
		return nil
	}
	if !apierrors.IsNotFound(err) {
		return fmt.Errorf("taking the owner off %s: %w", describe(saved), Classify(err))
	}
	again := saved.DeepCopy()
	again.SetOwnerReferences(nil)
	again.SetUID("")
	again.SetResourceVersion("")
	again.SetManagedFields(nil)
	if _, err := res.Create(ctx, again, metav1.CreateOptions{FieldManager: FieldManager}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("putting %s back: %w", describe(saved), Classify(err))
	}
	return nil
}

// DeleteOrphanedWebhooks removes webhook configurations whose every service
// lives in one of the namespaces, which are about to go: operators make them at
// run time, and one left behind would refuse whatever it matches.
func (c *Client) DeleteOrphanedWebhooks(ctx context.Context, namespaces []string) error {
	return c.deleteWebhooks(ctx, namespaces, func(*unstructured.Unstructured) (bool, error) { return true, nil })
}

// DeleteUnansweredWebhooks removes those of a namespace whose services nobody stands
// behind any more. While an operator is taken away its webhooks would refuse what has yet
// to be deleted, the objects of its own release among it.
func (c *Client) DeleteUnansweredWebhooks(ctx context.Context, namespace string) error {
	list, err := c.Kube.DiscoveryV1().EndpointSlices(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("reading who answers in namespace %s: %w", namespace, Classify(err))
	}
	answered := map[string]bool{}
	for _, slice := range list.Items {
		for _, endpoint := range slice.Endpoints {
			if endpoint.Conditions.Ready == nil || *endpoint.Conditions.Ready {
				answered[slice.Labels[discoveryv1.LabelServiceName]] = true
			}
		}
	}
	return c.deleteWebhooks(ctx, []string{namespace}, func(config *unstructured.Unstructured) (bool, error) {
		hooks, _, err := unstructured.NestedSlice(config.Object, "webhooks")
		if err != nil {
			return false, fmt.Errorf("reading %s: %w", describe(config), err)
		}
		for _, h := range hooks {
			m, _ := h.(map[string]any)
			if name, _, _ := unstructured.NestedString(m, "clientConfig", "service", "name"); answered[name] {
				return false, nil
			}
		}
		return true, nil
	})
}

func (c *Client) deleteWebhooks(ctx context.Context, namespaces []string, choose func(*unstructured.Unstructured) (bool, error)) error {
	var problems []error
	group := schema.GroupVersion{Group: "admissionregistration.k8s.io", Version: "v1"}
	for _, resource := range []string{"validatingwebhookconfigurations", "mutatingwebhookconfigurations"} {
		res := c.Dynamic.Resource(group.WithResource(resource))
		list, err := res.List(ctx, metav1.ListOptions{})
		if err != nil {
			problems = append(problems, fmt.Errorf("listing %s: %w", resource, Classify(err)))
			continue
		}
		for i := range list.Items {
			if !servedFrom(&list.Items[i], namespaces) {
				continue
			}
			if chosen, err := choose(&list.Items[i]); err != nil || !chosen {
				problems = append(problems, err)
				continue
			}
			name := list.Items[i].GetName()
			if err := res.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
				problems = append(problems, fmt.Errorf("deleting webhook configuration %s: %w", name, Classify(err)))
			}
		}
	}
	return errors.Join(problems...)
}

func servedFrom(config *unstructured.Unstructured, namespaces []string) bool {
	hooks, _, err := unstructured.NestedSlice(config.Object, "webhooks")
	if err != nil || len(hooks) == 0 {
		return false
	}
	for _, h := range hooks {
		m, _ := h.(map[string]any)
		ns, _, _ := unstructured.NestedString(m, "clientConfig", "service", "namespace")
		if !slices.Contains(namespaces, ns) {
			return false
		}
	}
	return true
}

// DeleteCRDs removes the CRDs that are llmbox's own and that no object outside
// the given namespaces and not part of the box uses. It returns those it kept;
// progress gets the number looked at after each.
func (c *Client) DeleteCRDs(ctx context.Context, crds []*unstructured.Unstructured, ours []string, progress func(done, total int)) (kept []string, err error) {
	res := c.Dynamic.Resource(crdResource())
	have, err := res.List(ctx, metav1.ListOptions{LabelSelector: ManagedByLabel + "=" + ManagedByValue})
	if err != nil {
		return nil, fmt.Errorf("listing CRDs: %w", Classify(err))
	}
	known := make(map[string]bool, len(crds))
	for _, crd := range crds {
		known[crd.GetName()] = true
	}
	var mu sync.Mutex
	var problems []error
	done := 0
	var group errgroup.Group
	group.SetLimit(8)
	for i := range have.Items {
		crd := &have.Items[i]
		if !known[crd.GetName()] {
			continue
		}
		group.Go(func() error {
			foreign, err := c.foreignObjects(ctx, crd, ours)
			if err == nil && !foreign {
				if err = res.Delete(ctx, crd.GetName(), metav1.DeleteOptions{}); apierrors.IsNotFound(err) {
					err = nil
				} else if err != nil {
					err = fmt.Errorf("deleting %s: %w", describe(crd), Classify(err))
				}
			}
			mu.Lock()
			defer mu.Unlock()
			done++
			if foreign {
				kept = append(kept, crd.GetName())
			}
			if err != nil {
				problems = append(problems, err)
			}
			progress(done, len(have.Items))
			return nil
		})
	}
	_ = group.Wait() // every failure is in problems
	slices.Sort(kept)
	return kept, errors.Join(problems...)
}

func (c *Client) foreignObjects(ctx context.Context, crd *unstructured.Unstructured, ours []string) (bool, error) {
	gvr, namespaced, ok := storedResource(crd)
	if !ok {
		return false, nil
	}
	list, err := c.Dynamic.Resource(gvr).List(ctx, metav1.ListOptions{Limit: 500})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("listing %s: %w", gvr.Resource, Classify(err))
	}
	for i := range list.Items {
		o := &list.Items[i]
		if o.GetLabels()[PartOfLabel] == ManagedByValue || namespaced && slices.Contains(ours, o.GetNamespace()) {
			continue
		}
		// What an operator of ours made goes with it; it has an owner.
		if len(o.GetOwnerReferences()) == 0 && !operatorMade(o) {
			return true, nil
		}
	}
	return false, nil
}

// operatorMade tells objects that Node Feature Discovery writes for each node
// from those a person made.
func operatorMade(o *unstructured.Unstructured) bool {
	return strings.HasPrefix(o.GetAPIVersion(), "nfd.k8s-sigs.io/")
}

func storedResource(crd *unstructured.Unstructured) (schema.GroupVersionResource, bool, bool) {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	plural, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
	scope, _, _ := unstructured.NestedString(crd.Object, "spec", "scope")
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	for _, v := range versions {
		m, _ := v.(map[string]any)
		if served, _ := m["served"].(bool); served {
			name, _ := m["name"].(string)
			return schema.GroupVersionResource{Group: group, Version: name, Resource: plural}, scope == "Namespaced", true
		}
	}
	return schema.GroupVersionResource{}, false, false
}

// DeleteNamespaces removes namespaces that carry llmbox's label and waits until
// they are gone. One that is still there after stuckAfter has its objects'
// finalizers removed: their controllers are gone already. It returns what was
// let go of that way.
func (c *Client) DeleteNamespaces(ctx context.Context, names []string, stuckAfter time.Duration, progress func(string)) ([]string, error) {
	namespaces := c.Kube.CoreV1().Namespaces()
	var going []string
	for _, name := range names {
		ns, err := namespaces.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading namespace %s: %w", name, Classify(err))
		}
		if ns.Labels[ManagedByLabel] != ManagedByValue {
			continue
		}
		if err := namespaces.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return nil, fmt.Errorf("deleting namespace %s: %w", name, Classify(err))
		}
		going = append(going, name)
	}
	var freed []string
	began := time.Now()
	for {
		var left []string
		for _, name := range going {
			if _, err := namespaces.Get(ctx, name, metav1.GetOptions{}); err == nil {
				left = append(left, name)
			} else if !apierrors.IsNotFound(err) {
				return freed, fmt.Errorf("reading namespace %s: %w", name, Classify(err))
			}
		}
		if len(left) == 0 {
			return freed, nil
		}
		progress("namespaces to go: " + strings.Join(left, ", "))
		if time.Since(began) > stuckAfter {
			began = time.Now()
			for _, name := range left {
				let, err := c.releaseFinalizers(ctx, name)
				freed = append(freed, let...)
				if err != nil {
					progress(oneLine(err.Error()))
				}
			}
		}
		select {
		case <-ctx.Done():
			return freed, fmt.Errorf("waiting for namespaces %s to go: %w", strings.Join(left, ", "), ctx.Err())
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// releaseFinalizers removes the finalizers of everything still in a namespace.
func (c *Client) releaseFinalizers(ctx context.Context, namespace string) ([]string, error) {
	c.Discovery.Invalidate()
	lists, err := c.Discovery.ServerPreferredNamespacedResources()
	if len(lists) == 0 && err != nil {
		return nil, fmt.Errorf("discovering what is left in namespace %s: %w", namespace, Classify(err))
	}
	var freed []string
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			continue
		}
		for _, r := range list.APIResources {
			if !slices.Contains(r.Verbs, "list") || !slices.Contains(r.Verbs, "patch") {
				continue
			}
			res := c.Dynamic.Resource(gv.WithResource(r.Name)).Namespace(namespace)
			items, err := res.List(ctx, metav1.ListOptions{})
			if err != nil {
				continue
			}
			for i := range items.Items {
				o := &items.Items[i]
				if len(o.GetFinalizers()) == 0 || o.GetDeletionTimestamp() == nil {
					continue
				}
				_, err := res.Patch(ctx, o.GetName(), types.MergePatchType,
					[]byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{FieldManager: FieldManager})
				if err != nil && !apierrors.IsNotFound(err) {
					return freed, fmt.Errorf("removing the finalizers of %s %s/%s: %w", r.Kind, namespace, o.GetName(), Classify(err))
				}
				freed = append(freed, r.Kind+" "+namespace+"/"+o.GetName())
			}
		}
	}
	return freed, nil
}
