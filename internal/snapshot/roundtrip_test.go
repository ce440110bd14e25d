package snapshot

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

// equal compares two snapshots and names what differs.
func equal(t *testing.T, want, got *Snapshot) {
	t.Helper()
	if !reflect.DeepEqual(want.Manifest, got.Manifest) {
		t.Errorf("manifest\n%+v\nwant\n%+v", got.Manifest, want.Manifest)
	}
	if !reflect.DeepEqual(want.GPU, got.GPU) {
		t.Errorf("gpu\n%+v\nwant\n%+v", got.GPU, want.GPU)
	}
	if !maps.Equal(want.files, got.files) {
		t.Errorf("files differ: %d, want %d", len(got.files), len(want.files))
	}
	for name, e := range want.entries {
		if other := got.entries[name]; !reflect.DeepEqual(e, other) {
			t.Errorf("entry\n%+v\nwant\n%+v", other, e)
		}
	}
	if len(want.entries) != len(got.entries) {
		t.Errorf("%d entries, want %d", len(got.entries), len(want.entries))
	}
	if !reflect.DeepEqual(want.commands, got.commands) {
		t.Errorf("commands\n%+v\nwant\n%+v", got.commands, want.commands)
	}
	if !reflect.DeepEqual(want.probes, got.probes) {
		t.Errorf("probes\n%s\nwant\n%s", got.probes, want.probes)
	}
}

func sample(t *testing.T) *Snapshot {
	t.Helper()
	s := New()
	s.Manifest.Time = time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)
	s.Manifest.Version, s.Manifest.Root = "v1.2.3", true
	s.MarkUnreadable("host/etc/shadow", "permission denied")
	s.MarkUnreadable("commands/nft-ruleset", "no answer within 5s")
	s.AddFile("/proc/modules", "nvidia 1 0 - Live 0x0\n")
	s.AddFile("/etc/hosts", "")
	s.AddFile("/sys/firmware/efi/efivars/SecureBoot-8be4df61", "\x06\x00\x00\x00\x01")
	s.AddEntry(Entry{Path: "/dev/nvidia0", Kind: Device, Mode: 0o666, Major: 195})
	s.AddEntry(Entry{Path: "/usr/lib/libcuda.so.1", Kind: Symlink, Target: "/usr/lib/libcuda.so.550.90.07", Time: s.Manifest.Time})
	s.AddEntry(Entry{Path: "/etc/cdi", Kind: Directory, Mode: 0o755})
	s.AddCommand("dmesg", "[ 1.0] hello\n", 0)
	s.AddCommand("ufw-status", "", 1)
	s.AddCommand("killed", "half", -1)
	s.AddProbe(ProbeClock, json.RawMessage(`{"local":"2026-02-03T04:05:06Z"}`))
	s.GPU = &gpu.Report{
		Schema: gpu.ReportSchema, Source: gpu.SourceNVML, Driver: "550.90.07",
		Devices: []gpu.Device{{Index: 0, Name: "NVIDIA A10"}},
	}
	return s
}

func TestSaveLoad(t *testing.T) {
	for _, name := range []string{"dir", "s.tar.gz", "s.tgz"} {
		t.Run(name, func(t *testing.T) {
			want := sample(t)
			at := filepath.Join(t.TempDir(), name)
			if err := want.Save(at); err != nil {
				t.Fatal(err)
			}
			got, err := Load(at)
			if err != nil {
				t.Fatal(err)
			}
			equal(t, want, got)
		})
	}
}

func TestSaveIsDeterministic(t *testing.T) {
	var first, second bytes.Buffer
	if err := sample(t).WriteArchive(&first); err != nil {
		t.Fatal(err)
	}
	if err := sample(t).WriteArchive(&second); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the same snapshot gave two different archives")
	}
}

func TestSaveKeepsToItsOwner(t *testing.T) {
	for _, name := range []string{"s.tar.gz", "dir/manifest.yaml"} {
		at := filepath.Join(t.TempDir(), name)
		target := at
		if filepath.Base(at) == "manifest.yaml" {
			target = filepath.Dir(at)
		}
		if err := sample(t).Save(target); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(at)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o", name, info.Mode().Perm())
		}
		if target != at {
			if err := sample(t).Save(target); err == nil {
				t.Error("wrote into a directory that was not empty")
			}
		}
	}
}
