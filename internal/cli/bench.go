package cli

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/llmbox-dev/llmbox/internal/bench"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/openai"
)

const (
	// benchLevelTime is after how long a level begins no further request.
	benchLevelTime = 2 * time.Minute
	// benchTold is how often a level says how far it is.
	benchTold = 5 * time.Second
	// benchAbout bounds the questions what the box is.
	benchAbout = 10 * time.Second
)

type benchFlags struct {
	concurrency []int
	requests    int
	duration    time.Duration
	prompt      int
	answer      int
	model       string
	keyFile     string
	timeout     time.Duration
	save        string
	compare     string
}

func (a *app) benchCommand() *cobra.Command {
	var flags benchFlags
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure how fast the box answers: first token, gaps, tokens a second",
		Long: `bench asks the model through the gateway, with a key, as clients do, with more and
more requests at once, and says how long the first token took, how far apart the
following pieces came and how many tokens a second that makes. It counts what fails
by its kind and leaves it out of every figure. Prompts are made of synthetic words;
no two of them begin alike, so that what the model server keeps of former prompts
doesn't flatter it. One request before the first doesn't count.

It loads the box: others wait longer meanwhile. Ctrl-C ends with what was measured
so far. --compare shows two saved results side by side and asks no box.`,
		Example: `  llmbox bench
  llmbox bench --concurrency 1,16,64 --max-tokens 256 --save l4.json
  llmbox bench --requests 200 --duration 10m --prompt-tokens 2000
  llmbox bench --key-file ci.key --output json | jq '.levels[].tokens_per_second'
  llmbox bench --compare l4.json a10.json`,
		Args: func(cmd *cobra.Command, args []string) error {
			if flags.compare == "" {
				return noArgs(cmd, args)
			}
			if len(args) > 1 {
				return usageError{fmt.Errorf("%d results where two can be compared", len(args)+1), "llmbox bench --compare FILE FILE"}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if flags.compare != "" {
				return a.runBenchCompare(&flags, args)
			}
			return a.runBench(cmd, &flags)
		},
	}
	f := cmd.Flags()
	f.IntSliceVar(&flags.concurrency, "concurrency", []int{1, 4, 8}, fmt.Sprintf("requests at once, one level each, up to %d", bench.MaxConcurrency))
	f.IntVar(&flags.requests, "requests", 0, "requests of each level (default: 4 for each at once, at least 16)")
	f.DurationVar(&flags.duration, "duration", benchLevelTime, "after how long a level begins no further request")
	f.IntVar(&flags.prompt, "prompt-tokens", 256, "length of a prompt in words, most of which are one token")
	f.IntVar(&flags.answer, "max-tokens", 128, "length of each answer in tokens")
	f.StringVar(&flags.model, "model", "", "name of the model to ask (default: the one that is served)")
	f.StringVar(&flags.keyFile, "key-file", "", "file with the key to use (default: the box's own)")
	f.DurationVar(&flags.timeout, "timeout", tokenWait, "longest time of one request")
	f.StringVar(&flags.save, "save", "", "also write the result to this file")
	f.StringVar(&flags.compare, "compare", "", "show this result beside that of the file named after it, without asking a box")
	return cmd
}

func (f *benchFlags) parameters() (bench.Parameters, error) {
	p := bench.Parameters{
		Concurrency: f.concurrency, Requests: f.requests, Seconds: f.duration.Seconds(),
		PromptTokens: f.prompt, MaxTokens: f.answer, TimeoutSeconds: f.timeout.Seconds(),
	}
	if err := p.Check(); err != nil {
		return p, usageError{err, "llmbox bench --help shows what can be said"}
	}
	if f.save != "" {
		if info, err := os.Stat(filepath.Dir(f.save)); err != nil || !info.IsDir() {
			return p, usageError{fmt.Errorf("--save %s: there is no such folder", f.save), "name a file in a folder that is there"}
		}
	}
	return p, nil
}

func (a *app) runBench(cmd *cobra.Command, flags *benchFlags) error {
	p, err := flags.parameters()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	b, door, key, err := a.endpoint(ctx, cmd, flags.keyFile)
	if err != nil {
		return err
	}
	most := 1
	for _, n := range p.Concurrency {
		most = max(most, n)
	}
	client := openai.New(manyConnections(door.HTTP, most), door.URL, key, flags.timeout)
	return a.measure(ctx, client, b.about(ctx), p, flags)
}

// manyConnections keeps as many connections open as there are requests at once. Go keeps
// two, and so would most requests begin with a handshake that no client of a pool makes.
func manyConnections(client *http.Client, n int) *http.Client {
	transport := client.Transport
	if transport == nil {
		transport = http.DefaultTransport
	}
	known, ok := transport.(*http.Transport)
	if !ok {
		return client
	}
	kept := known.Clone()
	kept.MaxIdleConns, kept.MaxIdleConnsPerHost = max(kept.MaxIdleConns, n), n
	own := *client
	own.Transport = kept
	return &own
}

// about says what is measured, as far as the cluster shows it: that it does not is no
// reason not to measure.
func (b *installedBox) about(ctx context.Context) bench.Box {
	ctx, cancel := context.WithTimeout(ctx, benchAbout)
	defer cancel()
	box := bench.Box{Model: b.box.Model.Name, Revision: b.box.Model.Revision}
	pods, err := b.client.Kube.CoreV1().Pods("llm").List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=model-server"})
	if err != nil {
		return box
	}
	node := ""
	for i := range pods.Items {
		pod := &pods.Items[i]
		if pod.DeletionTimestamp != nil || pod.Status.Phase != corev1.PodRunning {
			continue
		}
		node = pod.Spec.NodeName
		for _, c := range pod.Spec.Containers {
			if c.Name != "vllm" {
				continue
			}
			box.Image = c.Image
			for name, count := range c.Resources.Limits {
				// A GPU, or a slice of one under its own name.
				if strings.HasPrefix(string(name), "nvidia.com/") {
					box.GPUs += int(min(count.Value(), math.MaxInt16))
				}
			}
		}
	}
	nodes, err := b.client.GPUNodes(ctx)
	if err != nil {
		return box
	}
	for _, n := range nodes {
		if n.Name == node {
			box.GPU = n.Product
			if p, known := gpu.ProductByLabel(n.Product); known {
				box.GPU = p.Name
			}
		}
	}
	return box
}

// measure runs the levels, and shows and saves what came out.
func (a *app) measure(ctx context.Context, client *openai.Client, box bench.Box, p bench.Parameters, flags *benchFlags) error {
	box.ServedName = flags.model
	if box.ServedName == "" {
		var err error
		if box.ServedName, err = served(ctx, client); err != nil {
			return chatError(err, flags.keyFile)
		}
	}
	var salt [8]byte
	if _, err := rand.Read(salt[:]); err != nil {
		return fmt.Errorf("drawing the prompts' first words: %w", err)
	}
	run := &bench.Run{
		Asker: client, Model: box.ServedName, Parameters: p, Salt: binary.LittleEndian.Uint64(salt[:]), Progress: benchProgress(a.env.Stderr, time.Now),
	}
	began := time.Now()
	levels, err := run.Measure(ctx)
	cutOff := errors.Is(err, context.Canceled)
	if len(levels) > 0 {
		result := bench.NewResult(began, a.env.Version, box, p, levels, cutOff)
		if problem := a.giveResult(result, flags.save); problem != nil {
			return problem
		}
		if err == nil {
			return benchError(result)
		}
	}
	return chatError(err, flags.keyFile)
}

func (a *app) giveResult(result bench.Result, file string) error {
	var shown error
	if a.output == "json" {
		shown = a.printJSON(result)
	} else {
		_, shown = io.WriteString(a.env.Stdout, benchText(result))
	}
	// What took minutes to measure is kept, whatever became of the way to show it.
	if file != "" {
		if err := bench.Save(file, result); err != nil {
			return err
		}
		_, _ = fmt.Fprintf(a.env.Stderr, "saved in %s\n", file)
	}
	return shown
}

// someFailedError says that a measurement is there and not of every request.
type someFailedError struct{ failed, of int }

func (e someFailedError) Error() string {
	return fmt.Sprintf("%d of %d requests failed; the figures leave them out", e.failed, e.of)
}

func (someFailedError) Unwrap() error { return errWarnings }

func benchError(r bench.Result) error {
	failed, succeeded := r.Failures(), r.Succeeded()
	switch {
	case failed == 0:
		return nil
	case succeeded == 0:
		return notReady("llmbox doctor says why; llmbox chat hello shows one failure in full", "none of %d requests succeeded", failed)
	}
	return fixedError{someFailedError{failed, failed + succeeded},
		"fewer at once with --concurrency; gateway.rateLimit.requestsPerMinute sets the limit behind 429"}
}

// benchProgress says how far each level is, at its ends and now and then.
func benchProgress(out io.Writer, now func() time.Time) func(bench.Progress) {
	var told time.Time
	return func(p bench.Progress) {
		// The last one of a level is told at its end.
		if !p.Begun && !p.Ended && (now().Sub(told) < benchTold || p.Done == p.Requests) {
			return
		}
		told = now()
		if p.Begun {
			_, _ = fmt.Fprintf(out, "%d at once: %d requests\n", p.Concurrency, p.Requests)
			return
		}
		line := fmt.Sprintf("%d at once: %d of %d done", p.Concurrency, p.Done, p.Requests)
		if p.Failed > 0 {
			line += fmt.Sprintf(", %d failed", p.Failed)
		}
		_, _ = fmt.Fprintln(out, line)
	}
}

func (a *app) runBenchCompare(flags *benchFlags, args []string) error {
	if flags.save != "" {
		return usageError{errors.New("--compare measures nothing that --save could write"), "leave one of the flags out"}
	}
	first, err := loadBench(flags.compare)
	if err != nil {
		return err
	}
	if len(args) == 0 {
		return a.giveResult(first, "")
	}
	second, err := loadBench(args[0])
	if err != nil {
		return err
	}
	c := bench.Compare(first, second)
	if a.output == "json" {
		return a.printJSON(c)
	}
	_, err = io.WriteString(a.env.Stdout, benchCompareText(c))
	return err
}

func loadBench(path string) (bench.Result, error) {
	r, err := bench.Load(path)
	if err != nil {
		return r, usageError{err, "name a file that llmbox bench --save FILE wrote"}
	}
	return r, nil
}
