package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/hashicorp/hcl"
	"github.com/hashicorp/hcl/hcl/ast"
	"github.com/hashicorp/vault/command/server"
)

// served are the settings that reach the core. What else Vault knows is refused: obeyed
// by nobody, it would make a configuration look right that was never tried.
func served() []string {
	return []string{
		"ui", "log_level", "log_format", "disable_mlock", "disable_cache", "cluster_name",
		"api_addr", "cluster_addr", "default_lease_ttl", "max_lease_ttl",
		"storage", "listener", "telemetry",
	}
}

// load reads the configuration as Vault does, with Vault's own parser.
func load(paths []string) (*server.Config, error) {
	var config *server.Config
	for _, path := range paths {
		if err := refuseOthers(path); err != nil {
			return nil, err
		}
		part, twice, err := server.LoadConfigCheckDuplicate(path)
		if err != nil {
			return nil, fmt.Errorf("reading the configuration %s: %w", path, err)
		}
		if twice {
			return nil, fmt.Errorf("reading the configuration %s: a setting is there twice", path)
		}
		var unknown []error
		for _, e := range part.Validate(path) {
			unknown = append(unknown, errors.New(e.String()))
		}
		if err := errors.Join(unknown...); err != nil {
			return nil, fmt.Errorf("reading the configuration: %w", err)
		}
		if config == nil {
			config = part
		} else {
			config = config.Merge(part)
		}
	}
	switch {
	case config.Storage == nil:
		return nil, errors.New("reading the configuration: there is no storage")
	case len(config.Listeners) == 0:
		return nil, errors.New("reading the configuration: there is no listener")
	case !config.DisableMlock:
		return nil, errors.New("reading the configuration: disable_mlock must be true, memory is not locked here")
	case config.EnableUI:
		return nil, errors.New("reading the configuration: ui must be false, there is none here")
	}
	return config, nil
}

// refuseOthers looks at the settings as they are written: the parser keeps no trace of
// all that it read.
func refuseOthers(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("reading the configuration: %w", err)
	}
	files := []string{path}
	if info.IsDir() {
		files = nil
		for _, pattern := range []string{"*.hcl", "*.json"} {
			found, err := filepath.Glob(filepath.Join(path, pattern))
			if err != nil {
				return fmt.Errorf("reading the configuration: %w", err)
			}
			files = append(files, found...)
		}
	}
	for _, file := range files {
		raw, err := os.ReadFile(file) // #nosec G304 -- named by whoever starts the program
		if err != nil {
			return fmt.Errorf("reading the configuration: %w", err)
		}
		parsed, err := hcl.ParseBytes(raw)
		if err != nil {
			return fmt.Errorf("reading the configuration %s: %w", file, err)
		}
		root, ok := parsed.Node.(*ast.ObjectList)
		if !ok {
			return fmt.Errorf("reading the configuration %s: it is no list of settings", file)
		}
		for _, item := range root.Items {
			name, ok := item.Keys[0].Token.Value().(string)
			if !ok || !slices.Contains(served(), name) {
				return fmt.Errorf("reading the configuration %s: line %d: %s is not served by Vault's core alone",
					file, item.Pos().Line, item.Keys[0].Token.Text)
			}
		}
	}
	return nil
}
