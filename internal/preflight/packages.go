package preflight

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func packageChecks() []Check {
	return []Check{
		{
			ID: "host.apt.busy", Title: "Package manager", Required: "nobody installs packages just now",
			Source: "Azure/aks-engine#1538; skypilot-org/skypilot#554", Judge: judgeLocks,
		},
		{
			ID: "host.first_boot", Title: "First boot", Required: "cloud-init has finished",
			Source: "canonical/cloud-init#2908, #6280; Azure/aks-engine#1538", Judge: judgeFirstBoot,
		},
		{
			ID: "host.unattended_upgrades", Title: "Upgrades by themselves", Required: "the NVIDIA packages kept out of unattended upgrades",
			Source: "oddmario/NVIDIA-Ubuntu-Driver-Guide#4; pando85/homelab#4110", Judge: judgeUnattended,
		},
		{
			ID: "host.needrestart", Title: "Restarts after upgrades", Required: "needrestart does not restart services by itself",
			Source: "m-lab/k8s-support#520; NVIDIA/nvidia-docker#1678", Judge: judgeNeedrestart,
		},
		{
			ID: "host.reboot_required", Title: "Reboot that is due", Required: "no reboot is waited for",
			Source: "lyulyul/shine-cluster#30; needrestart(1)", Judge: judgeReboot,
			Causes: []string{"gpu.driver.lib_mismatch"},
		},
	}
}

func judgeLocks(f Facts) []finding.Finding {
	var locks []snapshot.Lock
	state, why := f.Probe(snapshot.ProbeLocks, &locks)
	if state != snapshot.Present {
		return unknown("the locks of the package manager", why)
	}
	for _, l := range locks {
		if !l.Held {
			continue
		}
		holder := "another program"
		if l.Process != "" || l.PID != 0 {
			holder = strings.TrimSpace(cmp.Or(l.Process, "a program") + " pid " + strconv.Itoa(l.PID))
		}
		out := warn(l.Path+" is held by "+holder, "Wait until it has finished, as an install by llmbox does by itself. So does apt-get when asked: sudo apt-get -o DPkg::Lock::Timeout=300 install -y PACKAGE. Don't delete the lock file",
			finding.Evidence{File: "probes/" + snapshot.ProbeLocks + ".json", Line: l.Path + " " + holder})
		out[0].State = finding.Wait
		return out
	}
	if len(locks) == 0 {
		return notApplicable("no package manager with locks")
	}
	return well("free")
}

func judgeFirstBoot(f Facts) []finding.Finding {
	if f.exists("/etc/cloud/cloud-init.disabled") || f.exists("/var/lib/cloud/instance/boot-finished") || f.exists("/run/cloud-init/result.json") {
		return well("finished")
	}
	t := f.File("/run/cloud-init/status.json")
	switch t.State {
	case snapshot.Unreadable:
		return unknownText(t)
	case snapshot.Absent:
		return notApplicable("no cloud-init")
	}
	var status struct {
		V1 struct {
			Stage string `json:"stage"`
		} `json:"v1"`
	}
	stage := ""
	// The file is rewritten while it is read; what can be read of it is enough.
	if err := json.Unmarshal([]byte(t.Data), &status); err == nil {
		stage = status.V1.Stage
	}
	out := warn("cloud-init is still at work"+strings.TrimRight(" ("+stage+")", "() "), "sudo cloud-init status --wait, then again. An install waits by itself", at(t, firstLine(t.Data)))
	if stage != "" {
		out[0].Measured = "cloud-init is still at work (" + stage + ")"
	}
	out[0].State = finding.Wait
	return out
}

var aptPeriodic = regexp.MustCompile(`(?m)^\s*APT::Periodic::Unattended-Upgrade\s+"(\d+|always)"\s*;`)

func judgeUnattended(f Facts) []finding.Finding {
	packages, state := f.Packages()
	if state != snapshot.Present {
		return unknown("the list of installed packages", "")
	}
	var loose []string
	total := 0
	for _, p := range packages {
		if !p.Installed || !driverPackage(p.Name) {
			continue
		}
		total++
		if !p.Held {
			loose = append(loose, p.Name)
		}
	}
	if total == 0 {
		return notApplicable("the NVIDIA driver is not from packages")
	}
	on, from := f.automaticUpgrades()
	if !on {
		return well("off")
	}
	if len(loose) == 0 {
		return well("on; the NVIDIA packages are held")
	}
	if t := f.File("/etc/apt/apt.conf.d/50unattended-upgrades"); blacklists(t.Data) {
		return well("on; the NVIDIA packages are on its list of exceptions", at(t, ""))
	}
	fix := "sudo apt-mark hold " + strings.Join(loose[:min(len(loose), 4)], " ")
	if len(loose) > 4 {
		fix = "sudo apt-mark hold $(dpkg-query -W -f '${Package} ' '*nvidia*')"
	}
	if f.osRelease().rpm() {
		fix = f.driverHold()
	}
	return repairable("host.hold_driver", warn(fmt.Sprintf("on, and %s not held: an update replaces the driver's libraries under the running driver", count(len(loose), "NVIDIA package")), fix, from))
}

// driverPackage says whether an upgrade of a package changes the driver.
func driverPackage(name string) bool {
	return strings.HasPrefix(name, "nvidia-driver") || strings.HasPrefix(name, "libnvidia-compute") || strings.HasPrefix(name, "nvidia-utils") ||
		strings.HasPrefix(name, "nvidia-headless") || strings.HasPrefix(name, "nvidia-dkms") || strings.HasPrefix(name, "nvidia-open") ||
		strings.HasPrefix(name, "nvidia-kernel") || strings.HasPrefix(name, "cuda-drivers") || strings.HasPrefix(name, "linux-modules-nvidia") || strings.HasPrefix(name, "kmod-nvidia")
}

// automaticUpgrades says whether packages are upgraded without anybody asking.
func (f Facts) automaticUpgrades() (on bool, from finding.Evidence) {
	// apt reads its files by name; the last one that says something wins.
	asked := false
	for _, name := range f.Glob("/etc/apt/apt.conf.d/*") {
		t := f.File(name)
		if all := aptPeriodic.FindAllStringSubmatch(t.Data, -1); len(all) > 0 {
			m := all[len(all)-1]
			asked, on, from = true, m[1] != "0", at(t, m[0])
		}
	}
	if asked {
		return on, from
	}
	for _, name := range []string{"dnf-automatic.timer", "dnf-automatic-install.timer", "dnf5-automatic.timer"} {
		if u, state := f.Unit(name); state == snapshot.Present && u.Active == "active" {
			return true, at(f.Command(snapshot.CommandUnits), name+" active")
		}
	}
	return false, finding.Evidence{}
}

// blacklists says whether unattended-upgrades leaves the driver alone.
func blacklists(conf string) bool {
	_, rest, ok := strings.Cut(conf, "Unattended-Upgrade::Package-Blacklist")
	if !ok {
		return false
	}
	block, _, _ := strings.Cut(rest, "};")
	for line := range strings.Lines(block) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "//") && !strings.HasPrefix(line, "#") && strings.Contains(line, "nvidia") {
			return true
		}
	}
	return false
}

var restartMode = regexp.MustCompile(`(?m)^\s*\$nrconf\{restart\}\s*=\s*['"]([ail])['"]`)

func judgeNeedrestart(f Facts) []finding.Finding {
	if !f.exists("/usr/sbin/needrestart") && f.File("/etc/needrestart/needrestart.conf").State == snapshot.Absent {
		if !f.looked("/usr/bin") {
			return unknown("/usr/sbin/needrestart", "")
		}
		return notApplicable("needrestart is not installed")
	}
	names := append([]string{"/etc/needrestart/needrestart.conf"}, f.Glob("/etc/needrestart/conf.d/*.conf")...)
	mode, from := "", finding.Evidence{}
	spared := false
	for _, name := range names {
		t := f.File(name)
		if t.State == snapshot.Unreadable {
			return unknownText(t)
		}
		if m := restartMode.FindStringSubmatch(t.Data); m != nil {
			mode, from = m[1], at(t, m[0])
		}
		spared = spared || strings.Contains(t.Data, "k3s")
	}
	on, _ := f.automaticUpgrades()
	if mode == "a" && on && !spared {
		return repairable("host.needrestart", warn("it restarts services by itself after unattended upgrades, k3s and with it the model server too",
			`printf '$nrconf{override_rc}{qr(^k3s)} = 0;\n' | sudo tee /etc/needrestart/conf.d/llmbox.conf`, from))
	}
	return well(map[string]string{"a": "restarts services by itself", "i": "asks", "l": "only lists", "": "asks"}[mode])
}

func judgeReboot(f Facts) []finding.Finding {
	t := f.File("/var/run/reboot-required")
	switch t.State {
	case snapshot.Unreadable:
		return unknownText(t)
	case snapshot.Absent:
		if !f.exists("/var") && !f.canList() {
			return unknownText(t)
		}
		return well("none")
	}
	packages := f.File("/var/run/reboot-required.pkgs")
	measured := "an update waits for a reboot"
	if names := slices.Compact(slices.Sorted(slices.Values(packages.Lines()))); len(names) > 0 {
		measured += ": " + some(3, names)
	}
	return warn(measured, "Now is a better time than after the install: sudo reboot", at(t, t.Trimmed()))
}
