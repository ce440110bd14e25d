package k3s

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/host"
)

// programs answers for the programs of a machine and writes down what was run. A
// program in a directory of its own (the k3s binary) is really run.
type programs struct {
	mu      sync.Mutex
	real    *host.Host
	answers map[string]func(args []string) (string, int)
	ran     []string
}

func (p *programs) Run(ctx context.Context, c host.Command) (host.Result, error) {
	if len(c.Directories) == 1 {
		return p.real.Run(ctx, c)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	answer, has := p.answers[c.Program]
	if !has {
		return host.Result{}, fmt.Errorf("finding %s: %w", c.Program, host.ErrNotInstalled)
	}
	p.ran = append(p.ran, strings.Join(append([]string{c.Program}, c.Args...), " "))
	text, exit := answer(c.Args)
	return host.Result{Output: []byte(text), Exit: exit}, nil
}

// changes are the calls that change something.
func (p *programs) changes() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(p.ran), func(line string) bool {
		return strings.HasPrefix(line, "systemctl show") || strings.HasPrefix(line, "journalctl") || strings.Contains(line, "-save") ||
			line == "ip -4 route show"
	})
}

func (p *programs) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ran = nil
}

// quietKernel is a kernel with the processes it is told of.
type quietKernel struct {
	mu        sync.Mutex
	processes []Process
	namespace map[string]uint64
	busy      map[string]int
	killed    []int
	unmounted []string
	table     func(remaining []string)
	mounted   []string
}

func (k *quietKernel) Processes(context.Context) ([]Process, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.processes), nil
}

func (k *quietKernel) Kill(_ context.Context, p Process, _ syscall.Signal) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.processes = slices.DeleteFunc(k.processes, func(q Process) bool {
		if q.PID != p.PID || q.Start != p.Start {
			return false
		}
		k.killed = append(k.killed, p.PID)
		return true
	})
	return nil
}

func (k *quietKernel) Unmount(_ context.Context, point string, lazy bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.busy[point] > 0 && !lazy {
		k.busy[point]--
		return fmt.Errorf("unmounting %s: %w", point, syscall.EBUSY)
	}
	name := point
	if lazy {
		name += " (lazy)"
	}
	k.unmounted = append(k.unmounted, name)
	if i := slices.Index(k.mounted, point); i >= 0 {
		k.mounted = slices.Delete(k.mounted, i, i+1)
		k.table(k.mounted)
	}
	return nil
}

func (k *quietKernel) NetNSOf(_ context.Context, name string) (uint64, error) {
	if n, has := k.namespace[name]; has {
		return n, nil
	}
	return 0, fs.ErrNotExist
}

func (k *quietKernel) Self() int { return 100 }

// fakeMachine is a machine in a directory.
func fakeMachine(t *testing.T) (*Machine, *programs, *quietKernel) {
	t.Helper()
	root := t.TempDir()
	p := &programs{real: &host.Host{}, answers: map[string]func([]string) (string, int){}}
	k := &quietKernel{namespace: map[string]uint64{}, busy: map[string]int{}}
	m := NewMachine(Options{Root: root, Runner: p, Kernel: k})
	put(t, m, "/proc/sys/kernel/random/boot_id", "boot-1\n")
	put(t, m, "/proc/stat", "cpu  1 2 3\nbtime 1700000000\n")
	return m, p, k
}

func put(t *testing.T, m *Machine, name, content string) {
	t.Helper()
	at := m.at(name)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(at, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func link(t *testing.T, m *Machine, name, target string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(m.at(name)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, m.at(name)); err != nil {
		t.Fatal(err)
	}
}

func get(t *testing.T, m *Machine, name string) string {
	t.Helper()
	data, err := os.ReadFile(m.at(name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// tree lists everything on a machine, for comparing before and after.
func tree(t *testing.T, m *Machine) []string {
	t.Helper()
	var out []string
	root := m.at("/")
	err := filepath.WalkDir(root, func(at string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(at, strings.TrimSuffix(root, "/"))
		text := info.Mode().String() + " " + name
		if info.Mode().IsRegular() {
			sum, err := hashFile(at)
			if err != nil {
				return err
			}
			text += " " + sum[:8]
		}
		out = append(out, text)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// fakeK3s is a program that answers --version.
func fakeK3s(version string) string {
	return "#!/bin/sh\n[ \"$1\" = --version ] && echo 'k3s version " + version + " (0123abcd)' && echo 'go version go1.26.7' && exit 0\nexec sleep 1000\n"
}

func testBox() config.Box {
	var b config.Box
	b.Network.ClusterCIDR, b.Network.ServiceCIDR = "10.42.0.0/16", "10.43.0.0/16"
	b.K3s.DataDir = DefaultDataDir
	return b
}

func testFacts() Facts {
	return Facts{Hostname: "gpu-box", MemoryBytes: 64 * gib, CPUs: 16, GPUs: 1, DataBytes: 500 * gib, KubeletBytes: 500 * gib}
}

// differ shows the first lines that only one of two lists has.
func differ(a, b []string) string {
	var out []string
	for _, line := range a {
		if !slices.Contains(b, line) {
			out = append(out, "- "+line)
		}
	}
	for _, line := range b {
		if !slices.Contains(a, line) {
			out = append(out, "+ "+line)
		}
	}
	return strings.Join(out, "\n")
}
