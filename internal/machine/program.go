package machine

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// keepers are directories in which a program stays: what lies elsewhere may be a
// download that somebody deletes, and the service needs llmbox at each start.
func keepers() []string { return []string{"/usr/local/bin", "/usr/local/sbin", "/usr/bin", "/opt"} }

// Program is where llmbox stays on a machine with that data directory.
func (h *Host) Program(data string) string {
	for _, dir := range keepers() {
		if strings.HasPrefix(h.o.Executable, dir+"/") {
			return h.o.Executable
		}
	}
	return path.Join(data, "bin", "llmbox")
}

// ensureProgram puts the running llmbox where it stays and says whether that changed
// anything.
func (h *Host) ensureProgram(data string) (program string, changed bool, err error) {
	program = h.Program(data)
	at := h.at(program)
	if program == h.o.Executable && h.o.Root == "/" {
		return program, false, nil
	}
	mine, err := sumOf(h.o.Executable)
	if err != nil {
		return program, false, fmt.Errorf("reading the own binary: %w", err)
	}
	theirs, err := sumOf(at)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return program, false, fmt.Errorf("reading %s: %w", program, err)
	}
	if err == nil && bytes.Equal(mine, theirs) {
		return program, false, nil
	}
	err = place(at, programMode, func(w io.Writer) error {
		self, err := os.Open(h.o.Executable)
		if err != nil {
			return err
		}
		defer func() { _ = self.Close() }()
		_, err = io.Copy(w, self)
		return err
	})
	if err != nil {
		return program, false, fmt.Errorf("putting llmbox into %s: %w", filepath.Dir(program), err)
	}
	return program, true, nil
}

func sumOf(at string) ([]byte, error) {
	file, err := os.Open(at) // #nosec G304 -- llmbox's own binary
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	hash := sha256.New()
	if _, err := io.Copy(hash, file); err != nil {
		return nil, err
	}
	return hash.Sum(nil), nil
}
