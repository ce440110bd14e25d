// Benchfirsttoken installs a box on an empty machine of the lab whose link is capped, by
// llmbox and as a script does it, part after part, and sets both beside the bound: the
// larger of the bytes over the link and the way to a model server that could be started,
// and then loading and warming up.
//
// docs/first-token.md says what is measured and what it can't show; parameters.yaml has
// every number that was chosen.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/test/internal/labproc"
)

// comparison is what came out at one cap.
type comparison struct {
	CapGbits      float64 `json:"cap_gbits_per_second"`
	BitsPerSecond float64 `json:"link_bits_per_second"`
	Bound         bound   `json:"bound"`
	Llmbox        side    `json:"llmbox"`
	Sequential    side    `json:"sequential"`
	Ratios        ratios  `json:"ratios"`
}

type result struct {
	Time         string     `json:"time"`
	Commit       string     `json:"commit"`
	Parameters   parameters `json:"parameters"`
	PayloadBytes int64      `json:"payload_bytes"`
	// Path is the one of Paths that had its model server started first.
	Path        side         `json:"path"`
	Paths       []side       `json:"paths"`
	Comparisons []comparison `json:"comparisons"`
}

type bench struct {
	root, bin, work, keep string
	p                     parameters
	order                 []component.Node
	vllmImage, envoyImage string
	big                   payload
	out                   io.Writer
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "benchfirsttoken:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	root, err := labproc.Root()
	if err != nil {
		return err
	}
	flags := flag.NewFlagSet("benchfirsttoken", flag.ContinueOnError)
	file := flags.String("parameters", filepath.Join(root, "test", "benchfirsttoken", "parameters.yaml"), "`file` of everything that is assumed")
	caps := flags.String("caps", "", "only these caps of the file, in Gb/s (`list` such as 1,10)")
	bin := flags.String("bin", filepath.Join(root, "bin"), "`directory` of llmbox, llmbox-lab and the lab's programs")
	work := flags.String("work", "", "`directory` to work in, with 15 GB of disk (default: a temporary one)")
	keep := flags.String("keep", "", "`directory` to keep llmbox' events in")
	to := flags.String("out", "", "`file` to write the figures to, as JSON")
	if err := flags.Parse(args); err != nil {
		return err
	}
	b := &bench{root: root, bin: *bin, keep: *keep, out: out}
	if b.p, err = loadParameters(*file); err != nil {
		return err
	}
	if b.p.Caps, err = chosen(b.p.Caps, *caps); err != nil {
		return err
	}
	if err := b.open(*work); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.work)) }()
	r := result{Time: time.Now().UTC().Format(time.RFC3339), Parameters: b.p}
	if r.Commit, err = labproc.Commit(ctx); err != nil {
		return err
	}
	if err := b.measure(ctx, &r); err != nil {
		return err
	}
	if *to == "" {
		return nil
	}
	raw, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the figures: %w", err)
	}
	if err := os.WriteFile(*to, append(raw, '\n'), 0o644); err != nil { // #nosec G306 -- meant to be read
		return fmt.Errorf("writing the figures: %w", err)
	}
	return nil
}

// chosen are the caps that a person names out of those of the file.
func chosen(all []float64, names string) ([]float64, error) {
	if names == "" {
		return all, nil
	}
	var out []float64
	for name := range strings.SplitSeq(names, ",") {
		c, err := strconv.ParseFloat(strings.TrimSpace(name), 64)
		if err != nil || !slices.Contains(all, c) {
			return nil, fmt.Errorf("-caps: %q is not one of %v", name, all)
		}
		out = append(out, c)
	}
	return out, nil
}

func (b *bench) open(work string) error {
	table, err := component.LoadTable(os.DirFS(filepath.Join(b.root, "embed")))
	if err != nil {
		return err
	}
	off := strings.Split(without, ",")
	order, err := component.Order(table.Components, func(name string) component.Mode {
		if slices.Contains(off, name) {
			return component.Off
		}
		return component.Install
	})
	if err != nil {
		return fmt.Errorf("ordering the components: %w", err)
	}
	// The lab offers the GPU, and weights are on the machine or come by the pod itself.
	b.order = slices.DeleteFunc(order, func(n component.Node) bool { return n.Name == "gpu-operator" || n.Name == "weights" })
	for _, image := range []struct {
		component, key string
		to             *string
	}{{"model", "vllm", &b.vllmImage}, {"envoy-gateway", "envoy", &b.envoyImage}} {
		c, ok := table.Get(image.component)
		if !ok || c.Images[image.key].Reference == "" {
			return fmt.Errorf("the component table has no image %s of %s", image.key, image.component)
		}
		*image.to = c.Images[image.key].Reference
	}
	if b.work, err = os.MkdirTemp(work, "bft-"); err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	return nil
}

func (b *bench) say(format string, args ...any) { _, _ = fmt.Fprintf(b.out, format+"\n", args...) }

// keepFile is where a file is kept, "" where nobody wants it.
func (b *bench) keepFile(name string) string {
	if b.keep == "" {
		return ""
	}
	return filepath.Join(b.keep, name)
}

func (b *bench) directory(name string) (string, error) {
	dir := filepath.Join(b.work, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("making a directory: %w", err)
	}
	return dir, nil
}

func (b *bench) measure(ctx context.Context, r *result) error {
	k3s := filepath.Join(b.bin, "lab", "k3s-standin")
	// The way to a model server with payloads that take no time: the same image without
	// what makes it large, weights of a few bytes, no cap, no load.
	dir, err := b.directory("small")
	if err != nil {
		return err
	}
	tiny := payload{k3s: k3s}
	if tiny.hub, err = makeHub(dir, []int64{1 << 10, 1 << 10, 1 << 10, 1 << 10}); err != nil {
		return err
	}
	var known learned
	for i := range b.p.PathRuns {
		if err := b.on(ctx, fmt.Sprintf("path-%d", i+1), tiny, 0, func(ctx context.Context, m *machine) error {
			one, err := b.byLlmbox(ctx, m, 0)
			if err != nil {
				return err
			}
			r.Paths = append(r.Paths, one)
			known, err = b.learn(ctx, m)
			return err
		}); err != nil {
			return err
		}
		b.say("path %d: the model server was started after %.0f s with nothing to wait for but itself (whole run %.1f s)", i+1, r.Paths[i].StartedSeconds, r.Paths[i].Seconds)
	}
	r.Path = slices.MinFunc(r.Paths, func(a, b side) int { return cmp.Compare(a.StartedSeconds, b.StartedSeconds) })

	if dir, err = b.directory("payload"); err != nil {
		return err
	}
	b.big = payload{k3s: k3s}
	if b.big.layers, err = makeImage(dir, b.p.ImageLayerBytes); err != nil {
		return err
	}
	if b.big.hub, err = makeHub(dir, b.p.WeightsFileBytes); err != nil {
		return err
	}
	for _, c := range b.p.Caps {
		one, err := b.compare(ctx, c, known, r)
		if err != nil {
			return err
		}
		r.Comparisons = append(r.Comparisons, one)
		b.print(one, r.PayloadBytes)
	}
	return nil
}

// on gives one side a machine of its own, so that neither finds what the other has fetched.
func (b *bench) on(ctx context.Context, name string, p payload, gbits float64, fn func(context.Context, *machine) error) (err error) {
	rate := 0.0
	if gbits > 0 {
		rate = b.p.bitsPerSecond(gbits)
	}
	m, err := b.startMachine(ctx, name, p, rate)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.stop()) }()
	ctx, cancel := context.WithTimeout(ctx, b.p.limit(gbits, sum(b.p.ImageLayerBytes)+sum(b.p.WeightsFileBytes)))
	defer cancel()
	return fn(ctx, m)
}

func (b *bench) compare(ctx context.Context, gbits float64, known learned, r *result) (comparison, error) {
	c := comparison{CapGbits: gbits, BitsPerSecond: b.p.bitsPerSecond(gbits)}
	if err := b.on(ctx, fmt.Sprintf("llmbox-%v", gbits), b.big, gbits, func(ctx context.Context, m *machine) (err error) {
		if c.Llmbox, err = b.byLlmbox(ctx, m, b.p.LoadSeconds); err != nil {
			return err
		}
		r.PayloadBytes, err = b.payloadBytes(ctx, m, known)
		return err
	}); err != nil {
		return c, err
	}
	b.say("%v Gb/s: llmbox %.1f s; its own account:\n%s", gbits, c.Llmbox.Seconds, c.Llmbox.account)
	if err := b.on(ctx, fmt.Sprintf("row-%v", gbits), b.big, gbits, func(ctx context.Context, m *machine) (err error) {
		c.Sequential, err = b.sequential(ctx, m, known)
		return err
	}); err != nil {
		return c, err
	}
	c.Bound = b.p.bound(gbits, r.PayloadBytes, r.Path.StartedSeconds)
	c.Ratios = ratiosOf(c.Bound.Seconds, c.Llmbox.Seconds, c.Sequential.Seconds)
	return c, nil
}

// payloadBytes is what has to pass the link: k3s, each image that a pod runs, the weights.
// llmbox' own image comes out of llmbox, and the sandbox's is left out as too small.
func (b *bench) payloadBytes(ctx context.Context, m *machine, known learned) (int64, error) {
	info, err := os.Stat(b.big.k3s)
	if err != nil {
		return 0, fmt.Errorf("measuring the payload: %w", err)
	}
	total := info.Size() + b.big.hub.bytes()
	for _, ref := range known.images {
		size, err := m.link.sizeOf(ctx, ref)
		if err != nil {
			return 0, err
		}
		total += size
	}
	return total, nil
}

func (b *bench) print(c comparison, payloadBytes int64) {
	b.say("")
	b.say("%v Gb/s, here %.1f Mb/s (bytes and cap × %.4f)", c.CapGbits, c.BitsPerSecond/1e6, b.p.scale())
	b.say("  %-34s %8.1f s", fmt.Sprintf("%.3f GB over the link", float64(payloadBytes)/1e9), c.Bound.LinkSeconds)
	b.say("  %-34s %8.1f s", "path to a startable model server", c.Bound.PathSeconds)
	b.say("  %-34s %8.1f s", "load, warm-up", c.Bound.LoadSeconds+c.Bound.WarmUpSeconds)
	b.say("  %-34s %8.1f s", "bound (larger of the first two + load)", c.Bound.Seconds)
	b.say("  %-34s %8.1f s   %.3f GB passed", "llmbox", c.Llmbox.Seconds, float64(c.Llmbox.LinkBytes)/1e9)
	b.say("  %-34s %8.1f s   %.3f GB passed", "the same parts in a row", c.Sequential.Seconds, float64(c.Sequential.LinkBytes)/1e9)
	for _, s := range []struct {
		name string
		side
	}{{"llmbox", c.Llmbox}, {"in a row", c.Sequential}} {
		b.say("    %-32s %8.1f s   cores busy %.0f s, waiting for the disk %.0f s, idle %.0f s",
			s.name+": server started after", s.StartedSeconds, s.Cores.Busy, s.Cores.IOWait, s.Cores.Idle)
	}
	for _, p := range c.Sequential.Parts {
		b.say("    %-32s %8.1f s", p.Name, p.Seconds)
	}
	verdict := "met"
	if !c.Ratios.Met {
		verdict = "not met"
	}
	b.say("  llmbox ÷ bound      %5.3f   goal at most %.2f", c.Ratios.LlmboxToBound, goal)
	b.say("  llmbox ÷ sequential %5.3f   goal within 15 %% of bound ÷ sequential, %.3f (off by %+.1f %%): %s",
		c.Ratios.LlmboxToSequential, c.Ratios.BoundToSequential, 100*c.Ratios.Off, verdict)
}
