package preflight

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// tree is a snapshot as files, by their names within it.
type tree map[string][]byte

func readTree(t *testing.T, dir string) tree {
	t.Helper()
	out := tree{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		if name = filepath.ToSlash(name); name == "want.yaml" {
			return nil
		}
		raw, err := os.ReadFile(p)
		out[name] = raw
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

const filesName = "probes/files.json"

func (tr tree) entries(t *testing.T) []snapshot.Entry {
	t.Helper()
	var entries []snapshot.Entry
	if raw, ok := tr[filesName]; ok {
		if err := json.Unmarshal(raw, &entries); err != nil {
			t.Fatal(err)
		}
	}
	return entries
}

func (tr tree) setEntries(t *testing.T, entries []snapshot.Entry) {
	t.Helper()
	raw, err := json.Marshal(entries)
	if err != nil {
		t.Fatal(err)
	}
	tr[filesName] = raw
}

// without drops what lies at or under the places, entries of files.json too.
func (tr tree) without(t *testing.T, places []string) {
	t.Helper()
	under := func(name string) bool {
		return slices.ContainsFunc(places, func(p string) bool { return name == p || strings.HasPrefix(name, p+"/") })
	}
	maps.DeleteFunc(tr, func(name string, _ []byte) bool { return under(name) })
	tr.setEntries(t, slices.DeleteFunc(tr.entries(t), func(e snapshot.Entry) bool { return under("host" + e.Path) }))
}

// over lays files over the tree; entries are merged by their path.
func (tr tree) over(t *testing.T, top tree) {
	t.Helper()
	entries := tr.entries(t)
	for _, e := range top.entries(t) {
		entries = slices.DeleteFunc(entries, func(old snapshot.Entry) bool { return old.Path == e.Path })
		entries = append(entries, e)
	}
	maps.Copy(tr, top)
	tr.setEntries(t, entries)
}

// manifest changes manifest.yaml.
func (tr tree) manifest(t *testing.T, change func(m map[string]any)) {
	t.Helper()
	var m map[string]any
	if err := yaml.Unmarshal(tr["manifest.yaml"], &m); err != nil {
		t.Fatal(err)
	}
	change(m)
	raw, err := yaml.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	tr["manifest.yaml"] = raw
}

func (tr tree) unreadable(t *testing.T, places map[string]string) {
	t.Helper()
	tr.manifest(t, func(m map[string]any) {
		all, _ := m["unreadable"].(map[string]any)
		if all == nil {
			all = map[string]any{}
		}
		for place, why := range places {
			all[place] = why
		}
		m["unreadable"] = all
	})
}

// load writes the tree as an archive and reads it the way a person's snapshot is.
func (tr tree) load(t *testing.T) *snapshot.Snapshot {
	t.Helper()
	name := filepath.Join(t.TempDir(), "snapshot.tar.gz")
	file, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	zipped, err := gzip.NewWriterLevel(file, gzip.NoCompression)
	if err != nil {
		t.Fatal(err)
	}
	archive := tar.NewWriter(zipped)
	for _, p := range slices.Sorted(maps.Keys(tr)) {
		err = errors.Join(err, archive.WriteHeader(&tar.Header{Name: p, Typeflag: tar.TypeReg, Mode: 0o600, Size: int64(len(tr[p]))}))
		_, writeErr := archive.Write(tr[p])
		err = errors.Join(err, writeErr)
	}
	if err := errors.Join(err, archive.Close(), zipped.Close(), file.Close()); err != nil {
		t.Fatal(err)
	}
	s, err := snapshot.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// wanted is want.yaml: what must be said about a case, and what it is laid over.
type wanted struct {
	About  string            `json:"about"`
	Base   string            `json:"base"`
	Remove []string          `json:"remove"`
	Time   string            `json:"time"`
	Places map[string]string `json:"unreadable_places"`
	Need   Need              `json:"need"`

	// Roots maps the ids of all bad findings without a cause to their severity.
	Roots map[string]string `json:"roots"`
	// Followers are all bad findings that another one explains.
	Followers []string `json:"followers"`
	// Silent must be neither fail nor warn, said aloud because a naive check errs here.
	Silent []string `json:"silent"`
	// Measured and Fix map ids to words that must stand there.
	Measured map[string][]string `json:"measured"`
	Fix      map[string][]string `json:"fix"`
	// State maps ids to a state other than judged.
	State map[string]string `json:"state"`
	// Unreadable are ids that must say so.
	Unreadable []string `json:"unreadable"`
	Strict     []string `json:"strict"`
}

func readWanted(t *testing.T, dir string) wanted {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, "want.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var w wanted
	if err := yaml.UnmarshalStrict(raw, &w); err != nil {
		t.Fatal(err)
	}
	return w
}

const casesDir = "testdata/cases"

// loadCase returns the facts of a case, laid over its base.
func loadCase(t *testing.T, name string) (Facts, wanted) {
	t.Helper()
	dir := filepath.Join(casesDir, name)
	w := readWanted(t, dir)
	tr := readTree(t, dir)
	if w.Base != "" {
		base := readTree(t, filepath.Join(casesDir, w.Base))
		base.without(t, w.Remove)
		base.over(t, tr)
		tr = base
	}
	if len(w.Places) > 0 {
		tr.unreadable(t, w.Places)
	}
	if w.Time != "" {
		tr.manifest(t, func(m map[string]any) { m["time"] = w.Time })
	}
	return Facts{Snapshot: tr.load(t), Need: w.Need}, w
}
