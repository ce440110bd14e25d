package preflight

import (
	"bufio"
	"cmp"
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	goversion "github.com/hashicorp/go-version"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// well is the outcome of a check that found nothing wrong.
func well(measured string, evidence ...finding.Evidence) []finding.Finding {
	return []finding.Finding{{Severity: finding.OK, State: finding.Judged, Measured: measured, Evidence: evidence}}
}

// note is worth knowing and needs nothing done.
func note(measured string, evidence ...finding.Evidence) []finding.Finding {
	return []finding.Finding{{Severity: finding.Info, State: finding.Judged, Measured: measured, Evidence: evidence}}
}

func fail(measured, fix string, evidence ...finding.Evidence) []finding.Finding {
	return []finding.Finding{{Severity: finding.Fail, State: finding.Judged, Measured: measured, Fix: fix, Evidence: evidence}}
}

func warn(measured, fix string, evidence ...finding.Evidence) []finding.Finding {
	return []finding.Finding{{Severity: finding.Warn, State: finding.Judged, Measured: measured, Fix: fix, Evidence: evidence}}
}

// named gives every finding an id that is not the row's.
func named(id string, found []finding.Finding) []finding.Finding {
	for i := range found {
		found[i].ID = id
	}
	return found
}

// repairable says which safe repair mends it.
func repairable(repair string, found []finding.Finding) []finding.Finding {
	for i := range found {
		found[i].Repair = repair
	}
	return found
}

// notApplicable says why the question does not arise here.
func notApplicable(why string) []finding.Finding {
	return []finding.Finding{{Severity: finding.OK, State: finding.NotApplicable, Measured: why}}
}

// unknown says that a fact could not be had. It is no failure: nothing is known to
// be wrong.
func unknown(what, why string) []finding.Finding {
	if why == "" {
		why = "not there"
	}
	return []finding.Finding{{
		Severity: finding.Info, State: finding.Unreadable, Measured: "could not read " + what + ": " + why,
	}}
}

func unknownText(t snapshot.Text) []finding.Finding {
	why := t.Why
	if t.State == snapshot.Absent {
		why = "not there"
	}
	return unknown(shown(t.Place), why)
}

// shown is a place of the snapshot as the person at the machine knows it.
func shown(place string) string {
	if rest, ok := strings.CutPrefix(place, "host/"); ok {
		return "/" + rest
	}
	if rest, ok := strings.CutPrefix(place, "commands/"); ok {
		return "the output of " + strings.TrimSuffix(rest, ".txt")
	}
	return place
}

// at is evidence from a file or a command.
func at(t snapshot.Text, line string) finding.Evidence {
	return finding.Evidence{File: t.Place, Line: strings.TrimSpace(line)}
}

// atPath is evidence from what stands at a path.
func atPath(name, line string) finding.Evidence {
	return finding.Evidence{File: "host" + path.Clean("/"+name), Line: line}
}

func atProbe(name, field string) finding.Evidence {
	return finding.Evidence{File: "probes/" + name + ".json", Field: field}
}

func atGPU(d gpu.Device, field string) finding.Evidence {
	return finding.Evidence{File: "gpu.json", Field: fmt.Sprintf("devices[%d].%s", d.Index, field)}
}

// exists says whether something stands at a path.
func (f Facts) exists(name string) bool {
	_, state := f.Stat(name)
	return state == snapshot.Present
}

// firstExisting returns the first of the paths at which something stands.
func (f Facts) firstExisting(names ...string) string {
	for _, name := range names {
		if f.exists(name) {
			return name
		}
	}
	return ""
}

// number reads a file that holds one number.
func (f Facts) number(name string) (int64, snapshot.Text, bool) {
	t := f.File(name)
	if t.State != snapshot.Present {
		return 0, t, false
	}
	n, err := strconv.ParseInt(t.Trimmed(), 10, 64)
	if err != nil {
		t.State, t.Why = snapshot.Unreadable, fmt.Sprintf("%q is no number", t.Trimmed())
		return 0, t, false
	}
	return n, t, true
}

// system returns the probe of that name; ok is false where there is none.
func (f Facts) system() (snapshot.System, bool) {
	var s snapshot.System
	state, _ := f.Probe(snapshot.ProbeSystem, &s)
	return s, state == snapshot.Present
}

// kernel is the running kernel's release, such as "6.8.0-1021-gcp".
func (f Facts) kernel() string {
	if s, ok := f.system(); ok && s.Kernel != "" {
		return s.Kernel
	}
	if release := f.File("/proc/sys/kernel/osrelease").Trimmed(); release != "" {
		return release
	}
	if m := procLinux.FindStringSubmatch(f.File("/proc/version").Data); m != nil {
		return m[1]
	}
	return ""
}

var procLinux = regexp.MustCompile(`^Linux version (\S+)`)

// osRelease is the fields of /etc/os-release.
type osRelease struct {
	id, like, version, pretty string
	known                     bool
}

func (f Facts) osRelease() osRelease {
	t := f.File("/etc/os-release")
	if t.State != snapshot.Present {
		t = f.File("/usr/lib/os-release")
	}
	fields := assignments(t.Data)
	return osRelease{
		id: fields["ID"], like: fields["ID_LIKE"], version: fields["VERSION_ID"], pretty: cmp.Or(fields["PRETTY_NAME"], fields["NAME"]),
		known: t.State == snapshot.Present && fields["ID"] != "",
	}
}

// rpm says whether packages are RPMs here.
func (o osRelease) rpm() bool {
	words := strings.Fields(o.id + " " + o.like)
	return slices.ContainsFunc(words, func(w string) bool {
		return slices.Contains([]string{"rhel", "fedora", "centos", "rocky", "almalinux", "ol", "suse", "opensuse", "sles", "amzn"}, w)
	})
}

// suse says whether zypper installs packages here.
func (o osRelease) suse() bool {
	return strings.Contains(o.id+" "+o.like, "suse") || o.id == "sles"
}

// installs is the command that installs a package here.
func (f Facts) installs(deb, rpm string) string {
	switch o := f.osRelease(); {
	case o.suse():
		return "sudo zypper install -y " + rpm
	case o.rpm():
		return "sudo dnf install -y " + rpm
	}
	return "sudo apt-get update && sudo apt-get install -y " + deb
}

// installSet is an install with keys of the configuration set, each as KEY=VALUE.
func installSet(keys ...string) string {
	return "sudo llmbox install --set " + strings.Join(keys, " --set ")
}

// bootWith boots the kernel with an option from now on.
func (f Facts) bootWith(option string) string {
	grub := "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&" + option + " /' /etc/default/grub && "
	switch o := f.osRelease(); {
	case o.suse():
		return grub + "sudo grub2-mkconfig -o /boot/grub2/grub.cfg && sudo reboot"
	case o.rpm():
		return "sudo grubby --update-kernel=ALL --args=" + option + " && sudo reboot"
	}
	return grub + "sudo update-grub && sudo reboot"
}

// bootWithout boots it without an option, given by how it begins.
func (f Facts) bootWithout(option string) string {
	grub := "sudo sed -i 's/" + option + "[^ \"]*//g' $(grep -ls " + option + " /etc/default/grub /etc/default/grub.d/*.cfg) && "
	switch o := f.osRelease(); {
	case o.suse():
		return grub + "sudo grub2-mkconfig -o /boot/grub2/grub.cfg && sudo reboot"
	case o.rpm():
		return "sudo grubby --update-kernel=ALL --remove-args=" + option + " && sudo reboot"
	}
	return grub + "sudo update-grub && sudo reboot"
}

// assignments reads KEY=value lines, quotes taken off; comments and what is no
// assignment are passed over.
func assignments(data string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(data) {
		line = strings.TrimSpace(line)
		key, value, ok := strings.Cut(line, "=")
		if !ok || strings.HasPrefix(line, "#") {
			continue
		}
		key = strings.TrimSpace(strings.TrimPrefix(key, "export "))
		fields[key] = strings.Trim(strings.TrimSpace(value), `"'`)
	}
	return fields
}

// environment is what the collector's own process had of proxy settings.
func (f Facts) environment() (map[string]string, bool) {
	t := f.File("/proc/self/environ")
	if t.State != snapshot.Present {
		return nil, false
	}
	return assignments(strings.ReplaceAll(t.Data, "\x00", "\n")), true
}

// modules are the names of the loaded kernel modules.
func (f Facts) modules() (map[string]bool, snapshot.Text) {
	t := f.File("/proc/modules")
	loaded := map[string]bool{}
	for _, line := range t.Lines() {
		if name, _, ok := strings.Cut(line, " "); ok {
			loaded[name] = true
		}
	}
	return loaded, t
}

// kernelLog is the kernel's messages, continuation lines joined to the line they
// belong to: the driver splits some sentences over three lines.
func (f Facts) kernelLog() (lines []string, from snapshot.Text) {
	if f.log == nil {
		return f.readKernelLog()
	}
	f.log.once.Do(func() { f.log.lines, f.log.from = f.readKernelLog() })
	return f.log.lines, f.log.from
}

func (f Facts) readKernelLog() (lines []string, from snapshot.Text) {
	from = f.Command("dmesg")
	// In a container and after dmesg --clear there is nothing, in journald perhaps still.
	if from.State != snapshot.Present || from.Exit != 0 || from.Trimmed() == "" {
		if journal := f.Command("journalctl-kernel"); journal.State == snapshot.Present && journal.Exit == 0 {
			from = journal
		}
	}
	if from.State == snapshot.Present && from.Exit != 0 {
		from.State, from.Why = snapshot.Unreadable, fmt.Sprintf("exit %d: %s", from.Exit, firstLine(from.Data))
	}
	if from.State != snapshot.Present {
		return nil, from
	}
	return joinContinued(from.Lines()), from
}

// stamp is what stands before a message of the kernel: dmesg's seconds or date in
// brackets, raw or with a priority, ISO 8601, or what journald and syslog write,
// with the machine's name and "kernel:".
var stamp = regexp.MustCompile(`^(?:<\d+>)?\s*(?:` +
	`\d+,\d+,\d+,[^;]*;|` +
	`\[\s*\d+\.\d+\]|` +
	`\[[A-Z][a-z]{2} [A-Z][a-z]{2}\s+\d[^\]]*\]|` +
	`\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}\S*|` +
	`[A-Z][a-z]{2}\s+\d{1,2} \d{2}:\d{2}:\d{2}(?:\.\d+)?` +
	`)(?:\s+\S+ kernel:)?(?:\s+\[\s*\d+\.\d+\])?\s*`)

// joinContinued appends a line that goes on with the one before it, without its stamp
// and the driver's own prefix. Such a line has no stamp (dmesg and
// journalctl indent it), or has one of its own and begins in the middle of a sentence
// of the driver; syslog writes the end of a line as #012.
func joinContinued(lines []string) []string {
	var joined []string
	for _, line := range lines {
		for i, part := range strings.Split(line, "#012") {
			at := stamp.FindStringIndex(part)
			message := part
			if at != nil {
				message = part[at[1]:]
			}
			message = strings.TrimSpace(message)
			if message == "" {
				continue
			}
			indented := at == nil && part != strings.TrimLeft(part, " \t")
			if len(joined) > 0 && (i > 0 || indented || goesOn(message)) {
				joined[len(joined)-1] += " " + strings.TrimSpace(strings.TrimPrefix(message, "NVRM:"))
				continue
			}
			joined = append(joined, strings.TrimSpace(part))
		}
	}
	return joined
}

// goesOn says whether a message of the driver can't begin a sentence.
func goesOn(message string) bool {
	rest, ok := strings.CutPrefix(message, "NVRM: ")
	return ok && (strings.HasPrefix(rest, "(PCI ID:") || strings.HasPrefix(rest, "fallen off the bus") ||
		strings.HasPrefix(rest, "installed in this system") || strings.HasPrefix(rest, "obtained ownership"))
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

// fields reads "name: value" lines, the first of each name.
func colonFields(data string) map[string]string {
	out := map[string]string{}
	scan := bufio.NewScanner(strings.NewReader(data))
	for scan.Scan() {
		name, value, ok := strings.Cut(scan.Text(), ":")
		name = strings.TrimSpace(name)
		if _, seen := out[name]; ok && !seen {
			out[name] = strings.TrimSpace(value)
		}
	}
	return out
}

// pciDevice is one function of vendor NVIDIA on the PCI bus.
type pciDevice struct {
	address, class, device string
	// driver is empty where none is bound.
	driver string
	// dead is set when the configuration space reads as ones.
	dead bool
}

// gpu says whether it is a display or 3D controller.
func (p pciDevice) gpu() bool {
	return strings.HasPrefix(p.class, "0x0300") || strings.HasPrefix(p.class, "0x0302")
}

// nvSwitch says whether it is a bridge of an NVSwitch fabric.
func (p pciDevice) nvSwitch() bool { return strings.HasPrefix(p.class, "0x0680") }

// pci returns what of NVIDIA is on the bus; known is false where the bus could not
// be looked at.
func (f Facts) pci() (devices []pciDevice, known bool) {
	const root = "/sys/bus/pci/devices"
	for _, vendor := range f.Glob(root + "/*/vendor") {
		if f.File(vendor).Trimmed() != "0x10de" {
			continue
		}
		dir := path.Dir(vendor)
		d := pciDevice{
			address: path.Base(dir),
			class:   f.File(dir + "/class").Trimmed(),
			device:  strings.ToUpper(strings.TrimPrefix(f.File(dir+"/device").Trimmed(), "0x")),
		}
		d.driver = f.boundDriver(dir)
		if config := f.File(dir + "/config"); config.State == snapshot.Present && len(config.Data) >= 4 {
			d.dead = config.Data[:4] == "\xff\xff\xff\xff"
		}
		devices = append(devices, d)
	}
	if _, state := f.Stat(root); state != snapshot.Present {
		return devices, false
	}
	// A device of which only some files were taken may be anybody's.
	for _, address := range f.List(root) {
		if f.File(root+"/"+address+"/vendor").State != snapshot.Present {
			return devices, false
		}
	}
	return devices, true
}

// boundDriver is the kernel driver that has a PCI device; empty for none. It is where
// the link "driver" leads, which some snapshots keep as the text of readlink.
func (f Facts) boundDriver(dir string) string {
	if e, state := f.Stat(dir + "/driver"); state == snapshot.Present && e.Target != "" {
		return path.Base(e.Target)
	}
	if t := f.File(dir + "/driver"); strings.Contains(t.Data, "/drivers/") {
		return path.Base(t.Trimmed())
	}
	if f.GPU != nil {
		for _, d := range f.GPU.Devices {
			if d.KernelDriver != "" && sameBus(d.PCIBus, path.Base(dir)) {
				return d.KernelDriver
			}
		}
	}
	return ""
}

func (f Facts) pciGPUs() (gpus []pciDevice, known bool) {
	devices, known := f.pci()
	for _, d := range devices {
		if d.gpu() {
			gpus = append(gpus, d)
		}
	}
	return gpus, known
}

// presence says whether the machine has an NVIDIA GPU at all, from whoever knows.
func (f Facts) presence() (present, known bool) {
	gpus, known := f.pciGPUs()
	if len(gpus) > 0 || f.GPU != nil && len(f.GPU.Devices) > 0 || f.traces() != "" {
		return true, true
	}
	return false, known || f.reportedNone()
}

// traces are of a GPU that is not in any list now: the driver's files, the switches
// between GPUs, or the kernel's word that one failed.
func (f Facts) traces() string {
	if names := f.List("/proc/driver/nvidia/gpus"); len(names) > 0 {
		return "/proc/driver/nvidia/gpus/" + names[0]
	}
	devices, _ := f.pci()
	if i := slices.IndexFunc(devices, pciDevice.nvSwitch); i >= 0 {
		return "an NVSwitch at " + devices[i].address
	}
	lines, from := f.kernelLog()
	if !strings.Contains(from.Data, "NVRM:") {
		return ""
	}
	for _, line := range lines {
		if xidLine.MatchString(line) || fallenSentence.MatchString(line) || fallenShort.MatchString(line) {
			return "the kernel's log"
		}
	}
	return ""
}

// reportedNone says whether the report of the GPUs rules one out. It does not where
// NVML spoke to a driver, or tried to, and did not get as far as counting.
func (f Facts) reportedNone() bool {
	if f.GPU == nil || len(f.GPU.Devices) > 0 {
		return false
	}
	return slices.Contains([]gpu.Ending{gpu.EndingOK, gpu.EndingLibraryNotFound, gpu.EndingHelperAbsent, gpu.EndingNotStarted}, f.GPU.NVML.Ending)
}

// GPUReport is the report of the GPUs, completed for planning with what other facts
// tell: the version of the loaded driver, and the GPUs on the bus where the report
// names none. It is nil where nothing is known of a GPU.
func (f Facts) GPUReport() *gpu.Report {
	report := gpu.Report{Schema: gpu.ReportSchema, Source: gpu.SourcePCI}
	if f.GPU != nil {
		report = *f.GPU
	}
	report.Driver = cmp.Or(report.Driver, f.loadedDriver())
	if len(report.Devices) == 0 {
		gpus, _ := f.pciGPUs()
		for i, g := range gpus {
			report.Devices = append(report.Devices, gpu.Device{Index: i, PCIBus: g.address, PCIDevice: g.device, KernelDriver: g.driver})
		}
	}
	if f.GPU == nil && len(report.Devices) == 0 {
		return nil
	}
	return &report
}

// FreedGPUReport is GPUReport as it would be without the pods of a box that is here
// already: a model that serves must not keep its own successor from fitting.
func (f Facts) FreedGPUReport() *gpu.Report {
	report := f.GPUReport()
	if report == nil || !f.Need.Installed {
		return report
	}
	out := *report
	out.Devices = slices.Clone(report.Devices)
	for i, d := range out.Devices {
		if d.Memory == nil {
			continue
		}
		memory := *d.Memory
		for _, p := range d.Processes {
			switch {
			case !f.inPod(p):
			case p.UsedBytes == nil:
				// The driver does not say how much: what nobody else is known to hold is the pod's.
				memory.UsedBytes = foreignTo(f, d)
			default:
				memory.UsedBytes -= min(*p.UsedBytes, memory.UsedBytes)
			}
		}
		memory.FreeBytes = memory.TotalBytes - min(memory.UsedBytes, memory.TotalBytes)
		out.Devices[i].Memory = &memory
	}
	return &out
}

// foreignTo sums what processes outside of pods hold of a GPU.
func foreignTo(f Facts, d gpu.Device) (used uint64) {
	for _, p := range d.Processes {
		if !f.inPod(p) && p.UsedBytes != nil {
			used += *p.UsedBytes
		}
	}
	return used
}

// devices returns the GPUs that the driver spoke for. Where it said nothing, why is
// the finding to return instead.
func (f Facts) devices() (devices []gpu.Device, why []finding.Finding) {
	present, known := f.presence()
	switch {
	case known && !present:
		return nil, notApplicable("no NVIDIA GPU")
	case f.GPU == nil:
		return nil, unknown("what the driver says of the GPUs", cmp.Or(f.Manifest.Unreadable["gpu.json"], "not asked"))
	case f.GPU.Source != gpu.SourceNVML && f.GPU.Source != gpu.SourceSMI, len(f.GPU.Devices) == 0 && f.GPU.NVML.Ending != gpu.EndingOK:
		return nil, unknown("what the driver says of the GPUs", "NVIDIA's library gave no answer ("+strings.ReplaceAll(string(f.GPU.NVML.Ending), "_", " ")+")")
	}
	for _, d := range f.GPU.Devices {
		if d.Error == "" && !d.Lost {
			devices = append(devices, d)
		}
	}
	if len(devices) == 0 {
		return nil, unknown("what the driver says of the GPUs", "no GPU could be read")
	}
	return devices, nil
}

// label names a device in a sentence.
func label(d gpu.Device) string {
	name := cmp.Or(d.Name, "GPU")
	return fmt.Sprintf("GPU %d (%s)", d.Index, name)
}

// gpuIndex stands in the fix of a device for the numbers of all that need it, as
// nvidia-smi takes them.
const gpuIndex = "{gpu}"

// perDevice judges each device that has a fact. has says so; judge returns what is
// wrong with a device, or nothing.
func (f Facts) perDevice(fact string, has func(gpu.Device) bool, judge func(gpu.Device) (finding.Severity, string, string, string)) []finding.Finding {
	devices, why := f.devices()
	if why != nil {
		return why
	}
	var seen int
	var out finding.Finding
	var indexes []string
	var said sayings
	out.Severity = finding.OK
	for _, d := range devices {
		if !has(d) {
			continue
		}
		seen++
		severity, text, fix, field := judge(d)
		if severity == finding.OK {
			continue
		}
		said = said.add(d, text)
		out.Evidence = append(out.Evidence, atGPU(d, field))
		if worse(severity, out.Severity) {
			out.Severity, out.Fix, indexes = severity, fix, nil
		}
		if severity == out.Severity {
			indexes = append(indexes, strconv.Itoa(d.Index))
		}
	}
	out.Fix = strings.ReplaceAll(out.Fix, gpuIndex, strings.Join(indexes, ","))
	switch {
	case seen == 0 && devicesErred(devices):
		return unknown(fact, "NVML did not answer for it")
	case seen == 0:
		return notApplicable("this GPU does not have it")
	case out.Severity == finding.OK:
		return well(count(seen, "GPU") + " fine")
	}
	out.State, out.Measured = finding.Judged, said.String()
	return []finding.Finding{out}
}

// sayings are what is said of devices, each text once.
type sayings []struct {
	text, name string
	indexes    []string
}

func (s sayings) add(d gpu.Device, text string) sayings {
	name, index := cmp.Or(d.Name, "GPU"), strconv.Itoa(d.Index)
	for i, known := range s {
		if known.text == text && known.name == name {
			s[i].indexes = append(s[i].indexes, index)
			return s
		}
	}
	return append(s, struct {
		text, name string
		indexes    []string
	}{text, name, []string{index}})
}

func (s sayings) String() string {
	parts := make([]string, 0, len(s))
	for _, one := range s {
		parts = append(parts, fmt.Sprintf("GPU %s (%s): %s", strings.Join(one.indexes, ", "), one.name, one.text))
	}
	return strings.Join(parts, "; ")
}

func devicesErred(devices []gpu.Device) bool {
	return slices.ContainsFunc(devices, func(d gpu.Device) bool { return len(d.Errors) > 0 })
}

func worse(a, b finding.Severity) bool {
	rank := map[finding.Severity]int{finding.OK: 0, finding.Info: 1, finding.Warn: 2, finding.Fail: 3}
	return rank[a] > rank[b]
}

// version reads a version as packages and programs write it: an epoch and a Debian
// revision are dropped and "~" begins a pre-release, so that 1.17.8-1 is 1.17.8 and
// 1:2.0~rc1 is before 2.0.
func version(text string) (*goversion.Version, error) {
	v := strings.TrimPrefix(strings.TrimSpace(text), "v")
	if _, rest, ok := strings.Cut(v, ":"); ok {
		v = rest
	}
	pre := ""
	if head, tail, ok := strings.Cut(v, "~"); ok {
		tail, _, _ = strings.Cut(tail, "-")
		v, pre = head, "-"+strings.Trim(tail, ".")
	}
	v, _, _ = strings.Cut(v, "+")
	if i := strings.LastIndex(v, "-"); i > 0 && pre == "" && !preRelease.MatchString(v[i:]) {
		v = v[:i]
	}
	out, err := goversion.NewVersion(v + pre)
	if err != nil {
		return nil, fmt.Errorf("reading version %q: %w", text, err)
	}
	return out, nil
}

var preRelease = regexp.MustCompile(`^-(?:rc|alpha|beta)`)

// older says whether a is before b; ok is false where one of them is no version.
func older(a, b string) (older, ok bool) {
	va, err := version(a)
	if err != nil {
		return false, false
	}
	vb, err := version(b)
	if err != nil {
		return false, false
	}
	return va.LessThan(vb), true
}

// kubernetesMinor is the minor of a version such as "v1.36.4+k3s1"; 0 for none.
func kubernetesMinor(v string) int {
	parts := strings.Split(strings.TrimPrefix(v, "v"), ".")
	if len(parts) < 2 {
		return 0
	}
	minor, err := strconv.Atoi(parts[1])
	if err != nil {
		return 0
	}
	return minor
}

// gib shows bytes for people.
func gib(bytes uint64) string {
	const unit = 1 << 30
	if bytes < 10*unit {
		return strconv.FormatFloat(float64(bytes)/unit, 'f', 1, 64) + " GiB"
	}
	return strconv.FormatUint((bytes+unit/2)/unit, 10) + " GiB"
}

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

// some joins at most n of the words and says how many were left out.
func some(n int, words []string) string {
	if len(words) <= n {
		return strings.Join(words, ", ")
	}
	return strings.Join(words[:n], ", ") + fmt.Sprintf(" and %d more", len(words)-n)
}

// mount is one line of /proc/self/mounts.
type mount struct {
	source, point, kind string
	options             []string
}

// mounts reads the mount table in its order.
func (f Facts) mounts() ([]mount, snapshot.Text) {
	t := f.File("/proc/self/mounts")
	if t.State == snapshot.Absent {
		t = f.File("/proc/mounts")
	}
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var out []mount
	for _, line := range t.Lines() {
		fields := strings.Fields(line)
		if len(fields) < 4 {
			continue
		}
		out = append(out, mount{
			source: unescape.Replace(fields[0]), point: unescape.Replace(fields[1]), kind: fields[2],
			options: strings.Split(fields[3], ","),
		})
	}
	return out, t
}

// holding returns the mount that holds a path.
func holding(mounts []mount, name string) (mount, bool) {
	var best mount
	found := false
	for _, m := range mounts {
		prefix := strings.TrimSuffix(m.point, "/") + "/"
		if name != m.point && !strings.HasPrefix(name, prefix) {
			continue
		}
		// A later mount on the same point hides the former.
		if len(m.point) >= len(best.point) {
			best, found = m, true
		}
	}
	return best, found
}

// prefixOf reads a CIDR; ok is false where it is none.
func prefixOf(text string) (netip.Prefix, bool) {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, false
	}
	return p, true
}
