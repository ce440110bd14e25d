package chart

import (
	"fmt"
	"strings"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/kube"
	"helm.sh/helm/v3/pkg/release"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/resource"
)

// mergingClient sends changes that start from what is in the cluster.
//
// Helm patches custom resources by the difference between two manifests, and takes the
// last revision that came to its end for the first of them. After a revision that did not,
// neither is what the cluster holds: what that one added stays, and what it changed is not
// changed back.
type mergingClient struct {
	*kube.Client
	// unfinished are the objects of revisions after the deployed one, the newest last.
	unfinished []kube.ResourceList
}

// Update implements kube.Interface.
func (c *mergingClient) Update(original, target kube.ResourceList, force bool) (*kube.Result, error) {
	return c.UpdateThreeWayMerge(known(original, c.unfinished), target, force)
}

// known is all that llmbox may have put into objects: a field or an object of any of the
// revisions that the target has no more has to go.
func known(original kube.ResourceList, later []kube.ResourceList) kube.ResourceList {
	out := append(kube.ResourceList{}, original...)
	for _, list := range later {
		for _, info := range list {
			former := out.Get(info)
			if former == nil {
				out = append(out, info)
				continue
			}
			// Each list has objects of its own, made for this change.
			former.Object = overlaid(former.Object, info.Object)
		}
	}
	return out
}

// overlaid has the fields of both objects, the second's where both have one.
func overlaid(former, later runtime.Object) runtime.Object {
	a, isA := former.(*unstructured.Unstructured)
	b, isB := later.(*unstructured.Unstructured)
	if !isA || !isB {
		return later
	}
	return &unstructured.Unstructured{Object: overlay(a.Object, b.Object)}
}

func overlay(former, later map[string]any) map[string]any {
	out := make(map[string]any, len(former))
	for key, value := range former {
		out[key] = value
	}
	for key, value := range later {
		inner, isMap := value.(map[string]any)
		if before, wasMap := out[key].(map[string]any); isMap && wasMap {
			value = overlay(before, inner)
		}
		out[key] = value
	}
	return out
}

// unfinished finds the objects of revisions that did not come to their end since the last
// one that did.
func unfinished(cfg *action.Configuration, namespace, name string) ([]kube.ResourceList, error) {
	history, err := cfg.Releases.History(name)
	if err != nil {
		return nil, fmt.Errorf("reading the revisions of release %s/%s: %w", namespace, name, err)
	}
	deployed := 0
	for _, rel := range history {
		if rel.Info.Status == release.StatusDeployed || rel.Info.Status == release.StatusSuperseded {
			deployed = max(deployed, rel.Version)
		}
	}
	var out []kube.ResourceList
	for version := deployed + 1; version <= deployed+len(history); version++ {
		for _, rel := range history {
			if rel.Version != version {
				continue
			}
			objects, err := cfg.KubeClient.Build(strings.NewReader(rel.Manifest), false)
			if err != nil {
				// Kinds that the API server does not know have no objects either.
				cfg.Log("the objects of revision %d of %s/%s can't be told: %v", version, namespace, name, err)
				continue
			}
			out = append(out, objects.Filter(func(info *resource.Info) bool { return info.Object != nil }))
		}
	}
	return out, nil
}
