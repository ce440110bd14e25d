package node

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Where a machine finds what the lab puts there: programs, llmbox, and registries.yaml,
// which makes containerd pull from the lab's registry.
const (
	labPrograms   = "/lab/programs"
	labLLMBox     = "/lab/bin/llmbox"
	labRegistries = "/lab/registries.yaml"
)

// enterRoot puts the machine's root directory together and makes it this process' root.
// /usr is the outer machine's, read-only, but for /usr/local; /run, /tmp and /dev are new
// at each boot; everything else is the machine's disk.
func (m machineConfig) enterRoot() error {
	root := filepath.Join(m.dir(), "root")
	at := func(elem ...string) string { return filepath.Join(append([]string{root}, elem...)...) }
	local := filepath.Join(m.dir(), "usr-local")
	lab := filepath.Join(m.dir(), "lab")
	if err := beginRoot(root, map[string]os.FileMode{"lab": 0o755, "opt": 0o755, "home": 0o755, "srv": 0o755, "media": 0o755, "boot": 0o755}); err != nil {
		return err
	}
	for _, dir := range []string{filepath.Join(local, "bin"), filepath.Join(local, "sbin"), filepath.Join(local, "lib"), filepath.Join(local, "share"),
		filepath.Join(lab, "programs"), filepath.Join(lab, "bin"), filepath.Join(lab, "logs")} {
		if err := os.MkdirAll(dir, 0o755); err != nil { // #nosec G301 -- as on any machine
			return fmt.Errorf("making the machine's root: %w", err)
		}
	}
	var errs []error
	for _, file := range []string{"passwd", "group", "nsswitch.conf", "ld.so.cache", "protocols", "services", "ethertypes", "localtime", "os-release", "login.defs", "shells"} {
		if _, err := os.Stat(at("etc", file)); errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, copyIfThere("/etc/"+file, at("etc", file)))
		}
	}
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return fmt.Errorf("making a machine id: %w", err)
	}
	for file, content := range map[string]string{
		"resolv.conf": "nameserver " + aroundAddress + "\n",
		"hosts":       "127.0.0.1 localhost\n127.0.1.1 " + m.State.Name + "\n",
		"hostname":    m.State.Name + "\n",
		"machine-id":  hex.EncodeToString(id) + "\n",
		"fstab":       "",
	} {
		if _, err := os.Stat(at("etc", file)); errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, write(at("etc", file), content))
		}
	}
	for link, target := range map[string]string{"var/run": "/run", "var/lock": "/run/lock"} {
		if err := os.Symlink(target, at(link)); err != nil && !errors.Is(err, fs.ErrExist) {
			errs = append(errs, err)
		}
	}
	errs = append(errs, write(filepath.Join(lab, "registries.yaml"), registriesYAML()), write(filepath.Join(lab, "bin", "llmbox"), ""))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("making the machine's root: %w", err)
	}
	errs = append(errs,
		mountWith("tmpfs", at("run"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"),
		mountWith("tmpfs", at("tmp"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"),
		os.MkdirAll(at("run", "lock"), 0o755), // #nosec G301 -- as on any machine
		mount("proc", at("proc"), "proc"),
		mount("sysfs", at("sys"), "sysfs"),
		mountCgroups(at("sys/fs/cgroup")),
		makeDevices(at("dev")),
		bind(lab, at("lab"), false),
		bind(m.Programs, at(labPrograms), true),
	)
	if m.LLMBox != "" {
		errs = append(errs, bind(m.LLMBox, at(labLLMBox), true))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("making the machine's root: %w", err)
	}
	if err := m.nameBoot(at("proc/sys/kernel/random/boot_id")); err != nil {
		return fmt.Errorf("making the machine's root: %w", err)
	}
	if err := m.addToolkit(root); err != nil {
		return fmt.Errorf("making the machine's root: %w", err)
	}
	// Last: what is laid over /usr would hide it.
	if err := bind(local, at("usr/local"), false); err != nil {
		return fmt.Errorf("making the machine's root: %w", err)
	}
	return leaveFor(root)
}

// nameBoot gives each boot a name of its own, as a kernel that has started has one.
func (m machineConfig) nameBoot(path string) error {
	raw := make([]byte, 16)
	if _, err := rand.Read(raw); err != nil {
		return fmt.Errorf("naming a boot: %w", err)
	}
	raw[6], raw[8] = raw[6]&0x0f|0x40, raw[8]&0x3f|0x80
	h := hex.EncodeToString(raw)
	file := filepath.Join(m.dir(), "boot_id")
	if err := write(file, strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")+"\n"); err != nil {
		return err
	}
	return bind(file, path, true)
}

// addToolkit makes the machine one on which driver and container toolkit are installed,
// where it has GPUs.
func (m machineConfig) addToolkit(root string) error {
	if m.GPUs == 0 {
		return nil
	}
	c := m.config
	c.Dir = m.dir()
	toolkit := filepath.Join(c.Dir, "gpu", "usr/bin/nvidia-container-runtime")
	if c.simulatesGPUs() {
		files, err := c.gpuConfigs()
		if err != nil {
			return err
		}
		for path, content := range files {
			if err := write(filepath.Join(root, path), content); err != nil {
				return err
			}
		}
		if err := copyProgram(filepath.Join(c.Programs, "nvidia-container-runtime"), toolkit); err != nil {
			return err
		}
		return addGPUs(c, root)
	}
	// With no GPU to hand in NVIDIA's runtime is runc.
	runc, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	if err := copyProgram(runc, toolkit); err != nil {
		return err
	}
	return layOver(filepath.Join(c.Dir, "gpu", "usr"), filepath.Join(root, "usr"))
}

// makeDevices gives the machine a /dev of its own: what is made there is not made on the
// machine outside.
func makeDevices(dev string) error {
	if err := mountWith("tmpfs", dev, "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
		return err
	}
	for _, name := range []string{"null", "zero", "full", "random", "urandom", "tty", "kmsg", "fuse", "net/tun"} {
		var there unix.Stat_t
		if err := unix.Stat("/dev/"+name, &there); err != nil {
			continue
		}
		path := filepath.Join(dev, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { // #nosec G301 -- as /dev
			return err
		}
		if err := unix.Mknod(path, there.Mode, int(there.Rdev)); err != nil { // #nosec G115 -- as it came
			return fmt.Errorf("making /dev/%s: %w", name, err)
		}
		if err := os.Chmod(path, os.FileMode(there.Mode).Perm()); err != nil {
			return err
		}
	}
	for link, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx", "core": "/proc/kcore",
	} {
		if err := os.Symlink(target, filepath.Join(dev, link)); err != nil {
			return err
		}
	}
	for _, dir := range []string{"pts", "shm", "mqueue"} {
		if err := os.Mkdir(filepath.Join(dev, dir), 0o755); err != nil { // #nosec G301 -- as /dev
			return err
		}
	}
	return errors.Join(
		mountWith("devpts", filepath.Join(dev, "pts"), "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5"),
		mountWith("tmpfs", filepath.Join(dev, "shm"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"),
		mountWith("mqueue", filepath.Join(dev, "mqueue"), "mqueue", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""),
	)
}

// mountCgroups mounts the hierarchies that the outer machine has, each from the root
// that this process' namespace gives it.
func mountCgroups(dir string) error {
	raw, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("reading the mounts: %w", err)
	}
	defer func() { _ = raw.Close() }()
	type hierarchy struct{ name, kind, options string }
	var all []hierarchy
	lines := bufio.NewScanner(raw)
	for lines.Scan() {
		// 36 35 98:0 /root /mount/point options optional-fields - type source super-options
		before, after, ok := strings.Cut(lines.Text(), " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 5 || len(g) < 3 || g[0] != "cgroup" && g[0] != "cgroup2" {
			continue
		}
		name, below := strings.CutPrefix(f[4], cgroupRoot)
		if below {
			all = append(all, hierarchy{name: name, kind: g[0], options: controllersOf(g[2])})
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading the mounts: %w", err)
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if len(all) == 1 && all[0].name == "" {
		return mountWith("cgroup2", dir, all[0].kind, flags, "")
	}
	if err := mountWith("tmpfs", dir, "tmpfs", flags, "mode=755"); err != nil {
		return err
	}
	for _, h := range all {
		if err := os.MkdirAll(dir+h.name, 0o755); err != nil { // #nosec G301 -- as all cgroups
			return err
		}
		if err := mountWith("cgroup", dir+h.name, h.kind, flags, h.options); err != nil {
			return fmt.Errorf("mounting the cgroups of %s: %w", h.name, err)
		}
	}
	// As systemd has it for hierarchies of several controllers, and others of one.
	for _, h := range all {
		for controller := range strings.SplitSeq(h.options, ",") {
			link := filepath.Join(dir, controller)
			if _, err := os.Lstat(link); errors.Is(err, fs.ErrNotExist) && !strings.Contains(controller, "=") && controller != "" {
				if err := os.Symlink(filepath.Base(h.name), link); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// controllersOf drops what a hierarchy is mounted with beside its controllers and name.
func controllersOf(options string) string {
	var keep []string
	for o := range strings.SplitSeq(options, ",") {
		switch o {
		case "rw", "ro", "nsdelegate", "memory_recursiveprot", "favordynmods", "xattr", "clone_children", "noprefix":
		default:
			if !strings.HasPrefix(o, "release_agent=") {
				keep = append(keep, o)
			}
		}
	}
	return strings.Join(keep, ",")
}

func mountWith(source, on, kind string, flags uintptr, options string) error {
	if err := unix.Mount(source, on, kind, flags, options); err != nil {
		return fmt.Errorf("mounting %s on %s: %w", kind, on, err)
	}
	return nil
}

// registriesYAML makes the lab's registry the first place for the images of a box.
func registriesYAML() string {
	var b strings.Builder
	b.WriteString("# Copy it to /etc/rancher/k3s/registries.yaml, or say the same in llmbox' configuration.\nmirrors:\n")
	for _, host := range mirrored() {
		fmt.Fprintf(&b, "  %s: {endpoint: [%q]}\n", host, mirrorURL(aroundAddress+":"+registryPort, host))
	}
	return b.String()
}
