package rules

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// metric says who exports a metric and where upstream defines it.
type metric struct {
	Exporter string `json:"exporter"`
	// Source is a repository with a version and a file in it, or a page of upstream's.
	Source string `json:"source"`
	// Histogram: the name is followed by _bucket, _sum or _count.
	Histogram bool `json:"histogram,omitempty"`
	// Optional: only there under a condition, which is named here.
	Optional string `json:"optional,omitempty"`
}

// exporter says which monitor of a box scrapes it.
type exporter struct {
	// Monitor is KIND/NAME in the plan; empty for what is scraped without one.
	Monitor string `json:"monitor,omitempty"`
	Why     string `json:"why,omitempty"`
	// Path selects one of the monitor's endpoints.
	Path string `json:"path,omitempty"`
}

type metricList struct {
	Exporters map[string]exporter `json:"exporters"`
	Metrics   map[string]metric   `json:"metrics"`
}

func readMetrics(t *testing.T) metricList {
	t.Helper()
	raw, err := os.ReadFile("metrics.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var list metricList
	if err := yaml.UnmarshalStrict(raw, &list); err != nil {
		t.Fatal(err)
	}
	return list
}

// expression is a PromQL text and where it stands.
type expression struct{ where, text string }

type target struct {
	Expr string `json:"expr"`
}

type panel struct {
	Title      string          `json:"title"`
	Type       string          `json:"type"`
	Datasource json.RawMessage `json:"datasource"`
	Targets    []target        `json:"targets"`
	Panels     []panel         `json:"panels"`
}

type variable struct {
	Name       string          `json:"name"`
	Type       string          `json:"type"`
	Definition string          `json:"definition"`
	Query      json.RawMessage `json:"query"`
}

type dashboard struct {
	UID        string  `json:"uid"`
	Title      string  `json:"title"`
	Panels     []panel `json:"panels"`
	Templating struct {
		List []variable `json:"list"`
	} `json:"templating"`
}

// dashboards reads each JSON of the ConfigMaps that carry Grafana's label.
func dashboards(t *testing.T, all []*unstructured.Unstructured) map[string]dashboard {
	t.Helper()
	found := map[string]dashboard{}
	for _, o := range all {
		if o.GetKind() != "ConfigMap" || o.GetLabels()["grafana_dashboard"] != "1" {
			continue
		}
		data, _, err := unstructured.NestedStringMap(o.Object, "data")
		if err != nil {
			t.Fatal(err)
		}
		for name, text := range data {
			if strings.Contains(text, "@") && placeholder.MatchString(text) {
				t.Errorf("%s: %s was not filled in", name, placeholder.FindString(text))
			}
			var d dashboard
			if err := json.Unmarshal([]byte(text), &d); err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			found[name] = d
		}
	}
	return found
}

var (
	placeholder = regexp.MustCompile(`@[A-Z_]+@`)
	// What Grafana fills in; one pass, longest first.
	grafana = strings.NewReplacer("$__rate_interval", "5m", "$__range", "1h", "$__interval", "1m", "$model", "m", "$gpu_hour_usd", "2.5", "$gpu", "0")
	lookup  = regexp.MustCompile(`^label_values\((.+), *[a-z_A-Z]+\)$`)
)

// TestDashboards holds what a Grafana without internet and without plugins can show.
func TestDashboards(t *testing.T) {
	found := dashboards(t, objects(t))
	want := []string{"box.json", "llmbox-cost.json", "llmbox-gateway.json", "llmbox-gpu.json", "llmbox-vllm.json"}
	if got := slices.Sorted(maps.Keys(found)); !slices.Equal(got, want) {
		t.Fatalf("dashboards %v, want %v", got, want)
	}
	builtIn := []string{"row", "stat", "timeseries", "gauge", "table", "heatmap", "text", "bargauge"}
	uids := map[string]string{}
	for name, d := range found {
		if d.UID == "" || uids[d.UID] != "" {
			t.Errorf("%s: uid %q, which %q has too", name, d.UID, uids[d.UID])
		}
		uids[d.UID] = name
		if !slices.ContainsFunc(d.Templating.List, func(v variable) bool { return v.Name == "datasource" && v.Type == "datasource" }) {
			t.Errorf("%s has no variable for the data source", name)
		}
		for _, p := range d.Panels {
			if !slices.Contains(builtIn, p.Type) {
				t.Errorf("%s: panel %q is a %s, which Grafana has not built in", name, p.Title, p.Type)
			}
			if len(p.Targets) > 0 && !strings.Contains(string(p.Datasource), "${datasource}") {
				t.Errorf("%s: panel %q does not follow the variable: %s", name, p.Title, p.Datasource)
			}
			if (p.Type == "row" || p.Type == "text") != (len(p.Targets) == 0) {
				t.Errorf("%s: panel %q of type %s has %d queries", name, p.Title, p.Type, len(p.Targets))
			}
			if len(p.Panels) != 0 {
				t.Errorf("%s: row %q hides panels from this test", name, p.Title)
			}
		}
	}
}

// TestMetrics parses every expression with Prometheus' parser and looks each metric up in
// metrics.yaml, which must not list what nothing reads.
func TestMetrics(t *testing.T) {
	all := objects(t)
	list := readMetrics(t)
	var expressions []expression
	recorded := map[string]bool{}
	eachRule(ruleFiles(t, all), func(file string, r rule) {
		expressions = append(expressions, expression{file + " " + r.Alert + r.Record, r.Expr})
		if r.Record != "" {
			recorded[r.Record] = true
		}
	})
	for name, d := range dashboards(t, all) {
		for _, p := range d.Panels {
			for _, q := range p.Targets {
				expressions = append(expressions, expression{name + " " + p.Title, grafana.Replace(q.Expr)})
			}
		}
		for _, v := range d.Templating.List {
			if v.Type != "query" {
				continue
			}
			m := lookup.FindStringSubmatch(v.Definition)
			if m == nil {
				t.Errorf("%s: variable %s has the definition %q", name, v.Name, v.Definition)
				continue
			}
			expressions = append(expressions, expression{name + " $" + v.Name, grafana.Replace(m[1])})
		}
	}

	read := map[string]string{}
	for i, names := range selectedMetrics(t, expressions) {
		for _, name := range names {
			read[name] = expressions[i].where
		}
	}
	used := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(read)) {
		if recorded[name] {
			continue
		}
		key := name
		if _, ok := list.Metrics[key]; !ok {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				if base, cut := strings.CutSuffix(name, suffix); cut && list.Metrics[base].Histogram {
					key = base
				}
			}
		}
		m, ok := list.Metrics[key]
		if !ok {
			t.Errorf("%s reads %s, which metrics.yaml does not have", read[name], name)
			continue
		}
		used[key] = true
		if _, ok := list.Exporters[m.Exporter]; !ok {
			t.Errorf("%s is of exporter %q, which metrics.yaml does not have", key, m.Exporter)
		}
		if m.Source == "" {
			t.Errorf("%s has no source", key)
		}
	}
	for name := range list.Metrics {
		if !used[name] {
			t.Errorf("metrics.yaml has %s, which nothing reads", name)
		}
	}
	scraped(t, all, list, read)
}

// selectedMetrics gives the names each expression selects.
func selectedMetrics(t *testing.T, expressions []expression) [][]string {
	t.Helper()
	texts := make([]string, len(expressions))
	for i, e := range expressions {
		texts[i] = e.text
	}
	in, err := json.Marshal(texts)
	if err != nil {
		t.Fatal(err)
	}
	tool := filepath.Join(tools(t), "metricnames")
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	cmd := exec.CommandContext(ctx, tool) //nolint:gosec // the program this test has just built
	cmd.Stdin = bytes.NewReader(in)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("metricnames: %v", err)
	}
	var selections []struct {
		Metrics []string `json:"metrics"`
		Error   string   `json:"error"`
	}
	if err := json.Unmarshal(out, &selections); err != nil {
		t.Fatal(err)
	}
	names := make([][]string, len(expressions))
	for i, s := range selections {
		if s.Error != "" {
			t.Errorf("%s: %s\n%s", expressions[i].where, s.Error, expressions[i].text)
		}
		names[i] = s.Metrics
	}
	return names
}

// scraped looks for the monitor of every exporter and for a relabelling that would drop what
// is read; names of DCGM fields are looked up in the list the exporter is given.
func scraped(t *testing.T, all []*unstructured.Unstructured, list metricList, read map[string]string) {
	t.Helper()
	monitors := map[string]*unstructured.Unstructured{}
	dcgm := ""
	for _, o := range all {
		switch o.GetKind() {
		case "ServiceMonitor", "PodMonitor", "ClusterPolicy":
			monitors[o.GetKind()+"/"+o.GetName()] = o
		case "ConfigMap":
			if text, _, _ := unstructured.NestedString(o.Object, "data", "dcgm-metrics.csv"); text != "" {
				dcgm = text
			}
		}
	}
	for name, e := range list.Exporters {
		if e.Monitor == "" {
			if e.Why == "" {
				t.Errorf("exporter %s has neither a monitor nor a reason for none", name)
			}
			continue
		}
		o := monitors[e.Monitor]
		if o == nil {
			t.Errorf("exporter %s: the plan has no %s", name, e.Monitor)
			continue
		}
		for metricName := range read {
			m, ok := list.Metrics[metricName]
			if !ok {
				m = list.Metrics[strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(metricName, "_bucket"), "_sum"), "_count")]
			}
			if m.Exporter != name {
				continue
			}
			if !kept(t, o, e.Path, metricName) {
				t.Errorf("%s reads %s, which %s drops", read[metricName], metricName, e.Monitor)
			}
		}
	}
	for name, where := range read {
		if strings.HasPrefix(name, "DCGM_") && !strings.Contains(dcgm, "\n"+name+", ") {
			t.Errorf("%s reads %s, which the DCGM exporter is not told to publish", where, name)
		}
	}
}

// kept tells whether at least one endpoint (of the given path) lets a metric through.
func kept(t *testing.T, monitor *unstructured.Unstructured, path, name string) bool {
	t.Helper()
	endpoints, _, _ := unstructured.NestedSlice(monitor.Object, "spec", "endpoints")
	more, _, _ := unstructured.NestedSlice(monitor.Object, "spec", "podMetricsEndpoints")
	endpoints = append(endpoints, more...)
	if len(endpoints) == 0 {
		// The GPU Operator's own ServiceMonitor, made without relabelling.
		return monitor.GetKind() == "ClusterPolicy"
	}
	for _, raw := range endpoints {
		endpoint, ok := raw.(map[string]any)
		if !ok || path != "" && endpoint["path"] != path {
			continue
		}
		through := true
		relabelings, _, _ := unstructured.NestedSlice(endpoint, "metricRelabelings")
		for _, raw := range relabelings {
			r, ok := raw.(map[string]any)
			if !ok {
				t.Fatalf("%s: %v", monitor.GetName(), raw)
			}
			labels, _, _ := unstructured.NestedStringSlice(r, "sourceLabels")
			if !slices.Equal(labels, []string{"__name__"}) {
				continue
			}
			pattern, _ := r["regex"].(string)
			matches := regexp.MustCompile("^(?:" + pattern + ")$").MatchString(name)
			if r["action"] == "keep" && !matches || r["action"] == "drop" && matches {
				through = false
			}
		}
		if through {
			return true
		}
	}
	return false
}
