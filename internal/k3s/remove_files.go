package k3s

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"syscall"

	"github.com/llmbox-dev/llmbox/internal/host"
)

// unitFiles are the files of the service, in whatever form.
func (d *remover) unitFiles() []string {
	s := d.spec()
	return []string{
		s.unitFile(), s.environmentFile(), "/etc/systemd/system/multi-user.target.wants/" + s.Name() + ".service",
		s.scriptFile(), s.rotateFile(), "/etc/runlevels/default/" + s.Name(),
	}
}

func (d *remover) lookUnits(ctx context.Context) (findings, error) {
	var out findings
	for _, name := range d.unitFiles() {
		info, err := d.m.files.Stat(ctx, name)
		if err != nil {
			if absent(err) {
				continue
			}
			return findings{}, fmt.Errorf("looking at %s: %w", name, err)
		}
		if info.Mode&fs.ModeSymlink != 0 {
			if own, err := d.leadsToOurs(ctx, name); err != nil {
				return findings{}, err
			} else if own {
				out.finds = append(out.finds, name)
			}
			continue
		}
		data, _, err := d.m.read(ctx, name)
		if err != nil {
			return findings{}, err
		}
		if ours(data) || d.r.Files[name] == hashBytes(data) {
			out.finds = append(out.finds, name)
		} else {
			out.stays = append(out.stays, name+": llmbox did not write it")
		}
	}
	out.finds = append(out.finds, d.temporaries(ctx, d.unitFiles()...)...)
	return out, nil
}

// leadsToOurs says whether a link leads to the service of ours, or to where it was.
func (d *remover) leadsToOurs(ctx context.Context, name string) (bool, error) {
	to, err := d.m.files.Readlink(ctx, name)
	if err != nil {
		return false, fmt.Errorf("reading link %s: %w", name, err)
	}
	if !path.IsAbs(to) {
		to = path.Join(path.Dir(name), to)
	}
	if to != d.spec().unitFile() && to != d.spec().scriptFile() {
		return false, nil
	}
	data, present, err := d.m.read(ctx, to)
	return !present || ours(data) || d.r.Files[to] == hashBytes(data), err
}

func (d *remover) removeUnits(ctx context.Context, finds []string) error {
	svc, err := d.service()
	if err != nil {
		return err
	}
	if err := svc.Remove(ctx); err != nil {
		return err
	}
	if err := d.unlink(ctx, finds); err != nil {
		return err
	}
	if err := svc.Load(ctx); err != nil && !errors.Is(err, host.ErrNotInstalled) {
		return err
	}
	return nil
}

// temporaries are what writing left behind when it was cut off.
func (d *remover) temporaries(ctx context.Context, names ...string) []string {
	var out []string
	for _, name := range names {
		at := path.Join(path.Dir(name), temporaryOf(path.Base(name)))
		if d.m.exists(ctx, at) {
			out = append(out, at)
		}
	}
	return out
}

// there keeps of some paths those at which something stands that was not there before
// llmbox.
func (d *remover) there(ctx context.Context, names ...string) []string {
	var out []string
	for _, name := range names {
		if d.m.exists(ctx, name) && !slices.Contains(d.r.Before, name) && !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}

// empty keeps of some directories, the innermost first, those that have nothing in
// them but what goes.
func (d *remover) empty(ctx context.Context, going []string, dirs ...string) []string {
	var out []string
	for _, dir := range dirs {
		names, err := d.m.files.List(ctx, dir)
		if err != nil || slices.Contains(d.r.Before, dir) {
			continue
		}
		stays := slices.ContainsFunc(names, func(name string) bool {
			at := path.Join(dir, name)
			return !slices.Contains(going, at) && !slices.Contains(out, at)
		})
		if !stays {
			out = append(out, dir)
		}
	}
	return out
}

func (d *remover) lookRuntime(ctx context.Context) (findings, error) {
	all, err := d.staying(ctx)
	if err != nil {
		return findings{}, err
	}
	var out findings
	dirs := []string{runDir}
	if d.b.alone {
		dirs = append(dirs, "/run/flannel")
	}
	for _, dir := range dirs {
		removable, stays := d.removable(ctx, dir, all)
		out.stays = append(out.stays, stays...)
		if removable {
			out.finds = append(out.finds, dir)
		}
	}
	var names []string
	for _, suffix := range []string{"json", "lock"} {
		names = append(names, d.m.superviseFile(d.spec(), suffix))
	}
	names = append(names, "/run/"+d.spec().Name()+".pid", path.Join(supervisorDir, "k3s-rules"))
	names = append(names, d.temporaries(ctx, d.m.superviseFile(d.spec(), "json"), path.Join(supervisorDir, "k3s-rules"))...)
	out.finds = append(out.finds, d.there(ctx, names...)...)
	out.finds = append(out.finds, d.empty(ctx, out.finds, supervisorDir)...)
	return out, nil
}

// staying are the mounts that k3s did not make. The others are gone by the time that
// files are removed; where one is not, nothing behind it is touched, and what is left
// is an error.
func (d *remover) staying(ctx context.Context) ([]mount, error) {
	all, err := d.m.mounts(ctx)
	return slices.DeleteFunc(all, d.b.made), err
}

// storageDir holds the volumes of pods on this machine.
func (d *remover) storageDir() string { return path.Join(d.b.dataDir, "storage") }

func (d *remover) lookData(ctx context.Context) (findings, error) {
	all, err := d.staying(ctx)
	if err != nil {
		return findings{}, err
	}
	names := []string{d.b.dataDir}
	if d.b.alone {
		names = append(names, kubeletDir, "/var/log/pods", "/var/log/containers")
	}
	out := findings{}
	for _, name := range names {
		removable, stays := d.removable(ctx, name, all)
		out.stays = append(out.stays, stays...)
		if removable {
			out.finds = append(out.finds, name)
		}
	}
	if !d.b.alone {
		out.stays = append(out.stays, kubeletDir+", /var/log/pods: "+d.othersHere())
	}
	out.finds = append(out.finds, d.empty(ctx, out.finds, path.Dir(d.b.dataDir))...)
	// The parent is only ours where it is k3s's own.
	out.finds = slices.DeleteFunc(out.finds, func(name string) bool { return name == path.Dir(d.b.dataDir) && name != path.Dir(DefaultDataDir) })
	return out, nil
}

// Why something stays. A shared directory stays itself; of what is in it only what
// was there before does.
const (
	wasBefore = "was there before llmbox"
	wasShared = "the directory was there before llmbox"
)

// keeps says what stays below a directory.
func (d *remover) keeps(all []mount) map[string]string {
	out := map[string]string{}
	shared := sharedDirs(d.b.dataDir)
	for _, name := range d.r.Before {
		out[name] = wasBefore
		if slices.Contains(shared, name) {
			out[name] = wasShared
		}
	}
	for _, m := range all {
		out[m.point] = "is mounted"
	}
	if d.o.KeepData {
		out[d.storageDir()] = "is kept"
	}
	return out
}

// removable says whether anything at a directory or below it goes, and what does not.
// A directory that was there before stays, what came into it later goes.
func (d *remover) removable(ctx context.Context, dir string, all []mount) (bool, []string) {
	if !d.m.exists(ctx, dir) {
		return false, nil
	}
	keeps := d.keeps(all)
	var stays []string
	for at, why := range keeps {
		if at != dir && within(at, dir) && d.m.exists(ctx, at) {
			stays = append(stays, at+": "+why)
		}
	}
	slices.Sort(stays)
	_, itself := keeps[dir]
	if !itself && len(stays) == 0 {
		return true, nil
	}
	// Is there anything beside what stays?
	left := d.leaves(ctx, dir, keeps)
	return left, stays
}

// leaves says whether something below a directory goes.
func (d *remover) leaves(ctx context.Context, dir string, keeps map[string]string) bool {
	names, err := d.m.files.List(ctx, dir)
	if err != nil {
		return true
	}
	for _, name := range names {
		at := path.Join(dir, name)
		if why, kept := keeps[at]; kept {
			if why == wasShared && d.leaves(ctx, at, keeps) {
				return true
			}
			continue
		}
		holds := false
		for kept := range keeps {
			holds = holds || kept != at && within(kept, at) && d.m.exists(ctx, kept)
		}
		if !holds || d.leaves(ctx, at, keeps) {
			return true
		}
	}
	return false
}

func (d *remover) lookConfig(ctx context.Context) (findings, error) {
	all, err := d.staying(ctx)
	if err != nil {
		return findings{}, err
	}
	var out findings
	for _, name := range []string{ConfigDir, "/etc/rancher/node"} {
		removable, stays := d.removable(ctx, name, all)
		out.stays = append(out.stays, stays...)
		if removable {
			out.finds = append(out.finds, name)
		}
	}
	out.finds = append(out.finds, d.empty(ctx, out.finds, "/etc/rancher")...)
	return out, nil
}

func (d *remover) lookBinary(ctx context.Context) (findings, error) {
	var out findings
	for _, dir := range d.m.binDirs(d.r) {
		at := path.Join(dir, binaryName)
		out.finds = append(out.finds, d.temporaries(ctx, at)...)
		for _, link := range []string{"kubectl", "crictl", "ctr"} {
			name := path.Join(dir, link)
			to, err := d.m.files.Readlink(ctx, name)
			if err != nil {
				continue
			}
			if !path.IsAbs(to) {
				to = path.Join(dir, to)
			}
			if to == at && !d.foreignBinary(ctx, at) {
				out.finds = append(out.finds, name)
			}
		}
		sum, err := d.m.hashOf(ctx, at)
		if err != nil {
			return findings{}, err
		}
		switch {
		case sum == "":
		case d.r.owns(at, sum):
			out.finds = append(out.finds, at)
		default:
			out.stays = append(out.stays, at+": llmbox did not put it there")
		}
	}
	if own := path.Join(d.m.options.State, "bin"); !slices.Contains(out.finds, own) {
		out.finds = append(out.finds, d.empty(ctx, out.finds, own)...)
	}
	return out, nil
}

// foreignBinary says whether a k3s is there that is not ours.
func (d *remover) foreignBinary(ctx context.Context, at string) bool {
	sum, err := d.m.hashOf(ctx, at)
	return err != nil || sum != "" && !d.r.owns(at, sum)
}

func (d *remover) lookLogs(ctx context.Context) (findings, error) {
	var names []string
	if !d.o.KeepLogs {
		names = append(names, d.m.logFile())
		for i := 1; i <= keptLogs; i++ {
			names = append(names, fmt.Sprintf("%s.%d", d.m.logFile(), i))
		}
	}
	if !d.o.KeepData {
		names = append(names, d.m.cacheDir())
	}
	out := findings{finds: d.there(ctx, names...)}
	out.finds = append(out.finds, d.empty(ctx, out.finds, path.Dir(d.m.cacheDir()))...)
	return out, nil
}

func (d *remover) lookRecord(ctx context.Context) (findings, error) {
	return findings{finds: append(d.there(ctx, d.m.recordFile()), d.temporaries(ctx, d.m.recordFile())...)}, nil
}

func (d *remover) lookAdopted(ctx context.Context) (findings, error) {
	var out findings
	for name, sum := range d.r.Files {
		data, present, err := d.m.read(ctx, name)
		if err != nil {
			return findings{}, err
		}
		if present && (ours(data) || hashBytes(data) == sum) {
			out.finds = append(out.finds, name)
		}
	}
	slices.Sort(out.finds)
	return out, nil
}

func (d *remover) unlink(ctx context.Context, finds []string) error {
	var errs []error
	for _, name := range finds {
		errs = append(errs, d.m.remove(ctx, name))
	}
	return errors.Join(errs...)
}

// removeTrees removes directories with all in them, but nothing that stays, and
// nothing behind a mount: that would be somebody's data.
func (d *remover) removeTrees(ctx context.Context, finds []string) error {
	all, err := d.m.mounts(ctx)
	if err != nil {
		return err
	}
	keeps := d.keeps(all)
	var errs []error
	for _, name := range finds {
		_, err := d.removeTree(ctx, name, keeps, 0)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// removeTree says whether something stayed.
func (d *remover) removeTree(ctx context.Context, name string, keeps map[string]string, device uint64) (stayed bool, err error) {
	if ctx.Err() != nil {
		return true, ctx.Err()
	}
	at := d.m.at(name)
	info, err := os.Lstat(at)
	if err != nil {
		if absent(err) {
			return false, nil
		}
		return true, fmt.Errorf("removing %s: %w", name, err)
	}
	if !info.IsDir() {
		if err := os.Remove(at); err != nil && !absent(err) {
			return true, fmt.Errorf("removing %s: %w", name, err)
		}
		return false, nil
	}
	if raw, ok := info.Sys().(*syscall.Stat_t); ok {
		if device != 0 && raw.Dev != device {
			return true, fmt.Errorf("removing %s: %w", name, ErrMounted)
		}
		device = raw.Dev
	}
	stayed, err = d.removeEntries(ctx, name, at, keeps, device)
	if _, kept := keeps[name]; kept || stayed || err != nil {
		return true, err
	}
	if err := os.Remove(at); err != nil && !absent(err) {
		return true, fmt.Errorf("removing %s: %w", name, err)
	}
	return false, nil
}

func (d *remover) removeEntries(ctx context.Context, name, at string, keeps map[string]string, device uint64) (stayed bool, err error) {
	dir, err := os.Open(at) // #nosec G304 -- below a directory of k3s
	if err != nil {
		if absent(err) {
			return false, nil
		}
		return true, fmt.Errorf("removing %s: %w", name, err)
	}
	defer func() { _ = dir.Close() }()
	entries, err := dir.Readdirnames(-1)
	if err != nil && !errors.Is(err, io.EOF) {
		return true, fmt.Errorf("removing %s: %w", name, err)
	}
	var errs []error
	for _, e := range entries {
		below := path.Join(name, e)
		if why, kept := keeps[below]; kept && why != wasShared {
			stayed = true
			continue
		}
		left, err := d.removeTree(ctx, below, keeps, device)
		stayed = stayed || left
		if err != nil {
			errs = append(errs, err)
		}
		if ctx.Err() != nil {
			break
		}
	}
	return stayed, errors.Join(errs...)
}
