package k3sserver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/llmbox-dev/llmbox/test/lab/controlplane"
	"github.com/llmbox-dev/llmbox/test/lab/kubenode"
	"github.com/llmbox-dev/llmbox/test/lab/process"
	"github.com/llmbox-dev/llmbox/test/lab/programs"
)

// Needed lists the programs that a server runs. helm-controller and kube-router-netpol
// run where they are found beside them.
func Needed() []string {
	return []string{"kine", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"}
}

// Options of Run.
type Options struct {
	Config
	// Programs is the directory of the upstream programs.
	Programs string
	// Version is what it calls itself.
	Version string
	Log     Logger
	// Output receives what the programs write.
	Output *os.File
}

type server struct {
	layout
	daemons
	config   Config
	log      Logger
	programs programs.Set
	plane    *controlplane.Plane
	admin    *rest.Config
	core     *corev1client.CoreV1Client

	ip     net.IP
	uplink string
	failed chan error
}

// Run serves until ctx ends or a part of it fails. When it ends, its programs end with
// it; containers and what belongs to them (shims, mounts, interfaces, rules) stay, and a
// later Run takes them up again.
func Run(ctx context.Context, o Options) (err error) {
	for _, name := range o.Ignored {
		o.Log.warn("The stand-in does nothing about --%s", name)
	}
	if os.Geteuid() != 0 {
		return errors.New("must run as root unless --rootless is specified")
	}
	set, err := programs.Find(o.Programs, Needed()...)
	if err != nil {
		return err
	}
	s := &server{
		layout: layout{data: o.DataDir}, config: o.Config, log: o.Log, programs: set, failed: make(chan error, 1),
	}
	s.log.info("Starting k3s %s", o.Version)
	if s.config.NodeName == "" {
		name, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("naming the node: %w", err)
		}
		s.config.NodeName = strings.ToLower(name)
	}
	if s.ip, s.uplink, err = address(s.config.NodeIP); err != nil {
		return err
	}
	if err := portsFree(ctx, s.config.BindPort); err != nil {
		return err
	}
	// By its real name: who looks for containers that a former version started finds that
	// version's programs.
	bin, err := filepath.EvalSymlinks(s.bin())
	if err != nil {
		return fmt.Errorf("looking for the programs of k3s: %w", err)
	}
	s.daemons = daemons{group: process.NewGroup(), out: o.Output,
		path: bin + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	defer func() {
		stopped := s.group.Stop(15 * time.Second)
		if ctx.Err() != nil {
			err = nil // asked to end, in whatever it was
		}
		err = errors.Join(err, stopped)
	}()
	for _, dir := range []string{s.layout.server("db"), s.layout.server("manifests"), s.agent("containerd"), s.agent("pod-manifests"), s.agent("etc", "kubelet.conf.d")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("making the data directory: %w", err)
		}
	}
	if err := s.start(ctx); err != nil {
		return s.explain(err)
	}
	s.log.info("k3s is up and running")
	if err := notify("READY=1"); err != nil {
		s.log.warn("%v", err)
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-s.failed:
		return err
	case child := <-s.group.Died():
		return s.explain(child.DiedError())
	}
}

// explain names a part that ended by the name it has in k3s.
func (s *server) explain(err error) error {
	var died *process.DiedError
	if !errors.As(err, &died) {
		return err
	}
	how := error(died)
	if died.Err != nil {
		how = died.Err
	}
	return fmt.Errorf("%s exited: %w", strings.TrimPrefix(died.Name, "kube-"), how)
}

func portsFree(ctx context.Context, port int) error {
	for _, address := range []string{":" + strconv.Itoa(port), "127.0.0.1:" + strconv.Itoa(port+1)} {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
		if err != nil {
			return fmt.Errorf("starting kubernetes: preparing server: init cluster datastore and https: %w", err)
		}
		if err := l.Close(); err != nil {
			return fmt.Errorf("looking for free ports: %w", err)
		}
	}
	return nil
}

// run keeps a part going beside the others until ctx ends.
func (s *server) run(ctx context.Context, name string, part func(context.Context) error) {
	go func() {
		if err := part(ctx); err != nil && ctx.Err() == nil {
			select {
			case s.failed <- fmt.Errorf("%s exited: %w", name, err):
			default:
			}
		}
	}()
}

func (s *server) start(ctx context.Context) error {
	secret, err := s.token(s.config.Token)
	if err != nil {
		return err
	}
	if err := s.startContainerd(ctx); err != nil {
		return err
	}
	if err := s.startPlane(ctx); err != nil {
		return err
	}
	if err := s.writeToken(secret); err != nil {
		return err
	}
	s.log.info("Node token is available at %s", s.layout.server("token"))
	if err := s.writeKubeconfig(); err != nil {
		return err
	}
	if err := s.until(ctx, "containerd", containerdAnswers); err != nil {
		return err
	}
	s.log.info("Containerd is now running")
	s.preload(ctx, s.log)
	if err := s.plane.UntilReady(ctx); err != nil {
		return err
	}
	s.log.info("Kube API server is now running")
	// Not before: they give up on an API server that takes its time.
	if err := s.plane.StartControllers(); err != nil {
		return err
	}
	if err := s.nodePassword(ctx); err != nil {
		return err
	}
	if err := s.startNode(ctx); err != nil {
		return err
	}
	if err := s.stageManifests(ctx); err != nil {
		return err
	}
	s.run(ctx, "deploy", s.deploy)
	s.run(ctx, "flannel", func(ctx context.Context) error {
		return s.joinNetwork(ctx, map[string]string{"node-role.kubernetes.io/control-plane": "true"})
	})
	s.run(ctx, "supervisor", s.supervise)
	if !s.config.disables("servicelb") {
		s.run(ctx, "servicelb-standin", func(ctx context.Context) error {
			return kubenode.ServiceLB(ctx, s.admin, s.ip.String())
		})
	}
	return s.until(ctx, "kubelet", kubeletAnswers)
}

// until repeats a check until it succeeds, a part ends or ctx does.
func (s *server) until(ctx context.Context, what string, check func(context.Context) error) error {
	for said := time.Now(); ; {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if time.Since(said) > 5*time.Second {
			s.log.info("Waiting for %s startup: %v", what, err)
			said = time.Now()
		}
		select {
		case err := <-s.failed:
			return err
		case child := <-s.group.Died():
			return child.DiedError()
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", what, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (s *server) startContainerd(context.Context) error {
	if err := s.writeContainerd(s.config, handlers(os.DirFS("/"), s.log), s.log); err != nil {
		return err
	}
	logPath := s.agent("containerd", "containerd.log")
	s.log.info("Logging containerd to %s", logPath)
	_, err := s.group.Start(process.Spec{
		Name: "containerd", Path: s.bin("containerd"), Dir: "/", Log: logPath,
		Args: []string{"-c", s.agent("etc", "containerd", "config.toml"), "-a", ContainerdSocket, "--state", stateDir, "--root", s.agent("containerd")},
		Env:  append([]string{"HOME=/root", "PATH=" + s.path}, proxies(os.Environ())...),
	})
	return err
}

func containerdAnswers(ctx context.Context) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", ContainerdSocket)
	if err != nil {
		return err
	}
	return conn.Close()
}

func kubeletAnswers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:10248/healthz", nil)
	if err != nil {
		return fmt.Errorf("asking kubelet: %w", err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("asking kubelet: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("asking kubelet: %s", resp.Status)
	}
	return nil
}

func (s *server) startPlane(ctx context.Context) error {
	home := home{s.layout}
	apiserver := []string{"--kubelet-certificate-authority=" + home.Join("pki", "ca.crt")}
	if s.config.SecretsEncryption {
		path, err := s.encryption()
		if err != nil {
			return err
		}
		apiserver = append(apiserver, "--encryption-provider-config="+path)
	}
	var err error
	s.plane, err = controlplane.NewOnNode(home, controlplane.OnNode{
		Address: s.ip, Port: s.config.BindPort, PodCIDR: s.config.ClusterCIDR, ServiceCIDR: s.config.ServiceCIDR,
		SANs: append(slices.Clone(s.config.TLSSANs), s.config.NodeName), Name: "default", Keep: true, Output: s.out,
		APIServerArgs:   append(apiserver, asFlags(s.config.APIServerArgs)...),
		ControllersArgs: asFlags(s.config.ControllersArgs), SchedulerArgs: asFlags(s.config.SchedulerArgs),
	}, s.programs, s.group)
	if err != nil {
		return err
	}
	if err := s.plane.StartServers(ctx); err != nil {
		return err
	}
	if s.admin, err = s.plane.Config("k3s"); err != nil {
		return err
	}
	if s.core, err = corev1client.NewForConfig(s.admin); err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	return nil
}

func (s *server) writeKubeconfig() error {
	path := s.config.Kubeconfig
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { // #nosec G301 -- the file has a mode of its own
		return fmt.Errorf("writing the kubeconfig: %w", err)
	}
	if err := s.plane.WriteKubeconfig(path, "system:admin", "system:masters"); err != nil {
		return err
	}
	if err := os.Chmod(path, s.config.KubeconfigMode); err != nil {
		return fmt.Errorf("writing the kubeconfig: %w", err)
	}
	s.log.info("Wrote kubeconfig %s", path)
	return nil
}

// ErrPassword means that a node of this name has joined with another password.
var ErrPassword = errors.New("Node password rejected, duplicate hostname or contents of '/etc/rancher/node/password' may not match server node-passwd entry, try enabling a unique node name with the --with-node-id flag") //nolint:staticcheck // as k3s has it

// nodePassword holds the machine against the Secret of the node's name.
func (s *server) nodePassword(ctx context.Context) error {
	raw, err := os.ReadFile(passwordFile)
	if errors.Is(err, fs.ErrNotExist) {
		secret, err := random(16)
		if err != nil {
			return err
		}
		raw = []byte(secret + "\n")
		if err := writeFile(passwordFile, string(raw), 0o600); err != nil {
			return err
		}
	} else if err != nil {
		return fmt.Errorf("reading the node's password: %w", err)
	}
	sum := sha256.Sum256([]byte(strings.TrimSpace(string(raw))))
	hash := hex.EncodeToString(sum[:])
	name := s.config.NodeName + ".node-password.k3s"
	secrets := s.core.Secrets(metav1.NamespaceSystem)
	return s.until(ctx, "the node's password", func(ctx context.Context) error {
		found, err := secrets.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			_, err = secrets.Create(ctx, &corev1.Secret{
				ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{"hash": []byte(hash)},
			}, metav1.CreateOptions{})
			return err
		}
		if err == nil && string(found.Data["hash"]) != hash {
			return ErrPassword
		}
		return err
	})
}

// nodeUser is who a part of a node is to the API.
type nodeUser struct {
	file, user string
	groups     []string
}

func nodeUsers(node string) []nodeUser {
	return []nodeUser{
		{"kubelet.kubeconfig", "system:node:" + node, []string{"system:nodes"}},
		{"kubeproxy.kubeconfig", "system:kube-proxy", nil},
		{"k3scontroller.kubeconfig", "system:k3s-controller", []string{"system:masters"}},
	}
}

func (s *server) startNode(ctx context.Context) error {
	home := home{s.layout}
	ca, err := os.ReadFile(home.Join("pki", "ca.crt"))
	if err != nil {
		return fmt.Errorf("reading the authority: %w", err)
	}
	for _, name := range []string{"client-ca.crt", "server-ca.crt"} {
		if err := writeFile(s.agent(name), string(ca), 0o600); err != nil {
			return err
		}
	}
	for _, k := range nodeUsers(s.config.NodeName) {
		if err := s.plane.WriteKubeconfig(s.agent(k.file), k.user, k.groups...); err != nil {
			return err
		}
	}
	if err := s.plane.ServingCertificate(s.agent("serving-kubelet.crt"), s.agent("serving-kubelet.key"), s.config.NodeName, s.ip); err != nil {
		return err
	}
	if err := s.startDaemons(); err != nil {
		return err
	}
	controller := "--kubeconfig=" + s.agent("k3scontroller.kubeconfig")
	if !s.config.NoHelmController && s.has("helm-controller") {
		args := []string{controller, "--namespace=", "--controller-name=helm-controller",
			"--node-name=" + s.config.NodeName, "--job-cluster-role=cluster-admin"}
		if s.config.HelmJobImage != "" {
			args = append(args, "--default-job-image="+s.config.HelmJobImage)
		}
		if err := s.daemons.start("helm-controller", s.programs.Path("helm-controller"), nil, args...); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// startDaemons starts what runs on each node.
func (s *server) startDaemons() error {
	kubelet, err := kubenode.KubeletConfig(map[string]any{
		"address": "0.0.0.0",
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false}, "webhook": map[string]any{"enabled": true},
			"x509": map[string]any{"clientCAFile": s.agent("client-ca.crt")},
		},
		"tlsCertFile": s.agent("serving-kubelet.crt"), "tlsPrivateKeyFile": s.agent("serving-kubelet.key"),
		"clusterDNS": []string{s.config.ClusterDNS}, "clusterDomain": s.config.ClusterDomain,
		"containerRuntimeEndpoint": "unix://" + ContainerdSocket,
		"staticPodPath":            s.agent("pod-manifests"),
		"protectKernelDefaults":    s.config.ProtectKernelDefaults,
		"evictionHard":             map[string]string{"imagefs.available": "5%", "nodefs.available": "5%"},
		"evictionMinimumReclaim":   map[string]string{"imagefs.available": "10%", "nodefs.available": "10%"},
		"resolvConf":               s.config.ResolvConf,
	})
	if err != nil {
		return err
	}
	if err := writeFile(s.agent("etc", "kubelet.conf.d", "00-k3s-defaults.conf"), string(kubelet), 0o600); err != nil {
		return err
	}
	args := []string{
		"--config-dir=" + s.agent("etc", "kubelet.conf.d"), "--kubeconfig=" + s.agent("kubelet.kubeconfig"),
		"--hostname-override=" + s.config.NodeName, "--node-ip=" + s.ip.String(), "--read-only-port=0",
		"--node-labels=" + strings.Join(append([]string{"node.kubernetes.io/instance-type=k3s"}, s.config.NodeLabels...), ","),
	}
	if len(s.config.NodeTaints) > 0 {
		args = append(args, "--register-with-taints="+strings.Join(s.config.NodeTaints, ","))
	}
	if err := s.daemons.start("kubelet", s.programs.Path("kubelet"), nil, append(args, asFlags(s.config.KubeletArgs)...)...); err != nil {
		return err
	}
	if err := writeFile(s.agent("etc", "kube-proxy.yaml"), kubenode.ProxyConfig(s.config.NodeName, s.config.ClusterCIDR, s.agent("kubeproxy.kubeconfig")), 0o600); err != nil {
		return err
	}
	if err := s.daemons.start("kube-proxy", s.programs.Path("kube-proxy"), nil,
		append([]string{"--config=" + s.agent("etc", "kube-proxy.yaml")}, asFlags(s.config.ProxyArgs)...)...); err != nil {
		return err
	}
	controller := "--kubeconfig=" + s.agent("k3scontroller.kubeconfig")
	if !s.config.NoNetworkPolicy && s.has("kube-router-netpol") {
		if err := s.daemons.start("kube-router-netpol", s.programs.Path("kube-router-netpol"), nil,
			controller, "--hostname-override="+s.config.NodeName, "--service-cluster-ip-range="+s.config.ServiceCIDR); err != nil {
			return err
		}
	}
	return nil
}

// has tells whether a program that is not needed is there.
func (s *server) has(program string) bool {
	if _, err := os.Stat(s.programs.Path(program)); err != nil {
		s.log.warn("The stand-in has no %s", program)
		return false
	}
	return true
}

// joinNetwork gives the node its role, waits for its subnet and leads to the others.
func (s *server) joinNetwork(ctx context.Context, roles map[string]string) error {
	label, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": roles}})
	if err != nil {
		return fmt.Errorf("encoding labels: %w", err)
	}
	for {
		node, err := s.core.Nodes().Patch(ctx, s.config.NodeName, types.MergePatchType, label, metav1.PatchOptions{})
		if err == nil && node.Spec.PodCIDR != "" {
			if err := s.network(ctx, node.Spec.PodCIDR); err != nil {
				return err
			}
			return s.routes(ctx)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(200 * time.Millisecond):
		}
	}
}
