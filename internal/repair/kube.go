package repair

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
)

// Verb is what is done to an object of the cluster.
type Verb string

// The verbs. A restart is what "kubectl rollout restart" does.
const (
	DeleteObject  Verb = "delete"
	PatchObject   Verb = "patch"
	RestartObject Verb = "restart"
)

// Kube is one change of one object of the cluster.
type Kube struct {
	Verb Verb `json:"verb"`
	// Resource is plural, with its group and version: "apps/v1/deployments", "v1/pods".
	Resource  string `json:"resource"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	// Patch is a JSON merge patch (RFC 7386).
	Patch string `json:"patch,omitempty"`
}

// KubeCheck is something to be seen in the cluster.
type KubeCheck struct {
	Resource  string `json:"resource"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	// Absent holds when there is no such object.
	Absent bool `json:"absent,omitempty"`
	// Ready holds when as many replicas are ready as asked for, and at least one, and all
	// of them are of the newest template.
	Ready bool `json:"ready,omitempty"`
	// Field has the value; dotted. An empty value holds where the field is absent, too.
	Field string `json:"field,omitempty"`
	Value string `json:"value,omitempty"`
}

// ErrNoCluster means that there is no way to the box's cluster.
var ErrNoCluster = errors.New("the cluster can't be reached")

const kubeDeadline = 15 * time.Second

func resourceOf(text string) (schema.GroupVersionResource, string) {
	parts := strings.Split(text, "/")
	if len(parts) == 2 {
		return schema.GroupVersionResource{Version: parts[0], Resource: parts[1]}, parts[1]
	}
	if len(parts) == 3 {
		return schema.GroupVersionResource{Group: parts[0], Version: parts[1], Resource: parts[2]}, parts[2]
	}
	return schema.GroupVersionResource{}, text
}

// words are a change as typed.
func (k Kube) words() []string {
	_, kind := resourceOf(k.Resource)
	words := []string{"kubectl"}
	if k.Namespace != "" {
		words = append(words, "-n", k.Namespace)
	}
	kind = strings.TrimSuffix(kind, "s")
	switch k.Verb {
	case DeleteObject:
		return append(words, "delete", kind, quoted(k.Name))
	case RestartObject:
		return append(words, "rollout", "restart", kind+"/"+k.Name)
	case PatchObject:
		return append(words, "patch", kind, quoted(k.Name), "--type=merge", "-p", quoted(k.Patch))
	}
	return words
}

func (w *worker) object(resource, namespace string) (dynamic.ResourceInterface, error) {
	if w.machine.options.Cluster == nil {
		return nil, ErrNoCluster
	}
	gvr, _ := resourceOf(resource)
	if namespace == "" {
		return w.machine.options.Cluster.Resource(gvr), nil
	}
	return w.machine.options.Cluster.Resource(gvr).Namespace(namespace), nil
}

// kube changes one object. What is gone already needs no deleting.
func (w *worker) kube(ctx context.Context, k Kube) error {
	ctx, cancel := context.WithTimeout(ctx, kubeDeadline)
	defer cancel()
	objects, err := w.object(k.Resource, k.Namespace)
	if err != nil {
		return err
	}
	switch k.Verb {
	case DeleteObject:
		err = objects.Delete(ctx, k.Name, metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) {
			err = nil
		}
	case PatchObject:
		_, err = objects.Patch(ctx, k.Name, types.MergePatchType, []byte(k.Patch), metav1.PatchOptions{FieldManager: "llmbox"})
	case RestartObject:
		var patch []byte
		patch, err = json.Marshal(map[string]any{"spec": map[string]any{"template": map[string]any{"metadata": map[string]any{
			"annotations": map[string]string{"kubectl.kubernetes.io/restartedAt": time.Now().UTC().Format(time.RFC3339)},
		}}}})
		if err == nil {
			_, err = objects.Patch(ctx, k.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{FieldManager: "llmbox"})
		}
	}
	if err != nil {
		return fmt.Errorf("changing %s %s: %w", k.Resource, k.Name, err)
	}
	return nil
}

func (w *worker) kubeHolds(ctx context.Context, c KubeCheck) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, kubeDeadline)
	defer cancel()
	objects, err := w.object(c.Resource, c.Namespace)
	if err != nil {
		return false, err
	}
	o, err := objects.Get(ctx, c.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return c.Absent, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking at %s %s: %w", c.Resource, c.Name, err)
	}
	switch {
	case c.Absent:
		return false, nil
	case c.Ready && !rolledOut(o):
		return false, nil
	case c.Field != "":
		value, found, err := unstructured.NestedFieldNoCopy(o.Object, strings.Split(c.Field, ".")...)
		if err != nil {
			return false, fmt.Errorf("looking at %s of %s: %w", c.Field, c.Name, err)
		}
		if !found {
			return c.Value == "", nil
		}
		return fmt.Sprint(value) == c.Value, nil
	}
	return true, nil
}

// rolledOut says whether a workload has as many ready pods of its newest template as it
// asks for.
func rolledOut(o *unstructured.Unstructured) bool {
	number := func(fields ...string) int64 {
		n, found, err := unstructured.NestedInt64(o.Object, fields...)
		if err != nil || !found {
			return 0
		}
		return n
	}
	if number("status", "observedGeneration") < o.GetGeneration() {
		return false
	}
	if o.GetKind() == "DaemonSet" {
		want := number("status", "desiredNumberScheduled")
		return number("status", "numberReady") >= want && number("status", "updatedNumberScheduled") >= want
	}
	want := number("spec", "replicas")
	return want > 0 && number("status", "readyReplicas") >= want && number("status", "updatedReplicas") >= want && number("status", "replicas") == want
}
