package k3s

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/host"
)

func serviceSpec() ServiceSpec {
	return ServiceSpec{
		Role: Server, Binary: "/usr/local/bin/k3s", Hook: []string{"/usr/local/bin/llmbox", "internal", "k3s-node-ip", "100%"},
		Mounts: []string{"/var/lib/rancher/k3s", "/var/lib/llmbox"}, Log: "/var/log/llmbox/k3s.log",
	}
}

func TestUnitsAreAsTheyWere(t *testing.T) {
	golden(t, "service/k3s.service", []byte(SystemdUnit(serviceSpec())))
	golden(t, "service/k3s.openrc", []byte(OpenRCScript(serviceSpec())))
	agent := serviceSpec()
	agent.Role, agent.Hook = Agent, nil
	golden(t, "service/k3s-agent.service", []byte(SystemdUnit(agent)))
}

// TestSystemdReadsTheUnit has systemd itself read it.
func TestSystemdReadsTheUnit(t *testing.T) {
	verify, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("no systemd-analyze here")
	}
	dir := t.TempDir()
	spec := serviceSpec()
	// It looks whether the programs are there.
	spec.Binary, spec.Hook[0] = "/bin/true", "/bin/true"
	unit := strings.ReplaceAll(SystemdUnit(spec), "/sbin/modprobe", "/bin/true")
	at := filepath.Join(dir, "k3s.service")
	if err := os.WriteFile(at, []byte(unit), 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, verify, "verify", "--man=no", "--recursive-errors=no", at).CombinedOutput()
	if err != nil || strings.Contains(string(out), "k3s.service") {
		t.Errorf("%v\n%s", err, out)
	}
	broken := strings.Replace(unit, "KillMode=process", "KillModes=process", 1)
	if err := os.WriteFile(at, []byte(broken), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, _ := exec.CommandContext(ctx, verify, "verify", "--man=no", "--recursive-errors=no", at).CombinedOutput(); !strings.Contains(string(out), "KillModes") {
		t.Errorf("a wrong key went unnoticed: %s", out)
	}
}

// TestNothingInTheUnitReachesPods holds the unit free of what every container would
// inherit, of a mount namespace of its own and of a device policy.
func TestNothingInTheUnitReachesPods(t *testing.T) {
	for line := range strings.Lines(SystemdUnit(serviceSpec())) {
		for _, start := range []string{
			"NoNewPrivileges", "SystemCall", "Restrict", "Lock", "MemoryDeny", "Protect", "Private", "ReadOnly", "Inaccessible", "TemporaryFileSystem",
			"Device", "CapabilityBounding", "UMask", "RootDirectory", "BindPaths", "Slice", "KeyringMode",
		} {
			if strings.HasPrefix(line, start) {
				t.Errorf("%s", line)
			}
		}
	}
}

func TestShellReadsTheScript(t *testing.T) {
	at := filepath.Join(t.TempDir(), "k3s")
	spec := serviceSpec()
	spec.Hook = append(spec.Hook, "it's here")
	if err := os.WriteFile(at, []byte(OpenRCScript(spec)), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "sh", "-n", at).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestEnvironment(t *testing.T) {
	s := Settings{Box: testBox(), Facts: testFacts()}
	if out, err := Environment(s); out != nil || err != nil {
		t.Errorf("without a proxy: %q, %v", out, err)
	}
	s.ProxyEnvironment = []string{"https_proxy=http://user:p%27w@proxy.corp:3128", "NO_PROXY=.corp, 10.9.0.0/16", "LANG=C"}
	s.Box.Network.Proxy.HTTP, s.Box.Network.Proxy.NoProxy = "http://proxy.corp:3128", []string{"registry.corp", ".corp"}
	s.Facts.Addresses = []Address{address("eth0", "10.0.0.5/24", true), address("docker0", "172.17.0.1/16", false), address("eth0", "fe80::1/64", true)}
	out, err := Environment(s)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "service/k3s.env", out)
	// A shell reads what systemd reads, and what the supervisor reads.
	at := filepath.Join(t.TempDir(), "env")
	if err := os.WriteFile(at, out, 0o600); err != nil {
		t.Fatal(err)
	}
	said, err := exec.CommandContext(t.Context(), "env", "-i", "sh", "-c", "set -o allexport; . "+at+"; set +o allexport; env | grep -i _proxy | sort").Output()
	read := parseEnvironment(out)
	slices.Sort(read)
	if err != nil || strings.TrimSpace(string(said)) != strings.Join(read, "\n") {
		t.Errorf("the shell reads\n%s\nand the supervisor\n%s\n%v", said, strings.Join(read, "\n"), err)
	}
	for _, bad := range []string{"http://u:p'w@x:1", "http://u:p\nX=1@x:1", "proxy:3128", `http://u:\@x`} {
		s.Box.Network.Proxy.HTTP = bad
		if _, err := Environment(s); !errors.Is(err, ErrSetting) {
			t.Errorf("%q: %v", bad, err)
		} else if strings.Contains(err.Error(), "p'w") {
			t.Errorf("shows the password: %v", err)
		}
	}
}

func TestChoosingTheInit(t *testing.T) {
	for name, test := range map[string]struct {
		dirs  []string
		asked string
		had   Init
		want  Init
	}{
		"systemd":           {[]string{"/run/systemd/system/x"}, "auto", "", Systemd},
		"OpenRC":            {[]string{"/run/openrc/x"}, "", "", OpenRC},
		"neither":           {nil, "auto", "", Supervised},
		"asked":             {[]string{"/run/systemd/system/x"}, "supervised", "", Supervised},
		"as it was":         {[]string{"/run/systemd/system/x"}, "auto", Supervised, Supervised},
		"asked, not as was": {nil, "systemd", Supervised, Systemd},
	} {
		m, _, _ := fakeMachine(t)
		for _, d := range test.dirs {
			put(t, m, d, "")
		}
		if test.had != "" {
			r, _ := m.Record(t.Context())
			r.Init, r.DataDir = test.had, DefaultDataDir
			if err := m.save(t.Context(), r); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := m.ChooseInit(t.Context(), test.asked); got != test.want || err != nil {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
	m, _, _ := fakeMachine(t)
	if _, err := m.ChooseInit(t.Context(), "runit"); !errors.Is(err, ErrSetting) {
		t.Errorf("runit: %v", err)
	}
}

// fakeSystemd is a systemd with one unit.
type fakeSystemd struct {
	t       *testing.T
	m       *Machine
	unit    string
	pid     int
	ticks   uint64
	reloads int
	needs   bool
	fails   map[string]string
	journal string
}

func newSystemd(t *testing.T, m *Machine, p *programs) *fakeSystemd {
	t.Helper()
	s := &fakeSystemd{t: t, m: m, unit: "k3s.service", ticks: 1000, fails: map[string]string{}}
	put(t, m, "/run/systemd/system/.keep", "")
	p.answers["systemctl"] = s.systemctl
	p.answers["journalctl"] = func([]string) (string, int) { return s.journal, 0 }
	return s
}

func (s *fakeSystemd) systemctl(args []string) (string, int) {
	if text, fails := s.fails[args[0]]; fails {
		return text, 1
	}
	wants := "/etc/systemd/system/multi-user.target.wants/" + s.unit
	switch args[0] {
	case "show":
		load := "loaded"
		if _, err := os.Stat(s.m.at("/etc/systemd/system/" + s.unit)); err != nil {
			load = "not-found"
		}
		active, sub := "inactive", "dead"
		if s.pid > 0 {
			active, sub = "active", "running"
		}
		needs := map[bool]string{true: "yes", false: "no"}[s.needs]
		return "LoadState=" + load + "\nActiveState=" + active + "\nSubState=" + sub + "\nMainPID=" + itoa(s.pid) + "\nNRestarts=0\nResult=success\nNeedDaemonReload=" + needs + "\n", 0
	case "daemon-reload":
		s.reloads++
		s.needs = false
	case "enable":
		link(s.t, s.m, wants, "../"+s.unit)
	case "disable":
		_ = os.Remove(s.m.at(wants))
	case "start", "restart":
		if s.pid > 0 && args[0] == "start" {
			return "", 0
		}
		s.begin()
	case "stop":
		s.end()
	}
	return "", 0
}

// begin is the start of another process.
func (s *fakeSystemd) begin() {
	s.end()
	s.ticks += 500
	s.pid = 4000 + int(s.ticks)
	put(s.t, s.m, "/proc/"+itoa(s.pid)+"/stat", statLine(s.pid, 1, s.ticks))
}

func (s *fakeSystemd) end() {
	if s.pid > 0 {
		_ = os.RemoveAll(s.m.at("/proc/" + itoa(s.pid)))
	}
	s.pid = 0
}

func statLine(pid, parent int, start uint64) string {
	return itoa(pid) + " (k3s server) S " + itoa(parent) + " 0 0 0 -1 4194560 1 1 1 1 1 1 1 1 20 0 10 0 " + itoa(int(start)) + " 1 1\n"
}

func TestUnitForeignToUsStays(t *testing.T) {
	m, p, _ := fakeMachine(t)
	newSystemd(t, m, p)
	put(t, m, "/etc/systemd/system/k3s.service", "[Service]\nExecStart=/usr/local/bin/k3s server --docker\n")
	_, err := m.Ensure(t.Context(), wantOf(t, m), nil)
	if !errors.Is(err, ErrForeign) {
		t.Errorf("%v", err)
	}
	if !strings.Contains(get(t, m, "/etc/systemd/system/k3s.service"), "--docker") || len(p.changes()) > 0 {
		t.Errorf("touched it: %q", p.changes())
	}
}

func TestServiceWithoutSystemctl(t *testing.T) {
	m, _, _ := fakeMachine(t)
	svc, err := m.Service(Systemd, serviceSpec(), ServiceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := svc.Start(t.Context()); !errors.Is(err, host.ErrNotInstalled) {
		t.Errorf("%v", err)
	}
	// Removing goes on without it.
	if err := svc.Stop(t.Context()); err != nil {
		t.Errorf("stop: %v", err)
	}
	if err := svc.Remove(t.Context()); err != nil {
		t.Errorf("remove: %v", err)
	}
}

func TestOpenRC(t *testing.T) {
	m, p, k := fakeMachine(t)
	spec := serviceSpec()
	svc, err := m.Service(OpenRC, spec, ServiceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"rc-update", "rc-service"} {
		p.answers[name] = func([]string) (string, int) { return "", 0 }
	}
	for _, f := range svc.Files() {
		put(t, m, f.Path, string(f.Content))
	}
	if did, err := svc.Enable(t.Context()); err != nil || !did {
		t.Errorf("%v, %v", did, err)
	}
	link(t, m, "/etc/runlevels/default/k3s", "/etc/init.d/k3s")
	if did, err := svc.Enable(t.Context()); err != nil || did {
		t.Errorf("second: %v, %v", did, err)
	}
	state, err := svc.State(t.Context())
	if err != nil || state.Running {
		t.Errorf("%+v, %v", state, err)
	}
	put(t, m, "/run/k3s.pid", "321\n")
	k.processes = []Process{{PID: 321, PPID: 1, Start: 5}, {PID: 322, PPID: 321, Start: 6, State: 'S'}}
	if state, err = svc.State(t.Context()); err != nil || state.PID != 322 || !state.Running || state.Exits != -1 {
		t.Errorf("%+v, %v", state, err)
	}
	if err := errors.Join(svc.Start(t.Context()), svc.Restart(t.Context()), svc.Stop(t.Context()), svc.Remove(t.Context())); err != nil {
		t.Error(err)
	}
	if want := []string{"rc-update add k3s default", "rc-service k3s start", "rc-service k3s restart", "rc-service --ifstarted k3s stop", "rc-update del k3s"}; !slices.Equal(p.ran, want) {
		t.Errorf("ran %q", p.ran)
	}
}
