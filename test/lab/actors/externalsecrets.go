package actors

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"text/template"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	esoNamespace = "external-secrets"
	esoActor     = "rehearsal/external-secrets"
	esoFinalizer = "externalsecrets.external-secrets.io/externalsecret-cleanup"
	mergedKeys   = "llmbox.dev/simulated-merged-keys"
	esoHash      = "reconcile.external-secrets.io/data-hash"
)

// externalSecretsOperator stands in for External Secrets: it validates Vault
// stores by logging in as they say, reads KV over the same HTTP API and writes
// the target Secrets by creation and deletion policy.
//
// It knows ClusterSecretStores of Vault with Kubernetes auth, data, dataFrom
// extract, and templates without functions; no other provider, no generators,
// no rewrite, no PushSecret.
type externalSecretsOperator struct {
	*plane
	changes atomic.Int64 // of Vault
	// checked remembers, per store, what it was last found valid against.
	checked map[string]string
}

func newExternalSecrets(p *plane, v *vault) *actor {
	e := &externalSecretsOperator{plane: p, checked: map[string]string{}}
	a := &actor{
		name:      esoActor,
		watches:   []kind{deployments, statefulSets, secrets, secretStores, externalSecrets, services, endpointSlices},
		reconcile: e.reconcile,
		period:    5 * time.Second, // refresh intervals
	}
	v.onChange = append(v.onChange, func() {
		e.changes.Add(1)
		a.signal()
	})
	return a
}

func (e *externalSecretsOperator) reconcile(ctx context.Context) error {
	r, ok, err := e.standIn(esoActor, deployments, esoNamespace, "external-secrets")
	if err != nil || !ok {
		return err
	}
	var errs []error
	valid := map[string]bool{}
	for _, store := range e.list(secretStores, "") {
		failure := e.validate(ctx, r, store)
		valid[store.GetName()] = failure == nil
		errs = append(errs, r.status(ctx, secretStores, store, func(status map[string]any) {
			status["capabilities"] = "ReadWrite"
			if failure != nil {
				status["conditions"] = conditions(status["conditions"], no("Ready", "InvalidProviderConfig", "unable to validate store: "+failure.Error(), 0))
				return
			}
			status["conditions"] = conditions(status["conditions"], yes("Ready", "Valid", "store validated", 0))
		}))
	}
	for _, es := range e.list(externalSecrets, "") {
		errs = append(errs, e.sync(ctx, r, es, valid))
	}
	return errors.Join(errs...)
}

// vaultClient is a session with the Vault a store names.
type vaultClient struct {
	handler http.Handler
	token   string
}

// call is one request, answered in process by whoever answers for the Service.
func (c *vaultClient) call(ctx context.Context, method, path string, body any) (code int, answer map[string]any, err error) {
	var payload io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return 0, nil, fmt.Errorf("encoding request: %w", err)
		}
		payload = bytes.NewReader(raw)
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://vault/v1/"+path, payload)
	if err != nil {
		return 0, nil, fmt.Errorf("making request: %w", err)
	}
	request.Header.Set("User-Agent", esoActor)
	if c.token != "" {
		request.Header.Set("X-Vault-Token", c.token)
	}
	defer func() {
		if recover() != nil { // the pod went away: the server aborts
			err = errors.New("connection reset")
		}
	}()
	recorder := httptest.NewRecorder()
	if request.Body == nil {
		request.Body = http.NoBody
	}
	c.handler.ServeHTTP(recorder, request)
	if recorder.Body.Len() > 0 {
		if err := json.Unmarshal(recorder.Body.Bytes(), &answer); err != nil {
			return 0, nil, fmt.Errorf("decoding answer: %w", err)
		}
	}
	return recorder.Code, answer, nil
}

// login opens a session as the store describes: a token of its ServiceAccount,
// exchanged at Vault's Kubernetes auth.
func (e *externalSecretsOperator) login(ctx context.Context, r *role, store *unstructured.Unstructured) (*vaultClient, error) {
	provider := sub(store.Object, "spec", "provider", "vault")
	auth := sub(provider, "auth", "kubernetes")
	if provider == nil || auth == nil {
		return nil, errors.New("the rehearsal knows only Vault with Kubernetes auth")
	}
	namespace, service, port, err := serviceOf(str(provider, "server"))
	if err != nil {
		return nil, err
	}
	server, err := e.directory.backend(namespace, service, port)
	if err != nil {
		return nil, err
	}
	account := sub(auth, "serviceAccountRef")
	audiences := texts(account, "audiences")
	request := map[string]any{"expirationSeconds": 600}
	if len(audiences) > 0 {
		request["audiences"] = audiences
	}
	body, err := normal(map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
		"metadata": map[string]any{"name": str(account, "name")}, "spec": request})
	if err != nil {
		return nil, err
	}
	issued, err := r.resource(r.client, serviceAccounts, first(str(account, "namespace"), esoNamespace)).Create(ctx, body, metav1.CreateOptions{}, "token")
	if err != nil {
		return nil, fmt.Errorf("requesting token of ServiceAccount %s: %w", str(account, "name"), err)
	}
	client := &vaultClient{handler: server.handler}
	code, answer, err := client.call(ctx, http.MethodPut, "auth/"+first(str(auth, "mountPath"), "kubernetes")+"/login",
		map[string]any{"role": str(auth, "role"), "jwt": str(issued.Object, "status", "token")})
	if err != nil {
		return nil, err
	}
	if code != http.StatusOK {
		return nil, fmt.Errorf("unable to log in with Kubernetes auth: code %d: %s", code, strings.Join(texts(answer, "errors"), "; "))
	}
	client.token = str(answer, "auth", "client_token")
	return client, nil
}

// serviceOf reads http://NAME.NAMESPACE.svc…:PORT.
func serviceOf(server string) (namespace, name string, port int64, err error) {
	u, err := url.Parse(server)
	if err != nil {
		return "", "", 0, fmt.Errorf("reading server address: %w", err)
	}
	parts := strings.Split(u.Hostname(), ".")
	if len(parts) < 2 {
		return "", "", 0, fmt.Errorf("server %q is not a Service of this cluster", server)
	}
	port = map[string]int64{"http": 80, "https": 443}[u.Scheme]
	if text := u.Port(); text != "" {
		if port, err = strconv.ParseInt(text, 10, 64); err != nil {
			return "", "", 0, fmt.Errorf("reading server port: %w", err)
		}
	}
	return parts[1], parts[0], port, nil
}

// validate tries a login; a valid store is tried again after it or Vault changed.
func (e *externalSecretsOperator) validate(ctx context.Context, r *role, store *unstructured.Unstructured) error {
	against := fmt.Sprintf("%s %d %d", store.GetUID(), store.GetGeneration(), e.changes.Load())
	if pod := e.readyPod(vaultNamespace, vaultWorkload); pod != nil {
		against += " " + string(pod.GetUID())
	}
	if e.checked[store.GetName()] == against {
		return nil
	}
	client, err := e.login(ctx, r, store)
	if err != nil {
		return err
	}
	client.close(ctx)
	e.checked[store.GetName()] = against
	return nil
}

func (c *vaultClient) close(ctx context.Context) {
	_, _, _ = c.call(ctx, http.MethodPost, "auth/token/revoke-self", nil)
}

// sync brings one ExternalSecret's Secret up to date if it is time to.
func (e *externalSecretsOperator) sync(ctx context.Context, r *role, es *unstructured.Unstructured, valid map[string]bool) error {
	if es.GetDeletionTimestamp() != nil {
		return e.release(ctx, r, es)
	}
	if err := r.finalizer(ctx, externalSecrets, es, esoFinalizer, true); err != nil {
		return err
	}
	name := first(str(es.Object, "spec", "target", "name"), es.GetName())
	live := e.get(secrets, es.GetNamespace(), name)
	version := e.inputs(es)
	if !e.due(es, live, version) {
		return nil
	}
	creation := first(str(es.Object, "spec", "target", "creationPolicy"), "Owner")
	reason, failure := "SecretSynced", error(nil)
	message := "secret synced"
	store := str(es.Object, "spec", "secretStoreRef", "name")
	switch {
	case str(es.Object, "spec", "secretStoreRef", "kind") != "ClusterSecretStore":
		failure = errors.New("the rehearsal knows only ClusterSecretStore")
	case !valid[store]:
		failure = fmt.Errorf("ClusterSecretStore %q is not ready", store)
	case creation == "Merge" && live == nil:
		reason, message = "SecretMissing", "secret will not be created due to CreationPolicy=Merge"
	default:
		var data map[string][]byte
		data, failure = e.fetch(ctx, r, es, store)
		// What the provider has emptied stays in the Secret under deletionPolicy Retain.
		kept := len(data) == 0 && str(es.Object, "spec", "target", "deletionPolicy") == "Retain"
		if failure == nil && !kept {
			failure = e.write(ctx, r, es, name, creation, live, data)
		}
	}
	if failure != nil && passing(failure) {
		return failure
	}
	written := r.status(ctx, externalSecrets, es, func(status map[string]any) {
		if failure != nil {
			status["conditions"] = conditions(status["conditions"], no("Ready", "SecretSyncedError", "could not get secret data from provider: "+failure.Error(), 0))
			return
		}
		status["refreshTime"] = time.Now().UTC().Format(time.RFC3339)
		status["syncedResourceVersion"] = version
		status["binding"] = map[string]any{"name": name}
		status["conditions"] = conditions(status["conditions"], yes("Ready", reason, message, 0))
	})
	if failure != nil {
		return errors.Join(written, fmt.Errorf("%w: %w", errWaiting, failure))
	}
	return written
}

// inputs changes with the spec, the labels and the annotations (so that an
// annotation forces a sync), but not with the lab's mark.
func (e *externalSecretsOperator) inputs(es *unstructured.Unstructured) string {
	annotations := map[string]any{}
	for k, v := range es.GetAnnotations() {
		if k != Annotation {
			annotations[k] = v
		}
	}
	return fmt.Sprintf("%d-%s", es.GetGeneration(), digest(map[string]any{"annotations": annotations, "labels": es.GetLabels()}))
}

func (e *externalSecretsOperator) due(es, live *unstructured.Unstructured, version string) bool {
	if !isTrue(es.Object, "Ready", "status", "conditions") || str(es.Object, "status", "syncedResourceVersion") != version {
		return true
	}
	if str(es.Object, "spec", "refreshPolicy") == "CreatedOnce" {
		return live == nil
	}
	reason := ""
	for _, c := range items(es.Object, "status", "conditions") {
		reason = str(c, "reason")
	}
	if (live == nil) != (reason == "SecretMissing") {
		return true
	}
	if live != nil && live.GetAnnotations()[esoHash] != "" && live.GetAnnotations()[esoHash] != digest(managed(es, live)) {
		return true
	}
	interval, err := time.ParseDuration(first(str(es.Object, "spec", "refreshInterval"), "1h"))
	last, parseErr := time.Parse(time.RFC3339, str(es.Object, "status", "refreshTime"))
	return err == nil && interval > 0 && (parseErr != nil || time.Since(last) >= interval)
}

// managed is the part of a Secret's data the ExternalSecret wrote.
func managed(es, live *unstructured.Unstructured) map[string]any {
	data := sub(live.Object, "data")
	if first(str(es.Object, "spec", "target", "creationPolicy"), "Owner") != "Merge" {
		return data
	}
	out := map[string]any{}
	for _, key := range strings.Split(live.GetAnnotations()[mergedKeys], ",") {
		if v, ok := data[key]; ok {
			out[key] = v
		}
	}
	return out
}

// fetch reads what data and dataFrom ask for.
func (e *externalSecretsOperator) fetch(ctx context.Context, r *role, es *unstructured.Unstructured, store string) (map[string][]byte, error) {
	css := e.get(secretStores, "", store)
	client, err := e.login(ctx, r, css)
	if err != nil {
		return nil, err
	}
	defer client.close(ctx)
	mount := str(css.Object, "spec", "provider", "vault", "path")
	read := func(ref map[string]any) (map[string]any, error) {
		key := strings.TrimPrefix(strings.TrimPrefix(str(ref, "key"), mount+"/"), "data/")
		path := strings.Trim(mount, "/") + "/data/" + key
		if mount == "" {
			// Without a mount in the store, the key's first element names it.
			head, rest, _ := strings.Cut(str(ref, "key"), "/")
			path = head + "/data/" + strings.TrimPrefix(rest, "data/")
		}
		if version := str(ref, "version"); version != "" {
			path += "?version=" + url.QueryEscape(version)
		}
		code, answer, err := client.call(ctx, http.MethodGet, path, nil)
		switch {
		case err != nil:
			return nil, err
		case code == http.StatusNotFound:
			return nil, fmt.Errorf("secret %q does not exist", str(ref, "key"))
		case code != http.StatusOK:
			return nil, fmt.Errorf("reading %q: code %d: %s", str(ref, "key"), code, strings.Join(texts(answer, "errors"), "; "))
		}
		return sub(answer, "data", "data"), nil
	}
	out := map[string][]byte{}
	for _, from := range items(es.Object, "spec", "dataFrom") {
		ref := sub(from, "extract")
		if ref == nil {
			return nil, errors.New("the rehearsal knows only dataFrom.extract")
		}
		values, err := read(ref)
		if err != nil {
			return nil, err
		}
		if nested := sub(values, str(ref, "property")); nested != nil {
			values = nested
		}
		for k, v := range values {
			out[k] = plain(v)
		}
	}
	for _, d := range items(es.Object, "spec", "data") {
		ref := sub(d, "remoteRef")
		values, err := read(ref)
		if err != nil {
			return nil, err
		}
		property := str(ref, "property")
		if property == "" {
			raw, err := json.Marshal(values)
			if err != nil {
				return nil, fmt.Errorf("encoding %q: %w", str(ref, "key"), err)
			}
			out[str(d, "secretKey")] = raw
			continue
		}
		v, ok := values[property]
		if !ok {
			return nil, fmt.Errorf("cannot find secret data for key: %q", property)
		}
		out[str(d, "secretKey")] = plain(v)
	}
	return out, nil
}

func plain(v any) []byte {
	if s, ok := v.(string); ok {
		return []byte(s)
	}
	raw, err := json.Marshal(v)
	if err != nil {
		return nil
	}
	return raw
}

// write makes or changes the target Secret.
func (e *externalSecretsOperator) write(ctx context.Context, r *role, es *unstructured.Unstructured, name, creation string, live *unstructured.Unstructured, data map[string][]byte) error {
	if creation == "None" {
		return nil
	}
	kind := first(str(es.Object, "spec", "target", "template", "type"), "Opaque")
	values, err := rendered(es, data)
	if err != nil {
		return err
	}
	encoded, err := normal(map[string]any{"data": values})
	if err != nil {
		return err
	}
	entries := sub(encoded.Object, "data")
	keys := make([]string, 0, len(entries))
	for k := range entries {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	decorate := func(m map[string]any) {
		meta := sub(m, "metadata")
		annotations := union(sub(meta, "annotations"), sub(es.Object, "spec", "target", "template", "metadata", "annotations"))
		annotations[esoHash] = digest(entries)
		if creation == "Merge" {
			annotations[mergedKeys] = strings.Join(keys, ",")
		}
		meta["annotations"] = annotations
		labels := union(sub(meta, "labels"), sub(es.Object, "spec", "target", "template", "metadata", "labels"))
		labels["reconcile.external-secrets.io/managed"] = "true"
		if creation == "Owner" {
			labels["reconcile.external-secrets.io/created-by"] = digest(es.GetNamespace() + "/" + es.GetName())
			meta["ownerReferences"] = owner(es)
		}
		meta["labels"] = labels
		if creation == "Merge" {
			m["data"] = union(sub(m, "data"), entries)
		} else {
			m["data"] = entries
		}
	}
	if live == nil {
		o := map[string]any{"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": map[string]any{"name": name, "namespace": es.GetNamespace()}}
		decorate(o)
		annotate(o, r.name)
		made, err := normal(o)
		if err != nil {
			return err
		}
		if _, err := r.resource(r.client, secrets, es.GetNamespace()).Create(ctx, made, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("creating Secret %s: %w", name, err)
		}
		return nil
	}
	for _, o := range live.GetOwnerReferences() {
		if creation == "Owner" && o.Kind == "ExternalSecret" && o.UID != es.GetUID() {
			return fmt.Errorf("target is owned by another ExternalSecret: %s", o.Name)
		}
	}
	return r.update(ctx, secrets, live, decorate)
}

// rendered applies the target's template, if it has one.
func rendered(es *unstructured.Unstructured, data map[string][]byte) (map[string][]byte, error) {
	templates := sub(es.Object, "spec", "target", "template", "data")
	if len(templates) == 0 {
		return data, nil
	}
	values := map[string]string{}
	for k, v := range data {
		values[k] = string(v)
	}
	out := map[string][]byte{}
	if str(es.Object, "spec", "target", "template", "mergePolicy") == "Merge" {
		for k, v := range data {
			out[k] = v
		}
	}
	for key := range templates {
		t, err := template.New(key).Option("missingkey=error").Parse(str(templates, key))
		if err != nil {
			return nil, fmt.Errorf("reading template of %s: %w", key, err)
		}
		var text bytes.Buffer
		if err := t.Execute(&text, values); err != nil {
			return nil, fmt.Errorf("rendering %s: %w", key, err)
		}
		out[key] = text.Bytes()
	}
	return out, nil
}

// release is the end of an ExternalSecret: what it wrote goes or stays.
func (e *externalSecretsOperator) release(ctx context.Context, r *role, es *unstructured.Unstructured) error {
	name := first(str(es.Object, "spec", "target", "name"), es.GetName())
	live := e.get(secrets, es.GetNamespace(), name)
	if live != nil && str(es.Object, "spec", "target", "deletionPolicy") == "Delete" && slices.Contains(es.GetFinalizers(), esoFinalizer) {
		if err := r.resource(r.client, secrets, es.GetNamespace()).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			return fmt.Errorf("deleting Secret %s: %w", name, err)
		}
	}
	return r.finalizer(ctx, externalSecrets, es, esoFinalizer, false)
}
