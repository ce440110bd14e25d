package k3sserver

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/llmbox-dev/llmbox/test/lab/process"
	"github.com/llmbox-dev/llmbox/test/lab/programs"
)

// RunAgent is a node of another's cluster until ctx ends or a part of it fails. When it
// ends, its programs end with it; containers stay.
func RunAgent(ctx context.Context, o Options) (err error) {
	for _, name := range o.Ignored {
		o.Log.warn("The stand-in does nothing about --%s", name)
	}
	if os.Geteuid() != 0 {
		return errors.New("must run as root unless --rootless is specified")
	}
	if o.Server == "" || o.Token == "" {
		return errors.New("--server and --token are required")
	}
	set, err := programs.Find(o.Programs, "kubelet", "kube-proxy")
	if err != nil {
		return err
	}
	s := &server{layout: layout{data: o.DataDir}, config: o.Config, log: o.Log, programs: set, failed: make(chan error, 1)}
	s.log.info("Starting k3s agent %s", o.Version)
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
	bin, err := filepath.EvalSymlinks(s.bin())
	if err != nil {
		return fmt.Errorf("looking for the programs of k3s: %w", err)
	}
	s.daemons = daemons{group: process.NewGroup(), out: o.Output,
		path: bin + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	defer func() {
		stopped := s.group.Stop(15 * time.Second)
		if ctx.Err() != nil {
			err = nil
		}
		err = errors.Join(err, stopped)
	}()
	for _, dir := range []string{s.agent("containerd"), s.agent("pod-manifests"), s.agent("etc", "kubelet.conf.d")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("making the data directory: %w", err)
		}
	}
	if err := s.startAgent(ctx); err != nil {
		return s.explain(err)
	}
	s.log.info("k3s agent is up and running")
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

func (s *server) startAgent(ctx context.Context) error {
	var joining Joining
	err := s.until(ctx, "the server", func(ctx context.Context) error {
		var err error
		joining, err = s.askToJoin(ctx)
		if errors.Is(err, ErrNoToken) {
			s.failed <- err
		}
		return err
	})
	if err != nil {
		return err
	}
	c := &s.config
	c.ClusterCIDR, c.ServiceCIDR, c.ClusterDNS, c.ClusterDomain = joining.ClusterCIDR, joining.ServiceCIDR, joining.ClusterDNS, joining.ClusterDomain
	for _, name := range []string{"client-ca.crt", "server-ca.crt"} {
		if err := writeFile(s.agent(name), joining.CA, 0o600); err != nil {
			return err
		}
	}
	for file, content := range joining.Kubeconfigs {
		if err := writeFile(s.agent(filepath.Base(file)), content, 0o600); err != nil {
			return err
		}
	}
	if err := errors.Join(writeFile(s.agent("serving-kubelet.crt"), joining.ServingCert, 0o600), writeFile(s.agent("serving-kubelet.key"), joining.ServingKey, 0o600)); err != nil {
		return err
	}
	if s.admin, err = clientcmd.BuildConfigFromFlags("", s.agent("k3scontroller.kubeconfig")); err != nil {
		return fmt.Errorf("reading a kubeconfig: %w", err)
	}
	if s.core, err = corev1client.NewForConfig(s.admin); err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	if err := s.startContainerd(ctx); err != nil {
		return err
	}
	if err := s.until(ctx, "containerd", containerdAnswers); err != nil {
		return err
	}
	s.preload(ctx, s.log)
	if err := s.nodePassword(ctx); err != nil {
		return err
	}
	if err := s.startDaemons(); err != nil {
		return err
	}
	s.run(ctx, "flannel", func(ctx context.Context) error { return s.joinNetwork(ctx, nil) })
	return s.until(ctx, "kubelet", kubeletAnswers)
}

// askToJoin gets this node's keys: the authority first, which the token names by its
// hash, then the rest from whoever that authority vouches for.
func (s *server) askToJoin(ctx context.Context) (Joining, error) {
	var joining Joining
	base, err := url.Parse(s.config.Server)
	if err != nil || base.Hostname() == "" {
		return joining, fmt.Errorf("%w: --server %q is no URL", ErrConfig, s.config.Server)
	}
	port, err := strconv.Atoi(base.Port())
	if err != nil {
		return joining, fmt.Errorf("%w: --server %q has no port", ErrConfig, s.config.Server)
	}
	host := net.JoinHostPort(base.Hostname(), strconv.Itoa(port+supervisorOffset))
	hash, token, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(s.config.Token), "K10"), "::")
	blind := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}, // #nosec G402 -- compared with the token's hash
	}}
	ca, err := get(ctx, blind, "https://"+host+"/cacerts", "")
	if err != nil {
		return joining, err
	}
	if sum := sha256.Sum256(ca); hex.EncodeToString(sum[:]) != hash {
		return joining, ErrNoToken
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
	}}
	query := url.Values{"name": {s.config.NodeName}, "ip": {s.ip.String()}}
	raw, err := get(ctx, client, "https://"+host+"/v1-k3s/join?"+query.Encode(), token)
	if err != nil {
		return joining, err
	}
	return joining, json.Unmarshal(raw, &joining)
}

func get(ctx context.Context, client *http.Client, address, token string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, fmt.Errorf("asking the server: %w", err)
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("asking the server: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	switch {
	case err != nil:
		return nil, fmt.Errorf("asking the server: %w", err)
	case response.StatusCode == http.StatusUnauthorized:
		return nil, ErrNoToken
	case response.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("asking the server: %s: %s", response.Status, strings.TrimSpace(string(raw)))
	}
	return raw, nil
}

// routes leads to the pods of the other nodes, by way of their addresses: what flannel
// does with its tunnel.
func (s *server) routes(ctx context.Context) error {
	known := map[string]string{}
	for {
		nodes, err := s.core.Nodes().List(ctx, metav1.ListOptions{})
		if err == nil {
			for _, n := range nodes.Items {
				if n.Name == s.config.NodeName || n.Spec.PodCIDR == "" {
					continue
				}
				for _, a := range n.Status.Addresses {
					if a.Type != "InternalIP" || known[n.Spec.PodCIDR] == a.Address {
						continue
					}
					if err := s.command(ctx, "ip", "route", "replace", n.Spec.PodCIDR, "via", a.Address); err != nil {
						s.log.warn("flannel-standin: %v", err)
						continue
					}
					known[n.Spec.PodCIDR] = a.Address
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(2 * time.Second):
		}
	}
}
