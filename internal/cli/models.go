package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/model"
)

// mostGPUs is what one machine can hold.
const mostGPUs = 16

// maxTokenBytes is more than any token of the hub.
const maxTokenBytes = 4096

// readGPUs reads the GPUs of this machine.
type readGPUs func(ctx context.Context) ([]model.GPUFact, error)

// errNoGPURead says that this machine's GPUs can't be read here.
var errNoGPURead = errors.New("no GPU can be read here")

// modelsFlags are the flags of the models commands.
type modelsFlags struct {
	gpus    []string
	all     bool
	context int
	driver  string
	token   string
}

func (a *app) modelsCommand(gpus readGPUs) *cobra.Command {
	var flags modelsFlags
	list := func(cmd *cobra.Command, _ []string) error { return a.runModels(cmd, &flags, gpus) }
	cmd := &cobra.Command{
		Use:   "models",
		Short: "Show which models this box, or another GPU, can serve",
		Long: `models judges every model it knows against the GPUs of this machine, or against
those named with --gpu: whether it fits, with how long a context, for how many
requests at once, on how many GPUs together. Nothing is downloaded.`,
		Example: `  llmbox models
  llmbox models --gpu l4
  llmbox models --gpu a100-80x4 --all
  llmbox models --gpu rtx-5090 --context-tokens 32768 --output json | jq '.models[] | select(.fit == "fits")'
  llmbox models show Qwen/Qwen3-32B --gpu h100
  llmbox models show ./my-model --gpu l40s`,
		Args: noArgs,
		RunE: list,
	}
	f := cmd.PersistentFlags()
	f.StringSliceVar(&flags.gpus, "gpu", nil, "GPU product and how many, such as l4 or h100x8, instead of this machine's: "+joinKeys())
	f.BoolVar(&flags.all, "all", false, "also the models that don't fit, and gated ones")
	f.IntVar(&flags.context, "context-tokens", 0, "prompt and answer together that must fit, in tokens (default: as long as fits)")
	f.StringVar(&flags.driver, "driver", "", "version of the NVIDIA driver, for the choice of the image")
	f.StringVar(&flags.token, "hf-token-file", "", "file with a Hugging Face token, to read a gated model's description")
	cmd.AddCommand(&cobra.Command{
		Use: "list", Short: "Show which models fit (the default)", Example: "  llmbox models list --gpu l4", Args: noArgs, RunE: list,
	}, &cobra.Command{
		Use:   "show MODEL",
		Short: "Judge one model: of the list, a directory with its config.json, or on the hub",
		Example: `  llmbox models show Qwen/Qwen3-32B --gpu h100
  llmbox models show ./my-model --gpu l40s
  llmbox models show acme/some-model --gpu a10x2 --output json`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{errors.New("one model must be named"), helpOf(cmd)}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error { return a.runModelShow(cmd, args[0], &flags, gpus) },
	})
	return cmd
}

// facts gives the GPUs that were named, or this machine's.
func (f *modelsFlags) facts(ctx context.Context, gpus readGPUs) ([]model.GPUFact, error) {
	if len(f.gpus) == 0 {
		found, err := gpus(ctx)
		if err == nil && len(found) == 0 {
			err = model.ErrNoGPU
		}
		if err != nil {
			return nil, usageError{fmt.Errorf("reading this machine's GPUs: %w", err), "name a product instead, such as --gpu l4 or --gpu h100x8"}
		}
		return found, nil
	}
	var facts []model.GPUFact
	for _, text := range f.gpus {
		p, n, err := parseGPU(text)
		if err != nil {
			return nil, err
		}
		facts = append(facts, model.FactsOf(p, n)...)
	}
	if len(facts) > mostGPUs {
		return nil, usageError{fmt.Errorf("--gpu names %d GPUs, one machine holds at most %d", len(facts), mostGPUs), "name fewer"}
	}
	return facts, nil
}

// parseGPU reads KEY or KEYxN.
func parseGPU(text string) (gpu.Product, int, error) {
	if p, ok := gpu.ProductByKey(text); ok {
		return p, 1, nil
	}
	if at := strings.LastIndexByte(text, 'x'); at > 0 {
		n, err := strconv.Atoi(text[at+1:])
		p, ok := gpu.ProductByKey(text[:at])
		if err == nil && ok && n >= 1 && n <= mostGPUs {
			return p, n, nil
		}
	}
	return gpu.Product{}, 0, usageError{fmt.Errorf("--gpu %q: no such product", text), "KEY or KEYxN with one of " + joinKeys()}
}

// modelRow is one model of models --output json; units are in the names.
type modelRow struct {
	model.Fit
	Gated   bool     `json:"gated"`
	Licence string   `json:"licence"`
	Args    []string `json:"args,omitempty"`
	Source  string   `json:"source"`
	// WeightsFrom says how the size of the weights is known.
	WeightsFrom string `json:"weights_from"`
	Verified    bool   `json:"verified"`
	ToolParser  string `json:"tool_parser,omitempty"`
	Reasoning   string `json:"reasoning_parser,omitempty"`
}

func rowOf(f model.Fit) modelRow {
	m := f.Model
	row := modelRow{Fit: f, Gated: m.Gated, Licence: m.Licence, Source: m.Source, WeightsFrom: m.WeightsFrom, Verified: m.Verified, ToolParser: m.ToolParser, Reasoning: m.ReasoningParser}
	if f.Verdict != model.No {
		row.Args = f.Arguments.Args()
	}
	return row
}

func (a *app) runModels(cmd *cobra.Command, flags *modelsFlags, gpus readGPUs) error {
	catalogue, err := model.Load(assets.FS())
	if err != nil {
		return err
	}
	facts, err := flags.facts(cmd.Context(), gpus)
	if err != nil {
		return err
	}
	ask := model.Ask{ContextTokens: flags.context, Driver: flags.driver}
	rows, hidden := []modelRow{}, 0
	for _, m := range catalogue.Models {
		f := bestForm(m, facts, ask)
		if !flags.all && (f.Verdict == model.No || m.Gated) {
			hidden++
			continue
		}
		rows = append(rows, rowOf(f))
	}
	if a.output == "json" {
		return a.printJSON(map[string]any{"models": rows})
	}
	slices.SortStableFunc(rows, func(x, y modelRow) int {
		return int(y.Model.ParametersBillion*1000) - int(x.Model.ParametersBillion*1000)
	})
	var b strings.Builder
	fmt.Fprintf(&b, "GPU  %s\n", describeGPUs(facts))
	if choice, err := catalogue.Choose(facts); err == nil {
		fmt.Fprintf(&b, "Best %s: %s\n", choice.Model.Name, choice.Reason)
	}
	b.WriteString("\n")
	writeModels(&b, rows)
	if hidden > 0 {
		fmt.Fprintf(&b, "\n%d more don't fit or are gated: --all shows them\n", hidden)
	}
	_, err = fmt.Fprint(a.env.Stdout, wrapLines(b.String(), tableWidth))
	return err
}

// bestForm judges a model as its makers store it, and in a smaller form where that
// does not fit.
func bestForm(m model.Model, facts []model.GPUFact, ask model.Ask) model.Fit {
	best := m.Assess(facts, ask)
	for _, v := range m.Variants {
		if best.Verdict != model.No {
			break
		}
		tried := ask
		tried.Variant = v.Name
		if got := m.Assess(facts, tried); got.Verdict != model.No {
			return got
		}
	}
	return best
}

const (
	// tableWidth is what a terminal is taken to have.
	tableWidth = 100
	nameWidth  = 38
)

// writeModels writes the table, 100 columns wide; a reason stands on a line of its own.
func writeModels(b *strings.Builder, rows []modelRow) {
	fmt.Fprintf(b, "%-*s %-5s %8s %9s %7s %4s %7s  %s\n", nameWidth, "MODEL", "FIT", "CONTEXT", "KV TOKENS", "AT ONCE", "GPUS", "DISK", "LICENCE")
	for _, r := range rows {
		name := r.Name
		if r.Variant != "" {
			name += " (" + r.Variant + ")"
		}
		licence := r.Licence
		if r.Gated {
			licence += ", gated"
		}
		tokens, atOnce, length, gpus := "–", "–", "–", "–"
		if r.Verdict != model.No {
			length, gpus = thousands(int64(r.ContextTokens)), strconv.Itoa(r.TensorParallel)
			if r.KVTokens > 0 {
				tokens, atOnce = thousands(r.KVTokens), strconv.FormatFloat(r.Sequences, 'f', 1, 64)
			}
		}
		fmt.Fprintf(b, "%-*s %-5s %8s %9s %7s %4s %7s  %s\n", nameWidth, shorten(name, nameWidth), r.Verdict, length, tokens, atOnce, gpus,
			fmt.Sprintf("%d GB", (r.DiskBytes+1e9-1)/1e9), shorten(licence, 14))
		if r.Verdict != model.Fits {
			fmt.Fprintf(b, "    %s\n", r.Detail)
		}
	}
}

// thousands writes 131072 as 128K where that is exact enough to read.
func thousands(n int64) string {
	switch {
	case n >= 10_000_000:
		return fmt.Sprintf("%dM", n>>20)
	case n >= 1024:
		return fmt.Sprintf("%dK", n>>10)
	}
	return strconv.FormatInt(n, 10)
}

func shorten(text string, width int) string {
	if utf8.RuneCountInString(text) <= width {
		return text
	}
	return string([]rune(text)[:width-1]) + "…"
}

// wrapLines breaks lines at spaces, and sets what follows off like the line itself.
func wrapLines(text string, width int) string {
	var out []string
	for line := range strings.SplitSeq(text, "\n") {
		indent := line[:len(line)-len(strings.TrimLeft(line, " "))]
		for utf8.RuneCountInString(line) > width {
			cut := strings.LastIndexByte(string([]rune(line)[:width+1]), ' ')
			if cut <= len(indent) {
				break
			}
			out = append(out, strings.TrimRight(line[:cut], " "))
			line = indent + "  " + strings.TrimLeft(line[cut:], " ")
		}
		out = append(out, line)
	}
	return strings.Join(out, "\n")
}

func describeGPUs(facts []model.GPUFact) string {
	var parts []string
	for i := 0; i < len(facts); {
		n := 1
		for i+n < len(facts) && facts[i+n].Name == facts[i].Name && facts[i+n].MemoryTotalMiB == facts[i].MemoryTotalMiB {
			n++
		}
		part := fmt.Sprintf("%d × %s, %d MiB", n, facts[i].Name, facts[i].MemoryTotalMiB)
		if used := facts[i].MemoryUsedMiB; used > 0 {
			part += fmt.Sprintf(" (%d in use)", used)
		}
		parts = append(parts, part)
		i += n
	}
	return strings.Join(parts, "; ")
}

// runModelShow judges one model and says what its start would look like.
func (a *app) runModelShow(cmd *cobra.Command, name string, flags *modelsFlags, gpus readGPUs) error {
	catalogue, err := model.Load(assets.FS())
	if err != nil {
		return err
	}
	facts, err := flags.facts(cmd.Context(), gpus)
	if err != nil {
		return err
	}
	m, err := a.findModel(cmd.Context(), catalogue, name, flags)
	if err != nil {
		return err
	}
	ask := model.Ask{ContextTokens: flags.context, Driver: flags.driver}
	f := m.Assess(facts, ask)
	if f.Verdict == model.No {
		f.Instead = catalogue.Instead(m, facts, ask)
	}
	row := rowOf(f)
	if a.output == "json" {
		return a.printJSON(map[string]any{"models": []modelRow{row}})
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Model    %s, %.1f billion parameters, %s weights of %s (%s)\n", m.Name, m.ParametersBillion, m.Precision, gibibytes(m.WeightsBytes), m.WeightsFrom)
	fmt.Fprintf(&b, "GPU      %s\n", describeGPUs(facts))
	fmt.Fprintf(&b, "Fit      %s", f.Verdict)
	if f.Detail != "" {
		fmt.Fprintf(&b, ": %s", f.Detail)
	}
	b.WriteString("\n")
	if f.Verdict != model.No {
		fmt.Fprintf(&b, "Context  %d tokens; %d tokens of cache, %.1f requests of that length at once\n", f.ContextTokens, f.KVTokens, f.Sequences)
		fmt.Fprintf(&b, "Start    vllm serve %s\n", strings.Join(row.Args, " "))
	}
	if f.Image.Problem != "" {
		fmt.Fprintf(&b, "Image    %s: %s\n", dash(f.Image.Tag), f.Image.Problem)
	} else if f.Image.Tag != "" {
		fmt.Fprintf(&b, "Image    vllm/vllm-openai:%s (CUDA %s)\n", f.Image.Tag, f.Image.CUDA)
	}
	fmt.Fprintf(&b, "Disk     %s for weights and image\n", gibibytes(f.DiskBytes))
	if u := f.Budget; u.Total > 0 {
		fmt.Fprintf(&b, "Memory   of %s on each GPU: weights %s, work space %s, graphs %s, cache %s, left over %s\n", gibibytes(u.Total), gibibytes(u.Weights),
			gibibytes(u.Context+u.Activation), gibibytes(u.GraphsInside+u.GraphsOutside), gibibytes(max(0, u.Cache)), gibibytes(max(0, u.Outside)))
	}
	for _, w := range f.Warnings {
		fmt.Fprintf(&b, "Warning  %s\n", w)
	}
	for _, i := range f.Instead {
		fmt.Fprintf(&b, "Instead  %s\n", i)
	}
	fmt.Fprintf(&b, "Source   %s\n", m.Source)
	_, err = fmt.Fprint(a.env.Stdout, wrapLines(b.String(), tableWidth))
	return err
}

// findModel looks in the list, on disk, and then on the hub.
func (a *app) findModel(ctx context.Context, catalogue model.Catalogue, name string, flags *modelsFlags) (model.Model, error) {
	if m, ok := catalogue.Find(name); ok {
		return m, nil
	}
	m, err := model.ReadPath(name)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return m, err
	}
	token := a.env.Getenv("HF_TOKEN")
	if flags.token != "" {
		info, err := os.Stat(flags.token)
		if err != nil || info.Size() > maxTokenBytes {
			return model.Model{}, usageError{fmt.Errorf("reading --hf-token-file %s: not a file with a token", flags.token), "name a file that holds the token alone"}
		}
		data, err := os.ReadFile(flags.token)
		if err != nil {
			return model.Model{}, usageError{fmt.Errorf("reading --hf-token-file: %w", err), "name a file that can be read"}
		}
		token = strings.TrimSpace(string(data))
	}
	m, err = model.Hub{Token: token}.Read(ctx, name, "")
	switch {
	case errors.Is(err, model.ErrHubToken):
		return m, usageError{err, "llmbox models show " + name + " --hf-token-file FILE"}
	case errors.Is(err, model.ErrHubGate):
		return m, usageError{err, "accept the terms at " + model.HubBase + "/" + name + " with the token's account"}
	case errors.Is(err, model.ErrHubAbsent):
		return m, usageError{fmt.Errorf("%q is neither in the list, nor a directory or file, nor on the hub: %w", name, err), "llmbox models --all lists those known"}
	}
	return m, err
}

func gibibytes(n int64) string { return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30)) }
