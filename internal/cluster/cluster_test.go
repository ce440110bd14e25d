package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"
)

func TestClassify(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	for _, tc := range []struct {
		name string
		err  error
		want error
	}{
		{"expired token", apierrors.NewUnauthorized("expired"), ErrUnauthorized},
		{"no right", apierrors.NewForbidden(pods, "x", errors.New("no")), ErrForbidden},
		{"nobody listens", &url.Error{Op: "Get", URL: "https://x", Err: &net.OpError{Op: "dial", Err: errors.New("refused")}}, ErrUnreachable},
		{"too slow", context.DeadlineExceeded, ErrUnreachable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := Classify(fmt.Errorf("doing something: %w", tc.err))
			if !errors.Is(got, tc.want) || !errors.Is(got, tc.err) {
				t.Errorf("classified as %v, want %v with its cause", got, tc.want)
			}
		})
	}
	for _, err := range []error{nil, context.Canceled, apierrors.NewConflict(pods, "x", errors.New("late"))} {
		if got := Classify(err); !errors.Is(got, err) || errors.Is(got, ErrUnreachable) || errors.Is(got, ErrForbidden) || errors.Is(got, ErrUnauthorized) {
			t.Errorf("%v became %v", err, got)
		}
	}
}

func TestConnectRefuses(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	answering := func(status int, body string) string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = w.Write([]byte(body))
		}))
		t.Cleanup(server.Close)
		return server.URL
	}
	// Most clusters tell anybody their version.
	expired := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/version" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_, _ = w.Write([]byte(`{"gitVersion":"v1.36.4+k3s1"}`))
	}))
	t.Cleanup(expired.Close)
	slow := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	t.Cleanup(slow.Close)
	for _, tc := range []struct {
		name, file string
		want       error
	}{
		{"no such file", "testdata/kubeconfig/absent.yaml", ErrNoKubeconfig},
		{"not a kubeconfig", "testdata/kubeconfig/garbage.yaml", ErrNoKubeconfig},
		{"nobody listens", kubeconfig(t, "https://"+closed.Addr().String()), ErrUnreachable},
		{"not Kubernetes", kubeconfig(t, answering(http.StatusOK, "<html>hello</html>")), ErrUnreachable},
		{"credentials refused", kubeconfig(t, answering(http.StatusUnauthorized, "")), ErrUnauthorized},
		{"credentials expired", kubeconfig(t, expired.URL), ErrUnauthorized},
		{"nothing allowed", kubeconfig(t, answering(http.StatusForbidden, "")), ErrForbidden},
		{"no answer", kubeconfig(t, slow.URL), ErrUnreachable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			began := time.Now()
			_, err := Connect(t.Context(), tc.file, "", 2*time.Second)
			if !errors.Is(err, tc.want) {
				t.Errorf("error is %v, want %v", err, tc.want)
			}
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("it took %s to tell", took)
			}
		})
	}
}

func kubeconfig(t *testing.T, server string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q}}]
users: [{name: u, user: {token: some-token}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, server)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func fixture(t *testing.T, file string) []runtime.Object {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out []runtime.Object
	for _, doc := range strings.Split(string(raw), "\n---\n") {
		obj, _, err := scheme.Codecs.UniversalDeserializer().Decode([]byte(doc), nil, nil)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		out = append(out, obj)
	}
	return out
}

// TestWorkloads checks that whatever keeps a workload from being ready is named.
func TestWorkloads(t *testing.T) {
	web := WorkloadRef{Kind: "Deployment", Name: "web"}
	for _, tc := range []struct {
		file   string
		ref    WorkloadRef
		says   []string
		silent string
	}{
		{file: "ready.yaml", ref: web},
		{file: "ready.yaml", ref: WorkloadRef{Kind: "StatefulSet", Name: "db"}, says: []string{"StatefulSet db", "not created yet"}},
		{file: "image-pull.yaml", ref: web, says: []string{"Deployment web", "pod web-new", "ImagePullBackOff", "no such host"}, silent: "web-old"},
		{file: "job-complete.yaml", ref: WorkloadRef{Kind: "Job", Name: "fetch"}},
		{file: "job-running.yaml", ref: WorkloadRef{Kind: "Job", Name: "fetch"}, says: []string{"Job fetch: running", "CrashLoopBackOff", "last exit code 1"}},
		{file: "crash-loop.yaml", ref: web, says: []string{"pod web-1", "CrashLoopBackOff", "last exit code 137, OOMKilled"}},
		{file: "unschedulable.yaml", ref: web, says: []string{"Unschedulable", "Insufficient nvidia.com/gpu"}},
		{file: "failed-mount.yaml", ref: web, says: []string{"FailedMount", `secret "gateway-keys" not found`}, silent: "assigned to node"},
		{file: "init-failed.yaml", ref: web, says: []string{"setup: exited with code 3"}},
		{file: "no-pods.yaml", ref: web, says: []string{"FailedCreate", "PodSecurity"}},
	} {
		t.Run(tc.file+" "+tc.ref.Name, func(t *testing.T) {
			client := &Client{Kube: fake.NewClientset(fixture(t, filepath.Join("testdata", "workloads", tc.file))...)}
			ns, err := client.Watch(t.Context(), "here")
			if err != nil {
				t.Fatal(err)
			}
			defer ns.Close()
			got, err := ns.Workloads([]WorkloadRef{tc.ref})
			if err != nil {
				t.Fatal(err)
			}
			if got.Ready != (len(tc.says) == 0) {
				t.Errorf("ready is %t: %s", got.Ready, got.Waiting)
			}
			for _, want := range tc.says {
				if !strings.Contains(got.Waiting, want) {
					t.Errorf("%q holds no %q", got.Waiting, want)
				}
			}
			if tc.silent != "" && strings.Contains(got.Waiting, tc.silent) {
				t.Errorf("%q tells %q, which is not the newest", got.Waiting, tc.silent)
			}
			if strings.Contains(got.Waiting, "\n") {
				t.Errorf("%q is more than a line", got.Waiting)
			}
			if tc.file == "ready.yaml" && got.Ready && !slices.Equal(got.SimulatedBy, []string{"actor-one"}) {
				t.Errorf("simulated by %v", got.SimulatedBy)
			}
		})
	}
}

func TestAllocatable(t *testing.T) {
	node := func(name, gpus string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			"nvidia.com/gpu.product": "NVIDIA-A10", "nvidia.com/gpu.memory": "23028", "nvidia.com/gpu.count": "many"}}}
		raw := fmt.Sprintf(`{"status":{"allocatable":{"nvidia.com/gpu":%q}}}`, gpus)
		if err := yaml.Unmarshal([]byte(raw), n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	client := &Client{Kube: fake.NewClientset(node("a", "0"), node("b", "1"))}
	for n, ready := range map[int64]bool{1: true, 2: false} {
		got, err := client.Allocatable(t.Context(), "nvidia.com/gpu", n)
		if err != nil || got.Ready != ready {
			t.Errorf("%d of 1: %+v, %v", n, got, err)
		}
		if !ready && !strings.Contains(got.Waiting, "2 × nvidia.com/gpu (now 1)") {
			t.Errorf("waiting for %q", got.Waiting)
		}
	}
	nodes, err := client.GPUNodes(t.Context())
	if err != nil || len(nodes) != 2 || nodes[0].MemoryMiB != 23028 || nodes[0].Count != 0 || nodes[1].Allocatable != 1 {
		t.Errorf("nodes are %+v, %v", nodes, err)
	}
}

func TestToken(t *testing.T) {
	answer := func(content string, tokens int) string {
		return fmt.Sprintf(`{"choices":[{"message":{"content":%q}}],"usage":{"completion_tokens":%d}}`, content, tokens)
	}
	for _, tc := range []struct {
		name   string
		status int
		body   string
		ready  bool
		says   string
	}{
		{"a token", 200, answer("Hello", 1), true, ""},
		{"a blank token", 200, answer("", 1), true, ""},
		{"reasoning only", 200, `{"choices":[{"message":{"reasoning_content":"Hm"}}]}`, true, ""},
		{"no token", 200, answer("", 0), false, "the answer holds none"},
		{"no choice", 200, `{"choices":[]}`, false, "the answer holds none"},
		{"key refused", 401, "Client authentication failed.", false, "HTTP 401 Client authentication failed."},
		{"model still loads", 503, "upstream connect error\n or disconnect", false, "HTTP 503 upstream connect error or disconnect"},
		{"a web page", 200, "<html></html>", false, "not an OpenAI answer"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Authorization") != "Bearer the-key" || r.URL.Path != "/v1/chat/completions" || r.Method != http.MethodPost {
					t.Errorf("asked %s %s with %q", r.Method, r.URL, r.Header.Get("Authorization"))
				}
				w.Header().Set("X-Llmbox-Simulated-By", "two, one,two")
				w.WriteHeader(tc.status)
				_, _ = w.Write([]byte(tc.body))
			}))
			defer server.Close()
			got, err := Token(t.Context(), server.Client(), server.URL, "the-key", "some/model")
			if err != nil {
				t.Fatal(err)
			}
			if got.Ready != tc.ready || !strings.Contains(got.Waiting, tc.says) {
				t.Errorf("verdict is %+v, want ready: %t, %q", got, tc.ready, tc.says)
			}
			if got.Ready && !slices.Equal(got.SimulatedBy, []string{"one", "two"}) {
				t.Errorf("simulated by %v", got.SimulatedBy)
			}
			if strings.Contains(got.Waiting, "the-key") {
				t.Errorf("%q tells the key", got.Waiting)
			}
		})
	}
	server := httptest.NewServer(http.NotFoundHandler())
	server.Close()
	if got, err := Token(t.Context(), http.DefaultClient, server.URL, "the-key", "m"); err != nil || got.Ready || got.Waiting == "" {
		t.Errorf("nobody listens: %+v, %v", got, err)
	}
}

func TestPrometheusTarget(t *testing.T) {
	for _, tc := range []struct {
		name   string
		status int
		body   string
		ready  bool
		says   string
	}{
		{"up", 200, `{"data":{"activeTargets":[{"labels":{"job":"other"},"health":"down"},{"labels":{"job":"mine"},"health":"up"}]}}`, true, ""},
		{"down", 200, `{"data":{"activeTargets":[{"labels":{"job":"mine"},"health":"down","lastError":"connection refused"}]}}`, false, "down connection refused"},
		{"another job", 200, `{"data":{"activeTargets":[{"labels":{"job":"other"},"health":"up"}]}}`, false, "no such target yet"},
		{"no pod", 503, `{"kind":"Status","message":"no endpoints available for service \"prometheus\""}`, false, "no endpoints available"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if want := "/api/v1/namespaces/monitoring/services/http:prometheus:9090/proxy/api/v1/targets"; r.URL.Path != want {
					t.Errorf("asked %s, want %s", r.URL.Path, want)
				}
				w.WriteHeader(tc.status)
				_, _ = w.Write([]byte(tc.body))
			}))
			defer server.Close()
			base, err := url.Parse(server.URL)
			if err != nil {
				t.Fatal(err)
			}
			client := &Client{REST: &rest.Config{Host: server.URL}, transport: http.DefaultTransport, baseURL: base}
			got, err := client.PrometheusTarget(t.Context(), "monitoring", "prometheus", "9090", "mine")
			if err != nil || got.Ready != tc.ready || !strings.Contains(got.Waiting, tc.says) {
				t.Errorf("verdict is %+v (%v), want ready: %t, %q", got, err, tc.ready, tc.says)
			}
		})
	}
}

func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		t.Fatal(err)
	}
	return o
}

func TestCondition(t *testing.T) {
	for _, tc := range []struct {
		name, conditions, text string
		ok                     bool
	}{
		{"true", `[{type: Ready, status: "True", reason: Fine, message: all is well}]`, "Fine: all is well", true},
		{"false", `[{type: Ready, status: "False", reason: Broken}]`, "Broken", false},
		{"message alone", `[{type: Ready, status: "Unknown", message: wait}]`, "wait", false},
		{"another one", `[{type: Other, status: "True"}]`, "", false},
		{"not a list", `{type: Ready}`, "", false},
		{"not objects", `[Ready]`, "", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			text, ok := condition(object(t, "status: {conditions: "+tc.conditions+"}"), "Ready", "True")
			if text != tc.text || ok != tc.ok {
				t.Errorf("%q, %t, want %q, %t", text, ok, tc.text, tc.ok)
			}
		})
	}
}

func TestServedFrom(t *testing.T) {
	const ours, theirs = "{clientConfig: {service: {namespace: kyverno}}}", "{clientConfig: {service: {namespace: theirs}}}"
	for hooks, want := range map[string]bool{
		"[" + ours + "]":                 true,
		"[" + ours + ", " + theirs + "]": false,
		"[" + theirs + "]":               false,
		"[{clientConfig: {url: x}}]":     false,
		"[]":                             false,
	} {
		if got := servedFrom(object(t, "webhooks: "+hooks), []string{"keda", "kyverno"}); got != want {
			t.Errorf("%s: ours is %t, want %t", hooks, got, want)
		}
	}
}

func TestPrepare(t *testing.T) {
	o := object(t, "{apiVersion: v1, kind: ConfigMap, metadata: {name: a, labels: {keep: me}}, data: {k: v}}")
	one, digest, err := prepare(o)
	if err != nil {
		t.Fatal(err)
	}
	if one.GetLabels()[ManagedByLabel] != ManagedByValue || one.GetLabels()[PartOfLabel] != ManagedByValue || one.GetLabels()["keep"] != "me" {
		t.Errorf("labels are %v", one.GetLabels())
	}
	if one.GetAnnotations()[digestAnnotation] != digest || digest == "" {
		t.Errorf("annotations are %v, digest is %q", one.GetAnnotations(), digest)
	}
	if len(o.GetLabels()) != 1 || len(o.GetAnnotations()) != 0 {
		t.Errorf("the argument was changed: %v", o.Object)
	}
	if err := unstructured.SetNestedField(o.Object, "w", "data", "k"); err != nil {
		t.Fatal(err)
	}
	if _, other, err := prepare(o); err != nil || other == digest {
		t.Errorf("another object has the same digest (%v)", err)
	}
}

func TestLoadCRDs(t *testing.T) {
	fsys := fstest.MapFS{
		"crds/a/one.yaml":    {Data: []byte("kind: CustomResourceDefinition\nmetadata: {name: ones.a}\n")},
		"crds/a/README.md":   {Data: []byte("not a CRD")},
		"crds/bad/two.yaml":  {Data: []byte("a: [")},
		"crds/c/three.yaml":  {Data: []byte("kind: CustomResourceDefinition\nmetadata: {name: threes.c}\n")},
		"crds/unasked/x.yml": {Data: []byte("")},
	}
	got, err := LoadCRDs(fsys, []string{"a", "c"})
	if err != nil || len(got) != 2 || got[0].GetName() != "ones.a" || got[1].GetName() != "threes.c" {
		t.Errorf("loaded %v, %v", got, err)
	}
	for _, name := range []string{"bad", "absent"} {
		if _, err := LoadCRDs(fsys, []string{name}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestStoredResource(t *testing.T) {
	crd := object(t, `{spec: {group: g, scope: Namespaced, names: {plural: things}, versions: [{name: v1, served: false}, {name: v2, served: true}]}}`)
	gvr, namespaced, ok := storedResource(crd)
	if !ok || !namespaced || gvr != (schema.GroupVersionResource{Group: "g", Version: "v2", Resource: "things"}) {
		t.Errorf("%v, %t, %t", gvr, namespaced, ok)
	}
	if _, _, ok := storedResource(object(t, "{spec: {group: g, versions: [{name: v1, served: false}]}}")); ok {
		t.Error("nothing is served of it")
	}
}
