package doctor

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func volumeChecks() []Check {
	return append(rows(
		saying{
			check: Check{
				ID: "storage.full", Layer: LayerVolume, Title: "Volume without room", Rule: "room on the volume that a pod writes to", Source: "k3s-io/k3s#10209; kairos-io/kairos#2682",
				Fix: "See what takes it: sudo du -xh --max-depth=2 /var/lib | sort -h | tail. Models that nobody uses: sudo llmbox models prune", Causes: []string{"host.disk.full", "host.disk.pressure"}, Repair: "disk.images",
			},
			ways: []way{{hint: "No space left on device", judge: judgeNoSpace}, {hint: "no space left on device", judge: judgeNoSpace}, {hint: "Disk quota exceeded"}},
		},
		saying{
			check: Check{
				ID: "storage.readonly", Layer: LayerVolume, Title: "Volume that can't be written", Rule: "a volume that a pod can write to", Source: "linux ext4, errors=remount-ro",
				Fix: "See why: sudo dmesg | grep -i remount. Then: sudo mount -o remount,rw MOUNTPOINT", Causes: []string{"host.disk.errors", "host.readonly"},
			},
			ways:  []way{{hint: "Read-only file system"}, {hint: "read-only file system"}},
			where: func(_ *facts, t text) bool { return t.kind == "log" },
		},
		saying{
			check: Check{
				ID: "storage.mount", Layer: LayerImage, Title: "Volume that can't be mounted", Rule: "each volume of a pod mounted", Source: "kubernetes docs, debugging pods; rancher/local-path-provisioner#219",
				Reads: "events FailedMount", Fix: "kubectl -n NAMESPACE describe pod POD", Causes: []string{"storage.pvc_pending", "storage.pvc_lost", "node.name_changed", "secrets.missing", "host.disk.errors"},
			},
			ways: []way{
				{hint: "FailedMount: ", pattern: regexp.MustCompile(`FailedMount: (MountVolume\.\S+ failed for volume "[^"]+"\s*:?\s*[^\n]+|Unable to attach or mount volumes[^\n]+)`), judge: func(f *facts, t text, m []string) answer {
					if missing.MatchString(m[1]) || strings.Contains(m[1], "object \"") && strings.Contains(m[1], "not registered") || f.young1(t) {
						return answer{ignore: true}
					}
					return answer{measured: t.namespace + "/" + t.pod + ": " + oneLine(m[1])}
				}},
				{hint: "FailedAttachVolume: "},
			},
			kinds: []string{"event"},
		},
	), []Check{
		{
			ID: "storage.pvc_waiting", Also: []string{"storage.pvc_pending", "storage.pvc_lost"}, Layer: LayerVolume, Title: "Volume claims", Reads: "claims, binding mode of their class, pods that use them, the provisioner",
			Rule: "each claim bound, or waiting for its first user", Source: "rancher/local-path-provisioner#219; kubernetes docs, volume binding mode", Judge: judgeClaims, Fix: "kubectl -n NAMESPACE describe pvc NAME",
			Causes: append(nodeRoots(), "storage.no_class", "storage.provisioner", "node.name_changed", "node.cordoned", "net.service_route", "net.firewall"),
		},
		{
			ID: "storage.no_class", Layer: LayerVolume, Title: "Storage class", Reads: "StorageClasses, claims that name none", Rule: "a default class, or one of the name that the claim has",
			Source: "kubernetes docs, default StorageClass; k3s docs, local storage", Judge: judgeClasses, Causes: []string{"k3s.config"},
			Fix: `kubectl patch storageclass local-path -p '{"metadata":{"annotations":{"storageclass.kubernetes.io/is-default-class":"true"}}}'`,
		},
		{
			ID: "storage.provisioner", Layer: LayerVolume, Title: "Provisioner of volumes", Reads: "pods of local-path-provisioner", Rule: "ready", Source: "rancher/local-path-provisioner docs",
			Judge: judgeProvisioner, Fix: "kubectl -n kube-system rollout restart deploy/local-path-provisioner", Causes: append(append(nodeRoots(), networkRoots()...), "image.pull.*", "net.service_route"),
		},
	}...)
}

func (f *facts) young1(t text) bool {
	p := f.podsByKey[t.namespace+"/"+t.pod]
	return p != nil && f.young(p)
}

func judgeNoSpace(f *facts, t text, _ []string) answer {
	i := max(strings.LastIndex(t.data, "o space left on device"), 0)
	line := lineAround(t.data, i)
	if t.kind != "log" && (strings.Contains(line, "image") || strings.Contains(line, "layer")) || strings.Contains(line, "/dev/shm") || strings.Contains(line, "inotify") || t.kind == "k3s" || t.kind == "kernel" {
		return answer{ignore: true}
	}
	who := ""
	if t.pod != "" {
		who = t.namespace + "/" + t.pod + ": "
	}
	return answer{measured: who + oneLine(stripPrefix(line))}
}

func judgeClaims(f *facts) []finding.Finding {
	if !f.had["persistentvolumeclaims"] {
		return nil
	}
	waits := map[string]bool{}
	for _, c := range f.classes {
		waits[c.Name] = c.VolumeBindingMode != nil && *c.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
	}
	var waiting, out []string
	var evidence []finding.Evidence
	bound := 0
	for _, c := range f.claims {
		key := c.Namespace + "/" + c.Name
		switch c.Status.Phase {
		case corev1.ClaimBound:
			bound++
			continue
		case corev1.ClaimLost:
			return named("storage.pvc_lost", fail(key+" has lost its volume "+c.Spec.VolumeName, "Make the volume anew, or the claim: kubectl -n "+c.Namespace+" delete pvc "+c.Name+" (what was on it is gone), then: sudo llmbox install", at("persistentvolumeclaims", key, "Lost")))
		}
		users := f.usersOf(c.Namespace, c.Name)
		class := ""
		if c.Spec.StorageClassName != nil {
			class = *c.Spec.StorageClassName
		}
		deferred := waits[class] || class == "" && len(waits) == 1 && slices.Contains(valuesOf(waits), true) || f.saysWaiting(c.Namespace, c.Name)
		// A consumer that itself waits for another reason is what is wrong, not the claim.
		active := slices.ContainsFunc(users, func(p *corev1.Pod) bool { return p.Spec.NodeName != "" && !f.young(p) })
		if deferred && !active {
			waiting = append(waiting, key)
			continue
		}
		if !f.now().IsZero() && f.now().Sub(c.CreationTimestamp.Time) < youth {
			continue
		}
		out = append(out, key+": "+cmp.Or(f.newestEvent(c.Namespace, c.Name), "no volume and nothing says why"))
		evidence = append(evidence, at("persistentvolumeclaims", key, "Pending"))
		for _, p := range users {
			f.explain(podKey(p), "storage.pvc_pending")
		}
	}
	if len(out) > 0 {
		return named("storage.pvc_pending", fail(some(3, out), "", evidence...))
	}
	if len(waiting) > 0 {
		return well(some(3, waiting)+" waits for its first user, as its class says", at("persistentvolumeclaims", waiting[0], "WaitForFirstConsumer"))
	}
	if bound > 0 {
		return well(count(bound, "claim") + " bound")
	}
	return nil
}

func valuesOf(m map[string]bool) []bool {
	var out []bool
	for _, v := range m {
		out = append(out, v)
	}
	return out
}

func (f *facts) saysWaiting(namespace, claim string) bool {
	return slices.ContainsFunc(f.events, func(e corev1.Event) bool {
		return e.Reason == "WaitForFirstConsumer" && e.InvolvedObject.Name == claim && cmp.Or(e.InvolvedObject.Namespace, e.Namespace) == namespace
	})
}

// usersOf are the pods that mount a claim.
func (f *facts) usersOf(namespace, claim string) []*corev1.Pod {
	var out []*corev1.Pod
	for i := range f.pods {
		p := &f.pods[i]
		if p.Namespace == namespace && slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
			return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == claim
		}) {
			out = append(out, p)
		}
	}
	return out
}

func judgeClasses(f *facts) []finding.Finding {
	if !f.had["storageclasses"] {
		return nil
	}
	byDefault := slices.ContainsFunc(f.classes, func(c storagev1.StorageClass) bool {
		return c.Annotations["storageclass.kubernetes.io/is-default-class"] == "true"
	})
	for _, c := range f.claims {
		if c.Status.Phase != corev1.ClaimPending || c.Spec.VolumeName != "" {
			continue
		}
		key := c.Namespace + "/" + c.Name
		if c.Spec.StorageClassName == nil && !byDefault {
			return fail(key+" names no class and there is no default one", "", at("persistentvolumeclaims", key, "storageClassName"))
		}
		if name := c.Spec.StorageClassName; name != nil && *name != "" && !slices.ContainsFunc(f.classes, func(s storagev1.StorageClass) bool { return s.Name == *name }) {
			return fail(key+" names the class "+*name+", which is not there", "Name one that is there: kubectl get storageclass", at("persistentvolumeclaims", key, *name))
		}
	}
	if byDefault {
		return well("there is a default class")
	}
	return nil
}

func judgeProvisioner(f *facts) []finding.Finding {
	for i := range f.pods {
		p := &f.pods[i]
		if strings.HasPrefix(p.Name, "local-path-provisioner") && !ready(p) && !f.young(p) && failing(p) {
			f.explain(podKey(p), "storage.provisioner")
			return fail(p.Name+": "+reason(p), "", at("pods", podKey(p), reason(p)))
		}
	}
	return nil
}

var missing = regexp.MustCompile(`(?:secrets?|configmaps?) "([^"]+)" not found|couldn't find key (\S+) in (?:Secret|ConfigMap) (\S+)|references non-existent (?:secret|config) key: (\S+)`)

func secretChecks() []Check {
	return append(rows(
		saying{
			check: Check{
				ID: "secrets.missing", Layer: LayerSecret, Title: "Secret or ConfigMap that is not there", Rule: "each Secret and ConfigMap that a pod names", Source: "kubernetes docs, secrets",
				Reads: "events FailedMount and CreateContainerConfigError", Fix: "sudo llmbox install (it writes what the box needs)",
				Causes: []string{"secrets.vault_sealed", "secrets.vault_uninitialised", "secrets.store", "secrets.external", "helm.release.*"},
			},
			ways: []way{
				{hint: "not found", pattern: missing, judge: judgeMissing}, {hint: "couldn't find key", pattern: missing, judge: judgeMissing}, {hint: "references non-existent", pattern: missing, judge: judgeMissing},
			},
			kinds: []string{"event", "status"},
		},
	), []Check{
		{
			ID: "secrets.vault_sealed", Also: []string{"secrets.vault_uninitialised", "secrets.vault_down"}, Layer: LayerSecret, Title: "Vault", Reads: "Vault's own health, its pod and probe", Rule: "initialised and unsealed",
			Source: "hashicorp/vault-helm#17, #130; hashicorp/vault#17470", Judge: judgeVault, Repair: "vault.unseal",
			Fix:    "kubectl -n vault rollout restart deploy/vault-unsealer. By hand: kubectl -n vault exec -it vault-0 -- vault operator unseal",
			Causes: append(append(nodeRoots(), networkRoots()...), "image.pull.*", "storage.pvc_pending", "storage.full", "operator.webhook.blocking"),
		},
		{
			ID: "secrets.unsealer", Layer: LayerSecret, Title: "Unsealer of Vault", Reads: "Deployment vault-unsealer, Secret vault-unseal", Rule: "one unsealer with its key",
			Source: "hashicorp/vault-helm#130; llmbox embed/charts/vault", Judge: judgeUnsealer, Fix: "kubectl -n vault scale deploy/vault-unsealer --replicas=1",
			Causes: append(nodeRoots(), "image.pull.*"),
		},
		{
			ID: "secrets.store", Layer: LayerSecret, Title: "Store of secrets", Reads: "ClusterSecretStores and SecretStores", Rule: "Ready",
			Source: "external-secrets docs, ClusterSecretStore; hashicorp/vault-k8s#32", Judge: judgeStore, Fix: "kubectl describe clustersecretstore",
			Causes: []string{"secrets.vault_sealed", "secrets.vault_uninitialised", "secrets.vault_down", "net.service_route", "net.dns.*", "operator.webhook.blocking", "secrets.operator"},
		},
		{
			ID: "secrets.operator", Layer: LayerSecret, Title: "External Secrets", Reads: "pods of External Secrets", Rule: "ready", Source: "external-secrets docs",
			Judge: func(f *facts) []finding.Finding {
				return f.operatorPods("external-secrets", "external-secrets", "secrets.operator")
			}, Fix: "kubectl -n external-secrets rollout restart deploy",
			Causes: append(append(nodeRoots(), networkRoots()...), "image.pull.*", "operator.webhook.*", "net.service_route", "helm.release.*"),
		},
		{
			ID: "secrets.external", Layer: LayerSecret, Title: "Secrets that don't follow Vault", Reads: "ExternalSecrets", Rule: "Ready",
			Source: "external-secrets docs, ExternalSecret; ~kubefirst#1906", Judge: judgeExternal, Fix: "kubectl -n llm describe externalsecret",
			Causes: []string{"secrets.store", "secrets.vault_sealed", "secrets.vault_uninitialised", "secrets.vault_down", "secrets.operator", "operator.webhook.blocking"},
		},
		{
			ID: "secrets.injector", Layer: LayerSecret, Title: "Pods that started without Vault's injector", Reads: "annotations and containers of pods", Rule: "a vault-agent in each pod that asks for one",
			Source: "hashicorp/vault-k8s#32, #110", Judge: judgeInjector, Fix: "Delete the pod once the injector answers: kubectl -n vault get pods -l app.kubernetes.io/name=vault-agent-injector",
			Causes: []string{"operator.webhook.*"},
		},
	}...)
}

func judgeMissing(f *facts, t text, m []string) answer {
	name := cmp.Or(m[1], strings.Trim(m[3]+" ("+m[2]+")", " ()"), m[4])
	return answer{measured: t.namespace + "/" + t.pod + " wants " + name}
}

// vaultPods are the pods of Vault's server.
func (f *facts) vaultPods() []*corev1.Pod {
	var out []*corev1.Pod
	for i := range f.pods {
		p := &f.pods[i]
		if p.Namespace == "vault" && strings.HasPrefix(p.Name, "vault-") && (p.Labels["statefulset.kubernetes.io/pod-name"] != "" || len(p.Name) > 6 && p.Name[6] >= '0' && p.Name[6] <= '9') {
			out = append(out, p)
		}
	}
	return out
}

func judgeVault(f *facts) []finding.Finding {
	var v snapshot.VaultProbe
	state, _ := f.Probe(snapshot.ProbeVault, &v)
	pods := f.vaultPods()
	explain := func(id string) {
		for _, p := range pods {
			if !ready(p) {
				f.explain(podKey(p), id)
			}
		}
	}
	if state == snapshot.Present && v.Error == "" {
		evidence := atProbe(snapshot.ProbeVault, "sealed", fmt.Sprint(v.Sealed))
		switch {
		case !v.Initialized:
			explain("secrets.vault_uninitialised")
			return named("secrets.vault_uninitialised", fail("Vault is not initialised", "sudo llmbox install (it initialises Vault and keeps the key)", evidence))
		case v.Sealed:
			explain("secrets.vault_sealed")
			return fail("sealed, as Vault is after each restart until somebody unseals it"+f.unsealerSaid(), "", evidence)
		}
		return well("unsealed, "+v.Version, evidence)
	}
	// Its own readiness probe asks for the seal and says so in the event.
	for _, t := range f.texts {
		if t.namespace != "vault" && t.namespace != "" || t.kind != "event" && t.kind != "log" && t.kind != "command" {
			continue
		}
		sealed := sealedWords.MatchString(t.data) && strings.Contains(t.data, "Seal Type") || strings.Contains(t.data, `"sealed":true`) || strings.Contains(t.data, "Vault is sealed") || strings.Contains(t.data, "error: vault is sealed")
		if sealed && f.speaks(t) {
			explain("secrets.vault_sealed")
			return fail("sealed, as Vault is after each restart until somebody unseals it"+f.unsealerSaid(), "", t.evidence(t.data))
		}
		if strings.Contains(t.data, "security barrier not initialized") && f.speaks(t) {
			explain("secrets.vault_uninitialised")
			return named("secrets.vault_uninitialised", fail("Vault is not initialised", "sudo llmbox install (it initialises Vault and keeps the key)", t.evidence("security barrier not initialized")))
		}
	}
	if state == snapshot.Present && v.Error != "" && len(pods) > 0 && !slices.ContainsFunc(pods, ready) {
		for _, p := range pods {
			return named("secrets.vault_down", fail("Vault gives no answer: "+reason(p), "kubectl -n vault describe pod "+p.Name, at("pods", podKey(p), reason(p))))
		}
	}
	if state == snapshot.Absent && len(pods) > 0 && slices.ContainsFunc(pods, ready) {
		return well("its pod is ready, which an unsealed Vault is")
	}
	return nil
}

var sealedWords = regexp.MustCompile(`(?:^|\s)Sealed\s+true`)

func (f *facts) unsealerSaid() string {
	for _, d := range f.deployments {
		if d.Namespace == "vault" && d.Name == "vault-unsealer" && d.Spec.Replicas != nil && *d.Spec.Replicas == 0 {
			return "; the unsealer is scaled to 0"
		}
	}
	return ""
}

func judgeUnsealer(f *facts) []finding.Finding {
	for _, d := range f.deployments {
		if d.Namespace != "vault" || d.Name != "vault-unsealer" {
			continue
		}
		if d.Spec.Replicas != nil && *d.Spec.Replicas == 0 {
			return warn("scaled to 0: after the next restart Vault stays sealed", "", at("deployments", "vault/vault-unsealer", "replicas: 0"))
		}
		for i := range f.pods {
			p := &f.pods[i]
			if p.Namespace == "vault" && strings.HasPrefix(p.Name, "vault-unsealer-") && failing(p) && !ready(p) {
				f.explain(podKey(p), "secrets.unsealer")
				return warn(p.Name+": "+reason(p), "kubectl -n vault describe pod "+p.Name, at("pods", podKey(p), reason(p)))
			}
		}
		return well("at work")
	}
	return nil
}

func judgeStore(f *facts) []finding.Finding {
	good := 0
	for _, kind := range []string{"clustersecretstores", "secretstores"} {
		list, _ := f.objects(kind)
		for _, o := range list {
			c := conditionIn(nestedList(o.Object, "status", "conditions"), "Ready")
			if c.found && c.status != "True" && !f.settling(c) {
				return fail(fullName(o)+": "+c.String(), "kubectl describe "+strings.TrimSuffix(kind, "s")+" "+o.GetName(), at(kind, fullName(o), c.String()))
			}
			good++
		}
	}
	if good > 0 {
		return well(count(good, "store") + " ready")
	}
	return nil
}

func judgeExternal(f *facts) []finding.Finding {
	list, _ := f.objects("externalsecrets")
	var bad1 []string
	var evidence []finding.Evidence
	for _, o := range list {
		c := conditionIn(nestedList(o.Object, "status", "conditions"), "Ready")
		if c.found && c.status != "True" && !f.settling(c) {
			bad1 = append(bad1, fullName(o)+": "+c.String())
			evidence = append(evidence, at("externalsecrets", fullName(o), c.String()))
		}
	}
	switch {
	case len(bad1) > 0:
		// The Secret itself stays: what runs keeps on running.
		return warn(some(2, bad1)+". The Secrets that are there stay", "", evidence[:min(2, len(evidence))]...)
	case len(list) > 0:
		return well(count(len(list), "ExternalSecret") + " ready")
	}
	return nil
}

func judgeInjector(f *facts) []finding.Finding {
	for i := range f.pods {
		p := &f.pods[i]
		if p.Annotations["vault.hashicorp.com/agent-inject"] != "true" || p.Annotations["vault.hashicorp.com/agent-inject-status"] == "injected" {
			continue
		}
		if !slices.ContainsFunc(containers(p), func(c corev1.Container) bool { return strings.HasPrefix(c.Name, "vault-agent") }) {
			return fail(podKey(p)+" asks for the injector and has no vault-agent: it was let through without its secrets", "", at("pods", podKey(p), "vault.hashicorp.com/agent-inject: true"))
		}
	}
	return nil
}

// operatorPods judges the pods of an operator whose own failure explains others.
func (f *facts) operatorPods(namespace, prefix, id string) []finding.Finding {
	up := 0
	for i := range f.pods {
		p := &f.pods[i]
		if p.Namespace != namespace || !strings.HasPrefix(p.Name, prefix) {
			continue
		}
		if ready(p) {
			up++
			continue
		}
		if failing(p) && !f.young(p) {
			f.explain(podKey(p), id)
			return fail(p.Name+": "+reason(p), "", at("pods", podKey(p), reason(p)))
		}
	}
	if up > 0 {
		return well(count(up, "pod") + " ready")
	}
	if f.scaledToNothing(namespace, prefix) {
		return fail(namespace+"/"+prefix+" is scaled to 0", "kubectl -n "+namespace+" scale deploy/"+prefix+" --replicas=1", at("deployments", namespace+"/"+prefix, "replicas: 0"))
	}
	return nil
}
