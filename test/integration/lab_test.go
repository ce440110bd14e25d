// Package integration runs the built llmbox against one real Kubernetes API
// server, the lab's, and looks at what it did through clients of its own. It
// knows what a box must look like from outside; it must not reach into how the
// command line or the runner are made.
package integration

import (
	"bufio"
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
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/model"
)

// labVariable hands the running lab from TestMain to the tests, and
// labErrorVariable why there is none.
const (
	labVariable      = "LLMBOX_TEST_LAB"
	labErrorVariable = "LLMBOX_TEST_LAB_ERROR"
)

// labStart bounds the start of the control plane on a busy machine.
const labStart = 3 * time.Minute

// TestMain starts one lab for all tests. It dies with this process: its
// lifeline is a pipe.
func TestMain(m *testing.M) {
	stop, err := startLab()
	if err != nil {
		_ = os.Setenv(labErrorVariable, err.Error())
	}
	code := m.Run()
	stop()
	os.Exit(code)
}

// binDir is where the built programs lie.
func binDir() (string, error) {
	dir := os.Getenv("LLMBOX_BIN")
	if dir == "" {
		dir = filepath.Join("..", "..", "bin")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for _, name := range []string{"llmbox", "llmbox-lab", "lab/kube-apiserver", "lab/kwok"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return "", fmt.Errorf("%w: run `make build lab` first, or name the folder in LLMBOX_BIN", err)
		}
	}
	return dir, nil
}

func startLab() (stop func(), err error) {
	stop = func() {}
	bin, err := binDir()
	if err != nil {
		return stop, err
	}
	root, err := os.MkdirTemp("", "llmbox-integration-")
	if err != nil {
		return stop, err
	}
	var stderr bytes.Buffer
	cmd := exec.Command(filepath.Join(bin, "llmbox-lab"), "start", "--dir", filepath.Join(root, "lab"), "--gpu", "a10", "--lifeline",
		"--delays", mustAbs("testdata/delays.yaml"))
	cmd.Stderr = &stderr
	lifeline, err := cmd.StdinPipe()
	if err != nil {
		return stop, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return stop, err
	}
	if err := cmd.Start(); err != nil {
		return stop, err
	}
	stop = func() {
		_ = lifeline.Close()
		if err := cmd.Wait(); err != nil {
			fmt.Fprintf(os.Stderr, "the lab ended badly: %v\n%s", err, stderr.String())
		}
		_ = os.RemoveAll(root)
	}
	line := make(chan string, 1)
	go func() {
		text, _ := bufio.NewReader(stdout).ReadString('\n')
		line <- text
		_, _ = io.Copy(io.Discard, stdout)
	}()
	select {
	case text := <-line:
		if text == "" {
			return stop, fmt.Errorf("starting the lab: %s", stderr.String())
		}
		return stop, os.Setenv(labVariable, text)
	case <-time.After(labStart):
		return stop, errors.New("starting the lab: it is not up in time")
	}
}

func mustAbs(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		panic(err)
	}
	return abs
}

// lab is the running control plane with a client of the tests' own.
type lab struct {
	Kubeconfig  string `json:"kubeconfig"`
	Dir         string `json:"dir"`
	GatewayPort int    `json:"gateway_port"`

	bin    string
	client *cluster.Client
}

// useLab returns the lab; a test that needs it fails where there is none.
func useLab(t *testing.T) *lab {
	t.Helper()
	if why := os.Getenv(labErrorVariable); why != "" {
		t.Fatal(why)
	}
	l := &lab{}
	if err := json.Unmarshal([]byte(os.Getenv(labVariable)), l); err != nil {
		t.Fatalf("reading what the lab printed: %v", err)
	}
	var err error
	if l.bin, err = binDir(); err != nil {
		t.Fatal(err)
	}
	l.client = l.connect(t, rest.NoWarnings{})
	return l
}

func (l *lab) connect(t *testing.T, warnings rest.WarningHandlerWithContext) *cluster.Client {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", l.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	cfg.QPS = -1
	cfg.WarningHandlerWithContext = warnings
	client, err := cluster.New(t.Context(), cfg, 30*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// result is how a run of llmbox ended.
type result struct {
	code           int
	stdout, stderr string
	took           time.Duration
}

func (r result) String() string {
	return fmt.Sprintf("exit %d after %s\n--- stdout\n%s--- stderr\n%s", r.code, r.took.Round(time.Millisecond), tail(r.stdout), tail(r.stderr))
}

func tail(s string) string {
	const most = 4000
	if len(s) > most {
		return "…" + s[len(s)-most:]
	}
	return s
}

// command prepares a run of llmbox with nothing of the environment but PATH.
func (l *lab) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(l.bin, "llmbox"), args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// run runs llmbox to its end, at most for the given time.
func (l *lab) run(t *testing.T, bound time.Duration, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	return finish(t, ctx, l.command(ctx, args...), bound)
}

func finish(t *testing.T, ctx context.Context, cmd *exec.Cmd, bound time.Duration) result { //nolint:revive // t comes first in tests
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began := time.Now()
	err := cmd.Run()
	res := result{code: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String(), took: time.Since(began)}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("running %v: %v\n%s", cmd.Args, err, res)
	}
	if ctx.Err() != nil {
		t.Fatalf("%v did not end within %s\n%s", cmd.Args, bound, res)
	}
	return res
}

// installArgs are the flags of a plain install on the lab.
func (l *lab) installArgs(more ...string) []string {
	return append([]string{"install", "--kubeconfig", l.Kubeconfig, "--port", fmt.Sprint(l.GatewayPort)}, more...)
}

// installBound and uninstallBound are generous: other things may run beside.
const (
	installBound   = 4 * time.Minute
	uninstallBound = 6 * time.Minute
	quickBound     = 90 * time.Second
)

// install brings the box in and fails the test if that fails.
func (l *lab) install(t *testing.T, more ...string) []event.Event {
	t.Helper()
	res := l.run(t, installBound, l.installArgs(append([]string{"--output", "json"}, more...)...)...)
	if res.code != 0 {
		t.Fatalf("install: %s", res)
	}
	return events(t, res.stdout)
}

// clean takes whatever is left of a box out of the cluster.
func (l *lab) clean(t *testing.T) {
	t.Helper()
	if len(l.traces(t)) == 0 {
		return
	}
	if res := l.run(t, uninstallBound, "uninstall", "--yes", "--kubeconfig", l.Kubeconfig); res.code != 0 {
		t.Fatalf("uninstall: %s", res)
	}
}

// events decodes NDJSON strictly: one event a line and nothing else.
func events(t *testing.T, text string) []event.Event {
	t.Helper()
	var out []event.Event
	for i, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		dec := json.NewDecoder(strings.NewReader(line))
		dec.DisallowUnknownFields()
		var e event.Event
		if err := dec.Decode(&e); err != nil {
			t.Fatalf("line %d of stdout is no event: %v: %s", i+1, err, line)
		}
		out = append(out, e)
	}
	return out
}

// done finds the step.done event of a step.
func done(list []event.Event, step string) (event.Event, bool) {
	i := slices.IndexFunc(list, func(e event.Event) bool { return e.Type == event.StepDone && e.Step == step })
	if i < 0 {
		return event.Event{}, false
	}
	return list[i], true
}

// traces lists what of a box is in the cluster outside of its namespaces, and
// the namespaces.
func (l *lab) traces(t *testing.T) []string {
	t.Helper()
	var found []string
	resources, err := l.client.Kube.Discovery().ServerPreferredResources()
	if err != nil && len(resources) == 0 {
		t.Fatalf("discovering resources: %v", err)
	}
	for _, list := range resources {
		for _, r := range list.APIResources {
			if r.Namespaced || !slices.Contains(r.Verbs, "list") {
				continue
			}
			gv := splitGroupVersion(list.GroupVersion)
			items, err := l.client.Dynamic.Resource(gv.WithResource(r.Name)).List(t.Context(), metav1.ListOptions{})
			if apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err) {
				continue
			}
			if err != nil {
				t.Fatalf("listing %s: %v", r.Name, err)
			}
			for i := range items.Items {
				o := &items.Items[i]
				if boxObject(o) {
					found = append(found, o.GetKind()+" "+o.GetName())
				}
			}
		}
	}
	slices.Sort(found)
	return found
}

func boxObject(o metav1.Object) bool {
	labels, annotations := o.GetLabels(), o.GetAnnotations()
	return labels[cluster.PartOfLabel] == cluster.ManagedByValue || labels[cluster.ManagedByLabel] == cluster.ManagedByValue ||
		annotations["meta.helm.sh/release-name"] != "" || o.GetName() == installer.SystemNamespace
}

// untouched fails the test if anything of a box is in the cluster.
func (l *lab) untouched(t *testing.T) {
	t.Helper()
	if found := l.traces(t); len(found) > 0 {
		t.Errorf("something was applied although the run was refused: %s", strings.Join(found, ", "))
	}
}

// buildPlan plans a box as the command line does, for the given GPU product, and
// lets change alter the configuration.
func buildPlan(t *testing.T, kubeVersion, product string, change func(*config.Layer) error) *installer.Plan {
	t.Helper()
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		t.Fatal(err)
	}
	catalogue, err := model.Load(assets.FS())
	if err != nil {
		t.Fatal(err)
	}
	card, known := gpu.ProductByKey(product)
	if !known {
		t.Fatalf("unknown GPU product %q", product)
	}
	choice, err := catalogue.Choose(model.FactsOf(card, 1))
	if err != nil {
		t.Fatal(err)
	}
	var stated, computed config.Layer
	if err := errors.Join(
		change(&stated),
		computed.Set("gpu.product", product, config.Computed("the machine")),
		computed.Set("gpu.count", 1, config.Computed("the machine")),
		computed.Set("model.name", choice.Model.Name, config.Computed(choice.Reason)),
		computed.Set("model.contextTokens", choice.ContextTokens, config.Computed("what fits beside the weights")),
	); err != nil {
		t.Fatal(err)
	}
	box, sources, err := config.Resolve(stated, computed, config.Defaults())
	if err != nil {
		t.Fatal(err)
	}
	plan, err := installer.BuildPlan(installer.Input{
		Assets: assets.FS(), Table: table, Box: box, Choice: choice, Sources: sources, Version: version(t), KubeVersion: kubeVersion,
	})
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

// version is what the built llmbox calls itself: the tag of its image.
func version(t *testing.T) string {
	t.Helper()
	bin, err := binDir()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := exec.CommandContext(t.Context(), filepath.Join(bin, "llmbox"), "version", "--output", "json").Output()
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Version string `json:"version"`
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		t.Fatal(err)
	}
	return doc.Version
}

func unchanged(*config.Layer) error { return nil }
