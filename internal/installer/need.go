package installer

import (
	"cmp"
	"path"
	"slices"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/model"
	"github.com/llmbox-dev/llmbox/internal/preflight"
)

// What cannot be read off a plan, in bytes. Images are charged unpacked beside their
// compressed layers, as containerd keeps both.
const (
	// modelImageBytes is vLLM's image: 9 to 12 GB to pull, 20 to 25 GB unpacked
	// (vllm-project/vllm#17163, #22377, #27154).
	modelImageBytes = 32 << 30
	// otherImageBytes is one of the other images, where its size is not known: most
	// are single Go programs, the GPU operator's operands several hundred MB.
	otherImageBytes = 300 << 20
	// k3sBytes is k3s with its binary, unpacked programs, datastore and logs
	// (docs.k3s.io/installation/requirements, and its own images).
	k3sBytes = 3 << 30
	// metricsBytes is the volume that Prometheus keeps its series on.
	metricsBytes = 10 << 30
)

// The hosts that a component's images and files come from besides what their
// references name.
const (
	hubHost = "huggingface.co"
	// Docker Hub's references name docker.io; blobs and tokens come from here.
	dockerHost     = "docker.io"
	dockerRegistry = "registry-1.docker.io"
	dockerAuth     = "auth.docker.io"
	k3sHost        = "github.com"
)

// Need says what an install of these components asks of the machine it runs on. It
// looks at the table, not at rendered charts: preflight must answer in a second.
func Need(nodes []component.Node, box config.Box, choice model.Choice, k3sVersion string) preflight.Need {
	need := preflight.Need{
		PodCIDR: box.Network.ClusterCIDR, ServiceCIDR: box.Network.ServiceCIDR,
		K3sVersion: cmp.Or(box.K3s.Version, k3sVersion), Hosts: downloadHosts(nodes, box), CUDA: choice.Fit.Image.Requires,
		OtherInit: box.K3s.Init == config.InitSupervised || box.K3s.Init == config.InitOpenRC,
	}
	images := int64(k3sBytes)
	for _, n := range nodes {
		if n.Mode != component.Install {
			continue
		}
		need.MemoryBytes += n.Requests.MemoryBytes
		need.CPUMillis += n.Requests.CPUMillis
		for _, img := range n.Images {
			switch {
			case img.SizeBytes > 0:
				// Compressed layers beside three times that unpacked.
				images += 4 * img.SizeBytes
			case n.Name == modelStep && strings.Contains(img.Reference, "vllm"):
				images += modelImageBytes
			default:
				images += otherImageBytes
			}
		}
		if n.Name == prometheusStep {
			need.Disk = append(need.Disk, preflight.DiskNeed{Path: box.K3s.DataDir, Bytes: metricsBytes, What: "metrics"})
		}
		for _, port := range n.HostPorts {
			what := n.Name
			if n.Name == gatewayStep {
				port, what = int32(box.Gateway.Port), "the gateway" // #nosec G115 -- validated to 1–65535
			}
			need.Ports = append(need.Ports, preflight.PortNeed{Port: int(port), Protocol: "tcp", What: what})
		}
	}
	need.Disk = append(need.Disk, preflight.DiskNeed{Path: box.K3s.DataDir, Bytes: images, What: "k3s and container images"})
	if weights := choice.Model.WeightsBytes; weights > 0 {
		need.Disk = append(need.Disk, preflight.DiskNeed{
			Path: path.Join(box.Paths.Data, "models"), Bytes: weights + weights/20, What: "weights of " + choice.Model.Name,
		})
	}
	return need
}

// OnFurtherNodes keeps what also runs on nodes that join a box: the GPU operator's parts
// and the model.
func OnFurtherNodes(nodes []component.Node) []component.Node {
	return slices.DeleteFunc(slices.Clone(nodes), func(n component.Node) bool { return n.Name != gpuStep && n.Name != modelStep })
}

// downloadHosts lists, once each, the hosts that these components come from.
func downloadHosts(nodes []component.Node, box config.Box) []string {
	hosts := []string{}
	if box.K3s.BinaryPath == "" {
		hosts = append(hosts, k3sHost)
	}
	if box.Model.Source == config.SourceHub {
		hosts = append(hosts, hubHost)
	}
	for _, n := range nodes {
		if n.Mode != component.Install {
			continue
		}
		for _, img := range n.Images {
			host, _, found := strings.Cut(img.Reference, "/")
			if !found || !strings.ContainsAny(host, ".:") {
				host = dockerHost
			}
			if endpoints := box.Registries.Mirrors[host].Endpoints; len(endpoints) > 0 {
				hosts = append(hosts, endpoints[0])
				continue
			}
			if host == dockerHost {
				hosts = append(hosts, dockerRegistry, dockerAuth)
				continue
			}
			hosts = append(hosts, host)
		}
	}
	slices.Sort(hosts)
	return slices.Compact(hosts)
}
