// Package programs knows the upstream programs a lab runs: which there are, how
// they are compiled from their pinned modules, and where a built set lies.
//
// It does not know what they are for.
package programs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Program is one program compiled from a wrapper module.
type Program struct {
	Name string
	// Module is the folder under test/lab/modules that pins it.
	Module string
	// Package is its main package.
	Package string
	// LDFlags are the linker flags.
	LDFlags string
	// Tags are build tags, with commas between.
	Tags string
	// Unpublished are files of the module, relative to it, that only upstream's build
	// makes (pages of a user interface) and without which it doesn't compile.
	Unpublished []string
	// CGO compiles with a C compiler: the program opens a C library while it runs.
	CGO bool
	// Files are files and folders of the module, relative to it, that upstream's image
	// holds beside the program. They come to lie in a folder named after it, see Files.
	Files []string
	// Usual is how long a first build takes on two cores with nothing else to do:
	// half the CPU time it was measured to need.
	Usual time.Duration
}

// All lists the programs in the order in which they are built: the ones of one
// module follow each other, as they share most packages.
func All() []Program {
	const strip = "-s -w"
	// Without the version kube-apiserver reports a placeholder that clients can't parse.
	const kubernetes = strip + " -X k8s.io/component-base/version.gitVersion=v1.36.3"
	const (
		gpuOperator          = strip + " -X github.com/NVIDIA/gpu-operator/internal/info.version=v25.3.4"
		nodeFeatureDiscovery = strip + " -X sigs.k8s.io/node-feature-discovery/pkg/version.version=v0.17.3 -X sigs.k8s.io/node-feature-discovery/pkg/utils/hostpath.pathPrefix=/host-"
		// NVML's functions are looked for when they are called.
		nvml         = " '-extldflags=-Wl,--export-dynamic -Wl,--unresolved-symbols=ignore-in-object-files'"
		devicePlugin = strip + nvml + " -X github.com/NVIDIA/k8s-device-plugin/internal/info.version=v0.17.4"
		// Go's own resolver: an image then needs libc alone.
		ownNet = "netgo,osusergo"
	)
	return []Program{
		{Name: "kube-apiserver", Module: "kubernetes", Package: "k8s.io/kubernetes/cmd/kube-apiserver", LDFlags: kubernetes, Usual: 5 * time.Minute},
		{Name: "kube-controller-manager", Module: "kubernetes", Package: "k8s.io/kubernetes/cmd/kube-controller-manager", LDFlags: kubernetes, Usual: 2 * time.Minute},
		{Name: "kube-scheduler", Module: "kubernetes", Package: "k8s.io/kubernetes/cmd/kube-scheduler", LDFlags: kubernetes, Usual: 30 * time.Second},
		{Name: "kine", Module: "kine", Package: "github.com/k3s-io/kine", LDFlags: strip, Usual: 160 * time.Second},
		{Name: "kwok", Module: "kwok", Package: "sigs.k8s.io/kwok/cmd/kwok", LDFlags: strip, Usual: 150 * time.Second},
		{Name: "kubelet", Module: "kubernetes-node", Package: "k8s.io/kubernetes/cmd/kubelet", LDFlags: kubernetes, Usual: 3 * time.Minute},
		{Name: "kube-proxy", Module: "kubernetes-node", Package: "k8s.io/kubernetes/cmd/kube-proxy", LDFlags: kubernetes, Usual: time.Minute},
		// Its policies only: routes and the service proxy stay out, as in k3s.
		{Name: "kube-router-netpol", Module: "kube-router", Package: "github.com/llmbox-dev/llmbox/test/lab/modules/kube-router", LDFlags: strip, Usual: time.Minute},
		{Name: "coredns", Module: "coredns", Package: "github.com/llmbox-dev/llmbox/test/lab/modules/coredns", LDFlags: strip, Usual: 2 * time.Minute},
		{Name: "local-path-provisioner", Module: "local-path-provisioner", Package: "github.com/rancher/local-path-provisioner", LDFlags: strip, Usual: 2 * time.Minute},
		// Operators, and what they start: only a full node lab runs them.
		{Name: "prometheus-operator", Module: "prometheus-operator", Package: "github.com/prometheus-operator/prometheus-operator/cmd/operator", LDFlags: strip, Usual: 160 * time.Second},
		{Name: "prometheus-config-reloader", Module: "prometheus-operator", Package: "github.com/prometheus-operator/prometheus-operator/cmd/prometheus-config-reloader", LDFlags: strip, Usual: 30 * time.Second},
		// A box finds its targets through Kubernetes; the clients of all clouds stay out.
		{Name: "prometheus", Module: "prometheus", Package: "github.com/prometheus/prometheus/cmd/prometheus", LDFlags: strip, Tags: "remove_all_sd,enable_kubernetes_sd", Usual: 5 * time.Minute},
		{Name: "alertmanager", Module: "alertmanager", Package: "github.com/prometheus/alertmanager/cmd/alertmanager", LDFlags: strip, Usual: 2 * time.Minute,
			Unpublished: []string{"ui/app/dist/elm/index.html", "ui/app/dist/mantine/index.html"}},
		{Name: "node-exporter", Module: "node-exporter", Package: "github.com/prometheus/node_exporter", LDFlags: strip, Usual: time.Minute},
		{Name: "envoy-gateway", Module: "envoy-gateway", Package: "github.com/envoyproxy/gateway/cmd/envoy-gateway", LDFlags: strip, Usual: 330 * time.Second},
		// Envoy Gateway's translator at a desk: routes and policies in, Envoy's configuration out.
		{Name: "egctl", Module: "envoy-gateway", Package: "github.com/envoyproxy/gateway/cmd/egctl", LDFlags: strip, Usual: time.Minute},
		{Name: "external-secrets", Module: "external-secrets", Package: "github.com/external-secrets/external-secrets", LDFlags: strip, Usual: 5 * time.Minute},
		{Name: "gpu-operator", Module: "gpu-operator", Package: "github.com/NVIDIA/gpu-operator/cmd/gpu-operator", LDFlags: gpuOperator, Usual: 170 * time.Second,
			Files: []string{"assets", "manifests"}},
		{Name: "nvidia-validator", Module: "gpu-operator", Package: "github.com/NVIDIA/gpu-operator/validator", LDFlags: gpuOperator, Usual: 30 * time.Second,
			Files: []string{"validator/cuda-workload-validation.yaml", "validator/plugin-workload-validation.yaml"}},
		{Name: "nfd-master", Module: "node-feature-discovery", Package: "sigs.k8s.io/node-feature-discovery/cmd/nfd-master", LDFlags: nodeFeatureDiscovery, Usual: 3 * time.Minute},
		{Name: "nfd-worker", Module: "node-feature-discovery", Package: "sigs.k8s.io/node-feature-discovery/cmd/nfd-worker", LDFlags: nodeFeatureDiscovery, Usual: 30 * time.Second},
		{Name: "nfd-gc", Module: "node-feature-discovery", Package: "sigs.k8s.io/node-feature-discovery/cmd/nfd-gc", LDFlags: nodeFeatureDiscovery, Usual: 30 * time.Second},
		{Name: "nvidia-device-plugin", Module: "nvidia-node", Package: "github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin", LDFlags: devicePlugin, Tags: ownNet, CGO: true, Usual: 3 * time.Minute},
		{Name: "gpu-feature-discovery", Module: "nvidia-node", Package: "github.com/NVIDIA/k8s-device-plugin/cmd/gpu-feature-discovery", LDFlags: devicePlugin, Tags: ownNet, CGO: true, Usual: 2 * time.Minute},
		{Name: "config-manager", Module: "nvidia-node", Package: "github.com/NVIDIA/k8s-device-plugin/cmd/config-manager", LDFlags: devicePlugin, Tags: ownNet, CGO: true, Usual: 30 * time.Second},
		{Name: "nvidia-container-runtime", Module: "nvidia-node", Package: "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-container-runtime", LDFlags: strip + nvml, Tags: ownNet, CGO: true, Usual: 30 * time.Second},
		{Name: "helm-controller", Module: "helm-controller", Package: "github.com/k3s-io/helm-controller", LDFlags: strip, Usual: 2 * time.Minute},
		{Name: "kyverno", Module: "kyverno", Package: "github.com/kyverno/kyverno/cmd/kyverno", LDFlags: strip, Usual: 7 * time.Minute},
		{Name: "kyverno-init", Module: "kyverno", Package: "github.com/kyverno/kyverno/cmd/kyverno-init", LDFlags: strip, Usual: time.Minute},
		{Name: "keda", Module: "keda", Package: "github.com/kedacore/keda/v2/cmd/operator", LDFlags: strip, Usual: 12 * time.Minute},
		{Name: "keda-adapter", Module: "keda", Package: "github.com/kedacore/keda/v2/cmd/adapter", LDFlags: strip, Usual: time.Minute},
		{Name: "keda-admission-webhooks", Module: "keda", Package: "github.com/kedacore/keda/v2/cmd/webhooks", LDFlags: strip, Usual: time.Minute},
		// A main of the lab's own: Vault's brings clients of every database and cloud, some of which don't compile.
		{Name: "vault-on-core", Module: "vault", Package: "github.com/llmbox-dev/llmbox/test/lab/modules/vault", LDFlags: strip, Usual: 8 * time.Minute},
		{Name: "helm", Module: "helm", Package: "helm.sh/helm/v3/cmd/helm", LDFlags: strip, Usual: 3 * time.Minute},
		// What helm-controller's Jobs run carries Helm 4.
		{Name: "helm4", Module: "helm4", Package: "helm.sh/helm/v4/cmd/helm", LDFlags: strip, Usual: 3 * time.Minute},
	}
}

// ErrMissing means that a program has not been built.
var ErrMissing = errors.New("not built yet")

// Set is a directory of built programs.
type Set struct{ dir string }

// Find checks that a directory holds the named programs.
func Find(dir string, names ...string) (Set, error) {
	var missing []string
	for _, name := range names {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return Set{}, fmt.Errorf("looking for the lab's programs in %s: %s: %w; build them once with `llmbox-lab build` or `make lab`",
			dir, strings.Join(missing, ", "), ErrMissing)
	}
	return Set{dir: dir}, nil
}

// Path is where a program lies.
func (s Set) Path(name string) string { return filepath.Join(s.dir, name) }

// Files is where the files lie that belong to a program beside itself.
func Files(program string) string { return program + ".files" }
