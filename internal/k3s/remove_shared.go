package k3s

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"go.yaml.in/yaml/v3"
)

// The places that containerd's shims, runc and mount(8) have built in, whatever the
// state directory of the containerd that calls them: the ones of k3s leave their sockets
// and states there beside those of Docker (containerd/containerd pkg/shim/util_unix.go,
// cmd/containerd-shim-runc-v2/process/init.go).
const (
	shimSockets = "/run/containerd/s"
	runcStates  = "/run/containerd/runc/k8s.io"
	mountState  = "/run/mount"
	cniResults  = "/var/lib/cni/results"
	// pluginDir is where the kubelet looks for plugins of volumes; it makes it anew
	// (kubernetes/kubernetes pkg/volume/flexvolume/probe.go).
	pluginDir = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec"
)

// sharedState are the directories above, the innermost first.
func sharedState() []string {
	return append([]string{runcStates, path.Dir(runcStates), shimSockets, path.Dir(shimSockets), mountState}, pluginDirs()...)
}

// pluginDirs are the directory of the kubelet's plugins and those around it up to the one
// that every machine has, the innermost first.
func pluginDirs() []string {
	var out []string
	for dir := pluginDir; dir != "/usr"; dir = path.Dir(dir) {
		out = append(out, dir)
	}
	return out
}

// lookShared finds what the shims of k3s left where other containers have theirs, too:
// sockets at which nobody listens any more, and states of containers whose files lay
// with k3s.
func (d *remover) lookShared(ctx context.Context) (findings, error) {
	var out findings
	sockets, err := d.m.files.List(ctx, shimSockets)
	if err != nil && !absent(err) {
		return findings{}, fmt.Errorf("listing sockets of containers: %w", err)
	}
	open, err := d.openSockets(ctx)
	if err != nil {
		return findings{}, err
	}
	for _, name := range sockets {
		if at := path.Join(shimSockets, name); !open[at] {
			out.finds = append(out.finds, d.there(ctx, at)...)
		}
	}
	states, err := d.m.files.List(ctx, runcStates)
	if err != nil && !absent(err) {
		return findings{}, fmt.Errorf("listing states of containers: %w", err)
	}
	for _, name := range states {
		at := path.Join(runcStates, name)
		own, err := d.ownContainer(ctx, at)
		if err != nil {
			return findings{}, err
		}
		if own {
			out.finds = append(out.finds, d.there(ctx, at)...)
		}
	}
	dirs := sharedState()
	if !d.b.alone {
		dirs = slices.DeleteFunc(dirs, func(dir string) bool { return slices.Contains(pluginDirs(), dir) })
	}
	out.finds = append(out.finds, d.empty(ctx, out.finds, dirs...)...)
	return out, nil
}

// removeShared removes a directory that others use only while nothing is in it.
func (d *remover) removeShared(ctx context.Context, finds []string) error {
	dirs := sharedState()
	mine := slices.DeleteFunc(slices.Clone(finds), func(at string) bool { return slices.Contains(dirs, at) })
	errs := []error{d.removeTrees(ctx, mine)}
	for _, at := range finds {
		if slices.Contains(dirs, at) {
			errs = append(errs, d.m.removeEmpty(at))
		}
	}
	return errors.Join(errs...)
}

// openSockets are the sockets that some process holds open.
func (d *remover) openSockets(ctx context.Context) (map[string]bool, error) {
	out := map[string]bool{}
	data, _, err := d.m.read(ctx, "/proc/net/unix")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(data)) {
		// The path is the last of eight columns; most sockets have none.
		const columns = 8
		if fields := strings.Fields(line); len(fields) == columns {
			out[fields[columns-1]] = true
		}
	}
	return out, nil
}

// ownContainer says whether a state of runc is that of a container of this k3s. One that
// was cut off before it said whose it is belongs to the only Kubernetes here.
func (d *remover) ownContainer(ctx context.Context, at string) (bool, error) {
	data, present, err := d.m.read(ctx, path.Join(at, "state.json"))
	if err != nil {
		return false, err
	}
	// JSON is YAML.
	var c struct {
		Config struct {
			Rootfs string `yaml:"rootfs"`
		} `yaml:"config"`
	}
	if !present || yaml.Unmarshal(data, &c) != nil || c.Config.Rootfs == "" {
		return d.b.alone, nil
	}
	return within(c.Config.Rootfs, runDir) || within(c.Config.Rootfs, d.b.dataDir), nil
}

// loopbackResults is what libcni remembers of the pods' loopback interfaces. That
// network has the same name with every containerd; whose pods were Kubernetes' says so.
func (d *remover) loopbackResults(ctx context.Context) ([]string, error) {
	found, _, err := d.m.files.Glob(ctx, path.Join(cniResults, "cni-loopback-*"))
	if err != nil {
		return nil, err
	}
	var out []string
	for _, at := range found {
		data, _, err := d.m.read(ctx, at)
		if err != nil {
			return nil, err
		}
		var c struct {
			Args [][]string `yaml:"cniArgs"`
		}
		named := yaml.Unmarshal(data, &c) == nil && slices.ContainsFunc(c.Args, func(pair []string) bool {
			return len(pair) > 0 && pair[0] == "K8S_POD_NAMESPACE"
		})
		if named {
			out = append(out, at)
		}
	}
	return out, nil
}

// lookNamespacesDir finds the directory of named network namespaces, where k3s made it
// and nothing is in it any more.
func (d *remover) lookNamespacesDir(ctx context.Context, going []string) ([]string, error) {
	all, err := d.m.mounts(ctx)
	if err != nil || slices.ContainsFunc(all, func(m mount) bool { return m.point == netnsDir }) {
		// Where it is a mount, somebody else's tools made it.
		return nil, err
	}
	return d.empty(ctx, going, netnsDir), nil
}

// removeEmpty removes a directory that has nothing in it any more.
func (m *Machine) removeEmpty(name string) error {
	if err := os.Remove(m.at(name)); err != nil && !absent(err) && !errors.Is(err, syscall.ENOTEMPTY) {
		return fmt.Errorf("removing %s: %w", name, err)
	}
	return nil
}
