package programs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Builder compiles programs into a cache that outlives the tree.
type Builder struct {
	// Modules is the folder of the wrapper modules.
	Modules string
	// Cache holds one folder per set of inputs.
	Cache string
	// Say tells one step.
	Say func(format string, a ...any)
	// Tick tells how a running compilation stands, about every Every.
	Tick  func(format string, a ...any)
	Every time.Duration
}

// Build makes sure that the program is in the cache and returns its path there.
func (b *Builder) Build(ctx context.Context, p Program) (string, error) {
	module := filepath.Join(b.Modules, p.Module)
	key, err := b.key(ctx, p, module)
	if err != nil {
		return "", err
	}
	home := filepath.Join(b.Cache, key)
	built := filepath.Join(home, p.Name)
	if fileExists(built) {
		b.Say("%s: already compiled", p.Name)
		return built, nil
	}
	if err := os.MkdirAll(home, 0o700); err != nil {
		return "", fmt.Errorf("making the cache of programs: %w", err)
	}
	unlock, err := b.lock(ctx, home, p)
	if err != nil {
		return "", err
	}
	defer unlock()
	if fileExists(built) { // by the build we waited for
		b.Say("%s: already compiled", p.Name)
		return built, nil
	}
	if err := b.compile(ctx, p, module, home, built); err != nil {
		return "", fmt.Errorf("compiling %s: %w", p.Name, err)
	}
	return built, nil
}

// key names the inputs: the pinned modules, the flags and the compiler.
func (b *Builder) key(ctx context.Context, p Program, module string) (string, error) {
	h := sha256.New()
	for _, name := range []string{"go.mod", "go.sum"} {
		raw, err := os.ReadFile(filepath.Join(module, name)) // #nosec G304 -- the tree's own modules
		if err != nil {
			return "", fmt.Errorf("reading the pins of %s: %w", p.Name, err)
		}
		h.Write(fmt.Appendf(nil, "%s %d\n", name, len(raw)))
		h.Write(raw)
	}
	// A program that is put together here, from packages of its module.
	own, err := filepath.Glob(filepath.Join(module, "*.go"))
	if err != nil {
		return "", fmt.Errorf("reading the program %s: %w", p.Name, err)
	}
	for _, name := range own {
		if filepath.Base(name) == "tools.go" {
			continue
		}
		raw, err := os.ReadFile(name) // #nosec G304 -- the tree's own modules
		if err != nil {
			return "", fmt.Errorf("reading the program %s: %w", p.Name, err)
		}
		h.Write(fmt.Appendf(nil, "%s %d\n", filepath.Base(name), len(raw)))
		h.Write(raw)
	}
	// Asked inside the module: its go line may select another toolchain.
	cmd := exec.CommandContext(ctx, "go", "env", "GOVERSION", "GOOS", "GOARCH", "GOAMD64", "GOARM64")
	cmd.Dir = module
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("asking the Go toolchain for its version: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	h.Write(fmt.Appendf(nil, "%s\n%s\n", out, strings.Join(slices.Concat(p.arguments("NAME"), p.Unpublished, p.Files, p.compiler()), "\x00")))
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

func (p Program) arguments(out string) []string {
	args := []string{"build", "-trimpath", "-buildvcs=false", "-ldflags", p.LDFlags}
	if p.Tags != "" {
		args = append(args, "-tags", p.Tags)
	}
	return append(args, "-o", out, p.Package)
}

// compiler is the environment of a program that needs a C compiler.
func (p Program) compiler() []string {
	if !p.CGO {
		return nil
	}
	return []string{"CGO_ENABLED=1", "CGO_CFLAGS=-O2 -g -Wno-deprecated-declarations"}
}

func (p Program) environment() []string {
	return slices.Concat(os.Environ(), []string{"CGO_ENABLED=0"}, p.compiler())
}

// collect copies the files of the module that belong to the program beside it.
func collect(ctx context.Context, p Program, module, to string) error {
	if err := os.RemoveAll(to); err != nil {
		return fmt.Errorf("collecting the files of %s: %w", p.Name, err)
	}
	if len(p.Files) == 0 {
		return nil
	}
	cmd := exec.CommandContext(ctx, "go", "list", "-tags", "tools", "-f", "{{.Module.Dir}}", p.Package) // #nosec G204 -- from the fixed table
	cmd.Dir = module
	cmd.Env = p.environment()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("finding the module of %s: %w: %s", p.Name, err, bytes.TrimSpace(stderr.Bytes()))
	}
	for _, f := range p.Files {
		from, target := filepath.Join(strings.TrimSpace(string(out)), f), filepath.Join(to, f)
		err := os.MkdirAll(filepath.Dir(target), 0o755) // #nosec G301 -- programs are not secret
		if info, statErr := os.Stat(from); statErr == nil && info.IsDir() {
			err = errors.Join(err, os.CopyFS(target, os.DirFS(from)))
		} else {
			err = errors.Join(err, statErr, copyFile(from, target))
		}
		if err != nil {
			return fmt.Errorf("collecting the files of %s: %w", p.Name, err)
		}
	}
	return nil
}

// completed copies the program's module, adds the files that only upstream's build
// makes, and returns a go.mod in which the copy takes the module's place.
func completed(ctx context.Context, p Program, module, home string) (string, error) {
	run := func(args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, "go", args...) // #nosec G204 -- from the fixed table
		cmd.Dir = module
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return "", fmt.Errorf("completing the module of %s: go %s: %w: %s", p.Name, args[0], err, bytes.TrimSpace(stderr.Bytes()))
		}
		return strings.TrimSpace(string(out)), nil
	}
	named, err := run("list", "-tags", "tools", "-f", "{{.Module.Path}}\n{{.Module.Dir}}", p.Package)
	if err != nil {
		return "", err
	}
	path, dir, _ := strings.Cut(named, "\n")
	copied := filepath.Join(home, "."+p.Name+".src")
	if err := errors.Join(os.RemoveAll(copied), os.CopyFS(copied, os.DirFS(dir))); err != nil {
		return "", fmt.Errorf("completing the module of %s: %w", p.Name, err)
	}
	for _, file := range p.Unpublished {
		target := filepath.Join(copied, file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(target), 0o700),
			os.WriteFile(target, []byte("not in the lab: upstream makes this file when it makes a release\n"), 0o600)); err != nil {
			return "", fmt.Errorf("completing the module of %s: %w", p.Name, err)
		}
	}
	mod := filepath.Join(home, "."+p.Name+".mod")
	for from, to := range map[string]string{"go.mod": mod, "go.sum": strings.TrimSuffix(mod, ".mod") + ".sum"} {
		if err := os.RemoveAll(to); err != nil {
			return "", fmt.Errorf("completing the module of %s: %w", p.Name, err)
		}
		if err := copyFile(filepath.Join(module, from), to); err != nil {
			return "", fmt.Errorf("completing the module of %s: %w", p.Name, err)
		}
	}
	if _, err := run("mod", "edit", "-replace", path+"="+copied, mod); err != nil {
		return "", err
	}
	return mod, nil
}

func (b *Builder) compile(ctx context.Context, p Program, module, home, built string) (err error) {
	began := time.Now()
	// Beside the target, so that the rename at the end stays on one file system. The
	// lock is held: what an interrupted build left here belongs to nobody.
	tmp := filepath.Join(home, "."+p.Name+".part")
	if err := os.RemoveAll(tmp); err != nil {
		return fmt.Errorf("clearing an interrupted build: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	// -v prints each package when it is compiled and changes nothing else.
	args := append([]string{"build", "-v"}, p.arguments(tmp)[1:]...)
	if len(p.Unpublished) > 0 {
		mod, err := completed(ctx, p, module, home)
		if err != nil {
			return err
		}
		args = slices.Insert(args, 2, "-modfile", mod)
	}
	cmd := exec.CommandContext(ctx, "go", args...) // #nosec G204 -- from the fixed table
	cmd.Dir = module
	cmd.Env = p.environment()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// The compilers are children of the go command: the group goes with it.
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	seen := &packages{}
	cmd.Stderr = seen
	b.Say("%s: compiling, usually about %s on 2 cores, seconds if the Go build cache has it", p.Name, short(p.Usual))
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the Go toolchain: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	tick := time.NewTicker(b.Every)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				return fmt.Errorf("%w:\n%s", err, seen.tail.String())
			}
			if err := collect(ctx, p, module, Files(built)); err != nil {
				return err
			}
			if err := os.Rename(tmp, built); err != nil {
				return fmt.Errorf("keeping the program: %w", err)
			}
			b.Say("%s: compiled in %s", p.Name, short(time.Since(began)))
			return nil
		case <-tick.C:
			b.Tick("%s: compiling for %s of usually about %s, %d packages done",
				p.Name, short(time.Since(began)), short(p.Usual), seen.count.Load())
		}
	}
}

// lock makes two builds of the same program wait for each other.
func (b *Builder) lock(ctx context.Context, home string, p Program) (func(), error) {
	f, err := os.OpenFile(filepath.Join(home, "."+p.Name+".lock"), os.O_CREATE|os.O_RDWR, 0o600) // #nosec G304 -- inside the cache
	if err != nil {
		return nil, fmt.Errorf("locking the cache of programs: %w", err)
	}
	for said := false; ; said = true {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("locking the cache of programs: %w", errors.Join(err, f.Close()))
		}
		if !said {
			b.Say("%s: waiting for another build of it", p.Name)
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), f.Close())
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// Link puts a cached program into a directory of programs, replacing an older one.
func Link(built, dir, name string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil { // #nosec G301 -- programs are not secret
		return fmt.Errorf("making the directory of programs: %w", err)
	}
	target := filepath.Join(dir, name)
	have, err1 := os.Stat(target)
	want, err2 := os.Stat(built)
	if err1 == nil && err2 == nil && os.SameFile(have, want) {
		return nil
	}
	if err := os.RemoveAll(Files(target)); err != nil {
		return fmt.Errorf("linking %s: %w", name, err)
	}
	if _, err := os.Stat(Files(built)); err == nil {
		if err := os.CopyFS(Files(target), os.DirFS(Files(built))); err != nil {
			return fmt.Errorf("copying the files of %s: %w", name, err)
		}
	}
	tmp := filepath.Join(dir, "."+name+".part")
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("linking %s: %w", name, err)
	}
	// A hard link survives a cleared cache; across file systems only a copy does.
	if err := os.Link(built, tmp); err != nil {
		if err := copyFile(built, tmp); err != nil {
			return fmt.Errorf("copying %s: %w", name, errors.Join(err, os.RemoveAll(tmp)))
		}
	}
	if err := os.Rename(tmp, target); err != nil {
		return fmt.Errorf("linking %s: %w", name, err)
	}
	return nil
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from) // #nosec G304 -- inside the cache
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755) // #nosec G302 G304 -- a program
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// short prints minutes and seconds without the zero seconds of Duration.String.
func short(d time.Duration) string {
	d = d.Round(time.Second)
	text := d.String()
	if d >= time.Minute && d%time.Minute == 0 {
		text = strings.TrimSuffix(text, "0s")
	}
	return text
}

func fileExists(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// packages counts the lines of `go build -v` and keeps the last of them, which
// hold the errors.
type packages struct {
	count atomic.Int64
	tail  bytes.Buffer
}

func (p *packages) Write(b []byte) (int, error) {
	p.count.Add(int64(bytes.Count(b, []byte("\n"))))
	const keep = 8 << 10
	p.tail.Write(b)
	if over := p.tail.Len() - keep; over > 0 {
		p.tail.Next(over)
	}
	return len(b), nil
}
