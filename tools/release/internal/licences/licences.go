// Package licences finds the licence of each module that is linked into a binary, refuses
// what nobody has allowed, and writes the report that goes with a release. It reads
// licence files only: no list on a server is asked.
package licences

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/google/licensecheck"

	"github.com/llmbox-dev/llmbox/tools/release/internal/inventory"
)

// Allowed are the licences under which something may be part of the binary, by SPDX
// identifier. All let an Apache-2.0 binary be handed out; MPL-2.0 asks that changed files
// of it stay open, and none is changed here.
func Allowed() []string {
	return []string{"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MPL-2.0", "Unicode-DFS-2016", "Unlicense", "Zlib"}
}

// enough is the share of a file, in per cent, that has to be the text of known licences.
// What remains is names of holders, addresses and the like.
const enough = 75

var (
	licenceName = regexp.MustCompile(`(?i)^(licen[cs]e|copying|unlicense)([.-].*)?$`)
	// What is for documentation alone is not in a binary.
	docsName   = regexp.MustCompile(`(?i)[.-]docs?$`)
	noticeName = regexp.MustCompile(`(?i)^(notice|patents?|copyright)([.-].*)?$`)
)

// notLinked are texts beside linked packages that are about something else, with the reason.
func notLinked() map[string]string {
	return map[string]string{
		"std src/crypto/internal/boring/LICENSE": "BoringCrypto's object files: linked with GOEXPERIMENT=boringcrypto alone",
	}
}

// File is one text that has to travel with the binary.
type File struct {
	// Name is relative to the module.
	Name string
	Text string
	// IDs are the licences it holds; none for a notice.
	IDs []string
}

// Licence is what was found for a module.
type Licence struct {
	Module inventory.Module
	IDs    []string
	Files  []File
}

// Expression is the SPDX expression that holds for all of the module's linked packages.
func (l Licence) Expression() string { return strings.Join(l.IDs, " AND ") }

// Of reads the licence files of a module: those beside its linked packages and those above
// them, up to the module's own directory.
func Of(source inventory.Source) (Licence, error) {
	out := Licence{Module: source.Module}
	files, err := textsOf(source)
	if err != nil {
		return out, err
	}
	var problems []error
	for _, file := range files {
		if licenceName.MatchString(filepath.Base(file.Name)) {
			file.IDs, err = classify(file.Text)
			if err != nil {
				problems = append(problems, fmt.Errorf("%s: %w", file.Name, err))
			}
			out.IDs = append(out.IDs, file.IDs...)
		}
		out.Files = append(out.Files, file)
	}
	slices.Sort(out.IDs)
	out.IDs = slices.Compact(out.IDs)
	if len(out.IDs) == 0 && len(problems) == 0 {
		problems = append(problems, errors.New("it has no licence file"))
	}
	for _, id := range out.IDs {
		if !slices.Contains(Allowed(), id) {
			problems = append(problems, fmt.Errorf("%s is not among the licences that are allowed", id))
		}
	}
	if len(problems) > 0 {
		return out, fmt.Errorf("%s %s: %w", source.Path, source.Version, errors.Join(problems...))
	}
	return out, nil
}

// textsOf lists the files once each, the module's own directory first.
func textsOf(source inventory.Source) ([]File, error) {
	seen := map[string]bool{}
	var files []File
	for _, dir := range append([]string{source.Dir}, source.Packages...) {
		for within(source.Dir, dir) && !seen[dir] {
			seen[dir] = true
			entries, err := os.ReadDir(dir)
			if err != nil {
				return nil, fmt.Errorf("looking for licences: %w", err)
			}
			for _, entry := range entries {
				name := entry.Name()
				if !entry.Type().IsRegular() || filepath.Ext(name) == ".go" || docsName.MatchString(name) || !licenceName.MatchString(name) && !noticeName.MatchString(name) {
					continue
				}
				text, err := os.ReadFile(filepath.Join(dir, name))
				if err != nil {
					return nil, fmt.Errorf("reading a licence: %w", err)
				}
				relative, err := filepath.Rel(source.Dir, filepath.Join(dir, name))
				if err != nil {
					return nil, err
				}
				if notLinked()[source.Path+" "+filepath.ToSlash(relative)] != "" {
					continue
				}
				files = append(files, File{Name: filepath.ToSlash(relative), Text: strings.ReplaceAll(string(text), "\r\n", "\n")})
			}
			dir = filepath.Dir(dir)
		}
	}
	slices.SortFunc(files, func(a, b File) int {
		return cmp.Or(cmp.Compare(strings.Count(a.Name, "/"), strings.Count(b.Name, "/")), cmp.Compare(a.Name, b.Name))
	})
	return files, nil
}

func within(base, dir string) bool {
	return base != "" && (dir == base || strings.HasPrefix(dir, base+string(filepath.Separator)))
}

func classify(text string) ([]string, error) {
	found := licensecheck.Scan([]byte(text))
	var ids []string
	for _, match := range found.Match {
		// "Licensed under …" with an address is a pointer to a text, not one.
		if !match.IsURL {
			ids = append(ids, match.ID)
		}
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	if len(ids) == 0 || found.Percent < enough {
		return ids, fmt.Errorf("%.0f%% of it is the text of a licence that is known (%s)", found.Percent, strings.Join(ids, ", "))
	}
	return ids, nil
}

// All reads the licences of every module and names every one that can't be allowed.
func All(sources []inventory.Source) ([]Licence, error) {
	var out []Licence
	var problems []error
	for _, source := range sources {
		licence, err := Of(source)
		if err != nil {
			problems = append(problems, err)
		}
		out = append(out, licence)
	}
	return out, errors.Join(problems...)
}

// Report writes the list and every text once, with the modules that it belongs to.
func Report(w io.Writer, title string, licences []Licence) error {
	var out strings.Builder
	fmt.Fprintf(&out, "%s\n\nThe program contains the modules below, each under its own licence; the texts and\nnotices follow, each once, with the modules that it came with.\n\n", title)
	table := tabwriter.NewWriter(&out, 0, 4, 2, ' ', 0)
	for _, one := range licences {
		_, _ = fmt.Fprintf(table, "%s\t%s\t%s\n", one.Module.Path, one.Module.Version, one.Expression())
	}
	if err := table.Flush(); err != nil {
		return err
	}
	type text struct {
		file  File
		owner []string
	}
	var order [][32]byte
	texts := map[[32]byte]*text{}
	for _, one := range licences {
		for _, file := range one.Files {
			key := sha256.Sum256([]byte(strings.TrimSpace(file.Text)))
			if texts[key] == nil {
				texts[key] = &text{file: file}
				order = append(order, key)
			}
			texts[key].owner = append(texts[key].owner, one.Module.Path+" "+one.Module.Version+": "+file.Name)
		}
	}
	for _, key := range order {
		fmt.Fprintf(&out, "\n%s\n%s\n\n%s\n", strings.Repeat("=", 78), strings.Join(texts[key].owner, "\n"), strings.TrimSpace(texts[key].file.Text))
	}
	_, err := io.WriteString(w, out.String())
	return err
}
