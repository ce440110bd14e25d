package machine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"runtime"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/llmbox-dev/llmbox/internal/host"
	"github.com/llmbox-dev/llmbox/internal/k3s"
)

const (
	// imageArchive is what k3s imports when it starts: an image that the kubelet has
	// cleared away is back after the next start.
	imageArchive = "llmbox.tar"
	// imageUser is nobody's on the host; the charts name the user of each container.
	imageUser = "65532:65532"
	// importDeadline bounds what is 100 MB from one place of the disk to another.
	importDeadline = 3 * time.Minute
	// containerdNameAnnotation is by which containerd names an image of an archive
	// (containerd, images/annotations.go); refNameAnnotation is the specification's.
	containerdNameAnnotation = "io.containerd.image.name"
	refNameAnnotation        = "org.opencontainers.image.ref.name"
)

// ownImage is llmbox's image: this binary alone.
type ownImage struct {
	reference string
	program   string
	layer     v1.Descriptor
	config    []byte
	manifest  []byte
	index     []byte
}

// newOwnImage describes the image of a binary. The same binary and reference give the
// same bytes.
func newOwnImage(program, reference string) (*ownImage, error) {
	i := &ownImage{reference: reference, program: program}
	hash, size := sha256.New(), &counter{}
	if err := i.writeLayer(io.MultiWriter(hash, size)); err != nil {
		return nil, fmt.Errorf("reading the own binary: %w", err)
	}
	digest := v1.Hash{Algorithm: "sha256", Hex: fmt.Sprintf("%x", hash.Sum(nil))}
	i.layer = v1.Descriptor{MediaType: types.OCIUncompressedLayer, Size: size.n, Digest: digest}
	var err error
	i.config, err = json.Marshal(v1.ConfigFile{
		Architecture: runtime.GOARCH, OS: "linux",
		Config: v1.Config{Entrypoint: []string{"/llmbox"}, User: imageUser, WorkingDir: "/"},
		RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{digest}},
	})
	if err != nil {
		return nil, fmt.Errorf("describing the own image: %w", err)
	}
	i.manifest, err = json.Marshal(v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Config: describe(types.OCIConfigJSON, i.config), Layers: []v1.Descriptor{i.layer},
	})
	if err != nil {
		return nil, fmt.Errorf("describing the own image: %w", err)
	}
	manifest := describe(types.OCIManifestSchema1, i.manifest)
	manifest.Annotations = map[string]string{containerdNameAnnotation: reference, refNameAnnotation: reference}
	manifest.Platform = &v1.Platform{Architecture: runtime.GOARCH, OS: "linux"}
	i.index, err = json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{manifest}})
	if err != nil {
		return nil, fmt.Errorf("describing the own image: %w", err)
	}
	return i, nil
}

// ErrNotStatic means that this llmbox needs libraries of the machine, which its image
// doesn't have.
var ErrNotStatic = errors.New("not a static program")

// static refuses a program that can't be the only file of an image: there the kernel
// would say of it that there is no such file.
func static(program string) error {
	file, err := elf.Open(program)
	var format *elf.FormatError
	if errors.As(err, &format) || errors.Is(err, io.EOF) {
		// Not for Linux to begin with; whoever runs it knows.
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the own binary: %w", err)
	}
	defer func() { _ = file.Close() }()
	for _, part := range file.Progs {
		if part.Type == elf.PT_INTERP {
			return &k3s.Problem{
				What: "this llmbox was linked dynamically, and the pods that run it have no libraries",
				Out:  "Build it with make build, or with CGO_ENABLED=0 in the environment", Err: ErrNotStatic,
			}
		}
	}
	return nil
}

type counter struct{ n int64 }

func (c *counter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return len(p), nil
}

func describe(media types.MediaType, content []byte) v1.Descriptor {
	return v1.Descriptor{MediaType: media, Size: int64(len(content)), Digest: digestOf(content)}
}

func digestOf(content []byte) v1.Hash {
	return v1.Hash{Algorithm: "sha256", Hex: fmt.Sprintf("%x", sha256.Sum256(content))}
}

// digest is by which a node knows whether it has this very image.
func (i *ownImage) digest() string { return digestOf(i.manifest).String() }

func (i *ownImage) writeLayer(w io.Writer) error {
	file, err := os.Open(i.program)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	out := tar.NewWriter(w)
	header := &tar.Header{Typeflag: tar.TypeReg, Name: "llmbox", Mode: programMode, Size: info.Size(), Format: tar.FormatUSTAR}
	if err := out.WriteHeader(header); err != nil {
		return err
	}
	if _, err := io.Copy(out, file); err != nil {
		return err
	}
	return out.Close()
}

// write makes an archive in the layout of OCI images.
func (i *ownImage) write(w io.Writer) error {
	out := tar.NewWriter(w)
	blob := func(h v1.Hash) string { return path.Join("blobs", h.Algorithm, h.Hex) }
	for _, f := range []struct {
		name    string
		content []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{"index.json", i.index},
		{blob(digestOf(i.manifest)), i.manifest},
		{blob(digestOf(i.config)), i.config},
	} {
		header := &tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: 0o644, Size: int64(len(f.content)), Format: tar.FormatUSTAR}
		if err := out.WriteHeader(header); err != nil {
			return err
		}
		if _, err := out.Write(f.content); err != nil {
			return err
		}
	}
	header := &tar.Header{Typeflag: tar.TypeReg, Name: blob(i.layer.Digest), Mode: 0o644, Size: i.layer.Size, Format: tar.FormatUSTAR}
	if err := out.WriteHeader(header); err != nil {
		return err
	}
	if err := i.writeLayer(out); err != nil {
		return err
	}
	return out.Close()
}

// ensureArchive has the image lie in an archive.
func (h *Host) ensureArchive(ctx context.Context, i *ownImage, name string) (changed bool, err error) {
	has, err := h.archivedIndex(ctx, name)
	if err != nil {
		return false, err
	}
	if bytes.Equal(has, i.index) {
		return false, nil
	}
	if err := place(h.at(name), 0o644, i.write); err != nil {
		return false, fmt.Errorf("writing llmbox's image: %w", err)
	}
	return true, nil
}

// archivedIndex is the index of the archive that is there, which is near its beginning
// and names all else by digest; nil where there is none.
func (h *Host) archivedIndex(ctx context.Context, name string) ([]byte, error) {
	const head = 64 << 10
	data, err := h.files.ReadHead(ctx, name, head)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading llmbox's image: %w", err)
	}
	in := tar.NewReader(bytes.NewReader(data))
	for {
		header, err := in.Next()
		if err != nil {
			return nil, nil //nolint:nilerr // one that can't be read is written anew
		}
		if header.Name == "index.json" {
			index, err := io.ReadAll(in)
			if err != nil {
				return nil, nil //nolint:nilerr // as above
			}
			return index, nil
		}
	}
}

// importImage has a running k3s know the image now, where it doesn't.
func (h *Host) importImage(ctx context.Context, i *ownImage, binary, archive string) (changed bool, err error) {
	ctr := func(args ...string) (string, error) {
		result, err := h.o.Runner.Run(ctx, host.Command{
			Program: path.Base(binary), Directories: []string{path.Dir(binary)}, Deadline: importDeadline,
			Args: append([]string{"ctr", "--namespace", "k8s.io", "images"}, args...),
		})
		if err != nil {
			return "", fmt.Errorf("asking containerd: %w", err)
		}
		if result.Exit != 0 {
			return "", fmt.Errorf("asking containerd: k3s ctr images %s: exit status %d: %s", args[0], result.Exit, lastLine(result.Output))
		}
		return string(result.Output), nil
	}
	listed, err := ctr("list", "name=="+i.reference)
	if err != nil {
		return false, err
	}
	if strings.Contains(listed, i.digest()) {
		return false, nil
	}
	if _, err := ctr("import", h.at(archive)); err != nil {
		return false, fmt.Errorf("importing llmbox's image: %w", err)
	}
	return true, nil
}

func lastLine(output []byte) string {
	lines := strings.Split(strings.TrimSpace(string(output)), "\n")
	return lines[len(lines)-1]
}
