package snapshot

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// load reads a cluster's objects from a file, with replacements made in its text.
func load(t *testing.T, file string, replace ...string) State {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	text := string(raw)
	for i := 0; i < len(replace); i += 2 {
		if !strings.Contains(text, replace[i]) {
			t.Fatalf("%s does not hold %q", file, replace[i])
		}
		text = strings.Replace(text, replace[i], replace[i+1], 1)
	}
	var objects []unstructured.Unstructured
	for _, doc := range bytes.Split([]byte(text), []byte("\n---\n")) {
		var o unstructured.Unstructured
		if err := yaml.Unmarshal(doc, &o.Object); err != nil {
			t.Fatal(err)
		}
		if o.Object != nil {
			objects = append(objects, o)
		}
	}
	state, err := normalise(objects)
	if err != nil {
		t.Fatal(err)
	}
	return state
}

func TestTheSameBoxAtAnotherTime(t *testing.T) {
	if diff := Diff(load(t, "reference.yaml"), load(t, "later.yaml")); len(diff) > 0 {
		t.Errorf("differs:\n%s", strings.Join(diff, "\n"))
	}
}

func TestWhatADifferenceIs(t *testing.T) {
	for _, tt := range []struct {
		name     string
		from, to string
		want     string
	}{
		{"a field of a spec", "example.invalid/keda:1", "example.invalid/keda:2", "Deployment.apps keda/keda-operator spec.template"},
		{"a condition", `status: "True"`, `status: "False"`, "condition Available"},
		{"a release left pending", `version: "2", status: deployed`, `version: "2", status: pending-upgrade`, "HelmRelease keda/keda newest"},
		{"a release deployed twice", "status: superseded", "status: deployed", "HelmRelease keda/keda deployed"},
		{"a key that is gone", "data: {default: b3RoZXI=}", "data: {}", "Secret llm/gateway-keys data.default"},
		{"the journal's outcome", `"outcome":"done"`, `"outcome":"running"`, "state.json.outcome"},
		{"a component's state", `"status":"ready"`, `"status":"failed"`, "state.json.components.keda.status"},
		{"a lock that is still held", "leaseDurationSeconds: 15", "holderIdentity: somebody", "Lease.coordination.k8s.io llmbox-system/llmbox-run spec.held"},
		{"a pod too few", "phase: Running", "phase: Pending", "Pods keda/ReplicaSet/keda-operator-1"},
		{"an object more", "name: keda, namespace: keda}\nspec: {clusterIP", "name: other, namespace: keda}\nspec: {clusterIP", "+ Service keda/other"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			diff := Diff(load(t, "reference.yaml"), load(t, "later.yaml", tt.from, tt.to))
			if !strings.Contains(strings.Join(diff, "\n"), tt.want) {
				t.Errorf("got %q, want a difference naming %q", diff, tt.want)
			}
		})
	}
}
