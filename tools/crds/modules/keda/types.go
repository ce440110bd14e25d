// Package keda pins the API types that the keda CRDs are generated from.
package keda

import (
	_ "github.com/kedacore/keda/v2/apis/eventing/v1alpha1"
	_ "github.com/kedacore/keda/v2/apis/keda/v1alpha1"
)
