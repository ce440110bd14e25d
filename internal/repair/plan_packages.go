package repair

import (
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

const (
	// toolkitAtLeast is the first NVIDIA Container Toolkit in which a container can't
	// take over the host by a hook (CVE-2025-23266, NVIDIA security bulletin 5659).
	toolkitAtLeast = "1.17.8"

	// The repository that NVIDIA's install guide names
	// (docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide;
	// NVIDIA/libnvidia-container stable/rpm/nvidia-container-toolkit.repo).
	toolkitRepository = "https://nvidia.github.io/libnvidia-container"
	toolkitKey        = toolkitRepository + "/gpgkey"
	// toolkitFingerprint is that key's, as GoogleCloudDataproc/initialization-actions
	// gpu/install_gpu_driver.sh pins it.
	toolkitFingerprint = "C95B321B61E88C1809C4F759DDCAE044F796ECB0"

	// Seconds. A mirror at 100 kB/s takes ten minutes for the indexes of a
	// distribution; the toolkit itself has 10 MB.
	updateSeconds  = 600
	installSeconds = 900
	// lockSeconds is how long the package manager of a first boot is waited for
	// (Azure/aks-engine#1538).
	lockSeconds = 600
)

// toolkitPackages are the packages that belong together, all of one version
// (docs.nvidia.com/datacenter/cloud-native/container-toolkit, architecture overview).
func toolkitPackages() []string {
	return []string{"nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools", "libnvidia-container1"}
}

// aptEnvironment keeps packages from asking and needrestart from restarting.
func aptEnvironment() []string {
	return []string{"DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_MODE=l"}
}

// installation is what the package manager is asked for.
type installation struct {
	names []string
	// upgrade names those that may replace an older one.
	upgrade []string
	// fresh names those that may come although they look like a kernel's.
	fresh []string
	// newest is set where what is there is too old.
	newest bool
	// source brings the packages in where the configured sources don't offer them.
	source []Step
}

// install are the steps that install packages and nothing else that matters.
func (p *planner) install(manager Manager, in installation) []Step {
	switch manager {
	case Apt:
		update := Run{
			Argv: []string{"apt-get", "update"}, Environment: aptEnvironment(), DeadlineSeconds: updateSeconds,
			Lock: "/var/lib/apt/lists/lock", LockSeconds: lockSeconds,
			// A repository of somebody else that is broken need not matter.
			Lenient: true,
		}
		args := slices.Concat([]string{"install", "-y", "--no-install-recommends", "--no-remove"}, in.names)
		get := Run{
			Argv: slices.Concat([]string{"apt-get",
				"-oDPkg::Lock::Timeout=600", "-oDpkg::Options::=--force-confdef", "-oDpkg::Options::=--force-confold",
			}, args),
			Environment: aptEnvironment(), DeadlineSeconds: installSeconds + lockSeconds,
			Guard:    &Guard{Argv: slices.Concat([]string{"apt-get", "-s"}, args), Upgrade: in.upgrade, New: in.fresh},
			Packages: &Packages{Manager: manager, Names: in.names},
		}
		return slices.Concat([]Step{{Run: &update}}, in.source, []Step{{Run: &get}})
	case DNF, Yum:
		verb := "install"
		if in.newest {
			verb = "upgrade"
		}
		get := Run{
			// The driver is kept out of what may come along.
			Argv: slices.Concat([]string{
				string(manager), verb, "-y", "--setopt=install_weak_deps=False",
				"--exclude=nvidia-driver*", "--exclude=kmod-nvidia*", "--exclude=cuda-drivers*", "--exclude=nvidia-open*",
			}, in.names),
			DeadlineSeconds: installSeconds + lockSeconds,
			Packages:        &Packages{Manager: manager, Names: in.names},
		}
		return slices.Concat(in.source, []Step{{Run: &get}})
	case Zypper:
		verb := "install"
		if in.newest {
			verb = "update"
		}
		get := Run{
			Argv:            slices.Concat([]string{"zypper", "--non-interactive", verb, "--no-recommends"}, in.names),
			Environment:     []string{"ZYPP_LOCK_TIMEOUT=600"},
			DeadlineSeconds: installSeconds + lockSeconds,
			Packages:        &Packages{Manager: manager, Names: in.names},
		}
		return slices.Concat(in.source, []Step{{Run: &get}})
	}
	return nil
}

// uninstalls is what a person types to be rid of packages.
func (p *planner) uninstalls(manager Manager, names ...string) string {
	list := strings.Join(names, " ")
	switch manager {
	case Apt:
		return "sudo apt-get remove " + list
	case Zypper:
		return "sudo zypper remove " + list
	}
	return "sudo " + string(manager) + " remove " + list
}

func planToolkit(p *planner, found []finding.Finding) {
	manager := p.manager()
	if manager == "" {
		p.decline(found, "none of apt-get, dnf, yum and zypper is here")
		return
	}
	architecture := map[string]string{"x86_64": "amd64", "aarch64": "arm64"}[p.machine()]
	if architecture == "" {
		p.decline(found, "NVIDIA has packages for x86_64 and aarch64 only, and this machine's processor is neither or not known")
		return
	}
	names := toolkitPackages()
	offered := &Check{
		What:   string(manager) + " offers nvidia-container-toolkit " + toolkitAtLeast + " or newer",
		Offers: &Offer{Manager: manager, Package: names[0], AtLeast: toolkitAtLeast},
	}
	source, files := toolkitSource(manager, architecture, offered)
	undo := []string{p.uninstalls(manager, names...), "sudo rm -f " + strings.Join(files, " ")}
	// An upgrade leaves out what is not installed, so it is asked for only where the
	// finding is about the version.
	newest := !slices.ContainsFunc(ids(found), func(id string) bool { return id != "toolkit.version" })
	if newest {
		undo[0] = "none: the older version lets a container take over the host (CVE-2025-23266)"
	}
	p.add(Action{
		Name: Toolkit, Title: "Install the NVIDIA Container Toolkit " + toolkitAtLeast + " or newer",
		Safe: "these four packages hold no driver; other packages are neither upgraded nor removed, " +
			"and containers that run are not touched",
		Steps: p.install(manager, installation{names: names, upgrade: names, newest: newest, source: source}),
		Undo:  undo,
		Verify: []Check{
			{What: "nvidia-container-runtime is there", AnyOf: []string{"/usr/bin/nvidia-container-runtime", "/usr/local/bin/nvidia-container-runtime"}},
			{What: "nvidia-ctk is " + toolkitAtLeast + " or newer", Run: []string{"nvidia-ctk", "--version"}, Version: toolkitAtLeast},
		},
	}, found)
}

// machine is uname -m.
func (p *planner) machine() string {
	var s snapshot.System
	if state, _ := p.facts.Probe(snapshot.ProbeSystem, &s); state != snapshot.Present {
		return ""
	}
	return s.Machine
}

// toolkitSource are the steps that add NVIDIA's repository where nothing that is
// configured offers a new enough toolkit, and the files that it writes.
func toolkitSource(manager Manager, architecture string, unless *Check) ([]Step, []string) {
	key := func(path string) Step {
		return Step{Unless: unless, Download: &Download{URL: toolkitKey, Path: path, Mode: 0o644, Fingerprint: toolkitFingerprint}}
	}
	file := func(path string, patterns []string, lines ...string) Step {
		s := drop(path, lines...)
		s.Unless = unless
		s.Write.Elsewhere = &Elsewhere{Patterns: patterns, Text: "nvidia.github.io/libnvidia-container/stable"}
		return s
	}
	switch manager {
	case Apt:
		return []Step{
			key(AptKeyFile),
			// Two entries for one repository with different keys stop apt altogether.
			file(AptSourceFile, []string{"/etc/apt/sources.list", "/etc/apt/sources.list.d/*.list", "/etc/apt/sources.list.d/*.sources"},
				"Types: deb", "URIs: "+toolkitRepository+"/stable/deb/"+architecture, "Suites: /", "Signed-By: "+AptKeyFile),
			{Unless: unless, Run: &Run{
				// This repository alone, so that one of somebody else that is broken does not
				// matter.
				Argv: []string{"apt-get", "update",
					"-oDir::Etc::sourcelist=" + AptSourceFile, "-oDir::Etc::sourceparts=-", "-oAPT::Get::List-Cleanup=0"},
				Environment: aptEnvironment(), DeadlineSeconds: updateSeconds,
				Lock: "/var/lib/apt/lists/lock", LockSeconds: lockSeconds,
			}},
		}, []string{AptSourceFile, AptKeyFile}
	case Zypper:
		return []Step{
			key(RPMKeyFile),
			{Unless: unless, Run: &Run{Argv: []string{"rpm", "--import", RPMKeyFile}, DeadlineSeconds: 60}},
			file(ZypperFile, []string{"/etc/zypp/repos.d/*.repo"}, toolkitRepoLines()...),
			{Unless: unless, Run: &Run{
				Argv:        []string{"zypper", "--non-interactive", "refresh", "nvidia-container-toolkit"},
				Environment: []string{"ZYPP_LOCK_TIMEOUT=600"}, DeadlineSeconds: updateSeconds + lockSeconds,
			}},
		}, []string{ZypperFile, RPMKeyFile}
	}
	return []Step{
		key(RPMKeyFile),
		file(DNFRepoFile, []string{"/etc/yum.repos.d/*.repo"}, toolkitRepoLines()...),
	}, []string{DNFRepoFile, RPMKeyFile}
}

// toolkitRepoLines are NVIDIA's own settings: it signs the index and not each
// package. The key is the file that was checked.
func toolkitRepoLines() []string {
	return []string{
		"[nvidia-container-toolkit]", "name=nvidia-container-toolkit",
		"baseurl=" + toolkitRepository + "/stable/rpm/$basearch",
		"enabled=1", "repo_gpgcheck=1", "gpgcheck=0", "gpgkey=file://" + RPMKeyFile,
	}
}
