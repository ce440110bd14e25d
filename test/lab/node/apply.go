package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
)

// apply makes the objects of a stream of documents.
func apply(ctx context.Context, config *rest.Config, raw []byte) error {
	disc, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	groups, err := restmapper.GetAPIGroupResources(disc)
	if err != nil {
		return fmt.Errorf("asking for the API's resources: %w", err)
	}
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	documents := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(raw), 4096)
	for {
		object := &unstructured.Unstructured{}
		err := documents.Decode(&object.Object)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading the cluster's own objects: %w", err)
		}
		if len(object.Object) == 0 {
			continue
		}
		gvk := object.GroupVersionKind()
		m, err := mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		if err != nil {
			return fmt.Errorf("making %s %s: %w", gvk.Kind, object.GetName(), err)
		}
		_, err = client.Resource(m.Resource).Namespace(object.GetNamespace()).Create(ctx, object, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("making %s %s: %w", gvk.Kind, object.GetName(), err)
		}
	}
}

// serviceLB is servicelb-standin: Services of type LoadBalancer get the node's
// address, as k3s's own controller gives it. kube-proxy does the rest.
func serviceLB(ctx context.Context, config *rest.Config) error {
	core, err := corev1client.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	for {
		list, err := core.Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
		if err == nil {
			for _, s := range list.Items {
				if s.Spec.Type != corev1.ServiceTypeLoadBalancer || len(s.Status.LoadBalancer.Ingress) > 0 {
					continue
				}
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: nodeAddress}}
				// A conflict or an error comes round again in a second.
				_, _ = core.Services(s.Namespace).UpdateStatus(ctx, &s, metav1.UpdateOptions{})
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}
