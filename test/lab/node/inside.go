package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/llmbox-dev/llmbox/test/lab/controlplane"
	"github.com/llmbox-dev/llmbox/test/lab/images"
	"github.com/llmbox-dev/llmbox/test/lab/kubenode"
	"github.com/llmbox-dev/llmbox/test/lab/process"
	"github.com/llmbox-dev/llmbox/test/lab/programs"
	"github.com/llmbox-dev/llmbox/test/lab/standin"
)

// Descriptors that the process outside hands over.
const (
	apiDescriptor = iota + 3
	gatewayDescriptor
	answerDescriptor
)

// hubPort is where pods find the model hub's stand-in.
const hubPort = "8500"

// Inside is what runs in the node's namespaces, as their first process, until it is
// told to stop. Path names the options.
func Inside(ctx context.Context, path string) error {
	raw, err := os.ReadFile(path) // #nosec G304 -- named by our own parent
	if err != nil {
		return fmt.Errorf("reading the node's options: %w", err)
	}
	var c config
	if err := json.Unmarshal(raw, &c); err != nil {
		return fmt.Errorf("reading the node's options: %w", err)
	}
	answers := os.NewFile(answerDescriptor, "answers")
	c.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	starting, cancel := context.WithTimeoutCause(ctx, c.StartTimeout, fmt.Errorf("not up after %s", c.StartTimeout))
	defer cancel()
	run := c.run
	if c.Machines > 0 {
		run = c.runMachines
	}
	ready, err := run(ctx, starting, func(r Ready) error { return answer(answers, report{Ready: &r}) })
	if err != nil && !ready {
		return errors.Join(err, answer(answers, report{Error: err.Error()}))
	}
	return err
}

func answer(to *os.File, r report) error {
	raw, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("answering: %w", err)
	}
	if _, err = to.Write(append(raw, '\n')); err != nil {
		return fmt.Errorf("answering: %w", err)
	}
	return to.Close()
}

// home is the lab's directory as seen inside. Processes are not recorded: the end
// of the first one is the end of all.
type home struct{}

// Join implements controlplane.Home.
func (home) Join(elem ...string) string {
	return filepath.Join(append([]string{labInside}, elem...)...)
}

// Record implements controlplane.Home.
func (home) Record(string, int) error { return nil }

func (c config) run(ctx, starting context.Context, ready func(Ready) error) (up bool, err error) {
	for _, fd := range []int{apiDescriptor, gatewayDescriptor, answerDescriptor} {
		unix.CloseOnExec(fd)
	}
	// The lab's directory is closed to others as a whole; what is inside must be as open
	// as on any node, or users of images could not read their own root.
	unix.Umask(0o022)
	if err := enterRoot(c); err != nil {
		return false, err
	}
	if err := unix.Sethostname([]byte(nodeName)); err != nil {
		return false, fmt.Errorf("naming the node: %w", err)
	}
	if err := makeNetwork(starting); err != nil {
		return false, err
	}
	set, err := programs.Find(programsInside, c.needed()...)
	if err != nil {
		return false, err
	}
	group := process.NewGroup()
	reapStrangers(ctx, group)
	parts, failed := c.newParts(ctx)

	all, err := images.Catalogue(programsInside, llmboxInside, c.LLMBoxVersion)
	if err != nil {
		return false, err
	}
	there, lacking := images.Available(all)
	registry, err := images.NewRegistry("/lab/registry", there)
	if err != nil {
		return false, err
	}
	l, err := net.Listen("tcp4", registryAddress)
	if err != nil {
		return false, fmt.Errorf("serving images: %w", err)
	}
	parts.run("the registry", func(ctx context.Context) error { return registry.Serve(ctx, l) })

	plane, err := controlplane.NewOnNode(home{}, controlplane.OnNode{Address: net.ParseIP(nodeAddress), Port: c.APIPort}, set, group)
	if err != nil {
		return false, err
	}
	if err := writeConfigs(c); err != nil {
		return false, err
	}
	for _, k := range []struct {
		file, user string
		groups     []string
	}{
		{"kubelet.kubeconfig", "system:node:" + nodeName, []string{"system:nodes"}},
		{"kube-proxy.kubeconfig", "system:kube-proxy", nil},
		{"kube-router-netpol.kubeconfig", "kube-router-netpol", nil},
		{"helm-controller.kubeconfig", "helm-controller", []string{"system:masters"}},
	} {
		if err := plane.WriteKubeconfig(home{}.Join("config", k.file), k.user, k.groups...); err != nil {
			return false, err
		}
	}
	if err := c.start(group, "containerd", "/usr/bin/containerd", "--config", "/etc/containerd/config.toml"); err != nil {
		return false, err
	}
	if err := plane.StartServers(starting); err != nil {
		return false, err
	}
	if err := c.until(starting, group, "containerd's socket", func(context.Context) error {
		_, err := os.Stat(containerdSocket)
		return err
	}); err != nil {
		return false, err
	}
	if err := c.start(group, "kubelet", set.Path("kubelet"),
		"--config=/lab/config/kubelet.yaml", "--kubeconfig=/lab/config/kubelet.kubeconfig",
		"--hostname-override="+nodeName, "--node-ip="+nodeAddress, "--v=2"); err != nil {
		return false, err
	}
	if err := c.start(group, "kube-proxy", set.Path("kube-proxy"), "--config=/lab/config/kube-proxy.yaml"); err != nil {
		return false, err
	}
	admin, err := plane.Config("supervisor")
	if err != nil {
		return false, err
	}
	if err := plane.UntilReady(starting); err != nil {
		return false, err
	}
	// The controllers give up on an API server that isn't ready ten seconds after them.
	if err := plane.StartControllers(); err != nil {
		return false, err
	}
	objects, err := clusterObjects()
	if err != nil {
		return false, err
	}
	if err := kubenode.Apply(starting, admin, "llmbox-lab", objects); err != nil {
		return false, err
	}
	if err := c.startNetpol(group, set); err != nil {
		return false, err
	}
	if c.GPUBy == ByLab && c.GPUs > 0 {
		if err := c.start(group, "gpu-sim", set.Path("gpu-sim"), "--count", fmt.Sprint(c.GPUs)); err != nil {
			return false, err
		}
	}
	if c.HelmController {
		if err := c.startHelmController(group, set); err != nil {
			return false, err
		}
	}
	if c.Model != "" {
		if err := c.start(group, "hub-standin", set.Path("hub-standin"), "--listen", nodeAddress+":"+hubPort, "--model", c.Model); err != nil {
			return false, err
		}
	}
	parts.run("the API server's port", func(ctx context.Context) error {
		return forward(ctx, os.NewFile(apiDescriptor, "api"), fmt.Sprintf("127.0.0.1:%d", c.APIPort))
	})
	parts.run("the gateway's port", func(ctx context.Context) error {
		return forward(ctx, os.NewFile(gatewayDescriptor, "gateway"), fmt.Sprintf("%s:%d", nodeAddress, c.NodeGatewayPort))
	})
	parts.run("servicelb-standin", func(ctx context.Context) error { return kubenode.ServiceLB(ctx, admin, nodeAddress) })
	if err := c.untilUsable(starting, group, admin); err != nil {
		return false, err
	}
	if c.HelmController {
		if err := c.untilHelmControllerLeads(starting, group, admin); err != nil {
			return false, err
		}
	}
	r := Ready{Hub: "http://" + nodeAddress + ":" + hubPort}
	for _, s := range registry.Served() {
		if s.StandIn {
			r.StandIns = append(r.StandIns, s.Reference+" = "+s.Program)
		}
	}
	for ref, why := range lacking {
		r.Lacking = append(r.Lacking, ref+": "+strings.Join(why, ", "))
	}
	slices.Sort(r.Lacking)
	if err := ready(r); err != nil {
		return false, err
	}
	select {
	case <-ctx.Done():
		return true, nil
	case err := <-failed:
		return true, err
	case child := <-group.Died():
		return true, child.DiedError()
	}
}

func (c config) start(group *process.Group, name, path string, args ...string) error {
	_, err := group.Start(process.Spec{
		Name: name, Path: path, Args: args, Dir: "/", Log: home{}.Join("logs", name+".log"),
		Env: []string{"HOME=/root", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	})
	return err
}

// parts are what runs inside this process.
type parts struct {
	ctx    context.Context
	failed chan error
}

func (c config) newParts(ctx context.Context) (*parts, <-chan error) {
	p := &parts{ctx: ctx, failed: make(chan error, 1)}
	return p, p.failed
}

func (p *parts) run(name string, f func(context.Context) error) {
	go func() {
		err := f(p.ctx)
		if p.ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("it ended without an error")
		}
		select {
		case p.failed <- fmt.Errorf("running %s: %w", name, err):
		default:
		}
	}()
}

func (c config) until(ctx context.Context, group *process.Group, what string, check func(context.Context) error) error {
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case child := <-group.Died():
			return child.DiedError()
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w (last: %w)", what, context.Cause(ctx), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// untilUsable waits until a pod could be created, started and find others by name.
func (c config) untilUsable(ctx context.Context, group *process.Group, admin *rest.Config) error {
	core, err := corev1client.NewForConfig(admin)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	// A kubelet may not give itself the first; the others are what GPU feature discovery
	// would find.
	labels := map[string]string{"node-role.kubernetes.io/control-plane": "true"}
	if c.GPUBy == ByLab && c.GPUs > 0 {
		maps.Copy(labels, c.gpuLabels())
	}
	simulator := "gpu-sim"
	if c.GPUBy == ByOperator {
		simulator = "nvml-standin"
	}
	label, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"labels": labels, "annotations": map[string]string{standin.SimulatedBy: simulator},
	}})
	if err != nil {
		return fmt.Errorf("encoding labels: %w", err)
	}
	return c.until(ctx, group, "the node", func(ctx context.Context) error {
		node, err := core.Nodes().Patch(ctx, nodeName, types.MergePatchType, label, metav1.PatchOptions{})
		if err != nil {
			return fmt.Errorf("looking for the node: %w", err)
		}
		if !isReady(node) {
			return errors.New("the node is not Ready")
		}
		if c.GPUBy == ByLab && c.GPUs > 0 {
			if q := node.Status.Allocatable["nvidia.com/gpu"]; q.Value() < int64(c.GPUs) {
				return errors.New("the node offers no GPU yet")
			}
		}
		pods, err := core.Pods("kube-system").List(ctx, metav1.ListOptions{})
		if err != nil {
			return fmt.Errorf("looking for pods: %w", err)
		}
		if len(pods.Items) < 2 {
			return errors.New("there are no pods yet")
		}
		for _, p := range pods.Items {
			if !podReady(&p) {
				return fmt.Errorf("pod %s is not ready: %s", p.Name, waitingReason(&p))
			}
		}
		return nil
	})
}

// gpuLabels are what GPU feature discovery would say.
func (c config) gpuLabels() map[string]string {
	return map[string]string{
		"nvidia.com/gpu.present": "true",
		"nvidia.com/gpu.product": c.Product.LabelValue(),
		"nvidia.com/gpu.memory":  strconv.FormatInt(c.Product.MemoryMiB, 10),
		"nvidia.com/gpu.count":   strconv.Itoa(c.GPUs),
	}
}

func isReady(node *corev1.Node) bool {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue && len(node.Spec.Taints) == 0
		}
	}
	return false
}

func podReady(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func waitingReason(pod *corev1.Pod) string {
	for _, s := range pod.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil {
			return w.Reason + " " + w.Message
		}
		if t := s.State.Terminated; t != nil {
			return fmt.Sprintf("%s, exit %d %s", t.Reason, t.ExitCode, t.Message)
		}
	}
	return string(pod.Status.Phase)
}

// reapStrangers buries processes that were left to this one, as the first of its
// namespace, by parents that ended. The group's own children are not touched.
func reapStrangers(ctx context.Context, group *process.Group) {
	if os.Getpid() != 1 {
		return
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	var once sync.Once
	go func() {
		defer once.Do(func() { signal.Stop(ended) })
		for {
			select {
			case <-ctx.Done():
				return
			case <-ended:
			case <-time.After(10 * time.Second):
			}
			// Zombies of children that os/exec waits for are its own to bury.
			entries, err := os.ReadDir("/proc")
			if err != nil {
				continue
			}
			ours := group.PIDs()
			for _, e := range entries {
				if pid, zombie := zombieOfOurs(e.Name()); zombie && !contains(ours, pid) {
					_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
				}
			}
		}
	}()
}

func contains(pids map[string]int, pid int) bool {
	for _, p := range pids {
		if p == pid {
			return true
		}
	}
	return false
}
