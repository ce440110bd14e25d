package actors

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

const (
	envoyNamespace  = "envoy-gateway-system"
	envoyController = "gateway.envoyproxy.io/gatewayclass-controller"
	gatewayGroup    = "gateway.networking.k8s.io"
	envoyGroup      = "gateway.envoyproxy.io"
	gatewayName     = "rehearsal/envoy-gateway"
	// classInUse is Gateway API's finalizer for a class that has Gateways.
	classInUse = "gateway-exists-finalizer.gateway.networking.k8s.io"
)

// envoyGateway stands in for Envoy Gateway: its certgen Job's Secrets, the
// status of Gateway API objects and of its own policies, the proxy's Deployment
// and Service, and (as nobody hands out load balancer addresses here) the
// address of that Service. The proxy itself is in proxy.go.
//
// It judges attachment, class parameters and references. It knows nothing of
// xDS, and of policies it knows only API keys.
type envoyGateway struct {
	*plane
	proxies *proxies
}

func newEnvoyGateway(p *plane, o Options) *actor {
	e := &envoyGateway{plane: p, proxies: newProxies(p, o.GatewayPort)}
	p.directory.add(&server{
		address: address{envoyNamespace, "envoy-gateway", 9443}, name: gatewayName, secure: true,
		handler: admit(func(request *admission) *verdict { return allowed() }),
	})
	return &actor{
		name: gatewayName,
		watches: []kind{deployments, jobs, services, secrets, endpointSlices, pods, namespaces, mutatingHooks, gatewayClasses, gateways,
			httpRoutes, envoyProxies, securityPols, backendPols, clientPols},
		reconcile: e.reconcile,
		stop:      func() { e.proxies.keep(nil) },
	}
}

func (e *envoyGateway) reconcile(ctx context.Context) error {
	errs := []error{e.certificates(ctx)}
	// A proxy that runs goes on without its controller.
	defer func() { e.proxies.keep(e.programmed()) }()

	r, ok, err := e.standIn(gatewayName, deployments, envoyNamespace, "envoy-gateway")
	// The controller's pod mounts this Secret; without it there is no container.
	if err != nil || !ok || e.get(secrets, envoyNamespace, "envoy-gateway") == nil {
		return errors.Join(append(errs, err)...)
	}
	r.applies = true
	for _, class := range e.list(gatewayClasses, "") {
		if str(class.Object, "spec", "controllerName") == envoyController {
			errs = append(errs, e.class(ctx, r, class))
		}
	}
	for _, gw := range e.list(gateways, "") {
		if e.ours(gw) {
			errs = append(errs, e.gateway(ctx, r, gw))
		}
	}
	for _, route := range e.list(httpRoutes, "") {
		errs = append(errs, e.route(ctx, r, route))
	}
	for _, k := range []kind{securityPols, backendPols, clientPols} {
		for _, policy := range e.list(k, "") {
			errs = append(errs, e.policy(ctx, r, k, policy))
		}
	}
	return errors.Join(errs...)
}

// certificates is what `envoy-gateway certgen` does, once its Job is complete.
// Secrets that exist stay as they are.
func (e *envoyGateway) certificates(ctx context.Context) error {
	for _, job := range e.list(jobs, envoyNamespace) {
		spec := sub(job.Object, "spec", "template", "spec")
		if !isTrue(job.Object, "Complete", "status", "conditions") || !mentions(spec, "certgen") {
			continue
		}
		client, err := e.as(envoyNamespace, str(spec, "serviceAccountName"))
		if err != nil {
			return err
		}
		r := &role{plane: e.plane, name: gatewayName, client: client}
		var errs []error
		for secret, host := range map[string]string{
			"envoy-gateway":    "envoy-gateway." + envoyNamespace + ".svc",
			"envoy":            "*." + envoyNamespace,
			"envoy-rate-limit": "envoy-ratelimit." + envoyNamespace + ".svc",
			"envoy-oidc-hmac":  "",
		} {
			if e.get(secrets, envoyNamespace, secret) != nil {
				continue
			}
			data := map[string]any{}
			if host == "" {
				key := make([]byte, 32)
				if _, err := rand.Read(key); err != nil {
					return fmt.Errorf("making HMAC key: %w", err)
				}
				data["hmac-secret"] = key
			} else {
				certificate, key, err := e.ca.pair(host)
				if err != nil {
					return err
				}
				data = map[string]any{"tls.crt": certificate, "tls.key": key, "ca.crt": e.ca.bundle}
			}
			errs = append(errs, r.ensure(ctx, secrets, map[string]any{
				"apiVersion": "v1", "kind": "Secret", "type": secretType(host != ""), "data": data,
				"metadata": map[string]any{"name": secret, "namespace": envoyNamespace, "labels": map[string]any{"control-plane": "envoy-gateway"}},
			}))
		}
		if hook := e.get(mutatingHooks, "", "envoy-gateway-topology-injector."+envoyNamespace); hook != nil {
			errs = append(errs, r.trust(ctx, mutatingHooks, hook))
		}
		return errors.Join(errs...)
	}
	return nil
}

func secretType(tls bool) string {
	if tls {
		return "kubernetes.io/tls"
	}
	return "Opaque"
}

// mentions looks for a word in the commands and arguments of a pod spec.
func mentions(spec map[string]any, word string) bool {
	return slices.ContainsFunc(items(spec, "containers"), func(c map[string]any) bool {
		return slices.Contains(texts(c, "command"), word) || slices.Contains(texts(c, "args"), word)
	})
}

func (e *envoyGateway) class(ctx context.Context, r *role, class *unstructured.Unstructured) error {
	used := slices.ContainsFunc(e.list(gateways, ""), func(gw *unstructured.Unstructured) bool {
		return str(gw.Object, "spec", "gatewayClassName") == class.GetName()
	})
	if err := r.finalizer(ctx, gatewayClasses, class, classInUse, used); err != nil {
		return err
	}
	accepted := yes("Accepted", "Accepted", "Valid GatewayClass", class.GetGeneration())
	if ref := sub(class.Object, "spec", "parametersRef"); ref != nil &&
		e.get(envoyProxies, str(ref, "namespace"), str(ref, "name")) == nil {
		accepted = no("Accepted", "InvalidParameters", fmt.Sprintf("EnvoyProxy %s/%s not found", str(ref, "namespace"), str(ref, "name")), class.GetGeneration())
	}
	return r.status(ctx, gatewayClasses, class, func(status map[string]any) {
		status["conditions"] = conditions(status["conditions"], accepted)
	})
}

func (p *plane) accepted(o *unstructured.Unstructured) bool {
	return o != nil && isTrue(o.Object, "Accepted", "status", "conditions")
}

func (e *envoyGateway) ours(gw *unstructured.Unstructured) bool {
	class := e.get(gatewayClasses, "", str(gw.Object, "spec", "gatewayClassName"))
	return class != nil && str(class.Object, "spec", "controllerName") == envoyController && e.accepted(class)
}

// programmed lists the Gateways whose proxies should answer.
func (e *envoyGateway) programmed() []*unstructured.Unstructured {
	return slices.DeleteFunc(e.list(gateways, ""), func(gw *unstructured.Unstructured) bool {
		d := e.get(deployments, envoyNamespace, proxyName(gw))
		return gw.GetDeletionTimestamp() != nil || d == nil || !available(deployments, d)
	})
}

// proxyName is how Envoy Gateway names what it makes for a Gateway.
func proxyName(gw *unstructured.Unstructured) string {
	sum := sha256.Sum256([]byte(gw.GetNamespace() + "/" + gw.GetName()))
	return "envoy-" + gw.GetNamespace() + "-" + gw.GetName() + "-" + hex.EncodeToString(sum[:4])
}

func (e *envoyGateway) gateway(ctx context.Context, r *role, gw *unstructured.Unstructured) error {
	if gw.GetDeletionTimestamp() != nil {
		return nil
	}
	proxy := e.parameters(gw)
	name, labels := proxyName(gw), map[string]any{
		"app.kubernetes.io/name": "envoy", "app.kubernetes.io/component": "proxy", "app.kubernetes.io/managed-by": "envoy-gateway",
		"gateway.envoyproxy.io/owning-gateway-name": gw.GetName(), "gateway.envoyproxy.io/owning-gateway-namespace": gw.GetNamespace(),
	}
	// The real one owns them through the GatewayClass, which outlives the
	// Gateway; it deletes them itself. Within one namespace this comes to the same.
	meta := map[string]any{"name": name, "namespace": envoyNamespace, "labels": labels}
	if gw.GetNamespace() == envoyNamespace {
		meta["ownerReferences"] = owner(gw)
	}
	errs := []error{
		r.ensure(ctx, serviceAccounts, map[string]any{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": union(meta)}),
		r.ensure(ctx, deployments, e.deployment(r, gw, proxy, union(meta))),
		r.ensure(ctx, services, e.service(gw, proxy, union(meta))),
	}
	addresses, err := e.addresses(ctx, name)
	errs = append(errs, err)

	generation := gw.GetGeneration()
	programmed := yes("Programmed", "Programmed", "Address assigned to the Gateway, 1/1 envoy replicas available", generation)
	deployment := e.get(deployments, envoyNamespace, name)
	switch {
	case len(addresses) == 0:
		programmed = no("Programmed", "AddressNotAssigned", "No addresses have been assigned to the Gateway", generation)
	case deployment == nil || !available(deployments, deployment):
		programmed = no("Programmed", "NoResources", "Deployment replicas unavailable", generation)
	default:
		if err := e.proxies.keep(e.programmed())[gw.GetUID()]; err != nil {
			programmed = no("Programmed", "AddressNotUsable", err.Error(), generation)
		}
	}
	var listeners []any
	old := items(gw.Object, "status", "listeners")
	for _, l := range items(gw.Object, "spec", "listeners") {
		var before any
		if i := slices.IndexFunc(old, func(o map[string]any) bool { return str(o, "name") == str(l, "name") }); i >= 0 {
			before = old[i]["conditions"]
		}
		attached := 0
		for _, route := range e.list(httpRoutes, "") {
			for _, ref := range items(route.Object, "spec", "parentRefs") {
				if e.attaches(route, ref, gw, l) {
					attached++
				}
			}
		}
		listeners = append(listeners, map[string]any{
			"name": str(l, "name"), "attachedRoutes": attached,
			"supportedKinds": []any{map[string]any{"group": gatewayGroup, "kind": "HTTPRoute"}},
			"conditions": conditions(before,
				yes("Programmed", "Programmed", "Sending translated listener configuration to the data plane", generation),
				yes("Accepted", "Accepted", "Listener has been successfully translated", generation),
				yes("ResolvedRefs", "ResolvedRefs", "Listener references have been resolved", generation)),
		})
	}
	errs = append(errs, r.status(ctx, gateways, gw, func(status map[string]any) {
		status["addresses"] = addresses
		status["listeners"] = listeners
		status["conditions"] = conditions(status["conditions"],
			yes("Accepted", "Accepted", "The Gateway has been scheduled by Envoy Gateway", generation), programmed)
	}))
	return errors.Join(errs...)
}

// parameters is the EnvoyProxy of a Gateway, or nil.
func (e *envoyGateway) parameters(gw *unstructured.Unstructured) *unstructured.Unstructured {
	if ref := sub(gw.Object, "spec", "infrastructure", "parametersRef"); ref != nil {
		return e.get(envoyProxies, gw.GetNamespace(), str(ref, "name"))
	}
	class := e.get(gatewayClasses, "", str(gw.Object, "spec", "gatewayClassName"))
	if class == nil {
		return nil
	}
	return e.get(envoyProxies, str(class.Object, "spec", "parametersRef", "namespace"), str(class.Object, "spec", "parametersRef", "name"))
}

func provider(proxy *unstructured.Unstructured, field string) map[string]any {
	if proxy == nil {
		return nil
	}
	return sub(proxy.Object, "spec", "provider", "kubernetes", field)
}

// deployment is the proxy's, with what admission and the scheduler look at.
func (e *envoyGateway) deployment(r *role, gw, proxy *unstructured.Unstructured, meta map[string]any) map[string]any {
	settings := provider(proxy, "envoyDeployment")
	restricted := map[string]any{
		"allowPrivilegeEscalation": false, "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532,
		"capabilities": map[string]any{"drop": []any{"ALL"}}, "seccompProfile": map[string]any{"type": "RuntimeDefault"},
	}
	manager := map[string]any{"requests": map[string]any{"cpu": "10m", "memory": "32Mi"}}
	image := ""
	if containers := items(r.spec, "containers"); len(containers) > 0 {
		image = str(containers[0], "image") // the shutdown manager is the controller's own image
	}
	labels := sub(meta, "labels")
	pod := map[string]any{
		"serviceAccountName": str(meta, "name"), "automountServiceAccountToken": false,
		"containers": []any{
			map[string]any{
				"name": "envoy",
				// The default is compiled into the release; without an EnvoyProxy that
				// names an image the stand-in cannot know it.
				"image":           first(str(settings, "container", "image"), "docker.io/envoyproxy/envoy:unnamed-in-envoyproxy"),
				"resources":       firstOf(sub(settings, "container", "resources"), map[string]any{"requests": map[string]any{"cpu": "100m", "memory": "512Mi"}}),
				"ports":           e.containerPorts(gw),
				"securityContext": restricted,
			},
			map[string]any{
				"name": "shutdown-manager", "image": image, "args": []any{"envoy", "shutdown-manager"},
				"resources":       firstOf(sub(provider(proxy, "envoyDeployment"), "shutdownManager", "resources"), manager),
				"securityContext": restricted,
			},
		},
	}
	for from, to := range map[string]string{"securityContext": "securityContext", "priorityClassName": "priorityClassName", "nodeSelector": "nodeSelector", "tolerations": "tolerations", "affinity": "affinity"} {
		if v := at(settings, "pod", from); v != nil {
			pod[to] = v
		}
	}
	spec := map[string]any{
		"replicas": first64(integer(settings, "replicas"), 1),
		"selector": map[string]any{"matchLabels": labels},
		"template": map[string]any{"metadata": map[string]any{"labels": union(sub(settings, "pod", "labels"), labels)}, "spec": pod},
	}
	if strategy := sub(settings, "strategy"); strategy != nil {
		spec["strategy"] = strategy
	}
	return patched(map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}, sub(settings, "patch"))
}

// patched applies the patch an EnvoyProxy may carry; one that does not fit
// leaves the object as it was, as the real one does.
func patched(o, patch map[string]any) map[string]any {
	if patch == nil {
		return o
	}
	original, err := json.Marshal(o)
	if err != nil {
		return o
	}
	change, err := json.Marshal(patch["value"])
	if err != nil {
		return o
	}
	var raw []byte
	if str(patch, "type") == "JSONMerge" {
		raw, err = jsonpatch.MergePatch(original, change)
	} else {
		raw, err = strategicpatch.StrategicMergePatch(original, change, appsv1.Deployment{})
	}
	out := map[string]any{}
	if err != nil || json.Unmarshal(raw, &out) != nil {
		return o
	}
	return out
}

func first64(values ...int64) int64 {
	for _, v := range values {
		if v != 0 {
			return v
		}
	}
	return 0
}

// containerPort moves privileged ports up, as the proxy runs without root.
func containerPort(port int64) int64 {
	if port < 1024 {
		return port + 10000
	}
	return port
}

func (e *envoyGateway) containerPorts(gw *unstructured.Unstructured) []any {
	ports := []any{map[string]any{"name": "metrics", "containerPort": 19001}, map[string]any{"name": "readiness", "containerPort": 19003}}
	seen := map[int64]bool{}
	for _, l := range items(gw.Object, "spec", "listeners") {
		if port := integer(l, "port"); !seen[port] {
			seen[port] = true
			ports = append(ports, map[string]any{"name": fmt.Sprintf("p-%d", port), "containerPort": containerPort(port)})
		}
	}
	return ports
}

func (e *envoyGateway) service(gw, proxy *unstructured.Unstructured, meta map[string]any) map[string]any {
	settings := provider(proxy, "envoyService")
	var ports []any
	seen := map[int64]bool{}
	for _, l := range items(gw.Object, "spec", "listeners") {
		if port := integer(l, "port"); !seen[port] {
			seen[port] = true
			ports = append(ports, map[string]any{"name": fmt.Sprintf("%s-%d", strings.ToLower(str(l, "protocol")), port),
				"port": port, "targetPort": containerPort(port), "protocol": "TCP"})
		}
	}
	selector := sub(meta, "labels")
	meta["labels"] = union(sub(settings, "labels"), selector)
	kind := first(str(settings, "type"), "LoadBalancer")
	spec := map[string]any{"type": kind, "selector": selector, "ports": ports}
	if kind != "ClusterIP" {
		spec["externalTrafficPolicy"] = first(str(settings, "externalTrafficPolicy"), "Local")
	}
	if ips := texts(settings, "externalIPs"); len(ips) > 0 {
		spec["externalIPs"] = ips
	}
	return map[string]any{"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}
}

// addresses are those of the proxy's Service. As servicelb would, it first gives
// a LoadBalancer this machine's: that is where the proxy answers.
func (e *envoyGateway) addresses(ctx context.Context, name string) ([]any, error) {
	svc := e.get(services, envoyNamespace, name)
	if svc == nil {
		return nil, nil
	}
	ip := "127.0.0.1"
	switch kind := str(svc.Object, "spec", "type"); {
	case len(texts(svc.Object, "spec", "externalIPs")) > 0:
		ip = texts(svc.Object, "spec", "externalIPs")[0]
	case kind == "ClusterIP":
		ip = str(svc.Object, "spec", "clusterIP")
	case kind == "LoadBalancer" && len(items(svc.Object, "status", "loadBalancer", "ingress")) == 0:
		lb := &role{plane: e.plane, name: "rehearsal/servicelb", client: e.admin}
		return nil, lb.status(ctx, services, svc, func(status map[string]any) {
			status["loadBalancer"] = map[string]any{"ingress": []any{map[string]any{"ip": ip}}}
		})
	}
	return []any{map[string]any{"type": "IPAddress", "value": ip}}, nil
}

// attaches says whether a route's parentRef names a listener that lets it in.
func (e *envoyGateway) attaches(route *unstructured.Unstructured, ref map[string]any, gw *unstructured.Unstructured, listener map[string]any) bool {
	if first(str(ref, "kind"), "Gateway") != "Gateway" || str(ref, "name") != gw.GetName() ||
		first(str(ref, "namespace"), route.GetNamespace()) != gw.GetNamespace() ||
		(str(ref, "sectionName") != "" && str(ref, "sectionName") != str(listener, "name")) ||
		(integer(ref, "port") != 0 && integer(ref, "port") != integer(listener, "port")) {
		return false
	}
	switch first(str(listener, "allowedRoutes", "namespaces", "from"), "Same") {
	case "All":
		return true
	case "Selector":
		ns := e.get(namespaces, "", route.GetNamespace())
		return ns != nil && selects(sub(listener, "allowedRoutes", "namespaces", "selector"), ns.GetLabels())
	case "None":
		return false
	default:
		return route.GetNamespace() == gw.GetNamespace()
	}
}

func (e *envoyGateway) route(ctx context.Context, r *role, route *unstructured.Unstructured) error {
	resolved := yes("ResolvedRefs", "ResolvedRefs", "Resolved all the Object references for the Route", route.GetGeneration())
	for _, rule := range items(route.Object, "spec", "rules") {
		for _, b := range items(rule, "backendRefs") {
			if e.get(services, first(str(b, "namespace"), route.GetNamespace()), str(b, "name")) == nil {
				resolved = no("ResolvedRefs", "BackendNotFound", "Service "+str(b, "name")+" not found", route.GetGeneration())
			}
		}
	}
	return r.parents(ctx, httpRoutes, route, "parents", "parentRef", items(route.Object, "spec", "parentRefs"), func(ref map[string]any) []condition {
		gw := e.get(gateways, first(str(ref, "namespace"), route.GetNamespace()), str(ref, "name"))
		if gw == nil || !e.ours(gw) {
			return nil
		}
		for _, l := range items(gw.Object, "spec", "listeners") {
			if e.attaches(route, ref, gw, l) {
				return []condition{yes("Accepted", "Accepted", "Route is accepted", route.GetGeneration()), resolved}
			}
		}
		return []condition{no("Accepted", "NotAllowedByListeners", "No listeners included by this parent ref allowed this attachment.", route.GetGeneration()), resolved}
	})
}

// policy answers one of Envoy Gateway's own policies for each of its targets.
func (e *envoyGateway) policy(ctx context.Context, r *role, k kind, policy *unstructured.Unstructured) error {
	targets := items(policy.Object, "spec", "targetRefs")
	if t := sub(policy.Object, "spec", "targetRef"); t != nil {
		targets = append(targets, t)
	}
	var ancestors []map[string]any
	found := true
	for _, t := range targets {
		switch str(t, "kind") {
		case "Gateway":
			found = found && e.get(gateways, policy.GetNamespace(), str(t, "name")) != nil
			ancestors = append(ancestors, map[string]any{"group": gatewayGroup, "kind": "Gateway", "name": str(t, "name"), "namespace": policy.GetNamespace()})
		case "HTTPRoute":
			route := e.get(httpRoutes, policy.GetNamespace(), str(t, "name"))
			if route == nil {
				found = false
				continue
			}
			for _, p := range items(route.Object, "spec", "parentRefs") {
				ancestors = append(ancestors, map[string]any{"group": gatewayGroup, "kind": "Gateway", "name": str(p, "name"),
					"namespace": first(str(p, "namespace"), policy.GetNamespace())})
			}
		}
	}
	verdict := yes("Accepted", "Accepted", "Policy has been accepted.", policy.GetGeneration())
	if !found {
		verdict = no("Accepted", "TargetNotFound", "A target of the policy does not exist.", policy.GetGeneration())
	} else if k == securityPols {
		if _, err := e.proxies.keys(policy); err != nil {
			verdict = no("Accepted", "Invalid", err.Error(), policy.GetGeneration())
		}
	}
	return r.parents(ctx, k, policy, "ancestors", "ancestorRef", ancestors, func(map[string]any) []condition {
		return []condition{verdict}
	})
}

// parents writes a status that is a list of answers, one per parent or ancestor.
func (r *role) parents(ctx context.Context, k kind, o *unstructured.Unstructured, list, ref string, refs []map[string]any, answer func(ref map[string]any) []condition) error {
	old := items(o.Object, "status", list)
	answers := []any{}
	for _, a := range refs {
		wanted := answer(a)
		if wanted == nil {
			continue
		}
		a = union(map[string]any{"group": gatewayGroup, "kind": "Gateway"}, a)
		var before any
		for _, b := range old {
			if digest(b[ref]) == digest(a) {
				before = b["conditions"]
			}
		}
		answers = append(answers, map[string]any{ref: a, "controllerName": envoyController, "conditions": conditions(before, wanted...)})
	}
	if len(answers) == 0 {
		return nil
	}
	return r.status(ctx, k, o, func(status map[string]any) { status[list] = answers })
}
