package cluster

import (
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/yaml"
)

func TestClearWay(t *testing.T) {
	release := ReleaseName{Namespace: "keda", Name: "keda"}
	meta := func(name string, of ReleaseName) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "keda", Name: name, Annotations: map[string]string{
			"meta.helm.sh/release-namespace": of.Namespace, "meta.helm.sh/release-name": of.Name}}
	}
	selects := func(app string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
	}
	role := func(name string) rbacv1.RoleRef {
		return rbacv1.RoleRef{APIGroup: "rbac.authorization.k8s.io", Kind: "ClusterRole", Name: name}
	}
	keeps := appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{WhenDeleted: appsv1.RetainPersistentVolumeClaimRetentionPolicyType}
	drops := appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{WhenDeleted: appsv1.DeletePersistentVolumeClaimRetentionPolicyType}
	cluster := func() *fake.Clientset {
		binding := rbacv1.ClusterRoleBinding{ObjectMeta: meta("b", release), RoleRef: role("theirs")}
		binding.Namespace = ""
		return fake.NewClientset(
			&appsv1.Deployment{ObjectMeta: meta("d", release), Spec: appsv1.DeploymentSpec{Selector: selects("theirs")}},
			&appsv1.Deployment{ObjectMeta: meta("foreign", ReleaseName{Namespace: "keda", Name: "other"}), Spec: appsv1.DeploymentSpec{Selector: selects("theirs")}},
			&appsv1.DaemonSet{ObjectMeta: meta("d", release), Spec: appsv1.DaemonSetSpec{Selector: selects("theirs")}},
			&appsv1.StatefulSet{ObjectMeta: meta("s", release), Spec: appsv1.StatefulSetSpec{Selector: selects("theirs"), PersistentVolumeClaimRetentionPolicy: &keeps}},
			&appsv1.StatefulSet{ObjectMeta: meta("with-volumes", release), Spec: appsv1.StatefulSetSpec{Selector: selects("theirs"), PersistentVolumeClaimRetentionPolicy: &drops}},
			&corev1.Service{ObjectMeta: meta("headless", release), Spec: corev1.ServiceSpec{ClusterIP: "None"}},
			&corev1.Service{ObjectMeta: meta("addressed", release), Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.7"}},
			&rbacv1.RoleBinding{ObjectMeta: meta("b", release), RoleRef: role("theirs")},
			&binding,
		)
	}
	for _, tt := range []struct {
		name, next string
		gone       []string
	}{
		{"another selector", `{apiVersion: apps/v1, kind: Deployment, metadata: {name: d, namespace: keda}, spec: {selector: {matchLabels: {app: ours}}}}`, []string{"Deployment keda/d"}},
		{"the namespace is the release's", `{apiVersion: apps/v1, kind: Deployment, metadata: {name: d}, spec: {selector: {matchLabels: {app: ours}}}}`, []string{"Deployment d"}},
		{"the same selector", `{apiVersion: apps/v1, kind: Deployment, metadata: {name: d, namespace: keda}, spec: {replicas: 3, selector: {matchLabels: {app: theirs}}}}`, nil},
		{"not there yet", `{apiVersion: apps/v1, kind: Deployment, metadata: {name: new, namespace: keda}, spec: {selector: {matchLabels: {app: ours}}}}`, nil},
		{"another release's", `{apiVersion: apps/v1, kind: Deployment, metadata: {name: foreign, namespace: keda}, spec: {selector: {matchLabels: {app: ours}}}}`, nil},
		{"a DaemonSet", `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: d, namespace: keda}, spec: {selector: {matchLabels: {app: ours}}}}`, []string{"DaemonSet keda/d"}},
		{"a StatefulSet that leaves its volumes", `{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: s, namespace: keda}, spec: {selector: {matchLabels: {app: ours}}}}`, []string{"StatefulSet keda/s"}},
		{"a StatefulSet with another Service", `{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: s, namespace: keda}, spec: {serviceName: x, selector: {matchLabels: {app: theirs}}}}`, []string{"StatefulSet keda/s"}},
		{"a StatefulSet whose volumes go with it", `{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: with-volumes, namespace: keda}, spec: {selector: {matchLabels: {app: ours}}}}`, nil},
		{"a Service that gets an address", `{apiVersion: v1, kind: Service, metadata: {name: headless, namespace: keda}, spec: {ports: []}}`, []string{"Service keda/headless"}},
		{"a Service that keeps its own", `{apiVersion: v1, kind: Service, metadata: {name: addressed, namespace: keda}, spec: {ports: []}}`, nil},
		{"another role", `{apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {name: b, namespace: keda}, roleRef: {kind: ClusterRole, name: ours}}`, []string{"RoleBinding keda/b"}},
		{"the same role, its group left out", `{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: b}, roleRef: {kind: ClusterRole, name: theirs}}`, nil},
		{"another role for the cluster", `{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: b}, roleRef: {kind: ClusterRole, name: ours}}`, []string{"ClusterRoleBinding b"}},
		{"a kind that can be changed", `{apiVersion: v1, kind: ConfigMap, metadata: {name: d, namespace: keda}}`, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			next := &unstructured.Unstructured{}
			if err := yaml.Unmarshal([]byte(tt.next), &next.Object); err != nil {
				t.Fatal(err)
			}
			kube := cluster()
			gone, err := (&Client{Kube: kube}).ClearWay(t.Context(), []*unstructured.Unstructured{next}, release)
			if err != nil || !slices.Equal(gone, tt.gone) {
				t.Fatalf("gone are %q, %v; want %q", gone, err, tt.gone)
			}
			deleted := 0
			for _, action := range kube.Actions() {
				if action.GetVerb() == "delete" {
					deleted++
				}
			}
			if deleted != len(tt.gone) {
				t.Errorf("%d objects were deleted", deleted)
			}
		})
	}
	broken := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "apps/v1", "kind": "Deployment",
		"metadata": map[string]any{"name": "d", "namespace": "keda"}, "spec": "none"}}
	if _, err := (&Client{Kube: cluster()}).ClearWay(t.Context(), []*unstructured.Unstructured{broken}, release); err == nil {
		t.Error("an object that is none was taken")
	}
}
