package download

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestManyFaults sends a hundred faults into one download.
func TestManyFaults(t *testing.T) {
	const size, faults = 64<<20 + 3, 100
	for _, connections := range []int{1, 8} {
		t.Run(fmt.Sprintf("%d connections", connections), func(t *testing.T) {
			random := rand.New(rand.NewPCG(20, uint64(connections)))
			flips, changes, sent := 0, 0, map[string]int{}
			o := newOrigin(t, size, func(n int, _ *http.Request) fault {
				if n >= faults {
					return fault{}
				}
				after := random.Int64N(2 << 20)
				wait := http.Header{"Retry-After": {"1"}}
				kinds := []struct {
					name string
					fault
				}{
					{"reset", fault{reset: true, after: after}},
					{"truncate", fault{truncate: true, after: after}},
					{"stall", fault{stall: true, after: after}},
					{"trickle", fault{trickle: true, after: after}},
					{"429", fault{status: 429, header: wait}},
					{"503", fault{status: 503, header: wait}},
					{"500", fault{status: 500}},
					{"flip", fault{flip: true, after: after}},
					{"changed ETag", fault{etag: fmt.Sprintf(`"%d"`, n)}},
				}
				kind := kinds[random.IntN(len(kinds))]
				if kind.flip && flips >= 2 || kind.etag != "" && changes >= 2 {
					kind = kinds[0] // each throws away all that has arrived
				}
				if kind.flip {
					flips++
				}
				if kind.etag != "" {
					changes++
				}
				sent[kind.name]++
				return kind.fault
			})
			options := hasty()
			options.Connections, options.StallTimeout = connections, 60*time.Millisecond
			options.MinRate, options.MinRateWindow = 1<<20, 60*time.Millisecond
			options.Tries = 50 // so many in a row are not an accident
			f := o.file(t)
			result, err := newClient(t, options).Fetch(testContext(t), f)
			if err != nil {
				t.Fatal(err)
			}
			o.content.same(t, f.Path)
			t.Logf("%d requests, %s received for %s, faults %v", len(o.requests()), human(result.Received), human(size), sent)
			if len(o.requests()) <= faults || len(sent) != 9 {
				t.Errorf("%d requests, faults %v", len(o.requests()), sent)
			}
		})
	}
}

// childVariable names what a test binary that is to be killed downloads: URL, SHA-256
// and path.
const childVariable = "LLMBOX_TEST_DOWNLOAD"

func TestMain(m *testing.M) {
	if job := os.Getenv(childVariable); job != "" {
		parts := strings.SplitN(job, " ", 3)
		client, err := New(hasty())
		if err == nil {
			_, err = client.Fetch(context.Background(), File{URLs: parts[:1], Digest: SHA256(parts[1]), Path: parts[2]})
		}
		if err != nil {
			_, _ = fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
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

// TestKill kills a download with SIGKILL again and again, and counts what comes twice.
func TestKill(t *testing.T) {
	const size, kills = 128 << 20, 3
	o := &faultServer{t: t, content: content{size: size, seed: 7}, etag: `"v1"`}
	o.Server = httptest.NewUnstartedServer(o)
	o.Listener = narrow{o.Listener}
	o.Start()
	t.Cleanup(o.stop)
	f := o.file(t)
	random := rand.New(rand.NewPCG(1, 2))
	start := func() *exec.Cmd {
		cmd := exec.CommandContext(testContext(t), os.Args[0])
		cmd.Env = append(os.Environ(), childVariable+"="+o.URL+"/file "+f.Digest.hex+" "+f.Path)
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	var unrecorded int64
	for i := range kills {
		// Somewhere in this quarter of the file.
		at := size/(kills+1)*int64(i) + random.Int64N(size/(kills+1))
		cmd := start()
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		for o.bytes() < at {
			select {
			case err := <-ended:
				t.Fatalf("the child ended by itself: %v", err)
			case <-time.After(time.Millisecond):
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		<-ended
		untouched(t, f.Path)
		s, err := parseStateFile(f.Path+".part.state", bootID())
		if errors.Is(err, os.ErrNotExist) {
			continue // before the first answer
		}
		if err != nil {
			t.Fatal(err)
		}
		lost, wrong := compare(t, o.content, f.Path+".part", s.trusted())
		if wrong > 0 {
			t.Errorf("%d bytes are taken for received that were not", wrong)
		}
		unrecorded += lost
		t.Logf("killed after %d bytes, %d recorded in %d ranges, %d not recorded", o.bytes(), s.trusted().total(), len(s.trusted()), lost)
	}
	if err := start().Wait(); err != nil {
		t.Fatal(err)
	}
	o.content.same(t, f.Path)
	twice := o.bytes() - size
	t.Logf("after %d kills: %s were written and not recorded, %s (%.2f %%) sent twice, those on their way included",
		kills, human(unrecorded), human(twice), 100*float64(twice)/size)
	// What each connection holds or has just written, and what is not worth a note yet.
	if most := int64(kills * (9*max(size/gatherShare, leastGathered) + max(size/noteShare, leastGathered))); unrecorded > most {
		t.Errorf("%d bytes were written and not recorded, at most %d may be", unrecorded, most)
	}
}

// compare counts what is in a part file and not in the spans, and what is in the spans
// and not in the file.
func compare(t *testing.T, c content, part string, s spans) (lost, wrong int64) {
	t.Helper()
	file, err := os.Open(part)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	const step = 64 << 10
	got, want := make([]byte, step), make([]byte, step)
	for off := int64(0); off < c.size; off += step {
		n, _ := c.ReadAt(want, off)
		m, _ := file.ReadAt(got, off)
		same := m == n && string(got[:n]) == string(want[:n])
		covered := spans(nil)
		for _, x := range s {
			if start, end := max(x.start, off), min(x.end, off+int64(n)); start < end {
				covered = covered.add(span{start, end})
			}
		}
		switch {
		case same:
			lost += int64(n) - covered.total()
		case covered.total() == int64(n):
			wrong += int64(n)
		}
	}
	return lost, wrong
}

// small mounts a file system of some size.
func small(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700,size="+size); err != nil {
		t.Skipf("a file system of its own needs root: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestDiskFull(t *testing.T) {
	const size = 12 << 20
	for _, c := range []struct {
		name    string
		answer  fault
		filled  int // bytes that something else has
		missing int64
		kept    bool
	}{
		{name: "too small from the start", missing: 4 << 20},
		{name: "half full", filled: 4 << 20, missing: 8 << 20},
		{name: "nobody knew the size", answer: fault{noRange: true, chunked: true}, kept: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := small(t, "8m")
			if err := os.WriteFile(filepath.Join(dir, "other"), make([]byte, c.filled), 0o600); err != nil {
				t.Fatal(err)
			}
			o := newOrigin(t, size, always(c.answer))
			f := o.file(t)
			f.Path = filepath.Join(dir, "file")
			options := hasty()
			options.Connections = 2
			client := newClient(t, options)
			_, err := client.Fetch(testContext(t), f)
			var full *SpaceError
			if !errors.As(err, &full) || !errors.Is(err, unix.ENOSPC) {
				t.Fatalf("%T: %v", err, err)
			}
			t.Log(err)
			// The directory takes a page or so itself.
			if m := full.Missing(); m < c.missing || m > c.missing+64<<10 {
				t.Errorf("%d bytes are missing, not %d", m, c.missing)
			}
			untouched(t, f.Path)
			info, err := os.Stat(f.Path + ".part")
			if (err == nil) != c.kept {
				t.Errorf("the part: %v, %v", info, err)
			}
			if err := os.Remove(filepath.Join(dir, "other")); err != nil {
				t.Fatal(err)
			}
			if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, "size=32m"); err != nil {
				t.Fatal(err)
			}
			result, err := client.Fetch(testContext(t), f)
			if err != nil {
				t.Fatal(err)
			}
			o.content.same(t, f.Path)
			t.Logf("%+v", result)
		})
	}
}

// TestSpaceFilledMeanwhile: what is reserved can't be taken by somebody else.
func TestSpaceFilledMeanwhile(t *testing.T) {
	const size = 6 << 20
	dir := small(t, "8m")
	other := filepath.Join(dir, "other")
	var once sync.Once
	status := http.StatusNotFound
	o := newOrigin(t, size, func(n int, _ *http.Request) fault {
		if n == 0 {
			return fault{}
		}
		once.Do(func() {
			file, err := os.Create(other)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = file.Close() }()
			if _, err := io.Copy(file, io.LimitReader(zeros{}, size)); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("the disk did not become full: %v", err)
			}
		})
		return fault{status: status}
	})
	f := o.file(t)
	f.Path = filepath.Join(dir, "file")
	options := hasty()
	options.Connections = 2
	client := newClient(t, options)
	// The record can't be renewed, which is not what the download failed of.
	if _, err := client.Fetch(testContext(t), f); !hasStatus(404)(err) || is[*SpaceError](err) {
		t.Fatal(err)
	}
	untouched(t, f.Path)
	o.mu.Lock()
	status = 0
	o.mu.Unlock()
	result, err := client.Fetch(testContext(t), f)
	if err != nil {
		t.Fatal(err)
	}
	if result.Resumed == 0 {
		t.Errorf("%+v", result)
	}
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	o.content.same(t, f.Path)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestSpaceError(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "x"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	for _, c := range []struct {
		errno   syscall.Errno
		is      bool
		says    string
		missing bool
	}{
		{unix.ENOSPC, true, "are missing", true},
		{unix.EDQUOT, true, "the disk quota is full, it needs", false},
		{unix.EIO, false, "writing /x", false},
	} {
		err := plain(space(&os.PathError{Op: "write", Path: "x", Err: c.errno}, file, "/x", 1<<60))
		var e *SpaceError
		if errors.As(err, &e) != c.is || !errors.Is(err, c.errno) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v: %v", c.errno, err)
		}
		if c.is && (e.Missing() > 0) != c.missing {
			t.Errorf("%v: %d bytes are missing", c.errno, e.Missing())
		}
	}
}
