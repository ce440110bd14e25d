package secrets

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	"github.com/llmbox-dev/llmbox/internal/cluster"
)

// DefaultClient is the client id of the key that every box has.
const DefaultClient = "default"

// The Secrets of the box outside Vault, and their keys.
const (
	modelNamespace      = "llm"
	gatewayKeysName     = "gateway-keys"
	hfTokenName         = "hf-token"
	hfTokenKey          = "token"
	monitoringNamespace = "monitoring"
	grafanaName         = "grafana-admin"
	grafanaUserKey      = "admin-user"
	grafanaPasswordKey  = "admin-password"
)

const (
	gatewayKeyPrefix = "sk-llmbox-"
	gatewayKeyChars  = 40
	passwordChars    = 32
	maxTokenBytes    = 4096
)

// ErrNoKey says that the gateway knows no key of that client.
var ErrNoKey = errors.New("no such gateway key")

// BoxSecrets says which of the box's secrets are wanted.
type BoxSecrets struct {
	// Grafana wants the administrator's password.
	Grafana bool
	// GatewayKeys wants at least one client's key.
	GatewayKeys bool
	// HFTokenFile holds a Hugging Face token; empty means that there is none.
	HFTokenFile string
}

// EnsureBoxSecrets creates what is wanted and absent. What was generated once
// stays; only the Hugging Face token follows its file. The namespaces must
// exist.
func EnsureBoxSecrets(ctx context.Context, kube kubernetes.Interface, in BoxSecrets) error {
	if in.HFTokenFile != "" {
		token, err := ReadTokenFile(in.HFTokenFile)
		if err != nil {
			return err
		}
		err = ensureSecret(ctx, kube, modelNamespace, hfTokenName, func(data map[string][]byte) (bool, error) {
			if string(data[hfTokenKey]) == token {
				return false, nil
			}
			data[hfTokenKey] = []byte(token)
			return true, nil
		})
		if err != nil {
			return err
		}
	}
	if in.GatewayKeys {
		err := ensureSecret(ctx, kube, modelNamespace, gatewayKeysName, func(data map[string][]byte) (bool, error) {
			if len(data) > 0 {
				// Somebody may have revoked the default client on purpose.
				return false, nil
			}
			key, err := randomText(gatewayKeyChars)
			if err != nil {
				return false, err
			}
			data[DefaultClient] = []byte(gatewayKeyPrefix + key)
			return true, nil
		})
		if err != nil {
			return err
		}
	}
	if in.Grafana {
		return ensureSecret(ctx, kube, monitoringNamespace, grafanaName, func(data map[string][]byte) (bool, error) {
			changed := false
			if len(data[grafanaUserKey]) == 0 {
				data[grafanaUserKey], changed = []byte("admin"), true
			}
			if len(data[grafanaPasswordKey]) == 0 {
				password, err := randomText(passwordChars)
				if err != nil {
					return false, err
				}
				data[grafanaPasswordKey], changed = []byte(password), true
			}
			return changed, nil
		})
	}
	return nil
}

// GatewayKey returns the key of a client (empty: DefaultClient).
func GatewayKey(ctx context.Context, kube kubernetes.Interface, client string) (string, error) {
	if client == "" {
		client = DefaultClient
	}
	secret, err := kube.CoreV1().Secrets(modelNamespace).Get(ctx, gatewayKeysName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "", fmt.Errorf("%w: Secret %s/%s does not exist", ErrNoKey, modelNamespace, gatewayKeysName)
	}
	if err != nil {
		return "", fmt.Errorf("reading Secret %s/%s: %w", modelNamespace, gatewayKeysName, cluster.Classify(err))
	}
	key := secret.Data[client]
	if len(key) == 0 {
		return "", fmt.Errorf("%w: client %q in Secret %s/%s", ErrNoKey, client, modelNamespace, gatewayKeysName)
	}
	return string(key), nil
}

// ensureSecret lets change fill the Secret's data and writes it if it did. Two
// writers at a time end with one's values, never with a mixture: the loser of
// the race looks again.
func ensureSecret(ctx context.Context, kube kubernetes.Interface, namespace, name string, change func(data map[string][]byte) (bool, error)) error {
	secrets := kube.CoreV1().Secrets(namespace)
	attempt := func() error {
		have, err := secrets.Get(ctx, name, metav1.GetOptions{})
		absent := apierrors.IsNotFound(err)
		switch {
		case absent:
			have = newSecret(namespace, name)
		case err != nil:
			return err
		}
		if have.Data == nil {
			have.Data = map[string][]byte{}
		}
		changed, err := change(have.Data)
		switch {
		case err != nil:
			return err
		case absent:
			_, err = secrets.Create(ctx, have, metav1.CreateOptions{FieldManager: cluster.FieldManager})
		case changed:
			_, err = secrets.Update(ctx, have, metav1.UpdateOptions{FieldManager: cluster.FieldManager})
		}
		return err
	}
	// Created or deleted meanwhile is a conflict like any other.
	raced := func(err error) bool {
		return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) && !namespaceMissing(err)
	}
	if err := retry.OnError(retry.DefaultRetry, raced, attempt); err != nil {
		return fmt.Errorf("writing Secret %s/%s: %w", namespace, name, cluster.Classify(err))
	}
	return nil
}

// namespaceMissing tells an absent namespace, which no retry brings, from an
// absent Secret.
func namespaceMissing(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Kind == "namespaces"
}

func newSecret(namespace, name string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels()},
		Type:       corev1.SecretTypeOpaque,
		Data:       map[string][]byte{},
	}
}

func labels() map[string]string {
	return map[string]string{cluster.ManagedByLabel: cluster.ManagedByValue, cluster.PartOfLabel: cluster.ManagedByValue}
}

// TokenFileError says why a file can't be a token; it never holds its content.
type TokenFileError struct {
	Path    string
	Problem string
	cause   error
}

func (e *TokenFileError) Error() string {
	text := "token file " + e.Path + ": " + e.Problem
	if e.cause != nil {
		text += ": " + e.cause.Error()
	}
	return text
}

func (e *TokenFileError) Unwrap() error { return e.cause }

// Fix is what a person types.
func (e *TokenFileError) Fix() string {
	return "put the token alone into " + e.Path + " (it starts with hf_ and is made at https://huggingface.co/settings/tokens), chmod 600"
}

// ReadTokenFile reads a token and refuses what can't be one: scripts write
// empty variables, "None" and whole sentences into such files.
func ReadTokenFile(path string) (string, error) {
	file, err := os.Open(path) // #nosec G304 -- the path is the user's own setting
	if err != nil {
		return "", &TokenFileError{Path: path, Problem: "it can't be opened", cause: withoutPath(err)}
	}
	defer func() { _ = file.Close() }()
	raw, err := io.ReadAll(io.LimitReader(file, maxTokenBytes+1))
	if err != nil {
		return "", &TokenFileError{Path: path, Problem: "it can't be read", cause: withoutPath(err)}
	}
	if len(raw) > maxTokenBytes {
		return "", &TokenFileError{Path: path, Problem: "it is too long for a token"}
	}
	token := strings.TrimSuffix(strings.TrimSuffix(string(raw), "\n"), "\r")
	switch {
	case token == "":
		return "", &TokenFileError{Path: path, Problem: "it is empty"}
	case strings.EqualFold(token, "none"), strings.EqualFold(token, "null"):
		return "", &TokenFileError{Path: path, Problem: "it holds the word a script writes when it has no token"}
	case strings.ContainsFunc(token, unicode.IsSpace):
		return "", &TokenFileError{Path: path, Problem: "it holds spaces or more than one line"}
	case strings.ContainsFunc(token, func(r rune) bool { return r > unicode.MaxASCII || !unicode.IsPrint(r) }):
		return "", &TokenFileError{Path: path, Problem: "it holds characters that no token has"}
	}
	return token, nil
}

func withoutPath(err error) error {
	var pathErr *os.PathError
	if errors.As(err, &pathErr) {
		return pathErr.Err
	}
	return err
}

const base62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// randomText draws n characters, each equally likely.
func randomText(n int) (string, error) {
	const fair = 256 - 256%len(base62) // bytes from here on would favour the first characters
	out := make([]byte, 0, n)
	buf := make([]byte, 2*n)
	for len(out) < n {
		if _, err := rand.Read(buf); err != nil {
			return "", fmt.Errorf("drawing random bytes: %w", err)
		}
		for _, b := range buf {
			if int(b) < fair && len(out) < n {
				out = append(out, base62[int(b)%len(base62)])
			}
		}
	}
	return string(out), nil
}
