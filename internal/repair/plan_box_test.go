package repair

import (
	"context"
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/repair/record"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// boxRepair says whether a repair is of a box that is there.
func boxRepair(name string) bool {
	return slices.Contains([]string{
		StartK3s, PruneImages, Uncordon, StalePods, PendingRelease, Unseal, RestartDNS, RestartPlugin, RestartWebhook, RestartModel, DeletePod,
	}, name)
}

// boxFacts is a box with one object of each kind that repairs look for.
func boxFacts() *snapshot.Snapshot {
	s := snapshot.New()
	s.AddFile("/usr/local/bin/k3s", "")
	s.AddCommand(snapshot.CommandUnits, "Id=k3s.service\nLoadState=loaded\nActiveState=failed\nSubState=failed\n", 0)
	add := func(kind string, names ...string) {
		var items []map[string]any
		for _, n := range names {
			namespace, name, _ := strings.Cut(n, "/")
			items = append(items, map[string]any{"metadata": map[string]any{"namespace": namespace, "name": name}, "spec": map[string]any{"replicas": 1}})
		}
		raw, err := json.Marshal(map[string]any{"items": items})
		if err != nil {
			panic(err)
		}
		s.AddCluster(kind, raw)
	}
	add("deployments", "vault/vault-unsealer", "kube-system/coredns", "kyverno/kyverno-admission-controller", "llm/model-server")
	add("daemonsets", "gpu-operator/nvidia-device-plugin-daemonset")
	s.AddCluster("pods", json.RawMessage(`{"items":[
	 {"metadata":{"namespace":"llm","name":"refused","ownerReferences":[{}]},"status":{"phase":"Failed","reason":"UnexpectedAdmissionError"}},
	 {"metadata":{"namespace":"llm","name":"of-a-job"},"status":{"phase":"Failed","reason":"Error"}},
	 {"metadata":{"namespace":"llm","name":"runs"},"status":{"phase":"Running"}}]}`))
	return s
}

func TestPlanBox(t *testing.T) {
	t.Parallel()
	in := func(kind, name, line string) []finding.Evidence {
		return []finding.Evidence{{File: "cluster/" + kind + ".json", Field: name, Line: line}}
	}
	seen := map[string]bool{}
	for _, c := range []struct {
		finding finding.Finding
		want    []string
		decline string
	}{
		{finding: finding.Finding{ID: "k3s.service", Repair: StartK3s}, want: []string{"sudo systemctl start k3s"}},
		{finding: finding.Finding{ID: "host.disk.pressure", Repair: PruneImages}, want: []string{"sudo k3s crictl rmi --prune"}},
		{finding: finding.Finding{ID: "node.cordoned", Repair: Uncordon, Measured: "a is cordoned", Evidence: in("nodes", "a", "")}, want: []string{`kubectl patch node a --type=merge -p '{"spec":{"unschedulable":null}}'`}},
		{finding: finding.Finding{ID: "node.cordoned", Repair: Uncordon, Measured: "a has the taint x", Evidence: in("nodes", "a", "")}, decline: "set by somebody"},
		{finding: finding.Finding{ID: "pod.stale", Repair: StalePods}, want: []string{"kubectl -n llm delete pod refused"}},
		{finding: finding.Finding{ID: "helm.release.pending", Repair: PendingRelease, Evidence: in("secrets", "keda/sh.helm.release.v1.keda.v2", "")}, want: []string{"kubectl -n keda delete secret sh.helm.release.v1.keda.v2"}},
		{finding: finding.Finding{ID: "helm.release.pending", Repair: PendingRelease, Evidence: in("secrets", "keda/hf-token", "")}, decline: "could not be seen"},
		{finding: finding.Finding{ID: "secrets.vault_sealed", Repair: Unseal}, want: []string{"kubectl -n vault patch deployment vault-unsealer", "kubectl -n vault rollout restart deployment/vault-unsealer"}},
		{finding: finding.Finding{ID: "secrets.vault_uninitialised", Repair: Unseal}, decline: "not set up"},
		{finding: finding.Finding{ID: "net.dns.coredns", Repair: RestartDNS}, want: []string{"rollout restart deployment/coredns"}},
		{finding: finding.Finding{ID: "net.dns.config", Repair: RestartDNS}, decline: "would not help"},
		{finding: finding.Finding{ID: "gpu.allocatable", Repair: RestartPlugin}, want: []string{"rollout restart daemonset/nvidia-device-plugin-daemonset"}},
		{finding: finding.Finding{ID: "operator.webhook.blocking", Repair: RestartWebhook, Evidence: in("validatingwebhookconfigurations", "x", "failurePolicy: Fail, 0 endpoints of kyverno/kyverno-svc")}, want: []string{"rollout restart deployment/kyverno-admission-controller"}},
		{finding: finding.Finding{ID: "operator.webhook.blocking", Repair: RestartWebhook, Evidence: in("validatingwebhookconfigurations", "x", "failurePolicy: Fail, 0 endpoints of gone/svc")}, decline: "no Deployment behind"},
		{finding: finding.Finding{ID: "model.engine_dead", Repair: RestartModel}, want: []string{"kubectl -n llm rollout restart deployment/model-server"}},
		{finding: finding.Finding{ID: "runtime.cgroup_device_lost", Repair: DeletePod, Evidence: []finding.Evidence{{File: "probes/pod-devices.json", Field: "llm/model-server-1"}}}, want: []string{"kubectl -n llm delete pod model-server-1"}},
	} {
		f := c.finding
		f.Severity, f.State = finding.Fail, finding.Judged
		actions := Plan([]finding.Finding{f}, boxFacts(), Networks{})
		if c.decline != "" {
			declined := PlanDeclined([]finding.Finding{f}, boxFacts(), Networks{})
			if len(actions) != 0 || len(declined) != 1 || !strings.Contains(declined[0].Why, c.decline) {
				t.Errorf("%s: planned %+v, declined %+v", f.ID, actions, declined)
			}
			continue
		}
		if len(actions) != 1 {
			t.Errorf("%s: %d actions", f.ID, len(actions))
			continue
		}
		seen[actions[0].Name] = true
		sound(t, actions[0])
		var shown []string
		for _, s := range actions[0].Steps {
			shown = append(shown, s.Shown())
		}
		for _, w := range c.want {
			if !strings.Contains(strings.Join(shown, "\n"), w) {
				t.Errorf("%s: %q is not in %q", f.ID, w, shown)
			}
		}
	}
	for _, r := range repairs() {
		if boxRepair(r.name) && !seen[r.name] {
			t.Errorf("no case plans %s", r.name)
		}
	}
}

// A change of the cluster is done, recorded and looked at again; one that does not help
// is said to have failed.
func TestApplyKube(t *testing.T) {
	t.Parallel()
	made := func(api, kind, namespace, name string, spec, status map[string]any) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": api, "kind": kind, "metadata": map[string]any{"namespace": namespace, "name": name}, "spec": spec, "status": status,
		}}
	}
	client := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{},
		made("v1", "Pod", "llm", "refused", nil, nil),
		made("v1", "Node", "", "a", map[string]any{"unschedulable": true}, nil),
		made("apps/v1", "Deployment", "kube-system", "coredns", map[string]any{"replicas": int64(0)}, map[string]any{}),
	)
	// What a controller would do once it is asked for a replica.
	client.PrependReactor("patch", "deployments", func(action k8stesting.Action) (bool, runtime.Object, error) {
		gvr := schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
		err := client.Tracker().Update(gvr, made("apps/v1", "Deployment", "kube-system", "coredns", map[string]any{"replicas": int64(1)},
			map[string]any{"replicas": int64(1), "readyReplicas": int64(1), "updatedReplicas": int64(1)}), "kube-system")
		return true, nil, err
	})
	rec, err := record.Open(filepath.Join(t.TempDir(), "repairs.json"), "test")
	if err != nil {
		t.Fatal(err)
	}
	facts := boxFacts()
	found := []finding.Finding{
		{ID: "pod.stale", Severity: finding.Warn, State: finding.Judged, Repair: StalePods},
		{ID: "node.cordoned", Severity: finding.Fail, State: finding.Judged, Repair: Uncordon, Measured: "a is cordoned", Evidence: []finding.Evidence{{File: "cluster/nodes.json", Field: "a"}}},
		{ID: "net.dns.coredns", Severity: finding.Fail, State: finding.Judged, Repair: RestartDNS},
	}
	outcomes, err := Apply(context.Background(), NewMachine(Options{Root: t.TempDir(), Cluster: client}), Plan(found, facts, Networks{}), rec, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range outcomes {
		if o.Result != Mended || len(o.Did) == 0 {
			t.Errorf("%+v", o)
		}
	}
	if len(rec.Repairs) != 3 {
		t.Errorf("%d repairs are recorded", len(rec.Repairs))
	}
	// Without a way to the cluster nothing is claimed.
	outcomes, err = Apply(context.Background(), NewMachine(Options{Root: t.TempDir()}), Plan(found[1:2], facts, Networks{}), rec, nil, nil)
	if err != nil || len(outcomes) != 1 || outcomes[0].Result != Broke {
		t.Errorf("%+v %v", outcomes, err)
	}
}

// Where llmbox itself keeps k3s running there is no unit to restart.
func TestRestartOfASupervisedK3s(t *testing.T) {
	t.Parallel()
	found := []finding.Finding{{ID: "runtime.handler_missing", Severity: finding.Fail, State: finding.Judged, Repair: RestartK3s}}
	for _, tt := range []struct {
		name, probe string
		want        []string
	}{
		{"runs", `{"init":"supervised","supervisor":true,"k3s":true,"pid":76,"supervisor_pid":62}`, []string{"pkill", "-TERM", "-P", "62", "k3s"}},
		{"nobody would start it again", `{"init":"supervised","supervisor":false,"k3s":true,"pid":76}`, nil},
		{"does not run", `{"init":"supervised","supervisor":true,"k3s":false,"supervisor_pid":62}`, nil},
		{"systemd's", `{"init":"systemd"}`, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := snapshot.New()
			s.AddProbe(snapshot.ProbeService, json.RawMessage(tt.probe))
			var got []string
			for _, a := range Plan(found, s, Networks{}) {
				for _, step := range a.Steps {
					got = append(got, step.Run.Argv...)
				}
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("%q, want %q", got, tt.want)
			}
			if declined := PlanDeclined(found, s, Networks{}); (len(declined) == 0) != (tt.want != nil) {
				t.Errorf("declined: %+v", declined)
			}
		})
	}
}
