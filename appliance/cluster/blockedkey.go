package cluster

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// A Fingerprint stands for a public key: the first 8 bytes of its SHA-256, which people
// compare by telephone.
type Fingerprint [8]byte

// FingerprintOf returns the fingerprint of a public key.
func FingerprintOf(key []byte) Fingerprint {
	sum := sha256.Sum256(key)
	return Fingerprint(sum[:8])
}

// ParseFingerprint reads what String has written. Hyphens may be missing, and letters be
// upper case.
func ParseFingerprint(s string) (Fingerprint, error) {
	b, err := hex.DecodeString(strings.ReplaceAll(s, "-", ""))
	if err != nil || len(b) != len(Fingerprint{}) {
		return Fingerprint{}, fmt.Errorf("is no fingerprint of a key: write 16 hexadecimal digits, such as %s", Fingerprint{0x01, 0xd0, 0xfa, 0xbd, 0x25, 0x1f, 0xcb, 0xbe})
	}
	return Fingerprint(b), nil
}

// String returns 16 hexadecimal digits in groups of four, joined by hyphens.
func (f Fingerprint) String() string {
	s := hex.EncodeToString(f[:])
	return strings.Join([]string{s[:4], s[4:8], s[8:12], s[12:]}, "-")
}

// A BlockedKey is the public key of a gateway that this cluster has nothing to do with,
// whatever object names it.
type BlockedKey struct {
	Fingerprint Fingerprint
	By          Ref    // the object that says so
	Why         string // by whom, when and why, as it is written; it may be empty
}

// String says what is blocked, why, and how to end that.
func (k BlockedKey) String() string {
	why := k.Why
	if why == "" {
		why = "without a reason"
	}
	return fmt.Sprintf("the key with the fingerprint %s, which this cluster has blocked by %s (%s): isthmusctl peer unblock --key %s ends that", k.Fingerprint, k.By, why, k.Fingerprint)
}

// BlockedKeys are all of them.
type BlockedKeys []BlockedKey

// Of returns the one that a public key is; false: it is not blocked.
func (list BlockedKeys) Of(key []byte) (BlockedKey, bool) {
	f := FingerprintOf(key)
	for _, k := range list {
		if k.Fingerprint == f {
			return k, true
		}
	}
	return BlockedKey{}, false
}
