package repair

import (
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// podModules are the kernel modules of pods, their network and the rules of services
// (k3s-io/k3s#3852, #8015; flannel-io/flannel#2068).
func podModules() []string {
	return []string{"overlay", "br_netfilter", "nf_conntrack", "vxlan", "xt_comment", "xt_conntrack", "xt_MASQUERADE", "ip_set"}
}

// modulesStep writes the one file of modules, what it has already kept.
func (p *planner) modulesStep(names ...string) Step {
	all := slices.Concat(p.ours(ModulesFile), names)
	slices.Sort(all)
	return drop(ModulesFile, slices.Compact(all)...)
}

func planModules(p *planner, found []finding.Finding) {
	kernel := p.kernel()
	switch {
	case p.facts.File("/proc/sys/kernel/modules_disabled").Trimmed() == "1":
		p.decline(found, "the kernel was told to load no more modules (kernel.modules_disabled = 1) until it boots again")
		return
	case kernel == "":
		p.decline(found, "the running kernel's release could not be read")
		return
	}
	var name string
	manager := p.manager()
	switch {
	case manager == Apt && p.osRelease("ID") == "ubuntu":
		name = "linux-modules-extra-" + kernel
	case manager == DNF || manager == Yum:
		name = "kernel-modules-extra-" + kernel
	default:
		p.decline(found, "this distribution has no package with further modules for the kernel that runs; another kernel of it has them")
		return
	}
	steps := p.install(manager, installation{names: []string{name}, fresh: []string{name}})
	steps = append(steps,
		run(60, slices.Concat([]string{"modprobe", "-a"}, podModules())...),
		p.modulesStep(podModules()...))
	p.add(Action{
		Name: Modules, Title: "Load the kernel modules that pods and their network need",
		Safe: "the package belongs to the kernel that runs; no other kernel is installed and nothing restarts",
		Undo: []string{"sudo rm " + ModulesFile, p.uninstalls(manager, name)}, Steps: steps,
		Verify: []Check{{
			What:  "the modules can be loaded",
			Run:   slices.Concat([]string{"modprobe", "-n", "-a"}, podModules()),
			AnyOf: []string{ModulesFile},
		}},
	}, found)
}

// settingsOf are the kernel settings that mend a finding, by its id.
func (p *planner) settingsOf(id string) []Setting {
	switch id {
	case "host.sysctl.forwarding":
		return []Setting{{"net.ipv4.ip_forward", "1"}}
	case "host.sysctl.bridge":
		return []Setting{{"net.bridge.bridge-nf-call-iptables", "1"}}
	case "host.sysctl.overcommit":
		return []Setting{{"vm.overcommit_memory", "1"}}
	case "host.sysctl.panic":
		return []Setting{{"vm.panic_on_oom", "0"}}
	case "net.rp_filter":
		// Loose: an answer may come by any interface that leads to the sender.
		return []Setting{{"net.ipv4.conf.all.rp_filter", "2"}}
	case "host.sysctl.inotify":
		// Enough for some hundred pods; a watch takes about 1 kB only once it is used
		// (inotify(7)). A higher limit that is there stays.
		return []Setting{
			{"fs.inotify.max_user_instances", p.atLeast("fs.inotify.max_user_instances", 8192)},
			{"fs.inotify.max_user_watches", p.atLeast("fs.inotify.max_user_watches", 1048576)},
		}
	}
	return nil
}

// planSettings makes one action of all findings about kernel settings.
func planSettings(p *planner, _ []finding.Finding) {
	found := slices.Concat(p.wanted[Sysctl], p.wanted[Inotify])
	values := map[string]string{}
	for _, line := range p.ours(SysctlFile) {
		if k, v, ok := strings.Cut(line, "="); ok {
			values[strings.TrimSpace(k)] = strings.TrimSpace(v)
		}
	}
	var mends []finding.Finding
	var wanted []Setting
	bridge := false
	for _, f := range found {
		settings := p.settingsOf(f.ID)
		if len(settings) == 0 {
			p.decline([]finding.Finding{f}, "this llmbox knows no setting for it")
			continue
		}
		if later := p.setLater(settings); later != "" {
			p.decline([]finding.Finding{f}, later+" sets it to something else and is read last, and llmbox edits no file of others: take the line out of it")
			continue
		}
		for _, s := range settings {
			values[s.Key] = s.Value
			wanted = append(wanted, s)
			bridge = bridge || strings.HasPrefix(s.Key, "net.bridge.")
		}
		mends = append(mends, f)
	}
	if len(mends) == 0 {
		return
	}
	var lines, undo []string
	undo = append(undo, "sudo rm "+SysctlFile)
	for _, key := range slices.Sorted(maps.Keys(values)) {
		lines = append(lines, key+" = "+values[key])
	}
	slices.SortFunc(wanted, func(a, b Setting) int { return strings.Compare(a.Key, b.Key) })
	for _, s := range wanted {
		if now := p.setting(s.Key); now != "" && now != s.Value {
			undo = append(undo, "sudo sysctl -w "+s.Key+"="+now)
		}
	}
	var steps []Step
	if bridge && !p.planned(Modules) {
		// The key exists once the module is loaded, which systemd does before it reads
		// the settings.
		steps = append(steps, p.modulesStep("br_netfilter"))
		undo = append(undo, "sudo rm "+ModulesFile)
	}
	steps = append(steps, drop(SysctlFile, lines...),
		Step{Run: &Run{Argv: []string{"sysctl", "-p", SysctlFile}, DeadlineSeconds: 30, Settings: wanted}})
	a := Action{
		Name: Sysctl, Title: "Set kernel settings, now and at each boot", Steps: steps, Undo: undo,
		Safe:   "a file of its own, no file of others is touched, and nothing restarts",
		Verify: []Check{{What: "the kernel has the values", Settings: wanted, AnyOf: []string{SysctlFile}}},
	}
	if len(p.wanted[Sysctl]) == 0 {
		a.Name, a.Title = Inotify, "Raise the inotify limits, now and at each boot"
	}
	p.add(a, mends)
}

// setting is a kernel setting's value now.
func (p *planner) setting(key string) string {
	return p.facts.File(settingPath(key)).Trimmed()
}

func settingPath(key string) string { return "/proc/sys/" + strings.ReplaceAll(key, ".", "/") }

// atLeast is a number that a setting shall have, or its own where that is higher.
func (p *planner) atLeast(key string, least int) string {
	now, err := strconv.Atoi(p.setting(key))
	if err != nil {
		return strconv.Itoa(least)
	}
	return strconv.Itoa(max(now, least))
}

// setLater names a file that sets one of the keys to another value after ours: one
// that sorts behind it, or /etc/sysctl.conf, which "sysctl --system" reads last
// (sysctl(8)).
func (p *planner) setLater(settings []Setting) string {
	var names []string
	for _, dir := range []string{"/usr/lib/sysctl.d", "/run/sysctl.d", "/etc/sysctl.d"} {
		for _, name := range p.facts.Glob(dir + "/*.conf") {
			if path.Base(name) > path.Base(SysctlFile) {
				names = append(names, name)
			}
		}
	}
	for _, name := range append(names, "/etc/sysctl.conf") {
		for _, line := range p.facts.File(name).Lines() {
			k, v, ok := strings.Cut(strings.TrimSpace(line), "=")
			k = strings.ReplaceAll(strings.TrimSpace(strings.TrimPrefix(k, "-")), "/", ".")
			for _, s := range settings {
				if ok && k == s.Key && strings.TrimSpace(v) != s.Value {
					return name
				}
			}
		}
	}
	return ""
}

func planAppArmor(p *planner, found []finding.Finding) {
	var name string
	manager := p.manager()
	switch manager {
	case Apt:
		name = "apparmor"
	case Zypper:
		name = "apparmor-parser"
	default:
		p.decline(found, "this distribution has no package with apparmor_parser that is known here")
		return
	}
	p.add(Action{
		Name: AppArmor, Title: "Install AppArmor's parser",
		Safe:  "a package of the distribution; profiles of programs that run already are not reloaded",
		Steps: p.install(manager, installation{names: []string{name}}), Undo: []string{p.uninstalls(manager, name)},
		Verify: []Check{{What: "apparmor_parser is there", AnyOf: []string{"/usr/sbin/apparmor_parser", "/sbin/apparmor_parser", "/usr/bin/apparmor_parser"}}},
	}, found)
}

// driverName matches the packages whose change replaces the driver or its libraries.
var driverName = regexp.MustCompile(`^(?:nvidia-(?:driver|headless|dkms|open|kernel|utils|compute|firmware|fabricmanager|persistenced|modprobe|settings)` +
	`|libnvidia-(?:compute|cfg|decode|encode|extra|fbc|gl|common|gpucomp|ml|nscq|nvlink)|xserver-xorg-video-nvidia|cuda-drivers|linux-modules-nvidia|linux-objects-nvidia|linux-signatures-nvidia|kmod-nvidia|akmod-nvidia)`)

// kernelName matches kernels and what pulls new ones in.
var kernelName = regexp.MustCompile(`^(?:linux-(?:image|headers|generic|virtual|modules|aws|gcp|azure|oracle|kvm|lowlatency|nvidia)|kernel)(?:-|$)`)

// kernelMeta matches the packages that follow the newest kernel of a flavour; those
// of one kernel have its number in their name.
var kernelMeta = regexp.MustCompile(`^linux-(?:image|headers)-[a-z]`)

func planHold(p *planner, found []finding.Finding) {
	if p.manager() != Apt {
		p.decline(found, "only apt can hold packages without a further plug-in")
		return
	}
	packages, state := p.facts.Packages()
	if state != snapshot.Present {
		p.decline(found, "the list of installed packages could not be read")
		return
	}
	var hold []string
	prebuilt := false
	for _, q := range packages {
		if q.Installed && !q.Held && driverName.MatchString(q.Name) {
			hold = append(hold, q.Name)
		}
		prebuilt = prebuilt || q.Installed && strings.HasPrefix(q.Name, "linux-modules-nvidia-")
	}
	safe := "nothing is installed, removed or restarted; only later upgrades leave these packages out until they are released"
	if prebuilt {
		// The modules come ready made for one kernel: held alone, they would be missing
		// after the boot into the next one.
		for _, q := range packages {
			if q.Installed && !q.Held && kernelMeta.MatchString(q.Name) {
				hold = append(hold, q.Name)
			}
		}
		safe += ". The driver's modules come ready made for each kernel, so new kernels wait with them"
	}
	if len(hold) == 0 {
		p.decline(found, "no package of the driver is installed that is not held")
		return
	}
	slices.Sort(hold)
	hold = slices.Compact(hold)
	p.add(Action{
		Name: HoldDriver, Title: "Keep unattended upgrades off the NVIDIA driver", Safe: safe,
		Steps:  []Step{run(60, slices.Concat([]string{"apt-mark", "hold"}, hold)...)},
		Undo:   []string{strings.Join(slices.Concat([]string{"sudo", "apt-mark", "unhold"}, hold), " ")},
		Verify: []Check{{What: "apt-mark lists them as held", Run: []string{"apt-mark", "showhold"}, Says: hold}},
	}, found)
}

func planNeedrestart(p *planner, found []finding.Finding) {
	const line = "$nrconf{override_rc}{qr(^k3s)} = 0;"
	p.add(Action{
		Name: Needrestart, Title: "Keep needrestart from restarting k3s",
		Safe:  "a drop-in of its own; other services are restarted as before",
		Steps: []Step{drop(NeedrestartFile, line)}, Undo: []string{"sudo rm " + NeedrestartFile},
		Verify: []Check{{What: "the drop-in is there", File: NeedrestartFile, Has: []string{line}}},
	}, found)
}

func planFirewall(p *planner, found []finding.Finding) {
	pods, services := p.networks.Pods, p.networks.Services
	if pods == "" || services == "" {
		p.decline(found, "the cluster's networks are not known")
		return
	}
	if p.ufwActive() {
		text := p.facts.Command(snapshot.CommandUFW)
		var steps []Step
		var undo []string
		for _, cidr := range []string{pods, services} {
			allowed := slices.ContainsFunc(text.Lines(), func(l string) bool {
				return slices.Contains(strings.Fields(l), cidr) && strings.Contains(l, "ALLOW")
			})
			if !allowed {
				steps = append(steps, run(30, "ufw", "allow", "from", cidr, "to", "any", "comment", "llmbox"))
				undo = append(undo, "sudo ufw delete allow from "+cidr+" to any")
			}
		}
		p.add(Action{
			Name: Firewall, Title: "Let the cluster's own networks through ufw", Steps: steps, Undo: undo,
			Safe:   "only these two networks, which exist inside this machine, are let in; no port opens to the outside",
			Verify: []Check{{What: "ufw allows both networks", Run: []string{"ufw", "status"}, Says: []string{pods, services}}},
		}, found)
		return
	}
	running := p.facts.Command(snapshot.CommandFirewallState)
	if running.State != snapshot.Present || running.Trimmed() != "running" {
		p.decline(found, "the rules are neither ufw's nor firewalld's, and llmbox edits no rules of others")
		return
	}
	zone := func(args ...string) []string {
		return slices.Concat([]string{"firewall-cmd"}, args)
	}
	p.add(Action{
		Name: Firewall, Title: "Let the cluster's own networks through firewalld",
		Safe: "only these two networks, which exist inside this machine, are trusted; firewalld is not reloaded and no port opens to the outside",
		// Both without --reload, which would throw away rules that others set at run time.
		Steps: []Step{
			run(30, zone("--permanent", "--zone=trusted", "--add-source="+pods, "--add-source="+services)...),
			run(30, zone("--zone=trusted", "--add-source="+pods, "--add-source="+services)...),
		},
		Undo: []string{
			"sudo firewall-cmd --permanent --zone=trusted --remove-source=" + pods + " --remove-source=" + services,
			"sudo firewall-cmd --zone=trusted --remove-source=" + pods + " --remove-source=" + services,
		},
		Verify: []Check{
			{What: "the zone trusted has both networks", Run: zone("--zone=trusted", "--list-sources"), Says: []string{pods, services}},
			{What: "the zone trusted keeps both networks", Run: zone("--permanent", "--zone=trusted", "--list-sources"), Says: []string{pods, services}},
		},
	}, found)
}

// ufwActive says whether ufw filters, by its own words or else its settings.
func (p *planner) ufwActive() bool {
	text := p.facts.Command(snapshot.CommandUFW)
	if text.State == snapshot.Present {
		return strings.HasPrefix(text.Data, "Status: active")
	}
	enabled := slices.ContainsFunc(p.facts.File("/etc/ufw/ufw.conf").Lines(), func(l string) bool {
		return strings.TrimSpace(l) == "ENABLED=yes"
	})
	unit, state := p.facts.Unit("ufw.service")
	return enabled && (state != snapshot.Present || unit.Active == "active")
}
