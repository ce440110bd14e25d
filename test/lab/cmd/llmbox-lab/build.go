package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/llmbox-dev/llmbox/test/lab/programs"
)

func build(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("llmbox-lab build", flag.ContinueOnError)
	modules := fs.String("modules", "", "`directory` of the wrapper modules (default: test/lab/modules of the tree this program lies in)")
	out := fs.String("out", "", "`directory` for the programs (default: lab beside this program)")
	if err := parse(fs, args); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding the tree: %w", err)
	}
	if *out == "" {
		*out = filepath.Join(filepath.Dir(self), "lab")
	}
	if *modules == "" {
		if *modules, err = findModules(filepath.Dir(self)); err != nil {
			return err
		}
	}
	if _, err := exec.LookPath("go"); err != nil {
		return fmt.Errorf("compiling the lab's programs needs the Go toolchain: %w", err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return fmt.Errorf("choosing a cache for the programs: %w", err)
	}
	b := &programs.Builder{
		Modules: *modules,
		Cache:   filepath.Join(cache, "llmbox-lab"),
		Every:   5 * time.Second,
	}
	all := programs.All()
	for i, p := range all {
		b.Say = func(format string, a ...any) {
			fmt.Fprintf(os.Stderr, "[%d/%d] "+format+"\n", append([]any{i + 1, len(all)}, a...)...)
		}
		built, err := b.Build(ctx, p)
		if err != nil {
			return err
		}
		if err := programs.Link(built, *out, p.Name); err != nil {
			return err
		}
	}
	fmt.Fprintln(os.Stderr, "the lab's programs are in", *out)
	return nil
}

// findModules looks from the working directory and from the program upwards.
func findModules(program string) (string, error) {
	work, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("finding the wrapper modules: %w", err)
	}
	for _, dir := range []string{work, program} {
		for {
			for _, sub := range []string{filepath.Join("test", "lab", "modules"), "modules"} {
				m := filepath.Join(dir, sub)
				if _, err := os.Stat(filepath.Join(m, "kubernetes", "go.mod")); err == nil {
					return m, nil
				}
			}
			parent := filepath.Dir(dir)
			if parent == dir {
				break
			}
			dir = parent
		}
	}
	return "", errors.New("finding the wrapper modules: there is no test/lab/modules above the working directory or this program: name it with --modules")
}
