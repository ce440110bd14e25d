package k3s

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

const (
	// addressDeadline bounds how long the hook waits for an address: a network that is
	// "online" can still be without one for some seconds.
	addressDeadline = 20 * time.Second
	addressPause    = time.Second
)

// virtual says whether an interface leads to containers, virtual machines or a VPN
// of this host and not to the network that it stands in.
func virtual(name string) bool {
	if name == "lo" || name == "cni0" || name == "docker0" || name == "kube-ipvs0" {
		return true
	}
	return slices.ContainsFunc([]string{
		"veth", "flannel", "cali", "cilium", "lxc", "br-", "virbr", "podman", "nerdctl", "tailscale", "wg", "tun", "tap", "dummy", "ifb", "nodelocaldns",
	}, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// deadEnd says that an interface is what k3s wants a machine without a network to have: a
// dummy that the default route leads to (docs.k3s.io/installation/airgap).
func deadEnd(a Address) bool { return a.Default && strings.HasPrefix(a.Interface, "dummy") }

// candidates are the addresses that a node could have, the best first: on the
// interface of the default route, private before public, and else as the kernel lists
// them. Only IPv4, for the networks of pods and services are.
func candidates(addresses []Address) []netip.Addr {
	kept := slices.DeleteFunc(slices.Clone(addresses), func(a Address) bool {
		addr := a.Prefix.Addr()
		return virtual(a.Interface) && !deadEnd(a) || !addr.Is4() || !addr.IsGlobalUnicast() || addr.IsLinkLocalUnicast()
	})
	rank := func(a Address) [3]int {
		r := [3]int{1, 0, 1}
		switch {
		case deadEnd(a):
			// A network that leads nowhere else is still one.
			r[0] = 2
		case a.Default:
			r[0], r[1] = 0, a.Metric
		}
		if a.Prefix.Addr().IsPrivate() {
			r[2] = 0
		}
		return r
	}
	slices.SortStableFunc(kept, func(a, b Address) int { ra, rb := rank(a), rank(b); return slices.Compare(ra[:], rb[:]) })
	var out []netip.Addr
	for _, a := range kept {
		if !slices.Contains(out, a.Prefix.Addr()) {
			out = append(out, a.Prefix.Addr())
		}
	}
	return out
}

// NodeIPDropIn is the content of NodeIPFile for a machine with these addresses; empty
// where k3s finds its only one by itself.
func NodeIPDropIn(addresses []Address) (string, error) {
	found := candidates(addresses)
	switch len(found) {
	case 0:
		return "", &Problem{
			What: "the machine has no IPv4 address that a node could have",
			Out:  "Give it one, or wait for the network: ip -4 address show", Err: ErrNoAddress,
		}
	case 1:
		return "", nil
	}
	return fmt.Sprintf("%s before each start of k3s, because this machine has several\n# addresses and they can change. To have one for good: network.nodeIP.\nnode-ip: %q\n",
		marker, found[0]), nil
}

// NodeAddress is the one of these addresses that the node has.
func NodeAddress(addresses []Address) (netip.Addr, error) {
	found := candidates(addresses)
	if len(found) == 0 {
		return netip.Addr{}, ErrNoAddress
	}
	return found[0], nil
}

// RefreshNodeIP is the hook that the service runs before each start: it writes the
// drop-in anew, or removes it where there is no choice. It waits a little for a
// first address.
func RefreshNodeIP(ctx context.Context, m *Machine, addresses func(context.Context) ([]Address, error)) error {
	if addresses == nil {
		addresses = func(ctx context.Context) ([]Address, error) { return ReadAddresses(ctx, m.files) }
	}
	ctx, cancel := context.WithTimeout(ctx, addressDeadline)
	defer cancel()
	for {
		list, err := addresses(ctx)
		if err != nil {
			return err
		}
		content, err := NodeIPDropIn(list)
		if err == nil {
			return m.setNodeIP(ctx, content)
		}
		select {
		case <-ctx.Done():
			// An address that is gone is worse than none: k3s would insist on it.
			return joinSet(err, m.setNodeIP(context.WithoutCancel(ctx), ""))
		case <-time.After(addressPause):
		}
	}
}

func joinSet(err, setting error) error {
	if setting != nil {
		return fmt.Errorf("%w; %w", err, setting)
	}
	return err
}

func (m *Machine) setNodeIP(ctx context.Context, content string) error {
	has, present, err := m.read(ctx, NodeIPFile)
	if err != nil {
		return err
	}
	if present && !ours(has) {
		return &Problem{What: NodeIPFile + " was not written by llmbox", Out: "sudo rm " + NodeIPFile, Err: ErrForeign}
	}
	switch {
	case content == "" && !present, present && string(has) == content:
		return nil
	case content == "":
		return m.remove(ctx, NodeIPFile)
	}
	const mode = 0o644
	return m.write(ctx, NodeIPFile, mode, []byte(content))
}

// NodeIPGone names an address that k3s was told to have and that the machine no
// longer has; empty where all is well.
func NodeIPGone(nodeIP string, addresses []Address) string {
	wanted, err := netip.ParseAddr(nodeIP)
	if err != nil {
		return ""
	}
	for _, a := range addresses {
		if a.Prefix.Addr() == wanted {
			return ""
		}
	}
	return nodeIP
}
