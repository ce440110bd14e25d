package main

import (
	"fmt"
	"slices"
	"strings"

	apiext "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/utils/ptr"
)

// everyCRD as a fix-up's crd means all CRDs of the group.
const everyCRD = "*"

// fixup is one change that upstream makes to what the generator wrote, or one
// that llmbox needs.
type fixup struct {
	// crd is the CRD's name, or everyCRD.
	crd string
	why string
	// source is where upstream does the same.
	source string
	edit   func(*apiext.CustomResourceDefinition) error
}

func prometheusFixups(version string) []fixup {
	return []fixup{{
		crd:    everyCRD,
		why:    "tells which operator release a CRD belongs to",
		source: "prometheus-operator/prometheus-operator Makefile, target generate-crds",
		edit:   annotate("operator.prometheus.io/version", version),
	}}
}

func kedaFixups() []fixup {
	const (
		jobPatch    = "kedacore/keda config/crd/patches/scaledjob_patch.yaml"
		objectPatch = "kedacore/keda config/crd/patches/scaledobject_patch.yaml"
		podSpec     = "spec.jobTargetRef.template.spec."
		behavior    = "spec.advanced.horizontalPodAutoscalerConfig.behavior."
	)
	var all []fixup
	for _, containers := range []string{"containers", "initContainers", "ephemeralContainers"} {
		all = append(all, fixup{
			crd: "scaledjobs.keda.sh", source: jobPatch,
			why:  "protocol is a key of the list of ports, so it must be there",
			edit: onSchema(podSpec+containers+"[].ports[]", require("protocol")),
		})
	}
	all = append(all,
		fixup{
			crd: "scaledjobs.keda.sh", source: jobPatch,
			why:  "labels and annotations of the Job's pods must survive pruning",
			edit: onSchema("spec.jobTargetRef.template.metadata", preserveUnknownFields),
		},
		fixup{
			crd: "scaledjobs.keda.sh", source: jobPatch,
			why:  "metricType means something to ScaledObjects only",
			edit: onSchema("spec.triggers[]", remove("metricType")),
		},
	)
	for _, direction := range []string{"scaleDown", "scaleUp"} {
		all = append(all, fixup{
			crd: "scaledobjects.keda.sh", source: objectPatch,
			why:  "the HorizontalPodAutoscaler that KEDA makes accepts 0 to 3600 s only",
			edit: onSchema(behavior+direction+".stabilizationWindowSeconds", between(0, 3600)),
		})
	}
	return all
}

func externalSecretsFixups() []fixup {
	const why = "v1beta1 needs a conversion webhook to be served beside v1; the shipped release does not serve it either, and no object of a new box was stored in it"
	var all []fixup
	for _, kind := range []string{"clusterexternalsecrets", "clustersecretstores", "externalsecrets", "secretstores"} {
		all = append(all, fixup{
			crd: kind + ".external-secrets.io", why: why,
			source: "external-secrets/external-secrets v2.9.0 apis/externalsecrets/v1beta1",
			edit:   dropVersion("v1beta1"),
		})
	}
	return all
}

// annotate sets an annotation on the CRD.
func annotate(key, value string) func(*apiext.CustomResourceDefinition) error {
	return func(d *apiext.CustomResourceDefinition) error {
		d.Annotations[key] = value
		return nil
	}
}

// dropVersion takes a version that is not the stored one out of the CRD.
func dropVersion(name string) func(*apiext.CustomResourceDefinition) error {
	return func(d *apiext.CustomResourceDefinition) error {
		i := slices.IndexFunc(d.Spec.Versions, func(v apiext.CustomResourceDefinitionVersion) bool { return v.Name == name })
		if i < 0 {
			return fmt.Errorf("dropping version %s: not there", name)
		}
		if d.Spec.Versions[i].Storage {
			return fmt.Errorf("dropping version %s: it is the stored one", name)
		}
		d.Spec.Versions = slices.Delete(d.Spec.Versions, i, i+1)
		return nil
	}
}

// onSchema edits the schema at a path in every version. A path is field names
// joined by dots; "[]" after a name means the items of that list.
func onSchema(path string, edit func(*apiext.JSONSchemaProps) error) func(*apiext.CustomResourceDefinition) error {
	return func(d *apiext.CustomResourceDefinition) error {
		for _, version := range d.Spec.Versions {
			if err := editAt(version.Schema.OpenAPIV3Schema, strings.Split(path, "."), edit); err != nil {
				return fmt.Errorf("editing %s of %s: %w", path, version.Name, err)
			}
		}
		return nil
	}
}

func editAt(s *apiext.JSONSchemaProps, path []string, edit func(*apiext.JSONSchemaProps) error) error {
	if len(path) == 0 {
		return edit(s)
	}
	name, items := strings.CutSuffix(path[0], "[]")
	child, ok := s.Properties[name]
	if !ok {
		return fmt.Errorf("no field %s", name)
	}
	target := &child
	if items {
		if child.Items == nil || child.Items.Schema == nil {
			return fmt.Errorf("field %s is no list", name)
		}
		target = child.Items.Schema
	}
	if err := editAt(target, path[1:], edit); err != nil {
		return err
	}
	s.Properties[name] = child
	return nil
}

func require(name string) func(*apiext.JSONSchemaProps) error {
	return func(s *apiext.JSONSchemaProps) error {
		if _, ok := s.Properties[name]; !ok {
			return fmt.Errorf("requiring %s: no such field", name)
		}
		if slices.Contains(s.Required, name) {
			return fmt.Errorf("requiring %s: required already", name)
		}
		s.Required = append(s.Required, name)
		return nil
	}
}

func remove(name string) func(*apiext.JSONSchemaProps) error {
	return func(s *apiext.JSONSchemaProps) error {
		if _, ok := s.Properties[name]; !ok {
			return fmt.Errorf("removing %s: no such field", name)
		}
		delete(s.Properties, name)
		return nil
	}
}

func preserveUnknownFields(s *apiext.JSONSchemaProps) error {
	s.XPreserveUnknownFields = ptr.To(true)
	return nil
}

func between(low, high float64) func(*apiext.JSONSchemaProps) error {
	return func(s *apiext.JSONSchemaProps) error {
		s.Minimum, s.Maximum = ptr.To(low), ptr.To(high)
		return nil
	}
}
