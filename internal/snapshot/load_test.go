package snapshot

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestLoadHandmade(t *testing.T) {
	s, err := Load("testdata/handmade")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]Text{
		"/sys/module/nvidia/version": {State: Present, Data: "550.90.07\n"},
		"/proc/swaps":                {State: Present},
		"/proc/modules":              {State: Absent},
		"/etc/docker/daemon.json":    {State: Unreadable, Why: "permission denied"},
	} {
		want.Place = "host" + name
		if got := s.File(name); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	for name, want := range map[string]State{
		"/dev/nvidia0": Present, "/dev/nvidia1": Absent, "/dev": Present, "/etc/cdi": Present, "/etc/cni": Absent,
		// Its content may not be read, but it is there.
		"/etc/docker/daemon.json": Present,
	} {
		if _, got := s.Stat(name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	if e, _ := s.Stat("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"); e.Target != "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.107.02" {
		t.Errorf("%+v", e)
	}
	for name, want := range map[string]Text{
		CommandModinfo: {State: Present, Exit: 1},
		CommandDmesg:   {State: Absent, Exit: -1},
		CommandNft:     {State: Unreadable, Exit: -1, Why: "permission denied: only root is told"},
	} {
		want.Place = "commands/" + name + ".txt"
		if got := s.Command(name); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	var listeners []Listener
	if state, why := s.Probe(ProbeListeners, &listeners); state != Present || listeners[0].Process != "kubelite" {
		t.Errorf("listeners %s %s: %+v", state, why, listeners)
	}
	if state, why := s.Probe(ProbeDNS, nil); state != Unreadable || why != "no answer within 8s" {
		t.Errorf("dns %s %s", state, why)
	}
	if state, _ := s.Probe(ProbeHTTPS, nil); state != Absent {
		t.Errorf("https %s", state)
	}
	if s.GPU != nil {
		t.Error("a report of GPUs out of nothing")
	}
}

func TestUnits(t *testing.T) {
	s, err := Load("testdata/handmade")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]State{
		"docker": Present, "docker.service": Present, "nvidia-fabricmanager": Absent, "apt-daily-upgrade.timer": Present, "k3s": Absent,
	} {
		if got, state := s.Unit(name); state != want {
			t.Errorf("%s is %s, want %s: %+v", name, state, want, got)
		}
	}
	docker, _ := s.Unit("docker")
	if want := (Unit{
		Name: "docker.service", Load: "loaded", Active: "active", Sub: "running", File: "enabled",
		Since: "Mon 2026-03-02 10:31:05 UTC", Restarts: "0",
	}); docker != want {
		t.Errorf("%+v, want %+v", docker, want)
	}
	s = New()
	s.AddCommand(CommandUnits, "Failed to connect to bus: Host is down\n", 1)
	if _, state := s.Unit("docker"); state != Unreadable {
		t.Errorf("without an answer of systemd a unit is %s", state)
	}
}

func TestPackages(t *testing.T) {
	s, err := Load("testdata/handmade")
	if err != nil {
		t.Fatal(err)
	}
	s.AddCommand(CommandRPM, "nvidia-container-toolkit\tx86_64\t0:1.17.8-1\n", 0)
	got, state := s.Packages()
	want := []Package{
		{Name: "libnvidia-compute-550-server", Arch: "amd64", Version: "550.107.02-0ubuntu1", Installed: true},
		{Name: "nvidia-utils-550-server", Arch: "amd64", Version: "550.107.02-0ubuntu1", Held: true, Installed: true},
		{Name: "nvidia-dkms-550-server", Arch: "amd64", Version: "550.107.02-0ubuntu1"},
		{Name: "nvidia-container-toolkit", Arch: "x86_64", Version: "1.17.8-1", Installed: true},
	}
	if state != Present || !slices.Equal(got, want) {
		t.Errorf("%s %+v", state, got)
	}
	if _, state := New().Packages(); state != Absent {
		t.Errorf("without a package manager: %s", state)
	}
}

const goodManifest = "apiVersion: llmbox.dev/v1alpha1\nkind: Snapshot\n"

// entry is one header of an archive, made as no honest program would.
type entry struct {
	name, content, link string
	kind                byte
	// size is what the header claims where that isn't the content's.
	size int64
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var out bytes.Buffer
	zipped := gzip.NewWriter(&out)
	writer := tar.NewWriter(zipped)
	for _, e := range entries {
		header := &tar.Header{Name: e.name, Typeflag: e.kind, Linkname: e.link, Mode: 0o644, Size: int64(len(e.content))}
		if e.kind == 0 {
			header.Typeflag = tar.TypeReg
		}
		if e.size != 0 {
			header.Size = e.size
		}
		if err := writer.WriteHeader(header); err != nil {
			t.Fatal(err)
		}
		if _, err := writer.Write([]byte(e.content)); err != nil {
			t.Fatal(err)
		}
	}
	// An archive whose last member is shorter than it claims has no proper end.
	if err := writer.Close(); err != nil && !strings.Contains(err.Error(), "missed writing") {
		t.Fatal(err)
	}
	if err := zipped.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func testLimits() limits { return limits{entries: 50, file: 4096, total: 16 << 10} }

func TestLoadRefuses(t *testing.T) {
	manifest := entry{name: "manifest.yaml", content: goodManifest}
	many := []entry{manifest}
	for i := range 60 {
		many = append(many, entry{name: fmt.Sprintf("host/f%d", i)})
	}
	var heavy []entry
	for i := range 6 {
		heavy = append(heavy, entry{name: fmt.Sprintf("host/h%d", i), content: strings.Repeat("x", 4000)})
	}
	for name, test := range map[string]struct {
		entries []entry
		want    error
		names   string
	}{
		"parent":              {[]entry{manifest, {name: "host/../../etc/passwd", content: "x"}}, ErrUnsafeName, "host/../../etc/passwd"},
		"parent first":        {[]entry{{name: "../manifest.yaml", content: goodManifest}}, ErrUnsafeName, "../manifest.yaml"},
		"absolute":            {[]entry{manifest, {name: "/etc/passwd", content: "x"}}, ErrUnsafeName, "/etc/passwd"},
		"dot inside":          {[]entry{manifest, {name: "host/./etc/passwd", content: "x"}}, ErrUnsafeName, "host/./etc"},
		"double slash":        {[]entry{manifest, {name: "host//etc/passwd", content: "x"}}, ErrUnsafeName, "host//etc"},
		"newline":             {[]entry{manifest, {name: "host/a\nb", content: "x"}}, ErrUnsafeName, `host/a\nb`},
		"escape":              {[]entry{manifest, {name: "host/a\x1b[31m", content: "x"}}, ErrUnsafeName, `\x1b`},
		"not UTF-8":           {[]entry{manifest, {name: "host/a\xff", content: "x"}}, ErrUnsafeName, `\xff`},
		"symbolic link":       {[]entry{manifest, {name: "host/a", kind: tar.TypeSymlink, link: "/etc/shadow"}}, ErrNotPlain, "host/a"},
		"hard link":           {[]entry{manifest, {name: "host/a", kind: tar.TypeLink, link: "manifest.yaml"}}, ErrNotPlain, "host/a"},
		"device":              {[]entry{manifest, {name: "host/dev/sda", kind: tar.TypeBlock}}, ErrNotPlain, "host/dev/sda"},
		"FIFO":                {[]entry{manifest, {name: "host/f", kind: tar.TypeFifo}}, ErrNotPlain, "host/f"},
		"twice":               {[]entry{manifest, {name: "host/a", content: "x"}, {name: "./host/a", content: "y"}}, ErrDuplicate, "host/a"},
		"two manifests":       {[]entry{manifest, manifest}, ErrDuplicate, "manifest.yaml"},
		"file and directory":  {[]entry{manifest, {name: "host/a", content: "x"}, {name: "host/a/b", content: "y"}}, ErrDuplicate, "host/a"},
		"too many":            {many, ErrTooMany, "host/f"},
		"large file":          {[]entry{manifest, {name: "host/big", content: strings.Repeat("x", 5000)}}, ErrFileTooLarge, "host/big"},
		"claims to be large":  {[]entry{manifest, {name: "host/big", content: "x", size: 1 << 50}}, ErrFileTooLarge, "host/big"},
		"large in all":        {append([]entry{manifest}, heavy...), ErrTooLarge, "host/h"},
		"no manifest":         {[]entry{{name: "host/a", content: "x"}}, fs.ErrNotExist, "manifest.yaml"},
		"unknown version":     {[]entry{{name: "manifest.yaml", content: "apiVersion: llmbox.dev/v2\nkind: Snapshot\n"}}, ErrVersion, "llmbox.dev/v2"},
		"another kind":        {[]entry{{name: "manifest.yaml", content: "apiVersion: llmbox.dev/v1alpha1\nkind: Box\n"}}, ErrVersion, "Box"},
		"manifest no YAML":    {[]entry{{name: "manifest.yaml", content: "a: [\n"}}, ErrMalformed, "manifest.yaml"},
		"unreadable outside":  {[]entry{{name: "manifest.yaml", content: goodManifest + "unreadable: {host/../x: no}\n"}}, ErrUnsafeName, "host/../x"},
		"gpu of tomorrow":     {[]entry{manifest, {name: "gpu.json", content: `{"schema":99}`}}, ErrVersion, "gpu.json"},
		"entry outside":       {[]entry{manifest, {name: "probes/files.json", content: `[{"path":"/a/../b","kind":"file"}]`}}, ErrUnsafeName, "/a/../b"},
		"entry relative":      {[]entry{manifest, {name: "probes/files.json", content: `[{"path":"a","kind":"file"}]`}}, ErrUnsafeName, "files.json"},
		"entry NUL":           {[]entry{manifest, {name: "probes/files.json", content: `[{"path":"/a\u0000","kind":"file"}]`}}, ErrUnsafeName, "files.json"},
		"entry twice":         {[]entry{manifest, {name: "probes/files.json", content: `[{"path":"/a","kind":"file"},{"path":"/a","kind":"dir"}]`}}, ErrDuplicate, "/a"},
		"entry of no kind":    {[]entry{manifest, {name: "probes/files.json", content: `[{"path":"/a","kind":"door"}]`}}, ErrMalformed, "door"},
		"target newline":      {[]entry{manifest, {name: "probes/files.json", content: `[{"path":"/a","kind":"symlink","target":"/b\n"}]`}}, ErrUnsafeName, "/a"},
		"content of a device": {[]entry{manifest, {name: "probes/files.json", content: `[{"path":"/a","kind":"device"}]`}, {name: "host/a", content: "x"}}, ErrMalformed, "host/a"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := loadArchive(bytes.NewReader(archive(t, test.entries...)), testLimits())
			if !errors.Is(err, test.want) {
				t.Fatalf("ended with %v, want %v", err, test.want)
			}
			if !strings.Contains(err.Error(), test.names) {
				t.Errorf("%q does not name %q", err, test.names)
			}
		})
	}
}

// One answer that was cut off must not hide the others: it can't be read, and why is told.
func TestLoadSpoilt(t *testing.T) {
	for name, test := range map[string]struct {
		entry entry
		place string
	}{
		"command without end": {entry{name: "commands/dmesg.txt", content: "hello\n"}, "commands/dmesg"},
		"command bad status":  {entry{name: "commands/dmesg.txt", content: "exit=no\n"}, "commands/dmesg"},
		"command empty":       {entry{name: "commands/dmesg.txt"}, "commands/dmesg"},
		"probe no JSON":       {entry{name: "probes/dns.json", content: "{"}, "probes/dns"},
		"probe empty":         {entry{name: "probes/dns.json"}, "probes/dns"},
		"gpu no JSON":         {entry{name: "gpu.json", content: "[]"}, "gpu.json"},
		"gpu null":            {entry{name: "gpu.json", content: "null"}, "gpu.json"},
		"gpu empty":           {entry{name: "gpu.json"}, "gpu.json"},
		"gpu negative memory": {entry{name: "gpu.json", content: `{"schema":1,"devices":[{"memory":{"total_bytes":-1}}]}`}, "gpu.json"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := loadArchive(bytes.NewReader(archive(t, entry{name: "manifest.yaml", content: goodManifest}, test.entry,
				entry{name: "host/etc/hosts", content: "x"}, entry{name: "commands/mokutil-sb-state.txt", content: "exit=1\r\nEFI variables are not supported\r\n"})), testLimits())
			if err != nil {
				t.Fatal(err)
			}
			if why := s.Manifest.Unreadable[test.place]; why == "" || s.GPU != nil {
				t.Errorf("%s is told as %q, the GPUs as %+v", test.place, why, s.GPU)
			}
			if s.File("/etc/hosts").State != Present || s.Command(CommandMokutil).Exit != 1 {
				t.Error("the others are lost")
			}
		})
	}
}

// A small archive that unpacks to a great deal must cost no more than the limits.
func TestLoadRefusesBomb(t *testing.T) {
	var bomb bytes.Buffer
	zipped := gzip.NewWriter(&bomb)
	writer := tar.NewWriter(zipped)
	const size = 256 << 20
	if err := writer.WriteHeader(&tar.Header{Name: "manifest.yaml", Typeflag: tar.TypeReg, Size: size}); err != nil {
		t.Fatal(err)
	}
	block := make([]byte, 1<<20)
	for range size / len(block) {
		if _, err := writer.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(writer.Close(), zipped.Close()); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes unpack to %d", bomb.Len(), size)
	at := filepath.Join(t.TempDir(), "bomb.tar.gz")
	if err := os.WriteFile(at, bomb.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(at); !errors.Is(err, ErrFileTooLarge) {
		t.Errorf("ended with %v", err)
	}
	// One that hides behind members that are skipped counts as well.
	var headers []entry
	for i := range 30 {
		headers = append(headers, entry{name: fmt.Sprintf("elsewhere/%d", i), content: strings.Repeat("x", 4000)})
	}
	if _, err := loadArchive(bytes.NewReader(archive(t, headers...)), testLimits()); !errors.Is(err, ErrTooLarge) {
		t.Errorf("ended with %v", err)
	}
	// Zeros without end after a proper header.
	endless := archive(t, entry{name: "manifest.yaml", content: goodManifest})
	var tailed bytes.Buffer
	tailed.Write(endless)
	more := gzip.NewWriter(&tailed)
	for range 64 {
		if _, err := more.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	if err := more.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := loadArchive(&tailed, testLimits()); err != nil && !errors.Is(err, ErrTooLarge) {
		t.Errorf("ended with %v", err)
	}
}

func TestLoadDirectoryRefuses(t *testing.T) {
	for name, spoil := range map[string]func(dir string) error{
		"symbolic link":      func(dir string) error { return os.Symlink("/etc/passwd", filepath.Join(dir, "host/etc/x")) },
		"link to manifest":   func(dir string) error { return os.Symlink("manifest.yaml", filepath.Join(dir, "gpu.json")) },
		"linked directory":   func(dir string) error { return os.Symlink("/etc", filepath.Join(dir, "host/all")) },
		"name with newline":  func(dir string) error { return os.WriteFile(filepath.Join(dir, "host/etc/a\nb"), nil, 0o600) },
		"name with \\x01":    func(dir string) error { return os.WriteFile(filepath.Join(dir, "host/etc/a\x01b"), nil, 0o600) },
		"larger than a file": func(dir string) error { return os.WriteFile(filepath.Join(dir, "host/etc/b"), make5000(), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.MkdirAll(filepath.Join(dir, "host/etc"), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "manifest.yaml"), []byte(goodManifest), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := load(dir, testLimits()); err != nil {
				t.Fatal(err)
			}
			if err := spoil(dir); err != nil {
				t.Fatal(err)
			}
			_, err := load(dir, testLimits())
			if !errors.Is(err, ErrNotPlain) && !errors.Is(err, ErrUnsafeName) && !errors.Is(err, ErrFileTooLarge) {
				t.Errorf("ended with %v", err)
			}
		})
	}
}

func make5000() []byte { return bytes.Repeat([]byte("x"), 5000) }

// What tar makes of a directory is read as well.
func TestLoadArchiveWithDirectories(t *testing.T) {
	s, err := loadArchive(bytes.NewReader(archive(t,
		entry{name: "./", kind: tar.TypeDir}, entry{name: "./manifest.yaml", content: goodManifest},
		entry{name: "./host/", kind: tar.TypeDir}, entry{name: "./host/etc/", kind: tar.TypeDir}, entry{name: "./host/etc/cdi/", kind: tar.TypeDir},
		entry{name: "./host/etc/hosts", content: "x"}, entry{name: "./README", content: "skipped"},
	)), testLimits())
	if err != nil {
		t.Fatal(err)
	}
	if e, state := s.Stat("/etc/cdi"); state != Present || e.Kind != Directory {
		t.Errorf("/etc/cdi is %s %+v", state, e)
	}
	if got := s.File("/etc/hosts"); got.Data != "x" {
		t.Errorf("%+v", got)
	}
}
