package chart

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// PodRequests sums what the pods of the rendered workloads ask for on one node:
// replicas times the larger of (containers) and (each init container), as the
// scheduler counts it. A DaemonSet counts once, and so does a Job: the sum is
// what must be free at the peak. Pods that an operator makes later are not in it.
func PodRequests(objects []*unstructured.Unstructured) (cpuMillis, memoryBytes int64) {
	for _, o := range objects {
		spec, replicas, ok := podSpec(o)
		if !ok {
			continue
		}
		cpu, mem := effectiveRequests(spec)
		cpuMillis += replicas * cpu.MilliValue()
		memoryBytes += replicas * mem.Value()
	}
	return cpuMillis, memoryBytes
}

// WorkloadImages lists every image that the rendered pods name, sorted.
func WorkloadImages(objects []*unstructured.Unstructured) []string {
	images := map[string]bool{}
	for _, o := range objects {
		spec, _, ok := podSpec(o)
		if !ok {
			continue
		}
		for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
			images[c.Image] = true
		}
	}
	return slices.Sorted(maps.Keys(images))
}

// podSpec finds the pod template of a workload and how many pods it makes.
func podSpec(o *unstructured.Unstructured) (corev1.PodSpec, int64, bool) {
	var spec corev1.PodSpec
	where := []string{"spec", "template", "spec"}
	replicas := int64(1)
	switch o.GetKind() {
	case "Deployment", "StatefulSet":
		if n, found, err := unstructured.NestedInt64(o.Object, "spec", "replicas"); err == nil && found {
			replicas = n
		}
	case "DaemonSet", "Job":
	case "CronJob":
		where = []string{"spec", "jobTemplate", "spec", "template", "spec"}
	case "Pod":
		where = []string{"spec"}
	default:
		return spec, 0, false
	}
	raw, found, err := unstructured.NestedMap(o.Object, where...)
	if err != nil || !found {
		return spec, 0, false
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(raw, &spec); err != nil {
		return spec, 0, false
	}
	return spec, replicas, true
}

func effectiveRequests(spec corev1.PodSpec) (cpu, mem resource.Quantity) {
	// A sidecar keeps running beside the containers; a plain init container runs
	// alone with the sidecars that were started before it.
	var sidecarCPU, sidecarMem, peakCPU, peakMem resource.Quantity
	for _, c := range spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			sidecarCPU.Add(*c.Resources.Requests.Cpu())
			sidecarMem.Add(*c.Resources.Requests.Memory())
			continue
		}
		peakCPU = larger(peakCPU, sum(sidecarCPU, *c.Resources.Requests.Cpu()))
		peakMem = larger(peakMem, sum(sidecarMem, *c.Resources.Requests.Memory()))
	}
	cpu, mem = sidecarCPU, sidecarMem
	for _, c := range spec.Containers {
		cpu.Add(*c.Resources.Requests.Cpu())
		mem.Add(*c.Resources.Requests.Memory())
	}
	return larger(cpu, peakCPU), larger(mem, peakMem)
}

func sum(a, b resource.Quantity) resource.Quantity {
	a.Add(b)
	return a
}

func larger(a, b resource.Quantity) resource.Quantity {
	if b.Cmp(a) > 0 {
		return b
	}
	return a
}
