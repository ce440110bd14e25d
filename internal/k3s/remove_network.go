package k3s

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/llmbox-dev/llmbox/internal/host"
)

// networks are the CNI networks of this k3s: the ones of its configuration, which may
// be gone already, and the name that k3s always gives.
func (d *remover) networks(ctx context.Context) []string {
	out := []string{flannelNetwork}
	found, _, err := d.m.files.Glob(ctx, path.Join(d.b.dataDir, "agent/etc/cni/net.d/*"))
	if err != nil {
		return out
	}
	for _, name := range found {
		data, present, err := d.m.read(ctx, name)
		if err != nil || !present {
			continue
		}
		// JSON is YAML.
		var c struct {
			Name string `yaml:"name"`
		}
		if yaml.Unmarshal(data, &c) == nil && c.Name != "" && !slices.Contains(out, c.Name) {
			out = append(out, c.Name)
		}
	}
	return out
}

const netnsDir = "/run/netns"

// lookNamespaces finds the network namespaces of pods: those that the state of our
// networks names, and those that no process is in any more. Podman and nerdctl name
// theirs alike.
func (d *remover) lookNamespaces(ctx context.Context) (findings, error) {
	names, err := d.m.files.List(ctx, netnsDir)
	if err != nil {
		if absent(err) {
			return findings{}, nil
		}
		return findings{}, fmt.Errorf("listing network namespaces: %w", err)
	}
	named := d.namespacesOfState(ctx)
	used := map[uint64]bool{}
	all, err := d.m.kernel.Processes(ctx)
	if err != nil {
		return findings{}, err
	}
	for _, p := range all {
		used[p.NetNS] = true
	}
	var out findings
	for _, name := range names {
		if !strings.HasPrefix(name, "cni-") {
			continue
		}
		at := path.Join(netnsDir, name)
		inode, err := d.m.kernel.NetNSOf(ctx, at)
		if err == nil && used[inode] && !named[name] {
			out.stays = append(out.stays, at+": somebody else's processes are in it")
			continue
		}
		out.finds = append(out.finds, at)
	}
	dirs, err := d.lookNamespacesDir(ctx, out.finds)
	out.finds = append(out.finds, dirs...)
	return out, err
}

// namespacesOfState reads libcni's cache: which namespace each pod of our networks had.
func (d *remover) namespacesOfState(ctx context.Context) map[string]bool {
	out := map[string]bool{}
	for _, network := range d.networks(ctx) {
		found, _, err := d.m.files.Glob(ctx, path.Join(cniResults, network+"-*"))
		if err != nil {
			continue
		}
		for _, name := range found {
			data, _, err := d.m.read(ctx, name)
			if err != nil {
				continue
			}
			var c struct {
				NetNS string `yaml:"netns"`
			}
			if yaml.Unmarshal(data, &c) == nil && c.NetNS != "" {
				out[path.Base(c.NetNS)] = true
			}
		}
	}
	return out
}

func (d *remover) removeNamespaces(ctx context.Context, finds []string) error {
	var errs []error
	for _, at := range finds {
		if at == netnsDir {
			errs = append(errs, d.m.removeEmpty(at))
			continue
		}
		if err := d.m.kernel.Unmount(ctx, at, true); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, d.m.remove(ctx, at))
	}
	return errors.Join(errs...)
}

// lookLinks finds the links of flannel, and the bridge with what is plugged into it.
func (d *remover) lookLinks(ctx context.Context) (findings, error) {
	const dir = "/sys/class/net"
	names, err := d.m.files.List(ctx, dir)
	if err != nil {
		if absent(err) {
			return findings{}, nil
		}
		return findings{}, fmt.Errorf("listing links: %w", err)
	}
	own := []string{"cni0", "flannel.1", "flannel-v6.1", "flannel-wg", "flannel-wg-v6", "kube-ipvs0"}
	var ports, links findings
	for _, name := range names {
		if slices.Contains(own, name) {
			links.finds = append(links.finds, name)
			continue
		}
		master, err := d.m.files.Readlink(ctx, path.Join(dir, name, "master"))
		if err == nil && path.Base(master) == "cni0" && strings.HasPrefix(name, "veth") {
			ports.finds = append(ports.finds, name)
		}
	}
	all := findings{finds: slices.Concat(ports.finds, links.finds)}
	if !d.b.alone {
		for _, name := range all.finds {
			all.stays = append(all.stays, name+": "+d.othersHere())
		}
		all.finds = nil
	}
	return all, nil
}

func (d *remover) othersHere() string {
	return "another Kubernetes is here (" + brief(d.o.Others) + ")"
}

func (d *remover) removeLinks(ctx context.Context, finds []string) error {
	var errs []error
	for _, name := range finds {
		_, err := d.m.command(ctx, linkDeadline, "ip", "link", "delete", name)
		var failed *CommandError
		if errors.As(err, &failed) && !d.m.exists(ctx, "/sys/class/net/"+name) {
			// Its other end was gone, and so it went by itself.
			err = nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// tools are where programs for the packet filter are: the host's first, then k3s's own.
func (d *remover) tools() []string {
	dirs := slices.Clone(host.SearchPath())
	for _, dir := range []string{"data/current/bin", "data/current/bin/aux"} {
		dirs = append(dirs, d.m.at(path.Join(d.b.dataDir, dir)))
	}
	return dirs
}

// tool runs one of them; present is false where there is none.
func (d *remover) tool(ctx context.Context, program string, args ...string) (output []byte, present bool, err error) {
	const most = 16 << 20
	result, err := d.m.run.Run(ctx, host.Command{Program: program, Args: args, Directories: d.tools(), Deadline: linkDeadline, Limit: most})
	switch {
	case errors.Is(err, host.ErrNotInstalled):
		return nil, false, nil
	case err != nil:
		return nil, true, fmt.Errorf("running %s: %w", program, err)
	case result.Exit != 0:
		return nil, true, &CommandError{Argv: append([]string{program}, args...), Exit: result.Exit, Said: lastLine(string(result.Output))}
	case result.Truncated:
		return nil, true, fmt.Errorf("running %s: %w", program, host.ErrTooLarge)
	}
	return result.Output, true, nil
}

// families are the forms of iptables: both can hold rules at the same time.
func families() [][]string {
	return [][]string{{"iptables-nft", "iptables-legacy", "iptables"}, {"ip6tables-nft", "ip6tables-legacy", "ip6tables"}}
}

// eachFilter calls do for every form of iptables that is there.
func (d *remover) eachFilter(ctx context.Context, do func(name string, removals []removal) error) error {
	owner := ruleOwner{networks: d.networks(ctx), alone: d.b.alone}
	for _, family := range families() {
		special := false
		for _, name := range family {
			plain := !strings.Contains(name, "-")
			if plain && special {
				// It is one of those that were asked by name.
				continue
			}
			data, present, err := d.tool(ctx, name+"-save")
			if !present {
				continue
			}
			special = true
			var failed *CommandError
			if errors.As(err, &failed) {
				// A kernel without that form has no rules in it.
				continue
			}
			if err != nil {
				return err
			}
			tables, err := parseRules(onlyRules(data))
			if err != nil {
				return err
			}
			if err := do(name, owner.removals(tables)); err != nil {
				return err
			}
		}
	}
	return nil
}

// onlyRules leaves out what a program says beside its output.
func onlyRules(data []byte) []byte {
	if i := bytes.IndexByte(data, '*'); i > 0 {
		return data[i:]
	}
	if bytes.IndexByte(data, '*') < 0 {
		return nil
	}
	return data
}

func (d *remover) lookRules(ctx context.Context) (findings, error) {
	var out findings
	err := d.eachFilter(ctx, func(name string, removals []removal) error {
		for _, r := range removals {
			out.finds = append(out.finds, fmt.Sprintf("%s %s: %d chains, %d rules", name, r.table, len(r.chains), len(r.rules)))
		}
		return nil
	})
	if err != nil {
		return findings{}, err
	}
	owner := ruleOwner{alone: d.b.alone}
	if list, present, err := d.tool(ctx, "ipset", "list", "-name"); present && err == nil {
		if sets := ownSets(string(list), owner); len(sets) > 0 {
			out.finds = append(out.finds, fmt.Sprintf("%d IP sets", len(sets)))
		}
	}
	if list, present, err := d.tool(ctx, "nft", "list", "tables"); present && err == nil {
		for _, t := range ownTables(string(list), owner) {
			out.finds = append(out.finds, "nft table "+t.family+" "+t.name)
		}
	}
	for _, t := range d.emptyTables(ctx) {
		out.finds = append(out.finds, "empty nft table "+t.family+" "+t.name)
	}
	if !d.b.alone {
		out.stays = append(out.stays, "rules of KUBE-* and FLANNEL-*: "+d.othersHere())
	}
	return out, nil
}

func (d *remover) removeRules(ctx context.Context, _ []string) error {
	err := d.eachFilter(ctx, func(name string, removals []removal) error {
		if len(removals) == 0 {
			return nil
		}
		file := path.Join(supervisorDir, "k3s-rules")
		if err := d.m.write(ctx, file, secretMode, script(removals)); err != nil {
			return err
		}
		_, _, err := d.tool(ctx, name+"-restore", "--noflush", d.m.at(file))
		return errors.Join(err, d.m.remove(ctx, file))
	})
	owner := ruleOwner{alone: d.b.alone}
	if list, present, listing := d.tool(ctx, "ipset", "list", "-name"); present && listing == nil {
		for _, name := range ownSets(string(list), owner) {
			_, _, destroying := d.tool(ctx, "ipset", "destroy", name)
			err = errors.Join(err, destroying)
		}
	}
	if list, present, listing := d.tool(ctx, "nft", "list", "tables"); present && listing == nil {
		// What is empty is empty only now that the rules are gone.
		for _, t := range append(ownTables(string(list), owner), d.emptyTables(ctx)...) {
			_, _, deleting := d.tool(ctx, "nft", "delete", "table", t.family, t.name)
			err = errors.Join(err, deleting)
		}
	}
	return err
}

func (d *remover) lookCNI(ctx context.Context) (findings, error) {
	const dir = "/var/lib/cni"
	var names []string
	for _, network := range d.networks(ctx) {
		names = append(names, path.Join(dir, "networks", network))
		found, _, err := d.m.files.Glob(ctx, path.Join(cniResults, network+"-*"))
		if err != nil {
			return findings{}, err
		}
		names = append(names, found...)
	}
	loopback, err := d.loopbackResults(ctx)
	if err != nil {
		return findings{}, err
	}
	names = append(names, loopback...)
	names = append(names, path.Join(dir, "flannel"))
	out := findings{finds: d.there(ctx, names...)}
	// Old forms of k3s put a link where other programs look.
	const link = "/etc/cni/net.d/10-flannel.conflist"
	if to, err := d.m.files.Readlink(ctx, link); err == nil && within(to, d.b.dataDir) {
		out.finds = append(out.finds, link)
	}
	out.finds = append(out.finds, d.empty(ctx, out.finds, path.Join(dir, "networks"), cniResults, dir)...)
	if !d.b.alone && len(out.finds) > 0 {
		return findings{stays: []string{brief(out.finds) + ": " + d.othersHere()}}, nil
	}
	return out, nil
}
