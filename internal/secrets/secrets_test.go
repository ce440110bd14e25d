package secrets

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/llmbox-dev/llmbox/internal/cluster"
)

func getOptions() metav1.GetOptions { return metav1.GetOptions{} }

func tokenFile(t *testing.T, content string) string {
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReadTokenFile(t *testing.T) {
	raw, err := os.ReadFile("testdata/token-files.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct{ Name, Content, Token, Problem string }
	if err := json.Unmarshal(raw, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			path := tokenFile(t, c.Content)
			token, err := ReadTokenFile(path)
			var refused *TokenFileError
			switch {
			case c.Problem == "" && (err != nil || token != c.Token):
				t.Errorf("got %q, %v", token, err)
			case c.Problem != "" && (!errors.As(err, &refused) || refused.Problem != c.Problem || refused.Path != path || token != ""):
				t.Errorf("got %q, %v, want %q", token, err, c.Problem)
			case err != nil && (strings.Contains(err.Error(), "hf_example") || strings.Contains(refused.Fix(), "hf_example")):
				t.Errorf("the token can be seen: %v", err)
			}
		})
	}
	if _, err := ReadTokenFile(tokenFile(t, strings.Repeat("x", 5000))); err == nil {
		t.Error("took a long file")
	}
	if _, err := ReadTokenFile(filepath.Join(t.TempDir(), "absent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an absent file: %v", err)
	}
}

func TestRandomText(t *testing.T) {
	seen, letters := map[string]bool{}, map[rune]bool{}
	for range 200 {
		text, err := randomText(gatewayKeyChars)
		if err != nil || !regexp.MustCompile(`^[0-9A-Za-z]{40}$`).MatchString(text) || seen[text] {
			t.Fatalf("%q, %v", text, err)
		}
		seen[text] = true
		for _, r := range text {
			letters[r] = true
		}
	}
	if len(letters) != len(base62) {
		t.Errorf("only %d characters are ever drawn", len(letters))
	}
}

func TestEnsureBoxSecrets(t *testing.T) {
	api := newFakeAPI(t)
	if _, err := GatewayKey(t.Context(), api.kube(), ""); !errors.Is(err, ErrNoKey) {
		t.Errorf("before: %v", err)
	}
	file := tokenFile(t, "hf_first\n")
	if err := EnsureBoxSecrets(t.Context(), api.kube(), BoxSecrets{HFTokenFile: file}); err != nil {
		t.Fatal(err)
	}
	if api.data("llm", "gateway-keys") != nil || api.data("monitoring", "grafana-admin") != nil {
		t.Error("made what was not asked for")
	}
	all := BoxSecrets{Grafana: true, GatewayKeys: true, HFTokenFile: file}
	var wait sync.WaitGroup
	for range 8 {
		wait.Go(func() {
			if err := EnsureBoxSecrets(t.Context(), api.kube(), all); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	keys, grafana := api.data("llm", "gateway-keys"), api.data("monitoring", "grafana-admin")
	if len(keys) != 1 || !regexp.MustCompile(`^sk-llmbox-[0-9A-Za-z]{40}$`).MatchString(keys["default"]) {
		t.Errorf("gateway keys: %v", keys)
	}
	if grafana["admin-user"] != "admin" || len(grafana["admin-password"]) != passwordChars {
		t.Errorf("grafana: %v", grafana)
	}
	if key, err := GatewayKey(t.Context(), api.kube(), ""); err != nil || key != keys["default"] {
		t.Errorf("the key: %q, %v", key, err)
	}
	if _, err := GatewayKey(t.Context(), api.kube(), "stranger"); !errors.Is(err, ErrNoKey) {
		t.Errorf("a stranger's key: %v", err)
	}
	secret, err := api.kube().CoreV1().Secrets("llm").Get(t.Context(), "hf-token", getOptions())
	if err != nil || secret.Labels[cluster.ManagedByLabel] != "llmbox" || secret.Labels[cluster.PartOfLabel] != "llmbox" {
		t.Errorf("labels: %v, %v", secret.Labels, err)
	}
	// Another token, and keys that a person changed.
	if err := os.WriteFile(file, []byte("hf_second"), 0o600); err != nil {
		t.Fatal(err)
	}
	secret, err = api.kube().CoreV1().Secrets("llm").Get(t.Context(), "gateway-keys", getOptions())
	if err != nil {
		t.Fatal(err)
	}
	secret.Data = map[string][]byte{"team": []byte("sk-own")}
	if _, err := api.kube().CoreV1().Secrets("llm").Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	before := len(api.log)
	for range 2 {
		if err := EnsureBoxSecrets(t.Context(), api.kube(), all); err != nil {
			t.Fatal(err)
		}
	}
	writes := slices.DeleteFunc(slices.Clone(api.log[before:]), func(l string) bool { return strings.HasPrefix(l, "GET ") })
	if want := []string{"PUT /api/v1/namespaces/llm/secrets/hf-token?fieldManager=llmbox"}; !reflect.DeepEqual(writes, want) {
		t.Errorf("wrote %v, want %v", writes, want)
	}
	if got := api.data("llm", "hf-token")["token"]; got != "hf_second" {
		t.Errorf("the token is %q", got)
	}
	if got := api.data("llm", "gateway-keys"); !maps.Equal(got, map[string]string{"team": "sk-own"}) {
		t.Errorf("a person's keys became %v", got)
	}
	if got := api.data("monitoring", "grafana-admin"); !maps.Equal(got, grafana) {
		t.Error("the password changed")
	}
}

// newBox has the box's own secrets and a Vault nobody has touched.
func newBox(t *testing.T) *fakeAPI {
	api := newFakeAPI(t)
	if err := EnsureBoxSecrets(t.Context(), api.kube(), BoxSecrets{GatewayKeys: true, HFTokenFile: tokenFile(t, "hf_first-token-of-the-box")}); err != nil {
		t.Fatal(err)
	}
	api.hide(api.data("llm", "gateway-keys")["default"])
	api.hide(api.data("llm", "hf-token")["token"])
	api.log = nil
	return api
}

// converged checks everything that SetUp promises.
func converged(t *testing.T, api *fakeAPI) {
	t.Helper()
	vault := api.vault
	if !vault.initialised || vault.sealed {
		t.Errorf("initialised %v, sealed %v", vault.initialised, vault.sealed)
	}
	if got := api.data("vault", "vault-unseal")["unseal-key"]; got != vault.key {
		t.Errorf("the kept key %q does not open it", got)
	}
	if got := api.data("vault", "vault-bootstrap"); got != nil {
		t.Error("the bootstrap Secret is still there")
	}
	for token, policies := range vault.tokens {
		if slices.Contains(policies, "root") {
			t.Errorf("root token %s lives", token)
		}
	}
	for _, name := range []string{"gateway-keys", "hf-token"} {
		want := map[string]any{}
		for key, value := range api.data("llm", name) {
			want[key] = value
		}
		if entry := vault.kv["llmbox/data/"+name]; entry == nil || !reflect.DeepEqual(entry.data, want) || entry.version != 1 {
			t.Errorf("KV entry %s: %+v", name, entry)
		}
	}
	device, _ := vault.tables["audit"]["file/"]["options"].(map[string]any)
	if device["file_path"] != "stdout" {
		t.Errorf("audit device: %v", device)
	}
	role := vault.written["auth/kubernetes/role/external-secrets"]
	if role["audience"] != "vault" || !reflect.DeepEqual(role["bound_service_account_namespaces"], []any{"external-secrets"}) {
		t.Errorf("role: %v", role)
	}
	if policy := vault.written["sys/policies/acl/external-secrets"]["policy"]; policy != `path "llmbox/data/*" { capabilities = ["read"] }` {
		t.Errorf("policy: %v", policy)
	}
	if ready, waiting, by, err := api.run(VaultOptions{}).Ready(t.Context()); !ready || waiting != "" || err != nil || !slices.Equal(by, []string{"test/fakevault"}) {
		t.Errorf("Ready: %v, %q, %v, %v", ready, waiting, by, err)
	}
	api.silent("")
}

func TestSetUp(t *testing.T) {
	api := newBox(t)
	if err := api.run(VaultOptions{}).SetUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	converged(t, api)
	writes := 0
	api.log = nil
	if err := api.run(VaultOptions{}).SetUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, line := range api.log {
		// Only the login writes: two tokens, one back.
		if !strings.HasPrefix(line, "GET ") {
			writes++
		}
	}
	if writes != 3 {
		t.Errorf("the second run wrote:\n%s", strings.Join(api.log, "\n"))
	}
	converged(t, api)
}

// told is the version of the key that a pod was told of.
func told(api *fakeAPI, pod string) string {
	meta, _ := api.objects[objectPath("pods", vaultNamespace, pod)]["metadata"].(map[string]any)
	notes, _ := meta["annotations"].(map[string]any)
	note, _ := notes[unsealKeyAnnotation].(string)
	return note
}

func unsealerKnows(t *testing.T, api *fakeAPI) {
	t.Helper()
	kept, _ := api.objects[objectPath("secrets", vaultNamespace, unsealName)]["metadata"].(map[string]any)
	if got := told(api, unsealerPod); got == "" || got != kept["resourceVersion"] {
		t.Errorf("the unsealer's pod was told %q, the Secret is %v", got, kept["resourceVersion"])
	}
}

// The unsealer's pod is told of a new key, so that kubelet brings it at once; of that pod
// nothing else is changed, and a pod that can't be changed stops nothing.
func TestUnsealerIsTold(t *testing.T) {
	api := newBox(t)
	if err := api.run(VaultOptions{}).SetUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	unsealerKnows(t, api)
	if got := told(api, vaultPod); got != "" {
		t.Errorf("Vault's own pod was told %q", got)
	}
	patches := 0
	for _, line := range api.log {
		if strings.HasPrefix(line, "PATCH ") {
			patches++
		}
	}
	if patches != 1 {
		t.Errorf("%d patches, want one:\n%s", patches, strings.Join(api.log, "\n"))
	}

	refusing := newBox(t)
	refusing.refuses = unsealerPod
	if err := refusing.run(VaultOptions{}).SetUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	converged(t, refusing)
	if got := told(refusing, unsealerPod); got != "" {
		t.Errorf("the refusal did not happen: %q", got)
	}
}

// TestSetUpKilled stops a run at each of its requests, before and after the
// server carried it out, and runs again.
func TestSetUpKilled(t *testing.T) {
	clean := newBox(t)
	if err := clean.run(VaultOptions{}).SetUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	total := len(clean.log)
	var lost []string
	for n := 1; n <= total; n++ {
		for _, answered := range []bool{false, true} {
			at := clean.log[n-1] + map[bool]string{false: " (not carried out)", true: " (answer lost)"}[answered]
			api := newBox(t)
			// The client must not go on asking, as it would in a living process.
			ctx, cancel := context.WithCancel(t.Context())
			api.cut, api.answered, api.killed = n, answered, cancel
			if err := api.run(VaultOptions{}).SetUp(ctx); err != nil {
				api.silent(err.Error())
			} else if !strings.Contains(at, "revoke-self") {
				t.Errorf("%s: no error", at)
			}
			api.cut = 0
			err := api.run(VaultOptions{}).SetUp(t.Context())
			var keys *LostKeysError
			if errors.As(err, &keys) {
				lost = append(lost, at)
				if !keys.Empty || !strings.Contains(keys.Fix(), "delete pvc data-vault-0") {
					t.Errorf("%s: %+v, %s", at, keys, keys.Fix())
				}
				if err := api.run(VaultOptions{}).DiscardEmpty(t.Context()); err != nil {
					t.Errorf("%s: discarding: %v", at, err)
				}
				err = api.run(VaultOptions{}).SetUp(t.Context())
			}
			if err != nil {
				t.Errorf("%s: the next run: %v", at, err)
				continue
			}
			converged(t, api)
			unsealerKnows(t, api)
		}
	}
	want := []string{
		"PUT " + vaultProxyPath + "sys/init (answer lost)",
		"PUT /api/v1/namespaces/vault/secrets/vault-bootstrap?fieldManager=llmbox (not carried out)",
	}
	if !slices.Equal(lost, want) {
		t.Errorf("keys were lost at %v, want %v", lost, want)
	}
}

func TestSetUpLater(t *testing.T) {
	api := newBox(t)
	if err := api.run(VaultOptions{}).SetUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	api.restart() // sealed again
	keys := map[string]any{"default": "sk-llmbox-rotated-in-vault"}
	api.vault.kv["llmbox/data/gateway-keys"] = &fakeEntry{data: keys, version: 7}
	api.vault.kv["llmbox/data/hf-token"] = &fakeEntry{version: 2} // deleted
	if err := api.run(VaultOptions{}).SetUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	if entry := api.vault.kv["llmbox/data/gateway-keys"]; entry.version != 7 {
		t.Errorf("KV's keys were overwritten: %+v", entry)
	}
	if entry := api.vault.kv["llmbox/data/hf-token"]; entry.version != 2 {
		t.Errorf("what was deleted came back: %+v", entry)
	}
	if api.vault.sealed {
		t.Error("still sealed")
	}
	opts := VaultOptions{HFTokenFile: tokenFile(t, "hf_second")}
	for range 2 {
		if err := api.run(opts).SetUp(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if entry := api.vault.kv["llmbox/data/hf-token"]; entry.version != 3 || entry.data["token"] != "hf_second" {
		t.Errorf("the token file does not decide: %+v", entry)
	}
}

// A Vault on a new volume is set up anew; the old volume's key is kept.
func TestSetUpOnANewVolume(t *testing.T) {
	api := newBox(t)
	if err := api.run(VaultOptions{}).SetUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	former := api.vault.key
	delete(api.objects, objectPath("persistentvolumeclaims", vaultNamespace, vaultClaim))
	api.restart()
	if err := api.run(VaultOptions{}).SetUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	converged(t, api)
	if got := api.data("vault", "vault-unseal")["former-unseal-key"]; got != former {
		t.Errorf("the former key became %q", got)
	}
}

func TestSetUpRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(api *fakeAPI)
		want    error // nil: a LostKeysError that is not Empty
	}{
		"no pod yet":       {func(api *fakeAPI) { api.proxy = http.StatusServiceUnavailable }, ErrNotAnswering},
		"no right to ask":  {func(api *fakeAPI) { api.proxy = http.StatusForbidden }, cluster.ErrForbidden},
		"somebody else's":  {func(api *fakeAPI) { api.vault.initialise() }, nil},
		"a foreign winner": {func(api *fakeAPI) { api.vault.foreign = true }, nil},
		"the wrong key": {func(api *fakeAPI) {
			api.vault.initialise()
			api.vault.echo = true
			api.create(objectPath("secrets", "vault", "vault-unseal"), map[string]any{
				"metadata": map[string]any{"name": "vault-unseal", "namespace": "vault"},
				"data":     map[string]any{"unseal-key": []byte(api.hide("bm90IHRoaXMgdmF1bHQncyBrZXk="))},
			})
		}, ErrWrongKey},
		"no login": {func(api *fakeAPI) {
			if err := api.run(VaultOptions{}).SetUp(api.t.Context()); err != nil {
				api.t.Fatal(err)
			}
			delete(api.vault.written, "auth/kubernetes/role/llmbox")
		}, ErrNotSetUp},
	} {
		t.Run(name, func(t *testing.T) {
			api := newBox(t)
			c.prepare(api)
			err := api.run(VaultOptions{}).SetUp(t.Context())
			if api.vault.foreign { // the first run only meets the other one
				api.vault.foreign = false
				err = api.run(VaultOptions{}).SetUp(t.Context())
			}
			var lost *LostKeysError
			switch {
			case c.want != nil && !errors.Is(err, c.want):
				t.Fatalf("got %v, want %v", err, c.want)
			case c.want == nil && (!errors.As(err, &lost) || lost.Empty):
				t.Fatalf("got %v", err)
			}
			api.silent(err.Error())
			inits := api.vault.inits
			if err := api.run(VaultOptions{}).DiscardEmpty(t.Context()); err == nil {
				t.Error("discarded a Vault that somebody may need")
			}
			if api.vault.inits != inits || api.objects[objectPath("persistentvolumeclaims", vaultNamespace, vaultClaim)] == nil {
				t.Error("the volume is gone")
			}
		})
	}
}

func TestReadyWaits(t *testing.T) {
	api := newBox(t)
	for _, c := range []struct {
		step func()
		want string
	}{
		{func() { api.proxy = http.StatusServiceUnavailable }, "Vault to answer: "},
		{func() { api.proxy = 0 }, "Vault to be initialised"},
		{func() { api.vault.initialise() }, "Vault to be unsealed"},
		{func() { api.vault.sealed = false }, "ServiceAccount llmbox-system/llmbox to be created"},
		{func() { api.put("serviceaccounts", "llmbox-system", "llmbox") }, "Vault's Kubernetes login to be set up"},
	} {
		c.step()
		ready, waiting, _, err := api.run(VaultOptions{}).Ready(t.Context())
		if ready || err != nil || !strings.HasPrefix(waiting, c.want) {
			t.Errorf("got %v, %q, %v, want %q", ready, waiting, err, c.want)
		}
		api.silent(waiting)
	}
	api.proxy = http.StatusForbidden
	if _, _, _, err := api.run(VaultOptions{}).Ready(t.Context()); !errors.Is(err, cluster.ErrForbidden) {
		t.Errorf("got %v", err)
	}
}
