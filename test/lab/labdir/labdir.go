// Package labdir owns the directory of one running lab: who holds it, which
// processes belong to it, and how to clear it away after a supervisor that was
// killed before it could.
//
// It knows nothing of Kubernetes: a lab is a directory with a held lock and a
// record of process ids and start times.
package labdir

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	lockName  = "lock"
	stateName = "state.json"
	stateKind = "llmbox-lab"
)

// ErrInUse means that a live supervisor holds the directory.
var ErrInUse = errors.New("the lab in this directory is running")

// ErrNotLab means that the directory holds something this package did not put there.
var ErrNotLab = errors.New("not a lab directory")

// State is what a directory records about its processes.
type State struct {
	Kind       string    `json:"kind"`
	BootID     string    `json:"boot_id"`
	Supervisor Process   `json:"supervisor"`
	Children   []Process `json:"children"`
}

// Dir is a lab directory held by this process.
type Dir struct {
	Path string

	lock  *os.File
	mu    sync.Mutex
	state State
}

// Create makes and locks a lab directory. What a killed lab left at the same
// path is cleared first; any other content is refused.
func Create(path string) (*Dir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("resolving the lab directory: %w", err)
	}
	entries, err := os.ReadDir(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("reading the lab directory: %w", err)
	case len(entries) > 0:
		if err := Clear(path); err != nil {
			return nil, fmt.Errorf("clearing %s: %w", path, err)
		}
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("making the lab directory: %w", err)
	}
	// An empty directory made by somebody else may be open to others.
	if err := os.Chmod(path, 0o700); err != nil { // #nosec G302 -- a directory needs the execute bit
		return nil, fmt.Errorf("closing the lab directory to others: %w", err)
	}
	lock, err := takeLock(path)
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	self, err := Identify("supervisor", os.Getpid())
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	d := &Dir{Path: path, lock: lock, state: State{Kind: stateKind, BootID: boot, Supervisor: self}}
	if err := d.save(); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return d, nil
}

// Join is a path inside the directory.
func (d *Dir) Join(elem ...string) string {
	return filepath.Join(append([]string{d.Path}, elem...)...)
}

// Record adds a process that belongs to this lab.
func (d *Dir) Record(name string, pid int) error {
	p, err := Identify(name, pid)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state.Children = append(d.state.Children, p)
	return d.save()
}

// Close gives the directory up and, unless keep is set, removes it.
func (d *Dir) Close(keep bool) error {
	var err error
	if !keep {
		// The lock is still held: nobody can take the path for a leftover meanwhile.
		err = os.RemoveAll(d.Path)
	}
	return errors.Join(err, d.lock.Close())
}

func (d *Dir) save() error {
	raw, err := json.MarshalIndent(d.state, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the lab's state: %w", err)
	}
	return WriteFile(d.Join(stateName), raw)
}

// WriteFile replaces a file of mode 0600 atomically.
func WriteFile(path string, data []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	_, err = tmp.Write(data)
	err = errors.Join(err, tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, errors.Join(err, os.Remove(tmp.Name())))
	}
	return nil
}

// Read returns the state recorded in a directory.
func Read(path string) (State, error) {
	raw, err := os.ReadFile(filepath.Join(path, stateName)) // #nosec G304 -- the caller names its own lab
	if err != nil {
		return State{}, fmt.Errorf("reading the lab's state: %w", err)
	}
	var s State
	if err := json.Unmarshal(raw, &s); err != nil {
		return State{}, fmt.Errorf("reading the lab's state: %w", err)
	}
	if s.Kind != stateKind {
		return State{}, fmt.Errorf("%s: %w", path, ErrNotLab)
	}
	return s, nil
}

// Clear removes what a killed lab left: its processes that still live, then
// its directory. It refuses a directory whose lock is held and one that is not
// a lab's.
func Clear(path string) error {
	state, err := Read(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// Killed between taking the lock and writing the first state: nothing was
		// started yet, and nothing but the lock lies there.
		if only, err := onlyLock(path); err != nil || !only {
			return errors.Join(err, fmt.Errorf("%s: %w", path, ErrNotLab))
		}
	case err != nil:
		return err
	}
	lock, err := takeLock(path)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	boot, err := bootID()
	if err != nil {
		return err
	}
	// After a reboot the recorded ids belong to others.
	if state.BootID == boot {
		for _, p := range append(state.Children, state.Supervisor) {
			if err := p.Kill(5 * time.Second); err != nil {
				return err
			}
		}
	}
	if err := os.RemoveAll(path); err != nil {
		return fmt.Errorf("removing %s: %w", path, err)
	}
	return nil
}

// Swept is what Sweep did with one directory.
type Swept struct {
	Path string
	// Err is nil where the directory is gone, ErrInUse where a lab runs in it.
	Err error
}

// Sweep clears every leftover directly under root and leaves anything else alone.
func Sweep(root string) ([]Swept, error) {
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", root, err)
	}
	var swept []Swept
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		path := filepath.Join(root, e.Name())
		if err := Clear(path); !errors.Is(err, ErrNotLab) {
			swept = append(swept, Swept{Path: path, Err: err})
		}
	}
	return swept, nil
}

// Stop ends the lab in a directory: asks its supervisor, and where that does not
// answer in time, kills it and clears up.
func Stop(path string, patience time.Duration) error {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	state, err := Read(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		if err := state.Supervisor.Signal(unix.SIGTERM); err != nil {
			return err
		}
		if !state.Supervisor.waitGone(patience) {
			if err := state.Supervisor.Kill(5 * time.Second); err != nil {
				return err
			}
		}
	}
	// A supervisor that ended in order has removed the directory itself.
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return Clear(path)
}

func onlyLock(path string) (bool, error) {
	entries, err := os.ReadDir(path)
	if err != nil {
		return false, fmt.Errorf("reading %s: %w", path, err)
	}
	return len(entries) == 1 && entries[0].Name() == lockName, nil
}

// takeLock locks DIR/lock without waiting. The lock goes with the process,
// however that ends; children do not inherit the descriptor.
func takeLock(path string) (*os.File, error) {
	name := filepath.Join(path, lockName)
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600) // #nosec G304 -- inside the caller's lab
	if err != nil {
		return nil, fmt.Errorf("opening the lab's lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s: %w", path, ErrInUse)
		}
		return nil, fmt.Errorf("locking %s: %w", name, err)
	}
	// The former holder may have removed the directory between open and lock.
	held, err1 := f.Stat()
	there, err2 := os.Stat(name)
	if err1 != nil || err2 != nil || !os.SameFile(held, there) {
		_ = f.Close()
		return nil, fmt.Errorf("%s: %w", path, ErrInUse)
	}
	return f, nil
}
