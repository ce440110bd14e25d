package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// ask asks Prometheus by the API server's proxy.
func (b *wholeBox) ask(path string, params map[string]string, into any) error {
	req := b.core.RESTClient().Get().Namespace("monitoring").Resource("services").Name("prometheus:9090").SubResource("proxy").Suffix(path)
	for k, v := range params {
		req = req.Param(k, v)
	}
	raw, err := req.Timeout(30 * time.Second).DoRaw(b.ctx)
	if err != nil {
		return fmt.Errorf("asking Prometheus: %w: %s", err, raw)
	}
	var answer struct {
		Status string
		Error  string
		Data   json.RawMessage
	}
	if err := json.Unmarshal(raw, &answer); err != nil {
		return fmt.Errorf("reading Prometheus' answer: %w", err)
	}
	if answer.Status != "success" {
		return fmt.Errorf("Prometheus says: %s", answer.Error)
	}
	return json.Unmarshal(answer.Data, into)
}

type series struct {
	Metric map[string]string
	Value  [2]any
}

func (b *wholeBox) query(expr string) ([]series, error) {
	var data struct {
		ResultType string
		Result     json.RawMessage
	}
	if err := b.ask("api/v1/query", map[string]string{"query": expr}, &data); err != nil {
		return nil, err
	}
	var found []series
	if data.ResultType != "vector" {
		return []series{{}}, nil // a scalar is data
	}
	err := json.Unmarshal(data.Result, &found)
	return found, err
}

// monitors are those of the exporters that rules and dashboards read: test/rules/metrics.yaml.
func monitors(t *testing.T) []string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("..", "..", "rules", "metrics.yaml"))
	must(t, err)
	var table struct {
		Exporters map[string]struct{ Monitor string }
	}
	must(t, yaml.Unmarshal(raw, &table))
	var found []string
	for _, e := range table.Exporters {
		kind, name, _ := strings.Cut(e.Monitor, "/")
		switch kind {
		case "ServiceMonitor":
			found = append(found, "serviceMonitor/"+name)
		case "PodMonitor":
			found = append(found, "podMonitor/"+name)
		case "ClusterPolicy": // the GPU Operator makes the exporter's own
			found = append(found, "serviceMonitor/nvidia-dcgm-exporter")
		}
	}
	return found
}

// targets: what each monitor of the box selects is there and up.
func (b *wholeBox) targets(t *testing.T) {
	want := monitors(t)
	var up []string
	becomes(t, 4*time.Minute, "every target up", func() error {
		var data struct {
			ActiveTargets []struct{ ScrapePool, ScrapeURL, Health, LastError string }
		}
		if err := b.ask("api/v1/targets", map[string]string{"state": "active"}, &data); err != nil {
			return err
		}
		up = nil
		var down, missing []string
		for _, target := range data.ActiveTargets {
			if target.Health != "up" {
				down = append(down, fmt.Sprintf("%s %s is %s: %s", target.ScrapePool, target.ScrapeURL, target.Health, target.LastError))
				continue
			}
			// serviceMonitor/NAMESPACE/NAME/INDEX
			parts := strings.Split(target.ScrapePool, "/")
			up = append(up, parts[0]+"/"+parts[2])
		}
		for _, w := range want {
			if !slices.Contains(up, w) {
				missing = append(missing, w)
			}
		}
		if len(down)+len(missing) > 0 {
			return fmt.Errorf("down: %s\nno target of %s", strings.Join(down, "\n"), strings.Join(missing, ", "))
		}
		return nil
	})
	t.Logf("%d targets up", len(up))
}

// dashboards: every query of every dashboard on the cluster returns series.
func (b *wholeBox) dashboards(t *testing.T) {
	maps, err := b.core.ConfigMaps("monitoring").List(t.Context(), metav1.ListOptions{})
	must(t, err)
	boards, asked := 0, 0
	for _, m := range maps.Items {
		for name, raw := range m.Data {
			if !strings.HasSuffix(name, ".json") {
				continue
			}
			var board map[string]any
			if err := json.Unmarshal([]byte(raw), &board); err != nil {
				t.Errorf("dashboard %s: %v", name, err)
				continue
			}
			boards++
			for _, expr := range exprs(board) {
				query := strings.NewReplacer("$__rate_interval", "2m", "$__range", "10m", "$__interval", "30s", "$gpu_hour_usd", "1",
					"$model", ".*", "$gpu", ".*").Replace(expr)
				asked++
				found, err := b.query(query)
				// A table of troubles is empty on a healthy box; what it filters is not.
				if whole, filtered := strings.CutSuffix(query, " > 0"); filtered && err == nil && len(found) == 0 {
					found, err = b.query(whole)
				}
				if err != nil {
					t.Errorf("%s: %s: %v", name, query, err)
				} else if len(found) == 0 {
					t.Errorf("%s: no data: %s", name, query)
				}
			}
		}
	}
	if boards < 5 || asked < 100 {
		t.Errorf("%d dashboards with %d queries were found", boards, asked)
	}
	t.Logf("%d dashboards, %d queries", boards, asked)
}

func exprs(v any) []string {
	var found []string
	switch v := v.(type) {
	case map[string]any:
		if e, ok := v["expr"].(string); ok {
			found = append(found, e)
		}
		for _, child := range v {
			found = append(found, exprs(child)...)
		}
	case []any:
		for _, child := range v {
			found = append(found, exprs(child)...)
		}
	}
	return found
}

// footprint: a container of a real part asks for at least 1.1 times the memory it was
// seen to work with, so that the sum the plan prints is one a node can be filled by.
func (b *wholeBox) footprint(t *testing.T) {
	pods, err := b.core.Pods("").List(t.Context(), metav1.ListOptions{})
	must(t, err)
	standIns := []string{"vllm", "envoy", "grafana", "kube-state-metrics", "nvidia-dcgm-exporter"}
	used, err := b.query(`max by (namespace, pod, container) (max_over_time(container_memory_working_set_bytes{container!="",container!="POD"}[30m]))`)
	must(t, err)
	seen := 0
	for _, p := range pods.Items {
		// What was there before the box.
		if p.Namespace == "kube-system" {
			continue
		}
		for _, c := range p.Spec.Containers {
			i := slices.IndexFunc(used, func(s series) bool {
				return s.Metric["namespace"] == p.Namespace && s.Metric["pod"] == p.Name && s.Metric["container"] == c.Name
			})
			if i < 0 || slices.Contains(standIns, c.Name) {
				continue
			}
			bytes, err := strconv.ParseFloat(fmt.Sprint(used[i].Value[1]), 64)
			must(t, err)
			request := float64(c.Resources.Requests.Memory().Value())
			seen++
			t.Logf("%-22s %-24s working set %6.1f MiB, request %6.1f MiB, %.2f times", p.Namespace, c.Name, bytes/(1<<20), request/(1<<20), request/bytes)
			if request < 1.1*bytes {
				t.Errorf("%s/%s %s asks for less than 1.1 times what it works with", p.Namespace, p.Name, c.Name)
			}
		}
	}
	if seen < 21 {
		t.Errorf("the working set of %d containers is known", seen)
	}
}
