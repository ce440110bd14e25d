package actors

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	vaultNamespace = "vault"
	vaultWorkload  = "vault"
	vaultActor     = "rehearsal/vault"
	vaultPort      = 8200
)

// vault stands in for a Vault server, in memory: initialising, unsealing (again
// after each new pod), mounts, policies, Kubernetes auth against the real
// TokenReview API with the rights of Vault's own ServiceAccount, tokens, and
// KV version 2. Requests are checked against the token's policies.
//
// It encrypts and stores nothing, keeps no leases, and knows no other engine
// or auth method. Restarting the lab loses what it held.
type vault struct {
	*plane
	onChange []func()

	mu      sync.Mutex
	pod     types.UID // whose start this server's memory belongs to
	claim   types.UID // of the volume this server's memory stands for; empty without one
	sealed  bool
	shares  []string // hex; nil until initialised
	need    int
	given   []string
	tokens  map[string]*vaultToken
	mounts  map[string]map[string]any
	auths   map[string]map[string]any
	audits  map[string]map[string]any
	policy  map[string]string
	configs map[string]map[string]any            // auth mount → Kubernetes config
	roles   map[string]map[string]map[string]any // auth mount → role
	kv      map[string]map[string]*kvSecret      // mount → path
}

type vaultToken struct {
	accessor string
	policies []string
	expires  time.Time // zero is never
	ttl      time.Duration
	meta     map[string]any
}

func newVault(p *plane) *vault {
	v := &vault{plane: p}
	v.wipe()
	p.directory.add(&server{address: address{vaultNamespace, vaultWorkload, vaultPort}, name: vaultActor, handler: v})
	return v
}

// wipe is a server on an empty volume.
func (v *vault) wipe() {
	v.sealed, v.shares, v.given, v.need = true, nil, nil, 0
	v.tokens = map[string]*vaultToken{}
	v.auths = map[string]map[string]any{"token/": {"type": "token", "description": "token based credentials"}}
	v.audits, v.configs = map[string]map[string]any{}, map[string]map[string]any{}
	v.roles, v.kv = map[string]map[string]map[string]any{}, map[string]map[string]*kvSecret{}
	v.mounts = map[string]map[string]any{"sys/": {"type": "system"}, "identity/": {"type": "identity"}, "cubbyhole/": {"type": "cubbyhole"}}
	v.policy = map[string]string{"default": `path "auth/token/lookup-self" { capabilities = ["read"] }
path "auth/token/renew-self" { capabilities = ["update"] }
path "auth/token/revoke-self" { capabilities = ["update"] }`}
}

// start notices a new pod: it is sealed, and empty if its volume is another.
// It is called locked and says whether there was one.
func (v *vault) start(pod *unstructured.Unstructured) bool {
	if pod == nil || v.pod == pod.GetUID() {
		return false
	}
	v.pod, v.sealed, v.given = pod.GetUID(), true, nil
	claim := types.UID("")
	for _, volume := range items(pod.Object, "spec", "volumes") {
		if c := v.get(claims, vaultNamespace, str(volume, "persistentVolumeClaim", "claimName")); c != nil {
			claim = c.GetUID()
		}
	}
	if claim != v.claim || claim == "" {
		v.claim = claim
		v.wipe()
	}
	return true
}

// actor watches Vault's pod: a new one starts sealed.
func (v *vault) actor() *actor {
	return &actor{name: vaultActor, watches: []kind{statefulSets, pods, claims}, reconcile: func(ctx context.Context) error {
		pod := v.readyPod(vaultNamespace, vaultWorkload)
		if pod == nil {
			return nil
		}
		v.mu.Lock()
		restarted := v.start(pod)
		v.mu.Unlock()
		if restarted {
			v.changed()
		}
		r, ok, err := v.standIn(vaultActor, statefulSets, vaultNamespace, vaultWorkload)
		if err != nil || !ok {
			return err
		}
		_, err = r.mark(ctx, statefulSets, v.get(statefulSets, vaultNamespace, vaultWorkload))
		return err
	}}
}

// unsealer stands in for the box's own unsealer Deployment: it reads the key
// with that pod's rights and unseals. It cannot show that the real one does.
func (v *vault) unsealer() *actor {
	const name = "rehearsal/vault-unsealer"
	a := &actor{name: name, watches: []kind{deployments, secrets, pods}}
	a.reconcile = func(ctx context.Context) error {
		r, ok, err := v.standIn(name, deployments, vaultNamespace, "vault-unsealer")
		if err != nil || !ok || v.get(secrets, vaultNamespace, "vault-unseal") == nil || v.state() != "sealed" {
			return err
		}
		secret := v.get(secrets, vaultNamespace, "vault-unseal")
		if mounted(r.spec, "vault-unseal") == "" {
			if secret, err = r.resource(r.client, secrets, vaultNamespace).Get(ctx, "vault-unseal", metav1.GetOptions{}); err != nil {
				return fmt.Errorf("reading unseal key: %w", err)
			}
		}
		if _, err := r.mark(ctx, deployments, v.get(deployments, vaultNamespace, "vault-unsealer")); err != nil {
			return err
		}
		v.mu.Lock()
		err = v.unseal(strings.TrimSpace(string(secretValue(secret, "unseal-key"))))
		v.mu.Unlock()
		v.changed()
		return err
	}
	v.onChange = append(v.onChange, a.signal)
	return a
}

// mounted is the name of the volume through which a pod sees a Secret.
func mounted(spec map[string]any, secret string) string {
	for _, volume := range items(spec, "volumes") {
		if str(volume, "secret", "secretName") == secret {
			return str(volume, "name")
		}
	}
	return ""
}

// changed wakes whoever depends on the server's state. Not to be called locked.
func (v *vault) changed() {
	for _, f := range v.onChange {
		f()
	}
}

// state is "absent" (no pod), "uninitialised", "sealed" or "open".
func (v *vault) state() string {
	if v.readyPod(vaultNamespace, vaultWorkload) == nil {
		return "absent"
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case v.shares == nil:
		return "uninitialised"
	case v.sealed:
		return "sealed"
	}
	return "open"
}

var errUnsealKey = errors.New("'key' must be a valid hex or base64 string of one of the key shares")

// unseal takes one key share, hex or base64.
func (v *vault) unseal(key string) error {
	raw, err := hex.DecodeString(key)
	if err != nil {
		if raw, err = base64.StdEncoding.DecodeString(key); err != nil {
			return errUnsealKey
		}
	}
	share := hex.EncodeToString(raw)
	if !slices.Contains(v.shares, share) {
		return errUnsealKey
	}
	if !v.sealed || slices.Contains(v.given, share) {
		return nil
	}
	v.given = append(v.given, share)
	if len(v.given) >= v.need {
		v.sealed, v.given = false, nil
	}
	return nil
}

func randomHex(n int) string {
	raw := make([]byte, n)
	_, _ = rand.Read(raw) // crypto/rand.Read does not fail: it ends the program
	return hex.EncodeToString(raw)
}

// issue makes a token. ttl 0 never ends.
func (v *vault) issue(ttl time.Duration, meta map[string]any, policies ...string) (string, *vaultToken) {
	t := &vaultToken{accessor: randomHex(12), policies: policies, ttl: ttl, meta: meta}
	if ttl > 0 {
		t.expires = time.Now().Add(ttl)
	}
	id := "hvs." + randomHex(16)
	v.tokens[id] = t
	return id, t
}

// ServeHTTP is Vault's HTTP API under /v1/.
func (v *vault) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path, ok := strings.CutPrefix(r.URL.Path, "/v1/")
	if !ok {
		fail(w, http.StatusNotFound)
		return
	}
	body := map[string]any{}
	if !readJSON(w, r, &body) {
		return
	}
	call := &vaultCall{w: w, r: r, path: strings.Trim(path, "/"), body: body, verb: r.Method, token: r.Header.Get("X-Vault-Token")}
	if bearer, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); ok && call.token == "" {
		call.token = bearer
	}
	switch {
	case r.Method == http.MethodPut:
		call.verb = http.MethodPost // Vault takes both for the same
	case r.Method == http.MethodGet && r.URL.Query().Get("list") == "true":
		call.verb = "LIST"
	}
	// A pod that has just been replaced is not yet unsealed, even if the watch
	// has not told so.
	pod := v.readyPod(vaultNamespace, vaultWorkload)
	v.mu.Lock()
	v.start(pod)
	before := v.sealed
	v.dispatch(call)
	// Coming and going of tokens changes nothing for others.
	wrote := call.verb != http.MethodGet && call.verb != "LIST" && !strings.HasSuffix(call.path, "/login") && !strings.HasPrefix(call.path, "auth/token/")
	changed := before != v.sealed || wrote
	v.mu.Unlock()
	if changed {
		v.changed()
	}
}

// vaultCall is one request.
type vaultCall struct {
	w     http.ResponseWriter
	r     *http.Request
	path  string
	verb  string
	body  map[string]any
	token string
}

func (c *vaultCall) is(verb, path string) bool { return c.verb == verb && c.path == path }

func fail(w http.ResponseWriter, code int, messages ...string) {
	if messages == nil {
		messages = []string{}
	}
	writeJSON(w, code, map[string]any{"errors": messages})
}

// reply is Vault's envelope; some system answers repeat the data at the top.
func reply(w http.ResponseWriter, data map[string]any) {
	writeJSON(w, http.StatusOK, union(map[string]any{
		"request_id": randomHex(16), "lease_id": "", "lease_duration": 0, "renewable": false, "data": data, "warnings": nil, "auth": nil,
	}))
}

// dispatch is called locked.
func (v *vault) dispatch(c *vaultCall) {
	switch {
	case c.path == "sys/health":
		v.health(c)
		return
	case c.is(http.MethodGet, "sys/seal-status"):
		writeJSON(c.w, http.StatusOK, v.sealStatus())
		return
	case c.is(http.MethodGet, "sys/init"):
		writeJSON(c.w, http.StatusOK, map[string]any{"initialized": v.shares != nil})
		return
	case c.is(http.MethodPost, "sys/init"):
		v.initialise(c)
		return
	case c.is(http.MethodPost, "sys/unseal"):
		if v.shares == nil {
			fail(c.w, http.StatusBadRequest, "server is not yet initialized")
		} else if truth(c.body, "reset") {
			v.given = nil
			writeJSON(c.w, http.StatusOK, v.sealStatus())
		} else if err := v.unseal(str(c.body, "key")); err != nil {
			fail(c.w, http.StatusBadRequest, err.Error())
		} else {
			writeJSON(c.w, http.StatusOK, v.sealStatus())
		}
		return
	case v.sealed:
		fail(c.w, http.StatusServiceUnavailable, "Vault is sealed")
		return
	}
	if mount, rest := v.authMount(c.path); mount != "" && rest == "login" && c.verb == http.MethodPost {
		v.login(c, mount)
		return
	}
	token := v.tokens[c.token]
	if token != nil && !token.expires.IsZero() && time.Now().After(token.expires) {
		delete(v.tokens, c.token)
		token = nil
	}
	if token == nil || !v.permits(token, c) {
		fail(c.w, http.StatusForbidden, "permission denied")
		return
	}
	switch {
	case strings.HasPrefix(c.path, "sys/"):
		v.system(c)
	case strings.HasPrefix(c.path, "auth/token/"):
		v.ownToken(c, token)
	case strings.HasPrefix(c.path, "auth/"):
		v.kubernetesAuth(c)
	default:
		v.secretEngine(c)
	}
}

func (v *vault) health(c *vaultCall) {
	code := http.StatusOK
	switch {
	case v.shares == nil:
		code = http.StatusNotImplemented
	case v.sealed:
		code = http.StatusServiceUnavailable
	}
	for parameter, applies := range map[string]bool{"uninitcode": v.shares == nil, "sealedcode": v.shares != nil && v.sealed} {
		if text := c.r.URL.Query().Get(parameter); text != "" && applies {
			_, _ = fmt.Sscanf(text, "%d", &code)
		}
	}
	writeJSON(c.w, code, map[string]any{"initialized": v.shares != nil, "sealed": v.sealed, "standby": false,
		"server_time_utc": time.Now().Unix(), "version": "rehearsal", "cluster_name": "rehearsal"})
}

func (v *vault) sealStatus() map[string]any {
	return map[string]any{"type": "shamir", "initialized": v.shares != nil, "sealed": v.sealed, "t": v.need, "n": len(v.shares),
		"progress": len(v.given), "nonce": "", "version": "rehearsal", "storage_type": "file", "migration": false, "recovery_seal": false}
}

func (v *vault) initialise(c *vaultCall) {
	shares, need := int(integer(c.body, "secret_shares")), int(integer(c.body, "secret_threshold"))
	switch {
	case v.shares != nil:
		fail(c.w, http.StatusBadRequest, "Vault is already initialized")
		return
	case shares < 1 || shares > 255 || need < 1 || need > shares || (shares > 1 && need == 1):
		fail(c.w, http.StatusBadRequest, "invalid seal configuration: shares and threshold do not fit")
		return
	}
	encoded := make([]string, 0, shares)
	for range shares {
		share := randomHex(32)
		raw, err := hex.DecodeString(share)
		if err != nil {
			fail(c.w, http.StatusInternalServerError, err.Error())
			return
		}
		v.shares, encoded = append(v.shares, share), append(encoded, base64.StdEncoding.EncodeToString(raw))
	}
	v.need, v.sealed = need, true
	root, _ := v.issue(0, nil, "root")
	writeJSON(c.w, http.StatusOK, map[string]any{"keys": v.shares, "keys_base64": encoded, "root_token": root})
}

// system is sys/ for a permitted caller.
func (v *vault) system(c *vaultCall) {
	for prefix, table := range map[string]map[string]map[string]any{"sys/mounts": v.mounts, "sys/auth": v.auths, "sys/audit": v.audits} {
		if c.path == prefix && c.verb == http.MethodGet {
			listed := map[string]any{}
			for path, entry := range table {
				listed[path] = entry
			}
			writeJSON(c.w, http.StatusOK, union(listed, map[string]any{"data": listed, "request_id": randomHex(16)}))
			return
		}
		if name, ok := strings.CutPrefix(c.path, prefix+"/"); ok {
			v.mount(c, prefix, table, name)
			return
		}
	}
	for _, prefix := range []string{"sys/policies/acl", "sys/policy"} {
		if c.path == prefix && (c.verb == "LIST" || c.verb == http.MethodGet) {
			names := []string{"root"}
			for name := range v.policy {
				names = append(names, name)
			}
			slices.Sort(names)
			reply(c.w, map[string]any{"keys": names, "policies": names})
			return
		}
		if name, ok := strings.CutPrefix(c.path, prefix+"/"); ok {
			v.aclPolicy(c, name)
			return
		}
	}
	if c.is(http.MethodPost, "sys/seal") {
		v.sealed, v.given = true, nil
		c.w.WriteHeader(http.StatusNoContent)
		return
	}
	v.noRoute(c)
}

func (v *vault) noRoute(c *vaultCall) {
	fail(c.w, http.StatusNotFound, "no handler for route \""+c.path+"\". route entry not found.")
}

func (v *vault) mount(c *vaultCall, prefix string, table map[string]map[string]any, name string) {
	key := strings.Trim(name, "/") + "/"
	entry := table[key]
	switch c.verb {
	case http.MethodGet:
		if entry == nil {
			fail(c.w, http.StatusBadRequest, "No mount at "+key)
			return
		}
		writeJSON(c.w, http.StatusOK, union(entry, map[string]any{"data": entry, "request_id": randomHex(16)}))
	case http.MethodPost:
		if entry != nil {
			fail(c.w, http.StatusBadRequest, "path is already in use at "+key)
			return
		}
		engine := str(c.body, "type")
		known := map[string][]string{"sys/mounts": {"kv", "kv-v2"}, "sys/auth": {"kubernetes"}, "sys/audit": {"file", "socket", "syslog"}}[prefix]
		if !slices.Contains(known, engine) {
			fail(c.w, http.StatusBadRequest, fmt.Sprintf("plugin not found in the catalog: %s (the rehearsal knows only %s)", engine, strings.Join(known, ", ")))
			return
		}
		options := sub(c.body, "options")
		if prefix == "sys/mounts" {
			if engine == "kv" && str(options, "version") != "2" {
				fail(c.w, http.StatusBadRequest, "the rehearsal knows only version 2 of kv")
				return
			}
			engine, options = "kv", map[string]any{"version": "2"}
			v.kv[key] = map[string]*kvSecret{}
		}
		table[key] = map[string]any{"type": engine, "options": options, "description": str(c.body, "description"),
			"accessor": engine + "_" + randomHex(4), "config": union(map[string]any{"default_lease_ttl": 0, "max_lease_ttl": 0}, sub(c.body, "config")),
			"local": truth(c.body, "local"), "seal_wrap": false, "path": key}
		c.w.WriteHeader(http.StatusNoContent)
	case http.MethodDelete:
		delete(table, key)
		if prefix == "sys/mounts" {
			delete(v.kv, key)
		}
		c.w.WriteHeader(http.StatusNoContent)
	default:
		fail(c.w, http.StatusMethodNotAllowed, "unsupported operation")
	}
}

func (v *vault) aclPolicy(c *vaultCall, name string) {
	switch c.verb {
	case http.MethodGet:
		text, ok := v.policy[name]
		if !ok {
			fail(c.w, http.StatusNotFound)
			return
		}
		reply(c.w, map[string]any{"name": name, "policy": text, "rules": text})
	case http.MethodPost:
		text := str(c.body, "policy")
		if raw, err := base64.StdEncoding.DecodeString(text); err == nil && text != "" {
			text = string(raw)
		}
		if _, err := parsePolicy(text); err != nil {
			fail(c.w, http.StatusBadRequest, "failed to parse policy: "+err.Error())
			return
		}
		v.policy[name] = text
		c.w.WriteHeader(http.StatusNoContent)
	case http.MethodDelete:
		delete(v.policy, name)
		c.w.WriteHeader(http.StatusNoContent)
	default:
		fail(c.w, http.StatusMethodNotAllowed, "unsupported operation")
	}
}

func (v *vault) ownToken(c *vaultCall, token *vaultToken) {
	switch {
	case c.is(http.MethodGet, "auth/token/lookup-self"):
		data := map[string]any{"id": c.token, "accessor": token.accessor, "policies": token.policies, "meta": token.meta,
			"ttl": 0, "renewable": token.ttl > 0, "type": "service", "expire_time": nil}
		if !token.expires.IsZero() {
			data["ttl"], data["expire_time"] = int(time.Until(token.expires).Seconds()), token.expires.UTC().Format(time.RFC3339)
		}
		reply(c.w, data)
	case c.is(http.MethodPost, "auth/token/renew-self"):
		if token.ttl > 0 {
			token.expires = time.Now().Add(token.ttl)
		}
		v.replyAuth(c, c.token, token)
	case c.is(http.MethodPost, "auth/token/revoke-self"):
		delete(v.tokens, c.token)
		c.w.WriteHeader(http.StatusNoContent)
	case c.is(http.MethodPost, "auth/token/revoke"):
		delete(v.tokens, str(c.body, "token"))
		c.w.WriteHeader(http.StatusNoContent)
	default:
		v.noRoute(c)
	}
}

func (v *vault) replyAuth(c *vaultCall, id string, token *vaultToken) {
	writeJSON(c.w, http.StatusOK, map[string]any{"request_id": randomHex(16), "lease_id": "", "lease_duration": 0, "renewable": false, "data": nil,
		"auth": map[string]any{"client_token": id, "accessor": token.accessor, "policies": token.policies, "token_policies": token.policies,
			"metadata": token.meta, "lease_duration": int(token.ttl.Seconds()), "renewable": token.ttl > 0, "token_type": "service", "orphan": true}})
}

// authMount splits auth/MOUNT/REST for a Kubernetes auth mount.
func (v *vault) authMount(path string) (mount, rest string) {
	for key, entry := range v.auths {
		if r, ok := strings.CutPrefix(path, "auth/"+key); ok && entry["type"] == "kubernetes" {
			return key, r
		}
	}
	return "", ""
}

func (v *vault) kubernetesAuth(c *vaultCall) {
	mount, rest := v.authMount(c.path)
	role, isRole := strings.CutPrefix(rest, "role/")
	switch {
	case mount == "":
		v.noRoute(c)
	case rest == "config" && c.verb == http.MethodPost:
		v.configs[mount] = c.body
		c.w.WriteHeader(http.StatusNoContent)
	case rest == "config" && c.verb == http.MethodGet:
		if v.configs[mount] == nil {
			fail(c.w, http.StatusNotFound)
			return
		}
		reply(c.w, v.configs[mount])
	case rest == "role" && c.verb == "LIST":
		names := []string{}
		for name := range v.roles[mount] {
			names = append(names, name)
		}
		slices.Sort(names)
		reply(c.w, map[string]any{"keys": names})
	case isRole && c.verb == http.MethodPost:
		if len(listed(c.body, "bound_service_account_names")) == 0 || len(listed(c.body, "bound_service_account_namespaces")) == 0 {
			fail(c.w, http.StatusBadRequest, "\"bound_service_account_names\" and \"bound_service_account_namespaces\" can not be empty")
			return
		}
		if v.roles[mount] == nil {
			v.roles[mount] = map[string]map[string]any{}
		}
		v.roles[mount][role] = c.body
		c.w.WriteHeader(http.StatusNoContent)
	case isRole && c.verb == http.MethodGet:
		if v.roles[mount][role] == nil {
			fail(c.w, http.StatusNotFound)
			return
		}
		reply(c.w, v.roles[mount][role])
	case isRole && c.verb == http.MethodDelete:
		delete(v.roles[mount], role)
		c.w.WriteHeader(http.StatusNoContent)
	default:
		v.noRoute(c)
	}
}

// listed reads a list that Vault also takes as text with commas.
func listed(m map[string]any, field string) []string {
	if text := str(m, field); text != "" {
		return strings.Split(text, ",")
	}
	return texts(m, field)
}

// login is Kubernetes auth: the real API server reviews the JWT, asked with the
// rights of Vault's own ServiceAccount as Vault would without token_reviewer_jwt.
func (v *vault) login(c *vaultCall, mount string) {
	role := v.roles[mount][str(c.body, "role")]
	switch {
	case v.configs[mount] == nil:
		fail(c.w, http.StatusInternalServerError, "could not load backend configuration")
		return
	case role == nil:
		fail(c.w, http.StatusBadRequest, fmt.Sprintf("invalid role name %q", str(c.body, "role")))
		return
	}
	review := map[string]any{"token": str(c.body, "jwt")}
	if audience := str(role, "audience"); audience != "" {
		review["audiences"] = []any{audience}
	}
	user, err := v.review(c.r.Context(), review)
	if err != nil {
		v.log.Info("vault login refused", "role", str(c.body, "role"), "error", err)
		fail(c.w, http.StatusForbidden, "permission denied")
		return
	}
	parts := strings.Split(user, ":") // system:serviceaccount:NAMESPACE:NAME
	if len(parts) != 4 || parts[1] != "serviceaccount" {
		fail(c.w, http.StatusForbidden, "permission denied")
		return
	}
	covers := func(field, value string) bool {
		bound := listed(role, field)
		return slices.Contains(bound, value) || slices.Contains(bound, "*")
	}
	if !covers("bound_service_account_namespaces", parts[2]) {
		fail(c.w, http.StatusForbidden, "namespace not authorized")
		return
	}
	if !covers("bound_service_account_names", parts[3]) {
		fail(c.w, http.StatusForbidden, "service account name not authorized")
		return
	}
	ttl := lifetime(role)
	policies := listed(role, "token_policies")
	if policies == nil {
		policies = listed(role, "policies")
	}
	id, token := v.issue(ttl, map[string]any{"role": str(c.body, "role"), "service_account_name": parts[3], "service_account_namespace": parts[2]},
		append([]string{"default"}, policies...)...)
	v.replyAuth(c, id, token)
}

// lifetime reads token_ttl: seconds or a duration.
func lifetime(role map[string]any) time.Duration {
	for _, field := range []string{"token_ttl", "ttl"} {
		if n := integer(role, field); n > 0 {
			return time.Duration(n) * time.Second
		}
		if d, err := time.ParseDuration(str(role, field)); err == nil {
			return d
		}
	}
	return 768 * time.Hour
}

func (v *vault) review(ctx context.Context, spec map[string]any) (string, error) {
	set := v.get(statefulSets, vaultNamespace, vaultWorkload)
	if set == nil {
		return "", errors.New("no StatefulSet to take the ServiceAccount from")
	}
	client, err := v.as(vaultNamespace, str(set.Object, "spec", "template", "spec", "serviceAccountName"))
	if err != nil {
		return "", err
	}
	answer, err := client.Resource(tokenReviews.gvr()).Create(ctx, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "metadata": map[string]any{}, "spec": spec,
	}}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("reviewing token: %w", err)
	}
	if !truth(answer.Object, "status", "authenticated") {
		return "", errors.New(first(str(answer.Object, "status", "error"), "token is not valid"))
	}
	return str(answer.Object, "status", "user", "username"), nil
}
