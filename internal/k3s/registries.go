package k3s

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// dockerHub is what Docker's own file calls docker.io.
const dockerHub = "index.docker.io"

type registriesFields struct {
	Mirrors map[string]mirrorFields   `yaml:"mirrors,omitempty"`
	Configs map[string]registryFields `yaml:"configs,omitempty"`
}

type mirrorFields struct {
	Endpoint []string `yaml:"endpoint"`
}

type registryFields struct {
	Auth *authFields `yaml:"auth,omitempty"`
	TLS  *tlsFields  `yaml:"tls,omitempty"`
}

type authFields struct {
	Username      string `yaml:"username,omitempty"`
	Password      string `yaml:"password,omitempty"`
	IdentityToken string `yaml:"identity_token,omitempty"`
}

type tlsFields struct {
	CAFile string `yaml:"ca_file,omitempty"`
}

// registriesConfig is the content of RegistriesFile; nil where there is nothing to
// say. An error never holds what stands in the credentials.
func registriesConfig(s Settings) ([]byte, error) {
	var out registriesFields
	for host, mirror := range s.Box.Registries.Mirrors {
		if out.Mirrors == nil {
			out.Mirrors = map[string]mirrorFields{}
		}
		out.Mirrors[host] = mirrorFields{Endpoint: mirror.Endpoints}
	}
	credentials, err := parseRegistryAuth(s.RegistryAuth)
	if err != nil {
		return nil, err
	}
	for host, auth := range credentials {
		out.config(host, func(c *registryFields) { c.Auth = &auth })
	}
	if ca := s.Box.Network.CAFile; ca != "" {
		// The entry for a host hides the one for all, so each gets it.
		hosts := append(slices.Collect(maps.Keys(credentials)), "*")
		for _, mirror := range s.Box.Registries.Mirrors {
			for _, endpoint := range mirror.Endpoints {
				if at, err := url.Parse(endpoint); err == nil && at.Host != "" && at.Scheme == "https" {
					hosts = append(hosts, at.Host)
				}
			}
		}
		for _, host := range hosts {
			out.config(host, func(c *registryFields) { c.TLS = &tlsFields{CAFile: ca} })
		}
	}
	if out.Mirrors == nil && out.Configs == nil {
		return nil, nil
	}
	text, err := yaml.Marshal(out)
	if err != nil {
		return nil, fmt.Errorf("writing the registries: %w", ErrSetting)
	}
	return append([]byte(marker+" from registries.mirrors, secrets.registryAuthFile and network.caFile.\n"), text...), nil
}

func (r *registriesFields) config(host string, set func(*registryFields)) {
	if r.Configs == nil {
		r.Configs = map[string]registryFields{}
	}
	c := r.Configs[host]
	set(&c)
	r.Configs[host] = c
}

// parseRegistryAuth reads Docker's config.json. What it says of a program that keeps
// the credentials is of no use to k3s, which only reads files.
func parseRegistryAuth(data []byte) (map[string]authFields, error) {
	if len(data) == 0 {
		return nil, nil
	}
	var file struct {
		Auths map[string]struct {
			Auth          string `json:"auth"`
			Username      string `json:"username"`
			Password      string `json:"password"`
			IdentityToken string `json:"identitytoken"`
		} `json:"auths"`
		Store   string            `json:"credsStore"`
		Helpers map[string]string `json:"credHelpers"`
	}
	bad := func(why string) error {
		return &Problem{
			What: "the file of registry credentials can't be used: " + why,
			Out:  `Write {"auths": {"REGISTRY": {"username": "…", "password": "…"}}} into a file of mode 0600 and name it in secrets.registryAuthFile`, Err: ErrSetting,
		}
	}
	if json.Unmarshal(data, &file) != nil {
		return nil, bad("it is not in the form of Docker's config.json")
	}
	out := map[string]authFields{}
	for name, a := range file.Auths {
		user, password := a.Username, a.Password
		if a.Auth != "" {
			raw, err := base64.StdEncoding.DecodeString(strings.TrimSpace(a.Auth))
			before, after, both := strings.Cut(string(raw), ":")
			if err != nil || !both {
				return nil, bad("the entry for " + name + " can't be read")
			}
			user, password = before, strings.TrimRight(after, "\x00")
		}
		if user == "" && a.IdentityToken == "" {
			if file.Store != "" || file.Helpers[name] != "" {
				return nil, bad("a credential helper keeps the one for " + name)
			}
			return nil, bad("the entry for " + name + " is empty")
		}
		out[registryHost(name)] = authFields{Username: user, Password: password, IdentityToken: a.IdentityToken}
	}
	if len(out) == 0 && (file.Store != "" || len(file.Helpers) > 0) {
		return nil, bad("a credential helper keeps them")
	}
	return out, nil
}

// registryHost is the host of a key in Docker's file, which can be an URL.
func registryHost(name string) string {
	if _, rest, ok := strings.Cut(name, "://"); ok {
		name = rest
	}
	name, _, _ = strings.Cut(name, "/")
	if name == dockerHub || name == "registry-1.docker.io" {
		return "docker.io"
	}
	return name
}
