// Package snapshot reads every object of a cluster and compares two states of
// it. What two installs of the same box can't have in common (identities, times,
// addresses, generated keys) is left out by the rules in normalise.go; whatever
// no rule names is compared. It must not know how the cluster came into its state.
package snapshot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
)

// State maps the name of an object ("Deployment.apps keda/keda-operator") to
// what is compared of it.
type State map[string]any

// Take lists every object that the cluster can list.
func Take(ctx context.Context, disco discovery.DiscoveryInterface, client dynamic.Interface) (State, error) {
	lists, err := disco.ServerPreferredResources()
	var partial *discovery.ErrGroupDiscoveryFailed
	if err != nil && !errors.As(err, &partial) {
		return nil, fmt.Errorf("discovering the cluster's resources: %w", err)
	}
	if partial != nil {
		// An aggregated API without an answer has no objects to compare.
		for gv := range partial.Groups {
			if !strings.HasSuffix(gv.Group, "metrics.k8s.io") {
				return nil, fmt.Errorf("discovering the cluster's resources: %w", err)
			}
		}
	}
	var objects []unstructured.Unstructured
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return nil, fmt.Errorf("reading the cluster's resources: %w", err)
		}
		for _, r := range list.APIResources {
			if strings.Contains(r.Name, "/") || !slices.Contains(r.Verbs, "list") || !slices.Contains(r.Verbs, "get") || passing(gv.Group, r.Name) {
				continue
			}
			found, err := client.Resource(gv.WithResource(r.Name)).List(ctx, metav1.ListOptions{})
			if apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("listing %s: %w", r.Name, err)
			}
			objects = append(objects, found.Items...)
		}
	}
	return normalise(objects)
}

// Diff names what differs, sorted: "+ NAME" is only in b, "- NAME" only in a,
// "~ NAME path: a → b" is in both.
func Diff(a, b State) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(a)) {
		other, ok := b[name]
		if !ok {
			out = append(out, "- "+name)
			continue
		}
		out = append(out, differences("~ "+name, "", a[name], other)...)
	}
	for _, name := range slices.Sorted(maps.Keys(b)) {
		if _, ok := a[name]; !ok {
			out = append(out, "+ "+name)
		}
	}
	return out
}

func differences(name, path string, a, b any) []string {
	left, leftMap := a.(map[string]any)
	right, rightMap := b.(map[string]any)
	if !leftMap || !rightMap {
		if reflect.DeepEqual(a, b) {
			return nil
		}
		return []string{fmt.Sprintf("%s %s: %s → %s", name, strings.TrimPrefix(path, "."), short(a), short(b))}
	}
	keys := slices.Collect(maps.Keys(left))
	for k := range right {
		if _, ok := left[k]; !ok {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	var out []string
	for _, k := range keys {
		out = append(out, differences(name, path+"."+k, left[k], right[k])...)
	}
	return out
}

func short(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprintf("%v", v)
	}
	if text := string(raw); len(text) > 160 {
		return text[:160] + "…"
	}
	return string(raw)
}
