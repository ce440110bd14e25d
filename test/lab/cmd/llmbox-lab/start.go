package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/test/lab/labdir"
	"github.com/llmbox-dev/llmbox/test/lab/node"
	"github.com/llmbox-dev/llmbox/test/lab/rehearsal"
	"github.com/llmbox-dev/llmbox/test/lab/standin"
)

func start(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("llmbox-lab start", flag.ContinueOnError)
	var (
		dir        = fs.String("dir", "", "the lab's own `directory`: made if absent, removed at the end")
		programs   = fs.String("programs", "", "`directory` of the built programs (default: lab beside this program)")
		key        = fs.String("gpu", "a100-80", "the simulated GPU, one of: "+strings.Join(gpu.Keys(), ", "))
		gpus       = fs.Int("gpus", 1, "GPUs on each node")
		nodes      = fs.Int("nodes", 1, "simulated nodes")
		delays     = fs.String("delays", "", "`file` with image sizes, bandwidth and start times (default: half a second for each pod)")
		gateway    = fs.Int("gateway-port", 0, "loopback `port` of the gateway's stand-in (default: a free one)")
		lifeline   = fs.Bool("lifeline", false, "stop when stdin ends, so that the lab can't outlive who started it")
		detach     = fs.Bool("detach", false, "return once the lab is up and leave it running")
		keep       = fs.Bool("keep-dir", false, "keep the directory, logs included, when the lab stops")
		timeout    = fs.Duration("timeout", 2*time.Minute, "give up when the lab is not up by then")
		verbose    = fs.Bool("verbose", false, "say more on stderr")
		isDetached = fs.Bool("detached", false, "set by --detach for the process it leaves behind")
		size       = fs.String("size", "rehearsal", "rehearsal (no container runs), node (a real node) or machine (an empty machine to install on); the last two need root")
		onNode     nodeFlags
	)
	onNode.register(fs)
	if err := parse(fs, args, false); err != nil {
		return err
	}
	if *dir == "" {
		return usageError("start needs --dir")
	}
	product, ok := gpu.ProductByKey(*key)
	if !ok {
		return usageError("unknown --gpu %q; known: %s", *key, strings.Join(gpu.Keys(), ", "))
	}
	if *gpus < 0 || *nodes < 1 || *gateway < 0 || *gateway > 65535 {
		return usageError("--gpus must be 0 or more, --nodes 1 or more, --gateway-port 0 to 65535")
	}
	if *size != "rehearsal" && *size != "node" && *size != "machine" {
		return usageError("--size is rehearsal, node or machine, not %q", *size)
	}
	if *size == "node" && (*nodes != 1 || *delays != "") {
		return usageError("--size node has one node and no --delays")
	}
	if *size == "machine" && (*nodes > 200 || *delays != "") {
		return usageError("--size machine has at most 200 machines and no --delays")
	}
	if *detach && *lifeline {
		return usageError("--detach and --lifeline exclude each other")
	}
	wait := standin.DefaultDelays()
	if *delays != "" {
		var err error
		if wait, err = standin.LoadDelays(*delays); err != nil {
			return err
		}
	}
	if *programs == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("finding the lab's programs: %w", err)
		}
		*programs = filepath.Join(filepath.Dir(self), "lab")
	}
	if *detach {
		return startDetached(ctx, args)
	}
	if *lifeline {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		defer cancel()
		go func() {
			// Both the end of input and an error mean that nobody holds the other side.
			_, _ = io.Copy(io.Discard, os.Stdin)
			cancel()
		}()
	}
	level := slog.LevelInfo
	if *verbose {
		level = slog.LevelDebug
	}
	// The lab's files, those of its programs included, are for its owner alone.
	unix.Umask(0o077)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	if *size != "rehearsal" {
		machines := 0
		if *size == "machine" {
			machines = *nodes
		}
		return startNode(ctx, node.Options{
			Dir: *dir, Programs: *programs, GPUs: *gpus, Product: product, Machines: machines,
			GatewayPort: *gateway, KeepDir: *keep, StartTimeout: *timeout, Log: log,
		}, onNode, *isDetached)
	}
	return rehearsal.Run(ctx, rehearsal.Options{
		Dir: *dir, Programs: *programs, Product: product, GPUs: *gpus, Nodes: *nodes, Delays: wait,
		GatewayPort: *gateway, KeepDir: *keep, StartTimeout: *timeout,
		Log: log,
	}, func(r rehearsal.Ready) error { return tell(r, r.Dir, *isDetached) })
}

// tell prints the one line that says that a lab is up.
func tell(ready any, dir string, isDetached bool) error {
	if isDetached {
		// Who started us reads stderr only until the next line is out.
		if err := logTo(filepath.Join(dir, "logs", "supervisor.log")); err != nil {
			return err
		}
	}
	line, err := json.Marshal(ready)
	if err != nil {
		return fmt.Errorf("encoding the line: %w", err)
	}
	_, err = os.Stdout.Write(append(line, '\n'))
	if isDetached {
		err = errors.Join(err, os.Stdout.Close())
	}
	return err
}

// startDetached runs the same command in a session of its own and returns when
// that one is up or has failed.
func startDetached(ctx context.Context, args []string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("detaching: %w", err)
	}
	args = slices.DeleteFunc(slices.Clone(args), func(a string) bool {
		return strings.TrimLeft(strings.TrimSuffix(a, "=true"), "-") == "detach"
	})
	cmd := exec.Command(self, append([]string{"start", "--detached"}, args...)...) // #nosec G204 -- this very program
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("detaching: %w", err)
	}
	// A file, not a pipe: it must stay writable when this process is gone.
	log, err := os.CreateTemp("", "llmbox-lab-*.log")
	if err != nil {
		return fmt.Errorf("detaching: %w", err)
	}
	defer func() { _ = log.Close() }()
	if err := os.Remove(log.Name()); err != nil {
		return fmt.Errorf("detaching: %w", err)
	}
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("detaching: %w", err)
	}
	interrupted := context.AfterFunc(ctx, func() { _ = cmd.Process.Signal(syscall.SIGTERM) })
	defer interrupted()
	line, err := io.ReadAll(out)
	if err == nil && len(line) > 0 {
		_, err = os.Stdout.Write(line)
		return err
	}
	wait := cmd.Wait()
	said, readErr := io.ReadAll(io.NewSectionReader(log, 0, 1<<20))
	if text := strings.TrimPrefix(strings.TrimSpace(string(said)), "llmbox-lab: "); text != "" {
		return errors.New(text)
	}
	return fmt.Errorf("starting the lab in the background: %w", errors.Join(err, readErr, wait))
}

// logTo sends stderr to a file.
func logTo(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600) // #nosec G304 -- inside the lab directory
	if err != nil {
		return fmt.Errorf("opening the supervisor's log: %w", err)
	}
	if err := unix.Dup2(int(f.Fd()), int(os.Stderr.Fd())); err != nil {
		return fmt.Errorf("opening the supervisor's log: %w", err)
	}
	return f.Close()
}

func stop(args []string) error {
	fs := flag.NewFlagSet("llmbox-lab stop", flag.ContinueOnError)
	dir := fs.String("dir", "", "the lab's `directory`")
	if err := parse(fs, args, false); err != nil {
		return err
	}
	if *dir == "" {
		return usageError("stop needs --dir")
	}
	if err := labdir.Stop(*dir, 15*time.Second); err != nil {
		return fmt.Errorf("stopping the lab in %s: %w", *dir, err)
	}
	return clearNode(*dir)
}

func sweep(args []string) error {
	fs := flag.NewFlagSet("llmbox-lab sweep", flag.ContinueOnError)
	root := fs.String("root", "", "the `directory` under which labs were started")
	if err := parse(fs, args, false); err != nil {
		return err
	}
	if *root == "" {
		return usageError("sweep needs --root")
	}
	swept, err := labdir.Sweep(*root)
	if err != nil {
		return err
	}
	var errs []error
	for _, s := range swept {
		switch {
		case s.Err == nil:
			errs = append(errs, clearNode(s.Path))
			fmt.Println("removed", s.Path)
		case errors.Is(s.Err, labdir.ErrInUse):
			fmt.Println("running", s.Path)
		default:
			errs = append(errs, s.Err)
		}
	}
	return errors.Join(errs...)
}
