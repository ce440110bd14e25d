package doctor

import (
	"context"
	"regexp"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/preflight"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// hostLayer is the layer of a check of the machine by its id.
func hostLayer(id string) Layer {
	switch {
	case slices.Contains([]string{"gpu.present", "gpu.pci.fallen_off", "gpu.xid.79", "gpu.pcie.width"}, id):
		return LayerPCI
	case strings.HasPrefix(id, "gpu.driver"):
		return LayerModule
	case id == "gpu.device_nodes", strings.HasPrefix(id, "gpu.xid"), strings.HasPrefix(id, "gpu.ecc"):
		return LayerDevice
	case strings.HasPrefix(id, "gpu.nvml"), id == "gpu.count":
		return LayerNVML
	case strings.HasPrefix(id, "gpu."):
		return LayerCUDA
	case strings.HasPrefix(id, "host.disk"):
		return LayerStorage
	case strings.HasPrefix(id, "net."):
		return LayerNetwork
	case strings.HasPrefix(id, "k3s."), strings.HasPrefix(id, "leftovers."):
		return LayerK3s
	case strings.HasPrefix(id, "runtime."), strings.HasPrefix(id, "toolkit."), id == "image.cuda_requirement":
		return LayerRuntime
	case id == "preflight.gpu_generation":
		return LayerClient
	case strings.HasPrefix(id, "model."):
		return LayerModel
	}
	return LayerHost
}

// hostFindings judges the machine by preflight's checks. What preflight advises before
// an install is no news on a box that runs, and becomes a note.
func hostFindings(ctx context.Context, f *facts) []finding.Finding {
	if !f.hasHost() {
		return nil
	}
	found := preflight.Judge(ctx, hostChecks(), f.host())
	for i := range found {
		one := &found[i]
		// Its own causes hold among failures only; doctor's arrangement keeps that.
		if one.Severity == finding.Warn && one.State == finding.Judged && advice(one.ID) {
			one.Severity, one.Fix = finding.Info, ""
		}
		// What nobody could tell, on a machine that is busy, is no failure of the box.
		if one.Severity == finding.Warn && one.State == finding.Unreadable {
			one.Severity, one.Fix = finding.Info, ""
		}
		switch one.ID {
		case "runtime.handler_missing":
			if !bad(*one) {
				one.ID = "runtime.handler"
			}
		case "runtime.dev_char_links":
			// A container that lost its GPU is the failure; the links keep it from coming back.
			one.Causes = append(one.Causes, "runtime.cgroup_device_lost")
		case "toolkit.version":
			// A hole to be closed, and nothing that keeps the box from serving.
			if one.Severity == finding.Fail {
				one.Severity = finding.Warn
			}
		case "k3s.port_conflict":
			// Who answers for the cluster has its ports.
			if bad(*one) && f.apiAnswers() {
				one.Severity, one.Fix, one.Measured = finding.OK, "", "in use by the cluster"
			}
		case "model.gpu_memory_busy":
			if bad(*one) && f.modelHolds() {
				one.Severity, one.Fix, one.Measured = finding.OK, "", "the box's own model server"
			}
		case "host.disk.pressure":
			one.Causes = append(one.Causes, "host.disk.full")
			// The kubelet has thresholds of its own, and says when they are reached.
			if one.Severity == finding.Fail && f.withoutPressure() {
				one.Severity = finding.Warn
			}
		case "host.first_boot":
			one.Causes = append(one.Causes, "host.apt.busy")
		case "gpu.xid.154":
			one.Causes = append(one.Causes, "gpu.fabric")
		}
	}
	return found
}

// advice says whether a warning of preflight is advice for the machine and no failure
// of the box.
func advice(id string) bool {
	return slices.Contains([]string{
		"host.os", "host.kernel", "host.swap", "host.entropy", "host.sysctl.panic", "host.sysctl.overcommit", "gpu.persistence", "runtime.docker_default",
		"host.disk.volatile", "toolkit.stale_copy", "toolkit.ctk", "net.mtu", "gpu.p2p.iommu", "host.unattended_upgrades", "host.needrestart",
		"host.reboot_required", "leftovers.kubernetes", "leftovers.k3s", "host.disk.fsync", "net.rp_filter", "net.hostname",
		"gpu.driver.gsp", "runtime.cdi", "gpu.pcie.width", "gpu.mig.partitioned", "gpu.nvml.not_started", "host.disk.filesystem", "host.cgroup.v1", "net.iptables_backend",
		"host.sysctl.bridge", "host.sysctl.forwarding", "host.first_boot", "toolkit.version", "gpu.nvml.slow", "host.sysctl.inotify", "gpu.device_nodes", "host.modules",
	}, id)
}

// gpuRoots are the failures without whose cure no container gets a GPU.
func gpuRoots() []string {
	return []string{
		"gpu.present", "gpu.pci.*", "gpu.driver.*", "gpu.nvml.*", "gpu.xid.*", "gpu.device_nodes", "gpu.count", "gpu.fabric", "gpu.fabric.version",
		"gpu.mig.enabled_without_instances", "gpu.ecc.remap_failed", "gpu.compute_mode", "gpu.vgpu.license",
	}
}

// runtimeRoots are those of the container runtime beside the GPU's own.
func runtimeRoots() []string {
	return append(gpuRoots(), "toolkit.installed", "toolkit.ldconfig", "runtime.handler_missing", "runtime.cgroup_driver", "image.cuda_requirement", "runtime.containerd")
}

// controlPlaneRoots are the failures with which nothing in the cluster can be told.
func controlPlaneRoots() []string {
	return []string{
		"k3s.port_conflict", "k3s.service", "k3s.start_failed", "k3s.api", "k3s.certificate_expired", "k3s.token_mismatch", "k3s.datastore", "k3s.snapshotter",
		"net.node_ip_lost", "host.clock", "host.cgroup.memory", "host.cgroup.v1", "host.disk.*", "host.modules", "host.selinux", "host.apparmor", "net.default_route", "net.loopback",
		"net.cidr_overlap", "host.readonly", "host.noexec",
	}
}

// networkRoots are those that cut pods off from the API server and from each other.
func networkRoots() []string {
	return []string{"net.firewall", "net.service_route", "net.dns.loop", "net.dns.coredns", "net.cni", "host.nm_cloud_setup", "net.cidr_overlap", "net.proxy", "net.iptables_backend"}
}

// nodeRoots are those with which no pod can run.
func nodeRoots() []string {
	return append([]string{"node.not_ready", "host.disk.pressure", "node.pressure", "runtime.containerd", "k3s.service", "k3s.api", "net.cni"}, controlPlaneRoots()...)
}

var minorOf = regexp.MustCompile(`v?1\.(\d+)`)

// host is what preflight's checks look at.
func (f *facts) host() preflight.Facts {
	need := preflight.Need{Installed: true}
	if v := f.Command(snapshot.CommandK3s); v.State == snapshot.Present {
		for _, word := range strings.Fields(v.Data) {
			if strings.HasPrefix(word, "v1.") {
				need.K3sVersion = word
				break
			}
		}
	}
	if need.K3sVersion == "" {
		need.K3sVersion = f.serverVersion()
	}
	// The probes name what was asked for.
	var asked []snapshot.DNS
	if state, _ := f.Probe(snapshot.ProbeDNS, &asked); state == snapshot.Present {
		for _, a := range asked {
			need.Hosts = append(need.Hosts, a.Name)
		}
	}
	need.Offline = len(need.Hosts) == 0
	need.PodCIDR, need.ServiceCIDR = f.networks()
	var service snapshot.Service
	if state, _ := f.Probe(snapshot.ProbeService, &service); state == snapshot.Present {
		need.OtherInit = service.Init == "supervised" || service.Init == "openrc"
	}
	return preflight.Facts{Snapshot: f.Snapshot, Need: need}
}
