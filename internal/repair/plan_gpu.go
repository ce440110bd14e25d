package repair

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// controlMinor is the minor number of /dev/nvidiactl (NVIDIA/open-gpu-kernel-modules
// kernel-open/common/inc/nv-chardev-numbers.h).
const controlMinor = 255

func planDeviceNodes(p *planner, found []finding.Finding) {
	tool := p.firstExisting("/usr/bin/nvidia-modprobe", "/usr/sbin/nvidia-modprobe", "/usr/local/bin/nvidia-modprobe")
	if tool == "" && p.exists("/usr/bin") {
		p.decline(found, "nvidia-modprobe is not installed; it belongs to the driver, which llmbox leaves alone")
		return
	}
	minors := p.minors()
	argv := []string{"nvidia-modprobe", "-c", strconv.Itoa(controlMinor)}
	uvm := []string{"nvidia-uvm"}
	// Older drivers call their devices nvidia-frontend.
	frontend := []string{"nvidia", "nvidia-frontend"}
	nodes := []DeviceNode{{"/dev/nvidiactl", frontend}, {"/dev/nvidia-uvm", uvm}}
	for _, n := range minors {
		argv = append(argv, "-c", strconv.Itoa(n))
		nodes = append(nodes, DeviceNode{"/dev/nvidia" + strconv.Itoa(n), frontend})
	}
	p.add(Action{
		Name: DeviceNodes, Title: "Make the GPU's device files",
		Safe: "nvidia-modprobe comes with the driver and makes them as the driver's own programs do when run by root; " +
			"a file with a wrong number is replaced, anything else stays",
		// With -u it makes the files of nvidia-uvm and no others (NVIDIA/nvidia-modprobe
		// nvidia-modprobe.c), so it takes two runs.
		Steps:  []Step{run(60, argv...), run(60, "nvidia-modprobe", "-c", "0", "-u")},
		Undo:   []string{"not needed: they are gone at the next boot, and harmless"},
		Verify: []Check{{What: "the device files have the driver's numbers", Devices: nodes}},
	}, found)
}

// minors are the GPUs' device numbers, in order.
func (p *planner) minors() []int {
	var minors []int
	for _, name := range p.facts.Glob("/proc/driver/nvidia/gpus/*/information") {
		for _, line := range p.facts.File(name).Lines() {
			key, value, _ := strings.Cut(line, ":")
			if n, err := strconv.Atoi(strings.TrimSpace(value)); err == nil && strings.TrimSpace(key) == "Device Minor" && n >= 0 {
				minors = append(minors, n)
			}
		}
	}
	if len(minors) == 0 {
		n := 1
		if p.facts.GPU != nil {
			n = max(n, len(p.facts.GPU.Devices))
		}
		for i := range n {
			minors = append(minors, i)
		}
	}
	slices.Sort(minors)
	return slices.Compact(minors)
}

// cdiLibrary is a library of the driver in a CDI specification.
var cdiLibrary = regexp.MustCompile(`lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)?)`)

func planCDI(p *planner, found []finding.Finding) {
	driver := p.driver()
	if !p.ctk() {
		p.decline(found, "nvidia-ctk is not installed")
		return
	}
	if driver == "" {
		p.decline(found, "no driver is loaded")
		return
	}
	var stale []string
	for _, dir := range []string{"/etc/cdi", "/run/cdi", "/var/run/cdi"} {
		for _, name := range slices.Concat(p.facts.Glob(dir+"/nvidia.yaml"), p.facts.Glob(dir+"/nvidia.json")) {
			// /var/run is /run on all that is not ancient.
			there := strings.Replace(name, "/var/run/", "/run/", 1)
			if !slices.Contains(stale, there) && cdiStale(p.facts.File(name), driver) {
				stale = append(stale, there)
			}
		}
	}
	if len(stale) == 0 {
		p.decline(found, "the specification is not nvidia-ctk's; whoever wrote it, such as a device plugin, writes it again when its pod restarts")
		return
	}
	a := Action{
		Name: CDI, Title: "Write the CDI specification anew for driver " + driver,
		Safe:  "the file is nvidia-ctk's own output for a driver that is no longer loaded; its old content stays in llmbox's record",
		After: p.after(Toolkit, DeviceNodes),
	}
	for _, name := range stale {
		step := run(60, "nvidia-ctk", "cdi", "generate", "--output="+name)
		step.Run.Touches = []string{name}
		a.Steps = append(a.Steps, step)
		a.Undo = append(a.Undo, "not needed: "+name+" described a driver that is no longer loaded")
		a.Verify = append(a.Verify, Check{What: name + " names driver " + driver, File: name, Has: []string{".so." + driver}})
	}
	p.add(a, found)
}

// cdiStale says whether a specification of nvidia-ctk can't be read or names another
// driver.
func cdiStale(t snapshot.Text, driver string) bool {
	if t.State != snapshot.Present {
		return false
	}
	var spec struct {
		Kind string `yaml:"kind"`
	}
	if err := yaml.Unmarshal([]byte(t.Data), &spec); err != nil {
		return true
	}
	if spec.Kind != "nvidia.com/gpu" {
		return false
	}
	for _, m := range cdiLibrary.FindAllStringSubmatch(t.Data, -1) {
		if m[1] != driver {
			return true
		}
	}
	return false
}

// ctk says whether nvidia-ctk is there, or will be.
func (p *planner) ctk() bool {
	t := p.facts.Command(snapshot.CommandCTK)
	return p.ctkPath() != "" || t.State == snapshot.Present && t.Exit == 0 || p.planned(Toolkit)
}

func (p *planner) ctkPath() string {
	return p.firstExisting("/usr/bin/nvidia-ctk", "/usr/local/bin/nvidia-ctk")
}

func planDevChar(p *planner, found []finding.Finding) {
	var links []Link
	for _, name := range slices.Concat(p.facts.Glob("/dev/nvidia[0-9]*"), []string{"/dev/nvidiactl", "/dev/nvidia-uvm"}) {
		e, state := p.facts.Stat(name)
		if state != snapshot.Present || e.Kind != snapshot.Device || e.Major == 0 {
			continue
		}
		links = append(links, Link{Path: fmt.Sprintf("/dev/char/%d:%d", e.Major, e.Minor), Target: "../" + path.Base(name)})
	}
	a := Action{
		Name: DevCharLinks, Title: "Make the links under /dev/char that keep the GPU in containers",
		Safe:  "links to device files that exist; containers that run are not touched",
		After: p.after(Toolkit, DeviceNodes),
	}
	for _, l := range links {
		a.Verify = append(a.Verify, Check{What: l.Path + " is there", AnyOf: []string{l.Path}})
	}
	switch {
	case len(links) == 0:
		p.decline(found, "the GPU's device files could not be seen")
		return
	case p.ctk():
		// /dev is empty at each boot; the rule is the one that NVIDIA advises
		// (NVIDIA/nvidia-container-toolkit#48).
		tool := p.ctkPath()
		if tool == "" && p.planned(Toolkit) {
			tool = "/usr/bin/nvidia-ctk"
		}
		a.Steps = []Step{run(60, "nvidia-ctk", "system", "create-dev-char-symlinks", "--create-all")}
		a.Undo = []string{"not needed: they are gone at the next boot, and harmless"}
		if tool == "" {
			// It answered from a place of its own; a rule that names no path would not
			// find it.
			break
		}
		a.Steps = append(a.Steps,
			drop(UdevFile, `ACTION=="add", DEVPATH=="/bus/pci/drivers/nvidia", \`,
				`  RUN+="`+tool+` system create-dev-char-symlinks --create-all"`),
			run(30, "udevadm", "control", "--reload"))
		a.Undo = []string{"sudo rm " + UdevFile, "sudo udevadm control --reload"}
		a.Verify = append(a.Verify, Check{What: "the rule for the next boot is there", AnyOf: []string{UdevFile}})
	default:
		for _, l := range links {
			if !p.exists(l.Path) {
				a.Steps = append(a.Steps, Step{Link: &l})
			}
		}
		a.Undo = []string{"not needed: they are gone at the next boot, and harmless"}
	}
	p.add(a, found)
}

// runtimeConfig is what k3s tells its containerd.
const runtimeConfig = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"

// k3sAgain restarts a k3s that runs: by its unit, or by ending it where a supervisor of
// llmbox's starts it again.
func (p *planner) k3sAgain() ([]Step, []Check) {
	if unit := p.k3sUnit(); unit != "" {
		return []Step{run(180, "systemctl", "restart", unit)},
			[]Check{{What: "k3s runs", Run: []string{"systemctl", "is-active", unit}, Says: []string{"active"}, WithinSeconds: 60}}
	}
	var service snapshot.Service
	if state, _ := p.facts.Probe(snapshot.ProbeService, &service); state != snapshot.Present || !service.Supervisor || !service.K3s {
		return nil, nil
	}
	// It ends everything of its own but containers, as with systemd's KillMode=process.
	// By parent and name: a number alone may be somebody else's by then.
	return []Step{run(120, "pkill", "-TERM", "-P", strconv.Itoa(service.SupervisorPID), "k3s")},
		[]Check{
			{What: "the k3s that ran has ended", Run: []string{"test", "!", "-d", "/proc/" + strconv.Itoa(service.PID)}, WithinSeconds: 100},
			{What: "the API server answers", Kube: &KubeCheck{Resource: "v1/namespaces", Name: "default", Field: "status.phase", Value: "Active"}, WithinSeconds: 120},
		}
}

// planRestart also comes after repairs that a running k3s takes note of only when it
// starts.
func planRestart(p *planner, found []finding.Finding) {
	after := p.after(Toolkit, AppArmor)
	steps, verify := p.k3sAgain()
	if len(steps) == 0 || len(found) == 0 && len(after) == 0 {
		p.decline(found, "k3s does not run")
		return
	}
	a := Action{
		Name: RestartK3s, Title: "Restart k3s, so that it looks for the NVIDIA runtime again",
		Safe:  "containers go on running while k3s restarts (docs.k3s.io/upgrades/killall); its API is away for some seconds",
		Steps: steps, Verify: verify, Undo: []string{"not needed"}, After: after, Always: true,
	}
	handler := slices.ContainsFunc(found, func(f finding.Finding) bool { return f.ID == "runtime.handler_missing" })
	if len(found) > 0 && !handler {
		a.Title = "Restart k3s, which sets up containerd, the pods' network and the services' addresses anew"
	}
	if handler || slices.Contains(after, Toolkit) {
		a.Verify = append(a.Verify, Check{
			What: `containerd has the runtime "nvidia"`, File: runtimeConfig, Has: []string{"nvidia-container-runtime"}, WithinSeconds: 60,
		})
	}
	p.add(a, found)
}
