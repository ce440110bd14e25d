package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/test/internal/labproc"
)

const (
	modelName = "Qwen/Qwen3-0.6B"
	// without is what a box has not that only has to serve through the gateway, and
	// ignored what a machine made of namespaces is not.
	without = "prometheus,keda,autoscale,kyverno,policies,vault,external-secrets"
	ignored = "host.container,host.disk.pressure,host.disk.space,gpu.present,host.cgroup.v1,net.hosts,net.dns.resolve"

	k3sBinary  = "/root/k3s"
	kubeconfig = "/etc/rancher/k3s/k3s.yaml"
	lookLimit  = 2 * time.Minute
	pause      = 100 * time.Millisecond
)

// payload is what goes over the link, on the far side of it.
type payload struct {
	layers []v1.Layer
	hub    hub
	// k3s is the program in its place.
	k3s string
}

// machine is an empty machine at the end of a link, for one side.
type machine struct {
	*labproc.Lab

	tool string
	work string
	link link
	hub  string
	stop func() error
}

func (b *bench) startMachine(ctx context.Context, name string, p payload, bitsPerSecond float64) (m *machine, err error) {
	port, err := labproc.FreePort(ctx)
	if err != nil {
		return nil, err
	}
	m = &machine{tool: filepath.Join(b.bin, "llmbox-lab"), work: b.work, hub: fmt.Sprintf("http://%s:%d", around, hubPort)}
	m.Lab, err = labproc.Start(ctx, labproc.Options{Program: m.tool, Dir: b.work, Name: name, GatewayPort: port, Machine: true, Log: io.Discard})
	if err != nil {
		return nil, err
	}
	m.stop = m.Lab.Stop
	defer func() {
		if err != nil {
			err = errors.Join(err, m.stop())
		}
	}()
	m.link = link{pid: m.PIDs["node"]}
	l, err := m.link.listen(ctx, hubPort)
	if err != nil {
		return nil, err
	}
	server := &http.Server{Handler: p.hub.handler(p.k3s), ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(l) }()
	m.stop = func() error { return errors.Join(server.Close(), m.Lab.Stop()) }
	if len(p.layers) > 0 {
		if err := m.link.grow(ctx, b.vllmImage, p.layers); err != nil {
			return nil, err
		}
	}
	if bitsPerSecond > 0 {
		err = m.link.cap(ctx, bitsPerSecond)
	}
	return m, err
}

func (m *machine) root(path string) string { return filepath.Join(m.Machines[0].Root, path) }

// on is a command that runs on the machine.
func (m *machine) on(ctx context.Context, command ...string) *exec.Cmd {
	// #nosec G204 -- the lab's own
	return exec.CommandContext(ctx, m.tool, append([]string{"exec", "--dir", m.Dir, "--"}, command...)...)
}

func (m *machine) execute(ctx context.Context, command ...string) (string, error) {
	var said bytes.Buffer
	cmd := m.on(ctx, command...)
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("running %s on the machine: %w: %s%s", command[0], err, said.String(), out)
	}
	return string(out), nil
}

func (m *machine) helm(ctx context.Context, args ...string) (string, error) {
	return m.execute(ctx, append([]string{"env", "HOME=/root", "/lab/programs/helm", "--kubeconfig", kubeconfig}, args...)...)
}

// fetchK3s is how both sides get k3s: its release's address is not one that a lab could be at.
func (m *machine) fetchK3s(ctx context.Context) error {
	_, err := m.execute(ctx, "sh", "-c", "curl -sSf -o "+k3sBinary+" "+m.hub+"/k3s && chmod 755 "+k3sBinary)
	return err
}

// client reaches the cluster on the machine from outside.
func (m *machine) client(ctx context.Context) (*cluster.Client, error) {
	raw, err := os.ReadFile(m.root(kubeconfig))
	if err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	file := m.Dir + "-kubeconfig"
	outside := bytes.ReplaceAll(raw, []byte("https://127.0.0.1:6443"), fmt.Appendf(nil, "https://127.0.0.1:%d", m.APIPort))
	if err := os.WriteFile(file, outside, 0o600); err != nil {
		return nil, fmt.Errorf("writing the kubeconfig: %w", err)
	}
	return cluster.Connect(ctx, file, "", time.Minute)
}

// until asks again until the answer is nil.
func until(ctx context.Context, what string, fn func() error) error {
	for {
		err := fn()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w: %w", what, ctx.Err(), err)
		case <-time.After(pause):
		}
	}
}

// token asks for one through the gateway.
func (m *machine) token(ctx context.Context, key string) error {
	body, err := json.Marshal(map[string]any{"model": modelName, "max_tokens": 1, "messages": []map[string]string{{"role": "user", "content": "Hello"}}})
	if err != nil {
		return fmt.Errorf("asking for a token: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", m.GatewayPort), bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("asking for a token: %w", err)
	}
	req.Header.Set("Authorization", "Bearer "+key)
	req.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("asking for a token: %w", err)
	}
	raw, err := io.ReadAll(io.LimitReader(answer.Body, 1<<20))
	if err = errors.Join(err, answer.Body.Close()); err != nil {
		return fmt.Errorf("asking for a token: %w", err)
	}
	if answer.StatusCode != http.StatusOK || !bytes.Contains(raw, []byte(`"completion_tokens":1`)) {
		return fmt.Errorf("asking for a token: %s: %s", answer.Status, raw)
	}
	return nil
}

func key(ctx context.Context, c *cluster.Client) (string, error) {
	secret, err := c.Kube.CoreV1().Secrets("llm").Get(ctx, "gateway-keys", metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("reading the gateway's key: %w", err)
	}
	return string(secret.Data["default"]), nil
}

// images are those that pods of the machine name.
func images(pods []corev1.Pod) []string {
	seen := map[string]bool{}
	var out []string
	for _, p := range pods {
		for _, c := range append(p.Spec.InitContainers[:len(p.Spec.InitContainers):len(p.Spec.InitContainers)], p.Spec.Containers...) {
			if !seen[c.Image] {
				seen[c.Image] = true
				out = append(out, c.Image)
			}
		}
	}
	return out
}

// boxFile is the configuration of a box that serves and has a gateway, as anybody may write it.
func (b *bench) boxFile(m *machine, loadSeconds float64) ([]byte, error) {
	raw, err := os.ReadFile(filepath.Join(filepath.Dir(m.root("")), "lab", "registries.yaml"))
	if err != nil {
		return nil, fmt.Errorf("reading the lab's registries: %w", err)
	}
	var registries struct {
		Mirrors map[string]struct{ Endpoint []string }
	}
	if err := yaml.Unmarshal(raw, &registries); err != nil {
		return nil, fmt.Errorf("reading the lab's registries: %w", err)
	}
	mirrors := map[string]any{}
	for host, mirror := range registries.Mirrors {
		mirrors[host] = map[string]any{"endpoints": mirror.Endpoint}
	}
	values := func(v any) any { return map[string]any{"values": v} }
	out, err := yaml.Marshal(map[string]any{
		"apiVersion": "llmbox.dev/v1alpha1", "kind": "Box",
		"model": map[string]any{"name": modelName, "source": m.hub}, "gpu": map[string]any{"product": "a100-80", "count": 1},
		"registries": map[string]any{"mirrors": mirrors},
		// The machine's disk is the outer machine's, whatever there is left on it.
		"k3s": map[string]any{"extraArgs": []string{"--kubelet-arg=eviction-hard=nodefs.available<1%,imagefs.available<1%"}},
		"components": map[string]any{
			"gpu-operator": map[string]any{"mode": "external"},
			// Images that the table pins by digest can't be made by the lab.
			"envoy-gateway": values(map[string]any{"images": map[string]any{"envoy": b.envoyImage}}),
			"model": values(map[string]any{
				"images":    map[string]any{"vllm": b.vllmImage},
				"env":       map[string]any{"VLLM_SIM_LOAD_SECONDS": fmt.Sprint(loadSeconds), "VLLM_SIM_PREFILL_SECONDS": fmt.Sprint(b.p.WarmUpSeconds)},
				"resources": map[string]any{"cpuRequestMillis": 100, "memoryRequestMiB": 128, "memoryLimitMiB": 2560},
				"drain":     map[string]any{"preStopSeconds": 1, "shutdownTimeoutSeconds": 5},
			}),
		},
	})
	if err != nil {
		return nil, fmt.Errorf("writing the box's configuration: %w", err)
	}
	return out, nil
}
