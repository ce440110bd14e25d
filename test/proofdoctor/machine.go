package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// What the machine's own programs are called.
const (
	apiServer  = "kube-apiserver"
	proxy      = "kube-proxy"
	kubelet    = "kubelet"
	containerd = "containerd"
	k3sName    = "k3s"
	drop       = "/etc/rancher/k3s/config.yaml.d/99-fault.yaml"
)

// noRuntime takes NVIDIA's container runtime from where k3s looks for it when it starts,
// and runtimeBack brings it back: /usr is the outer machine's, and lies below a layer of
// the machine's own meanwhile.
const (
	noRuntime = `mkdir -p /root/upper /root/work && mount -t overlay overlay -o lowerdir=/usr/bin,upperdir=/root/upper,workdir=/root/work /usr/bin &&
rm /usr/bin/nvidia-container-runtime`
	runtimeBack = "umount -l /usr/bin && rm -rf /root/upper /root/work"
)

// listener takes the API server's port as soon as it is free, as another program would.
const listener = `setsid python3 -c '
import os, socket, time
open("/run/fault.pid", "w").write(str(os.getpid()))
while True:
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        s.bind(("0.0.0.0", 6443)); s.listen(); break
    except OSError:
        time.sleep(0.05)
time.sleep(3600)' </dev/null >/dev/null 2>&1 &
`

func machineFaults() []fault {
	slow := 3 * time.Minute
	return []fault{
		{
			name: "driver-library-broken", want: wants("gpu.nvml.library_not_found", "gpu.nvml.bad_answer", "gpu.nvml.error", "gpu.driver.lib_mismatch", "gpu.nvml.missing_symbol"),
			inject: shell(overLibrary("/root/empty.so", ": > /root/empty.so")), revert: shell(freeLibrary),
		},
		{
			name: "driver-hangs", want: wants("gpu.nvml.timeout"),
			inject: inOrder(compileHang, shell(overLibrary("/root/hang.so", ":"))), revert: shell(freeLibrary),
		},
		{
			name: "service-network-dropped", want: wants("net.service_route", "net.firewall"),
			// Before kube-proxy's rules, which give them other addresses.
			inject: shell("iptables -t raw -I OUTPUT -d 10.43.0.0/16 -j DROP && iptables -t raw -I PREROUTING -d 10.43.0.0/16 -j DROP"),
			revert: shell("iptables -t raw -D OUTPUT -d 10.43.0.0/16 -j DROP; iptables -t raw -D PREROUTING -d 10.43.0.0/16 -j DROP"),
		},
		{
			name: "service-rules-gone", want: wants("net.service_route"), fix: true,
			// Its canary goes too, by which kube-proxy sees that it has to write everything.
			inject: shell(send(proxy, "STOP") + "iptables -t nat -F KUBE-SERVICES; iptables -t nat -X KUBE-PROXY-CANARY"), revert: shell(send(proxy, "CONT")),
		},
		{
			name: "node-address-lost", want: wants("net.node_ip_lost"), fix: true,
			// In this order: with the first address of a network the kernel takes the others away.
			inject: shell("ip address del " + address + "/24 dev uplink && ip address add 10.99.0.77/24 dev uplink && ip route replace default via 10.99.0.254"),
			revert: inOrder(shell("ip address del 10.99.0.77/24 dev uplink; ip address add "+address+"/24 dev uplink && ip route replace default via 10.99.0.254"), restartK3s),
		},
		func() fault {
			f := withFix(frozen("containerd-halted", wants("runtime.containerd"), containerd))
			f.revert = inOrder(f.revert, served)
			return f
		}(),
		func() fault {
			f := frozen("kubelet-halted", wants("node.not_ready"), kubelet)
			f.patience = slow
			return f
		}(),
		{name: "api-server-halted", want: wants("k3s.api"), inject: shell(send(apiServer, "STOP")), revert: inOrder(shell(send(apiServer, "CONT")), served)},
		{name: "api-certificate-expired", want: wants("k3s.certificate_expired"), inject: serving(-48*time.Hour, -24*time.Hour), revert: servedAsBefore, patience: slow},
		{name: "clock-behind", want: wants("host.clock"), inject: serving(24*time.Hour, 240*time.Hour), revert: servedAsBefore, patience: slow},
		{
			name: "disk-full", want: wants("host.disk.full"),
			// Less than the kubelet begins to evict at would be left by one byte more.
			inject: shell(`free=$(df -B1 --output=avail /var/lib/kubelet | tail -1); size=$(df -B1 --output=size /var/lib/kubelet | tail -1)
fallocate -l $((free - size * 15 / 1000)) /var/lib/kubelet/fault`),
			revert: shell("rm -f /var/lib/kubelet/fault"),
		},
		{
			name: "disk-full-to-the-last-byte", want: wants("host.disk.full", "host.disk.pressure"), patience: slow,
			inject: inOrder(shell(`fallocate -l $(df -B1 --output=avail /var/lib/kubelet | tail -1) /var/lib/kubelet/fault || dd if=/dev/zero of=/var/lib/kubelet/fault bs=64k 2>/dev/null; true`), underPressure),
			revert: inOrder(shell("rm -f /var/lib/kubelet/fault"), tidied),
		},
		{
			name: "nvidia-runtime-gone", want: wants("toolkit.installed", "runtime.handler_missing"), patience: slow,
			inject: inOrder(shell(noRuntime), restartK3s, noPods("llm", "app.kubernetes.io/name=model-server")),
			revert: inOrder(shell(runtimeBack), restartK3s),
		},
		{
			name: "nvidia-runtime-after-k3s", want: wants("runtime.handler_missing"), patience: slow, fix: true,
			inject: inOrder(shell(noRuntime), restartK3s, shell(runtimeBack), noPods("llm", "app.kubernetes.io/name=model-server")),
			revert: restartK3s,
		},
		{
			name: "k3s-misconfigured", want: wants("k3s.config"), patience: slow,
			inject: inOrder(shell("mkdir -p "+filepath.Dir(drop)+" && echo 'disable: [not, closed' > "+drop), shell(send(k3sName, "KILL"))),
			revert: inOrder(shell("rm -f "+drop), served),
		},
		{
			name: "k3s-other-token", want: wants("k3s.token_mismatch"), patience: slow,
			inject: inOrder(shell("mkdir -p "+filepath.Dir(drop)+" && echo 'token: somebody-elses' > "+drop), shell(send(k3sName, "KILL"))),
			revert: inOrder(shell("rm -f "+drop), served),
		},
		{
			name: "api-port-taken", want: wants("k3s.port_conflict"), patience: slow,
			inject: shell(listener + send(k3sName, "KILL")), revert: inOrder(shell("kill $(cat /run/fault.pid)"), served),
		},
		{
			name: "k3s-stopped", want: wants("k3s.service"),
			inject: shell(`kill -TERM $(sed -n 's/.*"supervisor":{"pid":\([0-9]*\).*/\1/p' /run/llmbox/k3s-supervisor.json)`),
			revert: inOrder(shell("setsid /var/lib/llmbox/bin/llmbox host supervise </dev/null >/dev/null 2>&1 &"), served),
		},
	}
}

// overLibrary puts a file in the place of the driver's library, for who opens it from now on.
func overLibrary(file, before string) string {
	return before + `
at=$(readlink -f $(ls /usr/lib/*/libnvidia-ml.so.1 /usr/lib/libnvidia-ml.so.1 2>/dev/null | head -1))
[ -f "$at" ] && mount --bind ` + file + ` "$at" && echo "$at" > /run/fault-library`
}

const freeLibrary = `umount "$(cat /run/fault-library)" && rm /run/fault-library`

// compileHang makes a library whose first call never returns.
func compileHang(ctx context.Context, b *box) error {
	source := filepath.Join(filepath.Dir(b.lab.Dir), "hang.c")
	const text = "#include <unistd.h>\nint nvmlInit_v2(void) { for (;;) pause(); }\nint nvmlInitWithFlags(unsigned f) { (void)f; for (;;) pause(); }\nint nvmlInit(void) { return nvmlInit_v2(); }\n"
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		return fmt.Errorf("writing a library: %w", err)
	}
	out, err := exec.CommandContext(ctx, "gcc", "-shared", "-fPIC", "-o", b.path("root/hang.so"), source).CombinedOutput() // #nosec G204 -- paths of this program's own
	if err != nil {
		return fmt.Errorf("compiling a library: %w: %s", err, out)
	}
	return nil
}

// restartK3s ends k3s; its supervisor starts it again.
func restartK3s(ctx context.Context, b *box) error {
	if _, err := b.sh(ctx, send(k3sName, "KILL")); err != nil {
		return err
	}
	if err := sleep(ctx, 3*time.Second); err != nil {
		return err
	}
	return served(ctx, b)
}

// underPressure waits until the kubelet has noticed.
func underPressure(ctx context.Context, b *box) error {
	return b.until(ctx, execLimit, func() error { return b.pressure(ctx, "True") })
}

// tidied waits until the kubelet lets pods in again, and has doctor take away those that
// it had evicted.
func tidied(ctx context.Context, b *box) error {
	if err := b.until(ctx, execLimit, func() error { return b.pressure(ctx, "False") }); err != nil {
		return err
	}
	return b.fix(ctx, wants("pod.stale"))
}

// pressure says nothing where the node's condition DiskPressure has this status.
func (b *box) pressure(ctx context.Context, want string) error {
	list, err := b.at(nodes, "").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, n := range list.Items {
		conditions, _, err := unstructured.NestedSlice(n.Object, "status", "conditions")
		if err != nil {
			return err
		}
		for _, c := range items(conditions) {
			if c["type"] == "DiskPressure" && c["status"] == want {
				return nil
			}
		}
	}
	return fmt.Errorf("DiskPressure is not %s", want)
}

// until asks until it is so, or the time is up.
func (b *box) until(ctx context.Context, within time.Duration, so func() error) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for {
		err := so()
		if err == nil {
			return nil
		}
		if sleep(ctx, time.Second) != nil {
			return fmt.Errorf("not after %s: %w", within, err)
		}
	}
}
