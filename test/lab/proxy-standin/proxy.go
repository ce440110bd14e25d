package main

import (
	"crypto/subtle"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	apikeyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/api_key_auth/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/local_ratelimit/v3"
)

const (
	apiKeyFilter    = "envoy.filters.http.api_key_auth"
	rateLimitFilter = "envoy.filters.http.local_ratelimit"
)

type proxy struct {
	config  atomic.Pointer[configuration]
	metrics *metrics
	turn    atomic.Uint64
	active  atomic.Int64
	failed  atomic.Bool
	limits  buckets

	mu      sync.Mutex
	servers map[uint32]*http.Server
}

func newProxy(certs string) *proxy {
	return &proxy{servers: map[uint32]*http.Server{}, metrics: newMetrics(certs)}
}

// apply takes a configuration over and opens and closes ports for it.
func (p *proxy) apply(c *configuration) {
	p.config.Store(c)
	p.metrics.know(c)
	p.mu.Lock()
	defer p.mu.Unlock()
	for port := range c.listeners {
		if p.servers[port] != nil {
			continue
		}
		l, err := net.Listen("tcp", net.JoinHostPort("", strconv.Itoa(int(port))))
		if err != nil {
			log.Printf("port %d: %v", port, err)
			continue
		}
		connections := p.metrics.connections.WithLabelValues(c.prefixes[port])
		s := &http.Server{Handler: p.on(port), ReadHeaderTimeout: time.Minute, ConnState: func(_ net.Conn, s http.ConnState) {
			switch s {
			case http.StateNew:
				connections.Inc()
			case http.StateClosed, http.StateHijacked:
				connections.Dec()
			}
		}}
		p.servers[port] = s
		go func() { _ = s.Serve(l) }()
		log.Printf("listening on %s", l.Addr())
	}
	for port, s := range p.servers {
		if _, wanted := c.listeners[port]; !wanted {
			_ = s.Close()
			delete(p.servers, port)
		}
	}
}

func (p *proxy) on(port uint32) http.Handler {
	return http.HandlerFunc(func(to http.ResponseWriter, r *http.Request) {
		p.active.Add(1)
		defer p.active.Add(-1)
		c := p.config.Load()
		prefix, began, w := c.prefixes[port], time.Now(), &counted{ResponseWriter: to}
		p.metrics.active.WithLabelValues(prefix).Inc()
		defer func() {
			p.metrics.active.WithLabelValues(prefix).Dec()
			p.metrics.answered.WithLabelValues(prefix, w.class()).Inc()
			p.metrics.took.WithLabelValues(prefix).Observe(float64(time.Since(began).Microseconds()) / 1000)
			p.metrics.received.WithLabelValues(prefix).Add(float64(max(0, r.ContentLength)))
			p.metrics.sent.WithLabelValues(prefix).Add(float64(w.bytes))
		}()
		route, err := c.route(port, r)
		switch {
		case err != nil:
			answer(w, http.StatusInternalServerError, err.Error())
		case route == nil:
			answer(w, http.StatusNotFound, "")
		case route.GetDirectResponse() != nil:
			answer(w, int(route.GetDirectResponse().GetStatus()), route.GetDirectResponse().GetBody().GetInlineString())
		default:
			p.serve(w, r, c, route, prefix)
		}
	})
}

func answer(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Server", "proxy-standin")
	w.Header().Set("Content-Type", "text/plain")
	w.WriteHeader(code)
	_, _ = io.WriteString(w, text)
}

func (p *proxy) serve(w *counted, r *http.Request, c *configuration, route *routev3.Route, prefix string) {
	if raw := route.GetTypedPerFilterConfig()[apiKeyFilter]; raw != nil {
		auth := &apikeyv3.ApiKeyAuthPerRoute{}
		if err := raw.UnmarshalTo(auth); err != nil {
			answer(w, http.StatusInternalServerError, "reading the route's API keys: "+err.Error())
			return
		}
		if !authenticate(r, auth) {
			p.metrics.keysRefused.WithLabelValues(prefix).Inc()
			answer(w, http.StatusUnauthorized, "Client authentication failed.")
			return
		}
		p.metrics.keysAllowed.WithLabelValues(prefix).Inc()
	}
	if raw := route.GetTypedPerFilterConfig()[rateLimitFilter]; raw != nil {
		limit := &ratelimitv3.LocalRateLimit{}
		if err := raw.UnmarshalTo(limit); err != nil {
			answer(w, http.StatusInternalServerError, "reading the route's rate limit: "+err.Error())
			return
		}
		if b := limit.GetTokenBucket(); b != nil && !p.limits.take(route.GetName(), b, time.Now()) {
			p.metrics.rateLimited.WithLabelValues(limit.GetStatPrefix()).Inc()
			answer(w, http.StatusTooManyRequests, "local_rate_limited")
			return
		}
	}
	target, cluster, err := p.endpoint(c, route.GetRoute())
	if err != nil {
		p.metrics.upNoneHealthy.WithLabelValues(cluster).Inc()
		log.Printf("%s %s: %v", r.Method, r.URL.Path, err)
		answer(w, http.StatusServiceUnavailable, "no healthy upstream")
		return
	}
	began := time.Now()
	p.metrics.upActive.WithLabelValues(cluster).Inc()
	defer func() {
		p.metrics.upActive.WithLabelValues(cluster).Dec()
		p.metrics.upAnswered.WithLabelValues(cluster, w.class()).Inc()
		p.metrics.upTook.WithLabelValues(cluster).Observe(float64(time.Since(began).Microseconds()) / 1000)
	}()
	(&httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.SetURL(&url.URL{Scheme: "http", Host: target})
			pr.Out.Host = pr.In.Host
			pr.SetXForwarded()
		},
		// A token must not wait for the next one.
		FlushInterval: -1,
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() == nil {
				log.Printf("%s %s to %s: %v", r.Method, r.URL.Path, target, err)
			}
			p.metrics.upFailed.WithLabelValues(cluster).Inc()
			answer(w, http.StatusServiceUnavailable, "upstream connect error")
		},
	}).ServeHTTP(w, r)
}

// route finds the first route of the most specific virtual host that matches.
func (c *configuration) route(port uint32, r *http.Request) (*routev3.Route, error) {
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	var best *routev3.VirtualHost
	score := -1
	for _, vh := range c.listeners[port].GetVirtualHosts() {
		for _, d := range vh.GetDomains() {
			s := -1
			switch {
			case strings.EqualFold(d, host):
				s = 1 << 20
			case d == "*":
				s = 0
			case strings.HasPrefix(d, "*") && strings.HasSuffix(strings.ToLower(host), strings.ToLower(d[1:])):
				s = len(d)
			}
			if s > score {
				best, score = vh, s
			}
		}
	}
	for _, route := range best.GetRoutes() {
		ok, err := matches(route.GetMatch(), r)
		if err != nil {
			return nil, err
		}
		if ok {
			return route, nil
		}
	}
	return nil, nil
}

func matches(m *routev3.RouteMatch, r *http.Request) (bool, error) {
	path := r.URL.Path
	ok := false
	switch spec := m.GetPathSpecifier().(type) {
	case *routev3.RouteMatch_Prefix:
		ok = strings.HasPrefix(path, spec.Prefix)
	case *routev3.RouteMatch_Path:
		ok = path == spec.Path
	case *routev3.RouteMatch_PathSeparatedPrefix:
		ok = path == spec.PathSeparatedPrefix || strings.HasPrefix(path, spec.PathSeparatedPrefix+"/")
	case *routev3.RouteMatch_SafeRegex:
		re, err := regexp.Compile("^(?:" + spec.SafeRegex.GetRegex() + ")$")
		if err != nil {
			return false, fmt.Errorf("a route's expression: %w", err)
		}
		ok = re.MatchString(path)
	default:
		return false, fmt.Errorf("this stand-in knows no match like %T", spec)
	}
	if !ok {
		return false, nil
	}
	if len(m.GetQueryParameters()) > 0 || m.GetGrpc() != nil {
		return false, fmt.Errorf("this stand-in matches neither queries nor gRPC")
	}
	for _, h := range m.GetHeaders() {
		value := r.Header.Get(h.GetName())
		if h.GetName() == ":method" {
			value = r.Method
		}
		if h.GetStringMatch().GetExact() == "" || h.GetInvertMatch() {
			return false, fmt.Errorf("this stand-in matches headers by their exact value only")
		}
		if value != h.GetStringMatch().GetExact() {
			return false, nil
		}
	}
	return true, nil
}

// authenticate checks a request's key and, as the filter is told, names the client to
// the server and takes the key away.
func authenticate(r *http.Request, auth *apikeyv3.ApiKeyAuthPerRoute) bool {
	key := ""
	for _, s := range auth.GetKeySources() {
		switch {
		case s.GetHeader() != "":
			key = r.Header.Get(s.GetHeader())
			if strings.EqualFold(s.GetHeader(), "Authorization") {
				key = strings.TrimPrefix(key, "Bearer ")
			}
		case s.GetQuery() != "":
			key = r.URL.Query().Get(s.GetQuery())
		case s.GetCookie() != "":
			if c, err := r.Cookie(s.GetCookie()); err == nil {
				key = c.Value
			}
		}
		if key != "" {
			break
		}
	}
	client, known := "", false
	for _, c := range auth.GetCredentials() {
		if key != "" && subtle.ConstantTimeCompare([]byte(c.GetKey()), []byte(key)) == 1 {
			client, known = c.GetClient(), true
		}
	}
	if !known {
		return false
	}
	if auth.GetForwarding().GetHideCredentials() {
		for _, s := range auth.GetKeySources() {
			if s.GetHeader() != "" {
				r.Header.Del(s.GetHeader())
			}
			if q := r.URL.Query(); s.GetQuery() != "" && q.Has(s.GetQuery()) {
				q.Del(s.GetQuery())
				r.URL.RawQuery = q.Encode()
			}
		}
	}
	if h := auth.GetForwarding().GetHeader(); h != "" {
		r.Header.Set(h, client)
	}
	return true
}

// endpoint takes the next address of the route's cluster, and names the cluster.
func (p *proxy) endpoint(c *configuration, action *routev3.RouteAction) (address, counted string, err error) {
	name := action.GetCluster()
	if weighted := action.GetWeightedClusters().GetClusters(); name == "" && len(weighted) > 0 {
		name = weighted[0].GetName()
	}
	cluster := c.clusters[name]
	if cluster == nil {
		return "", name, fmt.Errorf("there is no cluster %q", name)
	}
	_, addresses := c.addresses(cluster)
	if len(addresses) == 0 {
		return "", statName(cluster), fmt.Errorf("cluster %s has no endpoint", name)
	}
	return addresses[p.turn.Add(1)%uint64(len(addresses))], statName(cluster), nil
}

// addresses counts a cluster's endpoints and lists the healthy ones.
func (c *configuration) addresses(cluster *clusterv3.Cluster) (all int, healthy []string) {
	set := cluster.GetLoadAssignment()
	if set == nil {
		set = c.endpoints[assignment(cluster)]
	}
	for _, locality := range set.GetEndpoints() {
		for _, e := range locality.GetLbEndpoints() {
			all++
			switch e.GetHealthStatus() {
			case corev3.HealthStatus_UNHEALTHY, corev3.HealthStatus_DRAINING, corev3.HealthStatus_TIMEOUT:
				continue
			}
			a := e.GetEndpoint().GetAddress().GetSocketAddress()
			healthy = append(healthy, net.JoinHostPort(a.GetAddress(), strconv.Itoa(int(a.GetPortValue()))))
		}
	}
	return all, healthy
}

// readiness answers as Envoy's own listener does once it has its configuration.
func (p *proxy) readiness() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if p.failed.Load() || p.config.Load() == nil || len(p.config.Load().listeners) == 0 {
			answer(w, http.StatusServiceUnavailable, "")
			return
		}
		answer(w, http.StatusOK, "")
	})
}

// admin is what the shutdown manager beside Envoy asks.
func (p *proxy) admin() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /healthcheck/fail", func(w http.ResponseWriter, _ *http.Request) {
		p.failed.Store(true)
		answer(w, http.StatusOK, "OK\n")
	})
	mux.HandleFunc("POST /drain_listeners", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, "OK\n") })
	mux.HandleFunc("GET /stats", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"stats":[{"name":"http.downstream_cx_active","value":%d}]}`, p.active.Load())
	})
	return mux
}

func (p *proxy) stats() http.Handler { return p.metrics.handler() }
