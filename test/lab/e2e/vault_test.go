package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// unsealWithin is for a new pod on a busy machine, and for the unsealer's next look.
	unsealWithin = 2 * time.Minute
	kvValue      = "kept-over-restarts-4711"
)

// A box with Vault alone, on Vault's own core: what llmbox sets up, that the unsealer
// opens a Vault that was started anew, and that what is in it stays.
func TestVaultOnARealNode(t *testing.T) {
	onlyWhereAsked(t, false)
	bin := binDir(t)
	if _, err := os.Stat(filepath.Join(bin, "lab", "vault-on-core")); err != nil {
		t.Skipf("%v: run `make lab-node-full` first", err)
	}
	for _, storage := range []string{"file", "raft"} {
		t.Run(storage, func(t *testing.T) { vaultOn(t, bin, storage) })
	}
}

func vaultOn(t *testing.T, bin, storage string) {
	lab := startLab(t, bin)
	v := vaultBox{t: t, clients: lab.client(t), root: make(chan string, 1), storage: storage}
	watching, stop := context.WithCancel(t.Context())
	defer stop()
	v.catchRootToken(watching)

	box := boxFile(t, lab.Hub)
	raw, err := os.ReadFile(box)
	must(t, err)
	must(t, os.WriteFile(box, fmt.Appendf(raw, "  vault: {values: {storage: {type: %s}}}\n", storage), 0o600))
	flags := []string{"--kubeconfig", lab.Kubeconfig, "--config", box, "--yes",
		"--without", "policies,kyverno,keda,autoscale,prometheus,external-secrets,envoy-gateway,route,model,weights"}
	v.install = func(t *testing.T) string {
		return run(t, installWithin, filepath.Join(bin, "llmbox"), append([]string{"install"}, flags...)...)
	}
	t.Log(v.install(t))

	t.Run("it is initialised and open", v.sub(vaultBox.isOpen))
	t.Run("the unsealer has the key at once", func(t *testing.T) { v.with(t).unsealerHasKey(bin, lab) })
	t.Run("its root token is revoked", v.sub(vaultBox.rootTokenIsRevoked))
	t.Run("the box's own login writes and reads", v.sub(vaultBox.ownLogin))
	t.Run("the login of External Secrets reads only", v.sub(vaultBox.externalSecretsLogin))
	t.Run("the audit is in the pod's log, without secrets", v.sub(vaultBox.auditInTheLog))
	t.Run("working sets stay below the requests", v.sub(vaultBox.workingSets))
	t.Run("a second install changes nothing", v.sub(vaultBox.secondInstall))
	t.Run("a new pod is opened by the unsealer", v.sub(vaultBox.survivesItsPod))
	t.Run("sealed, it says so and stays ready", v.sub(vaultBox.sealedIsSeen))
	t.Run("a key that was lost before anybody used it costs an empty volume", v.sub(vaultBox.startsOver))
	t.Log(run(t, uninstallWithin, filepath.Join(bin, "llmbox"), append([]string{"uninstall"}, flags...)...))
	lab.stop(t)
}

type vaultBox struct {
	clients
	t *testing.T
	// root brings the root token that the installation used.
	root    chan string
	storage string
	install func(*testing.T) string
}

func (v vaultBox) with(t *testing.T) vaultBox {
	v.t = t
	return v
}

func (v vaultBox) sub(f func(vaultBox)) func(*testing.T) {
	return func(t *testing.T) { f(v.with(t)) }
}

// catchRootToken looks at the Secret in which the token lies while llmbox works.
func (v vaultBox) catchRootToken(ctx context.Context) {
	secrets, err := v.core.Secrets("vault").Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=vault-bootstrap"})
	must(v.t, err)
	go func() {
		defer secrets.Stop()
		for event := range secrets.ResultChan() {
			if s, ok := event.Object.(*corev1.Secret); ok && len(s.Data["root-token"]) > 0 {
				v.root <- string(s.Data["root-token"])
				return
			}
		}
	}()
}

// call asks Vault through the API server; the status is Vault's.
func (v vaultBox) call(method, path, token string, in, out any) (int, error) {
	path, query, _ := strings.Cut(path, "?")
	req := v.core.RESTClient().Verb(method).Namespace("vault").Resource("services").Name("http:vault:8200").
		SubResource("proxy").Suffix("v1/" + path)
	if name, value, ok := strings.Cut(query, "="); ok {
		req = req.Param(name, value)
	}
	if token != "" {
		req = req.SetHeader("X-Vault-Token", token)
	}
	if in != nil {
		body, err := json.Marshal(in)
		if err != nil {
			return 0, err
		}
		req = req.Body(body).SetHeader("Content-Type", "application/json")
	}
	status := 0
	result := req.Do(v.t.Context()).StatusCode(&status)
	raw, err := result.Raw()
	if err != nil {
		return status, fmt.Errorf("%w: %s", err, raw)
	}
	switch out := out.(type) {
	case nil:
		return status, nil
	case *string:
		*out = string(raw)
		return status, nil
	default:
		return status, json.Unmarshal(raw, out)
	}
}

type sealed struct {
	Type        string `json:"type"`
	Initialized bool   `json:"initialized"`
	Sealed      bool   `json:"sealed"`
	Version     string `json:"version"`
	Storage     string `json:"storage_type"`
}

func (v vaultBox) isOpen() {
	var s sealed
	_, err := v.call(http.MethodGet, "sys/seal-status", "", nil, &s)
	must(v.t, err)
	v.t.Logf("Vault's core %s", s.Version)
	if !s.Initialized || s.Sealed || s.Type != "shamir" || s.Storage != v.storage || s.Version == "" {
		v.t.Errorf("the seal's status is %+v", s)
	}
	key, err := v.core.Secrets("vault").Get(v.t.Context(), "vault-unseal", metav1.GetOptions{})
	must(v.t, err)
	if len(key.Data["unseal-key"]) == 0 {
		v.t.Error("there is no key for the unsealer")
	}
	if got := v.metric(); got != "1" {
		v.t.Errorf("vault_core_unsealed is %q", got)
	}
}

// unsealerHasKey looks at the unsealer's volume as kubelet has it on the node's disk; by
// itself kubelet would come to it after a minute or more.
func (v vaultBox) unsealerHasKey(bin string, lab *lab) {
	began := time.Now()
	pod := v.pod("app.kubernetes.io/component=unsealer")
	path := "/var/lib/kubelet/pods/" + string(pod.UID) + "/volumes/kubernetes.io~secret/unseal/unseal-key"
	for {
		out := run(v.t, time.Minute, filepath.Join(bin, "llmbox-lab"), "exec", "--dir", lab.Dir, "--root", "--", "sh", "-c",
			"test -s "+path+" && echo there || echo missing")
		if strings.HasSuffix(strings.TrimSpace(out), "there") {
			v.t.Logf("there %s after llmbox had ended", time.Since(began).Round(10*time.Millisecond))
			return
		}
		if time.Since(began) > 5*time.Second {
			v.t.Fatalf("the unsealer has no key: %s", out)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

func (v vaultBox) rootTokenIsRevoked() {
	var token string
	select {
	case token = <-v.root:
	case <-time.After(10 * time.Second):
		v.t.Fatal("no root token was seen during the installation")
	}
	status, err := v.call(http.MethodGet, "auth/token/lookup-self", token, nil, nil)
	if status != http.StatusForbidden {
		v.t.Errorf("Vault answers the root token with %d, %v", status, err)
	}
	_, err = v.core.Secrets("vault").Get(v.t.Context(), "vault-bootstrap", metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		v.t.Errorf("Secret vault-bootstrap is still there: %v", err)
	}
}

// login shows Vault a token of a ServiceAccount; Vault asks the real API server about it.
func (v vaultBox) login(namespace, account, audience string) (string, int, error) {
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: []string{audience}}}
	jwt, err := v.core.ServiceAccounts(namespace).CreateToken(v.t.Context(), account, request, metav1.CreateOptions{})
	must(v.t, err)
	var answer struct {
		Auth struct {
			Token string `json:"client_token"`
		} `json:"auth"`
	}
	status, err := v.call(http.MethodPost, "auth/kubernetes/login", "", map[string]string{"role": account, "jwt": jwt.Status.Token}, &answer)
	return answer.Auth.Token, status, err
}

func (v vaultBox) ownLogin() {
	token, _, err := v.login("llmbox-system", "llmbox", "vault")
	must(v.t, err)
	_, err = v.call(http.MethodPost, "llmbox/data/proof", token, map[string]any{"data": map[string]string{"value": kvValue}}, nil)
	must(v.t, err)
	v.kvIsThere(token)
	for path, method := range map[string]string{"sys/mounts": http.MethodGet, "sys/policies/acl/llmbox": http.MethodGet, "sys/seal": http.MethodPut} {
		if status, err := v.call(method, path, token, nil, nil); status != http.StatusForbidden {
			v.t.Errorf("%s %s is answered with %d, %v", method, path, status, err)
		}
	}
	if _, status, err := v.login("llmbox-system", "llmbox", "somebody-else"); status != http.StatusForbidden {
		v.t.Errorf("a token for another audience is answered with %d, %v", status, err)
	}
}

func (v vaultBox) kvIsThere(token string) {
	v.t.Helper()
	var entry struct {
		Data struct {
			Data     map[string]string `json:"data"`
			Metadata struct {
				Version int `json:"version"`
			} `json:"metadata"`
		} `json:"data"`
	}
	_, err := v.call(http.MethodGet, "llmbox/data/proof", token, nil, &entry)
	must(v.t, err)
	if entry.Data.Data["value"] != kvValue || entry.Data.Metadata.Version != 1 {
		v.t.Errorf("KV holds %+v", entry.Data)
	}
}

func (v vaultBox) externalSecretsLogin() {
	const name = "external-secrets"
	_, err := v.core.Namespaces().Create(v.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		v.t.Fatal(err)
	}
	_, err = v.core.ServiceAccounts(name).Create(v.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	must(v.t, err)
	token, _, err := v.login(name, name, "vault")
	must(v.t, err)
	v.kvIsThere(token)
	if status, err := v.call(http.MethodPost, "llmbox/data/proof", token, map[string]any{"data": map[string]string{"value": "x"}}, nil); status != http.StatusForbidden {
		v.t.Errorf("writing is answered with %d, %v", status, err)
	}
}

// auditInTheLog reads what `kubectl logs` would show.
func (v vaultBox) auditInTheLog() {
	raw, err := v.core.Pods("vault").GetLogs("vault-0", &corev1.PodLogOptions{}).DoRaw(v.t.Context())
	must(v.t, err)
	logins, entries := 0, 0
	for line := range strings.Lines(string(raw)) {
		var entry struct {
			Type    string `json:"type"`
			Request struct {
				Path string `json:"path"`
			} `json:"request"`
		}
		if json.Unmarshal([]byte(line), &entry) != nil || entry.Type == "" {
			continue
		}
		entries++
		if entry.Type == "response" && entry.Request.Path == "auth/kubernetes/login" {
			logins++
		}
	}
	v.t.Logf("%d audit entries, %d of them answers to a login", entries, logins)
	if logins < 2 {
		v.t.Errorf("the log holds no audit of the logins:\n%s", raw)
	}
	if strings.Contains(string(raw), kvValue) {
		v.t.Error("the log holds a secret's value")
	}
}

// metric is the value of vault_core_unsealed, empty if Vault has none. A second series
// would be an alert for a Vault that is open.
func (v vaultBox) metric() string {
	v.t.Helper()
	var page string
	_, err := v.call(http.MethodGet, "sys/metrics?format=prometheus", "", nil, &page)
	must(v.t, err)
	if !strings.Contains(page, "vault_runtime_alloc_bytes") {
		v.t.Errorf("these are no metrics of Vault: %.200s", page)
	}
	var values []string
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "vault_core_unsealed") {
			fields := strings.Fields(line)
			values = append(values, fields[len(fields)-1])
		}
	}
	return strings.Join(values, " and ")
}

func (v vaultBox) pod(selector string) corev1.Pod {
	v.t.Helper()
	pods, err := v.core.Pods("vault").List(v.t.Context(), metav1.ListOptions{LabelSelector: selector})
	must(v.t, err)
	for _, p := range pods.Items {
		if p.DeletionTimestamp == nil {
			return p
		}
	}
	return corev1.Pod{}
}

// renew deletes the pod and waits until the next one answers as wanted.
func (v vaultBox) renew(wantSealed bool) {
	v.t.Helper()
	old := v.pod("app.kubernetes.io/component=server").UID
	began := time.Now()
	must(v.t, v.core.Pods("vault").Delete(v.t.Context(), "vault-0", metav1.DeleteOptions{}))
	v.await(func() error {
		p := v.pod("app.kubernetes.io/component=server")
		if p.UID == old || p.UID == types.UID("") || !ready(p) {
			return errors.New("the new pod is not ready")
		}
		return v.isSealed(wantSealed)
	})
	v.t.Logf("a new pod, sealed: %v, after %s", wantSealed, time.Since(began).Round(100*time.Millisecond))
}

func ready(p corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func (v vaultBox) isSealed(want bool) error {
	var s sealed
	if _, err := v.call(http.MethodGet, "sys/seal-status", "", nil, &s); err != nil {
		return err
	}
	if !s.Initialized || s.Sealed != want {
		return fmt.Errorf("the seal's status is %+v", s)
	}
	return nil
}

func (v vaultBox) await(check func() error) {
	v.t.Helper()
	deadline := time.Now().Add(unsealWithin)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			v.t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

func (v vaultBox) secondInstall() {
	before := v.pod("app.kubernetes.io/component=server").UID
	v.install(v.t)
	if now := v.pod("app.kubernetes.io/component=server").UID; now != before {
		v.t.Errorf("the pod %s was replaced by %s", before, now)
	}
}

// survivesItsPod starts Vault anew twice.
func (v vaultBox) survivesItsPod() {
	for range 2 {
		v.renew(false)
		v.stillServes()
	}
	raw, err := v.core.Pods("vault").GetLogs(v.pod("app.kubernetes.io/component=unsealer").Name, &corev1.PodLogOptions{}).DoRaw(v.t.Context())
	must(v.t, err)
	v.t.Logf("the unsealer:\n%s", raw)
}

// stillServes logs in anew: Vault has to work, not only to be open.
func (v vaultBox) stillServes() {
	v.t.Helper()
	var token string
	v.await(func() error {
		var err error
		token, _, err = v.login("llmbox-system", "llmbox", "vault")
		return err
	})
	v.kvIsThere(token)
}

// sealedIsSeen takes the unsealer away: the pod stays ready, as llmbox has to reach it,
// and the metric says 0, which is what the alert looks for.
func (v vaultBox) sealedIsSeen() {
	v.unsealers(0)
	v.renew(true)
	must(v.t, v.isSealed(true))
	if got := v.metric(); got != "0" {
		v.t.Errorf("sealed, vault_core_unsealed is %q", got)
	}
	if p := v.pod("app.kubernetes.io/component=server"); !ready(p) || p.Status.ContainerStatuses[0].RestartCount != 0 {
		v.t.Errorf("sealed, the pod is %+v", p.Status)
	}
	v.unsealers(1)
	v.await(func() error { return v.isSealed(false) })
	v.stillServes()
}

func (v vaultBox) unsealers(n int32) {
	v.t.Helper()
	_, err := v.apps.Deployments("vault").UpdateScale(v.t.Context(), "vault-unsealer",
		&autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Namespace: "vault", Name: "vault-unsealer"}, Spec: autoscalingv1.ScaleSpec{Replicas: n}}, metav1.UpdateOptions{})
	must(v.t, err)
	v.await(func() error {
		if p := v.pod("app.kubernetes.io/component=unsealer"); (p.Name != "") != (n > 0) {
			return fmt.Errorf("the unsealer is not scaled to %d", n)
		}
		return nil
	})
}

// startsOver leaves behind what a run leaves that is killed between Vault's answer and
// the writing of the key: a Vault that nobody can open, and the note on whose volume.
func (v vaultBox) startsOver() {
	ctx := v.t.Context()
	v.unsealers(0)
	v.renew(true)
	claim, err := v.core.PersistentVolumeClaims("vault").Get(ctx, "data-vault-0", metav1.GetOptions{})
	must(v.t, err)
	must(v.t, v.core.Secrets("vault").Delete(ctx, "vault-unseal", metav1.DeleteOptions{}))
	_, err = v.core.Secrets("vault").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
		Name: "vault-bootstrap", Annotations: map[string]string{"llmbox.dev/initialising-claim": string(claim.UID)},
	}}, metav1.CreateOptions{})
	must(v.t, err)
	v.t.Log(v.install(v.t))

	now, err := v.core.PersistentVolumeClaims("vault").Get(ctx, "data-vault-0", metav1.GetOptions{})
	must(v.t, err)
	if now.UID == claim.UID {
		v.t.Error("the volume is the one whose key is lost")
	}
	must(v.t, v.isSealed(false))
	token, _, err := v.login("llmbox-system", "llmbox", "vault")
	must(v.t, err)
	if status, err := v.call(http.MethodGet, "llmbox/data/proof", token, nil, nil); status != http.StatusNotFound {
		v.t.Errorf("the entry of the lost volume is answered with %d, %v", status, err)
	}
	v.unsealers(1)
	v.renew(false)
}

// workingSets are kubelet's own figures; those of Vault are those of the core it has here.
func (v vaultBox) workingSets() {
	nodes, err := v.core.Nodes().List(v.t.Context(), metav1.ListOptions{})
	must(v.t, err)
	raw, err := v.core.RESTClient().Get().Resource("nodes").Name(nodes.Items[0].Name).SubResource("proxy").Suffix("stats/summary").DoRaw(v.t.Context())
	must(v.t, err)
	var summary struct {
		Pods []struct {
			PodRef     struct{ Name, Namespace string }
			Containers []struct {
				Name   string
				Memory struct{ WorkingSetBytes, RSSBytes int64 }
			}
		}
	}
	must(v.t, json.Unmarshal(raw, &summary))
	seen := 0
	for _, p := range summary.Pods {
		if p.PodRef.Namespace != "vault" {
			continue
		}
		pod, err := v.core.Pods("vault").Get(v.t.Context(), p.PodRef.Name, metav1.GetOptions{})
		must(v.t, err)
		for i, c := range p.Containers {
			request := pod.Spec.Containers[i].Resources.Requests.Memory().Value()
			v.t.Logf("%s: working set %.1f MiB, RSS %.1f MiB, request %.1f MiB", c.Name,
				float64(c.Memory.WorkingSetBytes)/(1<<20), float64(c.Memory.RSSBytes)/(1<<20), float64(request)/(1<<20))
			if c.Memory.WorkingSetBytes > request {
				v.t.Errorf("%s has a working set of %d bytes and asks for %d", c.Name, c.Memory.WorkingSetBytes, request)
			}
			seen++
		}
	}
	if seen != 2 {
		v.t.Errorf("kubelet knows the memory of %d containers", seen)
	}
}
