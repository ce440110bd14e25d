package labdir

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const procDir = "/proc"

// Process names a process beyond reuse of its id: the start time, in clock ticks
// since boot, never repeats for the same id.
type Process struct {
	Name       string `json:"name"`
	PID        int    `json:"pid"`
	StartTicks uint64 `json:"start_ticks"`
}

// Identify reads the start time of a running process.
func Identify(name string, pid int) (Process, error) { return IdentifyAt(procDir, name, pid) }

// IdentifyAt does it with another namespace's /proc, mounted at proc.
func IdentifyAt(proc, name string, pid int) (Process, error) {
	ticks, err := startTicks(proc, pid)
	if err != nil {
		return Process{}, fmt.Errorf("identifying %s (process %d): %w", name, pid, err)
	}
	return Process{Name: name, PID: pid, StartTicks: ticks}, nil
}

// Alive says whether exactly this process still runs.
func (p Process) Alive() bool {
	ticks, err := startTicks(procDir, p.PID)
	return err == nil && ticks == p.StartTicks
}

// Signal sends a signal if exactly this process still runs.
func (p Process) Signal(sig unix.Signal) error {
	if p.PID <= 1 {
		return nil
	}
	// The descriptor pins the process: the check and the signal mean the same one.
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening process %d (%s): %w", p.PID, p.Name, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if !p.Alive() {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signalling process %d (%s): %w", p.PID, p.Name, err)
	}
	return nil
}

// Kill ends exactly this process and waits until it is gone.
func (p Process) Kill(patience time.Duration) error {
	if err := p.Signal(unix.SIGKILL); err != nil {
		return err
	}
	if !p.waitGone(patience) {
		return fmt.Errorf("killing process %d (%s): still there after %s", p.PID, p.Name, patience)
	}
	return nil
}

func (p Process) waitGone(patience time.Duration) bool {
	deadline := time.Now().Add(patience)
	for p.Alive() {
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(20 * time.Millisecond)
	}
	return true
}

// startTicks reads field 22 of /proc/PID/stat. A zombie counts as gone: it holds
// no memory and no port, and only its parent can remove it.
func startTicks(proc string, pid int) (uint64, error) {
	raw, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat")) // #nosec G304 -- a process id
	if err != nil {
		return 0, fmt.Errorf("reading process %d: %w", pid, err)
	}
	// The command name may hold spaces and parentheses; fields count from the last ')'.
	i := bytes.LastIndexByte(raw, ')')
	if i < 0 {
		return 0, fmt.Errorf("reading process %d: no command name in its stat", pid)
	}
	fields := strings.Fields(string(raw[i+1:]))
	if len(fields) < 20 {
		return 0, fmt.Errorf("reading process %d: %d fields in its stat", pid, len(fields))
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, fmt.Errorf("reading process %d: it has ended: %w", pid, fs.ErrNotExist)
	}
	ticks, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("reading process %d: %w", pid, err)
	}
	return ticks, nil
}

func bootID() (string, error) {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("reading the boot id: %w", err)
	}
	return strings.TrimSpace(string(raw)), nil
}
