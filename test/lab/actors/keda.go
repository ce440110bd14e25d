package actors

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	kedaNamespace  = "keda"
	kedaActor      = "rehearsal/keda"
	kedaAPI        = "v1beta1.external.metrics.k8s.io"
	kedaAPIVersion = "external.metrics.k8s.io/v1beta1"
	kedaFinalizer  = "finalizer.keda.sh"
)

// keda stands in for KEDA's operator, metrics server and admission webhook: it
// makes the certificates' Secret, hands its CA to the APIService and the
// webhook, serves external.metrics.k8s.io, and answers ScaledObjects with an
// HPA and conditions.
//
// No scaler runs: every metric is zero, so nothing ever scales up and no
// trigger's address or query is tried. Callers of the metrics API are not
// authenticated.
type keda struct{ *plane }

func newKEDA(p *plane) *actor {
	k := &keda{p}
	p.directory.add(&server{address: address{kedaNamespace, "keda-metrics-apiserver", 6443}, name: kedaActor, secure: true, handler: k.api()})
	p.directory.add(&server{
		address: address{kedaNamespace, "keda-admission-webhooks", 9443}, name: kedaActor, secure: true,
		handler: admit(func(*admission) *verdict { return allowed() }),
	})
	return &actor{
		name:      kedaActor,
		watches:   []kind{deployments, secrets, apiServices, validatingHooks, autoscalers, scaledObjects},
		reconcile: k.reconcile,
	}
}

func (k *keda) reconcile(ctx context.Context) error {
	r, ok, err := k.standIn(kedaActor, deployments, kedaNamespace, "keda-operator")
	if err != nil || !ok {
		return err
	}
	errs := []error{k.certificates(ctx, r)}
	if api := k.get(apiServices, "", kedaAPI); api != nil && str(api.Object, "spec", "service", "namespace") == kedaNamespace {
		errs = append(errs, r.update(ctx, apiServices, api, func(m map[string]any) {
			sub(m, "spec")["caBundle"] = base64.StdEncoding.EncodeToString(k.ca.bundle)
		}))
	}
	if hook := k.get(validatingHooks, "", "keda-admission"); hook != nil {
		errs = append(errs, r.trust(ctx, validatingHooks, hook))
	}
	for _, so := range k.list(scaledObjects, "") {
		errs = append(errs, k.scale(ctx, r, so))
	}
	return errors.Join(errs...)
}

// certificates fills the Secret that KEDA's other two pods mount, under the name that the
// operator is given.
func (k *keda) certificates(ctx context.Context, r *role) error {
	name := "kedaorg-certs"
	if d := k.get(deployments, kedaNamespace, "keda-operator"); d != nil {
		containers, _, _ := unstructured.NestedSlice(d.Object, "spec", "template", "spec", "containers")
		for _, c := range containers {
			of, _ := c.(map[string]any)
			args, _, _ := unstructured.NestedStringSlice(of, "args")
			for _, arg := range args {
				if given, ok := strings.CutPrefix(arg, "--cert-secret-name="); ok {
					name = given
				}
			}
		}
	}
	if s := k.get(secrets, kedaNamespace, name); s != nil && len(sub(s.Object, "data")) > 0 {
		return nil
	}
	certificate, key, err := k.ca.pair("keda-operator." + kedaNamespace + ".svc")
	if err != nil {
		return err
	}
	return r.ensure(ctx, secrets, map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": "Opaque",
		"metadata": map[string]any{"name": name, "namespace": kedaNamespace},
		"data":     map[string]any{"ca.crt": k.ca.bundle, "tls.crt": certificate, "tls.key": key},
	})
}

func (k *keda) scale(ctx context.Context, r *role, so *unstructured.Unstructured) error {
	if so.GetDeletionTimestamp() != nil {
		return r.finalizer(ctx, scaledObjects, so, kedaFinalizer, false)
	}
	if err := r.finalizer(ctx, scaledObjects, so, kedaFinalizer, true); err != nil {
		return err
	}
	name := str(so.Object, "spec", "scaleTargetRef", "name")
	workload := first(str(so.Object, "spec", "scaleTargetRef", "kind"), "Deployment")
	group := first(str(so.Object, "spec", "scaleTargetRef", "apiVersion"), "apps/v1")
	watched := map[string]kind{"Deployment": deployments, "StatefulSet": statefulSets}[workload]
	target := (*unstructured.Unstructured)(nil)
	if watched != "" {
		target = k.get(watched, so.GetNamespace(), name)
	}
	metrics, names := externalMetrics(so)
	hpa := first(str(so.Object, "spec", "advanced", "horizontalPodAutoscalerConfig", "name"), "keda-hpa-"+so.GetName())
	found := target != nil
	if found {
		if err := r.ensure(ctx, autoscalers, map[string]any{
			"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
			"metadata": map[string]any{
				"name": hpa, "namespace": so.GetNamespace(), "ownerReferences": owner(so),
				"labels": map[string]any{"app.kubernetes.io/managed-by": "keda-operator", "app.kubernetes.io/name": hpa,
					"app.kubernetes.io/part-of": so.GetName(), "scaledobject.keda.sh/name": so.GetName()},
			},
			"spec": hpaSpec(so, group, workload, name, metrics),
		}); err != nil {
			return err
		}
	}
	return k.status(ctx, r, so, func(status map[string]any) {
		if !found {
			status["conditions"] = conditionsWithoutTime(
				no("Ready", "ScaledObjectCheckFailed", "ScaledObject doesn't have correct scaleTargetRef specification", 0),
				no("Active", "UnkownState", "ScaledObject check failed", 0))
			return
		}
		status["scaleTargetKind"] = group + "." + workload
		status["scaleTargetGVKR"] = map[string]any{"group": strings.Split(group, "/")[0], "version": group[strings.LastIndex(group, "/")+1:],
			"kind": workload, "resource": strings.ToLower(workload) + "s"}
		status["originalReplicaCount"] = integer(target.Object, "spec", "replicas")
		status["externalMetricNames"] = names
		status["hpaName"] = hpa
		status["conditions"] = conditionsWithoutTime(
			yes("Ready", "ScaledObjectReady", "ScaledObject is defined correctly and is ready for scaling", 0),
			no("Active", "ScalerNotActive", "Scaling is not performed because triggers are not active", 0),
			no("Fallback", "NoFallbackFound", "No fallbacks are active on this scaled object", 0),
			condition{"Paused", "Unknown", "", "", 0})
	})
}

// status is patched, not updated: that is the verb KEDA's own rights have.
func (k *keda) status(ctx context.Context, r *role, so *unstructured.Unstructured, edit func(map[string]any)) error {
	changed, err := edited(so, "status", edit)
	if err != nil || changed == nil {
		return err
	}
	if _, err := r.mark(ctx, scaledObjects, so); err != nil {
		return err
	}
	patch := map[string]any{"status": changed.Object["status"]}
	if _, err := mergePatch(ctx, r.resource(r.client, scaledObjects, so.GetNamespace()), so.GetName(), patch, "status"); err != nil {
		return fmt.Errorf("updating status of ScaledObject %s: %w", so.GetName(), err)
	}
	return nil
}

// conditionsWithoutTime is KEDA's own form of conditions.
func conditionsWithoutTime(wanted ...condition) []any {
	out := []any{}
	for _, w := range wanted {
		c := map[string]any{"type": w.kind, "status": w.status}
		if w.reason != "" {
			c["reason"], c["message"] = w.reason, w.message
		}
		out = append(out, c)
	}
	return out
}

// externalMetrics turns triggers into HPA metrics, named as KEDA names them.
func externalMetrics(so *unstructured.Unstructured) (metrics []any, names []string) {
	for i, t := range items(so.Object, "spec", "triggers") {
		name := fmt.Sprintf("s%d-%s", i, str(t, "type"))
		threshold := first(str(t, "metadata", "threshold"), str(t, "metadata", "targetValue"), "1")
		target := map[string]any{"type": "AverageValue", "averageValue": threshold}
		if str(t, "metricType") == "Value" {
			target = map[string]any{"type": "Value", "value": threshold}
		}
		names = append(names, name)
		metrics = append(metrics, map[string]any{"type": "External", "external": map[string]any{
			"metric": map[string]any{"name": name, "selector": map[string]any{"matchLabels": map[string]any{"scaledobject.keda.sh/name": so.GetName()}}},
			"target": target,
		}})
	}
	return metrics, names
}

func hpaSpec(so *unstructured.Unstructured, group, workload, name string, metrics []any) map[string]any {
	spec := map[string]any{
		"scaleTargetRef": map[string]any{"apiVersion": group, "kind": workload, "name": name},
		"minReplicas":    first64(integer(so.Object, "spec", "minReplicaCount"), 1),
		"maxReplicas":    first64(integer(so.Object, "spec", "maxReplicaCount"), 100),
		"metrics":        metrics,
	}
	if behavior := sub(so.Object, "spec", "advanced", "horizontalPodAutoscalerConfig", "behavior"); behavior != nil {
		spec["behavior"] = behavior
	}
	return spec
}

// api is the aggregated external.metrics.k8s.io.
func (k *keda) api() http.Handler {
	group := map[string]any{"name": "external.metrics.k8s.io",
		"versions":         []any{map[string]any{"groupVersion": kedaAPIVersion, "version": "v1beta1"}},
		"preferredVersion": map[string]any{"groupVersion": kedaAPIVersion, "version": "v1beta1"}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /apis", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"kind": "APIGroupList", "apiVersion": "v1", "groups": []any{group}})
	})
	mux.HandleFunc("GET /apis/external.metrics.k8s.io", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, union(map[string]any{"kind": "APIGroup", "apiVersion": "v1"}, group))
	})
	mux.HandleFunc("GET /apis/"+kedaAPIVersion, func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": kedaAPIVersion,
			"resources": []any{map[string]any{"name": "externalmetrics", "singularName": "", "namespaced": true,
				"kind": "ExternalMetricValueList", "verbs": []any{"get"}}}})
	})
	mux.HandleFunc("GET /apis/"+kedaAPIVersion+"/namespaces/{namespace}/{metric}", k.metric)
	mux.HandleFunc("GET /openapi/v2", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"swagger": "2.0", "info": map[string]any{"title": "KEDA", "version": "rehearsal"}, "paths": map[string]any{}})
	})
	mux.HandleFunc("GET /openapi/v3", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"paths": map[string]any{}})
	})
	for _, path := range []string{"/healthz", "/livez", "/readyz"} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok")) })
	}
	return mux
}

// metric is zero for each trigger of a ScaledObject, and absent otherwise.
func (k *keda) metric(w http.ResponseWriter, r *http.Request) {
	values := []any{}
	for _, so := range k.list(scaledObjects, r.PathValue("namespace")) {
		_, names := externalMetrics(so)
		for _, name := range names {
			if name == r.PathValue("metric") {
				values = append(values, map[string]any{"metricName": name, "metricLabels": nil, "value": "0",
					"timestamp": metav1.NewTime(time.Now()).UTC().Format(time.RFC3339)})
			}
		}
	}
	writeJSON(w, http.StatusOK, map[string]any{"kind": "ExternalMetricValueList", "apiVersion": kedaAPIVersion,
		"metadata": map[string]any{}, "items": values})
}
