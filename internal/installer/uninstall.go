package installer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/event"
)

// The steps of an uninstall around the components.
const (
	namespacesStep = "uninstall/namespaces"
	leftoversStep  = "uninstall/leftovers"
)

// The bounds of an uninstall's waiting.
const (
	releaseGone   = 3 * time.Minute
	customGone    = 30 * time.Second
	namespaceGone = 4 * time.Minute
	sweepPause    = 2 * time.Second
	// stuckAfter is how long a namespace may be Terminating before what holds it
	// is looked at and, where it is ours, let go.
	stuckAfter = 20 * time.Second
)

// UninstallOptions is what an uninstall works with.
type UninstallOptions struct {
	Plan   *Plan
	Client *cluster.Client
	Engine Engine
	Sink   event.Sink
	Log    *slog.Logger
	// Interrupt is closed when somebody asks the run to stop.
	Interrupt <-chan struct{}
}

// Uninstall removes everything llmbox made in the cluster, last things first,
// and nothing else. It goes on after a failure and can be run again from any
// state; the error joins what is left.
func Uninstall(ctx context.Context, o UninstallOptions) (*event.Summary, error) {
	began := time.Now()
	r := NewRun(o.Plan, o.Client, o.Engine, nil, nil, o.Sink, o.Log)
	steps := slices.Clone(o.Plan.Steps)
	slices.Reverse(steps)
	var planned []event.PlannedStep
	for _, s := range steps {
		if s.Release != nil && s.Mode == component.Install {
			planned = append(planned, event.PlannedStep{Step: s.Path(), Title: s.Title, Needs: dependants(s)})
		}
	}
	planned = append(planned,
		event.PlannedStep{Step: leftoversStep, Title: "Cluster-wide objects and CRDs"},
		event.PlannedStep{Step: namespacesStep, Title: "Namespaces"})
	r.emit(event.Event{Type: event.RunStarted, Message: "Uninstalling", Plan: planned})

	return r.ended(began, r.uninstallGuarded(ctx, o, steps), withoutGates)
}

func dependants(s Step) []string {
	var out []string
	for _, n := range s.NeededBy {
		out = append(out, "component/"+n)
	}
	return out
}

func (r *Run) uninstallGuarded(ctx context.Context, o UninstallOptions, steps []Step) error {
	release, _, err := Lock(ctx, o.Client.Kube, o.Log)
	if err != nil {
		return err
	}
	defer release()
	var problems []error
	var foreign []*unstructured.Unstructured
	for _, obj := range r.plan.IfAbsent {
		there, err := r.client.Foreign(ctx, obj)
		if err != nil {
			return err
		}
		if there != nil {
			foreign = append(foreign, there)
		}
	}
	for _, s := range steps {
		select {
		case <-o.Interrupt:
			return ErrInterrupted
		default:
		}
		if s.Release == nil || s.Mode != component.Install {
			continue
		}
		path := s.Path()
		began := r.begin(path, "Removing "+s.Title)
		err := r.uninstallRelease(ctx, s)
		for _, obj := range foreign {
			err = errors.Join(err, r.client.Restore(ctx, obj))
		}
		if err != nil {
			problems = append(problems, err)
			r.fail(path, began, err)
			continue
		}
		r.emit(event.Event{Type: event.StepDone, Step: path, Message: "removed", ElapsedMS: r.end(path, began)})
	}
	problems = append(problems,
		r.removeStrays(ctx),
		r.phase(leftoversStep, "Removing cluster-wide objects", func() (string, error) { return r.removeClusterObjects(ctx) }),
		r.phase(namespacesStep, "Removing namespaces", func() (string, error) { return r.removeNamespaces(ctx) }))
	return errors.Join(problems...)
}

// uninstallRelease removes the custom resources of a release while their
// operator still runs, then the release: Helm deletes them last, when nobody is
// left to take their finalizers off.
func (r *Run) uninstallRelease(ctx context.Context, s Step) error {
	ctx, cancel := context.WithTimeout(ctx, releaseGone)
	defer cancel()
	ours := map[string]bool{}
	for _, crd := range r.plan.CRDs {
		group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
		ours[group] = true
	}
	var custom []*unstructured.Unstructured
	for _, obj := range s.Objects {
		if ours[obj.GroupVersionKind().Group] {
			custom = append(custom, obj)
		}
	}
	if err := r.client.DeleteAndWait(ctx, custom, s.Namespace, customGone); err != nil {
		r.log.Warn("custom resources did not go by themselves", "release", s.Name, "error", err)
	}
	stop, err := r.clearTheWay(ctx, s)
	if err != nil {
		return err
	}
	defer stop()
	return r.engine.Uninstall(ctx, s.Namespace, s.Name)
}

// clearTheWay takes away what would keep a release from going, beside its removal:
// webhooks that nobody answers any more, and objects of its own that somebody makes anew.
// The returned function ends that after a last look: the next release goes with nothing of
// this one in its way.
func (r *Run) clearTheWay(ctx context.Context, s Step) (stop func(), err error) {
	former, err := r.client.Identities(ctx, s.Objects, s.Namespace)
	if err != nil {
		return nil, err
	}
	sweep := func(ctx context.Context) {
		err := errors.Join(r.client.DeleteUnansweredWebhooks(ctx, s.Namespace), r.client.DeleteRemade(ctx, former))
		if err != nil && ctx.Err() == nil {
			r.log.Warn("what is in the way of a removal could not be removed", "release", s.Name, "error", err)
		}
	}
	watching, cancel := context.WithCancel(ctx)
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		ticker := time.NewTicker(sweepPause)
		defer ticker.Stop()
		for {
			select {
			case <-watching.Done():
				return
			case <-ticker.C:
				sweep(watching)
			}
		}
	}()
	return func() {
		cancel()
		<-finished
		sweep(ctx)
	}, nil
}

// removeStrays removes releases of llmbox's that this plan knows nothing of: components
// that were installed once and are left out since. The last ones made go first.
func (r *Run) removeStrays(ctx context.Context) error {
	strays, err := r.strays(ctx)
	problems := []error{err}
	for _, name := range strays {
		path := "component/" + name.Name
		began := r.begin(path, "Removing release "+name.Namespace+"/"+name.Name+", which is no part of the box any more")
		bounded, cancel := context.WithTimeout(ctx, releaseGone)
		err := r.engine.Uninstall(bounded, name.Namespace, name.Name)
		cancel()
		if err != nil {
			problems = append(problems, err)
			r.fail(path, began, err)
			continue
		}
		r.emit(event.Event{Type: event.StepDone, Step: path, Message: "removed", ElapsedMS: r.end(path, began)})
	}
	return errors.Join(problems...)
}

// strays finds such releases by their records, which bear llmbox's digest.
func (r *Run) strays(ctx context.Context) ([]cluster.ReleaseName, error) {
	planned := r.plan.releases()
	made := map[cluster.ReleaseName]time.Time{}
	for _, namespace := range r.namespaces() {
		records, err := r.client.Kube.CoreV1().Secrets(namespace).List(ctx, metav1.ListOptions{LabelSelector: "owner=helm," + chart.DigestLabel})
		if err != nil {
			return nil, fmt.Errorf("looking for releases in namespace %s: %w", namespace, cluster.Classify(err))
		}
		for _, record := range records.Items {
			name := cluster.ReleaseName{Namespace: namespace, Name: record.Labels["name"]}
			if at := record.CreationTimestamp.Time; name.Name != "" && !slices.Contains(planned, name) && !made[name].After(at) {
				made[name] = at
			}
		}
	}
	return slices.SortedFunc(maps.Keys(made), func(a, b cluster.ReleaseName) int {
		return cmp.Or(made[b].Compare(made[a]), cmp.Compare(a.Name, b.Name))
	}), nil
}

// removeClusterObjects removes what operators left behind at run time, and the
// CRDs of ours that no foreign object uses.
func (r *Run) removeClusterObjects(ctx context.Context) (string, error) {
	var problems []error
	var cluster []*unstructured.Unstructured
	for _, obj := range slices.Concat(r.plan.Manifests, r.plan.IfAbsent) {
		if obj.GetNamespace() == "" && obj.GetKind() != "Namespace" {
			cluster = append(cluster, obj)
		}
	}
	for _, obj := range cluster {
		if err := r.client.DeleteOwned(ctx, obj); err != nil {
			problems = append(problems, err)
		}
	}
	if gone, nfd := r.gpuOperatorIsGone(); gone {
		if err := r.client.CleanGPUNodes(ctx, nfd); err != nil {
			problems = append(problems, err)
		}
	}
	// Webhooks of an operator that is gone refuse everything they match.
	if err := r.client.DeleteOrphanedWebhooks(ctx, r.namespaces()); err != nil {
		problems = append(problems, err)
	}
	kept, err := r.client.DeleteCRDs(ctx, r.plan.CRDs, r.namespaces(), func(done, total int) {
		r.emit(event.Event{Type: event.StepProgress, Step: leftoversStep, Done: int64(done), Total: int64(total), Unit: "CRDs"})
	})
	if err != nil {
		problems = append(problems, err)
	}
	text := ""
	if len(kept) > 0 {
		text = fmt.Sprintf("%d CRDs kept: other objects use them (%s …)", len(kept), kept[0])
	}
	return text, errors.Join(problems...)
}

// gpuOperatorIsGone tells whether the GPU operator was ours to remove, and whether Node
// Feature Discovery went with it.
func (r *Run) gpuOperatorIsGone() (gone, nfd bool) {
	for _, s := range r.plan.Steps {
		if s.Name != gpuStep || s.Release == nil || s.Mode != component.Install {
			continue
		}
		nfd = slices.ContainsFunc(s.Objects, func(o *unstructured.Unstructured) bool {
			return o.GetKind() == "Deployment" && strings.HasSuffix(o.GetName(), "nfd-master")
		})
		return true, nfd
	}
	return false, false
}

// namespaces lists the namespaces that llmbox makes, its own last.
func (r *Run) namespaces() []string {
	var names []string
	for _, obj := range r.plan.Manifests {
		if obj.GetKind() == "Namespace" && obj.GetName() != SystemNamespace {
			names = append(names, obj.GetName())
		}
	}
	return append(names, SystemNamespace)
}

func (r *Run) removeNamespaces(ctx context.Context) (string, error) {
	bounded, cancel := context.WithTimeout(ctx, namespaceGone)
	defer cancel()
	freed, err := r.client.DeleteNamespaces(bounded, r.namespaces(), stuckAfter, func(reason string) {
		r.emit(event.Event{Type: event.StepProgress, Step: namespacesStep, Message: reason})
	})
	if err != nil {
		return "", err
	}
	if len(freed) > 0 {
		return fmt.Sprintf("removed; %d objects had to be let go of: %s", len(freed), freed[0]), nil
	}
	return "removed", nil
}
