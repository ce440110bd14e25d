package snapshot

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"

	"k8s.io/client-go/rest"

	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/host"
)

// Bounds of the collection. None of them adds to another: everything runs at once.
const (
	fileDeadline    = 2 * time.Second
	commandDeadline = 5 * time.Second
	probeDeadline   = 4 * time.Second
	networkDeadline = 8 * time.Second
	// DefaultTimeout bounds everything but the GPUs.
	DefaultTimeout = 10 * time.Second
	// DefaultGPUTimeout bounds the GPUs. A first initialisation without persistence
	// mode takes up to half a minute (github.com/NVIDIA/nvidia-docker threads 723
	// and 1279), so that what answers later than a minute hangs.
	DefaultGPUTimeout = 65 * time.Second
	// handover is the time to hand in an answer after the end.
	handover = 200 * time.Millisecond
	// looks bounds how many looks at the machine are under way at once.
	looks = 48
)

// Options says what to collect.
type Options struct {
	// Root is where the machine's file system begins; empty means "/". Elsewhere no
	// program is asked unless Programs says where it lies.
	Root string
	// Version is llmbox's own.
	Version string
	// Offline leaves out whatever would leave the machine: DNS, HTTPS.
	Offline bool
	// Hosts are what the install downloads from: "HOST", "HOST:PORT" or a URL.
	Hosts []string
	// DNSNames are the names to resolve; those of Hosts when empty.
	DNSNames []string
	// DiskPaths are measured beside the usual ones.
	DiskPaths []string
	// Fsync measures how long writes take to reach the disk that holds FsyncPath.
	Fsync     bool
	FsyncPath string
	// NetworkTimeout bounds each question to the network; 0 means 8 seconds.
	NetworkTimeout time.Duration
	// Proxy chooses the proxy of a request; nil means by the environment.
	Proxy func(*http.Request) (*url.URL, error)
	// Resolver resolves names; nil means the machine's settings.
	Resolver *net.Resolver
	// RootCAs are the authorities trusted; nil means the machine's.
	RootCAs *x509.CertPool
	// GPU asks the GPUs; nil leaves them out.
	GPU func(context.Context) gpu.Report
	// Timeout and GPUTimeout bound the whole; 0 means the default.
	Timeout    time.Duration
	GPUTimeout time.Duration
	// Programs are the directories in which programs are looked for; empty means
	// those of host.SearchPath.
	Programs []string
	// Environ is the environment to report on; nil means this process's.
	Environ []string
	// UID is what the collector runs as; nil means this process's.
	UID *int
	// Installed also reads what only a machine with a box on it has: k3s's log and
	// certificates, containerd's log, the GPU from inside its containers.
	Installed bool
	// K3sData is k3s's data directory; empty means its default.
	K3sData string
	// Kube reaches the box's cluster; nil leaves it out. It is only read from.
	Kube *rest.Config
	// Endpoint asks the box for one token, as a client does; nil leaves it out.
	Endpoint func(context.Context) EndpointProbe
	// ClusterOnly leaves the machine out: the cluster is somewhere else.
	ClusterOnly bool
}

// collector gathers the answers. What comes after the snapshot was handed over is
// dropped.
type collector struct {
	options Options
	host    *host.Host
	slots   chan struct{}
	group   sync.WaitGroup

	mu      sync.Mutex
	sealed  bool
	s       *Snapshot
	pending map[string]int
}

// Collect takes a snapshot of the machine. It always returns one, within
// Options.Timeout and, where GPUs are asked, Options.GPUTimeout; what could not be
// had by then is in Manifest.Unreadable with the reason.
func Collect(ctx context.Context, o Options) *Snapshot {
	if o.Root == "" {
		o.Root = "/"
	}
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.GPUTimeout <= 0 {
		o.GPUTimeout = DefaultGPUTimeout
	}
	if o.Environ == nil {
		o.Environ = os.Environ()
	}
	uid := os.Geteuid()
	if o.UID != nil {
		uid = *o.UID
	}
	o.UID = &uid
	c := &collector{
		options: o, host: &host.Host{Root: o.Root}, slots: make(chan struct{}, looks),
		s: New(), pending: map[string]int{},
	}
	c.s.Manifest.Time = time.Now().UTC().Truncate(time.Second)
	c.s.Manifest.Version = o.Version
	c.s.Manifest.Root = uid == 0

	bounded, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	var gpus <-chan struct{}
	if o.GPU != nil {
		gpuCtx, cancelGPU := context.WithTimeout(ctx, o.GPUTimeout)
		defer cancelGPU()
		gpus = c.askGPU(gpuCtx)
	}
	if !o.ClusterOnly {
		c.startFiles(bounded)
		c.startCommands(bounded)
		c.startProbes(bounded)
		c.startBox(bounded)
	}
	c.startKube(bounded)

	done := make(chan struct{})
	go func() { c.group.Wait(); close(done) }()
	select {
	case <-done:
	case <-bounded.Done():
		// Whoever kept to the same deadline has its answer ready by now.
		select {
		case <-done:
		case <-time.After(handover):
		}
		c.giveUp(fmt.Sprintf("not done within %s", o.Timeout), ctx.Err())
	}
	if gpus != nil {
		<-gpus
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sealed = true
	return c.s
}

// giveUp marks everything that is still under way.
func (c *collector) giveUp(why string, calledOff error) {
	if calledOff != nil {
		why = calledOff.Error()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for place := range c.pending {
		c.s.MarkUnreadable(place, why)
	}
}

// record changes the snapshot unless it has been handed over.
func (c *collector) record(change func(*Snapshot)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.sealed {
		change(c.s)
	}
}

// spawn runs one look with its own deadline. Place is marked where the whole
// collection ends before it.
func (c *collector) spawn(ctx context.Context, place string, deadline time.Duration, look func(context.Context)) {
	c.mu.Lock()
	c.pending[place]++
	c.mu.Unlock()
	c.group.Go(func() {
		select {
		case c.slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		defer func() { <-c.slots }()
		bounded, cancel := context.WithTimeout(ctx, deadline)
		defer cancel()
		look(bounded)
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.pending[place]--; c.pending[place] == 0 {
			delete(c.pending, place)
		}
	})
}

// askGPU returns a channel that closes when the GPUs have answered or their time is
// up.
func (c *collector) askGPU(ctx context.Context) <-chan struct{} {
	answer := make(chan gpu.Report, 1)
	go func() { answer <- c.options.GPU(ctx) }()
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case report := <-answer:
			c.record(func(s *Snapshot) { s.GPU = &report })
			c.holders(ctx, report)
		case <-ctx.Done():
			c.record(func(s *Snapshot) { s.MarkUnreadable(gpuName, c.why(host.ErrDeadline, c.options.GPUTimeout)) })
		}
	}()
	return done
}

// holders looks at who holds GPU memory: a container, a pod or a session.
func (c *collector) holders(ctx context.Context, report gpu.Report) {
	const mostHolders = 256
	ctx, cancel := context.WithTimeout(ctx, fileDeadline)
	defer cancel()
	seen := map[int]bool{}
	for _, device := range report.Devices {
		for _, process := range device.Processes {
			if process.PID <= 0 || seen[process.PID] || len(seen) >= mostHolders {
				continue
			}
			seen[process.PID] = true
			for _, name := range []string{"comm", "cgroup"} {
				c.take(ctx, path.Join("/proc", strconv.Itoa(process.PID), name), fileGroup{Read: whole, Limit: 64 << 10})
			}
		}
	}
}

func (c *collector) startFiles(ctx context.Context) {
	for _, group := range hostFiles() {
		for _, pattern := range group.Paths {
			c.spawn(ctx, "host"+pattern, fileDeadline, func(bounded context.Context) {
				c.matches(ctx, bounded, pattern, group)
			})
		}
	}
	c.spawn(ctx, "host/sys/bus/pci/devices", fileDeadline, func(bounded context.Context) { c.pci(ctx, bounded) })
	var environment strings.Builder
	for _, line := range c.options.Environ {
		if name, _, ok := strings.Cut(line, "="); ok && reportedVariable(name) {
			environment.WriteString(strings.ReplaceAll(line, "\n", " ") + "\n")
		}
	}
	c.record(func(s *Snapshot) { s.AddFile("/proc/self/environ", redactLog(environment.String())) })
}

// reportedVariable says whether a variable of the environment matters to an install.
func reportedVariable(name string) bool {
	switch upper := strings.ToUpper(name); upper {
	case "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY":
		return true
	default:
		switch upper {
		case "SSL_CERT_FILE", "SSL_CERT_DIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES",
			"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "CONTAINER", "WSL_DISTRO_NAME", "KUBERNETES_SERVICE_HOST":
			return true
		}
	}
	return false
}

// matches takes whatever a pattern matches. A single path is taken within bounded;
// more get a deadline each, so that one that hangs costs only itself.
func (c *collector) matches(ctx, bounded context.Context, pattern string, group fileGroup) {
	if !strings.ContainsAny(pattern, `*?[`) {
		c.take(bounded, pattern, group)
		return
	}
	found, failed, err := c.host.Glob(bounded, pattern)
	if err != nil {
		c.unreadable("host"+pattern, err, fileDeadline)
		return
	}
	for dir, err := range failed {
		c.unreadable("host"+dir, err, fileDeadline)
	}
	if group.Leads != nil {
		c.links(bounded, found, group)
		return
	}
	if len(found) > mostMatches {
		c.record(func(s *Snapshot) {
			s.MarkUnreadable("host"+pattern, fmt.Sprintf("%d matches, the first %d were taken", len(found), mostMatches))
		})
		found = found[:mostMatches]
	}
	for _, name := range found {
		c.spawn(ctx, "host"+name, fileDeadline, func(bounded context.Context) { c.take(bounded, name, group) })
	}
}

// links takes those of many symbolic links that lead where the group wants.
func (c *collector) links(ctx context.Context, found []string, group fileGroup) {
	for _, name := range found {
		target, err := c.host.Readlink(ctx, name)
		if err == nil && group.Leads.MatchString(target) {
			c.take(ctx, name, group)
		}
	}
}

// pci takes the devices of NVIDIA. Vendors are read one after another: a machine
// has a few hundred devices, and reading this file asks no hardware.
func (c *collector) pci(ctx, bounded context.Context) {
	const devices = "/sys/bus/pci/devices"
	names, err := c.host.List(bounded, devices)
	if err != nil {
		c.unreadable("host"+devices, err, fileDeadline)
		return
	}
	c.record(func(s *Snapshot) { s.AddEntry(Entry{Path: devices, Kind: Directory, Mode: 0o755}) })
	for _, name := range names {
		at := path.Join(devices, name)
		vendor, err := c.host.ReadFile(bounded, at+"/vendor", 64)
		if err != nil {
			c.unreadable("host"+at+"/vendor", err, fileDeadline)
			continue
		}
		if strings.TrimSpace(string(vendor)) != "0x10de" {
			continue
		}
		for _, group := range pciFiles() {
			for _, file := range group.Paths {
				c.spawn(ctx, "host"+path.Join(at, file), fileDeadline, func(bounded context.Context) {
					c.take(bounded, path.Join(at, file), group)
				})
			}
		}
	}
}

// take records one path: what stands there and, where the group says so, its
// content.
func (c *collector) take(ctx context.Context, name string, group fileGroup) {
	place := "host" + name
	if strings.ContainsFunc(name, unicode.IsControl) || safeName(place) != nil {
		// Such a name can't stand in a snapshot; nothing that matters has one.
		return
	}
	info, err := c.host.Stat(ctx, name)
	if err != nil {
		c.unreadable(place, err, fileDeadline)
		return
	}
	entry := Entry{
		Path: name, Kind: kindOf(info.Mode), Mode: permissions(info.Mode), UID: info.UID, GID: info.GID,
		Time: info.Time.UTC().Truncate(time.Second),
	}
	switch entry.Kind {
	case RegularFile:
		entry.Size = info.Size
	case Device:
		entry.Major, entry.Minor = info.Major, info.Minor
	case Symlink:
		if entry.Target, err = c.host.Resolve(ctx, name); err != nil {
			c.unreadable(place, err, fileDeadline)
			return
		}
		if strings.ContainsFunc(entry.Target, unicode.IsControl) {
			return
		}
	case Directory, Other:
	}
	c.record(func(s *Snapshot) { s.AddEntry(entry) })
	if group.Read == statOnly || entry.Kind == Directory {
		return
	}
	data, err := c.content(ctx, name, group)
	if err != nil {
		// A link to a directory or to nowhere has no content; that is all there is.
		if entry.Kind == Symlink && (errors.Is(err, host.ErrNotRegular) || absent(err)) {
			return
		}
		c.unreadable(place, err, fileDeadline)
		return
	}
	c.record(func(s *Snapshot) {
		// Two rows may take different parts of one file: keep the larger.
		if old, known := s.files[name]; !known || len(old) < len(data) {
			s.AddFile(name, data)
		}
	})
}

func (c *collector) content(ctx context.Context, name string, group fileGroup) (string, error) {
	limit := group.Limit
	if limit <= 0 {
		limit = host.DefaultLimit
	}
	var data []byte
	var err error
	switch group.Read {
	case head:
		data, err = c.host.ReadHead(ctx, name, limit)
	case tail:
		data, err = c.host.ReadTail(ctx, name, limit)
	default:
		data, err = c.host.ReadFile(ctx, name, limit)
	}
	switch {
	case err != nil:
		return "", err
	case group.Binary:
		return string(data), nil
	case group.YAML:
		return redactYAML(string(data))
	}
	return redactLog(keepLines(string(data), group.Keep)), nil
}

func keepLines(text string, keep *regexp.Regexp) string {
	if keep == nil {
		return text
	}
	var out strings.Builder
	for line := range strings.Lines(text) {
		if keep.MatchString(line) {
			out.WriteString(line)
		}
	}
	return out.String()
}

func kindOf(mode fs.FileMode) EntryKind {
	switch {
	case mode.IsRegular():
		return RegularFile
	case mode.IsDir():
		return Directory
	case mode&fs.ModeSymlink != 0:
		return Symlink
	case mode&fs.ModeDevice != 0:
		return Device
	}
	return Other
}

// permissions are the bits of chmod(1), the special ones included.
func permissions(mode fs.FileMode) uint32 {
	bits := uint32(mode.Perm())
	if mode&fs.ModeSetuid != 0 {
		bits |= 0o4000
	}
	if mode&fs.ModeSetgid != 0 {
		bits |= 0o2000
	}
	if mode&fs.ModeSticky != 0 {
		bits |= 0o1000
	}
	return bits
}

// absent tells that nothing is there from that it could not be seen.
func absent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

func (c *collector) unreadable(place string, err error, deadline time.Duration) {
	if absent(err) {
		return
	}
	if safeName(place) != nil {
		return
	}
	c.record(func(s *Snapshot) { s.MarkUnreadable(place, c.why(err, deadline)) })
}

// why says in a few words why something could not be read.
func (c *collector) why(err error, deadline time.Duration) string {
	var number syscall.Errno
	switch {
	case errors.Is(err, fs.ErrPermission):
		return "permission denied"
	case errors.Is(err, host.ErrBusy):
		return host.ErrBusy.Error()
	case errors.Is(err, host.ErrDeadline), errors.Is(err, context.DeadlineExceeded):
		return fmt.Sprintf("no answer within %s", deadline)
	case errors.As(err, &number):
		return number.Error()
	}
	return err.Error()
}

func (c *collector) startCommands(ctx context.Context) {
	if c.options.Root != "/" && len(c.options.Programs) == 0 {
		return
	}
	for _, item := range commands() {
		deadline := item.Deadline
		if deadline <= 0 {
			deadline = commandDeadline
		}
		longest := deadline
		if item.Instead != nil {
			longest *= 2
		}
		// The deadline itself is kept by host.Run, which then still has to kill.
		c.spawn(ctx, commandDir+item.Name, longest+time.Second, func(bounded context.Context) {
			c.ask(bounded, item, deadline)
		})
	}
}

// ask runs one command.
func (c *collector) ask(ctx context.Context, item commandItem, deadline time.Duration) {
	place := commandDir + item.Name
	if item.Needs != "" {
		if _, err := c.host.Stat(ctx, item.Needs); err != nil {
			c.unreadable(place, err, fileDeadline)
			return
		}
	}
	if item.Root && *c.options.UID != 0 {
		if _, err := host.Find(item.Program, c.options.Programs); err == nil {
			c.record(func(s *Snapshot) { s.MarkUnreadable(place, "permission denied: only root is told") })
		}
		return
	}
	result, err := c.host.Run(ctx, host.Command{
		Program: item.Program, Args: item.Args, Directories: c.options.Programs,
		Deadline: deadline, Limit: item.Limit, Tail: item.Tail,
	})
	switch {
	case errors.Is(err, host.ErrNotInstalled):
	case err != nil:
		c.record(func(s *Snapshot) { s.MarkUnreadable(place, c.why(err, deadline)) })
	case item.Instead != nil && result.Exit != 0:
		first, _, _ := strings.Cut(strings.TrimSpace(string(result.Output)), "\n")
		c.record(func(s *Snapshot) {
			s.MarkUnreadable(place, fmt.Sprintf("exit status %d: %s", result.Exit, redactLog(first)))
		})
	default:
		output := redactLog(keepLines(string(result.Output), item.Keep))
		c.record(func(s *Snapshot) { s.AddCommand(item.Name, output, result.Exit) })
		return
	}
	if item.Instead != nil {
		c.ask(ctx, *item.Instead, deadline)
	}
}

// answer keeps what a probe found.
func (c *collector) answer(name string, value any) {
	raw, err := json.Marshal(value)
	c.record(func(s *Snapshot) {
		if err != nil {
			s.MarkUnreadable(probeDir+name, err.Error())
			return
		}
		s.AddProbe(name, raw)
	})
}
