package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func sample() *Record {
	at := time.Date(2026, 11, 2, 9, 0, 0, 0, time.UTC)
	return &Record{APIVersion: recordVersion, Kind: recordKind, Repairs: []Repaired{{
		Name: "host.sysctl", Title: "Set kernel settings", State: Done, Version: "v0.1.0", First: at, Last: at, Undo: []string{"sudo rm " + "/etc/sysctl.d/99-zz-llmbox.conf"},
		Files: []File{
			{Path: "/etc/sysctl.d/99-zz-llmbox.conf", Before: Before{State: BeforeFile, Mode: 0o644, Content: []byte("# old\n")}, SHA256: "00"},
			{Path: "/dev/char/195:0", Before: Before{State: BeforeAbsent}},
			{Path: "/etc/cdi/nvidia.yaml", Before: Before{State: BeforeLink, Target: "x"}},
		},
		Packages: []Package{{Name: "libnvidia-container1", Version: "1.18.1-1"}},
		Settings: []Changed{{Key: "net.ipv4.ip_forward", Value: "1", Before: "0"}},
	}}}
}

func encoded(t testing.TB, r *Record) []byte {
	t.Helper()
	data, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestRead(t *testing.T) {
	t.Parallel()
	good := string(encoded(t, sample()))
	if _, err := Read(strings.NewReader(good)); err != nil {
		t.Fatal(err)
	}
	replace := func(old, new string) string {
		if !strings.Contains(good, old) {
			t.Fatalf("the sample has no %q", old)
		}
		return strings.Replace(good, old, new, 1)
	}
	for name, data := range map[string]string{
		"empty": "", "no json": "x", "cut off": good[:len(good)/2], "something behind": good + "{}",
		"another version": replace("v1alpha1", "v2"), "another kind": replace(`"Repairs"`, `"Journal"`),
		"unknown field":       replace(`"state":"done"`, `"state":"done","run":"rm -rf /"`),
		"unknown state":       replace(`"state":"done"`, `"state":"half"`),
		"relative path":       replace(`"path":"/etc/sysctl.d`, `"path":"etc/sysctl.d`),
		"path that climbs":    replace(`"path":"/etc/sysctl.d/`, `"path":"/etc/../root/`),
		"mode with bits":      replace(`"mode":420`, `"mode":2147484053`),
		"link without target": replace(`"target":"x"`, `"mode":0`),
		"odd package":         replace(`"name":"libnvidia-container1"`, `"name":"a b;c"`),
		"odd setting":         replace(`"key":"net.ipv4.ip_forward"`, `"key":"$(x)"`),
		"twice":               replace(`"repairs":[`, `"repairs":[`+strings.TrimSuffix(strings.TrimPrefix(good[strings.Index(good, `"repairs":[`):], `"repairs":[`), `]}`)+`,`),
		"too large":           strings.Repeat(" ", recordLimit) + good,
	} {
		if _, err := Read(strings.NewReader(data)); !errors.Is(err, ErrRecord) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A record that can't be read is never begun anew over it.
func TestOpenKeepsADamagedOne(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "repairs.json")
	if err := os.WriteFile(file, []byte(`{"apiVersion":`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(file, "v1"); !errors.Is(err, ErrRecord) {
		t.Errorf("%v", err)
	}
	if raw, err := os.ReadFile(file); err != nil || string(raw) != `{"apiVersion":` {
		t.Errorf("%q, %v", raw, err)
	}
	link := filepath.Join(t.TempDir(), "repairs.json")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(link, "v1"); err == nil {
		t.Error("a link was followed")
	}
}

// Repeated runs add up; what was there before the first stays.
func TestRecordMerges(t *testing.T) {
	t.Parallel()
	r, err := Open(filepath.Join(t.TempDir(), "llmbox/repairs.json"), "v0.1.0")
	if err != nil {
		t.Fatal(err)
	}
	d := r.Begin("host.sysctl", "t", []string{"a"}, []string{"u1"})
	d.Wrote("/etc/x", Before{State: BeforeFile, Mode: 0o600, Content: []byte("first")}, "1")
	d.Set("k", "1", "0")
	d.Installed("p", "1.0", "0.9")
	if err := r.Save(); err != nil {
		t.Fatal(err)
	}
	again, err := Open(r.file, "v0.2.0")
	if err != nil {
		t.Fatal(err)
	}
	d = again.Begin("host.sysctl", "t", []string{"a", "b"}, []string{"u1", "u2"})
	d.Wrote("/etc/x", Before{State: BeforeFile, Mode: 0o644, Content: []byte("ours")}, "2")
	d.Set("k", "2", "1")
	d.Installed("p", "1.1", "1.0")
	if err := again.Save(); err != nil {
		t.Fatal(err)
	}
	last, err := Open(r.file, "v0.2.0")
	if err != nil {
		t.Fatal(err)
	}
	got := last.Repairs[0]
	if len(last.Repairs) != 1 || got.Version != "v0.2.0" || len(got.Findings) != 2 || len(got.Undo) != 2 ||
		string(got.Files[0].Before.Content) != "first" || got.Files[0].SHA256 != "2" ||
		got.Settings[0] != (Changed{"k", "2", "0"}) || got.Packages[0] != (Package{"p", "1.1", "0.9"}) {
		t.Errorf("%+v", last.Repairs)
	}
}

func FuzzReadRecord(f *testing.F) {
	f.Add(encoded(f, sample()))
	f.Add([]byte(`{"apiVersion":"llmbox.dev/v1alpha1","kind":"Repairs","repairs":null}`))
	f.Add([]byte(`{"apiVersion":"llmbox.dev/v1alpha1","kind":"Repairs","repairs":[{"name":"x","state":"done","files":[{"path":"/a/..","before":{"state":"file"}}]}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := Read(bytes.NewReader(data))
		if err != nil {
			if r != nil {
				t.Fatal("a record beside an error")
			}
			return
		}
		// What was read can be written, and reads the same.
		again, err := Read(bytes.NewReader(encoded(t, r)))
		if err != nil {
			t.Fatalf("what was read can't be read again: %v", err)
		}
		if !bytes.Equal(encoded(t, r), encoded(t, again)) {
			t.Fatal("it reads otherwise the second time")
		}
	})
}
