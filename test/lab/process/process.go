// Package process runs the lab's programs as children that can't outlive it.
//
// It knows nothing of what the programs do.
package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Spec is one program to run.
type Spec struct {
	Name string
	Path string
	Args []string
	Dir  string
	Env  []string
	// Log receives stdout and stderr.
	Log string
	// Output receives them where it is set.
	Output *os.File
	// Files are further open files of the child, from descriptor 3 on.
	Files []*os.File
	// Namespaces are those the child gets new, as CLONE_NEW… flags.
	Namespaces uintptr
}

// Child is a started program.
type Child struct {
	Name string
	PID  int

	log  string
	cmd  *exec.Cmd
	done chan struct{}
	err  error
	// asked: it is ended on purpose.
	asked bool
}

// Done is closed when the child has ended.
func (c *Child) Done() <-chan struct{} { return c.done }

// Group starts and stops children.
type Group struct {
	launch chan func()
	died   chan *Child

	mu       sync.Mutex
	children []*Child
	stopping bool
}

// NewGroup makes an empty group.
func NewGroup() *Group {
	g := &Group{launch: make(chan func()), died: make(chan *Child, 16)}
	// The kernel's parent-death signal follows the thread that made the child, not
	// the process. One thread that never ends makes them all.
	go func() {
		runtime.LockOSThread()
		for f := range g.launch {
			f()
		}
		select {}
	}()
	return g
}

// Start runs a program. The child gets SIGKILL when this process ends in whatever
// way, and a process group of its own so that Ctrl-C reaches only the supervisor.
func (g *Group) Start(s Spec) (*Child, error) {
	log := s.Output
	if log == nil {
		var err error
		if log, err = os.OpenFile(s.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600); err != nil { // #nosec G304 -- inside the lab directory
			return nil, fmt.Errorf("opening the log of %s: %w", s.Name, err)
		}
		defer func() { _ = log.Close() }()
	}
	cmd := exec.Command(s.Path, s.Args...) // #nosec G204 -- programs the lab built itself
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = s.Dir, s.Env, log, log
	cmd.ExtraFiles = s.Files
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true, Cloneflags: s.Namespaces}

	started := make(chan error)
	g.launch <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s: %w", s.Name, err)
	}
	c := &Child{Name: s.Name, PID: cmd.Process.Pid, log: s.Log, cmd: cmd, done: make(chan struct{})}
	g.mu.Lock()
	g.children = append(g.children, c)
	g.mu.Unlock()
	go func() {
		c.err = cmd.Wait()
		close(c.done)
		g.mu.Lock()
		stopping := g.stopping || c.asked
		g.mu.Unlock()
		if !stopping {
			g.died <- c
		}
	}()
	return c, nil
}

// Died delivers children that ended without being asked to.
func (g *Group) Died() <-chan *Child { return g.died }

// PIDs lists the process ids by name.
func (g *Group) PIDs() map[string]int {
	g.mu.Lock()
	defer g.mu.Unlock()
	pids := make(map[string]int, len(g.children))
	for _, c := range g.children {
		pids[c.Name] = c.PID
	}
	return pids
}

// Kill ends one child at once and forgets it.
func (g *Group) Kill(c *Child) error {
	g.mu.Lock()
	c.asked = true
	g.mu.Unlock()
	err := c.signal(syscall.SIGKILL)
	<-c.done
	g.mu.Lock()
	defer g.mu.Unlock()
	g.children = slices.DeleteFunc(g.children, func(other *Child) bool { return other == c })
	return err
}

// Stop ends all children, the last started first. Only the first started, which
// holds the others' data, is asked before it is killed.
func (g *Group) Stop(grace time.Duration) error {
	g.mu.Lock()
	g.stopping = true
	children := g.children
	g.mu.Unlock()
	var errs []error
	for i := len(children) - 1; i >= 0; i-- {
		c := children[i]
		if i == 0 {
			errs = append(errs, c.signal(syscall.SIGTERM))
			select {
			case <-c.done:
				continue
			case <-time.After(grace):
			}
		}
		errs = append(errs, c.signal(syscall.SIGKILL))
		<-c.done
	}
	return errors.Join(errs...)
}

func (c *Child) signal(sig syscall.Signal) error {
	if err := c.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stopping %s: %w", c.Name, err)
	}
	return nil
}

// DiedError says how a child ended and what it wrote last.
type DiedError struct {
	Name string
	Err  error
	Tail string
}

func (e *DiedError) Error() string {
	how := "it exited without an error"
	if e.Err != nil {
		how = e.Err.Error()
	}
	if e.Tail == "" {
		return fmt.Sprintf("%s ended early (%s)", e.Name, how)
	}
	return fmt.Sprintf("%s ended early (%s); the last lines of its log:\n%s", e.Name, how, e.Tail)
}

func (e *DiedError) Unwrap() error { return e.Err }

// DiedError describes a child that Died delivered.
func (c *Child) DiedError() error {
	<-c.done
	died := &DiedError{Name: c.Name, Err: c.err}
	if c.log != "" {
		died.Tail = Tail(c.log, 15)
	}
	return died
}

// Tail reads the last lines of a file; what can't be read is said in their place.
func Tail(path string, lines int) string {
	const most = 16 << 10
	f, err := os.Open(path) // #nosec G304 -- inside the lab directory
	if err != nil {
		return fmt.Sprintf("  (%s can't be read: %v)", filepath.Base(path), err)
	}
	defer func() { _ = f.Close() }()
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		_, err = f.Seek(max(0, size-most), io.SeekStart)
		if err != nil {
			return fmt.Sprintf("  (%s can't be read: %v)", filepath.Base(path), err)
		}
	}
	raw, err := io.ReadAll(f)
	if err != nil {
		return fmt.Sprintf("  (%s can't be read: %v)", filepath.Base(path), err)
	}
	all := strings.Split(string(bytes.TrimSpace(raw)), "\n")
	all = all[max(0, len(all)-lines):]
	return "  " + strings.Join(all, "\n  ")
}

// Wait blocks until a child dies or ctx ends.
func (g *Group) Wait(ctx context.Context) error {
	select {
	case c := <-g.died:
		return c.DiedError()
	case <-ctx.Done():
		return ctx.Err()
	}
}
