package node

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"
)

const cgroupRoot = "/sys/fs/cgroup"

// cgroupName is the lab's own cgroup in every hierarchy. It follows from the
// directory alone, so that it can be cleared when nothing else is left.
func cgroupName(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return "llmbox-lab-" + hex.EncodeToString(sum[:])[:12]
}

// hierarchies lists where cgroups are mounted: each controller's on its own
// (version 1), or one for all.
func hierarchies() ([]string, error) {
	if _, err := os.Stat(filepath.Join(cgroupRoot, "cgroup.controllers")); err == nil {
		return []string{cgroupRoot}, nil
	}
	entries, err := os.ReadDir(cgroupRoot)
	if err != nil {
		return nil, fmt.Errorf("reading the cgroups: %w", err)
	}
	var found []string
	for _, e := range entries {
		dir := filepath.Join(cgroupRoot, e.Name())
		// A link is another name of a hierarchy that is listed anyway.
		if e.IsDir() {
			if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err == nil {
				found = append(found, dir)
			}
		}
	}
	return found, nil
}

func makeCgroups(name string) error {
	dirs, err := hierarchies()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		ours := filepath.Join(dir, name)
		if err := os.Mkdir(ours, 0o755); err != nil && !errors.Is(err, fs.ErrExist) { // #nosec G301 -- as all cgroups
			return fmt.Errorf("making a cgroup: %w", err)
		}
		// Version 1 leaves a new cpuset empty, and an empty one takes no process.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			raw, err := os.ReadFile(filepath.Join(dir, file)) // #nosec G304 -- a cgroup
			if err != nil {
				continue
			}
			if err := os.WriteFile(filepath.Join(ours, file), bytes.TrimSpace(raw), 0o644); err != nil { // #nosec G306 -- a cgroup
				return fmt.Errorf("making a cgroup: %w", err)
			}
		}
	}
	return nil
}

// RemoveCgroups removes the cgroups of the lab in a directory. Its processes must
// have ended.
func RemoveCgroups(dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return fmt.Errorf("resolving the lab directory: %w", err)
	}
	return removeCgroups(cgroupName(dir))
}

func removeCgroups(name string) error {
	dirs, err := hierarchies()
	if err != nil {
		return err
	}
	// A cgroup is busy for a moment after its last process has ended.
	deadline := time.Now().Add(5 * time.Second)
	for {
		var errs []error
		for _, h := range dirs {
			errs = append(errs, removeTree(filepath.Join(h, name)))
		}
		err := errors.Join(errs...)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// weigh lets a cgroup count for as much as so many processes when CPUs are short. A
// whole machine would otherwise get what one process gets.
func weigh(name string, processes int) error {
	dirs, err := hierarchies()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		for file, most := range map[string]int{"cpu.shares": 1024 * processes, "cpu.weight": min(10000, 100*processes)} {
			path := filepath.Join(dir, name, file)
			if _, err := os.Stat(path); err != nil {
				continue // another controller's, or another version's
			}
			if err := os.WriteFile(path, []byte(strconv.Itoa(most)), 0o644); err != nil { // #nosec G306 -- a cgroup
				return fmt.Errorf("weighing a cgroup: %w", err)
			}
		}
	}
	return nil
}

// enterCgroups moves this process into a cgroup of every hierarchy.
func enterCgroups(name string) error {
	dirs, err := hierarchies()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		// 0 is who writes it.
		if err := os.WriteFile(filepath.Join(dir, name, "cgroup.procs"), []byte("0"), 0o644); err != nil { // #nosec G306 -- a cgroup
			return fmt.Errorf("entering a cgroup: %w", err)
		}
	}
	return nil
}

// removeTree removes cgroups from the leaves up; their files go with them.
func removeTree(root string) error {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("reading the lab's cgroups: %w", err)
	}
	slices.Reverse(dirs)
	for _, dir := range dirs {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing a cgroup: %w", err)
		}
	}
	return nil
}
