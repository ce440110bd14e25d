package k3sserver

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// brought are the programs that k3s unpacks under its data directory. Here they are
// copies of the machine's: who looks for leftovers knows containers by this path.
func brought() map[string]string {
	return map[string]string{
		"containerd": "", "containerd-shim-runc-v2": "", "ctr": "", "runc": "",
		"bridge": "/usr/lib/cni", "host-local": "/usr/lib/cni", "loopback": "/usr/lib/cni", "portmap": "/usr/lib/cni",
	}
}

// Stage puts the programs of the server into DATA/data/<hash>/bin, where k3s unpacks
// its own, and returns the copy of this program there. What is staged already stays.
func Stage(dataDir, self string, log Logger) (string, error) {
	in, err := os.Open(self) // #nosec G304 -- this program
	if err != nil {
		return "", fmt.Errorf("extracting data: %w", err)
	}
	sum := sha256.New()
	_, err = io.Copy(sum, in)
	if err = errors.Join(err, in.Close()); err != nil {
		return "", fmt.Errorf("extracting data: %w", err)
	}
	data := filepath.Join(dataDir, "data")
	dir := filepath.Join(data, hex.EncodeToString(sum.Sum(nil)))
	staged := filepath.Join(dir, "bin", "k3s")
	if _, err := os.Stat(staged); err == nil {
		return staged, nil
	}
	if err := os.MkdirAll(data, 0o755); err != nil { // #nosec G301 -- programs are no secret
		return "", fmt.Errorf("extracting data: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(data, ".lock"), os.O_CREATE|os.O_RDWR, 0o600) // #nosec G304 -- in the data directory
	if err != nil {
		return "", fmt.Errorf("extracting data: %w", err)
	}
	defer func() { _ = lock.Close() }()
	log.info("Acquiring lock file %s", lock.Name())
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", fmt.Errorf("extracting data: %w", err)
	}
	if _, err := os.Stat(staged); err == nil {
		return staged, nil
	}
	log.info("Preparing data dir %s", dir)
	tmp := dir + "-tmp"
	if err := os.RemoveAll(tmp); err != nil {
		return "", fmt.Errorf("extracting data: %w", err)
	}
	if err := fill(filepath.Join(tmp, "bin"), self); err != nil {
		return "", fmt.Errorf("extracting data: %w", errors.Join(err, os.RemoveAll(tmp)))
	}
	current := filepath.Join(data, "current")
	if err := os.Rename(current, filepath.Join(data, "previous")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("extracting data: %w", err)
	}
	if err := errors.Join(os.Symlink(dir, current), os.Rename(tmp, dir)); err != nil {
		return "", fmt.Errorf("extracting data: %w", err)
	}
	return staged, nil
}

func fill(bin, self string) error {
	if err := os.MkdirAll(bin, 0o755); err != nil { // #nosec G301 -- programs are no secret
		return err
	}
	if err := copyProgram(self, filepath.Join(bin, "k3s")); err != nil {
		return err
	}
	for name, dir := range brought() {
		from := filepath.Join(dir, name)
		if dir == "" {
			var err error
			if from, err = exec.LookPath(name); err != nil {
				return err
			}
		}
		if err := copyProgram(from, filepath.Join(bin, name)); err != nil {
			return err
		}
	}
	return nil
}

func copyProgram(from, to string) (err error) {
	in, err := os.Open(from) // #nosec G304 -- a fixed list
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o755) // #nosec G302 G304 -- a program
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
