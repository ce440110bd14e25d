package preflight

import (
	"cmp"
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func osChecks() []Check {
	return []Check{
		{
			ID: "host.container", Title: "Machine or container", Required: "the machine itself, not a container on it",
			Source: "docs.nvidia.com/brev, VM and container modes; dstackai/dstack#1356", Judge: judgeContainer,
		},
		{
			ID: "host.wsl", Title: "Windows Subsystem for Linux", Required: "Linux on a machine of its own",
			Source: "docs.k3s.io/installation/requirements; docs.nvidia.com/cuda/wsl-user-guide", Judge: judgeWSL,
		},
		{
			ID: "host.root", Title: "Rights", Required: "root (sudo)",
			Source: "docs.k3s.io/installation/requirements", Judge: judgeRoot,
		},
		{
			ID: "host.arch", Title: "Processor", Required: "x86_64 or aarch64",
			Source: "docs.k3s.io/installation/requirements, Architecture", Judge: judgeArch,
		},
		{
			ID: "host.os", Title: "Distribution", Required: "a distribution that k3s and the NVIDIA driver both know",
			Source: "docs.k3s.io/installation/requirements; docs.nvidia.com/datacenter/tesla/driver-installation-guide", Judge: judgeOS,
		},
		{
			ID: "host.systemd", Title: "systemd", Required: "systemd as process 1, running",
			Source: "docs.k3s.io/installation/requirements; docs.nvidia.com/brev, container mode", Judge: judgeSystemd,
			Causes: []string{"host.container", "host.wsl"},
		},
		{
			ID: "host.apparmor", Title: "AppArmor", Required: "apparmor_parser where AppArmor is on",
			Source: "k3s-io/k3s#3406, #3884; rancher/rke2#1459", Judge: judgeAppArmor,
		},
		{
			ID: "host.selinux", Title: "SELinux", Required: "k3s-selinux and container-selinux where SELinux enforces",
			Source: "k3s-io/k3s#1536, #2162, #10383", Judge: judgeSELinux,
		},
		{
			ID: "host.noexec", Title: "Programs on the needed file systems", Required: "no noexec under /var/lib/rancher, /var/lib/kubelet, /usr/local/bin",
			Source: "k3s-io/k3s#6290; mount(8)", Judge: judgeNoexec,
		},
		{
			ID: "host.readonly", Title: "Writable file systems", Required: "/etc, /var/lib, /usr/local/bin writable",
			Source: "k3s-io/k3s#3884; rancher/k3os#702", Judge: judgeReadonly,
		},
		{
			ID: "host.clock", Title: "Clock", Required: "at most one minute off the servers' time",
			Source: "k3s-io/k3s#5163, #6368", Judge: judgeClock,
			Causes: []string{"host.container", "host.wsl"},
		},
		{
			ID: "host.swap", Title: "Swap", Required: "off, for even latency",
			Source: "rancher/rke2#1924; k3s-io/k3s-ansible#147", Judge: judgeSwap,
		},
		{
			ID: "host.nm_cloud_setup", Title: "NetworkManager's cloud set-up", Required: "nm-cloud-setup off",
			Source: "rancher/rke2#1053; k3s-io/k3s#7077", Judge: judgeCloudSetup,
		},
	}
}

func judgeContainer(f Facts) []finding.Finding {
	fix := "Run llmbox on the machine itself: on Brev choose VM mode, elsewhere log in to the host; a container has no systemd and may not load modules"
	for _, hint := range []string{"/.dockerenv", "/run/.containerenv"} {
		if f.exists(hint) {
			return fail("inside a container ("+hint+")", fix, atPath(hint, ""))
		}
	}
	if t := f.File("/run/systemd/container"); t.State == snapshot.Present && t.Trimmed() != "" && t.Trimmed() != "wsl" {
		return fail("inside a container ("+t.Trimmed()+")", fix, at(t, t.Trimmed()))
	}
	cgroup := f.File("/proc/1/cgroup")
	for _, word := range []string{"docker", "kubepods", "containerd", "lxc", "libpod"} {
		if strings.Contains(cgroup.Data, word) {
			return fail("inside a container ("+word+")", fix, at(cgroup, firstLine(cgroup.Data)))
		}
	}
	if virt := f.Command(snapshot.CommandDetectVirt); virt.State == snapshot.Present {
		name := virt.Trimmed()
		if slices.Contains([]string{"docker", "podman", "lxc", "lxc-libvirt", "systemd-nspawn", "rkt", "container-other", "openvz", "proot"}, name) {
			return fail("inside a container ("+name+")", fix, at(virt, name))
		}
		return well(cmp.Or(map[string]string{"none": "a machine of its own", "wsl": "WSL"}[name], "a virtual machine ("+name+")"), at(virt, name))
	}
	if cgroup.State != snapshot.Present {
		return unknownText(cgroup)
	}
	return well("not a container", at(cgroup, firstLine(cgroup.Data)))
}

func judgeWSL(f Facts) []finding.Finding {
	kernel := f.kernel()
	if kernel == "" {
		return unknown("the kernel's release", "")
	}
	if strings.Contains(strings.ToLower(kernel), "microsoft") || f.exists("/proc/sys/fs/binfmt_misc/WSLInterop") {
		return fail("kernel "+kernel, "Use a Linux machine, a dual boot or a rented GPU VM: WSL has no driver of its own, and its network changes with each start",
			atPath("/proc/sys/kernel/osrelease", kernel))
	}
	return well("no")
}

func judgeRoot(f Facts) []finding.Finding {
	s, ok := f.system()
	if !ok {
		return unknown("who runs this", "")
	}
	if s.UID != 0 {
		return warn(fmt.Sprintf("uid %d: some facts can't be read, and an install needs root", s.UID), "sudo llmbox preflight", atProbe(snapshot.ProbeSystem, "uid"))
	}
	return well("root")
}

func judgeArch(f Facts) []finding.Finding {
	s, ok := f.system()
	if !ok || s.Machine == "" {
		return unknown("the processor's architecture", "")
	}
	if !slices.Contains([]string{"x86_64", "aarch64"}, s.Machine) {
		return fail(s.Machine, "Use a 64-bit x86 or Arm machine", atProbe(snapshot.ProbeSystem, "machine"))
	}
	return well(s.Machine)
}

func judgeOS(f Facts) []finding.Finding {
	o := f.osRelease()
	if !o.known {
		return unknownText(f.File("/etc/os-release"))
	}
	oldest, listed := distributions()[o.id]
	evidence := atPath("/etc/os-release", "ID="+o.id+" VERSION_ID="+o.version)
	switch {
	case !listed:
		return warn(o.pretty+" has not been tried", "Ubuntu 22.04 or 24.04 is the surest choice", evidence)
	case o.version == "":
		return warn(o.pretty+" names no version", "Ubuntu 22.04 or 24.04 is the surest choice", evidence)
	}
	before, ok := older(o.version, oldest)
	if !ok {
		return unknown("the distribution's version", fmt.Sprintf("%q", o.version))
	}
	if before {
		out := warn(o.pretty+" is older than what is tried", "Move to "+o.id+" "+oldest+" or newer; Ubuntu 24.04 is the surest choice", evidence)
		out[0].Required = o.id + " " + oldest + " or newer"
		return out
	}
	return well(o.pretty, evidence)
}

func judgeSystemd(f Facts) []finding.Finding {
	comm := f.File("/proc/1/comm")
	if comm.State != snapshot.Present {
		return unknownText(comm)
	}
	if comm.Trimmed() != "systemd" && f.Need.OtherInit {
		return well("process 1 is "+comm.Trimmed()+", and something else was chosen to keep k3s running", at(comm, comm.Trimmed()))
	}
	if comm.Trimmed() != "systemd" {
		return fail("process 1 is "+comm.Trimmed(), "Use a machine with systemd, or let llmbox keep k3s running itself: "+installSet("k3s.init=supervised"), at(comm, comm.Trimmed()))
	}
	state := f.Command(snapshot.CommandSystemState)
	if state.State == snapshot.Present && strings.HasPrefix(state.Trimmed(), "offline") {
		return fail("systemd is installed and does not run", "Start the machine with systemd as process 1", at(state, state.Trimmed()))
	}
	if state.Trimmed() == "maintenance" || state.Trimmed() == "stopping" {
		return fail("systemd is in state "+state.Trimmed(), "sudo systemctl default", at(state, state.Trimmed()))
	}
	return well(cmp.Or(state.Trimmed(), "systemd"), at(comm, ""))
}

func judgeAppArmor(f Facts) []finding.Finding {
	t := f.File("/sys/module/apparmor/parameters/enabled")
	switch {
	case t.State == snapshot.Unreadable:
		return unknownText(t)
	case t.State == snapshot.Absent && !f.exists("/sys/module"):
		return unknownText(t)
	case t.Trimmed() != "Y":
		return well("AppArmor is off")
	}
	if p := f.firstExisting("/usr/sbin/apparmor_parser", "/sbin/apparmor_parser", "/usr/bin/apparmor_parser"); p != "" {
		return well(p, at(t, "Y"))
	}
	if !f.looked("/usr/sbin") {
		return unknown("/usr/sbin", "")
	}
	return repairable("host.apparmor", fail("AppArmor is on and apparmor_parser is not installed: no container would start", f.installs("apparmor", "apparmor-parser"), at(t, "Y"), atPath("/usr/sbin/apparmor_parser", "absent")))
}

func judgeSELinux(f Facts) []finding.Finding {
	t := f.File("/sys/fs/selinux/enforce")
	switch {
	case t.State == snapshot.Unreadable:
		return unknownText(t)
	case t.State == snapshot.Absent && !f.exists("/sys/fs") && !f.exists("/sys/module"):
		return unknownText(t)
	case t.Trimmed() != "1":
		return well("not enforcing")
	}
	packages, state := f.Packages()
	if state != snapshot.Present {
		return unknown("the list of installed packages", "")
	}
	var missing []string
	for _, name := range []string{"container-selinux", "k3s-selinux"} {
		if !installed(packages, name) {
			missing = append(missing, name)
		}
	}
	if len(missing) == 0 {
		return well("enforcing, with the policies of k3s", at(t, "1"))
	}
	return fail("enforcing, and absent: "+strings.Join(missing, ", "),
		"Add k3s's repository (docs.k3s.io/advanced, SELinux), then: sudo dnf install -y container-selinux k3s-selinux", at(t, "1"))
}

func installed(packages []snapshot.Package, name string) bool {
	return slices.ContainsFunc(packages, func(p snapshot.Package) bool { return p.Installed && p.Name == name })
}

func judgeNoexec(f Facts) []finding.Finding {
	return f.mountOption("noexec", []string{"/var/lib/rancher", "/var/lib/kubelet", "/var/lib/llmbox", "/usr/local/bin", "/opt/cni"},
		"programs there would not start")
}

func judgeReadonly(f Facts) []finding.Finding {
	return f.mountOption("ro", []string{"/etc", "/var/lib", "/usr/local/bin", "/var/log"}, "nothing can be installed there")
}

// mountOption fails when one of the paths lies on a mount with the option.
func (f Facts) mountOption(option string, paths []string, consequence string) []finding.Finding {
	mounts, t := f.mounts()
	if t.State != snapshot.Present || len(mounts) == 0 {
		return unknownText(t)
	}
	points := map[string]string{}
	var order []string
	for _, p := range paths {
		m, ok := holding(mounts, p)
		if !ok || !slices.Contains(m.options, option) {
			continue
		}
		if points[m.point] == "" {
			order = append(order, m.point)
			points[m.point] = p
		}
	}
	if len(order) == 0 {
		return well("none of " + some(5, paths) + " is mounted " + option)
	}
	turned := map[string]string{"noexec": "exec", "ro": "rw"}[option]
	var evidence []finding.Evidence
	for _, point := range order {
		evidence = append(evidence, at(t, point+" "+option))
	}
	where := order[0]
	if points[where] != where {
		where += " (holds " + points[order[0]] + ")"
	}
	return fail(fmt.Sprintf("%s is mounted %s: %s", where, option, consequence),
		"sudo mount -o remount,"+turned+" "+order[0]+", and the same in /etc/fstab. An immutable system is not supported", evidence...)
}

func judgeClock(f Facts) []finding.Finding {
	var c snapshot.Clock
	state, why := f.Probe(snapshot.ProbeClock, &c)
	if state != snapshot.Present {
		return unknown("the clock", why)
	}
	fix := "sudo timedatectl set-ntp true. When that says NTP is not supported, first: " + f.installs("systemd-timesyncd", "chrony")
	if c.OffsetSeconds != nil {
		offset := time.Duration(*c.OffsetSeconds * float64(time.Second))
		if offset.Abs() > clockOffset {
			return fail(fmt.Sprintf("%.0f s %s: certificates made now would be refused", math.Abs(*c.OffsetSeconds), ahead(*c.OffsetSeconds)),
				fix, atProbe(snapshot.ProbeClock, "offset_seconds"))
		}
		return well(fmt.Sprintf("%.1f s off %s", *c.OffsetSeconds, cmp.Or(c.Reference, "others")))
	}
	// A clock behind the day on which this llmbox was made is wrong without asking anybody.
	if made, err := time.Parse(time.DateOnly, buildDate); err == nil && !c.Local.IsZero() && c.Local.Before(made) {
		return fail("the clock says "+c.Local.UTC().Format(time.DateOnly)+", before this llmbox was made", fix, atProbe(snapshot.ProbeClock, "local"))
	}
	return f.synchronised(c, fix)
}

// buildDate is a lower bound for "now".
const buildDate = "2026-11-01"

func ahead(offset float64) string {
	if offset > 0 {
		return "behind"
	}
	return "ahead"
}

// synchronised judges by the kernel's own word where nobody else was asked.
func (f Facts) synchronised(c snapshot.Clock, fix string) []finding.Finding {
	if c.Synchronized == nil {
		return unknown("the clock's offset", "nobody was asked")
	}
	if *c.Synchronized {
		return well("the kernel says synchronised")
	}
	return warn("no time service keeps the clock right", fix, atProbe(snapshot.ProbeClock, "synchronized"))
}

func judgeSwap(f Facts) []finding.Finding {
	t := f.File("/proc/swaps")
	if t.State != snapshot.Present {
		return unknownText(t)
	}
	var areas []string
	for i, line := range t.Lines() {
		if fields := strings.Fields(line); i > 0 && len(fields) > 0 {
			areas = append(areas, fields[0])
		}
	}
	if len(areas) == 0 {
		return well("off")
	}
	// k3s starts its kubelet with fail-swap-on=false, so nothing stops.
	return warn(some(2, areas)+": k3s runs with it, but answers get slow when the model's memory is swapped out",
		"sudo swapoff -a, and take the line out of /etc/fstab", at(t, areas[0]))
}

func judgeCloudSetup(f Facts) []finding.Finding {
	units := f.Command(snapshot.CommandUnits)
	if units.State != snapshot.Present {
		return unknownText(units)
	}
	for _, name := range []string{"nm-cloud-setup.service", "nm-cloud-setup.timer"} {
		if u, state := f.Unit(name); state == snapshot.Present && (u.File == "enabled" || u.Active == "active") {
			return fail(path.Base(name)+" is on: its routing rules cut pods off", "sudo systemctl disable --now nm-cloud-setup.service nm-cloud-setup.timer && sudo reboot", at(units, name+" "+u.File))
		}
	}
	return well("off or not there")
}
