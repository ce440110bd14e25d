// Package images makes container images out of programs that were built from Go
// modules, and serves them from a registry of the lab's own under the references
// that upstream gives to its images.
//
// It knows how an image is put together and found. Which of them a cluster asks
// for is none of its business.
package images

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Image is what the lab serves under a reference.
type Image struct {
	// Reference is upstream's own, with its registry.
	Reference string
	// Program is the built program inside it.
	Program string
	// StandIn says that Program is not upstream's.
	StandIn bool
	Files   []File
	// Entrypoint, Cmd, Env, User and WorkingDir as in upstream's image.
	Entrypoint []string
	Cmd        []string
	Env        []string
	User       string
	WorkingDir string
}

// ErrMissing means that a program of an image has not been built.
var ErrMissing = errors.New("not built yet")

// Missing lists the source files that are not there or can't run in an image that
// holds nothing but its files.
func (i Image) Missing() []string {
	holds := map[string]bool{}
	for _, f := range i.Files {
		holds[f.Path] = true
	}
	var missing []string
	for _, f := range i.Files {
		if f.Source == "" {
			continue
		}
		if _, err := os.Stat(f.Source); err != nil {
			missing = append(missing, f.Source+" (not there)")
			continue
		}
		if program, err := elf.Open(f.Source); err == nil {
			if loader := interpreter(program); loader != "" && !holds[loader] {
				missing = append(missing, f.Source+" (linked dynamically, and the image has no "+loader+": build it with CGO_ENABLED=0)")
			}
			_ = program.Close()
		}
	}
	return missing
}

// interpreter is the dynamic loader that a program names, "" if it needs none.
func interpreter(program *elf.File) string {
	for _, p := range program.Progs {
		if p.Type == elf.PT_INTERP {
			raw, err := io.ReadAll(p.Open())
			if err != nil {
				return "dynamic loader"
			}
			return strings.TrimRight(string(raw), "\x00")
		}
	}
	return ""
}

func (i Image) build() (v1.Image, *fileLayer, error) {
	layer, err := newLayer(i.Files)
	if err != nil {
		return nil, nil, fmt.Errorf("building the image %s: %w", i.Reference, err)
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return nil, nil, fmt.Errorf("building the image %s: %w", i.Reference, err)
	}
	labels := map[string]string{"dev.llmbox.lab.program": i.Program}
	if i.StandIn {
		labels["dev.llmbox.lab.stand-in"] = "true"
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, nil, fmt.Errorf("building the image %s: %w", i.Reference, err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", "amd64"
	config.Config = v1.Config{
		Entrypoint: i.Entrypoint, Cmd: i.Cmd, User: i.User, WorkingDir: i.WorkingDir, Labels: labels,
		Env: append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, i.Env...),
	}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		return nil, nil, fmt.Errorf("building the image %s: %w", i.Reference, err)
	}
	return img, layer, nil
}

// Served is an image in the registry.
type Served struct {
	Reference string `json:"reference"`
	Program   string `json:"program"`
	StandIn   bool   `json:"stand_in"`
	Digest    string `json:"digest"`
	SizeBytes int64  `json:"size_bytes"`
}

// Registry serves images read-write: what it was made with, and what is pushed
// into it later.
type Registry struct {
	handler http.Handler
	blobs   *blobs
	served  []Served
}

// NewRegistry makes a registry with these images. Repositories are named with their
// registry in front (`docker.io/library/busybox`), so that one registry can mirror
// many. Blobs that are pushed go under dir.
func NewRegistry(dir string, images []Image) (*Registry, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the registry's directory: %w", err)
	}
	b := &blobs{dir: dir, none: registry.NewInMemoryBlobHandler(), content: map[v1.Hash]func() (io.ReadCloser, int64, error){}}
	r := &Registry{blobs: b, handler: registry.New(registry.WithBlobHandler(b), registry.Logger(quiet()))}
	for _, i := range images {
		if err := r.add(i); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// Served lists the images the registry was made with.
func (r *Registry) Served() []Served { return r.served }

// ServeHTTP implements http.Handler.
func (r *Registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.handler.ServeHTTP(w, r.closed(req))
}

// closed says where a range without an end ends: the handler knows only those that have
// one, and containerd asks for the rest of a blob whose download was cut off.
func (r *Registry) closed(req *http.Request) *http.Request {
	var start int64
	asked := req.Header.Get("Range")
	if _, err := fmt.Sscanf(asked, "bytes=%d-", &start); err != nil || !strings.HasSuffix(asked, "-") {
		return req
	}
	h, err := v1.NewHash(path.Base(req.URL.Path))
	if err != nil {
		return req
	}
	open, ok := r.blobs.find(h)
	if !ok {
		return req
	}
	content, size, err := open()
	if err != nil {
		return req
	}
	_ = content.Close()
	if start >= size {
		return req
	}
	req = req.Clone(req.Context())
	req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", start, size-1))
	return req
}

// Serve answers on a listener until ctx ends.
func (r *Registry) Serve(ctx context.Context, l net.Listener) error {
	server := &http.Server{Handler: r, ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving images: %w", err)
	}
	return nil
}

func (r *Registry) add(i Image) error {
	ref, err := name.ParseReference(i.Reference, name.StrictValidation)
	if err != nil {
		return fmt.Errorf("adding an image: %w", err)
	}
	img, layer, err := i.build()
	if err != nil {
		return err
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return fmt.Errorf("adding %s: %w", i.Reference, err)
	}
	configName, err := img.ConfigName()
	if err != nil {
		return fmt.Errorf("adding %s: %w", i.Reference, err)
	}
	manifest, err := img.RawManifest()
	if err != nil {
		return fmt.Errorf("adding %s: %w", i.Reference, err)
	}
	digest, err := img.Digest()
	if err != nil {
		return fmt.Errorf("adding %s: %w", i.Reference, err)
	}
	r.blobs.content[configName] = func() (io.ReadCloser, int64, error) {
		return io.NopCloser(strings.NewReader(string(config))), int64(len(config)), nil
	}
	r.blobs.content[layer.digest] = func() (io.ReadCloser, int64, error) {
		content, err := layer.Uncompressed()
		return content, layer.size, err
	}
	host := ref.Context().RegistryStr()
	if host == name.DefaultRegistry {
		host = "docker.io"
	}
	// Through the front door: what the registry refuses, a node could not pull.
	url := "/v2/" + host + "/" + ref.Context().RepositoryStr() + "/manifests/" + ref.Identifier()
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPut, url, strings.NewReader(string(manifest)))
	if err != nil {
		return fmt.Errorf("adding %s: %w", i.Reference, err)
	}
	req.Header.Set("Content-Type", string(types.OCIManifestSchema1))
	answer := &answer{header: http.Header{}, code: http.StatusOK}
	r.handler.ServeHTTP(answer, req)
	if answer.code != http.StatusCreated {
		return fmt.Errorf("adding %s: the registry answers %d %s", i.Reference, answer.code, answer.body.String())
	}
	r.served = append(r.served, Served{
		Reference: i.Reference, Program: i.Program, StandIn: i.StandIn,
		Digest: digest.String(), SizeBytes: layer.size + int64(len(config)),
	})
	return nil
}

// answer keeps what a handler writes.
type answer struct {
	header http.Header
	code   int
	body   strings.Builder
}

func (a *answer) Header() http.Header         { return a.header }
func (a *answer) WriteHeader(code int)        { a.code = code }
func (a *answer) Write(b []byte) (int, error) { return a.body.Write(b) }

// blobs is the registry's store.
type blobs struct {
	dir string
	// none holds nothing: only it can say "not found" in the registry's own words.
	none    registry.BlobHandler
	mu      sync.RWMutex
	content map[v1.Hash]func() (io.ReadCloser, int64, error)
}

func (b *blobs) find(h v1.Hash) (func() (io.ReadCloser, int64, error), bool) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	open, ok := b.content[h]
	return open, ok
}

func (b *blobs) noneStat(ctx context.Context, repo string, h v1.Hash) (int64, error) {
	_, err := b.none.Get(ctx, repo, h)
	return 0, err
}

// Get implements registry.BlobHandler.
func (b *blobs) Get(ctx context.Context, repo string, h v1.Hash) (io.ReadCloser, error) {
	open, ok := b.find(h)
	if !ok {
		return b.none.Get(ctx, repo, h)
	}
	content, _, err := open()
	return content, err
}

// Stat implements registry.BlobStatHandler.
func (b *blobs) Stat(ctx context.Context, repo string, h v1.Hash) (int64, error) {
	open, ok := b.find(h)
	if !ok {
		return b.noneStat(ctx, repo, h)
	}
	content, size, err := open()
	if err != nil {
		return 0, err
	}
	return size, content.Close()
}

// Put implements registry.BlobPutHandler.
func (b *blobs) Put(_ context.Context, _ string, h v1.Hash, content io.ReadCloser) (err error) {
	defer func() { err = errors.Join(err, content.Close()) }()
	path := filepath.Join(b.dir, h.Algorithm+"-"+h.Hex)
	out, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600) // #nosec G304 -- the registry has checked the digest
	if err != nil {
		return fmt.Errorf("keeping a blob: %w", err)
	}
	size, err := io.Copy(out, content)
	if err = errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("keeping a blob: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.content[h] = func() (io.ReadCloser, int64, error) {
		in, err := os.Open(path) // #nosec G304 -- written above
		return in, size, err
	}
	return nil
}

// Available splits images into those that can be built and the references of those
// that can't, with what they lack.
func Available(all []Image) (there []Image, lacking map[string][]string) {
	lacking = map[string][]string{}
	for _, i := range all {
		if missing := i.Missing(); len(missing) > 0 {
			lacking[i.Reference] = missing
			continue
		}
		there = append(there, i)
	}
	slices.SortStableFunc(there, func(a, b Image) int { return strings.Compare(a.Reference, b.Reference) })
	return there, lacking
}
