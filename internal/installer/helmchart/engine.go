// Package helmchart is the installer's engine for k3s: it writes each release as
// a HelmChart object and lets helm-controller, which k3s brings along, run Helm
// in a Job. It waits for the end of that Job by watching and turns its log into
// the error. It must not know which components exist or when one is ready, and
// it never runs Helm itself.
package helmchart

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
)

// Namespace is where the HelmChart objects and their Jobs live.
const Namespace = metav1.NamespaceSystem

// Bounds say how long the engine waits for what.
type Bounds struct {
	// Claim is how long helm-controller may take to notice a HelmChart.
	Claim time.Duration
	// Stuck is how long something may keep a Job's pod from starting.
	Stuck time.Duration
	// Job is how long a Job may take in all.
	Job time.Duration
	// Gone is how long deleted objects may take to go.
	Gone time.Duration
	// Sync is how long the first look at the cluster may take.
	Sync time.Duration
}

// DefaultBounds fit a box on a slow link: helm-controller's image is one of the
// first that it pulls.
func DefaultBounds() Bounds {
	return Bounds{Claim: time.Minute, Stuck: 2 * time.Minute, Job: 15 * time.Minute, Gone: 2 * time.Minute, Sync: 30 * time.Second}
}

// Options are the engine's few settings.
type Options struct {
	// JobImage replaces the image that helm-controller runs; empty keeps its own.
	JobImage string
	// Bounds are DefaultBounds where zero.
	Bounds Bounds
}

// Engine hands releases to helm-controller.
type Engine struct {
	client  *cluster.Client
	records *chart.Records
	options Options
	bounds  Bounds
	log     *slog.Logger
}

// New returns an engine for a cluster that Detect found fit, or that the user
// says is.
func New(client *cluster.Client, o Options, log *slog.Logger) *Engine {
	if o.Bounds == (Bounds{}) {
		o.Bounds = DefaultBounds()
	}
	return &Engine{client: client, records: chart.NewRecords(client.Kube), options: o, bounds: o.Bounds, log: log}
}

// Name implements the installer's engine.
func (e *Engine) Name() string { return "helmchart" }

// Current returns the newest record of a release, or chart.ErrNoRelease. Its
// digest is there once the engine has seen that revision deployed.
func (e *Engine) Current(ctx context.Context, namespace, name string) (chart.Record, error) {
	last, err := e.records.Last(ctx, namespace, name)
	return last.Record, err
}

// Apply writes the release's HelmChart if it differs from what is there and
// waits until helm-controller's Job for it has ended well. Cancelling ctx does
// not tear it in half; its deadline counts.
func (e *Engine) Apply(ctx context.Context, r chart.Release) (chart.Outcome, error) {
	if err := ctx.Err(); err != nil {
		return chart.Outcome{}, err
	}
	digest, err := r.Digest()
	if err != nil {
		return chart.Outcome{}, err
	}
	wanted, err := e.object(r, digest)
	if err != nil {
		return chart.Outcome{}, err
	}
	ctx, cancel := finish(ctx)
	defer cancel()
	if err := e.served(ctx); err != nil {
		return chart.Outcome{}, err
	}
	v, err := e.open(ctx, r.Namespace, r.Name)
	if err != nil {
		return chart.Outcome{}, err
	}
	defer v.close()
	if err := e.clear(ctx, v); err != nil {
		return chart.Outcome{}, err
	}
	o := v.observe()
	if o.chart != nil && !ours(o.chart) {
		return chart.Outcome{}, &ForeignError{Name: r.Name}
	}
	before := o.record
	version := wanted.Spec.Version
	if settled(o, wanted, digest) {
		if err := e.stamp(ctx, r, before, digest); err != nil {
			return chart.Outcome{}, err
		}
		return chart.Outcome{Change: chart.Unchanged, Revision: before.Revision}, nil
	}

	var repaired string
	for again := false; ; again = true {
		mended, err := e.prepare(ctx, v, version)
		if err != nil {
			return chart.Outcome{}, err
		}
		if mended != "" {
			repaired = mended
		}
		w, err := e.send(ctx, v, wanted, digest)
		if err != nil {
			return chart.Outcome{}, err
		}
		end, err := e.await(ctx, v, w)
		if err == nil {
			if err := e.stamp(ctx, r, end.record, digest); err != nil {
				return chart.Outcome{}, err
			}
			change := chart.Upgraded
			switch {
			case before.Deployed() && before.Revision == end.record.Revision:
				change = chart.Unchanged // only the HelmChart had to be put right
			case before.Revision == 0, end.record.Revision == 1:
				change = chart.Installed
			}
			return chart.Outcome{Change: change, Revision: end.record.Revision, Repaired: repaired}, nil
		}
		// A Job that found a half-done revision and tried nothing tells nothing
		// about this release, whether the revision is an earlier run's or that of
		// a pod that was taken away: mend the record and let a new Job try.
		var failed *JobError
		if again || !errors.As(err, &failed) || !failed.idle && end.record.Revision != before.Revision || failed.named || !end.record.Unfinished() {
			return chart.Outcome{}, err
		}
	}
}

// finish keeps a begun step from being cancelled, but not its deadline.
func finish(ctx context.Context) (context.Context, context.CancelFunc) {
	whole := context.WithoutCancel(ctx)
	if deadline, ok := ctx.Deadline(); ok {
		return context.WithDeadline(whole, deadline)
	}
	return context.WithCancel(whole)
}

// clear waits for a HelmChart that is being deleted.
func (e *Engine) clear(ctx context.Context, v *view) error {
	if o := v.observe(); o.chart == nil || o.chart.DeletionTimestamp == nil {
		return nil
	}
	// A release that outlived its HelmChart is there for the next one to take.
	if err := e.awaitRemoval(ctx, v); !errors.Is(err, ErrLeftover) {
		return err
	}
	return nil
}

// settled says whether a release is as wanted, so that nothing is to be done.
// The label on the record is only written once a revision was seen deployed;
// a run that was cut off before that left a Job that tells the same.
func settled(o observation, wanted *helmChart, digest string) bool {
	if o.chart == nil || o.chart.Labels[chart.DigestLabel] != digest ||
		o.chart.Spec.ValuesContent != wanted.Spec.ValuesContent || held(o.chart) || !o.record.Deployed() {
		return false
	}
	return o.record.Digest == digest || jobDone(o.install, wanted.Spec.Version) && matches(o.record, o.install)
}

// stamp labels a deployed record with its digest.
func (e *Engine) stamp(ctx context.Context, r chart.Release, record chart.Stored, digest string) error {
	if record.Digest == digest {
		return nil
	}
	return e.records.SetDigest(ctx, r.Namespace, r.Name, record.Revision, digest)
}

// prepare makes sure that what is sent next gets a Job of its own that can do
// its work: it lets a Job of other contents come to its end, and where an
// earlier operation was left half-way or failed, mends the record and removes
// the Job, because helm-controller makes no second one for equal contents.
func (e *Engine) prepare(ctx context.Context, v *view, version string) (string, error) {
	if o := v.observe(); busy(o.pods) && jobVersion(o.install) != version {
		e.log.Info("waiting for an earlier change of the release to end", "release", v.name)
		err := v.until(ctx, e.bounds.Job, func(o observation) (bool, string) {
			return !busy(o.pods), "pod of Job " + installJob(v.name) + " still runs an earlier change of the release"
		})
		if err != nil {
			return "", &StuckError{Name: v.name, Job: installJob(v.name), Reason: stuckReason(err), Waited: e.bounds.Job, cause: err}
		}
	}
	o := v.observe()
	if busy(o.pods) {
		return "", nil // the Job of an interrupted run is still at work on the same
	}
	mend := o.record.Unfinished()
	if !mend && !(jobVersion(o.install) == version && jobFailed(o.install) != "") {
		return "", nil
	}
	if o.chart != nil {
		if err := e.hold(ctx, v.name); err != nil {
			return "", err
		}
	}
	if o.install != nil {
		if err := e.dropJob(ctx, v, o.install); err != nil {
			return "", err
		}
	}
	if !mend {
		return "", nil
	}
	if err := e.records.MarkInterrupted(ctx, v.target, v.name, o.record.Revision); err != nil {
		return "", err
	}
	e.log.Info("repaired a release record", "release", v.name, "namespace", v.target, "status", o.record.Status)
	return "record was " + o.record.Status, nil
}

// dropJob removes a Job, waiting for its pods, so that no two run at once.
func (e *Engine) dropJob(ctx context.Context, v *view, job *batchv1.Job) error {
	foreground := metav1.DeletePropagationForeground
	err := e.client.Kube.BatchV1().Jobs(Namespace).Delete(ctx, job.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &job.UID}, PropagationPolicy: &foreground,
	})
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err): // gone, or another one already
	case err != nil:
		return fmt.Errorf("deleting Job %s/%s: %w", Namespace, job.Name, cluster.Classify(err))
	}
	err = v.until(ctx, e.bounds.Gone, func(o observation) (bool, string) {
		return o.install == nil || o.install.UID != job.UID, "Job " + Namespace + "/" + job.Name + " is still being deleted"
	})
	if err != nil {
		return &StuckError{Name: v.name, Job: job.Name, Reason: stuckReason(err), Waited: e.bounds.Gone, cause: err}
	}
	return nil
}

// send writes the HelmChart and returns what to wait for.
func (e *Engine) send(ctx context.Context, v *view, wanted *helmChart, digest string) (want, error) {
	o := v.observe()
	// Helm hands labels on to the next revision: the old digest must not be on it.
	if o.record.Digest != "" && (o.chart == nil || o.chart.Labels[chart.DigestLabel] != digest ||
		o.chart.Spec.ValuesContent != wanted.Spec.ValuesContent) {
		if err := e.records.SetDigest(ctx, v.target, v.name, o.record.Revision, ""); err != nil {
			return want{}, err
		}
	}
	live, err := e.write(ctx, wanted)
	if err != nil {
		return want{}, err
	}
	if held(live) {
		if err := e.letGo(ctx, v.name); err != nil {
			return want{}, err
		}
	}
	// The view must not show what was there before the write.
	err = v.until(ctx, e.bounds.Sync, func(o observation) (bool, string) {
		return o.chart != nil && o.chart.UID == live.UID && o.chart.Generation >= live.Generation,
			"HelmChart " + Namespace + "/" + v.name + " was written and is not seen"
	})
	if err != nil {
		return want{}, &StuckError{Name: v.name, Reason: stuckReason(err), Waited: e.bounds.Sync, cause: err}
	}
	w := want{version: wanted.Spec.Version}
	// Other contents of the same version, such as a spec edited by hand and now
	// put right, get a new Job too.
	if o.install != nil && o.chart != nil && live.Generation != o.chart.Generation {
		w.not = o.install.UID
	}
	return w, nil
}

// Uninstall deletes the release's HelmChart and waits until helm-controller's
// Job has uninstalled the release. A release that isn't there is no error.
func (e *Engine) Uninstall(ctx context.Context, namespace, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := e.served(ctx); err != nil {
		if _, missing := e.records.Last(ctx, namespace, name); errors.Is(missing, chart.ErrNoRelease) && errors.Is(err, ErrNoController) {
			return nil
		}
		return err
	}
	v, err := e.open(ctx, namespace, name)
	if err != nil {
		return err
	}
	defer v.close()
	o := v.observe()
	switch {
	case o.chart == nil && o.record.Revision == 0:
		return nil
	case o.chart == nil:
		return &LeftoverError{Namespace: namespace, Name: name, Status: o.record.Status}
	case !ours(o.chart):
		e.log.Info("left a HelmChart that llmbox did not make", "name", name)
		return nil
	}
	if held(o.chart) {
		if err := e.letGo(ctx, name); err != nil {
			return err
		}
	}
	// Without helm-controller's finalizer a delete takes the object away and
	// leaves everything it installed.
	if o.record.Revision > 0 && !guarded(o.chart) {
		err := v.until(ctx, e.bounds.Claim, func(o observation) (bool, string) {
			return o.chart == nil || guarded(o.chart), "helm-controller has not taken HelmChart " + Namespace + "/" + name
		})
		switch {
		case ctx.Err() != nil:
			return &StuckError{Name: name, Reason: stuckReason(err), Waited: e.bounds.Claim, cause: ctx.Err()}
		case err != nil:
			return &NoControllerError{Name: name, Reason: stuckReason(err)}
		}
	}
	if o.chart.DeletionTimestamp == nil {
		err := e.client.Dynamic.Resource(resource()).Namespace(Namespace).Delete(ctx, name,
			metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &o.chart.UID}})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("deleting HelmChart %s/%s: %w", Namespace, name, cluster.Classify(err))
		}
	}
	return e.awaitRemoval(ctx, v)
}

// Detach takes a release out of helm-controller's hands without uninstalling it:
// its HelmChart goes, with the Job, and the release stays for another engine.
// It can be run again from any state; nothing to detach is no error.
func (e *Engine) Detach(ctx context.Context, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := finish(ctx)
	defer cancel()
	if err := e.served(ctx); errors.Is(err, ErrNoController) {
		return nil
	} else if err != nil {
		return err
	}
	live, err := e.read(ctx, name)
	if err != nil {
		return err
	}
	if live == nil {
		return nil
	}
	if !ours(live) {
		return &ForeignError{Name: name}
	}
	v, err := e.open(ctx, live.Spec.TargetNamespace, name)
	if err != nil {
		return err
	}
	defer v.close()
	// An annotated HelmChart is none of helm-controller's business, so that it
	// neither puts its finalizer back nor uninstalls.
	if err := e.hold(ctx, name); err != nil {
		return err
	}
	o := v.observe()
	if digest := live.Labels[chart.DigestLabel]; o.record.Deployed() && o.record.Digest != digest &&
		jobDone(o.install, live.Spec.Version) && matches(o.record, o.install) {
		if err := e.records.SetDigest(ctx, v.target, name, o.record.Revision, digest); err != nil {
			return err
		}
	}
	if o.install != nil {
		if err := e.dropJob(ctx, v, o.install); err != nil {
			return err
		}
	}
	if err := e.dropBinding(ctx, name); err != nil {
		return err
	}
	if err := e.dropFinalizer(ctx, name); err != nil {
		return err
	}
	// What else helm-controller made has an owner reference to the HelmChart.
	err = e.client.Dynamic.Resource(resource()).Namespace(Namespace).Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &live.UID}})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting HelmChart %s/%s: %w", Namespace, name, cluster.Classify(err))
	}
	err = v.until(ctx, e.bounds.Gone, func(o observation) (bool, string) {
		return o.chart == nil || o.chart.UID != live.UID, "HelmChart " + Namespace + "/" + name + " is still being deleted"
	})
	if err != nil {
		return &StuckError{Name: name, Reason: stuckReason(err), Waited: e.bounds.Gone, cause: err}
	}
	return nil
}

// installJob and removeJob are the names that helm-controller gives its Jobs.
func installJob(name string) string { return "helm-install-" + name }
func removeJob(name string) string  { return "helm-delete-" + name }

// oneLine folds text from outside into one line of bounded length.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > 600 {
		s = string(r[:600]) + "…"
	}
	return s
}
