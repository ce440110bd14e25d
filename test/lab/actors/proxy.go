package actors

import (
	"context"
	"crypto/subtle"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

// proxies stand in for the Envoys of the Gateways: each listens on 127.0.0.1,
// routes by path, checks and strips API keys and hands the request to whoever
// answers for the Service.
//
// Timeouts, retries, rate limits, header rules and TLS settings of policies are
// not played; no request here shows what they do.
type proxies struct {
	*plane
	port int // instead of the first listener's; 0 is the listener's own

	mu    sync.Mutex
	bound map[bindKey]*bound
}

type bindKey struct {
	gateway types.UID
	port    int64
}

type bound struct {
	server *http.Server
	err    error
	since  time.Time
}

func newProxies(p *plane, port int) *proxies {
	return &proxies{plane: p, port: port, bound: map[bindKey]*bound{}}
}

// keep brings what is bound in line with the Gateways, and says for which of
// them a port could not be had.
func (x *proxies) keep(gws []*unstructured.Unstructured) map[types.UID]error {
	x.mu.Lock()
	defer x.mu.Unlock()
	failed := map[types.UID]error{}
	wanted := map[bindKey]bool{}
	for _, gw := range gws {
		for i, l := range items(gw.Object, "spec", "listeners") {
			key := bindKey{gw.GetUID(), integer(l, "port")}
			port := key.port
			if i == 0 && x.port != 0 {
				port = int64(x.port)
			}
			wanted[key] = true
			b := x.bound[key]
			if b == nil || (b.err != nil && time.Since(b.since) > time.Second) {
				b = x.bind(gw.GetNamespace(), gw.GetName(), str(l, "name"), port)
				x.bound[key] = b
			}
			if b.err != nil {
				failed[gw.GetUID()] = b.err
			}
		}
	}
	for key, b := range x.bound {
		if !wanted[key] {
			if b.server != nil {
				_ = b.server.Close()
			}
			delete(x.bound, key)
		}
	}
	return failed
}

func (x *proxies) bind(namespace, name, listener string, port int64) *bound {
	var config net.ListenConfig
	l, err := config.Listen(context.Background(), "tcp", net.JoinHostPort("127.0.0.1", strconv.FormatInt(port, 10)))
	if err != nil {
		return &bound{err: fmt.Errorf("binding port %d: %w", port, err), since: time.Now()}
	}
	hs := &http.Server{
		ReadHeaderTimeout: 10 * time.Second,
		ErrorLog:          log.New(io.Discard, "", 0),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			x.handle(w, r, namespace, name, listener)
		}),
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return x.certificate(namespace, name, listener)
		}},
	}
	secure := false
	if gw := x.get(gateways, namespace, name); gw != nil {
		l := listenerOf(gw, listener)
		secure = str(l, "protocol") == "HTTPS"
	}
	go func() {
		if secure {
			_ = hs.ServeTLS(l, "", "")
			return
		}
		_ = hs.Serve(l)
	}()
	x.log.Info("gateway answers", "gateway", namespace+"/"+name, "address", l.Addr().String())
	return &bound{server: hs}
}

func listenerOf(gw *unstructured.Unstructured, name string) map[string]any {
	for _, l := range items(gw.Object, "spec", "listeners") {
		if str(l, "name") == name {
			return l
		}
	}
	return nil
}

// certificate is the one the listener's Secret holds now.
func (x *proxies) certificate(namespace, name, listener string) (*tls.Certificate, error) {
	gw := x.get(gateways, namespace, name)
	if gw == nil {
		return nil, errors.New("gateway is gone")
	}
	for _, ref := range items(listenerOf(gw, listener), "tls", "certificateRefs") {
		secret := x.get(secrets, first(str(ref, "namespace"), namespace), str(ref, "name"))
		if secret == nil {
			continue
		}
		pair, err := tls.X509KeyPair(secretValue(secret, "tls.crt"), secretValue(secret, "tls.key"))
		if err != nil {
			return nil, fmt.Errorf("reading certificate of listener: %w", err)
		}
		return &pair, nil
	}
	return nil, errors.New("listener has no certificate")
}

func secretValue(secret *unstructured.Unstructured, key string) []byte {
	raw, err := base64.StdEncoding.DecodeString(str(secret.Object, "data", key))
	if err != nil {
		return nil
	}
	return raw
}

func (x *proxies) handle(w http.ResponseWriter, r *http.Request, namespace, name, listener string) {
	w.Header().Set(Header, gatewayName)
	gw := x.get(gateways, namespace, name)
	if gw == nil {
		http.Error(w, "", http.StatusNotFound)
		return
	}
	route, rule := x.match(gw, listenerOf(gw, listener), r)
	if rule == nil {
		w.WriteHeader(http.StatusNotFound) // Envoy's answer without a route has no body
		return
	}
	if status, message := x.authorise(r, gw, route); status != 0 {
		http.Error(w, message, status)
		return
	}
	for _, b := range items(rule, "backendRefs") {
		s, err := x.directory.backend(first(str(b, "namespace"), route.GetNamespace()), str(b, "name"), integer(b, "port"))
		if err != nil {
			x.log.Debug("gateway has no backend", "route", route.GetName(), "error", err)
			continue
		}
		s.handler.ServeHTTP(w, r)
		return
	}
	http.Error(w, "no healthy upstream", http.StatusServiceUnavailable)
}

// match finds the rule with the longest matching path among the routes that are
// attached to the listener.
func (x *proxies) match(gw *unstructured.Unstructured, listener map[string]any, r *http.Request) (*unstructured.Unstructured, map[string]any) {
	e := &envoyGateway{plane: x.plane}
	var route *unstructured.Unstructured
	var rule map[string]any
	longest := -1
	for _, candidate := range x.list(httpRoutes, "") {
		attached := slices.ContainsFunc(items(candidate.Object, "spec", "parentRefs"), func(ref map[string]any) bool {
			return e.attaches(candidate, ref, gw, listener)
		})
		if !attached || !hostMatches(texts(candidate.Object, "spec", "hostnames"), r.Host) {
			continue
		}
		for _, rr := range items(candidate.Object, "spec", "rules") {
			matches := items(rr, "matches")
			if len(matches) == 0 {
				matches = []map[string]any{{}}
			}
			for _, m := range matches {
				value := first(str(m, "path", "value"), "/")
				if pathMatches(first(str(m, "path", "type"), "PathPrefix"), value, r.URL.Path) &&
					(str(m, "method") == "" || str(m, "method") == r.Method) && len(value) > longest {
					longest, route, rule = len(value), candidate, rr
				}
			}
		}
	}
	return route, rule
}

func hostMatches(hostnames []string, host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return len(hostnames) == 0 || slices.ContainsFunc(hostnames, func(h string) bool {
		suffix, wild := strings.CutPrefix(h, "*")
		return h == host || wild && strings.HasSuffix(host, suffix)
	})
}

// pathMatches compares by whole path elements, as Gateway API says.
func pathMatches(kind, value, path string) bool {
	switch kind {
	case "Exact":
		return path == value
	case "PathPrefix":
		prefix := strings.TrimSuffix(value, "/")
		return path == prefix || strings.HasPrefix(path, prefix+"/")
	}
	return false // regular expressions are not played
}

// authorise applies the SecurityPolicy of the route or, without one, of the
// Gateway. Status 0 lets the request through.
func (x *proxies) authorise(r *http.Request, gw, route *unstructured.Unstructured) (int, string) {
	policy := x.policyFor("HTTPRoute", route)
	if policy == nil {
		policy = x.policyFor("Gateway", gw)
	}
	if policy == nil || sub(policy.Object, "spec", "apiKeyAuth") == nil {
		return 0, ""
	}
	keys, err := x.keys(policy)
	if err != nil {
		return http.StatusInternalServerError, "" // what a route with an invalid policy gets
	}
	for _, source := range items(policy.Object, "spec", "apiKeyAuth", "extractFrom") {
		for _, given := range credentials(r, source) {
			for client, key := range keys {
				if subtle.ConstantTimeCompare([]byte(given), key) == 1 {
					if header := str(policy.Object, "spec", "apiKeyAuth", "forwardClientIDHeader"); header != "" {
						r.Header.Set(header, client)
					}
					if truth(policy.Object, "spec", "apiKeyAuth", "sanitize") {
						for _, h := range texts(source, "headers") {
							r.Header.Del(h)
						}
					}
					return 0, ""
				}
			}
		}
	}
	return http.StatusUnauthorized, "Client authentication failed."
}

func credentials(r *http.Request, source map[string]any) []string {
	var out []string
	for _, h := range texts(source, "headers") {
		if v := r.Header.Get(h); v != "" {
			out = append(out, strings.TrimPrefix(v, "Bearer "))
		}
	}
	for _, q := range texts(source, "params") {
		if v := r.URL.Query().Get(q); v != "" {
			out = append(out, v)
		}
	}
	for _, c := range texts(source, "cookies") {
		if v, err := r.Cookie(c); err == nil {
			out = append(out, v.Value)
		}
	}
	return out
}

func (x *proxies) policyFor(kind string, o *unstructured.Unstructured) *unstructured.Unstructured {
	for _, policy := range x.list(securityPols, o.GetNamespace()) {
		targets := append(items(policy.Object, "spec", "targetRefs"), sub(policy.Object, "spec", "targetRef"))
		for _, t := range targets {
			if str(t, "kind") == kind && str(t, "name") == o.GetName() {
				return policy
			}
		}
	}
	return nil
}

// keys reads client id → key from the Secrets a SecurityPolicy names.
func (x *proxies) keys(policy *unstructured.Unstructured) (map[string][]byte, error) {
	out := map[string][]byte{}
	for _, ref := range items(policy.Object, "spec", "apiKeyAuth", "credentialRefs") {
		namespace := first(str(ref, "namespace"), policy.GetNamespace())
		secret := x.get(secrets, namespace, str(ref, "name"))
		if secret == nil {
			return nil, fmt.Errorf("secret %s/%s does not exist", namespace, str(ref, "name"))
		}
		for client := range sub(secret.Object, "data") {
			out[client] = secretValue(secret, client)
		}
	}
	return out, nil
}
