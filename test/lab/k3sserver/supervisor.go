package k3sserver

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"
)

// supervisorOffset is added to the server's port for what agents join by. k3s has both
// on one port; here the API server holds that itself.
const supervisorOffset = 100

// bootstrapType is the type of the Secret behind a token of `k3s token create`.
const bootstrapType = "bootstrap.kubernetes.io/token"

// ErrNoToken means that a token does not let anybody join.
var ErrNoToken = errors.New("token CA hash does not match, or the token is unknown or has expired")

// Joining is what an agent gets from its server.
type Joining struct {
	CA            string            `json:"ca"`
	Kubeconfigs   map[string]string `json:"kubeconfigs"`
	ServingCert   string            `json:"serving_cert"`
	ServingKey    string            `json:"serving_key"`
	ClusterCIDR   string            `json:"cluster_cidr"`
	ServiceCIDR   string            `json:"service_cidr"`
	ClusterDNS    string            `json:"cluster_dns"`
	ClusterDomain string            `json:"cluster_domain"`
}

// supervise serves agents until ctx ends.
func (s *server) supervise(ctx context.Context) error {
	pair := [2]string{s.layout.server("tls", "serving-supervisor.crt"), s.layout.server("tls", "serving-supervisor.key")}
	if err := s.plane.ServingCertificate(pair[0], pair[1], s.config.NodeName, s.ip); err != nil {
		return err
	}
	certificate, err := tls.LoadX509KeyPair(pair[0], pair[1])
	if err != nil {
		return fmt.Errorf("reading the supervisor's certificate: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /cacerts", func(w http.ResponseWriter, _ *http.Request) {
		raw, err := os.ReadFile(s.layout.server("tls", "server-ca.crt"))
		if err != nil {
			http.Error(w, "no authority", http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write(raw)
	})
	mux.HandleFunc("GET /v1-k3s/join", func(w http.ResponseWriter, r *http.Request) {
		token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		name, ip := r.URL.Query().Get("name"), net.ParseIP(r.URL.Query().Get("ip"))
		if name == "" || ip == nil {
			http.Error(w, "name and ip are wanted", http.StatusBadRequest)
			return
		}
		if err := s.admits(r.Context(), token); err != nil {
			http.Error(w, err.Error(), http.StatusUnauthorized)
			return
		}
		joining, err := s.joining(name, ip)
		if err != nil {
			s.log.warn("an agent could not be let in: %v", err)
			http.Error(w, "see the server's log", http.StatusInternalServerError)
			return
		}
		_ = json.NewEncoder(w).Encode(joining)
	})
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("", strconv.Itoa(s.config.BindPort+supervisorOffset)))
	if err != nil {
		return fmt.Errorf("listening for agents: %w", err)
	}
	serving := &http.Server{
		Handler: mux, ReadHeaderTimeout: 10 * time.Second,
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{certificate}},
	}
	stop := context.AfterFunc(ctx, func() { _ = serving.Close() })
	defer stop()
	if err := serving.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving agents: %w", err)
	}
	return nil
}

// admits looks a bootstrap token up.
func (s *server) admits(ctx context.Context, token string) error {
	id, secret, ok := strings.Cut(token, ".")
	if !ok {
		return ErrNoToken
	}
	found, err := s.core.Secrets(metav1.NamespaceSystem).Get(ctx, "bootstrap-token-"+id, metav1.GetOptions{})
	if err != nil || string(found.Type) != bootstrapType {
		return ErrNoToken
	}
	until, err := time.Parse(time.RFC3339, string(found.Data["expiration"]))
	if err != nil || time.Now().After(until) || subtle.ConstantTimeCompare(found.Data["token-secret"], []byte(secret)) != 1 {
		return ErrNoToken
	}
	return nil
}

// joining makes an agent's keys.
func (s *server) joining(name string, ip net.IP) (Joining, error) {
	j := Joining{
		Kubeconfigs: map[string]string{}, ClusterCIDR: s.config.ClusterCIDR, ServiceCIDR: s.config.ServiceCIDR,
		ClusterDNS: s.config.ClusterDNS, ClusterDomain: s.config.ClusterDomain,
	}
	dir, err := os.MkdirTemp("", "joining-")
	if err != nil {
		return j, fmt.Errorf("making an agent's keys: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	ca, err := os.ReadFile(s.layout.server("tls", "server-ca.crt"))
	if err != nil {
		return j, fmt.Errorf("reading the authority: %w", err)
	}
	j.CA = string(ca)
	for _, k := range nodeUsers(name) {
		at := filepath.Join(dir, k.file)
		if err := s.plane.WriteKubeconfig(at, k.user, k.groups...); err != nil {
			return j, err
		}
		config, err := clientcmd.LoadFromFile(at)
		if err != nil {
			return j, fmt.Errorf("reading a kubeconfig: %w", err)
		}
		for _, cluster := range config.Clusters {
			cluster.Server = "https://" + net.JoinHostPort(s.ip.String(), strconv.Itoa(s.config.BindPort))
		}
		raw, err := clientcmd.Write(*config)
		if err != nil {
			return j, fmt.Errorf("encoding a kubeconfig: %w", err)
		}
		j.Kubeconfigs[k.file] = string(raw)
	}
	cert, key := filepath.Join(dir, "serving.crt"), filepath.Join(dir, "serving.key")
	if err := s.plane.ServingCertificate(cert, key, name, ip); err != nil {
		return j, err
	}
	rawCert, err := os.ReadFile(cert) // #nosec G304 -- written above
	if err != nil {
		return j, fmt.Errorf("reading an agent's certificate: %w", err)
	}
	rawKey, err := os.ReadFile(key) // #nosec G304 -- written above
	if err != nil {
		return j, fmt.Errorf("reading an agent's key: %w", err)
	}
	j.ServingCert, j.ServingKey = string(rawCert), string(rawKey)
	return j, nil
}

// CreateToken makes a bootstrap token as `k3s token create` does, with the
// administrator's kubeconfig, and returns its long form.
func CreateToken(ctx context.Context, dataDir, kubeconfig, description string, ttl time.Duration) (string, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return "", fmt.Errorf("reading the kubeconfig: %w", err)
	}
	core, err := corev1client.NewForConfig(config)
	if err != nil {
		return "", fmt.Errorf("making a client: %w", err)
	}
	ca, err := os.ReadFile(layout{data: dataDir}.server("tls", "server-ca.crt"))
	if err != nil {
		return "", fmt.Errorf("reading the authority: %w", err)
	}
	id, err := random(3)
	if err != nil {
		return "", err
	}
	secret, err := random(8)
	if err != nil {
		return "", err
	}
	_, err = core.Secrets(metav1.NamespaceSystem).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id}, Type: bootstrapType,
		StringData: map[string]string{
			"token-id": id, "token-secret": secret, "description": description,
			"expiration":                     time.Now().Add(ttl).UTC().Format(time.RFC3339),
			"usage-bootstrap-authentication": "true", "auth-extra-groups": "system:bootstrappers:k3s:default-node-token",
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("making the token: %w", err)
	}
	sum := sha256.Sum256(ca)
	return "K10" + hex.EncodeToString(sum[:]) + "::" + id + "." + secret, nil
}
