package download

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpproxy"
	"golang.org/x/time/rate"
)

const (
	// bufferSize is what a connection gathers before it writes.
	bufferSize = 256 << 10
	// drainBytes of an answer that nobody wants are read, to keep its connection.
	drainBytes = 64 << 10
)

// Options say how a Client behaves. The zero value is useful.
type Options struct {
	// Proxy are the proxy rules; nil takes HTTP_PROXY, HTTPS_PROXY and NO_PROXY of the
	// environment. An empty Config uses no proxy.
	Proxy *httpproxy.Config
	// CAFile is a PEM file of authorities to trust besides the system's.
	CAFile string
	// UserAgent is "llmbox" where empty.
	UserAgent string
	// Headers go to the origins they belong to, and nowhere else.
	Headers []OriginHeader
	// AllowHTTP permits plain HTTP even where no SHA-256 is known.
	AllowHTTP bool

	// Connections bounds those of all files together (default 8).
	Connections int
	// Rate bounds all files together and HostRate each host, in bytes a second; 0: no bound.
	Rate, HostRate int64

	// ConnectTimeout bounds name lookup and connecting, and again the TLS handshake
	// (default 15 s); HeaderTimeout the time until an answer begins (30 s);
	// StallTimeout the silence within one (30 s).
	ConnectTimeout, HeaderTimeout, StallTimeout time.Duration
	// MinRate is what a connection must bring in bytes a second (default 1024; below 0:
	// nothing) over each MinRateWindow (30 s) in which it was waited for.
	MinRate       int64
	MinRateWindow time.Duration

	// Redirects bounds those of one request (default 10).
	Redirects int
	// Tries is how often in a row nothing may come (default 8).
	Tries int
	// Backoff is the first pause after that, MaxBackoff the longest (1 s, 30 s).
	Backoff, MaxBackoff time.Duration
	// MaxRetryAfter bounds what a server can ask for by Retry-After (2 min).
	MaxRetryAfter time.Duration
}

// OriginHeader is a header for requests to one origin.
type OriginHeader struct {
	// Origin is scheme://host[:port].
	Origin string
	Header http.Header
}

// Bearer is the header with which a token is shown to an origin.
func Bearer(origin, token string) OriginHeader {
	return OriginHeader{Origin: origin, Header: http.Header{"Authorization": {"Bearer " + token}}}
}

// Client downloads. It is safe for concurrent use.
type Client struct {
	options Options
	// next is the transport, or what With put in front of it.
	next http.RoundTripper
	*shared
}

// shared is what clients made by With have in common.
type shared struct {
	slots   chan struct{}
	buffers sync.Pool
	base    *transport
}

func orDefault[T int | int64 | time.Duration](value *T, preset T) {
	if *value == 0 {
		*value = preset
	}
}

// New returns a client.
func New(o Options) (*Client, error) {
	orDefault(&o.Connections, 8)
	orDefault(&o.ConnectTimeout, 15*time.Second)
	orDefault(&o.HeaderTimeout, 30*time.Second)
	orDefault(&o.StallTimeout, 30*time.Second)
	orDefault(&o.MinRate, 1024)
	orDefault(&o.MinRateWindow, 30*time.Second)
	orDefault(&o.Redirects, 10)
	orDefault(&o.Tries, 8)
	orDefault(&o.Backoff, time.Second)
	orDefault(&o.MaxBackoff, 30*time.Second)
	orDefault(&o.MaxRetryAfter, 2*time.Minute)
	if o.UserAgent == "" {
		o.UserAgent = "llmbox"
	}
	if o.Connections < 1 || o.Rate < 0 || o.HostRate < 0 {
		return nil, errors.New("a download needs a connection and no negative rate")
	}
	roots, err := authorities(o.CAFile)
	if err != nil {
		return nil, err
	}
	t := &transport{options: o, headers: map[string]http.Header{}, hosts: map[string]*rate.Limiter{}}
	for _, h := range o.Headers {
		origin, err := parseOrigin(h.Origin)
		if err != nil {
			return nil, err
		}
		if t.headers[origin] == nil {
			t.headers[origin] = http.Header{}
		}
		maps.Copy(t.headers[origin], h.Header.Clone())
	}
	if o.Rate > 0 {
		t.total = t.limiter(o.Rate)
	}
	proxy := o.Proxy
	if proxy == nil {
		proxy = httpproxy.FromEnvironment()
	}
	choose := proxy.ProxyFunc()
	t.proxy = func(u *url.URL) (*url.URL, error) {
		p, err := choose(u)
		if err != nil { // it holds the proxy's address, and with it a password
			return nil, &ProxyError{Proxy: "for " + redact(u), Err: errors.New("not a proxy's address")}
		}
		return p, nil
	}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	t.next = &http.Transport{
		Proxy:                  func(r *http.Request) (*url.URL, error) { return t.proxy(r.URL) },
		OnProxyConnectResponse: proxyAnswer,
		DialContext:            (&net.Dialer{Timeout: o.ConnectTimeout, KeepAlive: 15 * time.Second}).DialContext,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
		TLSHandshakeTimeout:    o.ConnectTimeout,
		ResponseHeaderTimeout:  o.HeaderTimeout,
		MaxIdleConnsPerHost:    o.Connections,
		IdleConnTimeout:        90 * time.Second,
		DisableCompression:     true,
		Protocols:              &protocols,
	}
	s := &shared{slots: make(chan struct{}, o.Connections), base: t}
	s.buffers.New = func() any { b := make([]byte, bufferSize); return &b }
	return &Client{options: o, next: t, shared: s}, nil
}

// Transport sends requests under the client's rules: proxy, authorities, deadlines,
// bandwidth and headers of the origins. It follows no redirect and repeats nothing.
func (c *Client) Transport() http.RoundTripper { return c.base }

// With returns a client that shares everything with c and sends its requests through
// what wrap makes of the transport: a registry's, say, which earns itself a token.
func (c *Client) With(wrap func(http.RoundTripper) http.RoundTripper) *Client {
	return &Client{options: c.options, next: wrap(c.next), shared: c.shared}
}

// CloseIdle closes the connections that nobody uses.
func (c *Client) CloseIdle() { c.base.next.CloseIdleConnections() }

func authorities(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(file) // #nosec G304 -- a file that the caller names
	if err != nil {
		return nil, fmt.Errorf("reading the certificate authorities: %w", err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("reading the certificate authorities: %s holds no PEM certificate", file)
	}
	return pool, nil
}

// origin is the scheme, host and port that a URL's requests go to.
func origin(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return u.Scheme + "://" + net.JoinHostPort(strings.ToLower(strings.TrimSuffix(u.Hostname(), ".")), port)
}

func parseOrigin(text string) (string, error) {
	u, err := url.Parse(text)
	if err != nil || !web(u) || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.User != nil {
		return "", errors.New("a header's origin must be scheme://host[:port]")
	}
	return origin(u), nil
}

func web(u *url.URL) bool {
	return (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != ""
}

func proxyAnswer(_ context.Context, proxy *url.URL, connect *http.Request, resp *http.Response) error {
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	return &StatusError{URL: "https://" + connect.Host, Code: resp.StatusCode, Proxy: redact(proxy), Header: resp.Header}
}

// transport is the way to the network that all clients share.
type transport struct {
	options Options
	headers map[string]http.Header // by origin
	proxy   func(*url.URL) (*url.URL, error)
	next    *http.Transport
	total   *rate.Limiter

	mu    sync.Mutex
	hosts map[string]*rate.Limiter
}

// limiter lets a fiftieth of a second's bytes pass at once: enough to fill the pauses
// that the clock's grain makes, little enough to look steady.
func (t *transport) limiter(bytesPerSecond int64) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(bytesPerSecond), int(max(bytesPerSecond/50, 4<<10)))
}

func (t *transport) host(u *url.URL) *rate.Limiter {
	if t.options.HostRate == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	name := strings.ToLower(u.Hostname())
	if t.hosts[name] == nil {
		t.hosts[name] = t.limiter(t.options.HostRate)
	}
	return t.hosts[name]
}

func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if !web(req.URL) {
		return nil, fmt.Errorf("%q is neither http nor https", req.URL.Scheme)
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	out := req.Clone(ctx)
	if out.Header.Get("User-Agent") == "" {
		out.Header.Set("User-Agent", t.options.UserAgent)
	}
	for name, values := range t.headers[origin(req.URL)] {
		out.Header[http.CanonicalHeaderKey(name)] = values
	}
	resp, err := t.next.RoundTrip(out)
	if err != nil {
		cancel(nil)
		proxy, _ := t.proxy(req.URL)
		return nil, explain(err, req.URL, proxy)
	}
	resp.Request = req
	if resp.Body == nil || resp.Body == http.NoBody {
		cancel(nil)
		return resp, nil
	}
	resp.Body = t.watch(ctx, cancel, resp.Body, req.URL)
	return resp, nil
}

func (t *transport) watch(ctx context.Context, cancel context.CancelCauseFunc, body io.ReadCloser, u *url.URL) *watched {
	w := &watched{
		ctx: ctx, cancel: cancel, body: body, url: redact(u),
		stall: t.options.StallTimeout, minRate: t.options.MinRate, window: t.options.MinRateWindow,
		chunk: bufferSize,
	}
	for _, limiter := range []*rate.Limiter{t.total, t.host(u)} {
		if limiter != nil {
			w.limits, w.chunk = append(w.limits, limiter), min(w.chunk, limiter.Burst())
		}
	}
	w.timer = time.AfterFunc(w.stall, func() { cancel(&StallError{URL: w.url, After: w.stall}) })
	w.timer.Stop()
	return w
}

// watched is a body that neither stalls nor trickles for ever and keeps to the
// bandwidth. Only time in which the network is waited for counts against the server.
type watched struct {
	ctx    context.Context // a body outlives the call that made it
	cancel context.CancelCauseFunc
	body   io.ReadCloser
	url    string
	timer  *time.Timer
	stall  time.Duration
	limits []*rate.Limiter
	chunk  int

	minRate int64
	window  time.Duration
	waited  time.Duration
	bytes   int64
}

func (w *watched) Read(p []byte) (int, error) {
	p = p[:min(len(p), w.chunk)]
	began := time.Now()
	w.timer.Reset(w.stall)
	n, err := w.body.Read(p)
	w.timer.Stop()
	w.waited, w.bytes = w.waited+time.Since(began), w.bytes+int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		if cause := context.Cause(w.ctx); cause != nil {
			err = cause
		}
		return n, err
	}
	for _, limiter := range w.limits {
		if limit := limiter.WaitN(w.ctx, n); limit != nil {
			return n, errors.Join(context.Cause(w.ctx), limit)
		}
	}
	if err == nil && w.waited >= w.window {
		bytesPerSecond := int64(float64(w.bytes) / w.waited.Seconds())
		if bytesPerSecond < w.minRate {
			return n, &SlowError{URL: w.url, Rate: bytesPerSecond, Min: w.minRate, Window: w.waited.Round(time.Millisecond)}
		}
		w.waited, w.bytes = 0, 0
	}
	return n, err
}

func (w *watched) Close() error {
	w.timer.Stop()
	err := w.body.Close()
	w.cancel(nil)
	return err
}
