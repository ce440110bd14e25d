package k3sserver

import (
	"fmt"
	"net"
	"os"
	"strings"
)

// notify tells systemd that the service is up, where systemd asked to be told.
func notify(state string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if abstract, ok := strings.CutPrefix(path, "@"); ok {
		path = "\x00" + abstract
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notifying systemd: %w", err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := conn.Write([]byte(state)); err != nil {
		return fmt.Errorf("notifying systemd: %w", err)
	}
	return nil
}
