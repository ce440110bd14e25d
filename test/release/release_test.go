package release

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	endian "encoding/binary"
	"encoding/hex"
	"encoding/json"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// What a release may weigh.
const (
	maxBinary = 90_000_000
	maxDeb    = 45_000_000
)

// folder is the version's folder of the release; without one there is nothing to look at.
func folder(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("LLMBOX_RELEASE")
	if dir == "" {
		t.Skip("LLMBOX_RELEASE names no release: make release-test makes one")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func arches() []string { return []string{"amd64", "arm64"} }

func binary(dir, arch string) string { return filepath.Join(dir, "llmbox-linux-"+arch) }

// run runs a program that has to succeed and returns what it printed.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	// No setting of this machine's user counts.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8", "HOME=/nonexistent", "GOCACHE=" + t.TempDir(), "GOTOOLCHAIN=local"}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, out, stderr.String())
	}
	return string(out)
}

func need(t *testing.T, programs ...string) {
	t.Helper()
	for _, program := range programs {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is not on this machine", program)
		}
	}
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// SHA256SUMS has every file of the folder, and each as it is.
func TestSums(t *testing.T) {
	dir := folder(t)
	listed := map[string]string{}
	for line := range strings.Lines(string(read(t, filepath.Join(dir, "SHA256SUMS")))) {
		sum, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		if !ok || listed[name] != "" {
			t.Errorf("what is %q?", line)
		}
		listed[name] = sum
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		name := entry.Name()
		if name == "SHA256SUMS" || name == "SHA256SUMS.sig" {
			continue
		}
		if got := sumOf(t, filepath.Join(dir, name)); got != listed[name] {
			t.Errorf("%s has %s, SHA256SUMS says %q", name, got, listed[name])
		}
		delete(listed, name)
	}
	if len(listed) > 0 {
		t.Errorf("listed and not there: %v", slices.Collect(maps.Keys(listed)))
	}
	for _, want := range []string{"llmbox-linux-amd64", "llmbox-linux-arm64", "install.sh", "brev.sh", "cloud-init.yaml", "THIRD-PARTY-LICENCES.txt", "llmbox-images.cdx.json"} {
		if !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == want }) {
			t.Errorf("the release has no %s", want)
		}
	}
}

func sumOf(t *testing.T, name string) string {
	t.Helper()
	file, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	hash := sha256.New()
	if _, err := io.Copy(hash, file); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(hash.Sum(nil))
}

// Whoever has the public key can check the release with openssl alone.
func TestSignature(t *testing.T) {
	dir := folder(t)
	need(t, "openssl", "base64")
	key := filepath.Join(filepath.Dir(dir), "llmbox.pub")
	if _, err := os.Stat(key); err != nil {
		t.Skip("this release is not signed")
	}
	raw := filepath.Join(t.TempDir(), "signature")
	if err := os.WriteFile(raw, []byte(run(t, "base64", "-d", filepath.Join(dir, "SHA256SUMS.sig"))), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := run(t, "openssl", "dgst", "-sha256", "-verify", key, "-signature", raw, filepath.Join(dir, "SHA256SUMS")); !strings.Contains(out, "Verified OK") {
		t.Errorf("openssl says %q", out)
	}
}

func TestWeight(t *testing.T) {
	dir := folder(t)
	limits := map[string]int64{}
	for _, arch := range arches() {
		limits[binary(dir, arch)] = maxBinary
	}
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(debs) != len(arches()) {
		t.Fatalf("packages %v (%v), want one for each of %v", debs, err, arches())
	}
	for _, deb := range debs {
		limits[deb] = maxDeb
	}
	for file, limit := range limits {
		info, err := os.Stat(file)
		if err != nil {
			t.Error(err)
			continue
		}
		t.Logf("%s: %.1f MB of %.0f", filepath.Base(file), float64(info.Size())/1e6, float64(limit)/1e6)
		if info.Size() > limit {
			t.Errorf("%s is larger than %d bytes", filepath.Base(file), limit)
		}
	}
}

// A binary needs nothing of the machine it runs on, and says where it comes from and not
// where it was built.
func TestBinary(t *testing.T) {
	dir := folder(t)
	for arch, machine := range map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		t.Run(arch, func(t *testing.T) {
			file, err := elf.Open(binary(dir, arch))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = file.Close() }()
			if file.Machine != machine {
				t.Errorf("it is for %v", file.Machine)
			}
			if file.Section(".interp") != nil || file.Section(".dynamic") != nil {
				t.Error("it is linked dynamically")
			}
			if file.Section(".symtab") != nil || file.Section(".debug_info") != nil {
				t.Error("it is not stripped")
			}
			data := read(t, binary(dir, arch))
			here, err := filepath.Abs("../..")
			if err != nil {
				t.Fatal(err)
			}
			home, _ := os.UserHomeDir()
			for _, path := range []string{here + "/internal", strings.TrimSpace(run(t, "go", "env", "GOMODCACHE")) + "/", filepath.Join(home, "go", "pkg")} {
				if path != "" && bytes.Contains(data, []byte(path)) {
					t.Errorf("it names %s, a path of the machine it was built on", path)
				}
			}
			// The helper is an ELF file within, for the same machine.
			if n := bytes.Count(data, []byte("\x7fELF\x02\x01\x01")); n < 2 {
				t.Errorf("it has no NVML helper in it: %d ELF headers", n)
			}
		})
	}
}

var revision = regexp.MustCompile(`(?m)^\tbuild\tvcs\.revision=([0-9a-f]{40})$`)

func TestVersion(t *testing.T) {
	dir := folder(t)
	file := binary(dir, strings.TrimSpace(run(t, "go", "env", "GOHOSTARCH")))
	var doc struct{ Version, Commit, Date, K3s string }
	if err := json.Unmarshal([]byte(run(t, file, "version", "--json")), &doc); err != nil {
		t.Fatal(err)
	}
	if "v"+strings.TrimPrefix(doc.Version, "v") != filepath.Base(dir) {
		t.Errorf("version %s lies in %s", doc.Version, filepath.Base(dir))
	}
	built := revision.FindStringSubmatch(run(t, "go", "version", "-m", file))
	if built == nil || built[1] != doc.Commit {
		t.Errorf("commit %q, the linker noted %v", doc.Commit, built)
	}
	if _, err := time.Parse(time.RFC3339, doc.Date); err != nil || doc.K3s == "" {
		t.Errorf("date %q (%v), k3s %q", doc.Date, err, doc.K3s)
	}
}

// modules are what `go version -m` prints of a binary.
func modules(t *testing.T, file string) []string {
	t.Helper()
	var out []string
	lines := strings.Split(run(t, "go", "version", "-m", file), "\n")
	for i, line := range lines {
		words := strings.Split(strings.TrimPrefix(line, "\t"), "\t")
		if words[0] != "dep" || len(words) < 3 {
			continue
		}
		if i+1 < len(lines) && strings.HasPrefix(lines[i+1], "\t=>\t") {
			words = strings.Split(lines[i+1], "\t")[1:]
		}
		out = append(out, words[1]+"@"+words[2])
	}
	return out
}

// helper takes the program that is embedded in a binary out of it.
func helper(t *testing.T, dir, arch string) string {
	t.Helper()
	const magic = "\x7fELF\x02\x01\x01"
	little, data := endian.LittleEndian, read(t, binary(dir, arch))
	for at := 1; ; at++ {
		next := bytes.Index(data[at:], []byte(magic))
		if next < 0 {
			break
		}
		at += next
		if _, err := elf.NewFile(bytes.NewReader(data[at:])); err != nil {
			continue
		}
		// The table of sections is what such a file ends with.
		header := data[at:]
		end := little.Uint64(header[0x28:]) + uint64(little.Uint16(header[0x3a:]))*uint64(little.Uint16(header[0x3c:]))
		if end > uint64(len(header)) {
			continue
		}
		file := filepath.Join(t.TempDir(), "helper")
		if err := os.WriteFile(file, header[:end], 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	t.Fatalf("%s has no program in it", filepath.Base(binary(dir, arch)))
	return ""
}

func TestBillListsEveryModule(t *testing.T) {
	dir := folder(t)
	licences := string(read(t, filepath.Join(dir, "THIRD-PARTY-LICENCES.txt")))
	for _, arch := range arches() {
		t.Run(arch, func(t *testing.T) {
			var bill struct {
				Metadata struct {
					Component struct{ Hashes []struct{ Content string } }
				}
				Components []struct {
					Name, Version string
					Licenses      []json.RawMessage
				}
			}
			if err := json.Unmarshal(read(t, binary(dir, arch)+".cdx.json"), &bill); err != nil {
				t.Fatal(err)
			}
			if sum := sumOf(t, binary(dir, arch)); len(bill.Metadata.Component.Hashes) != 1 || bill.Metadata.Component.Hashes[0].Content != sum {
				t.Errorf("the bill is of %v, the binary is %s", bill.Metadata.Component.Hashes, sum)
			}
			listed := map[string]bool{}
			for _, one := range bill.Components {
				if len(one.Licenses) == 0 {
					t.Errorf("%s has no licence", one.Name)
				}
				listed[one.Name+"@"+one.Version] = true
			}
			want := modules(t, binary(dir, arch))
			if len(want) < 50 {
				t.Fatalf("go version -m lists %d modules only", len(want))
			}
			within := modules(t, helper(t, dir, arch))
			if len(within) == 0 {
				t.Error("the helper lists no module")
			}
			for _, module := range slices.Concat(want, within) {
				if !listed[module] {
					t.Errorf("the bill lacks %s", module)
				}
				path, version, _ := strings.Cut(module, "@")
				if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(path) + ` +` + regexp.QuoteMeta(version) + ` +\S`).MatchString(licences) {
					t.Errorf("the licence report lacks %s", module)
				}
			}
			t.Logf("%d modules linked, %d in the helper, %d components listed", len(want), len(within), len(bill.Components))
		})
	}
}

func TestImagesBill(t *testing.T) {
	dir := folder(t)
	var listed struct{ Images []struct{ Reference string } }
	host := binary(dir, strings.TrimSpace(run(t, "go", "env", "GOHOSTARCH")))
	box := filepath.Join(t.TempDir(), "box.yaml")
	if err := os.WriteFile(box, []byte("apiVersion: llmbox.dev/v1alpha1\nkind: Box\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(run(t, host, "images", "--gpu", "h100", "--config", box, "--output", "json")), &listed); err != nil {
		t.Fatal(err)
	}
	bill := string(read(t, filepath.Join(dir, "llmbox-images.cdx.json")))
	for _, image := range listed.Images {
		if !strings.Contains(bill, `"bom-ref": "`+image.Reference+`"`) {
			t.Errorf("the bill lacks %s", image.Reference)
		}
	}
	if len(listed.Images) < 20 {
		t.Errorf("%d images only", len(listed.Images))
	}
}

// The same questions, asked of both architectures, have the same answers; a GPU machine
// with an ARM processor is no place to find out.
func TestArm64(t *testing.T) {
	dir := folder(t)
	need(t, "qemu-aarch64-static")
	if host := strings.TrimSpace(run(t, "go", "env", "GOHOSTARCH")); host != "amd64" {
		t.Skip("emulated on amd64 only")
	}
	if out := run(t, "qemu-aarch64-static", binary(dir, "arm64"), "version"); !strings.Contains(out, "linux/arm64") {
		t.Errorf("version says %q", out)
	}
	snapshot, err := filepath.Abs("../../internal/preflight/testdata/cases/ok-a10-ubuntu-2404")
	if err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"plan":      {"plan", "--gpu", "h100", "--output", "json"},
		"models":    {"models", "--gpu", "l4", "--all"},
		"preflight": {"preflight", "--snapshot", snapshot, "--output", "json"},
	} {
		t.Run(name, func(t *testing.T) {
			want := run(t, binary(dir, "amd64"), args...)
			got := run(t, "qemu-aarch64-static", append([]string{binary(dir, "arm64")}, args...)...)
			if got != want || len(got) < 1000 {
				t.Errorf("arm64 says\n%s\namd64 says\n%s", head(got), head(want))
			}
		})
	}
}

func head(text string) string {
	var out strings.Builder
	scanner := bufio.NewScanner(strings.NewReader(text))
	for i := 0; i < 20 && scanner.Scan(); i++ {
		out.WriteString(scanner.Text() + "\n")
	}
	return out.String()
}
