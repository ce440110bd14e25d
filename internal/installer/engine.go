// Package installer turns a configuration into a plan and a plan into a
// running box: it orders the components, brings each in through an engine,
// waits at its readiness gates and keeps a journal, so that a run that was cut
// off is simply run again. It emits events and prints nothing.
package installer

import (
	"context"

	"github.com/llmbox-dev/llmbox/internal/chart"
)

// Engine brings releases into a cluster and takes them out again. Both methods
// that change something are atomic steps: a cancelled context is looked at
// before they start, not in the middle.
type Engine interface {
	// Name is "helm" or "helmchart".
	Name() string
	// Current returns the newest record of a release or chart.ErrNoRelease.
	Current(ctx context.Context, namespace, name string) (chart.Record, error)
	// Apply brings the release in if it differs from what is there.
	Apply(ctx context.Context, r chart.Release) (chart.Outcome, error)
	// Uninstall removes the release; one that isn't there is no error.
	Uninstall(ctx context.Context, namespace, name string) error
}
