package preflight

import (
	"cmp"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
	"go.yaml.in/yaml/v3"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// The paths at which k3s looks for the NVIDIA runtime, in its order
// (k3s-io/k3s pkg/agent/containerd/runtimes.go).
const (
	operatorToolkit = "/usr/local/nvidia/toolkit"
	runtimeName     = "nvidia-container-runtime"
	k3sContainerd   = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
)

func toolkitChecks() []Check {
	return []Check{
		{
			ID: "toolkit.installed", Title: "NVIDIA Container Toolkit", Required: "nvidia-container-runtime on the host",
			Source: "NVIDIA/gpu-operator#413, #432; k3s-io/k3s#4070", Judge: judgeToolkit,
		},
		{
			ID: "toolkit.version", Title: "Version of the NVIDIA Container Toolkit", Required: oldestToolkit + " or newer (CVE-2025-23266)",
			Source: "NVIDIA/nvidia-container-toolkit v1.17.8; NVIDIA security bulletin 5659", Judge: judgeToolkitVersion,
		},
		{
			ID: "toolkit.ctk", Title: "nvidia-ctk", Required: "nvidia-ctk beside the runtime",
			Source: "NVIDIA/nvidia-container-toolkit#1227; docs.nvidia.com/datacenter/cloud-native/container-toolkit", Judge: judgeCTK,
			Causes: []string{"toolkit.installed"},
		},
		{
			ID: "toolkit.stale_copy", Title: "Left over copy of the toolkit", Required: "no toolkit of a former GPU Operator under " + operatorToolkit,
			Source: "k3s-io/k3s#4391; k3s-io/k3s#8248", Judge: judgeStaleToolkit,
		},
		{
			ID: "toolkit.ldconfig", Title: "ldconfig of the toolkit", Required: "a path that exists on this system",
			Source: "NVIDIA/nvidia-docker#1616; NVIDIA/nvidia-container-toolkit#147", Judge: judgeLdconfig,
		},
		{
			ID: "runtime.cdi", Title: "CDI specifications", Required: "specifications of the loaded driver, or none",
			Source: "NVIDIA/gpu-operator#1900; cncf-tags/container-device-interface SPEC.md", Judge: judgeCDI,
			Causes: []string{"gpu.driver.lib_mismatch", "gpu.driver.not_loaded"},
		},
		{
			ID: "runtime.dev_char_links", Title: "Links under /dev/char", Required: "a link for each device file of the GPU",
			Source: "NVIDIA/nvidia-container-toolkit#48; NVIDIA/gpu-operator#430, #539", Judge: judgeDevChar,
			Causes: append([]string{"gpu.device_nodes", "host.container", "host.wsl"}, driverDown()...),
		},
		{
			ID: "runtime.handler_missing", Title: "NVIDIA runtime in k3s's containerd", Required: `a runtime "nvidia" with an existing program`,
			Source: "NVIDIA/gpu-operator#413, #730; sgl-project/sglang#5515", Judge: judgeHandler,
			Causes: []string{"toolkit.installed", "toolkit.stale_copy"},
		},
		{
			ID: "runtime.cgroup_driver", Title: "Control group driver of the NVIDIA runtime", Required: "SystemdCgroup the same as runc's",
			Source: "k3s-io/k3s#7130, #8470", Judge: judgeCgroupDriver,
			Causes: []string{"runtime.handler_missing"},
		},
		{
			ID: "runtime.other_containerd", Title: "Other containerd", Required: "k3s brings its own; the other is left alone",
			Source: "NVIDIA/gpu-operator#1109, #1323; containerd/containerd#11926", Judge: judgeOtherContainerd,
		},
		{
			ID: "runtime.docker_default", Title: "Docker's default runtime", Required: "Docker's containers leave the GPU to the model server",
			Source: "NVIDIA/nvidia-docker#1678; k0sproject/k0s#1095", Judge: judgeDocker,
		},
	}
}

// runtimePath is the NVIDIA runtime that k3s would find.
func (f Facts) runtimePath() string {
	return f.firstExisting(operatorToolkit+"/"+runtimeName, "/usr/bin/"+runtimeName, "/usr/local/bin/"+runtimeName, "/usr/sbin/"+runtimeName, "/opt/bin/"+runtimeName)
}

// looked says whether the directory of programs was looked at, so that what is not
// there is known to be absent. A snapshot that has nothing but the toolkit's own
// programs there shows what somebody picked out, not all there is.
func (f Facts) looked(dir string) bool {
	names := f.List(dir)
	return f.exists(dir) && (len(names) == 0 || slices.ContainsFunc(names, func(name string) bool { return !strings.HasPrefix(name, "nvidia-") }))
}

func judgeToolkit(f Facts) []finding.Finding {
	if p := f.runtimePath(); p != "" {
		return well(p, atPath(p, ""))
	}
	if !f.looked("/usr/bin") {
		return unknown("/usr/bin", f.Manifest.Unreadable["host/usr/bin"])
	}
	if none := f.noGPU(); none != nil {
		return none
	}
	fix := "sudo llmbox preflight --fix. By hand: add NVIDIA's repository (docs.nvidia.com/datacenter/cloud-native/container-toolkit), then: " +
		f.installs("nvidia-container-toolkit", "nvidia-container-toolkit")
	return repairable("toolkit.install", fail("not installed", fix, atPath("/usr/bin/"+runtimeName, "absent")))
}

var ctkVersion = regexp.MustCompile(`version\s+v?(\d+\.\d+\.\d+\S*)`)

// toolkitVersion is the version of the toolkit: the package's, else nvidia-ctk's own.
func (f Facts) toolkitVersion() (v string, from finding.Evidence) {
	packages, _ := f.Packages()
	for _, p := range packages {
		if p.Installed && p.Name == "nvidia-container-toolkit" {
			v, from = p.Version, finding.Evidence{File: "commands/dpkg-packages.txt", Line: p.Name + " " + p.Version}
		}
	}
	if v != "" {
		return v, from
	}
	t := f.Command(snapshot.CommandCTK)
	if m := ctkVersion.FindStringSubmatch(t.Data); t.State == snapshot.Present && m != nil {
		return m[1], at(t, firstLine(t.Data))
	}
	return "", finding.Evidence{}
}

func judgeToolkitVersion(f Facts) []finding.Finding {
	if f.runtimePath() == "" && f.looked("/usr/bin") {
		return notApplicable("the toolkit is not installed")
	}
	v, from := f.toolkitVersion()
	if v == "" {
		return unknown("the version of nvidia-container-toolkit", "neither the package nor nvidia-ctk says")
	}
	before, ok := older(v, oldestToolkit)
	switch {
	case !ok:
		return unknown("the version of nvidia-container-toolkit", fmt.Sprintf("%q is no version", v))
	case before:
		fix := "sudo apt-get update && sudo apt-get install -y --only-upgrade nvidia-container-toolkit"
		if o := f.osRelease(); o.suse() {
			fix = "sudo zypper update -y nvidia-container-toolkit"
		} else if o.rpm() {
			fix = "sudo dnf upgrade -y nvidia-container-toolkit"
		}
		return repairable("toolkit.install", fail(v+": a container can take over the host", fix, from))
	}
	return well(v, from)
}

func judgeCTK(f Facts) []finding.Finding {
	if p := f.firstExisting("/usr/bin/nvidia-ctk", "/usr/local/bin/nvidia-ctk", operatorToolkit+"/nvidia-ctk"); p != "" {
		return well(p)
	}
	if t := f.Command(snapshot.CommandCTK); t.State == snapshot.Present && t.Exit == 0 {
		return well(firstLine(t.Data), at(t, firstLine(t.Data)))
	}
	if !f.looked("/usr/bin") {
		return unknown("/usr/bin", "")
	}
	if f.runtimePath() == "" {
		return notApplicable("the toolkit is not installed")
	}
	return repairable("toolkit.install", warn("the runtime is there without nvidia-ctk: an old or partial toolkit",
		f.installs("nvidia-container-toolkit", "nvidia-container-toolkit"), atPath("/usr/bin/nvidia-ctk", "absent")))
}

func judgeStaleToolkit(f Facts) []finding.Finding {
	stale := operatorToolkit + "/" + runtimeName
	if !f.exists(stale) {
		if !f.looked("/usr/bin") && !f.looked("/usr/local") {
			return unknown(operatorToolkit, "")
		}
		return well("none")
	}
	if f.Need.Installed {
		return note("there is one; a GPU Operator with its own toolkit made it", atPath(stale, ""))
	}
	return warn("k3s would take it before the one that packages keep up to date", "sudo rm -rf "+operatorToolkit, atPath(stale, ""))
}

// tomlFile decodes a TOML file of the host.
func (f Facts) tomlFile(name string) (map[string]any, snapshot.Text) {
	t := f.File(name)
	if t.State != snapshot.Present {
		return nil, t
	}
	var out map[string]any
	if _, err := toml.Decode(t.Data, &out); err != nil {
		t.State, t.Why = snapshot.Unreadable, err.Error()
		return nil, t
	}
	return out, t
}

// dig walks nested tables.
func dig(table map[string]any, keys ...string) any {
	var at any = table
	for _, key := range keys {
		m, ok := at.(map[string]any)
		if !ok {
			return nil
		}
		at = m[key]
	}
	return at
}

func judgeLdconfig(f Facts) []finding.Finding {
	config, t := f.tomlFile("/etc/nvidia-container-runtime/config.toml")
	switch t.State {
	case snapshot.Absent:
		if f.runtimePath() == "" {
			return notApplicable("the toolkit is not installed")
		}
		return well("the toolkit's default")
	case snapshot.Unreadable:
		return unknownText(t)
	}
	value, _ := dig(config, "nvidia-container-cli", "ldconfig").(string)
	file := strings.TrimPrefix(value, "@")
	if file == "" {
		return well("the toolkit's default", at(t, ""))
	}
	if f.exists(file) {
		return well(value, at(t, "ldconfig = "+strconv.Quote(value)))
	}
	if !f.looked(path.Dir(file)) && !f.looked("/usr"+path.Dir(file)) {
		return unknown(file, "")
	}
	if strings.HasPrefix(file, "/sbin/") && f.exists("/usr"+file) {
		return well(value, at(t, "ldconfig = "+strconv.Quote(value)))
	}
	return fail(file+" does not exist here", `sudo nvidia-ctk config --in-place --set nvidia-container-cli.ldconfig=@/sbin/ldconfig`, at(t, "ldconfig = "+strconv.Quote(value)))
}

func judgeCDI(f Facts) []finding.Finding {
	driver := f.loadedDriver()
	var specs []string
	for _, dir := range []string{"/etc/cdi", "/var/run/cdi", "/run/cdi"} {
		specs = append(specs, f.Glob(dir+"/*nvidia*.yaml")...)
		specs = append(specs, f.Glob(dir+"/*nvidia*.json")...)
		if why, bad := f.Manifest.Unreadable["host"+dir]; bad {
			return unknown(dir, why)
		}
	}
	if len(specs) == 0 {
		return notApplicable("none; the legacy mode of the runtime needs none")
	}
	if driver == "" {
		return notApplicable("no driver is loaded")
	}
	for _, name := range specs {
		t := f.File(name)
		if t.State != snapshot.Present {
			return unknownText(t)
		}
		var spec struct {
			Kind string `yaml:"kind"`
		}
		if err := yaml.Unmarshal([]byte(t.Data), &spec); err != nil {
			return repairable("runtime.cdi", warn(name+" can't be read: "+firstLine(err.Error()), "sudo nvidia-ctk cdi generate --output="+name, at(t, "")))
		}
		for _, m := range cdiLibrary.FindAllStringSubmatch(t.Data, -1) {
			if m[1] != driver {
				return repairable("runtime.cdi", warn(fmt.Sprintf("%s names driver %s, loaded is %s", name, m[1], driver),
					"sudo nvidia-ctk cdi generate --output="+name, at(t, m[0])))
			}
		}
	}
	return well(count(len(specs), "specification")+" of driver "+driver, atPath(specs[0], ""))
}

var cdiLibrary = regexp.MustCompile(`lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)?)`)

func judgeDevChar(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	var nodes []snapshot.Entry
	for _, name := range append(f.Glob("/dev/nvidia[0-9]*"), "/dev/nvidiactl", "/dev/nvidia-uvm") {
		if e, state := f.Stat(name); state == snapshot.Present && e.Kind == snapshot.Device && e.Major != 0 {
			nodes = append(nodes, e)
		}
	}
	switch {
	case len(nodes) == 0 && !f.exists("/dev"):
		return unknown("/dev", f.Manifest.Unreadable["host/dev"])
	case len(nodes) == 0:
		return notApplicable("no device files of a GPU")
	case f.Manifest.Unreadable["host/dev/char"] != "":
		return unknown("/dev/char", f.Manifest.Unreadable["host/dev/char"])
	}
	var missing []string
	for _, e := range nodes {
		link := fmt.Sprintf("/dev/char/%d:%d", e.Major, e.Minor)
		if !f.exists(link) {
			missing = append(missing, link)
		}
	}
	if len(missing) == 0 {
		return well(count(len(nodes), "link"))
	}
	// With CDI the runtime asks for the devices in a way that survives the reload.
	return repairable("runtime.dev_char_links", warn("absent: "+some(4, missing)+"; running containers lose the GPU at the next systemctl daemon-reload",
		"sudo nvidia-ctk system create-dev-char-symlinks --create-all", atPath(missing[0], "absent")))
}

// containerdRuntimes returns the table of runtimes in either layout of containerd's
// configuration: version 2's plugin name or version 3's.
func containerdRuntimes(config map[string]any) map[string]any {
	for _, plugin := range []string{"io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"} {
		if table, ok := dig(config, "plugins", plugin, "containerd", "runtimes").(map[string]any); ok {
			return table
		}
	}
	return nil
}

// k3sRuns says whether k3s runs here now.
func (f Facts) k3sRuns() bool {
	for _, name := range []string{"k3s.service", "k3s-agent.service"} {
		if u, state := f.Unit(name); state == snapshot.Present && u.Active == "active" {
			return true
		}
	}
	return false
}

func judgeHandler(f Facts) []finding.Finding {
	config, t := f.tomlFile(k3sContainerd)
	switch t.State {
	case snapshot.Absent:
		return notApplicable("k3s has not run here; it looks for the runtime when it starts")
	case snapshot.Unreadable:
		return unknownText(t)
	}
	if none := f.noGPU(); none != nil {
		return none
	}
	handler, ok := containerdRuntimes(config)["nvidia"].(map[string]any)
	if !ok {
		if f.runtimePath() == "" {
			return fail("config.toml lacks runtimes.\"nvidia\" and the toolkit is not installed",
				f.installs("nvidia-container-toolkit", "nvidia-container-toolkit")+" && sudo systemctl restart k3s", at(t, "no runtimes.\"nvidia\""))
		}
		measured := "config.toml lacks runtimes.\"nvidia\""
		evidence := []finding.Evidence{at(t, "no runtimes.\"nvidia\"")}
		if e, state := f.Stat(f.runtimePath()); state == snapshot.Present {
			if unit, found := f.Unit("k3s.service"); found == snapshot.Present {
				if since, err := systemdTime(unit.Since); err == nil && !e.Time.IsZero() && e.Time.After(since) {
					measured += fmt.Sprintf("; %s is newer than k3s's start", e.Path)
					evidence = append(evidence, atPath(e.Path, e.Time.UTC().Format(time.RFC3339)))
				}
			}
		}
		return repairable("k3s.restart", fail(measured, "sudo systemctl restart k3s (it looks for the runtime only when it starts)", evidence...))
	}
	program, _ := dig(handler, "options", "BinaryName").(string)
	if program != "" && !f.exists(program) && f.looked("/usr/bin") {
		return repairable("k3s.restart", fail("runtimes.\"nvidia\" names "+program+", which does not exist",
			f.installs("nvidia-container-toolkit", "nvidia-container-toolkit")+" && sudo systemctl restart k3s", at(t, "BinaryName = "+strconv.Quote(program))))
	}
	return well("nvidia -> "+cmp.Or(program, "the default program"), at(t, "BinaryName = "+strconv.Quote(program)))
}

// systemdTime reads the form in which systemctl show prints a moment.
func systemdTime(text string) (time.Time, error) {
	t, err := time.Parse("Mon 2006-01-02 15:04:05 MST", text)
	if err != nil {
		return time.Time{}, fmt.Errorf("reading systemd's time: %w", err)
	}
	return t, nil
}

func judgeCgroupDriver(f Facts) []finding.Finding {
	config, t := f.tomlFile(k3sContainerd)
	switch t.State {
	case snapshot.Absent:
		return notApplicable("k3s has not run here")
	case snapshot.Unreadable:
		return unknownText(t)
	}
	runtimes := containerdRuntimes(config)
	if runtimes["nvidia"] == nil {
		return notApplicable("no runtime \"nvidia\"")
	}
	ours, _ := dig(runtimes, "nvidia", "options", "SystemdCgroup").(bool)
	runc, _ := dig(runtimes, "runc", "options", "SystemdCgroup").(bool)
	if ours == runc {
		return well(fmt.Sprintf("both %t", runc), at(t, ""))
	}
	return fail(fmt.Sprintf("nvidia %t, runc %t: containers with a GPU die after seconds", ours, runc),
		"Remove /var/lib/rancher/k3s/agent/etc/containerd/config.toml.tmpl (or make both the same in it), then: sudo systemctl restart k3s", at(t, "SystemdCgroup"))
}

func judgeOtherContainerd(f Facts) []finding.Finding {
	p := f.firstExisting("/usr/bin/containerd", "/usr/local/bin/containerd")
	if p == "" {
		if !f.looked("/usr/bin") {
			return unknown("/usr/bin", "")
		}
		return well("none")
	}
	// A GPU Operator of 25.10 puts its settings into the wrong containerd.
	if drops := f.Glob("/etc/containerd/conf.d/*nvidia*"); len(drops) > 0 {
		return note("a GPU Operator has written "+drops[0]+" for "+p+"; k3s's own containerd does not read it", atPath(drops[0], ""))
	}
	return well(p + " is there too and stays as it is")
}

func judgeDocker(f Facts) []finding.Finding {
	unit, state := f.Unit("docker.service")
	daemon := f.File("/etc/docker/daemon.json")
	switch {
	case daemon.State == snapshot.Unreadable:
		return unknownText(daemon)
	case state != snapshot.Present && daemon.State == snapshot.Absent && f.firstExisting("/usr/bin/dockerd", "/usr/bin/docker") == "":
		if !f.looked("/usr/bin") {
			return unknown("/usr/bin", f.Manifest.Unreadable["host/usr/bin"])
		}
		return well("no Docker")
	}
	var config map[string]any
	if daemon.State == snapshot.Present {
		if err := yaml.Unmarshal([]byte(daemon.Data), &config); err != nil {
			return unknown("/etc/docker/daemon.json", firstLine(err.Error()))
		}
	}
	if name, _ := config["default-runtime"].(string); name == "nvidia" {
		return warn("nvidia: every container of Docker sees every GPU and can take its memory",
			`Remove "default-runtime" from /etc/docker/daemon.json and: sudo systemctl restart docker`, at(daemon, `"default-runtime": "nvidia"`))
	}
	if slices.Contains([]string{"active", "activating"}, unit.Active) {
		return well("Docker runs beside k3s and does not touch it")
	}
	return well("Docker is installed and does not run")
}
