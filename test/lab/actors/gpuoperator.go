package actors

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// gpuOperator stands in for the GPU Operator, its device plugin and GFD, and
// NFD's worker: it makes the operands' DaemonSets, and once the device plugin's
// pod is ready on a node gives that node its GPUs, as a kubelet would.
//
// It shows the order of things and what the cluster's own admission says to the
// operands. It shows nothing of a driver, a container runtime or a GPU.
type gpuOperator struct {
	*plane
	gpus    int
	product string
	memory  int64
}

// operand is one DaemonSet the operator makes from a ClusterPolicy field.
type operand struct{ field, daemonSet, gate string }

func operands() []operand {
	return []operand{
		{"devicePlugin", "nvidia-device-plugin-daemonset", "device-plugin"},
		{"gfd", "gpu-feature-discovery", "gpu-feature-discovery"},
		{"dcgmExporter", "nvidia-dcgm-exporter", "dcgm-exporter"},
		{"validator", "nvidia-operator-validator", "operator-validator"},
	}
}

const (
	gpuNamespace = "gpu-operator"
	gpuResource  = "nvidia.com/gpu"
	deployLabel  = "nvidia.com/gpu.deploy."
	// NFD's name of "has a PCI display device of NVIDIA".
	pciLabel = "feature.node.kubernetes.io/pci-10de.present"
)

func newGPUOperator(p *plane, o Options) *actor {
	g := &gpuOperator{plane: p, gpus: o.GPUs, product: o.ProductName, memory: o.MemoryMiB}
	return &actor{
		name:      "rehearsal/gpu-operator",
		watches:   []kind{deployments, daemonSets, services, nodes, pods, clusterPolicies, runtimeClasses, serviceMonitors},
		reconcile: g.reconcile,
	}
}

func (g *gpuOperator) reconcile(ctx context.Context) error {
	var errs []error
	if g.gpus > 0 {
		errs = append(errs, g.discover(ctx))
	}
	r, ok, err := g.standIn("rehearsal/gpu-operator", deployments, gpuNamespace, "gpu-operator")
	if err != nil || !ok {
		return errors.Join(append(errs, err)...)
	}
	policy := g.get(clusterPolicies, "", "cluster-policy")
	if policy == nil || policy.GetDeletionTimestamp() != nil {
		return errors.Join(errs...)
	}
	errs = append(errs, g.runtimeClass(ctx, r, policy))
	missing := 0
	for _, op := range operands() {
		if !enabled(policy, op.field) {
			continue
		}
		errs = append(errs, r.ensure(ctx, daemonSets, g.daemonSet(policy, op)))
		ds := g.get(daemonSets, gpuNamespace, op.daemonSet)
		if ds == nil || integer(ds.Object, "status", "observedGeneration") < ds.GetGeneration() ||
			integer(ds.Object, "status", "numberAvailable") < integer(ds.Object, "status", "desiredNumberScheduled") {
			missing++
		}
	}
	errs = append(errs, g.metrics(ctx, r, policy))
	gpuNodes := 0
	for _, node := range g.list(nodes, "") {
		if node.GetLabels()[pciLabel] != "true" || g.gpus == 0 {
			continue
		}
		gpuNodes++
		errs = append(errs, g.labelDeploy(ctx, r, node), g.offer(ctx, r, policy, node))
	}
	errs = append(errs, r.status(ctx, clusterPolicies, policy, func(status map[string]any) {
		status["namespace"] = gpuNamespace
		// The real operator also says ready when it found no GPU node at all.
		if missing > 0 {
			status["state"] = "notReady"
			status["conditions"] = conditions(status["conditions"],
				no("Ready", "OperandNotReady", "ClusterPolicy is not ready, operands not ready", 0),
				yes("Error", "OperandNotReady", "", 0))
			return
		}
		reason, message := "Reconciled", "ClusterPolicy is ready as all resources have been successfully reconciled"
		if gpuNodes == 0 {
			reason, message = "NoGPUNodes", "No GPU node found, watching for new nodes to join the cluster."
		}
		status["state"] = "ready"
		status["conditions"] = conditions(status["conditions"],
			yes("Ready", reason, message, 0), no("Error", "Ready", "", 0))
	}))
	return errors.Join(errs...)
}

func enabled(policy *unstructured.Unstructured, field string) bool {
	v, set := at(policy.Object, "spec", field, "enabled").(bool)
	return !set || v
}

// discover is NFD: once its worker is ready on a node and its master is there,
// the node is labelled with what the worker saw.
func (g *gpuOperator) discover(ctx context.Context) error {
	r, ok, err := g.standIn("rehearsal/node-feature-discovery", deployments, gpuNamespace, "nfd-master")
	if err != nil || !ok {
		return err
	}
	var errs []error
	for _, node := range g.list(nodes, "") {
		if g.readyOn("nfd-worker", node.GetName()) {
			errs = append(errs, r.label(ctx, node, map[string]string{
				pciLabel: "true",
				"feature.node.kubernetes.io/system-os_release.ID":         "debian",
				"feature.node.kubernetes.io/system-os_release.VERSION_ID": "12",
			}))
		}
	}
	return errors.Join(errs...)
}

func (p *plane) readyOn(workload, node string) bool {
	for _, pod := range p.list(pods, gpuNamespace) {
		if workloadOf(pod) == workload && str(pod.Object, "spec", "nodeName") == node && ready(pod) {
			return true
		}
	}
	return false
}

// label adds labels a node lacks, with the rights of the program played.
func (r *role) label(ctx context.Context, node *unstructured.Unstructured, labels map[string]string) error {
	missing := map[string]any{}
	for k, v := range labels {
		if node.GetLabels()[k] != v {
			missing[k] = v
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if _, err := r.mark(ctx, nodes, node); err != nil {
		return err
	}
	patch := map[string]any{"metadata": map[string]any{"labels": missing}}
	if _, err := mergePatch(ctx, r.client.Resource(nodes.gvr()), node.GetName(), patch); err != nil {
		return fmt.Errorf("labelling node %s: %w", node.GetName(), err)
	}
	return nil
}

// labelDeploy is the operator's node labelling controller.
func (g *gpuOperator) labelDeploy(ctx context.Context, r *role, node *unstructured.Unstructured) error {
	labels := map[string]string{"nvidia.com/gpu.present": "true"}
	for _, op := range operands() {
		labels[deployLabel+op.gate] = "true"
	}
	return r.label(ctx, node, labels)
}

// offer is the kubelet after the device plugin registered, and GFD's labels.
func (g *gpuOperator) offer(ctx context.Context, r *role, policy, node *unstructured.Unstructured) error {
	var errs []error
	count := strconv.Itoa(g.gpus)
	if enabled(policy, "gfd") && g.readyOn("gpu-feature-discovery", node.GetName()) {
		// GFD publishes through NFD, whose master does the labelling.
		nfd, ok, err := g.standIn(r.name, deployments, gpuNamespace, "nfd-master")
		if err != nil {
			return err
		}
		if ok {
			errs = append(errs, nfd.label(ctx, node, map[string]string{
				"nvidia.com/gpu.count":            count,
				"nvidia.com/gpu.product":          strings.ReplaceAll(g.product, " ", "-"),
				"nvidia.com/gpu.memory":           strconv.FormatInt(g.memory, 10),
				"nvidia.com/gpu.replicas":         "1",
				"nvidia.com/gpu.sharing-strategy": "none",
				"nvidia.com/gpu.mode":             "compute",
			}))
		}
	}
	if enabled(policy, "devicePlugin") && g.readyOn("nvidia-device-plugin-daemonset", node.GetName()) &&
		(str(node.Object, "status", "allocatable", gpuResource) != count || str(node.Object, "status", "capacity", gpuResource) != count) {
		if _, err := r.mark(ctx, nodes, node); err != nil {
			return errors.Join(append(errs, err)...)
		}
		gpus := map[string]any{gpuResource: count}
		patch := map[string]any{"status": map[string]any{"capacity": gpus, "allocatable": gpus}}
		// The kubelet writes this, so the lab's own rights do.
		if _, err := mergePatch(ctx, g.admin.Resource(nodes.gvr()), node.GetName(), patch, "status"); err != nil {
			errs = append(errs, fmt.Errorf("offering GPUs on node %s: %w", node.GetName(), err))
		}
	}
	return errors.Join(errs...)
}

// runtimeClass is made, or taken over: the operator writes one it finds anew, with an
// ownerReference, so that it goes away with the ClusterPolicy, and with its own label
// instead of all labels and annotations that were there.
func (g *gpuOperator) runtimeClass(ctx context.Context, r *role, policy *unstructured.Unstructured) error {
	name := first(str(policy.Object, "spec", "operator", "runtimeClass"), "nvidia")
	if live := g.get(runtimeClasses, "", name); live != nil {
		if live.GetDeletionTimestamp() != nil {
			return nil
		}
		return r.update(ctx, runtimeClasses, live, func(m map[string]any) {
			meta := sub(m, "metadata")
			meta["ownerReferences"], meta["labels"] = owner(policy), map[string]any{"app.kubernetes.io/component": "gpu-operator"}
			delete(meta, "annotations")
		})
	}
	return r.ensure(ctx, runtimeClasses, map[string]any{
		"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia",
		"metadata": map[string]any{"name": name, "ownerReferences": owner(policy), "labels": map[string]any{"app.kubernetes.io/component": "gpu-operator"}},
	})
}

// metrics makes DCGM exporter's Service and, where the kind exists, its monitor.
func (g *gpuOperator) metrics(ctx context.Context, r *role, policy *unstructured.Unstructured) error {
	const name = "nvidia-dcgm-exporter"
	if !enabled(policy, "dcgmExporter") {
		return nil
	}
	labels := map[string]any{"app": name}
	port := map[string]any{"name": "gpu-metrics", "port": 9400, "targetPort": 9400}
	err := r.ensure(ctx, services, map[string]any{
		"apiVersion": "v1", "kind": "Service",
		"metadata": map[string]any{"name": name, "namespace": gpuNamespace, "labels": labels, "ownerReferences": owner(policy)},
		"spec":     map[string]any{"selector": labels, "ports": []any{port}},
	})
	if g.indexer(serviceMonitors) == nil || !truth(policy.Object, "spec", "dcgmExporter", "serviceMonitor", "enabled") {
		return err
	}
	endpoint := map[string]any{"port": "gpu-metrics", "path": "/metrics"}
	if interval := str(policy.Object, "spec", "dcgmExporter", "serviceMonitor", "interval"); interval != "" {
		endpoint["interval"] = interval
	}
	return errors.Join(err, r.ensure(ctx, serviceMonitors, map[string]any{
		"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor",
		"metadata": map[string]any{"name": name, "namespace": gpuNamespace, "labels": labels, "ownerReferences": owner(policy)},
		"spec": map[string]any{"selector": map[string]any{"matchLabels": labels}, "endpoints": []any{endpoint},
			"namespaceSelector": map[string]any{"matchNames": []any{gpuNamespace}}, "jobLabel": "app"},
	}))
}

// daemonSet has what admission and the scheduler look at: names, images,
// resources, privileges, runtime class. Its volumes and arguments are left out.
func (g *gpuOperator) daemonSet(policy *unstructured.Unstructured, op operand) map[string]any {
	spec := sub(policy.Object, "spec", op.field)
	labels := union(sub(policy.Object, "spec", "daemonsets", "labels"), map[string]any{"app": op.daemonSet, "app.kubernetes.io/managed-by": "gpu-operator"})
	image := strings.TrimSuffix(str(spec, "repository"), "/") + "/" + str(spec, "image")
	if version := str(spec, "version"); strings.HasPrefix(version, "sha256:") {
		image += "@" + version
	} else {
		image += ":" + version
	}
	pod := map[string]any{
		"serviceAccountName": "default",
		"runtimeClassName":   first(str(policy.Object, "spec", "operator", "runtimeClass"), "nvidia"),
		"nodeSelector":       map[string]any{deployLabel + op.gate: "true"},
		"priorityClassName":  first(str(policy.Object, "spec", "daemonsets", "priorityClassName"), "system-node-critical"),
		"tolerations":        []any{map[string]any{"key": gpuResource, "operator": "Exists", "effect": "NoSchedule"}},
		"containers": []any{map[string]any{
			"name": op.daemonSet, "image": strings.TrimPrefix(image, "/"),
			"resources":       firstOf(sub(spec, "resources"), map[string]any{}),
			"securityContext": map[string]any{"privileged": true},
		}},
	}
	if tolerations := at(policy.Object, "spec", "daemonsets", "tolerations"); tolerations != nil {
		pod["tolerations"] = tolerations
	}
	return map[string]any{
		"apiVersion": "apps/v1", "kind": "DaemonSet",
		"metadata": map[string]any{"name": op.daemonSet, "namespace": gpuNamespace, "labels": labels, "ownerReferences": owner(policy)},
		"spec": map[string]any{
			"selector": map[string]any{"matchLabels": map[string]any{"app": op.daemonSet}},
			"template": map[string]any{"metadata": map[string]any{"labels": labels}, "spec": pod},
		},
	}
}
