// Benchinstall installs the same charts by llmbox and by the helm command line
// tool, one release after another with --wait, and sets both beside the bound
// that the table of pod start-up delays puts on any order of installing.
//
// Each side gets a fresh lab of the same programs and the same delays, so that
// neither finds images that the other has pulled. Helm is given what it does not
// do itself (namespaces, CRDs, the Secrets that charts refer to); that time
// counts on both sides. Helm's --wait looks at the pods of a chart only: it does
// not wait for what operators make from it, for a Vault that is unsealed or for a
// gateway that is programmed, as llmbox does. The comparison is in helm's favour
// there.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/secrets"
	"github.com/llmbox-dev/llmbox/test/internal/labproc"
)

const sideLimit = 20 * time.Minute

// left lists the components that are no part of the comparison: the model's
// image and weights are measured elsewhere, and these need the model.
func left() []string { return []string{"weights", "model", "route", "autoscale", "policies"} }

// side is what one way of installing took.
type side struct {
	WallSeconds float64 `json:"wall_seconds"`
	// CPUSeconds are those of the installing processes alone.
	CPUSeconds float64 `json:"cpu_seconds"`
	// PreparedSeconds of the wall time went into namespaces, CRDs and Secrets.
	PreparedSeconds float64            `json:"prepared_seconds"`
	ReleaseSeconds  map[string]float64 `json:"release_seconds,omitempty"`
}

func (s side) pods() float64 { return s.WallSeconds - s.PreparedSeconds }

type pair struct {
	Run    int  `json:"run"`
	Llmbox side `json:"llmbox"`
	Helm   side `json:"helm"`
}

type report struct {
	Time   string  `json:"time"`
	Commit string  `json:"commit"`
	Delays string  `json:"delays"`
	Bound  bound   `json:"bound"`
	Runs   []pair  `json:"runs"`
	Median figures `json:"median"`
}

// figures are the ratios that the goals are about.
type figures struct {
	LlmboxWallSeconds float64 `json:"llmbox_wall_seconds"`
	HelmWallSeconds   float64 `json:"helm_wall_seconds"`
	LlmboxCPUSeconds  float64 `json:"llmbox_cpu_seconds"`
	HelmCPUSeconds    float64 `json:"helm_cpu_seconds"`
	LlmboxToBound     float64 `json:"llmbox_to_bound"`
	LlmboxToHelm      float64 `json:"llmbox_to_helm"`
	BoundToSum        float64 `json:"bound_to_sum"`
	// The same without namespaces, CRDs and Secrets, which are no pods: what the
	// table speaks of.
	LlmboxPreparedSeconds float64 `json:"llmbox_prepared_seconds"`
	HelmPreparedSeconds   float64 `json:"helm_prepared_seconds"`
	PodsToBound           float64 `json:"pods_to_bound"`
	PodsToHelm            float64 `json:"pods_to_helm"`
	CPUToHelm             float64 `json:"cpu_to_helm"`
}

type bench struct {
	root, work string
	delays     string
	port       int
	table      *component.Table
	order      []component.Node
	labs       int
	out        io.Writer
	values     map[string]string
	workloads  map[string]workload
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "benchinstall:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	root, err := labproc.Root()
	if err != nil {
		return err
	}
	flags := flag.NewFlagSet("benchinstall", flag.ContinueOnError)
	runs := flags.Int("runs", 1, "`number` of comparisons; the median counts")
	file := flags.String("out", "", "`file` to write the figures to, as JSON")
	table := flags.String("delays", filepath.Join(root, "test", "benchinstall", "delays.yaml"), "`file` of pod start-up delays")
	if err := flags.Parse(args); err != nil {
		return err
	}
	d, err := loadDelays(*table)
	if err != nil {
		return err
	}
	b := &bench{root: root, delays: *table, out: out, values: map[string]string{}, workloads: map[string]workload{}}
	if err := b.open(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.work)) }()
	r := report{Time: time.Now().UTC().Format(time.RFC3339), Delays: filepath.Base(*table)}
	if r.Commit, err = labproc.Commit(ctx); err != nil {
		return err
	}
	for i := range max(*runs, 1) {
		p, err := b.compare(ctx, i+1)
		if err != nil {
			return err
		}
		r.Runs = append(r.Runs, p)
		b.say("run %d: llmbox %.1f s (%.1f s CPU), helm %.1f s (%.1f s CPU)", p.Run,
			p.Llmbox.WallSeconds, p.Llmbox.CPUSeconds, p.Helm.WallSeconds, p.Helm.CPUSeconds)
	}
	r.Bound = computeBound(d, b.order, b.workloads)
	r.Median = medians(r.Runs, r.Bound)
	b.print(r)
	if *file == "" {
		return nil
	}
	raw, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the figures: %w", err)
	}
	if err := os.WriteFile(*file, append(raw, '\n'), 0o644); err != nil { // #nosec G306 -- meant to be read
		return fmt.Errorf("writing the figures: %w", err)
	}
	return nil
}

func (b *bench) open(ctx context.Context) error {
	var err error
	if b.table, err = component.LoadTable(os.DirFS(filepath.Join(b.root, "embed"))); err != nil {
		return err
	}
	b.order, err = component.Order(b.table.Components, func(name string) component.Mode {
		if slices.Contains(left(), name) {
			return component.Off
		}
		return component.Install
	})
	if err != nil {
		return fmt.Errorf("ordering the components: %w", err)
	}
	if b.port, err = labproc.FreePort(ctx); err != nil {
		return err
	}
	if b.work, err = os.MkdirTemp("", "llmbox-bench-"); err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	return nil
}

func (b *bench) say(format string, args ...any) { _, _ = fmt.Fprintf(b.out, format+"\n", args...) }

// compare runs both sides. The first time llmbox goes first, because helm is
// given the values that llmbox computed; then they take turns.
func (b *bench) compare(ctx context.Context, n int) (pair, error) {
	p := pair{Run: n}
	sides := []func(context.Context, *labproc.Lab) error{
		func(ctx context.Context, lab *labproc.Lab) (err error) {
			p.Llmbox, err = b.byLlmbox(ctx, lab)
			return err
		},
		func(ctx context.Context, lab *labproc.Lab) (err error) { p.Helm, err = b.byHelm(ctx, lab); return err },
	}
	if n%2 == 0 {
		slices.Reverse(sides)
	}
	for _, one := range sides {
		if err := b.onFreshLab(ctx, one); err != nil {
			return p, err
		}
	}
	return p, nil
}

func (b *bench) onFreshLab(ctx context.Context, fn func(context.Context, *labproc.Lab) error) (err error) {
	b.labs++
	lab, err := labproc.Start(ctx, labproc.Options{
		Program: filepath.Join(b.root, "bin", "llmbox-lab"), Dir: b.work, Name: fmt.Sprintf("lab-%d", b.labs),
		GatewayPort: b.port, Delays: b.delays, Log: io.Discard,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lab.Stop()) }()
	ctx, cancel := context.WithTimeout(ctx, sideLimit)
	defer cancel()
	return fn(ctx, lab)
}

func (b *bench) byLlmbox(ctx context.Context, lab *labproc.Lab) (side, error) {
	var s side
	began := time.Now()
	// #nosec G204 -- the project's own program
	cmd := exec.CommandContext(ctx, filepath.Join(b.root, "bin", "llmbox"), "install", "--output", "json", "--log-file", os.DevNull,
		"--kubeconfig", lab.Kubeconfig, "--port", strconv.Itoa(b.port), "--without", strings.Join(left(), ","))
	var said strings.Builder
	cmd.Stderr = &said
	events, err := cmd.Output()
	s.WallSeconds = time.Since(began).Seconds()
	if err != nil {
		return s, fmt.Errorf("installing by llmbox: %w: %s", err, said.String())
	}
	s.CPUSeconds = cpu(cmd)
	s.PreparedSeconds = elapsed(events, "component/base")
	return s, b.learn(ctx, lab)
}

// elapsed finds how long a step took in a stream of events.
func elapsed(events []byte, step string) float64 {
	for line := range strings.Lines(string(events)) {
		var e struct {
			Type    string  `json:"type"`
			Step    string  `json:"step"`
			Elapsed float64 `json:"elapsed_ms"`
		}
		if json.Unmarshal([]byte(line), &e) == nil && e.Type == "step.done" && e.Step == step {
			return e.Elapsed / 1000
		}
	}
	return 0
}

// learn keeps the values that llmbox computed, for helm, and what the releases
// run, for the bound.
func (b *bench) learn(ctx context.Context, lab *labproc.Lab) error {
	for _, n := range b.order {
		if n.Chart == "" || b.values[n.Name] != "" {
			continue
		}
		values, err := b.helm(ctx, lab, "get", "values", n.Name, "--namespace", n.Namespace, "--output", "yaml").Output()
		if err != nil {
			return fmt.Errorf("reading the values of %s: %w", n.Name, err)
		}
		manifest, err := b.helm(ctx, lab, "get", "manifest", n.Name, "--namespace", n.Namespace).Output()
		if err != nil {
			return fmt.Errorf("reading the manifest of %s: %w", n.Name, err)
		}
		if b.workloads[n.Name], err = workloadOf(n.Component, string(manifest)); err != nil {
			return err
		}
		file := filepath.Join(b.work, n.Name+"-values.yaml")
		if err := os.WriteFile(file, values, 0o600); err != nil {
			return fmt.Errorf("keeping the values of %s: %w", n.Name, err)
		}
		b.values[n.Name] = file
	}
	return nil
}

func (b *bench) byHelm(ctx context.Context, lab *labproc.Lab) (side, error) {
	s := side{ReleaseSeconds: map[string]float64{}}
	began := time.Now()
	if err := b.prepare(ctx, lab); err != nil {
		return s, fmt.Errorf("preparing the cluster for helm: %w", err)
	}
	s.PreparedSeconds = time.Since(began).Seconds()
	for _, n := range b.order {
		if n.Chart == "" {
			continue
		}
		one := time.Now()
		cmd := b.helm(ctx, lab, "upgrade", "--install", n.Name, filepath.Join(b.root, "embed", "charts", n.Chart),
			"--namespace", n.Namespace, "--values", b.values[n.Name], "--wait", "--timeout", "10m")
		if out, err := cmd.CombinedOutput(); err != nil {
			return s, fmt.Errorf("installing %s by helm: %w: %s", n.Name, err, out)
		}
		s.CPUSeconds += cpu(cmd)
		s.ReleaseSeconds[n.Name] = time.Since(one).Seconds()
	}
	s.WallSeconds = time.Since(began).Seconds()
	return s, nil
}

// prepare applies what the charts take for granted, with the code that llmbox
// itself uses: quicker than a person's kubectl, and no CPU time of helm's.
func (b *bench) prepare(ctx context.Context, lab *labproc.Lab) error {
	client, err := cluster.Connect(ctx, lab.Kubeconfig, "", time.Minute)
	if err != nil {
		return err
	}
	embedded := os.DirFS(filepath.Join(b.root, "embed"))
	files, err := filepath.Glob(filepath.Join(b.root, "embed", "manifests", "*.yaml"))
	if err != nil {
		return fmt.Errorf("listing the manifests: %w", err)
	}
	for _, name := range files {
		objects, err := decodeFile(name)
		if err != nil {
			return err
		}
		for _, o := range objects {
			if _, err := client.Apply(ctx, o); err != nil {
				return err
			}
		}
	}
	var folders []string
	for _, n := range b.order {
		folders = append(folders, n.CRDs...)
	}
	slices.Sort(folders)
	crds, err := cluster.LoadCRDs(embedded, slices.Compact(folders))
	if err != nil {
		return err
	}
	if _, err := client.ApplyCRDs(ctx, crds, func(int, int) {}); err != nil {
		return err
	}
	return secrets.EnsureBoxSecrets(ctx, client.Kube, secrets.BoxSecrets{Grafana: true, GatewayKeys: true})
}

func decodeFile(name string) (objects []*unstructured.Unstructured, err error) {
	f, err := os.Open(name) // #nosec G304 -- in the clone
	if err != nil {
		return nil, fmt.Errorf("reading a manifest: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return chart.Decode(f)
}

func (b *bench) helm(ctx context.Context, lab *labproc.Lab, args ...string) *exec.Cmd {
	// #nosec G204 -- the pinned program, built by make
	cmd := exec.CommandContext(ctx, filepath.Join(b.root, "bin", "lab", "helm"), append(args, "--kubeconfig", lab.Kubeconfig)...)
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+b.work, "HELM_CONFIG_HOME="+b.work, "HELM_DATA_HOME="+b.work, "HOME="+b.work)
	return cmd
}

func cpu(cmd *exec.Cmd) float64 {
	return (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
}

func medians(runs []pair, b bound) figures {
	median := func(of func(pair) float64) float64 {
		var all []float64
		for _, p := range runs {
			all = append(all, of(p))
		}
		slices.Sort(all)
		if n := len(all); n%2 == 0 {
			return (all[n/2-1] + all[n/2]) / 2
		}
		return all[len(all)/2]
	}
	// Ratios are taken within a run, whose two sides saw the same machine.
	return figures{
		LlmboxWallSeconds: median(func(p pair) float64 { return p.Llmbox.WallSeconds }),
		HelmWallSeconds:   median(func(p pair) float64 { return p.Helm.WallSeconds }),
		LlmboxCPUSeconds:  median(func(p pair) float64 { return p.Llmbox.CPUSeconds }),
		HelmCPUSeconds:    median(func(p pair) float64 { return p.Helm.CPUSeconds }),
		LlmboxToBound:     median(func(p pair) float64 { return p.Llmbox.WallSeconds / b.BoundSeconds }),
		LlmboxToHelm:      median(func(p pair) float64 { return p.Llmbox.WallSeconds / p.Helm.WallSeconds }),
		CPUToHelm:         median(func(p pair) float64 { return p.Llmbox.CPUSeconds / p.Helm.CPUSeconds }),
		BoundToSum:        b.BoundSeconds / b.SumSeconds,

		LlmboxPreparedSeconds: median(func(p pair) float64 { return p.Llmbox.PreparedSeconds }),
		HelmPreparedSeconds:   median(func(p pair) float64 { return p.Helm.PreparedSeconds }),
		PodsToBound:           median(func(p pair) float64 { return p.Llmbox.pods() / b.BoundSeconds }),
		PodsToHelm:            median(func(p pair) float64 { return p.Llmbox.pods() / p.Helm.pods() }),
	}
}

func (b *bench) print(r report) {
	m := r.Median
	b.say("")
	b.say("delays by %s, one component at a time:", r.Delays)
	for _, n := range b.order {
		if s, ok := r.Bound.Alone[n.Name]; ok {
			b.say("  %-18s %6.1f s", n.Name, s)
		}
	}
	b.say("  %-18s %6.1f s", "sum", r.Bound.SumSeconds)
	b.say("critical path       %6.1f s  (%s)", r.Bound.CriticalPathSeconds, strings.Join(r.Bound.CriticalPath, " → "))
	b.say("the one link        %6.1f s  (every image once, and a start)", r.Bound.LinkSeconds)
	b.say("bound               %6.1f s  (the larger)", r.Bound.BoundSeconds)
	b.say("")
	b.say("%-20s %10s %12s %10s", "", "wall", "of it prep.", "CPU")
	b.say("%-20s %8.1f s %10.1f s %8.2f s", "llmbox", m.LlmboxWallSeconds, m.LlmboxPreparedSeconds, m.LlmboxCPUSeconds)
	b.say("%-20s %8.1f s %10.1f s %8.2f s", "helm, one by one", m.HelmWallSeconds, m.HelmPreparedSeconds, m.HelmCPUSeconds)
	b.say("prep.: namespaces, CRDs and Secrets, by the same code on both sides. helm --wait waits for the pods of charts")
	b.say("only, llmbox also for operands, the gateway and an unsealed Vault; by the table helm has %.1f s to wait.", r.Bound.WaitSeconds)
	b.say("")
	b.say("llmbox ÷ bound       %5.2f   goal at most 1.15", m.LlmboxToBound)
	b.say("llmbox ÷ helm        %5.2f   goal within 10 %% of bound ÷ sum, %.2f (off by %+.0f %%)", m.LlmboxToHelm, m.BoundToSum, 100*(m.LlmboxToHelm/m.BoundToSum-1))
	b.say("CPU llmbox ÷ helm    %5.2f   goal at most 0.60", m.CPUToHelm)
	b.say("without prep.: llmbox ÷ bound %.2f, llmbox ÷ helm %.2f", m.PodsToBound, m.PodsToHelm)
}
