package main

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/mod/modfile"
)

// TestModulesAgree holds the list in groups.go and the modules together: a
// version that only one of them names would generate something else than what
// the file's header says.
func TestModulesAgree(t *testing.T) {
	var names []string
	for _, g := range groups() {
		names = append(names, g.name)
		t.Run(g.name, func(t *testing.T) {
			mod := readModule(t, g.name)
			for _, s := range g.sources {
				if got := required(mod, s.module); got != s.version {
					t.Errorf("%s: groups.go says %s, go.mod requires %q", s.module, s.version, got)
				}
			}
			if len(mod.Replace) > 0 {
				t.Errorf("go.mod replaces %s: the types would not be the ones named", mod.Replace[0].Old.Path)
			}
			if got, want := imports(t, filepath.Join("modules", g.name, "types.go")), g.packages(); !slices.Equal(got, want) {
				t.Errorf("types.go imports %q, groups.go lists %q", got, want)
			}
		})
	}
	entries, err := os.ReadDir("modules")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !slices.Contains(names, e.Name()) {
			t.Errorf("modules/%s: no group uses it", e.Name())
		}
	}
}

// TestGatewayAPIOfEnvoyGateway: the CRDs served must be the ones Envoy Gateway
// was built for.
func TestGatewayAPIOfEnvoyGateway(t *testing.T) {
	want := required(readModule(t, "envoy-gateway"), "sigs.k8s.io/gateway-api")
	if got := required(readModule(t, "gateway-api"), "sigs.k8s.io/gateway-api"); got != want {
		t.Errorf("Gateway API %s is generated, Envoy Gateway requires %s", got, want)
	}
}

func readModule(t *testing.T, name string) *modfile.File {
	t.Helper()
	path := filepath.Join("modules", name, "go.mod")
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	mod, err := modfile.Parse(path, content, nil)
	if err != nil {
		t.Fatal(err)
	}
	return mod
}

func required(mod *modfile.File, path string) string {
	for _, r := range mod.Require {
		if r.Mod.Path == path {
			return r.Mod.Version
		}
	}
	return ""
}

func imports(t *testing.T, path string) []string {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, i := range parsed.Imports {
		name, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}
