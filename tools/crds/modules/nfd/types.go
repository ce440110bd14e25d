// Package nfd pins the API types that the nfd CRDs are generated from.
package nfd

import (
	_ "sigs.k8s.io/node-feature-discovery/api/nfd/v1alpha1"
)
