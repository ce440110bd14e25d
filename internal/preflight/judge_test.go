package preflight

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// A check that blocks, panics or says nothing costs its deadline and no more, and
// the others keep their answers.
func TestJudgeBoundsEachCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		checks := []Check{
			{ID: "blocks", Title: "b", Required: "r", Source: "s", Judge: func(Facts) []finding.Finding { <-release; return nil }},
			{ID: "panics", Title: "p", Required: "r", Source: "s", Judge: func(Facts) []finding.Finding { panic("index out of range") }},
			{ID: "dereferences", Title: "p", Required: "r", Source: "s", Judge: func(f Facts) []finding.Finding { return well(f.GPU.Driver) }},
			{ID: "answers", Title: "a", Required: "r", Source: "s", Judge: func(Facts) []finding.Finding { return well("fine") }},
		}
		begin := time.Now()
		found := Judge(t.Context(), checks, Facts{Snapshot: snapshot.New()})
		if took := time.Since(begin); took != Deadline {
			t.Errorf("took %s, want exactly %s", took, Deadline)
		}
		got := map[string]finding.Finding{}
		for _, f := range found {
			got[f.ID] = f
		}
		if len(got) != len(checks) {
			t.Fatalf("%d findings for %d checks: %+v", len(got), len(checks), found)
		}
		for id, word := range map[string]string{"blocks": "no answer within 2s", "panics": "index out of range", "dereferences": "nil pointer"} {
			f := got[id]
			if f.State != finding.Unreadable || f.Severity != finding.Warn || !strings.Contains(f.Measured, word) {
				t.Errorf("%s: %+v, want an unreadable warning that says %q", id, f, word)
			}
		}
		if got["answers"].Severity != finding.OK {
			t.Errorf("the well check is %+v", got["answers"])
		}
		close(release)
		synctest.Wait()
	})
}

// A context that ends first ends the wait for a blocked check at once.
func TestJudgeObeysTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		begin := time.Now()
		Judge(ctx, []Check{{ID: "blocks", Judge: func(Facts) []finding.Finding { <-release; return nil }}}, Facts{Snapshot: snapshot.New()})
		if took := time.Since(begin); took != 100*time.Millisecond {
			t.Errorf("took %s", took)
		}
		close(release)
		synctest.Wait()
	})
}

// An empty snapshot is one in which nothing could be read: nothing may be called
// broken, and no check may break over it.
func TestEmptySnapshotIsNoFailure(t *testing.T) {
	t.Parallel()
	facts := Facts{Snapshot: snapshot.New(), Need: Need{
		Disk: []DiskNeed{{Path: "/var/lib/rancher", Bytes: 1 << 40, What: "x"}}, MemoryBytes: 1 << 50, CPUMillis: 1 << 30,
		Ports: []PortNeed{{Port: 8080}}, Hosts: []string{"a.example"}, CUDA: "13.0", K3sVersion: "v1.36.4+k3s1",
	}}
	for _, f := range Judge(t.Context(), Checks(), facts) {
		if bad(f) {
			t.Errorf("%s is %s: %s", f.ID, f.Severity, f.Measured)
		}
	}
}

func TestOfflineLeavesTheNetworkOut(t *testing.T) {
	t.Parallel()
	facts, _ := loadCase(t, "ok-a10-ubuntu-2404")
	facts.Need.Offline = true
	left := 0
	for _, f := range Judge(t.Context(), Checks(), facts) {
		check, ok := checkByID(f.ID)
		if ok && check.Network {
			left++
			if f.State != finding.NotApplicable || f.Severity != finding.OK {
				t.Errorf("%s is %s, %s", f.ID, f.Severity, f.State)
			}
		}
	}
	if left < 3 {
		t.Errorf("only %d checks of the network", left)
	}
}

func TestHostOf(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"https://ghcr.io/v2/": "ghcr.io", "ghcr.io": "ghcr.io", "ghcr.io:8443": "ghcr.io", "https://[2001:db8::1]:5000/": "2001:db8::1", "": "",
	} {
		if got := hostOf(address); got != want {
			t.Errorf("hostOf(%q) = %q, want %q", address, got, want)
		}
	}
}

// A table of what the registry promises.
func TestRegistry(t *testing.T) {
	t.Parallel()
	ids := checkIDs()
	seen := map[string]bool{}
	for _, id := range ids {
		if seen[id] {
			t.Errorf("%s is there twice", id)
		}
		seen[id] = true
	}
	for _, c := range Checks() {
		if c.Title == "" || c.Required == "" || c.Source == "" || c.Judge == nil {
			t.Errorf("%s is incomplete", c.ID)
		}
		for _, cause := range c.Causes {
			if !seen[cause] {
				t.Errorf("%s names %s as a cause, which no check returns", c.ID, cause)
			}
		}
	}
	for n := range xids() {
		for _, cause := range xidCauses(n) {
			if !seen[cause] {
				t.Errorf("Xid %d names %s as a cause, which no check returns", n, cause)
			}
		}
	}
}

// No finding may name itself among its causes through others: a circle has no root.
func TestCausesHaveNoCircle(t *testing.T) {
	t.Parallel()
	edges := map[string][]string{}
	for _, c := range Checks() {
		ids := c.Also
		if len(ids) == 0 {
			ids = []string{c.ID}
		}
		for _, id := range ids {
			edges[id] = append(edges[id], c.Causes...)
		}
	}
	for n := range xids() {
		edges[fmt.Sprintf("gpu.xid.%d", n)] = xidCauses(n)
	}
	var walk func(id string, path []string)
	walk = func(id string, path []string) {
		for _, p := range path {
			if p == id {
				t.Fatalf("a circle: %s -> %s", strings.Join(path, " -> "), id)
			}
		}
		for _, next := range edges[id] {
			walk(next, append(path[:len(path):len(path)], id))
		}
	}
	for id := range edges {
		walk(id, nil)
	}
}

func TestVersions(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		a, b      string
		older, ok bool
	}{
		{"1.17.8-1", "1.17.8", false, true}, // Debian's revision is no pre-release
		{"1.17.7-1", "1.17.8", true, true},
		{"1.17.8~rc.1-1", "1.17.8", true, true},
		{"1.18.0-rc.2", "1.18.0", true, true},
		{"1:2.0-3", "1.9", false, true}, // an epoch
		{"v1.36.4+k3s1", "1.36.4", false, true},
		{"550.90.07", "550.107.02", true, true},
		{"550.107.02-0ubuntu1", "550.90.07", false, true},
		{"12.4", "12.10", true, true},
		{"6.8.0", "5.8", false, true},
		{"", "1.0", false, false},
		{"unknown", "1.0", false, false},
	} {
		got, ok := older(c.a, c.b)
		if got != c.older || ok != c.ok {
			t.Errorf("older(%q, %q) = %t, %t, want %t, %t", c.a, c.b, got, ok, c.older, c.ok)
		}
	}
	for v, want := range map[string]int{"v1.36.4+k3s1": 36, "1.35": 35, "": 0, "v1": 0, "v1.x": 0} {
		if got := kubernetesMinor(v); got != want {
			t.Errorf("kubernetesMinor(%q) = %d, want %d", v, got, want)
		}
	}
	if !samePrefix("550.107.02", "550.107") || samePrefix("550.90.07", "550.107.02") || samePrefix("550", "550.90.07") {
		t.Error("NVML's shortened number is compared by its prefix, and only that")
	}
	for _, c := range [][2]string{{"6.8.0-1021-gcp", "6.8.0-1024-gcp"}, {"6.8.0-9-generic", "6.8.0-31-generic"}, {"5.14.0-427.el9", "5.14.0-503.11.1.el9_5"}} {
		if !kernelLess(c[0], c[1]) || kernelLess(c[1], c[0]) {
			t.Errorf("%s must come before %s", c[0], c[1])
		}
	}
}

// What only warns explains no failure away: the failure stops the install, the warning
// does not.
func TestArrangeKeepsFailuresBehindWarnings(t *testing.T) {
	found := Arrange([]finding.Finding{
		{ID: "space", Severity: finding.Fail, Causes: []string{"pressure"}},
		{ID: "pressure", Severity: finding.Warn, Causes: []string{"space"}},
		{ID: "other", Severity: finding.Warn, Causes: []string{"pressure"}},
		{ID: "down", Severity: finding.Fail, Causes: []string{"space", "pressure"}},
	})
	got := map[string]string{}
	for _, f := range found {
		got[f.ID] = strings.Join(f.Causes, ",")
	}
	want := map[string]string{"space": "", "pressure": "space", "other": "pressure", "down": "space"}
	if !maps.Equal(got, want) || found[0].ID != "space" {
		t.Errorf("%v, first %s", got, found[0].ID)
	}
}

// The ways to the pods of other nodes are no networks of somebody else, once there is a
// box; everything else in the cluster's networks still is.
func TestRoutesOfTheBoxItself(t *testing.T) {
	const head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
	for _, tt := range []struct {
		name, line string
		installed  bool
		want       finding.Severity
	}{
		{"another node's pods", "ens5\t00012A0A\t0100630A\t0003\t0\t0\t0\t00FFFFFF\t0\t0\t0\n", true, finding.OK},
		{"the same before there is a box", "ens5\t00012A0A\t0100630A\t0003\t0\t0\t0\t00FFFFFF\t0\t0\t0\n", false, finding.Fail},
		{"a network that is wider", "wg0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n", true, finding.Fail},
		{"one in the services'", "wg0\t00002B0A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n", true, finding.Fail},
	} {
		s := snapshot.New()
		s.AddFile("/proc/net/route", head+tt.line)
		found := judgeOverlap(Facts{Snapshot: s, Need: Need{PodCIDR: "10.42.0.0/16", ServiceCIDR: "10.43.0.0/16", Installed: tt.installed}})
		if len(found) != 1 || found[0].Severity != tt.want {
			t.Errorf("%s: %+v", tt.name, found)
		}
	}
}
