package main

import (
	"errors"
	"fmt"

	apiext "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdmarkers "sigs.k8s.io/controller-tools/pkg/crd/markers"
	"sigs.k8s.io/controller-tools/pkg/markers"
)

// Kyverno's types carry two markers that controller-gen does not know; upstream
// builds a generator with them (kyverno/kyverno hack/controller-gen). Both are
// used with one argument only, a list of required fields:
//
//	+kubebuilder:oneOf:={required:{configMap}}    one line for each alternative
//	+kubebuilder:not:={required:{name,names}}

// alternative is one entry of a schema's oneOf.
type alternative map[string][]string

// forbidden is a schema's not.
type forbidden map[string][]string

// ApplyToSchema adds the alternative to those that came before.
func (a alternative) ApplyToSchema(_ *crdmarkers.SchemaContext, s *apiext.JSONSchemaProps) error {
	part, err := requiring(a)
	if err != nil {
		return fmt.Errorf("reading marker kubebuilder:oneOf: %w", err)
	}
	s.OneOf = append(s.OneOf, part)
	return nil
}

// ApplyToSchema sets what must not match.
func (f forbidden) ApplyToSchema(_ *crdmarkers.SchemaContext, s *apiext.JSONSchemaProps) error {
	part, err := requiring(f)
	if err != nil {
		return fmt.Errorf("reading marker kubebuilder:not: %w", err)
	}
	if s.Not != nil {
		return errors.New("reading marker kubebuilder:not: it is there twice")
	}
	s.Not = &part
	return nil
}

func requiring(arguments map[string][]string) (apiext.JSONSchemaProps, error) {
	fields, ok := arguments["required"]
	if !ok || len(arguments) != 1 || len(fields) == 0 {
		return apiext.JSONSchemaProps{}, fmt.Errorf("arguments %v: want a list of required fields and nothing else", arguments)
	}
	return apiext.JSONSchemaProps{Required: fields}, nil
}

func registerKyvernoMarkers(into *markers.Registry) error {
	return errors.Join(
		into.Define("kubebuilder:oneOf", markers.DescribesType, alternative{}),
		into.Define("kubebuilder:not", markers.DescribesType, forbidden{}),
	)
}
