package k3s

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/host"
)

// Facts are what the configuration depends on, beside what the user wants. Each
// stays the same from one run to the next on an unchanged machine; what moves by
// itself, such as free space, must not be here, or every run would restart k3s.
type Facts struct {
	Hostname    string
	MemoryBytes int64
	CPUs        int
	// GPUs comes from whoever looked at the driver.
	GPUs int
	// DataBytes is the size of the file system with the data directory and the images;
	// KubeletBytes that of the one with the volumes of pods.
	DataBytes, KubeletBytes int64
	// Addresses are those of the machine's own interfaces.
	Addresses []Address
	// Sysctls are the kernel settings that hold now and after every boot.
	Sysctls map[string]string
	// SELinux says that it enforces and that the policy of k3s is installed.
	SELinux bool
	// CgroupV1 says that the unified hierarchy is not there.
	CgroupV1 bool
}

// Address is one address of an interface.
type Address struct {
	Interface string       `json:"interface"`
	Prefix    netip.Prefix `json:"prefix"`
	// Default says that a default route leads through the interface; Metric is the
	// least of these routes.
	Default bool `json:"default"`
	Metric  int  `json:"metric"`
}

// cgroup2Magic is statfs(2)'s type of the unified hierarchy.
const cgroup2Magic = 0x63677270

// ReadFacts reads the facts of a machine; GPUs is left to the caller.
func ReadFacts(ctx context.Context, files *host.Host, dataDir string) (Facts, error) {
	f := Facts{CPUs: runtime.NumCPU()}
	if data, err := files.ReadFile(ctx, "/proc/sys/kernel/hostname", 0); err == nil {
		f.Hostname = strings.TrimSpace(string(data))
	}
	memory, err := files.ReadFile(ctx, "/proc/meminfo", 0)
	if err != nil {
		return Facts{}, fmt.Errorf("reading the size of memory: %w", err)
	}
	if f.MemoryBytes = parseMemory(string(memory)); f.MemoryBytes == 0 {
		return Facts{}, fmt.Errorf("reading the size of memory: no MemTotal: %w", ErrSetting)
	}
	if f.DataBytes, err = sizeOf(ctx, files, dataDir); err != nil {
		return Facts{}, err
	}
	if f.KubeletBytes, err = sizeOf(ctx, files, kubeletDir); err != nil {
		return Facts{}, err
	}
	if f.Addresses, err = ReadAddresses(ctx, files); err != nil {
		return Facts{}, err
	}
	if f.Sysctls, err = persistentSysctls(ctx, files); err != nil {
		return Facts{}, err
	}
	if fs, err := files.Statfs(ctx, "/sys/fs/cgroup"); err == nil {
		f.CgroupV1 = fs.Type != cgroup2Magic
	}
	if data, err := files.ReadFile(ctx, "/sys/fs/selinux/enforce", 0); err == nil && strings.TrimSpace(string(data)) == "1" {
		policies, _, _ := files.Glob(ctx, "/var/lib/selinux/*/active/modules/*/k3s")
		f.SELinux = len(policies) > 0
	}
	return f, nil
}

func parseMemory(text string) int64 {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, "MemTotal:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			if err != nil {
				return 0
			}
			return kib << 10
		}
	}
	return 0
}

// sizeOf measures the file system that holds a path, or will.
func sizeOf(ctx context.Context, files *host.Host, name string) (int64, error) {
	for {
		fs, err := files.Statfs(ctx, name)
		if err == nil {
			return int64(min(fs.TotalBytes, 1<<62)), nil // #nosec G115 -- bounded
		}
		if !absent(err) || name == "/" {
			return 0, fmt.Errorf("measuring the disk: %w", err)
		}
		name = path.Dir(name)
	}
}

// ReadAddresses lists the addresses of the machine's own interfaces in the order of
// the kernel. The interfaces themselves are those of this process.
func ReadAddresses(ctx context.Context, files *host.Host) ([]Address, error) {
	routes := map[string]int{}
	for name, parse := range map[string]func(string, map[string]int){
		"/proc/net/route": parseRoutes, "/proc/net/ipv6_route": parseRoutes6,
	} {
		data, err := files.ReadFile(ctx, name, fileLimit)
		if err != nil && !absent(err) {
			return nil, fmt.Errorf("reading routes: %w", err)
		}
		parse(string(data), routes)
	}
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	var out []Address
	for _, i := range interfaces {
		if i.Flags&net.FlagUp == 0 {
			continue
		}
		addresses, err := i.Addrs()
		if err != nil {
			continue
		}
		metric, isDefault := routes[i.Name]
		for _, a := range addresses {
			network, ok := a.(*net.IPNet)
			if !ok {
				continue
			}
			addr, ok := netip.AddrFromSlice(network.IP)
			if !ok {
				continue
			}
			ones, _ := network.Mask.Size()
			addr = addr.Unmap()
			out = append(out, Address{Interface: i.Name, Prefix: netip.PrefixFrom(addr, ones), Default: isDefault, Metric: metric})
		}
	}
	return out, nil
}

// parseRoutes finds the interfaces of default routes in /proc/net/route.
func parseRoutes(text string, into map[string]int) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		const mask = 7
		if len(fields) <= mask || fields[1] != "00000000" || fields[mask] != "00000000" {
			continue
		}
		keepLeast(into, fields[0], fields[6], 10)
	}
}

// parseRoutes6 does so in /proc/net/ipv6_route. The unreachable default route that
// every kernel has leads through lo.
func parseRoutes6(text string, into map[string]int) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		const device = 9
		if len(fields) <= device || strings.Trim(fields[0], "0") != "" || fields[1] != "00" || fields[device] == "lo" {
			continue
		}
		if _, v4 := into[fields[device]]; !v4 {
			keepLeast(into, fields[device], fields[5], 16)
		}
	}
}

func keepLeast(into map[string]int, name, metric string, base int) {
	n, err := strconv.ParseInt(metric, base, 64)
	if err != nil {
		return
	}
	if has, ok := into[name]; !ok || int(n) < has {
		into[name] = int(n)
	}
}

// persistentSysctls are the settings of sysctl.d(5): by file name over all
// directories, where a file of an earlier directory hides those of its name in the
// later ones, and /etc/sysctl.conf last, as `sysctl --system` reads it.
func persistentSysctls(ctx context.Context, files *host.Host) (map[string]string, error) {
	at := map[string]string{}
	for _, dir := range []string{"/usr/lib/sysctl.d", "/lib/sysctl.d", "/run/sysctl.d", "/etc/sysctl.d"} {
		names, err := files.List(ctx, dir)
		if err != nil {
			if absent(err) {
				continue
			}
			return nil, fmt.Errorf("reading kernel settings: %w", err)
		}
		for _, name := range names {
			if strings.HasSuffix(name, ".conf") {
				at[name] = path.Join(dir, name)
			}
		}
	}
	names := make([]string, 0, len(at))
	for name := range at {
		names = append(names, name)
	}
	slices.Sort(names)
	out := map[string]string{}
	for _, name := range append(names, "") {
		file := at[name]
		if name == "" {
			file = "/etc/sysctl.conf"
		}
		data, err := files.ReadFile(ctx, file, 0)
		if err != nil {
			if absent(err) || errors.Is(err, host.ErrNotRegular) {
				continue
			}
			return nil, fmt.Errorf("reading kernel settings: %w", err)
		}
		parseSysctls(string(data), out)
	}
	for key := range protectedSettings() {
		now, err := files.ReadFile(ctx, "/proc/sys/"+strings.ReplaceAll(key, ".", "/"), 0)
		if err != nil || strings.TrimSpace(string(now)) != out[key] {
			// Written down and not in force yet.
			delete(out, key)
		}
	}
	return out, nil
}

func parseSysctls(text string, into map[string]string) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == ';' {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			continue
		}
		key = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(key), "-"))
		into[strings.ReplaceAll(key, "/", ".")] = strings.TrimSpace(value)
	}
}
