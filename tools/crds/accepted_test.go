package main

import (
	"encoding/json"
	"testing"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiext "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
)

// annotationLimit is the most an object's annotations may hold together: who
// applies a larger CRD the old way (kubectl apply without --server-side) is
// refused.
const annotationLimit = 262144

// TestAccepted runs the API server's own checks for a CRD that is created: names,
// versions, structural schema, defaults, and every CEL rule compiled and costed.
func TestAccepted(t *testing.T) {
	for _, g := range groups() {
		t.Run(g.name, func(t *testing.T) {
			for name, d := range readCommitted(t, g) {
				apiext.SetDefaults_CustomResourceDefinition(d)
				apiext.SetDefaults_CustomResourceDefinitionSpec(&d.Spec)
				var internal apiextensions.CustomResourceDefinition
				if err := apiext.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition(d, &internal, nil); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				for _, err := range validation.ValidateCustomResourceDefinition(t.Context(), &internal) {
					// Set by the API server when it stores the object.
					if err.Field == "status.storedVersions" {
						continue
					}
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
}

// TestForm holds what every embedded CRD has in common.
func TestForm(t *testing.T) {
	for _, g := range groups() {
		t.Run(g.name, func(t *testing.T) {
			for name, d := range readCommitted(t, g) {
				if d.Labels[labelPartOf] != "llmbox" || d.Labels[labelManagedBy] != "llmbox" {
					t.Errorf("%s: labels are %v", name, d.Labels)
				}
				if d.Annotations[annotationSource] == "" {
					t.Errorf("%s: does not say what it was generated from", name)
				}
				content, err := json.Marshal(d)
				if err != nil {
					t.Fatal(err)
				}
				if len(content) >= annotationLimit {
					t.Errorf("%s: %d bytes, more than an annotation holds", name, len(content))
				}
				before := string(content)
				withoutDescriptions(d)
				after, err := json.Marshal(d)
				if err != nil {
					t.Fatal(err)
				}
				if string(after) != before {
					t.Errorf("%s: holds descriptions", name)
				}
			}
		})
	}
}
