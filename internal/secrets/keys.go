package secrets

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	"github.com/llmbox-dev/llmbox/internal/cluster"
)

const (
	// madeAnnotation and the client's name after it hold when a key was made and a
	// fingerprint of that key, so that another key in its place has no wrong date.
	madeAnnotation = "made.keys.llmbox.dev/"
	// syncAnnotation on the ExternalSecret is new with each change: External Secrets
	// reads its store again when an annotation changes.
	syncAnnotation = "llmbox.dev/force-sync"

	// endingChars of a key are shown, if they are few enough of it.
	endingChars     = 4
	endingOfAtLeast = 20

	// finishTimeout bounds the second half of a change whose first half is written.
	finishTimeout = 30 * time.Second
	// kvTries is how often a change is tried again that others were faster than.
	kvTries = 10
)

// The ways in which a gateway key can't be changed, besides ErrNoKey.
var (
	// ErrKeyExists means that the client has a key; a second one would replace it.
	ErrKeyExists = errors.New("this client has a key already")
	// ErrKeyName means that the name can't be a client's.
	ErrKeyName = errors.New("not a client's name")
	// ErrKeysElsewhere means that somebody else's External Secrets set-up decides.
	ErrKeysElsewhere = errors.New("ExternalSecret llm/gateway-keys fills this Secret, but the box has no Vault that llmbox could write to")
	// ErrNoNamespace means that there is no box yet to have keys.
	ErrNoNamespace = errors.New("namespace llm does not exist")
	// ErrNotSynced means that Vault has the change and the gateway's Secret not yet.
	ErrNotSynced = errors.New("operator External Secrets has not brought the key from Vault into Secret llm/gateway-keys")
	// ErrContended means that others changed the keys at the same time, again and again.
	ErrContended = errors.New("others are changing the keys at the same time")
)

// KeyState says whether a key counts.
type KeyState string

// The states of a key. In a box without Vault each is active.
const (
	KeyActive KeyState = "active"
	// KeyPending is in Vault and not in the gateway's Secret.
	KeyPending KeyState = "pending"
	// KeyLeaving is in the gateway's Secret and not in Vault any more.
	KeyLeaving KeyState = "leaving"
)

// Where the keys are kept.
const (
	InVault  = "vault"
	InSecret = "secret"
)

// ClientKey is what may be shown of a client's key.
type ClientKey struct {
	Client string
	// Made is zero if it is not known.
	Made time.Time
	// Ending is the last characters, empty where they would be too much of the key.
	Ending string
	State  KeyState
}

// KeyChange is a change that is written down, with the key it is about. Only
// whoever made a key or tries a revoked one should look at Key.
type KeyChange struct {
	Client string
	Key    string
	// Twin names another client with the same key, which therefore still works.
	Twin    string
	revoked bool
	inVault bool
}

// Keys are the keys that the gateway accepts. Where Vault is set up its KV is what
// counts and External Secrets carries it into the gateway's Secret; without Vault the
// Secret itself counts. An empty entry of KV decides nothing: External Secrets leaves
// the Secret as it is then (external-secrets v0.16.2,
// pkg/controllers/externalsecret/externalsecret_controller.go, DeletionPolicyRetain).
type Keys struct {
	kube    kubernetes.Interface
	dynamic dynamic.Interface
	vault   *Vault // nil if the box has none
	// interval is the time between two looks at what others do.
	interval time.Duration
	now      func() time.Time
}

// NewKeys prepares for the keys of a box, with Vault or without; nothing is sent.
func NewKeys(c *cluster.Client, withVault bool) (*Keys, error) {
	k := &Keys{kube: c.Kube, dynamic: c.Dynamic, interval: 250 * time.Millisecond, now: time.Now}
	if !withVault {
		return k, nil
	}
	var err error
	k.vault, err = NewVault(c, VaultOptions{})
	return k, err
}

// keySession is one look at the keys with what it takes to change them.
type keySession struct {
	token   string // Vault's; empty where the Secret counts
	entry   kvEntry
	secret  *corev1.Secret // nil if there is none
	managed bool           // by an ExternalSecret
}

func (s keySession) inVault() bool { return s.token != "" }

// counts are the keys as they should be.
func (s keySession) counts() map[string]string {
	if len(s.entry.data) > 0 {
		out := make(map[string]string, len(s.entry.data))
		for client, value := range s.entry.data {
			out[client] = keyText(value)
		}
		return out
	}
	return s.works()
}

// works are the keys as the gateway has them.
func (s keySession) works() map[string]string {
	out := map[string]string{}
	if s.secret != nil {
		for client, key := range s.secret.Data {
			out[client] = string(key)
		}
	}
	return out
}

// keyText is a value of KV as External Secrets writes it.
func keyText(value any) string {
	if text, ok := value.(string); ok {
		return text
	}
	raw, err := json.Marshal(value)
	if err != nil {
		return ""
	}
	return string(raw)
}

// open logs in to Vault, if the box has one that is set up. close ends that.
func (k *Keys) open(ctx context.Context) (s keySession, end func(), err error) {
	end = func() {}
	external, err := k.externalSecret(ctx)
	if err != nil {
		return s, end, err
	}
	s.managed = external != nil
	if k.vault == nil {
		return s, end, nil
	}
	status, err := k.vault.sealStatus(ctx)
	switch {
	case apierrors.IsNotFound(err) && !s.managed, err == nil && !status.Initialized && !s.managed:
		// Not there yet: the install will take the Secret over when it is.
		return s, end, nil
	case err != nil:
		return s, end, err
	case !status.Initialized:
		return s, end, fmt.Errorf("%w: it is not initialised", ErrNotAnswering)
	case status.Sealed:
		return s, end, fmt.Errorf("%w: it is sealed", ErrNotAnswering)
	}
	if s.token, err = k.vault.login(ctx); err != nil {
		return s, end, err
	}
	return s, func() { k.vault.logout(ctx, s.token) }, nil
}

// read looks at what there is.
func (k *Keys) read(ctx context.Context, s *keySession) error {
	if s.inVault() {
		var err error
		if s.entry, err = k.vault.read(ctx, s.token, gatewayKeysName); err != nil {
			return fmt.Errorf("reading vault's entry %s: %w", gatewayKeysName, err)
		}
	}
	secret, err := k.kube.CoreV1().Secrets(modelNamespace).Get(ctx, gatewayKeysName, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		s.secret = nil
	case err != nil:
		return fmt.Errorf("reading Secret %s/%s: %w", modelNamespace, gatewayKeysName, cluster.Classify(err))
	default:
		s.secret = secret
	}
	return nil
}

// List returns the clients that have a key, by name, and where keys are kept.
func (k *Keys) List(ctx context.Context) (keys []ClientKey, store string, err error) {
	s, end, err := k.open(ctx)
	if err != nil {
		return nil, "", err
	}
	defer end()
	if err := k.read(ctx, &s); err != nil {
		return nil, "", err
	}
	store = InSecret
	if s.inVault() {
		store = InVault
	}
	counts, works := s.counts(), s.works()
	all := maps.Clone(works)
	maps.Copy(all, counts)
	for _, client := range slices.Sorted(maps.Keys(all)) {
		key := all[client]
		row := ClientKey{Client: client, State: KeyActive, Ending: ending(key)}
		_, stays := counts[client]
		switch {
		case !stays:
			row.State = KeyLeaving
		case works[client] != key:
			row.State = KeyPending
		}
		if s.secret != nil {
			row.Made = madeAt(s.secret.Annotations[madeAnnotation+client], key)
		}
		keys = append(keys, row)
	}
	return keys, store, nil
}

func ending(key string) string {
	if len(key) < endingOfAtLeast {
		return ""
	}
	return key[len(key)-endingChars:]
}

// fingerprint tells keys apart without telling them: eight digits of a hash of a key
// with 238 random bits lead nowhere.
func fingerprint(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:4])
}

func madeNote(at time.Time, key string) string {
	return at.UTC().Format(time.RFC3339) + " " + fingerprint(key)
}

// madeAt is zero for a note about another key.
func madeAt(note, key string) time.Time {
	text, of, _ := strings.Cut(note, " ")
	at, err := time.Parse(time.RFC3339, text)
	if err != nil || of != fingerprint(key) {
		return time.Time{}
	}
	return at
}

// CheckClientName says whether a client can have that name: it is a DNS label, as
// the gateway hands it on in a header and metrics carry it.
func CheckClientName(client string) error {
	if problems := validation.IsDNS1123Label(client); len(problems) > 0 {
		return fmt.Errorf("%w: %q: lower-case letters, digits and - inside, at most %d of them",
			ErrKeyName, client, validation.DNS1123LabelMaxLength)
	}
	return nil
}

// Create makes a key for a client that has none and writes it down; Deliver sees it to
// the gateway. A key is not shown again by anything, so show it before Deliver.
func (k *Keys) Create(ctx context.Context, client string) (KeyChange, error) {
	if err := CheckClientName(client); err != nil {
		return KeyChange{}, err
	}
	random, err := randomText(gatewayKeyChars)
	if err != nil {
		return KeyChange{}, err
	}
	change := KeyChange{Client: client, Key: gatewayKeyPrefix + random}
	s, end, err := k.openToWrite(ctx)
	if err != nil {
		return KeyChange{}, err
	}
	defer end()
	change.inVault = s.inVault()
	taken := func() error {
		_, counts := s.counts()[client]
		// A key on its way out would be taken for the new one.
		if _, works := s.works()[client]; counts || works {
			return fmt.Errorf("%w: %s", ErrKeyExists, client)
		}
		return nil
	}
	if !s.inVault() {
		return change, k.changeSecret(ctx, func(secret *corev1.Secret) (bool, error) {
			s.secret = secret
			if err := taken(); err != nil {
				return false, err
			}
			k.put(secret, change)
			return true, nil
		})
	}
	return change, k.changeEntry(ctx, &s, func() (map[string]any, error) {
		if err := taken(); err != nil {
			return nil, err
		}
		want := map[string]any{client: change.Key}
		for other, key := range s.counts() {
			want[other] = key
		}
		maps.Copy(want, s.entry.data)
		return want, nil
	})
}

// Revoke takes a client's key away, in Vault and in the gateway's Secret alike: the
// Secret doesn't wait for External Secrets, which would not take the last key out of
// it. External Secrets writes only over the version that it read, so it can't bring
// back what it had read before. A revocation that was cut off is done by another one.
func (k *Keys) Revoke(ctx context.Context, client string) (KeyChange, error) {
	s, end, err := k.openToWrite(ctx)
	if err != nil {
		return KeyChange{}, err
	}
	defer end()
	change := KeyChange{Client: client, revoked: true, inVault: s.inVault()}
	if err := k.read(ctx, &s); err != nil {
		return change, err
	}
	key, works := s.works()[client]
	if !works {
		var counts bool
		if key, counts = s.counts()[client]; !counts {
			return change, fmt.Errorf("%w: %s", ErrNoKey, client)
		}
	}
	change.Key = key
	if s.inVault() {
		err := k.changeEntry(ctx, &s, func() (map[string]any, error) {
			if _, there := s.entry.data[client]; !there {
				return nil, nil
			}
			want := maps.Clone(s.entry.data)
			delete(want, client)
			return want, nil
		})
		if err != nil {
			return change, err
		}
	}
	// What is begun is finished: a key that only Vault has forgotten still opens.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), finishTimeout)
	defer cancel()
	err = k.changeSecret(ctx, func(secret *corev1.Secret) (bool, error) {
		for other, value := range secret.Data {
			if other != client && string(value) == key {
				change.Twin = other
			}
		}
		_, there := secret.Data[client]
		_, noted := secret.Annotations[madeAnnotation+client]
		delete(secret.Data, client)
		delete(secret.Annotations, madeAnnotation+client)
		return there || noted, nil
	})
	return change, err
}

// openToWrite refuses where a change would be undone.
func (k *Keys) openToWrite(ctx context.Context) (keySession, func(), error) {
	s, end, err := k.open(ctx)
	if err == nil && s.managed && !s.inVault() {
		end()
		return s, func() {}, ErrKeysElsewhere
	}
	return s, end, err
}

func (k *Keys) put(secret *corev1.Secret, change KeyChange) {
	if secret.Annotations == nil {
		secret.Annotations = map[string]string{}
	}
	secret.Data[change.Client] = []byte(change.Key)
	secret.Annotations[madeAnnotation+change.Client] = madeNote(k.now(), change.Key)
}

// changeEntry writes what change makes of the entry in KV, if nobody wrote it since it
// was read; else it begins anew. Nil is no change.
func (k *Keys) changeEntry(ctx context.Context, s *keySession, change func() (map[string]any, error)) error {
	for range kvTries {
		if err := k.read(ctx, s); err != nil {
			return err
		}
		want, err := change()
		if err != nil || want == nil {
			return err
		}
		err = k.vault.client.call(ctx, http.MethodPost, kvMount+"/data/"+gatewayKeysName, s.token,
			map[string]any{"data": want, "options": map[string]any{"cas": s.entry.version}}, nil)
		if err == nil {
			return nil
		}
		err = fmt.Errorf("writing vault's entry %s: %w", gatewayKeysName, err)
		// Vault has one status for all that is wrong with a request: the version tells
		// whether it was that somebody was faster.
		now, readErr := k.vault.read(ctx, s.token, gatewayKeysName)
		if statusOf(err) != http.StatusBadRequest || readErr != nil || now.version == s.entry.version {
			return err
		}
		if err := pause(ctx, k.interval/10); err != nil {
			return err
		}
	}
	return ErrContended
}

// changeSecret writes what change makes of the gateway's Secret, if nobody wrote it
// since it was read; else it begins anew.
func (k *Keys) changeSecret(ctx context.Context, change func(*corev1.Secret) (bool, error)) error {
	secrets := k.kube.CoreV1().Secrets(modelNamespace)
	var refused error
	attempt := func() error {
		have, err := secrets.Get(ctx, gatewayKeysName, metav1.GetOptions{})
		absent := apierrors.IsNotFound(err)
		if absent {
			have = newSecret(modelNamespace, gatewayKeysName)
		} else if err != nil {
			return err
		}
		if have.Data == nil {
			have.Data = map[string][]byte{}
		}
		changed, err := change(have)
		switch {
		case err != nil || !changed:
			// A refusal is handed on outside the retry, which is for races.
			refused = err
			return nil //nolint:nilerr // see refused
		case absent:
			_, err = secrets.Create(ctx, have, metav1.CreateOptions{FieldManager: cluster.FieldManager})
			return err
		default:
			_, err = secrets.Update(ctx, have, metav1.UpdateOptions{FieldManager: cluster.FieldManager})
			return err
		}
	}
	raced := func(err error) bool {
		return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) && !namespaceMissing(err)
	}
	backoff := retry.DefaultBackoff
	backoff.Steps = kvTries
	err := retry.OnError(backoff, raced, attempt)
	switch {
	case err == nil:
		return refused
	case namespaceMissing(err):
		return ErrNoNamespace
	case raced(err):
		return fmt.Errorf("%w: %w", ErrContended, err)
	}
	return fmt.Errorf("writing Secret %s/%s: %w", modelNamespace, gatewayKeysName, cluster.Classify(err))
}

// Deliver sees a change to the gateway's Secret: through External Secrets where that
// carries it, else by writing it there. progress gets what is waited for. It ends with
// ErrNotSynced when ctx does.
func (k *Keys) Deliver(ctx context.Context, change KeyChange, progress func(string)) error {
	if !change.inVault {
		return nil
	}
	external, err := k.externalSecret(ctx)
	if err != nil {
		return err
	}
	if external != nil {
		if err := k.forceSync(ctx); err != nil {
			return err
		}
	}
	if change.revoked {
		return nil
	}
	if external == nil {
		return k.changeSecret(ctx, func(secret *corev1.Secret) (bool, error) {
			k.put(secret, change)
			return true, nil
		})
	}
	if err := k.awaitSync(ctx, change, progress); err != nil {
		return err
	}
	note, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"annotations": map[string]string{madeAnnotation + change.Client: madeNote(k.now(), change.Key)}}})
	if err != nil {
		return fmt.Errorf("encoding the note: %w", err)
	}
	_, err = k.kube.CoreV1().Secrets(modelNamespace).Patch(ctx, gatewayKeysName, types.MergePatchType, note,
		metav1.PatchOptions{FieldManager: cluster.FieldManager})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("noting when the key was made: %w", cluster.Classify(err))
	}
	return nil
}

// awaitSync waits until the gateway's Secret holds the new key.
func (k *Keys) awaitSync(ctx context.Context, change KeyChange, progress func(string)) error {
	last := ""
	for {
		secret, err := k.kube.CoreV1().Secrets(modelNamespace).Get(ctx, gatewayKeysName, metav1.GetOptions{})
		reason := "External Secrets to bring it from Vault"
		switch {
		case err == nil && string(secret.Data[change.Client]) == change.Key:
			return nil
		case err != nil && !apierrors.IsNotFound(err):
			err = cluster.Classify(err)
			if errors.Is(err, cluster.ErrForbidden) || errors.Is(err, cluster.ErrUnauthorized) {
				return fmt.Errorf("reading Secret %s/%s: %w", modelNamespace, gatewayKeysName, err)
			}
			reason = "the API server: " + err.Error()
		default:
			if external, err := k.externalSecret(ctx); err == nil && external != nil {
				if why := notReady(external); why != "" {
					reason += ": " + why
				}
			}
		}
		// The end of waiting must not hide what was waited for.
		if ctx.Err() == nil && reason != last {
			progress(reason)
			last = reason
		}
		if err := pause(ctx, k.interval); err != nil {
			if errors.Is(err, context.Canceled) {
				return err
			}
			return fmt.Errorf("%w; waited for %s", ErrNotSynced, last)
		}
	}
}

// notReady is what an ExternalSecret says is wrong; empty if nothing.
func notReady(external *unstructured.Unstructured) string {
	list, _, err := unstructured.NestedSlice(external.Object, "status", "conditions")
	if err != nil {
		return ""
	}
	for _, item := range list {
		c, _ := item.(map[string]any)
		if c["type"] == "Ready" && c["status"] != "True" {
			message, _ := c["message"].(string)
			return strings.Join(strings.Fields(message), " ")
		}
	}
	return ""
}

func externalSecretResource() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "external-secrets.io", Version: "v1", Resource: "externalsecrets"}
}

// externalSecret is the one that fills the gateway's Secret; nil if there is none.
func (k *Keys) externalSecret(ctx context.Context) (*unstructured.Unstructured, error) {
	got, err := k.dynamic.Resource(externalSecretResource()).Namespace(modelNamespace).Get(ctx, gatewayKeysName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil // nor is there one where the kind is unknown
	}
	if err != nil {
		return nil, fmt.Errorf("reading ExternalSecret %s/%s: %w", modelNamespace, gatewayKeysName, cluster.Classify(err))
	}
	return got, nil
}

// forceSync makes External Secrets read Vault now.
func (k *Keys) forceSync(ctx context.Context) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"annotations": map[string]string{syncAnnotation: k.now().UTC().Format(time.RFC3339Nano)}}})
	if err != nil {
		return fmt.Errorf("encoding the annotation: %w", err)
	}
	_, err = k.dynamic.Resource(externalSecretResource()).Namespace(modelNamespace).Patch(ctx, gatewayKeysName,
		types.MergePatchType, patch, metav1.PatchOptions{FieldManager: cluster.FieldManager})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("asking External Secrets for a sync: %w", cluster.Classify(err))
	}
	return nil
}
