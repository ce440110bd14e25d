package machine

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/host"
)

// runtimeOf answers as k3s' ctr and crictl do.
type runtimeOf struct {
	mu     sync.Mutex
	has    []string
	refuse string
	hang   bool
	deaf   int // answers of ctr that come too early
	pulled []string
}

func (r *runtimeOf) Run(ctx context.Context, c host.Command) (host.Result, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.Args[0] == "ctr" {
		if r.deaf > 0 {
			r.deaf--
			return host.Result{Exit: 1, Output: []byte("ctr: connection refused")}, nil
		}
		return host.Result{Output: []byte(strings.Join(r.has, "\n") + "\n")}, nil
	}
	image := c.Args[2]
	if r.hang {
		r.mu.Unlock()
		<-ctx.Done()
		r.mu.Lock()
		return host.Result{}, ctx.Err()
	}
	if image == r.refuse {
		return host.Result{Exit: 1, Output: []byte("E1201 pulling image failed\nnot found\n")}, nil
	}
	r.pulled = append(r.pulled, image)
	return host.Result{}, nil
}

func TestPull(t *testing.T) {
	images := []string{"example.com/a:1", "example.com/b:1", "example.com/c:1"}
	// started is a machine on which k3s has begun to run.
	started := func(t *testing.T, r *runtimeOf) *Host {
		h := New(Options{Root: t.TempDir(), Runner: r})
		must(t, writeFile(h.at("/var/lib/llmbox/k3s.json"), 0o600, []byte(`{"apiVersion":"llmbox.dev/v1alpha1","kind":"K3s","binary":{"path":"/usr/local/bin/k3s"}}`)))
		must(t, os.MkdirAll(filepath.Dir(h.at(containerdSocket)), 0o700))
		must(t, os.WriteFile(h.at(containerdSocket), nil, 0o600))
		return h
	}
	for _, tt := range []struct {
		name    string
		runtime *runtimeOf
		want    Pulled
	}{
		{"all", &runtimeOf{}, Pulled{Done: 3, Total: 3}},
		{"some are there", &runtimeOf{has: []string{"example.com/b:1", "sha256:00"}}, Pulled{Present: 1, Done: 2, Total: 3}},
		{"all are there", &runtimeOf{has: images}, Pulled{Present: 3, Total: 3}},
		{"containerd is slow to answer", &runtimeOf{deaf: 2}, Pulled{Done: 3, Total: 3}},
		{"one can't be had", &runtimeOf{refuse: images[1]}, Pulled{Done: 2, Total: 3, Failed: []string{"example.com/b:1: pulling: exit status 1: not found"}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := started(t, tt.runtime)
			got, err := h.Pull(t.Context(), testBox(t), images, nil)
			must(t, err)
			if got.Present != tt.want.Present || got.Done != tt.want.Done || got.Total != tt.want.Total || !slices.Equal(got.Failed, tt.want.Failed) {
				t.Errorf("it is %+v, want %+v", got, tt.want)
			}
		})
	}
	t.Run("it stops with the run", func(t *testing.T) {
		h := started(t, &runtimeOf{hang: true})
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := h.Pull(ctx, testBox(t), images, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("it ends with %v", err)
		}
	})
	t.Run("there is no k3s yet", func(t *testing.T) {
		h := New(Options{Root: t.TempDir(), Runner: &runtimeOf{}})
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := h.Pull(ctx, testBox(t), images, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("it ends with %v", err)
		}
	})
}
