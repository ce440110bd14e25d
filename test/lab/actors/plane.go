package actors

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// kind is a resource the actors read or write, as "resource.version.group".
type kind string

const (
	nodes           kind = "nodes.v1."
	namespaces      kind = "namespaces.v1."
	pods            kind = "pods.v1."
	services        kind = "services.v1."
	secrets         kind = "secrets.v1."
	configMaps      kind = "configmaps.v1."
	serviceAccounts kind = "serviceaccounts.v1."
	endpointSlices  kind = "endpointslices.v1.discovery.k8s.io"
	deployments     kind = "deployments.v1.apps"
	statefulSets    kind = "statefulsets.v1.apps"
	daemonSets      kind = "daemonsets.v1.apps"
	jobs            kind = "jobs.v1.batch"
	autoscalers     kind = "horizontalpodautoscalers.v2.autoscaling"
	runtimeClasses  kind = "runtimeclasses.v1.node.k8s.io"
	tokenReviews    kind = "tokenreviews.v1.authentication.k8s.io"
	clusterRoles    kind = "clusterroles.v1.rbac.authorization.k8s.io"
	claims          kind = "persistentvolumeclaims.v1."
	apiServices     kind = "apiservices.v1.apiregistration.k8s.io"
	validatingHooks kind = "validatingwebhookconfigurations.v1.admissionregistration.k8s.io"
	mutatingHooks   kind = "mutatingwebhookconfigurations.v1.admissionregistration.k8s.io"
	definitions     kind = "customresourcedefinitions.v1.apiextensions.k8s.io"
	clusterPolicies kind = "clusterpolicies.v1.nvidia.com"
	gatewayClasses  kind = "gatewayclasses.v1.gateway.networking.k8s.io"
	gateways        kind = "gateways.v1.gateway.networking.k8s.io"
	httpRoutes      kind = "httproutes.v1.gateway.networking.k8s.io"
	envoyProxies    kind = "envoyproxies.v1alpha1.gateway.envoyproxy.io"
	securityPols    kind = "securitypolicies.v1alpha1.gateway.envoyproxy.io"
	backendPols     kind = "backendtrafficpolicies.v1alpha1.gateway.envoyproxy.io"
	clientPols      kind = "clienttrafficpolicies.v1alpha1.gateway.envoyproxy.io"
	prometheuses    kind = "prometheuses.v1.monitoring.coreos.com"
	alertmanagers   kind = "alertmanagers.v1.monitoring.coreos.com"
	serviceMonitors kind = "servicemonitors.v1.monitoring.coreos.com"
	podMonitors     kind = "podmonitors.v1.monitoring.coreos.com"
	scaledObjects   kind = "scaledobjects.v1alpha1.keda.sh"
	secretStores    kind = "clustersecretstores.v1.external-secrets.io"
	externalSecrets kind = "externalsecrets.v1.external-secrets.io"
	validatingPols  kind = "validatingpolicies.v1.policies.kyverno.io"
	mutatingPols    kind = "mutatingpolicies.v1.policies.kyverno.io"
)

func (k kind) gvr() schema.GroupVersionResource {
	gvr, _ := schema.ParseResourceArg(string(k))
	return *gvr
}

// custom says whether a CRD must exist before the kind can be watched.
func (k kind) custom() bool {
	return !scheme.Scheme.IsGroupRegistered(k.gvr().Group) && k != apiServices && k != definitions
}

// plane is the part of the cluster the actors share: one watch per kind, a
// client per ServiceAccount, the certificate authority and the HTTP servers.
type plane struct {
	log       *slog.Logger
	config    *rest.Config
	admin     dynamic.Interface
	meta      metadata.Interface
	ca        *authority
	directory *directory
	cast      []*actor

	mu      sync.Mutex
	sources map[kind]*source
	acting  map[string]dynamic.Interface
}

// source is one running watch.
type source struct {
	informer cache.SharedIndexInformer
	cancel   context.CancelFunc
}

// actor is one stand-in. Its reconcile looks at the whole of what it watches
// and must be safe to run at any time.
type actor struct {
	name      string
	watches   []kind
	reconcile func(context.Context) error
	// period wakes the actor when nothing changed; 0 never does.
	period time.Duration
	// stop, if set, gives back what the actor holds; called after the last reconcile.
	stop func()
	wake chan struct{}
}

func (a *actor) signal() {
	select {
	case a.wake <- struct{}{}:
	default: // already signalled
	}
}

// waitForServer blocks until the API server says it is ready.
func (p *plane) waitForServer(ctx context.Context) error {
	client, err := rest.UnversionedRESTClientFor(dynamic.ConfigFor(p.config))
	if err != nil {
		return fmt.Errorf("making client: %w", err)
	}
	for {
		err := client.Get().AbsPath("/readyz").Timeout(5 * time.Second).Do(ctx).Error()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil // told to stop before there was anything to do
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// play starts the watches and one loop per actor.
func (p *plane) play(ctx context.Context, work *sync.WaitGroup, cast []*actor) {
	p.cast = cast
	wanted := map[kind]bool{services: true, endpointSlices: true, pods: true, nodes: true}
	for _, a := range cast {
		a.wake = make(chan struct{}, 1)
		a.signal()
		for _, k := range a.watches {
			wanted[k] = true
		}
	}
	custom := map[string]kind{}
	for k := range wanted {
		if k.custom() {
			custom[k.gvr().GroupResource().String()] = k
			continue
		}
		p.watch(ctx, work, k)
	}
	p.watchDefinitions(ctx, work, custom)
	for _, a := range cast {
		work.Go(func() { p.run(ctx, a) })
	}
}

// run wakes one actor whenever something it watches changed.
func (p *plane) run(ctx context.Context, a *actor) {
	const fastest, slowest = 50 * time.Millisecond, 3 * time.Second
	retry, lastError := fastest, ""
	var tick <-chan time.Time
	if a.period > 0 {
		ticker := time.NewTicker(a.period)
		defer ticker.Stop()
		tick = ticker.C
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick:
		case <-a.wake:
		}
		// One apply brings many events; a short pause makes one pass of them.
		if !pause(ctx, 5*time.Millisecond) {
			return
		}
		err := a.reconcile(ctx)
		if err == nil {
			retry, lastError = fastest, ""
			continue
		}
		if ctx.Err() != nil {
			return
		}
		if text := err.Error(); !passing(err) && text != lastError {
			lastError = text
			p.log.Warn("actor could not answer", "actor", a.name, "error", text)
		}
		time.AfterFunc(retry, a.signal)
		retry = min(2*retry, slowest)
	}
}

// errWaiting is for a state that was already written where people look.
var errWaiting = errors.New("waiting")

// passing says whether an error is ordinary in a cluster that changes.
func passing(err error) bool {
	return errors.Is(err, errWaiting) || apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) ||
		apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
}

func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// watch starts the informer of a kind unless it runs.
func (p *plane) watch(ctx context.Context, work *sync.WaitGroup, k kind) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.sources[k] != nil {
		return
	}
	informer := dynamicinformer.NewFilteredDynamicInformer(p.admin, k.gvr(), metav1.NamespaceAll, 0,
		cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}, nil).Informer()
	_ = informer.SetTransform(func(in any) (any, error) {
		if o, ok := in.(*unstructured.Unstructured); ok {
			o.SetManagedFields(nil)
		}
		return in, nil
	})
	signal := func() {
		for _, a := range p.cast {
			if slices.Contains(a.watches, k) {
				a.signal()
			}
		}
	}
	_, _ = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { signal() },
		UpdateFunc: func(any, any) { signal() },
		DeleteFunc: func(any) { signal() },
	})
	ctx, cancel := context.WithCancel(ctx)
	p.sources[k] = &source{informer: informer, cancel: cancel}
	work.Go(func() { informer.RunWithContext(ctx) })
}

// unwatch ends the informer of a kind whose CRD is gone.
func (p *plane) unwatch(k kind) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.sources[k]; s != nil {
		s.cancel()
		delete(p.sources, k)
	}
}

// watchDefinitions starts the watch of a custom kind as soon as it is served
// and ends it with its CRD. Only the CRDs' metadata is read: their schemas are
// megabytes.
func (p *plane) watchDefinitions(ctx context.Context, work *sync.WaitGroup, custom map[string]kind) {
	informer := metadatainformer.NewFilteredMetadataInformer(p.meta, definitions.gvr(), metav1.NamespaceAll, 0, cache.Indexers{}, nil).Informer()
	var probing sync.Map
	probe := func(in any) {
		o, ok := in.(*metav1.PartialObjectMetadata)
		if !ok {
			return
		}
		// A CRD is named plural.group, as a GroupResource prints itself.
		k, ok := custom[schema.ParseGroupResource(o.Name).String()]
		if !ok || o.DeletionTimestamp != nil || p.indexer(k) != nil {
			return
		}
		if _, busy := probing.LoadOrStore(k, true); busy {
			return
		}
		work.Go(func() {
			defer probing.Delete(k)
			for range 200 {
				if _, err := p.admin.Resource(k.gvr()).List(ctx, metav1.ListOptions{Limit: 1}); err == nil {
					p.watch(ctx, work, k)
					return
				}
				if !pause(ctx, 50*time.Millisecond) {
					return
				}
			}
		})
	}
	_, _ = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    probe,
		UpdateFunc: func(_, in any) { probe(in) },
		DeleteFunc: func(in any) {
			if gone, ok := in.(cache.DeletedFinalStateUnknown); ok {
				in = gone.Obj
			}
			if o, ok := in.(*metav1.PartialObjectMetadata); ok {
				if k, ok := custom[o.Name]; ok {
					p.unwatch(k)
				}
			}
		},
	})
	work.Go(func() { informer.RunWithContext(ctx) })
}

func (p *plane) indexer(k kind) cache.Indexer {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.sources[k]; s != nil {
		return s.informer.GetIndexer()
	}
	return nil
}

// get reads from the watch; nil is absent. The result is shared: read only.
func (p *plane) get(k kind, namespace, name string) *unstructured.Unstructured {
	indexer := p.indexer(k)
	if indexer == nil {
		return nil
	}
	key := name
	if namespace != "" {
		key = namespace + "/" + name
	}
	found, ok, err := indexer.GetByKey(key)
	if err != nil || !ok {
		return nil
	}
	o, _ := found.(*unstructured.Unstructured)
	return o
}

// list reads from the watch, in a stable order; namespace "" is all of them.
func (p *plane) list(k kind, namespace string) []*unstructured.Unstructured {
	indexer := p.indexer(k)
	if indexer == nil {
		return nil
	}
	var found []any
	if namespace == "" {
		found = indexer.List()
	} else {
		found, _ = indexer.ByIndex(cache.NamespaceIndex, namespace)
	}
	out := make([]*unstructured.Unstructured, 0, len(found))
	for _, f := range found {
		if o, ok := f.(*unstructured.Unstructured); ok {
			out = append(out, o)
		}
	}
	slices.SortFunc(out, func(a, b *unstructured.Unstructured) int {
		return compare(a.GetNamespace(), b.GetNamespace(), a.GetName(), b.GetName())
	})
	return out
}

// as is a client with the rights of a ServiceAccount and no more.
func (p *plane) as(namespace, account string) (dynamic.Interface, error) {
	if account == "" {
		account = "default"
	}
	user := "system:serviceaccount:" + namespace + ":" + account
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.acting[user]; c != nil {
		return c, nil
	}
	config := rest.CopyConfig(p.config)
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{
		"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"}}
	c, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making client of %s: %w", user, err)
	}
	p.acting[user] = c
	return c, nil
}

// role is a stand-in at work: its name and the client of the program it plays.
type role struct {
	*plane
	name   string
	client dynamic.Interface
	spec   map[string]any // the pod spec of the workload played
	// applies is set for a program that writes by server-side apply, and so has
	// the rights to create and patch but not to update.
	applies bool
}

// standIn takes the part of a workload. ok is false until it is available: nothing
// would answer before.
func (p *plane) standIn(name string, k kind, namespace, workload string) (*role, bool, error) {
	o := p.get(k, namespace, workload)
	if o == nil || !available(k, o) {
		return nil, false, nil
	}
	spec := sub(o.Object, "spec", "template", "spec")
	client, err := p.as(namespace, str(spec, "serviceAccountName"))
	if err != nil {
		return nil, false, err
	}
	return &role{plane: p, name: name, client: client, spec: spec}, true, nil
}

// available is what a workload's controller says of it.
func available(k kind, o *unstructured.Unstructured) bool {
	if o.GetDeletionTimestamp() != nil || integer(o.Object, "status", "observedGeneration") < o.GetGeneration() {
		return false
	}
	switch k {
	case daemonSets:
		return integer(o.Object, "status", "numberAvailable") > 0
	case deployments, statefulSets:
		return integer(o.Object, "status", "availableReplicas") > 0
	}
	return false
}

// mark writes the annotation, with the lab's own rights: the annotation is
// the lab's, not the program's. It returns the newest resource version it knows.
func (r *role) mark(ctx context.Context, k kind, o *unstructured.Unstructured) (string, error) {
	value, changed := withActor(o.GetAnnotations()[Annotation], r.name)
	if !changed {
		return o.GetResourceVersion(), nil
	}
	patch := map[string]any{"metadata": map[string]any{"annotations": map[string]any{Annotation: value}}}
	marked, err := mergePatch(ctx, r.resource(r.admin, k, o.GetNamespace()), o.GetName(), patch)
	if err != nil {
		return "", fmt.Errorf("marking %s %s: %w", k.gvr().Resource, o.GetName(), err)
	}
	return marked.GetResourceVersion(), nil
}

// status marks the object and then lets edit change a copy of its status.
// The order matters: who sees the status must also see who answered.
func (r *role) status(ctx context.Context, k kind, o *unstructured.Unstructured, edit func(status map[string]any)) error {
	if o.GetDeletionTimestamp() != nil {
		return nil
	}
	changed, err := edited(o, "status", edit)
	if err != nil || changed == nil {
		return err
	}
	version, err := r.mark(ctx, k, o)
	if err != nil {
		return err
	}
	changed.SetResourceVersion(version)
	if _, err := r.resource(r.client, k, o.GetNamespace()).UpdateStatus(ctx, changed, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("updating status of %s %s: %w", k.gvr().Resource, o.GetName(), err)
	}
	return nil
}

// update changes the object itself, as the program does, if edit changes it.
func (r *role) update(ctx context.Context, k kind, o *unstructured.Unstructured, edit func(o map[string]any)) error {
	changed, err := edited(o, "", func(m map[string]any) {
		edit(m)
		annotate(m, r.name)
	})
	if err != nil || changed == nil {
		return err
	}
	if _, err := r.resource(r.client, k, o.GetNamespace()).Update(ctx, changed, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("updating %s %s: %w", k.gvr().Resource, o.GetName(), err)
	}
	return nil
}

// ensure makes an object the program would make, and brings it up to date when
// what it was made from has changed.
func (r *role) ensure(ctx context.Context, k kind, desired map[string]any) error {
	const inputs = "llmbox.dev/simulated-inputs"
	annotate(desired, r.name)
	o, err := normal(desired)
	if err != nil {
		return err
	}
	sum := digest(o.Object)
	annotations := o.GetAnnotations()
	annotations[inputs] = sum
	o.SetAnnotations(annotations)
	client := r.resource(r.client, k, o.GetNamespace())
	live := r.get(k, o.GetNamespace(), o.GetName())
	switch {
	case live != nil && (live.GetDeletionTimestamp() != nil || live.GetAnnotations()[inputs] == sum):
		return nil
	case r.applies:
		_, err = client.Apply(ctx, o.GetName(), o, metav1.ApplyOptions{FieldManager: r.name, Force: true})
	case live == nil:
		_, err = client.Create(ctx, o, metav1.CreateOptions{})
	default:
		o.SetResourceVersion(live.GetResourceVersion())
		_, err = client.Update(ctx, o, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("writing %s %s: %w", k.gvr().Resource, o.GetName(), err)
	}
	return nil
}

// finalizer adds or removes one of the program's own finalizers.
func (r *role) finalizer(ctx context.Context, k kind, o *unstructured.Unstructured, name string, want bool) error {
	if slices.Contains(o.GetFinalizers(), name) == want || (want && o.GetDeletionTimestamp() != nil) {
		return nil
	}
	return r.update(ctx, k, o, func(m map[string]any) {
		u := unstructured.Unstructured{Object: m}
		if want {
			u.SetFinalizers(append(u.GetFinalizers(), name))
			return
		}
		u.SetFinalizers(slices.DeleteFunc(u.GetFinalizers(), func(f string) bool { return f == name }))
	})
}

func (p *plane) resource(client dynamic.Interface, k kind, namespace string) dynamic.ResourceInterface {
	if namespace == "" {
		return client.Resource(k.gvr())
	}
	return client.Resource(k.gvr()).Namespace(namespace)
}
