// Package size says which modules a binary's bytes belong to, from its symbols: build it
// without -s for that.
package size

import (
	"cmp"
	"debug/elf"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// Row is the bytes of one owner.
type Row struct {
	Owner      string
	Code, Data uint64
}

// ByModule sums up the symbols of each module; what no symbol is for comes by section.
func ByModule(file string, modules []string) ([]Row, error) {
	binary, err := elf.Open(file)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", file, err)
	}
	defer func() { _ = binary.Close() }()
	symbols, err := binary.Symbols()
	if err != nil {
		return nil, fmt.Errorf("reading the symbols of %s: %w", file, err)
	}
	rows := map[string]*Row{}
	row := func(owner string) *Row {
		if rows[owner] == nil {
			rows[owner] = &Row{Owner: owner}
		}
		return rows[owner]
	}
	known := make([]uint64, len(binary.Sections))
	for _, symbol := range symbols {
		at := int(symbol.Section)
		if at >= len(binary.Sections) || symbol.Size == 0 {
			continue
		}
		section := binary.Sections[at]
		// What takes no room in the file is not counted.
		if section.Type == elf.SHT_NOBITS || section.Flags&elf.SHF_ALLOC == 0 || elf.ST_TYPE(symbol.Info) != elf.STT_FUNC && elf.ST_TYPE(symbol.Info) != elf.STT_OBJECT {
			continue
		}
		known[at] += symbol.Size
		owner := row(Owner(symbol.Name, modules))
		if section.Flags&elf.SHF_EXECINSTR != 0 {
			owner.Code += symbol.Size
		} else {
			owner.Data += symbol.Size
		}
	}
	for i, section := range binary.Sections {
		if section.Type != elf.SHT_NOBITS && section.Flags&elf.SHF_ALLOC != 0 && section.Size > known[i] {
			row("(" + section.Name + ", of no single symbol)").Data += section.Size - known[i]
		}
	}
	out := make([]Row, 0, len(rows))
	for _, one := range rows {
		out = append(out, *one)
	}
	slices.SortFunc(out, func(a, b Row) int {
		return cmp.Or(cmp.Compare(b.Code+b.Data, a.Code+a.Data), cmp.Compare(a.Owner, b.Owner))
	})
	return out, nil
}

// Owner is the module that a symbol's package is in.
func Owner(symbol string, modules []string) string {
	name := symbol
	for _, prefix := range []string{"type:.eq.", "type:.hash.", "type:", "go:itab.", "go:struct", "*", "."} {
		name = strings.TrimPrefix(name, prefix)
	}
	name = strings.TrimLeft(name, "*([]")
	best := ""
	for _, module := range modules {
		if len(module) > len(best) && strings.HasPrefix(name, module) && (len(name) == len(module) || strings.ContainsRune("/.%", rune(name[len(module)]))) {
			best = module
		}
	}
	if best != "" {
		return best
	}
	return "std and what the compiler makes"
}

// Write writes the table, owners below the limit in one line.
func Write(w io.Writer, rows []Row, least uint64) error {
	table := tabwriter.NewWriter(w, 0, 4, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(table, "code kB\tdata kB\tall kB\t ")
	var rest, all Row
	for _, row := range rows {
		all.Code += row.Code
		all.Data += row.Data
		if row.Code+row.Data < least {
			rest.Code += row.Code
			rest.Data += row.Data
			continue
		}
		_, _ = fmt.Fprintf(table, "%d\t%d\t%d\t %s\n", row.Code/1000, row.Data/1000, (row.Code+row.Data)/1000, row.Owner)
	}
	_, _ = fmt.Fprintf(table, "%d\t%d\t%d\t %s\n", rest.Code/1000, rest.Data/1000, (rest.Code+rest.Data)/1000, "(everything smaller)")
	_, _ = fmt.Fprintf(table, "%d\t%d\t%d\t %s\n", all.Code/1000, all.Data/1000, (all.Code+all.Data)/1000, "all")
	return table.Flush()
}
