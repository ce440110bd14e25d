package controlplane

import _ "embed"

//go:embed stages.yaml
var stages []byte
