package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path"
	"runtime"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/machine"
	"github.com/llmbox-dev/llmbox/internal/repair"
	"github.com/llmbox-dev/llmbox/internal/report"
	"github.com/llmbox-dev/llmbox/internal/secrets"
	"github.com/llmbox-dev/llmbox/internal/weights"
)

// machineFlags are the flags of commands that work on this machine.
type machineFlags struct {
	k3sBinary string
	init      string
	adopt     bool
	ignore    []string
	fix       bool
	// upgrade says that versions may change.
	upgrade bool
	// bundle is where everything comes from.
	bundle bundleFlags
}

func (m *machineFlags) register(cmd *cobra.Command, box *boxFlags) {
	f := cmd.Flags()
	f.StringVar(&m.k3sBinary, "k3s-binary", "", "k3s binary to use instead of a download (absolute path)")
	f.StringVar(&m.init, "init", "", "what keeps k3s running: auto, systemd, openrc or supervised")
	f.BoolVar(&m.adopt, "adopt", false, "use the k3s that is on this machine and was not installed by llmbox")
	f.BoolVar(&m.fix, "fix", false, "mend of this machine what can be mended safely, as preflight --fix does")
	f.StringSliceVar(&m.ignore, "ignore", nil, "ids of checks that may fail; they still run and are shown")
	extra := box.extra
	box.extra = func(l *config.Layer) error {
		var problems []error
		if extra != nil {
			problems = append(problems, extra(l))
		}
		if cmd.Flags().Changed("k3s-binary") {
			problems = append(problems, l.Set("k3s.binaryPath", m.k3sBinary, config.Flag("k3s-binary")))
		}
		if cmd.Flags().Changed("init") {
			problems = append(problems, l.Set("k3s.init", m.init, config.Flag("init")))
		}
		return errors.Join(problems...)
	}
}

// thisMachine is the machine that llmbox runs on.
func (a *app) thisMachine() (*machine.Host, error) {
	self, err := a.env.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding the own binary: %w", err)
	}
	return machine.New(machine.Options{
		Version: a.env.Version, Executable: self, ProxyEnvironment: repair.ProxyEnvironment(a.env.Getenv),
	}), nil
}

// onThisMachine says whether a command is about this machine and not about a cluster
// that somebody named.
func (a *app) onThisMachine() bool {
	return a.kubecontext == "" && (a.kubeconfig == "" && a.env.Getenv("KUBECONFIG") == "" ||
		a.kubeconfig == k3s.Kubeconfig || a.kubeconfig == "" && a.env.Getenv("KUBECONFIG") == k3s.Kubeconfig)
}

// installHere makes this machine the box.
func (a *app) installHere(cmd *cobra.Command, flags *boxFlags, here *machineFlags) (err error) {
	ctx := cmd.Context()
	if runtime.GOOS != "linux" {
		return usageError{fmt.Errorf("this machine runs %s, a box needs Linux", runtime.GOOS),
			"run llmbox on the GPU machine, or name a cluster: llmbox install --kubeconfig FILE"}
	}
	host, err := a.thisMachine()
	if err != nil {
		return err
	}
	flags.machine = host
	if err := here.bundle.opened(ctx, cmd, a, flags); err != nil {
		return err
	}
	defer here.bundle.close()
	name := "install"
	if here.upgrade {
		name = "upgrade"
	}
	look, release, err := a.admit(ctx, cmd, flags, host, here, name,
		preflightFlags{gpuTimeout: gpu.HangAfter, fix: here.fix, adopt: here.adopt, upgrade: here.upgrade, offline: here.bundle.file != ""})
	var locked *machine.LockedError
	if errors.As(err, &locked) && locked.Holder.Log != "" && !here.upgrade {
		return a.attach(ctx, host, locked.Holder)
	}
	if err != nil {
		return err
	}
	defer release()
	s, err := a.settle(ctx, cmd, flags, false, a.newLogger())
	if err != nil {
		return err
	}
	var files *weights.Weights
	if here.bundle.open != nil {
		files, err = here.bundle.weights(ctx, host, s, flags)
	} else {
		files, err = a.hostWeights(ctx, host, s, flags)
	}
	if err != nil {
		return err
	}
	if s, err = a.settle(ctx, cmd, flags, false, a.newLogger()); err != nil {
		return err
	}
	if here.bundle.open != nil {
		if err := here.bundle.holds(s); err != nil {
			return err
		}
	}
	if !here.upgrade {
		from, to, err := a.k3sVersions(ctx, s, here)
		if err != nil {
			return err
		}
		if from != "" && from != to {
			return usageError{fmt.Errorf("k3s %s is here, and %s would take its place", from, to), "sudo llmbox upgrade, or keep it: --set k3s.version=" + from}
		}
	}
	ctx, session, err := a.start(ctx, "llmbox install")
	if err != nil {
		return err
	}
	defer report.Rescue(session.renderer)
	defer func() { err = errors.Join(err, session.end()) }()
	self := &installer.Machine{
		Host: host, Found: look.found, Want: s.wantMachine(here.adopt), Weights: files, Images: s.plan.PullOrder(),
		Connect: func(ctx context.Context) (installer.Target, error) {
			a.kubeconfig = k3s.Kubeconfig
			return a.target(ctx, cmd, flags, session)
		},
	}
	here.bundle.into(self)
	_, err = installer.Install(ctx, installer.Options{
		Target: installer.Target{Plan: s.plan, Recorded: s.recorded}, Machine: self,
		Version: a.env.Version, Ignore: here.ignore, Sink: session.sink, Log: session.log, Interrupt: session.interrupt,
	})
	return err
}

// admit looks at the machine and takes it for a run. One that does not fit is refused
// before anything is written to it; what is to be mended first is mended under the lock.
func (a *app) admit(ctx context.Context, cmd *cobra.Command, flags *boxFlags, host *machine.Host, here *machineFlags, name string, how preflightFlags) (look hostLook, release func(), err error) {
	release = func() {}
	first := here.fix || host.Locked()
	if first {
		if release, err = a.takeMachine(ctx, cmd, flags, host, name); err != nil {
			return look, nil, err
		}
	}
	if look, err = a.lookAtHost(ctx, cmd, flags, how); err == nil {
		err = verdict(look.found, here.ignore, false)
		if errors.Is(err, installer.ErrCheckFailed) {
			err = a.refuse("llmbox "+name, look, here)
		}
	}
	if err == nil && !first {
		release, err = a.takeMachine(ctx, cmd, flags, host, name)
	}
	if err != nil && release != nil {
		release()
	}
	return look, release, err
}

// refuse shows why the machine can't be taken, as the run that ends there.
func (a *app) refuse(title string, look hostLook, here *machineFlags) (err error) {
	_, session, err := a.start(context.Background(), title)
	if err != nil {
		return err
	}
	defer report.Rescue(session.renderer)
	defer func() { err = errors.Join(err, session.end()) }()
	_, err = installer.Refuse(installer.Options{
		Machine: &installer.Machine{Found: look.found}, Ignore: here.ignore, Sink: session.sink, Log: session.log,
	})
	return err
}

// hostWeights finds out what the model's files are, so that a wrong name, a missing
// token or a licence that was not accepted is told before anything is touched. It is nil
// for a model that is a directory, and for a box without a model of its own.
func (a *app) hostWeights(ctx context.Context, host *machine.Host, s *settled, flags *boxFlags) (*weights.Weights, error) {
	if s.box.Mode("weights") != config.ModeInstall || path.IsAbs(s.box.Model.Name) {
		return nil, nil
	}
	token, err := a.hubToken(s.box)
	if err != nil {
		return nil, err
	}
	files, err := host.Weights(ctx, s.box, token, func(text string) { a.newLogger().Warn("weights", "notice", text) })
	switch {
	case errors.Is(err, weights.ErrNoAccess):
		return nil, usageError{err, "accept the licence at https://huggingface.co/" + s.box.Model.Name + ", and name a file with a token of the same account: --hf-token-file FILE"}
	case errors.Is(err, weights.ErrNoModel):
		return nil, usageError{err, "llmbox models lists those that fit; --revision names a branch, tag or commit"}
	case errors.Is(err, weights.ErrToken):
		return nil, usageError{err, "make one at https://huggingface.co/settings/tokens and name a file that holds it alone: --hf-token-file FILE"}
	case err != nil:
		return nil, fixedError{err, "check the way to " + weights.Host(s.box.Model.Source) + ", or take the weights from another place: --set model.source=DIR|URL"}
	}
	node, err := host.NodeName(ctx, s.box)
	if err != nil {
		return nil, err
	}
	flags.commit = files.Commit
	flags.models = &installer.HostModels{Dir: machine.ModelDir(s.box), NodeName: node, Bytes: files.Bytes}
	return files, nil
}

// hubToken is the Hugging Face token that was given; empty for none.
func (a *app) hubToken(box config.Box) (string, error) {
	if file := box.Secrets.HFTokenFile; file != "" {
		token, err := secrets.ReadTokenFile(file)
		if err != nil {
			return "", usageError{err, "name a file that holds the token alone: --hf-token-file FILE"}
		}
		return token, nil
	}
	return strings.TrimSpace(a.env.Getenv("HF_TOKEN")), nil
}

// wantMachine is the machine that the box needs.
func (s *settled) wantMachine(adopt bool) machine.Want {
	return machine.Want{
		Box: s.box, K3sVersion: s.table.K3s.Shipped, GPUs: max(len(s.facts), s.box.GPU.Count), Adopt: adopt,
		GPURuntime: s.plan.GPURuntime(), Image: s.plan.OwnImage(),
	}
}

// target connects to the cluster and settles everything anew with what it shows.
func (a *app) target(ctx context.Context, cmd *cobra.Command, flags *boxFlags, session *session) (installer.Target, error) {
	s, err := a.settle(ctx, cmd, flags, true, session.log)
	if err != nil {
		return installer.Target{}, err
	}
	secrets, err := installer.NewSecrets(s.client, s.box)
	if err != nil {
		return installer.Target{}, err
	}
	engine, err := s.engine(ctx, session.log)
	if err != nil {
		return installer.Target{}, err
	}
	return installer.Target{Plan: s.plan, Client: s.client, Engine: engine, Secrets: secrets, State: s.state, Recorded: s.recorded}, nil
}

// hostCommand holds what this machine runs by itself.
func (a *app) hostCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "host", Short: "Commands that a box's machine runs by itself", Hidden: true, Args: noArgs,
	}
	var data, log, k3sData string
	flags := func(sub *cobra.Command) *cobra.Command {
		f := sub.Flags()
		f.StringVar(&data, "data", machine.StateDir, "llmbox's data directory")
		f.StringVar(&log, "log", "/var/log/llmbox", "directory of its logs")
		f.StringVar(&k3sData, "k3s-data", k3s.DefaultDataDir, "k3s' data directory")
		return sub
	}
	run := func(do func(context.Context, *machine.Host, config.Box) error) func(*cobra.Command, []string) error {
		return func(cmd *cobra.Command, _ []string) error {
			host, err := a.thisMachine()
			if err != nil {
				return err
			}
			// k3s ends with its supervisor, in order.
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return do(ctx, host, config.Box{
				Paths: config.Paths{Data: data, Log: log}, K3s: config.K3s{DataDir: k3sData},
			})
		}
	}
	c.AddCommand(
		flags(&cobra.Command{
			Use: "node-ip", Short: "Settle the node's address before k3s starts", Args: noArgs,
			RunE: run(func(ctx context.Context, h *machine.Host, b config.Box) error { return h.NodeIP(ctx, b) }),
		}),
		flags(&cobra.Command{
			Use: "supervise", Short: "Keep k3s running where there is no service manager", Args: noArgs,
			RunE: run(func(ctx context.Context, h *machine.Host, b config.Box) error {
				if rebooted, err := h.Rebooted(ctx, b); err == nil && rebooted {
					go func() { _ = a.afterBoot(ctx, h) }()
				}
				return h.Supervise(ctx, b)
			}),
		}),
		flags(&cobra.Command{
			Use: "boot", Short: "Look after the box once after a boot", Args: noArgs,
			RunE: run(func(ctx context.Context, h *machine.Host, _ config.Box) error { return a.afterBoot(ctx, h) }),
		}),
		&cobra.Command{
			Use: "firstboot", Short: "Make this machine, made of a baked image, a box", Args: noArgs,
			RunE: func(*cobra.Command, []string) error { return a.firstBoot() },
		},
	)
	return c
}
