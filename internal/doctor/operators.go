package doctor

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func admissionChecks() []Check {
	return append(rows(
		saying{
			check: Check{
				ID: "operator.webhook.certificate", Layer: LayerAdmission, Title: "Certificate of an admission webhook", Rule: "a certificate that the webhook's configuration trusts",
				Reads: "webhook configurations, events", Source: "confidential-containers/cloud-api-adaptor#895; kubernetes docs, dynamic admission control",
				Fix: "Let its operator make it anew: kubectl -n NAMESPACE rollout restart deploy", Causes: []string{"host.clock"},
			},
			ways: []way{
				{hint: "failed calling webhook", pattern: regexp.MustCompile(`failed calling webhook "([^"]+)"[^\n]*(x509: [^\n]+|tls: [^\n]+)`), judge: func(_ *facts, _ text, m []string) answer {
					return answer{measured: m[1] + ": " + oneLine(m[2])}
				}},
			},
		},
		saying{
			check: Check{
				ID: "operator.policy_denied", Layer: LayerAdmission, Title: "Policy that refuses a pod of the box", Rule: "pods of the box admitted", Reads: "events of what makes pods",
				Source: "NVIDIA/k8s-device-plugin#763; NVIDIA/gpu-operator#314", Fix: "Leave the namespace out of that policy, or label it: kubectl label ns NAMESPACE pod-security.kubernetes.io/enforce=privileged --overwrite",
				Causes: []string{"operator.webhook.blocking"},
			},
			ways: []way{
				{hint: "denied the request", pattern: regexp.MustCompile(`admission webhook "([^"]+)" denied the request:\s*([^\n]*)`), judge: func(f *facts, t text, m []string) answer {
					if !f.ofTheBox(t) {
						return answer{ignore: true}
					}
					return answer{measured: t.namespace + ": " + m[1] + " refused it: " + oneLine(m[2])}
				}},
				{hint: "violates PodSecurity", pattern: regexp.MustCompile(`violates PodSecurity "([^"]+)"[^\n]*`), judge: func(_ *facts, t text, m []string) answer {
					return answer{
						measured: t.namespace + ": " + oneLine(m[0]),
						fix:      "kubectl label ns " + cmp.Or(t.namespace, "NAMESPACE") + " pod-security.kubernetes.io/enforce=privileged --overwrite",
					}
				}},
				{hint: "exceeded quota", pattern: regexp.MustCompile(`exceeded quota: ([^\n,]+)[^\n]*`), judge: func(_ *facts, t text, m []string) answer {
					return answer{measured: t.namespace + ": " + oneLine(m[0]), fix: "kubectl -n " + t.namespace + " get resourcequota"}
				}},
			},
			kinds: []string{"event", "status", "command"},
		},
	), []Check{
		{
			ID: "operator.webhook.blocking", Layer: LayerAdmission, Title: "Admission webhook that blocks", Reads: "webhook configurations with failurePolicy Fail and the endpoints behind them, events",
			Rule: "somebody answers behind each webhook that refuses otherwise", Source: "kyverno/kyverno#1780, #3232, #7576", Judge: judgeBlocking, Repair: "webhook.restart",
			Fix:    "Bring its pods back: kubectl -n NAMESPACE rollout restart deploy",
			Causes: append(slices.Clone(nodeRoots()), "image.pull.*", "net.service_route", "net.firewall"),
		},
	}...)
}

// ofTheBox says whether an event is about something that the box itself made.
func (f *facts) ofTheBox(t text) bool {
	return systemNamespace(t.namespace) || t.namespace == "llm"
}

var callFailed = regexp.MustCompile(`failed (?:calling|to call) webhook "?([^":]+)"?: [^\n]*?(no endpoints available for service "([^"]+)"|connect: connection refused|no route to host|context deadline exceeded|i/o timeout|EOF|service "([^"]+)" not found)`)

// judgeBlocking looks at each webhook that refuses when nobody answers, and at who is
// behind it.
func judgeBlocking(f *facts) []finding.Finding {
	var blocked []string
	var evidence []finding.Evidence
	namespaces := []string{}
	configs := 0
	for _, kind := range []string{"validatingwebhookconfigurations", "mutatingwebhookconfigurations"} {
		list, _ := f.objects(kind)
		for _, c := range list {
			configs++
			for _, hook := range nestedList(c.Object, "webhooks") {
				if policy := str(hook, "failurePolicy"); policy == "Ignore" {
					continue
				}
				namespace, _, err1 := unstructured.NestedString(hook, "clientConfig", "service", "namespace")
				service, _, err2 := unstructured.NestedString(hook, "clientConfig", "service", "name")
				if err1 != nil || err2 != nil || service == "" {
					continue
				}
				n, known := f.endpoints(namespace, service)
				if !known || n > 0 {
					continue
				}
				text := fmt.Sprintf("%s of %s: nobody behind %s/%s", kindOf(kind), c.GetName(), namespace, service)
				if !slices.Contains(blocked, text) {
					blocked = append(blocked, text)
					evidence = append(evidence, at(kind, c.GetName(), "failurePolicy: Fail, 0 endpoints of "+namespace+"/"+service))
					namespaces = append(namespaces, namespace)
				}
			}
		}
	}
	said, sayer := f.blockedWords()
	switch {
	case len(blocked) > 0:
		measured := some(2, blocked)
		for _, namespace := range namespaces {
			if why := f.whyNobody(namespace); why != "" {
				measured += "; " + why
				break
			}
		}
		if said != "" {
			measured += "; it refuses now: " + said
			evidence = append(evidence, sayer)
		}
		fix := fmt.Sprintf("kubectl -n %s rollout restart deploy. If its pods can't come back: kubectl delete %s %s (the operator makes it anew)", namespaces[0], strings.TrimSuffix(evidenceKind(evidence[0]), "s"), evidence[0].Field)
		return fail(measured, fix, evidence...)
	case said != "" && configs == 0:
		return fail(said, "", sayer)
	case configs > 0:
		return well(count(configs, "configuration") + " answered for")
	}
	return nil
}

// whyNobody says what the pods of a namespace fail with, where nothing else does.
func (f *facts) whyNobody(namespace string) string {
	why := ""
	for i := range f.pods {
		p := &f.pods[i]
		if p.Namespace == namespace && !ready(p) && failing(p) {
			f.explain(podKey(p), "operator.webhook.blocking")
			why = p.Name + ": " + reason(p)
			if said := f.lastWords(p); said != "" {
				why += "; it said: " + said
			}
		}
	}
	return why
}

func kindOf(resource string) string {
	if strings.HasPrefix(resource, "mutating") {
		return "MutatingWebhookConfiguration"
	}
	return "ValidatingWebhookConfiguration"
}

func evidenceKind(e finding.Evidence) string {
	return strings.TrimSuffix(strings.TrimPrefix(e.File, "cluster/"), ".json")
}

// blockedWords is what an event says of a webhook that nobody answered for.
func (f *facts) blockedWords() (said string, from finding.Evidence) {
	for i := range f.events {
		e := &f.events[i]
		owner := e.InvolvedObject.Kind + "/" + e.InvolvedObject.Name
		if m := callFailed.FindStringSubmatch(e.Message); m != nil && f.fresh(e) && !f.complete(cmp.Or(e.InvolvedObject.Namespace, e.Namespace), owner) {
			return m[1] + ": " + m[2], at("events", e.InvolvedObject.Name, e.Message)
		}
	}
	for _, t := range f.texts {
		if t.kind != "log" && t.kind != "command" && t.kind != "k3s" || !strings.Contains(t.data, "webhook") {
			continue
		}
		if m := callFailed.FindStringSubmatch(t.data); m != nil && f.speaks(t) {
			return m[1] + ": " + m[2], t.evidence(m[0])
		}
	}
	return "", finding.Evidence{}
}

func pluginChecks() []Check {
	gpuStack := append(runtimeRoots(), "runtime.pod_without_gpu", "runtime.hook", "operator.driver_conflict", "operator.device_plugin")
	gpuStack = slices.Clip(gpuStack)
	return append(rows(
		saying{
			check: Check{
				ID: "gpu.fabric", Layer: LayerCUDA, Title: "NVSwitch fabric", Rule: "nvidia-fabricmanager at work and the fabric completed", Reads: "PCI bus, unit, NVML's fabric state, CUDA's error 802",
				Source: "pytorch/pytorch#35710; NVIDIA/gpu-operator#1043", Fix: "Install nvidia-fabricmanager of exactly the driver's version, then: sudo systemctl enable --now nvidia-fabricmanager",
				Causes: []string{"gpu.driver.*", "gpu.fabric.version"},
			},
			ways: []way{
				{hint: "system not yet initialized", judge: judgeFabric}, {hint: "CUDA_ERROR_SYSTEM_NOT_READY", judge: judgeFabric}, {hint: "Error 802", judge: judgeFabric},
			},
		},
		saying{
			check: Check{
				ID: "operator.cuda_validator", Layer: LayerPlugin, Title: "CUDA on the node", Rule: "the operator's validator runs a kernel on the GPU", Reads: "logs of the validator",
				Source: "NVIDIA/gpu-operator#277, #1043, #1146", Fix: "See what it says: kubectl -n gpu-operator logs ds/nvidia-operator-validator -c cuda-validation",
				Causes: append(gpuStack, "gpu.fabric", "image.cuda_requirement"),
			},
			ways: []way{
				{hint: "Failed to allocate device vector", pattern: regexp.MustCompile(`Failed to allocate device vector \w+ \(error code ([^)]+)\)`), judge: func(_ *facts, _ text, m []string) answer {
					switch {
					case strings.Contains(m[1], "system not yet initialized"):
						return answer{ignore: true}
					case strings.Contains(m[1], "driver version is insufficient"):
						return answer{id: "image.cuda_requirement", measured: "the validator: " + m[1]}
					}
					return answer{measured: m[1]}
				}},
				{hint: "RmInitAdapter failed"}, {hint: "failed to validate the driver, retrying", judge: func(f *facts, t text, _ []string) answer {
					return answer{measured: "the validator waits for the driver"}
				}},
			},
		},
		saying{
			check: Check{
				ID: "runtime.dev_char_links", Layer: LayerRuntime, Title: "Links under /dev/char", Rule: "a link for each device file of the GPU", Reads: "/dev/char, the validator's log", Repair: "runtime.dev_char_links",
				Source: "NVIDIA/gpu-operator#430, #539", Fix: "sudo nvidia-ctk system create-dev-char-symlinks --create-all", Causes: []string{"gpu.device_nodes", "gpu.driver.*"},
			},
			ways: []way{{hint: "failed to create dev char symlinks", judge: func(*facts, text, []string) answer {
				return answer{measured: "the validator can't make the links for the GPU's device files"}
			}}},
		},
		saying{
			check: Check{
				ID: "operator.dcgm_conflict", Layer: LayerPlugin, Title: "Second DCGM", Rule: "one DCGM on the machine", Reads: "logs of the exporter, who listens on 5555",
				Source: "NVIDIA/dcgm-exporter#61; NVIDIA/gpu-operator#414", Fix: "Stop the machine's own: sudo systemctl disable --now nvidia-dcgm",
			},
			ways: []way{{hint: "Error connecting to nv-hostengine", judge: func(f *facts, _ text, _ []string) answer {
				return answer{measured: "the exporter can't use the machine's nv-hostengine" + f.listens(5555)}
			}}},
		},
		saying{
			check: Check{
				ID: "operator.socket", Layer: LayerPlugin, Title: "Operator looks for another containerd", Rule: "the operator's toolkit off on k3s, or told where k3s's containerd is", Reads: "ClusterPolicy, logs of the toolkit",
				Source: "NVIDIA/gpu-operator#1694, #238, #522", Fix: "Switch the operator's toolkit off, as llmbox does: sudo llmbox install",
			},
			ways:  []way{{hint: "/run/containerd/containerd.sock", pattern: regexp.MustCompile(`(?:unable to|could not|error)[^\n]*/run/containerd/containerd\.sock[^\n]*|/run/containerd/containerd\.sock[^\n]*(?:no such file|refused|does not exist)`)}},
			where: func(_ *facts, t text) bool { return strings.Contains(t.pod, "toolkit") },
		},
	), []Check{
		{
			ID: "operator.driver_conflict", Layer: LayerPlugin, Title: "Two owners of the driver", Reads: "DaemonSets and pods of the operator, the loaded module", Rule: "the operator's driver off where the machine has one",
			Source: "NVIDIA/gpu-operator#126, #381, #593; canonical/data-science-stack#199", Judge: judgeDriverConflict,
			Fix: `kubectl patch clusterpolicy cluster-policy --type=merge -p '{"spec":{"driver":{"enabled":false}}}'`,
		},
		{
			ID: "operator.device_plugin", Layer: LayerPlugin, Title: "NVIDIA device plugin", Reads: "DaemonSets and pods of the operator, ClusterPolicy", Rule: "one device plugin at work on the node",
			Source: "NVIDIA/k8s-device-plugin#231, #1011", Judge: judgeDevicePlugin, Fix: "sudo llmbox install",
			Causes: append(append(append(gpuRoots(), runtimeRoots()...), nodeRoots()...), "runtime.pod_without_gpu", "runtime.hook", "operator.driver_conflict", "operator.webhook.blocking", "operator.policy_denied", "image.pull.*",
				"helm.release.*", "operator.cuda_validator", "gpu.fabric", "net.service_route"),
		},
		{
			ID: "gpu.allocatable", Layer: LayerPlugin, Title: "GPUs that the node gives out", Reads: "capacity and allocatable of nodes, NVML's count", Rule: "as many as NVML counts",
			Source: "NVIDIA/k8s-device-plugin#231, #348; kubernetes/kubernetes#97131", Judge: judgeAllocatable,
			Fix: "kubectl -n gpu-operator rollout restart ds/nvidia-device-plugin-daemonset", Repair: "plugin.restart",
			Causes: append(gpuStack, append(nodeRoots(), "helm.release.*", "operator.webhook.blocking", "gpu.xid.48", "gpu.ecc.remap_pending", "operator.cuda_validator")...),
		},
	}...)
}

func judgeFabric(f *facts, _ text, _ []string) answer {
	measured := "CUDA says that the system is not yet initialised (802)"
	if u, state := f.Unit("nvidia-fabricmanager.service"); state == snapshot.Absent && f.Command(snapshot.CommandUnits).State == snapshot.Present {
		measured += "; nvidia-fabricmanager is not installed"
	} else if state == snapshot.Present && u.Active != "active" {
		measured += "; nvidia-fabricmanager is " + u.Active
	}
	a := answer{measured: measured}
	if driver := f.driver(); driver != "" {
		a.fix = "Install nvidia-fabricmanager of exactly " + driver + ", then: sudo systemctl enable --now nvidia-fabricmanager"
	}
	return a
}

// listens says who has a TCP port of the machine.
func (f *facts) listens(port int) string {
	var listeners []snapshot.Listener
	if state, _ := f.Probe(snapshot.ProbeListeners, &listeners); state != snapshot.Present {
		return ""
	}
	for _, l := range listeners {
		if l.Port == port && l.Protocol == "tcp" {
			return fmt.Sprintf("; %d is held by %s", port, cmp.Or(l.Process, "another program"))
		}
	}
	return ""
}

// judgeDriverConflict finds an operator that manages a driver which the machine has
// already.
func judgeDriverConflict(f *facts) []finding.Finding {
	var who string
	var evidence finding.Evidence
	for _, d := range f.daemonSets {
		if strings.HasPrefix(d.Name, "nvidia-driver-daemonset") && d.Status.DesiredNumberScheduled > 0 {
			who, evidence = d.Namespace+"/"+d.Name, at("daemonsets", d.Namespace+"/"+d.Name, "")
		}
	}
	for i := range f.pods {
		p := &f.pods[i]
		if strings.HasPrefix(p.Name, "nvidia-driver-daemonset") {
			who, evidence = podKey(p), at("pods", podKey(p), string(p.Status.Phase))
			if !ready(p) {
				f.explain(podKey(p), "operator.driver_conflict")
			}
		}
	}
	inUse := ""
	for _, t := range f.texts {
		if i := strings.LastIndex(t.data, "driver is in use"); i >= 0 && strings.Contains(t.data, "Could not unload NVIDIA driver") {
			inUse = lineAround(t.data, i)
			if who == "" {
				who, evidence = t.namespace+"/"+t.pod, t.evidence(inUse)
			}
		}
		if i := strings.LastIndex(t.data, "NVIDIA GPU driver is already pre-installed on the node"); i >= 0 && who == "" {
			who, evidence, inUse = t.namespace+"/"+t.pod, t.evidence(lineAround(t.data, i)), lineAround(t.data, i)
		}
	}
	if who == "" {
		return nil
	}
	loaded := f.driver() != "" || f.File("/sys/module/nvidia/refcnt").State == snapshot.Present || strings.HasPrefix(f.File("/proc/modules").Data, "nvidia ")
	refcount := f.File("/sys/module/nvidia/refcnt").Trimmed()
	switch {
	case loaded || inUse != "":
		measured := who + " wants to install a driver, and the machine has one loaded"
		if refcount != "" && refcount != "0" {
			measured += " and in use (" + refcount + " references)"
		}
		// A driver that the operator itself brought is loaded, too.
		if inUse == "" && refcount == "" && f.operatorDriver() {
			return nil
		}
		// What waits for the operator's driver on this node waits for nothing else.
		for i := range f.pods {
			p := &f.pods[i]
			if p.Namespace == podNamespace(who) && !ready(p) && strings.HasPrefix(p.Name, "nvidia-") {
				f.explain(podKey(p), "operator.driver_conflict")
			}
		}
		return fail(measured, "", evidence)
	}
	return nil
}

func podNamespace(key string) string {
	namespace, _, _ := strings.Cut(key, "/")
	return namespace
}

// operatorDriver says whether the operator's driver pods are well: then the driver is
// theirs.
func (f *facts) operatorDriver() bool {
	found := false
	for i := range f.pods {
		p := &f.pods[i]
		if strings.HasPrefix(p.Name, "nvidia-driver-daemonset") {
			if !ready(p) {
				return false
			}
			found = true
		}
	}
	return found
}

func isPlugin(p *corev1.Pod) bool {
	return strings.HasPrefix(p.Name, "nvidia-device-plugin") || p.Labels["app"] == "nvidia-device-plugin-daemonset" || p.Labels["app.kubernetes.io/name"] == "nvidia-device-plugin"
}

func judgeDevicePlugin(f *facts) []finding.Finding {
	if !f.had["pods"] || !f.wantsPlugin() {
		return nil
	}
	var down []string
	up := 0
	for i := range f.pods {
		p := &f.pods[i]
		if !isPlugin(p) {
			continue
		}
		if ready(p) {
			up++
			continue
		}
		if f.young(p) {
			continue
		}
		down = append(down, p.Name+": "+reason(p))
		f.explain(podKey(p), "operator.device_plugin")
	}
	switch {
	case len(down) > 0:
		return fail(some(2, down), "kubectl -n gpu-operator describe pod -l app=nvidia-device-plugin-daemonset", at("pods", "gpu-operator", down[0]))
	case up > 0:
		return well(count(up, "pod") + " ready")
	case f.allocatable() > 0 && f.had["daemonsets"] && !f.hadPlugin():
		// Somebody else gives GPUs out here.
		return nil
	}
	policy, had := f.objects("clusterpolicies")
	if had && len(policy) > 0 && nested(policy[0], "spec", "devicePlugin", "enabled") == "false" {
		return fail("ClusterPolicy switches the device plugin off", `kubectl patch clusterpolicy `+policy[0].GetName()+` --type=merge -p '{"spec":{"devicePlugin":{"enabled":true}}}'`, at("clusterpolicies", policy[0].GetName(), "devicePlugin.enabled: false"))
	}
	return fail("there is no pod of the device plugin", "", at("daemonsets", "gpu-operator/nvidia-device-plugin-daemonset", "absent"))
}

// wantsPlugin says whether the cluster is one in which a device plugin should be: there
// is an operator, or a pod asks for a GPU.
func (f *facts) wantsPlugin() bool {
	return slices.ContainsFunc(f.pods, func(p corev1.Pod) bool { return p.Namespace == "gpu-operator" }) ||
		slices.ContainsFunc(f.deployments, func(d deployment) bool { return d.Namespace == "gpu-operator" && d.Name == "gpu-operator" })
}

func (f *facts) hadPlugin() bool {
	for _, d := range f.daemonSets {
		if strings.HasPrefix(d.Name, "nvidia-device-plugin") {
			return true
		}
	}
	return false
}

// allocatable are the GPUs that all nodes can give.
func (f *facts) allocatable() int64 {
	var n int64
	for _, node := range f.nodes {
		for name, q := range node.Status.Allocatable {
			if name == gpuResource || strings.HasPrefix(string(name), "nvidia.com/mig-") {
				n += q.Value()
			}
		}
	}
	return n
}

func (f *facts) capacity() int64 {
	var n int64
	for _, node := range f.nodes {
		for name, q := range node.Status.Capacity {
			if name == gpuResource || strings.HasPrefix(string(name), "nvidia.com/mig-") {
				n += q.Value()
			}
		}
	}
	return n
}

func judgeAllocatable(f *facts) []finding.Finding {
	if len(f.nodes) == 0 {
		return nil
	}
	gives, capacity := f.allocatable(), f.capacity()
	counted := int64(0)
	if f.GPU != nil {
		for _, d := range f.GPU.Devices {
			if d.Error == "" && !d.Lost {
				counted++
			}
		}
	}
	wanted := slices.ContainsFunc(f.pods, func(p corev1.Pod) bool { return wantsGPU(&p) > 0 }) || f.wantsPlugin()
	first := f.nodes[0].Name
	evidence := at("nodes", first, gpuResource+": "+strconv.FormatInt(gives, 10))
	switch {
	case gives == 0 && (wanted || counted > 0 && f.wantsPlugin()):
		return fail(fmt.Sprintf("0 GPUs to give out; NVML counts %d", counted), "", evidence)
	case capacity > gives:
		return fail(fmt.Sprintf("%d of %d GPUs are healthy to the device plugin", gives, capacity), "", evidence)
	case len(f.nodes) == 1 && f.localCluster() && counted > gives && gives > 0:
		return warn(fmt.Sprintf("%d GPUs to give out, NVML counts %d", gives, counted), "", evidence)
	case gives > 0:
		return well(count(int(gives), "GPU") + " to give out")
	}
	return nil
}

func operatorChecks() []Check {
	return []Check{
		{
			ID: "operator.apiservice", Layer: LayerOperator, Title: "Extended API", Reads: "APIServices", Rule: "Available",
			Source: "kubernetes docs, aggregation layer; kedacore/keda#1850", Judge: judgeAPIServices, Fix: "kubectl describe apiservice NAME",
			Causes: append(append(networkRoots(), nodeRoots()...), "workload.missing", "workload.failing", "operator.webhook.blocking", "operator.webhook.certificate", "image.pull.*", "net.service_route", "helm.release.*"),
		},
		{
			ID: "operator.scaledobject", Layer: LayerOperator, Title: "Autoscaling of the model", Reads: "ScaledObjects", Rule: "Ready",
			Source: "kedacore/keda docs, ScaledObject conditions; kedacore/keda#5663", Judge: judgeScaled, Fix: "kubectl -n llm describe scaledobject",
			Causes: append(append(networkRoots(), nodeRoots()...), "operator.apiservice", "workload.failing", "model.missing"),
		},
		{
			ID: "operator.gpu_policy", Layer: LayerOperator, Title: "GPU Operator's own word", Reads: "ClusterPolicy's state", Rule: "ready",
			Source: "NVIDIA/gpu-operator docs, ClusterPolicy", Judge: judgeClusterPolicy, Fix: "kubectl -n gpu-operator get pods",
			Causes: append(append(runtimeRoots(), nodeRoots()...), "runtime.pod_without_gpu", "runtime.hook", "operator.driver_conflict", "operator.device_plugin", "operator.cuda_validator", "workload.failing", "gpu.allocatable", "image.pull.*", "operator.policy_denied"),
		},
		{
			ID: "operator.namespace_stuck", Layer: LayerOperator, Title: "Namespace that does not go away", Reads: "namespaces", Rule: "none in Terminating for long",
			Source: "kubernetes/kubernetes#60807; kubernetes docs, finalizers", Judge: judgeTerminating, Causes: []string{"operator.apiservice", "operator.webhook.blocking"},
			Fix: "See what is left in it: kubectl api-resources --verbs=list --namespaced -o name | xargs -n1 kubectl get -n NAMESPACE --ignore-not-found",
		},
		{
			ID: "operator.crd_missing", Layer: LayerOperator, Title: "Kind that the cluster does not know", Reads: "logs and events", Rule: "the CRDs of each component",
			Source: "kubernetes-sigs/security-profiles-operator#249", Judge: judgeCRDMissing, Fix: "sudo llmbox install", Causes: []string{"helm.release.*", "helm.crd.annotation_limit"},
		},
	}
}

func judgeAPIServices(f *facts) []finding.Finding {
	list, had := f.objects("apiservices")
	if !had {
		return nil
	}
	var down []string
	var evidence []finding.Evidence
	for _, a := range list {
		c := conditionIn(nestedList(a.Object, "status", "conditions"), "Available")
		if c.found && c.status != "True" && !f.settling(c) {
			down = append(down, a.GetName()+": "+c.String())
			evidence = append(evidence, at("apiservices", a.GetName(), c.String()))
		}
	}
	if len(down) == 0 {
		return well(count(len(list), "API") + " available")
	}
	return fail(some(2, down), "kubectl describe apiservice "+strings.SplitN(down[0], ":", 2)[0], evidence[:min(2, len(evidence))]...)
}

func judgeScaled(f *facts) []finding.Finding {
	list, _ := f.objects("scaledobjects")
	for _, o := range list {
		c := conditionIn(nestedList(o.Object, "status", "conditions"), "Ready")
		if c.found && c.status == "False" && !f.settling(c) {
			return fail(fullName(o)+": "+c.String(), "kubectl -n "+o.GetNamespace()+" describe scaledobject "+o.GetName(), at("scaledobjects", fullName(o), c.String()))
		}
	}
	for _, o := range list {
		c := conditionIn(nestedList(o.Object, "status", "conditions"), "Fallback")
		if c.status == "True" {
			return warn(fullName(o)+" runs on its fallback: its figures can't be had", "kubectl -n "+o.GetNamespace()+" describe scaledobject "+o.GetName(), at("scaledobjects", fullName(o), c.String()))
		}
	}
	if len(list) > 0 {
		return well(count(len(list), "ScaledObject") + " ready")
	}
	return nil
}

func judgeClusterPolicy(f *facts) []finding.Finding {
	list, _ := f.objects("clusterpolicies")
	for _, o := range list {
		if !strings.HasPrefix(o.GetAPIVersion(), "nvidia.com/") {
			continue
		}
		switch state := nested(o, "status", "state"); state {
		case "", "ready":
			return well(cmp.Or(state, "no state yet"))
		default:
			return warn(o.GetName()+" is "+state, "", at("clusterpolicies", o.GetName(), "state: "+state))
		}
	}
	return nil
}

func judgeTerminating(f *facts) []finding.Finding {
	var list []corev1.Namespace
	if state, _ := f.Cluster("namespaces", &list); state != snapshot.Present {
		return nil
	}
	for _, n := range list {
		if n.DeletionTimestamp == nil || !f.now().IsZero() && f.now().Sub(n.DeletionTimestamp.Time) < 5*youth {
			continue
		}
		why := ""
		for _, c := range n.Status.Conditions {
			if c.Status == corev1.ConditionTrue && c.Message != "" {
				why = ": " + oneLine(c.Message)
			}
		}
		return warn(n.Name+" has been terminating since "+n.DeletionTimestamp.UTC().Format("2006-01-02 15:04")+why, "", at("namespaces", n.Name, "Terminating"))
	}
	return nil
}

var noMatches = regexp.MustCompile(`no matches for kind "([^"]+)" in version "([^"]+)"`)

func judgeCRDMissing(f *facts) []finding.Finding {
	for _, t := range f.texts {
		if !strings.Contains(t.data, "no matches for kind") || !f.speaks(t) {
			continue
		}
		if m := noMatches.FindStringSubmatch(t.data); m != nil {
			f.explain(t.namespace+"/"+t.pod, "operator.crd_missing")
			return fail(m[1]+" of "+m[2], "", t.evidence(m[0]))
		}
	}
	return nil
}
