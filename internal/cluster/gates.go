package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// simulatedByHeader is how a rehearsal actor names itself in an HTTP answer.
const simulatedByHeader = "X-Llmbox-Simulated-By"

// Allocatable judges whether the nodes together offer at least n of a resource.
func (c *Client) Allocatable(ctx context.Context, name string, n int64) (Verdict, error) {
	nodes, err := c.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return Verdict{}, fmt.Errorf("listing nodes: %w", Classify(err))
	}
	var have int64
	var simulated []string
	for i := range nodes.Items {
		q := nodes.Items[i].Status.Allocatable[corev1.ResourceName(name)]
		if q.Value() == 0 {
			continue
		}
		have += q.Value()
		simulated = append(simulated, simulatedBy(&nodes.Items[i])...)
	}
	if have < n {
		return Verdict{Waiting: fmt.Sprintf("the device plugin to offer %d × %s (now %d)", n, name, have)}, nil
	}
	return Verdict{Ready: true, SimulatedBy: compact(simulated)}, nil
}

func simulatedBy(o metav1.Object) []string {
	return splitNames(o.GetAnnotations()[SimulatedByAnnotation])
}

func splitNames(s string) []string {
	var out []string
	for _, f := range strings.Split(s, ",") {
		if f = strings.TrimSpace(f); f != "" {
			out = append(out, f)
		}
	}
	return out
}

func compact(names []string) []string {
	slices.Sort(names)
	return slices.Compact(names)
}

// Condition judges whether a custom resource has a condition with status True.
func (c *Client) Condition(ctx context.Context, gvr schema.GroupVersionResource, namespace, name, kind string) (Verdict, error) {
	path := " " + strings.TrimPrefix(namespace+"/"+name, "/")
	what := gvr.Resource + path
	obj, err := c.Dynamic.Resource(gvr).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err), meta.IsNoMatchError(err):
		return Verdict{Waiting: what + " to be created"}, nil
	case err != nil:
		return Verdict{}, fmt.Errorf("reading %s: %w", what, Classify(err))
	}
	if obj.GetKind() != "" {
		what = obj.GetKind() + path
	}
	text, ok := condition(obj, kind, "True")
	if !ok {
		return Verdict{Waiting: fmt.Sprintf("%s to be %s%s", what, kind, because(text))}, nil
	}
	return Verdict{Ready: true, SimulatedBy: compact(simulatedBy(obj))}, nil
}

func because(text string) string {
	if text == "" {
		return ""
	}
	return ": " + oneLine(text)
}

// APIService judges whether an aggregated API answers.
func (c *Client) APIService(ctx context.Context, name string) (Verdict, error) {
	return c.Condition(ctx, schema.GroupVersionResource{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"},
		"", name, "Available")
}

func gatewayResource() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "gateways"}
}

// Gateway judges whether a Gateway is programmed, which includes that it has
// an address.
func (c *Client) Gateway(ctx context.Context, namespace, name string) (Verdict, error) {
	return c.Condition(ctx, gatewayResource(), namespace, name, "Programmed")
}

// GatewayURL returns the base URL of a programmed Gateway's first listener:
// https if the listener terminates TLS.
func (c *Client) GatewayURL(ctx context.Context, namespace, name string) (string, error) {
	obj, err := c.Dynamic.Resource(gatewayResource()).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("reading gateway %s/%s: %w", namespace, name, Classify(err))
	}
	addresses, _, err := unstructured.NestedSlice(obj.Object, "status", "addresses")
	if err != nil || len(addresses) == 0 {
		return "", fmt.Errorf("gateway %s/%s has no address yet", namespace, name)
	}
	first, _ := addresses[0].(map[string]any)
	host, _ := first["value"].(string)
	listeners, _, err := unstructured.NestedSlice(obj.Object, "spec", "listeners")
	if err != nil || len(listeners) == 0 || host == "" {
		return "", fmt.Errorf("gateway %s/%s has no listener or address", namespace, name)
	}
	l, _ := listeners[0].(map[string]any)
	scheme := "http"
	if p, _ := l["protocol"].(string); p == "HTTPS" {
		scheme = "https"
	}
	port, _, _ := unstructured.NestedInt64(l, "port")
	return scheme + "://" + net.JoinHostPort(host, strconv.FormatInt(port, 10)), nil
}

// completion is the part of an OpenAI chat completion that shows a token.
type completion struct {
	Choices []struct {
		Message struct {
			Content          string `json:"content"`
			ReasoningContent string `json:"reasoning_content"`
		} `json:"message"`
	} `json:"choices"`
	Usage struct {
		CompletionTokens int64 `json:"completion_tokens"`
	} `json:"usage"`
}

// maxAnswerBytes bounds what is read of an answer to a one-token question.
const maxAnswerBytes = 1 << 20

// Token asks for one token at an OpenAI-compatible base URL with the key, and
// judges whether one came back.
func Token(ctx context.Context, client *http.Client, baseURL, key, model string) (Verdict, error) {
	body, err := json.Marshal(map[string]any{
		"model":      model,
		"messages":   []map[string]string{{"role": "user", "content": "Say hello."}},
		"max_tokens": 1,
	})
	if err != nil {
		return Verdict{}, fmt.Errorf("encoding the question: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, baseURL+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return Verdict{}, fmt.Errorf("building the question: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+key)
	resp, err := client.Do(req)
	if err != nil {
		return Verdict{Waiting: fmt.Sprintf("a token from %s: %v", baseURL, err)}, nil
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil {
		return Verdict{Waiting: fmt.Sprintf("a token from %s: reading the answer: %v", baseURL, err)}, nil
	}
	if resp.StatusCode != http.StatusOK {
		return Verdict{Waiting: fmt.Sprintf("a token from %s: HTTP %d %s", baseURL, resp.StatusCode, oneLine(string(raw)))}, nil
	}
	var got completion
	if err := json.Unmarshal(raw, &got); err != nil {
		return Verdict{Waiting: fmt.Sprintf("a token from %s: not an OpenAI answer: %v", baseURL, err)}, nil
	}
	// A one-token answer may be all whitespace or reasoning; the count is what
	// the server says it generated.
	if len(got.Choices) == 0 || got.Usage.CompletionTokens < 1 && got.Choices[0].Message.Content == "" &&
		got.Choices[0].Message.ReasoningContent == "" {
		return Verdict{Waiting: "a token from " + baseURL + ": the answer holds none"}, nil
	}
	return Verdict{Ready: true, SimulatedBy: compact(splitNames(resp.Header.Get(simulatedByHeader)))}, nil
}

// ServiceGet reads a path of a Service through the API server's proxy.
func (c *Client) ServiceGet(ctx context.Context, namespace, service, port, path string, params map[string]string) ([]byte, http.Header, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	httpClient := &http.Client{Transport: c.transport}
	url := c.baseURL.JoinPath("api/v1/namespaces", namespace, "services", "http:"+service+":"+port, "proxy", path)
	q := url.Query()
	for k, v := range params {
		q.Set(k, v)
	}
	url.RawQuery = q.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url.String(), nil)
	if err != nil {
		return nil, nil, fmt.Errorf("building the request to service %s/%s: %w", namespace, service, err)
	}
	resp, err := httpClient.Do(req)
	if err != nil {
		return nil, nil, fmt.Errorf("asking service %s/%s: %w", namespace, service, Classify(err))
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, 8*maxAnswerBytes))
	if err != nil {
		return nil, nil, fmt.Errorf("reading the answer of service %s/%s: %w", namespace, service, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, nil, fmt.Errorf("asking service %s/%s: HTTP %d %s", namespace, service, resp.StatusCode, proxyMessage(raw))
	}
	return raw, resp.Header, nil
}

// proxyMessage takes the sentence out of the API server's Status answer.
func proxyMessage(raw []byte) string {
	var st metav1.Status
	if json.Unmarshal(raw, &st) == nil && st.Message != "" {
		return oneLine(st.Message)
	}
	return oneLine(string(raw))
}

// PrometheusTarget judges whether Prometheus scrapes a job and finds it up.
func (c *Client) PrometheusTarget(ctx context.Context, namespace, service, port, job string) (Verdict, error) {
	what := fmt.Sprintf("Prometheus to find its target %q up", job)
	raw, header, err := c.ServiceGet(ctx, namespace, service, port, "api/v1/targets", map[string]string{"state": "active"})
	if err != nil {
		if errors.Is(err, ErrUnauthorized) || errors.Is(err, ErrForbidden) {
			return Verdict{}, err
		}
		return Verdict{Waiting: what + ": " + oneLine(err.Error())}, nil
	}
	var answer struct {
		Data struct {
			ActiveTargets []struct {
				Labels    map[string]string `json:"labels"`
				Health    string            `json:"health"`
				LastError string            `json:"lastError"`
			} `json:"activeTargets"`
		} `json:"data"`
	}
	if err := json.Unmarshal(raw, &answer); err != nil {
		return Verdict{}, fmt.Errorf("reading Prometheus' targets: %w", err)
	}
	state := "no such target yet"
	for _, t := range answer.Data.ActiveTargets {
		if t.Labels["job"] != job {
			continue
		}
		if t.Health == "up" {
			return Verdict{Ready: true, SimulatedBy: compact(splitNames(header.Get(simulatedByHeader)))}, nil
		}
		state = strings.TrimSpace(t.Health + " " + t.LastError)
	}
	return Verdict{Waiting: what + ": " + oneLine(state)}, nil
}

// Admission judges whether the policies are at work, by a dry run of two pods:
// one that must be refused and one with a GPU that must come back with the
// RuntimeClass filled in.
func (c *Client) Admission(ctx context.Context, namespace string) (Verdict, error) {
	pods := c.Kube.CoreV1().Pods(namespace)
	dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}

	gpu := probePod("llmbox-admission-probe-gpu")
	gpu.Spec.PriorityClassName = "gpu-inference"
	one := resource.MustParse("1")
	gpu.Spec.Containers[0].Resources = corev1.ResourceRequirements{
		Requests: corev1.ResourceList{corev1.ResourceCPU: one, corev1.ResourceMemory: one, "nvidia.com/gpu": one},
		Limits:   corev1.ResourceList{corev1.ResourceMemory: one, "nvidia.com/gpu": one},
	}
	got, err := pods.Create(ctx, gpu, dry)
	switch {
	case err != nil && apierrors.IsInternalError(err):
		return Verdict{Waiting: "the admission webhook to answer: " + oneLine(err.Error())}, nil
	case err != nil:
		return Verdict{Waiting: "a correct GPU pod to be admitted: " + oneLine(err.Error())}, nil
	case got.Spec.RuntimeClassName == nil || *got.Spec.RuntimeClassName != "nvidia":
		return Verdict{Waiting: "the policies to set runtimeClassName nvidia on a GPU pod"}, nil
	}
	simulated := simulatedBy(got)

	bad := probePod("llmbox-admission-probe-bad")
	_, err = pods.Create(ctx, bad, dry)
	if err == nil {
		return Verdict{Waiting: "the policies to refuse a pod without priority class and requests"}, nil
	}
	if apierrors.IsInternalError(err) {
		return Verdict{Waiting: "the admission webhook to answer: " + oneLine(err.Error())}, nil
	}
	by, err := c.webhookSimulators(ctx)
	if err != nil {
		return Verdict{}, err
	}
	return Verdict{Ready: true, SimulatedBy: compact(append(simulated, by...))}, nil
}

// webhookSimulators reads who stands behind the policy engine's webhooks.
func (c *Client) webhookSimulators(ctx context.Context) ([]string, error) {
	list, err := c.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, fmt.Errorf("listing webhook configurations: %w", Classify(err))
	}
	var names []string
	for i := range list.Items {
		if strings.HasPrefix(list.Items[i].Name, "kyverno-resource") {
			names = append(names, simulatedBy(&list.Items[i])...)
		}
	}
	return names, nil
}

// probePod is a pod that only ever exists in a dry run.
func probePod(name string) *corev1.Pod {
	yes, no := true, false
	uid := int64(65534)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{PartOfLabel: ManagedByValue}},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: &no,
			SecurityContext: &corev1.PodSecurityContext{
				RunAsNonRoot: &yes, RunAsUser: &uid,
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []corev1.Container{{
				Name: "probe", Image: "docker.io/vllm/vllm-openai:admission-probe",
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: &no,
					Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
			}},
		},
	}
}
