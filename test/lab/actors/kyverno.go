package actors

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/json"
)

const (
	kyvernoNamespace = "kyverno"
	kyvernoWorkload  = "kyverno-admission-controller"
	kyvernoActor     = "rehearsal/kyverno"
	validatePath     = "/vpol/validate"
	mutatePath       = "/mpol/mutate"
)

// kyverno stands in for Kyverno's admission controller: it makes the webhook
// configurations Kyverno makes (those for resources only while there are
// policies), says that policies are ready, and answers admission.
//
// It does not evaluate a policy's validations or mutations. It knows a few
// rules by heart, each switched on by a policy whose expressions speak of it: a
// GPU limit brings the runtime class nvidia; privileged containers, the host's
// namespaces, and pods without priority class or requests are refused with the
// policy's message. Selectors and match conditions are the API server's own
// work and real. So a refusal here shows that webhooks and policies are in
// place, never that a policy's expressions are right.
type kyverno struct{ *plane }

func newKyverno(p *plane) *actor {
	k := &kyverno{p}
	p.directory.add(&server{address: address{kyvernoNamespace, kyvernoWorkload, 9443}, name: kyvernoActor, secure: true,
		handler: admit(func(a *admission) *verdict { return k.decide(a) })})
	return &actor{
		name:      kyvernoActor,
		watches:   []kind{deployments, secrets, configMaps, namespaces, clusterRoles, validatingHooks, mutatingHooks, validatingPols, mutatingPols},
		reconcile: k.reconcile,
	}
}

func (k *kyverno) reconcile(ctx context.Context) error {
	r, ok, err := k.standIn(kyvernoActor, deployments, kyvernoNamespace, kyvernoWorkload)
	if err != nil || !ok {
		return err
	}
	// The policy webhooks are made first; those of resources follow the policies.
	errs := []error{
		k.certificates(ctx, r),
		r.ensure(ctx, validatingHooks, k.configuration(validatingHooks, "ValidatingWebhookConfiguration", "kyverno-policy-validating-webhook-cfg", []any{
			k.hook(r, "validate-policy.kyverno.svc", "/policyvalidate", "Fail", policyRules(), nil)})),
		r.ensure(ctx, mutatingHooks, k.configuration(mutatingHooks, "MutatingWebhookConfiguration", "kyverno-policy-mutating-webhook-cfg", []any{
			k.hook(r, "mutate-policy.kyverno.svc", "/policymutate", "Fail", policyRules(), nil)})),
		k.resourceHooks(ctx, r, validatingHooks, validatingPols, "ValidatingWebhookConfiguration", "kyverno-resource-validating-webhook-cfg", "vpol.validate", validatePath),
		k.resourceHooks(ctx, r, mutatingHooks, mutatingPols, "MutatingWebhookConfiguration", "kyverno-resource-mutating-webhook-cfg", "mpol.mutate", mutatePath),
	}
	for _, kind := range []kind{validatingPols, mutatingPols} {
		for _, policy := range k.list(kind, "") {
			errs = append(errs, r.status(ctx, kind, policy, func(status map[string]any) {
				state := sub(status, "conditionStatus")
				if state == nil {
					state = map[string]any{}
					status["conditionStatus"] = state
				}
				state["ready"], state["message"] = true, ""
				state["conditions"] = conditions(state["conditions"],
					yes("WebhookConfigured", "Succeeded", "Webhook configured.", 0),
					yes("PolicyCached", "Succeeded", "Policy is ready for reporting.", 0),
					yes("RBACPermissionsGranted", "Succeeded", "Policy is ready for reporting.", 0))
			}))
		}
	}
	return errors.Join(errs...)
}

func policyRules() []any {
	return []any{map[string]any{"apiGroups": []any{"policies.kyverno.io"}, "apiVersions": []any{"v1"}, "scope": "*",
		"resources": []any{"validatingpolicies", "mutatingpolicies"}, "operations": []any{"CREATE", "UPDATE"}}}
}

// resourceHooks makes one webhook per failure policy in use, for what the
// policies match, and one for each policy with conditions or a namespace
// selector of its own, which the API server then evaluates itself. The
// configuration stays, empty, after the last policy.
func (k *kyverno) resourceHooks(ctx context.Context, r *role, hooks, policies kind, object, name, prefix, path string) error {
	grouped := map[string][]any{}
	var webhooks []any
	for _, p := range k.list(policies, "") {
		if p.GetDeletionTimestamp() != nil {
			continue
		}
		failure := first(str(p.Object, "spec", "failurePolicy"), "Fail")
		if flagsOf(r.spec)["forceFailurePolicyIgnore"] == "true" {
			failure = "Ignore"
		}
		rules := rulesOf(p)
		match := sub(p.Object, "spec", "matchConstraints")
		conditions := items(p.Object, "spec", "matchConditions")
		if len(conditions) == 0 && sub(match, "namespaceSelector") == nil && sub(match, "objectSelector") == nil {
			grouped[failure] = append(grouped[failure], rules...)
			continue
		}
		suffix := strings.ToLower(failure)
		h := k.hook(r, prefix+".kyverno.svc-"+suffix+"-finegrained-"+p.GetName(), path+"/"+suffix+"/finegrained/"+p.GetName(), failure, rules,
			both(k.namespaceSelector(), sub(match, "namespaceSelector")))
		if len(conditions) > 0 {
			h["matchConditions"] = conditions
		}
		if selector := sub(match, "objectSelector"); selector != nil {
			h["objectSelector"] = selector
		}
		webhooks = append(webhooks, h)
	}
	for _, failure := range []string{"Fail", "Ignore"} {
		if len(grouped[failure]) > 0 {
			suffix := strings.ToLower(failure)
			webhooks = append(webhooks, k.hook(r, prefix+".kyverno.svc-"+suffix, path+"/"+suffix, failure, grouped[failure], k.namespaceSelector()))
		}
	}
	if len(webhooks) == 0 && k.get(hooks, "", name) == nil {
		return nil
	}
	return r.ensure(ctx, hooks, k.configuration(hooks, object, name, webhooks))
}

func rulesOf(policy *unstructured.Unstructured) []any {
	var rules []any
	for _, m := range items(policy.Object, "spec", "matchConstraints", "resourceRules") {
		rules = append(rules, map[string]any{
			"apiGroups": m["apiGroups"], "apiVersions": m["apiVersions"], "operations": m["operations"], "resources": m["resources"],
			"scope": first(str(m, "scope"), "*"),
		})
	}
	return rules
}

// both is the selector that takes what two take.
func both(a, b map[string]any) map[string]any {
	if len(a) == 0 || len(b) == 0 {
		return firstOf(a, b)
	}
	expressions := []any{}
	for _, s := range []map[string]any{a, b} {
		for _, e := range items(s, "matchExpressions") {
			expressions = append(expressions, e)
		}
	}
	return map[string]any{"matchLabels": union(sub(a, "matchLabels"), sub(b, "matchLabels")), "matchExpressions": expressions}
}

// setting decodes a JSON entry of Kyverno's ConfigMap into the first object in it.
func (k *kyverno) setting(name string) map[string]any {
	config := k.get(configMaps, kyvernoNamespace, "kyverno")
	if config == nil {
		return nil
	}
	var one map[string]any
	text := []byte(str(config.Object, "data", name))
	if err := json.Unmarshal(text, &one); err == nil {
		return one
	}
	var several []any // the older form is a list
	if err := json.Unmarshal(text, &several); err == nil && len(several) > 0 {
		m, _ := several[0].(map[string]any)
		return m
	}
	return nil
}

func (k *kyverno) namespaceSelector() map[string]any {
	return sub(k.setting("webhooks"), "namespaceSelector")
}

// configuration belongs, as Kyverno's do, to the ClusterRole whose name ends in
// ":webhook", so that it goes away with the release.
func (k *kyverno) configuration(hooks kind, object, name string, webhooks []any) map[string]any {
	meta := map[string]any{"name": name, "labels": map[string]any{"webhook.kyverno.io/managed-by": "kyverno"}}
	if annotations := k.setting("webhookAnnotations"); annotations != nil {
		meta["annotations"] = annotations
	}
	if live := k.get(hooks, "", name); live != nil && len(live.GetOwnerReferences()) > 0 {
		// Kept even when the role is going: this object goes with it.
		meta["ownerReferences"] = at(live.Object, "metadata", "ownerReferences")
	}
	for _, role := range k.list(clusterRoles, "") {
		if role.GetLabels()["app.kubernetes.io/part-of"] != "" && strings.HasSuffix(role.GetName(), "kyverno:webhook") && role.GetDeletionTimestamp() == nil {
			meta["ownerReferences"] = []any{map[string]any{"apiVersion": role.GetAPIVersion(), "kind": role.GetKind(), "name": role.GetName(), "uid": string(role.GetUID())}}
		}
	}
	if webhooks == nil {
		webhooks = []any{}
	}
	return map[string]any{"apiVersion": "admissionregistration.k8s.io/v1", "kind": object, "metadata": meta, "webhooks": webhooks}
}

func (k *kyverno) hook(r *role, name, path, failure string, rules []any, selector map[string]any) map[string]any {
	timeout, err := strconv.ParseInt(flagsOf(r.spec)["webhookTimeout"], 10, 32)
	if err != nil {
		timeout = 10
	}
	h := map[string]any{
		"name": name, "admissionReviewVersions": []any{"v1"}, "sideEffects": "NoneOnDryRun", "failurePolicy": failure,
		"matchPolicy": "Equivalent", "timeoutSeconds": timeout, "rules": rules,
		"clientConfig": map[string]any{
			"caBundle": base64.StdEncoding.EncodeToString(k.ca.bundle),
			"service":  map[string]any{"namespace": kyvernoNamespace, "name": serviceName(r.spec), "path": path, "port": 443},
		},
	}
	if selector != nil {
		h["namespaceSelector"] = selector
	}
	return h
}

// serviceName is what the pod's environment tells Kyverno.
func serviceName(spec map[string]any) string {
	for _, c := range items(spec, "containers") {
		for _, e := range items(c, "env") {
			if str(e, "name") == "KYVERNO_SVC" && str(e, "value") != "" {
				return str(e, "value")
			}
		}
	}
	return "kyverno-svc"
}

// certificates fills the Secrets Kyverno keeps its CA and its pair in.
func (k *kyverno) certificates(ctx context.Context, r *role) error {
	host := serviceName(r.spec) + "." + kyvernoNamespace + ".svc"
	certificate, key, err := k.ca.pair(host)
	if err != nil {
		return err
	}
	var errs []error
	for name, data := range map[string]map[string]any{
		host + ".kyverno-tls-ca":   {"tls.crt": k.ca.bundle, "tls.key": key},
		host + ".kyverno-tls-pair": {"tls.crt": certificate, "tls.key": key},
	} {
		if k.get(secrets, kyvernoNamespace, name) == nil {
			errs = append(errs, r.ensure(ctx, secrets, map[string]any{"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "data": data,
				"metadata": map[string]any{"name": name, "namespace": kyvernoNamespace, "labels": map[string]any{"cert.kyverno.io/managed-by": "kyverno"}}}))
		}
	}
	return errors.Join(errs...)
}

// known is one rule the stand-in knows by heart: a policy that contains the
// word switches it on, and breaks says whether a pod breaks it.
type known struct {
	word   string
	breaks func(spec map[string]any, containers []map[string]any) bool
}

func knownRules() []known {
	return []known{
		{"securityContext.privileged", func(_ map[string]any, containers []map[string]any) bool {
			return slices.ContainsFunc(containers, func(c map[string]any) bool { return truth(c, "securityContext", "privileged") })
		}},
		{"spec.hostPID", func(spec map[string]any, _ []map[string]any) bool {
			return truth(spec, "hostPID") || truth(spec, "hostIPC") || truth(spec, "hostNetwork")
		}},
		{"spec.priorityClassName", func(spec map[string]any, _ []map[string]any) bool { return str(spec, "priorityClassName") == "" }},
		{"resources.requests", func(_ map[string]any, containers []map[string]any) bool {
			return slices.ContainsFunc(containers, func(c map[string]any) bool {
				given := union(sub(c, "resources", "limits"), sub(c, "resources", "requests"))
				return given["cpu"] == nil || given["memory"] == nil
			})
		}},
	}
}

// decide answers for pods; everything else passes.
func (k *kyverno) decide(a *admission) *verdict {
	if str(a.Object, "kind") != "Pod" || a.Operation != "CREATE" {
		return allowed()
	}
	spec := sub(a.Object, "spec")
	containers := slices.Concat(items(spec, "initContainers"), items(spec, "containers"))
	_, only, _ := strings.Cut(a.path, "/finegrained/")
	switch {
	case strings.HasPrefix(a.path, mutatePath):
		for _, p := range k.asked(mutatingPols, a, only) {
			if strings.Contains(text(p), "runtimeClassName") && str(spec, "runtimeClassName") == "" && slices.ContainsFunc(containers, wantsGPU) {
				return &verdict{allowed: true, patch: []map[string]any{{"op": "add", "path": "/spec/runtimeClassName", "value": "nvidia"}}}
			}
		}
	case strings.HasPrefix(a.path, validatePath):
		for _, p := range k.asked(validatingPols, a, only) {
			for _, rule := range knownRules() {
				for _, v := range items(p.Object, "spec", "validations") {
					if strings.Contains(str(v, "expression"), rule.word) && rule.breaks(spec, containers) && denies(p) {
						return denied(fmt.Sprintf("Policy %s failed: %s (simulated by %s)", p.GetName(), str(v, "message"), kyvernoActor))
					}
				}
			}
		}
	}
	return allowed()
}

func wantsGPU(c map[string]any) bool {
	v := at(c, "resources", "limits", gpuResource)
	return v != nil && v != "0"
}

// denies says whether a policy refuses, rather than only audits or warns.
func denies(p *unstructured.Unstructured) bool {
	actions := texts(p.Object, "spec", "validationActions")
	return len(actions) == 0 || slices.Contains(actions, "Deny")
}

func text(p *unstructured.Unstructured) string {
	raw, err := json.Marshal(sub(p.Object, "spec"))
	if err != nil {
		return ""
	}
	return string(raw)
}

// asked are the policies a call is about: the one its path names, or all whose
// namespace selector takes in the pod's namespace.
func (k *kyverno) asked(kind kind, a *admission, only string) []*unstructured.Unstructured {
	return slices.DeleteFunc(k.list(kind, ""), func(p *unstructured.Unstructured) bool {
		if p.GetDeletionTimestamp() != nil || (only != "" && p.GetName() != only) {
			return true
		}
		selector := sub(p.Object, "spec", "matchConstraints", "namespaceSelector")
		ns := k.get(namespaces, "", a.Namespace)
		return selector != nil && (ns == nil || !selects(selector, ns.GetLabels()))
	})
}
