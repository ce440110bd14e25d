package installer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestHolderGone(t *testing.T) {
	me, err := holder()
	if err != nil {
		t.Fatal(err)
	}
	// A process that has ended and been waited for.
	gone := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^$")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(me, "/")
	if len(parts) != 4 {
		t.Fatalf("holder is %q", me)
	}
	for _, tc := range []struct {
		name, who string
		want      bool
	}{
		{"this process", me, false},
		{"process that ended", fmt.Sprintf("%s/%s/%d/1", parts[0], parts[1], gone.Process.Pid), true},
		{"another process with the same id", fmt.Sprintf("%s/%s/%d/1", parts[0], parts[1], os.Getpid()), true},
		{"before the last boot", fmt.Sprintf("%s/former-boot/%s/%s", parts[0], parts[2], parts[3]), true},
		{"another machine", strings.Join([]string{"elsewhere", parts[1], "999999999", "1"}, "/"), false},
		{"no process id", strings.Join([]string{parts[0], parts[1], "x", "1"}, "/"), false},
		{"another form", "somebody", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := holderGone(tc.who); got != tc.want {
				t.Errorf("gone is %t for %q, want %t", got, tc.who, tc.want)
			}
		})
	}
}

func heldBy(who string, renewed time.Time) *coordinationv1.Lease {
	at := metav1.NewMicroTime(renewed)
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: leaseName, Namespace: SystemNamespace},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &who, RenewTime: &at},
	}
}

func TestLock(t *testing.T) {
	for _, tc := range []struct {
		name  string
		lease *coordinationv1.Lease
		err   error
	}{
		{"nobody was here", nil, nil},
		{"another machine is at work", heldBy("elsewhere/b/1/1", time.Now()), ErrLocked},
		{"another machine died", heldBy("elsewhere/b/1/1", time.Now().Add(-2*leaseDuration)), nil},
		{"given back", &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: leaseName, Namespace: SystemNamespace}}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			kube := fake.NewClientset()
			if tc.lease != nil {
				if err := kube.Tracker().Add(tc.lease); err != nil {
					t.Fatal(err)
				}
			}
			release, _, err := Lock(t.Context(), kube, quiet())
			if !errors.Is(err, tc.err) {
				t.Fatalf("error is %v, want %v", err, tc.err)
			}
			if err != nil {
				if !strings.Contains(err.Error(), "elsewhere/b/1/1") {
					t.Errorf("error %q does not name the holder", err)
				}
				return
			}
			if _, _, err := Lock(context.WithoutCancel(t.Context()), kube, quiet()); err != nil {
				t.Errorf("the same process may take its own lock: %v", err)
			}
			release()
			lease, err := kube.CoordinationV1().Leases(SystemNamespace).Get(t.Context(), leaseName, metav1.GetOptions{})
			if err != nil || held(lease) != "" {
				t.Errorf("after giving back it is held by %q (%v)", held(lease), err)
			}
		})
	}
}

func TestState(t *testing.T) {
	ctx := t.Context()
	kube := fake.NewClientset()
	state, last, recorded, err := LoadState(ctx, kube, quiet())
	if err != nil || last.Version != "" || len(recorded) > 0 {
		t.Fatalf("a fresh cluster has %+v, %q, %v", last, recorded, err)
	}
	if err := state.Start(ctx, Journal{Version: "1", Outcome: "running"}, []byte("choices")); err != nil {
		t.Fatal(err)
	}
	state.Component(ctx, ComponentState{Name: "keda", Status: "ready", Revision: 3})
	state.End(ctx, "failed", "http://here")

	_, last, recorded, err = LoadState(ctx, kube, quiet())
	if err != nil {
		t.Fatal(err)
	}
	if last.Outcome != "failed" || last.Ended == nil || last.Endpoint != "http://here" || last.Components["keda"].Revision != 3 || string(recorded) != "choices" {
		t.Errorf("the journal came back as %+v with %q", last, recorded)
	}
	// A run that was stopped still writes how it ended.
	stopped, cancel := context.WithCancel(ctx)
	cancel()
	state.End(stopped, "interrupted", "")
	if _, last, _, err = LoadState(ctx, kube, quiet()); err != nil || last.Outcome != "interrupted" {
		t.Errorf("outcome is %q (%v)", last.Outcome, err)
	}
	// A journal that can't be read decides nothing.
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: stateName, Namespace: SystemNamespace},
		Data: map[string]string{stateKey: "{", recordedKey: "choices"}}
	if _, err := kube.CoreV1().ConfigMaps(SystemNamespace).Update(ctx, cm, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, last, recorded, err = LoadState(ctx, kube, quiet()); err != nil || last.Outcome != "" || string(recorded) != "choices" {
		t.Errorf("a damaged journal gives %+v, %q, %v", last, recorded, err)
	}
}
