package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// exporter asks for each kind when it is scraped.
type exporter struct {
	client kubernetes.Interface
	kinds  []string
}

// Describe implements prometheus.Collector: nothing is promised, as what there is
// depends on the cluster.
func (e *exporter) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (e *exporter) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	for _, kind := range e.kinds {
		if err := e.collect(ctx, kind, out); err != nil {
			out <- prometheus.NewInvalidMetric(prometheus.NewDesc("kube_state_metrics_standin_error", "A kind can't be listed.", nil, nil),
				fmt.Errorf("listing %s: %w", kind, err))
		}
	}
}

func (e *exporter) collect(ctx context.Context, kind string, out chan<- prometheus.Metric) error {
	all := metav1.ListOptions{}
	switch kind {
	case "nodes":
		list, err := e.client.CoreV1().Nodes().List(ctx, all)
		if err != nil {
			return err
		}
		for i := range list.Items {
			node(out, &list.Items[i])
		}
	case "pods":
		list, err := e.client.CoreV1().Pods("").List(ctx, all)
		if err != nil {
			return err
		}
		for i := range list.Items {
			pod(out, &list.Items[i])
		}
	case "deployments":
		list, err := e.client.AppsV1().Deployments("").List(ctx, all)
		if err != nil {
			return err
		}
		for _, d := range list.Items {
			of := labels{"namespace": d.Namespace, "deployment": d.Name}
			gauge(out, "kube_deployment_spec_replicas", of, replicas(d.Spec.Replicas))
			gauge(out, "kube_deployment_status_replicas_available", of, float64(d.Status.AvailableReplicas))
			gauge(out, "kube_deployment_status_replicas_updated", of, float64(d.Status.UpdatedReplicas))
			gauge(out, "kube_deployment_status_replicas_ready", of, float64(d.Status.ReadyReplicas))
		}
	case "statefulsets":
		list, err := e.client.AppsV1().StatefulSets("").List(ctx, all)
		if err != nil {
			return err
		}
		for _, s := range list.Items {
			of := labels{"namespace": s.Namespace, "statefulset": s.Name}
			gauge(out, "kube_statefulset_replicas", of, replicas(s.Spec.Replicas))
			gauge(out, "kube_statefulset_status_replicas_ready", of, float64(s.Status.ReadyReplicas))
			gauge(out, "kube_statefulset_status_replicas_updated", of, float64(s.Status.UpdatedReplicas))
		}
	case "daemonsets":
		list, err := e.client.AppsV1().DaemonSets("").List(ctx, all)
		if err != nil {
			return err
		}
		for _, d := range list.Items {
			of := labels{"namespace": d.Namespace, "daemonset": d.Name}
			gauge(out, "kube_daemonset_status_desired_number_scheduled", of, float64(d.Status.DesiredNumberScheduled))
			gauge(out, "kube_daemonset_status_number_available", of, float64(d.Status.NumberAvailable))
		}
	case "jobs":
		list, err := e.client.BatchV1().Jobs("").List(ctx, all)
		if err != nil {
			return err
		}
		for _, j := range list.Items {
			for _, c := range j.Status.Conditions {
				if c.Type == "Failed" {
					states(out, "kube_job_failed", labels{"namespace": j.Namespace, "job_name": j.Name}, "condition", conditionStates(), strings.ToLower(string(c.Status)))
				}
			}
		}
	case "persistentvolumeclaims":
		list, err := e.client.CoreV1().PersistentVolumeClaims("").List(ctx, all)
		if err != nil {
			return err
		}
		for _, c := range list.Items {
			states(out, "kube_persistentvolumeclaim_status_phase", labels{"namespace": c.Namespace, "persistentvolumeclaim": c.Name},
				"phase", []string{"Lost", "Bound", "Pending"}, string(c.Status.Phase))
		}
	case "horizontalpodautoscalers":
		list, err := e.client.AutoscalingV2().HorizontalPodAutoscalers("").List(ctx, all)
		if err != nil {
			return err
		}
		for _, h := range list.Items {
			gauge(out, "kube_horizontalpodautoscaler_spec_max_replicas",
				labels{"namespace": h.Namespace, "horizontalpodautoscaler": h.Name}, float64(h.Spec.MaxReplicas))
		}
	case "namespaces", "persistentvolumes":
		// Exported upstream; nothing of the box reads them.
	default:
		return fmt.Errorf("this stand-in doesn't know it")
	}
	return nil
}

func node(out chan<- prometheus.Metric, n *corev1.Node) {
	for _, c := range n.Status.Conditions {
		states(out, "kube_node_status_condition", labels{"node": n.Name, "condition": string(c.Type)}, "status", conditionStates(), strings.ToLower(string(c.Status)))
	}
	for name, q := range n.Status.Allocatable {
		gauge(out, "kube_node_status_allocatable", labels{"node": n.Name, "resource": sanitised(string(name)), "unit": unit(string(name))}, q.AsApproximateFloat64())
	}
}

func pod(out chan<- prometheus.Metric, p *corev1.Pod) {
	of := labels{"namespace": p.Namespace, "pod": p.Name, "uid": string(p.UID)}
	states(out, "kube_pod_status_phase", of, "phase", []string{"Pending", "Succeeded", "Failed", "Unknown", "Running"}, string(p.Status.Phase))
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			states(out, "kube_pod_status_ready", of, "condition", conditionStates(), strings.ToLower(string(c.Status)))
		}
	}
	for _, s := range p.Status.ContainerStatuses {
		gauge(out, "kube_pod_container_status_restarts_total", of.with("container", s.Name), float64(s.RestartCount))
		if w := s.State.Waiting; w != nil && w.Reason != "" {
			gauge(out, "kube_pod_container_status_waiting_reason", of.with("container", s.Name).with("reason", w.Reason), 1)
		}
	}
	for _, c := range p.Spec.Containers {
		for name, q := range c.Resources.Limits {
			gauge(out, "kube_pod_container_resource_limits", of.with("container", c.Name).with("node", p.Spec.NodeName).
				with("resource", sanitised(string(name))).with("unit", unit(string(name))), q.AsApproximateFloat64())
		}
	}
}

type labels map[string]string

func (l labels) with(name, value string) labels {
	more := labels{name: value}
	for k, v := range l {
		more[k] = v
	}
	return more
}

func gauge(out chan<- prometheus.Metric, name string, of labels, value float64) {
	desc := prometheus.NewDesc(name, "As kube-state-metrics has it.", nil, prometheus.Labels(of))
	m, err := prometheus.NewConstMetric(desc, prometheus.GaugeValue, value)
	if err != nil {
		m = prometheus.NewInvalidMetric(desc, err)
	}
	out <- m
}

// states has one series for each state there could be, and 1 for the one that is.
func states(out chan<- prometheus.Metric, name string, of labels, label string, all []string, is string) {
	for _, state := range all {
		value := 0.0
		if state == is {
			value = 1
		}
		gauge(out, name, of.with(label, state), value)
	}
}

func conditionStates() []string { return []string{"true", "false", "unknown"} }

func replicas(n *int32) float64 {
	if n == nil {
		return 1
	}
	return float64(*n)
}

// sanitised writes a resource's name as upstream's label does.
func sanitised(resource string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, resource)
}

func unit(resource string) string {
	switch {
	case resource == "cpu":
		return "core"
	case resource == "memory" || resource == "ephemeral-storage" || strings.HasPrefix(resource, "hugepages-"):
		return "byte"
	}
	return "integer"
}
