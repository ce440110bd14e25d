package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// TestKeys follows clients' keys through a box, kept in Vault and without it: each
// change must be true at the gateway when the command ends.
func TestKeys(t *testing.T) {
	l := useLab(t)
	for _, c := range []struct{ name, store, without string }{
		{"in Vault", "vault", "kyverno,policies,keda,autoscale,prometheus"},
		{"in the Secret", "secret", "vault,external-secrets,kyverno,policies,keda,autoscale,prometheus"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l.clean(t)
			l.install(t, "--without", c.without)
			k := keyTest{l, c.store}
			k.follow(t)
			t.Run("chat", k.chat)
			t.Run("again", func(t *testing.T) { l.install(t) })
			t.Run("broken", k.broken)
		})
	}
	l.clean(t)
}

type keyTest struct {
	*lab
	store string
}

// llmbox runs a command on the lab's box.
func (k keyTest) llmbox(t *testing.T, code int, args ...string) result {
	t.Helper()
	res := k.run(t, quickBound, append(args, "--kubeconfig", k.Kubeconfig)...)
	if res.code != code {
		t.Fatalf("llmbox %s: want exit %d: %s", strings.Join(args, " "), code, res)
	}
	return res
}

// status is how the gateway answers a request with a key, or without any.
func (k keyTest) status(t *testing.T, key string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/v1/models", k.GatewayPort), nil)
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

// secret is what the gateway reads.
func (k keyTest) secret(t *testing.T) map[string]string {
	t.Helper()
	secret, err := k.client.Kube.CoreV1().Secrets("llm").Get(t.Context(), "gateway-keys", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for client, key := range secret.Data {
		out[client] = string(key)
	}
	return out
}

// clients are the rows of keys list.
func (k keyTest) clients(t *testing.T) []string {
	t.Helper()
	res := k.llmbox(t, 0, "keys", "list", "--output", "json")
	var doc struct {
		Store string
		Keys  []struct {
			Name, State string
			EndsWith    string `json:"ends_with"`
			Made        *time.Time
		}
	}
	if err := json.Unmarshal([]byte(res.stdout), &doc); err != nil {
		t.Fatal(err)
	}
	if doc.Store != k.store {
		t.Errorf("the keys are kept in %q, want %q", doc.Store, k.store)
	}
	have := k.secret(t)
	names := []string{}
	for _, row := range doc.Keys {
		names = append(names, row.Name)
		if row.State != "active" || !strings.HasSuffix(have[row.Name], row.EndsWith) || len(row.EndsWith) != 4 {
			t.Errorf("row %+v", row)
		}
		if row.Name == "ci" && (row.Made == nil || time.Since(*row.Made) > time.Hour) {
			t.Errorf("client ci's key was made at %v", row.Made)
		}
		if strings.Contains(res.stdout+res.stderr, have[row.Name]) {
			t.Errorf("the list shows the key of %s", row.Name)
		}
	}
	return names
}

func (k keyTest) follow(t *testing.T) {
	own := k.secret(t)["default"]
	for key, want := range map[string]int{own: 200, "": 401, "sk-llmbox-wrong": 401, own + "x": 401} {
		if got := k.status(t, key); got != want {
			t.Errorf("a request with %d characters of key: HTTP %d, want %d", len(key), got, want)
		}
	}

	created := k.llmbox(t, 0, "keys", "create", "ci")
	key := strings.TrimSuffix(created.stdout, "\n")
	if !regexp.MustCompile(`^sk-llmbox-[0-9A-Za-z]{40}$`).MatchString(key) {
		t.Fatalf("stdout is not the key alone: %s", created)
	}
	if got := k.status(t, key); got != 200 {
		t.Errorf("a new key: HTTP %d right after the command", got)
	}
	if !strings.Contains(created.stderr, "The gateway takes it") || strings.Contains(created.stderr, key) {
		t.Errorf("stderr: %s", created.stderr)
	}
	t.Logf("creating took %s: %s", created.took, created.stderr)
	k.llmbox(t, exitUsage, "keys", "create", "ci")
	if got := k.clients(t); !slices.Equal(got, []string{"ci", "default"}) {
		t.Errorf("clients are %v", got)
	}

	k.llmbox(t, exitUsage, "keys", "revoke", "ci") // there is nobody to ask
	k.llmbox(t, exitUsage, "keys", "revoke", "stranger", "--yes")
	k.llmbox(t, exitUsage, "keys", "revoke", "default", "--yes")
	if got := k.status(t, key); got != 200 {
		t.Errorf("after three refused revocations: HTTP %d", got)
	}
	revoked := k.llmbox(t, 0, "keys", "revoke", "ci", "--yes")
	if got := k.status(t, key); got != 401 {
		t.Errorf("a revoked key: HTTP %d right after the command", got)
	}
	t.Logf("revoking took %s: %s", revoked.took, revoked.stderr)
	if got := k.status(t, own); got != 200 {
		t.Errorf("the other key: HTTP %d", got)
	}

	k.llmbox(t, 0, "keys", "revoke", "default", "--yes", "--force")
	if got := k.secret(t); len(got) != 0 {
		t.Errorf("after the last key the Secret still holds those of %d clients", len(got))
	}
	if got := k.status(t, own); got != 401 {
		t.Errorf("the last key, revoked: HTTP %d", got)
	}
	if got := k.clients(t); len(got) != 0 {
		t.Errorf("clients are %v", got)
	}
	if res := k.llmbox(t, 1, "chat", "hi"); !strings.Contains(res.stderr, "llmbox keys create default") {
		t.Errorf("chat without a key: %s", res)
	}

	anew := k.llmbox(t, 0, "keys", "create", "default", "--output", "json")
	var doc struct{ Name, Key string }
	if err := json.Unmarshal([]byte(anew.stdout), &doc); err != nil || doc.Name != "default" || k.status(t, doc.Key) != 200 {
		t.Errorf("the box's own key anew: %v, %s", err, anew.stderr)
	}
	if got := k.status(t, key); got != 401 {
		t.Errorf("a revoked key came back: HTTP %d", got)
	}
	k.unseen(t, own, key, doc.Key)
}

// unseen looks for keys where none belongs: in events, and in objects that are no
// Secrets.
func (k keyTest) unseen(t *testing.T, keys ...string) {
	t.Helper()
	list, err := k.client.Kube.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	maps, err := k.client.Kube.CoreV1().ConfigMaps("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal([]any{list, maps})
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if strings.Contains(string(raw), key) {
			t.Error("a key can be seen in an event or a ConfigMap")
		}
	}
}

func (k keyTest) chat(t *testing.T) {
	const answer = "This answer is simulated by the rehearsal ."
	plain := k.llmbox(t, 0, "chat", "hello", "there")
	if strings.TrimSpace(plain.stdout) != answer || plain.stderr != "" {
		t.Errorf("chat: %s", plain)
	}
	short := k.llmbox(t, 0, "chat", "--max-tokens", "3", "--system", "Be brief.", "--temperature", "0", "--output", "json", "hello")
	var doc struct {
		Content, Model string
		Usage          struct {
			CompletionTokens int64 `json:"completion_tokens"`
		}
		First *int64 `json:"time_to_first_token_ms"`
	}
	if err := json.Unmarshal([]byte(short.stdout), &doc); err != nil || strings.TrimSpace(doc.Content) != "This answer is" ||
		doc.Model == "" || doc.Usage.CompletionTokens != 3 || doc.First == nil {
		t.Errorf("%+v, %v: %s", doc, err, short)
	}
	ctx, cancel := context.WithTimeout(t.Context(), quickBound)
	defer cancel()
	piped := k.command(ctx, "chat", "--kubeconfig", k.Kubeconfig)
	piped.Stdin = strings.NewReader("from a pipe\n")
	if res := finish(t, ctx, piped, quickBound); res.code != 0 || strings.TrimSpace(res.stdout) != answer {
		t.Errorf("chat from a pipe: %s", res)
	}

	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte("sk-llmbox-wrong\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if res := k.llmbox(t, exitUsage, "chat", "hi", "--key-file", file); !strings.Contains(res.stderr, "does not take the key") ||
		strings.Contains(res.stderr, "sk-llmbox-wrong") {
		t.Errorf("a wrong key: %s", res)
	}
	if res := k.llmbox(t, exitUsage, "chat", "hi", "--model", "acme/none"); !strings.Contains(res.stderr, "does not exist") {
		t.Errorf("a model that is not served: %s", res)
	}
	k.interruptedChat(t)
}

// broken takes the model and then its route away: chat says which it is, and a key is
// taken and refused as before where the gateway still has a route.
func (k keyTest) broken(t *testing.T) {
	deployments := k.client.Kube.AppsV1().Deployments("llm")
	none := []byte(`{"spec":{"replicas":0}}`)
	if _, err := deployments.Patch(t.Context(), "model-server", types.MergePatchType, none, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	own := k.secret(t)["default"]
	k.until(t, own, http.StatusServiceUnavailable)
	if res := k.llmbox(t, exitNotReady, "chat", "hi"); !strings.Contains(res.stderr, "no model server is ready") || !strings.Contains(res.stderr, "llmbox status") {
		t.Errorf("chat without a model server: %s", res)
	}
	if res := k.llmbox(t, 0, "keys", "create", "early"); !strings.Contains(res.stderr, "HTTP 503") {
		t.Errorf("a key without a model server: %s", res)
	}
	k.llmbox(t, 0, "keys", "revoke", "early", "--yes")

	routes := schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "httproutes"}
	if err := k.client.Dynamic.Resource(routes).Namespace("llm").Delete(t.Context(), "openai", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	k.until(t, own, http.StatusNotFound)
	if res := k.llmbox(t, exitNotReady, "chat", "hi"); !strings.Contains(res.stderr, "no route to a model") {
		t.Errorf("chat without a route: %s", res)
	}
	late := k.llmbox(t, exitNotReady, "keys", "create", "late", "--timeout", "2s")
	if !strings.HasPrefix(late.stdout, "sk-llmbox-") || !strings.Contains(late.stderr, "HTTP 404") || !strings.Contains(late.stderr, "the key is stored") {
		t.Errorf("a key without a route: %s", late)
	}
}

// until waits for an answer of the gateway.
func (k keyTest) until(t *testing.T, key string, want int) {
	t.Helper()
	for deadline := time.Now().Add(quickBound); k.status(t, key) != want; time.Sleep(200 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the gateway does not come to answer %d", want)
		}
	}
}

// interruptedChat presses Ctrl-C while the prompt is still awaited.
func (k keyTest) interruptedChat(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), quickBound)
	defer cancel()
	cmd := k.command(ctx, "chat", "--kubeconfig", k.Kubeconfig)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	time.AfterFunc(3*time.Second, func() {
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("interrupting: %v", err)
		}
	})
	if res := finish(t, ctx, cmd, quickBound); res.code != exitInterrupted {
		t.Errorf("Ctrl-C: %s", res)
	}
}
