package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	appslisters "k8s.io/client-go/listers/apps/v1"
	batchlisters "k8s.io/client-go/listers/batch/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

// Verdict is what a readiness gate answers.
type Verdict struct {
	Ready bool
	// Waiting says what is waited for and the newest reason, such as
	// "Deployment keda-operator 0/1: pod keda-operator-x: ImagePullBackOff: …".
	Waiting string
	// SimulatedBy names rehearsal actors that gave (part of) the answer, as the
	// cluster's annotations do; empty when real parts answered.
	SimulatedBy []string
}

// Namespace keeps a live view of what runs in one namespace, so that asking
// for readiness costs no request. Close it when the waiting is over.
type Namespace struct {
	name    string
	stop    context.CancelFunc
	factory informers.SharedInformerFactory
	changed chan struct{}

	deployments  appslisters.DeploymentLister
	statefulSets appslisters.StatefulSetLister
	daemonSets   appslisters.DaemonSetLister
	jobs         batchlisters.JobLister
	pods         corelisters.PodLister
	events       corelisters.EventLister
	claims       corelisters.PersistentVolumeClaimLister
}

// Watch opens a live view of a namespace and waits until it is filled.
func (c *Client) Watch(ctx context.Context, namespace string) (*Namespace, error) {
	watching, stop := context.WithCancel(context.WithoutCancel(ctx))
	factory := informers.NewSharedInformerFactoryWithOptions(c.Kube, 0, informers.WithNamespace(namespace),
		informers.WithTransform(dropManagedFields))
	n := &Namespace{
		name: namespace, stop: stop, factory: factory, changed: make(chan struct{}, 1),
		deployments:  factory.Apps().V1().Deployments().Lister(),
		statefulSets: factory.Apps().V1().StatefulSets().Lister(),
		daemonSets:   factory.Apps().V1().DaemonSets().Lister(),
		jobs:         factory.Batch().V1().Jobs().Lister(),
		pods:         factory.Core().V1().Pods().Lister(),
		events:       factory.Core().V1().Events().Lister(),
		claims:       factory.Core().V1().PersistentVolumeClaims().Lister(),
	}
	notify := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { n.notify() },
		UpdateFunc: func(any, any) { n.notify() },
		DeleteFunc: func(any) { n.notify() },
	}
	for _, inf := range []cache.SharedIndexInformer{
		factory.Apps().V1().Deployments().Informer(), factory.Apps().V1().StatefulSets().Informer(),
		factory.Apps().V1().DaemonSets().Informer(), factory.Batch().V1().Jobs().Informer(),
		factory.Core().V1().Pods().Informer(), factory.Core().V1().Events().Informer(),
		factory.Core().V1().PersistentVolumeClaims().Informer(),
	} {
		if _, err := inf.AddEventHandler(notify); err != nil {
			stop()
			return nil, fmt.Errorf("watching namespace %s: %w", namespace, err)
		}
	}
	factory.Start(watching.Done())
	synced := make(chan struct{})
	go func() {
		factory.WaitForCacheSync(watching.Done())
		close(synced)
	}()
	select {
	case <-synced:
		return n, nil
	case <-ctx.Done():
		stop()
		return nil, fmt.Errorf("watching namespace %s: %w", namespace, ctx.Err())
	}
}

func dropManagedFields(obj any) (any, error) {
	if o, ok := obj.(interface {
		SetManagedFields([]metav1.ManagedFieldsEntry)
	}); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
}

func (n *Namespace) notify() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// Changed gets a value after something in the namespace changed.
func (n *Namespace) Changed() <-chan struct{} { return n.changed }

// Close ends the watch.
func (n *Namespace) Close() {
	n.stop()
	n.factory.Shutdown()
}

// WorkloadRef names a Deployment, StatefulSet, DaemonSet or Job.
type WorkloadRef struct{ Kind, Name string }

// errNoSuchWorkload is wrapped when an expected workload is not there (yet).
var errNoSuchWorkload = errors.New("not created yet")

// Workloads judges whether all the named workloads are ready by kstatus. Where
// one isn't, the newest reason of its pods is part of the answer.
func (n *Namespace) Workloads(refs []WorkloadRef) (Verdict, error) {
	verdict := Verdict{Ready: true}
	simulated := map[string]bool{}
	var waiting []string
	for _, ref := range refs {
		obj, selector, err := n.get(ref)
		if err != nil {
			verdict.Ready = false
			waiting = append(waiting, fmt.Sprintf("%s %s: %v", ref.Kind, ref.Name, errNoSuchWorkload))
			continue
		}
		result, err := status.Compute(obj)
		if err != nil {
			return Verdict{}, fmt.Errorf("computing the status of %s %s: %w", ref.Kind, ref.Name, err)
		}
		pods, err := n.podsOf(selector)
		if err != nil {
			return Verdict{}, err
		}
		for _, p := range pods {
			if by := p.Annotations[SimulatedByAnnotation]; by != "" {
				simulated[by] = true
			}
		}
		if message, running := unfinishedJob(obj); running && result.Status == status.CurrentStatus {
			result.Status, result.Message = status.InProgressStatus, message
		}
		if result.Status == status.CurrentStatus {
			continue
		}
		verdict.Ready = false
		line := fmt.Sprintf("%s %s: %s", ref.Kind, ref.Name, strings.TrimSuffix(result.Message, "."))
		if reason := n.newestReason(pods); reason != "" {
			line += "; " + reason
		} else if reason := n.newestEvent(ref.Name); reason != "" {
			line += "; " + reason
		}
		waiting = append(waiting, line)
	}
	verdict.Waiting = strings.Join(firstFew(waiting, 2), "; ")
	for by := range simulated {
		verdict.SimulatedBy = append(verdict.SimulatedBy, by)
	}
	slices.Sort(verdict.SimulatedBy)
	return verdict, nil
}

// unfinishedJob tells a Job that has not done its work: kstatus calls one that is
// started current, but what waits for a download waits for its end.
func unfinishedJob(obj *unstructured.Unstructured) (message string, running bool) {
	if obj.GetKind() != "Job" {
		return "", false
	}
	if _, done := condition(obj, "Complete", "True"); done {
		return "", false
	}
	return "running", true
}

func firstFew(list []string, n int) []string {
	if len(list) <= n {
		return list
	}
	return append(slices.Clone(list[:n]), fmt.Sprintf("and %d more", len(list)-n))
}

func (n *Namespace) get(ref WorkloadRef) (*unstructured.Unstructured, labels.Selector, error) {
	var obj runtime.Object
	var gvk schema.GroupVersionKind
	var sel labels.Selector
	var err error
	switch ref.Kind {
	case "Deployment":
		var d *appsv1.Deployment
		if d, err = n.deployments.Deployments(n.name).Get(ref.Name); err == nil {
			obj, gvk, sel = d, appsv1.SchemeGroupVersion.WithKind(ref.Kind), labels.SelectorFromSet(d.Spec.Selector.MatchLabels)
		}
	case "StatefulSet":
		var s *appsv1.StatefulSet
		if s, err = n.statefulSets.StatefulSets(n.name).Get(ref.Name); err == nil {
			obj, gvk, sel = s, appsv1.SchemeGroupVersion.WithKind(ref.Kind), labels.SelectorFromSet(s.Spec.Selector.MatchLabels)
		}
	case "DaemonSet":
		var d *appsv1.DaemonSet
		if d, err = n.daemonSets.DaemonSets(n.name).Get(ref.Name); err == nil {
			obj, gvk, sel = d, appsv1.SchemeGroupVersion.WithKind(ref.Kind), labels.SelectorFromSet(d.Spec.Selector.MatchLabels)
		}
	case "Job":
		var j *batchv1.Job
		if j, err = n.jobs.Jobs(n.name).Get(ref.Name); err == nil {
			obj, gvk, sel = j, batchv1.SchemeGroupVersion.WithKind(ref.Kind), labels.SelectorFromSet(j.Spec.Selector.MatchLabels)
		}
	default:
		return nil, nil, fmt.Errorf("%s is not a workload", ref.Kind)
	}
	if err != nil {
		return nil, nil, err
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return nil, nil, fmt.Errorf("converting %s %s: %w", ref.Kind, ref.Name, err)
	}
	u := &unstructured.Unstructured{Object: content}
	u.SetGroupVersionKind(gvk)
	return u, sel, nil
}

func (n *Namespace) podsOf(selector labels.Selector) ([]*corev1.Pod, error) {
	pods, err := n.pods.Pods(n.name).List(selector)
	if err != nil {
		return nil, fmt.Errorf("listing pods of namespace %s: %w", n.name, err)
	}
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { return b.CreationTimestamp.Compare(a.CreationTimestamp.Time) })
	return pods, nil
}

// newestReason finds what keeps the newest pod from being ready: a container's
// own waiting or termination reason, a scheduling condition, or its last event.
func (n *Namespace) newestReason(pods []*corev1.Pod) string {
	for _, p := range pods {
		if p.Status.Phase == corev1.PodSucceeded {
			continue
		}
		if reason := podReason(p); reason != "" {
			return fmt.Sprintf("pod %s: %s", p.Name, reason)
		}
		if reason := n.newestEvent(p.Name); reason != "" {
			return fmt.Sprintf("pod %s: %s", p.Name, reason)
		}
		if p.Status.Phase == corev1.PodPending {
			return fmt.Sprintf("pod %s: pending", p.Name)
		}
	}
	return ""
}

func podReason(p *corev1.Pod) string {
	for _, cs := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		switch {
		case cs.State.Waiting != nil && cs.State.Waiting.Reason != "PodInitializing" && cs.State.Waiting.Reason != "ContainerCreating" && cs.State.Waiting.Reason != "":
			text := cs.State.Waiting.Reason
			if cs.State.Waiting.Message != "" {
				text += ": " + oneLine(cs.State.Waiting.Message)
			}
			if last := cs.LastTerminationState.Terminated; last != nil {
				text += fmt.Sprintf(" (last exit code %d", last.ExitCode)
				if last.Reason != "" {
					text += ", " + last.Reason
				}
				text += ")"
			}
			return cs.Name + ": " + text
		case cs.State.Terminated != nil && cs.State.Terminated.ExitCode != 0:
			return fmt.Sprintf("%s: exited with code %d %s", cs.Name, cs.State.Terminated.ExitCode, cs.State.Terminated.Reason)
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return c.Reason + ": " + oneLine(c.Message)
		}
	}
	return ""
}

// newestEvent returns the newest warning, or else the newest event, about the
// object of that name.
func (n *Namespace) newestEvent(name string) string {
	events, err := n.events.Events(n.name).List(labels.Everything())
	if err != nil {
		return ""
	}
	var best *corev1.Event
	for _, e := range events {
		if e.InvolvedObject.Name != name {
			continue
		}
		if best == nil || e.Type == corev1.EventTypeWarning && best.Type != corev1.EventTypeWarning ||
			e.Type == best.Type && eventTime(e).After(eventTime(best)) {
			best = e
		}
	}
	if best == nil {
		return ""
	}
	return best.Reason + ": " + oneLine(best.Message)
}

func eventTime(e *corev1.Event) time.Time {
	if !e.LastTimestamp.IsZero() {
		return e.LastTimestamp.Time
	}
	if !e.EventTime.IsZero() {
		return e.EventTime.Time
	}
	return e.CreationTimestamp.Time
}

// oneLine folds a message from outside into one line of bounded length.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > 300 {
		s = string(r[:300]) + "…"
	}
	return s
}
