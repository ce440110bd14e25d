package snapshot

import (
	"regexp"
	"slices"
	"strings"
)

// What is kept of an object of the cluster. Where an object can hold anything, such as
// a pod's environment and arguments, only what a judge looks at is taken; all texts go
// through the redaction.

// pick keeps the named fields.
func pick(from map[string]any, names ...string) map[string]any {
	if from == nil {
		return nil
	}
	out := map[string]any{}
	for _, n := range names {
		if v, ok := from[n]; ok {
			out[n] = redactValue(v, n)
		}
	}
	return out
}

func sub(from map[string]any, name string) map[string]any {
	m, _ := from[name].(map[string]any)
	return m
}

// each picks from every object of a list.
func each(v any, keep func(map[string]any) map[string]any) []any {
	out := []any{}
	for _, one := range list(v) {
		out = append(out, keep(one))
	}
	return out
}

// keptAnnotations are what a judge asks for.
func keptAnnotations(name string) bool {
	return strings.HasPrefix(name, "llmbox.dev/") || strings.HasPrefix(name, "vault.hashicorp.com/agent-inject") ||
		name == "storageclass.kubernetes.io/is-default-class" || strings.HasPrefix(name, "meta.helm.sh/")
}

// trimMetadata leaves of an object's metadata what names it.
func trimMetadata(item map[string]any, only bool) map[string]any {
	meta := sub(item, "metadata")
	kept := pick(meta, "name", "namespace", "labels", "creationTimestamp", "deletionTimestamp", "finalizers", "generateName")
	annotations := map[string]any{}
	for name, v := range sub(meta, "annotations") {
		if keptAnnotations(name) {
			annotations[name] = redactValue(v, name)
		}
	}
	if len(annotations) > 0 {
		kept["annotations"] = annotations
	}
	if owners := list(meta["ownerReferences"]); len(owners) > 0 {
		kept["ownerReferences"] = each(meta["ownerReferences"], func(o map[string]any) map[string]any { return pick(o, "apiVersion", "kind", "name", "uid") })
	}
	if only {
		return map[string]any{"metadata": kept}
	}
	item["metadata"] = kept
	return item
}

func trimNode(o map[string]any) map[string]any {
	status := sub(o, "status")
	return map[string]any{
		"metadata": o["metadata"], "spec": pick(sub(o, "spec"), "taints", "unschedulable", "podCIDR"),
		"status": pick(status, "capacity", "allocatable", "conditions", "addresses", "nodeInfo"),
	}
}

func trimService(o map[string]any) map[string]any {
	return map[string]any{
		"metadata": o["metadata"], "spec": pick(sub(o, "spec"), "type", "clusterIP", "ports", "selector", "externalIPs", "loadBalancerClass"), "status": pick(sub(o, "status"), "loadBalancer"),
	}
}

func trimEvent(o map[string]any) map[string]any {
	out := pick(o, "reason", "message", "type", "count", "firstTimestamp", "lastTimestamp", "eventTime")
	out["metadata"] = pick(sub(o, "metadata"), "name", "namespace", "creationTimestamp")
	out["involvedObject"] = pick(sub(o, "involvedObject"), "kind", "namespace", "name")
	if series := sub(o, "series"); series != nil {
		out["series"] = pick(series, "count", "lastObservedTime")
	}
	if message, ok := out["message"].(string); ok {
		out["message"] = redactLog(message)
	}
	return out
}

func trimContainer(c map[string]any) map[string]any {
	out := pick(c, "name", "image", "resources", "volumeMounts")
	if ports := list(c["ports"]); len(ports) > 0 {
		out["ports"] = each(c["ports"], func(p map[string]any) map[string]any { return pick(p, "name", "containerPort", "hostPort", "protocol") })
	}
	for _, probe := range []string{"startupProbe", "livenessProbe", "readinessProbe"} {
		if p := sub(c, probe); p != nil {
			out[probe] = pick(p, "periodSeconds", "timeoutSeconds", "failureThreshold", "initialDelaySeconds")
		}
	}
	return out
}

func trimVolume(v map[string]any) map[string]any {
	out := pick(v, "name")
	if claim := sub(v, "persistentVolumeClaim"); claim != nil {
		out["persistentVolumeClaim"] = pick(claim, "claimName")
	}
	if dir := sub(v, "emptyDir"); dir != nil {
		out["emptyDir"] = pick(dir, "medium", "sizeLimit")
	}
	if at := sub(v, "hostPath"); at != nil {
		out["hostPath"] = pick(at, "path", "type")
	}
	if s := sub(v, "secret"); s != nil {
		out["secret"] = pick(s, "secretName", "optional")
	}
	if c := sub(v, "configMap"); c != nil {
		out["configMap"] = pick(c, "name", "optional")
	}
	return out
}

func trimState(state map[string]any) map[string]any {
	out := map[string]any{}
	if w := sub(state, "waiting"); w != nil {
		out["waiting"] = pick(w, "reason", "message")
	}
	if r := sub(state, "running"); r != nil {
		out["running"] = pick(r, "startedAt")
	}
	if t := sub(state, "terminated"); t != nil {
		out["terminated"] = pick(t, "exitCode", "signal", "reason", "message", "startedAt", "finishedAt")
	}
	return out
}

func trimStatus(c map[string]any) map[string]any {
	out := pick(c, "name", "ready", "restartCount", "started", "image")
	out["imageID"] = ""
	out["state"] = trimState(sub(c, "state"))
	out["lastState"] = trimState(sub(c, "lastState"))
	return out
}

func trimPod(o map[string]any) map[string]any {
	spec, status := sub(o, "spec"), sub(o, "status")
	outSpec := pick(spec, "nodeName", "runtimeClassName", "enableServiceLinks", "hostNetwork", "restartPolicy", "priorityClassName")
	outSpec["containers"] = each(spec["containers"], trimContainer)
	if len(list(spec["initContainers"])) > 0 {
		outSpec["initContainers"] = each(spec["initContainers"], trimContainer)
	}
	if len(list(spec["volumes"])) > 0 {
		outSpec["volumes"] = each(spec["volumes"], trimVolume)
	}
	outStatus := pick(status, "phase", "reason", "message", "podIP", "startTime")
	outStatus["conditions"] = each(status["conditions"], func(c map[string]any) map[string]any {
		return pick(c, "type", "status", "reason", "message", "lastTransitionTime")
	})
	for _, key := range []string{"initContainerStatuses", "containerStatuses"} {
		if len(list(status[key])) > 0 {
			outStatus[key] = each(status[key], trimStatus)
		}
	}
	return map[string]any{"metadata": o["metadata"], "spec": outSpec, "status": outStatus}
}

// trimWorkload keeps what a Deployment, StatefulSet, DaemonSet or Job wants and has.
func trimWorkload(o map[string]any) map[string]any {
	spec := sub(o, "spec")
	return map[string]any{
		"metadata": o["metadata"], "spec": pick(spec, "replicas", "strategy", "updateStrategy", "selector", "suspend", "backoffLimit", "progressDeadlineSeconds"),
		"status": redactValue(o["status"], "status"),
	}
}

func trimWebhooks(o map[string]any) map[string]any {
	return map[string]any{"metadata": o["metadata"], "webhooks": each(o["webhooks"], func(w map[string]any) map[string]any {
		out := pick(w, "name", "failurePolicy", "timeoutSeconds", "sideEffects")
		client := pick(sub(w, "clientConfig"), "service")
		if bundle, _ := sub(w, "clientConfig")["caBundle"].(string); bundle == "" {
			client["caBundle"] = ""
		}
		out["clientConfig"] = client
		return out
	})}
}

func trimAPIService(o map[string]any) map[string]any {
	return map[string]any{"metadata": o["metadata"], "spec": pick(sub(o, "spec"), "service", "group", "version"), "status": redactValue(o["status"], "status")}
}

// trimHelmChart leaves the values out: people put secrets there.
func trimHelmChart(o map[string]any) map[string]any {
	return map[string]any{
		"metadata": o["metadata"], "spec": pick(sub(o, "spec"), "chart", "version", "targetNamespace", "failurePolicy", "bootstrap", "timeout"), "status": redactValue(o["status"], "status"),
	}
}

// redactValue takes secrets out of whatever a field holds. A list of arguments is gone
// through with its order in mind: the value of a flag stands behind it.
func redactValue(v any, key string) any {
	switch v := v.(type) {
	case string:
		if key != "" && secretKey(key) && !referenceKey(key) {
			return redacted
		}
		return redactLog(v)
	case map[string]any:
		out := make(map[string]any, len(v))
		// A variable is a pair of name and value.
		name, _ := v["name"].(string)
		for k, one := range v {
			if _, text := one.(string); text && k == "value" && name != "" && secretKey(name) {
				out[k] = redacted
				continue
			}
			out[k] = redactValue(one, k)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, one := range v {
			if i > 0 {
				if flag, ok := v[i-1].(string); ok && strings.HasPrefix(flag, "-") && !strings.Contains(flag, "=") && secretKey(strings.TrimLeft(flag, "-")) {
					if _, text := one.(string); text {
						out[i] = redacted
						continue
					}
				}
			}
			out[i] = redactValue(one, "")
		}
		return out
	}
	return v
}

// referenceKey says whether a field of an object names a Secret instead of holding one.
func referenceKey(key string) bool {
	return slices.Contains([]string{
		"secretName", "existingSecret", "secretRef", "secretKeyRef", "tokenSecretRef", "passwordSecretRef", "authRef", "authenticationRef", "secretStoreRef", "imagePullSecrets", "secretTargetRef",
	}, key) || strings.HasSuffix(key, "Ref") || strings.HasSuffix(key, "Name")
}

var (
	// promptLine is how a model server logs what it was asked, and with which words it
	// answers: not for anybody else to read.
	promptLine = regexp.MustCompile(`(?i)((?:prompt|messages|input|completion|generated_text|prompt_token_ids|content)['"]?\s*[:=]\s*)('(?:[^'\\]|\\.)*'?|"(?:[^"\\]|\\.)*"?|\[[^\n]*)`)
	bearer     = regexp.MustCompile(`(?i)\b(bearer|basic|token)(\s+)([A-Za-z0-9._~+/=-]{12,})`)
	header     = regexp.MustCompile(`(?i)\b((?:proxy-)?authorization|x-api-key|api-key|x-vault-token|cookie|set-cookie|x-amz-security-token|x-auth-token)(['"]?\s*[:=]\s*['"]?)([^\r\n'"]+)`)
	// moreTokens show by their form what they are: Vault's, GitLab's, npm's, PyPI's,
	// Grafana's, Stripe's, SendGrid's, Google's, Docker's, age's, Slack's hooks and
	// signatures in URLs.
	moreTokens = regexp.MustCompile(`\b(?:hv[sbr]\.[A-Za-z0-9_-]{16,}|s\.[A-Za-z0-9]{24}\b|npm_[A-Za-z0-9]{20,}|pypi-[A-Za-z0-9_-]{16,}|gl(?:sa|c)_[A-Za-z0-9_]{16,}|[rsp]k_(?:live|test)_[A-Za-z0-9]{16,}|` +
		`SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{16,}|dckr_(?:pat|oat)_[A-Za-z0-9_-]{16,}|AGE-SECRET-KEY-1[A-Z0-9]{20,}|` +
		`hooks\.slack\.com/services/[A-Za-z0-9/]+|discord(?:app)?\.com/api/webhooks/[A-Za-z0-9/_-]+|[a-f0-9]{32}-us\d{1,2}|github_pat_[A-Za-z0-9_]{16,}|sk-(?:ant|proj|or)-[A-Za-z0-9_-]{16,}|` +
		`xapp-[A-Za-z0-9-]{10,}|lin_api_[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{16,}|gsk_[A-Za-z0-9]{20,}|nvapi-[A-Za-z0-9_-]{16,}|K10[0-9a-f]{16,}(?:::\S+)?)`)
	signature = regexp.MustCompile(`(?i)([?&](?:sig|signature|x-amz-signature|x-amz-credential|x-goog-signature|token|key|api_key|apikey|access_token|sharedaccesskey|code)=)[^&\s"']+`)
	accessKey = regexp.MustCompile(`(?i)((?:account|shared ?access|secret ?access)_?key(?:name)?\s*[=:]\s*)[^\s;,"']+`)
	base64Key = regexp.MustCompile(`((?:client-key-data|client-certificate-data|certificate-authority-data|\.dockerconfigjson|tls\.key|ssh-privatekey)["']?\s*[:=]\s*["']?)[A-Za-z0-9+/=]{16,}`)
	pemBody   = regexp.MustCompile(`(?m)^(?:[A-Za-z0-9+/]{64}\n){3,}[A-Za-z0-9+/=]+$`)
)

// redactLog takes secrets and prompts out of a text that anybody may have written.
func redactLog(text string) string {
	if strings.Contains(text, "PRIVATE KEY") {
		text = privateKey.ReplaceAllString(text, redacted)
	}
	// A program that quotes another's words writes their line ends as \n.
	if strings.Contains(text, `\n`) {
		parts := strings.Split(text, `\n`)
		for i, part := range parts {
			parts[i] = redactLog(part)
		}
		text = strings.Join(parts, `\n`)
	}
	text = redact(text)
	lower := strings.ToLower(text)
	if strings.Contains(lower, "prompt") || strings.Contains(lower, "messages") || strings.Contains(lower, "content") || strings.Contains(lower, "generated_text") || strings.Contains(lower, "completion") {
		text = promptLine.ReplaceAllString(text, "${1}"+redacted)
	}
	if strings.Contains(lower, "bearer") || strings.Contains(lower, "basic ") || strings.Contains(lower, "token ") {
		text = replaceGroups(bearer, text, func(g []string) string {
			// A word of prose has no digit; a credential has.
			if !strings.ContainsAny(g[3], "0123456789") {
				return g[0]
			}
			return g[1] + g[2] + redacted
		})
	}
	if strings.Contains(lower, "authorization") || strings.Contains(lower, "api-key") || strings.Contains(lower, "cookie") || strings.Contains(lower, "-token") {
		text = header.ReplaceAllString(text, "${1}${2}"+redacted)
	}
	text = moreTokens.ReplaceAllString(text, redacted)
	if strings.Contains(text, "=") {
		text = signature.ReplaceAllString(text, "${1}"+redacted)
		text = accessKey.ReplaceAllString(text, "${1}"+redacted)
	}
	text = base64Key.ReplaceAllString(text, "${1}"+redacted)
	return pemBody.ReplaceAllString(text, redacted)
}
