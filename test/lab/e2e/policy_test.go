package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	networkingclient "k8s.io/client-go/kubernetes/typed/networking/v1"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	// probeImage is in every lab: the node's own volumes are made by it.
	probeImage = "docker.io/rancher/mirrored-library-busybox:1.35.0"
	// A port that nothing of a box opens.
	closedPort = 12345
	// The policy controller takes a second for a round; a busy machine longer.
	policyWithin = 40 * time.Second
	// How often in a row an answer has to be the same: a round of the controller may
	// still be under way.
	settled = 2
)

// Who reaches whom once the policies of the box are enforced, by the controller that k3s
// brings along. What is refused has to be refused by a policy: the very same request
// succeeds as soon as another policy, or the label that it asks for, lets it.
func TestNetworkPoliciesOnARealNode(t *testing.T) {
	onlyWhereAsked(t, false)
	bin := binDir(t)
	for _, name := range []string{"lab/envoy-gateway", "lab/proxy-standin"} {
		if _, err := os.Stat(filepath.Join(bin, name)); err != nil {
			t.Skipf("%v: run `make lab-node-gateway` first", err)
		}
	}
	lab := startLab(t, bin)
	p := newPolicies(t, bin, lab)
	exec := []string{"exec", "--dir", lab.Dir, "--", filepath.Join(bin, "llmbox")}
	flags := []string{"--kubeconfig", lab.Kubeconfig, "--config", boxFile(t, lab.Hub), "--without", without(true), "--yes"}
	// The download Job reaches the hub, the model server's probes and the gateway's token
	// get through: the installation itself says so.
	t.Log(run(t, installWithin, filepath.Join(bin, "llmbox-lab"), slices.Concat(exec, []string{"install"}, flags)...))

	p.startPods(
		probe{"default", "stranger", nil},
		probe{"default", "labelled", map[string]string{accessModel: "true"}},
		probe{"llm", "neighbour", nil},
		probe{"llmbox-system", "gate", map[string]string{accessModel: "true"}},
		probe{"llmbox-system", "other", nil},
		probe{"envoy-gateway-system", "other", nil},
		probe{"gpu-operator", "one", nil}, probe{"gpu-operator", "two", nil},
		probe{"monitoring", "one", nil}, probe{"monitoring", "prometheus", map[string]string{"app.kubernetes.io/name": "prometheus"}},
		probe{"keda", "one", nil}, probe{"keda", "two", nil},
		probe{"vault", "one", nil}, probe{"vault", "two", nil},
		probe{"external-secrets", "one", nil}, probe{"external-secrets", "two", nil},
		probe{"kyverno", "one", nil}, probe{"kyverno", "two", nil},
	)
	t.Run("the model server", func(t *testing.T) { p.with(t).modelServer() })
	t.Run("the gateway", func(t *testing.T) { p.with(t).gateway() })
	t.Run("the model server's way out", func(t *testing.T) { p.with(t).wayOut() })
	t.Run("namespaces", func(t *testing.T) { p.with(t).namespaces() })
	lab.stop(t)
}

const (
	accessModel = "llmbox.dev/access-model"
	modelServer = "llm/model-server"
)

// modelServer asks for the model server by its Service and by its pod.
func (p policies) modelServer() {
	pod := modelPod(p.t, p.clients)
	service, err := p.core.Services("llm").Get(p.t.Context(), "model-server", metav1.GetOptions{})
	must(p.t, err)
	targets := map[string]string{"by Service": service.Spec.ClusterIP, "by pod": pod.Status.PodIP}
	all := func(want outcome, from ...string) {
		p.t.Helper()
		var checks []check
		for _, who := range from {
			for how, host := range targets {
				checks = append(checks, check{want, who + " " + how, p.health(who, host)})
			}
		}
		p.expect(checks...)
	}
	p.expect(check{reached, "a name from a pod beside the model server", p.in("llm/neighbour", "nslookup", "model-server.llm.svc.cluster.local")})
	all(refused, "default/stranger", "default/labelled", "llm/neighbour", "llmbox-system/other", "envoy-gateway-system/other")
	all(reached, "monitoring/one", "llmbox-system/gate")

	// Each refused one gets through by nothing but what it lacked.
	p.label("llm", "neighbour", accessModel, "true")
	p.label("llmbox-system", "other", accessModel, "true")
	p.label("llmbox-system", "gate", accessModel, "false")
	p.label("envoy-gateway-system", "other", "app.kubernetes.io/component", "proxy")
	all(reached, "llm/neighbour", "llmbox-system/other", "envoy-gateway-system/other")
	all(refused, "llmbox-system/gate")
	p.without("model-server-clients", func() { all(refused, "llm/neighbour") }) // its own namespace keeps it in
	p.label("llm", "neighbour", accessModel, "")
	p.label("llmbox-system", "other", accessModel, "")
	p.label("llmbox-system", "gate", accessModel, "true")
	p.label("envoy-gateway-system", "other", "app.kubernetes.io/component", "")
	all(refused, "llm/neighbour", "llmbox-system/other", "envoy-gateway-system/other")

	// No label helps in a namespace that the policy does not name.
	p.create(networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: "control"},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app.kubernetes.io/name": "model-server"}},
			Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{
				NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: "default"}},
			}}}},
		},
	})
	all(reached, "default/stranger", "default/labelled")
	p.remove("llm", "control")
	all(refused, "default/stranger", "default/labelled")
}

// gateway asks as a client of the box does.
func (p policies) gateway() {
	secret, err := p.core.Secrets("llm").Get(p.t.Context(), "gateway-keys", metav1.GetOptions{})
	must(p.t, err)
	var key string
	for _, value := range secret.Data {
		key = string(value)
	}
	ask := func() (outcome, string) {
		ctx, cancel := context.WithTimeout(p.t.Context(), 5*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", p.lab.GatewayPort),
			strings.NewReader(`{"model":"`+modelName+`","messages":[{"role":"user","content":"Hello"}],"max_tokens":3}`))
		must(p.t, err)
		req.Header.Set("Authorization", "Bearer "+key)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return broken, err.Error()
		}
		defer func() { _ = resp.Body.Close() }()
		raw, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			return broken, resp.Status + " " + string(raw)
		}
		return reached, string(raw)
	}
	p.expect(check{reached, "a chat through the gateway", ask})

	// The proxy keeps its connections, and what is open stays open: a new one is looked at.
	proxies, err := p.core.Pods("envoy-gateway-system").List(p.t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=proxy"})
	must(p.t, err)
	if len(proxies.Items) != 1 {
		p.t.Fatalf("there are %d proxies", len(proxies.Items))
	}
	const proxy = "envoy-gateway-system/proxy"
	p.pods[proxy] = proxies.Items[0]
	p.findContainers()
	fromProxy := p.health(proxy, p.pods[modelServer].Status.PodIP)
	p.expect(check{reached, "the proxy", fromProxy})
	p.without("model-server", func() { p.expect(check{refused, "the proxy without the chart's policy", fromProxy}) })
	p.expect(check{reached, "the proxy with it again", fromProxy}, check{reached, "a chat through the gateway at last", ask})
	delete(p.pods, proxy)
}

// wayOut looks at what the pod that holds prompts can reach itself.
func (p policies) wayOut() {
	const server = modelServer
	hub := strings.TrimPrefix(p.lab.Hub, "http://")
	hubHost, hubPort, _ := strings.Cut(hub, ":")
	dns, err := p.core.Services("kube-system").Get(p.t.Context(), "kube-dns", metav1.GetOptions{})
	must(p.t, err)
	out := func(want outcome, when string) (checks []check) {
		for _, to := range []struct {
			what, host string
			port       int
		}{
			{"the API server by its Service", "10.43.0.1", 443},
			{"the API server by the node", hubHost, p.lab.APIPort},
			{"the hub", hubHost, number(p.t, hubPort)},
			{"kubelet", hubHost, 10250},
			{"a pod of another namespace", p.pods["default/stranger"].Status.PodIP, closedPort},
			{"a pod of its own namespace", p.pods["llm/neighbour"].Status.PodIP, closedPort},
			{"CoreDNS beside DNS", dns.Spec.ClusterIP, 9153},
		} {
			checks = append(checks, check{want, "from the model server to " + to.what + when, p.connect(server, to.host, to.port)})
		}
		return checks
	}
	name := p.in(server, "nslookup", "kubernetes.default.svc.cluster.local", dns.Spec.ClusterIP)
	p.expect(append(out(refused, ""), check{reached, "a name", name})...)
	p.create(networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: "control"},
		Spec: networkingv1.NetworkPolicySpec{
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
			Ingress:     []networkingv1.NetworkPolicyIngressRule{{}},
			Egress:      []networkingv1.NetworkPolicyEgressRule{{}},
		},
	})
	p.expect(out(reached, " with all allowed")...)
	p.remove("llm", "control")
	p.expect(out(refused, " again")...)
	// And DNS is a rule, not a gap.
	dnsByTCP := p.connect(server, dns.Spec.ClusterIP, 53)
	p.without("allow-dns", func() { p.expect(check{refused, "DNS without allow-dns", dnsByTCP}) })
	p.expect(check{reached, "DNS with it again", dnsByTCP}, check{reached, "a name again", name})
}

// namespaces holds the base policies against what they say: closed, but for the ports
// that others of the box need.
func (p policies) namespaces() {
	var checks, opened, closed []check
	for _, c := range []struct {
		from, to string
		port     int
		want     outcome
	}{
		{"default/stranger", "llmbox-system/other", closedPort, refused},
		{"llmbox-system/gate", "llmbox-system/other", closedPort, refused},
		{"default/stranger", "llm/neighbour", closedPort, refused},
		{"monitoring/one", "llm/neighbour", closedPort, refused},

		{"default/stranger", "gpu-operator/one", closedPort, refused},
		{"default/stranger", "gpu-operator/one", 9400, refused},
		{"gpu-operator/two", "gpu-operator/one", closedPort, reached},
		{"monitoring/one", "gpu-operator/one", 8080, reached},
		{"monitoring/one", "gpu-operator/one", 9400, reached},
		{"monitoring/one", "gpu-operator/one", closedPort, refused},

		{"default/stranger", "monitoring/one", closedPort, refused},
		{"default/stranger", "monitoring/prometheus", 9090, refused},
		{"monitoring/prometheus", "monitoring/one", closedPort, reached},
		{"keda/one", "monitoring/prometheus", 9090, reached},
		{"keda/one", "monitoring/prometheus", closedPort, refused},
		{"keda/one", "monitoring/one", 9090, refused},

		{"default/stranger", "keda/one", closedPort, refused},
		{"default/stranger", "keda/one", 8080, refused},
		{"default/stranger", "keda/one", 6443, reached}, // as an API server that is elsewhere
		{"default/stranger", "keda/one", 9443, reached},
		{"keda/two", "keda/one", closedPort, reached},
		{"monitoring/one", "keda/one", 8080, reached},
		{"monitoring/one", "keda/one", closedPort, refused},

		{"default/stranger", "vault/one", closedPort, refused},
		{"default/stranger", "vault/one", 8200, refused},
		{"llm/neighbour", "vault/one", 8200, refused},
		{"vault/two", "vault/one", closedPort, reached},
		{"external-secrets/one", "vault/one", 8200, reached},
		{"external-secrets/one", "vault/one", closedPort, refused},
		{"monitoring/one", "vault/one", 8200, reached},

		{"default/stranger", "external-secrets/one", closedPort, refused},
		{"default/stranger", "external-secrets/one", 8080, refused},
		{"default/stranger", "external-secrets/one", 10250, reached},
		{"external-secrets/two", "external-secrets/one", closedPort, reached},
		{"monitoring/one", "external-secrets/one", 8080, reached},

		{"default/stranger", "kyverno/one", closedPort, refused},
		{"default/stranger", "kyverno/one", 8000, refused},
		{"default/stranger", "kyverno/one", 9443, reached},
		{"kyverno/two", "kyverno/one", closedPort, reached},
		{"monitoring/one", "kyverno/one", 8000, reached},

		{"default/stranger", "envoy-gateway-system/other", closedPort, reached}, // the entrance
	} {
		what := fmt.Sprintf("%s to %s:%d", c.from, c.to, c.port)
		r := p.connect(c.from, p.pods[c.to].Status.PodIP, c.port)
		checks = append(checks, check{c.want, what, r})
		if c.want == refused && !strings.HasPrefix(c.from, "llm/") { // that one may not leave, either
			opened = append(opened, check{reached, what + " with the namespace open", r})
			closed = append(closed, check{refused, what + " again", r})
		}
	}
	p.expect(checks...)
	// The same requests, once their namespaces are open.
	var names []string
	for key := range p.pods {
		if ns, _, _ := strings.Cut(key, "/"); ns != "default" && !slices.Contains(names, ns) {
			names = append(names, ns)
		}
	}
	for _, ns := range names {
		p.create(networkingv1.NetworkPolicy{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "control"},
			Spec:       networkingv1.NetworkPolicySpec{Ingress: []networkingv1.NetworkPolicyIngressRule{{}}},
		})
	}
	p.expect(opened...)
	for _, ns := range names {
		p.remove(ns, "control")
	}
	p.expect(closed...)
	// A closed namespace is open for the node: kubelet's probes.
	var probes []check
	for key, pod := range p.pods {
		probes = append(probes, check{reached, "kubelet's probe of " + key, func() (outcome, string) {
			now, err := p.core.Pods(pod.Namespace).Get(p.t.Context(), pod.Name, metav1.GetOptions{})
			if err != nil {
				return broken, err.Error()
			}
			return readyPod(*now)
		}})
	}
	p.expect(probes...)
}

// outcome of a request.
type outcome string

const (
	reached outcome = "reached"
	refused outcome = "refused"
	// broken is neither: no name, no program, a wrong answer.
	broken outcome = "broken"
)

// request makes one attempt and tells how it went.
type request func() (outcome, string)

// check is a request and how it should go.
type check struct {
	want outcome
	what string
	ask  request
}

// probe is a pod that only asks and answers.
type probe struct {
	namespace, name string
	labels          map[string]string
}

type policies struct {
	clients

	t          *testing.T
	bin        string
	lab        *lab
	networking *networkingclient.NetworkingV1Client
	pods       map[string]corev1.Pod
	// pids of their containers, among the node's processes.
	pids map[string]string
}

func newPolicies(t *testing.T, bin string, lab *lab) policies {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", lab.Kubeconfig)
	must(t, err)
	networking, err := networkingclient.NewForConfig(config)
	must(t, err)
	return policies{clients: lab.client(t), t: t, bin: bin, lab: lab, networking: networking, pods: map[string]corev1.Pod{}, pids: map[string]string{}}
}

func (p policies) with(t *testing.T) policies {
	p.t = t
	return p
}

// startPods starts probes and waits until kubelet has seen them answer. They answer on
// each port that a policy of the box speaks of, and on one that none does.
func (p policies) startPods(probes ...probe) {
	p.t.Helper()
	var serve strings.Builder
	serve.WriteString("mkdir -p /tmp/www; echo yes >/tmp/www/index.html; ")
	for _, port := range []int{6443, 8000, 8080, 8200, 9090, 9400, 9443, 10250} {
		fmt.Fprintf(&serve, "busybox httpd -p %d -h /tmp/www; ", port)
	}
	fmt.Fprintf(&serve, "exec busybox httpd -f -p %d -h /tmp/www", closedPort)
	for _, w := range probes {
		_, err := p.core.Pods(w.namespace).Create(p.t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: w.name, Namespace: w.namespace, Labels: w.labels},
			Spec: corev1.PodSpec{
				EnableServiceLinks:            new(bool),
				AutomountServiceAccountToken:  new(bool),
				TerminationGracePeriodSeconds: new(int64),
				SecurityContext: &corev1.PodSecurityContext{
					RunAsNonRoot: ptr(true), RunAsUser: ptr(int64(65534)),
					SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
				},
				Containers: []corev1.Container{{
					Name: "probe", Image: probeImage, Command: []string{"sh", "-c", serve.String()},
					SecurityContext: &corev1.SecurityContext{
						AllowPrivilegeEscalation: new(bool),
						Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
					},
					ReadinessProbe: &corev1.Probe{
						ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(closedPort)}},
						PeriodSeconds: 3, TimeoutSeconds: 10,
					},
				}},
			},
		}, metav1.CreateOptions{})
		must(p.t, err)
	}
	deadline := time.Now().Add(startWithin)
	for _, w := range probes {
		for {
			pod, err := p.core.Pods(w.namespace).Get(p.t.Context(), w.name, metav1.GetOptions{})
			must(p.t, err)
			got, said := readyPod(*pod)
			if got == reached {
				p.pods[w.namespace+"/"+w.name] = *pod
				break
			}
			if time.Now().After(deadline) {
				p.t.Fatalf("pod %s/%s: %s", w.namespace, w.name, said)
			}
			time.Sleep(200 * time.Millisecond)
		}
	}
	p.pods[modelServer] = modelPod(p.t, p.clients)
	p.findContainers()
}

// findContainers asks containerd for the processes of the pods.
func (p policies) findContainers() {
	p.t.Helper()
	tasks, err := p.onNode(nil, "ctr", "--namespace", "k8s.io", "tasks", "list")
	must(p.t, err)
	for key, pod := range p.pods {
		id := strings.TrimPrefix(pod.Status.ContainerStatuses[0].ContainerID, "containerd://")
		for line := range strings.Lines(string(tasks)) {
			if fields := strings.Fields(line); len(fields) == 3 && fields[0] == id {
				p.pids[key] = fields[1]
			}
		}
	}
}

func readyPod(pod corev1.Pod) (outcome, string) {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return reached, "ready"
		}
	}
	return refused, fmt.Sprintf("not ready: %s %+v", pod.Status.Phase, pod.Status.ContainerStatuses)
}

// enter is a call of busybox in the network of a pod. A probe has busybox itself, and
// sees its own names; the box's own pods have none and borrow the node's.
func (p policies) enter(key string, command ...string) []string {
	p.t.Helper()
	pid, ok := p.pids[key]
	if !ok {
		p.t.Fatalf("there is no pod %s", key)
	}
	into := []string{"nsenter", "--target", pid, "--net"}
	if p.pods[key].Spec.Containers[0].Image == probeImage {
		into = append(into, "--mount")
	}
	return slices.Concat(into, []string{"--", "/bin/busybox"}, command)
}

// in runs a program of busybox in the network of a pod.
func (p policies) in(key string, command ...string) request {
	p.t.Helper()
	call := p.enter(key, command...)
	return func() (outcome, string) { return p.attempt(nil, call) }
}

func (p policies) attempt(in io.Reader, command []string) (outcome, string) {
	raw, err := p.onNode(in, command...)
	said := strings.TrimSpace(string(raw))
	var exit *exec.ExitError
	switch {
	case err == nil:
		return reached, said
	case !errors.As(err, &exit):
		return broken, err.Error()
	case strings.Contains(said, "Connection refused") || strings.Contains(said, "timed out"):
		return refused, said
	default:
		return broken, err.Error() + " " + said
	}
}

// health asks the model server how it is.
func (p policies) health(from, host string) request {
	p.t.Helper()
	ask := p.enter(from, "nc", "-w", "4", host, "8000")
	return func() (outcome, string) {
		got, said := p.attempt(strings.NewReader("GET /health HTTP/1.0\r\n\r\n"), ask)
		if got == reached && !strings.Contains(said, " 200 ") {
			return broken, said
		}
		return got, said
	}
}

// connect opens a TCP connection from a pod's network.
func (p policies) connect(from, host string, port int) request {
	p.t.Helper()
	return p.in(from, "nc", "-w", "4", host, strconv.Itoa(port), "-e", "/bin/busybox", "true")
}

// onNode runs a program of the machine among the node's processes and mounts.
func (p policies) onNode(in io.Reader, command ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(p.t.Context(), 30*time.Second)
	defer cancel()
	node := []string{"--target", strconv.Itoa(p.lab.PIDs["node"]), "--net", "--mount", "--pid", "--"}
	cmd := exec.CommandContext(ctx, "nsenter", append(node, command...)...)
	cmd.Stdin = in
	return cmd.CombinedOutput()
}

// expect waits until each request goes as it should, and goes on to.
func (p policies) expect(checks ...check) {
	p.t.Helper()
	failures := make(chan string, len(checks))
	var all sync.WaitGroup
	busy := make(chan struct{}, 8)
	for _, c := range checks {
		all.Go(func() {
			busy <- struct{}{}
			defer func() { <-busy }()
			deadline := time.Now().Add(policyWithin)
			for same := 0; same < settled; {
				got, said := c.ask()
				if got == c.want {
					same++
					continue
				}
				same = 0
				if time.Now().After(deadline) {
					failures <- fmt.Sprintf("%s: %s, want %s: %s", c.what, got, c.want, said)
					return
				}
				time.Sleep(300 * time.Millisecond)
			}
		})
	}
	all.Wait()
	close(failures)
	for f := range failures {
		p.t.Error(f)
	}
}

// label sets a pod's label, or takes it away.
func (p policies) label(namespace, name, key, value string) {
	p.t.Helper()
	set := strconv.Quote(value)
	if value == "" {
		set = "null"
	}
	_, err := p.core.Pods(namespace).Patch(p.t.Context(), name, types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, key, set), metav1.PatchOptions{})
	must(p.t, err)
}

func (p policies) create(policy networkingv1.NetworkPolicy) {
	p.t.Helper()
	_, err := p.networking.NetworkPolicies(policy.Namespace).Create(p.t.Context(), &policy, metav1.CreateOptions{})
	must(p.t, err)
}

func (p policies) remove(namespace, name string) {
	p.t.Helper()
	must(p.t, p.networking.NetworkPolicies(namespace).Delete(p.t.Context(), name, metav1.DeleteOptions{}))
}

// without looks while one of the model's policies is away.
func (p policies) without(name string, look func()) {
	p.t.Helper()
	policy, err := p.networking.NetworkPolicies("llm").Get(p.t.Context(), name, metav1.GetOptions{})
	must(p.t, err)
	p.remove("llm", name)
	look()
	policy.ResourceVersion, policy.UID = "", ""
	p.create(*policy)
}

func number(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	must(t, err)
	return n
}

func ptr[T any](v T) *T { return &v }
