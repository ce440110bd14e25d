// Package kubenode knows what a Kubernetes node has beside its programs: the
// configuration of containerd, CNI, kubelet and kube-proxy, the objects that a cluster
// begins with, and servicelb-standin.
//
// It starts nothing and writes no file. Where things lie is said by its callers: the
// node-size lab, and the stand-in for k3s.
package kubenode

import (
	"embed"
	"fmt"
	"strings"
)

//go:embed *.yaml
var manifests embed.FS

// Cluster is what objects of a cluster differ in.
type Cluster struct {
	// DNS is the address of the name server's Service, Domain what it answers for.
	DNS, Domain string
	// Storage is where volumes lie on the node.
	Storage string
}

// Manifest returns objects by the name that k3s gives to the file of them: coredns,
// local-storage, runtimes; and netpol, the rights of the network policy controller.
func (c Cluster) Manifest(name string) ([]byte, error) {
	raw, err := manifests.ReadFile(name + ".yaml")
	if err != nil {
		return nil, fmt.Errorf("reading the objects of %s: %w", name, err)
	}
	return []byte(strings.NewReplacer(
		"${CLUSTER_DNS}", c.DNS, "${CLUSTER_DOMAIN}", c.Domain, "${STORAGE_PATH}", c.Storage,
	).Replace(string(raw))), nil
}
