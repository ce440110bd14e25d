package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	apiext "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

// Gateway API publishes one set of Go types in two channels and marks the
// differences by tags inside the descriptions, which its own generator
// (kubernetes-sigs/gateway-api tools/generator/main.go) reads. Plain
// controller-gen would give the experimental channel. The standard channel is
// made here: what is stable, and what Envoy Gateway's admission policy for safe
// upgrades expects to find by annotation.
const (
	gatewayChannel      = "standard"
	tagExperimental     = "<gateway:experimental>"
	tagIPAddress        = "<gateway:validateIPAddress>"
	tagValidationPrefix = "<gateway:" + gatewayChannel + ":validation:"

	gatewayAPIGenerator = "kubernetes-sigs/gateway-api tools/generator/main.go"
)

var (
	gatewayEnum    = regexp.MustCompile(regexp.QuoteMeta(tagValidationPrefix) + `Enum=([A-Za-z;]*)>`)
	gatewayRule    = regexp.MustCompile(regexp.QuoteMeta(tagValidationPrefix) + `XValidation:message="([^"]*)",rule="([^"]*)">`)
	gatewayPattern = regexp.MustCompile(regexp.QuoteMeta(tagValidationPrefix) + "Pattern=`([^`]*)`>")
)

func gatewayAPIFixups(version string) []fixup {
	return []fixup{
		{
			crd: everyCRD, source: gatewayAPIGenerator,
			why:  "bundle version, read by gateways and by the safe-upgrade policy",
			edit: annotate("gateway.networking.k8s.io/bundle-version", version),
		},
		{
			crd: everyCRD, source: gatewayAPIGenerator,
			why:  "channel, read by the safe-upgrade policy",
			edit: annotate("gateway.networking.k8s.io/channel", gatewayChannel),
		},
		{
			crd: everyCRD, source: "kubernetes-sigs/gateway-api pkg/consts/consts.go, ApprovalLink",
			why:  "groups under k8s.io must name the review that approved them, or the CRD is marked non-conformant",
			edit: annotate(apiext.KubeAPIApprovedAnnotation, "https://github.com/kubernetes-sigs/gateway-api/pull/4530"),
		},
		{
			crd: everyCRD, source: gatewayAPIGenerator,
			why:  "alpha versions are not served in the standard channel",
			edit: withoutAlphaVersions,
		},
		{
			crd: everyCRD, source: gatewayAPIGenerator,
			why:  "experimental fields go, rules of the standard channel come",
			edit: standardChannel,
		},
	}
}

func withoutAlphaVersions(d *apiext.CustomResourceDefinition) error {
	for i := range d.Spec.Versions {
		if strings.Contains(d.Spec.Versions[i].Name, "alpha") {
			d.Spec.Versions[i].Served = false
		}
	}
	return nil
}

func standardChannel(d *apiext.CustomResourceDefinition) error {
	for _, version := range d.Spec.Versions {
		if err := standardSchema(version.Schema.OpenAPIV3Schema); err != nil {
			return fmt.Errorf("reading the tags of version %s: %w", version.Name, err)
		}
	}
	return nil
}

// standardSchema obeys the tags in a schema and all below it.
func standardSchema(s *apiext.JSONSchemaProps) error {
	for name, child := range s.Properties {
		if strings.Contains(child.Description, tagExperimental) {
			delete(s.Properties, name)
			continue
		}
		if err := standardSchema(&child); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		s.Properties[name] = child
	}
	if s.Items != nil && s.Items.Schema != nil {
		if err := standardSchema(s.Items.Schema); err != nil {
			return fmt.Errorf("items: %w", err)
		}
	}
	if strings.Contains(s.Description, tagIPAddress) {
		if s.Items == nil || s.Items.Schema == nil {
			return fmt.Errorf("tag %s on something that is no list", tagIPAddress)
		}
		s.Items.Schema.OneOf = addressByType()
	}
	return standardValidation(s)
}

// standardValidation turns validation tags into schema. A tag of the channel
// that none of the patterns understands is an error, not a rule lost.
func standardValidation(s *apiext.JSONSchemaProps) error {
	understood := 0
	for _, m := range gatewayEnum.FindAllStringSubmatch(s.Description, -1) {
		understood++
		s.Enum = nil
		for value := range strings.SplitSeq(m[1], ";") {
			raw, err := json.Marshal(value)
			if err != nil {
				return err
			}
			s.Enum = append(s.Enum, apiext.JSON{Raw: raw})
		}
	}
	for _, m := range gatewayRule.FindAllStringSubmatch(s.Description, -1) {
		understood++
		s.XValidations = append(s.XValidations, apiext.ValidationRule{Message: m[1], Rule: m[2]})
	}
	for _, m := range gatewayPattern.FindAllStringSubmatch(s.Description, -1) {
		understood++
		s.Pattern = m[1]
	}
	if tags := strings.Count(s.Description, tagValidationPrefix); tags != understood {
		return fmt.Errorf("%d validation tags, %d understood: %q", tags, understood, s.Description)
	}
	return nil
}

// addressByType lets the value of an entry of type IPAddress only be one.
func addressByType() []apiext.JSONSchemaProps {
	isAddress := []apiext.JSON{{Raw: []byte(`"IPAddress"`)}}
	return []apiext.JSONSchemaProps{
		{Properties: map[string]apiext.JSONSchemaProps{
			"type":  {Enum: isAddress},
			"value": {AnyOf: []apiext.JSONSchemaProps{{Format: "ipv4"}, {Format: "ipv6"}}},
		}},
		{Properties: map[string]apiext.JSONSchemaProps{
			"type": {Not: &apiext.JSONSchemaProps{Enum: isAddress}},
		}},
	}
}
