package node

import (
	"github.com/llmbox-dev/llmbox/test/lab/controlplane"
	"github.com/llmbox-dev/llmbox/test/lab/process"
	"github.com/llmbox-dev/llmbox/test/lab/programs"
)

// startNetpol starts kube-router's network policy controller as a process of the node;
// k3s has it in its agent. Its rights are among the cluster's objects.
func (c config) startNetpol(group *process.Group, set programs.Set) error {
	return c.start(group, "kube-router-netpol", set.Path("kube-router-netpol"),
		"--kubeconfig=/lab/config/kube-router-netpol.kubeconfig", "--hostname-override="+nodeName,
		"--service-cluster-ip-range="+controlplane.ServiceCIDR, "--v=1")
}
