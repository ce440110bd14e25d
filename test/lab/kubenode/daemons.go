package kubenode

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// Containerd is a containerd (1.6 or 1.7) that serves kubelet.
type Containerd struct {
	// Header is a comment on the first line.
	Header string
	// Root, State and Opt are its directories; empty: its own defaults.
	Root, State, Opt string
	Socket           string
	Sandbox          string
	CNIBin, CNIConf  string
	// Certs is the directory of the hosts.toml files.
	Certs string
	// Handlers are runtimes by name, with the program to use instead of runc.
	Handlers map[string]string
	// Auth are credentials for registries by host.
	Auth map[string]RegistryAuth
}

// RegistryAuth is how somebody proves to be somebody to a registry.
type RegistryAuth struct {
	Username      string `json:"username"`
	Password      string `json:"password"`
	Auth          string `json:"auth"`
	IdentityToken string `json:"identity_token"`
}

// TOML is its configuration.
func (c Containerd) TOML() string {
	var b strings.Builder
	line := func(format string, a ...any) { fmt.Fprintf(&b, format+"\n", a...) }
	if c.Header != "" {
		line("# %s", c.Header)
	}
	line("version = 2")
	if c.Root != "" {
		line("root = %q", c.Root)
		line("state = %q", c.State)
	}
	line("[grpc]")
	line("  address = %q", c.Socket)
	if c.Opt != "" {
		line(`[plugins."io.containerd.internal.v1.opt"]`)
		line("  path = %q", c.Opt)
	}
	line(`[plugins."io.containerd.grpc.v1.cri"]`)
	line("  sandbox_image = %q", c.Sandbox)
	line("  # Lowering it needs CAP_SYS_RESOURCE, which a container has not.")
	line("  restrict_oom_score_adj = true")
	line("  enable_unprivileged_ports = true")
	line(`  [plugins."io.containerd.grpc.v1.cri".cni]`)
	line("    bin_dir = %q", c.CNIBin)
	line("    conf_dir = %q", c.CNIConf)
	line(`  [plugins."io.containerd.grpc.v1.cri".containerd]`)
	line(`    default_runtime_name = "runc"`)
	line("    # A layer is kept once, unpacked.")
	line("    discard_unpacked_layers = true")
	for _, name := range slices.Sorted(maps.Keys(c.Handlers)) {
		line(`    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.%q]`, name)
		line(`      runtime_type = "io.containerd.runc.v2"`)
		if program := c.Handlers[name]; program != "" {
			line(`      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.%q.options]`, name)
			line("        BinaryName = %q", program)
		}
	}
	line(`  [plugins."io.containerd.grpc.v1.cri".registry]`)
	line("    config_path = %q", c.Certs)
	for _, host := range slices.Sorted(maps.Keys(c.Auth)) {
		line(`    [plugins."io.containerd.grpc.v1.cri".registry.configs.%q.auth]`, host)
		a := c.Auth[host]
		for _, pair := range [][2]string{{"username", a.Username}, {"password", a.Password}, {"auth", a.Auth}, {"identitytoken", a.IdentityToken}} {
			if pair[1] != "" {
				line("      %s = %q", pair[0], pair[1])
			}
		}
	}
	return b.String()
}

// Endpoint is where images of a registry are asked for first.
type Endpoint struct {
	URL string
	// WholePath says that the URL has the path of the API in it.
	WholePath bool
	// CA, Cert and Key are files; Insecure asks for no proof of who answers.
	CA, Cert, Key string
	Insecure      bool
	// Rewrites of repository names, as k3s' own containerd does them. Others ignore it.
	Rewrites map[string]string
}

// HostsTOML is how containerd finds one registry: at the endpoints, then at server. An
// empty server is the registry itself.
func HostsTOML(header, server string, endpoints []Endpoint) string {
	var b strings.Builder
	line := func(format string, a ...any) { fmt.Fprintf(&b, format+"\n", a...) }
	if header != "" {
		line("# %s", header)
	}
	if server != "" {
		line("server = %q", server)
	}
	for _, e := range endpoints {
		line("[host.%q]", e.URL)
		line(`  capabilities = ["pull", "resolve"]`)
		if e.WholePath {
			line("  override_path = true")
		}
		if e.CA != "" {
			line("  ca = [%q]", e.CA)
		}
		if e.Cert != "" || e.Key != "" {
			line("  client = [[%q, %q]]", e.Cert, e.Key)
		}
		if e.Insecure {
			line("  skip_verify = true")
		}
		if len(e.Rewrites) > 0 {
			line("  [host.%q.rewrite]", e.URL)
			for _, from := range slices.Sorted(maps.Keys(e.Rewrites)) {
				line("    %q = %q", from, e.Rewrites[from])
			}
		}
	}
	return b.String()
}

// CNIConfig is a bridge with a route to everywhere, and host ports.
func CNIConfig(name, podSubnet string) string {
	return `{
  "cniVersion": "0.4.0",
  "name": ` + strconv.Quote(name) + `,
  "plugins": [
    {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
     "ipam": {"type": "host-local", "ranges": [[{"subnet": ` + strconv.Quote(podSubnet) + `}]], "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`
}

// KubeletConfig is kubelet's configuration on a machine that may have swap and the
// first version of cgroups, with what the caller sets.
func KubeletConfig(set map[string]any) ([]byte, error) {
	config := map[string]any{
		"apiVersion":    "kubelet.config.k8s.io/v1beta1",
		"kind":          "KubeletConfiguration",
		"authorization": map[string]any{"mode": "Webhook"},
		"cgroupDriver":  "cgroupfs",
		"failCgroupV1":  false,
		"failSwapOn":    false,
		"clusterDomain": "cluster.local",
		// Others of the lab pull at the same time.
		"serializeImagePulls": false,
		"maxPods":             110,
	}
	maps.Copy(config, set)
	raw, err := yaml.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("encoding kubelet's configuration: %w", err)
	}
	return raw, nil
}

// ProxyConfig is kube-proxy's configuration; it leaves the machine's conntrack settings
// alone.
func ProxyConfig(node, podCIDR, kubeconfig string) string {
	return `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
hostnameOverride: ` + strconv.Quote(node) + `
clusterCIDR: ` + strconv.Quote(podCIDR) + `
bindAddress: 0.0.0.0
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
clientConnection: {kubeconfig: ` + strconv.Quote(kubeconfig) + `}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
iptables: {minSyncPeriod: 0s}
`
}
