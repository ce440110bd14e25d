package node

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"

	"github.com/llmbox-dev/llmbox/test/lab/process"
	"github.com/llmbox-dev/llmbox/test/lab/programs"
)

// startHelmController starts the real one as a process of the node, for every
// namespace and with the rights and the name that it has within k3s' server. It brings
// its CRDs in itself. The API server must be up.
func (c config) startHelmController(group *process.Group, set programs.Set) error {
	return c.start(group, "helm-controller", set.Path("helm-controller"),
		"--kubeconfig=/lab/config/helm-controller.kubeconfig", "--namespace=", "--controller-name=helm-controller",
		"--node-name="+nodeName, "--job-cluster-role=cluster-admin")
}

// untilHelmControllerLeads waits until it works: its CRDs come before its Lease.
func (c config) untilHelmControllerLeads(ctx context.Context, group *process.Group, admin *rest.Config) error {
	client, err := coordinationv1client.NewForConfig(admin)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	return c.until(ctx, group, "helm-controller", func(ctx context.Context) error {
		lease, err := client.Leases("kube-system").Get(ctx, "helm-controller-lock", metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("looking for its Lease: %w", err)
		}
		if lease.Spec.RenewTime == nil {
			return errors.New("nobody holds its Lease")
		}
		return nil
	})
}
