// Package lab_test starts real labs with the programs of bin/lab and looks at
// what they leave behind.
package lab_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	appsv1client "k8s.io/client-go/kubernetes/typed/apps/v1"
	batchv1client "k8s.io/client-go/kubernetes/typed/batch/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/llmbox-dev/llmbox/test/lab/labdir"
	"github.com/llmbox-dev/llmbox/test/lab/programs"
	"github.com/llmbox-dev/llmbox/test/lab/rehearsal"
)

// programDir is where the built programs are looked for; the variable is for
// trees whose bin lies elsewhere.
func programDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("LLMBOX_LAB_PROGRAMS")
	if dir == "" {
		dir = filepath.Join("..", "..", "bin", "lab")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := programs.Find(dir, rehearsal.Needed()...); err != nil {
		t.Fatal(err)
	}
	return dir
}

// binaryVariable hands the program under test, built once, from TestMain to the tests.
const binaryVariable = "LLMBOX_LAB_UNDER_TEST"

func labBinary(t *testing.T) string {
	t.Helper()
	return os.Getenv(binaryVariable)
}

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "llmbox-lab-test-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() { _ = os.RemoveAll(dir) }()
		bin := filepath.Join(dir, "llmbox-lab")
		if out, err := exec.Command("go", "build", "-o", bin, "./cmd/llmbox-lab").CombinedOutput(); err != nil { // #nosec G204 -- this module's own command
			fmt.Fprintf(os.Stderr, "building llmbox-lab: %v\n%s", err, out)
			return 1
		}
		if err := os.Setenv(binaryVariable, bin); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

// lab is a supervisor in the foreground.
type lab struct {
	rehearsal.Ready
	cmd    *exec.Cmd
	stdin  io.Closer
	stderr *bytes.Buffer
}

func startLab(t *testing.T, bin, dir string, flags ...string) *lab {
	t.Helper()
	args := append([]string{"start", "--dir", dir, "--programs", programDir(t)}, flags...)
	l := &lab{cmd: exec.Command(bin, args...), stderr: &bytes.Buffer{}}
	l.cmd.Stderr = l.stderr
	var err error
	if l.stdin, err = l.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := l.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = l.cmd.Process.Kill()
		_ = l.cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		t.Fatalf("the lab said nothing: %v\n%s", err, l.stderr)
	}
	if err := json.Unmarshal(line, &l.Ready); err != nil {
		t.Fatalf("reading %q: %v", line, err)
	}
	t.Logf("up after %d ms: %s", l.StartMS, bytes.TrimSpace(line))
	return l
}

// identify notes the lab's processes, so that a reused id can't pass for one.
func identify(t *testing.T, pids map[string]int) []labdir.Process {
	t.Helper()
	var all []labdir.Process
	for name, pid := range pids {
		p, err := labdir.Identify(name, pid)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if len(all) != len(rehearsal.Needed())+1 {
		t.Fatalf("the lab names %d processes, want %d and the supervisor", len(all), len(rehearsal.Needed()))
	}
	return all
}

func requireGone(t *testing.T, all []labdir.Process) {
	t.Helper()
	eventually(t, 10*time.Second, func(context.Context) error {
		for _, p := range all {
			if p.Alive() {
				return fmt.Errorf("%s (process %d) still runs", p.Name, p.PID)
			}
		}
		return nil
	})
}

func requireNoDir(t *testing.T, dir string) {
	t.Helper()
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the lab's directory is still there (%v)", err)
	}
}

func eventually(t *testing.T, patience time.Duration, check func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		err := check(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("not within %s: %v", patience, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func TestLabRunsWorkloads(t *testing.T) {
	bin, root := labBinary(t), t.TempDir()
	dir := filepath.Join(root, "lab")
	l := startLab(t, bin, dir, "--gpu", "l4", "--nodes", "2")
	all := identify(t, l.PIDs)

	config, err := clientcmd.BuildConfigFromFlags("", l.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	core, apps, batch := corev1client.NewForConfigOrDie(config), appsv1client.NewForConfigOrDie(config), batchv1client.NewForConfigOrDie(config)
	ctx := t.Context()

	t.Run("directory is closed to others", func(t *testing.T) {
		err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err != nil {
				return err
			}
			if info.Mode().Perm()&0o077 != 0 {
				t.Errorf("%s has mode %v", path, info.Mode())
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	t.Run("nobody without a certificate is answered", func(t *testing.T) {
		anonymous := *config
		anonymous.CertData, anonymous.KeyData = nil, nil
		_, err := corev1client.NewForConfigOrDie(&anonymous).Namespaces().List(ctx, metav1.ListOptions{})
		if !apierrors.IsUnauthorized(err) {
			t.Errorf("got %v, want unauthorized", err)
		}
	})
	t.Run("nodes are ready and say what simulates them", func(t *testing.T) {
		nodes, err := core.Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(nodes.Items) != 2 {
			t.Fatalf("%d nodes, want 2", len(nodes.Items))
		}
		for _, n := range nodes.Items {
			if got := n.Annotations["llmbox.dev/simulated-by"]; got != "kwok" {
				t.Errorf("%s: simulated by %q", n.Name, got)
			}
			if got := n.Labels["nvidia.com/gpu.product"]; got != "NVIDIA-L4" {
				t.Errorf("%s: product %q", n.Name, got)
			}
			if len(n.Spec.Taints) > 0 {
				t.Errorf("%s: taints %v", n.Name, n.Spec.Taints)
			}
		}
	})
	t.Run("deployment with a claim", func(t *testing.T) {
		claim := &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Name: "data"},
			Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("5Gi")}},
			},
		}
		if _, err := core.PersistentVolumeClaims("default").Create(ctx, claim, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		pod := podTemplate("web")
		pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}
		d := &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Name: "web"},
			Spec:       appsv1.DeploymentSpec{Selector: selector("web"), Template: pod},
		}
		if _, err := apps.Deployments("default").Create(ctx, d, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		eventually(t, 30*time.Second, func(ctx context.Context) error {
			d, err := apps.Deployments("default").Get(ctx, "web", metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, c := range d.Status.Conditions {
				if c.Type == appsv1.DeploymentAvailable && c.Status == corev1.ConditionTrue {
					return nil
				}
			}
			return fmt.Errorf("not Available: %+v", d.Status.Conditions)
		})
		pods, err := core.Pods("default").List(ctx, metav1.ListOptions{LabelSelector: "app=web"})
		if err != nil || len(pods.Items) != 1 {
			t.Fatalf("%d pods, %v", len(pods.Items), err)
		}
		if got := pods.Items[0].Annotations["llmbox.dev/simulated-by"]; got != "kwok" {
			t.Errorf("the pod is simulated by %q", got)
		}
		if !strings.HasPrefix(pods.Items[0].Status.PodIP, "10.42.") {
			t.Errorf("the pod has address %q", pods.Items[0].Status.PodIP)
		}
		bound, err := core.PersistentVolumeClaims("default").Get(ctx, "data", metav1.GetOptions{})
		if err != nil || bound.Status.Phase != corev1.ClaimBound {
			t.Errorf("the claim is %q, %v", bound.Status.Phase, err)
		}

		if err := apps.Deployments("default").Delete(ctx, "web", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := core.PersistentVolumeClaims("default").Delete(ctx, "data", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		eventually(t, 30*time.Second, func(ctx context.Context) error {
			pvs, err := core.PersistentVolumes().List(ctx, metav1.ListOptions{})
			if err == nil && len(pvs.Items) > 0 {
				err = fmt.Errorf("%s is still there", pvs.Items[0].Name)
			}
			return err
		})
	})
	t.Run("daemon set runs on each node", func(t *testing.T) {
		d := &appsv1.DaemonSet{
			ObjectMeta: metav1.ObjectMeta{Name: "agent"},
			Spec:       appsv1.DaemonSetSpec{Selector: selector("agent"), Template: podTemplate("agent")},
		}
		if _, err := apps.DaemonSets("default").Create(ctx, d, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		eventually(t, 30*time.Second, func(ctx context.Context) error {
			d, err := apps.DaemonSets("default").Get(ctx, "agent", metav1.GetOptions{})
			if err == nil && d.Status.NumberReady != 2 {
				err = fmt.Errorf("%d ready", d.Status.NumberReady)
			}
			return err
		})
	})
	t.Run("job succeeds", func(t *testing.T) {
		pod := podTemplate("once")
		pod.Spec.RestartPolicy = corev1.RestartPolicyNever
		j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "once"}, Spec: batchv1.JobSpec{Template: pod}}
		if _, err := batch.Jobs("default").Create(ctx, j, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		eventually(t, 30*time.Second, func(ctx context.Context) error {
			j, err := batch.Jobs("default").Get(ctx, "once", metav1.GetOptions{})
			if err == nil && j.Status.Succeeded != 1 {
				err = fmt.Errorf("%+v", j.Status)
			}
			return err
		})
	})
	t.Run("sweep leaves a running lab alone", func(t *testing.T) {
		out, err := exec.CommandContext(ctx, bin, "sweep", "--root", root).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "running "+dir) {
			t.Errorf("%v: %s", err, out)
		}
		if _, err := core.Nodes().List(ctx, metav1.ListOptions{}); err != nil {
			t.Errorf("the lab is gone: %v", err)
		}
	})
	t.Run("stop leaves nothing", func(t *testing.T) {
		if out, err := exec.CommandContext(ctx, bin, "stop", "--dir", dir).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := l.cmd.Wait(); err != nil {
			t.Errorf("the supervisor ended with %v:\n%s", err, l.stderr)
		}
		requireGone(t, all)
		requireNoDir(t, dir)
	})
}

func TestKilledSupervisorLeavesNoProcess(t *testing.T) {
	bin, root := labBinary(t), t.TempDir()
	dir := filepath.Join(root, "lab")
	l := startLab(t, bin, dir)
	all := identify(t, l.PIDs)

	if err := l.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = l.cmd.Wait()
	requireGone(t, all)
	if _, err := os.Stat(dir); err != nil {
		t.Fatalf("nothing is left to sweep: %v", err)
	}
	bystander := filepath.Join(root, "other")
	if err := os.MkdirAll(filepath.Join(bystander, "pki"), 0o700); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), bin, "sweep", "--root", root).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	requireNoDir(t, dir)
	if _, err := os.Stat(bystander); err != nil {
		t.Errorf("sweep took what is not a lab: %v", err)
	}
}

func TestLifelineEndsTheLab(t *testing.T) {
	bin, dir := labBinary(t), filepath.Join(t.TempDir(), "lab")
	l := startLab(t, bin, dir, "--lifeline")
	all := identify(t, l.PIDs)
	if err := l.stdin.Close(); err != nil {
		t.Fatal(err)
	}
	if err := l.cmd.Wait(); err != nil {
		t.Errorf("the supervisor ended with %v:\n%s", err, l.stderr)
	}
	requireGone(t, all)
	requireNoDir(t, dir)
}

func TestDeadChildEndsTheLab(t *testing.T) {
	bin, dir := labBinary(t), filepath.Join(t.TempDir(), "lab")
	l := startLab(t, bin, dir)
	all := identify(t, l.PIDs)
	if err := syscall.Kill(l.PIDs["kube-scheduler"], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := l.cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("the supervisor ended with %v, want exit status 1", err)
	}
	for _, want := range []string{"kube-scheduler ended early", "signal: killed", "Starting Kubernetes Scheduler"} {
		if !strings.Contains(l.stderr.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, l.stderr)
		}
	}
	requireGone(t, all)
	requireNoDir(t, dir)
}

func TestDetachedLabStops(t *testing.T) {
	bin, dir := labBinary(t), filepath.Join(t.TempDir(), "lab")
	cmd := exec.CommandContext(t.Context(), bin, "start", "--detach", "--dir", dir, "--programs", programDir(t))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	line, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	t.Cleanup(func() { _ = labdir.Stop(dir, 5*time.Second) })
	var r rehearsal.Ready
	if err := json.Unmarshal(line, &r); err != nil {
		t.Fatalf("reading %q: %v", line, err)
	}
	all := identify(t, r.PIDs)

	second, err := exec.CommandContext(t.Context(), bin, "start", "--detach", "--dir", dir, "--programs", programDir(t)).CombinedOutput()
	if err == nil || !strings.Contains(string(second), "is running") {
		t.Errorf("a second lab in the same directory: %v: %s", err, second)
	}
	for _, p := range all {
		if !p.Alive() {
			t.Errorf("the second start ended %s", p.Name)
		}
	}
	if out, err := exec.CommandContext(t.Context(), bin, "stop", "--dir", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	requireGone(t, all)
	requireNoDir(t, dir)
}

func TestMissingProgramsAreNamed(t *testing.T) {
	bin, dir := labBinary(t), filepath.Join(t.TempDir(), "lab")
	out, err := exec.CommandContext(t.Context(), bin, "start", "--dir", dir, "--programs", t.TempDir()).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("ended with %v, want exit status 1", err)
	}
	for _, want := range []string{"kube-apiserver", "llmbox-lab build"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%q is missing in: %s", want, out)
		}
	}
	requireNoDir(t, dir)
}

func selector(app string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
}

func podTemplate(app string) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": app}},
		Spec: corev1.PodSpec{
			InitContainers: []corev1.Container{{Name: "init", Image: "example.invalid/init:1"}},
			Containers:     []corev1.Container{{Name: "main", Image: "example.invalid/main:1"}},
		},
	}
}
