package repair

import (
	"fmt"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// The repairs of a box that is there. Which objects they change stands in the findings'
// evidence: the place in the cluster that a judgement rests on.

// object is an object that a finding's evidence names.
type object struct{ namespace, name string }

// objects are those of one kind in the evidence of findings.
func objects(found []finding.Finding, kind string) []object {
	var out []object
	for _, f := range found {
		for _, e := range f.Evidence {
			if e.File != "cluster/"+kind+".json" || e.Field == "" {
				continue
			}
			namespace, name, both := strings.Cut(e.Field, "/")
			if !both {
				namespace, name = "", e.Field
			}
			if o := (object{namespace, name}); !slices.Contains(out, o) {
				out = append(out, o)
			}
		}
	}
	return out
}

func planStart(p *planner, found []finding.Finding) {
	for _, unit := range []string{"k3s", "k3s-agent"} {
		u, state := p.facts.Unit(unit + ".service")
		if state != snapshot.Present || u.Active == "active" {
			continue
		}
		if u.Load == "masked" || u.File == "masked" {
			p.decline(found, unit+" is masked: somebody switched it off on purpose")
			return
		}
		p.add(Action{
			Name: StartK3s, Title: "Start " + unit, Safe: "it is what runs the box; what keeps it from starting is said by its log",
			Steps: []Step{run(180, "systemctl", "start", unit)}, Undo: []string{"sudo systemctl stop " + unit}, Always: true,
			Verify: []Check{{What: unit + " runs", Run: []string{"systemctl", "is-active", unit}, Says: []string{"active"}, WithinSeconds: 90}},
		}, found)
		return
	}
	var service snapshot.Service
	if state, _ := p.facts.Probe(snapshot.ProbeService, &service); state == snapshot.Present && service.Init == "supervised" {
		p.decline(found, "llmbox itself keeps k3s running on this machine; sudo llmbox install starts what does so")
		return
	}
	p.decline(found, "there is no unit of k3s that does not run")
}

func planPrune(p *planner, found []finding.Finding) {
	if p.firstExisting("/usr/local/bin/k3s", "/usr/bin/k3s", "/opt/bin/k3s") == "" {
		p.decline(found, "k3s, whose crictl removes images, is not on this machine")
		return
	}
	p.add(Action{
		Name: PruneImages, Title: "Remove container images that no container uses",
		Safe:  "what is used stays; what is used again is pulled again; models, volumes and logs are not touched",
		Steps: []Step{run(600, "k3s", "crictl", "rmi", "--prune")}, Undo: []string{"not needed"}, Always: true,
		Verify: []Check{{What: "crictl answers", Run: []string{"k3s", "crictl", "info"}}},
	}, found)
}

func planUncordon(p *planner, found []finding.Finding) {
	a := Action{Name: Uncordon, Title: "Take the cordon off the node", Safe: "pods may run there again, as before the cordon"}
	for _, n := range objects(found, "nodes") {
		a.Steps = append(a.Steps, Step{Kube: &Kube{Verb: PatchObject, Resource: "v1/nodes", Name: n.name, Patch: `{"spec":{"unschedulable":null}}`}})
		a.Undo = append(a.Undo, "kubectl cordon "+n.name)
		a.Verify = append(a.Verify, Check{What: n.name + " takes pods", Kube: &KubeCheck{Resource: "v1/nodes", Name: n.name, Field: "spec.unschedulable"}})
	}
	// A taint that somebody set has a reason that is not known here.
	if len(a.Steps) == 0 || slices.ContainsFunc(found, func(f finding.Finding) bool { return !strings.Contains(f.Measured, "is cordoned") }) {
		p.decline(found, "the taint was set by somebody; the command in the finding takes it off")
		return
	}
	p.add(a, found)
}

func planPending(p *planner, found []finding.Finding) {
	a := Action{
		Name: PendingRelease, Title: "Free releases that an interrupted run left half-way",
		Safe: "only the record of that one revision goes; what it applied stays, and llmbox install takes it up",
		Undo: []string{"not needed: sudo llmbox install writes a new revision"},
	}
	for _, s := range objects(found, "secrets") {
		if !strings.HasPrefix(s.name, "sh.helm.release.v1.") {
			continue
		}
		a.Steps = append(a.Steps, Step{Kube: &Kube{Verb: DeleteObject, Resource: "v1/secrets", Namespace: s.namespace, Name: s.name}})
		a.Verify = append(a.Verify, Check{What: s.name + " is gone", Kube: &KubeCheck{Resource: "v1/secrets", Namespace: s.namespace, Name: s.name, Absent: true}})
	}
	if len(a.Steps) == 0 {
		p.decline(found, "which release it is could not be seen")
		return
	}
	p.add(a, found)
}

// fresh makes new pods of a workload, of at least one replica.
func fresh(kind, namespace, name string, scale bool) ([]Step, Check) {
	resource := "apps/v1/" + kind
	var steps []Step
	if scale {
		steps = append(steps, Step{
			Unless: &Check{What: name + " is asked for", Kube: &KubeCheck{Resource: resource, Namespace: namespace, Name: name, Field: "spec.replicas", Value: "1"}},
			Kube:   &Kube{Verb: PatchObject, Resource: resource, Namespace: namespace, Name: name, Patch: `{"spec":{"replicas":1}}`},
		})
	}
	steps = append(steps, Step{Kube: &Kube{Verb: RestartObject, Resource: resource, Namespace: namespace, Name: name}})
	return steps, Check{
		What: fmt.Sprintf("%s/%s is ready", namespace, name), Kube: &KubeCheck{Resource: resource, Namespace: namespace, Name: name, Ready: true}, WithinSeconds: 120,
	}
}

func (p *planner) restart(found []finding.Finding, a Action, kind, namespace, name string, scale bool) {
	steps, check := fresh(kind, namespace, name, scale)
	a.Steps, a.Verify, a.Undo, a.Always = steps, []Check{check}, []string{"not needed"}, true
	p.add(a, found)
}

func planUnseal(p *planner, found []finding.Finding) {
	if slices.ContainsFunc(found, func(f finding.Finding) bool {
		return f.ID == "secrets.vault_uninitialised" || f.ID == "secrets.vault_down"
	}) {
		p.decline(found, "Vault has no seal to open: it is not set up, or does not run")
		return
	}
	if !p.knows("deployments", "vault", "vault-unsealer") {
		p.decline(found, "this Vault has no unsealer of the box; whoever has its keys opens it: vault operator unseal")
		return
	}
	a := Action{Name: Unseal, Title: "Bring the unsealer of Vault back, which opens it", Safe: "it is the box's own unsealer with the key that it always had; nobody sees the key"}
	steps, check := fresh("deployments", "vault", "vault-unsealer", true)
	a.Steps, a.Undo, a.Always = steps, []string{"not needed"}, true
	a.Verify = []Check{check, {What: "Vault is open", Kube: &KubeCheck{Resource: "apps/v1/statefulsets", Namespace: "vault", Name: "vault", Ready: true}, WithinSeconds: 120}}
	p.add(a, found)
}

// knows says whether the facts name an object; a cluster that could not be read names
// none.
func (p *planner) knows(kind, namespace, name string) bool {
	var items []struct {
		Metadata struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
		} `json:"metadata"`
	}
	if state, _ := p.facts.Cluster(kind, &items); state != snapshot.Present {
		return false
	}
	for _, i := range items {
		if i.Metadata.Namespace == namespace && i.Metadata.Name == name {
			return true
		}
	}
	return false
}

func planDNS(p *planner, found []finding.Finding) {
	if slices.ContainsFunc(found, func(f finding.Finding) bool { return f.ID == "net.dns.config" }) || !p.knows("deployments", "kube-system", "coredns") {
		p.decline(found, "CoreDNS's own settings are wrong or its Deployment is gone; a restart would not help")
		return
	}
	p.restart(found, Action{Name: RestartDNS, Title: "Bring CoreDNS back", Safe: "it keeps nothing; names can't be resolved meanwhile, as now"}, "deployments", "kube-system", "coredns", true)
}

func planPlugin(p *planner, found []finding.Finding) {
	if !p.knows("daemonsets", "gpu-operator", "nvidia-device-plugin-daemonset") {
		p.decline(found, "there is no device plugin to restart; sudo llmbox install brings it back")
		return
	}
	p.restart(found, Action{Name: RestartPlugin, Title: "Start the device plugin anew, so that it counts the GPUs again", Safe: "containers that have a GPU keep it"}, "daemonsets", "gpu-operator", "nvidia-device-plugin-daemonset", false)
}

func planWebhook(p *planner, found []finding.Finding) {
	var deployments []struct {
		Metadata struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
		} `json:"metadata"`
		Spec struct {
			Replicas *int64 `json:"replicas"`
		} `json:"spec"`
	}
	if state, _ := p.facts.Cluster("deployments", &deployments); state != snapshot.Present {
		p.decline(found, "what is behind the webhook could not be seen")
		return
	}
	a := Action{
		Name: RestartWebhook, Title: "Bring back who answers for the admission webhook", Safe: "the webhook stays and refuses until its pods answer, as now", Undo: []string{"not needed"}, Always: true,
	}
	seen := map[string]bool{}
	for _, f := range found {
		for _, e := range f.Evidence {
			// "… 0 endpoints of NAMESPACE/SERVICE"
			_, service, ok := strings.Cut(e.Line, "0 endpoints of ")
			namespace, _, both := strings.Cut(service, "/")
			if !ok || !both || seen[namespace] {
				continue
			}
			seen[namespace] = true
			for _, d := range deployments {
				if d.Metadata.Namespace != namespace || d.Spec.Replicas != nil && *d.Spec.Replicas > 1 {
					continue
				}
				steps, check := fresh("deployments", namespace, d.Metadata.Name, true)
				a.Steps, a.Verify = append(a.Steps, steps...), append(a.Verify, check)
			}
		}
	}
	if len(a.Steps) == 0 {
		p.decline(found, "there is no Deployment behind the webhook; if its operator is gone for good, the command in the finding removes the webhook")
		return
	}
	p.add(a, found)
}

func planDeletePod(p *planner, found []finding.Finding) {
	a := Action{Name: DeletePod, Title: "Make a new pod in place of the one that lost its GPU", Safe: "its owner makes another at once; what it was answering ends, as it does now", Undo: []string{"not needed"}}
	for _, f := range found {
		for _, e := range f.Evidence {
			namespace, name, both := strings.Cut(e.Field, "/")
			if e.File != "probes/"+snapshot.ProbePodDevices+".json" || !both {
				continue
			}
			a.Steps = append(a.Steps, Step{Kube: &Kube{Verb: DeleteObject, Resource: "v1/pods", Namespace: namespace, Name: name}})
			a.Verify = append(a.Verify, Check{What: name + " is gone", Kube: &KubeCheck{Resource: "v1/pods", Namespace: namespace, Name: name, Absent: true}, WithinSeconds: 120})
		}
	}
	if len(a.Steps) == 0 {
		p.decline(found, "which pod it is could not be seen")
		return
	}
	p.add(a, found)
}

func planModel(p *planner, found []finding.Finding) {
	kind := "deployments"
	if !p.knows(kind, "llm", "model-server") {
		if kind = "statefulsets"; !p.knows(kind, "llm", "model-server") {
			p.decline(found, "the model server is not one of llmbox's")
			return
		}
	}
	a := Action{Name: RestartModel, Title: "Start the model server anew", Safe: "its engine answers nobody; loading takes as long as at the first start"}
	steps, check := fresh(kind, "llm", "model-server", false)
	check.WithinSeconds = 1800
	a.Steps, a.Verify, a.Undo, a.Always = steps, []Check{check}, []string{"not needed"}, true
	p.add(a, found)
}

func planStale(p *planner, found []finding.Finding) {
	var pods []struct {
		Metadata struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
			Owners    []any  `json:"ownerReferences"`
		} `json:"metadata"`
		Status struct {
			Phase  string `json:"phase"`
			Reason string `json:"reason"`
		} `json:"status"`
	}
	if state, _ := p.facts.Cluster("pods", &pods); state != snapshot.Present {
		p.decline(found, "the pods could not be seen")
		return
	}
	a := Action{Name: StalePods, Title: "Delete failed pods that others have replaced", Safe: "they run no more, and only those that the kubelet refused or evicted", Undo: []string{"not needed"}}
	const most = 500
	for _, pod := range pods {
		// Failed pods of Jobs are their history, and what nobody owns is somebody's own.
		refused := slices.Contains([]string{"UnexpectedAdmissionError", "Evicted", "OutOfnvidia.com/gpu", "NodeShutdown", "NodeAffinity", "OutOfcpu", "OutOfmemory"}, pod.Status.Reason)
		if pod.Status.Phase != "Failed" || !refused || len(a.Steps) >= most {
			continue
		}
		a.Steps = append(a.Steps, Step{Kube: &Kube{Verb: DeleteObject, Resource: "v1/pods", Namespace: pod.Metadata.Namespace, Name: pod.Metadata.Name}})
		a.Verify = append(a.Verify, Check{
			What: pod.Metadata.Name + " is gone", Kube: &KubeCheck{Resource: "v1/pods", Namespace: pod.Metadata.Namespace, Name: pod.Metadata.Name, Absent: true}, WithinSeconds: 30,
		})
	}
	if len(a.Steps) == 0 {
		p.decline(found, "none of them is one that may go")
		return
	}
	p.add(a, found)
}
