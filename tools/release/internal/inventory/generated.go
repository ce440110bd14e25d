package inventory

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// crdSource is the annotation that every embedded CustomResourceDefinition carries.
var crdSource = regexp.MustCompile(`(?m)^ +llmbox\.dev/crd-source: "?([^@\s"]+)@([^\s"]+)"?$`)

// Generated lists the modules from whose types the embedded CustomResourceDefinitions
// were made: data in the binary that no linker knows of.
func Generated(ctx context.Context, dir string) ([]Source, error) {
	seen := map[string]bool{}
	var out []Source
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".yaml" {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		found := crdSource.FindSubmatch(data)
		if found == nil {
			return fmt.Errorf("%s doesn't say what it was made from", path)
		}
		module := Module{Path: string(found[1]), Version: string(found[2])}
		if seen[module.Path+"@"+module.Version] {
			return nil
		}
		seen[module.Path+"@"+module.Version] = true
		source, err := download(ctx, module)
		out = append(out, source)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("looking at the embedded CRDs: %w", err)
	}
	return Merge(out), nil
}

func download(ctx context.Context, module Module) (Source, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module.Path+"@"+module.Version)
	// Outside any module: the version is given.
	cmd.Dir = os.TempDir()
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOWORK=off")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	data, err := cmd.Output()
	if err != nil {
		return Source{}, fmt.Errorf("getting %s@%s: %w: %s", module.Path, module.Version, err, strings.TrimSpace(stderr.String()))
	}
	var answer struct{ Dir, Sum string }
	if err := json.Unmarshal(data, &answer); err != nil {
		return Source{}, fmt.Errorf("reading what go mod download says of %s: %w", module.Path, err)
	}
	module.Sum = answer.Sum
	return Source{Module: module, Dir: answer.Dir, Packages: []string{answer.Dir}}, nil
}
