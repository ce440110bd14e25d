package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/bake"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/k3s"
)

// repairsFile remembers what was mended of the machine at its owner's request: it is no
// part of the box, and nothing else knows how to undo it.
const repairsFile = "repairs.json"

// launchUnit runs the first install where a script begins it.
const launchUnit = "llmbox-launch.service"

// ownProgram is where llmbox's own script installs it.
const ownProgram = "/usr/local/bin/llmbox"

// byScripts is what llmbox's own scripts leave beside the binary: the shell completion,
// and the unit that runs the first install with what it reads; and what bake leaves.
func byScripts() []string {
	return []string{
		"/usr/local/share/bash-completion/completions/llmbox",
		"/etc/systemd/system/multi-user.target.wants/" + launchUnit,
		"/etc/systemd/system/" + launchUnit,
		StateDir + "/launch",
		bake.UnitLink, bake.UnitFile, bake.Dir,
	}
}

// RemoveOptions say what an uninstall leaves.
type RemoveOptions struct {
	Box config.Box
	// KeepData keeps model weights, the volumes of pods and what was downloaded.
	KeepData bool
	// KeepProgram keeps llmbox itself.
	KeepProgram bool
	// Others are the names of other Kubernetes distributions on this machine.
	Others []string
}

// Removed is what an uninstall did.
type Removed struct {
	// Counts says what was removed, such as "41 processes"; Stays what was left, with
	// the reason.
	Counts, Stays []string
}

// RemoveK3s takes k3s away, and everything that it and its pods made. It can be called
// again from any state.
func (h *Host) RemoveK3s(ctx context.Context, o RemoveOptions, stop <-chan struct{}, report k3s.Report) (Removed, error) {
	var out Removed
	boot, err := h.removeBoot(ctx)
	if err != nil {
		return out, err
	}
	out.Counts = append(out.Counts, boot...)
	outcomes, err := h.K3s(o.Box).Remove(ctx, k3s.RemoveOptions{KeepData: o.KeepData, Others: o.Others}, stop, report)
	for _, one := range outcomes {
		if n := len(one.Finds) - len(one.Remains); n > 0 {
			out.Counts = append(out.Counts, fmt.Sprintf("%s %d", one.Name, n))
		}
		out.Stays = append(out.Stays, one.Stays...)
	}
	return out, err
}

// RemoveState takes away what llmbox itself keeps on the machine: its binary, the choices
// and the lock last.
func (h *Host) RemoveState(ctx context.Context, o RemoveOptions) (Removed, error) {
	var out Removed
	var problems []error
	remove := func(name string, all bool) {
		at := h.at(name)
		if _, err := os.Lstat(at); err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				problems = append(problems, err)
			}
			return
		}
		err := os.Remove(at)
		if err != nil && all {
			err = os.RemoveAll(at)
		}
		if err != nil {
			problems = append(problems, err)
			return
		}
		out.Counts = append(out.Counts, name)
	}
	data := o.Box.Paths.Data
	for _, name := range []string{"bin", "cache", "models"} {
		if o.KeepData && name != "bin" {
			if _, err := os.Lstat(h.at(path.Join(data, name))); err == nil {
				out.Stays = append(out.Stays, path.Join(data, name)+": is kept")
			}
			continue
		}
		remove(path.Join(data, name), true)
	}
	if !o.KeepProgram && h.o.Executable == ownProgram {
		remove(ownProgram, false)
	}
	for _, name := range byScripts() {
		remove(name, true)
	}
	problems = append(problems, h.forgetUnits(ctx))
	logs, err := h.ownLogs(ctx, o.Box.Paths.Log)
	problems = append(problems, err)
	for _, name := range logs {
		remove(name, false)
	}
	if ctx.Err() != nil {
		return out, errors.Join(append(problems, ctx.Err())...)
	}
	if _, err := os.Lstat(h.at(path.Join(StateDir, repairsFile))); err == nil {
		out.Stays = append(out.Stays, path.Join(StateDir, repairsFile)+": says what preflight --fix mended, which stays")
	}
	for _, name := range []string{".llmbox." + choicesFile, choicesFile, ".llmbox." + bootFile, bootFile, ".llmbox." + tokenFile, tokenFile, lockFile} {
		remove(path.Join(StateDir, name), false)
	}
	// Only where nobody else keeps anything there.
	for _, dir := range slices.Compact([]string{o.Box.Paths.Log, data, StateDir}) {
		if names, err := os.ReadDir(h.at(dir)); err == nil && len(names) == 0 {
			remove(dir, false)
		}
	}
	if err := errors.Join(problems...); err != nil {
		return out, fmt.Errorf("removing what llmbox keeps here: %w", err)
	}
	return out, nil
}

// ownLogs are the files that llmbox writes into the directory of its logs.
func (h *Host) ownLogs(ctx context.Context, dir string) ([]string, error) {
	names, err := h.files.List(ctx, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing the logs: %w", err)
	}
	var out []string
	for _, name := range names {
		if name == "launch.log" || name == bake.LogFile || strings.HasPrefix(name, "k3s.log") || strings.HasPrefix(name, "run-") && filepath.Ext(name) == ".ndjson" {
			out = append(out, path.Join(dir, name))
		}
	}
	return out, nil
}

// Traces says whether anything of llmbox is on the machine.
func (h *Host) Traces(ctx context.Context, box config.Box) (bool, error) {
	installed, err := h.Installed(ctx, box)
	if err != nil || installed {
		return installed, err
	}
	plan, err := h.K3s(box).PlanRemoval(ctx, k3s.RemoveOptions{})
	if err != nil || len(plan) > 0 {
		return err == nil, err
	}
	for _, name := range []string{choicesFile, lockFile, ".llmbox." + choicesFile, path.Base(bake.Dir)} {
		if _, err := h.files.Stat(ctx, path.Join(StateDir, name)); err == nil {
			return true, nil
		}
	}
	// An uninstall that was cut off at its very end leaves a directory with nothing in it.
	for _, dir := range []string{StateDir, box.Paths.Data, box.Paths.Log} {
		if names, err := h.files.List(ctx, dir); err == nil && len(names) == 0 {
			return true, nil
		}
	}
	_, err = h.files.Stat(ctx, path.Join(box.Paths.Data, "bin", "llmbox"))
	return err == nil, nil
}
