// Command proxy-standin takes the place of Envoy: it takes its configuration from
// Envoy Gateway's xDS server, as Envoy does, and of that configuration it honours
// what a box needs to serve: listeners, virtual hosts, path matches, API keys (checked,
// forwarded as a client's name, removed), a route's local rate limit (that of all clients
// together), clusters and their endpoints.
//
// It has no TLS towards clients, no rate limits of single clients, timeouts, retries, circuit breakers,
// header rules or load balancing policies; it counts requests, connections and endpoints
// under Envoy's names, and leaves at 0 what it has not.
// A route that asks for something it can't match is refused, never guessed.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"
)

const (
	adminAddress = "127.0.0.1:19000"
	statsAddress = ":19001"
	readyAddress = ":19003"
)

func main() {
	fs := flag.NewFlagSet("proxy-standin", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	cluster := fs.String("service-cluster", "", "the proxy's group, by which the server knows what it gets")
	node := fs.String("service-node", "", "the proxy's own name")
	config := fs.String("config-yaml", "", "Envoy's bootstrap configuration")
	certs := fs.String("certs", "/certs", "`directory` of the client certificate")
	// Envoy's further flags, which mean nothing here.
	for _, name := range []string{"log-level", "drain-strategy", "drain-time-s", "concurrency", "component-log-level", "base-id", "restart-epoch", "log-format"} {
		fs.String(name, "", "ignored")
	}
	for _, name := range []string{"cpuset-threads", "use-dynamic-base-id", "skip-hot-restart-on-no-parent"} {
		fs.Bool(name, false, "ignored")
	}
	if err := fs.Parse(os.Args[1:]); err != nil {
		log.Fatal("proxy-standin: ", err)
	}
	server, err := xdsServer(*config)
	if err != nil {
		log.Fatal("proxy-standin: ", err)
	}
	log.Printf("proxy-standin, a stand-in for Envoy: configuration for %s from %s", *cluster, server)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	p := newProxy(*certs)
	for address, handler := range map[string]http.Handler{adminAddress: p.admin(), statsAddress: p.stats(), readyAddress: p.readiness()} {
		go func() {
			s := &http.Server{Addr: address, Handler: handler, ReadHeaderTimeout: 10 * time.Second}
			log.Fatal("proxy-standin: ", s.ListenAndServe())
		}()
	}
	for ctx.Err() == nil {
		if err := p.follow(ctx, server, *cluster, *node, *certs); err != nil && ctx.Err() == nil {
			log.Printf("xDS: %v; again in a second", err)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
}

// xdsServer finds the address of cluster xds_cluster in the bootstrap configuration.
// Two scalars of a text that Envoy Gateway renders from one template need no parser.
func xdsServer(bootstrap string) (string, error) {
	m := regexp.MustCompile(`(?s)cluster_name: xds_cluster\s+endpoints:.*?address: ['"]?([^\s'"]+)['"]?\s+port_value: (\d+)`).FindStringSubmatch(bootstrap)
	if m == nil {
		return "", fmt.Errorf("the bootstrap configuration names no xds_cluster")
	}
	return m[1] + ":" + m[2], nil
}
