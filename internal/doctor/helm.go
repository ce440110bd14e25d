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

func helmChecks() []Check {
	below := append(append(nodeRoots(), networkRoots()...), "operator.webhook.blocking", "operator.webhook.certificate", "operator.policy_denied", "image.pull.*", "helm.crd.annotation_limit")
	below = slices.Clip(below)
	return append([]Check{
		{
			ID: "helm.release.pending", Layer: LayerHelm, Title: "Release stuck half-way", Reads: "labels of the release Secrets, jobs of the helm-controller, age", Rule: "no release pending without somebody at work on it",
			Source: "k3s-io/k3s#9534; fluxcd/helm-controller#149; longhorn/longhorn#9506", Judge: judgePending, Repair: "helm.pending",
			Fix: "sudo llmbox install (it takes the release up again)", Causes: below,
		},
		{
			ID: "helm.release.failed", Layer: LayerOperator, Title: "Release that failed", Reads: "labels of the release Secrets, HelmCharts, their jobs and logs", Rule: "the newest revision of each release deployed",
			Source: "k3s-io/helm-controller#90; helm.sh/docs, release states", Judge: judgeReleases, Fix: "sudo llmbox install (it applies what failed again)",
			Causes: append(below, "helm.release.pending", "operator.crd_missing", "model.rollout_deadlock", "storage.pvc_pending", "pod.unschedulable"),
		},
	}, rows(
		saying{
			check: Check{
				ID: "helm.crd.annotation_limit", Layer: LayerHelm, Title: "CRD too large for client-side apply", Rule: "CRDs applied by the server", Reads: "logs of Helm's jobs, events",
				Source: "prometheus-community/helm-charts#1500, #4756", Fix: "Apply it by the server: kubectl apply --server-side --force-conflicts -f FILE. llmbox does so: sudo llmbox install",
			},
			ways: []way{{hint: "metadata.annotations: Too long", pattern: regexp.MustCompile(`(?:CustomResourceDefinition(?:\.apiextensions\.k8s\.io)? "([^"]+)"[^\n]*)?metadata\.annotations: Too long: (?:must have at most|may not be more than) (\d+)`), judge: func(_ *facts, _ text, m []string) answer {
				return answer{measured: cmp.Or(m[1], "a CRD") + " has more than " + m[2] + " bytes of annotations"}
			}}},
		},
		saying{
			check: Check{
				ID: "helm.name_in_use", Layer: LayerHelm, Title: "Name of a release that is in use", Rule: "one release of a name", Reads: "logs of Helm's jobs",
				Source: "helm/helm pkg/action/install.go; k3s-io/klipper-helm#87", Fix: "See it: helm list -A --all. sudo llmbox install takes up what is its own", Causes: []string{"helm.release.pending"},
			},
			ways: []way{
				{hint: "cannot re-use a name that is still in use"},
				{hint: "another operation (install/upgrade/rollback) is in progress", judge: func(*facts, text, []string) answer {
					return answer{id: "helm.release.pending", measured: "Helm says that another operation is in progress"}
				}},
				{hint: "exists and cannot be imported into the current release", judge: func(*facts, text, []string) answer { return answer{} }},
			},
		},
	)...)
}

// release is one revision of a release, by the labels of its Secret.
type release struct {
	namespace, name, status string
	revision                int
	modified                time.Time
}

// releases are the newest revisions, by namespace/name.
func (f *facts) releases() map[string]release {
	list, _ := f.objects("secrets")
	out := map[string]release{}
	for _, s := range list {
		labels := s.GetLabels()
		if labels["owner"] != "helm" || !strings.HasPrefix(s.GetName(), "sh.helm.release.v1.") {
			continue
		}
		name := labels["name"]
		revision, err := strconv.Atoi(labels["version"])
		if err != nil {
			if i := strings.LastIndex(s.GetName(), ".v"); i > 0 {
				if n, err := strconv.Atoi(s.GetName()[i+2:]); err == nil {
					revision = n
				}
			}
		}
		r := release{s.GetNamespace(), cmp.Or(name, strings.TrimPrefix(s.GetName(), "sh.helm.release.v1.")), labels["status"], revision, s.GetCreationTimestamp().Time}
		if at, err := strconv.ParseInt(cmp.Or(labels["modifiedAt"], labels["createdAt"]), 10, 64); err == nil {
			r.modified = time.Unix(at, 0)
		}
		if old, known := out[r.namespace+"/"+r.name]; !known || old.revision < r.revision {
			out[r.namespace+"/"+r.name] = r
		}
	}
	return out
}

// atWork says whether a job of the helm-controller, or a run of llmbox, is at it now.
func (f *facts) atWork(r release) bool {
	for _, j := range f.jobs {
		if strings.HasSuffix(j.Name, "-"+r.name) && strings.HasPrefix(j.Name, "helm-") && j.Status.Active > 0 {
			// A job that is only retrying a failure is nobody at work.
			for i := range f.pods {
				p := &f.pods[i]
				if p.Labels["job-name"] == j.Name && restarts(p) > 1 {
					return false
				}
			}
			return true
		}
	}
	leases, _ := f.objects("leases")
	for _, l := range leases {
		if l.GetName() != "llmbox-run" || nested(l, "spec", "holderIdentity") == "" {
			continue
		}
		renewed, err := time.Parse(time.RFC3339Nano, nested(l, "spec", "renewTime"))
		if err == nil && !f.now().IsZero() && f.now().Sub(renewed) < 30*time.Second {
			return true
		}
	}
	return false
}

func judgePending(f *facts) []finding.Finding {
	const patience = 2 * time.Minute
	var stuck []string
	var evidence []finding.Evidence
	var first release
	for _, key := range sortedKeys(f.releases()) {
		r := f.releases()[key]
		if !strings.HasPrefix(r.status, "pending-") && r.status != "uninstalling" {
			continue
		}
		if f.atWork(r) || !f.now().IsZero() && !r.modified.IsZero() && f.now().Sub(r.modified) < patience {
			continue
		}
		since := ""
		if !r.modified.IsZero() {
			since = " since " + r.modified.UTC().Format("15:04")
		}
		if len(stuck) == 0 {
			first = r
		}
		stuck = append(stuck, fmt.Sprintf("%s revision %d %s%s", r.name, r.revision, r.status, since))
		evidence = append(evidence, at("secrets", r.namespace+"/sh.helm.release.v1."+r.name+".v"+strconv.Itoa(r.revision), "status="+r.status))
	}
	if len(stuck) == 0 {
		return nil
	}
	fix := fmt.Sprintf("kubectl -n %s delete secret sh.helm.release.v1.%s.v%d (that revision only). Then: sudo llmbox install", first.namespace, first.name, first.revision)
	return fail(some(3, stuck)+"; nobody is at work on it", fix, evidence...)
}

func judgeReleases(f *facts) []finding.Finding {
	var broken []string
	var evidence []finding.Evidence
	good := 0
	for _, key := range sortedKeys(f.releases()) {
		switch r := f.releases()[key]; r.status {
		case "failed":
			broken = append(broken, fmt.Sprintf("%s revision %d failed", r.name, r.revision))
			evidence = append(evidence, at("secrets", key, "status=failed"))
		case "deployed", "superseded":
			good++
		}
	}
	charts, _ := f.objects("helmcharts")
	for _, c := range charts {
		for _, cond := range nestedList(c.Object, "status", "conditions") {
			if str(cond, "type") == "Failed" && str(cond, "status") == "True" {
				broken = append(broken, c.GetName()+": "+oneLine(cmp.Or(str(cond, "message"), str(cond, "reason"))))
				evidence = append(evidence, at("helmcharts", fullName(c), str(cond, "message")))
			}
		}
	}
	// A job of the helm-controller that can't get through: its last words are the reason.
	for i := range f.pods {
		p := &f.pods[i]
		if !strings.HasPrefix(p.Name, "helm-install-") && !strings.HasPrefix(p.Name, "helm-upgrade-") || ready(p) || !failing(p) {
			continue
		}
		if f.jobDone(p) || f.released(p) {
			// Leftovers of a try before the one that worked.
			f.explain(podKey(p), "")
			continue
		}
		said := f.lastWords(p)
		broken = append(broken, p.Name+": "+cmp.Or(said, reason(p)))
		evidence = append(evidence, at("pods", podKey(p), said))
		// The release speaks for its pod.
		f.explain(podKey(p), "")
	}
	switch {
	case len(broken) > 0:
		return fail(some(3, broken), "", evidence[:min(3, len(evidence))]...)
	case good > 0:
		return well(count(good, "release") + " deployed")
	}
	return nil
}

// jobDone says whether the job of a pod has ended well.
func (f *facts) jobDone(p *corev1.Pod) bool {
	return slices.ContainsFunc(f.jobs, func(j job) bool {
		return j.Namespace == p.Namespace && j.Name == p.Labels["job-name"] && j.Status.Succeeded > 0
	})
}

// released says whether the release that a job's pod was for is deployed by now.
func (f *facts) released(p *corev1.Pod) bool {
	for _, r := range f.releases() {
		if r.status == "deployed" && (p.Labels["job-name"] == "helm-install-"+r.name || strings.HasPrefix(p.Name, "helm-install-"+r.name+"-")) {
			return true
		}
	}
	return false
}

// lastWords is the last line of a pod's log that tells of an error.
func (f *facts) lastWords(p *corev1.Pod) string {
	for _, t := range f.texts {
		if t.kind != "log" || t.namespace != p.Namespace || t.pod != p.Name {
			continue
		}
		lines := strings.Split(strings.TrimSpace(t.data), "\n")
		for i := len(lines) - 1; i >= 0 && i > len(lines)-20; i-- {
			if lower := strings.ToLower(lines[i]); strings.Contains(lower, "error") || strings.Contains(lower, "fatal") || strings.Contains(lower, "failed") {
				return oneLine(lines[i])
			}
		}
	}
	return ""
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
