package k3s

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func logLine(level, text string) string {
	return fmt.Sprintf("time=%q level=%s msg=%q", "2026-11-30T12:00:05Z", level, text)
}

// TestKnownFailures has a line for each known failure, as k3s and Kubernetes write it,
// and lines that are none.
func TestKnownFailures(t *testing.T) {
	seen := map[string]bool{}
	for _, test := range []struct{ line, want string }{
		{logLine("fatal", "starting kubernetes: preparing server: listen tcp 127.0.0.1:6444: bind: address already in use"), "port-in-use"},
		{`E1130 12:00:05.123456    4242 server.go:123] "Failed to listen" err="listen tcp 0.0.0.0:10250: bind: address already in use"`, "port-in-use"},
		{`E1130 12:00:05.123456    4242 kubelet_node_status.go:700] "Failed to set some node status fields" err="failed to validate nodeIP: node IP: \"10.0.0.5\" not found in the host's network interfaces" node="gpu-box"`, "address-gone"},
		{logLine("fatal", "Failed to start networking: unable to initialize network policy controller: error getting node subnet: failed to find interface with specified node ip"), "address-gone"},
		{logLine("fatal", "listen tcp 127.0.0.1:6444: bind: cannot assign requested address"), "address-unassignable"},
		{logLine("fatal", "no default routes found in \"/proc/net/route\" or \"/proc/net/ipv6_route\""), "no-route"},
		{logLine("fatal", "starting kubernetes: preparing server: bootstrap data already found and encrypted with different token"), "wrong-token"},
		{logLine("error", "token CA hash does not match the Cluster CA certificate hash: 1 != 2"), "wrong-token"},
		{logLine("fatal", "starting kubernetes: preparing server: failed to normalize server token; must be in format K10<CA-HASH>::<USERNAME>:<PASSWORD> or <PASSWORD>"), ""},
		{logLine("fatal", "starting kubernetes: preparing server: failed to normalize token; must be in format"), "wrong-token"},
		{`E1130 12:00:05.123456    4242 run.go:72] "command failed" err="failed to run Kubelet: kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported"`, "cgroup-v1"},
		{logLine("fatal", "failed to find memory cgroup (v2)"), "cgroup-missing"},
		{logLine("fatal", "kubelet exited: pids cgroup controller not found"), "cgroup-missing"},
		{logLine("fatal", "etcdserver: cluster cannot be downgraded (current version: 3.5.0 is lower than determined cluster version: 3.6)"), "datastore-newer"},
		{logLine("fatal", "/var/lib/rancher/k3s/server/tls/server-ca.crt, /var/lib/rancher/k3s/server/cred/ipsec.psk newer than datastore and could cause a cluster outage. Remove the file(s) from disk and restart to be recreated from datastore."), "datastore-older"},
		{logLine("fatal", "starting kubernetes: preparing server: creating storage endpoint: building kine: database disk image is malformed"), "datastore-broken"},
		{logLine("fatal", "building kine: file is not a database"), "datastore-broken"},
		{logLine("fatal", "starting kubernetes: preparing server: failed to validate server configuration: critical configuration value mismatch between servers"), "setting-changed"},
		{`E1130 12:00:05.123456    4242 x.go:1] "Unable to authenticate" err="x509: certificate has expired or is not yet valid: current time 2020-01-01T00:00:00Z is before 2026-11-30T11:00:00Z"`, "clock"},
		{`E1130 12:00:05.123456    4242 x.go:1] "Unable to authenticate" err="x509: certificate has expired or is not yet valid: current time 2028-01-01T00:00:00Z is after 2027-11-30T11:00:00Z"`, "certificate-expired"},
		{logLine("fatal", "error extracting tarball into /var/lib/rancher/k3s/data: write /var/lib/rancher/k3s/data/x: no space left on device"), "disk-full"},
		{logLine("fatal", "mkdir /var/lib/rancher/k3s: read-only file system"), "disk-read-only"},
		{logLine("fatal", `"overlayfs" snapshotter cannot be enabled for "/var/lib/rancher/k3s/agent/containerd", try using "fuse-overlayfs" or "native"`), "overlay"},
		{logLine("fatal", "flannel exited: operation not supported"), "network-module"},
		{logLine("fatal", "Failed to apply container_runtime_exec_t to /usr/local/bin/k3s, please install k3s-selinux"), "selinux"},
		{`E1130 12:00:05.123456    4242 kubelet.go:1] "Failed to start ContainerManager" err="[invalid kernel flag: vm/overcommit_memory, expected value: 1, actual value: 0]"`, "kernel-settings"},
		{logLine("error", "failed to create fsnotify watcher: too many open files"), "inotify"},
		{logLine("error", "Node password rejected, duplicate hostname or contents of '/etc/rancher/node/password' may not match server node-passwd entry"), "duplicate-node"},
		{"flag provided but not defined: -kubelet-args", "bad-argument"},
		{logLine("fatal", "yaml: line 3: found character that cannot start any token"), "bad-config"},
		{`E1130 12:00:05.123456    4242 run.go:72] "command failed" err="failed to load kubelet config file, path: , error: strict decoding error"`, "bad-kubelet-config"},
		{logLine("error", "containerd exited: failed to load TOML: /var/lib/rancher/k3s/agent/etc/containerd/config.toml"), "runtime-handler"},
		// What only sounds like it.
		{logLine("info", "Node password rejected earlier, retrying"), ""},
		{logLine("info", "Starting k3s v1.36.4+k3s1 (0123abcd)"), ""},
		{logLine("warning", "failed to find a thing in the cgroup"), ""},
		{logLine("info", "certificate CN=x signed by CN=y: notBefore=1 notAfter=2"), ""},
		{`I1130 12:00:05.123456    4242 x.go:1] "too many open files were not seen"`, ""},
		{"", ""},
	} {
		f, ok := Recognise(test.line)
		if f.Name != test.want || ok != (test.want != "") {
			t.Errorf("%s\n\tis %q, want %q", test.line, f.Name, test.want)
		}
		if ok && (f.Title == "" || f.Fix == "" || f.Line == "") {
			t.Errorf("%s: %+v", test.want, f)
		}
		seen[f.Name] = true
	}
	for _, k := range failures() {
		if !seen[k.name] && k.name != "memory" {
			t.Errorf("no line shows %s", k.name)
		}
	}
}

func manyRuns(ends ...string) []Line {
	var out []Line
	for i, end := range ends {
		pid := 100 + i
		out = append(out, Line{PID: 1, Manager: true, Text: "Starting Kubernetes (k3s server) of llmbox..."},
			Line{PID: pid, Text: logLine("info", "Starting k3s v1.36.4+k3s1 (0123abcd)")},
			Line{PID: pid, Text: logLine("info", "Configuring sqlite3 database connection pooling: maxIdleConns=2")})
		if end != "" {
			out = append(out, Line{PID: pid, Text: end}, Line{PID: 1, Manager: true, Text: "k3s.service: Main process exited, code=exited, status=1/FAILURE"})
		}
	}
	return out
}

func TestLogOfManyRuns(t *testing.T) {
	port := logLine("fatal", "listen tcp 127.0.0.1:6444: bind: address already in use")
	unknown := func(n int) string { return logLine("fatal", fmt.Sprintf("strange thing %d at 0x%x", n, n)) }
	for name, test := range map[string]struct {
		lines   []Line
		same    int
		failure string
		message string
	}{
		"running well":                 {manyRuns(""), 0, "", "Configuring sqlite3 database connection pooling: maxIdleConns=2"},
		"ended once":                   {manyRuns(port), 1, "port-in-use", "listen tcp 127.0.0.1:6444: bind: address already in use"},
		"ended twice, starting":        {manyRuns(port, port, ""), 2, "port-in-use", "listen tcp 127.0.0.1:6444: bind: address already in use"},
		"three times":                  {manyRuns(port, port, port), 3, "port-in-use", "listen tcp 127.0.0.1:6444: bind: address already in use"},
		"three times, starting":        {manyRuns(port, port, port, ""), 3, "port-in-use", "listen tcp 127.0.0.1:6444: bind: address already in use"},
		"for another reason each time": {manyRuns(port, logLine("fatal", "no default routes found"), port), 1, "port-in-use", "listen tcp 127.0.0.1:6444: bind: address already in use"},
		"for no known reason":          {manyRuns(unknown(1), unknown(2), unknown(3)), 3, "", "strange thing 3 at 0x3"},
		"without a word":               {manyRuns("goodbye", "goodbye", "goodbye"), 0, "", "goodbye"},
		"nothing":                      {nil, 0, "", ""},
	} {
		v := JudgeLog(test.lines)
		failure := ""
		if v.Failure != nil {
			failure = v.Failure.Name
		}
		if v.Same != test.same || failure != test.failure || v.Message != test.message {
			t.Errorf("%s: %+v, failure %q", name, v, failure)
		}
	}
	// A run that has got far is not like the one before.
	lines := manyRuns(port, "")
	for range early + 1 {
		lines = append(lines, Line{PID: 101, Text: logLine("info", "going on")})
	}
	if v := JudgeLog(lines); v.Failure != nil {
		t.Errorf("got far: %+v", v.Failure)
	}
	// A log file knows no processes: k3s's own first line separates the runs.
	for i, line := range manyRuns(port, port, port) {
		line.PID = 0
		lines = append(lines[:i:i], line)
	}
	if v := JudgeLog(lines); v.Same != 3 {
		t.Errorf("without processes: %+v", v)
	}
}

// TestProgramsBeforeK3s: what runs before each start and says something is no life of k3s
// of its own, unless it is what fails.
func TestProgramsBeforeK3s(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("testdata", "log", "port-taken.json"))
	if err != nil {
		t.Fatal(err)
	}
	const starts = 4
	if v := JudgeLog(parseJournal(data)); v.Same != starts || v.Ended != starts || v.Failure == nil || v.Failure.Name != "port-in-use" {
		t.Errorf("%+v", v)
	}
	var lines []Line
	for i := range 3 {
		lines = append(lines, Line{PID: 10 + i, Before: true, Text: logLine("fatal", "no address on any link")},
			Line{PID: 1, Manager: true, Text: "k3s.service: Control process exited, code=exited, status=1/FAILURE"})
	}
	if v := JudgeLog(lines); v.Same != 3 || v.Message != "no address on any link" {
		t.Errorf("a hook that fails: %+v", v)
	}
}

func TestMessagesForPeople(t *testing.T) {
	for line, want := range map[string]string{
		logLine("info", "Waiting to retrieve agent configuration; server is not ready: x"):         "Waiting to retrieve agent configuration; server is not ready: x",
		`E1130 12:00:05.123456    4242 a.go:1] "Failed to \"do\" it" err="the \"reason\"" pod="x"`: `Failed to "do" it: the "reason"`,
		logLine("fatal", "token K10"+strings.Repeat("ab", 32)+"::server:secret is bad"):            "token (token) is bad",
		logLine("error", "proxyconnect http://user:hunter2@proxy:3128 refused"):                    "proxyconnect http://(password)@proxy:3128 refused",
		"\x1b[31mred\x07 text\x1b[0m":                                                  "[31mred text[0m",
		logLine("info", "Module overlay was already loaded"):                           "",
		`I1130 12:00:05.123456    4242 trace.go:236] Trace[123]: "List" (30-Nov-2026)`: "",
		logLine("error", strings.Repeat("long ", 200)):                                 strings.TrimSpace(strings.Repeat("long ", 60)) + "…",
		"panic: runtime error: invalid memory address or nil pointer dereference":      "panic: runtime error: invalid memory address or nil pointer dereference",
	} {
		if got := newest([]Line{{Text: line}}); got != want {
			t.Errorf("%s\n\tis shown as %q, want %q", line, got, want)
		}
	}
}

func TestJournalIsRead(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("testdata", "log", "journal.json"))
	if err != nil {
		t.Fatal(err)
	}
	lines := parseJournal(data)
	const want = 10
	if len(lines) != want || !lines[0].Manager || lines[1].PID != 4242 || lines[1].Time.UTC().Format(time.RFC3339) != "2026-11-30T12:00:05Z" {
		t.Fatalf("%d lines, %+v", len(lines), lines)
	}
	v := JudgeLog(lines)
	if v.Same != 2 || v.Failure == nil || v.Failure.Name != "disk-full" {
		t.Errorf("%+v", v)
	}
	// One message in the fixture is a list of bytes, with colours in it.
	if !strings.Contains(lines[3].Text, "coloured") {
		t.Errorf("%q", lines[3].Text)
	}
}

func TestOldLinesAreLeftOut(t *testing.T) {
	old := "time=\"2026-11-30T11:00:00Z\" level=fatal msg=\"old\"\nuntimed\n"
	fresh := "time=\"2026-11-30T12:00:05Z\" level=info msg=\"new\"\nE1130 12:00:06.000000 1 a.go:1] also new\n"
	since := time.Date(2026, 11, 30, 12, 0, 5, 500, time.UTC)
	if got := parseLog(old+fresh, since); len(got) != 2 {
		t.Errorf("%+v", got)
	}
	if got := parseLog(old+fresh, time.Time{}); len(got) != 4 {
		t.Errorf("%+v", got)
	}
	if got := parseLog(old, since); len(got) != 0 {
		t.Errorf("%+v", got)
	}
}

func FuzzLog(f *testing.F) {
	f.Add(logLine("fatal", "bind: address already in use"), 12)
	f.Add(`E1130 12:00:05.123456    4242 x.go:1] "a" err="b"`, 0)
	f.Add("time=\"x\" level=fatal msg=\"\\\n\x00\xff", 1)
	f.Add(exitMark+"exit status 1", 3)
	f.Fuzz(func(t *testing.T, text string, pid int) {
		lines := parseLog(text, time.Time{})
		for i := range lines {
			lines[i].PID, lines[i].Manager = pid%3, i%4 == 3
		}
		v := JudgeLog(lines)
		if v.Same > v.Ended || v.Ended > len(lines) {
			t.Errorf("%+v of %d lines", v, len(lines))
		}
		if strings.ContainsAny(v.Message, "\n\x00\x1b") || len(v.Message) > messageLimit+len("…") {
			t.Errorf("message %q", v.Message)
		}
		if strings.Contains(v.Message, "K10aaaaaaaaaaaaaaaaaaaa") {
			t.Errorf("shows a token: %q", v.Message)
		}
	})
}

func FuzzJournal(f *testing.F) {
	f.Add([]byte(`{"MESSAGE":"x","_PID":"1","__REALTIME_TIMESTAMP":"1"}`))
	f.Add([]byte(`{"MESSAGE":[1,300,-1],"_PID":"x"}`))
	f.Add([]byte("{\n\n[]\nnull\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, line := range parseJournal(data) {
			if line.PID < 0 {
				t.Errorf("%+v", line)
			}
			if _, err := json.Marshal(line.Text); err != nil {
				t.Error(err)
			}
		}
	})
}
