package secrets

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// fakeAPI is the little of an API server that this package asks for: objects
// with resource versions, requested tokens, and the service proxy to a
// fakeVault. It can break off at any request, as a killed process does.
type fakeAPI struct {
	t      *testing.T
	server *httptest.Server
	vault  *fakeVault

	mu       sync.Mutex
	objects  map[string]map[string]any // by path
	serial   int
	log      []string // method and path of each request
	cut      int      // the number of the request that is the last one; 0: none
	killed   func()   // called at that one
	answered bool     // whether that one is carried out before the end
	proxy    int      // status that the proxy answers in Vault's place; 0: none
	syncs    bool     // an External Secrets is at work
	refuses  string   // object whose changes are forbidden
	hidden   []string // everything that must not be seen
}

func newFakeAPI(t *testing.T) *fakeAPI {
	a := &fakeAPI{t: t, objects: map[string]map[string]any{}}
	a.vault = &fakeVault{api: a}
	a.vault.wipe()
	a.put("persistentvolumeclaims", vaultNamespace, vaultClaim)
	a.put("pods", vaultNamespace, vaultPod)
	a.create(objectPath("pods", vaultNamespace, unsealerPod), map[string]any{"metadata": map[string]any{
		"namespace": vaultNamespace, "name": unsealerPod,
		"labels": map[string]any{"app.kubernetes.io/name": "vault", "app.kubernetes.io/component": "unsealer"},
	}})
	a.server = httptest.NewServer(a)
	t.Cleanup(a.server.Close)
	return a
}

func objectPath(resource, namespace, name string) string {
	return "/api/v1/namespaces/" + namespace + "/" + resource + "/" + name
}

func (a *fakeAPI) put(resource, namespace, name string) {
	a.create(objectPath(resource, namespace, name), map[string]any{"metadata": map[string]any{"namespace": namespace, "name": name}})
}

func (a *fakeAPI) create(path string, object map[string]any) {
	a.serial++
	meta, _ := object["metadata"].(map[string]any)
	meta["uid"], meta["resourceVersion"] = fmt.Sprintf("uid-%d", a.serial), fmt.Sprint(a.serial)
	a.objects[path] = object
}

func (a *fakeAPI) config() *rest.Config {
	return &rest.Config{Host: a.server.URL, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}
}

func (a *fakeAPI) kube() kubernetes.Interface {
	kube, err := kubernetes.NewForConfig(a.config())
	if err != nil {
		a.t.Fatal(err)
	}
	return kube
}

// run is one process of llmbox.
func (a *fakeAPI) run(opts VaultOptions) *Vault {
	v, err := newVault(a.config(), a.kube(), opts)
	if err != nil {
		a.t.Fatal(err)
	}
	v.patience, v.interval = time.Second, time.Millisecond
	return v
}

// data is a Secret's content as text; nil if there is none.
func (a *fakeAPI) data(namespace, name string) map[string]string {
	a.t.Helper()
	secret, err := a.kube().CoreV1().Secrets(namespace).Get(a.t.Context(), name, getOptions())
	if err != nil {
		return nil
	}
	out := map[string]string{}
	for key, value := range secret.Data {
		out[key] = string(value)
	}
	return out
}

func (a *fakeAPI) hide(secret string) string {
	a.hidden = append(a.hidden, secret)
	return secret
}

// silent checks that no secret shows in a text or in a request's address.
func (a *fakeAPI) silent(text string) {
	a.t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, secret := range a.hidden {
		if strings.Contains(text, secret) || strings.Contains(strings.Join(a.log, "\n"), secret) {
			a.t.Errorf("a secret can be seen: %s in %q", secret, text)
		}
	}
}

func (a *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.log = append(a.log, r.Method+" "+r.URL.RequestURI())
	if a.cut > 0 && len(a.log) >= a.cut {
		if len(a.log) == a.cut && a.answered {
			a.serve(httptest.NewRecorder(), r)
		}
		a.killed()
		panic(http.ErrAbortHandler)
	}
	a.serve(w, r)
}

func (a *fakeAPI) serve(w http.ResponseWriter, r *http.Request) {
	if path, ok := strings.CutPrefix(r.URL.Path, vaultProxyPath); ok {
		if a.proxy != 0 {
			status(w, a.proxy, map[int]string{http.StatusForbidden: "Forbidden", http.StatusServiceUnavailable: "ServiceUnavailable"}[a.proxy])
			return
		}
		a.vault.serve(w, r, path)
		return
	}
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		a.t.Error(err)
	}
	object := map[string]any{}
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &object); err != nil {
			a.t.Errorf("%s %s: %v", r.Method, r.URL.Path, err)
		}
	}
	meta, _ := object["metadata"].(map[string]any)
	have := a.objects[r.URL.Path]
	switch {
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/namespaces/vault/pods":
		a.list(w, r)
	case a.refuses != "" && r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/"+a.refuses):
		status(w, http.StatusForbidden, "Forbidden")
	case r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/token"):
		account := strings.TrimSuffix(r.URL.Path, "/token")
		if a.objects[account] == nil {
			status(w, http.StatusNotFound, "NotFound")
			return
		}
		a.serial++
		jwt := a.hide(fmt.Sprintf("header.payload-%d.signature", a.serial))
		spec, _ := object["spec"].(map[string]any)
		audiences, _ := spec["audiences"].([]any)
		a.vault.jwts[jwt] = strings.TrimPrefix(account, "/api/v1/namespaces/") + " for " + fmt.Sprint(audiences)
		object["status"] = map[string]any{"token": jwt, "expirationTimestamp": "2100-01-01T00:00:00Z"}
		reply(w, http.StatusCreated, object)
	case r.Method == http.MethodPost:
		path := r.URL.Path + "/" + fmt.Sprint(meta["name"])
		if a.objects[path] != nil {
			status(w, http.StatusConflict, "AlreadyExists")
			return
		}
		a.create(path, object)
		reply(w, http.StatusCreated, object)
	case have == nil:
		status(w, http.StatusNotFound, "NotFound")
	case r.Method == http.MethodGet:
		reply(w, http.StatusOK, have)
	case r.Method == http.MethodPut:
		old, _ := have["metadata"].(map[string]any)
		if meta["resourceVersion"] != nil && meta["resourceVersion"] != old["resourceVersion"] {
			status(w, http.StatusConflict, "Conflict")
			return
		}
		a.create(r.URL.Path, object)
		reply(w, http.StatusOK, object)
	case r.Method == http.MethodPatch:
		old, _ := have["metadata"].(map[string]any)
		notes, _ := meta["annotations"].(map[string]any)
		kept, _ := old["annotations"].(map[string]any)
		meta = maps.Clone(old)
		meta["annotations"] = map[string]any{}
		for _, from := range []map[string]any{kept, notes} {
			maps.Copy(meta["annotations"].(map[string]any), from)
		}
		have = maps.Clone(have)
		have["metadata"] = meta
		a.create(r.URL.Path, have)
		a.sync(r.URL.Path)
		reply(w, http.StatusOK, have)
	case r.Method == http.MethodDelete:
		old, _ := have["metadata"].(map[string]any)
		want, _ := object["preconditions"].(map[string]any)
		if want["uid"] != nil && want["uid"] != old["uid"] {
			status(w, http.StatusConflict, "Conflict")
			return
		}
		delete(a.objects, r.URL.Path)
		if r.URL.Path == objectPath("pods", vaultNamespace, vaultPod) {
			a.restart()
		}
		reply(w, http.StatusOK, map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Success"})
	default:
		a.t.Errorf("unexpected %s %s", r.Method, r.URL.Path)
		status(w, http.StatusMethodNotAllowed, "MethodNotAllowed")
	}
}

// list answers with the pods of Vault's namespace that have the labels asked for.
func (a *fakeAPI) list(w http.ResponseWriter, r *http.Request) {
	items := []any{}
	for _, path := range slices.Sorted(maps.Keys(a.objects)) {
		if !strings.HasPrefix(path, r.URL.Path+"/") {
			continue
		}
		meta, _ := a.objects[path]["metadata"].(map[string]any)
		have, _ := meta["labels"].(map[string]any)
		matches := true
		for want := range strings.SplitSeq(r.URL.Query().Get("labelSelector"), ",") {
			name, value, ok := strings.Cut(want, "=")
			matches = matches && (!ok || have[name] == value)
		}
		if matches {
			items = append(items, a.objects[path])
		}
	}
	reply(w, http.StatusOK, map[string]any{"kind": "PodList", "apiVersion": "v1", "metadata": map[string]any{}, "items": items})
}

const unsealerPod = "vault-unsealer-7d9f"

const externalSecretPath = "/apis/external-secrets.io/v1/namespaces/llm/externalsecrets/gateway-keys"

// sync is what External Secrets does when the ExternalSecret at path changed: with
// deletionPolicy Retain an empty entry leaves the Secret as it is.
func (a *fakeAPI) sync(path string) {
	entry := a.vault.kv["llmbox/data/gateway-keys"]
	if !a.syncs || path != externalSecretPath || entry == nil || len(entry.data) == 0 {
		return
	}
	data := map[string]any{}
	for client, key := range entry.data {
		data[client] = []byte(fmt.Sprint(key))
	}
	meta := map[string]any{"namespace": "llm", "name": "gateway-keys"}
	if old := a.objects[objectPath("secrets", "llm", "gateway-keys")]; old != nil {
		meta = maps.Clone(old["metadata"].(map[string]any))
	}
	a.create(objectPath("secrets", "llm", "gateway-keys"), map[string]any{"metadata": meta, "data": data})
}

// restart is what the StatefulSet does: a new pod, on a new volume if the old
// claim is gone.
func (a *fakeAPI) restart() {
	a.put("pods", vaultNamespace, vaultPod)
	a.vault.sealed = true
	if a.objects[objectPath("persistentvolumeclaims", vaultNamespace, vaultClaim)] == nil {
		a.put("persistentvolumeclaims", vaultNamespace, vaultClaim)
		a.vault.wipe()
	}
}

func reply(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body)
}

func status(w http.ResponseWriter, code int, reason string) {
	reply(w, code, map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code, "message": reason})
}

// fakeVault behaves as Vault does about initialising, sealing, tokens, mounts
// that are there already, policies and versions, for the paths a box uses. It
// encrypts nothing and holds its tokens for ever.
type fakeVault struct {
	api         *fakeAPI
	initialised bool
	sealed      bool
	inits       int
	key         string
	tokens      map[string][]string // token → policies
	tables      map[string]map[string]map[string]any
	written     map[string]map[string]any // config, policies, roles
	kv          map[string]*fakeEntry
	upgrading   bool              // a new KV mount answers 400 once
	jwts        map[string]string // JWT → whose and for whom
	echo        bool              // repeats what it was told in its refusals
	foreign     bool              // somebody else initialises first
}

type fakeEntry struct {
	data    map[string]any
	version int
}

func (v *fakeVault) wipe() {
	v.initialised, v.sealed, v.key = false, true, ""
	v.tokens, v.written, v.kv = map[string][]string{}, map[string]map[string]any{}, map[string]*fakeEntry{}
	v.tables = map[string]map[string]map[string]any{"audit": {}, "mounts": {"sys/": {}}, "auth": {"token/": {}}}
	if v.jwts == nil {
		v.jwts = map[string]string{}
	}
}

func (v *fakeVault) fail(w http.ResponseWriter, code int, messages ...string) {
	if messages == nil {
		messages = []string{}
	}
	reply(w, code, map[string]any{"errors": messages})
}

func (v *fakeVault) initialise() (key, root string) {
	v.inits++
	v.initialised, v.sealed = true, true
	v.key = v.api.hide(fmt.Sprintf("dW5zZWFsLWtleS1udW1iZXI%d=", v.inits))
	root = v.api.hide(fmt.Sprintf("hvs.root-token-number-%d", v.inits))
	v.tokens[root] = []string{"root"}
	return v.key, root
}

func (v *fakeVault) serve(w http.ResponseWriter, r *http.Request, path string) {
	w.Header().Set(simulatedByHeader, "test/fakevault")
	body := map[string]any{}
	if raw, err := io.ReadAll(r.Body); err == nil && len(raw) > 0 {
		if err := json.Unmarshal(raw, &body); err != nil {
			v.fail(w, http.StatusBadRequest, "failed to parse JSON input")
			return
		}
	}
	text := func(name string) string { s, _ := body[name].(string); return s }
	token := r.Header.Get("X-Vault-Token")
	switch {
	case path == "sys/seal-status":
		reply(w, http.StatusOK, map[string]any{"type": "shamir", "initialized": v.initialised, "sealed": v.sealed, "t": 1, "n": 1})
	case path == "sys/init":
		if v.foreign {
			v.initialise()
		}
		if v.initialised {
			v.fail(w, http.StatusBadRequest, "Vault is already initialized")
			return
		}
		key, root := v.initialise()
		reply(w, http.StatusOK, map[string]any{"keys": []string{"hex"}, "keys_base64": []string{key}, "root_token": root})
	case path == "sys/unseal":
		switch {
		case !v.initialised:
			v.fail(w, http.StatusBadRequest, "server is not yet initialized")
		case text("key") != v.key && v.echo:
			v.fail(w, http.StatusBadRequest, "no share "+text("key"))
		case text("key") != v.key:
			v.fail(w, http.StatusBadRequest, "unseal failed, invalid key")
		default:
			v.sealed = false
			reply(w, http.StatusOK, map[string]any{"sealed": false})
		}
	case path == "sys/health":
		code := map[bool]int{true: http.StatusServiceUnavailable, false: http.StatusOK}[v.sealed]
		reply(w, code, map[string]any{"initialized": v.initialised, "sealed": v.sealed})
	case v.sealed:
		v.fail(w, http.StatusServiceUnavailable, "Vault is sealed")
	case path == "auth/kubernetes/login":
		v.login(w, text("role"), text("jwt"))
	case v.tokens[token] == nil:
		v.fail(w, http.StatusForbidden, "2 errors occurred: * permission denied * invalid token")
	case path == "auth/token/lookup-self":
		reply(w, http.StatusOK, map[string]any{"data": map[string]any{"policies": v.tokens[token]}})
	case path == "auth/token/revoke-self":
		delete(v.tokens, token)
		w.WriteHeader(http.StatusNoContent)
	case strings.HasPrefix(path, kvMount+"/data/"):
		v.kvData(w, r, path, token, body)
	case !slices.Contains(v.tokens[token], "root"):
		v.fail(w, http.StatusForbidden, "1 error occurred: * permission denied")
	default:
		v.system(w, r, path, body)
	}
}

func (v *fakeVault) login(w http.ResponseWriter, role, jwt string) {
	rules := v.written["auth/kubernetes/role/"+role]
	if v.tables["auth"]["kubernetes/"] == nil || v.written["auth/kubernetes/config"] == nil || rules == nil {
		v.fail(w, http.StatusForbidden, "permission denied")
		return
	}
	accounts, _ := rules["bound_service_account_names"].([]any)
	namespaces, _ := rules["bound_service_account_namespaces"].([]any)
	policies, _ := rules["token_policies"].([]any)
	want := fmt.Sprintf("%v/serviceaccounts/%v for [%v]", namespaces[0], accounts[0], rules["audience"])
	if v.jwts[jwt] != want {
		v.fail(w, http.StatusForbidden, "permission denied")
		return
	}
	token := v.api.hide(fmt.Sprintf("hvs.client-token-number-%d", len(v.api.log)))
	v.tokens[token] = []string{fmt.Sprint(policies[0])}
	reply(w, http.StatusOK, map[string]any{"auth": map[string]any{"client_token": token}})
}

func (v *fakeVault) kvData(w http.ResponseWriter, r *http.Request, path, token string, body map[string]any) {
	policy := fmt.Sprint(v.written["sys/policies/acl/"+v.tokens[token][0]]["policy"])
	entry := v.kv[path]
	switch {
	case !strings.Contains(policy, `"`+kvMount+`/data/*"`):
		v.fail(w, http.StatusForbidden, "permission denied")
	case v.tables["mounts"][kvMount+"/"] == nil:
		v.fail(w, http.StatusNotFound, "no handler for route \""+path+"\". route entry not found.")
	case v.upgrading:
		v.upgrading = false
		v.fail(w, http.StatusBadRequest, "Upgrading from non-versioned to versioned data. This backend will be unavailable for a brief period and will resume service shortly.")
	case r.Method == http.MethodGet && entry == nil:
		v.fail(w, http.StatusNotFound)
	case r.Method == http.MethodGet && entry.data == nil:
		reply(w, http.StatusNotFound, map[string]any{"data": map[string]any{"data": nil, "metadata": map[string]any{"version": entry.version}}})
	case r.Method == http.MethodGet:
		reply(w, http.StatusOK, map[string]any{"data": map[string]any{"data": entry.data, "metadata": map[string]any{"version": entry.version}}})
	default:
		options, _ := body["options"].(map[string]any)
		if entry == nil {
			entry = &fakeEntry{}
		}
		if options["cas"] != float64(entry.version) {
			v.fail(w, http.StatusBadRequest, "check-and-set parameter did not match the current version")
			return
		}
		data, _ := body["data"].(map[string]any)
		v.kv[path] = &fakeEntry{data: data, version: entry.version + 1}
		reply(w, http.StatusOK, map[string]any{"data": map[string]any{"version": entry.version + 1}})
	}
}

func (v *fakeVault) system(w http.ResponseWriter, r *http.Request, path string, body map[string]any) {
	if rest, ok := strings.CutPrefix(path, "sys/"); ok {
		table, name, named := strings.Cut(rest, "/")
		if entries, ok := v.tables[table]; ok {
			switch {
			case r.Method == http.MethodGet && !named:
				listed := map[string]any{}
				for name, entry := range entries {
					listed[name] = entry
				}
				answer := maps.Clone(listed)
				answer["data"] = listed
				reply(w, http.StatusOK, answer)
			case entries[name+"/"] != nil:
				v.fail(w, http.StatusBadRequest, "path is already in use at "+name+"/")
			default:
				entries[name+"/"] = body
				v.upgrading = v.upgrading || table == "mounts"
				w.WriteHeader(http.StatusNoContent)
			}
			return
		}
	}
	if !strings.HasPrefix(path, "sys/policies/acl/") && !strings.HasPrefix(path, "auth/kubernetes/") || r.Method != http.MethodPost {
		v.fail(w, http.StatusNotFound, "no handler for route \""+path+"\". route entry not found.")
		return
	}
	if strings.HasPrefix(path, "auth/kubernetes/") && v.tables["auth"]["kubernetes/"] == nil {
		v.fail(w, http.StatusNotFound, "no handler for route \""+path+"\". route entry not found.")
		return
	}
	v.written[path] = body
	w.WriteHeader(http.StatusNoContent)
}
