package k3sserver

import (
	"net"
	"path/filepath"
	"testing"
	"time"
)

func TestNotifyWhereSomebodyListens(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	if err := notify("READY=1"); err != nil {
		t.Errorf("with nobody to tell: %v", err)
	}
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	t.Setenv("NOTIFY_SOCKET", path)
	if err := notify("READY=1"); err != nil {
		t.Fatal(err)
	}
	if err := l.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 64)
	n, err := l.Read(got)
	if err != nil || string(got[:n]) != "READY=1" {
		t.Errorf("%q, %v", got[:n], err)
	}
}
