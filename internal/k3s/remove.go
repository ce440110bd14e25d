package k3s

import (
	"bytes"
	"cmp"
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

	"go.yaml.in/yaml/v3"

	"github.com/llmbox-dev/llmbox/internal/host"
)

const (
	// killRounds bounds how often processes are looked for again: one that is being
	// started while the others end shows up in the next round.
	killRounds = 10
	killPause  = 200 * time.Millisecond
	// unmountTries is how often a busy mount is tried before it is detached: what held
	// it has just been ended.
	unmountTries = 5
	// linkDeadline bounds one call that changes the network.
	linkDeadline = 20 * time.Second
	// flannelNetwork is how k3s names the network of its pods (k3s-io/k3s
	// pkg/agent/flannel/setup.go).
	flannelNetwork = "cbr0"
)

// RemoveOptions say what stays.
type RemoveOptions struct {
	// KeepData keeps the volumes of pods and the downloaded binary.
	KeepData bool
	// Others are the names of other Kubernetes distributions on this machine. What they
	// could share with k3s is left alone.
	Others []string
	// KeepLogs keeps the log of k3s.
	KeepLogs bool
}

// Removal is one action of an uninstall. It can be repeated: it looks for what is
// there and takes that away.
type Removal struct {
	// Name is short and stable, such as "mounts"; Title one sentence.
	Name, Title string
	// Finds are the things that are there now, each as a person would call it.
	Finds []string
	// Stays are things that are left alone, with the reason.
	Stays []string

	look func(context.Context) (findings, error)
	act  func(context.Context, []string) error
}

// findings is what an action found.
type findings struct {
	finds, stays []string
}

// RemovalResult is how an action ended.
type RemovalResult string

// The results.
const (
	// Removed means that it was there and is gone.
	Removed RemovalResult = "removed"
	// Nothing means that there was nothing.
	Nothing RemovalResult = "nothing"
	// Left means that something is still there.
	Left RemovalResult = "left"
)

// RemovalOutcome is how an action ended.
type RemovalOutcome struct {
	Name   string
	Result RemovalResult
	// Finds are the things that were there; Remains those that still are.
	Finds, Remains, Stays []string
	Err                   error
}

// remover is one uninstall.
type remover struct {
	m    *Machine
	r    *Record
	o    RemoveOptions
	b    belongs
	init Init
	// owned says that there is a k3s of ours here, or what is left of one.
	owned bool
}

// PlanRemoval lists what an uninstall would do, in its order, and what is there for
// it now. A machine without anything of ours gets an empty list.
func (m *Machine) PlanRemoval(ctx context.Context, o RemoveOptions) ([]Removal, error) {
	d, err := m.remover(ctx, o)
	if err != nil {
		return nil, err
	}
	var out []Removal
	for _, a := range d.actions() {
		found, err := a.look(ctx)
		if err != nil {
			return nil, fmt.Errorf("looking for %s: %w", a.Name, err)
		}
		a.Finds, a.Stays = found.finds, found.stays
		out = append(out, a)
	}
	return out, nil
}

// Remove takes away everything of this k3s. An action that leaves something does not
// keep the others from their work, save those that would touch what is still in use;
// the record goes last and only when all else is gone, so that the next call knows
// what is left. A closed stop begins no further action.
func (m *Machine) Remove(ctx context.Context, o RemoveOptions, stop <-chan struct{}, report Report) ([]RemovalOutcome, error) {
	d, err := m.remover(ctx, o)
	if err != nil {
		return nil, err
	}
	var outcomes []RemovalOutcome
	var errs []error
	for _, a := range d.actions() {
		select {
		case <-stop:
			return outcomes, errors.Join(append(errs, context.Canceled)...)
		default:
		}
		if ctx.Err() != nil {
			return outcomes, errors.Join(append(errs, ctx.Err())...)
		}
		if a.Name == recordAction && len(errs) > 0 {
			break
		}
		out := a.run(ctx, report)
		outcomes = append(outcomes, out)
		if out.Err != nil {
			errs = append(errs, out.Err)
		}
		if out.Err != nil && (a.Name == "service" || a.Name == "processes") {
			// k3s still runs: it would bring back what is taken away now.
			break
		}
	}
	return outcomes, errors.Join(errs...)
}

func (a Removal) run(ctx context.Context, report Report) RemovalOutcome {
	out := RemovalOutcome{Name: a.Name, Result: Nothing}
	found, err := a.look(ctx)
	if err != nil {
		out.Result, out.Err = Left, fmt.Errorf("looking for %s: %w", a.Name, err)
		return out
	}
	out.Finds, out.Stays = found.finds, found.stays
	if len(found.finds) == 0 {
		return out
	}
	report.say(PhaseRemove, a.Title+": "+brief(found.finds))
	err = a.act(ctx, found.finds)
	left, looking := a.look(ctx)
	out.Result, out.Remains = Removed, left.finds
	if err != nil || looking != nil || len(left.finds) > 0 {
		out.Result = Left
		if err == nil && looking == nil {
			err = fmt.Errorf("%s: still there: %s: %w", a.Name, brief(left.finds), errLeft)
		}
		out.Err = errors.Join(err, looking)
	}
	return out
}

var errLeft = errors.New("could not be removed")

func brief(list []string) string {
	const most = 4
	if len(list) <= most {
		return strings.Join(list, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(list[:most], ", "), len(list)-most)
}

const recordAction = "record"

// remover finds out what is ours.
func (m *Machine) remover(ctx context.Context, o RemoveOptions) (*remover, error) {
	r, err := m.Record(ctx)
	if err != nil {
		return nil, err
	}
	d := &remover{m: m, r: r, o: o, owned: !r.Empty() || r.DataDir != ""}
	dataDir := cmp.Or(r.DataDir, m.options.DataDir)
	if !d.owned {
		// The record can have been lost. Files that say that they are ours speak for it.
		config, present, err := m.read(ctx, ConfigFile)
		if err != nil {
			return nil, err
		}
		if present && ours(config) {
			d.owned = true
			var c struct {
				DataDir string `yaml:"data-dir"`
			}
			if yaml.Unmarshal(config, &c) == nil && path.IsAbs(c.DataDir) {
				dataDir = path.Clean(c.DataDir)
			}
		}
	}
	if d.init = r.Init; d.init == "" {
		if d.init, err = m.ChooseInit(ctx, ""); err != nil {
			return nil, err
		}
	}
	if !safeDataDir(dataDir) {
		return nil, fmt.Errorf("removing k3s: %q is no data directory: %w", dataDir, ErrSetting)
	}
	d.b = belongs{dataDir: dataDir, binary: r.Binary.Path, alone: len(o.Others) == 0}
	return d, nil
}

// safeDataDir refuses what could only be a mistake.
func safeDataDir(dir string) bool {
	const least = 2
	return path.IsAbs(dir) && path.Clean(dir) == dir && strings.Count(dir, "/") >= least && !slices.Contains([]string{
		"/var/lib", "/usr/local", "/usr/bin", "/usr/lib", "/usr/share", "/var/log", "/var/cache", "/home/root", "/etc/rancher", "/var/lib/llmbox",
	}, dir)
}

func (d *remover) spec() ServiceSpec {
	s := ServiceSpecOf(d.r)
	s.Log = d.m.logFile()
	return s
}

// actions are what is done, in this order: first what makes new things, then what is
// in use, then what the tools within the data directory are still needed for, then
// files, and the record last.
func (d *remover) actions() []Removal {
	if !d.owned {
		return nil
	}
	if d.r.Adopted {
		return []Removal{
			{Name: "files", Title: "remove what llmbox wrote", look: d.lookAdopted, act: d.unlink},
			{Name: recordAction, Title: "forget k3s", look: d.lookRecord, act: d.unlink},
		}
	}
	return []Removal{
		{Name: "service", Title: "stop k3s", look: d.lookService, act: d.stopService},
		{Name: "processes", Title: "end the pods' processes", look: d.lookProcesses, act: d.endProcesses},
		{Name: "mounts", Title: "unmount the pods' volumes", look: d.lookMounts, act: d.unmount},
		{Name: "namespaces", Title: "remove the pods' network namespaces", look: d.lookNamespaces, act: d.removeNamespaces},
		{Name: "links", Title: "remove network links", look: d.lookLinks, act: d.removeLinks},
		{Name: "rules", Title: "remove packet filter rules", look: d.lookRules, act: d.removeRules},
		{Name: "cgroups", Title: "remove control groups", look: d.lookCgroups, act: d.removeCgroups},
		{Name: "units", Title: "remove the service", look: d.lookUnits, act: d.removeUnits},
		{Name: "cni", Title: "remove the state of the pods' network", look: d.lookCNI, act: d.removeTrees},
		{Name: "runtime", Title: "remove runtime files", look: d.lookRuntime, act: d.removeTrees},
		{Name: "data", Title: "remove k3s's data", look: d.lookData, act: d.removeTrees},
		{Name: "config", Title: "remove k3s's configuration", look: d.lookConfig, act: d.removeTrees},
		{Name: "binary", Title: "remove the k3s binary", look: d.lookBinary, act: d.unlink},
		{Name: "logs", Title: "remove logs and the cache", look: d.lookLogs, act: d.removeTrees},
		{Name: recordAction, Title: "forget k3s", look: d.lookRecord, act: d.unlink},
	}
}

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
	waiting := strings.HasPrefix(state.Detail, "activating") || strings.HasPrefix(state.Detail, "reloading")
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

// networks are the CNI networks of this k3s: the ones of its configuration, which may
// be gone already, and the name that k3s always gives.
func (d *remover) networks(ctx context.Context) []string {
	out := []string{flannelNetwork}
	found, _, err := d.m.files.Glob(ctx, path.Join(d.b.dataDir, "agent/etc/cni/net.d/*"))
	if err != nil {
		return out
	}
	for _, name := range found {
		data, present, err := d.m.read(ctx, name)
		if err != nil || !present {
			continue
		}
		// JSON is YAML.
		var c struct {
			Name string `yaml:"name"`
		}
		if yaml.Unmarshal(data, &c) == nil && c.Name != "" && !slices.Contains(out, c.Name) {
			out = append(out, c.Name)
		}
	}
	return out
}

const netnsDir = "/run/netns"

// lookNamespaces finds the network namespaces of pods: those that the state of our
// networks names, and those that no process is in any more. Podman and nerdctl name
// theirs alike.
func (d *remover) lookNamespaces(ctx context.Context) (findings, error) {
	names, err := d.m.files.List(ctx, netnsDir)
	if err != nil {
		if absent(err) {
			return findings{}, nil
		}
		return findings{}, fmt.Errorf("listing network namespaces: %w", err)
	}
	named := d.namespacesOfState(ctx)
	used := map[uint64]bool{}
	all, err := d.m.kernel.Processes(ctx)
	if err != nil {
		return findings{}, err
	}
	for _, p := range all {
		used[p.NetNS] = true
	}
	var out findings
	for _, name := range names {
		if !strings.HasPrefix(name, "cni-") {
			continue
		}
		at := path.Join(netnsDir, name)
		inode, err := d.m.kernel.NetNSOf(ctx, at)
		if err == nil && used[inode] && !named[name] {
			out.stays = append(out.stays, at+": somebody else's processes are in it")
			continue
		}
		out.finds = append(out.finds, at)
	}
	return out, nil
}

// namespacesOfState reads libcni's cache: which namespace each pod of our networks had.
func (d *remover) namespacesOfState(ctx context.Context) map[string]bool {
	out := map[string]bool{}
	for _, network := range d.networks(ctx) {
		found, _, err := d.m.files.Glob(ctx, "/var/lib/cni/results/"+network+"-*")
		if err != nil {
			continue
		}
		for _, name := range found {
			data, _, err := d.m.read(ctx, name)
			if err != nil {
				continue
			}
			var c struct {
				NetNS string `yaml:"netns"`
			}
			if yaml.Unmarshal(data, &c) == nil && c.NetNS != "" {
				out[path.Base(c.NetNS)] = true
			}
		}
	}
	return out
}

func (d *remover) removeNamespaces(ctx context.Context, finds []string) error {
	var errs []error
	for _, at := range finds {
		if err := d.m.kernel.Unmount(ctx, at, true); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, d.m.remove(ctx, at))
	}
	return errors.Join(errs...)
}

// lookLinks finds the links of flannel, and the bridge with what is plugged into it.
func (d *remover) lookLinks(ctx context.Context) (findings, error) {
	const dir = "/sys/class/net"
	names, err := d.m.files.List(ctx, dir)
	if err != nil {
		if absent(err) {
			return findings{}, nil
		}
		return findings{}, fmt.Errorf("listing links: %w", err)
	}
	own := []string{"cni0", "flannel.1", "flannel-v6.1", "flannel-wg", "flannel-wg-v6", "kube-ipvs0"}
	var ports, links findings
	for _, name := range names {
		if slices.Contains(own, name) {
			links.finds = append(links.finds, name)
			continue
		}
		master, err := d.m.files.Readlink(ctx, path.Join(dir, name, "master"))
		if err == nil && path.Base(master) == "cni0" && strings.HasPrefix(name, "veth") {
			ports.finds = append(ports.finds, name)
		}
	}
	all := findings{finds: slices.Concat(ports.finds, links.finds)}
	if !d.b.alone {
		for _, name := range all.finds {
			all.stays = append(all.stays, name+": "+d.othersHere())
		}
		all.finds = nil
	}
	return all, nil
}

func (d *remover) othersHere() string {
	return "another Kubernetes is here (" + brief(d.o.Others) + ")"
}

func (d *remover) removeLinks(ctx context.Context, finds []string) error {
	var errs []error
	for _, name := range finds {
		_, err := d.m.command(ctx, linkDeadline, "ip", "link", "delete", name)
		var failed *CommandError
		if errors.As(err, &failed) && !d.m.exists(ctx, "/sys/class/net/"+name) {
			// Its other end was gone, and so it went by itself.
			err = nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// tools are where programs for the packet filter are: the host's first, then k3s's own.
func (d *remover) tools() []string {
	dirs := slices.Clone(host.SearchPath())
	for _, dir := range []string{"data/current/bin", "data/current/bin/aux"} {
		dirs = append(dirs, d.m.at(path.Join(d.b.dataDir, dir)))
	}
	return dirs
}

// tool runs one of them; present is false where there is none.
func (d *remover) tool(ctx context.Context, program string, args ...string) (output []byte, present bool, err error) {
	const most = 16 << 20
	result, err := d.m.run.Run(ctx, host.Command{Program: program, Args: args, Directories: d.tools(), Deadline: linkDeadline, Limit: most})
	switch {
	case errors.Is(err, host.ErrNotInstalled):
		return nil, false, nil
	case err != nil:
		return nil, true, fmt.Errorf("running %s: %w", program, err)
	case result.Exit != 0:
		return nil, true, &CommandError{Argv: append([]string{program}, args...), Exit: result.Exit, Said: lastLine(string(result.Output))}
	case result.Truncated:
		return nil, true, fmt.Errorf("running %s: %w", program, host.ErrTooLarge)
	}
	return result.Output, true, nil
}

// families are the forms of iptables: both can hold rules at the same time.
func families() [][]string {
	return [][]string{{"iptables-nft", "iptables-legacy", "iptables"}, {"ip6tables-nft", "ip6tables-legacy", "ip6tables"}}
}

// eachFilter calls do for every form of iptables that is there.
func (d *remover) eachFilter(ctx context.Context, do func(name string, removals []removal) error) error {
	owner := ruleOwner{networks: d.networks(ctx), alone: d.b.alone}
	for _, family := range families() {
		special := false
		for _, name := range family {
			plain := !strings.Contains(name, "-")
			if plain && special {
				// It is one of those that were asked by name.
				continue
			}
			data, present, err := d.tool(ctx, name+"-save")
			if !present {
				continue
			}
			special = true
			var failed *CommandError
			if errors.As(err, &failed) {
				// A kernel without that form has no rules in it.
				continue
			}
			if err != nil {
				return err
			}
			tables, err := parseRules(onlyRules(data))
			if err != nil {
				return err
			}
			if err := do(name, owner.removals(tables)); err != nil {
				return err
			}
		}
	}
	return nil
}

// onlyRules leaves out what a program says beside its output.
func onlyRules(data []byte) []byte {
	if i := bytes.IndexByte(data, '*'); i > 0 {
		return data[i:]
	}
	if bytes.IndexByte(data, '*') < 0 {
		return nil
	}
	return data
}

func (d *remover) lookRules(ctx context.Context) (findings, error) {
	var out findings
	err := d.eachFilter(ctx, func(name string, removals []removal) error {
		for _, r := range removals {
			out.finds = append(out.finds, fmt.Sprintf("%s %s: %d chains, %d rules", name, r.table, len(r.chains), len(r.rules)))
		}
		return nil
	})
	if err != nil {
		return findings{}, err
	}
	owner := ruleOwner{alone: d.b.alone}
	if list, present, err := d.tool(ctx, "ipset", "list", "-name"); present && err == nil {
		if sets := ownSets(string(list), owner); len(sets) > 0 {
			out.finds = append(out.finds, fmt.Sprintf("%d IP sets", len(sets)))
		}
	}
	if list, present, err := d.tool(ctx, "nft", "list", "tables"); present && err == nil {
		for _, t := range ownTables(string(list), owner) {
			out.finds = append(out.finds, "nft table "+t.family+" "+t.name)
		}
	}
	if !d.b.alone {
		out.stays = append(out.stays, "rules of KUBE-* and FLANNEL-*: "+d.othersHere())
	}
	return out, nil
}

func (d *remover) removeRules(ctx context.Context, _ []string) error {
	err := d.eachFilter(ctx, func(name string, removals []removal) error {
		if len(removals) == 0 {
			return nil
		}
		file := path.Join(supervisorDir, "k3s-rules")
		if err := d.m.write(ctx, file, secretMode, script(removals)); err != nil {
			return err
		}
		_, _, err := d.tool(ctx, name+"-restore", "--noflush", d.m.at(file))
		return errors.Join(err, d.m.remove(ctx, file))
	})
	owner := ruleOwner{alone: d.b.alone}
	if list, present, listing := d.tool(ctx, "ipset", "list", "-name"); present && listing == nil {
		for _, name := range ownSets(string(list), owner) {
			_, _, destroying := d.tool(ctx, "ipset", "destroy", name)
			err = errors.Join(err, destroying)
		}
	}
	if list, present, listing := d.tool(ctx, "nft", "list", "tables"); present && listing == nil {
		for _, t := range ownTables(string(list), owner) {
			_, _, deleting := d.tool(ctx, "nft", "delete", "table", t.family, t.name)
			err = errors.Join(err, deleting)
		}
	}
	return err
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
		return findings{stays: []string{brief(out.finds) + ": " + d.othersHere()}}, nil
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
			// It leads to the unit, and goes with it.
			if d.r.Files[d.spec().unitFile()] != "" || d.r.Files[d.spec().scriptFile()] != "" {
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

func (d *remover) lookCNI(ctx context.Context) (findings, error) {
	const dir = "/var/lib/cni"
	var names []string
	for _, network := range d.networks(ctx) {
		names = append(names, path.Join(dir, "networks", network))
		found, _, err := d.m.files.Glob(ctx, path.Join(dir, "results", network+"-*"))
		if err != nil {
			return findings{}, err
		}
		names = append(names, found...)
	}
	names = append(names, path.Join(dir, "flannel"))
	out := findings{finds: d.there(ctx, names...)}
	// Old forms of k3s put a link where other programs look.
	const link = "/etc/cni/net.d/10-flannel.conflist"
	if to, err := d.m.files.Readlink(ctx, link); err == nil && within(to, d.b.dataDir) {
		out.finds = append(out.finds, link)
	}
	out.finds = append(out.finds, d.empty(ctx, out.finds, path.Join(dir, "networks"), path.Join(dir, "results"), dir)...)
	if !d.b.alone && len(out.finds) > 0 {
		return findings{stays: []string{brief(out.finds) + ": " + d.othersHere()}}, nil
	}
	return out, nil
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
	names := []string{runDir}
	if d.b.alone {
		names = append(names, "/run/flannel")
	}
	for _, suffix := range []string{"json", "lock"} {
		names = append(names, d.m.superviseFile(d.spec(), suffix))
	}
	names = append(names, "/run/"+d.spec().Name()+".pid", path.Join(supervisorDir, "k3s-rules"))
	names = append(names, d.temporaries(ctx, d.m.superviseFile(d.spec(), "json"), path.Join(supervisorDir, "k3s-rules"))...)
	out := findings{finds: d.there(ctx, names...)}
	out.finds = append(out.finds, d.empty(ctx, out.finds, supervisorDir)...)
	return out, nil
}

// storageDir holds the volumes of pods on this machine.
func (d *remover) storageDir() string { return path.Join(d.b.dataDir, "storage") }

func (d *remover) lookData(ctx context.Context) (findings, error) {
	all, err := d.m.mounts(ctx)
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

// keeps says what stays below a directory.
func (d *remover) keeps(all []mount) map[string]string {
	out := map[string]string{}
	for _, name := range d.r.Before {
		out[name] = "was there before llmbox"
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
		if _, kept := keeps[at]; kept {
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
	all, err := d.m.mounts(ctx)
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
		if _, kept := keeps[below]; kept {
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
