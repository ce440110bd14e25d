package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/hashicorp/cli"
	"github.com/hashicorp/go-hclog"
	wrapping "github.com/hashicorp/go-kms-wrapping/v2"
	"github.com/hashicorp/go-kms-wrapping/v2/aead"
	"github.com/hashicorp/vault/audit"
	"github.com/hashicorp/vault/command/server"
	"github.com/hashicorp/vault/helper/logging"
	"github.com/hashicorp/vault/helper/metricsutil"
	vaulthttp "github.com/hashicorp/vault/http"
	"github.com/hashicorp/vault/internalshared/configutil"
	"github.com/hashicorp/vault/physical/raft"
	"github.com/hashicorp/vault/sdk/logical"
	"github.com/hashicorp/vault/sdk/physical"
	"github.com/hashicorp/vault/sdk/physical/file"
	"github.com/hashicorp/vault/vault"
	"github.com/hashicorp/vault/vault/seal"
	"github.com/hashicorp/vault/version"
)

// stopWithin is less than a pod is given to end.
const stopWithin = 10 * time.Second

type instance struct {
	core      *vault.Core
	config    *server.Config
	logger    hclog.InterceptLogger
	listeners []net.Listener
}

func newServer(ctx context.Context, config *server.Config, logs io.Writer) (*instance, error) {
	logger, err := newLogger(config, logs)
	if err != nil {
		return nil, err
	}
	backend, err := storage(config, logger)
	if err != nil {
		return nil, err
	}
	name, err := clusterName(ctx, config, backend)
	if err != nil {
		return nil, err
	}
	inmem, sink, prometheus, err := configutil.SetupTelemetry(&configutil.SetupTelemetryOpts{
		Config: config.Telemetry, Ui: &cli.BasicUi{Writer: logs},
		ServiceName: "vault", DisplayName: "Vault", UserAgent: "vault/" + version.Version, ClusterName: name,
	})
	if err != nil {
		return nil, fmt.Errorf("setting up the metrics: %w", err)
	}
	shamir, err := shamirSeal(ctx, backend, logger)
	if err != nil {
		return nil, err
	}
	settings := &vault.CoreConfig{
		RawConfig: config, Logger: logger, AllLoggers: []hclog.Logger{logger}, LogLevel: config.LogLevel,
		Physical: backend, StorageType: config.Storage.Type, Seal: shamir,
		AuditBackends:   map[string]audit.Factory{"file": audit.NewFileBackend},
		LogicalBackends: map[string]logical.Factory{kvPlugin: builtins{}.secrets()[kvPlugin]},
		BuiltinRegistry: builtins{},
		DisableMlock:    config.DisableMlock, DisableCache: config.DisableCache,
		DefaultLeaseTTL: config.DefaultLeaseTTL, MaxLeaseTTL: config.MaxLeaseTTL,
		ClusterName: config.ClusterName, RedirectAddr: config.Storage.RedirectAddr,
		MetricsHelper: metricsutil.NewMetricsHelper(inmem, prometheus), MetricSink: sink,
	}
	if ha, ok := backend.(physical.HABackend); ok {
		settings.HAPhysical, settings.ClusterAddr = ha, config.Storage.ClusterAddr
	}
	core, err := vault.NewCore(settings)
	if err != nil {
		return nil, fmt.Errorf("making the core: %w", err)
	}
	return &instance{core: core, config: config, logger: logger}, nil
}

func newLogger(config *server.Config, logs io.Writer) (hclog.InterceptLogger, error) {
	settings, err := logging.NewLogConfig("vault")
	if err != nil {
		return nil, fmt.Errorf("setting up the log: %w", err)
	}
	if settings.LogLevel, err = logging.ParseLogLevel(config.LogLevel); err != nil {
		return nil, fmt.Errorf("setting up the log: %w", err)
	}
	if settings.LogFormat, err = logging.ParseLogFormat(config.LogFormat); err != nil {
		return nil, fmt.Errorf("setting up the log: %w", err)
	}
	logger, err := logging.Setup(settings, logs)
	if err != nil {
		return nil, fmt.Errorf("setting up the log: %w", err)
	}
	return logger, nil
}

func storage(config *server.Config, logger hclog.Logger) (physical.Backend, error) {
	var open physical.Factory
	switch config.Storage.Type {
	case "file":
		open = file.NewFileBackend
	case "raft":
		if config.ClusterAddr == "" {
			return nil, errors.New("opening the storage: raft needs cluster_addr")
		}
		open = raft.NewRaftBackend
	default:
		return nil, fmt.Errorf("opening the storage: %s is neither file nor raft", config.Storage.Type)
	}
	backend, err := open(config.Storage.Config, logger.Named("storage."+config.Storage.Type))
	if err != nil {
		return nil, fmt.Errorf("opening the storage: %w", err)
	}
	return backend, nil
}

// clusterName is the metrics' label: configured, or what an earlier start left in the open
// for this. On a first start there is none until the core makes one up.
func clusterName(ctx context.Context, config *server.Config, backend physical.Backend) (string, error) {
	if config.ClusterName != "" {
		return config.ClusterName, nil
	}
	entry, err := backend.Get(ctx, "core/cluster/local/name")
	if err != nil {
		return "", fmt.Errorf("reading the cluster's name: %w", err)
	}
	if entry == nil {
		return "", nil
	}
	var stored struct{ Name string }
	if err := json.Unmarshal(entry.Value, &stored); err != nil {
		return "", fmt.Errorf("reading the cluster's name: %w", err)
	}
	return stored.Name, nil
}

// shamirSeal is the seal that people or an unsealer open with key shares.
func shamirSeal(ctx context.Context, backend physical.Backend, logger hclog.Logger) (vault.Seal, error) {
	const kind = string(wrapping.WrapperTypeShamir)
	generation, err := vault.PhysicalSealGenInfo(ctx, backend)
	if err != nil {
		return nil, fmt.Errorf("reading the seal's generation: %w", err)
	}
	if generation == nil {
		generation = &seal.SealGenerationInfo{Generation: 1, Seals: []*configutil.KMS{{Type: kind, Priority: 1, Name: kind}}}
		// There is nothing yet that an earlier seal wrapped.
		generation.SetRewrapped(true)
	}
	access, err := seal.NewAccess(logger, generation, []*seal.SealWrapper{
		seal.NewSealWrapper(aead.NewShamirWrapper(), 1, kind, kind, false, true),
	})
	if err != nil {
		return nil, fmt.Errorf("making the seal: %w", err)
	}
	return vault.NewDefaultSeal(access), nil
}

// serve answers until ctx ends, then closes the listeners and seals the core.
func (s *instance) serve(ctx context.Context) error {
	failed := make(chan error, len(s.config.Listeners))
	var cluster []*net.TCPAddr
	for _, config := range s.config.Listeners {
		if config.Type != configutil.TCP {
			return s.end(fmt.Errorf("listening: a listener of the type %s is not served by Vault's core alone", config.Type))
		}
		limits(&config.MaxRequestSize, vaulthttp.DefaultMaxRequestSize)
		limits(&config.CustomMaxJSONDepth, vaulthttp.CustomMaxJSONDepth)
		limits(&config.CustomMaxJSONStringValueLength, vaulthttp.CustomMaxJSONStringValueLength)
		limits(&config.CustomMaxJSONObjectEntryCount, vaulthttp.CustomMaxJSONObjectEntryCount)
		limits(&config.CustomMaxJSONArrayElementCount, vaulthttp.CustomMaxJSONArrayElementCount)
		if config.MaxRequestDuration == 0 {
			config.MaxRequestDuration = vault.DefaultMaxRequestDuration
		}
		listener, _, _, err := server.NewListener(config, io.Discard, &cli.BasicUi{Writer: io.Discard})
		if err != nil {
			return s.end(fmt.Errorf("listening: %w", err))
		}
		s.listeners = append(s.listeners, listener)
		if config.ClusterAddress != "" {
			address, err := net.ResolveTCPAddr("tcp", config.ClusterAddress)
			if err != nil {
				return s.end(fmt.Errorf("listening for the cluster: %w", err))
			}
			cluster = append(cluster, address)
		}
	}
	// Before anything could unseal.
	s.core.SetClusterListenerAddrs(cluster)
	s.core.SetClusterHandler(vaulthttp.Handler.Handler(&vault.HandlerProperties{
		Core: s.core, ListenerConfig: &configutil.Listener{DisableJSONLimitParsing: true},
	}))
	if s.config.Storage.Type == "raft" {
		if err := s.core.InitiateRetryJoin(ctx); err != nil {
			return s.end(fmt.Errorf("joining raft: %w", err))
		}
	}
	for i, listener := range s.listeners {
		served := &http.Server{
			Handler: vaulthttp.Handler.Handler(&vault.HandlerProperties{
				Core: s.core, ListenerConfig: s.config.Listeners[i], DisablePrintableCheck: s.config.DisablePrintableCheck,
			}),
			ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, IdleTimeout: 5 * time.Minute,
			ErrorLog: s.logger.StandardLogger(nil),
		}
		go func() { failed <- served.Serve(listener) }()
		s.logger.Info("vault's core is serving", "version", version.Version, "address", listener.Addr().String())
	}
	select {
	case <-ctx.Done():
		return s.end(nil)
	case err := <-failed:
		return s.end(fmt.Errorf("serving: %w", err))
	}
}

// limits keeps what is configured and fills in Vault's own bound.
func limits[N ~int64](setting *N, bound N) {
	if *setting == 0 {
		*setting = bound
	}
}

func (s *instance) end(cause error) error {
	for _, listener := range s.listeners {
		_ = listener.Close()
	}
	done := make(chan error, 1)
	go func() { done <- s.core.Shutdown() }()
	select {
	case err := <-done:
		if err != nil {
			return errors.Join(cause, fmt.Errorf("sealing the core: %w", err))
		}
	case <-time.After(stopWithin):
		return errors.Join(cause, fmt.Errorf("sealing the core took longer than %s", stopWithin))
	}
	s.logger.Info("vault's core is sealed and ends")
	return cause
}
