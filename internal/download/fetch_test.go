package download

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestFetch(t *testing.T) {
	for _, c := range []struct {
		name        string
		size        int64
		connections int
		answer      fault
		noDigest    bool
		ranges      bool // expected
	}{
		{name: "in pieces", size: 30<<20 + 17, ranges: true},
		{name: "in pieces, without a digest", size: 30<<20 + 17, noDigest: true, ranges: true},
		{name: "one connection", size: 9<<20 + 1, connections: 1},
		{name: "small", size: 100, ranges: true},
		{name: "as long as the first question", size: probeBytes, ranges: true},
		{name: "empty", size: 0},
		{name: "empty, one connection", size: 0, connections: 1},
		{name: "no ranges", size: 9<<20 + 1, answer: fault{noRange: true}},
		{name: "no length", size: 5<<20 + 1, answer: fault{noRange: true, chunked: true}},
		{name: "no length, no digest", size: 5<<20 + 1, answer: fault{noRange: true, chunked: true}, noDigest: true},
		{name: "ends with the connection", size: 3<<20 + 1, answer: fault{closing: true}},
		{name: "no validator, no digest", size: 9<<20 + 1, answer: fault{noETag: true}, noDigest: true},
		{name: "weak validator, no digest", size: 9<<20 + 1, answer: fault{etag: `W/"v1"`}, noDigest: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := newOrigin(t, c.size, always(c.answer))
			options := hasty()
			options.Connections, options.AllowHTTP = c.connections, c.noDigest
			f := o.file(t)
			if c.noDigest {
				f.Digest = Digest{}
			}
			var last Progress
			f.Progress = func(p Progress) { last = p }
			f.Notice = func(n Notice) { t.Logf("notice: %v", n) }
			result, err := newClient(t, options).Fetch(testContext(t), f)
			if err != nil {
				t.Fatal(err)
			}
			o.content.same(t, f.Path)
			if result.Size != c.size || result.SHA256 != o.content.sum(t) || result.Present {
				t.Errorf("result %+v", result)
			}
			if last.Done != c.size || last.Total != c.size {
				t.Errorf("last progress %+v", last)
			}
			ranges := 0
			for _, r := range o.requests() {
				if strings.HasPrefix(r.ranged, "bytes=") {
					ranges++
				}
			}
			if c.ranges && ranges != len(o.requests()) {
				t.Errorf("asked %v", o.requests())
			}
			if c.ranges && c.size > 4*minPiece && ranges < 3 {
				t.Errorf("%d pieces", ranges)
			}
			if info, err := os.Stat(f.Path); err != nil || info.Mode() != 0o644 {
				t.Errorf("mode %v, %v", info.Mode(), err)
			}
		})
	}
}

func TestPresent(t *testing.T) {
	o := newOrigin(t, 1<<20, nil)
	client := newClient(t, hasty())
	f := o.file(t)
	f.Mode = 0o755
	if _, err := client.Fetch(testContext(t), f); err != nil {
		t.Fatal(err)
	}
	asked := len(o.requests())
	if err := os.Chmod(f.Path, 0o600); err != nil {
		t.Fatal(err)
	}
	result, err := client.Fetch(testContext(t), f)
	if err != nil || !result.Present || result.Size != 1<<20 || result.SHA256 != o.content.sum(t) || result.Received != 0 {
		t.Fatalf("%+v, %v", result, err)
	}
	if info, err := os.Stat(f.Path); err != nil || info.Mode() != 0o755 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if len(o.requests()) != asked {
		t.Error("asked again for what is there")
	}
	// What is there and wrong is replaced by what is right.
	if err := os.WriteFile(f.Path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if result, err = client.Fetch(testContext(t), f); err != nil || result.Present {
		t.Fatalf("%+v, %v", result, err)
	}
	o.content.same(t, f.Path)
	// And it stays where nothing better is to be had.
	f.Digest = SHA256(strings.Repeat("0", 64))
	if _, err = client.Fetch(testContext(t), f); !is[*ChecksumError](err) {
		t.Fatal(err)
	}
	o.content.same(t, f.Path)
}

// TestFaults: the right file in the end, whatever happens on the way.
func TestFaults(t *testing.T) {
	const size = 9<<20 + 5
	other := content{size: size, seed: 99}
	for _, c := range []struct {
		name   string
		plan   func(n int, r *http.Request) fault
		change func(o *Options)
		wait   time.Duration // of some notice
	}{
		{name: "reset", plan: first(5, fault{reset: true, after: 300 << 10})},
		{name: "reset before the first byte", plan: first(5, fault{reset: true})},
		{name: "stall", plan: first(3, fault{stall: true, after: 1 << 20}), change: func(o *Options) { o.StallTimeout = 100 * time.Millisecond }},
		{name: "no answer", plan: first(2, fault{stall: true}), change: func(o *Options) { o.StallTimeout = 100 * time.Millisecond }},
		{name: "trickle", plan: first(2, fault{trickle: true, after: 100 << 10}), change: func(o *Options) {
			o.MinRate, o.MinRateWindow = 1<<20, 100*time.Millisecond
		}},
		{name: "truncated", plan: first(5, fault{truncate: true, after: 1 << 20})},
		{name: "truncated in good order", plan: first(5, fault{truncate: true, chunked: true, after: 1 << 20})},
		{name: "truncated, no ranges", plan: func(n int, _ *http.Request) fault {
			return fault{noRange: true, truncate: n < 3, after: int64(n+1) << 20}
		}},
		{name: "truncated, no ranges and no length", plan: func(n int, _ *http.Request) fault {
			return fault{noRange: true, chunked: true, reset: n < 3, after: int64(n+1) << 20}
		}},
		{name: "a wrong byte", plan: first(1, fault{flip: true, after: 77})},
		{name: "500", plan: first(5, fault{status: 500})},
		{name: "408", plan: first(2, fault{status: 408})},
		{name: "429", plan: first(2, fault{status: 429, header: http.Header{"Retry-After": {"3600"}}}), wait: 8 * time.Millisecond},
		{name: "503", plan: first(2, fault{status: 503, header: http.Header{"Retry-After": {time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)}}}), wait: 8 * time.Millisecond},
		{name: "another file after the first answer", plan: func(n int, _ *http.Request) fault {
			if n == 0 {
				return fault{etag: `"v0"`, content: &other}
			}
			return fault{}
		}},
		{name: "a longer file after the first answer", plan: func(n int, _ *http.Request) fault {
			if n == 0 {
				return fault{etag: `"v0"`, content: &content{size: size / 2}}
			}
			return fault{}
		}},
		{name: "a shorter file after the first answer", plan: func(n int, _ *http.Request) fault {
			if n == 0 {
				return fault{noETag: true, content: &content{size: 3 * size}}
			}
			return fault{noETag: true}
		}},
		{name: "an ETag a server", plan: func(n int, _ *http.Request) fault { return fault{etag: fmt.Sprintf(`"server-%d"`, n%5)} }},
		{name: "ETag not liked in If-Range", plan: always(fault{noIfRange: true})},
		{name: "another range", plan: always(fault{shifted: true})},
		{name: "a range without its name", plan: always(fault{unlabelled: true})},
		{name: "a range with other bytes", plan: always(fault{fromStart: true})},
		{name: "ranges at first only", plan: func(n int, _ *http.Request) fault { return fault{noRange: n > 1} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := newOrigin(t, size, c.plan)
			options := hasty()
			if c.change != nil {
				c.change(&options)
			}
			f := o.file(t)
			var waited time.Duration
			f.Notice = func(n Notice) { waited = max(waited, n.Wait); t.Logf("notice: %v, again in %s", n.Err, n.Wait) }
			if _, err := newClient(t, options).Fetch(testContext(t), f); err != nil {
				t.Fatal(err)
			}
			o.content.same(t, f.Path)
			if waited < c.wait {
				t.Errorf("waited at most %s", waited)
			}
		})
	}
}

// TestRefusals: an exact error, and nothing at the target.
func TestRefusals(t *testing.T) {
	const size = 9 << 20
	for _, c := range []struct {
		name     string
		answer   fault
		change   func(o *Options, f *File)
		check    func(err error) bool
		requests int // at most
		says     []string
	}{
		{name: "401", answer: fault{status: 401}, check: hasStatus(401), requests: 1, says: []string{"token", "/file"}},
		{name: "403", answer: fault{status: 403}, check: hasStatus(403), requests: 1, says: []string{"token"}},
		{name: "404", answer: fault{status: 404}, check: hasStatus(404), requests: 1, says: []string{"no such file"}},
		{name: "501", answer: fault{status: 501}, check: hasStatus(501), requests: 1},
		{name: "503 for ever", answer: fault{status: 503}, check: func(err error) bool { return hasStatus(503)(err) && is[*RetryError](err) }, requests: 8},
		{name: "429 for ever", answer: fault{status: 429}, check: func(err error) bool { return hasStatus(429)(err) && is[*RetryError](err) }, requests: 8},
		{name: "silence for ever", answer: fault{stall: true}, change: func(o *Options, _ *File) { o.StallTimeout = 20 * time.Millisecond }, check: is[*StallError], requests: 24},
		{name: "a trickle for ever", answer: fault{trickle: true}, change: func(o *Options, _ *File) {
			o.MinRate, o.MinRateWindow = 1<<20, 20*time.Millisecond
		}, check: is[*SlowError], requests: 24},
		{name: "wrong checksum", answer: fault{}, change: func(_ *Options, f *File) { f.Digest = SHA256(strings.Repeat("ab", 32)) },
			check: func(err error) bool {
				var e *ChecksumError
				return errors.As(err, &e) && e.Want == strings.Repeat("ab", 32) && e.Got == contentOf(size).sum(t) && strings.HasSuffix(e.URL, "/file")
			}, requests: 10, says: []string{strings.Repeat("ab", 32), contentOf(size).sum(t), "/file"}},
		{name: "wrong size", answer: fault{}, change: func(_ *Options, f *File) { f.Size = size + 1 },
			check: func(err error) bool {
				var e *SizeError
				return errors.As(err, &e) && e.Want == size+1 && e.Got == size
			}, requests: 1},
		{name: "longer than expected", answer: fault{noRange: true, chunked: true}, change: func(_ *Options, f *File) { f.Size = size - 1 }, check: is[*SizeError], requests: 1},
		{name: "shorter than expected", answer: fault{noRange: true, chunked: true}, change: func(_ *Options, f *File) { f.Size = size + 1 },
			check: is[*RetryError], requests: 99},
		{name: "no length, no digest", answer: fault{closing: true}, change: noDigest, check: func(err error) bool { return errors.Is(err, ErrNoLength) }, requests: 1},
		{name: "always another file, no digest", answer: fault{truncate: true, after: 1 << 20}, change: noDigest, check: is[*ChangedError], requests: 99},
		{name: "never comes whole, no validator, no digest", answer: fault{noETag: true, truncate: true, after: 1 << 20}, change: noDigest, check: is[*RetryError], requests: 20},
		{name: "encoded", answer: fault{encoding: "gzip"}, check: is[*EncodingError], requests: 1},
		{name: "ranges only, and not those asked for", answer: fault{unasked: true}, check: is[*RangeError], requests: 99},
		{name: "to itself", answer: fault{status: 302, header: http.Header{"Location": {"/file"}}}, check: hasReason(RedirectLoop), requests: 1},
		{name: "to nowhere", answer: fault{status: 302}, check: hasReason(RedirectInvalid), requests: 1},
		{name: "to a file", answer: fault{status: 302, header: http.Header{"Location": {"file:///etc/passwd"}}}, check: hasReason(RedirectInvalid), requests: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := newOrigin(t, size, func(n int, _ *http.Request) fault {
				if strings.HasPrefix(c.name, "always another") {
					c.answer.etag = fmt.Sprintf(`"%d"`, n)
				}
				return c.answer
			})
			options, f := hasty(), o.file(t)
			options.Connections = 4
			if c.change != nil {
				c.change(&options, &f)
			}
			_, err := newClient(t, options).Fetch(testContext(t), f)
			if err == nil || !c.check(err) {
				t.Fatalf("%T: %v", err, err)
			}
			t.Log(err)
			for _, text := range c.says {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("%q does not say %q", err, text)
				}
			}
			untouched(t, f.Path)
			if n := len(o.requests()); n > c.requests {
				t.Errorf("%d requests", n)
			}
			if is[*ChecksumError](err) || hasStatus(404)(err) {
				alone(t, f.Path)
			}
		})
	}
}

func contentOf(size int64) content { return content{size: size, seed: 7} }

func noDigest(o *Options, f *File) { f.Digest, o.AllowHTTP = Digest{}, true }

func hasStatus(code int) func(error) bool {
	return func(err error) bool {
		var e *StatusError
		return errors.As(err, &e) && e.Code == code
	}
}

func hasReason(reason RedirectReason) func(error) bool {
	return func(err error) bool {
		var e *RedirectError
		return errors.As(err, &e) && e.Reason == reason
	}
}

func TestMirrors(t *testing.T) {
	const size = 9 << 20
	other := content{size: size, seed: 99}
	for _, c := range []struct {
		name     string
		first    fault
		noDigest bool
		fails    func(error) bool
		second   fault
	}{
		{name: "404", first: fault{status: 404}},
		{name: "404, no digest", first: fault{status: 404}, noDigest: true},
		{name: "down", first: fault{status: 503}},
		{name: "down, no digest", first: fault{status: 503}, noDigest: true},
		{name: "breaks off", first: fault{reset: true, after: 100}},
		{name: "breaks off, no digest", first: fault{reset: true, after: 100}, noDigest: true},
		{name: "another file", first: fault{content: &other}},
		{name: "another length", first: fault{content: &content{size: size / 2}}},
		{name: "a redirect in circles", first: fault{status: 302, header: http.Header{"Location": {"/file"}}}},
		{name: "no ranges", first: fault{noRange: true}},
		{name: "none has it", first: fault{status: 404}, second: fault{status: 403}, fails: func(err error) bool {
			return is[*MirrorsError](err) && strings.Contains(err.Error(), "404") && strings.Contains(err.Error(), "403")
		}},
		{name: "none has it, no digest", first: fault{status: 404}, second: fault{status: 403}, noDigest: true, fails: func(err error) bool {
			return is[*MirrorsError](err) && strings.Contains(err.Error(), "404") && strings.Contains(err.Error(), "403")
		}},
		{name: "none has the right one", first: fault{content: &other}, second: fault{content: &content{size: size, seed: 3}}, fails: is[*ChecksumError]},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := newOrigin(t, size, always(c.first)), newOrigin(t, size, always(c.second))
			f := a.file(t)
			f.URLs = append(f.URLs, b.URL+"/mirror")
			options := hasty()
			if c.noDigest {
				noDigest(&options, &f)
			}
			_, err := newClient(t, options).Fetch(testContext(t), f)
			if c.fails != nil {
				if err == nil || !c.fails(err) {
					t.Fatal(err)
				}
				untouched(t, f.Path)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			b.content.same(t, f.Path)
		})
	}
}

// TestInterrupted: what has arrived is kept and not asked for again.
func TestInterrupted(t *testing.T) {
	const size = 24 << 20
	for _, c := range []struct {
		name     string
		noDigest bool
		between  func(t *testing.T, o *faultServer, f *File)
		fresh    bool // the second run starts over
	}{
		{name: "as it was"},
		{name: "no digest", noDigest: true},
		{name: "another version, no digest", noDigest: true, fresh: true, between: func(_ *testing.T, o *faultServer, _ *File) {
			o.content, o.etag = content{size: size, seed: 8}, `"v2"`
		}},
		{name: "another version", fresh: true, between: func(t *testing.T, o *faultServer, f *File) {
			o.content, o.etag = content{size: size, seed: 8}, `"v2"`
			f.Digest = SHA256(o.content.sum(t))
		}},
		{name: "another name for it, no digest", noDigest: true, fresh: true, between: func(_ *testing.T, _ *faultServer, f *File) { f.URLs[0] += "-2" }},
		{name: "another name for it", between: func(_ *testing.T, _ *faultServer, f *File) { f.URLs[0] += "-2" }},
		{name: "no state", fresh: true, between: func(t *testing.T, _ *faultServer, f *File) {
			if err := os.Remove(f.Path + ".part.state"); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "half a state", fresh: true, between: func(t *testing.T, _ *faultServer, f *File) {
			if err := os.Truncate(f.Path+".part.state", 60); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "no part", fresh: true, between: func(t *testing.T, _ *faultServer, f *File) {
			if err := os.Remove(f.Path + ".part"); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "a wrong part", fresh: true, between: func(t *testing.T, _ *faultServer, f *File) {
			file, err := os.OpenFile(f.Path+".part", os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = file.Close() }()
			if _, err := file.WriteAt([]byte("garbage"), 1000); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			o := newOrigin(t, size, nil)
			o.plan = func(int, *http.Request) fault { // called under the lock
				return fault{stall: o.sent >= size/4}
			}
			options, f := hasty(), o.file(t)
			options.Connections = 3
			if c.noDigest {
				noDigest(&options, &f)
			}
			client := newClient(t, options)
			f.Progress = func(p Progress) {
				if p.Done >= size/4 {
					cancel()
				}
			}
			if _, err := client.Fetch(ctx, f); !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			untouched(t, f.Path)
			s, err := parseStateFile(f.Path+".part.state", bootID())
			if err != nil {
				t.Fatal(err)
			}
			kept := s.trusted().total()
			if kept < size/4 {
				t.Errorf("%d bytes were kept", kept)
			}
			o.mu.Lock()
			o.plan, o.sent = nil, 0
			if c.between != nil {
				c.between(t, o, &f)
			}
			o.mu.Unlock()
			result, err := client.Fetch(testContext(t), f)
			if err != nil {
				t.Fatal(err)
			}
			o.content.same(t, f.Path)
			if !c.fresh && (result.Resumed != kept || result.Received != size-kept) {
				t.Errorf("kept %d, result %+v", kept, result)
			}
			if c.fresh && result.Received < size {
				t.Errorf("only %d bytes were asked for", result.Received)
			}
		})
	}
}

func parseStateFile(path, boot string) (state, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return state{}, err
	}
	return parseState(raw, boot)
}

// TestAfterACrashOfTheMachine trusts what was synced, and nothing else.
func TestAfterACrashOfTheMachine(t *testing.T) {
	const size = 24 << 20
	o := newOrigin(t, size, nil)
	f := o.file(t)
	dir, err := os.OpenRoot(filepath.Dir(f.Path))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dir.Close() }()
	// As another boot left it: ten MiB are on the disk, what was handed over is lost.
	raw := make([]byte, size)
	if _, err := o.content.ReadAt(raw[:10<<20], 0); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.Path+".part", raw, 0o600); err != nil {
		t.Fatal(err)
	}
	k := &keeper{dir: dir, name: "file.part.state", boot: "another boot"}
	s := state{Size: size, Digest: f.Digest.String(), Synced: spans{{0, 10 << 20}}}
	if err := k.save(s, spans{{0, 20 << 20}}, 1); err != nil {
		t.Fatal(err)
	}
	// Interrupted right after its start, a run loses nothing of that.
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	o.plan = always(fault{truncate: true, after: 1000})
	interrupted := f
	interrupted.Notice = func(Notice) { cancel() }
	if _, err := newClient(t, hasty()).Fetch(ctx, interrupted); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if s, err = parseStateFile(f.Path+".part.state", "a third boot"); err != nil || s.trusted().prefix() != 10<<20 {
		t.Fatalf("%+v, %v", s, err)
	}
	if err := k.save(s, nil, 2); err != nil { // what was handed over is lost again
		t.Fatal(err)
	}
	o.plan = nil
	result, err := newClient(t, hasty()).Fetch(testContext(t), f)
	if err != nil {
		t.Fatal(err)
	}
	o.content.same(t, f.Path)
	if result.Resumed != 10<<20 || result.Received != size-10<<20 {
		t.Errorf("%+v", result)
	}
}

// TestTwoAtOnce: one downloads, the other waits and finds it.
func TestTwoAtOnce(t *testing.T) {
	const size = 16 << 20
	begun, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	o := newOrigin(t, size, func(n int, _ *http.Request) fault {
		if n == 0 {
			once.Do(func() { close(begun) })
			<-release
		}
		return fault{}
	})
	f := o.file(t)
	type outcome struct {
		Result
		error
	}
	one := make(chan outcome, 1)
	client := newClient(t, hasty())
	ctx := testContext(t)
	go func() {
		result, err := client.Fetch(ctx, f)
		one <- outcome{result, err}
	}()
	<-begun
	second := f
	second.Notice = func(n Notice) {
		if errors.Is(n.Err, ErrBusy) {
			close(release)
		}
	}
	result, err := newClient(t, hasty()).Fetch(testContext(t), second)
	if err != nil || !result.Present {
		t.Errorf("%+v, %v", result, err)
	}
	if a := <-one; a.error != nil || a.Received != size {
		t.Errorf("%+v", a)
	}
	o.content.same(t, f.Path)
}

func TestPlaces(t *testing.T) {
	o := newOrigin(t, 1<<20, nil)
	client := newClient(t, hasty())
	dir, outside := t.TempDir(), t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	if err := os.Symlink(outside, filepath.Join(dir, "away")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(outside, "x"), filepath.Join(dir, "linked.part")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	for path, ok := range map[string]bool{
		"sub/file": true, "away/file": false, "../file": false, "/file": false, "sub": false, "none/file": false, "linked": false, ".": false,
	} {
		f := File{URLs: []string{o.URL}, Root: root, Path: path, Digest: SHA256(o.content.sum(t))}
		if _, err := client.Fetch(testContext(t), f); (err == nil) != ok {
			t.Errorf("%s: %v", path, err)
		}
	}
	o.content.same(t, filepath.Join(dir, "sub/file"))
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
		t.Errorf("written outside: %v, %v", entries, err)
	}
}

// TestMemory: what is held at any time does not grow with the file.
func TestMemory(t *testing.T) {
	const size = 128 << 20
	o := newOrigin(t, size, nil)
	f := o.file(t)
	noise()
	runtime.GC()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	var most uint64
	f.Progress = func(Progress) {
		var now runtime.MemStats
		runtime.ReadMemStats(&now)
		most = max(most, now.HeapInuse+now.StackInuse)
	}
	if _, err := newClient(t, hasty()).Fetch(testContext(t), f); err != nil {
		t.Fatal(err)
	}
	if grown := int64(most) - int64(before.HeapInuse+before.StackInuse); grown > 64<<20 {
		t.Errorf("%s more memory was in use", human(grown))
	} else {
		t.Logf("%s more memory was in use, server included", human(grown))
	}
}

func TestBadRequests(t *testing.T) {
	client := newClient(t, hasty())
	for name, c := range map[string]struct {
		f    File
		want error
	}{
		"no URL":              {f: File{}},
		"a file":              {f: File{URLs: []string{"file:///etc/passwd"}}},
		"no host":             {f: File{URLs: []string{"https:///x"}}},
		"plain HTTP":          {f: File{URLs: []string{"http://host/x"}}, want: ErrInsecure},
		"plain HTTP and git":  {f: File{URLs: []string{"http://host/x"}, Digest: GitBlob(strings.Repeat("a", 40), 3)}, want: ErrInsecure},
		"a mirror plain HTTP": {f: File{URLs: []string{"https://host/x", "http://host/x"}}, want: ErrInsecure},
		"no digest":           {f: File{URLs: []string{"https://host/x"}, Digest: SHA256("abc")}},
	} {
		c.f.Path = filepath.Join(t.TempDir(), "x")
		_, err := client.Fetch(testContext(t), c.f)
		if err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
		untouched(t, c.f.Path)
	}
	if _, err := client.Fetch(testContext(t), File{URLs: []string{"ftp://user:geheim@host/x?signature=geheim"}, Path: "x"}); err == nil || strings.Contains(err.Error(), "geheim") {
		t.Errorf("the error holds a secret: %v", err)
	}
}
