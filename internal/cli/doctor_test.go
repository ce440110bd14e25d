package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/llmbox-dev/llmbox/internal/doctor"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// boxSnapshot is a box to be judged, written where a person would have it.
func boxSnapshot(t *testing.T, change func(*snapshot.Snapshot)) string {
	t.Helper()
	s, err := snapshot.Load(filepath.Join(cases, "ok-a10-ubuntu-2404"))
	if err != nil {
		t.Fatal(err)
	}
	s.Manifest.Time = time.Date(2026, 6, 15, 12, 0, 0, 0, time.UTC)
	s.AddCluster("nodes", json.RawMessage(`{"items":[{"metadata":{"name":"gpu-box-1"},"status":{"capacity":{"nvidia.com/gpu":"1"},"allocatable":{"nvidia.com/gpu":"1"},"conditions":[{"type":"Ready","status":"True"}],"nodeInfo":{"kubeletVersion":"v1.36.4+k3s1"}}}]}`))
	s.AddCluster("pods", json.RawMessage(`{"items":[{"metadata":{"namespace":"llm","name":"model-server-1","labels":{"app.kubernetes.io/name":"model-server"}},
	 "spec":{"nodeName":"gpu-box-1","runtimeClassName":"nvidia","containers":[{"name":"vllm","image":"docker.io/vllm/vllm-openai:v0.32.0"}]},
	 "status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"}],"containerStatuses":[{"name":"vllm","ready":true,"restartCount":0,"image":"x","imageID":"","state":{},"lastState":{}}]}}]}`))
	if change != nil {
		change(s)
	}
	name := filepath.Join(t.TempDir(), "box.tar.gz")
	if err := s.Save(name); err != nil {
		t.Fatal(err)
	}
	return name
}

func brokenModel(s *snapshot.Snapshot) {
	s.AddCluster("pods", json.RawMessage(`{"items":[{"metadata":{"namespace":"llm","name":"model-server-1","labels":{"app.kubernetes.io/name":"model-server"}},
	 "spec":{"nodeName":"gpu-box-1","runtimeClassName":"nvidia","containers":[{"name":"vllm","image":"docker.io/vllm/vllm-openai:v0.32.0"}]},
	 "status":{"phase":"Running","conditions":[{"type":"Ready","status":"False"}],"containerStatuses":[{"name":"vllm","ready":false,"restartCount":6,"image":"x","imageID":"","state":{"waiting":{"reason":"CrashLoopBackOff"}},"lastState":{"terminated":{"exitCode":1,"reason":"Error"}}}]}}]}`))
	s.AddLog(snapshot.LogName{Namespace: "llm", Pod: "model-server-1", Container: "vllm", Previous: true},
		"(EngineCore_DP0 pid=271) ERROR 06-15 10:02:07 [core.py:708] ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (9.41 GiB). Based on the available memory, the estimated maximum model length is 77072.\n")
	s.AddProbe(snapshot.ProbeEndpoint, json.RawMessage(`{"url":"http://192.168.16.20:8080/v1","status":503,"with_key":true,"stage":"http","error":"no healthy upstream","elapsed_ms":4}`))
}

// What a person reads, and how the command ends.
func TestDoctorText(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*snapshot.Snapshot)
		args   []string
		code   int
	}{
		{"healthy", nil, nil, exitDone},
		{"kv-cache", brokenModel, nil, exitCheckFailed},
		{"kv-cache-all", brokenModel, []string{"--all"}, exitCheckFailed},
		{"kv-cache-accepted", brokenModel, []string{"--ignore", "model.kv_cache"}, exitCheckFailed},
		{"next-boot", func(s *snapshot.Snapshot) {
			s.AddEntry(snapshot.Entry{Path: "/boot/vmlinuz", Kind: snapshot.Symlink, Target: "/boot/vmlinuz-6.8.0-1031-aws"})
			s.AddEntry(snapshot.Entry{Path: "/lib/modules/6.8.0-1031-aws", Kind: snapshot.Directory})
		}, nil, exitWarnings},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := run(t, nil, "", append([]string{"doctor", "--snapshot", boxSnapshot(t, c.change)}, c.args...)...)
			if got.code != c.code {
				t.Errorf("ends with %d, want %d: %s", got.code, c.code, got.stderr)
			}
			for i, line := range strings.Split(got.stdout, "\n") {
				if utf8.RuneCountInString(line) > 100 && len(strings.Fields(line)) > 2 {
					t.Errorf("line %d has %d columns: %s", i+1, utf8.RuneCountInString(line), line)
				}
			}
			golden(t, "doctor-"+c.name+".txt", got.stdout)
		})
	}
}

// A bundle is read back to the same findings, named or not.
func TestSupportBundle(t *testing.T) {
	box := boxSnapshot(t, func(s *snapshot.Snapshot) {
		brokenModel(s)
		s.AddFile("/etc/hostname", "gpu-box-1\n")
	})
	document := func(snapshotFile string) string {
		got := run(t, nil, "", "doctor", "--output", "json", "--snapshot", snapshotFile)
		if got.code != exitCheckFailed {
			t.Fatalf("ends with %d: %s", got.code, got.stderr)
		}
		return got.stdout
	}
	want := document(box)
	dir := t.TempDir()
	plain, anonymous := filepath.Join(dir, "plain.tar.gz"), filepath.Join(dir, "anonymous.tar.gz")
	if got := run(t, nil, "", "support-bundle", "--snapshot", box, "--file", plain); got.code != exitDone {
		t.Fatalf("ends with %d: %s", got.code, got.stderr)
	}
	if info, err := os.Stat(plain); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	if got := document(plain); got != want {
		t.Errorf("the bundle gives other findings:\n%s\n%s", got, want)
	}
	if got := run(t, nil, "", "support-bundle", "--snapshot", box, "--file", anonymous, "--anonymize"); got.code != exitDone {
		t.Fatalf("ends with %d: %s", got.code, got.stderr)
	}
	again := document(anonymous)
	for _, name := range []string{"gpu-box-1", "192.168.16.20"} {
		if strings.Contains(again, name) {
			t.Errorf("%q is still there", name)
		}
	}
	ids := func(text string) string {
		var doc findingsDoc
		if err := json.Unmarshal([]byte(text), &doc); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		for _, f := range doc.Findings {
			out.WriteString(f.ID + " " + string(f.Severity) + " " + strings.Join(f.Causes, ",") + "\n")
		}
		return out.String()
	}
	if ids(again) != ids(want) {
		t.Errorf("without names the findings are others:\n%s\n%s", ids(again), ids(want))
	}
}

func TestDoctorUsage(t *testing.T) {
	box := boxSnapshot(t, nil)
	for _, args := range [][]string{
		{"doctor", "--snapshot", box, "--fix"}, {"doctor", "--snapshot", box, "--save", "x"}, {"doctor", "--snapshot", "/nowhere"},
		{"doctor", "--snapshot", box, "--ignore", "no.such.check"}, {"support-bundle", "--snapshot", box, "--file", "box.zip"},
	} {
		if got := run(t, nil, "", args...); got.code != exitUsage {
			t.Errorf("%v ends with %d: %s", args, got.code, got.stderr)
		}
	}
}

// The short form names the root and what mends it, and nothing of a box that is well.
func TestShortDiagnosis(t *testing.T) {
	judged := func(change func(*snapshot.Snapshot)) string {
		s, err := snapshot.Load(boxSnapshot(t, change))
		if err != nil {
			t.Fatal(err)
		}
		return shortDiagnosis(doctor.Judge(s))
	}
	if got := judged(nil); got != "" {
		t.Errorf("a box that is well: %q", got)
	}
	got := judged(brokenModel)
	for _, want := range []string{"model.kv_cache", "77072", "To mend   sudo llmbox install"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %q", got, want)
		}
	}
}
