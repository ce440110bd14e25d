// Package signing signs and checks a file with an ECDSA key on P-256, in the form that
// `cosign sign-blob --key` and openssl share: base64 of the ASN.1 signature over SHA-256.
// It knows no release.
package signing

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
)

// ErrWrong is said of a signature that is not the key's over the data.
var ErrWrong = errors.New("the signature is not of this key over this file")

// PrivateKey reads an unencrypted PEM key, PKCS #8 or SEC 1.
func PrivateKey(data []byte) (*ecdsa.PrivateKey, error) {
	block := find(data, "PRIVATE KEY", "EC PRIVATE KEY")
	if block == nil {
		if find(data, "ENCRYPTED SIGSTORE PRIVATE KEY", "ENCRYPTED COSIGN PRIVATE KEY", "ENCRYPTED PRIVATE KEY") != nil {
			return nil, errors.New("the key is encrypted: sign with the program that encrypted it, docs/release.md says how")
		}
		return nil, errors.New("it holds no PEM private key")
	}
	if block.Type == "EC PRIVATE KEY" {
		key, err := x509.ParseECPrivateKey(block.Bytes)
		if err != nil {
			return nil, err
		}
		return key, onP256(key.Curve)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("it is a %T: an ECDSA key on P-256 is wanted", parsed)
	}
	return key, onP256(key.Curve)
}

// PublicKey reads a PEM public key.
func PublicKey(data []byte) (*ecdsa.PublicKey, error) {
	block := find(data, "PUBLIC KEY")
	if block == nil {
		return nil, errors.New("it holds no PEM public key")
	}
	parsed, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	key, ok := parsed.(*ecdsa.PublicKey)
	if !ok {
		return nil, fmt.Errorf("it is a %T: an ECDSA key on P-256 is wanted", parsed)
	}
	return key, onP256(key.Curve)
}

// EncodePublic is the PEM form of a public key.
func EncodePublic(key *ecdsa.PublicKey) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

// find skips blocks such as the parameters that openssl writes before a key.
func find(data []byte, types ...string) *pem.Block {
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			return nil
		}
		for _, one := range types {
			if block.Type == one {
				return block
			}
		}
	}
}

func onP256(curve elliptic.Curve) error {
	if curve != elliptic.P256() {
		return fmt.Errorf("it is on %s: P-256 is wanted", curve.Params().Name)
	}
	return nil
}

// Sign is the same for the same key and data (RFC 6979), so that a release made twice is
// the same to the last file.
func Sign(key *ecdsa.PrivateKey, data []byte) (string, error) {
	digest := sha256.Sum256(data)
	signature, err := key.Sign(nil, digest[:], crypto.SHA256)
	if err != nil {
		return "", err
	}
	return base64.StdEncoding.EncodeToString(signature) + "\n", nil
}

// Verify is nil, ErrWrong, or says what can't be read.
func Verify(key *ecdsa.PublicKey, data []byte, signature string) error {
	raw, err := base64.StdEncoding.DecodeString(strings.TrimSpace(signature))
	if err != nil {
		return fmt.Errorf("reading the signature: %w", err)
	}
	digest := sha256.Sum256(data)
	if !ecdsa.VerifyASN1(key, digest[:], raw) {
		return ErrWrong
	}
	return nil
}
