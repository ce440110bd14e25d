package k3sserver

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	goyaml "go.yaml.in/yaml/v3"
)

// Config is what a server or an agent was asked for, by configuration files, flags and environment.
type Config struct {
	DataDir  string
	NodeName string
	// Server is the one that an agent joins.
	Server string
	// NodeIP is empty where nothing names it: the address on the way out is taken.
	NodeIP                string
	BindPort              int
	TLSSANs               []string
	ClusterCIDR           string
	ServiceCIDR           string
	ClusterDNS            string
	ClusterDomain         string
	Disable               []string
	Kubeconfig            string
	KubeconfigMode        os.FileMode
	Token                 string
	SecretsEncryption     bool
	ProtectKernelDefaults bool
	NoNetworkPolicy       bool
	NoHelmController      bool
	Registries            string
	PauseImage            string
	HelmJobImage          string
	StoragePath           string
	ResolvConf            string
	NodeLabels            []string
	NodeTaints            []string
	KubeletArgs           []string
	ProxyArgs             []string
	APIServerArgs         []string
	ControllersArgs       []string
	SchedulerArgs         []string

	// Ignored are keys that k3s has and the stand-in does nothing about.
	Ignored []string
}

// Source is where a configuration comes from.
type Source struct {
	// Args follow the word "server" or "agent" on the command line.
	Args []string
	// Env looks a variable of the environment up.
	Env func(string) string
	// File is read where nothing names another; it may be absent.
	File string
}

// DefaultFile is where k3s looks for its configuration.
const DefaultFile = "/etc/rancher/k3s/config.yaml"

// ErrConfig means that a configuration can't be followed.
var ErrConfig = errors.New("bad configuration")

// kind says what a key takes.
type kind int

const (
	one kind = iota
	list
	yesNo
)

// key is one key of k3s' configuration, which is a flag at the same time.
type key struct {
	name, short, env string
	kind             kind
	// ignored: k3s knows it, the stand-in has nothing that it would change.
	ignored bool
}

// keys lists what k3s 1.36 takes after `server`, as far as a single server with SQLite
// may be given it (k3s-io/k3s, pkg/cli/cmds/server.go and agent.go).
func keys() []key {
	return []key{
		{name: "data-dir", short: "d"},
		{name: "node-name", env: "K3S_NODE_NAME"},
		{name: "server", short: "s", env: "K3S_URL"},
		{name: "node-ip", short: "i", kind: list},
		{name: "https-listen-port"},
		{name: "tls-san", kind: list},
		{name: "cluster-cidr", kind: list},
		{name: "service-cidr", kind: list},
		{name: "cluster-dns", kind: list},
		{name: "cluster-domain"},
		{name: "disable", kind: list},
		{name: "write-kubeconfig", short: "o", env: "K3S_KUBECONFIG_OUTPUT"},
		{name: "write-kubeconfig-mode", env: "K3S_KUBECONFIG_MODE"},
		{name: "token", short: "t", env: "K3S_TOKEN"},
		{name: "token-file", env: "K3S_TOKEN_FILE"},
		{name: "secrets-encryption", kind: yesNo},
		{name: "protect-kernel-defaults", kind: yesNo},
		{name: "disable-network-policy", kind: yesNo},
		{name: "disable-helm-controller", kind: yesNo},
		{name: "private-registry"},
		{name: "pause-image"},
		{name: "helm-job-image"},
		{name: "default-local-storage-path"},
		{name: "resolv-conf", env: "K3S_RESOLV_CONF"},
		{name: "node-label", kind: list},
		{name: "node-taint", kind: list},
		{name: "kubelet-arg", kind: list},
		{name: "kube-proxy-arg", kind: list},
		{name: "kube-apiserver-arg", kind: list},
		{name: "kube-controller-manager-arg", kind: list},
		{name: "kube-scheduler-arg", kind: list},

		{name: "bind-address", ignored: true},
		{name: "advertise-address", ignored: true},
		{name: "advertise-port", ignored: true},
		{name: "tls-san-security", kind: yesNo, ignored: true},
		{name: "service-node-port-range", ignored: true},
		{name: "flannel-backend", ignored: true},
		{name: "flannel-iface", ignored: true},
		{name: "flannel-conf", ignored: true},
		{name: "flannel-ipv6-masq", kind: yesNo, ignored: true},
		{name: "flannel-external-ip", kind: yesNo, ignored: true},
		{name: "egress-selector-mode", ignored: true},
		{name: "servicelb-namespace", ignored: true},
		{name: "write-kubeconfig-group", env: "K3S_KUBECONFIG_GROUP", ignored: true},
		{name: "agent-token", env: "K3S_AGENT_TOKEN", ignored: true},
		{name: "agent-token-file", env: "K3S_AGENT_TOKEN_FILE", ignored: true},
		{name: "secrets-encryption-provider", ignored: true},
		{name: "disable-cloud-controller", kind: yesNo, ignored: true},
		{name: "kube-cloud-controller-manager-arg", kind: list, ignored: true},
		{name: "node-external-ip", kind: list, ignored: true},
		{name: "snapshotter", ignored: true},
		{name: "selinux", kind: yesNo, env: "K3S_SELINUX", ignored: true},
		{name: "lb-server-port", env: "K3S_LB_SERVER_PORT", ignored: true},
		{name: "system-default-registry", env: "K3S_SYSTEM_DEFAULT_REGISTRY", ignored: true},
		{name: "disable-default-registry-endpoint", kind: yesNo, ignored: true},
		{name: "nonroot-devices", kind: yesNo, ignored: true},
		{name: "embedded-registry", kind: yesNo, ignored: true},
		{name: "supervisor-metrics", kind: yesNo, ignored: true},
		{name: "enable-pprof", kind: yesNo, ignored: true},
		{name: "prefer-bundled-bin", kind: yesNo, ignored: true},
		{name: "with-node-id", kind: yesNo, ignored: true},
		{name: "image-credential-provider-bin-dir", ignored: true},
		{name: "image-credential-provider-config", ignored: true},
		{name: "debug", kind: yesNo, env: "K3S_DEBUG", ignored: true},
		{name: "v", ignored: true},
		{name: "vmodule", ignored: true},
		{name: "log", short: "l", ignored: true},
		{name: "alsologtostderr", kind: yesNo, ignored: true},
	}
}

// values are what was said about each key.
type values map[string][]string

// ReadConfig puts the configuration together: flags win over files, files over the
// environment, and of the files the last one.
func ReadConfig(from Source) (Config, error) {
	known := map[string]key{}
	for _, k := range keys() {
		known[k.name] = k
		if k.short != "" {
			known[k.short] = k
		}
	}
	flags, file, err := readFlags(from.Args, known)
	if err != nil {
		return Config{}, err
	}
	named := file != ""
	if env := from.Env("K3S_CONFIG_FILE"); !named && env != "" {
		file, named = env, true
	}
	if !named {
		file = from.File
	}
	said := values{}
	for _, k := range known {
		if v := from.Env(k.env); k.env != "" && v != "" {
			said[k.name] = []string{v}
		}
	}
	found, err := readFiles(file, named, known)
	if err != nil {
		return Config{}, err
	}
	for name, v := range found {
		said[name] = v
	}
	for name, v := range flags {
		said[name] = v
	}
	return said.config(known)
}

// readFiles reads a file and what lies in the directory of the same name with .d at
// its end. A key with a plus sign adds to what earlier files said.
func readFiles(file string, mustBe bool, known map[string]key) (values, error) {
	files := []string{file}
	for _, pattern := range []string{"*.yaml", "*.yml"} {
		more, err := filepath.Glob(filepath.Join(file+".d", pattern))
		if err != nil {
			return nil, fmt.Errorf("looking for configuration: %w", err)
		}
		files = append(files, more...)
	}
	slices.Sort(files[1:])
	said := values{}
	for i, name := range files {
		raw, err := os.ReadFile(name) // #nosec G304 -- named by root
		if errors.Is(err, fs.ErrNotExist) && i == 0 && !mustBe {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading the configuration: %w", err)
		}
		if err := said.read(raw, known); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return said, nil
}

func (said values) read(raw []byte, known map[string]key) error {
	var document goyaml.Node
	if err := goyaml.Unmarshal(raw, &document); err != nil {
		return fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if len(document.Content) == 0 {
		return nil
	}
	top := document.Content[0]
	if top.Kind != goyaml.MappingNode {
		return fmt.Errorf("%w: line %d: it has no keys", ErrConfig, top.Line)
	}
	here := map[string]bool{}
	for i := 0; i+1 < len(top.Content); i += 2 {
		word, value := top.Content[i], top.Content[i+1]
		name, adds := strings.CutSuffix(word.Value, "+")
		k, ok := known[name]
		if !ok {
			return fmt.Errorf("%w: line %d: unknown key %q (k3s itself would warn and go on)", ErrConfig, word.Line, word.Value)
		}
		if here[k.name] {
			return fmt.Errorf("%w: line %d: key %q comes twice", ErrConfig, word.Line, word.Value)
		}
		here[k.name] = true
		var got []string
		switch {
		case value.Kind == goyaml.ScalarNode:
			got = []string{value.Value}
		case value.Kind == goyaml.SequenceNode && k.kind == list:
			for _, item := range value.Content {
				if item.Kind != goyaml.ScalarNode {
					return fmt.Errorf("%w: line %d: %q takes a list of words", ErrConfig, item.Line, name)
				}
				got = append(got, item.Value)
			}
		default:
			return fmt.Errorf("%w: line %d: %q takes one value", ErrConfig, value.Line, name)
		}
		if adds && k.kind == list {
			got = append(slices.Clone(said[k.name]), got...)
		}
		said[k.name] = got
	}
	return nil
}

// readFlags reads a command line. The file that it names comes back beside the rest.
func readFlags(args []string, known map[string]key) (said values, file string, err error) {
	said = values{}
	for i := 0; i < len(args); i++ {
		word, isFlag := strings.CutPrefix(args[i], "-")
		if !isFlag {
			return nil, "", fmt.Errorf("%w: unexpected argument %q", ErrConfig, args[i])
		}
		word = strings.TrimPrefix(word, "-")
		name, value, has := strings.Cut(word, "=")
		k, ok := known[name]
		if name == "config" || name == "c" {
			k, ok = key{name: "config"}, true
		}
		if !ok {
			return nil, "", fmt.Errorf("%w: flag provided but not defined: -%s", ErrConfig, name)
		}
		if !has && k.kind == yesNo {
			value, has = "true", true
		}
		if !has {
			if i++; i == len(args) {
				return nil, "", fmt.Errorf("%w: flag needs an argument: -%s", ErrConfig, name)
			}
			value = args[i]
		}
		if k.name == "config" {
			file = value
		} else if k.kind == list {
			said[k.name] = append(said[k.name], value)
		} else {
			said[k.name] = []string{value}
		}
	}
	return said, file, nil
}

func (said values) config(known map[string]key) (Config, error) {
	var errs []error
	text := func(name, otherwise string) string {
		if v := said[name]; len(v) > 0 && v[0] != "" {
			return v[0]
		}
		return otherwise
	}
	words := func(name string) []string {
		var all []string
		for _, v := range said[name] {
			for word := range strings.SplitSeq(v, ",") {
				if word = strings.TrimSpace(word); word != "" {
					all = append(all, word)
				}
			}
		}
		return all
	}
	single := func(name, otherwise string) string {
		all := words(name)
		if len(all) > 1 {
			errs = append(errs, fmt.Errorf("%w: %s: the stand-in takes one, for IPv4", ErrConfig, name))
		}
		if len(all) == 0 {
			return otherwise
		}
		return all[0]
	}
	yes := func(name string) bool {
		b, err := strconv.ParseBool(text(name, "false"))
		if err != nil {
			errs = append(errs, fmt.Errorf("%w: %s is true or false, not %q", ErrConfig, name, text(name, "")))
		}
		return b
	}
	c := Config{
		DataDir:               text("data-dir", "/var/lib/rancher/k3s"),
		NodeName:              text("node-name", ""),
		Server:                text("server", ""),
		NodeIP:                single("node-ip", ""),
		TLSSANs:               words("tls-san"),
		ClusterCIDR:           single("cluster-cidr", "10.42.0.0/16"),
		ServiceCIDR:           single("service-cidr", "10.43.0.0/16"),
		ClusterDNS:            single("cluster-dns", ""),
		ClusterDomain:         text("cluster-domain", "cluster.local"),
		Disable:               words("disable"),
		Kubeconfig:            text("write-kubeconfig", "/etc/rancher/k3s/k3s.yaml"),
		Token:                 text("token", ""),
		SecretsEncryption:     yes("secrets-encryption"),
		ProtectKernelDefaults: yes("protect-kernel-defaults"),
		NoNetworkPolicy:       yes("disable-network-policy"),
		NoHelmController:      yes("disable-helm-controller"),
		Registries:            text("private-registry", "/etc/rancher/k3s/registries.yaml"),
		PauseImage:            text("pause-image", "rancher/mirrored-pause:3.6"),
		HelmJobImage:          text("helm-job-image", ""),
		ResolvConf:            text("resolv-conf", "/etc/resolv.conf"),
		NodeLabels:            words("node-label"),
		NodeTaints:            words("node-taint"),
		KubeletArgs:           said["kubelet-arg"],
		ProxyArgs:             said["kube-proxy-arg"],
		APIServerArgs:         said["kube-apiserver-arg"],
		ControllersArgs:       said["kube-controller-manager-arg"],
		SchedulerArgs:         said["kube-scheduler-arg"],
	}
	c.StoragePath = text("default-local-storage-path", filepath.Join(c.DataDir, "storage"))
	var err error
	if c.BindPort, err = strconv.Atoi(text("https-listen-port", "6443")); err != nil || c.BindPort < 1 || c.BindPort > 65535 {
		errs = append(errs, fmt.Errorf("%w: https-listen-port is a port, not %q", ErrConfig, text("https-listen-port", "")))
	}
	mode, err := strconv.ParseUint(text("write-kubeconfig-mode", "0600"), 8, 12)
	if err != nil {
		errs = append(errs, fmt.Errorf("%w: write-kubeconfig-mode is a file mode, not %q", ErrConfig, text("write-kubeconfig-mode", "")))
	}
	c.KubeconfigMode = os.FileMode(mode)
	if !filepath.IsAbs(c.DataDir) {
		errs = append(errs, fmt.Errorf("%w: data-dir %q is no absolute path", ErrConfig, c.DataDir))
	}
	if c.NodeIP != "" && net.ParseIP(c.NodeIP).To4() == nil {
		errs = append(errs, fmt.Errorf("%w: invalid node-ip: invalid ip format '%s'", ErrConfig, c.NodeIP))
	}
	for name, cidr := range map[string]string{"cluster-cidr": c.ClusterCIDR, "service-cidr": c.ServiceCIDR} {
		if _, network, err := net.ParseCIDR(cidr); err != nil || network.IP.To4() == nil {
			errs = append(errs, fmt.Errorf("%w: invalid %s %s", ErrConfig, name, cidr))
		} else if name == "service-cidr" && c.ClusterDNS == "" {
			dns := slices.Clone(network.IP.To4())
			dns[3] += 10
			c.ClusterDNS = dns.String()
		}
	}
	if path := text("token-file", ""); path != "" && c.Token == "" {
		raw, err := os.ReadFile(path) // #nosec G304 -- named by root
		if err != nil {
			errs = append(errs, fmt.Errorf("reading the token: %w", err))
		}
		c.Token = strings.TrimSpace(string(raw))
	}
	for name := range said {
		if known[name].ignored {
			c.Ignored = append(c.Ignored, name)
		}
	}
	slices.Sort(c.Ignored)
	return c, errors.Join(errs...)
}

// disables tells whether a packaged component is switched off.
func (c Config) disables(component string) bool { return slices.Contains(c.Disable, component) }

// asFlags turns name=value into flags.
func asFlags(args []string) []string {
	flags := make([]string, len(args))
	for i, a := range args {
		flags[i] = "--" + strings.TrimLeft(a, "-")
	}
	return flags
}
