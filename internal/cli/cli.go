// Package cli is the command line: one file a command, each parsing its flags,
// calling the package that does the work and printing through a renderer. No
// decision about a box is taken here.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"golang.org/x/term"
	"k8s.io/klog/v2"

	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/incluster"
	"github.com/llmbox-dev/llmbox/internal/report"
)

// Env is everything the command line takes from its process, so that tests can
// run a command without one.
type Env struct {
	Version string
	Stdin   io.Reader
	Stdout  io.Writer
	Stderr  io.Writer
	// Terminal says whether Stdout is one.
	Terminal bool
	Getenv   func(string) string
	Environ  func() []string
	// Executable is the path of the running binary.
	Executable func() (string, error)
	// AskGPU asks this machine's GPUs; nil where there is no machine to ask.
	AskGPU func(context.Context, gpu.Options) gpu.Report
}

// Process is the Env of a real process.
func Process(version string) Env {
	return Env{
		Version: version, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Terminal: term.IsTerminal(int(os.Stdout.Fd())),
		Getenv:   os.Getenv, Environ: os.Environ, Executable: os.Executable, AskGPU: gpu.Ask,
	}
}

// app is what the commands share.
type app struct {
	env Env
	// The global flags.
	configFile  string
	output      string
	logFile     string
	reportFile  string
	noColor     bool
	yes         bool
	kubeconfig  string
	kubecontext string
}

// Main runs the command line and returns the exit code.
func Main(args []string, env Env) int {
	a := &app{env: env}
	// What Kubernetes' libraries log would tear the screen; a session takes it over.
	klog.SetLogger(logr.Discard())
	root := a.root()
	root.SetArgs(args)
	root.SetIn(env.Stdin)
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	err := root.ExecuteContext(context.Background())
	if err != nil {
		a.printError(err)
	}
	return exitCode(err)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "llmbox",
		Short: "Turn an NVIDIA GPU machine into a box that serves an LLM",
		Long: `llmbox turns a bare NVIDIA GPU machine into a box that serves an LLM behind an
OpenAI-compatible API: it checks the machine, brings in Kubernetes and its
operators in the right order, and is done when a real token came back through
the gateway. Run it again after whatever went wrong: it goes on where it was.`,
		Example: `  llmbox plan --gpu l4                    what would be installed, in five seconds
  llmbox rehearse                         the whole install against a real API server, without a GPU
  sudo llmbox install                     this machine becomes a box
  llmbox install --kubeconfig ~/.kube/config --model Qwen/Qwen3-8B
  sudo llmbox status`,
		SilenceUsage:  true,
		SilenceErrors: true,
		// Only an unknown command gets here with arguments.
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("unknown command %q", args[0]), helpOf(cmd)}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	f := root.PersistentFlags()
	f.StringVar(&a.configFile, "config", "", "configuration file, or - for standard input (default /etc/llmbox/config.yaml if it exists)")
	f.StringVarP(&a.output, "output", "o", "text", "output format: text or json")
	f.StringVar(&a.logFile, "log-file", "", "append every event to this file as NDJSON")
	f.BoolVar(&a.noColor, "no-color", false, "no colour, as with NO_COLOR")
	f.BoolVarP(&a.yes, "yes", "y", false, "answer every question with yes")
	f.StringVar(&a.kubeconfig, "kubeconfig", "", "kubeconfig of an existing cluster (default $KUBECONFIG, else the box on this machine)")
	f.StringVar(&a.kubecontext, "context", "", "context in the kubeconfig")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return usageError{err, helpOf(cmd)} })
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		if a.output != "text" && a.output != "json" {
			return usageError{fmt.Errorf("--output is %q: it must be text or json", a.output), "--output text or --output json"}
		}
		return nil
	}
	root.AddCommand(
		a.installCommand(), a.planCommand(), a.statusCommand(), a.upgradeCommand(), a.uninstallCommand(),
		a.imagesCommand(), a.bundleCommand(), a.bakeCommand(), a.rehearseCommand(), a.versionCommand(), a.eventsSchemaCommand(),
		a.modelsCommand(a.machineGPUs), a.preflightCommand(),
		a.doctorCommand(), a.supportBundleCommand(),
		a.keysCommand(), a.chatCommand(), a.benchCommand(), a.tokenCommand(), a.joinCommand(),
		incluster.Command(), a.hostCommand(),
	)
	return root
}

// session is one run with its renderers, log and signals.
type session struct {
	app      *app
	renderer report.Renderer
	recorder *report.Recorder
	log      *slog.Logger
	logFile  io.Closer
	sink     event.Sink
	title    string

	// interrupt is closed by the first request to stop; the second one cancels.
	interrupt chan struct{}
	cancel    context.CancelFunc
	once      sync.Once
	stop      func()
}

// start opens the renderers and takes over the signals. The returned context
// ends at once on a second interrupt.
func (a *app) start(ctx context.Context, title string) (context.Context, *session, error) {
	ctx, cancel := context.WithCancel(ctx)
	s := &session{app: a, title: title, recorder: report.NewRecorder(), interrupt: make(chan struct{}), cancel: cancel}
	// A dropped connection must not stop an install: the run goes on, in the log.
	// The screen, opened after this, gives the terminal back on a hangup.
	signal.Ignore(syscall.SIGHUP)
	var keys io.Reader
	if a.env.Terminal {
		if tty := report.OpenKeys(); tty != nil {
			keys = tty
		}
	}
	s.renderer = report.New(report.Options{
		Title: title, Version: a.env.Version, Stdout: a.env.Stdout, Stderr: a.env.Stderr, Terminal: a.env.Terminal,
		Getenv: a.env.Getenv, NoColor: a.noColor, Format: report.Format(a.output), Keys: keys,
		Interrupt: s.stopSoftly,
	})
	sinks := event.Fanout{s.renderer, s.recorder}
	if a.logFile != "" {
		log, err := report.OpenLog(a.logFile)
		if err != nil {
			cancel()
			return nil, nil, errors.Join(usageError{err, "name a file that can be written with --log-file"}, s.renderer.Close())
		}
		sinks = append(sinks, log)
		s.logFile = log
	}
	s.sink = sinks
	s.log = slog.New(newEventHandler(sinks))
	klog.SetSlogLogger(s.log.With("from", "client-go"))

	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-signals:
				s.stopSoftly()
			case <-done:
				return
			}
		}
	}()
	s.stop = func() { signal.Stop(signals); close(done); cancel() }
	return ctx, s, nil
}

// stopSoftly lets what is being done finish; asked again, it stops at once.
func (s *session) stopSoftly() {
	first := false
	s.once.Do(func() { first = true; close(s.interrupt) })
	if !first {
		s.cancel()
	}
}

// end closes the renderers and writes the report that was asked for.
func (s *session) end() error {
	s.stop()
	err := s.renderer.Close()
	if s.logFile != nil {
		err = errors.Join(err, s.logFile.Close())
	}
	if s.app.reportFile != "" {
		meta := report.Meta{Title: s.title, Version: s.app.env.Version}
		err = errors.Join(err, report.WriteReport(s.app.reportFile, s.recorder.Timeline(), meta))
	}
	return err
}

// newLogger writes warnings of commands that have no events to stderr.
func (a *app) newLogger() *slog.Logger {
	return slog.New(slog.NewTextHandler(a.env.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// eventHandler turns log records into events, so that a screen stays whole.
type eventHandler struct {
	sink  event.Sink
	attrs []slog.Attr
}

func newEventHandler(sink event.Sink) eventHandler { return eventHandler{sink: sink} }

func (h eventHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}

func (h eventHandler) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	if r.Level >= slog.LevelWarn {
		b.WriteString(strings.ToLower(r.Level.String()) + ": ")
	}
	b.WriteString(r.Message)
	write := func(a slog.Attr) bool {
		fmt.Fprintf(&b, " %s=%s", a.Key, strings.Join(strings.Fields(a.Value.String()), " "))
		return true
	}
	for _, a := range h.attrs {
		write(a)
	}
	r.Attrs(write)
	h.sink.Emit(event.Event{Time: r.Time, Type: event.Log, Message: b.String()})
	return nil
}

func (h eventHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return eventHandler{sink: h.sink, attrs: append(h.attrs[:len(h.attrs):len(h.attrs)], attrs...)}
}

func (h eventHandler) WithGroup(string) slog.Handler { return h }
