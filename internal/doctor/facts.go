package doctor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// facts is a snapshot taken apart.
type facts struct {
	*snapshot.Snapshot

	pods         []corev1.Pod
	nodes        []corev1.Node
	events       []corev1.Event
	services     []corev1.Service
	slices       []discoveryv1.EndpointSlice
	claims       []corev1.PersistentVolumeClaim
	volumes      []corev1.PersistentVolume
	classes      []storagev1.StorageClass
	deployments  []appsv1.Deployment
	statefulSets []appsv1.StatefulSet
	daemonSets   []appsv1.DaemonSet
	jobs         []batchv1.Job

	// had are the kinds of which there is a list.
	had map[string]bool

	podsByKey map[string]*corev1.Pod
	texts     []text
	// explained are the findings that say why a pod is not well, by namespace/name.
	explained map[string][]string
	// failures are the ids that were found to fail so far, lower layers first.
	failures map[string]bool
}

// text is something that speaks: the log of a container, an event, a state's message.
type text struct {
	place string
	// kind is "log", "event", "status", "k3s", "kernel" or "command".
	kind string
	// namespace and pod are empty where it is no pod's.
	namespace, pod, container string
	previous                  bool
	// owner is KIND/NAME of what an event is about where that makes pods.
	owner string
	data  string
}

func newFacts(s *snapshot.Snapshot) *facts {
	f := &facts{Snapshot: s, had: map[string]bool{}, podsByKey: map[string]*corev1.Pod{}}
	read := func(kind string, into any) {
		state, _ := s.Cluster(kind, into)
		f.had[kind] = state == snapshot.Present
	}
	read("pods", &f.pods)
	read("nodes", &f.nodes)
	read("events", &f.events)
	read("services", &f.services)
	read("endpointslices", &f.slices)
	read("persistentvolumeclaims", &f.claims)
	read("persistentvolumes", &f.volumes)
	read("storageclasses", &f.classes)
	read("deployments", &f.deployments)
	read("statefulsets", &f.statefulSets)
	read("daemonsets", &f.daemonSets)
	read("jobs", &f.jobs)
	for i := range f.pods {
		p := &f.pods[i]
		p.Namespace = cmp.Or(p.Namespace, "default")
		f.podsByKey[p.Namespace+"/"+p.Name] = p
	}
	f.gatherTexts()
	return f
}

// note keeps which findings failed, for the rows that come after.
func (f *facts) note(found []finding.Finding) {
	for _, one := range found {
		if one.Severity == finding.Fail {
			if f.failures == nil {
				f.failures = map[string]bool{}
			}
			f.failures[one.ID] = true
		}
	}
}

// objects are the items of a kind that has no Go type here.
func (f *facts) objects(kind string) ([]unstructured.Unstructured, bool) {
	var items []map[string]any
	state, _ := f.Cluster(kind, &items)
	out := make([]unstructured.Unstructured, 0, len(items))
	for _, item := range items {
		out = append(out, unstructured.Unstructured{Object: item})
	}
	return out, state == snapshot.Present
}

// gatherTexts collects what speaks, newest knowledge first: what the present run says
// outweighs what the one before said.
func (f *facts) gatherTexts() {
	for _, previous := range []bool{false, true} {
		for _, name := range f.Logs() {
			if name.Previous == previous {
				f.texts = append(f.texts, text{
					place: name.Place(), kind: "log", namespace: name.Namespace, pod: name.Pod, container: name.Container, previous: previous,
					data: f.Log(name).Data,
				})
			}
		}
	}
	for i := range f.pods {
		p := &f.pods[i]
		for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
			for _, message := range []string{waitingText(c.State.Waiting), terminatedText(c.State.Terminated), terminatedText(c.LastTerminationState.Terminated)} {
				if message != "" {
					f.texts = append(f.texts, text{
						place: "cluster/pods.json", kind: "status", namespace: p.Namespace, pod: p.Name, container: c.Name, data: message,
					})
				}
			}
		}
	}
	for i := range f.events {
		e := &f.events[i]
		t := text{place: "cluster/events.json", kind: "event", namespace: cmp.Or(e.InvolvedObject.Namespace, e.Namespace), data: e.Reason + ": " + e.Message}
		if e.InvolvedObject.Kind == "Pod" {
			t.pod = e.InvolvedObject.Name
		}
		if slices.Contains([]string{"ReplicaSet", "Deployment", "StatefulSet", "DaemonSet", "Job"}, e.InvolvedObject.Kind) {
			t.owner = e.InvolvedObject.Kind + "/" + e.InvolvedObject.Name
		}
		f.texts = append(f.texts, t)
	}
	for _, name := range f.Commands() {
		kind := ""
		switch {
		case strings.HasPrefix(name, "journalctl-k3s"):
			kind = "k3s"
		case name == snapshot.CommandDmesg, name == snapshot.CommandJournalKernel:
			kind = "kernel"
		case strings.HasPrefix(name, "kubectl"), strings.HasPrefix(name, "journalctl"), strings.HasPrefix(name, "helm"), strings.HasPrefix(name, "llmbox"):
			kind = "command"
		}
		t := f.Command(name)
		if kind == "k3s" {
			t.Data = lately(t.Data)
		}
		if kind != "" && t.Data != "" {
			f.texts = append(f.texts, text{place: t.Place, kind: kind, data: t.Data})
		}
	}
	for _, name := range f.Glob("/var/lib/rancher/k3s/agent/containerd/*.log") {
		f.texts = append(f.texts, text{place: "host" + name, kind: "containerd", data: f.File(name).Data})
	}
}

// stamp is a time in a line of k3s's log: journald's, k3s's own, or that of Kubernetes'
// parts (k8s.io/klog). Some name no year and none its zone.
var stamp = regexp.MustCompile(`^([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) |^[IWEF](\d{4} \d\d:\d\d:\d\d)\.|^time="(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)`)

func stamped(line string) (at time.Time, form int, ok bool) {
	m := stamp.FindStringSubmatch(line)
	if m == nil {
		return time.Time{}, 0, false
	}
	for i, layout := range []string{time.Stamp, "0102 15:04:05", "2006-01-02T15:04:05"} {
		if m[i+1] != "" {
			at, err := time.Parse(layout, m[i+1])
			return at, i, err == nil
		}
	}
	return time.Time{}, 0, false
}

// lately is the end of k3s's log that tells of now: it goes on for weeks, and what it
// complained of an hour before its last line is history. Lines are compared with the last
// of their own form, so that no zone has to be known.
func lately(log string) string {
	const span = 10 * time.Minute
	var last [3]time.Time
	lines := strings.SplitAfter(log, "\n")
	for _, line := range lines {
		if at, form, ok := stamped(line); ok {
			last[form] = at
		}
	}
	begin := 0
	for i, line := range lines {
		if at, form, ok := stamped(line); ok && last[form].Sub(at) > span {
			begin = i + 1
		}
	}
	return strings.Join(lines[begin:], "")
}

func waitingText(w *corev1.ContainerStateWaiting) string {
	if w == nil || w.Message == "" {
		return ""
	}
	return w.Reason + ": " + w.Message
}

func terminatedText(t *corev1.ContainerStateTerminated) string {
	if t == nil || t.Message == "" {
		return ""
	}
	return t.Reason + ": " + t.Message
}

// evidence points at where a text stands, with the line.
func (t text) evidence(line string) finding.Evidence {
	field := ""
	if t.pod != "" && t.kind != "log" {
		field = t.namespace + "/" + t.pod
	}
	return finding.Evidence{File: t.place, Field: field, Line: oneLine(line)}
}

func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > 300 {
		s = string(r[:300]) + "…"
	}
	return s
}

// lineAround is the line of a text in which a match stands.
func lineAround(data string, at int) string {
	begin := strings.LastIndexByte(data[:at], '\n') + 1
	end := strings.IndexByte(data[at:], '\n')
	if end < 0 {
		return data[begin:]
	}
	return data[begin : at+end]
}

// hasHost says whether anything of the machine was read.
func (f *facts) hasHost() bool {
	return len(f.List("/")) > 0 || f.GPU != nil || len(f.Commands()) > 0 || slices.ContainsFunc(f.Probes(), func(p string) bool {
		return !slices.Contains([]string{"api", "endpoint"}, p)
	})
}

// apiAnswers says whether the API server gave a list.
func (f *facts) apiAnswers() bool {
	var api snapshot.APIProbe
	if state, _ := f.Probe(snapshot.ProbeAPI, &api); state == snapshot.Present {
		return api.Error == ""
	}
	return f.had["nodes"]
}

// serverVersion is what the API server calls itself.
func (f *facts) serverVersion() string {
	var api snapshot.APIProbe
	if state, _ := f.Probe(snapshot.ProbeAPI, &api); state == snapshot.Present && api.Version != "" {
		return api.Version
	}
	for _, n := range f.nodes {
		if n.Status.NodeInfo.KubeletVersion != "" {
			return n.Status.NodeInfo.KubeletVersion
		}
	}
	return ""
}

// now is when the snapshot was taken.
func (f *facts) now() time.Time { return f.Manifest.Time }

// k3sConfig is k3s's own configuration, the drop-ins included.
func (f *facts) k3sConfig() map[string]any {
	out := map[string]any{}
	for _, name := range append([]string{"/etc/rancher/k3s/config.yaml"}, f.Glob("/etc/rancher/k3s/config.yaml.d/*.yaml")...) {
		var one map[string]any
		if err := yaml.Unmarshal([]byte(f.File(name).Data), &one); err == nil {
			for k, v := range one {
				out[k] = v
			}
		}
	}
	return out
}

// configured says whether a list or text of k3s's configuration names a word.
func (f *facts) configured(key, word string) (yes, known bool) {
	config := f.k3sConfig()
	value, ok := config[key]
	if len(config) == 0 {
		return false, false
	}
	if !ok {
		return false, true
	}
	raw, err := json.Marshal(value)
	return err == nil && slices.Contains(strings.FieldsFunc(string(raw), func(r rune) bool { return strings.ContainsRune(`"[], `, r) }), word), true
}

// networks are the pods' and the services' networks: as configured, else as seen.
func (f *facts) networks() (pods, services string) {
	pods, services = "10.42.0.0/16", "10.43.0.0/16"
	config := f.k3sConfig()
	if v, ok := config["cluster-cidr"].(string); ok {
		pods = v
	}
	if v, ok := config["service-cidr"].(string); ok {
		services = v
	}
	return pods, services
}

// inServices says whether an address is one of a service of the cluster.
func (f *facts) inServices(address string) bool {
	_, services := f.networks()
	prefix, err := netip.ParsePrefix(strings.Split(services, ",")[0])
	if err != nil {
		return false
	}
	a, err := netip.ParseAddr(address)
	return err == nil && prefix.Contains(a)
}

// ready says whether a pod is as it should be.
func ready(p *corev1.Pod) bool {
	if p.Status.Phase == corev1.PodSucceeded {
		return true
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue && p.Status.Phase != corev1.PodFailed
		}
	}
	// A fixture or a pod that never got as far has no conditions.
	if p.Status.Phase != corev1.PodRunning || len(p.Status.ContainerStatuses) == 0 {
		return false
	}
	return !slices.ContainsFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return !c.Ready })
}

// youth is how long a pod may be on its way before that counts against it.
const youth = 3 * time.Minute

// young says whether a pod is only just starting.
func (f *facts) young(p *corev1.Pod) bool {
	return !f.now().IsZero() && !p.CreationTimestamp.IsZero() && f.now().Sub(p.CreationTimestamp.Time) < youth && restarts(p) == 0
}

func restarts(p *corev1.Pod) int32 {
	var n int32
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		n += c.RestartCount
	}
	return n
}

// speaks says whether a text tells of something that holds now: its pod is not well, or
// nobody knows of its pod. What a pod said before it recovered is history.
func (f *facts) speaks(t text) bool {
	if t.owner != "" {
		return !f.complete(t.namespace, t.owner)
	}
	if t.pod == "" {
		return true
	}
	if !f.had["pods"] {
		return true
	}
	p := f.podsByKey[t.namespace+"/"+t.pod]
	if p == nil {
		// An event or a log of a pod that is gone.
		return t.kind == "log"
	}
	return !ready(p)
}

// complete says whether a maker of pods is known to have all that it is asked for, or to
// be gone: what it was refused before is history.
func (f *facts) complete(namespace, owner string) bool {
	kind, name, _ := strings.Cut(owner, "/")
	made := func(want *int32, have, updated int32) bool {
		if want == nil || have < *want || updated < *want {
			return false
		}
		// The status is a word of its controller's, which may be behind.
		return *want == 0 || !f.had["pods"] || slices.ContainsFunc(f.pods, func(p corev1.Pod) bool {
			return p.Namespace == namespace && strings.HasPrefix(p.Name, name+"-") && ready(&p)
		})
	}
	switch kind {
	case "ReplicaSet", "Deployment":
		for _, d := range f.deployments {
			// A ReplicaSet has the Deployment's name and a hash.
			hash, of := strings.CutPrefix(name, d.Name+"-")
			if d.Namespace == namespace && (kind == "Deployment" && d.Name == name || kind == "ReplicaSet" && of && !strings.Contains(hash, "-")) {
				name = d.Name
				return made(d.Spec.Replicas, d.Status.ReadyReplicas, d.Status.UpdatedReplicas)
			}
		}
	case "StatefulSet":
		for _, s := range f.statefulSets {
			if s.Namespace == namespace && s.Name == name {
				return made(s.Spec.Replicas, s.Status.ReadyReplicas, s.Status.ReadyReplicas)
			}
		}
	case "DaemonSet":
		for _, d := range f.daemonSets {
			if d.Namespace == namespace && d.Name == name {
				return made(&d.Status.DesiredNumberScheduled, d.Status.NumberReady, d.Status.NumberReady)
			}
		}
	case "Job":
		for _, j := range f.jobs {
			if j.Namespace == namespace && j.Name == name {
				return j.Status.Succeeded > 0
			}
		}
	}
	return false
}

// recent bounds how old an event may be that counts by itself.
const recent = time.Hour

func eventTime(e *corev1.Event) time.Time {
	for _, t := range []time.Time{e.LastTimestamp.Time, e.EventTime.Time, e.CreationTimestamp.Time} {
		if !t.IsZero() {
			return t
		}
	}
	if e.Series != nil {
		return e.Series.LastObservedTime.Time
	}
	return time.Time{}
}

// fresh says whether an event is of the time just before the snapshot.
func (f *facts) fresh(e *corev1.Event) bool {
	at := eventTime(e)
	return f.now().IsZero() || at.IsZero() || f.now().Sub(at) < recent
}

// containers are all of a pod, those that come first included.
func containers(p *corev1.Pod) []corev1.Container {
	return slices.Concat(p.Spec.InitContainers, p.Spec.Containers)
}

func requests(c corev1.Container, name string) int64 {
	n := resourceOf(c.Resources.Limits, name)
	if n == 0 {
		n = resourceOf(c.Resources.Requests, name)
	}
	return n
}

func resourceOf(list corev1.ResourceList, name string) int64 {
	q, ok := list[corev1.ResourceName(name)]
	if !ok {
		return 0
	}
	return q.Value()
}

const gpuResource = "nvidia.com/gpu"

// wantsGPU is how many GPUs a pod asks for, MIG instances included.
func wantsGPU(p *corev1.Pod) int64 {
	var n int64
	for _, c := range p.Spec.Containers {
		for _, list := range []corev1.ResourceList{c.Resources.Limits, c.Resources.Requests} {
			var here int64
			for name, q := range list {
				if name == gpuResource || strings.HasPrefix(string(name), "nvidia.com/mig-") {
					here += q.Value()
				}
			}
			if here > 0 {
				n += here
				break
			}
		}
	}
	return n
}

var modelImage = regexp.MustCompile(`(?i)(?:^|/)vllm|vllm-openai|sglang|text-generation-inference`)

// isModel says whether a pod is a model server.
func isModel(p *corev1.Pod) bool {
	if p.Labels["app.kubernetes.io/name"] == "model-server" {
		return true
	}
	return wantsGPU(p) > 0 && p.Namespace != "gpu-operator" || slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return modelImage.MatchString(c.Image) })
}

// models are the pods of the model server.
func (f *facts) models() []*corev1.Pod {
	var out []*corev1.Pod
	for i := range f.pods {
		if isModel(&f.pods[i]) {
			out = append(out, &f.pods[i])
		}
	}
	return out
}

// modelHolds says whether a model server of the cluster is at work, so that what is in
// use on the GPU is its own.
func (f *facts) modelHolds() bool {
	return slices.ContainsFunc(f.models(), func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
}

func podKey(p *corev1.Pod) string { return p.Namespace + "/" + p.Name }

// names joins at most n of the words and says how many were left out.
func some(n int, words []string) string {
	words = slices.Compact(slices.Clone(words))
	if len(words) <= n {
		return strings.Join(words, ", ")
	}
	return strings.Join(words[:n], ", ") + fmt.Sprintf(" and %d more", len(words)-n)
}

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

// at is evidence from a list of the cluster.
func at(kind, name, line string) finding.Evidence {
	return finding.Evidence{File: "cluster/" + kind + ".json", Field: name, Line: oneLine(line)}
}

func atProbe(name, field, line string) finding.Evidence {
	return finding.Evidence{File: "probes/" + name + ".json", Field: field, Line: oneLine(line)}
}

func well(measured string, evidence ...finding.Evidence) []finding.Finding {
	return []finding.Finding{{Severity: finding.OK, Measured: measured, Evidence: evidence}}
}

func note(measured string, evidence ...finding.Evidence) []finding.Finding {
	return []finding.Finding{{Severity: finding.Info, Measured: measured, Evidence: evidence}}
}

func fail(measured, fix string, evidence ...finding.Evidence) []finding.Finding {
	return []finding.Finding{{Severity: finding.Fail, Measured: measured, Fix: fix, Evidence: evidence}}
}

func warn(measured, fix string, evidence ...finding.Evidence) []finding.Finding {
	return []finding.Finding{{Severity: finding.Warn, Measured: measured, Fix: fix, Evidence: evidence}}
}

func named(id string, found []finding.Finding) []finding.Finding {
	for i := range found {
		found[i].ID = id
	}
	return found
}

func because(causes []string, found []finding.Finding) []finding.Finding {
	for i := range found {
		found[i].Causes = slices.Concat(found[i].Causes, causes)
	}
	return found
}

func unread(what, why string) []finding.Finding {
	return []finding.Finding{{Severity: finding.Info, State: finding.Unreadable, Measured: "could not read " + what + ": " + cmp.Or(why, "not there")}}
}

// nested reads a text deep inside an object.
func nested(o unstructured.Unstructured, keys ...string) string {
	v, _, err := unstructured.NestedFieldNoCopy(o.Object, keys...)
	if err != nil || v == nil {
		return ""
	}
	if s, ok := v.(string); ok {
		return s
	}
	return fmt.Sprint(v)
}

func nestedList(o map[string]any, keys ...string) []map[string]any {
	v, _, err := unstructured.NestedFieldNoCopy(o, keys...)
	list, ok := v.([]any)
	if err != nil || !ok {
		return nil
	}
	var out []map[string]any
	for _, one := range list {
		if m, ok := one.(map[string]any); ok {
			out = append(out, m)
		}
	}
	return out
}

func str(m map[string]any, key string) string {
	s, _ := m[key].(string)
	return s
}

// condition is a condition of an object's status by its type.
type condition struct {
	status, reason, message string
	found                   bool
	since                   time.Time
}

func conditionIn(list []map[string]any, kind string) condition {
	for _, c := range list {
		if str(c, "type") == kind {
			since, err := time.Parse(time.RFC3339, str(c, "lastTransitionTime"))
			if err != nil {
				since = time.Time{}
			}
			return condition{str(c, "status"), str(c, "reason"), str(c, "message"), true, since}
		}
	}
	return condition{}
}

func (c condition) String() string {
	return strings.TrimSuffix(strings.TrimSpace(c.reason+": "+oneLine(c.message)), ":")
}

// settling says whether a condition changed only just now, so that it may still mend.
func (f *facts) settling(c condition) bool {
	return !f.now().IsZero() && !c.since.IsZero() && f.now().Sub(c.since) < time.Minute
}

// fullName is namespace/name.
func fullName(o unstructured.Unstructured) string {
	if o.GetNamespace() == "" {
		return o.GetName()
	}
	return o.GetNamespace() + "/" + o.GetName()
}

type unstructuredObject = unstructured.Unstructured

type deployment = appsv1.Deployment

type job = batchv1.Job

type daemonSet = appsv1.DaemonSet
