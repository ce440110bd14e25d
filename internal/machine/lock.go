package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"
)

// lockFile is held by the run that works on this machine.
const lockFile = "lock"

// ErrLocked means that another run is at work on this machine.
var ErrLocked = errors.New("another run is at work on this machine")

// Holder is who holds the lock, for whoever has to wait.
type Holder struct {
	PID     int       `json:"pid"`
	Command string    `json:"command"`
	Since   time.Time `json:"since"`
	// Log is where the run writes its events; empty for one that writes none.
	Log string `json:"log,omitempty"`
}

// LockedError is a lock that somebody else holds.
type LockedError struct{ Holder Holder }

func (e *LockedError) Error() string {
	if e.Holder.PID == 0 {
		return ErrLocked.Error()
	}
	return fmt.Sprintf("%s: llmbox %s, process %d, since %s", ErrLocked, e.Holder.Command, e.Holder.PID, e.Holder.Since.Format(time.TimeOnly))
}

// Is lets errors.Is find ErrLocked.
func (e *LockedError) Is(target error) bool { return target == ErrLocked }

// Lock takes the machine for one run. The kernel gives it back when the process ends,
// in whatever way.
func (h *Host) Lock(command, log string) (release func(), err error) {
	at := h.at(path.Join(StateDir, lockFile))
	if err := makeDir(h.at(StateDir)); err != nil {
		return nil, fmt.Errorf("locking the machine: %w", err)
	}
	// #nosec G304 -- a fixed path
	file, err := os.OpenFile(at, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, secretMode)
	if err != nil {
		return nil, fmt.Errorf("locking the machine: %w", err)
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil { // #nosec G115 -- a descriptor
		defer func() { _ = file.Close() }()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("locking the machine: %w", err)
		}
		locked := &LockedError{}
		const limit = 4096
		if data, err := io.ReadAll(io.LimitReader(file, limit)); err == nil {
			// Who holds it may not have said so yet.
			_ = json.Unmarshal(data, &locked.Holder)
		}
		return nil, locked
	}
	if err := sign(file, Holder{PID: os.Getpid(), Command: command, Since: time.Now().UTC().Truncate(time.Second), Log: log}); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("locking the machine: %w", err)
	}
	return func() { _ = file.Close() }, nil
}

// Locked says whether some run holds the machine.
func (h *Host) Locked() bool {
	file, err := os.Open(h.at(path.Join(StateDir, lockFile)))
	if err != nil {
		return false
	}
	defer func() { _ = file.Close() }()
	err = unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB) // #nosec G115 -- a descriptor
	return errors.Is(err, unix.EWOULDBLOCK)
}

// sign writes down who holds the lock.
func sign(file *os.File, holder Holder) error {
	data, err := json.Marshal(holder)
	if err != nil {
		return err
	}
	if err := file.Truncate(0); err != nil {
		return err
	}
	_, err = file.WriteAt(append(data, '\n'), 0)
	return err
}
