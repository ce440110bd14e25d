package installer

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
)

// A component that was installed once and is left out since is found by its record, the
// last one made first; what the plan removes and what others installed is not.
func TestStrays(t *testing.T) {
	record := func(namespace, release, revision string, ours bool, minute int) *corev1.Secret {
		s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "sh.helm.release.v1." + release + ".v" + revision,
			Labels:            map[string]string{"owner": "helm", "name": release},
			CreationTimestamp: metav1.NewTime(time.Unix(0, 0).Add(time.Duration(minute) * time.Minute)),
		}}
		if ours {
			s.Labels[chart.DigestLabel] = "0123"
		}
		return s
	}
	namespace := func(name string) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": name}}}
	}
	kube := fake.NewClientset(
		record("keda", "keda", "1", true, 1), record("keda", "keda", "2", true, 5),
		record("kyverno", "kyverno", "1", true, 3),
		record("kyverno", "somebodys", "1", false, 4),
		record("vault", "vault", "1", true, 2),
		record("elsewhere", "kyverno", "1", true, 2),
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "keda", Name: "token"}},
	)
	plan := &Plan{Manifests: []*unstructured.Unstructured{namespace("keda"), namespace("kyverno"), namespace("vault")}}
	vault := Step{Release: &chart.Release{Namespace: "vault", Name: "vault"}}
	plan.Steps = []Step{vault}
	r := &Run{plan: plan, client: &cluster.Client{Kube: kube}}
	got, err := r.strays(t.Context())
	want := []cluster.ReleaseName{{Namespace: "keda", Name: "keda"}, {Namespace: "kyverno", Name: "kyverno"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
}
