package controlplane

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/llmbox-dev/llmbox/test/lab/labdir"
)

// keep tells whether keys outlast the process.
func (p *Plane) keep() bool { return p.node != nil && p.node.Keep }

func (p *Plane) writeKeys() error {
	var err error
	if p.ca, err = p.authority("ca", p.name); err != nil {
		return err
	}
	front, err := p.authority("front-proxy-ca", p.name+"-front-proxy")
	if err != nil {
		return err
	}
	names := []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	service, err := firstOf(p.serviceCIDR)
	if err != nil {
		return err
	}
	addresses := []net.IP{net.IPv4(127, 0, 0, 1), service}
	if p.node != nil {
		addresses = append(addresses, p.node.Address)
		for _, san := range p.node.SANs {
			if ip := net.ParseIP(san); ip != nil {
				addresses = append(addresses, ip)
			} else {
				names = append(names, san)
			}
		}
	}
	if err := errors.Join(
		p.certificate("apiserver", p.ca, func(c *x509.Certificate) bool { return holdsFor(c, names, addresses) },
			func() (pair, error) { return p.ca.server("kube-apiserver", names, addresses) }),
		p.certificate("front-proxy-client", front, nil, func() (pair, error) { return front.client("front-proxy-client") }),
		p.certificate("kubelet-client", p.ca, nil,
			func() (pair, error) { return p.ca.client("kube-apiserver-kubelet-client", "system:masters") }),
	); err != nil {
		return err
	}
	if _, err := os.Stat(p.dir.Join("pki", "sa.key")); p.keep() && err == nil {
		return nil
	}
	_, sa, err := newKey()
	if err != nil {
		return err
	}
	return p.writeAll("pki", map[string][]byte{"sa.key": sa})
}

// ServingCertificate writes a certificate of the plane's authority for a server of the
// node's own, which kubelet is.
func (p *Plane) ServingCertificate(certPath, keyPath, name string, addresses ...net.IP) error {
	pair, err := p.ca.server(name, []string{name, "localhost"}, append(addresses, net.IPv4(127, 0, 0, 1)))
	if err != nil {
		return err
	}
	return errors.Join(labdir.WriteFile(certPath, pair.cert), labdir.WriteFile(keyPath, pair.key))
}

// authority makes an authority and writes its certificate, or finds the one of a
// former start.
func (p *Plane) authority(file, name string) (authority, error) {
	if !p.keep() {
		a, err := newAuthority(name, labValidity, labValidity)
		if err != nil {
			return authority{}, err
		}
		return a, p.writeAll("pki", map[string][]byte{file + ".crt": a.pem()})
	}
	found, err := p.read(file)
	if err == nil {
		return loadAuthority(found)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return authority{}, err
	}
	a, err := newAuthority(name, keptAuthority, keptCertificate)
	if err != nil {
		return authority{}, err
	}
	both, err := a.pair()
	if err != nil {
		return authority{}, err
	}
	// The key first: a certificate without its key would stop the next start.
	return a, errors.Join(
		p.writeAll("pki", map[string][]byte{file + ".key": both.key}),
		p.writeAll("pki", map[string][]byte{file + ".crt": both.cert}))
}

// certificate writes a certificate and its key, unless those that are there still do.
func (p *Plane) certificate(file string, by authority, does func(*x509.Certificate) bool, issue func() (pair, error)) error {
	if p.keep() {
		found, err := p.read(file)
		if err == nil {
			if cert, err := parseCertificate(found.cert); err == nil && by.vouchesFor(cert) && (does == nil || does(cert)) {
				return nil
			}
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	made, err := issue()
	if err != nil {
		return err
	}
	return p.writeAll("pki", map[string][]byte{file + ".key": made.key, file + ".crt": made.cert})
}

func (p *Plane) read(file string) (pair, error) {
	cert, err := os.ReadFile(p.dir.Join("pki", file+".crt"))
	if err != nil {
		return pair{}, fmt.Errorf("reading a certificate: %w", err)
	}
	key, err := os.ReadFile(p.dir.Join("pki", file+".key"))
	if err != nil {
		return pair{}, fmt.Errorf("reading a key: %w", err)
	}
	return pair{cert: cert, key: key}, nil
}

func loadAuthority(from pair) (authority, error) {
	cert, err := parseCertificate(from.cert)
	if err != nil {
		return authority{}, err
	}
	block, _ := pem.Decode(from.key)
	if block == nil {
		return authority{}, errors.New("reading an authority's key: it is not PEM")
	}
	key, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil {
		return authority{}, fmt.Errorf("reading an authority's key: %w", err)
	}
	if public, ok := cert.PublicKey.(*ecdsa.PublicKey); !ok || !public.Equal(key.Public()) {
		return authority{}, errors.New("reading an authority: its key is another certificate's")
	}
	return authority{cert: cert, key: key, validity: keptCertificate}, nil
}

func parseCertificate(raw []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(raw)
	if block == nil {
		return nil, errors.New("reading a certificate: it is not PEM")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("reading a certificate: %w", err)
	}
	return cert, nil
}

// vouchesFor tells whether a certificate is this authority's and holds long enough.
func (a authority) vouchesFor(cert *x509.Certificate) bool {
	return cert.CheckSignatureFrom(a.cert) == nil && time.Until(cert.NotAfter) > renewWithin
}

func holdsFor(cert *x509.Certificate, names []string, addresses []net.IP) bool {
	for _, name := range names {
		if !slices.Contains(cert.DNSNames, name) {
			return false
		}
	}
	for _, ip := range addresses {
		if !slices.ContainsFunc(cert.IPAddresses, ip.Equal) {
			return false
		}
	}
	return true
}

// keptKubeconfig tells whether a kubeconfig of a former start still does.
func (p *Plane) keptKubeconfig(path, user string, groups []string) bool {
	config, err := clientcmd.LoadFromFile(path)
	if err != nil {
		return false
	}
	cluster, auth := config.Clusters[p.name], config.AuthInfos[p.user(user)]
	if cluster == nil || auth == nil || cluster.Server != p.host() || !bytes.Equal(cluster.CertificateAuthorityData, p.ca.pem()) {
		return false
	}
	cert, err := parseCertificate(auth.ClientCertificateData)
	return err == nil && p.ca.vouchesFor(cert) && cert.Subject.CommonName == user &&
		strings.Join(cert.Subject.Organization, ",") == strings.Join(groups, ",")
}

// firstOf is the first address of a range, which the API server takes for itself.
func firstOf(cidr string) (net.IP, error) {
	_, network, err := net.ParseCIDR(cidr)
	if err != nil {
		return nil, fmt.Errorf("reading the range of services: %w", err)
	}
	first := slices.Clone(network.IP)
	first[len(first)-1]++
	return first, nil
}
