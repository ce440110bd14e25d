package integration

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// records gives the status of every release record, by namespace and name of the
// Secret that holds it.
func (l *lab) records(t *testing.T) map[string]string {
	t.Helper()
	list, err := l.client.Kube.CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{LabelSelector: "owner=helm"})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for i := range list.Items {
		out[list.Items[i].Namespace+"/"+list.Items[i].Name] = list.Items[i].Labels["status"]
	}
	return out
}

// lastRecord unpacks the newest record of a release.
func (l *lab) lastRecord(t *testing.T, namespace, name string) (*corev1.Secret, map[string]any) {
	t.Helper()
	list, err := l.client.Kube.CoreV1().Secrets(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "owner=helm,name=" + name})
	if err != nil {
		t.Fatal(err)
	}
	var newest *corev1.Secret
	highest := 0
	for i := range list.Items {
		if revision, err := strconv.Atoi(list.Items[i].Labels["version"]); err == nil && revision > highest {
			newest, highest = &list.Items[i], revision
		}
	}
	if newest == nil {
		t.Fatalf("release %s/%s has no record", namespace, name)
	}
	zipped, err := base64.StdEncoding.DecodeString(string(newest.Data["release"]))
	if err != nil {
		t.Fatal(err)
	}
	reader, err := gzip.NewReader(bytes.NewReader(zipped))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := io.ReadAll(reader)
	if err != nil {
		t.Fatal(err)
	}
	var document map[string]any
	if err := json.Unmarshal(raw, &document); err != nil {
		t.Fatal(err)
	}
	return newest, document
}

// mark rewrites the newest record of a release the way a run leaves it that was
// killed in the middle: in the document and in the label.
func (l *lab) mark(t *testing.T, namespace, name, status string) {
	t.Helper()
	secret, document := l.lastRecord(t, namespace, name)
	info, ok := document["info"].(map[string]any)
	if !ok {
		t.Fatalf("the record of %s/%s has no info", namespace, name)
	}
	info["status"] = status
	raw, err := json.Marshal(document)
	if err != nil {
		t.Fatal(err)
	}
	var zipped bytes.Buffer
	writer := gzip.NewWriter(&zipped)
	if _, err := writer.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	secret.Data["release"] = []byte(base64.StdEncoding.EncodeToString(zipped.Bytes()))
	secret.Labels["status"] = status
	if _, err := l.client.Kube.CoreV1().Secrets(namespace).Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// repaired leaves records as crashes do and runs the install again: each must
// end deployed, with its objects there.
func repaired(t *testing.T, l *lab) {
	marks := []struct{ namespace, name, status string }{
		{"keda", "keda", "pending-install"},
		{"vault", "vault", "pending-upgrade"},
		{"kyverno", "kyverno", "pending-rollback"},
		{"external-secrets", "external-secrets", "failed"},
		{"llm", "route", "uninstalling"},
	}
	before := map[string]map[string]any{}
	for _, m := range marks {
		_, before[m.name] = l.lastRecord(t, m.namespace, m.name)
		l.mark(t, m.namespace, m.name, m.status)
	}
	list := l.install(t)
	for _, m := range marks {
		_, after := l.lastRecord(t, m.namespace, m.name)
		info, _ := after["info"].(map[string]any)
		if info["status"] != "deployed" {
			t.Errorf("%s was left %s and is %v now", m.name, m.status, info["status"])
		}
		if after["manifest"] != before[m.name]["manifest"] {
			t.Errorf("%s: the release has other objects than before", m.name)
		}
		e, ok := done(list, "component/"+m.name+"/release")
		if !ok || m.status != "failed" && !strings.Contains(e.Message, m.status) {
			t.Errorf("%s: the event says %q and not that the record was %s", m.name, e.Message, m.status)
		}
	}
	for name, status := range l.records(t) {
		if !slices.Contains([]string{"deployed", "superseded", "failed"}, status) {
			t.Errorf("record %s is %s", name, status)
		}
	}
	if res := l.run(t, quickBound, "status", "--kubeconfig", l.Kubeconfig); res.code != 0 {
		t.Errorf("status afterwards: %s", res)
	}
}
