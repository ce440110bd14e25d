package k3sserver

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"

	"github.com/llmbox-dev/llmbox/test/lab/kubenode"
)

// ErrNoRoute means that the machine has no way out by which to choose an address.
var ErrNoRoute = errors.New(`no default routes found in "/proc/net/route" or "/proc/net/ipv6_route"`)

// ErrNodeIP means that the address asked for is not on this machine.
var ErrNodeIP = errors.New("flannel exited: failed to find interface with specified node ip")

// address is the node's and the interface it is on: the one asked for, which must be
// there, or that of the way out.
func address(asked string) (net.IP, string, error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, "", fmt.Errorf("reading the interfaces: %w", err)
	}
	out := ""
	if asked == "" {
		routes, err := os.Open("/proc/net/route")
		if err != nil {
			return nil, "", fmt.Errorf("reading the routes: %w", err)
		}
		out, err = defaultInterface(routes)
		if err = errors.Join(err, routes.Close()); err != nil {
			return nil, "", err
		}
	}
	for _, i := range interfaces {
		addresses, err := i.Addrs()
		if err != nil {
			return nil, "", fmt.Errorf("reading the addresses of %s: %w", i.Name, err)
		}
		for _, a := range addresses {
			network, ok := a.(*net.IPNet)
			if !ok || network.IP.To4() == nil {
				continue
			}
			if network.IP.Equal(net.ParseIP(asked)) || asked == "" && i.Name == out && network.IP.IsGlobalUnicast() {
				return network.IP.To4(), i.Name, nil
			}
		}
	}
	if asked != "" {
		return nil, "", fmt.Errorf("%w %s", ErrNodeIP, asked)
	}
	return nil, "", fmt.Errorf("interface %s has no address: %w", out, ErrNoRoute)
}

// defaultInterface reads the kernel's table of routes.
func defaultInterface(routes io.Reader) (string, error) {
	lines := bufio.NewScanner(routes)
	for lines.Scan() {
		// Iface Destination Gateway Flags RefCnt Use Metric Mask
		f := strings.Fields(lines.Text())
		if len(f) < 8 || f[1] != "00000000" || f[7] != "00000000" {
			continue
		}
		flags, err := hex.DecodeString(f[3])
		const up = 1
		if err == nil && len(flags) == 2 && flags[1]&up != 0 && f[0] != "*" {
			return f[0], nil
		}
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("reading the routes: %w", err)
	}
	return "", ErrNoRoute
}

// network is flannel-standin: on a single node pods need a bridge alone, which the CNI
// plugin makes. What flannel leaves on a machine is made as it would: its interface, its
// chains, its file of the subnet.
func (s *server) network(ctx context.Context, subnet string) error {
	first, network, err := net.ParseCIDR(subnet)
	if err != nil {
		return fmt.Errorf("reading the node's subnet: %w", err)
	}
	gateway := network.IP.To4()
	gateway[3]++
	if err := writeFile(flannelDir+"/subnet.env", fmt.Sprintf("FLANNEL_NETWORK=%s\nFLANNEL_SUBNET=%s/%s\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
		s.config.ClusterCIDR, gateway, subnet[strings.IndexByte(subnet, '/')+1:]), 0o644); err != nil {
		return err
	}
	// A device of a former start may be bound to an address that is gone.
	_ = s.command(ctx, "ip", "link", "delete", "flannel.1")
	for _, line := range []string{
		"ip link add flannel.1 type vxlan id 1 local " + s.ip.String() + " dev " + s.uplink + " dstport 8472 nolearning",
		"ip address add " + first.String() + "/32 dev flannel.1",
		"ip link set flannel.1 up",
	} {
		if err := s.command(ctx, strings.Fields(line)...); err != nil {
			// One node has nobody to talk to through it.
			s.log.warn("flannel-standin: %v", err)
			break
		}
	}
	for _, r := range []struct{ table, from, chain string }{{"nat", "POSTROUTING", "FLANNEL-POSTRTG"}, {"filter", "FORWARD", "FLANNEL-FWD"}} {
		// It may be there.
		_ = s.command(ctx, "iptables", "-w", "-t", r.table, "-N", r.chain)
		if err := s.rule(ctx, r.table, r.from, "-m", "comment", "--comment", "flanneld", "-j", r.chain); err != nil {
			return err
		}
	}
	for _, rule := range []string{
		"nat FLANNEL-POSTRTG -s " + s.config.ClusterCIDR + " -d " + s.config.ClusterCIDR + " -j RETURN",
		"nat FLANNEL-POSTRTG -s " + s.config.ClusterCIDR + " ! -d 224.0.0.0/4 -j MASQUERADE",
		"filter FLANNEL-FWD -s " + s.config.ClusterCIDR + " -j ACCEPT",
		"filter FLANNEL-FWD -d " + s.config.ClusterCIDR + " -j ACCEPT",
	} {
		f := strings.Fields(rule)
		if err := s.rule(ctx, f[0], f[1], f[2:]...); err != nil {
			return err
		}
	}
	// Last: with it kubelet calls the node ready.
	return writeFile(s.agent("etc", "cni", "net.d", "10-flannel.conflist"), kubenode.CNIConfig("cbr0", subnet), 0o600)
}

// rule appends a rule that is not there yet.
func (s *server) rule(ctx context.Context, table, chain string, words ...string) error {
	if s.command(ctx, append([]string{"iptables", "-w", "-t", table, "-C", chain}, words...)...) == nil {
		return nil
	}
	return s.command(ctx, append([]string{"iptables", "-w", "-t", table, "-A", chain}, words...)...)
}

func (s *server) command(ctx context.Context, words ...string) error {
	out, err := exec.CommandContext(ctx, words[0], words[1:]...).CombinedOutput() // #nosec G204 -- the lists above
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(words, " "), err, bytes.TrimSpace(out))
	}
	return nil
}
