package snapshot

import (
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestParseSockets(t *testing.T) {
	for _, test := range []struct {
		file, protocol string
		want           []socket
	}{
		{"tcp", "tcp", []socket{
			{Listener{Protocol: "tcp", Address: "127.0.0.53", Port: 53}, "22113"},
			{Listener{Protocol: "tcp", Address: "0.0.0.0", Port: 22}, "24801"},
		}},
		{"tcp6", "tcp", []socket{
			{Listener{Protocol: "tcp", Address: "::", Port: 10250}, "31337"},
			{Listener{Protocol: "tcp", Address: "::1", Port: 6444}, "31338"},
		}},
		{"udp", "udp", []socket{{Listener{Protocol: "udp", Address: "10.0.0.5", Port: 8472}, "19001"}}},
	} {
		raw, err := os.ReadFile(filepath.Join("testdata/proc", test.file))
		if err != nil {
			t.Fatal(err)
		}
		if got := parseSockets(string(raw), test.protocol); !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: %+v, want %+v", test.file, got, test.want)
		}
	}
}

func TestDisksFromMountinfo(t *testing.T) {
	raw, err := os.ReadFile("testdata/proc/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	mounts := parseMountinfo(string(raw))
	for p, want := range map[string]mount{
		"/":                     {point: "/", device: "/dev/root", kind: "ext4", options: []string{"rw", "relatime", "discard", "errors=remount-ro"}},
		"/var/lib/rancher/k3s":  {point: "/", device: "/dev/root", kind: "ext4", options: []string{"rw", "relatime", "discard", "errors=remount-ro"}},
		"/mnt/my data/x":        {point: "/mnt/my data", device: "/dev/nvme1n1", kind: "xfs", options: []string{"rw", "noexec", "attr2"}},
		"/mnt/my datax":         {point: "/", device: "/dev/root", kind: "ext4", options: []string{"rw", "relatime", "discard", "errors=remount-ro"}},
		"/srv/share/deep":       {point: "/srv/share", device: "//nas/share", kind: "cifs", options: []string{"rw", "ro", "username=bob"}},
		"/var/lib/docker/twice": {point: "/var/lib/docker", device: "/dev/second", kind: "ext4", options: []string{"ro"}},
	} {
		got, ok := holding(mounts, p)
		if !ok || got.point != want.point || got.device != want.device || got.kind != want.kind || !slices.Equal(got.options, want.options) {
			t.Errorf("%s is on %+v, want %+v", p, got, want)
		}
	}
}

func TestMemory(t *testing.T) {
	root := machine(t)
	put(t, root, "/proc/self/cgroup", "0::/system.slice/llmbox.service\n")
	put(t, root, "/sys/fs/cgroup/system.slice/memory.max", "8388608\n")
	put(t, root, "/sys/fs/cgroup/system.slice/llmbox.service/memory.max", "max\n")
	var got System
	if state, why := Collect(t.Context(), Options{Root: root, Offline: true}).Probe(ProbeSystem, &got); state != Present {
		t.Fatalf("%s %s", state, why)
	}
	if got.MemoryBytes != 16<<20 || got.LimitBytes != 8<<20 {
		t.Errorf("%+v", got)
	}
}

// A real socket of this process is found with its owner.
func TestListenersLive(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	address, ok := listener.Addr().(*net.TCPAddr)
	if !ok {
		t.Fatalf("an address of the kind %T", listener.Addr())
	}
	var got []Listener
	if state, why := Collect(t.Context(), Options{Offline: true}).Probe(ProbeListeners, &got); state != Present {
		t.Fatalf("%s %s", state, why)
	}
	i := slices.IndexFunc(got, func(l Listener) bool { return l.Port == address.Port })
	if i < 0 {
		t.Fatalf("port %d is not in %+v", address.Port, got)
	}
	if l := got[i]; l.Address != "127.0.0.1" || l.PID != os.Getpid() || !strings.HasPrefix(l.Process, "snapshot.test"[:len(l.Process)]) {
		t.Errorf("%+v", l)
	}
}

// holdLock says, in the child that TestLocks starts, which file to lock.
const holdLock = "LLMBOX_TEST_HOLD_LOCK"

func TestLocks(t *testing.T) {
	if name := os.Getenv(holdLock); name != "" {
		file, err := os.OpenFile(name, os.O_RDWR, 0) // #nosec G304 G703 -- given by the parent
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.FcntlFlock(file.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name+".held", nil, 0o600); err != nil { // #nosec G703 -- likewise
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		return
	}
	root := machine(t)
	put(t, root, "/var/lib/dpkg/lock-frontend", "")
	put(t, root, "/var/lib/dpkg/lock", "")
	put(t, root, "/var/run/yum.pid", "999999999\n")
	holder := child(t, holdLock+"="+filepath.Join(root, "/var/lib/dpkg/lock-frontend"))
	for range 200 {
		if _, err := os.Stat(filepath.Join(root, "/var/lib/dpkg/lock-frontend.held")); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	var got []Lock
	if state, why := Collect(t.Context(), Options{Root: root, Offline: true}).Probe(ProbeLocks, &got); state != Present {
		t.Fatalf("%s %s", state, why)
	}
	want := []Lock{
		{Path: "/var/lib/dpkg/lock-frontend", Held: true, PID: holder}, {Path: "/var/lib/dpkg/lock"}, {Path: "/var/run/yum.pid"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	// The kernel's list says the same to those who may not open the file.
	info, err := os.Stat(filepath.Join(root, "/var/lib/dpkg/lock-frontend"))
	if err != nil {
		t.Fatal(err)
	}
	list, err := os.ReadFile("/proc/locks")
	if err != nil {
		t.Skipf("no list of locks here: %v", err)
	}
	device, inode := identity(t, info)
	if pid := holderOf(string(list), device, inode); pid != holder {
		t.Errorf("/proc/locks says %d, want %d:\n%s", pid, holder, list)
	}
	if pid := holderOf(string(list), device, inode+1<<40); pid != 0 {
		t.Errorf("a file that nobody holds is held by %d", pid)
	}
}
