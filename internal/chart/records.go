package chart

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"helm.sh/helm/v3/pkg/release"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// recordKey is where a release Secret keeps Helm's own document.
const recordKey = "release"

// maxRecordBytes bounds a record once unpacked; the Secret itself holds 1 MiB.
const maxRecordBytes = 64 << 20

// errDamaged means that a record can't be unpacked.
var errDamaged = errors.New("release record can't be unpacked")

// Records reads and mends the records that Helm keeps of releases, whichever
// Helm wrote them: documents are changed field by field, so that what a newer
// Helm put there stays.
type Records struct {
	kube kubernetes.Interface
}

// NewRecords returns the records of a cluster.
func NewRecords(kube kubernetes.Interface) *Records { return &Records{kube: kube} }

// Stored is a Record with what only its Secret tells.
type Stored struct {
	Record
	// Description is Helm's sentence about the last change; a failed one's error
	// is in it. Empty where only labels were read or the document is damaged.
	Description string
	// Labels are all of the Secret's.
	Labels map[string]string
}

// Unfinished says that an operation on the release began and did not end well.
func (s Stored) Unfinished() bool {
	status := release.Status(s.Status)
	return status.IsPending() || status == release.StatusFailed || status == release.StatusUninstalling
}

// Pending says that an operation on the release has begun and not ended.
func (s Stored) Pending() bool { return release.Status(s.Status).IsPending() }

// Failed says that the last operation on the release ended with an error.
func (s Stored) Failed() bool { return release.Status(s.Status) == release.StatusFailed }

// Deployed says that the last operation on the release ended well.
func (s Stored) Deployed() bool { return release.Status(s.Status) == release.StatusDeployed }

// RecordSelector picks the Secrets that hold a release's records.
func RecordSelector(name string) string {
	return labels.SelectorFromSet(labels.Set{"owner": "helm", "name": name}).String()
}

// NewestRecord finds the newest record among release Secrets by labels alone.
func NewestRecord(secrets []*corev1.Secret) (Stored, bool) {
	var newest Stored
	for _, s := range secrets {
		revision, err := strconv.Atoi(s.Labels["version"])
		if err != nil || revision <= newest.Revision {
			continue
		}
		newest = Stored{
			Record: Record{Status: s.Labels["status"], Digest: s.Labels[DigestLabel], Revision: revision},
			Labels: s.Labels,
		}
	}
	return newest, newest.Revision > 0
}

// Last returns the newest record of a release, or ErrNoRelease.
func (r *Records) Last(ctx context.Context, namespace, name string) (Stored, error) {
	list, err := r.kube.CoreV1().Secrets(namespace).List(ctx, metav1.ListOptions{LabelSelector: RecordSelector(name)})
	if err != nil {
		return Stored{}, fmt.Errorf("reading the record of release %s/%s: %w", namespace, name, err)
	}
	secrets := make([]*corev1.Secret, len(list.Items))
	for i := range list.Items {
		secrets[i] = &list.Items[i]
	}
	newest, ok := NewestRecord(secrets)
	if !ok {
		return Stored{}, ErrNoRelease
	}
	for _, s := range secrets {
		if s.Name != recordName(name, newest.Revision) {
			continue
		}
		// A damaged document still has its labels, which is enough to mend it.
		if document, err := unpackRecord(s.Data[recordKey]); err == nil {
			newest.Description, _, _ = unstructured.NestedString(document, "info", "description")
			newest.Version, _, _ = unstructured.NestedString(document, "chart", "metadata", "appVersion")
		}
	}
	return newest, nil
}

// MarkInterrupted turns a record that a dead or failed operation left behind
// into an interrupted upgrade. Helm's own engine and helm-controller's Job both
// go on from there with an upgrade, whatever the failure policy is, and an
// upgrade removes what the next chart no longer has.
func (r *Records) MarkInterrupted(ctx context.Context, namespace, name string, revision int) error {
	secrets := r.kube.CoreV1().Secrets(namespace)
	secret, err := secrets.Get(ctx, recordName(name, revision), metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("reading revision %d of release %s/%s: %w", revision, namespace, name, err)
	}
	document, err := unpackRecord(secret.Data[recordKey])
	if err != nil {
		return fmt.Errorf("mending revision %d of release %s/%s: %w", revision, namespace, name, err)
	}
	status := release.StatusPendingUpgrade.String()
	if err := unstructured.SetNestedField(document, status, "info", "status"); err != nil {
		return fmt.Errorf("mending revision %d of release %s/%s: %w: %w", revision, namespace, name, errDamaged, err)
	}
	if err := unstructured.SetNestedField(document, "interrupted; repaired by llmbox", "info", "description"); err != nil {
		return fmt.Errorf("mending revision %d of release %s/%s: %w: %w", revision, namespace, name, errDamaged, err)
	}
	if secret.Data[recordKey], err = packRecord(document); err != nil {
		return fmt.Errorf("mending revision %d of release %s/%s: %w", revision, namespace, name, err)
	}
	secret.Labels["status"] = status
	if _, err := secrets.Update(ctx, secret, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("mending revision %d of release %s/%s: %w", revision, namespace, name, err)
	}
	return nil
}

// SetDigest says on a record which digest its revision came from; an empty one
// takes the saying back. Helm hands such labels on from revision to revision.
func (r *Records) SetDigest(ctx context.Context, namespace, name string, revision int, digest string) error {
	var value any
	if digest != "" {
		value = digest
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{DigestLabel: value}}})
	if err != nil {
		return fmt.Errorf("labelling revision %d of release %s/%s: %w", revision, namespace, name, err)
	}
	_, err = r.kube.CoreV1().Secrets(namespace).Patch(ctx, recordName(name, revision), types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("labelling revision %d of release %s/%s: %w", revision, namespace, name, err)
	}
	return nil
}

func recordName(name string, revision int) string {
	return fmt.Sprintf("sh.helm.release.v1.%s.v%d", name, revision)
}

// unpackRecord reads base64 of gzip of JSON; very old records are not zipped.
func unpackRecord(data []byte) (map[string]any, error) {
	raw, err := base64.StdEncoding.DecodeString(string(data))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	if bytes.HasPrefix(raw, []byte{0x1f, 0x8b}) {
		zipped, err := gzip.NewReader(bytes.NewReader(raw))
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errDamaged, err)
		}
		if raw, err = io.ReadAll(io.LimitReader(zipped, maxRecordBytes)); err != nil {
			return nil, fmt.Errorf("%w: %w", errDamaged, err)
		}
	}
	var document map[string]any
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber() // numbers go back as they came
	if err := dec.Decode(&document); err != nil {
		return nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	return document, nil
}

func packRecord(document map[string]any) ([]byte, error) {
	raw, err := json.Marshal(document)
	if err != nil {
		return nil, fmt.Errorf("encoding a release record: %w", err)
	}
	var zipped bytes.Buffer
	w, err := gzip.NewWriterLevel(&zipped, gzip.BestCompression)
	if err != nil {
		return nil, fmt.Errorf("packing a release record: %w", err)
	}
	if _, err := w.Write(raw); err != nil {
		return nil, fmt.Errorf("packing a release record: %w", err)
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("packing a release record: %w", err)
	}
	return []byte(base64.StdEncoding.EncodeToString(zipped.Bytes())), nil
}
