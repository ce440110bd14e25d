package installer

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/config"
)

// errOtherCertificate means that somebody else than the box's gateway answers.
var errOtherCertificate = errors.New("the gateway shows another certificate than its Secret holds")

// Door is the way from outside to the model.
type Door struct {
	// URL is the gateway's, without /v1.
	URL string
	// HTTP talks to the box's own gateway only; an answer may take two minutes.
	HTTP *http.Client
}

// FindDoor returns where the Gateway ("namespace/name") answers now.
func FindDoor(ctx context.Context, c *cluster.Client, serving config.TLS, gateway string) (Door, error) {
	namespace, name, _ := strings.Cut(gateway, "/")
	url, err := c.GatewayURL(ctx, namespace, name)
	if err != nil {
		return Door{}, err
	}
	client, err := gatewayClient(ctx, c, serving, namespace)
	return Door{URL: url, HTTP: client}, err
}

func (r *Run) gatewayClient(ctx context.Context, namespace string) (*http.Client, error) {
	return gatewayClient(ctx, r.client, r.plan.Box.Gateway.TLS, namespace)
}

// gatewayClient returns a client that talks to the box's own gateway only. With
// TLS the gateway is asked by its address, which its certificate need not name;
// so the certificate itself is compared with the one in the gateway's Secret.
func gatewayClient(ctx context.Context, c *cluster.Client, serving config.TLS, namespace string) (*http.Client, error) {
	client := &http.Client{Timeout: 2 * time.Minute}
	if !serving.Enabled {
		return client, nil
	}
	name := serving.ExistingSecret
	secret, err := c.Kube.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("reading the gateway's certificate %s/%s: %w", namespace, name, cluster.Classify(err))
	}
	block, _ := pem.Decode(secret.Data["tls.crt"])
	if block == nil {
		return nil, fmt.Errorf("reading the gateway's certificate %s/%s: tls.crt holds no PEM block", namespace, name)
	}
	want := block.Bytes
	client.Transport = &http.Transport{TLSClientConfig: &tls.Config{
		MinVersion: tls.VersionTLS12,
		// The chain and name are not checked because the leaf itself is, below.
		InsecureSkipVerify: true, // #nosec G402 -- VerifyConnection pins the leaf
		// Unlike VerifyPeerCertificate it is asked for resumed sessions, too.
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 || !bytes.Equal(state.PeerCertificates[0].Raw, want) {
				return errOtherCertificate
			}
			return nil
		},
	}}
	return client, nil
}
