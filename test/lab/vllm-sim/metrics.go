package main

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// metrics keeps what vLLM would count, under vLLM's names.
// Source: docs.vllm.ai, v0.32.0, "Production Metrics".
type metrics struct {
	mu         sync.Mutex
	counters   map[string]float64
	histograms map[string]*histogram
	ends       map[string]float64
	// requests by the labels of the instrumentator that vLLM puts into its server.
	requests map[string]float64
}

// count counts requests by route, method and class of the answer.
func (m *metrics) count(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := &counted{ResponseWriter: w, code: http.StatusOK}
		next.ServeHTTP(c, r)
		_, route, known := strings.Cut(r.Pattern, " ")
		if !known {
			route = "none"
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.requests[fmt.Sprintf("handler=%q,method=%q,status=\"%dxx\"", route, r.Method, c.code/100)]++
	})
}

type counted struct {
	http.ResponseWriter
	code int
}

func (c *counted) WriteHeader(code int) {
	c.code = code
	c.ResponseWriter.WriteHeader(code)
}

// Unwrap lets http.ResponseController reach Flush.
func (c *counted) Unwrap() http.ResponseWriter { return c.ResponseWriter }

const (
	draftTokens    = "vllm:spec_decode_num_draft_tokens_total"
	acceptedTokens = "vllm:spec_decode_num_accepted_tokens_total"
)

type histogram struct {
	bounds []float64
	counts []float64
	sum    float64
	count  float64
}

// newMetrics starts at zero; drafts says whether there is speculative decoding, without
// which vLLM has no counters of it.
func newMetrics(drafts bool) *metrics {
	wait := []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	step := []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	whole := []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	size := []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000}
	m := &metrics{counters: map[string]float64{}, histograms: map[string]*histogram{}, ends: map[string]float64{}, requests: map[string]float64{}}
	for name, bounds := range map[string][]float64{
		"vllm:time_to_first_token_seconds":           wait,
		"vllm:inter_token_latency_seconds":           step,
		"vllm:request_time_per_output_token_seconds": step,
		"vllm:e2e_request_latency_seconds":           whole,
		"vllm:request_queue_time_seconds":            whole,
		"vllm:request_prefill_time_seconds":          whole,
		"vllm:request_decode_time_seconds":           whole,
		"vllm:request_inference_time_seconds":        whole,
		"vllm:request_prompt_tokens":                 size,
		"vllm:request_generation_tokens":             size,
		"vllm:iteration_tokens_total":                size,
	} {
		m.histograms[name] = &histogram{bounds: bounds, counts: make([]float64, len(bounds))}
	}
	for _, name := range []string{
		"vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total",
		"vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
	} {
		m.counters[name] = 0
	}
	if drafts {
		m.counters[draftTokens], m.counters[acceptedTokens] = 0, 0
	}
	for _, end := range []string{"stop", "length", "abort", "error"} {
		m.ends[end] = 0
	}
	return m
}

func (m *metrics) observe(name string, v float64) {
	h := m.histograms[name]
	for i, b := range h.bounds {
		if v <= b {
			h.counts[i]++
		}
	}
	h.sum += v
	h.count++
}

func (m *metrics) firstToken(ttft, queued, prefill time.Duration, prompt int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counters["vllm:prompt_tokens_total"] += float64(prompt)
	m.counters["vllm:prefix_cache_queries_total"] += float64(prompt)
	m.observe("vllm:time_to_first_token_seconds", ttft.Seconds())
	m.observe("vllm:request_queue_time_seconds", queued.Seconds())
	m.observe("vllm:request_prefill_time_seconds", prefill.Seconds())
	m.observe("vllm:iteration_tokens_total", float64(prompt))
}

func (m *metrics) nextToken(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.observe("vllm:inter_token_latency_seconds", d.Seconds())
	m.observe("vllm:iteration_tokens_total", 1)
}

func (m *metrics) generated() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counters["vllm:generation_tokens_total"]++
	// Made up: each second draft is accepted.
	if _, ok := m.counters[draftTokens]; ok {
		m.counters[draftTokens] += 2
		m.counters[acceptedTokens]++
	}
}

func (m *metrics) finished(reason string, whole, decode time.Duration, prompt, tokens int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ends[reason]++
	m.observe("vllm:e2e_request_latency_seconds", whole.Seconds())
	m.observe("vllm:request_inference_time_seconds", whole.Seconds())
	m.observe("vllm:request_decode_time_seconds", decode.Seconds())
	m.observe("vllm:request_prompt_tokens", float64(prompt))
	m.observe("vllm:request_generation_tokens", float64(tokens))
	if tokens > 1 {
		m.observe("vllm:request_time_per_output_token_seconds", decode.Seconds()/float64(tokens-1))
	}
}

func (m *metrics) ended(reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ends[reason]++
}

func (m *metrics) write(w io.Writer, model string, running, waiting int64, most int, root string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	labels := fmt.Sprintf("engine=\"0\",model_name=%q", model)
	sample := func(name, kind, more string, v float64) {
		if kind != "" {
			_, _ = fmt.Fprintf(w, "# TYPE %s %s\n", name, kind)
		}
		_, _ = fmt.Fprintf(w, "%s{%s%s} %s\n", name, labels, more, number(v))
	}
	sample("vllm:num_requests_running", "gauge", "", float64(running))
	sample("vllm:num_requests_waiting", "gauge", "", float64(waiting))
	sample("vllm:kv_cache_usage_perc", "gauge", "", math.Min(1, float64(running)/float64(most)))
	for _, name := range sorted(m.counters) {
		sample(name, "counter", "", m.counters[name])
	}
	_, _ = fmt.Fprintln(w, "# TYPE vllm:request_success_total counter")
	for _, reason := range sorted(m.ends) {
		sample("vllm:request_success_total", "", ",finished_reason=\""+reason+"\"", m.ends[reason])
	}
	for _, name := range sorted(m.histograms) {
		h := m.histograms[name]
		_, _ = fmt.Fprintf(w, "# TYPE %s histogram\n", name)
		for i, b := range h.bounds {
			sample(name+"_bucket", "", ",le=\""+number(b)+"\"", h.counts[i])
		}
		sample(name+"_bucket", "", ",le=\"+Inf\"", h.count)
		sample(name+"_sum", "", "", h.sum)
		sample(name+"_count", "", "", h.count)
	}
	_, _ = fmt.Fprintln(w, "# TYPE http_requests_total counter")
	for _, labels := range sorted(m.requests) {
		_, _ = fmt.Fprintf(w, "http_requests_total{%s} %s\n", labels, number(m.requests[labels]))
	}
	_, _ = fmt.Fprintf(w, "# TYPE vllm_sim_info gauge\nvllm_sim_info{model=%q} 1\n", root)
}

func sorted[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func number(v float64) string {
	text := strconv.FormatFloat(v, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}
