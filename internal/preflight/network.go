package preflight

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// The networks that k3s takes unless told otherwise
// (docs.k3s.io/cli/server, cluster-cidr and service-cidr).
const (
	defaultPodCIDR     = "10.42.0.0/16"
	defaultServiceCIDR = "10.43.0.0/16"
)

func (f Facts) podCIDR() string     { return cmp.Or(f.Need.PodCIDR, defaultPodCIDR) }
func (f Facts) serviceCIDR() string { return cmp.Or(f.Need.ServiceCIDR, defaultServiceCIDR) }

func networkChecks() []Check {
	return []Check{
		{
			ID: "net.default_route", Title: "Default route", Required: "a default route over IPv4",
			Source: "k3s-io/k3s#1144, #5466, #11640", Judge: judgeRoute,
		},
		{
			ID: "net.loopback", Title: "Loopback interface", Required: "lo up with 127.0.0.1",
			Source: "k3s-io/k3s#5973, #7344", Judge: judgeLoopback,
		},
		{
			ID: "net.hostname", Title: "Name of the machine", Required: "lower-case letters, digits and dashes, at most 63",
			Source: "RFC 1123; k3s-io/k3s#1144; kubernetes.io/docs/concepts/overview/working-with-objects/names", Judge: judgeHostname,
		},
		{
			ID: "k3s.port_conflict", Title: "Ports of k3s", Required: "6443, 6444, 10010, 10248-10250, 10256-10259 and 8472/udp free",
			Source: "k3s-io/k3s#1011, #5973; canonical/microk8s#618; docs.k3s.io/installation/requirements", Judge: judgeK3sPorts,
		},
		{
			ID: "net.port_conflict", Title: "Ports of the box", Required: "the ports that llmbox will listen on are free",
			Source: "prometheus-community/helm-charts#2248; NVIDIA/dcgm-exporter#61; NVIDIA/gpu-operator#414", Judge: judgePorts,
		},
		{
			ID: "net.cidr_overlap", Title: "Networks of the cluster", Required: "no local network within the pods' and services' networks",
			Source: "k3s-io/k3s#179, #588, #3451", Judge: judgeOverlap,
		},
		{
			ID: "net.firewall", Title: "Firewall of the machine", Required: "traffic of pods and services let through",
			Source: "k3s-io/k3s#24, #1019, #10010, #11472", Judge: judgeFirewall,
		},
		{
			ID: "net.dns.loop", Title: "Name servers for pods", Required: "a name server that is not the machine itself",
			Source: "coredns/coredns#2087; microsoft/pai#5382", Judge: judgeDNSLoop,
		},
		{
			ID: "net.dns.resolve", Title: "Names of the outside", Required: "the names of the hosts to download from resolve", Network: true,
			Source: "k3s-io/k3s#5671; defilantech/LLMKube#363", Judge: judgeDNS,
			Causes: []string{"net.default_route"},
		},
		{
			ID: "net.hosts", Title: "Hosts to download from", Required: "every host answers over HTTPS", Network: true,
			Source: "k3s-io/k3s#10926; huggingface/transformers#43023", Judge: judgeHosts,
			Causes: []string{"net.default_route", "net.dns.resolve", "net.tls_interception", "host.clock"},
		},
		{
			ID: "net.tls_interception", Title: "Certificates on the way", Required: "certificates of public authorities", Network: true,
			Source: "k3d-io/k3d#1246; kubernetes/minikube#3613", Judge: judgeInterception,
			Causes: []string{"host.clock"},
		},
		{
			ID: "net.mtu", Title: "Packet size", Required: fmt.Sprintf("MTU of at least %d", smallestMTU),
			Source: "flannel-io/flannel Documentation/backends.md; RFC 8200", Judge: judgeMTU,
		},
		{
			ID: "net.proxy", Title: "Proxy", Required: "NO_PROXY holds the cluster's networks, .svc, .cluster.local and 127.0.0.0/8",
			Source: "k3s-io/helm-controller#252; k3s-io/k3s#194, #2176, #5712", Judge: judgeProxy,
		},
		{
			ID: "net.rp_filter", Title: "Reverse path filter", Required: "loose or off where several networks lead out",
			Source: "linux Documentation/networking/ip-sysctl.rst; RFC 3704", Judge: judgeRPFilter,
		},
	}
}

// route is one line of /proc/net/route.
type route struct {
	device  string
	network netip.Prefix
	metric  string
}

// routes reads the kernel's IPv4 routes.
func (f Facts) routes() ([]route, snapshot.Text) {
	t := f.File("/proc/net/route")
	var out []route
	for i, line := range t.Lines() {
		fields := strings.Fields(line)
		if i == 0 || len(fields) < 8 {
			continue
		}
		destination, ok := littleEndian(fields[1])
		mask, okMask := littleEndian(fields[7])
		if !ok || !okMask {
			continue
		}
		bits := 0
		for _, b := range mask.As4() {
			for ; b != 0; b <<= 1 {
				bits++
			}
		}
		out = append(out, route{device: fields[0], network: netip.PrefixFrom(destination, bits), metric: fields[6]})
	}
	return out, t
}

// littleEndian reads an address as /proc/net/route writes it.
func littleEndian(text string) (netip.Addr, bool) {
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw) != 4 {
		return netip.Addr{}, false
	}
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], binary.LittleEndian.Uint32(raw))
	return netip.AddrFrom4(b), true
}

func (f Facts) interfaces() ([]snapshot.Interface, []finding.Finding) {
	var out []snapshot.Interface
	if state, why := f.Probe(snapshot.ProbeInterfaces, &out); state != snapshot.Present {
		return nil, unknown("the network interfaces", why)
	}
	return out, nil
}

func judgeRoute(f Facts) []finding.Finding {
	routes, t := f.routes()
	if t.State != snapshot.Present {
		return unknownText(t)
	}
	for _, r := range routes {
		if r.network.Bits() == 0 {
			return well("over "+r.device, at(t, ""))
		}
	}
	v6 := f.File("/proc/net/ipv6_route")
	for _, line := range v6.Lines() {
		fields := strings.Fields(line)
		if len(fields) == 10 && fields[0] == strings.Repeat("0", 32) && fields[1] == "00" && fields[9] != "lo" {
			return fail("only over IPv6 ("+fields[9]+")",
				"Give the machine an IPv4 address with a default route; a private one is enough", at(v6, line))
		}
	}
	return fail("none: k3s finds no address for itself",
		"sudo ip route add default via GATEWAY dev INTERFACE. On a machine without a network: sudo ip link add dummy0 type dummy && sudo ip addr add 203.0.113.254/31 dev dummy0 && sudo ip link set dummy0 up && sudo ip route add default via 203.0.113.255 dev dummy0 metric 1000",
		at(t, "no line with destination 00000000"))
}

func judgeLoopback(f Facts) []finding.Finding {
	interfaces, why := f.interfaces()
	if why != nil {
		return why
	}
	for _, i := range interfaces {
		if i.Name != "lo" {
			continue
		}
		if i.Up && slices.ContainsFunc(i.Addresses, func(a string) bool { return strings.HasPrefix(a, "127.0.0.1/") }) {
			return well("up")
		}
		return fail("lo is down or has no 127.0.0.1", "sudo ip link set lo up && sudo ip addr add 127.0.0.1/8 dev lo", atProbe(snapshot.ProbeInterfaces, "lo"))
	}
	return fail("there is no lo", "sudo ip link set lo up", atProbe(snapshot.ProbeInterfaces, ""))
}

var rfc1123 = regexp.MustCompile(`^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*$`)

func judgeHostname(f Facts) []finding.Finding {
	name := ""
	if s, ok := f.system(); ok {
		name = s.Hostname
	}
	name = cmp.Or(name, f.File("/etc/hostname").Trimmed())
	if name == "" {
		return unknown("the machine's name", "")
	}
	evidence := atProbe(snapshot.ProbeSystem, "hostname")
	// k3s turns upper case into lower case itself.
	lower := strings.ToLower(name)
	fix := "sudo hostnamectl set-hostname " + cleanName(lower) + ". Or leave it and name the node: " + installSet("k3s.nodeName="+cleanName(lower))
	switch {
	case lower == "localhost" || strings.HasPrefix(lower, "localhost."):
		return warn(name+": the node would be called so for ever", "sudo hostnamectl set-hostname llmbox. Or leave it and name the node: "+installSet("k3s.nodeName=llmbox"), evidence)
	case len(lower) > 253 || !rfc1123.MatchString(lower) || len(strings.Split(lower, ".")[0]) > 63:
		return fail(strconv.Quote(name)+" is no name that a node may have", fix, evidence)
	}
	return well(name)
}

func cleanName(name string) string {
	out := strings.Trim(regexp.MustCompile(`[^a-z0-9-]+`).ReplaceAllString(name, "-"), "-")
	return cmp.Or(out[:min(len(out), 63)], "llmbox")
}

// k3sPorts are what k3s itself listens on (docs.k3s.io/installation/requirements).
func k3sPorts() []PortNeed {
	var ports []PortNeed
	add := func(what string, numbers ...int) {
		for _, n := range numbers {
			ports = append(ports, PortNeed{Port: n, Protocol: "tcp", What: what})
		}
	}
	add("the API server", 6443, 6444)
	add("containerd", 10010)
	add("the kubelet", 10248, 10249, 10250)
	add("the controllers", 10256, 10257, 10258, 10259)
	return append(ports, PortNeed{Port: 8472, Protocol: "udp", What: "the network between pods"})
}

// conflicts are the listeners on the ports, other than the box's own.
func (f Facts) conflicts(wanted []PortNeed) (held []string, holders []snapshot.Listener, why []finding.Finding) {
	var listeners []snapshot.Listener
	if state, reason := f.Probe(snapshot.ProbeListeners, &listeners); state != snapshot.Present {
		return nil, nil, unknown("who listens on which port", reason)
	}
	for _, w := range wanted {
		for _, l := range listeners {
			if l.Port != w.Port || l.Protocol != cmp.Or(w.Protocol, "tcp") || f.own(l) {
				continue
			}
			who := l.Process
			if who != "" && l.PID != 0 {
				who += " pid " + strconv.Itoa(l.PID)
			}
			port := strconv.Itoa(w.Port)
			if l.Protocol == "udp" {
				port += "/udp"
			}
			text := fmt.Sprintf("%s held by %s", port, cmp.Or(who, "another program"))
			if !slices.Contains(held, text) {
				held, holders = append(held, text), append(holders, l)
			}
			break
		}
	}
	return held, holders, nil
}

// own says whether a listener belongs to a box of ours that is here already.
func (f Facts) own(l snapshot.Listener) bool {
	if !f.Need.Installed {
		return false
	}
	// Whatever k3s or its pods started is the box's, by whatever name.
	if slices.ContainsFunc(l.Parents, func(name string) bool {
		return strings.HasPrefix(name, "k3s") || strings.HasPrefix(name, "containerd-shim")
	}) {
		return true
	}
	return l.Process == "" || strings.HasPrefix(l.Process, "k3s") || slices.Contains([]string{"containerd", "node_exporter", "dcgm-exporter", "llmbox", "envoy"}, l.Process)
}

func judgeK3sPorts(f Facts) []finding.Finding {
	held, holders, why := f.conflicts(k3sPorts())
	if why != nil {
		return why
	}
	if len(held) == 0 {
		return well("free")
	}
	measured := some(4, held)
	var evidence []finding.Evidence
	for i, l := range holders {
		if i < 3 {
			evidence = append(evidence, finding.Evidence{File: "probes/" + snapshot.ProbeListeners + ".json", Line: fmt.Sprintf("%s:%d %s pid %d", l.Address, l.Port, l.Process, l.PID)})
		}
	}
	fix := "Stop what holds them, which this lists: sudo ss -lntup"
	if others := f.otherKubernetes(); len(others) > 0 {
		measured += " (" + others[0].name + ")"
		fix = others[0].remove
		if strings.HasPrefix(fix, "sudo ") {
			fix = "Remove the other Kubernetes if nobody needs it: " + fix
		}
		fix += ". Or install into it: llmbox install --kubeconfig FILE"
	} else if f.k3sRuns() {
		measured += " (a k3s that llmbox did not install)"
		fix = "Install into it: sudo llmbox install --kubeconfig /etc/rancher/k3s/k3s.yaml. Or, if nobody needs it: " + f.k3sWipe()
	}
	return fail(measured, fix, evidence...)
}

func judgePorts(f Facts) []finding.Finding {
	var wanted []PortNeed
	k3s := k3sPorts()
	for _, p := range f.Need.Ports {
		if !slices.ContainsFunc(k3s, func(k PortNeed) bool { return k.Port == p.Port && k.Protocol == cmp.Or(p.Protocol, "tcp") }) {
			wanted = append(wanted, p)
		}
	}
	if len(wanted) == 0 {
		return notApplicable("no plan says which ports are wanted")
	}
	held, holders, why := f.conflicts(wanted)
	if why != nil {
		return why
	}
	if len(held) == 0 {
		return well("free")
	}
	for i, l := range holders {
		if what := whatFor(wanted, l.Port); what != "" {
			held[i] += " (wanted for " + what + ")"
		}
	}
	fix := "Stop that program (sudo ss -lntup shows it)"
	if strings.HasPrefix(holders[0].Process, "docker-proxy") {
		fix = "Stop the container of Docker that has this port (sudo docker ps shows it)"
	}
	switch what := whatFor(wanted, holders[0].Port); {
	case what == gatewayWhat:
		fix += ", or take another port: sudo llmbox install --port " + strconv.Itoa(f.freePort(holders[0].Port))
	case what != "":
		fix += ", or leave " + what + " out: sudo llmbox install --without " + what
	}
	return fail(some(4, held), fix,
		finding.Evidence{File: "probes/" + snapshot.ProbeListeners + ".json", Line: fmt.Sprintf("%s:%d %s", holders[0].Address, holders[0].Port, holders[0].Process)})
}

// gatewayWhat is what the plan calls the gateway's own port, the one that a person may
// choose.
const gatewayWhat = "the gateway"

func whatFor(wanted []PortNeed, port int) string {
	for _, w := range wanted {
		if w.Port == port {
			return w.What
		}
	}
	return ""
}

// freePort is the next port that nobody listens on.
func (f Facts) freePort(after int) int {
	var listeners []snapshot.Listener
	// Without the list of listeners nobody would ask.
	_, _ = f.Probe(snapshot.ProbeListeners, &listeners)
	port := after + 1
	for slices.ContainsFunc(listeners, func(l snapshot.Listener) bool { return l.Port == port }) {
		port++
	}
	return port
}

// clusterInterface says whether k3s or its network made an interface.
func clusterInterface(name string) bool {
	return name == "cni0" || strings.HasPrefix(name, "flannel") || strings.HasPrefix(name, "veth") || name == "kube-ipvs0"
}

func judgeOverlap(f Facts) []finding.Finding {
	pods, okPods := prefixOf(f.podCIDR())
	services, okServices := prefixOf(f.serviceCIDR())
	if !okPods || !okServices {
		return unknown("the cluster's networks", fmt.Sprintf("%q, %q", f.podCIDR(), f.serviceCIDR()))
	}
	routes, t := f.routes()
	interfaces, why := f.interfaces()
	if t.State != snapshot.Present && why != nil {
		return why
	}
	var hits []string
	var evidence []finding.Evidence
	hit := func(p netip.Prefix, device string, e finding.Evidence) {
		if clusterInterface(device) {
			return
		}
		for _, ours := range []netip.Prefix{pods, services} {
			if p.Bits() > 0 && ours.Overlaps(p) {
				text := p.Masked().String() + " on " + device + " lies in " + ours.String()
				if !slices.Contains(hits, text) {
					hits, evidence = append(hits, text), append(evidence, e)
				}
			}
		}
	}
	for _, r := range routes {
		if f.Need.Installed && pods.Contains(r.network.Addr()) && r.network.Bits() >= pods.Bits() {
			continue // the way to the pods of another node of this box
		}
		hit(r.network, r.device, at(t, r.device+" "+r.network.String()))
	}
	for _, i := range interfaces {
		for _, a := range i.Addresses {
			if p, ok := prefixOf(a); ok {
				hit(p, i.Name, atProbe(snapshot.ProbeInterfaces, i.Name+" "+a))
			}
		}
	}
	resolv := f.File("/etc/resolv.conf")
	for _, server := range nameservers(resolv.Data) {
		if a, err := netip.ParseAddr(server); err == nil && (pods.Contains(a) || services.Contains(a)) {
			hits, evidence = append(hits, "the name server "+server+" lies in the cluster's networks"), append(evidence, at(resolv, "nameserver "+server))
		}
	}
	if len(hits) == 0 {
		return well(pods.String() + " and " + services.String() + " are free")
	}
	fix := "Choose other networks before the install (they can't change later)"
	if a, b, ok := freeNetworks(routes, interfaces); ok {
		fix += ": " + installSet("network.clusterCIDR="+a.String(), "network.serviceCIDR="+b.String())
	}
	return fail(some(3, hits), fix, evidence...)
}

// freeNetworks proposes two /16 that nothing local uses.
func freeNetworks(routes []route, interfaces []snapshot.Interface) (a, b netip.Prefix, ok bool) {
	var used []netip.Prefix
	for _, r := range routes {
		if r.network.Bits() > 0 {
			used = append(used, r.network)
		}
	}
	for _, i := range interfaces {
		for _, address := range i.Addresses {
			if p, valid := prefixOf(address); valid {
				used = append(used, p)
			}
		}
	}
	var free []netip.Prefix
	for _, candidate := range []string{"10.52.0.0/16", "10.53.0.0/16", "10.142.0.0/16", "10.143.0.0/16", "172.26.0.0/16", "172.27.0.0/16", "192.168.0.0/17", "192.168.128.0/17"} {
		p, valid := prefixOf(candidate)
		if valid && !slices.ContainsFunc(used, p.Overlaps) {
			free = append(free, p)
		}
	}
	if len(free) < 2 {
		return a, b, false
	}
	return free[0], free[1], true
}

func nameservers(resolv string) []string {
	var out []string
	for line := range strings.Lines(resolv) {
		fields := strings.Fields(line)
		if len(fields) >= 2 && fields[0] == "nameserver" {
			out = append(out, fields[1])
		}
	}
	return out
}

// forPods says whether pods reach a name server by its address: not one of the
// machine itself.
func forPods(server string) bool {
	a, err := netip.ParseAddr(server)
	return err == nil && !a.IsLoopback() && !a.IsUnspecified() && !a.IsMulticast()
}

// k3sTakes says whether k3s hands a list of name servers on to pods: when each is an
// ordinary address (k3s-io/k3s pkg/agent/config/config.go, isValidResolvConf).
func k3sTakes(servers []string) bool {
	return len(servers) > 0 && !slices.ContainsFunc(servers, func(s string) bool {
		a, err := netip.ParseAddr(s)
		return err != nil || a.Zone() != "" || !a.IsGlobalUnicast()
	})
}

func judgeDNSLoop(f Facts) []finding.Finding {
	t := f.File("/etc/resolv.conf")
	if t.State != snapshot.Present {
		return unknownText(t)
	}
	servers := nameservers(t.Data)
	if k3sTakes(servers) {
		return well(strings.Join(servers, ", "), at(t, ""))
	}
	// k3s takes systemd-resolved's own list when the system's names only the machine.
	resolved := f.File("/run/systemd/resolve/resolv.conf")
	if resolved.State == snapshot.Unreadable {
		return unknownText(resolved)
	}
	behind := nameservers(resolved.Data)
	if k3sTakes(behind) {
		return well(strings.Join(behind, ", ")+", from systemd-resolved", at(resolved, ""))
	}
	// Else it gives pods 8.8.8.8, which serves where that is reached.
	for _, list := range [][]string{behind, servers} {
		if usable := slices.DeleteFunc(slices.Clone(list), func(s string) bool { return !forPods(s) }); len(usable) > 0 {
			return note(strings.Join(list, ", ")+": k3s gives pods 8.8.8.8 instead, for it takes no list with a loopback or link-local address in it. "+
				"Where 8.8.8.8 is not reached, name a server in a file and: "+installSet("k3s.extraArgs=--resolv-conf=FILE"), at(t, ""))
		}
	}
	if len(servers) == 0 {
		return warn("/etc/resolv.conf names no server", "Name one, such as the cloud's own or 1.1.1.1: printf 'nameserver 1.1.1.1\\n' | sudo tee -a /etc/resolv.conf", at(t, ""))
	}
	fix := "name a server that pods can reach: sudo mkdir -p /etc/llmbox; printf 'nameserver 1.1.1.1\\n' | sudo tee /etc/llmbox/resolv.conf; " +
		installSet("k3s.extraArgs=--resolv-conf=/etc/llmbox/resolv.conf")
	if slices.Contains(servers, "127.0.0.53") {
		fix = "sudo systemctl restart systemd-resolved, so that /run/systemd/resolve/resolv.conf names the real servers (k3s: --resolv-conf /run/systemd/resolve/resolv.conf). If it names none, " + fix
	} else {
		fix = strings.ToUpper(fix[:1]) + fix[1:]
	}
	return fail("nameserver "+strings.Join(servers, ", ")+": pods would ask themselves", fix, at(t, "nameserver "+servers[0]))
}

func judgeDNS(f Facts) []finding.Finding {
	if len(f.Need.Hosts) == 0 {
		return notApplicable("nothing is to be downloaded")
	}
	var answers []snapshot.DNS
	if state, why := f.Probe(snapshot.ProbeDNS, &answers); state != snapshot.Present {
		return unknown("names", why)
	}
	if len(answers) == 0 {
		return unknown("names", "none was asked for")
	}
	var bad []string
	first := ""
	for _, a := range answers {
		if a.Error != "" || len(a.Addresses) == 0 {
			first = cmp.Or(first, a.Name)
			// Go puts the name and the server before the reason.
			reason := a.Error[strings.LastIndex(a.Error, ": ")+1:]
			bad = append(bad, a.Name+" ("+cmp.Or(strings.TrimSpace(reason), "no address")+")")
		}
	}
	if len(bad) == 0 {
		return well(count(len(answers), "name") + " resolved")
	}
	return fail(some(3, bad), "Check /etc/resolv.conf and that the name server lets these names through: getent hosts "+first, atProbe(snapshot.ProbeDNS, "error"))
}

func (f Facts) https() ([]snapshot.HTTPS, []finding.Finding) {
	if len(f.Need.Hosts) == 0 {
		return nil, notApplicable("nothing is to be downloaded")
	}
	var answers []snapshot.HTTPS
	if state, why := f.Probe(snapshot.ProbeHTTPS, &answers); state != snapshot.Present {
		return nil, unknown("the hosts to download from", why)
	}
	if len(answers) == 0 {
		return nil, unknown("the hosts to download from", "none was asked")
	}
	return answers, nil
}

func judgeHosts(f Facts) []finding.Finding {
	answers, why := f.https()
	if why != nil {
		return why
	}
	var bad, unasked []string
	first := ""
	for _, host := range f.Need.Hosts {
		if !slices.ContainsFunc(answers, func(a snapshot.HTTPS) bool { return hostOf(a.URL) == hostOf(host) }) {
			unasked = append(unasked, host)
		}
	}
	for _, a := range answers {
		if !slices.ContainsFunc(f.Need.Hosts, func(host string) bool { return hostOf(host) == hostOf(a.URL) }) {
			continue
		}
		// Any answer over HTTP shows that the host is reached: registries answer 401
		// to a question without a token. A proxy that refuses does not count.
		was := len(bad)
		switch {
		case a.Stage != "" || a.Status == 0:
			bad = append(bad, fmt.Sprintf("%s (%s: %s)", a.URL, cmp.Or(a.Stage, "no answer"), cmp.Or(a.Error, "no answer")))
		case a.Status == 407 || a.Status == 403 && a.Proxy != "":
			bad = append(bad, fmt.Sprintf("%s (the proxy %s refused: %d)", a.URL, cmp.Or(a.Proxy, "on the way"), a.Status))
		}
		if len(bad) > was {
			first = cmp.Or(first, a.URL)
		}
	}
	switch {
	case len(bad) == 0 && len(unasked) > 0:
		return unknown("whether "+some(3, unasked)+" can be reached", "not asked")
	case len(bad) == 0:
		return well(count(len(f.Need.Hosts), "host") + " answered")
	}
	return fail(some(3, bad), "Let these hosts through the firewall or proxy. curl -sSI "+first+" shows what stands in the way", atProbe(snapshot.ProbeHTTPS, "error"))
}

// hostOf is the host of a URL, of HOST:PORT or of a bare HOST.
func hostOf(address string) string {
	if u, err := url.Parse(address); err == nil && u.Host != "" {
		return u.Hostname()
	}
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return address
}

// publicIssuers are words in the names of authorities that browsers trust and that
// issue for the hosts llmbox downloads from (ccadb.org, included CA certificates).
func publicIssuers() []string {
	return []string{
		"Let's Encrypt", "ISRG", "DigiCert", "Amazon", "Google Trust Services", "GTS", "Sectigo", "USERTrust", "COMODO", "GlobalSign", "Baltimore", "Microsoft", "Entrust", "GoDaddy", "Starfield", "Cloudflare", "SSL.com", "Certum", "Actalis", "HARICA", "IdenTrust", "DST Root", "QuoVadis", "SwissSign", "Buypass", "ZeroSSL", "AAA Certificate", "Fastly",
	}
}

func judgeInterception(f Facts) []finding.Finding {
	answers, why := f.https()
	if why != nil {
		return why
	}
	var private, untrusted []string
	issuers := 0
	for _, a := range answers {
		if a.Issuer == "" {
			continue
		}
		issuers++
		if slices.ContainsFunc(publicIssuers(), func(w string) bool { return strings.Contains(a.Issuer, w) }) {
			continue
		}
		text := a.URL + " by " + a.Issuer
		if a.Stage == "tls" {
			untrusted = append(untrusted, text)
		} else {
			private = append(private, text)
		}
	}
	fix := "Install the company's root certificate: sudo cp ROOT.crt /usr/local/share/ca-certificates/ && sudo update-ca-certificates && " + installSet("network.caFile=/usr/local/share/ca-certificates/ROOT.crt")
	switch {
	case len(untrusted) > 0:
		return fail(some(2, untrusted)+": a proxy opens the connection and this machine does not know its authority", fix, atProbe(snapshot.ProbeHTTPS, "issuer"))
	case len(private) > 0:
		return warn(some(2, private)+": a proxy opens the connection; containers don't know its authority", fix, atProbe(snapshot.ProbeHTTPS, "issuer"))
	case issuers == 0:
		return unknown("the certificates on the way", "no host got that far")
	}
	return well("certificates of public authorities")
}

func judgeMTU(f Facts) []finding.Finding {
	interfaces, why := f.interfaces()
	if why != nil {
		return why
	}
	routes, t := f.routes()
	if t.State != snapshot.Present {
		return unknownText(t)
	}
	for _, r := range routes {
		if r.network.Bits() != 0 {
			continue
		}
		for _, i := range interfaces {
			if i.Name != r.device || i.MTU == 0 {
				continue
			}
			if i.MTU < smallestMTU {
				return warn(fmt.Sprintf("%s has %d: large answers get lost between pods", i.Name, i.MTU),
					"sudo ip link set dev "+i.Name+" mtu 1500 where the network allows it (and in /etc/netplan or NetworkManager)", atProbe(snapshot.ProbeInterfaces, "mtu"))
			}
			return well(fmt.Sprintf("%s has %d", i.Name, i.MTU))
		}
	}
	return notApplicable("no interface with a default route")
}

func judgeProxy(f Facts) []finding.Finding {
	env, ok := f.environment()
	var from finding.Evidence
	if ok {
		from = finding.Evidence{File: "host/proc/self/environ"}
	}
	for _, name := range []string{"/etc/systemd/system/k3s.service.env", "/etc/environment"} {
		t := f.File(name)
		if t.State != snapshot.Present {
			continue
		}
		ok = true
		for k, v := range assignments(t.Data) {
			if env == nil {
				env = map[string]string{}
			}
			if _, set := env[k]; !set && strings.Contains(strings.ToLower(k), "proxy") {
				env[k] = v
				from = at(t, k)
			}
		}
	}
	if !ok {
		return unknownText(f.File("/proc/self/environ"))
	}
	get := func(names ...string) string {
		for _, n := range names {
			if env[n] != "" {
				return env[n]
			}
		}
		return ""
	}
	proxy := get("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
	if proxy == "" {
		return well("none")
	}
	excepted := strings.FieldsFunc(get("NO_PROXY", "no_proxy"), func(r rune) bool { return r == ',' || r == ' ' })
	var missing []string
	for _, want := range []string{f.podCIDR(), f.serviceCIDR(), ".svc", ".cluster.local"} {
		if !exempt(excepted, want) {
			missing = append(missing, want)
		}
	}
	if !exempt(excepted, "127.0.0.0/8") && !slices.Contains(excepted, "127.0.0.1") && !slices.Contains(excepted, "localhost") {
		missing = append(missing, "127.0.0.0/8")
	}
	from.Line = "NO_PROXY=" + strings.Join(excepted, ",")
	if len(missing) == 0 {
		return well("a proxy, and NO_PROXY holds the cluster's networks", from)
	}
	return fail("a proxy is set and NO_PROXY lacks "+strings.Join(missing, ", ")+": the cluster would talk to itself through the proxy",
		"Add them before the install: export NO_PROXY=\"$NO_PROXY,"+strings.Join(missing, ",")+"\" (and in /etc/environment), then: sudo -E llmbox install", from)
}

// exempt says whether a list of exceptions covers a network or a domain.
func exempt(list []string, want string) bool {
	target, isNet := prefixOf(want)
	for _, e := range list {
		if e == "*" || e == want || strings.TrimPrefix(e, "*") == want || "."+e == want {
			return true
		}
		if p, ok := prefixOf(e); ok && isNet && p.Bits() <= target.Bits() && p.Contains(target.Addr()) {
			return true
		}
	}
	return false
}

func judgeRPFilter(f Facts) []finding.Finding {
	n, t, ok := f.number("/proc/sys/net/ipv4/conf/all/rp_filter")
	if !ok {
		return unknownText(t)
	}
	if n != 1 {
		return well(strconv.FormatInt(n, 10))
	}
	routes, rt := f.routes()
	if rt.State != snapshot.Present {
		return unknownText(rt)
	}
	devices := map[string]bool{}
	for _, r := range routes {
		if r.network.Bits() == 0 {
			devices[r.device] = true
		}
	}
	if len(devices) < 2 {
		return well("strict, with one way out")
	}
	return repairable("host.sysctl", warn(fmt.Sprintf("strict, with %d interfaces that lead out: answers on the other one are dropped", len(devices)),
		"printf 'net.ipv4.conf.all.rp_filter = 2\\n' | sudo tee -a /etc/sysctl.d/99-llmbox.conf; sudo sysctl --system", at(t, t.Trimmed())))
}
