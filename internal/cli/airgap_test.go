package cli

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/bundle"
)

// smallBundle is a bundle of one file, with its digest file beside it.
func smallBundle(t *testing.T) (file, digest string) {
	t.Helper()
	content := []byte("the program")
	sum := sha256.Sum256(content)
	m := &bundle.Manifest{
		Format: bundle.Format, Version: "1.2.3-test", Architecture: runtime.GOARCH, K3s: bundle.K3s{Version: "v1.36.4+k3s1"},
		Entries: []bundle.Entry{{Path: "llmbox", Kind: bundle.KindLLMBox, Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:])}},
	}
	file = filepath.Join(t.TempDir(), "box.tar.zst")
	out, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if digest, err = bundle.Write(t.Context(), out, m, func(bundle.Entry) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }, nil); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(out.Close(), os.WriteFile(file+digestSuffix, bundle.Detached(digest), 0o600)); err != nil {
		t.Fatal(err)
	}
	return file, digest
}

func pemOf(t *testing.T, public crypto.PublicKey) []byte {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

func TestBundleSignature(t *testing.T) {
	file, digest := smallBundle(t)
	message := bundle.Detached(digest)
	edPublic, edPrivate, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	strange, _, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	curve, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	old, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(message)
	byCurve, err := ecdsa.SignASN1(rand.Reader, curve, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	byOld, err := rsa.SignPKCS1v15(rand.Reader, old, crypto.SHA256, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	byEd := ed25519.Sign(edPrivate, message)
	inText := []byte(base64.StdEncoding.EncodeToString(byEd) + "\n")
	for name, tt := range map[string]struct {
		key, signature []byte
		good           bool
	}{
		"Ed25519":                       {pemOf(t, edPublic), byEd, true},
		"Ed25519 in base64":             {pemOf(t, edPublic), inText, true},
		"ECDSA":                         {pemOf(t, &curve.PublicKey), byCurve, true},
		"ECDSA in base64":               {pemOf(t, &curve.PublicKey), []byte(base64.StdEncoding.EncodeToString(byCurve)), true},
		"by another key":                {pemOf(t, strange), byEd, false},
		"of another message":            {pemOf(t, edPublic), ed25519.Sign(edPrivate, append(message, '\n')), false},
		"cut off":                       {pemOf(t, edPublic), byEd[:len(byEd)-1], false},
		"empty":                         {pemOf(t, edPublic), nil, false},
		"of another kind":               {pemOf(t, &curve.PublicKey), byEd, false},
		"RSA":                           {pemOf(t, &old.PublicKey), byOld, false},
		"a key that is not PEM":         {[]byte("key"), byEd, false},
		"a private key as the public":   {pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: edPrivate}), byEd, false},
		"a certificate request as key":  {pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: []byte{0x30, 0}}), byEd, false},
		"a signature that is not there": {pemOf(t, edPublic), nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			key := filepath.Join(t.TempDir(), "key.pub")
			if err := os.WriteFile(key, tt.key, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file+signatureSuffix, tt.signature, 0o600); err != nil {
				t.Fatal(err)
			}
			if strings.HasSuffix(name, "not there") {
				if err := os.Remove(file + signatureSuffix); err != nil {
					t.Fatal(err)
				}
			}
			signed, err := trustFlags{key: key}.check(file, digest)
			if tt.good && (err != nil || !signed) || !tt.good && !errors.Is(err, errSignature) {
				t.Errorf("signed %t, %v", signed, err)
			}
			r := run(t, nil, "", "bundle", "verify", file, "--key", key)
			if tt.good != (r.code == 0 && strings.Contains(r.stdout, "signed by the key")) || !tt.good && (r.code != 2 || !strings.Contains(r.stderr, "not signed by that key")) {
				t.Errorf("verify ends with %d and says %q, %q", r.code, r.stdout, r.stderr)
			}
		})
	}
}

func TestBundleDigestFile(t *testing.T) {
	file, digest := smallBundle(t)
	other := filepath.Join(t.TempDir(), "other.digest")
	if err := os.WriteFile(other, bundle.Detached(strings.Repeat("0", 64)), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		trust trustFlags
		file  string
		want  error
	}{
		"the one beside it":         {trustFlags{}, file, nil},
		"named":                     {trustFlags{digest: file + digestSuffix}, "-", nil},
		"of another bundle":         {trustFlags{digest: other}, file, bundle.ErrDetached},
		"named and not there":       {trustFlags{digest: other + "x"}, file, os.ErrNotExist},
		"none beside it":            {trustFlags{}, filepath.Join(t.TempDir(), "box"), nil},
		"standard input has none":   {trustFlags{}, "-", nil},
		"a key for standard input ": {trustFlags{key: other}, "-", errSignature},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := tt.trust.check(tt.file, digest); !errors.Is(err, tt.want) || tt.want == nil && err != nil {
				t.Errorf("%v, want %v", err, tt.want)
			}
		})
	}
}

// What a bundle is asked for that it can't be.
func TestBundleFlags(t *testing.T) {
	file, _ := smallBundle(t)
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"install into a cluster":   {[]string{"install", "--kubeconfig", "/nowhere", "--bundle", file}, "--bundle is about this machine"},
		"both from standard input": {[]string{"install", "--bundle", "-", "--config", "-"}, "both read standard input"},
		"an answer from it":        {[]string{"upgrade", "--bundle", "-"}, "--yes"},
		"a token from it":          {[]string{"join", "--server", "https://10.0.0.5:6443", "--token-file", "-", "--bundle", "-"}, "both read standard input"},
		"none":                     {[]string{"bundle", "verify", "/nowhere"}, "opening the bundle"},
		"for another machine":      {[]string{"bundle", "verify", "--arch", "riscv64", file}, "another architecture"},
	} {
		t.Run(name, func(t *testing.T) {
			if r := run(t, nil, "", tt.args...); r.code != 2 || !strings.Contains(r.stderr, tt.want) {
				t.Errorf("it ends with %d and says %q", r.code, r.stderr)
			}
		})
	}
}
