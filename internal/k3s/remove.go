package k3s

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

const (
	// killRounds bounds how often processes are looked for again: one that is being
	// started while the others end shows up in the next round, and on a busy machine one
	// with much memory takes seconds to end (20 s in all).
	killRounds = 100
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
			err = fmt.Errorf("%s: still there: %s: %w", a.Name, brief(left.finds), ErrLeft)
		}
		out.Err = errors.Join(err, looking)
	}
	return out
}

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
		{Name: "routes", Title: "remove routes to other nodes' pods", look: d.lookRoutes, act: d.removeRoutes},
		{Name: "rules", Title: "remove packet filter rules", look: d.lookRules, act: d.removeRules},
		{Name: "settings", Title: "set the kernel back", look: d.lookSettings, act: d.resetSettings},
		{Name: "cgroups", Title: "remove control groups", look: d.lookCgroups, act: d.removeCgroups},
		{Name: "units", Title: "remove the service", look: d.lookUnits, act: d.removeUnits},
		{Name: "cni", Title: "remove the state of the pods' network", look: d.lookCNI, act: d.removeTrees},
		{Name: "shared", Title: "remove what containers left where others have theirs", look: d.lookShared, act: d.removeShared},
		{Name: "runtime", Title: "remove runtime files", look: d.lookRuntime, act: d.removeTrees},
		{Name: "data", Title: "remove k3s's data", look: d.lookData, act: d.removeTrees},
		{Name: "config", Title: "remove k3s's configuration", look: d.lookConfig, act: d.removeTrees},
		{Name: "binary", Title: "remove the k3s binary", look: d.lookBinary, act: d.unlink},
		{Name: "logs", Title: "remove logs and the cache", look: d.lookLogs, act: d.removeTrees},
		{Name: recordAction, Title: "forget k3s", look: d.lookRecord, act: d.unlink},
	}
}
