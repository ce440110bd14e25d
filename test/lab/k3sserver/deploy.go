package k3sserver

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/llmbox-dev/llmbox/test/lab/kubenode"
)

// manager is who the objects of manifests belong to.
const manager = "deploy@k3s"

// packaged are the components that k3s brings along and the stand-in has.
func packaged() []string { return []string{"coredns", "local-storage", "runtimes"} }

// absent are those that it has not.
func absent() []string { return []string{"traefik", "metrics-server"} }

// stageManifests writes the packaged components' files, and takes away what is
// switched off: the file, and the objects.
func (s *server) stageManifests(ctx context.Context) error {
	cluster := kubenode.Cluster{DNS: s.config.ClusterDNS, Domain: s.config.ClusterDomain, Storage: s.config.StoragePath}
	for _, name := range packaged() {
		raw, err := cluster.Manifest(name)
		if err != nil {
			return err
		}
		path := s.layout.server("manifests", name+".yaml")
		if !s.config.disables(name) {
			if err := writeFile(path, string(raw), 0o600); err != nil {
				return err
			}
			continue
		}
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := kubenode.Delete(ctx, s.admin, raw); err != nil {
			return err
		}
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("removing a manifest: %w", err)
		}
	}
	for _, name := range absent() {
		if !s.config.disables(name) {
			s.log.warn("The stand-in has no %s", name)
		}
	}
	return nil
}

// deploy applies the manifests and what changes among them, until ctx ends. Files that
// go away leave their objects, as in k3s.
func (s *server) deploy(ctx context.Context) error {
	applied := map[string]string{}
	for {
		files, err := manifestFiles(s.layout.server("manifests"))
		if err != nil {
			s.log.fail("Failed to read the manifests: %v", err)
		}
		for _, path := range files {
			raw, err := os.ReadFile(path) // #nosec G304 -- in the data directory
			if err != nil {
				continue // gone since
			}
			sum := sha256.Sum256(raw)
			if applied[path] == string(sum[:]) {
				continue
			}
			if err := kubenode.Apply(ctx, s.admin, manager, raw); err != nil {
				s.log.fail("Failed to process config: failed to process %s: %v", path, err)
				continue
			}
			s.log.info("Applied manifest at %s", path)
			applied[path] = string(sum[:])
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(2 * time.Second):
		}
	}
}

// manifestFiles lists the manifests in a directory and below, without those beside
// which a file of the same name with .skip lies.
func manifestFiles(dir string) ([]string, error) {
	var files []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		if slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(path)) {
			if _, err := os.Stat(path + ".skip"); errors.Is(err, fs.ErrNotExist) {
				files = append(files, path)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing manifests: %w", err)
	}
	return files, nil
}
