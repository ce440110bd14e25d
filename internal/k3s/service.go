package k3s

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/config"
)

// Init is how k3s is kept running.
type Init string

// The ways, as in the configuration.
const (
	Systemd    Init = config.InitSystemd
	OpenRC     Init = config.InitOpenRC
	Supervised Init = config.InitSupervised
)

const (
	// serviceDeadline bounds one call of the service manager. Starting is not waited for.
	serviceDeadline = 60 * time.Second
	// stopDeadline is more than k3s takes to stop: systemd's own is 90 seconds.
	stopDeadline = 100 * time.Second
	statePause   = 200 * time.Millisecond
)

// ServiceSpec is the service of k3s.
type ServiceSpec struct {
	Role Role
	// Binary is the program.
	Binary string
	// Hook is run before each start; none where empty. Its failure does not keep k3s from
	// starting.
	Hook []string
	// Mounts are directories whose file systems must be there first.
	Mounts []string
	// Log is the file that k3s writes to where no journal takes it.
	Log string
}

// Name is the service's name.
func (s ServiceSpec) Name() string {
	if s.Role == Agent {
		return "k3s-agent"
	}
	return "k3s"
}

func (s ServiceSpec) role() string { return string(cmp.Or(s.Role, Server)) }

func (s ServiceSpec) unitFile() string        { return "/etc/systemd/system/" + s.Name() + ".service" }
func (s ServiceSpec) environmentFile() string { return s.unitFile() + ".env" }
func (s ServiceSpec) scriptFile() string      { return "/etc/init.d/" + s.Name() }
func (s ServiceSpec) rotateFile() string      { return "/etc/logrotate.d/llmbox-" + s.Name() }

// envFile is where the environment lies, whatever starts k3s: doctor looks for it at
// the place that k3s's own installer gave it.
func (s ServiceSpec) envFile(init Init) string {
	if init == Systemd {
		return s.environmentFile()
	}
	return "/etc/rancher/k3s/" + s.Name() + ".env"
}

// ChooseInit settles what keeps k3s running: what was asked for, else what does so
// already, else what runs on this machine (sd_booted(3); OpenRC's own directory).
func (m *Machine) ChooseInit(ctx context.Context, asked string) (Init, error) {
	switch asked {
	case config.InitSystemd, config.InitOpenRC, config.InitSupervised:
		return Init(asked), nil
	case config.InitAuto, "":
	default:
		return "", fmt.Errorf("choosing what keeps k3s running: %q: %w", asked, ErrSetting)
	}
	r, err := m.Record(ctx)
	if err != nil {
		return "", err
	}
	if r.Init != "" {
		return r.Init, nil
	}
	if info, err := m.files.Stat(ctx, "/run/systemd/system"); err == nil && info.Mode.IsDir() {
		return Systemd, nil
	}
	if info, err := m.files.Stat(ctx, "/run/openrc"); err == nil && info.Mode.IsDir() {
		return OpenRC, nil
	}
	return Supervised, nil
}

// SystemdUnit is the unit. What is missing from it is missing on purpose: a mount
// namespace of its own (ProtectSystem, PrivateTmp, …) hides the volumes of pods from
// the host, every seccomp filter and NoNewPrivileges is inherited by each container,
// and a device policy takes the GPUs away.
func SystemdUnit(s ServiceSpec) string {
	var b strings.Builder
	b.WriteString(marker + ". It is written anew by each install: what you\n# want different belongs into " + s.unitFile() + ".d/*.conf.\n")
	b.WriteString("[Unit]\nDescription=Kubernetes (k3s " + s.role() + ") of llmbox\nDocumentation=https://docs.k3s.io\n")
	b.WriteString("Wants=network-online.target\n# The driver's services come first where they are, so that the first pod finds its GPU.\n")
	b.WriteString("After=network-online.target systemd-modules-load.service nvidia-persistenced.service nvidia-fabricmanager.service\n")
	if len(s.Mounts) > 0 {
		b.WriteString("# On a disk that is not mounted yet k3s would begin a new cluster.\nRequiresMountsFor=" + strings.Join(s.Mounts, " ") + "\n")
	}
	b.WriteString("\n[Service]\nType=notify\nEnvironmentFile=-" + s.environmentFile() + "\n")
	b.WriteString("ExecStartPre=-/sbin/modprobe br_netfilter\nExecStartPre=-/sbin/modprobe overlay\n")
	if len(s.Hook) > 0 {
		b.WriteString("ExecStartPre=-" + unitWords(s.Hook) + "\n")
	}
	b.WriteString("ExecStart=" + unitWords([]string{s.Binary, s.role()}) + "\n")
	b.WriteString("# Pods go on while k3s restarts.\nKillMode=process\nDelegate=yes\nOOMPolicy=continue\n")
	b.WriteString("Restart=always\nRestartSec=5s\nTimeoutStartSec=0\n")
	b.WriteString("LimitNOFILE=1048576\nLimitNPROC=infinity\nTasksMax=infinity\n")
	b.WriteString("# The core of an engine is as large as its model, and holds prompts and keys.\nLimitCORE=0\n")
	b.WriteString("\n[Install]\nWantedBy=multi-user.target\n")
	return b.String()
}

// unitWords writes a command line as systemd.service(5) reads it.
func unitWords(words []string) string {
	out := make([]string, 0, len(words))
	for _, w := range words {
		w = strings.NewReplacer("%", "%%", "$", "$$", `\`, `\\`, `"`, `\"`).Replace(w)
		if w == "" || strings.ContainsAny(w, " \t'\"\\;") {
			w = `"` + w + `"`
		}
		out = append(out, w)
	}
	return strings.Join(out, " ")
}

// OpenRCScript is the service for OpenRC (openrc-run(8), supervise-daemon(8)).
func OpenRCScript(s ServiceSpec) string {
	var b strings.Builder
	b.WriteString("#!/sbin/openrc-run\n" + marker + ". It is written anew by each install.\n\n")
	b.WriteString("name=" + quoted(s.Name()) + "\ndescription=" + quoted("Kubernetes (k3s "+s.role()+") of llmbox") + "\n")
	b.WriteString("supervisor=supervise-daemon\ncommand=" + quoted(s.Binary) + "\ncommand_args=" + quoted(s.role()) + "\n")
	b.WriteString("pidfile=" + quoted("/run/"+s.Name()+".pid") + "\nrespawn_delay=5\nrespawn_max=0\n")
	b.WriteString("output_log=" + quoted(s.Log) + "\nerror_log=" + quoted(s.Log) + "\nrc_ulimit='-n 1048576 -u unlimited -c 0'\n\n")
	b.WriteString("depend() {\n\tneed localmount\n\tafter net network-online\n\twant cgroups\n}\n\n")
	b.WriteString("start_pre() {\n\tmodprobe br_netfilter\n\tmodprobe overlay\n\tcheckpath --directory " + quoted(path.Dir(s.Log)) + "\n")
	if len(s.Hook) > 0 {
		words := make([]string, 0, len(s.Hook))
		for _, w := range s.Hook {
			words = append(words, quoted(w))
		}
		b.WriteString("\t" + strings.Join(words, " ") + "\n")
	}
	b.WriteString("\treturn 0\n}\n\n")
	b.WriteString("if [ -f " + quoted(s.envFile(OpenRC)) + " ]; then\n\tset -o allexport\n\t. " + quoted(s.envFile(OpenRC)) + "\n\tset +o allexport\nfi\n")
	return b.String()
}

// openRCRotation keeps the log small; supervise-daemon holds the file open.
func openRCRotation(s ServiceSpec) string {
	return marker + " for the log of k3s.\n" + s.Log + " {\n\tsize 20M\n\trotate 3\n\tmissingok\n\tnotifempty\n\tcopytruncate\n}\n"
}

func quoted(word string) string { return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'" }

// Environment is the content of the environment file; nil where k3s needs none. The
// node's own networks are reached directly: k3s adds those of pods and services
// itself, and what the box adds here is for whoever reads the file.
func Environment(s Settings) ([]byte, error) {
	values := map[string]string{}
	for _, pair := range s.ProxyEnvironment {
		name, value, _ := strings.Cut(pair, "=")
		switch name = strings.ToUpper(name); name {
		case "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY":
			values[name] = value
		}
	}
	p := s.Box.Network.Proxy
	if p.HTTP != "" {
		values["HTTP_PROXY"] = p.HTTP
	}
	if p.HTTPS != "" {
		values["HTTPS_PROXY"] = p.HTTPS
	}
	if values["HTTP_PROXY"] == "" && values["HTTPS_PROXY"] == "" {
		return nil, nil
	}
	exempt := []string{}
	add := func(list ...string) {
		for _, item := range list {
			if item = strings.TrimSpace(item); item != "" && !slices.Contains(exempt, item) {
				exempt = append(exempt, item)
			}
		}
	}
	add(strings.Split(values["NO_PROXY"], ",")...)
	add(p.NoProxy...)
	add("127.0.0.0/8", "localhost", ".svc", ".cluster.local", s.Box.Network.ClusterCIDR, s.Box.Network.ServiceCIDR)
	for _, a := range s.Facts.Addresses {
		if !virtual(a.Interface) && a.Prefix.Addr().Is4() && a.Prefix.Addr().IsGlobalUnicast() {
			add(a.Prefix.Masked().String())
		}
	}
	values["NO_PROXY"] = strings.Join(exempt, ",")
	out := marker + ". A proxy's password can stand here: the file is for root alone.\n"
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"} {
		value := values[name]
		if value == "" {
			continue
		}
		// Between single quotes systemd and a shell read the same.
		if strings.ContainsAny(value, "'\n\r\x00\\") {
			return nil, &Problem{What: "the value of " + name + " holds a quote, a backslash or a line break", Out: "Write such characters of a password as %XX", Err: ErrSetting}
		}
		if name != "NO_PROXY" {
			if at, err := url.Parse(value); err != nil || at.Host == "" {
				return nil, &Problem{What: "the value of " + name + " is no URL", Out: "Write it as http://HOST:PORT", Err: ErrSetting}
			}
		}
		out += name + "='" + value + "'\n"
	}
	return []byte(out), nil
}

// parseEnvironment reads what Environment wrote.
func parseEnvironment(data []byte) []string {
	var out []string
	for line := range strings.Lines(string(data)) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if ok && !strings.HasPrefix(name, "#") {
			out = append(out, name+"="+strings.Trim(value, "'"))
		}
	}
	return out
}

// ProcessState is how k3s stands as a process.
type ProcessState struct {
	// Running says that there is a process now.
	Running bool
	PID     int
	// Start with PID and the boot names the process for ever.
	Start uint64
	// Exits counts how often it ended by itself; -1 where nobody counts.
	Exits int
	// Detail is what its keeper says, such as "activating (auto-restart)".
	Detail string
}

// Service keeps k3s running. The calls can be repeated.
type Service interface {
	Init() Init
	// Files are those of the service; they change nothing until Load.
	Files() []File
	// Load makes the service manager read its files anew.
	Load(ctx context.Context) error
	// Enable makes k3s start at boot and says whether that is new.
	Enable(ctx context.Context) (bool, error)
	// Start begins to start k3s and does not wait until it is ready.
	Start(ctx context.Context) error
	// Restart stops it and starts it again; pods go on.
	Restart(ctx context.Context) error
	// Stop ends it, and has it stay ended.
	Stop(ctx context.Context) error
	// State says how it stands.
	State(ctx context.Context) (ProcessState, error)
	// Lines are the newest lines of its log since a time.
	Lines(ctx context.Context, since time.Time) ([]Line, error)
	// Remove has the service manager forget it; its files are removed by the caller.
	Remove(ctx context.Context) error
}

// ServiceOptions are what a supervised k3s needs beside the spec.
type ServiceOptions struct {
	// Supervisor is the command line by which llmbox becomes the supervisor; it ends up
	// in Supervise.
	Supervisor []string
}

// Service returns the service of a kind.
func (m *Machine) Service(init Init, spec ServiceSpec, o ServiceOptions) (Service, error) {
	if spec.Log == "" {
		spec.Log = m.logFile()
	}
	switch init {
	case Systemd:
		return &systemdService{machine: m, spec: spec}, nil
	case OpenRC:
		return &openRCService{machine: m, spec: spec}, nil
	case Supervised:
		return &supervisedService{machine: m, spec: spec, argv: o.Supervisor}, nil
	}
	return nil, fmt.Errorf("choosing what keeps k3s running: %q: %w", init, ErrSetting)
}

// settled waits until a service has a process, or has none.
func settled(ctx context.Context, s Service, running bool, deadline time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	for {
		state, err := s.State(ctx)
		if err == nil && state.Running == running {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("waiting for k3s to be %s: %w", map[bool]string{true: "started", false: "stopped"}[running], ctx.Err()), err)
		case <-time.After(statePause):
		}
	}
}

// processState completes a state by the number of its process.
func (m *Machine) processState(ctx context.Context, pid int, s ProcessState) ProcessState {
	if pid <= 0 {
		return s
	}
	data, present, err := m.read(ctx, fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil || !present {
		return s
	}
	p, err := parseStat(string(data))
	if err != nil || p.State == 'Z' || p.State == 'X' {
		return s
	}
	s.Running, s.PID, s.Start = true, pid, p.Start
	return s
}
