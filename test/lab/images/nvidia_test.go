package images

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The operator's image holds what was collected with it, at upstream's paths.
func TestOperatorsAssets(t *testing.T) {
	dir := t.TempDir()
	find := func() Image {
		t.Helper()
		all, err := Catalogue(dir, filepath.Join(dir, "llmbox"), "1.2.3")
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(all, func(i Image) bool { return strings.HasPrefix(i.Reference, "nvcr.io/nvidia/gpu-operator:") })
		if i < 0 {
			t.Fatal("there is no image of the GPU operator")
		}
		return all[i]
	}
	if missing := find().Missing(); len(missing) != 3 {
		t.Errorf("without anything built it lacks %q", missing)
	}
	for path, content := range map[string]string{
		"gpu-operator": "a program",
		"gpu-operator.files/assets/state-driver/0100.yaml":                 "kind: A",
		"gpu-operator.files/manifests/state-driver/0500_daemonset.yaml":    "kind: B",
		"gpu-operator.files/assets/pre-requisites/0200_runtime_class.yaml": "kind: C",
	} {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	image := find()
	if missing := image.Missing(); len(missing) > 0 {
		t.Errorf("it lacks %q", missing)
	}
	var paths []string
	for _, f := range image.Files {
		paths = append(paths, f.Path)
	}
	for _, want := range []string{"/usr/bin/gpu-operator", "/opt/gpu-operator/state-driver/0100.yaml",
		"/opt/gpu-operator/pre-requisites/0200_runtime_class.yaml", "/opt/gpu-operator/manifests/state-driver/0500_daemonset.yaml"} {
		if !slices.Contains(paths, want) {
			t.Errorf("there is no %s in %q", want, paths)
		}
	}
}

// A program that needs a dynamic loader is fine where the image has that loader.
func TestDynamicPrograms(t *testing.T) {
	const program = "/bin/ls"
	if _, err := os.Stat(program); err != nil {
		t.Skip(err)
	}
	alone := Image{Files: []File{{Path: "/bin/ls", Source: program}}}
	if missing := alone.Missing(); len(missing) != 1 || !strings.Contains(missing[0], "/lib64/ld-linux") {
		t.Errorf("alone it lacks %q", missing)
	}
	libc(&alone)
	if missing := alone.Missing(); len(missing) > 0 {
		t.Errorf("with libc it lacks %q", missing)
	}
}
