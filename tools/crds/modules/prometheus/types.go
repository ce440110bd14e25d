// Package prometheus pins the API types that the prometheus CRDs are generated from.
package prometheus

import (
	_ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	_ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1alpha1"
)
