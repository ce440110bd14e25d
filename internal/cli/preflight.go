package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	nvmlhelper "github.com/llmbox-dev/llmbox/embed/nvml"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/model"
	"github.com/llmbox-dev/llmbox/internal/preflight"
	"github.com/llmbox-dev/llmbox/internal/preflight/text"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// preflightFlags are the flags of preflight beside those of the box.
type preflightFlags struct {
	offline    bool
	fsync      bool
	snapshot   string
	save       string
	ignore     []string
	strict     bool
	all        bool
	fix        bool
	gpuTimeout time.Duration
	// adopt says that a k3s of somebody else's shall become the box's.
	adopt bool
	// agent says that the machine shall join another's box.
	agent bool
	// upgrade says that what is there may be replaced by downloads.
	upgrade bool
}

func (a *app) preflightCommand() *cobra.Command {
	var flags preflightFlags
	var box boxFlags
	cmd := &cobra.Command{
		Use:   "preflight",
		Short: "Say whether this machine will serve, before anything is touched",
		Long: `preflight looks at the GPU, its driver, the container toolkit, the operating
system, disks, network and what others left behind, and says what stands in the
way of an install: what was measured, what is required, and what to type. It
changes nothing. Run it as root to see everything; what it can't see it says.

With --fix it lists what it can mend safely, asks, does it and looks again. It
never reboots and never touches the NVIDIA driver.

With --kubeconfig it looks at an existing cluster instead of this machine.
With --snapshot it judges somebody else's machine, from a file or directory.`,
		Example: `  sudo llmbox preflight
  sudo llmbox preflight --model Qwen/Qwen3-32B
  sudo llmbox preflight --fix
  llmbox preflight --offline --output json | jq '.findings[] | select(.severity == "fail")'
  sudo llmbox preflight --save box.tar.gz      keep what was read, to be judged elsewhere
  llmbox preflight --snapshot box.tar.gz
  llmbox preflight --kubeconfig ~/.kube/config`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runPreflight(cmd, &box, flags) },
	}
	box.register(cmd)
	f := cmd.Flags()
	f.BoolVar(&flags.offline, "offline", false, "leave out whatever would leave the machine")
	f.BoolVar(&flags.fsync, "fsync", false, "measure how long writes take to reach the disk (writes 2 MB, removes them)")
	f.StringVar(&flags.snapshot, "snapshot", "", "judge this snapshot, a directory or .tar.gz, instead of the machine")
	f.StringVar(&flags.save, "save", "", "also write what was read to this directory or .tar.gz")
	f.StringSliceVar(&flags.ignore, "ignore", nil, "ids of checks that may fail; they still run and are shown")
	f.BoolVar(&flags.strict, "strict-warnings", false, "end with 4 where there are warnings")
	f.BoolVar(&flags.all, "all", false, "show each check that is well, too")
	f.BoolVar(&flags.fix, "fix", false, "mend what can be mended safely: list it, ask, do it, look again")
	f.DurationVar(&flags.gpuTimeout, "gpu-timeout", gpu.HangAfter, "how long the GPUs may take to answer before that counts as a hang")
	return cmd
}

// errWarnings ends a command with warnings only.
var errWarnings = errors.New("there are warnings")

func (a *app) runPreflight(cmd *cobra.Command, box *boxFlags, flags preflightFlags) error {
	if flags.snapshot != "" && flags.save != "" {
		return usageError{errors.New("--snapshot and --save exclude each other"), "a snapshot that is judged is there already"}
	}
	onCluster := a.kubeconfig != "" || a.kubecontext != ""
	if flags.fix && (flags.snapshot != "" || onCluster) {
		return usageError{errors.New("--fix mends this machine, not a snapshot or a cluster"), "leave one of the flags out"}
	}
	ctx := cmd.Context()
	var found []finding.Finding
	if onCluster {
		var err error
		if found, err = a.clusterFindings(ctx); err != nil {
			return err
		}
	} else {
		look, err := a.lookAtHost(ctx, cmd, box, flags)
		if err != nil {
			return err
		}
		found = look.found
	}
	if err := a.printFindings(found, flags.all); err != nil {
		return err
	}
	return verdict(found, flags.ignore, flags.strict)
}

func (a *app) clusterFindings(ctx context.Context) ([]finding.Finding, error) {
	client, err := cluster.Connect(ctx, a.kubeconfigPath(), a.kubecontext, connectTimeout)
	if err != nil {
		return nil, err
	}
	return preflight.Arrange(preflight.JudgeCluster(preflight.CollectCluster(ctx, client, preflight.ClusterTimeout))), nil
}

// hostLook is one look at a machine.
type hostLook struct {
	facts preflight.Facts
	found []finding.Finding
}

// lookAtHost judges the machine and, with --fix, mends it and looks again.
func (a *app) lookAtHost(ctx context.Context, cmd *cobra.Command, box *boxFlags, flags preflightFlags) (hostLook, error) {
	look, err := a.hostFindings(ctx, cmd, box, flags)
	if err != nil || !flags.fix {
		return look, err
	}
	changed, err := a.fix(ctx, look)
	if err != nil && !errors.Is(err, errNotMended) {
		return look, err
	}
	if changed {
		again, lookErr := a.hostFindings(ctx, cmd, box, flags)
		if lookErr != nil {
			return look, errors.Join(err, lookErr)
		}
		look = again
	}
	return look, err
}

// hostFindings reads the machine, or a snapshot of one, and judges it for the box
// that is asked for.
func (a *app) hostFindings(ctx context.Context, cmd *cobra.Command, box *boxFlags, flags preflightFlags) (hostLook, error) {
	// What is wrong with the flags is told before the machine is asked anything.
	blind := *box
	blind.noAssumption = true
	blind.readGPUs = func(context.Context) ([]model.GPUFact, error) { return nil, nil }
	before, err := a.decide(ctx, cmd, &blind, false, a.newLogger())
	if before == nil {
		return hostLook{}, err
	}
	nodes, err := component.Order(before.table.Components, func(name string) component.Mode { return component.Mode(before.box.Mode(name)) })
	if err != nil {
		return hostLook{}, fmt.Errorf("ordering the components: %w", err)
	}
	if flags.agent {
		nodes = installer.OnFurtherNodes(nodes)
	}
	installed, running := a.boxHere(ctx, before.box, flags)
	// What runs already needs nothing of the network.
	flags.offline = flags.offline || running && !flags.upgrade
	facts, err := a.machine(ctx, flags, installer.Need(nodes, before.box, model.Choice{}, before.table.K3s.Shipped))
	if err != nil {
		return hostLook{}, err
	}
	facts.Need.Installed = installed
	box.noAssumption = true
	box.readGPUs = func(context.Context) ([]model.GPUFact, error) {
		report := facts.FreedGPUReport()
		if report == nil {
			return nil, nil
		}
		return model.FactsOfReport(*report), nil
	}
	decided, err := a.decide(ctx, cmd, box, false, a.newLogger())
	if decided == nil {
		return hostLook{}, err
	}
	need := installer.Need(nodes, decided.box, decided.choice, decided.table.K3s.Shipped)
	need.Installed = installed
	// A snapshot that was taken offline says nothing about the network.
	var asked []snapshot.HTTPS
	state, _ := facts.Probe(snapshot.ProbeHTTPS, &asked)
	need.Offline = flags.offline || flags.snapshot != "" && state == snapshot.Absent
	facts.Need = need
	found := preflight.Judge(ctx, preflight.Checks(), facts)
	return hostLook{facts: facts, found: preflight.Arrange(append(found, preflight.ModelFit(decided.fit())))}, nil
}

// boxHere says whether a box of ours is on the machine, and whether its k3s runs. One
// that is about to be taken over counts as ours.
func (a *app) boxHere(ctx context.Context, box config.Box, flags preflightFlags) (installed, running bool) {
	if flags.snapshot != "" || runtime.GOOS != "linux" {
		return false, false
	}
	host, err := a.thisMachine()
	if err != nil {
		return false, false
	}
	existing, err := host.K3s(box).Existing(ctx)
	if err != nil {
		return false, false
	}
	installed = existing.Whose == k3s.Llmboxes || existing.Whose == k3s.Adopted || existing.Whose == k3s.Somebodys && flags.adopt
	return installed, installed && existing.Running
}

// fit is how the model fits the GPUs, the zero value without GPUs.
func (s *settled) fit() model.Fit {
	if len(s.facts) == 0 {
		return model.Fit{}
	}
	return s.choice.Fit
}

// machine collects the facts, or loads them.
func (a *app) machine(ctx context.Context, flags preflightFlags, need preflight.Need) (preflight.Facts, error) {
	if flags.snapshot != "" {
		s, err := snapshot.Load(flags.snapshot)
		if err != nil {
			return preflight.Facts{}, usageError{fmt.Errorf("reading the snapshot: %w", err), "llmbox preflight --save FILE makes one"}
		}
		return preflight.Facts{Snapshot: s}, nil
	}
	if runtime.GOOS != "linux" {
		return preflight.Facts{}, usageError{fmt.Errorf("this machine runs %s, a box needs Linux", runtime.GOOS), "run llmbox on the GPU machine"}
	}
	disks := []string{}
	for _, d := range need.Disk {
		disks = append(disks, d.Path)
	}
	s := snapshot.Collect(ctx, snapshot.Options{
		Version: a.env.Version, Offline: flags.offline, Hosts: need.Hosts, DiskPaths: disks,
		Fsync: flags.fsync, FsyncPath: disks[0], GPU: a.askGPUs(flags.gpuTimeout), GPUTimeout: flags.gpuTimeout + 5*time.Second,
	})
	if err := ctx.Err(); err != nil {
		return preflight.Facts{}, err
	}
	if flags.save != "" {
		if err := s.Save(flags.save); err != nil {
			return preflight.Facts{}, usageError{fmt.Errorf("writing the snapshot: %w", err), "name a place that can be written with --save"}
		}
	}
	return preflight.Facts{Snapshot: s}, nil
}

// askGPUs asks NVML through the embedded child, or whoever speaks instead.
func (a *app) askGPUs(hang time.Duration) func(context.Context) gpu.Report {
	if a.env.AskGPU == nil {
		return nil
	}
	return func(ctx context.Context) gpu.Report {
		return a.env.AskGPU(ctx, gpu.Options{
			Helper: nvmlhelper.Helper(), SMI: gpu.SMIPath(), HangAfter: hang,
			OnSlow: func(waited time.Duration) {
				_, _ = fmt.Fprintf(a.env.Stderr, "The GPU driver has not answered for %d s; the first question after boot can take half a minute.\n", int(waited.Seconds()))
			},
		})
	}
}

// machineGPUs is what this machine's GPUs are to a model.
func (a *app) machineGPUs(ctx context.Context) ([]model.GPUFact, error) {
	ask := a.askGPUs(gpu.HangAfter)
	if ask == nil {
		return nil, errNoGPURead
	}
	report := ask(ctx)
	if len(report.Devices) == 0 {
		return nil, fmt.Errorf("%w: %s", errNoGPURead, report.NVML.Detail)
	}
	return model.FactsOfReport(report), nil
}

type findingsDoc struct {
	Findings []finding.Finding `json:"findings"`
}

func (a *app) printFindings(found []finding.Finding, all bool) error {
	if a.output == "json" {
		enc := json.NewEncoder(a.env.Stdout)
		enc.SetIndent("", "  ")
		if err := enc.Encode(findingsDoc{Findings: slices.Concat([]finding.Finding{}, found)}); err != nil {
			return fmt.Errorf("writing findings: %w", err)
		}
		return nil
	}
	return text.Text(a.env.Stdout, found, a.width(), a.color(), all)
}

// width is the terminal's, 100 columns where there is none.
func (a *app) width() int {
	const usual = 100
	if !a.env.Terminal {
		return usual
	}
	columns, _, err := term.GetSize(int(os.Stdout.Fd()))
	if err != nil || columns <= 0 {
		return usual
	}
	return min(columns, usual)
}

func (a *app) color() bool {
	return a.env.Terminal && !a.noColor && a.env.Getenv("NO_COLOR") == "" && a.env.Getenv("TERM") != "dumb"
}

// verdict turns findings into the command's end.
func verdict(found []finding.Finding, ignore []string, strictWarnings bool) error {
	for _, id := range ignore {
		if !slices.ContainsFunc(found, func(f finding.Finding) bool { return f.ID == id }) {
			return &config.Error{Place: "flag --ignore", Problem: fmt.Sprintf("no check is called %q", id), Fix: "llmbox preflight --all lists them"}
		}
	}
	if stopping := preflight.Stopping(found, ignore); len(stopping) > 0 {
		return fmt.Errorf("%w: %s", installer.ErrCheckFailed, strings.Join(stopping, ", "))
	}
	if strictWarnings && slices.ContainsFunc(found, func(f finding.Finding) bool { return f.Severity == finding.Warn }) {
		return errWarnings
	}
	return nil
}
