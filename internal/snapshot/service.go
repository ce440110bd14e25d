package snapshot

import (
	"context"
	"encoding/json"
	"fmt"
	"path"
	"strconv"
	"strings"
)

const (
	// k3sRecord is what llmbox wrote down of the k3s that it installed.
	k3sRecord = "/var/lib/llmbox/k3s.json"
	// supervisorFiles are where a supervisor of llmbox's says who it is.
	supervisorFiles = "/run/llmbox/*-supervisor.json"
	bootID          = "/proc/sys/kernel/random/boot_id"
)

// process is a process as llmbox writes it down: a number alone would name somebody else
// after it was given away.
type process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

// service looks at what keeps k3s running.
func (c *collector) service(ctx context.Context) (Service, error) {
	raw, err := c.host.ReadFile(ctx, k3sRecord, 1<<20)
	if err != nil {
		if absent(err) {
			return Service{}, nil
		}
		return Service{}, err
	}
	var record struct {
		Init string `json:"init"`
	}
	if err := json.Unmarshal(raw, &record); err != nil {
		return Service{}, fmt.Errorf("reading %s: %w", k3sRecord, err)
	}
	out := Service{Init: record.Init}
	if out.Init != "supervised" {
		return out, nil
	}
	names, _, err := c.host.Glob(ctx, supervisorFiles)
	if err != nil || len(names) == 0 {
		// Gone with the boot before this one.
		return out, nil //nolint:nilerr // nobody supervises
	}
	raw, err = c.host.ReadFile(ctx, names[0], 64<<10)
	if err != nil {
		return out, err
	}
	var now struct {
		BootID     string  `json:"bootID"`
		Supervisor process `json:"supervisor"`
		Child      process `json:"child"`
		Exits      int     `json:"exits"`
		Last       string  `json:"last"`
	}
	if err := json.Unmarshal(raw, &now); err != nil {
		return out, fmt.Errorf("reading %s: %w", names[0], err)
	}
	if boot, err := c.host.ReadFile(ctx, bootID, 64); err == nil && strings.TrimSpace(string(boot)) != now.BootID {
		return out, nil
	}
	out.Supervisor, out.K3s = c.alive(ctx, now.Supervisor), c.alive(ctx, now.Child)
	out.Exits, out.Last = now.Exits, redactLog(now.Last)
	if out.Supervisor {
		out.SupervisorPID = now.Supervisor.PID
	}
	if out.K3s {
		out.PID = now.Child.PID
	}
	return out, nil
}

// alive says whether a process is still the one that was written down, and has not ended.
func (c *collector) alive(ctx context.Context, p process) bool {
	if p.PID <= 0 {
		return false
	}
	raw, err := c.host.ReadFile(ctx, path.Join("/proc", strconv.Itoa(p.PID), "stat"), 4096)
	if err != nil {
		return false
	}
	state, start, ok := parseStat(string(raw))
	return ok && start == p.Start && state != "Z" && state != "X"
}

// parseStat takes the state and the time of the start out of /proc/PID/stat, see
// proc_pid_stat(5): the name before them may hold anything but its last parenthesis.
func parseStat(text string) (state string, start uint64, ok bool) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const startField = 22 - 3
	if len(fields) <= startField {
		return "", 0, false
	}
	start, err := strconv.ParseUint(fields[startField], 10, 64)
	return fields[0], start, err == nil
}
