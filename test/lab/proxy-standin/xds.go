package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/local_ratelimit/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/types/known/anypb"
)

const (
	listenerType = "type.googleapis.com/envoy.config.listener.v3.Listener"
	clusterType  = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	routeType    = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration"
	endpointType = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
)

// snapshot is what the server has sent, by type and name.
type snapshot map[string]map[string]*anypb.Any

// follow keeps one stream of changes open and applies them.
func (p *proxy) follow(ctx context.Context, server, cluster, node, certs string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	creds, err := clientTLS(certs)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient(server, grpc.WithTransportCredentials(creds),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 5 * time.Second}))
	if err != nil {
		return fmt.Errorf("reaching the server: %w", err)
	}
	defer func() { _ = conn.Close() }()
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	if err != nil {
		return fmt.Errorf("reaching the server: %w", err)
	}
	have := snapshot{listenerType: {}, clusterType: {}, routeType: {}, endpointType: {}}
	asked := map[string][]string{}
	who := &corev3.Node{Id: node, Cluster: cluster, UserAgentName: "llmbox-proxy-standin"}
	// Clusters first, as Envoy does: routes name them. No names means all.
	for _, kind := range []string{clusterType, listenerType} {
		if err := stream.Send(&discoveryv3.DeltaDiscoveryRequest{Node: who, TypeUrl: kind}); err != nil {
			return fmt.Errorf("subscribing: %w", err)
		}
	}
	for {
		r, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("receiving: %w", err)
		}
		for _, name := range r.RemovedResources {
			delete(have[r.TypeUrl], name)
		}
		for _, res := range r.Resources {
			if m := have[r.TypeUrl]; m != nil {
				m[res.Name] = res.Resource
			}
		}
		if err := stream.Send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: r.TypeUrl, ResponseNonce: r.Nonce}); err != nil {
			return fmt.Errorf("acknowledging: %w", err)
		}
		config, err := have.read()
		if err != nil {
			return err
		}
		for kind, names := range map[string][]string{routeType: config.routeNames, endpointType: config.endpointNames} {
			var more, fewer []string
			for _, n := range names {
				if !slices.Contains(asked[kind], n) {
					more = append(more, n)
				}
			}
			for _, n := range asked[kind] {
				if !slices.Contains(names, n) {
					fewer = append(fewer, n)
				}
			}
			if len(more)+len(fewer) == 0 {
				continue
			}
			asked[kind] = names
			if err := stream.Send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: kind, ResourceNamesSubscribe: more, ResourceNamesUnsubscribe: fewer}); err != nil {
				return fmt.Errorf("subscribing: %w", err)
			}
		}
		log.Printf("xDS: %d listeners, %d routes, %d clusters, %d endpoint sets",
			len(have[listenerType]), len(have[routeType]), len(have[clusterType]), len(have[endpointType]))
		p.apply(config)
	}
}

func clientTLS(dir string) (credentials.TransportCredentials, error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	if err != nil {
		return nil, fmt.Errorf("reading the client certificate: %w", err)
	}
	ca, err := os.ReadFile(filepath.Join(dir, "ca.crt")) // #nosec G304 -- the pod's own volume
	if err != nil {
		return nil, fmt.Errorf("reading the server's authority: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, errors.New("reading the server's authority: it holds no certificate")
	}
	// The name in the certificate that Envoy Gateway makes for itself.
	return credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots, ServerName: "envoy-gateway", MinVersion: tls.VersionTLS12}), nil
}

// configuration is what of a snapshot this proxy acts on.
type configuration struct {
	// routes of each port; nil where the listener's routes have not come yet.
	listeners map[uint32]*routev3.RouteConfiguration
	// prefixes are the names of the listeners in metrics.
	prefixes  map[uint32]string
	clusters  map[string]*clusterv3.Cluster
	endpoints map[string]*endpointv3.ClusterLoadAssignment

	routeNames, endpointNames []string
}

func (s snapshot) read() (*configuration, error) {
	c := &configuration{
		listeners: map[uint32]*routev3.RouteConfiguration{}, prefixes: map[uint32]string{}, clusters: map[string]*clusterv3.Cluster{},
		endpoints: map[string]*endpointv3.ClusterLoadAssignment{},
	}
	for name, raw := range s[clusterType] {
		cluster := &clusterv3.Cluster{}
		if err := raw.UnmarshalTo(cluster); err != nil {
			return nil, fmt.Errorf("reading cluster %s: %w", name, err)
		}
		c.clusters[name] = cluster
		if cluster.GetType() == clusterv3.Cluster_EDS {
			c.endpointNames = append(c.endpointNames, assignment(cluster))
		}
	}
	for name, raw := range s[endpointType] {
		e := &endpointv3.ClusterLoadAssignment{}
		if err := raw.UnmarshalTo(e); err != nil {
			return nil, fmt.Errorf("reading the endpoints of %s: %w", name, err)
		}
		c.endpoints[name] = e
	}
	for name, raw := range s[listenerType] {
		l := &listenerv3.Listener{}
		if err := raw.UnmarshalTo(l); err != nil {
			return nil, fmt.Errorf("reading listener %s: %w", name, err)
		}
		if err := c.listener(l, s[routeType]); err != nil {
			return nil, err
		}
	}
	slices.Sort(c.routeNames)
	slices.Sort(c.endpointNames)
	c.routeNames, c.endpointNames = slices.Compact(c.routeNames), slices.Compact(c.endpointNames)
	return c, nil
}

// limits are the names under which rate limits of the routes are counted.
func (c *configuration) limits() []string {
	var names []string
	for _, routes := range c.listeners {
		for _, host := range routes.GetVirtualHosts() {
			for _, route := range host.GetRoutes() {
				limit := &ratelimitv3.LocalRateLimit{}
				if raw := route.GetTypedPerFilterConfig()[rateLimitFilter]; raw != nil && raw.UnmarshalTo(limit) == nil {
					names = append(names, limit.GetStatPrefix())
				}
			}
		}
	}
	return names
}

func assignment(c *clusterv3.Cluster) string {
	if n := c.GetEdsClusterConfig().GetServiceName(); n != "" {
		return n
	}
	return c.GetName()
}

func (c *configuration) listener(l *listenerv3.Listener, routes map[string]*anypb.Any) error {
	port := l.GetAddress().GetSocketAddress().GetPortValue()
	if port == 0 || port >= 19000 && port <= 19003 {
		return nil // Envoy's own ports, which are answered whatever the server says
	}
	chains := l.GetFilterChains()
	if l.GetDefaultFilterChain() != nil {
		chains = append(chains, l.GetDefaultFilterChain())
	}
	for _, chain := range chains {
		if chain.GetTransportSocket() != nil {
			log.Printf("listener %s wants TLS, which this stand-in has not", l.GetName())
			continue
		}
		for _, f := range chain.GetFilters() {
			m := &hcmv3.HttpConnectionManager{}
			if !f.GetTypedConfig().MessageIs(m) {
				continue
			}
			if err := f.GetTypedConfig().UnmarshalTo(m); err != nil {
				return fmt.Errorf("reading listener %s: %w", l.GetName(), err)
			}
			c.listeners[port], c.prefixes[port] = m.GetRouteConfig(), m.GetStatPrefix()
			name := m.GetRds().GetRouteConfigName()
			if name == "" {
				continue
			}
			c.routeNames = append(c.routeNames, name)
			if raw := routes[name]; raw != nil {
				r := &routev3.RouteConfiguration{}
				if err := raw.UnmarshalTo(r); err != nil {
					return fmt.Errorf("reading routes %s: %w", name, err)
				}
				c.listeners[port] = r
			}
		}
	}
	return nil
}
