package node

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/test/lab/k3sserver"
)

func TestControllersOfAHierarchy(t *testing.T) {
	for options, want := range map[string]string{
		"rw,cpu":         "cpu",
		"rw,cpu,cpuacct": "cpu,cpuacct",
		"rw,xattr,release_agent=/lib/systemd/systemd-cgroups-agent,name=systemd": "name=systemd",
		"rw,nsdelegate,memory_recursiveprot":                                     "",
	} {
		if got := controllersOf(options); got != want {
			t.Errorf("%s: got %q, want %q", options, got, want)
		}
	}
}

func TestEveryNameIsDenied(t *testing.T) {
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- denyNames(ctx, conn) }()
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp4", conn.LocalAddr().String())
	}}
	asking, stop := context.WithTimeout(ctx, 5*time.Second)
	defer stop()
	_, err = resolver.LookupHost(asking, "registry.example.com.")
	dns, ok := err.(*net.DNSError) //nolint:errorlint // as the resolver returns it
	if !ok || !dns.IsNotFound {
		t.Errorf("got %v, want that there is none", err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestRegistriesOfAMachineAreThoseOfTheLab(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registries.yaml")
	if err := os.WriteFile(path, []byte(registriesYAML()), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := k3sserver.ReadRegistries(path)
	if err != nil {
		t.Fatal(err)
	}
	hosts, err := r.Hosts()
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range mirrored() {
		if want := `[host."http://10.99.0.254:5000/v2/` + host + `"]`; !strings.Contains(hosts[host], want) {
			t.Errorf("%s has no %s:\n%s", host, want, hosts[host])
		}
	}
}

func TestMachinesAreFoundByName(t *testing.T) {
	dir := t.TempDir()
	if HasMachines(dir) {
		t.Error("an empty directory is a lab of machines")
	}
	if err := os.WriteFile(filepath.Join(dir, machinesFile), []byte(`[{"name":"gpu-0","on":true},{"name":"gpu-1"}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"": "gpu-0", "gpu-1": "gpu-1", "gpu-2": ""} {
		m, err := ReadMachine(dir, name)
		if m.Name != want || (err != nil) != (want == "") {
			t.Errorf("%q: %+v, %v", name, m, err)
		}
	}
	if _, err := Join(dir, "gpu-1"); err == nil || !strings.Contains(err.Error(), ErrOff.Error()) {
		t.Errorf("a machine that is off was entered: %v", err)
	}
}
