package snapshot

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
)

// canary is a secret of some kind, in the form in which people and programs write it.
// Value is what must be found nowhere.
type canary struct{ kind, text, value string }

// canaries are 34 secrets of different kinds. None is anybody's.
func canaries() []canary {
	join := func(parts ...string) string { return strings.Join(parts, "") }
	one := func(kind, format string, value ...string) canary {
		v := join(value...)
		return canary{kind, fmt.Sprintf(format, v), v}
	}
	return []canary{
		one("hugging face", "HF_TOKEN=%s", "hf", "_CanaryCanaryCanary0000000001"),
		one("hugging face in prose", "using %s for the hub", "hf", "_CanaryCanaryCanary0000000002"),
		one("openai", "api key %s", "sk", "-canary00000000000000000003"),
		one("anthropic-like", "x %s", "sk", "-ant-canary0000000000000004"),
		one("nvidia", "NGC %s", "nvapi", "-canary00000000000000000005"),
		one("github", "token %s", "ghp", "_canary00000000000000000006"),
		one("github fine", "clone with %s", "github", "_pat_canary0000000000000007"),
		one("gitlab", "PRIVATE-TOKEN: %s", "glpat", "-canary0000000000000008"),
		one("aws id", "aws_access_key_id = %s", "AKIA", "CANARY0000000009"),
		one("aws secret", "aws_secret_access_key = %s", "CanaryAws/Secret+Key0000000000000000010"),
		one("slack", "slack %s", "xoxb", "-000000-canary000000011"),
		one("slack hook", "post to https://%s", "hooks.slack", ".com/services/T0/B0/canary00000000012"),
		one("jwt", "Cookie: session=%s", "ey", "JhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjYW5hcnkwMTMifQ.c2lnbmF0dXJlMDEz"),
		one("bearer", "Authorization: Bearer %s", "canarybearer000000000000014"),
		one("basic", "authorization: Basic %s", "Y2FuYXJ5OmNhbmFyeTAxNQ=="),
		one("password", "password: %s", "canary-password-016"),
		one("password in url", "postgres://user:%s@db:5432/x", "canary-password-017"),
		one("flag", "--api-key %s --port 8000", "canary-flag-key-018"),
		one("flag with equals", "--token=%s", "canary-flag-token-019"),
		one("json", `{"client_secret": "%s"}`, "canary-json-secret-020"),
		one("yaml", "clientSecret: '%s'", "canary-yaml-secret-021"),
		one("k3s token", "K3S_TOKEN=%s", "K10", strings.Repeat("ab", 32), "::server:canary022"),
		one("vault", "vault login %s", "hvs", ".CanaryCanaryCanary000000023"),
		one("vault old", "X-Vault-Token: %s", "s.CanaryCanaryCanaryCana24"),
		one("npm", "npm %s", "npm", "_canaryCanaryCanaryCanary0000000025"),
		one("pypi", "upload %s", "pypi", "-canaryCanaryCanary0000000026"),
		one("grafana", "grafana %s", "glsa", "_canaryCanaryCanary0000000027"),
		one("stripe", "pay %s", "sk", "_live_canary00000000000028"),
		one("google", "maps %s", "AIza", "CanaryCanaryCanaryCanaryCanary00029"),
		one("docker", "docker login -p %s", "dckr", "_pat_canaryCanaryCanary0000030"),
		one("signed url", "GET https://x.blob/y?sv=1&sig=%s&se=2", "canarysignature0000031"),
		one("azure", "AccountKey=%s;EndpointSuffix=x", "Canary00000000000000000000000000000000000032=="),
		one("kubeconfig", "client-key-data: %s", "Y2FuYXJ5LWtleS1kYXRhLTAwMDAwMDAwMDAwMDAzMw=="),
		one("pem", "-----BEGIN RSA PRIVATE KEY-----\n%s\n-----END RSA PRIVATE KEY-----", "MIIcanarycanarycanarycanarycanary034"),
		one("prompt", `Received request cmpl-1: prompt: '%s', params: SamplingParams(n=1)`, "my patient of the canary ward 035"),
	}
}

// TestCanaries plants every secret in every place that a collection reads (files,
// environment, output of programs, Secrets, ConfigMaps, pod specs, logs, events,
// annotations, chart values) and looks for it in whatever is written.
func TestCanaries(t *testing.T) {
	t.Parallel()
	all := canaries()
	if len(all) < 30 {
		t.Fatalf("%d canaries", len(all))
	}
	var lines strings.Builder
	for _, c := range all {
		lines.WriteString(c.text + "\n")
	}
	text := lines.String()
	root, programs := machine(t), t.TempDir()
	for _, name := range []string{
		"/etc/environment", "/etc/systemd/system/k3s.service.env", "/etc/rancher/k3s/config.yaml", "/etc/rancher/k3s/registries.yaml", "/etc/rancher/k3s/k3s.yaml", "/etc/rancher/node/password",
		"/var/lib/rancher/k3s/server/token", "/var/lib/rancher/k3s/server/tls/server-ca.key", "/var/lib/rancher/k3s/agent/containerd/containerd.log", "/var/log/llmbox/k3s.log",
		"/etc/docker/daemon.json", "/etc/llmbox/config.yaml", "/var/lib/llmbox/credentials/hf-token", "/etc/apt/apt.conf.d/99proxy", "/var/lib/rancher/k3s/server/tls/serving.crt", "/root/.cache/huggingface/token",
		"/proc/cmdline", "/etc/resolv.conf", "/etc/hosts", "/run/cloud-init/status.json",
	} {
		put(t, root, name, text)
	}
	quoted, err := json.Marshal(text)
	if err != nil {
		t.Fatal(err)
	}
	put(t, root, k3sRecord, `{"init":"supervised","hook":[`+string(quoted)+`]}`)
	put(t, root, "/run/llmbox/k3s-supervisor.json", `{"supervisor":{"pid":1},"last":`+string(quoted)+`}`)
	script := "#!/bin/sh\ncat <<'THEEND'\n" + text + "THEEND\n"
	for _, name := range []string{"journalctl", "dmesg", "iptables-save", "k3s", "systemctl"} {
		if err := os.WriteFile(filepath.Join(programs, name), []byte(script), 0o755); err != nil { // #nosec G306 -- a program
			t.Fatal(err)
		}
	}
	server := httptest.NewServer(canaryCluster(all, text))
	defer server.Close()
	s := Collect(t.Context(), Options{
		Root: root, Programs: []string{programs}, Offline: true, Installed: true, Kube: &rest.Config{Host: server.URL}, UID: new(int),
		Environ:  []string{"HTTPS_PROXY=http://user:canary-password-017@proxy:1", "LD_PRELOAD=" + all[0].value},
		Endpoint: func(context.Context) EndpointProbe { return EndpointProbe{Error: text} },
	})
	if len(s.Logs()) == 0 || len(s.ClusterKinds()) < 10 {
		t.Fatalf("%d logs, %v, %v", len(s.Logs()), s.ClusterKinds(), s.Manifest.Unreadable)
	}
	name := filepath.Join(t.TempDir(), "bundle.tar.gz")
	if err := s.SaveBundle(name, nil); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(name)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the bundle is %v: %v", info.Mode(), err)
	}
	for member, data := range unpack(t, name) {
		for _, c := range all {
			if bytes.Contains(data, []byte(c.value)) {
				i := bytes.Index(data, []byte(c.value))
				t.Errorf("%s (%s) is in %s: …%s…", c.kind, c.value, member, data[max(0, i-60):min(len(data), i+len(c.value)+10)])
			}
		}
	}
}

func unpack(t *testing.T, name string) map[string][]byte {
	t.Helper()
	file, err := os.Open(name) // #nosec G304 -- a file of this test
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	archive := tar.NewReader(unzipped)
	out := map[string][]byte{}
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		if out[header.Name], err = io.ReadAll(archive); err != nil {
			t.Fatal(err)
		}
	}
}

// canaryCluster is an API server that answers every list with one object, full of
// secrets wherever a person can put one.
func canaryCluster(all []canary, text string) http.Handler {
	quote := func(s string) string {
		var b bytes.Buffer
		b.WriteByte('"')
		for _, r := range s {
			switch r {
			case '"', '\\':
				b.WriteByte('\\')
				b.WriteRune(r)
			case '\n':
				b.WriteString(`\n`)
			default:
				b.WriteRune(r)
			}
		}
		b.WriteByte('"')
		return b.String()
	}
	var environment, arguments []string
	for i, c := range all {
		environment = append(environment, fmt.Sprintf(`{"name":"VALUE_%d","value":%s}`, i, quote(c.value)))
		arguments = append(arguments, quote(c.value), quote(c.text))
	}
	pod := `{"metadata":{"namespace":"llm","name":"p","labels":{"app.kubernetes.io/name":"model-server"},"annotations":{"note":` + quote(text) + `,"kubectl.kubernetes.io/last-applied-configuration":` + quote(text) + `}},
	 "spec":{"containers":[{"name":"vllm","image":"x","command":[` + strings.Join(arguments, ",") + `],"args":[` + strings.Join(arguments, ",") + `],"env":[` + strings.Join(environment, ",") + `],"livenessProbe":{"httpGet":{"httpHeaders":[{"name":"Authorization","value":` + quote(text) + `}]}}}]},
	 "status":{"phase":"Running","message":` + quote(text) + `,"conditions":[{"type":"Ready","status":"False","message":` + quote(text) + `}],
	 "containerStatuses":[{"name":"vllm","ready":false,"restartCount":2,"image":"x","state":{"waiting":{"reason":"CrashLoopBackOff","message":` + quote(text) + `}},"lastState":{"terminated":{"exitCode":1,"message":` + quote(text) + `}}}]}}`
	object := `{"metadata":{"namespace":"llm","name":"o","annotations":{"note":` + quote(text) + `}},"data":{"key":` + quote(text) + `},"stringData":{"key":` + quote(text) + `},
	 "spec":{"valuesContent":` + quote(text) + `,"set":{"a":` + quote(text) + `},"chartContent":` + quote(text) + `,"password":` + quote(all[15].value) + `,"config":` + quote(text) + `},
	 "status":{"conditions":[{"type":"Ready","status":"False","message":` + quote(text) + `}]}}`
	event := `{"metadata":{"namespace":"llm","name":"e"},"involvedObject":{"kind":"Pod","namespace":"llm","name":"p"},"reason":"Failed","message":` + quote(text) + `,"type":"Warning"}`
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/version":
			_, _ = io.WriteString(w, `{"gitVersion":"v1.36.4+k3s1"}`)
		case strings.HasSuffix(r.URL.Path, "/log"):
			_, _ = io.WriteString(w, text)
		case r.URL.Path == "/api/v1/pods":
			_, _ = io.WriteString(w, `{"items":[`+pod+`]}`)
		case r.URL.Path == "/api/v1/events":
			_, _ = io.WriteString(w, `{"items":[`+event+`]}`)
		case strings.Contains(r.URL.Path, "/proxy/"):
			w.WriteHeader(http.StatusBadGateway)
			_, _ = io.WriteString(w, text)
		default:
			_, _ = io.WriteString(w, `{"items":[`+object+`]}`)
		}
	})
}
