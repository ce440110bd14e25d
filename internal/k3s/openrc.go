package k3s

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/host"
)

type openRCService struct {
	machine *Machine
	spec    ServiceSpec
}

func (s *openRCService) Init() Init { return OpenRC }

func (s *openRCService) Files() []File {
	const executable = 0o755
	return []File{
		{Path: s.spec.scriptFile(), Mode: executable, Content: []byte(OpenRCScript(s.spec))},
		{Path: s.spec.rotateFile(), Mode: plainMode, Content: []byte(openRCRotation(s.spec))},
	}
}

// Load does nothing: OpenRC reads a script whenever it runs it.
func (s *openRCService) Load(context.Context) error { return nil }

func (s *openRCService) Enable(ctx context.Context) (bool, error) {
	if s.machine.exists(ctx, "/etc/runlevels/default/"+s.spec.Name()) {
		return false, nil
	}
	_, err := s.machine.command(ctx, serviceDeadline, "rc-update", "add", s.spec.Name(), "default")
	return true, err
}

func (s *openRCService) Start(ctx context.Context) error {
	_, err := s.machine.command(ctx, serviceDeadline, "rc-service", s.spec.Name(), "start")
	return err
}

func (s *openRCService) Restart(ctx context.Context) error {
	_, err := s.machine.command(ctx, stopDeadline+serviceDeadline, "rc-service", s.spec.Name(), "restart")
	return err
}

func (s *openRCService) Stop(ctx context.Context) error {
	if !s.machine.exists(ctx, s.spec.scriptFile()) {
		return nil
	}
	_, err := s.machine.command(ctx, stopDeadline, "rc-service", "--ifstarted", s.spec.Name(), "stop")
	if errors.Is(err, host.ErrNotInstalled) {
		return nil
	}
	return err
}

// State finds k3s as the child of its keeper, whose number is in the pid file.
func (s *openRCService) State(ctx context.Context) (ProcessState, error) {
	none := ProcessState{Exits: -1, Detail: "stopped"}
	data, present, err := s.machine.read(ctx, "/run/"+s.spec.Name()+".pid")
	if err != nil || !present {
		return none, err
	}
	keeper, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return none, fmt.Errorf("reading the pid file of k3s: %w", err)
	}
	all, err := s.machine.kernel.Processes(ctx)
	if err != nil {
		return none, err
	}
	for _, p := range all {
		if p.PPID == keeper && p.State != 'Z' {
			return ProcessState{Running: true, PID: p.PID, Start: p.Start, Exits: -1, Detail: "started"}, nil
		}
	}
	return none, nil
}

func (s *openRCService) Lines(ctx context.Context, since time.Time) ([]Line, error) {
	return s.machine.logLines(ctx, s.spec.Log, since)
}

func (s *openRCService) Remove(ctx context.Context) error {
	_, err := s.machine.command(ctx, serviceDeadline, "rc-update", "del", s.spec.Name())
	var failed *CommandError
	if errors.As(err, &failed) || errors.Is(err, host.ErrNotInstalled) {
		return nil
	}
	return err
}
