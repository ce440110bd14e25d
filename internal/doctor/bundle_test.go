package doctor

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/doctor/page"
	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// TestBundle judges what was written down, with names and without: the same findings.
func TestBundle(t *testing.T) {
	t.Parallel()
	for kind, scenes := range readScenes(t) {
		for i, s := range scenes {
			// Each kind's first case on the whole box; all would only take longer.
			if i > 0 && !s.Box || i > 2 {
				continue
			}
			t.Run(kind+"/"+s.Name, func(t *testing.T) {
				t.Parallel()
				facts := s.snapshot(t)
				found := Judge(facts)
				index, err := page.Render(facts, found)
				if err != nil {
					t.Fatal(err)
				}
				for _, f := range found {
					if bad(f) && !strings.Contains(string(index), f.ID) {
						t.Errorf("%s is not on the page", f.ID)
					}
				}
				name := filepath.Join(t.TempDir(), "bundle.tar.gz")
				if err := facts.SaveBundle(name, []snapshot.Extra{{Name: "index.html", Data: index}, {Name: "findings.json", Data: []byte("{}")}}); err != nil {
					t.Fatal(err)
				}
				read, err := snapshot.Load(name)
				if err != nil {
					t.Fatal(err)
				}
				if again := Judge(read); !reflect.DeepEqual(again, found) {
					t.Errorf("the bundle gives other findings than the box")
				}
				anonymous, err := facts.Anonymous()
				if err != nil {
					t.Fatal(err)
				}
				if got, want := outline(Judge(anonymous)), outline(found); !slices.Equal(got, want) {
					t.Errorf("without names:\n%s\nwith:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
				}
			})
		}
	}
}

func outline(found []finding.Finding) []string {
	var out []string
	for _, f := range found {
		out = append(out, f.ID+" "+string(f.Severity)+" "+string(f.State)+" "+strings.Join(f.Causes, ","))
	}
	return out
}

// FuzzJudge holds that no log and no object, however broken, breaks the judgement, and
// that nothing is said of a box without evidence.
func FuzzJudge(f *testing.F) {
	f.Add("", `{"items":[]}`, "")
	f.Add("(24.0 GiB KV cache is needed, which is larger than the available KV cache memory (3.18 GiB). estimated maximum model length is 34736", `{"items":[{"metadata":{"name":"a"},"status":{"phase":"Running"}}]}`, "NVRM: Xid (PCI:0000:a1:00): 79, x")
	f.Add("401 Client Error gated repo https://huggingface.co/a/b/resolve", `{"items":[{"spec":{"containers":[{"resources":{"limits":{"nvidia.com/gpu":"1"}}}]}}]}`, "Killed process 1 (x) anon-rss:5kB")
	f.Add(`{"response_code":504,"response_flags":"UT","response_code_details":"response_timeout","duration":15001}`, `[{"metadata":{"labels":{"owner":"helm"}}}]`, "EXT4-fs error")
	f.Add("VLLM_PORT 'tcp://1:1' appears to be a URI\nLoading safetensors checkpoint shards:  43% Completed | 13/30", `{"items":[{"status":{"conditions":[{"type":"Ready","status":"False"}]}}]}`, "time=\"x\" level=fatal msg=\"y\"")
	f.Fuzz(func(t *testing.T, log, objects, journal string) {
		s := snapshot.New()
		s.AddLog(snapshot.LogName{Namespace: "llm", Pod: "model-server-1", Container: "vllm"}, log)
		s.AddLog(snapshot.LogName{Namespace: "kube-system", Pod: "coredns-1", Container: "coredns", Previous: true}, log)
		s.AddCommand(snapshot.CommandDmesg, journal, 0)
		s.AddCommand(snapshot.CommandJournalK3s, journal, 0)
		if json.Valid([]byte(objects)) {
			for _, kind := range []string{"pods", "nodes", "events", "secrets", "gateways", "httproutes", "persistentvolumeclaims", "validatingwebhookconfigurations", "deployments", "services", "endpointslices", "externalsecrets"} {
				s.AddCluster(kind, json.RawMessage(objects))
			}
			s.AddProbe(snapshot.ProbeCertificates, json.RawMessage(objects))
			s.AddProbe(snapshot.ProbeModel, json.RawMessage(objects))
		}
		seen := map[string]bool{}
		for _, one := range Judge(s) {
			if seen[one.ID] {
				t.Errorf("%s is there twice", one.ID)
			}
			seen[one.ID] = true
			if strings.Contains(one.Measured, "the check itself broke") {
				t.Errorf("%+v", one)
			}
			if bad(one) && (len(one.Evidence) == 0 || one.Fix == "") {
				t.Errorf("no evidence or fix: %+v", one)
			}
		}
	})
}
