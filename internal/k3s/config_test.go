package k3s

import (
	"context"
	"encoding/base64"
	"errors"
	"flag"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/llmbox-dev/llmbox/internal/config"
)

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	at := filepath.Join("testdata", "golden", name)
	if *update {
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(at)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != string(got) {
		t.Errorf("%s differs:\n%s", at, differ(strings.Split(string(want), "\n"), strings.Split(string(got), "\n")))
	}
}

func address(name, prefix string, isDefault bool) Address {
	return Address{Interface: name, Prefix: netip.MustParsePrefix(prefix), Default: isDefault}
}

func persistent() map[string]string {
	return map[string]string{
		"vm.overcommit_memory": "1", "vm.panic_on_oom": "0", "kernel.panic": "10", "kernel.panic_on_oops": "1",
		"kernel.keys.root_maxkeys": "1000000", "kernel.keys.root_maxbytes": "25000000",
	}
}

// machines are what the files are made for.
func machines() map[string]Settings {
	out := map[string]Settings{}

	small := Settings{Role: Server, Box: testBox(), Facts: testFacts()}
	small.Facts.MemoryBytes, small.Facts.DataBytes, small.Facts.KubeletBytes, small.Facts.Hostname = 15*gib, 97*gib, 97*gib, "ip-10-0-0-5.ec2.internal"
	out["l4-100gb"] = small

	large := Settings{Role: Server, Box: testBox(), Facts: testFacts()}
	large.Facts.MemoryBytes, large.Facts.GPUs, large.Facts.DataBytes, large.Facts.KubeletBytes = 2000*gib, 8, 27000*gib, 400*gib
	large.Facts.Sysctls, large.Facts.SELinux = persistent(), true
	large.Box.K3s.DataDir, large.Box.K3s.NodeName = "/mnt/nvme/k3s", "h200-1"
	large.Box.K3s.TLSNames = []string{"box.example.com", "203.0.113.7"}
	large.Box.Network.NodeIP = "10.1.2.3"
	large.Box.K3s.ExtraArgs = []string{"--kubelet-arg=max-pods=250", "--disable", "metrics-server", "--debug", "--node-label=rack=a", "--etcd-expose-metrics=false"}
	out["h200x8"] = large

	closed := Settings{Role: Server, Box: testBox(), Facts: testFacts(), NodeName: "fixed-before"}
	closed.Facts.Hostname, closed.Facts.CgroupV1 = "renamed-since", true
	closed.Box.Network.CAFile = "/etc/llmbox/ca.pem"
	closed.Box.Registries.Mirrors = map[string]config.Mirror{
		"docker.io": {Endpoints: []string{"https://mirror.corp.example:5000/v2/hub", "http://10.0.0.9:5000"}},
		"nvcr.io":   {Endpoints: []string{"https://mirror.corp.example:5000"}},
	}
	closed.RegistryAuth = []byte(`{"auths": {"https://index.docker.io/v1/": {"auth": "` + base64.StdEncoding.EncodeToString([]byte("robot:pass:word")) + `"},
		"mirror.corp.example:5000": {"username": "u", "password": "p #1"}, "ghcr.io": {"identitytoken": "abc"}}}`)
	out["closed-network"] = closed

	agent := Settings{Role: Agent, Box: testBox(), Facts: testFacts(), Join: &Join{URL: "https://10.0.0.5:6443", TokenFile: "/var/lib/llmbox/join-token"}}
	agent.Facts.Hostname = "Node_2"
	out["agent"] = agent
	return out
}

func TestGoldenFiles(t *testing.T) {
	for name, s := range machines() {
		files, err := Files(s)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var listing []string
		for _, f := range files {
			golden(t, filepath.Join(name, filepath.Base(f.Path)), f.Content)
			listing = append(listing, f.Path+" "+f.Mode.String())
			var any map[string]any
			if err := yaml.Unmarshal(f.Content, &any); err != nil {
				t.Errorf("%s: %s is no YAML: %v", name, f.Path, err)
			}
			if !ours(f.Content) {
				t.Errorf("%s: %s does not say whose it is", name, f.Path)
			}
			if strings.Contains(string(f.Content), "pass:word") && f.Mode != secretMode {
				t.Errorf("%s: %s has a password and mode %o", name, f.Path, f.Mode)
			}
		}
		golden(t, filepath.Join(name, "list"), []byte(strings.Join(listing, "\n")+"\n"))
		again, err := Files(s)
		if err != nil || !slices.EqualFunc(files, again, func(a, b File) bool { return string(a.Content) == string(b.Content) }) {
			t.Errorf("%s: not the same twice, %v", name, err)
		}
	}
}

func TestKubeletSizes(t *testing.T) {
	for _, test := range []struct {
		disk       int64
		evict, top int64
		high       int
	}{
		{40 * gib, 2 * gib, 2 * gib, 85},
		{100 * gib, 5 * gib, 5 * gib, 85},
		{266 * gib, 13 * gib, 10 * gib, 85},
		{500 * gib, 25 * gib, 10 * gib, 92},
		{2000 * gib, 100 * gib, 10 * gib, 95},
		{27000 * gib, 1350 * gib, 10 * gib, 95},
	} {
		got := evictBelow(test.disk)
		if got > mostEvict || got > test.evict || got < test.top-256*mib {
			t.Errorf("disk of %d GiB: evicts below %d MiB", test.disk/gib, got/mib)
		}
		if high := collectAbove(test.disk); high != test.high {
			t.Errorf("disk of %d GiB: collects above %d %%, want %d", test.disk/gib, high, test.high)
		}
		// Images have to go before pods do.
		free := test.disk * int64(percent-collectAbove(test.disk)) / percent
		if free <= got {
			t.Errorf("disk of %d GiB: pods go at %d MiB, images at %d", test.disk/gib, got/mib, free/mib)
		}
	}
	// The few megabytes by which a kernel reports another size change nothing.
	for _, size := range []int64{8, 16, 32, 64, 128, 256, 512, 1024, 2048} {
		var seen [2]int64
		for percentOff := int64(90); percentOff <= 100; percentOff++ {
			kube, system := reserved(size * gib * percentOff / 100)
			if seen != [2]int64{} && seen != [2]int64{kube, system} {
				t.Errorf("%d GiB: another reservation at %d %%", size, percentOff)
			}
			seen = [2]int64{kube, system}
			if (kube+system)*5 > size*gib {
				t.Errorf("%d GiB: %d MiB reserved", size, (kube+system)/mib)
			}
		}
	}
}

// TestProtectionOnlyWhereItLasts: the kubelet sets these values itself, so that they
// hold now says nothing about the next boot.
func TestProtectionOnlyWhereItLasts(t *testing.T) {
	if protects(nil) || protects(map[string]string{"vm.overcommit_memory": "1"}) || !protects(persistent()) {
		t.Error("judged wrong")
	}
	for key := range persistent() {
		less := persistent()
		delete(less, key)
		if protects(less) {
			t.Errorf("without %s", key)
		}
	}
}

func TestArgumentsThatCantBe(t *testing.T) {
	for _, args := range [][]string{
		{"disable"}, {"--kubelet-arg=config=/x"}, {"--kubelet-arg", "config-dir=/x"}, {"-"}, {"--"},
	} {
		if _, err := addArguments(nil, args); !errors.Is(err, ErrSetting) {
			t.Errorf("%q: %v", args, err)
		}
	}
	s := Settings{Box: testBox()}
	s.Box.K3s.ExtraArgs = []string{"--disable=coredns,metrics-server", "--disable", "local-storage"}
	for component, want := range map[string]bool{"coredns": true, "local-storage": true, "traefik": false, "servicelb": false} {
		if Disables(s, component) != want {
			t.Errorf("%s: %v", component, !want)
		}
	}
}

func TestCredentialsThatCantBe(t *testing.T) {
	const secret = "hunter2"
	for _, text := range []string{
		"not json " + secret, `{"auths": {"a": {"auth": "` + secret + `"}}}`, `{"auths": {"a": {}}}`, `{"credsStore": "desktop"}`,
		`{"auths": {"a": {}}, "credsStore": "desktop"}`, `{"auths": ["` + secret + `"]}`,
	} {
		_, err := parseRegistryAuth([]byte(text))
		if !errors.Is(err, ErrSetting) {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if strings.Contains(err.Error(), secret) {
			t.Errorf("the error shows the secret: %v", err)
		}
	}
}

func TestConfigureChangesOnlyWhatDiffers(t *testing.T) {
	m, _, _ := fakeMachine(t)
	s := machines()["closed-network"]
	r, _ := m.Record(t.Context())
	changed, err := m.Configure(t.Context(), r, s)
	if err != nil || !slices.Equal(changed, []string{ConfigFile, KubeletFile, RegistriesFile}) {
		t.Fatalf("%v, %v", changed, err)
	}
	info, err := os.Stat(m.at(RegistriesFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	before := tree(t, m)
	changed, err = m.Configure(t.Context(), r, s)
	if err != nil || len(changed) != 0 || differ(before, tree(t, m)) != "" {
		t.Errorf("second time: %v, %v\n%s", changed, err, differ(before, tree(t, m)))
	}
	// A mode that was opened is closed again.
	if err := os.Chmod(m.at(RegistriesFile), 0o644); err != nil {
		t.Fatal(err)
	}
	if changed, err = m.Configure(t.Context(), r, s); err != nil || !slices.Equal(changed, []string{RegistriesFile}) {
		t.Errorf("after a change of mode: %v, %v", changed, err)
	}
	// What is no longer wanted goes.
	s.Box.Registries, s.Box.Network.CAFile, s.RegistryAuth = config.Registries{}, "", nil
	if changed, err = m.Configure(t.Context(), r, s); err != nil || !slices.Equal(changed, []string{RegistriesFile}) {
		t.Errorf("without registries: %v, %v", changed, err)
	}
	if _, err := os.Stat(m.at(RegistriesFile)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("still there: %v", err)
	}
}

func TestForeignConfigurationStays(t *testing.T) {
	for _, name := range []string{ConfigFile, RegistriesFile, KubeletFile} {
		m, _, _ := fakeMachine(t)
		put(t, m, name, "# mine\ntoken: secret\n")
		before := tree(t, m)
		r, _ := m.Record(t.Context())
		_, err := m.Configure(t.Context(), r, machines()["closed-network"])
		var p *Problem
		if !errors.Is(err, ErrForeign) || !errors.As(err, &p) || !strings.Contains(p.Fix(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if d := differ(before, tree(t, m)); d != "" {
			t.Errorf("%s: changed\n%s", name, d)
		}
	}
}

func TestDropInsAreListed(t *testing.T) {
	m, _, _ := fakeMachine(t)
	r, _ := m.Record(t.Context())
	if _, err := m.Configure(t.Context(), r, machines()["l4-100gb"]); err != nil {
		t.Fatal(err)
	}
	put(t, m, DropInDir+"/10-mine.yaml", "cluster-cidr: 10.9.0.0/16\nnode-label:\n- a=b\nkubelet-arg+:\n- v=2\n")
	put(t, m, DropInDir+"/20-bad.yaml", "a: [\n")
	put(t, m, DropInDir+"/README", "nothing")
	put(t, m, NodeIPFile, marker+"\nnode-ip: 10.0.0.1\n")
	found, err := m.DropIns(t.Context())
	if err != nil || len(found) != 3 {
		t.Fatalf("%+v, %v", found, err)
	}
	if !slices.Equal(found[0].Overrides, []string{"cluster-cidr"}) || len(found[0].Keys) != 3 || found[0].Ours {
		t.Errorf("%+v", found[0])
	}
	if found[1].Problem == "" || !found[2].Ours {
		t.Errorf("%+v", found[1:])
	}
}

func TestNodeIPOnlyWithAChoice(t *testing.T) {
	lo, docker, cni := address("lo", "127.0.0.1/8", false), address("docker0", "172.17.0.1/16", false), address("cni0", "10.42.0.1/24", false)
	six, local := address("eth0", "2001:db8::1/64", true), address("eth0", "169.254.3.4/16", true)
	for name, test := range map[string]struct {
		addresses []Address
		want      string
		err       error
	}{
		"one":                             {[]Address{lo, address("eth0", "10.0.0.5/24", true), docker, cni, six, local}, "", nil},
		"the default route's wins":        {[]Address{address("ib0", "192.168.9.1/24", false), address("eth0", "10.0.0.5/24", true)}, "10.0.0.5", nil},
		"private before public":           {[]Address{address("eth0", "203.0.113.7/24", true), address("eth0", "10.0.0.5/24", true)}, "10.0.0.5", nil},
		"the lower metric":                {[]Address{{"wlan0", netip.MustParsePrefix("10.0.1.5/24"), true, 600}, {"eth0", netip.MustParsePrefix("10.0.0.5/24"), true, 100}}, "10.0.0.5", nil},
		"public on the default route":     {[]Address{address("eth1", "10.0.0.5/24", false), address("eth0", "203.0.113.7/24", true)}, "203.0.113.7", nil},
		"the first where nothing differs": {[]Address{address("eth0", "10.0.0.5/24", false), address("eth1", "10.0.1.5/24", false)}, "10.0.0.5", nil},
		"the same twice is one":           {[]Address{address("eth0", "10.0.0.5/24", true), address("eth1", "10.0.0.5/32", false)}, "", nil},
		"none":                            {[]Address{lo, docker, six, local}, "", ErrNoAddress},
		"a dummy for want of a network":   {[]Address{lo, address("dummy0", "203.0.113.254/31", true)}, "", nil},
		"a network without a gateway":     {[]Address{address("dummy0", "203.0.113.254/31", true), address("eth0", "10.0.0.5/24", false)}, "10.0.0.5", nil},
		"a dummy that leads nowhere":      {[]Address{lo, address("dummy0", "10.8.0.1/24", false)}, "", ErrNoAddress},
	} {
		got, err := NodeIPDropIn(test.addresses)
		if !errors.Is(err, test.err) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var c struct {
			IP string `yaml:"node-ip"`
		}
		if err := yaml.Unmarshal([]byte(got), &c); err != nil || c.IP != test.want {
			t.Errorf("%s: %q, %v; want %q", name, got, err, test.want)
		}
		if got != "" && !ours([]byte(got)) {
			t.Errorf("%s: does not say whose it is", name)
		}
	}
}

func TestHookFollowsTheAddresses(t *testing.T) {
	m, _, _ := fakeMachine(t)
	refresh := func(list ...Address) error {
		return RefreshNodeIP(t.Context(), m, func(context.Context) ([]Address, error) { return list, nil })
	}
	a, b := address("eth0", "10.0.0.5/24", true), address("eth1", "10.0.1.5/24", false)
	if err := refresh(a, b); err != nil || !strings.Contains(get(t, m, NodeIPFile), `"10.0.0.5"`) {
		t.Fatalf("%v", err)
	}
	// Stop and start on a rented machine: another address.
	moved := address("eth0", "10.0.7.9/24", true)
	if err := refresh(moved, b); err != nil || !strings.Contains(get(t, m, NodeIPFile), `"10.0.7.9"`) {
		t.Errorf("%v, %s", err, get(t, m, NodeIPFile))
	}
	if err := refresh(moved); err != nil || m.exists(t.Context(), NodeIPFile) {
		t.Errorf("still there with one address: %v", err)
	}
	put(t, m, NodeIPFile, "node-ip: 10.0.0.1\n")
	if err := refresh(a, b); !errors.Is(err, ErrForeign) {
		t.Errorf("foreign file: %v", err)
	}
	if gone := NodeIPGone("10.0.0.5", []Address{moved, b}); gone != "10.0.0.5" {
		t.Errorf("gone: %q", gone)
	}
	if gone := NodeIPGone("10.0.7.9", []Address{moved, b}); gone != "" {
		t.Errorf("gone: %q", gone)
	}
}

func TestFactsAreRead(t *testing.T) {
	if got := parseMemory("MemTotal:       65536000 kB\nMemFree: 1 kB\n"); got != 65536000<<10 {
		t.Errorf("memory %d", got)
	}
	routes := map[string]int{}
	parseRoutes("Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\n"+
		"eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\neth0\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\nwlan0\t00000000\t0101000A\t0003\t0\t0\t600\t00000000\t0\n", routes)
	parseRoutes6("00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00450003     eth1\n"+
		"00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo\n", routes)
	if len(routes) != 3 || routes["eth0"] != 100 || routes["wlan0"] != 600 || routes["eth1"] != 1024 {
		t.Errorf("routes %v", routes)
	}
	m, _, _ := fakeMachine(t)
	put(t, m, "/usr/lib/sysctl.d/10-default.conf", "kernel.panic = 0\nvm.panic_on_oom=1\n")
	put(t, m, "/usr/lib/sysctl.d/50-hidden.conf", "vm.overcommit_memory = 2\n")
	put(t, m, "/etc/sysctl.d/50-hidden.conf", "# hides the other\nvm/overcommit_memory = 1\n")
	put(t, m, "/etc/sysctl.d/90-kubelet.conf", "kernel.panic = 10\n-net.ipv4.ip_forward = 1\n; no\n")
	put(t, m, "/etc/sysctl.conf", "vm.panic_on_oom = 0\n")
	put(t, m, "/proc/sys/kernel/panic", "10\n")
	put(t, m, "/proc/sys/vm/panic_on_oom", "0\n")
	put(t, m, "/proc/sys/vm/overcommit_memory", "1\n")
	put(t, m, "/etc/sysctl.d/95-not-in-force.conf", "kernel.panic_on_oops = 1\n")
	put(t, m, "/proc/sys/kernel/panic_on_oops", "0\n")
	got, err := persistentSysctls(t.Context(), m.files)
	want := map[string]string{"kernel.panic": "10", "vm.panic_on_oom": "0", "vm.overcommit_memory": "1", "net.ipv4.ip_forward": "1"}
	if err != nil || len(got) != len(want) {
		t.Fatalf("%v, %v", got, err)
	}
	for key, value := range want {
		if got[key] != value {
			t.Errorf("%s is %q, want %q", key, got[key], value)
		}
	}
	put(t, m, "/proc/meminfo", "MemTotal: 1048576 kB\n")
	put(t, m, "/proc/sys/kernel/hostname", "box\n")
	facts, err := ReadFacts(t.Context(), m.files, "/var/lib/rancher/k3s")
	if err != nil || facts.MemoryBytes != gib || facts.Hostname != "box" || facts.DataBytes <= 0 || facts.KubeletBytes <= 0 {
		t.Errorf("%+v, %v", facts, err)
	}
}

// TestWriteThatFails leaves neither the file nor half of one.
func TestWriteThatFails(t *testing.T) {
	m, _, _ := fakeMachine(t)
	put(t, m, "/etc/x", "old")
	full := errors.New("no space left on device")
	for name, try := range map[string]func() error{
		"while writing": func() error {
			_, err := m.place(t.Context(), "/etc/x", plainMode, writeDeadline, func(w io.Writer) error {
				if _, err := w.Write([]byte("half")); err != nil {
					return err
				}
				return full
			}, nil)
			return err
		},
		"at the check": func() error {
			_, err := m.place(t.Context(), "/etc/x", plainMode, writeDeadline, func(io.Writer) error { return nil }, func(string) error { return full })
			return err
		},
	} {
		if err := try(); !errors.Is(err, full) {
			t.Errorf("%s: %v", name, err)
		}
		entries, err := os.ReadDir(m.at("/etc"))
		if err != nil || len(entries) != 1 || get(t, m, "/etc/x") != "old" {
			t.Errorf("%s: %v, %v", name, entries, err)
		}
	}
	// A link where the temporary file goes is not followed.
	link(t, m, "/etc/"+temporaryOf("y"), "/etc/x")
	if err := m.write(t.Context(), "/etc/y", plainMode, []byte("new")); err == nil || get(t, m, "/etc/x") != "old" {
		t.Errorf("%v, %q", err, get(t, m, "/etc/x"))
	}
}

func TestNodeNames(t *testing.T) {
	for hostname, want := range map[string]string{
		"gpu-box": "gpu-box", "GPU_Box": "gpu-box", "ip-10-0-0-5.ec2.internal": "ip-10-0-0-5.ec2.internal", "-box-": "box", "büro": "bro", "": "", "...": "",
	} {
		got, err := NodeNameOf(Settings{Facts: Facts{Hostname: hostname}})
		if got != want || (err != nil) != (want == "") {
			t.Errorf("%q: %q, %v; want %q", hostname, got, err, want)
		}
	}
}
