package rules

import (
	"bytes"
	"context"
	"fmt"
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

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/test/internal/rendering"
)

// rule is one recording rule or alert of a PrometheusRule.
type rule struct {
	Record      string            `json:"record,omitempty"`
	Alert       string            `json:"alert,omitempty"`
	Expr        string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type group struct {
	Name     string `json:"name"`
	Interval string `json:"interval,omitempty"`
	Rules    []rule `json:"rules"`
}

type groups struct {
	Groups []group `json:"groups"`
}

// expectation is one alert as promtool must see it. Summary and runbook are left out on
// purpose: TestAlertTexts holds them.
type expectation struct {
	Labels      map[string]string `json:"labels"`
	Description string            `json:"description"`
}

// situation is what Prometheus has scraped, a sample a minute unless every says otherwise,
// and the alerts that are firing at the given time. No alerts: silence is expected.
type situation struct {
	At     string            `json:"at"`
	Every  string            `json:"every,omitempty"`
	Why    string            `json:"why,omitempty"`
	Series map[string]string `json:"series,omitempty"`
	Alerts []expectation     `json:"alerts,omitempty"`
}

// alertCase is one alert with situations in which it fires and in which it doesn't.
type alertCase struct {
	Alert  string      `json:"alert"`
	Fires  []situation `json:"fires"`
	Silent []situation `json:"silent"`
}

// objects renders a box with one GPU as `llmbox install` would.
func objects(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	plan, err := rendering.Plan("a10", func(*config.Layer) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	var all []*unstructured.Unstructured
	for _, step := range plan.Steps {
		all = append(all, step.Objects...)
	}
	return all
}

// ruleFiles gives the spec of each PrometheusRule by the object's name.
func ruleFiles(t *testing.T, all []*unstructured.Unstructured) map[string]groups {
	t.Helper()
	files := map[string]groups{}
	for _, o := range all {
		if o.GetKind() != "PrometheusRule" {
			continue
		}
		raw, err := yaml.Marshal(o.Object["spec"])
		if err != nil {
			t.Fatal(err)
		}
		var g groups
		if err := yaml.UnmarshalStrict(raw, &g); err != nil {
			t.Fatalf("%s: %v", o.GetName(), err)
		}
		files[o.GetName()] = g
	}
	if len(files) == 0 {
		t.Fatal("the plan has no PrometheusRule")
	}
	return files
}

func eachRule(files map[string]groups, do func(file string, r rule)) {
	for name, file := range files {
		for _, g := range file.Groups {
			for _, r := range g.Rules {
				do(name, r)
			}
		}
	}
}

// tools compiles promtool and metricnames in the module that pins Prometheus and gives the
// folder they are in. Without service discovery, which rules have no use for, there are far
// fewer packages; what is compiled stays in Go's build cache.
func tools(t *testing.T) string {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Minute)
	defer stop()
	dir := t.TempDir()
	build := exec.CommandContext(ctx, "go", "build", "-tags", "remove_all_sd", "-o", dir+string(filepath.Separator), "./metricnames", "github.com/prometheus/prometheus/cmd/promtool") //nolint:gosec // fixed words and the test's own folder
	build.Dir = "promtool"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building promtool: %v\n%s", err, out)
	}
	return dir
}

func writeYAML(t *testing.T, path string, v any) {
	t.Helper()
	raw, err := yaml.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
}

func readCases(t *testing.T) []alertCase {
	t.Helper()
	paths, err := filepath.Glob("testdata/alerts-*.yaml")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	var all []alertCase
	for _, path := range paths {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var cases []alertCase
		if err := yaml.UnmarshalStrict(raw, &cases); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		all = append(all, cases...)
	}
	return all
}

// TestAlerts lets promtool check all rules and run every case.
func TestAlerts(t *testing.T) {
	files := ruleFiles(t, objects(t))
	cases := readCases(t)
	covered := map[string]bool{}
	for _, c := range cases {
		if covered[c.Alert] {
			t.Errorf("%s has two cases", c.Alert)
		}
		covered[c.Alert] = true
		if len(c.Fires) == 0 {
			t.Errorf("%s: no situation in which it fires", c.Alert)
		}
		for _, s := range c.Fires {
			if len(s.Alerts) == 0 {
				t.Errorf("%s: a situation in which it fires expects nothing", c.Alert)
			}
		}
		// What always fires can't be silent.
		if len(c.Silent) == 0 && c.Alert != "Watchdog" {
			t.Errorf("%s: no situation in which it is silent", c.Alert)
		}
		for _, s := range c.Silent {
			if len(s.Alerts) != 0 {
				t.Errorf("%s: alerts expected in silence", c.Alert)
			}
		}
	}
	known := map[string]bool{}
	eachRule(files, func(file string, r rule) {
		if r.Alert != "" {
			known[r.Alert] = true
			if !covered[r.Alert] {
				t.Errorf("%s: alert %s has no case in testdata", file, r.Alert)
			}
		}
	})
	for name := range covered {
		if !known[name] {
			t.Errorf("the case %s is of no alert", name)
		}
	}

	tool := filepath.Join(tools(t), "promtool")
	dir := t.TempDir()
	var whole, tested []string
	for name, file := range files {
		path := filepath.Join(dir, name+".yaml")
		writeYAML(t, path, file)
		whole = append(whole, path)
		for _, g := range file.Groups {
			for i, r := range g.Rules {
				if r.Alert != "" {
					g.Rules[i].Annotations = map[string]string{"description": r.Annotations["description"]}
				}
			}
		}
		writeYAML(t, filepath.Join(dir, "tested-"+name+".yaml"), file)
		tested = append(tested, "tested-"+name+".yaml")
	}
	slices.Sort(whole)
	slices.Sort(tested)
	run(t, tool, append([]string{"check", "rules", "--lint=all", "--lint-fatal"}, whole...)...)

	byEvery := map[string][]any{}
	for _, c := range cases {
		for i, s := range slices.Concat(c.Fires, c.Silent) {
			byEvery[interval(s)] = append(byEvery[interval(s)], promtoolTest(t, fmt.Sprintf("%s %d", c.Alert, i), c.Alert, s))
		}
	}
	for every, tests := range byEvery {
		path := filepath.Join(dir, "test-"+every+".yaml")
		writeYAML(t, path, map[string]any{"rule_files": tested, "evaluation_interval": every, "tests": tests})
		run(t, tool, "test", "rules", path)
	}
}

func interval(s situation) string {
	if s.Every == "" {
		return "1m"
	}
	return s.Every
}

// promtoolTest writes a situation in the words of promtool's unit tests.
func promtoolTest(t *testing.T, name, alert string, s situation) map[string]any {
	t.Helper()
	series := []any{}
	for _, key := range slices.Sorted(func(yield func(string) bool) {
		for k := range s.Series {
			if !yield(k) {
				return
			}
		}
	}) {
		series = append(series, map[string]any{"series": key, "values": s.Series[key]})
	}
	expected := []any{}
	for _, a := range s.Alerts {
		expected = append(expected, map[string]any{"exp_labels": a.Labels, "exp_annotations": map[string]string{"description": a.Description}})
	}
	return map[string]any{
		"name": name, "interval": interval(s), "input_series": series,
		"alert_rule_test": []any{map[string]any{"alertname": alert, "eval_time": s.At, "exp_alerts": expected}},
	}
}

func run(t *testing.T, tool string, args ...string) {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Minute)
	defer stop()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, tool, args...) //nolint:gosec // the tool this test has just built
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args[:2], " "), err, out.String())
	}
}

var command = regexp.MustCompile("`llmbox ([a-z]+)")

// TestAlertTexts holds what a person gets to read: a severity Alertmanager can route, a
// summary, a description with the value, and a runbook that names a command there is.
func TestAlertTexts(t *testing.T) {
	commands := cliCommands(t)
	eachRule(ruleFiles(t, objects(t)), func(file string, r rule) {
		if r.Alert == "" {
			return
		}
		if s := r.Labels["severity"]; !slices.Contains([]string{"critical", "warning", "info", "none"}, s) {
			t.Errorf("%s: severity %q", r.Alert, s)
		}
		if len(r.Annotations) != 3 {
			t.Errorf("%s: annotations other than summary, description, runbook: %v", r.Alert, r.Annotations)
		}
		if r.Annotations["summary"] == "" || strings.Contains(r.Annotations["summary"], "\n") {
			t.Errorf("%s: summary %q", r.Alert, r.Annotations["summary"])
		}
		if !strings.Contains(r.Annotations["description"], "$value") {
			t.Errorf("%s: no value in the description %q", r.Alert, r.Annotations["description"])
		}
		book := r.Annotations["runbook"]
		found := command.FindAllStringSubmatch(book, -1)
		if len(found) == 0 {
			t.Errorf("%s: the runbook %q of %s names no llmbox command", r.Alert, book, file)
		}
		for _, f := range found {
			if !slices.Contains(commands, f[1]) {
				t.Errorf("%s: there is no command llmbox %s", r.Alert, f[1])
			}
		}
		for key, text := range r.Annotations {
			if strings.Contains(text, "://") {
				t.Errorf("%s: an address in %s: %q", r.Alert, key, text)
			}
		}
	})
}

var use = regexp.MustCompile(`Use:\s+"([a-z]+)`)

// cliCommands reads the names of the commands from their declarations.
func cliCommands(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob("../../internal/cli/*.go")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no commands: %v", err)
	}
	var names []string
	for _, path := range paths {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range use.FindAllSubmatch(raw, -1) {
			names = append(names, string(m[1]))
		}
	}
	return names
}

// TestPromtoolVersion keeps the pinned module at the Prometheus that is shipped.
func TestPromtoolVersion(t *testing.T) {
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile("promtool/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`prometheus/prometheus v0\.(\d)(\d\d)\.(\d+)`).FindSubmatch(raw)
	if found == nil {
		t.Fatal("go.mod pins no Prometheus")
	}
	var minor int
	if _, err := fmt.Sscanf(string(found[2]), "%d", &minor); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("quay.io/prometheus/prometheus:v%s.%d.%s", found[1], minor, found[3])
	for _, c := range table.Components {
		if image, ok := c.Images["prometheus"]; ok && image.Reference != want {
			t.Errorf("the table ships %s, promtool is of %s", image.Reference, want)
		}
	}
}
