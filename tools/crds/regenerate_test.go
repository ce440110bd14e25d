package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// TestRegenerate generates every group into a fresh directory and compares it,
// byte for byte, with what is committed.
func TestRegenerate(t *testing.T) {
	if testing.Short() {
		t.Skip("loads and parses the types of all groups")
	}
	fresh := t.TempDir()
	if err := run([]string{"-root", fresh}); err != nil {
		t.Fatal(err)
	}
	for _, g := range groups() {
		t.Run(g.name, func(t *testing.T) {
			want := readDir(t, filepath.Join(fresh, g.dir))
			have := readDir(t, filepath.Join("..", "..", g.dir))
			for name, content := range want {
				switch committed, ok := have[name]; {
				case !ok:
					t.Errorf("%s: not committed; run make crds", name)
				case !bytes.Equal(committed, content):
					t.Errorf("%s: differs from what the types say; run make crds", name)
				}
			}
			for name := range have {
				if _, ok := want[name]; !ok {
					t.Errorf("%s: committed, but no type makes it; run make crds", name)
				}
			}
		})
	}
}

// TestNoFolderWithoutGroup finds CRDs that nothing regenerates.
func TestNoFolderWithoutGroup(t *testing.T) {
	var known []string
	for _, g := range groups() {
		known = append(known, g.dir)
	}
	for _, parent := range []string{"embed/crds", "test/lab/crds"} {
		entries, err := os.ReadDir(filepath.Join("..", "..", parent))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if dir := parent + "/" + e.Name(); e.IsDir() && !slices.Contains(known, dir) {
				t.Errorf("%s: no group in groups.go writes it", dir)
			}
		}
	}
}

func readDir(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]byte{}
	for _, e := range entries {
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		all[e.Name()] = content
	}
	return all
}
