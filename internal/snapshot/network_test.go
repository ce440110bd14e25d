package snapshot

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"log"
	"math"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"
)

// secure is a server whose clock is off by the given seconds and whose certificate
// is valid in the given time.
func secure(t *testing.T, offset time.Duration, from, to time.Time) (address string, roots *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "Corporate Inspection Root", Organization: []string{"Example"}},
		NotBefore: from, NotAfter: to, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Date", time.Now().Add(offset).UTC().Format(http.TimeFormat))
		if r.Method != http.MethodHead || r.URL.Path != "/v2/" {
			t.Errorf("asked %s %s", r.Method, r.URL)
		}
		w.WriteHeader(http.StatusUnauthorized)
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	server.StartTLS()
	t.Cleanup(server.Close)
	roots = x509.NewCertPool()
	roots.AddCert(parsed)
	return server.Listener.Addr().String(), roots
}

func ask(t *testing.T, o Options) (HTTPS, Clock) {
	t.Helper()
	o.Root = machine(t)
	s := Collect(t.Context(), o)
	var asked []HTTPS
	var clock Clock
	if state, why := s.Probe(ProbeHTTPS, &asked); state != Present || len(asked) != 1 {
		t.Fatalf("https is %s: %s", state, why)
	}
	if state, why := s.Probe(ProbeClock, &clock); state != Present {
		t.Fatalf("clock is %s: %s", state, why)
	}
	return asked[0], clock
}

func TestHTTPSAnswers(t *testing.T) {
	now := time.Now()
	address, roots := secure(t, 90*time.Second, now.Add(-time.Hour), now.Add(time.Hour))
	got, clock := ask(t, Options{Hosts: []string{"https://" + address + "/v2/"}, RootCAs: roots})
	if got.Status != 401 || got.Stage != "" || got.Error != "" || !strings.Contains(got.Issuer, "Corporate Inspection Root") {
		t.Errorf("%+v", got)
	}
	if clock.OffsetSeconds == nil || math.Abs(*clock.OffsetSeconds-90) > 3 || clock.Reference != address {
		t.Errorf("clock %+v", clock)
	}
}

// Somebody in between signs with an authority that this machine does not know.
func TestHTTPSIsIntercepted(t *testing.T) {
	now := time.Now()
	address, _ := secure(t, 0, now.Add(-time.Hour), now.Add(time.Hour))
	got, clock := ask(t, Options{Hosts: []string{address}, RootCAs: x509.NewCertPool()})
	if got.Stage != "tls" || got.Status != 0 || !strings.Contains(got.Error, "unknown authority") || !strings.Contains(got.Issuer, "Corporate Inspection Root") {
		t.Errorf("%+v", got)
	}
	if clock.OffsetSeconds != nil {
		t.Errorf("believed the date of somebody unknown: %+v", clock)
	}
}

// A machine whose clock is years behind or ahead refuses every certificate; how far
// off it is must come out all the same.
func TestClockFromRefusedCertificate(t *testing.T) {
	ahead := 3 * 365 * 24 * time.Hour
	from := time.Now().Add(ahead - time.Hour)
	address, roots := secure(t, ahead, from, from.Add(2*time.Hour))
	got, clock := ask(t, Options{Hosts: []string{"https://" + address + "/v2/"}, RootCAs: roots})
	if got.Stage != "tls" || got.Error == "" {
		t.Errorf("%+v", got)
	}
	if clock.OffsetSeconds == nil || math.Abs(*clock.OffsetSeconds-ahead.Seconds()) > 3 {
		t.Errorf("clock %+v", clock)
	}
}

func TestHTTPSRefused(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	if got, _ := ask(t, Options{Hosts: []string{address}}); got.Stage != "connect" || got.Error == "" {
		t.Errorf("%+v", got)
	}
}

func TestProxyRefuses(t *testing.T) {
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			t.Errorf("the proxy was asked %s", r.Method)
		}
		w.WriteHeader(http.StatusProxyAuthRequired)
	}))
	defer proxy.Close()
	through, err := url.Parse("http://user:hunter2@" + proxy.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	got, _ := ask(t, Options{Hosts: []string{"registry.example"}, Proxy: http.ProxyURL(through)})
	if got.Stage != "connect" || got.Proxy != "http://"+proxy.Listener.Addr().String() || !strings.Contains(got.Error, "Proxy Authentication Required") {
		t.Errorf("%+v", got)
	}
	if strings.Contains(got.Proxy+got.Error+got.URL, "hunter2") {
		t.Errorf("the password is in %+v", got)
	}
}

func TestOfflineAsksNobody(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	came := make(chan struct{}, 1)
	go func() {
		if conn, err := listener.Accept(); err == nil {
			_ = conn.Close()
			came <- struct{}{}
		}
	}()
	s := Collect(t.Context(), Options{Root: machine(t), Offline: true, Hosts: []string{listener.Addr().String()}})
	for _, name := range []string{ProbeDNS, ProbeHTTPS} {
		if state, _ := s.Probe(name, &struct{}{}); state != Absent {
			t.Errorf("%s is %s", name, state)
		}
	}
	select {
	case <-came:
		t.Error("a host was asked")
	default:
	}
}
