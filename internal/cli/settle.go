package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/machine"
	"github.com/llmbox-dev/llmbox/internal/model"
)

// connectTimeout bounds the first question to an API server, so that a stale
// kubeconfig is told before anybody wonders.
const connectTimeout = 15 * time.Second

// assumedGPU is what a plan is made for where no GPU is known: the smallest
// data-centre card that clouds rent widely.
const assumedGPU = "a10"

// boxFlags are the flags that say what box is wanted.
type boxFlags struct {
	model    string
	revision string
	context  int
	start    string
	gpu      string
	gpus     int
	port     int
	engine   string
	set      []string
	hfToken  string
	off      []string
	// readGPUs reads the machine's own GPUs, where the command looks at a machine.
	readGPUs readGPUs
	// noAssumption leaves a box without known GPUs without any.
	noAssumption bool
	// machine is the one that becomes the box; nil where a cluster is asked instead.
	machine *machine.Host
	// commit is what the model's revision is at its source, and models where the machine
	// keeps it; both are found out once, before a run.
	commit string
	models *installer.HostModels
	// extra sets what a command decides itself, as strongly as a flag.
	extra func(*config.Layer) error
}

func (b *boxFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVarP(&b.model, "model", "m", "", "model to serve, such as Qwen/Qwen3-8B (default: the best open one that fits)")
	f.StringVar(&b.revision, "revision", "", "branch, tag or commit of the model")
	f.IntVar(&b.context, "context-tokens", 0, "longest prompt and answer together, in tokens (default: what fits)")
	f.StringVar(&b.start, "fast-start", "", "give up speed for a sooner start: off, graphs, eager, or auto (what it means alone)")
	f.Lookup("fast-start").NoOptDefVal = config.FastStartAuto
	f.StringVar(&b.gpu, "gpu", "", "GPU product, where it can't be read: "+joinKeys())
	f.IntVar(&b.gpus, "gpus", 0, "number of GPUs, where it can't be read")
	f.IntVar(&b.port, "port", 0, "TCP port of the gateway (default 8080)")
	f.StringVar(&b.engine, "engine", "", "how charts are installed: auto, helm or helmchart")
	f.StringVar(&b.hfToken, "hf-token-file", "", "file with a Hugging Face token, for models behind a licence")
	f.StringSliceVar(&b.off, "without", nil, "components to leave out, such as kyverno,policies")
	f.StringArrayVar(&b.set, "set", nil, "any key of the configuration, as KEY=VALUE, such as network.clusterCIDR=10.44.0.0/16")
}

func joinKeys() string {
	out := ""
	for _, k := range gpu.Keys() {
		if out != "" {
			out += ", "
		}
		out += k
	}
	return out
}

// layer turns the flags that were given into the strongest layer.
func (b *boxFlags) layer(cmd *cobra.Command) (config.Layer, error) {
	var l config.Layer
	var problems []error
	set := func(flag, path string, value any) {
		if cmd.Flags().Changed(flag) {
			problems = append(problems, l.Set(path, value, config.Flag(flag)))
		}
	}
	set("model", "model.name", b.model)
	set("revision", "model.revision", b.revision)
	set("context-tokens", "model.contextTokens", b.context)
	set("fast-start", "model.fastStart", b.start)
	set("gpu", "gpu.product", b.gpu)
	set("gpus", "gpu.count", b.gpus)
	set("port", "gateway.port", b.port)
	set("engine", "engine", b.engine)
	set("hf-token-file", "secrets.hfTokenFile", b.hfToken)
	for _, name := range b.off {
		problems = append(problems, l.Set("components."+name+".mode", config.ModeOff, config.Flag("without")))
	}
	for _, kv := range b.set {
		key, value, ok := cut(kv)
		if !ok {
			problems = append(problems, &config.Error{Place: "flag --set", Problem: fmt.Sprintf("%q has no =", kv), Fix: "write --set KEY=VALUE"})
			continue
		}
		problems = append(problems, l.SetString(key, value, config.Flag("set")))
	}
	if b.extra != nil {
		problems = append(problems, b.extra(&l))
	}
	return l, errors.Join(problems...)
}

func cut(kv string) (key, value string, ok bool) {
	for i := range len(kv) {
		if kv[i] == '=' {
			return kv[:i], kv[i+1:], true
		}
	}
	return kv, "", false
}

// settled is a box that is decided, with the plan for it.
type settled struct {
	table    *component.Table
	box      config.Box
	sources  config.Sources
	facts    []model.GPUFact
	choice   model.Choice
	plan     *installer.Plan
	recorded []byte
	// With a cluster: the connection, the state and the last run's journal.
	client *cluster.Client
	state  *installer.State
	last   installer.Journal
}

// settle decides the box and builds the plan for it.
func (a *app) settle(ctx context.Context, cmd *cobra.Command, flags *boxFlags, needCluster bool, log *slog.Logger) (*settled, error) {
	s, err := a.decide(ctx, cmd, flags, needCluster, log)
	if err != nil {
		return nil, err
	}
	in := installer.Input{
		Assets: assets.FS(), Table: s.table, Box: s.box, Choice: s.choice, Sources: s.sources, Version: a.env.Version,
		HostModels: flags.models,
	}
	if s.client != nil {
		in.KubeVersion = s.client.Version
		if in.APIServers, err = s.client.APIServers(ctx); err != nil {
			return s, err
		}
	}
	s.plan, err = installer.BuildPlan(in)
	return s, err
}

// decide resolves the configuration and chooses the model. With needCluster it
// connects first; without, it makes do with what is said. An error about the model
// comes with everything else that was decided.
func (a *app) decide(ctx context.Context, cmd *cobra.Command, flags *boxFlags, needCluster bool, log *slog.Logger) (*settled, error) {
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		return nil, err
	}
	catalogue, err := model.Load(assets.FS())
	if err != nil {
		return nil, err
	}
	flagLayer, err := flags.layer(cmd)
	if err != nil {
		return nil, err
	}
	envLayer, err := config.Env(a.env.Environ())
	if err != nil {
		return nil, err
	}
	fileLayer, err := a.fileLayer()
	if err != nil {
		return nil, err
	}
	s := &settled{table: table}
	var recordedLayer config.Layer
	var recorded []byte
	if needCluster {
		// What is wrong with the configuration itself is told before any connection.
		if err := a.check(table, flagLayer, envLayer, fileLayer); err != nil {
			return nil, err
		}
		if s.client, err = cluster.Connect(ctx, a.kubeconfigPath(), a.kubecontext, connectTimeout); err != nil {
			return nil, err
		}
		if s.state, s.last, recorded, err = installer.LoadState(ctx, s.client.Kube, log); err != nil {
			return nil, err
		}
	}
	if len(recorded) == 0 && flags.machine != nil {
		if recorded, err = flags.machine.Choices(ctx); err != nil {
			return nil, err
		}
	}
	if len(recorded) > 0 {
		if recordedLayer, err = config.ParseRecorded("recorded choices", recorded); err != nil {
			return nil, fmt.Errorf("reading the choices of the last run: %w", err)
		}
	}
	var computed config.Layer
	resolve := func() error {
		s.box, s.sources, err = config.Resolve(flagLayer, envLayer, fileLayer, recordedLayer, computed, config.Defaults())
		return err
	}
	if err := resolve(); err != nil {
		return nil, err
	}
	if last, chosen := recordedLayer.Get("model.name"); chosen && last != s.box.Model.Name {
		// What was found out about the former model says nothing about another.
		recordedLayer = recordedLayer.Without("model.revision", "model.contextTokens", "model.servedName")
		if err := resolve(); err != nil {
			return nil, err
		}
	}
	facts, err := s.gpuFacts(ctx, flags, &computed)
	if err != nil {
		return nil, err
	}
	if err := resolve(); err != nil {
		return nil, err
	}
	known := config.Known{Components: table.Names(), Profiles: []string{config.ProfileCore}, GPUs: gpu.Keys()}
	if err := config.Validate(s.box, s.sources, known); err != nil {
		return nil, err
	}
	if err := config.CheckImmutable(s.sources, recordedLayer); err != nil {
		return nil, err
	}
	s.facts = facts
	if err := s.chooseModel(catalogue, facts, &computed); err != nil {
		return s, err
	}
	if flags.commit != "" && s.box.Model.Revision == "" {
		if err := computed.Set("model.revision", flags.commit, config.Computed("what the source has now")); err != nil {
			return s, err
		}
	}
	if err := resolve(); err != nil {
		return nil, err
	}
	s.recorded, err = config.Record(s.sources)
	return s, err
}

// kubeconfigPath is what was named, else that of the box on this machine; empty for
// kubectl's own rules.
func (a *app) kubeconfigPath() string {
	if a.kubeconfig != "" || !a.onThisMachine() {
		return a.kubeconfig
	}
	if _, err := os.Stat(k3s.Kubeconfig); err == nil {
		return k3s.Kubeconfig
	}
	return ""
}

// check judges the configuration without the cluster's part in it.
func (a *app) check(table *component.Table, layers ...config.Layer) error {
	box, sources, err := config.Resolve(append(layers, config.Defaults())...)
	if err != nil {
		return err
	}
	return config.Validate(box, sources, config.Known{
		Components: table.Names(), Profiles: []string{config.ProfileCore}, GPUs: gpu.Keys(),
	})
}

func (a *app) fileLayer() (config.Layer, error) {
	switch a.configFile {
	case "-":
		return config.Read("stdin", a.env.Stdin)
	case "":
		layer, err := config.ReadFile(config.DefaultPath)
		if errors.Is(err, fs.ErrNotExist) {
			return config.Layer{}, nil
		}
		return layer, err
	default:
		layer, err := config.ReadFile(a.configFile)
		if errors.Is(err, fs.ErrNotExist) {
			return layer, usageError{fmt.Errorf("reading the configuration: %w", err), "name a file that exists with --config, or leave the flag out"}
		}
		return layer, err
	}
}

// gpuFacts finds out which GPUs the box has: what was said, what the cluster's
// nodes show, or an assumption that the plan names as such.
func (s *settled) gpuFacts(ctx context.Context, flags *boxFlags, computed *config.Layer) ([]model.GPUFact, error) {
	product, known := gpu.ProductByKey(s.box.GPU.Product)
	count := s.box.GPU.Count
	if s.box.GPU.Product == "" && (s.client == nil || flags.machine != nil) && flags.readGPUs != nil {
		facts, err := s.readFacts(ctx, flags.readGPUs, computed)
		if len(facts) > 0 || err != nil || flags.noAssumption {
			return facts, err
		}
	}
	if !known && s.client != nil {
		nodes, err := s.client.GPUNodes(ctx)
		if err != nil {
			return nil, err
		}
		for _, n := range nodes {
			if product, known = gpu.ProductByLabel(n.Product); known {
				if count == 0 {
					count = int(max(n.Count, n.Allocatable, 1))
				}
				why := config.Computed("labels of node " + n.Name)
				if err := errors.Join(computed.Set("gpu.product", product.Key, why), computed.Set("gpu.count", count, why)); err != nil {
					return nil, err
				}
				break
			}
		}
	}
	if !known {
		if s.box.GPU.Product != "" {
			return nil, nil // Validate names the known keys.
		}
		product, _ = gpu.ProductByKey(assumedGPU)
		why := config.Computed("assumed, no GPU is known here; say --gpu")
		if err := computed.Set("gpu.product", product.Key, why); err != nil {
			return nil, err
		}
	}
	if count == 0 {
		count = 1
		if err := computed.Set("gpu.count", count, config.Computed("one, if nothing is said")); err != nil {
			return nil, err
		}
	}
	return model.FactsOf(product, count), nil
}

// readFacts takes what the machine's own GPUs say.
func (s *settled) readFacts(ctx context.Context, read readGPUs, computed *config.Layer) ([]model.GPUFact, error) {
	facts, err := read(ctx)
	if errors.Is(err, errNoGPURead) {
		err = nil
	}
	if err != nil || len(facts) == 0 {
		return nil, err
	}
	why := config.Computed("read from the machine")
	problems := []error{computed.Set("gpu.count", len(facts), why)}
	if product, known := gpu.ProductByName(facts[0].Name); known {
		problems = append(problems, computed.Set("gpu.product", product.Key, why))
	}
	return facts, errors.Join(problems...)
}

// chooseModel takes the model that was asked for or the best that fits. A context
// that was asked for has to fit, too.
func (s *settled) chooseModel(catalogue model.Catalogue, facts []model.GPUFact, computed *config.Layer) error {
	name, asked := s.box.Model.Name, s.box.Model.ContextTokens
	if name == "" {
		chosen, err := catalogue.Choose(facts)
		if err != nil {
			return fmt.Errorf("choosing a model: %w", err)
		}
		s.choice, name = chosen, chosen.Model.Name
		if err := computed.Set("model.name", name, config.Computed(chosen.Reason)); err != nil {
			return err
		}
	}
	start := model.FastStart(s.box.Model.FastStart)
	if s.box.Model.Name != "" || asked > s.choice.ContextTokens || start != model.FastStartOff {
		reason := s.choice.Reason
		fitted, err := catalogue.FitStart(name, asked, facts, start, s.box.Model.ExtraArgs)
		s.choice = fitted
		if err != nil && !errors.Is(err, model.ErrUnknownModel) {
			return fmt.Errorf("fitting %s: %w", name, err)
		}
		if reason != "" {
			s.choice.Reason = reason
		}
	}
	if asked == 0 && s.choice.ContextTokens > 0 {
		return computed.Set("model.contextTokens", s.choice.ContextTokens, config.Computed("what fits beside the weights"))
	}
	return nil
}

// engine picks how charts reach the cluster.
func (s *settled) engine(ctx context.Context, log *slog.Logger) (installer.Engine, error) {
	return installer.NewEngine(ctx, s.client, s.box.Engine, s.last.Engine, log)
}
