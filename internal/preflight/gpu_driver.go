package preflight

import (
	"cmp"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// driverRoots are the findings that explain why the driver is not at work.
func driverRoots() []string {
	return []string{
		"gpu.present", "gpu.pci.fallen_off", "gpu.driver.nouveau", "gpu.driver.vfio", "gpu.driver.secure_boot",
		"gpu.driver.no_module_for_kernel", "gpu.driver.flavour",
	}
}

// driverDown are the findings without whose cure nothing of the GPU works.
func driverDown() []string {
	return append(driverRoots(), "gpu.driver.missing", "gpu.driver.not_loaded", "gpu.driver.lib_mismatch")
}

func driverChecks() []Check {
	return []Check{
		{
			ID: "gpu.present", Title: "NVIDIA GPU", Required: "at least one NVIDIA GPU on the PCI bus",
			Source: "dstackai/dstack#1356; linux Documentation/ABI/testing/sysfs-bus-pci", Judge: judgePresent,
			Causes: []string{"host.container", "gpu.xid.79", "gpu.pci.fallen_off"},
		},
		{
			ID: "gpu.driver.nouveau", Title: "nouveau instead of the NVIDIA driver", Required: "no GPU in nouveau's hands",
			Source: "NVIDIA/k8s-driver-manager#37; kubernetes-sigs/image-builder#1468", Judge: judgeNouveau,
		},
		{
			ID: "gpu.driver.vfio", Title: "GPU handed to virtual machines", Required: "no GPU bound to vfio-pci",
			Source: "linux Documentation/driver-api/vfio.rst; NVIDIA/gpu-operator docs, sandbox workloads", Judge: judgeVFIO,
		},
		{
			ID: "gpu.driver.secure_boot", Title: "Secure Boot and the NVIDIA module", Required: "a signed NVIDIA kernel module, or Secure Boot off",
			Source: "NVIDIA/gpu-operator#1726; MicrosoftDocs/azure-docs#111536", Judge: judgeSecureBoot,
		},
		{
			ID: "gpu.driver.no_module_for_kernel", Title: "NVIDIA module of the running kernel", Required: "nvidia.ko for the running kernel",
			Source: "GoogleCloudPlatform/compute-gpu-installation#10; NVIDIA/nvidia-docker#365", Judge: judgeModuleForKernel,
		},
		{
			ID: "gpu.driver", Also: []string{"gpu.driver.missing", "gpu.driver.not_loaded"},
			Title: "NVIDIA driver", Required: "an NVIDIA driver, loaded",
			Source: "GoogleCloudPlatform/compute-gpu-installation#18; NVIDIA/nvidia-container-toolkit#260", Judge: judgeDriver,
			Causes: append(driverRoots(), "host.container"),
		},
		{
			ID: "gpu.driver.lib_mismatch", Title: "Driver and its libraries", Required: "kernel module and libnvidia-ml of the same version",
			Source: "lyulyul/shine-cluster#30; tinygrad/open-gpu-kernel-modules#47", Judge: judgeLibMismatch,
		},
		{
			ID: "gpu.driver.next_boot_broken", Title: "NVIDIA module of the next boot's kernel", Required: "nvidia.ko for the kernel that the next boot takes",
			Source: "GoogleCloudPlatform/compute-gpu-installation#25; NVIDIA/nvidia-docker#804", Judge: judgeNextBoot,
			Causes: []string{"gpu.driver.missing", "gpu.driver.no_module_for_kernel", "gpu.driver.nouveau"},
		},
		{
			ID: "gpu.driver.flavour", Title: "Open or proprietary NVIDIA modules", Required: "the open kernel modules on Blackwell and newer",
			Source: "NVIDIA/open-gpu-kernel-modules README; docs.nvidia.com/datacenter/tesla/driver-installation-guide, Kernel Modules", Judge: judgeFlavour,
		},
		{
			ID: "gpu.driver.branch", Title: "Driver branch", Required: "a driver branch that still gets security fixes",
			Source: "docs.nvidia.com/datacenter/tesla/drivers, Supported Drivers and CUDA Toolkit Versions", Judge: judgeBranch,
			Causes: []string{"image.cuda_requirement"},
		},
		{
			ID: "gpu.driver.gsp", Title: "GSP firmware of the driver", Required: "driver " + gspFixed + " or newer where GSP firmware is on",
			Source: "NVIDIA/open-gpu-kernel-modules#446, #1230", Judge: judgeGSP,
			Causes: []string{"image.cuda_requirement"},
		},
		{
			ID: "image.cuda_requirement", Title: "Driver and the model server's CUDA", Required: "a driver that serves the CUDA of the model server's image",
			Source: "vllm-project/vllm#5635; ggml-org/llama.cpp#9665", Judge: judgeCUDA,
			Causes: []string{"gpu.driver.missing"},
		},
		{
			ID: "gpu.nvml", Also: nvmlIDs(), Title: "NVIDIA's management library", Required: "an answer from NVML",
			Source: "NVIDIA/go-nvml#18; NVIDIA/nvidia-container-toolkit#260; leptonai/gpud#1209", Judge: judgeNVML,
			Causes: append(driverDown(), "gpu.xid.79", "gpu.xid.119", "gpu.xid.120", "gpu.device_nodes", "host.container", "host.wsl"),
		},
		{
			ID: "gpu.nvml.slow", Title: "Time that NVML takes", Required: "an answer within " + slowInit.String(),
			Source: "NVIDIA/nvidia-docker#1279; Azure/aks-gpu#105", Judge: judgeNVMLSlow,
			Causes: append([]string{"gpu.persistence", "gpu.nvml.timeout"}, driverDown()...),
		},
	}
}

func judgePresent(f Facts) []finding.Finding {
	gpus, known := f.pciGPUs()
	switch {
	case len(gpus) > 0:
		var names []string
		for _, g := range gpus {
			names = append(names, g.address)
		}
		return well(count(len(gpus), "GPU")+" at "+some(8, names), atPath("/sys/bus/pci/devices/"+gpus[0].address+"/vendor", "0x10de"))
	case f.GPU != nil && len(f.GPU.Devices) > 0:
		return well(count(len(f.GPU.Devices), "GPU"), finding.Evidence{File: "gpu.json", Field: "devices"})
	case known && f.GPU == nil && strings.HasPrefix(f.traces(), "an NVSwitch"):
		// There are no switches without GPUs; whoever took these facts left them out.
		return unknown("which GPUs there are beside "+f.traces(), "")
	case known:
		return fail("no NVIDIA GPU (vendor 10de) among the PCI devices",
			"Start a machine with an NVIDIA GPU: on a cloud, an instance type that has one. On a machine of your own, this must list it: sudo lspci -d 10de:",
			atPath("/sys/bus/pci/devices", ""))
	case f.reportedNone():
		return fail("no NVIDIA GPU found", "Start a machine with an NVIDIA GPU", finding.Evidence{File: "gpu.json", Field: "devices"})
	}
	return unknown("/sys/bus/pci/devices", cmp.Or(f.Manifest.Unreadable["host/sys/bus/pci/devices"], "not there"))
}

// noGPU is the answer of a check that has nothing to look at; nil where it has.
func (f Facts) noGPU() []finding.Finding {
	if present, known := f.presence(); !present && known {
		return notApplicable("no NVIDIA GPU")
	}
	return nil
}

func judgeNouveau(f Facts) []finding.Finding {
	gpus, known := f.pciGPUs()
	var held []string
	var evidence []finding.Evidence
	bound := false
	for _, g := range gpus {
		bound = bound || g.driver != ""
		if g.driver == "nouveau" || g.driver == "nova-core" {
			held = append(held, fmt.Sprintf("pci %s driver=%s", g.address, g.driver))
			evidence = append(evidence, atPath("/sys/bus/pci/devices/"+g.address+"/driver", g.driver))
		}
	}
	// Where nobody looked who has the GPU, the driver itself says that another took it.
	if loaded, t := f.modules(); !bound && (loaded["nouveau"] || loaded["nova_core"]) {
		lines, log := f.kernelLog()
		for _, line := range lines {
			if strings.Contains(line, "NVRM:") && strings.Contains(line, "probe routine was not called") {
				held, evidence = append(held, "nouveau is loaded and the NVIDIA driver found the GPU taken"), append(evidence, at(t, "nouveau"), at(log, line))
				break
			}
		}
	}
	switch {
	case len(held) > 0:
		return fail(strings.Join(held, "; "),
			`printf 'blacklist nouveau\noptions nouveau modeset=0\n' | sudo tee /etc/modprobe.d/nvidia-no-nouveau.conf; `+
				rebuildInitramfs(f)+`; sudo reboot`,
			evidence...)
	case len(gpus) > 0:
		return well("not in the way")
	case known:
		return notApplicable("no NVIDIA GPU")
	}
	return unknown("/sys/bus/pci/devices", "")
}

func rebuildInitramfs(f Facts) string {
	if f.osRelease().rpm() {
		return "sudo dracut --force"
	}
	return "sudo update-initramfs -u"
}

func judgeVFIO(f Facts) []finding.Finding {
	gpus, known := f.pciGPUs()
	var held []string
	for _, g := range gpus {
		if g.driver == "vfio-pci" || g.driver == "pci-stub" {
			held = append(held, g.address)
		}
	}
	fix := "Take the GPU out of what hands it to vfio-pci, which this finds: sudo grep -rn vfio /etc/modprobe.d /etc/default/grub. Then: " + rebuildInitramfs(f) + " && sudo reboot"
	switch {
	case len(held) > 0 && len(held) == len(gpus):
		return fail("every GPU is bound to vfio-pci: "+some(8, held), fix, atPath("/sys/bus/pci/devices/"+held[0]+"/driver", "vfio-pci"))
	case len(held) > 0:
		return warn(fmt.Sprintf("%d of %d GPUs bound to vfio-pci: %s", len(held), len(gpus), some(8, held)), fix, atPath("/sys/bus/pci/devices/"+held[0]+"/driver", "vfio-pci"))
	case len(gpus) > 0:
		return well("not in the way")
	case known:
		return notApplicable("no NVIDIA GPU")
	}
	return unknown("/sys/bus/pci/devices", "")
}

const secureBootVariable = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"

// secureBoot reads the firmware's variable: four bytes of attributes, then the value.
func (f Facts) secureBoot() (on, known bool, from finding.Evidence) {
	t := f.File(secureBootVariable)
	if t.State == snapshot.Present && len(t.Data) == 5 && t.Data[4] <= 1 {
		return t.Data[4] == 1, true, at(t, fmt.Sprintf("byte 5 = %d", t.Data[4]))
	}
	if sb := f.Command("mokutil-sb-state"); sb.State == snapshot.Present {
		text := strings.ToLower(sb.Data)
		if strings.Contains(text, "secureboot enabled") || strings.Contains(text, "secureboot disabled") {
			return strings.Contains(text, "secureboot enabled"), true, at(sb, firstLine(sb.Data))
		}
	}
	if _, state := f.Stat("/sys/firmware/efi"); state == snapshot.Absent && f.exists("/sys") && t.State == snapshot.Absent {
		return false, true, atPath("/sys/firmware/efi", "no EFI firmware")
	}
	return false, false, finding.Evidence{}
}

var rejected = regexp.MustCompile(`(?i)Loading of (?:unsigned module|module with unavailable key) is rejected|unsigned module loading is restricted|Key was rejected by service|module verification failed.*nvidia.*rejected`)

func judgeSecureBoot(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	on, known, from := f.secureBoot()
	loaded := f.loadedDriver() != ""
	lines, log := f.kernelLog()
	refused := ""
	if i := slices.IndexFunc(lines, rejected.MatchString); i >= 0 && !loaded {
		refused = lines[i]
	}
	key := "/var/lib/shim-signed/mok/MOK.der"
	fix := "On Ubuntu, install the signed modules: sudo apt-get install -y linux-modules-nvidia-580-server-open-$(uname -r). Elsewhere "
	if o := f.osRelease(); o.rpm() {
		key, fix = "/var/lib/dkms/mok.pub", ""
	} else if o.id == "ubuntu" {
		fix = "Install the signed modules: sudo apt-get install -y linux-modules-nvidia-580-server-open-$(uname -r). Or "
	}
	fix += "enrol the module's key, which asks for a confirmation on the serial console at the next boot: sudo mokutil --import " + key + ". Or start the VM without Secure Boot"
	fix = strings.ToUpper(fix[:1]) + fix[1:]
	switch {
	case refused != "" && on:
		return fail("Secure Boot is on and the kernel rejected an unsigned module", fix, from, at(log, refused))
	case refused != "" && known:
		// The kernel can ask for signatures by itself: module.sig_enforce, lockdown.
		return fail("Secure Boot is off, but the kernel asks for signed modules and rejected one without", fix+
			". Where nobody wants that: "+f.bootWithout("module.sig_enforce"), from, at(log, refused))
	case refused != "":
		return fail("the kernel rejected a module that is not signed by a key it trusts", fix, at(log, refused))
	case !known:
		return unknown("whether Secure Boot is on", f.File(secureBootVariable).Why)
	case !on:
		return well("Secure Boot is off", from)
	case loaded:
		return well("Secure Boot is on and the NVIDIA module was accepted", from)
	}
	info := f.Command("modinfo-nvidia")
	if info.State == snapshot.Present && info.Exit == 0 {
		fields := colonFields(info.Data)
		if fields["signer"] == "" && fields["sig_key"] == "" {
			return fail("Secure Boot is on and the NVIDIA module has no signature", fix, from, at(info, "signer: (none)"))
		}
		return well("Secure Boot is on; the NVIDIA module is signed by "+cmp.Or(fields["signer"], "a key"), from, at(info, "signer: "+fields["signer"]))
	}
	return note("Secure Boot is on: the NVIDIA module that will be installed must be signed", from)
}

// loadedDriver is the version of the loaded kernel module, empty where none is.
func (f Facts) loadedDriver() string {
	if v := f.File("/sys/module/nvidia/version").Trimmed(); v != "" {
		return v
	}
	if m := procVersion.FindStringSubmatch(f.File("/proc/driver/nvidia/version").Data); m != nil {
		return m[1]
	}
	if f.GPU != nil && f.GPU.NVML.Ending == gpu.EndingOK {
		return f.GPU.Driver
	}
	return ""
}

// procVersion reads both layouts of the first line: the proprietary module's and the
// open one's, which names the machine before the version.
var procVersion = regexp.MustCompile(`NVRM version:.*Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)`)

// openModule says whether the module is the open flavour.
func (f Facts) openModule() (open, known bool, from finding.Evidence) {
	if t := f.File("/proc/driver/nvidia/version"); t.State == snapshot.Present {
		return strings.Contains(t.Data, "Open Kernel Module"), true, at(t, firstLine(t.Data))
	}
	if t := f.Command("modinfo-nvidia"); t.State == snapshot.Present && t.Exit == 0 {
		license := colonFields(t.Data)["license"]
		return strings.Contains(license, "GPL"), license != "", at(t, "license: "+license)
	}
	return false, false, finding.Evidence{}
}

// moduleFiles returns the nvidia.ko files of a kernel; known is false where the
// kernel's modules were not looked at.
func (f Facts) moduleFiles(kernel string) (files []string, known bool) {
	for _, root := range []string{"/lib/modules", "/usr/lib/modules"} {
		dir := root + "/" + kernel
		if _, state := f.Stat(dir); state == snapshot.Present {
			known = true
		}
		pattern := dir
		for range 7 {
			pattern += "/*"
			for _, p := range f.Glob(path.Dir(pattern) + "/nvidia.ko*") {
				files = append(files, p)
			}
		}
		if dep := f.File(dir + "/modules.dep"); dep.State == snapshot.Present {
			known = true
			for _, line := range dep.Lines() {
				name, _, _ := strings.Cut(line, ":")
				if strings.HasPrefix(path.Base(name), "nvidia.ko") {
					files = append(files, dir+"/"+name)
				}
			}
		}
	}
	slices.Sort(files)
	return slices.Compact(files), known
}

// kernelsWithModule are the kernels for which an nvidia.ko is installed.
func (f Facts) kernelsWithModule() []string {
	var kernels []string
	for _, root := range []string{"/lib/modules", "/usr/lib/modules"} {
		for _, kernel := range f.List(root) {
			if files, _ := f.moduleFiles(kernel); len(files) > 0 && !slices.Contains(kernels, kernel) {
				kernels = append(kernels, kernel)
			}
		}
	}
	return kernels
}

// driverInstalled says whether some part of the driver lies on the disk.
func (f Facts) driverInstalled() bool {
	if len(f.kernelsWithModule()) > 0 || f.library() != "" {
		return true
	}
	info := f.Command("modinfo-nvidia")
	if info.State == snapshot.Present && info.Exit == 0 {
		return true
	}
	dkms := f.Command("dkms-status")
	return dkms.State == snapshot.Present && strings.Contains(dkms.Data, "nvidia")
}

func judgeModuleForKernel(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	kernel := f.kernel()
	if v := f.loadedDriver(); v != "" {
		return well("loaded: "+v, atPath("/sys/module/nvidia/version", v))
	}
	if kernel == "" {
		return unknown("the running kernel's release", "")
	}
	files, known := f.moduleFiles(kernel)
	info := f.Command("modinfo-nvidia")
	if info.State == snapshot.Present && info.Exit == 0 {
		return well("there is one for "+kernel, at(info, firstLine(info.Data)))
	}
	switch {
	case len(files) > 0:
		return well("there is one for "+kernel, atPath(files[0], ""))
	case !known:
		return unknown("/lib/modules/"+kernel, "")
	case !f.driverInstalled():
		return notApplicable("no NVIDIA driver is installed")
	}
	measured := "running " + kernel
	if others := f.kernelsWithModule(); len(others) > 0 {
		measured += ", module only for " + some(3, others)
	} else {
		measured += ", no module for any kernel"
	}
	headers := f.firstExisting("/usr/src/linux-headers-"+kernel, "/usr/src/kernels/"+kernel, "/lib/modules/"+kernel+"/build")
	fix := "sudo dkms autoinstall && sudo modprobe nvidia"
	if headers == "" {
		measured += "; its headers are absent"
		fix = f.installs("linux-headers-"+kernel, "kernel-devel-"+kernel) + " && " + fix
	}
	return fail(measured, fix, atPath("/lib/modules/"+kernel, "no nvidia.ko"))
}

func judgeDriver(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	if v := f.loadedDriver(); v != "" {
		flavour := ""
		if open, known, _ := f.openModule(); known && open {
			flavour = ", open modules"
		} else if known {
			flavour = ", proprietary modules"
		}
		return well(v+flavour, atPath("/proc/driver/nvidia/version", firstLine(f.File("/proc/driver/nvidia/version").Data)))
	}
	loaded, t := f.modules()
	if t.State != snapshot.Present {
		return unknownText(t)
	}
	if loaded["nvidia"] {
		return well("loaded", at(t, "nvidia"))
	}
	if f.driverInstalled() {
		if conf, line := f.blocked("nvidia"); line != "" {
			return named("gpu.driver.not_loaded", fail("the driver is installed, but "+shown(conf.Place)+" keeps its kernel module from loading: "+line,
				"sudo sed -i -E '/^ *(blacklist|install) +nvidia( |$)/d' "+shown(conf.Place)+" && "+rebuildInitramfs(f)+" && sudo reboot", at(conf, line)))
		}
		return named("gpu.driver.not_loaded", fail("the driver is installed but its kernel module is not loaded",
			"sudo modprobe nvidia. When that fails, see why: sudo dmesg | tail -n 20", at(t, "no line begins with nvidia")))
	}
	return named("gpu.driver.missing", fail("no NVIDIA driver is installed", f.driverInstall(), at(t, "no line begins with nvidia")))
}

// blocked returns the line of modprobe's settings that keeps a module from loading.
func (f Facts) blocked(module string) (conf snapshot.Text, line string) {
	for _, dir := range []string{"/etc/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"} {
		for _, name := range f.Glob(dir + "/*.conf") {
			t := f.File(name)
			for _, l := range t.Lines() {
				words := strings.Fields(l)
				if len(words) < 2 || words[1] != module {
					continue
				}
				never := len(words) == 3 && slices.Contains([]string{"/bin/false", "/bin/true", "/usr/bin/false", "/usr/bin/true"}, words[2])
				if words[0] == "blacklist" || words[0] == "install" && never {
					return t, strings.Join(words, " ")
				}
			}
		}
	}
	return conf, ""
}

// driverInstall is how the driver comes onto this distribution, with the open modules
// (docs.nvidia.com/datacenter/tesla/driver-installation-guide).
func (f Facts) driverInstall() string {
	const repository = "Add NVIDIA's repository (docs.nvidia.com/datacenter/tesla/driver-installation-guide), then: "
	switch o := f.osRelease(); {
	case o.suse():
		return repository + "sudo zypper install -y nvidia-open && sudo reboot"
	case o.id == "fedora" || o.rpm() && strings.HasPrefix(o.version, "1"):
		return repository + "sudo dnf install -y nvidia-open && sudo reboot"
	case o.rpm():
		return repository + "sudo dnf module enable -y nvidia-driver:open-dkms && sudo dnf install -y nvidia-open && sudo reboot"
	case o.id == "debian":
		return repository + "sudo apt-get update && sudo apt-get install -y nvidia-open && sudo reboot"
	}
	return "sudo apt-get update && sudo apt-get install -y linux-headers-$(uname -r) nvidia-headless-580-server-open nvidia-utils-580-server && sudo reboot"
}

// driverHold keeps the driver's packages as they are.
func (f Facts) driverHold() string {
	switch o := f.osRelease(); {
	case o.suse():
		return "sudo zypper addlock '*nvidia*'"
	case o.rpm():
		return "sudo dnf install -y 'dnf-command(versionlock)' && sudo dnf versionlock add '*nvidia*'"
	}
	return "sudo apt-mark hold $(dpkg-query -W -f '${Package} ' '*nvidia*')"
}

var librarySuffix = regexp.MustCompile(`libnvidia-ml\.so\.(\d+(?:\.\d+)+)$`)

// library is the path at which libnvidia-ml finally lies, empty where none is.
func (f Facts) library() string {
	var candidates []string
	if cache := f.Command("ldconfig-nvidia"); cache.State == snapshot.Present {
		for _, line := range cache.Lines() {
			name, target, ok := strings.Cut(line, "=>")
			if ok && strings.HasPrefix(strings.TrimSpace(name), "libnvidia-ml.so.1 ") && strings.Contains(name, "64") {
				candidates = append(candidates, strings.TrimSpace(target))
			}
		}
	}
	for _, dir := range []string{"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib", "/usr/lib/wsl/lib"} {
		candidates = append(candidates, dir+"/libnvidia-ml.so.1")
	}
	for _, name := range candidates {
		e, state := f.Stat(name)
		if state != snapshot.Present {
			continue
		}
		if e.Target != "" {
			return e.Target
		}
		// Where nobody noted where the link leads, the one library beside it is meant.
		if beside := f.Glob(path.Dir(name) + "/libnvidia-ml.so.*.*"); len(beside) == 1 {
			return beside[0]
		}
		return e.Path
	}
	return ""
}

// libraryVersion is the version of libnvidia-ml that a program would load.
func (f Facts) libraryVersion() (v string, from finding.Evidence) {
	library := f.library()
	if m := librarySuffix.FindStringSubmatch(library); m != nil {
		return m[1], atPath(library, "")
	}
	if f.GPU != nil && f.GPU.Library != "" {
		return f.GPU.Library, finding.Evidence{File: "gpu.json", Field: "library", Line: f.GPU.Library}
	}
	return "", finding.Evidence{}
}

func judgeLibMismatch(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	module := f.loadedDriver()
	libVersion, from := f.libraryVersion()
	mismatch := f.GPU != nil && f.GPU.NVML.Ending == gpu.EndingVersionMismatch
	switch {
	case module == "" && !mismatch:
		return notApplicable("no driver is loaded")
	case libVersion == "" && !mismatch:
		return unknown("the version of libnvidia-ml.so.1", "")
	case !mismatch && samePrefix(module, libVersion):
		return well("both "+module, from)
	}
	measured := fmt.Sprintf("kernel %s, user space %s", cmp.Or(module, "unknown"), cmp.Or(libVersion, "another"))
	evidence := []finding.Evidence{atPath("/sys/module/nvidia/version", module), from}
	if history := f.File("/var/log/apt/history.log"); strings.Contains(history.Data, "unattended-upgrade") && strings.Contains(history.Data, "nvidia") {
		measured += "; an automatic update replaced the libraries under the loaded module"
		evidence = append(evidence, at(history, "Commandline: /usr/bin/unattended-upgrade"))
	}
	fix := "sudo reboot (running GPU programs end), then keep it from happening again: " + f.driverHold()
	if library := f.library(); strings.HasPrefix(library, "/usr/local/") {
		// No package of the driver puts it there, so that no reboot mends it.
		fix = "Remove the stray copy of the library: sudo rm " + path.Dir(library) + "/libnvidia-ml.so* && sudo ldconfig"
	}
	return fail(measured, fix, evidence...)
}

// samePrefix compares two versions of which one may be cut short: NVML prints
// 550.107 for 550.107.02 (lyulyul/shine-cluster#30).
func samePrefix(a, b string) bool {
	if a == b {
		return true
	}
	pa, pb := strings.Split(a, "."), strings.Split(b, ".")
	n := min(len(pa), len(pb))
	return len(pa) != len(pb) && n >= 2 && slices.Equal(pa[:n], pb[:n])
}

var vmlinuz = regexp.MustCompile(`vmlinuz-(.+)$`)

// nextKernel is the kernel that the next boot takes, as far as links and names tell.
func (f Facts) nextKernel() (kernel, from string) {
	for _, link := range []string{"/boot/vmlinuz", "/vmlinuz"} {
		if e, state := f.Stat(link); state == snapshot.Present && e.Target != "" {
			if m := vmlinuz.FindStringSubmatch(e.Target); m != nil {
				return m[1], link
			}
		}
	}
	saved := assignments(f.File("/boot/grub2/grubenv").Data)["saved_entry"]
	var newest string
	for _, image := range f.Glob("/boot/vmlinuz-*") {
		m := vmlinuz.FindStringSubmatch(image)
		if m == nil || strings.Contains(m[1], "rescue") || strings.HasSuffix(m[1], ".old") {
			continue
		}
		if saved != "" && strings.HasSuffix(saved, "-"+m[1]) {
			return m[1], "/boot/grub2/grubenv"
		}
		if newest == "" || kernelLess(newest, m[1]) {
			newest, from = m[1], image
		}
	}
	return newest, from
}

var digits = regexp.MustCompile(`\d+`)

// kernelLess orders kernel releases by their numbers.
func kernelLess(a, b string) bool {
	na, nb := digits.FindAllString(a, -1), digits.FindAllString(b, -1)
	for i := range min(len(na), len(nb)) {
		x, errX := strconv.ParseUint(na[i], 10, 64)
		y, errY := strconv.ParseUint(nb[i], 10, 64)
		if errX != nil || errY != nil || x != y {
			return errX == nil && errY == nil && x < y
		}
	}
	return len(na) < len(nb)
}

func judgeNextBoot(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	running := f.kernel()
	next, from := f.nextKernel()
	switch {
	case next == "":
		if f.driverInstalled() {
			return unknown("which kernel the next boot takes", "no kernel image under /boot")
		}
		return notApplicable("no NVIDIA driver is installed")
	case !f.driverInstalled():
		return notApplicable("no NVIDIA driver is installed")
	}
	files, known := f.moduleFiles(next)
	switch {
	case len(files) > 0:
		return well(next+" has one", atPath(files[0], ""))
	case !known && next == running:
		return unknown("/lib/modules/"+next, "")
	case next == running && f.loadedDriver() != "":
		return well("the running kernel stays")
	}
	if info := f.Command("modinfo-nvidia"); next == running && info.State == snapshot.Present && info.Exit == 0 {
		return well(next+" has one", at(info, firstLine(info.Data)))
	}
	if packages, _ := f.Packages(); installed(packages, "akmod-nvidia") {
		return well("akmods builds it when " + next + " starts")
	}
	return warn(fmt.Sprintf("the next boot takes %s, which has no nvidia.ko (running %s)", next, running),
		"Before any reboot: "+f.installs("linux-headers-"+next, "kernel-devel-"+next)+" && sudo dkms autoinstall -k "+next,
		atPath(from, next), atPath("/lib/modules/"+next, "no nvidia.ko"))
}

var needsOpen = regexp.MustCompile(`NVRM:.*(?:requires? use of the NVIDIA open kernel modules|not supported by the.*proprietary|installed in this system requires.*open)`)

func judgeFlavour(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	open, known, from := f.openModule()
	if !known {
		if f.loadedDriver() == "" && !f.driverInstalled() {
			return notApplicable("no NVIDIA driver is installed")
		}
		return unknown("which flavour of the NVIDIA modules is installed", "")
	}
	if open {
		return well("open kernel modules", from)
	}
	fix := "Install the open modules of the same driver, such as: sudo apt-get install -y nvidia-headless-580-server-open linux-modules-nvidia-580-server-open-$(uname -r) && sudo reboot"
	if o := f.osRelease(); o.suse() || o.id == "debian" {
		fix = f.driverInstall()
	} else if o.rpm() {
		fix = "sudo dnf module switch-to -y nvidia-driver:open-dkms && sudo reboot"
	}
	lines, log := f.kernelLog()
	for _, line := range lines {
		if needsOpen.MatchString(line) {
			return fail("proprietary modules on a GPU that works only with the open ones", fix, from, at(log, line))
		}
	}
	if blackwell := f.blackwell(); blackwell != "" {
		return fail("proprietary modules on "+blackwell, fix, from)
	}
	return well("proprietary kernel modules, which this GPU may use", from)
}

// blackwell names a GPU of that generation or newer, by NVML or by the PCI id.
func (f Facts) blackwell() string {
	if f.GPU != nil {
		for _, d := range f.GPU.Devices {
			if d.ComputeMajor != nil && *d.ComputeMajor >= blackwellMajor {
				return label(d)
			}
		}
	}
	gpus, _ := f.pciGPUs()
	for _, g := range gpus {
		for _, p := range gpu.Products() {
			if p.PCIDeviceID == g.device && p.ComputeMajor >= blackwellMajor {
				return p.Name
			}
		}
	}
	return ""
}

func judgeBranch(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	v := f.loadedDriver()
	if v == "" {
		return notApplicable("no driver is loaded")
	}
	major, err := strconv.Atoi(strings.Split(v, ".")[0])
	if err != nil {
		return unknown("the driver's branch", fmt.Sprintf("%q is no version", v))
	}
	end, listed := branchEnd()[major]
	switch {
	case f.Manifest.Time.IsZero():
		return unknown("today's date", "")
	case listed && f.Manifest.Time.After(end):
		return note(fmt.Sprintf("R%d got its last fixes in %s; move to a supported branch such as R580 when the GPU is free", major, end.AddDate(0, 0, -1).Format("January 2006")),
			atPath("/sys/module/nvidia/version", v))
	case listed:
		return well(fmt.Sprintf("R%d gets fixes until %s", major, end.AddDate(0, 0, -1).Format("January 2006")))
	}
	return well(fmt.Sprintf("R%d", major))
}

func judgeGSP(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	v := f.loadedDriver()
	if v == "" {
		return notApplicable("no driver is loaded")
	}
	before, ok := older(v, gspFixed)
	if !ok {
		return unknown("the driver's version", fmt.Sprintf("%q is no version", v))
	}
	if !before {
		return well(v)
	}
	params := f.File("/proc/driver/nvidia/params")
	if params.State != snapshot.Present {
		return unknownText(params)
	}
	if colonFields(params.Data)["EnableGpuFirmware"] == "0" {
		return well("GSP firmware is off", at(params, "EnableGpuFirmware: 0"))
	}
	return warn("driver "+v+" with GSP firmware on: it stops answering now and then",
		"Update the driver to R580 and reboot", at(params, "EnableGpuFirmware: "+colonFields(params.Data)["EnableGpuFirmware"]))
}

func judgeCUDA(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	if f.Need.CUDA == "" {
		return notApplicable("nothing planned asks for a CUDA version")
	}
	driver := f.loadedDriver()
	served := f.servedCUDA(driver)
	if served == "" {
		if driver == "" {
			return notApplicable("no driver is loaded")
		}
		return unknown("the CUDA version that driver "+driver+" serves", "")
	}
	wantMajor, haveMajor := strings.Split(f.Need.CUDA, ".")[0], strings.Split(served, ".")[0]
	less, ok := older(served, f.Need.CUDA)
	if !ok {
		return unknown("the CUDA version asked for", fmt.Sprintf("%q, %q", served, f.Need.CUDA))
	}
	required := "CUDA " + f.Need.CUDA + " or newer (driver " + driverFor(f.Need.CUDA) + ")"
	evidence := []finding.Evidence{atPath("/sys/module/nvidia/version", driver)}
	var out []finding.Finding
	switch {
	case !less:
		out = well(fmt.Sprintf("driver %s serves CUDA %s", driver, served), evidence...)
	default:
		fix := "Update the driver to R580 when nobody uses the GPU: " + f.driverInstall() + ". Or take an older image of the model server: components.model.values.image in /etc/llmbox/config.yaml. NVIDIA_DISABLE_REQUIRE only hides the problem"
		out = fail(fmt.Sprintf("driver %s serves CUDA %s, image needs >=%s", driver, served, f.Need.CUDA), fix, evidence...)
		if wantMajor == haveMajor {
			out[0].Measured += "; NVIDIA_REQUIRE_CUDA in the image refuses it"
		}
	}
	out[0].Required = required
	return out
}

// servedCUDA is the newest CUDA of a driver: NVML's word, else the table's.
func (f Facts) servedCUDA(driver string) string {
	if f.GPU != nil && f.GPU.CUDA != "" {
		return f.GPU.CUDA
	}
	for _, row := range cudaDriver() {
		if before, ok := older(driver, row.Driver); ok && !before {
			return row.CUDA
		}
	}
	return ""
}

func driverFor(cuda string) string {
	for _, row := range cudaDriver() {
		if row.CUDA == cuda {
			return row.Driver + " or newer"
		}
	}
	if strings.HasPrefix(cuda, "13") {
		return oldestDriver13 + " or newer"
	}
	return oldestDriver + " or newer"
}

// endingAdvice is what an ending of NVML means and what to do about it.
type endingAdvice struct {
	severity finding.Severity
	measured string
	fix      string
}

func endings() map[gpu.Ending]endingAdvice {
	return map[gpu.Ending]endingAdvice{
		gpu.EndingLibraryNotFound: {finding.Fail, "libnvidia-ml.so.1 was not found: the driver's libraries are not installed",
			"Install the driver's utilities of the same version as the module, such as: sudo apt-get install -y nvidia-utils-580-server && sudo ldconfig"},
		gpu.EndingVersionMismatch: {finding.Fail, "the driver and its library are of different versions", "sudo reboot"},
		gpu.EndingDriverNotLoaded: {finding.Fail, "the driver's kernel module is not loaded", "sudo modprobe nvidia. When that fails, see why: sudo dmesg | tail -n 20"},
		gpu.EndingNoPermission: {finding.Fail, "no permission to use the GPU",
			"Run it as root: sudo llmbox preflight. If that says the same: sudo chmod 0666 /dev/nvidia*"},
		gpu.EndingGPULost: {finding.Fail, "a GPU no longer answers: it fell off the bus",
			"Stop the machine and start it again (a full power cycle; a reset is not enough). If it comes back, ask the provider for another machine"},
		gpu.EndingTimeout: {finding.Fail, "NVML gave no answer within its deadline: the driver hangs",
			"sudo reboot. If it happens again, update the driver to R580"},
		gpu.EndingKilled: {finding.Fail, "NVML crashed",
			"Reinstall the driver's libraries in the module's version: sudo apt-get install --reinstall -y libnvidia-compute-580-server && sudo ldconfig"},
		gpu.EndingNotStarted: {finding.Warn, "llmbox's helper that asks NVML could not be started here",
			"Nothing to do when nvidia-smi spoke instead. Else use a distribution with the GNU C library, such as Ubuntu 24.04"},
		gpu.EndingHelperAbsent: {finding.Info, "this build of llmbox carries no helper that asks NVML", ""},
		gpu.EndingMissingSymbol: {finding.Fail, "libnvidia-ml.so.1 lacks functions that every supported driver has",
			"Update the driver, or remove the stray copy of the library that this lists: sudo ldconfig -p | grep libnvidia-ml"},
		gpu.EndingBadAnswer: {finding.Warn, "what the helper that asks NVML wrote could not be read", "sudo llmbox preflight --save box.tar.gz, and report it with that file"},
		gpu.EndingError:     {finding.Fail, "NVML reported an error", "A reboot often helps: sudo reboot. The driver's own words: sudo dmesg | grep NVRM"},
	}
}

// nvmlIDs are the findings of the endings.
func nvmlIDs() []string {
	var ids []string
	for ending := range endings() {
		ids = append(ids, "gpu.nvml."+string(ending))
	}
	slices.Sort(ids)
	return ids
}

func judgeNVML(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	if f.GPU == nil {
		return unknown("gpu.json", cmp.Or(f.Manifest.Unreadable["gpu.json"], "NVML was not asked"))
	}
	end := f.GPU.NVML
	evidence := finding.Evidence{File: "gpu.json", Field: "nvml.ending", Line: strings.TrimSpace(string(end.Ending) + " " + end.Detail)}
	if end.Ending == gpu.EndingOK {
		return well(fmt.Sprintf("answered in %d ms for %s", end.ElapsedMS, count(len(f.GPU.Devices), "GPU")), evidence)
	}
	advice, ok := endings()[end.Ending]
	if !ok {
		return unknown("how NVML ended", fmt.Sprintf("%q", end.Ending))
	}
	measured := advice.measured
	switch {
	case end.Signal != "":
		measured += " (" + end.Signal
		if end.LastCall != "" {
			measured += " in " + end.LastCall
		}
		measured += ")"
	case end.Ending == gpu.EndingTimeout && end.ElapsedMS >= 1000:
		measured = fmt.Sprintf("NVML gave no answer within %d s: the driver hangs", end.ElapsedMS/1000)
		if end.LastCall != "" {
			measured += " in " + end.LastCall
		}
	case end.Detail != "":
		measured += ": " + end.Detail
	}
	if f.GPU.Source != gpu.SourceNVML && f.GPU.Source != gpu.SourceNone {
		measured += map[gpu.Source]string{
			gpu.SourceSMI: "; nvidia-smi was asked instead", gpu.SourceProc: "; /proc and the PCI bus were asked instead", gpu.SourcePCI: "; the PCI bus was asked instead",
		}[f.GPU.Source]
	}
	return []finding.Finding{{
		ID: "gpu.nvml." + string(end.Ending), Severity: advice.severity, State: finding.Judged,
		Measured: measured, Fix: advice.fix, Evidence: []finding.Evidence{evidence},
	}}
}

func judgeNVMLSlow(f Facts) []finding.Finding {
	if none := f.noGPU(); none != nil {
		return none
	}
	if f.GPU == nil || f.GPU.NVML.Ending == gpu.EndingHelperAbsent || f.GPU.NVML.Ending == gpu.EndingNotStarted {
		return unknown("how long NVML takes", "NVML was not asked")
	}
	end := f.GPU.NVML
	if !end.Slow && end.ElapsedMS <= slowInit.Milliseconds() {
		return well(fmt.Sprintf("%d ms", end.ElapsedMS))
	}
	return warn(fmt.Sprintf("%.1f s", float64(end.ElapsedMS)/1000),
		"Keep the driver initialised: sudo systemctl enable --now nvidia-persistenced (or sudo nvidia-smi -pm 1)",
		finding.Evidence{File: "gpu.json", Field: "nvml.elapsed_ms", Line: strconv.FormatInt(end.ElapsedMS, 10)})
}
