package preflight

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

// fixture is a cluster as it shows itself, and what must be said about it.
type fixture struct {
	Version             string            `json:"version"`
	Denied              []string          `json:"denied"`
	DefaultStorageClass string            `json:"default_storage_class"`
	ReadyNodes          int               `json:"ready_nodes"`
	Nodes               int               `json:"nodes"`
	Unreadable          map[string]string `json:"unreadable"`
	GPUs                int64             `json:"gpus"`
	GPUNodes            int               `json:"gpu_nodes"`
	Balancer            string            `json:"balancer"`
	Definitions         map[string]string `json:"definitions"`
	Webhooks            []Webhook         `json:"webhooks"`
	Confined            []string          `json:"confined"`
	// Want maps the ids of findings that are not ok to "severity state".
	Want map[string]string `json:"want"`
}

func TestJudgeCluster(t *testing.T) {
	files, err := filepath.Glob("testdata/clusters/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no fixtures: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".json"), func(t *testing.T) {
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var fx fixture
			if err := json.Unmarshal(raw, &fx); err != nil {
				t.Fatal(err)
			}
			facts := ClusterFacts{
				Version: fx.Version, Denied: fx.Denied, DefaultStorageClass: fx.DefaultStorageClass,
				ReadyNodes: fx.ReadyNodes, Nodes: fx.Nodes, Unreadable: map[string]error{},
				GPUs: fx.GPUs, GPUNodes: fx.GPUNodes, Balancer: fx.Balancer, Definitions: fx.Definitions, Webhooks: fx.Webhooks, Confined: fx.Confined,
			}
			for what, why := range fx.Unreadable {
				facts.Unreadable[what] = errors.New(why)
			}
			got := map[string]string{}
			for _, f := range JudgeCluster(facts) {
				if f.Severity == finding.OK {
					continue
				}
				got[f.ID] = string(f.Severity) + " " + string(f.State)
				if f.Measured == "" || f.Required == "" || f.Fix == "" && f.Severity == finding.Fail {
					t.Errorf("%s lacks what was measured, what is required or the fix: %+v", f.ID, f)
				}
			}
			for id, want := range fx.Want {
				if got[id] != want {
					t.Errorf("%s is %q, want %q", id, got[id], want)
				}
			}
			for id := range got {
				if _, expected := fx.Want[id]; !expected {
					t.Errorf("%s is %q, want ok", id, got[id])
				}
			}
		})
	}
}
