package component

import (
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	assets "github.com/llmbox-dev/llmbox/embed"
)

func TestEmbeddedTable(t *testing.T) {
	table, err := LoadTable(assets.FS())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Order(table.Components, nil); err != nil {
		t.Errorf("the embedded table can't be ordered: %v", err)
	}
	digest := regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	for _, c := range table.Components {
		if c.Chart != "" && c.Version.Shipped == "" {
			t.Errorf("%s ships no version", c.Name)
		}
		if c.Version.Source == "" {
			t.Errorf("%s: its version has no source", c.Name)
		}
		for key, img := range c.Images {
			_, tag, tagged := strings.Cut(img.Reference[strings.LastIndexByte(img.Reference, '/')+1:], ":")
			if !tagged || tag == "latest" {
				t.Errorf("%s: image %s is %q: a tag other than latest is needed", c.Name, key, img.Reference)
			}
			if img.Source == "" {
				t.Errorf("%s: image %s has no source", c.Name, key)
			}
			if img.Digest != "" && !digest.MatchString(img.Digest) {
				t.Errorf("%s: image %s has a digest of another form: %q", c.Name, key, img.Digest)
			}
		}
	}
}

func TestParseTableRefuses(t *testing.T) {
	for _, tc := range []struct{ file, says string }{
		{"unknown-field.yaml", `unknown field "neds"`},
		{"wrong-kind.yaml", `kind is "Table"`},
		{"unknown-gate.yaml", `unknown gate "luck"`},
		{"no-reference.yaml", "image main has no reference"},
	} {
		t.Run(tc.file, func(t *testing.T) {
			raw, err := os.ReadFile("testdata/" + tc.file)
			if err != nil {
				t.Fatal(err)
			}
			_, err = ParseTable(raw)
			if !errors.Is(err, ErrInvalidTable) || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("error is %v, want one that says %q", err, tc.says)
			}
		})
	}
}
