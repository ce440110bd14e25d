// Command kube-state-metrics-standin takes the place of kube-state-metrics: it asks the
// API server, as the pod's own ServiceAccount, for the kinds it was told to export and
// turns what it gets into those of kube-state-metrics' metrics that the box's rules and
// dashboards read, under upstream's names and labels.
//
// It asks anew at each scrape instead of watching, and knows no other metric.
package main

import (
	"context"
	"errors"
	"flag"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	scrapeTimeout = 8 * time.Second
	drainTime     = 5 * time.Second
)

func main() {
	if err := run(); err != nil {
		log.Fatal("kube-state-metrics-standin: ", err)
	}
}

func run() error {
	fs := flag.NewFlagSet("kube-state-metrics-standin", flag.ContinueOnError)
	host, port := fs.String("host", "", "address of the metrics"), fs.String("port", "8080", "port of the metrics")
	ownHost, ownPort := fs.String("telemetry-host", "", "address of its own state"), fs.String("telemetry-port", "8081", "port of its own state")
	kinds := fs.String("resources", "", "kinds to export, with commas between")
	fs.String("metric-labels-allowlist", "", "ignored")
	fs.Bool("auto-gomemlimit", false, "ignored")
	if err := fs.Parse(os.Args[1:]); err != nil {
		return err
	}
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	exported := &exporter{client: client, kinds: strings.Split(*kinds, ",")}
	if slices.Contains(exported.kinds, "") {
		return errors.New("--resources names no kind")
	}
	metrics, own := prometheus.NewRegistry(), prometheus.NewRegistry()
	metrics.MustRegister(exported)
	own.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kube_state_metrics_standin_info", Help: "This is a stand-in."}, func() float64 { return 1 }))

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	failed := make(chan error, 2)
	for address, registry := range map[string]*prometheus.Registry{
		net.JoinHostPort(*host, *port): metrics, net.JoinHostPort(*ownHost, *ownPort): own,
	} {
		mux := http.NewServeMux()
		mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}))
		for _, path := range []string{"/livez", "/readyz", "/healthz"} {
			mux.HandleFunc("GET "+path, func(http.ResponseWriter, *http.Request) {})
		}
		server := &http.Server{Addr: address, Handler: mux, ReadHeaderTimeout: scrapeTimeout}
		go func() { failed <- server.ListenAndServe() }()
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
			defer cancel()
			_ = server.Shutdown(ctx)
		}()
	}
	log.Printf("kube-state-metrics-standin: a stand-in; exports %s", *kinds)
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	}
}
