package bundle

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
)

// Parts are what a bundle is made of.
type Parts struct {
	Version, Architecture string
	// LLMBox and K3s are programs, K3sSums the release's list of checksums, whose name is
	// kept; it is empty where whoever makes the bundle named the binary.
	LLMBox, K3s, K3sSums string
	// K3sName is what the release calls the binary, K3sVersion the release.
	K3sName, K3sVersion string
	Images              []Wanted
	// Model is nil for a bundle without weights; Files are its files.
	Model *Model
	Files []WeightsFile
	// Work is a directory of the bundle's own, in which downloads are kept until it is
	// whole.
	Work string
}

// WeightsFile is one file of a model.
type WeightsFile struct {
	// At is where it lies, Blob its name in the hub's cache.
	At, Blob string
}

// Progress is how far the making of a bundle is.
type Progress struct {
	// Doing is one of "resolve", "fetch" and "write".
	Doing       string
	Done, Total int64
}

// Create fetches what is missing, and writes a bundle.
func Create(ctx context.Context, p Parts, from *Registries, out io.Writer, progress func(Progress)) (*Manifest, string, error) {
	if progress == nil {
		progress = func(Progress) {}
	}
	m := &Manifest{
		Format: Format, Version: p.Version, Architecture: p.Architecture, Model: p.Model,
		K3s: K3s{Version: p.K3sVersion, Named: p.K3sSums == ""},
	}
	blobs := filepath.Join(p.Work, "blobs")
	if err := os.MkdirAll(blobs, dirMode); err != nil { // #nosec G301 -- no secret
		return nil, "", fmt.Errorf("making the work directory: %w", err)
	}
	root, err := os.OpenRoot(blobs)
	if err != nil {
		return nil, "", fmt.Errorf("opening the work directory: %w", err)
	}
	defer func() { _ = root.Close() }()
	images, err := p.fetchImages(ctx, from, root, progress)
	if err != nil {
		return nil, "", err
	}
	files := map[string]string{}
	if err := p.list(ctx, m, images, files, root); err != nil {
		return nil, "", err
	}
	total := m.Bytes()
	var last Entry
	digest, err := Write(ctx, out, m, func(e Entry) (io.ReadCloser, error) {
		last = e
		if e.Kind == KindBlob {
			return root.Open(e.SHA256)
		}
		return os.Open(files[e.Path])
	}, func(done int64) { progress(Progress{Doing: "write", Done: done, Total: total}) })
	if errors.Is(err, ErrTampered) && last.Kind == KindBlob {
		// The next run fetches it anew.
		err = errors.Join(err, root.Remove(last.SHA256))
	}
	if err != nil {
		return nil, "", err
	}
	return m, digest, nil
}

func (p Parts) fetchImages(ctx context.Context, from *Registries, root *os.Root, progress func(Progress)) ([]*found, error) {
	images := make([]*found, 0, len(p.Images))
	var total int64
	seen := map[string]bool{}
	for i, w := range p.Images {
		progress(Progress{Doing: "resolve", Done: int64(i), Total: int64(len(p.Images))})
		f, err := from.resolve(ctx, w)
		if err != nil {
			return nil, err
		}
		for blob, size := range f.sizes {
			if !seen[blob] {
				seen[blob] = true
				total += size
			}
		}
		images = append(images, f)
	}
	if err := from.fetch(ctx, images, root, func(done int64) { progress(Progress{Doing: "fetch", Done: done, Total: total}) }); err != nil {
		return nil, err
	}
	for _, f := range images {
		is, err := architectureOf(root, f)
		if err != nil {
			return nil, err
		}
		if is != p.Architecture {
			return nil, fmt.Errorf("%w: %s is for %s", ErrArchitecture, f.image.Reference, is)
		}
	}
	return images, nil
}

// list names every file, in the order in which an install has a use for it.
func (p Parts) list(ctx context.Context, m *Manifest, images []*found, files map[string]string, root *os.Root) error {
	add := func(e Entry, at string) error {
		size, sum, err := measure(ctx, at)
		if err != nil {
			return fmt.Errorf("reading %s: %w", at, err)
		}
		e.Size, e.SHA256 = size, sum
		m.Entries, files[e.Path] = append(m.Entries, e), at
		return nil
	}
	if err := add(Entry{Path: "llmbox", Kind: KindLLMBox}, p.LLMBox); err != nil {
		return err
	}
	if err := add(Entry{Path: "k3s/" + p.K3sName, Kind: KindK3s}, p.K3s); err != nil {
		return err
	}
	if p.K3sSums != "" {
		if err := add(Entry{Path: "k3s/" + filepath.Base(p.K3sSums), Kind: KindK3sSums}, p.K3sSums); err != nil {
			return err
		}
	}
	seen := map[string]bool{}
	for _, g := range Groups() {
		if g == GroupRest {
			for _, f := range p.Files {
				e := Entry{Path: "weights/blobs/" + f.Blob, Kind: KindWeights, Blob: f.Blob}
				if seen[e.Path] {
					continue // two names of one content
				}
				seen[e.Path] = true
				if err := p.addWeights(ctx, m, e, f.At, files); err != nil {
					return err
				}
			}
		}
		for _, f := range images {
			if f.image.Group != g {
				continue
			}
			m.Images = append(m.Images, f.image)
			for _, blob := range f.image.Blobs {
				if !seen[blob] {
					seen[blob] = true
					m.Entries = append(m.Entries, Entry{Path: "images/blobs/sha256/" + blob, Kind: KindBlob, Size: f.sizes[blob], SHA256: blob})
				}
			}
		}
	}
	return nil
}

// addWeights takes a large file's SHA-256 from its name, and writing compares it.
func (p Parts) addWeights(ctx context.Context, m *Manifest, e Entry, at string, files map[string]string) error {
	if sumPattern.MatchString(e.Blob) {
		info, err := os.Stat(at)
		if err != nil {
			return fmt.Errorf("reading the weights: %w", err)
		}
		e.Size, e.SHA256 = info.Size(), e.Blob
	} else {
		var err error
		if e.Size, e.SHA256, err = measure(ctx, at); err != nil {
			return fmt.Errorf("reading the weights: %w", err)
		}
	}
	m.Entries, files[e.Path] = append(m.Entries, e), at
	return nil
}

func measure(ctx context.Context, at string) (int64, string, error) {
	file, err := os.Open(at) // #nosec G304 -- a part that the caller names
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = file.Close() }()
	hash := sha256.New()
	n, err := io.Copy(hash, &watched{ctx: ctx, from: file, tell: func(int64) {}})
	return n, hex.EncodeToString(hash.Sum(nil)), err
}

// tally adds up what many downloads have come to.
type tally struct {
	mu   sync.Mutex
	each map[string]int64
	sum  int64
	tell func(int64)
}

func newTally(tell func(int64)) *tally { return &tally{each: map[string]int64{}, tell: tell} }

func (t *tally) set(name string, done int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sum += done - t.each[name]
	t.each[name] = done
	t.tell(t.sum)
}

// Detached is the content of the file beside a bundle that names its digest. It is what
// gets signed: FILE.digest.
func Detached(digest string) []byte { return []byte(digest + "  " + manifestName + "\n") }

// ErrDetached means that a bundle is not the one that the file beside it names.
var ErrDetached = errors.New("the bundle is not the one that its digest file names")

// CheckDetached compares a bundle with the file beside it.
func CheckDetached(content []byte, digest string) error {
	if string(content) != string(Detached(digest)) {
		return fmt.Errorf("%w: its manifest has the SHA-256 %s", ErrDetached, digest)
	}
	return nil
}
