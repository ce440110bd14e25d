package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/llmbox-dev/llmbox/test/lab/controlplane"
)

const (
	registryAddress  = "127.0.0.1:5000"
	containerdSocket = "/run/containerd/containerd.sock"
	pauseImage       = "registry.k8s.io/pause:3.10"
)

// mirrored are the registries that images of the box come from.
func mirrored() []string {
	return []string{"docker.io", "ghcr.io", "quay.io", "registry.k8s.io", "nvcr.io", "reg.kyverno.io"}
}

const containerdConfig = `version = 2
[grpc]
  address = "` + containerdSocket + `"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + pauseImage + `"
  # Lowering it needs CAP_SYS_RESOURCE, which a container has not.
  restrict_oom_score_adj = true
  enable_unprivileged_ports = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    # A layer is kept once, unpacked.
    discard_unpacked_layers = true
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
    # The handler that NVIDIA's toolkit would add; with no GPU to hand in it is runc.
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "/etc/containerd/certs.d"
`

const cniConfig = `{
  "cniVersion": "0.4.0",
  "name": "llmbox-lab",
  "plugins": [
    {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
     "ipam": {"type": "host-local", "ranges": [[{"subnet": "` + podSubnet + `"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`

func kubeletConfig(cgroup string) string {
	return `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 0.0.0.0
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: /lab/pki/ca.crt}
authorization: {mode: Webhook}
cgroupDriver: cgroupfs
cgroupRoot: /` + cgroup + `
failCgroupV1: false
failSwapOn: false
clusterDNS: [` + clusterDNS + `]
clusterDomain: cluster.local
resolvConf: /etc/resolv.conf
containerRuntimeEndpoint: unix://` + containerdSocket + `
evictionHard: {nodefs.available: 1%, imagefs.available: 1%, memory.available: 100Mi}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
serializeImagePulls: false
# Reported and counted against, not taken from the machine.
nodeStatusReportFrequency: 10s
maxPods: 110
`
}

const proxyConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
hostnameOverride: ` + nodeName + `
clusterCIDR: ` + controlplane.PodCIDR + `
bindAddress: 0.0.0.0
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
clientConnection: {kubeconfig: /lab/config/kube-proxy.kubeconfig}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
iptables: {minSyncPeriod: 0s}
`

// writeConfigs writes what the node's daemons read.
func writeConfigs(c config) error {
	files := map[string]string{
		"/etc/containerd/config.toml":         containerdConfig,
		"/etc/cni/net.d/10-lab.conflist":      cniConfig,
		"/lab/config/kubelet.yaml":            kubeletConfig(c.Cgroup),
		"/lab/config/kube-proxy.yaml":         proxyConfig,
		"/lab/registry/README":                "Blobs pushed into the lab's registry.\n",
		"/var/lib/llmbox-lab/hub/refs/README": "Files of the model hub's stand-in.\n",
	}
	for _, host := range mirrored() {
		server := host
		if host == "docker.io" {
			server = "registry-1.docker.io"
		}
		files["/etc/containerd/certs.d/"+host+"/hosts.toml"] = strings.Join([]string{
			`server = "https://` + server + `"`,
			`[host."http://` + registryAddress + `/v2/` + host + `"]`,
			`  capabilities = ["pull", "resolve"]`,
			`  override_path = true`,
			``,
		}, "\n")
	}
	for path, content := range files {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { // #nosec G301 -- the node's own root
			return fmt.Errorf("configuring the node: %w", err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil { // #nosec G306 -- no secrets
			return fmt.Errorf("configuring the node: %w", err)
		}
	}
	return nil
}
