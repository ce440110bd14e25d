package rendered

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/test/internal/rendering"
)

// translation bounds one run of the translator; it takes about two seconds of a core.
const translation = 2 * time.Minute

// translator is Envoy Gateway's own, from the module that the lab pins.
func translator(t *testing.T) string {
	t.Helper()
	bin := os.Getenv("LLMBOX_BIN")
	if bin == "" {
		bin = filepath.Join("..", "..", "bin")
	}
	path, err := filepath.Abs(filepath.Join(bin, "lab", "egctl"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		t.Skip("bin/lab/egctl has not been built: make lab-egctl")
	} else if err != nil {
		t.Fatal(err)
	}
	return path
}

// wanted is what must be true of Envoy's configuration.
type wanted struct {
	port int64
	// tls is the oldest version a client may speak; "" is plain HTTP.
	tls          string
	prefixes     []string
	keys         map[string]string
	keyHeaders   []string
	clientHeader string
	// perMinute counts for everybody who has no number of his own; 0: no limit.
	perMinute  int64
	ownMinute  map[string]int64
	bodyBytes  int64
	streamIdle string
	received   string
	accessLog  bool
}

func usual(change func(*wanted)) wanted {
	w := wanted{
		port: 8080, prefixes: []string{"/v1"}, keys: map[string]string{"default": "key-of-default", "ci": "key-of-ci"},
		keyHeaders: []string{"Authorization", "x-api-key"}, clientHeader: "x-llmbox-client", streamIdle: "3600s", received: "300s", accessLog: true,
	}
	change(&w)
	return w
}

// The parts of xDS that are looked at, by their JSON names.
type (
	listener struct {
		Name    string `json:"name"`
		Address struct {
			SocketAddress struct {
				PortValue int64 `json:"portValue"`
			} `json:"socketAddress"`
		} `json:"address"`
		AccessLog          []accessLog   `json:"accessLog"`
		FilterChains       []filterChain `json:"filterChains"`
		DefaultFilterChain *filterChain  `json:"defaultFilterChain"`
	}
	filterChain struct {
		Filters []struct {
			Name        string         `json:"name"`
			TypedConfig connectionPart `json:"typedConfig"`
		} `json:"filters"`
		TransportSocket *struct {
			TypedConfig struct {
				CommonTLSContext struct {
					TLSParams struct {
						Minimum string `json:"tlsMinimumProtocolVersion"`
					} `json:"tlsParams"`
					Certificates []struct {
						Name string `json:"name"`
					} `json:"tlsCertificateSdsSecretConfigs"`
				} `json:"commonTlsContext"`
			} `json:"typedConfig"`
		} `json:"transportSocket"`
	}
	// connectionPart holds fields of the connection limit and of the HTTP connection manager.
	connectionPart struct {
		MaxConnections string      `json:"maxConnections"`
		AccessLog      []accessLog `json:"accessLog"`
		Common         struct {
			Underscores string `json:"headersWithUnderscoresAction"`
			IdleTimeout string `json:"idleTimeout"`
		} `json:"commonHttpProtocolOptions"`
		EarlyHeaders []struct {
			TypedConfig struct {
				Mutations []struct {
					Remove string `json:"remove"`
				} `json:"mutations"`
			} `json:"typedConfig"`
		} `json:"earlyHeaderMutationExtensions"`
		HTTPFilters []struct {
			Name string `json:"name"`
		} `json:"httpFilters"`
		MergeSlashes          bool   `json:"mergeSlashes"`
		NormalizePath         bool   `json:"normalizePath"`
		EscapedSlashes        string `json:"pathWithEscapedSlashesAction"`
		RequestHeadersTimeout string `json:"requestHeadersTimeout"`
		RequestTimeout        string `json:"requestTimeout"`
		StreamIdleTimeout     string `json:"streamIdleTimeout"`
		Routes                struct {
			Name string `json:"routeConfigName"`
		} `json:"rds"`
	}
	accessLog struct {
		TypedConfig struct {
			Path      string `json:"path"`
			LogFormat struct {
				JSON map[string]string `json:"jsonFormat"`
				Text json.RawMessage   `json:"textFormatSource"`
			} `json:"logFormat"`
		} `json:"typedConfig"`
	}
	virtualHosts struct {
		Name  string `json:"name"`
		Hosts []struct {
			Routes []route `json:"routes"`
		} `json:"virtualHosts"`
	}
	route struct {
		Name           string          `json:"name"`
		Match          map[string]any  `json:"match"`
		DirectResponse json.RawMessage `json:"directResponse"`
		Redirect       json.RawMessage `json:"redirect"`
		Route          *struct {
			Cluster     string          `json:"cluster"`
			Timeout     string          `json:"timeout"`
			IdleTimeout string          `json:"idleTimeout"`
			RetryPolicy json.RawMessage `json:"retryPolicy"`
			MaxStream   struct {
				Duration string `json:"maxStreamDuration"`
			} `json:"maxStreamDuration"`
		} `json:"route"`
		Filters struct {
			Keys *struct {
				Credentials []struct {
					Client string `json:"client"`
					Key    string `json:"key"`
				} `json:"credentials"`
				Forwarding struct {
					Header string `json:"header"`
					Hide   bool   `json:"hideCredentials"`
				} `json:"forwarding"`
				Sources []struct {
					Header string `json:"header"`
				} `json:"keySources"`
			} `json:"envoy.filters.http.api_key_auth"`
			Body *struct {
				Buffer struct {
					Max int64 `json:"maxRequestBytes"`
				} `json:"buffer"`
			} `json:"envoy.filters.http.buffer"`
			Limit *rateLimit `json:"envoy.filters.http.local_ratelimit"`
		} `json:"typedPerFilterConfig"`
	}
	bucket struct {
		Fill   string `json:"fillInterval"`
		Tokens int64  `json:"maxTokens"`
		Per    int64  `json:"tokensPerFill"`
	}
	rateLimit struct {
		Bucket      bucket `json:"tokenBucket"`
		Descriptors []struct {
			Entries []struct {
				Key string `json:"key"`
			} `json:"entries"`
			Bucket bucket `json:"tokenBucket"`
		} `json:"descriptors"`
		RateLimits []struct {
			Actions []struct {
				Match struct {
					Key     string `json:"descriptorKey"`
					Headers []struct {
						Name        string `json:"name"`
						StringMatch struct {
							Exact string `json:"exact"`
						} `json:"stringMatch"`
					} `json:"headers"`
				} `json:"headerValueMatch"`
			} `json:"actions"`
		} `json:"rateLimits"`
		Enabled  fraction `json:"filterEnabled"`
		Enforced fraction `json:"filterEnforced"`
	}
	percent struct {
		Numerator   int64  `json:"numerator"`
		Denominator string `json:"denominator"`
	}
	fraction struct {
		Default percent `json:"defaultValue"`
	}
	envoyCluster struct {
		Name           string `json:"name"`
		ConnectTimeout string `json:"connectTimeout"`
		Buffer         int64  `json:"perConnectionBufferLimitBytes"`
		Breakers       struct {
			Thresholds []struct {
				Connections int64 `json:"maxConnections"`
				Pending     int64 `json:"maxPendingRequests"`
				Requests    int64 `json:"maxRequests"`
			} `json:"thresholds"`
		} `json:"circuitBreakers"`
	}
)

// envoy is one Gateway's configuration.
type envoy struct {
	listeners []listener
	routes    []virtualHosts
	clusters  []envoyCluster
}

// translated is what the translator answers.
type translated struct {
	envoy envoy
	// complaints are conditions of our objects that are not what they must be.
	complaints []string
}

// translate runs the translator on the gateway's and the route's objects of the plan.
func translate(t *testing.T, egctl string, objects []*unstructured.Unstructured) (translated, error) {
	t.Helper()
	var in bytes.Buffer
	for _, o := range objects {
		raw, err := yaml.Marshal(o.Object)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&in, "---\n%s", raw)
	}
	file := filepath.Join(t.TempDir(), "objects.yaml")
	if err := os.WriteFile(file, in.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), translation)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, egctl, "x", "translate", "--from", "gateway-api", "--to", "gateway-api,xds", "--output", "json", "--file", file)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return translated{}, fmt.Errorf("translating: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	if stderr.Len() > 0 {
		t.Errorf("the translator warns: %s", stderr.String())
	}
	return parse(t, stdout.Bytes(), objects), nil
}

func parse(t *testing.T, raw []byte, objects []*unstructured.Unstructured) translated {
	t.Helper()
	var all map[string]any
	if err := json.Unmarshal(raw, &all); err != nil {
		t.Fatal(err)
	}
	var doc struct {
		XDS map[string]struct {
			Configs []struct {
				Listeners []struct {
					Active struct {
						Listener listener `json:"listener"`
					} `json:"activeState"`
				} `json:"dynamicListeners"`
				Routes []struct {
					Config virtualHosts `json:"routeConfig"`
				} `json:"dynamicRouteConfigs"`
				Clusters []struct {
					Cluster envoyCluster `json:"cluster"`
				} `json:"dynamicActiveClusters"`
			} `json:"configs"`
		} `json:"xds"`
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		t.Fatal(err)
	}
	if len(doc.XDS) != 1 {
		t.Fatalf("configurations of %v, want one Gateway's", slices.Sorted(maps.Keys(doc.XDS)))
	}
	var out translated
	for _, gateway := range doc.XDS {
		for _, c := range gateway.Configs {
			for _, l := range c.Listeners {
				if !strings.HasPrefix(l.Active.Listener.Name, "envoy-gateway-proxy-") { // Envoy's own health and metrics
					out.envoy.listeners = append(out.envoy.listeners, l.Active.Listener)
				}
			}
			for _, r := range c.Routes {
				out.envoy.routes = append(out.envoy.routes, r.Config)
			}
			for _, cl := range c.Clusters {
				out.envoy.clusters = append(out.envoy.clusters, cl.Cluster)
			}
		}
	}
	delete(all, "xds")
	seen := map[string]bool{}
	conditions(all, "", seen, &out.complaints)
	for _, o := range objects {
		if strings.Contains(o.GetAPIVersion(), "gateway.") && !seen[o.GetKind()+"/"+o.GetName()] {
			out.complaints = append(out.complaints, fmt.Sprintf("nothing is said about %s %s", o.GetKind(), o.GetName()))
		}
	}
	return out
}

// conditions walks through objects and complains about each condition that is not true, or
// true for another reason than that all is well.
func conditions(v any, object string, seen map[string]bool, complaints *[]string) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			conditions(e, object, seen, complaints)
		}
	case map[string]any:
		if kind, ok := v["kind"].(string); ok {
			if meta, ok := v["metadata"].(map[string]any); ok {
				object = fmt.Sprintf("%s/%v", kind, meta["name"])
			}
		}
		if name, status := v["type"], v["status"]; name != nil && v["reason"] != nil {
			seen[object] = true
			if reason, _ := v["reason"].(string); status != "True" || !slices.Contains([]string{"Accepted", "Programmed", "ResolvedRefs"}, reason) {
				*complaints = append(*complaints, fmt.Sprintf("%s: %v is %v: %v: %v", object, name, status, reason, v["message"]))
			}
		}
		for _, field := range slices.Sorted(maps.Keys(v)) {
			conditions(v[field], object, seen, complaints)
		}
	}
}

// judge lists what of the configuration is not as wanted.
func (e envoy) judge(w wanted) []string {
	var found []string
	say := func(format string, a ...any) { found = append(found, fmt.Sprintf(format, a...)) }
	differ := func(what string, have, want any) {
		if fmt.Sprint(have) != fmt.Sprint(want) {
			say("%s is %v, want %v", what, have, want)
		}
	}
	if len(e.listeners) != 1 {
		say("%d listeners, want one", len(e.listeners))
		return found
	}
	l := e.listeners[0]
	differ("the listener's port", l.Address.SocketAddress.PortValue, w.port)
	chains := l.FilterChains
	if l.DefaultFilterChain != nil {
		chains = append(chains, *l.DefaultFilterChain)
	}
	if len(chains) != 1 {
		say("the listener has %d filter chains, want one", len(chains))
		return found
	}
	chain := chains[0]
	parts := map[string]connectionPart{}
	for _, f := range chain.Filters {
		parts[strings.TrimPrefix(f.Name, "envoy.filters.network.")] = f.TypedConfig
	}
	switch {
	case w.tls == "" && chain.TransportSocket != nil:
		say("the listener speaks TLS")
	case w.tls != "" && chain.TransportSocket == nil:
		say("the listener speaks plain HTTP")
	case w.tls != "":
		tls := chain.TransportSocket.TypedConfig.CommonTLSContext
		differ("the oldest TLS version", tls.TLSParams.Minimum, w.tls)
		differ("number of certificates", len(tls.Certificates), 1)
	}
	differ("limit of connections", parts["connection_limit"].MaxConnections, "2048")

	http := parts["http_connection_manager"]
	differ("idle timeout of a connection", http.Common.IdleTimeout, "900s")
	differ("idle timeout of a stream", http.StreamIdleTimeout, w.streamIdle)
	differ("time to send the headers", http.RequestHeadersTimeout, "10s")
	differ("time to send a request", http.RequestTimeout, w.received)
	differ("headers with underscores", http.Common.Underscores, "REJECT_REQUEST")
	differ("escaped slashes", http.EscapedSlashes, "REJECT_REQUEST")
	differ("normalised path, merged slashes", []bool{http.NormalizePath, http.MergeSlashes}, []bool{true, true})
	var removed, filters []string
	for _, x := range http.EarlyHeaders {
		for _, m := range x.TypedConfig.Mutations {
			removed = append(removed, m.Remove)
		}
	}
	differ("headers taken off what clients send", removed, []string{w.clientHeader})
	for _, f := range http.HTTPFilters {
		filters = append(filters, strings.TrimPrefix(f.Name, "envoy.filters.http."))
	}
	order := []string{"api_key_auth"}
	if w.bodyBytes > 0 {
		order = append(order, "buffer")
	}
	if w.perMinute > 0 || len(w.ownMinute) > 0 {
		order = append(order, "local_ratelimit")
	}
	differ("filters in their order", filters, append(order, "router"))
	e.judgeLog(w, slices.Concat(l.AccessLog, http.AccessLog), say)

	var prefixes []string
	for _, config := range e.routes {
		differ("name of the routes", config.Name, http.Routes.Name)
		for _, host := range config.Hosts {
			for _, r := range host.Routes {
				prefix, _ := r.Match["pathSeparatedPrefix"].(string)
				if prefix == "" {
					say("route %s matches %v: not a path and what is below it", r.Name, r.Match)
				}
				prefixes = append(prefixes, prefix)
				e.judgeRoute(w, r, say, differ)
			}
		}
	}
	differ("paths", prefixes, w.prefixes)
	return found
}

func (e envoy) judgeLog(w wanted, logs []accessLog, say func(string, ...any)) {
	if !w.accessLog {
		if len(logs) > 0 {
			say("there is an access log")
		}
		return
	}
	if len(logs) < 2 {
		say("%d access logs, want the listener's and the connection manager's", len(logs))
	}
	// One of Envoy's operators, with its argument.
	operator := regexp.MustCompile(`%([A-Z_]+)(?:\(([^)]*)\))?(?::[0-9]+)?%`)
	client := "%REQ(" + strings.ToUpper(w.clientHeader) + ")%"
	// What may be in a line: nothing of a body, no query string, no header that can carry a key.
	allowed := []string{
		"START_TIME", "PROTOCOL", "RESPONSE_CODE", "RESPONSE_CODE_DETAILS", "RESPONSE_FLAGS", "BYTES_RECEIVED", "BYTES_SENT",
		"RESPONSE_DURATION", "DURATION", "UPSTREAM_HOST", "UPSTREAM_TRANSPORT_FAILURE_REASON", "DOWNSTREAM_REMOTE_ADDRESS", "ROUTE_NAME",
		"REQ_WITHOUT_QUERY X-ENVOY-ORIGINAL-PATH?:PATH", "REQ :METHOD", "REQ :AUTHORITY", "REQ X-FORWARDED-FOR", "REQ USER-AGENT", "REQ X-REQUEST-ID",
		"REQ " + strings.ToUpper(w.clientHeader),
	}
	for _, log := range logs {
		if len(log.TypedConfig.LogFormat.Text) > 0 || log.TypedConfig.Path != "/dev/stdout" {
			say("an access log is not JSON on standard output")
		}
		if got := log.TypedConfig.LogFormat.JSON["client"]; got != client {
			say("the access log has %q as client, want %q", got, client)
		}
		for field, format := range log.TypedConfig.LogFormat.JSON {
			matches := operator.FindAllStringSubmatch(format, -1)
			if rest := operator.ReplaceAllString(format, ""); rest != "" || len(matches) == 0 {
				say("the access log's field %s is %q, which can't be read", field, format)
			}
			for _, m := range matches {
				if !slices.Contains(allowed, strings.TrimSpace(m[1]+" "+m[2])) {
					say("the access log's field %s has %s, which is not known to be harmless", field, m[0])
				}
			}
		}
	}
}

func (e envoy) judgeRoute(w wanted, r route, say func(string, ...any), differ func(string, any, any)) {
	if r.Route == nil || len(r.DirectResponse) > 0 || len(r.Redirect) > 0 {
		say("route %s leads to no cluster: %s%s", r.Name, r.DirectResponse, r.Redirect)
		return
	}
	differ("time limit of an answer", r.Route.Timeout, "0s")
	differ("time limit of a stream", r.Route.MaxStream.Duration, "0s")
	differ("idle timeout of an answer", r.Route.IdleTimeout, w.streamIdle)
	if len(r.Route.RetryPolicy) > 0 {
		say("route %s repeats requests: a prompt would be worked on twice: %s", r.Name, r.Route.RetryPolicy)
	}
	if k := r.Filters.Keys; k == nil {
		say("route %s has no key check", r.Name)
	} else {
		keys, headers := map[string]string{}, []string{}
		for _, c := range k.Credentials {
			keys[c.Client] = c.Key
		}
		for _, s := range k.Sources {
			headers = append(headers, s.Header)
		}
		if !maps.Equal(keys, w.keys) {
			say("keys of %v, want those of %v", slices.Sorted(maps.Keys(keys)), slices.Sorted(maps.Keys(w.keys)))
		}
		differ("headers with keys", headers, w.keyHeaders)
		differ("header with the client's name", k.Forwarding.Header, w.clientHeader)
		differ("the key is taken off", k.Forwarding.Hide, true)
	}
	switch b := r.Filters.Body; {
	case b == nil && w.bodyBytes > 0:
		say("route %s has no limit on bodies", r.Name)
	case b != nil:
		differ("longest body", b.Buffer.Max, w.bodyBytes)
	}
	e.judgeLimit(w, r, say, differ)
	for _, c := range e.clusters {
		if c.Name != r.Route.Cluster {
			continue
		}
		differ("time to connect", c.ConnectTimeout, "5s")
		differ("buffer of a connection", c.Buffer, 256<<10)
		if len(c.Breakers.Thresholds) != 1 {
			say("cluster %s has no circuit breakers", c.Name)
			return
		}
		b := c.Breakers.Thresholds[0]
		differ("connections, waiting and running requests at most", []int64{b.Connections, b.Pending, b.Requests}, []int64{1024, 256, 512})
		return
	}
	say("route %s leads to cluster %s, which is not there", r.Name, r.Route.Cluster)
}

func (e envoy) judgeLimit(w wanted, r route, say func(string, ...any), differ func(string, any, any)) {
	limit := r.Filters.Limit
	if w.perMinute == 0 && len(w.ownMinute) == 0 {
		if limit != nil {
			say("route %s has a rate limit", r.Name)
		}
		return
	}
	if limit == nil {
		say("route %s has no rate limit", r.Name)
		return
	}
	for _, f := range []fraction{limit.Enabled, limit.Enforced} {
		// Of a hundred, which is what no denominator means.
		differ("share of requests that the limit is for", f, fraction{Default: percent{Numerator: 100}})
	}
	if w.perMinute > 0 {
		differ("requests a minute", limit.Bucket, bucket{Fill: "60s", Tokens: w.perMinute, Per: w.perMinute})
	}
	own := map[string]int64{}
	for _, l := range limit.RateLimits {
		for _, action := range l.Actions {
			for _, d := range limit.Descriptors {
				if len(d.Entries) == 1 && d.Entries[0].Key == action.Match.Key && len(action.Match.Headers) == 1 &&
					action.Match.Headers[0].Name == w.clientHeader && d.Bucket.Fill == "60s" {
					own[action.Match.Headers[0].StringMatch.Exact] = d.Bucket.Tokens
				}
			}
		}
	}
	if !maps.Equal(own, w.ownMinute) {
		say("requests a minute of single clients are %v, want %v", own, w.ownMinute)
	}
}

// objectsOf takes what a translator reads out of a plan, and adds what the cluster would
// have: an address for the Service, and the Secrets that charts only name.
func objectsOf(t *testing.T, stated func(*config.Layer) error) []*unstructured.Unstructured {
	t.Helper()
	plan, err := rendering.Plan("a10", stated)
	if err != nil {
		t.Fatal(err)
	}
	var out []*unstructured.Unstructured
	for _, step := range plan.Steps {
		for _, o := range step.Objects {
			if o.GetNamespace() == "" && o.GetKind() != "GatewayClass" {
				o.SetNamespace(step.Namespace)
			}
			group := o.GroupVersionKind().Group
			switch {
			case group == "gateway.networking.k8s.io", group == "gateway.envoyproxy.io":
			case o.GetKind() == "Service" && o.GetName() == "model-server":
				if err := unstructured.SetNestedField(o.Object, "10.43.0.9", "spec", "clusterIP"); err != nil {
					t.Fatal(err)
				}
			default:
				continue
			}
			out = append(out, o)
		}
	}
	return append(out,
		secret("llm", "gateway-keys", "Opaque", map[string]string{"default": "key-of-default", "ci": "key-of-ci"}),
		secret("envoy-gateway-system", "gateway-tls", "kubernetes.io/tls", certificate(t)))
}

// openToAll lets routes of every namespace attach to the Gateway. egctl forgets the labels of
// namespaces when it reads them (envoyproxy/gateway v1.9.1
// internal/gatewayapi/resource/load.go), so a selector would never hold there. What the
// selector says is looked at here; that it works, only a cluster shows.
func openToAll(t *testing.T, objects []*unstructured.Unstructured) {
	t.Helper()
	for _, o := range objects {
		if o.GetKind() != "Gateway" {
			continue
		}
		listeners, _, err := unstructured.NestedSlice(o.Object, "spec", "listeners")
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range listeners {
			fields, ok := l.(map[string]any)
			if !ok {
				t.Fatalf("a listener is %v", l)
			}
			want := map[string]any{"from": "Selector", "selector": map[string]any{"matchExpressions": []any{
				map[string]any{"key": "kubernetes.io/metadata.name", "operator": "In", "values": []any{"llm"}},
			}}}
			have, err := at(fields, "allowedRoutes.namespaces")
			if err != nil || fmt.Sprint(have) != fmt.Sprint(want) {
				t.Errorf("routes may come from %v, want %v (%v)", have, want, err)
			}
			if err := unstructured.SetNestedMap(fields, map[string]any{"from": "All"}, "allowedRoutes", "namespaces"); err != nil {
				t.Fatal(err)
			}
		}
		if err := unstructured.SetNestedSlice(o.Object, listeners, "spec", "listeners"); err != nil {
			t.Fatal(err)
		}
	}
}

func secret(namespace, name, kind string, data map[string]string) *unstructured.Unstructured {
	encoded := map[string]any{}
	for k, v := range data {
		encoded[k] = base64.StdEncoding.EncodeToString([]byte(v))
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": kind,
		"metadata": map[string]any{"namespace": namespace, "name": name}, "data": encoded,
	}}
}

// certificate is a self-signed one, made for this run.
func certificate(t *testing.T) map[string]string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "box"}, DNSNames: []string{"box.example"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	cert, err := x509.CreateCertificate(rand.Reader, &template, &template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return map[string]string{
		"tls.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})),
		"tls.key": string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})),
	}
}

// TestXDS: Envoy Gateway's own translator takes the objects of a box without a complaint, and
// what it tells Envoy has the key check, the route, the limits and the timeouts in it.
func TestXDS(t *testing.T) {
	egctl := translator(t)
	flag := config.Flag("set")
	for _, tc := range []struct {
		name   string
		stated func(*config.Layer) error
		wanted wanted
	}{
		{"defaults", func(*config.Layer) error { return nil }, usual(func(*wanted) {})},
		{"TLS, rate limits, body limit, behind a proxy", func(l *config.Layer) error {
			return errors.Join(
				l.Set("gateway.port", 8443, flag),
				l.Set("gateway.tls.enabled", true, flag), l.Set("gateway.tls.existingSecret", "gateway-tls", flag),
				l.Set("gateway.rateLimit.requestsPerMinute", 600, flag),
				l.Set("components.envoy-gateway.values", map[string]any{
					"client": map[string]any{"trustedHops": int64(1), "streamIdleSeconds": int64(7200), "requestTimeoutSeconds": int64(60)},
					"tls":    map[string]any{"minVersion": "1.3"},
				}, flag),
				l.Set("components.route.values", map[string]any{"route": map[string]any{
					"rateLimit": map[string]any{"perClientRequestsPerMinute": map[string]any{"ci": int64(60), "batch": int64(6)}},
					"limits":    map[string]any{"requestBodyMiB": int64(8)},
					"timeouts":  map[string]any{"streamIdleSeconds": int64(7200)},
				}}, flag))
		}, usual(func(w *wanted) {
			w.port, w.tls, w.perMinute, w.ownMinute = 8443, "TLSv1_3", 600, map[string]int64{"ci": 60, "batch": 6}
			w.bodyBytes, w.streamIdle, w.received = 8<<20, "7200s", "60s"
		})},
		{"limits of single clients, exact paths, another header, no log", func(l *config.Layer) error {
			return errors.Join(
				l.Set("components.envoy-gateway.values", map[string]any{"proxy": map[string]any{"accessLog": false, "clientHeader": "x-tenant"}}, flag),
				l.Set("components.route.values", map[string]any{"route": map[string]any{
					"pathPrefixes": []any{"/v1/models", "/v1/chat/completions"},
					"auth":         map[string]any{"clientHeader": "x-tenant", "headers": []any{"x-api-key"}},
					"rateLimit":    map[string]any{"perClientRequestsPerMinute": map[string]any{"ci": int64(60)}},
				}}, flag))
		}, usual(func(w *wanted) {
			w.prefixes = []string{"/v1/chat/completions", "/v1/models"}
			w.clientHeader, w.keyHeaders, w.accessLog, w.ownMinute = "x-tenant", []string{"x-api-key"}, false, map[string]int64{"ci": 60}
		})},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			objects := objectsOf(t, tc.stated)
			openToAll(t, objects)
			out, err := translate(t, egctl, objects)
			if err != nil {
				t.Fatal(err)
			}
			for _, complaint := range slices.Concat(out.complaints, out.envoy.judge(tc.wanted)) {
				t.Error(complaint)
			}
		})
	}
}

// TestXDSCanFail takes away or spoils one object at a time: each must be missed.
func TestXDSCanFail(t *testing.T) {
	egctl := translator(t)
	whole := objectsOf(t, func(*config.Layer) error { return nil })
	openToAll(t, whole)
	without := func(kind, name string) func([]*unstructured.Unstructured) []*unstructured.Unstructured {
		return func(objects []*unstructured.Unstructured) []*unstructured.Unstructured {
			return slices.DeleteFunc(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == kind && o.GetName() == name })
		}
	}
	with := func(kind, path string, value any) func([]*unstructured.Unstructured) []*unstructured.Unstructured {
		return func(objects []*unstructured.Unstructured) []*unstructured.Unstructured {
			for _, o := range objects {
				if o.GetKind() != kind {
					continue
				}
				if err := unstructured.SetNestedField(o.Object, value, strings.Split(path, ".")...); err != nil {
					t.Fatal(err)
				}
			}
			return objects
		}
	}
	for _, tc := range []struct {
		name  string
		spoil func([]*unstructured.Unstructured) []*unstructured.Unstructured
		says  []string
	}{
		{"no SecurityPolicy", without("SecurityPolicy", "openai"), []string{"has no key check", "filters in their order is [router]"}},
		{"no BackendTrafficPolicy", without("BackendTrafficPolicy", "openai"), []string{"idle timeout of an answer", "waiting and running requests at most"}},
		{"no ClientTrafficPolicy", without("ClientTrafficPolicy", "public"), []string{"limit of connections", "idle timeout of a stream", "headers taken off"}},
		// While the Secret is missing nobody gets through.
		{"no keys", without("Secret", "gateway-keys"), []string{"SecurityPolicy/openai: Accepted is False", `leads to no cluster: {"status":500}`}},
		{"keys left on", with("SecurityPolicy", "spec.apiKeyAuth.sanitize", false), []string{"the key is taken off is false"}},
		{"Envoy Gateway's own access log", with("EnvoyProxy", "spec.telemetry", map[string]any{}), []string{`has "" as client`, "REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%, which is not known to be harmless"}},
		{"unknown field", with("SecurityPolicy", "spec.apiKeyCheck", true), []string{"apiKeyCheck"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			objects := make([]*unstructured.Unstructured, len(whole))
			for i, o := range whole {
				objects[i] = o.DeepCopy()
			}
			out, err := translate(t, egctl, tc.spoil(objects))
			var got string
			if err != nil {
				got = err.Error()
			} else {
				got = strings.Join(slices.Concat(out.complaints, out.envoy.judge(usual(func(*wanted) {}))), "\n")
			}
			for _, want := range tc.says {
				if !strings.Contains(got, want) {
					t.Errorf("what is said does not have %q:\n%s", want, got)
				}
			}
		})
	}
}
