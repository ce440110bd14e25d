// Package externalsecrets pins the API types that the external-secrets CRDs are generated from.
package externalsecrets

import (
	_ "github.com/external-secrets/external-secrets/apis/externalsecrets/v1"
	_ "github.com/external-secrets/external-secrets/apis/externalsecrets/v1alpha1"
	_ "github.com/external-secrets/external-secrets/apis/externalsecrets/v1beta1"
	_ "github.com/external-secrets/external-secrets/apis/generators/v1alpha1"
)
