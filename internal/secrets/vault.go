package secrets

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/llmbox-dev/llmbox/internal/cluster"
)

// Where Vault is and what it is made of. The names are shared with the charts
// of Vault and External Secrets.
const (
	vaultNamespace  = "vault"
	vaultProxyPath  = "/api/v1/namespaces/vault/services/http:vault:8200/proxy/v1/"
	vaultPod        = "vault-0"
	vaultClaim      = "data-vault-0"
	unsealName      = "vault-unseal"
	unsealKey       = "unseal-key"
	formerUnsealKey = "former-unseal-key"
	bootstrapName   = "vault-bootstrap"
	rootTokenKey    = "root-token"
	// claimAnnotation on the bootstrap Secret holds the UID of the volume claim
	// on which an initialisation was started.
	claimAnnotation = "llmbox.dev/initialising-claim"
	// unsealKeyAnnotation on the unsealer's pod is the version of the Secret with
	// the key that it was told of.
	unsealKeyAnnotation = "llmbox.dev/unseal-key-version"
	unsealerLabels      = "app.kubernetes.io/name=vault,app.kubernetes.io/component=unsealer"

	kvMount         = "llmbox"
	authMount       = "kubernetes"
	audience        = "vault"
	ownNamespace    = "llmbox-system"
	ownAccount      = "llmbox"
	ownRole         = "llmbox"
	externalSecrets = "external-secrets" // role, policy, account and namespace alike
	tokenSeconds    = 600                // the least that the API server grants
)

// The ways in which Vault can't be set up, besides LostKeysError.
var (
	// ErrNotAnswering passes by itself or when the pod runs: ask again.
	ErrNotAnswering = errors.New("vault does not answer")
	// ErrWrongKey needs a person.
	ErrWrongKey = errors.New("the key in Secret vault/vault-unseal does not open this Vault")
	// ErrNotSetUp needs a person.
	ErrNotSetUp = errors.New("vault is initialised, but its Kubernetes login for llmbox is missing")
)

// LostKeysError says that Vault is initialised but nobody kept its unseal key.
type LostKeysError struct {
	// Empty is set when llmbox itself started this initialisation on this very
	// volume and was stopped before it could keep the key: nobody ever opened
	// it, so nothing is in it.
	Empty bool
}

func (e *LostKeysError) Error() string {
	if e.Empty {
		return "vault was initialised by a run that was stopped before it could keep the unseal key; it holds nothing yet"
	}
	return "vault is initialised, but there is no unseal key in Secret vault/vault-unseal"
}

// Fix is what a person types.
func (e *LostKeysError) Fix() string {
	const wipe = "kubectl -n vault delete pvc data-vault-0 --wait=false && kubectl -n vault delete pod vault-0"
	if e.Empty {
		return wipe + ", then llmbox install again"
	}
	return "with the key: kubectl -n vault create secret generic vault-unseal --from-file=unseal-key=FILE; " +
		"without it, and only if nothing in this Vault is needed any more: " + wipe + "; then llmbox install again"
}

// VaultOptions are the choices for a Vault.
type VaultOptions struct {
	// HFTokenFile, if set, decides over the Hugging Face token in KV too.
	HFTokenFile string
}

// Vault is the box's Vault, reached through the API server's service proxy.
type Vault struct {
	client *vaultClient
	kube   kubernetes.Interface
	opts   VaultOptions

	// patience bounds the waiting for what takes a moment inside Vault.
	patience, interval time.Duration
}

// NewVault prepares for talking to the box's Vault; nothing is sent.
func NewVault(c *cluster.Client, opts VaultOptions) (*Vault, error) {
	return newVault(c.REST, c.Kube, opts)
}

func newVault(cfg *rest.Config, kube kubernetes.Interface, opts VaultOptions) (*Vault, error) {
	httpClient, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("building the client for vault: %w", err)
	}
	base, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's address: %w", err)
	}
	// A redirect would carry Vault's token to wherever it points.
	httpClient = &http.Client{Transport: httpClient.Transport, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
	return &Vault{
		client: &vaultClient{http: httpClient, base: strings.TrimSuffix(base.String(), "/") + vaultProxyPath},
		kube:   kube, opts: opts, patience: 30 * time.Second, interval: time.Second,
	}, nil
}

type sealStatus struct {
	Type        string `json:"type"`
	Initialized bool   `json:"initialized"`
	Sealed      bool   `json:"sealed"`
}

func (v *Vault) sealStatus(ctx context.Context) (sealStatus, error) {
	var status sealStatus
	err := v.client.call(ctx, http.MethodGet, "sys/seal-status", "", nil, &status)
	if err == nil && status.Type == "" {
		err = fmt.Errorf("%w: its seal status is not Vault's", ErrNotAnswering)
	}
	return status, err
}

// SetUp brings Vault from whatever state it is in to: initialised, unsealed,
// auditing, KV and Kubernetes login in place, the box's secrets in KV and no
// root token anywhere. It can be stopped at any instant and run again; the one
// exception is a LostKeysError. While the pod is not there yet the error is
// ErrNotAnswering.
func (v *Vault) SetUp(ctx context.Context) error {
	status, err := v.sealStatus(ctx)
	if err != nil {
		return err
	}
	boot, err := v.secret(ctx, bootstrapName)
	if err != nil {
		return err
	}
	if !status.Initialized {
		if boot, err = v.initialise(ctx, boot); err != nil {
			return err
		}
		if status, err = v.sealStatus(ctx); err != nil {
			return err
		}
	}
	if err := v.keepUnsealKey(ctx, boot); err != nil {
		return err
	}
	v.hurryUnsealer(ctx, boot)
	if err := v.open(ctx, status, boot); err != nil {
		return err
	}
	if err := v.ensureAccount(ctx); err != nil {
		return err
	}
	root := ""
	if boot != nil {
		root = string(boot.Data[rootTokenKey])
	}
	if root != "" {
		valid, err := v.rootTokenValid(ctx, root)
		if err != nil {
			return err
		}
		if !valid {
			root = "" // revoked by a run that was stopped right after
		}
	}
	if root != "" {
		if err := v.configure(ctx, root); err != nil {
			return err
		}
	}
	if err := v.handOver(ctx); err != nil {
		return err
	}
	if root != "" {
		if err := v.client.call(ctx, http.MethodPost, "auth/token/revoke-self", root, nil, nil); err != nil {
			return fmt.Errorf("revoking the root token: %w", err)
		}
	}
	if boot != nil {
		return v.deleteBootstrap(ctx)
	}
	return nil
}

// initialise runs Vault's initialisation and keeps what it answers. The answer
// comes once: if it is lost, so is this (empty) Vault. So everything that can
// fail is tried before, nothing is done between answer and write, and neither
// an interrupt nor a hiccup of the API server stops the write.
func (v *Vault) initialise(ctx context.Context, boot *corev1.Secret) (*corev1.Secret, error) {
	boot, err := v.announce(ctx, boot)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout+v.patience)
	defer cancel()
	var keys struct {
		Keys      []string `json:"keys_base64"`
		RootToken string   `json:"root_token"`
	}
	err = v.client.call(ctx, http.MethodPut, "sys/init", "", map[string]any{"secret_shares": 1, "secret_threshold": 1}, &keys)
	if statusOf(err) == http.StatusBadRequest {
		// Somebody else was faster: what was announced did not happen.
		err = errors.Join(err, v.deleteBootstrap(ctx))
	}
	if err != nil {
		return nil, fmt.Errorf("initialising vault: %w", err)
	}
	if len(keys.Keys) != 1 || keys.RootToken == "" {
		return nil, errors.New("initialising vault: the answer holds no key")
	}
	want := newSecret(vaultNamespace, bootstrapName)
	want.Annotations = boot.Annotations
	want.Data = map[string][]byte{unsealKey: []byte(keys.Keys[0]), rootTokenKey: []byte(keys.RootToken)}
	secrets := v.kube.CoreV1().Secrets(vaultNamespace)
	err = v.eventually(ctx, func() (bool, error) {
		// Without a resource version: whatever was written meanwhile knows less.
		boot, err = secrets.Update(ctx, want, metav1.UpdateOptions{FieldManager: cluster.FieldManager})
		if apierrors.IsNotFound(err) {
			boot, err = secrets.Create(ctx, want, metav1.CreateOptions{FieldManager: cluster.FieldManager})
		}
		return err == nil, err
	})
	if err != nil {
		return nil, fmt.Errorf("keeping vault's unseal key: %w", cluster.Classify(err))
	}
	return boot, nil
}

// announce writes the bootstrap Secret, empty but for the volume's identity. It
// also shows that the Secret can be written at all.
func (v *Vault) announce(ctx context.Context, boot *corev1.Secret) (*corev1.Secret, error) {
	claim := ""
	pvc, err := v.kube.CoreV1().PersistentVolumeClaims(vaultNamespace).Get(ctx, vaultClaim, metav1.GetOptions{})
	switch {
	case err == nil:
		claim = string(pvc.UID)
	case !apierrors.IsNotFound(err):
		return nil, fmt.Errorf("reading PersistentVolumeClaim %s/%s: %w", vaultNamespace, vaultClaim, cluster.Classify(err))
	}
	want := newSecret(vaultNamespace, bootstrapName)
	want.Annotations = map[string]string{claimAnnotation: claim}
	secrets := v.kube.CoreV1().Secrets(vaultNamespace)
	if boot == nil {
		boot, err = secrets.Create(ctx, want, metav1.CreateOptions{FieldManager: cluster.FieldManager})
	} else {
		// What it holds belongs to a Vault that is gone.
		want.ResourceVersion = boot.ResourceVersion
		boot, err = secrets.Update(ctx, want, metav1.UpdateOptions{FieldManager: cluster.FieldManager})
	}
	if err != nil {
		return nil, fmt.Errorf("writing Secret %s/%s: %w", vaultNamespace, bootstrapName, cluster.Classify(err))
	}
	return boot, nil
}

// keepUnsealKey copies the key from the bootstrap Secret to where the unsealer
// looks. A key that is there already belonged to an earlier volume and is kept
// beside it: that volume may come back.
func (v *Vault) keepUnsealKey(ctx context.Context, boot *corev1.Secret) error {
	if boot == nil || len(boot.Data[unsealKey]) == 0 {
		return nil
	}
	return ensureSecret(ctx, v.kube, vaultNamespace, unsealName, func(data map[string][]byte) (bool, error) {
		have, want := data[unsealKey], boot.Data[unsealKey]
		if string(have) == string(want) {
			return false, nil
		}
		if len(have) > 0 {
			data[formerUnsealKey] = have
		}
		data[unsealKey] = want
		return true, nil
	})
}

// hurryUnsealer changes the unsealer's pod, which has kubelet bring its volume up to
// date at once. By itself it looks after a minute or more, and a Vault that is started
// anew until then would stay sealed. A run that was stopped before it came here does it
// again, as the bootstrap Secret is still there. Whatever goes wrong is no error: the key
// arrives anyway, only later.
func (v *Vault) hurryUnsealer(ctx context.Context, boot *corev1.Secret) {
	if boot == nil || len(boot.Data[unsealKey]) == 0 {
		return
	}
	kept, err := v.secret(ctx, unsealName)
	if err != nil || kept == nil {
		return
	}
	pods, err := v.kube.CoreV1().Pods(vaultNamespace).List(ctx, metav1.ListOptions{LabelSelector: unsealerLabels})
	if err != nil {
		return
	}
	for _, pod := range pods.Items {
		if pod.Annotations[unsealKeyAnnotation] == kept.ResourceVersion {
			continue
		}
		// This annotation and nothing else of the pod is sent.
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{unsealKeyAnnotation: kept.ResourceVersion}}})
		if err != nil {
			return
		}
		_, _ = v.kube.CoreV1().Pods(vaultNamespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: cluster.FieldManager})
	}
}

// open unseals if need be and waits until Vault works.
func (v *Vault) open(ctx context.Context, status sealStatus, boot *corev1.Secret) error {
	secret, err := v.secret(ctx, unsealName)
	if err != nil {
		return err
	}
	key := ""
	if secret != nil {
		key = strings.TrimSpace(string(secret.Data[unsealKey]))
	}
	// Another kind of seal opens by itself and has no key to keep.
	if key == "" && status.Type == "shamir" {
		return v.lostKeys(ctx, status, boot)
	}
	if status.Sealed && key != "" {
		err := v.client.call(ctx, http.MethodPut, "sys/unseal", "", map[string]any{"key": key}, nil)
		switch {
		case statusOf(err) == http.StatusBadRequest:
			if lost := v.lostKeys(ctx, status, boot); isEmpty(lost) {
				return lost // the key is an earlier volume's
			}
			return fmt.Errorf("%w: %w", ErrWrongKey, err)
		case err != nil:
			return fmt.Errorf("unsealing vault: %w", err)
		}
	}
	err = v.eventually(ctx, func() (bool, error) {
		err := v.client.call(ctx, http.MethodGet, "sys/health?standbyok=true", "", nil, nil)
		return err == nil, err
	})
	if err != nil {
		return fmt.Errorf("waiting for the unsealed vault: %w", err)
	}
	return nil
}

func isEmpty(err error) bool {
	var lost *LostKeysError
	return errors.As(err, &lost) && lost.Empty
}

// lostKeys is always an error: LostKeysError if the claim could be read.
func (v *Vault) lostKeys(ctx context.Context, status sealStatus, boot *corev1.Secret) error {
	if boot == nil || len(boot.Data[unsealKey]) > 0 || !status.Sealed || boot.Annotations[claimAnnotation] == "" {
		return &LostKeysError{}
	}
	pvc, err := v.kube.CoreV1().PersistentVolumeClaims(vaultNamespace).Get(ctx, vaultClaim, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("reading PersistentVolumeClaim %s/%s: %w", vaultNamespace, vaultClaim, cluster.Classify(err))
	}
	return &LostKeysError{Empty: err == nil && string(pvc.UID) == boot.Annotations[claimAnnotation]}
}

// DiscardEmpty is the way out of a LostKeysError with Empty set: it takes the
// volume away from the Vault that nobody ever opened, and waits for the new one.
// It refuses where that is not so.
func (v *Vault) DiscardEmpty(ctx context.Context) error {
	status, err := v.sealStatus(ctx)
	if err != nil || !status.Initialized {
		return err
	}
	boot, err := v.secret(ctx, bootstrapName)
	if err != nil {
		return err
	}
	if lost := v.lostKeys(ctx, status, boot); !isEmpty(lost) {
		return fmt.Errorf("leaving vault's volume alone: %w", lost)
	}
	uid := types.UID(boot.Annotations[claimAnnotation])
	err = v.kube.CoreV1().PersistentVolumeClaims(vaultNamespace).Delete(ctx, vaultClaim,
		metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting PersistentVolumeClaim %s/%s: %w", vaultNamespace, vaultClaim, cluster.Classify(err))
	}
	err = v.kube.CoreV1().Pods(vaultNamespace).Delete(ctx, vaultPod, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting Pod %s/%s: %w", vaultNamespace, vaultPod, cluster.Classify(err))
	}
	for {
		status, err := v.sealStatus(ctx)
		if err == nil && !status.Initialized {
			return nil
		}
		if err := pause(ctx, v.interval); err != nil {
			return fmt.Errorf("waiting for vault on a new volume: %w", err)
		}
	}
}

// rootTokenValid asks Vault whether the token is still one.
func (v *Vault) rootTokenValid(ctx context.Context, token string) (bool, error) {
	err := v.client.call(ctx, http.MethodGet, "auth/token/lookup-self", token, nil, nil)
	if statusOf(err) == http.StatusForbidden {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking up the root token: %w", err)
	}
	return true, nil
}

// configure makes audit device, KV, Kubernetes login, policies and roles, each
// if it is not there.
func (v *Vault) configure(ctx context.Context, root string) error {
	enable := func(table, name string, in map[string]any) error {
		var have map[string]any
		if err := v.client.call(ctx, http.MethodGet, "sys/"+table, root, nil, &have); err != nil {
			return fmt.Errorf("listing vault's sys/%s: %w", table, err)
		}
		if _, ok := have[name+"/"]; ok {
			return nil
		}
		if err := v.client.call(ctx, http.MethodPost, "sys/"+table+"/"+name, root, in, nil); err != nil {
			return fmt.Errorf("enabling vault's %s %s: %w", table, name, err)
		}
		return nil
	}
	write := func(path string, in map[string]any) error {
		if err := v.client.call(ctx, http.MethodPost, path, root, in, nil); err != nil {
			return fmt.Errorf("configuring vault: %w", err)
		}
		return nil
	}
	role := func(account, namespace, policy string) map[string]any {
		return map[string]any{
			"bound_service_account_names":      []string{account},
			"bound_service_account_namespaces": []string{namespace},
			"audience":                         audience,
			"token_policies":                   []string{policy},
			"token_ttl":                        tokenSeconds,
		}
	}
	// Vault asks the API server with the token of its own pod, so no reviewer's
	// token is stored.
	return firstError(
		func() error {
			return enable("audit", "file", map[string]any{"type": "file", "options": map[string]string{"file_path": "stdout"}})
		},
		func() error {
			return enable("mounts", kvMount, map[string]any{"type": "kv", "description": "secrets of the box", "options": map[string]string{"version": "2"}})
		},
		func() error { return enable("auth", authMount, map[string]any{"type": "kubernetes"}) },
		func() error {
			return write("auth/"+authMount+"/config", map[string]any{"kubernetes_host": "https://kubernetes.default.svc"})
		},
		func() error {
			return write("sys/policies/acl/"+externalSecrets, map[string]any{"policy": `path "` + kvMount + `/data/*" { capabilities = ["read"] }`})
		},
		func() error {
			return write("sys/policies/acl/"+ownRole, map[string]any{"policy": `path "` + kvMount + `/data/*" { capabilities = ["create", "read", "update", "patch", "delete"] }
path "` + kvMount + `/metadata/*" { capabilities = ["read", "list"] }`})
		},
		func() error {
			return write("auth/"+authMount+"/role/"+externalSecrets, role(externalSecrets, externalSecrets, externalSecrets))
		},
		func() error {
			return write("auth/"+authMount+"/role/"+ownRole, role(ownAccount, ownNamespace, ownRole))
		},
	)
}

func firstError(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// handOver puts the box's secrets into KV where KV has none, and shows by that
// that the login works which replaces the root token.
func (v *Vault) handOver(ctx context.Context) error {
	var token string
	err := v.eventually(ctx, func() (bool, error) {
		var err error
		token, err = v.login(ctx)
		// Vault's way to the API server may open a moment after its pod started.
		return !errors.Is(err, ErrNotSetUp), err
	})
	if err != nil {
		return err
	}
	defer v.logout(ctx, token)
	for _, name := range []string{gatewayKeysName, hfTokenName} {
		secret, err := v.kube.CoreV1().Secrets(modelNamespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("reading Secret %s/%s: %w", modelNamespace, name, cluster.Classify(err))
		}
		given := map[string]string{}
		if err == nil {
			for key, value := range secret.Data {
				given[key] = string(value)
			}
		}
		decides := name == hfTokenName && v.opts.HFTokenFile != ""
		if decides {
			text, err := ReadTokenFile(v.opts.HFTokenFile)
			if err != nil {
				return err
			}
			given = map[string]string{hfTokenKey: text}
		}
		if err := v.store(ctx, token, name, given, decides); err != nil {
			return err
		}
	}
	return nil
}

// store writes an entry of KV if there is none, or if another is there and
// decides is set.
func (v *Vault) store(ctx context.Context, token, name string, want map[string]string, decides bool) error {
	var entry kvEntry
	err := v.eventually(ctx, func() (bool, error) {
		var err error
		entry, err = v.read(ctx, token, name)
		// A new mount takes a moment to become versioned and says so.
		return statusOf(err) != http.StatusBadRequest, err
	})
	if err != nil {
		return fmt.Errorf("reading vault's entry %s: %w", name, err)
	}
	// A deleted entry has a version and no data: somebody took it away.
	if len(want) == 0 || entry.version > 0 && (!decides || maps.EqualFunc(entry.data, want, func(a any, b string) bool { return a == b })) {
		return nil
	}
	err = v.client.call(ctx, http.MethodPost, kvMount+"/data/"+name, token,
		map[string]any{"data": want, "options": map[string]any{"cas": entry.version}}, nil)
	if err != nil {
		return fmt.Errorf("writing vault's entry %s: %w", name, err)
	}
	return nil
}

type kvEntry struct {
	data    map[string]any
	version int64
}

// read returns an entry of KV; version 0 is an absent one.
func (v *Vault) read(ctx context.Context, token, name string) (kvEntry, error) {
	var answer struct {
		Data struct {
			Data     map[string]any `json:"data"`
			Metadata struct {
				Version int64 `json:"version"`
			} `json:"metadata"`
		} `json:"data"`
	}
	err := v.client.call(ctx, http.MethodGet, kvMount+"/data/"+name, token, nil, &answer)
	var refused *vaultError
	// Without a message it is the entry that is absent, with one the mount.
	if errors.As(err, &refused) && refused.status == http.StatusNotFound && len(refused.messages) == 0 {
		return kvEntry{version: refused.version}, nil
	}
	if err != nil {
		return kvEntry{}, err
	}
	return kvEntry{data: answer.Data.Data, version: answer.Data.Metadata.Version}, nil
}

// ensureAccount makes the ServiceAccount in whose name llmbox logs in.
func (v *Vault) ensureAccount(ctx context.Context) error {
	accounts := v.kube.CoreV1().ServiceAccounts(ownNamespace)
	_, err := accounts.Get(ctx, ownAccount, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		no := false
		_, err = accounts.Create(ctx, &corev1.ServiceAccount{
			ObjectMeta:                   metav1.ObjectMeta{Namespace: ownNamespace, Name: ownAccount, Labels: labels()},
			AutomountServiceAccountToken: &no,
		}, metav1.CreateOptions{FieldManager: cluster.FieldManager})
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("ensuring ServiceAccount %s/%s: %w", ownNamespace, ownAccount, cluster.Classify(err))
	}
	return nil
}

// login exchanges a short-lived token of llmbox's ServiceAccount for Vault's.
func (v *Vault) login(ctx context.Context) (string, error) {
	seconds := int64(tokenSeconds)
	granted, err := v.kube.CoreV1().ServiceAccounts(ownNamespace).CreateToken(ctx, ownAccount, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: []string{audience}, ExpirationSeconds: &seconds},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("requesting a token for ServiceAccount %s/%s: %w", ownNamespace, ownAccount, cluster.Classify(err))
	}
	var answer struct {
		Auth struct {
			ClientToken string `json:"client_token"`
		} `json:"auth"`
	}
	err = v.client.call(ctx, http.MethodPost, "auth/"+authMount+"/login", "",
		map[string]any{"role": ownRole, "jwt": granted.Status.Token}, &answer)
	switch status := statusOf(err); {
	case status == http.StatusBadRequest, status == http.StatusForbidden, status == http.StatusNotFound, status == http.StatusInternalServerError:
		return "", &notSetUpError{cause: err}
	case err != nil:
		return "", fmt.Errorf("logging in to vault: %w", err)
	case answer.Auth.ClientToken == "":
		return "", fmt.Errorf("%w: the login brought no token", ErrNotAnswering)
	}
	return answer.Auth.ClientToken, nil
}

// notSetUpError is ErrNotSetUp with its reason and the way out.
type notSetUpError struct{ cause error }

func (e *notSetUpError) Error() string   { return ErrNotSetUp.Error() + ": " + e.cause.Error() }
func (e *notSetUpError) Unwrap() []error { return []error{ErrNotSetUp, e.cause} }

// Fix is what a person types.
func (e *notSetUpError) Fix() string {
	return "if this Vault is yours: components.vault.mode: external; if llmbox made it: look at " +
		"kubectl -n vault logs vault-0 for why logins are refused"
}

// logout gives the token back; it ends by itself soon if that fails.
func (v *Vault) logout(ctx context.Context, token string) {
	_ = v.client.call(context.WithoutCancel(ctx), http.MethodPost, "auth/token/revoke-self", token, nil, nil)
}

func (v *Vault) deleteBootstrap(ctx context.Context) error {
	err := v.kube.CoreV1().Secrets(vaultNamespace).Delete(ctx, bootstrapName, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting Secret %s/%s: %w", vaultNamespace, bootstrapName, cluster.Classify(err))
	}
	return nil
}

// secret reads a Secret of Vault's namespace; nil is an absent one.
func (v *Vault) secret(ctx context.Context, name string) (*corev1.Secret, error) {
	secret, err := v.kube.CoreV1().Secrets(vaultNamespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading Secret %s/%s: %w", vaultNamespace, name, cluster.Classify(err))
	}
	return secret, nil
}

// eventually repeats step until it is done or patience ends, and returns the
// last error.
func (v *Vault) eventually(ctx context.Context, step func() (done bool, err error)) error {
	deadline := time.Now().Add(v.patience)
	for {
		done, err := step()
		if done || !time.Now().Before(deadline) {
			return err
		}
		if ctxErr := pause(ctx, v.interval); ctxErr != nil {
			return errors.Join(err, ctxErr)
		}
	}
}

// Ready asks whether Vault is initialised, unsealed and serves KV to a caller
// logged in by Kubernetes auth. waiting says what is missing; err is what does
// not pass by waiting.
func (v *Vault) Ready(ctx context.Context) (ready bool, waiting string, simulatedBy []string, err error) {
	waiting, err = v.waiting(ctx)
	if errors.Is(err, ErrNotAnswering) {
		return false, "Vault to answer: " + err.Error(), nil, nil
	}
	if err != nil || waiting != "" {
		return false, waiting, nil, err
	}
	return true, "", v.client.simulatedBy(), nil
}

func (v *Vault) waiting(ctx context.Context) (string, error) {
	status, err := v.sealStatus(ctx)
	switch {
	case err != nil:
		return "", err
	case !status.Initialized:
		return "Vault to be initialised", nil
	case status.Sealed:
		return "Vault to be unsealed", nil
	}
	token, err := v.login(ctx)
	switch {
	case errors.Is(err, ErrNotSetUp):
		return "Vault's Kubernetes login to be set up: " + err.Error(), nil
	case apierrors.IsNotFound(err):
		return "ServiceAccount " + ownNamespace + "/" + ownAccount + " to be created", nil
	case statusOf(err) >= http.StatusInternalServerError:
		return "Vault to be unsealed", nil
	case err != nil:
		return "", err
	}
	defer v.logout(ctx, token)
	// An absent entry is an answer of KV too.
	if _, err := v.read(ctx, token, gatewayKeysName); statusOf(err) != 0 {
		return "Vault's KV to answer: " + err.Error(), nil
	} else if err != nil {
		return "", err
	}
	return "", nil
}
