package repair

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/ProtonMail/go-crypto/openpgp/armor"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
)

// checkKey says whether a text in ASCII armour holds the key with the fingerprint,
// and no other primary key: whoever is told to trust a file trusts all keys in it.
func checkKey(data []byte, fingerprint string) error {
	reader := bytes.NewReader(data)
	block, err := armor.Decode(reader)
	if err != nil {
		return fmt.Errorf("reading the key: %w: %w", ErrKey, err)
	}
	if block.Type != "PGP PUBLIC KEY BLOCK" {
		return fmt.Errorf("reading the key: %w: a %s", ErrKey, strings.ToLower(block.Type))
	}
	packets := packet.NewReader(block.Body)
	found := false
	for {
		p, err := packets.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("reading the key: %w: %w", ErrKey, err)
		}
		switch k := p.(type) {
		case *packet.PublicKey:
			if k.IsSubkey {
				continue
			}
			if got := strings.ToUpper(hex.EncodeToString(k.Fingerprint)); got != fingerprint {
				return fmt.Errorf("reading the key: %w: its fingerprint is %s, not %s", ErrKey, got, fingerprint)
			}
			found = true
		case *packet.PrivateKey:
			return fmt.Errorf("reading the key: %w: a private key", ErrKey)
		}
	}
	// A second block would be read by whoever is given the file.
	if bytes.Count(data, []byte("-----BEGIN ")) != 1 {
		return fmt.Errorf("reading the key: %w: more than one block", ErrKey)
	}
	if !found {
		return fmt.Errorf("reading the key: %w: no key in it", ErrKey)
	}
	return nil
}
