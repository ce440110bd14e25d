package snapshot

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzLoadArchive holds that what is loaded can be stored and loaded again, and is
// then the same.
func FuzzLoadArchive(f *testing.F) {
	var whole bytes.Buffer
	seed := New()
	seed.AddFile("/etc/hosts", "127.0.0.1 localhost\n")
	seed.AddCommand("dmesg", "x\n", 0)
	seed.AddProbe(ProbeDNS, []byte(`[]`))
	if err := seed.WriteArchive(&whole); err != nil {
		f.Fatal(err)
	}
	f.Add(whole.Bytes())
	f.Add(archive(f, entry{name: "manifest.yaml", content: goodManifest}, entry{name: "host/../x", content: "y"}))
	f.Add(archive(f, entry{name: "manifest.yaml", content: goodManifest}, entry{name: "gpu.json", content: `{"schema":1}`}))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := loadArchive(bytes.NewReader(data), testLimits())
		if err != nil {
			return
		}
		again(t, s)
	})
}

// FuzzLoadMembers builds an archive of the fuzzed parts, so that the layers below
// gzip and tar are reached as well.
func FuzzLoadMembers(f *testing.F) {
	f.Add("host/etc/hosts", "x", `[{"path":"/a","kind":"symlink","target":"/b"}]`, "exit=0\nhello", `{"a":1}`, `{"schema":1,"devices":[{"index":0}]}`)
	f.Add("host/a/b", "", `[{"path":"/a","kind":"dir"}]`, "exit=-1", `[]`, `{}`)
	f.Fuzz(func(t *testing.T, name, content, entries, command, probe, gpu string) {
		if strings.ContainsRune(name, 0) || len(name) > 200 || len(content)+len(entries)+len(command)+len(probe)+len(gpu) > 8<<10 {
			return
		}
		b := newBuilder(testLimits())
		for _, m := range []member{
			{manifestName, []byte(goodManifest)}, {name, []byte(content)}, {filesName, []byte(entries)},
			{"commands/x.txt", []byte(command)}, {"probes/x.json", []byte(probe)}, {gpuName, []byte(gpu)},
		} {
			if err := b.file(m.name, bytes.NewReader(m.data)); err != nil {
				return
			}
		}
		s, err := b.finish()
		if err != nil {
			return
		}
		again(t, s)
	})
}

// FuzzLoadManifest holds that a manifest that is read is of the known version and
// names no place that could leave the snapshot.
func FuzzLoadManifest(f *testing.F) {
	f.Add([]byte(goodManifest))
	f.Add([]byte(goodManifest + "time: 2026-01-05T12:00:04Z\nroot: true\nunreadable: {host/etc/x: permission denied}\n"))
	f.Add([]byte(`{"apiVersion":"llmbox.dev/v1alpha1","kind":"Snapshot","unreadable":{"../x":"y"}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := parseManifest(raw)
		if err != nil {
			return
		}
		if m.APIVersion != APIVersion || m.Kind != Kind || m.Unreadable == nil {
			t.Errorf("accepted %+v", m)
		}
		for place := range m.Unreadable {
			if strings.Contains(place, "..") && safeName(place) != nil {
				t.Errorf("accepted the place %q", place)
			}
		}
	})
}

// FuzzProc feeds the readers of /proc, whose text other tenants of a machine can
// shape in part (mount points, process names).
func FuzzProc(f *testing.F) {
	for _, name := range []string{"tcp", "tcp6", "udp", "mountinfo"} {
		raw, err := os.ReadFile(filepath.Join("testdata/proc", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(raw))
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, s := range parseSockets(text, "tcp") {
			if s.Port < 0 || s.Port > 65535 || s.Address == "" {
				t.Errorf("%+v", s)
			}
		}
		mounts := parseMountinfo(text)
		if m, ok := holding(mounts, "/a/b"); ok && m.point != "/" && m.point != "" && !strings.HasPrefix("/a/b/", m.point+"/") {
			t.Errorf("/a/b lies on %q", m.point)
		}
		_ = memTotal(text)
		_ = holderOf(text, 1, 1)
	})
}

// FuzzRedact holds that a planted password never comes through, whatever stands
// around it.
func FuzzRedact(f *testing.F) {
	f.Add("a b", "c")
	f.Add(`{"x":`, "}")
	f.Fuzz(func(t *testing.T, before, after string) {
		const secret = "Hunter2Hunter2"
		if strings.Contains(before+after, secret) {
			return
		}
		if got := redact(before + "\nHF_TOKEN=" + secret + "\n" + after); strings.Contains(got, secret) {
			t.Errorf("%q", got)
		}
		if got := redact(before + "\nhttps://u:" + secret + "@proxy.example/\n" + after); strings.Contains(got, secret) {
			t.Errorf("%q", got)
		}
		if got, err := redactYAML("password: " + secret + "\n" + after); err == nil && strings.Contains(got, secret) {
			t.Errorf("%q", got)
		}
	})
}

// again stores a snapshot and loads it back.
func again(t *testing.T, s *Snapshot) {
	t.Helper()
	var out bytes.Buffer
	if err := s.WriteArchive(&out); err != nil {
		t.Fatalf("what was loaded can't be stored: %v", err)
	}
	got, err := loadArchive(&out, limits{entries: 1000, file: 1 << 20, total: 8 << 20})
	if err != nil {
		t.Fatalf("what was stored can't be loaded: %v", err)
	}
	equal(t, s, got)
}
