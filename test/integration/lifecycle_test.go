package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/installer"
)

const foreignCRD = "servicemonitors.monitoring.coreos.com"

func crds() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
}

// TestLifecycle follows one box on a cluster in which somebody else lives too:
// interrupted, installed, installed again, broken and mended, removed.
func TestLifecycle(t *testing.T) {
	l := useLab(t)
	l.clean(t)
	foreign := makeForeign(t, l)
	stage := func(name string, fn func(t *testing.T)) {
		if !t.Run(name, fn) {
			t.Fatalf("what follows builds on %q", name)
		}
	}
	stage("interrupted", func(t *testing.T) { interrupted(t, l) })
	stage("installed", func(t *testing.T) { installed(t, l) })
	t.Run("the same objects as on a GPU machine", func(t *testing.T) { sameAsPlanned(t, l) })
	t.Run("again", func(t *testing.T) { again(t, l) })
	t.Run("records left by a crash", func(t *testing.T) { repaired(t, l) })
	t.Run("a Deployment that somebody deleted", func(t *testing.T) { deleted(t, l) })
	t.Run("foreign things while installed", func(t *testing.T) { foreign.check(t) })
	stage("removed", func(t *testing.T) { removed(t, l) })
	t.Run("foreign things", func(t *testing.T) { foreign.check(t); foreign.orphaned(t) })
	t.Run("removed again", func(t *testing.T) { removed(t, l) })
}

// foreigner is what somebody else has in the cluster before llmbox comes.
type foreigner struct {
	lab    *lab
	before map[string]string
}

func makeForeign(t *testing.T, l *lab) foreigner {
	t.Helper()
	ctx := t.Context()
	kube := l.client.Kube
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "somebody-else"}}
	settings := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "settings", Namespace: ns.Name}, Data: map[string]string{"key": "value"}}
	class := &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "nvidia"}, Handler: "nvidia"}
	all, err := cluster.LoadCRDs(assets.FS(), []string{"prometheus"})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(o *unstructured.Unstructured) bool { return o.GetName() == foreignCRD })
	if i < 0 {
		t.Fatalf("%s is not among the embedded CRDs", foreignCRD)
	}
	crd := all[i].DeepCopy()
	crd.SetLabels(map[string]string{"app.kubernetes.io/managed-by": "somebody-else"})
	_, err1 := kube.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
	_, err2 := kube.CoreV1().ConfigMaps(ns.Name).Create(ctx, settings, metav1.CreateOptions{})
	_, err3 := kube.NodeV1().RuntimeClasses().Create(ctx, class, metav1.CreateOptions{})
	_, err4 := l.client.Dynamic.Resource(crds()).Create(ctx, crd, metav1.CreateOptions{})
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		if err := errors.Join(
			kube.CoreV1().Namespaces().Delete(ctx, ns.Name, metav1.DeleteOptions{}),
			ifThere(kube.NodeV1().RuntimeClasses().Delete(ctx, class.Name, metav1.DeleteOptions{})),
			l.client.Dynamic.Resource(crds()).Delete(ctx, foreignCRD, metav1.DeleteOptions{}),
		); err != nil {
			t.Errorf("removing what somebody else had: %v", err)
		}
	})
	f := foreigner{lab: l}
	f.before = f.look(t)
	return f
}

func ifThere(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// look notes of each foreign object which one it is and what it says.
func (f foreigner) look(t *testing.T) map[string]string {
	t.Helper()
	ctx := t.Context()
	seen := map[string]string{}
	for _, target := range []struct {
		gvr             schema.GroupVersionResource
		namespace, name string
	}{
		{schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}, "", "somebody-else"},
		{schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}, "somebody-else", "settings"},
		{schema.GroupVersionResource{Group: "node.k8s.io", Version: "v1", Resource: "runtimeclasses"}, "", "nvidia"},
		{crds(), "", foreignCRD},
	} {
		o, err := f.lab.client.Dynamic.Resource(target.gvr).Namespace(target.namespace).Get(ctx, target.name, metav1.GetOptions{})
		if err != nil {
			seen[target.gvr.Resource] = err.Error()
			continue
		}
		o.SetManagedFields(nil)
		o.SetResourceVersion("")
		delete(o.Object, "status")
		if target.gvr.Resource == "runtimeclasses" {
			seen[target.gvr.Resource] = f.class(o)
			continue
		}
		raw, err := o.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		seen[target.gvr.Resource] = string(raw)
	}
	return seen
}

// class is what matters of a RuntimeClass. The GPU Operator makes itself the
// owner of one that is there, so owners count only while it is not installed, and
// one that was put back is as good as the former. It also writes its own label over
// those that were there, which llmbox can't keep it from (the class here had none).
func (f foreigner) class(o *unstructured.Unstructured) string {
	handler, _, _ := unstructured.NestedString(o.Object, "handler")
	labels := maps.Clone(o.GetLabels())
	if labels["app.kubernetes.io/component"] == "gpu-operator" {
		delete(labels, "app.kubernetes.io/component")
	}
	text := fmt.Sprintf("handler %s, labels %v", handler, labels)
	for _, owner := range o.GetOwnerReferences() {
		if owner.Kind != "ClusterPolicy" {
			text += ", owned by " + owner.Kind
		}
	}
	return text
}

func (f foreigner) check(t *testing.T) {
	t.Helper()
	for what, now := range f.look(t) {
		if now != f.before[what] {
			t.Errorf("the foreign object among %s changed:\nbefore %s\nnow    %s", what, f.before[what], now)
		}
	}
}

// interrupted stops an install with Ctrl-C once releases are being applied.
func interrupted(t *testing.T, l *lab) {
	ctx, cancel := context.WithTimeout(t.Context(), installBound)
	defer cancel()
	cmd := l.command(ctx, l.installArgs("--output", "json")...)
	var stderr bytes.Buffer
	signalled := make(chan time.Time, 1)
	watch := &onText{text: []byte(`"step":"component/keda/release"`), do: func() {
		signalled <- time.Now()
		_ = cmd.Process.Signal(syscall.SIGINT)
	}}
	cmd.Stdout, cmd.Stderr = watch, &stderr
	err := cmd.Run()
	ended := time.Now()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	res := result{code: cmd.ProcessState.ExitCode(), stdout: watch.all.String(), stderr: stderr.String()}
	if res.code != exitInterrupted {
		t.Fatalf("want exit code %d: %s", exitInterrupted, res)
	}
	if took := ended.Sub(<-signalled); took > time.Minute {
		t.Errorf("it went on for %s after Ctrl-C", took)
	}
	list := events(t, res.stdout)
	last := list[len(list)-1]
	if last.Type != event.RunDone || last.Summary == nil || last.Summary.Outcome != "interrupted" {
		t.Errorf("the last event is %+v", last)
	}
	// What was begun was finished: no record says that something is under way.
	for name, status := range l.records(t) {
		if strings.HasPrefix(status, "pending") {
			t.Errorf("release record %s was left %s", name, status)
		}
	}
}

// onText collects what is written and acts once when the text has come by.
type onText struct {
	all  bytes.Buffer
	text []byte
	do   func()
}

func (o *onText) Write(p []byte) (int, error) {
	n, err := o.all.Write(p)
	if o.do != nil && bytes.Contains(o.all.Bytes(), o.text) {
		o.do()
		o.do = nil
	}
	return n, err
}

func installed(t *testing.T, l *lab) {
	list := l.install(t)
	last := list[len(list)-1]
	if last.Type != event.RunDone || last.Summary == nil || last.Summary.Outcome != "done" || last.Summary.Endpoint == "" {
		t.Fatalf("the last event is %+v", last)
	}
	plan := buildPlan(t, l.client.Version, "a10", unchanged)
	for _, s := range plan.Steps {
		if _, ok := done(list, s.Path()); !ok {
			t.Errorf("%s did not end well", s.Path())
		}
	}
	gates := 0
	for _, s := range plan.Steps {
		gates += len(s.Gates)
	}
	if last.Summary.GatesTotal != gates {
		t.Errorf("%d gates were passed, the table has %d", last.Summary.GatesTotal, gates)
	}
	if last.Summary.GatesSimulated != gates {
		t.Errorf("%d of %d gates are said to be simulated; nothing real runs here", last.Summary.GatesSimulated, gates)
	}
	if res := l.run(t, quickBound, "status", "--kubeconfig", l.Kubeconfig); res.code != 0 {
		t.Errorf("status of an installed box: %s", res)
	}
}

// sameAsPlanned compares what was really applied here with what a plan for a
// machine with that GPU renders: the port is the only thing that was said.
func sameAsPlanned(t *testing.T, l *lab) {
	plan := buildPlan(t, "v1.36.4+k3s1", "a10", func(layer *config.Layer) error {
		return layer.Set("gateway.port", l.GatewayPort, config.Flag("port"))
	})
	for _, s := range plan.Steps {
		if s.Release == nil {
			continue
		}
		_, rel := l.lastRecord(t, s.Namespace, s.Name)
		manifest, _ := rel["manifest"].(string)
		applied, err := chart.Decode(strings.NewReader(manifest))
		if err != nil {
			t.Fatal(err)
		}
		compareObjects(t, s.Name, index(t, s.Objects), index(t, applied))
	}
}

func index(t *testing.T, objects []*unstructured.Unstructured) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, o := range objects {
		raw, err := o.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		key := o.GetKind() + " " + strings.TrimPrefix(o.GetNamespace()+"/"+o.GetName(), "/")
		if _, twice := out[key]; twice {
			t.Errorf("%s is rendered twice", key)
		}
		out[key] = string(raw)
	}
	return out
}

func compareObjects(t *testing.T, where string, want, got map[string]string) {
	t.Helper()
	both := maps.Clone(want)
	maps.Copy(both, got)
	for _, key := range slices.Sorted(maps.Keys(both)) {
		if want[key] != got[key] {
			t.Errorf("%s: %s differs:\nplanned %s\napplied %s", where, key, want[key], got[key])
		}
	}
}

// again runs the install a second time without saying anything: the choices of
// the first run hold and nothing changes.
func again(t *testing.T, l *lab) {
	before, versions := l.records(t), l.resourceVersions(t)
	began := time.Now()
	res := l.run(t, installBound, "install", "--kubeconfig", l.Kubeconfig, "--output", "json")
	if res.code != 0 {
		t.Fatal(res)
	}
	took := time.Since(began)
	list := events(t, res.stdout)
	for _, s := range buildPlan(t, l.client.Version, "a10", unchanged).Steps {
		e, ok := done(list, s.Path())
		if !ok || e.Message != "unchanged" {
			t.Errorf("%s: %q, want \"unchanged\"", s.Path(), e.Message)
		}
	}
	if after := l.records(t); !maps.Equal(before, after) {
		t.Errorf("release records changed:\nbefore %v\nafter  %v", before, after)
	}
	for key, version := range l.resourceVersions(t) {
		if versions[key] != version {
			t.Errorf("%s was written to", key)
		}
	}
	if took > 30*time.Second {
		t.Errorf("a run that changes nothing took %s", took)
	}
	t.Logf("took %s", took)
}

// resourceVersions notes the state of the objects that llmbox applies itself.
func (l *lab) resourceVersions(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	list, err := l.client.Dynamic.Resource(crds()).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		out["CRD "+list.Items[i].GetName()] = list.Items[i].GetResourceVersion()
	}
	namespaces, err := l.client.Kube.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range namespaces.Items {
		out["Namespace "+namespaces.Items[i].Name] = namespaces.Items[i].ResourceVersion
	}
	return out
}

// deleted takes a Deployment away behind llmbox's back: status must say so, and
// the next install brings it back.
func deleted(t *testing.T, l *lab) {
	deployments := l.client.Kube.AppsV1().Deployments("keda")
	list, err := deployments.List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) == 0 {
		t.Fatalf("%d Deployments in keda, %v", len(list.Items), err)
	}
	name := list.Items[0].Name
	if err := deployments.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	res := l.run(t, quickBound, "status", "--kubeconfig", l.Kubeconfig)
	if res.code != exitNotReady || !strings.Contains(res.stdout, name) {
		t.Errorf("status must exit %d and name Deployment %s: %s", exitNotReady, name, res)
	}
	ctx, cancel := context.WithTimeout(t.Context(), quickBound)
	defer cancel()
	cmd := l.command(ctx, "install", "--kubeconfig", l.Kubeconfig)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("install does not bring Deployment %s back: %v\n%s", name, err, tail(string(out)))
		// What follows needs a whole box.
		list.Items[0].ResourceVersion = ""
		if _, err := deployments.Create(t.Context(), &list.Items[0], metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Error(err)
		}
	}
}

// removed uninstalls and looks for anything that is left.
func removed(t *testing.T, l *lab) {
	res := l.run(t, uninstallBound, "uninstall", "--yes", "--kubeconfig", l.Kubeconfig, "--output", "json")
	if res.code != 0 {
		t.Fatal(res)
	}
	t.Logf("took %s", res.took)
	for _, e := range events(t, res.stdout) {
		if e.Type == event.StepDone && e.ElapsedMS > 3000 {
			t.Logf("%s took %d ms: %s", e.Step, e.ElapsedMS, e.Message)
		}
		if e.Type == event.Log && strings.HasPrefix(e.Message, "warn") {
			t.Errorf("an undisturbed uninstall warns: %s", e.Message)
		}
	}
	l.untouched(t)
	ctx := t.Context()
	namespaces, err := l.client.Kube.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	own := []string{"default", "kube-system", "kube-public", "kube-node-lease", "somebody-else"}
	for i := range namespaces.Items {
		if !slices.Contains(own, namespaces.Items[i].Name) {
			t.Errorf("namespace %s is left", namespaces.Items[i].Name)
		}
	}
	list, err := l.client.Dynamic.Resource(crds()).List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		if name := list.Items[i].GetName(); name != foreignCRD && list.Items[i].GetDeletionTimestamp() == nil {
			t.Errorf("CRD %s is left", name)
		}
	}
	for _, gvr := range []schema.GroupVersionResource{
		{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "validatingwebhookconfigurations"},
		{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "mutatingwebhookconfigurations"},
		{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "validatingadmissionpolicies"},
	} {
		hooks, err := l.client.Dynamic.Resource(gvr).List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for i := range hooks.Items {
			t.Errorf("%s %s is left", gvr.Resource, hooks.Items[i].GetName())
		}
	}
}

// state is a journal of the tests' own run.
func (l *lab) state(t *testing.T) *installer.State {
	t.Helper()
	state, _, _, err := installer.LoadState(t.Context(), l.client.Kube, logger(t))
	if err != nil {
		t.Fatal(err)
	}
	return state
}

func logger(t *testing.T) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

// orphaned checks that no object waits to be deleted together with an owner
// that is gone.
func (f foreigner) orphaned(t *testing.T) {
	t.Helper()
	class, err := f.lab.client.Kube.NodeV1().RuntimeClasses().Get(t.Context(), "nvidia", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(class.OwnerReferences) > 0 {
		t.Errorf("RuntimeClass nvidia is owned by %v", class.OwnerReferences)
	}
}

func list(ctx context.Context, cfg *rest.Config) error {
	kube, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	_, err = kube.CoreV1().Services(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{})
	return err
}
