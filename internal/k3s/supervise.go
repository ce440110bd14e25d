package k3s

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// mostLog bounds in bytes one file of the log; as many again are kept before it.
	mostLog  = 32 << 20
	keptLogs = 3
	// logTail bounds in bytes what is read of its end.
	logTail = 256 << 10
	// rotateEvery is how often its size is looked at.
	rotateEvery = 10 * time.Second
	// hookDeadline is longer than the hook takes to wait for an address.
	hookDeadline = addressDeadline + 10*time.Second
	// termDeadline is how long k3s may take to end; systemd gives as much.
	termDeadline = 90 * time.Second
	// superviseDeadline is how long a supervisor may take to say that it is there.
	superviseDeadline = 60 * time.Second

	firstBackoff = time.Second
	mostBackoff  = 30 * time.Second
	// steady is how long k3s has to run for the backoff to begin anew.
	steady = time.Minute
)

// exitMark begins the line that the supervisor adds to the log when k3s ends.
const exitMark = "llmbox: k3s ended: "

// supervision is the file in which a supervisor says who it is. A number alone would
// name somebody else after it was given away.
type supervision struct {
	BootID     string   `json:"bootID"`
	Supervisor identity `json:"supervisor"`
	// Child is k3s; its PID is 0 between two starts.
	Child identity `json:"child"`
	// Exits counts how often k3s ended by itself.
	Exits int    `json:"exits"`
	Last  string `json:"last,omitempty"`
}

type identity struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

// SuperviseOptions are what a supervisor works with.
type SuperviseOptions struct {
	Spec ServiceSpec
	// Backoff is the pause before the first restart; a second where 0.
	Backoff time.Duration
	// LogBytes bounds one file of the log; 32 MiB where 0.
	LogBytes int64
}

func (m *Machine) superviseFile(s ServiceSpec, suffix string) string {
	return path.Join(supervisorDir, s.Name()+"-supervisor."+suffix)
}

// Supervise keeps k3s running until the context ends, then ends it. It is what a
// machine without a service manager has in its place. It takes over a k3s that an
// earlier supervisor left behind.
func Supervise(ctx context.Context, m *Machine, o SuperviseOptions) error {
	if o.Spec.Log == "" {
		o.Spec.Log = m.logFile()
	}
	if o.Backoff <= 0 {
		o.Backoff = firstBackoff
	}
	if o.LogBytes <= 0 {
		o.LogBytes = mostLog
	}
	s := &supervisor{machine: m, o: o}
	lock, err := s.lock()
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	if err := s.open(); err != nil {
		return err
	}
	defer func() { _ = s.log.Close() }()
	rotating, stopRotating := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRotating()
	go s.rotate(rotating)
	return s.run(ctx)
}

// SuperviseInstalled supervises the k3s that the record speaks of. It is what the
// command line of Want.Supervisor has to end up in.
func SuperviseInstalled(ctx context.Context, m *Machine) error {
	r, err := m.Record(ctx)
	if err != nil {
		return err
	}
	if r.Adopted || r.Binary.Path == "" {
		return fmt.Errorf("supervising k3s: none is installed here: %w", ErrNoSource)
	}
	return Supervise(ctx, m, SuperviseOptions{Spec: ServiceSpecOf(r)})
}

type supervisor struct {
	machine *Machine
	o       SuperviseOptions
	log     *os.File
	state   supervision
}

// lock is held as long as the supervisor lives, however it ends.
func (s *supervisor) lock() (*os.File, error) {
	at := s.machine.at(s.machine.superviseFile(s.o.Spec, "lock"))
	if err := makeDirs(filepath.Dir(at)); err != nil {
		return nil, fmt.Errorf("locking the supervisor: %w", err)
	}
	// #nosec G304 -- a fixed path
	file, err := os.OpenFile(at, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, secretMode)
	if err != nil {
		return nil, fmt.Errorf("locking the supervisor: %w", err)
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil { // #nosec G115 -- a descriptor
		_ = file.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, ErrSupervised
		}
		return nil, fmt.Errorf("locking the supervisor: %w", err)
	}
	return file, nil
}

// open opens the log for appending: k3s writes to it itself, so that it lives on
// should the supervisor be killed, and so that cutting it needs no new file.
func (s *supervisor) open() (err error) {
	at := s.machine.at(s.o.Spec.Log)
	if err := makeDirs(filepath.Dir(at)); err != nil {
		return fmt.Errorf("opening the log of k3s: %w", err)
	}
	// #nosec G302,G304 -- a path of the configuration; the log holds no secrets
	s.log, err = os.OpenFile(at, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW, 0o640)
	if err != nil {
		return fmt.Errorf("opening the log of k3s: %w", err)
	}
	return nil
}

func (s *supervisor) say(text string) {
	_, _ = fmt.Fprintf(s.log, "time=%q level=info msg=%q\n", time.Now().UTC().Format(time.RFC3339), text)
}

func (s *supervisor) save(ctx context.Context) error {
	data, err := json.Marshal(s.state)
	if err != nil {
		return fmt.Errorf("writing the state of the supervisor: %w", err)
	}
	return s.machine.write(context.WithoutCancel(ctx), s.machine.superviseFile(s.o.Spec, "json"), secretMode, data)
}

func (s *supervisor) run(ctx context.Context) error {
	boot := s.machine.bootID(ctx)
	self, err := identify(os.Getpid())
	if err != nil {
		return fmt.Errorf("finding out who the supervisor is: %w", err)
	}
	left, _ := s.machine.supervision(ctx, s.o.Spec)
	s.state = supervision{BootID: boot, Supervisor: self}
	if left != nil && left.BootID == boot && alive(left.Child) {
		s.state.Child, s.state.Exits, s.state.Last = left.Child, left.Exits, left.Last
	}
	if err := s.save(ctx); err != nil {
		return err
	}
	pause := s.o.Backoff
	for {
		began := time.Now()
		ended, err := s.once(ctx)
		if ctx.Err() != nil {
			s.state.Child, s.state.Last = identity{}, "stopped"
			return s.save(ctx)
		}
		if err != nil {
			ended = err.Error()
		}
		s.say(exitMark + ended)
		s.state.Child, s.state.Last = identity{}, ended
		s.state.Exits++
		if err := s.save(ctx); err != nil {
			return err
		}
		if time.Since(began) > steady {
			pause = s.o.Backoff
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, mostBackoff)
	}
}

// once has k3s run until it ends or the context does.
func (s *supervisor) once(ctx context.Context) (string, error) {
	if s.state.Child.PID != 0 {
		s.say(fmt.Sprintf("taking over k3s, process %d", s.state.Child.PID))
		return s.follow(ctx, s.state.Child)
	}
	if len(s.o.Spec.Hook) > 0 {
		s.hook(ctx)
	}
	environment := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8",
	}
	if data, present, err := s.machine.read(ctx, s.o.Spec.envFile(Supervised)); err == nil && present {
		environment = append(environment, parseEnvironment(data)...)
	}
	// #nosec G204 -- the binary that was installed, without a shell
	cmd := exec.Command(s.machine.at(s.o.Spec.Binary), s.o.Spec.role()) //nolint:noctx // it is ended with a word first, and may take its time
	// Nothing of this process's environment: INVOCATION_ID alone would have k3s take
	// systemd for its cgroup driver.
	cmd.Env = environment
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = s.log, s.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return "", fmt.Errorf("starting k3s: %w", err)
	}
	child, err := identify(cmd.Process.Pid)
	if err == nil {
		s.state.Child = child
		err = s.save(ctx)
	}
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return "", err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return endOf(err), nil
	case <-ctx.Done():
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-done:
		return endOf(err), nil
	case <-time.After(termDeadline):
		_ = cmd.Process.Kill()
		return endOf(<-done), nil
	}
}

// follow waits for a k3s that is not this process's child.
func (s *supervisor) follow(ctx context.Context, child identity) (string, error) {
	const left = "it was left behind by an earlier supervisor"
	deadline := time.Time{}
	for alive(child) {
		if ctx.Err() != nil {
			signal := syscall.SIGTERM
			switch {
			case deadline.IsZero():
				deadline = time.Now().Add(termDeadline)
			case time.Now().After(deadline):
				signal = syscall.SIGKILL
			default:
				signal = 0
			}
			if signal != 0 {
				if err := s.machine.kernel.Kill(context.WithoutCancel(ctx), Process{PID: child.PID, Start: child.Start}, signal); err != nil {
					return left, err
				}
			}
		}
		time.Sleep(statePause)
	}
	return left, nil
}

func (s *supervisor) hook(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, hookDeadline)
	defer cancel()
	// #nosec G204 -- llmbox's own command line
	cmd := exec.CommandContext(ctx, s.o.Spec.Hook[0], s.o.Spec.Hook[1:]...)
	cmd.Stdout, cmd.Stderr = s.log, s.log
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		s.say("before the start: " + err.Error())
	}
}

func endOf(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

// rotate keeps the log small while k3s holds it open for appending: what is written
// between copying and cutting is lost, and nothing else.
func (s *supervisor) rotate(ctx context.Context) {
	every := time.NewTicker(rotateEvery)
	defer every.Stop()
	for {
		if err := rotateLog(s.machine.at(s.o.Spec.Log), s.o.LogBytes); err != nil {
			s.say("cutting the log: " + err.Error())
		}
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
	}
}

func rotateLog(at string, most int64) error {
	info, err := os.Stat(at)
	if err != nil || info.Size() < most {
		return err
	}
	for i := keptLogs - 1; i > 0; i-- {
		if err := os.Rename(fmt.Sprintf("%s.%d", at, i), fmt.Sprintf("%s.%d", at, i+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	from, err := os.Open(at) // #nosec G304 -- the log
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }()
	// #nosec G302,G304 -- beside the log, with its mode
	to, err := os.OpenFile(at+".1", os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o640)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	if err := errors.Join(err, to.Close()); err != nil {
		return err
	}
	return os.Truncate(at, 0)
}

// identify says who a process of this machine is.
func identify(pid int) (identity, error) {
	p, err := readProcess("/proc", pid)
	if err != nil {
		return identity{}, err
	}
	return identity{PID: pid, Start: p.Start}, nil
}

// alive says whether that very process runs.
func alive(who identity) bool {
	if who.PID <= 0 {
		return false
	}
	p, err := readProcess("/proc", who.PID)
	return err == nil && p.Start == who.Start && p.State != 'Z' && p.State != 'X'
}

// supervision reads what a supervisor says of itself; nil where there is none.
func (m *Machine) supervision(ctx context.Context, spec ServiceSpec) (*supervision, error) {
	data, present, err := m.read(ctx, m.superviseFile(spec, "json"))
	if err != nil || !present {
		return nil, err
	}
	var s supervision
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, fmt.Errorf("reading the state of the supervisor: %w", err)
	}
	if s.BootID != m.bootID(ctx) {
		return nil, nil
	}
	return &s, nil
}

// supervisedService is k3s under a supervisor of llmbox's own.
type supervisedService struct {
	machine *Machine
	spec    ServiceSpec
	argv    []string
}

func (s *supervisedService) Init() Init                           { return Supervised }
func (s *supervisedService) Files() []File                        { return nil }
func (s *supervisedService) Load(context.Context) error           { return nil }
func (s *supervisedService) Enable(context.Context) (bool, error) { return false, nil }

// Start has a process of its own session become the supervisor. It outlives this one
// and the terminal.
func (s *supervisedService) Start(ctx context.Context) error {
	if state, err := s.machine.supervision(ctx, s.spec); err == nil && state != nil && alive(state.Supervisor) {
		return nil
	}
	if len(s.argv) == 0 {
		return fmt.Errorf("starting the supervisor of k3s: no command line: %w", ErrSetting)
	}
	log := s.machine.at(s.spec.Log)
	if err := makeDirs(filepath.Dir(log)); err != nil {
		return fmt.Errorf("starting the supervisor of k3s: %w", err)
	}
	// #nosec G302,G304 -- the log
	out, err := os.OpenFile(log, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW, 0o640)
	if err != nil {
		return fmt.Errorf("starting the supervisor of k3s: %w", err)
	}
	defer func() { _ = out.Close() }()
	// #nosec G204 -- llmbox's own command line
	cmd := exec.Command(s.argv[0], s.argv[1:]...) //nolint:noctx // it outlives every context
	cmd.Dir = "/"
	cmd.Env = slices.DeleteFunc(os.Environ(), func(pair string) bool {
		return strings.HasPrefix(pair, "INVOCATION_ID=") || strings.HasPrefix(pair, "NOTIFY_SOCKET=") || strings.HasPrefix(pair, "JOURNAL_STREAM=")
	})
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the supervisor of k3s: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	ctx, cancel := context.WithTimeout(ctx, superviseDeadline)
	defer cancel()
	for {
		if state, err := s.machine.supervision(ctx, s.spec); err == nil && state != nil && alive(state.Supervisor) {
			return nil
		}
		select {
		case err := <-ended:
			return fmt.Errorf("starting the supervisor of k3s: it ended at once (%s), see %s: %w", endOf(err), s.spec.Log, ErrSetting)
		case <-ctx.Done():
			// One that nobody knows of must not stay behind.
			_ = cmd.Process.Kill()
			return fmt.Errorf("starting the supervisor of k3s: %w", ctx.Err())
		case <-time.After(statePause):
		}
	}
}

func (s *supervisedService) Restart(ctx context.Context) error {
	if err := s.Stop(ctx); err != nil {
		return err
	}
	return s.Start(ctx)
}

// Stop ends the supervisor, which ends k3s; where it is gone, k3s itself. What does
// not end when asked is ended.
func (s *supervisedService) Stop(ctx context.Context) error {
	patient, cancel := context.WithTimeout(ctx, stopDeadline)
	defer cancel()
	err := s.end(patient, syscall.SIGTERM)
	if err == nil || ctx.Err() != nil {
		return err
	}
	return s.end(ctx, syscall.SIGKILL)
}

// end sends a signal to the supervisor and, once that is gone, to what it left.
func (s *supervisedService) end(ctx context.Context, signal syscall.Signal) error {
	for {
		state, err := s.machine.supervision(ctx, s.spec)
		if err != nil || state == nil {
			return err
		}
		target := state.Supervisor
		if !alive(target) {
			if target = state.Child; !alive(target) {
				return nil
			}
		}
		if err := s.machine.kernel.Kill(ctx, Process{PID: target.PID, Start: target.Start}, signal); err != nil {
			return err
		}
		if err := gone(ctx, target); err != nil {
			return err
		}
	}
}

// gone waits until a process has ended.
func gone(ctx context.Context, who identity) error {
	for alive(who) {
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for process %d to end: %w", who.PID, ctx.Err())
		case <-time.After(statePause / 4):
		}
	}
	return nil
}

func (s *supervisedService) State(ctx context.Context) (ProcessState, error) {
	state, err := s.machine.supervision(ctx, s.spec)
	if err != nil {
		return ProcessState{}, err
	}
	if state == nil {
		return ProcessState{Detail: "no supervisor"}, nil
	}
	out := ProcessState{Exits: state.Exits, Detail: "supervised"}
	if !alive(state.Supervisor) {
		out.Detail = "its supervisor is gone"
	}
	if state.Last != "" {
		out.Detail += ", last: " + state.Last
	}
	if alive(state.Child) {
		out.Running, out.PID, out.Start = true, state.Child.PID, state.Child.Start
	}
	return out, nil
}

func (s *supervisedService) Lines(ctx context.Context, since time.Time) ([]Line, error) {
	return s.machine.logLines(ctx, s.spec.Log, since)
}

func (s *supervisedService) Remove(context.Context) error { return nil }
