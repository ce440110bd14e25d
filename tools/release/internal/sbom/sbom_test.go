package sbom

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/llmbox-dev/llmbox/tools/release/internal/inventory"
)

// schema is CycloneDX' own, as its library brings it along.
func schema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/CycloneDX/cyclonedx-go").Output()
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	compiler.UseLoader(jsonschema.SchemeURLLoader{
		// The schema names its parts by address; they lie beside it.
		"http": beside(strings.TrimSpace(string(out))),
	})
	compiled, err := compiler.Compile("http://cyclonedx.org/schema/bom-1.6.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return compiled
}

type beside string

func (b beside) Load(url string) (any, error) {
	name := filepath.Base(url)
	if name == "jsf-0.82.schema.json" {
		name = "jsf-0.82.schemax.json"
	}
	file, err := os.Open(filepath.Join(string(b), "schema", name))
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return jsonschema.UnmarshalJSON(file)
}

var at = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func program() Program {
	return Program{
		Binary: inventory.Binary{
			Name: "llmbox-linux-amd64", SHA256: strings.Repeat("ab", 32), Go: "go1.26.7", Package: "example.org/llmbox/cmd/llmbox",
			Main: inventory.Module{Path: "example.org/llmbox", Version: "v1.2.3"}, Settings: map[string]string{"GOOS": "linux", "GOARCH": "amd64"},
		},
		Child:   inventory.Binary{Name: "llmbox-nvml", SHA256: strings.Repeat("cd", 32), Go: "go1.26.7"},
		Version: "1.2.3", Time: at,
		Parts: []Part{
			{Module: inventory.Module{Path: "example.org/a", Version: "v1.0.0+incompatible", Sum: "h1:x"}, Licence: "MIT"},
			{Module: inventory.Module{Path: "example.org/b", Version: "v2.0.0"}, Licence: "Apache-2.0 AND BSD-3-Clause"},
			{Module: inventory.Module{Path: "example.org/nvml", Version: "v0.1.0"}, Licence: "Apache-2.0", Child: true},
			{Module: inventory.Module{Path: "example.org/types", Version: "v3.0.0"}, Licence: "Apache-2.0", Data: true},
			{Module: inventory.Module{Path: "std"}, Licence: "BSD-3-Clause"},
		},
	}
}

func TestBillsFollowTheSchema(t *testing.T) {
	compiled := schema(t)
	images := []Image{
		{Reference: "registry.example:5000/b/name:v1", Components: []string{"one", "two"}, Source: "somewhere"},
		{Reference: "registry.example/a/name:v1", Digest: "sha256:" + strings.Repeat("ef", 32), SizeBytes: 7},
	}
	for name, write := range map[string]func(*bytes.Buffer) error{
		"program": func(b *bytes.Buffer) error { return WriteProgram(b, program()) },
		"images":  func(b *bytes.Buffer) error { return WriteImages(b, "1.2.3", images, at) },
	} {
		t.Run(name, func(t *testing.T) {
			var first, second bytes.Buffer
			if err := write(&first); err != nil {
				t.Fatal(err)
			}
			slices.Reverse(images)
			if err := write(&second); err != nil || first.String() != second.String() {
				t.Errorf("written again it is something else (%v)", err)
			}
			document, err := jsonschema.UnmarshalJSON(bytes.NewReader(first.Bytes()))
			if err != nil {
				t.Fatal(err)
			}
			if err := compiled.Validate(document); err != nil {
				t.Errorf("%v\n%s", err, first.String())
			}
		})
	}
}

func TestProgramListsItsParts(t *testing.T) {
	var out bytes.Buffer
	if err := WriteProgram(&out, program()); err != nil {
		t.Fatal(err)
	}
	var bill struct {
		Components   []struct{ Name, Version, Purl, Type string }
		Dependencies []struct {
			Ref       string
			DependsOn []string
		}
	}
	if err := json.Unmarshal(out.Bytes(), &bill); err != nil {
		t.Fatal(err)
	}
	var purls []string
	for _, one := range bill.Components {
		purls = append(purls, one.Purl)
	}
	want := []string{"", "pkg:golang/example.org/a@v1.0.0%2Bincompatible", "pkg:golang/example.org/b@v2.0.0", "pkg:golang/example.org/nvml@v0.1.0", "pkg:golang/example.org/types@v3.0.0", "pkg:golang/stdlib@1.26.7"}
	if !slices.Equal(purls, want) {
		t.Errorf("components %q, want %q", purls, want)
	}
	needs := map[string][]string{}
	for _, one := range bill.Dependencies {
		needs[one.Ref] = one.DependsOn
	}
	// What only the child has is no need of the static binary.
	if !slices.Equal(needs["llmbox-nvml"], []string{want[3]}) || slices.Contains(needs["llmbox"], want[3]) || !slices.Contains(needs["llmbox"], want[1]) {
		t.Errorf("dependencies %v", needs)
	}
}

func TestSplit(t *testing.T) {
	for reference, want := range map[string][2]string{
		"docker.io/envoyproxy/envoy:v1":                {"docker.io/envoyproxy/envoy", "v1"},
		"localhost:5000/name":                          {"localhost:5000/name", ""},
		"localhost:5000/name:v1":                       {"localhost:5000/name", "v1"},
		"registry.example/name@sha256:" + "00":         {"registry.example/name", ""},
		"registry.example/name:v1@sha256:" + "00":      {"registry.example/name", "v1"},
		"registry.example:443/deep/er/name:v1@sha256:": {"registry.example:443/deep/er/name", "v1"},
	} {
		repository, tag := split(reference)
		if repository != want[0] || tag != want[1] {
			t.Errorf("%s: %q and %q, want %q", reference, repository, tag, want)
		}
	}
}
