package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
)

// recordTimeout bounds a change of one record.
const recordTimeout = 30 * time.Second

// markInCluster rewrites the status in a record of the Secret driver, for which the
// real image has a plugin.
func markInCluster(ctx context.Context, namespace, name string, revision int, status string) error {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	config, err := rest.InClusterConfig()
	if err != nil {
		return fmt.Errorf("setting a release's status: %w", err)
	}
	core, err := corev1client.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("setting a release's status: %w", err)
	}
	return mark(ctx, core, namespace, name, revision, status)
}

func mark(ctx context.Context, core corev1client.SecretsGetter, namespace, name string, revision int, status string) error {
	secrets := core.Secrets(namespace)
	key := fmt.Sprintf("sh.helm.release.v1.%s.v%d", name, revision)
	secret, err := secrets.Get(ctx, key, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("reading the record %s: %w", key, err)
	}
	if secret.Data["release"], err = withStatus(secret.Data["release"], status); err != nil {
		return fmt.Errorf("changing the record %s: %w", key, err)
	}
	if secret.Labels == nil {
		secret.Labels = map[string]string{}
	}
	secret.Labels["status"] = status
	if _, err := secrets.Update(ctx, secret, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("writing the record %s: %w", key, err)
	}
	return nil
}

// withStatus is a record with another status: JSON, packed, in base64.
func withStatus(record []byte, status string) ([]byte, error) {
	packed, err := base64.StdEncoding.DecodeString(string(record))
	if err != nil {
		return nil, err
	}
	unzip, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, err
	}
	raw, err := io.ReadAll(unzip)
	if err != nil {
		return nil, err
	}
	// Everything else stays byte for byte as Helm wrote it.
	var document map[string]json.RawMessage
	var info map[string]json.RawMessage
	if err := json.Unmarshal(raw, &document); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(document["info"], &info); err != nil {
		return nil, err
	}
	if info["status"], err = json.Marshal(status); err != nil {
		return nil, err
	}
	if document["info"], err = json.Marshal(info); err != nil {
		return nil, err
	}
	if raw, err = json.Marshal(document); err != nil {
		return nil, err
	}
	var zipped bytes.Buffer
	zip := gzip.NewWriter(&zipped)
	_, err = zip.Write(raw)
	if err = errors.Join(err, zip.Close()); err != nil {
		return nil, err
	}
	return []byte(base64.StdEncoding.EncodeToString(zipped.Bytes())), nil
}
