package weights

import (
	"context"
	"crypto/sha1" // #nosec G505 -- git names its blobs so
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/download"
)

// cacheSource is an HF_HOME in another directory: of a box that has the model already,
// on a disk that was carried over.
type cacheSource struct {
	o    Options
	root *os.Root
	repo string
}

func newCacheSource(o Options) (*cacheSource, error) {
	root, err := os.OpenRoot(o.Source)
	if err != nil {
		return nil, fmt.Errorf("opening the source of the weights: %w", err)
	}
	return &cacheSource{o: o, root: root, repo: "hub/models--" + strings.ReplaceAll(o.Model, "/", "--")}, nil
}

func (c *cacheSource) close() { _ = c.root.Close() }

// list reads the snapshot: its links name each file's checksum.
func (c *cacheSource) list(ctx context.Context) (listing, error) {
	list := listing{SHA: c.o.Revision}
	if !sha1Pattern.MatchString(c.o.Revision) {
		raw, err := c.root.ReadFile(c.repo + "/refs/" + c.o.Revision)
		if errors.Is(err, fs.ErrNotExist) {
			return list, fmt.Errorf("%w: %s has no %s", ErrNoModel, c.o.Source, c.repo+"/refs/"+c.o.Revision)
		}
		if err != nil {
			return list, err
		}
		list.SHA = strings.TrimSpace(string(raw))
	}
	if !sha1Pattern.MatchString(list.SHA) {
		return list, fmt.Errorf("%w: no commit", errListing)
	}
	snapshot := c.repo + "/snapshots/" + list.SHA
	err := fs.WalkDir(c.root.FS(), snapshot, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		to, err := c.root.Readlink(name)
		if err != nil {
			return fmt.Errorf("%w: %s is no link to a blob", errListing, name)
		}
		f := hubFile{Name: strings.TrimPrefix(name, snapshot+"/"), BlobID: path.Base(to)}
		if sha256Pattern.MatchString(f.BlobID) {
			f.LFS = &struct {
				SHA256 string `json:"sha256"`
			}{f.BlobID}
		}
		info, err := c.root.Stat(c.repo + "/blobs/" + f.BlobID)
		if err != nil {
			return fmt.Errorf("%w: %s has no content", errListing, name)
		}
		f.Size = info.Size()
		list.Siblings = append(list.Siblings, f)
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return list, fmt.Errorf("%w: %s has no %s", ErrNoModel, c.o.Source, snapshot)
	}
	if err != nil {
		return list, err
	}
	return list, list.check()
}

// fetch copies a blob and compares what was copied with its name.
func (c *cacheSource) fetch(ctx context.Context, _ *Weights, root *os.Root, blob string, f hubFile, progress func(download.Progress)) (err error) {
	from, err := c.root.Open(c.repo + "/blobs/" + f.blob())
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }()
	temporary := blob + ".part"
	to, err := root.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = to.Close()
			_ = root.Remove(temporary)
		}
	}()
	sum := f.hash()
	began := time.Now()
	reader := &counted{ctx: ctx, from: from, tell: func(n int64) {
		progress(download.Progress{Done: n, Total: f.Size, Rate: float64(n) / max(time.Since(began).Seconds(), 1e-3)})
	}}
	n, err := io.Copy(io.MultiWriter(to, sum), reader)
	if err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); n != f.Size || got != f.blob() {
		return &download.ChecksumError{URL: path.Join(c.o.Source, c.repo, "blobs", f.blob()), Algorithm: "blob", Want: f.blob(), Got: got}
	}
	if err = to.Sync(); err != nil {
		return err
	}
	if err = to.Close(); err != nil {
		return err
	}
	return root.Rename(temporary, blob)
}

// hash is what a file's name in the cache is made by.
func (f hubFile) hash() hash.Hash {
	if f.LFS != nil {
		return sha256.New()
	}
	h := sha1.New() // #nosec G401 -- as above
	_, _ = fmt.Fprintf(h, "blob %d\x00", f.Size)
	return h
}

// counted reads until its context ends, and tells how far it is.
type counted struct {
	ctx  context.Context
	from io.Reader
	n    int64
	tell func(int64)
}

func (c *counted) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.from.Read(p)
	c.n += int64(n)
	c.tell(c.n)
	return n, err
}
