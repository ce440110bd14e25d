package chart

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	helmchart "helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/release"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// ErrNotWhole means that a record does not hold all of its chart.
var ErrNotWhole = errors.New("the record does not hold the whole chart")

// Release returns what a revision of a release was made from, out of its record, so that
// any engine can bring it in again. Charts with dependencies are not whole in there:
// ErrNotWhole.
func (r *Records) Release(ctx context.Context, namespace, name string, revision int) (Release, error) {
	secret, err := r.kube.CoreV1().Secrets(namespace).Get(ctx, recordName(name, revision), metav1.GetOptions{})
	if err != nil {
		return Release{}, fmt.Errorf("reading revision %d of release %s/%s: %w", revision, namespace, name, err)
	}
	document, err := unpackRecord(secret.Data[recordKey])
	if err != nil {
		return Release{}, fmt.Errorf("reading revision %d of release %s/%s: %w", revision, namespace, name, err)
	}
	raw, err := json.Marshal(document)
	if err != nil {
		return Release{}, fmt.Errorf("reading revision %d of release %s/%s: %w", revision, namespace, name, err)
	}
	var stored release.Release
	if err := json.Unmarshal(raw, &stored); err != nil || stored.Chart == nil || stored.Chart.Metadata == nil {
		return Release{}, fmt.Errorf("reading revision %d of release %s/%s: %w", revision, namespace, name, errDamaged)
	}
	ch, err := chartOfRecord(stored.Chart)
	if err != nil {
		return Release{}, fmt.Errorf("reading revision %d of release %s/%s: %w", revision, namespace, name, err)
	}
	return Release{Name: name, Namespace: namespace, Chart: ch, Values: stored.Config}, nil
}

// chartOfRecord makes files of a chart again: a record keeps what Helm made of them.
func chartOfRecord(c *helmchart.Chart) (*Chart, error) {
	if len(c.Metadata.Dependencies) > 0 {
		return nil, ErrNotWhole
	}
	metadata, err := yaml.Marshal(c.Metadata)
	if err != nil {
		return nil, err
	}
	values, err := yaml.Marshal(c.Values)
	if err != nil {
		return nil, err
	}
	files := []*loader.BufferedFile{{Name: "Chart.yaml", Data: metadata}, {Name: "values.yaml", Data: values}}
	if len(c.Schema) > 0 {
		files = append(files, &loader.BufferedFile{Name: "values.schema.json", Data: c.Schema})
	}
	for _, group := range [][]*helmchart.File{c.Templates, c.Files} {
		for _, f := range group {
			files = append(files, &loader.BufferedFile{Name: f.Name, Data: f.Data})
		}
	}
	inner, err := loader.LoadFiles(files)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLoad, err)
	}
	return wrap(inner, "record"), nil
}
