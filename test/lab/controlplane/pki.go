package controlplane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"time"
)

const (
	day = 24 * time.Hour
	// A lab lives for minutes, a forgotten one for days.
	labValidity = 30 * day
	// What is kept has the terms of k3s: ten years for authorities, a year for what they
	// sign, which is made anew at a start in its last third.
	keptAuthority, keptCertificate, renewWithin = 3650 * day, 365 * day, 120 * day
)

// authority is a certificate authority. Its key leaves memory only where a control
// plane outlasts the process.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	// validity of what it signs.
	validity time.Duration
}

// pair is a certificate and its key, both PEM.
type pair struct{ cert, key []byte }

func (a authority) pair() (pair, error) {
	key, err := keyPEM(a.key)
	return pair{cert: a.pem(), key: key}, err
}

func newAuthority(name string, own, signed time.Duration) (authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return authority{}, fmt.Errorf("making the key of %s: %w", name, err)
	}
	template, err := template(pkix.Name{CommonName: name}, own)
	if err != nil {
		return authority{}, err
	}
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return authority{}, fmt.Errorf("signing %s: %w", name, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return authority{}, fmt.Errorf("reading %s back: %w", name, err)
	}
	return authority{cert: cert, key: key, validity: signed}, nil
}

func (a authority) pem() []byte { return certPEM(a.cert.Raw) }

// client issues a client certificate for a user and its groups.
func (a authority) client(user string, groups ...string) (pair, error) {
	t, err := template(pkix.Name{CommonName: user, Organization: groups}, a.validity)
	if err != nil {
		return pair{}, err
	}
	t.KeyUsage, t.ExtKeyUsage = x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return a.issue(t)
}

// server issues a serving certificate.
func (a authority) server(name string, dns []string, ips []net.IP) (pair, error) {
	t, err := template(pkix.Name{CommonName: name}, a.validity)
	if err != nil {
		return pair{}, err
	}
	t.DNSNames, t.IPAddresses = dns, ips
	t.KeyUsage, t.ExtKeyUsage = x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	return a.issue(t)
}

func (a authority) issue(t *x509.Certificate) (pair, error) {
	key, keyOut, err := newKey()
	if err != nil {
		return pair{}, err
	}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, key.Public(), a.key)
	if err != nil {
		return pair{}, fmt.Errorf("signing the certificate of %s: %w", t.Subject.CommonName, err)
	}
	return pair{cert: certPEM(der), key: keyOut}, nil
}

func newKey() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("making a key: %w", err)
	}
	raw, err := keyPEM(key)
	return key, raw, err
}

func keyPEM(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encoding a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

func template(subject pkix.Name, validity time.Duration) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, fmt.Errorf("making a serial number: %w", err)
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      subject,
		NotBefore:    now.Add(-time.Minute),
		NotAfter:     now.Add(validity),
	}, nil
}

func certPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}
