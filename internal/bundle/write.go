package bundle

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
)

// Open opens a file that goes into a bundle.
type Open func(Entry) (io.ReadCloser, error)

// Write writes a bundle and returns the digest of its manifest. Each file is compared with
// the manifest while it is read: what is written is a whole bundle, or an error.
func Write(ctx context.Context, w io.Writer, m *Manifest, open Open, progress func(done int64)) (digest string, err error) {
	raw, digest, err := m.encode()
	if err != nil {
		return "", err
	}
	out, err := newFrames(w)
	if err != nil {
		return "", err
	}
	defer func() {
		if closed := out.Close(); err == nil {
			err = closed
		}
	}()
	archive := tar.NewWriter(out)
	if err := archive.WriteHeader(header(manifestName, int64(len(raw)))); err != nil {
		return "", fmt.Errorf("writing the manifest: %w", err)
	}
	if _, err := archive.Write(raw); err != nil {
		return "", fmt.Errorf("writing the manifest: %w", err)
	}
	// What a machine refuses a bundle by has a frame of its own.
	if err := archive.Flush(); err != nil {
		return "", fmt.Errorf("writing the manifest: %w", err)
	}
	if err := out.flush(); err != nil {
		return "", fmt.Errorf("writing the manifest: %w", err)
	}
	var done int64
	for _, e := range m.Entries {
		tell := func(n int64) {
			done += n
			if progress != nil {
				progress(done)
			}
		}
		if err := writeEntry(ctx, archive, e, open, tell); err != nil {
			return "", fmt.Errorf("writing %s: %w", e.Path, err)
		}
	}
	if err := archive.Close(); err != nil {
		return "", fmt.Errorf("ending the bundle: %w", err)
	}
	return digest, nil
}

func header(name string, size int64) *tar.Header {
	const mode = 0o644
	return &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: size}
}

func writeEntry(ctx context.Context, archive *tar.Writer, e Entry, open Open, tell func(int64)) error {
	from, err := open(e)
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }()
	if err := archive.WriteHeader(header(e.Path, e.Size)); err != nil {
		return err
	}
	// One byte more than declared is read, so that a file that grew is found.
	hashed := newHashing(&watched{ctx: ctx, from: io.LimitReader(from, e.Size+1), tell: tell})
	defer hashed.stop()
	n, err := io.Copy(archive, hashed)
	if err != nil {
		return err
	}
	if sum := hashed.sum(); n != e.Size || sum != e.SHA256 {
		return fmt.Errorf("%w: it has %d bytes and the SHA-256 %s, expected are %d and %s", ErrTampered, n, sum, e.Size, e.SHA256)
	}
	return nil
}

// watched reads until its context ends, and tells what it read.
type watched struct {
	ctx  context.Context
	from io.Reader
	tell func(int64)
}

func (w *watched) Read(p []byte) (int, error) {
	if err := context.Cause(w.ctx); err != nil {
		return 0, err
	}
	n, err := w.from.Read(p)
	w.tell(int64(n))
	return n, err
}

// hashing hashes what is read from it, beside whoever reads.
type hashing struct {
	from  io.Reader
	hash  hash.Hash
	todo  chan []byte
	free  chan []byte
	ended chan struct{}
}

func newHashing(from io.Reader) *hashing {
	const buffers, size = 4, 256 << 10
	h := &hashing{from: from, hash: sha256.New(), todo: make(chan []byte, buffers), free: make(chan []byte, buffers), ended: make(chan struct{})}
	for range buffers {
		h.free <- make([]byte, size)
	}
	go func() {
		defer close(h.ended)
		for piece := range h.todo {
			_, _ = h.hash.Write(piece)
			h.free <- piece[:cap(piece)]
		}
	}()
	return h
}

// WriteTo reads everything, hands it to be hashed and writes it.
func (h *hashing) WriteTo(w io.Writer) (n int64, err error) {
	for {
		buffer := <-h.free
		read, err := io.ReadFull(h.from, buffer)
		piece := buffer[:read]
		if read > 0 {
			// Both only read it.
			if _, failed := w.Write(piece); failed != nil {
				h.free <- buffer
				return n, failed
			}
			n += int64(read)
			h.todo <- piece
		} else {
			h.free <- buffer
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

func (h *hashing) Read(p []byte) (int, error) {
	n, err := h.from.Read(p)
	_, _ = h.hash.Write(p[:n])
	return n, err
}

// stop ends the hashing.
func (h *hashing) stop() {
	if h.todo != nil {
		close(h.todo)
		<-h.ended
		h.todo = nil
	}
}

func (h *hashing) sum() string {
	h.stop()
	return hex.EncodeToString(h.hash.Sum(nil))
}
