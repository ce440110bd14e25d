package snapshot

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/internal/host"
)

func (c *collector) startProbes(ctx context.Context) {
	c.probe(ctx, ProbeSystem, func(ctx context.Context) (any, error) { return c.system(ctx) })
	c.probe(ctx, ProbeDisks, func(ctx context.Context) (any, error) { return c.disks(ctx) })
	c.probe(ctx, ProbeListeners, func(ctx context.Context) (any, error) { return c.listeners(ctx) })
	c.probe(ctx, ProbeLocks, func(ctx context.Context) (any, error) { return c.locks(ctx) })
	c.probe(ctx, ProbeInterfaces, func(ctx context.Context) (any, error) { return c.interfaces(ctx) })
	if c.options.Fsync {
		c.probe(ctx, ProbeFsync, func(ctx context.Context) (any, error) { return c.fsync(ctx) })
	}
	c.startNetwork(ctx)
}

// probe runs one probe and keeps its answer or why there is none.
func (c *collector) probe(ctx context.Context, name string, look func(context.Context) (any, error)) {
	c.spawn(ctx, probeDir+name, probeDeadline, func(bounded context.Context) {
		value, err := look(bounded)
		if err != nil {
			c.record(func(s *Snapshot) { s.MarkUnreadable(probeDir+name, c.why(err, probeDeadline)) })
			return
		}
		c.answer(name, value)
	})
}

func (c *collector) system(ctx context.Context) (System, error) {
	var names unix.Utsname
	if err := unix.Uname(&names); err != nil {
		return System{}, fmt.Errorf("asking uname: %w", err)
	}
	s := System{
		Machine: unix.ByteSliceToString(names.Machine[:]), Kernel: unix.ByteSliceToString(names.Release[:]),
		Hostname: unix.ByteSliceToString(names.Nodename[:]), UID: *c.options.UID, CPUs: runtime.NumCPU(),
	}
	meminfo, err := c.host.ReadFile(ctx, "/proc/meminfo", 64<<10)
	if err != nil {
		return System{}, fmt.Errorf("reading the size of the memory: %w", err)
	}
	s.MemoryBytes = memTotal(string(meminfo))
	s.LimitBytes = c.memoryLimit(ctx)
	return s, nil
}

// memTotal returns MemTotal of /proc/meminfo in bytes; the file counts in KiB.
func memTotal(meminfo string) uint64 {
	for line := range strings.Lines(meminfo) {
		if rest, ok := strings.CutPrefix(line, "MemTotal:"); ok {
			if fields := strings.Fields(rest); len(fields) > 0 {
				n, err := strconv.ParseUint(fields[0], 10, 53)
				if err == nil {
					return n << 10
				}
			}
		}
	}
	return 0
}

// memoryLimit is the tightest limit from this process's control group upwards.
func (c *collector) memoryLimit(ctx context.Context) uint64 {
	groups, err := c.host.ReadFile(ctx, "/proc/self/cgroup", 64<<10)
	if err != nil {
		return 0
	}
	// Version 1 says "no limit" by the largest multiple of the page size.
	const unlimited = 1 << 62
	var tightest uint64
	for line := range strings.Lines(string(groups)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		var mount, file string
		switch {
		case fields[0] == "0" && fields[1] == "":
			mount, file = "/sys/fs/cgroup", "memory.max"
		case slices.Contains(strings.Split(fields[1], ","), "memory"):
			mount, file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
		default:
			continue
		}
		for dir := path.Clean("/" + fields[2]); ; dir = path.Dir(dir) {
			if raw, err := c.host.ReadFile(ctx, path.Join(mount, dir, file), 64); err == nil {
				n, err := strconv.ParseUint(strings.TrimSpace(string(raw)), 10, 64)
				if err == nil && n < unlimited && (tightest == 0 || n < tightest) {
					tightest = n
				}
			}
			if dir == "/" {
				break
			}
		}
	}
	return tightest
}

// usualDisks are measured whatever the install asks for.
func usualDisks() []string {
	return []string{"/", "/boot", "/boot/efi", "/tmp", "/var", "/var/lib", "/usr/local/bin", "/dev/shm", "/run", "/sys/fs/cgroup"}
}

func (c *collector) disks(ctx context.Context) ([]Disk, error) {
	mounts, err := c.mounts(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the mounts: %w", err)
	}
	var paths []string
	for _, p := range append(slices.Clone(c.options.DiskPaths), usualDisks()...) {
		if p = path.Clean("/" + p); !slices.Contains(paths, p) {
			paths = append(paths, p)
		}
	}
	found := make([]Disk, len(paths))
	// At once, since one dead file server must not cost the others their turn.
	done := make(chan struct{})
	for i, p := range paths {
		go func() {
			found[i] = c.disk(ctx, p, mounts)
			done <- struct{}{}
		}()
	}
	for range paths {
		<-done
	}
	return found, nil
}

func (c *collector) mounts(ctx context.Context) ([]mount, error) {
	const limit = 4 << 20
	names := []string{"/proc/self/mountinfo", "/proc/1/mountinfo"}
	if c.options.Root != "/" {
		// Seen from outside, "self" is nobody or somebody else.
		slices.Reverse(names)
	}
	var first error
	for _, name := range names {
		raw, err := c.host.ReadFile(ctx, name, limit)
		if err == nil {
			return parseMountinfo(string(raw)), nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, first
}

func (c *collector) disk(ctx context.Context, p string, mounts []mount) Disk {
	d := Disk{Path: p}
	ctx, cancel := context.WithTimeout(ctx, fileDeadline)
	defer cancel()
	at, err := c.nearest(ctx, p)
	if err == nil {
		if at, err = c.host.Resolve(ctx, at); err == nil {
			if m, ok := holding(mounts, at); ok {
				d.MountPoint, d.Device, d.Type, d.Options = m.point, m.device, m.kind, m.options
			}
			var room host.Filesystem
			if room, err = c.host.Statfs(ctx, at); err == nil {
				d.TotalBytes, d.AvailableBytes = room.TotalBytes, room.AvailableBytes
				d.Inodes, d.InodesFree = room.Inodes, room.InodesFree
			}
		}
	}
	if err != nil {
		d.Error = c.why(err, fileDeadline)
	}
	return d
}

// nearest is the path itself or the closest directory above it that exists.
func (c *collector) nearest(ctx context.Context, p string) (string, error) {
	for {
		_, err := c.host.Stat(ctx, p)
		if err == nil || !absent(err) || p == "/" {
			return p, err
		}
		p = path.Dir(p)
	}
}

type mount struct {
	point, device, kind string
	options             []string
}

// parseMountinfo reads /proc/PID/mountinfo, see proc_pid_mountinfo(5). Lines that
// are not of its form are skipped.
func parseMountinfo(text string) []mount {
	var mounts []mount
	for line := range strings.Lines(text) {
		before, after, ok := strings.Cut(strings.TrimRight(line, "\n"), " - ")
		left, right := strings.Split(before, " "), strings.Split(after, " ")
		if !ok || len(left) < 6 || len(right) < 3 {
			continue
		}
		m := mount{point: unescape(left[4]), kind: right[0], device: unescape(right[1])}
		// What holds for the mount comes first; "ro" can be in either.
		for _, option := range append(strings.Split(left[5], ","), strings.Split(right[2], ",")...) {
			if key, _, _ := strings.Cut(option, "="); option != "" && !secretKey(key) && !slices.Contains(m.options, option) {
				m.options = append(m.options, option)
			}
		}
		mounts = append(mounts, m)
	}
	return mounts
}

// unescape turns the kernel's \040 for a space and the like back.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var out strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				out.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		out.WriteByte(s[i])
	}
	return out.String()
}

// holding is the mount that a path lies on: the longest mount point above it, the
// last of several at one place.
func holding(mounts []mount, p string) (mount, bool) {
	var best mount
	found := false
	for _, m := range mounts {
		under := m.point == "/" || p == m.point || strings.HasPrefix(p, m.point+"/")
		if under && len(m.point) >= len(best.point) {
			best, found = m, true
		}
	}
	return best, found
}

func (c *collector) interfaces(ctx context.Context) ([]Interface, error) {
	return host.Bounded(ctx, c.host, func() ([]Interface, error) {
		all, err := net.Interfaces()
		if err != nil {
			return nil, fmt.Errorf("listing the interfaces: %w", err)
		}
		found := make([]Interface, 0, len(all))
		for _, i := range all {
			one := Interface{Name: i.Name, MTU: i.MTU, Up: i.Flags&net.FlagUp != 0}
			// An interface can go while it is looked at.
			if addresses, err := i.Addrs(); err == nil {
				for _, a := range addresses {
					one.Addresses = append(one.Addresses, a.String())
				}
			}
			found = append(found, one)
		}
		return found, nil
	})
}

// Writes of the fsync probe: what etcd writes to its log, and how its documentation
// measures a disk (etcd.io/docs, "Hardware recommendations" and the fio run named
// there: fdatasync after each 2300 bytes).
const (
	fsyncBytes  = 2300
	fsyncWrites = 200
	fsyncTime   = 1500 * time.Millisecond
)

func (c *collector) fsync(ctx context.Context) ([]Fsync, error) {
	p := c.options.FsyncPath
	if p == "" {
		p = "/var/lib"
	}
	at, err := c.nearest(ctx, path.Clean("/"+p))
	if err != nil {
		return nil, fmt.Errorf("finding a directory for the writes: %w", err)
	}
	if at, err = c.host.Resolve(ctx, at); err != nil {
		return nil, fmt.Errorf("finding a directory for the writes: %w", err)
	}
	return host.Bounded(ctx, c.host, func() ([]Fsync, error) {
		one, err := measureFsync(ctx, path.Join(c.options.Root, at))
		if err != nil {
			return nil, err
		}
		one.Path = p
		return []Fsync{one}, nil
	})
}

func measureFsync(ctx context.Context, dir string) (Fsync, error) {
	file, err := os.CreateTemp(dir, ".llmbox-fsync-*")
	if err != nil {
		return Fsync{}, fmt.Errorf("making a file for the writes: %w", err)
	}
	defer func() { _ = file.Close() }()
	// Its name goes before the first write: nothing is left, however this ends.
	if err := os.Remove(file.Name()); err != nil {
		return Fsync{}, fmt.Errorf("removing the file for the writes: %w", err)
	}
	block := bytes.Repeat([]byte("llmbox"), fsyncBytes/6+1)[:fsyncBytes]
	took := make([]time.Duration, 0, fsyncWrites)
	begin := time.Now()
	for len(took) < fsyncWrites && ctx.Err() == nil && time.Since(begin) < fsyncTime {
		start := time.Now()
		if _, err := file.Write(block); err != nil {
			return Fsync{}, fmt.Errorf("writing: %w", err)
		}
		// #nosec G115 -- a file descriptor is a small number.
		if err := unix.Fdatasync(int(file.Fd())); err != nil {
			return Fsync{}, fmt.Errorf("syncing: %w", err)
		}
		took = append(took, time.Since(start))
	}
	if len(took) == 0 {
		return Fsync{}, host.ErrDeadline
	}
	slices.Sort(took)
	at := func(share float64) float64 {
		i := min(int(share*float64(len(took))), len(took)-1)
		return float64(took[i].Microseconds()) / 1000
	}
	return Fsync{Writes: len(took), BytesPerWrite: fsyncBytes, P50Milli: at(0.5), P99Milli: at(0.99)}, nil
}

// lockFiles are held with fcntl(2) by package managers while they work.
func lockFiles() []string {
	return []string{
		"/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock", "/var/cache/apt/archives/lock",
		"/var/lib/rpm/.rpm.lock", "/usr/lib/sysimage/rpm/.rpm.lock",
	}
}

// pidFiles hold the number of the process that works.
func pidFiles() []string {
	return []string{
		"/var/run/yum.pid", "/var/run/zypp.pid", "/var/cache/dnf/metadata_lock.pid", "/var/cache/dnf/download_lock.pid",
		"/var/lib/dnf/rpmdb_lock.pid",
	}
}

func (c *collector) locks(ctx context.Context) ([]Lock, error) {
	found := []Lock{}
	for _, name := range lockFiles() {
		info, err := c.host.Stat(ctx, name)
		if absent(err) {
			continue
		}
		lock := Lock{Path: name}
		if err == nil {
			lock.PID, err = c.lockHolder(ctx, name, info)
		}
		if err != nil {
			lock.Error = c.why(err, fileDeadline)
		}
		// A process of another PID namespace has the number -1 or 0 here.
		lock.Held = lock.PID != 0
		lock.PID = max(lock.PID, 0)
		found = append(found, c.named(ctx, lock))
	}
	for _, name := range pidFiles() {
		raw, err := c.host.ReadFile(ctx, name, 64)
		if absent(err) {
			continue
		}
		lock := Lock{Path: name}
		if err != nil {
			lock.Error = c.why(err, fileDeadline)
		} else if pid, err := strconv.Atoi(strings.TrimSpace(string(raw))); err == nil && pid > 0 {
			// The file outlives a process that was killed.
			if _, err := c.host.Stat(ctx, path.Join("/proc", strconv.Itoa(pid))); err == nil {
				lock.Held, lock.PID = true, pid
			}
		}
		found = append(found, c.named(ctx, lock))
	}
	return found, nil
}

func (c *collector) named(ctx context.Context, l Lock) Lock {
	if l.PID > 0 {
		if comm, err := c.host.ReadFile(ctx, path.Join("/proc", strconv.Itoa(l.PID), "comm"), 64); err == nil {
			l.Process = strings.TrimSpace(string(comm))
		}
	}
	return l
}

// lockHolder is the process that holds an fcntl(2) lock against writers, 0 for
// none. Where the file may not be opened, the kernel's list of locks knows as well.
func (c *collector) lockHolder(ctx context.Context, name string, info host.Info) (int, error) {
	at, err := c.host.Resolve(ctx, name)
	if err != nil {
		return 0, err
	}
	pid, err := host.Bounded(ctx, c.host, func() (int, error) {
		// #nosec G304 -- a path of the list above.
		file, err := os.OpenFile(path.Join(c.options.Root, at), os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
		if err != nil {
			return 0, err
		}
		defer func() { _ = file.Close() }()
		// Whoever only reads the RPM database holds a lock for reading, which stops
		// no other reader; asking for one shows the writers alone.
		ask := unix.Flock_t{Type: unix.F_WRLCK, Whence: 0}
		if strings.HasSuffix(name, ".rpm.lock") {
			ask.Type = unix.F_RDLCK
		}
		if err := unix.FcntlFlock(file.Fd(), unix.F_GETLK, &ask); err != nil {
			return 0, err
		}
		if ask.Type == unix.F_UNLCK {
			return 0, nil
		}
		if ask.Pid == 0 {
			return -1, nil
		}
		return int(ask.Pid), nil
	})
	if !errors.Is(err, fs.ErrPermission) {
		return pid, err
	}
	list, listErr := c.host.ReadFile(ctx, "/proc/locks", 4<<20)
	if listErr != nil {
		return 0, err
	}
	return holderOf(string(list), info.Device, info.Inode), nil
}

// holderOf looks a file up in /proc/locks, see proc_locks(5).
func holderOf(list string, device, inode uint64) int {
	want := fmt.Sprintf("%02x:%02x:%d", unix.Major(device), unix.Minor(device), inode)
	for line := range strings.Lines(list) {
		fields := strings.Fields(line)
		if len(fields) < 8 || fields[1] != "POSIX" || fields[3] != "WRITE" || fields[5] != want {
			continue
		}
		pid, err := strconv.Atoi(fields[4])
		if err == nil && pid != 0 {
			return pid
		}
		return -1
	}
	return 0
}

// mostSockets bounds the list; a machine that is to serve has some dozen.
const mostSockets = 4096

func (c *collector) listeners(ctx context.Context) ([]Listener, error) {
	var found []socket
	var first error
	read := 0
	for _, table := range []string{"tcp", "tcp6", "udp", "udp6"} {
		// What listens comes before the connections, so that the head is enough.
		raw, err := c.host.ReadHead(ctx, "/proc/net/"+table, host.DefaultLimit)
		if err != nil {
			// A kernel without IPv6 has no tcp6.
			if !absent(err) && first == nil {
				first = err
			}
			continue
		}
		read++
		found = append(found, parseSockets(string(raw), strings.TrimSuffix(table, "6"))...)
	}
	if read == 0 {
		if first == nil {
			first = fs.ErrNotExist
		}
		return nil, fmt.Errorf("reading the sockets: %w", first)
	}
	if len(found) > mostSockets {
		found = found[:mostSockets]
	}
	owners := c.owners(ctx, found)
	out := make([]Listener, len(found))
	for i, one := range found {
		out[i] = one.Listener
		if pid, ok := owners[one.inode]; ok {
			named := c.named(ctx, Lock{PID: pid})
			out[i].PID, out[i].Process, out[i].Parents = pid, named.Process, c.parents(ctx, pid)
		}
	}
	return out, nil
}

// mostParents bounds a chain of processes; real ones are short.
const mostParents = 16

// parents names the processes that a process descends from, see proc_pid_stat(5).
func (c *collector) parents(ctx context.Context, pid int) []string {
	var names []string
	for range mostParents {
		raw, err := c.host.ReadFile(ctx, path.Join("/proc", strconv.Itoa(pid), "stat"), 4096)
		if err != nil {
			return names
		}
		text := string(raw)
		// The name may hold spaces and ends at the last parenthesis.
		fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
		if len(fields) < 2 {
			return names
		}
		if pid, err = strconv.Atoi(fields[1]); err != nil || pid <= 1 {
			return names
		}
		named := c.named(ctx, Lock{PID: pid})
		if named.Process == "" {
			return names
		}
		names = append(names, named.Process)
	}
	return names
}

type socket struct {
	Listener
	inode string
}

// parseSockets reads a table of /proc/net, see proc_pid_net(5): the TCP sockets
// that listen (state 0A) and the UDP ones that take from anybody (07).
func parseSockets(table, protocol string) []socket {
	state := "0A"
	if protocol == "udp" {
		state = "07"
	}
	var found []socket
	lines := bufio.NewScanner(strings.NewReader(table))
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || fields[3] != state {
			continue
		}
		address, port, ok := parseEndpoint(fields[1])
		if !ok {
			continue
		}
		found = append(found, socket{Listener{Protocol: protocol, Address: address, Port: port}, fields[9]})
	}
	return found
}

// parseEndpoint reads "0100007F:1F90": the address as the machine's words (little
// end first on all that NVIDIA drives), then the port.
func parseEndpoint(s string) (address string, port int, ok bool) {
	hexAddress, hexPort, ok := strings.Cut(s, ":")
	if !ok || len(hexAddress) != 8 && len(hexAddress) != 32 {
		return "", 0, false
	}
	n, err := strconv.ParseUint(hexPort, 16, 16)
	if err != nil {
		return "", 0, false
	}
	ip := make(net.IP, 0, net.IPv6len)
	for i := 0; i < len(hexAddress); i += 8 {
		word, err := strconv.ParseUint(hexAddress[i:i+8], 16, 32)
		if err != nil {
			return "", 0, false
		}
		// The kernel prints each word as this machine's little-endian memory holds it.
		ip = binary.LittleEndian.AppendUint32(ip, uint32(word))
	}
	return ip.String(), int(n), true
}

// owners maps the inodes of sockets to the processes that hold them, as far as this
// user may see.
func (c *collector) owners(ctx context.Context, sockets []socket) map[string]int {
	wanted := map[string]bool{}
	for _, s := range sockets {
		if s.inode != "0" {
			wanted[s.inode] = true
		}
	}
	found, err := host.Bounded(ctx, c.host, func() (map[string]int, error) {
		found := map[string]int{}
		proc := path.Join(c.options.Root, "proc")
		names, err := readNames(proc)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			pid, err := strconv.Atoi(name)
			if err != nil {
				continue
			}
			if len(found) == len(wanted) || ctx.Err() != nil {
				break
			}
			descriptors := path.Join(proc, name, "fd")
			numbers, err := readNames(descriptors)
			if err != nil {
				continue
			}
			for _, number := range numbers {
				target, err := os.Readlink(path.Join(descriptors, number))
				if err != nil {
					continue
				}
				inode, ok := strings.CutPrefix(target, "socket:[")
				if inode = strings.TrimSuffix(inode, "]"); ok && wanted[inode] {
					if _, known := found[inode]; !known {
						found[inode] = pid
					}
				}
			}
		}
		return found, nil
	})
	if err != nil {
		return nil //nolint:nilerr // who holds a port is a help, not a fact that must be had
	}
	return found
}

func readNames(dir string) ([]string, error) {
	file, err := os.OpenFile(dir, os.O_RDONLY|syscall.O_DIRECTORY, 0) // #nosec G304 -- a directory of /proc
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return file.Readdirnames(1 << 16)
}
