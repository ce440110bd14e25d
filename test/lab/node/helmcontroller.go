package node

import (
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
