package download

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http/httpproxy"
)

// content is a file of any size that is kept nowhere: noise, with the place of each
// block in the block.
type content struct {
	size int64
	seed uint64
}

const contentBlock = 4 << 10

// noise has a prime length, so that no two blocks are alike even without their numbers.
var noise = sync.OnceValue(func() []byte {
	b := make([]byte, 1048573)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(b)
	return append(b, b[:contentBlock]...)
})

func (c content) ReadAt(p []byte, off int64) (int, error) {
	n := 0
	for n < len(p) && off < c.size {
		var block [contentBlock]byte
		number := off / contentBlock
		copy(block[:], noise()[(number*contentBlock)%1048573:])
		binary.LittleEndian.PutUint64(block[:], uint64(number)^c.seed)
		from := off % contentBlock
		m := copy(p[n:], block[from:min(contentBlock, from+c.size-off)])
		n, off = n+m, off+int64(m)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

var sums sync.Map // content to SHA-256

func (c content) sum(t testing.TB) string {
	t.Helper()
	if known, ok := sums.Load(c); ok {
		return fmt.Sprint(known)
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(c, 0, c.size)); err != nil {
		t.Fatal(err)
	}
	sum := hex.EncodeToString(h.Sum(nil))
	sums.Store(c, sum)
	return sum
}

// fault is what an answer has wrong; the zero value is right.
type fault struct {
	status int // instead of the file
	header http.Header

	after    int64 // bytes of the body that are right
	reset    bool  // then the connection breaks
	truncate bool  // then it ends in good order
	stall    bool  // then nothing comes any more
	trickle  bool  // then a byte now and then
	flip     bool  // the next byte is wrong

	etag       string // instead of the file's
	noETag     bool
	noRange    bool // the whole file, whatever was asked for
	noIfRange  bool // the whole file, if the question has an If-Range
	shifted    bool // a range, but another one
	unasked    bool // a range, whether asked for or not
	unlabelled bool // 206 without a Content-Range
	fromStart  bool // the right header, with the bytes of the file's beginning
	chunked    bool // no length
	closing    bool // no length and no chunks: the body ends with the connection
	encoding   string
	content    *content // instead of the file
}

type asked struct {
	path, ranged, authorization, userAgent string
}

// faultServer is a server with faults.
type faultServer struct {
	*httptest.Server
	t       testing.TB
	content content
	etag    string
	plan    func(n int, r *http.Request) fault // n counts from 0

	mu    sync.Mutex
	asked []asked
	sent  int64
}

func newOrigin(t testing.TB, size int64, plan func(n int, r *http.Request) fault) *faultServer {
	t.Helper()
	o := &faultServer{t: t, content: content{size: size, seed: 7}, etag: `"v1"`, plan: plan}
	o.Server = httptest.NewServer(o)
	t.Cleanup(o.stop)
	return o
}

func (o *faultServer) stop() {
	o.CloseClientConnections()
	o.Close()
}

func (o *faultServer) requests() []asked {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]asked(nil), o.asked...)
}

func (o *faultServer) bytes() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.sent
}

func (o *faultServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o.mu.Lock()
	n := len(o.asked)
	o.asked = append(o.asked, asked{r.URL.Path, r.Header.Get("Range"), r.Header.Get("Authorization"), r.UserAgent()})
	var f fault
	if o.plan != nil {
		f = o.plan(n, r)
	}
	o.mu.Unlock()
	o.answer(w, r, f)
}

func (o *faultServer) answer(w http.ResponseWriter, r *http.Request, f fault) {
	for name, values := range f.header {
		w.Header()[name] = values
	}
	if f.status != 0 {
		w.WriteHeader(f.status)
		return
	}
	file, etag := o.content, o.etag
	if f.content != nil {
		file = *f.content
	}
	if f.etag != "" {
		etag = f.etag
	}
	if !f.noETag {
		w.Header().Set("ETag", etag)
	}
	if f.encoding != "" {
		w.Header().Set("Content-Encoding", f.encoding)
	}
	start, end, status := int64(0), file.size, http.StatusOK
	condition := r.Header.Get("If-Range")
	honoured := !f.noRange && (condition == "" || condition == etag && !f.noIfRange)
	if spec, ok := strings.CutPrefix(r.Header.Get("Range"), "bytes="); ok && honoured {
		first, last, _ := strings.Cut(spec, "-")
		var err error
		if start, err = strconv.ParseInt(first, 10, 64); err != nil {
			o.t.Errorf("range %q", spec)
		}
		if last != "" {
			if end, err = strconv.ParseInt(last, 10, 64); err != nil {
				o.t.Errorf("range %q", spec)
			}
			end = min(end+1, file.size)
		}
		if start >= file.size {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", file.size))
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
			return
		}
		status = http.StatusPartialContent
		shift := int64(0)
		if f.shifted && start > 0 {
			shift = 1
		}
		if !f.unlabelled {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", start-shift, end-1-shift, file.size))
		}
		start, end = start-shift, end-shift
	}
	if f.unasked {
		status = http.StatusPartialContent
		w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-9/%d", file.size))
		start, end = 0, 10
	}
	length := end - start
	if f.fromStart {
		start, end = 0, length
	}
	body := io.NewSectionReader(file, start, length)
	if f.closing {
		o.raw(w, body, length, f)
		return
	}
	if !f.chunked {
		w.Header().Set("Content-Length", strconv.FormatInt(length, 10))
	}
	w.WriteHeader(status)
	out := http.NewResponseController(w)
	good := length
	if f.reset || f.truncate || f.stall || f.trickle || f.flip {
		good = min(f.after, length)
	}
	o.copy(w, io.LimitReader(body, good))
	_ = out.Flush()
	if good == length {
		return
	}
	switch {
	case f.reset:
		o.hangUp(w)
	case f.truncate && f.chunked:
		return // the last chunk follows
	case f.truncate:
		panic(http.ErrAbortHandler)
	case f.stall:
		<-r.Context().Done()
	case f.trickle:
		one := make([]byte, 1)
		for r.Context().Err() == nil {
			if _, err := io.ReadFull(body, one); err != nil {
				return
			}
			_, _ = w.Write(one)
			_ = out.Flush()
			time.Sleep(5 * time.Millisecond)
		}
	case f.flip:
		one := make([]byte, 1)
		_, _ = io.ReadFull(body, one)
		one[0] ^= 1
		_, _ = w.Write(one)
		o.copy(w, body)
	}
}

func (o *faultServer) copy(w io.Writer, from io.Reader) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			var failed error
			n, failed = w.Write(buffer[:n])
			o.mu.Lock()
			o.sent += int64(n)
			o.mu.Unlock()
			err = errors.Join(err, failed)
		}
		if err != nil {
			return
		}
	}
}

// hangUp resets the connection instead of closing it.
func (o *faultServer) hangUp(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

func (o *faultServer) raw(w http.ResponseWriter, body io.Reader, length int64, f fault) {
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		o.t.Error(err)
		return
	}
	defer func() { _ = conn.Close() }()
	_, _ = buffered.WriteString("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
	if f.truncate {
		length = f.after
	}
	o.copy(buffered, io.LimitReader(body, length))
	_ = buffered.Flush()
}

// hasty are options that wait for nothing.
func hasty() Options {
	return Options{Proxy: &httpproxy.Config{}, Backoff: time.Millisecond, MaxBackoff: 4 * time.Millisecond, MaxRetryAfter: 8 * time.Millisecond}
}

func newClient(t testing.TB, o Options) *Client {
	t.Helper()
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdle)
	return c
}

// request is a download of o's file into a new directory.
func (o *faultServer) file(t testing.TB) File {
	t.Helper()
	return File{URLs: []string{o.URL + "/file"}, Path: filepath.Join(t.TempDir(), "file"), Digest: SHA256(o.content.sum(t))}
}

// same fails unless the file at path is c and nothing is left beside it.
func (c content) same(t testing.TB, path string) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	got, want := make([]byte, 1<<20), make([]byte, 1<<20)
	for off := int64(0); ; off += int64(len(want)) {
		n, _ := file.ReadAt(got, off)
		m, _ := c.ReadAt(want, off)
		if n != m || !bytes.Equal(got[:n], want[:m]) {
			t.Fatalf("%s differs in the MiB from %d on (%d and %d bytes)", path, off, n, m)
		}
		if n < len(got) {
			break
		}
	}
	alone(t, path)
}

// alone fails if something but the target is in its directory.
func alone(t testing.TB, path string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != filepath.Base(path) {
			t.Errorf("%s was left behind", e.Name())
		}
	}
}

// untouched fails if there is something at path.
func untouched(t testing.TB, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("something is at the target (%v)", err)
	}
}

// first applies a fault to the first n answers.
func first(n int, f fault) func(int, *http.Request) fault {
	return func(i int, _ *http.Request) fault {
		if i < n {
			return f
		}
		return fault{}
	}
}

func always(f fault) func(int, *http.Request) fault {
	return func(int, *http.Request) fault { return f }
}

func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}
