package helmchart

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/dynamic/dynamicinformer"
	batchinformers "k8s.io/client-go/informers/batch/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
)

// view is a live look at everything that concerns one release: its HelmChart,
// helm-controller's Jobs and their pods, and Helm's records.
type view struct {
	name, target string

	charts, jobs, pods, secrets cache.SharedIndexInformer

	changed chan struct{}
	stop    context.CancelFunc
	running sync.WaitGroup
	mu      sync.Mutex
	problem error
}

// observation is what a view shows at one moment. The record's revision is 0 if
// there is none.
type observation struct {
	chart   *helmChart
	install *batchv1.Job
	remove  *batchv1.Job
	pods    []*corev1.Pod
	record  chart.Stored
}

// open starts the watches and waits until they are filled. target is the
// namespace of the release.
func (e *Engine) open(ctx context.Context, target, name string) (*view, error) {
	byName := func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	}
	byChart := func(o *metav1.ListOptions) {
		o.LabelSelector = labels.SelectorFromSet(labels.Set{chartLabel: name}).String()
	}
	records := func(o *metav1.ListOptions) { o.LabelSelector = chart.RecordSelector(name) }
	none := cache.Indexers{}
	v := &view{
		name: name, target: target, changed: make(chan struct{}, 1),
		charts:  dynamicinformer.NewFilteredDynamicInformer(e.client.Dynamic, resource(), Namespace, 0, none, byName).Informer(),
		jobs:    batchinformers.NewFilteredJobInformer(e.client.Kube, Namespace, 0, none, byChart),
		pods:    coreinformers.NewFilteredPodInformer(e.client.Kube, Namespace, 0, none, byChart),
		secrets: coreinformers.NewFilteredSecretInformer(e.client.Kube, target, 0, none, records),
	}
	watching, stop := context.WithCancel(context.WithoutCancel(ctx))
	v.stop = stop
	all := []cache.SharedIndexInformer{v.charts, v.jobs, v.pods, v.secrets}
	for _, inf := range all {
		if err := v.follow(inf); err != nil {
			stop()
			return nil, fmt.Errorf("watching release %s: %w", name, err)
		}
	}
	var synced []cache.InformerSynced
	for _, inf := range all {
		v.running.Add(1)
		go func() {
			defer v.running.Done()
			inf.RunWithContext(watching)
		}()
		synced = append(synced, inf.HasSynced)
	}
	filling, cancel := context.WithTimeout(ctx, e.bounds.Sync)
	defer cancel()
	if !cache.WaitForCacheSync(filling.Done(), synced...) {
		v.close()
		return nil, fmt.Errorf("watching release %s: %w", name, cluster.Classify(errors.Join(filling.Err(), v.trouble())))
	}
	return v, nil
}

func (v *view) follow(inf cache.SharedIndexInformer) error {
	if err := inf.SetTransform(slim); err != nil {
		return err
	}
	err := inf.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.problem = err
	})
	if err != nil {
		return err
	}
	_, err = inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { v.notify() },
		UpdateFunc: func(any, any) { v.notify() },
		DeleteFunc: func(any) { v.notify() },
	})
	return err
}

// slim drops what nobody here reads: a record's document can hold a MiB.
func slim(obj any) (any, error) {
	if s, ok := obj.(*corev1.Secret); ok {
		s.Data = nil
	}
	if o, ok := obj.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
}

func (v *view) notify() {
	select {
	case v.changed <- struct{}{}:
	default:
	}
}

func (v *view) trouble() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.problem
}

func (v *view) close() {
	v.stop()
	v.running.Wait()
}

func (v *view) observe() observation {
	var o observation
	for _, obj := range v.charts.GetStore().List() {
		u, ok := obj.(*unstructured.Unstructured)
		if !ok {
			continue
		}
		if c, err := typed(u); err == nil {
			o.chart = c
		}
	}
	for _, obj := range v.jobs.GetStore().List() {
		switch job, _ := obj.(*batchv1.Job); {
		case job == nil:
		case job.Name == installJob(v.name):
			o.install = job
		case job.Name == removeJob(v.name):
			o.remove = job
		}
	}
	for _, obj := range v.pods.GetStore().List() {
		if pod, ok := obj.(*corev1.Pod); ok {
			o.pods = append(o.pods, pod)
		}
	}
	slices.SortFunc(o.pods, func(a, b *corev1.Pod) int { return b.CreationTimestamp.Compare(a.CreationTimestamp.Time) })
	var secrets []*corev1.Secret
	for _, obj := range v.secrets.GetStore().List() {
		if s, ok := obj.(*corev1.Secret); ok {
			secrets = append(secrets, s)
		}
	}
	o.record, _ = chart.NewestRecord(secrets)
	return o
}

// waitError tells what was still missing when a bound or a context ended.
type waitError struct {
	missing string
	cause   error
}

func (e *waitError) Error() string { return e.missing + ": " + e.cause.Error() }

func (e *waitError) Unwrap() error { return e.cause }

// stuckReason is what a waitError says is missing.
func stuckReason(err error) string {
	var w *waitError
	if errors.As(err, &w) {
		return w.missing
	}
	return oneLine(err.Error())
}

// until waits for a condition, which says what is missing.
func (v *view) until(ctx context.Context, bound time.Duration, met func(observation) (bool, string)) error {
	bounded, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	for {
		ok, missing := met(v.observe())
		if ok {
			return nil
		}
		select {
		case <-v.changed:
		case <-bounded.Done():
			return &waitError{missing: missing, cause: errors.Join(bounded.Err(), v.trouble())}
		}
	}
}
