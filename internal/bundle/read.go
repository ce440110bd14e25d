package bundle

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"
)

const (
	// windowBytes bounds the memory that a frame can ask for.
	windowBytes = 8 << 20
	// perEntryBytes is what a file may cost beside its content: its header, an extended
	// one, and padding.
	perEntryBytes = 4 << 10
	// slackBytes are the end of the archive.
	slackBytes = 64 << 10
)

// Reader reads a bundle as it comes.
type Reader struct {
	manifest *Manifest
	raw      []byte
	digest   string
	source   *source
	zstd     *zstd.Decoder
	bound    *bounded
	tar      *tar.Reader
	used     bool
}

// NewReader reads a bundle's manifest and refuses what is none. Nothing that follows has
// been looked at then.
func NewReader(r io.Reader) (*Reader, error) {
	source := &source{from: r}
	decoder, err := zstd.NewReader(source, zstd.WithDecoderMaxWindow(windowBytes), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotBundle, err)
	}
	b := &Reader{zstd: decoder, source: source, bound: &bounded{from: decoder, left: maxManifestBytes + slackBytes}}
	b.tar = tar.NewReader(b.bound)
	if err := b.begin(); err != nil {
		decoder.Close()
		return nil, err
	}
	return b, nil
}

func (b *Reader) begin() error {
	head, err := b.tar.Next()
	switch {
	case errors.Is(err, ErrBomb):
		return err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: before its manifest", ErrTruncated)
	case err != nil && b.source.failed():
		return fmt.Errorf("reading the bundle: %w", err)
	case err != nil:
		return fmt.Errorf("%w: %w", ErrNotBundle, err)
	case head.Typeflag != tar.TypeReg || head.Name != manifestName:
		return fmt.Errorf("%w: it begins with %q", ErrNotBundle, head.Name)
	case head.Size > maxManifestBytes:
		return fmt.Errorf("%w: it is longer than %d bytes", ErrManifest, maxManifestBytes)
	}
	raw, err := io.ReadAll(b.tar)
	if err != nil {
		return b.broken("reading the manifest", err)
	}
	b.raw, b.digest = raw, digestOf(raw)
	if b.manifest, err = decode(raw); err != nil {
		return err
	}
	b.bound.left = b.manifest.Bytes() + int64(len(b.manifest.Entries)+1)*perEntryBytes + slackBytes
	return nil
}

// Manifest is what the bundle says of itself.
func (b *Reader) Manifest() *Manifest { return b.manifest }

// Digest is the SHA-256 of the manifest, which stands for the whole bundle.
func (b *Reader) Digest() string { return b.digest }

// WriteHead writes the beginning of the bundle, which has its digest: where everything
// else lies unpacked already, it stands for the whole.
func (b *Reader) WriteHead(w io.Writer) error {
	out, err := newFrames(w)
	if err != nil {
		return err
	}
	archive := tar.NewWriter(out)
	err = archive.WriteHeader(header(manifestName, int64(len(b.raw))))
	if err == nil {
		_, err = archive.Write(b.raw)
	}
	if err == nil {
		err = archive.Flush()
	}
	if err := errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("writing the beginning of the bundle: %w", err)
	}
	return nil
}

// Close gives up what NewReader took; the stream beneath stays its owner's.
func (b *Reader) Close() { b.zstd.Close() }

// Place takes one file in. What it was given is verified only when it is told to keep it.
type Place interface {
	io.Writer
	// Keep is called once everything was written and is what the manifest says.
	Keep() error
	// Drop is called otherwise.
	Drop()
}

// Receiver says where a file goes; a nil Place has it read and verified alone.
type Receiver func(Entry) (Place, error)

// Each reads everything that is left, verifies it and hands it on. It succeeds only when
// the whole bundle is what its manifest says.
func (b *Reader) Each(ctx context.Context, to Receiver, progress func(done int64, e Entry)) error {
	if b.used {
		return errors.New("a bundle can be read once")
	}
	b.used = true
	seen := map[string]bool{manifestName: true}
	var done int64
	for _, e := range b.manifest.Entries {
		head, err := b.tar.Next()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return fmt.Errorf("%w: %s is missing", ErrTruncated, e.Path)
			}
			return b.broken("reading the header of "+e.Path, err)
		}
		if err := expected(head, e, seen); err != nil {
			return err
		}
		seen[e.Path] = true
		tell := func(n int64) {
			done += n
			if progress != nil {
				progress(done, e)
			}
		}
		if err := b.one(ctx, e, to, tell); err != nil {
			return err
		}
	}
	head, err := b.tar.Next()
	switch {
	case err == nil:
		return fmt.Errorf("after the last file: %w", expected(head, Entry{}, seen))
	case !errors.Is(err, io.EOF):
		return b.broken("reading the end", err)
	}
	// Behind the end of the archive there is padding at most.
	rest, err := io.Copy(io.Discard, b.bound)
	if err != nil {
		return b.broken("reading the end", err)
	}
	if rest > slackBytes {
		return fmt.Errorf("%w: %d bytes follow its end", ErrBomb, rest)
	}
	return nil
}

// expected refuses what is not the file that has to come now.
func expected(head *tar.Header, e Entry, seen map[string]bool) error {
	switch head.Typeflag {
	case tar.TypeReg:
	case tar.TypeLink, tar.TypeSymlink:
		return fmt.Errorf("%w: %q to %q", ErrLink, head.Name, head.Linkname)
	case tar.TypeDir:
		return fmt.Errorf("%w: directory %q", ErrUnexpected, head.Name)
	default:
		return fmt.Errorf("%w: %q", ErrDevice, head.Name)
	}
	if head.Name == e.Path {
		if head.Size != e.Size {
			return fmt.Errorf("%w: %q has %d bytes, declared are %d", ErrTampered, head.Name, head.Size, e.Size)
		}
		return nil
	}
	if err := checkName(head.Name); err != nil {
		return err
	}
	if seen[head.Name] {
		return fmt.Errorf("%w: %q", ErrDuplicate, head.Name)
	}
	return fmt.Errorf("%w: %q instead of %q", ErrUnexpected, head.Name, e.Path)
}

func (b *Reader) one(ctx context.Context, e Entry, to Receiver, tell func(int64)) error {
	var place Place
	if to != nil {
		var err error
		if place, err = to(e); err != nil {
			return fmt.Errorf("placing %s: %w", e.Path, err)
		}
	}
	var out io.Writer = io.Discard
	if place != nil {
		out = place
	}
	sink := &marking{to: out}
	hashed := newHashing(&watched{ctx: ctx, from: b.tar, tell: tell})
	defer hashed.stop()
	n, err := hashed.WriteTo(sink)
	switch {
	case err != nil && sink.failed:
		err = fmt.Errorf("placing %s: %w", e.Path, err)
	case err != nil:
		err = b.broken("reading "+e.Path, err)
	case n != e.Size:
		err = fmt.Errorf("%w: %s has %d of %d bytes", ErrTruncated, e.Path, n, e.Size)
	default:
		if sum := hashed.sum(); sum != e.SHA256 {
			err = fmt.Errorf("%w: %s has the SHA-256 %s, the manifest says %s", ErrTampered, e.Path, sum, e.SHA256)
		}
	}
	if place == nil {
		return err
	}
	if err != nil {
		place.Drop()
		return err
	}
	if err := place.Keep(); err != nil {
		return fmt.Errorf("placing %s: %w", e.Path, err)
	}
	return nil
}

// marking remembers whether it was the writing that failed.
type marking struct {
	to     io.Writer
	failed bool
}

func (m *marking) Write(p []byte) (int, error) {
	n, err := m.to.Write(p)
	m.failed = m.failed || err != nil
	return n, err
}

// broken says what a failure to read means.
func (b *Reader) broken(doing string, err error) error {
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, ErrBomb):
		return fmt.Errorf("%s: %w", doing, err)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return fmt.Errorf("%w: %s: %w", ErrTruncated, doing, err)
	case b.source.failed():
		return fmt.Errorf("%s: %w", doing, err)
	case errors.Is(err, zstd.ErrDecoderSizeExceeded), errors.Is(err, zstd.ErrWindowSizeExceeded):
		return fmt.Errorf("%w: %s: %w", ErrBomb, doing, err)
	}
	// The stream was read well and is no right zstd, or no right archive.
	return fmt.Errorf("%w: %s: %w", ErrTampered, doing, err)
}

// source remembers whether the stream itself could not be read.
type source struct {
	from io.Reader
	bad  atomic.Bool // the decoder reads ahead
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.from.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.bad.Store(true)
	}
	return n, err
}

func (s *source) failed() bool { return s.bad.Load() }

// bounded gives out so many bytes and no more.
type bounded struct {
	from io.Reader
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, ErrBomb
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.from.Read(p)
	b.left -= int64(n)
	return n, err
}
