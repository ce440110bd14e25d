package machine

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/host"
)

const (
	// containerdSocket is there as soon as k3s has started containerd.
	containerdSocket = "/run/k3s/containerd/containerd.sock"
	// pullsAtATime leaves some of the kubelet's own (maxParallelImagePulls) free.
	pullsAtATime = 3
	// pullDeadline bounds one image: vLLM's 12 GB over 20 Mb/s.
	pullDeadline = 90 * time.Minute
	listDeadline = 30 * time.Second
	socketPause  = 300 * time.Millisecond
)

// Pulled is how far the images are.
type Pulled struct {
	// Present were there before, Done were pulled, Total is how many are wanted.
	Present, Done, Total int
	// Image is the one that was pulled last.
	Image string
	// Failed are those that could not be had; the kubelet tries them again itself.
	Failed []string
}

// Pull has k3s' containerd pull images, in this order and some at a time, from the
// moment that it answers, so that the kubelet finds them. It goes by the mirrors and
// credentials of k3s, and stops with the context.
func (h *Host) Pull(ctx context.Context, box config.Box, images []string, report func(Pulled)) (Pulled, error) {
	state := Pulled{Total: len(images)}
	binary, err := h.awaitContainerd(ctx, box)
	if err != nil {
		return state, err
	}
	missing, err := h.missingImages(ctx, binary, images)
	if err != nil {
		return state, err
	}
	state.Present = len(images) - len(missing)
	var mu sync.Mutex
	group, pulling := errgroup.WithContext(ctx)
	group.SetLimit(pullsAtATime)
	for _, image := range missing {
		group.Go(func() error {
			err := h.pull(pulling, binary, image)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				if pulling.Err() != nil {
					return context.Cause(pulling)
				}
				state.Failed = append(state.Failed, image+": "+err.Error())
			} else {
				state.Done, state.Image = state.Done+1, image
			}
			if report != nil {
				report(state)
			}
			return nil
		})
	}
	err = group.Wait()
	return state, err
}

// awaitContainerd waits until there is a k3s with a containerd that listens.
func (h *Host) awaitContainerd(ctx context.Context, box config.Box) (binary string, err error) {
	m := h.K3s(box)
	for {
		if _, err := h.files.Stat(ctx, containerdSocket); err == nil {
			record, err := m.Record(ctx)
			if err == nil && record.Binary.Path != "" {
				return record.Binary.Path, nil
			}
		}
		select {
		case <-ctx.Done():
			return "", context.Cause(ctx)
		case <-time.After(socketPause):
		}
	}
}

// missingImages keeps the images that containerd does not have, in their order.
func (h *Host) missingImages(ctx context.Context, binary string, images []string) ([]string, error) {
	for {
		result, err := h.o.Runner.Run(ctx, host.Command{
			Program: path.Base(binary), Directories: []string{path.Dir(binary)}, Deadline: listDeadline, Limit: 1 << 20,
			Args: []string{"ctr", "--namespace", "k8s.io", "images", "list", "-q"},
		})
		if err == nil && result.Exit == 0 {
			has := strings.Fields(string(result.Output))
			return slices.DeleteFunc(slices.Clone(images), func(image string) bool { return slices.Contains(has, image) }), nil
		}
		// The socket is there before containerd answers.
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(socketPause):
		}
	}
}

func (h *Host) pull(ctx context.Context, binary, image string) error {
	result, err := h.o.Runner.Run(ctx, host.Command{
		Program: path.Base(binary), Directories: []string{path.Dir(binary)}, Deadline: pullDeadline, Tail: true,
		Args: []string{"crictl", "pull", image},
	})
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case err != nil:
		return fmt.Errorf("pulling: %w", err)
	case result.Exit != 0:
		return fmt.Errorf("pulling: exit status %d: %s", result.Exit, lastLine(result.Output))
	}
	return nil
}
