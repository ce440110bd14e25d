package chart

import (
	"fmt"
	"os"
	"strings"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/cli"
	"helm.sh/helm/v3/pkg/registry"
)

// Override names a chart of the user's own: a directory, an archive, an OCI
// reference, or a name in a repository.
type Override struct {
	// Chart is a path, "oci://…" or, with Repository, a chart's name.
	Chart      string
	Repository string
	Version    string
}

// LoadOverride reads the user's chart; anything that is not a path is fetched.
func LoadOverride(o Override) (*Chart, error) {
	if o.Repository == "" && !strings.HasPrefix(o.Chart, "oci://") {
		if _, err := os.Stat(o.Chart); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrLoad, err)
		}
		return LoadPath(o.Chart)
	}
	client, err := registry.NewClient()
	if err != nil {
		return nil, fmt.Errorf("%w: preparing the registry client: %w", ErrLoad, err)
	}
	pull := action.NewInstall(&action.Configuration{RegistryClient: client})
	pull.SetRegistryClient(client)
	pull.RepoURL, pull.Version = o.Repository, o.Version
	file, err := pull.LocateChart(o.Chart, cli.New())
	if err != nil {
		return nil, fmt.Errorf("%w: fetching %s: %w", ErrLoad, o.Chart, err)
	}
	inner, err := loader.Load(file)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrLoad, o.Chart, err)
	}
	return wrap(inner, o.Chart), nil
}
