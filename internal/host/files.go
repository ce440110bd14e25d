package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// mostNames bounds what a directory may list: /dev/char or /proc on the largest
// machines stay far below.
const mostNames = 1 << 16

// Info is what stands at a path, itself and not what a link leads to.
type Info struct {
	Mode fs.FileMode
	// Size is in bytes; kernel pseudo-files have 0.
	Size     int64
	UID, GID int
	// Major and Minor are a device's own numbers.
	Major, Minor uint32
	// Device and Inode identify the file within the machine.
	Device uint64
	Inode  uint64
	Time   time.Time
}

// Filesystem is the room on a file system, in bytes and inodes.
type Filesystem struct {
	// Type is the magic number of statfs(2).
	Type       int64
	TotalBytes uint64
	// AvailableBytes is what a process without privileges may still write.
	AvailableBytes     uint64
	Inodes, InodesFree uint64
}

// ReadFile returns the content of a regular file of at most limit bytes; 0 means
// DefaultLimit. A larger one is ErrTooLarge.
func (h *Host) ReadFile(ctx context.Context, name string, limit int64) ([]byte, error) {
	if limit <= 0 {
		limit = DefaultLimit
	}
	return Bounded(ctx, h, func() ([]byte, error) {
		data, err := h.read(name, limit+1)
		if err == nil && int64(len(data)) > limit {
			return nil, fmt.Errorf("reading %s: more than %d bytes: %w", name, limit, ErrTooLarge)
		}
		return data, err
	})
}

// ReadHead returns the first bytes of a regular file, at most limit.
func (h *Host) ReadHead(ctx context.Context, name string, limit int64) ([]byte, error) {
	return Bounded(ctx, h, func() ([]byte, error) { return h.read(name, limit) })
}

// ReadTail returns the last bytes of a regular file, at most limit. A kernel
// pseudo-file has no size and therefore no tail.
func (h *Host) ReadTail(ctx context.Context, name string, limit int64) ([]byte, error) {
	return Bounded(ctx, h, func() ([]byte, error) {
		file, err := h.open(name)
		if err != nil {
			return nil, err
		}
		defer func() { _ = file.Close() }()
		info, err := file.Stat()
		if err != nil {
			return nil, err
		}
		if from := info.Size() - limit; from > 0 {
			if _, err := file.Seek(from, io.SeekStart); err != nil {
				return nil, err
			}
		}
		return io.ReadAll(io.LimitReader(file, limit))
	})
}

func (h *Host) read(name string, limit int64) ([]byte, error) {
	file, err := h.open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return io.ReadAll(io.LimitReader(file, limit))
}

// open opens a regular file for reading. It looks before it opens, because opening
// a device can have effects, and again afterwards, because the path can change
// between the two.
func (h *Host) open(name string) (*os.File, error) {
	at, err := h.follow(name)
	if err != nil {
		return nil, err
	}
	look := h.lstat
	if h.live() {
		look = os.Stat
	}
	info, err := look(at)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("reading %s: %w: %s", name, ErrNotRegular, kind(info.Mode()))
	}
	file, err := h.openAt(at, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
	if err != nil {
		return nil, err
	}
	if info, err = file.Stat(); err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("reading %s: %w: %s", name, ErrNotRegular, kind(info.Mode()))
	}
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
}

func kind(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "a directory"
	case mode&fs.ModeNamedPipe != 0:
		return "a FIFO"
	case mode&fs.ModeSocket != 0:
		return "a socket"
	case mode&fs.ModeDevice != 0:
		return "a device"
	case mode&fs.ModeSymlink != 0:
		return "a symbolic link"
	}
	return mode.Type().String()
}

// openAt opens a resolved path. Under a root that isn't "/" it goes through
// os.Root, which holds even when somebody swaps a directory for a link meanwhile.
func (h *Host) openAt(at string, flags int) (*os.File, error) {
	if h.live() {
		// #nosec G304 -- reading the machine's files is what this package is for.
		return os.OpenFile(at, flags, 0)
	}
	root, err := h.opened()
	if err != nil {
		return nil, err
	}
	return root.OpenFile(inRoot(at), flags, 0)
}

func (h *Host) lstat(at string) (fs.FileInfo, error) {
	if h.live() {
		return os.Lstat(at)
	}
	root, err := h.opened()
	if err != nil {
		return nil, err
	}
	return root.Lstat(inRoot(at))
}

func (h *Host) readlink(at string) (string, error) {
	if h.live() {
		return os.Readlink(at)
	}
	root, err := h.opened()
	if err != nil {
		return "", err
	}
	return root.Readlink(inRoot(at))
}

// opened is the root's own handle, held until the Host is collected.
func (h *Host) opened() (*os.Root, error) {
	h.openOnce.Do(func() { h.handle, h.openErr = os.OpenRoot(h.Root) })
	return h.handle, h.openErr
}

func inRoot(at string) string {
	if at = strings.TrimPrefix(at, "/"); at == "" {
		return "."
	}
	return at
}

// Readlink returns what the symbolic link at a path says, unresolved.
func (h *Host) Readlink(ctx context.Context, name string) (string, error) {
	return Bounded(ctx, h, func() (string, error) {
		at, err := h.resolveParent(name)
		if err != nil {
			return "", err
		}
		return h.readlink(at)
	})
}

// Resolve returns where a path finally leads, every symbolic link followed within
// the root. The last part need not exist: a dangling link leads to a path at which
// nothing stands.
func (h *Host) Resolve(ctx context.Context, name string) (string, error) {
	return Bounded(ctx, h, func() (string, error) { return h.resolve(name) })
}

// resolve follows links the way a chroot does: an absolute target begins at the
// root, and ".." at the root stays there. From a part that does not exist on, the
// rest is taken as it is.
func (h *Host) resolve(name string) (string, error) {
	left := strings.Split(strings.Trim(path.Clean("/"+name), "/"), "/")
	at, followed, missing := "/", 0, false
	for len(left) > 0 {
		part := left[0]
		left = left[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			at = path.Dir(at)
			continue
		}
		next := path.Join(at, part)
		if missing {
			at = next
			continue
		}
		info, err := h.lstat(next)
		if errors.Is(err, fs.ErrNotExist) {
			missing = true
			at = next
			continue
		}
		if err != nil {
			return "", err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			at = next
			continue
		}
		if followed++; followed > hops {
			return "", fmt.Errorf("following %s: %w", name, ErrLoop)
		}
		target, err := h.readlink(next)
		if err != nil {
			return "", err
		}
		if path.IsAbs(target) {
			at = "/"
		}
		left = slices.Concat(strings.Split(target, "/"), left)
	}
	return at, nil
}

// follow is resolve where the kernel can't be left to do it.
func (h *Host) follow(name string) (string, error) {
	if h.live() {
		return path.Clean("/" + name), nil
	}
	return h.resolve(name)
}

// resolveParent resolves all but the last part.
func (h *Host) resolveParent(name string) (string, error) {
	name = path.Clean("/" + name)
	if h.live() {
		return name, nil
	}
	dir, err := h.resolve(path.Dir(name))
	if err != nil {
		return "", err
	}
	return path.Join(dir, path.Base(name)), nil
}

// List returns the names in a directory, sorted.
func (h *Host) List(ctx context.Context, dir string) ([]string, error) {
	return Bounded(ctx, h, func() ([]string, error) {
		at, err := h.follow(dir)
		if err != nil {
			return nil, err
		}
		file, err := h.openAt(at, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK)
		if err != nil {
			return nil, err
		}
		defer func() { _ = file.Close() }()
		names, err := file.Readdirnames(mostNames + 1)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		if len(names) > mostNames {
			return nil, fmt.Errorf("listing %s: more than %d names: %w", dir, mostNames, ErrTooLarge)
		}
		slices.Sort(names)
		return names, nil
	})
}

// Glob returns the paths that match a pattern of path.Match, sorted, and the
// directories that could not be listed with why. Directories that don't exist are
// simply no match.
func (h *Host) Glob(ctx context.Context, pattern string) ([]string, map[string]error, error) {
	pattern = path.Clean("/" + pattern)
	if _, err := path.Match(pattern, ""); err != nil {
		return nil, nil, fmt.Errorf("matching %s: %w", pattern, err)
	}
	found := []string{"/"}
	failed := map[string]error{}
	parts := strings.Split(strings.Trim(pattern, "/"), "/")
	for i, part := range parts {
		var next []string
		for _, dir := range found {
			if !strings.ContainsAny(part, `*?[\`) {
				next = append(next, path.Join(dir, part))
				continue
			}
			names, err := h.List(ctx, dir)
			if err != nil {
				if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
					failed[dir] = err
				}
				continue
			}
			for _, name := range names {
				if ok, _ := path.Match(part, name); ok {
					next = append(next, path.Join(dir, name))
				}
			}
		}
		found = next
		if i == len(parts)-1 && !strings.ContainsAny(part, `*?[\`) {
			found = slices.DeleteFunc(found, func(p string) bool {
				_, err := h.Stat(ctx, p)
				if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
					return err != nil
				}
				failed[p] = err
				return true
			})
		}
	}
	slices.Sort(found)
	return found, failed, nil
}

// Stat says what stands at a path; a last symbolic link is not followed.
func (h *Host) Stat(ctx context.Context, name string) (Info, error) {
	return Bounded(ctx, h, func() (Info, error) {
		at, err := h.resolveParent(name)
		if err != nil {
			return Info{}, err
		}
		info, err := h.lstat(at)
		if err != nil {
			return Info{}, err
		}
		out := Info{Mode: info.Mode(), Size: info.Size(), Time: info.ModTime()}
		if raw, ok := info.Sys().(*syscall.Stat_t); ok {
			out.UID, out.GID = int(raw.Uid), int(raw.Gid)
			out.Major, out.Minor = unix.Major(raw.Rdev), unix.Minor(raw.Rdev)
			out.Device, out.Inode = raw.Dev, raw.Ino
		}
		return out, nil
	})
}

// Statfs measures the file system that holds a path.
func (h *Host) Statfs(ctx context.Context, name string) (Filesystem, error) {
	return Bounded(ctx, h, func() (Filesystem, error) {
		at, err := h.follow(name)
		if err != nil {
			return Filesystem{}, err
		}
		var raw unix.Statfs_t
		if err := unix.Statfs(h.real(at), &raw); err != nil {
			return Filesystem{}, &fs.PathError{Op: "statfs", Path: name, Err: err}
		}
		block := uint64(max(raw.Frsize, 0))
		if block == 0 {
			block = uint64(max(raw.Bsize, 0))
		}
		return Filesystem{
			Type: int64(raw.Type), TotalBytes: raw.Blocks * block, AvailableBytes: raw.Bavail * block,
			Inodes: raw.Files, InodesFree: raw.Ffree,
		}, nil
	})
}

// real is where a resolved path lies on this machine.
func (h *Host) real(at string) string {
	if h.live() {
		return at
	}
	return filepath.Join(h.Root, at)
}
