package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// around is the address of what machines find in their network, uplink the end of the
	// machine's cable there: what is sent on it goes to the machine.
	around = "10.99.0.254"
	uplink = "gpu-0"
)

// link is the network around the machine. The registry, the model hub and the place that
// k3s comes from are on its far side, so that one cap on the cable is shared by all.
type link struct{ pid int }

func (l link) command(ctx context.Context, args ...string) *exec.Cmd {
	// #nosec G204 -- commands of this package
	return exec.CommandContext(ctx, "nsenter", append([]string{"--target", strconv.Itoa(l.pid), "--net", "--"}, args...)...)
}

// cap puts a token bucket on what is sent to the machine. Its depth is what a tick of the
// kernel's clock lets through, or one packet that the card would have cut; its queue is
// that of a router with 50 ms.
func (l link) cap(ctx context.Context, bitsPerSecond float64) error {
	const ticks, largest = 250, 64 << 10
	burst := max(largest, int(bitsPerSecond/8/ticks)*2)
	out, err := l.command(ctx, "tc", "qdisc", "replace", "dev", uplink, "root", "tbf", "rate",
		strconv.FormatInt(int64(math.Round(bitsPerSecond)), 10)+"bit", "burst", strconv.Itoa(burst), "latency", "50ms").CombinedOutput()
	if err != nil {
		return fmt.Errorf("capping the link: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// sent are the bytes that have passed to the machine, headers and what came twice included.
func (l link) sent(ctx context.Context) (int64, error) {
	out, err := l.command(ctx, "ip", "-s", "-j", "link", "show", "dev", uplink).Output()
	if err != nil {
		return 0, fmt.Errorf("reading the link's counters: %w", err)
	}
	var links []struct {
		Stats struct {
			Tx struct {
				Bytes int64 `json:"bytes"`
			} `json:"tx"`
		} `json:"stats64"`
	}
	if err := json.Unmarshal(out, &links); err != nil {
		return 0, fmt.Errorf("reading the link's counters: %w", err)
	}
	if len(links) != 1 {
		return 0, fmt.Errorf("reading the link's counters: %d links", len(links))
	}
	return links[0].Stats.Tx.Bytes, nil
}

// within runs fn on a thread that is in the network around the machine. A socket stays in
// the network that it was made in; the thread ends with fn.
func (l link) within(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread is of no more use
		fd, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", l.pid))
		if err != nil {
			done <- fmt.Errorf("entering the network: %w", err)
			return
		}
		defer func() { _ = fd.Close() }()
		if err := unix.Setns(int(fd.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("entering the network: %w", err)
			return
		}
		done <- fn()
	}()
	return <-done
}

func (l link) dial(ctx context.Context, network, address string) (net.Conn, error) {
	var conn net.Conn
	err := l.within(func() (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

func (l link) listen(ctx context.Context, port int) (net.Listener, error) {
	var listener net.Listener
	err := l.within(func() (err error) {
		listener, err = new(net.ListenConfig).Listen(ctx, "tcp4", net.JoinHostPort(around, strconv.Itoa(port)))
		return err
	})
	return listener, err
}
