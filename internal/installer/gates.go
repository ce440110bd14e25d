package installer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
)

// pollInterval is how often a gate asks what no watch tells.
const pollInterval = 300 * time.Millisecond

// quietInterval is how often a gate that only hangs on watched objects looks
// again all the same.
const quietInterval = 2 * time.Second

// gateSet asks a component's gates in order, keeping those that have passed.
type gateSet struct {
	client *cluster.Client
	run    *Run
	step   Step
	// watches holds a live view of each namespace the workloads live in.
	watches map[string]*cluster.Namespace
	refs    map[string][]cluster.WorkloadRef
	passed  int
	results []cluster.Verdict
}

// openGates starts the watches that the component's gates need.
func openGates(ctx context.Context, run *Run, step Step) (*gateSet, error) {
	g := &gateSet{
		client: run.client, run: run, step: step,
		watches: map[string]*cluster.Namespace{}, refs: map[string][]cluster.WorkloadRef{},
	}
	for _, gate := range step.Gates {
		if gate.Kind != component.GateWorkloads {
			continue
		}
		for _, ref := range workloadsOf(step) {
			g.refs[ref.namespace] = append(g.refs[ref.namespace], ref.WorkloadRef)
		}
	}
	for ns := range g.refs {
		w, err := run.client.Watch(ctx, ns)
		if err != nil {
			g.close()
			return nil, err
		}
		g.watches[ns] = w
	}
	return g, nil
}

type namespacedWorkload struct {
	namespace string
	cluster.WorkloadRef
}

// workloadsOf lists what the rendered release runs. Operands come from an
// operator and are judged by the operator's own condition.
func workloadsOf(step Step) []namespacedWorkload {
	var out []namespacedWorkload
	for _, o := range step.Objects {
		// Helm waits for its hooks itself, and may delete them when they are done.
		if _, hook := o.GetAnnotations()[hookAnnotation]; hook {
			continue
		}
		switch o.GetKind() {
		case "Deployment", "StatefulSet", "DaemonSet", "Job":
			ns := o.GetNamespace()
			if ns == "" {
				ns = step.Namespace
			}
			out = append(out, namespacedWorkload{ns, cluster.WorkloadRef{Kind: o.GetKind(), Name: o.GetName()}})
		}
	}
	return out
}

func (g *gateSet) close() {
	for _, w := range g.watches {
		w.Close()
	}
}

// wait blocks until every gate holds. progress gets each new reason.
func (g *gateSet) wait(ctx context.Context, progress func(string)) ([]cluster.Verdict, error) {
	changed := make(chan struct{}, 1)
	watching, stop := context.WithCancel(ctx)
	defer stop()
	for _, w := range g.watches {
		go forward(watching, w.Changed(), changed)
	}
	last := ""
	for {
		waiting, err := g.ask(ctx)
		if err != nil && !transient(err) {
			return g.results, err
		}
		if err == nil && waiting == "" {
			return g.results, nil
		}
		if err != nil {
			waiting = err.Error()
		}
		if waiting != last {
			progress(waiting)
			last = waiting
		}
		pause := pollInterval
		if g.passed < len(g.step.Gates) && g.step.Gates[g.passed].Kind == component.GateWorkloads {
			pause = quietInterval
		}
		select {
		case <-ctx.Done():
			return g.results, fmt.Errorf("waiting for %s: %w", last, context.Cause(ctx))
		case <-changed:
			// A burst of changes is one reason to look.
			time.Sleep(20 * time.Millisecond)
		case <-time.After(pause):
		}
	}
}

func forward(ctx context.Context, from <-chan struct{}, to chan<- struct{}) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-from:
			select {
			case to <- struct{}{}:
			default:
			}
		}
	}
}

// transient tells whether asking again may help: the API server restarting is,
// missing rights are not.
func transient(err error) bool {
	return !errors.Is(err, cluster.ErrForbidden) && !errors.Is(err, cluster.ErrUnauthorized)
}

// ask looks at the gates that have not passed and returns what is waited for.
func (g *gateSet) ask(ctx context.Context) (string, error) {
	for g.passed < len(g.step.Gates) {
		verdict, err := g.askOne(ctx, g.step.Gates[g.passed])
		if err != nil {
			return "", err
		}
		if !verdict.Ready {
			if verdict.Waiting == "" {
				verdict.Waiting = string(g.step.Gates[g.passed].Kind)
			}
			return verdict.Waiting, nil
		}
		g.results = append(g.results, verdict)
		g.passed++
	}
	return "", nil
}

func (g *gateSet) askOne(ctx context.Context, gate component.Gate) (cluster.Verdict, error) {
	switch gate.Kind {
	case component.GateWorkloads:
		return g.workloads()
	case component.GateNodeAllocatable:
		return g.client.Allocatable(ctx, gate.Resource, max(gate.AtLeast, 1))
	case component.GateCondition:
		gvr := schema.GroupVersionResource{Group: gate.Group, Version: gate.Version, Resource: gate.Resource}
		return g.client.Condition(ctx, gvr, gate.Namespace, gate.Name, gate.Condition)
	case component.GateGateway:
		return g.client.Gateway(ctx, gate.Namespace, gate.Name)
	case component.GateAPIService:
		return g.client.APIService(ctx, gate.Name)
	case component.GatePrometheusTarget:
		return g.client.PrometheusTarget(ctx, gate.Namespace, gate.Service, gate.Port, gate.Job)
	case component.GateAdmission:
		return g.client.Admission(ctx, g.run.modelNamespace())
	case component.GateVault:
		return g.run.vaultReady(ctx)
	case component.GateToken:
		return g.token(ctx, gate)
	default:
		return cluster.Verdict{}, fmt.Errorf("component %s has an unknown gate %q", g.step.Name, gate.Kind)
	}
}

func (g *gateSet) workloads() (cluster.Verdict, error) {
	total := cluster.Verdict{Ready: true}
	var waiting []string
	for ns, refs := range g.refs {
		v, err := g.watches[ns].Workloads(refs)
		if err != nil {
			return cluster.Verdict{}, err
		}
		if !v.Ready {
			total.Ready = false
			waiting = append(waiting, v.Waiting)
		}
		total.SimulatedBy = append(total.SimulatedBy, v.SimulatedBy...)
	}
	slices.Sort(waiting)
	slices.Sort(total.SimulatedBy)
	total.SimulatedBy = slices.Compact(total.SimulatedBy)
	total.Waiting = strings.Join(waiting, "; ")
	return total, nil
}

// token asks for one token through the gateway, with the box's own key.
func (g *gateSet) token(ctx context.Context, gate component.Gate) (cluster.Verdict, error) {
	namespace, name, _ := strings.Cut(gate.Gateway, "/")
	url, err := g.client.GatewayURL(ctx, namespace, name)
	if err != nil {
		return cluster.Verdict{Waiting: err.Error()}, nil //nolint:nilerr // no address yet is a reason to wait
	}
	key, err := g.run.gatewayKey(ctx)
	if err != nil {
		return cluster.Verdict{}, err
	}
	client, err := g.run.gatewayClient(ctx, namespace)
	if err != nil {
		return cluster.Verdict{}, err
	}
	verdict, err := cluster.Token(ctx, client, url, key, g.run.plan.Model.ServedName)
	if err == nil && verdict.Ready {
		g.run.setEndpoint(url + "/v1")
	}
	return verdict, err
}
