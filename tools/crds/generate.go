package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"

	"golang.org/x/tools/go/packages"
	apiext "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-tools/pkg/crd"
	"sigs.k8s.io/controller-tools/pkg/loader"
	"sigs.k8s.io/controller-tools/pkg/markers"
	"sigs.k8s.io/yaml"
)

// Labels and annotation on every CRD llmbox applies.
const (
	labelPartOf    = "app.kubernetes.io/part-of"
	labelManagedBy = "app.kubernetes.io/managed-by"
	// annotationSource names module and version of the Go types, so that a CRD
	// found in a cluster tells which release it belongs to.
	annotationSource = "llmbox.dev/crd-source"
)

// file is one CRD, ready to be written.
type file struct {
	name    string
	content []byte
}

// manifest is a CustomResourceDefinition without what only an API server
// writes (status, creation time).
type manifest struct {
	APIVersion string                              `json:"apiVersion"`
	Kind       string                              `json:"kind"`
	Metadata   manifestMetadata                    `json:"metadata"`
	Spec       apiext.CustomResourceDefinitionSpec `json:"spec"`
}

type manifestMetadata struct {
	Name        string            `json:"name"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// generate turns the group's Go types into files. moduleDir is the module that
// pins the types.
func (g group) generate(ctx context.Context, moduleDir string) ([]file, error) {
	definitions, err := g.definitions(ctx, moduleDir)
	if err != nil {
		return nil, err
	}
	if err := g.applyFixups(definitions); err != nil {
		return nil, err
	}
	files := make([]file, 0, len(definitions))
	for _, d := range definitions {
		withoutDescriptions(d)
		content, err := render(d)
		if err != nil {
			return nil, fmt.Errorf("rendering %s: %w", d.Name, err)
		}
		files = append(files, file{name: d.Name + ".yaml", content: content})
	}
	return files, nil
}

// definitions parses the packages and returns the CRDs of all kinds in them, in
// order of group and kind, descriptions included (some projects keep
// instructions to their generator there).
func (g group) definitions(ctx context.Context, moduleDir string) ([]*apiext.CustomResourceDefinition, error) {
	config := &packages.Config{
		Context: ctx,
		Dir:     moduleDir,
		// Fixed, so that types behind build constraints are the ones of the
		// machine the CRDs are for, wherever this runs.
		Env: append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=-mod=readonly"),
	}
	roots, err := loader.LoadRootsWithConfig(config, g.packages()...)
	if err != nil {
		return nil, fmt.Errorf("loading packages: %w", err)
	}

	generator := crd.Generator{}
	parser := &crd.Parser{
		Collector:                  &markers.Collector{Registry: &markers.Registry{}},
		Checker:                    &loader.TypeChecker{NodeFilters: []loader.NodeFilter{generator.CheckFilter()}},
		IgnoreUnexportedFields:     g.options.ignoreUnexportedFields,
		AllowDangerousTypes:        g.options.allowDangerousTypes,
		GenerateEmbeddedObjectMeta: g.options.embeddedObjectMeta,
	}
	if err := generator.RegisterMarkers(parser.Collector.Registry); err != nil {
		return nil, fmt.Errorf("registering markers: %w", err)
	}
	if g.options.markers != nil {
		if err := g.options.markers(parser.Collector.Registry); err != nil {
			return nil, fmt.Errorf("registering the group's own markers: %w", err)
		}
	}
	crd.AddKnownTypes(parser)
	for _, root := range roots {
		parser.NeedPackage(root)
	}
	meta := crd.FindMetav1(roots)
	if meta == nil {
		return nil, errors.Join(errors.New("no package imports meta/v1"), packageErrors(roots))
	}

	unseen := maps.Clone(g.exclude)
	var definitions []*apiext.CustomResourceDefinition
	for _, kind := range crd.FindKubeKinds(parser, meta) {
		parser.NeedCRDFor(kind, nil)
		generated, ok := parser.CustomResourceDefinitions[kind]
		if !ok {
			continue
		}
		if _, excluded := g.exclude[generated.Name]; excluded {
			delete(unseen, generated.Name)
			continue
		}
		crd.FixTopLevelMetadata(generated)
		definition := generated.DeepCopy()
		module, err := g.moduleOf(parser, kind)
		if err != nil {
			return nil, err
		}
		definition.Labels = map[string]string{labelPartOf: "llmbox", labelManagedBy: "llmbox"}
		if definition.Annotations == nil {
			definition.Annotations = map[string]string{}
		}
		definition.Annotations[annotationSource] = module.module + "@" + module.version
		definitions = append(definitions, definition)
	}
	for name := range unseen {
		return nil, fmt.Errorf("excluding %s: no such kind in the packages any more", name)
	}
	return definitions, packageErrors(roots)
}

// moduleOf finds the source that holds the Go type of a kind.
func (g group) moduleOf(parser *crd.Parser, kind schema.GroupKind) (source, error) {
	for pkg, version := range parser.GroupVersions {
		if version.Group != kind.Group {
			continue
		}
		for _, s := range g.sources {
			if strings.HasPrefix(loader.NonVendorPath(pkg.PkgPath), s.module+"/") {
				return s, nil
			}
		}
	}
	return source{}, fmt.Errorf("finding the module of %s: none of the group's sources holds it", kind)
}

// packageErrors collects what went wrong while loading and parsing. Type errors
// are expected: bodies and unused types are pruned before type-checking.
func packageErrors(roots []*loader.Package) error {
	raw := make([]*packages.Package, 0, len(roots))
	for _, root := range roots {
		raw = append(raw, root.Package)
	}
	var found []error
	packages.Visit(raw, nil, func(pkg *packages.Package) {
		for _, err := range pkg.Errors {
			if err.Kind != packages.TypeError {
				found = append(found, err)
			}
		}
	})
	return errors.Join(found...)
}

// applyFixups runs the group's fix-ups. One that names no generated CRD is an
// error: upstream changed and the list must follow.
func (g group) applyFixups(definitions []*apiext.CustomResourceDefinition) error {
	for _, f := range g.fixups {
		matched := false
		for _, d := range definitions {
			if f.crd != everyCRD && f.crd != d.Name {
				continue
			}
			matched = true
			if err := f.edit(d); err != nil {
				return fmt.Errorf("applying fix-up %q to %s: %w", f.why, d.Name, err)
			}
		}
		if !matched {
			return fmt.Errorf("applying fix-up %q: no CRD is named %q", f.why, f.crd)
		}
	}
	return nil
}

// withoutDescriptions drops prose from schema and columns.
func withoutDescriptions(d *apiext.CustomResourceDefinition) {
	for i := range d.Spec.Versions {
		version := &d.Spec.Versions[i]
		crd.TruncateDescription(version.Schema.OpenAPIV3Schema, 0)
		for c := range version.AdditionalPrinterColumns {
			version.AdditionalPrinterColumns[c].Description = ""
		}
	}
}

func render(d *apiext.CustomResourceDefinition) ([]byte, error) {
	body, err := yaml.Marshal(manifest{
		APIVersion: apiext.SchemeGroupVersion.String(),
		Kind:       "CustomResourceDefinition",
		Metadata:   manifestMetadata{Name: d.Name, Labels: d.Labels, Annotations: d.Annotations},
		Spec:       d.Spec,
	})
	if err != nil {
		return nil, err
	}
	header := fmt.Sprintf("# Generated by tools/crds from the Go types of %s; do not edit.\n", d.Annotations[annotationSource])
	return append([]byte(header), body...), nil
}
