package helmchart

import (
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/llmbox-dev/llmbox/internal/chart"
)

// TestEngineWithHelmController runs the engine against the real helm-controller on a
// real node, whose Jobs run the real Helm 4. It needs root and what
// `make lab-node-full` builds.
func TestEngineWithHelmController(t *testing.T) {
	if os.Getenv("LLMBOX_E2E") != "1" {
		t.Skip("starts a real node; set LLMBOX_E2E=1 as root")
	}
	for _, name := range []string{"helm-controller", "helm4", "helm-job-standin", "kubelet"} {
		labProgram(t, name)
	}
	kubeconfig := startLab(t, "--size", "node", "--helm-controller", "--model", "")
	f := &fixture{log: slog.New(slog.NewTextHandler(testWriter{t}, nil))}
	f.client = connect(t, kubeconfig, nil)
	f.engine = New(f.client, Options{Bounds: testBounds()}, f.log)
	f.jobsMade = countJobs(t, f)
	_, err := f.client.Kube.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: testNamespace}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool {
		there, err := Detect(t.Context(), f.client)
		return err == nil && there
	})
	for _, tt := range []struct {
		name string
		run  func(*testing.T, *fixture)
	}{
		{"install, upgrade, uninstall", testLifecycle},
		{"failed install, then right values", testFailedInstall},
		{"failure before any record", testRefused},
		{"pod killed in the middle", testPodKilled},
		{"switch to the other engine and back", testSwitch},
		{"a HelmChart of somebody else", testForeign},
		{"run cut off before its end", testCutOff},
	} {
		t.Run(tt.name, func(t *testing.T) { tt.run(t, f) })
	}
}

// countJobs counts the Jobs that come into being in the engine's namespace.
func countJobs(t *testing.T, f *fixture) func(string) int {
	t.Helper()
	var mu sync.Mutex
	begun := map[string]int{}
	factory := informers.NewSharedInformerFactoryWithOptions(f.client.Kube, 0, informers.WithNamespace(Namespace))
	jobs := factory.Batch().V1().Jobs().Informer()
	if _, err := jobs.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(obj any) {
		mu.Lock()
		defer mu.Unlock()
		if job, ok := obj.(*batchv1.Job); ok {
			begun[job.Name]++
		}
	}}); err != nil {
		t.Fatal(err)
	}
	factory.Start(t.Context().Done())
	factory.WaitForCacheSync(t.Context().Done())
	return func(name string) int {
		mu.Lock()
		defer mu.Unlock()
		return begun[name]
	}
}

// testPodKilled takes the Job's pod away while Helm waits for a hook, as a node that
// loses power does, and goes on from what that leaves.
func testPodKilled(t *testing.T, f *fixture) {
	const name = "powerless"
	ended := make(chan error, 1)
	go func() {
		_, err := f.engine.Apply(t.Context(), sample(t, name, map[string]any{"slow": true, "extra": true}))
		ended <- err
	}()
	eventually(t, func() bool {
		record, err := f.engine.Current(t.Context(), testNamespace, name)
		return err == nil && record.Status == "pending-install"
	})
	pods := f.client.Kube.CoreV1().Pods(Namespace)
	list, err := pods.List(t.Context(), metav1.ListOptions{LabelSelector: chartLabel + "=" + name})
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("%d pods, %v", len(list.Items), err)
	}
	if err := pods.Delete(t.Context(), list.Items[0].Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
		t.Fatal(err)
	}
	select {
	case err = <-ended:
		t.Logf("the run that met the kill ended with %v", err)
	case <-time.After(3 * time.Minute):
		t.Fatal("the run that met the kill did not end")
	}
	// It goes on from there by itself, and the hook runs anew.
	if err != nil {
		t.Errorf("the run that met the kill = %v", err)
	}
	out, err := f.engine.Apply(t.Context(), sample(t, name, map[string]any{"colour": "grey"}))
	if err != nil || out.Change != chart.Upgraded {
		t.Fatalf("the run after it = %+v, %v", out, err)
	}
	if f.colour(t, name) != "grey" || f.colour(t, name+"-extra") != "" {
		t.Errorf("colour %s, and extra is there", f.colour(t, name))
	}
	f.uninstall(t, name)
}
