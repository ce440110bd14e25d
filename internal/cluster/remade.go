package cluster

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
)

// Identity is one object as it is in the cluster now; another one of the same name is not
// this one.
type Identity struct {
	res dynamic.ResourceInterface
	obj *unstructured.Unstructured
	uid types.UID
}

// Identities finds those of the objects that are there. Objects without a namespace of
// their own are looked for in the given one.
func (c *Client) Identities(ctx context.Context, objects []*unstructured.Unstructured, namespace string) ([]Identity, error) {
	var out []Identity
	for _, obj := range objects {
		obj, res, err := c.placed(obj, namespace)
		if err != nil {
			return nil, err
		}
		if res == nil {
			continue
		}
		there, err := res.Get(ctx, obj.GetName(), metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", describe(obj), Classify(err))
		}
		out = append(out, Identity{res: res, obj: obj, uid: there.GetUID()})
	}
	return out, nil
}

// DeleteRemade deletes objects of the same names that are others by now: the controller
// that puts ClusterRoles together applies one again that was deleted beside its parts
// (kubernetes/kubernetes pkg/controller/clusterroleaggregation), and an operator may make
// its own things anew until it ends. Who waits for them to go would wait for ever.
func (c *Client) DeleteRemade(ctx context.Context, former []Identity) error {
	var problems []error
	for _, f := range former {
		there, err := f.res.Get(ctx, f.obj.GetName(), metav1.GetOptions{})
		if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
			continue
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("reading %s: %w", describe(f.obj), Classify(err)))
			continue
		}
		uid := there.GetUID()
		if uid == f.uid || there.GetDeletionTimestamp() != nil {
			continue
		}
		err = f.res.Delete(ctx, f.obj.GetName(), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			problems = append(problems, fmt.Errorf("deleting %s: %w", describe(f.obj), Classify(err)))
		}
	}
	return errors.Join(problems...)
}
