package chart

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func recordSecret(revision, status, document string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "sh.helm.release.v1.thing.v" + revision,
			Labels: map[string]string{"owner": "helm", "name": "thing", "version": revision, "status": status, DigestLabel: "d" + revision},
		},
		Data: map[string][]byte{"release": []byte(base64.StdEncoding.EncodeToString([]byte(document)))},
	}
}

func TestRecords(t *testing.T) {
	const newest = `{"name":"thing","apply_method":"ssa","version":10,"big":9007199254740993,` +
		`"info":{"status":"failed","description":"Release \"thing\" failed: no <b>","notes":"n"},"chart":{"metadata":{"appVersion":"7"}}}`
	records := NewRecords(fake.NewClientset(recordSecret("9", "deployed", `{}`), recordSecret("10", "failed", newest)))
	if _, err := records.Last(t.Context(), "ns", "other"); !errors.Is(err, ErrNoRelease) {
		t.Errorf("Last of no release = %v", err)
	}
	last, err := records.Last(t.Context(), "ns", "thing")
	if err != nil {
		t.Fatal(err)
	}
	want := Record{Status: "failed", Digest: "d10", Revision: 10, Version: "7"}
	if last.Record != want || last.Description != `Release "thing" failed: no <b>` || !last.Unfinished() || !last.Failed() || last.Pending() || last.Deployed() {
		t.Errorf("Last = %+v", last)
	}
	if err := records.MarkInterrupted(t.Context(), "ns", "thing", 10); err != nil {
		t.Fatal(err)
	}
	if last, err = records.Last(t.Context(), "ns", "thing"); err != nil || last.Status != "pending-upgrade" || !last.Pending() || !last.Unfinished() {
		t.Errorf("after mending: %+v, %v", last, err)
	}
	secret, err := records.kube.CoreV1().Secrets("ns").Get(t.Context(), recordName("thing", 10), metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	document, err := unpackRecord(secret.Data[recordKey])
	if err != nil {
		t.Fatal(err)
	}
	info, ok := document["info"].(map[string]any)
	if !ok || info["status"] != "pending-upgrade" || info["notes"] != "n" || document["apply_method"] != "ssa" || document["big"] != json.Number("9007199254740993") {
		t.Errorf("document = %v", document)
	}
	for _, digest := range []string{"", "new"} {
		if err := records.SetDigest(t.Context(), "ns", "thing", 10, digest); err != nil {
			t.Fatal(err)
		}
		if last, err = records.Last(t.Context(), "ns", "thing"); err != nil || last.Digest != digest || last.Status != "pending-upgrade" {
			t.Errorf("with digest %q: %+v, %v", digest, last, err)
		}
	}
}

func TestDamagedRecord(t *testing.T) {
	records := NewRecords(fake.NewClientset(recordSecret("1", "pending-install", "\x1f\x8bnot gzip")))
	last, err := records.Last(t.Context(), "ns", "thing")
	if err != nil || last.Status != "pending-install" || last.Description != "" {
		t.Errorf("Last = %+v, %v", last, err)
	}
	if err := records.MarkInterrupted(t.Context(), "ns", "thing", 1); !errors.Is(err, errDamaged) {
		t.Errorf("MarkInterrupted = %v", err)
	}
}
