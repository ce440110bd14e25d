package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/llmbox-dev/llmbox/test/internal/trace"
)

// TestJoinASecondMachine makes a box of one machine, has a second one join it, and takes
// that out again.
func TestJoinASecondMachine(t *testing.T) {
	onlyWhereAsked(t, false)
	bin := binDir(t)
	for _, name := range []string{"k3s-standin", "envoy-gateway", "proxy-standin"} {
		if _, err := os.Stat(filepath.Join(bin, "lab", name)); err != nil {
			t.Skipf("%v: run `make lab-machine lab-node-gateway` first", err)
		}
	}
	first := startMachine(t, bin, "--model", modelName, "--nodes", "2")
	first.machine = first.Machines[0].Name
	second := first.others()[0]
	first.furnish(t)
	second.furnish(t)
	look := func() trace.State {
		t.Helper()
		state, err := trace.Take(t.Context(), func(_ context.Context, command ...string) (string, error) { return second.run(command...) })
		must(t, err)
		return state
	}
	empty := look()

	first.install(t).ends(t, 0)
	client := first.client(t)
	secret, err := client.CoreV1().Secrets("llm").Get(t.Context(), "gateway-keys", metav1.GetOptions{})
	must(t, err)
	b := &wholeBox{lab: &first.lab, ctx: t.Context(), key: string(secret.Data["default"])}
	must(t, b.serves(t.Context()))

	token := strings.TrimSpace(firstLine(first.must(t, "/root/llmbox", "token", "create", "--ttl", "30m")))
	if !strings.HasPrefix(token, "K10") {
		t.Fatalf("the token begins with %q", token[:min(len(token), 3)])
	}
	server := "https://" + first.Machines[0].Address + ":6443"
	join := func(t *testing.T, token string) llmboxRun {
		t.Helper()
		second.write(t, "/root/token", 0o600, token+"\n")
		args := second.installArgs("--server", server, "--token-file", "/root/token")
		args[0] = "join"
		return second.llmbox(t, 5*time.Minute, args...)
	}
	t.Run("a token that is none", func(t *testing.T) {
		r := join(t, "abcdef.0123456789abcdef")
		r.ends(t, 2)
		if diff := trace.Diff(empty, look()); strings.Contains(r.said, "0123456789abcdef") || len(diff) > 3 { // the token, the lock and its directory
			t.Errorf("it says %s and leaves %q", r.said, diff)
		}
	})
	if !t.Run("it becomes a node with its GPU", func(t *testing.T) {
		r := join(t, token)
		r.ends(t, 0)
		t.Logf("%.1f s", r.took.Seconds())
		if strings.Contains(r.said, token) {
			t.Error("the token is in what it says")
		}
		eventually(t, 2*time.Minute, func(ctx context.Context) error {
			n, err := client.CoreV1().Nodes().Get(ctx, second.machine, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if q := n.Status.Allocatable["nvidia.com/gpu"]; q.Value() != 1 {
				return fmt.Errorf("it offers %s GPUs", q.String())
			}
			return nil
		})
	}) {
		t.Log(second.run("tail", "-n", "40", "/var/log/llmbox/k3s.log"))
		return
	}
	t.Run("its pods reach those of the first", func(t *testing.T) { reaches(t, first, second.machine) })
	t.Run("once more changes nothing", func(t *testing.T) {
		r := join(t, token)
		r.ends(t, 0)
		r.changed(t)
		t.Logf("%.1f s", r.took.Seconds())
	})
	t.Run("uninstall takes it out and leaves the first alone", func(t *testing.T) {
		must(t, client.CoreV1().Pods("default").Delete(t.Context(), "far", metav1.DeleteOptions{}))
		second.llmbox(t, uninstallWithin, "uninstall", "--yes").ends(t, 0)
		second.must(t, "rm", "-f", "/root/token")
		var diff []string
		for range 5 {
			if diff = trace.Diff(empty, look()); len(diff) == 0 {
				break
			}
			time.Sleep(time.Second)
		}
		for _, d := range diff {
			t.Error(d)
		}
		must(t, b.serves(t.Context()))
	})
	first.stop(t)
}

// reaches has a pod on a node look a name up, which pods of another node answer.
func reaches(t *testing.T, h *host, node string) {
	t.Helper()
	client := h.client(t)
	_, err := client.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "far"},
		Spec: corev1.PodSpec{NodeName: node, RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{
			Name: "main", Image: "docker.io/rancher/mirrored-library-busybox:1.35.0",
			Command: []string{"sh", "-c", "until nslookup kubernetes.default.svc.cluster.local; do sleep 1; done"},
		}}},
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	eventually(t, 3*time.Minute, func(ctx context.Context) error {
		p, err := client.CoreV1().Pods("default").Get(ctx, "far", metav1.GetOptions{})
		if err == nil && p.Status.Phase != corev1.PodSucceeded {
			err = fmt.Errorf("the pod is %s", p.Status.Phase)
		}
		return err
	})
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}
