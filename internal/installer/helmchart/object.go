package helmchart

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	helmv1 "github.com/k3s-io/helm-controller/pkg/apis/helm.cattle.io/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
)

// helmChart is upstream's type.
type helmChart = helmv1.HelmChart

// What helm-controller reads from and writes to objects
// (k3s-io/helm-controller v0.17.9, pkg/controllers/chart/chart.go).
const (
	managedByAnnotation = "helmcharts.cattle.io/managed-by"
	unmanagedAnnotation = "helmcharts.helm.cattle.io/unmanaged"
	chartLabel          = "helmcharts.helm.cattle.io/chart"
	configHashLabel     = "helmcharts.helm.cattle.io/configHash"
	removeFinalizer     = "wrangler.cattle.io/on-helm-chart-remove"

	// By these its library knows its own objects (rancher/wrangler v3.5.1,
	// pkg/apply/desiredset_apply.go).
	ownerKind      = "objectset.rio.cattle.io/owner-gvk"
	ownerName      = "objectset.rio.cattle.io/owner-name"
	ownerNamespace = "objectset.rio.cattle.io/owner-namespace"

	jobContainer = "helm"
)

const (
	// retries is small: what an abort policy left does not get better by itself.
	retries = 2
	// helmTimeout is Helm's own, for hooks.
	helmTimeout = 5 * time.Minute
	// maxContent is what fits into the ConfigMap in which helm-controller hands
	// the archive to its Job.
	maxContent = 1<<20 - 4096
)

func resource() schema.GroupVersionResource {
	return helmv1.SchemeGroupVersion.WithResource("helmcharts")
}

// object builds the HelmChart of a release. The version means nothing to Helm
// when the archive comes along, but it gets into the Job's pod: it tells which
// contents a Job is for.
func (e *Engine) object(r chart.Release, digest string) (*helmChart, error) {
	archive, err := r.Chart.Archive()
	if err != nil {
		return nil, err
	}
	content := base64.StdEncoding.EncodeToString(archive)
	if len(content) > maxContent {
		return nil, &TooLargeError{Name: r.Name, Bytes: len(content)}
	}
	values, err := yaml.Marshal(someValues(r))
	if err != nil {
		return nil, fmt.Errorf("encoding the values of release %s: %w", r.Name, err)
	}
	limit := int32(retries)
	return &helmChart{
		TypeMeta: metav1.TypeMeta{APIVersion: helmv1.SchemeGroupVersion.String(), Kind: "HelmChart"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: Namespace, Name: r.Name,
			Labels: map[string]string{
				cluster.PartOfLabel:    cluster.ManagedByValue,
				cluster.ManagedByLabel: cluster.ManagedByValue,
				chart.DigestLabel:      digest,
			},
		},
		Spec: helmv1.HelmChartSpec{
			TargetNamespace: r.Namespace,
			Version:         versionMark(r.Chart.Version(), digest),
			ChartContent:    content,
			ValuesContent:   string(values),
			JobImage:        e.options.JobImage,
			BackOffLimit:    &limit,
			Timeout:         &metav1.Duration{Duration: helmTimeout},
			FailurePolicy:   helmv1.FailurePolicyAbort,
		},
	}, nil
}

// someValues are the release's, or the chart's own where the release has none:
// an upgrade without any values takes over those of the revision before.
func someValues(r chart.Release) map[string]any {
	if len(r.Values) > 0 {
		return r.Values
	}
	if defaults := r.Chart.Defaults(); len(defaults) > 0 {
		return defaults
	}
	return map[string]any{"global": map[string]any{}}
}

// versionMark adds the digest to a version as build metadata.
func versionMark(version, digest string) string {
	sep := "+"
	if strings.Contains(version, "+") {
		sep = "."
	}
	return version + sep + digest[:12]
}

func ours(c *helmChart) bool { return c.Labels[cluster.ManagedByLabel] == cluster.ManagedByValue }

// held says that helm-controller was told to keep its hands off.
func held(c *helmChart) bool {
	_, ok := c.Annotations[unmanagedAnnotation]
	return ok
}

func claimed(c *helmChart) bool { return c.Annotations[managedByAnnotation] != "" }

func guarded(c *helmChart) bool { return slices.Contains(c.Finalizers, removeFinalizer) }

// served returns a NoControllerError if the cluster has no HelmChart kind.
func (e *Engine) served(ctx context.Context) error {
	_, err := e.client.Dynamic.Resource(resource()).Namespace(Namespace).List(ctx, metav1.ListOptions{Limit: 1})
	switch {
	case apierrors.IsNotFound(err):
		return &NoControllerError{Reason: "the cluster has no kind HelmChart (" + resource().GroupResource().String() + ")"}
	case err != nil:
		return fmt.Errorf("listing HelmCharts: %w", cluster.Classify(err))
	default:
		return nil
	}
}

// read returns the HelmChart of that name, or nil.
func (e *Engine) read(ctx context.Context, name string) (*helmChart, error) {
	live, err := e.client.Dynamic.Resource(resource()).Namespace(Namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // absent is an answer here
	}
	if err != nil {
		return nil, fmt.Errorf("reading HelmChart %s/%s: %w", Namespace, name, cluster.Classify(err))
	}
	return typed(live)
}

func typed(u *unstructured.Unstructured) (*helmChart, error) {
	var c helmChart
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &c); err != nil {
		return nil, fmt.Errorf("reading HelmChart %s/%s: %w", u.GetNamespace(), u.GetName(), err)
	}
	return &c, nil
}

// write applies the HelmChart server-side and returns it as it then is.
func (e *Engine) write(ctx context.Context, c *helmChart) (*helmChart, error) {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(c)
	if err != nil {
		return nil, fmt.Errorf("encoding HelmChart %s/%s: %w", c.Namespace, c.Name, err)
	}
	delete(fields, "status")
	u := &unstructured.Unstructured{Object: fields}
	unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp")
	live, err := e.client.Dynamic.Resource(resource()).Namespace(c.Namespace).Apply(ctx, c.Name, u,
		metav1.ApplyOptions{FieldManager: cluster.FieldManager, Force: true})
	if err != nil {
		return nil, fmt.Errorf("applying HelmChart %s/%s: %w", c.Namespace, c.Name, cluster.Classify(err))
	}
	return typed(live)
}

// hold tells helm-controller to leave a HelmChart alone.
func (e *Engine) hold(ctx context.Context, name string) error {
	return e.annotate(ctx, name, cluster.ManagedByValue)
}

// letGo gives a HelmChart back to helm-controller.
func (e *Engine) letGo(ctx context.Context, name string) error { return e.annotate(ctx, name, nil) }

func (e *Engine) annotate(ctx context.Context, name string, value any) error {
	return e.patch(ctx, name, map[string]any{"metadata": map[string]any{"annotations": map[string]any{unmanagedAnnotation: value}}})
}

func (e *Engine) patch(ctx context.Context, name string, change map[string]any) error {
	raw, err := json.Marshal(change)
	if err != nil {
		return fmt.Errorf("encoding a change of HelmChart %s/%s: %w", Namespace, name, err)
	}
	_, err = e.client.Dynamic.Resource(resource()).Namespace(Namespace).Patch(ctx, name, types.MergePatchType, raw,
		metav1.PatchOptions{FieldManager: cluster.FieldManager})
	if err != nil {
		return fmt.Errorf("changing HelmChart %s/%s: %w", Namespace, name, cluster.Classify(err))
	}
	return nil
}

// dropFinalizer takes helm-controller's finalizer off, so that deleting the
// HelmChart uninstalls nothing.
func (e *Engine) dropFinalizer(ctx context.Context, name string) error {
	for {
		live, err := e.read(ctx, name)
		if err != nil || live == nil || !guarded(live) {
			return err
		}
		rest := slices.DeleteFunc(slices.Clone(live.Finalizers), func(f string) bool { return f == removeFinalizer })
		err = e.patch(ctx, name, map[string]any{"metadata": map[string]any{
			"finalizers": rest, "resourceVersion": live.ResourceVersion,
		}})
		switch {
		case err == nil, apierrors.IsNotFound(err):
			return nil
		case !apierrors.IsConflict(err):
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// dropBinding removes the ClusterRoleBinding that lets a release's Job do
// everything: nothing collects it when the HelmChart goes.
func (e *Engine) dropBinding(ctx context.Context, name string) error {
	bindings := e.client.Kube.RbacV1().ClusterRoleBindings()
	full := "helm-" + Namespace + "-" + name
	binding, err := bindings.Get(ctx, full, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading ClusterRoleBinding %s: %w", full, cluster.Classify(err))
	}
	// No owner reference: cluster-wide objects can't have a namespaced owner.
	if binding.Annotations[ownerKind] != helmv1.SchemeGroupVersion.String()+", Kind=HelmChart" ||
		binding.Annotations[ownerNamespace] != Namespace || binding.Annotations[ownerName] != name {
		return nil
	}
	err = bindings.Delete(ctx, full, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &binding.UID}})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting ClusterRoleBinding %s: %w", full, cluster.Classify(err))
	}
	return nil
}

// Detect says whether helm-controller serves the cluster: its CRD is established
// and something shows that it runs. k3s and RKE2 carry it inside unless a server
// was started without; elsewhere it holds a Lease.
func Detect(ctx context.Context, client *cluster.Client) (bool, error) {
	crds := client.Dynamic.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	crd, err := crds.Get(ctx, resource().GroupResource().String(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking for the HelmChart kind: %w", cluster.Classify(err))
	}
	if !established(crd) {
		return false, nil
	}
	if _, build, ok := strings.Cut(client.Version, "+"); ok && (strings.HasPrefix(build, "k3s") || strings.HasPrefix(build, "rke2")) {
		return switchedOn(ctx, client)
	}
	lease, err := client.Kube.CoordinationV1().Leases(Namespace).Get(ctx, "helm-controller-lock", metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading helm-controller's Lease: %w", cluster.Classify(err))
	}
	if lease.Spec.RenewTime == nil || lease.Spec.LeaseDurationSeconds == nil {
		return false, nil
	}
	lasts := 2 * time.Duration(*lease.Spec.LeaseDurationSeconds) * time.Second
	return time.Since(lease.Spec.RenewTime.Time) < lasts, nil
}

func established(crd *unstructured.Unstructured) bool {
	conditions, _, _ := unstructured.NestedSlice(crd.Object, "status", "conditions")
	return slices.ContainsFunc(conditions, func(c any) bool {
		m, ok := c.(map[string]any)
		return ok && m["type"] == "Established" && m["status"] == "True"
	})
}

// switchedOn looks at the arguments that k3s records on its nodes: the CRD of an
// earlier start stays when the controller is switched off.
func switchedOn(ctx context.Context, client *cluster.Client) (bool, error) {
	nodes, err := client.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return false, fmt.Errorf("listing nodes: %w", cluster.Classify(err))
	}
	for _, n := range nodes.Items {
		for _, key := range slices.Sorted(maps.Keys(n.Annotations)) {
			if key == "k3s.io/node-args" || key == "rke2.io/node-args" {
				off, err := withoutController(n.Annotations[key])
				if err != nil {
					return false, fmt.Errorf("reading annotation %s of node %s: %w", key, n.Name, err)
				}
				if off {
					return false, nil
				}
			}
		}
	}
	return true, nil
}

func withoutController(raw string) (bool, error) {
	var args []string
	if err := json.Unmarshal([]byte(raw), &args); err != nil {
		return false, errors.Join(errors.New("not a list of arguments"), err)
	}
	for i, arg := range args {
		name, value, valued := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if name != "disable-helm-controller" {
			continue
		}
		if !valued && i+1 < len(args) && !strings.HasPrefix(args[i+1], "-") {
			value = args[i+1]
		}
		if value != "false" {
			return true, nil
		}
	}
	return false, nil
}
