// Package host is a read-only view of a machine, rooted at a directory, and the way
// to ask its programs. Nothing here can be stopped by the machine: every look has a
// deadline, a bound on what it takes in, and a goroutine of its own that is left
// behind when the kernel doesn't come back.
//
// It must not know what a file or a program is for, and it changes nothing.
package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// Errors that a look can end with, beside those of the package os.
var (
	// ErrDeadline means that the machine gave no answer in time.
	ErrDeadline = errors.New("no answer within the deadline")
	// ErrTooLarge means that there is more than the caller wanted to take in.
	ErrTooLarge = errors.New("too large")
	// ErrNotRegular means that reading was refused: a FIFO, a socket or a device
	// can block, and opening some devices has effects.
	ErrNotRegular = errors.New("not a regular file")
	// ErrLoop means that symbolic links lead round in circles.
	ErrLoop = errors.New("too many symbolic links")
	// ErrBusy means that so many looks never came back that no further one is begun.
	ErrBusy = errors.New("too many looks at this machine hang")
)

const (
	// DefaultDeadline bounds one look at a file when the context has no deadline.
	DefaultDeadline = 2 * time.Second
	// DefaultLimit bounds in bytes what is read of one file.
	DefaultLimit = 1 << 20
	// most bounds how many looks are under way or hang, each with an OS thread.
	most = 64
	// hops is how many symbolic links one path may lead through; Linux has the same
	// (path_resolution(7)).
	hops = 40
)

// Host is a machine whose file system begins at Root; empty means "/". Every path
// given and returned is absolute in the machine's own terms, and a symbolic link
// never leads out of a root that isn't "/". It is safe for concurrent use and must
// not be copied.
type Host struct {
	Root string

	begin sync.Once
	slots chan struct{}

	openOnce sync.Once
	handle   *os.Root
	openErr  error
}

// live says whether this is the machine itself and not a directory on it.
func (h *Host) live() bool { return h.Root == "" || h.Root == "/" }

// Bounded runs look in a goroutine of its own and waits for it until the context
// ends, for DefaultDeadline where that has no deadline. A look that does not come
// back is left behind; its answer is dropped.
func Bounded[T any](ctx context.Context, h *Host, look func() (T, error)) (T, error) {
	h.begin.Do(func() { h.slots = make(chan struct{}, most) })
	if _, has := ctx.Deadline(); !has {
		bounded, cancel := context.WithTimeout(ctx, DefaultDeadline)
		defer cancel()
		ctx = bounded
	}
	type answer struct {
		value T
		err   error
	}
	var none T
	select {
	case h.slots <- struct{}{}:
	case <-ctx.Done():
		return none, fmt.Errorf("%w: %w", ErrBusy, ended(ctx))
	}
	done := make(chan answer, 1)
	go func() {
		defer func() { <-h.slots }()
		value, err := look()
		done <- answer{value, err}
	}()
	select {
	case got := <-done:
		return got.value, got.err
	case <-ctx.Done():
		// What is ready by now still counts.
		select {
		case got := <-done:
			return got.value, got.err
		default:
			return none, ended(ctx)
		}
	}
}

// ended tells a deadline from being called off.
func ended(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return ErrDeadline
	}
	return ctx.Err()
}
