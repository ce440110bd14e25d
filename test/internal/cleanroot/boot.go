package cleanroot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// boot is run in the cgroups that systemd may have for itself.
const boot = `
lower=$1 disk=$2 name=$3 network=$4
mount -t overlay -o "lowerdir=$lower,upperdir=$disk/written,workdir=$disk/overlay" root "$disk/root"
exec systemd-nspawn --quiet --directory="$disk/root" --machine="$name" --boot --register=no --keep-unit \
  --network-namespace-path="$network" --resolv-conf=off --timezone=off --link-journal=no --console=read-only
`

// Boot has the root's own systemd run as the first process of a container, in the network
// that a file names, until it powers off or the context ends. It returns what came on the
// console.
func (r Root) Boot(ctx context.Context, name, network string) (console string, err error) {
	if err := r.makeRoom(); err != nil {
		return "", err
	}
	groups, err := makeCgroups(name)
	defer func() { err = errors.Join(err, removeCgroups(groups)) }()
	if err != nil {
		return "", err
	}
	step := ""
	for _, group := range groups {
		step += "echo $$ >" + filepath.Join(group, "cgroup.procs") + " && "
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", step+`exec "$@"`, "sh", // #nosec G204 -- a test's own
		"unshare", "--mount", "sh", "-euc", boot, "sh", r.lower(), r.Disk, name, network)
	cmd.Env = append(os.Environ(), "SYSTEMD_NSPAWN_API_VFS_WRITABLE=no")
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil {
		cmd.Env = append(cmd.Env, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=0")
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, 10*time.Second
	// systemd is asked to stop before it is made to.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("booting %s: %w", name, err)
	}
	return out.String(), nil
}

// makeCgroups makes one of that name in each hierarchy of this machine.
func makeCgroups(name string) ([]string, error) {
	files, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil {
		return nil, fmt.Errorf("looking for cgroups: %w", err)
	}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		files = []string{"/sys/fs/cgroup/cgroup.procs"}
	}
	var out []string
	for _, file := range files {
		above := filepath.Dir(file)
		group := filepath.Join(above, name)
		if err := os.Mkdir(group, 0o755); err != nil { // #nosec G301 -- as all cgroups
			return out, fmt.Errorf("making a cgroup: %w", err)
		}
		out = append(out, group)
		for _, setting := range []string{"cpuset.cpus", "cpuset.mems"} {
			// Version 1 leaves a new cpuset empty, and an empty one takes no process.
			value, err := os.ReadFile(filepath.Join(above, setting)) // #nosec G304 -- a cgroup
			if err != nil {
				continue
			}
			if err := os.WriteFile(filepath.Join(group, setting), bytes.TrimSpace(value), 0o600); err != nil { // #nosec G703 -- a cgroup of the test
				return out, fmt.Errorf("filling a cgroup: %w", err)
			}
		}
	}
	return out, nil
}

// removeCgroups removes what a container left of them, the inner ones first.
func removeCgroups(groups []string) error {
	var all []error
	for _, group := range groups {
		var dirs []string
		err := filepath.WalkDir(group, func(at string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, at)
			}
			return err
		})
		if err != nil {
			all = append(all, fmt.Errorf("looking through a cgroup: %w", err))
			continue
		}
		slices.SortFunc(dirs, func(a, b string) int { return strings.Compare(b, a) })
		for _, dir := range dirs {
			if err := os.Remove(dir); err != nil {
				all = append(all, fmt.Errorf("removing a cgroup: %w", err))
			}
		}
	}
	return errors.Join(all...)
}
