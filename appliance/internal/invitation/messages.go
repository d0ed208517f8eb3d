package invitation

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"unicode"
)

// MaxMessage is the longest message between gateways, in bytes.
const MaxMessage = 4 << 10

// MaxNetworks is how many networks of a kind an answer or a reply may name.
const MaxNetworks = 32

// maxReason is the longest reason, in characters.
const maxReason = 600

// Networks are those of a cluster, as it calls them itself.
type Networks struct {
	Pod      []netip.Prefix `json:"pod"`
	External []netip.Prefix `json:"external"`
}

// An Offer is what a gateway needs for the temporary tunnel.
type Offer struct {
	// ID is that of the invitation.
	ID string `json:"id"`
	// Key is the public key of the other end: of the temporary peer for the gateway of
	// who invites, of that gateway for who is invited.
	Key Key `json:"key"`
	// PrivateKey is that of the temporary peer, for who is invited only.
	PrivateKey *Key `json:"privateKey,omitempty"`
}

// An Answer is what the invited side hands in.
type Answer struct {
	// ID is that of the invitation; From and To are the IDs of the cluster that answers
	// and of the one that has invited.
	ID   string `json:"id"`
	From string `json:"from"`
	To   string `json:"to"`
	// Key is the public key of its gateway, the one that lasts.
	Key Key `json:"key"`
	Networks
}

// A Verdict is what became of an answer.
type Verdict string

// The verdicts.
const (
	// Waiting: somebody has to say yes first; ask again.
	Waiting Verdict = "waiting"
	// Delayed: the controller there has not answered yet; ask again.
	Delayed Verdict = "delayed"
	Refused Verdict = "refused"
	// Accepted: the peering is made.
	Accepted Verdict = "accepted"
)

// A Reply is what the inviting side says to an answer.
type Reply struct {
	ID      string  `json:"id"`
	Verdict Verdict `json:"verdict"`
	Reason  string  `json:"reason,omitempty"` // unless accepted
	// PresharedKey is that of the peering, and Networks those of the inviting side, when
	// it is accepted.
	PresharedKey *Key `json:"presharedKey,omitempty"`
	Networks
}

// A Receipt says that an accepted reply has come to stay.
type Receipt struct {
	ID       string `json:"id"`
	Received bool   `json:"received"`
}

// A message is one of those.
type message interface {
	Offer | Answer | Reply | Receipt
}

// versioned is how a message is written.
type versioned[M message] struct {
	Version int `json:"version"`
	Message M   `json:"message"`
}

// Encode returns a message as one line of JSON.
func Encode[M message](m M) ([]byte, error) {
	b, err := json.Marshal(versioned[M]{Version, m})
	if err != nil {
		return nil, err
	}
	if len(b) >= MaxMessage {
		return nil, fmt.Errorf("a message of %d bytes is longer than %d", len(b), MaxMessage)
	}
	return append(b, '\n'), nil
}

// Decode returns the message that [Encode] has written. Unknown fields, other versions
// and what can't be are refused.
func Decode[M message](b []byte) (M, error) {
	var none M
	if len(b) > MaxMessage {
		return none, fmt.Errorf("a message of %d bytes is longer than %d", len(b), MaxMessage)
	}
	var v versioned[M]
	if err := strict(b, &v); err != nil {
		return none, err
	}
	if v.Version != Version {
		return none, fmt.Errorf("the message is of version %d, and %d is known here: use the same version of Isthmus on both sides", v.Version, Version)
	}
	var err error
	switch m := any(v.Message).(type) {
	case Offer:
		err = m.check()
	case Answer:
		err = m.check()
	case Reply:
		err = m.check()
	case Receipt:
		if !m.Received || !hexID.MatchString(m.ID) {
			err = errors.New("the receipt does not say that the reply was received")
		}
	}
	if err != nil {
		return none, err
	}
	return v.Message, nil
}

// Read reads one message and no more than [MaxMessage] bytes.
func Read[M message](r io.Reader) (M, error) {
	line, err := bufio.NewReader(io.LimitReader(r, MaxMessage)).ReadBytes('\n')
	if err != nil {
		var none M
		return none, fmt.Errorf("the message ends too soon, or is longer than %d bytes: %w", MaxMessage, err)
	}
	return Decode[M](line)
}

func strict(b []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more after its end")
	}
	return nil
}

func (o Offer) check() error {
	if !hexID.MatchString(o.ID) || o.Key == (Key{}) || o.PrivateKey != nil && *o.PrivateKey == (Key{}) {
		return errors.New("the offer has no ID or no key")
	}
	return nil
}

func (a Answer) check() error {
	switch {
	case !hexID.MatchString(a.ID):
		return errors.New("id: is not the ID of an invitation, 16 hexadecimal digits")
	case !clusterID.MatchString(a.From) || !clusterID.MatchString(a.To):
		return errors.New("from or to: is not a cluster ID")
	case a.Key == Key{}:
		return errors.New("key: is missing")
	}
	return a.Networks.check()
}

func (r Reply) check() error {
	if !hexID.MatchString(r.ID) {
		return errors.New("id: is not the ID of an invitation, 16 hexadecimal digits")
	}
	switch r.Verdict {
	case Accepted:
		if r.PresharedKey == nil || *r.PresharedKey == (Key{}) {
			return errors.New("presharedKey: is missing")
		}
		return r.Networks.check()
	case Waiting, Delayed, Refused:
		if r.PresharedKey != nil || len(r.Pod)+len(r.External) > 0 {
			return fmt.Errorf("verdict: is %s, and the reply has more than a reason", r.Verdict)
		}
		if r.Reason == "" || len(r.Reason) > maxReason || strings.ContainsFunc(r.Reason, func(c rune) bool { return !unicode.IsPrint(c) }) {
			return errors.New("reason: is missing, too long, or has characters that can't be printed")
		}
		return nil
	}
	return fmt.Errorf("verdict: %q is not a verdict; those are %s, %s, %s and %s", r.Verdict, Accepted, Waiting, Delayed, Refused)
}

func (n Networks) check() error {
	for _, list := range []struct {
		name     string
		prefixes []netip.Prefix
	}{{"pod", n.Pod}, {"external", n.External}} {
		if len(list.prefixes) == 0 || len(list.prefixes) > MaxNetworks {
			return fmt.Errorf("%s: has %d networks; it can have 1 to %d", list.name, len(list.prefixes), MaxNetworks)
		}
		if slices.ContainsFunc(list.prefixes, func(p netip.Prefix) bool { return !p.IsValid() || p != p.Masked() }) {
			return fmt.Errorf("%s: has an address with a length that is not a network, such as 10.0.0.7/16", list.name)
		}
	}
	return nil
}

// Equal reports whether two answers say the same.
func (a Answer) Equal(b Answer) bool {
	return a.ID == b.ID && a.From == b.From && a.To == b.To && a.Key == b.Key && slices.Equal(a.Pod, b.Pod) && slices.Equal(a.External, b.External)
}
