//go:build tools

// Package tools pins the programs that the lab compiles from this module.
package tools

import (
	_ "github.com/NVIDIA/gpu-operator/cmd/gpu-operator"
	_ "github.com/NVIDIA/gpu-operator/validator"
)
