package helmchart

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	helmv1 "github.com/k3s-io/helm-controller/pkg/apis/helm.cattle.io/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/llmbox-dev/llmbox/internal/cluster"
)

// helmControllerStandIn takes the place of helm-controller, of the Job
// controller for its Jobs, of a kubelet and of klipper-helm's entry script. It
// claims HelmCharts, puts the finalizer on, makes suspended Jobs with hashes,
// resumes, replaces and removes them, writes conditions, and "runs" the Job's pod
// by calling the real helm command, in the same cases as the entry script with
// failure policy "abort"; so releases and their records are real.
//
// It does not show the real controller's timing, caches and retries, wrangler's
// apply, the Job controller's back-off and the kubelet's restarts, Helm 4, which
// klipper-helm carries (the helm here is 3), images, RBAC of the Job's account,
// proxies, or HelmChartConfigs.
type helmControllerStandIn struct {
	client     *cluster.Client
	helm       string
	kubeconfig string
	dir        string

	stop    context.CancelFunc
	stopped chan struct{}

	mu    sync.Mutex
	mode  podMode
	logs  map[string][]string // by pod name, a log per try
	begun map[string]int      // Jobs made, by name
}

// podMode is what happens to the pods of Jobs.
type podMode string

const (
	podRuns          podMode = ""
	podPullFails     podMode = "image can't be pulled"
	podUnschedulable podMode = "no node takes it"
	// podDies leaves a pending record, as Helm does when it is killed, and no pod.
	podDies podMode = "node dies in the middle"
)

const (
	standInName    = "helm-controller"
	standInManager = "llmbox.dev/helm-controller-standin"
	standInHash    = "helmcharts.helm.cattle.io/configHash"
)

func startStandIn(t *testing.T, client *cluster.Client, helm, kubeconfig string) *helmControllerStandIn {
	t.Helper()
	s := &helmControllerStandIn{
		client: client, helm: helm, kubeconfig: kubeconfig, dir: t.TempDir(),
		logs: map[string][]string{}, begun: map[string]int{},
	}
	t.Cleanup(s.pause)
	s.resume()
	return s
}

// resume starts the stand-in and pause stops it, as a restart of k3s does.
func (s *helmControllerStandIn) resume() {
	ctx, cancel := context.WithCancel(context.Background())
	s.stop, s.stopped = cancel, make(chan struct{})
	go func() {
		defer close(s.stopped)
		for ctx.Err() == nil {
			s.reconcileAll(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(150 * time.Millisecond):
			}
		}
	}()
}

func (s *helmControllerStandIn) pause() {
	s.stop()
	<-s.stopped
}

func (s *helmControllerStandIn) set(m podMode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mode = m
}

func (s *helmControllerStandIn) jobsMade(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.begun[name]
}

// reconcileAll tries again what failed at its next turn, as controllers do.
func (s *helmControllerStandIn) reconcileAll(ctx context.Context) {
	list, err := s.client.Dynamic.Resource(resource()).Namespace(Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return
	}
	for i := range list.Items {
		if c, err := typed(&list.Items[i]); err == nil {
			if err := s.reconcile(ctx, c); err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
				fmt.Fprintf(os.Stderr, "helmControllerStandIn: %s: %v\n", c.Name, err)
			}
		}
	}
}

func (s *helmControllerStandIn) reconcile(ctx context.Context, c *helmChart) error {
	if _, ok := c.Annotations["helmcharts.helm.cattle.io/unmanaged"]; ok || c.Spec.Chart == "" && c.Spec.ChartContent == "" {
		return nil
	}
	if c.Annotations["helmcharts.cattle.io/managed-by"] != standInName {
		return s.patchChart(ctx, c, "", map[string]any{"metadata": map[string]any{
			"annotations":     map[string]any{"helmcharts.cattle.io/managed-by": standInName},
			"resourceVersion": c.ResourceVersion,
		}})
	}
	const finalizer = "wrangler.cattle.io/on-helm-chart-remove"
	if c.DeletionTimestamp == nil {
		if !slices.Contains(c.Finalizers, finalizer) {
			return s.patchChart(ctx, c, "", map[string]any{"metadata": map[string]any{
				"finalizers": append(c.Finalizers, finalizer), "resourceVersion": c.ResourceVersion,
			}})
		}
		return s.install(ctx, c)
	}
	if slices.Contains(c.Finalizers, finalizer) {
		return s.remove(ctx, c, finalizer)
	}
	return nil
}

func (s *helmControllerStandIn) install(ctx context.Context, c *helmChart) error {
	name := "helm-install-" + c.Name
	job, err := s.job(ctx, name)
	if err != nil {
		return err
	}
	hash := contentHash(c)
	if job != nil {
		switch {
		case job.DeletionTimestamp != nil:
			return nil
		case finished(job, batchv1.JobFailed) && job.Annotations["hash"] == hash:
			return s.patchChart(ctx, c, "status", map[string]any{"status": map[string]any{"jobName": name, "conditions": conditions("True",
				"Job failed", "Job has reached configured number of retries without succeeding")}})
		case job.Annotations["hash"] != hash:
			return s.deleteJob(ctx, job)
		case finished(job, batchv1.JobComplete):
			status, revision, label, err := s.release(ctx, c)
			if err != nil || status == "deployed" && label == hash[:63] {
				return err
			}
			if revision == jobEnv(job, "EXPECTED_RELEASE_REVISION") {
				return nil // the same Job once more would be no change
			}
			return s.deleteJob(ctx, job)
		default:
			return s.play(ctx, c, job)
		}
	}
	_, revision, _, err := s.release(ctx, c)
	if err != nil {
		return err
	}
	if err := s.helpers(ctx, c); err != nil {
		return err
	}
	if err := s.makeJob(ctx, c, name, hash, revision); err != nil {
		return err
	}
	return s.patchChart(ctx, c, "status", map[string]any{"status": map[string]any{"jobName": name, "conditions": conditions("False", "", "")}})
}

func (s *helmControllerStandIn) remove(ctx context.Context, c *helmChart, finalizer string) error {
	name := "helm-delete-" + c.Name
	job, err := s.job(ctx, name)
	if err != nil {
		return err
	}
	switch {
	case job == nil:
		_, revision, _, err := s.release(ctx, c)
		if err != nil {
			return err
		}
		return s.makeJob(ctx, c, name, "delete", revision)
	case !finished(job, batchv1.JobComplete):
		return s.play(ctx, c, job)
	}
	if err := s.deleteJob(ctx, job); err != nil {
		return err
	}
	binding := "helm-" + Namespace + "-" + c.Name
	if err := s.client.Kube.RbacV1().ClusterRoleBindings().Delete(ctx, binding, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	return s.patchChart(ctx, c, "", map[string]any{"metadata": map[string]any{
		"finalizers":      slices.DeleteFunc(slices.Clone(c.Finalizers), func(f string) bool { return f == finalizer }),
		"resourceVersion": c.ResourceVersion,
	}})
}

// contentHash covers what makes helm-controller replace a Job.
func contentHash(c *helmChart) string {
	spec := c.Spec.DeepCopy()
	raw, err := json.Marshal(spec)
	if err != nil {
		panic(err) // a spec that came as JSON goes back to JSON
	}
	sum := sha256.Sum256(raw)
	return strings.ToUpper(hex.EncodeToString(sum[:]))
}

func conditions(failed, reason, message string) []any {
	return []any{
		map[string]any{"type": "JobCreated", "status": "True", "reason": "Job created"},
		map[string]any{"type": "Failed", "status": failed, "reason": reason, "message": message},
	}
}

func (s *helmControllerStandIn) patchChart(ctx context.Context, c *helmChart, sub string, change map[string]any) error {
	raw, err := json.Marshal(change)
	if err != nil {
		return err
	}
	var subs []string
	if sub != "" {
		subs = append(subs, sub)
	}
	_, err = s.client.Dynamic.Resource(resource()).Namespace(Namespace).Patch(ctx, c.Name, types.MergePatchType, raw,
		metav1.PatchOptions{FieldManager: standInName}, subs...)
	return err
}

// release is what helm-controller reads: labels of the newest record.
func (s *helmControllerStandIn) release(ctx context.Context, c *helmChart) (status, revision, hash string, err error) {
	list, err := s.client.Kube.CoreV1().Secrets(c.Spec.TargetNamespace).List(ctx, metav1.ListOptions{LabelSelector: "owner=helm,name=" + c.Name})
	if err != nil {
		return "", "", "", err
	}
	newest := 0
	for _, secret := range list.Items {
		if n, err := strconv.Atoi(secret.Labels["version"]); err == nil && n > newest {
			newest, status, hash = n, secret.Labels["status"], secret.Labels[standInHash]
		}
	}
	return status, strconv.Itoa(newest), hash, nil
}

func (s *helmControllerStandIn) job(ctx context.Context, name string) (*batchv1.Job, error) {
	job, err := s.client.Kube.BatchV1().Jobs(Namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // absent is an answer here
	}
	return job, err
}

func (s *helmControllerStandIn) deleteJob(ctx context.Context, job *batchv1.Job) error {
	background := metav1.DeletePropagationBackground
	return s.client.Kube.BatchV1().Jobs(Namespace).Delete(ctx, job.Name, metav1.DeleteOptions{
		PropagationPolicy: &background, Preconditions: &metav1.Preconditions{UID: &job.UID},
	})
}

func owner(c *helmChart) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: helmv1.SchemeGroupVersion.String(), Kind: "HelmChart", Name: c.Name, UID: c.UID}}
}

// helpers makes what a Job needs besides.
func (s *helmControllerStandIn) helpers(ctx context.Context, c *helmChart) error {
	kube := s.client.Kube
	_, err := kube.CoreV1().ConfigMaps(Namespace).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "chart-content-" + c.Name, OwnerReferences: owner(c)},
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	_, err = kube.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "helm-" + Namespace + "-" + c.Name, Annotations: map[string]string{
			ownerKind: "helm.cattle.io/v1, Kind=HelmChart", ownerNamespace: c.Namespace, ownerName: c.Name,
		}},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: Namespace, Name: "helm-" + c.Name}},
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

// makeJob makes a suspended Job that the cluster's own Job controller leaves
// alone.
func (s *helmControllerStandIn) makeJob(ctx context.Context, c *helmChart, name, hash, revision string) error {
	yes, manager := true, standInManager
	env := []corev1.EnvVar{
		{Name: "NAME", Value: c.Name}, {Name: "VERSION", Value: c.Spec.Version}, {Name: "TARGET_NAMESPACE", Value: c.Spec.TargetNamespace},
		{Name: "FAILURE_POLICY", Value: string(c.Spec.FailurePolicy)}, {Name: "EXPECTED_RELEASE_REVISION", Value: revision},
	}
	if len(hash) > 63 {
		env = append(env, corev1.EnvVar{Name: "CONFIG_HASH", Value: hash[:63]})
	}
	image := c.Spec.JobImage
	if image == "" {
		image = "example.invalid/klipper-helm:standin"
	}
	labels := map[string]string{"helmcharts.helm.cattle.io/chart": c.Name}
	_, err := s.client.Kube.BatchV1().Jobs(Namespace).Create(ctx, &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels, Annotations: map[string]string{"hash": hash}, OwnerReferences: owner(c)},
		Spec: batchv1.JobSpec{
			Suspend: &yes, ManagedBy: &manager, BackoffLimit: c.Spec.BackOffLimit,
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					RestartPolicy: corev1.RestartPolicyOnFailure,
					SchedulerName: "nobody",
					Containers:    []corev1.Container{{Name: "helm", Image: image, Env: env}},
				},
			},
		},
	}, metav1.CreateOptions{})
	if err == nil {
		s.mu.Lock()
		s.begun[name]++
		s.mu.Unlock()
	}
	return err
}

func finished(job *batchv1.Job, kind batchv1.JobConditionType) bool {
	return slices.ContainsFunc(job.Status.Conditions, func(c batchv1.JobCondition) bool {
		return c.Type == kind && c.Status == corev1.ConditionTrue
	})
}

// play moves a Job that has not ended one step on.
func (s *helmControllerStandIn) play(ctx context.Context, c *helmChart, job *batchv1.Job) error {
	if finished(job, batchv1.JobFailed) {
		return nil
	}
	if job.Spec.Suspend != nil && *job.Spec.Suspend {
		_, err := s.client.Kube.BatchV1().Jobs(Namespace).Patch(ctx, job.Name, types.MergePatchType, []byte(`{"spec":{"suspend":false}}`), metav1.PatchOptions{})
		return err
	}
	s.mu.Lock()
	mode := s.mode
	s.mu.Unlock()
	pod, err := s.pod(ctx, job)
	if err != nil {
		return err
	}
	if pod.DeletionTimestamp != nil {
		return nil
	}
	switch mode {
	case podPullFails:
		return s.podStatus(ctx, pod, corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{{
			Name: "helm", Image: pod.Spec.Containers[0].Image,
			State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{
				Reason: "ImagePullBackOff", Message: `Back-off pulling image "` + pod.Spec.Containers[0].Image + `": dial tcp: lookup example.invalid: no such host`}},
		}}})
	case podUnschedulable:
		return s.podStatus(ctx, pod, corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/1 nodes are available: 1 Too many pods."}}})
	case podDies, podRuns:
	}
	tries := int32(0)
	var last corev1.ContainerState
	if len(pod.Status.ContainerStatuses) > 0 {
		cs := pod.Status.ContainerStatuses[0]
		if cs.State.Terminated != nil || cs.State.Running != nil {
			tries = cs.RestartCount + 1
		}
		last.Terminated = cs.State.Terminated
	}
	if err := s.podStatus(ctx, pod, corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{
		Name: "helm", RestartCount: tries, LastTerminationState: last, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}},
	}}}); err != nil {
		return err
	}
	output, code := s.entry(ctx, c, job)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if mode == podDies {
		return s.die(ctx, c, pod)
	}
	s.mu.Lock()
	s.logs[pod.Name] = append(s.logs[pod.Name], output)
	s.mu.Unlock()
	ended := &corev1.ContainerStateTerminated{ExitCode: code, Reason: "Completed", FinishedAt: metav1.Now(), StartedAt: metav1.Now(), Message: "Installing helm chart"}
	phase := corev1.PodSucceeded
	if code != 0 {
		ended.Reason, phase = "Error", corev1.PodRunning
	}
	if err := s.podStatus(ctx, pod, corev1.PodStatus{Phase: phase, ContainerStatuses: []corev1.ContainerStatus{{
		Name: "helm", RestartCount: tries, LastTerminationState: last, State: corev1.ContainerState{Terminated: ended},
	}}}); err != nil {
		return err
	}
	switch {
	case code == 0:
		return s.endJob(ctx, job, true)
	case tries >= *job.Spec.BackoffLimit:
		if err := s.endJob(ctx, job, false); err != nil {
			return err
		}
		return s.client.Kube.CoreV1().Pods(Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	default:
		return nil
	}
}

// die leaves the record as it is in the middle of an install.
func (s *helmControllerStandIn) die(ctx context.Context, c *helmChart, pod *corev1.Pod) error {
	_, revision, _, err := s.release(ctx, c)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(revision)
	if err != nil {
		return err
	}
	if err := setStatus(ctx, s.client, c.Spec.TargetNamespace, c.Name, n, "pending-install"); err != nil {
		return err
	}
	return s.client.Kube.CoreV1().Pods(Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
}

func (s *helmControllerStandIn) pod(ctx context.Context, job *batchv1.Job) (*corev1.Pod, error) {
	pods := s.client.Kube.CoreV1().Pods(Namespace)
	name := job.Name + "-" + string(job.UID[:5])
	pod, err := pods.Get(ctx, name, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return pod, err
	}
	return pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: job.Spec.Template.Labels,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(job, batchv1.SchemeGroupVersion.WithKind("Job"))},
		},
		Spec: job.Spec.Template.Spec,
	}, metav1.CreateOptions{})
}

func (s *helmControllerStandIn) podStatus(ctx context.Context, pod *corev1.Pod, status corev1.PodStatus) error {
	pods := s.client.Kube.CoreV1().Pods(Namespace)
	live, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	live.Status = status
	_, err = pods.UpdateStatus(ctx, live, metav1.UpdateOptions{})
	return err
}

func (s *helmControllerStandIn) endJob(ctx context.Context, job *batchv1.Job, well bool) error {
	jobs := s.client.Kube.BatchV1().Jobs(Namespace)
	live, err := jobs.Get(ctx, job.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	now := metav1.Now()
	live.Status.StartTime = &now
	kinds, reason := []batchv1.JobConditionType{batchv1.JobSuccessCriteriaMet, batchv1.JobComplete}, "CompletionsReached"
	if well {
		live.Status.CompletionTime, live.Status.Succeeded = &now, 1
	} else {
		kinds, reason = []batchv1.JobConditionType{batchv1.JobFailureTarget, batchv1.JobFailed}, "BackoffLimitExceeded"
		live.Status.Failed = 1
	}
	for _, k := range kinds {
		live.Status.Conditions = append(live.Status.Conditions, batchv1.JobCondition{
			Type: k, Status: corev1.ConditionTrue, Reason: reason, LastTransitionTime: now, LastProbeTime: now,
		})
	}
	_, err = jobs.UpdateStatus(ctx, live, metav1.UpdateOptions{})
	return err
}

// entry does what klipper-helm's entry script does, and returns its output.
func (s *helmControllerStandIn) entry(ctx context.Context, c *helmChart, job *batchv1.Job) (string, int32) {
	status, revision, _, err := s.release(ctx, c)
	if err != nil {
		return err.Error(), 1
	}
	expected := jobEnv(job, "EXPECTED_RELEASE_REVISION")
	common := []string{"--namespace", c.Spec.TargetNamespace, "--kubeconfig", s.kubeconfig}
	if job.Name == "helm-delete-"+c.Name {
		if revision == "0" || expected != revision {
			return "nothing to delete\n", 0
		}
		out, _ := s.run(ctx, append([]string{"uninstall", c.Name, "--wait"}, common...)...)
		return out, 0 // as the script does, whatever helm says
	}
	archive, err := base64.StdEncoding.DecodeString(c.Spec.ChartContent)
	if err != nil {
		return err.Error(), 1
	}
	tgz, values := filepath.Join(s.dir, c.Name+".tgz"), filepath.Join(s.dir, c.Name+".yaml")
	if err := errors.Join(os.WriteFile(tgz, archive, 0o600), os.WriteFile(values, []byte(c.Spec.ValuesContent), 0o600)); err != nil {
		return err.Error(), 1
	}
	command := append([]string{"install", c.Name, tgz, "--version", c.Spec.Version, "--values", values,
		"--labels", standInHash + "=" + jobEnv(job, "CONFIG_HASH"), "--timeout", c.Spec.Timeout.Duration.String()}, common...)
	switch {
	case status == "":
		return s.run(ctx, command...)
	case expected != revision:
		return fmt.Sprintf("Current release revision %s does not match expected revision %s\n", revision, expected), 0
	}
	if slices.Contains([]string{"pending-install", "pending-upgrade", "pending-rollback", "superseded", "uninstalling"}, status) {
		n, err := strconv.Atoi(revision)
		if err == nil {
			err = setStatus(ctx, s.client, c.Spec.TargetNamespace, c.Name, n, "failed")
		}
		if err != nil {
			return err.Error(), 1
		}
		if status != "pending-upgrade" && status != "superseded" {
			status = "failed"
		}
	}
	if status == "failed" {
		return "Release status is 'failed' and failure policy is '" + string(c.Spec.FailurePolicy) + "'; waiting for operator intervention\n+ exit 1\n", 1
	}
	command[0] = "upgrade"
	return s.run(ctx, command...)
}

func (s *helmControllerStandIn) run(ctx context.Context, args ...string) (string, int32) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.helm, args...) // #nosec G204 -- the lab's own helm
	cmd.Env = []string{"HOME=" + s.dir, "PATH=/nonexistent"}
	out, err := cmd.CombinedOutput()
	text := "+ helm " + strings.Join(args, " ") + "\n" + string(out)
	if err != nil {
		return text, 1
	}
	return text, 0
}

// setStatus does what the plugin helm-set-status does.
func setStatus(ctx context.Context, client *cluster.Client, namespace, name string, revision int, status string) error {
	secrets := client.Kube.CoreV1().Secrets(namespace)
	secret, err := secrets.Get(ctx, fmt.Sprintf("sh.helm.release.v1.%s.v%d", name, revision), metav1.GetOptions{})
	if err != nil {
		return err
	}
	raw, err := base64.StdEncoding.DecodeString(string(secret.Data["release"]))
	if err != nil {
		return err
	}
	unzip, err := gzip.NewReader(bytes.NewReader(raw))
	if err != nil {
		return err
	}
	var document map[string]any
	if err := json.NewDecoder(unzip).Decode(&document); err != nil {
		return err
	}
	info, ok := document["info"].(map[string]any)
	if !ok {
		return errors.New("record has no info")
	}
	info["status"] = status
	var zipped bytes.Buffer
	zip := gzip.NewWriter(&zipped)
	if err := errors.Join(json.NewEncoder(zip).Encode(document), zip.Close()); err != nil {
		return err
	}
	secret.Data["release"] = []byte(base64.StdEncoding.EncodeToString(zipped.Bytes()))
	secret.Labels["status"] = status
	_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{})
	return err
}

var podLog = regexp.MustCompile(`^/api/v1/namespaces/kube-system/pods/([^/]+)/log$`)

// kubeletLogsStandIn answers the engine's questions for logs of the stand-in's
// pods, which have no kubelet.
type kubeletLogsStandIn struct {
	next    http.RoundTripper
	standIn func() *helmControllerStandIn
}

func (k kubeletLogsStandIn) RoundTrip(r *http.Request) (*http.Response, error) {
	m := podLog.FindStringSubmatch(r.URL.Path)
	if m == nil {
		return k.next.RoundTrip(r)
	}
	s := k.standIn()
	s.mu.Lock()
	defer s.mu.Unlock()
	logs := s.logs[m[1]]
	i := len(logs) - 1
	if r.URL.Query().Get("previous") == "true" {
		i--
	}
	answer := &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Request: r, Body: http.NoBody}
	if i < 0 {
		answer.StatusCode = http.StatusBadRequest
		return answer, nil
	}
	answer.Body = io.NopCloser(bytes.NewReader([]byte(logs[i])))
	return answer, nil
}
