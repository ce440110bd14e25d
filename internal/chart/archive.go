package chart

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"slices"
	"strings"
	"time"

	helmchart "helm.sh/helm/v3/pkg/chart"
)

// Archive packs the chart's files into a .tgz as Helm reads it. Equal files give
// equal bytes: names are sorted and nothing of the place or the time gets in.
func (c *Chart) Archive() ([]byte, error) {
	files := slices.Clone(c.inner.Raw)
	slices.SortFunc(files, func(a, b *helmchart.File) int { return strings.Compare(a.Name, b.Name) })
	var out bytes.Buffer
	zipped := gzip.NewWriter(&out)
	packed := tar.NewWriter(zipped)
	for _, f := range files {
		header := &tar.Header{
			Typeflag: tar.TypeReg,
			Name:     c.Name() + "/" + f.Name,
			Size:     int64(len(f.Data)),
			Mode:     0o644,
			ModTime:  time.Unix(0, 0).UTC(),
			Format:   tar.FormatPAX,
		}
		if err := packed.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("packing %s of chart %s: %w", f.Name, c.Name(), err)
		}
		if _, err := packed.Write(f.Data); err != nil {
			return nil, fmt.Errorf("packing %s of chart %s: %w", f.Name, c.Name(), err)
		}
	}
	if err := packed.Close(); err != nil {
		return nil, fmt.Errorf("packing chart %s: %w", c.Name(), err)
	}
	if err := zipped.Close(); err != nil {
		return nil, fmt.Errorf("packing chart %s: %w", c.Name(), err)
	}
	return out.Bytes(), nil
}

// Defaults are a copy of the values that the chart itself brings.
func (c *Chart) Defaults() map[string]any { return copyMap(c.inner.Values) }
