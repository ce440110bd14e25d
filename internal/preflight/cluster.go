// Package preflight judges, before anything is touched, whether an install can
// end well. Its checks are pure functions over facts; collecting the facts is
// kept beside them and thin. It must not act on what it finds.
package preflight

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	goversion "github.com/hashicorp/go-version"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/finding"
)

// OldestKubernetes is the oldest minor that every chart accepts; Kyverno 1.19
// asks for the most (github.com/kyverno/kyverno charts/kyverno/Chart.yaml).
const OldestKubernetes = "1.30"

// ClusterTimeout bounds collecting what an existing cluster shows.
const ClusterTimeout = 30 * time.Second

// ClusterFacts is what an existing cluster shows about itself.
type ClusterFacts struct {
	Version string
	// Denied lists the things these credentials may not do, as "verb resource".
	Denied []string
	// DefaultStorageClass is empty when there is none.
	DefaultStorageClass string
	ReadyNodes          int
	Nodes               int
	// GPUs is the sum of nvidia.com/gpu that the nodes can give; GPUNodes the number
	// of nodes on which something found an NVIDIA device.
	GPUs     int64
	GPUNodes int
	// Balancer names what gives addresses to Services of type LoadBalancer, empty
	// where nothing is known to.
	Balancer string
	// Definitions are the CRDs of groups that llmbox brings too and that are not its
	// own, as group and version ("" where they carry none).
	Definitions map[string]string
	// Webhooks are the admission webhooks that refuse when nobody answers and whose
	// Service has no endpoint now.
	Webhooks []Webhook
	// Confined are the namespaces of the box in which pod security forbids what the
	// GPU needs, as "namespace: level".
	Confined []string
	// Unreadable maps a fact to why it could not be read.
	Unreadable map[string]error
}

// Webhook is an admission webhook without anybody behind it.
type Webhook struct {
	Configuration string
	Service       string
	// Ours says that its Service stands in a namespace of the box.
	Ours bool
}

// needed are the rights without which an install would stop half-way.
func needed() []authorizationv1.ResourceAttributes {
	return []authorizationv1.ResourceAttributes{
		{Verb: "create", Resource: "namespaces"},
		{Verb: "create", Group: "apiextensions.k8s.io", Resource: "customresourcedefinitions"},
		{Verb: "create", Group: "rbac.authorization.k8s.io", Resource: "clusterroles"},
		{Verb: "escalate", Group: "rbac.authorization.k8s.io", Resource: "clusterroles"},
		{Verb: "create", Group: "rbac.authorization.k8s.io", Resource: "clusterrolebindings"},
		{Verb: "create", Group: "scheduling.k8s.io", Resource: "priorityclasses"},
		{Verb: "create", Group: "apiregistration.k8s.io", Resource: "apiservices"},
		{Verb: "create", Group: "admissionregistration.k8s.io", Resource: "validatingwebhookconfigurations"},
		{Verb: "create", Resource: "secrets"},
	}
}

// CollectCluster asks an existing cluster for the facts, within timeout.
func CollectCluster(ctx context.Context, c *cluster.Client, timeout time.Duration) ClusterFacts {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	facts := ClusterFacts{Version: c.Version, Unreadable: map[string]error{}}
	for _, attr := range needed() {
		review := &authorizationv1.SelfSubjectAccessReview{
			Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &attr},
		}
		got, err := c.Kube.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			facts.Unreadable["rights"] = cluster.Classify(err)
			break
		}
		if !got.Status.Allowed {
			facts.Denied = append(facts.Denied, strings.TrimSuffix(attr.Verb+" "+attr.Resource+"."+attr.Group, "."))
		}
	}
	classes, err := c.Kube.StorageV1().StorageClasses().List(ctx, metav1.ListOptions{})
	if err != nil {
		facts.Unreadable["storage"] = cluster.Classify(err)
	} else {
		for i := range classes.Items {
			if classes.Items[i].Annotations["storageclass.kubernetes.io/is-default-class"] == "true" {
				facts.DefaultStorageClass = classes.Items[i].Name
			}
		}
	}
	nodes, err := c.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		facts.Unreadable["nodes"] = cluster.Classify(err)
		return facts
	}
	facts.Nodes = len(nodes.Items)
	for i := range nodes.Items {
		countGPUs(&facts, &nodes.Items[i])
		for _, cond := range nodes.Items[i].Status.Conditions {
			if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue {
				facts.ReadyNodes++
			}
		}
	}
	facts.collectOthers(ctx, c, nodes.Items)
	return facts
}

// JudgeCluster turns the facts into findings, one per check.
func JudgeCluster(f ClusterFacts) []finding.Finding {
	return Arrange([]finding.Finding{
		judgeVersion(f), judgeRights(f), judgeNodes(f), judgeStorage(f),
		judgeWebhooks(f), judgeDefinitions(f), judgeConfined(f), judgeBalancer(f), judgeClusterGPU(f),
	})
}

func judgeVersion(f ClusterFacts) finding.Finding {
	out := clusterRow("cluster.version", f.Version)
	have, err := goversion.NewVersion(f.Version)
	if err != nil {
		out.Severity, out.State = finding.Warn, finding.Unreadable
		out.Measured = fmt.Sprintf("%q: %v", f.Version, err)
		return out
	}
	oldest := goversion.Must(goversion.NewVersion(OldestKubernetes))
	// Pre-releases of a vendor ("-eks-…", "-gke.…") are that version, not one before it.
	if have.Core().LessThan(oldest) {
		out.Severity, out.Strict = finding.Fail, true
		out.Fix = "Upgrade the cluster, or let llmbox install k3s on a fresh machine: sudo llmbox install"
	}
	return out
}

func judgeRights(f ClusterFacts) finding.Finding {
	out := clusterRow("cluster.rights", "everything an install needs")
	if err := f.Unreadable["rights"]; err != nil {
		return unreadable(out, err)
	}
	if len(f.Denied) > 0 {
		out.Severity = finding.Fail
		out.Measured = "not allowed: " + strings.Join(f.Denied, ", ")
		out.Fix = "Use credentials bound to the ClusterRole cluster-admin (llmbox install --kubeconfig FILE --context NAME), or ask whoever runs the cluster for them"
	}
	return out
}

func judgeNodes(f ClusterFacts) finding.Finding {
	out := clusterRow("cluster.nodes", fmt.Sprintf("%d of %d ready", f.ReadyNodes, f.Nodes))
	if err := f.Unreadable["nodes"]; err != nil {
		return unreadable(out, err)
	}
	if f.ReadyNodes == 0 {
		out.Severity = finding.Fail
		out.Fix = "kubectl get nodes; kubectl describe node NAME shows why it is not ready"
	}
	return out
}

func judgeStorage(f ClusterFacts) finding.Finding {
	out := clusterRow("cluster.storage", f.DefaultStorageClass)
	if err := f.Unreadable["storage"]; err != nil {
		return unreadable(out, err)
	}
	if f.DefaultStorageClass == "" {
		out.Severity, out.Measured = finding.Fail, "none"
		out.Fix = `kubectl annotate storageclass NAME storageclass.kubernetes.io/is-default-class=true`
	}
	return out
}

func unreadable(f finding.Finding, err error) finding.Finding {
	f.State, f.Severity = finding.Unreadable, finding.Fail
	f.Measured = "could not be read: " + strings.Join(strings.Fields(err.Error()), " ")
	f.Fix = "llmbox install --kubeconfig FILE with credentials that may read this"
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, cluster.ErrUnreachable) {
		f.Fix = "Check that the API server answers: kubectl --request-timeout=10s get --raw /readyz"
	}
	return f
}
