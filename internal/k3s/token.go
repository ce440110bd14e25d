package k3s

import (
	"context"
	"errors"
	"fmt"
	"path"
	"regexp"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/host"
)

// tokenDeadline bounds asking k3s for a token: it waits for its API server.
const tokenDeadline = 30 * time.Second

// secureToken is the form in which a token names the cluster that it is for: the hash
// of its authority, then a bootstrap token or a server's own. The short form is not
// taken: with it a machine gives itself to whoever answers (docs.k3s.io, "k3s token").
var secureToken = regexp.MustCompile(`^K10[0-9a-f]{64}::[A-Za-z0-9_.:-]+$`)

// ErrToken means that something is no token to join with.
var ErrToken = errors.New("not a token to join with")

// CheckToken says whether a text can be a token. The text is in no error.
func CheckToken(text string) error {
	if !secureToken.MatchString(text) {
		return fmt.Errorf("reading the token: %w", ErrToken)
	}
	return nil
}

// CreateToken makes a token by which other machines join as agents for a while. It is a
// secret: it must not get into any log.
func (m *Machine) CreateToken(ctx context.Context, ttl time.Duration, description string) (string, error) {
	r, err := m.Record(ctx)
	if err != nil {
		return "", err
	}
	if r.Binary.Path == "" || r.Role == Agent {
		return "", &Problem{What: "no k3s server of llmbox is on this machine", Out: "Run it on the machine that others shall join", Err: ErrNoSource}
	}
	result, err := m.run.Run(ctx, host.Command{
		Program: path.Base(r.Binary.Path), Directories: []string{path.Dir(r.Binary.Path)}, Deadline: tokenDeadline,
		Args: []string{"token", "create", "--ttl", ttl.String(), "--description", description, "--data-dir", r.DataDir},
	})
	if err != nil {
		return "", fmt.Errorf("asking k3s for a token: %w", err)
	}
	lines := strings.Fields(string(result.Output))
	if result.Exit != 0 || len(lines) == 0 {
		// What it says beside a token can be a token.
		return "", fmt.Errorf("asking k3s for a token: exit status %d", result.Exit)
	}
	token := lines[len(lines)-1]
	return token, CheckToken(token)
}
