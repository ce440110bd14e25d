package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"time"
)

const tlsDir = "var/lib/rancher/k3s/server/tls/"

// serving makes the API server serve a certificate of its own authority with other dates.
// It takes up what its file holds.
func serving(from, until time.Duration) act {
	return func(_ context.Context, b *box) error {
		authority, err := tls.LoadX509KeyPair(b.path(tlsDir+"server-ca.crt"), b.path(tlsDir+"server-ca.key"))
		if err != nil {
			return fmt.Errorf("reading k3s's authority: %w", err)
		}
		raw, err := os.ReadFile(b.path(tlsDir + "serving-kube-apiserver.crt"))
		if err != nil {
			return fmt.Errorf("reading the API server's certificate: %w", err)
		}
		block, rest := pem.Decode(raw)
		if block == nil {
			return errors.New("reading the API server's certificate: no PEM")
		}
		old, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return fmt.Errorf("reading the API server's certificate: %w", err)
		}
		if err := os.WriteFile(b.path(tlsDir+"serving-kube-apiserver.crt.was"), raw, 0o600); err != nil {
			return fmt.Errorf("keeping the API server's certificate: %w", err)
		}
		next := *old
		next.NotBefore, next.NotAfter = time.Now().Add(from), time.Now().Add(until)
		der, err := x509.CreateCertificate(rand.Reader, &next, authority.Leaf, old.PublicKey, authority.PrivateKey)
		if err != nil {
			return fmt.Errorf("making a certificate: %w", err)
		}
		made := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), rest...)
		// #nosec G306 -- a certificate, as k3s writes it
		return os.WriteFile(b.path(tlsDir+"serving-kube-apiserver.crt"), made, 0o644)
	}
}

// servedAsBefore puts the API server's own certificate back.
func servedAsBefore(ctx context.Context, b *box) error {
	name := b.path(tlsDir + "serving-kube-apiserver.crt")
	raw, err := os.ReadFile(name + ".was") // #nosec G304 -- the machine's disk
	if err != nil {
		return fmt.Errorf("reading the API server's certificate: %w", err)
	}
	if err := os.WriteFile(name, raw, 0o644); err != nil { // #nosec G306 -- a certificate, as k3s writes it
		return fmt.Errorf("putting the API server's certificate back: %w", err)
	}
	if err := os.Remove(name + ".was"); err != nil {
		return fmt.Errorf("putting the API server's certificate back: %w", err)
	}
	return served(ctx, b)
}

// pair is a certificate that signs itself, with its key.
func pair(name string, from, until time.Duration) (certificate, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("making a key: %w", err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(from), NotAfter: time.Now().Add(until)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		return nil, nil, fmt.Errorf("making a certificate: %w", err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, fmt.Errorf("making a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), nil
}

// untrusted has the API server ask Kyverno about the model's pods, and trust a stranger's
// authority instead of Kyverno's.
func untrusted(ctx context.Context, b *box) error {
	authority, _, err := pair("stranger", -time.Hour, time.Hour)
	if err != nil {
		return err
	}
	object, err := json.Marshal(map[string]any{
		"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration", "metadata": map[string]any{"name": "fault"},
		"webhooks": []any{map[string]any{
			"name": "fault.example.com", "failurePolicy": "Fail", "sideEffects": "None", "admissionReviewVersions": []string{"v1"}, "timeoutSeconds": 5,
			"clientConfig":      map[string]any{"service": map[string]any{"namespace": "kyverno", "name": "kyverno-svc", "path": "/validate/fail"}, "caBundle": authority},
			"rules":             []any{map[string]any{"apiGroups": []string{""}, "apiVersions": []string{"v1"}, "operations": []string{"CREATE"}, "resources": []string{"pods"}}},
			"namespaceSelector": map[string]any{"matchLabels": map[string]string{"kubernetes.io/metadata.name": "llm"}},
		}},
	})
	if err != nil {
		return fmt.Errorf("making a webhook: %w", err)
	}
	return made(webhooks, "", string(object))(ctx, b)
}

// expired is a kubernetes.io/tls Secret whose certificate ended yesterday.
func expired(ctx context.Context, b *box) error {
	certificate, key, err := pair("box.example", -48*time.Hour, -24*time.Hour)
	if err != nil {
		return err
	}
	object, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": map[string]any{"name": "fault-served"},
		"stringData": map[string]string{"tls.crt": string(certificate), "tls.key": string(key)},
	})
	if err != nil {
		return fmt.Errorf("making a certificate: %w", err)
	}
	return made(secrets, "envoy-gateway-system", string(object))(ctx, b)
}
