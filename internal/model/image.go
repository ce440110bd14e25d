package model

import (
	"fmt"

	version "github.com/hashicorp/go-version"
)

// Image is which build of vLLM's image a driver runs.
type Image struct {
	// Tag is the tag of docker.io/vllm/vllm-openai.
	Tag string `json:"tag"`
	// CUDA is the toolkit in it, Env what the container must be told.
	CUDA string `json:"cuda"`
	// Requires is the CUDA version that the driver itself must serve for the container
	// to be started; empty where the image brings what an older driver lacks.
	Requires string            `json:"cuda_required"`
	Env      map[string]string `json:"env,omitempty"`
	// Problem is why no image runs, or what to check first.
	Problem string `json:"problem,omitempty"`
}

// The oldest drivers: of CUDA 13 and CUDA 12 (docs.nvidia.com, CUDA compatibility,
// minor version compatibility), and the branches that CUDA 13 images of vLLM support
// on data centre GPUs with their own compatibility libraries (docs.vllm.ai).
const (
	driverCUDA13 = "580.65.06"
	driverCUDA12 = "525.60.13"
)

// ImageFor maps a driver to an image. Plain tags are CUDA 13 from v0.20.0 on, with
// "-cu129" beside them (github.com/vllm-project/recipes). Without a driver version
// the plain tag is named.
func ImageFor(g GPUFact, driver, vllm string) Image {
	if vllm == "" {
		vllm = ServedVLLM
	}
	tag := "v" + vllm
	if !versionAtLeast(vllm, "0.20") {
		image := Image{Tag: tag, CUDA: "12.9", Requires: requires("12.9", g, driver)}
		if driver != "" && !versionAtLeast(driver, driverCUDA12) {
			image.Problem = fmt.Sprintf("driver %s is older than %s, the oldest for CUDA 12", driver, driverCUDA12)
		}
		return image
	}
	plain := Image{Tag: tag, CUDA: "13.0", Requires: "13.0"}
	v, err := version.NewVersion(driver)
	if driver == "" || err != nil {
		return plain
	}
	branch := v.Segments()[0]
	switch {
	case versionAtLeast(driver, driverCUDA13):
		return plain
	case (branch == 535 || branch >= 570 && branch < 580) && g.DataCenter():
		plain.Requires = ""
		plain.Env = map[string]string{"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"}
		return plain
	case versionAtLeast(driver, driverCUDA12):
		return Image{Tag: tag + "-cu129", CUDA: "12.9", Requires: requires("12.9", g, driver), Problem: "check that the registry has this tag: not every release has one for CUDA 12.9"}
	}
	return Image{Problem: fmt.Sprintf("driver %s is older than %s: no image runs on it", driver, driverCUDA12)}
}

// requires is what the image's NVIDIA_REQUIRE_CUDA asks for. For data centre and
// professional GPUs it also names the driver branches under which a CUDA 12 program
// runs by minor version compatibility (gitlab.com/nvidia/container-images/cuda,
// dist/12.9.1: brand=…,driver>=535,driver<536 and so on); GeForce has to serve the
// version itself.
func requires(cuda string, g GPUFact, driver string) string {
	v, err := version.NewVersion(driver)
	if driver == "" || err != nil || !g.DataCenter() {
		return cuda
	}
	switch v.Segments()[0] {
	case 535, 550, 560, 565, 570:
		return "12.0"
	}
	return cuda
}
