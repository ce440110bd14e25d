// Package cluster talks to a Kubernetes API server: connecting, applying plain
// objects and CRDs, asking whether something is ready and why not, and removing
// it. It must not know which components exist or how charts are rendered.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
)

// The labels and annotations that llmbox writes or reads.
const (
	// ManagedByLabel is on every object that llmbox applies without Helm.
	ManagedByLabel = "app.kubernetes.io/managed-by"
	// ManagedByValue is its value.
	ManagedByValue = "llmbox"
	// PartOfLabel is on every object of the box, Helm's included.
	PartOfLabel = "app.kubernetes.io/part-of"
	// SimulatedByAnnotation names who answered in place of a real part.
	SimulatedByAnnotation = "llmbox.dev/simulated-by"
	// FieldManager is the name under which llmbox owns fields.
	FieldManager = "llmbox"
)

// The ways in which a cluster can't be used at all.
var (
	ErrNoKubeconfig = errors.New("no usable kubeconfig")
	ErrUnreachable  = errors.New("the API server can't be reached")
	ErrUnauthorized = errors.New("the API server does not accept these credentials")
	ErrForbidden    = errors.New("these credentials are not allowed to do that")
)

// Client is a connection to one cluster.
type Client struct {
	REST    *rest.Config
	Kube    kubernetes.Interface
	Dynamic dynamic.Interface
	// Metadata reads and writes objects whose content need not come back.
	Metadata  metadata.Interface
	Discovery discovery.CachedDiscoveryInterface
	Mapper    meta.ResettableRESTMapper
	// Version is what the API server calls itself, such as "v1.36.4+k3s1".
	Version string

	transport http.RoundTripper
	baseURL   *url.URL
}

// Connect reads the kubeconfig (empty: $KUBECONFIG, then the default place),
// picks the context (empty: the current one) and asks the API server for its
// version within timeout.
func Connect(ctx context.Context, kubeconfig, kubecontext string, timeout time.Duration) (*Client, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	if kubeconfig != "" {
		if _, err := os.Stat(kubeconfig); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrNoKubeconfig, err)
		}
		rules = &clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig}
	}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules,
		&clientcmd.ConfigOverrides{CurrentContext: kubecontext}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoKubeconfig, err)
	}
	// The API server has its own priority and fairness; a second limiter in the
	// client only makes a box slower to install.
	cfg.QPS = -1
	cfg.UserAgent = "llmbox"
	cfg.WarningHandlerWithContext = rest.NoWarnings{}
	return New(ctx, cfg, timeout)
}

// New builds a client from a REST configuration and checks that the API server
// answers.
func New(ctx context.Context, cfg *rest.Config, timeout time.Duration) (*Client, error) {
	httpClient, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("building the API client: %w", err)
	}
	kube, err := kubernetes.NewForConfigAndClient(cfg, httpClient)
	if err != nil {
		return nil, fmt.Errorf("building the API client: %w", err)
	}
	dyn, err := dynamic.NewForConfigAndClient(cfg, httpClient)
	if err != nil {
		return nil, fmt.Errorf("building the API client: %w", err)
	}
	meta, err := metadata.NewForConfigAndClient(metadata.ConfigFor(cfg), httpClient)
	if err != nil {
		return nil, fmt.Errorf("building the API client: %w", err)
	}
	disco, err := discovery.NewDiscoveryClientForConfigAndClient(cfg, httpClient)
	if err != nil {
		return nil, fmt.Errorf("building the API client: %w", err)
	}
	cached := memory.NewMemCacheClient(disco)
	c := &Client{
		REST: cfg, Kube: kube, Dynamic: dyn, Metadata: meta, Discovery: cached,
		Mapper:    restmapper.NewDeferredDiscoveryRESTMapper(cached),
		transport: httpClient.Transport,
		baseURL:   disco.RESTClient().Get().URL(),
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if c.Version, err = serverVersion(ctx, kube); err != nil {
		return nil, fmt.Errorf("asking %s for its version: %w", cfg.Host, err)
	}
	return c, nil
}

// serverVersion asks with credentials: /version itself is public on most
// clusters, so a second question finds expired ones.
func serverVersion(ctx context.Context, kube kubernetes.Interface) (string, error) {
	var info struct {
		GitVersion string `json:"gitVersion"`
	}
	raw, err := kube.Discovery().RESTClient().Get().AbsPath("/version").DoRaw(ctx)
	if err != nil {
		return "", Classify(err)
	}
	if err := decodeJSON(raw, &info); err != nil {
		return "", fmt.Errorf("%w: /version is not a Kubernetes answer: %w", ErrUnreachable, err)
	}
	if _, err := kube.Discovery().RESTClient().Get().AbsPath("/apis").DoRaw(ctx); err != nil {
		return "", Classify(err)
	}
	return info.GitVersion, nil
}

// Classify puts one of the package's errors in front of an API or network
// error, so that callers need not know client-go's.
func Classify(err error) error {
	var netErr net.Error
	var urlErr *url.Error
	switch {
	case err == nil:
		return nil
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w: %w", ErrUnauthorized, err)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w: %w", ErrForbidden, err)
	case errors.Is(err, context.Canceled):
		return err
	case errors.As(err, &netErr), errors.As(err, &urlErr), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", ErrUnreachable, err)
	default:
		return err
	}
}
