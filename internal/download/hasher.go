package download

import (
	"context"
	"fmt"
	"hash"
	"io"
	"sync"
)

// handover bounds the buffers that wait for the hash.
const handover = 8

// hasher hashes a file in order while it is written in any order.
type hasher struct {
	hash    hash.Hash
	file    io.ReaderAt
	recycle func(*[]byte)

	mu    sync.Mutex
	queue []handed
	next  int64 // all before is hashed, queued or being read
	ready int64 // all before is in the file
	end   int64 // -1: not known yet
	wake  chan struct{}
}

type handed struct {
	buffer *[]byte
	length int
}

func newHasher(h hash.Hash, file io.ReaderAt, ready int64, recycle func(*[]byte)) *hasher {
	return &hasher{hash: h, file: file, ready: ready, end: -1, recycle: recycle, wake: make(chan struct{}, 1)}
}

// offer hands a buffer over that was written at offset. False: the caller keeps it,
// and it will be read back.
func (h *hasher) offer(offset int64, buffer *[]byte, length int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if offset != h.next || len(h.queue) >= handover {
		return false
	}
	h.queue, h.next = append(h.queue, handed{buffer, length}), offset+int64(length)
	h.signal()
	return true
}

// advance says up to where the file is complete.
func (h *hasher) advance(ready int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if ready > h.ready {
		h.ready = ready
		h.signal()
	}
}

// finish says where it ends.
func (h *hasher) finish(end int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.end = end
	h.signal()
}

func (h *hasher) signal() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// run hashes until the end is reached.
func (h *hasher) run(ctx context.Context) error {
	var back []byte
	for {
		h.mu.Lock()
		switch {
		case len(h.queue) > 0:
			first := h.queue[0]
			h.queue = h.queue[1:]
			h.mu.Unlock()
			_, _ = h.hash.Write((*first.buffer)[:first.length])
			h.recycle(first.buffer)
		case h.ready > h.next:
			from, n := h.next, min(h.ready-h.next, bufferSize)
			h.next += n
			h.mu.Unlock()
			if back == nil {
				back = make([]byte, bufferSize)
			}
			if _, err := h.file.ReadAt(back[:n], from); err != nil {
				return diskError{fmt.Errorf("reading back: %w", err)}
			}
			_, _ = h.hash.Write(back[:n])
		case h.end >= 0 && h.next >= h.end:
			h.mu.Unlock()
			return nil
		default:
			h.mu.Unlock()
			select {
			case <-h.wake:
				continue
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}
