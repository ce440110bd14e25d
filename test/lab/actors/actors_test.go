package actors

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/yaml"
)

// kindsInFixture maps what testdata/cluster.yaml holds to watched kinds.
func kindsInFixture() map[string]kind {
	return map[string]kind{
		"Namespace": namespaces, "Service": services, "EndpointSlice": endpointSlices, "Pod": pods, "Secret": secrets,
		"Prometheus": prometheuses, "ServiceMonitor": serviceMonitors, "Gateway": gateways, "HTTPRoute": httpRoutes, "SecurityPolicy": securityPols,
	}
}

// fixturePlane is a plane whose watches hold testdata/cluster.yaml and nobody.
func fixturePlane(t *testing.T) *plane {
	t.Helper()
	p, err := newPlane(Options{Config: &rest.Config{Host: "http://127.0.0.1:1"}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range kindsInFixture() {
		p.sources[k] = &source{informer: cache.NewSharedIndexInformer(nil, &unstructured.Unstructured{}, 0,
			cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})}
	}
	raw, err := os.ReadFile(filepath.Join("testdata", "cluster.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(raw)))
	for {
		doc, err := reader.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		asJSON, err := yaml.YAMLToJSON(doc)
		if err != nil {
			t.Fatal(err)
		}
		o := &unstructured.Unstructured{}
		if err := o.UnmarshalJSON(asJSON); err != nil {
			t.Fatal(err)
		}
		k, ok := kindsInFixture()[o.GetKind()]
		if !ok {
			t.Fatalf("fixture holds a %s", o.GetKind())
		}
		if err := p.indexer(k).Add(o); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func readFixture(t *testing.T, name string, into any) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(raw, into); err != nil {
		t.Fatal(err)
	}
}

// connectClient reaches addresses through the egress socket, as the API server does.
func connectClient(socket string) *http.Client {
	dial := func(ctx context.Context, _, target string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", socket)
		if err != nil {
			return nil, err
		}
		if _, err := fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", target); err != nil {
			return nil, err
		}
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return nil, err
		}
		if response.StatusCode != http.StatusOK {
			return nil, fmt.Errorf("proxy answered %d", response.StatusCode)
		}
		return conn, nil
	}
	return &http.Client{Transport: &http.Transport{DialContext: dial}, Timeout: 5 * time.Second}
}

func startEgress(t *testing.T, p *plane) *http.Client {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "egress.sock")
	l, err := listenUnix(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { p.directory.serve(ctx, l); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	return connectClient(socket)
}

func TestEgressReachesReadyPodsOnly(t *testing.T) {
	p := fixturePlane(t)
	newModelServer(p)
	newGrafana(p)
	client := startEgress(t, p)
	cases := []struct {
		url  string
		code int // 0: not reachable
	}{
		{"http://10.43.0.10:8000/health", http.StatusOK},          // by cluster IP
		{"http://10.42.0.5:8000/health", http.StatusOK},           // by pod IP
		{"http://10.43.0.10:9999/health", 0},                      // no such Service port
		{"http://10.43.0.11:3000/api/health", 0},                  // pod not ready
		{"http://10.42.0.6:3000/api/health", 0},                   // the same by pod IP
		{"http://10.43.0.99:80/", 0},                              // nobody's address
		{"http://10.42.0.5:8000/v1/nothing", http.StatusNotFound}, // reached, but unknown
	}
	for _, c := range cases {
		t.Run(c.url, func(t *testing.T) {
			response, err := client.Get(c.url)
			if c.code == 0 {
				if err == nil {
					t.Fatalf("answered %d, want no connection", response.StatusCode)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = response.Body.Close() }()
			if response.StatusCode != c.code {
				t.Errorf("answered %d, want %d", response.StatusCode, c.code)
			}
			if got := response.Header.Get(Header); got != modelActor {
				t.Errorf("header %s is %q", Header, got)
			}
		})
	}
}

func TestKeptConnectionEndsWithThePod(t *testing.T) {
	p := fixturePlane(t)
	newModelServer(p)
	client := startEgress(t, p)
	get := func() error {
		response, err := client.Get("http://10.43.0.10:8000/health")
		if err == nil {
			_ = response.Body.Close()
		}
		return err
	}
	if err := get(); err != nil {
		t.Fatal(err)
	}
	pod := p.get(pods, "llm", "model-server-6c9-x")
	if err := p.indexer(pods).Delete(pod); err != nil {
		t.Fatal(err)
	}
	if err := get(); err == nil {
		t.Error("answered although the pod is gone")
	}
}

func TestProxyPaths(t *testing.T) {
	var cases []struct {
		Kind, Value, Path string
		Matches           bool
	}
	readFixture(t, "paths.yaml", &cases)
	for _, c := range cases {
		if got := pathMatches(c.Kind, c.Value, c.Path); got != c.Matches {
			t.Errorf("%s %s against %s: %v", c.Kind, c.Value, c.Path, got)
		}
	}
}

func TestProxyChecksKeysAndRoutes(t *testing.T) {
	p := fixturePlane(t)
	newModelServer(p)
	x := newProxies(p, 0)
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x.handle(w, r, "envoy-gateway-system", "public", "http")
	}))
	defer front.Close()
	cases := []struct {
		name, path, authorization string
		code                      int
		by                        string
	}{
		{"bearer", "/v1/models", "Bearer secret-key", http.StatusOK, gatewayName + ", " + modelActor},
		{"raw", "/v1/models", "secret-key", http.StatusOK, gatewayName + ", " + modelActor},
		{"wrong key", "/v1/models", "Bearer other", http.StatusUnauthorized, gatewayName},
		{"no key", "/v1/models", "", http.StatusUnauthorized, gatewayName},
		{"not routed", "/metrics", "Bearer secret-key", http.StatusNotFound, gatewayName},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, front.URL+c.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			if c.authorization != "" {
				request.Header.Set("Authorization", c.authorization)
			}
			response, err := front.Client().Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = response.Body.Close() }()
			if response.StatusCode != c.code || response.Header.Get(Header) != c.by {
				t.Errorf("answered %d by %q, want %d by %q", response.StatusCode, response.Header.Get(Header), c.code, c.by)
			}
		})
	}
}

func TestModelStreams(t *testing.T) {
	p := fixturePlane(t)
	newModelServer(p)
	client := startEgress(t, p)
	ask := func(body string) (int, string) {
		response, err := client.Post("http://10.43.0.10:8000/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
		raw, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response.StatusCode, string(raw)
	}
	code, text := ask(`{"model":"small","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":2}`)
	if code != http.StatusOK || strings.Count(text, `"content"`) != 2 || !strings.HasSuffix(text, "data: [DONE]\n\n") || !strings.Contains(text, `"finish_reason":"length"`) {
		t.Errorf("stream of two tokens: %d %s", code, text)
	}
	// The repository's name is not served once --served-model-name is given.
	if code, text := ask(`{"model":"org/model","messages":[{"role":"user","content":"hi"}]}`); code != http.StatusNotFound {
		t.Errorf("unknown model: %d %s", code, text)
	}
}

func TestPrometheusTargets(t *testing.T) {
	o := &prometheusOperator{fixturePlane(t)}
	recorder := httptest.NewRecorder()
	o.targets(recorder, httptest.NewRequest(http.MethodGet, "/api/v1/targets?state=active", nil))
	var answer struct {
		Data struct {
			ActiveTargets []struct {
				ScrapePool, ScrapeURL, Health string
				Labels                        map[string]string
			}
		}
	}
	if err := json.Unmarshal(recorder.Body.Bytes(), &answer); err != nil {
		t.Fatal(err)
	}
	// Grafana's pod is not ready: only the model server is a target.
	if len(answer.Data.ActiveTargets) != 1 {
		t.Fatalf("targets: %s", recorder.Body)
	}
	got := answer.Data.ActiveTargets[0]
	if got.ScrapePool != "serviceMonitor/llm/model-server/0" || got.ScrapeURL != "http://10.42.0.5:8000/metrics" || got.Labels["job"] != "model-server" {
		t.Errorf("target: %+v", got)
	}
}

func TestVaultPolicies(t *testing.T) {
	var cases []struct {
		Name, Policy, Verb, Path string
		Permitted                bool
	}
	readFixture(t, "policies.yaml", &cases)
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			v := newVault(fixturePlane(t))
			v.policy["p"] = c.Policy
			token := &vaultToken{policies: []string{"default", "p"}}
			if got := v.permits(token, &vaultCall{verb: c.Verb, path: c.Path}); got != c.Permitted {
				t.Errorf("permitted: %v", got)
			}
		})
	}
}

// vaultSession sends requests to a Vault that has no pod to lose.
type vaultSession struct {
	t     *testing.T
	v     *vault
	token string
}

func (s *vaultSession) do(method, path string, body map[string]any) (int, map[string]any) {
	s.t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		s.t.Fatal(err)
	}
	if body == nil {
		raw = nil
	}
	request := httptest.NewRequest(method, "/v1/"+path, bytes.NewReader(raw))
	request.Header.Set("X-Vault-Token", s.token)
	recorder := httptest.NewRecorder()
	s.v.ServeHTTP(recorder, request)
	answer := map[string]any{}
	if recorder.Body.Len() > 0 {
		if err := json.Unmarshal(recorder.Body.Bytes(), &answer); err != nil {
			s.t.Fatal(err)
		}
	}
	return recorder.Code, answer
}

func (s *vaultSession) want(code int, method, path string, body map[string]any) map[string]any {
	s.t.Helper()
	got, answer := s.do(method, path, body)
	if got != code {
		s.t.Fatalf("%s %s answered %d, want %d: %v", method, path, got, code, answer)
	}
	return answer
}

func TestVaultLife(t *testing.T) {
	s := &vaultSession{t: t, v: newVault(fixturePlane(t))}
	s.want(501, "GET", "sys/health", nil)
	s.want(503, "GET", "sys/mounts", nil)
	s.want(400, "PUT", "sys/unseal", map[string]any{"key": "00"})
	s.want(400, "PUT", "sys/init", map[string]any{"secret_shares": 3, "secret_threshold": 1})
	made := s.want(200, "PUT", "sys/init", map[string]any{"secret_shares": 3, "secret_threshold": 2})
	s.want(400, "PUT", "sys/init", map[string]any{"secret_shares": 1, "secret_threshold": 1})
	s.want(503, "GET", "sys/health", nil)
	keys := texts(made, "keys_base64")
	s.want(400, "PUT", "sys/unseal", map[string]any{"key": "bm90IGEga2V5"})
	for _, key := range []string{keys[0], keys[0]} { // the same share twice is one
		if answer := s.want(200, "PUT", "sys/unseal", map[string]any{"key": key}); !truth(answer, "sealed") {
			t.Fatal("open with one share")
		}
	}
	if answer := s.want(200, "PUT", "sys/unseal", map[string]any{"key": keys[2]}); truth(answer, "sealed") {
		t.Fatal("sealed with two shares")
	}
	s.want(200, "GET", "sys/health", nil)
	s.want(403, "GET", "sys/mounts", nil)

	s.token = str(made, "root_token")
	s.want(204, "POST", "sys/mounts/llmbox", map[string]any{"type": "kv", "options": map[string]any{"version": "2"}})
	s.want(400, "POST", "sys/mounts/llmbox", map[string]any{"type": "kv", "options": map[string]any{"version": "2"}})
	s.want(404, "GET", "llmbox/data/gateway-keys", nil)
	s.want(200, "POST", "llmbox/data/gateway-keys", map[string]any{"data": map[string]any{"a": "1"}, "options": map[string]any{"cas": 0}})
	s.want(400, "POST", "llmbox/data/gateway-keys", map[string]any{"data": map[string]any{"a": "2"}, "options": map[string]any{"cas": 0}})
	s.want(200, "POST", "llmbox/data/gateway-keys", map[string]any{"data": map[string]any{"a": "2"}, "options": map[string]any{"cas": 1}})
	if got := str(s.want(200, "GET", "llmbox/data/gateway-keys", nil), "data", "data", "a"); got != "2" {
		t.Errorf("newest version holds %q", got)
	}
	if got := str(s.want(200, "GET", "llmbox/data/gateway-keys?version=1", nil), "data", "data", "a"); got != "1" {
		t.Errorf("first version holds %q", got)
	}
	if got := texts(s.want(200, "LIST", "llmbox/metadata", nil), "data", "keys"); !slices.Equal(got, []string{"gateway-keys"}) {
		t.Errorf("listed %v", got)
	}
	s.want(204, "PUT", "sys/policies/acl/reader", map[string]any{"policy": `path "llmbox/data/*" { capabilities = ["read"] }`})
	s.want(404, "GET", "nowhere/x", nil)
	s.want(204, "POST", "auth/token/revoke-self", nil)
	s.want(403, "GET", "llmbox/data/gateway-keys", nil) // the root token is no more
	s.v.sealed = true
	s.want(204, "GET", "sys/health?standbyok=true&sealedcode=204", nil)
}

func TestRendered(t *testing.T) {
	es := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"target": map[string]any{"template": map[string]any{
		"data": map[string]any{"line": "token={{ .token }}"}}}}}}
	got, err := rendered(es, map[string][]byte{"token": []byte("x")})
	if err != nil || string(got["line"]) != "token=x" || len(got) != 1 {
		t.Errorf("rendered %v, %v", got, err)
	}
	if _, err := rendered(es, map[string][]byte{}); err == nil {
		t.Error("a key that is missing is no error")
	}
}

func TestConditionsKeepTransitionTime(t *testing.T) {
	old := []any{map[string]any{"type": "Ready", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"}, map[string]any{"type": "Other", "status": "False"}}
	same := conditions(old, yes("Ready", "Valid", "", 0))
	if str(same[0].(map[string]any), "lastTransitionTime") != "2020-01-01T00:00:00Z" || len(same) != 2 {
		t.Errorf("same status: %v", same)
	}
	if moved := conditions(old, no("Ready", "Broken", "", 0)); str(moved[0].(map[string]any), "lastTransitionTime") == "2020-01-01T00:00:00Z" {
		t.Errorf("other status: %v", moved)
	}
}

func TestWithActor(t *testing.T) {
	for _, c := range []struct{ before, after string }{{"", "a"}, {"a", "a"}, {"kwok", "kwok, a"}, {"kwok, a", "kwok, a"}} {
		if got, _ := withActor(c.before, "a"); got != c.after {
			t.Errorf("%q became %q", c.before, got)
		}
	}
}

func TestStartEndsWithItsContext(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "egress.sock")
	// What a killed run leaves behind.
	if err := os.WriteFile(socket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- Start(ctx, Options{Config: &rest.Config{Host: "http://127.0.0.1:1"}, EgressSocket: socket})
	}()
	deadline := time.Now().Add(5 * time.Second)
	for {
		if info, err := os.Stat(socket); err == nil && info.Mode()&os.ModeSocket != 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("no socket before the API server answers")
		}
		time.Sleep(10 * time.Millisecond)
	}
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("ended with %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("goes on after its context ended")
	}
	if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket is still there: %v", err)
	}
}
