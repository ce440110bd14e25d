package k3s

import (
	"bufio"
	"bytes"
	"context"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/llmbox-dev/llmbox/internal/host"
)

const (
	// DefaultReleases is where k3s publishes its releases.
	DefaultReleases = "https://github.com/k3s-io/k3s/releases/download"
	// binaryName is what k3s is called once installed.
	binaryName = "k3s"
	binaryMode = 0o755
	// versionDeadline bounds `k3s --version`: the first start of 80 MB from a cold disk.
	versionDeadline = 30 * time.Second
	versionPause    = 50 * time.Millisecond
	// sumsLimit bounds in bytes the published list of checksums, which has a dozen lines.
	sumsLimit = 64 << 10
)

// Source says where a binary came from.
type Source string

// The sources, in the order in which they are tried.
const (
	// FromFile is one that the user named.
	FromFile Source = "file"
	// FromBundle is one of an offline bundle.
	FromBundle Source = "bundle"
	// FromCache is one that was downloaded before.
	FromCache Source = "cache"
	// FromDownload is the asset of the release.
	FromDownload Source = "download"
	// FromBefore is one that was there before llmbox.
	FromBefore Source = "adopted"
)

// Fetch is one file to be had from the network.
type Fetch struct {
	URL string
	// Path is where it goes, in terms of this process and not of the machine's root.
	Path string
	// SHA256 is what it must be, in lower-case hexadecimal digits.
	SHA256   string
	Progress func(done, total int64)
}

// Fetcher gets files. It resumes, obeys proxies and certificate authorities, and
// never leaves a file at Path that is not the whole one.
type Fetcher interface {
	// Fetch puts a file in place.
	Fetch(ctx context.Context, f Fetch) error
	// Text returns a small document of at most limit bytes.
	Text(ctx context.Context, url string, limit int64) ([]byte, error)
}

// WantBinary says which k3s is wanted and where it may come from.
type WantBinary struct {
	// Version is a release such as "v1.36.4+k3s1".
	Version string
	// Arch is GOARCH's word for the machine.
	Arch string
	// Pinned is the digest of the release's asset for that architecture, where one is
	// known; it takes the place of the published one.
	Pinned string
	// File is a binary of the user's, in terms of this process; it wins over all else
	// and says its own version.
	File string
	// Exact refuses a File of another version than Version.
	Exact bool
	// BundleDir is the directory of an offline bundle that holds the asset and the
	// release's list of checksums.
	BundleDir string
	// Offline forbids the download.
	Offline bool
	// Releases is the base of the URLs; DefaultReleases where empty.
	Releases string
	// Fetcher does the download.
	Fetcher Fetcher
}

// asset names the files of a release for an architecture.
func asset(arch string) (binary, sums string, err error) {
	switch arch {
	case "amd64":
		return "k3s", "sha256sum-amd64.txt", nil
	case "arm64":
		return "k3s-arm64", "sha256sum-arm64.txt", nil
	}
	return "", "", &Problem{What: "k3s has no release for " + arch, Out: "Use a machine with an x86_64 or aarch64 processor", Err: ErrNoSource}
}

// assetURL is the address of a file of a release.
func assetURL(base, version, name string) string {
	if base == "" {
		base = DefaultReleases
	}
	// A plus in a path may be read as a space.
	return strings.TrimSuffix(base, "/") + "/" + strings.ReplaceAll(url.PathEscape(version), "+", "%2B") + "/" + name
}

// publishedSum finds the checksum of a file in a release's list.
func publishedSum(list []byte, name string) (string, error) {
	found := ""
	lines := bufio.NewScanner(bytes.NewReader(list))
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		const both = 2
		if len(fields) != both || strings.TrimPrefix(fields[1], "*") != name {
			continue
		}
		sum := strings.ToLower(fields[0])
		if raw, err := hex.DecodeString(sum); err != nil || len(raw) != 32 {
			return "", fmt.Errorf("reading the checksum of %s: %q is none: %w", name, fields[0], ErrNoChecksum)
		}
		if found != "" && found != sum {
			return "", fmt.Errorf("reading the checksum of %s: the list has two: %w", name, ErrNoChecksum)
		}
		found = sum
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("reading the checksum of %s: %w", name, err)
	}
	if found == "" {
		return "", fmt.Errorf("reading the checksum of %s: it is not in the list: %w", name, ErrNoChecksum)
	}
	return found, nil
}

// candidate is a binary that can be installed.
type candidate struct {
	source Source
	// at is where it lies, in terms of this process.
	at string
	// sum is what it must be; empty where the user answers for it.
	sum string
}

// EnsureBinary has the wanted k3s in place and says whether it had to be put there.
// A binary that llmbox did not put there is not touched. The record is written
// before the binary is, so that being cut off leaves nothing that nobody owns.
func (m *Machine) EnsureBinary(ctx context.Context, r *Record, want WantBinary, report Report) (changed bool, err error) {
	if r.Adopted {
		return false, nil
	}
	at, sum, err := m.installed(ctx, r)
	if err != nil {
		return false, err
	}
	if sum != "" && !r.owns(at, sum) {
		return false, &Problem{
			What: at + " is there and llmbox did not put it there",
			Out:  "Install into that k3s: sudo llmbox install --adopt. Or, if nobody needs it: sudo rm " + at,
			Err:  ErrForeign,
		}
	}
	if done, err := m.alreadyThere(ctx, r, want, at, sum); done || err != nil {
		return false, err
	}
	found, err := m.choose(ctx, want, report)
	if err != nil {
		return false, err
	}
	return true, m.installBinary(ctx, r, want, found, report)
}

// installed returns the k3s on this machine that llmbox would replace.
func (m *Machine) installed(ctx context.Context, r *Record) (at, sum string, err error) {
	for _, dir := range m.binDirs(r) {
		name := path.Join(dir, binaryName)
		if !m.exists(ctx, name) {
			continue
		}
		sum, err := m.hashOf(ctx, name)
		if err != nil {
			return "", "", err
		}
		if sum == "" {
			// A dangling link: whatever it is, it is not ours.
			sum = "none"
		}
		return name, sum, nil
	}
	return "", "", nil
}

// binDirs are the directories for the binary, the one that was taken before first.
func (m *Machine) binDirs(r *Record) []string {
	dirs := slices.Clone(m.options.BinDirs)
	for _, b := range []*Binary{&r.Binary, r.Pending} {
		if b != nil && b.Path != "" {
			dir := path.Dir(b.Path)
			dirs = append([]string{dir}, slices.DeleteFunc(dirs, func(d string) bool { return d == dir })...)
		}
	}
	return dirs
}

// alreadyThere says whether the binary in place is the wanted one. A rename that was
// cut off before the record could say so is made good.
func (m *Machine) alreadyThere(ctx context.Context, r *Record, want WantBinary, at, sum string) (bool, error) {
	if sum == "" {
		return false, nil
	}
	is := r.Binary
	if r.Pending != nil && r.Pending.Path == at && r.Pending.SHA256 == sum {
		is = *r.Pending
	}
	if is.SHA256 != sum || is.Path != at {
		return false, nil
	}
	switch {
	case want.File != "":
		wanted, err := hashFile(want.File)
		if err != nil {
			return false, fmt.Errorf("reading %s: %w", want.File, err)
		}
		if wanted != sum {
			return false, nil
		}
	case is.Version != want.Version:
		return false, nil
	case want.Pinned != "" && is.Source != FromFile && !strings.EqualFold(want.Pinned, sum):
		return false, nil
	}
	if r.Pending != nil || r.Binary != is {
		r.Binary, r.Pending = is, nil
		return true, m.save(ctx, r)
	}
	return true, nil
}

// choose finds a binary, in the order of the sources.
func (m *Machine) choose(ctx context.Context, want WantBinary, report Report) (candidate, error) {
	if want.File != "" {
		return candidate{source: FromFile, at: want.File}, nil
	}
	name, sums, err := asset(want.Arch)
	if err != nil {
		return candidate{}, err
	}
	if want.BundleDir != "" {
		c, err := bundled(want, name, sums)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return c, err
		}
		report.say(PhaseBinary, "the bundle has no k3s")
	}
	return m.cachedOrDownloaded(ctx, want, name, sums, report)
}

func bundled(want WantBinary, name, sums string) (candidate, error) {
	at := filepath.Join(want.BundleDir, name)
	if _, err := os.Stat(at); err != nil {
		return candidate{}, fmt.Errorf("looking into the bundle: %w", err)
	}
	expected := strings.ToLower(want.Pinned)
	if expected == "" {
		list, err := os.ReadFile(filepath.Join(want.BundleDir, sums)) // #nosec G304 -- the bundle that the user named
		if err != nil {
			return candidate{}, &Problem{
				What: "the bundle holds " + name + " and not " + sums + ": nothing says whether it is whole",
				Out:  "Make the bundle anew on a connected machine: llmbox bundle create", Err: ErrNoChecksum,
			}
		}
		if expected, err = publishedSum(list, name); err != nil {
			return candidate{}, err
		}
	}
	return candidate{source: FromBundle, at: at, sum: expected}, nil
}

func (m *Machine) cachedOrDownloaded(ctx context.Context, want WantBinary, name, sums string, report Report) (candidate, error) {
	dir := path.Join(m.cacheDir(), want.Version)
	cached, list := path.Join(dir, name), path.Join(dir, sums)
	expected := strings.ToLower(want.Pinned)
	if expected == "" {
		if data, present, err := m.read(ctx, list); err == nil && present {
			// A damaged list is as good as none.
			expected, _ = publishedSum(data, name)
		}
	}
	if expected != "" {
		sum, err := m.hashOf(ctx, cached)
		if err != nil {
			return candidate{}, err
		}
		if sum == expected {
			return candidate{source: FromCache, at: m.at(cached), sum: expected}, nil
		}
	}
	if want.Offline || want.Fetcher == nil {
		return candidate{}, &Problem{
			What: "k3s " + want.Version + " is neither in a bundle nor in " + m.cacheDir() + ", and nothing may be downloaded",
			Out:  "Name a binary (--k3s-binary FILE) or a bundle (--bundle DIR)", Err: ErrNoSource,
		}
	}
	if want.Pinned == "" {
		// The list is fetched anew, for the one in the cache led to nothing.
		data, err := want.Fetcher.Text(ctx, assetURL(want.Releases, want.Version, sums), sumsLimit)
		if err != nil {
			return candidate{}, fmt.Errorf("fetching the checksums of k3s %s: %w", want.Version, err)
		}
		if expected, err = publishedSum(data, name); err != nil {
			return candidate{}, err
		}
		const mode = 0o644
		if err := m.write(ctx, list, mode, data); err != nil {
			return candidate{}, err
		}
	}
	return m.download(ctx, want, name, cached, expected, report)
}

func (m *Machine) download(ctx context.Context, want WantBinary, name, cached, expected string, report Report) (candidate, error) {
	if err := makeDirs(filepath.Dir(m.at(cached))); err != nil {
		return candidate{}, fmt.Errorf("making the cache: %w", err)
	}
	report.say(PhaseBinary, "downloading k3s "+want.Version)
	err := want.Fetcher.Fetch(ctx, Fetch{
		URL: assetURL(want.Releases, want.Version, name), Path: m.at(cached), SHA256: expected,
		Progress: func(done, total int64) {
			if report != nil {
				report(Progress{Phase: PhaseBinary, Message: "downloading k3s " + want.Version, Done: done, Total: total, Unit: "bytes"})
			}
		},
	})
	if err != nil {
		return candidate{}, fmt.Errorf("downloading k3s %s: %w", want.Version, err)
	}
	// The fetcher has looked; whoever runs it as root looks again.
	sum, err := m.hashOf(ctx, cached)
	if err != nil {
		return candidate{}, err
	}
	if sum != expected {
		return candidate{}, errors.Join(mismatch("the download of k3s "+want.Version, sum, expected), m.remove(ctx, cached))
	}
	return candidate{source: FromDownload, at: m.at(cached), sum: expected}, nil
}

func mismatch(what, is, expected string) error {
	return &Problem{
		What: fmt.Sprintf("%s has the checksum %s, published is %s", what, is, expected),
		Out:  "Run the command again. If it stays so, something between here and the release changes files: name a binary that you trust with --k3s-binary FILE",
		Err:  ErrChecksum,
	}
}

// installBinary copies a binary into the first directory that takes it. What stands
// under the final name has been read back, hashed and asked for its version.
func (m *Machine) installBinary(ctx context.Context, r *Record, want WantBinary, from candidate, report Report) error {
	if err := checkArchitecture(from.at, want.Arch); err != nil {
		return err
	}
	var refused error
	for _, dir := range m.binDirs(r) {
		err := m.installInto(ctx, r, want, from, dir, report)
		if err == nil {
			return nil
		}
		if !notHere(err) {
			return err
		}
		refused = errors.Join(refused, err)
	}
	return &Problem{
		What: "no directory takes the k3s binary: " + strings.ReplaceAll(refused.Error(), "\n", "; "),
		Out:  "Make " + m.options.BinDirs[0] + " writable: sudo mount -o remount,rw,exec " + m.options.BinDirs[0], Err: refused,
	}
}

// notHere says whether another directory may do where this one doesn't: it is
// read-only, or nothing may be run from it.
func notHere(err error) bool {
	return errors.Is(err, syscall.EROFS) || errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.ENOTDIR)
}

func (m *Machine) installInto(ctx context.Context, r *Record, want WantBinary, from candidate, dir string, report Report) error {
	name := path.Join(dir, binaryName)
	report.say(PhaseBinary, "installing "+name)
	fill := func(w io.Writer) error {
		source, err := os.Open(from.at)
		if err != nil {
			return err
		}
		defer func() { _ = source.Close() }()
		_, err = io.Copy(w, source)
		return err
	}
	next := Binary{Path: name, Source: from.source}
	check := func(temporary string) error {
		sum, err := hashFile(temporary)
		if err != nil {
			return err
		}
		if from.sum != "" && sum != from.sum {
			return mismatch(from.at, sum, from.sum)
		}
		version, err := m.askVersion(ctx, temporary)
		if err != nil {
			return err
		}
		if err := m.accept(r, want, from, version); err != nil {
			return err
		}
		next.SHA256, next.Version = sum, version.String()
		r.Pending = &next
		return m.save(ctx, r)
	}
	if _, err := m.place(ctx, name, binaryMode, hashDeadline+versionDeadline, fill, check); err != nil {
		return err
	}
	r.Binary, r.Pending = next, nil
	if err := m.save(ctx, r); err != nil {
		return err
	}
	if m.exists(ctx, "/sys/fs/selinux/enforce") {
		// Where the policy of k3s is installed it names the label; elsewhere there is none
		// to give, and preflight has said so.
		_, _ = m.command(ctx, versionDeadline, "restorecon", name)
	}
	return nil
}

// askVersion runs a binary for its version.
func (m *Machine) askVersion(ctx context.Context, at string) (Version, error) {
	ask := func() (host.Result, error) {
		return m.run.Run(ctx, host.Command{
			Program: filepath.Base(at), Directories: []string{filepath.Dir(at)}, Args: []string{"--version"}, Deadline: versionDeadline,
		})
	}
	result, err := ask()
	for tries := 0; errors.Is(err, syscall.ETXTBSY) && tries < 20; tries++ {
		// Another program that was just being started still holds the file open
		// (golang/go#22315).
		time.Sleep(versionPause)
		result, err = ask()
	}
	if err != nil {
		return Version{}, fmt.Errorf("asking k3s for its version: %w", err)
	}
	if result.Exit != 0 {
		return Version{}, fmt.Errorf("asking k3s for its version: status %d, %q: %w", result.Exit, lastLine(string(result.Output)), ErrNotK3s)
	}
	return parseSpoken(result.Output)
}

// accept says whether a binary of that version may be put in place.
func (m *Machine) accept(r *Record, want WantBinary, from candidate, version Version) error {
	if want.Version != "" && (from.source != FromFile || want.Exact) {
		wanted, err := ParseVersion(want.Version)
		if err != nil {
			return err
		}
		if version.Compare(wanted) != 0 {
			return &Problem{
				What: fmt.Sprintf("%s says that it is k3s %s, wanted is %s", from.at, version, wanted),
				Out:  "Name a binary of that version, or leave the version away", Err: ErrVersion,
			}
		}
	}
	_, err := UpgradeVerdict(r.Binary.Version, version.String())
	return err
}

// checkArchitecture refuses a program of another architecture with a better word
// than the kernel's. What is no ELF file is left to be tried.
func checkArchitecture(at, arch string) error {
	file, err := elf.Open(at)
	if err != nil {
		var format *elf.FormatError
		if errors.As(err, &format) || errors.Is(err, io.EOF) {
			return nil
		}
		return fmt.Errorf("reading %s: %w", at, err)
	}
	defer func() { _ = file.Close() }()
	machines := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	if is, known := machines[arch]; known && file.Machine != is {
		return &Problem{
			What: fmt.Sprintf("%s is a program for %s, this machine is %s", at, file.Machine, arch),
			Out:  "Name the binary of the release for " + arch, Err: ErrNotK3s,
		}
	}
	return nil
}
