// Package packages makes the .deb and the .rpm of a release from one description,
// packaging/nfpm.yaml. It knows no compiler and no licences: what goes in lies there
// already.
package packages

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/goreleaser/nfpm/v2"
	// Each format registers itself under its name.
	_ "github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
	_ "github.com/goreleaser/nfpm/v2/rpm"
)

// Options say which packages are made of what.
type Options struct {
	// Description is the file in nfpm's format; the names in it that look like $NAME are
	// Variables.
	Description string
	Variables   map[string]string
	Formats     []string
	// Time is what every file in a package is dated with.
	Time time.Time
	Out  string
}

// Write makes one package of each format and returns their files.
func Write(o Options) ([]string, error) {
	var written []string
	for _, format := range o.Formats {
		file, err := write(o, format)
		if err != nil {
			return written, fmt.Errorf("packaging as %s: %w", format, err)
		}
		written = append(written, file)
	}
	return written, nil
}

func write(o Options, format string) (string, error) {
	var missing []string
	config, err := nfpm.ParseFileWithEnvMapping(o.Description, func(name string) string {
		value, ok := o.Variables[name]
		// nfpm asks for pass phrases of keys, too; packages here are not signed one by one.
		if !ok && !strings.HasPrefix(name, "NFPM_") {
			missing = append(missing, name)
		}
		return value
	})
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", o.Description, err)
	}
	if len(missing) > 0 {
		return "", fmt.Errorf("%s names variables that aren't known: %s", o.Description, strings.Join(missing, ", "))
	}
	packager, err := nfpm.Get(format)
	if err != nil {
		return "", err
	}
	info, err := config.Get(format)
	if err != nil {
		return "", err
	}
	info = nfpm.WithDefaults(info)
	info.MTime = o.Time
	// What nfpm would take from the machine it runs on.
	info.RPM.BuildHost = "llmbox"
	for _, content := range info.Contents {
		if content.FileInfo == nil {
			content.FileInfo = &files.ContentFileInfo{}
		}
		content.FileInfo.MTime = o.Time
	}
	info.Target = filepath.Join(o.Out, packager.ConventionalFileName(info))
	return info.Target, whole(info.Target, func(w io.Writer) error { return packager.Package(info, w) })
}

// whole leaves the file complete, or not there.
func whole(path string, fill func(io.Writer) error) error {
	file, err := os.CreateTemp(filepath.Dir(path), ".package-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(file.Name()) }()
	if err := errors.Join(fill(file), file.Chmod(0o644), file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}
