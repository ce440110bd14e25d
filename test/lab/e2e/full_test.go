package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/llmbox-dev/llmbox/test/lab/node"
)

// operators lists the programs that the whole box needs compiled beside the core.
func operators() []string {
	return []string{"envoy-gateway", "proxy-standin", "prometheus-operator", "prometheus-config-reloader", "prometheus", "alertmanager",
		"node-exporter", "kube-state-metrics-standin", "keda", "keda-adapter", "keda-admission-webhooks", "kyverno", "kyverno-init",
		"external-secrets", "vault-on-core"}
}

// gpuOperator lists what it takes for GPUs that the real GPU Operator offers.
func gpuOperator() []string {
	return []string{"gpu-operator", "nvidia-validator", "nfd-master", "nfd-worker", "nfd-gc", "nvidia-device-plugin", "gpu-feature-discovery",
		"config-manager", "nvidia-container-runtime", "dcgm-exporter-standin", "nvidia-smi-standin", "nvml-standin.so"}
}

// fullBox is the configuration of a whole box: three GPUs, everything on that a dashboard
// has a query for, and times short enough to see scaling in minutes. Each value is one
// that anybody may set.
func fullBox(t *testing.T, hub string) string {
	t.Helper()
	path := boxFile(t, hub)
	raw, err := os.ReadFile(path)
	must(t, err)
	text := strings.Replace(string(raw), "gpu: {product: a100-80, count: 1}", "gpu: {product: a100-80, count: 3}\ngateway: {rateLimit: {requestsPerMinute: 60000}}", 1)
	text = strings.Replace(text, "model: {name: "+modelName+"}",
		"model: {name: "+modelName+`, extraArgs: ['--speculative-config={"method":"ngram","num_speculative_tokens":2}']}`, 1)
	// The lab has no kernel module: nothing could link its device files.
	text = strings.Replace(text, "gpu-operator: {mode: external}", "gpu-operator: {values: {validator: {devCharSymlinks: false}}}", 1)
	text = strings.Replace(text, "  model: {values: {resources:", `  autoscale: {values: {autoscaling: {pollingSeconds: 5, scaleUpWindowSeconds: 0, scaleDownWindowSeconds: 30, loadPerReplica: 2, waitingPerReplica: 2}}}
  model: {values: {env: {VLLM_SIM_TOKEN_SECONDS: "0.05", VLLM_SIM_MAX_RUNNING: "4"}, resources:`, 1)
	must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

type wholeBox struct {
	*lab
	clients

	dynamic dynamic.Interface
	bin     string
	flags   []string
	key     string
	ctx     context.Context // of the test
}

// TestWholeBox installs every component on a real node and makes the platform do its
// work. It needs every operator compiled (`make lab-node-full`) and takes a quarter of
// an hour.
func TestWholeBox(t *testing.T) {
	onlyWhereAsked(t, true)
	bin := binDir(t)
	needs(t, bin, operators(), gpuOperator())
	b := newWholeBox(t, bin, startOrTake(t, bin, "--gpus", "3", "--gpu-by", node.ByOperator))
	t.Log(b.install(t))

	t.Run("NVIDIA's device plugin offers the GPUs", func(t *testing.T) { b.gpus(t, 3) })
	t.Run("Prometheus has every expected target up", b.targets)
	t.Run("Gateway, routes and policies are accepted and programmed", b.gateway)
	t.Run("Kyverno", b.kyverno)
	t.Run("a rotated key arrives", b.keys)
	t.Run("the scaler takes the model server from one to three and back", b.scaling)
	t.Run("every query of the dashboards returns data", b.dashboards)
	t.Run("requests cover what the parts work with", b.footprint)
	t.Run("Vault keeps its data over a restart", b.vault)
	t.Run("any operator's pod may be lost", b.restarts)
	t.Run("a second install changes nothing", func(t *testing.T) {
		before := b.revisions(t)
		t.Log(strings.Split(b.install(t), "\n")[0])
		if after := b.revisions(t); !slices.Equal(before, after) {
			t.Errorf("releases before: %v\nafter: %v", before, after)
		}
	})
	t.Run("uninstall leaves nothing of llmbox's", b.uninstall)
	b.stop(t)
}

// TestWholeBoxByHelmController has the other engine bring everything in: k3s'
// helm-controller with its Jobs, on a node that differs in nothing else.
func TestWholeBoxByHelmController(t *testing.T) {
	onlyWhereAsked(t, true)
	bin := binDir(t)
	needs(t, bin, operators(), gpuOperator(), []string{"helm-controller", "helm4", "helm-job-standin"})
	b := newWholeBox(t, bin, startOrTake(t, bin, "--gpus", "3", "--gpu-by", node.ByOperator, "--helm-controller"))
	t.Log(b.install(t, "--engine", "helmchart"))

	t.Run("every release is a HelmChart", func(t *testing.T) {
		charts, err := b.dynamic.Resource(schema.GroupVersionResource{Group: "helm.cattle.io", Version: "v1", Resource: "helmcharts"}).List(t.Context(), metav1.ListOptions{})
		must(t, err)
		jobs, err := b.core.Pods("kube-system").List(t.Context(), metav1.ListOptions{LabelSelector: chartLabel})
		must(t, err)
		t.Logf("%d HelmCharts, %d pods of Jobs", len(charts.Items), len(jobs.Items))
		if len(charts.Items) < 12 {
			t.Errorf("there are %d HelmCharts", len(charts.Items))
		}
	})
	t.Run("NVIDIA's device plugin offers the GPUs", func(t *testing.T) { b.gpus(t, 3) })
	t.Run("Prometheus has every expected target up", b.targets)
	t.Run("Gateway, routes and policies are accepted and programmed", b.gateway)
	t.Run("Kyverno", b.kyverno)
	t.Run("a rotated key arrives", b.keys)
	t.Run("a second install changes nothing", func(t *testing.T) {
		before := b.revisions(t)
		t.Log(strings.Split(b.install(t), "\n")[0])
		if after := b.revisions(t); !slices.Equal(before, after) {
			t.Errorf("releases before: %v\nafter: %v", before, after)
		}
	})
	t.Run("uninstall leaves nothing of llmbox's", b.uninstall)
	b.stop(t)
}

// needs ends the test where programs have not been compiled.
func needs(t *testing.T, bin string, programs ...[]string) {
	t.Helper()
	for _, name := range slices.Concat(programs...) {
		if _, err := os.Stat(filepath.Join(bin, "lab", name)); err != nil {
			t.Fatalf("%v: run `make lab-node-full` first (with gcc installed)", err)
		}
	}
}

func newWholeBox(t *testing.T, bin string, lab *lab) *wholeBox {
	t.Helper()
	b := &wholeBox{lab: lab, clients: lab.client(t), bin: bin, ctx: t.Context()}
	config, err := clientcmd.BuildConfigFromFlags("", lab.Kubeconfig)
	must(t, err)
	b.dynamic, err = dynamic.NewForConfig(config)
	must(t, err)
	b.flags = []string{"--kubeconfig", lab.Kubeconfig, "--config", fullBox(t, lab.Hub)}
	return b
}

func (b *wholeBox) install(t *testing.T, more ...string) string {
	t.Helper()
	out := b.llmbox(t, installWithin, append([]string{"install", "--yes"}, more...)...)
	secret, err := b.core.Secrets("llm").Get(t.Context(), "gateway-keys", metav1.GetOptions{})
	must(t, err)
	b.key = string(secret.Data["default"])
	return out
}

func (b *wholeBox) uninstall(t *testing.T) {
	t.Log(b.llmbox(t, uninstallWithin, "uninstall", "--yes"))
	left, err := b.core.Namespaces().List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/managed-by=llmbox"})
	must(t, err)
	for _, ns := range left.Items {
		t.Errorf("namespace %s is still there (%s)", ns.Name, ns.Status.Phase)
	}
}

// gpus counts what kubelet was offered.
func (b *wholeBox) gpus(t *testing.T, want int64) {
	nodes, err := b.core.Nodes().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	for _, n := range nodes.Items {
		if q := n.Status.Allocatable["nvidia.com/gpu"]; q.Value() != want || n.Labels["nvidia.com/gpu.count"] != fmt.Sprint(want) {
			t.Errorf("node %s offers %s GPUs and has the label %q", n.Name, q.String(), n.Labels["nvidia.com/gpu.count"])
		}
	}
}

// startOrTake starts a lab, or takes one that is up already, so that a failing part can be
// tried again without the wait: LLMBOX_E2E_LAB names the file with the line that
// `llmbox-lab start --detach` printed.
func startOrTake(t *testing.T, bin string, more ...string) *lab {
	t.Helper()
	path := os.Getenv("LLMBOX_E2E_LAB")
	if path == "" {
		return startLab(t, bin, more...)
	}
	raw, err := os.ReadFile(path)
	must(t, err)
	l := &lab{}
	must(t, json.Unmarshal(raw, &l.Ready))
	return l
}

// llmbox runs the product in the node's network, as a person on the box would.
func (b *wholeBox) llmbox(t *testing.T, within time.Duration, args ...string) string {
	t.Helper()
	return run(t, within, filepath.Join(b.bin, "llmbox-lab"), b.inside(args...)...)
}

// inside are the lab's arguments for running llmbox in the node's network.
func (b *wholeBox) inside(args ...string) []string {
	return slices.Concat([]string{"exec", "--dir", b.Dir, "--", filepath.Join(b.bin, "llmbox")}, args, b.flags)
}

// becomes asks until it is so, or the time is up.
func becomes(t *testing.T, within time.Duration, what string, so func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	for {
		err := so()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not after %s: %v", what, within, err)
		}
		time.Sleep(time.Second)
	}
}

// complete asks the gateway for tokens.
func (b *wholeBox) complete(ctx context.Context, key string, tokens int) (code int, err error) {
	body := fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"Hello"}],"max_tokens":%d}`, modelName, tokens)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", b.GatewayPort), strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

func (b *wholeBox) serves(ctx context.Context) error {
	code, err := b.complete(ctx, b.key, 2)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("the gateway answers %d", code)
	}
	return err
}

func (b *wholeBox) get(t *testing.T, gvr schema.GroupVersionResource, namespace, name string) *unstructured.Unstructured {
	t.Helper()
	o, err := b.dynamic.Resource(gvr).Namespace(namespace).Get(t.Context(), name, metav1.GetOptions{})
	must(t, err)
	return o
}

func gatewayAPI(resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: resource}
}

func envoyGateway(resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "gateway.envoyproxy.io", Version: "v1alpha1", Resource: resource}
}

// conditions collects type=status of all conditions anywhere below status.
func conditions(value any, found map[string][]string) {
	switch v := value.(type) {
	case map[string]any:
		if kind, ok := v["type"].(string); ok {
			if status, ok := v["status"].(string); ok {
				found[kind] = append(found[kind], status+" "+fmt.Sprint(v["reason"], ": ", v["message"]))
			}
		}
		for _, child := range v {
			conditions(child, found)
		}
	case []any:
		for _, child := range v {
			conditions(child, found)
		}
	}
}

func (b *wholeBox) gateway(t *testing.T) {
	for _, tt := range []struct {
		gvr             schema.GroupVersionResource
		namespace, name string
		want            []string
	}{
		{gatewayAPI("gatewayclasses"), "", "llmbox", []string{"Accepted"}},
		{gatewayAPI("gateways"), "envoy-gateway-system", "public", []string{"Accepted", "Programmed", "ResolvedRefs"}},
		{gatewayAPI("httproutes"), "llm", "openai", []string{"Accepted", "ResolvedRefs"}},
	} {
		b.conditionsAre(t, b.get(t, tt.gvr, tt.namespace, tt.name), tt.want)
	}
	policies := 0
	for _, kind := range []string{"securitypolicies", "backendtrafficpolicies", "clienttrafficpolicies"} {
		list, err := b.dynamic.Resource(envoyGateway(kind)).List(t.Context(), metav1.ListOptions{})
		must(t, err)
		for i := range list.Items {
			policies++
			b.conditionsAre(t, &list.Items[i], []string{"Accepted"})
		}
	}
	if policies < 3 {
		t.Errorf("there are %d policies of Envoy Gateway", policies)
	}
}

func (b *wholeBox) conditionsAre(t *testing.T, o *unstructured.Unstructured, want []string) {
	t.Helper()
	found := map[string][]string{}
	conditions(o.Object["status"], found)
	for _, kind := range want {
		if len(found[kind]) == 0 {
			t.Errorf("%s %s has no condition %s; status: %v", o.GetKind(), o.GetName(), kind, o.Object["status"])
		}
		for _, status := range found[kind] {
			if !strings.HasPrefix(status, "True ") {
				t.Errorf("%s %s: %s is %s", o.GetKind(), o.GetName(), kind, status)
			}
		}
	}
}

// scratch is a namespace of somebody's own.
func (b *wholeBox) scratch(t *testing.T, name string) {
	t.Helper()
	_, err := b.core.Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		_ = b.core.Namespaces().Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{})
	})
}

func pod(namespace, name string, change func(*corev1.Pod)) *corev1.Pod {
	// As the model's namespace asks: what is refused there is refused by the policy alone.
	yes, no := true, false
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "c", Image: "docker.io/vllm/vllm-openai:v0.32.0",
			SecurityContext: &corev1.SecurityContext{
				RunAsNonRoot: &yes, AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("16Mi")}},
		}}},
	}
	change(p)
	return p
}

// kyverno shows what the policies do to pods. Nothing of it is kept: the API server is
// asked for a dry run, which goes through every webhook.
func (b *wholeBox) kyverno(t *testing.T) {
	b.scratch(t, "somebody")
	dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	oneGPU := corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
	t.Run("gives a GPU pod its RuntimeClass", func(t *testing.T) {
		got, err := b.core.Pods("somebody").Create(t.Context(), pod("somebody", "gpu", func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Limits = oneGPU }), dry)
		must(t, err)
		if got.Spec.RuntimeClassName == nil || *got.Spec.RuntimeClassName != "nvidia" {
			t.Errorf("runtimeClassName is %v", got.Spec.RuntimeClassName)
		}
	})
	t.Run("leaves other pods alone", func(t *testing.T) {
		got, err := b.core.Pods("somebody").Create(t.Context(), pod("somebody", "plain", func(*corev1.Pod) {}), dry)
		must(t, err)
		if got.Spec.RuntimeClassName != nil {
			t.Errorf("runtimeClassName is %v", *got.Spec.RuntimeClassName)
		}
	})
	yes := true
	for _, tt := range []struct {
		name, namespace string
		change          func(*corev1.Pod)
		says            []string
	}{
		{"a privileged pod", "somebody", func(p *corev1.Pod) { p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: &yes} },
			[]string{"remove securityContext.privileged"}},
		{"a pod in the host's network", "somebody", func(p *corev1.Pod) { p.Spec.HostNetwork = true }, []string{"remove hostPID, hostIPC and hostNetwork"}},
		{"a model pod without priority", "llm", func(*corev1.Pod) {}, []string{"set priorityClassName"}},
		{"a model pod that doesn't say what it needs", "llm", func(p *corev1.Pod) {
			p.Spec.PriorityClassName = "gpu-inference"
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
		}, []string{"set resources.requests.cpu and resources.requests.memory"}},
		{"a model pod from another registry", "llm", func(p *corev1.Pod) {
			p.Spec.PriorityClassName = "gpu-inference"
			p.Spec.Containers[0].Image = "registry.example/vllm:v1"
		}, []string{"add the registry to components.policies.values.registries.allowed"}},
		{"a model pod with the tag latest", "llm", func(p *corev1.Pod) {
			p.Spec.PriorityClassName = "gpu-inference"
			p.Spec.Containers[0].Image = "docker.io/vllm/vllm-openai:latest"
		}, []string{"name a version or a digest"}},
		{"two GPUs without shared memory", "somebody", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("2")}
		}, []string{"emptyDir: {medium: Memory", "/dev/shm"}},
	} {
		t.Run("refuses "+tt.name, func(t *testing.T) {
			_, err := b.core.Pods(tt.namespace).Create(t.Context(), pod(tt.namespace, "bad", tt.change), dry)
			if err == nil {
				t.Fatal("it was let in")
			}
			if status := apierrors.APIStatus(nil); !asStatus(err, &status) {
				t.Fatalf("refused, but not by the API server: %v", err)
			}
			for _, text := range tt.says {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("it says %v\nwant %q in it", err, text)
				}
			}
		})
	}
}

func asStatus(err error, to *apierrors.APIStatus) bool {
	status, ok := err.(apierrors.APIStatus) //nolint:errorlint // the client returns it bare
	*to = status
	return ok
}

// keys: a new client's key goes into Vault, from there by External Secrets into the
// Secret, and the gateway takes it; a revoked one is refused.
func (b *wholeBox) keys(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	for _, tt := range []struct {
		name, key string
		code      int
	}{{"no key", "", 401}, {"a wrong key", "sk-" + strings.Repeat("x", 40), 401}, {"the box's own key", b.key, 200}} {
		code, err := b.complete(ctx, tt.key, 1)
		must(t, err)
		if code != tt.code {
			t.Errorf("%s: %d, want %d", tt.name, code, tt.code)
		}
	}
	// It is written into KV alone; External Secrets carries it to the gateway.
	out := b.llmbox(t, 2*time.Minute, "keys", "create", "rotated")
	t.Log(strings.Split(out, "\n")[0])
	secret, err := b.core.Secrets("llm").Get(ctx, "gateway-keys", metav1.GetOptions{})
	must(t, err)
	fresh := string(secret.Data["rotated"])
	if fresh == "" || !strings.Contains(out, fresh) {
		t.Fatal("the Secret does not hold the key that was shown")
	}
	external := b.get(t, schema.GroupVersionResource{Group: "external-secrets.io", Version: "v1", Resource: "externalsecrets"}, "llm", "gateway-keys")
	b.conditionsAre(t, external, []string{"Ready"})
	if code, err := b.complete(ctx, fresh, 1); err != nil || code != 200 {
		t.Errorf("the new key: %d %v", code, err)
	}
	began := time.Now()
	t.Log(b.llmbox(t, 2*time.Minute, "keys", "revoke", "rotated", "--yes"))
	if code, err := b.complete(ctx, fresh, 1); err != nil || code != 401 {
		t.Errorf("the revoked key: %d %v", code, err)
	}
	t.Logf("revoked and refused after %s", time.Since(began).Round(100*time.Millisecond))
}

// scaling puts a bounded load on the gateway: twelve clients, one request at a time each.
func (b *wholeBox) scaling(t *testing.T) {
	replicas := func() (want, ready int32) {
		d, err := b.apps.Deployments("llm").Get(t.Context(), "model-server", metav1.GetOptions{})
		must(t, err)
		return *d.Spec.Replicas, d.Status.ReadyReplicas
	}
	if want, _ := replicas(); want != 1 {
		t.Fatalf("there are %d replicas before any load", want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var clients sync.WaitGroup
	var served, refused atomic.Int64
	for range 12 {
		clients.Go(func() {
			for ctx.Err() == nil {
				if code, err := b.complete(ctx, b.key, 60); err == nil && code == http.StatusOK {
					served.Add(1)
				} else if ctx.Err() == nil {
					refused.Add(1)
					time.Sleep(time.Second)
				}
			}
		})
	}
	began := time.Now()
	becomes(t, 6*time.Minute, "three replicas", func() error {
		if want, ready := replicas(); want != 3 || ready != 3 {
			return fmt.Errorf("%d wanted, %d ready", want, ready)
		}
		return nil
	})
	t.Logf("three replicas ready after %s; %d requests served, %d not", time.Since(began).Round(time.Second), served.Load(), refused.Load())
	cancel()
	clients.Wait()
	began = time.Now()
	becomes(t, 6*time.Minute, "one replica again", func() error {
		if want, ready := replicas(); want != 1 || ready != 1 {
			return fmt.Errorf("%d wanted, %d ready", want, ready)
		}
		return nil
	})
	t.Logf("one replica again %s after the load ended", time.Since(began).Round(time.Second))
	if refused.Load() > 0 {
		t.Errorf("%d requests were not served while the box grew", refused.Load())
	}
	must(t, b.serves(t.Context()))
}

// vault loses its pod; the unsealer opens the new one.
func (b *wholeBox) vault(t *testing.T) {
	before := b.llmbox(t, time.Minute, "keys", "list", "--output", "json")
	were := b.losePods(t, "vault")
	becomes(t, 4*time.Minute, "the pods of vault", func() error { return b.allReady(t.Context(), "vault", were) })
	// A sealed Vault is ready too, or the unsealer could not reach it by its Service.
	after := ""
	becomes(t, 2*time.Minute, "an open Vault", func() error {
		out, err := attempt(t.Context(), time.Minute, filepath.Join(b.bin, "llmbox-lab"), b.inside("keys", "list", "--output", "json")...)
		if err != nil {
			return fmt.Errorf("llmbox keys list: %w: %s", err, out)
		}
		after = string(out)
		return nil
	})
	if list(before) != after || !strings.Contains(after, `"vault"`) {
		t.Errorf("before: %s\nafter: %s", before, after)
	}
}

// list takes the first line, which tells the time it took, off.
func list(out string) string {
	_, rest, _ := strings.Cut(out, "\n")
	return rest
}

// losePods takes all pods of a namespace away at once and says how many there were.
func (b *wholeBox) losePods(t *testing.T, namespace string) int {
	t.Helper()
	pods, err := b.core.Pods(namespace).List(t.Context(), metav1.ListOptions{FieldSelector: "status.phase=Running"})
	must(t, err)
	if len(pods.Items) == 0 {
		t.Fatalf("namespace %s has no pod", namespace)
	}
	now := int64(0)
	for _, p := range pods.Items {
		if err := b.core.Pods(namespace).Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); !apierrors.IsNotFound(err) {
			must(t, err)
		}
	}
	return len(pods.Items)
}

// allReady says what of a namespace is not ready, or that there are fewer pods than there were.
func (b *wholeBox) allReady(ctx context.Context, namespace string, were int) error {
	pods, err := b.core.Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	running := 0
	for _, p := range pods.Items {
		if p.Status.Phase == corev1.PodSucceeded {
			continue
		}
		running++
		ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
		if !ready || p.DeletionTimestamp != nil {
			return fmt.Errorf("pod %s/%s is not ready (%s)", p.Namespace, p.Name, p.Status.Phase)
		}
	}
	if running < were {
		return fmt.Errorf("namespace %s has %d of %d pods", namespace, running, were)
	}
	return nil
}

// restarts takes the pods of one component after the other away at once.
func (b *wholeBox) restarts(t *testing.T) {
	for _, namespace := range []string{"kyverno", "keda", "monitoring", "external-secrets", "envoy-gateway-system", "vault", "gpu-operator", "llm", "kube-system"} {
		t.Run(namespace, func(t *testing.T) {
			began := time.Now()
			were := b.losePods(t, namespace)
			becomes(t, 4*time.Minute, "the pods of "+namespace, func() error { return b.allReady(t.Context(), namespace, were) })
			becomes(t, 2*time.Minute, "a token", func() error { return b.serves(t.Context()) })
			t.Logf("back after %s", time.Since(began).Round(time.Second))
		})
	}
	t.Run("llmbox finds nothing to do", func(t *testing.T) {
		type component struct {
			Name, Reason string
			Ready        bool
		}
		var status struct{ Components []component }
		// Prometheus asks the last pod that was lost every 15 seconds.
		becomes(t, time.Minute, "every component", func() error {
			out, err := attempt(t.Context(), time.Minute, filepath.Join(b.bin, "llmbox-lab"), b.inside("status", "--output", "json")...)
			status.Components = nil
			// Errors come after the document.
			if bad := json.NewDecoder(bytes.NewReader(out)).Decode(&status); bad != nil {
				return fmt.Errorf("reading llmbox' status: %w: %s", bad, out)
			}
			for _, c := range status.Components {
				if !c.Ready {
					return fmt.Errorf("%s is not ready: %s", c.Name, c.Reason)
				}
			}
			return err
		})
		if len(status.Components) < 10 {
			t.Errorf("status lists %d components", len(status.Components))
		}
	})
}

// revisions are the Helm releases with their revisions.
func (b *wholeBox) revisions(t *testing.T) []string {
	t.Helper()
	secrets, err := b.core.Secrets("").List(t.Context(), metav1.ListOptions{LabelSelector: "owner=helm"})
	must(t, err)
	var names []string
	for _, s := range secrets.Items {
		names = append(names, s.Namespace+"/"+s.Name)
	}
	slices.Sort(names)
	return names
}
