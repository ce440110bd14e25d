package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.yaml.in/yaml/v3"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/test/internal/cutoff"
	"github.com/llmbox-dev/llmbox/test/internal/labproc"
	"github.com/llmbox-dev/llmbox/test/internal/trace"
	"github.com/llmbox-dev/llmbox/test/proofcrash/snapshot"
)

const (
	modelName = "Qwen/Qwen3-0.6B"
	// without is what a box has not that only has to serve through the gateway, and
	// ignored what a machine made of namespaces is not.
	without = "prometheus,keda,autoscale,kyverno,policies,vault,external-secrets"
	ignored = "host.container,host.disk.pressure,host.disk.space,gpu.present,host.cgroup.v1,net.hosts,net.dns.resolve"
	program = "/root/llmbox"

	connectLimit = time.Minute
	lookLimit    = 2 * time.Minute
	// endLimit is how long what an uninstall ended may take to be gone.
	endLimit = 5 * time.Second
	// settleLimit is how long files and processes may take to be as wanted.
	settleLimit = 40 * time.Second
)

// box is a machine with what is needed to install on it.
type box struct {
	lab  *labproc.Lab
	tool string
}

// startBox starts an empty machine and lays llmbox and its configuration on it.
func startBox(ctx context.Context, root, work string) (*box, error) {
	b := &box{tool: filepath.Join(root, "bin", "llmbox-lab")}
	port, err := labproc.FreePort(ctx)
	if err != nil {
		return nil, err
	}
	b.lab, err = labproc.Start(ctx, labproc.Options{
		Program: b.tool, Dir: work, Name: "machine", GatewayPort: port, Machine: true, Model: modelName, Log: io.Discard,
	})
	if err != nil {
		return nil, err
	}
	if err := b.furnish(ctx, filepath.Join(root, "bin", "llmbox")); err != nil {
		return nil, errors.Join(err, b.lab.Stop())
	}
	return b, nil
}

func (b *box) furnish(ctx context.Context, llmbox string) error {
	raw, err := b.execute(ctx, "cat", "/lab/registries.yaml")
	if err != nil {
		return err
	}
	var registries struct {
		Mirrors map[string]struct{ Endpoint []string }
	}
	if err := yaml.Unmarshal([]byte(raw), &registries); err != nil {
		return fmt.Errorf("reading the lab's registries: %w", err)
	}
	mirrors := map[string]any{}
	for host, m := range registries.Mirrors {
		mirrors[host] = map[string]any{"endpoints": m.Endpoint}
	}
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		return err
	}
	gateway, ok := table.Get("envoy-gateway")
	if !ok {
		return errors.New("the component table has no envoy-gateway")
	}
	values := func(v any) any { return map[string]any{"values": v} }
	config, err := yaml.Marshal(map[string]any{
		"apiVersion": "llmbox.dev/v1alpha1", "kind": "Box",
		"model": map[string]any{"name": modelName, "source": b.lab.Hub}, "gpu": map[string]any{"product": "a100-80", "count": 1},
		"registries": map[string]any{"mirrors": mirrors},
		// The machine's disk is the outer machine's, whatever there is left on it.
		"k3s": map[string]any{"extraArgs": []string{"--kubelet-arg=eviction-hard=nodefs.available<1%,imagefs.available<1%"}},
		"components": map[string]any{
			"gpu-operator": map[string]any{"mode": "external"},
			// Images that the table pins by digest can't be made by the lab.
			"envoy-gateway": values(map[string]any{"images": map[string]any{"envoy": gateway.Images["envoy"].Reference}}),
			"model": values(map[string]any{
				"resources": map[string]any{"cpuRequestMillis": 100, "memoryRequestMiB": 128, "memoryLimitMiB": 2560},
				"drain":     map[string]any{"preStopSeconds": 1, "shutdownTimeoutSeconds": 5},
			}),
		},
	})
	if err != nil {
		return fmt.Errorf("writing the box's configuration: %w", err)
	}
	home := filepath.Join(b.lab.Machines[0].Root, "root")
	if err := os.WriteFile(filepath.Join(home, "box.yaml"), config, 0o600); err != nil {
		return fmt.Errorf("writing the box's configuration: %w", err)
	}
	binary, err := os.ReadFile(llmbox) // #nosec G304 -- the project's own program
	if err != nil {
		return fmt.Errorf("reading llmbox: %w", err)
	}
	if err := os.WriteFile(filepath.Join(home, "llmbox"), binary, 0o755); err != nil { // #nosec G306 -- a program
		return fmt.Errorf("laying llmbox on the machine: %w", err)
	}
	return nil
}

// execute runs a command on the machine and returns its standard output.
func (b *box) execute(ctx context.Context, command ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	var said bytes.Buffer
	cmd := b.on(ctx, command...)
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("running %s on the machine: %w: %s", command[0], err, said.String())
	}
	return string(out), nil
}

func (b *box) on(ctx context.Context, command ...string) *exec.Cmd {
	// #nosec G204 -- the lab's own
	cmd := exec.CommandContext(ctx, b.tool, append([]string{"exec", "--dir", b.lab.Dir, "--"}, command...)...)
	// What runs on the machine would outlive the one that entered it.
	cmd.Cancel = func() error { return errors.Join(killInside(cmd.Process), cmd.Process.Kill()) }
	return cmd
}

// install is the command of every install of a series.
func (b *box) install() cutoff.Command {
	return cutoff.Command{Start: func(ctx context.Context) *exec.Cmd {
		return b.on(ctx, program, "install", "--config", "/root/box.yaml", "--k3s-binary", "/lab/programs/k3s-standin", "--init", "supervised",
			"--without", without, "--ignore", ignored, "--output", "json")
	}, Kill: killInside}
}

func (b *box) uninstall() cutoff.Command {
	return cutoff.Command{Start: func(ctx context.Context) *exec.Cmd {
		return b.on(ctx, program, "uninstall", "--yes", "--output", "json")
	}, Kill: killInside}
}

// killInside kills what the process that entered the machine has started there.
func killInside(entered *os.Process) error {
	file := fmt.Sprintf("/proc/%d/task/%d/children", entered.Pid, entered.Pid)
	raw, err := os.ReadFile(file) // #nosec G304 -- below /proc
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return os.ErrProcessDone
		}
		return fmt.Errorf("looking for llmbox on the machine: %w", err)
	}
	for _, word := range strings.Fields(string(raw)) {
		pid, err := strconv.Atoi(word)
		if err != nil {
			return fmt.Errorf("looking for llmbox on the machine: %w", err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("killing llmbox: %w", err)
		}
	}
	return nil
}

// cutPower throws the machine's switch without a program in between: what is done within
// milliseconds would be over before that has started.
func (b *box) cutPower(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", filepath.Join(b.lab.Dir, "control.sock"))
	if err != nil {
		return fmt.Errorf("cutting the machine's power: %w", err)
	}
	defer func() { _ = conn.Close() }()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return fmt.Errorf("cutting the machine's power: %w", err)
		}
	}
	if err := json.NewEncoder(conn).Encode(map[string]bool{"cut": true}); err != nil {
		return fmt.Errorf("cutting the machine's power: %w", err)
	}
	var answer struct {
		Error string `json:"error"`
	}
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return fmt.Errorf("cutting the machine's power: %w", err)
	}
	if answer.Error != "" {
		return fmt.Errorf("cutting the machine's power: %s", answer.Error)
	}
	return nil
}

// order throws the machine's switch: "machine-kill" or "reboot".
func (b *box) order(ctx context.Context, what string) error {
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	if out, err := exec.CommandContext(ctx, b.tool, what, "--dir", b.lab.Dir).CombinedOutput(); err != nil { // #nosec G204 -- the lab's own
		return fmt.Errorf("%s: %w: %s", what, err, out)
	}
	return nil
}

// bare compares the machine with what it was, once what was ended is gone.
func (b *box) bare(ctx context.Context, before trace.State) ([]string, error) {
	deadline := time.Now().Add(endLimit)
	for {
		now, err := trace.Take(ctx, b.execute)
		if err != nil {
			return nil, err
		}
		diff := trace.Diff(before, now)
		if len(diff) == 0 || time.Now().After(deadline) {
			return diff, nil
		}
		if err := sleep(ctx, time.Second); err != nil {
			return nil, err
		}
	}
}

// client reaches the cluster on the machine from outside.
func (b *box) client(ctx context.Context) (*cluster.Client, error) {
	raw, err := os.ReadFile(filepath.Join(b.lab.Machines[0].Root, "etc/rancher/k3s/k3s.yaml"))
	if err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	outside := bytes.ReplaceAll(raw, []byte("https://127.0.0.1:6443"), fmt.Appendf(nil, "https://127.0.0.1:%d", b.lab.APIPort))
	file := filepath.Join(filepath.Dir(b.lab.Dir), "kubeconfig")
	if err := os.WriteFile(file, outside, 0o600); err != nil {
		return nil, fmt.Errorf("writing the kubeconfig: %w", err)
	}
	return cluster.Connect(ctx, file, "", connectLimit)
}

// quiet is the box once nothing changes any more.
func (b *box) quiet(ctx context.Context) (trace.State, snapshot.State, error) {
	client, err := b.client(ctx)
	if err != nil {
		return nil, nil, err
	}
	objects, err := cutoff.Quiet(ctx, client)
	if err != nil {
		return nil, nil, err
	}
	end, err := b.end(ctx)
	return end, objects, err
}

// differs compares the box with an undisturbed one, once its controllers are done.
func (b *box) differs(ctx context.Context, end trace.State, objects snapshot.State) ([]string, error) {
	client, err := b.client(ctx)
	if err != nil {
		return nil, err
	}
	diff, err := cutoff.Settled(ctx, client, objects)
	if err != nil || len(diff) > 0 {
		return diff, err
	}
	deadline := time.Now().Add(settleLimit)
	for {
		now, err := b.end(ctx)
		if err != nil {
			return nil, err
		}
		diff := trace.Diff(end, now)
		if len(diff) == 0 || time.Now().After(deadline) {
			return diff, nil
		}
		if err := sleep(ctx, 2*time.Second); err != nil {
			return nil, err
		}
	}
}

func (b *box) end(ctx context.Context) (trace.State, error) {
	state, err := trace.Take(ctx, b.execute)
	if err != nil {
		return nil, err
	}
	record, err := b.execute(ctx, "cat", "/var/lib/llmbox/k3s.json")
	if err != nil {
		return nil, err
	}
	return normalise(state, record)
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
