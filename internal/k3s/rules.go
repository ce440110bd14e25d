package k3s

import (
	"bufio"
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// ruleTable is one table of `iptables-save`.
type ruleTable struct {
	name string
	// chains are those that somebody made; the kernel's own have a policy.
	chains []string
	rules  []rule
}

// rule is one rule as it is printed.
type rule struct {
	chain, text string
	// target is the chain or verdict that it jumps to.
	target string
	// network is the CNI network that its comment names; empty for none.
	network string
}

// cniComment is what the CNI plugins bridge and portmap write into a comment
// (containernetworking/plugins pkg/utils/utils.go).
var cniComment = regexp.MustCompile(`name: \\?"([^"\\]+)\\?" id: `)

// parseRules reads `iptables-save`.
func parseRules(data []byte) ([]ruleTable, error) {
	var out []ruleTable
	lines := bufio.NewScanner(bytes.NewReader(data))
	const longest = 1 << 20
	lines.Buffer(nil, longest)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		switch {
		case line == "" || line[0] == '#' || line == "COMMIT":
			continue
		case line[0] == '*':
			out = append(out, ruleTable{name: line[1:]})
			continue
		case len(out) == 0:
			return nil, fmt.Errorf("reading packet filter rules: %q stands in no table: %w", shown(line), ErrSetting)
		}
		table := &out[len(out)-1]
		if line[0] == ':' {
			fields := strings.Fields(line[1:])
			const policy = 1
			if len(fields) > policy && fields[policy] == "-" {
				table.chains = append(table.chains, fields[0])
			}
			continue
		}
		if r, ok := parseRule(line); ok {
			table.rules = append(table.rules, r)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading packet filter rules: %w", err)
	}
	return out, nil
}

func parseRule(line string) (rule, bool) {
	if line[0] == '[' {
		// Counters, where somebody asked for them.
		_, rest, ok := strings.Cut(line, "] ")
		if !ok {
			return rule{}, false
		}
		line = rest
	}
	text, ok := strings.CutPrefix(line, "-A ")
	if !ok {
		return rule{}, false
	}
	chain, rest, _ := strings.Cut(text, " ")
	r := rule{chain: chain, text: text}
	words := strings.Fields(rest)
	for i, w := range words {
		// A comment can hold anything, but the jump comes behind it.
		if (w == "-j" || w == "-g") && i+1 < len(words) {
			r.target = words[i+1]
		}
	}
	if m := cniComment.FindStringSubmatch(rest); m != nil {
		r.network = m[1]
	}
	return r, chain != ""
}

// ruleOwner says whose rules are whose.
type ruleOwner struct {
	// networks are the CNI networks of this k3s.
	networks []string
	// alone says that no other Kubernetes runs here.
	alone bool
}

// clusterChain says whether kube-proxy, the network policies of k3s or flannel made a
// chain.
func clusterChain(name string) bool {
	return strings.HasPrefix(name, "KUBE-") || strings.HasPrefix(name, "FLANNEL-")
}

// clusterRule says whether they made a rule that stands in a chain of somebody else.
func clusterRule(r rule) bool {
	lower := strings.ToLower(r.text)
	return clusterChain(r.target) || strings.Contains(lower, "flanneld") || strings.Contains(r.text, "kube-router netpol") ||
		strings.Contains(r.text, "rule to explicitly ACCEPT traffic that comply to network policies")
}

// sharedCNI says whether a chain belongs to all CNI networks together.
func sharedCNI(name string) bool {
	return strings.HasPrefix(name, "CNI-HOSTPORT-") || strings.HasPrefix(name, "CNI-ISOLATION-") || name == "CNI-ADMIN" || name == "CNI-FORWARD"
}

// beside says whether podman or nerdctl have networks of their own here. Then the
// chains that all networks share stay, in every table.
func (o ruleOwner) beside(tables []ruleTable) bool {
	return slices.ContainsFunc(tables, func(t ruleTable) bool {
		return slices.ContainsFunc(t.rules, func(r rule) bool { return r.network != "" && !slices.Contains(o.networks, r.network) })
	})
}

// ownChains picks the chains to remove from a table.
func (o ruleOwner) ownChains(t ruleTable, foreign bool) []string {
	ofNetwork := map[string]string{}
	for _, r := range t.rules {
		if r.network != "" && strings.HasPrefix(r.target, "CNI-") {
			ofNetwork[r.target] = r.network
		}
		if r.network != "" && strings.HasPrefix(r.chain, "CNI-") && !sharedCNI(r.chain) {
			ofNetwork[r.chain] = r.network
		}
	}
	var out []string
	for _, name := range t.chains {
		switch {
		case clusterChain(name):
			if o.alone {
				out = append(out, name)
			}
		case !strings.HasPrefix(name, "CNI-"):
		case sharedCNI(name):
			if !foreign {
				out = append(out, name)
			}
		case slices.Contains(o.networks, ofNetwork[name]) || ofNetwork[name] == "" && !foreign:
			out = append(out, name)
		}
	}
	return out
}

// removal is what goes from one table.
type removal struct {
	table  string
	chains []string
	rules  []rule
}

// removals says what goes, table by table; tables with nothing of ours are not named.
func (o ruleOwner) removals(tables []ruleTable) []removal {
	var out []removal
	foreign := o.beside(tables)
	for _, t := range tables {
		own := o.ownChains(t, foreign)
		r := removal{table: t.name, chains: own}
		for _, rule := range t.rules {
			if slices.Contains(own, rule.chain) {
				continue
			}
			if slices.Contains(own, rule.target) || o.alone && clusterRule(rule) || rule.network != "" && slices.Contains(o.networks, rule.network) {
				r.rules = append(r.rules, rule)
			}
		}
		if len(r.chains)+len(r.rules) > 0 {
			out = append(out, r)
		}
	}
	return out
}

// script is the input for `iptables-restore --noflush` that takes just that away:
// nothing is written back that somebody else may have changed meanwhile, no counter is
// lost, and each table changes in one step.
func script(removals []removal) []byte {
	var b bytes.Buffer
	for _, r := range removals {
		fmt.Fprintf(&b, "*%s\n", r.table)
		// Naming a chain that is there empties it.
		for _, chain := range r.chains {
			fmt.Fprintf(&b, ":%s - [0:0]\n", chain)
		}
		for _, rule := range r.rules {
			fmt.Fprintf(&b, "-D %s\n", rule.text)
		}
		for _, chain := range r.chains {
			fmt.Fprintf(&b, "-X %s\n", chain)
		}
		b.WriteString("COMMIT\n")
	}
	return b.Bytes()
}

// ownSets picks the sets of `ipset list -name` that the network policies made.
func ownSets(list string, o ruleOwner) []string {
	var out []string
	for line := range strings.Lines(list) {
		name := strings.TrimSpace(line)
		bare := strings.TrimPrefix(name, "inet6:")
		if o.alone && (strings.HasPrefix(bare, "KUBE-") || strings.HasPrefix(bare, "kube-router-")) {
			out = append(out, name)
		}
	}
	return out
}

// nftTable is a table of nftables.
type nftTable struct{ family, name string }

// ownTables picks the tables of `nft list tables` that kube-proxy and flannel make
// where they don't go by way of iptables.
func ownTables(list string, o ruleOwner) []nftTable {
	var out []nftTable
	for line := range strings.Lines(list) {
		fields := strings.Fields(line)
		const words = 3
		if len(fields) != words || fields[0] != "table" || !o.alone {
			continue
		}
		if slices.Contains([]string{"kube-proxy", "flannel-ipv4", "flannel-ipv6"}, fields[2]) {
			out = append(out, nftTable{family: fields[1], name: fields[2]})
		}
	}
	return out
}
