package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/report"
)

// labStep is the path of the step in which the lab's cluster comes up.
const labStep = "rehearsal/cluster"

// labStartTimeout bounds the start of the lab's control plane.
const labStartTimeout = 3 * time.Minute

func (a *app) rehearseCommand() *cobra.Command {
	var flags boxFlags
	var keep bool
	cmd := &cobra.Command{
		Use:   "rehearse",
		Short: "Run the whole install against a real API server with a simulated GPU",
		Long: `rehearse starts a real Kubernetes control plane of its own on free ports, with a
simulated node and GPU, runs the very install code against it, and leaves
nothing behind. It needs no root and no GPU. Operators do not run there; what
they would answer comes from small actors, and everything an actor answered is
marked as simulated.

The control plane is compiled from Go modules once: make lab (10 to 20 minutes).`,
		Example: `  llmbox rehearse
  llmbox rehearse --gpu h100 --gpus 8 --report rehearsal.html
  llmbox rehearse --keep            leaves the cluster running and says how to reach it`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runRehearse(cmd, &flags, keep) },
	}
	flags.register(cmd)
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the cluster running afterwards")
	cmd.Flags().StringVar(&a.reportFile, "report", "", "write the timeline of the run to this HTML file")
	return cmd
}

func (a *app) runRehearse(cmd *cobra.Command, flags *boxFlags, keep bool) (err error) {
	program, err := a.findLab()
	if err != nil {
		return err
	}
	if flags.gpu == "" {
		flags.gpu = assumedGPU
	}
	// A plan that can't be made is told before anything is started.
	if _, err := a.settle(cmd.Context(), cmd, flags, false, a.newLogger()); err != nil {
		return err
	}
	ctx, session, err := a.start(cmd.Context(), "llmbox rehearse")
	if err != nil {
		return err
	}
	defer report.Rescue(session.renderer)
	ended := false
	endSession := func() {
		if !ended {
			ended = true
			err = errors.Join(err, session.end())
		}
	}
	defer endSession()

	lab, err := a.startLab(ctx, session, program, flags, keep)
	if err != nil {
		return err
	}
	defer func() {
		stopErr := lab.stop()
		endSession()
		err = errors.Join(err, stopErr)
		if keep && stopErr == nil {
			_, _ = fmt.Fprintf(a.env.Stderr, "\nThe cluster is still running:\n  export KUBECONFIG=%s\n  llmbox status\nStop it with:\n  %s stop --dir %s\n",
				lab.Kubeconfig, program, lab.Dir)
		}
	}()
	flags.extra = func(l *config.Layer) error {
		if cmd.Flags().Changed("port") {
			return nil
		}
		return l.Set("gateway.port", lab.GatewayPort, config.Computed("a free port for the rehearsal"))
	}
	a.kubeconfig = lab.Kubeconfig
	target, err := a.target(ctx, cmd, flags, session)
	if err != nil {
		return err
	}
	_, err = installer.Install(ctx, installer.Options{
		Target: target, Version: a.env.Version, Sink: session.sink, Log: session.log, Interrupt: session.interrupt,
	})
	return err
}

// findLab looks for llmbox-lab: $LLMBOX_LAB, beside this binary, then in PATH.
func (a *app) findLab() (string, error) {
	if named := a.env.Getenv("LLMBOX_LAB"); named != "" {
		if _, err := os.Stat(named); err != nil {
			return "", usageError{fmt.Errorf("finding the lab named by LLMBOX_LAB: %w", err), "unset LLMBOX_LAB, or name the llmbox-lab of a clone in which make lab has run"}
		}
		return named, nil
	}
	if self, err := a.env.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "llmbox-lab")
		if _, err := os.Stat(beside); err == nil {
			return beside, nil
		}
	}
	if found, err := exec.LookPath("llmbox-lab"); err == nil {
		return found, nil
	}
	return "", usageError{errors.New("the rehearsal needs llmbox-lab beside llmbox"),
		"run make lab in a clone of the project (10 to 20 minutes the first time); llmbox plan shows the same plan without it"}
}

// rehearsalLab is a running lab; the fields are what llmbox-lab prints.
type rehearsalLab struct {
	Kubeconfig  string `json:"kubeconfig"`
	Dir         string `json:"dir"`
	GatewayPort int    `json:"gateway_port"`

	keep     bool
	lifeline io.Closer
	process  *exec.Cmd
}

// startLab starts the lab so that it dies with this process: its lifeline is a
// pipe that closes when llmbox ends, however it ends.
func (a *app) startLab(ctx context.Context, s *session, program string, flags *boxFlags, keep bool) (*rehearsalLab, error) {
	began := time.Now()
	s.sink.Emit(event.Event{Time: began, Type: event.StepStarted, Step: labStep, Message: "Starting a Kubernetes control plane"})
	lab, err := a.launchLab(ctx, program, flags, keep)
	done := event.Event{Time: time.Now(), Type: event.StepDone, Step: labStep, ElapsedMS: time.Since(began).Milliseconds()}
	if err != nil {
		done.Type, done.Error = event.StepFailed, err.Error()
	}
	s.sink.Emit(done)
	return lab, err
}

func (a *app) launchLab(ctx context.Context, program string, flags *boxFlags, keep bool) (*rehearsalLab, error) {
	root := filepath.Join(os.TempDir(), "llmbox-rehearsal-"+strconv.Itoa(os.Getuid()))
	if err := os.MkdirAll(root, 0o700); err != nil {
		return nil, fmt.Errorf("making the rehearsal's directory: %w", err)
	}
	var stderr bytes.Buffer
	sweep := exec.CommandContext(ctx, program, "sweep", "--root", root) // #nosec G204 -- the project's own program
	sweep.Stderr = &stderr
	if err := sweep.Run(); err != nil {
		return nil, fmt.Errorf("clearing what a former rehearsal left: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	dir, err := os.MkdirTemp(root, "run-")
	if err != nil {
		return nil, fmt.Errorf("making the rehearsal's directory: %w", err)
	}
	args := []string{"start", "--dir", dir, "--gpu", flags.gpu, "--gpus", strconv.Itoa(max(flags.gpus, 1))}
	if keep {
		args = append(args, "--detach")
	} else {
		args = append(args, "--lifeline")
	}
	process := exec.Command(program, args...) // #nosec G204 -- the project's own program
	stderr.Reset()
	process.Stderr = &stderr
	lifeline, err := process.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("starting the lab: %w", err)
	}
	stdout, err := process.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("starting the lab: %w", err)
	}
	setOwnGroup(process)
	if err := process.Start(); err != nil {
		return nil, fmt.Errorf("starting the lab: %w", err)
	}
	lab := &rehearsalLab{keep: keep, lifeline: lifeline, process: process}
	line := make(chan error, 1)
	go func() {
		raw, err := bufio.NewReader(stdout).ReadBytes('\n')
		if err == nil {
			err = json.Unmarshal(raw, lab)
		}
		line <- err
	}()
	select {
	case err = <-line:
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(labStartTimeout):
		err = fmt.Errorf("the lab did not come up within %s", labStartTimeout)
	}
	if err != nil {
		_ = lifeline.Close()
		_ = process.Wait()
		if errors.Is(err, io.EOF) {
			err = errors.New("it ended without an answer")
		}
		return nil, fmt.Errorf("starting the lab: %w: %s", err, lastLines(stderr.String(), 5))
	}
	return lab, nil
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	if len(lines) > n {
		lines = lines[len(lines)-n:]
	}
	return strings.Join(lines, "; ")
}

// stop ends the lab and waits until its directory is gone.
func (l *rehearsalLab) stop() error {
	if l.keep {
		return l.process.Wait()
	}
	if err := l.lifeline.Close(); err != nil {
		return fmt.Errorf("stopping the lab: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- l.process.Wait() }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		_ = l.process.Process.Kill()
		<-done
	}
	if _, err := os.Stat(l.Dir); err == nil {
		if err := os.RemoveAll(l.Dir); err != nil {
			return fmt.Errorf("removing the rehearsal's directory: %w", err)
		}
	}
	return nil
}
