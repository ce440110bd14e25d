package e2e

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/test/internal/trace"
)

const (
	k3sUnit  = "k3s.service"
	bootUnit = "llmbox-boot.service"
)

// TestSystemd has a real systemd run what llmbox installs: start, failure, reboot, a
// second and a changed install, uninstall, and uninstall after an install that was killed.
// What runs is the box without any component: k3s' stand-in with CoreDNS and the
// provisioner of volumes, whose pods are real.
func TestSystemd(t *testing.T) {
	onlyWhereAsked(t, true)
	needsContainer(t)
	bin := binDir(t)
	needs(t, bin, []string{"k3s-standin", "local-path-provisioner"})
	m := newBooted(t, bin)
	m.serveImages(t)
	m.boot(t, 2)
	m.furnish(t)
	empty, units := m.look(t), m.must(t, "systemctl", "list-unit-files", "--no-legend", "--no-pager")

	if !t.Run("install", func(t *testing.T) {
		took := m.llmbox(t, 0, m.installArgs()...)
		t.Logf("install took %s", took.Round(100*time.Millisecond))
		m.active(t)
		// The unit is new to systemd; without this the counts of none below would say nothing.
		if n := m.reloads(t); n != 1 {
			t.Errorf("systemd was reloaded %d times, want once", n)
		}
	}) {
		return
	}
	t.Run("the units are well formed", func(t *testing.T) {
		for _, unit := range []string{k3sUnit, bootUnit} {
			// What verify finds in units that Debian brings is Debian's.
			if said := m.must(t, "systemd-analyze", "verify", "--man=no", "--recursive-errors=no", "/etc/systemd/system/"+unit); said != "" {
				t.Errorf("systemd-analyze verify: %s", said)
			}
			lines := strings.Split(strings.TrimSpace(m.must(t, "systemd-analyze", "security", "--no-pager", unit)), "\n")
			t.Log(strings.TrimSpace(lines[len(lines)-1]))
		}
	})
	t.Run("a server that is killed is started again", func(t *testing.T) {
		old, restarts := m.property(t, k3sUnit, "MainPID"), m.restarts(t)
		m.must(t, "kill", "-KILL", old)
		began := time.Now()
		m.until(t, 2*time.Minute, "another process", func() bool {
			pid := m.property(t, k3sUnit, "MainPID")
			return pid != "0" && pid != old && m.property(t, k3sUnit, "ActiveState") == "active"
		})
		t.Logf("active again after %s", time.Since(began).Round(100*time.Millisecond))
		if now := m.restarts(t); now != restarts+1 {
			t.Errorf("systemd counts %d restarts, want %d", now, restarts+1)
		}
		m.active(t)
	})
	t.Run("a second install touches nothing", func(t *testing.T) {
		// What systemd did by itself is noted by the first one.
		m.llmbox(t, 0, m.installArgs()...)
		invocation, reloads := m.property(t, k3sUnit, "InvocationID"), m.reloads(t)
		took := m.llmbox(t, 0, m.installArgs()...)
		t.Logf("took %s", took.Round(100*time.Millisecond))
		if now := m.property(t, k3sUnit, "InvocationID"); now != invocation {
			t.Errorf("k3s was restarted")
		}
		if now := m.reloads(t); now != reloads {
			t.Errorf("systemd was reloaded %d times", now-reloads)
		}
	})
	t.Run("a changed setting restarts once", func(t *testing.T) {
		invocation, starts, reloads := m.property(t, k3sUnit, "InvocationID"), m.starts(t), m.reloads(t)
		m.llmbox(t, 0, m.installArgs("--set", "k3s.tlsNames=box.example.com")...)
		if now := m.property(t, k3sUnit, "InvocationID"); now == invocation {
			t.Error("k3s was not restarted")
		}
		if n := m.starts(t) - starts; n != 1 {
			t.Errorf("k3s was started %d times", n)
		}
		if n := m.reloads(t) - reloads; n != 0 {
			t.Errorf("systemd was reloaded %d times though the unit is the same", n)
		}
		m.active(t)
	})
	t.Run("a reboot at another address", func(t *testing.T) {
		boot := m.must(t, "cat", "/proc/sys/kernel/random/boot_id")
		m.reboot(t, 3)
		if now := m.must(t, "cat", "/proc/sys/kernel/random/boot_id"); now == boot {
			t.Error("two boots have one name")
		}
		began := time.Now()
		m.until(t, 5*time.Minute, "k3s to come back", func() bool { return m.property(t, k3sUnit, "ActiveState") == "active" })
		t.Logf("k3s is active %s after systemd", time.Since(began).Round(100*time.Millisecond))
		if hook := m.property(t, k3sUnit, "ExecStartPre"); !strings.Contains(hook, "host node-ip") {
			t.Errorf("no hook: %s", hook)
		}
		if drop := m.must(t, "sh", "-c", "cat /etc/rancher/k3s/config.yaml.d/*node-ip*"); !strings.Contains(drop, m.address) {
			t.Errorf("the hook wrote %s", drop)
		}
		m.until(t, 10*time.Minute, bootUnit+" to end", func() bool { return m.property(t, bootUnit, "ActiveState") != "activating" })
		if result := m.property(t, bootUnit, "Result"); result != "success" {
			t.Errorf("%s ended with %s:\n%s", bootUnit, result, m.must(t, "journalctl", "-u", bootUnit, "--no-pager", "-o", "cat"))
		}
		t.Log(m.must(t, "cat", "/var/lib/llmbox/boot.json"))
		m.active(t)
	})
	t.Run("a start that fails is explained", func(t *testing.T) {
		m.must(t, "systemctl", "stop", k3sUnit)
		m.must(t, "systemd-run", "--unit=taken", "--property=Type=exec", "systemd-socket-activate", "--listen=6443", "--accept", "/bin/cat")
		m.until(t, time.Minute, "the port to be taken", func() bool {
			return strings.Contains(m.must(t, "ss", "-Hltn", "sport = :6443"), ":6443")
		})
		out, code, took := m.attempt(m.installArgs("--ignore", "net.port_conflict,k3s.port_conflict")...)
		m.must(t, "systemctl", "stop", "taken.service")
		if code == 0 || !strings.Contains(out, "address already in use") {
			t.Errorf("ended with %d and\n%s", code, out)
		}
		if said := lastError(out); !strings.Contains(said, "address already in use") {
			t.Errorf("the run's error is %q", said)
		}
		t.Logf("said after %s: %s", took.Round(100*time.Millisecond), lastError(out))
		m.llmbox(t, 0, m.installArgs()...)
		m.active(t)
	})
	clean := func(t *testing.T) {
		t.Helper()
		out, code, took := m.attempt("uninstall", "--yes")
		t.Logf("uninstall took %s", took.Round(100*time.Millisecond))
		defer func() {
			if t.Failed() {
				t.Logf("it ended with %d and said\n%s", code, out)
			}
		}()
		if code != 0 {
			t.Error("it did not come to its end")
		}
		if now := m.must(t, "systemctl", "list-unit-files", "--no-legend", "--no-pager"); now != units {
			t.Errorf("unit files before:\n%s\nand now:\n%s", units, now)
		}
		if failed := m.must(t, "systemctl", "list-units", "--failed", "--all", "--no-legend", "--no-pager"); failed != "" {
			t.Errorf("failed: %s", failed)
		}
		if loaded := m.must(t, "systemctl", "list-units", "--all", "--no-legend", "--no-pager", "k3s*", "llmbox*"); loaded != "" {
			t.Errorf("still loaded: %s", loaded)
		}
		if diff := bySystemd(trace.Diff(empty, m.look(t))); len(diff) > 0 {
			t.Errorf("%d traces:\n%s", len(diff), strings.Join(diff[:min(len(diff), 60)], "\n"))
		}
	}
	t.Run("uninstall leaves nothing", clean)
	for _, phase := range []string{"component/k3s/service", "component/k3s/ready"} {
		t.Run("an install that is killed in "+phase+" leaves nothing either", func(t *testing.T) {
			m.furnish(t)
			m.killIn(t, phase)
			clean(t)
		})
	}
}

// furnish puts there what an install is called with.
func (m *booted) furnish(t *testing.T) {
	t.Helper()
	box := map[string]any{
		"apiVersion": "llmbox.dev/v1alpha1", "kind": "Box",
		"gpu": map[string]any{"product": "a100-80", "count": 1},
		"k3s": map[string]any{"extraArgs": []string{"--kubelet-arg=eviction-hard=nodefs.available<1%,imagefs.available<1%"}},
	}
	mirrors := map[string]any{}
	for _, host := range []string{"docker.io", "registry.k8s.io", "ghcr.io"} {
		mirrors[host] = map[string]any{"endpoints": []string{"http://" + bootedImages + "/v2/" + host}}
	}
	box["registries"] = map[string]any{"mirrors": mirrors}
	raw, err := json.Marshal(box)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(m.root, "root/box.yaml"), raw, 0o600))
}

func (m *booted) installArgs(more ...string) []string {
	return append([]string{"install", "--config", "/root/box.yaml", "--k3s-binary", "/lab/programs/k3s-standin", "--init", "systemd",
		"--without", "gpu-operator,envoy-gateway,weights,model,route,prometheus,keda,autoscale,kyverno,policies,vault,external-secrets",
		// What a machine made of namespaces is not.
		"--ignore", "host.container,host.disk.pressure,host.disk.space,gpu.present,host.cgroup.v1,net.hosts,net.dns.resolve"}, more...)
}

func (m *booted) attempt(args ...string) (out string, code int, took time.Duration) {
	began := time.Now()
	out, err := m.run(append([]string{"/lab/llmbox"}, append(args, "--output", "json")...)...)
	took = time.Since(began)
	if err != nil {
		code = -1
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			code = exit.ExitCode()
		}
	}
	return out, code, took
}

// llmbox runs it and wants this exit code.
func (m *booted) llmbox(t *testing.T, want int, args ...string) time.Duration {
	t.Helper()
	out, code, took := m.attempt(args...)
	if code != want {
		t.Fatalf("llmbox %s ended with %d after %s:\n%s\n%s", args[0], code, took, out[max(0, len(out)-6000):],
			m.must(t, "sh", "-c", "journalctl -u k3s --no-pager -o cat -n 60 || true"))
	}
	return took
}

// killIn starts an install and kills it where a step begins.
func (m *booted) killIn(t *testing.T, step string) {
	t.Helper()
	line := m.inside(append([]string{"/lab/llmbox"}, m.installArgs("--output", "json")...)...)
	cmd := exec.CommandContext(t.Context(), line[0], line[1:]...) // #nosec G204 -- the test's own
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	began := json.NewDecoder(out)
	for {
		var e event.Event
		if err := began.Decode(&e); err != nil {
			t.Fatalf("the install ended before %s: %v, %v", step, err, cmd.Wait())
		}
		if e.Type == event.StepStarted && e.Step == step {
			break
		}
	}
	// nsenter and env have become llmbox, or wait for it as their child.
	for _, pid := range strings.Fields(m.must(t, "pgrep", "-f", "^/lab/llmbox install")) {
		// The one that waits ends with the one it waits for; whether it was in time is
		// seen below.
		_, _ = m.run("kill", "-KILL", pid)
	}
	if err := cmd.Wait(); err == nil {
		t.Fatal("it was quicker than the kill")
	}
}

// active wants k3s to run, to start at boot, and its API to answer.
func (m *booted) active(t *testing.T) {
	t.Helper()
	for name, want := range map[string]string{"ActiveState": "active", "UnitFileState": "enabled", "NeedDaemonReload": "no"} {
		if got := m.property(t, k3sUnit, name); got != want {
			t.Errorf("%s of %s is %q, want %q", name, k3sUnit, got, want)
		}
	}
	if got := m.property(t, bootUnit, "UnitFileState"); got != "enabled" {
		t.Errorf("%s is %q", bootUnit, got)
	}
}

func (m *booted) until(t *testing.T, within time.Duration, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !so(); time.Sleep(200 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for %s\n%s", within, what, m.must(t, "sh", "-c", "systemctl status --no-pager k3s llmbox-boot; journalctl -u k3s --no-pager -o cat -n 40 || true"))
		}
	}
}

func (m *booted) restarts(t *testing.T) int {
	t.Helper()
	n, err := strconv.Atoi(m.property(t, k3sUnit, "NRestarts"))
	must(t, err)
	return n
}

// said counts lines of systemd's own in the journal of this boot.
func (m *booted) said(t *testing.T, pattern string) int {
	t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(m.must(t, "sh", "-c", "journalctl --boot --no-pager -o cat _PID=1 | grep -cE '"+pattern+"' || true")))
	must(t, err)
	return n
}

func (m *booted) reloads(t *testing.T) int {
	t.Helper()
	return m.said(t, "^Reloading( requested.*)?\\.")
}
func (m *booted) starts(t *testing.T) int { t.Helper(); return m.said(t, "^Starting k3s") }

// lastError is what a run that failed ended with.
func lastError(out string) string {
	last := ""
	for line := range strings.Lines(out) {
		var e event.Event
		if json.Unmarshal([]byte(line), &e) == nil && e.Error != "" {
			last = e.Error
		}
	}
	return last
}

// bySystemd leaves out what systemd itself keeps writing, and what another boot changes.
func bySystemd(diff []string) []string {
	return slices.DeleteFunc(diff, func(line string) bool {
		for _, place := range []string{
			"/run/log/journal", "/var/log/journal", "/run/systemd", "/var/lib/systemd", "/root/box.yaml", "/run/dbus", "/run/udev",
			"/tmp/systemd-private-", "/var/log/wtmp", "/run/utmp", "/run/agetty.reload",
			// Settings of the kernel that pods need stay: whoever came later may need them too.
			"/proc/sys/net/ipv4/ip_forward:", "/proc/sys/net/ipv4/conf/all/", "/proc/sys/net/ipv4/conf/default/", "/proc/sys/net/ipv4/conf/lo/",
			// The container was booted anew meanwhile, at other addresses.
			"host0", "/proc/kmsg ", "/proc/sys/kernel/random/boot_id ",
		} {
			if strings.Contains(line, place) {
				return true
			}
		}
		return false
	})
}
