package k3s

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"path"
	"time"

	"github.com/BurntSushi/toml"
)

// nvidiaHandler is the name of the runtime that RuntimeClass nvidia asks for.
const nvidiaHandler = "nvidia"

// runtimePaths are where k3s looks for the NVIDIA runtime, in its order: what a GPU
// Operator left wins over what packages keep up to date (k3s-io/k3s
// pkg/agent/containerd/nvidia.go).
func runtimePaths() []string {
	const name = "nvidia-container-runtime"
	var out []string
	for _, dir := range []string{"/usr/local/nvidia/toolkit", "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/opt/bin"} {
		out = append(out, path.Join(dir, name))
	}
	return out
}

// templateNames are the templates of containerd's configuration that k3s prefers to
// its own: the one for version 3 first.
func templateNames() []string { return []string{"config-v3.toml.tmpl", "config.toml.tmpl"} }

func containerdDir(dataDir string) string { return path.Join(dataDir, "agent/etc/containerd") }

// nvidiaRuntime is the runtime that k3s would find if it started now; empty for none.
func (m *Machine) nvidiaRuntime(ctx context.Context) string {
	for _, at := range runtimePaths() {
		to, err := m.files.Resolve(ctx, at)
		if err != nil {
			continue
		}
		if info, err := m.files.Stat(ctx, to); err == nil && info.Mode.IsRegular() {
			return at
		}
	}
	return ""
}

// Handler is a runtime in containerd's configuration.
type Handler struct {
	Name   string `json:"name"`
	Binary string `json:"binary"`
	// Systemd says that it makes control groups by systemd.
	Systemd bool `json:"systemd"`
}

// RuntimeView is what the GPU runtime of k3s is judged by.
type RuntimeView struct {
	// Config is the generated configuration of containerd; nil where there is none.
	Config []byte
	// Template is the one that it was made from, and its content; empty for k3s's own.
	Template     string
	TemplateText []byte
	// Found is the runtime that k3s would find now.
	Found string
	// Exists says whether a program is there.
	Exists func(name string) bool
}

// RuntimeState is how the GPU runtime stands.
type RuntimeState string

// The states.
const (
	// RuntimeReady means that containerd has the handler and its program is there.
	RuntimeReady RuntimeState = "ready"
	// RuntimeNoToolkit means that there is no NVIDIA runtime on this host.
	RuntimeNoToolkit RuntimeState = "no-toolkit"
	// RuntimeNotSeen means that k3s started before the runtime came.
	RuntimeNotSeen RuntimeState = "not-seen"
	// RuntimeMoved means that the handler names a program that is gone while another is
	// there.
	RuntimeMoved RuntimeState = "moved"
	// RuntimeStale means that a template hides the runtime from k3s.
	RuntimeStale RuntimeState = "stale-template"
	// RuntimeMixed means that the handler makes its control groups another way than
	// runc: pods die after seconds.
	RuntimeMixed RuntimeState = "mixed-cgroups"
	// RuntimeUnknown means that the configuration can't be read.
	RuntimeUnknown RuntimeState = "unknown"
)

// RuntimeVerdict is the judgement of a RuntimeView.
type RuntimeVerdict struct {
	State   RuntimeState
	Handler Handler
	// Why is one sentence; Fix what a person types.
	Why, Fix string
	// Restart says that restarting k3s mends it.
	Restart bool
}

// handlers reads the runtimes of containerd's configuration, in the layout of version
// 2 or of version 3.
func handlers(config []byte) (map[string]Handler, error) {
	var table struct {
		Plugins map[string]struct {
			Containerd struct {
				Runtimes map[string]struct {
					Options struct {
						BinaryName    string
						SystemdCgroup bool
					} `toml:"options"`
				} `toml:"runtimes"`
			} `toml:"containerd"`
		} `toml:"plugins"`
	}
	if _, err := toml.NewDecoder(bytes.NewReader(config)).Decode(&table); err != nil {
		return nil, fmt.Errorf("reading containerd's configuration: %w", err)
	}
	out := map[string]Handler{}
	for _, plugin := range []string{"io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"} {
		for name, r := range table.Plugins[plugin].Containerd.Runtimes {
			out[name] = Handler{Name: name, Binary: r.Options.BinaryName, Systemd: r.Options.SystemdCgroup}
		}
	}
	return out, nil
}

// JudgeRuntime says whether pods get the GPU runtime, and what is to be done.
func JudgeRuntime(v RuntimeView) RuntimeVerdict {
	if v.Config == nil {
		return RuntimeVerdict{State: RuntimeUnknown, Why: "k3s has not written containerd's configuration", Fix: "Wait for k3s to be ready, then run the command again"}
	}
	all, err := handlers(v.Config)
	if err != nil {
		return RuntimeVerdict{State: RuntimeUnknown, Why: shown(err.Error()), Fix: "sudo systemctl restart k3s (it writes the file anew)", Restart: true}
	}
	handler, has := all[nvidiaHandler]
	stale := v.Template != "" && !bytes.Contains(v.TemplateText, []byte(`template "base"`)) && !bytes.Contains(v.TemplateText, []byte(".ExtraRuntimes"))
	toolkit := "Install the NVIDIA Container Toolkit, then run the command again: llmbox preflight says how"
	remove := "Move it away: sudo mv " + v.Template + " " + v.Template + ".old; then sudo systemctl restart k3s"
	switch {
	case !has && v.Found == "":
		return RuntimeVerdict{State: RuntimeNoToolkit, Why: "there is no nvidia-container-runtime on this host", Fix: toolkit}
	case !has && stale:
		return RuntimeVerdict{State: RuntimeStale, Why: v.Template + " takes the place of k3s's own configuration and has no handler for " + v.Found, Fix: remove}
	case !has:
		return RuntimeVerdict{State: RuntimeNotSeen, Why: v.Found + " came after k3s had started", Fix: "sudo systemctl restart k3s", Restart: true}
	case handler.Binary == "" || !v.Exists(handler.Binary):
		verdict := RuntimeVerdict{State: RuntimeMoved, Handler: handler, Why: fmt.Sprintf("the handler nvidia names %q, which is not there", handler.Binary)}
		switch {
		case stale:
			verdict.State, verdict.Fix = RuntimeStale, remove
		case v.Found == "":
			verdict.State, verdict.Fix = RuntimeNoToolkit, toolkit
		default:
			verdict.Fix, verdict.Restart = "sudo systemctl restart k3s (it finds "+v.Found+")", true
		}
		return verdict
	}
	if runc, known := all["runc"]; known && runc.Systemd != handler.Systemd {
		verdict := RuntimeVerdict{State: RuntimeMixed, Handler: handler, Why: "the handler nvidia makes control groups another way than runc, so its pods are killed after seconds"}
		if stale {
			verdict.Fix = remove
			return verdict
		}
		verdict.Fix, verdict.Restart = "sudo systemctl restart k3s", true
		return verdict
	}
	return RuntimeVerdict{State: RuntimeReady, Handler: handler, Why: "handler nvidia, " + handler.Binary}
}

// Runtime looks at the GPU runtime of the k3s on this machine.
func (m *Machine) Runtime(ctx context.Context) (RuntimeVerdict, error) {
	r, err := m.Record(ctx)
	if err != nil {
		return RuntimeVerdict{}, err
	}
	dir := containerdDir(cmp.Or(r.DataDir, m.options.DataDir))
	v := RuntimeView{Found: m.nvidiaRuntime(ctx), Exists: func(name string) bool {
		to, err := m.files.Resolve(ctx, name)
		if err != nil {
			return false
		}
		info, err := m.files.Stat(ctx, to)
		const executable = 0o111
		return err == nil && info.Mode.IsRegular() && info.Mode.Perm()&executable != 0
	}}
	// k3s names the file after its first version, whatever version it has; a build that
	// names it after the third has that one.
	for _, name := range []string{"config.toml", "config-v3.toml"} {
		data, present, err := m.read(ctx, path.Join(dir, name))
		if err != nil {
			return RuntimeVerdict{}, err
		}
		if present {
			v.Config = data
			break
		}
	}
	for _, name := range templateNames() {
		data, present, err := m.read(ctx, path.Join(dir, name))
		if err != nil {
			return RuntimeVerdict{}, err
		}
		if present {
			v.Template, v.TemplateText = path.Join(dir, name), data
			break
		}
	}
	verdict := JudgeRuntime(v)
	if verdict.State == RuntimeNotSeen && r.Started != nil && r.Started.Inputs.Runtime == v.Found {
		// It was there when k3s started; starting again would end the same.
		verdict.Why, verdict.Restart = "k3s did not take "+v.Found+" when it started", false
		verdict.Fix = "Put the runtime where k3s looks: sudo ln -s " + v.Found + " /usr/bin/" + path.Base(v.Found) + "; then sudo systemctl restart k3s"
	}
	return verdict, nil
}

// EnsureRuntime restarts k3s once where that lets it find the GPU runtime, and waits
// for it to come back. It says whether it did.
func (m *Machine) EnsureRuntime(ctx context.Context, svc Service, w WaitFor, prober Prober, report Report) (RuntimeVerdict, bool, error) {
	verdict, err := m.Runtime(ctx)
	if err != nil || !verdict.Restart {
		return verdict, false, err
	}
	r, err := m.Record(ctx)
	if err != nil {
		return verdict, false, err
	}
	if r.Adopted {
		return verdict, false, nil
	}
	before, err := svc.State(ctx)
	if err != nil {
		return verdict, false, err
	}
	report.say(PhaseRuntime, "restarting k3s: "+verdict.Why)
	now, err := m.Inputs(ctx, r, svc)
	if err != nil {
		return verdict, false, err
	}
	since := time.Now()
	if err := svc.Restart(ctx); err != nil {
		return verdict, false, err
	}
	after, err := m.newProcess(ctx, svc, before)
	if err != nil {
		return verdict, true, err
	}
	if err := m.remember(ctx, r, after, now); err != nil {
		return verdict, true, err
	}
	if err := m.Wait(ctx, svc, w, since, prober, report); err != nil {
		return verdict, true, err
	}
	again, err := m.Runtime(ctx)
	return again, true, err
}

// Problem is the verdict as an error; nil where the runtime is ready.
func (v RuntimeVerdict) Problem() error {
	if v.State == RuntimeReady {
		return nil
	}
	return &Problem{What: "k3s can't run GPU pods: " + v.Why, Out: v.Fix, Err: ErrRuntime}
}
