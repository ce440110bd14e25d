package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tree is a small machine with the traps that a real one can hold.
func tree(t *testing.T) *Host {
	t.Helper()
	outside := t.TempDir()
	write(t, filepath.Join(outside, "secret"), "outside")
	root := t.TempDir()
	for name, content := range map[string]string{
		"etc/hosts": "127.0.0.1 localhost\n", "etc/empty": "", "usr/lib/libx.so.1.2": "x", "big": strings.Repeat("0123456789", 1000),
	} {
		write(t, filepath.Join(root, name), content)
	}
	for link, target := range map[string]string{
		"usr/lib/libx.so.1": "libx.so.1.2", "usr/lib/libx.so": "libx.so.1", "lib": "usr/lib", "lib64": "/usr/lib",
		"dangling": "nowhere/at/all", "loop": "loop2", "loop2": "loop",
		"absolute": filepath.Join(outside, "secret"), "dots": "../../../../../../../../../../" + filepath.Join(outside, "secret"),
		"etc/self": "/etc/hosts", "outdir": outside,
	} {
		if err := os.Symlink(target, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(root, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	return &Host{Root: root}
}

func write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestReadFile(t *testing.T) {
	h := tree(t)
	for _, test := range []struct {
		name  string
		limit int64
		want  string
		err   error
	}{
		{name: "/etc/hosts", want: "127.0.0.1 localhost\n"},
		{name: "etc/../etc/hosts", want: "127.0.0.1 localhost\n"},
		{name: "/etc/empty", want: ""},
		{name: "/etc/self", want: "127.0.0.1 localhost\n"},
		{name: "/lib64/libx.so", want: "x"},
		{name: "/lib/libx.so", want: "x"},
		{name: "/etc/hosts", limit: 20, want: "127.0.0.1 localhost\n"},
		{name: "/etc/hosts", limit: 19, err: ErrTooLarge},
		{name: "/etc/none", err: fs.ErrNotExist},
		{name: "/etc", err: ErrNotRegular},
		{name: "/fifo", err: ErrNotRegular},
		{name: "/loop", err: ErrLoop},
		{name: "/dangling", err: fs.ErrNotExist},
		// Within the root there is no such path, outside there is.
		{name: "/absolute", err: fs.ErrNotExist},
		{name: "/dots", err: fs.ErrNotExist},
		{name: "/outdir/secret", err: fs.ErrNotExist},
		{name: "/../../../../etc/hosts", want: "127.0.0.1 localhost\n"},
	} {
		got, err := h.ReadFile(t.Context(), test.name, test.limit)
		if !errors.Is(err, test.err) || string(got) != test.want {
			t.Errorf("%s (limit %d): %q, %v; want %q, %v", test.name, test.limit, got, err, test.want, test.err)
		}
	}
}

func TestHeadAndTail(t *testing.T) {
	h := tree(t)
	if got, err := h.ReadHead(t.Context(), "/big", 12); err != nil || string(got) != "012345678901" {
		t.Errorf("head %q, %v", got, err)
	}
	if got, err := h.ReadTail(t.Context(), "/big", 12); err != nil || string(got) != "890123456789" {
		t.Errorf("tail %q, %v", got, err)
	}
	if got, err := h.ReadTail(t.Context(), "/etc/hosts", 100); err != nil || string(got) != "127.0.0.1 localhost\n" {
		t.Errorf("tail of a short file %q, %v", got, err)
	}
}

func TestResolve(t *testing.T) {
	h := tree(t)
	for name, want := range map[string]string{
		"/lib64/libx.so": "/usr/lib/libx.so.1.2", "/dangling": "/nowhere/at/all", "/etc/self": "/etc/hosts", "/": "/",
		"/absolute": mustReadlink(t, h, "/absolute"), "/no/such": "/no/such",
	} {
		if got, err := h.Resolve(t.Context(), name); err != nil || got != want {
			t.Errorf("%s leads to %q, %v; want %q", name, got, err, want)
		}
	}
	live := &Host{}
	if got, err := live.Resolve(t.Context(), "/proc/self/exe"); err != nil || got == "" || got == "/proc/self/exe" {
		t.Errorf("/proc/self/exe leads to %q, %v", got, err)
	}
}

func mustReadlink(t *testing.T, h *Host, name string) string {
	t.Helper()
	target, err := h.Readlink(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return target
}

func TestListAndGlob(t *testing.T) {
	h := tree(t)
	names, err := h.List(t.Context(), "/lib64")
	if err != nil || !slices.Equal(names, []string{"libx.so", "libx.so.1", "libx.so.1.2"}) {
		t.Errorf("list %q, %v", names, err)
	}
	if _, err := h.List(t.Context(), "/outdir"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("listed a directory outside the root: %v", err)
	}
	for pattern, want := range map[string][]string{
		"/lib*/libx.so.?": {"/lib/libx.so.1", "/lib64/libx.so.1"},
		"/etc/*":          {"/etc/empty", "/etc/hosts", "/etc/self"},
		"/none/*":         nil,
		"/e*/hosts":       {"/etc/hosts"},
		"/etc/hosts/*":    nil,
	} {
		got, failed, err := h.Glob(t.Context(), pattern)
		if err != nil || len(failed) > 0 || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %v, %v; want %q", pattern, got, failed, err, want)
		}
	}
	if _, _, err := h.Glob(t.Context(), "/[a"); err == nil {
		t.Error("a malformed pattern was accepted")
	}
}

func TestStat(t *testing.T) {
	h := tree(t)
	for name, want := range map[string]fs.FileMode{
		"/lib64/libx.so": fs.ModeSymlink, "/etc": fs.ModeDir, "/fifo": fs.ModeNamedPipe, "/etc/hosts": 0, "/absolute": fs.ModeSymlink,
	} {
		got, err := h.Stat(t.Context(), name)
		if err != nil || got.Mode.Type() != want {
			t.Errorf("%s is %s, %v; want %s", name, got.Mode.Type(), err, want)
		}
	}
	null, err := (&Host{}).Stat(t.Context(), "/dev/null")
	if err != nil || null.Major != 1 || null.Minor != 3 {
		t.Errorf("/dev/null is %d:%d, %v", null.Major, null.Minor, err)
	}
}

func TestStatfs(t *testing.T) {
	got, err := tree(t).Statfs(t.Context(), "/etc")
	if err != nil || got.TotalBytes == 0 || got.TotalBytes < got.AvailableBytes {
		t.Errorf("%+v, %v", got, err)
	}
	proc, err := (&Host{}).Statfs(t.Context(), "/proc")
	if err != nil || proc.Type != unix.PROC_SUPER_MAGIC {
		t.Errorf("/proc is %#x, %v", proc.Type, err)
	}
}

// A FIFO opened without O_NONBLOCK blocks like a dead file server does: nothing in
// the process can end it.
func TestBoundedLeavesBlockedLookBehind(t *testing.T) {
	h := tree(t)
	fifo := filepath.Join(h.Root, "fifo")
	blocked := func() (int, error) { return syscall.Open(fifo, syscall.O_RDONLY|syscall.O_CLOEXEC, 0) }
	t.Cleanup(func() {
		// Opening the other end lets them all go.
		for range 3 {
			if fd, err := syscall.Open(fifo, syscall.O_RDWR|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0); err == nil {
				time.Sleep(20 * time.Millisecond)
				_ = syscall.Close(fd)
			}
		}
	})
	for range most {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		begin := time.Now()
		_, err := Bounded(ctx, h, blocked)
		cancel()
		if !errors.Is(err, ErrDeadline) {
			t.Fatalf("a blocked look ended with %v", err)
		}
		if took := time.Since(begin); took > time.Second {
			t.Fatalf("took %s", took)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := h.ReadFile(ctx, "/etc/hosts", 0); !errors.Is(err, ErrBusy) || !errors.Is(err, ErrDeadline) {
		t.Errorf("with %d looks that hang a further one ended with %v", most, err)
	}
}

func TestBoundedIsCalledOff(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	release := make(chan struct{})
	defer close(release)
	_, err := Bounded(ctx, &Host{}, func() (int, error) { <-release; return 0, nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// program puts a script into a directory of its own.
func program(t *testing.T, name, script string) []string {
	t.Helper()
	dir := t.TempDir()
	// #nosec G306 -- it is to be run.
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	return []string{dir}
}

func TestRun(t *testing.T) {
	for _, test := range []struct {
		name, script string
		limit        int
		tail         bool
		want         Result
	}{
		{name: "ok", script: "echo out; echo err >&2", want: Result{Output: []byte("out\nerr\n")}},
		{name: "status", script: "echo no; exit 7", want: Result{Output: []byte("no\n"), Exit: 7}},
		{name: "signal", script: "kill -SEGV $$", want: Result{Exit: -1}},
		{name: "stdin is empty", script: "cat; echo done", want: Result{Output: []byte("done\n")}},
		{name: "arguments are no shell", script: `printf '%s|' "$@"`, want: Result{Output: []byte("a b|$(id)|;|")}},
		{name: "head", script: "printf 0123456789", limit: 4, want: Result{Output: []byte("0123"), Truncated: true}},
		{name: "tail", script: "printf 0123456789; printf abcdef", limit: 4, tail: true, want: Result{Output: []byte("cdef"), Truncated: true}},
		{name: "environment", script: `echo "$LC_ALL $PATH $LLMBOX_TEST_LEAK"`,
			want: Result{Output: []byte("C /usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin \n")}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("LLMBOX_TEST_LEAK", "leak")
			c := Command{Program: "p", Directories: program(t, "p", test.script), Limit: test.limit, Tail: test.tail}
			if test.name == "arguments are no shell" {
				c.Args = []string{"a b", "$(id)", ";"}
			}
			got, err := (&Host{}).Run(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			if string(got.Output) != string(test.want.Output) || got.Exit != test.want.Exit || got.Truncated != test.want.Truncated {
				t.Errorf("got %q %d %t, want %q %d %t", got.Output, got.Exit, got.Truncated,
					test.want.Output, test.want.Exit, test.want.Truncated)
			}
		})
	}
}

func TestRunRefuses(t *testing.T) {
	if _, err := (&Host{}).Run(t.Context(), Command{Program: "no-such-program-here"}); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("%v", err)
	}
	if _, err := (&Host{}).Run(t.Context(), Command{Program: "../bin/sh"}); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("%v", err)
	}
	dirs := program(t, "p", "echo hello")
	// #nosec G302 -- that is the point.
	if err := os.Chmod(filepath.Join(dirs[0], "p"), 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := (&Host{}).Run(t.Context(), Command{Program: "p", Directories: dirs}); !errors.Is(err, ErrUnsafeProgram) {
		t.Errorf("%v", err)
	}
}

// A program that ignores TERM, as does the child that it leaves its output to.
func TestRunKillsTheGroup(t *testing.T) {
	pids := filepath.Join(t.TempDir(), "pids")
	script := fmt.Sprintf("trap '' TERM HUP INT\n(trap '' TERM HUP INT; sleep 600) &\necho $! > %[1]s\necho $$ >> %[1]s\necho begun\nsleep 600\n", pids)
	begin := time.Now()
	got, err := (&Host{}).Run(t.Context(), Command{
		Program: "p", Directories: program(t, "p", script), Deadline: 400 * time.Millisecond,
	})
	took := time.Since(begin)
	if !errors.Is(err, ErrDeadline) {
		t.Errorf("ended with %v", err)
	}
	if string(got.Output) != "begun\n" || got.Exit != -1 {
		t.Errorf("kept %q, status %d", got.Output, got.Exit)
	}
	if took > 2*time.Second {
		t.Errorf("took %s", took)
	}
	raw, err := os.ReadFile(pids) // #nosec G304 -- written above
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range strings.Fields(string(raw)) {
		n, err := strconv.Atoi(pid)
		if err != nil {
			t.Fatal(err)
		}
		waitGone(t, n)
	}
}

// A program that ends at once and leaves a child that holds its output.
func TestRunDoesNotWaitForWhatIsLeft(t *testing.T) {
	pids := filepath.Join(t.TempDir(), "pids")
	begin := time.Now()
	got, err := (&Host{}).Run(t.Context(), Command{
		Program: "p", Directories: program(t, "p", "sleep 600 &\necho $! > "+pids+"\necho bye\nexit 3\n"),
	})
	if err != nil || string(got.Output) != "bye\n" || got.Exit != 3 {
		t.Errorf("%q %d %v", got.Output, got.Exit, err)
	}
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("took %s", took)
	}
	raw, err := os.ReadFile(pids) // #nosec G304 -- written above
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil {
		t.Fatal(err)
	}
	waitGone(t, n)
}

// waitGone waits until a process has ended; a zombie that nobody has collected yet
// has.
func waitGone(t *testing.T, pid int) {
	t.Helper()
	for range 100 {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if errors.Is(err, fs.ErrNotExist) || strings.Contains(string(raw), ") Z ") {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Errorf("process %d is still there", pid)
}
