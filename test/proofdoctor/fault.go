package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/util/retry"
)

// act changes something about the box.
type act func(context.Context, *box) error

// fault is one way to break a box.
type fault struct {
	name string
	// want are the ids of which one has to come first.
	want []string
	// inject breaks it, revert takes that back.
	inject, revert act
	// fix says that doctor claims to mend it.
	fix bool
	// patience is how long it may take to show; usualPatience where 0.
	patience time.Duration
}

// wants names the ids of which one has to come first.
func wants(ids ...string) []string { return ids }

// inOrder does one thing after the other, until one fails.
func inOrder(acts ...act) act {
	return func(ctx context.Context, b *box) error {
		for _, a := range acts {
			if err := a(ctx, b); err != nil {
				return err
			}
		}
		return nil
	}
}

// shell runs a script on the machine.
func shell(script string) act {
	return func(ctx context.Context, b *box) error {
		_, err := b.sh(ctx, script)
		return err
	}
}

// send sends a signal to the machine's processes of a name.
func send(name, which string) string {
	return `found=; for p in /proc/[0-9]*; do
  if [ "$(cat $p/comm 2>/dev/null)" = ` + name + ` ]; then kill -` + which + ` ${p#/proc/} && found=1; fi
done; [ -n "$found" ] || { echo "no ` + name + ` runs" >&2; exit 1; }
`
}

// frozen halts a program of the machine and lets it go on.
func frozen(name string, want []string, program string) fault {
	return fault{name: name, want: want, inject: shell(send(program, "STOP")), revert: shell(send(program, "CONT"))}
}

// kind names a resource: VERSION/RESOURCE or GROUP/VERSION/RESOURCE.
type kind string

const (
	pods          kind = "v1/pods"
	services      kind = "v1/services"
	secrets       kind = "v1/secrets"
	nodes         kind = "v1/nodes"
	configMaps    kind = "v1/configmaps"
	claims        kind = "v1/persistentvolumeclaims"
	deployments   kind = "apps/v1/deployments"
	scaledObjects kind = "keda.sh/v1alpha1/scaledobjects"
	webhooks      kind = "admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
	routes        kind = "gateway.networking.k8s.io/v1/httproutes"
)

func (k kind) resource() schema.GroupVersionResource {
	parts := strings.Split(string(k), "/")
	if len(parts) == 2 {
		return schema.GroupVersionResource{Version: parts[0], Resource: parts[1]}
	}
	return schema.GroupVersionResource{Group: parts[0], Version: parts[1], Resource: parts[2]}
}

func (b *box) at(k kind, namespace string) dynamic.ResourceInterface {
	if namespace == "" {
		return b.objects.Resource(k.resource())
	}
	return b.objects.Resource(k.resource()).Namespace(namespace)
}

// made adds an object.
func made(k kind, namespace, object string) act {
	return func(ctx context.Context, b *box) error {
		o := &unstructured.Unstructured{}
		if err := o.UnmarshalJSON([]byte(object)); err != nil {
			return fmt.Errorf("reading the fault's object: %w", err)
		}
		_, err := b.at(k, namespace).Create(ctx, o, metav1.CreateOptions{})
		return err
	}
}

// gone takes an object away, at once.
func gone(k kind, namespace, name string) act {
	return func(ctx context.Context, b *box) error {
		err := b.at(k, namespace).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	}
}

// noPods takes all pods with a label away, at once, without giving them time to tidy up.
func noPods(namespace, label string) act {
	return func(ctx context.Context, b *box) error {
		return b.at(pods, namespace).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}, metav1.ListOptions{LabelSelector: label})
	}
}

// added makes a fault of an object that is added and taken away again.
func added(name string, want []string, k kind, namespace, object string) fault {
	var o struct {
		Metadata struct {
			Name string `json:"name"`
		} `json:"metadata"`
	}
	// A table that can't be read is caught by the test of the table.
	_ = json.Unmarshal([]byte(object), &o)
	return fault{name: name, want: want, inject: made(k, namespace, object), revert: gone(k, namespace, o.Metadata.Name)}
}

// edited makes a fault of a change to an object. What it was is put back as a whole.
func edited(name string, want []string, k kind, namespace, object string, change func(map[string]any) error) fault {
	var was map[string]any
	return fault{
		name: name, want: want,
		inject: func(ctx context.Context, b *box) error {
			return b.update(ctx, k, namespace, object, func(o map[string]any) error {
				was = (&unstructured.Unstructured{Object: o}).DeepCopy().Object
				return change(o)
			})
		},
		revert: func(ctx context.Context, b *box) error {
			return b.update(ctx, k, namespace, object, func(o map[string]any) error {
				for _, part := range []string{"spec", "data", "webhooks"} {
					if _, there := was[part]; there {
						o[part] = was[part]
					}
				}
				for _, part := range []string{"labels", "annotations"} {
					old, there, err := unstructured.NestedMap(was, "metadata", part)
					if err != nil {
						return err
					}
					unstructured.RemoveNestedField(o, "metadata", part)
					if there {
						err = unstructured.SetNestedMap(o, old, "metadata", part)
					}
					if err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
}

func (b *box) update(ctx context.Context, k kind, namespace, name string, change func(map[string]any) error) error {
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		o, err := b.at(k, namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if err := change(o.Object); err != nil {
			return err
		}
		_, err = b.at(k, namespace).Update(ctx, o, metav1.UpdateOptions{})
		return err
	})
}

// status merges into an object's status, as its controller would.
func (b *box) status(ctx context.Context, k kind, namespace, name, merge string) error {
	_, err := b.at(k, namespace).Patch(ctx, name, types.MergePatchType, []byte(merge), metav1.PatchOptions{}, "status")
	return err
}

// field sets one field of an object.
func field(value any, path ...string) func(map[string]any) error {
	return func(o map[string]any) error { return unstructured.SetNestedField(o, value, path...) }
}

// scaled makes a fault of a workload that is asked for no pod. Its pods get no time to
// tidy up, as on a machine that lost them.
func scaled(name string, want []string, namespace, deployment, label string) fault {
	f := edited(name, want, deployments, namespace, deployment, field(int64(0), "spec", "replicas"))
	f.inject = inOrder(f.inject, noPods(namespace, label))
	return f
}

// firstNode is the name of the machine's node.
func firstNode(ctx context.Context, b *box) (string, error) {
	list, err := b.at(nodes, "").List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	if len(list.Items) == 0 {
		return "", errors.New("the box has no node")
	}
	return list.Items[0].GetName(), nil
}

// onNode changes the node.
func onNode(change func(map[string]any) error) act {
	return func(ctx context.Context, b *box) error {
		name, err := firstNode(ctx, b)
		if err != nil {
			return err
		}
		return b.update(ctx, nodes, "", name, change)
	}
}

// served waits until the API server answers again.
func served(ctx context.Context, b *box) error {
	ctx, cancel := context.WithTimeout(ctx, execLimit)
	defer cancel()
	for {
		_, err := firstNode(ctx, b)
		if err == nil {
			return nil
		}
		if sleep(ctx, time.Second) != nil {
			return fmt.Errorf("the API server did not come back: %w", err)
		}
	}
}
