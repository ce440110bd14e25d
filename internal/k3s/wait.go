package k3s

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

const (
	// waitPause is how often readiness is looked at.
	waitPause = time.Second
	// sameEnds is how many ends in a row for the same reason are enough.
	sameEnds = 3
)

// NodeState is a node as the API shows it.
type NodeState struct {
	Name  string
	Ready bool
	// Reason and Message are those of the condition Ready, Heartbeat when the kubelet last
	// said so; zero where that is not known.
	Reason, Message string
	Heartbeat       time.Time
}

// View is all that readiness is judged by.
type View struct {
	Process ProcessState
	// Began is when that process was started; zero where that is not known.
	Began time.Time
	Log   LogVerdict
	// Kubeconfig says that k3s has written it.
	Kubeconfig bool
	// APIReady says that /readyz answers ok; APIWhy is what it or the connection says.
	APIReady bool
	APIWhy   string
	// Nodes are those of the API; NodesKnown says that it was asked.
	Nodes      []NodeState
	NodesKnown bool
	// DNSReady says that CoreDNS has an available pod; DNSWhy why not.
	DNSReady bool
	DNSWhy   string
	// StorageClass is the name of the default one.
	StorageClass string
}

// WaitFor says what has to be ready.
type WaitFor struct {
	NodeName string
	// Role is what k3s is on this host: an agent has neither an API of its own nor the
	// right to look at more than its node.
	Role Role
	// NoDNS and NoStorage leave out what the settings switch off.
	NoDNS, NoStorage bool
}

// Stage is how far k3s has come.
type Stage string

// The stages, in the order in which they are reached.
const (
	StageProcess    Stage = "process"
	StageKubeconfig Stage = "kubeconfig"
	StageAPI        Stage = "api"
	StageNode       Stage = "node"
	StageDNS        Stage = "dns"
	StageStorage    Stage = "storage"
	StageReady      Stage = "ready"
)

// ReadyVerdict is the judgement of a View.
type ReadyVerdict struct {
	Stage Stage
	// Waiting is one sentence: what is waited for and the newest reason.
	Waiting string
	// Hopeless is set where waiting on would change nothing.
	Hopeless *Failure
}

// JudgeReady says how far k3s has come and what is missing.
func JudgeReady(v View, w WaitFor) ReadyVerdict {
	if v.Log.Same >= sameEnds {
		f := v.Log.Failure
		if f == nil {
			f = &Failure{
				Name: "keeps-ending", Title: "k3s ends again and again with the same error",
				Fix: "Read what it says: sudo journalctl -u k3s -n 50 (or its log file)", Line: v.Log.Message,
			}
		}
		return ReadyVerdict{Stage: StageProcess, Waiting: f.Title, Hopeless: f}
	}
	because := func(what string, why ...string) string {
		for _, reason := range why {
			if reason != "" {
				return what + ": " + reason
			}
		}
		return what
	}
	switch {
	case !v.Process.Running:
		return ReadyVerdict{Stage: StageProcess, Waiting: because("k3s to start", failureText(v.Log.Failure), v.Log.Message, v.Process.Detail)}
	case !v.Kubeconfig:
		return ReadyVerdict{Stage: StageKubeconfig, Waiting: because("k3s to write its kubeconfig", v.Log.Message)}
	case !v.APIReady:
		return ReadyVerdict{Stage: StageAPI, Waiting: because("the API server", v.Log.Message, v.APIWhy)}
	}
	node := v.node(w.NodeName)
	switch {
	case !v.NodesKnown || node == nil:
		return ReadyVerdict{Stage: StageNode, Waiting: because("the node to register", v.Log.Message)}
	case !node.Ready:
		return ReadyVerdict{Stage: StageNode, Waiting: because("node "+node.Name, shown(strings.TrimPrefix(node.Reason+": "+node.Message, ": ")), v.Log.Message)}
	case v.stale(*node):
		return ReadyVerdict{Stage: StageNode, Waiting: because("the kubelet of node "+node.Name+" to report", v.Log.Message)}
	case w.Role == Agent:
	case !w.NoDNS && !v.DNSReady:
		return ReadyVerdict{Stage: StageDNS, Waiting: because("CoreDNS", v.DNSWhy)}
	case !w.NoStorage && v.StorageClass == "":
		return ReadyVerdict{Stage: StageStorage, Waiting: "a default StorageClass"}
	}
	return ReadyVerdict{Stage: StageReady, Waiting: "ready"}
}

// stale says that a node's state is of before this start of k3s: for the first half minute
// after a power cut the API knows no better than that all was well.
func (v View) stale(node NodeState) bool {
	// A kubelet reports when it starts, and every five minutes (the default of its
	// nodeStatusReportFrequency); times of the API are whole seconds.
	const reports = 6 * time.Minute
	if v.Began.IsZero() || node.Heartbeat.IsZero() || time.Since(v.Began) > reports {
		return false
	}
	return node.Heartbeat.Before(v.Began.Truncate(time.Second))
}

func failureText(f *Failure) string {
	if f == nil {
		return ""
	}
	return f.Title + " (" + f.Line + ")"
}

// node finds the one of this host; where no name is known, the only one.
func (v View) node(name string) *NodeState {
	for i := range v.Nodes {
		if v.Nodes[i].Name == name || name == "" && len(v.Nodes) == 1 {
			return &v.Nodes[i]
		}
	}
	return nil
}

// NotReadyError is a k3s that did not become ready.
type NotReadyError struct {
	Stage Stage
	// Waiting is what was waited for, with the newest reason.
	Waiting string
	// Failure is the known reason, or nil.
	Failure *Failure
	// Hopeless says that waiting was given up before its time was over.
	Hopeless bool
	Err      error
}

// Error implements error.
func (e *NotReadyError) Error() string {
	if e.Failure != nil {
		return "k3s does not come up: " + e.Failure.Title + ": " + e.Failure.Line
	}
	return "k3s did not become ready, waited for " + e.Waiting
}

// Unwrap gives the end of the context, where that was it.
func (e *NotReadyError) Unwrap() error { return e.Err }

// Fix is what a person types.
func (e *NotReadyError) Fix() string {
	if e.Failure != nil {
		return e.Failure.Fix
	}
	return "Look what k3s says: sudo journalctl -u k3s -n 100 (or /var/log/llmbox/k3s.log), then run the command again"
}

// Prober looks at the API of a cluster.
type Prober interface {
	// Probe fills in what the API says.
	Probe(ctx context.Context, v *View, w WaitFor)
}

// Wait waits until k3s is ready, or until that is hopeless, or until the context
// ends. Lines of the log from before since are not looked at.
func (m *Machine) Wait(ctx context.Context, svc Service, w WaitFor, since time.Time, prober Prober, report Report) error {
	var last ReadyVerdict
	var failure *Failure
	for {
		v, err := m.view(ctx, svc, w, since, prober)
		if err == nil {
			verdict := JudgeReady(v, w)
			failure = v.Log.Failure
			switch {
			case verdict.Hopeless != nil:
				return &NotReadyError{Stage: verdict.Stage, Waiting: verdict.Waiting, Failure: verdict.Hopeless, Hopeless: true}
			case verdict.Stage == StageReady:
				report.say(PhaseReady, "k3s is ready")
				return nil
			}
			if verdict != last {
				report.say(PhaseReady, "waiting for "+verdict.Waiting)
			}
			last = verdict
		} else {
			last.Waiting = cmp.Or(last.Waiting, err.Error())
		}
		select {
		case <-ctx.Done():
			if last.Stage == StageNode || last.Stage == StageDNS || last.Stage == StageStorage {
				// The API answers: what an earlier run of k3s ended with is not the reason.
				failure = nil
			}
			return &NotReadyError{Stage: last.Stage, Waiting: last.Waiting, Failure: failure, Err: errors.Join(ctx.Err(), err)}
		case <-time.After(waitPause):
		}
	}
}

// view looks at everything once. What can't be seen is as good as not there: it will
// be looked at again.
func (m *Machine) view(ctx context.Context, svc Service, w WaitFor, since time.Time, prober Prober) (View, error) {
	var v View
	var err error
	if v.Process, err = svc.State(ctx); err != nil {
		return v, fmt.Errorf("looking at the service: %w", err)
	}
	if v.Process.Running && v.Process.Start > 0 {
		v.Began, _ = m.startTime(ctx, v.Process.Start)
	}
	lines, err := svc.Lines(ctx, since)
	if err != nil {
		// A machine can be without a journal; then nobody says why.
		lines = nil
	}
	v.Log = JudgeLog(lines)
	if prober == nil {
		return v, fmt.Errorf("looking at the API: no prober: %w", ErrSetting)
	}
	if v.Process.Running {
		prober.Probe(ctx, &v, w)
	}
	return v, nil
}
