// Package kyverno pins the API types that the kyverno CRDs are generated from.
package kyverno

import (
	_ "github.com/kyverno/api/api/policies.kyverno.io/v1"
	_ "github.com/kyverno/api/api/policies.kyverno.io/v1alpha1"
	_ "github.com/kyverno/api/api/policies.kyverno.io/v1beta1"
	_ "github.com/kyverno/kyverno/api/kyverno/v1"
	_ "github.com/kyverno/kyverno/api/kyverno/v1beta1"
	_ "github.com/kyverno/kyverno/api/kyverno/v2"
	_ "github.com/kyverno/kyverno/api/kyverno/v2alpha1"
	_ "github.com/kyverno/kyverno/api/kyverno/v2beta1"
	_ "github.com/kyverno/kyverno/api/policyreport/v1alpha2"
	_ "github.com/kyverno/kyverno/api/reports/v1"
)
