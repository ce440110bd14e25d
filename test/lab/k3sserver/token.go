package k3sserver

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// ErrToken means that what is in the database belongs to another token.
var ErrToken = errors.New("preparing server: failed to bootstrap cluster data: failed to reconcile with local datastore: bootstrap data already found and encrypted with different token")

// token finds the secret with which others join: the one asked for, the one of a former
// start, also of one that was cut off, or a new one. One that is not the database's is refused: k3s keeps its keys in
// there, encrypted with it.
func (l layout) token(asked string) (string, error) {
	secret := secretOf(asked)
	if secret == "" {
		raw, err := os.ReadFile(l.server("token"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("reading the token: %w", err)
		}
		secret = secretOf(string(raw))
	}
	// Before it is in its own file, which comes last, the secret is the server's password.
	passwords := l.server("cred", "passwd")
	if secret == "" {
		raw, err := os.ReadFile(passwords) // #nosec G304 -- in the data directory
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("reading the passwords: %w", err)
		}
		secret, _, _ = strings.Cut(string(raw), ",")
	}
	if secret == "" {
		var err error
		if secret, err = random(16); err != nil {
			return "", err
		}
	}
	sum := sha256.Sum256([]byte(secret))
	now := hex.EncodeToString(sum[:])
	mark := l.server("db", "bootstrap-token.sha256")
	before, err := os.ReadFile(mark) // #nosec G304 -- in the data directory
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := writeFile(passwords, secret+",server,server,k3s:server\n", 0o600); err != nil {
			return "", err
		}
		return secret, writeFile(mark, now+"\n", 0o600)
	case err != nil:
		return "", fmt.Errorf("reading the database's token: %w", err)
	case strings.TrimSpace(string(before)) != now:
		return "", ErrToken
	}
	return secret, nil
}

// secretOf takes the secret out of a token in its long form, K10<hash>::user:secret.
func secretOf(token string) string {
	token = strings.TrimSpace(token)
	if rest, ok := strings.CutPrefix(token, "K10"); ok {
		if _, user, ok := strings.Cut(rest, "::"); ok {
			token = user
		}
	}
	if _, secret, ok := strings.Cut(token, ":"); ok {
		return secret
	}
	return token
}

// writeToken writes the long form, which names the authority by its hash.
func (l layout) writeToken(secret string) error {
	ca, err := os.ReadFile(l.server("tls", "server-ca.crt"))
	if err != nil {
		return fmt.Errorf("reading the authority: %w", err)
	}
	sum := sha256.Sum256(ca)
	if err := writeFile(l.server("token"), "K10"+hex.EncodeToString(sum[:])+"::server:"+secret+"\n", 0o600); err != nil {
		return err
	}
	link := l.server("node-token")
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("linking the token: %w", err)
	}
	if err := os.Symlink(l.server("token"), link); err != nil {
		return fmt.Errorf("linking the token: %w", err)
	}
	return nil
}

// encryption writes how Secrets are encrypted in the database, once.
func (l layout) encryption() (string, error) {
	path := l.server("cred", "encryption-config.json")
	if _, err := os.Stat(path); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	key := make([]byte, 32)
	if _, err := rand.Read(key); err != nil {
		return "", fmt.Errorf("making a key: %w", err)
	}
	return path, writeFile(path, fmt.Sprintf(`{"kind":"EncryptionConfiguration","apiVersion":"apiserver.config.k8s.io/v1","resources":[{"resources":["secrets"],"providers":[{"aescbc":{"keys":[{"name":"aescbckey","secret":%q}]}},{"identity":{}}]}]}
`, base64.StdEncoding.EncodeToString(key)), 0o600)
}

func random(bytes int) (string, error) {
	raw := make([]byte, bytes)
	if _, err := rand.Read(raw); err != nil {
		return "", fmt.Errorf("making a secret: %w", err)
	}
	return hex.EncodeToString(raw), nil
}
