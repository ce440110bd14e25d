package cluster

import (
	"context"
	"fmt"
	"reflect"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// ClearWay deletes those objects of a release that can't be changed into the ones of its
// next revision, because they differ in a field that the API server never changes: the
// upgrade makes them anew. It returns what it deleted.
//
// Another chart in the place of one is where that happens: both name a Deployment alike
// and select its pods by other labels. Objects of others stay, and so does a StatefulSet
// whose volumes would go with it.
func (c *Client) ClearWay(ctx context.Context, next []*unstructured.Unstructured, release ReleaseName) ([]string, error) {
	var gone []string
	for _, obj := range next {
		namespace := obj.GetNamespace()
		if namespace == "" {
			namespace = release.Namespace
		}
		have, differs, remove, err := c.fixed(ctx, obj, namespace)
		if apierrors.IsNotFound(err) || err == nil && have == nil {
			continue
		}
		if err != nil {
			return gone, fmt.Errorf("looking at %s: %w", describe(obj), Classify(err))
		}
		marks := have.GetAnnotations()
		if !differs || (ReleaseName{marks[releaseNamespaceAnnotation], marks[releaseNameAnnotation]}) != release {
			continue
		}
		uid, background := have.GetUID(), metav1.DeletePropagationBackground
		err = remove(ctx, obj.GetName(), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}, PropagationPolicy: &background})
		if err != nil && !apierrors.IsNotFound(err) {
			return gone, fmt.Errorf("deleting %s, which can't be changed: %w", describe(obj), Classify(err))
		}
		gone = append(gone, describe(obj))
	}
	return gone, nil
}

// fixed compares an object with the one there, in what can't be changed. A kind without
// such fields has no object.
func (c *Client) fixed(ctx context.Context, next *unstructured.Unstructured, namespace string) (
	have metav1.Object, differs bool, remove func(context.Context, string, metav1.DeleteOptions) error, err error) {
	get := metav1.GetOptions{}
	switch next.GroupVersionKind().GroupKind() {
	case appsv1.SchemeGroupVersion.WithKind("Deployment").GroupKind():
		client := c.Kube.AppsV1().Deployments(namespace)
		old, err := client.Get(ctx, next.GetName(), get)
		var want appsv1.Deployment
		if err = firstOf(err, next, &want); err != nil {
			return nil, false, nil, err
		}
		return old, !sameSelector(old.Spec.Selector, want.Spec.Selector), client.Delete, nil
	case appsv1.SchemeGroupVersion.WithKind("DaemonSet").GroupKind():
		client := c.Kube.AppsV1().DaemonSets(namespace)
		old, err := client.Get(ctx, next.GetName(), get)
		var want appsv1.DaemonSet
		if err = firstOf(err, next, &want); err != nil {
			return nil, false, nil, err
		}
		return old, !sameSelector(old.Spec.Selector, want.Spec.Selector), client.Delete, nil
	case appsv1.SchemeGroupVersion.WithKind("StatefulSet").GroupKind():
		client := c.Kube.AppsV1().StatefulSets(namespace)
		old, err := client.Get(ctx, next.GetName(), get)
		var want appsv1.StatefulSet
		if err = firstOf(err, next, &want); err != nil {
			return nil, false, nil, err
		}
		if p := old.Spec.PersistentVolumeClaimRetentionPolicy; p != nil && p.WhenDeleted == appsv1.DeletePersistentVolumeClaimRetentionPolicyType {
			return old, false, client.Delete, nil
		}
		differs := !sameSelector(old.Spec.Selector, want.Spec.Selector) || old.Spec.ServiceName != want.Spec.ServiceName
		return old, differs, client.Delete, nil
	case corev1.SchemeGroupVersion.WithKind("Service").GroupKind():
		client := c.Kube.CoreV1().Services(namespace)
		old, err := client.Get(ctx, next.GetName(), get)
		var want corev1.Service
		if err = firstOf(err, next, &want); err != nil {
			return nil, false, nil, err
		}
		return old, (old.Spec.ClusterIP == corev1.ClusterIPNone) != (want.Spec.ClusterIP == corev1.ClusterIPNone), client.Delete, nil
	case rbacv1.SchemeGroupVersion.WithKind("RoleBinding").GroupKind():
		client := c.Kube.RbacV1().RoleBindings(namespace)
		old, err := client.Get(ctx, next.GetName(), get)
		var want rbacv1.RoleBinding
		if err = firstOf(err, next, &want); err != nil {
			return nil, false, nil, err
		}
		return old, !sameRole(old.RoleRef, want.RoleRef), client.Delete, nil
	case rbacv1.SchemeGroupVersion.WithKind("ClusterRoleBinding").GroupKind():
		client := c.Kube.RbacV1().ClusterRoleBindings()
		old, err := client.Get(ctx, next.GetName(), get)
		var want rbacv1.ClusterRoleBinding
		if err = firstOf(err, next, &want); err != nil {
			return nil, false, nil, err
		}
		return old, !sameRole(old.RoleRef, want.RoleRef), client.Delete, nil
	}
	return nil, false, nil, nil
}

// firstOf reads an object into its type, unless there is an error already.
func firstOf(err error, from *unstructured.Unstructured, into any) error {
	if err != nil {
		return err
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(from.Object, into)
}

func sameSelector(a, b *metav1.LabelSelector) bool {
	if a == nil || b == nil {
		return a == b
	}
	expressions := len(a.MatchExpressions)+len(b.MatchExpressions) == 0 || reflect.DeepEqual(a.MatchExpressions, b.MatchExpressions)
	return expressions && (len(a.MatchLabels)+len(b.MatchLabels) == 0 || reflect.DeepEqual(a.MatchLabels, b.MatchLabels))
}

// sameRole knows that a reference without a group is one of the RBAC group.
func sameRole(a, b rbacv1.RoleRef) bool {
	for _, r := range []*rbacv1.RoleRef{&a, &b} {
		if r.APIGroup == "" {
			r.APIGroup = rbacv1.GroupName
		}
	}
	return a == b
}
