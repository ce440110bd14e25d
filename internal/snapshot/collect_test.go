package snapshot

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// link makes a symbolic link below a root.
func link(t *testing.T, root, name, target string) {
	t.Helper()
	at := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(at), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, at); err != nil {
		t.Fatal(err)
	}
}

// gpuMachine is a root as on a VM with one A10 beside another vendor's card.
func gpuMachine(t *testing.T) string {
	t.Helper()
	root := machine(t)
	const a10, other = "/sys/devices/pci0000:00/0000:00:1e.0", "/sys/devices/pci0000:00/0000:00:05.0"
	for name, content := range map[string]string{
		a10 + "/vendor": "0x10de\n", a10 + "/device": "0x2237\n", a10 + "/class": "0x030200\n", a10 + "/numa_node": "-1\n",
		a10 + "/current_link_width": "8\n", a10 + "/max_link_width": "16\n", a10 + "/config": "\xde\x10\x37\x22" + strings.Repeat("\x00", 252),
		other + "/vendor": "0x1d0f\n", other + "/class": "0x020000\n",
		"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07\n", "/sys/module/nvidia/version": "550.90.07\n",
		"/proc/devices": "195 nvidia\n", "/proc/swaps": "", "/proc/cmdline": "root=/dev/vda1 token=hunter2\n",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.107.02":   "\x7fELF",
		"/lib/modules/6.8.0-1021-aws/updates/dkms/nvidia.ko.zst": "x", "/lib/modules/6.8.0-1024-aws/modules.builtin": "",
		"/lib/modules/6.8.0-1021-aws/modules.dep": "kernel/fs/overlayfs/overlay.ko.zst:\nkernel/fs/xfs/xfs.ko.zst: kernel/lib/libcrc32c.ko\n" +
			"updates/dkms/nvidia.ko.zst:\nkernel/a/b.ko: kernel/net/vxlan/vxlan.ko\nkernel/drivers/net/vxlan/vxlan.ko.zst: kernel/net/ipv4/udp_tunnel.ko.zst\n",
		"/boot/vmlinuz-6.8.0-1024-aws": "x", "/etc/rancher/k3s/k3s.yaml": "token: hunter2", "/var/lib/rancher/k3s/server/token": "hunter2",
		"/var/lib/rancher/k3s/server/db/state.db": "hunter2", "/etc/rancher/k3s/config.yaml": "token: hunter2\nnode-name: box\n",
		"/etc/systemd/system/k3s.service.env": "K3S_TOKEN=hunter2\nHTTP_PROXY=http://u:hunter2@p.example:1\n",
		"/etc/systemd/system/k3s.service":     "ExecStart=/usr/local/bin/k3s server '--token' 'hunter2'\n",
		"/etc/resolv.conf.real":               "nameserver 127.0.0.53\n", "/etc/environment": "PATH=/bin\nhttps_proxy=http://u:hunter2@p.example:1\nHF_TOKEN=hunter2\n",
		"/proc/30110/comm": "VLLM::Worker\n", "/proc/30110/cgroup": "0::/system.slice/docker-55aa.scope\n", "/proc/30111/comm": "other\n",
		"/var/log/apt/history.log": strings.Repeat("Start-Date: 2024-08-14  06:41:20\n", 4000) + "Commandline: /usr/bin/unattended-upgrade\n",
	} {
		put(t, root, name, content)
	}
	link(t, root, "/sys/bus/pci/devices/0000:00:1e.0", "../../../devices/pci0000:00/0000:00:1e.0")
	link(t, root, "/sys/bus/pci/devices/0000:00:05.0", "../../../devices/pci0000:00/0000:00:05.0")
	link(t, root, a10+"/driver", "../../../bus/pci/drivers/nouveau")
	link(t, root, "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "libnvidia-ml.so.550.107.02")
	link(t, root, "/boot/vmlinuz", "vmlinuz-6.8.0-1024-aws")
	link(t, root, "/etc/resolv.conf", "resolv.conf.real")
	link(t, root, "/dev/char/195:0", "../nvidia0")
	link(t, root, "/dev/char/1:3", "../null")
	link(t, root, "/etc/modprobe.d/dangling.conf", "/nowhere")
	return root
}

func TestCollectGPUMachine(t *testing.T) {
	root := gpuMachine(t)
	used := uint64(1)
	s := Collect(t.Context(), Options{
		Root: root, Version: "v1.2.3", Offline: true,
		Environ: []string{"HTTPS_PROXY=http://u:hunter2@p.example:1", "HF_TOKEN=hunter2", "NO_PROXY=10.0.0.0/8"},
		GPU: func(context.Context) gpu.Report {
			return gpu.Report{Schema: gpu.ReportSchema, Devices: []gpu.Device{{Processes: []gpu.Process{{PID: 30110, UsedBytes: &used}}}}}
		},
	})
	const a10 = "/sys/bus/pci/devices/0000:00:1e.0"
	for name, want := range map[string]string{
		a10 + "/vendor": "0x10de\n", a10 + "/device": "0x2237\n", a10 + "/class": "0x030200\n", a10 + "/current_link_width": "8\n",
		"/sys/module/nvidia/version": "550.90.07\n", "/proc/swaps": "", "/proc/cmdline": "root=/dev/vda1 token=REDACTED\n",
		"/proc/30110/comm": "VLLM::Worker\n", "/proc/30110/cgroup": "0::/system.slice/docker-55aa.scope\n",
		"/etc/rancher/k3s/config.yaml":                "token: REDACTED\nnode-name: box\n",
		"/etc/systemd/system/k3s.service.env":         "HTTP_PROXY=http://REDACTED@p.example:1\n",
		"/etc/environment":                            "https_proxy=http://REDACTED@p.example:1\n",
		"/proc/self/environ":                          "HTTPS_PROXY=http://REDACTED@p.example:1\nNO_PROXY=10.0.0.0/8\n",
		"/etc/resolv.conf":                            "nameserver 127.0.0.53\n",
		"/lib/modules/6.8.0-1021-aws/modules.dep":     "kernel/fs/overlayfs/overlay.ko.zst:\nupdates/dkms/nvidia.ko.zst:\nkernel/drivers/net/vxlan/vxlan.ko.zst: kernel/net/ipv4/udp_tunnel.ko.zst\n",
		"/lib/modules/6.8.0-1024-aws/modules.builtin": "",
	} {
		if got := s.File(name); got.State != Present || got.Data != want {
			t.Errorf("%s is %s %q %s, want %q", name, got.State, got.Data, got.Why, want)
		}
	}
	if got := s.File(a10 + "/config"); len(got.Data) != 64 || got.Data[:4] != "\xde\x10\x37\x22" {
		t.Errorf("config has %d bytes: %q", len(got.Data), got.Data)
	}
	if got := s.File("/var/log/apt/history.log"); len(got.Data) != 64<<10 || !strings.HasSuffix(got.Data, "unattended-upgrade\n") {
		t.Errorf("the tail has %d bytes", len(got.Data))
	}
	for name, want := range map[string]string{
		a10 + "/driver": "/sys/bus/pci/drivers/nouveau", "/boot/vmlinuz": "/boot/vmlinuz-6.8.0-1024-aws",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.107.02",
		"/dev/char/195:0": "/dev/nvidia0", "/etc/modprobe.d/dangling.conf": "/nowhere",
	} {
		if got, state := s.Stat(name); state != Present || got.Kind != Symlink || got.Target != want {
			t.Errorf("%s is %s %+v, want it to lead to %s", name, state, got, want)
		}
	}
	// Seen, never read.
	for _, name := range []string{
		"/etc/rancher/k3s/k3s.yaml", "/var/lib/rancher/k3s/server/token", "/var/lib/rancher/k3s/server/db/state.db",
		"/etc/systemd/system/k3s.service", "/lib/modules/6.8.0-1021-aws/updates/dkms/nvidia.ko.zst", "/boot/vmlinuz-6.8.0-1024-aws",
	} {
		if _, state := s.Stat(name); state != Present {
			t.Errorf("%s is %s", name, state)
		}
		if got := s.File(name); got.State != Absent {
			t.Errorf("%s was read: %q", name, got.Data)
		}
	}
	for _, name := range []string{"/sys/bus/pci/devices/0000:00:05.0/class", "/dev/char/1:3", "/proc/30111/comm", "/proc/modules"} {
		if _, state := s.Stat(name); state != Absent {
			t.Errorf("%s is %s", name, state)
		}
	}
	if len(s.Manifest.Unreadable) > 0 {
		t.Errorf("unreadable: %v", s.Manifest.Unreadable)
	}
	file := filepath.Join(t.TempDir(), "snapshot")
	if err := s.Save(file); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(file, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(p) // #nosec G304 G122 -- written above
		if strings.Contains(string(data), "hunter2") {
			t.Errorf("a secret is in %s", p)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, s, got)
}

func TestTooLargeIsSaid(t *testing.T) {
	root := machine(t)
	put(t, root, "/etc/hosts", strings.Repeat("x", 1<<20+1))
	s := Collect(t.Context(), Options{Root: root, Offline: true})
	if got := s.File("/etc/hosts"); got.State != Unreadable || !strings.Contains(got.Why, "too large") {
		t.Errorf("%s %s", got.State, got.Why)
	}
	if e, state := s.Stat("/etc/hosts"); state != Present || e.Size != 1<<20+1 {
		t.Errorf("%s %+v", state, e)
	}
}

func TestYAMLThatIsNoneIsLeftOut(t *testing.T) {
	root := machine(t)
	put(t, root, "/etc/rancher/k3s/config.yaml", "token: [hunter2\n")
	s := Collect(t.Context(), Options{Root: root, Offline: true})
	if got := s.File("/etc/rancher/k3s/config.yaml"); got.State != Unreadable || strings.Contains(got.Why, "hunter2") {
		t.Errorf("%+v", got)
	}
}

// asNobody says, in the child that TestPermissionDenied starts, which root to read.
const asNobody = "LLMBOX_TEST_AS_NOBODY"

func TestPermissionDenied(t *testing.T) {
	root := os.Getenv(asNobody)
	if root == "" {
		root = machine(t)
		put(t, root, "/etc/docker/daemon.json", "{}")
		put(t, root, "/etc/cdi/nvidia.yaml", "cdiVersion: 0.5.0\n")
		put(t, root, "/etc/hosts", "127.0.0.1 localhost\n")
		if err := errors.Join(os.Chmod(filepath.Join(root, "/etc/docker/daemon.json"), 0), os.Chmod(filepath.Join(root, "/etc/cdi"), 0)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Chmod(filepath.Join(root, "/etc/cdi"), 0o700) }) // #nosec G302 -- a directory
		if os.Geteuid() == 0 {
			asUser(t, root)
			return
		}
	}
	s := Collect(t.Context(), Options{Root: root, Offline: true})
	if got := s.File("/etc/docker/daemon.json"); got.State != Unreadable || got.Why != "permission denied" {
		t.Errorf("%+v", got)
	}
	if _, state := s.Stat("/etc/docker/daemon.json"); state != Present {
		t.Errorf("that it is there could be seen, but it is %s", state)
	}
	if why := s.Manifest.Unreadable["host/etc/cdi"]; why != "permission denied" {
		t.Errorf("/etc/cdi: %q", why)
	}
	if got := s.File("/etc/hosts"); got.State != Present {
		t.Errorf("%+v", got)
	}
	if s.Manifest.Root {
		t.Error("says it ran as root")
	}
}

// asUser runs the test as a user without privileges: nothing is denied to root.
func asUser(t *testing.T, root string) {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "snapshot.test")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(self) // #nosec G304 -- this program
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, data, 0o755); err != nil { // #nosec G306 -- it is to be run by another user
		t.Fatal(err)
	}
	for _, leaf := range []string{dir, root} {
		for at := leaf; at != os.TempDir() && at != "/"; at = path.Dir(at) {
			if err := os.Chmod(at, 0o755); err != nil { // #nosec G302 -- likewise
				t.Fatal(err)
			}
		}
	}
	cmd := exec.CommandContext(t.Context(), program, "-test.run=^TestPermissionDenied$", "-test.v") // #nosec G204 -- this program
	cmd.Dir, cmd.Env = "/", []string{asNobody + "=" + root}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestPermissionDenied") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestRootCommandsAsUser(t *testing.T) {
	programs := t.TempDir()
	for _, name := range []string{"ufw", "dmesg", "journalctl"} {
		script := "#!/bin/sh\necho asked " + name + "\nexit 0\n"
		if name == "dmesg" {
			script = "#!/bin/sh\necho 'dmesg: read kernel buffer failed: Operation not permitted' >&2\nexit 1\n"
		}
		// #nosec G306 -- they are to be run.
		if err := os.WriteFile(filepath.Join(programs, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	uid := 1000
	s := Collect(t.Context(), Options{Root: machine(t), Offline: true, Programs: []string{programs}, UID: &uid})
	if got := s.Command(CommandUFW); got.State != Unreadable || !strings.HasPrefix(got.Why, "permission denied") {
		t.Errorf("%+v", got)
	}
	if got := s.Command(CommandDmesg); got.State != Unreadable || !strings.Contains(got.Why, "Operation not permitted") {
		t.Errorf("%+v", got)
	}
	if got := s.Command(CommandJournalKernel); got.State != Present || got.Trimmed() != "asked journalctl" {
		t.Errorf("%+v", got)
	}
}

// Every row says what it is for, and no path that holds a secret is read.
func TestTables(t *testing.T) {
	secrets := []string{
		"/etc/rancher/k3s/k3s.yaml", "/etc/rancher/node/password", "/var/lib/rancher/k3s/server/token", "/var/lib/rancher/k3s/server/node-token",
		"/var/lib/rancher/k3s/server/db/state.db", "/var/lib/rancher/k3s/agent/client-kubelet.key", "/etc/kubernetes/admin.conf", "/var/lib/kubelet/config.json",
		"/etc/shadow", "/root/.docker/config.json", "/etc/systemd/system/k3s.service", "/etc/rancher/rke2/rke2.yaml", "/proc/1/environ", "/var/lib/llmbox/credentials",
	}
	for _, group := range slices.Concat(hostFiles(), pciFiles()) {
		if group.Purpose == "" || len(group.Paths) == 0 {
			t.Errorf("%+v", group)
		}
		for _, pattern := range group.Paths {
			if _, err := path.Match(pattern, ""); err != nil || path.Clean(pattern) != pattern {
				t.Errorf("pattern %s: %v", pattern, err)
			}
			for _, secret := range secrets {
				if ok, _ := path.Match(pattern, secret); ok && group.Read != statOnly {
					t.Errorf("%s would be read by %s", secret, pattern)
				}
			}
		}
	}
	seen := map[string]bool{}
	for _, c := range commands() {
		if c.Name == "" || c.Purpose == "" || c.Program == "" || seen[c.Name] || c.Deadline > commandDeadline {
			t.Errorf("%+v", c)
		}
		seen[c.Name] = true
	}
}

func TestFsync(t *testing.T) {
	root := machine(t)
	if err := os.MkdirAll(filepath.Join(root, "/var/lib"), 0o750); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	s := Collect(t.Context(), Options{Root: root, Offline: true, Fsync: true, FsyncPath: "/var/lib/llmbox/k3s"})
	var got []Fsync
	if state, why := s.Probe(ProbeFsync, &got); state != Present || len(got) != 1 {
		t.Fatalf("%s %s", state, why)
	}
	if f := got[0]; f.Path != "/var/lib/llmbox/k3s" || f.Writes == 0 || f.BytesPerWrite != 2300 || f.P50Milli <= 0 || f.P99Milli < f.P50Milli {
		t.Errorf("%+v", f)
	}
	if took := time.Since(begin); took > 4*time.Second {
		t.Errorf("took %s", took)
	}
	left, err := os.ReadDir(filepath.Join(root, "/var/lib"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
