package model

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"
)

// HubBase is the public hub.
const HubBase = "https://huggingface.co"

// hubTimeout bounds the reading of one model's description.
const hubTimeout = 30 * time.Second

// What the hub answers when a model can't be read.
var (
	// ErrHubToken: no token, or one that the hub does not know (401).
	ErrHubToken = errors.New("the hub wants a valid token")
	// ErrHubGate: the token's account was not let in (403).
	ErrHubGate = errors.New("the model's terms have to be accepted first")
	// ErrHubAbsent: no such model or file.
	ErrHubAbsent = errors.New("not on the hub")
	// ErrHubBusy: too many questions for now (429).
	ErrHubBusy = errors.New("the hub has had too many questions")
	// ErrHub is any other answer.
	ErrHub = errors.New("the hub can't be read")
)

var (
	hubName     = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$`)
	hubRevision = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$`)
)

// Hub reads the two small files that describe a model. The zero Hub asks the public
// hub without a token.
type Hub struct {
	// Base is the hub's address; empty is HubBase.
	Base string
	// Token is sent to the base's host alone, and never after a redirect.
	Token string
	// Transport is for proxies and tests; nil is the default one.
	Transport http.RoundTripper
}

// Read reads a model at a revision ("" is main).
func (h Hub) Read(ctx context.Context, name, revision string) (Model, error) {
	if !hubName.MatchString(name) {
		return Model{}, fmt.Errorf("reading a model from the hub: %w: %q is not OWNER/NAME", ErrHubAbsent, name)
	}
	if revision == "" {
		revision = "main"
	}
	if !hubRevision.MatchString(revision) || strings.Contains(revision, "..") {
		return Model{}, fmt.Errorf("reading %s from the hub: %w: revision %q", name, ErrHubAbsent, revision)
	}
	ctx, cancel := context.WithTimeout(ctx, hubTimeout)
	defer cancel()
	resolve := "/" + name + "/resolve/" + revision + "/"
	var m Model
	err := h.get(ctx, http.MethodGet, resolve+ConfigFile, func(r *http.Response) (err error) {
		m, err = ReadConfig(r.Body, name)
		return err
	})
	if err != nil {
		return Model{}, fmt.Errorf("reading %s from the hub: %w", name, err)
	}
	err = h.get(ctx, http.MethodGet, resolve+IndexFile, func(r *http.Response) error {
		index, err := ReadIndex(r.Body)
		if err == nil {
			m.withIndex(index.TotalBytes)
		}
		return err
	})
	if errors.Is(err, ErrHubAbsent) {
		// A small model is one file, without an index.
		err = h.get(ctx, http.MethodHead, resolve+"model.safetensors", func(r *http.Response) error {
			if r.ContentLength > 0 && r.ContentLength < maxWeights {
				m.withIndex(r.ContentLength)
			}
			return nil
		})
		if errors.Is(err, ErrHubAbsent) {
			err = nil
		}
	}
	if err != nil {
		return Model{}, fmt.Errorf("reading %s from the hub: %w", name, err)
	}
	m.Source = h.base() + "/" + name + " at " + revision
	err = h.get(ctx, http.MethodGet, "/api/models/"+name, func(r *http.Response) error {
		var about struct {
			// Gated is false, "auto" or "manual".
			Gated    any `json:"gated"`
			CardData struct {
				License any `json:"license"`
			} `json:"cardData"`
		}
		if err := json.NewDecoder(io.LimitReader(r.Body, maxConfigBytes)).Decode(&about); err != nil {
			return fmt.Errorf("%w: %w", ErrHub, err)
		}
		m.Gated = about.Gated != nil && about.Gated != false
		if licence, ok := about.CardData.License.(string); ok && licence != "" {
			m.Licence = licence
		}
		return nil
	})
	// Whether there is a gate is worth knowing, not worth failing for: the files came.
	if err != nil && ctx.Err() != nil {
		return Model{}, fmt.Errorf("reading %s from the hub: %w", name, ctx.Err())
	}
	return m, nil
}

func (h Hub) base() string {
	if h.Base == "" {
		return HubBase
	}
	return strings.TrimRight(h.Base, "/")
}

// get asks one question. The token stays with the first request: Go drops it for
// another domain but not for a subdomain, so every redirect goes without.
func (h Hub) get(ctx context.Context, method, path string, use func(*http.Response) error) error {
	base, err := url.Parse(h.base())
	if err != nil {
		return fmt.Errorf("%w: %w", ErrHub, err)
	}
	request, err := http.NewRequestWithContext(ctx, method, base.String()+path, http.NoBody)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrHub, err)
	}
	if h.Token != "" {
		request.Header.Set("Authorization", "Bearer "+h.Token)
	}
	client := http.Client{Transport: h.Transport, CheckRedirect: func(next *http.Request, before []*http.Request) error {
		if len(before) >= 5 {
			return fmt.Errorf("%w: more than five redirects", ErrHub)
		}
		if base.Scheme == "https" && next.URL.Scheme != "https" {
			return fmt.Errorf("%w: redirect to %s", ErrHub, next.URL.Scheme)
		}
		next.Header.Del("Authorization")
		return nil
	}}
	response, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrHub, err)
	}
	defer func() { _ = response.Body.Close() }()
	switch response.StatusCode {
	case http.StatusOK:
		return use(response)
	case http.StatusUnauthorized:
		return ErrHubToken
	case http.StatusForbidden:
		return ErrHubGate
	case http.StatusNotFound:
		return ErrHubAbsent
	case http.StatusTooManyRequests:
		return ErrHubBusy
	}
	return fmt.Errorf("%w: %s", ErrHub, response.Status)
}
