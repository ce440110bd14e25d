// Package k3sserver is what the lab's stand-in for k3s does: it follows the contract
// between k3s and who installs it (configuration files, paths, tokens, manifests,
// images, log lines, what stays behind when it ends) with Kubernetes' own programs.
//
// k3s has its parts in one process. Here they are children of one process that end with
// it, however it ends; containers outlive it, as they outlive k3s. The package knows
// nothing of who calls it, and has no part of k3s in it.
package k3sserver

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/llmbox-dev/llmbox/test/lab/process"
)

const (
	// ContainerdSocket is where k3s has containerd listen.
	ContainerdSocket = stateDir + "/containerd.sock"
	stateDir         = "/run/k3s/containerd"
	flannelDir       = "/run/flannel"
	passwordFile     = "/etc/rancher/node/password" // #nosec G101 -- a path
)

// layout is where things lie under the data directory.
type layout struct{ data string }

func (l layout) server(elem ...string) string {
	return filepath.Join(append([]string{l.data, "server"}, elem...)...)
}

// CertsDir is where containerd looks for mirrors.
func CertsDir(dataDir string) string {
	return layout{data: dataDir}.agent("etc", "containerd", "certs.d")
}

func (l layout) agent(elem ...string) string {
	return filepath.Join(append([]string{l.data, "agent"}, elem...)...)
}

// bin is where the programs lie that k3s brings along.
func (l layout) bin(elem ...string) string {
	return filepath.Join(append([]string{l.data, "data", "current", "bin"}, elem...)...)
}

// home gives the control plane's files the places and names that they have in k3s.
type home struct{ layout }

// Join implements controlplane.Home.
func (h home) Join(elem ...string) string {
	whole := filepath.Join(elem...)
	for ours, theirs := range map[string]string{
		"pki": "tls", "config": "cred", "logs": "cred",
		"kubeconfig": "cred/admin.kubeconfig", "state.db": "db/state.db",
		"pki/ca.crt": "tls/server-ca.crt", "pki/ca.key": "tls/server-ca.key",
		"pki/apiserver.crt": "tls/serving-kube-apiserver.crt", "pki/apiserver.key": "tls/serving-kube-apiserver.key",
		"pki/front-proxy-ca.crt": "tls/request-header-ca.crt", "pki/front-proxy-ca.key": "tls/request-header-ca.key",
		"pki/front-proxy-client.crt": "tls/client-auth-proxy.crt", "pki/front-proxy-client.key": "tls/client-auth-proxy.key",
		"pki/kubelet-client.crt": "tls/client-kube-apiserver.crt", "pki/kubelet-client.key": "tls/client-kube-apiserver.key",
		"pki/sa.key": "tls/service.key",
		"config/kube-controller-manager.kubeconfig": "cred/controller.kubeconfig",
		"config/kube-scheduler.kubeconfig":          "cred/scheduler.kubeconfig",
		"config/scheduler.yaml":                     "cred/scheduler.yaml",
		"config/egress.yaml":                        "cred/egress-selector-config.yaml",
		"config/kwok.yaml":                          "cred/kwok.yaml",
	} {
		if whole == ours {
			return h.server(theirs)
		}
	}
	return h.server(whole)
}

// Record implements controlplane.Home: the end of this process is the end of all.
func (home) Record(string, int) error { return nil }

// Logger writes lines in the form in which k3s does.
type Logger struct{ to *os.File }

// NewLogger writes to a file.
func NewLogger(to *os.File) Logger { return Logger{to: to} }

func (l Logger) line(level, format string, a ...any) {
	_, _ = fmt.Fprintf(l.to, "time=%q level=%s msg=%q\n", time.Now().UTC().Format(time.RFC3339), level, fmt.Sprintf(format, a...))
}

func (l Logger) info(format string, a ...any) { l.line("info", format, a...) }
func (l Logger) warn(format string, a ...any) { l.line("warning", format, a...) }
func (l Logger) fail(format string, a ...any) { l.line("error", format, a...) }

// Fatal is the last line of a server that can't go on.
func (l Logger) Fatal(err error) { l.line("fatal", "%s", err) }

// writeFile replaces a file, and makes the directories above it.
func writeFile(path, content string, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { // #nosec G301 -- secrets are closed file by file
		return fmt.Errorf("writing %s: %w", path, err)
	}
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, []byte(content), mode.Perm()); err != nil { // #nosec G306 -- by the caller
		return fmt.Errorf("writing %s: %w", path, err)
	}
	// The mode of a file that was there, and the umask, don't count.
	if err := os.Chmod(tmp, mode); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

// daemons starts children that write where this process writes.
type daemons struct {
	group *process.Group
	path  string
	out   *os.File
}

func (d daemons) start(name, program string, env []string, args ...string) error {
	_, err := d.group.Start(process.Spec{
		Name: name, Path: program, Args: args, Dir: "/", Output: d.out,
		Env: append([]string{"HOME=/root", "PATH=" + d.path}, env...),
	})
	return err
}
