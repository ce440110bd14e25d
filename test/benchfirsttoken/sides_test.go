package main

import (
	"strings"
	"testing"
)

const modelManifest = `apiVersion: v1
kind: PersistentVolume
metadata: {name: hf-cache}
spec: {local: {path: /var/lib/llmbox/models}}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: model-server}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: model-server}
spec:
  template:
    spec:
      initContainers: [{name: probe, image: llmbox}]
      containers:
      - name: vllm
        image: vllm
        env: [{name: HF_HOME, value: /data/models}, {name: VLLM_SIM_LOAD_SECONDS, value: "0"}]
        startupProbe: {exec: {command: [/probe/llmbox]}}
        volumeMounts: [{name: hf-cache, mountPath: /data/models}]
`

func TestDownloads(t *testing.T) {
	h := hub{files: []hubFile{{Name: "a.safetensors"}, {Name: "config.json"}}}
	out, volume, err := downloads(modelManifest, "vllm:big", "http://hub", h, parameters{LoadSeconds: 45})
	if err != nil {
		t.Fatal(err)
	}
	if volume != "/var/lib/llmbox/models" {
		t.Errorf("the volume is %s", volume)
	}
	for _, want := range []string{"name: download", "image: vllm:big", "http://hub/" + modelName + "/resolve/" + commit + "/a.safetensors",
		"/config.json", `value: "45"`, "path: /health"} {
		if !strings.Contains(out, want) {
			t.Errorf("there is no %q in\n%s", want, out)
		}
	}
	for _, not := range []string{"NetworkPolicy", "/probe/llmbox", `value: "0"`} {
		if strings.Contains(out, not) {
			t.Errorf("there is still %q in\n%s", not, out)
		}
	}
	for name, bad := range map[string]string{"no Deployment": strings.Replace(modelManifest, "kind: Deployment", "kind: Secret", 1),
		"no volume": strings.Replace(modelManifest, "kind: PersistentVolume", "kind: ConfigMap", 1)} {
		if _, _, err := downloads(bad, "vllm:big", "http://hub", h, parameters{}); err == nil {
			t.Errorf("%s: it was taken", name)
		}
	}
}
