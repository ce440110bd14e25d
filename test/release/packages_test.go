package release

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// debian is a minimal Debian that stays as it is: LLMBOX_DEBIAN_ROOT, or the one that the
// lab keeps for its machines.
func debian(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("this needs root")
	}
	if root := os.Getenv("LLMBOX_DEBIAN_ROOT"); root != "" {
		return root
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skip(err)
	}
	found, err := filepath.Glob(filepath.Join(cache, "llmbox-lab", "debian-*-*"))
	if err != nil || len(found) == 0 {
		t.Skip("no Debian root is there: LLMBOX_DEBIAN_ROOT names one that debootstrap made")
	}
	return found[0]
}

// overlay lays a root that can be written to over one that is not to change.
func overlay(t *testing.T) string {
	t.Helper()
	lower, base := debian(t), t.TempDir()
	dirs := map[string]string{}
	for _, name := range []string{"upper", "work", "root"} {
		dirs[name] = filepath.Join(base, name)
	}
	// On a tmpfs: an overlay can't have another one as its upper side.
	mount := func(source, target, kind, data string) {
		if err := syscall.Mount(source, target, kind, 0, data); err != nil {
			t.Skipf("mounting %s: %v", kind, err)
		}
		t.Cleanup(func() {
			if err := syscall.Unmount(target, 0); err != nil {
				t.Errorf("unmounting %s: %v", target, err)
			}
		})
	}
	mount("tmpfs", base, "tmpfs", "size=1g,mode=755")
	for _, dir := range dirs {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	mount("overlay", dirs["root"], "overlay", fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", lower, dirs["upper"], dirs["work"]))
	return dirs["root"]
}

// tree is every file of a root with what could have changed of it. dpkg's and rpm's own
// records and logs are what a package manager is for.
func tree(t *testing.T, root string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, root)
		for _, own := range []string{"/var/lib/dpkg", "/var/lib/rpm", "/usr/lib/sysimage", "/root/.rpmdb", "/var/log/dpkg.log", "/proc", "/sys", "/dev", "/tmp/package"} {
			if strings.HasPrefix(name, own) {
				if entry.IsDir() {
					return fs.SkipDir
				}
				return nil
			}
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		line := fmt.Sprintf("%s %v", name, info.Mode())
		if info.Mode().IsRegular() {
			line += fmt.Sprintf(" %d %v", info.Size(), info.ModTime())
		}
		out = append(out, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func compare(t *testing.T, before, after []string) {
	t.Helper()
	for _, line := range after {
		if _, found := slices.BinarySearch(before, line); !found {
			t.Errorf("left behind, or changed: %s", line)
		}
	}
	for _, line := range before {
		if _, found := slices.BinarySearch(after, line); !found {
			t.Errorf("gone, or changed: %s", line)
		}
	}
}

func sorted(lines []string) []string {
	slices.Sort(lines)
	return lines
}

func packageOf(t *testing.T, dir, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(found) != 1 {
		t.Fatalf("%s: %v (%v)", pattern, found, err)
	}
	return found[0]
}

// installed looks at what a package has put into a root.
func installed(t *testing.T, dir, root, zsh string) {
	t.Helper()
	if got, want := sumOf(t, filepath.Join(root, "usr/bin/llmbox")), sumOf(t, binary(dir, "amd64")); got != want {
		t.Errorf("/usr/bin/llmbox is %s, the release's binary is %s", got, want)
	}
	if out := run(t, "chroot", root, "/usr/bin/llmbox", "version"); !strings.HasPrefix(out, "llmbox ") {
		t.Errorf("version says %q", out)
	}
	// bash's completion of it can be read, and offers commands.
	if out := run(t, "chroot", root, "/usr/bin/llmbox", "__complete", "pre"); !strings.Contains(out, "preflight") {
		t.Errorf("completion offers %q", out)
	}
	run(t, "chroot", root, "/bin/bash", "-n", "/usr/share/bash-completion/completions/llmbox")
	for _, name := range []string{zsh, "/usr/share/fish/vendor_completions.d/llmbox.fish", "/usr/share/doc/llmbox/copyright", "/usr/share/doc/llmbox/THIRD-PARTY-LICENCES.txt"} {
		if info, err := os.Stat(filepath.Join(root, name)); err != nil || info.Size() == 0 || info.Mode().Perm() != 0o644 {
			t.Errorf("%s: %v", name, err)
		}
	}
	pages, err := filepath.Glob(filepath.Join(root, "usr/share/man/man1/llmbox*.1.gz"))
	if err != nil || len(pages) < 20 {
		t.Errorf("%d pages of the manual (%v)", len(pages), err)
	}
	for _, name := range []string{"llmbox.1.gz", "llmbox-install.1.gz", "llmbox-doctor.1.gz"} {
		page := run(t, "gzip", "-dc", filepath.Join(root, "usr/share/man/man1", name))
		if !strings.Contains(page, ".SH SYNOPSIS") || !strings.Contains(page, ".TH") {
			t.Errorf("%s is no page of a manual", name)
		}
	}
}

// dpkg puts the package into a Debian that has seen nothing of it, and takes it away
// without a trace.
func TestDeb(t *testing.T) {
	dir := folder(t)
	need(t, "chroot", "gzip")
	root := overlay(t)
	before := sorted(tree(t, root))
	deb := packageOf(t, dir, "*_amd64.deb")
	if err := os.Link(deb, filepath.Join(root, "tmp/package.deb")); err != nil {
		data := read(t, deb)
		if err := os.WriteFile(filepath.Join(root, "tmp/package.deb"), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	run(t, "chroot", root, "dpkg", "--install", "/tmp/package.deb")
	installed(t, dir, root, "/usr/share/zsh/vendor-completions/_llmbox")
	if out := run(t, "chroot", root, "dpkg", "--verify", "llmbox"); out != "" {
		t.Errorf("dpkg finds changed files: %s", out)
	}
	// Upgraded to itself, it stays.
	run(t, "chroot", root, "dpkg", "--install", "/tmp/package.deb")
	// Where a box is, it says what removing the package does not do, and does it.
	if err := os.MkdirAll(filepath.Join(root, "var/lib/llmbox"), 0o755); err != nil {
		t.Fatal(err)
	}
	if out := run(t, "chroot", root, "sh", "-c", "dpkg --purge llmbox 2>&1"); !strings.Contains(out, "llmbox uninstall") {
		t.Errorf("it doesn't say that the box stays: %s", out)
	}
	if err := os.Remove(filepath.Join(root, "var/lib/llmbox")); err != nil {
		t.Fatal(err)
	}
	compare(t, before, sorted(tree(t, root)))
	if out := run(t, "chroot", root, "sh", "-c", "dpkg-query --show llmbox 2>&1 || true"); !strings.Contains(out, "no packages found") {
		t.Errorf("dpkg still knows it: %s", out)
	}
}

// rpm does the same from outside, with a database in that root.
func TestRPM(t *testing.T) {
	dir := folder(t)
	need(t, "rpm", "chroot", "gzip")
	root := overlay(t)
	before := sorted(tree(t, root))
	rpm := packageOf(t, dir, "*.x86_64.rpm")
	if out := run(t, "rpm", "--dbpath", t.TempDir(), "--checksig", "--nosignature", rpm); !strings.Contains(out, "digests OK") {
		t.Errorf("rpm says %q", out)
	}
	run(t, "rpm", "--root", root, "--dbpath", "/var/lib/rpm", "--install", "--nodeps", "--nosignature", rpm)
	installed(t, dir, root, "/usr/share/zsh/site-functions/_llmbox")
	if out := run(t, "rpm", "--root", root, "--dbpath", "/var/lib/rpm", "--verify", "--nodeps", "llmbox"); out != "" {
		t.Errorf("rpm finds changed files: %s", out)
	}
	run(t, "rpm", "--root", root, "--dbpath", "/var/lib/rpm", "--erase", "llmbox")
	compare(t, before, sorted(tree(t, root)))
}

// What the packages are for stands in them.
func TestPackagesSayWhatTheyAre(t *testing.T) {
	dir := folder(t)
	need(t, "dpkg-deb")
	version := strings.TrimPrefix(filepath.Base(dir), "v")
	base, candidate, isCandidate := strings.Cut(version, "-")
	want := base
	if isCandidate {
		// Sorted before the release itself.
		want += "~" + candidate
	}
	for arch, name := range map[string]string{"amd64": "x86_64", "arm64": "aarch64"} {
		deb := packageOf(t, dir, "*_"+arch+".deb")
		if out := strings.TrimSpace(run(t, "dpkg-deb", "--field", deb, "Package", "Version", "Architecture")); out != fmt.Sprintf("Package: llmbox\nVersion: %s\nArchitecture: %s", want, arch) {
			t.Errorf("%s says\n%s", filepath.Base(deb), out)
		}
		packageOf(t, dir, "*."+name+".rpm")
	}
}

// The release's own script, out of the folder, in a Debian that has seen nothing: the
// signature is checked where openssl is there.
func TestInstallScriptInCleanRoot(t *testing.T) {
	dir := folder(t)
	need(t, "chroot")
	root := overlay(t)
	before := sorted(tree(t, root))
	media := filepath.Join(root, "tmp/package")
	if err := os.Mkdir(media, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"install.sh", "SHA256SUMS", "SHA256SUMS.sig", "llmbox-linux-amd64"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil && name == "SHA256SUMS.sig" {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(media, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	install := "INSTALL_LLMBOX_ARTIFACT_DIR=/tmp/package sh /tmp/package/install.sh --download-only 2>&1"
	out := run(t, "chroot", root, "sh", "-c", install)
	if sumOf(t, filepath.Join(root, "usr/local/bin/llmbox")) != sumOf(t, binary(dir, "amd64")) {
		t.Errorf("what was installed is not the release's\n%s", out)
	}
	if again := run(t, "chroot", root, "sh", "-c", install); !strings.Contains(again, "is this release already") {
		t.Errorf("run again it says %s", again)
	}
	for _, name := range []string{"/usr/local/bin/llmbox", "/usr/local/share/bash-completion/completions/llmbox", "/usr/local/share/bash-completion/completions", "/usr/local/share/bash-completion"} {
		if err := os.Remove(filepath.Join(root, name)); err != nil {
			t.Error(err)
		}
	}
	compare(t, before, sorted(tree(t, root)))
}
