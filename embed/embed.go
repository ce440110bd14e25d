// Package assets carries what the one binary brings along: charts, CRDs, plain
// manifests, the component table and the model list. It only holds files; it
// must not know how any of them is read.
package assets

import (
	"embed"
	"io/fs"
)

//go:embed all:charts all:crds manifests components.yaml models.yaml
var files embed.FS

// FS returns the embedded files: charts/NAME, crds/NAME, manifests,
// components.yaml and models.yaml.
func FS() fs.FS { return files }
