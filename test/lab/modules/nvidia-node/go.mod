module github.com/llmbox-dev/llmbox/test/lab/modules/nvidia-node

go 1.26.0

require (
	github.com/NVIDIA/k8s-device-plugin v0.17.4
	github.com/NVIDIA/nvidia-container-toolkit v1.17.8
)

// GPU feature discovery asks for v0.15.7, which no proxy serves, for the types by which it
// could publish labels as an object; the operator lets it write a file.
replace sigs.k8s.io/node-feature-discovery => sigs.k8s.io/node-feature-discovery v0.15.4
