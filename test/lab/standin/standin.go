// Package standin takes the place of two parts of a node that a rehearsal has
// not: kubelet-standin decides when a simulated pod has pulled and started (KWOK
// then writes its status), local-path-standin makes volumes.
//
// It answers for nodes in general. What stands in for a product's own pods
// (operators, gateways, model servers) is not here but in package actors.
package standin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
)

const (
	provisioner = "llmbox.dev/local-path-standin"

	readyAt     = "llmbox.dev/ready-at"
	completesAt = "llmbox.dev/completes-at"

	selectedNode  = "volume.kubernetes.io/selected-node"
	provisionedBy = "pv.kubernetes.io/provisioned-by"

	workers = 4
)

// Options of Run.
type Options struct {
	Config *rest.Config
	Delays Delays
	// Nodes are the names of the simulated nodes.
	Nodes []string
	Log   *slog.Logger
}

type standins struct {
	core   corev1client.CoreV1Interface
	log    *slog.Logger
	delays Delays
	nodes  map[string]*puller
	queue  workqueue.TypedRateLimitingInterface[item]

	pods, claims, volumes cache.SharedIndexInformer
}

// item is one object to look at.
type item struct{ kind, key string }

// Run serves both stand-ins until ctx ends.
func Run(ctx context.Context, o Options) error {
	core, err := corev1client.NewForConfig(o.Config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	s := &standins{
		core: core, log: o.Log, delays: o.Delays, nodes: map[string]*puller{},
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[item](50*time.Millisecond, 5*time.Second)),
	}
	for _, n := range o.Nodes {
		s.nodes[n] = newPuller(o.Delays)
	}
	client := core.RESTClient()
	if s.pods, err = s.informer(client, "pods", &corev1.Pod{}); err != nil {
		return err
	}
	if s.claims, err = s.informer(client, "persistentvolumeclaims", &corev1.PersistentVolumeClaim{}); err != nil {
		return err
	}
	if s.volumes, err = s.informer(client, "persistentvolumes", &corev1.PersistentVolume{}); err != nil {
		return err
	}
	var wg sync.WaitGroup
	for _, inf := range []cache.SharedIndexInformer{s.pods, s.claims, s.volumes} {
		wg.Go(func() { inf.RunWithContext(ctx) })
	}
	for range workers {
		wg.Go(func() {
			for s.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	s.queue.ShutDown()
	wg.Wait()
	return nil
}

func (s *standins) informer(client rest.Interface, resource string, object runtime.Object) (cache.SharedIndexInformer, error) {
	lw := cache.NewFilteredListWatchFromClient(client, resource, metav1.NamespaceAll, func(*metav1.ListOptions) {})
	inf := cache.NewSharedIndexInformer(lw, object, 0, cache.Indexers{})
	add := func(obj any) {
		if key, err := cache.MetaNamespaceKeyFunc(obj); err == nil {
			s.queue.Add(item{kind: resource, key: key})
		}
	}
	if _, err := inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    add,
		UpdateFunc: func(_, obj any) { add(obj) },
	}); err != nil {
		return nil, fmt.Errorf("watching %s: %w", resource, err)
	}
	return inf, nil
}

func (s *standins) next(ctx context.Context) bool {
	it, quit := s.queue.Get()
	if quit {
		return false
	}
	defer s.queue.Done(it)
	err := s.handle(ctx, it)
	switch {
	case err == nil, apierrors.IsNotFound(err), apierrors.IsConflict(err), errors.Is(err, context.Canceled):
		// Gone, or changed since: the change brings its own event.
		s.queue.Forget(it)
	default:
		s.log.Warn("stand-in", "kind", it.kind, "object", it.key, "error", err)
		s.queue.AddRateLimited(it)
	}
	return true
}

func (s *standins) handle(ctx context.Context, it item) error {
	switch it.kind {
	case "pods":
		if pod, ok := lookup[*corev1.Pod](s.pods, it.key); ok {
			return s.pod(ctx, pod)
		}
	case "persistentvolumeclaims":
		if claim, ok := lookup[*corev1.PersistentVolumeClaim](s.claims, it.key); ok {
			return s.claim(ctx, claim)
		}
	case "persistentvolumes":
		if volume, ok := lookup[*corev1.PersistentVolume](s.volumes, it.key); ok {
			return s.volume(ctx, volume)
		}
	}
	return nil
}

func lookup[T any](inf cache.SharedIndexInformer, key string) (T, bool) {
	var zero T
	obj, ok, err := inf.GetStore().GetByKey(key)
	if err != nil || !ok {
		return zero, false
	}
	typed, ok := obj.(T)
	return typed, ok
}

// pod tells KWOK when a bound pod becomes ready, once.
func (s *standins) pod(ctx context.Context, pod *corev1.Pod) error {
	node, ours := s.nodes[pod.Spec.NodeName]
	if !ours || pod.DeletionTimestamp != nil || pod.Annotations[readyAt] != "" {
		return nil
	}
	ready := node.ready(&pod.Spec, time.Now())
	annotations := map[string]string{SimulatedBy: "kwok", readyAt: ready.UTC().Format(time.RFC3339Nano)}
	if owner := metav1.GetControllerOf(pod); owner != nil && owner.Kind == "Job" {
		annotations[completesAt] = ready.Add(seconds(s.delays.JobSeconds)).UTC().Format(time.RFC3339Nano)
	}
	// The uid makes the API server refuse the patch if the name has passed to another pod.
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID, "annotations": annotations}})
	if err != nil {
		return fmt.Errorf("encoding a patch: %w", err)
	}
	_, err = s.core.Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// claim makes the volume for a claim whose consumer has been given a node.
func (s *standins) claim(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	node := claim.Annotations[selectedNode]
	if claim.Status.Phase != corev1.ClaimPending || claim.Spec.VolumeName != "" || claim.DeletionTimestamp != nil ||
		node == "" || claim.Annotations["volume.kubernetes.io/storage-provisioner"] != provisioner {
		return nil
	}
	if _, ours := s.nodes[node]; !ours {
		return nil
	}
	mode := corev1.PersistentVolumeFilesystem
	if claim.Spec.VolumeMode != nil {
		mode = *claim.Spec.VolumeMode
	}
	name := "pvc-" + string(claim.UID)
	class := ""
	if claim.Spec.StorageClassName != nil {
		class = *claim.Spec.StorageClassName
	}
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Annotations: map[string]string{provisionedBy: provisioner, SimulatedBy: "local-path-standin"},
		},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: claim.Spec.Resources.Requests[corev1.ResourceStorage]},
			AccessModes:                   slices.Clone(claim.Spec.AccessModes),
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			StorageClassName:              class,
			VolumeMode:                    &mode,
			ClaimRef: &corev1.ObjectReference{
				Kind: "PersistentVolumeClaim", APIVersion: "v1",
				Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
			},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				Local: &corev1.LocalVolumeSource{Path: "/var/lib/rancher/k3s/storage/" + name + "_" + claim.Namespace + "_" + claim.Name},
			},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
					{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node}},
				}}},
			}},
		},
	}
	_, err := s.core.PersistentVolumes().Create(ctx, pv, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// volume removes a volume of ours whose claim is gone.
func (s *standins) volume(ctx context.Context, pv *corev1.PersistentVolume) error {
	if pv.Status.Phase != corev1.VolumeReleased || pv.DeletionTimestamp != nil ||
		pv.Annotations[provisionedBy] != provisioner ||
		pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
		return nil
	}
	return s.core.PersistentVolumes().Delete(ctx, pv.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pv.UID))})
}
