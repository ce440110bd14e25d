package e2e

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/internal/bake"
)

// firstBootWithin bounds two first boots side by side on two cores.
const firstBootWithin = 15 * time.Minute

// TestBake has a builder bake its disk, and two copies of it boot side by side, with no
// way to anywhere: each becomes a box by itself, and they have nothing in common that
// should be one's own. As in TestSystemd the box has no component, so that what is
// compared with an install without an image is the time until k3s is ready.
func TestBake(t *testing.T) {
	onlyWhereAsked(t, true)
	needsContainer(t)
	bin := binDir(t)
	needs(t, bin, []string{"k3s-standin", "local-path-provisioner"})
	m := newBooted(t, bin)
	m.serveImages(t)
	plain := m.clone(t, "plain")
	m.boot(t, 2)
	m.furnish(t)
	must(t, os.WriteFile(filepath.Join(m.root, "root/k3s-images.txt"), []byte(standinImages), 0o600))
	installFlags := bakedFlags(m.installArgs())
	components := valueOf(t, installFlags, "--without")

	out, err := m.run("/lab/llmbox", "bundle", "create", "--config", "/root/box.yaml", "--without", components,
		"--k3s-binary", "/lab/programs/k3s-standin", "--k3s-images", "/root/k3s-images.txt", "-o", bundleFile)
	if err != nil {
		t.Fatalf("bundle create: %v\n%s", err, out)
	}
	t.Run("a machine with an id is no image", func(t *testing.T) {
		if out, code, _ := m.attempt("bake", "--check"); code != 3 || !strings.Contains(out, "/etc/machine-id") {
			t.Errorf("it ended with %d:\n%s", code, out)
		}
	})
	line := append([]string{"/lab/llmbox", "bake", "--bundle", bundleFile, "--config", "/root/box.yaml", "--output", "json", "--"}, installFlags...)
	for range 2 {
		if out, err := m.run(line...); err != nil {
			t.Fatalf("bake: %v\n%s", err, out)
		}
	}
	if out, code, _ := m.attempt("bake", "--check"); code != 0 {
		t.Fatalf("the image is not clean: %d\n%s", code, out)
	}
	m.must(t, "rm", bundleFile, bundleFile+".digest", "/root/box.yaml", "/root/k3s-images.txt")
	m.must(t, "sync")
	m.halt(t)
	// A machine that was halted keeps what its systemd mounted over the empty id.
	must(t, os.WriteFile(filepath.Join(m.root, "etc/machine-id"), nil, 0o600))

	clones := []*booted{m.clone(t, "a"), m.clone(t, "b")}
	for _, c := range clones {
		c.bootAlone(t)
	}
	var longest time.Duration
	for _, c := range clones {
		deadline := time.Now().Add(firstBootWithin)
		for {
			if _, err := os.Stat(filepath.Join(c.root, bake.ReadyFile)); err == nil {
				break
			}
			if why, err := os.ReadFile(filepath.Join(c.root, bake.FailedFile)); err == nil || time.Now().After(deadline) {
				log, _ := c.run("sh", "-c", "tail -n 20 /var/log/llmbox/firstboot.log; journalctl -u llmbox-firstboot --no-pager -o cat -n 30; journalctl -u k3s --no-pager -o cat -n 30")
				t.Fatalf("%s does not become a box: %s\n%s", c.name, why, log)
			}
			time.Sleep(time.Second)
		}
		c.until(t, time.Minute, "the first boot to end", func() bool { return c.property(t, bake.UnitName, "ActiveState") == "inactive" })
		took := c.monotonic(t, "ExecMainExitTimestampMonotonic") - c.monotonic(t, "ExecMainStartTimestampMonotonic")
		t.Logf("%s: first boot took %s", c.name, took.Round(100*time.Millisecond))
		longest = max(longest, took)
	}
	for _, c := range clones {
		if n := c.sentOut(t); n != 0 {
			t.Errorf("%s sent %d packets to the outside", c.name, n)
		}
		if _, err := os.Lstat(filepath.Join(c.root, bake.UnitLink)); err == nil {
			t.Errorf("%s would run its first boot again", c.name)
		}
		c.active(t)
	}
	nothingInCommon(t, m.root, clones[0].root, clones[1].root)
	for _, c := range clones {
		c.halt(t)
	}
	// The images come from next door here: what a download costs elsewhere is not in it.
	plain.boot(t, 3)
	plain.furnish(t)
	took := plain.llmbox(t, 0, plain.installArgs()...)
	t.Logf("without an image %s, alone on the machine: %.2f times the slower of two first boots side by side", took.Round(100*time.Millisecond), took.Seconds()/longest.Seconds())
}

// monotonic asks systemd when something happened to the unit of the first boot.
func (m *booted) monotonic(t *testing.T, property string) time.Duration {
	t.Helper()
	micros, err := strconv.ParseInt(m.property(t, bake.UnitName, property), 10, 64)
	must(t, err)
	return time.Duration(micros) * time.Microsecond
}

// bakedFlags are those of an install that may follow --.
func bakedFlags(args []string) []string {
	var out []string
	for i := 1; i < len(args); i++ {
		if args[i] == "--config" || args[i] == "--k3s-binary" {
			i++
			continue
		}
		out = append(out, args[i])
	}
	return out
}

func valueOf(t *testing.T, args []string, name string) string {
	t.Helper()
	for i := range len(args) - 1 {
		if args[i] == name {
			return args[i+1]
		}
	}
	t.Fatalf("no %s", name)
	return ""
}

// sentOut counts what was meant for the outside, the cluster's own services left out.
func (m *booted) sentOut(t *testing.T) int64 {
	t.Helper()
	for line := range strings.Lines(m.must(t, "iptables", "-t", "mangle", "-L", "POSTROUTING", "-v", "-n", "-x")) {
		if f := strings.Fields(line); strings.Contains(line, "!10.43.0.0/16") && len(f) > 0 {
			n, err := strconv.ParseInt(f[0], 10, 64)
			must(t, err)
			return n
		}
	}
	t.Fatal("nothing counts")
	return 0
}

// nothingInCommon compares every file that two clones made, byte by byte, and every key,
// certificate and token inside them.
func nothingInCommon(t *testing.T, image, a, b string) {
	t.Helper()
	secret := regexp.MustCompile(`/tls/|/cred/|token|passw|machine-id|\.key$|\.crt$|\.pem$|\.kubeconfig$|k3s\.yaml$`)
	// Settings of Kubernetes' programs that lie beside their credentials and hold none.
	settings := regexp.MustCompile(`/cred/(scheduler|egress-selector-config|kwok)\.yaml$`)
	inside := regexp.MustCompile(`(?s)-----BEGIN [A-Z ]+-----.+?-----END [A-Z ]+-----|K10[0-9a-f]{64}::[a-z]+:[0-9a-f]+`)
	found := map[string]string{}
	files, alike := 0, []string{}
	each := func(root string, do func(name string, content []byte)) {
		for _, top := range []string{"etc/machine-id", "etc/rancher", "var/lib/llmbox", "var/lib/rancher", "var/lib/kubelet", "var/log/llmbox"} {
			_ = filepath.WalkDir(filepath.Join(root, top), func(at string, d fs.DirEntry, err error) error {
				if err != nil || !d.Type().IsRegular() {
					return nil //nolint:nilerr // files come and go while a box runs
				}
				name, err := filepath.Rel(root, at)
				// What came out of the bundle holds certificates that are everybody's.
				if err != nil || strings.Contains(name, "/containerd/") || strings.Contains(name, "/images/") || strings.Contains(name, "llmbox/cache/") || strings.HasPrefix(name, "var/lib/kubelet/pods/") {
					return nil //nolint:nilerr // as above
				}
				const most = 256 << 20
				if info, err := d.Info(); err == nil && info.Size() < most {
					if content, err := os.ReadFile(at); err == nil { // #nosec G304 -- the test's own
						do(name, content)
					}
				}
				return nil
			})
		}
	}
	each(a, func(name string, content []byte) {
		files++
		if old, err := os.ReadFile(filepath.Join(image, name)); err == nil && bytes.Equal(old, content) { // #nosec G304 -- the test's own
			return // it was in the image, which was held against what may be
		}
		for _, key := range inside.FindAll(content, -1) {
			found[string(key)] = name
		}
		other, err := os.ReadFile(filepath.Join(b, name)) // #nosec G304 -- the test's own
		if err != nil || len(content) == 0 || !bytes.Equal(content, other) {
			return
		}
		alike = append(alike, name)
		if secret.MatchString(name) && !settings.MatchString(name) {
			t.Errorf("both have the same %s", name)
		}
	})
	each(b, func(name string, content []byte) {
		for _, key := range inside.FindAll(content, -1) {
			if where, both := found[string(key)]; both {
				t.Errorf("%s of one is in %s of the other", where, name)
			}
		}
	})
	if len(found) == 0 {
		t.Error("no key was found in a box: what was compared shows nothing")
	}
	said, err := json.Marshal(alike)
	must(t, err)
	t.Logf("%d files, %d keys, certificates and tokens, none in both; made by both and alike: %s", files, len(found), said)
}
