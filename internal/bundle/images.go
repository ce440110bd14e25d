package bundle

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"golang.org/x/sync/errgroup"

	"github.com/llmbox-dev/llmbox/internal/download"
)

// blobsAtATime bounds the blobs under way; they share the client's connections.
const blobsAtATime = 4

// Registries are where images come from.
type Registries struct {
	Client *download.Client
	// Mirrors are tried in order before the registry itself, by its host.
	Mirrors map[string][]string
	// Credentials by host; docker.io is Docker Hub's.
	Credentials map[string]authn.AuthConfig
	// Architecture is GOARCH's word.
	Architecture string
}

// Wanted is an image to be had.
type Wanted struct {
	// Reference is its name with a tag; Digest pins it where it is set.
	Reference, Digest string
	Group             Group
}

// found is an image at the place that has it.
type found struct {
	image    Image
	sizes    map[string]int64
	contents map[string][]byte // of the manifest
	// fetch brings a blob to a name below root.
	repository name.Repository
	client     *download.Client
}

// resolve finds out what an image is, from the first place that has it.
func (r *Registries) resolve(ctx context.Context, w Wanted) (*found, error) {
	tag, err := name.NewTag(w.Reference, name.WithDefaultRegistry("docker.io"))
	if err != nil {
		return nil, fmt.Errorf("reading the reference %s: %w", w.Reference, err)
	}
	var problems []error
	for _, place := range r.places(tag) {
		f, err := r.resolveAt(ctx, w, tag, place)
		if err == nil {
			return f, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		problems = append(problems, err)
	}
	return nil, fmt.Errorf("resolving %s: %w", w.Reference, errors.Join(problems...))
}

// at is a registry that may have an image.
type at struct {
	host     string
	insecure bool
	// credentials are those of this host.
	credentials string
	// path takes the place of /v2 in requests, as k3s has it; empty where there is none.
	path string
}

func (r *Registries) places(tag name.Tag) []at {
	host := hostOf(tag.RegistryStr())
	var out []at
	for _, endpoint := range r.Mirrors[host] {
		u, err := url.Parse(endpoint)
		if err == nil && u.Host != "" {
			out = append(out, at{host: u.Host, insecure: u.Scheme == "http", credentials: u.Host, path: pathOfMirror(u)})
		}
	}
	return append(out, at{host: tag.RegistryStr(), credentials: host})
}

// pathOfMirror is what a mirror wants instead of the specification's /v2: all of what
// stands in its URL, unless that is nothing or /v2 itself (k3s,
// pkg/agent/containerd/config.go).
func pathOfMirror(u *url.URL) string {
	if p := strings.TrimRight(u.EscapedPath(), "/"); p != apiPath {
		return p
	}
	return ""
}

// apiPath is where a registry answers (OCI distribution specification, 1.1).
const apiPath = "/v2"

// behind is the way to a mirror whose URL has a path.
type behind struct {
	at
	through http.RoundTripper
}

func (b behind) RoundTrip(r *http.Request) (*http.Response, error) {
	rest, ours := strings.CutPrefix(r.URL.EscapedPath(), apiPath+"/")
	if !ours || r.URL.Host != b.host {
		return b.through.RoundTrip(r)
	}
	moved := r.Clone(r.Context())
	u, err := url.Parse(b.path + "/" + rest)
	if err != nil {
		return nil, fmt.Errorf("finding the way to a mirror: %w", err)
	}
	moved.URL.Path, moved.URL.RawPath = u.Path, u.RawPath
	answer, err := b.through.RoundTrip(moved)
	if err != nil || rest != "" || answer.StatusCode == http.StatusOK || answer.StatusCode == http.StatusUnauthorized {
		return answer, err
	}
	// The one question that is about no image: how to log in. A mirror below a path need
	// not know it, and then wants no login, or says so when an image is asked for.
	if err := answer.Body.Close(); err != nil {
		return nil, err
	}
	answer.StatusCode, answer.Status, answer.Body, answer.ContentLength = http.StatusOK, http.StatusText(http.StatusOK), http.NoBody, 0
	return answer, nil
}

// hostOf is by which configurations name a registry.
func hostOf(registry string) string {
	if registry == name.DefaultRegistry {
		return "docker.io"
	}
	return registry
}

func (r *Registries) resolveAt(ctx context.Context, w Wanted, tag name.Tag, place at) (*found, error) {
	options := []name.Option{}
	if place.insecure {
		options = append(options, name.Insecure)
	}
	repository, err := name.NewRepository(place.host+"/"+tag.RepositoryStr(), options...)
	if err != nil {
		return nil, err
	}
	var ref name.Reference = repository.Tag(tag.TagStr())
	if w.Digest != "" {
		ref = repository.Digest(w.Digest)
	}
	auth := authn.Anonymous
	if c, ok := r.Credentials[place.credentials]; ok {
		auth = authn.FromConfig(c)
	}
	way := r.Client.Transport()
	if place.path != "" {
		way = behind{place, way}
	}
	rules := []remote.Option{remote.WithContext(ctx), remote.WithTransport(way), remote.WithAuth(auth)}
	descriptor, err := remote.Get(ref, rules...)
	if err != nil {
		return nil, err
	}
	image, err := r.platform(descriptor)
	if err != nil {
		return nil, err
	}
	f, err := describe(w, image)
	if err != nil {
		return nil, err
	}
	f.image.Digest, f.repository = descriptor.Digest.String(), repository
	earning, err := transport.NewWithContext(ctx, repository.Registry, auth, way, []string{repository.Scope(transport.PullScope)})
	if err != nil {
		return nil, err
	}
	f.client = r.Client.With(func(http.RoundTripper) http.RoundTripper { return earning })
	return f, nil
}

// platform picks the image of the architecture out of a list.
func (r *Registries) platform(d *remote.Descriptor) (v1.Image, error) {
	if !d.MediaType.IsIndex() {
		return d.Image()
	}
	index, err := d.ImageIndex()
	if err != nil {
		return nil, err
	}
	list, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	for _, m := range list.Manifests {
		if m.Platform != nil && m.Platform.OS == "linux" && m.Platform.Architecture == r.Architecture && m.MediaType.IsImage() {
			return index.Image(m.Digest)
		}
	}
	return nil, fmt.Errorf("%w: it has no image for linux/%s", ErrArchitecture, r.Architecture)
}

// describe lists what an image is made of.
func describe(w Wanted, image v1.Image) (*found, error) {
	raw, err := image.RawManifest()
	if err != nil {
		return nil, err
	}
	manifest, err := image.Manifest()
	if err != nil {
		return nil, err
	}
	digest := digestOf(raw)
	f := &found{
		image: Image{
			Reference: w.Reference, Group: w.Group, Blobs: []string{digest},
			Manifest: Descriptor{MediaType: string(manifest.MediaType), Digest: "sha256:" + digest, Size: int64(len(raw))},
		},
		sizes: map[string]int64{digest: int64(len(raw))}, contents: map[string][]byte{digest: raw},
	}
	if f.image.Manifest.MediaType == "" {
		media, err := image.MediaType()
		if err != nil {
			return nil, err
		}
		f.image.Manifest.MediaType = string(media)
	}
	for _, d := range append([]v1.Descriptor{manifest.Config}, manifest.Layers...) {
		if d.Digest.Algorithm != "sha256" || !d.MediaType.IsDistributable() && d.MediaType.IsLayer() {
			return nil, fmt.Errorf("%s has a part that can't be carried: %s", w.Reference, d.Digest)
		}
		if _, twice := f.sizes[d.Digest.Hex]; !twice {
			f.image.Blobs, f.sizes[d.Digest.Hex] = append(f.image.Blobs, d.Digest.Hex), d.Size
		}
	}
	return f, nil
}

// fetch brings the blobs of images into a directory, each once, and goes on where an
// earlier call stopped.
func (r *Registries) fetch(ctx context.Context, images []*found, root *os.Root, progress func(done int64)) error {
	tally := newTally(progress)
	group, fetching := errgroup.WithContext(ctx)
	group.SetLimit(blobsAtATime)
	seen := map[string]bool{}
	for _, f := range images {
		for _, blob := range f.image.Blobs {
			if seen[blob] {
				continue
			}
			seen[blob] = true
			if content, here := f.contents[blob]; here {
				if err := root.WriteFile(blob, content, fileMode); err != nil {
					return fmt.Errorf("keeping a manifest: %w", err)
				}
				continue
			}
			if info, err := root.Lstat(blob); err == nil && info.Mode().IsRegular() && info.Size() == f.sizes[blob] {
				// It got its name once it was verified, and writing verifies it again.
				tally.set(blob, f.sizes[blob])
				continue
			}
			group.Go(func() error {
				_, err := f.client.Fetch(fetching, download.File{
					URLs: []string{f.repository.Scheme() + "://" + f.repository.RegistryStr() + "/v2/" + f.repository.RepositoryStr() + "/blobs/sha256:" + blob},
					Root: root, Path: blob, Digest: download.SHA256(blob), Size: f.sizes[blob],
					Progress: func(p download.Progress) { tally.set(blob, p.Done) },
				})
				if err != nil {
					return fmt.Errorf("fetching a part of %s: %w", f.image.Reference, err)
				}
				tally.set(blob, f.sizes[blob])
				return nil
			})
		}
	}
	return group.Wait()
}

// architectureOf is what an image says that it runs on.
func architectureOf(root *os.Root, f *found) (string, error) {
	if len(f.image.Blobs) < 2 { //nolint:mnd // manifest and configuration
		return "", fmt.Errorf("%w: %s has no configuration", ErrManifest, f.image.Reference)
	}
	raw, err := root.ReadFile(f.image.Blobs[1])
	if err != nil {
		return "", err
	}
	var config struct {
		Architecture string `json:"architecture"`
	}
	if err := json.Unmarshal(raw, &config); err != nil {
		return "", fmt.Errorf("reading the configuration of %s: %w", f.image.Reference, err)
	}
	return strings.ToLower(config.Architecture), nil
}
