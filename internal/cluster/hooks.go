package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// What is read of a failed pod's log at most, and how long looking for a reason may take.
const (
	reasonLines   = 5
	reasonBytes   = 8 << 10
	reasonTimeout = 15 * time.Second
)

// JobRef names a Job.
type JobRef struct{ Namespace, Name string }

func (r JobRef) String() string { return r.Namespace + "/" + r.Name }

// KnownJobs returns which of the Jobs are there, so that FailedJob can tell those of an
// earlier try from new ones.
func (c *Client) KnownJobs(ctx context.Context, refs []JobRef) (map[JobRef]types.UID, error) {
	known := map[JobRef]types.UID{}
	for _, ref := range refs {
		job, err := c.Kube.BatchV1().Jobs(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return nil, fmt.Errorf("reading Job %s: %w", ref, Classify(err))
		default:
			known[ref] = job.UID
		}
	}
	return known, nil
}

// FailedJob finds the first of the Jobs that is newer than what was known and has not
// done its work, and says what its pod left: how it ended and the last lines of its
// log, or what keeps it from starting. The text is empty if there is none.
func (c *Client) FailedJob(ctx context.Context, refs []JobRef, known map[JobRef]types.UID) (JobRef, string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reasonTimeout)
	defer cancel()
	for _, ref := range refs {
		job, err := c.Kube.BatchV1().Jobs(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		if err != nil || job.UID == known[ref] || jobComplete(job) {
			continue
		}
		if reason := c.jobReason(ctx, job); reason != "" {
			return ref, reason
		}
	}
	return JobRef{}, ""
}

func jobComplete(job *batchv1.Job) bool {
	return slices.ContainsFunc(job.Status.Conditions, func(c batchv1.JobCondition) bool {
		return c.Type == batchv1.JobComplete && c.Status == corev1.ConditionTrue
	})
}

func (c *Client) jobReason(ctx context.Context, job *batchv1.Job) string {
	if pods, err := c.Kube.CoreV1().Pods(job.Namespace).List(ctx, metav1.ListOptions{LabelSelector: batchv1.JobNameLabel + "=" + job.Name}); err == nil {
		slices.SortFunc(pods.Items, func(a, b corev1.Pod) int { return b.CreationTimestamp.Compare(a.CreationTimestamp.Time) })
		for i := range pods.Items {
			pod := &pods.Items[i]
			if !metav1.IsControlledBy(pod, job) {
				continue
			}
			if reason := podReason(pod); reason != "" {
				text := "pod " + pod.Name + ": " + strings.TrimSpace(reason)
				if said := c.lastWords(ctx, pod); said != "" {
					text += ": " + said
				}
				return text
			}
		}
	}
	for _, condition := range job.Status.Conditions {
		if condition.Type == batchv1.JobFailed && condition.Status == corev1.ConditionTrue {
			return oneLine(condition.Reason + ": " + condition.Message)
		}
	}
	return ""
}

// lastWords are what the container that failed left: its termination message, else the
// end of its log.
func (c *Client) lastWords(ctx context.Context, pod *corev1.Pod) string {
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		ended, previous := s.State.Terminated, false
		if ended == nil {
			ended, previous = s.LastTerminationState.Terminated, true
		}
		if ended == nil || ended.ExitCode == 0 {
			continue
		}
		if ended.Message != "" {
			return oneLine(ended.Message)
		}
		lines, limit := int64(reasonLines), int64(reasonBytes)
		raw, err := c.Kube.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{
			Container: s.Name, Previous: previous, TailLines: &lines, LimitBytes: &limit,
		}).DoRaw(ctx)
		if err != nil {
			return ""
		}
		return oneLine(string(raw))
	}
	return ""
}
