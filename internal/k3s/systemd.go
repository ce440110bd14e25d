package k3s

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/host"
)

const (
	// journalLines bounds how much of the journal is looked at.
	journalLines = 400
	// journalBytes bounds it in bytes; an entry has some thirty fields.
	journalBytes = 4 << 20
)

type systemdService struct {
	machine *Machine
	spec    ServiceSpec
}

func (s *systemdService) Init() Init { return Systemd }

func (s *systemdService) unit() string { return s.spec.Name() + ".service" }

func (s *systemdService) Files() []File {
	return []File{{Path: s.spec.unitFile(), Mode: plainMode, Content: []byte(SystemdUnit(s.spec))}}
}

func (s *systemdService) Load(ctx context.Context) error {
	_, err := s.machine.command(ctx, serviceDeadline, "systemctl", "daemon-reload")
	return err
}

func (s *systemdService) Enable(ctx context.Context) (bool, error) {
	link := path.Join("/etc/systemd/system/multi-user.target.wants", s.unit())
	if s.machine.exists(ctx, link) {
		return false, nil
	}
	// Without --now and without a reload: daemon-reload can take the GPUs from running
	// containers (NVIDIA/nvidia-container-toolkit#48).
	_, err := s.machine.command(ctx, serviceDeadline, "systemctl", "enable", "--no-reload", s.unit())
	return true, err
}

// Start and Restart don't wait: with Type=notify systemctl would, without an end and
// without a word.
func (s *systemdService) Start(ctx context.Context) error {
	_, err := s.machine.command(ctx, serviceDeadline, "systemctl", "start", "--no-block", s.unit())
	return err
}

func (s *systemdService) Restart(ctx context.Context) error {
	_, err := s.machine.command(ctx, serviceDeadline, "systemctl", "restart", "--no-block", s.unit())
	return err
}

func (s *systemdService) Stop(ctx context.Context) error {
	if !s.machine.exists(ctx, s.spec.unitFile()) {
		// A unit whose file is gone still runs until it is stopped.
		if state, err := s.State(ctx); err == nil && !state.Running {
			return nil
		}
	}
	_, err := s.machine.command(ctx, stopDeadline, "systemctl", "stop", s.unit())
	if errors.Is(err, host.ErrNotInstalled) {
		return nil
	}
	return err
}

func (s *systemdService) State(ctx context.Context) (ProcessState, error) {
	said, err := s.machine.command(ctx, serviceDeadline, "systemctl", "show", s.unit(),
		"--property=LoadState,ActiveState,SubState,MainPID,NRestarts,Result")
	if err != nil {
		if errors.Is(err, host.ErrNotInstalled) {
			return ProcessState{Exits: -1, Detail: "no systemd"}, nil
		}
		return ProcessState{}, err
	}
	p := parseProperties(said)
	state := ProcessState{Exits: number(p["NRestarts"]), Detail: p["ActiveState"] + " (" + p["SubState"] + ")"}
	if p["LoadState"] == "not-found" {
		state.Detail = "no such unit"
	}
	if r := p["Result"]; r != "" && r != "success" {
		state.Detail += ", " + r
	}
	return s.machine.processState(ctx, number(p["MainPID"]), state), nil
}

func parseProperties(text string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			out[key] = value
		}
	}
	return out
}

func number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		return -1
	}
	return n
}

func (s *systemdService) Lines(ctx context.Context, since time.Time) ([]Line, error) {
	result, err := s.machine.run.Run(ctx, host.Command{
		Program: "journalctl", Deadline: serviceDeadline, Limit: journalBytes, Tail: true,
		Args: []string{
			"--unit=" + s.unit(), "--output=json", "--output-fields=MESSAGE,_PID,SYSLOG_IDENTIFIER",
			"--lines=" + strconv.Itoa(journalLines), "--no-pager", "--quiet", fmt.Sprintf("--since=@%d", since.Unix()),
		},
	})
	if err != nil {
		return nil, fmt.Errorf("reading the journal: %w", err)
	}
	return parseJournal(result.Output), nil
}

// parseJournal reads `journalctl --output=json`: an object a line, in which a message
// that is not plain text is a list of bytes. Lines that are no object are left out:
// the first can be cut.
func parseJournal(data []byte) []Line {
	var out []Line
	for raw := range strings.Lines(string(data)) {
		var e struct {
			Message json.RawMessage `json:"MESSAGE"`
			PID     string          `json:"_PID"`
			Time    string          `json:"__REALTIME_TIMESTAMP"`
			Who     string          `json:"SYSLOG_IDENTIFIER"`
		}
		if json.Unmarshal([]byte(raw), &e) != nil || len(e.Message) == 0 || string(e.Message) == "null" {
			continue
		}
		var text string
		if json.Unmarshal(e.Message, &text) != nil {
			var list byteList
			if json.Unmarshal(e.Message, &list) != nil {
				continue
			}
			text = strings.ToValidUTF8(string(list), "?")
		}
		line := Line{PID: max(number(e.PID), 0), Text: text, Manager: e.Who == "systemd"}
		line.Before = !line.Manager && e.Who != "" && e.Who != binaryName
		if micro, err := strconv.ParseInt(e.Time, 10, 64); err == nil {
			line.Time = time.UnixMicro(micro)
		}
		out = append(out, line)
	}
	return out
}

// byteList reads a list of numbers, which encoding/json would want as base64.
type byteList []byte

// UnmarshalJSON implements json.Unmarshaler.
func (b *byteList) UnmarshalJSON(data []byte) error {
	var numbers []int
	if err := json.Unmarshal(data, &numbers); err != nil {
		return err
	}
	for _, n := range numbers {
		*b = append(*b, byte(n&0xff)) // #nosec G115 -- a byte
	}
	return nil
}

func (s *systemdService) Remove(ctx context.Context) error {
	for _, argv := range [][]string{
		{"disable", "--no-reload", s.unit()},
		{"reset-failed", s.unit()},
	} {
		_, err := s.machine.command(ctx, serviceDeadline, "systemctl", argv...)
		var failed *CommandError
		// A unit that systemd does not know any more is what is wanted.
		if err != nil && !errors.As(err, &failed) && !errors.Is(err, host.ErrNotInstalled) {
			return err
		}
	}
	return nil
}
