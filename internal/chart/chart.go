// Package chart turns embedded (or the user's own) charts into objects and
// releases. It is the only importer of Helm. It must not know which components
// exist, in which order they come, or when one counts as ready.
package chart

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	helmchart "helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/releaseutil"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	k8syaml "k8s.io/apimachinery/pkg/util/yaml"
)

// Chart is one loaded chart.
type Chart struct {
	inner  *helmchart.Chart
	digest string
	origin string
}

// Release is what an engine brings into a cluster: a chart under a name, with
// the values that differ from the chart's own.
type Release struct {
	Name      string
	Namespace string
	Chart     *Chart
	Values    map[string]any
}

// The ways a chart can be wrong. Each is wrapped with the place.
var (
	// ErrValues means that values do not fit the chart's schema.
	ErrValues = errors.New("values do not fit the chart")
	// ErrRender means that a template could not be rendered.
	ErrRender = errors.New("chart does not render")
	// ErrLoad means that the chart could not be read at all.
	ErrLoad = errors.New("chart can't be loaded")
)

// Load reads charts/NAME from the embedded files.
func Load(fsys fs.FS, name string) (*Chart, error) {
	root := path.Join("charts", name)
	var files []*loader.BufferedFile
	err := fs.WalkDir(fsys, root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := fs.ReadFile(fsys, p)
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(p, root+"/")
		if strings.HasPrefix(rel, "ci/") {
			return nil
		}
		files = append(files, &loader.BufferedFile{Name: rel, Data: raw})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("%w: reading %s: %w", ErrLoad, root, err)
	}
	inner, err := loader.LoadFiles(files)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrLoad, root, err)
	}
	return wrap(inner, "embedded"), nil
}

// LoadPath reads a chart from a directory or a .tgz archive.
func LoadPath(name string) (*Chart, error) {
	inner, err := loader.Load(name)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrLoad, name, err)
	}
	return wrap(inner, name), nil
}

func wrap(inner *helmchart.Chart, origin string) *Chart {
	sum := sha256.New()
	files := slices.Clone(inner.Raw)
	slices.SortFunc(files, func(a, b *helmchart.File) int { return strings.Compare(a.Name, b.Name) })
	for _, f := range files {
		writeField(sum, []byte(f.Name))
		writeField(sum, f.Data)
	}
	return &Chart{inner: inner, digest: hex.EncodeToString(sum.Sum(nil)), origin: origin}
}

// writeField writes b with its length before it, so that moving bytes from one
// field to the next changes the sum.
func writeField(w io.Writer, b []byte) {
	_, _ = fmt.Fprintf(w, "%d:", len(b)) // a hash never fails to be written
	_, _ = w.Write(b)
}

// Name is the chart's own name.
func (c *Chart) Name() string { return c.inner.Name() }

// Version is the chart's own version.
func (c *Chart) Version() string { return c.inner.Metadata.Version }

// AppVersion is the version of what the chart installs.
func (c *Chart) AppVersion() string { return c.inner.AppVersion() }

// Origin says where the chart came from: "embedded" or the user's path.
func (c *Chart) Origin() string { return c.origin }

// Digest names the chart's files and the values together: equal digests render
// equal objects.
func (r Release) Digest() (string, error) {
	raw, err := json.Marshal(r.Values)
	if err != nil {
		return "", fmt.Errorf("encoding the values of release %s: %w", r.Name, err)
	}
	sum := sha256.New()
	writeField(sum, []byte(r.Chart.digest))
	writeField(sum, []byte(r.Namespace+"/"+r.Name))
	writeField(sum, raw)
	return hex.EncodeToString(sum.Sum(nil))[:40], nil
}

// Render returns the objects of the release as they would be sent to a cluster
// of that Kubernetes version ("v1.36.4"; empty for Helm's own default), in
// Helm's order of installation. Hooks are included. The APIs a cluster serves
// make no difference: our charts do not ask for them, so that equal values give
// equal objects everywhere.
func (r Release) Render(kubeVersion string) ([]*unstructured.Unstructured, error) {
	caps := chartutil.DefaultCapabilities.Copy()
	if kubeVersion != "" {
		v, err := chartutil.ParseKubeVersion(kubeVersion)
		if err != nil {
			return nil, fmt.Errorf("reading Kubernetes version %q: %w", kubeVersion, err)
		}
		caps.KubeVersion = *v
	}
	inner := r.Chart.inner
	vals := copyMap(r.Values)
	if err := chartutil.ProcessDependenciesWithMerge(inner, vals); err != nil {
		return nil, fmt.Errorf("%w: %s: resolving dependencies: %w", ErrLoad, r.Chart.Name(), err)
	}
	options := chartutil.ReleaseOptions{Name: r.Name, Namespace: r.Namespace, Revision: 1, IsInstall: true}
	toRender, err := chartutil.ToRenderValues(inner, vals, options, caps)
	if err != nil {
		return nil, fmt.Errorf("%w: component %s: %w", ErrValues, r.Name, err)
	}
	rendered, err := engine.Render(inner, toRender)
	if err != nil {
		return nil, fmt.Errorf("%w: component %s: %w", ErrRender, r.Name, err)
	}
	for name := range rendered {
		if strings.HasSuffix(name, "NOTES.txt") {
			delete(rendered, name)
		}
	}
	hooks, manifests, err := releaseutil.SortManifests(rendered, caps.APIVersions, releaseutil.InstallOrder)
	if err != nil {
		return nil, fmt.Errorf("%w: component %s: %w", ErrRender, r.Name, err)
	}
	var objects []*unstructured.Unstructured
	for _, h := range hooks {
		if objects, err = appendObjects(objects, h.Path, h.Manifest); err != nil {
			return nil, err
		}
	}
	for _, m := range manifests {
		if objects, err = appendObjects(objects, m.Name, m.Content); err != nil {
			return nil, err
		}
	}
	return objects, nil
}

func appendObjects(objects []*unstructured.Unstructured, name, content string) ([]*unstructured.Unstructured, error) {
	more, err := Decode(strings.NewReader(content))
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrRender, name, err)
	}
	return append(objects, more...), nil
}

// Decode reads a stream of YAML documents; empty ones are passed over.
func Decode(r io.Reader) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	dec := k8syaml.NewYAMLOrJSONDecoder(r, 4096)
	for {
		var raw runtime.RawExtension
		if err := dec.Decode(&raw); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, fmt.Errorf("decoding a manifest: %w", err)
		}
		var m map[string]any
		if len(raw.Raw) > 0 {
			// This decoder keeps whole numbers whole, which deep copies rely on.
			if err := utiljson.Unmarshal(raw.Raw, &m); err != nil {
				return nil, fmt.Errorf("decoding a manifest: %w", err)
			}
		}
		if len(m) > 0 {
			out = append(out, &unstructured.Unstructured{Object: m})
		}
	}
}

// MergeValues lays over on top of base, map by map; a value of over wins. A nil
// in over removes the key, as Helm has it. Neither argument is changed.
func MergeValues(base, over map[string]any) map[string]any {
	out := copyMap(base)
	for k, v := range over {
		if v == nil {
			delete(out, k)
			continue
		}
		if vm, ok := v.(map[string]any); ok {
			if bm, ok := out[k].(map[string]any); ok {
				out[k] = MergeValues(bm, vm)
				continue
			}
			v = copyMap(vm)
		}
		out[k] = v
	}
	return out
}

func copyMap(m map[string]any) map[string]any {
	out := make(map[string]any, len(m))
	for k, v := range m {
		if vm, ok := v.(map[string]any); ok {
			v = copyMap(vm)
		}
		out[k] = v
	}
	return out
}
