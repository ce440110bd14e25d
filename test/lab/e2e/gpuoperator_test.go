package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/test/lab/node"
)

const operatorNamespace = "gpu-operator"

// gpuBoxFile is a small box whose GPU has to be found by the operator. The lab has no
// kernel module: nothing could link its device files.
func gpuBoxFile(t *testing.T, hub string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "box.yaml")
	must(t, os.WriteFile(path, fmt.Appendf(nil, `apiVersion: llmbox.dev/v1alpha1
kind: Box
model: {name: %s}
gpu: {product: a100-80, count: 1}
components:
  gpu-operator: {values: {validator: {devCharSymlinks: false}, dcgmExporter: {serviceMonitor: {enabled: true}}}}
  weights: {values: {weights: {endpoint: %q, sizeGiB: 1}}}
  model: {values: {resources: {cpuRequestMillis: 100, memoryRequestMiB: 128, memoryLimitMiB: 2560}, drain: {preStopSeconds: 1, shutdownTimeoutSeconds: 5}}}
`, modelName, hub), 0o600))
	return path
}

// The real GPU Operator with its own operands finds the GPU, offers it, and the model
// gets it. The RuntimeClass is once somebody else's, as k3s makes one, and once ours.
func TestGPUOperatorOnARealNode(t *testing.T) {
	onlyWhereAsked(t, false)
	bin := binDir(t)
	for _, name := range []string{"gpu-operator", "nvidia-validator", "nfd-worker", "nvidia-device-plugin", "nvidia-container-runtime", "dcgm-exporter-standin", "nvml-standin.so"} {
		if _, err := os.Stat(filepath.Join(bin, "lab", name)); err != nil {
			t.Skipf("%v: run `make lab-node-gpu` first", err)
		}
	}
	for _, tt := range []struct {
		name    string
		foreign bool
		without string
	}{
		{"with a RuntimeClass of k3s and a model", true, without(false)},
		{"with a RuntimeClass of llmbox", false, without(false) + ",model,weights"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			lab := startLab(t, bin, "--gpu-by", node.ByOperator)
			o := newOperatorBox(t, bin, lab, tt.without)
			o.applyCRDs()
			if tt.foreign {
				o.makeRuntimeClass()
			}
			before := o.node()
			for name := range before.Labels {
				if strings.HasPrefix(name, "nvidia.com/") || strings.HasPrefix(name, "feature.node.kubernetes.io/") {
					t.Fatalf("the lab itself gave the node the label %s", name)
				}
			}
			t.Log(run(t, installWithin, filepath.Join(bin, "llmbox"), append([]string{"install"}, o.flags...)...))

			t.Run("the node offers the GPU by NVIDIA's device plugin", o.sub(nodeOffersGPU))
			t.Run("the node's labels come from the operands", o.sub(nodeIsLabelled))
			t.Run("the operator finds everything ready", o.sub(policyIsReady))
			t.Run("every pod runs an image of the component table", o.sub(imagesAreOurs))
			t.Run("requests and limits arrive", o.sub(resourcesArrive))
			t.Run("the RuntimeClass belongs to the operator now", o.sub(runtimeClassIsTaken))
			t.Run("the exporter serves what the chart asks for", o.sub(exporterServes))
			if tt.foreign {
				t.Run("the model has the GPU", o.sub(modelHasGPU))
				t.Run("working sets stay below the requests", o.sub(workingSets))
			}
			t.Run("uninstall leaves nothing", func(t *testing.T) {
				t.Log(run(t, uninstallWithin, filepath.Join(bin, "llmbox"), append([]string{"uninstall"}, o.flags...)...))
				o.with(t).nothingIsLeft(before, tt.foreign)
			})
			lab.stop(t)
		})
	}
}

type operatorBox struct {
	t       *testing.T
	bin     string
	lab     *lab
	flags   []string
	kube    kubernetes.Interface
	dynamic dynamic.Interface
}

func newOperatorBox(t *testing.T, bin string, lab *lab, without string) operatorBox {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", lab.Kubeconfig)
	must(t, err)
	kube, err := kubernetes.NewForConfig(config)
	must(t, err)
	client, err := dynamic.NewForConfig(config)
	must(t, err)
	return operatorBox{t: t, bin: bin, lab: lab, kube: kube, dynamic: client,
		flags: []string{"--kubeconfig", lab.Kubeconfig, "--config", gpuBoxFile(t, lab.Hub), "--without", without, "--yes"}}
}

func (o operatorBox) with(t *testing.T) operatorBox {
	o.t = t
	return o
}

func (o operatorBox) sub(f func(operatorBox)) func(*testing.T) {
	return func(t *testing.T) { f(o.with(t)) }
}

// eventually asks again until a check has nothing to say, for a bounded time.
func (o operatorBox) eventually(within time.Duration, check func(context.Context) error) {
	o.t.Helper()
	deadline := time.Now().Add(within)
	for {
		err := check(o.t.Context())
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			o.t.Errorf("after %s: %v", within, err)
			return
		}
		time.Sleep(time.Second)
	}
}

func (o operatorBox) node() *corev1.Node {
	o.t.Helper()
	nodes, err := o.kube.CoreV1().Nodes().List(o.t.Context(), metav1.ListOptions{})
	must(o.t, err)
	if len(nodes.Items) != 1 {
		o.t.Fatalf("there are %d nodes", len(nodes.Items))
	}
	return &nodes.Items[0]
}

// applyCRDs makes the CRDs of all other components, as they would be on a whole box:
// the operator keeps every CRD of the cluster in memory.
func (o operatorBox) applyCRDs() {
	o.t.Helper()
	crds := o.dynamic.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	must(o.t, fs.WalkDir(assets.FS(), "crds", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if d != nil && (d.Name() == "gpu-operator" || d.Name() == "nfd") {
				return fs.SkipDir
			}
			return err
		}
		raw, err := fs.ReadFile(assets.FS(), path)
		if err != nil {
			return err
		}
		crd := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(raw, &crd.Object); err != nil {
			return err
		}
		_, err = crds.Create(o.t.Context(), crd, metav1.CreateOptions{})
		return err
	}))
}

func (o operatorBox) makeRuntimeClass() {
	o.t.Helper()
	_, err := o.kube.NodeV1().RuntimeClasses().Create(o.t.Context(), &nodev1.RuntimeClass{
		ObjectMeta: metav1.ObjectMeta{Name: "nvidia", Labels: map[string]string{"objectset.rio.cattle.io/hash": "0"}},
		Handler:    "nvidia",
	}, metav1.CreateOptions{})
	must(o.t, err)
}

func nodeOffersGPU(o operatorBox) {
	if q := o.node().Status.Allocatable["nvidia.com/gpu"]; q.Value() != 1 {
		o.t.Errorf("the node offers %s GPUs", q.String())
	}
	pod := o.operand("app=nvidia-device-plugin-daemonset")
	logs := o.logs(pod, "nvidia-device-plugin")
	if !strings.Contains(logs, "Registered device plugin for 'nvidia.com/gpu' with Kubelet") {
		o.t.Errorf("the device plugin did not offer it; it says\n%s", logs)
	}
}

// operand is the one pod of a DaemonSet.
func (o operatorBox) operand(selector string) corev1.Pod {
	o.t.Helper()
	pods, err := o.kube.CoreV1().Pods(operatorNamespace).List(o.t.Context(), metav1.ListOptions{LabelSelector: selector})
	must(o.t, err)
	if len(pods.Items) != 1 {
		o.t.Fatalf("there are %d pods with %s", len(pods.Items), selector)
	}
	return pods.Items[0]
}

func (o operatorBox) logs(pod corev1.Pod, container string) string {
	o.t.Helper()
	raw, err := o.kube.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{Container: container}).DoRaw(o.t.Context())
	must(o.t, err)
	return string(raw)
}

func nodeIsLabelled(o operatorBox) {
	// GPU feature discovery writes a file, Node Feature Discovery picks it up within a minute.
	o.eventually(2*time.Minute, func(context.Context) error {
		labels := o.node().Labels
		var errs []error
		for name, want := range map[string]string{
			"feature.node.kubernetes.io/pci-10de.present": "true",
			"nvidia.com/gpu.present":                      "true",
			"nvidia.com/gpu.product":                      "NVIDIA-A100-SXM4-80GB",
			"nvidia.com/gpu.count":                        "1",
			"nvidia.com/gpu.memory":                       "81920",
			"nvidia.com/gpu.family":                       "ampere",
			"nvidia.com/gpu.deploy.device-plugin":         "true",
		} {
			if labels[name] != want {
				errs = append(errs, fmt.Errorf("label %s is %q, want %q", name, labels[name], want))
			}
		}
		return errors.Join(errs...)
	})
}

func policyIsReady(o operatorBox) {
	policies := o.dynamic.Resource(schema.GroupVersionResource{Group: "nvidia.com", Version: "v1", Resource: "clusterpolicies"})
	o.eventually(2*time.Minute, func(ctx context.Context) error {
		policy, err := policies.Get(ctx, "cluster-policy", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if state, _, _ := unstructured.NestedString(policy.Object, "status", "state"); state != "ready" {
			return fmt.Errorf("the ClusterPolicy is %q: %v", state, policy.Object["status"])
		}
		return nil
	})
	sets, err := o.kube.AppsV1().DaemonSets(operatorNamespace).List(o.t.Context(), metav1.ListOptions{})
	must(o.t, err)
	var names []string
	for _, ds := range sets.Items {
		names = append(names, ds.Name)
		want := int32(1)
		if ds.Name == "nvidia-device-plugin-mps-control-daemon" {
			want = 0 // for nodes that share GPUs by MPS
		}
		if s := ds.Status; s.DesiredNumberScheduled != want || s.NumberReady != want || s.UpdatedNumberScheduled != want {
			o.t.Errorf("DaemonSet %s: %d wanted, %d up to date, %d ready", ds.Name, s.DesiredNumberScheduled, s.UpdatedNumberScheduled, s.NumberReady)
		}
	}
	want := []string{"gpu-feature-discovery", "nfd-worker", "nvidia-dcgm-exporter", "nvidia-device-plugin-daemonset",
		"nvidia-device-plugin-mps-control-daemon", "nvidia-operator-validator"}
	if slices.Sort(names); !slices.Equal(names, want) {
		o.t.Errorf("the DaemonSets are %v, want %v", names, want)
	}
	validator := o.operand("app=nvidia-operator-validator")
	for _, c := range []string{"driver-validation", "toolkit-validation", "cuda-validation", "plugin-validation"} {
		if !slices.ContainsFunc(validator.Status.InitContainerStatuses, func(s corev1.ContainerStatus) bool {
			return s.Name == c && s.State.Terminated != nil && s.State.Terminated.ExitCode == 0
		}) {
			o.t.Errorf("the validator's %s has not succeeded", c)
		}
	}
	monitor, err := o.dynamic.Resource(schema.GroupVersionResource{Group: "monitoring.coreos.com", Version: "v1", Resource: "servicemonitors"}).
		Namespace(operatorNamespace).Get(o.t.Context(), "nvidia-dcgm-exporter", metav1.GetOptions{})
	must(o.t, err)
	endpoints, _, err := unstructured.NestedSlice(monitor.Object, "spec", "endpoints")
	must(o.t, err)
	if endpoint, ok := endpoints[0].(map[string]any); !ok || endpoint["port"] != "gpu-metrics" || endpoint["interval"] != "15s" {
		o.t.Errorf("the exporter's ServiceMonitor has the endpoints %v", endpoints)
	}
}

func imagesAreOurs(o operatorBox) {
	table, err := component.LoadTable(assets.FS())
	must(o.t, err)
	operator, ok := table.Get("gpu-operator")
	if !ok {
		o.t.Fatal("the component table has no gpu-operator")
	}
	known := map[string]bool{}
	for _, image := range operator.Images {
		known[image.Reference] = true
	}
	pods, err := o.kube.CoreV1().Pods(operatorNamespace).List(o.t.Context(), metav1.ListOptions{})
	must(o.t, err)
	if len(pods.Items) < 9 {
		o.t.Errorf("only %d pods", len(pods.Items))
	}
	for _, p := range pods.Items {
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			if !known[c.Image] {
				o.t.Errorf("%s/%s runs %s, which llmbox does not list", p.Name, c.Name, c.Image)
			}
		}
	}
}

// resourcesArrive compares what the component table says of the operands with what
// their pods have, and looks for containers that ask for nothing.
func resourcesArrive(o operatorBox) {
	table, err := component.LoadTable(assets.FS())
	must(o.t, err)
	operator, _ := table.Get("gpu-operator")
	for _, operand := range operator.Operands {
		ds, err := o.kube.AppsV1().DaemonSets(operatorNamespace).Get(o.t.Context(), operand.Name, metav1.GetOptions{})
		if err != nil {
			o.t.Errorf("operand %s: %v", operand.Name, err)
			continue
		}
		var cpu, memory int64
		for _, c := range ds.Spec.Template.Spec.Containers {
			cpu += c.Resources.Requests.Cpu().MilliValue()
			memory += c.Resources.Requests.Memory().Value()
		}
		if cpu != operand.CPUMillis || memory != operand.MemoryBytes {
			o.t.Errorf("%s asks for %dm and %d bytes, the component table says %dm and %d", operand.Name, cpu, memory, operand.CPUMillis, operand.MemoryBytes)
		}
	}
	pods, err := o.kube.CoreV1().Pods(operatorNamespace).List(o.t.Context(), metav1.ListOptions{})
	must(o.t, err)
	for _, p := range pods.Items {
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() || c.Resources.Limits.Memory().IsZero() {
				o.t.Errorf("%s/%s has requests %v and limits %v", p.Name, c.Name, c.Resources.Requests, c.Resources.Limits)
			}
		}
	}
}

func runtimeClassIsTaken(o operatorBox) {
	class, err := o.kube.NodeV1().RuntimeClasses().Get(o.t.Context(), "nvidia", metav1.GetOptions{})
	must(o.t, err)
	if class.Handler != "nvidia" || len(class.OwnerReferences) != 1 || class.OwnerReferences[0].Kind != "ClusterPolicy" {
		o.t.Errorf("the RuntimeClass has the handler %q and the owners %v", class.Handler, class.OwnerReferences)
	}
}

func exporterServes(o operatorBox) {
	csv, err := fs.ReadFile(assets.FS(), "charts/gpu-operator/files/dcgm-metrics.csv")
	must(o.t, err)
	raw, err := o.kube.CoreV1().Services(operatorNamespace).ProxyGet("http", "nvidia-dcgm-exporter", "9400", "metrics", nil).DoRaw(o.t.Context())
	must(o.t, err)
	text := string(raw)
	for _, line := range regexp.MustCompile(`(?m)^(DCGM_\w+), (gauge|counter),`).FindAllStringSubmatch(string(csv), -1) {
		sample := regexp.MustCompile(`(?m)^` + line[1] + `\{gpu="0",UUID="GPU-[^"]+",.*modelName="NVIDIA A100-SXM4-80GB",Hostname="[^"]+",DCGM_FI_DRIVER_VERSION="[0-9.]+".*\} [0-9.]+$`)
		if !sample.MatchString(text) {
			o.t.Errorf("no sample of %s", line[1])
		}
	}
	if o.t.Failed() {
		o.t.Log(text)
	}
}

func modelHasGPU(o operatorBox) {
	pods, err := o.kube.CoreV1().Pods("llm").List(o.t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=model-server"})
	must(o.t, err)
	if len(pods.Items) != 1 {
		o.t.Fatalf("there are %d model pods", len(pods.Items))
	}
	pod := pods.Items[0]
	if got := pod.Spec.Containers[0].Resources.Limits["nvidia.com/gpu"]; got.Value() != 1 {
		o.t.Errorf("the container has %s GPUs", got.String())
	}
	// The exporter has asked kubelet whose GPU it is.
	raw, err := o.kube.CoreV1().Services(operatorNamespace).ProxyGet("http", "nvidia-dcgm-exporter", "9400", "metrics", nil).DoRaw(o.t.Context())
	must(o.t, err)
	want := regexp.MustCompile(`(?m)^DCGM_FI_DEV_GPU_UTIL\{.*container="vllm",namespace="llm",pod="` + regexp.QuoteMeta(pod.Name) + `"\} `)
	if !want.Match(raw) {
		o.t.Errorf("no sample of the GPU names the pod %s", pod.Name)
	}
}

// workingSets prints what the operator and its real operands use.
func workingSets(o operatorBox) {
	raw, err := o.kube.CoreV1().RESTClient().Get().Resource("nodes").Name(o.node().Name).SubResource("proxy").Suffix("stats/summary").DoRaw(o.t.Context())
	must(o.t, err)
	var summary struct {
		Pods []struct {
			PodRef     struct{ Name, Namespace string }
			Containers []struct {
				Name   string
				Memory struct{ WorkingSetBytes int64 }
				CPU    struct{ UsageNanoCores int64 }
			}
		}
	}
	must(o.t, json.Unmarshal(raw, &summary))
	pods, err := o.kube.CoreV1().Pods(operatorNamespace).List(o.t.Context(), metav1.ListOptions{})
	must(o.t, err)
	requests := map[string]int64{}
	for _, p := range pods.Items {
		for _, c := range p.Spec.Containers {
			requests[p.Name+"/"+c.Name] = c.Resources.Requests.Memory().Value()
		}
	}
	seen := 0
	for _, p := range summary.Pods {
		if p.PodRef.Namespace != operatorNamespace {
			continue
		}
		for _, c := range p.Containers {
			request := requests[p.PodRef.Name+"/"+c.Name]
			o.t.Logf("%s: working set %.1f MiB, request %.1f MiB, %d m CPU", c.Name,
				float64(c.Memory.WorkingSetBytes)/(1<<20), float64(request)/(1<<20), c.CPU.UsageNanoCores/1e6)
			// A stand-in's says nothing of the real one.
			if c.Name != "nvidia-dcgm-exporter" && 11*c.Memory.WorkingSetBytes > 10*request {
				o.t.Errorf("%s has a working set of %d bytes and asks for %d", c.Name, c.Memory.WorkingSetBytes, request)
			}
			seen++
		}
	}
	if seen < 7 {
		o.t.Errorf("kubelet knows the memory of %d containers only", seen)
	}
}

// nothingIsLeft looks for what operator, operands and llmbox made.
func (o operatorBox) nothingIsLeft(before *corev1.Node, foreign bool) {
	ctx := o.t.Context()
	now := o.node()
	for name := range now.Labels {
		if _, ok := before.Labels[name]; !ok {
			o.t.Errorf("the node keeps the label %s", name)
		}
	}
	for name := range now.Annotations {
		if _, ok := before.Annotations[name]; !ok {
			o.t.Errorf("the node keeps the annotation %s", name)
		}
	}
	class, err := o.kube.NodeV1().RuntimeClasses().Get(ctx, "nvidia", metav1.GetOptions{})
	switch {
	case foreign && err != nil:
		o.t.Errorf("the RuntimeClass that was there before: %v", err)
	case foreign && (class.Handler != "nvidia" || len(class.OwnerReferences) > 0 || class.DeletionTimestamp != nil):
		o.t.Errorf("the RuntimeClass that was there before has the handler %q and the owners %v", class.Handler, class.OwnerReferences)
	case !foreign && !apierrors.IsNotFound(err):
		o.t.Errorf("llmbox's RuntimeClass is still there (%v)", err)
	}
	for _, r := range []schema.GroupVersionResource{
		{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterroles"},
		{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterrolebindings"},
		{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"},
		{Version: "v1", Resource: "namespaces"},
	} {
		list, err := o.dynamic.Resource(r).List(ctx, metav1.ListOptions{})
		must(o.t, err)
		for _, item := range list.Items {
			if regexp.MustCompile(`nvidia|gpu|nfd|llmbox`).MatchString(item.GetName()) {
				o.t.Errorf("%s %s is still there", r.Resource, item.GetName())
			}
		}
	}
	// On the node itself.
	out := run(o.t, time.Minute, filepath.Join(o.bin, "llmbox-lab"), "exec", "--dir", o.lab.Dir, "--root", "--", "sh", "-c",
		"find /run/nvidia /etc/kubernetes/node-feature-discovery -type f 2>/dev/null; true")
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "/") {
			o.t.Errorf("the node keeps %s", strings.TrimSpace(line))
		}
	}
}
