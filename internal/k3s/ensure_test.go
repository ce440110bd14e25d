package k3s

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

func itoa(n int) string { return strconv.Itoa(n) }

func wantOf(t *testing.T, _ *Machine) Want {
	t.Helper()
	s := machines()["l4-100gb"]
	return Want{
		Binary: WantBinary{Version: version, Arch: "amd64", Fetcher: release(version)}, Settings: s, Init: Systemd,
		Hook: []string{"/usr/local/bin/llmbox", "internal", "k3s-node-ip"},
	}
}

// TestSecondRunChangesNothing is the promise of a re-run: no file, no call that
// changes anything, no restart.
func TestSecondRunChangesNothing(t *testing.T) {
	m, p, _ := fakeMachine(t)
	systemd := newSystemd(t, m, p)
	out, err := m.Ensure(t.Context(), wantOf(t, m), nil)
	if err != nil || !out.Started || out.Restarted || out.NodeName != "ip-10-0-0-5.ec2.internal" {
		t.Fatalf("%+v, %v", out, err)
	}
	if want := []string{"systemctl daemon-reload", "systemctl enable --no-reload k3s.service", "systemctl start --no-block k3s.service"}; !slices.Equal(p.changes(), want) {
		t.Errorf("did %q", p.changes())
	}
	before, pid := tree(t, m), systemd.pid
	for range 2 {
		p.forget()
		out, err = m.Ensure(t.Context(), wantOf(t, m), nil)
		if err != nil || out.Started || out.Restarted || len(out.Changed) > 0 || len(out.Reasons) > 0 || systemd.pid != pid {
			t.Errorf("%+v, %v", out, err)
		}
		if len(p.changes()) > 0 {
			t.Errorf("did %q", p.changes())
		}
		if d := differ(before, tree(t, m)); d != "" {
			t.Errorf("changed\n%s", d)
		}
	}
}

// TestOneRestartForWhatChanged changes one thing at a time.
func TestOneRestartForWhatChanged(t *testing.T) {
	for name, test := range map[string]struct {
		change func(t *testing.T, m *Machine, w *Want)
		reason string
	}{
		"a setting":     {func(_ *testing.T, _ *Machine, w *Want) { w.Settings.Box.K3s.TLSNames = []string{"box.example.com"} }, ConfigFile + " changed"},
		"the disk grew": {func(_ *testing.T, _ *Machine, w *Want) { w.Settings.Facts.DataBytes = 900 * gib }, KubeletFile + " changed"},
		"a proxy":       {func(_ *testing.T, _ *Machine, w *Want) { w.Settings.Box.Network.Proxy.HTTPS = "http://proxy:3128" }, "the proxy settings came"},
		"credentials":   {func(_ *testing.T, _ *Machine, w *Want) { w.Settings.Box.Network.CAFile = "/etc/ca.pem" }, RegistriesFile + " came"},
		"the binary": {func(_ *testing.T, _ *Machine, w *Want) {
			w.Binary.Version, w.Binary.Fetcher = "v1.36.5+k3s1", release("v1.36.5+k3s1")
		}, "the k3s binary changed"},
		"a drop-in":   {func(t *testing.T, m *Machine, _ *Want) { put(t, m, DropInDir+"/10-mine.yaml", "debug: true\n") }, DropInDir + "/10-mine.yaml came"},
		"the toolkit": {func(t *testing.T, m *Machine, _ *Want) { put(t, m, "/usr/bin/nvidia-container-runtime", "x") }, "the NVIDIA runtime came"},
		"a template": {func(t *testing.T, m *Machine, _ *Want) {
			put(t, m, DefaultDataDir+"/agent/etc/containerd/config-v3.toml.tmpl", "x")
		}, DefaultDataDir + "/agent/etc/containerd/config-v3.toml.tmpl came"},
		"a fixed address":  {func(_ *testing.T, _ *Machine, w *Want) { w.Settings.Box.Network.NodeIP = "10.0.0.5" }, ConfigFile + " changed, the service changed"},
		"the address only": {func(t *testing.T, m *Machine, _ *Want) { put(t, m, NodeIPFile, marker+"\nnode-ip: 10.0.0.9\n") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			m, p, _ := fakeMachine(t)
			systemd := newSystemd(t, m, p)
			want := wantOf(t, m)
			if _, err := m.Ensure(t.Context(), want, nil); err != nil {
				t.Fatal(err)
			}
			pid := systemd.pid
			p.forget()
			test.change(t, m, &want)
			out, err := m.Ensure(t.Context(), want, nil)
			if err != nil || out.Restarted != (test.reason != "") || strings.Join(out.Reasons, ", ") != test.reason || (systemd.pid != pid) != out.Restarted {
				t.Errorf("%+v, %v", out, err)
			}
			pid = systemd.pid
			p.forget()
			if out, err = m.Ensure(t.Context(), want, nil); err != nil || out.Restarted || systemd.pid != pid || len(p.changes()) > 0 {
				t.Errorf("once more: %+v, %v, %q", out, err, p.changes())
			}
		})
	}
}

// TestRestartBySomebodyElse: what changed before k3s began, it has read, whoever
// started it; what changed later, it has not.
func TestRestartBySomebodyElse(t *testing.T) {
	m, p, _ := fakeMachine(t)
	systemd := newSystemd(t, m, p)
	want := wantOf(t, m)
	if _, err := m.Ensure(t.Context(), want, nil); err != nil {
		t.Fatal(err)
	}
	put(t, m, DropInDir+"/10-mine.yaml", "debug: true\n")
	// The machine is booted an hour from now.
	put(t, m, "/proc/sys/kernel/random/boot_id", "boot-2\n")
	put(t, m, "/proc/stat", "btime "+strconv.FormatInt(time.Now().Add(time.Hour).Unix(), 10)+"\n")
	systemd.begin()
	out, err := m.Ensure(t.Context(), want, nil)
	if err != nil || out.Restarted {
		t.Errorf("after a reboot: %+v, %v", out, err)
	}
	// And one that began before the change.
	put(t, m, DropInDir+"/20-mine.yaml", "debug: true\n")
	put(t, m, "/proc/sys/kernel/random/boot_id", "boot-3\n")
	put(t, m, "/proc/stat", "btime "+strconv.FormatInt(time.Now().Add(-time.Hour).Unix(), 10)+"\n")
	systemd.begin()
	out, err = m.Ensure(t.Context(), want, nil)
	if err != nil || !out.Restarted || strings.Join(out.Reasons, ", ") != DropInDir+"/20-mine.yaml came" {
		t.Errorf("after a change: %+v, %v", out, err)
	}
	// And one whose start a run that was cut off did not note: the change is of the same
	// second, but before it.
	put(t, m, DropInDir+"/30-mine.yaml", "debug: true\n")
	put(t, m, "/proc/sys/kernel/random/boot_id", "boot-4\n")
	time.Sleep(50 * time.Millisecond)
	systemd.begin()
	put(t, m, "/proc/uptime", fmt.Sprintf("%d.%02d 9.99\n", systemd.ticks/100, systemd.ticks%100))
	if out, err = m.Ensure(t.Context(), want, nil); err != nil || out.Restarted {
		t.Errorf("after a start that was not noted: %+v, %v", out, err)
	}
}

func TestRestartReasons(t *testing.T) {
	base := Inputs{Binary: "b", Config: "c", Kubelet: "k", Unit: "u", DropIns: map[string]string{"/x.yaml": "1"}, Runtime: "/usr/bin/nvidia-container-runtime"}
	for name, test := range map[string]struct {
		change func(i *Inputs)
		want   []string
	}{
		"nothing":         {func(*Inputs) {}, nil},
		"all":             {func(i *Inputs) { *i = Inputs{} }, []string{"the k3s binary went", ConfigFile + " went", KubeletFile + " went", "the service went", "the NVIDIA runtime went", "/x.yaml went"}},
		"a drop-in more":  {func(i *Inputs) { i.DropIns = map[string]string{"/x.yaml": "1", "/a.yaml": "2"} }, []string{"/a.yaml came"}},
		"another runtime": {func(i *Inputs) { i.Runtime = "/usr/local/nvidia/toolkit/nvidia-container-runtime" }, []string{"the NVIDIA runtime changed"}},
	} {
		now := base
		test.change(&now)
		if got := RestartReasons(base, now); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// TestCutOffAnywhere cuts the work off at every program that is run and goes on: the
// end is the same as of one whole run.
func TestCutOffAnywhere(t *testing.T) {
	whole, p, _ := fakeMachine(t)
	newSystemd(t, whole, p)
	if _, err := whole.Ensure(t.Context(), wantOf(t, whole), nil); err != nil {
		t.Fatal(err)
	}
	for _, fail := range []string{"daemon-reload", "enable", "start", "show"} {
		m, p, _ := fakeMachine(t)
		systemd := newSystemd(t, m, p)
		systemd.fails[fail] = "killed"
		if _, err := m.Ensure(t.Context(), wantOf(t, m), nil); err == nil {
			t.Errorf("%s: did not fail", fail)
		}
		// What was written and not loaded: systemd knows.
		systemd.needs = fail == "daemon-reload"
		delete(systemd.fails, fail)
		out, err := m.Ensure(t.Context(), wantOf(t, m), nil)
		if err != nil || !out.Started || systemd.reloads != 1 {
			t.Errorf("%s: %+v, %v, %d reloads", fail, out, err, systemd.reloads)
		}
		strip := func(lines []string) []string {
			return slices.DeleteFunc(lines, func(l string) bool { return strings.Contains(l, "k3s.json") || strings.Contains(l, "/proc/") })
		}
		if d := differ(strip(tree(t, whole)), strip(tree(t, m))); d != "" {
			t.Errorf("%s: another end\n%s", fail, d)
		}
	}
}

func TestFixedThingsStayFixed(t *testing.T) {
	m, p, _ := fakeMachine(t)
	newSystemd(t, m, p)
	want := wantOf(t, m)
	if _, err := m.Ensure(t.Context(), want, nil); err != nil {
		t.Fatal(err)
	}
	before := tree(t, m)
	for name, change := range map[string]func(w *Want){
		"data directory": func(w *Want) { w.Settings.Box.K3s.DataDir = "/mnt/k3s" },
		"node name":      func(w *Want) { w.Settings.Box.K3s.NodeName = "other" },
		"init":           func(w *Want) { w.Init = Supervised },
		"role":           func(w *Want) { w.Settings.Role = Agent },
	} {
		changed := want
		change(&changed)
		_, err := m.Ensure(t.Context(), changed, nil)
		var problem *Problem
		if !errors.Is(err, ErrSetting) || !errors.As(err, &problem) || problem.Fix() == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A host that is renamed keeps its node's name.
	want.Settings.Facts.Hostname = "renamed"
	out, err := m.Ensure(t.Context(), want, nil)
	if err != nil || out.Restarted || out.NodeName != "ip-10-0-0-5.ec2.internal" {
		t.Errorf("renamed: %+v, %v", out, err)
	}
	if d := differ(before, tree(t, m)); d != "" {
		t.Errorf("changed\n%s", d)
	}
}

func TestOldDataIsNotOpenedAnew(t *testing.T) {
	m, p, _ := fakeMachine(t)
	newSystemd(t, m, p)
	put(t, m, DefaultDataDir+"/server/token", "K10abc::server:secret")
	before := tree(t, m)
	_, err := m.Ensure(t.Context(), wantOf(t, m), nil)
	if !errors.Is(err, ErrForeign) {
		t.Errorf("%v", err)
	}
	if d := differ(before, tree(t, m)); d != "" {
		t.Errorf("changed\n%s", d)
	}
}

func TestDamagedRecord(t *testing.T) {
	for _, text := range []string{"", "{", `{"apiVersion":"llmbox.dev/v2","kind":"K3s"}`, `{"apiVersion":"llmbox.dev/v1alpha1","kind":"Repairs"}`} {
		m, _, _ := fakeMachine(t)
		put(t, m, "/var/lib/llmbox/k3s.json", text)
		if _, err := m.Record(t.Context()); !errors.Is(err, ErrRecord) {
			t.Errorf("%q: %v", text, err)
		}
	}
	m, _, _ := fakeMachine(t)
	if r, err := m.Record(t.Context()); err != nil || !r.Empty() {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := os.Stat(filepath.Dir(m.at(m.recordFile()))); err == nil {
		t.Error("reading made a directory")
	}
}
