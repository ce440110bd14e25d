package k3s

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

func fixture(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "remove", name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestRulesOfOursAlone(t *testing.T) {
	tables, err := parseRules(fixture(t, "iptables.save"))
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "remove/beside-docker-and-podman.restore", script(ruleOwner{networks: []string{"cbr0"}, alone: true}.removals(tables)))
	golden(t, "remove/beside-another-kubernetes.restore", script(ruleOwner{networks: []string{"cbr0"}}.removals(tables)))
	// Without podman the chains that all networks share go as well.
	var alone [][]byte
	for line := range bytes.Lines(fixture(t, "iptables.save")) {
		if !bytes.Contains(line, []byte("podman")) && !bytes.Contains(line, []byte("CNI-a3f6")) {
			alone = append(alone, line)
		}
	}
	if tables, err = parseRules(bytes.Join(alone, nil)); err != nil {
		t.Fatal(err)
	}
	golden(t, "remove/beside-docker.restore", script(ruleOwner{networks: []string{"cbr0"}, alone: true}.removals(tables)))
	for _, bad := range []string{"-A INPUT -j X\n", ":INPUT ACCEPT\n"} {
		if _, err := parseRules([]byte(bad)); err == nil {
			t.Errorf("read %q", bad)
		}
	}
	if tables, err := parseRules(nil); err != nil || len(tables) != 0 {
		t.Errorf("%v, %v", tables, err)
	}
}

func TestSetsAndTables(t *testing.T) {
	owner := ruleOwner{alone: true}
	if got := ownSets("KUBE-SRC-A\ninet6:KUBE-DST-B\nfail2ban-sshd\nkube-router-local-ips\n", owner); !slices.Equal(got, []string{"KUBE-SRC-A", "inet6:KUBE-DST-B", "kube-router-local-ips"}) {
		t.Errorf("%q", got)
	}
	if got := ownTables("table ip kube-proxy\ntable inet firewalld\ntable ip6 flannel-ipv6\ntable ip nat\n", owner); len(got) != 2 || got[0] != (nftTable{"ip", "kube-proxy"}) {
		t.Errorf("%v", got)
	}
	if len(ownSets("KUBE-SRC-A\n", ruleOwner{}))+len(ownTables("table ip kube-proxy\n", ruleOwner{})) > 0 {
		t.Error("took those of another Kubernetes")
	}
}

func TestMountsOfOursAlone(t *testing.T) {
	all, err := parseMounts(fixture(t, "mountinfo"))
	if err != nil {
		t.Fatal(err)
	}
	points := func(b belongs) []string {
		var out []string
		for _, m := range ownMounts(all, b) {
			out = append(out, m.point)
		}
		return out
	}
	const sandboxes, task, pod = "/run/k3s/containerd/io.containerd.grpc.v1.cri/sandboxes/aa/shm", "/run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/aa/rootfs", "/var/lib/kubelet/pods/p1"
	got := points(belongs{dataDir: DefaultDataDir, alone: true})
	for i, point := range got {
		for _, later := range got[i+1:] {
			if later != point && within(later, point) {
				t.Errorf("%s comes before %s", point, later)
			}
		}
	}
	share := pod + "/volumes/kubernetes.io~nfs/share"
	want := []string{
		DefaultDataDir + "/agent/containerd/tmpmounts/containerd-mount1", sandboxes, task, task + "/data", pod + "/volume-subpaths/v/c/0",
		share, share, pod + "/volumes/kubernetes.io~projected/kube-api-access",
	}
	sorted := slices.Sorted(slices.Values(got))
	slices.Sort(want)
	if !slices.Equal(sorted, want) {
		t.Errorf("%s", differ(want, sorted))
	}
	// Of two mounts at one point the upper one comes off first.
	var kinds []string
	for _, m := range ownMounts(all, belongs{dataDir: DefaultDataDir, alone: true}) {
		if m.point == share {
			kinds = append(kinds, m.kind)
		}
	}
	if !slices.Equal(kinds, []string{"tmpfs", "nfs4"}) {
		t.Errorf("%q", kinds)
	}
	for _, point := range points(belongs{dataDir: DefaultDataDir}) {
		if strings.HasPrefix(point, kubeletDir) {
			t.Errorf("beside another Kubernetes: %s", point)
		}
	}
	if got := mountsBelow(all, DefaultDataDir); len(got) != 3 {
		t.Errorf("%q", got)
	}
}

func process(pid, parent int, exe, cgroup string, argv ...string) Process {
	return Process{PID: pid, PPID: parent, Start: uint64(pid), State: 'S', Exe: exe, Argv: argv, Cgroups: []string{cgroup}}
}

// crowd is a machine with k3s, Docker, another k3s in a container, and people.
func crowd() []Process {
	const data = "/var/lib/rancher/k3s/data/abc/bin/"
	return []Process{
		process(1, 0, "/usr/lib/systemd/systemd", "/init.scope", "/sbin/init"),
		process(10, 1, data+"k3s", "/system.slice/k3s.service", "/usr/local/bin/k3s server"),
		process(11, 10, data+"containerd", "/system.slice/k3s.service", "containerd", "-c", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "-a", "/run/k3s/containerd/containerd.sock"),
		process(20, 1, data+"containerd-shim-runc-v2", "/system.slice/k3s.service", data+"containerd-shim-runc-v2", "-namespace", "k8s.io", "-id", "aa", "-address", "/run/k3s/containerd/containerd.sock"),
		process(21, 20, "/pause", "/kubepods.slice/kubepods-besteffort.slice/x", "/pause"),
		process(22, 20, "/usr/bin/python3", "/kubepods.slice/kubepods-burstable.slice/y", "vllm", "serve"),
		process(23, 22, "/usr/bin/python3", "/kubepods.slice/kubepods-burstable.slice/y", "VLLM::Worker"),
		process(24, 1, "/usr/bin/orphan", "/kubepods.slice/kubepods-burstable.slice/z", "orphan"),
		// A shim of the host's own containerd that serves k3s by its socket.
		process(25, 1, "/usr/bin/containerd-shim-runc-v2", "/", "/usr/bin/containerd-shim-runc-v2", "-namespace", "k8s.io", "-address=/run/k3s/containerd/containerd.sock"),
		// A part of k3s that lost its parent.
		process(26, 1, data+"kubelet", "/", "kubelet", "--config-dir=/var/lib/rancher/k3s/agent/etc/kubelet.conf.d"),
		process(30, 1, "/usr/bin/containerd", "/system.slice/containerd.service", "/usr/bin/containerd"),
		process(31, 1, "/usr/bin/containerd-shim-runc-v2", "/system.slice/docker", "/usr/bin/containerd-shim-runc-v2", "-namespace", "moby", "-id", "bb", "-address", "/run/containerd/containerd.sock"),
		process(32, 31, "/bin/postgres", "/system.slice/docker-bb.scope", "postgres"),
		process(40, 1, "/usr/bin/vim", "/user.slice", "vim", "/var/lib/rancher/k3s/server/token"),
		process(45, 1, data+"k3s", "/user.slice", "kubectl", "get", "pods", "-w"),
		process(41, 1, "/usr/bin/du", "/user.slice", "du", "-sh", "/var/lib/rancher/k3s"),
		process(42, 1, data+"k3s", "/user.slice", "k3s kubectl logs -f x"),
		process(43, 1, "/usr/local/bin/k3s", "/user.slice", "/usr/local/bin/k3s", "kubectl", "get", "pods"),
		process(44, 1, "", "/"),
		process(50, 1, "/usr/bin/sshd", "/system.slice", "sshd"),
		process(100, 50, "/usr/local/bin/llmbox", "/user.slice", "llmbox", "uninstall"),
		{PID: 60, PPID: 20, Start: 60, State: 'Z', Argv: nil},
	}
}

func TestProcessesOfOursAlone(t *testing.T) {
	pids := func(own []Process) []int {
		var out []int
		for _, p := range own {
			out = append(out, p.PID)
		}
		return out
	}
	b := belongs{dataDir: DefaultDataDir, binary: "/usr/local/bin/k3s", alone: true}
	own, inside := ownProcesses(crowd(), b, 100)
	if want := []int{10, 11, 20, 21, 22, 23, 24, 25, 26}; inside || !slices.Equal(pids(own), want) {
		t.Errorf("%v, %v", pids(own), inside)
	}
	b.alone = false
	own, _ = ownProcesses(crowd(), b, 100)
	if want := []int{10, 11, 20, 21, 22, 23, 25, 26}; !slices.Equal(pids(own), want) {
		t.Errorf("beside another Kubernetes: %v", pids(own))
	}
	// From within a pod nothing may be ended.
	if own, inside = ownProcesses(append(crowd(), process(101, 23, "/usr/local/bin/llmbox", "/", "llmbox")), b, 101); !inside || own != nil {
		t.Errorf("inside: %v, %v", pids(own), inside)
	}
	b.dataDir = "/mnt/k3s"
	if own, _ = ownProcesses(crowd(), belongs{dataDir: "/mnt/k3s"}, 100); !slices.Equal(pids(own), []int{11, 20, 21, 22, 23, 25}) {
		// What names /run/k3s is this machine's k3s, whatever its data directory.
		t.Errorf("another data directory: %v", pids(own))
	}
}

func TestProcFiles(t *testing.T) {
	p, err := parseStat("4242 (a) b (c) S 17 1 1 0 -1 4194560 1 1 1 1 1 1 1 1 20 0 10 0 98765 1 1\n")
	if err != nil || p.PID != 4242 || p.PPID != 17 || p.Start != 98765 || p.State != 'S' {
		t.Errorf("%+v, %v", p, err)
	}
	if got := parseArgv([]byte("k3s\x00server\x00\x00\x00")); !slices.Equal(got, []string{"k3s", "server"}) {
		t.Errorf("%q", got)
	}
	if got := parseCgroups("12:pids:/kubepods/x\n0::/a:b\nbroken\n"); !slices.Equal(got, []string{"/kubepods/x", "/a:b"}) {
		t.Errorf("%q", got)
	}
	if got := parseNamespace("net:[4026531840]"); got != 4026531840 {
		t.Errorf("%d", got)
	}
	self, err := readProcess("/proc", os.Getpid())
	if err != nil || self.PID != os.Getpid() || len(self.Argv) == 0 || self.Exe == "" || self.NetNS == 0 {
		t.Errorf("%+v, %v", self, err)
	}
}

func FuzzStat(f *testing.F) {
	f.Add("1 (x) S 0 1 1 0 -1 1 1 1 1 1 1 1 1 1 20 0 10 0 5 1 1")
	f.Add(")(")
	f.Fuzz(func(_ *testing.T, text string) {
		_, _ = parseStat(text)
		_ = parseCgroups(text)
		_ = parseArgv([]byte(text))
		_ = parseNamespace(text)
	})
}

func FuzzRules(f *testing.F) {
	f.Add(fixtureBytes("iptables.save"))
	f.Add([]byte("*nat\n:A - [0:0]\n-A A -j\n[1:2] -A B -j A\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		tables, err := parseRules(data)
		if err != nil {
			return
		}
		for _, r := range (ruleOwner{networks: []string{"cbr0"}, alone: true}).removals(tables) {
			for _, rule := range r.rules {
				if !bytes.Contains(data, []byte(rule.text)) {
					t.Errorf("a rule that is not there: %q", rule.text)
				}
			}
			for _, chain := range r.chains {
				if !strings.HasPrefix(chain, "KUBE-") && !strings.HasPrefix(chain, "CNI-") && !strings.HasPrefix(chain, "FLANNEL-") {
					t.Errorf("somebody else's chain: %q", chain)
				}
			}
		}
	})
}

func fixtureBytes(name string) []byte {
	data, err := os.ReadFile(filepath.Join("testdata", "remove", name))
	if err != nil {
		return nil
	}
	return data
}

// installed is a machine on which k3s has run, as it is when an uninstall begins. It
// returns how the machine was before.
func installedMachine(t *testing.T, prepare func(m *Machine)) (m *Machine, p *programs, k *quietKernel, before []string) {
	t.Helper()
	m, p, k = fakeMachine(t)
	systemd := newSystemd(t, m, p)
	// What a machine has before anybody installs anything.
	put(t, m, "/etc/hostname", "gpu-box\n")
	put(t, m, "/usr/bin/docker", "docker")
	put(t, m, "/usr/local/bin/mine", "mine")
	put(t, m, "/etc/systemd/system/docker.service", "[Service]\n")
	put(t, m, "/etc/systemd/system/multi-user.target.wants/docker.service", "x")
	put(t, m, "/var/log/syslog", "log")
	put(t, m, "/var/lib/docker/volumes/v", "data")
	put(t, m, "/var/log/llmbox/install.log", "log")
	put(t, m, "/opt/nvidia/x", "driver")
	put(t, m, "/sys/class/net/eth0/address", "x")
	put(t, m, "/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
	put(t, m, settingFile("vm.overcommit_memory"), "0\n")
	put(t, m, settingFile("kernel.panic"), "0\n")
	put(t, m, settingFile("kernel.panic_on_oops"), "1\n")
	if err := os.MkdirAll(m.at("/run"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(m.at("/var/lib/llmbox"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(m.at("/usr/local/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if prepare != nil {
		prepare(m)
	}
	far := "10.42.1.0/24 via 10.0.0.7 dev eth0 \n"
	p.answers["ip"] = func(args []string) (string, int) {
		switch {
		case args[0] == "-4":
			return "default via 10.0.0.254 dev eth0 proto dhcp\n10.42.0.0/24 dev cni0 proto kernel\n192.168.0.0/16 via 10.0.0.9 dev eth0\n" + far, 0
		case args[0] == "route":
			far = ""
			return "", 0
		}
		return "", map[bool]int{true: 0, false: 1}[os.RemoveAll(m.at("/sys/class/net/"+args[2])) == nil]
	}
	before = tree(t, m)
	want := wantOf(t, m)
	want.Settings.Box.Network.Proxy.HTTP = "http://proxy:3128"
	want.Settings.Box.Network.CAFile = "/etc/ca.pem"
	if _, err := m.Ensure(t.Context(), want, nil); err != nil {
		t.Fatal(err)
	}
	// What k3s leaves.
	for name, content := range map[string]string{
		DefaultDataDir + "/server/token": "t", DefaultDataDir + "/server/db/state.db": "d", DefaultDataDir + "/storage/pvc-1/model": "weights",
		DefaultDataDir + "/agent/containerd/x/y/z": "layer", DefaultDataDir + "/agent/etc/cni/net.d/10-flannel.conflist": `{"name": "cbr0", "plugins": []}`,
		Kubeconfig: "kind: Config\n", "/etc/rancher/node/password": "p", NodeIPFile: marker + "\nnode-ip: 10.0.0.1\n",
		"/run/k3s/containerd/containerd.sock": "", "/run/flannel/subnet.env": "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_MTU=1450\n", "/var/lib/kubelet/pods/p1/etc-hosts": "h", "/var/lib/kubelet/config": "c",
		"/var/log/pods/p1/0.log": "l", "/var/log/containers/c.log": "l", "/var/lib/cni/networks/cbr0/10.42.0.5": "aa",
		"/var/lib/cni/results/cbr0-aa-eth0": `{"netns": "/var/run/netns/cni-1111"}`, "/run/netns/cni-1111": "", "/run/netns/cni-2222": "",
		"/var/lib/cni/results/cni-loopback-aa-lo": `{"cniArgs": [["IgnoreUnknown", "1"], ["K8S_POD_NAMESPACE", "llm"]]}`, "/run/containerd/s/aa": "", "/run/containerd/s/bb": "",
		"/run/containerd/runc/k8s.io/aa/state.json": `{"config": {"rootfs": "/run/k3s/containerd/aa/rootfs"}}`, "/run/containerd/runc/k8s.io/half/x": "",
		"/sys/class/net/cni0/address": "x", "/sys/class/net/flannel.1/address": "x", "/sys/class/net/veth1/address": "x",
		"/var/log/llmbox/k3s.log": "l", "/var/log/llmbox/k3s.log.2": "l",
		"/etc/systemd/system/" + temporaryOf("k3s.service"): "half", "/usr/local/bin/" + temporaryOf("k3s"): "half",
	} {
		put(t, m, name, content)
	}
	for _, group := range []string{"kubepods.slice/kubepods-burstable.slice/a", "kubepods.slice/b", "pids/kubepods/c", "systemd/system.slice/k3s.service", "systemd/system.slice/ssh.service"} {
		if err := os.MkdirAll(m.at("/sys/fs/cgroup/"+group), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(m.at(pluginDir), 0o755); err != nil {
		t.Fatal(err)
	}
	put(t, m, settingFile("vm.overcommit_memory"), "1\n")
	put(t, m, settingFile("kernel.panic"), "10\n")
	link(t, m, "/sys/class/net/veth1/master", "../cni0")
	link(t, m, "/usr/local/bin/kubectl", "k3s")
	link(t, m, "/usr/local/bin/crictl", "/usr/local/bin/k3s")
	k.processes = crowd()
	k.namespace["/run/netns/cni-1111"], k.namespace["/run/netns/cni-2222"] = 4026532300, 4026532301
	k.table = func(points []string) {
		text := "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
		for i, point := range points {
			kind := "tmpfs"
			if strings.Contains(point, "nfs") {
				kind = "nfs4"
			}
			text += fmt.Sprintf("%d 22 0:%d / %s rw - %s x rw\n", 100+i, 50+i, point, kind)
		}
		put(t, m, "/proc/self/mountinfo", text)
	}
	k.mounted = []string{"/run/k3s/containerd/aa/rootfs", "/run/k3s/containerd/aa/rootfs/data", "/var/lib/kubelet/pods/p1/v/busy", "/var/lib/kubelet/pods/p1/v/nfs"}
	for _, point := range k.mounted {
		if err := os.MkdirAll(m.at(point), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	k.table(k.mounted)
	k.busy["/var/lib/kubelet/pods/p1/v/busy"] = 100
	p.forget()
	_ = systemd
	return m, p, k, before
}

// settledTree leaves out of a tree what a fake kernel and systemd keep.
func settledTree(lines []string) []string {
	return slices.DeleteFunc(slices.Clone(lines), func(l string) bool {
		return strings.Contains(l, " /proc") || strings.HasSuffix(l, " /sys/fs") || strings.Contains(l, " /sys/fs/cgroup")
	})
}

// Containers of others have their sockets and states in the same directories.
func TestSharedStateOfOthersStays(t *testing.T) {
	others := map[string]string{
		"/run/containerd/s/before": "", "/run/containerd/s/later": "", "/run/containerd/runc/k8s.io/theirs/state.json": `{"config": {"rootfs": "/run/containerd/io.containerd.runtime.v2.task/k8s.io/theirs/rootfs"}}`,
		"/run/containerd/runc/moby/x/state.json": `{}`, "/var/lib/cni/results/cni-loopback-theirs-lo": `{"cniArgs": [["IgnoreUnknown", "1"]]}`, "/run/mount/utab": "x",
		"/usr/libexec/kubernetes/kubelet-plugins/volume/exec/theirs~driver/driver": "x", "/usr/libexec/kubernetes/somebodys": "x",
	}
	m, _, _, _ := installedMachine(t, func(m *Machine) { put(t, m, "/run/containerd/s/before", "") })
	for name, content := range others {
		put(t, m, name, content)
	}
	put(t, m, "/proc/net/unix", "Num       RefCount Protocol Flags    Type St Inode Path\n0000000000000000: 00000002 00000000 00010000 0001 01 123 /run/containerd/s/later\n0000000000000000: 00000002 00000000 00010000 0001 01 124\n")
	if _, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil); err != nil {
		t.Fatal(err)
	}
	for name := range others {
		if !m.exists(t.Context(), name) {
			t.Errorf("%s is gone", name)
		}
	}
	for _, name := range []string{"/run/containerd/s/aa", "/run/containerd/s/bb", "/run/containerd/runc/k8s.io/aa", "/run/containerd/runc/k8s.io/half", "/var/lib/cni/results/cni-loopback-aa-lo"} {
		if m.exists(t.Context(), name) {
			t.Errorf("%s is still there", name)
		}
	}
}

func TestNothingIsLeft(t *testing.T) {
	m, p, k, before := installedMachine(t, nil)
	plan, err := m.PlanRemoval(t.Context(), RemoveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range plan {
		if len(a.Finds) == 0 && a.Name != "rules" {
			t.Errorf("%s finds nothing", a.Name)
		}
		if a.Title == "" {
			t.Errorf("%s has no title", a.Name)
		}
	}
	outcomes, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil)
	if err != nil {
		t.Fatalf("%v\n%+v", err, outcomes)
	}
	if d := differ(settledTree(before), settledTree(tree(t, m))); d != "" {
		t.Errorf("not as before:\n%s", d)
	}
	for group, stays := range map[string]bool{"k3s.service": false, "ssh.service": true} {
		if m.exists(t.Context(), "/sys/fs/cgroup/systemd/system.slice/"+group) != stays {
			t.Errorf("the control group of %s is there: %t", group, !stays)
		}
	}
	left := k.processes
	for _, p := range left {
		if p.PID >= 10 && p.PID < 30 {
			t.Errorf("still runs: %+v", p)
		}
	}
	if len(left) != len(crowd())-9 {
		t.Errorf("%d processes left, %v killed", len(left), k.killed)
	}
	if want := []string{
		"/run/k3s/containerd/aa/rootfs/data", "/var/lib/kubelet/pods/p1/v/nfs (lazy)", "/var/lib/kubelet/pods/p1/v/busy (lazy)", "/run/k3s/containerd/aa/rootfs", "/run/netns/cni-1111 (lazy)", "/run/netns/cni-2222 (lazy)",
	}; differ(want, k.unmounted) != "" || k.unmounted[len(k.unmounted)-1] == want[0] {
		t.Errorf("unmounted %q", k.unmounted)
	}
	ran := strings.Join(p.changes(), "\n")
	for _, want := range []string{"systemctl stop k3s.service", "systemctl disable --no-reload k3s.service", "systemctl daemon-reload", "systemctl stop kubepods.slice", "ip link delete veth1\nip link delete cni0\nip link delete flannel.1", "ip route delete 10.42.1.0/24 via 10.0.0.7 dev eth0"} {
		if !strings.Contains(ran, want) {
			t.Errorf("did not %s:\n%s", want, ran)
		}
	}
	// Once more there is nothing to do, and nothing of ours to be found.
	p.forget()
	if outcomes, err = m.Remove(t.Context(), RemoveOptions{}, nil, nil); err != nil || len(outcomes) != 0 || len(p.changes()) > 0 {
		t.Errorf("once more: %+v, %v, %q", outcomes, err, p.changes())
	}
}

// TestCutOffUninstall stops after each action and begins anew.
func TestCutOffUninstall(t *testing.T) {
	m, _, _, _ := installedMachine(t, nil)
	plan, err := m.PlanRemoval(t.Context(), RemoveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for after := range plan {
		m, _, _, before := installedMachine(t, nil)
		stop := make(chan struct{})
		done := 0
		for done <= after {
			d, err := m.remover(t.Context(), RemoveOptions{})
			if err != nil {
				t.Fatal(err)
			}
			actions := d.actions()
			if done >= len(actions) {
				break
			}
			if out := actions[done].run(t.Context(), nil); out.Err != nil {
				t.Fatalf("%s: %v", out.Name, out.Err)
			}
			done++
		}
		if outcomes, err := m.Remove(t.Context(), RemoveOptions{}, stop, nil); err != nil {
			t.Errorf("after %d actions: %v, %+v", done, err, outcomes)
		}
		if d := differ(settledTree(before), settledTree(tree(t, m))); d != "" {
			t.Errorf("after %d actions, not as before:\n%s", done, d)
		}
	}
	closed := make(chan struct{})
	close(closed)
	if outcomes, err := m.Remove(t.Context(), RemoveOptions{}, closed, nil); err == nil || len(outcomes) != 0 {
		t.Errorf("called off: %+v, %v", outcomes, err)
	}
}

// TestHalfInstalled uninstalls after an install that was cut off at each of its steps.
func TestHalfInstalled(t *testing.T) {
	for _, fail := range []string{"show", "daemon-reload", "enable", "start"} {
		m, p, _ := fakeMachine(t)
		systemd := newSystemd(t, m, p)
		if err := os.MkdirAll(m.at("/usr/local/bin"), 0o755); err != nil {
			t.Fatal(err)
		}
		for _, dir := range []string{"/var/lib/llmbox", "/etc/systemd/system/multi-user.target.wants", "/run"} {
			if err := os.MkdirAll(m.at(dir), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		before := tree(t, m)
		systemd.fails[fail] = "killed"
		if _, err := m.Ensure(t.Context(), wantOf(t, m), nil); err == nil {
			t.Fatalf("%s: no failure", fail)
		}
		delete(systemd.fails, fail)
		if outcomes, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil); err != nil {
			t.Errorf("%s: %v, %+v", fail, err, outcomes)
		}
		if d := differ(settledTree(before), settledTree(tree(t, m))); d != "" {
			t.Errorf("%s: not as before:\n%s", fail, d)
		}
	}
}

func TestWhatWasThereStays(t *testing.T) {
	m, _, _, before := installedMachine(t, func(m *Machine) {
		put(t, m, "/etc/rancher/rke2/config.yaml", "x")
		put(t, m, DropInDir+"/10-mine.yaml", "debug: true\n")
		put(t, m, "/var/lib/kubelet/device-plugins/x", "x")
		put(t, m, "/var/lib/cni/results/podman-1-eth0", "{}")
		put(t, m, "/var/log/pods/old/0.log", "x")
		put(t, m, "/run/flannel/of-somebody", "x")
	})
	outcomes, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil)
	if err != nil {
		t.Fatalf("%v\n%+v", err, outcomes)
	}
	after := settledTree(tree(t, m))
	for _, line := range settledTree(before) {
		if !slices.Contains(after, line) {
			t.Errorf("gone: %s", line)
		}
	}
	if d := differ(settledTree(before), after); d != "" {
		t.Errorf("not as before:\n%s", d)
	}
	stays := ""
	for _, o := range outcomes {
		stays += strings.Join(o.Stays, "\n") + "\n"
	}
	if !strings.Contains(stays, DropInDir+"/10-mine.yaml: was there before llmbox") {
		t.Errorf("does not say what stays:\n%s", stays)
	}
}

func TestKeepData(t *testing.T) {
	m, _, _, _ := installedMachine(t, nil)
	if _, err := m.Remove(t.Context(), RemoveOptions{KeepData: true, KeepLogs: true}, nil, nil); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{
		DefaultDataDir + "/storage/pvc-1/model": true, DefaultDataDir + "/server": false, "/var/lib/llmbox/cache/k3s/" + version + "/k3s": true,
		"/var/log/llmbox/k3s.log": true, "/etc/rancher": false, "/var/lib/llmbox/k3s.json": false,
	} {
		if m.exists(t.Context(), name) != want {
			t.Errorf("%s: %v", name, !want)
		}
	}
}

// TestMountedDataIsNotDeleted is a disk that somebody mounted below the data directory,
// and a share that can't be unmounted.
func TestMountedDataIsNotDeleted(t *testing.T) {
	m, _, k, _ := installedMachine(t, nil)
	put(t, m, DefaultDataDir+"/storage/mine", "data on a disk of its own")
	k.mounted = append(k.mounted, DefaultDataDir+"/storage")
	k.table(k.mounted)
	outcomes, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil)
	if err != nil {
		t.Fatalf("%v\n%+v", err, outcomes)
	}
	if got := get(t, m, DefaultDataDir+"/storage/mine"); got == "" || slices.Contains(k.unmounted, DefaultDataDir+"/storage") {
		t.Errorf("%q, %q", got, k.unmounted)
	}
	if m.exists(t.Context(), DefaultDataDir+"/server") {
		t.Error("the rest is still there")
	}
	// A busy mount that not even detaching takes away keeps what is below it.
	m, _, k, _ = installedMachine(t, nil)
	stuck := "/var/lib/kubelet/pods/p1/v/busy"
	put(t, m, stuck+"/precious", "x")
	table := k.table
	k.table = func(points []string) {
		if !slices.Contains(points, stuck) {
			points = append(slices.Clone(points), stuck)
		}
		table(points)
	}
	outcomes, err = m.Remove(t.Context(), RemoveOptions{}, nil, nil)
	if !errors.Is(err, ErrLeft) {
		t.Errorf("%v", err)
	}
	if get(t, m, stuck+"/precious") != "x" || !m.exists(t.Context(), m.recordFile()) {
		t.Errorf("deleted behind a mount, or forgot that there is more to do: %+v", outcomes)
	}
}

func TestBesideAnotherKubernetes(t *testing.T) {
	m, p, k, _ := installedMachine(t, nil)
	p.answers["iptables-nft-save"] = func([]string) (string, int) { return string(fixture(t, "iptables.save")), 0 }
	var input []string
	p.answers["iptables-nft-restore"] = func(args []string) (string, int) {
		data, err := os.ReadFile(args[1])
		if err != nil {
			return err.Error(), 1
		}
		input = append(input, string(data))
		p.answers["iptables-nft-save"] = func([]string) (string, int) { return "", 0 }
		return "", 0
	}
	outcomes, err := m.Remove(t.Context(), RemoveOptions{Others: OtherKubernetes([]finding.Finding{
		{ID: "leftovers.kubernetes", Severity: finding.Fail, Measured: "microk8s (/snap/microk8s) runs here"}, {ID: "leftovers.cni", Severity: finding.Warn, Measured: "x"},
		{ID: "leftovers.kubernetes", Severity: finding.OK, Measured: "none"},
	})}, nil, nil)
	if err != nil {
		t.Fatalf("%v\n%+v", err, outcomes)
	}
	for _, name := range []string{"/var/lib/kubelet/config", "/var/log/pods/p1/0.log", "/sys/class/net/cni0", "/var/lib/cni/networks/cbr0", "/sys/fs/cgroup/kubepods.slice"} {
		if !m.exists(t.Context(), name) {
			t.Errorf("took %s", name)
		}
	}
	if len(input) != 1 || strings.Contains(input[0], "KUBE-") || !strings.Contains(input[0], "CNI-DN-1d36") {
		t.Errorf("%q", input)
	}
	if get(t, m, settingFile("kernel.panic")) != "10\n" {
		t.Error("took a setting that the other one wants, too")
	}
	if slices.Contains(k.killed, 24) || !slices.Contains(k.killed, 22) {
		t.Errorf("killed %v", k.killed)
	}
	if m.exists(t.Context(), DefaultDataDir) || m.exists(t.Context(), "/usr/local/bin/k3s") {
		t.Error("left its own")
	}
}

func TestOthersThingsAreNoneOfOurs(t *testing.T) {
	// A k3s of somebody else, and nothing of llmbox.
	m, p, k := fakeMachine(t)
	newSystemd(t, m, p)
	put(t, m, "/usr/local/bin/k3s", fakeK3s(version))
	put(t, m, ConfigFile, "token: x\n")
	put(t, m, DefaultDataDir+"/server/token", "x")
	put(t, m, "/etc/systemd/system/k3s.service", "[Service]\n")
	k.processes = crowd()
	before := tree(t, m)
	if outcomes, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil); err != nil || len(outcomes) > 0 {
		t.Errorf("%+v, %v", outcomes, err)
	}
	if d := differ(before, tree(t, m)); d != "" || len(k.killed) > 0 || len(p.changes()) > 0 {
		t.Errorf("touched\n%s\n%v\n%q", d, k.killed, p.changes())
	}
	// A binary that was swapped since stays, and so does a unit.
	m, _, _, _ = installedMachine(t, nil)
	put(t, m, "/usr/local/bin/k3s", "another")
	put(t, m, "/etc/systemd/system/k3s.service", "[Service]\nExecStart=/other\n")
	if _, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil); err != nil {
		t.Fatal(err)
	}
	if get(t, m, "/usr/local/bin/k3s") != "another" || !m.exists(t.Context(), "/usr/local/bin/kubectl") || !m.exists(t.Context(), "/etc/systemd/system/k3s.service") {
		t.Error("took what is not ours")
	}
}

func TestFromInsideAPod(t *testing.T) {
	m, _, k, _ := installedMachine(t, nil)
	k.processes = append(k.processes, process(99, 23, "/bin/sh", "/", "sh"))
	for i := range k.processes {
		if k.processes[i].PID == 100 {
			k.processes[i].PPID = 99
		}
	}
	before := tree(t, m)
	outcomes, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil)
	var problem *Problem
	if !errors.As(err, &problem) || len(k.killed) > 0 {
		t.Errorf("%v, killed %v", err, k.killed)
	}
	if d := differ(settledTree(before), settledTree(tree(t, m))); d != "" || len(outcomes) != 2 {
		t.Errorf("went on: %+v\n%s", outcomes, d)
	}
}

func TestLostRecord(t *testing.T) {
	m, _, _, _ := installedMachine(t, nil)
	if err := os.Remove(m.at(m.recordFile())); err != nil {
		t.Fatal(err)
	}
	if outcomes, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil); err != nil {
		t.Errorf("%v, %+v", err, outcomes)
	}
	if m.exists(t.Context(), DefaultDataDir) || m.exists(t.Context(), ConfigDir) || m.exists(t.Context(), "/etc/systemd/system/k3s.service") ||
		m.exists(t.Context(), "/etc/systemd/system/multi-user.target.wants/k3s.service") {
		t.Error("left what says that it is llmbox's")
	}
}

func TestDataDirThatCantBe(t *testing.T) {
	for dir, want := range map[string]bool{
		"/var/lib/rancher/k3s": true, "/mnt/nvme/k3s": true, "/data/k3s": true, "/": false, "": false, "/var": false, "/var/lib": false, "/mnt/../etc": false, "k3s": false, "/home": false, "/var/lib/llmbox": false,
	} {
		if safeDataDir(dir) != want {
			t.Errorf("%q: %v", dir, !want)
		}
	}
}
