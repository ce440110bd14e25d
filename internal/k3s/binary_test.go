package k3s

import (
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

const version = "v1.36.4+k3s1"

// releases serves a release from memory and counts what was asked.
type releases struct {
	files map[string]string
	// tampered is put in place instead of what was asked for.
	tampered string
	asked    []string
}

func (r *releases) Fetch(_ context.Context, f Fetch) error {
	r.asked = append(r.asked, f.URL)
	content, has := r.files[filepath.Base(f.URL)]
	if !has {
		return errors.New("not found")
	}
	if r.tampered != "" {
		content = r.tampered
	}
	f.Progress(int64(len(content)), int64(len(content)))
	return os.WriteFile(f.Path, []byte(content), 0o600)
}

func (r *releases) Text(_ context.Context, url string, _ int64) ([]byte, error) {
	r.asked = append(r.asked, url)
	content, has := r.files[filepath.Base(url)]
	if !has {
		return nil, errors.New("not found")
	}
	return []byte(content), nil
}

func release(version string) *releases {
	k3s := fakeK3s(version)
	return &releases{files: map[string]string{
		"k3s": k3s, "k3s-arm64": k3s + "# arm64\n",
		"sha256sum-amd64.txt": hashBytes([]byte(k3s)) + "  k3s\n" + hashBytes([]byte("images")) + "  k3s-airgap-images-amd64.tar.gz\n",
		"sha256sum-arm64.txt": hashBytes([]byte(k3s+"# arm64\n")) + "  k3s-arm64\n",
	}}
}

func TestDownloadIsVerifiedAndIdempotent(t *testing.T) {
	m, _, _ := fakeMachine(t)
	r, err := m.Record(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	source := release(version)
	var last Progress
	want := WantBinary{Version: version, Arch: "amd64", Fetcher: source}
	changed, err := m.EnsureBinary(t.Context(), r, want, func(p Progress) {
		if p.Total > 0 {
			last = p
		}
	})
	if err != nil || !changed {
		t.Fatalf("changed %v, %v", changed, err)
	}
	if source.asked[0] != "https://github.com/k3s-io/k3s/releases/download/v1.36.4%2Bk3s1/sha256sum-amd64.txt" || source.asked[1] != "https://github.com/k3s-io/k3s/releases/download/v1.36.4%2Bk3s1/k3s" {
		t.Errorf("asked for %q", source.asked)
	}
	if last.Unit != "bytes" || last.Done != last.Total || last.Done == 0 {
		t.Errorf("progress %+v", last)
	}
	info, err := os.Stat(m.at("/usr/local/bin/k3s"))
	if err != nil || info.Mode().Perm() != 0o755 {
		t.Fatalf("%v, %v", info, err)
	}
	again, err := m.Record(t.Context())
	if err != nil || again.Binary.Version != version || again.Binary.Source != FromDownload || again.Binary.Path != "/usr/local/bin/k3s" || again.Pending != nil {
		t.Errorf("record %+v, %v", again, err)
	}
	// A second run needs neither network nor cache.
	if err := os.RemoveAll(m.at("/var/lib/llmbox/cache")); err != nil {
		t.Fatal(err)
	}
	before := tree(t, m)
	changed, err = m.EnsureBinary(t.Context(), again, WantBinary{Version: version, Arch: "amd64", Offline: true}, nil)
	if err != nil || changed {
		t.Errorf("second run: changed %v, %v", changed, err)
	}
	if d := differ(before, tree(t, m)); d != "" {
		t.Errorf("second run changed files:\n%s", d)
	}
}

func TestSourcesInTheirOrder(t *testing.T) {
	m, _, _ := fakeMachine(t)
	source := release(version)
	bundle := t.TempDir()
	for _, name := range []string{"k3s", "sha256sum-amd64.txt"} {
		if err := os.WriteFile(filepath.Join(bundle, name), []byte(source.files[name]), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	named := filepath.Join(t.TempDir(), "my-k3s")
	if err := os.WriteFile(named, []byte(fakeK3s("v1.36.3+k3s1")), 0o600); err != nil {
		t.Fatal(err)
	}
	want := WantBinary{Version: version, Arch: "amd64", File: named, BundleDir: bundle, Fetcher: source}
	for _, step := range []struct {
		source, version string
		less            func()
	}{
		{"file", "v1.36.3+k3s1", func() { want.File = "" }},
		{"bundle", version, func() { want.BundleDir = "" }},
		{"download", version, func() { want.Fetcher = nil }},
		{"cache", version, func() { want.Offline = true }},
		{"cache", version, nil},
	} {
		if err := os.RemoveAll(m.at("/usr")); err != nil {
			t.Fatal(err)
		}
		_ = m.remove(t.Context(), m.recordFile())
		r, err := m.Record(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.EnsureBinary(t.Context(), r, want, nil); err != nil {
			t.Fatalf("%s: %v", step.source, err)
		}
		if string(r.Binary.Source) != step.source || r.Binary.Version != step.version {
			t.Errorf("took %+v, want %s %s", r.Binary, step.source, step.version)
		}
		if step.less != nil {
			step.less()
		}
	}
	// Without any there is a clear word.
	if err := os.RemoveAll(m.at("/var/lib/llmbox")); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(m.at("/usr")); err != nil {
		t.Fatal(err)
	}
	r, _ := m.Record(t.Context())
	_, err := m.EnsureBinary(t.Context(), r, WantBinary{Version: version, Arch: "amd64", Offline: true}, nil)
	if !errors.Is(err, ErrNoSource) {
		t.Errorf("no source: %v", err)
	}
}

func TestNothingWrongIsPutInPlace(t *testing.T) {
	good := release(version)
	otherSum := hashBytes([]byte("other"))
	foreignELF := func(t *testing.T) string {
		header := elf.Header64{Type: uint16(elf.ET_EXEC), Machine: uint16(elf.EM_PPC64), Version: 1, Ehsize: 64, Shentsize: 64, Phentsize: 56}
		copy(header.Ident[:], "\x7fELF\x02\x01\x01")
		at := filepath.Join(t.TempDir(), "ppc")
		file, err := os.Create(at)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = file.Close() }()
		if err := binary.Write(file, binary.LittleEndian, header); err != nil {
			t.Fatal(err)
		}
		return at
	}
	write := func(t *testing.T, content string) string {
		at := filepath.Join(t.TempDir(), "k3s")
		if err := os.WriteFile(at, []byte(content), 0o700); err != nil {
			t.Fatal(err)
		}
		return at
	}
	bundleOf := func(t *testing.T, files map[string]string) string {
		dir := t.TempDir()
		for name, content := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	with := func(files map[string]string, tampered string) *releases {
		out := &releases{files: map[string]string{}, tampered: tampered}
		for name, content := range good.files {
			out.files[name] = content
		}
		for name, content := range files {
			out.files[name] = content
		}
		return out
	}
	for name, test := range map[string]struct {
		want func(t *testing.T) WantBinary
		err  error
	}{
		"the download was changed": {func(*testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", Fetcher: with(nil, "#!/bin/sh\necho evil\n")}
		}, ErrChecksum},
		"the list lacks the file": {func(*testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", Fetcher: with(map[string]string{"sha256sum-amd64.txt": otherSum + "  k3s-airgap\n"}, "")}
		}, ErrNoChecksum},
		"the list is an error page": {func(*testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", Fetcher: with(map[string]string{"sha256sum-amd64.txt": "<html>404</html>"}, "")}
		}, ErrNoChecksum},
		"the list is cut": {func(*testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", Fetcher: with(map[string]string{"sha256sum-amd64.txt": otherSum[:40] + "  k3s\n"}, "")}
		}, ErrNoChecksum},
		"the list says two things": {func(*testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", Fetcher: with(map[string]string{"sha256sum-amd64.txt": otherSum + "  k3s\n" + hashBytes([]byte("x")) + "  k3s\n"}, "")}
		}, ErrNoChecksum},
		"the pinned digest differs": {func(*testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", Pinned: otherSum, Fetcher: with(nil, "")}
		}, ErrChecksum},
		"a bundle without its list": {func(t *testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", BundleDir: bundleOf(t, map[string]string{"k3s": good.files["k3s"]})}
		}, ErrNoChecksum},
		"a damaged bundle": {func(t *testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", BundleDir: bundleOf(t, map[string]string{"k3s": good.files["k3s"] + "x", "sha256sum-amd64.txt": good.files["sha256sum-amd64.txt"]})}
		}, ErrChecksum},
		"not k3s": {func(t *testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", File: write(t, "#!/bin/sh\necho kubectl version\n")}
		}, ErrNotK3s},
		"it fails": {func(t *testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", File: write(t, "#!/bin/sh\nexit 3\n")}
		}, ErrNotK3s},
		"another version than asked for": {func(t *testing.T) WantBinary {
			return WantBinary{Version: version, Exact: true, Arch: "amd64", File: write(t, fakeK3s("v1.36.5+k3s1"))}
		}, ErrVersion},
		"the release lies about its version": {func(*testing.T) WantBinary {
			lie := fakeK3s("v1.36.3+k3s1")
			return WantBinary{Version: version, Arch: "amd64", Fetcher: with(map[string]string{"k3s": lie, "sha256sum-amd64.txt": hashBytes([]byte(lie)) + "  k3s\n"}, "")}
		}, ErrVersion},
		"another architecture": {func(t *testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", File: foreignELF(t)}
		}, ErrNotK3s},
		"no release for it": {func(*testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "riscv64", Fetcher: good}
		}, ErrNoSource},
		"no such file": {func(*testing.T) WantBinary {
			return WantBinary{Version: version, Arch: "amd64", File: "/nowhere/k3s"}
		}, os.ErrNotExist},
	} {
		t.Run(name, func(t *testing.T) {
			m, _, _ := fakeMachine(t)
			r, _ := m.Record(t.Context())
			_, err := m.EnsureBinary(t.Context(), r, test.want(t), nil)
			if !errors.Is(err, test.err) {
				t.Errorf("%v, want %v", err, test.err)
			}
			if entries, _ := os.ReadDir(m.at("/usr/local/bin")); len(entries) > 0 {
				t.Errorf("left %v in place", entries)
			}
			if _, err := os.Stat(m.at("/var/lib/llmbox/cache/k3s/" + version + "/k3s")); errors.Is(test.err, ErrChecksum) && err == nil {
				t.Error("the bad download stays in the cache")
			}
		})
	}
}

func TestDamagedCacheIsFetchedAgain(t *testing.T) {
	m, _, _ := fakeMachine(t)
	source := release(version)
	put(t, m, "/var/lib/llmbox/cache/k3s/"+version+"/k3s", source.files["k3s"][:20])
	put(t, m, "/var/lib/llmbox/cache/k3s/"+version+"/sha256sum-amd64.txt", source.files["sha256sum-amd64.txt"])
	r, _ := m.Record(t.Context())
	if _, err := m.EnsureBinary(t.Context(), r, WantBinary{Version: version, Arch: "amd64", Fetcher: source}, nil); err != nil {
		t.Fatal(err)
	}
	if r.Binary.Source != FromDownload {
		t.Errorf("took it from %s", r.Binary.Source)
	}
}

func TestForeignBinaryIsNeverTouched(t *testing.T) {
	m, _, _ := fakeMachine(t)
	put(t, m, "/usr/local/bin/k3s", fakeK3s("v1.30.0+k3s1"))
	before := tree(t, m)
	r, _ := m.Record(t.Context())
	_, err := m.EnsureBinary(t.Context(), r, WantBinary{Version: version, Arch: "amd64", Fetcher: release(version)}, nil)
	var p *Problem
	if !errors.Is(err, ErrForeign) || !errors.As(err, &p) || !strings.Contains(p.Fix(), "--adopt") {
		t.Errorf("%v", err)
	}
	if d := differ(before, tree(t, m)); d != "" {
		t.Errorf("changed:\n%s", d)
	}
}

// TestCutOffBetweenRenameAndRecord is a kill right after the binary came into place.
func TestCutOffBetweenRenameAndRecord(t *testing.T) {
	m, _, _ := fakeMachine(t)
	k3s := fakeK3s(version)
	put(t, m, "/usr/local/bin/k3s", k3s)
	r, _ := m.Record(t.Context())
	r.Pending = &Binary{Path: "/usr/local/bin/k3s", Version: version, SHA256: hashBytes([]byte(k3s)), Source: FromDownload}
	if err := m.save(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	again, err := m.Record(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	changed, err := m.EnsureBinary(t.Context(), again, WantBinary{Version: version, Arch: "amd64", Offline: true}, nil)
	if err != nil || changed || again.Pending != nil || again.Binary.Version != version {
		t.Errorf("changed %v, %v, %+v", changed, err, again)
	}
}

// TestCutOffWhileWriting is a kill in the middle of the copy: the rest is written over.
func TestCutOffWhileWriting(t *testing.T) {
	m, _, _ := fakeMachine(t)
	put(t, m, "/usr/local/bin/"+temporaryOf("k3s"), "half a bina")
	r, _ := m.Record(t.Context())
	if _, err := m.EnsureBinary(t.Context(), r, WantBinary{Version: version, Arch: "amd64", Fetcher: release(version)}, nil); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(m.at("/usr/local/bin"))
	if err != nil || len(entries) != 1 || entries[0].Name() != "k3s" {
		t.Errorf("%v, %v", entries, err)
	}
}

func TestUpgradeAndDowngradeOfOurs(t *testing.T) {
	m, _, _ := fakeMachine(t)
	r, _ := m.Record(t.Context())
	ensure := func(v string) error {
		_, err := m.EnsureBinary(t.Context(), r, WantBinary{Version: v, Arch: "amd64", Fetcher: release(v)}, nil)
		return err
	}
	for _, v := range []string{"v1.35.6+k3s1", "v1.36.4+k3s1", "v1.36.4+k3s2"} {
		if err := ensure(v); err != nil || r.Binary.Version != v {
			t.Fatalf("%s: %v, %+v", v, err, r.Binary)
		}
	}
	before := tree(t, m)
	for _, v := range []string{"v1.36.4+k3s1", "v1.38.1+k3s1"} {
		if err := ensure(v); !errors.Is(err, ErrVersion) {
			t.Errorf("%s: %v", v, err)
		}
	}
	usr := func(lines []string) (out []string) {
		for _, l := range lines {
			if strings.Contains(l, " /usr") {
				out = append(out, l)
			}
		}
		return out
	}
	if d := differ(usr(before), usr(tree(t, m))); d != "" {
		t.Errorf("a refused version changed:\n%s", d)
	}
}

// TestReadOnlyDirectory takes the next directory where /usr/local can't be written to.
func TestReadOnlyDirectory(t *testing.T) {
	m, _, _ := fakeMachine(t)
	// A file where a directory should be refuses root as well.
	put(t, m, "/usr/local", "")
	r, _ := m.Record(t.Context())
	if _, err := m.EnsureBinary(t.Context(), r, WantBinary{Version: version, Arch: "amd64", Fetcher: release(version)}, nil); err != nil {
		t.Fatal(err)
	}
	if r.Binary.Path != "/opt/bin/k3s" {
		t.Errorf("went to %s", r.Binary.Path)
	}
	for err, want := range map[error]bool{syscall.EROFS: true, syscall.EACCES: true, syscall.ENOSPC: false, ErrChecksum: false} {
		if notHere(err) != want {
			t.Errorf("%v: %v", err, !want)
		}
	}
}

func TestArchitectureOfThisMachine(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := checkArchitecture(self, runtime.GOARCH); err != nil {
		t.Error(err)
	}
}
