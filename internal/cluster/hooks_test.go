package cluster

import (
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
)

func hookJob(name string, uid types.UID, conditions ...batchv1.JobCondition) *batchv1.Job {
	return &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: name, UID: uid}, Status: batchv1.JobStatus{Conditions: conditions}}
}

func hookPod(job *batchv1.Job, name string, made time.Time, state corev1.ContainerState) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: job.Namespace, Name: name, CreationTimestamp: metav1.NewTime(made), Labels: map[string]string{batchv1.JobNameLabel: job.Name},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(job, batchv1.SchemeGroupVersion.WithKind("Job"))},
		},
		Status: corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: []corev1.ContainerStatus{{Name: "check", State: state}}},
	}
}

func TestFailedJob(t *testing.T) {
	yes := func(kind batchv1.JobConditionType) batchv1.JobCondition {
		return batchv1.JobCondition{Type: kind, Status: corev1.ConditionTrue, Reason: "BackoffLimitExceeded", Message: "Job has reached the specified backoff limit"}
	}
	ended := func(message string) corev1.ContainerState {
		return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3, Reason: "Error", Message: message}}
	}
	waiting := corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: `Back-off pulling image "nobody/nothing"`}}
	then := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	failed, other := hookJob("check", "new", yes(batchv1.JobFailed)), hookJob("check", "elsewhere")
	done, stuck := hookJob("done", "d", yes(batchv1.JobComplete)), hookJob("stuck", "s")
	for _, tt := range []struct {
		name    string
		objects []runtime.Object
		known   map[JobRef]types.UID
		ref     string
		says    []string
	}{
		{name: "none there"},
		{name: "what the pod left", objects: []runtime.Object{failed, hookPod(failed, "old", then, ended("old")), hookPod(failed, "new", then.Add(time.Minute), ended("no licence"))},
			ref: "x/check", says: []string{"pod new: check: exited with code 3 Error: no licence"}},
		{name: "its log, without a termination message", objects: []runtime.Object{failed, hookPod(failed, "p", then, ended(""))},
			ref: "x/check", says: []string{"exited with code 3 Error: fake logs"}},
		{name: "its pods are gone", objects: []runtime.Object{failed}, ref: "x/check", says: []string{"BackoffLimitExceeded", "backoff limit"}},
		{name: "pods of another", objects: []runtime.Object{failed, hookPod(other, "p", then, ended("no"))}, ref: "x/check", says: []string{"BackoffLimitExceeded"}},
		{name: "of an earlier try", objects: []runtime.Object{failed}, known: map[JobRef]types.UID{{"x", "check"}: "new"}},
		{name: "made anew", objects: []runtime.Object{failed}, known: map[JobRef]types.UID{{"x", "check"}: "before"}, ref: "x/check", says: []string{"BackoffLimitExceeded"}},
		{name: "one that went well before one that does not start", objects: []runtime.Object{done, stuck, hookPod(stuck, "p", then, waiting)},
			ref: "x/stuck", says: []string{"pod p: check: ImagePullBackOff", "nobody/nothing"}},
		{name: "one that only runs", objects: []runtime.Object{stuck}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &Client{Kube: fake.NewClientset(tt.objects...)}
			refs := []JobRef{{"x", "done"}, {"x", "check"}, {"x", "stuck"}}
			ref, reason := c.FailedJob(t.Context(), refs, tt.known)
			if tt.ref == "" && reason != "" || tt.ref != "" && ref.String() != tt.ref {
				t.Errorf("%s: %s", ref, reason)
			}
			for _, s := range tt.says {
				if !strings.Contains(reason, s) {
					t.Errorf("it says %q, not %q", reason, s)
				}
			}
			known, err := c.KnownJobs(t.Context(), refs)
			if err != nil || tt.ref != "" && known[ref] == "" {
				t.Errorf("known: %v, %v", known, err)
			}
		})
	}
}
