package incluster

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// CopySelf copies the running binary to dst, whole or not at all.
func CopySelf(dst string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding the own binary: %w", err)
	}
	return copyExecutable(self, dst)
}

func copyExecutable(src, dst string) (err error) {
	from, err := os.Open(src) // #nosec G304 -- the running binary
	if err != nil {
		return fmt.Errorf("opening the own binary: %w", err)
	}
	defer func() { _ = from.Close() }()
	to, err := os.CreateTemp(filepath.Dir(dst), "."+filepath.Base(dst)+"-*")
	if err != nil {
		return fmt.Errorf("copying the own binary: %w", err)
	}
	defer func() {
		if err != nil {
			_ = to.Close()
			_ = os.Remove(to.Name())
		}
	}()
	if _, err := io.Copy(to, from); err != nil {
		return fmt.Errorf("copying the own binary: %w", err)
	}
	// The container that runs it may have another user.
	if err := to.Chmod(0o755); err != nil { // #nosec G302 -- an executable without secrets
		return fmt.Errorf("making the copy executable: %w", err)
	}
	if err := to.Close(); err != nil {
		return fmt.Errorf("closing the copy: %w", err)
	}
	if err := os.Rename(to.Name(), dst); err != nil {
		return fmt.Errorf("putting the copy in place: %w", err)
	}
	return nil
}
