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
