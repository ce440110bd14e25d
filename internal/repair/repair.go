// Package repair knows the safe repairs: what llmbox may mend on a machine by
// itself once a person has seen the list. Plan turns findings into actions and is
// pure; Apply carries actions out and keeps a record of what it changed.
//
// A repair never reboots, never installs, removes or replaces the NVIDIA driver or
// a kernel, and never edits a file that llmbox did not write: settings go into
// drop-ins of their own. The package must not know how facts are collected or
// judged, nor which command offers the repairs.
package repair

import (
	"io/fs"
	"slices"
)

// The names of the repairs, as findings carry them.
const (
	Modules      = "host.modules"
	Sysctl       = "host.sysctl"
	Inotify      = "host.inotify"
	AppArmor     = "host.apparmor"
	HoldDriver   = "host.hold_driver"
	Needrestart  = "host.needrestart"
	Firewall     = "net.firewall"
	DeviceNodes  = "gpu.device_nodes"
	Toolkit      = "toolkit.install"
	CDI          = "runtime.cdi"
	DevCharLinks = "runtime.dev_char_links"
	RestartK3s   = "k3s.restart"

	StartK3s       = "k3s.start"
	PruneImages    = "disk.images"
	Uncordon       = "node.uncordon"
	StalePods      = "pod.stale"
	PendingRelease = "helm.pending"
	Unseal         = "vault.unseal"
	RestartDNS     = "coredns.restart"
	RestartPlugin  = "plugin.restart"
	RestartWebhook = "webhook.restart"
	RestartModel   = "model.restart"
	DeletePod      = "pod.delete"
)

// The files that repairs write. Uninstalling names them.
const (
	// SysctlFile sorts after 99-sysctl.conf, the link to /etc/sysctl.conf, because
	// the last file that sets a key wins (sysctl.d(5)).
	SysctlFile      = "/etc/sysctl.d/99-zz-llmbox.conf"
	ModulesFile     = "/etc/modules-load.d/llmbox.conf"
	NeedrestartFile = "/etc/needrestart/conf.d/llmbox.conf"
	UdevFile        = "/etc/udev/rules.d/71-llmbox-nvidia-dev-char.rules"
	// AptKeyFile stays in ASCII armour, which apt reads since 1.4 (apt-key(8)), so that
	// no gpg is needed.
	AptKeyFile    = "/usr/share/keyrings/nvidia-container-toolkit-keyring.asc"
	AptSourceFile = "/etc/apt/sources.list.d/nvidia-container-toolkit.sources"
	RPMKeyFile    = "/etc/pki/rpm-gpg/RPM-GPG-KEY-nvidia-container-toolkit"
	DNFRepoFile   = "/etc/yum.repos.d/nvidia-container-toolkit.repo"
	ZypperFile    = "/etc/zypp/repos.d/nvidia-container-toolkit.repo"
)

// marker begins each file of ours, behind the file's own comment sign.
const marker = "# Written by llmbox; uninstalling names it."

// Action is one repair: the steps to take, in order, and how to know that they
// worked.
type Action struct {
	// Name is the repair's, one of the constants above.
	Name string `json:"name"`
	// Findings are the ids that it mends.
	Findings []string `json:"findings"`
	Title    string   `json:"title"`
	// Safe says why nothing is put at risk.
	Safe  string `json:"safe"`
	Steps []Step `json:"steps"`
	// Undo is what a person types to have it as before, one command a line.
	Undo      []string `json:"undo"`
	NeedsRoot bool     `json:"needs_root"`
	// Verify holds once it is mended. Where it holds before, nothing is done.
	Verify []Check `json:"verify"`
	// Always is set where nothing beforehand can tell that the action is needless.
	Always bool `json:"always,omitempty"`
	// After names actions of the same plan without whose success this one is left.
	After []string `json:"after,omitempty"`
}

// Step is one of Write, Link, Download, Run and Kube; exactly one is set.
type Step struct {
	// Unless leaves the step out where it holds.
	Unless   *Check    `json:"unless,omitempty"`
	Write    *Write    `json:"write,omitempty"`
	Link     *Link     `json:"link,omitempty"`
	Download *Download `json:"download,omitempty"`
	Run      *Run      `json:"run,omitempty"`
	Kube     *Kube     `json:"kube,omitempty"`
}

// Write is a file of ours. It is written when absent or ours, never over somebody
// else's.
type Write struct {
	Path    string      `json:"path"`
	Mode    fs.FileMode `json:"mode"`
	Content string      `json:"content"`
	// Elsewhere names other files that must not say the same.
	Elsewhere *Elsewhere `json:"elsewhere,omitempty"`
}

// Elsewhere is a text that no other file of the patterns may hold outside comments.
type Elsewhere struct {
	Patterns []string `json:"patterns"`
	Text     string   `json:"text"`
}

// Link is a symbolic link, made where nothing stands.
type Link struct {
	Path   string `json:"path"`
	Target string `json:"target"`
}

// Download is an OpenPGP public key in ASCII armour, written as it came. It is
// refused where a primary key in it has another fingerprint.
type Download struct {
	URL  string      `json:"url"`
	Path string      `json:"path"`
	Mode fs.FileMode `json:"mode"`
	// Fingerprint is in upper-case hexadecimal digits.
	Fingerprint string `json:"fingerprint"`
}

// Run is a program with its arguments; no shell is involved.
type Run struct {
	// Argv begins with the bare name of the program.
	Argv []string `json:"argv"`
	// Environment are NAME=value pairs without secrets; proxies are added when it runs.
	Environment []string `json:"environment,omitempty"`
	// DeadlineSeconds bounds the program itself; waiting for Lock comes on top.
	DeadlineSeconds int `json:"deadline_seconds"`
	// Lock is a file whose holder is waited for, for at most LockSeconds.
	Lock        string `json:"lock,omitempty"`
	LockSeconds int    `json:"lock_seconds,omitempty"`
	// Lenient leaves a failure to be judged by the steps after it.
	Lenient bool `json:"lenient,omitempty"`
	// Guard is asked first and can refuse.
	Guard *Guard `json:"guard,omitempty"`
	// Packages are what the program may install or bring up to date.
	Packages *Packages `json:"packages,omitempty"`
	// Touches are files that the program writes.
	Touches []string `json:"touches,omitempty"`
	// Settings are kernel settings that the program changes.
	Settings []Setting `json:"settings,omitempty"`
}

// Guard is a simulation by apt-get. It refuses where a package would be removed, an
// installed one outside Upgrade replaced, or a driver or kernel installed that is
// not in New.
type Guard struct {
	Argv    []string `json:"argv"`
	Upgrade []string `json:"upgrade,omitempty"`
	New     []string `json:"new,omitempty"`
}

// Packages names packages of one package manager.
type Packages struct {
	Manager Manager  `json:"manager"`
	Names   []string `json:"names"`
}

// Setting is a kernel setting with the value that it shall have.
type Setting struct {
	// Key is dotted, such as "net.ipv4.ip_forward".
	Key   string `json:"key"`
	Value string `json:"value"`
}

// Check is something that can be looked at; all set parts must hold.
type Check struct {
	// What is said where it does not hold.
	What string `json:"what"`
	// AnyOf are paths of which at least one leads to something.
	AnyOf []string `json:"any_of,omitempty"`
	// File holds each text of Has.
	File string   `json:"file,omitempty"`
	Has  []string `json:"has,omitempty"`
	// Settings have their values now.
	Settings []Setting `json:"settings,omitempty"`
	// Devices are character devices with the major number that the kernel gave to one
	// of the names in /proc/devices.
	Devices []DeviceNode `json:"devices,omitempty"`
	// Run ends with status 0 and its output has each word of Says.
	Run  []string `json:"run,omitempty"`
	Says []string `json:"says,omitempty"`
	// Version is the oldest that a line of Run's output may name, after the word
	// "version".
	Version string `json:"version,omitempty"`
	// Offers asks the package manager.
	Offers *Offer `json:"offers,omitempty"`
	// Kube looks at an object of the cluster.
	Kube *KubeCheck `json:"kube,omitempty"`
	// WithinSeconds is how long it may take to come true after the steps.
	WithinSeconds int `json:"within_seconds,omitempty"`
}

// DeviceNode is a character device of the driver.
type DeviceNode struct {
	Path string `json:"path"`
	// Registered are names in /proc/devices of which one has the major number.
	Registered []string `json:"registered"`
}

// Offer is a package that a package manager can install.
type Offer struct {
	Manager Manager `json:"manager"`
	Package string  `json:"package"`
	AtLeast string  `json:"at_least"`
}

// Declined is a finding that names a repair which can't be done safely here.
type Declined struct {
	Finding string `json:"finding"`
	Repair  string `json:"repair"`
	Why     string `json:"why"`
}

// NeedsNetwork says whether something may be downloaded.
func (a Action) NeedsNetwork() bool {
	return slices.ContainsFunc(a.Steps, func(s Step) bool {
		return s.Download != nil || s.Run != nil && s.Run.Packages != nil
	})
}
