package doctor

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

var (
	serviceDial  = regexp.MustCompile(`dial tcp (\d+\.\d+\.\d+\.\d+):(\d+): (connect: no route to host|i/o timeout|connect: connection refused|connect: network is unreachable|connect: connection timed out)`)
	lookupFailed = regexp.MustCompile(`lookup (\S+?)(?: on (\S+?))?: (no such host|server misbehaving|i/o timeout|read udp [^\n]*i/o timeout|Temporary failure in name resolution|connection refused)`)
	loopLine     = regexp.MustCompile(`Loop \(([^)]*)\) detected for zone`)
	cniWords     = regexp.MustCompile(`cni plugin not initialized|network plugin is not ready|NetworkPluginNotReady|plugin type="[^"]+" failed \(add\)|failed to find plugin "[^"]+" in path|open /run/flannel/subnet\.env|no IP addresses available in range`)
)

func networkChecks() []Check {
	hostNet := []string{"net.firewall", "host.nm_cloud_setup", "net.cidr_overlap", "net.iptables_backend", "host.modules", "net.default_route", "host.sysctl.forwarding", "host.sysctl.bridge"}
	hostNet = slices.Clip(hostNet)
	return append(rows(
		saying{
			check: Check{
				ID: "net.dns.loop", Layer: LayerNetwork, Title: "Name servers for pods", Rule: "a name server that is not the cluster itself", Reads: "resolv.conf, k3s's --resolv-conf, CoreDNS's log",
				Source: "coredns/coredns#2087; coredns plugin/loop", Fix: "Name the real servers: " + set("k3s.extraArgs=--resolv-conf=/run/systemd/resolve/resolv.conf"),
			},
			ways: []way{{hint: "detected for zone", pattern: loopLine, judge: func(f *facts, _ text, m []string) answer {
				measured := "CoreDNS asks itself (" + m[1] + ")"
				for _, l := range f.File("/etc/resolv.conf").Lines() {
					if name, server, ok := strings.Cut(strings.TrimSpace(l), " "); ok && name == "nameserver" {
						measured += "; nameserver " + strings.TrimSpace(server)
						break
					}
				}
				return answer{measured: measured}
			}}},
		},
		saying{
			check: Check{
				ID: "net.cni", Layer: LayerNetwork, Title: "Network of the pods", Rule: "a CNI plugin that is initialised and has addresses", Reads: "node's conditions, events, k3s's log",
				Source: "k3s-io/k3s#3852, #8024; flannel-io/flannel#2068", Fix: "sudo systemctl restart k3s. What flannel says: sudo journalctl -u k3s --no-pager | grep -i flannel | tail",
				Causes: append(hostNet, "net.node_ip_lost", "host.disk.full"), Repair: "k3s.restart",
			},
			ways: []way{
				{hint: "cni", pattern: cniWords, judge: judgeCNI}, {hint: "network plugin", pattern: cniWords, judge: judgeCNI}, {hint: "failed (add)", pattern: cniWords, judge: judgeCNI},
				{hint: "/run/flannel/subnet.env", pattern: cniWords, judge: judgeCNI}, {hint: "no IP addresses available in range", judge: judgeCNI},
				{hint: "NetworkPluginNotReady", judge: judgeCNI},
			},
			kinds: []string{"event", "status", "k3s"},
		},
	), []Check{
		{
			ID: "net.service_route", Layer: LayerNode, Title: "Addresses of services", Reads: "a connection to the API server's own service, logs of pods", Rule: "services reached from the machine and from pods",
			Source: "k3s-io/k3s#24, #10010, #11472; kubernetes docs, debugging services", Judge: judgeServiceRoute,
			Fix:    "sudo systemctl restart k3s (kube-proxy writes its rules anew). If that does not help, the rules: sudo iptables-save -t nat | grep -c KUBE-SVC",
			Repair: "k3s.restart", Causes: append(hostNet, "k3s.service", "k3s.api", "net.proxy", "net.cni", "net.node_ip_lost"),
		},
		{
			ID: "net.dns.coredns", Also: []string{"net.dns.config"}, Layer: LayerClusterNetwork, Title: "CoreDNS", Reads: "CoreDNS's Deployment, pods, endpoints, Corefile and log", Rule: "at least one CoreDNS that answers",
			Source: "coredns/coredns#2087; kubernetes docs, debugging DNS resolution", Judge: judgeCoreDNS, Repair: "coredns.restart",
			Fix:    "kubectl -n kube-system rollout restart deploy/coredns",
			Causes: append(slices.Clone(hostNet), append(nodeRoots(), "net.service_route", "net.dns.loop", "net.dns.config", "image.pull.*", "operator.webhook.blocking")...),
		},
		{
			ID: "net.dns.upstream", Layer: LayerClusterNetwork, Title: "Names of the outside, from pods", Reads: "the cluster's name server asked for a name inside and one outside", Rule: "both answered",
			Source: "k3s-io/k3s#5671, #2999; defilantech/LLMKube#363", Judge: judgeUpstream,
			Fix:    "Name a server that pods can reach: sudo mkdir -p /etc/llmbox; printf 'nameserver 1.1.1.1\\n' | sudo tee /etc/llmbox/resolv.conf; " + set("k3s.extraArgs=--resolv-conf=/etc/llmbox/resolv.conf"),
			Causes: append(slices.Clone(hostNet), "net.dns.loop", "net.dns.coredns", "net.dns.config", "net.dns.resolve", "net.service_route", "net.default_route"),
		},
		{
			ID: "net.pod_dns", Layer: LayerClusterNetwork, Title: "Pods that can't resolve names", Reads: "logs of pods", Rule: "names resolve inside pods",
			Source: "k3s-io/k3s#5671; NVIDIA/NemoClaw#450", Judge: judgePodDNS, Fix: "kubectl -n kube-system logs deploy/coredns --tail=20",
			Causes: append(slices.Clone(hostNet), "net.dns.loop", "net.dns.coredns", "net.dns.config", "net.dns.upstream", "net.dns.resolve", "net.service_route"),
		},
		{
			ID: "net.ports", Layer: LayerNote, Title: "Ports of the load balancer", Reads: "Services of type LoadBalancer", Rule: "klipper's ports are rules of iptables and listen nowhere",
			Source: "k3s-io/klipper-lb", Judge: func(*facts) []finding.Finding { return nil },
		},
	}...)
}

func judgeCNI(f *facts, t text, m []string) answer {
	if t.kind == "k3s" {
		if down, known := f.k3sDown(); known && !down && f.nodesReady() {
			return answer{ignore: true}
		}
	}
	if len(m) > 0 {
		return answer{measured: oneLine(m[0])}
	}
	return answer{}
}

func (f *facts) nodesReady() bool {
	return len(f.nodes) > 0 && !slices.ContainsFunc(f.nodes, func(n corev1.Node) bool {
		return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue
		})
	})
}

func judgeServiceRoute(f *facts) []finding.Finding {
	var dials []snapshot.Dial
	probed := false
	if state, _ := f.Probe(snapshot.ProbeDials, &dials); state == snapshot.Present {
		for _, d := range dials {
			if d.What != "kubernetes service" {
				continue
			}
			probed = true
			// A rule that sends it to an API server that is down is no fault of the rules.
			if d.Error != "" && f.apiAnswers() {
				return fail(d.Address+" from the machine: "+d.Error, "", atProbe(snapshot.ProbeDials, d.Address, d.Error))
			}
		}
	}
	var who []string
	var evidence []finding.Evidence
	what := ""
	for _, t := range f.texts {
		if t.kind != "log" || !f.speaks(t) || !strings.Contains(t.data, "dial tcp ") {
			continue
		}
		all := serviceDial.FindAllStringSubmatch(t.data, -1)
		for _, m := range slices.Backward(all) {
			if !f.inServices(m[1]) || m[2] != "443" && m[2] != "53" || f.serviceWithout(m[1], m[2]) {
				continue
			}
			if len(who) == 0 {
				what = m[1] + ":" + m[2] + ": " + strings.TrimPrefix(m[3], "connect: ")
			}
			who = append(who, t.namespace+"/"+t.pod)
			evidence = append(evidence, t.evidence(lineAround(t.data, strings.LastIndex(t.data, m[0]))))
			f.explain(t.namespace+"/"+t.pod, "net.service_route")
			break
		}
	}
	if len(who) > 0 {
		return fail(fmt.Sprintf("%s can't reach %s", some(3, who), what), "", evidence[:min(3, len(evidence))]...)
	}
	if probed {
		return well("the API server's service answers")
	}
	return nil
}

// serviceWithout says whether an address is that of a service with nobody behind it;
// that it refuses is then no fault of the network.
func (f *facts) serviceWithout(address, _ string) bool {
	for _, s := range f.services {
		if s.Spec.ClusterIP == address && s.Name != "kubernetes" {
			n, known := f.endpoints(s.Namespace, s.Name)
			return known && n == 0
		}
	}
	return false
}

// endpoints are how many ready endpoints a service has.
func (f *facts) endpoints(namespace, service string) (n int, known bool) {
	if !f.had["endpointslices"] {
		return 0, false
	}
	for _, s := range f.slices {
		if s.Namespace != namespace || s.Labels[discoveryv1.LabelServiceName] != service {
			continue
		}
		for _, e := range s.Endpoints {
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				n++
			}
		}
	}
	return n, true
}

// isDNS says whether a pod is CoreDNS.
func isDNS(p *corev1.Pod) bool {
	return p.Labels["k8s-app"] == "kube-dns" || p.Namespace == "kube-system" && strings.HasPrefix(p.Name, "coredns-")
}

var corefileError = regexp.MustCompile(`(?m)^.*(?:Corefile:\d+ - Error during parsing|plugin/[a-z]+: .*(?:unknown directive|no such file)|Unknown directive|dns server block|unable to parse|Error during parsing: ).*$`)

func judgeCoreDNS(f *facts) []finding.Finding {
	if !f.had["pods"] {
		return f.corefile()
	}
	total, well1 := 0, 0
	why := ""
	for i := range f.pods {
		p := &f.pods[i]
		if !isDNS(p) || p.DeletionTimestamp != nil {
			continue
		}
		total++
		if ready(p) {
			well1++
		} else {
			why = reason(p)
			f.explain(podKey(p), "net.dns.coredns")
		}
	}
	endpoints, known := f.endpoints("kube-system", "kube-dns")
	out := f.corefile()
	switch {
	case well1 > 0 && (!known || endpoints > 0):
		return append(well(count(well1, "pod")+" ready"), nil...)
	case total > 0:
		return append(out, fail("no CoreDNS pod is ready: "+why, "", at("pods", "kube-system/coredns", why))...)
	case f.hasDNS():
		for _, d := range f.deployments {
			if d.Namespace == "kube-system" && d.Name == "coredns" && d.Spec.Replicas != nil && *d.Spec.Replicas == 0 {
				return append(out, fail("CoreDNS is scaled to 0", "kubectl -n kube-system scale deploy/coredns --replicas=1", at("deployments", "kube-system/coredns", "replicas: 0"))...)
			}
		}
		return append(out, fail("there is no CoreDNS pod", "sudo touch /var/lib/rancher/k3s/server/manifests/coredns.yaml (k3s applies it anew)", at("pods", "kube-system", "no pod k8s-app=kube-dns"))...)
	}
	return out
}

// hasDNS says whether the cluster is one that should have a CoreDNS.
func (f *facts) hasDNS() bool {
	return slices.ContainsFunc(f.services, func(s corev1.Service) bool { return s.Namespace == "kube-system" && s.Name == "kube-dns" }) ||
		len(f.deployments) > 0 && slices.ContainsFunc(f.deployments, func(d deployment) bool { return d.Namespace == "kube-system" && d.Name == "coredns" })
}

// corefile finds a configuration that CoreDNS does not accept.
func (f *facts) corefile() []finding.Finding {
	for _, t := range f.texts {
		if t.kind != "log" || !strings.HasPrefix(t.pod, "coredns") || !f.speaks(t) {
			continue
		}
		if all := corefileError.FindAllString(t.data, -1); len(all) > 0 {
			last := all[len(all)-1]
			out := named("net.dns.config", fail(oneLine(last), "kubectl -n kube-system edit configmap coredns (and coredns-custom), then: kubectl -n kube-system rollout restart deploy/coredns", t.evidence(last)))
			out[0].Title, out[0].Required = "Configuration of CoreDNS", "a Corefile that CoreDNS accepts"
			f.explain(t.namespace+"/"+t.pod, "net.dns.config")
			return out
		}
	}
	return nil
}

func judgeUpstream(f *facts) []finding.Finding {
	var answers []snapshot.DNS
	if state, _ := f.Probe(snapshot.ProbeClusterDNS, &answers); state != snapshot.Present || len(answers) == 0 {
		return nil
	}
	var inside, outside *snapshot.DNS
	for i, a := range answers {
		if strings.Contains(a.Name, ".svc.") || strings.HasSuffix(a.Name, ".cluster.local") || strings.HasSuffix(a.Name, ".cluster.local.") {
			inside = &answers[i]
		} else if outside == nil || answers[i].Error == "" {
			outside = &answers[i]
		}
	}
	switch {
	case inside != nil && inside.Error != "":
		out := fail(inside.Name+": "+inside.Error, "", atProbe(snapshot.ProbeClusterDNS, inside.Name, inside.Error))
		out[0].Measured = "the cluster's name server does not answer: " + oneLine(inside.Error)
		return named("net.dns.coredns", out)
	case outside != nil && outside.Error != "":
		return fail("names of the cluster resolve, "+outside.Name+" does not: "+oneLine(outside.Error), "", atProbe(snapshot.ProbeClusterDNS, outside.Name, outside.Error))
	}
	return well("names inside and outside resolve")
}

func judgePodDNS(f *facts) []finding.Finding {
	for _, t := range f.texts {
		if t.kind != "log" || !f.speaks(t) || strings.HasPrefix(t.pod, "coredns") {
			continue
		}
		for _, hint := range []string{"Temporary failure in name resolution", "Could not resolve host", "Name or service not known", "Failed to resolve '", "NameResolutionError", "server misbehaving", "no such host"} {
			i := strings.LastIndex(t.data, hint)
			if i < 0 {
				continue
			}
			line := lineAround(t.data, i)
			if m := lookupFailed.FindStringSubmatch(line); m != nil && f.knownMissing(m[1]) {
				continue
			}
			f.explain(t.namespace+"/"+t.pod, "net.pod_dns")
			return fail(t.namespace+"/"+t.pod+": "+oneLine(stripPrefix(line)), "", t.evidence(line))
		}
	}
	return nil
}

// knownMissing says whether a name of the cluster is not there for want of its service.
func (f *facts) knownMissing(name string) bool {
	parts := strings.Split(strings.TrimSuffix(name, "."), ".")
	if len(parts) < 3 || parts[2] != "svc" || !f.had["services"] {
		return false
	}
	return !slices.ContainsFunc(f.services, func(s corev1.Service) bool { return s.Name == parts[0] && s.Namespace == parts[1] })
}
