package bundle

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

const testCommit = "0123456789abcdef0123456789abcdef01234567"

// sample is a small bundle: two images that share a layer, a model, both programs.
type sample struct {
	manifest *Manifest
	content  map[string][]byte
}

func newSample(t testing.TB) *sample {
	t.Helper()
	s := &sample{manifest: &Manifest{Format: Format, Version: "1.2.3", Architecture: "amd64", K3s: K3s{Version: "v1.36.4+k3s1"}}, content: map[string][]byte{}}
	add := func(e Entry, content []byte) {
		e.Size, e.SHA256 = int64(len(content)), digestOf(content)
		if e.Kind == KindBlob {
			e.Path = "images/blobs/sha256/" + e.SHA256
		}
		if _, twice := s.content[e.Path]; !twice {
			s.manifest.Entries = append(s.manifest.Entries, e)
		}
		s.content[e.Path] = content
	}
	noise := make([]byte, 300<<10)
	if _, err := rand.Read(noise); err != nil {
		t.Fatal(err)
	}
	add(Entry{Path: "llmbox", Kind: KindLLMBox}, []byte("the program"))
	add(Entry{Path: "k3s/k3s", Kind: KindK3s}, bytes.Repeat([]byte("k3s "), 2<<20))
	add(Entry{Path: "k3s/sha256sum-amd64.txt", Kind: KindK3sSums}, []byte("sums"))
	image := func(reference string, group Group, layers ...[]byte) {
		config := []byte(`{"architecture":"amd64","name":"` + reference + `"}`)
		manifest := []byte("manifest of " + reference)
		i := Image{
			Reference: reference, Group: group, Digest: "sha256:" + digestOf(manifest),
			Manifest: Descriptor{MediaType: "application/vnd.oci.image.manifest.v1+json", Digest: "sha256:" + digestOf(manifest), Size: int64(len(manifest))},
		}
		for _, blob := range append([][]byte{manifest, config}, layers...) {
			add(Entry{Kind: KindBlob}, blob)
			i.Blobs = append(i.Blobs, digestOf(blob))
		}
		s.manifest.Images = append(s.manifest.Images, i)
	}
	shared := noise[:100<<10]
	image("docker.io/rancher/mirrored-pause:3.6", GroupFirst, shared, noise[:64<<10])
	image("docker.io/vllm/vllm-openai:v1", GroupModel, shared, noise)
	weights := noise[1000:200_000]
	s.manifest.Model = &Model{Name: "org/name", Commit: testCommit, Bytes: int64(len(weights)), Listing: json.RawMessage(`{}`)}
	add(Entry{Path: "weights/blobs/" + digestOf(weights), Kind: KindWeights, Blob: digestOf(weights)}, weights)
	add(Entry{Path: "weights/blobs/" + testCommit, Kind: KindWeights, Blob: testCommit}, []byte("{}"))
	image("docker.io/x/rest:v1", GroupRest, shared)
	return s
}

func (s *sample) open(e Entry) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(s.content[e.Path])), nil
}

func (s *sample) pack(t testing.TB) []byte {
	t.Helper()
	var out bytes.Buffer
	if _, err := Write(context.Background(), &out, s.manifest, s.open, nil); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// loose packs whatever headers a test wants behind a manifest.
func (s *sample) loose(t testing.TB, headers []*tar.Header, contents [][]byte) []byte {
	t.Helper()
	raw, err := json.Marshal(s.manifest)
	if err != nil {
		t.Fatal(err)
	}
	return pack(t, append([]*tar.Header{header(manifestName, int64(len(raw)))}, headers...), append([][]byte{raw}, contents...))
}

func pack(t testing.TB, headers []*tar.Header, contents [][]byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z, err := zstd.NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	archive := tar.NewWriter(z)
	for i, h := range headers {
		if err := archive.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := archive.Write(contents[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(archive.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// entries are the files of the sample as headers.
func (s *sample) entries() (headers []*tar.Header, contents [][]byte) {
	for _, e := range s.manifest.Entries {
		headers, contents = append(headers, header(e.Path, e.Size)), append(contents, s.content[e.Path])
	}
	return headers, contents
}

func verify(raw []byte) error {
	b, err := NewReader(bytes.NewReader(raw))
	if err != nil {
		return err
	}
	defer b.Close()
	return b.Each(context.Background(), nil, nil)
}

func target(dir string) Target {
	return Target{Stage: filepath.Join(dir, "stage"), Models: filepath.Join(dir, "models")}
}

func unpack(raw []byte, dir string) (Unpacked, error) {
	b, err := NewReader(bytes.NewReader(raw))
	if err != nil {
		return Unpacked{}, err
	}
	defer b.Close()
	return Unpack(context.Background(), b, target(dir), nil)
}

func TestEverythingComesBack(t *testing.T) {
	s, dir := newSample(t), t.TempDir()
	raw := s.pack(t)
	if err := verify(raw); err != nil {
		t.Fatal(err)
	}
	u, err := unpack(raw, dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]byte{
		u.LLMBox: s.content["llmbox"], u.K3s: s.content["k3s/k3s"],
		filepath.Join(dir, "models/hub/models--org--name/blobs", testCommit): []byte("{}"),
	} {
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, want) { // #nosec G304 -- the test's own
			t.Errorf("%s is not what went in: %v", name, err)
		}
	}
	if len(u.Archives) != 3 {
		t.Fatalf("there are %d archives of images", len(u.Archives))
	}
	for n, a := range u.Archives {
		files := readArchive(t, a.Path)
		image := s.manifest.Images[n]
		if a.References[0] != image.Reference || !bytes.Contains(files["index.json"], []byte(image.Reference)) {
			t.Errorf("%s does not name %s", a.Path, image.Reference)
		}
		for _, blob := range image.Blobs {
			if digestOf(files["blobs/sha256/"+blob]) != blob {
				t.Errorf("%s lacks %s of %s", a.Path, blob, image.Reference)
			}
		}
	}
	again, err := unpack(raw, dir)
	if err != nil || again.Written != 0 || again.Present != s.manifest.Bytes() {
		t.Errorf("once more writes %d bytes and finds %d: %v", again.Written, again.Present, err)
	}
}

func readArchive(t *testing.T, name string) map[string][]byte {
	t.Helper()
	file, err := os.Open(name) // #nosec G304 -- the test's own
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	out := map[string][]byte{}
	for in := tar.NewReader(file); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		if out[h.Name], err = io.ReadAll(in); err != nil {
			t.Fatal(err)
		}
	}
}

// A blob that two images share is in the bundle once.
func TestSharedBlobsAreStoredOnce(t *testing.T) {
	s := newSample(t)
	sum := digestOf(s.content["images/blobs/sha256/"+s.manifest.Images[0].Blobs[2]])
	n := 0
	for _, e := range s.manifest.Entries {
		if e.SHA256 == sum {
			n++
		}
	}
	if n != 1 {
		t.Errorf("it is there %d times", n)
	}
}

func TestRefusedByName(t *testing.T) {
	for name, c := range map[string]struct {
		make func(t *testing.T, s *sample) []byte
		want error
	}{
		"no bundle":    {func(*testing.T, *sample) []byte { return []byte("hello, this is no archive at all") }, ErrNotBundle},
		"empty":        {func(*testing.T, *sample) []byte { return nil }, ErrNotBundle},
		"other format": {func(t *testing.T, s *sample) []byte { s.manifest.Format = 2; return s.loose(t, nil, nil) }, ErrFormat},
		"cut off": {func(t *testing.T, s *sample) []byte {
			raw := s.pack(t)
			return raw[:len(raw)*2/3]
		}, ErrTruncated},
		"an end too early": {func(t *testing.T, s *sample) []byte {
			h, c := s.entries()
			return s.loose(t, h[:4], c[:4])
		}, ErrTruncated},
		"one byte changed": {func(t *testing.T, s *sample) []byte {
			s.content["llmbox"] = []byte("the progrAm")
			h, c := s.entries()
			return s.loose(t, h, c)
		}, ErrTampered},
		"a file of another size": {func(t *testing.T, s *sample) []byte {
			s.content["llmbox"] = []byte("the program and more")
			h, c := s.entries()
			h[0].Size = int64(len(c[0]))
			return s.loose(t, h, c)
		}, ErrTampered},
		"another order": {func(t *testing.T, s *sample) []byte {
			h, c := s.entries()
			h[0], h[1], c[0], c[1] = h[1], h[0], c[1], c[0]
			return s.loose(t, h, c)
		}, ErrUnexpected},
		"a link": {func(t *testing.T, s *sample) []byte {
			return s.loose(t, []*tar.Header{{Typeflag: tar.TypeSymlink, Name: "llmbox", Linkname: "/etc/passwd"}}, [][]byte{nil})
		}, ErrLink},
		"a hard link": {func(t *testing.T, s *sample) []byte {
			return s.loose(t, []*tar.Header{{Typeflag: tar.TypeLink, Name: "llmbox", Linkname: "/etc/passwd"}}, [][]byte{nil})
		}, ErrLink},
		"a device": {func(t *testing.T, s *sample) []byte {
			return s.loose(t, []*tar.Header{{Typeflag: tar.TypeChar, Name: "llmbox"}}, [][]byte{nil})
		}, ErrDevice},
		"a pipe": {func(t *testing.T, s *sample) []byte {
			return s.loose(t, []*tar.Header{{Typeflag: tar.TypeFifo, Name: "llmbox"}}, [][]byte{nil})
		}, ErrDevice},
		"a way out":    {named("../etc/cron.d/x"), ErrPath},
		"a hidden one": {named("k3s/../../x"), ErrPath},
		"an absolute":  {named("/etc/cron.d/x"), ErrPath},
		"a backslash":  {named(`..\x`), ErrPath},
		"twice":        {named("manifest.json"), ErrDuplicate},
		"a way out in the manifest": {func(t *testing.T, s *sample) []byte {
			s.manifest.Entries[0].Path = "../llmbox"
			return s.loose(t, nil, nil)
		}, ErrPath},
		"a kind's other name": {func(t *testing.T, s *sample) []byte {
			s.manifest.Entries[0].Path = "etc/llmbox"
			return s.loose(t, nil, nil)
		}, ErrManifest},
		"twice in the manifest": {func(t *testing.T, s *sample) []byte {
			s.manifest.Entries = append(s.manifest.Entries, s.manifest.Entries[0])
			return s.loose(t, nil, nil)
		}, ErrDuplicate},
		"twins but for case": {func(t *testing.T, s *sample) []byte {
			e := s.manifest.Entries[1]
			e.Path = "k3s/K3S"
			s.manifest.Entries = append(s.manifest.Entries, e)
			return s.loose(t, nil, nil)
		}, ErrDuplicate},
		"a size below nothing": {func(t *testing.T, s *sample) []byte {
			s.manifest.Entries[0].Size = -1
			return s.loose(t, nil, nil)
		}, ErrManifest},
		"something behind the end": {func(t *testing.T, s *sample) []byte {
			h, c := s.entries()
			return s.loose(t, append(h, header("more", 4)), append(c, []byte("more")))
		}, ErrUnexpected},
		"a bomb behind the end": {func(t *testing.T, s *sample) []byte {
			return append(s.pack(t), squeezed(t, 8<<20)...)
		}, ErrBomb},
		"a bomb for a manifest": {func(t *testing.T, _ *sample) []byte {
			return pack(t, []*tar.Header{header(manifestName, maxManifestBytes+1)}, [][]byte{make([]byte, maxManifestBytes+1)})
		}, ErrManifest},
	} {
		t.Run(name, func(t *testing.T) {
			raw := c.make(t, newSample(t))
			if err := verify(raw); !errors.Is(err, c.want) {
				t.Errorf("verify says %v, want %v", err, c.want)
			}
			dir := t.TempDir()
			if _, err := unpack(raw, dir); !errors.Is(err, c.want) {
				t.Errorf("unpack says %v, want %v", err, c.want)
			}
			nothingUnverified(t, dir)
		})
	}
}

func named(name string) func(*testing.T, *sample) []byte {
	return func(t *testing.T, s *sample) []byte {
		return s.loose(t, []*tar.Header{header(name, 3)}, [][]byte{[]byte("bad")})
	}
}

func squeezed(t *testing.T, n int) []byte {
	t.Helper()
	e, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return e.EncodeAll(make([]byte, n), nil)
}

// nothingUnverified wants no half of a file, and no file of images that is not whole.
func nothingUnverified(t *testing.T, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(name string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && (strings.HasSuffix(name, ".incomplete") || filepath.Base(name) == doneName) {
			t.Errorf("it left %s", name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Each single byte of a bundle that is changed is found, wherever it is.
func TestEveryFlippedByteIsFound(t *testing.T) {
	raw := newSample(t).pack(t)
	for n := range 64 {
		at := (len(raw) - 1) * n / 63
		bad := bytes.Clone(raw)
		bad[at] ^= 0x20
		if err := verify(bad); err == nil {
			// A block's padding or a reserved bit may not matter: then what comes out is the same.
			t.Errorf("byte %d of %d was changed and nobody says so", at, len(raw))
		}
	}
}

func TestFits(t *testing.T) {
	m := &Manifest{Version: "1.2.3", Architecture: "amd64"}
	for name, c := range map[string]struct {
		want Want
		err  error
	}{
		"the same":     {Want{"amd64", "1.2.3"}, nil},
		"architecture": {Want{"arm64", "1.2.3"}, ErrArchitecture},
		"older":        {Want{"amd64", "1.3.0"}, ErrOlder},
		"newer":        {Want{"amd64", "1.2.2"}, ErrNewer},
		"a candidate":  {Want{"amd64", "1.2.3-rc1"}, ErrNewer},
		"no version":   {Want{"amd64", "whatever"}, ErrOlder},
	} {
		if err := m.Fits(c.want); !errors.Is(err, c.err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What was placed before a cut stays, and the next run goes on.
func TestCutOffAndAgain(t *testing.T) {
	s, dir := newSample(t), t.TempDir()
	raw := s.pack(t)
	h, c := s.entries()
	// Everything is there but the last image.
	if _, err := unpack(s.loose(t, h[:len(h)-2], c[:len(c)-2]), dir); !errors.Is(err, ErrTruncated) {
		t.Fatal(err)
	}
	nothingUnverified(t, dir)
	u, err := unpack(raw, dir)
	if err != nil || u.Present == 0 {
		t.Errorf("%d bytes were there: %v", u.Present, err)
	}
}

// A directory of the models that leads elsewhere is not followed.
func TestLinkInTheModels(t *testing.T) {
	s, dir, outside := newSample(t), t.TempDir(), t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "models"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(dir, "models/hub")); err != nil {
		t.Fatal(err)
	}
	if _, err := unpack(s.pack(t), dir); err == nil {
		t.Error("it was followed")
	}
	if _, err := os.Stat(filepath.Join(outside, "models--org--name/blobs", testCommit)); err == nil {
		t.Error("written outside")
	}
}

func TestLinkIsNoSecondCopy(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "a"), filepath.Join(dir, "b/c.tar")
	if err := os.WriteFile(from, []byte("images"), 0o600); err != nil {
		t.Fatal(err)
	}
	if changed, err := Link(from, to); err != nil || !changed {
		t.Fatal(changed, err)
	}
	a, _ := os.Stat(from)
	b, err := os.Stat(to)
	if err != nil || !os.SameFile(a, b) {
		t.Errorf("it was copied: %v", err)
	}
	if changed, err := Link(from, to); err != nil || changed {
		t.Error("once more changes it", err)
	}
}

// What only has the size of a file is not that file, whatever its time; a copy, where no
// link is possible, is known again.
func TestLinkIsNotTakenForAnother(t *testing.T) {
	for name, place := range map[string]string{"on one file system": t.TempDir(), "on another": elsewhere(t)} {
		t.Run(name, func(t *testing.T) {
			from, to := filepath.Join(t.TempDir(), "a"), filepath.Join(place, "a.tar")
			if err := errors.Join(os.WriteFile(from, []byte("images"), 0o600), os.WriteFile(to, []byte("IMAGES"), 0o600)); err != nil {
				t.Fatal(err)
			}
			later := time.Now().Add(time.Hour)
			if err := os.Chtimes(to, later, later); err != nil {
				t.Fatal(err)
			}
			for i, want := range []bool{true, false, false} {
				changed, err := Link(from, to)
				if err != nil || changed != want {
					t.Errorf("call %d: changed %t, %v", i+1, changed, err)
				}
			}
			if raw, err := os.ReadFile(to); err != nil || string(raw) != "images" { // #nosec G304 -- the test's own
				t.Errorf("it holds %q, %v", raw, err)
			}
			// The next bundle's archive has the same size, too.
			if err := os.Remove(from); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(from, []byte("others"), 0o600); err != nil {
				t.Fatal(err)
			}
			if changed, err := Link(from, to); err != nil || !changed {
				t.Errorf("another archive of that size: changed %t, %v", changed, err)
			}
		})
	}
}

// elsewhere is a directory on another file system, where there is one.
func elsewhere(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "llmbox-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// A machine that serves no model verifies the weights and leaves them.
func TestUnpackWithoutWeights(t *testing.T) {
	s, dir := newSample(t), t.TempDir()
	open := func(raw []byte) (*Reader, Target) {
		b, err := NewReader(bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		to := target(dir)
		to.Models = ""
		return b, to
	}
	raw := s.pack(t)
	for range 2 {
		b, to := open(raw)
		u, err := Unpack(t.Context(), b, to, nil)
		b.Close()
		if err != nil || len(u.Archives) != 3 {
			t.Fatalf("%v, %v", u, err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, "models*")); err != nil || len(left) > 0 {
		t.Errorf("it made %q, %v", left, err)
	}
	weights := s.manifest.Entries[slices.IndexFunc(s.manifest.Entries, func(e Entry) bool { return e.Kind == KindWeights })]
	s.content[weights.Path][0] ^= 1
	headers, contents := s.entries()
	dir = t.TempDir()
	b, to := open(s.loose(t, headers, contents))
	defer b.Close()
	if _, err := Unpack(t.Context(), b, to, nil); !errors.Is(err, ErrTampered) {
		t.Errorf("weights that were changed: %v", err)
	}
}

func TestWriteFindsAFileThatChanged(t *testing.T) {
	s := newSample(t)
	for name, content := range map[string]string{"changed": "the progrAm", "grown": "the program!", "shorter": "the"} {
		s.content["llmbox"] = []byte(content)
		if _, err := Write(t.Context(), io.Discard, s.manifest, s.open, nil); err == nil {
			t.Error(name, "went in")
		}
	}
}

func FuzzReader(f *testing.F) {
	s := newSample(f)
	f.Add(s.pack(f))
	raw, err := json.Marshal(s.manifest)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add([]byte("../../etc"))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		_, _ = unpack(data, dir)
		// Also what no compression hides from the fuzzer: a manifest, and an archive.
		if m, err := decode(data); err == nil {
			for _, e := range m.Entries {
				if strings.Contains(e.Path, "..") && checkName(e.Path) != nil || e.Path != e.pathOf() {
					t.Errorf("%q was taken", e.Path)
				}
			}
		}
		e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = unpack(e.EncodeAll(data, nil), dir)
		names, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			if n.Name() != "stage" && n.Name() != "models" {
				t.Errorf("written outside: %s", n.Name())
			}
		}
	})
}
