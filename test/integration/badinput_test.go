package integration

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/installer"
)

// The exit codes as docs/exit-codes.md has them.
const (
	exitUsage       = 2
	exitCheckFailed = 3
	exitNotReady    = 5
	exitLocked      = 6
	exitInterrupted = 130
)

// TestBadInput gives llmbox what people get wrong. Each must end in the right
// exit code and a text that names the place and the way out, and must leave the
// cluster as it was.
func TestBadInput(t *testing.T) {
	l := useLab(t)
	l.clean(t)
	dir := t.TempDir()
	cases := []struct {
		name string
		args []string
		code int
		// place and wayOut are sentences that stderr holds, all of them.
		place, wayOut []string
	}{
		{"malformed configuration", l.installArgs("--config", testdata("config/malformed.yaml")), exitUsage,
			[]string{"malformed.yaml:5"}, []string{"indent"}},
		{"unknown field", l.installArgs("--config", testdata("config/unknown-field.yaml")), exitUsage,
			[]string{"unknown-field.yaml:3", "gatway"}, []string{"gateway"}},
		{"duplicate key", l.installArgs("--config", testdata("config/duplicate-key.yaml")), exitUsage,
			[]string{"duplicate-key.yaml:5", "gateway"}, []string{"line 3"}},
		{"unknown component in the file", l.installArgs("--config", testdata("config/unknown-component.yaml")), exitUsage,
			[]string{"unknown-component.yaml:5", "components.kedda"}, []string{"keda"}},
		{"unknown component in a flag", l.installArgs("--without", "kedda"), exitUsage,
			[]string{"flag --without", "kedda"}, []string{"keda"}},
		{"no such configuration", l.installArgs("--config", filepath.Join(dir, "absent.yaml")), exitUsage,
			[]string{"absent.yaml"}, nil},
		{"several mistakes at once", l.installArgs("--config", testdata("config/several.yaml")), exitUsage,
			[]string{"several.yaml:4", "several.yaml:7"}, nil},
		{"value outside the schema in the file", l.installArgs("--config", testdata("config/unknown-value.yaml")), exitUsage,
			[]string{"components.keda", "nonsense"}, []string{"components.NAME.values", "values.yaml"}},
		{"need that is off", l.installArgs("--without", "keda"), exitUsage,
			[]string{"autoscale needs keda"}, []string{"external", "switch"}},
		{"chart value in a flag", l.installArgs("--set", "components.keda.values.nonsense=1"), exitUsage,
			[]string{"flag --set", "components.keda.values.nonsense"}, []string{"--config"}},
		{"chart that does not render", l.installArgs("--set", "components.keda.chart="+testdata("broken-chart")), exitUsage,
			[]string{"components.keda", "templates/config.yaml:6", "a message for a person"}, []string{"components.NAME.chart", "helm template"}},
		{"chart that can't be parsed", l.installArgs("--set", "components.keda.chart="+testdata("unparsable-chart")), exitUsage,
			[]string{"components.keda", "templates/config.yaml:6"}, []string{"helm template"}},
		{"chart that is not there", l.installArgs("--set", "components.keda.chart="+filepath.Join(dir, "no-chart")), exitUsage,
			[]string{"components.keda.chart", "no-chart"}, []string{"correct components.NAME.chart"}},
		{"--set without a value", l.installArgs("--set", "gateway.port"), exitUsage,
			[]string{"flag --set", "gateway.port"}, []string{"KEY=VALUE"}},
		{"--set of an unknown key", l.installArgs("--set", "gateway.prot=1"), exitUsage,
			[]string{"flag --set", "gateway.prot"}, []string{`did you mean "port"`}},
		{"--set of another type", l.installArgs("--set", "gateway.tls.enabled=perhaps"), exitUsage,
			[]string{"flag --set", "gateway.tls.enabled"}, []string{"true"}},
		{"port out of range", []string{"install", "--kubeconfig", l.Kubeconfig, "--port", "70000"}, exitUsage,
			[]string{"flag --port", "70000"}, []string{"65535"}},
		{"unknown GPU", l.installArgs("--gpu", "a11"), exitUsage,
			[]string{"flag --gpu", "a11"}, []string{"a10"}},
		{"unknown output", l.installArgs("--output", "yaml"), exitUsage, []string{"--output", "yaml"}, []string{"text or json"}},
		{"unknown flag", l.installArgs("--modle", "x"), exitUsage, []string{"--modle"}, []string{"install --help"}},
		{"unknown command", []string{"instal"}, exitUsage, []string{"instal"}, []string{"llmbox --help"}},
		{"unknown engine", l.installArgs("--engine", "tiller"), exitUsage, []string{"tiller"}, []string{"helmchart"}},
		{"argument too many", l.installArgs("now"), exitUsage, []string{"now"}, []string{"install --help"}},
		{"no such kubeconfig", []string{"install", "--kubeconfig", filepath.Join(dir, "absent")}, exitUsage,
			[]string{filepath.Join(dir, "absent")}, []string{"--kubeconfig FILE"}},
		{"kubeconfig that is none", []string{"install", "--kubeconfig", testdata("config/malformed.yaml")}, exitUsage,
			[]string{"malformed.yaml"}, []string{"--kubeconfig FILE"}},
		// An install without one is about the machine itself, which a test must not change.
		{"no kubeconfig at all", []string{"status"}, exitUsage, []string{"kubeconfig"}, []string{"--kubeconfig FILE"}},
		{"no such context", l.installArgs("--context", "elsewhere"), exitUsage, []string{"elsewhere"}, []string{"--context NAME"}},
		{"unreachable API server", []string{"install", "--kubeconfig", l.kubeconfigFor(t, dir, "closed", closedPort(t), "")}, exitCheckFailed,
			[]string{"can't be reached", "127.0.0.1:"}, []string{"get --raw /readyz"}},
		{"wrong credentials", []string{"install", "--kubeconfig", l.kubeconfigFor(t, dir, "stale", "", "no-such-token")}, exitCheckFailed,
			[]string{"does not accept these credentials"}, []string{"fetch new ones"}},
		{"only the right to look", []string{"install", "--kubeconfig", l.kubeconfigFor(t, dir, "viewer", "", l.tokenFor(t, "viewer", "view"))}, exitCheckFailed,
			[]string{"not allowed"}, []string{"cluster-admin"}},
		{"no right to create CRDs", []string{"install", "--kubeconfig", l.kubeconfigFor(t, dir, "no-crds", "", l.tokenFor(t, "no-crds", l.everythingButCRDs(t)))}, exitCheckFailed,
			[]string{"cluster.rights", "create customresourcedefinitions.apiextensions.k8s.io"}, []string{"cluster-admin"}},
		{"GPU too old", l.installArgs("--gpu", "t4"), exitCheckFailed, []string{"T4", "7.5", "8.0"}, []string{"Ampere"}},
		{"model too large", l.installArgs("--gpu", "l4", "--model", "Qwen/Qwen3-32B"), exitCheckFailed,
			[]string{"Qwen/Qwen3-32B", "MiB"}, nil},
		{"uninstall without a terminal", []string{"uninstall", "--kubeconfig", l.Kubeconfig}, exitUsage,
			[]string{"no terminal"}, []string{"--yes"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			res := l.run(t, quickBound, tc.args...)
			if res.code != tc.code {
				t.Errorf("exit code is %d, want %d", res.code, tc.code)
			}
			said := res.stderr + res.stdout // a failed check is told among the lines of the run
			for _, want := range slices.Concat(tc.place, tc.wayOut) {
				if !strings.Contains(said, want) {
					t.Errorf("what was said holds no %q", want)
				}
			}
			if strings.Contains(said, "panic:") || strings.Contains(said, "goroutine ") {
				t.Error("it panicked")
			}
			if t.Failed() {
				t.Log(res)
			}
		})
	}
	l.untouched(t)
}

// TestBadInputAsJSON checks that programs get the same account as people.
func TestBadInputAsJSON(t *testing.T) {
	l := useLab(t)
	l.clean(t)
	dir := t.TempDir()
	kubeconfig := l.kubeconfigFor(t, dir, "no-crds", "", l.tokenFor(t, "no-crds", l.everythingButCRDs(t)))
	res := l.run(t, quickBound, "install", "--kubeconfig", kubeconfig, "--output", "json")
	if res.code != exitCheckFailed {
		t.Fatal(res)
	}
	var named, ended bool
	for _, e := range events(t, res.stdout) {
		if e.Finding != nil && e.Finding.ID == "cluster.rights" {
			named = e.Finding.Severity == "fail" && strings.Contains(e.Finding.Measured, "customresourcedefinitions") && e.Finding.Fix != ""
		}
		ended = e.Type == event.RunDone && e.Summary != nil && e.Summary.Outcome == "failed" && e.Error != ""
	}
	if !named || !ended {
		t.Errorf("the finding is complete: %t, the last event is a failed run.done: %t\n%s", named, ended, res)
	}
	l.untouched(t)
}

// TestLocked checks that a second run keeps away from a cluster at which
// another one is at work, and goes on once that one has died.
func TestLocked(t *testing.T) {
	l := useLab(t)
	l.clean(t)
	ctx := t.Context()
	namespaces := l.client.Kube.CoreV1().Namespaces()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: installer.SystemNamespace, Labels: map[string]string{"app.kubernetes.io/managed-by": "llmbox"},
	}}
	if _, err := namespaces.Create(ctx, ns, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	who, seconds := "elsewhere/boot/1/1", int32(15)
	now := metav1.NewMicroTime(time.Now().Add(time.Minute))
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "llmbox-run", Namespace: installer.SystemNamespace},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &who, LeaseDurationSeconds: &seconds, RenewTime: &now},
	}
	leases := l.client.Kube.CoordinationV1().Leases(installer.SystemNamespace)
	if _, err := leases.Create(ctx, lease, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{l.installArgs(), {"uninstall", "--yes", "--kubeconfig", l.Kubeconfig}} {
		res := l.run(t, quickBound, args...)
		if res.code != exitLocked || !strings.Contains(res.stderr, "elsewhere/boot/1/1") || !strings.Contains(res.stderr, "15 seconds") {
			t.Errorf("%s while another run holds the lock: want exit %d, the holder and the way out\n%s", args[0], exitLocked, res)
		}
	}
	if crds := l.traces(t); len(crds) != 1 {
		t.Errorf("a run without the lock touched the cluster: %v", crds)
	}
	// The holder died a minute ago.
	held, err := leases.Get(ctx, "llmbox-run", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	past := metav1.NewMicroTime(time.Now().Add(-time.Minute))
	held.Spec.RenewTime = &past
	if _, err := leases.Update(ctx, held, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if res := l.run(t, uninstallBound, "uninstall", "--yes", "--kubeconfig", l.Kubeconfig); res.code != 0 {
		t.Errorf("an expired lock holds a run up: %s", res)
	}
	l.untouched(t)
}

// TestNeverReady waits for a component that is said to be there and is not. The
// table's timeouts are made for real downloads, so the plan's is shortened here.
func TestNeverReady(t *testing.T) {
	l := useLab(t)
	l.clean(t)
	plan := buildPlan(t, l.client.Version, "a10", func(layer *config.Layer) error {
		return layer.Set("components.prometheus.mode", config.ModeExternal, config.Flag("set"))
	})
	plan.CRDs, plan.Manifests, plan.IfAbsent = nil, nil, nil
	plan.Steps = slices.DeleteFunc(plan.Steps, func(s installer.Step) bool { return s.Name != "prometheus" && s.Name != "base" })
	for i := range plan.Steps {
		plan.Steps[i].NeededBy = slices.DeleteFunc(plan.Steps[i].NeededBy, func(n string) bool { return n != "prometheus" })
		if plan.Steps[i].Mode == component.External {
			plan.Steps[i].Timeout.Duration = 2 * time.Second
		}
	}
	var progress, failed string
	run := installer.NewRun(plan, l.client, nil, noSecrets{}, l.state(t), event.SinkFunc(func(e event.Event) {
		switch {
		case e.Type == event.StepProgress && strings.HasPrefix(e.Step, "component/prometheus"):
			progress = e.Message
		case e.Type == event.StepFailed && e.Step == "component/prometheus":
			failed = e.Error
		}
	}), logger(t))
	began := time.Now()
	err := run.Components(t.Context(), make(chan struct{}))
	if !errors.Is(err, installer.ErrNotReady) || time.Since(began) > time.Minute {
		t.Errorf("error after %s is %v, want %v", time.Since(began), err, installer.ErrNotReady)
	}
	for text, where := range map[string]string{progress: "the progress", failed: "the failure"} {
		if !strings.Contains(text, "prometheus") || !strings.Contains(text, "monitoring/llmbox") {
			t.Errorf("%s does not say what is waited for: %q", where, text)
		}
	}
	l.clean(t)
}

// noSecrets is a run's part about secrets for plans that have none.
type noSecrets struct{ installer.Secrets }

func (noSecrets) Ensure(context.Context) error { return nil }

func testdata(name string) string { return mustAbs(filepath.Join("testdata", name)) }

// closedPort is a loopback port on which nobody listens.
func closedPort(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	return "https://" + listener.Addr().String()
}

// kubeconfigFor writes a kubeconfig for the lab with another address or, instead
// of the client certificate, a token.
func (l *lab) kubeconfigFor(t *testing.T, dir, name, server, token string) string {
	t.Helper()
	cfg, err := clientcmd.LoadFromFile(l.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cfg.Clusters {
		if server != "" {
			c.Server = server
		}
	}
	if token != "" {
		for key := range cfg.AuthInfos {
			cfg.AuthInfos[key] = &clientcmdapi.AuthInfo{Token: token}
		}
	}
	file := filepath.Join(dir, name+".kubeconfig")
	if err := clientcmd.WriteToFile(*cfg, file); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// tokenFor makes a service account that holds one cluster role and nothing else.
func (l *lab) tokenFor(t *testing.T, name, role string) string {
	t.Helper()
	ctx := t.Context()
	kube := l.client.Kube
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "test-" + name, Namespace: metav1.NamespaceDefault}}
	if _, err := kube.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Create(ctx, account, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "test-" + name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account.Name, Namespace: account.Namespace}},
	}
	if _, err := kube.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		if err := errors.Join(
			kube.RbacV1().ClusterRoleBindings().Delete(ctx, binding.Name, metav1.DeleteOptions{}),
			kube.CoreV1().ServiceAccounts(account.Namespace).Delete(ctx, account.Name, metav1.DeleteOptions{}),
		); err != nil {
			t.Errorf("removing service account %s: %v", account.Name, err)
		}
	})
	got, err := kube.CoreV1().ServiceAccounts(account.Namespace).CreateToken(ctx, account.Name,
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// The authorizer reads bindings from a watch: wait until it has this one.
	deadline := time.Now().Add(30 * time.Second)
	for !l.mayList(t, got.Status.Token) {
		if time.Now().After(deadline) {
			t.Fatalf("role %s does not take effect for %s", role, account.Name)
		}
		time.Sleep(100 * time.Millisecond)
	}
	return got.Status.Token
}

// mayList tells whether the token may list services, which each role here allows.
func (l *lab) mayList(t *testing.T, token string) bool {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", l.kubeconfigFor(t, t.TempDir(), "probe", "", token))
	if err != nil {
		t.Fatal(err)
	}
	return list(t.Context(), cfg) == nil
}

// everythingButCRDs makes a cluster role that allows all of an install's work
// except bringing in CRDs.
func (l *lab) everythingButCRDs(t *testing.T) string {
	t.Helper()
	everything := []string{"*"}
	groups := []string{"", "apps", "batch", "rbac.authorization.k8s.io", "scheduling.k8s.io", "apiregistration.k8s.io",
		"admissionregistration.k8s.io", "storage.k8s.io", "coordination.k8s.io", "authorization.k8s.io", "node.k8s.io", "networking.k8s.io"}
	role := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("test-no-crds-%d", time.Now().UnixNano())},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: groups, Resources: everything, Verbs: everything},
			{APIGroups: []string{"apiextensions.k8s.io"}, Resources: everything, Verbs: []string{"get", "list", "watch"}},
		},
	}
	roles := l.client.Kube.RbacV1().ClusterRoles()
	if _, err := roles.Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := roles.Delete(context.WithoutCancel(t.Context()), role.Name, metav1.DeleteOptions{}); err != nil {
			t.Errorf("removing %s: %v", role.Name, err)
		}
	})
	return role.Name
}
