package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// faults lists what is broken, from the client's end to the machine's: what restarts most
// comes last.
func faults() []fault {
	return append(append(append(append(gatewayFaults(), podFaults()...), modelFaults()...), clusterFaults()...), machineFaults()...)
}

func gatewayFaults() []fault {
	const security kind = "gateway.envoyproxy.io/v1alpha1/securitypolicies"
	return []fault{
		edited("service-of-nobody", wants("gateway.no_upstream"), services, "llm", "model-server", field("1", "spec", "selector", "fault")),
		edited("route-to-nowhere", wants("gateway.route"), routes, "llm", "openai", everyRule(func(rule map[string]any) {
			for _, backend := range items(rule["backendRefs"]) {
				backend["name"] = "nowhere"
			}
		})),
		edited("route-with-a-limit", wants("gateway.route_timeout"), routes, "llm", "openai", everyRule(func(rule map[string]any) {
			rule["timeouts"] = map[string]any{"request": "15s"}
		})),
		edited("endpoint-without-a-key", wants("endpoint.open"), security, "llm", "openai", targetNothing),
		{
			name: "served-certificate-expired", want: wants("gateway.certificate"), inject: expired,
			revert: gone(secrets, "envoy-gateway-system", "fault-served"),
		},
		scaled("gateway-controller-gone", wants("workload.missing", "gateway.controller"), "envoy-gateway-system", "envoy-gateway", "app.kubernetes.io/name=envoy-gateway"),
	}
}

func items(v any) []map[string]any {
	list, ok := v.([]any)
	if !ok {
		return nil
	}
	var out []map[string]any
	for _, one := range list {
		if m, ok := one.(map[string]any); ok {
			out = append(out, m)
		}
	}
	return out
}

func everyRule(change func(map[string]any)) func(map[string]any) error {
	return func(o map[string]any) error {
		spec, _ := o["spec"].(map[string]any)
		rules := items(spec["rules"])
		if len(rules) == 0 {
			return errors.New("the route has no rules")
		}
		for _, rule := range rules {
			change(rule)
		}
		return nil
	}
}

// targetNothing has a policy hold for a route that is not there.
func targetNothing(o map[string]any) error {
	spec, _ := o["spec"].(map[string]any)
	targets := items(spec["targetRefs"])
	if len(targets) == 0 {
		return errors.New("the policy has no targets")
	}
	for _, target := range targets {
		target["name"] = "nowhere"
	}
	return nil
}

// bare is a pod of an image that every machine of the lab has, as the model's namespace
// asks for pods to be.
func bare(name, spec, container string) string {
	return `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"` + name + `"},"spec":{` + spec + `"terminationGracePeriodSeconds":0,"priorityClassName":"gpu-inference",
"securityContext":{"runAsNonRoot":true,"runAsUser":2000,"seccompProfile":{"type":"RuntimeDefault"}},
"containers":[{"name":"c","image":"docker.io/rancher/mirrored-pause:3.6","securityContext":{"allowPrivilegeEscalation":false,"capabilities":{"drop":["ALL"]}}` + container + `}]}}`
}

const few = `,"resources":{"requests":{"cpu":"1m","memory":"8Mi"}}`

func podFaults() []fault {
	refused := bare("fault-stale", `"nodeName":"nowhere",`, few)
	return []fault{
		added("no-room", wants("pod.insufficient"), pods, "llm", bare("fault-cpu", "", `,"resources":{"requests":{"cpu":"4000","memory":"8Mi"}}`)),
		added("no-gpu-left", wants("pod.insufficient_gpu"), pods, "llm", bare("fault-gpu", "", `,"resources":{"requests":{"cpu":"1m","memory":"8Mi"},"limits":{"nvidia.com/gpu":"1"}}`)),
		added("no-such-secret", wants("secrets.missing"), pods, "llm", bare("fault-secret", "", few+`,"env":[{"name":"X","valueFrom":{"secretKeyRef":{"name":"nowhere","key":"x"}}}]`)),
		// The lab's registry has no such image, and the one behind it can't be reached.
		added("registry-out-of-reach", wants("image.pull.network"), pods, "default", image("fault-registry", "IfNotPresent")),
		added("no-such-image", wants("image.pull.not_found"), pods, "default", image("fault-image", "Never")),
		{
			name: "port-taken", want: wants("pod.host_port"),
			inject: inOrder(made(pods, "kube-system", hostPort("fault-port-a")), pause(8*time.Second), made(pods, "kube-system", hostPort("fault-port-b"))),
			revert: inOrder(gone(pods, "kube-system", "fault-port-a"), gone(pods, "kube-system", "fault-port-b")),
		},
		added("no-such-class", wants("storage.no_class"), claims, "llm",
			`{"apiVersion":"v1","kind":"PersistentVolumeClaim","metadata":{"name":"fault"},"spec":{"storageClassName":"nowhere","accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}}}}`),
		{
			name: "pod-refused", want: wants("pod.stale"), fix: true,
			inject: inOrder(made(pods, "llm", refused), func(ctx context.Context, b *box) error {
				return b.status(ctx, pods, "llm", "fault-stale", `{"status":{"phase":"Failed","reason":"UnexpectedAdmissionError","message":"Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu, which is unexpected"}}`)
			}),
			revert: gone(pods, "llm", "fault-stale"),
		},
		withFix(added("release-half-way", wants("helm.release.pending"), secrets, "llm",
			`{"apiVersion":"v1","kind":"Secret","type":"helm.sh/release.v1","metadata":{"name":"sh.helm.release.v1.fault.v1","labels":{"owner":"helm","name":"fault","status":"pending-install","version":"1","modifiedAt":"1700000000"}}}`)),
		added("release-failed", wants("helm.release.failed"), secrets, "llm",
			`{"apiVersion":"v1","kind":"Secret","type":"helm.sh/release.v1","metadata":{"name":"sh.helm.release.v1.fault.v1","labels":{"owner":"helm","name":"fault","status":"failed","version":"1"}}}`),
	}
}

func image(name, policy string) string {
	return `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"` + name + `"},"spec":{"terminationGracePeriodSeconds":0,"containers":[{"name":"c","image":"docker.io/library/nowhere:1","imagePullPolicy":"` + policy + `"}]}}`
}

func withFix(f fault) fault {
	f.fix = true
	return f
}

func pause(d time.Duration) act {
	return func(ctx context.Context, _ *box) error { return sleep(ctx, d) }
}

func hostPort(name string) string {
	return bare(name, "", few+`,"ports":[{"containerPort":9555,"hostPort":9555}]`)
}

// said are the last words of vLLM and of its libraries in the reports that the comment
// names; a shell says them in the model server's place, and ends as it did.
type said struct {
	name string
	want []string
	code int
	// after is how long it serves nobody before it says so.
	after int
	words string
}

func lastWords() []said {
	return []said{
		{
			// huggingface_hub's errors.py, by way of huggingface/text-generation-inference#827.
			name: "wrong-hugging-face-token", want: wants("secrets.hf_token_missing"), code: 1, words: `INFO 06-11 09:12:03 [__init__.py:244] Automatically detected platform cuda.
huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/models/Qwen/Qwen3-0.6B/revision/main (Request ID: Root=1-6848)
Invalid credentials in Authorization header`,
		},
		{
			// vLLM's v1/core/kv_cache_utils.py, by way of vllm-project/vllm#16118.
			name: "model-too-large", want: wants("model.kv_cache"), code: 1, words: `INFO 06-11 09:14:40 [gpu_worker.py:232] Available KV cache memory: 3.18 GiB
ERROR 06-11 09:14:40 [core.py:586] EngineCore failed to start.
ValueError: To serve at least one request with the models's max seq len (262144), (24.0 GiB KV cache is needed, which is larger than the available KV cache memory (3.18 GiB). Based on the available memory, the estimated maximum model length is 34736. Try increasing gpu_memory_utilization or decreasing max_model_len when initializing the engine.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_0': 1}`,
		},
		{
			// vLLM's v1/executor/multiproc_executor.py, by way of vllm-project/vllm#42362.
			name: "engine-killed", want: wants("model.engine_dead"), code: 1, after: 5, words: `INFO:     Application startup complete.
ERROR 06-11 10:02:11 [multiproc_executor.py:140] Worker proc VllmWorker-0 died unexpectedly, shutting down executor.
ERROR 06-11 10:02:11 [async_llm.py:419] AsyncLLM output_handler failed.
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.`,
		},
		{
			// PyTorch's CUDA runtime, by way of vllm-project/vllm#36077's kind of reports.
			name: "no-kernels-for-the-gpu", want: wants("model.kernel_image"), code: 1, words: `ERROR 06-11 09:20:00 [core.py:586] EngineCore failed to start.
torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}`,
		},
		{
			// vLLM's worker/gpu_worker.py, by way of vllm-project/vllm#20305.
			name: "gpu-memory-taken", want: wants("model.gpu_memory_busy"), code: 1, words: `ERROR 06-11 09:30:00 [core.py:586] EngineCore failed to start.
ValueError: Free memory on device (7.34/139.72 GiB) on startup is less than desired GPU memory utilization (0.9, 125.75 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}`,
		},
	}
}

func modelFaults() []fault {
	out := []fault{
		// KEDA gives a model at least one replica back, unless somebody paused it.
		edited("model-paused", wants("model.missing"), scaledObjects, "llm", "model-server", field("0", "metadata", "annotations", "autoscaling.keda.sh/paused-replicas")),
		edited("model-memory-limit", wants("model.oom_killed"), deployments, "llm", "model-server", modelContainer(func(c map[string]any) error {
			// Every container needs some; a shell that doubles a text needs more than it gets.
			speak(c, `x=0123456789abcdef; while true; do x=$x$x; done`)
			return errors.Join(unstructured.SetNestedField(c, "24Mi", "resources", "limits", "memory"), unstructured.SetNestedField(c, "16Mi", "resources", "requests", "memory"))
		})),
		edited("probe-ends-the-model", wants("model.probe_budget"), deployments, "llm", "model-server", modelContainer(func(c map[string]any) error {
			speak(c, `echo "INFO 06-11 09:12:03 [default_loader.py:272] Loading safetensors checkpoint shards: 25% Completed"; sleep 600`)
			c["startupProbe"] = map[string]any{"httpGet": map[string]any{"path": "/health", "port": int64(8000)}, "periodSeconds": int64(2), "failureThreshold": int64(4)}
			return nil
		})),
		{
			name: "rollout-without-a-free-gpu", want: wants("model.rollout_deadlock"), patience: 4 * time.Minute,
		},
	}
	surge := edited(out[3].name, out[3].want, deployments, "llm", "model-server", func(o map[string]any) error {
		strategy := map[string]any{"type": "RollingUpdate", "rollingUpdate": map[string]any{"maxSurge": int64(1), "maxUnavailable": int64(0)}}
		return errors.Join(unstructured.SetNestedMap(o, strategy, "spec", "strategy"), unstructured.SetNestedField(o, "1", "spec", "template", "metadata", "annotations", "fault"))
	})
	out[3].inject, out[3].revert = surge.inject, surge.revert
	for _, s := range lastWords() {
		script := fmt.Sprintf("cat <<'END' >&2\n%s\nEND\nexit %d", s.words, s.code)
		if s.after > 0 {
			script = fmt.Sprintf("sleep %d\n", s.after) + script
		}
		out = append(out, edited(s.name, s.want, deployments, "llm", "model-server", modelContainer(func(c map[string]any) error {
			speak(c, script)
			return nil
		})))
	}
	return out
}

// speak puts a shell in a container's place.
func speak(c map[string]any, script string) {
	c["image"] = "docker.io/rancher/mirrored-library-busybox:1.35.0"
	c["command"], c["args"] = []any{"/bin/sh", "-c", script}, []any{}
}

func modelContainer(change func(map[string]any) error) func(map[string]any) error {
	return func(o map[string]any) error {
		list, _, err := unstructured.NestedSlice(o, "spec", "template", "spec", "containers")
		if err != nil {
			return err
		}
		for _, c := range items(list) {
			if c["name"] == "vllm" {
				if err := change(c); err != nil {
					return err
				}
				return unstructured.SetNestedSlice(o, list, "spec", "template", "spec", "containers")
			}
		}
		return errors.New("the model's Deployment has no container vllm")
	}
}

func clusterFaults() []fault {
	const stores kind = "external-secrets.io/v1/clustersecretstores"
	return []fault{
		func() fault {
			f := withFix(scaled("webhook-without-anybody", wants("operator.webhook.blocking"), "kyverno", "kyverno-admission-controller", "app.kubernetes.io/component=admission-controller"))
			// One that is asked to end takes its webhooks with it.
			f.inject = inOrder(shell(send("kyverno", "STOP")), f.inject)
			return f
		}(),
		{
			name: "webhook-not-trusted", want: wants("operator.webhook.certificate"),
			inject: inOrder(untrusted, noPods("llm", "app.kubernetes.io/name=model-server")),
			revert: gone(webhooks, "", "fault"),
		},
		scaled("metrics-without-anybody", wants("workload.missing", "operator.apiservice"), "keda", "keda-metrics-apiserver", "app.kubernetes.io/component=metrics-apiserver"),
		edited("store-not-let-in", wants("secrets.store"), stores, "", "vault", field("nobody", "spec", "provider", "vault", "auth", "kubernetes", "role")),
		func() fault {
			f := withFix(scaled("vault-sealed", wants("secrets.vault_sealed"), "vault", "vault-unsealer", "app.kubernetes.io/component=unsealer"))
			f.inject = inOrder(f.inject, pause(2*time.Second), gone(pods, "vault", "vault-0"))
			return f
		}(),
		withFix(scaled("name-server-gone", wants("net.dns.coredns"), "kube-system", "coredns", "k8s-app=kube-dns")),
		func() fault {
			f := edited("name-server-misconfigured", wants("net.dns.config"), configMaps, "kube-system", "coredns", func(o map[string]any) error {
				text, _, err := unstructured.NestedString(o, "data", "Corefile")
				if err != nil {
					return err
				}
				return unstructured.SetNestedField(o, strings.Replace(text, "errors", "errors\n    rewritee name a b", 1), "data", "Corefile")
			})
			restart := noPods("kube-system", "k8s-app=kube-dns")
			f.inject, f.revert = inOrder(f.inject, restart), inOrder(f.revert, restart)
			return f
		}(),
		{
			name: "node-cordoned", want: wants("node.cordoned"), fix: true,
			inject: onNode(field(true, "spec", "unschedulable")), revert: onNode(field(false, "spec", "unschedulable")),
		},
		{
			name: "device-plugin-gone", want: wants("operator.device_plugin", "gpu.allocatable"),
			inject: onNode(field("false", "metadata", "labels", "nvidia.com/gpu.deploy.device-plugin")), revert: onNode(field("true", "metadata", "labels", "nvidia.com/gpu.deploy.device-plugin")),
		},
	}
}
