package installer

import (
	"context"
	"errors"
	"fmt"

	"github.com/llmbox-dev/llmbox/internal/chart"
)

// RestoredError is a change of a component that failed and was taken back.
type RestoredError struct {
	// Revision is the one that holds the former release again.
	Revision int
	Err      error
}

func (e *RestoredError) Error() string {
	return fmt.Sprintf("%s; what was there before is back as revision %d", e.Err, e.Revision)
}

func (e *RestoredError) Unwrap() error { return e.Err }

// former is the release that a change of the component would take the place of, where
// the last run left it ready. A first install is never taken back: people want to look.
func (r *Run) former(ctx context.Context, s Step) (*chart.Release, error) {
	if s.Release == nil || r.state == nil {
		return nil, nil
	}
	last, known := r.state.Last(s.Name)
	if !known || last.Status != componentReady && last.Status != componentRestored {
		return nil, nil
	}
	digest, err := s.Release.Digest()
	if err != nil {
		return nil, err
	}
	record, err := r.engine.Current(ctx, s.Release.Namespace, s.Release.Name)
	if errors.Is(err, chart.ErrNoRelease) {
		return nil, nil
	}
	if err != nil || record.Revision != last.Revision || record.Digest == digest {
		return nil, err
	}
	former, err := chart.NewRecords(r.client.Kube).Release(ctx, s.Release.Namespace, s.Release.Name, record.Revision)
	if err != nil {
		// Not being able to go back is no reason not to go on.
		r.log.Warn("the present release can't be kept to go back to", "component", s.Name, "error", err)
		return nil, nil
	}
	return &former, nil
}

// restore puts the former release back after a change that failed, and says so in the
// error.
func (r *Run) restore(ctx context.Context, s Step, former *chart.Release, failure error) error {
	var out chart.Outcome
	err := r.phase(s.Path()+"/restore", "Putting back what was there before", func() (string, error) {
		var err error
		out, err = r.engine.Apply(ctx, *former)
		return fmt.Sprintf("revision %d", out.Revision), err
	})
	if err != nil {
		return errors.Join(failure, fmt.Errorf("putting back what was there before: %w", err))
	}
	return &RestoredError{Revision: out.Revision, Err: failure}
}
