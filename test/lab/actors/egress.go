package actors

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// address is where a program listens: a port of the pods of a workload.
type address struct {
	namespace, workload string
	port                int64
}

// server answers HTTP in place of the pods of a workload.
type server struct {
	address
	name    string // of the actor
	secure  bool   // speaks TLS
	handler http.Handler
	conns   chan net.Conn
}

// directory knows who answers for which address, and hands over what the API
// server wants to reach: webhooks, aggregated APIs and proxied Services arrive
// here as HTTP CONNECT requests for a cluster or pod address.
type directory struct {
	*plane
	mu      sync.Mutex
	servers map[address]*server
}

// add registers a server. It answers only while its workload has a ready pod.
func (d *directory) add(s *server) {
	inner := s.handler
	s.conns = make(chan net.Conn)
	s.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A kept connection outlives the pod it was made to; the answer must not.
		if d.readyPod(s.namespace, s.workload) == nil {
			panic(http.ErrAbortHandler)
		}
		value, _ := withActor(w.Header().Get(Header), s.name)
		w.Header().Set(Header, value)
		inner.ServeHTTP(w, r)
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	d.servers[s.address] = s
}

// serve answers on the egress socket until ctx ends.
func (d *directory) serve(ctx context.Context, l net.Listener) {
	var work sync.WaitGroup
	defer work.Wait()
	d.mu.Lock()
	servers := make([]*server, 0, len(d.servers))
	for _, s := range d.servers {
		servers = append(servers, s)
	}
	d.mu.Unlock()
	for _, s := range servers {
		work.Go(func() { d.answer(ctx, s) })
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() == nil {
				d.log.Error("egress socket ended", "error", err)
			}
			return
		}
		work.Go(func() { d.connect(ctx, conn) })
	}
}

// answer runs the HTTP server of one address on the connections handed to it.
func (d *directory) answer(ctx context.Context, s *server) {
	hs := &http.Server{
		Handler:           s.handler,
		ReadHeaderTimeout: 10 * time.Second,
		TLSConfig:         d.ca.serverConfig(),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ErrorLog:          log.New(io.Discard, "", 0), // aborted handlers are meant
	}
	stop := context.AfterFunc(ctx, func() { _ = hs.Close() })
	defer stop()
	l := &handedOver{done: ctx.Done(), conns: s.conns}
	var err error
	if s.secure {
		err = hs.ServeTLS(l, "", "")
	} else {
		err = hs.Serve(l)
	}
	if err != nil && ctx.Err() == nil {
		d.log.Error("server ended", "actor", s.name, "error", err)
	}
}

// connect handles one CONNECT request.
func (d *directory) connect(ctx context.Context, conn net.Conn) {
	refuse := func(code int, err error) {
		text := err.Error()
		d.log.Debug("egress refused", "error", text)
		_, _ = fmt.Fprintf(conn, "HTTP/1.1 %d %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
			code, http.StatusText(code), len(text), text)
		_ = conn.Close()
	}
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	reader := bufio.NewReader(conn)
	request, err := http.ReadRequest(reader)
	if err != nil {
		_ = conn.Close()
		return
	}
	if request.Method != http.MethodConnect {
		refuse(http.StatusMethodNotAllowed, errors.New("only CONNECT is served here"))
		return
	}
	host, port, err := splitTarget(request.Host)
	if err != nil {
		refuse(http.StatusBadRequest, err)
		return
	}
	if d.isNode(host, port) {
		d.forward(ctx, conn, reader, port)
		return
	}
	s, err := d.resolve(host, port)
	if err != nil {
		refuse(http.StatusBadGateway, err)
		return
	}
	if _, err := io.WriteString(conn, "HTTP/1.1 200 Connection Established\r\n\r\n"); err != nil {
		_ = conn.Close()
		return
	}
	_ = conn.SetDeadline(time.Time{})
	select {
	case s.conns <- &buffered{Conn: conn, reader: reader}:
	case <-ctx.Done():
		_ = conn.Close()
	}
}

func splitTarget(target string) (string, int64, error) {
	host, text, err := net.SplitHostPort(target)
	if err != nil {
		return "", 0, fmt.Errorf("reading CONNECT target: %w", err)
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("reading port of CONNECT target: %w", err)
	}
	return host, int64(port), nil
}

// isNode says whether the target is a node's kubelet, which the lab itself
// plays on this machine (logs, exec, port-forward).
func (d *directory) isNode(host string, port int64) bool {
	return slices.ContainsFunc(d.list(nodes, ""), func(n *unstructured.Unstructured) bool {
		return integer(n.Object, "status", "daemonEndpoints", "kubeletEndpoint", "Port") == port &&
			slices.ContainsFunc(items(n.Object, "status", "addresses"), func(a map[string]any) bool {
				return str(a, "address") == host
			})
	})
}

// forward joins the connection to a port of this machine.
func (d *directory) forward(ctx context.Context, conn net.Conn, reader io.Reader, port int64) {
	defer func() { _ = conn.Close() }()
	var dialer net.Dialer
	there, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.FormatInt(port, 10)))
	if err != nil {
		d.log.Debug("kubelet port is not served", "port", port, "error", err)
		return
	}
	defer func() { _ = there.Close() }()
	if _, err := io.WriteString(conn, "HTTP/1.1 200 Connection Established\r\n\r\n"); err != nil {
		return
	}
	_ = conn.SetDeadline(time.Time{})
	done := make(chan struct{}, 2)
	go func() { _, _ = io.Copy(there, reader); done <- struct{}{} }()
	go func() { _, _ = io.Copy(conn, there); done <- struct{}{} }()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// resolve finds who answers for a cluster IP or a pod IP.
func (d *directory) resolve(ip string, port int64) (*server, error) {
	for _, svc := range d.list(services, "") {
		if str(svc.Object, "spec", "clusterIP") != ip {
			continue
		}
		return d.backend(svc.GetNamespace(), svc.GetName(), port)
	}
	for _, pod := range d.list(pods, "") {
		if str(pod.Object, "status", "podIP") != ip || !ready(pod) {
			continue
		}
		if s := d.at(pod, port); s != nil {
			return s, nil
		}
	}
	return nil, fmt.Errorf("nothing answers at %s:%d", ip, port)
}

// backend finds who answers for a port of a Service through its ready endpoints.
func (d *directory) backend(namespace, name string, port int64) (*server, error) {
	svc := d.get(services, namespace, name)
	if svc == nil {
		return nil, fmt.Errorf("service %s/%s not found", namespace, name)
	}
	ports := items(svc.Object, "spec", "ports")
	place := slices.IndexFunc(ports, func(p map[string]any) bool { return integer(p, "port") == port })
	if place < 0 {
		return nil, fmt.Errorf("service %s/%s has no port %d", namespace, name, port)
	}
	endpoints := d.endpoints(namespace, name, str(ports[place], "name"))
	for _, e := range endpoints {
		if s := d.at(e.pod, e.port); s != nil {
			return s, nil
		}
	}
	if len(endpoints) > 0 {
		return nil, fmt.Errorf("no actor answers for service %s/%s", namespace, name)
	}
	return nil, fmt.Errorf("service %s/%s has no ready endpoint", namespace, name)
}

// endpoint is one ready address of a named Service port.
type endpoint struct {
	ip   string
	port int64
	pod  *unstructured.Unstructured
}

func (p *plane) endpoints(namespace, service, portName string) []endpoint {
	var out []endpoint
	for _, slice := range p.list(endpointSlices, namespace) {
		if slice.GetLabels()["kubernetes.io/service-name"] != service {
			continue
		}
		for _, port := range items(slice.Object, "ports") {
			if str(port, "name") != portName {
				continue
			}
			for _, e := range items(slice.Object, "endpoints") {
				pod := p.get(pods, namespace, str(e, "targetRef", "name"))
				ips := texts(e, "addresses")
				if pod == nil || len(ips) == 0 || !truth(e, "conditions", "ready") {
					continue
				}
				out = append(out, endpoint{ip: ips[0], port: integer(port, "port"), pod: pod})
			}
		}
	}
	return out
}

// at is the server of a pod's port, if the pod is one an actor plays.
func (d *directory) at(pod *unstructured.Unstructured, port int64) *server {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.servers[address{pod.GetNamespace(), workloadOf(pod), port}]
}

// readyPod is a ready pod of a workload, or nil.
func (p *plane) readyPod(namespace, workload string) *unstructured.Unstructured {
	for _, pod := range p.list(pods, namespace) {
		if workloadOf(pod) == workload && ready(pod) {
			return pod
		}
	}
	return nil
}

func ready(pod *unstructured.Unstructured) bool {
	return pod.GetDeletionTimestamp() == nil && isTrue(pod.Object, "Ready", "status", "conditions")
}

// workloadOf is the name of the Deployment, StatefulSet, DaemonSet or Job of a pod.
func workloadOf(pod *unstructured.Unstructured) string {
	for _, o := range pod.GetOwnerReferences() {
		if o.Controller == nil || !*o.Controller {
			continue
		}
		if o.Kind == "ReplicaSet" {
			return strings.TrimSuffix(o.Name, "-"+pod.GetLabels()["pod-template-hash"])
		}
		return o.Name
	}
	return ""
}

// handedOver is a listener of connections that were accepted elsewhere.
type handedOver struct {
	done  <-chan struct{}
	conns <-chan net.Conn
}

func (h *handedOver) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

func (h *handedOver) Close() error   { return nil }
func (h *handedOver) Addr() net.Addr { return &net.UnixAddr{Name: "egress", Net: "unix"} }

// buffered is a connection some of whose bytes were already read.
type buffered struct {
	net.Conn
	reader *bufio.Reader
}

func (b *buffered) Read(p []byte) (int, error) { return b.reader.Read(p) }
