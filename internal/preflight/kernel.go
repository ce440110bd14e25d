package preflight

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func kernelChecks() []Check {
	return []Check{
		{
			ID: "host.kernel", Title: "Linux kernel", Required: oldestKernel + " or newer",
			Source: "kubernetes.io/docs/concepts/architecture/cgroups; docs.k3s.io/installation/requirements", Judge: judgeKernel,
		},
		{
			ID: "host.cgroup.v1", Title: "Control groups", Required: "cgroup v2",
			Source: "NVIDIA/OpenShell#360; kubernetes/kubernetes#134298; k0sproject/k0s#7398", Judge: judgeCgroupVersion,
			Causes: []string{"host.container"},
		},
		{
			ID: "host.cgroup.memory", Title: "Controllers of the control groups", Required: "cpuset, cpu, memory and pids",
			Source: "k3s-io/k3s#170, #3293, #10755", Judge: judgeControllers,
			Causes: []string{"host.cgroup.v1", "host.container"},
		},
		{
			ID: "host.modules", Title: "Kernel modules for pods and their network", Required: "overlay, br_netfilter, nf_conntrack, vxlan and iptables' own, loaded or loadable",
			Source: "k3s-io/k3s#3852, #8015; flannel-io/flannel#2068", Judge: judgeModules,
			Causes: []string{"host.container"},
		},
		{
			ID: "host.sysctl.forwarding", Title: "Forwarding of packets", Required: "net.ipv4.ip_forward = 1, and no file that turns it off at boot",
			Source: "k3s-io/k3s#5712; kubernetes.io/docs/setup/production-environment/container-runtimes", Judge: judgeForwarding,
			Causes: []string{"host.container"},
		},
		{
			ID: "host.sysctl.bridge", Title: "Bridged packets through iptables", Required: "net.bridge.bridge-nf-call-iptables = 1",
			Source: "k3s-io/k3s#8015; flannel-io/flannel#2166; kubernetes.io/docs/setup/production-environment/container-runtimes", Judge: judgeBridge,
			Causes: []string{"host.modules", "host.container"},
		},
		{
			ID: "host.sysctl.inotify", Title: "inotify limits", Required: fmt.Sprintf("fs.inotify.max_user_instances >= %d, max_user_watches >= %d", inotifyInstances, inotifyWatches),
			Source: "k3s-io/k3s#10020; containerd/containerd#10309", Judge: judgeInotify,
			Causes: []string{"host.container"},
		},
		{
			ID: "host.sysctl.overcommit", Title: "Memory overcommit", Required: "vm.overcommit_memory 0 or 1",
			Source: "docs.k3s.io/security/hardening-guide; linux Documentation/mm/overcommit-accounting.rst", Judge: judgeOvercommit,
		},
		{
			ID: "host.sysctl.panic", Title: "Panic settings", Required: "vm.panic_on_oom 0",
			Source: "docs.k3s.io/security/hardening-guide; linux Documentation/admin-guide/sysctl/vm.rst", Judge: judgePanic,
		},
		{
			ID: "host.entropy", Title: "Randomness of the kernel", Required: fmt.Sprintf("%d bits before keys are made", entropyBits),
			Source: "random(4); k3s-io/k3s#1144", Judge: judgeEntropy,
		},
		{
			ID: "net.iptables_backend", Title: "iptables backend", Required: "one backend in use, not iptables-nft 1.8.0 to 1.8.4",
			Source: "kubernetes/kubernetes#71305; k3s-io/k3s#4588; coredns/coredns#2354", Judge: judgeIptables,
		},
	}
}

func judgeKernel(f Facts) []finding.Finding {
	kernel := f.kernel()
	if kernel == "" {
		return unknown("the kernel's release", "")
	}
	number := regexp.MustCompile(`^\d+\.\d+(?:\.\d+)?`).FindString(kernel)
	before, ok := older(number, oldestKernel)
	if !ok {
		return unknown("the kernel's release", fmt.Sprintf("%q is no version", kernel))
	}
	if !before {
		return well(kernel)
	}
	// Enterprise kernels carry what matters back; it is the others that fail.
	return warn(kernel, "Move to a current release of the distribution, such as Ubuntu 24.04", atPath("/proc/sys/kernel/osrelease", kernel))
}

// unified says whether /sys/fs/cgroup is cgroup v2.
func (f Facts) unified() (v2, known bool, from finding.Evidence) {
	if t := f.File("/sys/fs/cgroup/cgroup.controllers"); t.State == snapshot.Present {
		return true, true, at(t, t.Trimmed())
	}
	mounts, t := f.mounts()
	for _, m := range mounts {
		if m.point == "/sys/fs/cgroup" {
			return m.kind == "cgroup2", true, at(t, m.source+" "+m.point+" "+m.kind)
		}
	}
	// Each controller of version 1 has a directory of its own.
	for _, controller := range []string{"memory", "cpuset", "pids", "unified"} {
		if dir := "/sys/fs/cgroup/" + controller; f.exists(dir) {
			return false, true, atPath(dir, "directory")
		}
	}
	var disks []snapshot.Disk
	if state, _ := f.Probe(snapshot.ProbeDisks, &disks); state == snapshot.Present {
		for _, d := range disks {
			if d.MountPoint == "/sys/fs/cgroup" {
				return d.Type == "cgroup2", true, atProbe(snapshot.ProbeDisks, d.Type)
			}
		}
	}
	return false, false, finding.Evidence{}
}

func judgeCgroupVersion(f Facts) []finding.Finding {
	v2, known, from := f.unified()
	switch {
	case !known:
		return unknown("/sys/fs/cgroup", f.Manifest.Unreadable["host/sys/fs/cgroup/cgroup.controllers"])
	case v2:
		return well("v2", from)
	}
	boot := f.bootWith("systemd.unified_cgroup_hierarchy=1")
	minor := kubernetesMinor(f.Need.K3sVersion)
	if minor > 0 && minor < cgroupV1RefusedMinor {
		return warn("v1, which Kubernetes 1.35 and newer refuses", boot, from)
	}
	return fail("v1: the statfs type of /sys/fs/cgroup is not cgroup2", boot+". Or, where a reboot is out of the question, have the kubelet allow it: sudo llmbox install --ignore host.cgroup.v1", from)
}

func judgeControllers(f Facts) []finding.Finding {
	want := []string{"cpuset", "cpu", "memory", "pids"}
	have := f.File("/sys/fs/cgroup/cgroup.controllers")
	var missing []string
	var from snapshot.Text
	switch {
	case have.State == snapshot.Present:
		from = have
		controllers := strings.Fields(have.Data)
		for _, c := range want {
			if !slices.Contains(controllers, c) {
				missing = append(missing, c)
			}
		}
	default:
		from = f.File("/proc/cgroups")
		if from.State != snapshot.Present {
			return unknownText(from)
		}
		if v2, known, _ := f.unified(); v2 || !known {
			return unknownText(have)
		}
		enabled := map[string]bool{}
		for _, line := range from.Lines() {
			if fields := strings.Fields(line); len(fields) == 4 {
				enabled[fields[0]] = fields[3] == "1"
			}
		}
		for _, c := range want {
			if !enabled[c] {
				missing = append(missing, c)
			}
		}
	}
	if len(missing) == 0 {
		return well("all there", at(from, from.Trimmed()))
	}
	measured := "missing: " + strings.Join(missing, ", ")
	evidence := []finding.Evidence{at(from, firstLine(from.Data))}
	fix := f.bootWith("cgroup_enable=" + missing[0])
	if cmdline := f.File("/proc/cmdline"); strings.Contains(cmdline.Data, "cgroup_disable=") {
		measured += "; the kernel was started with cgroup_disable"
		evidence = append(evidence, at(cmdline, cmdline.Trimmed()))
		fix = f.bootWithout("cgroup_disable")
	}
	return fail(measured, fix, evidence...)
}

// neededModules are the modules without which pods, their network or the firewall
// rules of services don't come up.
func neededModules() []string {
	return []string{"overlay", "br_netfilter", "nf_conntrack", "vxlan", "xt_comment", "xt_conntrack", "xt_MASQUERADE", "ip_set"}
}

func judgeModules(f Facts) []finding.Finding {
	loaded, t := f.modules()
	if t.State != snapshot.Present {
		return unknownText(t)
	}
	kernel := f.kernel()
	available := map[string]bool{}
	var lists []snapshot.Text
	for _, root := range []string{"/lib/modules/", "/usr/lib/modules/"} {
		for _, name := range []string{"modules.builtin", "modules.dep"} {
			list := f.File(root + kernel + "/" + name)
			if list.State != snapshot.Present {
				continue
			}
			lists = append(lists, list)
			for _, line := range list.Lines() {
				file, _, _ := strings.Cut(line, ":")
				base, _, _ := strings.Cut(path.Base(strings.TrimSpace(file)), ".ko")
				available[strings.ReplaceAll(base, "-", "_")] = true
			}
		}
	}
	var missing []string
	for _, name := range neededModules() {
		if !loaded[name] && !available[name] && !f.exists("/sys/module/"+name) && !replaced(f, name) {
			missing = append(missing, name)
		}
	}
	if len(missing) == 0 {
		return well(count(len(neededModules()), "module") + " loaded or loadable")
	}
	if len(lists) == 0 {
		return unknown("which modules "+kernel+" has", "no modules.dep under /lib/modules/"+kernel)
	}
	fix := "sudo apt-get update && sudo apt-get install -y linux-modules-extra-" + kernel
	if f.osRelease().rpm() {
		fix = "sudo dnf install -y kernel-modules-extra-" + kernel
	}
	return repairable("host.modules", fail("neither loaded nor there: "+strings.Join(missing, ", "), fix+" && sudo modprobe -a "+strings.Join(missing, " "),
		at(t, ""), finding.Evidence{File: lists[0].Place, Line: "no " + missing[0]}))
}

// replaced says whether something else of the kernel does the module's work.
func replaced(f Facts, name string) bool {
	switch name {
	case "overlay":
		return strings.Contains(f.File("/proc/filesystems").Data, "\toverlay")
	case "nf_conntrack":
		return f.exists("/proc/sys/net/netfilter/nf_conntrack_max")
	case "br_netfilter":
		return f.exists("/proc/sys/net/bridge/bridge-nf-call-iptables")
	}
	return false
}

// sysctlSetting is what the files of the host set at boot; the last one wins.
func (f Facts) sysctlSetting(key string) (value string, from finding.Evidence) {
	var names []string
	for _, dir := range []string{"/usr/lib/sysctl.d", "/run/sysctl.d", "/etc/sysctl.d"} {
		names = append(names, f.Glob(dir+"/*.conf")...)
	}
	// By file name, as sysctl.d(5) orders them; /etc/sysctl.conf comes last.
	slices.SortStableFunc(names, func(a, b string) int { return strings.Compare(path.Base(a), path.Base(b)) })
	names = append(names, "/etc/sysctl.conf")
	for _, name := range names {
		t := f.File(name)
		for _, line := range t.Lines() {
			k, v, ok := strings.Cut(strings.TrimSpace(line), "=")
			k = strings.ReplaceAll(strings.TrimPrefix(strings.TrimSpace(k), "-"), "/", ".")
			if ok && k == key {
				value, from = strings.TrimSpace(v), at(t, line)
			}
		}
	}
	return value, from
}

func judgeForwarding(f Facts) []finding.Finding {
	n, t, ok := f.number("/proc/sys/net/ipv4/ip_forward")
	if !ok {
		return unknownText(t)
	}
	setting, from := f.sysctlSetting("net.ipv4.ip_forward")
	fix := "printf 'net.ipv4.ip_forward = 1\\n' | sudo tee -a /etc/sysctl.d/99-llmbox.conf; sudo sysctl --system"
	switch {
	case setting == "0":
		return repairable("host.sysctl", warn("a file turns it off at each boot, after which pods lose the network", "sudo sed -i '/net.ipv4.ip_forward/d' "+shown(from.File)+"; "+fix, from))
	case n == 0:
		// k3s turns it on when it starts.
		return well("off now; k3s turns it on", at(t, t.Trimmed()))
	}
	return well("on", at(t, t.Trimmed()))
}

func judgeBridge(f Facts) []finding.Finding {
	const name = "/proc/sys/net/bridge/bridge-nf-call-iptables"
	n, t, ok := f.number(name)
	if t.State == snapshot.Absent {
		if _, state := f.Stat("/proc/sys/net"); state != snapshot.Present {
			return unknownText(t)
		}
		// The setting comes with the module br_netfilter, which k3s loads.
		return well("not there until br_netfilter is loaded; k3s loads it")
	}
	if !ok {
		return unknownText(t)
	}
	setting, from := f.sysctlSetting("net.bridge.bridge-nf-call-iptables")
	fix := "printf 'net.bridge.bridge-nf-call-iptables = 1\\n' | sudo tee -a /etc/sysctl.d/99-llmbox.conf; sudo sysctl --system"
	switch {
	case n == 0 && setting == "0":
		return repairable("host.sysctl", warn("0, and a file sets it so at each boot: services are not reached from pods of the same node", fix, from))
	case n == 0:
		return repairable("host.sysctl", note("0 now; k3s sets it to 1 when it starts", at(t, t.Trimmed())))
	}
	return well("1", at(t, t.Trimmed()))
}

func judgeInotify(f Facts) []finding.Finding {
	instances, ti, ok := f.number("/proc/sys/fs/inotify/max_user_instances")
	if !ok {
		return unknownText(ti)
	}
	watches, tw, ok := f.number("/proc/sys/fs/inotify/max_user_watches")
	if !ok {
		return unknownText(tw)
	}
	if instances >= inotifyInstances && watches >= inotifyWatches {
		return well(fmt.Sprintf("instances %d, watches %d", instances, watches), at(ti, ti.Trimmed()))
	}
	judge := warn
	if instances < inotifyInstances && watches <= inotifyWatchesLow {
		judge = fail
	}
	return repairable("host.inotify", judge(fmt.Sprintf("max_user_instances %d, max_user_watches %d: programs will say \"too many open files\"", instances, watches),
		"printf 'fs.inotify.max_user_instances = 8192\\nfs.inotify.max_user_watches = 1048576\\n' | sudo tee /etc/sysctl.d/99-llmbox-inotify.conf; sudo sysctl --system",
		at(ti, ti.Trimmed()), at(tw, tw.Trimmed())))
}

func judgeOvercommit(f Facts) []finding.Finding {
	n, t, ok := f.number("/proc/sys/vm/overcommit_memory")
	if !ok {
		return unknownText(t)
	}
	if n != 2 {
		return well(strconv.FormatInt(n, 10))
	}
	return repairable("host.sysctl", warn("2: programs that reserve more address space than memory, as CUDA does, are refused",
		"printf 'vm.overcommit_memory = 1\\n' | sudo tee -a /etc/sysctl.d/99-llmbox.conf; sudo sysctl --system", at(t, t.Trimmed())))
}

func judgePanic(f Facts) []finding.Finding {
	n, t, ok := f.number("/proc/sys/vm/panic_on_oom")
	if !ok {
		return unknownText(t)
	}
	if n == 0 {
		return well("0")
	}
	return repairable("host.sysctl", warn(fmt.Sprintf("%d: the machine stops when one program runs out of memory", n),
		"printf 'vm.panic_on_oom = 0\\n' | sudo tee -a /etc/sysctl.d/99-llmbox.conf; sudo sysctl --system", at(t, t.Trimmed())))
}

func judgeEntropy(f Facts) []finding.Finding {
	n, t, ok := f.number("/proc/sys/kernel/random/entropy_avail")
	if !ok {
		return unknownText(t)
	}
	if n >= entropyBits {
		return well(strconv.FormatInt(n, 10) + " bits")
	}
	return warn(fmt.Sprintf("%d bits: making keys can block for minutes", n), f.installs("rng-tools5 && sudo systemctl enable --now rngd", "rng-tools && sudo systemctl enable --now rngd"), at(t, t.Trimmed()))
}

var iptablesVersion = regexp.MustCompile(`v(\d+\.\d+\.\d+)(?:\s+\((\w+)\))?`)

func judgeIptables(f Facts) []finding.Finding {
	t := f.Command(snapshot.CommandIptablesVer)
	legacy, nft := f.Command(snapshot.CommandIptablesLegacy), f.Command(snapshot.CommandIptablesNft)
	rules := func(t snapshot.Text) int {
		n := 0
		for _, line := range t.Lines() {
			if strings.HasPrefix(line, "-A ") {
				n++
			}
		}
		return n
	}
	fix := "Let k3s use its own iptables: " + installSet("k3s.extraArgs=--prefer-bundled-bin")
	if legacy.State == snapshot.Present && nft.State == snapshot.Present && rules(legacy) > 0 && rules(nft) > 0 {
		return warn(fmt.Sprintf("%d rules in the legacy tables and %d in nft's: one set does not see the other", rules(legacy), rules(nft)), fix, at(legacy, ""), at(nft, ""))
	}
	if t.State == snapshot.Absent {
		if f.looked("/usr/bin") {
			return well("none; k3s brings its own")
		}
		return unknownText(t)
	}
	m := iptablesVersion.FindStringSubmatch(t.Data)
	if t.State != snapshot.Present || m == nil {
		return unknown("iptables' version", t.Why)
	}
	if m[2] == "nf_tables" {
		from, okFrom := older(m[1], "1.8.0")
		until, okUntil := older(m[1], "1.8.5")
		if okFrom && okUntil && !from && until {
			return warn("iptables "+m[1]+" (nf_tables), which loses rules", fix, at(t, firstLine(t.Data)))
		}
	}
	return well(strings.TrimSpace(m[1]+" "+m[2]), at(t, firstLine(t.Data)))
}
