package k3s

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

func TestHandlersOfBothLayouts(t *testing.T) {
	for name, want := range map[string]int{"v2.toml": 2, "v3.toml": 4, "none.toml": 1} {
		data, err := os.ReadFile(filepath.Join("testdata", "runtime", name))
		if err != nil {
			t.Fatal(err)
		}
		all, err := handlers(data)
		if err != nil || len(all) != want {
			t.Errorf("%s: %v, %v", name, all, err)
		}
		if h := all["nvidia"]; name != "none.toml" && (h.Binary != "/usr/bin/nvidia-container-runtime" || !h.Systemd) {
			t.Errorf("%s: %+v", name, h)
		}
	}
	if _, err := handlers([]byte("a = [")); err == nil {
		t.Error("read what is no TOML")
	}
}

func TestJudgeRuntime(t *testing.T) {
	file := func(name string) []byte {
		data, err := os.ReadFile(filepath.Join("testdata", "runtime", name))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	const apt, operator, template = "/usr/bin/nvidia-container-runtime", "/usr/local/nvidia/toolkit/nvidia-container-runtime", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml.tmpl"
	copied, based := file("v2.toml"), []byte(`{{ template "base" . }}`+"\n")
	for name, test := range map[string]struct {
		view    RuntimeView
		there   []string
		state   RuntimeState
		restart bool
	}{
		"ready":                          {RuntimeView{Config: file("v3.toml"), Found: apt}, []string{apt}, RuntimeReady, false},
		"ready, version 2":               {RuntimeView{Config: file("v2.toml"), Found: apt}, []string{apt}, RuntimeReady, false},
		"k3s has not run":                {RuntimeView{Found: apt}, []string{apt}, RuntimeUnknown, false},
		"no TOML":                        {RuntimeView{Config: []byte("= ="), Found: apt}, []string{apt}, RuntimeUnknown, true},
		"no toolkit":                     {RuntimeView{Config: file("none.toml")}, nil, RuntimeNoToolkit, false},
		"the toolkit came later":         {RuntimeView{Config: file("none.toml"), Found: apt}, []string{apt}, RuntimeNotSeen, true},
		"a copied template hides it":     {RuntimeView{Config: file("none.toml"), Found: apt, Template: template, TemplateText: file("none.toml")}, []string{apt}, RuntimeStale, false},
		"a template upon the base":       {RuntimeView{Config: file("none.toml"), Found: apt, Template: template, TemplateText: based}, []string{apt}, RuntimeNotSeen, true},
		"the operator's is gone":         {RuntimeView{Config: file("v3.toml"), Found: operator}, []string{operator}, RuntimeMoved, true},
		"it is gone":                     {RuntimeView{Config: file("v3.toml")}, nil, RuntimeNoToolkit, false},
		"a copied template names it":     {RuntimeView{Config: copied, Found: operator, Template: template, TemplateText: copied}, []string{operator}, RuntimeStale, false},
		"other control groups than runc": {RuntimeView{Config: file("mixed.toml"), Found: apt}, []string{apt}, RuntimeMixed, true},
		"the same from a template":       {RuntimeView{Config: file("mixed.toml"), Found: apt, Template: template, TemplateText: file("mixed.toml")}, []string{apt}, RuntimeMixed, false},
	} {
		test.view.Exists = func(name string) bool { return slices.Contains(test.there, name) }
		v := JudgeRuntime(test.view)
		if v.State != test.state || v.Restart != test.restart || v.Why == "" || (v.State != RuntimeReady) != (v.Fix != "") {
			t.Errorf("%s: %+v", name, v)
		}
		if err := v.Problem(); (err == nil) != (test.state == RuntimeReady) || err != nil && !errors.Is(err, ErrRuntime) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// containerd writes the configuration as k3s does at its start: with the runtime that
// is there then.
func containerd(t *testing.T, m *Machine, name string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "runtime", name))
	if err != nil {
		t.Fatal(err)
	}
	put(t, m, DefaultDataDir+"/agent/etc/containerd/config.toml", string(data))
}

func TestRuntimeIsFoundByOneRestart(t *testing.T) {
	m, p, _ := fakeMachine(t)
	systemd := newSystemd(t, m, p)
	want := wantOf(t, m)
	out, err := m.Ensure(t.Context(), want, nil)
	if err != nil {
		t.Fatal(err)
	}
	containerd(t, m, "none.toml")
	startAPI(t, m, &apiServer{})
	prober, w := m.NewProber(Kubeconfig), WaitFor{NodeName: "gpu-box"}
	ensure := func() (RuntimeVerdict, bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		v, did, err := m.EnsureRuntime(ctx, out.Service, w, prober, nil)
		if err != nil {
			t.Fatal(err)
		}
		return v, did
	}
	if v, did := ensure(); did || v.State != RuntimeNoToolkit {
		t.Errorf("%+v, %v", v, did)
	}
	put(t, m, "/usr/bin/nvidia-container-runtime", "#!/bin/sh\n")
	if err := os.Chmod(m.at("/usr/bin/nvidia-container-runtime"), 0o755); err != nil {
		t.Fatal(err)
	}
	start := p.answers["systemctl"]
	p.answers["systemctl"] = func(args []string) (string, int) {
		if args[0] == "restart" {
			containerd(t, m, "v3.toml")
		}
		return start(args)
	}
	pid := systemd.pid
	if v, did := ensure(); !did || v.State != RuntimeReady || systemd.pid == pid {
		t.Errorf("%+v, %v", v, did)
	}
	pid = systemd.pid
	if v, did := ensure(); did || v.State != RuntimeReady || systemd.pid != pid {
		t.Errorf("once more: %+v, %v", v, did)
	}
	// Nor does the next install find a reason.
	if out, err := m.Ensure(t.Context(), want, nil); err != nil || out.Restarted {
		t.Errorf("%+v, %v", out, err)
	}
	// A k3s that does not take it is not restarted for ever.
	containerd(t, m, "none.toml")
	if v, did := ensure(); did || v.State != RuntimeNotSeen || v.Fix == "" {
		t.Errorf("not taken: %+v, %v", v, did)
	}
}
