// Package gpuoperator pins the API types that the gpu-operator CRDs are generated from.
package gpuoperator

import (
	_ "github.com/NVIDIA/gpu-operator/api/nvidia/v1"
	_ "github.com/NVIDIA/gpu-operator/api/nvidia/v1alpha1"
)
