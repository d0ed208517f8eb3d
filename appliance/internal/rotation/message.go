package rotation

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/isthmus-net/isthmus/appliance/internal/invitation"
)

// A Message is the part about keys of what the gateways of a peering tell each other.
type Message struct {
	// Offer is the rotation that the side that tells has begun.
	Offer *Offer `json:"offer,omitempty"`
	// Ready is the ID of the offer that it has stored.
	Ready   string   `json:"ready,omitempty"`
	Refused *Refusal `json:"refused,omitempty"`
	// Committed is the ID of the last rotation of its own that was, and Ended the time of
	// the last one that ended.
	Committed string    `json:"committed,omitempty"`
	Ended     time.Time `json:"ended,omitzero"`
}

// An Offer names the next keys.
type Offer struct {
	ID string    `json:"id"`
	At time.Time `json:"at"` // when it was ordered; a later one has a later time
	// Key is public. PresharedKey is secret: it is for the tunnel only.
	Key          invitation.Key  `json:"key"`
	PresharedKey *invitation.Key `json:"presharedKey,omitempty"`
	// Compromised says that nothing of the keys before is to be kept.
	Compromised bool `json:"compromised,omitempty"`
}

// A Refusal says why an offer is not taken.
type Refusal struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
}

// maxReason is the longest reason, in bytes.
const maxReason = 400

// Check returns what can't be right in a message: what somebody else has written is not
// acted on before.
func (m Message) Check() error {
	for _, f := range []struct{ name, id string }{{"ready", m.Ready}, {"committed", m.Committed}} {
		if f.id != "" && !hexID.MatchString(f.id) {
			return fmt.Errorf("%s: is not the ID of a rotation, 16 hexadecimal digits", f.name)
		}
	}
	if o := m.Offer; o != nil {
		switch {
		case !hexID.MatchString(o.ID):
			return errors.New("offer.id: is not the ID of a rotation, 16 hexadecimal digits")
		case o.At.IsZero():
			return errors.New("offer.at: is missing")
		case o.Key == invitation.Key{}:
			return errors.New("offer.key: is missing")
		case o.PresharedKey != nil && *o.PresharedKey == invitation.Key{}:
			return errors.New("offer.presharedKey: is zero, which WireGuard takes for none")
		}
	}
	if r := m.Refused; r != nil {
		switch {
		case !hexID.MatchString(r.ID):
			return errors.New("refused.id: is not the ID of a rotation, 16 hexadecimal digits")
		case r.Reason == "" || len(r.Reason) > maxReason || strings.ContainsFunc(r.Reason, func(c rune) bool { return !unicode.IsPrint(c) }):
			return errors.New("refused.reason: is missing, too long, or has characters that can't be printed")
		}
	}
	return nil
}
