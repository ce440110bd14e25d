package doctor

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

var pulled = regexp.MustCompile(`(?:[Pp]ull(?:ing)? (?:and unpack )?image|pull(?:ing)?|Container image) \\?"([^"\\]+)\\?"`)

// imageOf names the image of a message.
func imageOf(t text) string {
	if m := pulled.FindStringSubmatch(t.data); m != nil {
		return m[1]
	}
	return "an image"
}

func registryOf(image string) string {
	host, _, ok := strings.Cut(image, "/")
	if !ok || !strings.ContainsAny(host, ".:") {
		return "docker.io"
	}
	return host
}

func imageChecks() []Check {
	path := []string{"net.dns.resolve", "net.default_route", "net.hosts", "net.proxy", "net.tls_interception", "host.clock", "net.firewall"}
	said := func(what string) func(*facts, text, []string) answer {
		return func(_ *facts, t text, _ []string) answer { return answer{measured: imageOf(t) + ": " + what} }
	}
	path = slices.Clip(path)
	kinds := []string{"event", "status", "command"}
	return append(rows(
		saying{
			check: Check{
				ID: "image.pull.rate_limited", Layer: LayerImage, Title: "Registry lets no more pulls through", Rule: "fewer pulls than the quota", Reads: "events and states of pods",
				Source: "k3d-io/k3d#631; k3s-io/k3s#10926", Fix: "Name credentials or a mirror: sudo llmbox install --set secrets.registryAuthFile=FILE, or registries.mirrors in /etc/llmbox/config.yaml. Else wait six hours",
			},
			kinds: kinds,
			ways: []way{
				{hint: "toomanyrequests", judge: judgeLimited}, {hint: "429 Too Many Requests", judge: judgeLimited}, {hint: "pull rate limit", judge: judgeLimited}, {hint: "pull QPS exceeded", judge: said("the kubelet pulls no faster; it goes on by itself")},
			},
		},
		saying{
			check: Check{
				ID: "image.pull.unauthorized", Layer: LayerImage, Title: "Registry asks for credentials", Rule: "credentials that the registry accepts", Reads: "events and states of pods",
				Source: "kubernetes docs, pull an image from a private registry", Fix: "sudo llmbox install --set secrets.registryAuthFile=FILE (in the form of Docker's config.json)",
			},
			kinds: kinds,
			ways: []way{
				{hint: "401 Unauthorized", judge: said("the registry says 401")}, {hint: "403 Forbidden", judge: said("the registry says 403")}, {hint: "pull access denied", judge: said("not there, or only for those who log in")},
				{hint: "authorization failed", judge: said("the registry does not accept the credentials")}, {hint: "no basic auth credentials", judge: said("the registry asks for credentials")},
				{hint: "denied: requested access to the resource is denied", judge: said("the registry denies access")},
				{hint: "insufficient_scope", judge: said("the registry denies access")},
			},
		},
		saying{
			check: Check{
				ID: "image.pull.not_found", Layer: LayerImage, Title: "Image that the registry does not have", Rule: "an image of that name and tag", Reads: "events and states of pods",
				Source: "kyverno/kyverno#13683, #13899; containerd docs", Fix: "Correct the image in components.NAME.values of /etc/llmbox/config.yaml; those of the box: llmbox images",
				Causes: []string{"image.pull.unauthorized", "image.pull.rate_limited"},
			},
			kinds: kinds,
			ways: []way{
				{hint: "manifest unknown", judge: said("no such tag")}, {hint: ": not found", pattern: regexp.MustCompile(`(?:failed to resolve (?:reference|image)|[Pp]ull(?:ing)?(?: and unpack)? image|manifests/)[^\n]*: not found`), judge: said("not found")},
				{hint: "repository does not exist", judge: said("no such repository")}, {hint: "InvalidImageName", judge: said("not a valid name")}, {hint: "name unknown", judge: said("no such repository")},
				{hint: "ErrImageNeverPull", judge: said("not on the machine, and may not be pulled")},
			},
		},
		saying{
			check: Check{
				ID: "image.pull.tls", Layer: LayerImage, Title: "Certificate of the registry", Rule: "a certificate of an authority that the machine trusts", Reads: "events and states of pods",
				Source: "k3d-io/k3d#1246; kubernetes/minikube#3613", Fix: "Name the authority on the way: sudo llmbox install --set network.caFile=FILE", Causes: []string{"host.clock", "net.tls_interception"},
			},
			kinds: kinds,
			ways: []way{
				{hint: "x509: ", pattern: regexp.MustCompile(`(?:[Pp]ull|registry|resolve|manifest|https://)[^\n]*x509: [^\n"]+`), judge: func(_ *facts, t text, m []string) answer {
					if strings.Contains(m[0], "webhook") {
						return answer{ignore: true}
					}
					i := strings.Index(m[0], "x509: ")
					return answer{measured: imageOf(t) + ": " + oneLine(m[0][i:])}
				}},
				{hint: "server gave HTTP response to HTTPS client", judge: said("the registry speaks http")},
			},
		},
		saying{
			check: Check{
				ID: "image.pull.stalled", Layer: LayerImage, Title: "Pull that gets no further", Rule: "progress within the kubelet's time", Reads: "events and states of pods",
				Source: "kubernetes/kubernetes#131521", Fix: "Pull it by hand, which waits as long as it takes: sudo k3s crictl pull IMAGE", Causes: path,
			},
			kinds: kinds,
			ways:  []way{{hint: "because of no progress in", judge: said("cancelled for want of progress")}},
		},
		saying{
			check: Check{
				ID: "image.pull.network", Layer: LayerImage, Title: "Registry that can't be reached", Rule: "the registry's host reached from the machine", Reads: "events and states of pods",
				Source: "k3s-io/k3s#10926; kubernetes/minikube#3613", Fix: "Try from the machine: curl -sSI https://REGISTRY/v2/. Behind a proxy: " + set("network.proxy.https=URL"),
				Causes: append(path, "image.pull.rate_limited", "image.pull.tls"),
			},
			kinds: kinds,
			ways: []way{
				{hint: "failed to do request", judge: judgePullNetwork}, {hint: "failed to pull and unpack image", pattern: regexp.MustCompile(`(?:dial tcp|i/o timeout|no such host|connection refused|connection reset|TLS handshake timeout|network is unreachable|EOF|context deadline exceeded)`), judge: judgePullNetwork},
				{hint: "502 Bad Gateway", judge: said("the registry says 502")}, {hint: "503 Service Unavailable", judge: said("the registry says 503")},
			},
		},
		saying{
			check: Check{
				ID: "image.pull.space", Layer: LayerImage, Title: "No room for an image", Rule: "room for the image, packed and unpacked", Reads: "events and states of pods",
				Source: "kairos-io/kairos#2682; k3s-io/k3s#5813", Fix: "Remove images that nobody uses: sudo k3s crictl rmi --prune. Then see: sudo du -xh --max-depth=2 /var/lib/rancher | sort -h | tail",
				Causes: []string{"host.disk.full", "host.disk.pressure"}, Repair: "disk.images",
			},
			kinds: kinds,
			ways:  []way{{hint: "no space left on device", pattern: regexp.MustCompile(`(?:[Pp]ull|extract|unpack|layer)[^\n]*no space left on device`), judge: said("no space left on the device")}},
		},
		saying{
			check: Check{
				ID: "host.sysctl.inotify", Layer: LayerHost, Title: "inotify limits", Rule: "fs.inotify.max_user_instances >= 512", Reads: "fs.inotify.max_user_instances, logs", Repair: "host.inotify",
				Source: "k3s-io/k3s#10020; containerd/containerd#10309", Fix: `printf 'fs.inotify.max_user_instances = 8192\nfs.inotify.max_user_watches = 1048576\n' | sudo tee /etc/sysctl.d/99-llmbox-inotify.conf; sudo sysctl --system`,
			},
			ways: []way{
				{hint: "too many open files", pattern: regexp.MustCompile(`(?i)(?:fsnotify|inotify|watcher)[^\n]*too many open files`), judge: judgeInotify},
				{hint: "no space left on device", pattern: regexp.MustCompile(`(?i)inotify[^\n]*no space left on device`), judge: func(f *facts, _ text, _ []string) answer {
					return answer{measured: "no inotify watches are left" + f.inotifySaid("max_user_watches")}
				}},
			},
		},
	), []Check{}...)
}

func judgeLimited(_ *facts, t text, _ []string) answer {
	image := imageOf(t)
	return answer{measured: registryOf(image) + " has counted too many pulls from this address (429): " + image}
}

func judgePullNetwork(_ *facts, t text, _ []string) answer {
	for _, other := range []string{"429 Too Many", "toomanyrequests", "x509: ", "no space left", "401 Unauthorized", "403 Forbidden"} {
		if strings.Contains(t.data, other) {
			return answer{ignore: true}
		}
	}
	line := oneLine(t.data)
	if i := strings.LastIndex(line, "dial tcp"); i >= 0 {
		line = line[i:]
	} else if i := strings.LastIndex(line, "failed to do request"); i >= 0 {
		line = line[i:]
	}
	return answer{measured: imageOf(t) + ": " + line}
}

func judgeInotify(f *facts, _ text, _ []string) answer {
	return answer{measured: "programs can't watch files any more" + f.inotifySaid("max_user_instances")}
}

func (f *facts) inotifySaid(name string) string {
	if v := f.File("/proc/sys/fs/inotify/" + name).Trimmed(); v != "" {
		return ": " + name + " is " + v
	}
	return ""
}

var portsTaken = regexp.MustCompile(`(\d+) node\(s\) didn't have free ports`)

func scheduleChecks() []Check {
	return []Check{
		{
			ID: "pod.insufficient_gpu", Layer: LayerSchedule, Title: "No GPU left for a pod", Reads: "pods that wait, allocatable GPUs and who has them", Rule: "as many GPUs as pods ask for",
			Source: "NVIDIA/k8s-device-plugin#585; kubernetes docs, device plugins", Judge: judgeNoGPU, Fix: "See who has them: kubectl get pods -A -o custom-columns=NS:.metadata.namespace,POD:.metadata.name,GPU:.spec.containers[*].resources.limits.nvidia\\.com/gpu",
			Causes: append(runtimeRoots(), "gpu.allocatable", "operator.device_plugin", "model.rollout_deadlock", "runtime.pod_without_gpu", "operator.driver_conflict"),
		},
		{
			ID: "pod.insufficient", Layer: LayerSchedule, Title: "No room for a pod on the node", Reads: "pods that wait, the scheduler's words", Rule: "requests within what the node has",
			Source: "kubernetes docs, managing resources for containers", Judge: judgeNoRoom, Fix: "Take a larger machine, or leave components out: sudo llmbox install --without NAME", Causes: append(nodeRoots(), "node.cordoned"),
		},
		{
			ID: "pod.unschedulable", Layer: LayerSchedule, Title: "Pod that fits no node", Reads: "pods that wait, the scheduler's words", Rule: "a node that each pod may run on",
			Source: "kubernetes docs, assigning pods to nodes", Judge: judgeUnschedulable, Fix: "kubectl -n NAMESPACE describe pod POD",
			Causes: append(nodeRoots(), "node.cordoned", "node.name_changed", "storage.pvc_pending", "storage.pvc_lost", "pod.host_port", "gpu.allocatable", "storage.no_class"),
		},
		{
			ID: "pod.host_port", Layer: LayerSchedule, Title: "Port of the machine that is taken", Reads: "pods that wait or fail to listen, listeners", Rule: "the ports that pods take on the machine free",
			Source: "prometheus-community/helm-charts#2248, #2983; kubesphere/kubesphere#5025", Judge: judgeHostPort, Fix: "See who has it: sudo ss -lntup. Stop that, or leave the component out: sudo llmbox install --without NAME",
		},
		{
			ID: "pod.stale", Layer: LayerPod, Title: "Pods left over from before", Reads: "failed pods that others replaced", Rule: "no failed pods without an owner's use",
			Source: "NVIDIA/gpu-operator#475, #596; kubernetes/kubernetes#97131", Judge: judgeStale, Repair: "pod.stale",
			Fix:    "kubectl delete pods -A --field-selector=status.phase=Failed",
			Causes: append(append(gpuRoots(), nodeRoots()...), "gpu.allocatable", "operator.device_plugin"),
		},
	}
}

// waitingPods are those that the scheduler has found no place for, with its words.
func (f *facts) waitingPods() map[string]string {
	out := map[string]string{}
	for i := range f.pods {
		p := &f.pods[i]
		if !unscheduled(p) {
			continue
		}
		said := ""
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				said = c.Message
			}
		}
		if said == "" {
			for j := range f.events {
				e := &f.events[j]
				if e.Reason == "FailedScheduling" && e.InvolvedObject.Name == p.Name && cmp.Or(e.InvolvedObject.Namespace, e.Namespace) == p.Namespace {
					said = e.Message
				}
			}
		}
		if said != "" {
			out[podKey(p)] = said
		}
	}
	return out
}

func judgeNoGPU(f *facts) []finding.Finding {
	waiting := f.waitingPods()
	var who []string
	var evidence []finding.Evidence
	for _, key := range sortedKeys(waiting) {
		if !strings.Contains(waiting[key], "Insufficient nvidia.com/") {
			continue
		}
		who = append(who, key)
		evidence = append(evidence, at("pods", key, waiting[key]))
		f.explain(key, "pod.insufficient_gpu")
	}
	if len(who) == 0 {
		return nil
	}
	var holders []string
	for i := range f.pods {
		p := &f.pods[i]
		if n := wantsGPU(p); n > 0 && p.Spec.NodeName != "" && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			holders = append(holders, fmt.Sprintf("%s (%d)", podKey(p), n))
		}
	}
	measured := fmt.Sprintf("%s waits; %s", some(2, who), count(int(f.allocatable()), "GPU")+" to give out")
	if len(holders) > 0 {
		measured += ", held by " + some(3, holders)
	}
	return fail(measured, "", evidence[:min(3, len(evidence))]...)
}

func judgeNoRoom(f *facts) []finding.Finding {
	waiting := f.waitingPods()
	for _, key := range sortedKeys(waiting) {
		for _, what := range []string{"Insufficient cpu", "Insufficient memory", "Insufficient ephemeral-storage", "Too many pods"} {
			if strings.Contains(waiting[key], what) {
				f.explain(key, "pod.insufficient")
				return fail(key+": "+oneLine(waiting[key]), "", at("pods", key, waiting[key]))
			}
		}
	}
	return nil
}

func judgeUnschedulable(f *facts) []finding.Finding {
	waiting := f.waitingPods()
	for _, key := range sortedKeys(waiting) {
		said := waiting[key]
		if strings.Contains(said, "Insufficient ") || strings.Contains(said, "Too many pods") || portsTaken.MatchString(said) {
			continue
		}
		p := f.podsByKey[key]
		if f.young(p) {
			continue
		}
		f.explain(key, "pod.unschedulable")
		return fail(key+": "+oneLine(said), "kubectl -n "+p.Namespace+" describe pod "+p.Name, at("pods", key, said))
	}
	return nil
}

var bindTaken = regexp.MustCompile(`listen tcp[46]? [^\n]*?:(\d+): bind: address already in use`)

func judgeHostPort(f *facts) []finding.Finding {
	waiting := f.waitingPods()
	for _, key := range sortedKeys(waiting) {
		if !portsTaken.MatchString(waiting[key]) {
			continue
		}
		f.explain(key, "pod.host_port")
		port := ""
		for _, c := range containers(f.podsByKey[key]) {
			for _, p := range c.Ports {
				if p.HostPort > 0 {
					port = ": " + strconv.Itoa(int(p.HostPort)) + f.listens(int(p.HostPort))
				}
			}
		}
		return fail(key+" waits for a port of the machine"+port, "", at("pods", key, waiting[key]))
	}
	for _, t := range f.texts {
		if t.kind != "log" && t.kind != "status" || !f.speaks(t) {
			continue
		}
		if all := bindTaken.FindAllStringSubmatch(t.data, -1); len(all) > 0 {
			m := all[len(all)-1]
			port, err := strconv.Atoi(m[1])
			if err != nil {
				continue
			}
			f.explain(t.namespace+"/"+t.pod, "pod.host_port")
			return fail(fmt.Sprintf("%s/%s can't listen on %d%s", t.namespace, t.pod, port, f.listens(port)), "", t.evidence(m[0]))
		}
	}
	return nil
}

// judgeStale finds failed pods that only their controller's history keeps: what the
// kubelet refused or evicted, while a newer one runs.
func judgeStale(f *facts) []finding.Finding {
	var stale []string
	var evidence []finding.Evidence
	for i := range f.pods {
		p := &f.pods[i]
		if p.Status.Phase != corev1.PodFailed || !slices.Contains([]string{"UnexpectedAdmissionError", "Evicted", "OutOfnvidia.com/gpu", "NodeShutdown", "Terminated", "NodeAffinity", "OutOfcpu", "OutOfmemory"}, p.Status.Reason) {
			continue
		}
		stale = append(stale, podKey(p)+" ("+p.Status.Reason+")")
		evidence = append(evidence, at("pods", podKey(p), p.Status.Reason+": "+p.Status.Message))
		f.explain(podKey(p), "pod.stale")
	}
	if len(stale) == 0 {
		return nil
	}
	return warn(count(len(stale), "failed pod")+" left over: "+some(2, stale), "", evidence[:min(3, len(evidence))]...)
}

// reason is what keeps a pod from being ready, in its own words.
func reason(p *corev1.Pod) string {
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := c.State.Waiting; w != nil && w.Reason != "" && w.Reason != "PodInitializing" && w.Reason != "ContainerCreating" {
			out := c.Name + ": " + w.Reason
			if w.Message != "" {
				out += ": " + oneLine(w.Message)
			}
			if t := c.LastTerminationState.Terminated; t != nil {
				out += fmt.Sprintf(" (last exit code %d, %s)", t.ExitCode, cmp.Or(t.Reason, "no reason given"))
			}
			return out
		}
		if t := c.State.Terminated; t != nil && t.ExitCode != 0 {
			return fmt.Sprintf("%s: exit code %d, %s", c.Name, t.ExitCode, t.Reason)
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return oneLine(c.Message)
		}
	}
	if p.Status.Reason != "" {
		return p.Status.Reason + ": " + oneLine(p.Status.Message)
	}
	return strings.ToLower(cmp.Or(string(p.Status.Phase), "unknown")) + ", not ready"
}

func podChecks() []Check {
	everything := slices.Concat(nodeRoots(), networkRoots(), runtimeRoots(), []string{"operator.webhook.blocking", "helm.release.pending", "net.service_route", "net.dns.*"})
	everything = slices.Clip(everything)
	return []Check{
		{
			ID: "workload.failing", Also: []string{"workload.unexplained"}, Layer: LayerPod, Title: "Pods that are not ready", Reads: "every pod", Rule: "every pod ready, or done",
			Source: "kubernetes docs, debugging pods", Judge: judgeWorkloads, Fix: "kubectl -n NAMESPACE describe pod POD; kubectl -n NAMESPACE logs POD --previous", Causes: nil,
		},
		{
			ID: "workload.missing", Layer: LayerPod, Title: "Workloads without their pods", Reads: "Deployments, StatefulSets and DaemonSets", Rule: "as many pods ready as asked for",
			Source: "kubernetes docs, workloads", Judge: judgeMissingPods, Fix: "kubectl -n NAMESPACE describe", Causes: append(everything, "workload.failing", "workload.unexplained", "operator.policy_denied", "model.missing", "node.cordoned", "secrets.vault_sealed",
				"operator.device_plugin", "operator.driver_conflict", "model.*", "runtime.*", "image.*", "storage.*", "secrets.*", "pod.*", "helm.*", "gpu.*", "net.*"),
		},
	}
}

// patience is how long a pod without any complaint of its own may take.
const patience = 10 * time.Minute

// judgeWorkloads goes through every pod, so that none is missed: one whose reason is
// known follows from that, one whose reason nobody told is a root of its own.
func judgeWorkloads(f *facts) []finding.Finding {
	var known, unknown []string
	var evidence, unknownEvidence []finding.Evidence
	var causes []string
	first := map[string]string{}
	up := 0
	for i := range f.pods {
		p := &f.pods[i]
		if ready(p) {
			up++
			continue
		}
		if p.DeletionTimestamp != nil || f.young(p) {
			continue
		}
		ids := f.explained[podKey(p)]
		if slices.Contains(ids, "") {
			// Known to be no matter.
			continue
		}
		if len(ids) == 0 && !failing(p) && p.Status.Phase != corev1.PodFailed {
			// Not ready and nothing wrong of its own: it waits for others, or is on its way.
			if f.now().IsZero() || p.CreationTimestamp.IsZero() || f.now().Sub(startedAt(p)) < patience || isModel(p) {
				if cause := f.waitsFor(p); cause != "" {
					ids = []string{cause}
				} else if isModel(p) || !f.now().IsZero() {
					continue
				}
			} else if cause := f.waitsFor(p); cause != "" {
				ids = []string{cause}
			}
		}
		if len(ids) == 0 {
			ids = f.inherited(p)
		}
		if len(ids) == 0 && systemNamespace(p.Namespace) {
			// Controllers talk to the API server all the time: cut off from it they end.
			for _, id := range networkRoots() {
				if f.failures[id] {
					ids = append(ids, id)
				}
			}
		}
		text := podKey(p) + ": " + reason(p)
		if len(ids) > 0 {
			known = append(known, podKey(p))
			if len(evidence) < 3 {
				evidence = append(evidence, at("pods", podKey(p), reason(p)))
			}
			for _, id := range ids {
				if !slices.Contains(causes, id) {
					causes = append(causes, id)
				}
			}
			continue
		}
		key := strings.SplitN(reason(p), ": ", 2)[0] + p.Namespace
		if first[key] == "" {
			first[key] = podKey(p)
			if said := f.lastWords(p); said != "" {
				text += "; it said: " + said
			}
			unknown = append(unknown, text)
		}
		if len(unknownEvidence) < 3 {
			unknownEvidence = append(unknownEvidence, at("pods", podKey(p), reason(p)))
		}
	}
	var out []finding.Finding
	if len(known) > 0 {
		one := fail(count(len(known), "pod")+": "+some(4, known), "They come back once that is mended: kubectl get pods -A", evidence...)
		one[0].Causes = causes
		out = append(out, one...)
	}
	if len(unknown) > 0 {
		namespace, name, _ := strings.Cut(strings.SplitN(unknown[0], ":", 2)[0], "/")
		one := named("workload.unexplained", fail(some(3, unknown), fmt.Sprintf("kubectl -n %s describe pod %s && kubectl -n %s logs %s --all-containers --tail=50", namespace, name, namespace, name), unknownEvidence...))
		one[0].Title = "Pods that fail for a reason of their own"
		one[0].Causes = generalRoots()
		out = append(out, one...)
	}
	if len(out) == 0 && up > 0 {
		return well(count(up, "pod") + " ready or done")
	}
	return out
}

// generalRoots explain any pod at all.
func generalRoots() []string {
	return slices.Concat(nodeRoots(), []string{"net.cni", "runtime.config", "runtime.binary_missing", "host.apparmor", "host.selinux", "host.sysctl.inotify", "node.pressure"})
}

func startedAt(p *corev1.Pod) time.Time {
	at := p.CreationTimestamp.Time
	for _, c := range p.Status.ContainerStatuses {
		if c.State.Running != nil && c.State.Running.StartedAt.After(at) {
			at = c.State.Running.StartedAt.Time
		}
	}
	return at
}

// waitsFor is what a pod that has no complaint of its own waits for.
func (f *facts) waitsFor(p *corev1.Pod) string {
	switch {
	case isDNS(p):
		return "net.dns.coredns"
	case p.Namespace == "gpu-operator" && strings.HasPrefix(p.Name, "nvidia-"):
		for _, id := range []string{"operator.driver_conflict", "operator.device_plugin"} {
			if slices.ContainsFunc(valuesOfLists(f.explained), func(known string) bool { return known == id }) {
				return id
			}
		}
	case p.Namespace == "vault":
		for _, q := range f.vaultPods() {
			if ids := f.explained[podKey(q)]; len(ids) > 0 {
				return ids[0]
			}
		}
	}
	return ""
}

func valuesOfLists(m map[string][]string) []string {
	var out []string
	for _, v := range m {
		out = append(out, v...)
	}
	return out
}

// inherited explains a pod by another of the same owner, whose log says more.
func (f *facts) inherited(p *corev1.Pod) []string {
	owner := replicaSetOf(p)
	for i := range f.pods {
		q := &f.pods[i]
		if q.Namespace == p.Namespace && q.Name != p.Name && replicaSetOf(q) == owner && len(f.explained[podKey(q)]) > 0 {
			return f.explained[podKey(q)]
		}
	}
	return nil
}

// ours says whether llmbox made a namespace.
func (f *facts) ours(namespace string) bool {
	list, _ := f.objects("namespaces")
	return slices.ContainsFunc(list, func(o unstructuredObject) bool {
		return o.GetName() == namespace && o.GetLabels()["app.kubernetes.io/managed-by"] == "llmbox"
	})
}

// scaledToNothing says whether a Deployment is asked for no pod.
func (f *facts) scaledToNothing(namespace, name string) bool {
	return slices.ContainsFunc(f.deployments, func(d deployment) bool {
		return d.Namespace == namespace && d.Name == name && d.Spec.Replicas != nil && *d.Spec.Replicas == 0
	})
}

// judgeMissingPods finds workloads that ask for pods which nobody made, or that are not
// ready.
func judgeMissingPods(f *facts) []finding.Finding {
	if !f.had["deployments"] && !f.had["statefulsets"] && !f.had["daemonsets"] {
		return nil
	}
	var short1 []string
	var evidence []finding.Evidence
	judged := 0
	check := func(kind, namespace, name string, want, have int32, made time.Time) {
		judged++
		if have >= want || !f.now().IsZero() && !made.IsZero() && f.now().Sub(made) < youth {
			return
		}
		// A model that is on its way is said to be so elsewhere.
		if name == "model-server" && slices.ContainsFunc(f.models(), func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning && !failing(p) }) {
			return
		}
		// Pods that are there and are judged themselves say more than their owner.
		if slices.ContainsFunc(f.pods, func(p corev1.Pod) bool {
			return p.Namespace == namespace && strings.HasPrefix(p.Name, name+"-") && (f.young(&p) || !failing(&p) && p.Status.Phase == corev1.PodRunning && !f.now().IsZero() && f.now().Sub(startedAt(&p)) < patience)
		}) {
			return
		}
		short1 = append(short1, fmt.Sprintf("%s %s/%s %d of %d", kind, namespace, name, have, want))
		if len(evidence) < 3 {
			evidence = append(evidence, at(strings.ToLower(kind)+"s", namespace+"/"+name, fmt.Sprintf("ready %d of %d", have, want)))
		}
	}
	fix := ""
	none := func(kind, short, namespace, name string, want int32) {
		// How many model servers there are is the scaler's to say.
		if want > 0 || name == "model-server" || !f.ours(namespace) {
			return
		}
		short1 = append(short1, fmt.Sprintf("%s %s/%s is scaled to 0", kind, namespace, name))
		evidence = append(evidence, at(strings.ToLower(kind)+"s", namespace+"/"+name, "replicas: 0"))
		fix = cmp.Or(fix, fmt.Sprintf("kubectl -n %s scale %s/%s --replicas=1", namespace, short, name))
	}
	for _, d := range f.deployments {
		if d.Spec.Replicas != nil {
			none("Deployment", "deploy", d.Namespace, d.Name, *d.Spec.Replicas)
			check("Deployment", d.Namespace, d.Name, *d.Spec.Replicas, d.Status.ReadyReplicas, d.CreationTimestamp.Time)
		}
	}
	for _, s := range f.statefulSets {
		if s.Spec.Replicas != nil {
			none("StatefulSet", "sts", s.Namespace, s.Name, *s.Spec.Replicas)
			check("StatefulSet", s.Namespace, s.Name, *s.Spec.Replicas, s.Status.ReadyReplicas, s.CreationTimestamp.Time)
		}
	}
	for _, d := range f.daemonSets {
		check("DaemonSet", d.Namespace, d.Name, d.Status.DesiredNumberScheduled, d.Status.NumberReady, d.CreationTimestamp.Time)
	}
	switch {
	case len(short1) > 0:
		return fail(some(4, short1), cmp.Or(fix, "kubectl get deploy,sts,ds -A"), evidence[:min(4, len(evidence))]...)
	case judged > 0:
		return well(count(judged, "workload") + " complete")
	}
	return nil
}
