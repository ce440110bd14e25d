package k3s

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/internal/host"
)

const (
	// processDeadline bounds one look at all processes.
	processDeadline = 10 * time.Second
	// unmountDeadline bounds one umount(2): a dead file server never answers.
	unmountDeadline = 10 * time.Second
	// ticks are the units of /proc/PID/stat in a second, on every architecture
	// (proc_pid_stat(5), USER_HZ).
	ticks = 100
)

// Process is a running program.
type Process struct {
	PID, PPID int
	// Start is when it began, in ticks since the boot. With PID it names the process
	// for ever; the number alone is given to others later.
	Start uint64
	// State is the letter of proc_pid_stat(5); Z has ended.
	State byte
	// Exe is the program file; Argv its arguments, the program first.
	Exe  string
	Argv []string
	// Cgroups are the paths of its control groups, one for each hierarchy.
	Cgroups []string
	// NetNS is the inode of its network namespace; 0 where that can't be read.
	NetNS uint64
}

// Kernel is what is asked of the kernel itself.
type Kernel interface {
	// Processes lists all that run.
	Processes(ctx context.Context) ([]Process, error)
	// Kill sends a signal to that very process. One that has ended is no error.
	Kill(ctx context.Context, p Process, signal syscall.Signal) error
	// Unmount takes the uppermost mount off a mount point. Lazy detaches it though it
	// is in use.
	Unmount(ctx context.Context, point string, lazy bool) error
	// NetNSOf is the inode of the network namespace that a file holds open.
	NetNSOf(ctx context.Context, name string) (uint64, error)
	// Self is the number of this process.
	Self() int
}

// liveKernel lists the processes that the machine's files show: below a root that
// isn't "/" those are none of this machine's, and none of these can be ended by it.
type liveKernel struct{ files *host.Host }

func (k *liveKernel) Self() int { return os.Getpid() }

func (k *liveKernel) Processes(ctx context.Context) ([]Process, error) {
	ctx, cancel := context.WithTimeout(ctx, processDeadline)
	defer cancel()
	found, err := host.Bounded(ctx, k.files, func() ([]Process, error) { return readProcesses(filepath.Join(k.files.Root, "/proc")) })
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	return found, nil
}

// Kill holds the process by a descriptor before it looks who it is, so that the
// number can't go to another one between the two.
func (k *liveKernel) Kill(ctx context.Context, p Process, signal syscall.Signal) error {
	_, err := host.Bounded(ctx, k.files, func() (struct{}, error) {
		fd, err := unix.PidfdOpen(p.PID, 0)
		if errors.Is(err, unix.ESRCH) {
			return struct{}{}, nil
		}
		if err != nil {
			return struct{}{}, err
		}
		defer func() { _ = unix.Close(fd) }()
		now, err := readProcess("/proc", p.PID)
		if err != nil {
			if absent(err) || errors.Is(err, syscall.ESRCH) {
				return struct{}{}, nil
			}
			return struct{}{}, err
		}
		if now.Start != p.Start {
			return struct{}{}, nil
		}
		if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return struct{}{}, err
		}
		return struct{}{}, nil
	})
	if err != nil {
		return fmt.Errorf("ending process %d: %w", p.PID, err)
	}
	return nil
}

func (k *liveKernel) Unmount(ctx context.Context, point string, lazy bool) error {
	ctx, cancel := context.WithTimeout(ctx, unmountDeadline)
	defer cancel()
	flags := unix.UMOUNT_NOFOLLOW
	if lazy {
		flags |= unix.MNT_DETACH
	}
	_, err := host.Bounded(ctx, k.files, func() (struct{}, error) {
		err := unix.Unmount(filepath.Join(k.files.Root, point), flags)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			// Nothing is mounted there any more.
			err = nil
		}
		return struct{}{}, err
	})
	if err != nil {
		return fmt.Errorf("unmounting %s: %w", point, err)
	}
	return nil
}

func (k *liveKernel) NetNSOf(ctx context.Context, name string) (uint64, error) {
	info, err := k.files.Stat(ctx, name)
	if err != nil {
		return 0, err
	}
	return info.Inode, nil
}

func readProcesses(proc string) ([]Process, error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	var out []Process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// One that ends while it is looked at is not there.
		if p, err := readProcess(proc, pid); err == nil {
			out = append(out, p)
		}
	}
	return out, nil
}

func readProcess(proc string, pid int) (Process, error) {
	dir := filepath.Join(proc, strconv.Itoa(pid))
	stat, err := os.ReadFile(filepath.Join(dir, "stat")) // #nosec G304 -- below /proc
	if err != nil {
		return Process{}, err
	}
	p, err := parseStat(string(stat))
	if err != nil {
		return Process{}, err
	}
	// A kernel thread has no arguments, and some of these need privileges.
	argv, _ := os.ReadFile(filepath.Join(dir, "cmdline")) // #nosec G304 -- below /proc
	p.Argv = parseArgv(argv)
	groups, _ := os.ReadFile(filepath.Join(dir, "cgroup")) // #nosec G304 -- below /proc
	p.Cgroups = parseCgroups(string(groups))
	p.Exe, _ = os.Readlink(filepath.Join(dir, "exe"))
	p.Exe = strings.TrimSuffix(p.Exe, " (deleted)")
	if link, err := os.Readlink(filepath.Join(dir, "ns/net")); err == nil {
		p.NetNS = parseNamespace(link)
	}
	return p, nil
}

// parseStat reads /proc/PID/stat. The second field is a name in parentheses that can
// itself hold spaces and parentheses.
func parseStat(text string) (Process, error) {
	open, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if open < 0 || end < open {
		return Process{}, fmt.Errorf("reading the state of a process: %w", fs.ErrInvalid)
	}
	fields := strings.Fields(text[end+1:])
	// Behind the name stand state and parent; the start is the 22nd field of all.
	const state, parent, start = 0, 1, 19
	if len(fields) <= start || len(fields[state]) != 1 {
		return Process{}, fmt.Errorf("reading the state of a process: %w", fs.ErrInvalid)
	}
	p := Process{State: fields[state][0]}
	var errs [3]error
	p.PID, errs[0] = strconv.Atoi(strings.TrimSpace(text[:open]))
	p.PPID, errs[1] = strconv.Atoi(fields[parent])
	p.Start, errs[2] = strconv.ParseUint(fields[start], 10, 64)
	if err := errors.Join(errs[:]...); err != nil {
		return Process{}, fmt.Errorf("reading the state of a process: %w", err)
	}
	return p, nil
}

// parseArgv reads /proc/PID/cmdline. A program that has set its own title has the
// rest of the room filled with zeros.
func parseArgv(data []byte) []string {
	data = bytes.TrimRight(data, "\x00")
	if len(data) == 0 {
		return nil
	}
	return strings.Split(string(data), "\x00")
}

// parseCgroups reads /proc/PID/cgroup, see cgroups(7).
func parseCgroups(text string) []string {
	var out []string
	for line := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimRight(line, "\n"), ":", 3)
		if len(parts) == 3 && strings.HasPrefix(parts[2], "/") {
			out = append(out, parts[2])
		}
	}
	return out
}

// parseNamespace reads a link such as "net:[4026531840]".
func parseNamespace(link string) uint64 {
	_, text, _ := strings.Cut(link, "[")
	n, err := strconv.ParseUint(strings.TrimSuffix(text, "]"), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// bootID tells one boot of the machine from another; empty where there is none.
func (m *Machine) bootID(ctx context.Context) string {
	data, _, _ := m.read(ctx, "/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(data))
}

// startTime is when a process began, by the clock. Reckoned from how long the machine is
// up, it is right to a hundredth of a second; from when it was started, to a second.
func (m *Machine) startTime(ctx context.Context, start uint64) (time.Time, bool) {
	// #nosec G115 -- less than a second, and seconds since a boot
	since := time.Duration(start/ticks)*time.Second + time.Duration(start%ticks)*time.Second/ticks
	data, present, err := m.read(ctx, "/proc/uptime")
	if present && err == nil {
		text, _, _ := strings.Cut(string(data), " ")
		if up, err := time.ParseDuration(text + "s"); err == nil {
			return time.Now().Add(since - up), true
		}
	}
	data, present, err = m.read(ctx, "/proc/stat")
	if !present || err != nil {
		return time.Time{}, false
	}
	for line := range strings.Lines(string(data)) {
		if text, ok := strings.CutPrefix(line, "btime "); ok {
			boot, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
			if err != nil {
				return time.Time{}, false
			}
			return time.Unix(boot, 0).Add(since), true
		}
	}
	return time.Time{}, false
}
