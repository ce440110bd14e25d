package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/test/internal/trace"
	"github.com/llmbox-dev/llmbox/test/lab/images"
)

const (
	debianSuite = "bookworm"
	// The network of a booted machine: its way out, where the images are, and a second one,
	// so that there is an address to choose.
	bootedAround, bootedNet, bootedOther = "10.98.0.254", "10.98.0.", "10.97.0."
	bootedImages                         = bootedAround + ":5000"
	bootWithin                           = 2 * time.Minute
	// rebooted is the status by which systemd-nspawn asks to be started again.
	rebooted = 133
)

// debianPackages are what a machine has beside a minimal Debian: its own systemd, and
// what k3s has in its own binary and the stand-in takes from the machine.
func debianPackages() []string {
	return []string{"systemd", "systemd-sysv", "dbus", "kmod", "procps", "iproute2", "iptables", "ipset", "conntrack",
		"ca-certificates", "containerd", "runc", "containernetworking-plugins"}
}

// needsContainer skips where no machine can be booted in a container.
func needsContainer(t *testing.T) {
	t.Helper()
	for name, of := range map[string]string{"systemd-nspawn": "systemd-container", "debootstrap": "debootstrap", "nsenter": "util-linux", "ip": "iproute2"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("%v: install Debian's %s", err, of)
		}
	}
}

// debianRoot is a Debian with systemd, made of the packages of the archive that this
// machine has its own from. It is made once and kept in the user's cache directory.
func debianRoot(t *testing.T) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	must(t, err)
	key := sha256.Sum256([]byte(debianSuite + " " + strings.Join(debianPackages(), ",")))
	root := filepath.Join(cache, "llmbox-lab", fmt.Sprintf("debian-%s-%x", debianSuite, key[:6]))
	if _, err := os.Stat(root); err == nil {
		return root
	}
	out, err := exec.CommandContext(t.Context(), "apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages").Output()
	must(t, err)
	archive := ""
	for line := range strings.Lines(string(out)) {
		if name, uri, _ := strings.Cut(strings.TrimSpace(line), " "); name == debianSuite {
			archive = uri
		}
	}
	if archive == "" {
		t.Skipf("this machine has no archive of Debian's %s configured", debianSuite)
	}
	// One that is cut off leaves a directory of another name.
	making, err := os.MkdirTemp(filepath.Dir(root), "debian-making-")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(making) })
	t.Log(strings.SplitN(run(t, 30*time.Minute, "debootstrap", "--variant=minbase", "--include="+strings.Join(debianPackages(), ","), debianSuite, making, archive), "\n", 2)[0])
	must(t, os.RemoveAll(filepath.Join(making, "var/cache/apt")))
	// k3s has a containerd of its own; Debian's would run beside it.
	run(t, time.Minute, "systemctl", "--root="+making, "disable", "containerd.service")
	must(t, os.Chmod(making, 0o755)) // #nosec G302 -- the root of a machine
	must(t, os.Rename(making, root))
	return root
}

// booted is a machine whose first process is systemd: Debian in a container with
// namespaces and cgroups of its own, on this machine's kernel.
type booted struct {
	name, root, bin string
	cgroups         []string
	address         string
	container       *exec.Cmd
	ended           chan error
	console         *bytes.Buffer
	leader          string
	// alone says that nothing leads out of it.
	alone bool
}

// newBooted makes a machine's disk and its network's outer end, and serves images there.
func newBooted(t *testing.T, bin string) *booted {
	t.Helper()
	debian := debianRoot(t)
	m := &booted{name: fmt.Sprintf("llmbox-%d", os.Getpid()), bin: bin}
	dir := filepath.Join(t.TempDir(), "machine")
	m.root = dir
	run(t, 5*time.Minute, "cp", "-a", "--reflink=auto", debian, dir)
	must(t, os.WriteFile(filepath.Join(dir, "etc/hostname"), []byte("gpu-0\n"), 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "etc/hosts"), []byte("127.0.0.1 localhost\n127.0.1.1 gpu-0\n"), 0o600))
	must(t, os.Chmod(filepath.Join(dir, "etc/hosts"), 0o644)) // #nosec G302 -- as on any machine
	// A kubelet reads it, and a container has none.
	must(t, os.WriteFile(filepath.Join(dir, "etc/tmpfiles.d/kmsg.conf"), []byte("c /dev/kmsg 0600 root root - 1:11\n"), 0o600))
	// Of version 1's hierarchies a container may write to systemd's alone. These are the
	// machine's own, seen from their roots by its namespace. And /sys/class/net is that of
	// the network in which the container was made.
	must(t, os.WriteFile(filepath.Join(dir, "etc/systemd/system/lab-cgroups.service"), []byte(`[Unit]
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'for d in /sys/fs/cgroup/*/; do mount -o remount,rw,bind $$d || true; done'
ExecStart=/bin/sh -c 'mkdir -p /run/systemd/lab-sys && mount -t sysfs sysfs /run/systemd/lab-sys && for d in class/net devices/virtual/net; do mount --bind /run/systemd/lab-sys/$$d /sys/$$d; done'
[Install]
WantedBy=sysinit.target
`), 0o600))
	run(t, time.Minute, "systemctl", "--root="+dir, "enable", "lab-cgroups.service")
	hierarchies, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	must(t, err)
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		hierarchies = []string{"/sys/fs/cgroup/cgroup.procs"}
	}
	for _, h := range hierarchies {
		m.cgroups = append(m.cgroups, filepath.Join(filepath.Dir(h), m.name))
	}
	t.Cleanup(func() {
		m.halt(t)
		m.dropCgroups(t)
	})
	return m
}

// clone is a machine whose disk is a copy of this one's, which does not run.
func (m *booted) clone(t *testing.T, name string) *booted {
	t.Helper()
	c := &booted{name: m.name + "-" + name, bin: m.bin, root: m.root + "-" + name}
	run(t, 5*time.Minute, "cp", "-a", "--reflink=auto", m.root, c.root)
	for _, dir := range m.cgroups {
		c.cgroups = append(c.cgroups, filepath.Join(filepath.Dir(dir), c.name))
	}
	t.Cleanup(func() {
		c.halt(t)
		c.dropCgroups(t)
	})
	return c
}

// bootAlone starts the machine with no way to anything but itself: what it sends out is
// counted and lost.
func (m *booted) bootAlone(t *testing.T) {
	t.Helper()
	m.alone = true
	_, _ = attempt(context.Background(), time.Minute, "ip", "netns", "delete", m.name)
	run(t, time.Minute, "ip", "netns", "add", m.name)
	run(t, time.Minute, "ip", "-n", m.name, "link", "set", "lo", "up")
	run(t, time.Minute, "ip", "netns", "exec", m.name, "sh", "-ec", deadEnd)
	m.start(t)
}

// serveImages has the lab's registry at the machine's way out.
func (m *booted) serveImages(t *testing.T) {
	t.Helper()
	all, err := images.Catalogue(filepath.Join(m.bin, "lab"), filepath.Join(m.bin, "llmbox"), "0.0.0")
	must(t, err)
	there, _ := images.Available(all)
	there = slices.DeleteFunc(there, func(i images.Image) bool {
		return !strings.Contains(i.Reference, "/rancher/") && !strings.Contains(i.Reference, "/pause:")
	})
	registry, err := images.NewRegistry(filepath.Join(t.TempDir(), "registry"), there)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	// The address comes and goes with the machine's network.
	free := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var setting error
		err := c.Control(func(fd uintptr) {
			setting = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_FREEBIND, 1) // #nosec G115 -- a descriptor
		})
		return errors.Join(err, setting)
	}}
	l, err := free.Listen(ctx, "tcp4", bootedImages)
	must(t, err)
	done := make(chan error, 1)
	go func() { done <- registry.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("serving images: %v", err)
		}
	})
}

// boot starts the machine with this as the last number of its addresses.
func (m *booted) boot(t *testing.T, number int) {
	t.Helper()
	m.address = fmt.Sprintf("%s%d", bootedNet, number)
	link := fmt.Sprintf("lb%d", os.Getpid())
	_, _ = attempt(context.Background(), time.Minute, "ip", "netns", "delete", m.name)
	for _, line := range []string{
		"netns add " + m.name,
		"link add " + link + " type veth peer name host0 netns " + m.name,
		"address add " + bootedAround + "/24 dev " + link,
		"link set " + link + " up",
		"-n " + m.name + " link set lo up",
		"-n " + m.name + " address add " + m.address + "/24 dev host0",
		fmt.Sprintf("-n %s address add %s%d/24 dev host0", m.name, bootedOther, number),
		"-n " + m.name + " link set host0 up",
		"-n " + m.name + " route add default via " + bootedAround + " src " + m.address,
	} {
		run(t, time.Minute, "ip", strings.Fields(line)...)
	}
	m.start(t)
}

// start has systemd run in the machine's network.
func (m *booted) start(t *testing.T) {
	t.Helper()
	for _, dir := range m.cgroups {
		must(t, os.MkdirAll(dir, 0o755)) // #nosec G301 -- as all cgroups
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			// Version 1 leaves a new cpuset empty, and an empty one takes no process.
			if raw, err := os.ReadFile(filepath.Join(filepath.Dir(dir), file)); err == nil { // #nosec G304 -- a cgroup
				must(t, os.WriteFile(filepath.Join(dir, file), bytes.TrimSpace(raw), 0o600))
			}
		}
		// A machine counts for more than one process when CPUs are short.
		for file, weight := range map[string]string{"cpu.shares": "65536", "cpu.weight": "6400"} {
			if _, err := os.Stat(filepath.Join(dir, file)); err == nil {
				must(t, os.WriteFile(filepath.Join(dir, file), []byte(weight), 0o600))
			}
		}
	}
	// A shell steps into the cgroups and becomes the container.
	script := ""
	for _, dir := range m.cgroups {
		script += "echo $$ >" + dir + "/cgroup.procs && "
	}
	script += `exec "$@"`
	m.container = exec.Command("sh", "-c", script, "sh", // #nosec G204 -- the test's own
		"systemd-nspawn", "--directory="+m.root, "--machine="+m.name, "--hostname=gpu-0", "--boot", "--register=no", "--keep-unit",
		"--network-namespace-path=/run/netns/"+m.name, "--capability=all", "--resolv-conf=off", "--timezone=off", "--link-journal=no",
		"--bind-ro="+filepath.Join(m.bin, "lab")+":/lab/programs", "--bind-ro="+filepath.Join(m.bin, "llmbox")+":/lab/llmbox",
		"--console=read-only")
	// A kubelet sets the kernel up, and runc makes what a filter of system calls forbids.
	m.container.Env = append(os.Environ(), "SYSTEMD_NSPAWN_API_VFS_WRITABLE=yes", "SYSTEMD_SECCOMP=0")
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil {
		m.container.Env = append(m.container.Env, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=0")
	}
	m.console = &bytes.Buffer{}
	m.container.Stdout, m.container.Stderr, m.container.WaitDelay = m.console, m.console, time.Second
	must(t, m.container.Start())
	m.ended = make(chan error, 1)
	go func() { m.ended <- m.container.Wait() }()
	m.leader = ""
	deadline := time.Now().Add(bootWithin)
	for {
		if time.Now().After(deadline) {
			t.Fatalf("systemd did not come up within %s\n%s", bootWithin, m.console)
		}
		select {
		case err := <-m.ended:
			t.Fatalf("the container ended: %v\n%s", err, m.console)
		case <-time.After(500 * time.Millisecond):
		}
		pid := m.container.Process.Pid
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid)) // #nosec G304 -- the kernel's
		if err != nil || len(strings.Fields(string(raw))) != 1 {
			continue
		}
		m.leader = strings.Fields(string(raw))[0]
		if out, err := m.run("systemctl", "is-system-running"); err == nil || strings.Contains(out, "degraded") {
			if links := m.must(t, "ls", "/sys/class/net"); !strings.Contains(links, "host0") && !m.alone {
				t.Fatalf("the machine sees the links of another: %s", links)
			}
			return
		}
	}
}

// inside is the command line that runs another in the machine.
func (m *booted) inside(command ...string) []string {
	return slices.Concat([]string{"nsenter", "--target", m.leader, "--all", "--", "env", "-i",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"}, command)
}

func (m *booted) run(command ...string) (string, error) {
	line := m.inside(command...)
	out, err := attempt(context.Background(), 15*time.Minute, line[0], line[1:]...)
	return string(out), err
}

func (m *booted) must(t *testing.T, command ...string) string {
	t.Helper()
	out, err := m.run(command...)
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
	}
	return out
}

// reboot has the machine boot anew, with other addresses.
func (m *booted) reboot(t *testing.T, number int) {
	t.Helper()
	// The answer gets lost with who gives it.
	_, _ = m.run("systemctl", "reboot")
	select {
	case <-m.ended:
	case <-time.After(bootWithin):
		t.Fatalf("systemd did not go down within %s\n%s", bootWithin, m.console)
	}
	if code := m.container.ProcessState.ExitCode(); code != rebooted {
		t.Fatalf("the container ended with %d\n%s", code, m.console)
	}
	m.container = nil
	m.dropNetwork(t)
	m.boot(t, number)
}

// halt ends the machine, whatever it is doing.
func (m *booted) halt(t *testing.T) {
	t.Helper()
	if m.container != nil {
		_ = m.container.Process.Kill()
		// Its processes end with its first one.
		if m.leader != "" {
			_, _ = attempt(context.Background(), time.Minute, "kill", "-KILL", m.leader)
		}
		select {
		case <-m.ended:
		case <-time.After(time.Minute):
			t.Error("the container does not end")
		}
		m.container = nil
	}
	m.dropNetwork(t)
}

func (m *booted) dropNetwork(t *testing.T) {
	t.Helper()
	if out, err := attempt(context.Background(), time.Minute, "ip", "netns", "delete", m.name); err != nil && !strings.Contains(string(out), "No such file") {
		t.Errorf("removing the machine's network: %v: %s", err, out)
	}
	if m.alone {
		return
	}
	link := fmt.Sprintf("lb%d", os.Getpid())
	for range 50 {
		if _, err := net.InterfaceByName(link); err != nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	_, _ = attempt(context.Background(), time.Minute, "ip", "link", "delete", link)
}

func (m *booted) dropCgroups(t *testing.T) {
	t.Helper()
	for _, top := range m.cgroups {
		var dirs []string
		_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		slices.Reverse(dirs)
		for _, dir := range dirs {
			var err error
			for range 50 {
				if err = os.Remove(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
					break
				}
				time.Sleep(100 * time.Millisecond)
			}
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("removing a cgroup: %v", err)
			}
		}
	}
}

// look writes down what an install can have changed.
func (m *booted) look(t *testing.T) trace.State {
	t.Helper()
	state, err := trace.Take(t.Context(), func(_ context.Context, command ...string) (string, error) { return m.run(command...) })
	must(t, err)
	return state
}

// property asks systemd about a unit.
func (m *booted) property(t *testing.T, unit, name string) string {
	t.Helper()
	return strings.TrimSpace(m.must(t, "systemctl", "show", "--value", "--property="+name, unit))
}
