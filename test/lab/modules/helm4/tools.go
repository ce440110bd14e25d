//go:build tools

// Package tools pins the programs that the lab compiles from this module.
package tools

import (
	_ "helm.sh/helm/v4/cmd/helm"
)
