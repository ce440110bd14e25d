package k3sserver

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/llmbox-dev/llmbox/test/lab/kubenode"
)

// handlers are the runtimes that the generated configuration names: runc, and those
// whose program is found now. k3s looks at its start and never again
// (k3s-io/k3s, pkg/agent/containerd/runtimes.go).
func handlers(root fs.FS, log Logger) map[string]string {
	found := map[string]string{"runc": ""}
	toolkit := []string{"usr/local/nvidia/toolkit", "usr/bin"}
	for _, r := range []struct {
		handler, program string
		places           []string
	}{
		{"nvidia", "nvidia-container-runtime", toolkit},
		{"nvidia-experimental", "nvidia-container-runtime-experimental", toolkit},
		{"crun", "crun", []string{"usr/sbin", "usr/bin", "usr/local/bin", "usr/local/sbin"}},
	} {
		for _, place := range r.places {
			path := place + "/" + r.program
			if info, err := fs.Stat(root, path); err == nil && !info.IsDir() {
				log.info("Found %s container runtime at /%s", r.handler, path)
				found[r.handler] = "/" + path
				break
			}
		}
	}
	return found
}

// writeContainerd generates containerd's configuration, as k3s does before each start.
func (l layout) writeContainerd(c Config, runtimes map[string]string, log Logger) error {
	for _, name := range []string{"config.toml.tmpl", "config-v3.toml.tmpl"} {
		if _, err := os.Stat(l.agent("etc", "containerd", name)); err == nil {
			log.warn("The stand-in does not read the containerd config template %s", name)
		}
	}
	registries, err := ReadRegistries(c.Registries)
	if err != nil {
		return err
	}
	hosts, err := registries.Hosts()
	if err != nil {
		return err
	}
	certs := CertsDir(l.data)
	if err := writeHosts(certs, hosts); err != nil {
		return err
	}
	return writeFile(l.agent("etc", "containerd", "config.toml"), kubenode.Containerd{
		Header: hostsHeader,
		Root:   l.agent("containerd"), State: stateDir, Opt: l.agent("containerd"),
		Socket: ContainerdSocket, Sandbox: c.PauseImage,
		CNIBin: l.bin(), CNIConf: l.agent("etc", "cni", "net.d"), Certs: certs,
		Handlers: runtimes, Auth: registries.Auth(),
	}.TOML(), 0o600)
}

// preload imports the images that lie in the agent's directory. One that can't be
// imported is logged and left out, as in k3s.
func (l layout) preload(ctx context.Context, log Logger) {
	entries, err := os.ReadDir(l.agent("images"))
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			log.fail("Unable to read images in %s: %v", l.agent("images"), err)
		}
		return
	}
	for _, e := range entries {
		if e.IsDir() {
			continue
		}
		path := l.agent("images", e.Name())
		if err := l.importFile(ctx, path, log); err != nil {
			log.fail("Error encountered while importing %s: %v", path, err)
		}
	}
}

func (l layout) importFile(ctx context.Context, path string, log Logger) (err error) {
	file, err := os.Open(path) // #nosec G304 -- in the data directory
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	archive, err := archiveReader(path, file)
	if err != nil {
		return err
	}
	log.info("Importing images from %s", path)
	cmd := exec.CommandContext(ctx, l.bin("ctr"), "--address", ContainerdSocket, "--namespace", "k8s.io", "images", "import", "-") // #nosec G204 -- staged by this program
	cmd.Stdin = archive
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
	}
	for line := range strings.Lines(string(out)) {
		log.info("Imported: %s", strings.TrimSpace(line))
	}
	return nil
}

// archiveReader opens an archive of images by its name's end.
func archiveReader(name string, file io.Reader) (io.Reader, error) {
	ends := func(suffixes ...string) bool {
		return slices.ContainsFunc(suffixes, func(s string) bool { return strings.HasSuffix(strings.ToLower(name), s) })
	}
	switch {
	case ends(".tar"):
		return file, nil
	case ends(".tar.gz", ".tgz"):
		return gzip.NewReader(file)
	case ends(".tar.zst", ".tzst"):
		r, err := zstd.NewReader(file)
		if err != nil {
			return nil, err
		}
		return r.IOReadCloser(), nil
	}
	return nil, fmt.Errorf("unhandled file type %s", filepath.Base(name))
}

// proxies are the variables that k3s hands to containerd: its own, and those that are
// meant for containerd alone in their place.
func proxies(environ []string) []string {
	set := map[string]string{}
	for _, prefix := range []string{"", "CONTAINERD_"} {
		for _, v := range environ {
			name, value, _ := strings.Cut(v, "=")
			short, ok := strings.CutPrefix(name, prefix)
			if ok && slices.Contains([]string{"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}, strings.ToUpper(short)) {
				set[short] = value
			}
		}
	}
	var env []string
	for _, name := range slices.Sorted(maps.Keys(set)) {
		env = append(env, name+"="+set[name])
	}
	return env
}
