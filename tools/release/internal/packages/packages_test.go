package packages

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const description = `name: tried
arch: $ARCH
platform: linux
version: $VERSION
maintainer: Somebody <somebody@example.org>
description: something small
contents:
- {src: "$FILES/program", dst: /usr/bin/tried, expand: true, file_info: {mode: 0755}}
- {src: "$FILES/pages/*", dst: /usr/share/tried, expand: true}
`

func options(t *testing.T, text string) Options {
	t.Helper()
	dir := t.TempDir()
	for name, data := range map[string]string{"nfpm.yaml": text, "program": "#!/bin/sh\n", "pages/one": "1", "pages/two": "2"} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return Options{
		Description: filepath.Join(dir, "nfpm.yaml"), Formats: []string{"deb", "rpm"}, Time: time.Unix(1_700_000_000, 0), Out: t.TempDir(),
		Variables: map[string]string{"ARCH": "arm64", "VERSION": "1.2.3-rc.1", "FILES": dir},
	}
}

// From another folder, at another time, the same bytes come out.
func TestSameBytes(t *testing.T) {
	first, err := Write(options(t, description))
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(1100 * time.Millisecond)
	second, err := Write(options(t, description))
	if err != nil {
		t.Fatal(err)
	}
	// A candidate sorts before its release.
	for i, name := range []string{"tried_1.2.3~rc.1_arm64.deb", "tried-1.2.3~rc.1-1.aarch64.rpm"} {
		if filepath.Base(first[i]) != name {
			t.Errorf("%s, want %s", filepath.Base(first[i]), name)
		}
		a, errA := os.ReadFile(first[i])
		b, errB := os.ReadFile(second[i])
		if errA != nil || errB != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs from itself, written again", name)
		}
	}
}

func TestUnknownVariable(t *testing.T) {
	_, err := Write(options(t, description+"homepage: $NOWHERE\n"))
	if err == nil || !strings.Contains(err.Error(), "NOWHERE") {
		t.Errorf("%v doesn't name the variable", err)
	}
}

func TestMissingFile(t *testing.T) {
	o := options(t, strings.Replace(description, "/program", "/absent", 1))
	if _, err := Write(o); err == nil {
		t.Error("a package without one of its files was written")
	}
	left, err := os.ReadDir(o.Out)
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}
