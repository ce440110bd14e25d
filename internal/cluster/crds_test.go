package cluster

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func idleFeed() *CRDFeed {
	f := &CRDFeed{stop: make(chan struct{}), ended: make(chan struct{}), places: map[string]*crdPlace{}}
	f.free = sync.NewCond(&f.mu)
	close(f.ended)
	return f
}

// A held feed waits for the last hold, and a hold that is forgotten ends by itself.
func TestHold(t *testing.T) {
	f := idleFeed()
	if !f.awaitTurn(t.Context()) {
		t.Fatal("a free feed does not go on")
	}
	first, second := f.Hold(), f.Hold()
	turn := make(chan bool, 1)
	go func() { turn <- f.awaitTurn(t.Context()) }()
	first()
	first()
	select {
	case <-turn:
		t.Fatal("the feed went on while it was held")
	case <-time.After(50 * time.Millisecond):
	}
	second()
	if !<-turn {
		t.Error("the feed did not go on after the last hold")
	}
	f.Hold()
	if !f.awaitTurn(t.Context()) {
		t.Error("a forgotten hold stops the feed for good")
	}
}

// Whoever waits for a turn is let go, to do nothing more, by Stop and by the end of
// the context.
func TestHeldFeedEnds(t *testing.T) {
	f := idleFeed()
	defer f.Hold()()
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if f.awaitTurn(ctx) {
		t.Error("went on after the context ended")
	}
	time.AfterFunc(20*time.Millisecond, f.Stop)
	if f.awaitTurn(t.Context()) {
		t.Error("went on after Stop")
	}
}

// The first word about a CRD counts, being established only once it was sent.
func TestFeedSettles(t *testing.T) {
	crd := func(established string, accepted string) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"metadata": map[string]any{"name": "things.example.com"},
			"status": map[string]any{"conditions": []any{
				map[string]any{"type": "NamesAccepted", "status": accepted, "reason": "Conflict", "message": "taken"},
				map[string]any{"type": "Established", "status": established},
			}},
		}}
	}
	tests := []struct {
		name string
		do   func(f *CRDFeed)
		done bool
		err  error
	}{
		{"old one seen", func(f *CRDFeed) { f.see(crd("True", "True")) }, false, nil},
		{"sent, then established", func(f *CRDFeed) { f.markSent("things.example.com"); f.see(crd("True", "True")) }, true, nil},
		{"established before the answer came", func(f *CRDFeed) { f.see(crd("True", "True")); f.markSent("things.example.com") }, true, nil},
		{"refused", func(f *CRDFeed) { f.markSent("things.example.com"); f.see(crd("False", "False")) }, true, errCRDRefused},
		{"not yet", func(f *CRDFeed) { f.markSent("things.example.com"); f.see(crd("False", "True")) }, false, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := idleFeed()
			place := &crdPlace{done: make(chan struct{})}
			f.places["things.example.com"] = place
			tt.do(f)
			if place.finished != tt.done || !errors.Is(place.err, tt.err) {
				t.Errorf("done %v, %v; want %v, %v", place.finished, place.err, tt.done, tt.err)
			}
		})
	}
	f := idleFeed()
	f.places["a"] = &crdPlace{done: make(chan struct{})}
	f.settleAll(nil)
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("somebody asked")
	cancel(cause)
	if _, err := f.Await(ctx, []string{"a"}, nil, func(int, int) {}); !errors.Is(err, cause) {
		t.Errorf("interrupted: %v", err)
	}
	if _, err := f.Await(t.Context(), []string{"nobody's"}, nil, func(int, int) {}); err == nil {
		t.Error("a CRD that nobody applies was waited for")
	}
}
