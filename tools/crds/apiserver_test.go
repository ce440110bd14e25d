package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	apiext "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

// binariesVariable names the directory with kube-apiserver and kine that
// TestAPIServer starts. Without it the test is skipped: those binaries are built
// elsewhere and take long.
const binariesVariable = "LLMBOX_KUBE_BIN"

// TestAPIServer applies every CRD to a real API server the way llmbox does and
// waits until all are served.
func TestAPIServer(t *testing.T) {
	binaries := os.Getenv(binariesVariable)
	if binaries == "" {
		t.Skipf("%s is not set", binariesVariable)
	}
	server := startAPIServer(t, binaries)

	type applied struct{ name, version string }
	first := map[string]applied{}
	start := time.Now()
	total := 0
	for _, g := range groups() {
		for fileName, content := range readDir(t, filepath.Join("..", "..", g.dir)) {
			d := server.apply(t, fileName, content)
			first[fileName] = applied{d.Name, d.ResourceVersion}
			total += len(content)
		}
	}
	t.Logf("%d CRDs, %d bytes of YAML applied in %v", len(first), total, time.Since(start).Round(time.Millisecond))

	for fileName, a := range first {
		server.waitServed(t, a.name)
		if conditions := server.conditions(t, a.name); conditions[apiext.NonStructuralSchema].Status == apiext.ConditionTrue {
			t.Errorf("%s: %s", fileName, conditions[apiext.NonStructuralSchema].Message)
		} else if c, ok := conditions[apiext.KubernetesAPIApprovalPolicyConformant]; ok && c.Status != apiext.ConditionTrue {
			t.Errorf("%s: %s", fileName, c.Message)
		}
	}
	t.Logf("all established after %v", time.Since(start).Round(time.Millisecond))

	// A second apply must change nothing, or every re-run would rewrite the
	// server's OpenAPI document. What is compared is the generation: conditions
	// may still be written in between.
	for _, g := range groups() {
		for fileName, content := range readDir(t, filepath.Join("..", "..", g.dir)) {
			if d := server.apply(t, fileName, content); d.Generation != 1 {
				t.Errorf("%s: applying it again made generation %d", fileName, d.Generation)
			}
		}
	}
}

// apiServer is a running kube-apiserver and how to talk to it.
type apiServer struct {
	url, token string
	client     *http.Client
}

func startAPIServer(t *testing.T, binaries string) apiServer {
	t.Helper()
	dir := t.TempDir()
	etcd, secure := freePort(t), freePort(t)
	s := apiServer{
		url:   "https://127.0.0.1:" + secure,
		token: randomToken(t),
		// The server signs its own certificate for this one test.
		client: &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}, // #nosec G402
	}
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	keyFile := write("sa.key", pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	tokens := write("tokens.csv", fmt.Appendf(nil, "%s,admin,admin,system:masters\n", s.token))

	startProcess(t, filepath.Join(binaries, "kine"),
		"--endpoint", "sqlite://"+filepath.Join(dir, "state.db")+"?_journal=WAL&cache=shared&_busy_timeout=30000",
		"--listen-address", "127.0.0.1:"+etcd, "--metrics-bind-address", "0")
	startProcess(t, filepath.Join(binaries, "kube-apiserver"),
		"--etcd-servers=http://127.0.0.1:"+etcd, "--bind-address=127.0.0.1", "--secure-port="+secure, "--cert-dir="+filepath.Join(dir, "certs"),
		"--service-account-key-file="+keyFile, "--service-account-signing-key-file="+keyFile,
		"--service-account-issuer=https://kubernetes.default.svc", "--token-auth-file="+tokens,
		"--authorization-mode=RBAC", "--service-cluster-ip-range=10.43.0.0/16")

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for {
		if status, _, err := s.do(ctx, http.MethodGet, "/readyz", "", nil); err == nil && status == http.StatusOK {
			return s
		}
		select {
		case <-ctx.Done():
			t.Fatal("the API server did not become ready")
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// apply server-side applies one CRD.
func (s apiServer) apply(t *testing.T, fileName string, content []byte) apiext.CustomResourceDefinition {
	t.Helper()
	name := fileName[:len(fileName)-len(filepath.Ext(fileName))]
	status, body, err := s.do(t.Context(), http.MethodPatch, crdPath+name+"?fieldManager=llmbox", "application/apply-patch+yaml", content)
	if err != nil || status/100 != 2 {
		t.Fatalf("%s: applying: status %d, %v: %s", fileName, status, err, body)
	}
	var d apiext.CustomResourceDefinition
	if err := json.Unmarshal(body, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

const crdPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"

func (s apiServer) get(t *testing.T, name string) apiext.CustomResourceDefinition {
	t.Helper()
	status, body, err := s.do(t.Context(), http.MethodGet, crdPath+name, "", nil)
	if err != nil || status != http.StatusOK {
		t.Fatalf("%s: reading: status %d, %v: %s", name, status, err, body)
	}
	var d apiext.CustomResourceDefinition
	if err := json.Unmarshal(body, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

func (s apiServer) conditions(t *testing.T, name string) map[apiext.CustomResourceDefinitionConditionType]apiext.CustomResourceDefinitionCondition {
	t.Helper()
	all := map[apiext.CustomResourceDefinitionConditionType]apiext.CustomResourceDefinitionCondition{}
	for _, c := range s.get(t, name).Status.Conditions {
		all[c.Type] = c
	}
	return all
}

// waitServed waits until the CRD is established and the objects of each served
// version can be listed.
func (s apiServer) waitServed(t *testing.T, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		d := s.get(t, name)
		served := slices.ContainsFunc(d.Status.Conditions, func(c apiext.CustomResourceDefinitionCondition) bool {
			return c.Type == apiext.Established && c.Status == apiext.ConditionTrue
		})
		for _, v := range d.Spec.Versions {
			if v.Served && served {
				status, _, err := s.do(ctx, http.MethodGet, "/apis/"+d.Spec.Group+"/"+v.Name+"/"+d.Spec.Names.Plural, "", nil)
				served = err == nil && status == http.StatusOK
			}
		}
		if served {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: not served: %+v", name, d.Status.Conditions)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (s apiServer) do(ctx context.Context, method, path, contentType string, content []byte) (int, []byte, error) {
	request, err := http.NewRequestWithContext(ctx, method, s.url+path, bytes.NewReader(content))
	if err != nil {
		return 0, nil, err
	}
	request.Header.Set("Authorization", "Bearer "+s.token)
	if contentType != "" {
		request.Header.Set("Content-Type", contentType)
	}
	response, err := s.client.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	return response.StatusCode, body, err
}

// startProcess runs a program until the test ends; its output is shown if the
// test fails.
func startProcess(t *testing.T, path string, args ...string) {
	t.Helper()
	var output bytes.Buffer
	cmd := exec.Command(path, args...) // #nosec G204 -- binaries named by who runs the test
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			tail := output.Bytes()
			if len(tail) > 4000 {
				tail = tail[len(tail)-4000:]
			}
			t.Logf("%s:\n%s", filepath.Base(path), tail)
		}
	})
}

func freePort(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	return strconv.Itoa(listener.Addr().(*net.TCPAddr).Port)
}

func randomToken(t *testing.T) string {
	t.Helper()
	raw := make([]byte, 16)
	if _, err := rand.Read(raw); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(raw)
}
