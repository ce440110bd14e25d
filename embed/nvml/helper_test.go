package nvmlhelper

import (
	"bytes"
	"debug/elf"
	"runtime"
	"testing"
)

// Whatever the build put here must be a program for the machine the binary is for; a
// clone has none.
func TestHelper(t *testing.T) {
	data := Helper()
	if data == nil {
		t.Logf("this build carries no NVML helper for %s", runtime.GOARCH)
		return
	}
	file, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	machines := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	if file.Type != elf.ET_EXEC && file.Type != elf.ET_DYN || file.Machine != machines[runtime.GOARCH] {
		t.Errorf("a file of type %s for %s, want a program for %s", file.Type, file.Machine, runtime.GOARCH)
	}
}
