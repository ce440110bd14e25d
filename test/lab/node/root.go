package node

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Where things lie inside the node.
const (
	labInside      = "/lab"
	programsInside = "/opt/lab/bin"
	llmboxInside   = "/opt/lab/llmbox"
)

// enterRoot puts the node's root directory together inside the lab's directory and
// makes it this process' root. Programs and libraries are the machine's, read-only;
// whatever a node writes goes into the lab's directory.
func enterRoot(c config) error {
	root := filepath.Join(c.Dir, "root")
	if err := beginRoot(root, map[string]os.FileMode{"opt/lab/bin": 0o755, "lab": 0o755, "etc/cni/net.d": 0o755}); err != nil {
		return err
	}
	var errs []error
	for _, file := range []string{"passwd", "group", "nsswitch.conf", "ld.so.cache", "protocols", "services", "ethertypes", "localtime"} {
		errs = append(errs, copyIfThere("/etc/"+file, filepath.Join(root, "etc", file)))
	}
	// No name server answers: the node has no way out.
	errs = append(errs, os.WriteFile(filepath.Join(root, "etc", "resolv.conf"), []byte("nameserver 10.99.0.254\n"), 0o644))                        // #nosec G306
	errs = append(errs, os.WriteFile(filepath.Join(root, "etc", "hosts"), []byte("127.0.0.1 localhost\n"+nodeAddress+" "+nodeName+"\n"), 0o644))   // #nosec G306
	errs = append(errs, os.WriteFile(filepath.Join(root, "opt", "lab", "llmbox"), nil, 0o755))                                                     // #nosec G306
	errs = append(errs, os.WriteFile(filepath.Join(root, "etc", "os-release"), []byte("ID=llmbox-lab\nPRETTY_NAME=\"llmbox lab node\"\n"), 0o644)) // #nosec G306
	errs = append(errs, os.WriteFile(filepath.Join(root, "etc", "machine-id"), []byte("00000000000000000000000000000000\n"), 0o644))               // #nosec G306
	errs = append(errs,
		bind(c.Programs, filepath.Join(root, programsInside), true),
		bind(c.Dir, filepath.Join(root, labInside), false),
		mount("proc", filepath.Join(root, "proc"), "proc"),
		mount("sysfs", filepath.Join(root, "sys"), "sysfs"),
		unix.Mount("/sys/fs/cgroup", filepath.Join(root, "sys/fs/cgroup"), "", unix.MS_BIND|unix.MS_REC, ""),
		unix.Mount("/dev", filepath.Join(root, "dev"), "", unix.MS_BIND|unix.MS_REC, ""),
	)
	if c.LLMBox != "" {
		errs = append(errs, bind(c.LLMBox, filepath.Join(root, llmboxInside), true))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("making the node's root: %w", err)
	}
	if c.simulatesGPUs() {
		if err := addGPUs(c, root); err != nil {
			return fmt.Errorf("making the node's root: %w", err)
		}
	}
	return leaveFor(root)
}

// beginRoot makes the directories of a root, with those that are named beside the usual
// ones, and shows the machine's programs and libraries in it.
func beginRoot(root string, more map[string]os.FileMode) error {
	// Nothing mounted from here on is seen outside.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("separating mounts: %w", err)
	}
	dirs := map[string]os.FileMode{
		"": 0o755, "etc": 0o755, "proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755, "tmp": 0o777 | os.ModeSticky,
		"var/lib": 0o755, "var/log": 0o755, "var/tmp": 0o777 | os.ModeSticky, "root": 0o700, "mnt": 0o755, ".old": 0o755,
		"etc/alternatives": 0o755, "etc/ssl": 0o755,
	}
	maps.Copy(dirs, more)
	for dir, mode := range dirs {
		path := filepath.Join(root, dir)
		if err := os.MkdirAll(path, mode.Perm()); err != nil {
			return fmt.Errorf("making the node's root: %w", err)
		}
		if err := os.Chmod(path, mode); err != nil { // #nosec G302 -- a root directory is for all its users
			return fmt.Errorf("making the node's root: %w", err)
		}
	}
	// A root must be a mount of its own.
	if err := unix.Mount(root, root, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("making the node's root: %w", err)
	}
	var errs []error
	for _, dir := range []string{"usr", "bin", "sbin", "lib", "lib64", "lib32", "libx32"} {
		errs = append(errs, borrow(root, dir))
	}
	for _, dir := range []string{"etc/alternatives", "etc/ssl"} {
		errs = append(errs, bind("/"+dir, filepath.Join(root, dir), true))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("making the node's root: %w", err)
	}
	return nil
}

// leaveFor makes a directory this process' root and forgets the former one.
func leaveFor(root string) error {
	if err := unix.PivotRoot(root, filepath.Join(root, ".old")); err != nil {
		return fmt.Errorf("entering the node's root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return fmt.Errorf("entering the node's root: %w", err)
	}
	if err := unix.Unmount("/.old", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leaving the machine's root: %w", err)
	}
	// Pods ask for volumes that follow the node's mounts.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("sharing mounts with pods: %w", err)
	}
	return os.Remove("/.old")
}

// borrow gives the node a directory of the machine, or the link the machine has.
func borrow(root, dir string) error {
	target, err := os.Readlink("/" + dir)
	if err == nil {
		if err := os.Symlink(target, filepath.Join(root, dir)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		return nil
	}
	if _, err := os.Stat("/" + dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil { // #nosec G301 -- as /usr
		return err
	}
	return bind("/"+dir, filepath.Join(root, dir), true)
}

func bind(from, to string, readOnly bool) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting %s: %w", from, err)
	}
	if !readOnly {
		return nil
	}
	if err := unix.Mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("mounting %s read-only: %w", from, err)
	}
	return nil
}

func mount(kind, to, name string) error {
	if err := unix.Mount(name, to, kind, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mounting %s: %w", kind, err)
	}
	return nil
}

func copyIfThere(from, to string) error {
	raw, err := os.ReadFile(from) // #nosec G304 -- a fixed list
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return os.WriteFile(to, raw, 0o644) // #nosec G306 G703 -- world-readable as its original
}
