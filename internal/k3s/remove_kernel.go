package k3s

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/host"
)

// settingFile is the file of a kernel setting such as "vm.overcommit_memory".
func settingFile(key string) string {
	return path.Join("/proc/sys", strings.ReplaceAll(key, ".", "/"))
}

// lookBeforeKernel writes down how the kernel is set before the kubelet sets it, and which
// tables of nftables there are before kube-proxy uses any.
func (m *Machine) lookBeforeKernel(ctx context.Context, r *Record) error {
	for key := range protectedSettings() {
		data, present, err := m.read(ctx, settingFile(key))
		if err != nil {
			return err
		}
		if present {
			if r.Kernel == nil {
				r.Kernel = map[string]string{}
			}
			r.Kernel[key] = strings.TrimSpace(string(data))
		}
	}
	result, err := m.run.Run(ctx, host.Command{Program: "nft", Args: []string{"list", "tables"}, Deadline: linkDeadline, Limit: fileLimit})
	if err != nil || result.Exit != 0 {
		// Without nft, or where it may not look, nobody knows, and all of them stay.
		return nil //nolint:nilerr // as above
	}
	r.Tables = append([]string{}, tableNames(string(result.Output))...)
	return nil
}

// lookSettings finds settings of the kernel that are still as the kubelet has set them and
// were otherwise before. One that somebody has changed since is theirs.
func (d *remover) lookSettings(ctx context.Context) (findings, error) {
	var out findings
	for _, key := range slices.Sorted(maps.Keys(d.r.Kernel)) {
		wanted, known := protectedSettings()[key]
		before := d.r.Kernel[key]
		if !known || before == wanted {
			continue
		}
		data, present, err := d.m.read(ctx, settingFile(key))
		if err != nil {
			return findings{}, err
		}
		if !present || strings.TrimSpace(string(data)) != wanted {
			continue
		}
		if d.b.alone {
			out.finds = append(out.finds, key)
		} else {
			out.stays = append(out.stays, fmt.Sprintf("kernel setting %s, which was %s: %s", key, before, d.othersHere()))
		}
	}
	return out, nil
}

func (d *remover) resetSettings(_ context.Context, keys []string) error {
	var errs []error
	for _, key := range keys {
		const mode = 0o644
		// In place: a file of the kernel's can't be replaced.
		if err := os.WriteFile(d.m.at(settingFile(key)), []byte(d.r.Kernel[key]+"\n"), mode); err != nil { // #nosec G306 -- the mode is the kernel's
			errs = append(errs, fmt.Errorf("setting %s back: %w", key, err))
		}
	}
	return errors.Join(errs...)
}

// tableNames are the tables of `nft list tables`, each as "family name".
func tableNames(list string) []string {
	var out []string
	for line := range strings.Lines(list) {
		const words = 3
		if fields := strings.Fields(line); len(fields) == words && fields[0] == "table" {
			out = append(out, fields[1]+" "+fields[2])
		}
	}
	return out
}

// iptablesTables are those that iptables makes in nftables when it is first asked about
// one of them, and has no command to take away again (iptables-nft(8)).
func iptablesTables() []string {
	var out []string
	for _, family := range []string{"ip", "ip6"} {
		for _, name := range []string{"filter", "nat", "mangle", "raw", "security"} {
			out = append(out, family+" "+name)
		}
	}
	return out
}

// emptyTables are those of them that came after llmbox and in which nothing is left.
func (d *remover) emptyTables(ctx context.Context) []nftTable {
	if d.r.Tables == nil || !d.b.alone {
		return nil
	}
	list, present, err := d.tool(ctx, "nft", "list", "tables")
	if !present || err != nil {
		return nil
	}
	var out []nftTable
	for _, table := range tableNames(string(list)) {
		if !slices.Contains(iptablesTables(), table) || slices.Contains(d.r.Tables, table) {
			continue
		}
		family, name, _ := strings.Cut(table, " ")
		if text, _, err := d.tool(ctx, "nft", "list", "table", family, name); err == nil && lets(string(text)) {
			out = append(out, nftTable{family: family, name: name})
		}
	}
	return out
}

// lets says whether a table of `nft list table` has nothing but the kernel's own chains,
// empty ones that let everything through.
func lets(table string) bool {
	for line := range strings.Lines(table) {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || line == "}" || line[0] == '#':
		case strings.HasPrefix(line, "table ") || strings.HasPrefix(line, "chain "):
		case strings.HasPrefix(line, "type ") && strings.Contains(line, " hook ") && strings.HasSuffix(line, "policy accept;"):
		default:
			return false
		}
	}
	// A chain without a hook is somebody's, though it is empty.
	return strings.Count(table, "chain ") == strings.Count(table, " hook ")
}
