package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	admissionclient "k8s.io/client-go/kubernetes/typed/admissionregistration/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/llmbox-dev/llmbox/internal/event"
)

// refuse is what the webhook of this test says.
const refuse = "Deployments of this team need a label cost-centre"

// webhookRole makes this test binary the webhook.
const webhookRole = "E2E_WEBHOOK_ADDRESS"

// TestMain makes a second use of the binary: within the node's network it is an
// admission webhook.
func TestMain(m *testing.M) {
	if address := os.Getenv(webhookRole); address != "" {
		if err := serveWebhook(address); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// Both engines take the same box through the same troubles on nodes that differ in
// nothing: helm-controller runs on both, as it does on k3s.
func TestEngines(t *testing.T) {
	bin := enginesBin(t)
	for _, engine := range []string{"helm", "helmchart"} {
		t.Run(engine, func(t *testing.T) {
			lab := startLab(t, bin, "--helm-controller")
			namespaces := namespacesOf(t, lab.PIDs["node"])
			b := box{t: t, bin: bin, lab: lab, file: boxFile(t, lab.Hub)}
			watch := lookAtProcesses(t, namespaces)

			// Without a word it is helm on a fresh cluster, and what it was on any other.
			var first []string
			if engine == "helmchart" {
				first = []string{"--engine", engine}
			}
			installed := b.install(nil, first...)
			if installed.code != 0 {
				t.Fatalf("install ended with %d\n%s", installed.code, installed.text())
			}
			costs := watch()
			if got := len(b.helmCharts()) > 0; got != (engine == "helmchart") {
				t.Errorf("engine %s, and the HelmCharts are %v", engine, b.helmCharts())
			}
			again := b.install(nil)
			if again.code != 0 {
				t.Fatalf("the second install ended with %d\n%s", again.code, again.text())
			}
			b.report(engine, installed, again, costs)

			t.Run("troubles", func(t *testing.T) { b.with(t).troubles(engine) })
			if engine == "helmchart" {
				t.Run("to the other engine and back", func(t *testing.T) { b.with(t).switchEngines() })
			}
			t.Run("uninstall", func(t *testing.T) { b.with(t).uninstall() })
			lab.stop(t)
		})
	}
}

// The Job's own image is the first thing that helm-controller needs from a registry.
func TestJobImageIsMissing(t *testing.T) {
	bin := enginesBin(t)
	// A lab whose registry has everything but it; links need the same file system.
	full, err := filepath.EvalSymlinks(filepath.Join(bin, "lab"))
	must(t, err)
	poor, err := os.MkdirTemp(filepath.Dir(full), "without-job-image-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(poor)) })
	must(t, os.Chmod(poor, 0o755)) // #nosec G302 -- a folder of programs
	must(t, filepath.WalkDir(full, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == full || d.Name() == "helm-job-standin" {
			return err
		}
		rel, err := filepath.Rel(full, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.Mkdir(filepath.Join(poor, rel), 0o755) // #nosec G301 -- a folder of programs
		}
		return os.Link(path, filepath.Join(poor, rel))
	}))
	lab := startLab(t, bin, "--helm-controller", "--programs", poor)
	b := box{t: t, bin: bin, lab: lab, file: boxFile(t, lab.Hub)}
	r := b.install(nil, "--without", "envoy-gateway,route", "--engine", "helmchart")
	t.Log(r.text())
	b.mustSay(r, 5, "component/weights/release", "docker.io/rancher/klipper-helm:latest", "ImagePull", "failed to resolve reference")
	// The way out that the message names: a Helm that needs no image.
	if r = b.install(nil, "--without", "envoy-gateway,route", "--engine", "helm"); r.code != 0 {
		t.Errorf("with --engine helm it ended with %d\n%s", r.code, r.text())
	}
	lab.stop(t)
}

func enginesBin(t *testing.T) string {
	t.Helper()
	onlyWhereAsked(t, false)
	bin := binDir(t)
	for _, name := range []string{"envoy-gateway", "proxy-standin", "helm-controller", "helm4", "helm-job-standin"} {
		if _, err := os.Stat(filepath.Join(bin, "lab", name)); err != nil {
			t.Skipf("%v: run `make lab-node-full` first", err)
		}
	}
	return bin
}

// box is one box on one lab, as whoever installs it sees it.
type box struct {
	t    *testing.T
	bin  string
	lab  *lab
	file string
}

func (b box) with(t *testing.T) box {
	b.t = t
	return b
}

// result is what one run of llmbox left.
type result struct {
	code   int
	events []event.Event
	stderr string
	took   time.Duration
	usage  syscall.Rusage
}

// text is what a person could read of it: failures, and how it ended.
func (r result) text() string {
	var lines []string
	for _, e := range r.events {
		switch e.Type {
		case event.StepFailed:
			lines = append(lines, "step.failed "+e.Step+": "+e.Error, "  fix: "+e.Fix)
		case event.RunDone:
			lines = append(lines, "run.done "+e.Summary.Outcome+": "+e.Error)
		}
	}
	return strings.Join(append(lines, r.lastWords()), "\n")
}

// steps are the times of those that ended well, by name.
func (r result) steps(suffix string) map[string]int64 {
	took := map[string]int64{}
	for _, e := range r.events {
		name, ok := strings.CutSuffix(strings.TrimPrefix(e.Step, "component/"), suffix)
		if ok && e.Type == event.StepDone {
			took[name] = e.ElapsedMS
		}
	}
	return took
}

// lastWords are what stderr says after all steps: errors, each with a way out.
func (r result) lastWords() string {
	if at := strings.Index(r.stderr, "error: "); at >= 0 {
		return r.stderr[at:]
	}
	lines := strings.Split(strings.TrimSpace(r.stderr), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "\n")
}

// install runs llmbox install inside the node's network. stop may look at each event
// and have the run interrupted.
func (b box) install(stop func(event.Event) bool, args ...string) result {
	return b.run(stop, installWithin, append([]string{"install", "--without", without(true)}, args...)...)
}

func (b box) run(stop func(event.Event) bool, within time.Duration, args ...string) result {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), within)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(b.bin, "llmbox-lab"), slices.Concat(
		[]string{"exec", "--dir", b.lab.Dir, "--", filepath.Join(b.bin, "llmbox")}, args,
		[]string{"--kubeconfig", b.lab.Kubeconfig, "--config", b.file, "--yes", "--output", "json"})...)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "LLMBOX_") })
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	must(b.t, err)
	began := time.Now()
	must(b.t, cmd.Start())
	var r result
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		var e event.Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			b.t.Errorf("llmbox printed %q: %v", lines.Text(), err)
			continue
		}
		r.events = append(r.events, e)
		if stop != nil && stop(e) {
			stop = nil
			must(b.t, cmd.Process.Signal(os.Interrupt))
		}
	}
	err = cmd.Wait()
	var ended *exec.ExitError
	if err != nil && !errors.As(err, &ended) {
		b.t.Fatal(err)
	}
	r.code, r.stderr, r.took = cmd.ProcessState.ExitCode(), stderr.String(), time.Since(began)
	if usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		r.usage = *usage
	}
	return r
}

// mustSay looks for the cause by name in what a run said of a step, and in how it ended.
func (b box) mustSay(r result, code int, step string, causes ...string) {
	b.t.Helper()
	said := ""
	for _, e := range r.events {
		if e.Type == event.StepFailed && e.Step == step {
			said = e.Error
		}
	}
	last := r.lastWords()
	if step == "" {
		said = last
	}
	if r.code != code {
		b.t.Errorf("it ended with %d, want %d", r.code, code)
	}
	for _, cause := range causes {
		if !strings.Contains(said, cause) {
			b.t.Errorf("the failure does not name %q: %s", cause, said)
		}
		if !strings.Contains(last, cause) {
			b.t.Errorf("the last words do not name %q: %s", cause, last)
		}
	}
}

// troubles goes through what can go wrong with one component beside a box that serves,
// and ends with it going well.
func (b box) troubles(engine string) {
	chart, err := filepath.Abs(filepath.Join("testdata", "trouble"))
	must(b.t, err)
	// kyverno stands for any component: it needs the base alone and is ready when its
	// workloads are.
	install := func(t *testing.T, stop func(event.Event) bool, trouble string) result {
		raw, err := os.ReadFile(b.file)
		must(t, err)
		here := b.with(t)
		here.file = filepath.Join(t.TempDir(), "box.yaml")
		// The file ends within its components.
		must(t, os.WriteFile(here.file, fmt.Appendf(raw, "  kyverno: {mode: install, chart: %q, values: {trouble: %q}}\n", chart, trouble), 0o600))
		r := here.run(stop, installWithin, "install", "--without", "policies,keda,autoscale,prometheus,vault,external-secrets")
		t.Logf("%s, %s, after %s, exit %d:\n%s", engine, trouble, r.took.Round(100*time.Millisecond), r.code, r.text())
		return r
	}
	const step = "component/kyverno/release"
	for _, tt := range []struct {
		trouble, step string
		code          int
		causes        []string
	}{
		{"render", "", 2, []string{"trouble/templates/render.yaml", "no colour was chosen"}},
		{"render-in-cluster", step, 1, []string{"trouble/templates/render.yaml", "this cluster has a colour already"}},
		{"hook", step, 1, []string{"licence-check", "the licence server licences.example does not answer", "exited with code 3"}},
		{"webhook", step, 1, []string{"team-rules.example.com", refuse}},
	} {
		b.t.Run(tt.trouble, func(t *testing.T) {
			if tt.trouble == "webhook" {
				defer b.with(t).refuseDeployments()()
			}
			b.with(t).mustSay(install(t, nil, tt.trouble), tt.code, tt.step, tt.causes...)
		})
	}
	b.t.Run("image", func(t *testing.T) {
		// The run would wait for the rest of the component's time: the reason stands on
		// the screen meanwhile.
		said := ""
		r := install(t, func(e event.Event) bool {
			if e.Type == event.StepProgress && e.Step == "component/kyverno/ready" {
				said = e.Message
			}
			return strings.Contains(said, "ImagePullBackOff")
		}, "image")
		t.Logf("while it waits: %s", said)
		if r.code != 130 || !strings.Contains(said, "docker.io/nobody/nothing:1") {
			t.Errorf("it ended with %d and had said %q", r.code, said)
		}
		// Whoever asks later is told the same.
		status, err := attempt(t.Context(), time.Minute, filepath.Join(b.bin, "llmbox-lab"), "exec", "--dir", b.lab.Dir, "--",
			filepath.Join(b.bin, "llmbox"), "status", "--kubeconfig", b.lab.Kubeconfig)
		t.Logf("llmbox status: %v\n%s", err, status)
		if !bytes.Contains(status, []byte("docker.io/nobody/nothing:1")) {
			t.Error("the status does not name the image")
		}
	})
	b.t.Run("none", func(t *testing.T) {
		if r := install(t, nil, ""); r.code != 0 {
			t.Errorf("with the right values it ended with %d", r.code)
		}
	})
}

// switchEngines has the other engine take everything over, without a restart of anything.
func (b box) switchEngines() {
	client := b.lab.client(b.t)
	pod := modelPod(b.t, client)
	for _, engine := range []string{"helm", "helmchart"} {
		r := b.install(nil, "--engine", engine)
		if r.code != 0 {
			b.t.Fatalf("to %s: it ended with %d\n%s", engine, r.code, r.text())
		}
		b.t.Logf("to %s: %s", engine, r.took.Round(100*time.Millisecond))
		if charts := b.helmCharts(); slices.Contains(charts, "model") != (engine == "helmchart") {
			b.t.Errorf("to %s: the HelmCharts are %v", engine, charts)
		}
		if now := modelPod(b.t, client); now.UID != pod.UID {
			b.t.Errorf("to %s: pod %s took the place of %s", engine, now.Name, pod.Name)
		}
	}
}

func (b box) uninstall() {
	waiting := map[string]bool{}
	r := b.run(func(e event.Event) bool {
		if e.Type == event.StepProgress && e.Step == "uninstall/namespaces" && !waiting[e.Message] {
			waiting[e.Message] = true
			b.t.Logf("%s %s", e.Time.Format(time.TimeOnly), e.Message)
		}
		return false
	}, uninstallWithin, "uninstall")
	b.t.Logf("uninstall after %s, exit %d: %v ms", r.took.Round(100*time.Millisecond), r.code, r.steps(""))
	if r.code != 0 {
		b.t.Errorf("it ended with %d\n%s", r.code, r.text())
	}
	if charts := b.helmCharts(); len(charts) > 0 {
		b.t.Errorf("HelmCharts are still there: %v", charts)
	}
	client := b.lab.client(b.t)
	left, err := client.core.Namespaces().List(b.t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/managed-by=llmbox"})
	must(b.t, err)
	for _, ns := range left.Items {
		b.t.Errorf("namespace %s is still there (%s)", ns.Name, ns.Status.Phase)
	}
	pods, err := client.core.Pods("kube-system").List(b.t.Context(), metav1.ListOptions{LabelSelector: chartLabel})
	must(b.t, err)
	for _, p := range pods.Items {
		b.t.Errorf("pod %s is still there (%s)", p.Name, p.Status.Phase)
	}
	secrets, err := client.core.Secrets("").List(b.t.Context(), metav1.ListOptions{LabelSelector: "owner=helm"})
	must(b.t, err)
	for _, s := range secrets.Items {
		b.t.Errorf("release record %s/%s is still there", s.Namespace, s.Name)
	}
}

// chartLabel is what helm-controller puts on Jobs and pods.
const chartLabel = "helmcharts.helm.cattle.io/chart"

func (b box) dynamic() *dynamic.DynamicClient {
	config, err := clientcmd.BuildConfigFromFlags("", b.lab.Kubeconfig)
	must(b.t, err)
	client, err := dynamic.NewForConfig(config)
	must(b.t, err)
	return client
}

func (b box) helmCharts() []string {
	list, err := b.dynamic().Resource(schema.GroupVersionResource{Group: "helm.cattle.io", Version: "v1", Resource: "helmcharts"}).
		List(b.t.Context(), metav1.ListOptions{})
	must(b.t, err)
	var names []string
	for _, c := range list.Items {
		names = append(names, c.GetName())
	}
	return names
}

// costs are what helm-controller and the Helm of its Jobs took while it was looked.
type costs struct {
	controllerKiB int
	helmKiB       []int
}

// lookAtProcesses watches the lab's processes until the returned function is called.
func lookAtProcesses(t *testing.T, namespaces []string) func() costs {
	ctx, cancel := context.WithCancel(t.Context())
	peaks := map[string]int{} // by name and process
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			procs, _ := filepath.Glob("/proc/[0-9]*")
			for _, dir := range procs {
				comm, err := os.ReadFile(dir + "/comm")
				name := strings.TrimSpace(string(comm))
				if err != nil || name != "helm" && name != "helm-controller" {
					continue
				}
				if ns, err := os.Readlink(dir + "/ns/net"); name == "helm-controller" && (err != nil || !slices.Contains(namespaces, ns)) {
					continue
				}
				if kib := peakKiB(dir); kib > peaks[name+" "+dir] {
					peaks[name+" "+dir] = kib
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
	return func() costs {
		cancel()
		done.Wait()
		var c costs
		for name, kib := range peaks {
			if strings.HasPrefix(name, "helm-controller ") {
				c.controllerKiB = max(c.controllerKiB, kib)
			} else {
				c.helmKiB = append(c.helmKiB, kib)
			}
		}
		return c
	}
}

// peakKiB is the most memory that a process had at a time.
func peakKiB(dir string) int {
	raw, err := os.ReadFile(dir + "/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			if fields := strings.Fields(rest); len(fields) > 0 {
				kib, _ := strconv.Atoi(fields[0])
				return kib
			}
		}
	}
	return 0
}

// report prints a column of the table in docs/decisions/0009-default-engine-on-k3s.md.
func (b box) report(engine string, first, again result, c costs) {
	pods, err := b.lab.client(b.t).core.Pods("kube-system").List(b.t.Context(), metav1.ListOptions{LabelSelector: chartLabel})
	must(b.t, err)
	cpu := func(u syscall.Rusage) time.Duration {
		return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Round(10 * time.Millisecond)
	}
	b.t.Logf(`engine %s:
  install             %s
  second install      %s
  releases            %v ms
  llmbox              %d MiB at most, %s of CPU
  Jobs' pods          %d
  helm in Jobs        %d processes, %d MiB at most
  helm-controller     %d MiB at most`, engine,
		first.took.Round(100*time.Millisecond), again.took.Round(100*time.Millisecond), first.steps("/release"),
		first.usage.Maxrss>>10, cpu(first.usage), len(pods.Items),
		len(c.helmKiB), slices.Max(append(c.helmKiB, 0))>>10, c.controllerKiB>>10)
}

// refuseDeployments puts an admission webhook in the way and returns what takes it away.
func (b box) refuseDeployments() func() {
	t := b.t
	t.Helper()
	const address = "127.0.0.1:9443"
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), filepath.Join(b.bin, "llmbox-lab"), "exec", "--dir", b.lab.Dir, "--", self)
	cmd.Env = append(os.Environ(), webhookRole+"="+address)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	stop := func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	var ca string
	if err := json.NewDecoder(out).Decode(&ca); err != nil {
		stop()
		t.Fatalf("starting the webhook: %v", err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", b.lab.Kubeconfig)
	must(t, err)
	client, err := admissionclient.NewForConfig(config)
	must(t, err)
	url, fail, none := "https://"+address+"/", admissionregistrationv1.Fail, admissionregistrationv1.SideEffectClassNone
	_, err = client.ValidatingWebhookConfigurations().Create(t.Context(), &admissionregistrationv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "team-rules"},
		Webhooks: []admissionregistrationv1.ValidatingWebhook{{
			Name: "team-rules.example.com", FailurePolicy: &fail, SideEffects: &none, AdmissionReviewVersions: []string{"v1"},
			ClientConfig:   admissionregistrationv1.WebhookClientConfig{URL: &url, CABundle: []byte(ca)},
			ObjectSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"trouble": "webhook"}},
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.OperationAll},
				Rule:       admissionregistrationv1.Rule{APIGroups: []string{"apps"}, APIVersions: []string{"v1"}, Resources: []string{"deployments"}},
			}},
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		stop()
		t.Fatal(err)
	}
	// The API server learns of it a moment later.
	time.Sleep(2 * time.Second)
	return func() {
		stop()
		if err := client.ValidatingWebhookConfigurations().Delete(context.WithoutCancel(t.Context()), "team-rules", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}
}

// serveWebhook refuses everything. Its first line is the certificate to trust.
func serveWebhook(address string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return err
	}
	l, err := tls.Listen("tcp4", address, &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	})
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))); err != nil {
		return err
	}
	server := &http.Server{ReadHeaderTimeout: 10 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		if err := json.NewDecoder(io.LimitReader(r.Body, 4<<20)).Decode(&review); err != nil || review.Request == nil {
			http.Error(w, "not a review", http.StatusBadRequest)
			return
		}
		review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Result: &metav1.Status{Message: refuse}}
		review.Request = nil
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(review)
	})}
	return server.Serve(l)
}
