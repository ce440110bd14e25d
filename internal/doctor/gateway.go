package doctor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

func gatewayChecks() []Check {
	modelDown := []string{"model.*", "workload.failing", "workload.unexplained", "workload.missing", "model.rollout_deadlock", "secrets.hf_token_missing", "pod.*", "gpu.*", "runtime.*", "image.*"}
	below := append(append(nodeRoots(), networkRoots()...), "image.pull.*", "operator.webhook.blocking", "helm.release.*", "workload.unexplained", "net.service_route")
	below, modelDown = slices.Clip(below), slices.Clip(modelDown)
	return []Check{
		{
			ID: "gateway.no_address", Layer: LayerGateway, Title: "Gateway without an address", Reads: "Gateway's conditions, its Service, servicelb", Rule: "an address, by servicelb, a NodePort or external addresses",
			Source: "envoyproxy/gateway#1654, #7395; docs.k3s.io/networking, service load balancer", Judge: judgeGatewayAddress,
			Fix: "Let k3s give it one: take servicelb out of disable in /etc/rancher/k3s/config.yaml, then: sudo systemctl restart k3s", Causes: append(below, "gateway.controller", "pod.host_port"),
		},
		{
			ID: "gateway.not_programmed", Layer: LayerGateway, Title: "Gateway that is not in force", Reads: "Gateways and their listeners", Rule: "Accepted and Programmed",
			Source: "gateway-api.sigs.k8s.io, Gateway status; envoyproxy/gateway docs", Judge: judgeGatewayState, Fix: "kubectl -n envoy-gateway-system describe gateway",
			Causes: append(below, "gateway.no_address", "gateway.controller", "gateway.certificate", "gateway.proxy"),
		},
		{
			ID: "gateway.controller", Layer: LayerGateway, Title: "Envoy Gateway", Reads: "pods of Envoy Gateway", Rule: "ready",
			Source: "envoyproxy/gateway docs, troubleshooting", Judge: judgeGatewayPods("envoy-gateway-", "gateway.controller"), Fix: "kubectl -n envoy-gateway-system rollout restart deploy/envoy-gateway",
			Causes: append(below, "secrets.missing", "workload.missing"),
		},
		{
			ID: "gateway.proxy", Layer: LayerGateway, Title: "Envoy", Reads: "pods of Envoy", Rule: "ready",
			Source: "envoyproxy/gateway docs, troubleshooting", Judge: judgeGatewayPods("envoy-", "gateway.proxy"), Fix: "kubectl -n envoy-gateway-system get pods", Causes: append(below, "gateway.controller", "pod.host_port"),
		},
		{
			ID: "gateway.route", Layer: LayerGateway, Title: "Route to the model", Reads: "HTTPRoutes, their parents' conditions and the Services behind", Rule: "accepted, with references that resolve",
			Source: "gateway-api.sigs.k8s.io, Route status; envoyproxy/gateway#6068", Judge: judgeRoutes, Fix: "sudo llmbox install", Causes: append(below, "gateway.not_programmed", "gateway.controller", "gateway.no_address"),
		},
		{
			ID: "gateway.policy", Layer: LayerGateway, Title: "Policies of the gateway", Reads: "SecurityPolicies, BackendTrafficPolicies and ClientTrafficPolicies", Rule: "accepted",
			Source: "envoyproxy/gateway docs, policy attachment", Judge: judgePolicies, Fix: "sudo llmbox install", Causes: append(below, "gateway.route", "gateway.controller", "secrets.missing", "secrets.external"),
		},
		{
			ID: "gateway.no_upstream", Layer: LayerGateway, Title: "Nobody behind the route", Reads: "endpoints of the model's Service, the gateway's log", Rule: "at least one endpoint that is ready",
			Source: "envoyproxy/gateway#6068, #8212; vllm-project/production-stack#619", Judge: judgeUpstreams, Fix: "See the model first: kubectl -n llm get pods",
			Causes: append(append(modelDown, below...), "gateway.route"),
		},
		{
			ID: "gateway.route_timeout", Layer: LayerGateway, Title: "Gateway that cuts answers off", Reads: "timeouts of the HTTPRoute, idle timeouts of policies, the gateway's log", Rule: "no limit on a request, and an idle limit above the longest pause",
			Source: "modelplaneai/modelplane#174; vllm-project/aibrix#1810; gpustack/gpustack#4725", Judge: judgeTimeouts,
			Fix: "Set timeouts.request: 0s in the HTTPRoute, and a longer idle timeout in a BackendTrafficPolicy; llmbox's own route has both: sudo llmbox install",
		},
		{
			ID: "gateway.certificate", Layer: LayerGateway, Title: "Certificate of the gateway", Reads: "certificates of Secrets that the gateway serves", Rule: "valid for 14 days more",
			Source: "gateway-api.sigs.k8s.io, TLS; envoyproxy/gateway certgen", Judge: judgeServedCertificates, Fix: "Put a new certificate into the Secret that gateway.tls.existingSecret names", Causes: []string{"host.clock"},
		},
	}
}

func judgeGatewayAddress(f *facts) []finding.Finding {
	gateways, had := f.objects("gateways")
	if !had {
		return nil
	}
	pending := ""
	var pendingService *corev1.Service
	for i := range f.services {
		s := &f.services[i]
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer && len(s.Status.LoadBalancer.Ingress) == 0 && len(s.Spec.ExternalIPs) == 0 && strings.HasPrefix(s.Name, "envoy-") {
			pending, pendingService = s.Namespace+"/"+s.Name, s
		}
	}
	for _, g := range gateways {
		c := conditionIn(nestedList(g.Object, "status", "conditions"), "Programmed")
		noAddress := c.reason == "AddressNotAssigned" || c.found && c.status == "False" && pending != "" && len(nestedList(g.Object, "status", "addresses")) == 0
		if !c.found || c.status == "True" || !noAddress || f.settling(c) {
			continue
		}
		measured := fullName(g) + ": " + c.reason
		evidence := []finding.Evidence{at("gateways", fullName(g), c.String())}
		fix := ""
		if pendingService != nil {
			measured += "; Service " + pending + " of type LoadBalancer waits for one"
			evidence = append(evidence, at("services", pending, "no ingress"))
		}
		if off, _ := f.configured("disable", "servicelb"); off {
			measured += "; servicelb is disabled"
			evidence = append(evidence, finding.Evidence{File: "host/etc/rancher/k3s/config.yaml", Field: "disable", Line: "servicelb"})
		} else if svclb := f.svclb(); svclb != "" {
			measured += "; " + svclb
		} else if !slices.ContainsFunc(f.daemonSets, func(d daemonSet) bool { return strings.HasPrefix(d.Name, "svclb-") }) && f.had["daemonsets"] {
			measured += "; nothing here gives out addresses"
			fix = "Give it a NodePort or an address of the machine: kubectl -n " + cmp.Or(podNamespace(pending), "envoy-gateway-system") + ` patch svc NAME -p '{"spec":{"externalIPs":["ADDRESS"]}}'`
		}
		return fail(measured, fix, evidence...)
	}
	if len(gateways) > 0 {
		return well("has one")
	}
	return nil
}

// svclb says why klipper's pods don't give the address: a port that is taken keeps them
// from running.
func (f *facts) svclb() string {
	for i := range f.pods {
		p := &f.pods[i]
		if strings.HasPrefix(p.Name, "svclb-") && !ready(p) {
			f.explain(podKey(p), "gateway.no_address")
			return p.Name + ": " + reason(p)
		}
	}
	return ""
}

func judgeGatewayState(f *facts) []finding.Finding {
	gateways, _ := f.objects("gateways")
	for _, g := range gateways {
		for _, kind := range []string{"Accepted", "Programmed"} {
			c := conditionIn(nestedList(g.Object, "status", "conditions"), kind)
			if c.found && c.status != "True" && c.reason != "AddressNotAssigned" && !f.settling(c) {
				return fail(fullName(g)+" "+kind+"=False, "+c.String(), "kubectl -n "+g.GetNamespace()+" describe gateway "+g.GetName(), at("gateways", fullName(g), c.String()))
			}
			if !c.found && kind == "Accepted" && len(f.nodes) > 0 {
				if class := nested(g, "spec", "gatewayClassName"); class != "" && f.noClass(class) {
					return fail(fullName(g)+" names the class "+class+", which nobody serves", "sudo llmbox install", at("gateways", fullName(g), "gatewayClassName: "+class))
				}
			}
		}
		for _, l := range nestedList(g.Object, "status", "listeners") {
			for _, kind := range []string{"Accepted", "ResolvedRefs", "Programmed"} {
				c := conditionIn(nestedList(l, "conditions"), kind)
				if c.found && c.status == "False" && c.reason != "AddressNotAssigned" && !f.settling(c) {
					return fail(fmt.Sprintf("listener %s of %s: %s", str(l, "name"), fullName(g), c), "kubectl -n "+g.GetNamespace()+" describe gateway "+g.GetName(), at("gateways", fullName(g), c.String()))
				}
			}
		}
	}
	if len(gateways) > 0 {
		return well(count(len(gateways), "gateway") + " in force")
	}
	return nil
}

func (f *facts) noClass(name string) bool {
	list, had := f.objects("gatewayclasses")
	return had && !slices.ContainsFunc(list, func(o unstructuredObject) bool { return o.GetName() == name })
}

func judgeGatewayPods(prefix, id string) func(*facts) []finding.Finding {
	return func(f *facts) []finding.Finding {
		up := 0
		for i := range f.pods {
			p := &f.pods[i]
			if p.Namespace != "envoy-gateway-system" || !strings.HasPrefix(p.Name, prefix) || strings.Contains(p.Name, "certgen") {
				continue
			}
			controller := strings.HasPrefix(p.Name, "envoy-gateway-") && p.Labels["app.kubernetes.io/component"] != "proxy"
			if controller != (id == "gateway.controller") {
				continue
			}
			if ready(p) {
				up++
				continue
			}
			if !f.young(p) && (failing(p) || f.now().IsZero() || f.now().Sub(startedAt(p)) > youth) {
				ids := f.explained[podKey(p)]
				f.explain(podKey(p), id)
				out := fail(p.Name+": "+reason(p), "", at("pods", podKey(p), reason(p)))
				out[0].Causes = ids
				return out
			}
		}
		if up > 0 {
			return well(count(up, "pod") + " ready")
		}
		if id == "gateway.controller" && f.scaledToNothing("envoy-gateway-system", "envoy-gateway") {
			return fail("Envoy Gateway is scaled to 0: what changes does not reach Envoy", "kubectl -n envoy-gateway-system scale deploy/envoy-gateway --replicas=1", at("deployments", "envoy-gateway-system/envoy-gateway", "replicas: 0"))
		}
		return nil
	}
}

func judgeRoutes(f *facts) []finding.Finding {
	routes, had := f.objects("httproutes")
	if !had {
		return nil
	}
	for _, r := range routes {
		for _, parent := range nestedList(r.Object, "status", "parents") {
			for _, kind := range []string{"Accepted", "ResolvedRefs"} {
				c := conditionIn(nestedList(parent, "conditions"), kind)
				if c.found && c.status == "False" && !f.settling(c) {
					return fail(fullName(r)+" "+kind+"=False, "+c.String(), "kubectl -n "+r.GetNamespace()+" describe httproute "+r.GetName(), at("httproutes", fullName(r), c.String()))
				}
			}
		}
		for _, b := range backends(r) {
			if f.had["services"] && !slices.ContainsFunc(f.services, func(s corev1.Service) bool { return s.Namespace == b[0] && s.Name == b[1] }) {
				return fail(fullName(r)+" leads to the Service "+b[0]+"/"+b[1]+", which is not there", "", at("httproutes", fullName(r), b[1]))
			}
		}
	}
	gateways, _ := f.objects("gateways")
	if len(routes) == 0 && len(gateways) > 0 && len(f.models()) > 0 {
		return fail("there is no route: the gateway leads nowhere", "", at("httproutes", "", "no items"))
	}
	if len(routes) > 0 {
		return well(count(len(routes), "route") + " accepted")
	}
	return nil
}

// backends are the Services behind a route, as namespace and name.
func backends(r unstructuredObject) [][2]string {
	var out [][2]string
	for _, rule := range nestedList(r.Object, "spec", "rules") {
		for _, b := range nestedList(rule, "backendRefs") {
			if kind := str(b, "kind"); kind != "" && kind != "Service" {
				continue
			}
			out = append(out, [2]string{cmp.Or(str(b, "namespace"), r.GetNamespace()), str(b, "name")})
		}
	}
	return out
}

func judgePolicies(f *facts) []finding.Finding {
	judged := 0
	for _, kind := range []string{"securitypolicies", "backendtrafficpolicies", "clienttrafficpolicies"} {
		list, _ := f.objects(kind)
		for _, o := range list {
			judged++
			for _, ancestor := range nestedList(o.Object, "status", "ancestors") {
				c := conditionIn(nestedList(ancestor, "conditions"), "Accepted")
				if c.found && c.status == "False" && !f.settling(c) {
					return fail(fullName(o)+": "+c.String(), "kubectl -n "+o.GetNamespace()+" describe "+strings.TrimSuffix(kind, "ies")+"y "+o.GetName(), at(kind, fullName(o), c.String()))
				}
			}
		}
	}
	if judged > 0 {
		return well(count(judged, "policy") + " accepted")
	}
	return nil
}

func judgeUpstreams(f *facts) []finding.Finding {
	routes, _ := f.objects("httproutes")
	for _, r := range routes {
		for _, b := range backends(r) {
			if n, known := f.endpoints(b[0], b[1]); known && n == 0 {
				out := fail("the Service "+b[0]+"/"+b[1]+" has no endpoint that is ready", "", at("endpointslices", b[0]+"/"+b[1], "0 ready"))
				if len(f.models()) == 1 && f.startingModel() {
					out[0].Severity, out[0].Fix = finding.Info, ""
					out[0].State = finding.Wait
				}
				return out
			}
		}
	}
	for _, entry := range f.accessLog() {
		if strings.Contains(entry.flags, "UH") || entry.details == "no_healthy_upstream" || entry.code == 500 && entry.details == "direct_response" {
			if n, known := f.endpoints("llm", "model-server"); known && n > 0 {
				continue
			}
			return fail(fmt.Sprintf("the gateway answers %d: %s", entry.code, cmp.Or(entry.details, entry.flags)), "", entry.from)
		}
	}
	if len(routes) > 0 && f.had["endpointslices"] {
		return well("somebody is behind each route")
	}
	return nil
}

func (f *facts) startingModel() bool {
	return slices.ContainsFunc(f.models(), func(p *corev1.Pod) bool {
		return !ready(p) && p.Status.Phase == corev1.PodRunning && restarts(p) == 0 && !failing(p)
	})
}

// access is one line of the gateway's log.
type access struct {
	code           int
	details, flags string
	duration       time.Duration
	path           string
	from           finding.Evidence
}

var accessWords = regexp.MustCompile(`(?m)^.*"(?:GET|POST) (\S+)[^"]*" (\d{3}) (\S+) (\S*(?:timeout|upstream|direct_response)\S*).*$`)

// accessLog reads the lines of Envoy in which something went wrong: JSON, or text.
func (f *facts) accessLog() []access {
	var out []access
	for _, t := range f.texts {
		if t.kind != "log" || !strings.Contains(t.data, "response_flags") && !strings.Contains(t.data, "response_timeout") && !strings.Contains(t.data, "idle_timeout") && !strings.Contains(t.data, "no_healthy_upstream") {
			continue
		}
		for line := range strings.Lines(t.data) {
			line = strings.TrimSpace(line)
			if !strings.HasPrefix(line, "{") {
				if m := accessWords.FindStringSubmatch(line); m != nil {
					code := 0
					if _, err := fmt.Sscanf(m[2], "%d", &code); err == nil && code >= 500 {
						out = append(out, access{code: code, flags: m[3], details: m[4], path: m[1], from: t.evidence(line)})
					}
				}
				continue
			}
			var e struct {
				Code     json.Number `json:"response_code"`
				Details  string      `json:"response_code_details"`
				Flags    string      `json:"response_flags"`
				Duration json.Number `json:"duration"`
				Path     string      `json:"x-envoy-origin-path"`
			}
			if json.Unmarshal([]byte(line), &e) != nil {
				continue
			}
			code, err1 := e.Code.Int64()
			ms, err2 := e.Duration.Int64()
			if err1 != nil || code < 500 && !strings.Contains(e.Flags, "SI") && !strings.Contains(e.Flags, "UT") {
				continue
			}
			if err2 != nil {
				ms = 0
			}
			out = append(out, access{int(code), e.Details, e.Flags, time.Duration(ms) * time.Millisecond, e.Path, t.evidence(line)})
		}
	}
	return out
}

// judgeTimeouts looks at the route itself, then at what the gateway has cut off.
func judgeTimeouts(f *facts) []finding.Finding {
	var cut []string
	var evidence []finding.Evidence
	seen := map[string]bool{}
	for _, e := range f.accessLog() {
		kind := ""
		switch {
		case strings.Contains(e.details, "idle_timeout") || strings.Contains(e.flags, "SI"):
			kind = "idle timeout"
		case strings.Contains(e.details, "response_timeout") || strings.Contains(e.flags, "UT") || e.details == "max_duration_timeout" || strings.Contains(e.flags, "DT"):
			kind = "request timeout"
		}
		if kind == "" || seen[kind] || e.path != "" && !strings.HasPrefix(e.path, "/v1") {
			continue
		}
		seen[kind] = true
		text := kind
		if e.duration > 0 {
			text += " after " + e.duration.Round(time.Second).String()
		}
		cut = append(cut, text+" ("+cmp.Or(e.path, "a request")+")")
		evidence = append(evidence, e.from)
	}
	routes, had := f.objects("httproutes")
	var limited []string
	for _, r := range routes {
		for _, rule := range nestedList(r.Object, "spec", "rules") {
			request, found, err := unstructured.NestedString(rule, "timeouts", "request")
			if err != nil {
				continue
			}
			switch d, err := time.ParseDuration(request); {
			case !found && toModel(r, rule):
				limited = append(limited, fullName(r)+" sets no timeouts.request: 15 s by Envoy's default")
			case found && err == nil && d > 0 && d < 10*time.Minute && toModel(r, rule):
				limited = append(limited, fullName(r)+" timeouts.request: "+request)
			default:
				continue
			}
			evidence = append(evidence, at("httproutes", fullName(r), "timeouts.request: "+cmp.Or(request, "unset")))
		}
	}
	measured := some(4, append(cut, limited...))
	switch {
	case len(cut) > 0:
		return fail(measured, "", evidence...)
	case len(limited) > 0:
		return warn(measured, "", evidence...)
	case had && len(routes) > 0:
		return well("no limit on a request")
	}
	return nil
}

// toModel says whether a rule leads to the model server.
func toModel(r unstructuredObject, rule map[string]any) bool {
	for _, b := range nestedList(rule, "backendRefs") {
		if str(b, "name") == "model-server" || r.GetName() == "openai" {
			return true
		}
	}
	return false
}

func judgeServedCertificates(f *facts) []finding.Finding {
	var certificates []snapshot.Certificate
	if state, _ := f.Probe(snapshot.ProbeCertificates, &certificates); state != snapshot.Present || f.now().IsZero() {
		return nil
	}
	const soon = 14 * 24 * time.Hour
	checked := 0
	for _, c := range certificates {
		if !strings.HasPrefix(c.Place, "secret ") || c.NotAfter.IsZero() {
			continue
		}
		checked++
		left := c.NotAfter.Sub(f.now())
		text := c.Place + " (" + c.Subject + ") ends " + c.NotAfter.UTC().Format(time.DateOnly)
		fix := ""
		if !strings.Contains(c.Place, "envoy-gateway-system/") || strings.Contains(c.Place, "/envoy") {
			fix = "Its operator makes it anew: kubectl -n " + podNamespace(strings.TrimPrefix(c.Place, "secret ")) + " delete " + strings.Replace(strings.Replace(c.Place, podNamespace(strings.TrimPrefix(c.Place, "secret "))+"/", "", 1), "secret ", "secret ", 1) + ", then: sudo llmbox install"
		}
		switch {
		case left <= 0:
			return fail("expired: "+text, fix, atProbe(snapshot.ProbeCertificates, c.Place, text))
		case left < soon:
			return warn("about to expire: "+text, fix, atProbe(snapshot.ProbeCertificates, c.Place, text))
		}
	}
	if checked > 0 {
		return well(count(checked, "certificate") + " valid")
	}
	return nil
}

func clientChecks() []Check {
	all := slices.Concat(nodeRoots(), networkRoots(), []string{
		"model.*", "gateway.*", "workload.failing", "workload.unexplained", "workload.missing", "secrets.hf_token_missing", "gpu.*", "runtime.*", "image.*", "helm.release.*", "storage.*", "operator.*", "pod.*", "k3s.*", "secrets.missing",
	})
	return []Check{
		{
			ID: "endpoint.answers", Also: []string{"endpoint.unauthorized", "endpoint.open"}, Layer: LayerClient, Title: "One token through the gateway", Reads: "the box's own address, asked for one token with a key", Rule: "a token",
			Source: "platform.openai.com/docs, chat completions; envoyproxy/gateway docs, API key authentication", Judge: judgeEndpoint, Causes: all,
			Fix: "Ask it yourself: llmbox chat",
		},
		{
			ID: "preflight.gpu_generation", Layer: LayerClient, Title: "GPU generation", Reads: "the model's log", Rule: "compute capability 8.0 or newer (Ampere)",
			Source: "vllm-project/vllm#1153, #1157", Judge: lowGeneration, Fix: "Take a machine with an Ampere GPU or newer",
		},
	}
}

func judgeEndpoint(f *facts) []finding.Finding {
	var e snapshot.EndpointProbe
	if state, _ := f.Probe(snapshot.ProbeEndpoint, &e); state != snapshot.Present {
		return nil
	}
	evidence := atProbe(snapshot.ProbeEndpoint, "", e.URL)
	var out []finding.Finding
	switch {
	case e.Stage == "" && e.Error == "" && e.Tokens > 0:
		out = well(fmt.Sprintf("%s answered in %d ms", e.Model, e.ElapsedMS), evidence)
	case e.Status == 401 && e.WithKey:
		out = named("endpoint.unauthorized", fail("the gateway does not accept the box's own key (401)", "llmbox keys list shows those it knows; a new one: llmbox keys create NAME", evidence))
		out[0].Title = "Key of the gateway"
		out[0].Causes = []string{"secrets.external", "secrets.store", "secrets.vault_sealed", "gateway.policy"}
	case e.Status == 429:
		out = warn("the gateway lets no more requests through for now (429)", "Wait a minute, or raise gateway.rateLimit.requestsPerMinute", evidence)
	case e.Stage == "address":
		out = fail("the gateway has no address: "+e.Error, "", evidence)
	case e.Status > 0:
		out = fail(fmt.Sprintf("HTTP status %d: %s", e.Status, oneLine(e.Error)), "", evidence)
	default:
		out = fail(oneLine(cmp.Or(e.Error, "no answer")), "", evidence)
	}
	if e.Unauthorized == 200 {
		open := named("endpoint.open", fail(e.URL+" answers without a key", "sudo llmbox install (it puts the policy back that asks for one)", atProbe(snapshot.ProbeEndpoint, "status_without_key", "200")))
		open[0].Title = "Endpoint that anybody may use"
		out = append(out, open...)
	}
	return out
}
