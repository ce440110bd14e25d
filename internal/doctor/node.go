package doctor

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func nodeChecks() []Check {
	return []Check{
		{
			ID: "host.disk.pressure", Layer: LayerStorage, Title: "Free space now", Reads: "node's condition and taint, events, file systems", Rule: "at least 15 % free where images and pods are",
			Source: "k3s-io/k3s#1552, #10209; akash-network/support#138", Judge: judgePressure, Repair: "disk.images", Causes: []string{"host.disk.full"},
			Fix: "Remove images that nobody uses: sudo k3s crictl rmi --prune. Then see what takes the rest: sudo du -xh --max-depth=2 /var | sort -h | tail",
		},
		{
			ID: "node.pressure", Layer: LayerNode, Title: "Node short of memory or process ids", Reads: "node's conditions", Rule: "neither MemoryPressure nor PIDPressure",
			Source: "kubernetes docs, node-pressure eviction", Judge: judgeOtherPressure, Causes: []string{"host.oom"},
			Fix: "See who takes it: ps aux --sort=-rss | head. Give the model less memory or take a larger machine",
		},
		{
			ID: "node.not_ready", Layer: LayerNode, Title: "Node", Reads: "node's condition Ready", Rule: "Ready",
			Source: "kubernetes docs, nodes", Judge: judgeNodeReady, Fix: "sudo systemctl restart k3s. Why: sudo journalctl -u k3s -n 100 --no-pager",
			Causes: append([]string{"runtime.containerd", "net.cni", "runtime.config", "k3s.slow_datastore", "host.oom", "node.pressure"}, controlPlaneRoots()...),
		},
		{
			ID: "node.cordoned", Layer: LayerNode, Title: "Node that takes no pods", Reads: "spec.unschedulable and taints of the node", Rule: "no cordon and no taint that the box does not tolerate",
			Source: "kubernetes docs, taints and tolerations", Judge: judgeCordon, Repair: "node.uncordon", Fix: "kubectl uncordon NODE",
			Causes: []string{"node.not_ready", "host.disk.pressure", "node.pressure", "net.cni", "runtime.containerd"},
		},
		{
			ID: "net.node_ip_lost", Layer: LayerNetwork, Title: "Address of the node is gone", Reads: "node's InternalIP, the machine's interfaces, k3s's node-ip and log", Rule: "the node's address on an interface",
			Source: "k3s-io/k3s#1144, #5466", Judge: judgeNodeIP, Repair: "k3s.restart",
			Fix: "Let k3s find it anew: sudo llmbox install. It restarts k3s with the address that the machine has now",
		},
		{
			ID: "node.name_changed", Layer: LayerNode, Title: "Name of the node", Reads: "nodes, the machine's name", Rule: "one node, and the one that the volumes are on",
			Source: "k3s-io/k3s#2347; kubernetes docs, local volumes", Judge: judgeNodeName,
			Fix: "Give the machine its name back: sudo hostnamectl set-hostname NAME && sudo systemctl restart k3s",
		},
		{
			ID: "node.version", Layer: LayerNote, Title: "Version of Kubernetes", Reads: "the API server and the nodes", Rule: "what llmbox was built for", Source: "kubernetes version skew policy",
			Judge: func(f *facts) []finding.Finding {
				if v := f.serverVersion(); v != "" {
					return well(v)
				}
				return nil
			},
		},
	}
}

// taintPrefix is what taints by the node's own conditions begin with.
const taintPrefix = "node.kubernetes.io/"

func judgePressure(f *facts) []finding.Finding {
	var measured []string
	var evidence []finding.Evidence
	for _, n := range f.nodes {
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeDiskPressure && c.Status == corev1.ConditionTrue {
				measured = append(measured, n.Name+": DiskPressure, "+oneLine(c.Message))
				evidence = append(evidence, at("nodes", n.Name, "DiskPressure=True"))
			}
		}
		for _, t := range n.Spec.Taints {
			if t.Key == taintPrefix+"disk-pressure" && len(measured) == 0 {
				measured = append(measured, n.Name+" has the taint "+t.Key)
				evidence = append(evidence, at("nodes", n.Name, t.Key))
			}
		}
	}
	for i := range f.events {
		e := &f.events[i]
		if !f.fresh(e) || len(evidence) > 3 {
			continue
		}
		switch {
		case e.Reason == "FreeDiskSpaceFailed", e.Reason == "ImageGCFailed", e.Reason == "EvictionThresholdMet" && strings.Contains(e.Message, "storage"),
			e.Reason == "Evicted" && (strings.Contains(e.Message, "ephemeral-storage") || strings.Contains(e.Message, "DiskPressure") || strings.Contains(e.Message, "imagefs") || strings.Contains(e.Message, "nodefs") || strings.Contains(e.Message, "inodes")):
			evidence = append(evidence, at("events", e.InvolvedObject.Name, e.Message))
			// What happened an hour ago on a disk that has room again is history.
			if len(measured) == 0 && (len(f.nodes) == 0 || e.Reason == "FreeDiskSpaceFailed") {
				measured = append(measured, e.Reason+": "+oneLine(e.Message))
			}
			if e.Reason == "Evicted" {
				f.explain(cmp.Or(e.InvolvedObject.Namespace, e.Namespace)+"/"+e.InvolvedObject.Name, "host.disk.pressure")
			}
		}
	}
	if len(measured) == 0 {
		return nil
	}
	fix := ""
	var disks []snapshot.Disk
	if state, _ := f.Probe(snapshot.ProbeDisks, &disks); state == snapshot.Present {
		measured = append(measured, f.diskSaid(disks))
		if roomy := roomier(disks); roomy != "" {
			fix = "Remove images that nobody uses: sudo k3s crictl rmi --prune. " + roomy + " has room: a box with its data there is " + set("paths.data="+strings.TrimSuffix(roomy, "/")+"/llmbox", "k3s.dataDir="+strings.TrimSuffix(roomy, "/")+"/k3s") + " on a machine without a box"
		}
	}
	return fail(strings.Join(slices.DeleteFunc(measured, func(s string) bool { return s == "" }), "; "), fix, evidence...)
}

// withoutPressure says whether every node was heard to have no pressure of its disks.
func (f *facts) withoutPressure() bool {
	heard := 0
	for _, n := range f.nodes {
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeDiskPressure {
				if c.Status != corev1.ConditionFalse {
					return false
				}
				heard++
			}
		}
	}
	return heard > 0
}

func (f *facts) diskSaid(disks []snapshot.Disk) string {
	for _, d := range disks {
		if strings.HasPrefix(d.Path, "/var/lib/rancher") && d.TotalBytes > 0 {
			return fmt.Sprintf("%.0f of %.0f GiB free on %s", float64(d.AvailableBytes)/(1<<30), float64(d.TotalBytes)/(1<<30), d.MountPoint)
		}
	}
	return ""
}

// roomier is the mount point with the most room of its own, where there is one.
func roomier(disks []snapshot.Disk) string {
	best, at := uint64(100<<30), ""
	for _, d := range disks {
		if d.MountPoint != "/" && d.AvailableBytes > best && !strings.HasPrefix(d.MountPoint, "/var/lib") {
			best, at = d.AvailableBytes, d.MountPoint
		}
	}
	return at
}

func judgeOtherPressure(f *facts) []finding.Finding {
	for _, n := range f.nodes {
		for _, c := range n.Status.Conditions {
			if (c.Type == corev1.NodeMemoryPressure || c.Type == corev1.NodePIDPressure) && c.Status == corev1.ConditionTrue {
				return fail(n.Name+": "+string(c.Type)+", "+oneLine(c.Message), "", at("nodes", n.Name, string(c.Type)))
			}
		}
	}
	return nil
}

func judgeNodeReady(f *facts) []finding.Finding {
	if len(f.nodes) == 0 {
		if f.had["nodes"] && f.apiAnswers() {
			return fail("the API server knows no node: the kubelet has not registered", "", at("nodes", "", "no items"))
		}
		return nil
	}
	var down []string
	var evidence []finding.Evidence
	judged := 0
	for _, n := range f.nodes {
		for _, c := range n.Status.Conditions {
			if c.Type != corev1.NodeReady {
				continue
			}
			judged++
			if c.Status == corev1.ConditionTrue {
				// The API server says what it last heard; a kubelet that is gone is heard no more.
				continue
			}
			down = append(down, n.Name+": "+cmp.Or(oneLine(c.Message), c.Reason))
			evidence = append(evidence, at("nodes", n.Name, c.Reason+": "+c.Message))
		}
	}
	switch {
	case len(down) > 0:
		return fail(some(3, down), "", evidence[:min(3, len(evidence))]...)
	case judged > 0:
		return well(count(judged, "node") + " ready")
	}
	return nil
}

func judgeCordon(f *facts) []finding.Finding {
	for _, n := range f.nodes {
		if n.Spec.Unschedulable {
			return fail(n.Name+" is cordoned", "kubectl uncordon "+n.Name, at("nodes", n.Name, "spec.unschedulable: true"))
		}
	}
	// A taint matters where a pod waits for it.
	for _, n := range f.nodes {
		for _, t := range n.Spec.Taints {
			if t.Effect == corev1.TaintEffectPreferNoSchedule || strings.HasPrefix(t.Key, taintPrefix) || t.Key == "nvidia.com/gpu" || len(f.nodes) > 1 {
				continue
			}
			if waits := f.waitsForTaint(t.Key); waits != "" {
				return fail(fmt.Sprintf("%s has the taint %s, which keeps %s away", n.Name, t.ToString(), waits), "kubectl taint node "+n.Name+" "+t.Key+"-", at("nodes", n.Name, t.ToString()))
			}
		}
	}
	return nil
}

func (f *facts) waitsForTaint(key string) string {
	for i := range f.pods {
		p := &f.pods[i]
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && strings.Contains(c.Message, key) {
				f.explain(podKey(p), "node.cordoned")
				return podKey(p)
			}
		}
	}
	return ""
}

func judgeNodeIP(f *facts) []finding.Finding {
	var interfaces []snapshot.Interface
	if state, _ := f.Probe(snapshot.ProbeInterfaces, &interfaces); state != snapshot.Present || len(interfaces) == 0 {
		return nil
	}
	var have []netip.Addr
	for _, i := range interfaces {
		for _, a := range i.Addresses {
			if p, err := netip.ParsePrefix(a); err == nil {
				have = append(have, p.Addr())
			}
		}
	}
	check := func(address, from string, evidence finding.Evidence) []finding.Finding {
		a, err := netip.ParseAddr(strings.TrimSpace(address))
		if err != nil || slices.Contains(have, a) {
			return nil
		}
		return fail(fmt.Sprintf("%s says %s, which no interface of the machine has", from, a), "", evidence)
	}
	config := f.k3sConfig()
	if v, ok := config["node-ip"].(string); ok {
		for one := range strings.SplitSeq(v, ",") {
			if out := check(one, "k3s's node-ip", finding.Evidence{File: "host/etc/rancher/k3s/config.yaml", Field: "node-ip", Line: one}); out != nil {
				return out
			}
		}
	}
	// Only one's own node is on this machine.
	hostname := f.hostname()
	for _, n := range f.nodes {
		if len(f.nodes) > 1 && n.Name != hostname || hostname != "" && n.Name != hostname && len(f.nodes) == 1 && !f.localCluster() {
			continue
		}
		for _, a := range n.Status.Addresses {
			if a.Type != corev1.NodeInternalIP {
				continue
			}
			if out := check(a.Address, "node "+n.Name, at("nodes", n.Name, a.Address)); out != nil {
				return out
			}
		}
	}
	if len(f.nodes) > 0 {
		return well("on an interface")
	}
	return nil
}

func (f *facts) hostname() string {
	var s snapshot.System
	if state, _ := f.Probe(snapshot.ProbeSystem, &s); state == snapshot.Present && s.Hostname != "" {
		return s.Hostname
	}
	return f.File("/etc/hostname").Trimmed()
}

// localCluster says whether the API server that was asked is this machine's.
func (f *facts) localCluster() bool {
	var api snapshot.APIProbe
	if state, _ := f.Probe(snapshot.ProbeAPI, &api); state == snapshot.Present {
		return strings.Contains(api.Server, "127.0.0.1") || strings.Contains(api.Server, "localhost") || strings.Contains(api.Server, "[::1]")
	}
	return false
}

// judgeNodeName finds volumes that are pinned to a node that is not there any more.
func judgeNodeName(f *facts) []finding.Finding {
	if len(f.nodes) == 0 {
		return nil
	}
	known := func(name string) bool {
		return slices.ContainsFunc(f.nodes, func(n corev1.Node) bool { return n.Name == name || n.Labels[corev1.LabelHostname] == name })
	}
	for _, v := range f.volumes {
		if v.Spec.NodeAffinity == nil || v.Spec.NodeAffinity.Required == nil || v.Status.Phase != corev1.VolumeBound {
			continue
		}
		for _, term := range v.Spec.NodeAffinity.Required.NodeSelectorTerms {
			for _, e := range term.MatchExpressions {
				if e.Key == corev1.LabelHostname && len(e.Values) == 1 && !known(e.Values[0]) {
					return fail(fmt.Sprintf("volume %s is pinned to node %s, which is not there; there is %s", v.Name, e.Values[0], f.nodes[0].Name),
						"Give the machine its name back: sudo hostnamectl set-hostname "+e.Values[0]+" && sudo systemctl restart k3s", at("persistentvolumes", v.Name, e.Values[0]))
				}
			}
		}
	}
	return nil
}
