package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/report"
	"github.com/llmbox-dev/llmbox/internal/secrets"
)

// part is what one thing took, by its name.
type part struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
}

// side is what one way to the first token took.
type side struct {
	Seconds float64 `json:"seconds"`
	// LinkBytes have passed to the machine meanwhile.
	LinkBytes int64  `json:"link_bytes"`
	Parts     []part `json:"parts,omitempty"`
	// StartedSeconds is when the model server was started, by the second.
	StartedSeconds float64 `json:"started_seconds,omitempty"`
	// Cores are those of the whole time; the load in it leaves them alone.
	Cores cores `json:"cores"`

	account string
}

// learned is what the other side is given from a box that llmbox made.
type learned struct {
	// config are k3s' files, by their names in /etc/rancher/k3s.
	config map[string][]byte
	// values of releases, by component.
	values map[string]string
	// model is what the model's release consists of.
	model string
	// images that the pods run, without llmbox' own, which no registry is asked for.
	images []string
}

// byLlmbox installs a box and is done when llmbox is: that is after a token through the
// gateway. One more is asked for afterwards, so that nobody has to believe it.
func (b *bench) byLlmbox(ctx context.Context, m *machine, loadSeconds float64) (s side, err error) {
	box, err := b.boxFile(m, loadSeconds)
	if err != nil {
		return s, err
	}
	if err := os.WriteFile(m.root("/root/box.yaml"), box, 0o600); err != nil {
		return s, fmt.Errorf("laying the configuration on the machine: %w", err)
	}
	if _, err := m.execute(ctx, "cp", "/lab/bin/llmbox", "/root/llmbox"); err != nil {
		return s, err
	}
	before, err := m.link.sent(ctx)
	if err != nil {
		return s, err
	}
	idle, err := readCores()
	if err != nil {
		return s, err
	}
	began := time.Now()
	if err := m.fetchK3s(ctx); err != nil {
		return s, err
	}
	s.Parts = append(s.Parts, part{"k3s, by curl", time.Since(began).Seconds()})
	cmd := m.on(ctx, "/root/llmbox", "install", "--config", "/root/box.yaml", "--k3s-binary", k3sBinary, "--init", "supervised",
		"--without", without, "--ignore", ignored, "--output", "json")
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	s.Seconds = time.Since(began).Seconds()
	if file := b.keepFile(filepath.Base(m.Dir) + ".ndjson"); file != "" {
		err = errors.Join(err, os.WriteFile(file, out, 0o600))
	}
	if err != nil {
		return s, fmt.Errorf("installing by llmbox: %w: %s%s", err, said.String(), out[max(0, len(out)-3000):])
	}
	after, err := m.link.sent(ctx)
	if err != nil {
		return s, err
	}
	s.LinkBytes = after - before
	used, err := readCores()
	if err != nil {
		return s, err
	}
	s.Cores = used.since(idle)
	timeline := report.NewTimeline()
	for line := range bytes.Lines(out) {
		var e event.Event
		if json.Unmarshal(line, &e) == nil {
			timeline.Apply(e)
		}
	}
	var account strings.Builder
	if err := timeline.WriteText(&account, report.Meta{Title: "llmbox install"}); err != nil {
		return s, fmt.Errorf("writing llmbox' account: %w", err)
	}
	// What preflight says of a machine made of namespaces comes after that.
	s.account, _, _ = strings.Cut(account.String(), "\npreflight")
	client, err := m.client(ctx)
	if err != nil {
		return s, err
	}
	k, err := key(ctx, client)
	if err != nil {
		return s, err
	}
	if err := m.token(ctx, k); err != nil {
		return s, err
	}
	s.StartedSeconds, err = started(ctx, client, began)
	return s, err
}

// started is when the model server's container was started.
func started(ctx context.Context, c *cluster.Client, began time.Time) (float64, error) {
	pods, err := c.Kube.CoreV1().Pods("llm").List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, fmt.Errorf("looking for the model server: %w", err)
	}
	for _, p := range pods.Items {
		for _, s := range p.Status.ContainerStatuses {
			if s.Name == "vllm" && s.State.Running != nil {
				return s.State.Running.StartedAt.Sub(began).Seconds(), nil
			}
		}
	}
	return 0, errors.New("looking for the model server: no container vllm runs in llm")
}

// learn keeps what llmbox computed.
func (b *bench) learn(ctx context.Context, m *machine) (learned, error) {
	l := learned{config: map[string][]byte{}, values: map[string]string{}}
	dir := m.root(filepath.Dir(kubeconfig))
	for _, pattern := range []string{"*", "*/*"} {
		files, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return l, fmt.Errorf("reading k3s' configuration: %w", err)
		}
		for _, file := range files {
			name, err := filepath.Rel(dir, file)
			if err != nil {
				return l, fmt.Errorf("reading k3s' configuration: %w", err)
			}
			if info, err := os.Stat(file); err != nil || !info.Mode().IsRegular() || name == filepath.Base(kubeconfig) {
				continue
			}
			if l.config[name], err = os.ReadFile(file); err != nil { // #nosec G304 -- on the lab's machine
				return l, fmt.Errorf("reading k3s' configuration: %w", err)
			}
		}
	}
	var err error
	for _, n := range b.order {
		if n.Chart == "" {
			continue
		}
		if l.values[n.Name], err = m.helm(ctx, "get", "values", n.Name, "--namespace", n.Namespace, "--output", "yaml"); err != nil {
			return l, err
		}
	}
	if l.model, err = m.helm(ctx, "get", "manifest", "model", "--namespace", "llm"); err != nil {
		return l, err
	}
	client, err := m.client(ctx)
	if err != nil {
		return l, err
	}
	pods, err := client.Kube.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return l, fmt.Errorf("listing pods: %w", err)
	}
	l.images = slices.DeleteFunc(images(pods.Items), func(ref string) bool { return strings.HasPrefix(ref, "ghcr.io/llmbox-dev/llmbox:") })
	return l, nil
}

// sequential does the same parts in a row, as a script does: k3s, Ready, one chart after
// the other with --wait; the model's pod pulls its image and downloads its weights itself.
func (b *bench) sequential(ctx context.Context, m *machine, l learned) (s side, err error) {
	if err := b.layOut(m, l); err != nil {
		return s, err
	}
	before, err := m.link.sent(ctx)
	if err != nil {
		return s, err
	}
	idle, err := readCores()
	if err != nil {
		return s, err
	}
	began := time.Now()
	last := began
	done := func(name string) {
		s.Parts = append(s.Parts, part{name, time.Since(last).Seconds()})
		last = time.Now()
	}
	if err := m.fetchK3s(ctx); err != nil {
		return s, err
	}
	done("k3s, by curl")
	if _, err := m.execute(ctx, "sh", "-c", "cp "+k3sBinary+" /usr/local/bin/k3s; setsid /usr/local/bin/k3s server </dev/null >/var/log/k3s.log 2>&1 &"); err != nil {
		return s, err
	}
	var client *cluster.Client
	if err := until(ctx, "a node that is Ready", func() (err error) {
		if client == nil {
			if client, err = m.client(ctx); err != nil {
				return err
			}
		}
		return ready(ctx, client)
	}); err != nil {
		return s, err
	}
	done("k3s until Ready")
	if err := b.prepare(ctx, client); err != nil {
		return s, err
	}
	done("namespaces, CRDs, Secrets")
	for _, n := range b.order {
		if n.Chart == "" {
			continue
		}
		if _, err := m.helm(ctx, "upgrade", "--install", n.Name, "/root/charts/"+n.Name, "--namespace", n.Namespace,
			"--values", "/root/charts/"+n.Name+".yaml", "--wait", "--timeout", "3h"); err != nil {
			return s, err
		}
		done("chart " + n.Name)
	}
	k, err := key(ctx, client)
	if err != nil {
		return s, err
	}
	if err := until(ctx, "a token", func() error { return m.token(ctx, k) }); err != nil {
		return s, err
	}
	done("first token")
	s.Seconds = time.Since(began).Seconds()
	after, err := m.link.sent(ctx)
	if err != nil {
		return s, err
	}
	s.LinkBytes = after - before
	used, err := readCores()
	if err != nil {
		return s, err
	}
	s.Cores = used.since(idle)
	s.StartedSeconds, err = started(ctx, client, began)
	return s, err
}

func ready(ctx context.Context, c *cluster.Client) error {
	nodes, err := c.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	for _, n := range nodes.Items {
		for _, condition := range n.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
				return nil
			}
		}
	}
	return errors.New("no node is Ready")
}

// layOut puts on the machine what a person would have there before the script begins.
func (b *bench) layOut(m *machine, l learned) error {
	write := func(path string, content []byte) error {
		if err := os.MkdirAll(filepath.Dir(m.root(path)), 0o755); err != nil { // #nosec G301 -- on the lab's machine
			return fmt.Errorf("laying out the script's files: %w", err)
		}
		if err := os.WriteFile(m.root(path), content, 0o600); err != nil {
			return fmt.Errorf("laying out the script's files: %w", err)
		}
		return nil
	}
	for name, content := range l.config {
		if err := write(filepath.Join(filepath.Dir(kubeconfig), name), content); err != nil {
			return err
		}
	}
	for _, n := range b.order {
		if n.Chart == "" {
			continue
		}
		if n.Name == "model" {
			manifest, volume, err := downloads(l.model, b.vllmImage, m.hub, b.big.hub, b.p)
			if err != nil {
				return err
			}
			for name, content := range map[string]string{
				"Chart.yaml": "apiVersion: v2\nname: model\nversion: 0.0.1\n", "manifest.yaml": manifest, "templates/all.yaml": `{{ .Files.Get "manifest.yaml" }}`,
			} {
				if err := write("/root/charts/model/"+name, []byte(content)); err != nil {
					return err
				}
			}
			if err := write("/root/charts/model.yaml", []byte("{}\n")); err != nil {
				return err
			}
			if err := os.MkdirAll(m.root(volume), 0o755); err != nil { // #nosec G301 -- a directory of models
				return fmt.Errorf("making the volume: %w", err)
			}
			if err := os.Chown(m.root(volume), 2000, 2000); err != nil {
				return fmt.Errorf("making the volume: %w", err)
			}
			continue
		}
		if err := os.CopyFS(m.root("/root/charts/"+n.Name), os.DirFS(filepath.Join(b.root, "embed", "charts", n.Chart))); err != nil {
			return fmt.Errorf("laying out the chart of %s: %w", n.Name, err)
		}
		if err := write("/root/charts/"+n.Name+".yaml", []byte(l.values[n.Name])); err != nil {
			return err
		}
	}
	return nil
}

// downloads makes of llmbox' own model release one whose pod downloads by itself, in a
// container before the server with the server's own image, one file after the other. The
// rest of the pod stays, but for the copy of llmbox and the probe that needs it, which a
// script has not, and for the policy that shuts the pod in.
func downloads(manifest, image, from string, h hub, p parameters) (changed, volume string, err error) {
	objects, err := chart.Decode(strings.NewReader(manifest))
	if err != nil {
		return "", "", fmt.Errorf("reading the model's manifest: %w", err)
	}
	var out strings.Builder
	found := false
	for _, o := range objects {
		switch o.GetKind() {
		case "NetworkPolicy":
			continue
		case "PersistentVolume":
			if volume, _, err = unstructured.NestedString(o.Object, "spec", "local", "path"); err != nil {
				return "", "", fmt.Errorf("reading the model's volume: %w", err)
			}
		case "Deployment":
			found = true
			if err := downloadsItself(o, image, from, h, p); err != nil {
				return "", "", err
			}
		}
		raw, err := yaml.Marshal(o.Object)
		if err != nil {
			return "", "", fmt.Errorf("writing the model's manifest: %w", err)
		}
		out.WriteString("---\n")
		out.Write(raw)
	}
	if !found || volume == "" {
		return "", "", errors.New("the model's manifest has no Deployment with a volume of the machine")
	}
	return out.String(), volume, nil
}

func downloadsItself(o *unstructured.Unstructured, image, from string, h hub, p parameters) error {
	pod, _, err := unstructured.NestedMap(o.Object, "spec", "template", "spec")
	if err != nil {
		return fmt.Errorf("reading the model's pod: %w", err)
	}
	containers, ok := pod["containers"].([]any)
	if !ok || len(containers) != 1 {
		return errors.New("the model's pod has not one container")
	}
	server, ok := containers[0].(map[string]any)
	if !ok {
		return errors.New("the model's container can't be read")
	}
	repo := "$HF_HOME/hub/models--" + strings.ReplaceAll(modelName, "/", "--")
	script := []string{"set -e", "mkdir() { " + tool + " mkdir -p $1; }", "mkdir " + repo + "/refs", "mkdir " + repo + "/snapshots/" + commit}
	for _, f := range h.files {
		script = append(script, fmt.Sprintf("%s wget -q -O %s/snapshots/%s/%s %s/%s/resolve/%s/%s", tool, repo, commit, f.Name, from, modelName, commit, f.Name))
	}
	script = append(script, "echo "+commit+" >"+repo+"/refs/main")
	pod["initContainers"] = []any{map[string]any{
		"name": "download", "image": image, "command": []any{tool, "sh", "-c", strings.Join(script, "\n")},
		"env": server["env"], "securityContext": server["securityContext"], "volumeMounts": server["volumeMounts"],
		"resources": map[string]any{"limits": map[string]any{"memory": "1Gi"}},
	}}
	server["startupProbe"] = map[string]any{"httpGet": map[string]any{"path": "/health", "port": "http"}, "periodSeconds": int64(1), "failureThreshold": int64(3600)}
	env, ok := server["env"].([]any)
	if !ok {
		return errors.New("the model's container has no environment")
	}
	for _, e := range env {
		if variable, ok := e.(map[string]any); ok && variable["name"] == "VLLM_SIM_LOAD_SECONDS" {
			variable["value"] = fmt.Sprint(p.LoadSeconds)
		}
	}
	if err := unstructured.SetNestedField(o.Object, int64(3*3600), "spec", "progressDeadlineSeconds"); err != nil {
		return fmt.Errorf("changing the model's pod: %w", err)
	}
	if err := unstructured.SetNestedMap(o.Object, pod, "spec", "template", "spec"); err != nil {
		return fmt.Errorf("changing the model's pod: %w", err)
	}
	return nil
}

// prepare applies what the charts take for granted, with the code that llmbox itself uses:
// quicker than a person's kubectl. Network policies would shut a downloading pod in.
func (b *bench) prepare(ctx context.Context, client *cluster.Client) error {
	for _, name := range []string{"namespaces.yaml", "priorityclass.yaml"} {
		raw, err := os.ReadFile(filepath.Join(b.root, "embed", "manifests", name))
		if err != nil {
			return fmt.Errorf("preparing the cluster: %w", err)
		}
		objects, err := chart.Decode(bytes.NewReader(raw))
		if err != nil {
			return fmt.Errorf("preparing the cluster: %w", err)
		}
		for _, o := range objects {
			if _, err := client.Apply(ctx, o); err != nil {
				return fmt.Errorf("preparing the cluster: %w", err)
			}
		}
	}
	var folders []string
	for _, n := range b.order {
		folders = append(folders, n.CRDs...)
	}
	slices.Sort(folders)
	crds, err := cluster.LoadCRDs(os.DirFS(filepath.Join(b.root, "embed")), slices.Compact(folders))
	if err != nil {
		return fmt.Errorf("preparing the cluster: %w", err)
	}
	if _, err := client.ApplyCRDs(ctx, crds, func(int, int) {}); err != nil {
		return fmt.Errorf("preparing the cluster: %w", err)
	}
	return secrets.EnsureBoxSecrets(ctx, client.Kube, secrets.BoxSecrets{GatewayKeys: true})
}
