package node

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
)

const (
	nodeName    = "gpu-0"
	nodeAddress = "10.99.0.1"
	podSubnet   = "10.42.0.0/24"
	clusterDNS  = "10.43.0.10"
)

// makeNetwork gives the node an address. What is not on the node is unreachable at
// once, so that a program that wants the world fails instead of waiting.
func makeNetwork(ctx context.Context) error {
	for _, line := range []string{
		"link set lo up",
		"link add uplink type veth peer name nowhere",
		"address add " + nodeAddress + "/24 dev uplink",
		"link set uplink up",
		"link set nowhere up",
		"route add unreachable default",
	} {
		if err := ip(ctx, line); err != nil {
			return err
		}
	}
	return kernel(nodeSettings())
}

// nodeSettings are the kernel's settings of a network namespace that a node runs in.
func nodeSettings() map[string]string {
	return map[string]string{
		"/proc/sys/net/ipv4/ip_forward":                 "1",
		"/proc/sys/net/ipv4/conf/all/route_localnet":    "1",
		"/proc/sys/net/bridge/bridge-nf-call-iptables":  "1",
		"/proc/sys/net/ipv4/ip_unprivileged_port_start": "0",
		"/proc/sys/net/ipv6/conf/all/disable_ipv6":      "1",
		"/proc/sys/net/ipv6/conf/default/disable_ipv6":  "1",
	}
}

// forward takes connections from a listener of the machine into the node.
func forward(ctx context.Context, from *os.File, to string) error {
	return forwardTo(ctx, from, func() string { return to })
}

// forwardTo does the same to where a node is at that time.
func forwardTo(ctx context.Context, from *os.File, to func() string) error {
	l, err := net.FileListener(from)
	if err != nil {
		return fmt.Errorf("taking a listener over: %w", err)
	}
	defer func() { _ = l.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		outer, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("forwarding to %s: %w", to(), err)
		}
		go join(ctx, outer, to())
	}
}

func join(ctx context.Context, outer net.Conn, to string) {
	defer func() { _ = outer.Close() }()
	inner, err := (&net.Dialer{}).DialContext(ctx, "tcp4", to)
	if err != nil {
		return
	}
	defer func() { _ = inner.Close() }()
	var wg sync.WaitGroup
	for _, pair := range [][2]net.Conn{{outer, inner}, {inner, outer}} {
		wg.Go(func() {
			_, _ = io.Copy(pair[0], pair[1])
			if half, ok := pair[0].(*net.TCPConn); ok {
				_ = half.CloseWrite()
			}
		})
	}
	wg.Wait()
}
