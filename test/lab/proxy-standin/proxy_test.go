package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	apikeyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/api_key_auth/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/local_ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func TestBootstrap(t *testing.T) {
	address, err := xdsServer(`static_resources:
  clusters:
  - name: prometheus_stats
    load_assignment:
      cluster_name: prometheus_stats
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 19000}}}
  - connect_timeout: 10s
    load_assignment:
      cluster_name: xds_cluster
      endpoints:
      - load_balancing_weight: 1
        lb_endpoints:
        - load_balancing_weight: 1
          endpoint:
            address:
              socket_address:
                address: envoy-gateway.envoy-gateway-system.svc.cluster.local.
                port_value: 18000
`)
	if err != nil || address != "envoy-gateway.envoy-gateway-system.svc.cluster.local.:18000" {
		t.Errorf("got %q, %v", address, err)
	}
	if _, err := xdsServer("admin: {}"); err == nil {
		t.Error("a configuration without a server is taken")
	}
}

// The whole way of a request: host, path, key, endpoint.
func TestServes(t *testing.T) {
	var got http.Header
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.Header }))
	defer upstream.Close()
	auth, err := anypb.New(&apikeyv3.ApiKeyAuthPerRoute{
		Credentials: []*apikeyv3.Credential{{Key: "right", Client: "somebody"}},
		KeySources:  []*apikeyv3.KeySource{{Header: "Authorization"}, {Header: "x-api-key"}},
		Forwarding:  &apikeyv3.Forwarding{Header: "x-llmbox-client", HideCredentials: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	host, port := upstream.Listener.Addr().String()[:9], upstream.Listener.Addr().String()[10:]
	number := uint32(0)
	for _, d := range port {
		number = number*10 + uint32(d-'0') // #nosec G115 -- a port
	}
	endpoints := &endpointv3.ClusterLoadAssignment{Endpoints: []*endpointv3.LocalityLbEndpoints{{LbEndpoints: []*endpointv3.LbEndpoint{{
		HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{Address: &corev3.Address{Address: &corev3.Address_SocketAddress{
			SocketAddress: &corev3.SocketAddress{Address: host, PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: number}}}}}},
	}}}}}
	limit, err := anypb.New(&ratelimitv3.LocalRateLimit{StatPrefix: "http_local_rate_limiter", TokenBucket: &typev3.TokenBucket{
		MaxTokens: 2, TokensPerFill: wrapperspb.UInt32(2), FillInterval: durationpb.New(time.Hour)}})
	if err != nil {
		t.Fatal(err)
	}
	to := func(cluster string) *routev3.Route_Route {
		return &routev3.Route_Route{Route: &routev3.RouteAction{ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: cluster}}}
	}
	p := newProxy(t.TempDir())
	p.config.Store(&configuration{
		listeners: map[uint32]*routev3.RouteConfiguration{8080: {VirtualHosts: []*routev3.VirtualHost{{
			Domains: []string{"*"},
			Routes: []*routev3.Route{
				{Match: &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_PathSeparatedPrefix{PathSeparatedPrefix: "/v1"}}, Action: to("model"), TypedPerFilterConfig: map[string]*anypb.Any{apiKeyFilter: auth}},
				{Name: "limited", Match: &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Path{Path: "/limited"}}, Action: to("model"),
					TypedPerFilterConfig: map[string]*anypb.Any{apiKeyFilter: auth, rateLimitFilter: limit}},
				{Match: &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Path{Path: "/empty"}}, Action: to("nobody")},
				{Match: &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_ConnectMatcher_{}}, Action: to("model")},
			},
		}}}},
		clusters:  map[string]*clusterv3.Cluster{"model": {Name: "model"}, "nobody": {Name: "nobody"}},
		endpoints: map[string]*endpointv3.ClusterLoadAssignment{"model": endpoints},
	})
	for _, tt := range []struct {
		name, path, header, value string
		code                      int
	}{
		{"with the key", "/v1/models", "Authorization", "Bearer right", 200},
		{"in the other header", "/v1", "x-api-key", "right", 200},
		{"without a key", "/v1/models", "", "", 401},
		{"with a wrong key", "/v1/models", "Authorization", "Bearer wrong", 401},
		{"an empty key", "/v1/models", "Authorization", "Bearer ", 401},
		{"within the limit", "/limited", "x-api-key", "right", 200},
		{"refused before it is counted", "/limited", "x-api-key", "wrong", 401},
		{"the last within the limit", "/limited", "x-api-key", "right", 200},
		{"beyond the limit", "/limited", "x-api-key", "right", 429},
		{"no endpoint", "/empty", "", "", 503},
		{"a match that is not known", "/v1x", "", "", 500},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got = nil
			r := httptest.NewRequest(http.MethodGet, "http://box:8080"+tt.path, nil)
			r.Header.Set("x-llmbox-client", "forged")
			if tt.header != "" {
				r.Header.Set(tt.header, tt.value)
			}
			w := httptest.NewRecorder()
			p.on(8080).ServeHTTP(w, r)
			if w.Code != tt.code {
				t.Fatalf("got %d %s, want %d", w.Code, w.Body, tt.code)
			}
			if tt.code != 200 {
				if got != nil && tt.code != 503 {
					t.Error("the request reached the server")
				}
				return
			}
			if got.Get("x-llmbox-client") != "somebody" || got.Get("Authorization") != "" || got.Get("x-api-key") != "" {
				t.Errorf("the server saw %v", got)
			}
		})
	}
	w := httptest.NewRecorder()
	p.stats().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/stats/prometheus", nil))
	if want := `envoy_http_local_rate_limit_rate_limited{envoy_local_http_ratelimit_prefix="http_local_rate_limiter"} 1`; !strings.Contains(w.Body.String(), want) {
		t.Errorf("the metrics lack %s", want)
	}
}

// A bucket is filled by and by, up to what it holds, and anew when its limit changes.
func TestBuckets(t *testing.T) {
	limit := func(most, fill uint32) *typev3.TokenBucket {
		return &typev3.TokenBucket{MaxTokens: most, TokensPerFill: wrapperspb.UInt32(fill), FillInterval: durationpb.New(time.Minute)}
	}
	began := time.Unix(0, 0)
	var b buckets
	for _, tt := range []struct {
		after time.Duration
		route string
		limit *typev3.TokenBucket
		takes int
		got   int
	}{
		{0, "a", limit(3, 2), 5, 3},
		{0, "b", limit(1, 1), 2, 1},
		{59 * time.Second, "a", limit(3, 2), 1, 0},
		{61 * time.Second, "a", limit(3, 2), 3, 2},
		{time.Hour, "a", limit(3, 2), 5, 3},
		{time.Hour, "a", limit(5, 2), 9, 5},
	} {
		got := 0
		for range tt.takes {
			if b.take(tt.route, tt.limit, began.Add(tt.after)) {
				got++
			}
		}
		if got != tt.got {
			t.Errorf("after %s, route %s: %d of %d were let through, want %d", tt.after, tt.route, got, tt.takes, tt.got)
		}
	}
}
