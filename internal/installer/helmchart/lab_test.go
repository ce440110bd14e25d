package helmchart

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
)

const testNamespace = "sample"

// labProgram finds what `make lab` builds; the variable is for trees whose bin
// lies elsewhere.
func labProgram(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("LLMBOX_LAB_PROGRAMS")
	if dir == "" {
		dir = filepath.Join("..", "..", "..", "bin", "lab")
	}
	path := filepath.Join(dir, name)
	if name == "llmbox-lab" {
		path = filepath.Join("..", "..", "..", "bin", name)
		if named := os.Getenv("LLMBOX_LAB"); named != "" {
			path = named
		}
	}
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run `make lab` first", err)
	}
	return path
}

// startLab starts a control plane of its own and returns its kubeconfig.
func startLab(t *testing.T, more ...string) string {
	t.Helper()
	program := labProgram(t, "llmbox-lab")
	programs := filepath.Dir(labProgram(t, "kube-apiserver"))
	parent, err := os.MkdirTemp("", "hc") // short: a socket lies in it
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{"start", "--dir", filepath.Join(parent, "lab"), "--programs", programs, "--lifeline", "--timeout", "8m"}, more...)
	cmd := exec.Command(program, args...) // #nosec G204 -- the lab's own program
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Logf("the lab ended with %v\n%s", err, stderr.String())
		}
		_ = os.RemoveAll(parent)
	})
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	if err != nil {
		t.Fatalf("the lab does not start: %v\n%s", err, stderr.String())
	}
	var started struct {
		Kubeconfig string `json:"kubeconfig"`
	}
	if err := json.Unmarshal(line, &started); err != nil {
		t.Fatalf("the lab says %q: %v", line, err)
	}
	return started.Kubeconfig
}

func connect(t *testing.T, kubeconfig string, standIn func() *helmControllerStandIn) *cluster.Client {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	cfg.QPS = -1
	if standIn != nil {
		cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return kubeletLogsStandIn{next: next, standIn: standIn}
		})
	}
	client, err := cluster.New(t.Context(), cfg, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// testBounds are wide where a slow machine needs it and narrow where the test
// waits for the bound itself.
func testBounds() Bounds {
	return Bounds{Claim: time.Minute, Stuck: time.Minute, Job: 4 * time.Minute, Gone: time.Minute, Sync: time.Minute}
}

type fixture struct {
	client  *cluster.Client
	engine  *Engine
	standIn *helmControllerStandIn
	log     *slog.Logger
	// jobsMade counts the Jobs of a name that there have been.
	jobsMade func(name string) int
}

func (f *fixture) with(change func(*Bounds)) *Engine {
	b := testBounds()
	change(&b)
	return New(f.client, Options{Bounds: b}, f.log)
}

func (f *fixture) colour(t *testing.T, name string) string {
	t.Helper()
	cm, err := f.client.Kube.CoreV1().ConfigMaps(testNamespace).Get(t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	return cm.Data["colour"]
}

func (f *fixture) apply(t *testing.T, r chart.Release, change chart.Change, revision int) chart.Outcome {
	t.Helper()
	out, err := f.engine.Apply(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if out.Change != change || out.Revision != revision {
		t.Fatalf("outcome = %+v, want %s, revision %d", out, change, revision)
	}
	digest, err := r.Digest()
	if err != nil {
		t.Fatal(err)
	}
	record, err := f.engine.Current(t.Context(), r.Namespace, r.Name)
	if err != nil {
		t.Fatal(err)
	}
	if record.Status != "deployed" || record.Digest != digest || record.Revision != revision || record.Version != "1.0" {
		t.Fatalf("record = %+v", record)
	}
	return out
}

func (f *fixture) uninstall(t *testing.T, name string) {
	t.Helper()
	if err := f.engine.Uninstall(t.Context(), testNamespace, name); err != nil {
		t.Fatal(err)
	}
	if _, err := f.engine.Current(t.Context(), testNamespace, name); !errors.Is(err, chart.ErrNoRelease) {
		t.Fatalf("record after the uninstall: %v", err)
	}
	if live, err := f.engine.read(t.Context(), name); err != nil || live != nil {
		t.Fatalf("HelmChart after the uninstall: %v, %v", live, err)
	}
	if got := f.colour(t, name); got != "" {
		t.Fatalf("the release's ConfigMap is still there: %s", got)
	}
}

// TestEngineOnRealAPIServer runs the engine against a real API server, with its
// garbage collector and Helm's own records; the controller is a stand-in.
func TestEngineOnRealAPIServer(t *testing.T) {
	helm := labProgram(t, "helm")
	kubeconfig := startLab(t)
	f := &fixture{log: slog.New(slog.NewTextHandler(testWriter{t}, nil))}
	f.client = connect(t, kubeconfig, func() *helmControllerStandIn { return f.standIn })
	f.engine = New(f.client, Options{Bounds: testBounds()}, f.log)
	_, err := f.client.Kube.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: testNamespace}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}

	t.Run("no HelmChart kind", func(t *testing.T) { testNoKind(t, f) })
	if t.Failed() {
		return
	}
	applyHelmCRDs(t, f.client)
	t.Run("nobody answers", func(t *testing.T) { testNobodyAnswers(t, f) })
	f.standIn = startStandIn(t, connect(t, kubeconfig, nil), helm, kubeconfig)
	f.jobsMade = f.standIn.jobsMade
	for _, tt := range []struct {
		name string
		run  func(*testing.T, *fixture)
	}{
		{"install, upgrade, uninstall", testLifecycle},
		{"failed install, then right values", testFailedInstall},
		{"failure before any record", testRefused},
		{"killed in the middle", testKilled},
		{"image can't be pulled", testPullFails},
		{"no node takes the pod", testUnschedulable},
		{"switch to the other engine and back", testSwitch},
		{"a HelmChart of somebody else", testForeign},
		{"run cut off before its end", testCutOff},
		{"uninstall without controller", testUninstallUnanswered},
	} {
		t.Run(tt.name, func(t *testing.T) { tt.run(t, f) })
	}
}

func testNoKind(t *testing.T, f *fixture) {
	var none *NoControllerError
	_, err := f.engine.Apply(t.Context(), sample(t, "none", nil))
	if !errors.As(err, &none) || !errors.Is(err, ErrNoController) || !strings.Contains(none.Fix(), "--engine helm") {
		t.Errorf("Apply = %v", err)
	}
	if err := f.engine.Uninstall(t.Context(), testNamespace, "none"); err != nil {
		t.Errorf("Uninstall = %v", err)
	}
	if err := f.engine.Detach(t.Context(), "none"); err != nil {
		t.Errorf("Detach = %v", err)
	}
	if there, err := Detect(t.Context(), f.client); err != nil || there {
		t.Errorf("Detect = %v, %v", there, err)
	}
}

func testNobodyAnswers(t *testing.T, f *fixture) {
	if there, err := Detect(t.Context(), f.client); err != nil || there {
		t.Errorf("Detect without a Lease = %v, %v", there, err)
	}
	now, seconds := metav1.NowMicro(), int32(45)
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "helm-controller-lock"},
		Spec:       coordinationv1.LeaseSpec{RenewTime: &now, LeaseDurationSeconds: &seconds},
	}
	leases := f.client.Kube.CoordinationV1().Leases(Namespace)
	lease, err := leases.Create(t.Context(), lease, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if there, err := Detect(t.Context(), f.client); err != nil || !there {
		t.Errorf("Detect with a fresh Lease = %v, %v", there, err)
	}
	old := metav1.NewMicroTime(now.Add(-time.Hour))
	lease.Spec.RenewTime = &old
	if _, err := leases.Update(t.Context(), lease, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if there, err := Detect(t.Context(), f.client); err != nil || there {
		t.Errorf("Detect with an old Lease = %v, %v", there, err)
	}
	quick := f.with(func(b *Bounds) { b.Claim = 2 * time.Second })
	_, err = quick.Apply(t.Context(), sample(t, "unanswered", nil))
	if !errors.Is(err, ErrNoController) || !strings.Contains(err.Error(), "kube-system/unanswered") {
		t.Errorf("Apply = %v", err)
	}
	// Nothing was installed, so nothing needs the controller to be removed.
	if err := quick.Uninstall(t.Context(), testNamespace, "unanswered"); err != nil {
		t.Errorf("Uninstall = %v", err)
	}
	if live, err := quick.read(t.Context(), "unanswered"); err != nil || live != nil {
		t.Errorf("HelmChart is still there: %v, %v", live, err)
	}
}

func testLifecycle(t *testing.T, f *fixture) {
	const name = "life"
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.engine.Apply(gone, sample(t, name, nil)); !errors.Is(err, context.Canceled) {
		t.Fatalf("Apply with a cancelled context = %v", err)
	}
	if live, err := f.engine.read(t.Context(), name); err != nil || live != nil {
		t.Fatalf("a cancelled Apply left %v, %v", live, err)
	}

	first := sample(t, name, map[string]any{"extra": true})
	f.apply(t, first, chart.Installed, 1)
	f.apply(t, first, chart.Unchanged, 1)
	if n := f.jobsMade(installJob(name)); n != 1 {
		t.Errorf("%d Jobs for one release", n)
	}
	// A run that was cut off before the record was labelled ends the same.
	if err := f.engine.records.SetDigest(t.Context(), testNamespace, name, 1, ""); err != nil {
		t.Fatal(err)
	}
	f.apply(t, first, chart.Unchanged, 1)

	second := sample(t, name, map[string]any{"colour": "blue"})
	f.apply(t, second, chart.Upgraded, 2)
	if f.colour(t, name) != "blue" {
		t.Errorf("colour = %s", f.colour(t, name))
	}
	_, err := f.client.Kube.CoreV1().ConfigMaps(testNamespace).Get(t.Context(), name+"-extra", metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("what the upgrade no longer has: %v", err)
	}
	// Somebody edits the HelmChart: what was asked for comes back.
	if err := f.engine.patch(t.Context(), name, map[string]any{"spec": map[string]any{"valuesContent": "colour: green\n"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return f.colour(t, name) == "green" })
	out, err := f.engine.Apply(t.Context(), second)
	if err != nil || out.Change != chart.Upgraded || f.colour(t, name) != "blue" {
		t.Errorf("after an edit: %+v, %v, colour %s", out, err, f.colour(t, name))
	}
	// No values at all are the chart's own, not those of the revision before.
	if out, err = f.engine.Apply(t.Context(), sample(t, name, nil)); err != nil || f.colour(t, name) != "red" {
		t.Errorf("without values: %+v, %v, colour %s", out, err, f.colour(t, name))
	}
	f.uninstall(t, name)
	f.uninstall(t, name)
}

func testFailedInstall(t *testing.T, f *fixture) {
	const name = "broken"
	_, err := f.engine.Apply(t.Context(), sample(t, name, map[string]any{"broken": true, "extra": true}))
	var failed *JobError
	if !errors.As(err, &failed) || !errors.Is(err, ErrJob) {
		t.Fatalf("Apply = %v", err)
	}
	if !strings.HasPrefix(failed.Cause, "Error: INSTALLATION FAILED: ") || !strings.Contains(failed.Cause, "Not_A_Name") ||
		!strings.HasPrefix(failed.Pod, installJob(name)+"-") || len(failed.Tail) == 0 ||
		!strings.Contains(err.Error(), failed.Cause) || !strings.Contains(failed.Fix(), "kubectl -n kube-system logs job/helm-install-broken") {
		t.Errorf("error = %v\n%+v", err, failed)
	}
	if record, err := f.engine.Current(t.Context(), testNamespace, name); err != nil || record.Status != "failed" || record.Digest != "" {
		t.Errorf("record = %+v, %v", record, err)
	}
	// The same once more fails with the same cause, not with what an abort policy says.
	_, err = f.engine.Apply(t.Context(), sample(t, name, map[string]any{"broken": true, "extra": true}))
	if !errors.As(err, &failed) || !strings.Contains(failed.Cause, "Not_A_Name") {
		t.Errorf("the second time: %v", err)
	}
	out, err := f.engine.Apply(t.Context(), sample(t, name, nil))
	if err != nil || out.Repaired != "record was failed" {
		t.Fatalf("with right values: %+v, %v", out, err)
	}
	_, err = f.client.Kube.CoreV1().ConfigMaps(testNamespace).Get(t.Context(), name+"-extra", metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("what only the failed install had: %v", err)
	}
	f.uninstall(t, name)
}

func testRefused(t *testing.T, f *fixture) {
	const name = "refused"
	bad := sample(t, name, map[string]any{"refuse": true})
	for i := range 2 {
		_, err := f.engine.Apply(t.Context(), bad)
		var failed *JobError
		if !errors.As(err, &failed) || failed.Reason != "BackoffLimitExceeded" || !strings.Contains(failed.Cause, "no such colour") {
			t.Fatalf("Apply %d = %v", i, err)
		}
	}
	if n := f.jobsMade(installJob(name)); n != 2 {
		t.Errorf("%d Jobs for two tries", n)
	}
	f.apply(t, sample(t, name, nil), chart.Installed, 1)
	f.uninstall(t, name)
}

func testKilled(t *testing.T, f *fixture) {
	const name = "killed"
	f.standIn.set(podDies)
	quick := f.with(func(b *Bounds) { b.Job = 15 * time.Second })
	_, err := quick.Apply(t.Context(), sample(t, name, map[string]any{"extra": true}))
	if !errors.Is(err, ErrStuck) {
		t.Fatalf("Apply while nodes die = %v", err)
	}
	f.standIn.pause()
	f.standIn.set(podRuns)
	eventually(t, func() bool {
		record, err := f.engine.Current(t.Context(), testNamespace, name)
		return err == nil && record.Status == "pending-install"
	})
	f.standIn.resume()
	out, err := f.engine.Apply(t.Context(), sample(t, name, map[string]any{"colour": "grey"}))
	if err != nil || !strings.HasPrefix(out.Repaired, "record was ") {
		t.Fatalf("Apply = %+v, %v", out, err)
	}
	if f.colour(t, name) != "grey" {
		t.Errorf("colour = %s", f.colour(t, name))
	}
	_, err = f.client.Kube.CoreV1().ConfigMaps(testNamespace).Get(t.Context(), name+"-extra", metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("what only the killed install had: %v", err)
	}
	f.uninstall(t, name)
}

func testPullFails(t *testing.T, f *fixture) {
	const name = "pull"
	f.standIn.set(podPullFails)
	quick := f.with(func(b *Bounds) { b.Stuck = 5 * time.Second })
	_, err := quick.Apply(t.Context(), sample(t, name, nil))
	var stuck *StuckError
	if !errors.As(err, &stuck) || !errors.Is(err, ErrStuck) {
		t.Fatalf("Apply = %v", err)
	}
	if !strings.Contains(err.Error(), "ImagePullBackOff") || !strings.Contains(err.Error(), "no such host") ||
		!strings.HasPrefix(stuck.Pod, installJob(name)) || !strings.Contains(stuck.Fix(), stuck.Pod) {
		t.Errorf("error = %v; fix %s", err, stuck.Fix())
	}
	f.standIn.set(podRuns)
	f.apply(t, sample(t, name, nil), chart.Installed, 1)
	f.uninstall(t, name)
}

func testUnschedulable(t *testing.T, f *fixture) {
	f.standIn.set(podUnschedulable)
	defer f.standIn.set(podRuns)
	quick := f.with(func(b *Bounds) { b.Stuck = 5 * time.Second })
	_, err := quick.Apply(t.Context(), sample(t, "homeless", nil))
	if !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), "Unschedulable: 0/1 nodes are available") {
		t.Errorf("Apply = %v", err)
	}
}

func testSwitch(t *testing.T, f *fixture) {
	const name = "switch"
	r := sample(t, name, map[string]any{"colour": "white"})
	f.apply(t, r, chart.Installed, 1)
	for range 2 {
		if err := f.engine.Detach(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if live, err := f.engine.read(t.Context(), name); err != nil || live != nil {
		t.Fatalf("HelmChart after Detach: %v, %v", live, err)
	}
	if f.colour(t, name) != "white" {
		t.Fatal("Detach uninstalled the release")
	}
	_, err := f.client.Kube.BatchV1().Jobs(Namespace).Get(t.Context(), installJob(name), metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("Job after Detach: %v", err)
	}
	_, err = f.client.Kube.RbacV1().ClusterRoleBindings().Get(t.Context(), "helm-kube-system-"+name, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("ClusterRoleBinding after Detach: %v", err)
	}
	eventually(t, func() bool {
		_, err := f.client.Kube.CoreV1().ConfigMaps(Namespace).Get(t.Context(), "chart-content-"+name, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	other, err := chart.NewHelm(chart.Cluster{REST: f.client.REST, Discovery: f.client.Discovery, Mapper: f.client.Mapper, Kube: f.client.Kube}, f.client.Version, f.log)
	if err != nil {
		t.Fatal(err)
	}
	out, err := other.Apply(t.Context(), r)
	if err != nil || out.Change != chart.Unchanged || out.Revision != 1 {
		t.Fatalf("the other engine: %+v, %v", out, err)
	}
	r.Values = map[string]any{"colour": "black"}
	if out, err = other.Apply(t.Context(), r); err != nil || out.Revision != 2 {
		t.Fatalf("the other engine: %+v, %v", out, err)
	}
	f.apply(t, r, chart.Upgraded, 3)
	f.uninstall(t, name)
}

func testForeign(t *testing.T, f *fixture) {
	theirs := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "helm.cattle.io/v1", "kind": "HelmChart",
		"metadata": map[string]any{"name": "theirs", "namespace": Namespace},
		"spec":     map[string]any{}, // without a chart, which helm-controller passes over
	}}
	if _, err := f.client.Dynamic.Resource(resource()).Namespace(Namespace).Create(t.Context(), theirs, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.engine.Apply(t.Context(), sample(t, "theirs", nil)); !errors.Is(err, ErrForeign) {
		t.Errorf("Apply = %v", err)
	}
	if err := f.engine.Detach(t.Context(), "theirs"); !errors.Is(err, ErrForeign) {
		t.Errorf("Detach = %v", err)
	}
	if err := f.engine.Uninstall(t.Context(), testNamespace, "theirs"); err != nil {
		t.Errorf("Uninstall = %v", err)
	}
	if live, err := f.engine.read(t.Context(), "theirs"); err != nil || live == nil || live.DeletionTimestamp != nil {
		t.Errorf("their HelmChart = %v, %v", live, err)
	}
}

// testCutOff stops right after each kind of write and runs again.
func testCutOff(t *testing.T, f *fixture) {
	const name = "cutoff"
	r := sample(t, name, map[string]any{"colour": "pink"})
	digest, err := r.Digest()
	if err != nil {
		t.Fatal(err)
	}
	wanted, err := f.engine.object(r, digest)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.engine.write(t.Context(), wanted); err != nil {
		t.Fatal(err)
	}
	if err := f.engine.hold(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	f.apply(t, r, chart.Installed, 1) // written and held, nothing installed
	if err := f.engine.hold(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	if _, err := f.engine.Apply(t.Context(), r); err != nil { // detaching had begun
		t.Fatal(err)
	}
	if live, err := f.engine.read(t.Context(), name); err != nil || live == nil || held(live) {
		t.Fatalf("HelmChart = %+v, %v", live, err)
	}
	if err := f.engine.hold(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	f.uninstall(t, name)
}

func testUninstallUnanswered(t *testing.T, f *fixture) {
	const name = "deaf"
	f.apply(t, sample(t, name, nil), chart.Installed, 1)
	f.standIn.pause()
	quick := f.with(func(b *Bounds) { b.Claim = 2 * time.Second })
	err := quick.Uninstall(t.Context(), testNamespace, name)
	if !errors.Is(err, ErrNoController) || !strings.Contains(err.Error(), name) {
		t.Errorf("Uninstall = %v", err)
	}
	// The way out: leave the release to the other engine.
	if err := quick.Detach(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	if f.colour(t, name) != "red" {
		t.Error("the release is gone")
	}
	var left *LeftoverError
	if err := quick.Uninstall(t.Context(), testNamespace, name); !errors.As(err, &left) || !errors.Is(err, ErrLeftover) {
		t.Errorf("Uninstall of what is detached = %v", err)
	}
	f.standIn.resume()
}

func applyHelmCRDs(t *testing.T, client *cluster.Client) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "..", "..", "test", "lab", "crds", "helm-controller", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no CRDs of helm-controller: %v", err)
	}
	var crds []*unstructured.Unstructured
	for _, file := range files {
		raw, err := os.ReadFile(file) // #nosec G304 -- found above
		if err != nil {
			t.Fatal(err)
		}
		more, err := chart.Decode(bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		crds = slices.Concat(crds, more)
	}
	if _, err := client.ApplyCRDs(t.Context(), crds, func(int, int) {}); err != nil {
		t.Fatal(err)
	}
}

// eventually waits for what comes without a sign to wait for.
func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(90 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatal("did not come about in 90 seconds")
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}
