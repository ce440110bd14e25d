package rendered

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/test/internal/rendering"
)

// operand is a row of testdata/operands.yaml, which says what the fields mean.
type operand struct {
	Component string `json:"component"`
	Object    string `json:"object"`
	Workload  string `json:"workload"`
	// Table is its name among the operands of embed/components.yaml, if not the workload's.
	Table              string              `json:"table,omitempty"`
	Source             string              `json:"source"`
	When               string              `json:"when,omitempty"`
	PodSecurityContext string              `json:"podSecurityContext,omitempty"`
	SecurityContext    map[string]string   `json:"securityContext,omitempty"`
	Resources          map[string][]string `json:"resources,omitempty"`
	Only               map[string]string   `json:"only,omitempty"`
	Arguments          map[string]string   `json:"arguments,omitempty"`
	Pod                corev1.PodSpec      `json:"pod"`
}

func loadOperands(t *testing.T) []operand {
	t.Helper()
	raw, err := os.ReadFile("testdata/operands.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Operands []operand `json:"operands"`
	}
	if err := yaml.UnmarshalStrict(raw, &doc); err != nil {
		t.Fatal(err)
	}
	return doc.Operands
}

var (
	errNoField     = errors.New("no such field")
	errNoContainer = errors.New("no such container")
)

// build gives the pod that the operator makes from the objects; false if it makes none.
func (op operand) build(objects []*unstructured.Unstructured) (corev1.PodTemplateSpec, bool, error) {
	var template corev1.PodTemplateSpec
	kind, name, _ := strings.Cut(op.Object, "/")
	var from *unstructured.Unstructured
	for _, o := range objects {
		if o.GetKind() == kind && o.GetName() == name {
			from = o
		}
	}
	if from == nil {
		return template, false, nil
	}
	if op.When != "" {
		v, err := at(from.Object, op.When)
		if err != nil {
			return template, false, err
		}
		if on, _ := v.(bool); !on {
			return template, false, nil
		}
	}
	op.Pod.DeepCopyInto(&template.Spec)
	if op.PodSecurityContext != "" {
		template.Spec.SecurityContext = &corev1.PodSecurityContext{}
		if err := lay(from.Object, op.PodSecurityContext, template.Spec.SecurityContext); err != nil {
			return template, false, err
		}
	}
	for container, path := range op.SecurityContext {
		c, err := containerOf(&template.Spec, container)
		if err != nil {
			return template, false, err
		}
		if err := lay(from.Object, path, c.SecurityContext); err != nil {
			return template, false, err
		}
	}
	for container, paths := range op.Resources {
		c, err := containerOf(&template.Spec, container)
		if err != nil {
			return template, false, err
		}
		for _, path := range paths {
			if err := lay(from.Object, path, &c.Resources); err != nil {
				return template, false, err
			}
		}
	}
	for container, prefix := range op.Arguments {
		c, err := containerOf(&template.Spec, container)
		if err != nil {
			return template, false, err
		}
		if c.Resources, err = fromArguments(objects, prefix); err != nil {
			return template, false, err
		}
	}
	for container, path := range op.Only {
		if _, err := containerOf(&template.Spec, container); err != nil {
			return template, false, err
		}
		if _, err := at(from.Object, path); errors.Is(err, errNoField) {
			gone := func(c corev1.Container) bool { return c.Name == container }
			template.Spec.InitContainers = slices.DeleteFunc(template.Spec.InitContainers, gone)
			template.Spec.Containers = slices.DeleteFunc(template.Spec.Containers, gone)
		}
	}
	return template, true, nil
}

func containerOf(spec *corev1.PodSpec, name string) (*corev1.Container, error) {
	for _, list := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i], nil
			}
		}
	}
	return nil, fmt.Errorf("container %s: %w", name, errNoContainer)
}

// at follows a path of field names; "[NAME]" picks an element of a list.
func at(v any, path string) (any, error) {
	for step := range strings.SplitSeq(path, ".") {
		field, element, picks := strings.Cut(strings.TrimSuffix(step, "]"), "[")
		m, ok := v.(map[string]any)
		if !ok {
			return nil, fmt.Errorf("following %s to %s: %w", path, step, errNoField)
		}
		if v, ok = m[field]; !ok {
			return nil, fmt.Errorf("following %s to %s: %w", path, step, errNoField)
		}
		if !picks {
			continue
		}
		list, _ := v.([]any)
		v = nil
		for _, e := range list {
			if m, ok := e.(map[string]any); ok && m["name"] == element {
				v = m
			}
		}
		if v == nil {
			return nil, fmt.Errorf("following %s to %s: %w", path, step, errNoField)
		}
	}
	return v, nil
}

// lay writes the field over what is there; what the field doesn't say stays.
func lay(object map[string]any, path string, over any) error {
	v, err := at(object, path)
	if err != nil {
		return err
	}
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, over); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	return nil
}

// fromArguments reads resources that an operator is told on its command line.
func fromArguments(objects []*unstructured.Unstructured, prefix string) (corev1.ResourceRequirements, error) {
	out := corev1.ResourceRequirements{Requests: corev1.ResourceList{}, Limits: corev1.ResourceList{}}
	for _, o := range objects {
		template, ok, err := rendering.PodTemplate(o)
		if err != nil {
			return out, err
		}
		if !ok {
			continue
		}
		for _, c := range template.Spec.Containers {
			for _, arg := range c.Args {
				name, value, _ := strings.Cut(arg, "=")
				for suffix, into := range map[string]struct {
					list corev1.ResourceList
					name corev1.ResourceName
				}{
					"-cpu-request":    {out.Requests, corev1.ResourceCPU},
					"-memory-request": {out.Requests, corev1.ResourceMemory},
					"-memory-limit":   {out.Limits, corev1.ResourceMemory},
				} {
					if name != prefix+suffix {
						continue
					}
					q, err := resource.ParseQuantity(value)
					if err != nil {
						return out, fmt.Errorf("reading %s: %w", arg, err)
					}
					into.list[into.name] = q
				}
			}
		}
	}
	return out, nil
}

// TestOperandsInTheTable: what embed/components.yaml says of a pod that an operator makes is
// what our objects ask for.
func TestOperandsInTheTable(t *testing.T) {
	plan, err := rendering.Plan("a10", func(*config.Layer) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]component.Operand{}
	for _, c := range table.Components {
		for _, op := range c.Operands {
			said[c.Name+"/"+op.Name] = op
		}
	}
	for _, op := range loadOperands(t) {
		for _, step := range plan.Steps {
			if step.Name != op.Component {
				continue
			}
			template, ok, err := op.build(step.Objects)
			if err != nil {
				t.Fatal(err)
			}
			name := op.Table
			if name == "" {
				_, name, _ = strings.Cut(op.Workload, "/")
			}
			row, listed := said[step.Name+"/"+name]
			delete(said, step.Name+"/"+name)
			if !ok {
				if listed {
					t.Errorf("the table has %s of %s, which the plan doesn't make", name, step.Name)
				}
				continue
			}
			var cpu, memory int64
			for _, c := range template.Spec.Containers {
				cpu += c.Resources.Requests.Cpu().MilliValue()
				memory += c.Resources.Requests.Memory().Value()
			}
			if !listed || cpu != row.CPUMillis || memory != row.MemoryBytes {
				t.Errorf("%s of %s asks for %dm and %d bytes, the table says %+v", name, step.Name, cpu, memory, row)
			}
		}
	}
	for name := range said {
		t.Errorf("the table has operand %s, testdata/operands.yaml has not", name)
	}
}
