package main

import (
	"crypto/tls"
	"math"
	"net/http"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// metrics counts what this proxy does under Envoy's names and labels. What it doesn't do
// (time-outs, overflow of circuit breakers, resets) stays at 0.
type metrics struct {
	registry *prometheus.Registry
	began    time.Time

	keysAllowed, keysRefused, rateLimited   *prometheus.CounterVec
	answered                                *prometheus.CounterVec
	active, connections                     *prometheus.GaugeVec
	received, sent                          *prometheus.CounterVec
	took                                    *prometheus.HistogramVec
	members, healthy                        *prometheus.GaugeVec
	upAnswered, upNoneHealthy, upFailed     *prometheus.CounterVec
	upActive                                *prometheus.GaugeVec
	upTook                                  *prometheus.HistogramVec
	alwaysZeroDownstream, alwaysZeroCluster []*prometheus.CounterVec
	pending                                 *prometheus.GaugeVec
}

const (
	prefixLabel  = "envoy_http_conn_manager_prefix"
	clusterLabel = "envoy_cluster_name"
	classLabel   = "envoy_response_code_class"
	limitLabel   = "envoy_local_http_ratelimit_prefix"
)

// daysLeft looks at the client certificate. Without one it says what Envoy says.
func daysLeft(certs string) float64 {
	pair, err := tls.LoadX509KeyPair(filepath.Join(certs, "tls.crt"), filepath.Join(certs, "tls.key"))
	if err != nil {
		return math.MaxUint32
	}
	return math.Floor(time.Until(pair.Leaf.NotAfter).Hours() / 24)
}

func newMetrics(certs string) *metrics {
	m := &metrics{registry: prometheus.NewRegistry(), began: time.Now()}
	counter := func(name string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: "As Envoy has it."}, labels)
		m.registry.MustRegister(v)
		return v
	}
	gauge := func(name string, labels ...string) *prometheus.GaugeVec {
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: "As Envoy has it."}, labels)
		m.registry.MustRegister(v)
		return v
	}
	histogram := func(name string, labels ...string) *prometheus.HistogramVec {
		// Envoy's own buckets, milliseconds.
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: "As Envoy has it.", Buckets: []float64{
			0.5, 1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 300000, 600000, 1800000, 3600000}}, labels)
		m.registry.MustRegister(v)
		return v
	}
	m.keysAllowed = counter("envoy_http_api_key_auth_allowed", prefixLabel)
	m.keysRefused = counter("envoy_http_api_key_auth_unauthorized", prefixLabel)
	m.rateLimited = counter("envoy_http_local_rate_limit_rate_limited", limitLabel)
	m.answered = counter("envoy_http_downstream_rq_xx", prefixLabel, classLabel)
	m.active = gauge("envoy_http_downstream_rq_active", prefixLabel)
	m.connections = gauge("envoy_http_downstream_cx_active", prefixLabel)
	m.received = counter("envoy_http_downstream_cx_rx_bytes_total", prefixLabel)
	m.sent = counter("envoy_http_downstream_cx_tx_bytes_total", prefixLabel)
	m.took = histogram("envoy_http_downstream_rq_time", prefixLabel)
	m.alwaysZeroDownstream = []*prometheus.CounterVec{
		counter("envoy_http_api_key_auth_forbidden", prefixLabel),
		counter("envoy_http_downstream_rq_idle_timeout", prefixLabel),
		counter("envoy_http_downstream_cx_idle_timeout", prefixLabel),
	}
	m.members = gauge("envoy_cluster_membership_total", clusterLabel)
	m.healthy = gauge("envoy_cluster_membership_healthy", clusterLabel)
	m.upAnswered = counter("envoy_cluster_upstream_rq_xx", clusterLabel, classLabel)
	m.upNoneHealthy = counter("envoy_cluster_upstream_cx_none_healthy", clusterLabel)
	m.upFailed = counter("envoy_cluster_upstream_cx_connect_fail", clusterLabel)
	m.upActive = gauge("envoy_cluster_upstream_rq_active", clusterLabel)
	m.upTook = histogram("envoy_cluster_upstream_rq_time", clusterLabel)
	m.pending = gauge("envoy_cluster_upstream_rq_pending_active", clusterLabel)
	m.alwaysZeroCluster = []*prometheus.CounterVec{
		counter("envoy_cluster_upstream_rq_pending_overflow", clusterLabel),
		counter("envoy_cluster_upstream_cx_overflow", clusterLabel),
		counter("envoy_cluster_upstream_rq_rx_reset", clusterLabel),
		counter("envoy_cluster_upstream_rq_tx_reset", clusterLabel),
	}
	m.registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "envoy_server_uptime", Help: "Seconds."}, func() float64 { return time.Since(m.began).Seconds() }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "envoy_server_memory_allocated", Help: "Bytes; here of a Go program."}, func() float64 {
			var stats runtime.MemStats
			runtime.ReadMemStats(&stats)
			return float64(stats.HeapAlloc)
		}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "envoy_server_days_until_first_cert_expiring", Help: "Days."}, func() float64 { return daysLeft(certs) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "proxy_standin_info", Help: "This is a stand-in for Envoy."}, func() float64 { return 1 }),
	)
	return m
}

// know makes the series of what a configuration names, so that they are there before the
// first request, as Envoy's are.
func (m *metrics) know(c *configuration) {
	for _, prefix := range c.prefixes {
		m.keysAllowed.WithLabelValues(prefix)
		m.keysRefused.WithLabelValues(prefix)
		m.active.WithLabelValues(prefix)
		m.connections.WithLabelValues(prefix)
		m.received.WithLabelValues(prefix)
		m.sent.WithLabelValues(prefix)
		m.took.WithLabelValues(prefix)
		for _, v := range m.alwaysZeroDownstream {
			v.WithLabelValues(prefix)
		}
		for class := 1; class <= 5; class++ {
			m.answered.WithLabelValues(prefix, strconv.Itoa(class))
		}
	}
	for _, prefix := range c.limits() {
		m.rateLimited.WithLabelValues(prefix)
	}
	for _, cluster := range c.clusters {
		name := statName(cluster)
		m.upNoneHealthy.WithLabelValues(name)
		m.upFailed.WithLabelValues(name)
		m.upActive.WithLabelValues(name)
		m.upTook.WithLabelValues(name)
		m.pending.WithLabelValues(name)
		for _, v := range m.alwaysZeroCluster {
			v.WithLabelValues(name)
		}
		for class := 1; class <= 5; class++ {
			m.upAnswered.WithLabelValues(name, strconv.Itoa(class))
		}
		all, healthy := c.addresses(cluster)
		m.members.WithLabelValues(name).Set(float64(all))
		m.healthy.WithLabelValues(name).Set(float64(len(healthy)))
	}
}

// statName is the name Envoy counts a cluster under.
func statName(c *clusterv3.Cluster) string {
	if n := c.GetAltStatName(); n != "" {
		return n
	}
	return c.GetName()
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// counted is an answer whose code and size are wanted.
type counted struct {
	http.ResponseWriter
	code  int
	bytes int
}

func (c *counted) WriteHeader(code int) {
	if c.code == 0 {
		c.code = code
	}
	c.ResponseWriter.WriteHeader(code)
}

func (c *counted) Write(b []byte) (int, error) {
	if c.code == 0 {
		c.code = http.StatusOK
	}
	n, err := c.ResponseWriter.Write(b)
	c.bytes += n
	return n, err
}

// Unwrap lets http.ResponseController reach Flush.
func (c *counted) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func (c *counted) class() string { return strconv.Itoa(max(c.code, http.StatusOK) / 100) }
