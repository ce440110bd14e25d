package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// DefaultCommandDeadline bounds one program when Command has none.
	DefaultCommandDeadline = 5 * time.Second
	// grace is how long a killed program may take to be gone, and how long one that
	// ended may leave its output open to what it started.
	grace = 300 * time.Millisecond
)

// ErrNotInstalled means that no directory of the search path holds the program.
var ErrNotInstalled = errors.New("program not installed")

// ErrUnsafeProgram means that anybody could have put the program there.
var ErrUnsafeProgram = errors.New("program can be written by anybody")

// SearchPath is where programs are looked for, whatever PATH says: what runs as
// root is not chosen by the caller's environment. /usr/local comes last because
// distributions let a group write to it.
func SearchPath() []string {
	return []string{"/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/sbin", "/usr/local/bin"}
}

// Command is a program with its arguments. It gets no standard input, the C locale
// and no part of the caller's environment.
type Command struct {
	// Program is a bare name, looked for in Directories.
	Program string
	Args    []string
	// Directories are SearchPath when empty.
	Directories []string
	Deadline    time.Duration
	// Limit bounds what is kept of the output, in bytes; DefaultLimit when 0. Tail
	// keeps its end, otherwise its beginning is kept.
	Limit int
	Tail  bool
}

// Result is how a program ended.
type Result struct {
	// Output is what it wrote to standard output and standard error, as it came.
	Output []byte
	// Exit is the exit status; -1 where a signal ended it.
	Exit      int
	Truncated bool
}

// Find returns the absolute path of a program.
func Find(program string, directories []string) (string, error) {
	if program == "" || path.Base(program) != program {
		return "", fmt.Errorf("finding %q: not a bare name: %w", program, ErrNotInstalled)
	}
	if len(directories) == 0 {
		directories = SearchPath()
	}
	for _, dir := range directories {
		at := path.Join(dir, program)
		info, err := os.Stat(at)
		if err != nil || !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
			continue
		}
		if info.Mode().Perm()&0o002 != 0 {
			return "", fmt.Errorf("finding %s: %w", at, ErrUnsafeProgram)
		}
		return at, nil
	}
	return "", fmt.Errorf("finding %s: %w", program, ErrNotInstalled)
}

// Run runs a program to its end or its deadline. Then its whole process group is
// killed; one that can't be killed (it waits inside the kernel) is left behind. A
// program that ends by itself with a status other than zero is no error.
func (h *Host) Run(ctx context.Context, c Command) (Result, error) {
	deadline := c.Deadline
	if deadline <= 0 {
		deadline = DefaultCommandDeadline
	}
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	// The killing, too, takes place within the look; it gets a little longer.
	outer, cancelOuter := context.WithTimeout(context.WithoutCancel(ctx), deadline+2*grace)
	defer cancelOuter()
	return Bounded(outer, h, func() (Result, error) { return run(ctx, c) })
}

func run(ctx context.Context, c Command) (Result, error) {
	program, err := Find(c.Program, c.Directories)
	if err != nil {
		return Result{}, err
	}
	if err := touch(program); err != nil {
		return Result{}, fmt.Errorf("running %s: %w", c.Program, err)
	}
	output := &boundedOutput{limit: c.Limit, tail: c.Tail}
	if output.limit <= 0 {
		output.limit = DefaultLimit
	}
	// #nosec G204 -- an absolute path of a fixed directory and a list of arguments;
	// no shell is involved.
	cmd := exec.CommandContext(ctx, program, c.Args...)
	cmd.Env = []string{
		"LC_ALL=C", "LANGUAGE=", "PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin",
		"HOME=/", "TERM=dumb", "SYSTEMD_COLORS=0", "SYSTEMD_PAGER=",
	}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = output, output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = grace
	cmd.Cancel = func() error { return killGroup(cmd) }
	err = cmd.Run()
	if cmd.Process != nil {
		// It has ended, what it started may not have. As long as one of them lives the
		// number of the group is taken; else the kernel, which counts upwards, has not
		// given it to anybody yet.
		_ = killGroup(cmd)
	}
	if ctx.Err() != nil {
		return output.result(-1), fmt.Errorf("running %s: %w", c.Program, ended(ctx))
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil
	}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return output.result(exit.ExitCode()), nil
	case err != nil:
		return Result{}, fmt.Errorf("running %s: %w", c.Program, err)
	}
	return output.result(0), nil
}

// touch reads the beginning of a program and of its interpreter. Starting a program
// holds up the whole process until the kernel has read that much; where it lies on
// a dead file server, this look alone must hang.
func touch(program string) error {
	const page = 4096
	for range 2 {
		file, err := os.Open(program) // #nosec G304 -- found in a fixed directory, or named by what was
		if err != nil {
			// A program may be run without being readable.
			if errors.Is(err, fs.ErrPermission) {
				return nil
			}
			return err
		}
		head := make([]byte, page)
		n, err := io.ReadFull(file, head)
		_ = file.Close()
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return err
		}
		line, ok := strings.CutPrefix(string(head[:n]), "#!")
		if !ok {
			return nil
		}
		line, _, _ = strings.Cut(line, "\n")
		fields := strings.Fields(line)
		if len(fields) == 0 || !path.IsAbs(fields[0]) {
			return nil
		}
		info, err := os.Stat(fields[0])
		if err != nil || !info.Mode().IsRegular() {
			return nil //nolint:nilerr // starting the program will say it better
		}
		program = fields[0]
	}
	return nil
}

func killGroup(cmd *exec.Cmd) error {
	err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	if errors.Is(err, syscall.ESRCH) || errors.Is(err, fs.ErrPermission) {
		return os.ErrProcessDone
	}
	return err
}

// boundedOutput keeps the beginning or the end of what is written to it.
type boundedOutput struct {
	mu    sync.Mutex
	limit int
	tail  bool
	data  []byte
	cut   bool
}

func (b *boundedOutput) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.tail:
		b.data = append(b.data, p...)
		if len(b.data) > 2*b.limit {
			b.data = append(b.data[:0], b.data[len(b.data)-b.limit:]...)
			b.cut = true
		}
	case len(b.data) < b.limit:
		n := min(len(p), b.limit-len(b.data))
		b.data = append(b.data, p[:n]...)
		b.cut = b.cut || n < len(p)
	default:
		b.cut = b.cut || len(p) > 0
	}
	return len(p), nil
}

func (b *boundedOutput) result(exit int) Result {
	b.mu.Lock()
	defer b.mu.Unlock()
	data := b.data
	if b.tail && len(data) > b.limit {
		data, b.cut = data[len(data)-b.limit:], true
	}
	return Result{Output: append([]byte(nil), data...), Exit: exit, Truncated: b.cut}
}
