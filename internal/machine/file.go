package machine

import (
	"bytes"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// writeFile puts a small file in place.
func writeFile(at string, mode fs.FileMode, content []byte) error {
	return place(at, mode, func(w io.Writer) error {
		_, err := io.Copy(w, bytes.NewReader(content))
		return err
	})
}

// place puts a file in place all at once: nobody sees half of it, not even after a
// power cut, and what a run that was cut off left is written over by the next.
func place(at string, mode fs.FileMode, fill func(io.Writer) error) (err error) {
	dir := filepath.Dir(at)
	if err := makeDir(dir); err != nil {
		return err
	}
	temporary := filepath.Join(dir, ".llmbox."+filepath.Base(at))
	// #nosec G302,G304 -- it gets its own mode below
	file, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, secretMode)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = file.Close()
			_ = os.Remove(temporary)
		}
	}()
	if err = fill(file); err != nil {
		return err
	}
	if err = file.Chmod(mode); err != nil {
		return err
	}
	if err = file.Sync(); err != nil {
		return err
	}
	if err = file.Close(); err != nil {
		return err
	}
	if err = os.Rename(temporary, at); err != nil {
		return err
	}
	parent, err := os.Open(dir) // #nosec G304 -- the directory that was just written to
	if err != nil {
		return err
	}
	defer func() { _ = parent.Close() }()
	return parent.Sync()
}
