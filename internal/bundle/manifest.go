package bundle

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	goversion "github.com/hashicorp/go-version"
)

const (
	// Format is the form that this package writes, and the only one that it reads.
	Format = 1
	// manifestName is the first file of a bundle.
	manifestName = "manifest.json"
	// The bounds of a manifest.
	maxManifestBytes = 32 << 20
	maxEntries       = 100_000
	maxEntryBytes    = 4 << 40
	maxTotalBytes    = 32 << 40
)

// The ways in which a bundle is refused.
var (
	// ErrNotBundle means that a file is none.
	ErrNotBundle = errors.New("this is no bundle of llmbox")
	// ErrFormat means that a bundle has a form that this llmbox does not know.
	ErrFormat = errors.New("the bundle has a form that this llmbox does not know")
	// ErrManifest means that what a bundle says of itself makes no sense.
	ErrManifest = errors.New("the bundle's manifest makes no sense")
	// ErrTampered means that a file is not what the manifest says.
	ErrTampered = errors.New("the bundle was changed or damaged")
	// ErrTruncated means that a bundle ends too early.
	ErrTruncated = errors.New("the bundle is cut off")
	// ErrArchitecture means that a bundle is for other machines.
	ErrArchitecture = errors.New("the bundle is for machines of another architecture")
	// ErrOlder means that a bundle was made by an older llmbox than the one that reads it.
	ErrOlder = errors.New("the bundle is older than this llmbox")
	// ErrNewer means that a bundle was made by a newer llmbox.
	ErrNewer = errors.New("the bundle is newer than this llmbox")
	// ErrPath means that a name leads out of the bundle.
	ErrPath = errors.New("the bundle names a path that leads out of it")
	// ErrLink and ErrDevice mean that a bundle holds what is no regular file.
	ErrLink   = errors.New("the bundle holds a link")
	ErrDevice = errors.New("the bundle holds a device or another special file")
	// ErrDuplicate means that a file is there twice.
	ErrDuplicate = errors.New("the bundle holds a file twice")
	// ErrUnexpected means that a file is not the one that the manifest names next.
	ErrUnexpected = errors.New("the bundle holds a file that its manifest does not name there")
	// ErrBomb means that a bundle unpacks to more than it declares.
	ErrBomb = errors.New("the bundle unpacks to more than it declares")
)

// Kind says what a file of a bundle is.
type Kind string

// The kinds of files.
const (
	KindLLMBox  Kind = "llmbox"
	KindK3s     Kind = "k3s"
	KindK3sSums Kind = "k3s-sums"
	KindBlob    Kind = "image-blob"
	KindWeights Kind = "weights"
)

// Group says when an image is needed.
type Group string

// The groups, in the order in which they are needed and stored.
const (
	GroupFirst Group = "first"
	GroupModel Group = "model"
	GroupRest  Group = "rest"
)

// Groups are all of them, in order.
func Groups() []Group { return []Group{GroupFirst, GroupModel, GroupRest} }

// Manifest is what a bundle says of itself.
type Manifest struct {
	Format int `json:"format"`
	// Version is that of the llmbox that is in the bundle and made it.
	Version string `json:"llmbox_version"`
	// Architecture is GOARCH's word.
	Architecture string  `json:"architecture"`
	K3s          K3s     `json:"k3s"`
	Model        *Model  `json:"model,omitempty"`
	Images       []Image `json:"images"`
	Entries      []Entry `json:"entries"`
}

// K3s is the k3s of a bundle.
type K3s struct {
	// Version is the release; empty for a binary that the maker named, which says its own.
	Version string `json:"version,omitempty"`
	// Named says that whoever made the bundle answers for the binary.
	Named bool `json:"named,omitempty"`
}

// Model is the model whose weights are in a bundle.
type Model struct {
	Name   string `json:"name"`
	Commit string `json:"commit"`
	Bytes  int64  `json:"bytes"`
	// Listing names the files, in the form of internal/weights.
	Listing json.RawMessage `json:"listing"`
}

// Image is a container image of one platform.
type Image struct {
	// Reference is the name by which charts ask for it, with its registry.
	Reference string `json:"reference"`
	// Digest is what the registry resolved it to, which can be a list of platforms.
	Digest string `json:"digest"`
	Group  Group  `json:"group"`
	// Manifest is the platform's.
	Manifest Descriptor `json:"manifest"`
	// Blobs are the SHA-256 of everything that it is made of, the manifest first.
	Blobs []string `json:"blobs"`
}

// Descriptor points to a blob.
type Descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int64  `json:"size"`
}

// Entry is one file of a bundle.
type Entry struct {
	Path   string `json:"path"`
	Kind   Kind   `json:"kind"`
	Size   int64  `json:"size_bytes"`
	SHA256 string `json:"sha256"`
	// Blob is the name of a file of the weights in the hub's cache.
	Blob string `json:"blob,omitempty"`
}

// Bytes is the size of all files.
func (m *Manifest) Bytes() int64 {
	var n int64
	for _, e := range m.Entries {
		n += e.Size
	}
	return n
}

// encode is the manifest as it is stored, and its digest.
func (m *Manifest) encode() (raw []byte, digest string, err error) {
	if err := m.check(); err != nil {
		return nil, "", err
	}
	if raw, err = json.MarshalIndent(m, "", " "); err != nil {
		return nil, "", fmt.Errorf("writing the manifest: %w", err)
	}
	if len(raw) > maxManifestBytes {
		return nil, "", fmt.Errorf("%w: it is longer than %d bytes", ErrManifest, maxManifestBytes)
	}
	return raw, digestOf(raw), nil
}

func digestOf(raw []byte) string {
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

// decode reads a manifest that nobody has looked at.
func decode(raw []byte) (*Manifest, error) {
	var form struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(raw, &form); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrManifest, err)
	}
	if form.Format != Format {
		return nil, fmt.Errorf("%w: %d, known is %d", ErrFormat, form.Format, Format)
	}
	m := &Manifest{}
	if err := json.Unmarshal(raw, m); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrManifest, err)
	}
	return m, m.check()
}

var (
	sumPattern  = regexp.MustCompile(`^[0-9a-f]{64}$`)
	blobPattern = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)
	refPattern  = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)+:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
)

// pathOf is the only name that a file of that kind can have.
func (e Entry) pathOf() string {
	switch e.Kind {
	case KindLLMBox:
		return "llmbox"
	case KindK3s, KindK3sSums:
		return "k3s/" + path.Base(e.Path)
	case KindBlob:
		return "images/blobs/sha256/" + e.SHA256
	case KindWeights:
		return "weights/blobs/" + e.Blob
	}
	return ""
}

// check refuses a manifest that can't be followed.
func (m *Manifest) check() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrManifest, fmt.Sprintf(format, args...))
	}
	if len(m.Entries) == 0 || len(m.Entries) > maxEntries {
		return bad("it names %d files", len(m.Entries))
	}
	if m.Version == "" || m.Architecture == "" {
		return bad("it names no version or no architecture")
	}
	seen, blobs := map[string]bool{}, map[string]int64{}
	var total int64
	for _, e := range m.Entries {
		if err := checkName(e.Path); err != nil {
			return err
		}
		switch {
		case seen[strings.ToLower(e.Path)]:
			return fmt.Errorf("%w: %q", ErrDuplicate, e.Path)
		case e.Size < 0 || e.Size > maxEntryBytes:
			return bad("%q has the size %d", e.Path, e.Size)
		case !sumPattern.MatchString(e.SHA256):
			return bad("%q has no SHA-256", e.Path)
		case e.Kind == KindWeights && (!blobPattern.MatchString(e.Blob) || m.Model == nil):
			return bad("%q is no blob of a model's weights", e.Path)
		case len(e.Blob) == len(e.SHA256) && e.Blob != e.SHA256:
			return bad("%q is not the blob %s", e.Path, e.Blob)
		case e.Path != e.pathOf():
			return bad("%q is no name for %q", e.Path, e.Kind)
		}
		if total += e.Size; total > maxTotalBytes {
			return bad("it declares more than %d bytes", int64(maxTotalBytes))
		}
		seen[strings.ToLower(e.Path)] = true
		if e.Kind == KindBlob {
			blobs[e.SHA256] = e.Size
		}
	}
	names := map[string]bool{}
	for _, i := range m.Images {
		hex, ok := strings.CutPrefix(i.Manifest.Digest, "sha256:")
		switch {
		case !refPattern.MatchString(i.Reference):
			return bad("%q is no reference of an image", i.Reference)
		case names[i.Reference]:
			return fmt.Errorf("%w: image %s", ErrDuplicate, i.Reference)
		case !slices.Contains(Groups(), i.Group):
			return bad("%s has the group %q", i.Reference, i.Group)
		case !ok || len(i.Blobs) == 0 || i.Blobs[0] != hex || blobs[hex] != i.Manifest.Size:
			return bad("%s has no manifest", i.Reference)
		case !strings.HasPrefix(i.Digest, "sha256:") || !sumPattern.MatchString(i.Digest[len("sha256:"):]):
			return bad("%s has no digest", i.Reference)
		}
		names[i.Reference] = true
		for _, b := range i.Blobs {
			if _, ok := blobs[b]; !ok {
				return bad("%s lacks the blob %s", i.Reference, b)
			}
		}
	}
	return nil
}

// checkName refuses names that lead out.
func checkName(name string) error {
	if name == "" || path.IsAbs(name) || path.Clean(name) != name || name == ".." || strings.HasPrefix(name, "../") ||
		strings.ContainsAny(name, "\\\x00") {
		return fmt.Errorf("%w: %q", ErrPath, name)
	}
	return nil
}

// Want is what a machine can use.
type Want struct {
	Architecture string
	// Version is that of the llmbox that reads; empty leaves it out.
	Version string
}

// Fits says whether a bundle is of use to a machine.
func (m *Manifest) Fits(w Want) error {
	if m.Architecture != w.Architecture {
		return fmt.Errorf("%w: %s, this machine is %s", ErrArchitecture, m.Architecture, w.Architecture)
	}
	if w.Version == "" || w.Version == m.Version {
		return nil
	}
	has, err1 := goversion.NewVersion(m.Version)
	mine, err2 := goversion.NewVersion(w.Version)
	if err := errors.Join(err1, err2); err != nil {
		return fmt.Errorf("%w: made by llmbox %s, this is %s", ErrOlder, m.Version, w.Version)
	}
	switch has.Core().Compare(mine.Core()) {
	case -1:
		return fmt.Errorf("%w: made by llmbox %s, this is %s", ErrOlder, m.Version, w.Version)
	case 1:
		return fmt.Errorf("%w: made by llmbox %s, this is %s; the bundle holds its own llmbox", ErrNewer, m.Version, w.Version)
	}
	if has.LessThan(mine) {
		return fmt.Errorf("%w: made by llmbox %s, this is %s", ErrOlder, m.Version, w.Version)
	}
	if mine.LessThan(has) {
		return fmt.Errorf("%w: made by llmbox %s, this is %s; the bundle holds its own llmbox", ErrNewer, m.Version, w.Version)
	}
	return nil
}
