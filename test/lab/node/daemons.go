package node

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"

	"github.com/llmbox-dev/llmbox/test/lab/controlplane"
	"github.com/llmbox-dev/llmbox/test/lab/kubenode"
)

const (
	registryPort     = "5000"
	registryAddress  = "127.0.0.1:" + registryPort
	containerdSocket = "/run/containerd/containerd.sock"
	pauseImage       = "registry.k8s.io/pause:3.10"
)

// mirrored are the registries that images of the box come from.
func mirrored() []string {
	return []string{"docker.io", "ghcr.io", "quay.io", "registry.k8s.io", "nvcr.io", "reg.kyverno.io"}
}

// mirrorURL is where the lab's registry has the images of another.
func mirrorURL(address, host string) string { return "http://" + address + "/v2/" + host }

// daemonConfigs are the files that the node's daemons read, by their paths.
func daemonConfigs(cgroup, nvidiaHandler string) (map[string]string, error) {
	kubelet, err := kubenode.KubeletConfig(map[string]any{
		"address":                  "0.0.0.0",
		"authentication":           map[string]any{"anonymous": map[string]any{"enabled": false}, "webhook": map[string]any{"enabled": true}, "x509": map[string]any{"clientCAFile": "/lab/pki/ca.crt"}},
		"cgroupRoot":               "/" + cgroup,
		"clusterDNS":               []string{clusterDNS},
		"resolvConf":               "/etc/resolv.conf",
		"containerRuntimeEndpoint": "unix://" + containerdSocket,
		"evictionHard":             map[string]string{"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "100Mi"},
		// Images come from the lab: none is worth the time to fetch it again.
		"imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
		// Reported and counted against, not taken from the machine.
		"nodeStatusReportFrequency": "10s",
	})
	if err != nil {
		return nil, err
	}
	return map[string]string{
		"/etc/containerd/config.toml": kubenode.Containerd{
			Socket: containerdSocket, Sandbox: pauseImage,
			CNIBin: "/usr/lib/cni", CNIConf: "/etc/cni/net.d", Certs: "/etc/containerd/certs.d",
			// nvidia is what NVIDIA's toolkit would add; with nothing to hand in it is runc.
			Handlers: map[string]string{"runc": "", "nvidia": nvidiaHandler},
		}.TOML(),
		"/etc/cni/net.d/10-lab.conflist": kubenode.CNIConfig("llmbox-lab", podSubnet),
		"/lab/config/kubelet.yaml":       string(kubelet),
		"/lab/config/kube-proxy.yaml":    kubenode.ProxyConfig(nodeName, controlplane.PodCIDR, "/lab/config/kube-proxy.kubeconfig"),
	}, nil
}

// clusterObjects are what a cluster has before anything is installed into it.
func clusterObjects() ([]byte, error) {
	cluster := kubenode.Cluster{DNS: clusterDNS, Domain: "cluster.local", Storage: "/var/lib/rancher/k3s/storage"}
	var all []byte
	for _, name := range []string{"coredns", "local-storage", "netpol"} {
		raw, err := cluster.Manifest(name)
		if err != nil {
			return nil, err
		}
		all = append(append(all, raw...), "---\n"...)
	}
	return all, nil
}

// writeConfigs writes what the node's daemons read.
func writeConfigs(c config) error {
	files, err := daemonConfigs(c.Cgroup, c.nvidiaHandler())
	if err != nil {
		return err
	}
	ofGPUs, err := c.gpuConfigs()
	if err != nil {
		return err
	}
	maps.Copy(files, ofGPUs)
	files["/lab/registry/README"] = "Blobs pushed into the lab's registry.\n"
	files["/var/lib/llmbox-lab/hub/refs/README"] = "Files of the model hub's stand-in.\n"
	for _, host := range mirrored() {
		server := host
		if host == "docker.io" {
			server = "registry-1.docker.io"
		}
		files["/etc/containerd/certs.d/"+host+"/hosts.toml"] = kubenode.HostsTOML("", "https://"+server,
			[]kubenode.Endpoint{{URL: mirrorURL(registryAddress, host), WholePath: true}})
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
