package k3s

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Inputs is all that k3s reads when it starts and never again, each as a hash or a
// path.
type Inputs struct {
	Binary      string `json:"binary"`
	Config      string `json:"config"`
	Kubelet     string `json:"kubelet"`
	Registries  string `json:"registries,omitempty"`
	Environment string `json:"environment,omitempty"`
	Unit        string `json:"unit,omitempty"`
	// DropIns are further files of the configuration by name, the one of the address
	// left out: it is written by the start itself.
	DropIns map[string]string `json:"dropIns,omitempty"`
	// Templates are those of containerd's configuration, by path.
	Templates map[string]string `json:"templates,omitempty"`
	// Runtime is the NVIDIA runtime that k3s would find; empty for none.
	Runtime string `json:"runtime,omitempty"`
}

// changedAt is when the file of each input last changed; zero where it is gone.
type changedAt map[string]time.Time

// input is one comparable part of Inputs.
type input struct {
	what, key, value string
}

// list takes the inputs apart, in a fixed order.
func (i Inputs) list() []input {
	out := []input{
		{"the k3s binary", "binary", i.Binary},
		{ConfigFile, "config", i.Config},
		{KubeletFile, "kubelet", i.Kubelet},
		{RegistriesFile, "registries", i.Registries},
		{"the proxy settings", "environment", i.Environment},
		{"the service", "unit", i.Unit},
		{"the NVIDIA runtime", "runtime", i.Runtime},
	}
	for _, group := range []map[string]string{i.DropIns, i.Templates} {
		names := make([]string, 0, len(group))
		for name := range group {
			names = append(names, name)
		}
		slices.Sort(names)
		for _, name := range names {
			out = append(out, input{name, name, group[name]})
		}
	}
	return out
}

// RestartReasons says what k3s would read otherwise if it started now, one reason a
// part; none means that a restart would change nothing.
func RestartReasons(then, now Inputs) []string {
	return reasons(then, now, func(input) bool { return true })
}

// reasons compares two sets of inputs and keeps the differences that count.
func reasons(then, now Inputs, counts func(input) bool) []string {
	before := map[string]input{}
	for _, i := range then.list() {
		before[i.key] = i
	}
	var out []string
	for _, i := range now.list() {
		was := before[i.key].value
		delete(before, i.key)
		if was == i.value || !counts(i) {
			continue
		}
		switch {
		case was == "":
			out = append(out, i.what+" came")
		case i.value == "":
			out = append(out, i.what+" went")
		default:
			out = append(out, i.what+" changed")
		}
	}
	for _, i := range then.list() {
		if gone, left := before[i.key]; left && gone.value != "" && counts(i) {
			out = append(out, i.what+" went")
		}
	}
	return out
}

// reasonsSince is for a k3s that somebody else started since llmbox did: what changed
// before it began, it has read.
func reasonsSince(then, now Inputs, changed changedAt, began time.Time) []string {
	return reasons(then, now, func(i input) bool {
		at, known := changed[i.key]
		return !known || at.IsZero() || at.After(began)
	})
}

// Inputs reads what k3s would read if it started now.
func (m *Machine) Inputs(ctx context.Context, r *Record, svc Service) (Inputs, error) {
	in, _, err := m.inputs(ctx, r, svc)
	return in, err
}

func (m *Machine) inputs(ctx context.Context, r *Record, svc Service) (Inputs, changedAt, error) {
	changed := changedAt{}
	var failed error
	sum := func(key, name string) string {
		if name == "" {
			return ""
		}
		hash, err := m.hashOf(ctx, name)
		if err != nil && failed == nil {
			failed = err
		}
		// The inode's own time: a package keeps the one of its maker for the content.
		changed[key] = m.changeTime(ctx, name)
		return hash
	}
	in := Inputs{
		Binary: sum("binary", r.Binary.Path), Config: sum("config", ConfigFile), Kubelet: sum("kubelet", KubeletFile),
		Registries: sum("registries", RegistriesFile), DropIns: map[string]string{}, Templates: map[string]string{},
		Environment: sum("environment", environmentOf(r, svc)),
	}
	if files := svc.Files(); len(files) > 0 {
		in.Unit = sum("unit", files[0].Path)
	}
	names, err := m.files.List(ctx, DropInDir)
	if err != nil && !absent(err) {
		return Inputs{}, nil, fmt.Errorf("listing %s: %w", DropInDir, err)
	}
	for _, name := range names {
		if at := path.Join(DropInDir, name); strings.HasSuffix(name, ".yaml") && at != NodeIPFile {
			in.DropIns[at] = sum(at, at)
		}
	}
	for _, name := range templateNames() {
		at := path.Join(containerdDir(cmp.Or(r.DataDir, m.options.DataDir)), name)
		if m.exists(ctx, at) {
			in.Templates[at] = sum(at, at)
		}
	}
	in.Runtime = m.nvidiaRuntime(ctx)
	changed["runtime"] = m.changeTime(ctx, in.Runtime)
	return in, changed, failed
}

// ServiceSpecOf is the service of a k3s that llmbox installed.
func ServiceSpecOf(r *Record) ServiceSpec {
	return ServiceSpec{Role: cmp.Or(r.Role, Server), Binary: r.Binary.Path, Hook: r.Hook}
}

func environmentOf(r *Record, svc Service) string {
	return ServiceSpecOf(r).envFile(svc.Init())
}

// changeTime is when a file last changed in any way; zero where there is none.
func (m *Machine) changeTime(ctx context.Context, name string) time.Time {
	if name == "" {
		return time.Time{}
	}
	at, err := m.files.Resolve(ctx, name)
	if err != nil {
		return time.Time{}
	}
	return changeTime(m.at(at))
}

// Want is a k3s as it shall be.
type Want struct {
	Binary   WantBinary
	Settings Settings
	Init     Init
	// Hook is the command line that ends up in RefreshNodeIP, run before each start.
	Hook []string
	// Supervisor is the command line that ends up in Supervise.
	Supervisor []string
	// Prepare runs when the directories of k3s are llmbox's to write to and k3s does not
	// run yet, or still runs as it was: what k3s imports at its start goes there. May be
	// nil.
	Prepare func(ctx context.Context) error
}

// Outcome is what Ensure did.
type Outcome struct {
	// Changed are the paths that were written or removed.
	Changed []string
	// Started says that k3s did not run, Restarted that it did and had to read something
	// anew; Reasons says what.
	Started, Restarted bool
	Reasons            []string
	Binary             Binary
	// NodeName is the one that is fixed from now on.
	NodeName string
	Service  Service
	// Since is from when on the log speaks of the present start.
	Since time.Time
}

// Ensure brings k3s to what is wanted: binary, files, service, running. What is so
// already stays untouched; a running k3s is restarted only for something that it
// reads at its start. Cut off anywhere, the next call goes on.
func (m *Machine) Ensure(ctx context.Context, want Want, report Report) (Outcome, error) {
	r, err := m.Record(ctx)
	if err != nil {
		return Outcome{}, err
	}
	if r.Adopted {
		return m.adopted(ctx, r)
	}
	s := want.Settings
	s.NodeName = cmp.Or(s.NodeName, r.NodeName)
	s.Role = cmp.Or(s.Role, Server)
	if err := m.begin(ctx, r, s, want.Init); err != nil {
		return Outcome{}, err
	}
	out := Outcome{NodeName: r.NodeName, Since: time.Now()}
	newBinary, err := m.EnsureBinary(ctx, r, want.Binary, report)
	if err != nil {
		return out, err
	}
	out.Binary = r.Binary
	if newBinary {
		out.Changed = append(out.Changed, r.Binary.Path)
	}
	report.say(PhaseConfig, "configuring k3s")
	files, err := m.Configure(ctx, r, s)
	out.Changed = append(out.Changed, files...)
	if err != nil {
		return out, err
	}
	if want.Prepare != nil {
		if err := want.Prepare(ctx); err != nil {
			return out, err
		}
	}
	return m.ensureService(ctx, r, s, want, out, report)
}

// begin refuses what the record doesn't go with and writes down what is about to be.
func (m *Machine) begin(ctx context.Context, r *Record, s Settings, init Init) error {
	name, err := NodeNameOf(s)
	if err != nil {
		return err
	}
	dataDir := cmp.Or(s.Box.K3s.DataDir, DefaultDataDir)
	for _, fixed := range []struct{ what, has, wanted, key string }{
		{"data directory", r.DataDir, dataDir, "k3s.dataDir"}, {"node's name", r.NodeName, name, "k3s.nodeName"},
		{"way of keeping it running", string(r.Init), string(init), "k3s.init"}, {"role", string(r.Role), string(s.Role), ""},
	} {
		if fixed.has != "" && fixed.has != fixed.wanted {
			out := "Start anew: sudo llmbox uninstall"
			if fixed.key != "" {
				out = "Keep it (--set " + fixed.key + "=" + fixed.has + "), or start anew: sudo llmbox uninstall"
			}
			return &Problem{What: fmt.Sprintf("the %s of k3s here is %s, and %s is wanted", fixed.what, fixed.has, fixed.wanted), Out: out, Err: ErrSetting}
		}
	}
	if r.Empty() && r.DataDir == "" {
		e, err := m.Existing(ctx)
		if err != nil {
			return err
		}
		if err := e.MayInstall(); err != nil {
			return err
		}
		if err := m.lookBefore(ctx, r, dataDir); err != nil {
			return err
		}
	}
	before := r.clone()
	r.DataDir, r.NodeName, r.Init, r.Role = dataDir, name, init, s.Role
	if before.DataDir == r.DataDir && before.NodeName == r.NodeName && before.Init == r.Init && before.Role == r.Role && !before.First.IsZero() {
		return nil
	}
	return m.save(ctx, r)
}

// sharedDirs are directories of k3s that somebody else can have made before. What was
// in them then stays, what came later goes.
func sharedDirs(dataDir string) []string {
	return append([]string{
		"/etc/rancher", ConfigDir, DropInDir, "/etc/rancher/node", path.Dir(dataDir), dataDir, kubeletDir, "/var/lib/cni", "/var/log/pods", "/var/log/containers",
		runDir, "/run/flannel", netnsDir,
	}, sharedState()...)
}

// lookBefore writes down what is there before llmbox, so that uninstalling leaves it.
func (m *Machine) lookBefore(ctx context.Context, r *Record, dataDir string) error {
	for _, dir := range sharedDirs(dataDir) {
		names, err := m.files.List(ctx, dir)
		if err != nil {
			if absent(err) {
				continue
			}
			return fmt.Errorf("looking at what is there: %w", err)
		}
		r.Before = append(r.Before, dir)
		if dir == path.Dir(dataDir) || dir == "/usr/libexec" {
			// These can be anything's; nothing in them is looked for but the one of k3s.
			continue
		}
		for _, name := range names {
			r.Before = append(r.Before, path.Join(dir, name))
		}
	}
	slices.Sort(r.Before)
	r.Before = slices.Compact(r.Before)
	return m.lookBeforeKernel(ctx, r)
}

func (m *Machine) ensureService(ctx context.Context, r *Record, s Settings, want Want, out Outcome, report Report) (Outcome, error) {
	report.say(PhaseService, "setting up the service")
	var hook []string
	if s.Box.Network.NodeIP == "" {
		hook = want.Hook
	}
	if !slices.Equal(r.Hook, hook) {
		r.Hook = hook
		if err := m.save(ctx, r); err != nil {
			return out, err
		}
	}
	spec := ServiceSpecOf(r)
	spec.Mounts, spec.Log = []string{r.DataDir, m.options.State}, m.logFile()
	svc, err := m.Service(want.Init, spec, ServiceOptions{Supervisor: want.Supervisor})
	if err != nil {
		return out, err
	}
	out.Service = svc
	environment, err := Environment(s)
	if err != nil {
		return out, err
	}
	files := svc.Files()
	for _, f := range files {
		if err := m.mayWrite(ctx, r, f); err != nil {
			return out, err
		}
	}
	reload := false
	for _, f := range files {
		did, err := m.ensureFile(ctx, r, f)
		if err != nil {
			return out, err
		}
		if did {
			reload = true
			out.Changed = append(out.Changed, f.Path)
		}
	}
	did, err := m.ensureEnvironment(ctx, r, spec.envFile(want.Init), environment)
	if err != nil {
		return out, err
	}
	if did {
		out.Changed = append(out.Changed, spec.envFile(want.Init))
	}
	if !reload {
		reload, err = m.reloadNeeded(ctx, svc)
		if err != nil {
			return out, err
		}
	}
	if reload {
		if err := svc.Load(ctx); err != nil {
			return out, err
		}
	}
	if _, err := svc.Enable(ctx); err != nil {
		return out, err
	}
	return m.ensureRunning(ctx, r, svc, out, report)
}

// reloadNeeded asks whether the manager still has an older form of the unit: the one
// who wrote it may have been cut off before the reload.
func (m *Machine) reloadNeeded(ctx context.Context, svc Service) (bool, error) {
	unit, isUnit := svc.(*systemdService)
	if !isUnit {
		return false, nil
	}
	said, err := m.command(ctx, serviceDeadline, "systemctl", "show", unit.unit(), "--property=NeedDaemonReload,LoadState")
	if err != nil {
		return false, err
	}
	p := parseProperties(said)
	return p["NeedDaemonReload"] == "yes" || p["LoadState"] == "not-found", nil
}

func (m *Machine) ensureEnvironment(ctx context.Context, r *Record, name string, content []byte) (bool, error) {
	if content == nil {
		return m.withdraw(ctx, r, name)
	}
	f := File{Path: name, Mode: secretMode, Content: content}
	if err := m.mayWrite(ctx, r, f); err != nil {
		return false, err
	}
	return m.ensureFile(ctx, r, f)
}

// ensureRunning starts k3s, restarts it for a reason, or leaves it alone.
func (m *Machine) ensureRunning(ctx context.Context, r *Record, svc Service, out Outcome, report Report) (Outcome, error) {
	now, changed, err := m.inputs(ctx, r, svc)
	if err != nil {
		return out, err
	}
	state, err := svc.State(ctx)
	if err != nil {
		return out, err
	}
	if state.Running {
		out.Reasons = m.dueReasons(ctx, r, state, now, changed)
		if len(out.Reasons) == 0 {
			return out, m.remember(ctx, r, state, now)
		}
		report.say(PhaseService, "restarting k3s: "+strings.Join(out.Reasons, ", "))
		out.Restarted, out.Since = true, time.Now()
		err = svc.Restart(ctx)
	} else {
		report.say(PhaseService, "starting k3s")
		out.Started, out.Since = true, time.Now()
		err = svc.Start(ctx)
	}
	if err != nil {
		return out, err
	}
	after, err := m.newProcess(ctx, svc, state)
	if err != nil {
		return out, err
	}
	return out, m.remember(ctx, r, after, now)
}

// newProcess waits for k3s to be another process than before. Where it takes long
// (its keeper waits for the network), the record is brought up to date by the next
// run.
func (m *Machine) newProcess(ctx context.Context, svc Service, before ProcessState) (ProcessState, error) {
	const patience = 5 * time.Second
	if before.Running {
		ctx, cancel := context.WithTimeout(ctx, stopDeadline)
		defer cancel()
		for {
			state, err := svc.State(ctx)
			if err != nil {
				return ProcessState{}, err
			}
			if state.PID != before.PID || state.Start != before.Start {
				break
			}
			select {
			case <-ctx.Done():
				return ProcessState{}, fmt.Errorf("waiting for k3s to restart: %w", ctx.Err())
			case <-time.After(statePause):
			}
		}
	}
	if err := settled(ctx, svc, true, patience); err != nil && ctx.Err() != nil {
		return ProcessState{}, err
	}
	return svc.State(ctx)
}

// dueReasons says why a running k3s has to be restarted.
func (m *Machine) dueReasons(ctx context.Context, r *Record, state ProcessState, now Inputs, changed changedAt) []string {
	then := Inputs{}
	if r.Started != nil {
		then = r.Started.Inputs
		if r.Started.PID == state.PID && r.Started.Start == state.Start && r.Started.BootID == m.bootID(ctx) {
			return RestartReasons(then, now)
		}
	}
	began, known := m.startTime(ctx, state.Start)
	if !known {
		return RestartReasons(then, now)
	}
	return reasonsSince(then, now, changed, began)
}

// remember writes down what the running k3s has read.
func (m *Machine) remember(ctx context.Context, r *Record, state ProcessState, now Inputs) error {
	if !state.Running {
		return nil
	}
	next := Started{BootID: m.bootID(ctx), PID: state.PID, Start: state.Start, Inputs: now}
	if r.Started != nil && r.Started.BootID == next.BootID && r.Started.PID == next.PID && r.Started.Start == next.Start &&
		len(RestartReasons(r.Started.Inputs, now)) == 0 {
		return nil
	}
	r.Started = &next
	return m.save(ctx, r)
}

// changeTime is the inode's own time.
func changeTime(at string) time.Time {
	info, err := os.Stat(at)
	if err != nil {
		return time.Time{}
	}
	if raw, ok := info.Sys().(*syscall.Stat_t); ok {
		return time.Unix(raw.Ctim.Unix())
	}
	return info.ModTime()
}
