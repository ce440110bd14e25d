package report

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/internal/event"
)

// The screen is tried where it lives: in a process of its own, on a terminal of
// its own, with real signals. The test binary plays that process.
const childEnv = "REPORT_TEST_CHILD"

func TestMain(m *testing.M) {
	if role := os.Getenv(childEnv); role != "" {
		os.Exit(child(role))
	}
	os.Exit(m.Run())
}

func child(role string) int {
	if role == "shell" {
		return shell()
	}
	var keys *os.File
	interrupts := make(chan struct{}, 2)
	o := Options{
		Title: "llmbox test", Stdout: os.Stdout, Stderr: os.Stderr, Terminal: IsTerminal(os.Stdout), Getenv: os.Getenv,
		Interrupt: func() { interrupts <- struct{}{} },
	}
	if role != "no-keys" {
		if keys = OpenKeys(); keys != nil {
			o.Keys = keys
		}
	}
	if role == "draw-panic" {
		draws := 0
		o.Now = func() time.Time {
			if draws++; draws > 60 {
				panic("on purpose")
			}
			return time.Now()
		}
	}
	terminate := make(chan os.Signal, 1)
	signal.Notify(terminate, syscall.SIGTERM, syscall.SIGINT)
	r := New(o)
	if _, ok := r.(*screen); !ok {
		fmt.Println("not a screen")
		return 99
	}
	emit := func(typ event.Type, step, message string) {
		r.Emit(event.Event{Time: time.Now(), Type: typ, Step: step, Message: message})
	}
	r.Emit(event.Event{Time: time.Now(), Type: event.RunStarted, Message: "a run", Plan: []event.PlannedStep{{Step: "component/keda", Title: "KEDA"}, {Step: "component/vault", Title: "Vault"}}})
	emit(event.StepStarted, "component/keda", "")
	emit(event.StepProgress, "component/keda/ready", "up and drawn")
	end := func(outcome string) int {
		r.Emit(event.Event{Time: time.Now(), Type: event.RunDone, Summary: &event.Summary{Outcome: outcome}})
		if err := r.Close(); err != nil {
			if errors.Is(err, errScreenStuck) {
				return 98
			}
			fmt.Println(err)
			return 97
		}
		return map[string]int{OutcomeDone: 0, OutcomeInterrupted: 130}[outcome]
	}
	switch role {
	case "done":
		time.Sleep(500 * time.Millisecond)
		emit(event.StepDone, "component/keda", "")
		return end(OutcomeDone)
	case "panic":
		time.Sleep(500 * time.Millisecond)
		go func() {
			defer Rescue(r)
			panic("on purpose")
		}()
		time.Sleep(10 * time.Second)
	case "draw-panic", "hangup":
		for range 1000 {
			s := r.(*screen)
			s.mu.Lock()
			over := s.fallback != nil
			s.mu.Unlock()
			if over {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		emit(event.StepProgress, "component/vault/ready", "still at work")
		emit(event.Log, "", "in plain lines")
		emit(event.StepDone, "component/keda", "")
		return end(OutcomeDone)
	case "stuck":
		time.Sleep(time.Second)
		if err := fill(); err != nil {
			fmt.Println(err)
			return 92
		}
		start := time.Now()
		for i := range 1000 {
			emit(event.StepProgress, "component/keda/ready", strconv.Itoa(i))
		}
		if time.Since(start) > time.Second {
			return 91
		}
		return end(OutcomeDone)
	default:
		select {
		case <-interrupts:
		case <-terminate:
		case <-time.After(30 * time.Second):
			return 96
		}
		return end(OutcomeInterrupted)
	}
	return 95
}

// fill writes to the terminal until it takes no more.
func fill() error {
	fd, err := unix.Open("/dev/tty", unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	spaces := bytes.Repeat([]byte(" "), 4096)
	for full := 0; full < 20; {
		if _, err = unix.Write(fd, spaces); errors.Is(err, unix.EAGAIN) {
			full++
			time.Sleep(10 * time.Millisecond)
		} else if err != nil {
			return err
		}
	}
	return nil
}

// shell does what a shell does for a job: puts it into a group of its own, in
// the foreground, and waits. Only such a job can be suspended.
func shell() int {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=job")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Foreground: true, Ctty: 0}
	if err := cmd.Start(); err != nil {
		fmt.Println(err)
		return 94
	}
	fmt.Printf("job=%d;", cmd.Process.Pid)
	if err := cmd.Wait(); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return exit.ExitCode()
		}
		return 93
	}
	return 0
}

// terminal is the other end of a child's terminal.
type terminal struct {
	t      *testing.T
	master *os.File
	cmd    *exec.Cmd
	before unix.Termios
	mu     sync.Mutex
	out    bytes.Buffer
	mute   bool
	read   chan struct{}
}

func startChild(t *testing.T, role string, env ...string) *terminal {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes on terminals of their own")
	}
	// Non-blocking, so that closing it ends the reader.
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatalf("opening a terminal: %v", err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}); err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	term := &terminal{t: t, master: os.NewFile(uintptr(fd), "ptmx"), read: make(chan struct{})}
	term.before = term.modes()
	term.cmd = exec.Command(os.Args[0])
	term.cmd.Env = append([]string{childEnv + "=" + role, "TERM=xterm-256color", "LANG=C.UTF-8", "PATH=" + os.Getenv("PATH")}, env...)
	term.cmd.Stdin, term.cmd.Stdout, term.cmd.Stderr = slave, slave, slave
	term.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0}
	if err := term.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = slave.Close()
	t.Cleanup(func() {
		_ = term.cmd.Process.Kill()
		_ = term.master.Close()
	})
	go term.reader()
	return term
}

func (x *terminal) reader() {
	defer close(x.read)
	buf := make([]byte, 4096)
	for {
		x.mu.Lock()
		mute := x.mute
		x.mu.Unlock()
		if mute {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		n, err := x.master.Read(buf)
		x.mu.Lock()
		x.out.Write(buf[:n])
		x.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (x *terminal) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.out.String()
}

func (x *terminal) modes() unix.Termios {
	x.t.Helper()
	m, err := unix.IoctlGetTermios(int(x.master.Fd()), unix.TCGETS)
	if err != nil {
		x.t.Fatal(err)
	}
	return *m
}

func (x *terminal) raw() bool { return x.modes().Lflag&unix.ICANON == 0 }

func (x *terminal) wait(what string, ok func() bool) {
	x.t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
	}
	x.t.Fatalf("%s didn't happen; the terminal got:\n%q", what, x.text())
}

func (x *terminal) drawn() {
	x.t.Helper()
	x.wait("drawing", func() bool { return strings.Contains(x.text(), "up and drawn") })
}

// ends waits for the child, and checks that the terminal is as it was found.
func (x *terminal) ends(code int) string {
	x.t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = x.cmd.Wait() // how it ended is judged by its exit code
	}()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		x.t.Fatalf("the child doesn't end; the terminal got:\n%q", x.text())
	}
	if got := x.cmd.ProcessState.ExitCode(); got != code {
		x.t.Errorf("exit code %d, want %d", got, code)
	}
	if now := x.modes(); now != x.before {
		x.t.Errorf("the terminal's modes changed: %+v, were %+v", now, x.before)
	}
	x.mu.Lock()
	x.mute = false
	x.mu.Unlock()
	select {
	case <-x.read:
	case <-time.After(5 * time.Second):
	}
	return x.text()
}

func (x *terminal) restored(out string) {
	x.t.Helper()
	for _, mode := range []struct{ name, on, off string }{
		{"cursor", "\x1b[?25h", "\x1b[?25l"},
		{"alternate screen", "\x1b[?1049l", "\x1b[?1049h"},
		{"bracketed paste", "\x1b[?2004l", "\x1b[?2004h"},
	} {
		if strings.Contains(out, mode.off) && strings.LastIndex(out, mode.on) < strings.LastIndex(out, mode.off) {
			x.t.Errorf("%s isn't back", mode.name)
		}
	}
	if !strings.Contains(out, "\x1b[?1049h") {
		x.t.Error("the screen was never there")
	}
}

// afterScreen is what was written once the screen had gone.
func afterScreen(out string) string { return out[strings.LastIndex(out, "\x1b[?1049l"):] }

func TestTerminalComesBack(t *testing.T) {
	for _, c := range []struct {
		role  string
		send  func(x *terminal)
		code  int
		after string
	}{
		{"done", nil, 0, "llmbox test"},
		{"key", func(x *terminal) { _, _ = x.master.WriteString("\x03") }, 130, "interrupted after"},
		{"key", func(x *terminal) { _, _ = x.master.WriteString("q") }, 130, "interrupted after"},
		{"no-keys", func(x *terminal) { _, _ = x.master.WriteString("\x03") }, 130, "interrupted after"},
		{"signal", func(x *terminal) { _ = x.cmd.Process.Signal(syscall.SIGTERM) }, 130, "interrupted after"},
		{"panic", nil, 2, "panic: on purpose"},
		{"draw-panic", nil, 0, "in plain lines"},
		{"hangup", func(x *terminal) { _ = x.cmd.Process.Signal(syscall.SIGHUP) }, 0, "in plain lines"},
	} {
		t.Run(c.role, func(t *testing.T) {
			t.Parallel()
			x := startChild(t, c.role)
			x.drawn()
			if c.send != nil {
				c.send(x)
			}
			out := x.ends(c.code)
			x.restored(out)
			if after := afterScreen(out); !strings.Contains(after, c.after) {
				t.Errorf("%q isn't on the terminal after the screen:\n%q", c.after, after)
			}
		})
	}
}

func TestNoColorReachesTheTerminal(t *testing.T) {
	x := startChild(t, "done", "NO_COLOR=1")
	out := x.ends(0)
	x.restored(out)
	if got := colors(out); len(got) > 0 {
		t.Errorf("colours: %q", got)
	}
	if after := strings.TrimPrefix(afterScreen(out), "\x1b[?1049l"); sgr.MatchString(after) {
		t.Errorf("the final screen has styles: %q", after)
	}
}

func TestScreenFollowsAResize(t *testing.T) {
	x := startChild(t, "key")
	x.drawn()
	if err := unix.IoctlSetWinsize(int(x.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 50, Col: 200}); err != nil {
		t.Fatal(err)
	}
	x.wait("drawing at 200 columns", func() bool { return strings.Contains(x.text(), strings.Repeat("─", 150)) })
	_, _ = x.master.WriteString("q")
	x.restored(x.ends(130))
}

func TestStuckTerminalDoesNotHoldTheProcess(t *testing.T) {
	t.Parallel()
	x := startChild(t, "stuck")
	x.drawn()
	x.mu.Lock()
	x.mute = true
	x.mu.Unlock()
	x.ends(98)
}

func TestSuspendGivesTheTerminalBack(t *testing.T) {
	for _, c := range []struct {
		name string
		stop func(x *terminal, job int)
	}{
		{"by key", func(x *terminal, _ int) { _, _ = x.master.WriteString("\x1a") }},
		{"by signal", func(_ *terminal, job int) { _ = syscall.Kill(job, syscall.SIGTSTP) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			x := startChild(t, "shell")
			x.drawn()
			job := 0
			out := x.text()
			if _, err := fmt.Sscanf(out[strings.Index(out, "job="):], "job=%d;", &job); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				x.wait("raw mode", x.raw)
				c.stop(x, job)
				x.wait("stopping", func() bool { return processState(job) == 'T' })
				if x.raw() {
					t.Error("the terminal is raw while the job is stopped")
				}
				x.wait("the cursor's return", func() bool {
					out := x.text()
					return strings.LastIndex(out, "\x1b[?25h") > strings.LastIndex(out, "\x1b[?25l")
				})
				if err := syscall.Kill(job, syscall.SIGCONT); err != nil {
					t.Fatal(err)
				}
				x.wait("going on", func() bool { return processState(job) != 'T' })
			}
			x.wait("raw mode", x.raw)
			_, _ = x.master.WriteString("q")
			x.restored(x.ends(130))
		})
	}
}

// A job that no shell can wake up again must not go to sleep.
func TestOrphanIgnoresSuspend(t *testing.T) {
	t.Parallel()
	x := startChild(t, "key")
	x.drawn()
	_, _ = x.master.WriteString("\x1a")
	_ = x.cmd.Process.Signal(syscall.SIGTSTP)
	time.Sleep(300 * time.Millisecond)
	if !x.raw() {
		t.Error("the screen gave the terminal away")
	}
	_, _ = x.master.WriteString("q")
	x.restored(x.ends(130))
}

func processState(pid int) byte {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	if rest == "" {
		return 0
	}
	return rest[0]
}
