package snapshot

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// passing tells resources whose objects come and go while nothing changes, or
// that are a view of others.
func passing(group, resource string) bool {
	switch resource {
	case "events", "endpoints", "endpointslices", "componentstatuses", "certificatesigningrequests", "nodes", "ipaddresses":
		return true
	}
	return strings.HasSuffix(group, "metrics.k8s.io")
}

// The objects whose content is compared field by field in a way of their own.
const (
	stateConfigMap = "llmbox-state"
	runLease       = "llmbox-run"
	systemSpace    = "llmbox-system"
)

func normalise(objects []unstructured.Unstructured) (State, error) {
	state := State{}
	releases := map[string][]unstructured.Unstructured{}
	for _, o := range objects {
		gk := o.GroupVersionKind().GroupKind()
		switch {
		case gk.Kind == "Pod" && gk.Group == "":
			countPod(state, o)
		case gk.Kind == "Secret" && gk.Group == "" && o.GetLabels()["owner"] == "helm":
			key := o.GetNamespace() + "/" + o.GetLabels()["name"]
			releases[key] = append(releases[key], o)
		case gk.Kind == "Lease" && o.GetName() != runLease:
			// Leader elections and heartbeats.
		case gk.Kind == "Service" && o.GetNamespace() == "default" && o.GetName() == "kubernetes":
			// The API server's own port, another in each lab.
		case gk.Kind == "ReplicaSet" && zero(o):
			// The past of a Deployment.
		default:
			content, err := normaliseOne(o, gk)
			if err != nil {
				return nil, err
			}
			state[nameOf(o, gk)] = content
		}
	}
	for key, records := range releases {
		newest := slices.MaxFunc(records, func(a, b unstructured.Unstructured) int { return revision(a) - revision(b) })
		deployed, unfinished := 0, 0
		for _, r := range records {
			switch status := r.GetLabels()["status"]; {
			case status == "deployed":
				deployed++
			case status != "superseded":
				unfinished++
			}
		}
		// How many revisions it took may differ; that exactly one is deployed, the
		// newest, and none is pending or failed, may not.
		state["HelmRelease "+key] = map[string]any{
			"newest": newest.GetLabels()["status"], "deployed": strconv.Itoa(deployed), "unfinished": strconv.Itoa(unfinished),
		}
	}
	return state, nil
}

func nameOf(o unstructured.Unstructured, gk schema.GroupKind) string {
	name := o.GetName()
	if gk.Kind == "PersistentVolume" {
		if claim, ok, _ := unstructured.NestedString(o.Object, "spec", "claimRef", "name"); ok {
			ns, _, _ := unstructured.NestedString(o.Object, "spec", "claimRef", "namespace")
			name = "of " + ns + "/" + claim
		}
	}
	if ns := o.GetNamespace(); ns != "" {
		name = ns + "/" + name
	}
	return gk.String() + " " + name
}

func revision(o unstructured.Unstructured) int {
	n, err := strconv.Atoi(o.GetLabels()["version"])
	if err != nil {
		return -1
	}
	return n
}

func zero(o unstructured.Unstructured) bool {
	n, found, err := unstructured.NestedInt64(o.Object, "spec", "replicas")
	return err == nil && found && n == 0
}

// countPod counts pods by what they belong to and how they are.
func countPod(state State, o unstructured.Unstructured) {
	owner := "nobody/" + o.GetName()
	if refs := o.GetOwnerReferences(); len(refs) > 0 {
		owner = refs[0].Kind + "/" + refs[0].Name
	}
	phase, _, _ := unstructured.NestedString(o.Object, "status", "phase")
	if o.GetDeletionTimestamp() != nil {
		phase = "Terminating"
	}
	key := "Pods " + o.GetNamespace() + "/" + owner
	counts, ok := state[key].(map[string]any)
	if !ok {
		counts = map[string]any{}
		state[key] = counts
	}
	n, _ := counts[phase].(int)
	counts[phase] = n + 1
}

func normaliseOne(o unstructured.Unstructured, gk schema.GroupKind) (any, error) {
	content := o.DeepCopy().Object
	delete(content, "apiVersion")
	normaliseMeta(content)
	if status, ok := content["status"].(map[string]any); ok {
		content["status"] = normaliseStatus(status)
	}
	switch {
	case gk.Kind == "Secret":
		content["data"] = presence(content["data"])
	case gk.Kind == "ConfigMap" && o.GetNamespace() == systemSpace && o.GetName() == stateConfigMap:
		if err := normaliseJournal(content); err != nil {
			return nil, err
		}
	case gk.Kind == "ConfigMap" && (o.GetName() == "kube-root-ca.crt" || o.GetNamespace() == "kube-system"):
		content["data"] = presence(content["data"])
	case gk.Kind == "Lease":
		spec, _ := content["spec"].(map[string]any)
		_, held := spec["holderIdentity"]
		content["spec"] = map[string]any{"held": held}
	case gk.Kind == "PersistentVolume":
		if spec, ok := content["spec"].(map[string]any); ok {
			delete(spec, "local")
			delete(spec, "claimRef")
		}
		if meta, ok := content["metadata"].(map[string]any); ok {
			delete(meta, "name")
		}
	}
	strip(content)
	return content, nil
}

func normaliseMeta(content map[string]any) {
	meta, ok := content["metadata"].(map[string]any)
	if !ok {
		return
	}
	for _, k := range []string{"uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink", "ownerReferences"} {
		delete(meta, k)
	}
	annotations, ok := meta["annotations"].(map[string]any)
	if !ok {
		return
	}
	for _, k := range []string{"deployment.kubernetes.io/revision", "llmbox.dev/initialising-claim", "volume.kubernetes.io/selected-node",
		// What a rehearsal's actor last saw, and which of two that could got to
		// answer first.
		"llmbox.dev/simulated-inputs", "llmbox.dev/simulated-by",
		// A hash over values that are generated.
		"reconcile.external-secrets.io/data-hash"} {
		delete(annotations, k)
	}
	if len(annotations) == 0 {
		delete(meta, "annotations")
	}
}

// normaliseStatus keeps what says how an object is: its phase, its counts and
// the outcome of each condition.
func normaliseStatus(status map[string]any) map[string]any {
	out := map[string]any{}
	for _, k := range []string{"phase", "state", "replicas", "readyReplicas", "numberReady", "succeeded", "failed"} {
		if v, ok := status[k]; ok {
			out[k] = v
		}
	}
	conditions, ok := status["conditions"].([]any)
	if !ok {
		return out
	}
	for _, c := range conditions {
		if m, ok := c.(map[string]any); ok {
			out[fmt.Sprintf("condition %v", m["type"])] = m["status"]
		}
	}
	return out
}

// presence replaces each value by whether there is one.
func presence(data any) any {
	m, ok := data.(map[string]any)
	if !ok {
		return data
	}
	out := map[string]any{}
	for k, v := range m {
		out[k] = v != ""
	}
	return out
}

// normaliseJournal keeps what the journal says of the box and drops when.
func normaliseJournal(content map[string]any) error {
	data, ok := content["data"].(map[string]any)
	if !ok {
		return nil
	}
	raw, _ := data["state.json"].(string)
	var journal map[string]any
	if err := json.Unmarshal([]byte(raw), &journal); err != nil {
		return fmt.Errorf("reading the journal: %w", err)
	}
	delete(journal, "started")
	_, ended := journal["ended"]
	journal["ended"] = ended
	components, _ := journal["components"].(map[string]any)
	for _, c := range components {
		if m, ok := c.(map[string]any); ok {
			delete(m, "time")
			// As with the records of Helm: how many it took may differ.
			delete(m, "revision")
		}
	}
	data["state.json"] = journal
	return nil
}

// strip removes, at any depth, what names a moment, an identity or an address.
func strip(v any) {
	switch v := v.(type) {
	case map[string]any:
		for k, inner := range v {
			switch k {
			case "uid", "clusterIP", "clusterIPs", "nodePort", "healthCheckNodePort", "volumeName", "holderIdentity",
				"batch.kubernetes.io/controller-uid", "controller-uid", "pod-template-hash", "observedGeneration":
				delete(v, k)
				continue
			case "caBundle":
				v[k] = inner != ""
				continue
			}
			strip(inner)
		}
	case []any:
		for _, inner := range v {
			strip(inner)
		}
	}
}
