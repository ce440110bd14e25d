package actors

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

const (
	monitoringNamespace = "monitoring"
	monitoringActor     = "rehearsal/prometheus-operator"
	prometheusActor     = "rehearsal/prometheus"
)

// prometheusOperator stands in for the Prometheus operator (StatefulSets and
// governing Services of Prometheus and Alertmanager objects, their status) and
// for the two servers' HTTP APIs.
//
// Targets are worked out from the monitors the Prometheus object selects and
// from ready endpoints; every one found is "up". Nothing is scraped, stored or
// evaluated: a query finds only up and the model server's two gauges at zero.
type prometheusOperator struct{ *plane }

// member is one of the two kinds the operator runs.
type member struct {
	kind      kind
	name      string // also the prefix of what is made
	number    int64
	extra     []any // further ports of the governing Service
	container []any // further ports of the container
}

func members() []member {
	mesh := []any{map[string]any{"name": "tcp-mesh", "port": 9094, "targetPort": 9094}, map[string]any{"name": "udp-mesh", "port": 9094, "targetPort": 9094, "protocol": "UDP"}}
	meshPorts := []any{map[string]any{"name": "mesh-tcp", "containerPort": 9094}, map[string]any{"name": "mesh-udp", "containerPort": 9094, "protocol": "UDP"}}
	return []member{
		{kind: prometheuses, name: "prometheus", number: 9090},
		{kind: alertmanagers, name: "alertmanager", number: 9093, extra: mesh, container: meshPorts},
	}
}

func newPrometheusOperator(p *plane) *actor {
	o := &prometheusOperator{p}
	mux := http.NewServeMux()
	for _, path := range []string{"/-/ready", "/-/healthy"} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("Ready.\n")) })
	}
	mux.HandleFunc("GET /api/v1/targets", o.targets)
	mux.HandleFunc("/api/v1/query", o.query)
	mux.HandleFunc("GET /api/v1/status/buildinfo", func(w http.ResponseWriter, _ *http.Request) {
		succeed(w, map[string]any{"version": "rehearsal"})
	})
	p.directory.add(&server{address: address{monitoringNamespace, "prometheus-llmbox", 9090}, name: prometheusActor, handler: mux})

	alerts := http.NewServeMux()
	for _, path := range []string{"/-/ready", "/-/healthy"} {
		alerts.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("OK")) })
	}
	alerts.HandleFunc("GET /api/v2/alerts", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, []any{}) })
	p.directory.add(&server{address: address{monitoringNamespace, "alertmanager-llmbox", 9093}, name: "rehearsal/alertmanager", handler: alerts})
	return &actor{
		name:      monitoringActor,
		watches:   []kind{deployments, statefulSets, services, namespaces, pods, endpointSlices, prometheuses, alertmanagers, serviceMonitors, podMonitors},
		reconcile: o.reconcile,
	}
}

// newGrafana answers Grafana's health; it has no dashboards and no users.
func newGrafana(p *plane) *actor {
	const name = "rehearsal/grafana"
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/health", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"database": "ok", "version": "rehearsal"})
	})
	p.directory.add(&server{address: address{monitoringNamespace, "grafana", 3000}, name: name, handler: mux})
	return &actor{name: name, reconcile: func(context.Context) error { return nil }}
}

func (o *prometheusOperator) reconcile(ctx context.Context) error {
	r, ok, err := o.standIn(monitoringActor, deployments, monitoringNamespace, "prometheus-operator")
	if err != nil || !ok {
		return err
	}
	var errs []error
	for _, m := range members() {
		for _, cr := range o.list(m.kind, "") {
			if cr.GetDeletionTimestamp() == nil {
				errs = append(errs, o.member(ctx, r, m, cr))
			}
		}
	}
	return errors.Join(errs...)
}

func (o *prometheusOperator) member(ctx context.Context, r *role, m member, cr *unstructured.Unstructured) error {
	errs := []error{
		r.ensure(ctx, services, map[string]any{
			"apiVersion": "v1", "kind": "Service",
			"metadata": map[string]any{"name": m.name + "-operated", "namespace": cr.GetNamespace(), "ownerReferences": shared(cr),
				"labels": map[string]any{"operated-" + m.name: "true", "managed-by": "prometheus-operator"}},
			"spec": map[string]any{
				"clusterIP": "None", "selector": map[string]any{"app.kubernetes.io/name": m.name},
				"ports":                    append([]any{map[string]any{"name": portName(cr), "port": m.number, "targetPort": portName(cr)}}, m.extra...),
				"publishNotReadyAddresses": m.name == "alertmanager",
			},
		}),
		r.ensure(ctx, statefulSets, o.statefulSet(r, m, cr)),
	}
	name := m.name + "-" + cr.GetName()
	replicas := int64(1)
	if v, set := at(cr.Object, "spec", "replicas").(int64); set {
		replicas = v
	}
	var updated, available int64
	if set := o.get(statefulSets, cr.GetNamespace(), name); set != nil && integer(set.Object, "status", "observedGeneration") >= set.GetGeneration() {
		updated, available = integer(set.Object, "status", "updatedReplicas"), integer(set.Object, "status", "availableReplicas")
	}
	generation := cr.GetGeneration()
	standing := yes("Available", "", "", generation)
	if available < replicas {
		standing = no("Available", "NoPodReady", fmt.Sprintf("shard 0: pod %s-0: containers not ready", name), generation)
	}
	errs = append(errs, r.status(ctx, m.kind, cr, func(status map[string]any) {
		status["paused"] = truth(cr.Object, "spec", "paused")
		status["replicas"], status["updatedReplicas"] = replicas, updated
		status["availableReplicas"], status["unavailableReplicas"] = available, replicas-available
		status["conditions"] = conditions(status["conditions"], standing, yes("Reconciled", "", "", generation))
	}))
	return errors.Join(errs...)
}

func portName(cr *unstructured.Unstructured) string {
	return first(str(cr.Object, "spec", "portName"), "web")
}

// shared is an ownerReference without controller: several objects own the
// governing Service.
func shared(cr *unstructured.Unstructured) []any {
	return []any{map[string]any{"apiVersion": cr.GetAPIVersion(), "kind": cr.GetKind(), "name": cr.GetName(), "uid": string(cr.GetUID())}}
}

// statefulSet has the operator's names, labels and containers; mounts and
// configuration are left out, as nothing reads them here.
func (o *prometheusOperator) statefulSet(r *role, m member, cr *unstructured.Unstructured) map[string]any {
	spec := sub(cr.Object, "spec")
	name := m.name + "-" + cr.GetName()
	labels := map[string]any{
		"app.kubernetes.io/name": m.name, "app.kubernetes.io/instance": cr.GetName(),
		"app.kubernetes.io/managed-by": "prometheus-operator", m.name: cr.GetName(),
	}
	if m.name == "prometheus" {
		labels = union(labels, map[string]any{"operator.prometheus.io/name": cr.GetName(), "operator.prometheus.io/shard": "0"})
	}
	podLabels := union(sub(spec, "podMetadata", "labels"), labels)
	if version := strings.TrimPrefix(str(spec, "version"), "v"); version != "" {
		podLabels["app.kubernetes.io/version"] = version
	}
	security := map[string]any{"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": map[string]any{"drop": []any{"ALL"}}}
	flags := flagsOf(r.spec)
	reloader := map[string]any{
		"name": "config-reloader", "image": flags["prometheus-config-reloader"], "resources": reloaderResources(flags),
		"ports": []any{map[string]any{"name": "reloader-web", "containerPort": 8080}}, "securityContext": security,
	}
	storage := "prometheus-" + cr.GetName() + "-db"
	if m.name != "prometheus" {
		storage = name + "-db"
	}
	pod := map[string]any{
		"serviceAccountName": first(str(spec, "serviceAccountName"), "default"),
		"containers": []any{
			map[string]any{
				"name": m.name, "image": str(spec, "image"), "resources": firstOf(sub(spec, "resources"), map[string]any{}),
				"ports":           append([]any{map[string]any{"name": portName(cr), "containerPort": m.number}}, m.container...),
				"securityContext": security,
				"volumeMounts":    []any{map[string]any{"name": storage, "mountPath": "/" + m.name}},
			},
			reloader,
		},
		"initContainers": []any{union(reloader, map[string]any{"name": "init-config-reloader"})},
	}
	for _, field := range []string{"securityContext", "nodeSelector", "tolerations", "affinity", "priorityClassName", "imagePullSecrets",
		"automountServiceAccountToken", "enableServiceLinks"} {
		if v := at(spec, field); v != nil {
			pod[field] = v
		}
	}
	set := map[string]any{
		"serviceName": first(str(spec, "serviceName"), m.name+"-operated"), "replicas": 1, "podManagementPolicy": "Parallel",
		"selector": map[string]any{"matchLabels": labels},
		"template": map[string]any{"metadata": map[string]any{"labels": podLabels, "annotations": firstOf(sub(spec, "podMetadata", "annotations"), map[string]any{})}, "spec": pod},
	}
	if v, ok := at(spec, "replicas").(int64); ok {
		set["replicas"] = v
	}
	if claim := sub(spec, "storage", "volumeClaimTemplate"); claim != nil {
		if named := str(claim, "metadata", "name"); named != "" {
			storage = named
			pod["containers"].([]any)[0].(map[string]any)["volumeMounts"] = []any{map[string]any{"name": storage, "mountPath": "/" + m.name}}
		}
		claimSpec := union(map[string]any{"accessModes": []any{"ReadWriteOnce"}}, sub(claim, "spec"))
		set["volumeClaimTemplates"] = []any{map[string]any{"metadata": union(sub(claim, "metadata"), map[string]any{"name": storage}), "spec": claimSpec}}
		if policy := sub(spec, "persistentVolumeClaimRetentionPolicy"); policy != nil {
			set["persistentVolumeClaimRetentionPolicy"] = policy
		}
	} else {
		pod["volumes"] = []any{map[string]any{"name": storage, "emptyDir": firstOf(sub(spec, "storage", "emptyDir"), map[string]any{})}}
	}
	meta := map[string]any{"name": name, "namespace": cr.GetNamespace(), "ownerReferences": owner(cr),
		"labels": union(toAny(cr.GetLabels()), labels)}
	return map[string]any{"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": set}
}

func toAny(m map[string]string) map[string]any {
	out := map[string]any{}
	for k, v := range m {
		out[k] = v
	}
	return out
}

// flagsOf reads --name=value arguments of a pod's containers.
func flagsOf(spec map[string]any) map[string]string {
	out := map[string]string{}
	for _, c := range items(spec, "containers") {
		for _, a := range texts(c, "args") {
			name, value, _ := strings.Cut(strings.TrimLeft(a, "-"), "=")
			out[name] = value
		}
	}
	return out
}

func reloaderResources(flags map[string]string) map[string]any {
	out := map[string]any{}
	for _, kind := range []string{"request", "limit"} {
		set := map[string]any{}
		for _, resource := range []string{"cpu", "memory"} {
			// The operator's own defaults; "0" switches one off.
			value, given := flags["config-reloader-"+resource+"-"+kind]
			if !given {
				value = map[string]string{"cpu": "10m", "memory": "50Mi"}[resource]
			}
			if value != "0" && value != "" {
				set[resource] = value
			}
		}
		if len(set) > 0 {
			out[kind+"s"] = set
		}
	}
	return out
}

// target is one thing a Prometheus would scrape.
type target struct {
	pool, url string
	labels    map[string]any
}

// found works out the targets of all Prometheus objects.
func (o *prometheusOperator) found() []target {
	var out []target
	for _, prom := range o.list(prometheuses, "") {
		for _, m := range o.list(serviceMonitors, "") {
			if o.picks(prom, m, "serviceMonitor") {
				out = append(out, o.serviceTargets(m)...)
			}
		}
		for _, m := range o.list(podMonitors, "") {
			if o.picks(prom, m, "podMonitor") {
				out = append(out, o.podTargets(m)...)
			}
		}
	}
	return out
}

// picks applies a Prometheus object's selectors: an absent namespace selector
// is its own namespace, an absent object selector is nothing.
func (o *prometheusOperator) picks(prom, monitor *unstructured.Unstructured, field string) bool {
	if !selects(sub(prom.Object, "spec", field+"Selector"), monitor.GetLabels()) {
		return false
	}
	selector := sub(prom.Object, "spec", field+"NamespaceSelector")
	if selector == nil {
		return monitor.GetNamespace() == prom.GetNamespace()
	}
	ns := o.get(namespaces, "", monitor.GetNamespace())
	return ns != nil && selects(selector, ns.GetLabels())
}

func monitorNamespaces(monitor *unstructured.Unstructured) []string {
	if truth(monitor.Object, "spec", "namespaceSelector", "any") {
		return []string{""}
	}
	if names := texts(monitor.Object, "spec", "namespaceSelector", "matchNames"); len(names) > 0 {
		return names
	}
	return []string{monitor.GetNamespace()}
}

func (o *prometheusOperator) serviceTargets(monitor *unstructured.Unstructured) []target {
	var out []target
	for _, ns := range monitorNamespaces(monitor) {
		for _, svc := range o.list(services, ns) {
			if !selects(sub(monitor.Object, "spec", "selector"), svc.GetLabels()) {
				continue
			}
			for i, e := range items(monitor.Object, "spec", "endpoints") {
				job := first(svc.GetLabels()[str(monitor.Object, "spec", "jobLabel")], svc.GetName())
				for _, end := range o.scrapable(svc, e) {
					out = append(out, makeTarget(fmt.Sprintf("serviceMonitor/%s/%s/%d", monitor.GetNamespace(), monitor.GetName(), i), e, end, map[string]any{
						"job": job, "namespace": svc.GetNamespace(), "service": svc.GetName(), "pod": end.pod.GetName(),
						"endpoint": first(str(e, "port"), fmt.Sprint(end.port)),
					}))
				}
			}
		}
	}
	return out
}

// scrapable are the ready endpoints of the Service port (by name) or container
// port (by targetPort) a ServiceMonitor's endpoint names.
func (o *prometheusOperator) scrapable(svc *unstructured.Unstructured, e map[string]any) []endpoint {
	if name := str(e, "port"); name != "" {
		return o.endpoints(svc.GetNamespace(), svc.GetName(), name)
	}
	var out []endpoint
	for _, p := range items(svc.Object, "spec", "ports") {
		if at(p, "targetPort") == at(e, "targetPort") && at(e, "targetPort") != nil {
			out = append(out, o.endpoints(svc.GetNamespace(), svc.GetName(), str(p, "name"))...)
		}
	}
	return out
}

func (o *prometheusOperator) podTargets(monitor *unstructured.Unstructured) []target {
	var out []target
	for _, ns := range monitorNamespaces(monitor) {
		for _, pod := range o.list(pods, ns) {
			if !ready(pod) || !selects(sub(monitor.Object, "spec", "selector"), pod.GetLabels()) {
				continue
			}
			for i, e := range items(monitor.Object, "spec", "podMetricsEndpoints") {
				port := containerPortOf(pod, e)
				if port == 0 {
					continue
				}
				out = append(out, makeTarget(fmt.Sprintf("podMonitor/%s/%s/%d", monitor.GetNamespace(), monitor.GetName(), i), e,
					endpoint{ip: str(pod.Object, "status", "podIP"), port: port, pod: pod}, map[string]any{
						"job": monitor.GetNamespace() + "/" + monitor.GetName(), "namespace": pod.GetNamespace(), "pod": pod.GetName(), "endpoint": str(e, "port"),
					}))
			}
		}
	}
	return out
}

func containerPortOf(pod *unstructured.Unstructured, e map[string]any) int64 {
	if n := first64(integer(e, "portNumber"), integer(e, "targetPort")); n != 0 {
		return n
	}
	for _, c := range items(pod.Object, "spec", "containers") {
		for _, p := range items(c, "ports") {
			if str(p, "name") == str(e, "port") {
				return integer(p, "containerPort")
			}
		}
	}
	return 0
}

func makeTarget(pool string, e map[string]any, end endpoint, labels map[string]any) target {
	instance := fmt.Sprintf("%s:%d", end.ip, end.port)
	labels["instance"] = instance
	return target{pool: pool, labels: labels, url: first(str(e, "scheme"), "http") + "://" + instance + first(str(e, "path"), "/metrics")}
}

func (o *prometheusOperator) targets(w http.ResponseWriter, r *http.Request) {
	active := []any{}
	if state := r.URL.Query().Get("state"); state == "" || state == "any" || state == "active" {
		now := time.Now().UTC().Format(time.RFC3339Nano)
		for _, t := range o.found() {
			active = append(active, map[string]any{
				"discoveredLabels": map[string]any{}, "labels": t.labels, "scrapePool": t.pool, "scrapeUrl": t.url, "globalUrl": t.url,
				"lastError": "", "lastScrape": now, "lastScrapeDuration": 0.001, "health": "up", "scrapeInterval": "30s", "scrapeTimeout": "10s",
			})
		}
	}
	succeed(w, map[string]any{"activeTargets": active, "droppedTargets": []any{}, "droppedTargetCounts": map[string]any{}})
}

// query knows series by name only: selectors, functions and ranges are ignored.
func (o *prometheusOperator) query(w http.ResponseWriter, r *http.Request) {
	query := r.FormValue("query")
	now := float64(time.Now().UnixMilli()) / 1000
	result := []any{}
	for _, t := range o.found() {
		metric, value := union(t.labels), "1"
		switch {
		case query == "up":
			metric["__name__"] = "up"
		case slices.ContainsFunc([]string{"vllm:num_requests_waiting", "vllm:num_requests_running"}, func(n string) bool { return strings.Contains(query, n) }) &&
			t.labels["service"] == modelWorkload:
			value = "0"
		default:
			continue
		}
		result = append(result, map[string]any{"metric": metric, "value": []any{now, value}})
	}
	succeed(w, map[string]any{"resultType": "vector", "result": result})
}

func succeed(w http.ResponseWriter, data any) {
	writeJSON(w, http.StatusOK, map[string]any{"status": "success", "data": data})
}
