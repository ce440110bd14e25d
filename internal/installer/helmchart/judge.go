package helmchart

import (
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/llmbox-dev/llmbox/internal/chart"
)

// want says which Job to wait for.
type want struct {
	// version is the HelmChart's, which the Job's pod carries.
	version string
	// not is a Job that will be replaced, though its version fits.
	not types.UID
}

type phase int

const (
	// unclaimed: helm-controller has not taken the HelmChart.
	unclaimed phase = iota
	// waiting: the work goes on, or should.
	waiting
	// done: the Job ended and the release is deployed from these contents.
	done
	// failed: nothing more will come of it.
	failed
)

// verdict is what an observation means for a wait.
type verdict struct {
	phase phase
	// missing says what is waited for.
	missing string
	// blocked says that what is missing does not come by itself in a healthy
	// cluster, so that the shorter bound counts.
	blocked bool
	// reason is the Job's own for failing, cause what else it failed for.
	reason, cause string
	// pod is the one that is waited for.
	pod string
}

// judge says how far helm-controller is with an install or upgrade. A Job that
// ended well is not enough: its pod also ends well when it found a revision that
// it did not expect, and did nothing.
func judge(o observation, w want) verdict {
	job := o.install
	switch {
	case o.chart == nil:
		return verdict{phase: failed, cause: "the HelmChart was deleted meanwhile"}
	case job == nil || jobVersion(job) != w.version || job.UID == w.not || job.DeletionTimestamp != nil:
		if !claimed(o.chart) {
			return verdict{phase: unclaimed, missing: "helm-controller has not taken HelmChart " + Namespace + "/" + o.chart.Name}
		}
		missing := "helm-controller has not made Job " + installJob(o.chart.Name)
		if text := chartTrouble(o.chart); text != "" {
			missing += ": " + text
		}
		return verdict{phase: waiting, missing: missing, blocked: true}
	case jobDone(job, w.version) && matches(o.record, job):
		return verdict{phase: done}
	case jobFailed(job) != "":
		return verdict{phase: failed, reason: jobFailed(job)}
	case o.record.Failed() && tried(o.pods, job):
		// With the policy "abort" no later try does anything.
		return verdict{phase: failed}
	}
	return running(o, job)
}

// running says what a Job that has not ended waits for.
func running(o observation, job *batchv1.Job) verdict {
	if jobDone(job, jobVersion(job)) {
		status := o.record.Status
		if status == "" {
			status = "absent"
		}
		return verdict{phase: waiting, blocked: true, missing: fmt.Sprintf(
			"Job %s ended without deploying anything (release record: %s) and helm-controller has made no other", job.Name, status)}
	}
	pod := newestPod(o.pods, job)
	if pod == nil {
		missing := "Job " + job.Name + " has no pod"
		if job.Spec.Suspend != nil && *job.Spec.Suspend {
			missing = "Job " + job.Name + " is suspended and helm-controller has not started it"
		}
		return verdict{phase: waiting, missing: missing, blocked: true}
	}
	trouble, blocked := podTrouble(pod)
	if trouble == "" {
		trouble = "is " + string(pod.Status.Phase)
	}
	return verdict{phase: waiting, missing: "pod " + pod.Name + " " + trouble, blocked: blocked, pod: pod.Name}
}

// jobVersion is the HelmChart's version that a Job was made for.
func jobVersion(job *batchv1.Job) string { return jobEnv(job, "VERSION") }

func jobEnv(job *batchv1.Job, name string) string {
	if job == nil {
		return ""
	}
	for _, c := range job.Spec.Template.Spec.Containers {
		for _, e := range c.Env {
			if e.Name == name {
				return e.Value
			}
		}
	}
	return ""
}

func jobDone(job *batchv1.Job, version string) bool {
	return job != nil && jobVersion(job) == version && jobCondition(job, batchv1.JobComplete) != nil
}

// jobFailed is the reason of a Job that failed for good, or empty.
func jobFailed(job *batchv1.Job) string {
	c := jobCondition(job, batchv1.JobFailed)
	if c == nil {
		return ""
	}
	if c.Reason == "" {
		return "Failed"
	}
	return c.Reason
}

func jobCondition(job *batchv1.Job, kind batchv1.JobConditionType) *batchv1.JobCondition {
	if job == nil {
		return nil
	}
	for i, c := range job.Status.Conditions {
		if c.Type == kind && c.Status == corev1.ConditionTrue {
			return &job.Status.Conditions[i]
		}
	}
	return nil
}

// matches says whether a record is of the revision that a Job deployed. Both
// carry the hash of the contents where helm-controller and its image are new
// enough to set it.
func matches(record chart.Stored, job *batchv1.Job) bool {
	if !record.Deployed() {
		return false
	}
	expected, got := jobEnv(job, "CONFIG_HASH"), record.Labels[configHashLabel]
	return expected == "" || got == "" || expected == got
}

// tried says whether a pod of the Job has run Helm to a bad end and runs it no
// more.
func tried(pods []*corev1.Pod, job *batchv1.Job) bool {
	ended := false
	for _, p := range pods {
		if !metav1.IsControlledBy(p, job) {
			continue
		}
		for _, c := range p.Status.ContainerStatuses {
			if c.State.Running != nil {
				return false
			}
			for _, t := range []*corev1.ContainerStateTerminated{c.State.Terminated, c.LastTerminationState.Terminated} {
				ended = ended || t != nil && t.ExitCode != 0
			}
		}
	}
	return ended
}

// busy says whether a pod runs Helm at this moment.
func busy(pods []*corev1.Pod) bool {
	return slices.ContainsFunc(pods, func(p *corev1.Pod) bool {
		return slices.ContainsFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.State.Running != nil })
	})
}

// newestPod is the Job's newest; pods come newest first.
func newestPod(pods []*corev1.Pod, job *batchv1.Job) *corev1.Pod {
	for _, p := range pods {
		if metav1.IsControlledBy(p, job) {
			return p
		}
	}
	return nil
}

// podTrouble says what keeps a pod from running, and whether that is more than
// a matter of time.
func podTrouble(p *corev1.Pod) (string, bool) {
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		waiting := c.State.Waiting
		if waiting == nil || waiting.Reason == "" {
			continue
		}
		text := "waits: " + waiting.Reason
		if waiting.Message != "" {
			text += ": " + oneLine(waiting.Message)
		}
		if last := c.LastTerminationState.Terminated; last != nil {
			text += fmt.Sprintf(" (last exit code %d)", last.ExitCode)
		}
		switch waiting.Reason {
		case "ContainerCreating", "PodInitializing", "CrashLoopBackOff":
			return text, false
		default:
			return text, true
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return "is not scheduled: " + c.Reason + ": " + oneLine(c.Message), true
		}
	}
	return "", false
}

// chartTrouble is what helm-controller's own condition complains of.
func chartTrouble(c *helmChart) string {
	for _, condition := range c.Status.Conditions {
		if condition.Type == "Failed" && condition.Status == corev1.ConditionTrue {
			return oneLine(condition.Reason + ": " + condition.Message)
		}
	}
	return ""
}
