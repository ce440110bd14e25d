package trace

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func load(t *testing.T, name string) State {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return parse(string(raw))
}

func TestDiff(t *testing.T) {
	before := load(t, "before.txt")
	if d := Diff(before, load(t, "looked-again.txt")); len(d) > 0 {
		t.Errorf("the same machine differs: %q", d)
	}
	want := []string{
		"+ cgroup: /sys/fs/cgroup/cpu/kubepods", "+ file: d 755 0:0 - /run/netns", "- filter iptables-nft: filter -A INPUT -p tcp -j ACCEPT",
		"+ filter iptables-nft: nat :KUBE-MARK-MASQ -", "+ filter iptables-nft: nat :OUTPUT DROP", "+ hash: bb  /etc/hosts", "- hash: aa  /etc/hosts",
		"+ link: cni0 <UP> mtu 1450", "+ process: /bin/shim -id aa (2 times)", "+ sysctl: /proc/sys/net/ipv4/ip_forward:1", "- sysctl: /proc/sys/net/ipv4/ip_forward:0",
	}
	got := Diff(before, load(t, "after.txt"))
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// The script runs wherever there is a shell.
func TestScript(t *testing.T) {
	if out, err := exec.CommandContext(t.Context(), "sh", "-n", "look.sh").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	state, err := Take(t.Context(), func(context.Context, ...string) (string, error) { return "## self 7\n## file\nf 644 0:0 1 /x \n", nil })
	if err != nil || len(state) != 1 || len(state["file"]) != 1 {
		t.Errorf("%v, %v", state, err)
	}
}
