// Package config reads what a person wants of a box and settles it: the file, the
// environment, flags, the choices of the last run and the defaults become one
// validated Box in which every value knows where it came from.
//
// It judges the configuration alone. It must not know the machine, the cluster,
// the component table (known names are handed in) or how anything is printed, and
// it never holds a secret: only the paths of files that do.
package config

// The version and kind every configuration file states.
const (
	APIVersion = "llmbox.dev/v1alpha1"
	Kind       = "Box"
)

// DefaultPath is the configuration file that is read when none is named.
const DefaultPath = "/etc/llmbox/config.yaml"

// What llmbox does about a component.
const (
	// ModeInstall installs the component and waits until it is ready.
	ModeInstall = "install"
	// ModeExternal takes the one that is there and only checks that it is ready.
	ModeExternal = "external"
	// ModeOff leaves the component out.
	ModeOff = "off"
)

// How charts reach the cluster.
const (
	// EngineAuto takes what suits the cluster.
	EngineAuto = "auto"
	// EngineHelm installs releases from within llmbox.
	EngineHelm = "helm"
	// EngineHelmChart hands HelmChart objects to k3s's own controller.
	EngineHelmChart = "helmchart"
)

// How k3s is kept running.
const (
	InitAuto       = "auto"
	InitSystemd    = "systemd"
	InitOpenRC     = "openrc"
	InitSupervised = "supervised"
)

// What may be given up for a sooner start; package model says what each means.
const (
	FastStartOff    = "off"
	FastStartAuto   = "auto"
	FastStartGraphs = "graphs"
	FastStartEager  = "eager"
)

// SourceHub is the model.source that means the Hugging Face hub.
const SourceHub = "hub"

// ProfileCore is the set of components every box has.
const ProfileCore = "core"

// Box is the whole configuration. The comment of each field is its text in the
// reference; the box tag says what holds for it over time:
//
//	record     a default is kept for the next run, like any explicit choice is
//	norecord   never kept: the value belongs to one run
//	immutable  fixed by the first install
type Box struct {
	// Version of this format, always `llmbox.dev/v1alpha1`.
	APIVersion string `yaml:"apiVersion" box:"norecord"`
	// Kind of document, always `Box`.
	Kind string `yaml:"kind" box:"norecord"`
	// The model that is served.
	Model Model `yaml:"model"`
	// The one door to the outside.
	Gateway Gateway `yaml:"gateway"`
	// What is done about each component, by its name.
	Components map[string]Component `yaml:"components"`
	// The sets of components to install; `core` is always one of them.
	Profiles []string `yaml:"profiles" box:"record"`
	// How charts are installed: `auto`, `helm` (from within llmbox) or `helmchart` (by k3s's own controller).
	Engine string `yaml:"engine" box:"record"`
	// Facts about the GPUs, for where they can't be read from the machine.
	GPU GPU `yaml:"gpu"`
	// The Kubernetes distribution under it all.
	K3s K3s `yaml:"k3s"`
	// Addresses, and the way to the internet.
	Network Network `yaml:"network"`
	// Where llmbox keeps its files.
	Paths Paths `yaml:"paths"`
	// Where container images come from.
	Registries Registries `yaml:"registries"`
	// Files that hold secrets. A secret itself never stands in the configuration.
	Secrets Secrets `yaml:"secrets"`
}

// Model says what is served.
type Model struct {
	// Hugging Face name (`org/name`) or the absolute path of a directory in that layout. Without one the best open model that fits the GPUs is taken.
	Name string `yaml:"name" box:"record"`
	// Branch, tag or commit of the model repository. Without one the commit found at install is kept.
	Revision string `yaml:"revision" box:"record"`
	// Longest prompt and answer together, in tokens; 0 takes what fits.
	ContextTokens int `yaml:"contextTokens" box:"record"`
	// What may be given up for a sooner start of the model server: `off` (nothing), `graphs` (CUDA graphs for small batches only), `eager` (no compilation and no graphs) or `auto` (eager where that costs little, else graphs).
	FastStart string `yaml:"fastStart" box:"record"`
	// Name by which clients ask for the model; without one it is the model's own name.
	ServedName string `yaml:"servedName" box:"record"`
	// Where the weights come from: `hub`, the absolute path of a directory, or the https URL of a mirror of the hub.
	Source string `yaml:"source" box:"record"`
	// Further arguments for vLLM, one a list entry. What llmbox sets itself (address, port, names, keys) is refused.
	ExtraArgs []string `yaml:"extraArgs"`
}

// Gateway is where clients arrive.
type Gateway struct {
	// TCP port on the node's address.
	Port int `yaml:"port" box:"record"`
	// Encryption at the gateway.
	TLS TLS `yaml:"tls"`
	// Protection against one client taking everything.
	RateLimit RateLimit `yaml:"rateLimit"`
}

// TLS at the gateway.
type TLS struct {
	// Serve https instead of http, with the certificate in `existingSecret`.
	Enabled bool `yaml:"enabled" box:"record"`
	// Name of a kubernetes.io/tls Secret in the gateway's namespace.
	ExistingSecret string `yaml:"existingSecret" box:"record"`
}

// RateLimit at the gateway.
type RateLimit struct {
	// Requests a minute the gateway lets through; 0 sets no limit.
	RequestsPerMinute int `yaml:"requestsPerMinute"`
}

// Component says what is done about one component.
type Component struct {
	// `install` (the default), `external` (use the one that is there, only check it) or `off`.
	Mode string `yaml:"mode"`
	// Chart that takes the place of the embedded one: absolute path of a directory or .tgz, `oci://` reference, or a name in `repository`.
	Chart string `yaml:"chart"`
	// https URL of the chart repository that `chart` is a name in.
	Repository string `yaml:"repository"`
	// Exact version of `chart`; needed with `oci://` and with `repository`.
	Version string `yaml:"version"`
	// Values for the chart; they win over what llmbox computes. Never a secret: name an existing Secret.
	Values map[string]any `yaml:"values"`
}

// GPU holds facts stated by the user.
type GPU struct {
	// Product key, such as `a10`, `l4`, `a100-80` or `h100`.
	Product string `yaml:"product"`
	// Number of GPUs; 0 reads it from the machine.
	Count int `yaml:"count"`
}

// K3s is the Kubernetes distribution.
type K3s struct {
	// Release such as `v1.36.4+k3s1`; without one it is the release this llmbox was built for.
	Version string `yaml:"version"`
	// Absolute path of a k3s binary to use instead of a download.
	BinaryPath string `yaml:"binaryPath" box:"norecord"`
	// k3s's own data directory.
	DataDir string `yaml:"dataDir" box:"record,immutable"`
	// Name of the node; without one it is the host's name at install. Volumes are pinned to it.
	NodeName string `yaml:"nodeName" box:"record,immutable"`
	// How k3s is kept running: `auto`, `systemd`, `openrc` or `supervised` (a child process of llmbox).
	Init string `yaml:"init" box:"record"`
	// Further host names and addresses for the API server's certificate.
	TLSNames []string `yaml:"tlsNames"`
	// Further arguments for the k3s server, one a list entry. What has a key of its own here is refused.
	ExtraArgs []string `yaml:"extraArgs"`
}

// Network holds addresses and the way out.
type Network struct {
	// Range pods get their addresses from (IPv4).
	ClusterCIDR string `yaml:"clusterCIDR" box:"record,immutable"`
	// Range services get their addresses from (IPv4).
	ServiceCIDR string `yaml:"serviceCIDR" box:"record,immutable"`
	// The node's own address; without one it is found at each start.
	NodeIP string `yaml:"nodeIP"`
	// HTTP proxy for downloads and image pulls. A proxy with a password is given by HTTPS_PROXY in the environment instead.
	Proxy Proxy `yaml:"proxy"`
	// Absolute path of a PEM file with further certificate authorities to trust for downloads.
	CAFile string `yaml:"caFile"`
}

// Proxy is the way out of a closed network.
type Proxy struct {
	// Proxy URL for http.
	HTTP string `yaml:"http"`
	// Proxy URL for https.
	HTTPS string `yaml:"https"`
	// Hosts, domains and ranges reached directly. The box's own ranges and `.svc` are always added.
	NoProxy []string `yaml:"noProxy"`
}

// Paths are llmbox's own directories.
type Paths struct {
	// State, credentials and model weights.
	Data string `yaml:"data" box:"record,immutable"`
	// Logs of runs.
	Log string `yaml:"log" box:"record"`
}

// Registries says where images come from.
type Registries struct {
	// Mirrors by registry host, such as `docker.io`.
	Mirrors map[string]Mirror `yaml:"mirrors"`
}

// Mirror stands in for one registry.
type Mirror struct {
	// URLs that are tried in order before the registry itself.
	Endpoints []string `yaml:"endpoints"`
}

// Secrets names files.
type Secrets struct {
	// Absolute path of a file with a Hugging Face token, for models behind a licence.
	HFTokenFile string `yaml:"hfTokenFile" box:"norecord"`
	// Absolute path of a registry credentials file in Docker's config.json form.
	RegistryAuthFile string `yaml:"registryAuthFile" box:"norecord"`
}

// defaultBox holds the values that don't depend on anything.
func defaultBox() Box {
	return Box{
		APIVersion: APIVersion,
		Kind:       Kind,
		Model:      Model{FastStart: FastStartOff, Source: SourceHub},
		Gateway:    Gateway{Port: 8080},
		Profiles:   []string{ProfileCore},
		Engine:     EngineAuto,
		K3s:        K3s{DataDir: "/var/lib/rancher/k3s", Init: InitAuto},
		Network:    Network{ClusterCIDR: "10.42.0.0/16", ServiceCIDR: "10.43.0.0/16"},
		Paths:      Paths{Data: "/var/lib/llmbox", Log: "/var/log/llmbox"},
	}
}

// Mode says what is done about a component: installed, unless something else was
// asked for.
func (b Box) Mode(component string) string {
	if mode := b.Components[component].Mode; mode != "" {
		return mode
	}
	return ModeInstall
}
