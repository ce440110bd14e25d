package preflight

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// The packet whose fate is asked of each firewall is one that a pod sends to the
// machine (the API server, the kubelet) or out through it: new, from an address of the
// pods' network, in through the bridge of the pods. Rules for single ports don't count,
// for pods need more than one.
const podBridge = "cni0"

func judgeFirewall(f Facts) []finding.Finding {
	pods, services := f.podCIDR(), f.serviceCIDR()
	measured, fix, evidence := f.blocking(pods, services)
	if measured != "" {
		return repairable("net.firewall", fail(measured, fix, evidence...))
	}
	ufw, firewalld := f.Command(snapshot.CommandUFW), f.Command(snapshot.CommandFirewallState)
	rules, nft := f.Command(snapshot.CommandIptables), f.Command(snapshot.CommandNft)
	units := f.Command(snapshot.CommandUnits)
	if rules.State != snapshot.Present && nft.State != snapshot.Present && ufw.State != snapshot.Present && firewalld.State != snapshot.Present && units.State != snapshot.Present {
		return unknown("the firewall's rules", cmp.Or(rules.Why, nft.Why, "neither rules nor services could be read"))
	}
	switch {
	case unreadableRules(rules) && unreadableRules(nft):
		return unknown("the firewall's rules", "only root may read them")
	case f.ufwOn() && (ufw.State != snapshot.Present || ufw.Exit != 0):
		return unknown("the rules of ufw, which is on", "only root may read them")
	case firewalld.Trimmed() == "running" && unreadableRules(f.Command(snapshot.CommandFirewallZones)):
		return unknown("the zones of firewalld, which runs", "only root may read them")
	}
	return well("nothing in the way")
}

func unreadableRules(t snapshot.Text) bool {
	return t.State == snapshot.Unreadable || t.State == snapshot.Present && t.Exit != 0
}

// ufwOn says whether ufw is at work, by its own word or by its settings.
func (f Facts) ufwOn() bool {
	ufw := f.Command(snapshot.CommandUFW)
	if ufw.State == snapshot.Present && ufw.Exit == 0 {
		return ufwActive(ufw.Data)
	}
	unit, state := f.Unit("ufw.service")
	return assignments(f.File("/etc/ufw/ufw.conf").Data)["ENABLED"] == "yes" && (state != snapshot.Present || unit.Active == "active")
}

// ufwActive reads the first line of "ufw status"; people send it in their own language
// too.
func ufwActive(status string) bool {
	word, ok := strings.CutPrefix(strings.ToLower(firstLine(status)), "status:")
	return ok && slices.Contains([]string{"active", "aktiv", "actif", "activo", "attivo", "ativo", "actief"}, strings.TrimSpace(word))
}

// blocking looks for a firewall that would drop what pods send: ufw and firewalld by
// their own words, then the rules themselves.
func (f Facts) blocking(pods, services string) (measured, fix string, evidence []finding.Evidence) {
	if ufw := f.Command(snapshot.CommandUFW); ufw.State == snapshot.Present && ufw.Exit == 0 && ufwActive(ufw.Data) {
		if ufwLets(ufw.Lines(), pods) {
			return "", "", nil
		}
		return "ufw active, no allow for " + pods + " and " + services,
			fmt.Sprintf("sudo ufw allow from %s to any && sudo ufw allow from %s to any && sudo ufw reload", pods, services), []finding.Evidence{at(ufw, firstLine(ufw.Data))}
	}
	running := f.Command(snapshot.CommandFirewallState)
	zones := f.Command(snapshot.CommandFirewallZones)
	if running.State == snapshot.Present && running.Trimmed() == "running" {
		if unreadableRules(zones) || f.firewalldLets(zones.Data, pods) {
			return "", "", nil
		}
		return "firewalld active, " + pods + " and " + services + " not in the zone trusted",
			fmt.Sprintf("sudo firewall-cmd --permanent --zone=trusted --add-source=%s --add-source=%s && sudo firewall-cmd --reload", pods, services),
			[]finding.Evidence{at(running, "running")}
	}
	rules := f.Command(snapshot.CommandIptables)
	for _, chain := range []string{"INPUT", "FORWARD"} {
		if line := filterDrops(rules.Lines(), chain, pods); line != "" {
			return "iptables: " + line + ", no accept for " + pods,
				fmt.Sprintf("sudo iptables -I INPUT -s %s -j ACCEPT && sudo iptables -I FORWARD -s %s -j ACCEPT && sudo iptables -I FORWARD -d %s -j ACCEPT (and the same three into /etc/iptables/rules.v4, or they are gone after a boot)", pods, pods, pods),
				[]finding.Evidence{at(rules, line)}
		}
	}
	nft := f.Command(snapshot.CommandNft)
	// Where iptables shows the tables of its own names, they have been judged above.
	shown := rules.State == snapshot.Present && rules.Exit == 0 && strings.Contains(rules.Data, "*filter")
	if table, line := nftDrops(nft.Lines(), pods, shown); table != "" {
		return "nftables: table " + table + " drops what it does not know, no accept for " + pods,
			"Let " + pods + " and " + services + " through in /etc/nftables.conf (ip saddr " + pods + " accept, in input and forward), then: sudo systemctl reload nftables", []finding.Evidence{at(nft, line)}
	}
	return "", "", nil
}

// covers says whether a network or address of a rule holds all of a network.
func covers(rule, network string) bool {
	want, ok := prefixOf(network)
	if !ok {
		return false
	}
	rule = strings.TrimSuffix(rule, ",")
	have, ok := prefixOf(rule)
	if !ok {
		a, err := netip.ParseAddr(rule)
		if err != nil {
			return false
		}
		have = netip.PrefixFrom(a, a.BitLen())
	}
	return have.Bits() <= want.Bits() && have.Contains(want.Addr())
}

// podInterface says whether a rule's interface is the pods' bridge; "cni+" and "cni*"
// stand for all that begin so.
func podInterface(name string) bool {
	name = strings.Trim(name, `",{}`)
	if stem, ok := strings.CutSuffix(strings.ReplaceAll(name, "*", "+"), "+"); ok {
		return strings.HasPrefix(podBridge, stem)
	}
	return name == podBridge
}

// ufwLets reads "ufw status", with or without verbose: the first rule that holds for
// all ports and for pods decides, then the default for what comes in.
func ufwLets(lines []string, pods string) bool {
	incoming := false
	for _, line := range lines {
		if rest, ok := strings.CutPrefix(line, "Default:"); ok {
			incoming = strings.Contains(rest, "allow (incoming)")
			continue
		}
		fields := strings.Fields(line)
		action := slices.IndexFunc(fields, func(w string) bool { return slices.Contains([]string{"ALLOW", "DENY", "REJECT", "LIMIT"}, w) })
		if action < 1 || fields[0] != "Anywhere" || strings.Contains(line, "(v6)") {
			continue
		}
		to, from := fields[:action], fields[action+1:]
		if len(from) > 0 && slices.Contains([]string{"IN", "OUT", "FWD"}, from[0]) {
			if from[0] != "IN" {
				continue
			}
			from = from[1:]
		}
		onBridge := len(to) == 3 && to[1] == "on" && podInterface(to[2])
		if len(to) > 1 && !onBridge || len(from) == 0 {
			continue
		}
		if from[0] == "Anywhere" || covers(from[0], pods) {
			return fields[action] == "ALLOW"
		}
	}
	return incoming
}

// firewalldLets reads "firewall-cmd --list-all-zones": a zone that accepts everything
// and has the pods' network or bridge in it, or is the default one, where what has no
// zone of its own goes.
func (f Facts) firewalldLets(zones, pods string) bool {
	byDefault := assignments(f.File("/etc/firewalld/firewalld.conf").Data)["DefaultZone"]
	name, isDefault, accepts := "", false, false
	for line := range strings.Lines(zones) {
		if strings.TrimSpace(line) == "" {
			continue
		}
		if line[0] != ' ' && line[0] != '\t' {
			name, _, _ = strings.Cut(strings.TrimSpace(line), " ")
			isDefault, accepts = name == byDefault || strings.Contains(line, "default"), name == "trusted"
			continue
		}
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		words := strings.Fields(value)
		switch key {
		case "target":
			accepts = strings.TrimSpace(value) == "ACCEPT"
			if accepts && isDefault {
				return true
			}
		case "sources":
			if accepts && slices.ContainsFunc(words, func(w string) bool { return covers(w, pods) }) {
				return true
			}
		case "interfaces":
			if accepts && slices.ContainsFunc(words, podInterface) {
				return true
			}
		}
	}
	return false
}

// filterRules are the chains of iptables-save's filter table.
type filterRules struct {
	policy map[string]string
	rules  map[string][]string
}

func readFilter(lines []string) filterRules {
	out := filterRules{policy: map[string]string{}, rules: map[string][]string{}}
	in := false
	for _, line := range lines {
		switch {
		case strings.HasPrefix(line, "*"):
			in = strings.TrimSpace(line) == "*filter"
		case !in:
		case strings.HasPrefix(line, ":"):
			if fields := strings.Fields(line[1:]); len(fields) >= 2 {
				out.policy[fields[0]] = fields[1]
			}
		case strings.HasPrefix(line, "-A "):
			chain, rule, _ := strings.Cut(line[len("-A "):], " ")
			out.rules[chain] = append(out.rules[chain], rule)
		}
	}
	return out
}

// filterDrops returns the rule or policy at which a pod's packet ends in a chain; empty
// where it gets through. Docker sets the policy of FORWARD to DROP, and k3s puts its
// own rules before the end, so that alone is harmless.
func filterDrops(lines []string, chain, pods string) string {
	table := readFilter(lines)
	if verdict, line := table.fate(chain, pods, 0); verdict != "" {
		if verdict == "ACCEPT" {
			return ""
		}
		return line
	}
	if chain == "INPUT" && table.policy[chain] == "DROP" {
		return chain + " policy DROP"
	}
	return ""
}

// fate follows a pod's packet through a chain and those that it jumps to.
func (t filterRules) fate(chain, pods string, depth int) (verdict, line string) {
	const deepest = 12
	if depth > deepest {
		return "", ""
	}
	for _, rule := range t.rules[chain] {
		target, holds := ruleFor(strings.Fields(rule), pods)
		if !holds {
			continue
		}
		switch target {
		case "ACCEPT", "DROP", "REJECT":
			return target, "-A " + chain + " " + rule
		case "RETURN":
			return "", ""
		}
		if _, ok := t.rules[target]; ok {
			if verdict, line := t.fate(target, pods, depth+1); verdict != "" {
				return verdict, line
			}
		}
	}
	return "", ""
}

// ruleFor reads a rule: its target, and whether it surely holds for a pod's packet.
// What is not understood does not hold.
func ruleFor(words []string, pods string) (target string, holds bool) {
	for i := 0; i < len(words); i++ {
		value := ""
		if i+1 < len(words) {
			value = words[i+1]
		}
		switch words[i] {
		case "-j", "-g":
			target = value
			// What follows are the target's own options.
			return target, true
		case "-m":
			if !slices.Contains([]string{"comment", "state", "conntrack"}, value) {
				return "", false
			}
		case "--comment":
			if strings.HasPrefix(value, `"`) {
				for i+1 < len(words) && (!strings.HasSuffix(words[i+1], `"`) || words[i+1] == `"`) {
					i++
				}
			}
		case "-s":
			if !covers(value, pods) {
				return "", false
			}
		case "-i":
			if !podInterface(value) {
				return "", false
			}
		case "--state", "--ctstate":
			if !slices.Contains(strings.Split(value, ","), "NEW") {
				return "", false
			}
		default:
			return "", false
		}
		i++
	}
	return "", false
}

// nftChain is one chain of a table.
type nftChain struct {
	hook, policy string
	rules        []string
}

// nftDrops returns a table whose input or forward hook drops a pod's packet, by a rule
// or by policy. An accept in another table does not help against it. The tables that
// firewalld and iptables keep for themselves are left out.
func nftDrops(lines []string, pods string, iptablesShown bool) (table, line string) {
	current := ""
	chains := map[string]*nftChain{}
	var chain *nftChain
	check := func() (string, string) {
		own := iptablesShown && slices.Contains([]string{"ip filter", "ip nat", "ip mangle", "ip raw"}, current)
		if own || current == "inet firewalld" || !strings.HasPrefix(current, "ip ") && !strings.HasPrefix(current, "inet ") {
			return "", ""
		}
		for _, hook := range []string{"input", "forward"} {
			for _, c := range chains {
				if c.hook != hook {
					continue
				}
				verdict, rule := nftFate(chains, c, pods, 0)
				if verdict == "" && c.policy == "drop" {
					verdict, rule = "drop", "hook "+hook+" policy drop"
				}
				if verdict == "drop" {
					return current, rule
				}
			}
		}
		return "", ""
	}
	for _, l := range lines {
		trimmed := strings.TrimSpace(l)
		if rest, ok := strings.CutPrefix(trimmed, "table "); ok {
			if t, found := check(); t != "" {
				return t, found
			}
			current, chains, chain = strings.TrimSpace(strings.TrimSuffix(rest, "{")), map[string]*nftChain{}, nil
			continue
		}
		if rest, ok := strings.CutPrefix(trimmed, "chain "); ok {
			chain = &nftChain{}
			chains[strings.TrimSpace(strings.TrimSuffix(rest, "{"))] = chain
			continue
		}
		switch {
		case chain == nil || trimmed == "":
		case trimmed == "}":
			chain = nil
		case strings.Contains(trimmed, " hook "):
			_, after, _ := strings.Cut(trimmed, " hook ")
			chain.hook, _, _ = strings.Cut(after, " ")
			if strings.Contains(after, "policy drop") {
				chain.policy = "drop"
			}
		default:
			chain.rules = append(chain.rules, trimmed)
		}
	}
	return check()
}

// nftFate follows a pod's packet through a chain.
func nftFate(chains map[string]*nftChain, c *nftChain, pods string, depth int) (verdict, line string) {
	const deepest = 12
	if c == nil || depth > deepest {
		return "", ""
	}
	for _, rule := range c.rules {
		action, to, holds := nftRule(rule, pods)
		if !holds {
			continue
		}
		switch action {
		case "accept", "drop":
			return action, rule
		case "return":
			return "", ""
		case "jump", "goto":
			if verdict, line := nftFate(chains, chains[to], pods, depth+1); verdict != "" || action == "goto" {
				return verdict, line
			}
		}
	}
	return "", ""
}

// nftRule reads a rule: what it does, where it jumps, and whether it surely holds for a
// pod's packet. What is not understood does not hold.
func nftRule(rule, pods string) (action, to string, holds bool) {
	rule, _, _ = strings.Cut(rule, " comment ")
	words := strings.Fields(strings.NewReplacer("{", " { ", "}", " } ", ",", " ").Replace(rule))
	// values reads one value or a set, and how many words it took.
	values := func(at int) ([]string, int) {
		if at < len(words) && words[at] == "{" {
			if n := slices.Index(words[at:], "}"); n > 0 {
				return words[at+1 : at+n], n + 1
			}
			return nil, len(words) - at
		}
		if at < len(words) {
			return words[at : at+1], 1
		}
		return nil, 0
	}
	for i := 0; i < len(words); i++ {
		switch words[i] {
		case "accept", "drop", "return":
			return words[i], "", true
		case "reject":
			return "drop", "", true
		case "jump", "goto":
			if i+1 >= len(words) {
				return "", "", false
			}
			return words[i], words[i+1], true
		case "counter":
			if i+4 < len(words) && words[i+1] == "packets" {
				i += 4
			}
		case "iifname", "iif":
			set, n := values(i + 1)
			if !slices.ContainsFunc(set, podInterface) {
				return "", "", false
			}
			i += n
		case "ip":
			if i+1 >= len(words) || words[i+1] != "saddr" {
				return "", "", false
			}
			set, n := values(i + 2)
			if !slices.ContainsFunc(set, func(w string) bool { return covers(w, pods) }) {
				return "", "", false
			}
			i += n + 1
		case "ct":
			if i+1 >= len(words) || words[i+1] != "state" {
				return "", "", false
			}
			set, n := values(i + 2)
			// Without braces nft prints states with commas between them.
			for j := i + 2 + n; j < len(words) && slices.Contains([]string{"new", "established", "related", "untracked", "invalid"}, words[j]); j++ {
				set, n = append(slices.Clone(set), words[j]), n+1
			}
			if !slices.Contains(set, "new") {
				return "", "", false
			}
			i += n + 1
		default:
			return "", "", false
		}
	}
	return "", "", false
}
