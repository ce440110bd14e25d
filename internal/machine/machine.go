// Package machine is the host that becomes the node of a box: one run at a time on it,
// the choices that hold before there is a cluster, llmbox's own binary and image on it,
// and k3s with all that k3s has to be told. It puts together internal/k3s, the facts of
// the machine and its downloads. It must not know components, charts, models, or how
// anything is shown.
package machine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/host"
	"github.com/llmbox-dev/llmbox/internal/k3s"
)

const (
	// StateDir holds what has to be found without knowing the configuration: the lock
	// and the choices, which say where everything else is.
	StateDir = "/var/lib/llmbox"
	// choicesFile are the choices of the last run in StateDir, as YAML.
	choicesFile = "choices.yaml"
	// stateDirMode keeps others from reading what a box is made of.
	stateDirMode = 0o755
	secretMode   = 0o600
	programMode  = 0o755
)

// Options say which machine it is and who works on it.
type Options struct {
	// Root is where the machine's files begin; "/" where empty.
	Root string
	// Version is llmbox's own.
	Version string
	// Executable is the running llmbox.
	Executable string
	// ProxyEnvironment are NAME=value pairs of whoever runs it.
	ProxyEnvironment []string
	// Runner runs programs; the machine itself where nil.
	Runner k3s.Runner
	// Kernel does what no program is asked for; the machine's own where nil.
	Kernel k3s.Kernel
	// Prober looks at the API of the cluster; the real one where nil.
	Prober k3s.Prober
}

// Host is the machine.
type Host struct {
	o     Options
	files *host.Host
}

// New returns the machine that the options describe.
func New(o Options) *Host {
	o.Root = cmp.Or(o.Root, "/")
	h := &Host{o: o, files: &host.Host{Root: o.Root}}
	if h.o.Runner == nil {
		h.o.Runner = h.files
	}
	return h
}

// at is where a path of the machine lies for this process.
func (h *Host) at(name string) string { return filepath.Join(h.o.Root, name) }

// K3s is the k3s of a box on this machine.
func (h *Host) K3s(box config.Box) *k3s.Machine {
	return k3s.NewMachine(k3s.Options{
		Root: h.o.Root, Runner: h.o.Runner, Kernel: h.o.Kernel,
		State: box.Paths.Data, Log: box.Paths.Log, DataDir: box.K3s.DataDir,
	})
}

// Installed says whether a box of ours, finished or not, is on the machine.
func (h *Host) Installed(ctx context.Context, box config.Box) (bool, error) {
	r, err := h.K3s(box).Record(ctx)
	if err != nil {
		return false, err
	}
	return !r.Empty() || r.DataDir != "", nil
}

// Choices are those that the last run here was made with; nil where there was none.
func (h *Host) Choices(ctx context.Context) ([]byte, error) {
	const limit = 1 << 20
	data, err := h.files.ReadFile(ctx, path.Join(StateDir, choicesFile), limit)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the choices of the last run: %w", err)
	}
	return data, nil
}

// Choose writes the choices of this run down, before anything depends on them.
func (h *Host) Choose(ctx context.Context, choices []byte) error {
	has, err := h.Choices(ctx)
	if err != nil {
		return err
	}
	if has != nil && string(has) == string(choices) {
		return nil
	}
	if err := writeFile(h.at(path.Join(StateDir, choicesFile)), secretMode, choices); err != nil {
		return fmt.Errorf("writing the choices down: %w", err)
	}
	return nil
}

// makeDir makes one of llmbox's directories.
func makeDir(dir string) error {
	// #nosec G301 -- what holds a secret has a mode of its own
	return os.MkdirAll(dir, stateDirMode)
}
