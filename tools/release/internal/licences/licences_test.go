package licences

import (
	"bytes"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/tools/release/internal/inventory"
)

func TestOf(t *testing.T) {
	for _, test := range []struct {
		module string
		// packages are the linked ones, within the module.
		packages []string
		want     string
		files    []string
		refused  string
	}{
		{module: "mit", packages: []string{"."}, want: "MIT", files: []string{"LICENSE.md"}},
		{module: "apache-notice", packages: []string{"."}, want: "Apache-2.0", files: []string{"LICENSE", "NOTICE"}},
		{module: "docs", packages: []string{"."}, want: "MIT", files: []string{"LICENSE"}},
		{module: "copyleft", packages: []string{"."}, refused: "GPL-2.0"},
		{module: "none", packages: []string{"."}, refused: "no licence file"},
		{module: "prose", packages: []string{"."}, refused: "of it is the text of a licence"},
		// What lies above a linked package counts, what lies beside it doesn't.
		{module: "nested", packages: []string{"."}, want: "MIT", files: []string{"LICENSE"}},
		{module: "nested", packages: []string{"sub/third_party/deep"}, want: "Apache-2.0 AND MIT", files: []string{"LICENSE", "sub/third_party/LICENSE"}},
		{module: "mixed", packages: []string{"."}, want: "MIT", files: []string{"LICENSE"}},
		{module: "mixed", packages: []string{".", "vendored"}, refused: "GPL-2.0"},
	} {
		t.Run(test.module+" "+strings.Join(test.packages, " "), func(t *testing.T) {
			dir, err := filepath.Abs(filepath.Join("testdata", test.module))
			if err != nil {
				t.Fatal(err)
			}
			source := inventory.Source{Module: inventory.Module{Path: "example.org/" + test.module, Version: "v1.0.0"}, Dir: dir}
			for _, name := range test.packages {
				source.Packages = append(source.Packages, filepath.Join(dir, name))
			}
			got, err := Of(source)
			if test.refused != "" {
				if err == nil || !strings.Contains(err.Error(), test.refused) || !strings.Contains(err.Error(), source.Path) {
					t.Fatalf("the error is %v, want one that names %s and %q", err, source.Path, test.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var files []string
			for _, file := range got.Files {
				files = append(files, file.Name)
			}
			if got.Expression() != test.want || !slices.Equal(files, test.files) {
				t.Errorf("%q from %v, want %q from %v", got.Expression(), files, test.want, test.files)
			}
		})
	}
}

// All goes on after the first module that is refused: one run names everything to mend.
func TestAllNamesEveryRefusal(t *testing.T) {
	var sources []inventory.Source
	for _, name := range []string{"copyleft", "mit", "none"} {
		dir := filepath.Join("testdata", name)
		sources = append(sources, inventory.Source{Module: inventory.Module{Path: name}, Dir: dir, Packages: []string{dir}})
	}
	_, err := All(sources)
	for _, want := range []string{"copyleft", "none"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v doesn't name %s", err, want)
		}
	}
}

func TestReportHoldsEachTextOnce(t *testing.T) {
	text := "the very text"
	var out bytes.Buffer
	err := Report(&out, "Licences", []Licence{
		{Module: inventory.Module{Path: "one", Version: "v1"}, IDs: []string{"MIT"}, Files: []File{{Name: "LICENSE", Text: text}}},
		{Module: inventory.Module{Path: "two", Version: "v2"}, IDs: []string{"MIT"}, Files: []File{{Name: "COPYING", Text: text + "\n"}, {Name: "NOTICE", Text: "a notice"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), text); n != 1 {
		t.Errorf("the text is there %d times", n)
	}
	for _, want := range []string{"one v1: LICENSE\ntwo v2: COPYING", "two v2: NOTICE\n\na notice", "one  v1  MIT"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}
