package secrets

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
)

// How a box may be made, for the tests that hold for each.
type keyBox struct {
	name            string
	vault, external bool
}

func keyBoxes() []keyBox {
	return []keyBox{{"the Secret alone", false, false}, {"Vault without External Secrets", true, false}, {"Vault and External Secrets", true, true}}
}

func (b keyBox) make(t *testing.T) *fakeAPI {
	t.Helper()
	api := newBox(t)
	if b.vault {
		if err := api.run(VaultOptions{}).SetUp(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if b.external {
		api.addExternalSecret()
		api.syncs = true
	}
	api.log = nil
	return api
}

func (a *fakeAPI) addExternalSecret() {
	a.create(externalSecretPath, map[string]any{
		"apiVersion": "external-secrets.io/v1", "kind": "ExternalSecret",
		"metadata": map[string]any{"namespace": "llm", "name": "gateway-keys"},
		"status": map[string]any{"conditions": []any{map[string]any{
			"type": "Ready", "status": "False", "message": "could not get secret data from provider"}}},
	})
}

// keys is one process of llmbox that looks after keys.
func (a *fakeAPI) keys(vault bool) *Keys { return a.mortal(a.t.Context(), vault) }

// mortal is a process that sends and hears nothing after the end of life, whatever
// contexts it makes for itself.
func (a *fakeAPI) mortal(life context.Context, vault bool) *Keys {
	cfg := a.config()
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if life.Err() != nil {
				return nil, life.Err()
			}
			resp, err := next.RoundTrip(r)
			if life.Err() != nil {
				err = errors.Join(life.Err(), err)
			}
			return resp, err
		})
	})
	kube, err1 := kubernetes.NewForConfig(cfg)
	dyn, err2 := dynamic.NewForConfig(cfg)
	k := &Keys{kube: kube, dynamic: dyn, interval: 10 * time.Millisecond,
		now: func() time.Time { return time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC) }}
	if vault {
		var err error
		if k.vault, err = newVault(cfg, kube, VaultOptions{}); err != nil {
			a.t.Fatal(err)
		}
		k.vault.patience, k.vault.interval = time.Second, time.Millisecond
	}
	if err := errors.Join(err1, err2); err != nil {
		a.t.Fatal(err)
	}
	return k
}

type roundTripper func(*http.Request) (*http.Response, error)

func (fn roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return fn(r) }

func quiet(string) {}

// made creates a client's key and sees it through.
func made(t *testing.T, api *fakeAPI, k *Keys, client string) string {
	t.Helper()
	change, err := k.Create(t.Context(), client)
	if err != nil {
		t.Fatal(err)
	}
	api.mu.Lock()
	api.hide(change.Key)
	api.mu.Unlock()
	if err := k.Deliver(t.Context(), change, quiet); err != nil {
		t.Fatal(err)
	}
	return change.Key
}

func gone(t *testing.T, k *Keys, client string) KeyChange {
	t.Helper()
	change, err := k.Revoke(t.Context(), client)
	if err == nil {
		err = k.Deliver(t.Context(), change, quiet)
	}
	if err != nil {
		t.Fatal(err)
	}
	return change
}

// holds checks the keys in the Secret and, where there is a Vault, in KV.
func holds(t *testing.T, api *fakeAPI, box keyBox, want map[string]string) {
	t.Helper()
	if got := api.data("llm", "gateway-keys"); !maps.Equal(got, want) {
		t.Errorf("the Secret holds %v, want %v", got, want)
	}
	if !box.vault {
		return
	}
	got := map[string]string{}
	for client, key := range api.vault.kv["llmbox/data/gateway-keys"].data {
		got[client] = fmt.Sprint(key)
	}
	if !maps.Equal(got, want) {
		t.Errorf("KV holds %v, want %v", got, want)
	}
}

func TestKeys(t *testing.T) {
	for _, box := range keyBoxes() {
		t.Run(box.name, func(t *testing.T) {
			api := box.make(t)
			k := api.keys(box.vault)
			want := api.data("llm", "gateway-keys")
			for _, client := range []string{"ci", "default2"} {
				want[client] = made(t, api, k, client)
				if !regexp.MustCompile(`^sk-llmbox-[0-9A-Za-z]{40}$`).MatchString(want[client]) {
					t.Errorf("the key is %q", want[client])
				}
			}
			holds(t, api, box, want)
			if _, err := k.Create(t.Context(), "ci"); !errors.Is(err, ErrKeyExists) {
				t.Errorf("a second key: %v", err)
			}
			list, store, err := k.List(t.Context())
			if err != nil || len(list) != 3 || store != map[bool]string{true: InVault, false: InSecret}[box.vault] {
				t.Fatalf("%v, %s, %v", list, store, err)
			}
			for i, client := range []string{"ci", "default", "default2"} {
				key := want[client]
				row := ClientKey{Client: client, Ending: key[len(key)-4:], State: KeyActive}
				if client != DefaultClient {
					row.Made = k.now()
				}
				if list[i] != row {
					t.Errorf("row %d is %+v, want %+v", i, list[i], row)
				}
			}
			for _, client := range []string{"ci", DefaultClient, "default2"} {
				if got := gone(t, k, client); got.Key != want[client] || got.Twin != "" {
					t.Errorf("revoking %s: %+v", client, got)
				}
				delete(want, client)
				holds(t, api, box, want)
				if _, err := k.Revoke(t.Context(), client); !errors.Is(err, ErrNoKey) {
					t.Errorf("revoking %s again: %v", client, err)
				}
			}
			if list, _, err := k.List(t.Context()); err != nil || len(list) != 0 {
				t.Errorf("%v, %v", list, err)
			}
			want["ci"] = made(t, api, k, "ci")
			holds(t, api, box, want)
			api.silent("")
			for token := range api.vault.tokens {
				t.Errorf("token %s was not given back", token)
			}
		})
	}
}

func TestKeyNames(t *testing.T) {
	api := keyBoxes()[0].make(t)
	for _, name := range []string{"", "Team", "a_b", "-a", "a-", "a.b", "a b", "ä", strings.Repeat("a", 64), "../x"} {
		if _, err := api.keys(false).Create(t.Context(), name); !errors.Is(err, ErrKeyName) {
			t.Errorf("%q: %v", name, err)
		}
	}
	if len(api.log) > 0 {
		t.Errorf("asked %v", api.log)
	}
}

// What somebody else put there is shown and revoked, but without too much of it.
func TestForeignKeys(t *testing.T) {
	api := keyBoxes()[0].make(t)
	path := objectPath("secrets", "llm", "gateway-keys")
	api.create(path, map[string]any{
		"metadata": map[string]any{"namespace": "llm", "name": "gateway-keys", "annotations": map[string]any{
			madeAnnotation + "Team_A": madeNote(time.Now(), "another key"),
			madeAnnotation + "twin":   "yesterday",
		}},
		"data": map[string]any{"Team_A": []byte("short"), "twin": []byte("short")},
	})
	k := api.keys(false)
	list, _, err := k.List(t.Context())
	if err != nil || !slices.Equal(list, []ClientKey{{Client: "Team_A", State: KeyActive}, {Client: "twin", State: KeyActive}}) {
		t.Errorf("%+v, %v", list, err)
	}
	if change := gone(t, k, "Team_A"); change.Twin != "twin" {
		t.Errorf("%+v", change)
	}
}

// TestKeysKilled stops creating and revoking at each request, before and after the
// server carried it out; revoking afterwards must always leave nothing.
func TestKeysKilled(t *testing.T) {
	for _, box := range keyBoxes() {
		for _, revoke := range []bool{false, true} {
			for _, last := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, revoke %v, last %v", box.name, revoke, last), func(t *testing.T) {
					for n := 1; ; n++ {
						finished := false
						for _, answered := range []bool{false, true} {
							finished = killKeys(t, box, revoke, last, n, answered)
						}
						if finished {
							break
						}
					}
				})
			}
		}
	}
}

func killKeys(t *testing.T, box keyBox, revoke, last bool, n int, answered bool) (finished bool) {
	t.Helper()
	api := box.make(t)
	k := api.keys(box.vault)
	if last {
		gone(t, k, DefaultClient)
	}
	want := api.data("llm", "gateway-keys")
	if revoke {
		made(t, api, k, "ci")
	}
	ctx, cancel := context.WithCancel(t.Context())
	k = api.mortal(ctx, box.vault)
	api.mu.Lock()
	api.log = nil
	api.cut, api.answered, api.killed = n, answered, cancel
	api.mu.Unlock()
	var change KeyChange
	var err error
	if revoke {
		change, err = k.Revoke(ctx, "ci")
	} else if change, err = k.Create(ctx, "ci"); err == nil {
		api.hide(change.Key)
	}
	if err == nil {
		err = k.Deliver(ctx, change, quiet)
	}
	api.mu.Lock()
	finished = len(api.log) < n
	at := api.log[len(api.log)-1]
	api.cut = 0
	api.mu.Unlock()
	if finished != (err == nil) && !strings.Contains(at, "revoke-self") {
		t.Errorf("at request %d, %s: %v", n, at, err)
	}
	if err != nil {
		api.silent(err.Error())
	}
	later := api.keys(box.vault)
	if _, err := later.Revoke(t.Context(), "ci"); err != nil && !errors.Is(err, ErrNoKey) {
		t.Errorf("after request %d, %s: %v", n, at, err)
	}
	holds(t, api, box, want)
	cancel()
	return finished
}

func TestKeysAtTheSameTime(t *testing.T) {
	for _, box := range keyBoxes() {
		t.Run(box.name, func(t *testing.T) {
			api := box.make(t)
			want := api.data("llm", "gateway-keys")
			made(t, api, api.keys(box.vault), "old")
			var mu sync.Mutex
			var wait sync.WaitGroup
			for i := range 6 {
				wait.Go(func() {
					client := fmt.Sprintf("team-%d", i)
					key := made(t, api, api.keys(box.vault), client)
					mu.Lock()
					defer mu.Unlock()
					want[client] = key
				})
			}
			wait.Go(func() { gone(t, api.keys(box.vault), "old") })
			wait.Wait()
			holds(t, api, box, want)
		})
	}
}

// The states in which what counts and what works differ.
func TestKeysApart(t *testing.T) {
	box := keyBoxes()[2]
	t.Run("External Secrets sleeps", func(t *testing.T) {
		api := box.make(t)
		api.syncs = false
		k := api.keys(true)
		change, err := k.Create(t.Context(), "ci")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		var said []string
		err = k.Deliver(ctx, change, func(s string) { said = append(said, s) })
		if !errors.Is(err, ErrNotSynced) || len(said) != 1 || !strings.Contains(said[0], "could not get secret data from provider") ||
			!strings.Contains(err.Error(), said[0]) {
			t.Errorf("%v, %v", said, err)
		}
		list, _, err := k.List(t.Context())
		if err != nil || list[0].Client != "ci" || list[0].State != KeyPending {
			t.Errorf("%v, %v", list, err)
		}
		// A key is revoked all the same.
		gone(t, k, DefaultClient)
		if got := api.data("llm", "gateway-keys"); len(got) != 0 {
			t.Errorf("the Secret holds %v", got)
		}
	})
	t.Run("an entry without the Secret's key", func(t *testing.T) {
		api := box.make(t)
		api.vault.kv["llmbox/data/gateway-keys"].data = map[string]any{"ci": "sk-llmbox-made-in-vault"}
		k := api.keys(true)
		list, _, err := k.List(t.Context())
		if err != nil || len(list) != 2 || list[0].State != KeyPending || list[1].State != KeyLeaving {
			t.Errorf("%v, %v", list, err)
		}
		if _, err := k.Create(t.Context(), DefaultClient); !errors.Is(err, ErrKeyExists) {
			t.Errorf("a key on its way out: %v", err)
		}
		gone(t, k, DefaultClient)
		holds(t, api, box, map[string]string{"ci": "sk-llmbox-made-in-vault"})
	})
	t.Run("a deleted entry", func(t *testing.T) {
		api := box.make(t)
		want := api.data("llm", "gateway-keys")
		api.vault.kv["llmbox/data/gateway-keys"] = &fakeEntry{version: 3}
		want["ci"] = made(t, api, api.keys(true), "ci")
		holds(t, api, box, want)
	})
	t.Run("Vault is not there yet", func(t *testing.T) {
		api := newBox(t)
		want := api.data("llm", "gateway-keys")
		want["ci"] = made(t, api, api.keys(true), "ci")
		holds(t, api, keyBox{}, want)
		if err := api.run(VaultOptions{}).SetUp(t.Context()); err != nil {
			t.Fatal(err)
		}
		holds(t, api, keyBox{vault: true}, want)
	})
}

func TestKeysRefused(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(api *fakeAPI)
		vault   bool
		want    error
	}{
		"Vault is sealed":            {func(api *fakeAPI) { api.vault.sealed = true }, true, ErrNotAnswering},
		"Vault's pod is away":        {func(api *fakeAPI) { api.proxy = http.StatusServiceUnavailable }, true, ErrNotAnswering},
		"no login":                   {func(api *fakeAPI) { delete(api.vault.written, "auth/kubernetes/role/llmbox") }, true, ErrNotSetUp},
		"somebody else's set-up":     {func(*fakeAPI) {}, false, ErrKeysElsewhere},
		"Vault went and left a sync": {func(api *fakeAPI) { api.vault.wipe() }, true, ErrNotAnswering},
	} {
		t.Run(name, func(t *testing.T) {
			api := keyBoxes()[2].make(t)
			before := api.data("llm", "gateway-keys")
			c.prepare(api)
			_, err := api.keys(c.vault).Create(t.Context(), "ci")
			_, err2 := api.keys(c.vault).Revoke(t.Context(), DefaultClient)
			for _, err := range []error{err, err2} {
				if !errors.Is(err, c.want) {
					t.Errorf("got %v, want %v", err, c.want)
				} else {
					api.silent(err.Error())
				}
			}
			if got := api.data("llm", "gateway-keys"); !maps.Equal(got, before) {
				t.Errorf("the Secret became %v", got)
			}
		})
	}
}
