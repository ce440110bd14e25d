// Package rehearsal puts a rehearsal-size lab together: a control plane, nodes
// that KWOK simulates, the stand-ins of a node and the actors that answer for the
// product's pods. It starts them in order, says when they are up, and stops them.
//
// It does not know what is installed into the cluster.
package rehearsal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	storagev1client "k8s.io/client-go/kubernetes/typed/storage/v1"
	"k8s.io/client-go/rest"

	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/test/lab/controlplane"
	"github.com/llmbox-dev/llmbox/test/lab/labdir"
	"github.com/llmbox-dev/llmbox/test/lab/process"
	"github.com/llmbox-dev/llmbox/test/lab/programs"
	"github.com/llmbox-dev/llmbox/test/lab/standin"
)

// Options of Run.
type Options struct {
	Dir         string
	Programs    string
	Product     gpu.Product
	GPUs        int
	Nodes       int
	Delays      standin.Delays
	GatewayPort int
	KeepDir     bool
	// StartTimeout bounds the time until everything is up.
	StartTimeout time.Duration
	Log          *slog.Logger
}

// Ready is what a started lab tells its user.
type Ready struct {
	Kubeconfig  string         `json:"kubeconfig"`
	Dir         string         `json:"dir"`
	APIPort     int            `json:"api_port"`
	GatewayPort int            `json:"gateway_port"`
	StartMS     int64          `json:"start_ms"`
	PIDs        map[string]int `json:"pids"`
}

// Needed lists the programs a rehearsal runs.
func Needed() []string {
	return []string{"kine", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok"}
}

// Run starts a lab, calls ready once it is up, and keeps it until ctx ends or a
// part of it fails. Whatever the end, no process stays, and the directory goes
// unless it is to be kept.
func Run(ctx context.Context, o Options, ready func(Ready) error) (err error) {
	began := time.Now()
	set, err := programs.Find(o.Programs, Needed()...)
	if err != nil {
		return err
	}
	dir, err := labdir.Create(o.Dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Close(o.KeepDir)) }()

	group := process.NewGroup()
	defer func() { err = errors.Join(err, group.Stop(2*time.Second)) }()

	gateway, err := gatewayPort(o.GatewayPort)
	if err != nil {
		return err
	}
	plane, err := controlplane.New(dir, set, group)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plane.Release()) }()

	parts, stopParts := newParts(ctx)
	defer stopParts()
	starting, cancel := context.WithTimeoutCause(parts.ctx, o.StartTimeout, fmt.Errorf("not up after %s", o.StartTimeout))
	defer cancel()

	if err := plane.StartServers(starting); err != nil {
		return err
	}
	o.Log.Debug("API server answers", "after", time.Since(began))
	config, err := plane.Config("supervisor")
	if err != nil {
		return err
	}
	nodes := standin.Nodes{Count: o.Nodes, GPUs: o.GPUs, Product: o.Product}
	if err := plane.StartControllers(); err != nil {
		return err
	}
	if err := populate(starting, config, nodes); err != nil {
		return err
	}
	if err := parts.run("kubelet-standin and local-path-standin", plane, func(ctx context.Context, config *rest.Config) error {
		return standin.Run(ctx, standin.Options{Config: config, Delays: o.Delays, Nodes: nodes.Names(), Log: o.Log})
	}); err != nil {
		return err
	}
	if err := parts.run("actors", plane, func(ctx context.Context, config *rest.Config) error {
		return startActors(ctx, o, config, plane.EgressSocket(), gateway)
	}); err != nil {
		return err
	}
	if err := plane.UntilReady(starting); err != nil {
		return parts.reason(err)
	}
	o.Log.Debug("API server ready", "after", time.Since(began))
	if err := untilUsable(starting, config, nodes, group); err != nil {
		return parts.reason(err)
	}
	if err := untilServed(starting, plane.EgressSocket()); err != nil {
		return parts.reason(err)
	}
	pids := group.PIDs()
	pids["supervisor"] = os.Getpid()
	if err := ready(Ready{
		Kubeconfig: plane.Kubeconfig(), Dir: dir.Path, APIPort: plane.Port(), GatewayPort: gateway,
		StartMS: time.Since(began).Milliseconds(), PIDs: pids,
	}); err != nil {
		return fmt.Errorf("telling that the lab is up: %w", err)
	}
	err = group.Wait(parts.ctx)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil // asked to stop
	}
	return parts.reason(err)
}

// populate makes what a cluster has before anything is installed into it.
func populate(ctx context.Context, config *rest.Config, nodes standin.Nodes) error {
	core, err := corev1client.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	storage, err := storagev1client.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	if err := nodes.Create(ctx, core.Nodes()); err != nil {
		return err
	}
	return standin.CreateStorageClass(ctx, storage.StorageClasses())
}

// untilUsable waits until a pod could be created and scheduled.
func untilUsable(ctx context.Context, config *rest.Config, nodes standin.Nodes, group *process.Group) error {
	core, err := corev1client.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	check := func() error {
		// Admission refuses pods until the controller manager has made this one.
		if _, err := core.ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{}); err != nil {
			return fmt.Errorf("looking for the default service account: %w", err)
		}
		for _, name := range nodes.Names() {
			node, err := core.Nodes().Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return fmt.Errorf("looking for node %s: %w", name, err)
			}
			if !usable(node) {
				return fmt.Errorf("node %s is not Ready or still tainted", name)
			}
		}
		return nil
	}
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case c := <-group.Died():
			return c.DiedError()
		case <-ctx.Done():
			return fmt.Errorf("waiting for the nodes: %w (last: %w)", context.Cause(ctx), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func usable(node *corev1.Node) bool {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return len(node.Spec.Taints) == 0
		}
	}
	return false
}

// gatewayPort takes the port the gateway's stand-in will listen on.
func gatewayPort(want int) (int, error) {
	l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", want))
	if err != nil {
		return 0, fmt.Errorf("taking the gateway's port: %w", err)
	}
	port := 0
	if addr, ok := l.Addr().(*net.TCPAddr); ok {
		port = addr.Port
	}
	if err := l.Close(); err != nil {
		return 0, fmt.Errorf("taking the gateway's port: %w", err)
	}
	return port, nil
}
