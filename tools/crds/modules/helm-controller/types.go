// Package helmcontroller pins the API types that the helm-controller CRDs are generated from.
package helmcontroller

import (
	_ "github.com/k3s-io/helm-controller/pkg/apis/helm.cattle.io/v1"
)
