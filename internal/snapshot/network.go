package snapshot

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// startNetwork asks the network; everything leaves at once.
func (c *collector) startNetwork(ctx context.Context) {
	if c.options.Offline {
		c.answer(ProbeClock, Clock{Local: time.Now().UTC(), Synchronized: synchronized()})
		return
	}
	names := c.options.DNSNames
	if len(names) == 0 {
		for _, h := range c.options.Hosts {
			if u, err := endpoint(h); err == nil && net.ParseIP(u.Hostname()) == nil && !slices.Contains(names, u.Hostname()) {
				names = append(names, u.Hostname())
			}
		}
	}
	resolved, asked := make([]DNS, len(names)), make([]HTTPS, len(c.options.Hosts))
	clocks := make([]Clock, len(c.options.Hosts))
	var dns, https sync.WaitGroup
	for i, name := range names {
		resolved[i] = DNS{Name: name}
		dns.Go(func() { c.oneDNS(ctx, name, &resolved[i]) })
	}
	for i, h := range c.options.Hosts {
		asked[i] = HTTPS{URL: h}
		https.Go(func() { c.oneHTTPS(ctx, h, &asked[i], &clocks[i]) })
	}
	// Those who wait take no slot of the looks at the machine.
	c.await(ProbeDNS, &dns, func() any { return resolved })
	c.await(ProbeHTTPS, &https, func() any { return asked })
	c.await(ProbeClock, &https, func() any { return clockOf(clocks) })
}

// await keeps an answer once everybody it consists of is back.
func (c *collector) await(name string, parts *sync.WaitGroup, value func() any) {
	place := probeDir + name
	c.mu.Lock()
	c.pending[place]++
	c.mu.Unlock()
	c.group.Go(func() {
		parts.Wait()
		c.answer(name, value())
		c.mu.Lock()
		delete(c.pending, place)
		c.mu.Unlock()
	})
}

func (c *collector) oneDNS(ctx context.Context, name string, out *DNS) {
	ctx, cancel := context.WithTimeout(ctx, c.networkDeadline())
	defer cancel()
	begin := time.Now()
	addresses, err := c.resolver().LookupNetIP(ctx, "ip", name)
	out.ElapsedMS = time.Since(begin).Milliseconds()
	if err != nil {
		out.Error = oneLine(err)
		return
	}
	for _, a := range addresses {
		out.Addresses = append(out.Addresses, a.Unmap().String())
	}
	slices.Sort(out.Addresses)
}

func (c *collector) resolver() *net.Resolver {
	if c.options.Resolver != nil {
		return c.options.Resolver
	}
	return &net.Resolver{PreferGo: true}
}

func (c *collector) networkDeadline() time.Duration {
	if c.options.NetworkTimeout > 0 {
		return c.options.NetworkTimeout
	}
	return networkDeadline
}

// endpoint reads "HOST", "HOST:PORT" or a URL.
func endpoint(h string) (*url.URL, error) {
	if !strings.Contains(h, "://") {
		h = "https://" + h
	}
	u, err := url.Parse(h)
	if err != nil {
		return nil, fmt.Errorf("reading the host: %w", err)
	}
	if u.Host == "" {
		return nil, fmt.Errorf("reading the host %q: %w", h, ErrMalformed)
	}
	if u.Path == "" {
		u.Path = "/"
	}
	return u, nil
}

// oneHTTPS asks one host. Any status is an answer.
func (c *collector) oneHTTPS(ctx context.Context, h string, out *HTTPS, clock *Clock) {
	u, err := endpoint(h)
	if err != nil {
		out.Stage, out.Error = "dns", oneLine(err)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, c.networkDeadline())
	defer cancel()
	out.URL = u.Redacted()
	begin := time.Now()
	asked := c.head(ctx, u, nil)
	out.ElapsedMS = time.Since(begin).Milliseconds()
	out.Proxy, out.Status, out.Issuer = asked.proxy, asked.status, asked.issuer
	if asked.err != nil {
		out.Stage, out.Error = asked.stage, oneLine(asked.err)
	}
	// A clock that is off makes every certificate invalid, and with it goes the only
	// witness. Judged at a time within the certificate's own life, the chain is
	// still checked and the date is worth as much as before.
	var invalid x509.CertificateInvalidError
	if errors.As(asked.err, &invalid) && invalid.Reason == x509.Expired && invalid.Cert != nil {
		middle := invalid.Cert.NotBefore.Add(invalid.Cert.NotAfter.Sub(invalid.Cert.NotBefore) / 2)
		asked = c.head(ctx, u, func() time.Time { return middle })
	}
	if asked.err == nil && !asked.date.IsZero() {
		// The header has whole seconds; half a second is its mean error.
		offset := asked.date.Add(500 * time.Millisecond).Sub(asked.local).Seconds()
		*clock = Clock{Local: asked.local.UTC(), OffsetSeconds: &offset, Reference: u.Host}
	}
}

type httpsAnswer struct {
	proxy, issuer, stage string
	status               int
	date, local          time.Time
	err                  error
}

// head sends one HEAD request and says how far it came. Now is the time at which
// certificates are judged, nil for the machine's.
func (c *collector) head(ctx context.Context, u *url.URL, now func() time.Time) httpsAnswer {
	var mu sync.Mutex
	out := httpsAnswer{stage: "connect"}
	var issuer string
	at := func(stage string) {
		mu.Lock()
		defer mu.Unlock()
		out.stage = stage
	}
	proxy := c.options.Proxy
	if proxy == nil {
		proxy = http.ProxyFromEnvironment
	}
	if p, err := proxy(&http.Request{URL: u}); err == nil && p != nil {
		visible := *p
		visible.User = nil
		out.proxy = visible.String()
	}
	transport := &http.Transport{
		Proxy: proxy, DisableKeepAlives: true, ForceAttemptHTTP2: true,
		DialContext:     (&net.Dialer{Resolver: c.resolver()}).DialContext,
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, Time: now, RootCAs: c.options.RootCAs},
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	trace := &httptrace.ClientTrace{
		DNSStart:             func(httptrace.DNSStartInfo) { at("dns") },
		ConnectStart:         func(string, string) { at("connect") },
		TLSHandshakeStart:    func() { at("tls") },
		WroteRequest:         func(httptrace.WroteRequestInfo) { at("http") },
		GotFirstResponseByte: func() { at("http") },
	}
	request, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, trace), http.MethodHead, u.String(), nil)
	if err != nil {
		out.err = err
		return out
	}
	begin := time.Now()
	response, err := client.Do(request)
	elapsed := time.Since(begin)
	var unverified *tls.CertificateVerificationError
	if errors.As(err, &unverified) {
		issuer = lastIssuer(unverified.UnverifiedCertificates)
	}
	mu.Lock()
	defer mu.Unlock()
	answer := out
	answer.issuer = issuer
	if err != nil {
		answer.err = withoutURL(err)
		return answer
	}
	_ = response.Body.Close()
	answer.status = response.StatusCode
	if response.TLS != nil {
		answer.issuer = lastIssuer(response.TLS.PeerCertificates)
	}
	if date, err := http.ParseTime(response.Header.Get("Date")); err == nil {
		answer.date, answer.local = date, begin.Add(elapsed/2)
	}
	return answer
}

func lastIssuer(chain []*x509.Certificate) string {
	if len(chain) == 0 {
		return ""
	}
	return chain[len(chain)-1].Issuer.String()
}

// withoutURL takes off the method and address that net/http puts before an error.
func withoutURL(err error) error {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		return wrapped.Err
	}
	return err
}

func oneLine(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "no answer within the deadline"
	}
	return redact(strings.Join(strings.Fields(err.Error()), " "))
}

// clockOf takes the middle one of the answers: one server that is off does not count.
func clockOf(answers []Clock) Clock {
	answers = slices.DeleteFunc(slices.Clone(answers), func(c Clock) bool { return c.OffsetSeconds == nil })
	if len(answers) == 0 {
		return Clock{Local: time.Now().UTC(), Synchronized: synchronized()}
	}
	slices.SortStableFunc(answers, func(a, b Clock) int {
		switch {
		case *a.OffsetSeconds < *b.OffsetSeconds:
			return -1
		case *a.OffsetSeconds > *b.OffsetSeconds:
			return 1
		}
		return 0
	})
	middle := answers[len(answers)/2]
	middle.Synchronized = synchronized()
	return middle
}

// synchronized asks the kernel whether something keeps its clock right, see
// adjtimex(2). Asking needs no privilege.
func synchronized() *bool {
	var state unix.Timex
	status, err := unix.Adjtimex(&state)
	if err != nil {
		return nil
	}
	const timeError = 5 // TIME_ERROR
	is := status != timeError && state.Status&unix.STA_UNSYNC == 0
	return &is
}
