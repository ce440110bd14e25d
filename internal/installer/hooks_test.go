package installer

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/llmbox-dev/llmbox/internal/cluster"
)

func TestHookJobs(t *testing.T) {
	object := func(kind, namespace, name string, hook bool) *unstructured.Unstructured {
		o := &unstructured.Unstructured{Object: map[string]any{"kind": kind}}
		o.SetName(name)
		o.SetNamespace(namespace)
		if hook {
			o.SetAnnotations(map[string]string{hookAnnotation: "pre-install"})
		}
		return o
	}
	objects := []*unstructured.Unstructured{
		object("Job", "", "check", true), object("Job", "other", "check", true), object("Job", "here", "check", true),
		object("ConfigMap", "", "check", true), object("Job", "", "plain", false),
	}
	got := hookJobs(objects, "here")
	if want := []cluster.JobRef{{Namespace: "here", Name: "check"}, {Namespace: "other", Name: "check"}}; !slices.Equal(got, want) {
		t.Errorf("the hooks' Jobs are %v, want %v", got, want)
	}
	// Helm itself waits for its hooks, and may delete them when they are done.
	step := Step{Objects: objects}
	step.Namespace = "here"
	if refs := workloadsOf(step); len(refs) != 1 || refs[0].Name != "plain" {
		t.Errorf("the gate waits for %v", refs)
	}
}

func TestHookError(t *testing.T) {
	helm := errors.New("failed pre-install: 1 error occurred")
	err := error(&HookError{Job: cluster.JobRef{Namespace: "a", Name: "b"}, Reason: "pod b-1: exited with code 3: no licence", cause: helm})
	if !errors.Is(err, ErrHook) || !errors.Is(err, helm) || !strings.Contains(err.Error(), "no licence") || !strings.Contains(err.Error(), "pre-install") {
		t.Errorf("error = %v", err)
	}
	var hook *HookError
	if !errors.As(err, &hook) || !strings.Contains(hook.Fix(), "kubectl -n a logs job/b") {
		t.Errorf("fix = %v", hook)
	}
}
