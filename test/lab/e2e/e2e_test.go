// Package e2e installs a box on a real node, lets it serve, takes it away again, and
// looks whether the lab leaves anything on the machine.
//
// It needs root and what a node needs (containerd, runc, CNI plugins, iptables), so it
// only runs where it is asked for.
package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	appsv1client "k8s.io/client-go/kubernetes/typed/apps/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/test/lab/node"
)

const (
	modelName = "Qwen/Qwen3-0.6B"
	// Bounds for a busy machine; without company it takes a quarter of it.
	startWithin, installWithin, uninstallWithin = 5 * time.Minute, 10 * time.Minute, 5 * time.Minute
)

// without names what a box has not that only has to serve: inside the pod, or through
// the gateway.
func without(gateway bool) string {
	off := "policies,kyverno,keda,autoscale,prometheus,vault,external-secrets"
	if !gateway {
		off += ",envoy-gateway,route"
	}
	return off
}

// boxFile writes the configuration of a small box on this lab.
func boxFile(t *testing.T, hub string) string {
	t.Helper()
	table, err := component.LoadTable(assets.FS())
	must(t, err)
	gateway, ok := table.Get("envoy-gateway")
	if !ok {
		t.Fatal("the component table has no envoy-gateway")
	}
	path := filepath.Join(t.TempDir(), "box.yaml")
	// Images that the table pins by digest can't be made here: the tag alone is asked for.
	must(t, os.WriteFile(path, fmt.Appendf(nil, `apiVersion: llmbox.dev/v1alpha1
kind: Box
model: {name: %s}
gpu: {product: a100-80, count: 1}
components:
  gpu-operator: {mode: external}
  envoy-gateway: {values: {images: {envoy: %q}}}
  weights: {values: {weights: {endpoint: %q, sizeGiB: 1}}}
  model: {values: {resources: {cpuRequestMillis: 100, memoryRequestMiB: 128, memoryLimitMiB: 2560}, drain: {preStopSeconds: 1, shutdownTimeoutSeconds: 5}}}
`, modelName, gateway.Images["envoy"].Reference, hub), 0o600))
	return path
}

// onlyWhereAsked skips what needs root and a node's programs: LLMBOX_E2E=1 asks for what
// `make e2e` runs, LLMBOX_E2E=full for that and for the whole box.
func onlyWhereAsked(t *testing.T, whole bool) {
	t.Helper()
	switch asked := os.Getenv("LLMBOX_E2E"); {
	case asked == "full", asked == "1" && !whole:
	case whole:
		t.Skip("installs everything on a real node: run `make e2e-full`, or set LLMBOX_E2E=full as root")
	default:
		t.Skip("starts a real node: run `make e2e`, or set LLMBOX_E2E=1 as root")
	}
	if err := node.Check(); err != nil {
		t.Skipf("asked to, but: %v", err)
	}
}

func TestModelServesOnARealNode(t *testing.T) {
	onlyWhereAsked(t, false)
	bin := binDir(t)
	before := machine(t)
	lab := startLab(t, bin)
	namespaces := namespacesOf(t, lab.PIDs["node"])
	if len(before.inNamespaces(t, namespaces)) == 0 {
		t.Error("no process is in the lab's namespaces: the search for leftovers below would find nothing")
	}
	client := lab.client(t)

	box := boxFile(t, lab.Hub)
	flags := []string{"--kubeconfig", lab.Kubeconfig, "--config", box, "--without", without(false), "--yes"}
	t.Log(run(t, installWithin, filepath.Join(bin, "llmbox"), append([]string{"install"}, flags...)...))

	t.Run("the pod itself answers with a token", func(t *testing.T) { askForToken(t, client) })
	t.Run("its probe ran inside the container", func(t *testing.T) { startupProbePassed(t, client) })
	t.Run("SIGTERM drains", func(t *testing.T) { drains(t, client) })
	t.Run("a second install changes nothing", func(t *testing.T) {
		old := generation(t, client)
		run(t, installWithin, filepath.Join(bin, "llmbox"), append([]string{"install"}, flags...)...)
		if now := generation(t, client); now != old {
			t.Errorf("the Deployment's generation went from %d to %d", old, now)
		}
	})
	t.Run("uninstall leaves nothing of llmbox's", func(t *testing.T) {
		t.Log(run(t, uninstallWithin, filepath.Join(bin, "llmbox"), append([]string{"uninstall"}, flags...)...))
		left, err := client.core.Namespaces().List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/managed-by=llmbox"})
		must(t, err)
		for _, ns := range left.Items {
			t.Errorf("namespace %s is still there (%s)", ns.Name, ns.Status.Phase)
		}
		volumes, err := client.core.PersistentVolumes().List(t.Context(), metav1.ListOptions{})
		must(t, err)
		for _, pv := range volumes.Items {
			t.Logf("volume %s is %s", pv.Name, pv.Status.Phase)
		}
	})
	lab.stop(t)
	t.Run("the lab leaves nothing on the machine", func(t *testing.T) {
		for _, p := range before.inNamespaces(t, namespaces) {
			t.Errorf("process %s is still in the lab's namespaces", p)
		}
		after := machine(t)
		for _, d := range before.diff(after) {
			t.Error(d)
		}
		if _, err := os.Stat(lab.Dir); !os.IsNotExist(err) {
			t.Errorf("the lab's directory is still there: %v", err)
		}
	})
}

// The road through the gateway: the real Envoy Gateway, and a stand-in for Envoy that
// takes its configuration from it.
func TestGatewayOnARealNode(t *testing.T) {
	onlyWhereAsked(t, false)
	bin := binDir(t)
	for _, name := range []string{"lab/envoy-gateway", "lab/proxy-standin"} {
		if _, err := os.Stat(filepath.Join(bin, name)); err != nil {
			t.Skipf("%v: run `make lab-node-gateway` first", err)
		}
	}
	lab := startLab(t, bin)
	client := lab.client(t)
	// From inside the node's network: the gateway's address means nothing outside.
	exec := []string{"exec", "--dir", lab.Dir, "--", filepath.Join(bin, "llmbox")}
	flags := []string{"--kubeconfig", lab.Kubeconfig, "--config", boxFile(t, lab.Hub), "--without", without(true), "--yes"}
	t.Log(run(t, installWithin, filepath.Join(bin, "llmbox-lab"), slices.Concat(exec, []string{"install"}, flags)...))

	secret, err := client.core.Secrets("llm").Get(t.Context(), "gateway-keys", metav1.GetOptions{})
	must(t, err)
	var key string
	for _, value := range secret.Data {
		key = string(value)
	}
	url := fmt.Sprintf("http://127.0.0.1:%d", lab.GatewayPort)
	chat := `{"model":"` + modelName + `","messages":[{"role":"user","content":"Hello"}],"max_tokens":3}`
	for _, tt := range []struct {
		name, path, header, value, body string
		code                            int
		has                             string
	}{
		{"with the key", "/v1/chat/completions", "Authorization", "Bearer " + key, chat, 200, `"completion_tokens":3`},
		{"with the key in the other header", "/v1/chat/completions", "x-api-key", key, chat, 200, `"completion_tokens":3`},
		{"streamed", "/v1/chat/completions", "Authorization", "Bearer " + key, strings.TrimSuffix(chat, "}") + `,"stream":true}`, 200, "data: [DONE]"},
		{"without a key", "/v1/chat/completions", "", "", chat, 401, ""},
		{"with a wrong key", "/v1/chat/completions", "Authorization", "Bearer " + key + "x", chat, 401, ""},
		{"what is not routed", "/metrics", "Authorization", "Bearer " + key, "", 404, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			method := http.MethodPost
			if tt.body == "" {
				method = http.MethodGet
			}
			req, err := http.NewRequestWithContext(t.Context(), method, url+tt.path, strings.NewReader(tt.body))
			must(t, err)
			if tt.header != "" {
				req.Header.Set(tt.header, tt.value)
			}
			resp, err := http.DefaultClient.Do(req)
			must(t, err)
			defer func() { _ = resp.Body.Close() }()
			raw, err := io.ReadAll(resp.Body)
			must(t, err)
			if resp.StatusCode != tt.code || !strings.Contains(string(raw), tt.has) {
				t.Errorf("got %d %s, want %d with %q", resp.StatusCode, raw, tt.code, tt.has)
			}
		})
	}
	t.Log(run(t, uninstallWithin, filepath.Join(bin, "llmbox-lab"), slices.Concat(exec, []string{"uninstall"}, flags)...))
	lab.stop(t)
}

// A supervisor that is killed can clear nothing away; the kernel does, and sweep does
// the rest.
func TestKilledSupervisor(t *testing.T) {
	onlyWhereAsked(t, false)
	bin := binDir(t)
	before := machine(t)
	lab := startLab(t, bin)
	namespaces := namespacesOf(t, lab.PIDs["node"])
	if n := len(before.inNamespaces(t, namespaces)); n < 10 {
		t.Errorf("only %d processes are in the lab's namespaces", n)
	}
	must(t, lab.cmd.Process.Kill())
	_ = lab.cmd.Wait()
	lab.cmd = nil
	deadline := time.Now().Add(10 * time.Second)
	for left := before.inNamespaces(t, namespaces); len(left) > 0; left = before.inNamespaces(t, namespaces) {
		if time.Now().After(deadline) {
			t.Fatalf("still there: %v", left)
		}
		time.Sleep(50 * time.Millisecond)
	}
	left := before.diff(machine(t))
	if !slices.ContainsFunc(left, func(s string) bool { return strings.Contains(s, "cgroup") }) {
		t.Error("no cgroup was left: what sweep removes below is not shown")
	}
	for _, l := range left {
		if !strings.Contains(l, "cgroup") {
			t.Error(l)
		}
	}
	run(t, time.Minute, filepath.Join(bin, "llmbox-lab"), "sweep", "--root", filepath.Dir(lab.Dir))
	for _, d := range before.diff(machine(t)) {
		t.Error(d)
	}
	if _, err := os.Stat(lab.Dir); !os.IsNotExist(err) {
		t.Errorf("the lab's directory is still there: %v", err)
	}
}

type lab struct {
	node.Ready

	cmd      *exec.Cmd
	lifeline io.Closer
	stderr   *bytes.Buffer
}

type clients struct {
	core *corev1client.CoreV1Client
	apps *appsv1client.AppsV1Client
}

func binDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("LLMBOX_BIN")
	if dir == "" {
		dir = filepath.Join("..", "..", "..", "bin")
	}
	dir, err := filepath.Abs(dir)
	must(t, err)
	for _, name := range []string{"llmbox", "llmbox-lab", "lab/kubelet", "lab/coredns", "lab/vllm-sim"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Fatalf("%v: run `make lab-node` first, or name the folder in LLMBOX_BIN", err)
		}
	}
	return dir
}

// startLab starts a node that ends with this test, however it ends.
func startLab(t *testing.T, bin string, more ...string) *lab {
	t.Helper()
	l := &lab{stderr: &bytes.Buffer{}}
	l.cmd = exec.Command(filepath.Join(bin, "llmbox-lab"), append([]string{"start", "--size", "node", "--lifeline",
		"--dir", filepath.Join(t.TempDir(), "lab"), "--model", modelName, "--timeout", startWithin.String()}, more...)...)
	l.cmd.Stderr = l.stderr
	in, err := l.cmd.StdinPipe()
	must(t, err)
	l.lifeline = in
	out, err := l.cmd.StdoutPipe()
	must(t, err)
	must(t, l.cmd.Start())
	t.Cleanup(func() { l.stop(t) })
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		t.Fatalf("the lab did not start: %s", l.stderr)
	}
	must(t, json.Unmarshal(line, &l.Ready))
	t.Logf("node up after %d ms; stand-ins: %s", l.StartMS, strings.Join(l.StandIns, ", "))
	return l
}

func (l *lab) stop(t *testing.T) {
	t.Helper()
	if l.cmd == nil {
		return
	}
	_ = l.lifeline.Close()
	err := l.cmd.Wait()
	l.cmd = nil
	if err != nil {
		t.Errorf("the lab ended badly: %v\n%s", err, l.stderr)
	}
}

func (l *lab) client(t *testing.T) clients {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", l.Kubeconfig)
	must(t, err)
	core, err := corev1client.NewForConfig(config)
	must(t, err)
	apps, err := appsv1client.NewForConfig(config)
	must(t, err)
	return clients{core: core, apps: apps}
}

func run(t *testing.T, within time.Duration, name string, args ...string) string {
	t.Helper()
	began := time.Now()
	out, err := attempt(t.Context(), within, name, args...)
	if err != nil {
		t.Fatalf("%s %s after %s: %v\n%s", filepath.Base(name), args[0], time.Since(began).Round(time.Second), err, out)
	}
	return fmt.Sprintf("%s %s took %s\n%s", filepath.Base(name), args[0], time.Since(began).Round(100*time.Millisecond), out)
}

// attempt is run for what may fail.
func attempt(ctx context.Context, within time.Duration, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...) // #nosec G204 -- the lab's own
	cmd.WaitDelay = 10 * time.Second
	// LLMBOX_… variables are its configuration: those of this test are none.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "LLMBOX_") })
	return cmd.CombinedOutput()
}

func askForToken(t *testing.T, client clients) {
	raw, err := client.core.RESTClient().Post().Namespace("llm").Resource("services").Name("model-server:8000").
		SubResource("proxy").Suffix("v1/chat/completions").
		Body([]byte(`{"model":"`+modelName+`","messages":[{"role":"user","content":"Hello"}],"max_tokens":3}`)).
		SetHeader("Content-Type", "application/json").DoRaw(t.Context())
	must(t, err)
	var answer struct {
		Choices []struct{ Message struct{ Content string } }
		Usage   struct {
			CompletionTokens int `json:"completion_tokens"`
		}
	}
	must(t, json.Unmarshal(raw, &answer))
	if len(answer.Choices) != 1 || answer.Choices[0].Message.Content == "" || answer.Usage.CompletionTokens != 3 {
		t.Errorf("the answer is %s", raw)
	}
}

func modelPod(t *testing.T, client clients) corev1.Pod {
	t.Helper()
	pods, err := client.core.Pods("llm").List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=model-server"})
	must(t, err)
	pods.Items = slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
	if len(pods.Items) != 1 {
		t.Fatalf("there are %d model pods", len(pods.Items))
	}
	return pods.Items[0]
}

func startupProbePassed(t *testing.T, client clients) {
	pod := modelPod(t, client)
	c := pod.Spec.Containers[0]
	if c.StartupProbe == nil || c.StartupProbe.Exec == nil || !slices.Contains(c.StartupProbe.Exec.Command, "token-probe") {
		t.Fatalf("the startup probe asks for no token: %+v", c.StartupProbe)
	}
	s := pod.Status.ContainerStatuses[0]
	if s.Started == nil || !*s.Started || !s.Ready || s.RestartCount != 0 {
		t.Errorf("container: started %v, ready %v, %d restarts", s.Started, s.Ready, s.RestartCount)
	}
	if got := pod.Spec.Containers[0].Resources.Limits["nvidia.com/gpu"]; got.Value() != 1 {
		t.Errorf("the container has %s GPUs", got.String())
	}
}

// drains deletes the pod and looks at how vLLM's stand-in was told to end.
func drains(t *testing.T, client clients) {
	old := modelPod(t, client)
	logs, err := client.core.Pods("llm").GetLogs(old.Name, &corev1.PodLogOptions{Follow: true, Container: "vllm"}).Stream(t.Context())
	must(t, err)
	defer func() { _ = logs.Close() }()
	must(t, client.core.Pods("llm").Delete(t.Context(), old.Name, metav1.DeleteOptions{}))
	raw, err := io.ReadAll(logs)
	must(t, err)
	if !bytes.Contains(raw, []byte("all requests ended")) {
		t.Errorf("the container was not told to end in time; it wrote:\n%s", raw)
	}
	deadline := time.Now().Add(2 * time.Minute)
	for {
		d, err := client.apps.Deployments("llm").Get(t.Context(), "model-server", metav1.GetOptions{})
		must(t, err)
		if d.Status.ReadyReplicas == 1 && modelPod(t, client).Name != old.Name {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no new pod became ready: %+v", d.Status)
		}
		time.Sleep(time.Second)
	}
}

func generation(t *testing.T, client clients) int64 {
	t.Helper()
	d, err := client.apps.Deployments("llm").Get(t.Context(), "model-server", metav1.GetOptions{})
	must(t, err)
	return d.Generation
}

// state is what of the machine a lab could change.
type state map[string]bool

func machine(t *testing.T) state {
	t.Helper()
	s := state{}
	interfaces, err := net.Interfaces()
	must(t, err)
	for _, i := range interfaces {
		s["interface "+i.Name] = true
	}
	// Mounts and named network namespaces of others come and go with them: only those
	// that a node would make count.
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			for _, mark := range []string{"kubelet", "containerd", "/lab/", "netns", "cni-"} {
				if strings.Contains(fields[4], mark) {
					s["mount "+fields[4]] = true
				}
			}
		}
	}
	for _, dir := range []string{
		"/var/lib/kubelet", "/var/lib/containerd", "/run/containerd", "/run/netns", "/var/run/netns", "/var/lib/cni", "/etc/cni",
		"/var/log/pods", "/var/log/containers", "/etc/containerd/certs.d", "/var/lib/rancher", "/etc/rancher", "/lab", "/opt/lab",
	} {
		if _, err := os.Stat(dir); err == nil {
			s["directory "+dir] = true
		}
	}
	groups, err := filepath.Glob("/sys/fs/cgroup/*/llmbox-lab-*")
	must(t, err)
	for _, g := range append(groups, glob(t, "/sys/fs/cgroup/llmbox-lab-*")...) {
		s["cgroup "+g] = true
	}
	for _, table := range []string{"filter", "nat", "mangle"} {
		out, err := exec.CommandContext(t.Context(), "iptables", "-w", "-t", table, "-S").CombinedOutput()
		if err != nil {
			continue // this kernel has no such table
		}
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, "KUBE-") || strings.Contains(line, "CNI-") {
				s["iptables "+table+" "+strings.TrimSpace(line)] = true
			}
		}
	}
	return s
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	must(t, err)
	return found
}

// diff names what is there now and was not before, and the other way round.
func (s state) diff(after state) []string {
	var out []string
	for what := range after {
		if !s[what] {
			out = append(out, "left behind: "+what)
		}
	}
	for what := range s {
		if !after[what] && !strings.HasPrefix(what, "cgroup ") && !strings.HasPrefix(what, "interface ") {
			out = append(out, "taken away: "+what)
		}
	}
	slices.Sort(out)
	return out
}

// namespacesOf are the kernel's numbers of a process' own namespaces.
func namespacesOf(t *testing.T, pid int) []string {
	t.Helper()
	var all []string
	for _, kind := range []string{"pid_for_children", "net", "mnt", "uts", "ipc"} {
		ours, err := os.Readlink("/proc/self/ns/" + kind)
		must(t, err)
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
		must(t, err)
		if ours == theirs {
			t.Errorf("the lab shares the machine's namespace %s", ours)
			continue
		}
		all = append(all, theirs)
	}
	return all
}

// inNamespaces lists the processes that live in one of the namespaces.
func (s state) inNamespaces(t *testing.T, namespaces []string) []string {
	t.Helper()
	var found []string
	for _, dir := range glob(t, "/proc/[0-9]*") {
		for _, kind := range []string{"pid", "net", "mnt"} {
			if ns, err := os.Readlink(dir + "/ns/" + kind); err == nil && slices.Contains(namespaces, ns) {
				name, _ := os.ReadFile(dir + "/comm")
				found = append(found, filepath.Base(dir)+" "+strings.TrimSpace(string(name)))
				break
			}
		}
	}
	return found
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
