package preflight

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/finding"
)

// clusterCheck is the fixed part of a check of an existing cluster.
type clusterCheck struct {
	id, title, required, source string
	worst                       finding.Severity
	strict                      bool
}

// clusterRows are the checks of an existing cluster.
func clusterRows() []clusterCheck {
	return []clusterCheck{
		{id: "cluster.version", title: "Kubernetes version", required: OldestKubernetes + " or newer", worst: finding.Fail, strict: true,
			source: "kyverno/kyverno charts/kyverno/Chart.yaml"},
		{id: "cluster.rights", title: "Rights of these credentials", required: "create namespaces, CRDs, cluster roles, webhooks, API services and Secrets", worst: finding.Fail, strict: true,
			source: "kubernetes.io/docs/reference/access-authn-authz/rbac, privilege escalation prevention"},
		{id: "cluster.nodes", title: "Nodes", required: "at least one ready node", worst: finding.Fail,
			source: "kubernetes.io/docs/reference/node/node-status"},
		{id: "cluster.storage", title: "Default StorageClass", required: "one default StorageClass", worst: finding.Fail,
			source: "rancher/local-path-provisioner#219; kubernetes.io/docs/concepts/storage/storage-classes"},
		{id: "operator.webhook.blocking", title: "Admission webhooks without anybody behind them", required: "an endpoint behind each webhook that refuses when nobody answers", worst: finding.Fail,
			source: "kyverno/kyverno#2869, #7576, #11122"},
		{id: "cluster.crds", title: "Definitions that are here already", required: "none, or recent ones with the component set to external", worst: finding.Warn,
			source: "confidential-containers/cloud-api-adaptor#895; kubernetes-sigs/gateway-api, bundle-version annotation"},
		{id: "cluster.pod_security", title: "Pod security of the box's namespaces", required: "privileged for gpu-operator", worst: finding.Fail,
			source: "NVIDIA/gpu-operator#314; NVIDIA/k8s-device-plugin#763"},
		{id: "cluster.address", title: "Address of the gateway", required: "something that gives addresses to Services of type LoadBalancer", worst: finding.Warn,
			source: "envoyproxy/gateway#1654, #7395"},
		{id: "cluster.gpu", title: "GPUs of the cluster", required: "a node with an NVIDIA GPU", worst: finding.Warn,
			source: "NVIDIA/k8s-device-plugin#231; NVIDIA/gpu-operator#475"},
	}
}

// clusterRow is a finding that is well so far.
func clusterRow(id, measured string) finding.Finding {
	for _, r := range clusterRows() {
		if r.id == id {
			return finding.Finding{
				ID: id, Title: r.title, Required: r.required, Source: r.source, Strict: r.strict,
				State: finding.Judged, Severity: finding.OK, Measured: measured,
			}
		}
	}
	return finding.Finding{ID: id, State: finding.Judged, Severity: finding.OK, Measured: measured}
}

// The resource that the device plugin offers, and the labels by which node feature
// discovery and clouds mark a node with a GPU.
const gpuResource = "nvidia.com/gpu"

func gpuLabels() []string {
	return []string{"nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present", "cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator"}
}

func countGPUs(facts *ClusterFacts, node *corev1.Node) {
	quantity := node.Status.Allocatable[gpuResource]
	facts.GPUs += quantity.Value()
	marked := slices.ContainsFunc(gpuLabels(), func(l string) bool { return node.Labels[l] != "" && node.Labels[l] != "false" })
	if marked || quantity.Value() > 0 {
		facts.GPUNodes++
	}
}

// collectOthers reads what of others stands in the way. What can't be read is noted
// and stops nothing.
func (f *ClusterFacts) collectOthers(ctx context.Context, c *cluster.Client, nodes []corev1.Node) {
	namespaces, err := c.Kube.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
	if err != nil {
		f.Unreadable["namespaces"] = cluster.Classify(err)
		namespaces = &corev1.NamespaceList{}
	}
	ours := map[string]bool{}
	for i := range namespaces.Items {
		ns := &namespaces.Items[i]
		ours[ns.Name] = ns.Labels[cluster.ManagedByLabel] == cluster.ManagedByValue
		if level := ns.Labels["pod-security.kubernetes.io/enforce"]; ns.Name == "gpu-operator" && level != "" && level != "privileged" {
			f.Confined = append(f.Confined, ns.Name+": "+level)
		}
	}
	if f.Webhooks, err = deadWebhooks(ctx, c.Kube, ours); err != nil {
		f.Unreadable["webhooks"] = cluster.Classify(err)
	}
	if f.Balancer, err = balancer(ctx, c.Kube, nodes); err != nil {
		f.Unreadable["balancer"] = cluster.Classify(err)
	}
	if c.REST == nil {
		f.Unreadable["crds"] = cluster.ErrUnreachable
		return
	}
	client, err := metadata.NewForConfig(c.REST)
	if err == nil {
		f.Definitions, err = foreignDefinitions(ctx, client)
	}
	if err != nil {
		f.Unreadable["crds"] = cluster.Classify(err)
	}
}

// deadWebhooks returns the webhooks with failurePolicy Fail (the default) that look at
// pods or namespaces and whose Service has no ready endpoint.
func deadWebhooks(ctx context.Context, kube kubernetes.Interface, ours map[string]bool) ([]Webhook, error) {
	type hook struct {
		configuration string
		policy        *admissionv1.FailurePolicyType
		service       *admissionv1.ServiceReference
		rules         []admissionv1.RuleWithOperations
	}
	var hooks []hook
	validating, err := kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("listing validating webhooks: %w", err)
	}
	for _, configuration := range validating.Items {
		for _, w := range configuration.Webhooks {
			hooks = append(hooks, hook{configuration.Name, w.FailurePolicy, w.ClientConfig.Service, w.Rules})
		}
	}
	mutating, err := kube.AdmissionregistrationV1().MutatingWebhookConfigurations().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("listing mutating webhooks: %w", err)
	}
	for _, configuration := range mutating.Items {
		for _, w := range configuration.Webhooks {
			hooks = append(hooks, hook{configuration.Name, w.FailurePolicy, w.ClientConfig.Service, w.Rules})
		}
	}
	var dead []Webhook
	answered := map[string]bool{}
	for _, h := range hooks {
		if h.service == nil || h.policy != nil && *h.policy == admissionv1.Ignore || !touchesCore(h.rules) {
			continue
		}
		service := h.service.Namespace + "/" + h.service.Name
		alive, known := answered[service]
		if !known {
			slices, err := kube.DiscoveryV1().EndpointSlices(h.service.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=" + h.service.Name})
			if err != nil {
				return nil, fmt.Errorf("listing endpoints of %s: %w", service, err)
			}
			for _, slice := range slices.Items {
				for _, e := range slice.Endpoints {
					alive = alive || e.Conditions.Ready == nil || *e.Conditions.Ready
				}
			}
			answered[service] = alive
		}
		w := Webhook{Configuration: h.configuration, Service: service, Ours: ours[h.service.Namespace]}
		if !alive && !slices.Contains(dead, w) {
			dead = append(dead, w)
		}
	}
	return dead, nil
}

// touchesCore says whether a webhook stands in the way of pods, namespaces or
// everything.
func touchesCore(rules []admissionv1.RuleWithOperations) bool {
	for _, r := range rules {
		for _, resource := range r.Resources {
			if slices.Contains([]string{"*", "*/*", "pods", "namespaces", "services", "deployments", "configmaps", "secrets"}, resource) {
				return true
			}
		}
	}
	return false
}

// balancer looks for what gives addresses: an answer already given, k3s's own, a
// cloud's nodes, or one that people install.
func balancer(ctx context.Context, kube kubernetes.Interface, nodes []corev1.Node) (string, error) {
	services, err := kube.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("listing Services: %w", err)
	}
	for _, s := range services.Items {
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer && len(s.Status.LoadBalancer.Ingress) > 0 {
			return "whoever gave " + s.Namespace + "/" + s.Name + " its address", nil
		}
	}
	for _, n := range nodes {
		switch {
		case strings.Contains(n.Status.NodeInfo.KubeletVersion, "+k3s"), strings.Contains(n.Status.NodeInfo.KubeletVersion, "+rke2"):
			return "k3s's servicelb", nil
		case n.Spec.ProviderID != "" && !strings.HasPrefix(n.Spec.ProviderID, "kind:"):
			scheme, _, _ := strings.Cut(n.Spec.ProviderID, ":")
			return "the cloud (" + scheme + ")", nil
		}
	}
	sets, err := kube.AppsV1().DaemonSets("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("listing DaemonSets: %w", err)
	}
	for _, d := range sets.Items {
		for _, name := range []string{"speaker", "kube-vip", "cilium", "svclb"} {
			if strings.HasPrefix(d.Name, name) || strings.HasSuffix(d.Name, "-"+name) {
				return d.Namespace + "/" + d.Name, nil
			}
		}
	}
	return "", nil
}

// definitionGroups maps the API groups that llmbox brings to the component's name.
func definitionGroups() map[string]string {
	return map[string]string{
		"gateway.networking.k8s.io": "envoy-gateway", "gateway.envoyproxy.io": "envoy-gateway", "nvidia.com": "gpu-operator",
		"keda.sh": "keda", "kyverno.io": "kyverno", "policies.kyverno.io": "kyverno", "monitoring.coreos.com": "prometheus",
		"external-secrets.io": "external-secrets",
	}
}

// bundleVersion is the annotation by which Gateway API marks its definitions.
const bundleVersion = "gateway.networking.k8s.io/bundle-version"

func foreignDefinitions(ctx context.Context, client metadata.Interface) (map[string]string, error) {
	resource := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	list, err := client.Resource(resource).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("listing CRDs: %w", err)
	}
	found := map[string]string{}
	for i := range list.Items {
		item := &list.Items[i]
		_, group, _ := strings.Cut(item.Name, ".")
		if definitionGroups()[group] == "" || item.Labels[cluster.ManagedByLabel] == cluster.ManagedByValue || item.Labels[cluster.PartOfLabel] == cluster.ManagedByValue {
			continue
		}
		// k3s brings Gateway API along for its Traefik; the version tells.
		found[group] = item.Annotations[bundleVersion]
	}
	return found, nil
}

func judgeWebhooks(f ClusterFacts) finding.Finding {
	out := clusterRow("operator.webhook.blocking", "none is without")
	if err := f.Unreadable["webhooks"]; err != nil {
		return unreadableNote(out, err)
	}
	var foreign, own []string
	for _, w := range f.Webhooks {
		text := w.Configuration + " (" + w.Service + ")"
		out.Evidence = append(out.Evidence, finding.Evidence{Field: "webhooks", Line: text})
		if w.Ours {
			own = append(own, text)
		} else {
			foreign = append(foreign, text)
		}
	}
	switch {
	case len(foreign) > 0:
		out.Severity, out.Measured = finding.Fail, some(3, foreign)+": every new pod would be refused"
		first, _, _ := strings.Cut(foreign[0], " ")
		out.Fix = "Bring its Deployment up (kubectl get pods -A shows it), or take it away if nobody needs it: kubectl delete validatingwebhookconfiguration,mutatingwebhookconfiguration " + first
	case len(own) > 0:
		// The box's own are brought up by the install itself.
		out.Severity, out.State, out.Measured = finding.Info, finding.Wait, some(3, own)+" is being brought up"
	}
	return out
}

func judgeDefinitions(f ClusterFacts) finding.Finding {
	out := clusterRow("cluster.crds", "none of others")
	if err := f.Unreadable["crds"]; err != nil {
		return unreadableNote(out, err)
	}
	if len(f.Definitions) == 0 {
		return out
	}
	var groups, components, old []string
	for _, group := range slices.Sorted(maps.Keys(f.Definitions)) {
		v := f.Definitions[group]
		groups = append(groups, strings.TrimSpace(group+" "+v))
		if name := definitionGroups()[group]; !slices.Contains(components, name) {
			components = append(components, name)
		}
		if before, ok := older(v, gatewayAPI); group == "gateway.networking.k8s.io" && ok && before {
			old = append(old, group+" "+v)
		}
	}
	out.Evidence = []finding.Evidence{{Field: "customresourcedefinitions", Line: strings.Join(groups, ", ")}}
	out.Measured = some(4, groups) + "; llmbox leaves them as they are"
	out.Severity = finding.Info
	if len(old) > 0 {
		out.Severity = finding.Warn
		out.Measured = strings.Join(old, ", ") + " is older than " + gatewayAPI + ", which the gateway was built with; llmbox leaves it as it is"
		out.Fix = "Update it, if whoever installed it agrees: github.com/kubernetes-sigs/gateway-api/releases. Or use what is there: " + installSet("components.envoy-gateway.mode=external")
		return out
	}
	out.Fix = "Where the program behind them runs too: " + installSet("components."+components[0]+".mode=external")
	return out
}

func judgeConfined(f ClusterFacts) finding.Finding {
	out := clusterRow("cluster.pod_security", "nothing forbids what the GPU needs")
	if err := f.Unreadable["namespaces"]; err != nil {
		return unreadableNote(out, err)
	}
	if len(f.Confined) > 0 {
		out.Severity, out.Measured = finding.Fail, strings.Join(f.Confined, ", ")
		name, _, _ := strings.Cut(f.Confined[0], ":")
		out.Fix = "kubectl label --overwrite namespace " + name + " pod-security.kubernetes.io/enforce=privileged"
		out.Evidence = []finding.Evidence{{Field: "namespaces", Line: f.Confined[0]}}
	}
	return out
}

func judgeBalancer(f ClusterFacts) finding.Finding {
	out := clusterRow("cluster.address", f.Balancer)
	if err := f.Unreadable["balancer"]; err != nil {
		return unreadableNote(out, err)
	}
	if err := f.Unreadable["nodes"]; err != nil {
		return unreadableNote(out, err)
	}
	if f.Balancer == "" {
		out.Severity, out.Measured = finding.Warn, "nothing is known to give addresses: the gateway may wait for one for ever"
		out.Fix = "Install MetalLB or the cloud's controller, or reach the gateway by kubectl port-forward"
		out.Evidence = []finding.Evidence{{Field: "services", Line: "no LoadBalancer has an address"}}
	}
	return out
}

func judgeClusterGPU(f ClusterFacts) finding.Finding {
	out := clusterRow("cluster.gpu", fmt.Sprintf("%d can be given out on %s", f.GPUs, count(f.GPUNodes, "node")))
	if err := f.Unreadable["nodes"]; err != nil {
		return unreadableNote(out, err)
	}
	switch {
	case f.GPUs > 0:
	case f.GPUNodes > 0:
		out.Severity, out.Measured = finding.Info, count(f.GPUNodes, "node")+" with a GPU and no device plugin yet; llmbox brings it"
	case f.Nodes > 0:
		out.Severity, out.Measured = finding.Warn, "no node is known to have a GPU; only the driver's own discovery will tell"
		out.Fix = "Add a node with an NVIDIA GPU and its driver, if there is none: kubectl get nodes -L nvidia.com/gpu.present"
		out.Evidence = []finding.Evidence{{Field: "nodes", Line: "allocatable nvidia.com/gpu = 0"}}
	}
	return out
}

// unreadableNote says that a fact could not be had, which is no failure by itself.
func unreadableNote(f finding.Finding, err error) finding.Finding {
	f.State, f.Severity = finding.Unreadable, finding.Info
	f.Measured = "could not be read: " + strings.Join(strings.Fields(err.Error()), " ")
	return f
}
