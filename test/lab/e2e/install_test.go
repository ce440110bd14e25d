package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/llmbox-dev/llmbox/internal/bench"
	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/test/internal/trace"
)

// TestInstallOnAMachine makes an empty machine a box, changes it, lets it boot at another
// address, and takes the box off again without a trace.
func TestInstallOnAMachine(t *testing.T) {
	onlyWhereAsked(t, false)
	bin := binDir(t)
	for _, name := range []string{"k3s-standin", "envoy-gateway", "proxy-standin"} {
		if _, err := os.Stat(filepath.Join(bin, "lab", name)); err != nil {
			t.Skipf("%v: run `make lab-machine lab-node-gateway` first", err)
		}
	}
	h := startMachine(t, bin, "--model", modelName)
	h.furnish(t)
	look := func() trace.State {
		t.Helper()
		state, err := trace.Take(t.Context(), func(_ context.Context, command ...string) (string, error) { return h.run(command...) })
		must(t, err)
		return state
	}
	empty := look()

	b := &wholeBox{lab: &h.lab, ctx: t.Context()}
	if !t.Run("from nothing to a token", func(t *testing.T) {
		r := h.install(t)
		r.ends(t, 0)
		t.Logf("%.1f s", r.took.Seconds())
		secret, err := h.client(t).CoreV1().Secrets("llm").Get(t.Context(), "gateway-keys", metav1.GetOptions{})
		must(t, err)
		b.key = string(secret.Data["default"])
		must(t, b.serves(t.Context()))
		if code, err := b.complete(t.Context(), b.key+"x", 2); err != nil || code != http.StatusUnauthorized {
			t.Errorf("with a wrong key: %d, %v", code, err)
		}
		if diff := trace.Diff(empty, look()); len(diff) < 100 {
			t.Errorf("a box is only %d traces: what is compared below shows nothing", len(diff))
		}
	}) {
		return
	}
	t.Run("bench measures through the gateway", func(t *testing.T) {
		r := h.llmbox(t, 5*time.Minute, "bench", "--concurrency", "1,4", "--requests", "8", "--max-tokens", "16", "--prompt-tokens", "64", "--save", "/root/bench.json")
		r.ends(t, 0)
		got, err := bench.Read(strings.NewReader(h.must(t, "cat", "/root/bench.json")))
		must(t, err)
		if got.Failures() != 0 || got.Succeeded() != 16 || len(got.Levels) != 2 || got.Box.Model != modelName || strings.Contains(r.said, b.key) {
			t.Errorf("it measured %+v, and said %s", got, r.said)
		}
		for _, l := range got.Levels {
			if l.OutputTokens != 8*16 || l.FirstToken.P50 <= 0 || l.TokensPerSecond <= 0 {
				t.Errorf("a level is %+v", l)
			}
			t.Logf("%d at once: first token %.0f ms, %.0f tokens a second", l.Concurrency, l.FirstToken.P50, l.TokensPerSecond)
		}
		h.llmbox(t, quickly, "bench", "--compare", "/root/bench.json", "/root/bench.json").ends(t, 0)
		h.must(t, "rm", "/root/bench.json")
	})
	t.Run("once more changes nothing", func(t *testing.T) {
		before := h.fingerprint(t)
		r := h.install(t)
		r.ends(t, 0)
		t.Logf("%.1f s", r.took.Seconds())
		r.changed(t)
		before.same(t, h.fingerprint(t))
	})
	t.Run("another port changes the gateway alone", func(t *testing.T) {
		before := h.fingerprint(t)
		r := h.install(t, "--set", "gateway.port=8081")
		r.ends(t, 0)
		r.changed(t, "component/envoy-gateway")
		after := h.fingerprint(t)
		before.sameServer(t, after)
		before.sameModel(t, after)
		h.must(t, "curl", "-sSf", "-o", "/dev/null", "-H", "Authorization: Bearer "+b.key, "http://10.99.0.1:8081/v1/models")
		h.install(t, "--set", "gateway.port=8080").ends(t, 0)
		must(t, b.serves(t.Context()))
	})
	t.Run("a setting of k3s restarts k3s alone", func(t *testing.T) {
		before := h.fingerprint(t)
		r := h.install(t, "--set", "k3s.tlsNames=box.example.com")
		r.ends(t, 0)
		r.changed(t, "component/k3s")
		after := h.fingerprint(t)
		if before.server == after.server {
			t.Error("k3s was not restarted")
		}
		before.sameModel(t, after)
		before.sameReleases(t, after)
		must(t, b.serves(t.Context()))
	})
	t.Run("one run at a time", func(t *testing.T) { oneAtATime(t, h) })
	t.Run("a boot at another address brings the token back", func(t *testing.T) {
		// What an administrator does where there is no service manager.
		h.must(t, "mkdir", "/etc/local.d")
		h.write(t, "/etc/local.d/llmbox.start", 0o755, "#!/bin/sh\nsetsid /var/lib/llmbox/bin/llmbox host supervise </dev/null >/dev/null 2>&1 &\n")
		run(t, 3*time.Minute, filepath.Join(bin, "llmbox-lab"), "reboot", "--dir", h.Dir, "--address", "10.99.0.77")
		began := time.Now()
		becomes(t, 8*time.Minute, "a token", func() error { return b.serves(t.Context()) })
		t.Logf("a token %s after the boot", time.Since(began).Round(time.Second))
		eventually(t, time.Minute, func(ctx context.Context) error { return nodeReady(ctx, h.client(t), "10.99.0.77") })
		h.must(t, "rm", "-r", "/etc/local.d")
	})
	t.Run("uninstall leaves no trace", func(t *testing.T) {
		r := h.llmbox(t, uninstallWithin, "uninstall", "--yes")
		r.ends(t, 0)
		t.Logf("%.1f s", r.took.Seconds())
		var diff []string
		for range 5 {
			if diff = trace.Diff(empty, moved(look(), "10.99.0.77", "10.99.0.1")); len(diff) == 0 {
				break
			}
			time.Sleep(time.Second)
		}
		for _, d := range diff {
			t.Error(d)
		}
		again := h.llmbox(t, uninstallWithin, "uninstall", "--yes")
		again.ends(t, 0)
		if !strings.Contains(again.said, "no box") {
			t.Errorf("a second uninstall says %q", again.said)
		}
	})
	h.stop(t)
}

// oneAtATime lets others come while an install is at work.
func oneAtATime(t *testing.T, h *host) {
	first := make(chan llmboxRun)
	go func() {
		// k3s starts anew, which takes a while.
		first <- h.attempt(t.Context(), installWithin, h.installArgs("--set", "k3s.tlsNames=other.example.com")...)
	}()
	becomes(t, time.Minute, "an install at work", func() error {
		out, err := h.run("cat", "/var/lib/llmbox/lock")
		if err == nil && !strings.Contains(out, `"install"`) {
			err = fmt.Errorf("the lock says %q", out)
		}
		if err != nil {
			return err
		}
		_, err = h.run("flock", "--nonblock", "/var/lib/llmbox/lock", "true")
		if err == nil {
			return errors.New("nobody holds the lock")
		}
		return nil
	})
	h.llmbox(t, time.Minute, "uninstall", "--yes").ends(t, 6)
	second := h.install(t)
	r := <-first
	r.ends(t, 0)
	second.ends(t, 0)
	if !strings.Contains(second.said, "looking on") {
		t.Errorf("the second says %q", second.said)
	}
	h.install(t, "--set", "k3s.tlsNames=other.example.com").changed(t)
}

// llmboxRun is one run of llmbox on a machine.
type llmboxRun struct {
	args   []string
	code   int
	err    error
	took   time.Duration
	events []event.Event
	said   string
}

// furnish lays llmbox and the configuration of a small box on the machine.
func (h *host) furnish(t *testing.T) {
	t.Helper()
	var registries struct {
		Mirrors map[string]struct{ Endpoint []string }
	}
	must(t, yaml.Unmarshal([]byte(h.must(t, "cat", "/lab/registries.yaml")), &registries))
	mirrors := map[string]any{}
	for host, m := range registries.Mirrors {
		mirrors[host] = map[string]any{"endpoints": m.Endpoint}
	}
	raw, err := os.ReadFile(boxFile(t, h.Hub))
	must(t, err)
	var box map[string]any
	must(t, yaml.Unmarshal(raw, &box))
	box["registries"] = map[string]any{"mirrors": mirrors}
	box["model"] = map[string]any{"name": modelName, "source": h.Hub}
	// The machine's disk is the outer machine's, whatever there is left on it.
	box["k3s"] = map[string]any{"extraArgs": []string{"--kubelet-arg=eviction-hard=nodefs.available<1%,imagefs.available<1%"}}
	if raw, err = yaml.Marshal(box); err != nil {
		t.Fatal(err)
	}
	h.write(t, "/root/box.yaml", 0o600, string(raw))
	// A copy, as it removes itself in the end.
	h.must(t, "cp", "/lab/bin/llmbox", "/root/llmbox")
}

func (h *host) installArgs(more ...string) []string {
	return append([]string{
		"install", "--config", "/root/box.yaml", "--k3s-binary", "/lab/programs/k3s-standin", "--init", "supervised", "--without", without(true),
		// What a machine made of namespaces is not.
		"--ignore", "host.container,host.disk.pressure,host.disk.space,gpu.present,host.cgroup.v1,net.hosts,net.dns.resolve",
	}, more...)
}

func (h *host) install(t *testing.T, more ...string) llmboxRun {
	t.Helper()
	return h.llmbox(t, installWithin, h.installArgs(more...)...)
}

func (h *host) llmbox(t *testing.T, within time.Duration, args ...string) llmboxRun {
	t.Helper()
	r := h.attempt(t.Context(), within, args...)
	if r.err != nil {
		t.Fatal(r.err)
	}
	return r
}

func (h *host) attempt(ctx context.Context, within time.Duration, args ...string) llmboxRun {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	r := llmboxRun{args: args}
	var out, said bytes.Buffer
	cmd := exec.CommandContext(ctx, filepath.Join(h.bin, "llmbox-lab"), slices.Concat( // #nosec G204 -- the lab's own
		h.exec(), []string{"/root/llmbox"}, args, []string{"--output", "json"})...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &said, time.Second
	began := time.Now()
	err := cmd.Run()
	r.took, r.said, r.code = time.Since(began), said.String()+out.String(), cmd.ProcessState.ExitCode()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		r.err = fmt.Errorf("llmbox %s: %w: %s", args[0], errors.Join(err, ctx.Err()), said.String())
		return r
	}
	for lines := bufio.NewScanner(&out); lines.Scan(); {
		var e event.Event
		if json.Unmarshal(lines.Bytes(), &e) == nil {
			r.events = append(r.events, e)
		}
	}
	return r
}

func (r llmboxRun) ends(t *testing.T, code int) {
	t.Helper()
	if r.err != nil || r.code != code {
		t.Fatalf("llmbox %s ended with %d, want %d: %v\n%s", r.args[0], r.code, code, r.err, r.said[max(0, len(r.said)-6000):])
	}
}

// changed wants every step but these to say that it changed nothing.
func (r llmboxRun) changed(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for _, e := range r.events {
		if e.Type == event.StepDone && strings.HasPrefix(e.Step, "component/") && strings.Count(e.Step, "/") == 1 && e.Message != "unchanged" {
			got = append(got, e.Step)
		}
	}
	got = slices.DeleteFunc(got, func(step string) bool {
		// An external component has nothing to change; weights say how many files.
		return step == "component/gpu-operator" || step == "component/weights"
	})
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("changed: %q, want %q", got, want)
	}
}

// fingerprint is what a run that changes nothing must not touch.
type fingerprint struct {
	server, record, model string
	releases, containers  []string
}

func (h *host) fingerprint(t *testing.T) fingerprint {
	t.Helper()
	f := fingerprint{record: h.must(t, "cat", "/var/lib/llmbox/k3s.json")}
	var record struct {
		Started struct {
			PID   int    `json:"pid"`
			Start uint64 `json:"start"`
		} `json:"started"`
	}
	must(t, json.Unmarshal([]byte(f.record), &record))
	f.server = fmt.Sprintf("%d since %d", record.Started.PID, record.Started.Start)
	if out := h.must(t, "cat", fmt.Sprintf("/proc/%d/stat", record.Started.PID)); !strings.Contains(out, fmt.Sprintf(" %d ", record.Started.Start)) {
		t.Errorf("the record names another process than runs: %s, %s", f.server, out)
	}
	client := h.client(t)
	secrets, err := client.CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{LabelSelector: "owner=helm"})
	must(t, err)
	for _, s := range secrets.Items {
		f.releases = append(f.releases, s.Namespace+"/"+s.Name)
	}
	slices.Sort(f.releases)
	if len(f.releases) == 0 {
		t.Error("there are no releases")
	}
	pods, err := client.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{})
	must(t, err)
	for _, p := range pods.Items {
		if p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning {
			continue
		}
		for _, s := range p.Status.ContainerStatuses {
			line := fmt.Sprintf("%s/%s %s %s restarted %d times", p.Namespace, p.Name, s.Name, s.ContainerID, s.RestartCount)
			f.containers = append(f.containers, line)
			if p.Namespace == "llm" {
				f.model += line
			}
		}
	}
	slices.Sort(f.containers)
	return f
}

func (f fingerprint) same(t *testing.T, now fingerprint) {
	t.Helper()
	f.sameServer(t, now)
	f.sameModel(t, now)
	f.sameReleases(t, now)
	if !slices.Equal(f.containers, now.containers) {
		t.Errorf("containers were %q and are %q", f.containers, now.containers)
	}
	if f.record != now.record {
		t.Errorf("the record was %s and is %s", f.record, now.record)
	}
}

func (f fingerprint) sameServer(t *testing.T, now fingerprint) {
	t.Helper()
	if f.server != now.server {
		t.Errorf("k3s was process %s and is %s", f.server, now.server)
	}
}

func (f fingerprint) sameModel(t *testing.T, now fingerprint) {
	t.Helper()
	if f.model == "" || f.model != now.model {
		t.Errorf("the model server was %s and is %s", f.model, now.model)
	}
}

func (f fingerprint) sameReleases(t *testing.T, now fingerprint) {
	t.Helper()
	if !slices.Equal(f.releases, now.releases) {
		t.Errorf("releases were %q and are %q", f.releases, now.releases)
	}
}

// moved is a machine as it would be at another address.
func moved(state trace.State, from, to string) trace.State {
	for _, lines := range state {
		for i := range lines {
			lines[i] = strings.ReplaceAll(lines[i], from, to)
		}
		slices.Sort(lines)
	}
	return state
}
