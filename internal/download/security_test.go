package download

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http/httpproxy"
)

// authority is a CA that no system knows, and a certificate of it for a name.
type authority struct {
	file        string
	certificate tls.Certificate
}

func newAuthority(t *testing.T, notAfter time.Time, names ...string) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "a CA of our own"},
		NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: notAfter,
		DNSNames: names, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return authority{file, tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}}
}

func newTLSOrigin(t *testing.T, size int64, a authority, change func(*tls.Config)) *faultServer {
	t.Helper()
	o := &faultServer{t: t, content: content{size: size, seed: 7}, etag: `"v1"`}
	o.Server = httptest.NewUnstartedServer(o)
	o.Config.ErrorLog = quiet()
	o.TLS = &tls.Config{Certificates: []tls.Certificate{a.certificate}} // #nosec G402 -- the client's minimum is tested
	if change != nil {
		change(o.TLS)
	}
	o.StartTLS()
	t.Cleanup(o.stop)
	return o
}

func TestCertificates(t *testing.T) {
	good := newAuthority(t, time.Now().Add(time.Hour), "files.test")
	expired := newAuthority(t, time.Now().Add(-time.Hour), "files.test")
	for _, c := range []struct {
		name   string
		a      authority
		caFile string
		change func(*tls.Config)
		says   string // empty: it works
	}{
		{name: "unknown CA", a: good, says: "give that CA's certificate as a PEM file"},
		{name: "the right CA file", a: good, caFile: good.file},
		{name: "the CA file of another", a: good, caFile: expired.file, says: "give that CA's certificate"},
		{name: "expired", a: expired, caFile: expired.file, says: "clock"},
		{name: "TLS 1.1", a: good, caFile: good.file, change: func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS10, tls.VersionTLS11 }, says: "tls:"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := newTLSOrigin(t, 1<<20, c.a, c.change)
			options := hasty()
			options.CAFile = c.caFile
			f := o.file(t)
			f.Digest = Digest{} // https needs none
			f.Notice = func(n Notice) {
				if c.change == nil {
					t.Errorf("tried again after %v", n.Err)
				}
			}
			_, err := newClient(t, options).Fetch(testContext(t), f)
			if c.says == "" {
				if err != nil {
					t.Fatal(err)
				}
				o.content.same(t, f.Path)
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("%v does not say %q", err, c.says)
			}
			var certificate *CertificateError
			if c.change == nil && (!errors.As(err, &certificate) || certificate.Host != o.Listener.Addr().String()) {
				t.Errorf("%T: %v", err, err)
			}
			untouched(t, f.Path)
			alone(t, f.Path)
		})
	}
	plain := newOrigin(t, 1, nil)
	f := plain.file(t)
	f.URLs[0] = strings.Replace(f.URLs[0], "http:", "https:", 1)
	if _, err := newClient(t, hasty()).Fetch(testContext(t), f); err == nil || is[*RetryError](err) || len(plain.requests()) > 0 {
		t.Error(err)
	}
	for _, file := range []string{filepath.Join(t.TempDir(), "none"), "doc.go"} {
		if _, err := New(Options{CAFile: file}); err == nil {
			t.Errorf("%s was taken for a CA file", file)
		}
	}
}

// TestTokens: what belongs to a host is shown to that host alone.
func TestTokens(t *testing.T) {
	ca := newAuthority(t, time.Now().Add(time.Hour))
	const token = "Bearer the-token"
	for _, c := range []struct {
		name string
		// from and to say over what the first host and the one of its redirect speak.
		from, to string
		sameHost bool
		digest   bool
		refused  bool
		carried  bool // to the second
	}{
		{name: "to another host", from: "https", to: "https", digest: true},
		{name: "within the host", from: "https", to: "https", sameHost: true, digest: true, carried: true},
		{name: "from https to http", from: "https", to: "http", digest: true},
		{name: "from https to http, no digest", from: "https", to: "http", refused: true},
		{name: "from http to https", from: "http", to: "https", digest: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			start := func(scheme string) *faultServer {
				if scheme == "https" {
					return newTLSOrigin(t, 5<<20, ca, nil)
				}
				return newOrigin(t, 5<<20, nil)
			}
			a, b := start(c.from), start(c.to)
			if c.sameHost {
				b = a
			}
			a.plan = func(_ int, r *http.Request) fault {
				if r.URL.Path == "/stored" {
					return fault{}
				}
				return fault{status: 302, header: http.Header{"Location": {b.URL + "/stored?signature=geheim"}}}
			}
			options := hasty()
			options.CAFile = ca.file
			options.Headers = []OriginHeader{Bearer(a.URL, "the-token")}
			f := a.file(t)
			if !c.digest {
				f.Digest = Digest{}
			}
			_, err := newClient(t, options).Fetch(testContext(t), f)
			if c.refused {
				if !hasReason(RedirectInsecure)(err) || strings.Contains(err.Error(), "geheim") {
					t.Fatal(err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			b.content.same(t, f.Path)
			for _, r := range a.requests() {
				if r.authorization != token {
					t.Errorf("%s was asked with %q", r.path, r.authorization)
				}
				if r.userAgent != "llmbox" {
					t.Errorf("as %q", r.userAgent)
				}
			}
			for _, r := range b.requests() {
				if carried := r.authorization != ""; carried != c.carried {
					t.Errorf("%s of the second host was asked with %q", r.path, r.authorization)
				}
			}
		})
	}
}

func TestOrigins(t *testing.T) {
	var got string
	o := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.Header.Get("Authorization") }))
	defer o.Close()
	for _, c := range []struct {
		origin, url string
		want        bool
	}{
		{"https://hub.example", "https://hub.example/x", true},
		{"https://hub.example", "https://HUB.example.:443/x", true},
		{"https://hub.example", "https://hub.example:8443/x", false},
		{"https://hub.example", "http://hub.example/x", false},
		{"https://hub.example", "https://cdn.hub.example/x", false},
		{"https://hub.example", "https://hub.example.evil/x", false},
		{"http://hub.example:80", "http://hub.example/x", true},
		{"https://[2001:db8::1]", "https://[2001:db8::1]:443/x", true},
	} {
		options := hasty()
		options.Headers = []OriginHeader{Bearer(c.origin, "the-token")}
		client := newClient(t, options)
		// Whatever the name, the connection ends here.
		client.base.next.DialContext = (&dialer{o.Listener.Addr().String()}).dial
		client.base.next.DialTLSContext = (&dialer{o.Listener.Addr().String()}).dial
		req, err := http.NewRequest(http.MethodGet, c.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		got = ""
		resp, err := client.Transport().RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if (got == "Bearer the-token") != c.want {
			t.Errorf("%s with a header for %s: %q", c.url, c.origin, got)
		}
		if req.Header.Get("Authorization") != "" {
			t.Error("the caller's request was changed")
		}
	}
	for _, bad := range []string{"hub.example", "ftp://hub.example", "https://hub.example/path", "https://u:p@hub.example", "https://"} {
		if _, err := New(Options{Headers: []OriginHeader{Bearer(bad, "x")}}); err == nil {
			t.Errorf("%q was taken for an origin", bad)
		}
	}
}

// TestLogin: a login in a URL stays with that host, and out of every text.
func TestLogin(t *testing.T) {
	b := newOrigin(t, 1<<20, nil)
	a := newOrigin(t, 1<<20, always(fault{status: 307, header: http.Header{"Location": {b.URL + "/stored"}}}))
	f := a.file(t)
	f.URLs[0] = strings.Replace(f.URLs[0], "http://", "http://user:geheim@", 1)
	if _, err := newClient(t, hasty()).Fetch(testContext(t), f); err != nil {
		t.Fatal(err)
	}
	if auth := a.requests()[0].authorization; !strings.HasPrefix(auth, "Basic ") {
		t.Errorf("asked with %q", auth)
	}
	if auth := b.requests()[0].authorization; auth != "" {
		t.Errorf("the login went on as %q", auth)
	}
	a.plan = always(fault{status: 401})
	f.Path += "2"
	if _, err := newClient(t, hasty()).Fetch(testContext(t), f); err == nil || strings.Contains(err.Error(), "geheim") {
		t.Error(err)
	}
}

func TestTooManyRedirects(t *testing.T) {
	o := newOrigin(t, 1<<20, func(_ int, r *http.Request) fault {
		return fault{status: 302, header: http.Header{"Location": {r.URL.Path + "x"}}}
	})
	options := hasty()
	options.Redirects = 4
	f := o.file(t)
	if _, err := newClient(t, options).Fetch(testContext(t), f); !hasReason(RedirectLimit)(err) {
		t.Error(err)
	}
	if n := len(o.requests()); n != 5 {
		t.Errorf("%d requests", n)
	}
}

// TestRedirectsGrowOld: storage refuses what it gave before, and a new redirect helps.
func TestRedirectsGrowOld(t *testing.T) {
	const size = 40 << 20
	var mu sync.Mutex
	uses := map[string]int{}
	storage := newOrigin(t, size, func(_ int, r *http.Request) fault {
		mu.Lock()
		defer mu.Unlock()
		if uses[r.URL.RawQuery]++; uses[r.URL.RawQuery] > 2 {
			return fault{status: 403}
		}
		return fault{}
	})
	redirects := 0
	hub := newOrigin(t, size, func(int, *http.Request) fault {
		redirects++
		return fault{status: 302, header: http.Header{"Location": {storage.URL + "/x?signature=" + strings.Repeat("s", redirects)}}}
	})
	f := hub.file(t)
	if _, err := newClient(t, hasty()).Fetch(testContext(t), f); err != nil {
		t.Fatal(err)
	}
	storage.content.same(t, f.Path)
	if redirects < 2 || redirects >= len(storage.requests()) {
		t.Errorf("%d redirects for %d requests", redirects, len(storage.requests()))
	}
	// A redirect that is refused from the start is the hub's word.
	storage.plan = always(fault{status: 403})
	f = hub.file(t)
	if _, err := newClient(t, hasty()).Fetch(testContext(t), f); !hasStatus(403)(err) || is[*RetryError](err) {
		t.Error(err)
	}
}

// proxy forwards everything to one address, whatever its name.
type proxy struct {
	*httptest.Server
	to, login string
	refuse    int

	mu    sync.Mutex
	asked []string
}

func newProxy(t *testing.T, to string) *proxy {
	p := &proxy{to: to}
	p.Server = httptest.NewServer(p)
	t.Cleanup(func() { p.CloseClientConnections(); p.Close() })
	return p
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.asked = append(p.asked, r.Method+" "+r.Host)
	p.mu.Unlock()
	switch {
	case p.refuse != 0:
		w.WriteHeader(p.refuse)
		return
	case p.login != "" && r.Header.Get("Proxy-Authorization") != p.login:
		w.Header().Set("Proxy-Authenticate", "Basic")
		w.WriteHeader(http.StatusProxyAuthRequired)
		return
	}
	up, err := net.Dial("tcp", p.to)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer func() { _ = up.Close() }()
	if r.Method != http.MethodConnect {
		r.Header.Del("Proxy-Authorization")
		if err := r.Write(up); err != nil {
			return
		}
		resp, err := http.ReadResponse(bufio.NewReader(up), r)
		if err != nil {
			return
		}
		defer func() { _ = resp.Body.Close() }()
		for name, values := range resp.Header {
			w.Header()[name] = values
		}
		w.WriteHeader(resp.StatusCode)
		_, _ = io.Copy(w, resp.Body)
		return
	}
	w.WriteHeader(http.StatusOK)
	down, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = down.Close() }()
	var both sync.WaitGroup
	both.Go(func() { _, _ = io.Copy(up, down); _ = up.Close() })
	both.Go(func() { _, _ = io.Copy(down, up); _ = down.Close() })
	both.Wait()
}

func TestProxy(t *testing.T) {
	ca := newAuthority(t, time.Now().Add(time.Hour), "files.test")
	const login = "Basic dXNlcjpnZWhlaW0=" // user:geheim
	for _, scheme := range []string{"http", "https"} {
		for _, c := range []struct {
			name    string
			user    *url.Userinfo
			refuse  int
			down    bool
			exclude string
			fails   func(error) bool
			says    string
		}{
			{name: "with the login", user: url.UserPassword("user", "geheim")},
			{name: "without", fails: hasStatus(407), says: "http://USER:PASSWORD@HOST:PORT"},
			{name: "with a wrong one", user: url.UserPassword("user", "geheimnis"), fails: hasStatus(407), says: "wants a login"},
			{name: "refuses", user: url.UserPassword("user", "geheim"), refuse: 403, fails: hasStatus(403), says: "proxy"},
			{name: "is down", user: url.UserPassword("user", "geheim"), down: true, fails: is[*ProxyError], says: "reaching the proxy http://127.0.0.1:"},
		} {
			t.Run(scheme+" "+c.name, func(t *testing.T) {
				o := newOrigin(t, 5<<20, nil)
				if scheme == "https" {
					o = newTLSOrigin(t, 5<<20, ca, nil)
				}
				p := newProxy(t, o.Listener.Addr().String())
				p.login, p.refuse = login, c.refuse
				if c.down {
					p.Close()
				}
				address, err := url.Parse(p.URL)
				if err != nil {
					t.Fatal(err)
				}
				address.User = c.user
				options := hasty()
				options.CAFile = ca.file
				options.Proxy = &httpproxy.Config{HTTPProxy: address.String(), HTTPSProxy: address.String()}
				f := o.file(t)
				f.URLs = []string{scheme + "://files.test/file?signature=geheim"}
				_, err = newClient(t, options).Fetch(testContext(t), f)
				if c.fails == nil {
					if err != nil {
						t.Fatal(err)
					}
					o.content.same(t, f.Path)
					return
				}
				t.Log(err)
				if err == nil || !c.fails(err) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "geheim") {
					t.Fatalf("%T: %v", err, err)
				}
				if !c.down && len(p.asked) != 1 {
					t.Errorf("the proxy was asked %v", p.asked)
				}
				untouched(t, f.Path)
			})
		}
	}
}

func TestProxyRules(t *testing.T) {
	t.Setenv("HTTPS_PROXY", "http://env.proxy:3128")
	t.Setenv("HTTP_PROXY", "http://env.proxy:3128")
	t.Setenv("NO_PROXY", "10.0.0.0/8,.internal,one.example:8443")
	t.Setenv("no_proxy", "")
	t.Setenv("https_proxy", "")
	t.Setenv("http_proxy", "")
	environment := newClient(t, Options{})
	explicit := newClient(t, Options{Proxy: &httpproxy.Config{HTTPSProxy: "http://named.proxy", NoProxy: "192.168.0.0/16"}})
	none := newClient(t, Options{Proxy: &httpproxy.Config{}})
	for _, c := range []struct {
		client    *Client
		url, want string
	}{
		{environment, "https://hub.example/x", "env.proxy:3128"},
		{environment, "http://hub.example/x", "env.proxy:3128"},
		{environment, "https://10.20.30.40/x", ""},
		{environment, "https://11.20.30.40/x", "env.proxy:3128"},
		{environment, "https://registry.internal/x", ""},
		{environment, "https://one.example:8443/x", ""},
		{environment, "https://one.example/x", "env.proxy:3128"},
		{explicit, "https://hub.example/x", "named.proxy"},
		{explicit, "https://192.168.3.4:5000/x", ""},
		{explicit, "http://hub.example/x", ""},
		{none, "https://hub.example/x", ""},
	} {
		u, err := url.Parse(c.url)
		if err != nil {
			t.Fatal(err)
		}
		p, err := c.client.base.proxy(u)
		got := ""
		if p != nil {
			got = p.Host
		}
		if err != nil || got != c.want {
			t.Errorf("%s goes by %q (%v), not %q", c.url, got, err, c.want)
		}
	}
}
