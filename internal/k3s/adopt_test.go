package k3s

import (
	"errors"
	"os"
	"strings"
	"testing"
)

// foreignK3s is a machine with a k3s that somebody else installed.
func foreignK3s(t *testing.T, parts ...string) (*Machine, *programs, *quietKernel) {
	t.Helper()
	m, p, k := fakeMachine(t)
	newSystemd(t, m, p)
	for _, part := range parts {
		switch part {
		case "binary":
			put(t, m, "/usr/local/bin/k3s", fakeK3s("v1.35.2+k3s1"))
			if err := os.Chmod(m.at("/usr/local/bin/k3s"), 0o755); err != nil {
				t.Fatal(err)
			}
		case "unit":
			put(t, m, "/etc/systemd/system/k3s.service", "[Service]\nExecStart=/usr/local/bin/k3s server\n")
		case "data":
			put(t, m, "/srv/k3s/server/token", "x")
			put(t, m, ConfigFile, "data-dir: /srv/k3s\ntoken: x\n")
		case "script":
			put(t, m, "/usr/local/bin/k3s-uninstall.sh", "#!/bin/sh\n")
		case "kubeconfig":
			put(t, m, Kubeconfig, "kind: Config\n")
		case "running":
			k.processes = []Process{process(10, 1, "/srv/k3s/data/abc/bin/k3s", "/", "/usr/local/bin/k3s server")}
		}
	}
	return m, p, k
}

func TestExistingK3s(t *testing.T) {
	for name, test := range map[string]struct {
		parts string
		whose Whose
		fix   string
	}{
		"none":             {"", Nobodys, ""},
		"running":          {"binary unit data kubeconfig running", Somebodys, "--adopt"},
		"stopped":          {"binary unit data", Somebodys, "systemctl start k3s"},
		"with its script":  {"binary unit data script", Somebodys, "sudo /usr/local/bin/k3s-uninstall.sh"},
		"half removed":     {"data", Somebodys, "sudo rm -rf /srv/k3s"},
		"only a unit":      {"unit", Somebodys, "sudo rm /etc/systemd/system/k3s.service"},
		"only the program": {"binary", Somebodys, "sudo rm /usr/local/bin/k3s"},
	} {
		m, _, _ := foreignK3s(t, strings.Fields(test.parts)...)
		e, err := m.Existing(t.Context())
		if err != nil || e.Whose != test.whose || e.Running != strings.Contains(test.parts, "running") {
			t.Errorf("%s: %+v, %v", name, e, err)
		}
		if strings.Contains(test.parts, "binary") && e.Version != "v1.35.2+k3s1" || strings.Contains(test.parts, "data") && e.DataDir != "/srv/k3s" {
			t.Errorf("%s: %+v", name, e)
		}
		refused := e.MayInstall()
		var problem *Problem
		if (refused == nil) != (test.fix == "") || refused != nil && (!errors.As(refused, &problem) || !errors.Is(refused, ErrForeign) || !strings.Contains(problem.Fix(), test.fix)) {
			t.Errorf("%s: %v", name, refused)
		}
		before := tree(t, m)
		if _, err := m.Ensure(t.Context(), wantOf(t, m), nil); (err == nil) != (test.fix == "") {
			t.Errorf("%s: ensure: %v", name, err)
		} else if d := differ(before, tree(t, m)); err != nil && d != "" {
			t.Errorf("%s: changed\n%s", name, d)
		}
	}
}

func TestAdoptingChangesNothing(t *testing.T) {
	m, p, _ := foreignK3s(t, "binary", "unit", "data", "kubeconfig", "running")
	if err := os.MkdirAll(m.at("/var/lib/llmbox"), 0o755); err != nil {
		t.Fatal(err)
	}
	before := tree(t, m)
	e, err := m.Adopt(t.Context())
	if err != nil || e.Whose != Adopted {
		t.Fatalf("%+v, %v", e, err)
	}
	out, err := m.Ensure(t.Context(), wantOf(t, m), nil)
	if err != nil || len(out.Changed) > 0 || out.Started || out.Restarted || out.Binary.Version != "v1.35.2+k3s1" || out.Service == nil {
		t.Fatalf("%+v, %v", out, err)
	}
	// Whatever its owner keeps it running with.
	if state, err := out.Service.State(t.Context()); err != nil || !state.Running {
		t.Errorf("it does not run: %+v, %v", state, err)
	}
	if _, err := m.Adopt(t.Context()); err != nil {
		t.Errorf("once more: %v", err)
	}
	if len(p.changes()) > 0 {
		t.Errorf("did %q", p.changes())
	}
	// Uninstalling forgets it and leaves it as it is.
	if outcomes, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil); err != nil {
		t.Errorf("%+v, %v", outcomes, err)
	}
	if d := differ(before, tree(t, m)); d != "" || len(p.changes()) > 0 {
		t.Errorf("changed\n%s\n%q", d, p.changes())
	}
}

func TestWhatCantBeAdopted(t *testing.T) {
	for _, parts := range []string{"", "binary unit data kubeconfig", "binary unit data running", "data"} {
		m, _, _ := foreignK3s(t, strings.Fields(parts)...)
		e, err := m.Adopt(t.Context())
		var problem *Problem
		if !errors.As(err, &problem) || problem.Fix() == "" || m.exists(t.Context(), m.recordFile()) {
			t.Errorf("%q: %+v, %v", parts, e, err)
		}
	}
	// One that llmbox installed needs no adopting.
	m, p, _ := fakeMachine(t)
	newSystemd(t, m, p)
	if _, err := m.Ensure(t.Context(), wantOf(t, m), nil); err != nil {
		t.Fatal(err)
	}
	if e, err := m.Adopt(t.Context()); err != nil || e.Whose != Llmboxes {
		t.Errorf("%+v, %v", e, err)
	}
}
