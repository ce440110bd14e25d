package k3s

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	// probeDeadline bounds one request: a starting API server takes its time.
	probeDeadline = 5 * time.Second
	// defaultClass marks the StorageClass that claims without one get.
	defaultClass = "storageclass.kubernetes.io/is-default-class"
)

// AgentKubeconfig is the kubelet's own, which a node without a server has.
func AgentKubeconfig(dataDir string) string { return path.Join(dataDir, "agent/kubelet.kubeconfig") }

// apiProber asks the API with a kubeconfig of this machine. k3s writes that anew when
// its certificates change, so it is read each time.
type apiProber struct {
	machine *Machine
	file    string

	mu     sync.Mutex
	read   []byte
	client kubernetes.Interface
}

// NewProber returns a prober that asks with that kubeconfig.
func (m *Machine) NewProber(kubeconfig string) Prober {
	return &apiProber{machine: m, file: kubeconfig}
}

func (p *apiProber) connect(ctx context.Context) (kubernetes.Interface, bool, error) {
	data, present, err := p.machine.read(ctx, p.file)
	if err != nil || !present || len(data) == 0 {
		return nil, false, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.client != nil && bytes.Equal(p.read, data) {
		return p.client, true, nil
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(data)
	if err != nil {
		// It is being written.
		return nil, false, fmt.Errorf("reading %s: %w", p.file, err)
	}
	config.Timeout = probeDeadline
	// The API is this machine's; a proxy has no business in between.
	config.Proxy = nil
	config.QPS, config.Burst = -1, -1
	config.UserAgent = "llmbox/k3s"
	config.WarningHandler = rest.NoWarnings{}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, true, fmt.Errorf("connecting to the API: %w", err)
	}
	p.read, p.client = data, client
	return client, true, nil
}

func (p *apiProber) Probe(ctx context.Context, v *View, w WaitFor) {
	client, written, err := p.connect(ctx)
	v.Kubeconfig = written
	if err != nil || client == nil {
		if err != nil {
			v.APIWhy = shown(err.Error())
		}
		return
	}
	body, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
	v.APIReady = err == nil && strings.TrimSpace(string(body)) == "ok"
	if !v.APIReady {
		v.APIWhy = notReadyWhy(body, err)
		return
	}
	p.nodes(ctx, client, v, w)
	if w.Role == Agent || !v.NodesKnown {
		return
	}
	if !w.NoDNS {
		v.DNSReady, v.DNSWhy = coreDNS(ctx, client)
	}
	if !w.NoStorage {
		v.StorageClass = defaultStorage(ctx, client)
	}
}

// notReadyWhy is the first check of /readyz that failed, or why nobody answers.
func notReadyWhy(body []byte, err error) string {
	for line := range strings.Lines(string(body)) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), "[-]"); ok {
			return shown(rest)
		}
	}
	if err == nil {
		return ""
	}
	var at *url.Error
	if errors.As(err, &at) {
		err = at.Err
	}
	return shown(err.Error())
}

func (p *apiProber) nodes(ctx context.Context, client kubernetes.Interface, v *View, w WaitFor) {
	var items []corev1.Node
	if w.NodeName != "" {
		// The only one that an agent may look at.
		node, err := client.CoreV1().Nodes().Get(ctx, w.NodeName, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return
		}
		if err == nil {
			items = append(items, *node)
		}
	} else {
		list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return
		}
		items = list.Items
	}
	v.NodesKnown = true
	for _, node := range items {
		state := NodeState{Name: node.Name, Reason: "NodeStatusUnknown"}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady {
				state.Ready, state.Reason, state.Message = c.Status == corev1.ConditionTrue, c.Reason, c.Message
				state.Heartbeat = c.LastHeartbeatTime.Time
			}
		}
		v.Nodes = append(v.Nodes, state)
	}
}

// coreDNS looks at the Deployment that k3s packages.
func coreDNS(ctx context.Context, client kubernetes.Interface) (bool, string) {
	const namespace, name, label = "kube-system", "coredns", "k8s-app=kube-dns"
	d, err := client.AppsV1().Deployments(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, "k3s has not created it yet"
	}
	if err != nil {
		return false, shown(err.Error())
	}
	if available(d) {
		return true, ""
	}
	pods, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: label})
	if err != nil {
		return false, shown(err.Error())
	}
	return false, podWhy(pods.Items)
}

func available(d *appsv1.Deployment) bool {
	return d.Status.ObservedGeneration >= d.Generation && d.Status.AvailableReplicas > 0
}

// podWhy says what a pod waits for.
func podWhy(pods []corev1.Pod) string {
	for _, pod := range pods {
		for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			if waiting := c.State.Waiting; waiting != nil {
				return shown(strings.TrimSuffix(waiting.Reason+": "+waiting.Message, ": "))
			}
		}
		for _, c := range pod.Status.Conditions {
			if c.Status == corev1.ConditionFalse && c.Message != "" {
				return shown(c.Message)
			}
		}
	}
	if len(pods) == 0 {
		return "no pod yet"
	}
	return "its pod starts"
}

func defaultStorage(ctx context.Context, client kubernetes.Interface) string {
	classes, err := client.StorageV1().StorageClasses().List(ctx, metav1.ListOptions{})
	if err != nil {
		return ""
	}
	i := slices.IndexFunc(classes.Items, func(c storagev1.StorageClass) bool { return c.Annotations[defaultClass] == "true" })
	if i < 0 {
		return ""
	}
	return classes.Items[i].Name
}
