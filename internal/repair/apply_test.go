package repair

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/armor"
	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/internal/host"
	"github.com/llmbox-dev/llmbox/internal/repair/record"
)

// planned are the actions for a case of plans.yaml.
func planned(t *testing.T, name string) []Action {
	t.Helper()
	c := caseNamed(t, name)
	c.Mended = nil
	facts := c.facts(t)
	found, networks := judged(t, facts)
	actions := Plan(found, facts.Snapshot, networks)
	if len(actions) == 0 {
		t.Fatalf("nothing is planned for %s", name)
	}
	return actions
}

func apply(t *testing.T, s *stage, actions []Action) []Outcome {
	t.Helper()
	out, err := Apply(t.Context(), NewMachine(s.options), actions, s.record(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func results(out []Outcome) []Result {
	var r []Result
	for _, o := range out {
		r = append(r, o.Result)
	}
	return r
}

func entryOf(t *testing.T, r *record.Record, name string) record.Repaired {
	t.Helper()
	for _, d := range r.Repairs {
		if d.Name == name {
			return d
		}
	}
	t.Fatalf("the record has no %s: %+v", name, r.Repairs)
	return record.Repaired{}
}

func TestApplySettings(t *testing.T) {
	t.Parallel()
	s := setUp(t, "settings")
	s.write("/proc/sys/fs/inotify/max_user_instances", "128\n")
	s.write("/proc/sys/fs/inotify/max_user_watches", "65536\n")
	actions := planned(t, "inotify")
	var events []Event
	out, err := Apply(t.Context(), NewMachine(s.options), actions, s.record(), nil, func(e Event) { events = append(events, e) })
	if err != nil || !slices.Equal(results(out), []Result{Mended}) {
		t.Fatalf("%+v, %v", out, err)
	}
	want := marker + "\nfs.inotify.max_user_instances = 8192\nfs.inotify.max_user_watches = 1048576\n"
	if got := s.read(SysctlFile); got != want {
		t.Errorf("wrote %q", got)
	}
	info, err := os.Stat(filepath.Join(s.root, SysctlFile))
	if err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("the file is %v, %v", info.Mode(), err)
	}
	if got := strings.TrimSpace(s.read("/proc/sys/fs/inotify/max_user_instances")); got != "8192" {
		t.Errorf("the kernel has %s", got)
	}
	if last := events[len(events)-1]; last.End == nil || last.End.Result != Mended || last.Index != 1 || last.Count != 1 {
		t.Errorf("the last event is %+v", last)
	}
	info, err = os.Stat(s.recordFile())
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the record is %v, %v", info.Mode(), err)
	}
	d := entryOf(t, s.record(), Inotify)
	if d.State != record.Done || d.Version != "v0.1.0" || len(d.Files) != 1 || d.Files[0].Before.State != record.BeforeAbsent || d.Files[0].SHA256 == "" {
		t.Errorf("recorded %+v", d)
	}
	if len(d.Settings) != 2 || d.Settings[0] != (record.Changed{Key: "fs.inotify.max_user_instances", Value: "8192", Before: "128"}) {
		t.Errorf("recorded settings %+v", d.Settings)
	}
	// Again: nothing to do, nothing asked for.
	calls := len(s.calls())
	before := s.read(record.DefaultFile)
	if out := apply(t, s, actions); out[0].Result != Already || len(s.calls()) != calls || s.read(record.DefaultFile) != before {
		t.Errorf("the second run did %+v, calls %v", out, s.calls()[calls:])
	}
	entries, err := os.ReadDir(filepath.Join(s.root, filepath.Dir(SysctlFile)))
	if err != nil || len(entries) != 1 {
		t.Errorf("something is left beside the file: %v, %v", entries, err)
	}
}

// A failing program ends its action; what does not need it goes on. Nothing that was
// said or is recorded has the proxy's password.
func TestApplyFailureStaysAlone(t *testing.T) {
	t.Parallel()
	s := setUp(t, "settings-refused")
	s.options.Proxies = []string{"https_proxy=http://ann:hunter22@proxy.example:3128"}
	actions := slices.Concat(planned(t, "inotify"), planned(t, "needrestart"))
	out := apply(t, s, actions)
	if !slices.Equal(results(out), []Result{Broke, Mended}) || !errors.Is(out[0].Err, ErrProgram) {
		t.Fatalf("%+v", out)
	}
	if !strings.Contains(out[0].Output, "permission denied on key") || len(out[0].Did) != 1 || !strings.Contains(out[0].Did[0], SysctlFile) {
		t.Errorf("does not say what was done and said: %+v", out[0])
	}
	for _, text := range []string{out[0].Output, out[0].Why, s.read(record.DefaultFile)} {
		for _, secret := range []string{"hunter22", "YW5uOmh1bnRlcjIy"} {
			if strings.Contains(text, secret) {
				t.Errorf("the password is in %s", text)
			}
		}
	}
	if d := entryOf(t, s.record(), Inotify); d.State != record.Failed || d.Error == "" || len(d.Files) != 1 {
		t.Errorf("recorded %+v", d)
	}
	if got := s.read(NeedrestartFile); got != marker+"\n$nrconf{override_rc}{qr(^k3s)} = 0;\n" {
		t.Errorf("the drop-in is %q", got)
	}
}

func TestApplyChecksAfterwards(t *testing.T) {
	t.Parallel()
	s := setUp(t, "settings-ignored")
	out := apply(t, s, planned(t, "inotify"))
	if out[0].Result != Broke || !errors.Is(out[0].Err, ErrNotMended) || !strings.Contains(out[0].Why, "the kernel has the values") {
		t.Errorf("%+v", out)
	}
}

func TestApplyLeavesFilesOfOthers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		setUp func(s *stage)
		want  error
	}{
		{"a file of others", func(s *stage) { s.write(SysctlFile, "vm.swappiness = 1\n") }, ErrNotOurs},
		{"a link", func(s *stage) {
			s.write("/etc/sysctl.d/x", marker)
			if err := os.Symlink("x", filepath.Join(s.root, SysctlFile)); err != nil {
				s.t.Fatal(err)
			}
		}, ErrNotOurs},
		{"no directory", func(s *stage) { s.write("/etc/sysctl.d", "") }, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := setUp(t, "settings")
			c.setUp(s)
			before := s.read(SysctlFile)
			out := apply(t, s, planned(t, "inotify"))
			if out[0].Result != Broke || c.want != nil && !errors.Is(out[0].Err, c.want) {
				t.Errorf("%+v", out)
			}
			if s.read(SysctlFile) != before || s.called("sysctl") {
				t.Errorf("it was changed to %q, calls %v", s.read(SysctlFile), s.calls())
			}
		})
	}
}

func TestApplyPermissionDenied(t *testing.T) {
	t.Parallel()
	if os.Geteuid() == 0 {
		t.Skip("root may write everywhere")
	}
	s := setUp(t, "settings")
	dir := filepath.Join(s.root, "etc/sysctl.d")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o500); err != nil { // #nosec G302 -- a directory
		t.Fatal(err)
	}
	out := apply(t, s, planned(t, "inotify"))
	if out[0].Result != Broke || !errors.Is(out[0].Err, fs.ErrPermission) {
		t.Errorf("%+v", out)
	}
}

// What can't be recorded is not done.
func TestApplyNeedsItsRecord(t *testing.T) {
	t.Parallel()
	s := setUp(t, "settings")
	kept := s.record()
	s.write(filepath.Dir(record.DefaultFile), "in the way")
	out, err := Apply(t.Context(), NewMachine(s.options), slices.Concat(planned(t, "inotify"), planned(t, "needrestart")), kept, nil, nil)
	if !errors.Is(err, errSaving) || len(out) != 1 || out[0].Result != Broke || len(s.calls()) != 0 {
		t.Errorf("%+v, %v, calls %v", out, err, s.calls())
	}
	if _, err := os.Stat(filepath.Join(s.root, SysctlFile)); !errors.Is(err, fs.ErrNotExist) {
		t.Error("the file was written all the same")
	}
}

// A first interrupt lets the step at hand finish; the next run does the rest.
func TestApplyInterruptedBetweenSteps(t *testing.T) {
	t.Parallel()
	s := setUp(t, "settings")
	actions := slices.Concat(planned(t, "inotify"), planned(t, "needrestart"))
	stop := make(chan struct{})
	out, err := Apply(t.Context(), NewMachine(s.options), actions, s.record(), stop, func(e Event) {
		if e.Text == "write "+SysctlFile {
			close(stop)
		}
	})
	if !errors.Is(err, context.Canceled) || !slices.Equal(results(out), []Result{Left, Left}) {
		t.Fatalf("%+v, %v", out, err)
	}
	if s.called("sysctl") || !strings.HasPrefix(s.read(SysctlFile), marker) {
		t.Errorf("the step at hand was not finished, or a further one begun: %v", s.calls())
	}
	if d := entryOf(t, s.record(), Inotify); d.State != record.Started {
		t.Errorf("recorded %+v", d)
	}
	if out := apply(t, s, actions); !slices.Equal(results(out), []Result{Mended, Mended}) {
		t.Fatalf("the second run: %+v", out)
	}
	// It was there only since the run that was cut off.
	if d := entryOf(t, s.record(), Inotify); d.State != record.Done || len(d.Files) != 1 || d.Files[0].Before.State != record.BeforeAbsent {
		t.Errorf("recorded %+v", d)
	}
}

// The end of the context ends a program that hangs.
func TestApplyCalledOff(t *testing.T) {
	t.Parallel()
	s := setUp(t, "hangs")
	ctx, cancel := context.WithCancel(t.Context())
	begin := time.Now()
	go func() {
		for !s.called("sysctl") && time.Since(begin) < 20*time.Second {
			time.Sleep(20 * time.Millisecond)
		}
		cancel()
	}()
	out, err := Apply(ctx, NewMachine(s.options), planned(t, "inotify"), s.record(), nil, nil)
	if !errors.Is(err, context.Canceled) || out[0].Result != Left || !s.called("sysctl") {
		t.Errorf("%+v, %v", out, err)
	}
	if d := entryOf(t, s.record(), Inotify); d.State != record.Started {
		t.Errorf("recorded %+v", d)
	}
}

func TestApplyDeadlineOfAProgram(t *testing.T) {
	t.Parallel()
	s := setUp(t, "hangs")
	actions := planned(t, "inotify")
	actions[0].Steps[len(actions[0].Steps)-1].Run.DeadlineSeconds = 1
	out := apply(t, s, actions)
	if out[0].Result != Broke || !errors.Is(out[0].Err, context.DeadlineExceeded) {
		t.Errorf("%+v", out)
	}
}

// keyOf makes a key in armour, for tests that can't have NVIDIA's.
func keyOf(t *testing.T) (armoured []byte, fingerprint string) {
	t.Helper()
	e, err := openpgp.NewEntity("Stand-in", "", "stand-in@example.invalid", nil)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	w, err := armor.Encode(&out, "PGP PUBLIC KEY BLOCK", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(e.Serialize(w), w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes(), strings.ToUpper(hex.EncodeToString(e.PrimaryKey.Fingerprint))
}

// serveKey has the actions fetch a stand-in for NVIDIA's key from a server.
func serveKey(t *testing.T, actions []Action, key []byte, fingerprint string) *int {
	t.Helper()
	asked := new(int)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		*asked++
		_, _ = w.Write(key)
	}))
	t.Cleanup(server.Close)
	for i := range actions {
		for j := range actions[i].Steps {
			if d := actions[i].Steps[j].Download; d != nil {
				copied := *d
				copied.URL, copied.Fingerprint = server.URL, fingerprint
				actions[i].Steps[j].Download = &copied
			}
		}
	}
	return asked
}

func TestApplyToolkitFromNVIDIA(t *testing.T) {
	t.Parallel()
	s := setUp(t, "apt-without-toolkit")
	s.options.Proxies = []string{"https_proxy=http://proxy.example:3128"}
	s.options.Client = http.DefaultClient
	actions := planned(t, "toolkit-apt")
	key, fingerprint := keyOf(t)
	serveKey(t, actions, key, fingerprint)
	out := apply(t, s, actions)
	if out[0].Result != Mended {
		t.Fatalf("%+v", out)
	}
	if s.read(AptKeyFile) != string(key) {
		t.Error("the key was not written as it came")
	}
	if got := s.read(AptSourceFile); !strings.Contains(got, "\nSigned-By: "+AptKeyFile+"\n") || !strings.HasPrefix(got, marker) {
		t.Errorf("the source is %q", got)
	}
	d := entryOf(t, s.record(), Toolkit)
	want := []record.Package{{Name: "libnvidia-container1", Version: "1.18.1-1", Before: "1.13.5-1"}}
	for _, n := range toolkitPackages()[:3] {
		want = append(want, record.Package{Name: n, Version: "1.18.1-1"})
	}
	slices.SortFunc(d.Packages, func(a, b record.Package) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(want, func(a, b record.Package) int { return strings.Compare(a.Name, b.Name) })
	if !slices.Equal(d.Packages, want) || len(d.Files) != 2 {
		t.Errorf("recorded %+v", d)
	}
	var text bytes.Buffer
	if err := DescribeRecord(&text, s.record(), 100); err != nil {
		t.Fatal(err)
	}
	for _, words := range []string{"installed nvidia-container-toolkit 1.18.1-1", "upgraded libnvidia-container1 from 1.13.5-1", "wrote " + AptKeyFile, "sudo apt-get remove"} {
		if !strings.Contains(text.String(), words) {
			t.Errorf("uninstalling does not say %q:\n%s", words, text.String())
		}
	}
	calls := s.calls()
	guard := slices.IndexFunc(calls, func(c string) bool { return strings.HasPrefix(c, "apt-get -s install") })
	install := slices.IndexFunc(calls, func(c string) bool { return strings.HasPrefix(c, "apt-get -oDPkg::Lock::Timeout=600") })
	if guard < 0 || install < guard {
		t.Errorf("apt was not asked first: %v", calls)
	}
}

func TestApplyToolkitFromConfiguredSources(t *testing.T) {
	t.Parallel()
	s := setUp(t, "apt-with-toolkit")
	s.options.Client = http.DefaultClient
	actions := planned(t, "toolkit-apt")
	asked := serveKey(t, actions, nil, "")
	if out := apply(t, s, actions); out[0].Result != Mended {
		t.Fatalf("%+v", out)
	}
	if *asked != 0 || !strings.Contains(s.read(AptSourceFile), "no such file") {
		t.Error("NVIDIA's repository was added although it is not needed")
	}
}

func TestApplyToolkitByDNF(t *testing.T) {
	t.Parallel()
	s := setUp(t, "dnf")
	s.options.Client = http.DefaultClient
	actions := planned(t, "toolkit-dnf")
	key, fingerprint := keyOf(t)
	serveKey(t, actions, key, fingerprint)
	if out := apply(t, s, actions); out[0].Result != Mended {
		t.Fatalf("%+v", out)
	}
	if got := s.read(DNFRepoFile); !strings.Contains(got, "gpgkey=file://"+RPMKeyFile+"\n") || s.read(RPMKeyFile) != string(key) {
		t.Errorf("the repository is %q", got)
	}
	if d := entryOf(t, s.record(), Toolkit); len(d.Packages) != 1 || d.Packages[0].Version != "1.18.1-1" {
		t.Errorf("recorded %+v", d.Packages)
	}
}

// Another key, or another entry for the repository, stops it before apt is touched.
func TestApplyToolkitRefusesKeys(t *testing.T) {
	t.Parallel()
	key, fingerprint := keyOf(t)
	other, _ := keyOf(t)
	for _, c := range []struct {
		name  string
		key   []byte
		setUp func(*stage)
		want  error
	}{
		{"another key", other, nil, ErrKey},
		{"the key and another", slices.Concat(key, other), nil, ErrKey},
		{"a login page", []byte("<html>sign in</html>"), nil, ErrKey},
		{"too much", bytes.Repeat([]byte("x"), keyLimit+1), nil, host.ErrTooLarge},
		{"another entry", key, func(s *stage) {
			s.write("/etc/apt/sources.list.d/n.list", "deb [signed-by=/x.gpg] "+toolkitRepository+"/stable/deb/$(ARCH) /\n")
		}, ErrElsewhere},
		{"somebody's key file", key, func(s *stage) { s.write(AptKeyFile, "mine") }, ErrNotOurs},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := setUp(t, "apt-without-toolkit")
			s.options.Client = http.DefaultClient
			if c.setUp != nil {
				c.setUp(s)
			}
			actions := planned(t, "toolkit-while-k3s-runs")
			serveKey(t, actions, c.key, fingerprint)
			out := apply(t, s, actions)
			if out[0].Result != Broke || !errors.Is(out[0].Err, c.want) {
				t.Errorf("%+v", out[0])
			}
			if s.called("apt-get -oDPkg") || strings.HasPrefix(s.read(AptSourceFile), marker) {
				t.Errorf("it went on: %v", s.calls())
			}
			if out[1].Result != Left || s.called("systemctl") {
				t.Errorf("k3s was restarted for nothing: %+v", out[1])
			}
		})
	}
}

// A commented entry does not matter.
func TestElsewhereSkipsComments(t *testing.T) {
	t.Parallel()
	s := setUp(t, "nothing")
	s.write("/etc/apt/sources.list.d/n.list", "# deb "+toolkitRepository+"/stable/deb/amd64 /\n")
	w := &worker{machine: NewMachine(s.options)}
	name, err := w.elsewhere(t.Context(), Elsewhere{Patterns: []string{"/etc/apt/sources.list.d/*.list"}, Text: "libnvidia-container/stable"}, AptSourceFile)
	if name != "" || err != nil {
		t.Errorf("%q, %v", name, err)
	}
}

func TestApplyRefusesMoreThanAskedFor(t *testing.T) {
	t.Parallel()
	for name, words := range map[string]string{
		"driver": "libnvidia-compute-580 would come", "kernel": "linux-image-6.8.0-60-generic would come",
		"removal": "docker-ce would be removed", "upgrade": "libc6 would be upgraded",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := setUp(t, "apt-refused-"+name)
			out := apply(t, s, planned(t, "toolkit-apt"))
			if out[0].Result != Broke || !errors.Is(out[0].Err, ErrRefused) || !strings.Contains(out[0].Why, words) {
				t.Errorf("%+v", out)
			}
			if s.called("apt-get -oDPkg") {
				t.Errorf("it went on: %v", s.calls())
			}
		})
	}
}

// The package manager of somebody else is waited for.
func TestApplyWaitsForTheLock(t *testing.T) {
	t.Parallel()
	s := setUp(t, "apt-with-toolkit")
	s.write("/var/lib/apt/lists/lock", "")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	holder := exec.CommandContext(t.Context(), self) // #nosec G204 -- this test itself
	holder.Env = append(os.Environ(), lockVariable+"="+filepath.Join(s.root, "var/lib/apt/lists/lock"))
	in, err := holder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	said, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(said, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	m := NewMachine(s.options)
	if held, err := m.locked(t.Context(), "/var/lib/apt/lists/lock"); !held || err != nil {
		t.Fatalf("held %t, %v", held, err)
	}
	early := make(chan bool, 1)
	go func() {
		time.Sleep(300 * time.Millisecond)
		early <- s.called("apt-get")
		_ = in.Close()
	}()
	out := apply(t, s, planned(t, "toolkit-apt"))
	if <-early {
		t.Error("apt-get was called while the lock was held")
	}
	if out[0].Result != Mended {
		t.Errorf("%+v", out)
	}
	if err := holder.Wait(); err != nil {
		t.Error(err)
	}
}

func TestApplyLinks(t *testing.T) {
	t.Parallel()
	s := setUp(t, "nothing")
	for _, name := range []string{"nvidia0", "nvidiactl", "nvidia-uvm"} {
		s.write("/dev/"+name, "")
	}
	actions := planned(t, "dev-char-without-ctk")
	if out := apply(t, s, actions); out[0].Result != Mended {
		t.Fatalf("%+v", out)
	}
	target, err := os.Readlink(filepath.Join(s.root, "dev/char/195:255"))
	if err != nil || target != "../nvidiactl" {
		t.Errorf("the link leads to %q, %v", target, err)
	}
	if out := apply(t, s, actions); out[0].Result != Already {
		t.Errorf("the second run: %+v", out)
	}
}

func TestApplyRestart(t *testing.T) {
	t.Parallel()
	s := setUp(t, "k3s")
	actions := planned(t, "k3s-restart")
	for range 2 {
		// Nothing can tell beforehand that it is needless.
		if out := apply(t, s, actions); out[0].Result != Mended {
			t.Fatalf("%+v", out)
		}
	}
	if calls := s.calls(); !slices.Equal(calls, []string{"systemctl restart k3s", "systemctl is-active k3s", "systemctl restart k3s", "systemctl is-active k3s"}) {
		t.Errorf("%v", calls)
	}
}

// Device files count when they have the number that the kernel gave to the driver.
func TestDevices(t *testing.T) {
	t.Parallel()
	s := setUp(t, "nothing")
	s.write("/proc/devices", "Character devices:\n  1 mem\n195 nvidia\n\nBlock devices:\n195 nvidia-uvm\n")
	w := &worker{machine: NewMachine(s.options)}
	node := filepath.Join(s.root, "dev/nvidia0")
	s.write("/dev/nvidia1", "no device")
	for name, check := range map[string]DeviceNode{
		"absent": {"/dev/nvidia0", []string{"nvidia"}}, "a file": {"/dev/nvidia1", []string{"nvidia"}},
	} {
		if ok, err := w.devices(t.Context(), []DeviceNode{check}); ok || err != nil {
			t.Errorf("%s: %t, %v", name, ok, err)
		}
	}
	out := apply(t, s, planned(t, "device-nodes"))
	if out[0].Result != Broke || !errors.Is(out[0].Err, ErrNotMended) || !s.called("nvidia-modprobe -c 0 -u") {
		t.Errorf("%+v", out)
	}
	if err := unix.Mknod(node, unix.S_IFCHR|0o600, int(unix.Mkdev(195, 0))); err != nil {
		t.Skipf("device files can't be made here: %v", err)
	}
	for names, want := range map[string]bool{"nvidia": true, "mem": false, "nvidia-uvm": false} {
		if ok, err := w.devices(t.Context(), []DeviceNode{{"/dev/nvidia0", []string{names}}}); ok != want || err != nil {
			t.Errorf("%s: %t, %v", names, ok, err)
		}
	}
}

func TestOffers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		version string
		want    bool
	}{
		{"1.17.8-1", true}, {"1.18.0", true}, {"2.0", true}, {"1:1.20.0-1", true},
		{"1.17.7-1", false}, {"1.18.0~rc.1-1", false}, {"(none)", false}, {"", false}, {"1", false},
	} {
		if got := atLeast(c.version, toolkitAtLeast); got != c.want {
			t.Errorf("atLeast(%q) = %t", c.version, got)
		}
	}
	if v := versionIn("NVIDIA Container Toolkit CLI version v1.18.1\ncommit: 1"); v != "1.18.1" {
		t.Errorf("versionIn = %q", v)
	}
}

func TestQuoting(t *testing.T) {
	t.Parallel()
	s := Step{Write: &Write{Path: "/etc/x y", Content: "it's $HOME\n\n100%\n"}}
	shell, err := exec.LookPath("sh")
	if err != nil {
		t.Skip("no shell to try it with")
	}
	line := strings.ReplaceAll(s.Shown(), "sudo tee '/etc/x y' > /dev/null", "cat")
	out, err := exec.CommandContext(t.Context(), shell, "-c", line).Output() // #nosec G204 -- a fixed line
	if err != nil || string(out) != s.Write.Content {
		t.Errorf("%s prints %q, %v", line, out, err)
	}
}

func TestProxies(t *testing.T) {
	t.Parallel()
	got := ProxyEnvironment(func(name string) string {
		return map[string]string{"https_proxy": "http://p:1", "PATH": "/bin", "NO_PROXY": "localhost"}[name]
	})
	if !slices.Equal(got, []string{"https_proxy=http://p:1", "NO_PROXY=localhost"}) {
		t.Errorf("%v", got)
	}
	var asked string
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = r.URL.String()
		_, _ = w.Write([]byte("key"))
	}))
	defer proxy.Close()
	m := NewMachine(Options{Root: t.TempDir(), Proxies: []string{"http_proxy=" + proxy.URL}})
	data, err := m.download(t.Context(), "http://nvidia.example.invalid/gpgkey")
	if err != nil || string(data) != "key" || asked != "http://nvidia.example.invalid/gpgkey" {
		t.Errorf("%q, %v, the proxy was asked for %q", data, err, asked)
	}
}
