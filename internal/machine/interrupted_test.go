package machine

import (
	"bytes"
	"context"
	"crypto/sha1" // #nosec G505 -- git names its blobs so
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/llmbox-dev/llmbox/internal/bundle"
	"github.com/llmbox-dev/llmbox/internal/download"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/weights"
)

const (
	// interruptVariable names what a test binary that is to be interrupted downloads: what,
	// from where, into which directory.
	interruptVariable = "LLMBOX_TEST_INTERRUPT"
	// measureVariable has the figure held that a quiet machine reaches.
	measureVariable = "LLMBOX_MEASURE"
	interruptModel  = "org/large"
	interruptCommit = "0123456789abcdef0123456789abcdef01234567"
	// What comes, and over a link of what bandwidth in bytes a second (0.2 Gb/s).
	interruptBytes, interruptRate = 256 << 20, 25_000_000
)

func TestMain(m *testing.M) {
	job := os.Getenv(interruptVariable)
	if job == "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	parts := strings.SplitN(job, " ", 3)
	if err := fetchOne(ctx, parts[0], parts[1], parts[2]); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, err)
		if ctx.Err() != nil {
			os.Exit(130)
		}
		os.Exit(1)
	}
	os.Exit(0)
}

// fetchOne is what the child does: one of the product's downloads.
func fetchOne(ctx context.Context, what, from, dir string) error {
	rules := download.Options{AllowHTTP: true}
	client, err := download.New(rules)
	if err != nil {
		return err
	}
	switch what {
	case "k3s":
		_, _, err = k3s.NewMachine(k3s.Options{State: dir}).Release(ctx, k3s.WantBinary{
			Version: release, Arch: runtime.GOARCH, Fetcher: Fetcher(client), Releases: from,
		}, nil)
		return err
	case "weights":
		w, err := weights.Open(ctx, weights.Options{Model: interruptModel, Dir: dir, Source: from, Download: rules})
		if err != nil {
			return err
		}
		defer w.Close()
		return w.Fetch(ctx, nil)
	case "images":
		program := filepath.Join(dir, "program")
		if err := os.WriteFile(program, []byte("a program"), 0o600); err != nil {
			return err
		}
		out, err := os.Create(filepath.Join(dir, "bundle.incomplete")) // #nosec G304 -- the test's own
		if err != nil {
			return err
		}
		registries := &bundle.Registries{
			Client: client, Architecture: "amd64", Mirrors: map[string][]string{"docker.io": {from}},
		}
		_, _, err = bundle.Create(ctx, bundle.Parts{
			Version: "1.2.3", Architecture: "amd64", LLMBox: program, K3s: program, K3sName: "k3s", Work: dir,
			Images: []bundle.Wanted{{Reference: "docker.io/org/one:1", Group: bundle.GroupFirst}, {Reference: "docker.io/org/two:1", Group: bundle.GroupRest}},
		}, registries, out, nil)
		if err = errors.Join(err, out.Close()); err != nil {
			return err
		}
		return os.Rename(out.Name(), filepath.Join(dir, "bundle"))
	}
	return fmt.Errorf("nobody downloads %q", what)
}

// link is a server behind a link of some bandwidth, which counts what goes over it.
type link struct {
	*httptest.Server
	files  map[string][]byte
	text   map[string]string
	bucket *rate.Limiter
	sent   atomic.Int64
}

func newLink(t *testing.T) *link {
	t.Helper()
	l := &link{files: map[string][]byte{}, text: map[string]string{}, bucket: rate.NewLimiter(interruptRate, 64<<10)}
	l.Server = httptest.NewUnstartedServer(l)
	l.Listener = narrow{l.Listener}
	l.Start()
	t.Cleanup(func() { l.CloseClientConnections(); l.Close() })
	return l
}

// narrow is a listener whose connections hold little that was sent and not received.
type narrow struct{ net.Listener }

func (n narrow) Accept() (net.Conn, error) {
	conn, err := n.Listener.Accept()
	if tcp, ok := conn.(*net.TCPConn); ok {
		err = errors.Join(err, tcp.SetWriteBuffer(32<<10))
	}
	return conn, err
}

func (l *link) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	counted := &counting{ResponseWriter: w, link: l, ctx: r.Context()}
	path := strings.TrimSuffix(r.URL.Path, "/")
	if text, ok := l.text[path]; ok {
		kind := "application/json"
		if strings.Contains(path, "/manifests/") {
			kind = "application/vnd.oci.image.manifest.v1+json"
		}
		w.Header().Set("Content-Type", kind)
		_, _ = io.WriteString(counted, text)
		return
	}
	content, ok := l.files[path]
	if !ok {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("ETag", fmt.Sprintf(`"%d %s"`, len(content), path))
	http.ServeContent(counted, r, "", time.Time{}, bytes.NewReader(content))
}

type counting struct {
	http.ResponseWriter
	link *link
	ctx  context.Context
}

func (c *counting) Write(p []byte) (int, error) {
	written := 0
	for len(p) > 0 {
		piece := p[:min(len(p), 16<<10)]
		if err := c.link.bucket.WaitN(c.ctx, len(piece)); err != nil {
			return written, err
		}
		n, err := c.ResponseWriter.Write(piece)
		c.link.sent.Add(int64(n))
		written += n
		if err != nil {
			return written, err
		}
		p = p[n:]
	}
	return written, nil
}

// TestInterrupted cuts the downloads of an install and of a bundle off, by SIGKILL and by
// Ctrl-C, at points that a seed chooses, runs them again, and counts at the server what was
// sent twice: what the process had not written yet, and what was on its way.
func TestInterrupted(t *testing.T) {
	if testing.Short() {
		t.Skip("brings some hundred megabytes over a slow link")
	}
	noise := make([]byte, interruptBytes)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(noise)
	sum := func(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }
	l := newLink(t)
	base := "/" + release + "/"
	asset := map[string]string{"amd64": "k3s", "arm64": "k3s-arm64"}[runtime.GOARCH]
	l.files[base+asset] = noise
	l.text[base+"sha256sum-"+runtime.GOARCH+".txt"] = sum(noise) + "  " + asset + "\n"

	one, two := noise[:interruptBytes*5/8], noise[interruptBytes*5/8:]
	config := []byte(`{"model_type":"test"}`)
	git := sha1.Sum(append(fmt.Appendf(nil, "blob %d\x00", len(config)), config...)) // #nosec G401 -- as above
	listing, err := json.Marshal(map[string]any{"sha": interruptCommit, "siblings": []map[string]any{
		{"rfilename": "config.json", "size": len(config), "blobId": fmt.Sprintf("%x", git)},
		{"rfilename": "model-1.safetensors", "size": len(one), "blobId": fmt.Sprintf("%040x", 1), "lfs": map[string]any{"sha256": sum(one), "size": len(one)}},
		{"rfilename": "model-2.safetensors", "size": len(two), "blobId": fmt.Sprintf("%040x", 2), "lfs": map[string]any{"sha256": sum(two), "size": len(two)}},
	}})
	must(t, err)
	l.text["/api/models/"+interruptModel+"/revision/main"] = string(listing)
	for name, content := range map[string][]byte{"config.json": config, "model-1.safetensors": one, "model-2.safetensors": two} {
		l.files["/"+interruptModel+"/resolve/"+interruptCommit+"/"+name] = content
	}

	l.text["/v2"] = "{}"
	for i, name := range []string{"one", "two"} {
		half := noise[i*interruptBytes/2 : (i+1)*interruptBytes/2]
		parts := [][]byte{half[:len(half)*3/4], half[len(half)*3/4:]}
		settings := fmt.Appendf(nil, `{"architecture":"amd64","os":"linux","config":{},"rootfs":{"type":"layers","diff_ids":["sha256:%s","sha256:%s"]}}`, sum(parts[0]), sum(parts[1]))
		manifest := map[string]any{
			"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
			"config": map[string]any{"mediaType": "application/vnd.oci.image.config.v1+json", "digest": "sha256:" + sum(settings), "size": len(settings)},
		}
		var layers []map[string]any
		for _, part := range append(parts, settings) {
			l.files["/v2/org/"+name+"/blobs/sha256:"+sum(part)] = part
		}
		for _, part := range parts {
			layers = append(layers, map[string]any{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": "sha256:" + sum(part), "size": len(part)})
		}
		manifest["layers"] = layers
		raw, err := json.Marshal(manifest)
		must(t, err)
		l.text["/v2/org/"+name+"/manifests/1"] = string(raw)
		l.text["/v2/org/"+name+"/manifests/sha256:"+sum(raw)] = string(raw)
	}

	for seed, tt := range []struct {
		what  string
		whole func(dir string) error
	}{
		{"k3s", func(dir string) error {
			return same(filepath.Join(dir, "cache/k3s", release, asset), noise)
		}},
		{"weights", func(dir string) error {
			repository := filepath.Join(dir, "hub/models--org--large/snapshots", interruptCommit)
			return errors.Join(same(filepath.Join(repository, "model-1.safetensors"), one), same(filepath.Join(repository, "model-2.safetensors"), two),
				same(filepath.Join(repository, "config.json"), config))
		}},
		{"images", func(dir string) error {
			file, err := os.Open(filepath.Join(dir, "bundle")) // #nosec G304 -- the test's own
			if err != nil {
				return err
			}
			defer func() { _ = file.Close() }()
			reader, err := bundle.NewReader(file)
			if err != nil {
				return err
			}
			defer reader.Close()
			return reader.Each(context.Background(), nil, nil)
		}},
	} {
		for how, with := range map[string]os.Signal{"killed": syscall.SIGKILL, "Ctrl-C": os.Interrupt} {
			t.Run(tt.what+" "+how, func(t *testing.T) {
				dir := t.TempDir()
				before := l.sent.Load()
				at := rand.New(rand.NewPCG(uint64(seed), uint64(len(how)))).Int64N(interruptBytes)
				l.cut(t, tt.what, dir, before+at, with)
				if err := tt.whole(dir); err == nil {
					t.Errorf("it is whole after %d bytes", at)
				}
				if err := l.child(t, tt.what, dir).Run(); err != nil {
					t.Fatal(err)
				}
				must(t, tt.whole(dir))
				twice := l.sent.Load() - before - interruptBytes
				share := 100 * float64(twice) / interruptBytes
				t.Logf("%s after %d of %d bytes: %d sent twice or beside (%.2f %%)", how, at, interruptBytes, twice, share)
				// What is on its way when a process is killed grows with the load of the
				// machine. Whoever began anew would send half of it twice.
				most := 10.0
				if os.Getenv(measureVariable) != "" {
					most = 1
				}
				if share > most {
					t.Errorf("%.2f %% were sent twice, at most %g may be", share, most)
				}
			})
		}
	}
}

func (l *link) child(t *testing.T, what, dir string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), interruptVariable+"="+what+" "+l.URL+" "+dir)
	cmd.Stderr = os.Stderr
	return cmd
}

// cut starts a download and ends it once so many bytes were sent.
func (l *link) cut(t *testing.T, what, dir string, at int64, with os.Signal) {
	t.Helper()
	cmd := l.child(t, what, dir)
	cmd.Stderr = nil
	must(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for l.sent.Load() < at {
		select {
		case err := <-ended:
			t.Fatalf("the child ended by itself after %d bytes: %v", l.sent.Load(), err)
		case <-time.After(time.Millisecond):
		}
	}
	must(t, cmd.Process.Signal(with))
	if err := <-ended; err == nil {
		t.Errorf("it came to its end in spite of %s", with)
	}
}

func same(file string, want []byte) error {
	got, err := os.ReadFile(file) // #nosec G304 -- the test's own
	if err == nil && !bytes.Equal(got, want) {
		err = fmt.Errorf("%s has other bytes", file)
	}
	return err
}
