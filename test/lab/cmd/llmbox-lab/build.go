package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/test/lab/programs"
)

func build(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("llmbox-lab build", flag.ContinueOnError)
	modules := fs.String("modules", "", "`directory` of the wrapper modules (default: test/lab/modules of the tree this program lies in)")
	out := fs.String("out", "", "`directory` for the programs (default: lab beside this program)")
	if err := parse(fs, args, true); err != nil {
		return err
	}
	all, err := choose(programs.All(), fs.Args())
	if err != nil {
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
		Every:   10 * time.Second,
	}
	// A terminal shows one line that changes; a log gets a line now and then.
	clear, end := "", "\n"
	if _, err := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS); err == nil {
		clear, end, b.Every = "\r\x1b[K", "", time.Second
	}
	for i, p := range all {
		say := func(end string) func(string, ...any) {
			return func(format string, a ...any) {
				fmt.Fprintf(os.Stderr, "%s[%d/%d] %s%s", clear, i+1, len(all), fmt.Sprintf(format, a...), end)
			}
		}
		b.Say, b.Tick = say("\n"), say(end)
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

// choose keeps the named programs, or all where none is named.
func choose(all []programs.Program, names []string) ([]programs.Program, error) {
	if len(names) == 0 {
		return all, nil
	}
	var chosen []programs.Program
	for _, name := range names {
		i := slices.IndexFunc(all, func(p programs.Program) bool { return p.Name == name })
		if i < 0 {
			return nil, usageError("the lab has no program %q", name)
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
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
