// Package invitation is what two administrators who share no credentials exchange to
// connect their clusters: the text that one of them prints and the other pastes, and
// the messages that their gateways then exchange through the temporary tunnel of the
// text. It holds values only: nobody is asked anything, and no clock is read.
//
// The text ends up in chats, so nothing that lasts is derived from it: its key opens a
// tunnel that leads nowhere but to the gateway at its end, until the invitation is used,
// revoked or expired. What lasts goes through that tunnel.
package invitation

import (
	"crypto/ecdh"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/appliance/cluster"
)

// Version is that of the text and of the messages.
const Version = 1

// Lifetimes of an invitation.
const (
	DefaultLifetime = time.Hour
	MaxLifetime     = 7 * 24 * time.Hour
	// Grace is how long after its end an invitation is still answered, with the
	// reason why it can't be used.
	Grace = 10 * time.Minute
)

// A Key is a key of Curve25519 or a pre-shared key, 32 bytes each (RFC 7748, wg(8)).
type Key [32]byte

// MarshalText is for JSON: base64, as wg(8) writes keys.
func (k Key) MarshalText() ([]byte, error) {
	return []byte(base64.StdEncoding.EncodeToString(k[:])), nil
}

// UnmarshalText is the reverse.
func (k *Key) UnmarshalText(text []byte) error {
	b, err := base64.StdEncoding.Strict().DecodeString(string(text))
	if err != nil || len(b) != len(k) {
		return errors.New("is no key: it must be the base64 of 32 bytes")
	}
	copy(k[:], b)
	return nil
}

// String stands for the key where it is printed: most of them are secret.
func (k Key) String() string { return "(key)" }

// GoString is for fmt's %#v.
func (k Key) GoString() string { return k.String() }

// Public returns the public key of a private one.
func (k Key) Public() (Key, error) {
	private, err := ecdh.X25519().NewPrivateKey(k[:])
	if err != nil {
		return Key{}, fmt.Errorf("private key: %w", err)
	}
	return Key(private.PublicKey().Bytes()), nil
}

// NewKey returns 32 bytes of a source of random numbers: a private key, or one that is
// shared.
func NewKey(random io.Reader) (Key, error) {
	var k Key
	_, err := io.ReadFull(random, k[:])
	return k, err
}

// Fingerprint is what people compare of a key by telephone (see [cluster.Fingerprint]).
func Fingerprint(k Key) string {
	return cluster.FingerprintOf(k[:]).String()
}

// An Invitation is what the text says.
type Invitation struct {
	// ID tells invitations apart; it is random.
	ID string `json:"id"`
	// From is the ID of the cluster that invites, To of the one that is invited.
	From string `json:"from"`
	To   string `json:"to"`
	// Key is the public key of the gateway that is dialled, and PrivateKey that of the
	// temporary peer, which is the invited side.
	Key        Key `json:"key"`
	PrivateKey Key `json:"privateKey"`
	// Addresses and Port (of UDP) are where it is dialled: the first, and the others
	// when nobody answers there.
	Addresses []string `json:"addresses"`
	Port      uint16   `json:"port"`
	// MTU is that of the tunnel, in bytes; 0: derived on each side.
	MTU int `json:"mtu,omitempty"`
	// Expires is when it ends, by the clock of who invites.
	Expires time.Time `json:"expires"`
}

const (
	// prefix begins a text.
	prefix = "isthmus-invitation"
	// width is that of the lines of a text, in characters.
	width = 76
	// maxText is far more than a text has, in bytes.
	maxText = 16 << 10
	// maxAddresses is how many addresses an endpoint can have (the CRD of gateways).
	maxAddresses = 64
	// checksum is how many characters of the SHA-256 of the rest are in a text.
	checksum = 16
)

// CheckClusterID returns why a text can't be a cluster's ID.
func CheckClusterID(text string) error {
	if clusterID.MatchString(text) {
		return nil
	}
	return fmt.Errorf("%q is not the ID of a cluster: write small letters, digits and \"-\", 63 at most, such as rome", text)
}

// IsHost reports whether a text has the form of an address or of a name of the DNS.
func IsHost(text string) bool { return host.MatchString(text) }

// clusterID is the form of a cluster ID (see package plan), and hexID that of an
// invitation's.
var (
	clusterID = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	hexID     = regexp.MustCompile(`^[0-9a-f]{16}$`)
	host      = regexp.MustCompile(`^[0-9A-Za-z]([-.:0-9A-Za-z]{0,251}[0-9A-Za-z])?$|^[0-9a-f:]+$`)
)

// NewID returns the ID of a new invitation.
func NewID(random io.Reader) (string, error) {
	var b [8]byte
	if _, err := io.ReadFull(random, b[:]); err != nil {
		return "", err
	}
	return hex.EncodeToString(b[:]), nil
}

// Errors of [Parse].
var (
	// ErrNone says that a text is not an invitation.
	ErrNone = errors.New("this is not an invitation: paste all lines that isthmusctl peer invite has printed, from isthmus-invitation on")
	// ErrAltered says that a text is not as it was printed.
	ErrAltered = errors.New("the invitation is not as it was printed: a part is missing, or was changed on the way: paste all its lines again, or ask for a new one")
)

// Text returns the invitation as it is printed: a line that says what it is, with a
// checksum, and lines of base64.
func (i Invitation) Text() (string, error) {
	b, err := json.Marshal(i)
	if err != nil {
		return "", err
	}
	body := base64.RawURLEncoding.EncodeToString(b)
	var out strings.Builder
	fmt.Fprintf(&out, "%s %d %s\n", prefix, Version, sum(body))
	for line := range slices.Chunk([]byte(body), width) {
		out.Write(line)
		out.WriteByte('\n')
	}
	return out.String(), nil
}

func sum(body string) string {
	s := sha256.Sum256([]byte(body))
	return hex.EncodeToString(s[:])[:checksum]
}

// Parse returns the invitation of a text, however its lines are broken. An error is
// [ErrNone], [ErrAltered], or names the field that can't be right.
func Parse(text string) (Invitation, error) {
	if len(text) > maxText {
		return Invitation{}, ErrNone
	}
	words := strings.Fields(text)
	if len(words) == 0 || words[0] != prefix {
		return Invitation{}, ErrNone
	}
	if len(words) < 4 {
		return Invitation{}, ErrAltered
	}
	if words[1] != fmt.Sprint(Version) {
		return Invitation{}, fmt.Errorf("the invitation is of version %q, and this isthmusctl knows %d: use the same version of Isthmus on both sides", words[1], Version)
	}
	body := strings.Join(words[3:], "")
	if sum(body) != words[2] {
		return Invitation{}, ErrAltered
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(body)
	if err != nil {
		return Invitation{}, ErrAltered
	}
	var i Invitation
	if err := strict(b, &i); err != nil {
		return Invitation{}, fmt.Errorf("the invitation can't be read: %w", err)
	}
	return i, i.check()
}

// check returns the field of a text that can't be right.
func (i Invitation) check() error {
	bad := func(field string) error {
		return fmt.Errorf("the invitation's %s can't be right: ask for a new one", field)
	}
	switch {
	case !hexID.MatchString(i.ID):
		return bad("ID")
	case !clusterID.MatchString(i.From) || !clusterID.MatchString(i.To) || i.From == i.To:
		return bad("cluster ID")
	case i.Key == Key{} || i.PrivateKey == Key{}:
		return bad("key")
	case len(i.Addresses) == 0 || len(i.Addresses) > maxAddresses || slices.ContainsFunc(i.Addresses, func(a string) bool { return !host.MatchString(a) }) || i.Port == 0:
		return bad("endpoint")
	case i.MTU != 0 && (i.MTU < 576 || i.MTU > 65535):
		return bad("MTU")
	case i.Expires.IsZero():
		return bad("time of its end")
	}
	return nil
}
