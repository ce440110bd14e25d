package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha1" // #nosec G505 -- git names its blobs so
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	hubPort = 8501
	// commit is one that no repository has.
	commit = "0000000000000000000000000000000000005712"
	// tool is what the pod of the other side downloads with: vLLM's image has Python for it.
	tool = "/bin/busybox"
)

// randomBytes are the same each time, and nothing can compress them.
func randomBytes(seed byte) io.Reader {
	return rand.NewChaCha8([32]byte{seed, 'l', 'l', 'm', 'b', 'o', 'x'})
}

// layer is an uncompressed layer in a file.
type layer struct {
	path   string
	digest v1.Hash
	size   int64
}

func (l layer) Digest() (v1.Hash, error)             { return l.digest, nil }
func (l layer) DiffID() (v1.Hash, error)             { return l.digest, nil }
func (l layer) Size() (int64, error)                 { return l.size, nil }
func (l layer) MediaType() (types.MediaType, error)  { return types.OCIUncompressedLayer, nil }
func (l layer) Compressed() (io.ReadCloser, error)   { return os.Open(l.path) }
func (l layer) Uncompressed() (io.ReadCloser, error) { return os.Open(l.path) }
func writeSummed(path string, write func(io.Writer) error) (sum string, size int64, err error) {
	f, err := os.Create(path) // #nosec G304 -- in a directory of our own
	if err != nil {
		return "", 0, fmt.Errorf("making a payload: %w", err)
	}
	h := sha256.New()
	if err = errors.Join(write(io.MultiWriter(f, h)), f.Close()); err != nil {
		return "", 0, fmt.Errorf("making a payload: %w", err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return "", 0, fmt.Errorf("making a payload: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), info.Size(), nil
}

// makeLayer makes a layer of one file.
func makeLayer(path, file string, mode, size int64, content io.Reader) (layer, error) {
	sum, length, err := writeSummed(path, func(w io.Writer) error {
		t := tar.NewWriter(w)
		if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(file, "/"), Mode: mode, Size: size, ModTime: time.Unix(0, 0)}); err != nil {
			return err
		}
		if _, err := io.CopyN(t, content, size); err != nil {
			return err
		}
		return t.Close()
	})
	return layer{path: path, digest: v1.Hash{Algorithm: "sha256", Hex: sum}, size: length}, err
}

// makeImage makes what is laid onto the stand-in for vLLM.
func makeImage(dir string, sizes []int64) ([]v1.Layer, error) {
	program, err := os.ReadFile(tool)
	if err != nil {
		return nil, fmt.Errorf("reading %s (Debian's busybox-static): %w", tool, err)
	}
	first, err := makeLayer(filepath.Join(dir, "layer-tool.tar"), tool, 0o755, int64(len(program)), bytes.NewReader(program))
	if err != nil {
		return nil, err
	}
	layers := []v1.Layer{first}
	for i, size := range sizes {
		l, err := makeLayer(filepath.Join(dir, fmt.Sprintf("layer-%d.tar", i)), fmt.Sprintf("/opt/filler/%d", i), 0o644, size, randomBytes(byte(i)))
		if err != nil {
			return nil, err
		}
		layers = append(layers, l)
	}
	return layers, nil
}

func (l link) options(ctx context.Context) []remote.Option {
	return []remote.Option{remote.WithContext(ctx), remote.WithTransport(&http.Transport{DialContext: l.dial})}
}

// inRegistry is where the lab's registry has an image.
func inRegistry(reference string) (name.Reference, error) {
	ref, err := name.ParseReference(around+":5000/"+reference, name.Insecure)
	if err != nil {
		return nil, fmt.Errorf("naming an image: %w", err)
	}
	return ref, nil
}

// grow lays layers onto an image of the lab's registry.
func (l link) grow(ctx context.Context, reference string, layers []v1.Layer) error {
	ref, err := inRegistry(reference)
	if err != nil {
		return err
	}
	img, err := remote.Image(ref, l.options(ctx)...)
	if err != nil {
		return fmt.Errorf("reading %s: %w", reference, err)
	}
	if img, err = mutate.AppendLayers(img, layers...); err != nil {
		return fmt.Errorf("growing %s: %w", reference, err)
	}
	if err := remote.Write(ref, img, l.options(ctx)...); err != nil {
		return fmt.Errorf("writing %s: %w", reference, err)
	}
	return nil
}

// sizeOf is what a node has to fetch of an image.
func (l link) sizeOf(ctx context.Context, reference string) (int64, error) {
	ref, err := inRegistry(reference)
	if err != nil {
		return 0, err
	}
	img, err := remote.Image(ref, l.options(ctx)...)
	if err != nil {
		return 0, fmt.Errorf("reading %s: %w", reference, err)
	}
	manifest, err := img.Manifest()
	if err != nil {
		return 0, fmt.Errorf("reading %s: %w", reference, err)
	}
	size, err := img.Size()
	if err != nil {
		return 0, fmt.Errorf("reading %s: %w", reference, err)
	}
	size += manifest.Config.Size
	for _, part := range manifest.Layers {
		size += part.Size
	}
	return size, nil
}

// hubFile is a file of the stand-in for the model hub, in the hub's words.
type hubFile struct {
	Name   string  `json:"rfilename"`
	Size   int64   `json:"size"`
	BlobID string  `json:"blobId"`
	LFS    *hubLFS `json:"lfs,omitempty"`

	path string
}

type hubLFS struct {
	SHA256 string `json:"sha256"`
	Size   int64  `json:"size"`
}

// hub is a stand-in for the model hub with weights that can't be compressed.
type hub struct{ files []hubFile }

func (h hub) bytes() int64 {
	total := int64(0)
	for _, f := range h.files {
		total += f.Size
	}
	return total
}

func makeHub(dir string, sizes []int64) (hub, error) {
	var h hub
	index := map[string]any{}
	for i, size := range sizes {
		f := hubFile{Name: fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(sizes))}
		f.path = filepath.Join(dir, f.Name)
		tensor := fmt.Sprintf("stand.in.%d", i)
		index[tensor] = f.Name
		head, err := json.Marshal(map[string]any{tensor: map[string]any{"dtype": "U8", "shape": []int64{size}, "data_offsets": []int64{0, size}}})
		if err != nil {
			return h, fmt.Errorf("making weights: %w", err)
		}
		sum, length, err := writeSummed(f.path, func(w io.Writer) error {
			if err := binary.Write(w, binary.LittleEndian, uint64(len(head))); err != nil {
				return err
			}
			if _, err := w.Write(head); err != nil {
				return err
			}
			_, err := io.CopyN(w, randomBytes(byte(100+i)), size)
			return err
		})
		if err != nil {
			return h, err
		}
		f.Size, f.BlobID, f.LFS = length, sum[:40], &hubLFS{SHA256: sum, Size: length}
		h.files = append(h.files, f)
	}
	weightsMap, err := json.Marshal(map[string]any{"metadata": map[string]any{"total_size": sum(sizes)}, "weight_map": index})
	if err != nil {
		return h, fmt.Errorf("making weights: %w", err)
	}
	for file, content := range map[string]string{
		"config.json":                  `{"architectures":["StandInForCausalLM"],"model_type":"stand-in","max_position_embeddings":8192}`,
		"tokenizer_config.json":        `{"model_max_length":8192}`,
		"model.safetensors.index.json": string(weightsMap),
	} {
		f := hubFile{Name: file, Size: int64(len(content)), path: filepath.Join(dir, file)}
		blob := sha1.Sum(fmt.Appendf(nil, "blob %d\x00%s", len(content), content)) // #nosec G401 -- git names its blobs so
		f.BlobID = hex.EncodeToString(blob[:])
		if err := os.WriteFile(f.path, []byte(content), 0o600); err != nil {
			return h, fmt.Errorf("making weights: %w", err)
		}
		h.files = append(h.files, f)
	}
	return h, nil
}

// handler answers as the hub does, and has the k3s binary beside.
func (h hub) handler(k3s string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /k3s", func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, k3s) })
	mux.HandleFunc("GET /api/models/", func(w http.ResponseWriter, r *http.Request) {
		rest := strings.TrimPrefix(r.URL.Path, "/api/models/"+modelName)
		if rest != "" && !strings.HasPrefix(rest, "/revision/") {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"sha": commit, "siblings": h.files})
	})
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		file, ok := strings.CutPrefix(r.URL.Path, "/"+modelName+"/resolve/"+commit+"/")
		for _, f := range h.files {
			if !ok || f.Name != file {
				continue
			}
			in, err := os.Open(f.path)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			defer func() { _ = in.Close() }()
			blob := f.BlobID
			if f.LFS != nil {
				blob = f.LFS.SHA256
			}
			w.Header().Set("ETag", `"`+blob+`"`)
			w.Header().Set("X-Repo-Commit", commit)
			http.ServeContent(w, r, "", time.Time{}, in)
			return
		}
		http.NotFound(w, r)
	})
	return mux
}
