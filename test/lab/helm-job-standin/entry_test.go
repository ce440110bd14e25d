package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// scene is one container with what its volumes hold, and a Helm that answers as told.
type scene struct {
	// status is Helm's answer about the release; empty: there is none.
	status string
	env    map[string]string
	// fails are operations ("install") that end with 1.
	fails []string

	calls  []string
	marked string
	stdin  string
	log    bytes.Buffer
	entry  entry
}

func play(t *testing.T, s *scene, args ...string) int {
	t.Helper()
	env := map[string]string{
		"NAME": "thing", "TARGET_NAMESPACE": "there", "CHART": "", "VERSION": "1.0.0", "TIMEOUT": "5m0s",
		"CONFIG_HASH": "ABC", "SERVER_SIDE": "auto", "FORCE_CONFLICTS": "false", "FAILURE_POLICY": "abort",
	}
	maps.Copy(env, s.env)
	root := t.TempDir()
	for path, content := range map[string]string{
		"chart/thing.tgz.base64":       base64.StdEncoding.EncodeToString([]byte("an archive")),
		"config/values-0-001-b.yaml":   "b: 1\n",
		"config/values-0-000-a.yaml":   "a: 1\n",
		"auth/password":                "secret",
		"auth/username":                "user\n",
		"tmp/README":                   "",
		"dev/termination-log":          "",
		"config/..data/no-values.yaml": "",
	} {
		file := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.entry = entry{
		env: func(name string) string { return env[name] }, root: root, out: &s.log,
		terminationLog: filepath.Join(root, "dev", "termination-log"),
		helm: func(_ context.Context, stdin io.Reader, stdout io.Writer, args ...string) (int, error) {
			if stdin != nil {
				raw, err := io.ReadAll(stdin)
				if err != nil {
					return 1, err
				}
				s.stdin = string(raw)
			}
			if args[0] == "status" {
				if s.status == "" {
					return 1, nil
				}
				_, err := io.WriteString(stdout, s.status)
				return 0, err
			}
			s.calls = append(s.calls, strings.ReplaceAll(strings.Join(args, " "), root, ""))
			if slices.Contains(s.fails, args[0]) {
				return 1, nil
			}
			return 0, nil
		},
		setStatus: func(_ context.Context, namespace, name string, _ int, status string) error {
			s.marked = namespace + "/" + name + " " + status
			return nil
		},
	}
	code, err := s.entry.run(t.Context(), args)
	if err != nil {
		t.Fatal(err)
	}
	return code
}

func record(status string) string {
	return `{"name":"thing","version":3,"apply_method":"ssa","info":{"status":"` + status + `"}}`
}

func TestEntry(t *testing.T) {
	const (
		flags   = " --timeout 5m0s --labels helmcharts.helm.cattle.io/configHash=ABC --server-side=%s --force-conflicts=false --values /config/values-0-000-a.yaml --values /config/values-0-001-b.yaml"
		operand = " --namespace there --version 1.0.0 thing /tmp/thing.tgz"
		remove  = "uninstall thing --namespace there --wait"
	)
	install := "install" + operand + strings.Replace(flags, "%s", "true", 1)
	upgrade := "upgrade" + operand + strings.Replace(flags, "%s", "auto", 1)
	for _, tt := range []struct {
		name    string
		scene   scene
		delete  bool
		calls   []string
		code    int
		marked  bool
		message string
	}{
		{name: "nothing there", calls: []string{install}, message: "Installing helm chart"},
		{name: "install fails", scene: scene{fails: []string{"install"}}, calls: []string{install}, code: 1, message: "Installing helm chart"},
		{name: "deployed", scene: scene{status: record("deployed")}, calls: []string{upgrade}, message: "Upgrading helm chart"},
		{name: "upgrade fails", scene: scene{status: record("deployed"), fails: []string{"upgrade"}}, calls: []string{upgrade}, code: 1, message: "Upgrading helm chart"},
		{name: "another revision than helm-controller saw", scene: scene{status: record("deployed"), env: map[string]string{"EXPECTED_RELEASE_REVISION": "2"}},
			message: "Current release revision 3 does not match expected revision 2"},
		{name: "the revision helm-controller saw", scene: scene{status: record("deployed"), env: map[string]string{"EXPECTED_RELEASE_REVISION": "3"}},
			calls: []string{upgrade}, message: "Upgrading helm chart"},
		{name: "install cut off", scene: scene{status: record("pending-install")}, marked: true, code: 1, message: "waiting for operator intervention"},
		{name: "upgrade cut off", scene: scene{status: record("pending-upgrade")}, marked: true, calls: []string{upgrade}, message: "Retrying upgrade of helm chart"},
		{name: "failed, abort", scene: scene{status: record("failed")}, code: 1, message: "Release status is 'failed' and failure policy is 'abort'; waiting for operator intervention"},
		{name: "failed, reinstall", scene: scene{status: record("failed"), env: map[string]string{"FAILURE_POLICY": ""}}, calls: []string{remove, install}, message: "Installing helm chart"},
		{name: "failed, retry ends well whatever Helm says", scene: scene{status: record("failed"), fails: []string{"upgrade"}, env: map[string]string{"FAILURE_POLICY": "retry"}},
			calls: []string{upgrade}, message: "from failed state"},
		{name: "failed, a policy nobody knows", scene: scene{status: record("failed"), env: map[string]string{"FAILURE_POLICY": "pray"}}, code: 1, message: "Unknown failure policy 'pray'"},
		{name: "delete", delete: true, scene: scene{status: record("failed")}, calls: []string{remove}, message: "Uninstalling helm chart"},
		{name: "delete fails", delete: true, scene: scene{status: record("deployed"), fails: []string{"uninstall"}}, calls: []string{remove}, message: "Uninstalling helm chart"},
		{name: "delete what is not there", delete: true, message: "nothing to delete"},
		{name: "Helm 2", scene: scene{env: map[string]string{"HELM_VERSION": "v2"}}, code: exitHelm2, message: "Helm 2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			args := []string{"install", "--namespace", "there", "--version", "1.0.0"}
			if tt.delete {
				args = []string{"delete"}
			}
			code := play(t, &tt.scene, args...)
			if code != tt.code || !slices.Equal(tt.scene.calls, tt.calls) || (tt.scene.marked != "") != tt.marked {
				t.Errorf("exit %d, want %d; marked %q; calls:\n%s\nwant:\n%s", code, tt.code, tt.scene.marked, strings.Join(tt.scene.calls, "\n"), strings.Join(tt.calls, "\n"))
			}
			message, err := os.ReadFile(tt.scene.entry.terminationLog)
			if err != nil || !strings.Contains(string(message), tt.message) {
				t.Errorf("the termination message is %q (%v), want %q in it", message, err, tt.message)
			}
		})
	}
}

func TestRepository(t *testing.T) {
	s := &scene{env: map[string]string{"REPO": "https://charts.example", "CHART": "thing/other", "NAME": "elsewhere"}}
	play(t, s, "install")
	want := []string{"repo add --username user --password-stdin elsewhere https://charts.example", "repo update"}
	if len(s.calls) != 3 || !slices.Equal(s.calls[:2], want) || !strings.HasPrefix(s.calls[2], "install elsewhere thing/other ") {
		t.Errorf("calls:\n%s", strings.Join(s.calls, "\n"))
	}
	if s.stdin != "secret" || strings.Contains(s.log.String(), "secret") {
		t.Errorf("the password: stdin %q, log %q", s.stdin, s.log.String())
	}
}

func TestServerSide(t *testing.T) {
	for _, tt := range []struct {
		side, force, method string
		revision            int
		want                string
	}{
		{"auto", "false", "", 0, "--server-side=true --force-conflicts=false"},
		{"auto", "true", "ssa", 2, "--server-side=auto --force-conflicts=true"},
		{"auto", "true", "csa", 2, "--server-side=auto --force-conflicts=false"},
		{"false", "true", "ssa", 2, "--server-side=false --force-conflicts=false"},
		{"", "", "", 1, ""},
	} {
		env := map[string]string{"SERVER_SIDE": tt.side, "FORCE_CONFLICTS": tt.force}
		e := entry{env: func(name string) string { return env[name] }, root: t.TempDir()}
		if got := strings.Join(e.flags("", release{revision: tt.revision, applyMethod: tt.method}), " "); got != tt.want {
			t.Errorf("%+v: %q", tt, got)
		}
	}
}
