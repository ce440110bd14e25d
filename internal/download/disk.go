package download

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// lockPause is how often a locked file is looked at.
const lockPause = 200 * time.Millisecond

// ErrBusy means that another process has the same file under way.
var ErrBusy = errors.New("another process is downloading it; waiting for that")

// reserve gives file the disk blocks for size bytes, or says what is missing and
// leaves it as it was.
func reserve(file *os.File, path string, size int64) error {
	fd := int(file.Fd()) // #nosec G115 -- a descriptor
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return diskError{fmt.Errorf("reading %s: %w", path, err)}
	}
	need := max(size-st.Blocks*512, 0)
	if free, known := free(file); known && need > free {
		return diskError{&SpaceError{Path: path, Need: need, Free: free, Err: unix.ENOSPC}}
	}
	var err error
	for range 100 {
		if err = unix.Fallocate(fd, 0, 0, size); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errors.Join(space(err, file, path, need), file.Truncate(st.Size))
	}
	// A file system that can't reserve: the free space was looked at, at least.
	if err := file.Truncate(size); err != nil {
		return space(err, file, path, need)
	}
	return nil
}

// free is what the file system has left for this process, in bytes.
func free(file *os.File) (int64, bool) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &st); err != nil || st.Blocks == 0 { // #nosec G115 -- a descriptor
		return 0, false
	}
	blocks := st.Bavail
	if os.Geteuid() == 0 {
		blocks = st.Bfree
	}
	return int64(blocks) * st.Bsize, true // #nosec G115 -- no disk is that large
}

// space is the error of a write, with what is missing where that is the reason.
func space(err error, file *os.File, path string, need int64) error {
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		return diskError{fmt.Errorf("writing %s: %w", path, err)}
	}
	left, _ := free(file)
	return diskError{&SpaceError{Path: path, Need: need, Free: left, Quota: errors.Is(err, unix.EDQUOT), Err: err}}
}

// openPart opens and locks a part file. While another process has it, it returns
// ErrBusy.
func openPart(dir *os.Root, name string) (*os.File, error) {
	for {
		if info, err := dir.Lstat(name); err == nil && !info.Mode().IsRegular() {
			return nil, fmt.Errorf("%s is in the way: %s", name, info.Mode().Type())
		}
		file, err := dir.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) // #nosec G115 -- a descriptor
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.Join(ErrBusy, file.Close())
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("locking %s: %w", name, err), file.Close())
		}
		// Who held the lock may have renamed or removed what it is on.
		mine, err := file.Stat()
		if err != nil {
			return nil, errors.Join(err, file.Close())
		}
		if there, err := dir.Lstat(name); err == nil && os.SameFile(mine, there) {
			return file, nil
		}
		if err := file.Close(); err != nil {
			return nil, err
		}
	}
}

// syncDir makes a rename last.
func syncDir(dir *os.Root) error {
	file, err := dir.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

// verify says whether a file that is there is the one that d names.
func verify(ctx context.Context, dir *os.Root, name string, d Digest, size int64) (present bool, length int64, err error) {
	info, err := dir.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, 0, nil
	case err != nil:
		return false, 0, err
	case info.IsDir():
		return false, 0, fmt.Errorf("%s is a directory", name)
	case d == (Digest{}), !info.Mode().IsRegular(), size > 0 && info.Size() != size:
		return false, 0, nil
	}
	file, err := dir.Open(name)
	if err != nil {
		return false, 0, err
	}
	defer func() { _ = file.Close() }()
	h := d.hash()
	n, err := io.CopyBuffer(h, interruptible{ctx, file}, make([]byte, bufferSize))
	if err != nil {
		return false, 0, fmt.Errorf("reading %s: %w", name, err)
	}
	return d.compare(h, "") == nil, n, nil
}

type interruptible struct {
	ctx  context.Context // lives as long as one call of io.Copy
	from io.Reader
}

func (i interruptible) Read(p []byte) (int, error) {
	if i.ctx.Err() != nil {
		return 0, context.Cause(i.ctx)
	}
	return i.from.Read(p)
}
