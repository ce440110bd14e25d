package download

import (
	"crypto/sha1" // #nosec G505 -- git names its blobs so
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"strings"
)

const (
	sha256Name  = "sha256"
	gitBlobName = "git-blob-sha1"
)

// Digest is what a file's content is recognised by. The zero value knows nothing.
type Digest struct {
	algorithm, hex string
	size           int64 // part of what is hashed
}

// SHA256 is a digest in hexadecimal.
func SHA256(hex string) Digest {
	return Digest{algorithm: sha256Name, hex: strings.ToLower(strings.TrimPrefix(hex, "sha256:"))}
}

// GitBlob is the name that git gives a file's content. It tells errors from the
// right file, but does not take the place of TLS: SHA-1 can be forged.
func GitBlob(hex string, size int64) Digest {
	return Digest{algorithm: gitBlobName, hex: strings.ToLower(hex), size: size}
}

// String is ALGORITHM:HEX.
func (d Digest) String() string {
	if d == (Digest{}) {
		return ""
	}
	return d.algorithm + ":" + d.hex
}

func (d Digest) strong() bool { return d.algorithm == sha256Name }

func (d Digest) check() error {
	if d == (Digest{}) {
		return nil
	}
	length := sha256.Size
	if d.algorithm == gitBlobName {
		length = sha1.Size
	}
	if raw, err := hex.DecodeString(d.hex); err != nil || len(raw) != length {
		return fmt.Errorf("%q is not a %s checksum", d.hex, d.algorithm)
	}
	return nil
}

// hash is the function; SHA-256 where nothing is known, for the record.
func (d Digest) hash() hash.Hash {
	if d.algorithm != gitBlobName {
		return sha256.New()
	}
	h := sha1.New() // #nosec G401 -- git names its blobs so
	_, _ = fmt.Fprintf(h, "blob %d\x00", d.size)
	return h
}

func (d Digest) compare(h hash.Hash, from string) error {
	got := hex.EncodeToString(h.Sum(nil))
	if d == (Digest{}) || got == d.hex {
		return nil
	}
	return &ChecksumError{URL: from, Algorithm: d.algorithm, Want: d.hex, Got: got}
}
