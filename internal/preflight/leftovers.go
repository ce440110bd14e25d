package preflight

import (
	"fmt"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func leftoverChecks() []Check {
	return []Check{
		{
			ID: "leftovers.kubernetes", Title: "Another Kubernetes", Required: "none, or llmbox installs into it with --kubeconfig",
			Source: "k3s-io/k3s#1011; canonical/microk8s#618; docs.nvidia.com/brev, k8s mode", Judge: judgeOtherKubernetes,
			Causes: []string{"k3s.port_conflict"},
		},
		{
			ID: "leftovers.k3s", Title: "Remains of a k3s", Required: "no k3s, or a whole one of llmbox's own",
			Source: "k3s-io/k3s#3888, #4640, #2347, #8740", Judge: judgeK3sRemains,
			Causes: []string{"k3s.port_conflict"},
		},
		{
			ID: "leftovers.cni", Title: "Network settings of a former cluster", Required: "an empty /etc/cni/net.d",
			Source: "k3s-io/k3s#8024, #2898; cri-o/cri-o contrib/cni", Judge: judgeCNI,
			Causes: []string{"leftovers.kubernetes", "leftovers.k3s"},
		},
		{
			ID: "leftovers.mounts", Title: "Mounts of a former cluster", Required: "nothing mounted under /var/lib/kubelet or /run/k3s",
			Source: "k3s-io/k3s#3264, #8520; rancher/rke2#8296", Judge: judgeMounts,
			Causes: []string{"leftovers.kubernetes", "leftovers.k3s"},
		},
		{
			ID: "leftovers.interfaces", Title: "Interfaces of a former cluster", Required: "no cni0, flannel.1, cilium_host, vxlan.calico",
			Source: "k3s-io/k3s#2898, #2435; flannel-io/flannel#2166", Judge: judgeInterfaces,
			Causes: []string{"leftovers.kubernetes", "leftovers.k3s"},
		},
	}
}

// foreignCluster is a Kubernetes distribution that is here.
type foreignCluster struct {
	name, sign, remove string
	running            bool
}

// otherKubernetes are the distributions other than k3s, by what they leave on disk.
func (f Facts) otherKubernetes() []foreignCluster {
	rows := []struct {
		name, remove string
		signs, units []string
	}{
		{"microk8s", "sudo snap remove --purge microk8s", []string{"/snap/microk8s", "/var/snap/microk8s"}, []string{"snap.microk8s.daemon-kubelite.service"}},
		{"Canonical Kubernetes", "sudo snap remove --purge k8s", []string{"/snap/k8s"}, []string{"snap.k8s.kubelet.service"}},
		{"RKE2", "sudo /usr/local/bin/rke2-uninstall.sh", []string{"/usr/local/bin/rke2", "/opt/rke2/bin/rke2", "/etc/rancher/rke2"}, []string{"rke2-server.service", "rke2-agent.service"}},
		{"k0s", "sudo /usr/local/bin/k0s stop; sudo /usr/local/bin/k0s reset", []string{"/usr/local/bin/k0s", "/etc/k0s", "/var/lib/k0s"}, []string{"k0scontroller.service", "k0sworker.service"}},
		{"EKS", "Use another machine: this one belongs to an EKS cluster", []string{"/etc/eks"}, nil},
		{"kubeadm's Kubernetes", "sudo kubeadm reset -f && sudo systemctl disable --now kubelet", []string{"/etc/kubernetes/kubelet.conf", "/etc/kubernetes/admin.conf", "/etc/kubernetes/manifests/kube-apiserver.yaml"}, []string{"kubelet.service"}},
	}
	var out []foreignCluster
	for _, r := range rows {
		c := foreignCluster{name: r.name, remove: r.remove, sign: f.firstExisting(r.signs...)}
		for _, name := range r.units {
			if u, state := f.Unit(name); state == snapshot.Present && (u.Active == "active" || u.Active == "activating") {
				c.running = true
				if c.sign == "" {
					c.sign = name
				}
			}
		}
		if c.sign != "" {
			out = append(out, c)
		}
	}
	return out
}

// canList says whether the snapshot shows enough of the disk to say "nothing there".
func (f Facts) canList() bool { return f.exists("/etc") && f.looked("/usr/bin") }

func judgeOtherKubernetes(f Facts) []finding.Finding {
	others := f.otherKubernetes()
	if len(others) == 0 {
		if !f.canList() {
			return unknown("/etc and /usr", "")
		}
		return well("none")
	}
	var names []string
	running := false
	for _, c := range others {
		names = append(names, c.name+" ("+c.sign+")")
		running = running || c.running
	}
	fix := others[0].remove
	if strings.HasPrefix(fix, "sudo ") {
		fix = "If nobody needs it: " + fix
	}
	fix += ". Else install into it: llmbox install --kubeconfig FILE"
	if running {
		return fail(strings.Join(names, ", ")+" runs here", fix, atPath(others[0].sign, ""))
	}
	return warn(strings.Join(names, ", ")+" is here and does not run", fix, atPath(others[0].sign, ""))
}

func judgeK3sRemains(f Facts) []finding.Finding {
	if f.Need.Installed {
		return well("llmbox's own")
	}
	if why, bad := f.Manifest.Unreadable["host/var/lib/rancher"]; bad {
		return unknown("/var/lib/rancher", why)
	}
	if !f.canList() {
		return unknown("/etc and /usr", "")
	}
	program := f.firstExisting("/usr/local/bin/k3s", "/usr/bin/k3s")
	unit := f.firstExisting("/etc/systemd/system/k3s.service", "/etc/systemd/system/k3s-agent.service")
	data := f.firstExisting("/var/lib/rancher/k3s/server/db", "/var/lib/rancher/k3s/server/token", "/var/lib/rancher/k3s/agent")
	wipe := f.k3sWipe()
	switch {
	case f.k3sRuns():
		return fail("a k3s that llmbox did not install runs here",
			"Install into it: sudo llmbox install --kubeconfig /etc/rancher/k3s/k3s.yaml. Or, if nobody needs it: "+wipe, atPath(unit, ""))
	case data != "" && (program == "" || unit == ""):
		return fail("half removed: "+data+" is still there, its "+missingPart(program, unit)+" is gone; a new k3s can't read the old data", wipe, atPath(data, ""))
	case data != "":
		return fail("a stopped k3s with its data ("+data+"): a new token does not open it",
			"Start it and install into it: sudo systemctl start k3s; sudo llmbox install --kubeconfig /etc/rancher/k3s/k3s.yaml. Or, if nobody needs it: "+wipe, atPath(data, ""))
	case unit != "" && program == "":
		return warn("half removed: "+unit+" names a program that is gone", "sudo systemctl disable k3s; sudo rm "+unit, atPath(unit, ""))
	case program != "":
		return note(program+" is there; llmbox brings its own and checks it", atPath(program, ""))
	}
	return well("none")
}

// k3sWipe removes a k3s and its data.
func (f Facts) k3sWipe() string {
	if remove := f.firstExisting("/usr/local/bin/k3s-uninstall.sh", "/usr/local/bin/k3s-agent-uninstall.sh"); remove != "" {
		return "sudo " + remove + " (this deletes that cluster and its data)"
	}
	return "sudo rm -rf /var/lib/rancher/k3s /etc/rancher/k3s (this deletes that cluster's data)"
}

func missingPart(program, unit string) string {
	if program == "" {
		return "program"
	}
	if unit == "" {
		return "service"
	}
	return "rest"
}

func judgeCNI(f Facts) []finding.Finding {
	if f.Need.Installed {
		return well("llmbox's own")
	}
	if why, bad := f.Manifest.Unreadable["host/etc/cni/net.d"]; bad {
		return unknown("/etc/cni/net.d", why)
	}
	if !f.exists("/etc") {
		return unknown("/etc/cni/net.d", "")
	}
	var stale []string
	for _, name := range f.List("/etc/cni/net.d") {
		// Podman and Docker-like tools keep networks of their own here; k3s looks
		// elsewhere, and only a cluster's own mislead others.
		if slices.Contains([]string{"87-podman-bridge.conflist", "87-podman.conflist", ".lock", ".kubernetes-cni-keep", "200-loopback.conf", "99-loopback.conf"}, name) {
			continue
		}
		if strings.HasPrefix(name, "nerdctl-") || strings.Contains(name, "podman") {
			continue
		}
		if strings.HasSuffix(name, ".conf") || strings.HasSuffix(name, ".conflist") || strings.HasSuffix(name, ".json") {
			stale = append(stale, "/etc/cni/net.d/"+name)
		}
	}
	if len(stale) == 0 {
		return well("none")
	}
	return warn(some(3, stale)+" of a former cluster", "If that cluster is gone: sudo rm "+strings.Join(stale, " "), atPath(stale[0], ""))
}

func judgeMounts(f Facts) []finding.Finding {
	if f.Need.Installed {
		return well("llmbox's own")
	}
	mounts, t := f.mounts()
	if t.State != snapshot.Present {
		return unknownText(t)
	}
	var left []string
	network := ""
	for _, m := range mounts {
		for _, root := range []string{"/var/lib/kubelet/", "/run/k3s/", "/run/netns/cni-", "/var/lib/rancher/k3s/agent/"} {
			if strings.HasPrefix(m.point, root) {
				left = append(left, m.point)
				if network == "" && (strings.HasPrefix(m.kind, "nfs") || m.kind == "cifs" || m.kind == "ceph") {
					network = m.point
				}
			}
		}
	}
	if len(left) == 0 {
		return well("none")
	}
	measured := fmt.Sprintf("%s, such as %s", count(len(left), "mount"), left[0])
	rest := slices.DeleteFunc(slices.Clone(left), func(point string) bool { return point == network })
	fix := "sudo umount " + strings.Join(rest[:min(len(rest), 4)], " ")
	if network != "" {
		measured += "; " + network + " is a network share: deleting under it would delete the share's files"
		share := "sudo umount " + network
		if fix = "First the share: " + share + ". Then: " + fix; len(rest) == 0 {
			fix = share
		}
	}
	if f.exists("/usr/local/bin/k3s-killall.sh") {
		fix = "sudo /usr/local/bin/k3s-killall.sh. Or: " + fix
	}
	return warn(measured, fix, at(t, left[0]))
}

func judgeInterfaces(f Facts) []finding.Finding {
	if f.Need.Installed {
		return well("llmbox's own")
	}
	interfaces, why := f.interfaces()
	if why != nil {
		return why
	}
	var left []string
	for _, i := range interfaces {
		if slices.Contains([]string{"cni0", "flannel.1", "flannel-v6.1", "flannel-wg", "cilium_host", "cilium_net", "vxlan.calico", "kube-ipvs0"}, i.Name) {
			left = append(left, i.Name)
		}
	}
	if len(left) == 0 {
		return well("none")
	}
	var removes []string
	for _, name := range left {
		removes = append(removes, "sudo ip link delete "+name)
	}
	return warn(strings.Join(left, ", "), strings.Join(removes, "; "), atProbe(snapshot.ProbeInterfaces, left[0]))
}
