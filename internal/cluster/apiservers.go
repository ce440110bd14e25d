package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// APIServers lists where the API server itself listens, as pods reach it behind the
// Service `kubernetes`: the addresses that a policy has to name, because there is no
// pod to select. None where the cluster doesn't say, or these credentials may not read it.
func (c *Client) APIServers(ctx context.Context) ([]netip.AddrPort, error) {
	list, err := c.Kube.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=kubernetes",
	})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		err = Classify(err)
		if errors.Is(err, ErrForbidden) {
			return nil, nil
		}
		return nil, fmt.Errorf("looking for the API server's own addresses: %w", err)
	}
	var out []netip.AddrPort
	for _, s := range list.Items {
		for _, e := range s.Endpoints {
			for _, a := range e.Addresses {
				addr, err := netip.ParseAddr(a)
				if err != nil {
					continue // a slice of names: nothing that a policy could hold
				}
				for _, p := range s.Ports {
					if p.Port != nil && *p.Port > 0 && *p.Port <= 65535 {
						out = append(out, netip.AddrPortFrom(addr, uint16(*p.Port))) // #nosec G115 -- just compared
					}
				}
			}
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out), nil
}
