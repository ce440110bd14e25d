package k3s

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

func (d *remover) service() (Service, error) {
	return d.m.Service(d.init, d.spec(), ServiceOptions{})
}

func (d *remover) lookService(ctx context.Context) (findings, error) {
	svc, err := d.service()
	if err != nil {
		return findings{}, err
	}
	state, err := svc.State(ctx)
	var failed *CommandError
	if errors.As(err, &failed) && d.init == Systemd && !d.m.exists(ctx, "/run/systemd/system") {
		// The machine runs without systemd now, and so nothing runs under it.
		return findings{}, nil
	}
	if err != nil {
		return findings{}, err
	}
	// One that is just ending is started again where nobody stopped it.
	waiting := strings.HasPrefix(state.Detail, "activating") || strings.HasPrefix(state.Detail, "reloading") || strings.HasPrefix(state.Detail, "deactivating")
	if supervised, is := svc.(*supervisedService); is {
		own, err := d.m.supervision(ctx, supervised.spec)
		waiting = err == nil && own != nil && alive(own.Supervisor)
	}
	if state.Running || waiting {
		return findings{finds: []string{d.spec().Name() + " (" + string(svc.Init()) + ")"}}, nil
	}
	return findings{}, nil
}

func (d *remover) stopService(ctx context.Context, _ []string) error {
	svc, err := d.service()
	if err != nil {
		return err
	}
	return svc.Stop(ctx)
}

func (d *remover) processes(ctx context.Context) ([]Process, error) {
	all, err := d.m.kernel.Processes(ctx)
	if err != nil {
		return nil, err
	}
	own, inside := ownProcesses(all, d.b, d.m.kernel.Self())
	if inside {
		return nil, &Problem{
			What: "llmbox itself runs inside this k3s: it would end itself",
			Out:  "Log in to the host and run it there: sudo llmbox uninstall", Err: ErrSetting,
		}
	}
	return own, nil
}

func (d *remover) lookProcesses(ctx context.Context) (findings, error) {
	own, err := d.processes(ctx)
	if err != nil {
		return findings{}, err
	}
	var out findings
	for _, p := range own {
		name := path.Base(p.Exe)
		if len(p.Argv) > 0 {
			name = path.Base(strings.Fields(p.Argv[0] + " ")[0])
		}
		out.finds = append(out.finds, fmt.Sprintf("%s [%d]", name, p.PID))
	}
	return out, nil
}

func (d *remover) endProcesses(ctx context.Context, _ []string) error {
	for range killRounds {
		own, err := d.processes(ctx)
		if err != nil || len(own) == 0 {
			return err
		}
		for _, p := range own {
			if err := d.m.kernel.Kill(ctx, p, syscall.SIGKILL); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(killPause):
		}
	}
	return nil
}

func (d *remover) lookMounts(ctx context.Context) (findings, error) {
	all, err := d.m.mounts(ctx)
	if err != nil {
		return findings{}, err
	}
	var out findings
	for _, m := range ownMounts(all, d.b) {
		out.finds = append(out.finds, m.point)
	}
	for _, dir := range []string{d.b.dataDir, kubeletDir} {
		for _, point := range mountsBelow(all, dir) {
			if !slices.Contains(out.finds, point) {
				out.stays = append(out.stays, point+": k3s did not mount it")
			}
		}
	}
	return out, nil
}

// unmount takes the mounts off, each with some patience; what stays busy or lies on a
// machine that does not answer is detached, so that nothing below it can be deleted.
func (d *remover) unmount(ctx context.Context, _ []string) error {
	all, err := d.m.mounts(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range ownMounts(all, d.b) {
		err := errors.New("not tried")
		for try := 0; try < unmountTries && !m.network(); try++ {
			if err = d.m.kernel.Unmount(ctx, m.point, false); err == nil || !errors.Is(err, syscall.EBUSY) {
				break
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(killPause):
			}
		}
		if err != nil {
			err = d.m.kernel.Unmount(ctx, m.point, true)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

const cgroupDir = "/sys/fs/cgroup"

// lookCgroups finds the groups of pods, in the unified hierarchy and in each old one.
func (d *remover) lookCgroups(ctx context.Context) (findings, error) {
	var out findings
	for _, name := range []string{"kubepods", "kubepods.slice"} {
		for _, pattern := range []string{path.Join(cgroupDir, name), path.Join(cgroupDir, "*", name)} {
			found, _, err := d.m.files.Glob(ctx, pattern)
			if err != nil {
				return findings{}, err
			}
			for _, at := range found {
				if _, err := d.m.files.List(ctx, at); err == nil && !slices.Contains(out.finds, at) {
					out.finds = append(out.finds, at)
				}
			}
		}
	}
	if !d.b.alone && len(out.finds) > 0 {
		out = findings{stays: []string{brief(out.finds) + ": " + d.othersHere()}}
	}
	if d.init != Systemd {
		return out, nil
	}
	// systemd hears of it when its own version 2 group has become empty; in version 1's
	// hierarchies it can miss that, as the service's last processes were not its children.
	group := path.Join("system.slice", d.spec().Name()+".service")
	for _, pattern := range []string{path.Join(cgroupDir, group), path.Join(cgroupDir, "*", group)} {
		found, _, err := d.m.files.Glob(ctx, pattern)
		if err != nil {
			return findings{}, err
		}
		out.finds = append(out.finds, found...)
	}
	return out, nil
}

// removeCgroups removes the empty groups, the innermost first. Those of systemd are
// units of its own.
func (d *remover) removeCgroups(ctx context.Context, finds []string) error {
	if d.init == Systemd && slices.ContainsFunc(finds, func(at string) bool { return strings.HasSuffix(at, ".slice") }) {
		_, err := d.m.command(ctx, serviceDeadline, "systemctl", "stop", "kubepods.slice")
		var failed *CommandError
		if err != nil && !errors.As(err, &failed) {
			return err
		}
	}
	var errs []error
	for _, at := range finds {
		errs = append(errs, removeGroup(ctx, d.m.at(at)))
	}
	return errors.Join(errs...)
}

// removeGroup removes a directory tree by rmdir(2) alone: the files of a control group
// are not files.
func removeGroup(ctx context.Context, at string) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	entries, err := os.ReadDir(at)
	if err != nil {
		if absent(err) {
			return nil
		}
		return fmt.Errorf("removing %s: %w", at, err)
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeGroup(ctx, filepath.Join(at, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := syscall.Rmdir(at); err != nil && !absent(err) {
		return fmt.Errorf("removing %s: %w", at, err)
	}
	return nil
}
