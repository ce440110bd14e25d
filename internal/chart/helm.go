package chart

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/kube"
	"helm.sh/helm/v3/pkg/release"
	"helm.sh/helm/v3/pkg/storage"
	"helm.sh/helm/v3/pkg/storage/driver"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// DigestLabel is kept on each release's record; it tells whether a re-run would
// change anything.
const DigestLabel = "llmbox.dev/digest"

// Change says what applying a release did.
type Change string

// What applying can do to a release.
const (
	Unchanged Change = "unchanged"
	Installed Change = "installed"
	Upgraded  Change = "upgraded"
)

// Outcome is the result of applying a release.
type Outcome struct {
	Change   Change
	Revision int
	// Repaired says what had to be mended first, such as a record that a crash
	// left pending; empty if nothing.
	Repaired string
}

// Record is what the cluster knows of a release.
type Record struct {
	Status   string
	Digest   string
	Revision int
	Version  string
}

// ErrNoRelease means that the cluster has no record of the release.
var ErrNoRelease = errors.New("no such release")

// Cluster is what the Helm engine needs of a cluster.
type Cluster struct {
	REST      *rest.Config
	Discovery discovery.CachedDiscoveryInterface
	Mapper    meta.RESTMapper
	Kube      kubernetes.Interface
}

// Helm applies releases in-process with Helm's own library.
type Helm struct {
	cluster Cluster
	log     *slog.Logger
	caps    *chartutil.Capabilities
}

// NewHelm returns an engine for the cluster, whose version is kubeVersion
// ("v1.36.4+k3s1"). Charts are rendered without regard to the APIs it serves.
func NewHelm(cluster Cluster, kubeVersion string, log *slog.Logger) (*Helm, error) {
	caps := chartutil.DefaultCapabilities.Copy()
	v, err := chartutil.ParseKubeVersion(kubeVersion)
	if err != nil {
		return nil, fmt.Errorf("reading Kubernetes version %q: %w", kubeVersion, err)
	}
	caps.KubeVersion = *v
	return &Helm{cluster: cluster, log: log, caps: caps}, nil
}

// Name implements the installer's engine.
func (h *Helm) Name() string { return "helm" }

// Current returns the newest record of a release, or ErrNoRelease.
func (h *Helm) Current(_ context.Context, namespace, name string) (Record, error) {
	rel, err := h.configure(namespace).Releases.Last(name)
	if errors.Is(err, driver.ErrReleaseNotFound) {
		return Record{}, ErrNoRelease
	}
	if err != nil {
		return Record{}, fmt.Errorf("reading the record of release %s/%s: %w", namespace, name, err)
	}
	return Record{
		Status:   rel.Info.Status.String(),
		Digest:   rel.Labels[DigestLabel],
		Revision: rel.Version,
		Version:  rel.Chart.AppVersion(),
	}, nil
}

// Apply brings the release into the cluster if it differs from what is there.
// It does not wait for workloads: that is the gates' work. Cancelling ctx does
// not tear an apply in half; it returns once the objects are sent.
func (h *Helm) Apply(ctx context.Context, r Release) (Outcome, error) {
	if err := ctx.Err(); err != nil {
		return Outcome{}, err
	}
	digest, err := r.Digest()
	if err != nil {
		return Outcome{}, err
	}
	cfg := h.configure(r.Namespace)
	repaired, err := h.repair(cfg, r, digest)
	if err != nil {
		return Outcome{}, err
	}
	last, err := cfg.Releases.Last(r.Name)
	switch {
	case errors.Is(err, driver.ErrReleaseNotFound):
		return h.install(ctx, cfg, r, digest, repaired)
	case err != nil:
		return Outcome{}, fmt.Errorf("reading the record of release %s/%s: %w", r.Namespace, r.Name, err)
	case last.Info.Status != release.StatusDeployed || last.Labels[DigestLabel] != digest:
		return h.upgrade(ctx, cfg, r, digest, repaired)
	}
	missing, err := missingObject(cfg, last)
	if err != nil {
		return Outcome{}, err
	}
	if missing == "" {
		return Outcome{Change: Unchanged, Revision: last.Version, Repaired: repaired}, nil
	}
	return h.upgrade(ctx, cfg, r, digest, strings.TrimPrefix(repaired+"; "+missing+" was missing", "; "))
}

// missingObject names the first object of the release that somebody deleted:
// the record alone does not tell that a release is whole.
func missingObject(cfg *action.Configuration, rel *release.Release) (string, error) {
	objects, err := cfg.KubeClient.Build(strings.NewReader(rel.Manifest), false)
	if err != nil {
		return "", fmt.Errorf("reading the objects of release %s/%s: %w", rel.Namespace, rel.Name, err)
	}
	var mu sync.Mutex
	missing := ""
	var group errgroup.Group
	group.SetLimit(8)
	for _, info := range objects {
		group.Go(func() error {
			err := info.Get()
			if err == nil {
				return nil
			}
			if !apierrors.IsNotFound(err) {
				return fmt.Errorf("reading %s %s: %w", info.Mapping.GroupVersionKind.Kind, info.Name, err)
			}
			mu.Lock()
			defer mu.Unlock()
			missing = info.Mapping.GroupVersionKind.Kind + " " + info.Name
			return nil
		})
	}
	return missing, group.Wait()
}

func (h *Helm) install(ctx context.Context, cfg *action.Configuration, r Release, digest, repaired string) (Outcome, error) {
	act := action.NewInstall(cfg)
	act.ReleaseName, act.Namespace = r.Name, r.Namespace
	act.Labels = map[string]string{DigestLabel: digest}
	// The API server validates each object itself; the client's copy of the
	// schema costs more CPU than the whole install.
	act.DisableOpenAPIValidation = true
	act.SkipCRDs = false
	act.Timeout = 5 * time.Minute
	rel, err := act.RunWithContext(context.WithoutCancel(ctx), r.Chart.inner, copyMap(r.Values))
	if err != nil {
		return Outcome{}, fmt.Errorf("installing release %s/%s: %w", r.Namespace, r.Name, err)
	}
	return Outcome{Change: Installed, Revision: rel.Version, Repaired: repaired}, nil
}

func (h *Helm) upgrade(ctx context.Context, cfg *action.Configuration, r Release, digest, repaired string) (Outcome, error) {
	before, err := unfinished(cfg, r.Namespace, r.Name)
	if err != nil {
		return Outcome{}, err
	}
	if client, ok := cfg.KubeClient.(*kube.Client); ok {
		cfg.KubeClient = &mergingClient{Client: client, unfinished: before}
	}
	act := action.NewUpgrade(cfg)
	act.Namespace = r.Namespace
	act.Labels = map[string]string{DigestLabel: digest}
	act.DisableOpenAPIValidation = true
	act.ResetValues = true
	act.MaxHistory = 3
	act.Timeout = 5 * time.Minute
	rel, err := act.RunWithContext(context.WithoutCancel(ctx), r.Name, r.Chart.inner, copyMap(r.Values))
	if err != nil {
		return Outcome{}, fmt.Errorf("upgrading release %s/%s: %w", r.Namespace, r.Name, err)
	}
	return Outcome{Change: Upgraded, Revision: rel.Version, Repaired: repaired}, nil
}

// repair turns a record that a crash left half-way into one that Helm accepts.
// A first install of the very same release that never ended loses its record:
// its objects carry the release's name, so the install that follows takes them
// over and the end is the same as if nothing had happened. Any other pending
// record is marked failed, from where the next upgrade starts and removes what
// is no longer wanted. A half-done uninstall is finished.
func (h *Helm) repair(cfg *action.Configuration, r Release, digest string) (string, error) {
	last, err := cfg.Releases.Last(r.Name)
	if errors.Is(err, driver.ErrReleaseNotFound) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("reading the record of release %s/%s: %w", r.Namespace, r.Name, err)
	}
	status := last.Info.Status
	switch {
	case status == release.StatusPendingInstall && last.Version == 1 && last.Labels[DigestLabel] == digest:
		if _, err := cfg.Releases.Delete(r.Name, last.Version); err != nil {
			return "", fmt.Errorf("clearing the unfinished install of release %s/%s: %w", r.Namespace, r.Name, err)
		}
	case status.IsPending():
		last.SetStatus(release.StatusFailed, "interrupted; repaired by llmbox")
		if err := cfg.Releases.Update(last); err != nil {
			return "", fmt.Errorf("marking the unfinished change of release %s/%s: %w", r.Namespace, r.Name, err)
		}
	case status == release.StatusUninstalling:
		if err := h.uninstall(cfg, r.Namespace, r.Name, 5*time.Minute); err != nil {
			return "", err
		}
	default:
		return "", nil
	}
	h.log.Info("repaired a release record", "release", r.Name, "namespace", r.Namespace, "status", status.String())
	return fmt.Sprintf("record was %s", status), nil
}

// Uninstall removes the release and waits until its objects are gone. A release
// that isn't there is no error.
func (h *Helm) Uninstall(ctx context.Context, namespace, name string) error {
	timeout := 5 * time.Minute
	if deadline, ok := ctx.Deadline(); ok {
		timeout = time.Until(deadline)
	}
	return h.uninstall(h.configure(namespace), namespace, name, timeout)
}

func (h *Helm) uninstall(cfg *action.Configuration, namespace, name string, timeout time.Duration) error {
	act := action.NewUninstall(cfg)
	act.Timeout = timeout
	act.Wait = true
	act.IgnoreNotFound = true
	act.DeletionPropagation = "foreground"
	response, err := act.Run(name)
	if err != nil && !errors.Is(err, driver.ErrReleaseNotFound) {
		if response != nil && response.Release != nil {
			if left := stillThere(cfg.KubeClient, response.Release.Manifest); len(left) > 0 {
				return fmt.Errorf("uninstalling release %s/%s: %w; still there: %s", namespace, name, err, strings.Join(left, "; "))
			}
		}
		return fmt.Errorf("uninstalling release %s/%s: %w", namespace, name, err)
	}
	return nil
}

// stillThere names objects of a manifest that have not gone, with what they wait for: Helm says only that its time was over. Some are enough to go on.
func stillThere(client kube.Interface, manifest string) []string {
	const enough = 5
	resources, err := client.Build(strings.NewReader(manifest), false)
	if err != nil {
		return nil
	}
	var left []string
	for _, info := range resources {
		if info.Get() != nil {
			continue
		}
		raw, err := runtime.DefaultUnstructuredConverter.ToUnstructured(info.Object)
		if err != nil {
			continue
		}
		object := unstructured.Unstructured{Object: raw}
		if object.GetAnnotations()[kube.ResourcePolicyAnno] == kube.KeepPolicy {
			continue
		}
		if len(left) == enough {
			return append(left, "and more")
		}
		left = append(left, waitsFor(&object))
	}
	return left
}

func waitsFor(object *unstructured.Unstructured) string {
	text := object.GetKind() + " " + object.GetName()
	if object.GetDeletionTimestamp() == nil {
		return text + " (somebody has made it again)"
	}
	if finalizers := object.GetFinalizers(); len(finalizers) > 0 {
		text += " (finalizers " + strings.Join(finalizers, ", ") + ")"
	}
	conditions, _, err := unstructured.NestedSlice(object.Object, "status", "conditions")
	if err != nil {
		return text
	}
	for _, c := range conditions {
		// What a CRD says of objects that don't go.
		if m, ok := c.(map[string]any); ok && m["type"] == "Terminating" && m["status"] == "True" {
			text += fmt.Sprintf(": %v", m["message"])
		}
	}
	return text
}

// configure builds Helm's configuration for one namespace out of the clients
// the cluster already has, so that no release reads the discovery documents anew.
func (h *Helm) configure(namespace string) *action.Configuration {
	getter := clientGetter{cluster: h.cluster, namespace: namespace}
	client := kube.New(getter)
	client.Namespace = namespace
	client.Log = h.debugf
	secrets := driver.NewSecrets(h.cluster.Kube.CoreV1().Secrets(namespace))
	secrets.Log = h.debugf
	store := storage.Init(secrets)
	store.Log = h.debugf
	return &action.Configuration{
		RESTClientGetter: getter,
		KubeClient:       client,
		Releases:         store,
		Capabilities:     h.caps,
		Log:              h.debugf,
	}
}

func (h *Helm) debugf(format string, args ...any) {
	h.log.Debug(strings.TrimSpace(fmt.Sprintf(format, args...)), "from", "helm")
}

// clientGetter hands the clients that exist already to Helm.
type clientGetter struct {
	cluster   Cluster
	namespace string
}

// ToRESTConfig hands out a copy: Helm's builder writes the group and version it
// is about to use into the configuration, and releases are applied in parallel.
func (g clientGetter) ToRESTConfig() (*rest.Config, error) {
	return rest.CopyConfig(g.cluster.REST), nil
}

func (g clientGetter) ToDiscoveryClient() (discovery.CachedDiscoveryInterface, error) {
	return g.cluster.Discovery, nil
}

func (g clientGetter) ToRESTMapper() (meta.RESTMapper, error) { return g.cluster.Mapper, nil }

func (g clientGetter) ToRawKubeConfigLoader() clientcmd.ClientConfig {
	return clientcmd.NewDefaultClientConfig(clientcmdapi.Config{}, &clientcmd.ConfigOverrides{
		Context: clientcmdapi.Context{Namespace: g.namespace},
	})
}
