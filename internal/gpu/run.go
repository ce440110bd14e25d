package gpu

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// run is one process that may hang, die or never stop writing.
type run struct {
	// program is what is run; where it is empty, path is.
	program []byte
	path    string
	// name is what the process is called in a process list.
	name        string
	arguments   []string
	environment []string
	// progress gives the process a pipe as descriptor ProgressFD.
	progress             bool
	slowAfter, hangAfter time.Duration
	onSlow               func(time.Duration)
	// limit bounds the standard output in bytes.
	limit int64
	// start takes the place of exec.Cmd in a test.
	start func(*exec.Cmd) (process, error)
}

// process is what run needs of a started one.
type process interface {
	Kill() error
	Wait() (*os.ProcessState, error)
}

// outcome is how a run ended.
type outcome struct {
	startErr error
	stdout   []byte
	// stderr and lastLine are the ends of what was written.
	stderr   []byte
	lastLine string
	exit     int
	signal   string
	elapsed  time.Duration
	slow     bool
	timedOut bool
	// abandoned: it was killed and is still there, waiting in the kernel.
	abandoned bool
	cancelled bool
	truncated bool
}

// killGrace is how long a killed process may take to be gone. One that waits in the
// driver without a way to be interrupted does not go at all.
const killGrace = 2 * time.Second

// errStillBusy is the kernel's word for a program file that is open for writing.
var errStillBusy = syscall.ETXTBSY

func (r run) do(ctx context.Context) outcome {
	began := time.Now()
	out := outcome{exit: -1}
	if r.path != "" {
		r.try(ctx, r.path, &out)
		out.elapsed = time.Since(began)
		return out
	}
	// A file in memory needs no place to write; where the kernel forbids running
	// one (vm.memfd_noexec, a security module), a private directory is next.
	file, err := memoryFile(r.name, r.program)
	if err == nil {
		r.try(ctx, file.path, &out)
		file.remove()
		if out.startErr == nil {
			out.elapsed = time.Since(began)
			return out
		}
		err = out.startErr
	}
	refusals := []string{refusal(err)}
	for _, dir := range []string{os.TempDir(), "/run", "/var/tmp"} {
		file, err := temporaryFile(dir, r.name, r.program)
		if err == nil {
			out = outcome{exit: -1}
			r.try(ctx, file.path, &out)
			file.remove()
			if out.startErr == nil {
				out.elapsed = time.Since(began)
				return out
			}
			err = out.startErr
		}
		if words := refusal(err); !slices.Contains(refusals, words) {
			refusals = append(refusals, words)
		}
	}
	out.startErr = errors.New(strings.Join(refusals, "; "))
	out.elapsed = time.Since(began)
	return out
}

// refusal is why a program was not run, without the name of a file made for it.
func refusal(err error) string {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Op + ": " + path.Err.Error()
	}
	return err.Error()
}

// programFile is a program laid down to be run once.
type programFile struct {
	path   string
	remove func()
}

func memoryFile(name string, program []byte) (programFile, error) {
	// Kernels before 6.3 do not know MFD_EXEC, later ones warn without it.
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	}
	if err != nil {
		return programFile{}, os.NewSyscallError("memfd_create", err)
	}
	file := os.NewFile(uintptr(fd), name) // #nosec G115 -- a descriptor is never negative here
	if _, err := file.Write(program); err != nil {
		_ = file.Close()
		return programFile{}, err
	}
	path := "/proc/self/fd/" + strconv.Itoa(fd)
	return programFile{path: path, remove: func() { _ = file.Close() }}, nil
}

func temporaryFile(parent, name string, program []byte) (programFile, error) {
	// MkdirTemp makes it 0700: nobody else can put a file in its place.
	dir, err := os.MkdirTemp(parent, "llmbox-")
	if err != nil {
		return programFile{}, err
	}
	path := filepath.Join(dir, name)
	remove := func() { _ = os.RemoveAll(dir) }
	if err := os.WriteFile(path, program, 0o700); err != nil { // #nosec G306 -- it has to be executable
		remove()
		return programFile{}, err
	}
	return programFile{path: path, remove: remove}, nil
}

// try starts the process and sees it through. It returns even where the process
// stays.
func (r run) try(ctx context.Context, path string, out *outcome) {
	// exec.Cmd's own context is not used: its Wait would wait for a process that
	// does not die.
	cmd := &exec.Cmd{
		Path: path, Args: append([]string{r.name}, r.arguments...), Env: r.environment, Dir: "/",
		// A group of its own, so that what it starts dies with it (NVML runs
		// nvidia-modprobe), and a death with ours.
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
	}
	pipes, err := r.connect(cmd)
	if err != nil {
		out.startErr = err
		return
	}
	defer pipes.closeReaders()

	type ended struct {
		state *os.ProcessState
		err   error
	}
	started := make(chan startResult, 1)
	done := make(chan ended, 1)
	go func() {
		// The death signal is tied to the thread that started the process.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		p, err := r.launch(cmd)
		pipes.closeWriters()
		started <- startResult{p, err}
		if err != nil {
			return
		}
		state, err := p.Wait()
		done <- ended{state, err}
	}()
	begun := <-started
	if begun.err != nil {
		out.startErr = begun.err
		return
	}
	slow := time.NewTimer(r.slowAfter)
	defer slow.Stop()
	hang := time.NewTimer(r.hangAfter)
	defer hang.Stop()
	var end ended
waiting:
	for {
		select {
		case end = <-done:
			break waiting
		case <-slow.C:
			out.slow = true
			if r.onSlow != nil {
				r.onSlow(r.slowAfter)
			}
			continue
		case <-hang.C:
			out.timedOut = true
		case <-ctx.Done():
			out.cancelled = true
		}
		// An error means that it has ended just now, which done tells next.
		_ = begun.process.Kill()
		select {
		case end = <-done:
		case <-time.After(killGrace):
			out.abandoned = true
			pipes.take(out)
			return
		}
		break
	}
	// What it started may hold the pipes open; its own words are already in them.
	pipes.drain(killGrace)
	pipes.take(out)
	if end.state == nil {
		out.startErr = end.err
		return
	}
	out.exit = end.state.ExitCode()
	if status, ok := end.state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		if out.signal = unix.SignalName(status.Signal()); out.signal == "" {
			out.signal = "signal " + strconv.Itoa(int(status.Signal()))
		}
	}
}

type startResult struct {
	process process
	err     error
}

// launch starts the process, again where its file was only just written: a process
// that another thread starts in that moment holds it open until it execs.
func (r run) launch(cmd *exec.Cmd) (process, error) {
	start := r.start
	if start == nil {
		start = func(cmd *exec.Cmd) (process, error) {
			if err := cmd.Start(); err != nil {
				return nil, err
			}
			return group{cmd.Process}, nil
		}
	}
	for wait := time.Millisecond; ; wait *= 2 {
		fresh := *cmd
		p, err := start(&fresh)
		if !errors.Is(err, errStillBusy) || wait > 100*time.Millisecond {
			return p, err
		}
		time.Sleep(wait)
	}
}

// group is a process with all that it started.
type group struct{ leader *os.Process }

func (g group) Kill() error {
	return errors.Join(syscall.Kill(-g.leader.Pid, syscall.SIGKILL), g.leader.Kill())
}

func (g group) Wait() (*os.ProcessState, error) { return g.leader.Wait() }

// plumbing is the pipes of one process.
type plumbing struct {
	readers, writers []*os.File
	stdout, stderr   *tail
	progress         *tail
	reading          sync.WaitGroup
	truncated        atomic.Bool
}

func (r run) connect(cmd *exec.Cmd) (*plumbing, error) {
	const keep = 4096
	p := &plumbing{stdout: &tail{}, stderr: &tail{keep: keep}, progress: &tail{keep: keep}}
	open := func(into *tail, limit int64) (*os.File, error) {
		read, write, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		p.readers, p.writers = append(p.readers, read), append(p.writers, write)
		p.reading.Go(func() {
			n, _ := io.Copy(into, io.LimitReader(read, limit+1))
			if n <= limit {
				return
			}
			p.truncated.Store(true)
			// Reading on keeps it from blocking: it shall end by itself.
			_, _ = io.Copy(io.Discard, read)
		})
		return write, nil
	}
	stdout, err := open(p.stdout, r.limit)
	if err != nil {
		return nil, err
	}
	const forever = int64(^uint64(0)>>1) - 1
	stderr, err := open(p.stderr, forever)
	if err != nil {
		p.closeWriters()
		p.closeReaders()
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if r.progress {
		progress, err := open(p.progress, forever)
		if err != nil {
			p.closeWriters()
			p.closeReaders()
			return nil, err
		}
		cmd.ExtraFiles = []*os.File{progress}
	}
	return p, nil
}

func (p *plumbing) closeWriters() {
	for _, w := range p.writers {
		_ = w.Close()
	}
}

func (p *plumbing) closeReaders() {
	for _, r := range p.readers {
		_ = r.Close()
	}
}

// drain waits until all is read, or for as long as given.
func (p *plumbing) drain(most time.Duration) {
	deadline := time.Now().Add(most)
	for _, r := range p.readers {
		_ = r.SetReadDeadline(deadline)
	}
	p.reading.Wait()
}

func (p *plumbing) take(out *outcome) {
	out.stdout, out.stderr = p.stdout.bytes(), p.stderr.bytes()
	out.truncated = p.truncated.Load()
	lines := strings.Split(strings.TrimRight(string(p.progress.bytes()), "\n"), "\n")
	out.lastLine = OneLine(lines[len(lines)-1])
}

// tail keeps the end of what is written to it, all of it where keep is 0.
type tail struct {
	mutex sync.Mutex
	data  []byte
	keep  int
}

func (t *tail) Write(data []byte) (int, error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.data = append(t.data, data...)
	if t.keep > 0 && len(t.data) > t.keep {
		t.data = append(t.data[:0], t.data[len(t.data)-t.keep:]...)
	}
	return len(data), nil
}

func (t *tail) bytes() []byte {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return append([]byte(nil), t.data...)
}
