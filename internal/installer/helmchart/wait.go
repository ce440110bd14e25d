package helmchart

import (
	"cmp"
	"context"
	"fmt"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
)

// reportTimeout bounds the questions that only make an error say more.
const reportTimeout = 10 * time.Second

// timing is a running wait and its bounds.
type timing struct {
	bounds  Bounds
	began   time.Time
	blocked time.Time // since when something is in the way; zero if nothing is
}

// next returns how long the wait may go on before it is looked at again; 0 or
// less means that a bound is over, and waited says which.
func (t *timing) next(j verdict, now time.Time) (left, waited time.Duration) {
	if !j.blocked {
		t.blocked = time.Time{}
	} else if t.blocked.IsZero() {
		t.blocked = now
	}
	left, waited = t.bounds.Job-now.Sub(t.began), t.bounds.Job
	if j.phase == unclaimed {
		left, waited = t.bounds.Claim-now.Sub(t.began), t.bounds.Claim
	}
	if !t.blocked.IsZero() {
		if stuck := t.bounds.Stuck - now.Sub(t.blocked); stuck < left {
			left, waited = stuck, t.bounds.Stuck
		}
	}
	return left, waited
}

// await waits until helm-controller's Job for these contents has ended. The
// observation it returns is the last one, also beside an error.
func (e *Engine) await(ctx context.Context, v *view, w want) (observation, error) {
	t := timing{bounds: e.bounds, began: time.Now()}
	logs := &logbook{}
	for {
		o := v.observe()
		e.keepLogs(ctx, logs, o.pods, o.install)
		j := judge(o, w)
		switch j.phase {
		case done:
			return o, nil
		case failed:
			return o, e.jobError(ctx, v, o, o.install, j, logs)
		case unclaimed, waiting:
		}
		if err := e.wait(ctx, v, &t, j, o.install); err != nil {
			return o, err
		}
	}
}

// awaitRemoval waits until a deleted HelmChart is gone and sees that the release
// is too: the Job of a failed uninstall ends well.
func (e *Engine) awaitRemoval(ctx context.Context, v *view) error {
	t := timing{bounds: e.bounds, began: time.Now()}
	logs := &logbook{all: true}
	for {
		o := v.observe()
		e.keepLogs(ctx, logs, o.pods, o.remove)
		if o.chart == nil {
			break
		}
		j := judgeRemoval(o)
		if j.phase == failed {
			return e.jobError(ctx, v, o, o.remove, j, logs)
		}
		if err := e.wait(ctx, v, &t, j, o.remove); err != nil {
			return err
		}
	}
	left := ""
	err := v.until(ctx, e.bounds.Sync, func(o observation) (bool, string) {
		left = o.record.Status
		return o.record.Revision == 0, "record of release " + v.target + "/" + v.name
	})
	if err != nil {
		return &LeftoverError{Namespace: v.target, Name: v.name, Status: left, Cause: logs.cause}
	}
	return nil
}

// judgeRemoval says how far helm-controller is with an uninstall.
func judgeRemoval(o observation) verdict {
	switch {
	case o.remove == nil && guarded(o.chart):
		return verdict{phase: unclaimed, missing: "helm-controller has not begun to remove HelmChart " + Namespace + "/" + o.chart.Name}
	case o.remove == nil:
		return verdict{phase: waiting, blocked: true, missing: fmt.Sprintf(
			"HelmChart %s/%s is held by finalizers %v", Namespace, o.chart.Name, o.chart.Finalizers)}
	case jobFailed(o.remove) != "":
		return verdict{phase: failed, reason: jobFailed(o.remove)}
	case jobCondition(o.remove, batchv1.JobComplete) != nil:
		return verdict{phase: waiting, blocked: true, missing: "Job " + o.remove.Name + " is done and helm-controller has not let the HelmChart go"}
	default:
		return running(o, o.remove)
	}
}

// wait blocks until something changed, or returns why it was for too long.
func (e *Engine) wait(ctx context.Context, v *view, t *timing, j verdict, job *batchv1.Job) error {
	left, waited := t.next(j, time.Now())
	if left > 0 {
		timer := time.NewTimer(left)
		defer timer.Stop()
		select {
		case <-v.changed:
			return nil
		case <-timer.C:
			return nil
		case <-ctx.Done():
			waited = time.Since(t.began)
		}
	}
	if j.phase == unclaimed && ctx.Err() == nil {
		return &NoControllerError{Name: v.name, Reason: fmt.Sprintf("%s in %s", j.missing, waited.Round(time.Second))}
	}
	stuck := &StuckError{Name: v.name, Reason: j.missing, Pod: j.pod, Waited: waited, cause: ctx.Err()}
	if job != nil {
		stuck.Job = job.Name
	}
	if text := e.newestEvent(ctx, cmp.Or(j.pod, stuck.Job, v.name)); text != "" {
		stuck.Reason += "; last event: " + text
	}
	return stuck
}

// newestEvent returns the newest warning about an object of that name, or else
// the newest event.
func (e *Engine) newestEvent(ctx context.Context, name string) string {
	asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), reportTimeout)
	defer cancel()
	list, err := e.client.Kube.CoreV1().Events(Namespace).List(asking, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("involvedObject.name", name).String(),
	})
	if err != nil {
		e.log.Debug("reading events", "name", name, "error", err)
		return ""
	}
	var best *corev1.Event
	for i := range list.Items {
		c := &list.Items[i]
		if best == nil || c.Type == corev1.EventTypeWarning && best.Type != corev1.EventTypeWarning ||
			c.Type == best.Type && eventTime(c).After(eventTime(best)) {
			best = c
		}
	}
	if best == nil {
		return ""
	}
	return best.Reason + ": " + oneLine(best.Message)
}

func eventTime(e *corev1.Event) time.Time {
	switch {
	case !e.LastTimestamp.IsZero():
		return e.LastTimestamp.Time
	case !e.EventTime.IsZero():
		return e.EventTime.Time
	default:
		return e.CreationTimestamp.Time
	}
}

// jobError says why a Job failed: by its log, else by Helm's record, else by
// what the container or the Job itself left.
func (e *Engine) jobError(ctx context.Context, v *view, o observation, job *batchv1.Job, j verdict, logs *logbook) error {
	failed := &JobError{
		Name: v.name, Job: installJob(v.name), Pod: logs.pod, Reason: j.reason, Cause: logs.cause, Tail: logs.tail,
		named: logs.named, idle: logs.pod != "" && !logs.named,
	}
	if job != nil {
		failed.Job = job.Name
	}
	if !logs.named && o.record.Failed() {
		asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), reportTimeout)
		defer cancel()
		if last, err := e.records.Last(asking, v.target, v.name); err == nil && last.Failed() && last.Description != "" {
			failed.Cause = oneLine(last.Description)
			if failed.idle {
				// Its only words are that it does nothing: the record tells how far another try came.
				failed.Cause = "a try of Helm was cut off, or left no log; its record says: " + failed.Cause
			}
		}
	}
	if j.cause != "" {
		failed.Cause = j.cause
	}
	if failed.Cause == "" {
		failed.Cause = logs.message
	}
	if c := jobCondition(job, batchv1.JobFailed); failed.Cause == "" && c != nil {
		failed.Cause = oneLine(c.Message)
	}
	return failed
}
