package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestAdopt has a box made on a k3s that somebody else started: only when asked, without
// touching it, and so that it is still there when the box is gone.
func TestAdopt(t *testing.T) {
	onlyWhereAsked(t, false)
	bin := binDir(t)
	for _, name := range []string{"k3s-standin", "envoy-gateway", "proxy-standin"} {
		if _, err := os.Stat(filepath.Join(bin, "lab", name)); err != nil {
			t.Skipf("%v: run `make lab-machine lab-node-gateway` first", err)
		}
	}
	h := startMachine(t, bin, "--model", modelName)
	h.furnish(t)
	h.must(t, "sh", "-c", `mkdir -p /etc/rancher/k3s /etc/local.d && cp /lab/registries.yaml /etc/rancher/k3s/ && cp /lab/programs/k3s-standin /usr/local/bin/k3s`)
	h.write(t, "/etc/rancher/k3s/config.yaml", 0o600, `disable: [traefik, metrics-server]
kubelet-arg: [image-gc-high-threshold=100, image-gc-low-threshold=99, "eviction-hard=nodefs.available<1%,imagefs.available<1%"]
`)
	h.write(t, "/etc/local.d/k3s.start", 0o755, "#!/bin/sh\necho $$ >/run/k3s.pid\nexec /usr/local/bin/k3s server >>/var/log/k3s.log 2>&1\n")
	h.startServer(t)
	client := h.client(t)
	becomes(t, 3*time.Minute, "the owner's k3s", func() error { return nodeReady(t.Context(), client, "10.99.0.1") })
	mine := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "mine", Namespace: "default"}}
	_, err := client.CoreV1().ConfigMaps("default").Create(t.Context(), mine, metav1.CreateOptions{})
	must(t, err)
	// The owner's process and files.
	owners := func() string {
		t.Helper()
		return h.must(t, "sh", "-c", "cat /run/k3s.pid; cut -d' ' -f22 /proc/$(cat /run/k3s.pid)/stat; sha256sum /usr/local/bin/k3s /etc/rancher/k3s/config.yaml /etc/rancher/k3s/registries.yaml")
	}
	before := owners()
	args := func(more ...string) []string {
		return append([]string{
			"install", "--config", "/root/box.yaml", "--without", without(true),
			"--ignore", "host.container,host.disk.pressure,host.disk.space,gpu.present,host.cgroup.v1,net.hosts,net.dns.resolve,host.systemd",
		}, more...)
	}

	t.Run("not without being asked", func(t *testing.T) {
		r := h.llmbox(t, installWithin, args()...)
		r.ends(t, 3)
		if !strings.Contains(r.said, "--adopt") && !strings.Contains(r.said, "--kubeconfig") {
			t.Errorf("it names no way out:\n%s", r.said)
		}
		if out, err := h.run("ls", "/var/lib/llmbox"); err == nil && strings.TrimSpace(out) != "" {
			t.Errorf("it left %s", out)
		}
		if now := owners(); now != before {
			t.Errorf("the owner's k3s was\n%s\nand is\n%s", before, now)
		}
	})
	if !t.Run("a token when asked", func(t *testing.T) {
		r := h.llmbox(t, installWithin, args("--adopt")...)
		r.ends(t, 0)
		t.Logf("%.1f s", r.took.Seconds())
		b := &wholeBox{lab: &h.lab, ctx: t.Context()}
		secret, err := client.CoreV1().Secrets("llm").Get(t.Context(), "gateway-keys", metav1.GetOptions{})
		must(t, err)
		b.key = string(secret.Data["default"])
		must(t, b.serves(t.Context()))
		if now := owners(); now != before {
			t.Errorf("the owner's k3s was\n%s\nand is\n%s", before, now)
		}
	}) {
		return
	}
	t.Run("once more changes nothing", func(t *testing.T) {
		r := h.llmbox(t, installWithin, args()...)
		r.ends(t, 0)
		r.changed(t)
		if now := owners(); now != before {
			t.Errorf("the owner's k3s was\n%s\nand is\n%s", before, now)
		}
	})
	t.Run("uninstall leaves the owner's k3s", func(t *testing.T) {
		h.llmbox(t, uninstallWithin, "uninstall", "--yes").ends(t, 0)
		if now := owners(); now != before {
			t.Errorf("the owner's k3s was\n%s\nand is\n%s", before, now)
		}
		_, err := client.CoreV1().ConfigMaps("default").Get(t.Context(), "mine", metav1.GetOptions{})
		must(t, err)
		for _, ns := range []string{"llm", "llmbox", "envoy-gateway-system"} {
			if _, err := client.CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				t.Errorf("namespace %s: %v", ns, err)
			}
		}
		if out, err := h.run("ls", "-A", "/var/lib/llmbox"); err == nil && strings.TrimSpace(out) != "" {
			t.Errorf("of llmbox there is still %s", out)
		}
	})
	h.stop(t)
}
