package images

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// File is one file of an image.
type File struct {
	// Path inside the image, absolute.
	Path string
	// Source is a file of this machine; empty for Content or Link.
	Source string
	// Link makes a symbolic link to it.
	Link string
	// Content is the file's text.
	Content string
	// Mode defaults to 0755 for a Source and 0644 for Content.
	Mode int64
	// Owner is the numeric user and group of a directory (Path ends in a slash).
	Owner int
}

// fileLayer is an uncompressed layer that is read from its source files each time
// somebody asks for it: a node pulls an image once, so a copy would only cost disk.
type fileLayer struct {
	files  []File
	digest v1.Hash
	size   int64
}

func newLayer(files []File) (*fileLayer, error) {
	l := &fileLayer{files: files}
	sum := sha256.New()
	size, err := l.write(sum)
	if err != nil {
		return nil, err
	}
	l.size = size
	l.digest = v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil))}
	return l, nil
}

// Digest implements v1.Layer.
func (l *fileLayer) Digest() (v1.Hash, error) { return l.digest, nil }

// DiffID implements v1.Layer: uncompressed, so it is the digest.
func (l *fileLayer) DiffID() (v1.Hash, error) { return l.digest, nil }

// Size implements v1.Layer.
func (l *fileLayer) Size() (int64, error) { return l.size, nil }

// MediaType implements v1.Layer.
func (l *fileLayer) MediaType() (types.MediaType, error) { return types.OCIUncompressedLayer, nil }

// Compressed implements v1.Layer.
func (l *fileLayer) Compressed() (io.ReadCloser, error) { return l.Uncompressed() }

// Uncompressed implements v1.Layer.
func (l *fileLayer) Uncompressed() (io.ReadCloser, error) {
	r, w := io.Pipe()
	go func() {
		_, err := l.write(w)
		_ = w.CloseWithError(err)
	}()
	return r, nil
}

// write makes the same bytes each time: no times, no owners of this machine.
func (l *fileLayer) write(w io.Writer) (int64, error) {
	count := &counter{to: w}
	t := tar.NewWriter(count)
	made := map[string]bool{"/": true}
	dirs := func(of string) error {
		var missing []string
		for dir := path.Dir(of); !made[dir]; dir = path.Dir(dir) {
			missing = append(missing, dir)
			made[dir] = true
		}
		slices.Reverse(missing)
		for _, dir := range missing {
			if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: strings.TrimPrefix(dir, "/") + "/", Mode: 0o755, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}); err != nil {
				return err
			}
		}
		return nil
	}
	for _, f := range l.files {
		name := path.Clean(f.Path)
		if err := dirs(name); err != nil {
			return 0, fmt.Errorf("adding %s: %w", f.Path, err)
		}
		if err := f.write(t, strings.TrimPrefix(name, "/")); err != nil {
			return 0, fmt.Errorf("adding %s: %w", f.Path, err)
		}
		made[name] = true
	}
	if err := t.Close(); err != nil {
		return 0, fmt.Errorf("ending a layer: %w", err)
	}
	return count.n, nil
}

func (f File) write(t *tar.Writer, name string) error {
	h := &tar.Header{Name: name, Mode: f.Mode, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
	switch {
	case strings.HasSuffix(f.Path, "/"):
		h.Typeflag, h.Name, h.Uid, h.Gid = tar.TypeDir, name+"/", f.Owner, f.Owner
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		return t.WriteHeader(h)
	case f.Link != "":
		h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, f.Link, 0o777
		return t.WriteHeader(h)
	case f.Source == "":
		h.Typeflag, h.Size = tar.TypeReg, int64(len(f.Content))
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		_, err := io.WriteString(t, f.Content)
		return err
	}
	in, err := os.Open(f.Source)
	if err != nil {
		return err
	}
	info, err := in.Stat()
	if err == nil {
		h.Typeflag, h.Size = tar.TypeReg, info.Size()
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		if err = t.WriteHeader(h); err == nil {
			_, err = io.Copy(t, in)
		}
	}
	return errors.Join(err, in.Close())
}

type counter struct {
	to io.Writer
	n  int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.to.Write(b)
	c.n += int64(n)
	return n, err
}
