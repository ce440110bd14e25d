package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/signal"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/openai"
	"github.com/llmbox-dev/llmbox/internal/secrets"
)

const (
	// gatewayWait bounds a change of keys until the gateway honours it. It takes about
	// a second; the rest is for a busy machine.
	gatewayWait = time.Minute
	gatewayPoll = 250 * time.Millisecond
)

// fixedError is an error with its own way out.
type fixedError struct {
	error
	fix string
}

func (e fixedError) Unwrap() error { return e.error }

// Fix is what a person types.
func (e fixedError) Fix() string { return e.fix }

// notReadyError is an installer.ErrNotReady in its own words.
type notReadyError struct{ error }

func (e notReadyError) Unwrap() []error { return []error{installer.ErrNotReady, e.error} }

// notReady marks an error as one of a box that is not ready.
func notReady(fix, format string, args ...any) error {
	return fixedError{notReadyError{fmt.Errorf(format, args...)}, fix}
}

func (a *app) keysCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "keys",
		Short: "List, make and revoke the keys that the gateway accepts",
		Long: `keys looks after who may use the box: each client has a name and a key, and the
gateway hands the name on and keeps the key. Where the box has Vault the keys are
kept there, else in Secret llm/gateway-keys.`,
		Example: `  llmbox keys list
  llmbox keys create ci > ci.key
  llmbox keys revoke ci --yes`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.keysListCommand(), a.keysCreateCommand(), a.keysRevokeCommand())
	return cmd
}

func (a *app) keysListCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "Show who has a key, since when, and its last characters",
		Example: "  llmbox keys list --output json | jq -r '.keys[].name'",
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.runKeysList(cmd) },
	}
}

func (a *app) keysCreateCommand() *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Make a key for a client and show it this once",
		Long: `create makes a key for the client NAME (lower-case letters, digits, -) and prints it
alone on standard output, before anything else can go wrong: it can't be shown
again. Then it waits until the gateway takes the key.`,
		Example: `  llmbox keys create ci > ci.key
  llmbox keys create team-a --output json | jq -r .key`,
		Args: oneName,
		RunE: func(cmd *cobra.Command, args []string) error { return a.runKeysCreate(cmd, args[0], timeout) },
	}
	cmd.Flags().DurationVar(&timeout, "timeout", gatewayWait, "how long to wait until the gateway takes the key")
	return cmd
}

func (a *app) keysRevokeCommand() *cobra.Command {
	var timeout time.Duration
	var force bool
	cmd := &cobra.Command{
		Use:   "revoke NAME",
		Short: "Take a client's key away",
		Long: `revoke takes the key of the client NAME away and waits until the gateway refuses
it. The client ` + secrets.DefaultClient + ` is the box's own: install proves with its key that the box
serves, so it goes only with --force, and ` + "`llmbox keys create " + secrets.DefaultClient + "`" + ` brings one back.`,
		Example: `  llmbox keys revoke ci
  llmbox keys revoke ci --yes --output json`,
		Args: oneName,
		RunE: func(cmd *cobra.Command, args []string) error { return a.runKeysRevoke(cmd, args[0], force, timeout) },
	}
	cmd.Flags().DurationVar(&timeout, "timeout", gatewayWait, "how long to wait until the gateway refuses the key")
	cmd.Flags().BoolVar(&force, "force", false, "revoke the box's own key too")
	return cmd
}

func oneName(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usageError{fmt.Errorf("%d names where one is needed", len(args)), "llmbox keys " + cmd.Use}
	}
	return nil
}

// installedBox is a box as its cluster knows it.
type installedBox struct {
	client  *cluster.Client
	box     config.Box
	gateway string // "namespace/name"
}

// reach connects to the cluster and reads what was chosen for its box. That a model
// would not fit today is no reason not to talk to one that serves.
func (a *app) reach(ctx context.Context, cmd *cobra.Command) (*installedBox, error) {
	s, err := a.decide(ctx, cmd, &boxFlags{}, true, a.newLogger())
	if s == nil {
		return nil, err
	}
	b := &installedBox{client: s.client, box: s.box}
	for _, c := range s.table.Components {
		for _, g := range c.Gates {
			if g.Kind == component.GateToken {
				b.gateway = g.Gateway
			}
		}
	}
	return b, nil
}

func (b *installedBox) door(ctx context.Context) (installer.Door, error) {
	return installer.FindDoor(ctx, b.client, b.box.Gateway.TLS, b.gateway)
}

func (b *installedBox) keys() (*secrets.Keys, error) {
	return secrets.NewKeys(b.client, b.box.Mode("vault") != string(component.Off))
}

func (a *app) runKeysList(cmd *cobra.Command) error {
	b, err := a.reach(cmd.Context(), cmd)
	if err != nil {
		return err
	}
	keys, err := b.keys()
	if err != nil {
		return err
	}
	rows, store, err := keys.List(cmd.Context())
	if err != nil {
		return keysError(err, "")
	}
	return a.printKeys(rows, store)
}

// keyRow is one row of keys list --output json.
type keyRow struct {
	Name string `json:"name"`
	// Made is null if it is not known.
	Made     *time.Time       `json:"made"`
	EndsWith string           `json:"ends_with"`
	State    secrets.KeyState `json:"state"`
}

func (a *app) printKeys(keys []secrets.ClientKey, store string) error {
	if a.output == "json" {
		rows := make([]keyRow, 0, len(keys))
		for _, k := range keys {
			row := keyRow{Name: k.Client, EndsWith: k.Ending, State: k.State}
			if !k.Made.IsZero() {
				row.Made = &k.Made
			}
			rows = append(rows, row)
		}
		return a.printJSON(map[string]any{"keys": rows, "store": store})
	}
	if len(keys) == 0 {
		_, err := fmt.Fprintln(a.env.Stdout, "No client has a key: the gateway refuses every request.\nllmbox keys create NAME makes one.")
		return err
	}
	w := tabwriter.NewWriter(a.env.Stdout, 0, 4, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "CLIENT\tMADE\tENDS WITH\tSTATE")
	notes := map[secrets.KeyState]bool{}
	for _, k := range keys {
		made, ending := "–", "–"
		if !k.Made.IsZero() {
			made = k.Made.UTC().Format("2006-01-02 15:04 UTC")
		}
		if k.Ending != "" {
			ending = "…" + k.Ending
		}
		notes[k.State] = true
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", k.Client, made, ending, k.State)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if notes[secrets.KeyPending] || notes[secrets.KeyLeaving] {
		_, _ = fmt.Fprintln(a.env.Stdout)
	}
	if notes[secrets.KeyPending] {
		_, _ = fmt.Fprintln(a.env.Stdout, "pending: in Vault, and not yet where the gateway reads it")
	}
	if notes[secrets.KeyLeaving] {
		_, _ = fmt.Fprintln(a.env.Stdout, "leaving: no longer in Vault, but the gateway still takes it; llmbox keys revoke ends that")
	}
	return nil
}

// keysError puts the way out beside an error about keys.
func keysError(err error, client string) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled) && client == "":
		return installer.ErrInterrupted
	case errors.Is(err, context.Canceled):
		return fixedError{installer.ErrInterrupted, "llmbox keys list shows whether it was done; a key that nobody has seen: llmbox keys revoke " + client}
	case errors.Is(err, secrets.ErrKeyName):
		return usageError{err, "take a name such as team-a"}
	case errors.Is(err, secrets.ErrKeyExists):
		return usageError{err, "take another name, or for a new key first: llmbox keys revoke " + client}
	case errors.Is(err, secrets.ErrNoKey):
		return usageError{err, "llmbox keys list shows who has one"}
	case errors.Is(err, secrets.ErrKeysElsewhere):
		return fixedError{err, "change the keys where that ExternalSecret reads them, or delete it: kubectl -n llm delete externalsecret gateway-keys"}
	case errors.Is(err, secrets.ErrNoNamespace):
		return notReady("llmbox install makes the box and a first key", "there is no box here: %w", err)
	case errors.Is(err, secrets.ErrNotAnswering):
		return notReady("llmbox status shows what Vault waits for; then llmbox keys list shows whether anything was changed", "the keys are kept in Vault: %w", err)
	case errors.Is(err, secrets.ErrContended):
		return fixedError{err, "run the command again"}
	}
	return err
}

func checkTimeout(timeout time.Duration) error {
	if timeout <= 0 {
		return usageError{fmt.Errorf("--timeout is %s", timeout), "say a time such as --timeout 30s"}
	}
	return nil
}

func (a *app) runKeysCreate(cmd *cobra.Command, name string, timeout time.Duration) error {
	if err := errors.Join(secrets.CheckClientName(name), checkTimeout(timeout)); err != nil {
		return keysError(err, name)
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	b, err := a.reach(ctx, cmd)
	if err != nil {
		return err
	}
	keys, err := b.keys()
	if err != nil {
		return err
	}
	change, err := keys.Create(ctx, name)
	if err != nil {
		return keysError(err, name)
	}
	if err := a.printNewKey(change); err != nil {
		return fixedError{fmt.Errorf("showing the key: %w", err), "nobody has seen it: llmbox keys revoke " + name}
	}
	return a.settleKey(ctx, b, keys, change, timeout, keyWish{
		done: "The gateway takes it",
		fix:  "the key is stored and stays valid; llmbox status shows what is not ready",
	})
}

// printNewKey shows a key the only time it is ever shown: alone on stdout.
func (a *app) printNewKey(change secrets.KeyChange) error {
	if a.output == "json" {
		return a.printJSON(struct {
			Name string `json:"name"`
			Key  string `json:"key"`
		}{change.Client, change.Key})
	}
	_, _ = fmt.Fprintf(a.env.Stderr, "Key of client %s, shown this once:\n", change.Client)
	_, err := fmt.Fprintln(a.env.Stdout, change.Key)
	return err
}

func (a *app) runKeysRevoke(cmd *cobra.Command, name string, force bool, timeout time.Duration) error {
	if err := checkTimeout(timeout); err != nil {
		return err
	}
	if name == secrets.DefaultClient && !force {
		return usageError{fmt.Errorf("%s is the box's own client: without its key no install can prove that the box serves", name),
			"llmbox keys revoke " + name + " --force, and llmbox keys create " + name + " for a new key"}
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	b, err := a.reach(ctx, cmd)
	if err != nil {
		return err
	}
	if err := a.confirm(fmt.Sprintf("Revoke the key of client %q on %s?", name, b.client.REST.Host)); err != nil {
		return err
	}
	keys, err := b.keys()
	if err != nil {
		return err
	}
	change, err := keys.Revoke(ctx, name)
	if err != nil {
		return keysError(err, name)
	}
	err = a.settleKey(ctx, b, keys, change, timeout, keyWish{
		revoked: true, done: "The gateway refuses the key of client " + name,
		fix: "the key is gone from where keys are kept; llmbox status shows why the gateway lags behind",
	})
	if err != nil {
		return err
	}
	if a.output == "json" {
		return a.printJSON(map[string]any{"name": name, "revoked": true})
	}
	return nil
}

// keyWish is how the gateway should treat a key.
type keyWish struct {
	revoked   bool
	done, fix string
}

// settleKey sees a change through to the gateway and says how long it took.
func (a *app) settleKey(ctx context.Context, b *installedBox, keys *secrets.Keys, change secrets.KeyChange, timeout time.Duration, wish keyWish) error {
	began := time.Now()
	waiting, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	say := func(text string) { _, _ = fmt.Fprintln(a.env.Stderr, "Waiting for", text) }
	ended := func(err error) error {
		switch {
		case ctx.Err() != nil:
			return fixedError{installer.ErrInterrupted, wish.fix}
		case waiting.Err() != nil:
			return notReady(wish.fix, "%w", err)
		}
		return err
	}
	if err := keys.Deliver(waiting, change, say); err != nil {
		return ended(err)
	}
	if change.Twin != "" {
		_, _ = fmt.Fprintf(a.env.Stderr, "Client %s has the same key, so the gateway still takes it.\n", change.Twin)
		return nil
	}
	note, err := awaitGateway(waiting, b.door, change.Key, wish.revoked, say)
	if err != nil {
		return ended(err)
	}
	_, _ = fmt.Fprintf(a.env.Stderr, "%s (after %s).%s\n", wish.done, time.Since(began).Round(time.Millisecond), note)
	return nil
}

// awaitGateway asks with the key until the gateway takes it or, revoked, refuses it.
// note is what else there is to say then.
func awaitGateway(ctx context.Context, find func(context.Context) (installer.Door, error), key string, revoked bool, say func(string)) (note string, err error) {
	var client *openai.Client
	last := ""
	for {
		if client == nil {
			var door installer.Door
			if door, err = find(ctx); err == nil {
				client = openai.New(door.HTTP, door.URL, key, gatewayWait)
			} else if errors.Is(err, cluster.ErrForbidden) || errors.Is(err, cluster.ErrUnauthorized) {
				return "", err
			}
		}
		if client != nil {
			_, err = client.Models(ctx)
			done, note := honoured(err, revoked)
			if done {
				return note, nil
			}
		}
		reason := "the gateway to take the key"
		if revoked {
			reason = "the gateway to refuse the key"
		}
		if err != nil {
			reason += ": " + err.Error()
		}
		// The end of waiting must not hide what was waited for.
		if ctx.Err() == nil && reason != last {
			say(reason)
			last = reason
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("waiting for %s: %w", last, ctx.Err())
		case <-time.After(gatewayPoll):
		}
	}
}

// honoured judges the gateway's answer to a request with the key. Envoy checks keys
// before it limits rates and before it looks for an endpoint (the order of HTTP
// filters: envoyproxy/gateway v1.9.1 internal/xds/translator/httpfilters.go), so an answer
// about those shows that the key was taken.
func honoured(err error, revoked bool) (done bool, note string) {
	var answer *openai.StatusError
	refused := errors.As(err, &answer) && answer.Code == http.StatusUnauthorized
	if revoked {
		return refused, ""
	}
	switch {
	case err == nil:
		return true, ""
	case answer == nil || refused:
		return false, ""
	case answer.FromModel, answer.Code == http.StatusTooManyRequests, answer.Code == http.StatusServiceUnavailable:
		return true, " It answers " + answer.Error() + "; llmbox status says why."
	}
	return false, ""
}
