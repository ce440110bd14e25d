package snapshot

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"sort"
	"strconv"
	"strings"
	"unicode"

	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// Why a snapshot is refused. Each comes wrapped with the name of the entry.
var (
	ErrUnsafeName   = errors.New("unsafe name")
	ErrNotPlain     = errors.New("neither a regular file nor a directory")
	ErrDuplicate    = errors.New("appears twice")
	ErrTooMany      = errors.New("too many entries")
	ErrFileTooLarge = errors.New("larger than the limit of one file")
	ErrTooLarge     = errors.New("larger than the limit of a snapshot")
	ErrVersion      = errors.New("not a snapshot of a version known here")
	ErrMalformed    = errors.New("malformed")
)

// Where things stand in a snapshot.
const (
	manifestName = "manifest.yaml"
	gpuName      = "gpu.json"
	filesName    = "probes/files.json"
	hostDir      = "host/"
	commandDir   = "commands/"
	probeDir     = "probes/"
)

// limits bound what a snapshot from somebody else may cost. A collected one has
// under 2000 entries and a few MiB.
type limits struct {
	entries int
	// file and total are bytes after decompression.
	file, total int64
}

func defaultLimits() limits {
	return limits{entries: 20_000, file: 16 << 20, total: 128 << 20}
}

// Load reads a snapshot from a directory or a gzipped tar archive. A name outside
// the layout is skipped, an entry that could do harm is refused.
func Load(name string) (*Snapshot, error) {
	return load(name, defaultLimits())
}

func load(name string, l limits) (*Snapshot, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, fmt.Errorf("opening snapshot: %w", err)
	}
	var s *Snapshot
	if info.IsDir() {
		s, err = loadDirectory(name, l)
	} else {
		var file *os.File
		// #nosec G304 -- the path is the one a person asked for.
		if file, err = os.Open(name); err != nil {
			return nil, fmt.Errorf("opening snapshot: %w", err)
		}
		defer func() { _ = file.Close() }()
		s, err = loadArchive(file, l)
	}
	if err != nil {
		return nil, fmt.Errorf("reading snapshot %s: %w", name, err)
	}
	return s, nil
}

// loadDirectory goes through os.Root, so that even a tree that changes meanwhile
// can't lead outside.
func loadDirectory(name string, l limits) (*Snapshot, error) {
	root, err := os.OpenRoot(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }()
	b := newBuilder(l)
	err = fs.WalkDir(root.FS(), ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == "." {
			return err
		}
		switch {
		case d.IsDir():
			return b.directory(p)
		case !d.Type().IsRegular():
			return fmt.Errorf("%s: %w", p, ErrNotPlain)
		}
		file, err := root.Open(p)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }()
		return b.file(p, file)
	})
	if err != nil {
		return nil, err
	}
	return b.finish()
}

func loadArchive(r io.Reader, l limits) (*Snapshot, error) {
	unzipped, err := gzip.NewReader(bufio.NewReader(r))
	if err != nil {
		return nil, fmt.Errorf("unpacking: %w", err)
	}
	// Headers and padding count as well: an archive of nothing but headers is a
	// bomb too.
	bounded := &boundedReader{r: unzipped, left: l.total + int64(l.entries)*2048 + 10240}
	archive := tar.NewReader(bounded)
	b := newBuilder(l)
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("unpacking: %w", err)
		}
		name := strings.TrimPrefix(header.Name, "./")
		switch header.Typeflag {
		case tar.TypeDir:
			name = strings.TrimSuffix(name, "/")
			if name == "" || name == "." {
				continue
			}
			err = b.directory(name)
		case tar.TypeReg:
			if header.Size > l.file {
				return nil, fmt.Errorf("%s: %d bytes: %w", printable(name), header.Size, ErrFileTooLarge)
			}
			err = b.file(name, archive)
		case tar.TypeXGlobalHeader:
			continue
		default:
			err = fmt.Errorf("%s: %w", printable(name), ErrNotPlain)
		}
		if err != nil {
			return nil, err
		}
	}
	return b.finish()
}

// boundedReader turns a stream that never ends into an error.
type boundedReader struct {
	r    io.Reader
	left int64
}

func (b *boundedReader) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, ErrTooLarge
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.r.Read(p)
	b.left -= int64(n)
	return n, err
}

// builder gathers the members of a snapshot, whatever they come from.
type builder struct {
	limits limits
	files  map[string][]byte
	dirs   map[string]bool
	total  int64
}

func newBuilder(l limits) *builder {
	return &builder{limits: l, files: map[string][]byte{}, dirs: map[string]bool{}}
}

func (b *builder) admit(name string) error {
	if err := safeName(name); err != nil {
		return err
	}
	if _, twice := b.files[name]; twice || b.dirs[name] {
		return fmt.Errorf("%s: %w", name, ErrDuplicate)
	}
	if len(b.files)+len(b.dirs) >= b.limits.entries {
		return fmt.Errorf("%s: more than %d: %w", name, b.limits.entries, ErrTooMany)
	}
	return nil
}

func (b *builder) directory(name string) error {
	if err := b.admit(name); err != nil {
		return err
	}
	b.dirs[name] = true
	return nil
}

func (b *builder) file(name string, r io.Reader) error {
	if err := b.admit(name); err != nil {
		return err
	}
	data, err := io.ReadAll(io.LimitReader(r, b.limits.file+1))
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if int64(len(data)) > b.limits.file {
		return fmt.Errorf("%s: more than %d bytes: %w", name, b.limits.file, ErrFileTooLarge)
	}
	if b.total += int64(len(data)); b.total > b.limits.total {
		return fmt.Errorf("%s: more than %d bytes with it: %w", name, b.limits.total, ErrTooLarge)
	}
	b.files[name] = data
	return nil
}

// safeName accepts a slash-separated relative path without "." and "..", and
// without anything that could break a line of output.
func safeName(name string) error {
	if !fs.ValidPath(name) || name == "." {
		return fmt.Errorf("%s: %w", printable(name), ErrUnsafeName)
	}
	if strings.ContainsFunc(name, unicode.IsControl) {
		return fmt.Errorf("%s: %w", printable(name), ErrUnsafeName)
	}
	return nil
}

// printable shows a name that is not trusted.
func printable(name string) string {
	const most = 200
	if len(name) > most {
		name = name[:most] + "..."
	}
	return strconv.Quote(name)
}

func (b *builder) finish() (*Snapshot, error) {
	raw, ok := b.files[manifestName]
	if !ok {
		return nil, fmt.Errorf("%s: %w", manifestName, fs.ErrNotExist)
	}
	for name := range b.files {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			if _, isFile := b.files[dir]; isFile {
				return nil, fmt.Errorf("%s is a file and a directory: %w", dir, ErrDuplicate)
			}
		}
	}
	manifest, err := parseManifest(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", manifestName, err)
	}
	s := New()
	s.Manifest = manifest
	raw, listed := b.files[filesName]
	if listed {
		entries, err := parseEntries(raw)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filesName, err)
		}
		for _, e := range entries {
			s.AddEntry(e)
		}
	}
	for _, name := range sortedKeys(b.files) {
		err := s.member(name, b.files[name])
		var spoilt *spoiltError
		switch {
		case errors.As(err, &spoilt):
			// One answer that was cut off or edited must not hide all the others.
			s.MarkUnreadable(spoilt.place, err.Error())
		case err != nil:
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	s.readPasted()
	// A snapshot made by hand says by its tree alone what is there.
	for name := range b.dirs {
		if listed {
			break
		}
		if p, ok := strings.CutPrefix(name, hostDir); ok {
			if _, known := s.entries["/"+p]; !known {
				s.AddEntry(Entry{Path: p, Kind: Directory, Mode: 0o755})
			}
		}
	}
	return s, nil
}

// spoiltError says that what stands at a place can't be understood.
type spoiltError struct {
	place string
	err   error
}

func (e *spoiltError) Error() string { return e.err.Error() }
func (e *spoiltError) Unwrap() error { return e.err }

func (s *Snapshot) member(name string, data []byte) error {
	if p, ok := strings.CutPrefix(name, hostDir); ok {
		if e, known := s.entries["/"+p]; known && (e.Kind == Directory || e.Kind == Device) {
			return fmt.Errorf("has content but is a %s by %s: %w", e.Kind, filesName, ErrMalformed)
		}
		s.AddFile(p, string(data))
		return nil
	}
	if p, ok := strings.CutPrefix(name, commandDir); ok {
		command, ok := strings.CutSuffix(p, ".txt")
		if !ok || command == "" || strings.Contains(command, "/") {
			return nil
		}
		exit, output, err := parseCommand(string(data))
		if err != nil {
			return &spoiltError{commandDir + command, err}
		}
		s.AddCommand(command, output, exit)
		return nil
	}
	if p, ok := strings.CutPrefix(name, probeDir); ok && name != filesName {
		probe, ok := strings.CutSuffix(p, ".json")
		if !ok || probe == "" || strings.Contains(probe, "/") {
			return nil
		}
		var compact bytes.Buffer
		if err := json.Compact(&compact, data); err != nil {
			return &spoiltError{probeDir + probe, fmt.Errorf("%w: %w", ErrMalformed, err)}
		}
		s.AddProbe(probe, compact.Bytes())
		return nil
	}
	if p, ok := strings.CutPrefix(name, clusterDir); ok {
		kind, ok := strings.CutSuffix(p, ".json")
		if !ok || kind == "" || strings.Contains(kind, "/") {
			return nil
		}
		if !json.Valid(data) {
			return &spoiltError{clusterDir + resourceName(kind), fmt.Errorf("no JSON: %w", ErrMalformed)}
		}
		s.AddCluster(kind, data)
		return nil
	}
	if log, ok := parseLogName(name); ok {
		s.AddLog(log, string(data))
		return nil
	}
	if name != gpuName {
		return nil
	}
	var report gpu.Report
	if err := json.Unmarshal(data, &report); err != nil {
		return &spoiltError{gpuName, fmt.Errorf("%w: %w", ErrMalformed, err)}
	}
	if report.Schema == 0 {
		return &spoiltError{gpuName, fmt.Errorf("no report: %w", ErrMalformed)}
	}
	if report.Schema != gpu.ReportSchema {
		return fmt.Errorf("schema %d, known is %d: %w", report.Schema, gpu.ReportSchema, ErrVersion)
	}
	s.GPU = &report
	return nil
}

func parseManifest(raw []byte) (Manifest, error) {
	const most = 1 << 20
	if len(raw) > most {
		return Manifest{}, fmt.Errorf("more than %d bytes: %w", most, ErrFileTooLarge)
	}
	var m Manifest
	if err := yaml.Unmarshal(raw, &m); err != nil {
		return Manifest{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if m.APIVersion != APIVersion || m.Kind != Kind {
		return Manifest{}, fmt.Errorf("apiVersion %s, kind %s: %w",
			printable(m.APIVersion), printable(m.Kind), ErrVersion)
	}
	if m.Unreadable == nil {
		m.Unreadable = map[string]string{}
	}
	for place := range m.Unreadable {
		if err := safeName(place); err != nil {
			return Manifest{}, fmt.Errorf("unreadable: %w", err)
		}
	}
	return m, nil
}

// parseEntries reads the list of what is known about paths beside their content.
func parseEntries(raw []byte) ([]Entry, error) {
	var entries []Entry
	if err := json.Unmarshal(raw, &entries); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	seen := make(map[string]bool, len(entries))
	for _, e := range entries {
		if e.Path != "/" {
			rest, ok := strings.CutPrefix(e.Path, "/")
			if !ok {
				return nil, fmt.Errorf("%s is not absolute: %w", printable(e.Path), ErrUnsafeName)
			}
			if safeName(rest) != nil {
				return nil, fmt.Errorf("%s: %w", printable(e.Path), ErrUnsafeName)
			}
		}
		if e.Target != "" && (path.Clean(e.Target) != e.Target || !path.IsAbs(e.Target) ||
			strings.ContainsFunc(e.Target, unicode.IsControl)) {
			return nil, fmt.Errorf("target of %s: %w", printable(e.Path), ErrUnsafeName)
		}
		if seen[e.Path] {
			return nil, fmt.Errorf("%s: %w", printable(e.Path), ErrDuplicate)
		}
		seen[e.Path] = true
		switch e.Kind {
		case RegularFile, Directory, Symlink, Device, Other:
		default:
			return nil, fmt.Errorf("%s: kind %s: %w", printable(e.Path), printable(string(e.Kind)), ErrMalformed)
		}
	}
	return entries, nil
}

// parseCommand splits the "exit=N" line off the output of a command.
func parseCommand(data string) (exit int, output string, err error) {
	first, output, _ := strings.Cut(data, "\n")
	number, ok := strings.CutPrefix(strings.TrimRight(first, "\r"), "exit=")
	if !ok {
		return 0, "", fmt.Errorf("the first line is not exit=N: %w", ErrMalformed)
	}
	if exit, err = strconv.Atoi(number); err != nil {
		return 0, "", fmt.Errorf("exit=%s: %w", printable(number), ErrMalformed)
	}
	return exit, output, nil
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}
