package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/llmbox-dev/llmbox/test/internal/trace"
)

const (
	bundleFile = "/root/box.tar.zst"
	// What k3s-standin runs itself; k3s' releases have such a list.
	standinImages = `docker.io/rancher/mirrored-pause:3.6
docker.io/rancher/mirrored-coredns-coredns:1.15.0
docker.io/rancher/local-path-provisioner:v0.0.30
docker.io/rancher/mirrored-library-busybox:1.35.0
`
	// deadEnd is what preflight tells to make of a dummy on a machine without a network,
	// made of a pair of which both ends are on the machine, as this kernel knows no dummy.
	// Without ARP it swallows everything, as a dummy does. Two rules count what goes there:
	// to the cluster's own services, by a pod that was quicker than kube-proxy, and the rest.
	deadEnd = `ip link add dummy0 type veth peer name dummy0-far
ip link set dummy0 arp off up
ip link set dummy0-far arp off up
ip address add 203.0.113.254/31 dev dummy0
ip route add default via 203.0.113.255 dev dummy0 metric 1000
iptables -t mangle -A POSTROUTING -o dummy0 -d 10.43.0.0/16
iptables -t mangle -A POSTROUTING -o dummy0 ! -d 10.43.0.0/16
`
)

// TestBundle has one machine with a network make a bundle, and a second one, whose only
// cable was pulled out, become a box of it: from the file, and from standard input.
func TestBundle(t *testing.T) {
	onlyWhereAsked(t, true)
	bin := binDir(t)
	for _, name := range []string{"k3s-standin", "envoy-gateway", "proxy-standin"} {
		if _, err := os.Stat(filepath.Join(bin, "lab", name)); err != nil {
			t.Skipf("%v: run `make lab-machine lab-node-gateway` first", err)
		}
	}
	h := startMachine(t, bin, "--model", modelName, "--nodes", "2")
	h.machine = h.Machines[0].Name
	maker := h.others()[0]
	for _, m := range []*host{h, maker} {
		m.furnishForBundle(t)
	}

	if !t.Run("create", func(t *testing.T) {
		maker.makeBundle(t)
		if left := maker.must(t, "find", "/root", "-name", "box.tar.zst.*", "!", "-name", "*.digest"); left != "" {
			t.Errorf("it leaves %s", left)
		}
	}) {
		return
	}
	t.Run("verify", func(t *testing.T) {
		r := maker.plain(t, nil, "bundle", "verify", bundleFile, "--output", "json")
		r.ends(t, 0)
		var verdict struct {
			Images int
			Model  string
			Size   int64 `json:"size_bytes"`
		}
		must(t, json.Unmarshal([]byte(r.out), &verdict))
		if verdict.Images < 6 || verdict.Model != modelName || verdict.Size == 0 {
			t.Errorf("it says %s", r.out)
		}
		t.Logf("%.1f s: %s", r.took.Seconds(), strings.TrimSpace(r.out))
	})

	h.must(t, "sh", "-ec", "ip link delete uplink; "+deadEnd)
	t.Run("what is meant for the outside is counted", func(t *testing.T) {
		a := &airgapped{host: h}
		before := a.sent(t)
		h.must(t, "sh", "-c", "curl -s --max-time 1 http://10.99.0.254:5000/v2/; curl -s --max-time 1 http://192.0.2.1/ || true")
		if got := a.sent(t) - before; got < 2 {
			t.Errorf("%d packets were counted: what is compared below shows nothing", got)
		}
	})
	look := func() trace.State {
		t.Helper()
		state, err := trace.Take(t.Context(), func(_ context.Context, command ...string) (string, error) { return h.run(command...) })
		must(t, err)
		return state
	}
	a := &airgapped{host: h, look: look, empty: look()}
	content := filepath.Join(maker.root(), bundleFile)
	t.Run("refused by name", func(t *testing.T) { a.refuses(t, maker, content) })
	// The disk is carried over.
	must(t, os.Rename(content, filepath.Join(h.root(), bundleFile)))
	must(t, os.Rename(content+".digest", filepath.Join(h.root(), bundleFile+".digest")))
	a.empty = look()
	if !t.Run("from a file", func(t *testing.T) {
		a.install(t, bundleFile, nil)
		t.Run("once more changes nothing", func(t *testing.T) {
			before := a.server(t)
			r := h.llmbox(t, installWithin, a.args(bundleFile)...)
			r.ends(t, 0)
			t.Logf("%.1f s", r.took.Seconds())
			r.changed(t)
			if now := a.server(t); now != before {
				t.Errorf("k3s was %s and is %s", before, now)
			}
			a.serves(t)
		})
		a.uninstall(t)
	}) {
		return
	}
	t.Run("from standard input", func(t *testing.T) {
		must(t, os.Rename(filepath.Join(h.root(), bundleFile), content))
		must(t, os.Remove(filepath.Join(h.root(), bundleFile+".digest")))
		a.empty = look()
		file, err := os.Open(content) // #nosec G304 -- the lab's own
		must(t, err)
		defer func() { _ = file.Close() }()
		a.install(t, "-", file)
		a.uninstall(t)
	})
	h.stop(t)
}

// TestJoinFromABundle has a second machine join that reaches the first one and nothing
// else.
func TestJoinFromABundle(t *testing.T) {
	onlyWhereAsked(t, true)
	bin := binDir(t)
	for _, name := range []string{"k3s-standin", "envoy-gateway", "proxy-standin"} {
		if _, err := os.Stat(filepath.Join(bin, "lab", name)); err != nil {
			t.Skipf("%v: run `make lab-machine lab-node-gateway` first", err)
		}
	}
	first := startMachine(t, bin, "--model", modelName, "--nodes", "2")
	first.machine = first.Machines[0].Name
	second := first.others()[0]
	first.furnishForBundle(t)
	second.furnishForBundle(t)
	first.makeBundle(t)
	first.install(t).ends(t, 0)
	token := strings.TrimSpace(firstLine(first.must(t, "/root/llmbox", "token", "create", "--ttl", "30m")))
	second.must(t, "sh", "-ec", "ip route delete default; ip route add blackhole 10.99.0.254; "+deadEnd)
	must(t, os.Rename(filepath.Join(first.root(), bundleFile), filepath.Join(second.root(), bundleFile)))
	second.write(t, "/root/token", 0o600, token+"\n")
	look := func() trace.State {
		t.Helper()
		state, err := trace.Take(t.Context(), func(_ context.Context, command ...string) (string, error) { return second.run(command...) })
		must(t, err)
		return state
	}
	a := &airgapped{host: second, look: look, empty: look()}
	args := append(a.args(bundleFile), "--server", "https://"+first.Machines[0].Address+":6443", "--token-file", "/root/token")
	args[0] = "join"
	sent := a.sent(t)
	for _, again := range []bool{false, true} {
		r := second.llmbox(t, installWithin, args...)
		r.ends(t, 0)
		t.Logf("%.1f s", r.took.Seconds())
		if again {
			r.changed(t)
		}
	}
	client := first.client(t)
	eventually(t, 2*time.Minute, func(ctx context.Context) error {
		n, err := client.CoreV1().Nodes().Get(ctx, second.machine, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if q := n.Status.Allocatable["nvidia.com/gpu"]; q.Value() != 1 {
			return fmt.Errorf("it offers %s GPUs", q.String())
		}
		return nil
	})
	reaches(t, first, second.machine)
	must(t, client.CoreV1().Pods("default").Delete(t.Context(), "far", metav1.DeleteOptions{}))
	if packets := a.sent(t) - sent; packets != 0 {
		t.Errorf("%d packets were meant for the outside", packets)
	}
	if out, err := second.run("ls", "-d", "/var/lib/llmbox/models"); err == nil {
		t.Errorf("it has weights that it does not serve: %s", out)
	}
	a.uninstall(t)
	first.stop(t)
}

// furnishForBundle furnishes a machine, with what a bundle of the lab needs besides.
func (h *host) furnishForBundle(t *testing.T) {
	t.Helper()
	h.furnish(t)
	h.write(t, "/root/k3s-images.txt", 0o644, standinImages)
}

func (h *host) makeBundle(t *testing.T) {
	t.Helper()
	r := h.plain(t, nil, "bundle", "create", "--config", "/root/box.yaml", "--without", without(true),
		"--k3s-binary", "/lab/programs/k3s-standin", "--k3s-images", "/root/k3s-images.txt", "-o", bundleFile)
	r.ends(t, 0)
	t.Logf("%.1f s: %s", r.took.Seconds(), r.said)
}

// airgapped is a machine without a cable.
type airgapped struct {
	*host
	look  func() trace.State
	empty trace.State
}

func (a *airgapped) args(file string) []string {
	args := slices.DeleteFunc(a.installArgs("--bundle", file), func(arg string) bool { return arg == "--k3s-binary" || arg == "/lab/programs/k3s-standin" })
	return args
}

// install makes the machine a box and looks at what that sent, wrote and keeps.
func (a *airgapped) install(t *testing.T, file string, stdin io.Reader) {
	t.Helper()
	links := a.must(t, "ls", "/sys/class/net")
	if got := strings.Fields(links); !slices.Equal(got, []string{"dummy0", "dummy0-far", "lo"}) {
		t.Fatalf("the machine has the links %q", got)
	}
	sent, early, used := a.sent(t), a.early(t), a.used(t)
	whereTo := a.listen(t)
	r := a.plain(t, stdin, append(a.args(file), "--output", "json")...)
	r.ends(t, 0)
	t.Logf("installed in %.1f s", r.took.Seconds())
	a.serves(t)
	time.Sleep(5 * time.Second)
	packets, to := a.sent(t)-sent, whereTo()
	t.Logf("packets meant for the outside: %d; for services that kube-proxy did not know yet: %d; links to the outside: none", packets, a.early(t)-early)
	if packets != 0 {
		t.Errorf("%d packets were meant for the outside:\n%s", packets, strings.Join(to, "\n"))
	}
	for _, name := range strings.Fields(a.must(t, "ls", "/sys/class/net")) {
		known := []string{"dummy0", "dummy0-far", "lo", "cni0", "flannel.1"}
		if !slices.Contains(known, name) && !strings.HasPrefix(name, "veth") {
			t.Errorf("there is a link %s", name)
		}
	}
	a.disk(t, used)
}

// disk says what the box takes and that nothing of the bundle is there twice.
func (a *airgapped) disk(t *testing.T, before int64) {
	t.Helper()
	root := a.root()
	archives := map[uint64][]string{}
	var archived, weights int64
	must(t, filepath.WalkDir(filepath.Join(root, "var/lib"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		info, err := d.Info()
		if err != nil {
			return nil // it is a living machine
		}
		stat := info.Sys().(*syscall.Stat_t)
		switch {
		case strings.HasPrefix(d.Name(), "llmbox-bundle-"):
			if archives[stat.Ino] == nil {
				archived += stat.Blocks * 512
			}
			archives[stat.Ino] = append(archives[stat.Ino], strings.TrimPrefix(path, root))
		case strings.Contains(path, "/blobs/") && strings.Contains(path, "/models/"):
			weights += stat.Blocks * 512
		}
		return nil
	}))
	if len(archives) == 0 || weights == 0 {
		t.Errorf("archives %v, weights %d bytes", archives, weights)
	}
	for _, names := range archives {
		if len(names) != 2 {
			t.Errorf("an archive of images has no second name but a copy, or none: %q", names)
		}
	}
	t.Logf("the box takes %.1f MB of disk; archives of images %.1f MB under two names each, weights %.1f MB",
		float64(a.used(t)-before)/1e6, float64(archived)/1e6, float64(weights)/1e6)
}

func (a *airgapped) uninstall(t *testing.T) {
	t.Helper()
	t.Run("uninstall leaves no trace", func(t *testing.T) {
		r := a.llmbox(t, uninstallWithin, "uninstall", "--yes")
		r.ends(t, 0)
		t.Logf("%.1f s", r.took.Seconds())
		var diff []string
		for range 5 {
			if diff = trace.Diff(a.empty, a.look()); len(diff) == 0 {
				break
			}
			time.Sleep(time.Second)
		}
		for _, d := range diff {
			t.Error(d)
		}
		// It removes itself with the box.
		a.must(t, "cp", "/lab/bin/llmbox", "/root/llmbox")
	})
}

// sent counts the packets that were meant for the outside.
func (a *airgapped) sent(t *testing.T) int64 { t.Helper(); return a.counted(t, "!10.43.0.0/16") }

// early counts those to the cluster's own services that nobody translated.
func (a *airgapped) early(t *testing.T) int64 { t.Helper(); return a.counted(t, "10.43.0.0/16") }

func (a *airgapped) counted(t *testing.T, to string) int64 {
	t.Helper()
	out := a.must(t, "iptables", "-t", "mangle", "-nvxL", "POSTROUTING")
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) > 2 && f[len(f)-1] == to && slices.Contains(f, "dummy0") {
			n, err := strconv.ParseInt(f[0], 10, 64)
			must(t, err)
			return n
		}
	}
	t.Fatalf("nobody counts packets to %s:\n%s", to, out)
	return 0
}

// listen has the kernel say which connections begin, until the returned function is
// called: that says which were to the outside.
func (a *airgapped) listen(t *testing.T) func() []string {
	t.Helper()
	var heard bytes.Buffer
	// It ends when nobody holds its standard input any more, this test included.
	cmd := exec.CommandContext(t.Context(), filepath.Join(a.bin, "llmbox-lab"), append(a.exec(), // #nosec G204 -- the lab's own
		"sh", "-c", "conntrack -E -e NEW & read -r line; kill $!")...)
	cmd.Stdout, cmd.WaitDelay = &heard, time.Second
	lifeline, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	return func() []string {
		_ = lifeline.Close()
		_ = cmd.Wait()
		seen := map[string]int{}
		for line := range strings.Lines(heard.String()) {
			to := ""
			for _, field := range strings.Fields(line) {
				switch key, value, _ := strings.Cut(field, "="); {
				case key == "dst" && to == "":
					to = value
				case key == "dport" && !strings.Contains(to, ":"):
					to += ":" + value
				case key == "src" && to == "":
					line = value
				}
			}
			if !slices.ContainsFunc([]string{"10.42.", "10.43.", "127.", "203.0.113.254:"}, func(p string) bool { return strings.HasPrefix(to, p) }) {
				seen[line+" to "+to]++
			}
		}
		var out []string
		for what, n := range seen {
			out = append(out, fmt.Sprintf("%d times from %s", n, what))
		}
		slices.Sort(out)
		return out
	}
}

// used are the bytes that the machine's disk holds, each block once.
func (a *airgapped) used(t *testing.T) int64 {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "du", "-s", "-B1", "-x", a.root()).Output() // #nosec G204 -- the lab's own
	if len(out) == 0 {
		t.Fatal(err) // files that vanish meanwhile are no reason
	}
	n, err := strconv.ParseInt(strings.Fields(string(out))[0], 10, 64)
	must(t, err)
	return n
}

func (a *airgapped) server(t *testing.T) string {
	t.Helper()
	var record struct {
		Started struct {
			PID   int    `json:"pid"`
			Start uint64 `json:"start"`
		} `json:"started"`
	}
	must(t, json.Unmarshal([]byte(a.must(t, "cat", "/var/lib/llmbox/k3s.json")), &record))
	return fmt.Sprintf("%d since %d", record.Started.PID, record.Started.Start)
}

// serves has a program of the machine ask for a token through the gateway: nothing of
// the machine can be reached from outside.
func (a *airgapped) serves(t *testing.T) {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(a.root(), "etc/rancher/k3s/k3s.yaml"))
	must(t, err)
	must(t, os.Mkdir(filepath.Join(a.root(), "root/admin"), 0o700))
	defer func() { _ = os.RemoveAll(filepath.Join(a.root(), "root/admin")) }()
	a.write(t, "/root/admin/cert", 0o600, string(config.CertData))
	a.write(t, "/root/admin/key", 0o600, string(config.KeyData))
	a.write(t, "/root/admin/ca", 0o600, string(config.CAData))
	var secret struct{ Data map[string]string }
	must(t, json.Unmarshal([]byte(a.must(t, "curl", "-sSf", "--cert", "/root/admin/cert", "--key", "/root/admin/key", "--cacert", "/root/admin/ca",
		"https://127.0.0.1:6443/api/v1/namespaces/llm/secrets/gateway-keys")), &secret))
	key, err := base64.StdEncoding.DecodeString(secret.Data["default"])
	must(t, err)
	ask := func(key string) string {
		return a.must(t, "curl", "-sS", "-w", "%{http_code}", "-H", "Authorization: Bearer "+key, "-H", "Content-Type: application/json",
			"-d", `{"model":"`+modelName+`","messages":[{"role":"user","content":"Hello"}],"max_tokens":2}`, "http://203.0.113.254:8080/v1/chat/completions")
	}
	if out := ask(string(key)); !strings.Contains(out, `"completion_tokens":2`) || !strings.HasSuffix(out, "200") {
		t.Errorf("the gateway says %s", out)
	}
	if out := ask(string(key) + "x"); !strings.HasSuffix(out, "401") {
		t.Errorf("with a wrong key the gateway says %s", out)
	}
}

// refuses brings bundles that are of no use, to verify and to install: each is refused
// by name, and nothing is written.
func (a *airgapped) refuses(t *testing.T, maker *host, whole string) {
	manifest := func(key, value string) func(t *testing.T, to *os.File) {
		return func(t *testing.T, to *os.File) { otherManifest(t, to, whole, key, value) }
	}
	size := func(t *testing.T) int64 {
		info, err := os.Stat(whole)
		must(t, err)
		return info.Size()
	}
	for name, tt := range map[string]struct {
		make func(t *testing.T, to *os.File)
		want string
		// late says that only what follows the manifest is wrong: what came before that was
		// verified and is kept for another run, and an uninstall takes it away.
		late bool
	}{
		"a byte changed": {func(t *testing.T, to *os.File) {
			copyOf(t, to, whole, size(t))
			at := size(t) / 2
			b := []byte{0}
			_, err := to.ReadAt(b, at)
			must(t, err)
			_, err = to.WriteAt([]byte{b[0] ^ 1}, at)
			must(t, err)
		}, "was changed or damaged", true},
		"cut off":              {func(t *testing.T, to *os.File) { copyOf(t, to, whole, size(t)*3/5) }, "is cut off", true},
		"another architecture": {manifest("architecture", "riscv64"), "another architecture", false},
		"older than llmbox":    {manifest("llmbox_version", "0.0.0-alpha"), "is older than this llmbox", false},
		"no bundle":            {func(t *testing.T, to *os.File) { _, err := to.WriteString("#!/bin/sh\n"); must(t, err) }, "is no bundle of llmbox", false},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(a.root(), "root/bad.tar.zst")
			file, err := os.Create(path) // #nosec G304 -- the lab's own
			must(t, err)
			defer func() { _ = os.Remove(path) }()
			tt.make(t, file)
			must(t, file.Close())
			before := a.look()
			for _, args := range [][]string{{"bundle", "verify", "/root/bad.tar.zst"}, append(a.args("/root/bad.tar.zst"), "--output", "json")} {
				r := a.plain(t, nil, args...)
				r.ends(t, 2)
				if !strings.Contains(r.said, tt.want) {
					t.Errorf("%s does not say %q: %s", args[0], tt.want, r.said)
				}
			}
			if tt.late {
				a.llmbox(t, uninstallWithin, "uninstall", "--yes").ends(t, 0)
				a.must(t, "cp", "/lab/bin/llmbox", "/root/llmbox")
			}
			for _, d := range trace.Diff(before, a.look()) {
				t.Errorf("it leaves %s", d)
			}
		})
	}
}

// otherManifest writes a bundle that says something else of itself. What a machine refuses
// by that alone needs nothing behind it.
func otherManifest(t *testing.T, to io.Writer, whole, key, value string) {
	t.Helper()
	file, err := os.Open(whole) // #nosec G304 -- the lab's own
	must(t, err)
	defer func() { _ = file.Close() }()
	unpacked, err := zstd.NewReader(file)
	must(t, err)
	defer unpacked.Close()
	archive := tar.NewReader(unpacked)
	head, err := archive.Next()
	must(t, err)
	var says map[string]any
	must(t, json.NewDecoder(archive).Decode(&says))
	if says[key] == nil {
		t.Fatalf("%s does not say its %s", head.Name, key)
	}
	says[key] = value
	raw, err := json.Marshal(says)
	must(t, err)
	packed, err := zstd.NewWriter(to)
	must(t, err)
	out := tar.NewWriter(packed)
	must(t, out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: head.Name, Mode: 0o644, Size: int64(len(raw))}))
	_, err = out.Write(raw)
	must(t, err)
	must(t, errors.Join(out.Close(), packed.Close()))
}

func copyOf(t *testing.T, to *os.File, from string, bytes int64) {
	t.Helper()
	file, err := os.Open(from) // #nosec G304 -- the lab's own
	must(t, err)
	defer func() { _ = file.Close() }()
	_, err = io.CopyN(to, file, bytes)
	must(t, err)
}

// plainRun is a run of llmbox whose standard output is its own.
type plainRun struct {
	llmboxRun
	out string
}

// plain runs llmbox on the machine as it is, without asking for events.
func (h *host) plain(t *testing.T, stdin io.Reader, args ...string) plainRun {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), installWithin)
	defer cancel()
	var out, said bytes.Buffer
	cmd := exec.CommandContext(ctx, filepath.Join(h.bin, "llmbox-lab"), slices.Concat(h.exec(), []string{"/root/llmbox"}, args)...) // #nosec G204 -- the lab's own
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = stdin, &out, &said, time.Second
	began := time.Now()
	err := cmd.Run()
	r := plainRun{llmboxRun{args: args, took: time.Since(began), said: said.String() + out.String(), code: cmd.ProcessState.ExitCode()}, out.String()}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Fatalf("llmbox %s: %v: %s", args[0], errors.Join(err, ctx.Err()), r.said)
	}
	return r
}
