package bundle

import (
	"encoding/binary"
	"fmt"
	"io"
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"
)

const (
	// frameBytes is what one frame holds: large enough for the ratio, small enough for the
	// memory of reader and writer.
	frameBytes = 4 << 20
	// lookBytes are compressed at three places of a frame to find out what it promises,
	// and keptPercent is what must not be left of them for it to be worth while.
	lookBytes   = 16 << 10
	keptPercent = 95
	// rawBlockBytes is the largest block of a frame (RFC 8878, 3.1.1.2.4).
	rawBlockBytes = 128 << 10
	// The header of a frame that states its size in four bytes and needs no window
	// (RFC 8878, 3.1.1.1).
	frameMagic      = 0xFD2FB528
	frameDescriptor = 2<<6 | 1<<5
)

// frames writes a row of zstd frames, several at work at a time, in order.
type frames struct {
	encoder *zstd.Encoder
	buffer  []byte
	free    chan []byte
	spare   chan []byte // what outputs are made in
	queue   chan chan framed
	written chan error
	once    sync.Once

	mu     sync.Mutex
	failed error
}

// framed is one frame: what to write, and which buffer it frees.
type framed struct {
	input  []byte
	output []byte // nil: the input is stored
}

func newFrames(w io.Writer) (*frames, error) {
	workers := runtime.GOMAXPROCS(0)
	// Weights repeat nothing, and still have bytes that are likelier than others: a fifth of
	// bfloat16 goes by that alone.
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(workers), zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithAllLitEntropyCompression(true), zstd.WithEncoderCRC(false), zstd.WithWindowSize(frameBytes), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, fmt.Errorf("preparing the compression: %w", err)
	}
	f := &frames{
		encoder: encoder, free: make(chan []byte, 2*workers+2), queue: make(chan chan framed, workers), written: make(chan error, 1),
	}
	for range cap(f.free) {
		f.free <- make([]byte, 0, frameBytes)
	}
	f.spare = make(chan []byte, cap(f.free))
	f.buffer = <-f.free
	go f.write(w)
	return f, nil
}

// write puts finished frames out in their order.
func (f *frames) write(w io.Writer) {
	var failed error
	for result := range f.queue {
		one := <-result
		if failed == nil {
			if one.output != nil {
				_, failed = w.Write(one.output)
			} else {
				failed = store(w, one.input)
			}
			if failed != nil {
				f.mu.Lock()
				f.failed = failed
				f.mu.Unlock()
			}
		}
		f.recycle(one.output)
		f.free <- one.input[:0]
	}
	f.written <- failed
}

// store writes a frame of raw blocks.
func store(w io.Writer, data []byte) error {
	header := binary.LittleEndian.AppendUint32(nil, frameMagic)
	header = append(header, frameDescriptor)
	header = binary.LittleEndian.AppendUint32(header, uint32(len(data))) // #nosec G115 -- at most frameBytes
	for {
		block := data[:min(len(data), rawBlockBytes)]
		data = data[len(block):]
		size := uint32(len(block)) << 3 // #nosec G115 -- at most rawBlockBytes
		if len(data) == 0 {
			size |= 1
		}
		header = append(header, byte(size), byte(size>>8), byte(size>>16))
		if _, err := w.Write(header); err != nil {
			return err
		}
		if _, err := w.Write(block); err != nil {
			return err
		}
		if len(data) == 0 {
			return nil
		}
		header = header[:0]
	}
}

func (f *frames) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		take := min(len(p), frameBytes-len(f.buffer))
		f.buffer = append(f.buffer, p[:take]...)
		p = p[take:]
		if len(f.buffer) == frameBytes {
			if err := f.flush(); err != nil {
				return n - len(p), err
			}
		}
	}
	return n, nil
}

// ReadFrom lets files be read into the buffer of a frame without another between.
func (f *frames) ReadFrom(r io.Reader) (n int64, err error) {
	for {
		read, err := r.Read(f.buffer[len(f.buffer):frameBytes])
		f.buffer = f.buffer[:len(f.buffer)+read]
		n += int64(read)
		if len(f.buffer) == frameBytes {
			if err := f.flush(); err != nil {
				return n, err
			}
		}
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

// flush hands the buffer to a worker. There are as many of them as buffers.
func (f *frames) flush() error {
	f.mu.Lock()
	err := f.failed
	f.mu.Unlock()
	if err != nil {
		return err
	}
	if len(f.buffer) == 0 {
		return nil
	}
	result := make(chan framed, 1)
	data := f.buffer
	f.queue <- result
	go func() {
		one := framed{input: data}
		if f.worthIt(data) {
			if out := f.encoder.EncodeAll(data, f.room()); len(out) < len(data) {
				one.output = out
			} else {
				f.recycle(out)
			}
		}
		result <- one
	}()
	f.buffer = <-f.free
	return nil
}

// room is a buffer for an output, and recycle takes one back.
func (f *frames) room() []byte {
	select {
	case b := <-f.spare:
		return b
	default:
		return make([]byte, 0, frameBytes)
	}
}

func (f *frames) recycle(output []byte) {
	if output == nil {
		return
	}
	select {
	case f.spare <- output[:0]:
	default:
	}
}

// worthIt says whether a look at a frame promises that compressing it saves something.
func (f *frames) worthIt(data []byte) bool {
	const places = 3
	if len(data) < 2*places*lookBytes {
		return true
	}
	var look []byte
	for i := range places {
		at := i * (len(data) - lookBytes) / (places - 1)
		look = append(look, data[at:at+lookBytes]...)
	}
	return len(f.encoder.EncodeAll(look, nil))*100 < len(look)*keptPercent
}

// Close writes what is left.
func (f *frames) Close() error {
	err := f.flush()
	f.once.Do(func() {
		close(f.queue)
		if failed := <-f.written; err == nil {
			err = failed
		}
		if closed := f.encoder.Close(); err == nil {
			err = closed
		}
	})
	return err
}
