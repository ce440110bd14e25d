package k3s

import (
	"context"
	"fmt"
	"path"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
)

// imagesAsset is the list of images that a release needs, one a line.
const imagesAsset = "k3s-images.txt"

// Release has the binary of a release and its list of checksums in the cache, verified.
// The paths are in terms of this process.
func (m *Machine) Release(ctx context.Context, want WantBinary, report Report) (binary, sums string, err error) {
	name, list, err := asset(want.Arch)
	if err != nil {
		return "", "", err
	}
	found, err := m.cachedOrDownloaded(ctx, want, name, list, report)
	if err != nil {
		return "", "", err
	}
	return found.at, m.at(path.Join(m.cacheDir(), want.Version, list)), nil
}

// Asset is what a release calls its binary for an architecture.
func Asset(arch string) (string, error) {
	name, _, err := asset(arch)
	return name, err
}

// ReleaseImages are the images that a release itself runs.
func ReleaseImages(ctx context.Context, want WantBinary) ([]string, error) {
	raw, err := want.Fetcher.Text(ctx, assetURL(want.Releases, want.Version, imagesAsset), sumsLimit)
	if err != nil {
		return nil, fmt.Errorf("fetching the list of images of k3s %s: %w", want.Version, err)
	}
	return ImageList(raw), nil
}

// ImageList reads a list of images as a release has it.
func ImageList(raw []byte) []string {
	var out []string
	for line := range strings.Lines(string(raw)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			out = append(out, line)
		}
	}
	return out
}

// RegistryCredentials reads Docker's config.json as k3s is told it, by host.
func RegistryCredentials(data []byte) (map[string]authn.AuthConfig, error) {
	parsed, err := parseRegistryAuth(data)
	if err != nil {
		return nil, err
	}
	out := map[string]authn.AuthConfig{}
	for host, a := range parsed {
		out[host] = authn.AuthConfig{Username: a.Username, Password: a.Password, IdentityToken: a.IdentityToken}
	}
	return out, nil
}
