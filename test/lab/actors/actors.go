// Package actors answers, in a rehearsal, what the operators of a real box would answer.
//
// A rehearsal has a real API server, controller manager and scheduler, but its
// nodes only pretend to run pods. Nothing runs in them, so nobody would ever
// mark a Gateway programmed or unseal a Vault. Each actor here stands in for
// one such program: it waits until that program's pods are ready, then writes
// what the program would write, as the program's own ServiceAccount (so a
// missing RBAC rule shows), through the real API server. Webhooks, aggregated
// APIs and proxied Services are answered too, over the API server's egress
// socket.
//
// Everything an actor writes on carries the annotation llmbox.dev/simulated-by,
// everything it answers over HTTP the header X-Llmbox-Simulated-By.
//
// The package must not know llmbox: it imports nothing of it and reads only
// what a cluster shows to everybody. An actor answers readiness; it proves
// nothing about the program it stands for.
package actors

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// Annotation names, on an object, the actors that answered on it, separated by ", ".
const Annotation = "llmbox.dev/simulated-by"

// Header names, in an HTTP answer, the actors it came through.
const Header = "X-Llmbox-Simulated-By"

// Options says which cluster the actors play in and what machine they pretend.
type Options struct {
	// Config reaches the API server with rights to impersonate ServiceAccounts
	// and to annotate any object (the rehearsal's own administrator).
	Config *rest.Config
	// EgressSocket is the path of the Unix socket named in the API server's
	// EgressSelectorConfiguration (HTTPConnect over UDS, selection "cluster").
	// It is made at once, before the API server answers.
	EgressSocket string
	// GatewayPort, if not zero, is bound on 127.0.0.1 instead of the port of a
	// Gateway's first listener. Zero binds the port the Gateway itself names.
	GatewayPort int
	// GPUs is what every node offers once the device plugin would run; 0 is a
	// machine without a GPU.
	GPUs int
	// ProductName is the GPU's name as NVML prints it ("NVIDIA H100 80GB HBM3").
	ProductName string
	// MemoryMiB is the memory of one GPU in MiB.
	MemoryMiB int64
	// Log gets what the actors do; nil discards it.
	Log *slog.Logger
}

// Start plays every actor until ctx ends. It returns nil when ctx was the
// reason, or the error that kept it from starting.
func Start(ctx context.Context, o Options) error {
	if o.Config == nil {
		return errors.New("starting actors: no client configuration")
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	listener, err := listenUnix(ctx, o.EgressSocket)
	if err != nil {
		return err
	}
	defer func() { _ = listener.Close() }()

	p, err := newPlane(o)
	if err != nil {
		return err
	}
	vault := newVault(p)
	cast := []*actor{
		newGPUOperator(p, o),
		newEnvoyGateway(p, o),
		newModelServer(p),
		newPrometheusOperator(p),
		newGrafana(p),
		newKEDA(p),
		vault.actor(),
		vault.unsealer(),
		newExternalSecrets(p, vault),
		newKyverno(p),
	}
	var work sync.WaitGroup
	defer func() {
		cancel()
		work.Wait()
		for _, a := range cast {
			if a.stop != nil {
				a.stop()
			}
		}
	}()
	work.Go(func() { p.directory.serve(ctx, listener) })
	if err := p.waitForServer(ctx); err != nil {
		return err
	}
	p.play(ctx, &work, cast)
	o.Log.Info("actors are on", "count", len(cast))
	<-ctx.Done()
	return nil
}

// listenUnix makes the egress socket, in place of one a killed run left behind.
func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	if path == "" {
		return nil, errors.New("starting actors: no egress socket")
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("removing old egress socket: %w", err)
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listening on egress socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("restricting egress socket: %w", err), listener.Close())
	}
	return listener, nil
}

func newPlane(o Options) (*plane, error) {
	config := rest.CopyConfig(o.Config)
	// The actors are many programs behind one client: client-go's default of
	// five requests a second would make them wait for each other.
	config.QPS, config.Burst = 500, 1000
	config.UserAgent = "llmbox-rehearsal-actors"
	config.WarningHandler = rest.NoWarnings{}
	admin, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making client: %w", err)
	}
	meta, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making metadata client: %w", err)
	}
	ca, err := newAuthority(time.Now())
	if err != nil {
		return nil, err
	}
	p := &plane{
		log: o.Log, config: config, admin: admin, meta: meta, ca: ca,
		sources: map[kind]*source{}, acting: map[string]dynamic.Interface{},
	}
	p.directory = &directory{plane: p, servers: map[address]*server{}}
	return p, nil
}
