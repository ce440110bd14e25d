package integration

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/installer"
)

// TestFailedChangeIsTakenBack changes a component that is ready in ways that fail, at the
// API server and at its gate. What was there before has to be back, and a first install
// that fails has to stay as it is.
func TestFailedChangeIsTakenBack(t *testing.T) {
	l := useLab(t)
	l.clean(t)
	defer l.clean(t)
	const name = "keda"
	// run carries out the plan for one component, with its values changed.
	run := func(t *testing.T, change func(*installer.Step)) (failed string, err error) {
		t.Helper()
		plan := buildPlan(t, l.client.Version, "a10", unchanged)
		plan.Steps = slices.DeleteFunc(plan.Steps, func(s installer.Step) bool { return s.Name != name && s.Name != "base" })
		for i := range plan.Steps {
			plan.Steps[i].NeededBy = slices.DeleteFunc(plan.Steps[i].NeededBy, func(n string) bool { return n != name })
			if plan.Steps[i].Name == name {
				change(&plan.Steps[i])
			}
		}
		engine, err := installer.NewEngine(t.Context(), l.client, config.EngineHelm, "", logger(t))
		if err != nil {
			t.Fatal(err)
		}
		r := installer.NewRun(plan, l.client, engine, noSecrets{}, l.state(t), event.SinkFunc(func(e event.Event) {
			if e.Type == event.StepFailed && e.Step == "component/"+name {
				failed = e.Error
			}
		}), logger(t))
		return failed, r.Components(t.Context(), make(chan struct{}))
	}
	refused := func(s *installer.Step) {
		s.Release.Values = chart.MergeValues(s.Release.Values, map[string]any{"operator": map[string]any{
			"resources": map[string]any{"requests": map[string]any{"memory": "4Gi"}, "limits": map[string]any{"memory": "1Mi"}},
		}})
	}
	neverReady := func(s *installer.Step) {
		s.Release.Values = chart.MergeValues(s.Release.Values, map[string]any{"logLevel": "debug"})
		s.Timeout.Duration = 2 * time.Second
		for i := range s.Gates {
			s.Gates[i].Namespace, s.Gates[i].Name = "nowhere", "nothing"
		}
	}

	var restored *installer.RestoredError
	if _, err := run(t, refused); err == nil || errors.As(err, &restored) {
		t.Fatalf("a first install that fails ends with %v", err)
	}
	if _, err := run(t, func(*installer.Step) {}); err != nil {
		t.Fatal(err)
	}
	first, firstDocument := l.lastRecord(t, name, name)
	for _, tt := range []struct {
		name   string
		change func(*installer.Step)
		cause  error
	}{
		{"refused by the API server", refused, nil},
		{"never ready", neverReady, installer.ErrNotReady},
	} {
		t.Run(tt.name, func(t *testing.T) {
			failed, err := run(t, tt.change)
			if !errors.As(err, &restored) || tt.cause != nil && !errors.Is(err, tt.cause) {
				t.Fatalf("it ends with %v", err)
			}
			if !strings.Contains(failed, "what was there before is back") {
				t.Errorf("the failure does not say so: %q", failed)
			}
			now, document := l.lastRecord(t, name, name)
			if now.Name == first.Name || now.Labels["status"] != "deployed" {
				t.Errorf("the newest record is %s, %s", now.Name, now.Labels["status"])
			}
			if document["manifest"] != firstDocument["manifest"] {
				t.Error("its objects are not those of before")
			}
			deployment, err := l.client.Kube.AppsV1().Deployments(name).Get(t.Context(), "keda-operator", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if limit := deployment.Spec.Template.Spec.Containers[0].Resources.Limits.Memory().String(); limit != "512Mi" {
				t.Errorf("the operator's limit is %s", limit)
			}
		})
	}
	t.Run("and the change that is right goes on from there", func(t *testing.T) {
		if _, err := run(t, func(s *installer.Step) {
			s.Release.Values = chart.MergeValues(s.Release.Values, map[string]any{"logLevel": "error"})
		}); err != nil {
			t.Fatal(err)
		}
	})
}

// TestRevisionThatFailedLeavesNothing: Helm changes custom resources by the difference of
// two manifests, and takes the last revision that came to its end for the first. What a
// revision that did not has already brought in has to go all the same.
func TestRevisionThatFailedLeavesNothing(t *testing.T) {
	l := useLab(t)
	ch, err := chart.LoadPath("testdata/changing-chart")
	if err != nil {
		t.Fatal(err)
	}
	engine, err := installer.NewEngine(t.Context(), l.client, config.EngineHelm, "", logger(t))
	if err != nil {
		t.Fatal(err)
	}
	release := func(values map[string]any) chart.Release {
		return chart.Release{Name: "changing", Namespace: "default", Chart: ch, Values: values}
	}
	t.Cleanup(func() {
		if err := engine.Uninstall(context.WithoutCancel(t.Context()), "default", "changing"); err != nil {
			t.Error(err)
		}
	})
	services := l.client.Dynamic.Resource(schema.GroupVersionResource{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"})
	look := func(t *testing.T) string {
		t.Helper()
		service, err := services.Get(t.Context(), "v1.changing.example.com", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		priority, _, _ := unstructured.NestedInt64(service.Object, "spec", "groupPriorityMinimum")
		plain, err := l.client.Kube.CoreV1().ConfigMaps("default").Get(t.Context(), "plain", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = l.client.Kube.CoreV1().ConfigMaps("default").Get(t.Context(), "extra", metav1.GetOptions{})
		return fmt.Sprint(priority, service.GetAnnotations()["example.com/extra"], plain.Data, err == nil)
	}
	bad := map[string]any{"priority": 200, "extra": true, "memoryLimit": "1Mi"}
	if _, err := engine.Apply(t.Context(), release(nil)); err != nil {
		t.Fatal(err)
	}
	before := look(t)
	for _, tt := range []struct {
		name   string
		values map[string]any
		want   string
	}{
		{"what was there before", nil, before},
		{"another one", map[string]any{"priority": 300}, strings.ReplaceAll(before, "100", "300")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := engine.Apply(t.Context(), release(bad)); err == nil {
				t.Fatal("it did not fail")
			}
			if half := look(t); half == before {
				t.Fatalf("the failed revision changed nothing: %s", half)
			}
			if _, err := engine.Apply(t.Context(), release(tt.values)); err != nil {
				t.Fatal(err)
			}
			if now := look(t); now != tt.want {
				t.Errorf("there is now\n%s, want\n%s", now, tt.want)
			}
		})
	}
}
