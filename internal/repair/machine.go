package repair

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/http/httpproxy"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/dynamic"

	"github.com/llmbox-dev/llmbox/internal/host"
	"github.com/llmbox-dev/llmbox/internal/repair/record"
)

const (
	// outputLimit bounds in bytes what is kept of a program's output: its end.
	outputLimit = 16 << 10
	// fileLimit bounds a file that a repair reads or keeps.
	fileLimit = record.FileLimit
	// keyLimit bounds a downloaded key.
	keyLimit = 64 << 10
	// downloadDeadline bounds one download, which is some kilobytes.
	downloadDeadline = time.Minute
	// writeDeadline bounds one write: a slow disk takes seconds for an fsync.
	writeDeadline = 30 * time.Second
	// kindly is how long a program may take to end after it was asked to; dpkg
	// finishes the file at hand.
	kindly = 10 * time.Second
)

// Errors that a step can end with.
var (
	// ErrNotOurs means that a file is there which llmbox did not write.
	ErrNotOurs = errors.New("the file is not llmbox's")
	// ErrElsewhere means that another file says the same already.
	ErrElsewhere = errors.New("another file names it already")
	// ErrRefused means that the package manager would do more than it is asked for.
	ErrRefused = errors.New("it would change more than it is asked for")
	// ErrKey means that a key is not the expected one.
	ErrKey = errors.New("not the expected signing key")
	// ErrProgram means that a program ended with an error.
	ErrProgram = errors.New("the program ended with an error")
	// ErrNotMended means that the steps were taken and the check still does not hold.
	ErrNotMended = errors.New("the steps were taken, and still not so")
)

// Options say how a machine is reached.
type Options struct {
	// Root is where the machine's files begin; "/" where empty.
	Root string
	// Directories hold the programs; host.SearchPath where empty.
	Directories []string
	// Proxies are NAME=value pairs such as https_proxy=http://…, given to programs and
	// used for downloads. They can hold a password, which is never shown or recorded.
	Proxies []string
	// Environment is added for each program.
	Environment []string
	// Client does downloads; one that obeys Proxies where nil.
	Client *http.Client
	// Cluster reaches the box's cluster, for repairs of its objects.
	Cluster dynamic.Interface
}

// Machine is where actions are carried out.
type Machine struct {
	options Options
	files   *host.Host
	client  *http.Client
	hide    *strings.Replacer
}

// NewMachine returns the machine that Options describe.
func NewMachine(o Options) *Machine {
	if o.Root == "" {
		o.Root = "/"
	}
	m := &Machine{options: o, files: &host.Host{Root: o.Root}, client: o.Client, hide: hider(o.Proxies)}
	if m.client == nil {
		config := proxyConfig(o.Proxies)
		choose := config.ProxyFunc()
		m.client = &http.Client{
			Timeout:   downloadDeadline,
			Transport: &http.Transport{Proxy: func(r *http.Request) (*url.URL, error) { return choose(r.URL) }, TLSHandshakeTimeout: 10 * time.Second},
		}
	}
	return m
}

// ProxyEnvironment picks the proxy settings out of an environment, for Options.
func ProxyEnvironment(getenv func(string) string) []string {
	var out []string
	for _, name := range proxyNames() {
		if v := getenv(name); v != "" {
			out = append(out, name+"="+v)
		}
	}
	return out
}

func proxyNames() []string {
	return []string{"http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"}
}

func proxyConfig(proxies []string) *httpproxy.Config {
	var c httpproxy.Config
	for _, pair := range proxies {
		name, value, _ := strings.Cut(pair, "=")
		switch strings.ToLower(name) {
		case "http_proxy":
			c.HTTPProxy = value
		case "https_proxy":
			c.HTTPSProxy = value
		case "no_proxy":
			c.NoProxy = value
		}
	}
	return &c
}

// before is what stood at a path.
func (m *Machine) before(ctx context.Context, name string) (record.Before, error) {
	info, err := m.files.Stat(ctx, name)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return record.Before{State: record.BeforeAbsent}, nil
	case err != nil:
		return record.Before{}, fmt.Errorf("looking at %s: %w", name, err)
	case info.Mode&fs.ModeSymlink != 0:
		target, err := m.files.Readlink(ctx, name)
		if err != nil {
			return record.Before{}, fmt.Errorf("reading link %s: %w", name, err)
		}
		return record.Before{State: record.BeforeLink, Target: target}, nil
	}
	data, err := m.files.ReadFile(ctx, name, fileLimit)
	if err != nil {
		return record.Before{}, fmt.Errorf("reading %s: %w", name, err)
	}
	return record.Before{State: record.BeforeFile, Mode: info.Mode.Perm(), Content: data}, nil
}

// write puts a file in place all at once: nobody sees half of it.
func (m *Machine) write(ctx context.Context, name string, mode fs.FileMode, content []byte) error {
	return m.within(ctx, name, func(at string) (err error) {
		dir := filepath.Dir(at)
		// #nosec G301 -- directories of /etc that everybody may read
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		file, err := os.CreateTemp(dir, ".llmbox-*")
		if err != nil {
			return err
		}
		defer func() {
			if err != nil {
				_ = file.Close()
				_ = os.Remove(file.Name())
			}
		}()
		if _, err = file.Write(content); err != nil {
			return err
		}
		if err = file.Chmod(mode); err != nil {
			return err
		}
		if err = file.Sync(); err != nil {
			return err
		}
		if err = file.Close(); err != nil {
			return err
		}
		if err = os.Rename(file.Name(), at); err != nil {
			return err
		}
		return record.SyncDir(dir)
	})
}

func (m *Machine) link(ctx context.Context, name, target string) error {
	return m.within(ctx, name, func(at string) error {
		// #nosec G301 -- /dev/char, which everybody may read
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return err
		}
		return os.Symlink(target, at)
	})
}

// within resolves the directory of a path inside the root and does something there.
func (m *Machine) within(ctx context.Context, name string, do func(at string) error) error {
	ctx, cancel := context.WithTimeout(ctx, writeDeadline)
	defer cancel()
	dir, err := m.files.Resolve(ctx, path.Dir(path.Clean("/"+name)))
	if err != nil {
		return fmt.Errorf("finding the directory of %s: %w", name, err)
	}
	_, err = host.Bounded(ctx, m.files, func() (struct{}, error) {
		return struct{}{}, do(filepath.Join(m.options.Root, dir, path.Base(name)))
	})
	if err != nil {
		return fmt.Errorf("writing %s: %w", name, err)
	}
	return nil
}

// output is what a program said; only its end is kept.
type output struct {
	Text string
	Exit int
}

// run runs a program to its end or its deadline. Asked to stop, it first gets the
// chance to end by itself.
func (m *Machine) run(ctx context.Context, argv, environment []string, deadline time.Duration) (output, error) {
	program, err := host.Find(argv[0], m.options.Directories)
	if err != nil {
		return output{Exit: -1}, fmt.Errorf("running %s: %w", argv[0], err)
	}
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	// #nosec G204 -- an absolute path of a fixed directory and a list of arguments;
	// no shell is involved.
	cmd := exec.CommandContext(ctx, program, argv[1:]...)
	cmd.Env = slices.Concat([]string{
		"PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin", "LC_ALL=C", "LANGUAGE=", "HOME=/root", "TERM=dumb",
		"SYSTEMD_COLORS=0", "SYSTEMD_PAGER=",
	}, m.options.Proxies, m.options.Environment, environment)
	cmd.Dir = "/"
	kept := &tail{limit: outputLimit}
	cmd.Stdout, cmd.Stderr = kept, kept
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = kindly
	cmd.Cancel = func() error { return signalGroup(cmd, syscall.SIGTERM) }
	err = cmd.Run()
	if ctx.Err() != nil && cmd.Process != nil {
		_ = signalGroup(cmd, syscall.SIGKILL)
	}
	out := output{Text: m.hidden(kept.String()), Exit: -1}
	if errors.Is(err, exec.ErrWaitDelay) && ctx.Err() == nil {
		// It ended, and something that it started holds its output open.
		err = nil
	}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return out, fmt.Errorf("running %s: %w", argv[0], ctx.Err())
	case errors.As(err, &exit):
		out.Exit = exit.ExitCode()
		return out, nil
	case err != nil:
		return out, fmt.Errorf("running %s: %w", argv[0], err)
	}
	out.Exit = 0
	return out, nil
}

func signalGroup(cmd *exec.Cmd, sig syscall.Signal) error {
	err := syscall.Kill(-cmd.Process.Pid, sig)
	if errors.Is(err, syscall.ESRCH) {
		return os.ErrProcessDone
	}
	return err
}

// tail keeps the end of what is written to it.
type tail struct {
	mu    sync.Mutex
	limit int
	data  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.data = append(t.data, p...)
	if len(t.data) > 2*t.limit {
		t.data = append(t.data[:0], t.data[len(t.data)-t.limit:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	data := t.data
	if len(data) > t.limit {
		data = data[len(data)-t.limit:]
		// A secret cut in two could not be found any more; a whole line can.
		if i := bytes.IndexByte(data, '\n'); i >= 0 {
			data = data[i+1:]
		}
	}
	return string(bytes.ToValidUTF8(data, []byte("?")))
}

// download fetches a small file.
func (m *Machine) download(ctx context.Context, from string) (data []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, downloadDeadline)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return nil, fmt.Errorf("fetching %s: %w", from, err)
	}
	response, err := m.client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("fetching %s: %w", from, err)
	}
	defer func() { err = errors.Join(err, response.Body.Close()) }()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("fetching %s: %w: HTTP status %d", from, ErrProgram, response.StatusCode)
	}
	data, err = io.ReadAll(io.LimitReader(response.Body, keyLimit+1))
	if err != nil {
		return nil, fmt.Errorf("fetching %s: %w", from, err)
	}
	if len(data) > keyLimit {
		return nil, fmt.Errorf("fetching %s: more than %d bytes: %w", from, keyLimit, host.ErrTooLarge)
	}
	return data, nil
}

// locked says whether somebody holds an fcntl(2) lock on a file.
func (m *Machine) locked(ctx context.Context, name string) (bool, error) {
	at, err := m.files.Resolve(ctx, name)
	if err != nil {
		return false, fmt.Errorf("looking at lock %s: %w", name, err)
	}
	held, err := host.Bounded(ctx, m.files, func() (bool, error) {
		// #nosec G304 -- the lock file of a package manager
		file, err := os.OpenFile(filepath.Join(m.options.Root, at), os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
		if err != nil {
			return false, err
		}
		defer func() { _ = file.Close() }()
		ask := unix.Flock_t{Type: unix.F_WRLCK}
		if err := unix.FcntlFlock(file.Fd(), unix.F_GETLK, &ask); err != nil {
			return false, err
		}
		return ask.Type != unix.F_UNLCK, nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking at lock %s: %w", name, err)
	}
	return held, nil
}
