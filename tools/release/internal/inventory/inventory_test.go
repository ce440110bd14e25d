package inventory

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestParseList(t *testing.T) {
	data, err := os.ReadFile("testdata/list.json")
	if err != nil {
		t.Fatal(err)
	}
	got, err := parseList(data, "/go")
	if err != nil {
		t.Fatal(err)
	}
	want := []Source{
		{Module{"example.org/a", "v1.0.0", "h1:a"}, "/mod/a@v1.0.0", []string{"/mod/a@v1.0.0", "/mod/a@v1.0.0/sub"}},
		// What was linked is the replacement; the program itself is nobody's module.
		{Module{"example.org/fork", "v2.0.0", "h1:f"}, "/mod/fork@v2.0.0", []string{"/mod/fork@v2.0.0"}},
		{Module{Path: "std"}, "/go", []string{"/go/src/fmt"}},
	}
	if !slices.EqualFunc(got, want, func(a, b Source) bool {
		return a.Module == b.Module && a.Dir == b.Dir && slices.Equal(a.Packages, b.Packages)
	}) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if _, err := parseList([]byte(`{"ImportPath": "nowhere"}`), "/go"); err == nil {
		t.Error("a package of no module was taken")
	}
}

func TestMissing(t *testing.T) {
	binary := Binary{Modules: []Module{{Path: "a", Version: "v1"}, {Path: "b", Version: "v1"}}}
	got := Missing(binary, []Source{{Module: Module{Path: "a", Version: "v1"}}, {Module: Module{Path: "b", Version: "v2"}}})
	if !slices.Equal(got, []string{"b@v1"}) {
		t.Errorf("missing %v, want b@v1: another version is another module", got)
	}
}

// The go command reads the same binary.
func TestReadBinaryAsGoDoes(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadBinary(self)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("go", "version", "-m", self).Output()
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for line := range strings.Lines(string(out)) {
		if words := strings.Fields(line); len(words) > 2 && words[0] == "dep" {
			want = append(want, words[1]+"@"+words[2])
		}
	}
	var have []string
	for _, module := range got.Modules {
		have = append(have, module.Path+"@"+module.Version)
	}
	slices.Sort(want)
	if !slices.Equal(have, want) || got.Settings["GOARCH"] == "" || len(got.SHA256) != 64 {
		t.Errorf("%v with %v and checksum %q, go says %v", have, got.Settings, got.SHA256, want)
	}
}

func TestGeneratedWantsASource(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "crd.yaml"), []byte("kind: CustomResourceDefinition\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Generated(t.Context(), dir); err == nil || !strings.Contains(err.Error(), "crd.yaml") {
		t.Errorf("%v doesn't name the file of unknown origin", err)
	}
}

// Every embedded CRD says where it comes from.
func TestEmbeddedCRDsHaveASource(t *testing.T) {
	files := 0
	err := filepath.WalkDir("../../../../embed/crds", func(path string, entry os.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		files++
		data, err := os.ReadFile(path)
		if err == nil && crdSource.Find(data) == nil {
			t.Errorf("%s doesn't say what it was made from", path)
		}
		return err
	})
	if err != nil || files == 0 {
		t.Errorf("%d files: %v", files, err)
	}
}
