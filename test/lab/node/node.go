// Package node runs a lab of node size: the control plane of package controlplane
// and beside it one real node, made of kubelet, containerd, runc, CNI plugins,
// kube-proxy, CoreDNS and a storage provisioner.
//
// Everything lives in namespaces of its own (mounts, network, processes, host name,
// IPC): the root directory is put together inside the lab's directory, the network
// has no way out, and the first process of the lab takes all others with it when it
// ends. What a kernel keeps outside of namespaces, which is cgroups, has the lab's
// name. It needs root.
//
// It does not know what is installed into the cluster. Images come from package
// images.
package node

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/test/lab/labdir"
	"github.com/llmbox-dev/llmbox/test/lab/process"
	"github.com/llmbox-dev/llmbox/test/lab/programs"
)

// Options of Run.
type Options struct {
	Dir      string
	Programs string
	// LLMBox is the binary that becomes llmbox's own image, tagged LLMBoxVersion.
	LLMBox, LLMBoxVersion string
	// GPUs that the node offers.
	GPUs int
	// Product is which GPUs they are.
	Product gpu.Product
	// GPUBy is who offers them: ByLab, the lab itself, labels included, or ByOperator,
	// the images that an operator starts on a node that looks as if it had GPUs.
	GPUBy string
	// HelmController runs helm-controller beside the node's daemons, where k3s has it
	// in its server.
	HelmController bool
	// Model is what the stand-in for the model hub offers; empty: no hub.
	Model string
	// Machines asks for so many empty machines instead of a node; see machine.go.
	Machines int
	// GatewayPort of the machine leads to NodeGatewayPort of the node; 0 takes a free one.
	GatewayPort     int
	NodeGatewayPort int
	KeepDir         bool
	StartTimeout    time.Duration
	Log             *slog.Logger `json:"-"`
}

// Ready is what a started lab tells its user.
type Ready struct {
	Kubeconfig  string         `json:"kubeconfig"`
	Dir         string         `json:"dir"`
	APIPort     int            `json:"api_port"`
	GatewayPort int            `json:"gateway_port"`
	StartMS     int64          `json:"start_ms"`
	PIDs        map[string]int `json:"pids"`
	// Hub is the URL of the model hub's stand-in as pods see it.
	Hub string `json:"hub"`
	// StandIns are the images that hold no program of upstream's.
	StandIns []string `json:"stand_ins"`
	// Lacking are references nobody can pull, with what was not built.
	Lacking []string `json:"lacking,omitempty"`
	// Machines that something can be installed on.
	Machines []MachineState `json:"machines,omitempty"`
}

// Needed lists the programs that a node runs outside of pods.
func Needed() []string {
	return []string{"kine", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy",
		"kube-router-netpol", "coredns", "local-path-provisioner", "pause-standin"}
}

// needed are the programs that these options run outside of pods.
func (o Options) needed() []string {
	names := Needed()
	if o.Machines > 0 {
		names = machineNeeded()
	}
	if o.HelmController {
		names = append(names, "helm-controller")
	}
	if o.simulatesGPUs() {
		names = append(names, gpuPrograms()...)
	}
	return names
}

// tools are programs of the machine, with the Debian package that brings them.
func tools() map[string]string {
	return map[string]string{
		"containerd":              "containerd",
		"runc":                    "runc",
		"iptables":                "iptables",
		"conntrack":               "conntrack",
		"ipset":                   "ipset",
		"ip":                      "iproute2",
		"/usr/lib/cni/bridge":     "containernetworking-plugins",
		"/usr/lib/cni/portmap":    "containernetworking-plugins",
		"/usr/lib/cni/host-local": "containernetworking-plugins",
		"/usr/lib/cni/loopback":   "containernetworking-plugins",
		"/bin/busybox":            "busybox-static",
	}
}

// ErrUnsupported means that this machine can't run a node.
var ErrUnsupported = errors.New("this machine can't run a node-size lab")

// Check tells what a node-size lab lacks on this machine.
func Check() error {
	if runtime.GOOS != "linux" {
		return fmt.Errorf("%w: it is not Linux", ErrUnsupported)
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w: namespaces, mounts and cgroups need root", ErrUnsupported)
	}
	var errs []error
	for tool, pkg := range tools() {
		if _, err := exec.LookPath(tool); err != nil {
			errs = append(errs, fmt.Errorf("%w: there is no %s: install the package %s", ErrUnsupported, tool, pkg))
		}
	}
	return errors.Join(errs...)
}

// config is what the process outside tells the one inside.
type config struct {
	Options
	APIPort int
	Cgroup  string
}

// report is what the process inside answers, once.
type report struct {
	Ready *Ready `json:"ready,omitempty"`
	Error string `json:"error,omitempty"`
}

// insideArg is the command under which this program is started again inside.
const insideArg = "node-inside"

// InsideCommand is the hidden command that must call Inside.
func InsideCommand() string { return insideArg }

// Run starts a lab, calls ready once it is up, and keeps it until ctx ends or a
// part of it fails. Whatever the end, nothing stays.
func Run(ctx context.Context, o Options, ready func(Ready) error) (err error) {
	began := time.Now()
	if err := Check(); err != nil {
		return err
	}
	if _, err := programs.Find(o.Programs, o.needed()...); err != nil {
		return err
	}
	for _, p := range []*string{&o.Programs, &o.LLMBox} {
		if *p, err = filepath.Abs(*p); err != nil {
			return fmt.Errorf("resolving a path: %w", err)
		}
	}
	dir, err := labdir.Create(o.Dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Close(o.KeepDir)) }()
	o.Dir = dir.Path

	// Made here, these two listen in the machine's network, whoever accepts.
	api, err := listen(0)
	if err != nil {
		return err
	}
	defer func() { _ = api.Close() }()
	gateway, err := listen(o.GatewayPort)
	if err != nil {
		return err
	}
	defer func() { _ = gateway.Close() }()
	apiFile, err := api.File()
	if err != nil {
		return fmt.Errorf("handing a listener over: %w", err)
	}
	defer func() { _ = apiFile.Close() }()
	gatewayFile, err := gateway.File()
	if err != nil {
		return fmt.Errorf("handing a listener over: %w", err)
	}
	defer func() { _ = gatewayFile.Close() }()

	c := config{Options: o, APIPort: port(api), Cgroup: cgroupName(dir.Path)}
	// What a lab that was killed in this directory left.
	if err := RemoveCgroups(dir.Path); err != nil {
		return err
	}
	if err := makeCgroups(c.Cgroup); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, RemoveCgroups(dir.Path)) }()

	group := process.NewGroup()
	defer func() { err = errors.Join(err, group.Stop(15*time.Second)) }()
	if err := os.MkdirAll(dir.Join("logs"), 0o700); err != nil {
		return fmt.Errorf("making the lab directory: %w", err)
	}
	answers, inside, err := startInside(group, dir, c, apiFile, gatewayFile)
	if err != nil {
		return err
	}
	defer func() { _ = answers.Close() }()

	said := make(chan report, 1)
	go func() {
		var r report
		line, err := bufio.NewReader(answers).ReadBytes('\n')
		if err == nil {
			err = json.Unmarshal(line, &r)
		}
		if err != nil {
			r.Error = "the node ended before it was up"
		}
		said <- r
	}()
	// The one inside knows what it waits for: it gets to say so.
	starting, cancel := context.WithTimeoutCause(ctx, o.StartTimeout+5*time.Second, fmt.Errorf("not up after %s", o.StartTimeout))
	defer cancel()
	select {
	case r := <-said:
		if r.Ready == nil {
			return fmt.Errorf("starting the node: %s\n%s", r.Error, process.Tail(dir.Join("logs", "node.log"), 20))
		}
		r.Ready.Dir = dir.Path
		if o.Machines == 0 {
			r.Ready.Kubeconfig = dir.Join("kubeconfig")
		}
		r.Ready.GatewayPort, r.Ready.APIPort = port(gateway), port(api)
		r.Ready.StartMS = time.Since(began).Milliseconds()
		r.Ready.PIDs = map[string]int{"supervisor": os.Getpid(), "node": inside}
		if err := ready(*r.Ready); err != nil {
			return fmt.Errorf("telling that the lab is up: %w", err)
		}
	case <-starting.Done():
		return fmt.Errorf("starting the node: %w\n%s", context.Cause(starting), process.Tail(dir.Join("logs", "node.log"), 20))
	}
	err = group.Wait(ctx)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil // asked to stop
	}
	return err
}

// startInside starts this program again in namespaces of its own. Its first
// process there is the one whose end is the end of all of them.
func startInside(group *process.Group, dir *labdir.Dir, c config, files ...*os.File) (io.ReadCloser, int, error) {
	raw, err := json.Marshal(c)
	if err != nil {
		return nil, 0, fmt.Errorf("encoding the node's options: %w", err)
	}
	if err := labdir.WriteFile(dir.Join("node.json"), raw); err != nil {
		return nil, 0, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, 0, fmt.Errorf("starting the node: %w", err)
	}
	defer func() { _ = write.Close() }()
	child, err := group.Start(process.Spec{
		Name:  "node",
		Path:  "/proc/self/exe",
		Args:  []string{insideArg, dir.Join("node.json")},
		Dir:   dir.Path,
		Log:   dir.Join("logs", "node.log"),
		Env:   []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Files: append(files, write),
		Namespaces: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID |
			syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
	})
	if err != nil {
		return nil, 0, errors.Join(err, read.Close())
	}
	if err := dir.Record("node", child.PID); err != nil {
		return nil, 0, errors.Join(err, read.Close())
	}
	return read, child.PID, nil
}

func listen(port int) (*net.TCPListener, error) {
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
	if err != nil {
		return nil, fmt.Errorf("taking a port of the machine: %w", err)
	}
	return l, nil
}

func port(l net.Listener) int {
	if addr, ok := l.Addr().(*net.TCPAddr); ok {
		return addr.Port
	}
	return 0
}
