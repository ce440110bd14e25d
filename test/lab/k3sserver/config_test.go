package k3sserver

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// read puts files into a directory of its own and reads the configuration from there.
func read(t *testing.T, files map[string]string, env map[string]string, args ...string) (Config, error) {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "DIR", dir)
	}
	return ReadConfig(Source{
		Args: args, File: filepath.Join(dir, "config.yaml"),
		Env: func(name string) string { return strings.ReplaceAll(env[name], "DIR", dir) },
	})
}

func TestConfigWithNothingSaid(t *testing.T) {
	c, err := read(t, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		DataDir: "/var/lib/rancher/k3s", BindPort: 6443, ClusterCIDR: "10.42.0.0/16", ServiceCIDR: "10.43.0.0/16",
		ClusterDNS: "10.43.0.10", ClusterDomain: "cluster.local", Kubeconfig: "/etc/rancher/k3s/k3s.yaml", KubeconfigMode: 0o600,
		Registries: "/etc/rancher/k3s/registries.yaml", PauseImage: "rancher/mirrored-pause:3.6",
		StoragePath: "/var/lib/rancher/k3s/storage", ResolvConf: "/etc/resolv.conf",
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got  %+v\nwant %+v", c, want)
	}
}

func TestConfigFilesFlagsAndEnvironment(t *testing.T) {
	const base = `
data-dir: /data/k3s
node-ip: 10.0.0.7
tls-san: [box.example.com, 203.0.113.4]
disable: traefik,metrics-server
service-cidr: 10.96.0.0/20
write-kubeconfig-mode: "0640"
secrets-encryption: true
kubelet-arg:
- max-pods=50
- eviction-hard=memory.available<1Gi,nodefs.available<1%
flannel-backend: host-gw
`
	for _, tt := range []struct {
		name  string
		files map[string]string
		env   map[string]string
		args  []string
		check func(Config) (got, want any)
	}{
		{"a path", map[string]string{"config.yaml": base}, nil, nil,
			func(c Config) (any, any) {
				return []string{c.DataDir, c.StoragePath}, []string{"/data/k3s", "/data/k3s/storage"}
			}},
		{"a list in brackets", map[string]string{"config.yaml": base}, nil, nil,
			func(c Config) (any, any) { return c.TLSSANs, []string{"box.example.com", "203.0.113.4"} }},
		{"a list with commas", map[string]string{"config.yaml": base}, nil, nil,
			func(c Config) (any, any) { return c.Disable, []string{"traefik", "metrics-server"} }},
		{"arguments keep their commas", map[string]string{"config.yaml": base}, nil, nil,
			func(c Config) (any, any) {
				return asFlags(c.KubeletArgs), []string{"--max-pods=50", "--eviction-hard=memory.available<1Gi,nodefs.available<1%"}
			}},
		{"the name server follows the services", map[string]string{"config.yaml": base}, nil, nil,
			func(c Config) (any, any) { return c.ClusterDNS, "10.96.0.10" }},
		{"a mode in quotes is octal", map[string]string{"config.yaml": base}, nil, nil,
			func(c Config) (any, any) { return c.KubeconfigMode, os.FileMode(0o640) }},
		{"yes or no", map[string]string{"config.yaml": base}, nil, nil,
			func(c Config) (any, any) {
				return []bool{c.SecretsEncryption, c.ProtectKernelDefaults}, []bool{true, false}
			}},
		{"what k3s knows and the stand-in ignores", map[string]string{"config.yaml": base}, nil, nil,
			func(c Config) (any, any) { return c.Ignored, []string{"flannel-backend"} }},
		{"a flag wins over the file", map[string]string{"config.yaml": base}, nil, []string{"--data-dir=/other", "-i", "10.0.0.8"},
			func(c Config) (any, any) { return []string{c.DataDir, c.NodeIP}, []string{"/other", "10.0.0.8"} }},
		{"a list by flags replaces the file's", map[string]string{"config.yaml": base}, nil, []string{"--tls-san", "a", "--tls-san=b"},
			func(c Config) (any, any) { return c.TLSSANs, []string{"a", "b"} }},
		{"a flag for yes", nil, nil, []string{"--protect-kernel-defaults", "--secrets-encryption=false"},
			func(c Config) (any, any) {
				return []bool{c.ProtectKernelDefaults, c.SecretsEncryption}, []bool{true, false}
			}},
		{"a file wins over the environment", map[string]string{"config.yaml": "token: file"}, map[string]string{"K3S_TOKEN": "env"}, nil,
			func(c Config) (any, any) { return c.Token, "file" }},
		{"the environment", nil, map[string]string{"K3S_TOKEN": "env", "K3S_NODE_NAME": "n"}, nil,
			func(c Config) (any, any) { return []string{c.Token, c.NodeName}, []string{"env", "n"} }},
		{"later files replace", map[string]string{"config.yaml": base, "config.yaml.d/10.yaml": "tls-san: [c]", "config.yaml.d/20.yml": "node-ip: 10.0.0.9", "config.yaml.d/30.txt": "node-ip: 1.2.3.4"}, nil, nil,
			func(c Config) (any, any) { return append(c.TLSSANs, c.NodeIP), []string{"c", "10.0.0.9"} }},
		{"a plus sign adds", map[string]string{"config.yaml": base, "config.yaml.d/10.yaml": "kubelet-arg+: [a=b]"}, nil, nil,
			func(c Config) (any, any) { return len(c.KubeletArgs), 3 }},
		{"files in the directory alone", map[string]string{"config.yaml.d/10.yaml": "node-name: alone"}, nil, nil,
			func(c Config) (any, any) { return c.NodeName, "alone" }},
		{"another file by flag", map[string]string{"x.yaml": "node-name: x", "config.yaml": base}, nil, []string{"--config", "DIR/x.yaml"},
			func(c Config) (any, any) {
				return []string{c.NodeName, c.DataDir}, []string{"x", "/var/lib/rancher/k3s"}
			}},
		{"another file by environment", map[string]string{"x.yaml": "node-name: x"}, map[string]string{"K3S_CONFIG_FILE": "DIR/x.yaml"}, nil,
			func(c Config) (any, any) { return c.NodeName, "x" }},
		{"a token in a file", map[string]string{"t": "secret\n", "config.yaml": "token-file: /nowhere"}, nil, []string{"--token-file=DIR/t"},
			func(c Config) (any, any) { return c.Token, "secret" }},
		{"an empty file", map[string]string{"config.yaml": "# nothing\n"}, nil, nil,
			func(c Config) (any, any) { return c.BindPort, 6443 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := read(t, tt.files, tt.env, tt.args...)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := tt.check(c); !reflect.DeepEqual(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func TestConfigThatCanNotBeFollowed(t *testing.T) {
	for _, tt := range []struct {
		name, file string
		args       []string
		want       string
	}{
		{"unknown key", "node-ip: 10.0.0.1\nnode-ipp: 10.0.0.1\n", nil, `line 2: unknown key "node-ipp"`},
		{"key twice", "node-ip: 10.0.0.1\nnode-ip: 10.0.0.2\n", nil, "comes twice"},
		{"key twice by its other name", "node-ip: 10.0.0.1\ni: 10.0.0.2\n", nil, "comes twice"},
		{"no YAML", "node-ip: [10.0.0.1\n", nil, "did not find"},
		{"a list where one is wanted", "data-dir: [/a, /b]\n", nil, `"data-dir" takes one value`},
		{"a map where a word is wanted", "node-ip: {a: b}\n", nil, `"node-ip" takes one value`},
		{"a list at the top", "- a\n", nil, "no keys"},
		{"neither yes nor no", "secrets-encryption: maybe\n", nil, "true or false"},
		{"no address", "node-ip: box.example.com\n", nil, "invalid ip format 'box.example.com'"},
		{"no range", "cluster-cidr: 10.42.0.0\n", nil, "invalid cluster-cidr"},
		{"no mode", "write-kubeconfig-mode: rw\n", nil, "file mode"},
		{"relative data directory", "data-dir: k3s\n", nil, "no absolute path"},
		{"unknown flag", "", []string{"--nosuch"}, "flag provided but not defined: -nosuch"},
		{"flag without its value", "", []string{"--node-ip"}, "flag needs an argument"},
		{"a word that is no flag", "", []string{"extra"}, "unexpected argument"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := read(t, map[string]string{"config.yaml": tt.file}, nil, tt.args...)
			if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want ErrConfig with %q", err, tt.want)
			}
		})
	}
}

func TestConfigFileThatIsNamedMustBeThere(t *testing.T) {
	if _, err := read(t, nil, nil, "--config=DIR/absent.yaml"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want that it is not there", err)
	}
	if _, err := read(t, map[string]string{"config.yaml/x": ""}, nil); err == nil || errors.Is(err, os.ErrNotExist) {
		t.Errorf("a directory in the file's place gave %v", err)
	}
}
