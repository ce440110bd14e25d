package k3s

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/llmbox-dev/llmbox/internal/config"
)

// Settings is all that the files of k3s are made from.
type Settings struct {
	Role  Role
	Box   config.Box
	Facts Facts
	// NodeName is the one that was fixed by an earlier run; Box wins over it.
	NodeName string
	// Join is set for an agent, or for a server that joins another.
	Join *Join
	// ProxyEnvironment are NAME=value pairs such as HTTPS_PROXY=…, from the environment
	// of whoever installs; the box's own proxy wins.
	ProxyEnvironment []string
	// RegistryAuth is the content of Box.Secrets.RegistryAuthFile.
	RegistryAuth []byte
}

// Join names the server that a node joins.
type Join struct {
	// URL is that of the server, such as "https://10.0.0.5:6443".
	URL string
	// TokenFile holds the token; it is read by k3s, not by llmbox.
	TokenFile string
}

// File is one file of the configuration.
type File struct {
	Path    string
	Mode    fs.FileMode
	Content []byte
}

// Modes of files: registries.yaml and the environment can hold a password.
const (
	secretMode = 0o600
	plainMode  = 0o644
)

// entry is one key of k3s's configuration.
type entry struct {
	key   string
	value any
}

// Files are the files that k3s reads when it starts, as they shall be. The same
// settings always give the same bytes.
func Files(s Settings) ([]File, error) {
	entries, err := serverEntries(s)
	if err != nil {
		return nil, err
	}
	text, err := writeEntries(marker+". It is written anew by each install: what you\n# want different belongs into "+DropInDir+"/*.yaml, which k3s reads\n# after this one, or into llmbox's own configuration.\n", entries)
	if err != nil {
		return nil, err
	}
	out := []File{{Path: ConfigFile, Mode: secretMode, Content: text}}
	kubelet, err := kubeletConfig(s)
	if err != nil {
		return nil, err
	}
	out = append(out, File{Path: KubeletFile, Mode: plainMode, Content: kubelet})
	registries, err := registriesConfig(s)
	if err != nil {
		return nil, err
	}
	if registries != nil {
		out = append(out, File{Path: RegistriesFile, Mode: secretMode, Content: registries})
	}
	return out, nil
}

// NodeNameOf is the name that the node has for ever: volumes are pinned to it.
func NodeNameOf(s Settings) (string, error) {
	if name := cmp.Or(s.Box.K3s.NodeName, s.NodeName); name != "" {
		return name, nil
	}
	name := strings.Trim(strings.Map(func(r rune) rune {
		switch {
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-', r == '.':
			return r
		case r == '_', r == ' ':
			return '-'
		}
		return -1
	}, s.Facts.Hostname), "-.")
	if name == "" {
		return "", &Problem{
			What: fmt.Sprintf("the host's name %q can't be a node's name", s.Facts.Hostname),
			Out:  "Name the node: sudo llmbox install --set k3s.nodeName=llmbox", Err: ErrSetting,
		}
	}
	return name, nil
}

// serverEntries is the content of ConfigFile. The order is for the person who reads
// it.
func serverEntries(s Settings) ([]entry, error) {
	name, err := NodeNameOf(s)
	if err != nil {
		return nil, err
	}
	k, n := s.Box.K3s, s.Box.Network
	out := []entry{{"data-dir", cmp.Or(k.DataDir, DefaultDataDir)}, {"node-name", name}}
	if s.Join != nil {
		out = append(out, entry{"server", s.Join.URL}, entry{"token-file", s.Join.TokenFile})
	}
	if n.NodeIP != "" {
		out = append(out, entry{"node-ip", n.NodeIP})
	}
	if s.Role != Agent {
		out = append(out,
			entry{"cluster-cidr", n.ClusterCIDR},
			entry{"service-cidr", n.ServiceCIDR},
			entry{"write-kubeconfig-mode", "0600"},
			entry{"secrets-encryption", true},
			entry{"disable", []string{"traefik"}},
		)
		if len(k.TLSNames) > 0 {
			out = append(out, entry{"tls-san", slices.Clone(k.TLSNames)})
		}
	}
	out = append(out, entry{"kubelet-arg", []string{"config=" + KubeletFile}})
	if protects(s.Facts.Sysctls) {
		out = append(out, entry{"protect-kernel-defaults", true})
	}
	if s.Facts.SELinux {
		out = append(out, entry{"selinux", true})
	}
	return addArguments(out, k.ExtraArgs)
}

// protectedSettings are the kernel settings that the kubelet wants
// (kubernetes/kubernetes pkg/util/sysctl/sysctl.go).
func protectedSettings() map[string]string {
	return map[string]string{
		"vm.overcommit_memory": "1", "vm.panic_on_oom": "0", "kernel.panic": "10", "kernel.panic_on_oops": "1",
		"kernel.keys.root_maxkeys": "1000000", "kernel.keys.root_maxbytes": "25000000",
	}
}

// protects says whether the kubelet finds the kernel as it wants it, after any boot.
// What holds only now may be the kubelet's own doing, and protect-kernel-defaults
// would keep it from starting after the next boot.
func protects(lasting map[string]string) bool {
	for key, value := range protectedSettings() {
		if lasting[key] != value {
			return false
		}
	}
	return true
}

// repeatable are the options of k3s that can be given more than once; in the
// configuration file they are lists (docs.k3s.io/cli/server, /cli/agent).
func repeatable(key string) bool {
	return slices.Contains([]string{
		"disable", "tls-san", "node-label", "node-taint", "node-external-ip", "kubelet-arg", "kube-proxy-arg", "kube-apiserver-arg",
		"kube-controller-manager-arg", "kube-scheduler-arg", "kube-cloud-controller-manager-arg", "etcd-arg", "node-internal-dns", "node-external-dns",
		"cluster-dns", "service-node-port-range",
	}, key)
}

// addArguments turns further arguments into entries, because an argument on the
// command line would replace the whole list of the same name in the file.
func addArguments(entries []entry, arguments []string) ([]entry, error) {
	var errs []error
	for i := 0; i < len(arguments); i++ {
		word := arguments[i]
		key, isOption := strings.CutPrefix(word, "-")
		key = strings.TrimPrefix(key, "-")
		if !isOption || key == "" {
			errs = append(errs, &Problem{What: fmt.Sprintf("%q in k3s.extraArgs is no option", word), Out: "Write options as --name=value", Err: ErrSetting})
			continue
		}
		var value any = true
		if name, text, has := strings.Cut(key, "="); has {
			key, value = name, scalar(text)
		} else if i+1 < len(arguments) && !strings.HasPrefix(arguments[i+1], "-") {
			i++
			value = scalar(arguments[i])
		}
		if text, isText := value.(string); isText && key == "kubelet-arg" && (strings.HasPrefix(text, "config=") || strings.HasPrefix(text, "config-dir=")) {
			errs = append(errs, &Problem{
				What: "k3s.extraArgs names a configuration for the kubelet, and llmbox has one of its own",
				Out:  "Put the file into agent/etc/kubelet.conf.d of k3s's data directory, with a name that sorts after 10-cli-config.conf", Err: ErrSetting,
			})
			continue
		}
		entries = set(entries, key, value)
	}
	return entries, errors.Join(errs...)
}

func scalar(text string) any {
	switch text {
	case "true":
		return true
	case "false":
		return false
	}
	return text
}

func set(entries []entry, key string, value any) []entry {
	if text, isText := value.(string); isText && repeatable(key) {
		for i := range entries {
			if list, isList := entries[i].value.([]string); isList && entries[i].key == key {
				if !slices.Contains(list, text) {
					entries[i].value = append(list, text)
				}
				return entries
			}
		}
		return append(entries, entry{key, []string{text}})
	}
	entries = slices.DeleteFunc(entries, func(e entry) bool { return e.key == key })
	return append(entries, entry{key, value})
}

func writeEntries(head string, entries []entry) ([]byte, error) {
	out := []byte(head)
	for _, e := range entries {
		text, err := yaml.Marshal(map[string]any{e.key: e.value})
		if err != nil {
			return nil, fmt.Errorf("writing %s: %w", e.key, err)
		}
		out = append(out, text...)
	}
	return out, nil
}

// Disables says whether the settings switch a packaged component of k3s off.
func Disables(s Settings, component string) bool {
	entries, err := addArguments(nil, s.Box.K3s.ExtraArgs)
	if err != nil {
		return false
	}
	for _, e := range entries {
		if list, isList := e.value.([]string); isList && e.key == "disable" {
			for _, item := range list {
				if slices.Contains(strings.Split(item, ","), component) {
					return true
				}
			}
		}
	}
	return false
}

// DropIn is a further file that k3s reads, and what it says.
type DropIn struct {
	Path string
	// Keys are those that it sets; Overrides those of them that llmbox sets as well.
	Keys, Overrides []string
	// Ours says that llmbox wrote it.
	Ours bool
	// Problem says why it can't be read; k3s will not start then.
	Problem string
}

// DropIns lists the files that k3s reads after ours.
func (m *Machine) DropIns(ctx context.Context) ([]DropIn, error) {
	names, err := m.files.List(ctx, DropInDir)
	if err != nil {
		if absent(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("listing %s: %w", DropInDir, err)
	}
	main, _, err := m.read(ctx, ConfigFile)
	if err != nil {
		return nil, err
	}
	own, _ := keysOf(main)
	var out []DropIn
	for _, name := range names {
		if !strings.HasSuffix(name, ".yaml") {
			continue
		}
		d := DropIn{Path: path.Join(DropInDir, name)}
		data, _, err := m.read(ctx, d.Path)
		if err != nil {
			return nil, err
		}
		d.Ours = ours(data)
		if d.Keys, err = keysOf(data); err != nil {
			d.Problem = err.Error()
		}
		for _, key := range d.Keys {
			// A plus behind the key adds to the list and takes nothing away.
			if slices.Contains(own, key) {
				d.Overrides = append(d.Overrides, key)
			}
		}
		out = append(out, d)
	}
	return out, nil
}

func keysOf(data []byte) ([]string, error) {
	var all map[string]any
	if err := yaml.Unmarshal(data, &all); err != nil {
		return nil, fmt.Errorf("reading YAML: %w", err)
	}
	keys := make([]string, 0, len(all))
	for key := range all {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys, nil
}

// Configure puts the files in place and returns the paths of those that it changed.
// A file that llmbox did not write is never overwritten; one that is no longer
// wanted is removed.
func (m *Machine) Configure(ctx context.Context, r *Record, s Settings) ([]string, error) {
	wanted, err := Files(s)
	if err != nil {
		return nil, err
	}
	return m.ensureFiles(ctx, r, wanted, s.Box.Network.NodeIP != "")
}

func (m *Machine) ensureFiles(ctx context.Context, r *Record, wanted []File, fixedAddress bool) (changed []string, err error) {
	// All are looked at before any is written: half a configuration is worse than none.
	var foreign []error
	for _, f := range wanted {
		if err := m.mayWrite(ctx, r, f); err != nil {
			foreign = append(foreign, err)
		}
	}
	if err := errors.Join(foreign...); err != nil {
		return nil, err
	}
	for _, f := range wanted {
		did, err := m.ensureFile(ctx, r, f)
		if err != nil {
			return changed, err
		}
		if did {
			changed = append(changed, f.Path)
		}
	}
	unwanted := []string{}
	if !slices.ContainsFunc(wanted, func(f File) bool { return f.Path == RegistriesFile }) {
		unwanted = append(unwanted, RegistriesFile)
	}
	if fixedAddress {
		unwanted = append(unwanted, NodeIPFile)
	}
	for _, name := range unwanted {
		did, err := m.withdraw(ctx, r, name)
		if err != nil {
			return changed, err
		}
		if did {
			changed = append(changed, name)
		}
	}
	return changed, nil
}

// mayWrite refuses where somebody else's file stands.
func (m *Machine) mayWrite(ctx context.Context, r *Record, f File) error {
	has, present, err := m.read(ctx, f.Path)
	if err != nil {
		return err
	}
	if !present || ours(has) || r.Files[f.Path] == hashBytes(has) || string(has) == string(f.Content) {
		return nil
	}
	where := DropInDir + "/00-mine.yaml"
	out := "Keep what it says as a drop-in: sudo mkdir -p " + DropInDir + " && sudo mv " + f.Path + " " + where
	if f.Path != ConfigFile {
		out = "Keep a copy and move it away: sudo mv " + f.Path + " " + f.Path + ".before-llmbox"
	}
	return &Problem{What: f.Path + " is there and llmbox did not write it", Out: out, Err: ErrForeign}
}

// ensureFile writes a file where it is not as it shall be. The record knows of it
// first.
func (m *Machine) ensureFile(ctx context.Context, r *Record, f File) (bool, error) {
	has, present, err := m.read(ctx, f.Path)
	if err != nil {
		return false, err
	}
	sum := hashBytes(f.Content)
	if present && string(has) == string(f.Content) {
		info, err := m.files.Stat(ctx, f.Path)
		if err != nil {
			return false, fmt.Errorf("looking at %s: %w", f.Path, err)
		}
		if info.Mode.Perm() == f.Mode {
			if r.Files[f.Path] != sum {
				r.wrote(f.Path, sum)
				return false, m.save(ctx, r)
			}
			return false, nil
		}
	}
	if r.Files[f.Path] != sum {
		r.wrote(f.Path, sum)
		if err := m.save(ctx, r); err != nil {
			return false, err
		}
	}
	return true, m.write(ctx, f.Path, f.Mode, f.Content)
}

// withdraw removes a file of ours.
func (m *Machine) withdraw(ctx context.Context, r *Record, name string) (bool, error) {
	has, present, err := m.read(ctx, name)
	if err != nil || !present || !ours(has) {
		return false, err
	}
	if err := m.remove(ctx, name); err != nil {
		return false, err
	}
	delete(r.Files, name)
	return true, m.save(ctx, r)
}
