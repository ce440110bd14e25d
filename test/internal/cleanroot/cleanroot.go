// Package cleanroot runs programs in root file systems that stay as they are: what a visit
// writes goes to a folder of its own, and its mounts and processes end with it. It knows
// neither what is in a root nor what is run there.
package cleanroot

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Path is what a login sets.
const Path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// enter is run by the first process of the namespaces.
const enter = `
lower=$1 disk=$2 mounts=$3 user=$4
shift 4
mount -t overlay -o "lowerdir=$lower,upperdir=$disk/written,workdir=$disk/overlay" root "$disk/root"
cd "$disk/root"
mount -t proc proc proc
mount -t tmpfs -o mode=755 dev dev
for node in null:3 zero:5 full:7 random:8 urandom:9; do
  mknod -m 666 "dev/${node%:*}" c 1 "${node#*:}"
done
mknod -m 666 dev/tty c 5 0
mkdir dev/pts
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=755 run run
eval "$mounts"
exec chroot --userspec="$user:$user" --groups="$user" . "$@"
`

// Root is a root file system that can be visited.
type Root struct {
	// Lower is what stays as it is: a folder that debootstrap made.
	Lower string
	// Disk is an empty folder that takes what is written. It is kept between visits; no
	// comma and no colon may be in its name.
	Disk string
	// Mounts is run by a shell in the root before each visit.
	Mounts string
}

// Lay puts a file over the root, before the first visit.
func (r Root) Lay(name string, content []byte, mode fs.FileMode, owner int) error {
	at, err := r.over(name)
	if err != nil {
		return err
	}
	if err := os.WriteFile(at, content, mode); err != nil {
		return fmt.Errorf("laying %s over the root: %w", name, err)
	}
	if owner == 0 {
		return nil
	}
	for _, own := range []string{at, filepath.Dir(at)} {
		if err := os.Chown(own, owner, owner); err != nil {
			return fmt.Errorf("giving %s to user %d: %w", name, owner, err)
		}
	}
	return nil
}

// Link puts a symbolic link over the root.
func (r Root) Link(name, target string) error {
	at, err := r.over(name)
	if err != nil {
		return err
	}
	if err := os.Symlink(target, at); err != nil {
		return fmt.Errorf("laying %s over the root: %w", name, err)
	}
	return nil
}

// Hide takes a file out of the root.
func (r Root) Hide(name string) error {
	at, err := r.over(name)
	if err != nil {
		return err
	}
	// The overlay's sign for a file that is gone.
	if err := unix.Mknod(at, unix.S_IFCHR, 0); err != nil {
		return fmt.Errorf("hiding %s: %w", name, err)
	}
	return nil
}

// over is where a file of the layer between the root and what is written lies. A folder of
// the root keeps its mode.
func (r Root) over(name string) (string, error) {
	var dirs []string
	for dir := filepath.Dir(name); dir != "." && dir != "/"; dir = filepath.Dir(dir) {
		dirs = append(dirs, dir)
	}
	slices.Reverse(dirs)
	for _, dir := range append([]string{"."}, dirs...) {
		mode := fs.FileMode(0o755)
		if info, err := os.Stat(filepath.Join(r.Lower, dir)); err == nil {
			mode = info.Mode().Perm()
		}
		if err := os.MkdirAll(filepath.Join(r.Disk, "laid", dir), mode); err != nil {
			return "", fmt.Errorf("laying %s over the root: %w", name, err)
		}
	}
	return filepath.Join(r.Disk, "laid", name), nil
}

// Command is the beginning of a command line: what follows is run in the root by that
// user. flags are more ones of unshare.
func (r Root) Command(user int, flags ...string) ([]string, error) {
	if err := r.makeRoom(); err != nil {
		return nil, err
	}
	return slices.Concat(
		[]string{"unshare", "--mount", "--ipc", "--pid", "--fork", "--kill-child"}, flags,
		[]string{"sh", "-euc", enter, "sh", r.lower(), r.Disk, r.Mounts, strconv.Itoa(user)},
	), nil
}

// makeRoom makes the folders on the disk.
func (r Root) makeRoom() error {
	for _, dir := range []string{"laid", "written", "overlay", "root"} {
		if err := os.MkdirAll(filepath.Join(r.Disk, dir), 0o755); err != nil { // #nosec G301 -- a root is everybody's
			return fmt.Errorf("making room for what is written: %w", err)
		}
	}
	return nil
}

func (r Root) lower() string { return filepath.Join(r.Disk, "laid") + ":" + r.Lower }

// Changes are the files that visits wrote, and with "gone" before it each that they took
// away.
func (r Root) Changes() ([]string, error) {
	var out []string
	written := filepath.Join(r.Disk, "written")
	err := filepath.WalkDir(written, func(at string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name := strings.TrimPrefix(at, written)
		if d.Type()&fs.ModeCharDevice != 0 {
			name = "gone " + name
		}
		out = append(out, name)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("looking at what was written: %w", err)
	}
	return out, nil
}

// Written is where a file lies that a visit wrote.
func (r Root) Written(name string) string { return filepath.Join(r.Disk, "written", name) }
