package k3s

import (
	"context"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// Line is one line of the log of k3s.
type Line struct {
	Time time.Time
	// PID is the process that wrote it; 0 where the log doesn't say.
	PID  int
	Text string
	// Manager says that the service manager wrote it, not k3s.
	Manager bool
	// Before says that a program wrote it that runs before each start of k3s, such as
	// modprobe.
	Before bool
}

// level is how grave a line says it is.
type level int

const (
	debug level = iota
	info
	warning
	grave
	fatal
)

// message is a line taken apart.
type message struct {
	level level
	text  string
	at    time.Time
}

var (
	// logrusLine is how k3s itself writes: time="…" level=… msg="…".
	logrusLine = regexp.MustCompile(`^time="?([^" ]+)"? level=([a-z]+) msg=("(?:[^"\\]|\\.)*"|[^ ]+)`)
	// klogLine is how Kubernetes writes: Lmmdd hh:mm:ss.uuuuuu pid file:line] text.
	klogLine = regexp.MustCompile(`^([IWEF])[0-9]{4} [0-9:.]+ +[0-9]+ [^ \]]+:[0-9]+\] ?(.*)$`)
	// klogErr is the cause in a structured line of Kubernetes.
	klogErr = regexp.MustCompile(`^"((?:[^"\\]|\\.)*)"(?:.*? err="((?:[^"\\]|\\.)*)")?`)
	// joinToken is a token by which others join; userInfo a password in an URL.
	joinToken = regexp.MustCompile(`K10[0-9a-f]{16,}(::[^\s"']*)?`)
	userInfo  = regexp.MustCompile(`([a-z][a-z0-9+.-]*://)[^/\s:@"']+:[^/\s@"']+@`)
)

// messageLimit bounds what is shown of a line, in bytes.
const messageLimit = 300

// parseMessage takes a line apart.
func parseMessage(text string) message {
	text = strings.TrimSpace(strings.Map(func(r rune) rune {
		if r == '\t' {
			return ' '
		}
		if unicode.IsControl(r) {
			return -1
		}
		return r
	}, text))
	if m := logrusLine.FindStringSubmatch(text); m != nil {
		out := message{level: map[string]level{"trace": debug, "debug": debug, "info": info, "warning": warning, "warn": warning, "error": grave, "fatal": fatal, "panic": fatal}[m[2]], text: m[3]}
		if unquoted, err := strconv.Unquote(m[3]); err == nil {
			out.text = unquoted
		}
		if at, err := time.Parse(time.RFC3339Nano, m[1]); err == nil {
			out.at = at
		}
		return out
	}
	if m := klogLine.FindStringSubmatch(text); m != nil {
		out := message{level: map[string]level{"I": info, "W": warning, "E": grave, "F": fatal}[m[1]], text: m[2]}
		if s := klogErr.FindStringSubmatch(m[2]); s != nil {
			out.text = unescape(s[1])
			if s[2] != "" {
				out.text += ": " + unescape(s[2])
			}
		}
		return out
	}
	if strings.HasPrefix(text, "panic: ") || strings.HasPrefix(text, "fatal error: ") {
		return message{level: fatal, text: text}
	}
	return message{level: info, text: text}
}

func unescape(text string) string {
	if out, err := strconv.Unquote(`"` + text + `"`); err == nil {
		return out
	}
	return text
}

// shown is a message without secrets and not longer than a person wants to read.
func shown(text string) string {
	text = joinToken.ReplaceAllString(text, "(token)")
	text = userInfo.ReplaceAllString(text, "${1}(password)@")
	text = strings.Join(strings.Fields(strings.ToValidUTF8(text, "?")), " ")
	if len(text) > messageLimit {
		text = strings.TrimSpace(strings.ToValidUTF8(text[:messageLimit], "")) + "…"
	}
	return text
}

// noise says whether a line tells a person nothing about what is waited for.
func (m message) noise() bool {
	if m.level == debug || m.text == "" {
		return true
	}
	if m.level > info {
		return false
	}
	for _, start := range []string{
		"Module ", "Set sysctl ", "Trace[", "Running kube-", "Running cloud-controller", "Running kubelet", "Node token is available", "To join", "Wrote kubeconfig",
		"Run: k3s", "Adding ", "certificate CN=", "Handling backend connection", "Writing static file", "Applying CRD", "Using registry config", "Password verified",
		"Updating TLS secret", "Active TLS secret", "Connecting to proxy", "Remotedialer connected", "Starting /v1", "Starting apps/v1", "Starting batch/v1",
		"Starting helm.cattle.io", "Starting k3s.cattle.io", "Starting discovery.k8s.io", "Slow SQL", "goroutine ", "Found nvidia", "Acquiring lock file", "Preparing data dir",
		"Flag --", "Starting to listen", "Tunnel server", "Labels and annotations", "event", "Event", "COMPACT",
	} {
		if strings.HasPrefix(m.text, start) {
			return true
		}
	}
	return false
}

// newest is the last line that says something; of the final lines the gravest counts,
// for what follows a failure is the tidying up.
func newest(lines []Line) string {
	const near = 25
	best, seen := message{level: debug}, 0
	for i := len(lines) - 1; i >= 0 && seen < near; i-- {
		if lines[i].Manager {
			continue
		}
		m := parseMessage(lines[i].Text)
		if m.noise() {
			continue
		}
		seen++
		if best.level == debug || m.level == fatal && best.level < fatal {
			best = m
		}
		if m.level == fatal {
			break
		}
	}
	return shown(best.text)
}

// Failure is a known reason for which k3s does not come up.
type Failure struct {
	// Name is short and stable, such as "port-in-use".
	Name string `json:"name"`
	// Title is what is wrong; Fix what a person types.
	Title string `json:"title"`
	Fix   string `json:"fix"`
	// Line is where the log says so, without secrets.
	Line string `json:"line"`
}

// known is a row of the table of failures.
type known struct {
	name, title, fix string
	// all are texts that stand in the line; case does not matter.
	all []string
	// and is a further choice, one of which stands there, too.
	and []string
	// stops says that k3s ends with it, so that it counts even where the line is no
	// fatal one.
	stops bool
}

// failures are the known ones, the more specific first. Each has its report in
// k3s-io/k3s or kubernetes/kubernetes.
func failures() []known {
	return []known{
		{name: "port-in-use", title: "another program listens on a port of k3s", stops: true,
			fix: "Find it: sudo ss -lntp '( sport = :6443 or sport = :6444 or sport = :10250 )'; stop it, then run the command again",
			all: []string{"bind: address already in use"}},
		{name: "address-gone", title: "the machine no longer has the address that k3s was told to have", stops: true,
			fix: "See what it has: ip -4 address show. Then let llmbox find one (remove network.nodeIP) or name another: sudo llmbox install --set network.nodeIP=ADDRESS",
			all: []string{"not found in the host's network interfaces"}},
		{name: "address-gone", title: "the machine no longer has the address that k3s was told to have", stops: true,
			fix: "See what it has: ip -4 address show. Then let llmbox find one (remove network.nodeIP) or name another: sudo llmbox install --set network.nodeIP=ADDRESS",
			all: []string{"failed to find interface with specified node ip"}},
		{name: "address-unassignable", title: "an address that k3s listens on is not there", stops: true,
			fix: "Is the loopback interface up? sudo ip link set lo up",
			all: []string{"bind: cannot assign requested address"}},
		{name: "no-route", title: "there is no default route by which k3s would find its address", stops: true,
			fix: "Add one, or name the address: sudo llmbox install --set network.nodeIP=ADDRESS",
			all: []string{"no default routes found"}},
		{name: "wrong-token", title: "the data here belongs to a k3s with another token", stops: true,
			fix: "Put that token back into server/token of the data directory. Or, if nobody needs the old cluster: sudo llmbox uninstall, then install",
			all: []string{"encrypted with different token"}},
		{name: "wrong-token", title: "the token belongs to another server", stops: true,
			fix: "Make a new one on the server (sudo llmbox token create) and join with it",
			all: []string{"token ca hash does not match"}},
		{name: "wrong-token", title: "the token can't be read", stops: true,
			fix: "Take the whole token as the server shows it: sudo llmbox token create",
			all: []string{"failed to normalize token"}},
		{name: "cgroup-v1", title: "the kubelet refuses cgroup v1", stops: true,
			fix: "Boot with the unified hierarchy: add systemd.unified_cgroup_hierarchy=1 to the kernel's command line",
			all: []string{"kubelet is configured to not run on a host using cgroup v1"}},
		{name: "cgroup-missing", title: "the kernel lacks a control group that Kubernetes needs", stops: true,
			fix: "Boot with cgroup_enable=memory (and cgroup_memory=1 on a Raspberry Pi); look: cat /sys/fs/cgroup/cgroup.controllers",
			all: []string{"failed to find", "cgroup"}, and: []string{"memory cgroup", "cpuset cgroup", "pids cgroup", "cpu cgroup"}},
		{name: "cgroup-missing", title: "the kernel lacks a control group that Kubernetes needs", stops: true,
			fix: "Boot with cgroup_enable=memory (and cgroup_memory=1 on a Raspberry Pi); look: cat /sys/fs/cgroup/cgroup.controllers",
			all: []string{"cgroup controller not found"}},
		{name: "datastore-newer", title: "the data was written by a newer release", stops: true,
			fix: "Install that release again, or start anew: sudo llmbox uninstall",
			all: []string{"cannot be downgraded"}},
		{name: "datastore-older", title: "the datastore is older than the certificates beside it: an old copy was put back", stops: true,
			fix: "Keep a copy of the files that the line names, remove them, and run the command again: k3s makes them anew from the datastore",
			all: []string{"newer than datastore"}},
		{name: "datastore-broken", title: "the datastore is damaged", stops: true,
			fix: "Keep a copy of server/db in the data directory, then restore a backup or start anew: sudo llmbox uninstall",
			all: []string{"database disk image is malformed"}},
		{name: "datastore-broken", title: "the datastore is damaged", stops: true,
			fix: "Keep a copy of server/db in the data directory, then restore a backup or start anew: sudo llmbox uninstall",
			all: []string{"file is not a database"}},
		{name: "setting-changed", title: "a setting that is fixed at the first start now differs", stops: true,
			fix: "Put it back as it was: the line names it",
			all: []string{"critical configuration value mismatch"}},
		{name: "clock", title: "the clock is before the time at which the certificates were made",
			fix: "Set the clock: sudo timedatectl set-ntp true; then sudo systemctl restart k3s",
			all: []string{"x509: certificate has expired or is not yet valid", "is before"}},
		{name: "certificate-expired", title: "the certificates of k3s have expired",
			fix: "Renew them: sudo k3s certificate rotate; then sudo systemctl restart k3s. If the clock is wrong: sudo timedatectl set-ntp true",
			all: []string{"x509: certificate has expired"}},
		{name: "disk-full", title: "the disk is full", stops: true,
			fix: "See what takes it: sudo du -xh --max-depth=2 /var | sort -h | tail; free some, then run the command again",
			all: []string{"no space left on device"}},
		{name: "disk-read-only", title: "the data directory can't be written to", stops: true,
			fix: "Look why it is read-only: sudo dmesg | grep -i 'remount'; then sudo mount -o remount,rw its mount point",
			all: []string{"read-only file system"}},
		{name: "overlay", title: "the file system of the data directory carries no container images", stops: true,
			fix: "Put k3s's data on ext4 or xfs: sudo llmbox install --set k3s.dataDir=/MOUNTPOINT/k3s",
			all: []string{"snapshotter cannot be enabled"}},
		{name: "network-module", title: "the kernel lacks the module for the pods' network", stops: true,
			fix: "Install the kernel's further modules (Ubuntu: sudo apt install linux-modules-extra-$(uname -r)), then sudo modprobe vxlan br_netfilter",
			all: []string{"flannel exited", "operation not supported"}},
		{name: "selinux", title: "SELinux forbids k3s to run containers", stops: true,
			fix: "Install its policy: sudo dnf install k3s-selinux container-selinux",
			all: []string{"container_runtime_exec_t"}},
		{name: "kernel-settings", title: "the kernel is set otherwise than the kubelet wants it", stops: true,
			fix: "sudo sysctl --system; then run the command again",
			all: []string{"invalid kernel flag"}},
		{name: "inotify", title: "the limit of inotify instances is reached", stops: true,
			fix: "sudo sysctl -w fs.inotify.max_user_instances=8192",
			all: []string{"too many open files"}, and: []string{"inotify", "fsnotify", "watcher"}},
		{name: "duplicate-node", title: "the server knows a node of this name with another password",
			fix: "On the server: sudo k3s kubectl delete node NAME. Or take another name: --set k3s.nodeName=NAME",
			all: []string{"node password rejected"}},
		{name: "bad-argument", title: "k3s knows no such option", stops: true,
			fix: "Look into k3s.extraArgs and " + DropInDir + "; the options: k3s server --help",
			all: []string{"flag provided but not defined"}},
		{name: "bad-config", title: "a configuration file of k3s can't be read", stops: true,
			fix: "Look into " + ConfigDir + "; the line says where",
			all: []string{"yaml: "}, and: []string{"line ", "unmarshal"}},
		{name: "bad-kubelet-config", title: "the kubelet's configuration can't be read", stops: true,
			fix: "Look into " + KubeletFile + " and agent/etc/kubelet.conf.d of the data directory",
			all: []string{"failed to load kubelet config"}},
		{name: "runtime-handler", title: "containerd does not start with its configuration", stops: true,
			fix: "Move the template away: sudo mv /var/lib/rancher/k3s/agent/etc/containerd/*.tmpl /root/; then run the command again",
			all: []string{"failed to load toml"}},
		{name: "memory", title: "the kernel ended k3s for want of memory", stops: true,
			fix: "Free some memory: ps aux --sort=-rss | head; then run the command again",
			all: []string{"k3s", "oom-kill"}},
	}
}

// Recognise finds the known failure that a line tells of.
func Recognise(line string) (Failure, bool) {
	return recognise(failures(), parseMessage(line))
}

func recognise(table []known, m message) (Failure, bool) {
	lower := strings.ToLower(m.text)
	has := func(part string) bool { return strings.Contains(lower, part) }
	for _, k := range table {
		found := true
		for _, part := range k.all {
			found = found && has(part)
		}
		if found && len(k.and) > 0 {
			found = false
			for _, part := range k.and {
				found = found || has(part)
			}
		}
		if found && (m.level >= grave || k.stops) {
			return Failure{Name: k.name, Title: k.title, Fix: k.fix, Line: shown(m.text)}, true
		}
	}
	return Failure{}, false
}

// LogVerdict is what the log of k3s says.
type LogVerdict struct {
	// Message is its last line that says something.
	Message string
	// Failure is the last known one of the present run, or of the one before where the
	// present run has said nothing yet; nil for none.
	Failure *Failure
	// Same counts how many of the last runs ended in a row for the same reason.
	Same int
	// Ended counts the runs that ended.
	Ended int
}

// early is how many lines a run may have written and still tell nothing about whether
// it will end like the one before.
const early = 40

// JudgeLog reads the lines of a log, oldest first. A run of k3s begins where it says
// that it starts, or where another process goes on writing.
func JudgeLog(lines []Line) LogVerdict {
	table := failures()
	runs := splitRuns(lines)
	verdict := LogVerdict{Message: newest(lines)}
	reason := ""
	for i, r := range runs {
		last := i == len(runs)-1
		failure := r.failure(table)
		if failure != nil || !last || len(r.lines) > early {
			verdict.Failure = failure
		}
		if last && !r.ended {
			break
		}
		verdict.Ended++
		why := r.last()
		if failure != nil {
			why = failure.Name
		}
		if why != "" && why == reason {
			verdict.Same++
		} else {
			verdict.Same = 1
		}
		reason = why
		if why == "" {
			verdict.Same = 0
		}
	}
	return verdict
}

// runOf is one life of k3s.
type runOf struct {
	lines []message
	ended bool
	// begun says that k3s itself has said something.
	begun bool
}

func splitRuns(lines []Line) []runOf {
	var runs []runOf
	pid := 0
	at := func() *runOf {
		if len(runs) == 0 {
			runs = append(runs, runOf{})
		}
		return &runs[len(runs)-1]
	}
	for _, line := range lines {
		m := parseMessage(line.Text)
		switch {
		case line.Manager:
			// Where it is a program before k3s that fails, it is the control process.
			if (strings.Contains(line.Text, "Main process exited") || strings.Contains(line.Text, "Control process exited")) && len(runs) > 0 {
				at().ended = true
			}
			continue
		case strings.HasPrefix(m.text, exitMark):
			at().ended = true
			continue
		}
		if line.Before {
			if len(runs) > 0 && (at().ended || at().begun) {
				at().ended = true
				runs = append(runs, runOf{})
			}
			at().lines = append(at().lines, m)
			continue
		}
		if len(runs) > 0 && !at().ended && !at().begun {
			pid = line.PID
		}
		starts := strings.HasPrefix(m.text, "Starting k3s v") || strings.HasPrefix(m.text, "Starting k3s agent v")
		other := line.PID != 0 && pid != 0 && line.PID != pid
		if len(runs) > 0 && (starts && at().begun || other && at().ended) {
			at().ended = true
			runs = append(runs, runOf{})
		} else if len(runs) > 0 && at().ended {
			runs = append(runs, runOf{})
		}
		if line.PID != 0 {
			pid = line.PID
		}
		run := at()
		run.begun = true
		run.lines = append(run.lines, m)
	}
	return runs
}

// failure is the last known one of the run; a fatal line decides over all.
func (r runOf) failure(table []known) *Failure {
	var best *Failure
	for _, m := range r.lines {
		if f, ok := recognise(table, m); ok {
			best = &f
		}
	}
	return best
}

// digits are what differs between two lines that say the same.
var digits = regexp.MustCompile(`[0-9a-f]*[0-9][0-9a-f]*`)

// last is the fatal line with which the run ended, without what differs from run to
// run; empty where it has none.
func (r runOf) last() string {
	for i := len(r.lines) - 1; i >= 0; i-- {
		if r.lines[i].level == fatal {
			return digits.ReplaceAllString(r.lines[i].text, "#")
		}
	}
	return ""
}

// logLines reads the end of a log file.
func (m *Machine) logLines(ctx context.Context, name string, since time.Time) ([]Line, error) {
	data, err := m.files.ReadTail(ctx, name, logTail)
	if err != nil {
		if absent(err) {
			return nil, nil
		}
		return nil, err
	}
	return parseLog(string(data), since), nil
}

// parseLog takes the lines of a file from the first one on that is not older than
// since. Only k3s's own lines have a whole time; what is between them goes with them.
func parseLog(text string, since time.Time) []Line {
	var out []Line
	begun := since.IsZero()
	for raw := range strings.Lines(text) {
		raw = strings.TrimRight(raw, "\n")
		at := parseMessage(raw).at
		if !begun && !at.IsZero() && !at.Before(since.Truncate(time.Second)) {
			begun = true
		}
		if begun && raw != "" {
			out = append(out, Line{Time: at, Text: raw})
		}
	}
	return out
}
