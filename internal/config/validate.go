package config

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
)

// Known holds the names that other parts of llmbox know. A nil list is not
// checked.
type Known struct {
	Components []string
	Profiles   []string
	// GPUs are the product keys of package gpu.
	GPUs []string
}

var (
	hubName      = pattern(`^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$`)
	revision     = pattern(`^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$`)
	servedName   = pattern(`^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}$`)
	dnsName      = pattern(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	registryHost = pattern(`^(\*|[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(:[0-9]{1,5})?)$`)
	k3sRelease   = pattern(`^v?[0-9]+\.[0-9]+\.[0-9]+(-[a-z0-9.]+)?\+k3s[0-9]+$`)
	ociReference = pattern(`^oci://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[a-z0-9._-]+)+$`)
	exactVersion = pattern(`^v?[0-9]+\.[0-9]+\.[0-9]+([-+][0-9A-Za-z.+-]+)?$`)
	chartName    = pattern(`^[a-z0-9][a-z0-9._-]*$`)
)

// Validate judges a settled configuration by itself. Every problem is reported,
// each with the place its value came from.
func Validate(b Box, sources Sources, known Known) error {
	v := &validator{box: b, sources: sources, known: known}
	v.model()
	v.gateway()
	v.components()
	v.rest()
	v.k3s()
	v.network()
	v.paths()
	v.registries()
	return v.found.join()
}

type validator struct {
	box     Box
	sources Sources
	known   Known
	found   problems
}

func (v *validator) fail(path, fix, problem string, args ...any) {
	v.found.add(&Error{Place: v.sources.Origin(path), Path: path, Problem: fmt.Sprintf(problem, args...), Fix: fix})
}

// oneOf checks a value that is one of a few words.
func (v *validator) oneOf(path, value string, allowed ...string) {
	if slices.Contains(allowed, value) {
		return
	}
	fix := "one of: " + strings.Join(allowed, ", ")
	if near := nearest(value, allowed); near != "" {
		fix = fmt.Sprintf("did you mean %q? (%s)", near, fix)
	}
	v.fail(path, fix, "%s is not a known value", quoteShort(value))
}

func (v *validator) model() {
	m := v.box.Model
	switch {
	case m.Name == "":
	case strings.HasPrefix(m.Name, "/"):
		v.absolute("model.name", m.Name)
	case !hubName().MatchString(m.Name) || strings.Contains(m.Name, ".."):
		fix := "write it as on Hugging Face (org/name, such as Qwen/Qwen3-8B), or as the absolute path of a directory"
		if rest, ok := strings.CutPrefix(m.Name, "https://huggingface.co/"); ok && hubName().MatchString(rest) {
			fix = "write " + rest
		}
		v.fail("model.name", fix, "%s is not a model name", quoteShort(m.Name))
	}
	if m.Revision != "" && (!revision().MatchString(m.Revision) || strings.Contains(m.Revision, "..")) {
		v.fail("model.revision", "name a branch, a tag or a commit of the model repository", "%s is not a revision", quoteShort(m.Revision))
	}
	if m.ServedName != "" && !servedName().MatchString(m.ServedName) {
		v.fail("model.servedName", "use letters, digits and . _ : / @ -", "%s can't be a served name", quoteShort(m.ServedName))
	}
	const fewest, most = 256, 16 << 20
	if m.ContextTokens != 0 && (m.ContextTokens < fewest || m.ContextTokens > most) {
		v.fail("model.contextTokens", fmt.Sprintf("write a number of tokens from %d to %d, or 0 to take what fits", fewest, most), "%d is out of range", m.ContextTokens)
	}
	v.oneOf("model.fastStart", m.FastStart, FastStartOff, FastStartAuto, FastStartGraphs, FastStartEager)
	switch {
	case m.Source == SourceHub:
	case strings.HasPrefix(m.Source, "/"):
		v.absolute("model.source", m.Source)
	case strings.HasPrefix(m.Source, "https://"), strings.HasPrefix(m.Source, "http://"):
		v.url("model.source", m.Source, "https", "http")
	default:
		v.fail("model.source", "write hub, the absolute path of a directory, or the https URL of a mirror", "%s is not a source of weights", quoteShort(m.Source))
	}
	v.arguments("model.extraArgs", m.ExtraArgs, map[string]string{
		"--api-key":           "keys are checked at the gateway: see `llmbox keys`",
		"--hf-token":          "name the token's file: secrets.hfTokenFile",
		"--host":              "llmbox sets it",
		"--port":              "llmbox sets it; the port clients use is gateway.port",
		"--model":             "use model.name",
		"--revision":          "use model.revision",
		"--served-model-name": "use model.servedName",
		"--max-model-len":     "use model.contextTokens",
		"--download-dir":      "llmbox sets it; the directory for weights is below paths.data",
		"--ssl-keyfile":       "use gateway.tls",
		"--ssl-certfile":      "use gateway.tls",
		"--disable-log-stats": "the metrics that scaling and alerts read would be gone",
		"--uds":               "clients and probes arrive by TCP",
		"--root-path":         "clients and probes expect the API at /v1",
		"--middleware":        "keys and limits are checked at the gateway",
	})
}

// arguments checks a list handed to another program.
func (v *validator) arguments(path string, args []string, refused map[string]string) {
	for i, arg := range args {
		name, _, _ := strings.Cut(arg, "=")
		if strings.HasPrefix(name, "--") {
			// vLLM and k3s both read underscores in option names as dashes.
			name = strings.ReplaceAll(name, "_", "-")
		}
		if arg == "" {
			v.fail(path, "remove it", "entry %d is empty", i+1)
			continue
		}
		if fix, no := refused[name]; no {
			v.fail(path, fix, "%s can't be given here", name)
		}
		if strings.HasPrefix(arg, "-") && strings.ContainsAny(name, " \t") {
			v.fail(path, "write the option and its value as two list entries, or joined by =", "entry %d holds a blank in an option's name", i+1)
		}
	}
}

// Ports that k3s itself listens on.
func takenPorts() map[int]string {
	return map[int]string{6443: "the Kubernetes API server", 10250: "the kubelet", 10248: "the kubelet", 10249: "kube-proxy", 10256: "kube-proxy", 10257: "the controller manager", 10259: "the scheduler"}
}

func (v *validator) gateway() {
	g := v.box.Gateway
	if g.Port < 1 || g.Port > 65535 {
		v.fail("gateway.port", "write a number from 1 to 65535, such as 8080", "%d is not a port", g.Port)
	} else if owner, taken := takenPorts()[g.Port]; taken {
		v.fail("gateway.port", "take another one, such as 8080", "%d is used by %s", g.Port, owner)
	}
	if s := g.TLS.ExistingSecret; s != "" {
		if !g.TLS.Enabled {
			v.fail("gateway.tls.existingSecret", "set gateway.tls.enabled: true as well", "is set while TLS is off")
		}
		if !dnsName().MatchString(s) || len(s) > 253 {
			v.fail("gateway.tls.existingSecret", "name a Secret: lower-case letters, digits and dashes", "%s is not the name of a Secret", quoteShort(s))
		}
	}
	if g.RateLimit.RequestsPerMinute < 0 {
		v.fail("gateway.rateLimit.requestsPerMinute", "write 0 for no limit", "%d is negative", g.RateLimit.RequestsPerMinute)
	}
}

func (v *validator) components() {
	for _, name := range slices.Sorted(maps.Keys(v.box.Components)) {
		c := v.box.Components[name]
		at := func(key string) string { return formatPath([]string{"components", name, key}) }
		place := at("mode")
		for _, s := range v.sources {
			if len(s.path) > 1 && s.path[0] == "components" && s.path[1] == name {
				place = s.Path
				break
			}
		}
		if v.known.Components != nil && !slices.Contains(v.known.Components, name) {
			fix := "known components: " + strings.Join(v.known.Components, ", ")
			if near := nearest(name, v.known.Components); near != "" {
				fix = fmt.Sprintf("did you mean %q?", near)
			}
			v.found.add(&Error{Place: v.sources.Origin(place), Path: formatPath([]string{"components", name}), Problem: "unknown component", Fix: fix})
			continue
		}
		if c.Mode != "" {
			v.oneOf(at("mode"), c.Mode, ModeInstall, ModeExternal, ModeOff)
		}
		v.chart(c, at)
	}
}

func (v *validator) chart(c Component, at func(string) string) {
	version := func(why string) {
		switch {
		case c.Version == "":
			v.fail(at("chart"), fmt.Sprintf("add %s with the exact version", at("version")), "%s needs a version", why)
		case !exactVersion().MatchString(c.Version):
			v.fail(at("version"), "write one version, such as 1.2.3, not a range", "%s is not an exact version", quoteShort(c.Version))
		}
	}
	switch {
	case c.Repository != "":
		v.url(at("repository"), c.Repository, "https", "http")
		if !chartName().MatchString(c.Chart) {
			v.fail(at("repository"), fmt.Sprintf("set %s to the chart's name in that repository", at("chart")), "is set without a chart's name")
			return
		}
		version("a chart of a repository")
	case c.Chart == "":
		if c.Version != "" {
			v.fail(at("version"), fmt.Sprintf("set %s as well; the embedded chart has the version this llmbox was built with", at("chart")), "is set without a chart")
		}
	case strings.HasPrefix(c.Chart, "oci://"):
		if !ociReference().MatchString(c.Chart) {
			v.fail(at("chart"), "write oci://registry/path/name, without a tag", "%s is not an OCI reference", quoteShort(c.Chart))
			return
		}
		version("an OCI chart")
	case strings.HasPrefix(c.Chart, "/"):
		v.absolute(at("chart"), c.Chart)
	default:
		v.fail(at("chart"), "write an absolute path, an oci:// reference, or the name of a chart together with "+at("repository"),
			"%s is no absolute path, which a later run from elsewhere would need", quoteShort(c.Chart))
	}
}

func (v *validator) rest() {
	v.oneOf("engine", v.box.Engine, EngineAuto, EngineHelm, EngineHelmChart)
	for i, p := range v.box.Profiles {
		if v.known.Profiles != nil && !slices.Contains(v.known.Profiles, p) {
			v.oneOf("profiles", p, v.known.Profiles...)
		}
		if slices.Contains(v.box.Profiles[:i], p) {
			v.fail("profiles", "keep one", "%s stands there twice", quoteShort(p))
		}
	}
	if !slices.Contains(v.box.Profiles, ProfileCore) {
		v.fail("profiles", "add core; leave single components out with components.NAME.mode: off", "lacks core, which the others build on")
	}
	g := v.box.GPU
	if g.Product != "" && v.known.GPUs != nil && !slices.Contains(v.known.GPUs, g.Product) {
		v.oneOf("gpu.product", g.Product, v.known.GPUs...)
	}
	const mostGPUs = 16 // the largest single machines hold as many
	if g.Count < 0 || g.Count > mostGPUs {
		v.fail("gpu.count", fmt.Sprintf("write the number of GPUs in this machine, at most %d", mostGPUs), "%d is out of range", g.Count)
	}
	if file := v.box.Secrets.HFTokenFile; file != "" {
		v.absolute("secrets.hfTokenFile", file)
	}
	if file := v.box.Secrets.RegistryAuthFile; file != "" {
		v.absolute("secrets.registryAuthFile", file)
	}
}

func (v *validator) k3s() {
	k := v.box.K3s
	if k.Version != "" && !k3sRelease().MatchString(k.Version) {
		v.fail("k3s.version", "write it as k3s does, such as v1.36.4+k3s1", "%s is not a k3s release", quoteShort(k.Version))
	}
	if k.BinaryPath != "" {
		v.absolute("k3s.binaryPath", k.BinaryPath)
	}
	v.oneOf("k3s.init", k.Init, InitAuto, InitSystemd, InitOpenRC, InitSupervised)
	if k.NodeName != "" && (!dnsName().MatchString(k.NodeName) || len(k.NodeName) > 253) {
		v.fail("k3s.nodeName", "use lower-case letters, digits, dashes and dots", "%s can't be a node's name", quoteShort(k.NodeName))
	}
	for _, name := range k.TLSNames {
		if net.ParseIP(name) == nil && !dnsName().MatchString(strings.ToLower(name)) {
			v.fail("k3s.tlsNames", "list host names and addresses", "%s is neither a host name nor an address", quoteShort(name))
		}
	}
	v.arguments("k3s.extraArgs", k.ExtraArgs, map[string]string{
		"--cluster-cidr":            "use network.clusterCIDR",
		"--service-cidr":            "use network.serviceCIDR",
		"--node-ip":                 "use network.nodeIP",
		"-i":                        "use network.nodeIP",
		"--data-dir":                "use k3s.dataDir",
		"-d":                        "use k3s.dataDir",
		"--node-name":               "use k3s.nodeName",
		"--tls-san":                 "use k3s.tlsNames",
		"--private-registry":        "use registries.mirrors and secrets.registryAuthFile",
		"--write-kubeconfig":        "llmbox sets it",
		"--write-kubeconfig-mode":   "llmbox keeps it at 0600",
		"--token":                   "an argument can be read by every user of the machine; llmbox keeps the token in a file",
		"-t":                        "an argument can be read by every user of the machine; llmbox keeps the token in a file",
		"--agent-token":             "an argument can be read by every user of the machine; llmbox keeps the token in a file",
		"--datastore-endpoint":      "llmbox keeps the datastore on this machine",
		"--config":                  "llmbox writes k3s's configuration",
		"-c":                        "llmbox writes k3s's configuration",
		"--disable-helm-controller": "set engine: helm",
	})
}

func (v *validator) network() {
	n := v.box.Network
	cluster, okCluster := v.cidr("network.clusterCIDR", n.ClusterCIDR, 8, 24)
	service, okService := v.cidr("network.serviceCIDR", n.ServiceCIDR, 12, 27)
	if okCluster && okService && cluster.Overlaps(service) {
		v.fail(v.stronger("network.clusterCIDR", "network.serviceCIDR"), "choose two ranges apart, such as 10.42.0.0/16 and 10.43.0.0/16",
			"pods (%s) and services (%s) share addresses", cluster, service)
	}
	if n.NodeIP != "" {
		ip, err := netip.ParseAddr(n.NodeIP)
		switch {
		case err != nil:
			v.fail("network.nodeIP", "write one address of this machine", "%s is not an address", quoteShort(n.NodeIP))
		case ip.IsLoopback() || ip.IsUnspecified() || ip.IsMulticast():
			v.fail("network.nodeIP", "write an address of this machine that others can reach", "%s can't be a node's address", ip)
		case okCluster && cluster.Contains(ip):
			v.fail("network.nodeIP", "move network.clusterCIDR to a range that no machine uses", "%s lies in the pods' range %s", ip, cluster)
		case okService && service.Contains(ip):
			v.fail("network.nodeIP", "move network.serviceCIDR to a range that no machine uses", "%s lies in the services' range %s", ip, service)
		}
	}
	if n.Proxy.HTTP != "" {
		v.url("network.proxy.http", n.Proxy.HTTP, "http", "https", "socks5")
	}
	if n.Proxy.HTTPS != "" {
		v.url("network.proxy.https", n.Proxy.HTTPS, "http", "https", "socks5")
	}
	if n.CAFile != "" {
		v.absolute("network.caFile", n.CAFile)
	}
}

// stronger names the path of the two whose value a person chose last.
func (v *validator) stronger(a, b string) string {
	sa, okA := v.sources.Find(a)
	sb, okB := v.sources.Find(b)
	if okA && okB && sb.kind < sa.kind {
		return b
	}
	return a
}

func (v *validator) cidr(path, text string, widest, narrowest int) (netip.Prefix, bool) {
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil && strings.Contains(text, ","):
		v.fail(path, "write one IPv4 range, such as 10.42.0.0/16", "%s holds several ranges; a box has one", quoteShort(text))
	case err != nil:
		v.fail(path, "write an IPv4 range, such as 10.42.0.0/16", "%s is not an address range", quoteShort(text))
	case !p.Addr().Is4():
		v.fail(path, "write an IPv4 range, such as 10.42.0.0/16", "%s is IPv6, which llmbox does not set up", p)
	case p.Masked() != p:
		v.fail(path, "write "+p.Masked().String(), "%s has bits set behind its prefix", p)
	case p.Bits() < widest || p.Bits() > narrowest:
		v.fail(path, fmt.Sprintf("take a prefix from /%d to /%d", widest, narrowest), "%s is too %s", p, map[bool]string{true: "large", false: "small"}[p.Bits() < widest])
	case p.Overlaps(netip.MustParsePrefix("127.0.0.0/8")), p.Overlaps(netip.MustParsePrefix("169.254.0.0/16")),
		p.Overlaps(netip.MustParsePrefix("224.0.0.0/3")), p.Overlaps(netip.MustParsePrefix("0.0.0.0/8")):
		v.fail(path, "take a private range, such as 10.42.0.0/16", "%s overlaps addresses with a meaning of their own", p)
	default:
		return p, true
	}
	return netip.Prefix{}, false
}

// Directories that belong to the system: uninstall removes what llmbox keeps in
// its own, so it must have its own.
func systemDirectories() []string {
	return []string{"/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root",
		"/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/usr/local", "/var", "/var/lib", "/var/log", "/var/tmp", "/var/run"}
}

func (v *validator) directory(path, dir string) {
	if !v.absolute(path, dir) {
		return
	}
	clean := filepath.Clean(dir)
	if slices.Contains(systemDirectories(), clean) {
		v.fail(path, "take a directory below it, such as "+filepath.Join(clean, "llmbox"), "%s belongs to the system", clean)
		return
	}
	for _, volatile := range []string{"/dev", "/proc", "/run", "/sys", "/tmp", "/var/run"} {
		if strings.HasPrefix(clean, volatile+"/") {
			v.fail(path, "take a directory on a disk", "%s does not outlive a reboot", clean)
		}
	}
}

func (v *validator) paths() {
	dirs := []struct{ path, dir string }{{"paths.data", v.box.Paths.Data}, {"paths.log", v.box.Paths.Log}, {"k3s.dataDir", v.box.K3s.DataDir}}
	for i, d := range dirs {
		v.directory(d.path, d.dir)
		for _, before := range dirs[:i] {
			if filepath.Clean(d.dir) == filepath.Clean(before.dir) {
				v.fail(d.path, "give each a directory of its own", "is the same directory as %s", before.path)
			}
		}
	}
}

func (v *validator) absolute(path, file string) bool {
	switch {
	case !filepath.IsAbs(file):
		fix := "write the absolute path"
		if strings.HasPrefix(file, "~") {
			fix = "write the home directory out; `~` is a shell's word"
		}
		v.fail(path, fix, "%s is not an absolute path", quoteShort(file))
		return false
	case slices.Contains(strings.Split(file, "/"), ".."):
		v.fail(path, "write it as "+filepath.Clean(file), "%s goes through `..`", quoteShort(file))
		return false
	}
	return true
}

// url checks a URL and refuses a password in it: it would end in the recorded
// configuration, in logs and in `plan`.
func (v *validator) url(path, text string, schemes ...string) {
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Host == "" || !slices.Contains(schemes, u.Scheme):
		// The text is not quoted: it may hold a password that did not parse.
		v.fail(path, "write it as "+schemes[0]+"://host:port", "is not a URL (%s)", strings.Join(schemes, ", "))
	case u.User != nil:
		fix := "leave it out"
		if strings.HasPrefix(path, "network.proxy.") {
			fix = "give a proxy with a password by HTTPS_PROXY and HTTP_PROXY in the environment"
		} else if strings.HasPrefix(path, "registries.") {
			fix = "put the login into a file and name that: secrets.registryAuthFile"
		}
		v.found.add(&Error{Place: v.sources.Origin(path), Path: path, Problem: "holds a login", Fix: fix, Kind: ErrSecret})
	}
}

func (v *validator) registries() {
	for _, host := range slices.Sorted(maps.Keys(v.box.Registries.Mirrors)) {
		path := formatPath([]string{"registries", "mirrors", host, "endpoints"})
		if !registryHost().MatchString(host) {
			v.fail(path, "write a host, such as docker.io or registry.example.com:5000", "%s is not a registry", quoteShort(host))
		}
		if len(v.box.Registries.Mirrors[host].Endpoints) == 0 {
			v.fail(path, "list at least one URL, or remove the mirror", "has no endpoint")
		}
		for _, endpoint := range v.box.Registries.Mirrors[host].Endpoints {
			v.url(path, endpoint, "https", "http")
		}
	}
}
