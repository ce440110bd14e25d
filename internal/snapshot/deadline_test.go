package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// put writes a file below a root.
func put(t testing.TB, root, name, content string) {
	t.Helper()
	at := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil { // #nosec G301 -- a machine's own mode
		t.Fatal(err)
	}
	if err := os.WriteFile(at, []byte(content), 0o644); err != nil { // #nosec G306 -- likewise
		t.Fatal(err)
	}
}

// machine is the least that the collector needs below a root.
func machine(t testing.TB) string {
	t.Helper()
	root := t.TempDir()
	put(t, root, "/proc/version", "Linux version 6.8.0-1024-aws\n")
	put(t, root, "/proc/meminfo", "MemTotal:       16384 kB\n")
	put(t, root, "/proc/self/mountinfo", "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n")
	put(t, root, "/proc/net/tcp", "")
	return root
}

// within fails when a collection outlives its bound, with a second to spare for a
// busy machine.
func within(t *testing.T, bound time.Duration, o Options) *Snapshot {
	t.Helper()
	begin := time.Now()
	s := Collect(t.Context(), o)
	if took := time.Since(begin); took > bound+handover+time.Second {
		t.Errorf("took %s, its bound is %s", took, bound)
	}
	if s.File("/proc/version").State != Present {
		t.Error("what blocks took what is well with it")
	}
	return s
}

func TestBlockedFIFO(t *testing.T) {
	root := machine(t)
	for _, name := range []string{"/etc/hosts", "/proc/modules", "/etc/modprobe.d/x.conf", "/var/log/apt/history.log"} {
		if err := os.MkdirAll(filepath.Join(root, filepath.Dir(name)), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mkfifo(filepath.Join(root, name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := within(t, fileDeadline, Options{Root: root, Offline: true})
	for _, name := range []string{"/etc/hosts", "/proc/modules", "/etc/modprobe.d/x.conf", "/var/log/apt/history.log"} {
		if got := s.File(name); got.State != Unreadable || !strings.Contains(got.Why, "FIFO") {
			t.Errorf("%s is %s: %s", name, got.State, got.Why)
		}
	}
}

// hung mounts a file system whose server never answers, as a dead file server or a
// lost disk does. It needs root.
func hung(t *testing.T, at string) {
	t.Helper()
	if err := os.MkdirAll(at, 0o750); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("no file system can be made to hang here: %v", err)
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)
	if err := unix.Mount("hung-standin", at, "fuse", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		_ = unix.Close(fd)
		t.Skipf("no file system can be made to hang here: %v", err)
	}
	t.Cleanup(func() {
		// Those who hang get "not connected" and end.
		_ = unix.Unmount(at, unix.MNT_DETACH|unix.MNT_FORCE)
		_ = unix.Close(fd)
	})
}

func TestHungFileSystem(t *testing.T) {
	root := machine(t)
	hung(t, filepath.Join(root, "/etc/modprobe.d"))
	hung(t, filepath.Join(root, "/boot"))
	hung(t, filepath.Join(root, "/mnt/data"))
	put(t, root, "/etc/hosts", "127.0.0.1 localhost\n")
	s := within(t, probeDeadline, Options{Root: root, Offline: true, DiskPaths: []string{"/mnt/data/llmbox", "/"}})
	if why := s.Manifest.Unreadable["host/etc/modprobe.d"]; why != "no answer within 2s" {
		t.Errorf("the directory that hangs: %q in %v", why, s.Manifest.Unreadable)
	}
	if got := s.File("/etc/hosts"); got.State != Present {
		t.Errorf("/etc/hosts is %s: %s", got.State, got.Why)
	}
	var disks []Disk
	if state, why := s.Probe(ProbeDisks, &disks); state != Present {
		t.Fatalf("disks are %s: %s", state, why)
	}
	if disks[0].Path != "/mnt/data/llmbox" || disks[0].Error != "no answer within 2s" || disks[0].TotalBytes != 0 {
		t.Errorf("the disk that hangs: %+v", disks[0])
	}
	if disks[1].Path != "/" || disks[1].Error != "" || disks[1].TotalBytes == 0 {
		t.Errorf("the disk beside it: %+v", disks[1])
	}
}

func TestBlockedCommand(t *testing.T) {
	root, programs := machine(t), t.TempDir()
	pids := filepath.Join(t.TempDir(), "pids")
	scripts := map[string]string{
		// Neither it nor its child listens to TERM.
		"dmesg":      "trap '' TERM HUP INT\n(trap '' TERM; sleep 600) &\necho $! >> " + pids + "\necho $$ >> " + pids + "\nsleep 600\n",
		"nvidia-ctk": "echo NVIDIA Container Toolkit CLI version 1.17.8\n",
		"modinfo":    "echo 'modinfo: ERROR: Module nvidia not found.' >&2\nexit 1\n",
	}
	for name, script := range scripts {
		// #nosec G306 -- they are to be run.
		if err := os.WriteFile(filepath.Join(programs, name), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	const bound = 1500 * time.Millisecond
	s := within(t, bound, Options{Root: root, Offline: true, Programs: []string{programs}, Timeout: bound})
	if got := s.Command(CommandDmesg); got.State != Unreadable || got.Why == "" {
		t.Errorf("the command that blocks is %s: %s", got.State, got.Why)
	}
	if got := s.Command(CommandCTK); got.State != Present || got.Exit != 0 || got.Trimmed() != "NVIDIA Container Toolkit CLI version 1.17.8" {
		t.Errorf("the one beside it is %+v", got)
	}
	if got := s.Command(CommandModinfo); got.State != Present || got.Exit != 1 || !strings.Contains(got.Data, "not found") {
		t.Errorf("the one that fails is %+v", got)
	}
	if got := s.Command(CommandDKMS); got.State != Absent {
		t.Errorf("the one that is not installed is %s", got.State)
	}
	raw, err := os.ReadFile(pids) // #nosec G304 -- written by the script above
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range strings.Fields(string(raw)) {
		waitGone(t, pid)
	}
}

// A program on a file system that hangs must not hold up the process that starts it.
func TestCommandOnHungFileSystem(t *testing.T) {
	root, programs := machine(t), filepath.Join(t.TempDir(), "bin")
	hung(t, programs)
	const bound = time.Second
	s := within(t, bound, Options{Root: root, Offline: true, Programs: []string{programs}, Timeout: bound})
	if got := s.Command(CommandDmesg); got.State != Unreadable || got.Why == "" {
		t.Errorf("%+v", got)
	}
}

func waitGone(t *testing.T, pid string) {
	t.Helper()
	for range 100 {
		raw, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
		if errors.Is(err, fs.ErrNotExist) || strings.Contains(string(raw), ") Z ") {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Errorf("process %s is still there", pid)
}

// silent accepts connections and never says a word.
func silent(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return listener.Addr().String()
}

// dropping is an address of this machine whose packets go nowhere: the queue of a
// socket that nobody accepts from is full, and the kernel then drops what comes, as
// a firewall does.
func dropping(t *testing.T) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	bound, ok := name.(*unix.SockaddrInet4)
	if !ok {
		t.Fatalf("a socket of the kind %T", name)
	}
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(bound.Port))
	for range 16 {
		conn, err := net.DialTimeout("tcp", address, 150*time.Millisecond)
		if err != nil {
			return address
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	t.Skip("the queue of a listening socket does not fill up here")
	return ""
}

func TestBlackHoleNetwork(t *testing.T) {
	deaf, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = deaf.Close() }()
	const each = 500 * time.Millisecond
	mute, dropped := silent(t), dropping(t)
	s := within(t, each, Options{
		Root: machine(t), NetworkTimeout: each, Hosts: []string{mute, dropped, "nowhere.example"}, DNSNames: []string{"nowhere.example"},
		Resolver: &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, deaf.LocalAddr().String())
		}},
	})
	var asked []HTTPS
	if state, why := s.Probe(ProbeHTTPS, &asked); state != Present || len(asked) != 3 {
		t.Fatalf("https is %s %s: %+v", state, why, asked)
	}
	for i, stage := range []string{"tls", "connect", "dns"} {
		if got := asked[i]; got.Stage != stage || got.Error == "" || got.Status != 0 || got.ElapsedMS < 400 || got.ElapsedMS > 2000 {
			t.Errorf("%+v, want it to stop at %s", got, stage)
		}
	}
	var names []DNS
	if state, why := s.Probe(ProbeDNS, &names); state != Present || len(names) != 1 || names[0].Error == "" || len(names[0].Addresses) > 0 {
		t.Errorf("dns is %s %s: %+v", state, why, names)
	}
	var clock Clock
	if state, _ := s.Probe(ProbeClock, &clock); state != Present || clock.OffsetSeconds != nil || clock.Local.IsZero() {
		t.Errorf("clock is %s: %+v", state, clock)
	}
}

// The whole bound holds even against questions that would take longer each.
func TestTotalBoundOnNetwork(t *testing.T) {
	const bound = 700 * time.Millisecond
	s := within(t, bound, Options{Root: machine(t), Hosts: []string{silent(t)}, Timeout: bound})
	var asked []HTTPS
	if state, why := s.Probe(ProbeHTTPS, &asked); state != Present || len(asked) != 1 || asked[0].Stage != "tls" {
		t.Errorf("https is %s %s: %+v", state, why, asked)
	}
}

func TestGPUThatNeverAnswers(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	const bound = 400 * time.Millisecond
	s := within(t, bound, Options{
		Root: machine(t), Offline: true, GPUTimeout: bound,
		GPU: func(context.Context) gpu.Report { <-release; return gpu.Report{} },
	})
	if s.GPU != nil || s.Manifest.Unreadable["gpu.json"] != "no answer within 400ms" {
		t.Errorf("gpu.json: %+v, %v", s.GPU, s.Manifest.Unreadable)
	}
}

func TestCalledOff(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	go func() { time.Sleep(100 * time.Millisecond); cancel() }()
	begin := time.Now()
	s := Collect(ctx, Options{Root: machine(t), Hosts: []string{silent(t)}})
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("took %s", took)
	}
	if s == nil || s.File("/proc/version").State != Present {
		t.Error("what had been read is lost")
	}
}
