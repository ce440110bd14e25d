package snapshot

import "time"

// The names of the probes, each kept as probes/NAME.json.
const (
	// ProbeSystem is a System.
	ProbeSystem = "system"
	// ProbeDisks is a list of Disk.
	ProbeDisks = "disks"
	// ProbeListeners is a list of Listener.
	ProbeListeners = "listeners"
	// ProbeLocks is a list of Lock.
	ProbeLocks = "locks"
	// ProbeFsync is a list of Fsync.
	ProbeFsync = "fsync"
	// ProbeDNS is a list of DNS.
	ProbeDNS = "dns"
	// ProbeHTTPS is a list of HTTPS.
	ProbeHTTPS = "https"
	// ProbeClock is a Clock.
	ProbeClock = "clock"
	// ProbeInterfaces is a list of Interface.
	ProbeInterfaces = "interfaces"
)

// System is what uname, sysinfo and the collector's own process say.
type System struct {
	// Machine is uname -m, such as "x86_64"; Kernel is uname -r.
	Machine string `json:"machine"`
	Kernel  string `json:"kernel"`
	// Hostname is the name the kernel has.
	Hostname string `json:"hostname"`
	UID      int    `json:"uid"`
	// CPUs is the number of processors this process may use.
	CPUs int `json:"cpus"`
	// MemoryBytes is MemTotal; LimitBytes the tightest cgroup limit, 0 for none.
	MemoryBytes uint64 `json:"memory_bytes"`
	LimitBytes  uint64 `json:"limit_bytes,omitempty"`
}

// Disk is the file system that holds a path. Path is what was asked for; where it
// does not exist yet, the nearest directory above it was measured.
type Disk struct {
	Path       string   `json:"path"`
	MountPoint string   `json:"mount_point"`
	Device     string   `json:"device"`
	Type       string   `json:"type"`
	Options    []string `json:"options"`
	TotalBytes uint64   `json:"total_bytes"`
	// AvailableBytes is what a process without privileges may still write.
	AvailableBytes uint64 `json:"available_bytes"`
	Inodes         uint64 `json:"inodes"`
	InodesFree     uint64 `json:"inodes_free"`
	// Error says why this one could not be measured; the figures are then zero.
	Error string `json:"error,omitempty"`
}

// Listener is a socket that accepts connections (or a bound UDP one).
type Listener struct {
	// Protocol is "tcp" or "udp".
	Protocol string `json:"protocol"`
	Address  string `json:"address"`
	Port     int    `json:"port"`
	// PID and Process are zero where they could not be seen.
	PID     int    `json:"pid,omitempty"`
	Process string `json:"process,omitempty"`
	// Parents are the names of the processes that started it, the nearest first, without
	// process 1.
	Parents []string `json:"parents,omitempty"`
}

// Lock is a lock file of a package manager and who holds it.
type Lock struct {
	Path    string `json:"path"`
	Held    bool   `json:"held"`
	PID     int    `json:"pid,omitempty"`
	Process string `json:"process,omitempty"`
	// Error says why nobody can tell whether it is held.
	Error string `json:"error,omitempty"`
}

// Fsync is how long a write took to reach the disk.
type Fsync struct {
	Path          string  `json:"path"`
	Writes        int     `json:"writes"`
	P50Milli      float64 `json:"p50_ms"`
	P99Milli      float64 `json:"p99_ms"`
	BytesPerWrite int     `json:"bytes_per_write"`
}

// DNS is one name asked for.
type DNS struct {
	Name      string   `json:"name"`
	Addresses []string `json:"addresses,omitempty"`
	Error     string   `json:"error,omitempty"`
	ElapsedMS int64    `json:"elapsed_ms"`
}

// HTTPS is one host asked over TLS.
type HTTPS struct {
	URL string `json:"url"`
	// Proxy is the proxy that was used, without its password.
	Proxy  string `json:"proxy,omitempty"`
	Status int    `json:"status,omitempty"`
	// Issuer is the issuer of the certificate at the end of the chain as received.
	Issuer string `json:"issuer,omitempty"`
	// Stage is where it stopped: "dns", "connect", "tls", "http"; empty when it answered.
	Stage     string `json:"stage,omitempty"`
	Error     string `json:"error,omitempty"`
	ElapsedMS int64  `json:"elapsed_ms"`
}

// Clock compares this machine's time with the Date of those who answered.
type Clock struct {
	Local time.Time `json:"local"`
	// OffsetSeconds is the other's time minus ours; nil where nobody answered.
	OffsetSeconds *float64 `json:"offset_seconds,omitempty"`
	Reference     string   `json:"reference,omitempty"`
	// Synchronized is what the kernel says of its clock (adjtimex(2)); nil where it
	// does not say.
	Synchronized *bool `json:"synchronized,omitempty"`
}

// Interface is a network interface with its addresses in CIDR form.
type Interface struct {
	Name      string   `json:"name"`
	MTU       int      `json:"mtu"`
	Up        bool     `json:"up"`
	Addresses []string `json:"addresses,omitempty"`
}

// The names of the probes that only an installed box is asked.
const (
	// ProbeAPI is an APIProbe.
	ProbeAPI = "api"
	// ProbeEndpoint is an EndpointProbe.
	ProbeEndpoint = "endpoint"
	// ProbeDials is a list of Dial.
	ProbeDials = "dials"
	// ProbeClusterDNS is a list of DNS, asked of the cluster's own server.
	ProbeClusterDNS = "cluster-dns"
	// ProbeCertificates is a list of Certificate.
	ProbeCertificates = "certificates"
	// ProbeVault is a VaultProbe.
	ProbeVault = "vault"
	// ProbeModel is a ModelProbe.
	ProbeModel = "model"
	// ProbePodDevices is a list of PodDevices.
	ProbePodDevices = "pod-devices"
	// ProbeService is a Service.
	ProbeService = "service"
)

// APIProbe is the API server asked for its version.
type APIProbe struct {
	Server    string `json:"server"`
	Version   string `json:"version,omitempty"`
	Error     string `json:"error,omitempty"`
	ElapsedMS int64  `json:"elapsed_ms"`
}

// EndpointProbe is the box asked for one token, the way a client asks.
type EndpointProbe struct {
	URL string `json:"url"`
	// Status is the HTTP status; 0 where there was no answer.
	Status int `json:"status,omitempty"`
	// WithKey says whether a key of the box was sent.
	WithKey bool   `json:"with_key"`
	Model   string `json:"model,omitempty"`
	Tokens  int    `json:"tokens,omitempty"`
	// Unauthorized is the status without a key; a box must not answer 200 there.
	Unauthorized int `json:"status_without_key,omitempty"`
	// Stage is where it stopped: "address", "connect", "tls", "http", "stream"; empty
	// when a token came.
	Stage     string `json:"stage,omitempty"`
	Error     string `json:"error,omitempty"`
	ElapsedMS int64  `json:"elapsed_ms"`
}

// Dial is one TCP connection that was tried.
type Dial struct {
	// What names the other side, such as "kubernetes service".
	What      string `json:"what"`
	Address   string `json:"address"`
	Error     string `json:"error,omitempty"`
	ElapsedMS int64  `json:"elapsed_ms"`
}

// Certificate is what a certificate says of itself; no key is read.
type Certificate struct {
	// Place is a file of the host, or "secret NAMESPACE/NAME".
	Place    string    `json:"place"`
	Subject  string    `json:"subject"`
	Issuer   string    `json:"issuer,omitempty"`
	NotAfter time.Time `json:"not_after"`
	// NotBefore matters where a clock is wrong.
	NotBefore time.Time `json:"not_before,omitzero"`
	Error     string    `json:"error,omitempty"`
}

// VaultProbe is Vault's own word on its seal.
type VaultProbe struct {
	Initialized bool   `json:"initialized"`
	Sealed      bool   `json:"sealed"`
	Version     string `json:"version,omitempty"`
	Status      int    `json:"status,omitempty"`
	Error       string `json:"error,omitempty"`
}

// ModelProbe is the model server's own figures.
type ModelProbe struct {
	// Health is the status of /health, 0 for no answer.
	Health int `json:"health,omitempty"`
	// Running and Waiting are requests in the engine and before it.
	Running float64 `json:"requests_running"`
	Waiting float64 `json:"requests_waiting"`
	// CacheUsage is the share of the KV cache in use, 0 to 1.
	CacheUsage float64 `json:"kv_cache_usage"`
	// WaitedSeconds is how long none was running while some were waiting.
	WaitedSeconds float64 `json:"stalled_seconds,omitempty"`
	Error         string  `json:"error,omitempty"`
}

// Service is what llmbox chose to keep k3s running with, and, where that is llmbox itself,
// how it is with it: no service manager is there to be asked.
type Service struct {
	// Init is "systemd", "openrc" or "supervised".
	Init string `json:"init,omitempty"`
	// Supervisor and K3s say whether those processes are there, as far as they were
	// started since the machine booted.
	Supervisor bool `json:"supervisor"`
	K3s        bool `json:"k3s"`
	// PID is k3s's, SupervisorPID its supervisor's; 0 where it is not there.
	PID           int `json:"pid,omitempty"`
	SupervisorPID int `json:"supervisor_pid,omitempty"`
	// Exits counts how often k3s ended by itself, Last says how it did so last.
	Exits int    `json:"exits,omitempty"`
	Last  string `json:"last,omitempty"`
}

// PodDevices is what a running container of a pod may use of the GPU, by the rules of
// its control group and by its own library.
type PodDevices struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container,omitempty"`
	// NVML is how nvidia-smi ended inside: "ok", or its words.
	NVML  string `json:"nvml,omitempty"`
	Error string `json:"error,omitempty"`
}
