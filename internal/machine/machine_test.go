package machine

import (
	"archive/tar"
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/host"
	"github.com/llmbox-dev/llmbox/internal/k3s"
)

func testBox(t *testing.T) config.Box {
	t.Helper()
	box, _, err := config.Resolve(config.Defaults())
	must(t, err)
	return box
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// rooted is a machine in a directory, with a file as llmbox's binary.
func rooted(t *testing.T) *Host {
	t.Helper()
	self := filepath.Join(t.TempDir(), "llmbox")
	must(t, os.WriteFile(self, []byte("a binary"), 0o700))
	return New(Options{Root: t.TempDir(), Version: "1.2.3", Executable: self})
}

func TestChoicesOutliveARun(t *testing.T) {
	h := rooted(t)
	if has, err := h.Choices(t.Context()); err != nil || has != nil {
		t.Fatalf("a fresh machine has the choices %q, %v", has, err)
	}
	for _, want := range []string{"a: 1\n", "a: 2\n", "a: 2\n"} {
		must(t, h.Choose(t.Context(), []byte(want)))
		has, err := h.Choices(t.Context())
		if err != nil || string(has) != want {
			t.Errorf("the choices are %q, %v, want %q", has, err, want)
		}
	}
	info, err := os.Stat(h.at("/var/lib/llmbox/choices.yaml"))
	must(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Errorf("they have mode %v", info.Mode())
	}
}

func TestOneRunAtATime(t *testing.T) {
	h := rooted(t)
	if h.Locked() {
		t.Error("a machine that nobody took is taken")
	}
	release, err := h.Lock("install", "/var/log/llmbox/run.ndjson")
	must(t, err)
	if !h.Locked() {
		t.Error("it is not taken")
	}
	_, err = h.Lock("uninstall", "")
	var locked *LockedError
	if !errors.Is(err, ErrLocked) || !errors.As(err, &locked) || locked.Holder.PID != os.Getpid() || locked.Holder.Command != "install" || locked.Holder.Log == "" {
		t.Fatalf("the second run gets %v (%+v)", err, locked)
	}
	if !strings.Contains(err.Error(), "llmbox install") {
		t.Errorf("%q does not name the run at work", err)
	}
	release()
	again, err := h.Lock("uninstall", "")
	must(t, err)
	again()
}

// A process that dies gives the lock back, in whatever way it dies.
func TestLockOfADeadRun(t *testing.T) {
	if root := os.Getenv("LLMBOX_TEST_LOCK"); root != "" {
		if _, err := New(Options{Root: root}).Lock("install", ""); err != nil {
			fmt.Println(err)
		}
		fmt.Println("held")
		_, _ = io.ReadAll(os.Stdin)
		return
	}
	h := rooted(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestLockOfADeadRun$") // #nosec G204 -- this test itself
	cmd.Env = append(os.Environ(), "LLMBOX_TEST_LOCK="+h.o.Root)
	stdin, err := cmd.StdinPipe()
	must(t, err)
	defer func() { _ = stdin.Close() }()
	stdout, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	line := make([]byte, 5)
	if _, err := io.ReadFull(stdout, line); err != nil || string(line) != "held\n" {
		t.Fatalf("the other process says %q, %v", line, err)
	}
	if _, err := h.Lock("install", ""); !errors.Is(err, ErrLocked) {
		t.Fatalf("while it lives: %v", err)
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	release, err := h.Lock("install", "")
	must(t, err)
	release()
}

func TestProgramStays(t *testing.T) {
	for _, tt := range []struct{ executable, want string }{
		{"/usr/local/bin/llmbox", "/usr/local/bin/llmbox"},
		{"/usr/bin/llmbox", "/usr/bin/llmbox"},
		{"/opt/llmbox/llmbox", "/opt/llmbox/llmbox"},
		{"/root/llmbox", "/data/bin/llmbox"},
		{"/tmp/x/llmbox", "/data/bin/llmbox"},
		{"/usr/local/binary/llmbox", "/data/bin/llmbox"},
	} {
		if got := New(Options{Executable: tt.executable}).Program("/data"); got != tt.want {
			t.Errorf("%s stays as %s, want %s", tt.executable, got, tt.want)
		}
	}
	h := rooted(t)
	for i, content := range []string{"a binary", "a binary", "a newer binary"} {
		must(t, os.WriteFile(h.o.Executable, []byte(content), 0o700)) // #nosec G306 -- a program
		program, changed, err := h.ensureProgram("/var/lib/llmbox")
		must(t, err)
		if want := i != 1; changed != want {
			t.Errorf("call %d: changed is %t", i, changed)
		}
		data, err := os.ReadFile(h.at(program))
		if err != nil || string(data) != content {
			t.Errorf("call %d: %s holds %q, %v", i, program, data, err)
		}
		info, err := os.Stat(h.at(program))
		must(t, err)
		if info.Mode().Perm() != 0o755 {
			t.Errorf("it has mode %v", info.Mode())
		}
	}
}

// unpack puts an archive into a directory.
func unpack(t *testing.T, archive io.Reader) string {
	t.Helper()
	dir := t.TempDir()
	in := tar.NewReader(archive)
	for {
		header, err := in.Next()
		if errors.Is(err, io.EOF) {
			return dir
		}
		must(t, err)
		at := filepath.Join(dir, filepath.Clean("/"+header.Name)) // #nosec G305 -- kept within by Clean
		must(t, os.MkdirAll(filepath.Dir(at), 0o700))
		data, err := io.ReadAll(in)
		must(t, err)
		must(t, os.WriteFile(at, data, 0o600))
	}
}

func TestOwnImage(t *testing.T) {
	h := rooted(t)
	const reference = "example.com/llmbox:1.2.3"
	image, err := newOwnImage(h.o.Executable, reference)
	must(t, err)
	var archive, again bytes.Buffer
	must(t, image.write(&archive))
	same, err := newOwnImage(h.o.Executable, reference)
	must(t, err)
	must(t, same.write(&again))
	if !bytes.Equal(archive.Bytes(), again.Bytes()) {
		t.Error("the same binary gives two archives")
	}
	index, err := layout.ImageIndexFromPath(unpack(t, &archive))
	must(t, err)
	manifest, err := index.IndexManifest()
	must(t, err)
	if len(manifest.Manifests) != 1 || manifest.Manifests[0].Annotations["io.containerd.image.name"] != reference || manifest.Manifests[0].Digest.String() != image.digest() {
		t.Errorf("the index is %+v", manifest)
	}
	one, err := index.Image(manifest.Manifests[0].Digest)
	must(t, err)
	layers, err := one.Layers()
	must(t, err)
	if len(layers) != 1 {
		t.Fatalf("there are %d layers", len(layers))
	}
	content, err := layers[0].Compressed() // as it lies there, which is not compressed
	must(t, err)
	raw, err := io.ReadAll(content)
	must(t, err)
	digest, err := layers[0].Digest()
	must(t, err)
	settings, err := one.ConfigFile()
	must(t, err)
	if got := digestOf(raw); got != digest || !slices.Equal(settings.RootFS.DiffIDs, []v1.Hash{digest}) {
		t.Errorf("the layer is %s, named %s and %v", got, digest, settings.RootFS.DiffIDs)
	}
	in := tar.NewReader(bytes.NewReader(raw))
	header, err := in.Next()
	must(t, err)
	data, err := io.ReadAll(in)
	if err != nil || header.Name != "llmbox" || header.Mode != 0o755 || string(data) != "a binary" {
		t.Errorf("the image holds %s, mode %o, with %q", header.Name, header.Mode, data)
	}
}

func TestArchiveIsWrittenWhenItDiffers(t *testing.T) {
	h := rooted(t)
	ensure := func(want bool) {
		t.Helper()
		image, err := newOwnImage(h.o.Executable, "example.com/llmbox:1")
		must(t, err)
		changed, err := h.ensureArchive(t.Context(), image, "/k3s/agent/images/llmbox.tar")
		if err != nil || changed != want {
			t.Errorf("changed is %t, %v, want %t", changed, err, want)
		}
	}
	ensure(true)
	ensure(false)
	must(t, os.WriteFile(h.o.Executable, []byte("another"), 0o700)) // #nosec G306 -- a program
	ensure(true)
	archive := h.at("/k3s/agent/images/llmbox.tar")
	must(t, os.WriteFile(archive, []byte("garbage"), 0o600))
	ensure(true)
	must(t, os.Truncate(archive, 100))
	ensure(true)
	ensure(false)
}

// elfFile is a program of one header and one part.
func elfFile(t *testing.T, part elf.ProgType) string {
	t.Helper()
	var raw bytes.Buffer
	head := elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
	}
	must(t, binary.Write(&raw, binary.LittleEndian, head))
	must(t, binary.Write(&raw, binary.LittleEndian, elf.Prog64{Type: uint32(part)}))
	name := filepath.Join(t.TempDir(), "llmbox")
	must(t, os.WriteFile(name, raw.Bytes(), 0o600))
	return name
}

func TestStatic(t *testing.T) {
	text := filepath.Join(t.TempDir(), "llmbox")
	must(t, os.WriteFile(text, []byte("a binary"), 0o600))
	for _, c := range []struct {
		name, program string
		want          error
	}{
		{"static", elfFile(t, elf.PT_LOAD), nil},
		{"dynamic", elfFile(t, elf.PT_INTERP), ErrNotStatic},
		{"no program", text, nil},
		{"not there", text + "x", os.ErrNotExist},
	} {
		if err := static(c.program); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// Nothing is written before.
	h := rooted(t)
	h.o.Executable = elfFile(t, elf.PT_INTERP)
	if _, err := h.Up(t.Context(), Want{Image: "example.com/llmbox:1"}, nil); !errors.Is(err, ErrNotStatic) {
		t.Errorf("%v", err)
	}
}

// ctr answers as `k3s ctr` does.
type ctr struct {
	listed  string
	failing string
	asked   []string
}

func (c *ctr) Run(_ context.Context, cmd host.Command) (host.Result, error) {
	if cmd.Program != "k3s" {
		return host.Result{}, host.ErrNotInstalled
	}
	c.asked = append(c.asked, strings.Join(cmd.Args[4:], " "))
	if cmd.Args[4] == c.failing {
		return host.Result{Exit: 1, Output: []byte("ctr: one\nctr: the last line\n")}, nil
	}
	return host.Result{Output: []byte(c.listed)}, nil
}

func TestImportWhenContainerdHasAnother(t *testing.T) {
	image, err := newOwnImage(rooted(t).o.Executable, "example.com/llmbox:1")
	must(t, err)
	for _, tt := range []struct {
		name    string
		ctr     ctr
		changed bool
		fails   string
	}{
		{"it is there", ctr{listed: "REF TYPE DIGEST\nexample.com/llmbox:1 x " + image.digest() + " 1\n"}, false, ""},
		{"it is not", ctr{listed: "REF TYPE DIGEST\n"}, true, ""},
		{"another of the same name", ctr{listed: "REF TYPE DIGEST\nexample.com/llmbox:1 x sha256:00 1\n"}, true, ""},
		{"containerd does not answer", ctr{failing: "list"}, false, "the last line"},
		{"it can't be imported", ctr{failing: "import"}, false, "importing llmbox's image"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := New(Options{Root: t.TempDir(), Runner: &tt.ctr})
			changed, err := h.importImage(t.Context(), image, "/usr/local/bin/k3s", "/k3s/llmbox.tar")
			if tt.fails != "" {
				if err == nil || !strings.Contains(err.Error(), tt.fails) {
					t.Errorf("the error is %v, want %q", err, tt.fails)
				}
				return
			}
			if err != nil || changed != tt.changed {
				t.Errorf("changed is %t, %v (asked %q)", changed, err, tt.ctr.asked)
			}
		})
	}
}

func TestStateGoesAndForeignFilesStay(t *testing.T) {
	for _, tt := range []struct {
		name  string
		o     RemoveOptions
		write []string
		stays []string
	}{
		{"everything of ours", RemoveOptions{}, []string{"/var/lib/llmbox/choices.yaml", "/var/lib/llmbox/lock", "/var/lib/llmbox/bin/llmbox", "/var/lib/llmbox/models/a/b", "/var/log/llmbox/k3s.log", "/var/log/llmbox/run-1.ndjson"}, nil},
		{"what the scripts left", RemoveOptions{}, []string{"/var/lib/llmbox/launch/hf-token", "/var/lib/llmbox/launch/ready", "/etc/systemd/system/llmbox-launch.service", "/etc/systemd/system/multi-user.target.wants/llmbox-launch.service", "/var/log/llmbox/launch.log", "/usr/local/share/bash-completion/completions/llmbox", "/usr/local/share/bash-completion/completions/other"}, []string{"/usr/local/share/bash-completion/completions/other"}},
		{"data is kept", RemoveOptions{KeepData: true}, []string{"/var/lib/llmbox/choices.yaml", "/var/lib/llmbox/models/a/b", "/var/lib/llmbox/bin/llmbox"}, []string{"/var/lib/llmbox/models/a/b"}},
		{"somebody's files", RemoveOptions{}, []string{"/var/lib/llmbox/lock", "/var/lib/llmbox/notes.txt", "/var/log/llmbox/mine.log"}, []string{"/var/lib/llmbox/notes.txt", "/var/log/llmbox/mine.log"}},
		{"what was mended is remembered", RemoveOptions{}, []string{"/var/lib/llmbox/lock", "/var/lib/llmbox/repairs.json"}, []string{"/var/lib/llmbox/repairs.json"}},
		{"nothing", RemoveOptions{}, nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := rooted(t)
			for _, name := range tt.write {
				must(t, os.MkdirAll(filepath.Dir(h.at(name)), 0o700))
				must(t, os.WriteFile(h.at(name), []byte("x"), 0o600))
			}
			tt.o.Box = testBox(t)
			for range 2 { // it can be repeated
				if _, err := h.RemoveState(t.Context(), tt.o); err != nil {
					t.Fatal(err)
				}
			}
			var left []string
			must(t, filepath.WalkDir(h.o.Root, func(at string, d fs.DirEntry, err error) error {
				if err == nil && !d.IsDir() {
					left = append(left, strings.TrimPrefix(at, h.o.Root))
				}
				return err
			}))
			if !slices.Equal(left, tt.stays) {
				t.Errorf("there stay %q, want %q", left, tt.stays)
			}
			if _, err := os.Stat(h.at("/var/lib/llmbox")); len(tt.stays) == 0 && !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the directory stays: %v", err)
			}
			traces, err := h.Traces(t.Context(), tt.o.Box)
			if err != nil || traces {
				t.Errorf("traces are %t, %v", traces, err)
			}
		})
	}
}

// TestUnitsThatSystemdStillHolds has an uninstall that was cut off between the files of the
// units and systemd's reading them anew.
func TestUnitsThatSystemdStillHolds(t *testing.T) {
	for name, tt := range map[string]struct {
		holds   map[string]string
		running bool
		reloads int
	}{
		"none":                     {nil, true, 0},
		"k3s, whose file is gone":  {map[string]string{"k3s.service": "/etc/systemd/system/k3s.service"}, true, 1},
		"the boot's and the agent": {map[string]string{"k3s-agent.service": "/etc/systemd/system/k3s-agent.service", bootUnit: bootUnitFile}, true, 1},
		"somebody's, which stays":  {map[string]string{"k3s.service": "/usr/lib/systemd/system/k3s.service"}, true, 0},
		"no systemd that runs":     {map[string]string{"k3s.service": "/etc/systemd/system/k3s.service"}, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			h := rooted(t)
			systemd := &unitsHeld{held: tt.holds}
			h.o.Runner = systemd
			for _, dir := range []string{"/usr/lib/systemd/system", "/run"} {
				must(t, os.MkdirAll(h.at(dir), 0o700))
			}
			must(t, os.WriteFile(h.at("/usr/lib/systemd/system/k3s.service"), nil, 0o600))
			if tt.running {
				must(t, os.MkdirAll(h.at("/run/systemd/system"), 0o700))
			}
			must(t, os.MkdirAll(h.at(StateDir), 0o700))
			must(t, os.WriteFile(h.at(StateDir+"/lock"), nil, 0o600))
			for range 2 {
				_, err := h.RemoveState(t.Context(), RemoveOptions{Box: testBox(t)})
				must(t, err)
			}
			if systemd.reloads != tt.reloads {
				t.Errorf("reloaded %d times, want %d", systemd.reloads, tt.reloads)
			}
		})
	}
}

// unitsHeld is a systemd that holds units by their files until it is reloaded.
type unitsHeld struct {
	held    map[string]string
	reloads int
}

func (u *unitsHeld) Run(_ context.Context, c host.Command) (host.Result, error) {
	if c.Args[0] == "daemon-reload" {
		u.reloads++
		u.held = nil
		return host.Result{}, nil
	}
	fragment, held := u.held[c.Args[1]]
	state := "not-found"
	if held {
		state = "loaded"
	}
	return host.Result{Output: []byte("LoadState=" + state + "\nFragmentPath=" + fragment + "\n")}, nil
}

func TestHolderIsReadable(t *testing.T) {
	h := rooted(t)
	release, err := h.Lock("install", "")
	must(t, err)
	defer release()
	raw, err := os.ReadFile(h.at("/var/lib/llmbox/lock"))
	must(t, err)
	var holder Holder
	if err := json.Unmarshal(raw, &holder); err != nil || holder.Since.IsZero() {
		t.Errorf("the lock says %q: %v", raw, err)
	}
}

func TestBootUnit(t *testing.T) {
	h := rooted(t)
	box := testBox(t)
	for i, want := range []bool{true, false} {
		changed, err := h.ensureBoot(k3s.Systemd, "/usr/local/bin/llmbox", box)
		if err != nil || changed != want {
			t.Errorf("call %d: changed is %t, %v", i, changed, err)
		}
	}
	unit, err := os.ReadFile(h.at("/etc/systemd/system/llmbox-boot.service"))
	must(t, err)
	if !strings.Contains(string(unit), `ExecStart="/usr/local/bin/llmbox" "host" "boot" "--data" "/var/lib/llmbox"`) {
		t.Errorf("the unit is\n%s", unit)
	}
	if to, err := os.Readlink(h.at("/etc/systemd/system/multi-user.target.wants/llmbox-boot.service")); err != nil || to != "/etc/systemd/system/llmbox-boot.service" {
		t.Errorf("it is enabled by a link to %q, %v", to, err)
	}
	h.o.Runner = &ctr{}
	gone, err := h.removeBoot(t.Context())
	if err != nil || len(gone) != 2 {
		t.Errorf("gone are %q, %v", gone, err)
	}
	if gone, err := h.removeBoot(t.Context()); err != nil || len(gone) != 0 {
		t.Errorf("the second time: %q, %v", gone, err)
	}
	if changed, err := h.ensureBoot(k3s.Supervised, "/x", box); err != nil || changed {
		t.Errorf("without systemd: %t, %v", changed, err)
	}
}
