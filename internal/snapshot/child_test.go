package snapshot

import (
	"io/fs"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// child runs TestLocks again in a process of its own until the test ends: locks of
// one's own process are never seen as held.
func child(t *testing.T, environment string) int {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestLocks$") // #nosec G204 -- this program
	cmd.Env = append(os.Environ(), environment)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd.Process.Pid
}

func identity(t *testing.T, info fs.FileInfo) (device, inode uint64) {
	t.Helper()
	raw, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		t.Fatalf("a status of the kind %T", info.Sys())
	}
	return raw.Dev, raw.Ino
}
