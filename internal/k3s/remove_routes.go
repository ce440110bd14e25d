package k3s

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/llmbox-dev/llmbox/internal/host"
)

// subnetFile is where flannel writes down the network of all nodes' pods.
const subnetFile = "/run/flannel/subnet.env"

// podNetwork is the network of all nodes' pods: as flannel says, else as was configured.
func (d *remover) podNetwork(ctx context.Context) (netip.Prefix, bool) {
	if data, present, err := d.m.read(ctx, subnetFile); err == nil && present {
		for line := range strings.Lines(string(data)) {
			if text, found := strings.CutPrefix(strings.TrimSpace(line), "FLANNEL_NETWORK="); found {
				if p, err := netip.ParsePrefix(text); err == nil {
					return p.Masked(), true
				}
			}
		}
	}
	var c struct {
		Network string `yaml:"cluster-cidr"`
	}
	if data, present, err := d.m.read(ctx, ConfigFile); err == nil && present && yaml.Unmarshal(data, &c) == nil {
		if p, err := netip.ParsePrefix(c.Network); err == nil {
			return p.Masked(), true
		}
	}
	return netip.Prefix{}, false
}

// lookRoutes finds the ways to the pods of other nodes that lead over the machine's own
// interfaces: those over flannel's go with it.
func (d *remover) lookRoutes(ctx context.Context) (findings, error) {
	network, known := d.podNetwork(ctx)
	if !known || !d.b.alone {
		return findings{}, nil
	}
	said, err := d.m.command(ctx, linkDeadline, "ip", "-4", "route", "show")
	if errors.Is(err, host.ErrNotInstalled) {
		return findings{}, nil
	}
	if err != nil {
		return findings{}, err
	}
	var out findings
	for line := range strings.Lines(said) {
		// 10.42.1.0/24 via 10.0.0.5 dev eth0 …
		const least = 5
		words := strings.Fields(line)
		if len(words) < least || words[1] != "via" || words[3] != "dev" {
			continue
		}
		to, err := netip.ParsePrefix(words[0])
		if err == nil && network.Contains(to.Addr()) && to.Bits() > network.Bits() {
			out.finds = append(out.finds, strings.Join(words[:least], " "))
		}
	}
	return out, nil
}

func (d *remover) removeRoutes(ctx context.Context, finds []string) error {
	var errs []error
	for _, route := range finds {
		if _, err := d.m.command(ctx, linkDeadline, "ip", append([]string{"route", "delete"}, strings.Fields(route)...)...); err != nil {
			errs = append(errs, fmt.Errorf("removing the route %s: %w", route, err))
		}
	}
	return errors.Join(errs...)
}
