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

// ClusterFacts is what an existing cluster shows about itself.
type ClusterFacts struct {
	Version string
	// Denied lists the things these credentials may not do, as "verb resource".
	Denied []string
	// DefaultStorageClass is empty when there is none.
	DefaultStorageClass string
	ReadyNodes          int
	Nodes               int
	// Unreadable maps a fact to why it could not be read.
	Unreadable map[string]error
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
		for _, cond := range nodes.Items[i].Status.Conditions {
			if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue {
				facts.ReadyNodes++
			}
		}
	}
	return facts
}

// JudgeCluster turns the facts into findings, one per check.
func JudgeCluster(f ClusterFacts) []finding.Finding {
	return []finding.Finding{judgeVersion(f), judgeRights(f), judgeNodes(f), judgeStorage(f)}
}

func judgeVersion(f ClusterFacts) finding.Finding {
	out := finding.Finding{
		ID: "cluster.version", Title: "Kubernetes version", State: finding.Judged, Severity: finding.OK,
		Measured: f.Version, Required: OldestKubernetes + " or newer",
	}
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
	out := finding.Finding{
		ID: "cluster.rights", Title: "Rights of these credentials", State: finding.Judged, Severity: finding.OK,
		Strict: true, Measured: "everything an install needs", Required: "create namespaces, CRDs, cluster roles, webhooks, API services and Secrets",
	}
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
	out := finding.Finding{
		ID: "cluster.nodes", Title: "Nodes", State: finding.Judged, Severity: finding.OK,
		Measured: fmt.Sprintf("%d of %d ready", f.ReadyNodes, f.Nodes), Required: "at least one ready node",
	}
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
	out := finding.Finding{
		ID: "cluster.storage", Title: "Default StorageClass", State: finding.Judged, Severity: finding.OK,
		Measured: f.DefaultStorageClass, Required: "one default StorageClass",
	}
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
