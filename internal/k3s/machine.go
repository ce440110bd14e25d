package k3s

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
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/internal/host"
)

const (
	// writeDeadline bounds putting one small file in place.
	writeDeadline = 30 * time.Second
	// hashDeadline bounds reading a binary of some 80 MB from a slow disk.
	hashDeadline = 2 * time.Minute
	// fileLimit bounds in bytes what is read of a configuration file.
	fileLimit = 4 << 20
)

// marker is in one of the first two lines of each file of ours.
const marker = "# Written by llmbox"

// Runner runs programs. *host.Host is the real one.
type Runner interface {
	Run(ctx context.Context, c host.Command) (host.Result, error)
}

// Options say where k3s is and how the machine is reached.
type Options struct {
	// Root is where the machine's files begin; "/" where empty.
	Root string
	// Runner runs programs; the machine itself where nil.
	Runner Runner
	// State is llmbox's data directory, Log that of its logs.
	State, Log string
	// DataDir is k3s's.
	DataDir string
	// BinDirs are tried in turn for the binary; /usr/local/bin, /opt/bin and bin within
	// State where empty.
	BinDirs []string
	// Kernel does what no program is asked for; the machine's own where nil.
	Kernel Kernel
}

// Machine is the host that k3s runs on. It is safe for concurrent reading; two
// goroutines must not change it at the same time.
type Machine struct {
	options Options
	files   *host.Host
	run     Runner
	kernel  Kernel
}

// NewMachine returns the machine that Options describe.
func NewMachine(o Options) *Machine {
	if o.Root == "" {
		o.Root = "/"
	}
	if o.State == "" {
		o.State = "/var/lib/llmbox"
	}
	if o.Log == "" {
		o.Log = "/var/log/llmbox"
	}
	if o.DataDir == "" {
		o.DataDir = DefaultDataDir
	}
	if len(o.BinDirs) == 0 {
		o.BinDirs = []string{"/usr/local/bin", "/opt/bin", path.Join(o.State, "bin")}
	}
	m := &Machine{options: o, files: &host.Host{Root: o.Root}, run: o.Runner, kernel: o.Kernel}
	if m.run == nil {
		m.run = m.files
	}
	if m.kernel == nil {
		m.kernel = &liveKernel{files: m.files}
	}
	return m
}

// at is where a path of the machine lies for this process.
func (m *Machine) at(name string) string { return filepath.Join(m.options.Root, name) }

func (m *Machine) recordFile() string { return path.Join(m.options.State, RecordName) }
func (m *Machine) logFile() string    { return path.Join(m.options.Log, logName) }
func (m *Machine) cacheDir() string   { return path.Join(m.options.State, "cache", "k3s") }

// exists says whether something stands at a path, a dangling link included. What
// can't be looked at counts as there.
func (m *Machine) exists(ctx context.Context, name string) bool {
	_, err := m.files.Stat(ctx, name)
	return err == nil || !absent(err)
}

func absent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

// read returns the content of a file; present is false where there is none.
func (m *Machine) read(ctx context.Context, name string) (data []byte, present bool, err error) {
	data, err = m.files.ReadFile(ctx, name, fileLimit)
	switch {
	case err == nil:
		return data, true, nil
	case absent(err):
		return nil, false, nil
	}
	return nil, false, fmt.Errorf("reading %s: %w", name, err)
}

// ours says whether content carries the marker.
func ours(content []byte) bool {
	first, rest, _ := bytes.Cut(content, []byte("\n"))
	second, _, _ := bytes.Cut(rest, []byte("\n"))
	return bytes.HasPrefix(first, []byte(marker)) || bytes.HasPrefix(second, []byte(marker))
}

// write puts a file in place all at once: nobody sees half of it, not even after a
// power cut.
func (m *Machine) write(ctx context.Context, name string, mode fs.FileMode, content []byte) error {
	_, err := m.place(ctx, name, mode, writeDeadline, func(w io.Writer) error {
		_, err := w.Write(content)
		return err
	}, nil)
	return err
}

// place writes a temporary file beside name, has it checked, and renames it. It
// returns the hash of what was written.
func (m *Machine) place(ctx context.Context, name string, mode fs.FileMode, deadline time.Duration, fill func(io.Writer) error, check func(temporary string) error) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	dir, err := m.files.Resolve(ctx, path.Dir(path.Clean("/"+name)))
	if err != nil {
		return "", fmt.Errorf("finding the directory of %s: %w", name, err)
	}
	sum, err := host.Bounded(ctx, m.files, func() (string, error) {
		return placeFile(m.at(path.Join(dir, path.Base(name))), mode, fill, check)
	})
	if err != nil {
		return "", fmt.Errorf("writing %s: %w", name, err)
	}
	return sum, nil
}

func placeFile(at string, mode fs.FileMode, fill func(io.Writer) error, check func(string) error) (sum string, err error) {
	dir := filepath.Dir(at)
	if err := makeDirs(dir); err != nil {
		return "", err
	}
	// The name is always the same, so that one that was cut off is written over by the
	// next run and not left behind.
	temporary := filepath.Join(dir, temporaryOf(filepath.Base(at)))
	// #nosec G302,G304 -- it gets its own mode below
	file, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			_ = file.Close()
			_ = os.Remove(file.Name())
		}
	}()
	hash := sha256.New()
	if err = fill(io.MultiWriter(file, hash)); err != nil {
		return "", err
	}
	if err = file.Chmod(mode); err != nil {
		return "", err
	}
	if err = file.Sync(); err != nil {
		return "", err
	}
	if err = file.Close(); err != nil {
		return "", err
	}
	if check != nil {
		if err = check(file.Name()); err != nil {
			return "", err
		}
	}
	if err = os.Rename(file.Name(), at); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil)), syncDir(dir)
}

func temporaryOf(name string) string { return ".llmbox-k3s." + name }

// makeDirs makes a directory with all above it, each of them safe after a power cut.
func makeDirs(dir string) error {
	if info, err := os.Stat(dir); err == nil {
		if !info.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
		}
		return nil
	}
	parent := filepath.Dir(dir)
	if parent == dir {
		return nil
	}
	if err := makeDirs(parent); err != nil {
		return err
	}
	// #nosec G301 -- what holds a secret has a mode of its own
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncDir(parent)
}

func syncDir(dir string) error {
	// #nosec G304 -- a directory that was just written to
	handle, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = handle.Sync()
	if closing := handle.Close(); err == nil {
		err = closing
	}
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOTSUP) {
		// Some file systems can't; there is nothing more that could be done.
		return nil
	}
	return err
}

// remove removes one file or link; one that is not there is no error.
func (m *Machine) remove(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, writeDeadline)
	defer cancel()
	dir, err := m.files.Resolve(ctx, path.Dir(path.Clean("/"+name)))
	if err != nil {
		return fmt.Errorf("removing %s: %w", name, err)
	}
	_, err = host.Bounded(ctx, m.files, func() (struct{}, error) {
		at := m.at(path.Join(dir, path.Base(name)))
		if err := os.Remove(at); err != nil && !absent(err) {
			return struct{}{}, err
		}
		if err := syncDir(filepath.Dir(at)); err != nil && !absent(err) {
			return struct{}{}, err
		}
		return struct{}{}, nil
	})
	if err != nil {
		return fmt.Errorf("removing %s: %w", name, err)
	}
	return nil
}

// hashOf returns the SHA-256 of a file in hexadecimal digits; empty where there is
// none.
func (m *Machine) hashOf(ctx context.Context, name string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, hashDeadline)
	defer cancel()
	at, err := m.files.Resolve(ctx, name)
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", name, err)
	}
	sum, err := host.Bounded(ctx, m.files, func() (string, error) { return hashFile(m.at(at)) })
	if absent(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", name, err)
	}
	return sum, nil
}

func hashFile(at string) (string, error) {
	info, err := os.Stat(at)
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() {
		return "", host.ErrNotRegular
	}
	file, err := os.Open(at) // #nosec G304 -- a path of k3s or one that the user named
	if err != nil {
		return "", err
	}
	defer func() { _ = file.Close() }()
	hash := sha256.New()
	if _, err := io.Copy(hash, file); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

func hashBytes(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// command runs a program and wants it to succeed.
func (m *Machine) command(ctx context.Context, deadline time.Duration, program string, args ...string) (string, error) {
	result, err := m.run.Run(ctx, host.Command{Program: program, Args: args, Deadline: deadline, Tail: true})
	said := strings.TrimSpace(string(result.Output))
	if err != nil {
		return said, fmt.Errorf("running %s: %w", strings.Join(append([]string{program}, args...), " "), err)
	}
	if result.Exit != 0 {
		return said, &CommandError{Argv: append([]string{program}, args...), Exit: result.Exit, Said: lastLine(said)}
	}
	return said, nil
}

// CommandError is a program that ended with a status other than zero.
type CommandError struct {
	Argv []string
	Exit int
	// Said is the last line of its output.
	Said string
}

// Error implements error.
func (e *CommandError) Error() string {
	text := fmt.Sprintf("%s ended with status %d", strings.Join(e.Argv, " "), e.Exit)
	if e.Said != "" {
		text += ": " + e.Said
	}
	return text
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndexByte(text, '\n')+1:]
}
