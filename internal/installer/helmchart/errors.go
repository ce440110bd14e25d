package helmchart

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// The ways in which this engine can't do its work, for errors.Is.
var (
	// ErrNoController means that no helm-controller serves the cluster.
	ErrNoController = errors.New("no helm-controller in this cluster")
	// ErrForeign means that a HelmChart of that name is somebody else's.
	ErrForeign = errors.New("HelmChart is not llmbox's")
	// ErrJob means that helm-controller's Job ended badly.
	ErrJob = errors.New("helm-controller's Job failed")
	// ErrStuck means that something did not happen in its time.
	ErrStuck = errors.New("helm-controller does not get on")
	// ErrTooLarge means that a chart does not fit into a HelmChart.
	ErrTooLarge = errors.New("chart is too large for helm-controller")
	// ErrLeftover means that a release is there and no HelmChart that owns it.
	ErrLeftover = errors.New("release is left without a HelmChart")
)

// NoControllerError says why nobody answers to HelmCharts.
type NoControllerError struct {
	// Name of the HelmChart that got no answer; empty if none was written.
	Name   string
	Reason string
}

func (e *NoControllerError) Error() string { return ErrNoController.Error() + ": " + e.Reason }

func (e *NoControllerError) Unwrap() error { return ErrNoController }

// Fix is what a person types.
func (e *NoControllerError) Fix() string {
	return "use --engine helm (llmbox then runs Helm itself), or start k3s without --disable-helm-controller"
}

// ForeignError says that llmbox will not touch a HelmChart.
type ForeignError struct{ Name string }

func (e *ForeignError) Error() string {
	return fmt.Sprintf("%s: %s/%s lacks the label app.kubernetes.io/managed-by=llmbox", ErrForeign, Namespace, e.Name)
}

func (e *ForeignError) Unwrap() error { return ErrForeign }

// Fix is what a person types.
func (e *ForeignError) Fix() string {
	return fmt.Sprintf("set components.%s.mode to external to use what is there, or remove it: kubectl -n %s delete helmchart %s", e.Name, Namespace, e.Name)
}

// JobError tells how a Job of helm-controller ended.
type JobError struct {
	// Name of the release.
	Name string
	// Job is the Job's name, Pod that of its pod whose log was read.
	Job, Pod string
	// Reason is the Job's own, such as BackoffLimitExceeded; empty if the Job goes
	// on but can't get anywhere.
	Reason string
	// Cause is the line that names what went wrong.
	Cause string
	// Tail is the end of the log, without timestamps.
	Tail []string

	// named says that the log names the cause: Helm itself has tried.
	named bool
	// idle says that there is a log and that it names none.
	idle bool
}

func (e *JobError) Error() string {
	where := "Job " + Namespace + "/" + e.Job
	if e.Pod != "" {
		where += " (pod " + e.Pod + ")"
	}
	text := where + " failed"
	if e.Reason != "" {
		text += " with " + e.Reason
	}
	if e.Cause != "" {
		text += ": " + e.Cause
	}
	return text
}

func (e *JobError) Unwrap() error { return ErrJob }

// Fix is what a person types.
func (e *JobError) Fix() string {
	return fmt.Sprintf("kubectl -n %s logs job/%s shows the whole log; remove the cause, then run llmbox install again", Namespace, e.Job)
}

// StuckError tells what was waited for in vain, with the newest reason.
type StuckError struct {
	// Name of the release.
	Name string
	// Job and Pod are those waited for; empty where there are none yet.
	Job, Pod string
	Reason   string
	Waited   time.Duration

	cause error
}

func (e *StuckError) Error() string {
	return fmt.Sprintf("release %s: %s (waited %s)", e.Name, e.Reason, e.Waited.Round(time.Second))
}

func (e *StuckError) Unwrap() []error {
	if e.cause == nil {
		return []error{ErrStuck}
	}
	return []error{ErrStuck, e.cause}
}

// Fix is what a person types.
func (e *StuckError) Fix() string {
	switch {
	case e.Pod != "":
		return fmt.Sprintf("kubectl -n %s describe pod %s shows what holds it; then run llmbox install again, or with --engine helm, which needs no Job", Namespace, e.Pod)
	case e.Job != "":
		return fmt.Sprintf("kubectl -n %s describe job/%s; kubectl -n %s logs job/%s; then run llmbox install again, or with --engine helm, which needs no Job", Namespace, e.Job, Namespace, e.Job)
	default:
		return fmt.Sprintf("kubectl -n %s describe helmchart %s; then run llmbox install again, or with --engine helm", Namespace, e.Name)
	}
}

// TooLargeError says how large a chart is.
type TooLargeError struct {
	Name  string
	Bytes int
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("%s: component %s has %d bytes packed, at most %d fit into the ConfigMap that its Job reads", ErrTooLarge, e.Name, e.Bytes, maxContent)
}

func (e *TooLargeError) Unwrap() error { return ErrTooLarge }

// Fix is what a person types.
func (e *TooLargeError) Fix() string { return "llmbox install --engine helm" }

// LeftoverError says that helm-controller is done and the release is not gone.
type LeftoverError struct {
	Namespace, Name, Status string
	// Cause is the line of the Job's log that names why, if it could be read.
	Cause string
}

func (e *LeftoverError) Error() string {
	text := fmt.Sprintf("%s: %s/%s has a record (%s)", ErrLeftover, e.Namespace, e.Name, e.Status)
	if e.Cause != "" {
		text += ": " + e.Cause
	}
	return text
}

func (e *LeftoverError) Unwrap() error { return ErrLeftover }

// Fix is what a person types.
func (e *LeftoverError) Fix() string {
	return strings.Join([]string{"llmbox uninstall --engine helm", "helm -n " + e.Namespace + " uninstall " + e.Name}, ", or ")
}
