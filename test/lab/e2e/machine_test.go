package e2e

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/llmbox-dev/llmbox/test/lab/node"
)

// An empty machine, the stand-in for k3s started on it by hand, and what happens to
// both: a restart, a kill, a reboot at another address, the power cut.
func TestServerOnAMachine(t *testing.T) {
	onlyWhereAsked(t, false)
	bin := binDir(t)
	if _, err := os.Stat(filepath.Join(bin, "lab/k3s-standin")); err != nil {
		t.Fatalf("%v: run `make lab-machine` first", err)
	}
	before := machine(t)
	h := startMachine(t, bin)
	namespaces := append(namespacesOf(t, h.PIDs["node"]), namespacesOf(t, h.Machines[0].Init.PID)...)

	h.must(t, "sh", "-c", `mkdir -p /etc/rancher/k3s /etc/local.d && cp /lab/registries.yaml /etc/rancher/k3s/ && cp /lab/programs/k3s-standin /usr/local/bin/k3s`)
	h.write(t, "/etc/rancher/k3s/config.yaml", 0o600, `disable: [traefik, metrics-server]
secrets-encryption: true
tls-san: [box.example.com]
kubelet-arg: [image-gc-high-threshold=100, image-gc-low-threshold=99, "eviction-hard=nodefs.available<1%,imagefs.available<1%"]
`)
	// What a service manager would do at boot, where there is none.
	h.write(t, "/etc/local.d/k3s.start", 0o755, "#!/bin/sh\necho $$ >/run/k3s.pid\nexec /usr/local/bin/k3s server >>/var/log/k3s.log 2>&1\n")

	if out := h.must(t, "k3s", "--version"); !strings.HasPrefix(out, "k3s version v1.") || !strings.Contains(out, "stand-in") {
		t.Errorf("its version is %q", out)
	}
	h.startServer(t)
	t.Run("the cluster is usable", func(t *testing.T) { usable(t, h, "10.99.0.1") })
	if t.Failed() {
		return
	}
	client := h.client(t)
	t.Run("files are closed and Secrets encrypted", func(t *testing.T) { closed(t, h, client) })
	pod := runPod(t, client)
	t.Run("it leaves the traces of k3s", func(t *testing.T) { traces(t, h) })
	t.Run("a manifest is applied", func(t *testing.T) {
		h.write(t, "/var/lib/rancher/k3s/server/manifests/mine.yaml", 0o600, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: mine, namespace: default}\n")
		h.write(t, "/var/lib/rancher/k3s/server/manifests/other.yaml", 0o600, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: other, namespace: default}\n")
		h.write(t, "/var/lib/rancher/k3s/server/manifests/other.yaml.skip", 0o600, "")
		eventually(t, time.Minute, func(ctx context.Context) error {
			_, err := client.CoreV1().ConfigMaps("default").Get(ctx, "mine", metav1.GetOptions{})
			return err
		})
	})
	for name, flags := range map[string]struct {
		args []string
		want string
	}{
		"the port is taken":           {nil, "address already in use"},
		"an address it has not":       {[]string{"--node-ip=192.0.2.9"}, "failed to find interface with specified node ip"},
		"a flag that is none":         {[]string{"--nosuch"}, "flag provided but not defined"},
		"a file that can not be read": {[]string{"--config=/nowhere.yaml"}, "/nowhere.yaml"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := h.run(append([]string{"k3s", "server"}, flags.args...)...)
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(out, "level=fatal") || !strings.Contains(out, flags.want) {
				t.Errorf("%v:\n%s", err, out)
			}
		})
	}
	putImage(t, filepath.Join(h.Machines[0].Root, "var/lib/rancher/k3s/agent/images"))
	for _, signal := range []string{"TERM", "KILL"} {
		t.Run("SIG"+signal+" and a restart keep the pod", func(t *testing.T) {
			old := container(t, client, pod)
			h.must(t, "sh", "-c", "kill -"+signal+" $(cat /run/k3s.pid); while kill -0 $(cat /run/k3s.pid) 2>/dev/null; do sleep 0.1; done")
			if out := h.must(t, "ps", "-e", "-o", "args"); !strings.Contains(out, "sleep 123456") || strings.Contains(out, "kube-apiserver --") || strings.Contains(out, "kubelet --") {
				t.Errorf("without the server there run\n%s", out)
			}
			h.startServer(t)
			eventually(t, 3*time.Minute, func(ctx context.Context) error { return nodeReady(ctx, client, "10.99.0.1") })
			// The node has heard of the pod when it says so anew.
			time.Sleep(5 * time.Second)
			if now := container(t, client, pod); now != old {
				t.Errorf("the container was %s and is %s", old, now)
			}
		})
	}
	t.Run("the second start has imported an image", func(t *testing.T) {
		if out := h.must(t, "k3s", "ctr", "images", "list", "-q"); !strings.Contains(out, importedImage) {
			t.Errorf("there are only\n%s\n%s", out, h.must(t, "grep", "import", "/var/log/k3s.log"))
		}
	})
	t.Run("a reboot at another address brings everything back", func(t *testing.T) {
		old := container(t, client, pod)
		boot := h.must(t, "cat", "/proc/sys/kernel/random/boot_id")
		h.must(t, "touch", "/run/gone", "/tmp/gone", "/root/kept")
		out := run(t, 3*time.Minute, filepath.Join(bin, "llmbox-lab"), "reboot", "--dir", h.Dir, "--address", "10.99.0.2")
		if !strings.Contains(out, "10.99.0.2") {
			t.Errorf("reboot says %s", out)
		}
		if now := h.must(t, "cat", "/proc/sys/kernel/random/boot_id"); now == boot {
			t.Error("two boots have one name")
		}
		if left := h.must(t, "sh", "-c", "ls -d /run/gone /tmp/gone /root/kept 2>/dev/null || true"); left != "/root/kept\n" {
			t.Errorf("of /run, /tmp and /root there is left: %s", left)
		}
		client := h.client(t)
		usable(t, h, "10.99.0.2")
		eventually(t, 3*time.Minute, func(ctx context.Context) error {
			return podRunning(ctx, client, pod)
		})
		if now := container(t, client, pod); now == old {
			t.Error("the container outlived a reboot")
		}
		eventually(t, time.Minute, func(ctx context.Context) error {
			raw, err := client.CoreV1().Pods("default").GetLogs(pod, &corev1.PodLogOptions{}).DoRaw(ctx)
			if err == nil && !bytes.Contains(raw, []byte("names resolve")) {
				err = fmt.Errorf("the log is %q", raw)
			}
			return err
		})
	})
	t.Run("a machine that is off is off", func(t *testing.T) {
		groups := cgroupsOf(t, h.Dir)
		if len(groups) == 0 {
			t.Error("it has no cgroups: the search for leftovers below would find nothing")
		}
		run(t, time.Minute, filepath.Join(bin, "llmbox-lab"), "machine-kill", "--dir", h.Dir)
		if out, err := h.run("true"); err == nil || !strings.Contains(out, "is off") {
			t.Errorf("%v: %s", err, out)
		}
		for _, g := range groups {
			if _, err := os.Stat(g); !os.IsNotExist(err) {
				t.Errorf("cgroup %s is still there: %v", g, err)
			}
		}
	})
	h.stop(t)
	t.Run("the lab leaves nothing", func(t *testing.T) {
		for _, p := range before.inNamespaces(t, namespaces) {
			t.Errorf("process %s is still in the lab's namespaces", p)
		}
		for _, d := range before.diff(machine(t)) {
			t.Error(d)
		}
		if _, err := os.Stat(h.Dir); !os.IsNotExist(err) {
			t.Errorf("the lab's directory is still there: %v", err)
		}
	})
}

// host is a machine of a lab.
type host struct {
	lab
	bin string
	// machine names one of several; the only one where empty.
	machine string
}

// others are the further machines of a lab.
func (h *host) others() []*host {
	var out []*host
	for _, m := range h.Machines[1:] {
		out = append(out, &host{lab: h.lab, bin: h.bin, machine: m.Name})
	}
	return out
}

// exec is how a program is run on the machine.
func (h *host) exec() []string {
	args := []string{"exec", "--dir", h.Dir}
	if h.machine != "" {
		args = append(args, "--machine", h.machine)
	}
	return append(args, "--")
}

// root is where the machine's files are.
func (h *host) root() string {
	for _, m := range h.Machines {
		if m.Name == h.machine {
			return m.Root
		}
	}
	return h.Machines[0].Root
}

func startMachine(t *testing.T, bin string, more ...string) *host {
	t.Helper()
	h := &host{lab: lab{stderr: &bytes.Buffer{}}, bin: bin}
	h.cmd = exec.Command(filepath.Join(bin, "llmbox-lab"), append([]string{"start", "--size", "machine", "--lifeline", // #nosec G204 -- the lab's own
		"--dir", filepath.Join(t.TempDir(), "lab"), "--model", "", "--timeout", startWithin.String()}, more...)...)
	h.cmd.Stderr = h.stderr
	in, err := h.cmd.StdinPipe()
	must(t, err)
	h.lifeline = in
	out, err := h.cmd.StdoutPipe()
	must(t, err)
	must(t, h.cmd.Start())
	t.Cleanup(func() { h.stop(t) })
	if err := json.NewDecoder(out).Decode(&h.Ready); err != nil {
		t.Fatalf("the lab did not start: %v: %s", err, h.stderr)
	}
	if len(h.Machines) == 0 {
		t.Fatal("there are no machines")
	}
	t.Logf("machine up after %d ms", h.StartMS)
	return h
}

// run runs a program on the machine.
func (h *host) run(command ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(h.bin, "llmbox-lab"), append(h.exec(), command...)...) // #nosec G204 -- the lab's own
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (h *host) must(t *testing.T, command ...string) string {
	t.Helper()
	out, err := h.run(command...)
	if err != nil {
		t.Fatalf("%v: %v\n%s", command, err, out)
	}
	return out
}

// write puts a file on the machine's disk.
func (h *host) write(t *testing.T, path string, mode os.FileMode, content string) {
	t.Helper()
	full := filepath.Join(h.root(), path)
	must(t, os.WriteFile(full+".new", []byte(content), mode))
	must(t, os.Chmod(full+".new", mode))
	must(t, os.Rename(full+".new", full))
}

// startServer starts the boot entry as a boot would, detached from who starts it.
func (h *host) startServer(t *testing.T) {
	t.Helper()
	h.must(t, "sh", "-c", "setsid /etc/local.d/k3s.start </dev/null >/dev/null 2>&1 &")
}

// client reaches the machine's API server through the lab's port, once there is a
// kubeconfig.
func (h *host) client(t *testing.T) *kubernetes.Clientset {
	t.Helper()
	path := filepath.Join(h.Machines[0].Root, "etc/rancher/k3s/k3s.yaml")
	eventually(t, 3*time.Minute, func(context.Context) error {
		_, err := os.Stat(path)
		return err
	})
	config, err := clientcmd.BuildConfigFromFlags("", path)
	must(t, err)
	config.Host = fmt.Sprintf("https://127.0.0.1:%d", h.APIPort)
	config.Timeout = 20 * time.Second
	client, err := kubernetes.NewForConfig(config)
	must(t, err)
	return client
}

// log is the end of what the server wrote, for a test that failed.
func (h *host) log() string {
	raw, err := os.ReadFile(filepath.Join(h.Machines[0].Root, "var/log/k3s.log"))
	if err != nil {
		return err.Error()
	}
	return string(raw[max(0, len(raw)-4000):])
}

func usable(t *testing.T, h *host, address string) {
	t.Helper()
	client := h.client(t)
	defer func() {
		if t.Failed() {
			t.Logf("the server wrote\n%s", h.log())
		}
	}()
	eventually(t, 5*time.Minute, func(ctx context.Context) error { return nodeReady(ctx, client, address) })
	eventually(t, 3*time.Minute, func(ctx context.Context) error {
		pods, err := client.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{LabelSelector: "k8s-app=kube-dns"})
		if err == nil && len(pods.Items) == 0 {
			err = errors.New("there is no CoreDNS")
		}
		for _, p := range pods.Items {
			err = errors.Join(err, podIsReady(&p))
		}
		return err
	})
	class, err := client.StorageV1().StorageClasses().Get(t.Context(), "local-path", metav1.GetOptions{})
	must(t, err)
	if class.Annotations["storageclass.kubernetes.io/is-default-class"] != "true" {
		t.Error("local-path is not the default StorageClass")
	}
	if _, err := client.NodeV1().RuntimeClasses().Get(t.Context(), "nvidia", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
	eventually(t, time.Minute, func(ctx context.Context) error {
		n, err := client.CoreV1().Nodes().Get(ctx, "gpu-0", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if q := n.Status.Allocatable["nvidia.com/gpu"]; q.Value() != 1 {
			return fmt.Errorf("the node offers %s GPUs", q.String())
		}
		return nil
	})
}

func nodeReady(ctx context.Context, client kubernetes.Interface, address string) error {
	n, err := client.CoreV1().Nodes().Get(ctx, "gpu-0", metav1.GetOptions{})
	if err != nil {
		return err
	}
	at := slices.ContainsFunc(n.Status.Addresses, func(a corev1.NodeAddress) bool { return a.Type == corev1.NodeInternalIP && a.Address == address })
	for _, c := range n.Status.Conditions {
		// A node of before is Ready for as long as nobody has missed it.
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue && at && time.Since(c.LastHeartbeatTime.Time) < 5*time.Minute {
			return nil
		}
	}
	return fmt.Errorf("the node is not Ready at %s: %v", address, n.Status.Addresses)
}

func podIsReady(p *corev1.Pod) error {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return nil
		}
	}
	return fmt.Errorf("pod %s is %s", p.Name, p.Status.Phase)
}

func closed(t *testing.T, h *host, client kubernetes.Interface) {
	root := h.Machines[0].Root
	for _, path := range []string{"etc/rancher/k3s/k3s.yaml", "etc/rancher/node/password", "var/lib/rancher/k3s/server/token", "var/lib/rancher/k3s/server/tls/server-ca.key"} {
		info, err := os.Stat(filepath.Join(root, path))
		must(t, err)
		if info.Mode().Perm() != 0o600 {
			t.Errorf("/%s has mode %v", path, info.Mode())
		}
	}
	const marker = "this-must-not-be-read-in-the-database"
	_, err := client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "marked"}, StringData: map[string]string{"key": marker},
	}, metav1.CreateOptions{})
	must(t, err)
	_, err = client.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "open"}, Data: map[string]string{"key": "this-may-be-read-in-the-database"},
	}, metav1.CreateOptions{})
	must(t, err)
	var database []byte
	for _, path := range glob(t, filepath.Join(root, "var/lib/rancher/k3s/server/db/state.db*")) {
		raw, err := os.ReadFile(path) // #nosec G304 -- the lab's own
		must(t, err)
		database = append(database, raw...)
	}
	if !bytes.Contains(database, []byte("this-may-be-read")) {
		t.Error("what is not encrypted is not found in the database either: the search below shows nothing")
	}
	if bytes.Contains(database, []byte(marker)) {
		t.Error("a Secret is in the database as it is")
	}
}

// runPod starts a pod with a GPU that looks a name up and waits.
func runPod(t *testing.T, client kubernetes.Interface) string {
	t.Helper()
	class := "nvidia"
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "stays"},
		Spec: corev1.PodSpec{RuntimeClassName: &class, Containers: []corev1.Container{{
			Name: "main", Image: "docker.io/rancher/mirrored-library-busybox:1.35.0",
			Command:   []string{"sh", "-c", "until nslookup kubernetes.default.svc.cluster.local; do sleep 1; done; echo names resolve; exec sleep 123456"},
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(1, resource.DecimalSI)}},
		}}},
	}
	eventually(t, time.Minute, func(ctx context.Context) error {
		_, err := client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{})
		return err
	})
	eventually(t, 3*time.Minute, func(ctx context.Context) error { return podRunning(ctx, client, pod.Name) })
	eventually(t, time.Minute, func(ctx context.Context) error {
		raw, err := client.CoreV1().Pods("default").GetLogs(pod.Name, &corev1.PodLogOptions{}).DoRaw(ctx)
		if err == nil && !bytes.Contains(raw, []byte("names resolve")) {
			err = fmt.Errorf("the log is %q", raw)
		}
		return err
	})
	return pod.Name
}

func podRunning(ctx context.Context, client kubernetes.Interface, name string) error {
	p, err := client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, s := range p.Status.ContainerStatuses {
		if s.State.Running != nil {
			return podIsReady(p)
		}
	}
	return fmt.Errorf("pod %s is %s", name, p.Status.Phase)
}

// container names the pod's container and how often it was started.
func container(t *testing.T, client kubernetes.Interface, pod string) string {
	t.Helper()
	p, err := client.CoreV1().Pods("default").Get(t.Context(), pod, metav1.GetOptions{})
	must(t, err)
	if len(p.Status.ContainerStatuses) != 1 {
		t.Fatalf("the pod has %d containers", len(p.Status.ContainerStatuses))
	}
	s := p.Status.ContainerStatuses[0]
	return fmt.Sprintf("%s of pod %s, restarted %d times", s.ContainerID, p.UID, s.RestartCount)
}

// traces looks for each kind of thing that an uninstaller has to find.
func traces(t *testing.T, h *host) {
	for command, wants := range map[string][]string{
		"ip -o link":                      {"cni0", "flannel.1", "veth"},
		"iptables-save":                   {":KUBE-SERVICES", ":CNI-", ":FLANNEL-POSTRTG"},
		"cat /proc/self/mountinfo":        {"/var/lib/kubelet/pods/", "/run/k3s/containerd/", "/run/netns/cni-"},
		"find /sys/fs/cgroup -maxdepth 2": {"kubepods"},
		"find /etc/rancher /var/lib /var/log -xdev -maxdepth 3": {"/var/lib/rancher/k3s/agent", "/var/lib/cni", "/var/lib/kubelet", "/etc/rancher/node/password", "/var/log/pods", "/var/log/containers"},
		"find /run -maxdepth 2":                                 {"/run/k3s", "/run/flannel/subnet.env"},
		"ps -e -o args":                                         {"/usr/local/bin/k3s server", "/bin/containerd-shim-runc-v2 -namespace k8s.io"},
	} {
		out := h.must(t, strings.Fields(command)...)
		for _, want := range wants {
			if !strings.Contains(out, want) {
				t.Errorf("%s shows no %s:\n%s", command, want, out[:min(len(out), 1500)])
			}
		}
	}
}

const importedImage = "docker.io/llmbox-lab/imported:1"

// putImage puts a compressed archive of an image into a directory.
func putImage(t *testing.T, dir string) {
	t.Helper()
	image, err := random.Image(4096, 2)
	must(t, err)
	config, err := image.ConfigFile()
	must(t, err)
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	image, err = mutate.ConfigFile(image, config)
	must(t, err)
	tag, err := name.NewTag(importedImage)
	must(t, err)
	must(t, os.MkdirAll(dir, 0o700))
	f, err := os.Create(filepath.Join(dir, "imported.tar.gz")) // #nosec G304 -- the lab's own
	must(t, err)
	z := gzip.NewWriter(f)
	must(t, tarball.Write(tag, image, z))
	must(t, z.Close())
	must(t, f.Close())
}

// cgroupsOf lists the directories in which a machine sees its cgroups, from outside:
// other labs may run beside this one.
func cgroupsOf(t *testing.T, dir string) []string {
	t.Helper()
	m, err := node.ReadMachine(dir, "")
	must(t, err)
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", m.Init.PID))
	must(t, err)
	var all []string
	for line := range strings.Lines(string(raw)) {
		// 4:memory:/llmbox-lab-…/gpu-0/init
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 || !strings.HasSuffix(f[2], "/init") {
			continue
		}
		all = append(all, glob(t, "/sys/fs/cgroup/*"+filepath.Dir(f[2]))...)
		all = append(all, glob(t, "/sys/fs/cgroup"+filepath.Dir(f[2]))...)
	}
	return all
}

// eventually asks until there is no error.
func eventually(t *testing.T, within time.Duration, ask func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	for {
		err := ask(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("after %s: %v", within, err)
		case <-time.After(500 * time.Millisecond):
		}
	}
}
