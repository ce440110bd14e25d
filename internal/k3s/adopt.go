package k3s

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/host"
)

// Whose says whose the k3s on a machine is.
type Whose string

// Whose it can be.
const (
	// Nobodys means that there is none.
	Nobodys Whose = "none"
	// Llmboxes means that llmbox put it there.
	Llmboxes Whose = "llmbox"
	// Adopted means that it was there before and llmbox was told to use it.
	Adopted Whose = "adopted"
	// Somebodys means that it was there before and llmbox keeps its hands off.
	Somebodys Whose = "foreign"
)

// Existing is the k3s that is on a machine.
type Existing struct {
	Whose   Whose
	Binary  string
	Version string
	// Unit is its service, Running whether that runs.
	Unit    string
	Running bool
	DataDir string
	// Data says that there is a datastore or a token.
	Data bool
	// Kubeconfig is the administrator's, where it is.
	Kubeconfig string
	// Uninstall is the program that its own installer left for removing it.
	Uninstall string
}

// Existing looks for a k3s on this machine. Other distributions are found by
// preflight, see OtherKubernetes.
func (m *Machine) Existing(ctx context.Context) (Existing, error) {
	r, err := m.Record(ctx)
	if err != nil {
		return Existing{}, err
	}
	e := Existing{DataDir: cmp.Or(r.DataDir, m.options.DataDir)}
	config, present, err := m.read(ctx, ConfigFile)
	if err != nil {
		return Existing{}, err
	}
	if present && r.DataDir == "" {
		var c struct {
			DataDir string `yaml:"data-dir"`
		}
		if yaml.Unmarshal(config, &c) == nil && path.IsAbs(c.DataDir) {
			e.DataDir = path.Clean(c.DataDir)
		}
	}
	sum := ""
	if e.Binary, sum, err = m.installed(ctx, r); err != nil {
		return Existing{}, err
	}
	if e.Binary == "" && m.exists(ctx, "/usr/bin/"+binaryName) {
		e.Binary, sum = "/usr/bin/"+binaryName, "somebody's"
	}
	for _, name := range []string{"/etc/systemd/system/k3s.service", "/etc/systemd/system/k3s-agent.service", "/usr/lib/systemd/system/k3s.service", "/etc/init.d/k3s", "/etc/init.d/k3s-agent"} {
		if e.Unit == "" && m.exists(ctx, name) {
			e.Unit = name
		}
	}
	for _, name := range []string{"server/db", "server/token"} {
		e.Data = e.Data || m.exists(ctx, path.Join(e.DataDir, name))
	}
	if m.exists(ctx, Kubeconfig) {
		e.Kubeconfig = Kubeconfig
	}
	for _, name := range []string{"/usr/local/bin/k3s-uninstall.sh", "/usr/local/bin/k3s-agent-uninstall.sh", "/opt/bin/k3s-uninstall.sh"} {
		if e.Uninstall == "" && m.exists(ctx, name) {
			e.Uninstall = name
		}
	}
	known := !r.Empty() || r.DataDir != ""
	switch {
	case r.Adopted:
		e.Whose = Adopted
	case e.Binary != "" && !r.owns(e.Binary, sum):
		e.Whose = Somebodys
	case known:
		e.Whose = Llmboxes
	case e.Unit != "" || e.Data:
		e.Whose = Somebodys
	default:
		e.Whose = Nobodys
	}
	if e.Whose == Llmboxes {
		e.Version = r.Binary.Version
	} else if e.Binary != "" {
		// One that does not answer is still there.
		if v, err := m.askVersion(ctx, m.at(e.Binary)); err == nil {
			e.Version = v.String()
		}
	}
	e.Running = m.running(ctx, e)
	return e, nil
}

// running says whether any k3s runs, whatever started it.
func (m *Machine) running(ctx context.Context, e Existing) bool {
	all, err := m.kernel.Processes(ctx)
	if err != nil {
		return false
	}
	b := belongs{dataDir: e.DataDir, binary: e.Binary}
	for _, p := range all {
		if len(p.Argv) == 0 || p.State == 'Z' || !b.k3sItself(p) {
			continue
		}
		if title := strings.Fields(p.Argv[0]); len(title) > 0 && strings.HasPrefix(path.Base(title[0]), binaryName) {
			return true
		}
	}
	return false
}

// MayInstall says whether llmbox may put its own k3s on a machine with that one.
func (e Existing) MayInstall() error {
	if e.Whose != Somebodys {
		return nil
	}
	wipe := "sudo rm -rf " + e.DataDir + " " + ConfigDir + " (this deletes that cluster)"
	if e.Uninstall != "" {
		wipe = "sudo " + e.Uninstall + " (this deletes that cluster)"
	}
	switch {
	case e.Running:
		return &Problem{What: "a k3s runs here that llmbox did not install", Out: "Install into it: sudo llmbox install --adopt. Or, if nobody needs it: " + wipe, Err: ErrForeign}
	case e.Data && e.Binary != "" && e.Unit != "":
		return &Problem{What: "a stopped k3s with its data is here (" + e.DataDir + ")", Out: "Start it and install into it: sudo systemctl start k3s; sudo llmbox install --adopt. Or, if nobody needs it: " + wipe, Err: ErrForeign}
	case e.Data:
		return &Problem{What: "a k3s was removed by half: its data is still in " + e.DataDir + ", and a new token does not open it", Out: "If nobody needs it: " + wipe, Err: ErrForeign}
	case e.Unit != "" && e.Binary == "":
		return &Problem{What: e.Unit + " names a k3s that is gone", Out: "sudo systemctl disable k3s; sudo rm " + e.Unit, Err: ErrForeign}
	}
	return &Problem{What: e.Binary + " is there and llmbox did not put it there", Out: "Install into it: sudo llmbox install --adopt. Or, if nobody needs it: sudo rm " + e.Binary, Err: ErrForeign}
}

// Adopt has llmbox use the k3s that is here. It writes down that it may use it and
// changes nothing else, now or later: neither its files nor its service.
func (m *Machine) Adopt(ctx context.Context) (Existing, error) {
	e, err := m.Existing(ctx)
	if err != nil {
		return e, err
	}
	switch {
	case e.Whose == Adopted, e.Whose == Llmboxes:
		return e, nil
	case e.Whose == Nobodys:
		return e, &Problem{What: "there is no k3s here to adopt", Out: "Leave --adopt away: sudo llmbox install", Err: ErrNoSource}
	case !e.Running:
		return e, &Problem{What: "the k3s here does not run", Out: "Start it: sudo systemctl start k3s; then run the command again", Err: ErrForeign}
	case e.Kubeconfig == "":
		return e, &Problem{What: "the k3s here has no " + Kubeconfig + ": it is an agent, or writes it elsewhere", Out: "Install into its cluster: sudo llmbox install --kubeconfig FILE", Err: ErrForeign}
	case e.Version == "":
		return e, &Problem{What: e.Binary + " does not say its version", Out: "Look: " + e.Binary + " --version", Err: ErrNotK3s}
	}
	r, err := m.Record(ctx)
	if err != nil {
		return e, err
	}
	r.Adopted, r.DataDir, r.Role = true, e.DataDir, Server
	r.Binary = Binary{Path: e.Binary, Version: e.Version, Source: FromBefore}
	if err := m.save(ctx, r); err != nil {
		return e, err
	}
	e.Whose = Adopted
	return e, nil
}

// adopted is what Ensure does about a k3s of somebody else: it looks at it.
func (m *Machine) adopted(ctx context.Context, r *Record) (Outcome, error) {
	init, err := m.initOf(ctx, r)
	if err != nil {
		return Outcome{}, err
	}
	svc, err := m.Service(init, ServiceSpecOf(r), ServiceOptions{})
	if err != nil {
		return Outcome{}, err
	}
	e, err := m.Existing(ctx)
	if err != nil {
		return Outcome{}, err
	}
	if !e.Running {
		return Outcome{}, &Problem{What: "the k3s that llmbox was told to use does not run", Out: "Start it: sudo systemctl start k3s; then run the command again", Err: ErrForeign}
	}
	if e.Version != "" && e.Version != r.Binary.Version {
		r.Binary.Version = e.Version
		if err := m.save(ctx, r); err != nil {
			return Outcome{}, err
		}
	}
	return Outcome{Binary: r.Binary, Service: adoptedService{Service: svc, machine: m}, Since: time.Now()}, nil
}

// adoptedService is a k3s that somebody else keeps running, by whatever means: whether it
// runs is seen by its process.
type adoptedService struct {
	Service
	machine *Machine
}

// State implements Service.
func (s adoptedService) State(ctx context.Context) (ProcessState, error) {
	e, err := s.machine.Existing(ctx)
	if err != nil || e.Running {
		return ProcessState{Running: e.Running, Exits: -1, Detail: "kept running by its owner"}, err
	}
	return ProcessState{Exits: -1, Detail: "its owner has to start it"}, nil
}

func (m *Machine) initOf(ctx context.Context, r *Record) (Init, error) {
	if r.Init != "" {
		return r.Init, nil
	}
	return m.ChooseInit(ctx, "")
}

// OtherKubernetes picks from preflight's findings what it found of other
// distributions, for RemoveOptions and for whoever asks before installing.
func OtherKubernetes(found []finding.Finding) []string {
	var out []string
	for _, f := range found {
		if f.ID == "leftovers.kubernetes" && (f.Severity == finding.Fail || f.Severity == finding.Warn) {
			out = append(out, f.Measured)
		}
	}
	return out
}

// VersionOf asks a k3s binary for its version.
func (m *Machine) VersionOf(ctx context.Context, binary string) (Version, error) {
	v, err := m.askVersion(ctx, binary)
	if errors.Is(err, host.ErrNotInstalled) {
		return Version{}, fmt.Errorf("asking %s for its version: %w", binary, ErrNoSource)
	}
	return v, err
}
