// Package inventory says what a Go binary is made of: the modules that its linker wrote
// into it, and where the source of each lies. It judges nothing.
package inventory

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Module is one Go module of a binary.
type Module struct {
	Path    string
	Version string
	// Sum is the module's checksum as in go.sum.
	Sum string
}

// Binary is what can be read from a file.
type Binary struct {
	Name    string
	SHA256  string
	Go      string
	Main    Module
	Package string
	Modules []Module
	// Settings are those of the build, such as GOARCH and vcs.revision.
	Settings map[string]string
}

// ReadBinary reads what the linker noted.
func ReadBinary(file string) (Binary, error) {
	info, err := buildinfo.ReadFile(file)
	if err != nil {
		return Binary{}, fmt.Errorf("reading how %s was built: %w", file, err)
	}
	sum, err := sumOf(file)
	if err != nil {
		return Binary{}, err
	}
	out := Binary{
		Name: filepath.Base(file), SHA256: sum, Go: info.GoVersion, Package: info.Path,
		Main:     Module{Path: info.Main.Path, Version: info.Main.Version},
		Settings: map[string]string{},
	}
	for _, setting := range info.Settings {
		out.Settings[setting.Key] = setting.Value
	}
	for _, dep := range info.Deps {
		// What was linked is the replacement.
		if dep.Replace != nil {
			dep = dep.Replace
		}
		out.Modules = append(out.Modules, Module{Path: dep.Path, Version: dep.Version, Sum: dep.Sum})
	}
	sortModules(out.Modules)
	return out, nil
}

func sumOf(file string) (string, error) {
	in, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer func() { _ = in.Close() }()
	hash := sha256.New()
	if _, err := io.Copy(hash, in); err != nil {
		return "", fmt.Errorf("summing up %s: %w", file, err)
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

func sortModules(modules []Module) {
	slices.SortFunc(modules, func(a, b Module) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Version, b.Version))
	})
}

// Source is a module's source on this machine, and the directories of those of its
// packages that are linked.
type Source struct {
	Module
	Dir      string
	Packages []string
}

// Program is a main package as it is built for one platform.
type Program struct {
	Root    string
	Package string
	Arch    string
	Cgo     bool
}

// Sources asks the go command which packages a program is made of. The standard library
// is the module "std".
func Sources(ctx context.Context, p Program) ([]Source, error) {
	cmd := exec.CommandContext(ctx, "go", "list", "-deps", "-json=ImportPath,Dir,Module,Standard", p.Package)
	cmd.Dir = p.Root
	cgo := "0"
	if p.Cgo {
		cgo = "1"
	}
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH="+p.Arch, "CGO_ENABLED="+cgo)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("listing the packages of %s: %w: %s", p.Package, err, strings.TrimSpace(stderr.String()))
	}
	goroot, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("asking for GOROOT: %w", err)
	}
	return parseList(out, strings.TrimSpace(string(goroot)))
}

type listed struct {
	ImportPath string
	Dir        string
	Standard   bool
	Module     *listedModule
}

type listedModule struct {
	Path, Version, Sum, Dir string
	Main                    bool
	Replace                 *listedModule
}

func parseList(data []byte, goroot string) ([]Source, error) {
	byPath := map[string]*Source{}
	decoder := json.NewDecoder(bytes.NewReader(data))
	for {
		var one listed
		err := decoder.Decode(&one)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("reading go list: %w", err)
		}
		from := one.Module
		switch {
		case one.Standard:
			from = &listedModule{Path: "std", Dir: goroot}
		case from == nil:
			return nil, fmt.Errorf("package %s belongs to no module", one.ImportPath)
		case from.Main:
			continue
		case from.Replace != nil:
			from = from.Replace
		}
		source := byPath[from.Path]
		if source == nil {
			source = &Source{Module: Module{Path: from.Path, Version: from.Version, Sum: from.Sum}, Dir: from.Dir}
			byPath[from.Path] = source
		}
		if one.Dir != "" {
			source.Packages = append(source.Packages, one.Dir)
		}
	}
	sources := make([]Source, 0, len(byPath))
	for _, source := range byPath {
		slices.Sort(source.Packages)
		sources = append(sources, *source)
	}
	slices.SortFunc(sources, func(a, b Source) int { return cmp.Compare(a.Path, b.Path) })
	return sources, nil
}

// Merge makes one list of several programs' sources.
func Merge(lists ...[]Source) []Source {
	byPath := map[string]*Source{}
	for _, list := range lists {
		for _, source := range list {
			known := byPath[source.Path+"@"+source.Version]
			if known == nil {
				source.Packages = slices.Clone(source.Packages)
				byPath[source.Path+"@"+source.Version] = &source
				continue
			}
			known.Packages = append(known.Packages, source.Packages...)
			slices.Sort(known.Packages)
			known.Packages = slices.Compact(known.Packages)
		}
	}
	out := make([]Source, 0, len(byPath))
	for _, source := range byPath {
		out = append(out, *source)
	}
	slices.SortFunc(out, func(a, b Source) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Version, b.Version))
	})
	return out
}

// Missing names the modules of a binary that the sources lack: a report made of them
// would be one about another binary.
func Missing(binary Binary, sources []Source) []string {
	var out []string
	for _, module := range binary.Modules {
		if !slices.ContainsFunc(sources, func(s Source) bool { return s.Path == module.Path && s.Version == module.Version }) {
			out = append(out, module.Path+"@"+module.Version)
		}
	}
	return out
}
