package snapshot

import (
	"path/filepath"
	"testing"
	"time"
)

// A collection of the machine that runs the test: it must hold what every Linux
// has, keep its promise of time, and survive being stored.
func TestCollectLive(t *testing.T) {
	begin := time.Now()
	s := Collect(t.Context(), Options{Version: "test", Offline: true, DiskPaths: []string{"/var/lib/rancher/k3s"}})
	took := time.Since(begin)
	t.Logf("collected in %s: %d entries, %d files, %d commands, %d probes, unreadable %v",
		took, len(s.entries), len(s.files), len(s.commands), len(s.probes), s.Manifest.Unreadable)
	if took > DefaultTimeout+time.Second {
		t.Errorf("took %s", took)
	}
	if got := s.File("/proc/version"); got.State != Present || got.Data == "" {
		t.Errorf("/proc/version is %s: %s", got.State, got.Why)
	}
	var system System
	if state, why := s.Probe(ProbeSystem, &system); state != Present || system.MemoryBytes == 0 || system.CPUs == 0 {
		t.Errorf("system is %s %s: %+v", state, why, system)
	}
	var disks []Disk
	if state, why := s.Probe(ProbeDisks, &disks); state != Present || len(disks) == 0 {
		t.Fatalf("disks are %s %s", state, why)
	}
	if d := disks[0]; d.Path != "/var/lib/rancher/k3s" || d.MountPoint == "" || d.TotalBytes == 0 || d.Error != "" {
		t.Errorf("disk %+v", d)
	}
	file := filepath.Join(t.TempDir(), "s.tar.gz")
	if err := s.Save(file); err != nil {
		t.Fatal(err)
	}
	got, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, s, got)
}
