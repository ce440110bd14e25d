package doctor

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func k3sChecks() []Check {
	hostRoots := []string{
		"k3s.port_conflict", "host.cgroup.v1", "host.cgroup.memory", "host.clock", "host.disk.*", "host.modules", "host.selinux", "host.apparmor", "host.readonly", "host.noexec", "host.disk.full",
		"net.default_route", "net.loopback", "host.sysctl.inotify", "host.disk.filesystem", "host.oom",
	}
	hostRoots = slices.Clip(hostRoots)
	specific := []string{"k3s.certificate_expired", "k3s.token_mismatch", "k3s.datastore", "k3s.snapshotter", "net.node_ip_lost", "k3s.config"}
	return []Check{
		{
			ID: "k3s.log", Also: failureIDs(), Layer: LayerK3s, Title: "k3s's log", Reads: "journal of k3s", Rule: "k3s stays up",
			Source: "k3s-io/k3s#1011, #3888, #5163, #10020", Judge: judgeK3sLog,
			Fix: "sudo journalctl -u k3s -n 50 --no-pager",
		},
		{
			ID: "k3s.service", Layer: LayerK3s, Title: "k3s", Reads: "state of the unit k3s, or llmbox's own supervisor", Rule: "active",
			Source: "docs.k3s.io/advanced, running k3s with systemd", Judge: judgeK3sService, Fix: "sudo systemctl start k3s",
			Repair: "k3s.start", Causes: append(append(hostRoots, specific...), "k3s.start_failed"),
		},
		{
			ID: "k3s.api", Layer: LayerK3s, Title: "API server", Reads: "the API server's own answer", Rule: "an answer",
			Source: "kubernetes docs, API health endpoints", Judge: judgeAPI, Fix: "See why: sudo journalctl -u k3s -n 50 --no-pager",
			Causes: append(append(hostRoots, specific...), "k3s.start_failed", "k3s.service", "k3s.slow_datastore", "net.firewall", "net.proxy"),
		},
		{
			ID: "k3s.certificate_expired", Layer: LayerK3s, Title: "Certificates of k3s", Reads: "certificates under server/tls and agent, k3s's log", Rule: "valid for 14 days more",
			Source: "docs.k3s.io/cli/certificate; k3s-io/k3s#1621", Judge: judgeCertificates, Fix: "sudo k3s certificate rotate && sudo systemctl restart k3s",
			Causes: []string{"host.clock"},
		},
		{
			ID: "k3s.slow_datastore", Layer: LayerK3s, Title: "Datastore of k3s", Reads: "Slow SQL in k3s's log, size of state.db, fsync", Rule: "answers within a second",
			Source: "k3s-io/k3s#2615, #8042, #11901", Judge: judgeSlow, Fix: "Move k3s's data to a faster disk. What waits for the disk now: sudo iostat -x 5 2",
			Causes: []string{"host.disk.pressure", "host.disk.fsync", "host.disk.full", "host.disk.errors"},
		},
		{
			ID: "host.clock", Layer: LayerHost, Title: "Clock", Reads: "certificates' dates against the machine's time", Rule: "a time at which the box's own certificates are valid",
			Source: "k3s-io/k3s#5163, #6368", Judge: judgeClock, Fix: "sudo timedatectl set-ntp true && sudo systemctl restart k3s",
		},
		{
			ID: "host.oom", Layer: LayerHost, Title: "Memory of the machine", Reads: "the kernel's log", Rule: "no program ended by the kernel for want of memory",
			Source: "linux Documentation/admin-guide/mm/concepts.rst, OOM killer", Judge: judgeOOM, Fix: "See who takes it: ps aux --sort=-rss | head. Take a machine with more memory, or give the model less: llmbox plan",
		},
		{
			ID: "host.disk.full", Layer: LayerStorage, Title: "Full disk", Reads: "file systems, k3s's log", Rule: "free space and free inodes under k3s, kubelet and the model",
			Source: "k3s-io/k3s#6290, #5813; GoogleCloudPlatform/kubernetes-engine-samples#1581", Judge: judgeFull, Repair: "disk.images",
			Fix: "See what takes it: sudo du -xh --max-depth=2 /var | sort -h | tail. Unused images go by: sudo k3s crictl rmi --prune",
		},
		{
			ID: "host.disk.errors", Layer: LayerStorage, Title: "Errors of a disk", Reads: "the kernel's log", Rule: "no input or output error, nothing remounted read-only",
			Source: "linux Documentation/filesystems/ext4; kernel block layer messages", Judge: judgeDiskErrors, Fix: "Save what matters, then replace the disk or check it: sudo fsck (unmounted)",
		},
	}
}

// k3sFailure maps a known failure of k3s to the finding that it is.
func k3sFailure(name string) string {
	switch name {
	case "port-in-use":
		return "k3s.port_conflict"
	case "address-gone":
		return "net.node_ip_lost"
	case "address-unassignable":
		return "net.loopback"
	case "no-route":
		return "net.default_route"
	case "wrong-token":
		return "k3s.token_mismatch"
	case "cgroup-v1":
		return "host.cgroup.v1"
	case "cgroup-missing":
		return "host.cgroup.memory"
	case "datastore-newer", "datastore-older", "datastore-broken":
		return "k3s.datastore"
	case "clock":
		return "host.clock"
	case "certificate-expired":
		return "k3s.certificate_expired"
	case "disk-full":
		return "host.disk.full"
	case "disk-read-only":
		return "host.readonly"
	case "overlay":
		return "k3s.snapshotter"
	case "network-module":
		return "host.modules"
	case "selinux":
		return "host.selinux"
	case "inotify":
		return "host.sysctl.inotify"
	case "memory":
		return "host.oom"
	case "bad-argument", "bad-config", "bad-kubelet-config", "setting-changed", "kernel-settings", "duplicate-node":
		return "k3s.config"
	case "runtime-handler":
		return "runtime.containerd"
	}
	return "k3s.start_failed"
}

func failureIDs() []string {
	return []string{"net.node_ip_lost", "k3s.token_mismatch", "k3s.datastore", "k3s.snapshotter", "k3s.config", "k3s.start_failed"}
}

// journalLine is how journald shows a line; "-o cat" shows the message alone.
var journalLine = regexp.MustCompile(`^(?:[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) \S+ ([A-Za-z0-9_.-]+)\[(\d+)\]: (.*)$`)

// k3sLog is the journal of k3s, oldest first.
func (f *facts) k3sLog() (lines []k3s.Line, from snapshot.Text) {
	for _, name := range f.Commands() {
		if !strings.HasPrefix(name, "journalctl-k3s") {
			continue
		}
		from = f.Command(name)
		for _, l := range from.Lines() {
			line := k3s.Line{Text: l}
			if m := journalLine.FindStringSubmatch(l); m != nil {
				line.Text, line.Manager = m[3], m[1] == "systemd"
				if pid, err := strconv.Atoi(m[2]); err == nil && !line.Manager {
					line.PID = pid
				}
			}
			lines = append(lines, line)
		}
	}
	return lines, from
}

// k3sDown says whether k3s is known not to be up; known is false where nobody says.
func (f *facts) k3sDown() (down, known bool) {
	for _, name := range []string{"k3s.service", "k3s-agent.service"} {
		if u, state := f.Unit(name); state == snapshot.Present {
			if u.Active == "active" {
				return false, true
			}
			down, known = true, true
		}
	}
	if known {
		return down, known
	}
	if s, ok := f.supervised(); ok {
		return !s.K3s, true
	}
	if f.had["nodes"] {
		return false, true
	}
	var api snapshot.APIProbe
	if state, _ := f.Probe(snapshot.ProbeAPI, &api); state == snapshot.Present {
		return api.Error != "", true
	}
	return false, false
}

// supervised is how it is with a k3s that llmbox itself keeps running; ok is false where
// something else does.
func (f *facts) supervised() (s snapshot.Service, ok bool) {
	state, _ := f.Probe(snapshot.ProbeService, &s)
	return s, state == snapshot.Present && s.Init == "supervised"
}

func judgeK3sLog(f *facts) []finding.Finding {
	lines, from := f.k3sLog()
	if len(lines) == 0 {
		return nil
	}
	if down, known := f.k3sDown(); known && !down {
		// What it said before it came up is history.
		return well("k3s is up", finding.Evidence{File: from.Place})
	}
	verdict := k3s.JudgeLog(lines)
	failure := verdict.Failure
	if failure == nil {
		// A few lines that somebody sent are no whole run; the last known failure counts.
		for i := len(lines) - 1; i >= 0 && failure == nil; i-- {
			if found, ok := k3s.Recognise(lines[i].Text); ok {
				failure = &found
			}
		}
	}
	evidence := finding.Evidence{File: from.Place, Line: verdict.Message}
	if failure == nil {
		if !fatal(lines) {
			return nil
		}
		return named("k3s.start_failed", fail("k3s ended: "+verdict.Message, "", evidence))
	}
	evidence.Line = failure.Line
	id := k3sFailure(failure.Name)
	out := fail(failure.Title+": "+failure.Line, failure.Fix, evidence)
	out[0].ID, out[0].Title, out[0].Required = id, titleOf(id, failure.Title), "k3s stays up"
	if strings.HasPrefix(id, "k3s.") && id != "k3s.port_conflict" || id == "runtime.containerd" {
		// What k3s complains of can have its own cause on the machine.
		out[0].Causes = []string{"host.clock", "host.disk.full", "host.disk.errors", "host.disk.filesystem", "host.readonly"}
	}
	started := named("k3s.start_failed", fail("k3s does not come up"+same(verdict), failure.Fix, evidence))
	started[0].Causes = []string{id}
	return append(out, started...)
}

func same(v k3s.LogVerdict) string {
	if v.Same > 1 {
		return fmt.Sprintf(", %d runs in a row ended for the same reason", v.Same)
	}
	return ""
}

func fatal(lines []k3s.Line) bool {
	for _, l := range lines[max(0, len(lines)-60):] {
		if strings.Contains(l.Text, "level=fatal") || strings.HasPrefix(l.Text, "panic:") || strings.HasPrefix(l.Text, "F0") || strings.HasPrefix(l.Text, "F1") {
			return true
		}
	}
	return false
}

func titleOf(id, otherwise string) string {
	switch id {
	case "net.node_ip_lost":
		return "Address of the node is gone"
	case "k3s.token_mismatch":
		return "Token of k3s"
	case "k3s.datastore":
		return "Datastore of k3s is damaged"
	case "k3s.snapshotter":
		return "File system that carries no container images"
	case "k3s.config":
		return "Configuration of k3s"
	}
	return strings.ToUpper(otherwise[:1]) + otherwise[1:]
}

func judgeK3sService(f *facts) []finding.Finding {
	for _, name := range []string{"k3s.service", "k3s-agent.service"} {
		u, state := f.Unit(name)
		if state != snapshot.Present {
			continue
		}
		evidence := finding.Evidence{File: "commands/" + snapshot.CommandUnits + ".txt", Field: name, Line: "ActiveState=" + u.Active}
		switch {
		case u.Active == "active":
			return well("active since "+u.Since, evidence)
		case u.Active == "activating" && u.Sub == "start":
			return fail("starting, and not up yet", "sudo journalctl -u k3s -f", evidence)
		case u.Load == "masked" || u.File == "masked":
			return fail("masked: systemd may not start it", "sudo systemctl unmask "+name+" && sudo systemctl start "+name, evidence)
		}
		unit := strings.TrimSuffix(name, ".service")
		measured := u.Active + " (" + u.Sub + ")"
		if n, err := strconv.Atoi(u.Restarts); err == nil && n > 0 {
			measured += ", restarted " + count(n, "time")
		}
		return fail(measured, "sudo systemctl start "+unit, evidence)
	}
	s, ok := f.supervised()
	if !ok {
		return nil
	}
	evidence := atProbe(snapshot.ProbeService, "", fmt.Sprintf("supervisor: %t, k3s: %t, exits: %d", s.Supervisor, s.K3s, s.Exits))
	const again = "sudo llmbox install (it starts what keeps k3s running)"
	switch {
	case s.K3s && s.Supervisor:
		return well("kept running by llmbox, process "+strconv.Itoa(s.PID), evidence)
	case s.K3s:
		return warn("k3s runs, and llmbox's supervisor, which would start it again, does not", again, evidence)
	case s.Supervisor:
		measured := "k3s does not stay up: it ended " + count(s.Exits, "time")
		if s.Last != "" {
			measured += ", last: " + oneLine(s.Last)
		}
		return fail(measured, "What it said last: sudo tail -n 50 /var/log/llmbox/k3s.log", evidence)
	}
	return fail("neither k3s nor llmbox's supervisor, which keeps it running, is there", again, evidence)
}

func judgeAPI(f *facts) []finding.Finding {
	var api snapshot.APIProbe
	switch state, why := f.Probe(snapshot.ProbeAPI, &api); {
	case state == snapshot.Present && api.Error == "":
		return well(fmt.Sprintf("%s answered in %d ms", cmp.Or(api.Version, api.Server), api.ElapsedMS))
	case state == snapshot.Present:
		return fail(api.Server+": "+oneLine(api.Error), "", atProbe(snapshot.ProbeAPI, "error", api.Error))
	case state == snapshot.Unreadable:
		return unread("whether the API server answers", why)
	}
	if why := f.Manifest.Unreadable["cluster"]; why != "" {
		return unread("the cluster", why)
	}
	return nil
}

func judgeCertificates(f *facts) []finding.Finding {
	var certificates []snapshot.Certificate
	if state, _ := f.Probe(snapshot.ProbeCertificates, &certificates); state != snapshot.Present {
		return nil
	}
	const soon = 14 * 24 * time.Hour
	var gone, near []string
	var evidence []finding.Evidence
	checked := 0
	for _, c := range certificates {
		if c.NotAfter.IsZero() || !strings.HasPrefix(c.Place, "/") || f.now().IsZero() {
			continue
		}
		checked++
		text := fmt.Sprintf("%s until %s", c.Place, c.NotAfter.UTC().Format(time.DateOnly))
		switch left := c.NotAfter.Sub(f.now()); {
		case left <= 0:
			gone = append(gone, text)
			evidence = append(evidence, atProbe(snapshot.ProbeCertificates, c.Place, "not_after "+c.NotAfter.UTC().Format(time.RFC3339)))
		case left < soon:
			near = append(near, text)
			evidence = append(evidence, atProbe(snapshot.ProbeCertificates, c.Place, "not_after "+c.NotAfter.UTC().Format(time.RFC3339)))
		}
	}
	evidence = evidence[:min(3, len(evidence))]
	switch {
	case len(gone) > 0:
		return fail("expired: "+some(2, gone), "", evidence...)
	case len(near) > 0:
		return warn("about to expire: "+some(2, near), "sudo systemctl restart k3s (it renews what ends within 120 days when it starts)", evidence...)
	case checked > 0:
		return well(count(checked, "certificate") + " valid")
	}
	return nil
}

// judgeClock compares the machine's time with what was certainly before it: a box's
// certificates can't have been made in its future.
func judgeClock(f *facts) []finding.Finding {
	var certificates []snapshot.Certificate
	if state, _ := f.Probe(snapshot.ProbeCertificates, &certificates); state != snapshot.Present || f.now().IsZero() {
		return f.clockWords()
	}
	const slack = 5 * time.Minute
	for _, c := range certificates {
		if !c.NotBefore.IsZero() && c.NotBefore.Sub(f.now()) > slack {
			return fail(fmt.Sprintf("the machine says %s, and %s was made on %s", f.now().UTC().Format(time.DateOnly), c.Place, c.NotBefore.UTC().Format(time.DateOnly)), "",
				atProbe(snapshot.ProbeCertificates, c.Place, "not_before"))
		}
	}
	return f.clockWords()
}

var beforeDate = regexp.MustCompile(`certificate has expired or is not yet valid: current time (\S+) is before (\S+)`)

func (f *facts) clockWords() []finding.Finding {
	for _, t := range f.texts {
		if m := beforeDate.FindStringSubmatch(t.data); m != nil && f.speaks(t) && t.kind != "event" {
			if down, known := f.k3sDown(); t.kind == "k3s" && known && !down {
				continue
			}
			return fail("the clock says "+m[1]+", a certificate begins on "+m[2], "", t.evidence(m[0]))
		}
		if i := strings.Index(t.data, "service account token is not valid yet"); i >= 0 && f.speaks(t) {
			return fail("tokens of the cluster were made in the clock's future", "", t.evidence(lineAround(t.data, i)))
		}
	}
	return nil
}

func judgeSlow(f *facts) []finding.Finding {
	lines, from := f.k3sLog()
	slow := 0
	last := ""
	for _, l := range lines {
		if strings.Contains(l.Text, "Slow SQL") || strings.Contains(l.Text, "leaderelection lost") || strings.Contains(l.Text, "apply request took too long") {
			slow++
			last = l.Text
		}
	}
	const many = 20
	var size int64
	for _, name := range []string{"/var/lib/rancher/k3s/server/db/state.db"} {
		if e, state := f.Stat(name); state == snapshot.Present {
			size = e.Size
		}
	}
	measured := fmt.Sprintf("%d slow answers in %s of its log", slow, count(len(lines), "line"))
	if size > 2<<30 {
		measured += fmt.Sprintf("; state.db has %.1f GiB", float64(size)/(1<<30))
	}
	switch {
	case slow >= many, slow > 0 && strings.Contains(last, "leaderelection lost"):
		if down, known := f.k3sDown(); known && down {
			return fail(measured, "", finding.Evidence{File: from.Place, Line: oneLine(last)})
		}
		return warn(measured, "", finding.Evidence{File: from.Place, Line: oneLine(last)})
	case len(lines) > 0:
		return well(measured)
	}
	return nil
}

var oomLine = regexp.MustCompile(`(?:Out of memory: |Memory cgroup out of memory: )?Killed process (\d+) \(([^)]+)\).*?anon-rss:(\d+)kB`)

func judgeOOM(f *facts) []finding.Finding {
	for _, name := range []string{snapshot.CommandDmesg, snapshot.CommandJournalKernel} {
		t := f.Command(name)
		all := oomLine.FindAllStringSubmatch(t.Data, -1)
		if len(all) == 0 {
			continue
		}
		m := all[len(all)-1]
		global := strings.Contains(t.Data, "Out of memory: Killed process") || strings.Contains(t.Data, "Out of memory: Kill process")
		if !global {
			return note("the kernel ended "+m[2]+" for reaching its own limit", finding.Evidence{File: t.Place, Line: oneLine(m[0])})
		}
		kb, err := strconv.ParseInt(m[3], 10, 64)
		if err != nil {
			kb = 0
		}
		out := warn(fmt.Sprintf("the kernel ended %s (pid %s, %.1f GiB)", m[2], m[1], float64(kb)/(1<<20)), "", finding.Evidence{File: t.Place, Line: oneLine(m[0])})
		return out
	}
	return nil
}

// diskPaths are where a full disk stops a box.
func diskPaths() []string {
	return []string{"/var/lib/rancher", "/var/lib/kubelet", "/var/lib/llmbox", "/"}
}

func judgeFull(f *facts) []finding.Finding {
	var disks []snapshot.Disk
	state, _ := f.Probe(snapshot.ProbeDisks, &disks)
	if state != snapshot.Present {
		return nil
	}
	const mib = 1 << 20
	for _, d := range disks {
		if d.Error != "" || d.TotalBytes == 0 || !slices.ContainsFunc(diskPaths(), func(p string) bool { return strings.HasPrefix(d.Path, p) && (p != "/" || d.Path == "/") }) {
			continue
		}
		if d.AvailableBytes < 512*mib && d.AvailableBytes*50 < d.TotalBytes {
			return fail(fmt.Sprintf("%d MiB of %.0f GiB free on %s", d.AvailableBytes/mib, float64(d.TotalBytes)/(1<<30), d.MountPoint), "", atProbe(snapshot.ProbeDisks, d.Path, "available_bytes"))
		}
		if d.Inodes > 0 && d.InodesFree*100 < d.Inodes {
			return fail(fmt.Sprintf("%d of %d inodes free on %s", d.InodesFree, d.Inodes, d.MountPoint), "", atProbe(snapshot.ProbeDisks, d.Path, "inodes_free"))
		}
	}
	return well(count(len(disks), "file system") + " with room")
}

var diskError = regexp.MustCompile(`(?m)^.*(?:Remounting filesystem read-only|EXT4-fs error|XFS \([^)]*\): .*(?:Corruption|shutting down filesystem)|blk_update_request: (?:critical )?(?:I/O|medium) error|Buffer I/O error on dev|nvme\d+: .*(?:Abort status|controller is down)).*$`)

func judgeDiskErrors(f *facts) []finding.Finding {
	for _, name := range []string{snapshot.CommandDmesg, snapshot.CommandJournalKernel} {
		t := f.Command(name)
		if all := diskError.FindAllString(t.Data, -1); len(all) > 0 {
			last := all[len(all)-1]
			return fail(oneLine(last), "", finding.Evidence{File: t.Place, Line: oneLine(last)})
		}
	}
	return nil
}
