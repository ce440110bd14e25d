package weights

import (
	"context"
	"crypto/sha1" // #nosec G505 -- git names its blobs so
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/download"
)

const testCommit = "0123456789abcdef0123456789abcdef01234567"

// fakeHub serves one model as the hub does: small files by itself, large ones
// by redirect to storage on another host.
type fakeHub struct {
	t       *testing.T
	files   map[string]string // content; large ones start with "large"
	listing func(l *listing)  // changes what is listed
	private bool

	hub, storage *httptest.Server

	mu        sync.Mutex
	cut       int // bytes after which storage breaks off; 0: never
	noRange   bool
	spoiled   int // answers of storage that are wrong
	silent    int // answers of storage that stop in the middle and stay open
	starts    []int64
	leaked    bool
	authority []bool // of each request to the hub
}

func newFakeHub(t *testing.T) *fakeHub {
	f := &fakeHub{t: t, files: map[string]string{
		"config.json":              `{"architectures":["Qwen3ForCausalLM"]}`,
		"model.safetensors":        "large" + strings.Repeat("0123456789", 20000),
		"nested/deep/tokens.json":  `{}`,
		"pytorch_model.bin":        "large and not wanted",
		"original/consolidated.pt": "large and not wanted either",
		"empty.txt":                "",
	}}
	f.hub, f.storage = httptest.NewServer(http.HandlerFunc(f.serveHub)), httptest.NewServer(http.HandlerFunc(f.serveStorage))
	t.Cleanup(f.hub.Close)
	t.Cleanup(f.storage.Close)
	return f
}

func (f *fakeHub) blob(content string) hubFile {
	file := hubFile{Size: int64(len(content))}
	sum1 := sha1.Sum(fmt.Appendf(nil, "blob %d\x00%s", len(content), content)) // #nosec G401 -- as above
	file.BlobID = hex.EncodeToString(sum1[:])
	if strings.HasPrefix(content, "large") {
		sum := sha256.Sum256([]byte(content))
		file.LFS = &struct {
			SHA256 string `json:"sha256"`
		}{hex.EncodeToString(sum[:])}
	}
	return file
}

func (f *fakeHub) serveHub(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.authority = append(f.authority, r.Header.Get("Authorization") == "Bearer the-token")
	if f.private && r.Header.Get("Authorization") == "" {
		w.Header().Set("X-Error-Code", "GatedRepo")
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if r.URL.Path == "/api/models/org/name/revision/main" {
		l := listing{SHA: testCommit}
		for name, content := range f.files {
			file := f.blob(content)
			file.Name = name
			l.Siblings = append(l.Siblings, file)
		}
		if f.listing != nil {
			f.listing(&l)
		}
		_ = json.NewEncoder(w).Encode(l)
		return
	}
	content, ok := f.files[strings.TrimPrefix(r.URL.Path, "/org/name/resolve/"+testCommit+"/")]
	switch {
	case !ok:
		w.WriteHeader(http.StatusNotFound)
	case strings.HasPrefix(content, "large"):
		http.Redirect(w, r, f.storage.URL+r.URL.Path+"?signature=do-not-print", http.StatusFound)
	default:
		_, _ = io.WriteString(w, content)
	}
}

func (f *fakeHub) serveStorage(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.Header.Get("Authorization") != "" {
		f.leaked = true
	}
	content := f.files[strings.TrimPrefix(r.URL.Path, "/org/name/resolve/"+testCommit+"/")]
	if f.spoiled > 0 {
		f.spoiled--
		content = strings.ToUpper(content)
	}
	start := int64(0)
	if spec, ok := strings.CutPrefix(r.Header.Get("Range"), "bytes="); ok && !f.noRange {
		first, last, _ := strings.Cut(spec, "-")
		var err error
		if start, err = strconv.ParseInt(first, 10, 64); err != nil {
			f.t.Error(err)
		}
		end, total := len(content), len(content)
		if n, err := strconv.Atoi(last); err == nil {
			end = min(n+1, end)
		}
		content = content[:end]
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", start, end-1, total))
		w.WriteHeader(http.StatusPartialContent)
	}
	f.starts = append(f.starts, start)
	content = content[start:]
	if f.silent > 0 {
		f.silent--
		_, _ = io.WriteString(w, content[:1000])
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		return
	}
	if f.cut > 0 && len(content) > f.cut {
		_, _ = io.WriteString(w, content[:f.cut])
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	_, _ = io.WriteString(w, content)
}

func (f *fakeHub) options(dir string, out io.Writer) Options {
	return Options{
		Model: "org/name", Dir: dir, Source: f.hub.URL, Token: "the-token",
		Notice:   func(text string) { _, _ = fmt.Fprintln(out, text) },
		Download: download.Options{Backoff: time.Millisecond, StallTimeout: 20 * time.Second},
	}
}

// get opens and fetches.
func get(ctx context.Context, o Options) error {
	w, err := Open(ctx, o)
	if err != nil {
		return err
	}
	defer w.Close()
	return w.Fetch(ctx, nil)
}

// complete checks the cache as a reader of it would.
func (f *fakeHub) complete(dir string) {
	f.t.Helper()
	repo := filepath.Join(dir, "hub", "models--org--name")
	commit, err := os.ReadFile(filepath.Join(repo, "refs", "main"))
	if err != nil || string(commit) != testCommit {
		f.t.Fatalf("refs/main: %q, %v", commit, err)
	}
	for name, content := range f.files {
		have, err := os.ReadFile(filepath.Join(repo, "snapshots", testCommit, name))
		if strings.HasSuffix(content, "wanted") || strings.HasSuffix(content, "either") {
			if !errors.Is(err, fs.ErrNotExist) {
				f.t.Errorf("%s is there (%v)", name, err)
			}
			continue
		}
		if err != nil || string(have) != content {
			f.t.Errorf("%s: %d bytes, %v", name, len(have), err)
		}
		target, err := os.Readlink(filepath.Join(repo, "snapshots", testCommit, name))
		if err != nil || filepath.Base(target) != f.blob(content).blob() {
			f.t.Errorf("%s points to %q (%v)", name, target, err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(repo, "blobs", "*.part*")); len(left) > 0 {
		f.t.Errorf("left behind %v", left)
	}
}

func TestDownload(t *testing.T) {
	for name, prepare := range map[string]func(f *fakeHub){
		"at once":               func(*fakeHub) {},
		"storage breaks off":    func(f *fakeHub) { f.cut = 30000 },
		"storage without parts": func(f *fakeHub) { f.noRange = true },
		"storage falls silent":  func(f *fakeHub) { f.silent = 2 },
		"one wrong answer":      func(f *fakeHub) { f.spoiled = 1 },
		"a private model":       func(f *fakeHub) { f.private = true },
	} {
		t.Run(name, func(t *testing.T) {
			f, dir, out := newFakeHub(t), t.TempDir(), &strings.Builder{}
			prepare(f)
			opts := f.options(dir, out)
			if f.silent > 0 {
				opts.Download.StallTimeout = 300 * time.Millisecond
			}
			if err := get(t.Context(), opts); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			f.complete(dir)
			if f.leaked {
				t.Error("the token went to storage")
			}
			for i, ok := range f.authority {
				if !ok {
					t.Errorf("request %d to the hub had no token", i)
				}
			}
			if strings.Contains(out.String(), "the-token") || strings.Contains(out.String(), "signature") {
				t.Errorf("a secret was printed:\n%s", out)
			}
			asked := len(f.starts)
			if err := get(t.Context(), f.options(dir, out)); err != nil || len(f.starts) != asked {
				t.Errorf("again: %d more downloads, %v", len(f.starts)-asked, err)
			}
		})
	}
}

// TestDownloadGoesOn stops the first run in the middle of a file.
func TestDownloadGoesOn(t *testing.T) {
	for name, noRange := range map[string]bool{"by parts": false, "storage without parts": true} {
		t.Run(name, func(t *testing.T) {
			f, dir := newFakeHub(t), t.TempDir()
			f.cut = 70000
			ctx, cancel := context.WithCancel(t.Context())
			opts := f.options(dir, writerFunc(func(p []byte) (int, error) {
				if strings.HasPrefix(string(p), "trying again") {
					cancel()
				}
				return len(p), nil
			}))
			if err := get(ctx, opts); !errors.Is(err, context.Canceled) {
				t.Fatalf("the first run ended with %v", err)
			}
			if _, err := os.Stat(filepath.Join(dir, "hub/models--org--name/refs/main")); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("an unfinished model can be seen (%v)", err)
			}
			f.cut, f.noRange = 0, noRange
			if err := get(t.Context(), f.options(dir, io.Discard)); err != nil {
				t.Fatal(err)
			}
			f.complete(dir)
			if last := f.starts[len(f.starts)-1]; last == 0 && !noRange {
				t.Errorf("storage was asked from bytes %v", f.starts)
			}
		})
	}
}

type writerFunc func([]byte) (int, error)

func (w writerFunc) Write(p []byte) (int, error) { return w(p) }

func TestDownloadRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(f *fakeHub)
		change  func(o *Options)
		want    func(error) bool
	}{
		"no access":        {func(f *fakeHub) { f.private = true }, func(o *Options) { o.Token = "" }, being(ErrNoAccess)},
		"no such model":    {nil, func(o *Options) { o.Model = "org/other" }, being(ErrNoModel)},
		"no such revision": {nil, func(o *Options) { o.Revision = "v9" }, being(ErrNoModel)},
		"wrong content":    {func(f *fakeHub) { f.spoiled = 99 }, nil, corrupt},
		"a way out":        {func(f *fakeHub) { f.listing = func(l *listing) { l.Siblings[0].Name = "../../../evil" } }, nil, being(errListing)},
		"absolute":         {func(f *fakeHub) { f.listing = func(l *listing) { l.Siblings[0].Name = "/evil" } }, nil, being(errListing)},
		"a blob elsewhere": {func(f *fakeHub) {
			f.listing = func(l *listing) { l.Siblings[0].LFS, l.Siblings[0].BlobID = nil, "../../evil" }
		}, nil, being(errListing)},
		"a commit elsewhere": {func(f *fakeHub) { f.listing = func(l *listing) { l.SHA = "../../../evil" } }, nil, being(errListing)},
		"no files":           {func(f *fakeHub) { f.listing = func(l *listing) { l.Siblings = nil } }, nil, being(errListing)},
	} {
		t.Run(name, func(t *testing.T) {
			f, dir := newFakeHub(t), t.TempDir()
			if c.prepare != nil {
				c.prepare(f)
			}
			opts := f.options(filepath.Join(dir, "cache"), io.Discard)
			if c.change != nil {
				c.change(&opts)
			}
			err := get(t.Context(), opts)
			if err == nil || !c.want(err) {
				t.Fatalf("got %v", err)
			}
			if strings.Contains(err.Error(), "signature") || strings.Contains(err.Error(), "the-token") {
				t.Errorf("the error holds a secret: %v", err)
			}
			if found, _ := filepath.Glob(filepath.Join(dir, "*evil*")); len(found) > 0 {
				t.Errorf("written outside: %v", found)
			}
		})
	}
}

func being(target error) func(error) bool {
	return func(err error) bool { return errors.Is(err, target) }
}

func corrupt(err error) bool {
	var e *download.ChecksumError
	return errors.As(err, &e)
}

// A directory of the cache that points elsewhere is not followed.
func TestDownloadStaysInside(t *testing.T) {
	f, dir, outside := newFakeHub(t), t.TempDir(), t.TempDir()
	if err := os.Symlink(outside, filepath.Join(dir, "hub")); err != nil {
		t.Fatal(err)
	}
	if err := get(t.Context(), f.options(dir, io.Discard)); err == nil {
		t.Error("downloaded through a link")
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
		t.Errorf("written outside: %v, %v", entries, err)
	}
}

// Once complete at a commit, the weights are found without anybody being asked.
func TestCompleteWeightsNeedNoNetwork(t *testing.T) {
	f, dir := newFakeHub(t), t.TempDir()
	if err := get(t.Context(), f.options(dir, io.Discard)); err != nil {
		t.Fatal(err)
	}
	f.hub.Close()
	f.storage.Close()
	o := f.options(dir, io.Discard)
	o.Download.Tries = 1
	if _, err := Open(t.Context(), o); err == nil {
		t.Error("a branch was taken for settled")
	}
	o.Revision = testCommit
	w, err := Open(t.Context(), o)
	if err != nil || !w.Complete || w.Commit != testCommit || w.Bytes == 0 {
		t.Fatalf("%+v, %v", w, err)
	}
	// Without one file it is not complete any more.
	if err := os.Truncate(filepath.Join(dir, "hub/models--org--name/snapshots", testCommit, "model.safetensors"), 5); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), o); err == nil {
		t.Error("a file that was cut was taken for whole")
	}
}

func TestFromAnotherCache(t *testing.T) {
	f, first := newFakeHub(t), t.TempDir()
	if err := get(t.Context(), f.options(first, io.Discard)); err != nil {
		t.Fatal(err)
	}
	blob := filepath.Join(first, "hub/models--org--name/blobs", f.blob(f.files["model.safetensors"]).blob())
	t.Run("copied and verified", func(t *testing.T) {
		dir := t.TempDir()
		if err := get(t.Context(), Options{Model: "org/name", Dir: dir, Source: first}); err != nil {
			t.Fatal(err)
		}
		f.complete(dir)
	})
	t.Run("another model", func(t *testing.T) {
		if err := get(t.Context(), Options{Model: "org/other", Dir: t.TempDir(), Source: first}); !errors.Is(err, ErrNoModel) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a blob that is not what its name says", func(t *testing.T) {
		raw, err := os.ReadFile(blob) // #nosec G304 -- the test's own
		if err != nil {
			t.Fatal(err)
		}
		raw[100]++
		if err := os.WriteFile(blob, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		if err := get(t.Context(), Options{Model: "org/name", Dir: dir, Source: first}); err == nil || !corrupt(err) {
			t.Errorf("got %v", err)
		}
		if _, err := os.Stat(filepath.Join(dir, "hub/models--org--name/refs/main")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("it can be seen: %v", err)
		}
	})
}

func TestTokenThatIsNone(t *testing.T) {
	for _, token := range []string{"hf_a\nb", "hf a", "hf_\x00"} {
		_, err := Open(t.Context(), Options{Model: "org/name", Dir: t.TempDir(), Source: "http://127.0.0.1:1", Token: token})
		if !errors.Is(err, ErrToken) || strings.Contains(err.Error(), token) {
			t.Errorf("got %v", err)
		}
	}
}

func TestOwnerOfTheWeights(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("giving files away needs root")
	}
	f, dir := newFakeHub(t), t.TempDir()
	o := f.options(dir, io.Discard)
	o.UID, o.GID = 2000, 2000
	if err := get(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o775 || info.Mode()&fs.ModeSetgid == 0 {
		t.Errorf("the directory has mode %v, %v", info.Mode(), err)
	}
	for _, name := range []string{".", "hub", "hub/models--org--name/blobs", "hub/models--org--name/snapshots/" + testCommit + "/config.json"} {
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if s, ok := info.Sys().(*syscall.Stat_t); !ok || s.Uid != 2000 || s.Gid != 2000 {
			t.Errorf("%s is not the model server's", name)
		}
	}
}
