package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/llmbox-dev/llmbox/test/lab/labdir"
	"github.com/llmbox-dev/llmbox/test/lab/process"
	"github.com/llmbox-dev/llmbox/test/lab/standin"
)

const (
	pluggedDescriptor = iota + 3
	machineAnswerDescriptor
)

// insideEnv marks the second life of a machine's first process, and hands over what it
// is called outside.
const insideEnv = "LAB_MACHINE_INIT"

// bootPatience is how long an entry may keep the next one from being started.
const bootPatience = 10 * time.Second

// Machine is a machine's first process. Path names its options.
func Machine(ctx context.Context, path string) error {
	raw, err := os.ReadFile(path) // #nosec G304 -- named by our own parent
	if err != nil {
		return fmt.Errorf("reading a machine's options: %w", err)
	}
	var m machineConfig
	if err := json.Unmarshal(raw, &m); err != nil {
		return fmt.Errorf("reading a machine's options: %w", err)
	}
	answers := os.NewFile(machineAnswerDescriptor, "answers")
	tell := func(a machineAnswer) error {
		raw, err := json.Marshal(a)
		if err != nil {
			return fmt.Errorf("answering: %w", err)
		}
		_, err = answers.Write(append(raw, '\n'))
		return errors.Join(err, answers.Close())
	}
	if os.Getenv(insideEnv) == "" {
		if err := m.enterCgroup(path); err != nil {
			return errors.Join(err, tell(machineAnswer{Error: err.Error()}))
		}
		return nil // not reached: it is another program by now
	}
	unix.CloseOnExec(machineAnswerDescriptor)
	if err := json.Unmarshal([]byte(os.Getenv(insideEnv)), &m.State.Init); err != nil {
		return errors.Join(err, tell(machineAnswer{Error: "reading who it is: " + err.Error()}))
	}
	group, err := m.comeUp(ctx)
	if err != nil {
		return errors.Join(err, tell(machineAnswer{Error: err.Error()}))
	}
	if err := tell(machineAnswer{Init: m.State.Init}); err != nil {
		return err
	}
	go m.bootEntries(ctx, group)
	if m.GPUBy == ByLab && m.GPUs > 0 {
		go m.labelNode(ctx)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case child := <-group.Died():
			// A boot entry may end; what ends is for the log.
			log.Printf("%s has ended", child.Name)
		}
	}
}

// enterCgroup makes the machine's cgroup the root of what it sees of them. A namespace
// belongs to a thread, so the program begins anew on the one that has it.
func (m machineConfig) enterCgroup(path string) error {
	plugged := os.NewFile(pluggedDescriptor, "plugged")
	if _, err := plugged.Read(make([]byte, 1)); err != nil {
		return fmt.Errorf("waiting to be plugged in: %w", err)
	}
	if err := plugged.Close(); err != nil {
		return fmt.Errorf("waiting to be plugged in: %w", err)
	}
	self, err := m.outside()
	if err != nil {
		return err
	}
	who, err := json.Marshal(self)
	if err != nil {
		return fmt.Errorf("encoding who it is: %w", err)
	}
	if err := enterCgroups(m.cgroup()); err != nil {
		return err
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("separating cgroups: %w", err)
	}
	// The second version has no processes in a cgroup that has others in it; so that the
	// machine's own can be made, its processes live in one of them.
	if err := makeCgroups(m.cgroup() + "/" + machineCgroup); err != nil {
		return err
	}
	if err := enterCgroups(m.cgroup() + "/" + machineCgroup); err != nil {
		return err
	}
	if err := unix.Exec("/proc/self/exe", []string{"llmbox-lab", machineInsides, path}, append(os.Environ(), insideEnv+"="+string(who))); err != nil {
		return fmt.Errorf("beginning anew: %w", err)
	}
	return nil
}

// outside is this process as it is called outside of all namespaces.
func (m machineConfig) outside() (labdir.Process, error) {
	name, err := os.Readlink(filepath.Join(m.HostProc, "self"))
	if err != nil {
		return labdir.Process{}, fmt.Errorf("reading who it is: %w", err)
	}
	pid, err := strconv.Atoi(name)
	if err != nil {
		return labdir.Process{}, fmt.Errorf("reading who it is: %w", err)
	}
	return labdir.IdentifyAt(m.HostProc, m.State.Name, pid)
}

// comeUp makes the machine what it is after a kernel has started: root directory,
// name, network, devices.
func (m machineConfig) comeUp(ctx context.Context) (*process.Group, error) {
	unix.Umask(0o022)
	if err := m.enterRoot(); err != nil {
		return nil, err
	}
	if err := unix.Sethostname([]byte(m.State.Name)); err != nil {
		return nil, fmt.Errorf("naming the machine: %w", err)
	}
	for _, line := range []string{
		"link set lo up",
		"address add " + m.State.Address + "/24 dev uplink",
		"link set uplink up",
		"route add default via " + aroundAddress,
	} {
		if err := ip(ctx, line); err != nil {
			return nil, err
		}
	}
	if err := kernel(nodeSettings()); err != nil {
		return nil, err
	}
	group := process.NewGroup()
	reapStrangers(ctx, group)
	if m.GPUBy == ByLab && m.GPUs > 0 {
		if _, err := group.Start(process.Spec{
			Name: "gpu-sim", Path: labPrograms + "/gpu-sim", Args: []string{"--count", strconv.Itoa(m.GPUs)}, Dir: "/", Log: "/lab/logs/gpu-sim.log",
		}); err != nil {
			return nil, err
		}
	}
	return group, nil
}

// bootEntries runs what the machine's users want to have run at each boot: /etc/rc.local
// where it can be executed, then every such file /etc/local.d/*.start by name, the places
// that systemd's rc-local and OpenRC's local service know. An entry that goes on running
// does not keep the next one waiting for long.
func (m machineConfig) bootEntries(ctx context.Context, group *process.Group) {
	found, err := filepath.Glob("/etc/local.d/*.start")
	if err != nil {
		log.Printf("looking for boot entries: %v", err)
	}
	slices.Sort(found)
	for _, path := range append([]string{"/etc/rc.local"}, found...) {
		info, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) || err == nil && info.Mode()&0o111 == 0 {
			continue
		}
		child, err := group.Start(process.Spec{
			Name: path, Path: path, Dir: "/", Log: "/var/log/boot.log",
			Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		})
		if err != nil {
			log.Printf("running a boot entry: %v", err)
			continue
		}
		select {
		case <-child.Done():
		case <-ctx.Done():
			return
		case <-time.After(bootPatience):
		}
	}
}

// labelNode does what GPU feature discovery would, once there is a node to do it to: it
// knows of the cluster what anybody on the machine knows who may read k3s' kubeconfig.
func (m machineConfig) labelNode(ctx context.Context) {
	label, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"labels": m.gpuLabels(), "annotations": map[string]string{standin.SimulatedBy: "gpu-sim"},
	}})
	if err != nil {
		log.Printf("labelling the node: %v", err)
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(3 * time.Second):
		}
		config, err := clientcmd.BuildConfigFromFlags("", "/etc/rancher/k3s/k3s.yaml")
		if err != nil {
			continue // nothing is installed
		}
		config.Timeout = 5 * time.Second
		core, err := corev1client.NewForConfig(config)
		if err != nil {
			continue
		}
		// No node, no API server, an API server of before: it comes round again.
		_, _ = core.Nodes().Patch(ctx, m.State.Name, types.MergePatchType, label, metav1.PatchOptions{})
	}
}

// kernel sets what the kernel of this machine has a setting for.
func kernel(settings map[string]string) error {
	for file, value := range settings {
		if _, err := os.Stat(file); err != nil {
			continue
		}
		if err := os.WriteFile(file, []byte(value), 0o644); err != nil { // #nosec G306 -- a kernel setting
			return fmt.Errorf("setting %s: %w", strings.TrimPrefix(file, "/proc/sys/"), err)
		}
	}
	return nil
}
