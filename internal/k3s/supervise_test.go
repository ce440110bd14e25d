package k3s

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The variables by which this test program becomes a supervisor.
const (
	asSupervisor = "K3S_TEST_SUPERVISOR"
	asRemover    = "K3S_TEST_REMOVER"
)

func TestMain(m *testing.M) {
	if root := os.Getenv(asSupervisor); root != "" {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		err := Supervise(ctx, NewMachine(Options{Root: root}), SuperviseOptions{Spec: supervisedSpec(root), Backoff: 50 * time.Millisecond})
		if err != nil {
			_, _ = os.Stderr.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func supervisedSpec(string) ServiceSpec {
	return ServiceSpec{Role: Server, Binary: "/usr/local/bin/k3s", Log: "/var/log/llmbox/k3s.log"}
}

// supervisedMachine is a directory with a program that stands in for k3s: it says that
// it starts, and does what the file "behaviour" says.
func supervisedMachine(t *testing.T, behaviour string) (*Machine, Service) {
	t.Helper()
	root := t.TempDir()
	m := NewMachine(Options{Root: root})
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Skip("no /proc here")
	}
	put(t, m, "/proc/sys/kernel/random/boot_id", string(boot))
	put(t, m, "/usr/local/bin/k3s", "#!/bin/sh\necho 'time=\"2026-11-30T12:00:00Z\" level=info msg=\"Starting k3s "+version+" (0123abcd)\"'\n. "+m.at("/behaviour")+"\n")
	if err := os.Chmod(m.at("/usr/local/bin/k3s"), 0o755); err != nil {
		t.Fatal(err)
	}
	put(t, m, "/behaviour", behaviour)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	svc, err := m.Service(Supervised, supervisedSpec(root), ServiceOptions{Supervisor: []string{"/usr/bin/env", asSupervisor + "=" + root, self}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := svc.Stop(ctx); err != nil {
			t.Errorf("stopping: %v", err)
		}
	})
	return m, svc
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !is() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func stateOf(t *testing.T, svc Service) ProcessState {
	t.Helper()
	s, err := svc.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const untilTerm = "trap 'exit 0' TERM; while :; do sleep 0.05; done"

func TestSupervisorRestartsK3s(t *testing.T) {
	m, svc := supervisedMachine(t, untilTerm)
	if err := svc.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "k3s runs", func() bool { return stateOf(t, svc).Running })
	first := stateOf(t, svc)
	// A second start changes nothing.
	if err := svc.Start(t.Context()); err != nil || stateOf(t, svc).PID != first.PID {
		t.Errorf("%v, %+v", err, stateOf(t, svc))
	}
	if err := syscall.Kill(first.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "k3s runs again", func() bool { s := stateOf(t, svc); return s.Running && s.PID != first.PID })
	if s := stateOf(t, svc); s.Exits != 1 || !strings.Contains(s.Detail, "killed") {
		t.Errorf("%+v", s)
	}
	if err := svc.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "k3s runs after a restart", func() bool { return stateOf(t, svc).Running })
	if err := svc.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := stateOf(t, svc); s.Running {
		t.Errorf("still runs: %+v", s)
	}
	lines, err := svc.Lines(t.Context(), time.Time{})
	if err != nil || JudgeLog(lines).Ended < 1 {
		t.Errorf("%v, %+v\n%s", err, JudgeLog(lines), get(t, m, "/var/log/llmbox/k3s.log"))
	}
	// Stopping what is stopped is no error.
	if err := svc.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestCrashLoopIsSeenSoon: three ends for the same reason are enough, long before the
// deadline.
func TestCrashLoopIsSeenSoon(t *testing.T) {
	m, svc := supervisedMachine(t, `echo 'time="2026-11-30T12:00:01Z" level=fatal msg="starting kubernetes: preparing server: failed to get CA certs: listen tcp 127.0.0.1:6444: bind: address already in use"'; exit 1`)
	if err := svc.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	var said []string
	err := m.Wait(ctx, svc, WaitFor{NodeName: "n"}, time.Time{}, m.NewProber(Kubeconfig), func(p Progress) { said = append(said, p.Message) })
	var failed *NotReadyError
	if !errors.As(err, &failed) || !failed.Hopeless || failed.Failure.Name != "port-in-use" || !strings.Contains(failed.Fix(), "ss -lntp") {
		t.Errorf("%v (%+v)\n%s", err, failed, strings.Join(said, "\n"))
	}
	if ctx.Err() != nil {
		t.Error("only at the deadline")
	}
}

// TestSupervisorIsKilled: k3s lives on, and the next supervisor takes it over.
func TestSupervisorIsKilled(t *testing.T) {
	m, svc := supervisedMachine(t, untilTerm)
	if err := svc.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "k3s runs", func() bool { return stateOf(t, svc).Running })
	before := stateOf(t, svc)
	own, err := m.supervision(t.Context(), supervisedSpec(""))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(own.Supervisor.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the supervisor is gone", func() bool { return !alive(own.Supervisor) })
	if s := stateOf(t, svc); !s.Running || s.PID != before.PID || !strings.Contains(s.Detail, "gone") {
		t.Errorf("%+v", s)
	}
	if err := svc.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := stateOf(t, svc); s.PID != before.PID {
		t.Errorf("another k3s was started beside the first: %+v, %+v", before, s)
	}
	if err := svc.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if alive(identity{PID: before.PID, Start: before.Start}) {
		t.Error("k3s still runs")
	}
}

// TestOrphanIsStoppedWithoutSupervisor ends a k3s whose supervisor is gone.
func TestOrphanIsStoppedWithoutSupervisor(t *testing.T) {
	m, svc := supervisedMachine(t, untilTerm)
	if err := svc.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "k3s runs", func() bool { return stateOf(t, svc).Running })
	own, err := m.supervision(t.Context(), supervisedSpec(""))
	if err != nil {
		t.Fatal(err)
	}
	_ = syscall.Kill(own.Supervisor.PID, syscall.SIGKILL)
	eventually(t, "the supervisor is gone", func() bool { return !alive(own.Supervisor) })
	if err := svc.Stop(t.Context()); err != nil || alive(own.Child) {
		t.Errorf("%v, alive %v", err, alive(own.Child))
	}
}

// TestRecycledNumberIsLeftAlone: the file names a process that ended, and its number
// belongs to somebody else now.
func TestRecycledNumberIsLeftAlone(t *testing.T) {
	m, svc := supervisedMachine(t, untilTerm)
	bystander := exec.CommandContext(t.Context(), "sleep", "60")
	if err := bystander.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bystander.Process.Kill(); _ = bystander.Wait() }()
	who, err := identify(bystander.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	boot := m.bootID(t.Context())
	for name, state := range map[string]supervision{
		"another start": {BootID: boot, Supervisor: identity{who.PID, who.Start - 1}, Child: identity{who.PID, who.Start - 2}},
		"another boot":  {BootID: "long ago", Supervisor: who, Child: who},
	} {
		data, err := json.Marshal(state)
		if err != nil {
			t.Fatal(err)
		}
		put(t, m, "/run/llmbox/k3s-supervisor.json", string(data))
		if err := svc.Stop(t.Context()); err != nil || !alive(who) {
			t.Errorf("%s: %v, alive %v", name, err, alive(who))
		}
		if s := stateOf(t, svc); s.Running {
			t.Errorf("%s: %+v", name, s)
		}
	}
	// The live kernel looks again before it sends anything.
	k := &liveKernel{files: NewMachine(Options{}).files}
	if err := k.Kill(t.Context(), Process{PID: who.PID, Start: who.Start + 1}, syscall.SIGKILL); err != nil || !alive(who) {
		t.Errorf("%v, alive %v", err, alive(who))
	}
	if err := k.Kill(t.Context(), Process{PID: who.PID, Start: who.Start}, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it has ended", func() bool { return !alive(who) })
}

func TestOnlyOneSupervisor(t *testing.T) {
	m, svc := supervisedMachine(t, untilTerm)
	if err := svc.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := Supervise(t.Context(), m, SuperviseOptions{Spec: supervisedSpec("")}); !errors.Is(err, ErrSupervised) {
		t.Errorf("%v", err)
	}
}

func TestSupervisorThatCantStart(t *testing.T) {
	m, _ := supervisedMachine(t, untilTerm)
	svc, err := m.Service(Supervised, supervisedSpec(""), ServiceOptions{Supervisor: []string{"/bin/false"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := svc.Start(t.Context()); !errors.Is(err, ErrSetting) {
		t.Errorf("%v", err)
	}
}

// TestEnvironmentOfSupervisedK3s gives it the proxy and nothing of this process.
func TestEnvironmentOfSupervisedK3s(t *testing.T) {
	t.Setenv("INVOCATION_ID", "of-systemd")
	t.Setenv("HF_TOKEN", "secret")
	m, svc := supervisedMachine(t, "env > $(dirname $0)/../../../env; "+untilTerm)
	put(t, m, "/etc/rancher/k3s/k3s.env", marker+"\nHTTPS_PROXY='http://p:3128'\n")
	if err := svc.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "k3s wrote its environment", func() bool { return m.exists(t.Context(), "/env") && strings.Contains(get(t, m, "/env"), "HOME=") })
	env := get(t, m, "/env")
	if !strings.Contains(env, "HTTPS_PROXY=http://p:3128") || strings.Contains(env, "INVOCATION_ID") || strings.Contains(env, "HF_TOKEN") {
		t.Errorf("%s", env)
	}
}

func TestLogIsCut(t *testing.T) {
	at := filepath.Join(t.TempDir(), "k3s.log")
	// Somebody holds it open for appending all the time, as k3s does.
	writer, err := os.OpenFile(at, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Close() }()
	for round := range 6 {
		if _, err := writer.WriteString(strings.Repeat("x", 900) + itoa(round) + "\n"); err != nil {
			t.Fatal(err)
		}
		if err := rotateLog(at, 1000); err != nil {
			t.Fatal(err)
		}
		if _, err := writer.WriteString(strings.Repeat("y", 200) + "\n"); err != nil {
			t.Fatal(err)
		}
		if err := rotateLog(at, 1000); err != nil {
			t.Fatal(err)
		}
	}
	entries, err := os.ReadDir(filepath.Dir(at))
	if err != nil || len(entries) != keptLogs+1 {
		t.Errorf("%v, %v", entries, err)
	}
	newest, err := os.ReadFile(at + ".1")
	if err != nil || !strings.Contains(string(newest), "5\n") {
		t.Errorf("%.40q, %v", newest, err)
	}
	if info, err := os.Stat(at); err != nil || info.Size() > 1000 {
		t.Errorf("%v, %v", info.Size(), err)
	}
}
