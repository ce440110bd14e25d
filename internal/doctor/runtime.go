package doctor

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
	corev1 "k8s.io/api/core/v1"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

const containerdConfig = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"

var (
	noRuntime   = regexp.MustCompile(`no runtime for "([^"]+)" is configured|RuntimeHandler "([^"]+)" not supported|runtime handler "([^"]+)" not found`)
	cudaDemand  = regexp.MustCompile(`unsatisfied condition: (?:[^\n]*?)cuda\s*>=\s*([\d.]+)`)
	exitedReset = regexp.MustCompile(`containerd (?:exited|is not running)|containerd: (?:signal|exit status)`)
)

func runtimeChecks() []Check {
	return append(rows(
		saying{
			check: Check{
				ID: "runtime.handler_missing", Layer: LayerRuntime, Title: "NVIDIA runtime in k3s's containerd", Rule: `a handler in containerd for each RuntimeClass that pods name`,
				Reads: "containerd's configuration, age of nvidia-container-runtime against k3s's start, events", Fix: "sudo systemctl restart k3s (it looks for the runtime only when it starts)",
				Repair: "k3s.restart", Source: "NVIDIA/gpu-operator#413, #730; sgl-project/sglang#5515", Causes: []string{"toolkit.installed", "toolkit.stale_copy"},
			},
			ways: []way{
				{hint: "is configured", pattern: noRuntime, judge: judgeNoRuntime}, {hint: "RuntimeHandler \"", pattern: noRuntime, judge: judgeNoRuntime},
				{hint: "runtime handler \"", pattern: noRuntime, judge: judgeNoRuntime},
			},
		},
		saying{
			check: Check{
				ID: "image.cuda_requirement", Layer: LayerRuntime, Title: "Driver and the image's CUDA", Rule: "a driver that serves the CUDA that the image asks for",
				Reads: "the runtime's answer, the loaded driver", Source: "vllm-project/vllm#5635; ggml-org/llama.cpp#9665",
				Fix:    "Update the driver to R580 when nobody uses the GPU, or take an older image (components.model.values.images.vllm in /etc/llmbox/config.yaml). NVIDIA_DISABLE_REQUIRE only hides it",
				Causes: []string{"gpu.driver.lib_mismatch"},
			},
			ways: []way{
				{hint: "unsatisfied condition", pattern: cudaDemand, judge: func(f *facts, _ text, m []string) answer {
					measured := "the image needs CUDA " + m[1]
					if driver := f.driver(); driver != "" {
						measured = "driver " + driver + f.serves() + ", the image needs >=" + m[1]
					}
					return answer{measured: measured}
				}},
				{hint: "driver on your system is too old", pattern: driverOld, judge: func(f *facts, _ text, m []string) answer {
					return answer{measured: "driver " + cmp.Or(f.driver(), "loaded") + " serves CUDA " + cudaNumber(m[1]) + ", the image was built for a newer one"}
				}},
				{hint: "CUDA driver version is insufficient for CUDA runtime version"},
				{hint: "forward compatibility was attempted on non supported HW", judge: func(f *facts, _ text, _ []string) answer {
					return answer{measured: "the image brings newer CUDA libraries than driver " + cmp.Or(f.driver(), "loaded") + " works with (error 804)"}
				}},
				{hint: "unsupported display driver / cuda driver combination", judge: func(f *facts, _ text, _ []string) answer {
					return answer{measured: "the container's CUDA libraries and driver " + cmp.Or(f.driver(), "loaded") + " don't go together (error 803)"}
				}},
				{hint: "the provided PTX was compiled with an unsupported toolchain"},
			},
		},
		saying{
			check: Check{
				ID: "runtime.hook", Layer: LayerRuntime, Title: "NVIDIA's hook of the runtime", Rule: "a hook that finds the driver and its devices",
				Source: "NVIDIA/nvidia-container-toolkit#260, #147; NVIDIA/nvidia-docker#1718", Fix: "What it says on the machine itself: sudo nvidia-container-cli info",
				Causes: append(gpuRoots(), "toolkit.ldconfig", "runtime.cdi", "toolkit.installed"),
			},
			ways: []way{
				{hint: "driver not loaded"}, {hint: "nvml error: insufficient permissions"}, {hint: "nvml error: driver/library version mismatch"}, {hint: "initialization error: driver error: timed out"},
				{hint: "ldcache error", judge: func(*facts, text, []string) answer {
					return answer{measured: "the toolkit calls an ldconfig that this system does not have", fix: "sudo nvidia-ctk config --in-place --set nvidia-container-cli.ldconfig=@/sbin/ldconfig"}
				}},
				{hint: "unresolvable CDI devices", judge: func(*facts, text, []string) answer {
					return answer{measured: "the CDI specifications don't name the device that the pod asks for", fix: "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml && sudo systemctl restart k3s"}
				}},
				{hint: "failed to determine major: invalid device node"}, {hint: "lstat /dev/nvidia"}, {hint: "device error: unknown device"},
				{hint: "libnvidia-container.so.1: cannot open shared object"},
			},
		},
		saying{
			check: Check{
				ID: "host.apparmor", Layer: LayerHost, Title: "AppArmor", Rule: "apparmor_parser where AppArmor is on", Repair: "host.apparmor",
				Source: "k3s-io/k3s#3406, #3884; rancher/rke2#1459", Fix: "sudo apt-get install -y apparmor && sudo systemctl restart k3s",
			},
			ways: []way{{hint: `"apparmor_parser": executable file not found`}},
		},
		saying{
			check: Check{
				ID: "runtime.exec_format", Layer: LayerImage, Title: "Image for another processor", Rule: "an image for the machine's own architecture",
				Source: "kubernetes docs, multi-architecture images; containerd platform matching", Fix: "Take an image for this machine's architecture: uname -m",
			},
			ways: []way{{hint: "exec format error"}, {hint: "no match for platform in manifest"}},
		},
		saying{
			check: Check{
				ID: "runtime.binary_missing", Layer: LayerRuntime, Title: "Runtime that containerd can't start", Rule: "runc and the NVIDIA runtime where containerd looks for them",
				Source: "containerd/containerd docs, runtime v2; NVIDIA/nvidia-container-toolkit docs", Fix: "sudo apt-get install --reinstall -y nvidia-container-toolkit && sudo systemctl restart k3s",
				Causes: []string{"toolkit.installed", "runtime.handler_missing"}, Repair: "",
			},
			ways: []way{
				{hint: "nvidia-container-runtime", pattern: regexp.MustCompile(`nvidia-container-runtime"?: (?:no such file or directory|executable file not found|permission denied)|fork/exec \S*nvidia-container-runtime: [^\n]+`)},
				{hint: "exec: \"runc\": executable file not found"}, {hint: "failed to start shim: start failed"},
			},
		},
	), []Check{
		{
			ID: "runtime.handler", Layer: LayerRuntime, Title: "NVIDIA runtime in k3s's containerd", Reads: "containerd's configuration", Rule: "a runtime \"nvidia\" with an existing program",
			Source: "NVIDIA/gpu-operator#413", Judge: judgeHandler,
		},
		{
			ID: "runtime.pod_without_gpu", Layer: LayerPlugin, Title: "GPU pod without the NVIDIA runtime", Reads: "runtimeClassName of pods that ask for a GPU, containerd's default runtime, logs",
			Rule:   "runtimeClassName nvidia, or nvidia as the default runtime, for each pod that uses a GPU",
			Source: "NVIDIA/k8s-device-plugin#478, #1011; k3s-io/k3s#4070; llm-d/llm-d-deployer#273", Judge: judgePodWithoutGPU,
			Fix: "Set runtimeClassName: nvidia in the pod's spec; llmbox's own charts do: sudo llmbox install", Causes: append(gpuRoots(), "toolkit.installed", "runtime.handler_missing", "operator.webhook.blocking"),
		},
		{
			ID: "runtime.cgroup_device_lost", Layer: LayerRuntime, Title: "Container lost its GPU while it ran", Reads: "NVML on the machine and inside the pod, links under /dev/char, systemd's reloads",
			Rule:   "NVML answers inside a GPU container as it does outside",
			Source: "NVIDIA/nvidia-container-toolkit#48, #251; NVIDIA/gpu-operator#485", Judge: judgeDeviceLost, Repair: "pod.delete",
			Fix:    "kubectl -n llm delete pod -l app.kubernetes.io/name=model-server. So that it does not come back: sudo nvidia-ctk system create-dev-char-symlinks --create-all",
			Causes: gpuRoots(),
		},
		{
			ID: "runtime.containerd", Layer: LayerRuntime, Title: "containerd", Reads: "k3s's log, containerd's log, the node's condition, containerd's socket", Rule: "containerd answers",
			Source: "k3s-io/k3s#1552; kubernetes docs, container runtimes", Judge: judgeContainerd, Fix: "sudo systemctl restart k3s. Why it ended: sudo tail -n 50 /var/lib/rancher/k3s/agent/containerd/containerd.log",
			Repair: "k3s.restart", Causes: []string{"k3s.service", "host.disk.full", "host.disk.pressure", "host.disk.errors", "k3s.snapshotter", "k3s.start_failed", "host.readonly", "runtime.config"},
		},
		{
			ID: "runtime.config", Layer: LayerRuntime, Title: "containerd's configuration", Reads: "config.toml and its templates", Rule: "valid TOML, with the CRI plugin on",
			Source: "containerd/containerd docs, config.toml(5); k0sproject/k0s#1095", Judge: judgeContainerdConfig,
			Fix: "Move the template away: sudo mv /var/lib/rancher/k3s/agent/etc/containerd/config.toml.tmpl /root/ && sudo systemctl restart k3s",
		},
	}...)
}

func cudaNumber(n string) string {
	if len(n) == 5 {
		return strings.TrimLeft(n[:2], "0") + "." + strings.TrimLeft(n[3:4], "")
	}
	return n
}

// driver is the version of the loaded driver.
func (f *facts) driver() string {
	if v := f.File("/sys/module/nvidia/version").Trimmed(); v != "" {
		return v
	}
	if f.GPU != nil {
		return f.GPU.Driver
	}
	return ""
}

// serves says which CUDA the driver serves, where somebody knows.
func (f *facts) serves() string {
	if f.GPU != nil && f.GPU.CUDA != "" {
		return " serves CUDA " + f.GPU.CUDA
	}
	branch, _, _ := strings.Cut(f.driver(), ".")
	// docs.nvidia.com/deploy/cuda-compatibility, table of minimum drivers.
	for _, row := range [][2]string{{"580", "13.0"}, {"575", "12.9"}, {"570", "12.8"}, {"565", "12.7"}, {"560", "12.6"}, {"555", "12.5"}, {"550", "12.4"}, {"545", "12.3"}, {"535", "12.2"}, {"530", "12.1"}, {"525", "12.0"}} {
		if branch == row[0] {
			return " serves CUDA " + row[1]
		}
	}
	return ""
}

func judgeNoRuntime(f *facts, _ text, m []string) answer {
	name := cmp.Or(m[1], m[2], m[3])
	a := answer{measured: "a pod asks for the runtime " + name + ", which containerd does not have"}
	if name != "nvidia" {
		a.fix = "Take runtimeClassName " + name + " out of the pod, or install that runtime"
		return a
	}
	if handler, known := f.handler(); known && handler != "" {
		// containerd has it by now; the sandbox is made again by itself.
		a.ignore = true
	}
	return a
}

// handler is the program behind containerd's runtime "nvidia"; known is false where
// its configuration could not be read.
func (f *facts) handler() (program string, known bool) {
	runtimes, _, known := f.runtimes()
	if table, ok := runtimes["nvidia"].(map[string]any); ok {
		options, _ := table["options"].(map[string]any)
		program, _ = options["BinaryName"].(string)
		return cmp.Or(program, "the default program"), true
	}
	return "", known
}

// runtimes are containerd's, with the name of the default one.
func (f *facts) runtimes() (runtimes map[string]any, byDefault string, known bool) {
	t := f.File(containerdConfig)
	if t.State != snapshot.Present {
		return nil, "", false
	}
	var config map[string]any
	if _, err := toml.Decode(t.Data, &config); err != nil {
		return nil, "", false
	}
	plugins, _ := config["plugins"].(map[string]any)
	for _, name := range []string{"io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"} {
		plugin, _ := plugins[name].(map[string]any)
		c, ok := plugin["containerd"].(map[string]any)
		if !ok {
			continue
		}
		if d, ok := c["default_runtime_name"].(string); ok {
			byDefault = d
		}
		if table, ok := c["runtimes"].(map[string]any); ok {
			runtimes = table
		}
	}
	return runtimes, cmp.Or(byDefault, "runc"), true
}

func judgeHandler(f *facts) []finding.Finding {
	program, known := f.handler()
	if !known || program == "" {
		return nil
	}
	_, byDefault, _ := f.runtimes()
	measured := "nvidia -> " + program
	if !strings.HasPrefix(byDefault, "nvidia") {
		measured += "; the default is " + byDefault + ", so that each GPU pod needs runtimeClassName: nvidia"
	}
	return well(measured, finding.Evidence{File: "host" + containerdConfig, Line: "BinaryName = " + program})
}

// noDevices are sentences of programs that found no GPU in their container.
func noDevices() []string {
	return []string{
		"No platform detected, vLLM is running on UnspecifiedPlatform", "Failed to infer device type", "Incompatible strategy detected auto", "could not load NVML library",
		"invalid device discovery strategy", "Detected non-NVML platform", "libnvidia-ml.so.1: cannot open shared object file", "NVML: ERROR_LIBRARY_NOT_FOUND", "If this is a GPU node, did you configure the NVIDIA Container Toolkit",
		"libcuda.so.1: cannot open shared object file", "Failed to initialize NVML: could not load NVML library",
	}
}

// judgePodWithoutGPU looks at pods that use a GPU and run under a runtime that gives
// them none.
func judgePodWithoutGPU(f *facts) []finding.Finding {
	_, byDefault, known := f.runtimes()
	var who []string
	var evidence []finding.Evidence
	for i := range f.pods {
		p := &f.pods[i]
		if ready(p) || p.Spec.RuntimeClassName != nil && *p.Spec.RuntimeClassName != "" || !usesGPU(p) {
			continue
		}
		if known && strings.HasPrefix(byDefault, "nvidia") {
			continue
		}
		// A pod that has not been started yet has not been refused anything.
		if !failing(p) && !f.said(p, noDevices()...) && f.had["nodes"] {
			continue
		}
		// What only goes by its name may fail for reasons of its own.
		if wantsGPU(p) == 0 && !f.said(p, noDevices()...) {
			continue
		}
		who = append(who, podKey(p))
		evidence = append(evidence, at("pods", podKey(p), "spec.runtimeClassName is empty"))
		f.explain(podKey(p), "runtime.pod_without_gpu")
	}
	if len(who) > 0 {
		return fail(fmt.Sprintf("%s without runtimeClassName, and the default runtime is %s", some(3, who), cmp.Or(byDefault, "runc")), "", evidence[:min(3, len(evidence))]...)
	}
	for _, t := range f.texts {
		if t.kind != "log" || !f.speaks(t) || systemNamespace(t.namespace) && t.namespace != "gpu-operator" {
			continue
		}
		for _, hint := range noDevices() {
			if i := strings.Index(t.data, hint); i >= 0 {
				line := lineAround(t.data, i)
				f.explain(t.namespace+"/"+t.pod, "runtime.pod_without_gpu")
				return fail("no NVIDIA library or device in the container: "+oneLine(stripPrefix(line)), "", t.evidence(line))
			}
		}
	}
	return nil
}

// usesGPU says whether a pod asks for a GPU or is one of the operator's that need it.
func usesGPU(p *corev1.Pod) bool {
	if wantsGPU(p) > 0 {
		return true
	}
	for _, part := range []string{"nvidia-device-plugin", "gpu-feature-discovery", "nvidia-dcgm"} {
		if strings.HasPrefix(p.Name, part) {
			return true
		}
	}
	return false
}

// said says whether a log or a message of a pod holds one of the sentences.
func (f *facts) said(p *corev1.Pod, sentences ...string) bool {
	for _, t := range f.texts {
		if t.namespace != p.Namespace || t.pod != p.Name {
			continue
		}
		if slices.ContainsFunc(sentences, func(s string) bool { return strings.Contains(t.data, s) }) {
			return true
		}
	}
	return false
}

// judgeDeviceLost compares NVML on the machine with NVML inside a container.
func judgeDeviceLost(f *facts) []finding.Finding {
	var inside []snapshot.PodDevices
	state, _ := f.Probe(snapshot.ProbePodDevices, &inside)
	if state == snapshot.Present {
		for _, d := range inside {
			if lostWords(d.NVML) && f.hostWell() {
				f.explain(d.Namespace+"/"+d.Pod, "runtime.cgroup_device_lost")
				return fail(fmt.Sprintf("%s/%s: NVML says %q inside, and answers on the machine%s", d.Namespace, d.Pod, d.NVML, f.reloaded()),
					fmt.Sprintf("kubectl -n %s delete pod %s. So that it does not come back: sudo nvidia-ctk system create-dev-char-symlinks --create-all", d.Namespace, d.Pod),
					atProbe(snapshot.ProbePodDevices, d.Namespace+"/"+d.Pod, d.NVML))
			}
		}
	}
	for _, t := range f.texts {
		if t.kind != "log" && t.kind != "command" && t.kind != "status" {
			continue
		}
		i := strings.Index(t.data, "Failed to initialize NVML: Unknown Error")
		if i < 0 || !f.hostWell() || t.kind == "command" && !strings.HasPrefix(t.place, "commands/kubectl") {
			continue
		}
		f.explain(t.namespace+"/"+t.pod, "runtime.cgroup_device_lost")
		return fail("NVML fails inside the container and answers on the machine"+f.reloaded(), "", t.evidence(lineAround(t.data, i)))
	}
	if state == snapshot.Present && len(inside) > 0 {
		return well(count(len(inside), "GPU container") + " with its GPU")
	}
	return nil
}

func lostWords(s string) bool {
	return strings.Contains(s, "Unknown Error") || strings.Contains(s, "Insufficient Permissions") || strings.Contains(s, "operation not permitted")
}

// hostWell says whether nothing speaks against NVML on the machine itself.
func (f *facts) hostWell() bool { return f.GPU == nil || f.GPU.NVML.Ending == "ok" }

// reloaded says whether systemd was told to read its units again, which takes the
// devices out of containers whose nodes have no links.
func (f *facts) reloaded() string {
	out := ""
	for _, name := range f.Commands() {
		if t := f.Command(name); strings.HasPrefix(name, "journalctl") {
			if i := strings.LastIndex(t.Data, "Reloading requested from client"); i >= 0 {
				line := lineAround(t.Data, i)
				out = "; systemd was reloaded"
				if j := strings.Index(line, "(unit "); j >= 0 {
					out += " by " + strings.TrimRight(strings.TrimPrefix(line[j:], "(unit "), ". )")
				}
			}
		}
	}
	for _, link := range []string{"/dev/char/195:0", "/dev/char/195:255"} {
		if _, state := f.Stat(link); state == snapshot.Absent && len(f.List("/dev")) > 0 {
			return out + "; " + link + " is absent"
		}
	}
	return out
}

func judgeContainerd(f *facts) []finding.Finding {
	for _, n := range f.nodes {
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue && (strings.Contains(c.Message, "container runtime is down") || strings.Contains(c.Message, "PLEG is not healthy") ||
				strings.Contains(c.Message, "containerd.sock") || strings.Contains(c.Message, "container runtime status check may not have completed")) {
				return fail(n.Name+": "+oneLine(c.Message), "", at("nodes", n.Name, c.Message))
			}
		}
	}
	lines, from := f.k3sLog()
	for i := len(lines) - 1; i >= 0; i-- {
		if exitedReset.MatchString(lines[i].Text) {
			if down, known := f.k3sDown(); known && !down {
				break
			}
			return fail(oneLine(lines[i].Text), "", finding.Evidence{File: from.Place, Line: oneLine(lines[i].Text)})
		}
	}
	var dials []snapshot.Dial
	if state, _ := f.Probe(snapshot.ProbeDials, &dials); state == snapshot.Present {
		for _, d := range dials {
			if d.What == "containerd" && d.Error != "" {
				return fail(d.Address+": "+d.Error, "", atProbe(snapshot.ProbeDials, d.What, d.Error))
			}
			if d.What == "containerd" {
				return well(d.Address + " answers")
			}
		}
	}
	return nil
}

func judgeContainerdConfig(f *facts) []finding.Finding {
	t := f.File(containerdConfig)
	if t.State != snapshot.Present {
		return nil
	}
	var config map[string]any
	if _, err := toml.Decode(t.Data, &config); err != nil {
		return fail(containerdConfig+" is no TOML: "+oneLine(err.Error()), "", finding.Evidence{File: t.Place, Line: oneLine(err.Error())})
	}
	if list, ok := config["disabled_plugins"].([]any); ok {
		for _, one := range list {
			if name, _ := one.(string); name == "cri" || strings.Contains(name, ".cri") {
				return fail("the CRI plugin is switched off", "", finding.Evidence{File: t.Place, Line: "disabled_plugins"})
			}
		}
	}
	return well("valid", finding.Evidence{File: t.Place})
}
