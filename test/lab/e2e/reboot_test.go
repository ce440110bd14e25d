package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestBoxOverAReboot installs the whole box on a machine that runs the stand-in for k3s,
// takes the datastore and the API server away, then the machine's power, and lets it boot
// at another address. Each time the box comes back without llmbox: a token through the
// gateway, every key in Vault.
func TestBoxOverAReboot(t *testing.T) {
	onlyWhereAsked(t, true)
	bin := binDir(t)
	for _, name := range append(operators(), "k3s-standin") {
		if _, err := os.Stat(filepath.Join(bin, "lab", name)); err != nil {
			t.Fatalf("%v: run `make lab-node-full lab-machine` first", err)
		}
	}
	h := startMachine(t, bin, "--model", modelName)
	h.must(t, "sh", "-c", `mkdir -p /etc/rancher/k3s /etc/local.d && cp /lab/registries.yaml /etc/rancher/k3s/ && cp /lab/programs/k3s-standin /usr/local/bin/k3s`)
	h.write(t, "/etc/rancher/k3s/config.yaml", 0o600, `disable: [traefik, metrics-server]
kubelet-arg: [image-gc-high-threshold=100, image-gc-low-threshold=99, "eviction-hard=nodefs.available<1%,imagefs.available<1%"]
`)
	h.write(t, "/etc/local.d/k3s.start", 0o755, "#!/bin/sh\necho $$ >/run/k3s.pid\nexec /usr/local/bin/k3s server >>/var/log/k3s.log 2>&1\n")
	h.startServer(t)
	usable(t, h, "10.99.0.1")

	raw, err := os.ReadFile(boxFile(t, h.Hub))
	must(t, err)
	h.write(t, "/root/box.yaml", 0o600, string(raw))
	llmbox := func(within time.Duration, args ...string) string {
		return run(t, within, filepath.Join(bin, "llmbox-lab"), slices.Concat([]string{"exec", "--dir", h.Dir, "--", "/lab/bin/llmbox"}, args,
			[]string{"--kubeconfig", "/etc/rancher/k3s/k3s.yaml", "--config", "/root/box.yaml"})...)
	}
	t.Log(llmbox(installWithin, "install", "--yes"))
	secret, err := h.client(t).CoreV1().Secrets("llm").Get(t.Context(), "gateway-keys", metav1.GetOptions{})
	must(t, err)
	b := &wholeBox{lab: &h.lab, key: string(secret.Data["default"]), ctx: t.Context()}
	must(t, b.serves(t.Context()))
	keys := list(llmbox(time.Minute, "keys", "list", "--output", "json"))

	back := func(t *testing.T, address string) {
		t.Helper()
		began := time.Now()
		usable(t, h, address)
		becomes(t, 8*time.Minute, "a token", func() error { return b.serves(t.Context()) })
		t.Logf("a token %s after the loss", time.Since(began).Round(time.Second))
		becomes(t, 5*time.Minute, "every component", func() error { return statusReady(h) })
		t.Logf("every component ready %s after the loss", time.Since(began).Round(time.Second))
		if now := list(llmbox(time.Minute, "keys", "list", "--output", "json")); now != keys || !strings.Contains(now, `"vault"`) {
			t.Errorf("the keys were %s and are %s", keys, now)
		}
	}
	t.Run("the datastore and the API server die", func(t *testing.T) {
		h.must(t, "sh", "-c", "kill -KILL $(cat /run/k3s.pid); while kill -0 $(cat /run/k3s.pid) 2>/dev/null; do sleep 0.1; done")
		h.startServer(t) // what a service manager does
		back(t, "10.99.0.1")
	})
	t.Run("the machine loses its power and boots at another address", func(t *testing.T) {
		run(t, 3*time.Minute, filepath.Join(bin, "llmbox-lab"), "reboot", "--dir", h.Dir, "--address", "10.99.0.2")
		back(t, "10.99.0.2")
	})
	h.stop(t)
}

// statusReady asks `llmbox status` whether every component is.
func statusReady(h *host) error {
	out, err := h.run("/lab/bin/llmbox", "status", "--output", "json", "--kubeconfig", "/etc/rancher/k3s/k3s.yaml", "--config", "/root/box.yaml")
	var status struct {
		Components []struct {
			Name, Reason string
			Ready        bool
		}
	}
	if i := strings.Index(out, "{"); i < 0 || json.Unmarshal([]byte(out[i:strings.LastIndex(out, "}")+1]), &status) != nil {
		return fmt.Errorf("llmbox status: %w: %s", err, out)
	}
	for _, c := range status.Components {
		if !c.Ready {
			return fmt.Errorf("%s is not ready: %s", c.Name, c.Reason)
		}
	}
	return err
}
