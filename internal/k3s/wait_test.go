package k3s

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

func TestJudgeReady(t *testing.T) {
	ready := View{
		Process: ProcessState{Running: true, PID: 1}, Kubeconfig: true, APIReady: true, NodesKnown: true,
		Nodes: []NodeState{{Name: "gpu-box", Ready: true}}, DNSReady: true, StorageClass: "local-path",
	}
	port := &Failure{Name: "port-in-use", Title: "taken", Fix: "free it", Line: "bind: address already in use"}
	for name, test := range map[string]struct {
		change   func(v *View, w *WaitFor)
		stage    Stage
		waiting  string
		hopeless string
	}{
		"ready":            {func(*View, *WaitFor) {}, StageReady, "ready", ""},
		"not started":      {func(v *View, _ *WaitFor) { v.Process = ProcessState{Detail: "activating (auto-restart)"} }, StageProcess, "k3s to start: activating (auto-restart)", ""},
		"ended, known why": {func(v *View, _ *WaitFor) { v.Process.Running, v.Log.Failure = false, port }, StageProcess, "k3s to start: taken (bind: address already in use)", ""},
		"crash loop":       {func(v *View, _ *WaitFor) { v.Log = LogVerdict{Failure: port, Same: 3} }, StageProcess, "taken", "port-in-use"},
		"crash loop, why?": {func(v *View, _ *WaitFor) { v.Log = LogVerdict{Message: "strange", Same: 4} }, StageProcess, "k3s ends again and again with the same error", "keeps-ending"},
		"two ends":         {func(v *View, _ *WaitFor) { v.Log = LogVerdict{Failure: port, Same: 2} }, StageReady, "ready", ""},
		"no kubeconfig":    {func(v *View, _ *WaitFor) { v.Kubeconfig, v.Log.Message = false, "Preparing" }, StageKubeconfig, "k3s to write its kubeconfig: Preparing", ""},
		"no API":           {func(v *View, _ *WaitFor) { v.APIReady, v.APIWhy = false, "etcd failed" }, StageAPI, "the API server: etcd failed", ""},
		"no node":          {func(v *View, _ *WaitFor) { v.Nodes = nil }, StageNode, "the node to register", ""},
		"another's node":   {func(v *View, _ *WaitFor) { v.Nodes[0].Name = "other" }, StageNode, "the node to register", ""},
		"nodes not seen":   {func(v *View, _ *WaitFor) { v.NodesKnown = false }, StageNode, "the node to register", ""},
		"node not ready": {func(v *View, _ *WaitFor) {
			v.Nodes = []NodeState{{Name: "gpu-box", Reason: "KubeletNotReady", Message: "cni plugin not initialized"}}
		}, StageNode, "node gpu-box: KubeletNotReady: cni plugin not initialized", ""},
		"well before the power was cut": {func(v *View, _ *WaitFor) {
			v.Began, v.Nodes[0].Heartbeat = time.Now().Add(-5*time.Second), time.Now().Add(-40*time.Second)
		}, StageNode, "the kubelet of node gpu-box to report", ""},
		"heard of since it started": {func(v *View, _ *WaitFor) {
			v.Began, v.Nodes[0].Heartbeat = time.Now().Add(-5*time.Second), time.Now().Add(-5*time.Second).Truncate(time.Second)
		}, StageReady, "ready", ""},
		"its clock was set meanwhile": {func(v *View, _ *WaitFor) {
			v.Began, v.Nodes[0].Heartbeat = time.Now().Add(-time.Hour), time.Now().Add(-2*time.Hour)
		}, StageReady, "ready", ""},
		"any name":          {func(_ *View, w *WaitFor) { w.NodeName = "" }, StageReady, "ready", ""},
		"no DNS":            {func(v *View, _ *WaitFor) { v.DNSReady, v.DNSWhy = false, "ImagePullBackOff: x" }, StageDNS, "CoreDNS: ImagePullBackOff: x", ""},
		"DNS not wanted":    {func(v *View, w *WaitFor) { v.DNSReady, w.NoDNS = false, true }, StageReady, "ready", ""},
		"no storage":        {func(v *View, _ *WaitFor) { v.StorageClass = "" }, StageStorage, "a default StorageClass", ""},
		"no storage wanted": {func(v *View, w *WaitFor) { v.StorageClass, w.NoStorage = "", true }, StageReady, "ready", ""},
		"an agent":          {func(v *View, w *WaitFor) { v.StorageClass, v.DNSReady, w.Role = "", false, Agent }, StageReady, "ready", ""},
	} {
		v, w := ready, WaitFor{NodeName: "gpu-box"}
		v.Nodes = append([]NodeState(nil), ready.Nodes...)
		test.change(&v, &w)
		got := JudgeReady(v, w)
		hopeless := ""
		if got.Hopeless != nil {
			hopeless = got.Hopeless.Name
		}
		if got.Stage != test.stage || got.Waiting != test.waiting || hopeless != test.hopeless {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// apiServer answers as a starting API server does: more at each look.
type apiServer struct {
	mu      sync.Mutex
	looks   int
	ready   int
	node    int
	dns     int
	storage int
	server  *httptest.Server
}

func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	answer := func(v any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v)
	}
	missing := func() {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		answer(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound})
	}
	switch r.URL.Path {
	case "/readyz":
		a.looks++
		if a.looks < a.ready {
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = fmt.Fprint(w, "[+]ping ok\n[-]poststarthook/rbac/bootstrap-roles failed: not finished\nreadyz check failed\n")
			return
		}
		_, _ = fmt.Fprint(w, "ok")
	case "/api/v1/nodes/gpu-box":
		if a.looks < a.node {
			missing()
			return
		}
		answer(corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{Name: "gpu-box"},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}})
	case "/apis/apps/v1/namespaces/kube-system/deployments/coredns":
		d := appsv1.Deployment{TypeMeta: metav1.TypeMeta{Kind: "Deployment", APIVersion: "apps/v1"}, ObjectMeta: metav1.ObjectMeta{Name: "coredns", Generation: 1}}
		if a.looks >= a.dns {
			d.Status = appsv1.DeploymentStatus{ObservedGeneration: 1, AvailableReplicas: 1}
		}
		answer(d)
	case "/api/v1/namespaces/kube-system/pods":
		answer(corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, Items: []corev1.Pod{{Status: corev1.PodStatus{
			ContainerStatuses: []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "no such host"}}}},
		}}}})
	case "/apis/storage.k8s.io/v1/storageclasses":
		list := storagev1.StorageClassList{TypeMeta: metav1.TypeMeta{Kind: "StorageClassList", APIVersion: "storage.k8s.io/v1"}, Items: []storagev1.StorageClass{{ObjectMeta: metav1.ObjectMeta{Name: "other"}}}}
		if a.looks >= a.storage {
			list.Items = append(list.Items, storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "local-path", Annotations: map[string]string{defaultClass: "true"}}})
		}
		answer(list)
	default:
		missing()
	}
}

func startAPI(t *testing.T, m *Machine, a *apiServer) {
	t.Helper()
	a.server = httptest.NewTLSServer(a)
	t.Cleanup(a.server.Close)
	config := clientcmdapi.NewConfig()
	config.Clusters["default"] = &clientcmdapi.Cluster{Server: a.server.URL, CertificateAuthorityData: certificate(a.server)}
	config.AuthInfos["default"] = &clientcmdapi.AuthInfo{Token: "t"}
	config.Contexts["default"] = &clientcmdapi.Context{Cluster: "default", AuthInfo: "default"}
	config.CurrentContext = "default"
	data, err := clientcmd.Write(*config)
	if err != nil {
		t.Fatal(err)
	}
	put(t, m, Kubeconfig, string(data))
}

// stillService is a service in a fixed state.
type stillService struct {
	Service
	state ProcessState
	lines []Line
}

func (s *stillService) State(context.Context) (ProcessState, error)      { return s.state, nil }
func (s *stillService) Lines(context.Context, time.Time) ([]Line, error) { return s.lines, nil }

func TestWaitingSaysWhatFor(t *testing.T) {
	m, _, _ := fakeMachine(t)
	startAPI(t, m, &apiServer{ready: 2, node: 3, dns: 4, storage: 5})
	svc := &stillService{state: ProcessState{Running: true, PID: 1}}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var said []string
	if err := m.Wait(ctx, svc, WaitFor{NodeName: "gpu-box"}, time.Now(), m.NewProber(Kubeconfig), func(p Progress) { said = append(said, p.Message) }); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"waiting for the API server: poststarthook/rbac/bootstrap-roles failed: not finished", "waiting for the node to register",
		"waiting for CoreDNS: ErrImagePull: no such host", "waiting for a default StorageClass", "k3s is ready",
	}
	if strings.Join(said, "\n") != strings.Join(want, "\n") {
		t.Errorf("said\n%s", strings.Join(said, "\n"))
	}
}

func TestWaitingEnds(t *testing.T) {
	m, _, _ := fakeMachine(t)
	svc := &stillService{state: ProcessState{Running: true, PID: 1}, lines: []Line{{PID: 1, Text: logLine("error", "Failed to set some node status fields: node IP: \"10.0.0.5\" not found in the host's network interfaces")}}}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := m.Wait(ctx, svc, WaitFor{NodeName: "gpu-box"}, time.Now(), m.NewProber(Kubeconfig), nil)
	var failed *NotReadyError
	if !errors.As(err, &failed) || !errors.Is(err, context.DeadlineExceeded) || failed.Hopeless || failed.Stage != StageKubeconfig || failed.Failure == nil || failed.Failure.Name != "address-gone" {
		t.Errorf("%v, %+v", err, failed)
	}
	// Where the API answers, what an earlier run ended with is not the reason.
	startAPI(t, m, &apiServer{node: 1000})
	ctx, cancel = context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	err = m.Wait(ctx, svc, WaitFor{NodeName: "gpu-box"}, time.Now(), m.NewProber(Kubeconfig), nil)
	if !errors.As(err, &failed) || failed.Stage != StageNode || failed.Failure != nil || failed.Fix() == "" {
		t.Errorf("%v, %+v", err, failed)
	}
	// A kubeconfig that is being written.
	put(t, m, Kubeconfig, "apiVersion: v1\nkind: Config\nclusters: [")
	v, err := m.view(t.Context(), svc, WaitFor{}, time.Now(), m.NewProber(Kubeconfig))
	if err != nil || v.Kubeconfig || v.APIWhy == "" {
		t.Errorf("%+v, %v", v, err)
	}
}

func certificate(s *httptest.Server) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}
