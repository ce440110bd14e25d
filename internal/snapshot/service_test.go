package snapshot

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/host"
)

func TestService(t *testing.T) {
	t.Parallel()
	const (
		supervised = `{"init":"supervised"}`
		state      = `{"bootID":"b1","supervisor":{"pid":62,"start":471},"child":{"pid":76,"start":472},"exits":3,"last":"exit status 1"}`
	)
	stat := func(name, state string, start int) string {
		return fmt.Sprintf("1 (%s) %s 1 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 %d 0 0", name, state, start)
	}
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  Service
	}{
		{"no box", nil, Service{}},
		{"by systemd", map[string]string{k3sRecord: `{"init":"systemd"}`}, Service{Init: "systemd"}},
		{"never started", map[string]string{k3sRecord: supervised}, Service{Init: "supervised"}},
		{"both run", map[string]string{
			k3sRecord: supervised, "/run/llmbox/k3s-supervisor.json": state, bootID: "b1\n", "/proc/62/stat": stat("llmbox", "S", 471), "/proc/76/stat": stat("k3s) R 9", "S", 472),
		}, Service{Init: "supervised", Supervisor: true, K3s: true, PID: 76, SupervisorPID: 62, Exits: 3, Last: "exit status 1"}},
		{"a stranger has its number", map[string]string{
			k3sRecord: supervised, "/run/llmbox/k3s-supervisor.json": state, bootID: "b1\n", "/proc/62/stat": stat("llmbox", "S", 471), "/proc/76/stat": stat("sshd", "S", 999),
		}, Service{Init: "supervised", Supervisor: true, SupervisorPID: 62, Exits: 3, Last: "exit status 1"}},
		{"ended, and nobody has heard of it", map[string]string{
			k3sRecord: supervised, "/run/llmbox/k3s-supervisor.json": state, bootID: "b1\n", "/proc/62/stat": stat("llmbox", "Z", 471),
		}, Service{Init: "supervised", Exits: 3, Last: "exit status 1"}},
		{"of the boot before", map[string]string{
			k3sRecord: supervised, "/run/llmbox/k3s-supervisor.json": state, bootID: "b2\n", "/proc/62/stat": stat("llmbox", "S", 471), "/proc/76/stat": stat("k3s", "S", 472),
		}, Service{Init: "supervised"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			for name, content := range tt.files {
				at := filepath.Join(root, name)
				if err := os.MkdirAll(filepath.Dir(at), 0o750); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(at, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			c := &collector{options: Options{Root: root}, host: &host.Host{Root: root}}
			got, err := c.service(t.Context())
			if err != nil || got != tt.want {
				t.Errorf("%+v, %v\nwant %+v", got, err, tt.want)
			}
		})
	}
}

// A halted program has connections taken for it by the kernel; that is no answer.
func TestDialAndGreet(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		answer string
		want   string
	}{
		{"answers", "\x00\x00\x00\x04\x00\x00\x00\x00\x00", ""},
		{"halted", "", "takes connections and does not answer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			name := filepath.Join(t.TempDir(), "s")
			listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", name)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = listener.Close() })
			if tt.answer != "" {
				go func() {
					connection, err := listener.Accept()
					if err != nil {
						return
					}
					_, _ = connection.Write([]byte(tt.answer))
					time.Sleep(time.Second)
					_ = connection.Close()
				}()
			}
			c := &collector{host: &host.Host{Root: "/"}}
			got := c.dial(t.Context(), "x", "unix", name, greet)
			if !strings.HasPrefix(got.Error, tt.want) || tt.want == "" && got.Error != "" {
				t.Errorf("%s: %q, want %q", strconv.Quote(tt.answer), got.Error, tt.want)
			}
		})
	}
}
