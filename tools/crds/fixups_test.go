package main

import (
	"strings"
	"testing"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiext "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
)

// TestFixupsNoticeUpstreamChanges: a fix-up whose place is gone must stop the
// run, not pass in silence.
func TestFixupsNoticeUpstreamChanges(t *testing.T) {
	port := func() *apiext.CustomResourceDefinition {
		return definition(apiext.JSONSchemaProps{Properties: map[string]apiext.JSONSchemaProps{
			"ports": {Items: &apiext.JSONSchemaPropsOrArray{Schema: &apiext.JSONSchemaProps{
				Required:   []string{"port"},
				Properties: map[string]apiext.JSONSchemaProps{"port": {}, "protocol": {}},
			}}},
		}})
	}
	tests := map[string]struct {
		edit func(*apiext.CustomResourceDefinition) error
		want string
	}{
		"works":               {onSchema("ports[]", require("protocol")), ""},
		"field gone":          {onSchema("doors[]", require("protocol")), "no field doors"},
		"no list any more":    {onSchema("ports[].port[]", require("protocol")), "field port is no list"},
		"required upstream":   {onSchema("ports[]", require("port")), "required already"},
		"required field gone": {onSchema("ports[]", require("speed")), "no such field"},
		"removed upstream":    {onSchema("ports[]", remove("speed")), "no such field"},
		"version gone":        {dropVersion("v1beta1"), "not there"},
		"version stored":      {dropVersion("v1"), "it is the stored one"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			check(t, test.edit(port()), test.want)
		})
	}
	t.Run("CRD gone", func(t *testing.T) {
		g := group{fixups: []fixup{{crd: "things.example.com", why: "test", edit: annotate("a", "b")}}}
		check(t, g.applyFixups([]*apiext.CustomResourceDefinition{port()}), `no CRD is named "things.example.com"`)
	})
}

func TestEditReachesItems(t *testing.T) {
	d := definition(apiext.JSONSchemaProps{Properties: map[string]apiext.JSONSchemaProps{
		"spec": {Properties: map[string]apiext.JSONSchemaProps{"seconds": {Type: "integer"}}},
	}})
	if err := onSchema("spec.seconds", between(0, 3600))(d); err != nil {
		t.Fatal(err)
	}
	got := d.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["seconds"]
	if got.Minimum == nil || got.Maximum == nil || *got.Minimum != 0 || *got.Maximum != 3600 {
		t.Errorf("range is %v to %v", got.Minimum, got.Maximum)
	}
}

func TestStandardChannel(t *testing.T) {
	list := &apiext.JSONSchemaPropsOrArray{Schema: &apiext.JSONSchemaProps{}}
	tests := map[string]struct {
		field apiext.JSONSchemaProps
		want  string
		holds func(apiext.JSONSchemaProps, bool) bool
	}{
		"experimental field goes": {
			apiext.JSONSchemaProps{Description: "text\n<gateway:experimental>"}, "",
			func(_ apiext.JSONSchemaProps, there bool) bool { return !there },
		},
		"text of the other channel does not make a field experimental": {
			apiext.JSONSchemaProps{Description: "<gateway:experimental:description>text</gateway:experimental:description>"}, "",
			func(_ apiext.JSONSchemaProps, there bool) bool { return there },
		},
		"values of this channel": {
			apiext.JSONSchemaProps{
				Description: "<gateway:standard:validation:Enum=A;B>\n<gateway:experimental:validation:Enum=A;B;C>",
				Enum:        []apiext.JSON{{Raw: []byte(`"A"`)}},
			}, "",
			func(s apiext.JSONSchemaProps, _ bool) bool { return len(s.Enum) == 2 && string(s.Enum[1].Raw) == `"B"` },
		},
		"rules of this channel": {
			apiext.JSONSchemaProps{Description: `<gateway:standard:validation:XValidation:message="m",rule="self == '>'">` + "\n" +
				`<gateway:experimental:validation:XValidation:message="n",rule="true">`}, "",
			func(s apiext.JSONSchemaProps, _ bool) bool {
				return len(s.XValidations) == 1 && s.XValidations[0].Rule == "self == '>'" && s.XValidations[0].Message == "m"
			},
		},
		"addresses": {
			apiext.JSONSchemaProps{Description: "<gateway:validateIPAddress>", Items: list}, "",
			func(s apiext.JSONSchemaProps, _ bool) bool { return len(s.Items.Schema.OneOf) == 2 },
		},
		"addresses of something else": {
			apiext.JSONSchemaProps{Description: "<gateway:validateIPAddress>"}, "no list", nil,
		},
		"a tag nobody knows": {
			apiext.JSONSchemaProps{Description: "<gateway:standard:validation:MaxLength=3>"}, "1 validation tags, 0 understood", nil,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			d := definition(apiext.JSONSchemaProps{Properties: map[string]apiext.JSONSchemaProps{"field": test.field}})
			check(t, standardChannel(d), test.want)
			if test.holds == nil {
				return
			}
			if got, there := d.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["field"]; !test.holds(got, there) {
				t.Errorf("there: %v, schema: %+v", there, got)
			}
		})
	}
}

func TestKyvernoMarkers(t *testing.T) {
	var s apiext.JSONSchemaProps
	check(t, alternative{"required": {"a"}}.ApplyToSchema(nil, &s), "")
	check(t, alternative{"required": {"b"}}.ApplyToSchema(nil, &s), "")
	check(t, forbidden{"required": {"a", "b"}}.ApplyToSchema(nil, &s), "")
	if len(s.OneOf) != 2 || s.OneOf[1].Required[0] != "b" || len(s.Not.Required) != 2 {
		t.Errorf("schema is %+v", s)
	}
	check(t, forbidden{"required": {"c"}}.ApplyToSchema(nil, &s), "twice")
	check(t, alternative{"minimum": {"1"}}.ApplyToSchema(nil, &s), "nothing else")
}

// TestAcceptedSeesRules shows that TestAccepted would notice a rule that does
// not compile.
func TestAcceptedSeesRules(t *testing.T) {
	d := definition(apiext.JSONSchemaProps{
		Type:         "object",
		XValidations: apiext.ValidationRules{{Rule: "self.nowhere == 1"}},
	})
	d.Spec.Group, d.Name = "example.com", "things.example.com"
	d.Spec.Scope = apiext.NamespaceScoped
	d.Spec.Names = apiext.CustomResourceDefinitionNames{Plural: "things", Singular: "thing", Kind: "Thing", ListKind: "ThingList"}
	apiext.SetDefaults_CustomResourceDefinitionSpec(&d.Spec)
	var internal apiextensions.CustomResourceDefinition
	if err := apiext.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition(d, &internal, nil); err != nil {
		t.Fatal(err)
	}
	check(t, validation.ValidateCustomResourceDefinition(t.Context(), &internal).ToAggregate(), "undefined field 'nowhere'")
}

func definition(schema apiext.JSONSchemaProps) *apiext.CustomResourceDefinition {
	d := &apiext.CustomResourceDefinition{Spec: apiext.CustomResourceDefinitionSpec{Versions: []apiext.CustomResourceDefinitionVersion{{
		Name: "v1", Served: true, Storage: true,
		Schema: &apiext.CustomResourceValidation{OpenAPIV3Schema: &schema},
	}}}}
	d.Annotations = map[string]string{}
	return d
}

func check(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("unexpected: %v", err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("error is %v, want one with %q", err, want)
	}
}
