package k3s

import (
	"slices"
	"strings"
	"testing"
)

// What somebody has changed since is theirs.
func TestSettingsOfOthersStay(t *testing.T) {
	m, _, _, _ := installedMachine(t, nil)
	put(t, m, settingFile("kernel.panic"), "30\n")
	if _, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil); err != nil {
		t.Fatal(err)
	}
	if got := get(t, m, settingFile("kernel.panic")); got != "30\n" {
		t.Errorf("kernel.panic is %q", got)
	}
	if got := get(t, m, settingFile("vm.overcommit_memory")); got != "0\n" {
		t.Errorf("vm.overcommit_memory is %q", got)
	}
}

// tables stands for nft.
type tables map[string]string

func (n tables) run(args []string) (string, int) {
	switch name := strings.Join(args[2:], " "); strings.Join(args[:2], " ") {
	case "list tables":
		var lines []string
		for table := range n {
			lines = append(lines, "table "+table+"\n")
		}
		slices.Sort(lines)
		return strings.Join(lines, ""), 0
	case "list table":
		return n[name], 0
	case "delete table":
		delete(n, name)
		return "", 0
	}
	return "no such command", 1
}

func TestEmptyTables(t *testing.T) {
	const (
		empty = "# Warning: table ip filter is managed by iptables-nft, do not touch!\ntable ip filter {\n\tchain INPUT {\n\t\ttype filter hook input priority filter; policy accept;\n\t}\n\n\tchain OUTPUT {\n\t\ttype filter hook output priority filter; policy accept;\n\t}\n}\n"
		rule  = "table ip nat {\n\tchain OUTPUT {\n\t\ttype nat hook output priority -100; policy accept;\n\t\tip daddr 10.0.0.1 counter packets 0 bytes 0 accept\n\t}\n}\n"
		drops = "table ip mangle {\n\tchain INPUT {\n\t\ttype filter hook input priority mangle; policy drop;\n\t}\n}\n"
		chain = "table ip raw {\n\tchain MINE {\n\t}\n}\n"
		set   = "table ip6 nat {\n\tset mine {\n\t\ttype ipv6_addr\n\t}\n}\n"
	)
	nft := tables{"ip6 filter": empty}
	m, p, _, _ := installedMachine(t, func(m *Machine) {
		m.run.(*programs).answers["nft"] = nft.run
	})
	for name, text := range map[string]string{"ip filter": empty, "ip nat": rule, "ip mangle": drops, "ip raw": chain, "ip6 nat": set, "inet firewalld": empty, "ip6 mangle": empty, "ip kube-proxy": rule} {
		nft[name] = text
	}
	p.answers["nft"] = nft.run
	if _, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil); err != nil {
		t.Fatal(err)
	}
	var left []string
	for name := range nft {
		left = append(left, name)
	}
	slices.Sort(left)
	if want := []string{"inet firewalld", "ip mangle", "ip nat", "ip raw", "ip6 filter", "ip6 nat"}; !slices.Equal(left, want) {
		t.Errorf("left are %q, want %q", left, want)
	}

	// Where nobody could tell which were there before, all stay.
	nft = tables{}
	m, p, _, _ = installedMachine(t, nil)
	nft["ip filter"] = empty
	p.answers["nft"] = nft.run
	if _, err := m.Remove(t.Context(), RemoveOptions{}, nil, nil); err != nil || len(nft) != 1 {
		t.Errorf("%v; left are %v", err, nft)
	}
}
