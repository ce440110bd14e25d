package kubenode

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
)

// Apply makes the objects of a stream of documents what the documents say. It goes on
// after an object that the API server refuses.
func Apply(ctx context.Context, config *rest.Config, manager string, raw []byte) error {
	return each(config, raw, func(client dynamic.ResourceInterface, object *unstructured.Unstructured) error {
		_, err := client.Apply(ctx, object.GetName(), object, metav1.ApplyOptions{FieldManager: manager, Force: true})
		return err
	})
}

// Delete takes the objects of a stream of documents away.
func Delete(ctx context.Context, config *rest.Config, raw []byte) error {
	return each(config, raw, func(client dynamic.ResourceInterface, object *unstructured.Unstructured) error {
		err := client.Delete(ctx, object.GetName(), metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
}

func each(config *rest.Config, raw []byte, do func(dynamic.ResourceInterface, *unstructured.Unstructured) error) error {
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
	var errs []error
	for {
		object := &unstructured.Unstructured{}
		err := documents.Decode(&object.Object)
		if errors.Is(err, io.EOF) {
			return errors.Join(errs...)
		}
		if err != nil {
			return errors.Join(append(errs, fmt.Errorf("reading objects: %w", err))...)
		}
		if len(object.Object) == 0 {
			continue
		}
		gvk := object.GroupVersionKind()
		m, err := mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		if err == nil {
			resource := client.Resource(m.Resource)
			if m.Scope.Name() != meta.RESTScopeNameNamespace {
				err = do(resource, object)
			} else {
				if object.GetNamespace() == "" {
					object.SetNamespace(metav1.NamespaceDefault)
				}
				err = do(resource.Namespace(object.GetNamespace()), object)
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("making %s %s: %w", gvk.Kind, object.GetName(), err))
		}
	}
}
