//go:build tools

// Package tools pins the programs of a node that the lab compiles from this module.
package tools

import (
	_ "k8s.io/kubernetes/cmd/kube-proxy"
	_ "k8s.io/kubernetes/cmd/kubelet"
)
