package k3s

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestNoTraceOnARealKernel removes a k3s from a machine made of namespaces: real
// mounts, links, packet filter rules, network namespaces and processes, with Docker's
// and podman's beside them. It needs root, and nothing of it reaches this machine.
func TestNoTraceOnARealKernel(t *testing.T) {
	if os.Getenv(asRemover) != "" {
		t.Skip("this is the inside")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for _, program := range []string{"unshare", "ip", "iptables-nft-save", "iptables-legacy-save"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip("needs " + program)
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	// #nosec G204 -- this very test
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--propagation", "private", self, "-test.run", "^TestInside$", "-test.v")
	cmd.Env = append(os.Environ(), asRemover+"="+root)
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if strings.Contains(string(out), "SKIP: TestInside") {
		t.Skip(string(out))
	}
}

// enter makes a root directory with the programs of this machine and goes into it.
func enter(t *testing.T, root string) {
	t.Helper()
	mount := func(source, target, kind string, flags uintptr) {
		t.Helper()
		if err := os.MkdirAll(target, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(source, target, kind, flags, ""); err != nil {
			t.Skipf("mounting %s: %v", target, err)
		}
	}
	mount("tmpfs", root, "tmpfs", 0)
	for _, dir := range []string{"/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32"} {
		info, err := os.Lstat(dir)
		switch {
		case err != nil:
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(dir)
			if err == nil {
				err = os.Symlink(to, root+dir)
			}
			if err != nil {
				t.Fatal(err)
			}
		default:
			mount(dir, root+dir, "", unix.MS_BIND|unix.MS_REC)
		}
	}
	// /usr/local is this machine's own.
	mount("tmpfs", root+"/usr/local", "tmpfs", 0)
	mount("proc", root+"/proc", "proc", 0)
	mount("sysfs", root+"/sys", "sysfs", 0)
	mount("/dev", root+"/dev", "", unix.MS_BIND|unix.MS_REC)
	mount("tmpfs", root+"/run", "tmpfs", 0)
	mount("tmpfs", root+"/tmp", "tmpfs", 0)
	for _, dir := range []string{"/etc", "/var/lib/llmbox", "/var/log/llmbox", "/var/lib/docker/x", "/usr/local/bin", "/etc/alternatives"} {
		if err := os.MkdirAll(root+dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	links, err := os.ReadDir("/etc/alternatives")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if to, err := os.Readlink("/etc/alternatives/" + l.Name()); err == nil {
			_ = os.Symlink(to, root+"/etc/alternatives/"+l.Name())
		}
	}
	if err := unix.Chroot(root); err != nil {
		t.Fatal(err)
	}
	if err := os.Chdir("/"); err != nil {
		t.Fatal(err)
	}
}

func do(t *testing.T, argv ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	// #nosec G204 -- fixed command lines
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%q: %v\n%s", argv, err, out)
	}
	return string(out)
}

// trace is everything on the machine that an uninstall has to leave as it was.
func trace(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, dir := range []string{"/etc", "/var", "/run", "/usr/local", "/tmp"} {
		err := filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			out = append(out, fmt.Sprintf("file %s %s %d", info.Mode(), at, map[bool]int64{true: 0, false: info.Size()}[info.IsDir()]))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	all, err := parseMounts(mounts)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		out = append(out, "mount "+m.kind+" "+m.point)
	}
	links, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		out = append(out, "link "+l.Name())
	}
	for _, program := range []string{"iptables-nft-save", "iptables-legacy-save", "ip6tables-nft-save", "ip6tables-legacy-save"} {
		tables, err := parseRules(onlyRules([]byte(do(t, program))))
		if err != nil {
			t.Fatal(err)
		}
		// A table in which nothing is left is no trace: the kernel makes it when asked.
		for _, table := range tables {
			for _, chain := range table.chains {
				out = append(out, program+" "+table.name+" :"+chain)
			}
			for _, r := range table.rules {
				out = append(out, program+" "+table.name+" -A "+r.text)
			}
		}
	}
	out = append(out, strings.Split("route "+strings.ReplaceAll(strings.TrimSpace(do(t, "ip", "route")), "\n", "\nroute "), "\n")...)
	running, err := readProcesses("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range running {
		if p.State != 'Z' && p.PID != os.Getpid() {
			out = append(out, "process "+strings.Join(p.Argv, " "))
		}
	}
	return out
}

// liveK3s makes what a running k3s has made, and returns its processes.
func liveK3s(t *testing.T, m *Machine) {
	t.Helper()
	for name, content := range map[string]string{
		DefaultDataDir + "/server/token": "t", DefaultDataDir + "/storage/pvc/x": "x", Kubeconfig: "x", "/etc/rancher/node/password": "x", "/var/log/pods/p/0.log": "x",
		"/var/lib/cni/networks/cbr0/10.42.0.5": "x", "/run/flannel/subnet.env": "x", "/run/k3s/containerd/containerd.sock": "",
		DefaultDataDir + "/agent/etc/cni/net.d/10-flannel.conflist": `{"name": "cbr0"}`,
	} {
		put(t, m, name, content)
	}
	// A program that keeps its name: shims of this k3s, and one of Docker.
	const bin = DefaultDataDir + "/data/abc/bin"
	shim := do(t, "sh", "-c", "command -v sleep")
	data, err := os.ReadFile(strings.TrimSpace(shim))
	if err != nil {
		t.Fatal(err)
	}
	put(t, m, bin+"/containerd-shim-runc-v2", string(data))
	if err := os.Chmod(bin+"/containerd-shim-runc-v2", 0o755); err != nil {
		t.Fatal(err)
	}
	start := func(argv ...string) {
		t.Helper()
		// #nosec G204 -- fixed command lines
		cmd := exec.Command(argv[0], argv[1:]...) //nolint:noctx // the uninstall ends it
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go func() { _ = cmd.Wait() }()
	}
	start(bin+"/containerd-shim-runc-v2", "1000")
	// A pod with its network.
	do(t, "ip", "link", "add", "cni0", "type", "bridge")
	do(t, "ip", "addr", "add", "10.42.0.1/24", "dev", "cni0")
	do(t, "ip", "link", "set", "cni0", "up")
	do(t, "ip", "netns", "add", "cni-1111")
	do(t, "ip", "link", "add", "veth1", "type", "veth", "peer", "name", "eth0", "netns", "cni-1111")
	do(t, "ip", "link", "set", "veth1", "master", "cni0", "up")
	put(t, m, "/var/lib/cni/results/cbr0-aa-eth0", `{"netns": "/var/run/netns/cni-1111"}`)
	for _, name := range []string{"shm", "rootfs"} {
		at := "/run/k3s/containerd/" + name
		if err := os.MkdirAll(at, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", at, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
	}
	volume := kubeletDir + "/pods/p/volumes/v"
	if err := os.MkdirAll(volume, 0o755); err != nil {
		t.Fatal(err)
	}
	// A volume of the host, bound into a pod twice, one of them with an open file.
	put(t, m, "/var/lib/docker/x/precious", "data")
	for range 2 {
		if err := unix.Mount("/var/lib/docker/x", volume, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	busy, err := os.Open(volume + "/precious")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = busy.Close() })
	if _, err := exec.Command("ip", "link", "add", "flannel.1", "type", "vxlan", "id", "1", "dstport", "8472").CombinedOutput(); err != nil { //nolint:noctx // short
		t.Logf("no vxlan here: %v", err)
	}
	for _, form := range []string{"nft", "legacy"} {
		file := "/tmp/rules"
		put(t, m, file, strings.Join(filterRules(t, form), "\n")+"\n")
		do(t, "iptables-"+form+"-restore", "--noflush", file)
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
}

// filterRules are rules of k3s as the fixture has them, in the words that a kernel
// without Docker and podman takes.
func filterRules(t *testing.T, form string) []string {
	t.Helper()
	lines := []string{
		"*nat", ":KUBE-SERVICES - [0:0]", ":KUBE-SVC-X - [0:0]", ":CNI-1d36 - [0:0]", ":CNI-HOSTPORT-DNAT - [0:0]", ":FLANNEL-POSTRTG - [0:0]",
		`-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`, `-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`,
		`-A KUBE-SERVICES -d 10.43.0.1/32 -p tcp -m comment --comment "default/kubernetes:https cluster IP" -m tcp --dport 443 -j KUBE-SVC-X`,
		`-A POSTROUTING -s 10.42.0.5/32 -m comment --comment "name: \"cbr0\" id: \"1d36\"" -j CNI-1d36`, `-A CNI-1d36 -d 10.42.0.0/24 -m comment --comment "name: \"cbr0\" id: \"1d36\"" -j ACCEPT`,
		`-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT`, `-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG`,
		"COMMIT", "*filter", ":KUBE-FORWARD - [0:0]", ":KUBE-ROUTER-INPUT - [0:0]", `-A INPUT -m comment --comment "kube-router netpol - X" -j KUBE-ROUTER-INPUT`,
		`-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD`, "-A KUBE-FORWARD -p tcp -j DROP",
		`-A FORWARD -m comment --comment "rule to explicitly ACCEPT traffic that comply to network policies" -m mark --mark 0x20000/0x20000 -j ACCEPT`, "COMMIT",
	}
	if form == "legacy" {
		return lines[slices.Index(lines, "*filter"):]
	}
	return lines
}

// TestInside is the inside of TestNoTraceOnARealKernel.
func TestInside(t *testing.T) {
	root := os.Getenv(asRemover)
	if root == "" {
		t.Skip("the inside of another test")
	}
	enter(t, root)
	do(t, "ip", "link", "set", "lo", "up")
	// Somebody else's rules in the same chains.
	for _, form := range []string{"nft", "legacy"} {
		do(t, "iptables-"+form, "-t", "filter", "-N", "DOCKER-USER")
		do(t, "iptables-"+form, "-t", "filter", "-A", "FORWARD", "-j", "DOCKER-USER")
		do(t, "iptables-"+form, "-t", "filter", "-A", "INPUT", "-p", "tcp", "--dport", "22", "-j", "ACCEPT")
	}
	if err := os.MkdirAll("/run/netns", 0o755); err != nil {
		t.Fatal(err)
	}
	// The directory of namespaces is a mount of its own from the first one on.
	do(t, "ip", "netns", "add", "of-somebody")
	bystander := exec.Command("sh", "-c", "sleep 1000; :", "bystander", "/var/lib/rancher/k3s") //nolint:noctx // ended below
	if err := bystander.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bystander.Process.Kill(); _ = bystander.Wait() }()
	before := trace(t)

	m := NewMachine(Options{})
	r, err := m.Record(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := machines()["closed-network"]
	if err := m.begin(t.Context(), r, s, Supervised); err != nil {
		t.Fatal(err)
	}
	if _, err := m.EnsureBinary(t.Context(), r, WantBinary{Version: version, Arch: "amd64", Fetcher: release(version)}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Configure(t.Context(), r, s); err != nil {
		t.Fatal(err)
	}
	liveK3s(t, m)
	if d := differ(before, trace(t)); strings.Count(d, "\n+ ") < 30 {
		t.Fatalf("k3s left too little to show anything:\n%s", d)
	}
	plan, err := m.PlanRemoval(t.Context(), RemoveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range plan {
		text, _ := json.Marshal(a.Finds)
		t.Logf("%s: %s", a.Name, text)
	}
	outcomes, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil)
	if err != nil {
		t.Errorf("%v\n%+v", err, outcomes)
	}
	var after []string
	for range 50 {
		if after = trace(t); differ(before, after) == "" {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if d := differ(before, after); d != "" {
		// What was bound into the pod is the host's, and was written by this test.
		d = strings.Join(slices.DeleteFunc(strings.Split(d, "\n"), func(l string) bool { return strings.Contains(l, "/var/lib/docker/x/precious") }), "\n")
		if d != "" {
			t.Errorf("not as before:\n%s", d)
		}
	}
	if data, err := os.ReadFile("/var/lib/docker/x/precious"); err != nil || string(data) != "data" {
		t.Errorf("the host's own data: %q, %v", data, err)
	}
	if outcomes, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil); err != nil || len(outcomes) > 0 {
		t.Errorf("once more: %+v, %v", outcomes, err)
	}
}
