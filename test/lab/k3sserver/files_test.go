package k3sserver

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/klauspost/compress/zstd"

	"github.com/llmbox-dev/llmbox/test/lab/controlplane"
	"github.com/llmbox-dev/llmbox/test/lab/kubenode"
	"github.com/llmbox-dev/llmbox/test/lab/process"
	"github.com/llmbox-dev/llmbox/test/lab/programs"
)

func quiet(t *testing.T) Logger {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return NewLogger(f)
}

func TestRegistriesBecomeHosts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registries.yaml")
	if err := os.WriteFile(path, []byte(`
mirrors:
  docker.io:
    endpoint: ["http://10.99.0.254:5000/v2/docker.io", "mirror.example.com"]
    rewrite: {"^library/(.*)": "hub/$1"}
  "*": {endpoint: ["https://cache.example.com:5001"]}
  quay.io: {}
configs:
  mirror.example.com: {auth: {username: u, password: p}, tls: {ca_file: /ca.pem, insecure_skip_verify: true}}
  private.example.com: {tls: {cert_file: /c, key_file: /k}}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := ReadRegistries(path)
	if err != nil {
		t.Fatal(err)
	}
	files, err := r.Hosts()
	if err != nil {
		t.Fatal(err)
	}
	if got := slices.Sorted(maps.Keys(files)); !slices.Equal(got, []string{"_default", "docker.io", "mirror.example.com", "private.example.com"}) {
		t.Errorf("files for %v", got)
	}
	for host, want := range map[string][]string{
		"docker.io": {"# " + hostsHeader, `server = "https://registry-1.docker.io/v2"`,
			"[host.\"http://10.99.0.254:5000/v2/docker.io\"]\n  capabilities = [\"pull\", \"resolve\"]\n  override_path = true\n",
			"[host.\"https://mirror.example.com/v2\"]\n  capabilities = [\"pull\", \"resolve\"]\n  ca = [\"/ca.pem\"]\n  skip_verify = true\n",
			`"^library/(.*)" = "hub/$1"`},
		"_default":            {`[host."https://cache.example.com:5001/v2"]`},
		"private.example.com": {`server = "https://private.example.com/v2"`, `client = [["/c", "/k"]]`},
	} {
		for _, w := range want {
			if !strings.Contains(files[host], w) {
				t.Errorf("%s has no %q:\n%s", host, w, files[host])
			}
		}
	}
	if strings.Contains(files["_default"], "server =") {
		t.Errorf("a mirror of everything names one server:\n%s", files["_default"])
	}
	if a := r.Auth()["mirror.example.com"]; a.Username != "u" || a.Password != "p" {
		t.Errorf("credentials are %+v", a)
	}

	certs := t.TempDir()
	foreign := filepath.Join(certs, "mine.example.com", "hosts.toml")
	if err := writeFile(foreign, "server = \"x\"\n", 0o600); err != nil {
		t.Fatal(err)
	}
	if err := writeHosts(certs, files); err != nil {
		t.Fatal(err)
	}
	if err := writeHosts(certs, map[string]string{"quay.io": files["docker.io"]}); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(certs, "*"))
	if err != nil || len(left) != 2 {
		t.Errorf("after the second start there are %v, %v: want one's own and somebody else's", left, err)
	}
}

func TestRegistriesThatCanNotBeRead(t *testing.T) {
	dir := t.TempDir()
	if r, err := ReadRegistries(filepath.Join(dir, "absent")); err != nil || r.Mirrors != nil {
		t.Errorf("an absent file gave %+v, %v", r, err)
	}
	path := filepath.Join(dir, "registries.yaml")
	if err := os.WriteFile(path, []byte("mirors: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadRegistries(path); err == nil {
		t.Error("a misspelt key was read over")
	}
	if _, err := (Registries{Mirrors: map[string]Mirror{"a": {Endpoints: []string{"http://"}}}}).Hosts(); !errors.Is(err, ErrConfig) {
		t.Errorf("an endpoint without a host gave %v", err)
	}
}

func TestHandlersAreLookedForOnce(t *testing.T) {
	for _, tt := range []struct {
		name  string
		files []string
		want  map[string]string
	}{
		{"a machine without a toolkit", []string{"usr/bin/runc"}, map[string]string{"runc": ""}},
		{"by a package", []string{"usr/bin/nvidia-container-runtime"}, map[string]string{"runc": "", "nvidia": "/usr/bin/nvidia-container-runtime"}},
		{"an operator's wins", []string{"usr/bin/nvidia-container-runtime", "usr/local/nvidia/toolkit/nvidia-container-runtime", "usr/local/bin/crun"},
			map[string]string{"runc": "", "nvidia": "/usr/local/nvidia/toolkit/nvidia-container-runtime", "crun": "/usr/local/bin/crun"}},
		{"not where k3s does not look", []string{"usr/local/bin/nvidia-container-runtime"}, map[string]string{"runc": ""}},
		{"a directory is none", []string{"usr/bin/nvidia-container-runtime/x"}, map[string]string{"runc": ""}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := fstest.MapFS{}
			for _, f := range tt.files {
				root[f] = &fstest.MapFile{Mode: 0o755}
			}
			if got := handlers(root, quiet(t)); !maps.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestContainerdConfigNamesHandlersAndCredentials(t *testing.T) {
	l := layout{data: t.TempDir()}
	registries := filepath.Join(l.data, "registries.yaml")
	if err := os.WriteFile(registries, []byte("configs: {r.example.com: {auth: {username: u}}}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := Config{Registries: registries, PauseImage: "pause:1"}
	if err := l.writeContainerd(c, map[string]string{"runc": "", "nvidia": "/usr/bin/n"}, quiet(t)); err != nil {
		t.Fatal(err)
	}
	path := l.agent("etc", "containerd", "config.toml")
	raw, err := os.ReadFile(path) // #nosec G304 -- test directory
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`[plugins."io.containerd.grpc.v1.cri".containerd.runtimes."nvidia".options]`, `BinaryName = "/usr/bin/n"`,
		`registry.configs."r.example.com".auth]`, `username = "u"`, `sandbox_image = "pause:1"`, `root = "` + l.agent("containerd") + `"`,
	} {
		if !strings.Contains(string(raw), want) {
			t.Errorf("it has no %s:\n%s", want, raw)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("a file with credentials has mode %v, %v", info.Mode(), err)
	}
}

func TestTokenStaysAndIsThatOfTheDatabase(t *testing.T) {
	l := layout{data: t.TempDir()}
	first, err := l.token("")
	if err != nil || len(first) != 32 {
		t.Fatalf("the first token is %q, %v", first, err)
	}
	if err := writeFile(l.server("tls", "server-ca.crt"), "authority", 0o600); err != nil {
		t.Fatal(err)
	}
	if err := l.writeToken(first); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"token", "node-token"} {
		raw, err := os.ReadFile(l.server(name))
		if err != nil || !strings.HasPrefix(string(raw), "K10") || !strings.HasSuffix(string(raw), "::server:"+first+"\n") {
			t.Errorf("%s is %q, %v", name, raw, err)
		}
	}
	if info, err := os.Stat(l.server("token")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the token's mode is %v, %v", info.Mode(), err)
	}
	for _, asked := range []string{"", first, "K10abc::server:" + first} {
		if again, err := l.token(asked); err != nil || again != first {
			t.Errorf("asked for %q: %q, %v", asked, again, err)
		}
	}
	if _, err := l.token("another"); !errors.Is(err, ErrToken) {
		t.Errorf("another token gave %v, want ErrToken", err)
	}
	if err := os.Remove(l.server("token")); err != nil {
		t.Fatal(err)
	}
	// As after a start that was cut off before the file was written.
	if again, err := l.token(""); err != nil || again != first {
		t.Errorf("without its file: %q, %v", again, err)
	}
	if err := os.Remove(l.server("cred", "passwd")); err != nil {
		t.Fatal(err)
	}
	if _, err := l.token(""); !errors.Is(err, ErrToken) {
		t.Errorf("a lost token gave %v, want ErrToken: a new one is not the database's", err)
	}
}

func TestEncryptionKeyIsMadeOnce(t *testing.T) {
	l := layout{data: t.TempDir()}
	var first []byte
	for range 2 {
		path, err := l.encryption()
		if err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(path) // #nosec G304 -- test directory
		if err != nil || !strings.Contains(string(raw), "aescbc") {
			t.Fatalf("%s, %v", raw, err)
		}
		if first != nil && !bytes.Equal(first, raw) {
			t.Error("the second start made another key")
		}
		first = raw
	}
}

func TestManifestsAreFoundAndSkipped(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a.yaml", "b.yml", "c.json", "d.txt", "e.yaml", "e.yaml.skip", "sub/f.yaml"} {
		if err := writeFile(filepath.Join(dir, name), "", 0o600); err != nil {
			t.Fatal(err)
		}
	}
	files, err := manifestFiles(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range files {
		rel, _ := filepath.Rel(dir, f)
		names = append(names, rel)
	}
	if want := []string{"a.yaml", "b.yml", "c.json", "sub/f.yaml"}; !slices.Equal(names, want) {
		t.Errorf("got %v, want %v", names, want)
	}
}

func TestArchivesByTheirNames(t *testing.T) {
	var zipped, packed bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, err1 := z.Write([]byte("images"))
	s, err2 := zstd.NewWriter(&packed)
	if err := errors.Join(err1, err2, z.Close()); err != nil {
		t.Fatal(err)
	}
	_, err1 = s.Write([]byte("images"))
	if err := errors.Join(err1, s.Close()); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"a.tar": []byte("images"), "a.tar.gz": zipped.Bytes(), "a.TGZ": zipped.Bytes(), "a.tar.zst": packed.Bytes(), "a.tzst": packed.Bytes(),
	} {
		r, err := archiveReader(name, bytes.NewReader(content))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got, err := io.ReadAll(r); err != nil || string(got) != "images" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if _, err := archiveReader("a.zip", nil); err == nil {
		t.Error("a zip file was taken")
	}
}

func TestInterfaceOfTheWayOut(t *testing.T) {
	const head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
	for _, tt := range []struct {
		name, table, want string
	}{
		{"one", head + "eth0\t00000000\tFE00630A\t0003\t0\t0\t0\t00000000\t0\t0\t0\neth0\t0000630A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n", "eth0"},
		{"none", head + "eth0\t0000630A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n", ""},
		{"one that leads nowhere", head + "*\t00000000\t00000000\t0200\t0\t0\t0\t00000000\t0\t0\t0\n", ""},
		{"empty", head, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := defaultInterface(strings.NewReader(tt.table))
			if got != tt.want || (err != nil) != (tt.want == "") || err != nil && !errors.Is(err, ErrNoRoute) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

func TestAddressMustBeOnThisMachine(t *testing.T) {
	if ip, name, err := address("127.0.0.1"); err != nil || !ip.Equal(net.IPv4(127, 0, 0, 1)) || name == "" {
		t.Errorf("%v %q, %v", ip, name, err)
	}
	if _, _, err := address("192.0.2.1"); !errors.Is(err, ErrNodeIP) {
		t.Errorf("got %v, want ErrNodeIP", err)
	}
}

func TestPortInUseIsSaid(t *testing.T) {
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	err = portsFree(t.Context(), l.Addr().(*net.TCPAddr).Port)
	if err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("got %v", err)
	}
}

func TestProxiesForContainerdAlone(t *testing.T) {
	got := proxies([]string{"HTTP_PROXY=a", "HTTPS_PROXY=b", "CONTAINERD_HTTPS_PROXY=c", "NO_PROXY=d", "PATH=/bin", "no_proxy=e"})
	if want := []string{"HTTPS_PROXY=c", "HTTP_PROXY=a", "NO_PROXY=d", "no_proxy=e"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A second start finds the authority, the certificates and the kubeconfigs of the
// first; one whose address has changed gets a new certificate by the same authority.
func TestKeysOutlastTheServer(t *testing.T) {
	l := layout{data: t.TempDir()}
	if err := os.MkdirAll(l.server("db"), 0o700); err != nil {
		t.Fatal(err)
	}
	start := func(address string) map[string]string {
		t.Helper()
		plane, err := controlplane.NewOnNode(home{l}, controlplane.OnNode{
			Address: net.ParseIP(address), Port: 6443, Name: "default", Keep: true, SANs: []string{"box.example.com"},
		}, programs.Set{}, process.NewGroup())
		if err != nil {
			t.Fatal(err)
		}
		if err := plane.WriteKubeconfig(filepath.Join(l.data, "k3s.yaml"), "system:admin", "system:masters"); err != nil {
			t.Fatal(err)
		}
		files := map[string]string{}
		for _, path := range []string{"server/tls/server-ca.crt", "server/tls/server-ca.key", "server/tls/service.key",
			"server/tls/client-kube-apiserver.crt", "server/tls/serving-kube-apiserver.crt", "server/cred/admin.kubeconfig", "k3s.yaml"} {
			raw, err := os.ReadFile(filepath.Join(l.data, path))
			if err != nil {
				t.Fatal(err)
			}
			files[path] = string(raw)
		}
		return files
	}
	first, second, moved := start("10.99.0.1"), start("10.99.0.1"), start("10.99.0.2")
	if !reflect.DeepEqual(first, second) {
		t.Error("the second start changed files")
	}
	const serving = "server/tls/serving-kube-apiserver.crt"
	if moved[serving] == first[serving] {
		t.Error("another address has the same certificate")
	}
	moved[serving] = first[serving]
	if !reflect.DeepEqual(first, moved) {
		t.Error("another address changed more than the certificate")
	}
	if !strings.Contains(first["k3s.yaml"], "server: https://127.0.0.1:6443") || !strings.Contains(first["k3s.yaml"], "current-context: default") {
		t.Errorf("the kubeconfig is\n%s", first["k3s.yaml"])
	}
}

func TestPackagedObjectsFollowTheCluster(t *testing.T) {
	cluster := kubenode.Cluster{DNS: "10.96.0.10", Domain: "box.local", Storage: "/data/storage"}
	var all string
	for _, name := range packaged() {
		raw, err := cluster.Manifest(name)
		if err != nil {
			t.Fatal(err)
		}
		all += string(raw)
	}
	for _, want := range []string{"clusterIP: 10.96.0.10", "kubernetes box.local ", `"paths": ["/data/storage"]`, "handler: nvidia\n", "${VOL_DIR}"} {
		if !strings.Contains(all, want) {
			t.Errorf("no %q", want)
		}
	}
	if strings.Contains(all, "${CLUSTER") || strings.Contains(all, "${STORAGE") {
		t.Error("something was left open")
	}
}

func TestStagingHappensOnceAndSurvivesAnInterruption(t *testing.T) {
	for tool, dir := range brought() {
		if _, err := os.Stat(filepath.Join(dir, tool)); dir != "" && err != nil {
			t.Skipf("no container tools here: %v", err)
		}
	}
	data := t.TempDir()
	self := filepath.Join(t.TempDir(), "self")
	if err := os.WriteFile(self, []byte("#!/bin/sh\n"), 0o755); err != nil { // #nosec G306 -- a program
		t.Fatal(err)
	}
	staged, err := Stage(data, self, quiet(t))
	if err != nil {
		t.Skipf("no container tools here: %v", err)
	}
	for _, name := range []string{"k3s", "containerd-shim-runc-v2", "runc", "bridge"} {
		if info, err := os.Stat(filepath.Join(data, "data", "current", "bin", name)); err != nil || info.Mode()&0o111 == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	before, err := os.Stat(staged)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Stage(data, self, quiet(t)); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(staged); err != nil || !os.SameFile(before, after) {
		t.Errorf("the second start staged it again: %v", err)
	}
	// Killed between the link and the last rename.
	dir := filepath.Dir(filepath.Dir(staged))
	if err := os.Rename(dir, dir+"-tmp"); err != nil {
		t.Fatal(err)
	}
	if _, err := Stage(data, self, quiet(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(data, "data", "current", "bin", "runc")); err != nil {
		t.Error(err)
	}
}
