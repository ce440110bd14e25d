package installer

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/llmbox-dev/llmbox/internal/cluster"
)

// ErrHook means that a Job which a chart runs as a hook has failed.
var ErrHook = errors.New("a hook of the chart failed")

// HookError adds what a hook's pod left to Helm's own error, which only says that the
// hook failed.
type HookError struct {
	Job    cluster.JobRef
	Reason string

	cause error
}

func (e *HookError) Error() string {
	return fmt.Sprintf("hook Job %s: %s: %v", e.Job, e.Reason, e.cause)
}

func (e *HookError) Unwrap() []error { return []error{ErrHook, e.cause} }

// Fix is what a person types.
func (e *HookError) Fix() string {
	return fmt.Sprintf("kubectl -n %s logs job/%s shows the whole log; remove the cause, then run llmbox install again", e.Job.Namespace, e.Job.Name)
}

// hookAnnotation marks objects that Helm runs at a point of an operation.
const hookAnnotation = "helm.sh/hook"

// hookJobs lists the Jobs among a release's hooks.
func hookJobs(objects []*unstructured.Unstructured, namespace string) []cluster.JobRef {
	var refs []cluster.JobRef
	for _, o := range objects {
		if _, hook := o.GetAnnotations()[hookAnnotation]; !hook || o.GetKind() != "Job" {
			continue
		}
		ref := cluster.JobRef{Namespace: o.GetNamespace(), Name: o.GetName()}
		if ref.Namespace == "" {
			ref.Namespace = namespace
		}
		if !slices.Contains(refs, ref) {
			refs = append(refs, ref)
		}
	}
	return refs
}

// watchHooks remembers which hook Jobs are there before a release is applied. What it
// returns explains an error by those that are new.
func (r *Run) watchHooks(ctx context.Context, s Step) func(error) error {
	refs := hookJobs(s.Objects, s.Namespace)
	if len(refs) == 0 {
		return func(err error) error { return err }
	}
	known, err := r.client.KnownJobs(ctx, refs)
	if err != nil {
		r.log.Debug("looking for the Jobs of hooks", "component", s.Name, "error", err)
		known = map[cluster.JobRef]types.UID{}
	}
	return func(err error) error {
		if err == nil {
			return nil
		}
		job, reason := r.client.FailedJob(ctx, refs, known)
		if reason == "" {
			return err
		}
		return &HookError{Job: job, Reason: reason, cause: err}
	}
}
