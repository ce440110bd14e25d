package installer

import (
	"net/netip"
	"slices"

	"github.com/llmbox-dev/llmbox/internal/component"
)

// computeValues derives a chart's values from the box: what the charts' own
// defaults can't know. User values are laid over them later. No value here may
// be a secret: charts take names of Secrets.
func computeValues(in Input, plan *Plan, step Step) map[string]any {
	images := map[string]any{}
	for key, img := range step.Images {
		ref := img.Reference
		if img.Digest != "" {
			ref += "@" + img.Digest
		}
		images[key] = ref
	}
	values := map[string]any{"images": images}
	monitored := in.Box.Mode(prometheusStep) != string(component.Off)
	set := func(path []string, v any) {
		m := values
		for _, key := range path[:len(path)-1] {
			next, ok := m[key].(map[string]any)
			if !ok {
				next = map[string]any{}
				m[key] = next
			}
			m = next
		}
		m[path[len(path)-1]] = v
	}
	switch step.Chart {
	case "vllm":
		vllmValues(in, plan, step, monitored, set)
	case "envoy-gateway":
		set([]string{"port"}, in.Box.Gateway.Port)
		set([]string{"monitors", "enabled"}, monitored)
		if in.Box.Gateway.TLS.Enabled {
			set([]string{"tls", "existingSecret"}, in.Box.Gateway.TLS.ExistingSecret)
		}
	case "keda":
		set([]string{"monitors", "enabled"}, monitored)
	case "vault":
		set([]string{"monitors", "enabled"}, monitored)
		if ports, from := apiServers(in.APIServers); len(from) > 0 {
			set([]string{"networkPolicy", "apiServerPorts"}, ports)
			set([]string{"networkPolicy", "fromCIDRs"}, from)
		}
	case "prometheus":
		if _, from := apiServers(in.APIServers); len(from) > 0 {
			set([]string{"networkPolicy", "apiServerCIDRs"}, from)
		}
	case "external-secrets":
		set([]string{"monitors", "enabled"}, monitored)
		set([]string{"externalSecrets", "hfToken", "enabled"}, in.Box.Secrets.HFTokenFile != "")
	case "gpu-operator":
		set([]string{"dcgmExporter", "serviceMonitor", "enabled"}, monitored)
	case "kyverno":
		set([]string{"serviceMonitor", "enabled"}, monitored)
	}
	return values
}

// apiServers are the ports on which pods reach the API server, that of its Service among
// them, and the addresses it comes from. Policies have to name both: there is no pod to
// select, and neither is the same on every cluster.
func apiServers(servers []netip.AddrPort) (ports, from []any) {
	ports = []any{443}
	for _, s := range servers {
		if port := int(s.Port()); !slices.Contains(ports, any(port)) {
			ports = append(ports, port)
		}
		if cidr := netip.PrefixFrom(s.Addr(), s.Addr().BitLen()).String(); !slices.Contains(from, any(cidr)) {
			from = append(from, cidr)
		}
	}
	return ports, from
}

func vllmValues(in Input, plan *Plan, step Step, monitored bool, set func([]string, any)) {
	m := plan.Model
	set([]string{"part"}, step.Part)
	set([]string{"model", "name"}, m.Name)
	set([]string{"model", "revision"}, m.Revision)
	set([]string{"model", "servedName"}, m.ServedName)
	args := make([]any, len(m.Args))
	for i, a := range m.Args {
		args[i] = a
	}
	set([]string{"args"}, args)
	set([]string{"tensorParallel"}, m.GPUs)
	if env := in.Choice.Fit.Image.Env; len(env) > 0 {
		values := map[string]any{}
		for name, value := range env {
			values[name] = value
		}
		set([]string{"env"}, values)
	}
	set([]string{"gpu", "available"}, max(in.Box.GPU.Count, m.GPUs))
	if m.GPUs > 1 {
		set([]string{"sharedMemoryMiB"}, 8192)
	}
	if h := in.HostModels; h != nil {
		set([]string{"weights", "hostPath"}, h.Dir)
		set([]string{"weights", "nodeName"}, h.NodeName)
		set([]string{"weights", "sizeGiB"}, h.volumeGiB())
	} else if in.Box.Secrets.HFTokenFile != "" {
		set([]string{"weights", "hfToken", "existingSecret"}, "hf-token")
	}
	set([]string{"route", "rateLimit", "requestsPerMinute"}, in.Box.Gateway.RateLimit.RequestsPerMinute)
	set([]string{"monitoring", "serviceMonitor"}, monitored)
	set([]string{"monitoring", "rules"}, monitored)
	set([]string{"monitoring", "dashboards"}, monitored)
	scaled := monitored
	for _, name := range []string{kedaStep, autoscaleStep} {
		scaled = scaled && in.Box.Mode(name) != string(component.Off)
	}
	set([]string{"autoscaling", "enabled"}, scaled)
	if p := in.Box.Network.Proxy; p.HTTPS != "" {
		set([]string{"weights", "proxy", "https"}, p.HTTPS)
	}
}
