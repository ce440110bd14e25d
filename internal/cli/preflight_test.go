package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

const cases = "../preflight/testdata/cases"

// snapshotOf lays a case over the machine it is a change of and returns where.
func snapshotOf(t *testing.T, name string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(cases, name, "want.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var want struct {
		Base string `json:"base"`
	}
	if err := yaml.Unmarshal(raw, &want); err != nil {
		t.Fatal(err)
	}
	if want.Base == "" {
		return filepath.Join(cases, name)
	}
	t.Fatalf("%s is a change of %s; name a case that stands alone", name, want.Base)
	return ""
}

func preflightJSON(t *testing.T, args ...string) (int, []finding.Finding, string) {
	t.Helper()
	got := run(t, nil, "", append([]string{"preflight", "--output", "json"}, args...)...)
	var doc findingsDoc
	if err := json.Unmarshal([]byte(got.stdout), &doc); err != nil && got.stdout != "" {
		t.Fatalf("stdout is no document: %v\n%s", err, got.stdout)
	}
	return got.code, doc.Findings, got.stderr
}

func byID(found []finding.Finding, id string) (finding.Finding, bool) {
	at := slices.IndexFunc(found, func(f finding.Finding) bool { return f.ID == id })
	if at < 0 {
		return finding.Finding{}, false
	}
	return found[at], true
}

// Somebody else's machine, judged from a snapshot: the exit code is the verdict and
// the first finding the root.
func TestPreflightOfSnapshots(t *testing.T) {
	tests := []struct {
		snapshot string
		args     []string
		code     int
		first    string
		fit      string
	}{
		{"ok-a10-ubuntu-2204", nil, 0, "", "Qwen/Qwen3-8B fits"},
		{"ok-h100x8", nil, 0, "", "fits"},
		{"bare-vm-no-driver", nil, 3, "gpu.driver.missing", "fits"},
		{"g04-secure-boot-standalone", nil, 3, "gpu.driver.secure_boot", ""},
		{"container", nil, 3, "host.container", ""},
		{"wsl", nil, 3, "host.wsl", ""},
		{"ok-a10-ubuntu-2204", []string{"--model", "Qwen/Qwen3-32B"}, 3, "model.fit", "does not fit"},
		{"ok-a10-ubuntu-2204", []string{"--model", "Qwen/Qwen3-32B", "--ignore", "model.fit"}, 0, "model.fit", "does not fit"},
		{"ok-a10-ubuntu-2204", []string{"--context-tokens", "40960"}, 3, "model.fit", "does not fit"},
		{"ok-a10-ubuntu-2204", []string{"--context-tokens", "8192"}, 0, "", "fits"},
	}
	for _, tt := range tests {
		t.Run(tt.snapshot+strings.Join(tt.args, ""), func(t *testing.T) {
			code, found, stderr := preflightJSON(t, append([]string{"--snapshot", snapshotOf(t, tt.snapshot)}, tt.args...)...)
			if code != tt.code {
				t.Errorf("exit %d, want %d: %s", code, tt.code, stderr)
			}
			if len(found) < 60 {
				t.Fatalf("%d findings, every check that ran must be listed", len(found))
			}
			if tt.first != "" && found[0].ID != tt.first {
				t.Errorf("first is %s (%s), want %s", found[0].ID, found[0].Measured, tt.first)
			}
			fit, there := byID(found, "model.fit")
			if !there || !strings.Contains(fit.Measured, tt.fit) {
				t.Errorf("fit: %+v", fit)
			}
			if tt.args == nil && tt.code == 3 && strings.Contains(stderr, "model.fit") {
				t.Errorf("what follows from the root is named as a reason: %s", stderr)
			}
		})
	}
}

func TestPreflightText(t *testing.T) {
	got := run(t, nil, "", "preflight", "--snapshot", snapshotOf(t, "bare-vm-no-driver"))
	code, stdout := got.code, got.stdout
	if code != 3 || !strings.HasPrefix(stdout, "FAIL") || !strings.Contains(stdout, "to mend") {
		t.Errorf("exit %d\n%s", code, stdout)
	}
	for line := range strings.Lines(stdout) {
		if len([]rune(strings.TrimRight(line, "\n"))) > 100 {
			t.Errorf("wider than 100 columns: %s", line)
		}
	}
}

func TestPreflightRefuses(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "nothing.tar.gz")
	tests := []struct {
		name string
		args []string
		code int
		says string
	}{
		{"no such snapshot", []string{"--snapshot", outside}, 2, "nothing.tar.gz"},
		{"both", []string{"--snapshot", outside, "--save", outside}, 2, "exclude each other"},
		{"mend a snapshot", []string{"--snapshot", filepath.Join(cases, "ok-h100x8"), "--fix"}, 2, "mends this machine"},
		{"mend a cluster", []string{"--kubeconfig", outside, "--fix"}, 2, "mends this machine"},
		{"unknown check", []string{"--snapshot", snapshotOf(t, "ok-h100x8"), "--ignore", "no.such.check"}, 2, "no.such.check"},
		{"unknown GPU", []string{"--snapshot", snapshotOf(t, "ok-h100x8"), "--gpu", "abacus"}, 2, "abacus"},
		{"unreachable cluster", []string{"--kubeconfig", outside}, 2, "nothing.tar.gz"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := run(t, nil, "", append([]string{"preflight"}, tt.args...)...)
			if got.code != tt.code || !strings.Contains(got.stderr, tt.says) {
				t.Errorf("exit %d, want %d; stderr %q", got.code, tt.code, got.stderr)
			}
			if strings.Contains(tt.name, "unknown GPU") && got.stdout != "" {
				t.Errorf("judged in spite of a bad flag: %s", got.stdout)
			}
		})
	}
}

// What was read is kept and can be judged again, elsewhere, to the same end.
func TestPreflightSave(t *testing.T) {
	file := filepath.Join(t.TempDir(), "box.tar.gz")
	live, found, stderr := preflightJSON(t, "--offline", "--save", file, "--gpu", "a10")
	if len(found) == 0 {
		t.Fatal(stderr)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v; what a machine looks like is its owner's", info, err)
	}
	again, later, _ := preflightJSON(t, "--snapshot", file, "--gpu", "a10")
	if live != again {
		t.Errorf("exit %d live, %d from the snapshot", live, again)
	}
	bad := func(found []finding.Finding) (ids []string) {
		for _, f := range found {
			if f.Severity == finding.Fail {
				ids = append(ids, f.ID)
			}
		}
		slices.Sort(ids)
		return ids
	}
	if a, b := bad(found), bad(later); !slices.Equal(a, b) {
		t.Errorf("failing live: %q, from the snapshot: %q", a, b)
	}
}

func TestVerdict(t *testing.T) {
	fail := func(id string, causes ...string) finding.Finding {
		return finding.Finding{ID: id, Severity: finding.Fail, Causes: causes}
	}
	strict := fail("strict")
	strict.Strict = true
	warn := finding.Finding{ID: "warned", Severity: finding.Warn}
	tests := []struct {
		name   string
		found  []finding.Finding
		ignore []string
		strict bool
		says   string
		code   int
	}{
		{"well", []finding.Finding{{ID: "a", Severity: finding.OK}}, nil, true, "", 0},
		{"root and follower", []finding.Finding{fail("root"), fail("follower", "root")}, nil, false, "failed: root", 3},
		{"root ignored, the follower stands for itself", []finding.Finding{fail("root"), fail("follower", "root")}, []string{"root"}, false, "failed: follower", 3},
		{"both ignored", []finding.Finding{fail("root"), fail("follower", "root")}, []string{"root", "follower"}, false, "", 0},
		{"strict can't be ignored", []finding.Finding{strict}, []string{"strict"}, false, "failed: strict", 3},
		{"warning", []finding.Finding{warn}, nil, false, "", 0},
		{"warning, strictly", []finding.Finding{warn}, nil, true, "warnings", 4},
		{"failure before warning", []finding.Finding{warn, fail("root")}, nil, true, "failed: root", 3},
		{"unknown id", []finding.Finding{warn}, []string{"nothing"}, false, "nothing", 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := verdict(tt.found, tt.ignore, tt.strict)
			if exitCode(err) != tt.code || err != nil && !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v (exit %d), want %q (exit %d)", err, exitCode(err), tt.says, tt.code)
			}
		})
	}
}
