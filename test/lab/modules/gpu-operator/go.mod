module github.com/llmbox-dev/llmbox/test/lab/modules/gpu-operator

go 1.26.0

require github.com/NVIDIA/gpu-operator v0.0.0-20250917190837-d73a0086a6ba
