// Package controlplane runs a Kubernetes control plane from its own programs:
// kine for storage, the API server, the controller manager, the scheduler, and
// KWOK in the place of the kubelet.
//
// It knows how the programs are configured and started. What is in the cluster,
// and who answers for it, belongs to packages standin and actors.
package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/llmbox-dev/llmbox/test/lab/labdir"
	"github.com/llmbox-dev/llmbox/test/lab/process"
	"github.com/llmbox-dev/llmbox/test/lab/programs"
)

const (
	// ServiceCIDR is the range of Services.
	ServiceCIDR = "10.43.0.0/16"
	// PodCIDR is the range from which each node gets a /24.
	PodCIDR = "10.42.0.0/16"

	// unix(7) allows 108 bytes with the closing zero.
	longestSocket = 107
)

// Home is the directory of a control plane and the record of its processes.
type Home interface {
	// Join is a path inside the directory.
	Join(elem ...string) string
	// Record notes a process that belongs to it.
	Record(name string, pid int) error
}

// OnNode makes a control plane one of a real node: pods reach it, and it reaches
// pods and kubelets by their own addresses, without an egress socket.
type OnNode struct {
	// Address is the node's own, at which pods find the API server.
	Address net.IP
	// Port of the API server on every address.
	Port int

	// PodCIDR and ServiceCIDR are those of a lab where they are empty.
	PodCIDR, ServiceCIDR string
	// SANs are names and addresses beside the node's for which the API server's
	// certificate holds, too.
	SANs []string
	// Name of cluster, user and context in kubeconfigs; empty: the lab's.
	Name string
	// Keep makes keys and certificates outlast this process: who starts in the same
	// home finds them, as long as they hold for what they are needed for.
	Keep bool
	// APIServerArgs, ControllersArgs and SchedulerArgs come after the lab's own flags.
	APIServerArgs, ControllersArgs, SchedulerArgs []string
	// Output receives what the programs write; nil: a log for each of them.
	Output *os.File
}

// Plane is a control plane in a lab directory.
type Plane struct {
	dir      Home
	node     *OnNode
	programs programs.Set
	group    *process.Group
	port     int
	// held keeps the port ours between choosing it and the API server's bind.
	held int
	ca   authority

	podCIDR, serviceCIDR, name string
}

// New prepares keys, certificates and configuration files. Nothing runs yet.
func New(dir Home, set programs.Set, group *process.Group) (*Plane, error) {
	return create(dir, nil, set, group)
}

// NewOnNode does the same for a control plane that runs on a real node.
func NewOnNode(dir Home, node OnNode, set programs.Set, group *process.Group) (*Plane, error) {
	return create(dir, &node, set, group)
}

func create(dir Home, node *OnNode, set programs.Set, group *process.Group) (*Plane, error) {
	for _, socket := range []string{dir.Join("kine.sock"), dir.Join("egress.sock")} {
		if len(socket) > longestSocket {
			return nil, fmt.Errorf("choosing the lab directory: %s is %d bytes long, a Unix socket's path has at most %d: choose a shorter --dir", socket, len(socket), longestSocket)
		}
	}
	for _, sub := range []string{"pki", "logs", "config"} {
		if err := os.MkdirAll(dir.Join(sub), 0o700); err != nil {
			return nil, fmt.Errorf("making the lab directory: %w", err)
		}
	}
	p := &Plane{dir: dir, node: node, programs: set, group: group, held: -1, podCIDR: PodCIDR, serviceCIDR: ServiceCIDR, name: "llmbox-lab"}
	if node != nil {
		// The node's network is its own: nobody else can take the port.
		p.port = node.Port
		if node.PodCIDR != "" {
			p.podCIDR = node.PodCIDR
		}
		if node.ServiceCIDR != "" {
			p.serviceCIDR = node.ServiceCIDR
		}
		if node.Name != "" {
			p.name = node.Name
		}
	} else {
		var err error
		if p.held, p.port, err = holdPort(); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(p.writeKeys(), p.writeKubeconfigs(), p.writeConfigs()); err != nil {
		return nil, errors.Join(err, p.Release())
	}
	return p, nil
}

// Port is the API server's loopback port.
func (p *Plane) Port() int { return p.port }

// Kubeconfig is the path of the administrator's kubeconfig.
func (p *Plane) Kubeconfig() string { return p.dir.Join("kubeconfig") }

// EgressSocket is where the API server sends what is meant for the cluster's
// network: webhooks, aggregated APIs, service and pod proxies, kubelets.
func (p *Plane) EgressSocket() string { return p.dir.Join("egress.sock") }

// Config returns a client configuration for one of the lab's own parts.
func (p *Plane) Config(user string) (*rest.Config, error) {
	client, err := p.ca.client("llmbox-lab:"+user, "system:masters")
	if err != nil {
		return nil, err
	}
	return &rest.Config{
		Host:      p.host(),
		UserAgent: "llmbox-lab/" + user,
		TLSClientConfig: rest.TLSClientConfig{
			CAData: p.ca.pem(), CertData: client.cert, KeyData: client.key,
		},
		// The API server is ours alone; client-side limits would only add waiting.
		QPS: -1,
	}, nil
}

// Release gives the held port up.
func (p *Plane) Release() error {
	if p.held < 0 {
		return nil
	}
	if err := unix.Close(p.held); err != nil {
		return fmt.Errorf("releasing the API server's port: %w", err)
	}
	return nil
}

// StartServers starts kine and the API server and waits until it answers.
func (p *Plane) StartServers(ctx context.Context) error {
	kine := p.dir.Join("kine.sock")
	database := "sqlite://" + p.dir.Join("state.db") + "?_journal=WAL&cache=shared&_busy_timeout=30000&_txlock=immediate"
	if !p.keep() {
		// It goes with the lab: nothing has to reach the disk.
		database += "&_synchronous=OFF&_kine_disable_startup_vacuum"
	}
	if p.keep() {
		// The socket of a former start would look like this one's.
		if err := os.Remove(kine); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing an old socket: %w", err)
		}
	}
	if err := p.start("kine", "kine",
		"--endpoint", database,
		"--listen-address", "unix://"+kine,
		"--metrics-bind-address", "0",
	); err != nil {
		return err
	}
	if err := p.until(ctx, "kine's socket", func(context.Context) error {
		_, err := os.Stat(kine)
		return err
	}); err != nil {
		return err
	}
	pki := func(name string) string { return p.dir.Join("pki", name) }
	args := []string{
		"--etcd-servers=unix://" + kine,
		"--secure-port=" + strconv.Itoa(p.port),
		"--tls-cert-file=" + pki("apiserver.crt"),
		"--tls-private-key-file=" + pki("apiserver.key"),
		"--client-ca-file=" + pki("ca.crt"),
		"--anonymous-auth=false",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + pki("sa.key"),
		"--service-account-signing-key-file=" + pki("sa.key"),
		"--service-cluster-ip-range=" + p.serviceCIDR,
		"--requestheader-client-ca-file=" + pki("front-proxy-ca.crt"),
		"--requestheader-allowed-names=front-proxy-client",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-username-headers=X-Remote-User",
		"--proxy-client-cert-file=" + pki("front-proxy-client.crt"),
		"--proxy-client-key-file=" + pki("front-proxy-client.key"),
		"--kubelet-preferred-address-types=InternalIP",
		// Services resolve to ready pods, as kube-proxy would have it: a webhook
		// whose pods are not ready is not reached.
		"--enable-aggregator-routing=true",
		"--allow-privileged=true",
		"--enable-priority-and-fairness=false",
		"--max-requests-inflight=0",
		"--max-mutating-requests-inflight=0",
		"--profiling=false",
		"--event-ttl=1h",
	}
	if p.node == nil {
		args = append(args,
			"--bind-address=127.0.0.1",
			"--advertise-address=127.0.0.1",
			"--permit-port-sharing=true",
			"--authorization-mode=RBAC",
			"--egress-selector-config-file="+p.dir.Join("config", "egress.yaml"),
			// There is no pod that could use default/kubernetes.
			"--endpoint-reconciler-type=none",
		)
	} else {
		args = append(args,
			"--bind-address=0.0.0.0",
			"--advertise-address="+p.node.Address.String(),
			"--authorization-mode=Node,RBAC",
			"--enable-admission-plugins=NodeRestriction",
			"--kubelet-client-certificate="+pki("kubelet-client.crt"),
			"--kubelet-client-key="+pki("kubelet-client.key"),
		)
		args = append(args, p.node.APIServerArgs...)
	}
	if err := p.start("kube-apiserver", "kube-apiserver", args...); err != nil {
		return err
	}
	// Not /livez: it waits for every start hook, and the controllers can start
	// beside those.
	return p.untilHealthy(ctx, "/version")
}

// StartControllers starts what works against the API server.
func (p *Plane) StartControllers() error {
	pki := func(name string) string { return p.dir.Join("pki", name) }
	args := []string{
		"--kubeconfig=" + p.dir.Join("config", "kube-controller-manager.kubeconfig"),
		"--service-account-private-key-file=" + pki("sa.key"),
		"--root-ca-file=" + pki("ca.crt"),
		"--leader-elect=false",
		// One identity for all controllers saves a token per controller at start.
		"--use-service-account-credentials=false",
		"--secure-port=0",
		"--kube-api-qps=500",
		"--kube-api-burst=1000",
		"--profiling=false",
		"--enable-dynamic-provisioning=true",
	}
	if p.node == nil {
		args = append(args, "--allocate-node-cidrs=false")
	} else {
		args = append(args, "--allocate-node-cidrs=true", "--cluster-cidr="+p.podCIDR, "--service-cluster-ip-range="+p.serviceCIDR)
		args = append(args, p.node.ControllersArgs...)
	}
	if err := p.start("kube-controller-manager", "kube-controller-manager", args...); err != nil {
		return err
	}
	scheduler := []string{"--config=" + p.dir.Join("config", "scheduler.yaml"), "--secure-port=0"}
	if p.node != nil {
		scheduler = append(scheduler, p.node.SchedulerArgs...)
	}
	if err := p.start("kube-scheduler", "kube-scheduler", scheduler...); err != nil {
		return err
	}
	if p.node != nil {
		return nil
	}
	return p.start("kwok", "kwok",
		"--config="+p.dir.Join("config", "kwok.yaml"),
		"--kubeconfig="+p.dir.Join("config", "kwok.kubeconfig"),
		"--manage-nodes-with-annotation-selector=llmbox.dev/simulated-by=kwok",
		"--node-lease-duration-seconds=40",
		"--cidr="+PodCIDR,
	)
}

// UntilReady waits until the API server calls itself ready.
func (p *Plane) UntilReady(ctx context.Context) error { return p.untilHealthy(ctx, "/readyz") }

func (p *Plane) start(name, program string, args ...string) error {
	spec := process.Spec{
		Name: name,
		Path: p.programs.Path(program),
		Args: args,
		Dir:  p.dir.Join(),
		// Nothing of the caller's environment: neither its kubeconfig nor its proxies
		// nor a ~/.kwok may take part.
		Env: []string{"HOME=" + p.dir.Join(), "TMPDIR=" + p.dir.Join(), "PATH=/usr/bin:/bin"},
	}
	if p.node != nil && p.node.Output != nil {
		spec.Output = p.node.Output
	} else {
		spec.Log = p.dir.Join("logs", name+".log")
	}
	c, err := p.group.Start(spec)
	if err != nil {
		return err
	}
	return p.dir.Record(name, c.PID)
}

// until repeats check until it succeeds, ctx ends or a child dies.
func (p *Plane) until(ctx context.Context, what string, check func(context.Context) error) error {
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case c := <-p.group.Died():
			return c.DiedError()
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w (last: %w)", what, context.Cause(ctx), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (p *Plane) untilHealthy(ctx context.Context, path string) error {
	config, err := p.Config("supervisor")
	if err != nil {
		return err
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	defer client.CloseIdleConnections()
	return p.until(ctx, "the API server's "+path, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.host()+path, nil)
		if err != nil {
			return fmt.Errorf("asking %s: %w", path, err)
		}
		resp, err := client.Do(req)
		if err != nil {
			return fmt.Errorf("asking %s: %w", path, err)
		}
		defer func() { _ = resp.Body.Close() }()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("asking %s: %s", path, resp.Status)
		}
		return nil
	})
}

func (p *Plane) host() string { return "https://127.0.0.1:" + strconv.Itoa(p.port) }

func (p *Plane) writeKubeconfigs() error {
	for _, k := range []struct{ path, user string }{
		{p.Kubeconfig(), "admin"},
		{p.dir.Join("config", "kube-controller-manager.kubeconfig"), "system:kube-controller-manager"},
		{p.dir.Join("config", "kube-scheduler.kubeconfig"), "system:kube-scheduler"},
		{p.dir.Join("config", "kwok.kubeconfig"), "kwok"},
	} {
		if p.node != nil && k.user == "kwok" {
			continue
		}
		if err := p.WriteKubeconfig(k.path, k.user, "system:masters"); err != nil {
			return err
		}
	}
	return nil
}

// WriteKubeconfig writes a kubeconfig with a certificate of a user and its groups.
func (p *Plane) WriteKubeconfig(path, user string, groups ...string) error {
	if p.keep() && p.keptKubeconfig(path, user, groups) {
		return nil
	}
	client, err := p.ca.client(user, groups...)
	if err != nil {
		return err
	}
	raw, err := clientcmd.Write(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{p.name: {Server: p.host(), CertificateAuthorityData: p.ca.pem()}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{p.user(user): {ClientCertificateData: client.cert, ClientKeyData: client.key}},
		Contexts:       map[string]*clientcmdapi.Context{p.name: {Cluster: p.name, AuthInfo: p.user(user)}},
		CurrentContext: p.name,
	})
	if err != nil {
		return fmt.Errorf("encoding a kubeconfig: %w", err)
	}
	return labdir.WriteFile(path, raw)
}

// user is what a kubeconfig calls it: k3s calls everything by one name.
func (p *Plane) user(user string) string {
	if p.node != nil && p.node.Name != "" {
		return p.node.Name
	}
	return user
}

func (p *Plane) writeConfigs() error {
	return p.writeAll("config", map[string][]byte{
		"egress.yaml": []byte(`apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
- name: cluster
  connection:
    proxyProtocol: HTTPConnect
    transport:
      uds:
        udsName: ` + strconv.Quote(p.EgressSocket()) + "\n"),
		"scheduler.yaml": []byte(`apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: false
clientConnection:
  kubeconfig: ` + strconv.Quote(p.dir.Join("config", "kube-scheduler.kubeconfig")) + `
  qps: 500
  burst: 1000
enableProfiling: false
# A pod that did not fit is tried again soon: a rehearsal is short.
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 2
`),
		"kwok.yaml": stages,
	})
}

func (p *Plane) writeAll(sub string, files map[string][]byte) error {
	for name, data := range files {
		if err := labdir.WriteFile(p.dir.Join(sub, name), data); err != nil {
			return err
		}
	}
	return nil
}

// holdPort binds a free loopback port without listening on it. With SO_REUSEPORT
// on both sides the API server can bind it too, and nobody else is given it.
func holdPort() (fd, port int, err error) {
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, 0, fmt.Errorf("choosing a port: %w", err)
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	if err == nil {
		var name unix.Sockaddr
		name, err = unix.Getsockname(fd)
		if in, ok := name.(*unix.SockaddrInet4); ok && err == nil {
			return fd, in.Port, nil
		}
	}
	return 0, 0, fmt.Errorf("choosing a port: %w", errors.Join(err, unix.Close(fd)))
}
