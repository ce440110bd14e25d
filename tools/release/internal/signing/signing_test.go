package signing

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func newKey(t *testing.T, curve elliptic.Curve) (key *ecdsa.PrivateKey, private []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(curve, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

func TestSignAndVerify(t *testing.T) {
	key, private := newKey(t, elliptic.P256())
	data := []byte("checksums\n")
	read, err := PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	signature, err := Sign(read, data)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Sign(read, data)
	if err != nil || again != signature {
		t.Errorf("signing again gives another signature: %v", err)
	}
	if err := Verify(&key.PublicKey, data, signature); err != nil {
		t.Errorf("the own signature: %v", err)
	}
	other, _ := newKey(t, elliptic.P256())
	if err := Verify(&other.PublicKey, data, signature); !errors.Is(err, ErrWrong) {
		t.Errorf("another key: %v", err)
	}
	if err := Verify(&key.PublicKey, []byte("checksumz\n"), signature); !errors.Is(err, ErrWrong) {
		t.Errorf("other data: %v", err)
	}
	if err := Verify(&key.PublicKey, data, "not base64!"); err == nil || errors.Is(err, ErrWrong) {
		t.Errorf("no signature at all: %v", err)
	}
}

// openssl is what install.sh checks with, and what a key may be made and used with.
func TestAsOpenSSL(t *testing.T) {
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Skip("openssl is not on this machine")
	}
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	run := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), openssl, args...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("openssl %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	data := []byte("0123  llmbox-linux-amd64\n")
	put := func(name string, data []byte) {
		t.Helper()
		if err := os.WriteFile(at(name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("SHA256SUMS", data)
	for name, args := range map[string][]string{
		"PKCS8": {"genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", at("key.pem")},
		"SEC1":  {"ecparam", "-name", "prime256v1", "-genkey", "-out", at("key.pem")},
	} {
		t.Run(name, func(t *testing.T) {
			run(args...)
			run("pkey", "-in", at("key.pem"), "-pubout", "-out", at("key.pub"))
			private, err := os.ReadFile(at("key.pem"))
			if err != nil {
				t.Fatal(err)
			}
			key, err := PrivateKey(private)
			if err != nil {
				t.Fatal(err)
			}
			signature, err := Sign(key, data)
			if err != nil {
				t.Fatal(err)
			}
			raw, err := base64.StdEncoding.DecodeString(strings.TrimSpace(signature))
			if err != nil {
				t.Fatal(err)
			}
			put("ours", raw)
			run("dgst", "-sha256", "-verify", at("key.pub"), "-signature", at("ours"), at("SHA256SUMS"))
			run("dgst", "-sha256", "-sign", at("key.pem"), "-out", at("theirs"), at("SHA256SUMS"))
			theirs, err := os.ReadFile(at("theirs"))
			if err != nil {
				t.Fatal(err)
			}
			public, err := os.ReadFile(at("key.pub"))
			if err != nil {
				t.Fatal(err)
			}
			verifier, err := PublicKey(public)
			if err != nil {
				t.Fatal(err)
			}
			if err := Verify(verifier, data, base64.StdEncoding.EncodeToString(theirs)); err != nil {
				t.Errorf("openssl's signature: %v", err)
			}
			encoded, err := EncodePublic(verifier)
			if err != nil || string(encoded) != string(public) {
				t.Errorf("the public key is written as\n%s, openssl writes\n%s (%v)", encoded, public, err)
			}
		})
	}
}

func TestRefusedKeys(t *testing.T) {
	_, wrongCurve := newKey(t, elliptic.P384())
	_, good := newKey(t, elliptic.P256())
	for name, test := range map[string]struct{ key, want string }{
		"another curve":   {string(wrongCurve), "P-256 is wanted"},
		"cosign's own":    {string(pem.EncodeToMemory(&pem.Block{Type: "ENCRYPTED SIGSTORE PRIVATE KEY", Bytes: []byte("{}")})), "encrypted"},
		"nothing":         {"", "no PEM private key"},
		"cut off":         {string(good[:len(good)/2]), "no PEM private key"},
		"a wrong content": {string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("x")})), "asn1"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := PrivateKey([]byte(test.key)); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want something about %q", err, test.want)
			}
		})
	}
	if _, err := PublicKey(good); err == nil {
		t.Error("a private key was taken for a public one")
	}
}
