package helmchart

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/chart"
)

func sample(t *testing.T, name string, values map[string]any) chart.Release {
	t.Helper()
	c, err := chart.LoadPath(filepath.Join("testdata", "chart"))
	if err != nil {
		t.Fatal(err)
	}
	return chart.Release{Name: name, Namespace: testNamespace, Chart: c, Values: values}
}

func TestCauseOf(t *testing.T) {
	for _, tt := range []struct {
		file, cause string
		named       bool
	}{
		{"install-failed.log", `Error: INSTALLATION FAILED: 2 errors occurred: * Service "vllm" is invalid: spec.ports[0].port: Invalid value: 0 * admission webhook "validate.kyverno.svc-fail" denied the request`, true},
		{"abort.log", `Release status is 'failed' and failure policy is 'abort'; waiting for operator intervention`, false},
		{"two-errors.log", `Error: UPGRADE FAILED: another operation (install/upgrade/rollback) is in progress`, true},
		{"disk.log", `base64: write error: No space left on device`, true},
		{"slog.log", `level=ERROR msg="Kubernetes cluster unreachable" error="dial tcp 10.43.0.1:443: i/o timeout"`, true},
	} {
		t.Run(tt.file, func(t *testing.T) {
			raw, err := os.ReadFile(filepath.Join("testdata", "logs", tt.file))
			if err != nil {
				t.Fatal(err)
			}
			if cause, named := causeOf(clean(string(raw))); cause != tt.cause || named != tt.named {
				t.Errorf("cause = %q, %v\nwant    %q, %v", cause, named, tt.cause, tt.named)
			}
		})
	}
}

func TestLogbookKeepsTheNamedCause(t *testing.T) {
	var l logbook
	l.add("pod-1", "Error: INSTALLATION FAILED: no", "Installing helm chart")
	l.add("pod-2", "Release status is 'failed'; waiting for operator intervention", "")
	if l.pod != "pod-1" || l.cause != "Error: INSTALLATION FAILED: no" || l.message != "Installing helm chart" {
		t.Errorf("logbook = %+v", l)
	}
	l.add("pod-3", "Error: UPGRADE FAILED: neither", "")
	if l.pod != "pod-3" || l.cause != "Error: UPGRADE FAILED: neither" {
		t.Errorf("logbook = %+v", l)
	}
}

func TestObject(t *testing.T) {
	values := map[string]any{"on": "yes", "zero": "012", "big": int64(3000000000), "list": []any{"a", true}}
	r := sample(t, "thing", values)
	digest, err := r.Digest()
	if err != nil {
		t.Fatal(err)
	}
	e := &Engine{options: Options{JobImage: "example.invalid/klipper-helm:1"}}
	c, err := e.object(r, digest)
	if err != nil {
		t.Fatal(err)
	}
	var back map[string]any
	if err := yaml.Unmarshal([]byte(c.Spec.ValuesContent), &back); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"on": "yes", "zero": "012", "big": float64(3000000000), "list": []any{"a", true}}
	if !reflect.DeepEqual(back, want) {
		t.Errorf("values came back as %#v", back)
	}
	if c.Namespace != "kube-system" || c.Name != "thing" || c.Spec.TargetNamespace != testNamespace || c.Spec.CreateNamespace ||
		c.Spec.FailurePolicy != "abort" || *c.Spec.BackOffLimit > 5 || c.Spec.JobImage != "example.invalid/klipper-helm:1" ||
		c.Spec.Timeout.Duration != helmTimeout || c.Labels[chart.DigestLabel] != digest || c.Spec.Version != "0.1.0+"+digest[:12] {
		t.Errorf("HelmChart = %+v", c)
	}
	archive, err := base64.StdEncoding.DecodeString(c.Spec.ChartContent)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "thing.tgz")
	if err := os.WriteFile(file, archive, 0o600); err != nil {
		t.Fatal(err)
	}
	loaded, err := chart.LoadPath(file)
	if err != nil {
		t.Fatal(err)
	}
	r.Chart = loaded
	if again, err := r.Digest(); err != nil || again != digest {
		t.Errorf("the archive has digest %s (%v), the directory %s", again, err, digest)
	}
	twice, err := loaded.Archive()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(archive, twice) {
		t.Error("packing what was unpacked gives other bytes")
	}
}

func TestObjectTooLarge(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("testdata", "chart"))); err != nil {
		t.Fatal(err)
	}
	noise := make([]byte, maxContent)
	for i, x := 0, uint64(88172645463325252); i < len(noise); i++ {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		noise[i] = byte(x)
	}
	if err := os.WriteFile(filepath.Join(dir, "noise.bin"), noise, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := chart.LoadPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	var large *TooLargeError
	_, err = new(Engine).object(chart.Release{Name: "thing", Namespace: "x", Chart: c}, strings.Repeat("a", 40))
	if !errors.As(err, &large) || !errors.Is(err, ErrTooLarge) || large.Fix() == "" {
		t.Errorf("err = %v", err)
	}
}

// jobWith makes a Job of a version and hash with conditions.
func jobWith(version, hash string, conditions ...batchv1.JobConditionType) *batchv1.Job {
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: installJob("x"), UID: "job"}}
	j.Spec.Template.Spec.Containers = []corev1.Container{{Name: "helm", Env: []corev1.EnvVar{{Name: "VERSION", Value: version}, {Name: "CONFIG_HASH", Value: hash}}}}
	for _, c := range conditions {
		j.Status.Conditions = append(j.Status.Conditions, batchv1.JobCondition{Type: c, Status: corev1.ConditionTrue, Reason: "BackoffLimitExceeded"})
	}
	return j
}

func podOf(job *batchv1.Job, status corev1.PodStatus) *corev1.Pod {
	yes := true
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "pod-1", OwnerReferences: []metav1.OwnerReference{{UID: job.UID, Controller: &yes}}},
		Status:     status,
	}
}

func recordWith(status string, revision int, hash string) chart.Stored {
	return chart.Stored{Record: chart.Record{Status: status, Revision: revision}, Labels: map[string]string{configHashLabel: hash}}
}

func TestJudge(t *testing.T) {
	container := func(state corev1.ContainerState, last *corev1.ContainerStateTerminated) corev1.PodStatus {
		return corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "helm", State: state, LastTerminationState: corev1.ContainerState{Terminated: last}}}}
	}
	wait := func(reason, message string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}
	}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	bad := &corev1.ContainerStateTerminated{ExitCode: 1}
	taken := &helmChart{ObjectMeta: metav1.ObjectMeta{Name: "x", Annotations: map[string]string{managedByAnnotation: "helm-controller"}}}
	plain := jobWith("v2", "h2")
	for _, tt := range []struct {
		name    string
		o       observation
		not     types.UID
		phase   phase
		blocked bool
		text    string // in missing or reason
	}{
		{name: "not taken", o: observation{chart: &helmChart{}}, phase: unclaimed, text: "has not taken"},
		{name: "deleted meanwhile", o: observation{}, phase: failed, text: "deleted meanwhile"},
		{name: "no job yet", o: observation{chart: taken}, phase: waiting, blocked: true, text: "has not made Job helm-install-x"},
		{name: "job of other contents", o: observation{chart: taken, install: jobWith("v1", "h1", batchv1.JobComplete), record: recordWith("deployed", 1, "h1")}, phase: waiting, blocked: true, text: "has not made"},
		{name: "job that will be replaced", o: observation{chart: taken, install: jobWith("v2", "h2", batchv1.JobComplete), record: recordWith("deployed", 1, "h2")}, not: "job", phase: waiting, blocked: true, text: "has not made"},
		{name: "done", o: observation{chart: taken, install: jobWith("v2", "h2", batchv1.JobComplete), record: recordWith("deployed", 2, "h2")}, phase: done},
		{name: "done under an old helm-controller", o: observation{chart: taken, install: jobWith("v2", "", batchv1.JobComplete), record: recordWith("deployed", 2, "")}, phase: done},
		{name: "job that did nothing", o: observation{chart: taken, install: jobWith("v2", "h2", batchv1.JobComplete), record: recordWith("deployed", 1, "h1")}, phase: waiting, blocked: true, text: "ended without deploying"},
		{name: "deployed, job not ended", o: observation{chart: taken, install: plain, pods: []*corev1.Pod{podOf(plain, container(running, nil))}, record: recordWith("deployed", 2, "h2")}, phase: waiting},
		{name: "job failed", o: observation{chart: taken, install: jobWith("v2", "h2", batchv1.JobFailed), record: recordWith("failed", 2, "h2")}, phase: failed, text: "BackoffLimitExceeded"},
		{name: "release failed, job goes on", o: observation{chart: taken, install: plain, pods: []*corev1.Pod{podOf(plain, container(wait("CrashLoopBackOff", ""), bad))}, record: recordWith("failed", 2, "h2")}, phase: failed},
		{name: "release marked failed by a try that runs", o: observation{chart: taken, install: plain, pods: []*corev1.Pod{podOf(plain, container(running, bad))}, record: recordWith("failed", 1, "h1")}, phase: waiting},
		{name: "release failed before", o: observation{chart: taken, install: plain, record: recordWith("failed", 1, "h1")}, phase: waiting, blocked: true, text: "has no pod"},
		{name: "image", o: observation{chart: taken, install: plain, pods: []*corev1.Pod{podOf(plain, container(wait("ImagePullBackOff", "no such\nhost"), nil))}}, phase: waiting, blocked: true, text: "ImagePullBackOff: no such host"},
		{name: "creating", o: observation{chart: taken, install: plain, pods: []*corev1.Pod{podOf(plain, container(wait("ContainerCreating", ""), nil))}}, phase: waiting, text: "ContainerCreating"},
		{name: "unschedulable", o: observation{chart: taken, install: plain, pods: []*corev1.Pod{podOf(plain, corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/1 nodes"}}})}}, phase: waiting, blocked: true, text: "Unschedulable: 0/1 nodes"},
		{name: "another job's pod", o: observation{chart: taken, install: plain, pods: []*corev1.Pod{podOf(&batchv1.Job{ObjectMeta: metav1.ObjectMeta{UID: "other"}}, container(running, nil))}}, phase: waiting, blocked: true, text: "has no pod"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			j := judge(tt.o, want{version: "v2", not: tt.not})
			if j.phase != tt.phase || j.blocked != tt.blocked || !strings.Contains(j.missing+j.reason+j.cause, tt.text) {
				t.Errorf("verdict = %+v", j)
			}
		})
	}
}

func TestTiming(t *testing.T) {
	start := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	b := Bounds{Claim: 10 * time.Second, Stuck: 20 * time.Second, Job: 60 * time.Second}
	tm := timing{bounds: b, began: start}
	for _, tt := range []struct {
		at        time.Duration
		j         verdict
		left      time.Duration
		becauseOf time.Duration
	}{
		{0, verdict{phase: unclaimed}, 10 * time.Second, b.Claim},
		{4 * time.Second, verdict{phase: waiting, blocked: true}, 20 * time.Second, b.Stuck},
		{14 * time.Second, verdict{phase: waiting, blocked: true}, 10 * time.Second, b.Stuck},
		{15 * time.Second, verdict{phase: waiting}, 45 * time.Second, b.Job},
		{16 * time.Second, verdict{phase: waiting, blocked: true}, 20 * time.Second, b.Stuck},
		{37 * time.Second, verdict{phase: waiting, blocked: true}, -time.Second, b.Stuck},
		{61 * time.Second, verdict{phase: waiting}, -time.Second, b.Job},
	} {
		left, waited := tm.next(tt.j, start.Add(tt.at))
		if left != tt.left || waited != tt.becauseOf {
			t.Errorf("after %s: %s left of %s, want %s of %s", tt.at, left, waited, tt.left, tt.becauseOf)
		}
	}
}

func TestWithoutController(t *testing.T) {
	for raw, want := range map[string]bool{
		`["server"]`:                                                     false,
		`["server","--disable-helm-controller"]`:                         true,
		`["server","--disable-helm-controller","true"]`:                  true,
		`["server","--disable-helm-controller=false"]`:                   false,
		`["server","--disable-helm-controller","false","--disable","x"]`: false,
		`["server","--disable-helm-controller","--disable","traefik"]`:   true,
		`["agent","--disable","disable-helm-controllers"]`:               false,
	} {
		if got, err := withoutController(raw); err != nil || got != want {
			t.Errorf("%s: %v, %v", raw, got, err)
		}
	}
	if _, err := withoutController("{}"); err == nil {
		t.Error("an object passed for a list")
	}
}

func TestVersionMark(t *testing.T) {
	digest := "0123456789abcdef"
	for in, want := range map[string]string{"1.2.3": "1.2.3+0123456789ab", "1.2.3+k1": "1.2.3+k1.0123456789ab"} {
		if got := versionMark(in, digest); got != want {
			t.Errorf("%s became %s", in, got)
		}
	}
}

// A Job whose only words are that it does nothing is not the cause: Helm's record says
// how far the try came that was cut off.
func TestJobErrorOfATryThatWasCutOff(t *testing.T) {
	var packed bytes.Buffer
	zip := gzip.NewWriter(&packed)
	if err := json.NewEncoder(zip).Encode(map[string]any{"info": map[string]any{"status": "failed", "description": "Initial install underway"}}); err != nil {
		t.Fatal(err)
	}
	if err := zip.Close(); err != nil {
		t.Fatal(err)
	}
	kube := fake.NewClientset(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: testNamespace, Name: "sh.helm.release.v1.x.v1",
			Labels: map[string]string{"owner": "helm", "name": "x", "version": "1", "status": "failed"},
		},
		Data: map[string][]byte{"release": []byte(base64.StdEncoding.EncodeToString(packed.Bytes()))},
	})
	e := &Engine{records: chart.NewRecords(kube)}
	v := &view{name: "x", target: testNamespace}
	o := observation{record: recordWith("failed", 1, "")}
	for _, tt := range []struct {
		name, log   string
		idle, named bool
		has         string
	}{
		{"abort", "Release status is 'failed' and failure policy is 'abort'; waiting for operator intervention", true, false, "cut off"},
		{"Helm's own error", "Error: INSTALLATION FAILED: no", false, true, "INSTALLATION FAILED: no"},
		{"no log", "", false, false, "Initial install underway"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var l logbook
			l.add("pod-1", tt.log, "")
			err := e.jobError(t.Context(), v, o, jobWith("1", ""), verdict{phase: failed}, &l)
			var job *JobError
			if !errors.As(err, &job) || job.idle != tt.idle || job.named != tt.named || !strings.Contains(err.Error(), tt.has) {
				t.Errorf("error = %v, %+v", err, job)
			}
		})
	}
}
