package bundle

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	dirMode     = 0o755
	fileMode    = 0o644
	programMode = 0o755
	// containerdName is by which containerd names an image of an archive (containerd,
	// images/annotations.go); refName is the specification's.
	containerdName = "io.containerd.image.name"
	refName        = "org.opencontainers.image.ref.name"
	doneName       = "complete"
)

// Target says where the parts of a bundle go on a machine.
type Target struct {
	// Stage is a directory of llmbox's own; what is in use lies below it under the
	// bundle's digest.
	Stage string
	// Models is what the model server gets as HF_HOME; empty on a machine that serves
	// none, which verifies the weights and leaves them.
	Models string
	// UID and GID own the weights; 0 leaves it to whoever runs this.
	UID, GID int
}

// Unpacked is what a bundle has become.
type Unpacked struct {
	// Dir is its directory, K3s its binary, LLMBox its program.
	Dir, K3s, LLMBox string
	// Archives are the images, in the order in which they are needed.
	Archives []Archive
	// Written are bytes that went to the disk, Present those that were there.
	Written, Present int64
}

// Archive is a file of images in the layout of OCI images, that k3s can import.
type Archive struct {
	Path string
	// References are the images in it.
	References []string
}

// Unpack reads a bundle to its end and puts everything where it belongs. Nothing has its
// final name before it was verified; what an earlier call placed is verified and left.
func Unpack(ctx context.Context, b *Reader, t Target, progress func(done int64, e Entry)) (Unpacked, error) {
	u := &unpacking{target: t, manifest: b.Manifest(), dir: filepath.Join(t.Stage, b.Digest()[:16]), open: map[Group]*archive{}}
	u.plan()
	if u.finished() {
		return u.out, nil
	}
	if err := u.prepare(); err != nil {
		return Unpacked{}, err
	}
	defer u.abandon()
	if err := b.Each(ctx, u.place, progress); err != nil {
		return Unpacked{}, err
	}
	for _, g := range Groups() {
		if err := u.finish(g); err != nil {
			return Unpacked{}, fmt.Errorf("finishing the images: %w", err)
		}
	}
	if err := os.WriteFile(filepath.Join(u.dir, doneName), []byte(b.Digest()+"\n"), fileMode); err != nil { // #nosec G306 -- no secret
		return Unpacked{}, fmt.Errorf("noting that the bundle is unpacked: %w", err)
	}
	return u.out, syncDir(u.dir)
}

type unpacking struct {
	target   Target
	manifest *Manifest
	dir      string
	out      Unpacked
	open     map[Group]*archive
	// wanted are the groups that need a blob, in order; where is where it lies.
	wanted map[string][]Group
	where  map[string]place
}

// place is a blob within an archive.
type place struct {
	file   string
	offset int64
}

// plan settles names, and who needs which blob.
func (u *unpacking) plan() {
	u.out = Unpacked{Dir: u.dir, LLMBox: filepath.Join(u.dir, "llmbox")}
	u.wanted, u.where = map[string][]Group{}, map[string]place{}
	for _, e := range u.manifest.Entries {
		if e.Kind == KindK3s {
			u.out.K3s = filepath.Join(u.dir, path.Base(e.Path))
		}
	}
	for _, g := range Groups() {
		a := Archive{Path: u.archiveName(g)}
		for _, i := range u.manifest.Images {
			if i.Group != g {
				continue
			}
			a.References = append(a.References, i.Reference)
			for _, b := range i.Blobs {
				if !slices.Contains(u.wanted[b], g) {
					u.wanted[b] = append(u.wanted[b], g)
				}
			}
		}
		if len(a.References) > 0 {
			u.out.Archives = append(u.out.Archives, a)
		}
	}
}

func (u *unpacking) archiveName(g Group) string {
	return filepath.Join(u.dir, fmt.Sprintf("llmbox-bundle-%d-%s.tar", slices.Index(Groups(), g)+1, g))
}

// finished says whether an earlier call came to its end and everything is still there.
func (u *unpacking) finished() bool {
	names := []string{filepath.Join(u.dir, doneName), u.out.LLMBox}
	if u.out.K3s != "" {
		names = append(names, u.out.K3s)
	}
	for _, a := range u.out.Archives {
		names = append(names, a.Path)
	}
	for _, e := range u.manifest.Entries {
		if e.Kind == KindWeights && u.target.Models != "" {
			info, err := os.Stat(u.blobName(e))
			if err != nil || info.Size() != e.Size {
				return false
			}
		}
	}
	for _, name := range names {
		if _, err := os.Stat(name); err != nil {
			return false
		}
	}
	u.out.Present = u.manifest.Bytes()
	return true
}

// prepare makes the directories and clears away what other bundles left.
func (u *unpacking) prepare() error {
	if err := os.MkdirAll(u.dir, dirMode); err != nil { // #nosec G301 -- no secret
		return fmt.Errorf("making the directory of the bundle: %w", err)
	}
	others, err := os.ReadDir(u.target.Stage)
	if err != nil {
		return fmt.Errorf("reading the directory of bundles: %w", err)
	}
	for _, o := range others {
		if o.Name() != filepath.Base(u.dir) {
			if err := os.RemoveAll(filepath.Join(u.target.Stage, o.Name())); err != nil {
				return fmt.Errorf("clearing a former bundle away: %w", err)
			}
		}
	}
	if u.manifest.Model == nil || u.target.Models == "" {
		return nil
	}
	blobs := filepath.Join(u.repository(), "blobs")
	if err := os.MkdirAll(blobs, dirMode); err != nil { // #nosec G301 -- another user reads them
		return fmt.Errorf("making the directory of the weights: %w", err)
	}
	// A link in its place would lead what root writes elsewhere.
	return realDirs(u.target.Models, blobs)
}

// realDirs refuses a way to a directory that has links in it below a base.
func realDirs(base, dir string) error {
	for ; len(dir) > len(base); dir = filepath.Dir(dir) {
		info, err := os.Lstat(dir)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			return fmt.Errorf("%s is no directory", dir)
		}
	}
	return nil
}

func (u *unpacking) repository() string {
	return filepath.Join(u.target.Models, "hub", "models--"+strings.ReplaceAll(u.manifest.Model.Name, "/", "--"))
}

func (u *unpacking) blobName(e Entry) string {
	return filepath.Join(u.repository(), "blobs", e.Blob)
}

// place is the Receiver.
func (u *unpacking) place(e Entry) (Place, error) {
	switch e.Kind {
	case KindLLMBox:
		return u.file(e, u.out.LLMBox, programMode, false)
	case KindK3s:
		return u.file(e, u.out.K3s, programMode, false)
	case KindK3sSums:
		return u.file(e, filepath.Join(u.dir, path.Base(e.Path)), fileMode, false)
	case KindWeights:
		if u.target.Models == "" {
			return nil, nil
		}
		return u.file(e, u.blobName(e), fileMode, true)
	case KindBlob:
		return u.blob(e)
	}
	return nil, fmt.Errorf("%w: kind %q", ErrManifest, e.Kind)
}

// file writes beside the final name, and gives that when it is told to keep it.
func (u *unpacking) file(e Entry, name string, mode fs.FileMode, weights bool) (Place, error) {
	if info, err := os.Lstat(name); err == nil && weights && info.Mode().IsRegular() && info.Size() == e.Size {
		// Blobs get their names only once they are verified.
		u.out.Present += e.Size
		return nil, nil
	}
	temporary := name + ".incomplete"
	file, err := create(temporary)
	if err != nil {
		return nil, err
	}
	p := &placedFile{file: file, temporary: temporary, name: name, mode: mode, wrote: func() { u.out.Written += e.Size }}
	if weights {
		p.uid, p.gid = u.target.UID, u.target.GID
	}
	return p, nil
}

func create(name string) (*os.File, error) {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, fileMode) // #nosec G304 -- a name of ours
}

type placedFile struct {
	file            *os.File
	temporary, name string
	mode            fs.FileMode
	uid, gid        int
	wrote           func()
}

func (p *placedFile) Write(b []byte) (int, error)             { return p.file.Write(b) }
func (p *placedFile) ReadFrom(r io.Reader) (n int64, e error) { return p.file.ReadFrom(r) }

func (p *placedFile) Drop() {
	_ = p.file.Close()
	_ = os.Remove(p.temporary)
}

func (p *placedFile) Keep() (err error) {
	defer func() {
		if err != nil {
			p.Drop()
		}
	}()
	if err := p.file.Chmod(p.mode); err != nil {
		return err
	}
	if p.uid != 0 || p.gid != 0 {
		if err := p.file.Chown(p.uid, p.gid); err != nil {
			return err
		}
	}
	if err := p.file.Sync(); err != nil {
		return err
	}
	if err := p.file.Close(); err != nil {
		return err
	}
	if err := os.Rename(p.temporary, p.name); err != nil {
		return err
	}
	p.wrote()
	return syncDir(filepath.Dir(p.name))
}

func syncDir(name string) error {
	dir, err := os.Open(name) // #nosec G304 -- a directory of ours
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	return dir.Sync()
}

// archive is one that is being written.
type archive struct {
	file *os.File
	out  *tar.Writer
	at   *counting
	// left are the blobs that it lacks.
	left map[string]bool
}

type counting struct {
	to io.Writer
	n  int64
}

func (c *counting) Write(p []byte) (int, error) {
	n, err := c.to.Write(p)
	c.n += int64(n)
	return n, err
}

// blob puts a blob into the first archive that wants it; the others copy it from there.
func (u *unpacking) blob(e Entry) (Place, error) {
	groups := u.wanted[e.SHA256]
	if len(groups) == 0 {
		return nil, nil
	}
	a, err := u.archive(groups[0])
	if err != nil {
		return nil, err
	}
	if err := a.out.WriteHeader(header("blobs/sha256/"+e.SHA256, e.Size)); err != nil {
		return nil, err
	}
	return &placedBlob{u: u, a: a, e: e, start: a.at.n}, nil
}

type placedBlob struct {
	u     *unpacking
	a     *archive
	e     Entry
	start int64
}

func (p *placedBlob) Write(b []byte) (int, error) { return p.a.out.Write(b) }

// Drop leaves the archive without its final name; abandon takes it away.
func (p *placedBlob) Drop() {}

func (p *placedBlob) Keep() error {
	delete(p.a.left, p.e.SHA256)
	p.u.where[p.e.SHA256] = place{file: p.a.file.Name(), offset: p.start}
	p.u.out.Written += p.e.Size
	return nil
}

// archive begins the archive of a group.
func (u *unpacking) archive(g Group) (*archive, error) {
	if a := u.open[g]; a != nil {
		return a, nil
	}
	index, err := u.index(g)
	if err != nil {
		return nil, err
	}
	file, err := create(u.archiveName(g) + ".incomplete")
	if err != nil {
		return nil, err
	}
	a := &archive{file: file, at: &counting{to: file}, left: map[string]bool{}}
	a.out = tar.NewWriter(a.at)
	u.open[g] = a
	for blob, groups := range u.wanted {
		if slices.Contains(groups, g) {
			a.left[blob] = true
		}
	}
	for _, f := range []struct {
		name    string
		content []byte
	}{{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)}, {"index.json", index}} {
		if err := a.out.WriteHeader(header(f.name, int64(len(f.content)))); err != nil {
			return nil, err
		}
		if _, err := a.out.Write(f.content); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// index names the images of a group. One that charts ask for by digest has that name, too.
func (u *unpacking) index(g Group) ([]byte, error) {
	type described struct {
		Descriptor
		Annotations map[string]string `json:"annotations"`
		Platform    map[string]string `json:"platform"`
	}
	index := struct {
		SchemaVersion int         `json:"schemaVersion"`
		MediaType     string      `json:"mediaType"`
		Manifests     []described `json:"manifests"`
	}{SchemaVersion: 2, MediaType: "application/vnd.oci.image.index.v1+json"}
	for _, i := range u.manifest.Images {
		if i.Group != g {
			continue
		}
		repository := i.Reference[:strings.LastIndex(i.Reference, ":")]
		for _, name := range []string{i.Reference, repository + "@" + i.Digest} {
			index.Manifests = append(index.Manifests, described{
				Descriptor: i.Manifest, Annotations: map[string]string{containerdName: name, refName: name},
				Platform: map[string]string{"os": "linux", "architecture": u.manifest.Architecture},
			})
		}
	}
	return json.Marshal(index)
}

// finish completes an archive and gives it its name.
func (u *unpacking) finish(g Group) error {
	if !slices.ContainsFunc(u.manifest.Images, func(i Image) bool { return i.Group == g }) {
		return nil
	}
	a, err := u.archive(g) // one whose every blob is in others has not begun
	if err != nil {
		return err
	}
	left := make([]string, 0, len(a.left))
	for blob := range a.left {
		left = append(left, blob)
	}
	slices.Sort(left)
	for _, blob := range left {
		if err := u.copyBlob(a, blob); err != nil {
			return err
		}
	}
	if err := a.out.Close(); err != nil {
		return err
	}
	temporary := a.file.Name()
	if err := errors.Join(a.file.Sync(), a.file.Close()); err != nil {
		return err
	}
	u.open[g] = nil
	// Later archives may copy out of this one.
	for blob, at := range u.where {
		if at.file == temporary {
			at.file = u.archiveName(g)
			u.where[blob] = at
		}
	}
	return os.Rename(temporary, u.archiveName(g))
}

func (u *unpacking) copyBlob(a *archive, blob string) error {
	at, ok := u.where[blob]
	if !ok {
		return fmt.Errorf("%w: blob %s", ErrTruncated, blob)
	}
	i := slices.IndexFunc(u.manifest.Entries, func(e Entry) bool { return e.Kind == KindBlob && e.SHA256 == blob })
	size := u.manifest.Entries[i].Size
	from, err := os.Open(at.file)
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }()
	if err := a.out.WriteHeader(header("blobs/sha256/"+blob, size)); err != nil {
		return err
	}
	_, err = io.Copy(a.out, io.NewSectionReader(from, at.offset, size))
	return err
}

// abandon takes archives away that did not become whole.
func (u *unpacking) abandon() {
	for _, a := range u.open {
		if a != nil {
			_ = a.file.Close()
			_ = os.Remove(a.file.Name())
		}
	}
}

// Link gives a file a second name without a second copy where the file system allows it:
// as a hard link, as a clone, or else as a copy. It says whether anything changed. A copy
// has the time of what it was made of, to the nanosecond: by that it is known again, and
// a file that only has its size is not.
func Link(from, to string) (changed bool, err error) {
	a, err := os.Stat(from)
	if err != nil {
		return false, err
	}
	if b, err := os.Lstat(to); err == nil && (os.SameFile(a, b) || b.Mode().IsRegular() && b.Size() == a.Size() && b.ModTime().Equal(a.ModTime())) {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(to), dirMode); err != nil { // #nosec G301 -- no secret
		return false, err
	}
	temporary := filepath.Join(filepath.Dir(to), ".llmbox."+filepath.Base(to)+".incomplete")
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if err := os.Link(from, temporary); err != nil {
		err := clone(from, temporary)
		if err == nil {
			err = os.Chtimes(temporary, time.Time{}, a.ModTime())
		}
		if err != nil {
			_ = os.Remove(temporary)
			return false, err
		}
	}
	if err := os.Rename(temporary, to); err != nil {
		return false, err
	}
	return true, syncDir(filepath.Dir(to))
}

// clone shares the blocks, or copies them where they can't be shared.
func clone(from, to string) (err error) {
	in, err := os.Open(from) // #nosec G304 -- unpacked by this package
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) == nil { // #nosec G115 -- descriptors are small
		return nil
	}
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	return out.Sync()
}
