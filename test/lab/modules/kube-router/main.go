// Command kube-router-netpol is kube-router's network policy controller on its own,
// as k3s runs it inside its agent: no routes, no service proxy. Their packages (BGP,
// IPVS, a cloud's client) take longer to compile than all the rest.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
)

func main() {
	klog.InitFlags(flag.CommandLine)
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server")
	node := flag.String("hostname-override", "", "the node's name")
	services := flag.String("service-cluster-ip-range", "", "the addresses of Services")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *kubeconfig, *node, *services); err != nil {
		fmt.Fprintln(os.Stderr, "kube-router-netpol:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, kubeconfig, node, services string) error {
	rest, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return fmt.Errorf("reading the kubeconfig: %w", err)
	}
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	config := options.NewKubeRouterConfig()
	config.RunFirewall, config.EnableIPv4 = true, true
	config.HostnameOverride = node
	config.ClusterIPCIDRs = []string{services}

	factory := informers.NewSharedInformerFactory(client, 0)
	pods := factory.Core().V1().Pods().Informer()
	namespaces := factory.Core().V1().Namespaces().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()
	factory.Start(ctx.Done())
	syncing, cancel := context.WithTimeout(ctx, config.CacheSyncTimeout)
	defer cancel()
	if !cache.WaitForCacheSync(syncing.Done(), pods.HasSynced, namespaces.HasSynced, policies.HasSynced) {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("listing pods, namespaces and policies: not done after %s", config.CacheSyncTimeout)
	}
	tables, sets, err := netpol.NewIPTablesHandlers(config)
	if err != nil {
		return fmt.Errorf("looking for iptables and ipset: %w", err)
	}
	// It wants the node's address, which kubelet reports a moment after it has registered.
	var controller *netpol.NetworkPolicyController
	for deadline := time.Now().Add(time.Minute); ; {
		controller, err = netpol.NewNetworkPolicyController(client, config, pods, policies, namespaces, &sync.Mutex{}, tables, sets)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("making the controller: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(500 * time.Millisecond):
		}
	}
	_, err1 := pods.AddEventHandler(controller.PodEventHandler)
	_, err2 := namespaces.AddEventHandler(controller.NamespaceEventHandler)
	_, err3 := policies.AddEventHandler(controller.NetworkPolicyEventHandler)
	if err := errors.Join(err1, err2, err3); err != nil {
		return fmt.Errorf("watching: %w", err)
	}

	health, err := healthcheck.NewHealthController(config)
	if err != nil {
		return fmt.Errorf("making the health controller: %w", err)
	}
	health.SetAlive()
	// The controller blocks until its heartbeats are taken.
	beats := make(chan *healthcheck.ControllerHeartbeat, 10)
	var running sync.WaitGroup
	running.Add(2)
	go health.RunCheck(beats, ctx.Done(), &running)
	go controller.Run(beats, ctx.Done(), &running)
	running.Wait()
	return nil
}
