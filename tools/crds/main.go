package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"
)

// generationLimit bounds one whole run; most of it is `go list` in cold module
// caches.
const generationLimit = 30 * time.Minute

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "crds:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := flag.NewFlagSet("crds", flag.ContinueOnError)
	root := flags.String("root", filepath.Join("..", ".."), "root of the llmbox source tree to write into")
	modules := flags.String("modules", "modules", "directory of the modules that pin the API types")
	only := flags.String("only", "", "comma-separated names of the groups to write (default: all)")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return fmt.Errorf("reading flags: %w", err)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, generationLimit)
	defer cancel()

	chosen, err := choose(groups(), *only)
	if err != nil {
		return err
	}
	for _, g := range chosen {
		files, err := g.generate(ctx, filepath.Join(*modules, g.name))
		if err != nil {
			return fmt.Errorf("generating %s: %w", g.name, err)
		}
		if err := replaceFiles(filepath.Join(*root, g.dir), files); err != nil {
			return fmt.Errorf("writing %s: %w", g.name, err)
		}
		total := 0
		for _, f := range files {
			total += len(f.content)
		}
		fmt.Printf("%-18s %3d CRDs %8d bytes  %s\n", g.name, len(files), total, g.dir)
	}
	return nil
}

// choose picks the groups named in a comma-separated list, or all of them.
func choose(all []group, only string) ([]group, error) {
	if only == "" {
		return all, nil
	}
	var chosen []group
	for name := range strings.SplitSeq(only, ",") {
		found := false
		for _, g := range all {
			if g.name == name {
				chosen = append(chosen, g)
				found = true
			}
		}
		if !found {
			return nil, fmt.Errorf("choosing groups: no group is named %q", name)
		}
	}
	return chosen, nil
}

// replaceFiles makes the YAML files of a directory exactly the given ones, so
// that a kind which upstream has dropped does not stay behind.
func replaceFiles(dir string, files []file) error {
	if err := os.MkdirAll(dir, 0o755); err != nil { // #nosec G301 -- a source directory
		return err
	}
	stale, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return err
	}
	for _, path := range stale {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	for _, f := range files {
		if err := os.WriteFile(filepath.Join(dir, f.name), f.content, 0o644); err != nil { // #nosec G306 -- a source file
			return err
		}
	}
	return nil
}
