package machine

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http/httpproxy"
	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/internal/download"
	"github.com/llmbox-dev/llmbox/internal/host"
	"github.com/llmbox-dev/llmbox/internal/k3s"
)

const release = "v1.36.4+k3s1"

// spoken answers `k3s --version`.
type spoken struct{}

func (spoken) Run(context.Context, host.Command) (host.Result, error) {
	return host.Result{Output: []byte("k3s version " + release + " (01234567)\ngo version go1.26\n")}, nil
}

// program is a file that this machine could run, and that is large enough to be cut.
func program(t *testing.T) []byte {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/exe")
	must(t, err)
	return raw[:min(len(raw), 4<<20)]
}

// origin serves a release: list says what is in its list of checksums, answer may take
// a request for the binary, the n-th of them, into its own hands.
func origin(t *testing.T, content []byte, list string, answer func(n int, w http.ResponseWriter, r *http.Request) bool) *httptest.Server {
	t.Helper()
	var asked atomic.Int64
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, ".txt") {
			_, _ = w.Write([]byte(list))
			return
		}
		if answer != nil && answer(int(asked.Add(1)), w, r) {
			return
		}
		w.Header().Set("ETag", `"1"`)
		http.ServeContent(w, r, "k3s", time.Time{}, bytes.NewReader(content))
	}))
	server.Config.ErrorLog = nil
	server.StartTLS()
	t.Cleanup(server.Close)
	return server
}

// cut ends an answer in the middle.
func cut(content []byte) func(int, http.ResponseWriter, *http.Request) bool {
	return func(n int, w http.ResponseWriter, _ *http.Request) bool {
		if n > 2 {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		w.Header().Set("ETag", `"1"`)
		_, _ = w.Write(content[:len(content)/3])
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			if tcp, ok := conn.(interface{ NetConn() net.Conn }); ok {
				if raw, ok := tcp.NetConn().(*net.TCPConn); ok {
					_ = raw.SetLinger(0) // a reset, not an end
				}
			}
			_ = conn.Close()
		}
		return true
	}
}

// busy answers with a status and Retry-After at first.
func busy(status int) func(int, http.ResponseWriter, *http.Request) bool {
	return func(n int, w http.ResponseWriter, _ *http.Request) bool {
		if n > 2 {
			return false
		}
		w.Header().Set("Retry-After", "0")
		w.WriteHeader(status)
		return true
	}
}

// TestFaultsOnTheWayToK3s: right bytes in the end, or an error with the way out; never a
// bad file in place.
func TestFaultsOnTheWayToK3s(t *testing.T) {
	content := program(t)
	sum := fmt.Sprintf("%x", sha256.Sum256(content))
	arch := runtime.GOARCH
	asset := map[string]string{"amd64": "k3s", "arm64": "k3s-arm64"}[arch]
	right := sum + "  " + asset + "\n"
	// The server's certificate is for this name, too, and no proxy is asked for addresses
	// of the machine itself.
	const proxied = "https://example.com"
	for _, tt := range []struct {
		name    string
		list    string
		url     string
		answer  func(int, http.ResponseWriter, *http.Request) bool
		options func(t *testing.T, server *httptest.Server, o *download.Options)
		state   func(t *testing.T) string
		// fails is a part of what is said, out one of the way out; both empty where the
		// right bytes come.
		fails, out string
	}{
		{name: "nothing goes wrong"},
		{name: "reset in the middle", answer: cut(content)},
		{name: "429 with Retry-After", answer: busy(http.StatusTooManyRequests)},
		{name: "503 with Retry-After", answer: busy(http.StatusServiceUnavailable)},
		{name: "stalled", answer: func(n int, w http.ResponseWriter, r *http.Request) bool {
			if n > 1 {
				return false
			}
			w.Header().Set("Content-Length", fmt.Sprint(len(content)))
			_, _ = w.Write(content[:1000])
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return true
		}},
		{name: "truncated for good", answer: func(_ int, w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Length", fmt.Sprint(len(content)))
			w.Header().Set("Accept-Ranges", "none")
			_, _ = w.Write(content[:len(content)/2])
			return true
		}, fails: "k3s " + release, out: "--k3s-binary"},
		{name: "another size than before", answer: func(_ int, w http.ResponseWriter, r *http.Request) bool {
			http.ServeContent(w, r, "k3s", time.Time{}, bytes.NewReader(content[:len(content)-1]))
			return true
		}, fails: "k3s " + release, out: "--k3s-binary"},
		{name: "another file", list: strings.Repeat("0", 64) + "  " + asset + "\n", fails: "sha256", out: "--k3s-binary"},
		{name: "no checksum for it", list: sum + "  k3s-airgap-images.tar\n", fails: "it is not in the list"},
		{name: "a list that is a page of HTML", list: "<html>captive portal</html>", fails: "it is not in the list"},
		{name: "a loop of redirects", answer: func(_ int, w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, r.URL.Path, http.StatusFound)
			return true
		}, fails: "redirect", out: "--k3s-binary"},
		{name: "refused", options: func(t *testing.T, server *httptest.Server, _ *download.Options) { server.Close() },
			fails: "connection refused", out: "--k3s-binary"},
		{name: "an authority that nobody knows", options: func(_ *testing.T, _ *httptest.Server, o *download.Options) { o.CAFile = "" },
			fails: "certificate", out: "network.caFile"},
		{name: "a proxy that wants a login", url: proxied, options: func(t *testing.T, server *httptest.Server, o *download.Options) {
			o.Proxy = &httpproxy.Config{HTTPSProxy: proxy(t, server.Listener.Addr().String(), "user:secret", "")}
		}, fails: "407", out: "--k3s-binary"},
		{name: "a proxy that gets its login", url: proxied, options: func(t *testing.T, server *httptest.Server, o *download.Options) {
			o.Proxy = &httpproxy.Config{HTTPSProxy: proxy(t, server.Listener.Addr().String(), "user:secret", "user:secret")}
		}},
		{name: "a disk that is full at half of it", state: func(t *testing.T) string { return smallDisk(t, int64(len(content)/2)) },
			fails: "no space", out: "Free space"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			list := tt.list
			if list == "" {
				list = right
			}
			server := origin(t, content, list, tt.answer)
			o := download.Options{
				Proxy: &httpproxy.Config{}, CAFile: authority(t, server), Connections: 2, Tries: 3,
				Backoff: time.Millisecond, MaxBackoff: 4 * time.Millisecond, StallTimeout: 300 * time.Millisecond,
			}
			if tt.options != nil {
				tt.options(t, server, &o)
			}
			client, err := download.New(o)
			must(t, err)
			root, state := t.TempDir(), "/var/lib/llmbox"
			if tt.state != nil {
				root = tt.state(t)
			}
			m := k3s.NewMachine(k3s.Options{Root: root, Runner: spoken{}, State: state})
			record, err := m.Record(t.Context())
			must(t, err)
			_, err = m.EnsureBinary(t.Context(), record, k3s.WantBinary{
				Version: release, Arch: arch, Releases: cmp.Or(tt.url, server.URL), Fetcher: fetcher{client},
			}, nil)
			placed, readErr := os.ReadFile(filepath.Join(root, "usr/local/bin/k3s")) // #nosec G304 -- the test's own
			if tt.fails == "" {
				if err != nil || readErr != nil || !bytes.Equal(placed, content) {
					t.Fatalf("%v, %v: %d bytes in place", err, readErr, len(placed))
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.fails) || strings.Contains(err.Error(), "secret") {
				t.Fatalf("the error is %v, want %q", err, tt.fails)
			}
			if !errors.Is(readErr, fs.ErrNotExist) {
				t.Errorf("in place are %d bytes, %v", len(placed), readErr)
			}
			var way interface{ Fix() string }
			if tt.out != "" && (!errors.As(err, &way) || !strings.Contains(way.Fix(), tt.out)) {
				t.Errorf("no way out of %v", err)
			}
		})
	}
}

// authority is a file with the authority of a server.
func authority(t *testing.T, server *httptest.Server) string {
	t.Helper()
	at := filepath.Join(t.TempDir(), "ca.pem")
	must(t, os.WriteFile(at, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600))
	return at
}

// proxy is one that lets those through who say the right login, all to one place.
func proxy(t *testing.T, to, login, said string) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	server := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		request := &http.Request{Header: http.Header{"Authorization": r.Header["Proxy-Authorization"]}}
		user, password, _ := request.BasicAuth()
		if user+":"+password != login {
			w.WriteHeader(http.StatusProxyAuthRequired)
			return
		}
		there, err := net.Dial("tcp", to)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer func() { _ = there.Close() }()
		w.WriteHeader(http.StatusOK)
		here, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer func() { _ = here.Close() }()
		go func() { _, _ = io.Copy(there, here) }()
		_, _ = io.Copy(here, there)
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	if said != "" {
		said += "@"
	}
	return "http://" + said + listener.Addr().String()
}

// smallDisk mounts a file system of some bytes.
func smallDisk(t *testing.T, size int64) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("mode=0700,size=%d", size)); err != nil {
		t.Skipf("a file system of its own needs root: %v", err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) }) // its root is still open
	return dir
}
