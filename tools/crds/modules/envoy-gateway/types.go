// Package envoygateway pins the API types that the envoy-gateway CRDs are generated from.
package envoygateway

import (
	_ "github.com/envoyproxy/gateway/api/v1alpha1"
)
