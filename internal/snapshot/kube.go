package snapshot

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/llmbox-dev/llmbox/internal/host"
)

// Bounds of what is asked of a cluster.
const (
	// versionDeadline is how long the API server may take to say its version; one that
	// takes longer is asked nothing else.
	versionDeadline = 3 * time.Second
	listDeadline    = 6 * time.Second
	logDeadline     = 4 * time.Second
	dialDeadline    = 2 * time.Second
	// page is how many objects are asked for at once, so that a large cluster costs
	// time and not memory.
	page = 500
	// logsFor bounds the pods whose logs are read.
	logsFor = 60
	// logBytes is kept of a log, modelLogBytes of a model server's: its memory profile
	// stands far from the end.
	logBytes      = 64 << 10
	modelLogBytes = 256 << 10
	// mostEvents are kept, the newest.
	mostEvents = 2000
)

// kubeList is a row of what is listed.
type kubeList struct {
	// Path is below the API server's root; the last part is the kind.
	Path  string
	Query url.Values
	// Trim leaves of an object what a judge may look at; nil redacts it as a whole.
	Trim func(map[string]any) map[string]any
	// Metadata asks for the objects' metadata only: nothing else of them is ever sent.
	Metadata bool
	// Deadline is longer than usual where there can be very many.
	Deadline time.Duration
}

// kubeLists is the table of everything listed in a cluster.
func kubeLists() []kubeList {
	crd := func(paths ...string) []kubeList {
		var out []kubeList
		for _, p := range paths {
			out = append(out, kubeList{Path: "apis/" + p})
		}
		return out
	}
	lists := []kubeList{
		{Path: "api/v1/nodes", Trim: trimNode}, {Path: "api/v1/namespaces"}, {Path: "api/v1/services", Trim: trimService},
		{Path: "api/v1/persistentvolumeclaims"}, {Path: "api/v1/persistentvolumes"},
		{Path: "api/v1/events", Trim: trimEvent},
		{Path: "api/v1/secrets", Metadata: true, Query: url.Values{"labelSelector": {"owner=helm"}}},
		{Path: "apis/apps/v1/deployments", Trim: trimWorkload}, {Path: "apis/apps/v1/statefulsets", Trim: trimWorkload}, {Path: "apis/apps/v1/daemonsets", Trim: trimWorkload},
		{Path: "apis/batch/v1/jobs", Trim: trimWorkload},
		{Path: "apis/discovery.k8s.io/v1/endpointslices"}, {Path: "apis/storage.k8s.io/v1/storageclasses"}, {Path: "apis/node.k8s.io/v1/runtimeclasses"},
		{Path: "apis/coordination.k8s.io/v1/namespaces/llmbox-system/leases"},
		{Path: "apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations", Trim: trimWebhooks},
		{Path: "apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", Trim: trimWebhooks},
		{Path: "apis/apiregistration.k8s.io/v1/apiservices", Trim: trimAPIService},
		{Path: "apis/helm.cattle.io/v1/helmcharts", Trim: trimHelmChart},
	}
	return append(lists, crd(
		"gateway.networking.k8s.io/v1/gatewayclasses", "gateway.networking.k8s.io/v1/gateways", "gateway.networking.k8s.io/v1/httproutes",
		"gateway.envoyproxy.io/v1alpha1/securitypolicies", "gateway.envoyproxy.io/v1alpha1/backendtrafficpolicies", "gateway.envoyproxy.io/v1alpha1/clienttrafficpolicies",
		"nvidia.com/v1/clusterpolicies", "keda.sh/v1alpha1/scaledobjects",
		"external-secrets.io/v1/externalsecrets", "external-secrets.io/v1/clustersecretstores", "external-secrets.io/v1/secretstores",
	)...)
}

// kube asks one cluster.
type kube struct {
	*collector
	rest    rest.Interface
	client  kubernetes.Interface
	local   bool
	base    *rest.Config
	details *sync.Mutex
}

// startKube asks the API server for its version and, where it answers, for all else. A
// dead one costs its deadline and nothing more.
func (c *collector) startKube(ctx context.Context) {
	cfg := c.options.Kube
	if cfg == nil {
		return
	}
	c.spawn(ctx, probeDir+ProbeAPI, versionDeadline+time.Second, func(bounded context.Context) {
		answer := APIProbe{Server: cfg.Host}
		own := rest.CopyConfig(cfg)
		own.QPS = -1
		own.UserAgent = "llmbox"
		own.WarningHandlerWithContext = rest.NoWarnings{}
		own.ContentType = "application/json"
		begin := time.Now()
		client, err := kubernetes.NewForConfig(own)
		if err == nil {
			asking, cancel := context.WithTimeout(bounded, versionDeadline)
			defer cancel()
			var raw []byte
			if raw, err = client.Discovery().RESTClient().Get().AbsPath("/version").DoRaw(asking); err == nil {
				var v struct {
					GitVersion string `json:"gitVersion"`
				}
				if err = json.Unmarshal(raw, &v); err == nil {
					answer.Version = v.GitVersion
				}
			}
		}
		answer.ElapsedMS = time.Since(begin).Milliseconds()
		if err != nil {
			answer.Error = redactLog(c.why(err, versionDeadline))
			c.answer(ProbeAPI, answer)
			c.record(func(s *Snapshot) {
				s.MarkUnreadable(strings.TrimSuffix(clusterDir, "/"), "the API server does not answer")
			})
			c.withoutKube(ctx, cfg)
			return
		}
		c.answer(ProbeAPI, answer)
		k := &kube{collector: c, rest: client.Discovery().RESTClient(), client: client, base: own, details: &sync.Mutex{}}
		k.local = onLoopback(cfg)
		// The further looks have the whole collection's time, not what is left of this one's.
		k.start(ctx)
	})
}

func onLoopback(cfg *rest.Config) bool {
	u, err := url.Parse(cfg.Host)
	return err == nil && slices.Contains([]string{"127.0.0.1", "localhost", "::1"}, u.Hostname())
}

// withoutKube takes the looks at this machine that otherwise go with those at the cluster:
// why the API server is dead stands in certificates and with containerd.
func (c *collector) withoutKube(ctx context.Context, cfg *rest.Config) {
	if c.options.ClusterOnly || !onLoopback(cfg) && c.options.Root == "/" {
		return
	}
	c.probe(ctx, ProbeCertificates, func(ctx context.Context) (any, error) { return c.fileCertificates(ctx), nil })
	c.probe(ctx, ProbeDials, func(ctx context.Context) (any, error) { return c.dialContainerd(ctx, []Dial{}), nil })
}

func (k *kube) start(ctx context.Context) {
	for _, l := range kubeLists() {
		deadline := l.Deadline
		if deadline == 0 {
			deadline = listDeadline
		}
		kind := path.Base(l.Path)
		k.spawn(ctx, clusterDir+kind, deadline, func(bounded context.Context) { k.list(bounded, l, deadline, nil) })
	}
	pods := kubeList{Path: "api/v1/pods", Trim: trimPod}
	k.spawn(ctx, clusterDir+"pods", listDeadline, func(bounded context.Context) {
		var interesting []podOfInterest
		k.list(bounded, pods, listDeadline, func(pod map[string]any) {
			if p, ok := interest(pod); ok {
				interesting = append(interesting, p)
			}
		})
		k.logs(ctx, interesting)
	})
	k.spawn(ctx, probeDir+ProbeCertificates, listDeadline, func(bounded context.Context) { k.certificates(bounded) })
	k.spawn(ctx, probeDir+ProbeVault, dialDeadline+time.Second, func(bounded context.Context) { k.vault(bounded) })
	k.spawn(ctx, probeDir+ProbeModel, dialDeadline+time.Second, func(bounded context.Context) { k.model(bounded) })
	if k.local {
		k.spawn(ctx, probeDir+ProbeDials, dialDeadline+time.Second, func(bounded context.Context) { k.dials(bounded) })
		k.spawn(ctx, probeDir+ProbeClusterDNS, 2*dialDeadline+time.Second, func(bounded context.Context) { k.clusterDNS(bounded) })
	}
	if k.options.Endpoint != nil {
		k.spawn(ctx, probeDir+ProbeEndpoint, endpointDeadline+time.Second, func(bounded context.Context) {
			asking, cancel := context.WithTimeout(bounded, endpointDeadline)
			defer cancel()
			answer := k.options.Endpoint(asking)
			answer.Error = redactLog(answer.Error)
			k.answer(ProbeEndpoint, answer)
		})
	}
}

// endpointDeadline is how long a token may take to come.
const endpointDeadline = 6 * time.Second

// list reads a kind page by page and keeps what was had even where a page is late.
func (k *kube) list(ctx context.Context, l kubeList, deadline time.Duration, each func(map[string]any)) {
	kind := path.Base(l.Path)
	place := clusterDir + kind
	var items []json.RawMessage
	next := ""
	for {
		request := k.rest.Get().AbsPath(l.Path).Param("limit", strconv.Itoa(page))
		for name, values := range l.Query {
			request = request.Param(name, values[0])
		}
		if next != "" {
			request = request.Param("continue", next)
		}
		if l.Metadata {
			request = request.SetHeader("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1")
		}
		raw, err := request.DoRaw(ctx)
		if err != nil {
			if apierrors.IsNotFound(err) {
				// The cluster does not know the kind: there is nothing of it.
				return
			}
			why := k.why(err, deadline)
			if apierrors.IsForbidden(err) {
				why = "permission denied"
			}
			k.record(func(s *Snapshot) { s.MarkUnreadable(place, redactLog(why)) })
			if len(items) == 0 {
				return
			}
			break
		}
		var list struct {
			Metadata struct {
				Continue string `json:"continue"`
			} `json:"metadata"`
			Items []map[string]any `json:"items"`
		}
		if err := json.Unmarshal(raw, &list); err != nil {
			k.record(func(s *Snapshot) { s.MarkUnreadable(place, "no list: "+err.Error()) })
			return
		}
		for _, item := range list.Items {
			if each != nil {
				each(item)
			}
			item = trimMetadata(item, l.Metadata)
			if l.Trim != nil {
				item = l.Trim(item)
			} else {
				item, _ = redactValue(item, "").(map[string]any)
			}
			if item == nil {
				continue
			}
			small, err := json.Marshal(item)
			if err != nil {
				continue
			}
			items = append(items, small)
		}
		if next = list.Metadata.Continue; next == "" {
			break
		}
	}
	if kind == "events" && len(items) > mostEvents {
		items = items[len(items)-mostEvents:]
	}
	var out bytes.Buffer
	out.WriteString(`{"items":[`)
	for i, item := range items {
		if i > 0 {
			out.WriteString(",\n")
		}
		out.Write(item)
	}
	out.WriteString("]}\n")
	k.record(func(s *Snapshot) { s.AddCluster(kind, out.Bytes()) })
}

// podOfInterest is a pod whose log is worth reading.
type podOfInterest struct {
	namespace, name string
	containers      []string
	restarted       map[string]bool
	model           bool
	rank            int
}

// interest picks the pods that matter: those that are not well, the model, and those
// whose log tells of others.
func interest(pod map[string]any) (podOfInterest, bool) {
	meta, _ := pod["metadata"].(map[string]any)
	spec, _ := pod["spec"].(map[string]any)
	status, _ := pod["status"].(map[string]any)
	p := podOfInterest{restarted: map[string]bool{}, rank: 9}
	p.name, _ = meta["name"].(string)
	p.namespace, _ = meta["namespace"].(string)
	labels, _ := meta["labels"].(map[string]any)
	ready, phase := false, ""
	phase, _ = status["phase"].(string)
	for _, c := range list(status["conditions"]) {
		if c["type"] == "Ready" && c["status"] == "True" {
			ready = true
		}
	}
	for _, c := range append(list(spec["initContainers"]), list(spec["containers"])...) {
		if name, ok := c["name"].(string); ok {
			p.containers = append(p.containers, name)
		}
		resources, _ := c["resources"].(map[string]any)
		limits, _ := resources["limits"].(map[string]any)
		for name := range limits {
			p.model = p.model || strings.HasPrefix(name, "nvidia.com/")
		}
	}
	for _, key := range []string{"initContainerStatuses", "containerStatuses"} {
		for _, c := range list(status[key]) {
			name, _ := c["name"].(string)
			if n, ok := c["restartCount"].(float64); ok && n > 0 {
				p.restarted[name] = true
			}
		}
	}
	p.model = p.model || labels["app.kubernetes.io/name"] == "model-server"
	switch {
	case p.name == "" || phase == "Succeeded":
		return p, false
	case p.model:
		p.rank = 0
	case !ready && (phase == "Running" || phase == "Pending" || phase == "Failed"):
		p.rank = 1
	case labels["k8s-app"] == "kube-dns", labels["app.kubernetes.io/component"] == "proxy", strings.HasPrefix(p.name, "nvidia-device-plugin"):
		p.rank = 2
	default:
		return p, false
	}
	return p, true
}

func list(v any) []map[string]any {
	items, _ := v.([]any)
	var out []map[string]any
	for _, item := range items {
		if m, ok := item.(map[string]any); ok {
			out = append(out, m)
		}
	}
	return out
}

// logs reads the ends of logs, the present run's and the one's before.
func (k *kube) logs(ctx context.Context, pods []podOfInterest) {
	slices.SortStableFunc(pods, func(a, b podOfInterest) int { return a.rank - b.rank })
	if len(pods) > logsFor {
		k.record(func(s *Snapshot) {
			s.MarkUnreadable(strings.TrimSuffix(logDir, "/"), fmt.Sprintf("%d pods to read, the first %d were taken", len(pods), logsFor))
		})
		pods = pods[:logsFor]
	}
	for _, p := range pods {
		for _, container := range p.containers {
			for _, previous := range []bool{false, true} {
				if previous && !p.restarted[container] {
					continue
				}
				name := LogName{Namespace: p.namespace, Pod: p.name, Container: container, Previous: previous}
				if safeName(name.Place()) != nil {
					continue
				}
				k.spawn(ctx, name.Place(), logDeadline, func(bounded context.Context) { k.log(bounded, name, p.model) })
			}
		}
	}
}

func (k *kube) log(ctx context.Context, name LogName, model bool) {
	lines, most := 400, logBytes
	if model {
		lines, most = 3000, modelLogBytes
	}
	stream, err := k.rest.Get().AbsPath("api/v1/namespaces", name.Namespace, "pods", name.Pod, "log").
		Param("container", name.Container).Param("previous", strconv.FormatBool(name.Previous)).Param("tailLines", strconv.Itoa(lines)).Stream(ctx)
	if err != nil {
		// A container that has not started has no log, which is no failure to read one.
		if !apierrors.IsBadRequest(err) && !apierrors.IsNotFound(err) {
			k.record(func(s *Snapshot) { s.MarkUnreadable(name.Place(), redactLog(k.why(err, logDeadline))) })
		}
		return
	}
	defer func() { _ = stream.Close() }()
	data, err := io.ReadAll(io.LimitReader(stream, int64(8*most)))
	if err != nil && len(data) == 0 {
		k.record(func(s *Snapshot) { s.MarkUnreadable(name.Place(), k.why(err, logDeadline)) })
		return
	}
	if len(data) > most {
		data = data[len(data)-most:]
		// A secret cut in two could not be found any more; whole lines can.
		if i := bytes.IndexByte(data, '\n'); i >= 0 {
			data = data[i+1:]
		}
	}
	text := redactLog(string(bytes.ToValidUTF8(data, []byte("?"))))
	k.record(func(s *Snapshot) { s.AddLog(name, text) })
}

// certificates reads when the served certificates end. Keys are dropped unread.
func (k *kube) certificates(ctx context.Context) {
	var out []Certificate
	if k.local || k.options.Root != "/" {
		out = k.fileCertificates(ctx)
	}
	raw, err := k.rest.Get().AbsPath("api/v1/secrets").Param("fieldSelector", "type=kubernetes.io/tls").Param("limit", strconv.Itoa(page)).DoRaw(ctx)
	if err == nil {
		var secrets struct {
			Items []struct {
				Metadata struct {
					Namespace string `json:"namespace"`
					Name      string `json:"name"`
				} `json:"metadata"`
				Data map[string]string `json:"data"`
			} `json:"items"`
		}
		if json.Unmarshal(raw, &secrets) == nil {
			for _, s := range secrets.Items {
				if data, err := base64.StdEncoding.DecodeString(s.Data["tls.crt"]); err == nil {
					out = append(out, certificate("secret "+s.Metadata.Namespace+"/"+s.Metadata.Name, data))
				}
			}
		}
	}
	k.answer(ProbeCertificates, out)
}

// fileCertificates are those of k3s on this machine.
func (c *collector) fileCertificates(ctx context.Context) []Certificate {
	out := []Certificate{}
	for _, pattern := range []string{"/server/tls/*.crt", "/server/tls/etcd/*.crt", "/agent/*.crt"} {
		names, _, err := c.host.Glob(ctx, c.dataDir()+pattern)
		if err != nil {
			continue
		}
		for _, name := range names {
			if data, err := c.host.ReadFile(ctx, name, 64<<10); err == nil {
				out = append(out, certificate(name, data))
			}
		}
	}
	return out
}

func (c *collector) dataDir() string {
	if c.options.K3sData != "" {
		return c.options.K3sData
	}
	return "/var/lib/rancher/k3s"
}

// certificate reads the first certificate of a PEM text.
func certificate(place string, data []byte) Certificate {
	out := Certificate{Place: place}
	for {
		block, rest := pem.Decode(data)
		if block == nil {
			out.Error = "no certificate in it"
			return out
		}
		if block.Type != "CERTIFICATE" {
			data = rest
			continue
		}
		parsed, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			out.Error = "can't be read"
			return out
		}
		out.Subject, out.Issuer, out.NotAfter, out.NotBefore = parsed.Subject.CommonName, parsed.Issuer.CommonName, parsed.NotAfter.UTC(), parsed.NotBefore.UTC()
		return out
	}
}

// vault asks Vault whether it is sealed, through the API server.
func (k *kube) vault(ctx context.Context) {
	var probe VaultProbe
	raw, status, err := k.proxied(ctx, "vault", "vault-0:8200", "v1/sys/health", url.Values{"sealedcode": {"200"}, "uninitcode": {"200"}, "standbyok": {"true"}})
	switch {
	case status == http.StatusNotFound:
		return
	case err != nil:
		probe.Error = redactLog(k.why(err, dialDeadline))
	default:
		if err := json.Unmarshal(raw, &probe); err != nil {
			probe.Error = "no answer of Vault's"
		}
		probe.Status = status
	}
	k.answer(ProbeVault, probe)
}

// proxied gets a path of a pod through the API server.
func (k *kube) proxied(ctx context.Context, namespace, pod, at string, query url.Values) (raw []byte, status int, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialDeadline)
	defer cancel()
	request := k.rest.Get().AbsPath("api/v1/namespaces", namespace, "pods", pod, "proxy", at)
	for name, values := range query {
		request = request.Param(name, values[0])
	}
	result := request.Do(ctx)
	result.StatusCode(&status)
	raw, err = result.Raw()
	return raw, status, err
}

var metricLine = regexp.MustCompile(`(?m)^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc)(?:\{[^}]*\})? ([0-9.eE+-]+)$`)

// model asks the model server for its own figures.
func (k *kube) model(ctx context.Context) {
	raw, err := k.rest.Get().AbsPath("api/v1/namespaces/llm/pods").Param("labelSelector", "app.kubernetes.io/name=model-server").Param("limit", "4").DoRaw(ctx)
	if err != nil {
		return
	}
	var pods struct {
		Items []struct {
			Metadata struct {
				Name string `json:"name"`
			} `json:"metadata"`
			Status struct {
				Phase string `json:"phase"`
			} `json:"status"`
		} `json:"items"`
	}
	if json.Unmarshal(raw, &pods) != nil {
		return
	}
	for _, p := range pods.Items {
		if p.Status.Phase != "Running" {
			continue
		}
		var probe ModelProbe
		metrics, status, err := k.proxied(ctx, "llm", p.Metadata.Name+":8000", "metrics", nil)
		if err != nil {
			probe.Error = redactLog(k.why(err, dialDeadline))
			k.answer(ProbeModel, probe)
			return
		}
		probe.Health = status
		for _, m := range metricLine.FindAllStringSubmatch(string(metrics), -1) {
			v, err := strconv.ParseFloat(m[2], 64)
			if err != nil {
				continue
			}
			switch m[1] {
			case "num_requests_running":
				probe.Running += v
			case "num_requests_waiting":
				probe.Waiting += v
			default:
				probe.CacheUsage = v
			}
		}
		if probe.Waiting > 0 && probe.Running == 0 {
			probe.WaitedSeconds = k.stalled(ctx)
		}
		k.answer(ProbeModel, probe)
		return
	}
}

// stalled asks Prometheus for how long requests have been waiting with none running; 0
// where it can't tell.
func (k *kube) stalled(ctx context.Context) float64 {
	const minute = 60
	raw, err := k.rest.Get().AbsPath("api/v1/namespaces/monitoring/services/prometheus-operated:9090/proxy/api/v1/query").
		Param("query", "min_over_time(vllm:num_requests_waiting[1m]) > 0 and max_over_time(vllm:num_requests_running[1m]) == 0").DoRaw(ctx)
	if err != nil {
		return 0
	}
	var answer struct {
		Data struct {
			Result []json.RawMessage `json:"result"`
		} `json:"data"`
	}
	if json.Unmarshal(raw, &answer) != nil || len(answer.Data.Result) == 0 {
		return 0
	}
	return minute
}

// dials tries the ways that pods and k3s take on this machine.
func (k *kube) dials(ctx context.Context) {
	out := []Dial{}
	if ip := k.clusterIP(ctx, "default", "kubernetes"); ip != "" {
		out = append(out, k.dial(ctx, "kubernetes service", "tcp", net.JoinHostPort(ip, "443"), nil))
	}
	k.answer(ProbeDials, k.dialContainerd(ctx, out))
}

// containerdSocket is where k3s's containerd listens.
const containerdSocket = "/run/k3s/containerd/containerd.sock"

func (c *collector) dialContainerd(ctx context.Context, out []Dial) []Dial {
	if _, err := c.host.Stat(ctx, containerdSocket); err != nil || *c.options.UID != 0 || c.options.Root != "/" {
		return out
	}
	return append(out, c.dial(ctx, "containerd", "unix", containerdSocket, greet))
}

func (c *collector) dial(ctx context.Context, what, network, address string, talk func(net.Conn) error) Dial {
	ctx, cancel := context.WithTimeout(ctx, dialDeadline)
	defer cancel()
	begin := time.Now()
	connection, err := new(net.Dialer).DialContext(ctx, network, address)
	if err == nil {
		if deadline, ok := ctx.Deadline(); ok {
			err = connection.SetDeadline(deadline)
		}
		if err == nil && talk != nil {
			err = talk(connection)
		}
		_ = connection.Close()
	}
	one := Dial{What: what, Address: address, ElapsedMS: time.Since(begin).Milliseconds()}
	if err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("takes connections and does not answer: %w", errSilent)
		}
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err
		}
		one.Error = c.why(err, dialDeadline)
	}
	return one
}

// errSilent is what a program that is halted looks like: the kernel takes connections for it.
var errSilent = fmt.Errorf("nothing within %s", dialDeadline)

// greet begins HTTP/2, which gRPC is spoken over, and waits for the other side to begin it
// too (RFC 9113, section 3.4).
func greet(connection net.Conn) error {
	const preface, settings = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	if _, err := io.WriteString(connection, preface+settings); err != nil {
		return err
	}
	_, err := io.ReadFull(connection, make([]byte, 9))
	return err
}

func (k *kube) clusterIP(ctx context.Context, namespace, name string) string {
	raw, err := k.rest.Get().AbsPath("api/v1/namespaces", namespace, "services", name).DoRaw(ctx)
	if err != nil {
		return ""
	}
	var s struct {
		Spec struct {
			ClusterIP string `json:"clusterIP"`
		} `json:"spec"`
	}
	if json.Unmarshal(raw, &s) != nil || net.ParseIP(s.Spec.ClusterIP) == nil {
		return ""
	}
	return s.Spec.ClusterIP
}

// clusterDNS asks the cluster's own name server for a name inside and one outside.
func (k *kube) clusterDNS(ctx context.Context) {
	ip := k.clusterIP(ctx, "kube-system", "kube-dns")
	if ip == "" {
		return
	}
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		d := net.Dialer{Timeout: dialDeadline}
		return d.DialContext(ctx, network, net.JoinHostPort(ip, "53"))
	}}
	names := []string{"kubernetes.default.svc.cluster.local."}
	if !k.options.Offline {
		names = append(names, "huggingface.co.")
	}
	out := make([]DNS, len(names))
	var group sync.WaitGroup
	for i, name := range names {
		group.Go(func() {
			asking, cancel := context.WithTimeout(ctx, 2*dialDeadline)
			defer cancel()
			begin := time.Now()
			addresses, err := resolver.LookupHost(asking, name)
			out[i] = DNS{Name: strings.TrimSuffix(name, "."), Addresses: addresses, ElapsedMS: time.Since(begin).Milliseconds()}
			if err != nil {
				out[i].Error = k.why(err, 2*dialDeadline)
			}
		})
	}
	group.Wait()
	k.answer(ProbeClusterDNS, out)
}

// boxFiles is what an installed box has beside the machine's own.
func (c *collector) boxFiles() []fileGroup {
	return []fileGroup{
		{Purpose: "what containerd said", Read: tail, Limit: logBytes, Paths: []string{c.dataDir() + "/agent/containerd/containerd.log"}},
		{Purpose: "k3s's configuration", Read: whole, YAML: true, Paths: []string{"/etc/rancher/k3s/config.yaml", "/etc/rancher/k3s/config.yaml.d/*.yaml"}},
		{Purpose: "datastore and certificates", Paths: []string{c.dataDir() + "/server/db/*", c.dataDir() + "/server/tls/*", "/run/k3s/containerd/containerd.sock"}},
	}
}

// boxCommands are asked of an installed box beside the machine's own.
func boxCommands() []commandItem {
	return []commandItem{
		{
			Name: CommandJournalK3s, Purpose: "what k3s said", Program: "journalctl", Root: true, Tail: true,
			Args: []string{"-u", "k3s", "-u", "k3s-agent", "--no-pager", "-o", "short", "-n", "1500"},
		},
		{
			Name: CommandJournalSystemd, Purpose: "reloads of systemd, which can take a container's GPU", Program: "journalctl", Root: true, Tail: true,
			Args: []string{"_PID=1", "--no-pager", "-o", "short", "-n", "400"}, Keep: regexp.MustCompile(`(?i)reload|k3s|nvidia|containerd`),
		},
	}
}

// supervisedLog is where a k3s that llmbox itself keeps running writes its log.
const supervisedLog = "/var/log/llmbox/k3s.log"

// startBox reads what only an installed box has.
func (c *collector) startBox(ctx context.Context) {
	if !c.options.Installed {
		return
	}
	for _, group := range c.boxFiles() {
		for _, pattern := range group.Paths {
			c.spawn(ctx, "host"+pattern, fileDeadline, func(bounded context.Context) { c.matches(ctx, bounded, pattern, group) })
		}
	}
	if c.options.Root == "/" || len(c.options.Programs) > 0 {
		for _, item := range boxCommands() {
			c.spawn(ctx, commandDir+item.Name, commandDeadline+time.Second, func(bounded context.Context) { c.ask(bounded, item, commandDeadline) })
		}
	}
	c.spawn(ctx, "host"+supervisedLog, fileDeadline, func(bounded context.Context) {
		data, err := c.host.ReadTail(bounded, supervisedLog, modelLogBytes)
		if err != nil {
			c.unreadable("host"+supervisedLog, err, fileDeadline)
			return
		}
		text := redactLog(string(data))
		c.record(func(s *Snapshot) { s.AddCommand(CommandJournalK3s+"-supervised", text, 0) })
	})
	if c.options.Kube == nil {
		c.probe(ctx, ProbeCertificates, func(ctx context.Context) (any, error) { return c.fileCertificates(ctx), nil })
	}
	c.probe(ctx, ProbeService, func(ctx context.Context) (any, error) { return c.service(ctx) })
	c.spawn(ctx, probeDir+ProbePodDevices, 2*commandDeadline, func(bounded context.Context) { c.podDevices(bounded) })
}

// podDevices asks NVML inside the containers that have a GPU, through k3s's own crictl,
// and only on this machine: a container can lose its GPU while the machine keeps it.
func (c *collector) podDevices(ctx context.Context) {
	if c.options.Root != "/" || *c.options.UID != 0 {
		return
	}
	if _, err := host.Find("k3s", c.options.Programs); err != nil {
		return
	}
	if _, err := c.host.Stat(ctx, "/dev/nvidiactl"); err != nil {
		return
	}
	listed, err := c.host.Run(ctx, host.Command{Program: "k3s", Args: []string{"crictl", "ps", "-o", "json", "--label", "io.kubernetes.pod.namespace=llm"}, Deadline: commandDeadline, Limit: 1 << 20})
	if err != nil || listed.Exit != 0 {
		return
	}
	var containers struct {
		Containers []struct {
			ID       string `json:"id"`
			Metadata struct {
				Name string `json:"name"`
			} `json:"metadata"`
			Labels map[string]string `json:"labels"`
		} `json:"containers"`
	}
	if json.Unmarshal(listed.Output, &containers) != nil {
		return
	}
	out := []PodDevices{}
	for _, one := range containers.Containers {
		if one.Metadata.Name != "vllm" || len(out) >= 4 {
			continue
		}
		d := PodDevices{Namespace: one.Labels["io.kubernetes.pod.namespace"], Pod: one.Labels["io.kubernetes.pod.name"], Container: one.Metadata.Name}
		result, err := c.host.Run(ctx, host.Command{Program: "k3s", Args: []string{"crictl", "exec", one.ID, "nvidia-smi", "-L"}, Deadline: commandDeadline, Limit: 16 << 10})
		first, _, _ := strings.Cut(strings.TrimSpace(string(result.Output)), "\n")
		switch {
		case err != nil:
			d.Error = c.why(err, commandDeadline)
		case result.Exit == 0:
			d.NVML = "ok"
		default:
			d.NVML = redactLog(first)
		}
		out = append(out, d)
	}
	c.answer(ProbePodDevices, out)
}
