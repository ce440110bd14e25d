// Package rendering gives tests what the product renders: the plan of a box, and every
// value combination that the embedded charts come with. It must not know what tests look
// for in it, nor a cluster.
package rendering

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/model"
)

// KubeVersion is what is rendered for where no cluster tells.
const KubeVersion = "v1.36.4+k3s1"

// Version stands where llmbox's own version would; it becomes the tag of its image.
const Version = "1.2.3"

// Plan is what `llmbox plan` works out for a machine with one GPU of the product.
func Plan(product string, stated func(*config.Layer) error) (*installer.Plan, error) {
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		return nil, err
	}
	catalogue, err := model.Load(assets.FS())
	if err != nil {
		return nil, err
	}
	card, known := gpu.ProductByKey(product)
	if !known {
		return nil, fmt.Errorf("looking for GPU product %q: %w", product, fs.ErrNotExist)
	}
	choice, err := catalogue.Choose(model.FactsOf(card, 1))
	if err != nil {
		return nil, err
	}
	var said, computed config.Layer
	machine := config.Computed("the machine")
	if err := errors.Join(
		stated(&said),
		computed.Set("gpu.product", product, machine), computed.Set("gpu.count", 1, machine),
		computed.Set("model.name", choice.Model.Name, machine),
		computed.Set("model.contextTokens", choice.ContextTokens, machine),
	); err != nil {
		return nil, err
	}
	box, sources, err := config.Resolve(said, computed, config.Defaults())
	if err != nil {
		return nil, err
	}
	return installer.BuildPlan(installer.Input{
		Assets: assets.FS(), Table: table, Box: box, Choice: choice, Sources: sources, Version: Version, KubeVersion: KubeVersion,
	})
}

// Combination is one component with one set of values from its chart's ci folder.
type Combination struct {
	Component component.Component
	File      string
	Values    map[string]any
}

func (c Combination) String() string { return c.Component.Name + "/" + path.Base(c.File) }

// Combinations lists every value combination that the charts come with, each with the
// images of its component.
func Combinations() ([]Combination, error) {
	fsys := assets.FS()
	table, err := component.LoadTable(fsys)
	if err != nil {
		return nil, err
	}
	var out []Combination
	for _, c := range table.Components {
		if c.Chart == "" {
			continue
		}
		files, err := fs.Glob(fsys, path.Join("charts", c.Chart, "ci", "*-values.yaml"))
		if err != nil {
			return nil, err
		}
		images := map[string]any{}
		for key, img := range c.Images {
			images[key] = strings.ReplaceAll(img.Reference, ":VERSION", ":"+Version)
		}
		for _, file := range files {
			raw, err := fs.ReadFile(fsys, file)
			if err != nil {
				return nil, err
			}
			values := map[string]any{}
			if err := yaml.UnmarshalStrict(raw, &values); err != nil {
				return nil, fmt.Errorf("reading %s: %w", file, err)
			}
			if part, _ := values["part"].(string); part != c.Part {
				continue
			}
			out = append(out, Combination{Component: c, File: file, Values: chart.MergeValues(map[string]any{"images": images}, values)})
		}
	}
	return out, nil
}

// Objects renders the combination.
func (c Combination) Objects() ([]*unstructured.Unstructured, error) {
	ch, err := chart.Load(assets.FS(), c.Component.Chart)
	if err != nil {
		return nil, err
	}
	objects, err := chart.Release{
		Name: c.Component.Name, Namespace: c.Component.Namespace, Chart: ch, Values: c.Values,
	}.Render(KubeVersion)
	if err != nil {
		return nil, fmt.Errorf("rendering %s: %w", c, err)
	}
	return objects, nil
}

// PodTemplate finds the template of the pods that a workload makes.
func PodTemplate(o *unstructured.Unstructured) (corev1.PodTemplateSpec, bool, error) {
	var template corev1.PodTemplateSpec
	where := []string{"spec", "template"}
	switch o.GetKind() {
	case "Deployment", "StatefulSet", "DaemonSet", "Job":
	case "CronJob":
		where = []string{"spec", "jobTemplate", "spec", "template"}
	default:
		return template, false, nil
	}
	raw, _, err := unstructured.NestedMap(o.Object, where...)
	if err != nil {
		return template, false, fmt.Errorf("reading the pods of %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(raw, &template); err != nil {
		return template, false, fmt.Errorf("reading the pods of %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	return template, true, nil
}
