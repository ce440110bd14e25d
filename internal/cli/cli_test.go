package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/model"
)

// ran is what a command left behind.
type ran struct {
	code           int
	stdout, stderr string
}

// run runs the command line in this process, with nothing of its environment.
func run(t *testing.T, env map[string]string, stdin string, args ...string) ran {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code := Main(args, Env{
		Version: "1.2.3-test", Stdin: strings.NewReader(stdin), Stdout: &stdout, Stderr: &stderr,
		Getenv: func(key string) string { return env[key] },
		Environ: func() []string {
			var out []string
			for k, v := range env {
				out = append(out, k+"="+v)
			}
			return out
		},
		Executable: func() (string, error) { return filepath.Join(t.TempDir(), "llmbox"), nil },
	})
	return ran{code, stdout.String(), stderr.String()}
}

func wrapped(err error) error { return fmt.Errorf("doing something: %w", err) }

// TestExitCodes holds the codes against docs/exit-codes.md, in the order of
// precedence that it states.
func TestExitCodes(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  error
		code int
		// fix is part of the way out that is printed with it.
		fix string
	}{
		{"nothing", nil, 0, ""},
		{"unexpected", errors.New("boom"), 1, ""},
		{"usage", usageError{error: errors.New("what?"), fix: "say it so"}, 2, "say it so"},
		{"configuration", &config.Error{Place: "box.yaml:3", Problem: "no"}, 2, ""},
		{"values", chart.ErrValues, 2, "components.NAME.values"},
		{"chart does not render", chart.ErrRender, 2, "helm template"},
		{"chart is not there", chart.ErrLoad, 2, "components.NAME.chart"},
		{"cycle", component.ErrCycle, 2, ""},
		{"unknown need", component.ErrUnknownNeed, 2, ""},
		{"need is off", component.ErrNeedOff, 2, "external"},
		{"no kubeconfig", cluster.ErrNoKubeconfig, 2, "--kubeconfig FILE"},
		{"check failed", installer.ErrCheckFailed, 3, ""},
		{"unreachable", cluster.ErrUnreachable, 3, "/readyz"},
		{"credentials", cluster.ErrUnauthorized, 3, "fetch new ones"},
		{"rights", cluster.ErrForbidden, 3, "cluster-admin"},
		{"GPU too old", &model.CapabilityError{GPU: "T4", Have: "7.5", Need: "8.0"}, 3, ""},
		{"GPU too small", &model.MemoryError{Model: "m"}, 3, ""},
		{"warnings only", errWarnings, 4, ""},
		{"not ready", installer.ErrNotReady, 5, "llmbox install again"},
		{"locked", installer.ErrLocked, 6, "15 seconds"},
		{"interrupted", installer.ErrInterrupted, 130, ""},
		{"cancelled", context.Canceled, 130, ""},
		{"interrupted beside a failure", errors.Join(installer.ErrNotReady, installer.ErrInterrupted), 130, ""},
		{"locked beside usage", errors.Join(usageError{error: errors.New("x")}, installer.ErrLocked), 6, ""},
		{"not ready beside something unexpected", errors.Join(errors.New("boom"), installer.ErrNotReady), 5, ""},
		{"rights beside not ready", errors.Join(installer.ErrNotReady, cluster.ErrForbidden), 3, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.err
			if err != nil {
				err = wrapped(err)
			}
			if got := exitCode(err); got != tc.code {
				t.Errorf("code is %d, want %d", got, tc.code)
			}
			if err != nil && !strings.Contains(fixFor(err), tc.fix) {
				t.Errorf("the way out is %q, want %q in it", fixFor(err), tc.fix)
			}
		})
	}
}

func TestPrintError(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  error
		want string
	}{
		{"one of several lines", errors.New("1 error occurred:\n\t* no such thing\n\n"), "error: 1 error occurred:; * no such thing\n"},
		{"with its fix", wrapped(usageError{error: errors.New("what?"), fix: "say it so"}), "error: doing something: what?\n  fix: say it so\n"},
		{"each mistake of a configuration", errors.Join(
			&config.Error{Place: "box.yaml:3", Path: "a", Problem: "is wrong", Fix: "write b"},
			&config.Error{Place: "flag --port", Problem: "is too large"},
		), "error: box.yaml:3: a: is wrong; write b\nerror: flag --port: is too large\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var stderr bytes.Buffer
			(&app{env: Env{Stderr: &stderr}}).printError(tc.err)
			if stderr.String() != tc.want {
				t.Errorf("printed %q, want %q", stderr.String(), tc.want)
			}
		})
	}
}

// TestEventHandler checks that a log record becomes an event of one line.
func TestEventHandler(t *testing.T) {
	var got []event.Event
	log := slog.New(newEventHandler(event.SinkFunc(func(e event.Event) { got = append(got, e) })))
	log.Debug("not shown")
	log.With("release", "keda").Warn("repaired", "error", errors.New("first\nsecond"))
	log.Info("plain")
	if len(got) != 2 || got[0].Type != event.Log || got[0].Message != "warn: repaired release=keda error=first second" || got[1].Message != "plain" {
		t.Errorf("events are %+v", got)
	}
}

func TestVersion(t *testing.T) {
	if got := run(t, nil, "", "version"); got.code != 0 || !strings.HasPrefix(got.stdout, "llmbox 1.2.3-test ") {
		t.Errorf("%+v", got)
	}
	for _, args := range [][]string{{"version", "--output", "json"}, {"version", "--json"}} {
		var doc versionDoc
		got := run(t, nil, "", args...)
		if err := json.Unmarshal([]byte(got.stdout), &doc); err != nil || doc.Version != "1.2.3-test" || doc.Platform == "" {
			t.Errorf("%+v: %v", got, err)
		}
		if doc.K3s == "" || doc.Components["envoy-gateway"] == "" {
			t.Errorf("no versions of what it carries: %+v", doc)
		}
	}
}

// planJSON is the part of plan's document that tests look at.
type planJSON struct {
	Components []struct {
		Name, Namespace, Version, Mode string
		Needs, Images                  []string
		Wave                           int
		Requests                       component.Requests
	} `json:"components"`
	Model struct {
		Name string
		GPUs int
		Args []string
	} `json:"model"`
	Totals struct {
		Components, Objects, Images int
		CRDs                        int
		Requests                    component.Requests
	} `json:"totals"`
	HostPorts []int `json:"host_ports"`
}

func plan(t *testing.T, env map[string]string, args ...string) planJSON {
	t.Helper()
	got := run(t, env, "", append([]string{"plan", "--output", "json"}, args...)...)
	if got.code != 0 || got.stderr != "" {
		t.Fatalf("%+v", got)
	}
	var doc planJSON
	if err := json.Unmarshal([]byte(got.stdout), &doc); err != nil {
		t.Fatalf("%v: %s", err, got.stdout)
	}
	return doc
}

// TestPlan checks that the document names everything that programs rely
// on: order, waves, images with tags and sums.
func TestPlan(t *testing.T) {
	doc := plan(t, nil, "--gpu", "h100", "--gpus", "2", "--port", "8099")
	waves := map[string]int{}
	var sum component.Requests
	for _, c := range doc.Components {
		for _, need := range c.Needs {
			if wave, ok := waves[need]; !ok || wave >= c.Wave {
				t.Errorf("%s in wave %d comes before or beside its need %s", c.Name, c.Wave, need)
			}
		}
		waves[c.Name] = c.Wave
		sum = sum.Add(c.Requests)
		for _, image := range c.Images {
			if strings.HasSuffix(image, ":latest") || strings.Contains(image, "VERSION") {
				t.Errorf("%s runs %s", c.Name, image)
			}
		}
	}
	if doc.Totals.Components != len(doc.Components) || doc.Totals.Requests != sum || doc.Totals.CRDs == 0 || doc.Totals.Objects == 0 {
		t.Errorf("totals are %+v, the components sum up to %+v", doc.Totals, sum)
	}
	if !slices.Contains(doc.HostPorts, 8099) {
		t.Errorf("host ports are %v", doc.HostPorts)
	}
	if doc.Model.Name == "" || !slices.Contains(doc.Model.Args, doc.Model.Name) {
		t.Errorf("the model is %+v", doc.Model)
	}
}

func names(doc planJSON) []string {
	var out []string
	for _, c := range doc.Components {
		out = append(out, c.Name)
	}
	return out
}

// TestSources checks that each way of saying something reaches the plan and that
// the stronger one wins.
func TestSources(t *testing.T) {
	file := filepath.Join(t.TempDir(), "box.yaml")
	text := "apiVersion: llmbox.dev/v1alpha1\nkind: Box\ngateway: {port: 8081}\ncomponents: {policies: {mode: \"off\"}}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		env  map[string]string
		args []string
		port int
	}{
		{"default", nil, nil, 8080},
		{"file", nil, []string{"--config", file}, 8081},
		{"environment over file", map[string]string{"LLMBOX_GATEWAY_PORT": "8082"}, []string{"--config", file}, 8082},
		{"flag over environment", map[string]string{"LLMBOX_GATEWAY_PORT": "8082"}, []string{"--config", file, "--port", "8083"}, 8083},
		{"--set", nil, []string{"--set", "gateway.port=8084"}, 8084},
	} {
		t.Run(tc.name, func(t *testing.T) {
			doc := plan(t, tc.env, tc.args...)
			if !slices.Contains(doc.HostPorts, tc.port) {
				t.Errorf("host ports are %v, want %d", doc.HostPorts, tc.port)
			}
			if off := !slices.Contains(names(doc), "policies"); off != slices.Contains(tc.args, "--config") {
				t.Errorf("policies are off: %t", off)
			}
		})
	}
	t.Run("standard input", func(t *testing.T) {
		got := run(t, nil, text, "plan", "--config", "-", "--output", "json")
		if got.code != 0 || !strings.Contains(got.stdout, "8081") {
			t.Errorf("%+v", got)
		}
	})
	t.Run("--without", func(t *testing.T) {
		if got := names(plan(t, nil, "--without", "kyverno,policies")); slices.Contains(got, "kyverno") || slices.Contains(got, "policies") || len(got) == 0 {
			t.Errorf("the components are %v", got)
		}
	})
	t.Run("--sources", func(t *testing.T) {
		got := run(t, nil, "", "plan", "--config", file, "--sources")
		if got.code != 0 || !strings.Contains(got.stdout, file+":3") || !strings.Contains(got.stdout, "default") {
			t.Errorf("the place of gateway.port is not named: %+v", got)
		}
	})
}

// TestRefused is about what the command line itself refuses, without a cluster.
// The same cases with one are in test/integration.
func TestRefused(t *testing.T) {
	for _, tc := range []struct {
		name string
		args []string
		code int
		says []string
	}{
		{"unknown flag", []string{"plan", "--modle"}, 2, []string{"--modle", "--help"}},
		{"unknown command", []string{"instal"}, 2, []string{"instal"}},
		{"argument", []string{"plan", "now"}, 2, []string{"now", "--help"}},
		{"output", []string{"plan", "--output", "yaml"}, 2, []string{"yaml", "text or json"}},
		{"--set", []string{"plan", "--set", "gateway"}, 2, []string{"--set", "KEY=VALUE"}},
		{"GPU too old", []string{"plan", "--gpu", "t4"}, 3, []string{"T4", "Ampere"}},
		{"need off", []string{"plan", "--without", "vault"}, 2, []string{"external-secrets needs vault", "fix:"}},
		{"no lab", []string{"rehearse"}, 2, []string{"llmbox-lab", "make lab", "llmbox plan"}},
		{"lab that is not there", []string{"rehearse"}, 2, []string{"LLMBOX_LAB"}},
		{"dry run with a mistake", []string{"install", "--dry-run", "--port", "0"}, 2, []string{"--port"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv("PATH", t.TempDir()) // where a llmbox-lab of this machine might lie
			var env map[string]string
			if tc.name == "lab that is not there" {
				env = map[string]string{"LLMBOX_LAB": filepath.Join(t.TempDir(), "llmbox-lab")}
			}
			got := run(t, env, "", tc.args...)
			if got.code != tc.code {
				t.Errorf("code is %d, want %d", got.code, tc.code)
			}
			for _, want := range tc.says {
				if !strings.Contains(got.stderr, want) {
					t.Errorf("stderr holds no %q", want)
				}
			}
			if got.stdout != "" {
				t.Errorf("stdout is %q", got.stdout)
			}
			if t.Failed() {
				t.Logf("%+v", got)
			}
		})
	}
}

func TestDryRunIsPlan(t *testing.T) {
	planned := run(t, nil, "", "plan", "--gpu", "l4")
	dry := run(t, nil, "", "install", "--dry-run", "--gpu", "l4")
	if planned.code != 0 || dry.code != 0 || planned.stdout != dry.stdout || planned.stdout == "" {
		t.Errorf("plan: %+v\ndry run: %+v", planned, dry)
	}
}

// TestImages checks that the list holds what the plan's components run and
// nothing without a tag.
func TestImages(t *testing.T) {
	got := run(t, nil, "", "images", "--output", "json")
	var doc struct {
		Images []imageRow `json:"images"`
	}
	if err := json.Unmarshal([]byte(got.stdout), &doc); err != nil || got.code != 0 {
		t.Fatalf("%+v: %v", got, err)
	}
	have := map[string]bool{}
	for _, row := range doc.Images {
		have[row.Reference] = true
		if row.Source == "" || len(row.Components) == 0 {
			t.Errorf("%s has the source %q and the users %v", row.Reference, row.Source, row.Components)
		}
	}
	for _, c := range plan(t, nil).Components {
		for _, image := range c.Images {
			if !have[image] {
				t.Errorf("%s of %s is not listed", image, c.Name)
			}
		}
	}
}

func TestEventsSchema(t *testing.T) {
	got := run(t, nil, "", "events-schema")
	var doc map[string]any
	if err := json.Unmarshal([]byte(got.stdout), &doc); err != nil || got.code != 0 || doc["$schema"] == "" {
		t.Errorf("%+v: %v", got, err)
	}
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if got := run(t, nil, "", "completion", shell); got.code != 0 || !strings.Contains(got.stdout, "llmbox") {
			t.Errorf("%s: %+v", shell, got)
		}
	}
}

// TestHelp checks that each command says what it is for and shows an example.
func TestHelp(t *testing.T) {
	a := &app{}
	for _, cmd := range a.root().Commands() {
		if cmd.Hidden || cmd.Name() == "help" || cmd.Name() == "completion" {
			continue
		}
		if cmd.Short == "" || cmd.Example == "" {
			t.Errorf("%s: short text %q, example %q", cmd.Name(), cmd.Short, cmd.Example)
		}
	}
}

func TestConfirm(t *testing.T) {
	for _, tc := range []struct {
		name     string
		terminal bool
		yes      bool
		typed    string
		ok       bool
	}{
		{"--yes", false, true, "", true},
		{"no terminal", false, false, "y\n", false},
		{"yes", true, false, "Yes\n", true},
		{"enter", true, false, "\n", false},
		{"no", true, false, "no\n", false},
		{"end of input", true, false, "", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var stderr bytes.Buffer
			a := &app{yes: tc.yes, env: Env{Terminal: tc.terminal, Stdin: strings.NewReader(tc.typed), Stderr: &stderr}}
			err := a.confirm("Remove it?")
			if (err == nil) != tc.ok || err != nil && exitCode(err) != exitUsage {
				t.Errorf("error is %v, want agreement: %t", err, tc.ok)
			}
		})
	}
}

func TestLogFile(t *testing.T) {
	got := run(t, nil, "", "install", "--log-file", filepath.Join(t.TempDir(), "no", "such", "folder.ndjson"), "--kubeconfig", "/absent")
	if got.code != exitUsage {
		t.Errorf("%+v", got)
	}
	if _, err := os.Stat("/absent"); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a kubeconfig was made")
	}
}
