//go:build tools

// Package tools pins the programs that the lab compiles from this module.
package tools

import (
	_ "github.com/envoyproxy/gateway/cmd/egctl"
	_ "github.com/envoyproxy/gateway/cmd/envoy-gateway"
)
