package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/test/internal/labproc"
)

const (
	modelName = "Qwen/Qwen3-0.6B"
	// ignored is what a machine made of namespaces is not.
	ignored = "host.container,host.disk.pressure,host.disk.space,host.cgroup.v1,net.hosts,net.dns.resolve,host.clock,runtime.dev_char_links,image.cuda_requirement"
	program = "/root/llmbox"
	config  = "/root/box.yaml"
	address = "10.99.0.1"

	installLimit = 12 * time.Minute
	doctorLimit  = time.Minute
	fixLimit     = 6 * time.Minute
	execLimit    = 2 * time.Minute
	askLimit     = 20 * time.Second
)

// small is the kubelet's disk: small enough to be filled in a moment.
const small = "512M"

// box is a machine of the lab with the whole box on it.
type box struct {
	lab     *labproc.Lab
	tool    string
	objects dynamic.Interface
	log     io.Writer
}

// startBox starts an empty machine and installs everything on it.
func startBox(ctx context.Context, root, work string, log io.Writer) (*box, error) {
	b := &box{tool: filepath.Join(root, "bin", "llmbox-lab"), log: log}
	port, err := labproc.FreePort(ctx)
	if err != nil {
		return nil, err
	}
	b.lab, err = labproc.Start(ctx, labproc.Options{
		Program: b.tool, Dir: work, Name: "machine", GatewayPort: port, Machine: true, Model: modelName,
		Args: []string{"--gpu-by", "operator"}, Log: io.Discard,
	})
	if err != nil {
		return nil, err
	}
	if err := b.furnish(ctx, filepath.Join(root, "bin", "llmbox")); err != nil {
		return nil, errors.Join(err, b.lab.Stop())
	}
	if err := b.install(ctx); err != nil {
		return nil, errors.Join(err, b.lab.Stop())
	}
	return b, nil
}

// furnish lays llmbox and its configuration on the machine, and gives the kubelet a disk
// of its own.
func (b *box) furnish(ctx context.Context, llmbox string) error {
	raw, err := b.sh(ctx, "cat /lab/registries.yaml")
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
	values := func(v map[string]any) any { return map[string]any{"values": v} }
	document, err := yaml.Marshal(map[string]any{
		"apiVersion": "llmbox.dev/v1alpha1", "kind": "Box",
		"model": map[string]any{"name": modelName, "source": b.lab.Hub}, "gpu": map[string]any{"product": "a100-80", "count": 1},
		"registries": map[string]any{"mirrors": mirrors},
		// The machine's disk is the outer machine's, whatever there is left on it; and what
		// was evicted may come back at once.
		"k3s": map[string]any{"extraArgs": []string{
			"--kubelet-arg=eviction-hard=nodefs.available<1%,imagefs.available<1%", "--kubelet-arg=eviction-pressure-transition-period=10s",
		}},
		"components": map[string]any{
			// The lab has no kernel module: nothing could link its device files.
			"gpu-operator": values(map[string]any{"validator": map[string]any{"devCharSymlinks": false}}),
			// Images that the table pins by digest can't be made by the lab.
			"envoy-gateway": values(map[string]any{"images": map[string]any{"envoy": gateway.Images["envoy"].Reference}}),
			// What speaks in the model's place is the lab's busybox.
			"policies": values(map[string]any{"registries": map[string]any{"allowed": []string{"docker.io/vllm", "ghcr.io/llmbox-dev", "docker.io/rancher"}}}),
			"model": values(map[string]any{
				"resources": map[string]any{"cpuRequestMillis": 100, "memoryRequestMiB": 128, "memoryLimitMiB": 2560},
				"drain":     map[string]any{"preStopSeconds": 1, "shutdownTimeoutSeconds": 5},
			}),
		},
	})
	if err != nil {
		return fmt.Errorf("writing the box's configuration: %w", err)
	}
	if err := os.WriteFile(b.path(config), document, 0o600); err != nil {
		return fmt.Errorf("writing the box's configuration: %w", err)
	}
	binary, err := os.ReadFile(llmbox) // #nosec G304 -- the project's own program
	if err != nil {
		return fmt.Errorf("reading llmbox: %w", err)
	}
	if err := os.WriteFile(b.path(program), binary, 0o755); err != nil { // #nosec G306 -- a program
		return fmt.Errorf("laying llmbox on the machine: %w", err)
	}
	return b.kubeletDisk(ctx)
}

// kubeletDisk mounts a small disk where the kubelet keeps its data. The machine has no
// devices of its own to make one of: the outer machine lends a loop device, which ends
// with the mount, and that with the machine.
func (b *box) kubeletDisk(ctx context.Context) (err error) {
	image := filepath.Join(filepath.Dir(b.lab.Dir), "kubelet.img")
	for _, command := range [][]string{{"truncate", "-s", small, image}, {"mkfs.ext4", "-q", "-m", "0", image}} {
		if out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput(); err != nil { // #nosec G204 -- a file of this program's own
			return fmt.Errorf("making a disk: %s: %w: %s", command[0], err, out)
		}
	}
	out, err := exec.CommandContext(ctx, "losetup", "--find", "--show", image).Output() // #nosec G204 -- a file of this program's own
	if err != nil {
		return fmt.Errorf("making a disk: losetup: %w", err)
	}
	device := strings.TrimSpace(string(out))
	defer func() {
		if out, detach := exec.CommandContext(context.WithoutCancel(ctx), "losetup", "--detach", device).CombinedOutput(); detach != nil { // #nosec G204 -- what losetup said
			err = errors.Join(err, fmt.Errorf("letting %s end by itself: %w: %s", device, detach, out))
		}
	}()
	var info unix.Stat_t
	if err := unix.Stat(device, &info); err != nil {
		return fmt.Errorf("looking at %s: %w", device, err)
	}
	_, err = b.sh(ctx, fmt.Sprintf("mknod /root/disk b %d %d && mkdir -p /var/lib/kubelet && mount /root/disk /var/lib/kubelet", unix.Major(info.Rdev), unix.Minor(info.Rdev)))
	if err != nil {
		return fmt.Errorf("giving the kubelet a disk: %w", err)
	}
	return nil
}

// path is where a file of the machine's disk lies.
func (b *box) path(name string) string { return filepath.Join(b.lab.Machines[0].Root, name) }

func (b *box) install(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, installLimit)
	defer cancel()
	out, err := b.on(ctx, program, "install", "--config", config, "--k3s-binary", "/lab/programs/k3s-standin", "--init", "supervised", "--ignore", ignored, "--yes").CombinedOutput()
	if err != nil {
		return fmt.Errorf("installing the box: %w: %s", err, out[max(0, len(out)-4000):])
	}
	raw, err := os.ReadFile(b.path("etc/rancher/k3s/k3s.yaml"))
	if err != nil {
		return fmt.Errorf("reading the kubeconfig: %w", err)
	}
	outside := bytes.ReplaceAll(raw, []byte("https://127.0.0.1:6443"), fmt.Appendf(nil, "https://127.0.0.1:%d", b.lab.APIPort))
	kube, err := clientcmd.RESTConfigFromKubeConfig(outside)
	if err != nil {
		return fmt.Errorf("reading the kubeconfig: %w", err)
	}
	kube.Timeout, kube.QPS = askLimit, -1
	if b.objects, err = dynamic.NewForConfig(kube); err != nil {
		return fmt.Errorf("building the client: %w", err)
	}
	return nil
}

// on is a command in a root shell of the machine.
func (b *box) on(ctx context.Context, command ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, b.tool, append([]string{"exec", "--dir", b.lab.Dir, "--"}, command...)...) // #nosec G204 -- the lab's own
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// sh runs a script on the machine and returns what it said.
func (b *box) sh(ctx context.Context, script string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, execLimit)
	defer cancel()
	var said bytes.Buffer
	cmd := b.on(ctx, "sh", "-c", script)
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("on the machine: %w: %s", err, bytes.TrimSpace(said.Bytes()))
	}
	return string(out), nil
}

// accepted are the ids to ignore while these are looked for.
func accepted(want []string) string {
	return strings.Join(slices.DeleteFunc(strings.Split(ignored, ","), func(id string) bool { return slices.Contains(want, id) }), ",")
}

// doctor looks at the box as its owner would, and keeps what it read where a file is
// named. Its wall time is that of the whole command.
func (b *box) doctor(ctx context.Context, save string, want []string) ([]finding.Finding, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, doctorLimit)
	defer cancel()
	args := []string{program, "doctor", "--offline", "--output", "json", "--ignore", accepted(want)}
	const there = "/root/doctor.tar.gz"
	if save != "" {
		args = append(args, "--save", there)
	}
	var said bytes.Buffer
	cmd := b.on(ctx, args...)
	cmd.Stderr = &said
	began := time.Now()
	raw, err := cmd.Output()
	took := time.Since(began)
	var document struct {
		Findings []finding.Finding `json:"findings"`
	}
	if bad := json.Unmarshal(raw, &document); bad != nil {
		return nil, took, fmt.Errorf("llmbox doctor: %w: %w: %s", err, bad, bytes.TrimSpace(said.Bytes()))
	}
	if save != "" {
		if err := os.Rename(b.path(there), save); err != nil {
			return document.Findings, took, fmt.Errorf("keeping what doctor read: %w", err)
		}
	}
	// Findings are an answer, whatever the exit status says of them.
	return document.Findings, took, nil
}

// fix has doctor mend, and looks whether the fault is gone from the roots.
func (b *box) fix(ctx context.Context, want []string) error {
	limited, cancel := context.WithTimeout(ctx, fixLimit)
	defer cancel()
	said, err := b.on(limited, program, "doctor", "--offline", "--fix", "--yes", "--ignore", accepted(want)).CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return fmt.Errorf("llmbox doctor --fix: %w", err)
	}
	var r row
	for range 10 {
		found, _, err := b.doctor(ctx, "", want)
		if err != nil {
			return err
		}
		r.describe(found)
		if !slices.ContainsFunc(r.Roots, func(id string) bool { return slices.Contains(want, id) }) {
			return nil
		}
		if err := sleep(ctx, again); err != nil {
			return err
		}
	}
	return fmt.Errorf("still %q after --fix, which said: %s", r.Roots, said[max(0, len(said)-1500):])
}
